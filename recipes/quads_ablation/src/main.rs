//! Runs the arms of the QUADS comparison. The parts are in the library beside.
use anyhow::{Context, Result, bail};
use clap::Parser;
use grpo_math::{
    console,
    interrupt::{self, Interrupt},
};
use quads_ablation::{
    assemble,
    cli::{self, Cli, Command, RunArgs, Seeds},
    layout::Layout,
    list,
    lock::Lock,
    machine,
    plan::{self, Plan},
    report,
    results::Results,
    scheduler::{self, Width},
    series::{DECLARED, Declaration, find_arms},
    table,
    worker::{self, Ended, Work},
};
use std::{path::Path, process::ExitCode};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match &cli.command {
        None => run(&cli.run),
        Some(Command::Report { out, quick }) => report_what_is_there(&cli::out(out.as_ref(), *quick), *quick),
        Some(Command::Work { work }) => do_work(work),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            console::err(format!("error: {}", console::explain(&error)));
            ExitCode::FAILURE
        }
    }
}

fn do_work(work: &str) -> Result<ExitCode> {
    let work: Work = serde_json::from_str(work).context("not a piece of work")?;
    Ok(match worker::work(&work)? {
        Ended::Done => ExitCode::SUCCESS,
        Ended::Stopped => ExitCode::from(interrupt::EXIT_CODE),
    })
}

fn run(arguments: &RunArgs) -> Result<ExitCode> {
    let declaration = Declaration::read(DECLARED, arguments.quick)?;
    let plan = plan(arguments, declaration)?;
    if arguments.list {
        console::deliver(&list::list(&plan.series))?;
        return Ok(ExitCode::SUCCESS);
    }
    plan::check_device(&plan.device)?;
    if arguments.dry_run {
        console::deliver(&list::dry_run(&plan)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let _lock = Lock::take(&plan.layout)?;
    let interrupt = Interrupt::listen()?;
    let done = scheduler::run(&plan, width(arguments, &plan.device), &interrupt)?;
    for (job, reason) in &done.failed {
        console::err(format!("failed: {job}: {reason}"));
    }
    write_report(&plan, arguments.quick)?;
    if done.interrupted {
        console::err("Stopped, and saved. The same command goes on.");
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    Ok(match done.failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// What is asked for, checked before anything is done.
fn plan(arguments: &RunArgs, declaration: Declaration) -> Result<Plan> {
    let mut selected = declaration.select(&arguments.series)?;
    let most = selected.iter().map(|series| series.seeds.len()).max().unwrap_or(0);
    if let Some(Seeds::First(count)) = arguments.seeds
        && count > most
    {
        bail!("--seeds {count}: at most {most} are declared; the seed {count} alone is {count}-{count}");
    }
    let arms = find_arms(&arguments.arms)?;
    if !arms.is_empty() {
        for series in &mut selected {
            series.arms.retain(|arm| arms.contains(arm));
        }
        selected.retain(|series| !series.arms.is_empty());
        if selected.is_empty() {
            bail!("--arms {}: none of the series has them", arguments.arms.join(","));
        }
    }
    for series in &mut selected {
        if let Some(seeds) = &arguments.seeds {
            series.seeds = seeds.of(&series.seeds);
        }
        series.change(&arguments.set)?;
    }
    if arguments.out().to_str().is_none() {
        bail!(
            "--out {}: expected a name in UTF-8, which settings can hold",
            arguments.out().display()
        );
    }
    let layout = Layout::new(arguments.out());
    if layout.out().exists() && !layout.out().is_dir() {
        bail!("--out {}: expected a folder", layout.out().display());
    }
    check_length(&layout, arguments.quick)?;
    Ok(Plan {
        layout,
        series: selected,
        declared: declaration.series,
        keep_checkpoints: arguments.keep_checkpoints,
        device: arguments
            .device
            .clone()
            .unwrap_or_else(|| grpo_math::backend::DEVICE.into()),
    })
}

/// The short run and the full one each have a folder of their own: results of one would take the place of the other's.
fn check_length(layout: &Layout, quick: bool) -> Result<()> {
    let other = if quick { "a full" } else { "a short" };
    for series in Declaration::read(DECLARED, !quick)?.series {
        let warmups = layout.warmup(&series.name, 0).parent().map(Path::to_path_buf);
        for folder in warmups.into_iter().chain([layout.series(&series.name)]) {
            if folder.is_dir() {
                bail!("{} is of {other} run; use another --out", folder.display());
            }
        }
    }
    // One that cannot be read is made anew.
    match Results::read(&layout.results()) {
        Ok(there) if there.quick != quick => {
            bail!("{} is of {other} run; use another --out", layout.results().display())
        }
        _ => Ok(()),
    }
}

fn width(arguments: &RunArgs, device: &str) -> Width {
    let threads = usize::from(arguments.threads);
    let jobs = match (arguments.jobs, device) {
        (Some(jobs), _) => usize::from(jobs),
        (None, "cpu") => (machine::processors() / threads).max(1),
        (None, _) => 1,
    };
    Width { jobs, threads }
}

fn write_report(plan: &Plan, quick: bool) -> Result<()> {
    let results = assemble::results(&plan.layout, &plan.declared, &plan.device, quick)?;
    if results.series.is_empty() {
        return Ok(());
    }
    results.write(&plan.layout.results())?;
    report::write(&results, plan.layout.out())?;
    console::out(table::to_text(&results)?);
    console::out(format!("Results: {}", plan.layout.results().display()));
    console::out(format!("Report:  {}", plan.layout.out().join("report.html").display()));
    Ok(())
}

fn report_what_is_there(out: &Path, quick: bool) -> Result<ExitCode> {
    let declaration = Declaration::read(DECLARED, quick)?;
    let layout = Layout::new(out.into());
    check_length(&layout, quick)?;
    let plan = Plan {
        layout,
        series: declaration.series.clone(),
        declared: declaration.series,
        keep_checkpoints: true,
        device: grpo_math::backend::DEVICE.into(),
    };
    let results = assemble::results(&plan.layout, &plan.declared, &plan.device, quick)?;
    if results.series.is_empty() {
        bail!("{}: no arm and no warm-up has left anything there", out.display());
    }
    write_report(&plan, quick)?;
    Ok(ExitCode::SUCCESS)
}
