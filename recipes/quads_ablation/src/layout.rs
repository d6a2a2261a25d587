//! Where everything is: `OUT/warmups/NAME/seed_N/` and `OUT/SERIES/seed_N/ARM/` are ordinary run folders of `grpo_math`,
//! with the log of their process beside them. `arm.json` and `gaps.json` are all that `results.json` is made of.
use std::path::{Path, PathBuf};

use crate::arms::Arm;

/// The folder of all series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    out: PathBuf,
}

impl Layout {
    /// In a folder.
    pub fn new(out: PathBuf) -> Self {
        Self { out }
    }

    /// The folder.
    pub fn out(&self) -> &Path {
        &self.out
    }

    /// The run folder of a warm-up.
    pub fn warmup(&self, name: &str, seed: u64) -> PathBuf {
        self.out.join("warmups").join(name).join(seed_folder(seed))
    }

    /// The folder of a series.
    pub fn series(&self, series: &str) -> PathBuf {
        self.out.join(series)
    }

    /// The folder of the arms of a seed.
    pub fn seed(&self, series: &str, seed: u64) -> PathBuf {
        self.series(series).join(seed_folder(seed))
    }

    /// The gaps at the warm-up checkpoint of a seed.
    pub fn gaps(&self, series: &str, seed: u64) -> PathBuf {
        self.seed(series, seed).join("gaps.json")
    }

    /// The run folder of an arm.
    pub fn arm(&self, series: &str, seed: u64, arm: &Arm) -> PathBuf {
        self.seed(series, seed).join(arm.folder)
    }

    /// The run folder of a run that helps to choose a setting.
    pub fn choice_arm(&self, series: &str, value: &str, seed: u64, arm: &Arm) -> PathBuf {
        let value: String = value.chars().map(|c| if c == '/' { '_' } else { c }).collect();
        let choice = self.series(series).join("choice").join(value);
        choice.join(seed_folder(seed)).join(arm.folder)
    }

    /// What was chosen.
    pub fn choice(&self, series: &str) -> PathBuf {
        self.series(series).join("choice.json")
    }

    /// All that tables and pages are made of.
    pub fn results(&self) -> PathBuf {
        self.out.join("results.json")
    }

    /// What the process that works here has locked.
    pub fn lock(&self) -> PathBuf {
        self.out.join(".lock")
    }
}

fn seed_folder(seed: u64) -> String {
    format!("seed_{seed}")
}

/// What an arm leaves in its run folder.
pub fn arm_file(run: &Path) -> PathBuf {
    run.join("arm.json")
}

/// Where the process that works on a run folder, or on a file, writes what it has to say.
pub fn log_file(of: &Path) -> PathBuf {
    of.with_extension("log")
}
