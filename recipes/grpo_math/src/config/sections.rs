//! The sections of a configuration, one struct each. `default.toml` says what every setting does.
use std::path::PathBuf;

use burn_nvfp4::{Precision, Rac};
use burn_quads::{
    grpo::{
        Correction, CorrectionMode, GrpoConfig, LossConfig, LossKind, LrSchedule, LrShape, OptimizerConfig, Overlong,
        OverlongMode, ScaleRewards,
    },
    modules::moe_config::QuadsMoeConfig,
    tasks::{Addition, ChainSum, DigitOrder, Modular, Operation, TaskError, TaskMixture},
};
use kernels_cubecl::{Granularity, Selection};

use super::{ConfigError, Layers};
use crate::seeds;

type Result<T> = std::result::Result<T, ConfigError>;

/// Sizes that fit into memory long before they overflow.
const MANY: usize = 1_000_000_000;

/// `[run]`
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Name of the folder.
    pub name: String,
    /// Where runs are kept.
    pub directory: PathBuf,
    /// Everything random follows from it.
    pub seed: u64,
}

impl RunConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let name = layers.text("run.name").to_string();
        let forbidden = |c: char| c == '/' || c == '\\' || c.is_control();
        if name.trim().is_empty() || name == "." || name == ".." || name.contains(forbidden) {
            return Err(layers.refuse("run.name", "a folder's name"));
        }
        if layers.text("run.device") != "cpu" {
            return Err(layers.refuse("run.device", "cpu: this build has no other device"));
        }
        Ok(Self {
            name,
            directory: layers.text("run.directory").into(),
            seed: layers.count("run.seed", 0..=i64::MAX as usize)? as u64,
        })
    }
}

/// `[task]`
#[derive(Clone, Debug)]
pub struct TaskConfig {
    /// Different training problems.
    pub train_problems: usize,
    addition: (f64, usize, DigitOrder),
    chain_sum: (f64, usize, usize, bool),
    modular: (f64, usize, usize, Vec<Operation>),
}

impl TaskConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let weight = |key| layers.number(key, "0 or more", |weight| weight >= 0.0);
        let orders = [
            ("least_significant_first", DigitOrder::LeastSignificantFirst),
            ("most_significant_first", DigitOrder::MostSignificantFirst),
        ];
        let signs = layers.text("task.modular.operations");
        let operations: Option<Vec<_>> = signs.chars().map(Operation::from_sign).collect();
        let config = Self {
            train_problems: layers.count("task.train_problems", 1..=MANY)?,
            addition: (
                weight("task.addition.weight")?,
                layers.count("task.addition.digits", 0..=MANY)?,
                layers.choice("task.addition.order", &orders)?,
            ),
            chain_sum: (
                weight("task.chain_sum.weight")?,
                layers.count("task.chain_sum.terms", 0..=MANY)?,
                layers.count("task.chain_sum.modulus", 0..=MANY)?,
                layers.flag("task.chain_sum.subtract"),
            ),
            modular: (
                weight("task.modular.weight")?,
                layers.count("task.modular.modulus", 0..=MANY)?,
                layers.count("task.modular.max_operand", 0..=MANY)?,
                operations.ok_or_else(|| layers.refuse("task.modular.operations", "one or more of + - *"))?,
            ),
        };
        config.mixture().map_err(|error| config.refuse(layers, &error))?;
        Ok(config)
    }

    /// The tasks, to draw from.
    pub fn mixture(&self) -> std::result::Result<TaskMixture, TaskError> {
        let (weight, digits, order) = self.addition;
        let addition = Addition::new(digits as u32, order)?;
        let (chain_weight, terms, modulus, subtract) = self.chain_sum;
        let chain_sum = ChainSum::new(terms, modulus as u32, subtract)?;
        let (modular_weight, remainder, max_operand, operations) = &self.modular;
        let modular = Modular::new(*remainder as u32, *max_operand as u32, operations)?;
        TaskMixture::new(vec![
            (weight, Box::new(addition)),
            (chain_weight, Box::new(chain_sum)),
            (*modular_weight, Box::new(modular)),
        ])
    }

    /// A task's complaint, as one about a setting.
    pub(super) fn refuse(&self, layers: &Layers, error: &TaskError) -> ConfigError {
        match error {
            TaskError::Setting {
                task,
                setting,
                expected,
                ..
            } => layers.refuse(&format!("task.{task}.{setting}"), expected),
            TaskError::NoTask => layers.refuse("task.addition.weight", "a weight above 0 for at least one task"),
            TaskError::TooFew { .. } => layers.refuse("task.train_problems", error),
        }
    }
}

/// `[model]`
#[derive(Clone, Debug)]
pub struct ModelConfig {
    template: QuadsMoeConfig,
    /// Multiplies the first weights of all matrices.
    pub init_gain: f64,
}

