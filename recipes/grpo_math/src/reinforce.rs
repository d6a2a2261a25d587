//! GRPO on quantized rollouts: sample, reward, learn, pack the new weights.
use anyhow::{Result, bail};
use burn::module::AutodiffModule;
use burn_nvfp4::{Precision, Selection};
use burn_quads::{
    activation_errors::ActivationError,
    grpo::{Learner, RolloutBatch},
    mismatch::Decomposition,
    modules::residual_masks::ResidualMasks,
    sync::sync,
};
use serde::Serialize;
use std::time::Instant;

use crate::{
    backend::{Policy, Sampler, Trainer},
    config::{Config, OWN, step_error},
    metrics::{HELD_OUT, HELD_OUT_GREEDY, MetricsLine, Position, held_out_at, held_out_in},
    problems::Problems,
    progress::Progress,
    results::{Accuracy, nats, percent},
    sampling::Rollouts,
    scoring::{token_log_probs, weights_and_activations},
    seeds,
    session::{
        Session, Snapshot, Stage, calibrate, calibration_sequences, needs_masks, read_optimizer, read_policy,
        read_rollout_policy,
    },
    start::Resumed,
    times::Times,
    warmup::Warm,
};

/// What an evaluation found.
struct Evaluation {
    /// In the rollout's precision.
    accuracy: Accuracy,
    /// Pass@1 in each of `eval.precisions`.
    others: Vec<f64>,
    seconds: f64,
}

/// A line of `answers.jsonl`.
#[derive(Serialize)]
struct Answers<'a> {
    step: usize,
    precision: &'a str,
    /// 1 for a right completion, else 0: `eval.samples` of the first held-out problem, then of the second, and so on.
    right: String,
}

/// A line of `layers.jsonl`.
#[derive(Serialize)]
struct LayerLine<'a> {
    step: usize,
    layer: &'a str,
    error_w4a4: Option<f64>,
    error_rollout: Option<f64>,
    largest_over_median: Option<f64>,
    captured: Option<f64>,
}

/// The learner of this stage.
pub type GrpoLearner = Learner<Trainer, Policy>;

/// A policy that is trained by GRPO, with its packed copy.
pub struct Reinforced {
    /// The policy and its optimizer.
    pub learner: GrpoLearner,
    /// The rollout's model: the policy of the last sync.
    pub sampler: Sampler,
    /// The policy of the last sync, where it may be older than the learner's (`rollout.sync_every`).
    synced: Option<Policy>,
    /// Residual masks, where a precision needs them.
    pub masks: Option<ResidualMasks>,
    /// Which layers are packed, as a table.
    pub audit: String,
    /// Steps that the warm-up took.
    pub warmup_steps: usize,
    step: usize,
}

impl Reinforced {
    /// Begins with a policy that is warm.
    pub fn begin(config: &Config, problems: &Problems, warm: Warm) -> Result<Self> {
        // Where no side is compensated the last table still is, in the selection asked for.
        let wanted = config.rac.rac.selection == Selection::Calibrated;
        let policy = with_outliers(config, warm.policy, warm.outlier_channels)?;
        let masks = wanted.then(|| calibrate(config, problems, &policy)).transpose()?;
        let policy = in_training(config, policy, masks.as_ref())?;
        let learner = Learner::new(policy, config.learner.grpo)?;
        Self::new(config, learner, None, masks, warm.steps, 0)
    }

    /// Goes on from a checkpoint.
    pub fn resume(config: &Config, problems: &Problems, resumed: &Resumed) -> Result<Self> {
        let Resumed { checkpoint, first, .. } = resumed;
        let state = &checkpoint.state;
        let step = match state.position {
            Position::Grpo(step) => step,
            Position::Warmup(_) => 0,
        };
        let (policy, masks) = read_policy(config, problems, checkpoint)?;
        let optimizer = read_optimizer(config.learner.grpo.optimizer.init(), &policy, checkpoint)?;
        let mut learner = Learner::new(in_training(config, policy, masks.as_ref())?, config.learner.grpo)?;
        learner.restore(optimizer, step, state.skipped);
        if let Some(first) = first {
            let (reference, masks) = read_policy(config, problems, first)?;
            learner.set_reference(in_training(config, reference, masks.as_ref())?.valid());
        }
        let synced = match step.is_multiple_of(config.rollout.sync_every) {
            true => None,
            false => {
                let policy = read_rollout_policy(config, problems, checkpoint)?;
                Some(in_training(config, policy, masks.as_ref())?)
            }
        };
        Self::new(config, learner, synced, masks, state.warmup_steps, step)
    }

