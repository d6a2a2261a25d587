//! `results.json`: all that the tables, plots and pages are made of.
//!
//! The file is small enough to be kept in a repository: answers are bits, measured numbers have [`DIGITS`] significant
//! digits, and [`Results::thinned`] leaves every so many steps of the curves. A number that is not finite is `null`.
use anyhow::{Context, Result, anyhow, bail};
use grpo_math::atomic_write::write_atomically;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::{collections::BTreeMap, fs, path::Path};

/// Of the file's form; a file of another one is refused.
pub const VERSION: u64 = 1;
/// Significant digits of a measured number in the file.
pub const DIGITS: usize = 5;

/// All series that were run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// How to run it again.
    pub command: String,
    /// Whether it is the short run (`--quick`), which shows that the recipe works and little else.
    pub quick: bool,
    /// What it ran on.
    pub machine: Machine,
    /// In the order in which they are declared.
    pub series: Vec<Series>,
}

/// What depends on the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the processor, where the system tells.
    pub processor: Option<String>,
    /// Processors that the run could use.
    pub processors: usize,
    /// `cpu`, `cuda:0` or `vulkan`.
    pub device: String,
    /// Sum of the arms' and warm-ups' wall times, in seconds.
    #[serde(with = "number")]
    pub total_s: f64,
}

/// What one arm was run on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Host {
    /// Name of the processor, where the system tells.
    pub processor: Option<String>,
    /// Processors that the run could use; absent where the name alone was recorded.
    pub processors: Option<usize>,
    /// `cpu`, `cuda:0` or `vulkan`.
    pub device: String,
}

/// Arms under the same declared settings, for some seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Its name: `calm`, `stress`, … What comes before a `-` names a group of series.
    pub name: String,
    /// What it is for, in a sentence.
    pub about: String,
    /// Settings of `grpo_math` that differ from its defaults, the same for every arm.
    pub settings: BTreeMap<String, String>,
    /// The setting that one arm alone chose before the others ran, where it is known how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Chosen>,
    /// By seed.
    pub seeds: Vec<Seed>,
}

/// A setting that one arm chose; `choice.json` has the same form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chosen {
    /// How.
    pub rule: String,
    /// The setting.
    pub key: String,
    /// The arm that decided.
    pub arm: String,
    /// Its seeds.
    pub seeds: Vec<u64>,
    /// What was tried.
    pub tried: Vec<Tried>,
    /// The value that all arms run with.
    pub chosen: String,
}

/// One value of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// The value.
    pub value: String,
    /// Pass@1 at the end, in the arm's own precision, by seed.
    #[serde(with = "numbers")]
    pub pass_at_1: Vec<f64>,
}

/// The arms that started from one warm-up checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seed {
    /// `run.seed`
    pub seed: u64,
    /// Steps of the warm-up.
    pub warmup_steps: usize,
    /// Gaps of the declared arms' precisions at the warm-up checkpoint, on the same tokens.
    pub gaps: Vec<Gap>,
    /// In the order of the table of arms.
    pub arms: Vec<ArmRun>,
}

/// |Δ log-prob| between an arm's trainer and its rollout, over the same completions for all arms, in nats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Letter of the arm.
    pub arm: String,
    /// Tokens measured.
    pub tokens: usize,
    /// Mean |δ|.
    #[serde(with = "number")]
    pub mean: f64,
    /// 99th percentile of |δ|.
    #[serde(with = "number")]
    pub p99: f64,
    /// Largest |δ|.
    #[serde(with = "number")]
    pub max: f64,
    /// Mean |δ_weight|; absent where no precision has the rollout's weights with the trainer's activations.
    #[serde(with = "optional_number")]
    pub weight: Option<f64>,
    /// Mean |δ_act|.
    #[serde(with = "optional_number")]
    pub activation: Option<f64>,
    /// Mean |δ_num|.
    #[serde(with = "optional_number")]
    pub numerics: Option<f64>,
    /// Largest |δ_weight + δ_act + δ_num − δ| of a token.
    #[serde(with = "optional_number")]
    pub residue: Option<f64>,
}

