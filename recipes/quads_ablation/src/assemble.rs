//! `results.json` from the small files that arms and warm-ups leave, wherever these were made.
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};

use crate::{
    arms::ARMS,
    files::{self, ArmFile, GapsFile},
    layout::{Layout, arm_file},
    machine,
    plan::Plan,
    results::{Machine, Results, Seed, Series},
    series::{self, Settings},
};

/// Puts together what is there of some series.
///
/// # Errors
/// When a file cannot be read.
pub fn results(layout: &Layout, declared: &[series::Series], device: &str, quick: bool) -> Result<Results> {
    let mut all = Vec::new();
    let (mut processors, mut warmups) = (BTreeSet::new(), BTreeMap::new());
    let mut total_s = 0.0;
    for series in declared {
        let mut seeds = Vec::new();
        let mut settings: Option<Settings> = None;
        for seed in seeds_of(layout, &series.name)? {
            let mut runs = Vec::new();
            let mut warmup_steps = 0;
            for arm in &ARMS {
                let run = layout.arm(&series.name, seed, arm);
                let Some(file) = files::read::<ArmFile>(&arm_file(&run))? else {
                    continue;
                };
                processors.extend(file.processor);
                total_s += file.run.wall_s;
                warmup_steps = file.warmup_steps;
                settings.get_or_insert(Plan::declared_settings(&file.settings)?);
                runs.push(file.run);
            }
            let gaps = files::read::<GapsFile>(&layout.gaps(&series.name, seed))?;
            if let Some(gaps) = &gaps {
                warmup_steps = gaps.warmup_steps;
                // Series share warm-ups.
                warmups.insert((gaps.warmup.clone(), seed), gaps.warmup_s);
            }
            if gaps.is_some() || !runs.is_empty() {
                seeds.push(Seed {
                    seed,
                    warmup_steps,
                    gaps: gaps.map_or_else(Vec::new, |gaps| gaps.gaps),
                    arms: runs,
                });
            }
        }
        if !seeds.is_empty() {
            all.push(Series {
                name: series.name.clone(),
                about: series.about.clone(),
                settings: settings.unwrap_or_else(|| series.settings.clone()),
                seeds,
            });
        }
    }
    total_s += warmups.values().sum::<f64>();
    let processors: Vec<_> = processors.into_iter().collect();
    Ok(Results {
        command: command(&all, declared, quick),
        quick,
        machine: Machine {
            processor: (!processors.is_empty()).then(|| processors.join(" and ")),
            processors: machine::processors(),
            device: device.into(),
            total_s,
        },
        series: all,
    })
}

/// The seeds that have a folder, in order.
fn seeds_of(layout: &Layout, series: &str) -> Result<Vec<u64>> {
    let folder = layout.series(series);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut seeds = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        let name = entry?.file_name();
        let seed = name
            .to_str()
            .and_then(|name| name.strip_prefix("seed_")?.parse::<u64>().ok());
        seeds.extend(seed);
    }
    seeds.sort_unstable();
    Ok(seeds)
}

/// The command that makes these results.
fn command(series: &[Series], declared: &[series::Series], quick: bool) -> String {
    let mut command = "cargo run --release -p quads_ablation".to_string();
    let mut options = Vec::new();
    if quick {
        options.push("--quick".to_string());
    }
    if series.len() < declared.len() {
        let names: Vec<_> = series.iter().map(|series| series.name.as_str()).collect();
        options.push(format!("--series {}", names.join(",")));
    }
    if !options.is_empty() {
        command = format!("{command} -- {}", options.join(" "));
    }
    command
}