    fn new(
        config: &Config,
        learner: GrpoLearner,
        older: Option<Policy>,
        masks: Option<ResidualMasks>,
        warmup_steps: usize,
        step: usize,
    ) -> Result<Self> {
        let policy = older.as_ref().unwrap_or(learner.model());
        let (sampler, audit) = sync(policy, &config.rollout.precision, masks.as_ref())?;
        Ok(Self {
            synced: (config.rollout.sync_every > 1).then(|| policy.clone()),
            learner,
            sampler,
            masks,
            audit: audit.to_string(),
            warmup_steps,
            step,
        })
    }

    /// Trains until the last step, or until somebody wants it to stop. Leaves a checkpoint either way.
    pub fn train(&mut self, session: &mut Session<'_>) -> Result<Stage<()>> {
        let config = session.config;
        let steps = config.learner.steps;
        let every = |period: usize, step: usize| step == steps || (period > 0 && step.is_multiple_of(period));
        let progress = Progress::new("GRPO", self.step, steps);
        let mut held_out = None;
        let mut warned = false;
        if self.step == 0 {
            let mut line = MetricsLine::new(Position::Grpo(0));
            let evaluation = self.evaluate(session)?;
            evaluation_metrics(&mut line, config, Some(&evaluation));
            line.push("time/eval_s", evaluation.seconds);
            session.record(&line)?;
            if config.mismatch.layers_every > 0 {
                self.measure_layers(session)?;
            }
            session.save(&self.snapshot(config))?;
            held_out = Some((evaluation.accuracy.sampled, 0));
            if steps > 0 && session.stop_after(Position::Grpo(0)) {
                progress.finish();
                return Ok(Stage::Stopped(Position::Grpo(0)));
            }
        }
        while self.step < steps {
            let mut line = MetricsLine::new(Position::Grpo(self.step + 1));
            let times = self.one_step(session, &mut line, &progress, &mut warned)?;
            let evaluation = every(config.eval.every, self.step)
                .then(|| self.evaluate(session))
                .transpose()?;
            evaluation_metrics(&mut line, config, evaluation.as_ref());
            times.push_to(&mut line, evaluation.as_ref().map(|evaluation| evaluation.seconds));
            session.record(&line)?;
            if config.mismatch.layers_every > 0 && every(config.mismatch.layers_every, self.step) {
                self.measure_layers(session)?;
            }

            held_out = evaluation
                .map(|evaluation| (evaluation.accuracy.sampled, self.step))
                .or(held_out);
            let number = |name: &str| line.get(name).unwrap_or(f64::NAN);
            let (reward, gap) = (number("reward/mean"), number("sampling/sampling_logp_difference/mean"));
            // Evaluations are rare: the line says which one it repeats.
            let held_out = held_out.map_or("-".into(), |(share, step)| format!("{} at step {step}", percent(share)));
            progress.step(
                self.step,
                format!("reward {reward:.2}  held-out {held_out}  gap {}", nats(gap)),
            );

            let stop = self.step < steps && session.stop_after(Position::Grpo(self.step));
            if stop || every(config.checkpoint.every, self.step) {
                session.save(&self.snapshot(config))?;
            }
            if stop {
                progress.finish();
                return Ok(Stage::Stopped(Position::Grpo(self.step)));
            }
        }
        progress.finish();
        Ok(Stage::Done(()))
    }

