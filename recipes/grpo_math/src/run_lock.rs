//! One process at a time works on a run. The lock is the operating system's: it goes when the process does, however that
//! ends, and the empty file that carries it stays.
use anyhow::{Context, Result, bail};
use std::fs::{File, OpenOptions, TryLockError};

use crate::{console, run_folder::RunFolder};

/// Held by the process that works on a run.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Takes the lock of a run; refuses while another process has it.
    pub fn take(folder: &RunFolder) -> Result<Self> {
        let path = folder.lock();
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another process is working on the run in {}: wait until it is done, or stop it (Ctrl-C or kill; it saves)",
                folder.path().display()
            ),
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                console::err(format!(
                    "Warning: {} cannot be locked here; do not start a second process on this run.",
                    folder.path().display()
                ))
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        Ok(Self { _file: file })
    }

    /// Whether a process is working on a run.
    pub fn is_held(folder: &RunFolder) -> bool {
        // Shared: two reports at once are not a run.
        File::open(folder.lock()).is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_second_process_is_refused_until_the_first_is_gone() {
        let directory = std::env::temp_dir().join(format!("grpo_math_{}_lock", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let config = Config::load(None, &[format!("run.directory={}", directory.display())]).unwrap();
        let folder = RunFolder::create(&config).unwrap();
        assert!(!RunLock::is_held(&folder), "nobody ever worked on it");
        let lock = RunLock::take(&folder).unwrap();
        assert!(RunLock::is_held(&folder));
        let refused = RunLock::take(&folder).unwrap_err().to_string();
        assert!(
            refused.starts_with("another process is working on the run in ") && refused.contains("grpo_math"),
            "{refused}"
        );
        drop(lock);
        assert!(
            !RunLock::is_held(&folder) && !RunLock::is_held(&folder),
            "looking takes nothing"
        );
        drop(RunLock::take(&folder).unwrap());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
