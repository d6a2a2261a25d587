//! The supervised warm-up: from random weights to a policy that is right now and then.
use anyhow::Result;
use burn::module::AutodiffModule;
use burn_quads::{
    grpo::{SupervisedLearner, Update},
    token_log_probs::TokenRow,
};
use std::time::Instant;

use crate::{
    backend::Policy,
    checkpoints::Checkpoint,
    config::{Config, step_error},
    metrics::{MetricsLine, Position, VALIDATION},
    problems::Problems,
    progress::Progress,
    results::percent,
    session::{Session, Snapshot, Stage, fresh_policy, read_optimizer, read_policy},
};

/// A policy after its warm-up.
pub struct Warm {
    /// The policy, in high precision.
    pub policy: Policy,
    /// Steps taken.
    pub steps: usize,
    /// The last pass@1 on the validation problems.
    pub accuracy: Option<f64>,
    /// Outlier channels that it has already.
    pub outlier_channels: usize,
}

impl Warm {
    /// A policy that was trained elsewhere and needs no warm-up.
    pub fn loaded(config: &Config, problems: &Problems) -> Result<Self> {
        Ok(Self {
            policy: fresh_policy(config, problems)?,
            steps: 0,
            accuracy: None,
            outlier_channels: 0,
        })
    }
}

/// Teaches a policy until its pass@1 on the validation problems reaches the target, or the steps are used up.
pub fn warm_up(session: &mut Session<'_>, checkpoint: Option<&Checkpoint>) -> Result<Stage<Warm>> {
    let (config, problems) = (&session.config.warmup, session.problems);
    let start = match checkpoint.map(|checkpoint| checkpoint.state.position) {
        Some(Position::Warmup(step)) => step,
        _ => 0,
    };
    let mut learner = match checkpoint {
        None => SupervisedLearner::new(fresh_policy(session.config, problems)?, config.optimizer)?,
        Some(checkpoint) => {
            let (policy, _) = read_policy(session.config, problems, checkpoint)?;
            let optimizer = read_optimizer(config.optimizer.init(), &policy, checkpoint)?;
            let mut learner = SupervisedLearner::new(policy, config.optimizer)?;
            learner.restore(optimizer, start, checkpoint.state.skipped);
            learner
        }
    };
    let progress = Progress::new("warm-up", start, config.max_steps);
    let (mut accuracy, mut steps) = (None, start);
    for step in start + 1..=config.max_steps {
        let started = Instant::now();
        let batch = problems.warmup_batch(step, config.batch_size)?;
        let encoded: Vec<_> = batch
            .iter()
            .map(|problem| Ok((problems.language.prompt(problem)?, problems.language.answer(problem)?)))
            .collect::<Result<_>>()?;
        let rows: Vec<_> = encoded
            .iter()
            .map(|(prompt, completion)| TokenRow {
                prompt,
                completion,
                routing: None,
            })
            .collect();
        let output = learner
            .step(&rows, config.batch_size)
            .map_err(|error| step_error(error, "warmup.learning_rate"))?;
        steps = step;
        let checked = step.is_multiple_of(config.check_every) || step == config.max_steps;
        if checked {
            accuracy = Some(
                session
                    .sampling
                    .pass_at_1(&learner.model().valid(), &problems.validation)?,
            );
        }

        let mut line = MetricsLine::new(Position::Warmup(step));
        line.push("train/loss", output.loss);
        line.push(
            "train/grad_norm",
            match output.update {
                Update::Applied { grad_norm } => Some(grad_norm),
                Update::Skipped { .. } => None,
            },
        );
        line.push(VALIDATION, accuracy.filter(|_| checked));
        line.push("time/step_s", started.elapsed().as_secs_f64());
        session.record(&line)?;

        let right = accuracy.map_or("not yet measured".into(), percent);
        let target = percent(config.target_accuracy);
        progress.step(step, format!("loss {:.3}  validation {right} of {target}", output.loss));
        if accuracy.is_some_and(|accuracy| accuracy >= config.target_accuracy) {
            break;
        }
        if step == config.max_steps {
            break;
        }
        let every = session.config.checkpoint.every;
        let stop = session.stop_after(Position::Warmup(step));
        if stop || (every > 0 && step.is_multiple_of(every)) {
            session.save(&Snapshot {
                position: Position::Warmup(step),
                policy: learner.model(),
                rollout_policy: None,
                optimizer: learner.optimizer(),
                skipped: learner.skipped_steps(),
                masks: None,
                warmup_steps: step,
            })?;
        }
        if stop {
            progress.finish();
            return Ok(Stage::Stopped(Position::Warmup(step)));
        }
    }
    progress.finish();
    Ok(Stage::Done(Warm {
        policy: learner.into_model(),
        steps,
        accuracy,
        outlier_channels: 0,
    }))
}
