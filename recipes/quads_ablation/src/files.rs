//! `arm.json` and `gaps.json`: small files that can be carried from one machine to another, as `choice.json`, a
//! [`Chosen`](crate::results::Chosen), can.
use anyhow::{Context, Result, bail};
use grpo_math::atomic_write::write_atomically;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs, io::ErrorKind, path::Path};

use crate::{
    arms::Arm,
    layout::arm_file,
    results::{ArmRun, Gap, Host},
    series::Settings,
};

/// What an arm leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmFile {
    /// False where its process crashed or was killed: the next call goes on with it.
    pub complete: bool,
    /// Every setting of the run but its place.
    pub settings: Settings,
    /// Steps of the warm-up.
    pub warmup_steps: usize,
    /// The processor, in files of before [`ArmRun::host`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<String>,
    /// What `results.json` says of it.
    pub run: ArmRun,
}

impl ArmFile {
    /// What an arm has left in its run folder; `None` where it has left nothing.
    ///
    /// # Errors
    /// When the file cannot be read, or is another arm's; it is named.
    pub fn of(run: &Path, arm: &Arm) -> Result<Option<Self>> {
        let path = arm_file(run);
        let file = read::<Self>(&path)?;
        match &file {
            Some(file) if file.run.arm != arm.letter => bail!(
                "{}: the file of arm {}, where that of arm {} is expected",
                path.display(),
                file.run.arm,
                arm.letter
            ),
            _ => Ok(file),
        }
    }

    /// What the arm's last steps ran on, as far as the file tells.
    pub fn host(&self) -> Option<Host> {
        let before = || {
            Some(Host {
                processor: Some(self.processor.clone()?),
                processors: None,
                device: device_of(&self.settings)?,
            })
        };
        self.run.host.clone().or_else(before)
    }
}

/// `run.device` of some settings, without its quotes.
pub fn device_of(settings: &Settings) -> Option<String> {
    Some(settings.get("run.device")?.trim_matches('"').to_string())
}

/// What a warm-up leaves, for the arms of a series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GapsFile {
    /// Every setting of the warm-up and the series but their place.
    pub settings: Settings,
    /// Name of the warm-up.
    pub warmup: String,
    /// Its steps.
    pub warmup_steps: usize,
    /// Its wall time, in seconds.
    pub warmup_s: f64,
    /// Completions that the gaps are measured on.
    pub completions: usize,
    /// Share of right ones.
    pub accuracy: f64,
    /// By arm.
    pub gaps: Vec<Gap>,
}

/// Reads one of these files; `None` where there is none.
///
/// # Errors
/// When it cannot be read, or is of another form; the file is named.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let value = serde_json::from_str(&text)
        .with_context(|| format!("cannot read {} (remove it to measure again)", path.display()))?;
    Ok(Some(value))
}

/// Writes one of these files.
///
/// # Errors
/// When it cannot be written; the file is named.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    write_atomically(path, &serde_json::to_vec(value)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn an_arm_tells_its_machine_as_far_as_its_file_does() {
        let run = synthetic::series("calm", &synthetic::ARMS, [1, 4, 8]).seeds[0].arms[0].clone();
        let mut file = ArmFile {
            complete: true,
            settings: Settings::from([("run.device".into(), "\"cpu\"".into())]),
            warmup_steps: 1,
            processor: None,
            run,
        };
        let read = |file: &ArmFile| -> ArmFile { serde_json::from_str(&serde_json::to_string(file).unwrap()).unwrap() };
        assert_eq!(read(&file).host(), None);
        // As it was written before machines were recorded whole.
        file.processor = Some("old".into());
        let host = |processor: &str, processors| Host {
            processor: Some(processor.into()),
            processors,
            device: "cpu".into(),
        };
        assert_eq!(read(&file).host(), Some(host("old", None)));
        file.run.host = Some(host("new", Some(4)));
        assert_eq!(read(&file).host(), Some(host("new", Some(4))));
    }
}
