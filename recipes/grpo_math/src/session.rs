//! What all stages of a run share: settings, problems, files, the clock; and how a state of the run is saved and read.
use anyhow::{Result, bail};
use burn::{
    module::{AutodiffModule, Module, ModuleMapper, Param},
    tensor::Tensor,
};
use burn_nvfp4::Precision;
use burn_quads::{
    calibrate::Calibrator,
    checkpoint,
    grpo::{AdamWOptimizer, SkippedSteps},
    modules::{moe_config::QuadsMoeConfig, residual_masks::ResidualMasks},
};
use kernels_cubecl::Selection;
use std::{path::PathBuf, time::Instant};

use crate::{
    atomic_write::write_atomically,
    backend::{Policy, Trainer},
    checkpoints::{Checkpoint, Checkpoints, RunState},
    config::Config,
    language::Language,
    metrics::{MetricsFile, MetricsLine, Position},
    optimizer_state,
    problems::Problems,
    run_folder::RunFolder,
    sampling::Sampling,
    seeds,
    start::Start,
    step_lines::StepLines,
};

const MODEL: &str = "model.safetensors";
const MODEL_CONFIG: &str = "config.json";
/// The policy that the rollout samples, where it is not the one that is trained.
const ROLLOUT_MODEL: &str = "rollout_model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const MASKS: &str = "residual_masks.safetensors";

/// The optimizer of both stages.
pub type Optimizer = AdamWOptimizer<Trainer, Policy>;

/// A run under way.
pub struct Session<'a> {
    /// Its settings.
    pub config: &'a Config,
    /// Its folder.
    pub folder: &'a RunFolder,
    /// Its problems.
    pub problems: &'a Problems,
    /// The rollout engine.
    pub sampling: Sampling,
    /// Its checkpoints.
    pub checkpoints: Checkpoints,
    /// Which held-out problems were answered right, at the first and the last step.
    pub answers: StepLines,
    /// What quantization does to each layer's activations (`mismatch.layers_every`).
    pub layers: StepLines,
    metrics: MetricsFile,
    stop: &'a dyn Fn(Position) -> bool,
    started: Instant,
    elapsed_before: f64,
}

/// A policy with all that decides its next step, beside the settings.
pub struct Snapshot<'a> {
    /// Where it is.
    pub position: Position,
    /// The model: f32 masters.
    pub policy: &'a Policy,
    /// The policy that the next rollouts come from, where it is an older one.
    pub rollout_policy: Option<&'a Policy>,
    /// Its optimizer.
    pub optimizer: &'a Optimizer,
    /// Updates left out so far.
    pub skipped: SkippedSteps,
    /// Residual masks, once calibrated.
    pub masks: Option<&'a ResidualMasks>,
    /// Steps that the warm-up has taken.
    pub warmup_steps: usize,
}

/// A stage that ran to its end, or was stopped on the way.
pub enum Stage<T> {
    /// To its end.
    Done(T),
    /// Stopped after this step, and saved.
    Stopped(Position),
}

impl<'a> Session<'a> {
    /// Opens the run's files; those of a resumed run are cut to where its checkpoint is.
    pub fn open(start: &'a Start, stop: &'a dyn Fn(Position) -> bool) -> Result<Self> {
        let Start {
            config,
            folder,
            problems,
            resumed,
            warm,
            ..
        } = start;
        Ok(Self {
            sampling: Sampling::new(config, problems)?,
            checkpoints: Checkpoints::new(folder.checkpoints()),
            answers: match resumed {
                None => StepLines::new(folder.answers()),
                Some(resumed) => resumed.answers.clone(),
            },
            layers: match resumed {
                None => StepLines::new(folder.layers()),
                Some(resumed) => resumed.layers.clone(),
            },
            metrics: match resumed {
                None => match warm {
                    Some(warm) => MetricsFile::begin_with(&folder.metrics(), &warm.history)?,
                    None => MetricsFile::create(&folder.metrics())?,
                },
                Some(resumed) => MetricsFile::resume(&resumed.history)?,
            },
            config,
            folder,
            problems,
            stop,
            started: Instant::now(),
            elapsed_before: resumed
                .as_ref()
                .map_or(0.0, |resumed| resumed.checkpoint.state.elapsed_s),
        })
    }

    /// Wall time of the run, in seconds.
    pub fn elapsed(&self) -> f64 {
        self.elapsed_before + self.started.elapsed().as_secs_f64()
    }

    /// Whether the run shall stop after a step.
    pub fn stop_after(&self, position: Position) -> bool {
        (self.stop)(position)
    }

    /// Adds a line to `metrics.jsonl`.
    pub fn record(&mut self, line: &MetricsLine) -> Result<()> {
        self.metrics.write(line)
    }

    /// Saves a checkpoint, and removes those that are no longer wanted.
    pub fn save(&self, snapshot: &Snapshot<'_>) -> Result<PathBuf> {
        let state = RunState {
            position: snapshot.position,
            config_fingerprint: self.config.fingerprint.clone(),
            problems_fingerprint: self.problems.fingerprint.clone(),
            skipped: snapshot.skipped,
            warmup_steps: snapshot.warmup_steps,
            elapsed_s: self.elapsed(),
        };
        self.metrics.sync()?;
        let path = self.checkpoints.save(&state, |folder| {
            checkpoint::save(snapshot.policy, &folder.join(MODEL))?;
            match &self.problems.language {
                Language::Text(text) => text.write_beside_weights(folder)?,
                Language::Characters(_) => {
                    let config = snapshot.policy.config().to_json();
                    write_atomically(&folder.join(MODEL_CONFIG), config.as_bytes())?;
                }
            }
            if let Some(policy) = snapshot.rollout_policy {
                checkpoint::save(policy, &folder.join(ROLLOUT_MODEL))?;
            }
            optimizer_state::save(snapshot.optimizer, snapshot.policy, &folder.join(OPTIMIZER))?;
            if let Some(masks) = snapshot.masks {
                masks.save(&folder.join(MASKS))?;
            }
            Ok(())
        })?;
        self.checkpoints.prune(self.config.checkpoint.keep)?;
        Ok(path)
    }
}

