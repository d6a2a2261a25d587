//! What a run is asked to do, checked before anything starts.
//!
//! [`Layers`] lays a file and `--set` over the shipped defaults; [`Config::read`] turns the result into typed settings
//! and refuses what cannot be, by key, value and what was expected.
mod data;
mod keys;
mod layers;
mod learner;
mod model;
mod precision;
mod problem_counts;
mod sections;
mod suggest;
mod task;

pub use data::{DataConfig, QUESTION, Verifier};
pub use keys::{Diverged, step_error};
pub use layers::{DEFAULTS, Layers};
pub use learner::LearnerConfig;
pub use model::ModelConfig;
pub use precision::{PRECISIONS, RacConfig, precision, precision_name};
pub use sections::{CheckpointConfig, EvalConfig, MismatchConfig, OWN, RolloutConfig, RunConfig, WarmupConfig};
pub use task::TaskConfig;

use std::path::{Path, PathBuf};

use crate::fingerprint::Fingerprint;

/// A setting that was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {error}")]
    Unreadable {
        /// Its path.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// The text is not TOML.
    #[error("{origin} is not TOML:\n{message}")]
    Syntax {
        /// The file.
        origin: String,
        /// The parser's words, with the line.
        message: String,
    },
    /// A `--set` without `=`.
    #[error("--set {0}: expected section.key=value")]
    Assignment(String),
    /// A key that does not exist.
    #[error("unknown setting {key} (from {origin}): {hint}")]
    Unknown {
        /// Dotted key.
        key: String,
        /// File or `--set`.
        origin: String,
        /// What may have been meant.
        hint: String,
    },
    /// A value of the wrong type, or out of range.
    #[error("{key} = {value} (from {origin}): expected {expected}")]
    Value {
        /// Dotted key.
        key: String,
        /// The value, as TOML.
        value: String,
        /// File, `--set` or the defaults.
        origin: String,
        /// What would do.
        expected: String,
    },
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Config {
    /// `[run]`
    pub run: RunConfig,
    /// `[task]`
    pub task: TaskConfig,
    /// `[data]` and `model.folder`; absent: the tasks, and a model that is made here.
    pub data: Option<DataConfig>,
    /// `[model]`
    pub model: ModelConfig,
    /// `[warmup]`
    pub warmup: WarmupConfig,
    /// `[grpo]` and `[trainer]`
    pub learner: LearnerConfig,
    /// `[rollout]`
    pub rollout: RolloutConfig,
    /// `[rac]`
    pub rac: RacConfig,
    /// `[mismatch]`
    pub mismatch: MismatchConfig,
    /// `[eval]`
    pub eval: EvalConfig,
    /// `[checkpoint]`
    pub checkpoint: CheckpointConfig,
    /// The whole of it as TOML, with comments.
    pub toml: String,
    /// A fingerprint of all settings that a resumed run may not change.
    pub fingerprint: String,
    /// What the user should know about settings that were not taken as they are.
    pub notes: Vec<String>,
}

/// Settings that may be given another value when a run is resumed: they do not change the steps already taken.
pub const RESUMABLE: [&str; 3] = ["grpo.steps", "checkpoint.every", "checkpoint.keep"];

/// A note on settings of what is made here where a model and problems come from files. Those that are as the defaults have
/// them are nobody's wish.
fn without_effect(layers: &Layers) -> Vec<String> {
    let defaults = Layers::defaults();
    let changed: Vec<&str> = layers
        .values()
        .zip(defaults.values())
        .filter(|((key, value), (_, default))| {
            let section = key.split('.').next().unwrap_or_default();
            *key != "model.folder" && ["model", "task", "warmup"].contains(&section) && value != default
        })
        .map(|((key, _), _)| key)
        .collect();
    match changed.is_empty() {
        true => vec![],
        false => vec![format!(
            "{}: without effect, as the model is loaded from {} and the problems from {}",
            changed.join(", "),
            layers.text("model.folder"),
            layers.text("data.train")
        )],
    }
}

impl Config {
    /// The defaults under a file and `--set` assignments.
    pub fn load(file: Option<&Path>, assignments: &[String]) -> Result<Self, ConfigError> {
        Self::read(&mut Layers::of_user(file, assignments)?)
    }

    /// Reads and checks every setting. Defaults that the task cannot fill are lowered in `layers` too.
    pub fn read(layers: &mut Layers) -> Result<Self, ConfigError> {
        let run = RunConfig::read(layers)?;
        let task = TaskConfig::read(layers)?;
        let data = DataConfig::read(layers)?;
        let mixture = task.mixture().map_err(|error| task.refuse(layers, &error))?;
        let notes = match data {
            Some(_) => without_effect(layers),
            None => problem_counts::fit(layers, &mixture, run.seed)?,
        };
        let layers = &*layers;
        let fingerprint = fingerprint(layers);
        let config = Self {
            run,
            task: TaskConfig::read(layers)?,
            data,
            model: ModelConfig::read(layers)?,
            warmup: WarmupConfig::read(layers)?,
            learner: LearnerConfig::read(layers)?,
            rollout: RolloutConfig::read(layers)?,
            rac: RacConfig::read(layers)?,
            mismatch: MismatchConfig::read(layers)?,
            eval: EvalConfig::read(layers)?,
            checkpoint: CheckpointConfig::read(layers)?,
            toml: layers.to_toml(),
            fingerprint,
            notes,
        };
        config.check_together(layers)?;
        debug_assert_eq!(layers.unread(), Vec::<String>::new());
        Ok(config)
    }

    /// What one setting alone does not show.
    fn check_together(&self, layers: &Layers) -> Result<(), ConfigError> {
        // New masks of an old policy would belong to neither.
        let sync_every = self.rollout.sync_every;
        if !self.rac.recalibrate_every.is_multiple_of(sync_every) {
            let expected = format!("0, or a multiple of rollout.sync_every = {sync_every}");
            return Err(layers.refuse("rac.recalibrate_every", expected));
        }
        let width = self.model.shape().hidden_size;
        if self.data.is_none() && self.model.outlier_channels > width {
            return Err(layers.refuse("model.outlier_channels", format!("at most {width}, model.hidden_size")));
        }
        if self.data.is_some() {
            if self.warmup.from.is_some() {
                return Err(layers.refuse(
                    "warmup.from",
                    "\"\": a model that is loaded (model.folder) has no warm-up",
                ));
            }
            return Ok(());
        }
        if self.task.train_problems < self.learner.prompts_per_step {
            let prompts = self.learner.prompts_per_step;
            return Err(layers.refuse(
                "task.train_problems",
                format!("at least grpo.prompts_per_step = {prompts}"),
            ));
        }
        let answer = self
            .task
            .mixture()
            .map_err(|error| self.task.refuse(layers, &error))?
            .max_answer_tokens();
        if self.rollout.max_new_tokens < answer {
            let expected = format!("at least {answer}, the longest answer with its end of sequence");
            return Err(layers.refuse("rollout.max_new_tokens", expected));
        }
        Ok(())
    }

    /// `run.directory/run.name`: where the run would like to be.
    pub fn wanted_folder(&self) -> PathBuf {
        self.run.directory.join(&self.run.name)
    }
}

/// Of the settings that fix a run's course. What is in the files that they name counts too, but in [`Problems::fingerprint`](crate::problems::Problems::fingerprint).
pub fn fingerprint(layers: &Layers) -> String {
    let mut hash = Fingerprint::default();
    // Folders and files may be moved or renamed.
    let paths = [
        "run.name",
        "run.directory",
        "model.folder",
        "data.train",
        "data.held_out",
        "warmup.from",
    ];
    let ignored = |key: &str| RESUMABLE.contains(&key) || paths.contains(&key);
    for (key, value) in layers.values().filter(|(key, _)| !ignored(key)) {
        hash.add(format!("{key}={value}\n").as_bytes());
    }
    hash.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(assignments: &[&str]) -> Result<Config, ConfigError> {
        let assignments: Vec<String> = assignments.iter().map(|a| a.to_string()).collect();
        Config::load(None, &assignments)
    }

    #[test]
    fn settings_that_a_loaded_model_does_not_have_are_noted() {
        let load = |settings: &[&str]| {
            let given = ["model.folder=x", "data.train=y"].iter().chain(settings);
            Config::load(None, &given.map(|setting| setting.to_string()).collect::<Vec<_>>()).unwrap()
        };
        // As in the settings of a run, where all are written down.
        assert_eq!(
            load(&["model.hidden_size=64", "warmup.max_steps=2000"]).notes,
            Vec::<String>::new()
        );
        let notes = load(&[
            "warmup.max_steps=7",
            "model.hidden_size=32",
            "grpo.steps=3",
            "task.chain_sum.weight=1",
        ])
        .notes;
        assert_eq!(
            notes,
            [
                "model.hidden_size, task.chain_sum.weight, warmup.max_steps: without effect, as the model is loaded from x and \
              the problems from y"
            ]
        );
    }

    #[test]
    fn the_defaults_are_read_to_the_last_key() {
        let mut layers = Layers::defaults();
        Config::read(&mut layers).unwrap();
        assert_eq!(layers.unread(), Vec::<String>::new());
    }

    #[test]
    fn impossible_settings_are_refused_by_key() {
        for (assignment, expected) in [
            (
                "run.seed=-1",
                "run.seed = -1 (from --set): expected a whole number from 0 to",
            ),
            (
                "run.name=a/b",
                "run.name = \"a/b\" (from --set): expected a folder's name",
            ),
            ("run.name=", "run.name = \"\" (from --set): expected a folder's name"),
            (
                "run.device=cuda:0",
                "run.device = \"cuda:0\" (from --set): expected cpu",
            ),
            (
                "grpo.group_size=1",
                "grpo.group_size = 1 (from --set): expected a whole number from 2 to",
            ),
            (
                "grpo.minibatches=3",
                "grpo.minibatches = 3 (from --set): expected a divisor of the 256 completions",
            ),
            (
                "trainer.micro_batch=65",
                "trainer.micro_batch = 65 (from --set): expected at most the 64 rows",
            ),
            (
                "trainer.precision=bf16",
                "trainer.precision = \"bf16\" (from --set): expected one of high, w4a16, w4a4",
            ),
            (
                "rollout.precision=nvfp4",
                "rollout.precision = \"nvfp4\" (from --set): expected one of high",
            ),
            (
                "rollout.temperature=0",
                "rollout.temperature = 0.0 (from --set): expected a number, above 0",
            ),
            (
                "rollout.max_new_tokens=4",
                "rollout.max_new_tokens = 4 (from --set): expected at least 5",
            ),
            (
                "rollout.sync_every=0",
                "rollout.sync_every = 0 (from --set): expected a whole number from 1 to",
            ),
            (
                "rac.fraction=0",
                "rac.fraction = 0.0 (from --set): expected a number, above 0, at most 1",
            ),
            (
                "task.addition.weight=0",
                "task.addition.weight = 0.0 (from --set): expected a weight above 0 for at least one",
            ),
            (
                "task.addition.digits=10",
                "task.addition.digits = 10 (from --set): expected 1 to 9",
            ),
            (
                "task.modular.operations=+/",
                "task.modular.operations = \"+/\" (from --set): expected one or more of + - *",
            ),
            (
                "task.train_problems=8",
                "task.train_problems = 8 (from --set): expected at least grpo.prompts_per_step = 32",
            ),
            ("model.head_dim=15", "model.head_dim = 15 (from --set): expected"),
            ("model.hidden_size=72", "model.hidden_size = 72 (from --set): expected"),
            (
                "model.outlier_channels=65",
                "model.outlier_channels = 65 (from --set): expected at most 64, model.hidden_size",
            ),
            (
                "eval.precisions=own, bf16",
                "eval.precisions = \"own, bf16\" (from --set): expected names out of own, trainer, high, w4a16, w4a4, \
                 w4a4_rac, fp8, not \"bf16\"",
            ),
            (
                "model.outlier_gain=0",
                "model.outlier_gain = 0.0 (from --set): expected a number, above 0",
            ),
            (
                "model.num_experts_per_tok=5",
                "model.num_experts_per_tok = 5 (from --set): expected",
            ),
        ] {
            let error = load(&[assignment]).expect_err(assignment).to_string();
            assert!(error.starts_with(expected), "{assignment}: {error}");
        }
    }

    #[test]
    fn precisions_of_an_evaluation_are_a_list_of_names() {
        use burn_nvfp4::Precision;
        let read = |list: &str| load(&[&format!("eval.precisions={list}")]).unwrap().eval.precisions;
        let named = |name: &str, precision| (name.to_string(), precision);
        assert_eq!(read("own"), []);
        assert_eq!(read(""), []);
        let both = [named("high", Precision::High), named("trainer", Precision::W4A16)];
        for list in ["high trainer", "own,high,trainer", "high, own,  trainer, high"] {
            assert_eq!(read(list), both, "{list}");
        }
    }

    #[test]
    fn a_loaded_model_has_no_warm_up_of_another_run() {
        let settings = ["model.folder=a", "data.train=b.jsonl", "warmup.from=runs/c"];
        let error = load(&settings).unwrap_err().to_string();
        let expected = "warmup.from = \"runs/c\" (from --set): expected \"\": a model that is loaded (model.folder) has no warm-up";
        assert_eq!(error, expected);
    }

    #[test]
    fn masks_are_remade_only_where_the_rollout_is_synced() {
        let load = |every: usize| {
            load(&["rollout.sync_every=2", &format!("rac.recalibrate_every={every}")]).map(|config| config.fingerprint)
        };
        assert!(load(0).is_ok() && load(4).is_ok());
        let error = load(3).unwrap_err().to_string();
        let expected = "rac.recalibrate_every = 3 (from --set): expected 0, or a multiple of rollout.sync_every = 2";
        assert_eq!(error, expected);
    }

    #[test]
    fn the_fingerprint_lets_a_run_be_moved_and_prolonged_only() {
        let of = |assignments: &[&str]| load(assignments).unwrap().fingerprint;
        let default = of(&[]);
        assert_eq!(
            of(&["grpo.steps=9", "checkpoint.keep=1", "run.name=x", "run.directory=/tmp"]),
            default
        );
        assert_ne!(of(&["run.seed=2"]), default);
        assert_ne!(of(&["trainer.learning_rate=1e-3"]), default);
    }
}
