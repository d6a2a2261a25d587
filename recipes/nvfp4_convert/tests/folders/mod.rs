//! Model folders for the tests.
#![allow(dead_code, reason = "each test uses some")]
use burn_nvfp4::safetensors_file::{FileTensor, SafetensorsFile, SafetensorsWriter, TensorSpec};
use nvfp4_convert::{
    quantize::{Quantize, Recipe},
    shards::{self, Converted},
    source::Source,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// A folder of its own for a test, empty.
pub fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join("nvfp4_convert")
        .join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// The tiny Qwen3-MoE as a folder of the Hub, with `weights` of `qwen3moe_tiny/`.
pub fn tiny(base: &Path, weights: &str) -> PathBuf {
    let folder = base.join("tiny");
    fs::create_dir_all(&folder).unwrap();
    let from = fixtures().join("qwen3moe_tiny");
    fs::copy(from.join("config.json"), folder.join("config.json")).unwrap();
    fs::copy(from.join(weights), folder.join("model.safetensors")).unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    fs::write(folder.join("LICENSE"), "words").unwrap();
    fs::write(folder.join("pytorch_model.bin"), "other weights").unwrap();
    folder
}

/// Lays the tensors of a folder's one file out in shards, by their place in it.
pub fn shard(folder: &Path, shards: usize) {
    let path = folder.join("model.safetensors");
    let file = SafetensorsFile::open(&path).unwrap();
    let mut weight_map = BTreeMap::new();
    for index in 0..shards {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
        let own: Vec<FileTensor<'_>> = file.tensors().skip(index).step_by(shards).collect();
        write(&folder.join(&name), &own);
        weight_map.extend(own.iter().map(|tensor| (tensor.name().to_string(), name.clone())));
    }
    let index = json!({"metadata": {}, "weight_map": weight_map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::remove_file(path).unwrap();
}

/// A file of these tensors.
pub fn write(path: &Path, tensors: &[FileTensor<'_>]) {
    let specs = tensors.iter().map(|tensor| TensorSpec {
        name: tensor.name().into(),
        dtype: tensor.dtype(),
        shape: tensor.shape().into(),
    });
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut writer = SafetensorsWriter::create(path, specs.collect(), metadata).unwrap();
    for tensor in tensors {
        writer.write(tensor.name(), tensor.bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Changes the JSON object of a file.
pub fn change_json(path: &Path, change: impl Fn(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Quantizes with the recipe's own format.
pub fn quantize(input: &Path, output: &Path, recipe: Recipe, exclude: &[&str]) -> anyhow::Result<Converted> {
    let source = Source::open(input)?;
    let exclude = exclude.iter().map(|path| path.to_string());
    let quantize = Quantize::new(&source, recipe, recipe.format(), exclude)?;
    shards::convert(&source, output, json!("quantize"), &quantize)
}

/// Everything in a folder, by name.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (name, fs::read(path).unwrap())
    };
    fs::read_dir(folder).unwrap().map(file).collect()
}
