//! What a checkpoint's configuration says of its quantization: `quantization_config` in `config.json`, and ModelOpt's
//! `hf_quant_config.json` beside it.
//!
//! A setting that is not NVFP4 as described in [`checkpoint`](super), such as a quantized cache or a transform, is refused
//! by its name: ignored, it would be a model of other values.
use serde_json::{Map, Value, json};

use super::format::CheckpointFormat;
use kernels_cubecl::BLOCK;

/// Name of ModelOpt's own file.
pub const HF_QUANT_CONFIG_FILE: &str = "hf_quant_config.json";
/// The key of `config.json`.
pub const QUANTIZATION_CONFIG: &str = "quantization_config";
/// Versions of the tools whose files these are the same as; loaders may read them.
const COMPRESSED_TENSORS_VERSION: &str = "0.20.1";
const MODELOPT_VERSION: &str = "0.47.0";

/// What is quantized, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizationScheme {
    /// Format of the files.
    pub format: CheckpointFormat,
    /// Whether activations are quantized too, by a static outer scale. Else only the weights are.
    pub w4a4: bool,
}

/// What is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SchemeError {
    /// Path of the field.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
}

impl QuantizationScheme {
    /// From `config.json`; `None` for a model that is not quantized.
    ///
    /// # Errors
    /// When the quantization is another than NVFP4 in one of the two formats.
    pub fn from_config(config: &Map<String, Value>) -> Result<Option<Self>, SchemeError> {
        let Some(value) = config.get(QUANTIZATION_CONFIG).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let fields = Fields::new(QUANTIZATION_CONFIG, value)?;
        match fields.text("quant_method")? {
            "compressed-tensors" => compressed_tensors(&fields).map(Some),
            "modelopt" => modelopt(&fields, "kv_cache_scheme").map(Some),
            _ => Err(fields.unsupported("quant_method", "`compressed-tensors` or `modelopt`")),
        }
    }

    /// From `hf_quant_config.json`, which is all that older ModelOpt checkpoints have.
    ///
    /// # Errors
    /// As [`from_config`](Self::from_config).
    pub fn from_hf_quant_config(config: &Map<String, Value>) -> Result<Self, SchemeError> {
        let whole = Value::Object(config.clone());
        let whole = Fields::new(HF_QUANT_CONFIG_FILE, &whole)?;
        modelopt(&whole.object("quantization")?, "kv_cache_quant_algo")
    }

    /// `quantization_config`. `ignore` are the modules with a matrix that is not packed, by their exact paths.
    pub fn quantization_config(&self, ignore: &[String]) -> Value {
        match self.format {
            CheckpointFormat::CompressedTensors => {
                let arguments = |dynamic: Value, observer: &str| {
                    json!({
                        "dynamic": dynamic,
                        "group_size": BLOCK,
                        "num_bits": 4,
                        "observer": observer,
                        "scale_dtype": "torch.float8_e4m3fn",
                        "strategy": "tensor_group",
                        "symmetric": true,
                        "type": "float",
                    })
                };
                let activations = match self.w4a4 {
                    true => arguments("local".into(), "static_minmax"),
                    false => Value::Null,
                };
                json!({
                    "config_groups": {"group_0": {
                        "format": "nvfp4-pack-quantized",
                        "input_activations": activations,
                        "output_activations": null,
                        "targets": ["Linear"],
                        "weights": arguments(false.into(), "memoryless_minmax"),
                    }},
                    "format": "nvfp4-pack-quantized",
                    "global_compression_ratio": null,
                    "ignore": ignore,
                    "kv_cache_scheme": null,
                    "quant_method": "compressed-tensors",
                    "quantization_status": "compressed",
                    "sparsity_config": {},
                    "transform_config": {},
                    "version": COMPRESSED_TENSORS_VERSION,
                })
            }
            CheckpointFormat::ModelOpt => {
                let arguments = json!({"dynamic": false, "group_size": BLOCK, "num_bits": 4, "type": "float"});
                let mut group = json!({"targets": ["Linear"], "weights": arguments});
                if self.w4a4 {
                    group["input_activations"] = arguments;
                }
                json!({
                    "config_groups": {"group_0": group},
                    "ignore": ignore,
                    "producer": modelopt_producer(),
                    "quant_algo": self.modelopt_algorithm(),
                    "quant_method": "modelopt",
                })
            }
        }
    }

