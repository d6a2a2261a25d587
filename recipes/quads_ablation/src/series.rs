//! The declared series: `series.toml`, read and checked.
use anyhow::{Context, Result, bail};
use grpo_math::config::{Config, Layers};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};
use toml::Value;

use crate::arms::{ARMS, Arm};

/// The declaration that is shipped.
pub const DECLARED: &str = include_str!("../series.toml");

/// Settings of `grpo_math` by key, as `--set` takes them.
pub type Settings = BTreeMap<String, String>;

/// All series.
#[derive(Clone, Debug, PartialEq)]
pub struct Declaration {
    /// In the order in which they are shown.
    pub series: Vec<Series>,
}

/// Arms under the same settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name, which is that of its folder too. What comes before a `-` names a group of series.
    pub name: String,
    /// What it is for, in a sentence.
    pub about: String,
    /// Settings that differ from `grpo_math`'s defaults, the same for every arm.
    pub settings: Settings,
    /// In the order of the table of arms.
    pub arms: Vec<&'static Arm>,
    /// `run.seed` of each repetition.
    pub seeds: Vec<u64>,
    /// Held-out problems that start and end are judged by.
    pub final_problems: usize,
    /// Completions that gaps are measured on.
    pub gap_completions: usize,
    /// A setting whose value one arm alone decides before the others run.
    pub choice: Option<Choice>,
}

