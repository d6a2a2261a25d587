//! Files that are whole or not there.
use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
};

/// Writes a file so that whoever looks sees the old one or the new one, never a part: under a temporary name of this
/// process's own, flushed to the disk, then renamed. An error leaves the old file, and no temporary one.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write()
        .inspect_err(|_| drop(fs::remove_file(&temporary)))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_leaves_the_old_file_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("grpo_math_{}_atomic", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        write_atomically(&folder.join("one"), b"1").unwrap();
        // A folder that is not empty cannot be replaced by a file.
        fs::create_dir_all(folder.join("two/x")).unwrap();
        let error = write_atomically(&folder.join("two"), b"2").unwrap_err().to_string();
        assert!(error.starts_with("cannot write ") && error.ends_with("two"), "{error}");
        let mut names: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["one", "two"]);
        assert_eq!(fs::read(folder.join("one")).unwrap(), b"1");
        fs::remove_dir_all(folder).unwrap();
    }
}