    /// Samples, learns, packs; adds all that was measured to `line`, but for evaluation and times.
    fn one_step(
        &mut self,
        session: &mut Session<'_>,
        line: &mut MetricsLine,
        progress: &Progress,
        warned: &mut bool,
    ) -> Result<Times> {
        let (config, problems, step) = (session.config, session.problems, self.step + 1);
        let group_size = config.learner.grpo.group_size;
        let mut times = Times::start();

        let prompts = problems.batch(self.next_problem(config), config.learner.prompts_per_step);
        let grouped: Vec<_> = prompts
            .iter()
            .flat_map(|problem| std::iter::repeat_n(*problem, group_size))
            .collect();
        let seed = seeds::seed(config.run.seed, "rollout", step as u64);
        let rollouts = session.sampling.rollouts(&self.sampler, &grouped, seed)?;
        let tokens = rollouts.tokens();
        times.rollout = times.lap();

        // The decomposition needs the rollout's weights as they were, so their log-probs come before the update.
        let decompose = config.mismatch.decompose_every;
        let scored = match decompose > 0 && step.is_multiple_of(decompose) {
            true => self.score_rollout(config, &rollouts)?,
            false => None,
        };
        let batch = batch(rollouts, group_size);
        let output = self
            .learner
            .step(&batch)
            .map_err(|error| step_error(error, "trainer.learning_rate"))?;
        self.step = step;
        times.train = times.lap();

        let recalibrate = config.rac.recalibrate_every;
        if self.masks.is_some() && recalibrate > 0 && step.is_multiple_of(recalibrate) {
            self.recalibrate(config, problems)?;
        }
        if !self.is_stale(config) {
            (self.sampler, _) = sync(self.learner.model(), &config.rollout.precision, self.masks.as_ref())?;
            self.synced = self.synced.is_some().then(|| self.learner.model().clone());
        }
        times.sync = times.lap();

        line.push(
            "data/epoch",
            self.next_problem(config) as f64 / problems.training.len() as f64,
        );
        line.extend(&output.metrics);
        match scored {
            Some((weights, precision)) => {
                let trainer = output.old_log_probs.concat();
                let engine = batch.rollout_log_probs.concat();
                line.extend(&Decomposition::new(&trainer, &weights, &precision, &engine).metrics());
            }
            None => line.extend_unmeasured(&Decomposition::default().metrics()),
        }
        if !*warned
            && config.mismatch.warn_above > 0.0
            && let Some(warning) = output.mismatch.warning(config.mismatch.warn_above)
        {
            *warned = true;
            progress.say(&format!("Warning, step {step}: {warning}"));
        }
        times.tokens = tokens;
        Ok(times)
    }

    /// Log-probs of the rollout's tokens under its weights: with the trainer's activations, and with its own. `None` when
    /// no precision has these weights with those activations.
    fn score_rollout(&self, config: &Config, rollouts: &Rollouts) -> Result<Option<(Vec<f32>, Vec<f32>)>> {
        let Some(mixed) = weights_and_activations(&config.rollout.precision, &config.learner.precision) else {
            return Ok(None);
        };
        let temperature = config.rollout.temperature as f32;
        let policy = self.synced.as_ref().unwrap_or(self.learner.model());
        let (packed, _) = sync(policy, &mixed, self.masks.as_ref())?;
        Ok(Some((
            token_log_probs(&packed, rollouts, temperature, config.rollout.routing_replay),
            token_log_probs(&self.sampler, rollouts, temperature, config.rollout.routing_replay),
        )))
    }

    fn recalibrate(&mut self, config: &Config, problems: &Problems) -> Result<()> {
        let masks = calibrate(config, problems, self.learner.model())?;
        if needs_masks(&config.learner.precision) {
            let policy = self.learner.model().clone().with_residual_masks(&masks)?;
            let mut learner = Learner::new(policy, config.learner.grpo)?;
            learner.restore(
                self.learner.optimizer().clone(),
                self.learner.steps(),
                self.learner.skipped_steps(),
            );
            if let Some(reference) = self.learner.reference() {
                learner.set_reference(reference.clone());
            }
            self.learner = learner;
        }
        self.masks = Some(masks);
        Ok(())
    }

    /// Whether the rollout's model is an older policy than the learner's.
    fn is_stale(&self, config: &Config) -> bool {
        !self.step.is_multiple_of(config.rollout.sync_every)
    }

    /// The policy as it is now, in the rollout's precision.
    pub fn current(&self, config: &Config) -> Result<Sampler> {
        Ok(match self.is_stale(config) {
            true => sync(self.learner.model(), &config.rollout.precision, self.masks.as_ref())?.0,
            false => self.sampler.clone(),
        })
    }

