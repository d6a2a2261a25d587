//! What a run achieved: the last table, and `results.json` for programs.
use serde::{Deserialize, Serialize};
use std::fmt;

/// Right answers on the held-out problems.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Share of right samples, at the rollout's temperature.
    #[serde(rename = "pass@1")]
    pub sampled: f64,
    /// Where `eval.pass_at` is more than 1.
    #[serde(rename = "pass@k", default, skip_serializing_if = "Option::is_none")]
    pub at_k: Option<PassAtK>,
    /// The likeliest token each time.
    pub greedy: f64,
}

/// The chance of a right answer among several samples, by the unbiased estimator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassAtK {
    /// How many samples.
    pub k: usize,
    /// Mean over the problems.
    pub share: f64,
}

/// One precision, on the final policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrecisionResult {
    /// Name.
    pub precision: String,
    /// Mean |Δ log-prob| of the final rollouts' tokens, this precision against the trainer.
    pub gap_mean: f64,
    /// Its 99th percentile.
    pub gap_p99: f64,
    /// Its largest value.
    pub gap_max: f64,
    /// On the held-out problems.
    #[serde(flatten)]
    pub accuracy: Accuracy,
}

/// What a run achieved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Of the run.
    pub seed: u64,
    /// Steps that the warm-up took.
    pub warmup_steps: usize,
    /// GRPO steps.
    pub grpo_steps: usize,
    /// Precision of the rollout.
    pub rollout_precision: String,
    /// Precision of the trainer.
    pub trainer_precision: String,
    /// Held-out problems.
    pub held_out_problems: usize,
    /// After the warm-up, in the rollout's precision.
    pub before: Accuracy,
    /// After the last step, in the rollout's precision.
    pub after: Accuracy,
    /// Completions whose tokens the gaps are measured on.
    pub completions: usize,
    /// The final policy in every precision.
    pub precisions: Vec<PrecisionResult>,
    /// What depends on the machine.
    pub machine: Machine,
}

/// What depends on the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Wall time, pauses between interruption and resumption not counted.
    pub total_s: f64,
    /// Largest resident memory of the process, where the system tells.
    pub peak_memory_mb: Option<f64>,
}

impl Results {
    /// Percentage points won on the held-out problems, sampled.
    pub fn points_won(&self) -> f64 {
        100.0 * (self.after.sampled - self.before.sampled)
    }
}

/// A share as a percentage with one digit.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A difference of log-probs, to three digits that mean something.
pub fn nats(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        small if small < 1e-4 => format!("{value:.1e}"),
        small if small < 0.1 => format!("{value:.4}"),
        small if small < 10.0 => format!("{value:.3}"),
        _ => format!("{value:.1}"),
    }
}

/// Minutes and seconds.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match seconds / 60 {
        0 => format!("{seconds} s"),
        minutes if minutes < 60 => format!("{minutes} min {:02} s", seconds % 60),
        minutes => format!("{} h {:02} min", minutes / 60, minutes % 60),
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.held_out_problems;
        writeln!(
            f,
            "Held-out accuracy ({problems} problems, rollout in {}):",
            self.rollout_precision
        )?;
        writeln!(f, "                         before     after    change")?;
        let mut rows = vec![("sampled (pass@1)".into(), self.before.sampled, self.after.sampled)];
        if let (Some(before), Some(after)) = (self.before.at_k, self.after.at_k) {
            rows.push((format!("sampled (pass@{})", after.k), before.share, after.share));
        }
        rows.push(("greedy".into(), self.before.greedy, self.after.greedy));
        for (name, before, after) in rows {
            let change = format!("{:+.1}", 100.0 * (after - before));
            writeln!(
                f,
                "  {name:<20} {:>8}  {:>8}  {change:>8}",
                percent(before),
                percent(after)
            )?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "The final policy in every precision; the gap is |Δ log-prob| to the {} trainer, in nats,\n\
             over the tokens of {} completions sampled in {}:",
            self.trainer_precision, self.completions, self.rollout_precision
        )?;
        writeln!(f, "  precision    sampled    greedy   mean gap  99th perc.   largest")?;
        for row in &self.precisions {
            writeln!(
                f,
                "  {:<10} {:>9} {:>9} {:>10} {:>11} {:>9}",
                row.precision,
                percent(row.accuracy.sampled),
                percent(row.accuracy.greedy),
                nats(row.gap_mean),
                nats(row.gap_p99),
                nats(row.gap_max)
            )?;
        }
        writeln!(f)?;
        write!(f, "Took {}", duration(self.machine.total_s))?;
        match self.machine.peak_memory_mb {
            Some(megabytes) => writeln!(f, ", at most {megabytes:.0} MB of memory."),
            None => writeln!(f, "."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(percent(0.30566), "30.6 %");
        assert_eq!(
            [0.0, 3.2e-6, 0.01234, 0.1234, 7.5, 12.3].map(nats),
            ["0", "3.2e-6", "0.0123", "0.123", "7.500", "12.3"]
        );
        assert_eq!(
            [12.4, 75.0, 3_720.0].map(duration),
            ["12 s", "1 min 15 s", "1 h 02 min"]
        );
    }
}
