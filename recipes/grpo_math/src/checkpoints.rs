//! The folder `checkpoints/`: `warmup_NNNN` and `step_NNNN`, each whole or not there, each with checksums.
//!
//! `step_0000` is the policy after the warm-up; it is never removed, because everything later is compared with it.
use anyhow::{Context, Result, bail};
use burn_quads::grpo::SkippedSteps;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use crate::{atomic_write::write_atomically, console, fingerprint::Fingerprint, metrics::Position};

const STATE: &str = "state.json";
const CHECKSUMS: &str = "checksums.txt";
/// Ends of the names, begun with a dot, that nobody reads.
const TEMPORARY: &str = ".tmp";
const REPLACED: &str = ".old";

/// What a run needs to go on, beside its tensors and settings. Random numbers and the order of the problems are functions
/// of the seed and the step, so they have no state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Where the run is.
    #[serde(flatten)]
    pub position: Position,
    /// Of the settings; see [`Config::fingerprint`](crate::config::Config::fingerprint).
    pub config_fingerprint: String,
    /// Of what was read from files; see [`Problems::fingerprint`](crate::problems::Problems::fingerprint).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problems_fingerprint: Option<String>,
    /// Updates left out for gradients that were not finite.
    pub skipped: SkippedSteps,
    /// Steps that the warm-up has taken.
    pub warmup_steps: usize,
    /// Wall time so far.
    pub elapsed_s: f64,
}

/// A checkpoint that was found whole.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Its state.
    pub state: RunState,
}

/// A checkpoint that cannot be used.
#[derive(Debug)]
pub struct Damaged {
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// All checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Those in a folder.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Where the checkpoint at a position is.
    pub fn path(&self, position: Position) -> PathBuf {
        self.folder.join(match position {
            Position::Warmup(step) => format!("warmup_{step:04}"),
            Position::Grpo(step) => format!("step_{step:04}"),
        })
    }

    /// Clears away what a process that died left behind: checkpoints half written, and one that was about to be replaced,
    /// which comes back. For the process that works on the run.
    pub fn tidy(&self) -> Result<()> {
        for name in file_names(&self.folder)? {
            let of = |suffix: &str| Some(self.folder.join(name.strip_prefix('.')?.strip_suffix(suffix)?));
            match (of(TEMPORARY), of(REPLACED)) {
                (None, Some(path)) if !path.exists() => {
                    let replaced = self.folder.join(&name);
                    fs::rename(&replaced, &path)
                        .with_context(|| format!("cannot rename {} to {}", replaced.display(), path.display()))?;
                }
                (None, None) => {}
                _ => remove(&self.folder.join(&name))?,
            }
        }
        Ok(())
    }

