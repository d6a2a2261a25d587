//! Where the time of a step of GRPO went.
use std::time::Instant;

use crate::metrics::MetricsLine;

/// Seconds of the parts of a step.
pub struct Times {
    last: Instant,
    /// Sampling.
    pub rollout: f64,
    /// Scoring, learning.
    pub train: f64,
    /// Packing.
    pub sync: f64,
    /// Tokens sampled.
    pub tokens: usize,
}

impl Times {
    /// Begins with the first part.
    pub fn start() -> Self {
        Self {
            last: Instant::now(),
            rollout: 0.0,
            train: 0.0,
            sync: 0.0,
            tokens: 0,
        }
    }

    /// Seconds since the last lap.
    pub fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.last).as_secs_f64();
        self.last = now;
        seconds
    }

    /// Adds the parts to a line, with the seconds that an evaluation took.
    pub fn push_to(&self, line: &mut MetricsLine, evaluation: Option<f64>) {
        line.push("time/step_s", self.rollout + self.train + self.sync);
        line.push("time/rollout_s", self.rollout);
        line.push("time/train_s", self.train);
        line.push("time/sync_s", self.sync);
        line.push("time/eval_s", evaluation);
        let tokens = self.tokens as f64;
        line.push("perf/rollout_tokens_per_s", tokens / self.rollout);
        line.push("perf/train_tokens_per_s", tokens / self.train);
    }
}
