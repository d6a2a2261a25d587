//! The command line.
use clap::{Args, Parser, Subcommand, builder::RangedU64ValueParser};
use std::path::PathBuf;

/// Trains a mixture-of-experts language model by GRPO on 4-bit (NVFP4) rollouts.
///
/// Without arguments: makes a tiny model, teaches it three-digit addition until it is right now and then, and improves it
/// by reinforcement learning, in a few minutes on a CPU. Everything is left in runs/grpo_math.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do; without one, a run.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// A run's options.
    #[command(flatten)]
    pub run: RunArgs,
    /// More on what happens (the same as RUST_LOG=debug).
    #[arg(short, long, global = true)]
    pub verbose: bool,
}

const EXAMPLES: &str = "\
Examples:
  grpo_math                                          the default run
  grpo_math --seed 2 --set grpo.steps=300            another seed, more steps
  grpo_math --precision w4a4 --name naive-rollout    another precision of the rollout
  grpo_math --print-config > mine.toml               all settings, with comments
  grpo_math --config mine.toml --set task.addition.digits=4
  grpo_math --model DIR --data gsm8k.jsonl           a model of Hugging Face's on problems in free text
  grpo_math --resume runs/grpo_math                  go on after Ctrl-C
  grpo_math gap --run runs/grpo_math                 the log-prob gap of every pairing after the warm-up
  grpo_math gap --run runs/grpo_math --export gap    the same, with all that another program needs to repeat it
  grpo_math drift --export gap                       how far this build's device is from the one that exported it

Exit code: 0 done, 1 error, 2 wrong arguments, 130 stopped by Ctrl-C, SIGTERM or SIGHUP (saved).";

/// Everything but a run.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measures how far rollout and trainer differ, in pairings of precisions, on completions of one policy.
    Gap(GapArgs),
    /// Compares this build's log-probs with those of a build for another device, on the policy and the tokens that it
    /// exported with gap --export.
    Drift {
        /// What gap --export wrote.
        #[arg(long, value_name = "FOLDER")]
        export: PathBuf,
        /// Prints one JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Writes plots and report.html of a run anew, from its metrics.jsonl.
    Report {
        /// The run's folder.
        #[arg(long, value_name = "DIR")]
        run: PathBuf,
    },
}

/// Options of a run.
#[derive(Args, Clone, Debug, Default)]
pub struct RunArgs {
    /// Settings, as TOML; what it leaves out is as in --print-config.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub config: Option<PathBuf>,
    /// Changes one setting; may be given many times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Short for --set run.name=NAME.
    #[arg(long, conflicts_with = "resume")]
    pub name: Option<String>,
    /// Short for --set run.seed=N.
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    pub seed: Option<u64>,
    /// Short for --set run.device=DEVICE: cpu, or what the build has a feature for (vulkan, cuda:0).
    #[arg(long, conflicts_with = "resume")]
    pub device: Option<String>,
    /// Short for --set rollout.precision=PRECISION: high, w4a16, w4a4, w4a4_rac or fp8.
    #[arg(long, conflicts_with = "resume")]
    pub precision: Option<String>,
    /// Trains this Qwen3-MoE or OLMoE folder of Hugging Face's instead of a model of its own; short for
    /// --set model.folder=DIR.
    #[arg(long, value_name = "DIR", requires = "data", conflicts_with = "resume")]
    pub model: Option<PathBuf>,
    /// Problems to train on, as JSON lines: question/answer, problem/solution or prompt/answer; short for
    /// --set data.train=FILE.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub data: Option<PathBuf>,
    /// Problems for evaluation, in the same form; short for --set data.held_out=FILE.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub held_out: Option<PathBuf>,
    /// Goes on with a run from its last checkpoint; only --set grpo.steps and checkpoint.* may change.
    #[arg(long, value_name = "RUN_DIR")]
    pub resume: Option<PathBuf>,
    /// Checks and prints all settings with their comments, those of a run with --resume, and the changes made here; and
    /// stops.
    #[arg(long)]
    pub print_config: bool,
}

impl RunArgs {
    /// All assignments, the short options last.
    pub fn assignments(&self) -> Vec<String> {
        // As TOML text: a path may look like a number.
        let path = |path: &Option<PathBuf>| {
            let path = path.as_ref()?;
            // So that the run can be resumed from anywhere.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Some(format!("{:?}", path.display().to_string()))
        };
        let short = [
            ("run.name", self.name.clone()),
            ("run.seed", self.seed.map(|seed| seed.to_string())),
            ("run.device", self.device.clone()),
            ("rollout.precision", self.precision.clone()),
            ("model.folder", path(&self.model)),
            ("data.train", path(&self.data)),
            ("data.held_out", path(&self.held_out)),
        ];
        let short = short
            .into_iter()
            .filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        self.set.iter().cloned().chain(short).collect()
    }
}

/// Options of `gap`.
#[derive(Args, Clone, Debug)]
pub struct GapArgs {
    /// The run's folder.
    #[arg(long, value_name = "DIR")]
    pub run: PathBuf,
    /// GRPO step of the checkpoint; 0 is the policy after the warm-up.
    #[arg(long, default_value_t = 0)]
    pub step: usize,
    /// Completions to sample from the policy in high precision, each of another held-out problem; without it 512, or as
    /// many as the task has problems.
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    pub completions: Option<usize>,
    /// Also writes, to a new folder, all that another program needs to measure the same gaps: the checkpoint as a Hugging
    /// Face folder in f32 (model/), the calibrated residual masks (residual_masks.safetensors), and the token ids with both
    /// sides' log-probs of every pairing (gap.json).
    #[arg(long, value_name = "FOLDER")]
    pub export: Option<PathBuf>,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
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
    fn short_options_are_settings() {
        let cli = Cli::parse_from(["grpo_math", "--seed", "3", "--name", "x", "--set", "grpo.steps=2"]);
        assert_eq!(cli.run.assignments(), ["grpo.steps=2", "run.name=x", "run.seed=3"]);
        assert!(Cli::try_parse_from(["grpo_math", "--resume", "x", "--seed", "1"]).is_err());
    }
}