    /// Writes a checkpoint; `write` puts the tensors into the folder it is given. Until all of it is on the disk the
    /// folder has a name that nobody reads. An error leaves the checkpoints as they were.
    pub fn save(&self, state: &RunState, write: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let path = self.path(state.position);
        let named = |suffix: &str| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            self.folder.join(format!(".{name}{suffix}"))
        };
        let (temporary, replaced) = (named(TEMPORARY), named(REPLACED));
        let save = || -> Result<()> {
            remove(&temporary)?;
            fs::create_dir(&temporary)?;
            write(&temporary)?;
            write_atomically(&temporary.join(STATE), serde_json::to_string_pretty(state)?.as_bytes())?;
            let mut checksums = String::new();
            for name in file_names(&temporary)? {
                let file = temporary.join(&name);
                File::open(&file)?.sync_all()?;
                checksums.push_str(&format!("{}  {name}\n", Fingerprint::of(&fs::read(&file)?)));
            }
            write_atomically(&temporary.join(CHECKSUMS), checksums.as_bytes())?;
            remove(&replaced)?;
            if path.exists() {
                fs::rename(&path, &replaced)?;
            }
            fs::rename(&temporary, &path)?;
            sync_folder(&self.folder)?;
            remove(&replaced)
        };
        save()
            // On a full disk half a checkpoint is in the way of everything else.
            .inspect_err(|_| drop(fs::remove_dir_all(&temporary)))
            .with_context(|| format!("cannot save the checkpoint {}", path.display()))?;
        Ok(path)
    }

    /// Removes all but the last `keep` checkpoints of GRPO steps, and those of a warm-up that is over.
    pub fn prune(&self, keep: usize) -> Result<()> {
        let found = self.positions()?;
        let steps: Vec<_> = found
            .iter()
            .filter(|at| matches!(at, Position::Grpo(step) if *step > 0))
            .collect();
        let warmup_is_over = found.contains(&Position::Grpo(0));
        let stale_warmup = found.iter().filter(|at| matches!(at, Position::Warmup(_)));
        let stale_warmup: Vec<_> = stale_warmup.skip(if warmup_is_over { 0 } else { keep }).collect();
        for position in steps.into_iter().skip(keep).chain(stale_warmup) {
            remove(&self.path(*position))?;
        }
        Ok(())
    }

    /// The newest checkpoint that is whole, and the newer ones that are not.
    pub fn newest(&self) -> Result<(Option<Checkpoint>, Vec<Damaged>)> {
        let mut damaged = Vec::new();
        for position in self.positions()? {
            match self.read(position) {
                Ok(checkpoint) => return Ok((Some(checkpoint), damaged)),
                Err(error) => damaged.push(Damaged {
                    path: self.path(position),
                    reason: console::explain(&error),
                }),
            }
        }
        Ok((None, damaged))
    }

    /// Reads and checks one checkpoint.
    pub fn read(&self, position: Position) -> Result<Checkpoint> {
        let path = self.path(position);
        if !path.exists() {
            bail!("there is no checkpoint {}: {}", path.display(), self.list()?);
        }
        let checksums = read_text(&path.join(CHECKSUMS))?;
        let mut listed = Vec::new();
        for line in checksums.lines() {
            let Some((sum, name)) = line.split_once("  ") else {
                bail!("{CHECKSUMS} has the line {line:?}");
            };
            let bytes = fs::read(path.join(name)).with_context(|| format!("cannot read {name}"))?;
            if Fingerprint::of(&bytes).to_string() != sum {
                bail!("{name} is not what was written");
            }
            listed.push(name);
        }
        if !listed.contains(&STATE) {
            bail!("{CHECKSUMS} does not list {STATE}");
        }
        let state: RunState = serde_json::from_str(&read_text(&path.join(STATE))?).context(STATE)?;
        if state.position != position {
            bail!("{STATE} is of another step, {:?}", state.position);
        }
        Ok(Checkpoint { path, state })
    }

    /// What there is, in words.
    fn list(&self) -> Result<String> {
        let positions = self.positions()?;
        let paths = positions.iter().rev().map(|position| self.path(*position));
        let names: Vec<_> = paths
            .map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned())
            .collect();
        Ok(match names.is_empty() {
            true => "the run has none".into(),
            false => format!("the run has {}", names.join(", ")),
        })
    }

    /// Positions of all checkpoints, damaged or not, the newest first. Without the folder there are none.
    pub fn positions(&self) -> Result<Vec<Position>> {
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let mut positions: Vec<_> = file_names(&self.folder)?
            .iter()
            .filter_map(|name| position(name))
            .collect();
        positions.sort_unstable();
        positions.reverse();
        Ok(positions)
    }
}

/// The position that a checkpoint's folder is named after.
fn position(name: &str) -> Option<Position> {
    let (stage, step) = name.split_once('_')?;
    let step = step.parse().ok()?;
    match stage {
        "warmup" => Some(Position::Warmup(step)),
        "step" => Some(Position::Grpo(step)),
        _ => None,
    }
}

fn file_names(folder: &Path) -> Result<Vec<String>> {
    let list = || -> std::io::Result<Vec<String>> {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    };
    let mut names = list().with_context(|| format!("cannot read the folder {}", folder.display()))?;
    names.sort();
    Ok(names)
}

