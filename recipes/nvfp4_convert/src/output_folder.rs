//! Where results go: a folder that has its name only when it is whole.
//!
//! Files are written into `NAME.partial` beside it, each aside and renamed, so that an interrupted run goes on with the
//! first file that is missing. What the run was asked to do lies in there too: a run with other settings, or after the
//! input changed, does not go on with files that it would not have made.
use anyhow::{Context, Result, bail};
use burn_nvfp4::safetensors_file::regular_file;
use serde_json::{Value, json};
use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io::Write,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// What the run was asked to do, while it is not done.
const STATE_FILE: &str = ".nvfp4_convert.json";
const MAX_STATE_BYTES: u64 = 10_000_000;

/// A folder that is being written.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    aside: PathBuf,
    resumed: bool,
    /// Locked as long as this process writes.
    _lock: File,
}

impl OutputFolder {
    /// Starts the folder `path`, or goes on with an unfinished run that had the same settings and input.
    ///
    /// # Errors
    /// When there is something at `path`, it lies inside `input`, another run with other settings is unfinished there, or
    /// another process is writing it.
    pub fn start(path: &Path, input: &Path, settings: Value) -> Result<Self> {
        if path.symlink_metadata().is_ok() {
            bail!(
                "{}: exists already, and nothing is overwritten; choose another name",
                path.display()
            );
        }
        let name = path
            .file_name()
            .with_context(|| format!("{}: no name for a folder", path.display()))?;
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let canonical = |path: &Path| path.canonicalize().with_context(|| format!("{}", path.display()));
        if canonical(parent)?.starts_with(canonical(input)?) {
            bail!("{}: lies inside the input, {}", path.display(), input.display());
        }
        let mut aside_name = OsString::from(name);
        aside_name.push(".partial");
        let aside = parent.join(aside_name);
        let resumed = aside.symlink_metadata().is_ok();
        if !resumed {
            fs::create_dir(&aside).with_context(|| format!("cannot create {}", aside.display()))?;
        }
        let lock = lock(&aside)?;
        let folder = Self {
            path: path.into(),
            aside,
            resumed,
            _lock: lock,
        };
        folder.check_state(&json!({"settings": settings, "input": fingerprint(input)?}))?;
        Ok(folder)
    }

    /// The name it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it goes on with an earlier run.
    pub fn is_resumed(&self) -> bool {
        self.resumed
    }

    /// Where a file is until the folder is whole.
    pub fn file(&self, name: &str) -> PathBuf {
        self.aside.join(name)
    }

    /// Whether a file is there, and so whole.
    pub fn has(&self, name: &str) -> bool {
        self.file(name).symlink_metadata().is_ok()
    }

    /// Writes a small file.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.file(name);
        let temporary = self.file(&format!("{name}.partial"));
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Copies a file of the input, following links.
    ///
    /// # Errors
    /// When it is no regular file, or the file system refuses.
    pub fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let path = self.file(name);
        let temporary = self.file(&format!("{name}.partial"));
        let (mut source, _) = regular_file::open(from)?;
        let mut copy = || -> std::io::Result<()> {
            let mut file = File::create(&temporary)?;
            std::io::copy(&mut source, &mut file)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        copy().with_context(|| format!("cannot copy {} to {}", from.display(), path.display()))
    }

    /// Gives the folder its name.
    ///
    /// # Errors
    /// When something has that name by now, or the file system refuses.
    pub fn finish(self) -> Result<()> {
        let finish = || -> std::io::Result<()> {
            fs::remove_file(self.file(STATE_FILE))?;
            sync_folder(&self.aside)?;
            fs::rename(&self.aside, &self.path)?;
            sync_folder(
                self.path
                    .parent()
                    .filter(|parent| *parent != Path::new(""))
                    .unwrap_or(Path::new(".")),
            )
        };
        if self.path.symlink_metadata().is_ok() {
            bail!(
                "{}: exists by now; the result stays in {}",
                self.path.display(),
                self.aside.display()
            );
        }
        finish().with_context(|| format!("cannot rename {} to {}", self.aside.display(), self.path.display()))
    }

