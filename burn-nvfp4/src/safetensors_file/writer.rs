//! Writing a safetensors file, one tensor at a time.
use super::{
    SafetensorsError,
    header::{Header, METADATA, TensorInfo, byte_size},
};
use safetensors::Dtype;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
}

/// Writes a safetensors file whose tensors are known before their values are.
///
/// The bytes of the file are those of the reference implementation: tensors lie by falling alignment of their type, then
/// by name. The values may come in any order, and none is kept. The file is written aside and gets its name when it is
/// whole and on the disk; if the writer is dropped before, nothing is left.
#[derive(Debug)]
pub struct SafetensorsWriter {
    path: PathBuf,
    aside: PathBuf,
    file: Option<File>,
    data: u64,
    tensors: BTreeMap<String, Slot>,
}

#[derive(Debug)]
struct Slot {
    info: TensorInfo,
    written: bool,
}

impl SafetensorsWriter {
    /// Starts the file that will be at `path`.
    ///
    /// # Errors
    /// When the file system refuses, or a tensor occurs twice or is impossible.
    pub fn create(
        path: &Path,
        mut tensors: Vec<TensorSpec>,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self, SafetensorsError> {
        tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then(a.name.cmp(&b.name)));
        let mut end = 0;
        let mut infos = Vec::with_capacity(tensors.len());
        for TensorSpec { name, dtype, shape } in tensors {
            let refuse = |problem| SafetensorsError::tensor(path, &name, problem);
            if name == METADATA {
                return Err(refuse("the format keeps this name for itself"));
            }
            let stop = byte_size(dtype, &shape).and_then(|size| usize::checked_add(end, size));
            let stop = stop.ok_or_else(|| refuse("larger than any memory, or no whole bytes"))?;
            let bytes = end..stop;
            infos.push(TensorInfo {
                name,
                dtype,
                shape,
                bytes,
            });
            end = stop;
        }
        let header = Header {
            metadata,
            tensors: infos,
        };
        let head = header.encode();
        let mut slots = BTreeMap::new();
        for info in header.tensors {
            let slot = Slot { info, written: false };
            if let Some(twice) = slots.insert(slot.info.name.clone(), slot) {
                return Err(SafetensorsError::tensor(path, &twice.info.name, "occurs twice"));
            }
        }
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let mut writer = Self {
            path: path.into(),
            aside: path.with_file_name(name),
            file: None,
            data: head.len() as u64,
            tensors: slots,
        };
        let start = || -> std::io::Result<File> {
            let mut file = File::create(&writer.aside)?;
            file.write_all(&head)?;
            Ok(file)
        };
        writer.file = Some(start().map_err(|source| SafetensorsError::io(&writer.aside, source))?);
        Ok(writer)
    }

    /// Writes the elements of a tensor, row-major, little-endian.
    ///
    /// # Errors
    /// When the file was not to have that tensor, it was written before, or its size is another; when the file system
    /// refuses.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), SafetensorsError> {
        let refuse = |problem: String| SafetensorsError::tensor(&self.path, name, problem);
        let slot = self.tensors.get_mut(name);
        let slot = slot.ok_or_else(|| refuse("the file was not made to hold it".into()))?;
        if slot.written {
            return Err(refuse("it was written before".into()));
        }
        let (expected, given) = (slot.info.bytes.len(), bytes.len());
        if expected != given {
            let (dtype, shape) = (slot.info.dtype, &slot.info.shape);
            return Err(refuse(format!("{dtype} {shape:?} has {expected} bytes, got {given}")));
        }
        let at = SeekFrom::Start(self.data + slot.info.bytes.start as u64);
        let file = self.file.as_mut().expect("open until it is finished");
        file.seek(at)
            .and_then(|_| file.write_all(bytes))
            .map_err(|source| SafetensorsError::io(&self.aside, source))?;
        slot.written = true;
        Ok(())
    }

    /// Gives the file its name, once all of it is on the disk.
    ///
    /// # Errors
    /// When a tensor was not written, or the file system refuses.
    pub fn finish(mut self) -> Result<(), SafetensorsError> {
        if let Some(slot) = self.tensors.values().find(|slot| !slot.written) {
            let problem = "the file was made to hold it, and it was not written";
            return Err(SafetensorsError::tensor(&self.path, &slot.info.name, problem));
        }
        let file = self.file.take().expect("open until it is finished");
        let done = file.sync_all().and_then(|()| std::fs::rename(&self.aside, &self.path));
        done.map_err(|source| {
            // Nothing else will.
            let _ = std::fs::remove_file(&self.aside);
            SafetensorsError::io(&self.path, source)
        })
    }
}

impl Drop for SafetensorsWriter {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            // There is nobody to tell.
            let _ = std::fs::remove_file(&self.aside);
        }
    }
}