fn read_text(path: &Path) -> Result<String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    fs::read_to_string(path).with_context(|| format!("cannot read {name}"))
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Renamed files are on the disk when their folder is; Windows has no such call.
fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use Position::{Grpo, Warmup};

    fn scratch(name: &str) -> Checkpoints {
        let folder = std::env::temp_dir().join(format!("grpo_math_{}_checkpoints_{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        Checkpoints::new(folder)
    }

    fn state(position: Position) -> RunState {
        RunState {
            position,
            config_fingerprint: "f".into(),
            problems_fingerprint: None,
            skipped: SkippedSteps {
                total: 3,
                consecutive: 1,
            },
            warmup_steps: 5,
            elapsed_s: 1.5,
        }
    }

    fn save(checkpoints: &Checkpoints, position: Position) {
        let write = |folder: &Path| Ok(fs::write(folder.join("model.bin"), format!("{position:?}"))?);
        checkpoints.save(&state(position), write).unwrap();
    }

    #[test]
    fn the_newest_is_found_by_stage_and_step() {
        let checkpoints = scratch("newest");
        assert!(checkpoints.newest().unwrap().0.is_none());
        for position in [Warmup(10_000), Grpo(0), Grpo(9), Grpo(10)] {
            save(&checkpoints, position);
        }
        let newest = checkpoints.newest().unwrap().0.unwrap();
        assert_eq!(newest.state, state(Grpo(10)));
        assert!(newest.path.ends_with("step_0010"));
        fs::remove_dir_all(checkpoints.folder).unwrap();
    }

    #[test]
    fn whatever_is_damaged_is_named_and_the_one_before_used() {
        let checkpoints = scratch("damaged");
        /// A name, what is done to the checkpoint's folder, and what is said of it.
        type Damage<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);
        let damage: [Damage; 5] = [
            (
                "bit",
                &|path| fs::write(path.join("model.bin"), "Grpo(6)").unwrap(),
                "model.bin is not what was written",
            ),
            (
                "gone",
                &|path| fs::remove_file(path.join("model.bin")).unwrap(),
                "cannot read model.bin",
            ),
            (
                "state",
                &|path| fs::write(path.join(STATE), "{").unwrap(),
                "state.json is not what was written",
            ),
            (
                "sums",
                &|path| fs::write(path.join(CHECKSUMS), "").unwrap(),
                "checksums.txt does not list state.json",
            ),
            (
                "all",
                &|path| fs::remove_dir_all(path).and_then(|()| fs::create_dir(path)).unwrap(),
                "cannot read checksums.txt",
            ),
        ];
        for (name, damage, reason) in damage {
            save(&checkpoints, Grpo(5));
            save(&checkpoints, Grpo(7));
            damage(&checkpoints.path(Grpo(7)));
            let (newest, damaged) = checkpoints.newest().unwrap();
            assert_eq!(newest.unwrap().state.position, Grpo(5), "{name}");
            assert_eq!(damaged.len(), 1, "{name}");
            assert!(damaged[0].path.ends_with("step_0007"), "{name}");
            assert!(damaged[0].reason.starts_with(reason), "{name}: {}", damaged[0].reason);
        }
        fs::remove_dir_all(checkpoints.folder).unwrap();
    }

    #[test]
    fn a_save_that_fails_leaves_the_old_checkpoint() {
        let checkpoints = scratch("failed");
        save(&checkpoints, Grpo(1));
        let error = checkpoints
            .save(&state(Grpo(1)), |_| bail!("no space left on device"))
            .unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("step_0001") && error.contains("no space left on device"),
            "{error}"
        );
        assert_eq!(checkpoints.newest().unwrap().0.unwrap().state.position, Grpo(1));
        assert_eq!(
            file_names(&checkpoints.folder).unwrap(),
            ["step_0001"],
            "nothing half written stays"
        );
        save(&checkpoints, Grpo(1));
        assert_eq!(file_names(&checkpoints.folder).unwrap(), ["step_0001"]);
        fs::remove_dir_all(checkpoints.folder).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_is_cleared_away() {
        let checkpoints = scratch("tidy");
        for step in [0, 1, 2] {
            save(&checkpoints, Grpo(step));
        }
        let hidden = |name: &str| checkpoints.folder.join(name);
        // It died while it wrote step 3, while it replaced step 1, and after it replaced step 2.
        fs::create_dir(hidden(".step_0003.tmp")).unwrap();
        fs::rename(checkpoints.path(Grpo(1)), hidden(".step_0001.old")).unwrap();
        fs::create_dir(hidden(".step_0001.tmp")).unwrap();
        fs::create_dir(hidden(".step_0002.old")).unwrap();
        checkpoints.tidy().unwrap();
        let names = file_names(&checkpoints.folder).unwrap();
        assert_eq!(names, ["step_0000", "step_0001", "step_0002"]);
        checkpoints.read(Grpo(1)).unwrap();
        fs::remove_dir_all(checkpoints.folder).unwrap();
    }

    #[test]
    fn a_checkpoint_that_is_not_there_is_named_with_those_that_are() {
        let checkpoints = scratch("absent");
        let error = |checkpoints: &Checkpoints| checkpoints.read(Grpo(7)).unwrap_err().to_string();
        assert!(error(&checkpoints).ends_with("step_0007: the run has none"));
        save(&checkpoints, Grpo(0));
        save(&checkpoints, Grpo(5));
        assert!(error(&checkpoints).ends_with("step_0007: the run has step_0000, step_0005"));
        fs::remove_dir_all(&checkpoints.folder).unwrap();
        assert!(
            error(&checkpoints).ends_with("step_0007: the run has none"),
            "without the folder"
        );
        assert!(checkpoints.newest().unwrap().0.is_none());
    }

    #[test]
    fn the_last_ones_and_the_first_are_kept() {
        let checkpoints = scratch("kept");
        for step in [10, 20, 30] {
            save(&checkpoints, Warmup(step));
        }
        checkpoints.prune(2).unwrap();
        assert_eq!(checkpoints.positions().unwrap(), [Warmup(30), Warmup(20)]);
        for step in [0, 25, 50, 75] {
            save(&checkpoints, Grpo(step));
        }
        checkpoints.prune(2).unwrap();
        assert_eq!(checkpoints.positions().unwrap(), [Grpo(75), Grpo(50), Grpo(0)]);
        fs::remove_dir_all(checkpoints.folder).unwrap();
    }
}
