//! `metrics.jsonl`: one JSON object a step, keys in a fixed order, under the names that verl and TRL use.
//!
//! Everything that depends on the machine comes last, under `time/` and `perf/`: without these fields the same seed gives
//! the same bytes. A number that is not finite, or was not measured at this step, is `null`.
use anyhow::{Context, Result, anyhow, bail};
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
/// The chance of a right one among `k` samples.
pub fn held_out_at(k: usize) -> String {
    format!("eval/pass@{k}")
}
/// Pass@1 on the held-out problems, at the rollout's temperature and in another precision.
pub fn held_out_in(precision: &str) -> String {
    format!("eval/{precision}/pass@1")
}
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

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Position::Warmup(step) => write!(f, "step {step} of the warm-up"),
            Position::Grpo(step) => write!(f, "step {step} of GRPO"),
        }
    }
}

/// The line of every step up to a checkpoint, read and found whole; nothing is changed by reading it.
#[derive(Clone, Debug)]
pub struct History {
    path: PathBuf,
    /// Bytes of these lines; what follows was written by steps that the checkpoint does not know.
    bytes: u64,
}

impl History {
    /// Reads the file up to a checkpoint at `position`, of a run whose warm-up took (or has taken) `warmup_steps`. The line
    /// of GRPO's step 0 is not kept at that position: it is evaluated again.
    ///
    /// # Errors
    /// When the file cannot be read, or one of these lines is missing or damaged: the error has the line's number. What
    /// comes after them is not judged: a crash may have torn it, and it is going to be written again.
    pub fn read(path: &Path, position: Position, warmup_steps: usize) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = match position {
            Position::Warmup(step) => step,
            Position::Grpo(0) => warmup_steps,
            Position::Grpo(step) => warmup_steps + 1 + step,
        };
        let mut rest = text.split_inclusive(|byte| *byte == b'\n');
        let mut bytes = 0;
        for number in 1..=lines {
            let belongs = match number.checked_sub(warmup_steps + 1) {
                Some(step) => Position::Grpo(step),
                None => Position::Warmup(number),
            };
            let damaged = |what: String| anyhow!("{}, line {number}: expected {belongs}, found {what}", path.display());
            let line = rest.next().ok_or_else(|| damaged("the end of the file".into()))?;
            let found = parse(line).map_err(|error| damaged(format!("a damaged line ({error})")))?;
            if !line.ends_with(b"\n") {
                return Err(damaged("a line without its end".into()));
            }
            if found.position != belongs {
                return Err(damaged(found.position.to_string()));
            }
            bytes += line.len() as u64;
        }
        Ok(Self {
            path: path.into(),
            bytes,
        })
    }
}

