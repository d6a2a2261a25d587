//! Packed layers of both formats: every input is read as each of them.
use std::{fs, os::unix::fs::symlink, path::Path};

use burn_nvfp4::checkpoint::{CheckpointFormat, Nvfp4Folder, QuantizationScheme};
use serde_json::json;

use crate::{
    harness::{Target, about},
    mutate::Form,
};

const SCHEMES: [(&str, CheckpointFormat, bool); 4] = [
    ("compressed-tensors", CheckpointFormat::CompressedTensors, false),
    ("compressed-tensors-w4a4", CheckpointFormat::CompressedTensors, true),
    ("modelopt", CheckpointFormat::ModelOpt, false),
    ("modelopt-w4a4", CheckpointFormat::ModelOpt, true),
];

const TARGET: Target = Target {
    form: Form::Safetensors,
    dictionary: &[
        "m.weight_packed",
        "m.weight",
        "m.weight_scale",
        "m.weight_scale_2",
        "m.weight_global_scale",
        "m.input_scale",
        "m.input_global_scale",
        "m.weight_shape",
        ".",
        "dtype",
        "shape",
        "data_offsets",
        "U8",
        "F8_E4M3",
        "F32",
        "BF16",
        "[",
        "{",
    ],
    accepted: &[
        "block_scale_zero",
        "modelopt_weight_only",
        "modelopt_with_input_scale",
        "outer_scale_largest",
        "weight_only",
        "with_input_scale",
    ],
    prepare,
    file: |_| "model.safetensors",
    ..Target::new("nvfp4_weights", read)
};

#[test]
fn no_packed_layer_breaks_decoding() {
    TARGET.run();
}

fn prepare(folder: &Path) {
    for (name, format, w4a4) in SCHEMES {
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        let scheme = QuantizationScheme { format, w4a4 };
        let config = json!({"quantization_config": scheme.quantization_config(&[])});
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        symlink("../model.safetensors", folder.join("model.safetensors")).unwrap();
    }
}

/// All formats have to hold; accepted where the one accepts it that the names are of.
fn read(folder: &Path, input: &[u8]) -> Result<(), String> {
    let results = SCHEMES.map(|(name, ..)| decode(&folder.join(name), input.len()));
    let text = String::from_utf8_lossy(input);
    let scheme = 2 * usize::from(text.contains("weight_scale_2")) + usize::from(text.contains("input_"));
    results[scheme].clone()
}

fn decode(folder: &Path, bytes: usize) -> Result<(), String> {
    let opened = Nvfp4Folder::open(folder).map_err(|error| about(folder, error))?;
    let opened = opened.expect("the configuration says that it is quantized");
    let mut decoded = Err("no packed layer".to_string());
    for module in opened.modules() {
        let layer = opened.layer(module).map_err(|error| about(folder, error))?;
        let layer = layer.expect("a packed module");
        assert!(layer.bytes() < bytes, "{} of {bytes}", layer.bytes());
        let values = layer.dequantize();
        assert_eq!(values.len(), 2 * layer.weight.codes.len());
        assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
        decoded = Ok(());
    }
    decoded
}