impl ModelConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let size = |key| layers.count(key, 1..=65_536);
        let positive = |key| layers.number(key, "above 0", |number| number > 0.0);
        let template = QuadsMoeConfig::new(
            Self::UNKNOWN_VOCABULARY,
            size("model.hidden_size")?,
            size("model.num_hidden_layers")?,
            size("model.num_attention_heads")?,
            size("model.num_key_value_heads")?,
            size("model.head_dim")?,
            size("model.num_experts")?,
            size("model.num_experts_per_tok")?,
            size("model.moe_intermediate_size")?,
        )
        .with_norm_topk_prob(layers.flag("model.norm_topk_prob"))
        .with_rope_theta(positive("model.rope_theta")?)
        .with_rms_norm_eps(positive("model.rms_norm_eps")?);
        template.validate().map_err(|error| {
            let text = error.to_string();
            let (field, expected) = match &error {
                burn_quads::modules::moe_config::ConfigError::Field { field, expected, .. } => {
                    (*field, expected.as_str())
                }
                _ => ("hidden_size", text.as_str()),
            };
            // A complaint about a product of two settings is filed under the first.
            let key = format!("model.{}", field.split(' ').next().unwrap_or(field));
            layers.refuse(&key, format!("{field}: {expected}"))
        })?;
        let init_gain = positive("model.init_gain")?;
        Ok(Self { template, init_gain })
    }

    const UNKNOWN_VOCABULARY: usize = 1;

    /// The sizes; the vocabulary's is set by [`for_vocabulary`](Self::for_vocabulary).
    pub fn shape(&self) -> &QuadsMoeConfig {
        &self.template
    }

    /// The model's configuration for a vocabulary and sequences up to a length, in high precision.
    pub fn for_vocabulary(&self, tokens: usize, max_tokens: usize) -> QuadsMoeConfig {
        let mut config = self.template.clone();
        config.vocab_size = tokens;
        config.max_position_embeddings = max_tokens;
        config.precision = Precision::High;
        config
    }
}

/// `[warmup]`
#[derive(Clone, Debug)]
pub struct WarmupConfig {
    /// Stop at this pass@1.
    pub target_accuracy: f64,
    /// Problems that it is measured on.
    pub validation_problems: usize,
    /// Steps between two measurements.
    pub check_every: usize,
    /// Steps after which the warm-up gives up.
    pub max_steps: usize,
    /// Problems a step.
    pub batch_size: usize,
    /// The updates.
    pub optimizer: OptimizerConfig,
}

impl WarmupConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            target_accuracy: layers.number("warmup.target_accuracy", "above 0, at most 1", |a| a > 0.0 && a <= 1.0)?,
            validation_problems: layers.count("warmup.validation_problems", 1..=MANY)?,
            check_every: layers.count("warmup.check_every", 1..=MANY)?,
            max_steps: layers.count("warmup.max_steps", 0..=MANY)?,
            batch_size: layers.count("warmup.batch_size", 1..=1_000_000)?,
            optimizer: OptimizerConfig {
                schedule: LrSchedule::constant(layers.number("warmup.learning_rate", "above 0", |rate| rate > 0.0)?),
                weight_decay: layers.number("warmup.weight_decay", "0 or more", |decay| decay >= 0.0)? as f32,
                ..LearnerConfig::read(layers)?.grpo.optimizer
            },
        })
    }
}

/// `[grpo]` and `[trainer]`: what the learner is told, and how many prompts it is fed.
#[derive(Clone, Debug)]
pub struct LearnerConfig {
    /// Steps.
    pub steps: usize,
    /// Prompts a step.
    pub prompts_per_step: usize,
    /// The trainer's precision.
    pub precision: Precision,
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
        let truncated = [("keep", OverlongMode::Keep), ("mask", OverlongMode::Mask)];
        let shapes = [
            ("constant", LrShape::Constant),
            ("linear", LrShape::Linear),
            ("cosine", LrShape::Cosine),
        ];
        let not_negative = |key| layers.number(key, "0 or more", |number| number >= 0.0);
        let unless_zero = |key| Ok(Some(not_negative(key)? as f32).filter(|number| *number > 0.0));
        let decay = |key| layers.number(key, "0 or more, less than 1", |beta| (0.0..1.0).contains(&beta));
        let steps = layers.count("grpo.steps", 1..=MANY)?;
        let lr_warmup_steps = layers.count("trainer.lr_warmup_steps", 0..=MANY)?;
        let shape = layers.choice("trainer.lr_schedule", &shapes)?;
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
        // What is left are bounds of a loss, which its own check knows.
        self.grpo
            .validate()
            .map_err(|error| layers.refuse("grpo.loss", format!("settings that agree: {error}")))
    }

    /// Completions of a step.
    pub fn rows(&self) -> usize {
        self.prompts_per_step * self.grpo.group_size
    }
}