/// The file, open for more.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Makes the file of a new run.
    pub fn create(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ok(Self {
            path: path.into(),
            file: file.with_context(|| format!("cannot write {}", path.display()))?,
        })
    }

    /// Makes the file of a run that goes on from another's history: it begins with these lines.
    pub fn begin_with(path: &Path, history: &History) -> Result<Self> {
        let mut text = fs::read(&history.path).with_context(|| format!("cannot read {}", history.path.display()))?;
        text.truncate(history.bytes as usize);
        write_atomically(path, &text)?;
        Self::create(path)
    }

    /// Opens the file of a run that goes on: cuts what comes after its history.
    pub fn resume(history: &History) -> Result<Self> {
        let path = &history.path;
        OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|file| file.set_len(history.bytes))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Self::create(path)
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

    /// Waits until the lines are on the disk: a checkpoint that outlives a power failure needs those before it.
    pub fn sync(&self) -> Result<()> {
        self.file
            .sync_data()
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn parse(line: &[u8]) -> Result<MetricsLine> {
    // The parser's own line number would always be 1.
    serde_json::from_slice(line)
        .map_err(|error| anyhow!("{}", error.to_string().replace(" at line 1 column", ", column")))
}

/// Reads the file; a last line that is not whole is left out.
pub fn read(path: &Path) -> Result<Vec<MetricsLine>> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = Vec::new();
    for (number, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        match parse(line) {
            Ok(line) => lines.push(line),
            Err(_) if !line.ends_with(b"\n") => {}
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

    /// A run with two steps of warm-up and two of GRPO.
    const STEPS: [Position; 5] = [Warmup(1), Warmup(2), Grpo(0), Grpo(1), Grpo(2)];

    fn write_steps(path: &Path) -> Vec<u8> {
        let _ = fs::remove_file(path);
        let mut file = MetricsFile::create(path).unwrap();
        for position in STEPS {
            file.write(&line(position)).unwrap();
        }
        file.sync().unwrap();
        fs::read(path).unwrap()
    }

    #[test]
    fn a_resumed_file_ends_at_the_checkpoint() {
        let path = scratch("cut");
        let whole = write_steps(&path);
        // What a crash leaves: a torn line, or blocks that were never written.
        for torn in [&b"{\"stage\":\"grpo\",\"st"[..], b"", b"\0\0\0\n\0\0", b"x\n", b"\xff"] {
            for (position, warmup_steps, kept) in [
                (Grpo(2), 2, &STEPS[..]),
                (Grpo(1), 2, &STEPS[..4]),
                // Step 0 is written again.
                (Grpo(0), 2, &STEPS[..2]),
                (Warmup(2), 2, &STEPS[..2]),
                (Warmup(1), 1, &STEPS[..1]),
            ] {
                let before = [&whole, torn].concat();
                fs::write(&path, &before).unwrap();
                let history = History::read(&path, position, warmup_steps).unwrap();
                assert_eq!(fs::read(&path).unwrap(), before, "reading changes nothing");
                let mut file = MetricsFile::resume(&history).unwrap();
                file.write(&line(Grpo(9))).unwrap();
                let lines: Vec<_> = read(&path).unwrap().iter().map(|line| line.position).collect();
                assert_eq!(lines, [kept, &[Grpo(9)]].concat());
                let bytes = fs::read(&path).unwrap();
                assert!(bytes.starts_with(&whole[..history.bytes as usize]), "the bytes stay");
            }
        }
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_history_with_a_damaged_or_missing_line_is_refused_with_its_number() {
        let path = scratch("damaged");
        let whole = write_steps(&path);
        let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').collect();
        let refused = |text: Vec<u8>, expected: &str| {
            fs::write(&path, &text).unwrap();
            let error = History::read(&path, Grpo(2), 2).unwrap_err().to_string();
            let expected = format!("{}, {expected}", path.display());
            assert!(error.starts_with(&expected), "{error}\nwithout {expected}");
            assert_eq!(fs::read(&path).unwrap(), text, "nothing is changed");
        };
        for (number, belongs) in STEPS.iter().enumerate() {
            let expected = format!("line {}: expected {belongs}, found ", number + 1);
            let with = |line: &[u8]| {
                let mut lines = lines.clone();
                lines[number] = line;
                lines.concat()
            };
            let damaged = format!("{expected}a damaged line (");
            refused(with(b"x\n"), &damaged);
            refused(with(&lines[number][1..]), &damaged);
            refused(with(b"\xff\xfe\n"), &damaged);
            refused(with(b"\n"), &damaged);
            let one_less = match number + 1 < lines.len() {
                true => STEPS[number + 1].to_string(),
                false => "the end of the file".into(),
            };
            refused(with(b""), &format!("{expected}{one_less}"));
            refused(lines[..number].concat(), &format!("{expected}the end of the file"));
        }
        refused(
            whole[..whole.len() - 1].to_vec(),
            "line 5: expected step 2 of GRPO, found a line without its end",
        );
        fs::remove_file(&path).unwrap();
        let error = History::read(&path, Grpo(2), 2).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot read ") && error.contains("damaged.jsonl"),
            "{error}"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_with_the_files_name() {
        let mut file = MetricsFile::create(Path::new("/dev/full")).unwrap();
        let error = file.write(&line(Grpo(1))).unwrap_err();
        assert!(
            format!("{error:#}").starts_with("cannot write /dev/full: No space left"),
            "{error:#}"
        );
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
