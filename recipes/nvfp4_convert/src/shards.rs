//! What every writing command does: the output has the input's shards, each made from one input shard alone, in the order
//! of its tensors; then the index, the configuration, and a copy of what else the folder holds.
use anyhow::{Context, Result};
use burn_nvfp4::{
    checkpoint::{
        QuantizationScheme,
        folder::CONFIG_FILE,
        scheme::{HF_QUANT_CONFIG_FILE, QUANTIZATION_CONFIG},
    },
    safetensors_file::{FileTensor, INDEX_FILE, SINGLE_FILE, SafetensorsFile, SafetensorsWriter, TensorSpec},
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::{elements::is_float, output_folder::OutputFolder, source::Source};

/// What becomes of each tensor.
pub trait Conversion {
    /// The tensors that stand for one of the input; none, when another one's stand for it too.
    ///
    /// # Errors
    /// When the tensor cannot be converted.
    fn specs(&self, tensor: &FileTensor<'_>) -> Result<Vec<TensorSpec>>;

    /// Writes them.
    ///
    /// # Errors
    /// As [`specs`](Self::specs), and when the file system refuses.
    fn write(&self, tensor: &FileTensor<'_>, writer: &mut SafetensorsWriter) -> Result<()>;

    /// How the output is quantized.
    fn scheme(&self) -> Option<QuantizationScheme>;

    /// What else changes in `config.json`.
    fn change_config(&self, _config: &mut Map<String, Value>) {}
}

/// What was read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Bytes of the input's tensors.
    pub bytes_read: u64,
    /// Bytes of the output's tensors.
    pub bytes_written: u64,
    /// Shards of the output.
    pub shards: usize,
    /// Shards that an earlier run had made.
    pub resumed: usize,
}

/// Converts a folder. An interrupted run goes on where it was, if it is called with the same `settings` again.
///
/// # Errors
/// When a tensor cannot be converted, or the file system refuses; the error names file and tensor.
pub fn convert(source: &Source, output: &Path, settings: Value, conversion: &impl Conversion) -> Result<Converted> {
    // Before there is a folder: what cannot be converted should leave nothing behind.
    let mut shards = vec![];
    for file in source.files() {
        let mut specs = vec![];
        for tensor in file.tensors() {
            specs.extend(conversion.specs(&tensor)?);
        }
        if !specs.is_empty() {
            shards.push((file, specs));
        }
    }
    let folder = OutputFolder::start(output, &source.path, settings)?;
    let mut converted = Converted {
        bytes_read: source.bytes(),
        bytes_written: 0,
        shards: shards.len(),
        resumed: 0,
    };
    let progress = progress_bar(converted.bytes_read);
    let mut weight_map = BTreeMap::new();
    // The head even where it is tied and has no tensor.
    let mut unpacked = BTreeSet::from(["lm_head".to_string()]);
    for (file, specs) in shards {
        let name = file_name(file);
        weight_map.extend(specs.iter().map(|spec| (spec.name.clone(), name.clone())));
        unpacked.extend(specs.iter().filter_map(unpacked_module));
        if folder.has(&name) && holds(&folder.file(&name), &specs) {
            converted.resumed += 1;
            progress.inc(file.tensors().map(|tensor| tensor.bytes.len() as u64).sum());
        } else {
            write_shard(file, specs, &folder.file(&name), conversion, &progress)?;
        }
        let written = SafetensorsFile::open(&folder.file(&name))?;
        converted.bytes_written += written.tensors().map(|tensor| tensor.bytes.len() as u64).sum::<u64>();
    }
    progress.finish_and_clear();
    if source.files().len() > 1 || source.path.join(INDEX_FILE).exists() {
        let index = json!({"metadata": {"total_size": converted.bytes_written}, "weight_map": weight_map});
        folder.write(INDEX_FILE, pretty(&index)?.as_bytes())?;
    }
    write_config(source, &folder, conversion, unpacked)?;
    copy_others(&source.path, &folder)?;
    folder.finish()?;
    Ok(converted)
}

/// Whether an earlier run's file can be read and has these tensors; another one is made again.
fn holds(path: &Path, specs: &[TensorSpec]) -> bool {
    let spec = |spec: &TensorSpec| (spec.name.clone(), spec.dtype, spec.shape.clone());
    SafetensorsFile::open(path).is_ok_and(|file| {
        let found = file
            .tensors()
            .map(|tensor| (tensor.name().to_string(), tensor.dtype(), tensor.shape().to_vec()));
        found.collect::<BTreeSet<_>>() == specs.iter().map(spec).collect()
    })
}

fn write_shard(
    file: &SafetensorsFile,
    specs: Vec<TensorSpec>,
    path: &Path,
    conversion: &impl Conversion,
    progress: &ProgressBar,
) -> Result<()> {
    let mut metadata = file.metadata().clone();
    // What transformers asks for before it reads a file.
    metadata.entry("format".into()).or_insert_with(|| "pt".into());
    let mut writer = SafetensorsWriter::create(path, specs, metadata)?;
    for tensor in file.tensors() {
        conversion.write(&tensor, &mut writer)?;
        progress.inc(tensor.bytes.len() as u64);
    }
    Ok(writer.finish()?)
}

fn write_config(
    source: &Source,
    folder: &OutputFolder,
    conversion: &impl Conversion,
    unpacked: BTreeSet<String>,
) -> Result<()> {
    let mut config = source.config.clone();
    config.remove(QUANTIZATION_CONFIG);
    conversion.change_config(&mut config);
    if let Some(scheme) = conversion.scheme() {
        let ignored = scheme.ignored(unpacked);
        config.insert(QUANTIZATION_CONFIG.into(), scheme.quantization_config(&ignored));
        if let Some(own) = scheme.hf_quant_config(&ignored) {
            folder.write(HF_QUANT_CONFIG_FILE, pretty(&own)?.as_bytes())?;
        }
    }
    folder.write(CONFIG_FILE, pretty(&Value::Object(config))?.as_bytes())
}

/// The module of a tensor that is not packed, if an inference engine would otherwise take it for packed.
fn unpacked_module(spec: &TensorSpec) -> Option<String> {
    if !is_float(spec.dtype) {
        return None;
    }
    match spec.shape.len() {
        2 => spec.name.strip_suffix(".weight").map(String::from),
        // Experts in one tensor: `….experts.gate_up_proj`.
        3 => spec.name.rsplit_once('.').map(|(module, _)| module.to_string()),
        _ => None,
    }
}

/// Tokenizer, licence and the like.
fn copy_others(input: &Path, folder: &OutputFolder) -> Result<()> {
    let entries = fs::read_dir(input).with_context(|| format!("{}", input.display()))?;
    for entry in entries {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        // Written already, or of the input's quantization.
        let own = [CONFIG_FILE, HF_QUANT_CONFIG_FILE, INDEX_FILE, SINGLE_FILE].contains(&name);
        if !own && !name.starts_with('.') && !folder.has(name) && belongs_to_a_model(name) {
            folder.copy(&path, name)?;
        }
    }
    Ok(())
}

fn belongs_to_a_model(name: &str) -> bool {
    let extension = name.rsplit_once('.').map(|(_, extension)| extension);
    let licence = ["LICENSE", "LICENCE", "NOTICE"]
        .iter()
        .any(|prefix| name.starts_with(prefix));
    // Indices of other weights name files that are not copied.
    let index = name.ends_with(".index.json");
    licence
        || !index
            && extension.is_some_and(|extension| ["json", "jinja", "txt", "model", "tiktoken"].contains(&extension))
}

fn file_name(file: &SafetensorsFile) -> String {
    let name = file.path().file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn pretty(value: &Value) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

fn progress_bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
    ProgressBar::new(bytes).with_style(style.expect("the template is valid"))
}