/// How a setting is chosen: the arm runs with each value and each seed; the highest mean pass@1 at the end, in the arm's
/// own precision, wins, and of equals the one that comes first.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The setting.
    pub key: String,
    /// Its values.
    pub grid: Vec<String>,
    /// The arm that decides.
    pub arm: &'static Arm,
    /// Seeds that no arm of the series runs with.
    pub seeds: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    common: Common,
    series: Vec<Entry>,
    quick: Entry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Common {
    seeds: Vec<u64>,
    final_problems: usize,
    gap_completions: usize,
    settings: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    about: String,
    /// A series that comes before, whose settings these go over.
    base: Option<String>,
    #[serde(default)]
    settings: BTreeMap<String, Value>,
    arms: Option<Vec<String>>,
    seeds: Option<Vec<u64>>,
    final_problems: Option<usize>,
    gap_completions: Option<usize>,
    choose: Option<ChoiceEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoiceEntry {
    key: String,
    grid: Vec<Value>,
    arm: String,
    seeds: Vec<u64>,
}

/// Settings that arms differ in, or that say where a run is: no series has a say in them.
const NOT_OF_A_SERIES: [&str; 5] = ["run.seed", "run.name", "run.directory", "run.device", "warmup.from"];

impl Declaration {
    /// Reads a declaration; with `quick` the short one.
    ///
    /// # Errors
    /// When it is no TOML of this form, or a series cannot be run as it is declared; the series is named.
    pub fn read(text: &str, quick: bool) -> Result<Self> {
        let file: File = toml::from_str(text).context("the declaration of the series (series.toml)")?;
        let common = Settings::from_iter(file.common.settings.iter().map(assignment));
        let mut all: Vec<Series> = Vec::new();
        for entry in file.series.iter().chain([&file.quick]) {
            let series = entry.resolve(&file.common, &common, &all);
            all.push(series.with_context(|| format!("the series {} (series.toml)", entry.name))?);
        }
        let short = all.pop().expect("the quick series is the last");
        Ok(Self {
            series: if quick { vec![short] } else { all },
        })
    }

    /// Those of some names or groups, in the order of the names; all, in the order of the declaration, where none is named.
    ///
    /// # Errors
    /// A name that is declared nowhere.
    pub fn select(&self, names: &[String]) -> Result<Vec<Series>> {
        if names.is_empty() {
            return Ok(self.series.clone());
        }
        let mut selected: Vec<Series> = Vec::new();
        for name in names {
            let is = |series: &&Series| series.name == *name || series.group() == name;
            let before = selected.len();
            for series in self.series.iter().filter(is) {
                if !selected.contains(series) {
                    selected.push(series.clone());
                }
            }
            if selected.len() == before && !selected.iter().any(|series| is(&series)) {
                let known: Vec<_> = self.series.iter().map(|series| series.name.as_str()).collect();
                bail!("--series {name}: expected one of {}", known.join(", "));
            }
        }
        Ok(selected)
    }
}

impl Entry {
    fn resolve(&self, common: &Common, settings: &Settings, before: &[Series]) -> Result<Series> {
        let base = match &self.base {
            None => None,
            Some(name) => match before.iter().find(|series| series.name == *name) {
                Some(base) => Some(base),
                None => bail!("base = {name:?}: expected a series that comes before it"),
            },
        };
        let mut settings = base.map_or_else(|| settings.clone(), |base| base.settings.clone());
        settings.extend(self.settings.iter().map(assignment));
        let arms = match &self.arms {
            None => ARMS.iter().collect(),
            Some(letters) => find_arms(letters)?,
        };
        let choice = self.choose.as_ref().map(|choose| -> Result<Choice> {
            Ok(Choice {
                key: choose.key.clone(),
                grid: choose.grid.iter().map(shown).collect(),
                arm: find_arms(std::slice::from_ref(&choose.arm))?[0],
                seeds: choose.seeds.clone(),
            })
        });
        let series = Series {
            name: self.name.clone(),
            about: self.about.clone(),
            settings,
            arms,
            seeds: self.seeds.clone().unwrap_or_else(|| common.seeds.clone()),
            final_problems: self.final_problems.unwrap_or(common.final_problems),
            gap_completions: self.gap_completions.unwrap_or(common.gap_completions),
            choice: choice.transpose()?,
        };
        series.check()?;
        Ok(series)
    }
}

impl Series {
    /// What a family of series is called: the name up to a `-`.
    pub fn group(&self) -> &str {
        self.name.split('-').next().unwrap_or(&self.name)
    }

    /// GRPO steps of every arm.
    pub fn steps(&self) -> usize {
        let steps = self.settings.get("grpo.steps").and_then(|steps| steps.parse().ok());
        steps.unwrap_or_else(|| {
            let defaults = Config::load(None, &[]).expect("the shipped defaults");
            defaults.learner.steps
        })
    }

    /// Changes settings of the series as `--set` does.
    ///
    /// # Errors
    /// A setting that is no series' business.
    pub fn change(&mut self, assignments: &[String]) -> Result<()> {
        for assignment in assignments {
            let Some((key, value)) = assignment.split_once('=') else {
                bail!("--set {assignment}: expected section.key=value");
            };
            if key.trim().is_empty() {
                bail!("--set {assignment}: expected section.key=value");
            }
            self.settings.insert(key.trim().into(), value.trim().into());
        }
        self.check()
            .with_context(|| format!("the series {}, as it is asked for", self.name))
    }

    /// Refuses what would make the arms differ in more than the table says.
    fn check(&self) -> Result<()> {
        let of_arms: BTreeSet<_> = ARMS.iter().flat_map(|arm| arm.settings()).map(|(key, _)| key).collect();
        for key in self.settings.keys() {
            if of_arms.contains(key.as_str()) {
                bail!(
                    "{key} is what the arms differ in (--list shows them); expected a setting that is the same for all"
                );
            }
            if NOT_OF_A_SERIES.contains(&key.as_str()) {
                bail!("{key} follows from seed, arm and --out; expected a setting that is the same for all arms");
            }
        }
        if let Some(choice) = &self.choice {
            if self.settings.contains_key(&choice.key) {
                bail!(
                    "{} is to be chosen by arm {}, and given as well",
                    choice.key,
                    choice.arm.letter
                );
            }
            if choice.grid.is_empty() || choice.seeds.is_empty() {
                bail!("a choice of {} without values or seeds", choice.key);
            }
            if choice.seeds.iter().any(|seed| self.seeds.contains(seed)) {
                bail!(
                    "seeds {:?} choose {}: expected other seeds for the arms",
                    choice.seeds,
                    choice.key
                );
            }
        }
        if self.arms.is_empty() || self.seeds.is_empty() {
            bail!("a series needs an arm and a seed at least");
        }
        if BTreeSet::from_iter(&self.seeds).len() != self.seeds.len() {
            bail!("seeds {:?}: each is to be given once", self.seeds);
        }
        // All that grpo_math refuses is refused before anything runs.
        let mut assignments = self.assignments();
        if let Some(choice) = &self.choice {
            assignments.push(format!("{}={}", choice.key, choice.grid[0]));
        }
        for arm in &self.arms {
            let mut assignments = assignments.clone();
            assignments.extend(arm.settings().map(|(key, value)| format!("{key}={value}")));
            Config::load(None, &assignments).with_context(|| format!("arm {}", arm.letter))?;
        }
        Ok(())
    }

    /// The settings as `--set` takes them.
    pub fn assignments(&self) -> Vec<String> {
        assignments(&self.settings)
    }
}

/// Settings as `--set` takes them.
pub fn assignments(settings: &Settings) -> Vec<String> {
    settings.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// Arms by their letters, in the order of the table.
///
/// # Errors
/// A letter that no arm has.
pub fn find_arms(letters: &[String]) -> Result<Vec<&'static Arm>> {
    let mut arms = Vec::new();
    for letter in letters {
        match Arm::find(letter) {
            Some(arm) => arms.push(arm),
            None => bail!("arm {letter}: expected one of {}", Arm::letters()),
        }
    }
    arms.sort_by_key(|arm| arm.index());
    arms.dedup_by_key(|arm| arm.index());
    Ok(arms)
}

/// Sections and keys that decide what a warm-up ends with. Series that agree in them share their warm-ups.
const OF_THE_WARMUP: [&str; 9] = [
    "task.",
    "model.",
    "warmup.",
    "trainer.beta_",
    "trainer.epsilon",
    "trainer.max_grad_norm",
    "rollout.temperature",
    "rollout.max_new_tokens",
    "rollout.slots",
];
/// Of these sections, what comes after the warm-up.
const AFTER_THE_WARMUP: [&str; 1] = ["model.outlier_"];

/// What `grpo_math` does when nothing is asked for.
pub static DEFAULTS: LazyLock<Settings> =
    LazyLock::new(|| all_settings(&[]).expect("the shipped defaults are accepted"));

/// Those of a series' settings that decide what its warm-up ends with, but for those that are the default.
pub fn warmup_settings(settings: &Settings) -> Settings {
    let is_default = |key: &str, value: &str| DEFAULTS.get(key).is_some_and(|default| default == value);
    let has = |key: &str, prefixes: &[&str]| prefixes.iter().any(|prefix| key.starts_with(prefix));
    let kept = settings
        .iter()
        .filter(|(key, _)| has(key, &OF_THE_WARMUP) && !has(key, &AFTER_THE_WARMUP))
        .filter(|(key, value)| !is_default(key, value));
    kept.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn assignment((key, value): (&String, &Value)) -> (String, String) {
    (key.clone(), shown(value))
}

/// A value as `--set` takes it, numbers as people write them.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Float(number) if number.fract() == 0.0 && number.abs() < 1e6 => format!("{number:.1}"),
        Value::Float(number) if number.abs() < 1e-2 => format!("{number:e}"),
        value => value.to_string(),
    }
}

/// What every setting is in the end, defaults included; without what says where a run is.
pub fn all_settings(assignments: &[String]) -> Result<Settings> {
    let mut layers = Layers::of_user(None, assignments)?;
    // Lowers what the task has too few problems for, as a run does.
    Config::read(&mut layers)?;
    Ok(settings_of(&layers))
}

/// The settings in which two differ, with the value of each: `absent` where one does not have it.
pub fn differences<'a>(one: &'a Settings, other: &'a Settings, absent: &'a str) -> impl Iterator<Item = [&'a str; 3]> {
    let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
    let value = move |settings: &'a Settings, key: &String| settings.get(key).map_or(absent, String::as_str);
    let differing = keys.into_iter().filter(|key| one.get(*key) != other.get(*key));
    differing.map(move |key| [key, value(one, key), value(other, key)])
}

/// The settings of a run but its place.
pub fn settings_of(layers: &Layers) -> Settings {
    let values = layers
        .values()
        .filter(|(key, _)| !["run.name", "run.directory", "warmup.from"].contains(key));
    values
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}
