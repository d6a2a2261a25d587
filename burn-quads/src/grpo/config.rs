//! Settings of the learner.
use serde::{Deserialize, Serialize};

use super::{Correction, CorrectionMode, GrpoError, LossConfig, OptimizerConfig, Overlong, ScaleRewards};

/// All settings of a GRPO learner.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Completions of each prompt.
    pub group_size: usize,
    /// What advantages are divided by.
    pub scale_rewards: ScaleRewards,
    /// The loss.
    pub loss: LossConfig,
    /// Where the old log-probs of the ratio come from.
    pub old_log_probs: OldLogProbs,
    /// Correction for rollouts of another policy than the trainer's.
    pub correction: Correction,
    /// Completions that ran into the length limit.
    pub overlong: Overlong,
    /// The length limit of completions in tokens: dr_grpo's constant, and where `overlong` begins.
    pub max_completion_length: usize,
    /// Temperature that the completions were sampled at; log-probs are taken at the same.
    pub temperature: f32,
    /// Passes over each batch.
    pub epochs: usize,
    /// Updates in each pass; the rows of a batch must divide by it.
    pub minibatches: usize,
    /// Rows that run forward and backward at once; gradients add up to the minibatch's. Absent: the whole minibatch.
    pub micro_batch_rows: Option<usize>,
    /// Rows that are scored at once, without gradients.
    pub score_rows: usize,
    /// Routes the trainer's tokens through the experts that the rollout chose (R3).
    pub routing_replay: bool,
    /// Seed of the order of rows.
    pub seed: u64,
    /// Updates of the parameters.
    pub optimizer: OptimizerConfig,
}

/// The old policy of the ratio that the loss clips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogProbs {
    /// The trainer's policy before the first update: the completions are scored again, and the rollout's own log-probs only
    /// measured against that (and corrected for, if asked).
    #[default]
    Trainer,
    /// The rollout's: the ratio is of the trainer now to the engine that sampled, so the gap between the two is in it, and
    /// clipped with it. A correction would weigh the same gap a second time and is refused.
    Rollout,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self {
            group_size: 8,
            scale_rewards: ScaleRewards::default(),
            loss: LossConfig::default(),
            old_log_probs: OldLogProbs::default(),
            correction: Correction::default(),
            overlong: Overlong::default(),
            max_completion_length: 1024,
            temperature: 1.0,
            epochs: 1,
            minibatches: 1,
            micro_batch_rows: None,
            score_rows: 256,
            routing_replay: false,
            seed: 0,
            optimizer: OptimizerConfig::default(),
        }
    }
}

impl GrpoConfig {
    /// Refuses settings that cannot work, by their name.
    pub fn validate(&self) -> Result<(), GrpoError> {
        if self.group_size < 2 {
            return Err(GrpoError::option(
                "group_size",
                "at least 2 (the advantage compares completions of one prompt)",
                self.group_size,
            ));
        }
        for (option, value) in [
            ("max_completion_length", self.max_completion_length),
            ("epochs", self.epochs),
            ("minibatches", self.minibatches),
            ("micro_batch_rows", self.micro_batch_rows.unwrap_or(1)),
            ("score_rows", self.score_rows),
        ] {
            if value == 0 {
                return Err(GrpoError::option(option, "at least 1", value));
            }
        }
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return Err(GrpoError::option(
                "temperature",
                "a finite number above 0 (greedy completions have no policy gradient)",
                self.temperature,
            ));
        }
        self.loss.validate()?;
        self.correction.validate()?;
        if self.old_log_probs == OldLogProbs::Rollout && self.correction.mode != CorrectionMode::None {
            return Err(GrpoError::option(
                "old_log_probs",
                "trainer with a correction: the ratio to the rollout's log-probs has the gap in it already",
                "rollout",
            ));
        }
        self.overlong.validate(self.max_completion_length)?;
        self.optimizer.validate()
    }

    /// Refuses numbers of rows that these settings cannot divide.
    pub fn validate_rows(&self, rows: usize) -> Result<(), GrpoError> {
        if rows == 0 || !rows.is_multiple_of(self.group_size) {
            return Err(GrpoError::batch(
                "rows",
                format!("a multiple of group_size ({})", self.group_size),
                rows,
            ));
        }
        if !rows.is_multiple_of(self.minibatches) {
            return Err(GrpoError::option(
                "minibatches",
                format!("a divisor of the batch's {rows} rows"),
                self.minibatches,
            ));
        }
        let minibatch = rows / self.minibatches;
        match self.micro_batch_rows {
            Some(micro) if micro > minibatch => Err(GrpoError::option(
                "micro_batch_rows",
                format!("at most the {minibatch} rows of a minibatch"),
                micro,
            )),
            _ => Ok(()),
        }
    }

    /// Updates that a batch leads to when none is left out.
    pub fn updates(&self) -> usize {
        self.epochs * self.minibatches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: fn(&mut GrpoConfig)) -> String {
        let mut config = GrpoConfig::default();
        change(&mut config);
        let result = config.validate().and_then(|()| config.validate_rows(16));
        result.unwrap_err().to_string()
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        assert!(error(|c| c.group_size = 1).starts_with("group_size: expected at least 2"));
        assert!(error(|c| c.epochs = 0).starts_with("epochs: expected at least 1, got 0"));
        assert!(error(|c| c.minibatches = 0).starts_with("minibatches: expected at least 1, got 0"));
        assert!(error(|c| c.micro_batch_rows = Some(0)).starts_with("micro_batch_rows: expected at least 1, got 0"));
        assert!(error(|c| c.score_rows = 0).starts_with("score_rows"));
        assert!(error(|c| c.max_completion_length = 0).starts_with("max_completion_length"));
        assert!(error(|c| c.temperature = 0.0).starts_with("temperature: expected a finite number above 0"));
        assert!(error(|c| c.loss.epsilon_low = Some(-0.2)).starts_with("loss.epsilon_low"));
        assert!(error(|c| c.correction.clip_max = Some(-1.0)).starts_with("correction.clip_max"));
        let twice = |c: &mut GrpoConfig| {
            c.old_log_probs = OldLogProbs::Rollout;
            c.correction.mode = CorrectionMode::Tis;
        };
        assert!(error(twice).starts_with("old_log_probs: expected trainer with a correction"));
        assert!(error(|c| c.overlong.mode = crate::grpo::OverlongMode::Soft).starts_with("overlong.cache"));
        assert!(error(|c| c.optimizer.beta_1 = -1.0).starts_with("optimizer.beta_1"));
        assert!(error(|c| c.group_size = 3).starts_with("rows: expected a multiple of group_size (3), got 16"));
        assert!(error(|c| c.minibatches = 3).starts_with("minibatches: expected a divisor of the batch's 16 rows"));
        let micro = |c: &mut GrpoConfig| (c.minibatches, c.micro_batch_rows) = (4, Some(5));
        assert!(error(micro).starts_with("micro_batch_rows: expected at most the 4 rows of a minibatch, got 5"));
    }

    #[test]
    fn an_unknown_key_is_refused_and_an_absent_one_has_its_default() {
        let config: GrpoConfig = serde_json::from_str(r#"{"loss": {"kind": "gspo"}, "seed": 3}"#).unwrap();
        assert_eq!(config.loss.kind, crate::grpo::LossKind::Gspo);
        assert_eq!((config.seed, config.group_size), (3, 8));
        let error = serde_json::from_str::<GrpoConfig>(r#"{"loss": {"clip": 1}}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `clip`"));
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<GrpoConfig>(&text).unwrap(), config);
    }
}
