//! `results.json` from the small files that arms and warm-ups leave, wherever these were made.
use anyhow::{Context, Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use crate::{
    arms::{ARMS, Arm},
    files::{self, ArmFile, GapsFile, device_of},
    layout::{Layout, arm_file},
    machine,
    results::{Answers, ArmRun, Chosen, Machine, Results, Seed, Series},
    series::{self, DEFAULTS, Settings},
};

/// Puts together what is there of some series.
///
/// # Errors
/// When a file cannot be read, is in the place of another arm's, or was made with other settings than the others of its series.
pub fn results(layout: &Layout, declared: &[series::Series], device: &str, quick: bool) -> Result<Results> {
    let mut all = Vec::new();
    let (mut processors, mut devices, mut warmups) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
    let mut total_s = 0.0;
    for series in declared {
        let mut seeds = Vec::new();
        let choice = match &series.choice {
            Some(_) => files::read::<Chosen>(&layout.choice(&series.name))?,
            None => None,
        };
        let mut settings = choice
            .as_ref()
            .and_then(|choice| run_of_choice(layout, series, choice).transpose())
            .transpose()?;
        let mut of_gaps: Option<(PathBuf, Settings)> = None;
        for seed in seeds_of(layout, &series.name)? {
            let mut runs = Vec::new();
            let mut start: Option<Start> = None;
            for arm in &ARMS {
                let run = layout.arm(&series.name, seed, arm);
                let Some(file) = ArmFile::of(&run, arm)? else {
                    continue;
                };
                let host = file.host();
                processors.extend(host.as_ref().and_then(|host| host.processor.clone()));
                devices.extend(device_of(&file.settings));
                total_s += file.run.wall_s;
                check_seed(&arm_file(&run), &file.settings, seed)?;
                let began = Start {
                    file: arm_file(&run),
                    warmup_steps: file.warmup_steps,
                    answers: Some(file.run.start.high.clone()),
                };
                check_first(&mut start, began, Start::check)?;
                let own = of_series(&file.settings, series);
                check_first(&mut settings, (run, own), check_same)?;
                runs.push(ArmRun { host, ..file.run });
            }
            let file = layout.gaps(&series.name, seed);
            let gaps = files::read::<GapsFile>(&file)?;
            if let Some(gaps) = &gaps {
                check_seed(&file, &gaps.settings, seed)?;
                let began = Start {
                    file: file.clone(),
                    warmup_steps: gaps.warmup_steps,
                    answers: None,
                };
                check_first(&mut start, began, Start::check)?;
                devices.extend(device_of(&gaps.settings));
                // Series share warm-ups.
                warmups.insert((gaps.warmup.clone(), seed), gaps.warmup_s);
                let own = without_choice(&gaps.settings, series);
                check_first(&mut of_gaps, (file, own), check_same)?;
            }
            if gaps.is_some() || !runs.is_empty() {
                seeds.push(Seed {
                    seed,
                    warmup_steps: start.map_or(0, |start| start.warmup_steps),
                    gaps: gaps.map_or_else(Vec::new, |gaps| gaps.gaps),
                    arms: runs,
                });
            }
        }
        if let (Some((run, settings)), Some(of_gaps)) = (&settings, &of_gaps) {
            check_same(&(run.clone(), without_choice(settings, series)), of_gaps)?;
        }
        if !seeds.is_empty() || choice.is_some() {
            all.push(Series {
                name: series.name.clone(),
                about: series.about.clone(),
                settings: match settings {
                    Some((_, settings)) => settings,
                    None => settings_without_arms(series, of_gaps.map(|(_, settings)| settings), choice.as_ref())?,
                },
                choice,
                seeds,
            });
        }
    }
    total_s += warmups.values().sum::<f64>();
    let [processors, devices] = [processors, devices].map(|names| names.into_iter().collect::<Vec<_>>());
    let results = Results {
        command: command(&all, declared, quick)?,
        quick,
        machine: Machine {
            processor: (!processors.is_empty()).then(|| processors.join(" and ")),
            processors: machine::processors(),
            device: match devices.is_empty() {
                true => device.into(),
                false => devices.join(" and "),
            },
            total_s,
        },
        series: all,
    };
    results
        .check()
        .with_context(|| format!("{}: its files do not fit together", layout.out().display()))?;
    Ok(results)
}

/// A run that helped to choose the value that was taken, where it is still there, with the settings of its series.
fn run_of_choice(layout: &Layout, series: &series::Series, choice: &Chosen) -> Result<Option<(PathBuf, Settings)>> {
    let (Some(arm), Some(seed)) = (Arm::find(&choice.arm), choice.seeds.first()) else {
        return Ok(None);
    };
    let run = layout.choice_arm(&series.name, &choice.chosen, *seed, arm);
    let file = ArmFile::of(&run, arm)?;
    Ok(file.map(|file| (run, of_series(&file.settings, series))))
}

/// Settings of a series none of whose arms is there: those of its gaps, or as they are declared. A setting that is chosen is among
/// them when it has been.
fn settings_without_arms(
    series: &series::Series,
    of_gaps: Option<Settings>,
    choice: Option<&Chosen>,
) -> Result<Settings> {
    let mut settings = match of_gaps {
        Some(settings) => settings,
        None => without_choice(&series::all_settings(&series.assignments())?, series),
    };
    if let Some(Chosen { key, chosen, .. }) = choice {
        let written = series::all_settings(&[format!("{key}={chosen}")])?;
        settings.extend(written.get(key).map(|value| (key.clone(), value.clone())));
    }
    Ok(settings)
}

/// Of answers in high precision at the start, the share that may differ between arms of one seed: processors round a few sums
/// differently. Two warm-ups differ in far more.
const OTHER_ANSWERS: f64 = 0.05;

/// What a file says of the policy that it begins with, which is one for all of a seed.
struct Start {
    file: PathBuf,
    warmup_steps: usize,
    /// In high precision; absent where nothing was answered.
    answers: Option<Answers>,
}

impl Start {
    fn check(&self, other: &Self) -> Result<()> {
        if self.warmup_steps != other.warmup_steps {
            bail!(
                "{} begins after {} steps of a warm-up and {} after {}: they do not have the same one. \
                 Move one of them away",
                self.file.display(),
                self.warmup_steps,
                other.file.display(),
                other.warmup_steps
            );
        }
        let (Some(Answers(one)), Some(Answers(another))) = (&self.answers, &other.answers) else {
            return Ok(());
        };
        let differing = one.iter().zip(another).filter(|(one, another)| one != another).count();
        if differing as f64 > OTHER_ANSWERS * one.len() as f64 {
            bail!(
                "{} and {} answer {differing} of {} problems differently before their first step, in high precision: they do \
                 not begin with the same warm-up. Move one of them away",
                self.file.display(),
                other.file.display(),
                one.len()
            );
        }
        Ok(())
    }
}

/// Holds the next of its kind against the first, which it is where there was none.
fn check_first<T>(first: &mut Option<T>, next: T, check: impl Fn(&T, &T) -> Result<()>) -> Result<()> {
    match first {
        Some(first) => check(first, &next)?,
        None => *first = Some(next),
    }
    Ok(())
}

/// Refuses a file of another seed.
fn check_seed(file: &Path, settings: &Settings, seed: u64) -> Result<()> {
    match settings.get("run.seed") {
        Some(made) if *made != seed.to_string() => {
            bail!(
                "{}: made with seed {made}, where that of seed {seed} is expected",
                file.display()
            )
        }
        _ => Ok(()),
    }
}

/// Arms of a series differ in what their table says and in nothing else, wherever they were run; so do their gaps.
fn check_same((one, settings): &(PathBuf, Settings), (other, others): &(PathBuf, Settings)) -> Result<()> {
    let differing: Vec<_> = series::differences(settings, others, "the default")
        .map(|[key, one, other]| format!("{key} was {one} and {other}"))
        .collect();
    if !differing.is_empty() {
        bail!(
            "{} and {} are of one series, and were made with other settings: {}. Move one of them away",
            one.display(),
            other.display(),
            differing.join("; ")
        );
    }
    Ok(())
}

/// Of an arm's settings, those that its series declares or chooses, and those that are not the default; without what arms and
/// seeds differ in.
pub(crate) fn of_series(settings: &Settings, series: &series::Series) -> Settings {
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

/// The same without what the series chooses: gaps are measured before, with any value of it.
fn without_choice(settings: &Settings, series: &series::Series) -> Settings {
    let mut settings = of_series(settings, series);
    if let Some(choice) = &series.choice {
        settings.remove(&choice.key);
    }
    settings
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

/// The command that makes these results. Seeds and settings that are not the declared ones are in it where they are the same
/// in all series.
fn command(series: &[Series], declared: &[series::Series], quick: bool) -> Result<String> {
    let mut command = "cargo run --release -p quads_ablation".to_string();
    let mut options = Vec::new();
    if quick {
        options.push("--quick".to_string());
    }
    if series.len() < declared.len() {
        let names: Vec<_> = series.iter().map(|series| series.name.as_str()).collect();
        options.push(format!("--series {}", names.join(",")));
    }
    let (mut seeds, mut settings) = (BTreeSet::new(), BTreeSet::new());
    for found in series {
        let Some(declared) = declared.iter().find(|declared| declared.name == found.name) else {
            continue;
        };
        if found.seeds.is_empty() {
            continue;
        }
        let ran: Vec<u64> = found.seeds.iter().map(|seed| seed.seed).collect();
        seeds.insert((ran != declared.seeds).then_some(ran));
        settings.insert(changed(&found.settings, declared)?);
    }
    if let (1, Some(Some(seeds))) = (seeds.len(), seeds.first()) {
        let list: Vec<String> = seeds.iter().map(u64::to_string).collect();
        options.push(match &list[..] {
            // One number alone would be how many.
            [one] => format!("--seeds {one}-{one}"),
            list => format!("--seeds {}", list.join(",")),
        });
    }
    if settings.len() == 1 {
        let settings = settings.into_iter().flatten();
        options.extend(settings.map(|(key, value)| format!("--set '{key}={value}'")));
    }
    if !options.is_empty() {
        command = format!("{command} -- {}", options.join(" "));
    }
    Ok(command)
}

/// Settings of a series that are not those that it declares.
fn changed(settings: &Settings, declared: &series::Series) -> Result<Settings> {
    let as_declared = of_series(&series::all_settings(&declared.assignments())?, declared);
    let chosen = declared.choice.as_ref().map(|choice| choice.key.as_str());
    let keys: BTreeSet<_> = settings.keys().chain(as_declared.keys()).collect();
    let changed = keys
        .into_iter()
        .filter(|key| chosen != Some(key.as_str()) && settings.get(*key) != as_declared.get(*key));
    // What is not there is the default.
    let value = |key: &String| settings.get(key).or_else(|| DEFAULTS.get(key)).cloned();
    Ok(changed.filter_map(|key| Some((key.clone(), value(key)?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::{DECLARED, Declaration, all_settings};

    #[test]
    fn a_choice_is_in_the_results_before_and_with_its_arms() {
        let out = std::env::temp_dir().join(format!("quads_ablation_{}_assembled_choice", std::process::id()));
        let _ = std::fs::remove_dir_all(&out);
        let layout = Layout::new(out.clone());
        let declared = Declaration::read(DECLARED, false).unwrap().series;
        let hard = declared.iter().find(|series| series.name == "hard").unwrap();
        let choice = crate::synthetic::choice();
        files::write(&layout.choice("hard"), &choice).unwrap();
        let assembled = || results(&layout, &declared, "cpu", false);
        let alone = assembled().unwrap();
        let [series] = &alone.series[..] else {
            panic!("one series");
        };
        assert_eq!((series.name.as_str(), series.seeds.len()), ("hard", 0));
        assert_eq!(series.choice.as_ref(), Some(&choice));
        assert!(alone.command.ends_with(" -- --series hard"), "{}", alone.command);
        // They are the settings that its arms will have.
        let rate = |value: &str| [hard.assignments(), vec![format!("trainer.learning_rate={value}")]].concat();
        let arm = |value: &str, arm: &'static Arm| {
            let run = crate::synthetic::series("hard", &crate::synthetic::ARMS, [1, 4, 8]).seeds[0].arms[0].clone();
            ArmFile {
                complete: true,
                settings: all_settings(&crate::gaps::of_arm(&rate(value), arm)).unwrap(),
                warmup_steps: 1,
                processor: None,
                run: ArmRun {
                    arm: arm.letter.into(),
                    ..run
                },
            }
        };
        let put = |value: &str, letter: &'static Arm| {
            let run = layout.arm("hard", 1, letter);
            files::write(&arm_file(&run), &arm(value, letter)).unwrap();
        };
        put("1e-4", &ARMS[0]);
        let with_arm = assembled().unwrap();
        assert_eq!(with_arm.series[0].settings, series.settings);
        assert_eq!(with_arm.series[0].choice.as_ref(), Some(&choice));
        // Arms that were run with another value are not those of this choice.
        put("3e-4", &ARMS[0]);
        let error = format!("{:#}", assembled().unwrap_err());
        assert!(
            error.contains("trainer.learning_rate = 1e-4 was chosen, and 0.0003 is what its arms were run with"),
            "{error}"
        );
        // Nor are those whose choice was made with other settings.
        put("1e-4", &ARMS[0]);
        let mut other = arm("1e-4", &ARMS[0]);
        other.settings.insert("grpo.steps".into(), "7".into());
        let tried = layout.choice_arm("hard", "1e-4", 101, &ARMS[0]);
        files::write(&arm_file(&tried), &other).unwrap();
        let error = format!("{:#}", assembled().unwrap_err());
        assert!(error.contains("other settings: grpo.steps was 7 and 100"), "{error}");
        std::fs::remove_dir_all(out).unwrap();
    }

    /// Otherwise what is measured anew would be refused by their files.
    #[test]
    fn results_in_the_repository_have_the_settings_that_are_declared() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
        let declared = Declaration::read(DECLARED, false).unwrap().series;
        let kept = crate::page::read(&folder).unwrap();
        for found in kept.iter().flat_map(|kept| &kept.results.series) {
            let series = declared.iter().find(|series| series.name == found.name).unwrap();
            let mut assignments = series.assignments();
            if let Some(choice) = &series.choice {
                assignments.push(format!("{}={}", choice.key, found.settings[&choice.key]));
            }
            let settings = of_series(&all_settings(&assignments).unwrap(), series);
            assert_eq!(found.settings, settings, "{}", found.name);
        }
    }

    #[test]
    fn members_of_a_family_tell_the_setting_that_names_them() {
        let declared = Declaration::read(DECLARED, false).unwrap();
        for (group, key) in [("sweep", "trainer.learning_rate"), ("scaling", "model.hidden_size")] {
            let members: Vec<_> = declared
                .series
                .iter()
                .filter(|series| series.group() == group)
                .collect();
            assert!(members.len() >= 2, "{group}");
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
