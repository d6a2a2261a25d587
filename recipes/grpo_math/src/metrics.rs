//! `metrics.jsonl`: one JSON object a step, keys in a fixed order, under the names that verl and TRL use.
//!
//! Everything that depends on the machine comes last, under `time/` and `perf/`: without these fields the same seed gives
//! the same bytes. A number that is not finite, or was not measured at this step, is `null`.
use anyhow::{Context, Result, bail};
use burn_quads::grpo::Metrics;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, Visitor},
    ser::SerializeMap,
};
use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use crate::atomic_write::write_atomically;

/// Pass@1 on the held-out problems, at the rollout's temperature and precision.
pub const HELD_OUT: &str = "eval/pass@1";
/// The same with the likeliest token each time.
pub const HELD_OUT_GREEDY: &str = "eval/greedy";
/// Pass@1 on the validation problems of the warm-up.
pub const VALIDATION: &str = "validation/pass@1";

/// One line: where the run is, and numbers by name.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricsLine {
    /// After this step. GRPO's step 0 is the policy before the first.
    pub position: Position,
    values: Vec<(String, Option<f64>)>,
}

impl MetricsLine {
    /// A line without numbers.
    pub fn new(position: Position) -> Self {
        Self {
            position,
            values: Vec::new(),
        }
    }

    /// Adds a number at the end; `None` was not measured at this step.
    pub fn push(&mut self, name: &str, value: impl Into<Option<f64>>) {
        let value = value.into().filter(|value| value.is_finite());
        self.values.push((name.to_string(), value));
    }

    /// Adds numbers at the end, in their order.
    pub fn extend(&mut self, metrics: &Metrics) {
        for (name, value) in metrics.iter() {
            self.push(name, value);
        }
    }

    /// Adds the names of numbers that were not measured at this step.
    pub fn extend_unmeasured(&mut self, metrics: &Metrics) {
        for (name, _) in metrics.iter() {
            self.push(name, None);
        }
    }

    /// A number by its name, if it was measured.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.iter().find(|(known, _)| known == name)?.1
    }

    /// Whether it is a step of GRPO, and which.
    pub fn grpo_step(&self) -> Option<usize> {
        match self.position {
            Position::Grpo(step) => Some(step),
            Position::Warmup(_) => None,
        }
    }
}

impl Serialize for MetricsLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (stage, step) = match self.position {
            Position::Warmup(step) => ("warmup", step),
            Position::Grpo(step) => ("grpo", step),
        };
        let mut map = serializer.serialize_map(Some(2 + self.values.len()))?;
        map.serialize_entry("stage", stage)?;
        map.serialize_entry("step", &step)?;
        for (name, value) in &self.values {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for MetricsLine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Line;
        impl<'de> Visitor<'de> for Line {
            type Value = MetricsLine;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with stage, step and numbers")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MetricsLine, A::Error> {
                let (mut stage, mut step, mut values) = (None::<String>, None::<usize>, Vec::new());
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "stage" => stage = Some(map.next_value()?),
                        "step" => step = Some(map.next_value()?),
                        _ => values.push((name, map.next_value()?)),
                    }
                }
                let position = match (stage.as_deref(), step) {
                    (Some("warmup"), Some(step)) => Position::Warmup(step),
                    (Some("grpo"), Some(step)) => Position::Grpo(step),
                    _ => return Err(A::Error::custom("neither a warm-up nor a GRPO step")),
                };
                Ok(MetricsLine { position, values })
            }
        }
        deserializer.deserialize_map(Line)
    }
}

/// How far a run is: steps of the warm-up, then of GRPO. Ordered by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "stage", content = "step", rename_all = "snake_case")]
pub enum Position {
    /// After so many steps of the warm-up.
    Warmup(usize),
    /// After so many steps of GRPO; 0: the warm-up is over.
    Grpo(usize),
}

