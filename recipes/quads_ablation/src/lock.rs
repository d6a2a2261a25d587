//! One process at a time runs the arms of a folder.
use anyhow::{Context, Result, bail};
use std::fs::{self, File, OpenOptions, TryLockError};

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
        let path = layout.lock();
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another process is running the arms in {}: wait until it is done, or stop it (Ctrl-C or kill; it saves)",
                out.display()
            ),
            // Some network file systems have no locks; each run is still locked for itself.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        Ok(Self { _file: file })
    }
}