/// The sizes of a run's model.
pub fn model_config(config: &Config, problems: &Problems) -> QuadsMoeConfig {
    match &problems.language {
        Language::Text(text) => text.model().config().clone(),
        Language::Characters(vocabulary) => {
            let longest = problems.max_prompt_tokens() + config.rollout.max_new_tokens;
            config.model.for_vocabulary(vocabulary.len(), longest)
        }
    }
}

/// The policy of a run before its first step.
pub fn fresh_policy(config: &Config, problems: &Problems) -> Result<Policy> {
    if let Language::Text(text) = &problems.language {
        return text.load_model();
    }
    let seed = seeds::seed(config.run.seed, "weights", 0);
    let policy: Policy = model_config(config, problems).init_seeded(seed, &Default::default());
    Ok(policy.map(&mut Gain {
        module: Vec::new(),
        gain: config.model.init_gain,
    }))
}

/// Multiplies the matrices; the embedding and the norms stay as they are.
struct Gain {
    module: Vec<String>,
    gain: f64,
}

impl ModuleMapper<Trainer> for Gain {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.module.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.module.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Trainer, D>>) -> Param<Tensor<Trainer, D>> {
        let embedding = self.module.iter().any(|name| name == "embed_tokens");
        match D == 1 || embedding {
            true => param,
            false => param.map(|weight| Tensor::from_inner(weight.inner() * self.gain).require_grad()),
        }
    }
}

/// The policy of a checkpoint, with its residual masks.
pub fn read_policy(
    config: &Config,
    problems: &Problems,
    checkpoint: &Checkpoint,
) -> Result<(Policy, Option<ResidualMasks>)> {
    let blank = model_config(config, problems).init(&Default::default());
    let policy = checkpoint::load(blank, &checkpoint.path.join(MODEL))?;
    let masks = checkpoint.path.join(MASKS);
    let masks = masks.exists().then(|| ResidualMasks::load(&masks)).transpose()?;
    Ok((policy, masks))
}

/// The policy that the rollouts after a checkpoint come from, where it is older than the checkpoint's own.
pub fn read_rollout_policy(config: &Config, problems: &Problems, checkpoint: &Checkpoint) -> Result<Policy> {
    let blank = model_config(config, problems).init(&Default::default());
    Ok(checkpoint::load(blank, &checkpoint.path.join(ROLLOUT_MODEL))?)
}

/// The optimizer of a checkpoint, for the policy read from it.
pub fn read_optimizer(fresh: Optimizer, policy: &Policy, checkpoint: &Checkpoint) -> Result<Optimizer> {
    optimizer_state::load(fresh, policy, &checkpoint.path.join(OPTIMIZER))
}

/// Refuses a checkpoint of other settings.
pub fn check_fingerprint(folder: &RunFolder, config: &Config, checkpoint: &Checkpoint) -> Result<()> {
    check_settings(folder, &config.fingerprint, checkpoint)
}

/// Refuses a checkpoint of other settings than those with this fingerprint.
pub fn check_settings(folder: &RunFolder, fingerprint: &str, checkpoint: &Checkpoint) -> Result<()> {
    if checkpoint.state.config_fingerprint != fingerprint {
        bail!(
            "{} is not the one that this run was made with: undo the changes, or start a new run with --config {}",
            folder.config().display(),
            folder.config().display()
        );
    }
    Ok(())
}

/// Refuses a checkpoint of other problems, another tokenizer or another model.
pub fn check_problems(config: &Config, problems: &Problems, checkpoint: &Checkpoint) -> Result<()> {
    let Some(data) = config
        .data
        .as_ref()
        .filter(|_| checkpoint.state.problems_fingerprint != problems.fingerprint)
    else {
        return Ok(());
    };
    bail!(
        "{}: the problems have changed since the run began, or the tokenizer, chat template or configuration of {}: put them \
         back as they were, or start a new run",
        data.train.display(),
        data.model.display()
    )
}

/// Whether a precision compensates calibrated channels.
pub fn needs_masks(precision: &Precision) -> bool {
    matches!(precision, Precision::W4A4Rac(rac) if rac.selection == Selection::Calibrated)
}

/// Residual masks of a policy, calibrated on training problems with their answers.
pub fn calibrate(config: &Config, problems: &Problems, policy: &Policy) -> Result<ResidualMasks> {
    let rac = config.rac.rac;
    // As the rollout's matmuls see them: 4-bit weights upstream.
    let model = policy.clone().valid().with_precision(Precision::W4A16)?;
    let calibrator = Calibrator::new(&model);
    calibrator.run(&calibration_sequences(config, problems)?, 256);
    Ok(calibrator.masks(rac.granularity, rac.fraction)?)
}

/// Training problems with their answers, as the model reads them.
pub fn calibration_sequences(config: &Config, problems: &Problems) -> Result<Vec<Vec<u32>>> {
    let mut sequences = Vec::new();
    for problem in problems.training.iter().take(config.rac.calibration_prompts) {
        let mut sequence = problems.language.prompt(problem)?;
        sequence.extend(problems.language.answer(problem)?);
        // The last token is only ever written, never read.
        sequence.pop();
        sequences.push(sequence);
    }
    Ok(sequences)
}