    /// Accuracy on the held-out problems in the rollout's precision, and pass@1 in the others asked for; all draw the same
    /// random numbers. At the first and the last step the run's file of answers has them one by one.
    fn evaluate(&self, session: &mut Session<'_>) -> Result<Evaluation> {
        let started = Instant::now();
        let (config, held_out) = (session.config, &session.problems.held_out);
        let (accuracy, own) = session.sampling.accuracy(&self.current(config)?, held_out)?;
        // Two names of one precision are evaluated once.
        let mut judged = vec![(OWN.to_string(), config.rollout.precision.clone(), own)];
        for (name, precision) in &config.eval.precisions {
            let right = match judged.iter().find(|(_, known, _)| known == precision) {
                Some((_, _, right)) => right.clone(),
                None => {
                    let (sampler, _) = sync(self.learner.model(), precision, self.masks.as_ref())?;
                    session.sampling.sampled(&sampler, held_out)?
                }
            };
            judged.push((name.clone(), precision.clone(), right));
        }
        if self.step == 0 || self.step == config.learner.steps {
            let lines = judged.iter().map(|(name, _, right)| Answers {
                step: self.step,
                precision: name,
                right: right.iter().map(|right| if *right { '1' } else { '0' }).collect(),
            });
            session.answers.write(&lines.collect::<Vec<_>>())?;
        }
        let others = judged
            .drain(1..)
            .map(|(_, _, right)| session.sampling.pass_at(1, &right));
        Ok(Evaluation {
            accuracy,
            others: others.collect(),
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Writes what the rollout's precision does to each layer's activations, on the prompts and answers that masks are
    /// calibrated on.
    fn measure_layers(&self, session: &mut Session<'_>) -> Result<()> {
        let config = session.config;
        let mut model = self.learner.model().valid();
        if let Some(masks) = &self.masks {
            model = model.with_residual_masks(masks)?;
        }
        let errors = ActivationError::measure(
            // As the rollout's matmuls see them: 4-bit weights upstream.
            &model.with_precision(Precision::W4A16)?,
            &config.rollout.precision,
            &config.rac.rac,
            &calibration_sequences(config, session.problems)?,
            256,
        )?;
        let finite = |number: f64| Some(number).filter(|number| number.is_finite());
        let lines = errors.iter().map(|error| LayerLine {
            step: self.step,
            layer: &error.layer,
            error_w4a4: finite(error.w4a4),
            error_rollout: finite(error.precision),
            largest_over_median: error.largest_over_median.and_then(finite),
            captured: finite(error.captured),
        });
        session.layers.write(&lines.collect::<Vec<_>>())
    }

    fn snapshot(&self, config: &Config) -> Snapshot<'_> {
        Snapshot {
            position: Position::Grpo(self.step),
            policy: self.learner.model(),
            rollout_policy: self.synced.as_ref().filter(|_| self.is_stale(config)),
            optimizer: self.learner.optimizer(),
            skipped: self.learner.skipped_steps(),
            masks: self.masks.as_ref(),
            warmup_steps: self.warmup_steps,
        }
    }

    /// The training problem that the next step begins with.
    fn next_problem(&self, config: &Config) -> u64 {
        self.step as u64 * config.learner.prompts_per_step as u64
    }
}

/// A policy that is warm, with the outlier channels asked for, if it does not `have` them.
pub fn with_outliers(config: &Config, policy: Policy, have: usize) -> Result<Policy> {
    let (channels, gain, width) = (
        config.model.outlier_channels,
        config.model.outlier_gain,
        policy.config().hidden_size,
    );
    if channels > width {
        bail!("model.outlier_channels = {channels}: expected at most {width}, the model's hidden size");
    }
    let seed = seeds::seed(config.run.seed, "outlier channels", 0);
    Ok(match channels == have {
        true => policy,
        false => policy.with_outlier_channels(channels, gain, seed),
    })
}

/// A policy with its masks, in the trainer's precision.
fn in_training(config: &Config, mut policy: Policy, masks: Option<&ResidualMasks>) -> Result<Policy> {
    if let Some(masks) = masks {
        policy = policy.with_residual_masks(masks)?;
    }
    let policy = policy.with_precision(config.learner.precision.clone())?;
    Ok(policy.with_backward(config.learner.backward))
}

fn batch(rollouts: Rollouts, group_size: usize) -> RolloutBatch {
    let mut batch = RolloutBatch {
        group: (0..rollouts.prompts.len()).map(|row| row / group_size).collect(),
        truncated: rollouts.truncated(),
        prompts: rollouts.prompts,
        rewards: rollouts.rewards,
        ..RolloutBatch::default()
    };
    let mut routing = Vec::new();
    for completion in rollouts.completions {
        batch.completions.push(completion.tokens);
        batch.rollout_log_probs.push(completion.log_probs);
        routing.extend(completion.expert_ids);
    }
    batch.expert_ids = (!routing.is_empty()).then_some(routing);
    batch
}

/// `None`: not at this step.
fn evaluation_metrics(line: &mut MetricsLine, config: &Config, evaluation: Option<&Evaluation>) {
    let (accuracy, pass_at) = (evaluation.map(|evaluation| evaluation.accuracy), config.eval.pass_at);
    line.push(HELD_OUT, accuracy.map(|accuracy| accuracy.sampled));
    if pass_at > 1 {
        let share = accuracy.and_then(|accuracy| accuracy.at_k).map(|at_k| at_k.share);
        line.push(&held_out_at(pass_at), share);
    }
    line.push(HELD_OUT_GREEDY, accuracy.map(|accuracy| accuracy.greedy));
    for (index, (name, _)) in config.eval.precisions.iter().enumerate() {
        line.push(
            &held_out_in(name),
            evaluation.map(|evaluation| evaluation.others[index]),
        );
    }
}