/// One arm from one warm-up checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmRun {
    /// Letter of the arm.
    pub arm: String,
    /// The policy at the start.
    pub start: Evaluation,
    /// The policy after the last step that was taken.
    pub end: Evaluation,
    /// Steps taken; fewer than asked for where the arm could not go on.
    pub steps: usize,
    /// Why it could not go on.
    pub stopped: Option<String>,
    /// Updates left out for gradients that were not finite.
    pub skipped_updates: usize,
    /// Whether, when and by which rule it collapsed.
    pub collapse: Option<Collapse>,
    /// What was measured on the way.
    pub curve: Curve,
    /// Errors of activations by layer, at the end.
    pub layers: Vec<LayerError>,
    /// Wall time, in seconds.
    #[serde(with = "number")]
    pub wall_s: f64,
    /// What its last steps ran on, where that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
}

/// Held-out problems answered by a policy in several precisions, one sample a problem, the same random numbers for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// In the precision of the arm's rollout.
    pub own: Answers,
    /// In the precision of the arm's trainer.
    pub trainer: Answers,
    /// In high precision.
    pub high: Answers,
    /// In W4A4, without compensation.
    pub w4a4: Answers,
}

/// Which problems were answered right, in their order.
///
/// In the file: their number, a colon, and the answers as hexadecimal digits, the first problem in the highest bit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers(pub Vec<bool>);

/// Why an arm counts as collapsed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Collapse {
    /// GRPO step at which the rule was first met.
    pub step: usize,
    /// Name of the rule.
    pub rule: String,
}

/// Numbers by step, under the names of `metrics.jsonl`; `None` where a number was not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// GRPO steps.
    pub step: Vec<usize>,
    /// One list a name, as long as `step`.
    #[serde(with = "columns")]
    pub columns: BTreeMap<String, Vec<Option<f64>>>,
}

/// How well a layer's activations survive their rounding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerError {
    /// Path of the layer, or of the group of layers with the same input.
    pub layer: String,
    /// Relative error (root of the summed squares) of W4A4 activations without compensation.
    #[serde(with = "number")]
    pub w4a4: f64,
    /// The same under the arm's rollout precision.
    #[serde(with = "number")]
    pub own: f64,
    /// Largest over median root-mean-square of a channel.
    #[serde(with = "number")]
    pub channel_ratio: f64,
    /// Share of the squared residual that the calibrated half of the channels captures.
    #[serde(with = "number")]
    pub captured: f64,
}

/// Series of one group that are named after the value of a setting: a learning-rate sweep, a scaling over model sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Family<'a> {
    /// Name of the group.
    pub name: &'a str,
    /// The setting that differs.
    pub setting: &'a str,
    /// Its values, rising, each with its series; one at least.
    pub members: Vec<(f64, &'a Series)>,
}

/// Where a policy is asked its held-out problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The precision of the arm's rollout.
    Own,
    /// The precision of the arm's trainer.
    Trainer,
    /// High precision, for all arms.
    High,
    /// W4A4 without compensation, for all arms.
    W4a4,
}

impl Side {
    /// All of them, in the order of the tables.
    pub const ALL: [Side; 4] = [Side::Own, Side::Trainer, Side::High, Side::W4a4];

    /// Heading of a column.
    pub fn name(self) -> &'static str {
        match self {
            Side::Own => "own rollout",
            Side::Trainer => "own trainer",
            Side::High => "high",
            Side::W4a4 => "W4A4",
        }
    }
}

