//! Trains a small mixture-of-experts language model by GRPO on NVFP4 rollouts. The parts are in the library beside.
use anyhow::{Context, Result, bail};
use clap::Parser;
use grpo_math::{
    checkpoints::Checkpoints,
    cli::{Cli, Command, GapArgs, RunArgs},
    config::{Config, ConfigError, Layers},
    finish, gap,
    interrupt::{self, Interrupt},
    metrics::Position,
    problems::Problems,
    run::{Outcome, run},
    run_folder::RunFolder,
    session::{self, newest_checkpoint},
};
use std::process::ExitCode;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_logging(cli.verbose);
    let done = match cli.command {
        None => start(&cli.run),
        Some(Command::Gap(arguments)) => measure_gap(&arguments),
        Some(Command::Report { run }) => write_report(&run),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start_logging(verbose: bool) {
    let default = if verbose { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let asked = std::env::var("RUST_LOG").ok().and_then(|targets| targets.parse().ok());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let targets = asked.unwrap_or_else(|| Targets::new().with_default(default));
    tracing_subscriber::registry().with(lines.with_filter(targets)).init();
}

fn start(arguments: &RunArgs) -> Result<ExitCode> {
    if arguments.print_config {
        print!("{}", layers(arguments)?);
        return Ok(ExitCode::SUCCESS);
    }
    let (folder, config, checkpoint) = match &arguments.resume {
        Some(path) => {
            let (folder, config) = RunFolder::open(path, &arguments.set)?;
            let checkpoint = newest_checkpoint(&folder, &config)?;
            if let Position::Grpo(reached) = checkpoint.state.position
                && reached > config.learner.steps
            {
                let steps = config.learner.steps;
                bail!("grpo.steps = {steps}: the run has reached step {reached}; expected at least that");
            }
            folder.write_config(&config)?;
            (folder, config, Some(checkpoint))
        }
        None => {
            let config = Config::read(&layers(arguments)?)?;
            // Before there is a folder: settings that draw too few problems should leave nothing behind.
            Problems::draw(&config)?;
            (RunFolder::create(&config)?, config, None)
        }
    };
    let interrupt = Interrupt::listen()?;
    let outcome = run(&folder, &config, checkpoint, &|_| interrupt.is_requested());
    let outcome = outcome.with_context(|| format!("the run in {} failed", folder.path().display()))?;
    Ok(match outcome {
        Outcome::Complete(_) => ExitCode::SUCCESS,
        Outcome::Stopped(_) => ExitCode::from(interrupt::EXIT_CODE),
    })
}

fn layers(arguments: &RunArgs) -> Result<Layers, ConfigError> {
    let mut layers = Layers::defaults();
    if let Some(file) = &arguments.config {
        layers.lay_file(file)?;
    }
    for assignment in arguments.assignments() {
        layers.lay_assignment(&assignment)?;
    }
    Ok(layers)
}

fn measure_gap(arguments: &GapArgs) -> Result<ExitCode> {
    let (folder, config) = RunFolder::open(&arguments.run, &[])?;
    let checkpoints = Checkpoints::new(folder.checkpoints());
    let position = Position::Grpo(arguments.step);
    let checkpoint = checkpoints
        .read(position)
        .with_context(|| format!("cannot use the checkpoint {}", checkpoints.path(position).display()))?;
    session::check_fingerprint(&folder, &config, &checkpoint)?;
    let report = gap::measure_checkpoint(&config, &checkpoint, arguments.step, arguments.completions)?;
    match arguments.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{report}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn write_report(run: &std::path::Path) -> Result<ExitCode> {
    let (folder, config) = RunFolder::open(run, &[])?;
    finish::write_report(&folder, &config, &Problems::draw(&config)?)?;
    println!("{}", folder.report().display());
    Ok(ExitCode::SUCCESS)
}