    fn check_state(&self, state: &Value) -> Result<()> {
        let path = self.file(STATE_FILE);
        if self.resumed && path.symlink_metadata().is_ok() {
            let text = regular_file::read(&path, MAX_STATE_BYTES)?;
            if serde_json::from_slice::<Value>(&text).ok().as_ref() != Some(state) {
                bail!(
                    "{} is an unfinished run with other settings or another input; repeat that run, or delete the folder",
                    self.aside.display()
                );
            }
            return Ok(());
        }
        if fs::read_dir(&self.aside)?.next().is_some() {
            bail!(
                "{} exists and is no unfinished run of this program; delete or rename it",
                self.aside.display()
            );
        }
        self.write(STATE_FILE, serde_json::to_string_pretty(state)?.as_bytes())
    }
}

/// The folder's lock, which ends with the process.
fn lock(folder: &Path) -> Result<File> {
    let file = File::open(folder).with_context(|| format!("{}", folder.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("{}: another process is writing it", folder.display()),
        Err(TryLockError::Error(source)) => Err(source).with_context(|| format!("{}", folder.display())),
    }
}

#[cfg(unix)]
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> std::io::Result<()> {
    Ok(())
}

/// Names, sizes and times of the input's files.
fn fingerprint(input: &Path) -> Result<Value> {
    let mut files = serde_json::Map::new();
    for entry in fs::read_dir(input).with_context(|| format!("{}", input.display()))? {
        let path = entry?.path();
        // Broken links and devices are refused where they are read.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let modified = metadata
            .modified()
            .ok()
            .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let modified = modified.map(|time| time.as_nanos().to_string());
        files.insert(name, json!([metadata.len(), modified]));
    }
    Ok(Value::Object(files))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("nvfp4_convert_{name}_{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("input")).unwrap();
        fs::write(path.join("input/config.json"), "{}").unwrap();
        path
    }

    fn start(base: &Path, output: &str, settings: &str) -> Result<OutputFolder> {
        OutputFolder::start(&base.join(output), &base.join("input"), json!(settings))
    }

    #[test]
    fn a_folder_has_its_name_when_it_is_whole() {
        let base = scratch("whole");
        let output = start(&base, "out", "a").unwrap();
        output.write("x", b"1").unwrap();
        output.copy(&base.join("input/config.json"), "config.json").unwrap();
        assert!(!base.join("out").exists());
        output.finish().unwrap();
        let mut names: Vec<_> = fs::read_dir(base.join("out"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["config.json", "x"]);
        assert!(!base.join("out.partial").exists());
        let error = start(&base, "out", "a").unwrap_err().to_string();
        assert!(error.contains("exists already, and nothing is overwritten"), "{error}");
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn an_unfinished_run_goes_on_under_the_same_settings_and_input_alone() {
        let base = scratch("resume");
        let first = start(&base, "out", "a").unwrap();
        first.write("x", b"1").unwrap();
        let error = start(&base, "out", "a").unwrap_err().to_string();
        assert!(error.contains("another process is writing it"), "{error}");
        drop(first);
        let again = start(&base, "out", "a").unwrap();
        assert!(again.is_resumed() && again.has("x") && !again.has("y"));
        drop(again);
        let error = start(&base, "out", "b").unwrap_err().to_string();
        assert!(error.contains("other settings or another input"), "{error}");
        fs::write(base.join("input/config.json"), "{ }").unwrap();
        assert!(start(&base, "out", "a").is_err());
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn an_output_in_the_input_or_over_something_else_is_refused() {
        let base = scratch("inside");
        for output in ["input", "input/out"] {
            assert!(start(&base, output, "a").is_err(), "{output}");
        }
        assert!(start(&base, "absent/out", "a").is_err());
        fs::create_dir(base.join("out.partial")).unwrap();
        fs::write(base.join("out.partial/mine"), "").unwrap();
        let error = start(&base, "out", "a").unwrap_err().to_string();
        assert!(error.contains("is no unfinished run"), "{error}");
        assert!(!base.join("input/out.partial").exists());
        fs::remove_dir_all(base).unwrap();
    }
}