impl Results {
    /// The whole file, in one line.
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct File<'a> {
            version: u64,
            #[serde(flatten)]
            results: &'a Results,
        }
        let file = File {
            version: VERSION,
            results: self,
        };
        let mut text = serde_json::to_string(&file).expect("names and numbers can always be written");
        text.push('\n');
        text
    }

    /// Reads what [`Results::to_json`] wrote.
    ///
    /// # Errors
    /// When the text is damaged, of another version, or does not fit together: a curve with columns of other lengths than its
    /// steps, arms of a seed with other numbers of held-out problems, an arm or a seed twice.
    pub fn from_json(text: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            version: Option<u64>,
        }
        let Version { version } = serde_json::from_str(text).context("not a results file")?;
        match version {
            Some(VERSION) => {}
            Some(other) => bail!("a results file of version {other}: expected version {VERSION}"),
            None => bail!("not a results file: it has no version (expected \"version\": {VERSION})"),
        }
        let results: Self = serde_json::from_str(text).context("a damaged results file")?;
        results.check().context("a damaged results file")?;
        Ok(results)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// As [`Results::from_json`], with the file's name.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::from_json(&text).with_context(|| format!("cannot use {}", path.display()))
    }

    /// Writes a file, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_atomically(path, self.to_json().as_bytes())
    }

    /// The same with curves of every so many steps ([`Curve::thinned`]), for the repository.
    pub fn thinned(&self, every: usize) -> Self {
        let mut thin = self.clone();
        for arm in thin
            .series
            .iter_mut()
            .flat_map(|s| &mut s.seeds)
            .flat_map(|s| &mut s.arms)
        {
            arm.curve = arm.curve.thinned(every);
        }
        thin
    }

    /// One file a series, under its name.
    pub fn by_series(&self) -> Vec<(&str, Self)> {
        let alone = |series: &Series| Self {
            series: vec![series.clone()],
            ..self.clone()
        };
        self.series.iter().map(|s| (s.name.as_str(), alone(s))).collect()
    }

    /// Groups of series that are named after the values of a setting: `sweep-1e-4` and `sweep-3e-4` where that is
    /// `trainer.learning_rate`. Of several settings that have these values, the first by its name that every other
    /// series has otherwise, if there is one.
    pub fn families(&self) -> Vec<Family<'_>> {
        let mut names: Vec<&str> = Vec::new();
        for series in &self.series {
            if !names.contains(&series.group()) {
                names.push(series.group());
            }
        }
        names.into_iter().filter_map(|name| self.family(name)).collect()
    }

    fn family<'a>(&'a self, name: &'a str) -> Option<Family<'a>> {
        let of_group = self.series.iter().filter(|series| series.group() == name);
        let value = |series: &'a Series| Some((series.value()?, series));
        let mut members: Vec<(f64, &Series)> = of_group.map(value).collect::<Option<_>>()?;
        members.sort_by(|one, other| one.0.total_cmp(&other.0));
        let named_after = |key: &&String| {
            let value = |series: &Series| series.settings.get(*key)?.parse::<f64>().ok();
            members.iter().all(|(named, series)| value(series) == Some(*named))
        };
        let mut candidates = members.first()?.1.settings.keys().filter(named_after);
        // What another series has too is hardly what this family varies.
        let varied = |key: &&String| {
            let mut others = self.series.iter().filter(|series| series.group() != name);
            others.all(|other| other.settings.get(*key) != members[0].1.settings.get(*key))
        };
        let setting = candidates.clone().find(varied).or_else(|| candidates.next())?;
        Some(Family { name, setting, members })
    }

    /// The series that are no part of a family, in their order.
    pub fn main_series(&self) -> impl Iterator<Item = &Series> {
        let families: Vec<&str> = self.families().iter().map(|family| family.name).collect();
        self.series
            .iter()
            .filter(move |series| !families.contains(&series.group()))
    }

    /// Whether it fits together.
    pub(crate) fn check(&self) -> Result<()> {
        for (at, series) in self.series.iter().enumerate() {
            if self.series[..at].iter().any(|other| other.name == series.name) {
                bail!("series {} is there twice", series.name);
            }
            if let Some(choice) = &series.choice {
                choice
                    .check(&series.settings)
                    .with_context(|| format!("series {}", series.name))?;
            }
            for (at, seed) in series.seeds.iter().enumerate() {
                let place = || format!("series {}, seed {}", series.name, seed.seed);
                if series.seeds[..at].iter().any(|other| other.seed == seed.seed) {
                    bail!("{} is there twice", place());
                }
                seed.check().with_context(place)?;
            }
        }
        Ok(())
    }
}

impl Series {
    /// What a group of series is called: the name up to a `-`.
    pub fn group(&self) -> &str {
        self.name.split('-').next().unwrap_or(&self.name)
    }

    /// The value that a series of a family is named after.
    pub fn value(&self) -> Option<f64> {
        self.name.split_once('-')?.1.parse().ok()
    }

    /// Letters of the arms that any seed has, in the order of the table of arms.
    pub fn arms(&self) -> Vec<&str> {
        let mut arms: Vec<&str> = Vec::new();
        for arm in self.seeds.iter().flat_map(|seed| &seed.arms) {
            if !arms.contains(&arm.arm.as_str()) {
                arms.push(&arm.arm);
            }
        }
        arms
    }

