//! A run from its plan to its last table.
use anyhow::{Context, Result};

use crate::{
    atomic_write::write_atomically,
    backend::DEVICE,
    checkpoints::Checkpoints,
    config::Config,
    console, finish,
    language::Language,
    metrics::Position,
    plan,
    problems::Source,
    reinforce::Reinforced,
    results::{Results, duration, percent},
    run_folder::RunFolder,
    session::{Session, Stage},
    start::Start,
    warmup::{Warm, warm_up},
};

/// How a run ended.
pub enum Outcome {
    /// With its last step.
    Complete(Box<Results>),
    /// It was asked to stop, and saved.
    Stopped(Position),
}

/// Runs to the end, or until `stop` says so after a step or an evaluation; from the beginning or from a checkpoint. Prints as it goes.
pub fn run(start: &Start, stop: &dyn Fn(Position) -> bool) -> Result<Outcome> {
    let Start {
        config,
        folder,
        problems,
        resumed,
        ..
    } = start;
    print_plan(start);
    // All that is read of a checkpoint is read before the run's files are changed.
    let reinforced = match (resumed, start.position()) {
        (Some(resumed), Position::Grpo(_)) => Some(Reinforced::resume(config, problems, resumed)?),
        _ => None,
    };
    let warm = start
        .warm
        .as_ref()
        .map(|from| from.warm(config, problems))
        .transpose()?;
    let mut session = Session::open(start, stop)?;
    folder.write_config(config)?;
    session.checkpoints.tidy()?;
    // Those of a run that is being prolonged are no longer its last word.
    if folder.results().exists() {
        std::fs::remove_file(folder.results())
            .with_context(|| format!("cannot remove {}", folder.results().display()))?;
    }
    let stopped = |at: Position| {
        finish::write_report(folder, config, problems, finish::Activity::Over)?;
        print_stopped(folder, config, at);
        Ok(Outcome::Stopped(at))
    };

    let mut reinforced = match reinforced {
        Some(reinforced) => reinforced,
        None if config.data.is_some() => Reinforced::begin(config, problems, Warm::loaded(config, problems)?)?,
        None if let Some(from) = warm => {
            print_warm(config, &from, None);
            Reinforced::begin(config, problems, from)?
        }
        None => match warm_up(&mut session, resumed.as_ref().map(|resumed| &resumed.checkpoint))? {
            Stage::Stopped(at) => return stopped(at),
            Stage::Done(warm) => {
                print_warm(config, &warm, Some(session.elapsed()));
                Reinforced::begin(config, problems, warm)?
            }
        },
    };
    console::out(&reinforced.audit);
    write_atomically(&folder.packing(), reinforced.audit.as_bytes())?;

    if let Stage::Stopped(at) = reinforced.train(&mut session)? {
        return stopped(at);
    }
    let results = match finish::evaluate(&mut session, &reinforced)? {
        Stage::Stopped(at) => return stopped(at),
        Stage::Done(results) => results,
    };
    write_atomically(&folder.results(), serde_json::to_string_pretty(&results)?.as_bytes())?;
    finish::write_report(folder, config, problems, finish::Activity::Over)?;
    let exported = match &problems.language {
        Language::Text(text) => Some(text.export(reinforced.learner.model(), folder, config.learner.steps)?),
        Language::Characters(_) => None,
    };
    print_results(folder, config, &results);
    if let Some(exported) = exported {
        console::out(format!("Model:   {}", exported.display()));
    }
    Ok(Outcome::Complete(Box::new(results)))
}

fn print_plan(start: &Start) {
    let (config, problems) = (&start.config, &start.problems);
    let on_cpu = DEVICE == "cpu";
    let device = if on_cpu { "this machine's CPU" } else { DEVICE };
    console::out(format!("GRPO on NVFP4 rollouts, on {device}\n"));
    let row = |name: &str, text: &str| console::out(format!("  {name:<9} {text}"));
    let parameters = plan::parameters(config, problems);
    for (name, text) in plan::rows(config, problems, parameters) {
        row(&name, &text);
    }
    if let Source::Files(files) = &problems.source {
        for note in &files.notes {
            row("note", note);
        }
    }
    row("folder", &start.folder.path().display().to_string());
    match start.resumed {
        // A GPU's depends on launches, and has not been estimated.
        None if on_cpu => row("time", &plan::expected_time(config, problems, parameters)),
        None => {}
        Some(_) => row("goes on", &describe(start.position(), config)),
    }
    console::out("");
}

fn describe(position: Position, config: &Config) -> String {
    match position {
        Position::Warmup(step) => format!("in the warm-up, after step {step}"),
        Position::Grpo(step) => format!("after GRPO step {step} of {}", config.learner.steps),
    }
}

/// `elapsed`: seconds that it took; `None`: another run made it.
fn print_warm(config: &Config, warm: &Warm, elapsed: Option<f64>) {
    let accuracy = warm.accuracy.map_or("not measured".into(), percent);
    let how = elapsed.map_or("of another run".into(), |elapsed| format!("in {}", duration(elapsed)));
    console::out(format!(
        "Warm-up: {} steps {how}, validation accuracy {accuracy}.\n",
        warm.steps
    ));
    if elapsed.is_some()
        && warm
            .accuracy
            .is_none_or(|accuracy| accuracy < config.warmup.target_accuracy)
    {
        console::err(format!(
            "Warning: the warm-up ended at its {} steps (warmup.max_steps), below warmup.target_accuracy. GRPO learns from \
             right answers among wrong ones; with too few of either it learns little.\n",
            warm.steps
        ));
    }
}

fn print_stopped(folder: &RunFolder, config: &Config, at: Position) {
    console::out(format!("Stopped {}, and saved. To go on:\n", describe(at, config)));
    console::out(format!("  {}\n", finish::continue_command(folder, config, false)));
}

fn print_results(folder: &RunFolder, config: &Config, results: &Results) {
    let last = Position::Grpo(config.learner.steps);
    let weights = Checkpoints::new(folder.checkpoints()).path(last);
    console::out(results);
    console::out(format!("Report:  {}", folder.report().display()));
    console::out(format!("Metrics: {}", folder.metrics().display()));
    console::out(format!("Weights: {}", weights.display()));
    console::out(format!(
        "\nMore steps: {}",
        finish::continue_command(folder, config, true)
    ));
}
