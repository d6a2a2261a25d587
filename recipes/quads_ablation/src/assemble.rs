//! `results.json` from the small files that arms and warm-ups leave, wherever these were made.
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};

use crate::{
    arms::ARMS,
    files::{self, ArmFile, GapsFile},
    layout::{Layout, arm_file},
    machine,
    results::{Machine, Results, Seed, Series},
    series::{self, DEFAULTS, Settings},
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
                settings.get_or_insert_with(|| of_series(&file.settings, series));
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

/// Of an arm's settings, those that its series declares or chooses, and those that are not the default; without what arms and
/// seeds differ in.
fn of_series(settings: &Settings, series: &series::Series) -> Settings {
    let of_arms: BTreeSet<_> = ARMS.iter().flat_map(|arm| arm.settings()).map(|(key, _)| key).collect();
    let chosen = series.choice.as_ref().map(|choice| choice.key.as_str());
    let declared = |key: &str| series.settings.contains_key(key) || chosen == Some(key);
    let wanted = |(key, value): &(&String, &String)| {
        let others = of_arms.contains(key.as_str()) || key.starts_with("run.");
        !others && (declared(key) || DEFAULTS.get(*key) != Some(value))
    };
    let wanted = settings.iter().filter(wanted);
    wanted.map(|(key, value)| (key.clone(), value.clone())).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::{DECLARED, Declaration, all_settings};

    #[test]
    fn families_tell_their_setting_even_where_it_is_the_default() {
        let declared = Declaration::read(DECLARED, false).unwrap();
        for (group, key) in [("sweep", "trainer.learning_rate"), ("scaling", "model.hidden_size")] {
            let members: Vec<_> = declared
                .series
                .iter()
                .filter(|series| series.group() == group)
                .collect();
            assert!(members.len() >= 3, "{group}");
            for series in members {
                let settings = of_series(&all_settings(&series.assignments()).unwrap(), series);
                let value: f64 = settings[key].parse().unwrap();
                let named: f64 = series.name.split_once('-').unwrap().1.parse().unwrap();
                assert_eq!(value, named, "{}", series.name);
                assert!(!settings.contains_key("trainer.precision") && !settings.contains_key("run.seed"));
            }
        }
    }
}