    /// One arm's runs, by seed.
    pub fn runs<'a>(&'a self, arm: &'a str) -> impl Iterator<Item = &'a ArmRun> + Clone {
        self.seeds.iter().filter_map(move |seed| seed.arm(arm))
    }

    /// One arm's gaps at the warm-up checkpoints, by seed.
    pub fn gaps<'a>(&'a self, arm: &'a str) -> impl Iterator<Item = &'a Gap> + Clone {
        self.seeds.iter().filter_map(move |seed| seed.gap(arm))
    }
}

impl Chosen {
    /// Whether it was made of all that another one was made of: every value that was tried, with every seed.
    pub fn covers(&self, other: &Self) -> bool {
        let tried = |value: &str| self.tried.iter().any(|tried| tried.value == value);
        other.seeds.iter().all(|seed| self.seeds.contains(seed)) && other.tried.iter().all(|other| tried(&other.value))
    }

    fn check(&self, settings: &BTreeMap<String, String>) -> Result<()> {
        let Self { key, chosen, .. } = self;
        if !self.tried.iter().any(|tried| tried.value == *chosen) {
            bail!("{key} = {chosen} was chosen, and not tried");
        }
        for Tried { value, pass_at_1 } in &self.tried {
            if pass_at_1.len() != self.seeds.len() {
                bail!(
                    "{} results of {key} = {value}, which {} seeds tried",
                    pass_at_1.len(),
                    self.seeds.len()
                );
            }
        }
        match settings.get(key) {
            Some(value) if same_value(value, chosen) => Ok(()),
            Some(value) => bail!("{key} = {chosen} was chosen, and {value} is what its arms were run with"),
            None => bail!("{key} was chosen, and is not among the settings"),
        }
    }
}

/// Whether two texts are one value of a setting: `3e-4` and `0.0003` are.
fn same_value(one: &str, other: &str) -> bool {
    let [one, other] = [one, other].map(|text| text.trim_matches('"'));
    match (one.parse::<f64>(), other.parse::<f64>()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

impl Seed {
    /// An arm by its letter.
    pub fn arm(&self, letter: &str) -> Option<&ArmRun> {
        self.arms.iter().find(|arm| arm.arm == letter)
    }

    /// The gap of an arm's precisions at the warm-up checkpoint.
    pub fn gap(&self, letter: &str) -> Option<&Gap> {
        self.gaps.iter().find(|gap| gap.arm == letter)
    }

    fn check(&self) -> Result<()> {
        let mut problems = None;
        for (at, arm) in self.arms.iter().enumerate() {
            if self.arms[..at].iter().any(|other| other.arm == arm.arm) {
                bail!("arm {} is there twice", arm.arm);
            }
            arm.curve.check().with_context(|| format!("arm {}", arm.arm))?;
            for evaluation in [&arm.start, &arm.end] {
                for side in Side::ALL {
                    let found = evaluation.side(side).0.len();
                    let expected = *problems.get_or_insert(found);
                    if found != expected {
                        bail!("arm {}: {found} answers, where others have {expected}", arm.arm);
                    }
                }
            }
        }
        for (at, gap) in self.gaps.iter().enumerate() {
            if self.gaps[..at].iter().any(|other| other.arm == gap.arm) {
                bail!("the gap of arm {} is there twice", gap.arm);
            }
        }
        Ok(())
    }
}

impl Evaluation {
    /// The answers in one precision.
    pub fn side(&self, side: Side) -> &Answers {
        match side {
            Side::Own => &self.own,
            Side::Trainer => &self.trainer,
            Side::High => &self.high,
            Side::W4a4 => &self.w4a4,
        }
    }
}

impl Answers {
    /// Share of right answers; NaN without problems.
    pub fn share(&self) -> f64 {
        self.0.iter().filter(|right| **right).count() as f64 / self.0.len() as f64
    }
}

impl FromIterator<bool> for Answers {
    fn from_iter<I: IntoIterator<Item = bool>>(answers: I) -> Self {
        Self(answers.into_iter().collect())
    }
}

impl Serialize for Answers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digit = |bits: &[bool]| {
            let value = (0..4).fold(0, |value, bit| 2 * value + u32::from(bits.get(bit) == Some(&true)));
            char::from_digit(value, 16).expect("four bits")
        };
        let digits: String = self.0.chunks(4).map(digit).collect();
        serializer.serialize_str(&format!("{}:{digits}", self.0.len()))
    }
}

