//! Locks of the operating system on empty files: a lock goes when its process does, however that ends; the file stays.
use anyhow::{Context, Result};
use std::{
    fs::{File, OpenOptions, TryLockError},
    io::ErrorKind,
    path::Path,
};

/// What became of an attempt to lock a file.
#[derive(Debug)]
pub enum FileLock {
    /// It is held for as long as this is kept.
    Taken(File),
    /// Another process holds it.
    Busy,
    /// The file system has no locks, as some over a network have none.
    Unsupported(File),
}

impl FileLock {
    /// Tries to lock a file, which is made where it is not there.
    ///
    /// # Errors
    /// When it cannot be written or locked; the file is named.
    pub fn take(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(Self::Taken(file)),
            Err(TryLockError::WouldBlock) => Ok(Self::Busy),
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(Self::Unsupported(file)),
            Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
        }
    }
}
