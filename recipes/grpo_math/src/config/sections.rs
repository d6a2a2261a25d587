//! The smaller sections of a configuration, one struct each. `default.toml` says what every setting does.
use std::path::PathBuf;

use burn_nvfp4::Precision;
use burn_quads::grpo::{LrSchedule, OptimizerConfig};

use super::{
    ConfigError, Layers, LearnerConfig, RacConfig,
    precision::{PRECISIONS, precision, read_precision},
};
use crate::backend;

type Result<T> = std::result::Result<T, ConfigError>;

/// Sizes that fit into memory long before they overflow.
pub(super) const MANY: usize = 1_000_000_000;
/// Problems of one set: more would take hours to evaluate.
pub(super) const MOST_PROBLEMS: usize = 1_000_000;
/// The rollout's precision, which every evaluation has.
pub const OWN: &str = "own";
/// Completions of one problem.
const MOST_SAMPLES: usize = 65_536;

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
        let device = layers.text("run.device");
        if device != backend::DEVICE {
            let expected = backend::DEVICE;
            return Err(layers.refuse(
                "run.device",
                match backend::feature_for(device) {
                    Some(feature) => {
                        format!(
                            "{expected}: this build has no other device; build with --features {feature} for that one"
                        )
                    }
                    None => format!("{expected}: this build has no other device"),
                },
            ));
        }
        Ok(Self {
            name,
            directory: layers.text("run.directory").into(),
            seed: layers.count("run.seed", 0..=i64::MAX as usize)? as u64,
        })
    }
}

/// `[warmup]`
#[derive(Clone, Debug)]
pub struct WarmupConfig {
    /// The run whose warm-up is used instead, or its checkpoint after that.
    pub from: Option<PathBuf>,
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
        let from = layers.text("warmup.from");
        Ok(Self {
            from: (!from.is_empty()).then(|| from.into()),
            target_accuracy: layers.number("warmup.target_accuracy", "above 0, at most 1", |a| a > 0.0 && a <= 1.0)?,
            validation_problems: layers.count("warmup.validation_problems", 1..=MOST_PROBLEMS)?,
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
    /// GRPO steps between two syncs; 1: every step samples the current policy.
    pub sync_every: usize,
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
            sync_every: layers.count("rollout.sync_every", 1..=MANY)?,
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
    /// Steps between two measurements of every layer's activations; 0: never.
    pub layers_every: usize,
}

impl MismatchConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            warn_above: layers.number("mismatch.warn_above", "0 or more", |gap| gap >= 0.0)?,
            decompose_every: layers.count("mismatch.decompose_every", 0..=MANY)?,
            layers_every: layers.count("mismatch.layers_every", 0..=MANY)?,
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
    /// Completions that are sampled of each.
    pub samples: usize,
    /// The k of pass@k, at most `samples`.
    pub pass_at: usize,
    /// What else than the rollout's precision the policy is evaluated in, by the name that was asked for.
    pub precisions: Vec<(String, Precision)>,
}

impl EvalConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        Ok(Self {
            every: layers.count("eval.every", 0..=MANY)?,
            problems: layers.count("eval.problems", 1..=MOST_PROBLEMS)?,
            samples: layers.count("eval.samples", 1..=MOST_SAMPLES)?,
            pass_at: layers.count("eval.pass_at", 1..=layers.count("eval.samples", 1..=MOST_SAMPLES)?)?,
            precisions: Self::precisions(layers)?,
        })
    }
}

impl EvalConfig {
    /// The precisions of `eval.precisions` but `own`, each name once.
    fn precisions(layers: &Layers) -> Result<Vec<(String, Precision)>> {
        let rac = RacConfig::read(layers)?.rac;
        let trainer = LearnerConfig::read(layers)?.precision;
        let names = layers
            .text("eval.precisions")
            .split([',', ' '])
            .filter(|name| !name.is_empty());
        let mut precisions: Vec<(String, Precision)> = vec![];
        for name in names.filter(|name| *name != OWN) {
            let named = match name {
                "trainer" => Some(trainer.clone()),
                name => precision(name, rac),
            };
            let Some(named) = named else {
                let known = PRECISIONS.join(", ");
                return Err(layers.refuse(
                    "eval.precisions",
                    format!("names out of {OWN}, trainer, {known}, not {name:?}"),
                ));
            };
            if precisions.iter().all(|(known, _)| known != name) {
                precisions.push((name.into(), named));
            }
        }
        Ok(precisions)
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