impl<'de> Deserialize<'de> for Answers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_answers(&text).map_err(D::Error::custom)
    }
}

fn parse_answers(text: &str) -> Result<Answers> {
    let (number, digits) = text
        .split_once(':')
        .ok_or_else(|| anyhow!("answers without a number of problems: expected `8:f0` for eight"))?;
    let problems: usize = number
        .parse()
        .map_err(|_| anyhow!("answers to `{number}` problems: expected a number"))?;
    if digits.chars().count() != problems.div_ceil(4) {
        let found = digits.chars().count();
        bail!(
            "{found} digits for {problems} answers: expected {}",
            problems.div_ceil(4)
        );
    }
    let mut answers = Vec::with_capacity(problems.next_multiple_of(4));
    for digit in digits.chars() {
        let value = digit
            .to_digit(16)
            .ok_or_else(|| anyhow!("`{digit}` among the answers: expected a hexadecimal digit"))?;
        answers.extend((0..4).rev().map(|bit| value >> bit & 1 == 1));
    }
    if answers[problems..].contains(&true) {
        bail!("more right answers than the {problems} problems have");
    }
    answers.truncate(problems);
    Ok(Answers(answers))
}

impl Curve {
    /// A column's measured values, as `(step, value)`.
    pub fn points<'a>(&'a self, column: &str) -> impl Iterator<Item = (usize, f64)> + 'a {
        let values = self.columns.get(column).map(Vec::as_slice).unwrap_or_default();
        let measured = |(step, value): (&usize, &Option<f64>)| Some((*step, value.filter(|v| v.is_finite())?));
        self.step.iter().zip(values).filter_map(measured)
    }

    /// The last value of a column that was measured.
    pub fn last(&self, column: &str) -> Option<f64> {
        self.points(column).last().map(|(_, value)| value)
    }

    /// Steps that `every` divides, the first and the last two (so that the last one is itself, for tables that tell where a
    /// run ended), each standing for the steps since the one before: with the largest of their values where a column's name
    /// ends in `max`, with the mean of those measured otherwise. What depends on the machine (`time/`, `perf/`) is left out.
    pub fn thinned(&self, every: usize) -> Self {
        let last = self.step.len().saturating_sub(1);
        let kept: Vec<usize> = (0..self.step.len())
            .filter(|&at| at == 0 || at + 1 >= last || self.step[at].is_multiple_of(every.max(1)))
            .collect();
        let thin = |name: &str, values: &[Option<f64>]| {
            let mut from = 0;
            let mut column = Vec::with_capacity(kept.len());
            for &at in &kept {
                let measured = values[from..=at].iter().flatten().copied();
                from = at + 1;
                let number = measured.clone().count();
                column.push((number > 0).then(|| match name.ends_with("max") {
                    true => measured.fold(f64::NEG_INFINITY, f64::max),
                    false => measured.sum::<f64>() / number as f64,
                }));
            }
            column
        };
        let columns = self.columns.iter().filter(|(name, _)| {
            let of_the_machine = name.starts_with("time/") || name.starts_with("perf/");
            !of_the_machine
        });
        Self {
            step: kept.iter().map(|&at| self.step[at]).collect(),
            columns: columns
                .map(|(name, values)| (name.clone(), thin(name, values)))
                .collect(),
        }
    }

    fn check(&self) -> Result<()> {
        for (name, values) in &self.columns {
            if values.len() != self.step.len() {
                bail!("{} values of {name} for {} steps", values.len(), self.step.len());
            }
        }
        if !self.step.is_sorted_by(|one, next| one < next) {
            bail!("the steps of the curve are not in order");
        }
        Ok(())
    }
}

/// To [`DIGITS`] significant digits.
pub fn rounded(value: f64) -> f64 {
    format!("{value:.*e}", DIGITS - 1).parse().unwrap_or(value)
}

/// A number that is rounded, and `null` where it is not finite.
mod number {
    use super::*;

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        rounded(*value).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

/// The same where a number may be absent: what was not finite is absent when it is read again.
mod optional_number {
    use super::*;

    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(rounded).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        Option::deserialize(deserializer)
    }
}

/// The same for a list.
mod numbers {
    use super::*;

    pub fn serialize<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().copied().map(rounded))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
        let values: Vec<Option<f64>> = Vec::deserialize(deserializer)?;
        Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
    }
}

