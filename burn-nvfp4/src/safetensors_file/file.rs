//! One safetensors file, memory-mapped.
use super::{
    SafetensorsError,
    header::{Header, LENGTH_BYTES, MAX_HEADER_BYTES, TensorInfo},
    regular_file,
};
use burn_backend::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// A safetensors file whose header was found to fit it.
///
/// Its bytes are mapped, not read: they cost no memory of the process until they are looked at, and can be dropped
/// again by the system. As with every mapped file, a process that cuts the file short while it is in use kills this one
/// (SIGBUS); write files aside and rename them, as [`SafetensorsWriter`](super::SafetensorsWriter) does.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    /// Where the tensors' bytes start.
    data: usize,
    header: Header,
    by_name: BTreeMap<String, usize>,
}

/// A tensor of a file.
#[derive(Clone, Copy, Debug)]
pub struct FileTensor<'a> {
    /// The file.
    pub path: &'a Path,
    /// What the header says of it.
    pub info: &'a TensorInfo,
    /// Its elements, row-major, little-endian.
    pub bytes: &'a [u8],
}

impl SafetensorsFile {
    /// Opens a file and checks its header against its size.
    ///
    /// # Errors
    /// When the file cannot be read, is no regular file, or its header is damaged or describes other bytes than the
    /// file has.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let (file, len) = regular_file::open(path)?;
        let refuse = |problem: String| SafetensorsError::file(path, problem);
        if len < LENGTH_BYTES as u64 {
            return Err(refuse(format!(
                "{len} bytes are no safetensors file: its header is cut short"
            )));
        }
        // SAFETY: the map is read-only and private to this value. Another process that changes the file changes what
        // is read, which every reader of files must expect: no reference to the bytes is trusted to stay equal.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| SafetensorsError::io(path, source))?;
        let (length, rest) = map.split_at_checked(LENGTH_BYTES).expect("the length was checked");
        let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
        if length > MAX_HEADER_BYTES {
            let problem = format!("a header of {length} bytes, more than the {MAX_HEADER_BYTES} of the format");
            return Err(refuse(problem));
        }
        let Some((json, data)) = rest.split_at_checked(length as usize) else {
            let problem = format!("a header of {length} bytes does not fit into a file of {len}");
            return Err(refuse(problem));
        };
        let header = Header::parse(json, data.len()).map_err(|error| match error.tensor {
            Some(tensor) => SafetensorsError::tensor(path, &tensor, error.problem),
            None => refuse(error.problem),
        })?;
        let names = header.tensors.iter().enumerate();
        Ok(Self {
            path: path.into(),
            data: LENGTH_BYTES + length as usize,
            by_name: names.map(|(index, tensor)| (tensor.name.clone(), index)).collect(),
            header,
            map,
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Free text that the header holds, by name.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The tensors, in the order of their bytes.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = FileTensor<'_>> {
        self.header.tensors.iter().map(|info| self.view(info))
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<FileTensor<'_>> {
        let index = *self.by_name.get(name)?;
        Some(self.view(&self.header.tensors[index]))
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> FileTensor<'a> {
        FileTensor {
            path: &self.path,
            info,
            bytes: &self.map[self.data..][info.bytes.clone()],
        }
    }
}

impl FileTensor<'_> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.info.shape
    }

    /// Type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.info.dtype
    }

    /// An error about this tensor.
    pub fn error(&self, problem: impl Into<String>) -> SafetensorsError {
        SafetensorsError::tensor(self.path, self.name(), problem)
    }

    /// Its elements from F32, BF16 or F16, exactly.
    ///
    /// # Errors
    /// When it has another type.
    pub fn to_f32(&self) -> Result<Vec<f32>, SafetensorsError> {
        fn decode<const N: usize>(bytes: &[u8], element: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks::<N>().0.iter().map(|bytes| element(*bytes)).collect()
        }
        match self.dtype() {
            Dtype::F32 => Ok(decode(self.bytes, f32::from_le_bytes)),
            Dtype::BF16 => Ok(decode(self.bytes, |bytes| bf16::from_le_bytes(bytes).to_f32())),
            Dtype::F16 => Ok(decode(self.bytes, |bytes| f16::from_le_bytes(bytes).to_f32())),
            other => Err(self.error(format!("{other}, expected F32, BF16 or F16"))),
        }
    }
}
