//! `[grpo]` and `[trainer]`: how the policy learns.
use burn_nvfp4::Precision;
use burn_quads::{
    Backward,
    grpo::{
        Correction, CorrectionMode, GrpoConfig, LossConfig, LossKind, LrSchedule, LrShape, OldLogProbs,
        OptimizerConfig, Overlong, OverlongMode, ScaleRewards,
    },
};

use super::{ConfigError, Layers, RolloutConfig, RunConfig, keys, precision::read_precision, sections::MANY};
use crate::seeds;

type Result<T> = std::result::Result<T, ConfigError>;

/// `[grpo]` and `[trainer]`: what the learner is told, and how many prompts it is fed.
#[derive(Clone, Debug)]
pub struct LearnerConfig {
    /// Steps.
    pub steps: usize,
    /// Prompts a step.
    pub prompts_per_step: usize,
    /// The trainer's precision.
    pub precision: Precision,
    /// Its straight-through gradient.
    pub backward: Backward,
    /// Everything else, in the library's terms.
    pub grpo: GrpoConfig,
}

impl LearnerConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let losses = [
            ("grpo", LossKind::Grpo),
            ("bnpo", LossKind::Bnpo),
            ("dr_grpo", LossKind::DrGrpo),
            ("dapo", LossKind::Dapo),
            ("cispo", LossKind::Cispo),
            ("gspo", LossKind::Gspo),
        ];
        let scalings = [
            ("group", ScaleRewards::Group),
            ("batch", ScaleRewards::Batch),
            ("none", ScaleRewards::None),
        ];
        let corrections = [
            ("none", CorrectionMode::None),
            ("tis", CorrectionMode::Tis),
            ("icepop", CorrectionMode::Icepop),
            ("sequence_truncate", CorrectionMode::SequenceTruncate),
            ("sequence_mask", CorrectionMode::SequenceMask),
            ("sequence_mask_mean", CorrectionMode::SequenceMaskMean),
        ];
        let old_log_probs = [("trainer", OldLogProbs::Trainer), ("rollout", OldLogProbs::Rollout)];
        let truncated = [("keep", OverlongMode::Keep), ("mask", OverlongMode::Mask)];
        let backwards = [
            ("quantized", Backward::Quantized),
            ("unquantized", Backward::Unquantized),
        ];
        let shapes = [
            ("constant", LrShape::Constant),
            ("linear", LrShape::Linear),
            ("cosine", LrShape::Cosine),
        ];
        let not_negative = |key| layers.number(key, "0 or more", |number| number >= 0.0);
        let unless_zero = |key| Ok(Some(not_negative(key)? as f32).filter(|number| *number > 0.0));
        let decay = |key| layers.number(key, "0 or more, less than 1", |beta| (0.0..1.0).contains(&beta));
        let steps = layers.count("grpo.steps", 0..=MANY)?;
        let lr_warmup_steps = layers.count("trainer.lr_warmup_steps", 0..=MANY)?;
        let shape = layers.choice("trainer.lr_schedule", &shapes)?;
        // Without a step there is no rate to fall.
        let shape = if steps == 0 { LrShape::Constant } else { shape };
        if shape != LrShape::Constant && lr_warmup_steps >= steps {
            return Err(layers.refuse("trainer.lr_warmup_steps", format!("fewer than grpo.steps = {steps}")));
        }
        let micro_batch = layers.count("trainer.micro_batch", 0..=MANY)?;
        let grpo = GrpoConfig {
            group_size: layers.count("grpo.group_size", 2..=1_000_000)?,
            scale_rewards: layers.choice("grpo.scale_rewards", &scalings)?,
            loss: LossConfig {
                kind: layers.choice("grpo.loss", &losses)?,
                epsilon_low: unless_zero("grpo.clip_low")?,
                epsilon_high: unless_zero("grpo.clip_high")?,
                delta: unless_zero("grpo.clip_two_sided")?,
                beta: not_negative("grpo.kl_coefficient")? as f32,
                ..LossConfig::default()
            },
            old_log_probs: layers.choice("grpo.old_log_probs", &old_log_probs)?,
            correction: Correction {
                mode: layers.choice("grpo.correction", &corrections)?,
                ..Correction::default()
            },
            overlong: Overlong {
                mode: layers.choice("grpo.truncated", &truncated)?,
                ..Overlong::default()
            },
            max_completion_length: layers.count("rollout.max_new_tokens", 1..=65_536)?,
            temperature: RolloutConfig::read(layers)?.temperature as f32,
            epochs: 1,
            minibatches: layers.count("grpo.minibatches", 1..=1_000_000)?,
            micro_batch_rows: (micro_batch > 0).then_some(micro_batch),
            score_rows: 256,
            routing_replay: layers.flag("rollout.routing_replay"),
            seed: seeds::seed(RunConfig::read(layers)?.seed, "minibatches", 0),
            optimizer: OptimizerConfig {
                schedule: LrSchedule {
                    learning_rate: layers.number("trainer.learning_rate", "above 0", |rate| rate > 0.0)?,
                    warmup_steps: lr_warmup_steps,
                    shape,
                    total_steps: steps,
                },
                beta_1: decay("trainer.beta_1")? as f32,
                beta_2: decay("trainer.beta_2")? as f32,
                epsilon: layers.number("trainer.epsilon", "above 0", |epsilon| epsilon > 0.0)? as f32,
                weight_decay: not_negative("trainer.weight_decay")? as f32,
                max_grad_norm: unless_zero("trainer.max_grad_norm")?,
                max_skipped_steps: layers.count("trainer.max_skipped_steps", 0..=MANY)?,
            },
        };
        let config = Self {
            steps,
            prompts_per_step: layers.count("grpo.prompts_per_step", 1..=1_000_000)?,
            precision: read_precision(layers, "trainer.precision")?,
            backward: layers.choice("trainer.backward", &backwards)?,
            grpo,
        };
        config.check(layers)?;
        Ok(config)
    }

    /// What one setting alone does not show.
    fn check(&self, layers: &Layers) -> Result<()> {
        let rows = self.rows();
        if !rows.is_multiple_of(self.grpo.minibatches) {
            return Err(layers.refuse(
                "grpo.minibatches",
                format!("a divisor of the {rows} completions of a step (grpo.prompts_per_step · grpo.group_size)"),
            ));
        }
        let minibatch = rows / self.grpo.minibatches;
        if self.grpo.micro_batch_rows.is_some_and(|micro| micro > minibatch) {
            return Err(layers.refuse(
                "trainer.micro_batch",
                format!("at most the {minibatch} rows of a minibatch"),
            ));
        }
        let loss = &self.grpo.loss;
        let upper_clip = 1.0 + loss.epsilons().1 as f32;
        if loss.kind != LossKind::Cispo && loss.delta.is_some_and(|delta| delta <= upper_clip) {
            return Err(layers.refuse(
                "grpo.clip_two_sided",
                format!("0, or above {upper_clip} (1 + the upper clip, grpo.clip_high)"),
            ));
        }
        // What is left are bounds of a loss, which its own check knows.
        self.grpo.validate().map_err(|error| keys::refuse(layers, &error))
    }

    /// Completions of a step.
    pub fn rows(&self) -> usize {
        self.prompts_per_step * self.grpo.group_size
    }
}
