//! The command line.
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Compares naive 4-bit rollouts, QUADS and its relatives, arm by arm from the same warm-up checkpoints.
///
/// Without arguments: every series of series.toml with all its arms and seeds, which takes hours. --quick takes minutes.
/// A call that is interrupted goes on where it was when it is repeated; what is complete is never run again.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do; without one, runs what is missing.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the runs.
    #[command(flatten)]
    pub run: RunArgs,
}

const EXAMPLES: &str = "\
Examples:
  quads_ablation --quick                              two minutes, to see that it works
  quads_ablation --series calm,stress                 the two plain series
  quads_ablation --series hard --arms A,B,E           some of the arms
  quads_ablation --series calm --seeds 1-3 --jobs 8   some of the seeds, eight processes at once
  quads_ablation --list                               arms, series and rules
  quads_ablation report                               tables and pages from what is there

Exit code: 0 done, 1 something failed, 2 wrong arguments, 130 stopped by Ctrl-C, SIGTERM or SIGHUP (saved).";

/// Everything but running.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Writes results.json, tables and pages from what is there.
    Report {
        /// The folder of the runs [default: runs/ablation, or runs/ablation_quick].
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// The short run.
        #[arg(long)]
        quick: bool,
    },
    /// What the processes are told that do the work.
    #[command(hide = true)]
    Work {
        /// As JSON.
        work: String,
    },
}

/// Options of the runs.
#[derive(Args, Clone, Debug, Default)]
pub struct RunArgs {
    /// The short series of series.toml instead of the others.
    #[arg(long)]
    pub quick: bool,
    /// Series, or groups of them; without it all.
    #[arg(long, value_name = "NAME[,NAME]", value_delimiter = ',')]
    pub series: Vec<String>,
    /// How many seeds, or which: 3, 1-5, 2,4; without it as the series declare.
    #[arg(long, value_name = "N")]
    pub seeds: Option<Seeds>,
    /// Letters of arms; without it as the series declare.
    #[arg(long, value_name = "A[,B]", value_delimiter = ',')]
    pub arms: Vec<String>,
    /// Processes at once; without it as many as there are processors for (on a GPU one).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// Threads of each process.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: u16,
    /// cpu, or what the build has a feature for (vulkan, cuda:0).
    #[arg(long)]
    pub device: Option<String>,
    /// Where everything is kept [default: runs/ablation, or runs/ablation_quick].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Changes a setting of grpo_math for all arms of the selected series; may be given many times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Prints arms, series and rules, and stops.
    #[arg(long)]
    pub list: bool,
    /// Prints what would be run, and stops.
    #[arg(long)]
    pub dry_run: bool,
    /// Keeps the checkpoints of complete arms; without it the last one of each stays.
    #[arg(long)]
    pub keep_checkpoints: bool,
}

/// Seeds that are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seeds {
    /// The first so many that are declared.
    First(usize),
    /// These.
    These(Vec<u64>),
}

impl std::str::FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text}: expected a number of seeds, a range (1-5) or a list (2,4)");
        // Settings hold no larger ones.
        let number = |text: &str| match text.trim().parse::<u64>() {
            Ok(seed) if i64::try_from(seed).is_ok() => Ok(seed),
            _ => Err(expected()),
        };
        if let Ok(count) = text.trim().parse::<usize>() {
            return match count {
                0 => Err(expected()),
                count => Ok(Self::First(count)),
            };
        }
        let mut seeds = Vec::new();
        for part in text.split(',') {
            match part.split_once('-') {
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to)?);
                    if from > to || to - from > 1000 {
                        return Err(expected());
                    }
                    seeds.extend(from..=to);
                }
                None => seeds.push(number(part)?),
            }
        }
        Ok(Self::These(seeds))
    }
}

impl Seeds {
    /// These seeds, of those that are declared.
    pub fn of(&self, declared: &[u64]) -> Vec<u64> {
        match self {
            Self::First(count) => declared.iter().copied().take(*count).collect(),
            Self::These(seeds) => seeds.clone(),
        }
    }
}

impl RunArgs {
    /// Where everything is kept.
    pub fn out(&self) -> PathBuf {
        out(self.out.as_ref(), self.quick)
    }
}

/// `--out`, or the folder that is meant without it.
pub fn out(out: Option<&PathBuf>, quick: bool) -> PathBuf {
    let default = if quick { "runs/ablation_quick" } else { "runs/ablation" };
    out.cloned().unwrap_or_else(|| default.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn seeds_are_a_number_a_range_or_a_list() {
        let of = |text: &str| text.parse::<Seeds>().map(|seeds| seeds.of(&[1, 2, 3, 4, 5]));
        assert_eq!(of("3"), Ok(vec![1, 2, 3]));
        assert_eq!(of("9"), Ok(vec![1, 2, 3, 4, 5]));
        assert_eq!(of("2-4"), Ok(vec![2, 3, 4]));
        assert_eq!(of("2,7-8"), Ok(vec![2, 7, 8]));
        for wrong in ["0", "", "a", "3-1", "1-", "1,,2"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