    /// `hf_quant_config.json`, for ModelOpt's format.
    pub fn hf_quant_config(&self, ignore: &[String]) -> Option<Value> {
        let quantization = json!({
            "exclude_modules": ignore,
            "group_size": BLOCK,
            "kv_cache_quant_algo": null,
            "quant_algo": self.modelopt_algorithm(),
        });
        (self.format == CheckpointFormat::ModelOpt)
            .then(|| json!({"producer": modelopt_producer(), "quantization": quantization}))
    }

    /// The modules that `ignore` must list, of those with a matrix that is not packed. An embedding is no linear layer to
    /// compressed-tensors; ModelOpt lists it.
    pub fn ignored(&self, unpacked: impl IntoIterator<Item = String>) -> Vec<String> {
        let listed = |module: &String| self.format == CheckpointFormat::ModelOpt || !module.ends_with("embed_tokens");
        unpacked.into_iter().filter(listed).collect()
    }

    fn modelopt_algorithm(&self) -> &'static str {
        if self.w4a4 { "NVFP4" } else { "W4A16_NVFP4" }
    }
}

/// How loaders recognise the format, whoever wrote the file.
fn modelopt_producer() -> Value {
    json!({"name": "modelopt", "version": MODELOPT_VERSION})
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<QuantizationScheme, SchemeError> {
    for field in ["kv_cache_scheme", "sparsity_config", "transform_config"] {
        fields.require_empty(field)?;
    }
    if fields.has("quantization_status") {
        fields.require("quantization_status", "compressed")?;
    }
    fields.require("format", "nvfp4-pack-quantized")?;
    let mut w4a4 = None;
    for (name, group) in fields.object("config_groups")?.objects()? {
        group.require_empty("output_activations")?;
        for (field, value) in [
            ("num_bits", json!(4)),
            ("type", json!("float")),
            ("group_size", json!(BLOCK)),
        ] {
            group.object("weights")?.require(field, value.clone())?;
            if !group.is_empty("input_activations") {
                group.object("input_activations")?.require(field, value)?;
            }
        }
        let quantized = !group.is_empty("input_activations");
        if w4a4.is_some_and(|other| other != quantized) {
            return Err(fields.error(
                &format!("config_groups.{name}"),
                "quantizes activations, another group does not",
            ));
        }
        w4a4 = Some(quantized);
    }
    Ok(QuantizationScheme {
        format: CheckpointFormat::CompressedTensors,
        w4a4: w4a4.ok_or_else(|| fields.error("config_groups", "no group"))?,
    })
}

fn modelopt(fields: &Fields<'_>, cache: &str) -> Result<QuantizationScheme, SchemeError> {
    fields.require_empty(cache)?;
    let w4a4 = match fields.text("quant_algo")? {
        "NVFP4" => true,
        "W4A16_NVFP4" => false,
        _ => return Err(fields.unsupported("quant_algo", "`NVFP4` or `W4A16_NVFP4`")),
    };
    if fields.has("group_size") {
        fields.require("group_size", BLOCK)?;
    }
    if fields.has("config_groups") {
        for (_, group) in fields.object("config_groups")?.objects()? {
            group.object("weights")?.require("group_size", BLOCK)?;
        }
    }
    Ok(QuantizationScheme {
        format: CheckpointFormat::ModelOpt,
        w4a4,
    })
}

/// An object, and where it is.
struct Fields<'a> {
    path: String,
    fields: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn new(path: &str, value: &'a Value) -> Result<Self, SchemeError> {
        match value.as_object() {
            Some(fields) => Ok(Self {
                path: path.into(),
                fields,
            }),
            None => Err(SchemeError {
                field: path.into(),
                problem: format!("expected an object, found {value}"),
            }),
        }
    }

    fn error(&self, field: &str, problem: &str) -> SchemeError {
        SchemeError {
            field: format!("{}.{field}", self.path),
            problem: problem.into(),
        }
    }

    fn unsupported(&self, field: &str, expected: &str) -> SchemeError {
        let found = self.fields.get(field).unwrap_or(&Value::Null);
        self.error(field, &format!("{found} is not supported, expected {expected}"))
    }

    fn has(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(|value| !value.is_null())
    }

    fn text(&self, field: &str) -> Result<&'a str, SchemeError> {
        let text = self.fields.get(field).and_then(Value::as_str);
        text.ok_or_else(|| self.unsupported(field, "a string"))
    }

    fn object(&self, field: &str) -> Result<Self, SchemeError> {
        let value = self.fields.get(field).unwrap_or(&Value::Null);
        Self::new(&format!("{}.{field}", self.path), value)
    }

    fn objects(&self) -> Result<Vec<(&'a str, Self)>, SchemeError> {
        let object = |name: &'a String| Ok((name.as_str(), self.object(name)?));
        self.fields.keys().map(object).collect()
    }

    fn require(&self, field: &str, expected: impl Into<Value>) -> Result<(), SchemeError> {
        let expected = expected.into();
        match self.fields.get(field) == Some(&expected) {
            true => Ok(()),
            false => Err(self.unsupported(field, &expected.to_string())),
        }
    }

    fn is_empty(&self, field: &str) -> bool {
        match self.fields.get(field) {
            None | Some(Value::Null) => true,
            Some(value) => value.as_object().is_some_and(Map::is_empty),
        }
    }

    fn require_empty(&self, field: &str) -> Result<(), SchemeError> {
        match self.is_empty(field) {
            true => Ok(()),
            false => Err(self.unsupported(field, "nothing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(quantization: Value) -> Result<Option<QuantizationScheme>, String> {
        let Value::Object(config) = json!({ "quantization_config": quantization }) else {
            unreachable!()
        };
        QuantizationScheme::from_config(&config).map_err(|error| error.to_string())
    }

    fn schemes() -> impl Iterator<Item = QuantizationScheme> {
        let formats = [CheckpointFormat::CompressedTensors, CheckpointFormat::ModelOpt];
        formats
            .into_iter()
            .flat_map(|format| [false, true].map(|w4a4| QuantizationScheme { format, w4a4 }))
    }

    #[test]
    fn what_is_written_is_read() {
        for scheme in schemes() {
            let ignore = vec!["lm_head".to_string()];
            assert_eq!(read(scheme.quantization_config(&ignore)), Ok(Some(scheme.clone())));
            let Some(own_file) = scheme.hf_quant_config(&ignore) else {
                assert_eq!(scheme.format, CheckpointFormat::CompressedTensors);
                continue;
            };
            assert_eq!(own_file["quantization"]["exclude_modules"], json!(["lm_head"]));
            let own_file = own_file.as_object().unwrap();
            assert_eq!(QuantizationScheme::from_hf_quant_config(own_file), Ok(scheme));
        }
        assert_eq!(read(Value::Null), Ok(None));
    }

    #[test]
    fn another_quantization_is_refused_by_its_field() {
        let changed = |scheme: &QuantizationScheme, pointer: &str, value: Value| {
            let mut config = scheme.quantization_config(&[]);
            *config.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
            read(config).unwrap_err()
        };
        let schemes: Vec<_> = schemes().collect();
        let (compressed, modelopt) = (&schemes[1], &schemes[3]);
        let cases = [
            (
                compressed,
                "/quant_method",
                json!("awq"),
                "quantization_config.quant_method: \"awq\" is not supported",
            ),
            (
                compressed,
                "/format",
                json!("pack-quantized"),
                "quantization_config.format",
            ),
            (
                compressed,
                "/kv_cache_scheme",
                json!({"num_bits": 8}),
                "quantization_config.kv_cache_scheme",
            ),
            (
                compressed,
                "/transform_config",
                json!({"R1": {}}),
                "quantization_config.transform_config",
            ),
            (
                compressed,
                "/config_groups/group_0/weights/num_bits",
                json!(8),
                "group_0.weights.num_bits: 8",
            ),
            (
                compressed,
                "/config_groups/group_0/weights/group_size",
                json!(32),
                "group_0.weights.group_size: 32",
            ),
            (
                compressed,
                "/config_groups/group_0/weights",
                json!(1),
                "expected an object, found 1",
            ),
            (compressed, "/config_groups", json!({}), "config_groups: no group"),
            (
                modelopt,
                "/quant_algo",
                json!("NVFP4_AWQ"),
                "quantization_config.quant_algo: \"NVFP4_AWQ\"",
            ),
            (
                modelopt,
                "/quant_algo",
                json!("MIXED_PRECISION"),
                "`NVFP4` or `W4A16_NVFP4`",
            ),
        ];
        for (scheme, pointer, value, expected) in cases {
            let error = changed(scheme, pointer, value);
            assert!(error.contains(expected), "{pointer}: {error}");
        }
        assert!(read(json!([])).unwrap_err().contains("expected an object"));
    }

    #[test]
    fn an_embedding_is_ignored_by_modelopt_alone() {
        for scheme in schemes() {
            let ignored = scheme.ignored(["lm_head", "model.embed_tokens"].map(String::from));
            let expected = 1 + usize::from(scheme.format == CheckpointFormat::ModelOpt);
            assert_eq!(ignored.len(), expected);
        }
    }
}