/// The same for the columns of a curve.
mod columns {
    use super::*;
    type Columns = BTreeMap<String, Vec<Option<f64>>>;

    pub fn serialize<S: Serializer>(columns: &Columns, serializer: S) -> Result<S::Ok, S::Error> {
        let short = |values: &Vec<Option<f64>>| values.iter().map(|v| v.map(rounded)).collect::<Vec<_>>();
        serializer.collect_map(columns.iter().map(|(name, values)| (name, short(values))))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Columns, D::Error> {
        BTreeMap::deserialize(deserializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn a_file_reads_back_as_what_was_written_but_for_the_digits() {
        let results = synthetic::results();
        let text = results.to_json();
        assert!(
            text.starts_with("{\"version\":1,\"command\":\"cargo run"),
            "{}",
            &text[..80]
        );
        let read = Results::from_json(&text).unwrap();
        assert_eq!(read.to_json(), text, "what was read is written alike");
        let (one, other) = (&results.series[1].seeds[0].arms[1], &read.series[1].seeds[0].arms[1]);
        assert_eq!(
            (&one.start, &one.end, &one.collapse),
            (&other.start, &other.end, &other.collapse)
        );
        for ((step, value), (other_step, other_value)) in
            one.curve.points("eval/pass@1").zip(other.curve.points("eval/pass@1"))
        {
            assert_eq!(step, other_step);
            assert!(
                (value - other_value).abs() <= 5e-5 * value.abs(),
                "{value} became {other_value}"
            );
        }
        assert_eq!(one.curve.points("eval/pass@1").count(), 26);
    }

    #[test]
    fn machines_and_choices_are_kept_and_may_be_absent() {
        let mut results = synthetic::results();
        let before = results.to_json();
        assert!(!before.contains("\"host\"") && !before.contains("\"choice\""));
        let host = Host {
            processor: Some("a processor".into()),
            processors: Some(32),
            device: "cpu".into(),
        };
        results.series[2].choice = Some(synthetic::choice());
        results.series[2].seeds[0].arms[0].host = Some(host.clone());
        let read = Results::from_json(&results.to_json()).unwrap();
        assert_eq!(read.series[2].choice, Some(synthetic::choice()));
        assert_eq!(read.series[2].seeds[0].arms[0].host, Some(host));
        assert_eq!(read.series[2].seeds[0].arms[1].host, None);
        assert_eq!(Results::from_json(&before).unwrap().to_json(), before);
    }

    #[test]
    fn numbers_have_five_digits_and_zero_stays_zero() {
        let rounded = [0.123_456_789, 12_345_678.0, -3.000_04e-9, 0.0, 1.0].map(rounded);
        assert_eq!(rounded, [0.12346, 12_346_000.0, -3e-9, 0.0, 1.0]);
    }

    #[test]
    fn a_number_that_is_not_finite_is_written_as_null() {
        let mut results = synthetic::results();
        let seed = &mut results.series[0].seeds[0];
        seed.gaps[0].mean = f64::INFINITY;
        seed.gaps[0].weight = Some(f64::NAN);
        seed.arms[0].curve.columns.get_mut("actor/entropy").unwrap()[3] = Some(f64::NAN);
        let read = Results::from_json(&results.to_json()).unwrap();
        let seed = &read.series[0].seeds[0];
        assert!(seed.gaps[0].mean.is_nan());
        assert_eq!(
            (seed.gaps[0].weight, seed.arms[0].curve.columns["actor/entropy"][3]),
            (None, None)
        );
    }

    #[test]
    fn answers_are_bits() {
        let json = |answers: &[bool]| serde_json::to_string(&Answers(answers.to_vec())).unwrap();
        assert_eq!(json(&[]), r#""0:""#);
        assert_eq!(json(&[true]), r#""1:8""#);
        assert_eq!(json(&[false, true, true, true, true]), r#""5:78""#);
        for length in 0..40 {
            let answers: Answers = (0..length).map(|at| at * at % 7 < 3).collect();
            let text = serde_json::to_string(&answers).unwrap();
            assert_eq!(serde_json::from_str::<Answers>(&text).unwrap(), answers);
        }
        for (text, expected) in [
            ("f0", "without a number of problems"),
            ("x:f0", "answers to `x` problems"),
            ("9:f0", "2 digits for 9 answers: expected 3"),
            ("8:g0", "`g` among the answers"),
            ("3:1", "more right answers than the 3 problems have"),
        ] {
            let error = serde_json::from_str::<Answers>(&format!("\"{text}\""))
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}\nwithout {expected}");
        }
    }

    #[test]
    fn thinned_curves_keep_peaks_and_means() {
        let column = |values: &[f64]| values.iter().map(|v| (*v >= 0.0).then_some(*v)).collect::<Vec<_>>();
        let curve = Curve {
            step: (0..=7).collect(),
            columns: BTreeMap::from([
                ("gap/max".into(), column(&[-1.0, 1.0, 9.0, 2.0, 3.0, 4.0, 3.0, 8.0])),
                ("gap/mean".into(), column(&[-1.0, 1.0, 2.0, 6.0, 3.0, 5.0, 4.0, 8.0])),
                (
                    "eval/pass@1".into(),
                    column(&[0.5, -1.0, -1.0, 0.75, -1.0, -1.0, 1.0, -1.0]),
                ),
                ("time/step_s".into(), column(&[1.0; 8])),
            ]),
        };
        let thin = curve.thinned(3);
        assert_eq!(thin.step, [0, 3, 6, 7]);
        assert_eq!(thin.columns["gap/max"], [None, Some(9.0), Some(4.0), Some(8.0)]);
        assert_eq!(thin.columns["gap/mean"], [None, Some(3.0), Some(4.0), Some(8.0)]);
        assert_eq!(thin.columns["eval/pass@1"], [Some(0.5), Some(0.75), Some(1.0), None]);
        assert_eq!(thin.columns.len(), 3, "times are left out");
        assert_eq!(thin.last("eval/pass@1"), Some(1.0));
        // Where a run ended stays what it is.
        let thin = curve.thinned(5);
        assert_eq!(thin.step, [0, 5, 6, 7]);
        for column in ["gap/max", "gap/mean"] {
            assert_eq!(thin.last(column), curve.last(column));
        }
    }

    #[test]
    fn a_full_series_is_small_once_it_is_thinned() {
        let mut series = synthetic::series("stress", &synthetic::ARMS, [5, 250, 1024]);
        // As many columns as `metrics.jsonl` has, none of them round.
        for arm in series.seeds.iter_mut().flat_map(|seed| &mut seed.arms) {
            let noise: Vec<_> = arm
                .curve
                .step
                .iter()
                .map(|s| Some((1.0 + *s as f64).sqrt() / 7.0))
                .collect();
            for number in arm.curve.columns.len()..30 {
                arm.curve.columns.insert(format!("some/metric_{number}"), noise.clone());
            }
        }
        let results = Results {
            series: vec![series],
            ..synthetic::results()
        };
        let bytes = results.thinned(5).to_json().len();
        assert!(bytes < 1_000_000, "{bytes} bytes");
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_the_reason() {
        let folder = std::env::temp_dir().join(format!("quads_ablation_{}_results", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        let path = folder.join("results.json");
        let good = synthetic::results();
        let refused = |text: &str, expected: &str| {
            fs::write(&path, text).unwrap();
            let error = format!("{:#}", Results::read(&path).unwrap_err());
            assert!(
                error.starts_with(&format!("cannot use {}: ", path.display())),
                "{error}"
            );
            assert!(error.contains(expected), "{error}\nwithout {expected}");
        };
        let text = good.to_json();
        refused(&text[..text.len() / 2], "not a results file: EOF");
        refused("[1]", "results file: invalid type");
        refused("{}", "it has no version");
        refused(
            &text.replacen("\"version\":1", "\"version\":2", 1),
            "version 2: expected version 1",
        );
        refused(
            &text.replacen("\"machine\"", "\"engine\"", 1),
            "damaged results file: missing field `machine`",
        );
        let damaged = |damage: fn(&mut Series), expected: &str| {
            let mut results = good.clone();
            damage(&mut results.series[0]);
            refused(&results.to_json(), expected);
        };
        damaged(|series| series.name = "stress".into(), "series stress is there twice");
        damaged(|series| series.seeds[1].seed = 1, "series calm, seed 1 is there twice");
        damaged(
            |series| series.seeds[2].arms[3].arm = "A".into(),
            "series calm, seed 3: arm A is there twice",
        );
        damaged(
            |series| series.seeds[0].gaps[3].arm = "A".into(),
            "seed 1: the gap of arm A is there twice",
        );
        let chosen = |damage: fn(&mut Chosen), expected: &str| {
            let mut results = good.clone();
            let series = results
                .series
                .iter_mut()
                .find(|series| series.name == "rate-0.0001")
                .unwrap();
            damage(series.choice.insert(synthetic::choice()));
            refused(&results.to_json(), expected);
        };
        chosen(
            |choice| choice.chosen = "1e-3".into(),
            "series rate-0.0001: trainer.learning_rate = 1e-3 was chosen, and not tried",
        );
        chosen(
            |choice| choice.chosen = "3e-4".into(),
            "trainer.learning_rate = 3e-4 was chosen, and 0.0001 is what its arms were run with",
        );
        chosen(
            |choice| choice.seeds.push(103),
            "2 results of trainer.learning_rate = 1e-4, which 3 seeds tried",
        );
        chosen(
            |choice| choice.key = "grpo.beta".into(),
            "grpo.beta was chosen, and is not among the settings",
        );
        damaged(
            |series| series.seeds[0].arms[3].end.high.0.truncate(255),
            "seed 1: arm D: 255 answers, where others have 256",
        );
        damaged(
            |series| series.seeds[0].arms[3].curve.step.truncate(150),
            "arm D: 151 values of actor/entropy for 150 steps",
        );
        damaged(
            |series| series.seeds[0].arms[3].curve.step[4] = 3,
            "arm D: the steps of the curve are not in order",
        );
        fs::remove_dir_all(&folder).unwrap();
        let error = format!("{:#}", Results::read(&path).unwrap_err());
        assert!(
            error.starts_with("cannot read ") && error.contains("results.json"),
            "{error}"
        );
    }

    #[test]
    fn series_named_after_a_settings_value_are_a_family() {
        let mut results = synthetic::results();
        let named = |results: &Results| -> Vec<(String, String, Vec<f64>)> {
            let of = |family: Family<'_>| {
                let values = family.members.iter().map(|member| member.0).collect();
                (family.name.to_string(), family.setting.to_string(), values)
            };
            results.families().into_iter().map(of).collect()
        };
        let expected = [
            ("rate", "trainer.learning_rate", vec![1e-4, 3e-4, 1e-3]),
            ("size", "model.hidden_size", vec![64.0, 128.0, 256.0]),
        ];
        assert_eq!(
            named(&results),
            expected.map(|(name, setting, values)| (name.into(), setting.into(), values))
        );
        let main: Vec<_> = results.main_series().map(|series| series.name.as_str()).collect();
        assert_eq!(main, ["calm", "stress"]);
        // Another setting that differs does not matter; a name that is no value of a setting does.
        results.series[2].settings.insert("model.heads".into(), "7".into());
        results.series[5]
            .settings
            .insert("model.hidden_size".into(), "32".into());
        assert_eq!(named(&results)[0].0, "rate");
        assert_eq!(named(&results).len(), 1);
        // One of them alone is a family too.
        let alone = Results {
            series: vec![results.series[2].clone()],
            ..results.clone()
        };
        assert_eq!(named(&alone)[0].2, [1e-4]);
        // A setting that all series share is not what it varies, though it has the same value.
        let mut shared = results.clone();
        shared.series.truncate(3);
        for series in &mut shared.series {
            series.settings.insert("eval.problems".into(), "0.0001".into());
        }
        assert_eq!(named(&shared)[0].1, "trainer.learning_rate");
        results.series[3].name = "rate-middle".into();
        assert_eq!(named(&results), []);
        assert_eq!(results.main_series().count(), 8);
    }

    #[test]
    fn series_come_apart_and_arms_are_found() {
        let results = synthetic::results();
        let parts = results.by_series();
        assert_eq!(parts.len(), results.series.len());
        assert_eq!(parts[1].0, "stress");
        assert_eq!(parts[1].1.series, results.series[1..2]);
        let stress = &results.series[1];
        assert_eq!(stress.arms(), synthetic::ARMS.map(|arm| arm.0));
        assert_eq!(
            (
                stress.runs("E+").count(),
                stress.gaps("F'").count(),
                stress.runs("Z").count()
            ),
            (5, 5, 0)
        );
    }
}