/// The file, open for more.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file and cuts it after `position`: what a killed run wrote later will be written again.
    pub fn open(path: &Path, position: Position) -> Result<Self> {
        if path.exists() {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            let kept = cut(&text, position);
            if kept.len() != text.len() {
                write_atomically(path, kept.as_bytes())?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ok(Self {
            path: path.into(),
            file: file.with_context(|| format!("cannot write {}", path.display()))?,
        })
    }

    /// Adds a line.
    pub fn write(&mut self, line: &MetricsLine) -> Result<()> {
        let mut text = serde_json::to_string(line).context("metrics are numbers and names")?;
        text.push('\n');
        // One call a line: an interrupted run leaves whole lines.
        self.file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.flush())
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// The whole lines up to `position`, but not that of GRPO step 0: it is evaluated again.
fn cut(text: &str, position: Position) -> String {
    let keep = |at: Position| at < position || (at == position && at != Position::Grpo(0));
    text.split_inclusive('\n')
        .take_while(|line| {
            let parsed = serde_json::from_str::<MetricsLine>(line);
            line.ends_with('\n') && parsed.is_ok_and(|parsed| keep(parsed.position))
        })
        .collect()
}

/// Reads the file; a last line that is not whole is left out.
pub fn read(path: &Path) -> Result<Vec<MetricsLine>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = Vec::new();
    for (number, line) in text.split_inclusive('\n').enumerate() {
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            Err(_) if !line.ends_with('\n') => {}
            Err(error) => bail!("{}, line {}: {error}", path.display(), number + 1),
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Position::{Grpo, Warmup};

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("grpo_math_{}_{name}.jsonl", std::process::id()))
    }

    fn line(position: Position) -> MetricsLine {
        let mut line = MetricsLine::new(position);
        line.push("reward/mean", 0.25);
        line.push("sampling/sampling_logp_difference/max", f64::NAN);
        line.push("eval/pass@1", None);
        line.push("time/step_s", 1e-3);
        line
    }

    #[test]
    fn a_line_has_its_keys_in_order_and_reads_back() {
        let text = serde_json::to_string(&line(Position::Grpo(3))).unwrap();
        let numbers =
            r#""reward/mean":0.25,"sampling/sampling_logp_difference/max":null,"eval/pass@1":null,"time/step_s":0.001"#;
        assert_eq!(text, format!(r#"{{"stage":"grpo","step":3,{numbers}}}"#));
        let read: MetricsLine = serde_json::from_str(&text).unwrap();
        assert_eq!(read, line(Position::Grpo(3)));
        assert_eq!(
            (read.get("reward/mean"), read.get("eval/pass@1"), read.get("none")),
            (Some(0.25), None, None)
        );
        assert!(serde_json::from_str::<MetricsLine>(r#"{"stage":"test","step":3}"#).is_err());
    }

    #[test]
    fn a_resumed_file_ends_at_the_checkpoint() {
        let path = scratch("cut");
        let _ = fs::remove_file(&path);
        let mut file = MetricsFile::open(&path, Position::Warmup(0)).unwrap();
        for position in [Warmup(1), Warmup(2), Grpo(0), Grpo(1), Grpo(2)] {
            file.write(&line(position)).unwrap();
        }
        fs::write(&path, fs::read_to_string(&path).unwrap() + "{\"stage\":\"grpo\",\"st").unwrap();
        let steps = |position| {
            drop(MetricsFile::open(&path, position).unwrap());
            read(&path)
                .unwrap()
                .iter()
                .map(|line| line.position)
                .collect::<Vec<_>>()
        };
        assert_eq!(steps(Grpo(9)), [Warmup(1), Warmup(2), Grpo(0), Grpo(1), Grpo(2)]);
        assert_eq!(steps(Grpo(1)), [Warmup(1), Warmup(2), Grpo(0), Grpo(1)]);
        assert_eq!(steps(Grpo(0)), [Warmup(1), Warmup(2)], "step 0 is written again");
        assert_eq!(steps(Warmup(1)), [Warmup(1)]);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 1);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_line_that_is_no_json_is_named() {
        let path = scratch("bad");
        fs::write(
            &path,
            format!("{}\nx\n", serde_json::to_string(&line(Grpo(1))).unwrap()),
        )
        .unwrap();
        assert!(
            read(&path).unwrap_err().to_string().contains("line 2"),
            "{:?}",
            read(&path)
        );
        fs::remove_file(path).unwrap();
    }
}
