//! One process at a time works on a run.
use anyhow::{Result, bail};
use std::fs::{File, TryLockError};

use crate::{console, file_lock::FileLock, run_folder::RunFolder};

/// Held by the process that works on a run.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Takes the lock of a run; refuses while another process has it.
    pub fn take(folder: &RunFolder) -> Result<Self> {
        let file = match FileLock::take(&folder.lock())? {
            FileLock::Taken(file) => file,
            FileLock::Busy => bail!(
                "another process is working on the run in {}: wait until it is done, or stop it (Ctrl-C or kill; it saves)",
                folder.path().display()
            ),
            FileLock::Unsupported(file) => {
                console::err(format!(
                    "Warning: {} cannot be locked here; do not start a second process on this run.",
                    folder.path().display()
                ));
                file
            }
        };
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
