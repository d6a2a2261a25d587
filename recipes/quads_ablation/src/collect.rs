//! From a run's folder to what `results.json` says of an arm.
use anyhow::{Context, Result};
use burn_nvfp4::Precision;
use burn_quads::{modules::residual_masks::ResidualMasks, sync::sync};
use grpo_math::{
    backend::Policy,
    checkpoints::{Checkpoint, Checkpoints},
    config::Config,
    console,
    metrics::{self, MetricsLine, Position},
    problems::Problems,
    run_folder::RunFolder,
    sampling::Sampling,
    session::{calibrate, needs_masks, read_policy},
};
use serde::Deserialize;
use std::fs;

use crate::{
    collapse,
    files::{ArmFile, device_of},
    machine,
    results::{Answers, ArmRun, Curve, Evaluation, LayerError},
    series::all_settings,
    warm,
    worker::Run,
};

/// What the curve of an arm keeps of `metrics.jsonl`.
pub const COLUMNS: [&str; 32] = [
    "reward/mean",
    "eval/pass@1",
    "eval/trainer/pass@1",
    "eval/high/pass@1",
    "eval/w4a4/pass@1",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/p99",
    "sampling/sampling_logp_difference/max",
    "rollout_corr/k3_kl",
    "rollout_corr/k3_kl_reverse",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_oob_ratio",
    "rollout_corr/rejected_fraction",
    "mismatch/delta_weight/mean",
    "mismatch/delta_act/mean",
    "mismatch/delta_num/mean",
    "mismatch/delta/mean",
    "mismatch/delta_weight/max",
    "mismatch/delta_act/max",
    "mismatch/delta_num/max",
    "mismatch/delta/max",
    "actor/pg_clipfrac",
    "actor/entropy",
    "actor/grad_norm",
    "actor/grad_norm_max",
    "actor/updates",
    "actor/ppo_kl",
    "skipped_steps",
    "mismatch/route_flip_rate",
    "mismatch/route_flip_token_rate",
    "response_length/mean",
    "response_length/clip_ratio",
];

/// Reads a run that has ended, and judges its policy before the first and after the last step. `None` where it was to stop.
///
/// # Errors
/// When a file of the run cannot be read.
pub fn arm(
    run: &Run,
    letter: &str,
    final_problems: usize,
    stopped: Option<String>,
    stop: &dyn Fn() -> bool,
) -> Result<Option<ArmFile>> {
    let (folder, _) = RunFolder::open(&run.folder, &[])?;
    let checkpoints = Checkpoints::new(folder.checkpoints());
    let last = checkpoints
        .newest()?
        .0
        .context("a run that has begun has a checkpoint")?;
    let lines = metrics::read(&folder.metrics())?;
    let lines: Vec<_> = lines.iter().filter(|line| line.grpo_step().is_some()).collect();
    let steps = lines.last().and_then(|line| line.grpo_step()).unwrap_or(0);
    let curve = curve(&lines);

    // More problems than the curve is made with, drawn the same way for all arms.
    let judging = run.config_with(&[format!("eval.problems={final_problems}")])?;
    let mut judge = Judge::new(&judging, stop)?;
    let warmup = judging.warmup.from.as_deref().context("an arm begins with a warm-up")?;
    let (policy, _) = warm::policy(&judging, &judge.problems, warmup)?;
    let masks = needs_masks(&judging.rollout.precision).then(|| calibrate(&judging, &judge.problems, &policy));
    let Some(start) = judge.evaluate(&policy, masks.transpose()?.as_ref())? else {
        return Ok(None);
    };
    let end = read_policy(&judging, &judge.problems, &last)
        .and_then(|(policy, masks)| judge.evaluate(&policy, masks.as_ref()));
    let end = match end {
        Ok(Some(end)) => end,
        Ok(None) => return Ok(None),
        // A policy that cannot be sampled answers nothing.
        Err(error) if stopped.is_some() => {
            console::err(format!("No answers: {}", console::explain(&error)));
            nothing(judge.problems.held_out.len())
        }
        Err(error) => return Err(error),
    };
    let checkpoint = match last.state.position {
        Position::Grpo(step) if step < steps => format!(" (judged by its checkpoint of step {step})"),
        _ => String::new(),
    };
    let settings = all_settings(&run.assignments)?;
    Ok(Some(ArmFile {
        complete: true,
        warmup_steps: last.state.warmup_steps,
        processor: None,
        run: ArmRun {
            arm: letter.into(),
            start,
            end,
            steps,
            stopped: stopped.map(|reason| format!("{reason}{checkpoint}")),
            skipped_updates: last.state.skipped.total,
            collapse: collapse::find(&curve),
            curve,
            layers: layers(&folder)?,
            wall_s: wall_s(&folder, &last)?,
            host: device_of(&settings).map(machine::host),
        },
        settings,
    }))
}

