//! The end of a run: the final policy in every precision, and the pages about it.
use anyhow::{Context, Result, anyhow, bail};
use burn_quads::sync::sync;
use std::fs;

use crate::{
    atomic_write::write_atomically,
    charts,
    config::{Config, PRECISIONS, precision, precision_name},
    metrics::{self, HELD_OUT, HELD_OUT_GREEDY, MetricsLine, Position, held_out_at},
    peak_memory, plan,
    problems::Problems,
    reinforce::Reinforced,
    report::{Report, State},
    results::{Accuracy, Machine, PassAtK, PrecisionResult, Results},
    run_folder::RunFolder,
    scoring::{mismatch, trainer_side},
    seeds,
    session::{Session, Stage},
};

/// Evaluates the final policy: accuracy on the held-out problems in every precision, and on the final rollouts each
/// precision's gap to the trainer. Stops before the next precision when somebody wants it to: the checkpoint of the last step
/// is saved.
pub fn evaluate(session: &mut Session<'_>, run: &Reinforced) -> Result<Stage<Results>> {
    let (config, problems) = (session.config, session.problems);
    let temperature = config.rollout.temperature as f32;
    let lines = metrics::read(&session.folder.metrics())?;
    let k = config.eval.pass_at;
    let accuracy = |step: usize| {
        let line = lines.iter().find(|line| line.position == Position::Grpo(step));
        let read = |line: &MetricsLine| {
            Some(Accuracy {
                sampled: line.get(HELD_OUT)?,
                at_k: line
                    .get(&held_out_at(k))
                    .filter(|_| k > 1)
                    .map(|share| PassAtK { k, share }),
                greedy: line.get(HELD_OUT_GREEDY)?,
            })
        };
        line.and_then(read).ok_or_else(|| {
            anyhow!(
                "{} has no evaluation at step {step}",
                session.folder.metrics().display()
            )
        })
    };
    let (before, after) = (accuracy(0)?, accuracy(config.learner.steps)?);

    let prompts: Vec<_> = problems.held_out.iter().collect();
    let rollouts = session.sampling.rollouts(
        &run.current(config)?,
        &prompts,
        seeds::seed(config.run.seed, "final rollout", 0),
    )?;
    let policy = run.learner.model();
    let trainer = trainer_side(policy, &config.learner.precision)?;
    let replay = config.rollout.routing_replay;
    let mut precisions = Vec::new();
    for name in PRECISIONS {
        let last = Position::Grpo(config.learner.steps);
        if session.stop_after(last) {
            return Ok(Stage::Stopped(last));
        }
        let precision = precision(name, config.rac.rac).expect("a name of the list");
        let (sampler, _) = sync(policy, &precision, run.masks.as_ref())?;
        let mismatch = mismatch(&trainer, &sampler, &rollouts, temperature, replay);
        precisions.push(PrecisionResult {
            precision: name.into(),
            gap_mean: mismatch.mean,
            gap_p99: mismatch.p99,
            gap_max: mismatch.max,
            accuracy: session.sampling.accuracy(&sampler, &problems.held_out)?.0,
        });
    }
    Ok(Stage::Done(Results {
        seed: config.run.seed,
        warmup_steps: run.warmup_steps,
        grpo_steps: config.learner.steps,
        rollout_precision: precision_name(&config.rollout.precision).into(),
        trainer_precision: precision_name(&config.learner.precision).into(),
        held_out_problems: problems.held_out.len(),
        before,
        after,
        completions: rollouts.completions.len(),
        precisions,
        machine: Machine {
            total_s: session.elapsed(),
            peak_memory_mb: peak_memory::megabytes(),
        },
    }))
}

/// Whether a process is working on a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// One is.
    UnderWay,
    /// None is.
    Over,
}

/// Writes `plots/*.svg` and `report.html` from what is in the run's folder.
pub fn write_report(folder: &RunFolder, config: &Config, problems: &Problems, activity: Activity) -> Result<()> {
    let path = folder.metrics();
    if !path.exists() {
        bail!("{} is missing: without it there is nothing to report", path.display());
    }
    let lines = metrics::read(&path)?;
    let results = read_results(folder)?;
    let results = results.filter(|results| results.grpo_steps == config.learner.steps);
    let at = match lines.last().map(|line| line.position) {
        Some(Position::Grpo(step)) => format!("after step {step} of {}", config.learner.steps),
        Some(Position::Warmup(step)) => format!("in the warm-up, after step {step}"),
        None => "before the first step".into(),
    };
    let state = match (&results, activity) {
        (Some(_), _) => State::Complete,
        (None, Activity::UnderWay) => State::Running(at),
        (None, Activity::Over) => State::Stopped(at),
    };
    let charts = charts::charts(&lines);
    fs::create_dir_all(folder.plots()).with_context(|| format!("cannot make {}", folder.plots().display()))?;
    for chart in &charts {
        let svg = chart.to_svg().map_err(|error| anyhow!(error))?;
        write_atomically(&folder.plots().join(format!("{}.svg", chart.file)), svg.as_bytes())?;
    }
    let audit = match folder.packing().exists() {
        true => fs::read_to_string(folder.packing()).context("cannot read packing.txt")?,
        false => String::new(),
    };
    let html = Report {
        name: &folder.name(),
        plan: &plan::rows(config, problems, plan::parameters(config, problems)),
        results: results.as_ref(),
        charts: &charts,
        audit: &audit,
        config: &config.toml,
        continue_command: &continue_command(folder, config, state == State::Complete),
        state,
    }
    .to_html()
    .map_err(|error| anyhow!(error))?;
    write_atomically(&folder.report(), html.as_bytes())
}

/// The command that goes on with a run, or prolongs one that is complete.
pub fn continue_command(folder: &RunFolder, config: &Config, complete: bool) -> String {
    let path = folder.path().display().to_string();
    let path = match path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c)) {
        true => path,
        false => format!("'{}'", path.replace('\'', r"'\''")),
    };
    let more = match complete {
        true => format!(" --set grpo.steps={}", steps_to_prolong_to(config.learner.steps)),
        false => String::new(),
    };
    format!("cargo run --release -p grpo_math -- --resume {path}{more}")
}

/// Twice as many; after a warm-up alone, some.
fn steps_to_prolong_to(steps: usize) -> usize {
    match steps {
        0 => 100,
        steps => 2 * steps,
    }
}

fn read_results(folder: &RunFolder) -> Result<Option<Results>> {
    let path = folder.results();
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .map(Some)
        .with_context(|| format!("cannot read {}", path.display()))
}
