//! The tensors of a checkpoint: one file, or shards and the index that lists them.
use super::{
    FileTensor, SafetensorsError, SafetensorsFile, regular_file,
    strict_json::{UniqueMap, parse_as},
};
use serde::{Deserialize, de::IgnoredAny};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// Name of the file in a folder that needs no index.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index in a folder with shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// An index names every tensor, about a hundred bytes each.
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// All tensors of a checkpoint, whichever file they lie in.
#[derive(Debug)]
pub struct SafetensorsFolder {
    files: Vec<SafetensorsFile>,
    by_name: BTreeMap<String, usize>,
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    #[serde(default, rename = "metadata")]
    _metadata: IgnoredAny,
    weight_map: UniqueMap<String>,
}

impl SafetensorsFolder {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// When neither is there, a shard is missing or damaged, or index and shards do not hold the same tensors.
    pub fn open(folder: &Path) -> Result<Self, SafetensorsError> {
        let (single, index) = (folder.join(SINGLE_FILE), folder.join(INDEX_FILE));
        // `symlink_metadata`: a broken link is there, and is an error of its own.
        if single.symlink_metadata().is_ok() {
            return Self::from_file(&single);
        }
        if index.symlink_metadata().is_ok() {
            return Self::from_index(folder, &index);
        }
        let problem = format!("holds neither {SINGLE_FILE} nor {INDEX_FILE}");
        Err(SafetensorsError::file(folder, problem))
    }

    /// A checkpoint of one file.
    ///
    /// # Errors
    /// As [`SafetensorsFile::open`].
    pub fn from_file(path: &Path) -> Result<Self, SafetensorsError> {
        let file = SafetensorsFile::open(path)?;
        Ok(Self {
            by_name: file.tensors().map(|tensor| (tensor.name().to_string(), 0)).collect(),
            files: vec![file],
        })
    }

    fn from_index(folder: &Path, path: &Path) -> Result<Self, SafetensorsError> {
        let text = regular_file::read(path, MAX_INDEX_BYTES)?;
        let refuse = |problem: String| SafetensorsError::file(path, problem);
        let Index { weight_map, .. } = parse_as(&text).map_err(refuse)?;
        let mut files = vec![];
        let mut by_name = BTreeMap::new();
        for name in weight_map.0.values().collect::<BTreeSet<_>>() {
            if Path::new(name).file_name().is_none_or(|file| file != name.as_str()) {
                return Err(refuse(format!(
                    "weight_map names {name:?}, which is no file of this folder"
                )));
            }
            let shard = SafetensorsFile::open(&folder.join(name))?;
            for tensor in shard.tensors() {
                match weight_map.0.get(tensor.name()) {
                    Some(listed) if listed == name => {}
                    Some(listed) => return Err(tensor.error(format!("the index says it lies in {listed}"))),
                    None => return Err(tensor.error("the index does not list it")),
                }
                by_name.insert(tensor.name().to_string(), files.len());
            }
            files.push(shard);
        }
        if let Some((tensor, shard)) = weight_map.0.iter().find(|(tensor, _)| !by_name.contains_key(*tensor)) {
            let problem = format!("not there, though {INDEX_FILE} lists it");
            return Err(SafetensorsError::tensor(&folder.join(shard), tensor, problem));
        }
        Ok(Self { files, by_name })
    }

    /// The files, in the order of their names.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<FileTensor<'_>> {
        self.files[*self.by_name.get(name)?].tensor(name)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = FileTensor<'_>> {
        self.by_name
            .iter()
            .map(|(name, file)| self.files[*file].tensor(name).expect("listed from this file"))
    }
}
