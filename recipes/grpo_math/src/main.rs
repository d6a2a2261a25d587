//! Trains a small mixture-of-experts language model by GRPO on NVFP4 rollouts. The parts are in the library beside.
use anyhow::{Context, Error, Result, anyhow};
use clap::Parser;
use grpo_math::{
    backend,
    checkpoints::Checkpoints,
    cli::{Cli, Command, GapArgs, RunArgs},
    config::{Config, Diverged},
    console, drift,
    finish::{self, Activity},
    gap,
    gap_export::Export,
    interrupt::{self, Interrupt},
    metrics::Position,
    problems::Problems,
    run::{Outcome, run},
    run_folder::RunFolder,
    run_lock::RunLock,
    session,
    start::Start,
};
use std::{io::IsTerminal, process::ExitCode};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_logging(cli.verbose);
    let done = check_current_folder().and_then(|()| match cli.command {
        None => start(&cli.run),
        Some(Command::Gap(arguments)) => measure_gap(&arguments),
        Some(Command::Drift { export, json }) => measure_drift(&export, json),
        Some(Command::Report { run }) => write_report(&run),
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            console::err(format!("error: {}", console::explain(&error)));
            ExitCode::FAILURE
        }
    }
}

/// CubeCL looks for its settings there, and panics when it is gone.
fn check_current_folder() -> Result<()> {
    let folder = std::env::current_dir();
    folder
        .map(drop)
        .context("the current folder cannot be used (was it removed?); change to another one")
}

fn start_logging(verbose: bool) {
    let default = if verbose { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let asked = std::env::var("RUST_LOG").ok().and_then(|targets| targets.parse().ok());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // It would tell of them on the very stream that failed, and panic.
        .log_internal_errors(false);
    let targets = asked.unwrap_or_else(|| Targets::new().with_default(default));
    tracing_subscriber::registry().with(lines.with_filter(targets)).init();
}

fn start(arguments: &RunArgs) -> Result<ExitCode> {
    if arguments.print_config {
        let config = match &arguments.resume {
            Some(path) => RunFolder::open(path, &arguments.set)?.1,
            None => config(arguments)?,
        };
        console::deliver(&config.toml)?;
        return Ok(ExitCode::SUCCESS);
    }
    let start = match &arguments.resume {
        Some(path) => Start::resume(path, &arguments.set)?,
        None => Start::new(config(arguments)?)?,
    };
    let interrupt = Interrupt::listen()?;
    let outcome = run(&start, &|_| interrupt.is_requested()).map_err(|error| failed(&start, error))?;
    Ok(match outcome {
        Outcome::Complete(_) => ExitCode::SUCCESS,
        Outcome::Stopped(_) => ExitCode::from(interrupt::EXIT_CODE),
    })
}

/// The error of a run that failed on its way, with the way to go on where there is one.
fn failed(start: &Start, error: Error) -> Error {
    let folder = &start.folder;
    let diverged = error.is::<Diverged>();
    let error = error.context(format!("the run in {} failed", folder.path().display()));
    match Checkpoints::new(folder.checkpoints()).positions() {
        Ok(positions) if !positions.is_empty() && !diverged => anyhow!(
            "{}\nIts checkpoints are kept. When the cause is gone, this goes on from the last one:\n\n  {}\n",
            console::explain(&error),
            finish::continue_command(folder, &start.config, false)
        ),
        _ => error,
    }
}

/// The settings of a new run.
fn config(arguments: &RunArgs) -> Result<Config> {
    let config = Config::load(arguments.config.as_deref(), &arguments.assignments())?;
    for note in &config.notes {
        console::err(format!("Note: {note}"));
    }
    Ok(config)
}

fn measure_gap(arguments: &GapArgs) -> Result<ExitCode> {
    let (folder, config) = RunFolder::open(&arguments.run, &[])?;
    let checkpoints = Checkpoints::new(folder.checkpoints());
    let position = Position::Grpo(arguments.step);
    let checkpoint = match checkpoints.path(position).exists() {
        true => checkpoints
            .read(position)
            .with_context(|| format!("cannot use the checkpoint {}", checkpoints.path(position).display()))?,
        // It names the path, and those that there are.
        false => checkpoints.read(position)?,
    };
    session::check_fingerprint(&folder, &config, &checkpoint)?;
    // Refused before the work, not after it.
    let export = arguments.export.as_deref().map(Export::new).transpose()?;
    let problems = Problems::draw(&config)?;
    let measured = gap::measure_checkpoint(&config, &problems, &checkpoint, arguments.step, arguments.completions)?;
    console::deliver(&match arguments.json {
        true => serde_json::to_string_pretty(&measured.report)? + "\n",
        false => measured.report.to_string(),
    })?;
    if let Some(export) = export {
        export.write(&measured, &problems)?;
        console::err(format!(
            "To measure it with another program: {}",
            export.folder().display()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn measure_drift(export: &std::path::Path, json: bool) -> Result<ExitCode> {
    backend::find_device()?;
    let report = drift::measure(export)?;
    console::deliver(&match json {
        true => serde_json::to_string_pretty(&report)? + "\n",
        false => report.to_string(),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn write_report(run: &std::path::Path) -> Result<ExitCode> {
    let (folder, config) = RunFolder::open(run, &[])?;
    let activity = match RunLock::is_held(&folder) {
        true => Activity::UnderWay,
        false => Activity::Over,
    };
    finish::write_report(&folder, &config, &Problems::draw(&config)?, activity)?;
    console::deliver(&format!("{}\n", folder.report().display()))?;
    Ok(ExitCode::SUCCESS)
}