/// Wall time of a run, its last table included where there is one.
fn wall_s(folder: &RunFolder, last: &Checkpoint) -> Result<f64> {
    let path = folder.results();
    if !path.exists() {
        return Ok(last.state.elapsed_s);
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let results: grpo_math::results::Results =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(results.machine.total_s)
}

fn curve(lines: &[&MetricsLine]) -> Curve {
    let column = |name: &str| -> Vec<Option<f64>> { lines.iter().map(|line| Some(short(line.get(name)?))).collect() };
    let columns = COLUMNS.iter().map(|name| (name.to_string(), column(name)));
    Curve {
        step: lines.iter().filter_map(|line| line.grpo_step()).collect(),
        columns: columns
            .filter(|(_, values)| values.iter().any(Option::is_some))
            .collect(),
    }
}

/// Six significant digits: the files are carried around.
fn short(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

fn nothing(problems: usize) -> Evaluation {
    let none = Answers(vec![false; problems]);
    Evaluation {
        own: none.clone(),
        trainer: none.clone(),
        high: none.clone(),
        w4a4: none,
    }
}

/// Lets policies answer the held-out problems.
struct Judge<'a> {
    config: &'a Config,
    problems: Problems,
    sampling: Sampling,
    stop: &'a dyn Fn() -> bool,
}

impl<'a> Judge<'a> {
    fn new(config: &'a Config, stop: &'a dyn Fn() -> bool) -> Result<Self> {
        let problems = Problems::draw(config)?;
        Ok(Self {
            sampling: Sampling::new(config, &problems)?,
            config,
            problems,
            stop,
        })
    }

    /// In all precisions; `None` where it was to stop.
    fn evaluate(&mut self, policy: &Policy, masks: Option<&ResidualMasks>) -> Result<Option<Evaluation>> {
        let config = self.config;
        let wanted = [
            &config.rollout.precision,
            &config.learner.precision,
            &Precision::High,
            &Precision::W4A4,
        ];
        let mut known: Vec<(&Precision, Answers)> = Vec::new();
        for precision in wanted {
            if known.iter().any(|(known, _)| *known == precision) {
                continue;
            }
            if (self.stop)() {
                return Ok(None);
            }
            let (sampler, _) = sync(policy, precision, masks)?;
            let answers = self.sampling.sampled(&sampler, &self.problems.held_out)?;
            known.push((precision, Answers(answers)));
        }
        let answers = |precision: &Precision| {
            let answers = known.iter().find(|(known, _)| *known == precision);
            answers.expect("all that are wanted are known").1.clone()
        };
        let [own, trainer, high, w4a4] = wanted.map(answers);
        Ok(Some(Evaluation {
            own,
            trainer,
            high,
            w4a4,
        }))
    }
}

/// A line of `layers.jsonl`; what could not be measured is absent.
#[derive(Deserialize)]
struct LayerLine {
    step: usize,
    layer: String,
    error_w4a4: Option<f64>,
    error_rollout: Option<f64>,
    largest_over_median: Option<f64>,
    captured: Option<f64>,
}

/// Errors of the activations when they were last measured; none where they never were.
fn layers(folder: &RunFolder) -> Result<Vec<LayerError>> {
    let path = folder.layers();
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().map(serde_json::from_str);
    let lines: Vec<LayerLine> = lines
        .collect::<Result<_, _>>()
        .with_context(|| format!("cannot read {}", path.display()))?;
    let last = lines.last().map(|line| line.step);
    let number = |number: Option<f64>| number.unwrap_or(f64::NAN);
    let lines = lines.into_iter().filter(|line| Some(line.step) == last);
    let errors = lines.map(|line| LayerError {
        layer: line.layer,
        w4a4: number(line.error_w4a4),
        own: number(line.error_rollout),
        channel_ratio: number(line.largest_over_median),
        captured: number(line.captured),
    });
    Ok(errors.collect())
}