/// `[rac]`
#[derive(Clone, Debug)]
pub struct RacConfig {
    /// What is compensated, and how much of it.
    pub rac: Rac,
    /// Prompts that masks are calibrated on.
    pub calibration_prompts: usize,
    /// Steps between two calibrations; 0: once.
    pub recalibrate_every: usize,
}

impl RacConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let selections = [
            ("all", Selection::All),
            ("per_token", Selection::PerToken),
            ("calibrated", Selection::Calibrated),
        ];
        let granularities = [
            ("channel", Granularity::Channel),
            ("block16", Granularity::Block16),
            ("block64", Granularity::Block64),
        ];
        let fraction = layers.number("rac.fraction", "above 0, at most 1", |share| {
            share > 0.0 && share <= 1.0
        })?;
        Ok(Self {
            rac: Rac {
                selection: layers.choice("rac.selection", &selections)?,
                granularity: layers.choice("rac.granularity", &granularities)?,
                fraction: fraction as f32,
            },
            calibration_prompts: layers.count("rac.calibration_prompts", 1..=1_000_000)?,
            recalibrate_every: layers.count("rac.recalibrate_every", 0..=MANY)?,
        })
    }
}

/// The precisions, by the names that every setting and table uses.
pub const PRECISIONS: [&str; 5] = ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"];

/// A precision by its name; `rac` is what `w4a4_rac` compensates.
pub fn precision(name: &str, rac: Rac) -> Option<Precision> {
    match name {
        "high" => Some(Precision::High),
        "w4a16" => Some(Precision::W4A16),
        "w4a4" => Some(Precision::W4A4),
        "w4a4_rac" => Some(Precision::W4A4Rac(rac)),
        "fp8" => Some(Precision::Fp8),
        _ => None,
    }
}

/// The name of a precision, without what it compensates.
pub fn precision_name(precision: &Precision) -> &'static str {
    match precision {
        Precision::High => "high",
        Precision::W4A16 => "w4a16",
        Precision::W4A4 => "w4a4",
        Precision::W4A4Rac(_) => "w4a4_rac",
        Precision::Fp8 => "fp8",
    }
}

fn read_precision(layers: &Layers, key: &str) -> Result<Precision> {
    let rac = RacConfig::read(layers)?.rac;
    precision(layers.text(key), rac).ok_or_else(|| layers.refuse(key, format!("one of {}", PRECISIONS.join(", "))))
}

/// `[rollout]`
#[derive(Clone, Debug)]
pub struct RolloutConfig {
    /// What the policy is sampled in.
    pub precision: Precision,
    /// Of the softmax; the same on both sides.
    pub temperature: f64,
    /// Longest completion in tokens.
    pub max_new_tokens: usize,
    /// Completions decoded at once.
    pub slots: usize,
    /// Whether the trainer takes the rollout's experts.
    pub routing_replay: bool,
}

impl RolloutConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            precision: read_precision(layers, "rollout.precision")?,
            temperature: layers.number("rollout.temperature", "above 0", |temperature| temperature > 0.0)?,
            max_new_tokens: layers.count("rollout.max_new_tokens", 1..=65_536)?,
            slots: layers.count("rollout.slots", 1..=65_536)?,
            routing_replay: layers.flag("rollout.routing_replay"),
        })
    }
}

/// `[mismatch]`
#[derive(Clone, Debug)]
pub struct MismatchConfig {
    /// Mean |Δ log-prob| above which a step warns; 0: never.
    pub warn_above: f64,
    /// Steps between two decompositions; 0: never.
    pub decompose_every: usize,
}

impl MismatchConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            warn_above: layers.number("mismatch.warn_above", "0 or more", |gap| gap >= 0.0)?,
            decompose_every: layers.count("mismatch.decompose_every", 0..=MANY)?,
        })
    }
}

/// `[eval]`
#[derive(Clone, Debug)]
pub struct EvalConfig {
    /// Steps between two evaluations; 0: only first and last.
    pub every: usize,
    /// Held-out problems.
    pub problems: usize,
}

impl EvalConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            every: layers.count("eval.every", 0..=MANY)?,
            problems: layers.count("eval.problems", 1..=MANY)?,
        })
    }
}

/// `[checkpoint]`
#[derive(Clone, Debug)]
pub struct CheckpointConfig {
    /// Steps between two checkpoints; 0: only the last.
    pub every: usize,
    /// How many are kept.
    pub keep: usize,
}

impl CheckpointConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            every: layers.count("checkpoint.every", 0..=MANY)?,
            keep: layers.count("checkpoint.keep", 1..=MANY)?,
        })
    }
}
