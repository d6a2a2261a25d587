//! One process at a time runs the arms of a folder.
use anyhow::{Context, Result, bail};
use grpo_math::file_lock::FileLock;
use std::fs::{self, File};

use crate::layout::Layout;

/// Held by the process that runs the arms; the operating system lets it go when that ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a folder, which is made where it is not there.
    ///
    /// # Errors
    /// When another process has it, or the folder cannot be written.
    pub fn take(layout: &Layout) -> Result<Self> {
        let out = layout.out();
        fs::create_dir_all(out)
            .with_context(|| format!("cannot make the folder {} (another place: --out DIR)", out.display()))?;
        let file = match FileLock::take(&layout.lock())? {
            // Some network file systems have no locks; each run still warns of it by itself.
            FileLock::Taken(file) | FileLock::Unsupported(file) => file,
            FileLock::Busy => bail!(
                "another process is running the arms in {}: wait until it is done, or stop it (Ctrl-C or kill; it saves)",
                out.display()
            ),
        };
        Ok(Self { _file: file })
    }
}
