//! A run from its plan to its last table.
use anyhow::{Context, Result};
use burn::module::Module;

use crate::{
    atomic_write::write_atomically,
    checkpoints::{Checkpoint, Checkpoints},
    config::Config,
    finish,
    metrics::Position,
    plan,
    problems::Problems,
    reinforce::Reinforced,
    results::{Results, duration, percent},
    run_folder::RunFolder,
    session::{Session, Stage, check_fingerprint, fresh_policy},
    warmup::{Warm, warm_up},
};

/// How a run ended.
pub enum Outcome {
    /// With its last step.
    Complete(Box<Results>),
    /// It was asked to stop, and saved.
    Stopped(Position),
}

/// Runs to the end, or until `stop` says so after a step; from the beginning or from a checkpoint. Prints as it goes.
pub fn run(
    folder: &RunFolder,
    config: &Config,
    checkpoint: Option<Checkpoint>,
    stop: &dyn Fn(Position) -> bool,
) -> Result<Outcome> {
    let problems = Problems::draw(config)?;
    let position = checkpoint
        .as_ref()
        .map_or(Position::Warmup(0), |checkpoint| checkpoint.state.position);
    let elapsed = checkpoint.as_ref().map_or(0.0, |checkpoint| checkpoint.state.elapsed_s);
    print_plan(folder, config, &problems, checkpoint.as_ref());
    let mut session = Session::open(config, folder, &problems, position, elapsed, stop)?;
    // Those of a run that is being prolonged are no longer its last word.
    if folder.results().exists() {
        std::fs::remove_file(folder.results())
            .with_context(|| format!("cannot remove {}", folder.results().display()))?;
    }
    let stopped = |session: &Session<'_>, at: Position| {
        finish::write_report(session.folder, session.config, session.problems)?;
        print_stopped(session.folder, session.config, at);
        Ok(Outcome::Stopped(at))
    };

    let mut reinforced = match (&checkpoint, position) {
        (Some(checkpoint), Position::Grpo(_)) => {
            // Only a KL term refers to the policy after the warm-up.
            let first = (config.learner.grpo.loss.beta > 0.0)
                .then(|| -> Result<Checkpoint> {
                    let first = Checkpoints::new(folder.checkpoints())
                        .read(Position::Grpo(0))
                        .context("the checkpoint step_0000, after the warm-up, is needed")?;
                    check_fingerprint(folder, config, &first)?;
                    Ok(first)
                })
                .transpose()?;
            Reinforced::resume(config, &problems, checkpoint, first.as_ref())?
        }
        _ => match warm_up(&mut session, checkpoint.as_ref())? {
            Stage::Stopped(at) => return stopped(&session, at),
            Stage::Done(warm) => {
                print_warm(config, &warm, session.elapsed());
                Reinforced::begin(config, &problems, warm)?
            }
        },
    };
    println!("{}", reinforced.audit);
    write_atomically(&folder.packing(), reinforced.audit.as_bytes())?;

    if let Stage::Stopped(at) = reinforced.train(&mut session)? {
        return stopped(&session, at);
    }
    let results = finish::evaluate(&mut session, &reinforced)?;
    write_atomically(&folder.results(), serde_json::to_string_pretty(&results)?.as_bytes())?;
    finish::write_report(folder, config, &problems)?;
    print_results(folder, config, &results);
    Ok(Outcome::Complete(Box::new(results)))
}

fn print_plan(folder: &RunFolder, config: &Config, problems: &Problems, checkpoint: Option<&Checkpoint>) {
    println!("GRPO on NVFP4 rollouts, on this machine's CPU\n");
    let parameters = fresh_policy(config, problems).num_params();
    for (name, text) in plan::rows(config, problems, parameters) {
        println!("  {name:<9} {text}");
    }
    println!("  {:<9} {}", "folder", folder.path().display());
    match checkpoint {
        None => println!(
            "  {:<9} {}\n",
            "time",
            plan::expected_time(config, problems, parameters)
        ),
        Some(checkpoint) => {
            println!("  {:<9} {}\n", "goes on", describe(checkpoint.state.position, config));
        }
    }
}

fn describe(position: Position, config: &Config) -> String {
    match position {
        Position::Warmup(step) => format!("in the warm-up, after step {step}"),
        Position::Grpo(step) => format!("after GRPO step {step} of {}", config.learner.steps),
    }
}

fn print_warm(config: &Config, warm: &Warm, elapsed: f64) {
    let accuracy = warm.accuracy.map_or("not measured".into(), percent);
    println!(
        "Warm-up: {} steps in {}, validation accuracy {accuracy}.\n",
        warm.steps,
        duration(elapsed)
    );
    if warm
        .accuracy
        .is_none_or(|accuracy| accuracy < config.warmup.target_accuracy)
    {
        eprintln!(
            "Warning: the warm-up ended at its {} steps (warmup.max_steps), below warmup.target_accuracy. GRPO learns from \
             right answers among wrong ones; with too few of either it learns little.\n",
            warm.steps
        );
    }
}

fn print_stopped(folder: &RunFolder, config: &Config, at: Position) {
    println!("Stopped {}, and saved. To go on:\n", describe(at, config));
    println!("  {}\n", finish::continue_command(folder, config, false));
}

fn print_results(folder: &RunFolder, config: &Config, results: &Results) {
    println!("{results}");
    println!("Report:  {}", folder.report().display());
    println!("Metrics: {}", folder.metrics().display());
    println!(
        "Weights: {}",
        Checkpoints::new(folder.checkpoints())
            .path(Position::Grpo(config.learner.steps))
            .display()
    );
    println!("\nMore steps: {}", finish::continue_command(folder, config, true));
}
