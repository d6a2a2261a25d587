//! Files of a run with some lines at some steps: JSON objects with the field `step`, in the order of the steps.
use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use serde_json::Value;
use std::{fs, path::PathBuf};

use crate::{atomic_write::write_atomically, metrics::Position};

/// Such a file; it is always whole on the disk.
#[derive(Clone, Debug)]
pub struct StepLines {
    path: PathBuf,
    text: String,
}

impl StepLines {
    /// The file of a new run: it is made with its first line.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            text: String::new(),
        }
    }

    /// The lines of a run that goes on at `position`; what later steps have written is going to be written again, as is the
    /// line of step 0 at that position. Nothing is changed on the disk.
    ///
    /// # Errors
    /// When the file cannot be read, or a line is damaged: the error has its number.
    pub fn resume(path: PathBuf, position: Position) -> Result<Self> {
        let mut lines = Self::new(path);
        let Position::Grpo(reached @ 1..) = position else {
            return Ok(lines);
        };
        if !lines.path.exists() {
            return Ok(lines);
        }
        let text = fs::read_to_string(&lines.path).with_context(|| format!("cannot read {}", lines.path.display()))?;
        for (number, line) in text.split_inclusive('\n').enumerate() {
            let value: Value = serde_json::from_str(line).unwrap_or_default();
            let step = value["step"].as_u64().ok_or_else(|| {
                let path = lines.path.display();
                anyhow!("{path}, line {}: expected an object with a step", number + 1)
            })?;
            if step <= reached as u64 {
                lines.text += line;
            }
        }
        Ok(lines)
    }

    /// Adds lines.
    pub fn write<T: Serialize>(&mut self, lines: &[T]) -> Result<()> {
        for line in lines {
            self.text += &serde_json::to_string(line).context("lines are numbers and names")?;
            self.text.push('\n');
        }
        write_atomically(&self.path, self.text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Position::{Grpo, Warmup};
    use serde_json::json;

    #[test]
    fn a_resumed_file_has_the_lines_up_to_its_checkpoint() {
        let path = std::env::temp_dir().join(format!("grpo_math_{}_step_lines.jsonl", std::process::id()));
        let _ = fs::remove_file(&path);
        let line = |step: usize| json!({"step": step, "x": 0.5});
        let mut whole = StepLines::new(path.clone());
        whole.write(&[line(0), line(0)]).unwrap();
        whole.write(&[line(3)]).unwrap();
        whole.write(&[line(6)]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().next(), Some(r#"{"step":0,"x":0.5}"#));
        for (position, kept) in [(Warmup(9), 0), (Grpo(0), 0), (Grpo(2), 2), (Grpo(3), 3), (Grpo(7), 4)] {
            let mut resumed = StepLines::resume(path.clone(), position).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "reading changes nothing");
            resumed.write(&[line(9)]).unwrap();
            let lines = fs::read_to_string(&path).unwrap();
            assert_eq!(lines.lines().count(), kept + 1, "{position}");
            assert!(lines.ends_with("{\"step\":9,\"x\":0.5}\n"));
            fs::write(&path, &text).unwrap();
        }
        fs::write(&path, text.replacen("\"step\":3", "\"step\":", 1)).unwrap();
        let error = StepLines::resume(path.clone(), Grpo(3)).unwrap_err().to_string();
        assert!(
            error.ends_with("step_lines.jsonl, line 3: expected an object with a step"),
            "{error}"
        );
        fs::remove_file(&path).unwrap();
        assert!(StepLines::resume(path, Grpo(3)).is_ok(), "a run may have none yet");
    }
}
