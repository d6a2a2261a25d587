//! The folder of a run: `config.toml`, `metrics.jsonl`, `checkpoints/`, `plots/`, `report.html`, `results.json`.
use anyhow::{Context, Result, bail};
use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use crate::atomic_write::write_atomically;
use crate::config::{Config, Layers, RESUMABLE};

/// Names tried before giving up: `NAME`, `NAME-2`, …
const MOST_RUNS: usize = 10_000;

/// Where everything of a run is.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// A new folder at `run.directory/run.name`, or beside it with the next free number: a run never overwrites another.
    pub fn create(config: &Config) -> Result<Self> {
        let wanted = config.wanted_folder();
        fs::create_dir_all(&config.run.directory).with_context(|| {
            let directory = config.run.directory.display();
            format!("cannot make the folder {directory} (another place: --set run.directory=DIR)")
        })?;
        for number in 1..=MOST_RUNS {
            let path = if number == 1 {
                wanted.clone()
            } else {
                config.run.directory.join(format!("{}-{number}", config.run.name))
            };
            match fs::create_dir(&path) {
                Ok(()) => {
                    let folder = Self { path };
                    for part in [folder.checkpoints(), folder.plots()] {
                        fs::create_dir(&part).with_context(|| format!("cannot make the folder {}", part.display()))?;
                    }
                    write_atomically(&folder.config(), config.toml.as_bytes())?;
                    return Ok(folder);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| {
                        format!(
                            "cannot make the folder {} (another place: --set run.directory=DIR)",
                            path.display()
                        )
                    });
                }
            }
        }
        bail!(
            "{} and its {MOST_RUNS} successors exist: choose another --name",
            wanted.display()
        )
    }

    /// What may be the folder of a run.
    pub fn at(path: &Path) -> Self {
        Self { path: path.into() }
    }

    /// An existing run's folder and its settings, those of [`RESUMABLE`] perhaps changed by `--set`.
    pub fn open(path: &Path, assignments: &[String]) -> Result<(Self, Config)> {
        let folder = Self::at(path);
        if !folder.config().is_file() {
            bail!("{} is not the folder of a run: it has no config.toml", path.display());
        }
        let mut layers = Layers::defaults();
        layers.lay_file(&folder.config())?;
        for assignment in assignments {
            let key = assignment.split('=').next().unwrap_or_default().trim();
            layers.lay_assignment(assignment)?;
            if !RESUMABLE.contains(&key) {
                bail!(
                    "--set {assignment}: a resumed run keeps its settings, except {}; start a new run for others",
                    RESUMABLE.join(", ")
                );
            }
        }
        Ok((folder, Config::read(&mut layers)?))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The settings.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// One line a step.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Which held-out problems were answered right.
    pub fn answers(&self) -> PathBuf {
        self.path.join("answers.jsonl")
    }

    /// The error of every layer's quantized activations.
    pub fn layers(&self) -> PathBuf {
        self.path.join("layers.jsonl")
    }

    /// One folder a checkpoint.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// One SVG a chart.
    pub fn plots(&self) -> PathBuf {
        self.path.join("plots")
    }

    /// For people.
    pub fn report(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// Which layers are packed.
    pub fn packing(&self) -> PathBuf {
        self.path.join("packing.txt")
    }

    /// The folder's own name.
    pub fn name(&self) -> String {
        let path = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Writes the settings, if they are not what is there.
    pub fn write_config(&self, config: &Config) -> Result<()> {
        match fs::read(self.config()).is_ok_and(|written| written == config.toml.as_bytes()) {
            true => Ok(()),
            false => write_atomically(&self.config(), config.toml.as_bytes()),
        }
    }

    /// The model after a step, where it was loaded: in the form in which it was.
    pub fn model(&self, step: usize) -> PathBuf {
        self.path.join(format!("model-{step}"))
    }

    /// What the process that works on the run has locked.
    pub fn lock(&self) -> PathBuf {
        self.path.join(".lock")
    }

    /// The last table, for programs.
    pub fn results(&self) -> PathBuf {
        self.path.join("results.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("grpo_math_{}_{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    fn config(directory: &Path, more: &[&str]) -> Config {
        let mut assignments = vec![format!("run.directory={}", directory.display())];
        assignments.extend(more.iter().map(|assignment| assignment.to_string()));
        Config::load(None, &assignments).unwrap()
    }

    #[test]
    fn a_second_run_gets_the_next_free_number() {
        let directory = scratch("numbers");
        let config = config(&directory, &["run.name=mine"]);
        let names: Vec<_> = (0..3)
            .map(|_| {
                RunFolder::create(&config)
                    .unwrap()
                    .path
                    .file_name()
                    .unwrap()
                    .to_os_string()
            })
            .collect();
        assert_eq!(names, ["mine", "mine-2", "mine-3"]);
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_resumed_run_has_the_settings_it_was_made_with() {
        let directory = scratch("settings");
        let made = config(&directory, &["grpo.steps=5", "trainer.learning_rate=0.002"]);
        let path = RunFolder::create(&made).unwrap().path;
        let (_, opened) = RunFolder::open(&path, &["grpo.steps=9".into()]).unwrap();
        assert_eq!(opened.learner.steps, 9);
        assert_eq!(opened.learner.grpo.optimizer.schedule.learning_rate, 0.002);
        assert_eq!(opened.fingerprint, made.fingerprint);
        let error = RunFolder::open(&path, &["run.seed=9".into()]).unwrap_err().to_string();
        assert!(
            error.contains("a resumed run keeps its settings, except grpo.steps"),
            "{error}"
        );
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_folder_without_a_run_is_named() {
        let directory = scratch("none");
        let error = RunFolder::open(&directory, &[]).unwrap_err().to_string();
        assert!(
            error.ends_with("is not the folder of a run: it has no config.toml"),
            "{error}"
        );
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named_with_the_way_out() {
        // A file where a folder should be fails for every user, root included.
        let file = scratch("file");
        fs::write(&file, "").unwrap();
        let error = format!("{:#}", RunFolder::create(&config(&file.join("runs"), &[])).unwrap_err());
        assert!(
            error.contains("cannot make the folder") && error.contains("--set run.directory=DIR"),
            "{error}"
        );
        fs::remove_file(file).unwrap();
    }
}
