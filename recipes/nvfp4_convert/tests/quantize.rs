//! `quantize`: the tools' files byte for byte, in shards and from fused experts too, interrupted or not.
mod folders;

use burn_nvfp4::{
    checkpoint::Nvfp4Folder,
    safetensors_file::{Dtype, SafetensorsFile, TensorSpec},
};
use folders::{change_json, contents, fixtures, json, quantize, scratch, shard, tiny, write};
use nvfp4_convert::{output_folder::OutputFolder, quantize::Recipe};
use std::{fs, path::Path};

fn tool(name: &str) -> std::path::PathBuf {
    fixtures().join("nvfp4_checkpoints").join(name)
}

#[test]
fn compressed_tensors_file_is_made_byte_for_byte() {
    let base = scratch("compressed_tensors");
    let input = tiny(&base, "model_bf16.safetensors");
    let output = base.join("out");
    quantize(&input, &output, Recipe::CompressedTensors, &[]).unwrap();
    let ours = fs::read(output.join("model.safetensors")).unwrap();
    let theirs = fs::read(tool("compressed_tensors/w4a16/model.safetensors")).unwrap();
    assert!(ours == theirs, "the files differ");

    // And the configuration says the same.
    let [ours, theirs] = [&output, &tool("compressed_tensors/w4a16")].map(|path| json(&path.join("config.json")));
    let (ours, theirs) = (&ours["quantization_config"], &theirs["quantization_config"]);
    let sorted = |value: &serde_json::Value| {
        let mut names: Vec<String> = serde_json::from_value(value["ignore"].clone()).unwrap();
        names.sort();
        names
    };
    assert_eq!(sorted(ours), sorted(theirs));
    for (key, value) in theirs.as_object().unwrap().iter().filter(|(key, _)| *key != "ignore") {
        assert_eq!(&ours[key], value, "{key}");
    }
    let names: Vec<String> = contents(&output).into_keys().collect();
    assert_eq!(names, ["LICENSE", "config.json", "model.safetensors", "tokenizer.json"]);
    assert!(!base.join("out.partial").exists());
}

#[test]
fn modelopt_tensors_are_made_byte_for_byte() {
    let base = scratch("modelopt");
    let input = tiny(&base, "model_bf16.safetensors");
    let output = base.join("out");
    quantize(&input, &output, Recipe::Modelopt, &[]).unwrap();
    let [ours, theirs] =
        [&output, &tool("modelopt/w4a4")].map(|path| SafetensorsFile::open(&path.join("model.safetensors")).unwrap());
    // Theirs has the scales of activations too.
    let weights = theirs
        .tensors()
        .filter(|tensor| !tensor.name().ends_with(".input_scale"));
    for (ours, theirs) in ours.tensors().zip(weights) {
        assert_eq!(
            (ours.name(), ours.dtype(), ours.shape()),
            (theirs.name(), theirs.dtype(), theirs.shape())
        );
        assert!(ours.bytes == theirs.bytes, "{}", ours.name());
    }
    assert_eq!(ours.tensors().len() + 56, theirs.tensors().len());

    let own = json(&output.join("hf_quant_config.json"));
    let theirs = json(&tool("modelopt/w4a4/hf_quant_config.json"));
    assert_eq!(own["quantization"]["quant_algo"], "W4A16_NVFP4");
    for key in ["exclude_modules", "group_size", "kv_cache_quant_algo"] {
        assert_eq!(own["quantization"][key], theirs["quantization"][key], "{key}");
    }
    let config = json(&output.join("config.json"));
    assert_eq!(
        config["quantization_config"]["ignore"],
        own["quantization"]["exclude_modules"]
    );
    assert_eq!(config["hidden_size"], 64);
}

#[test]
fn shards_and_fused_experts_give_the_same_weights() {
    let base = scratch("shards");
    let input = tiny(&base, "model_bf16.safetensors");
    quantize(&input, &base.join("whole"), Recipe::Te, &[]).unwrap();
    let whole = Nvfp4Folder::open(&base.join("whole")).unwrap().unwrap();

    // q, k and v of a layer, and gate and up of an expert, lie in different files.
    shard(&input, 3);
    quantize(&input, &base.join("sharded"), Recipe::Te, &[]).unwrap();
    let fused_base = scratch("fused");
    let fused = tiny(&fused_base, "model_fused_bf16.safetensors");
    quantize(&fused, &base.join("from_fused"), Recipe::Te, &[]).unwrap();
    for name in ["sharded", "from_fused"] {
        let folder = Nvfp4Folder::open(&base.join(name)).unwrap().unwrap();
        assert!(folder.modules().eq(whole.modules()), "{name}");
        for tensor in whole.files().tensors() {
            let other = folder.files().tensor(tensor.name()).unwrap();
            assert!(
                other.bytes == tensor.bytes && other.shape() == tensor.shape(),
                "{name}: {}",
                tensor.name()
            );
        }
    }
    let index = json(&base.join("sharded/model.safetensors.index.json"));
    let bytes: usize = whole.files().tensors().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], bytes);
    assert_eq!(
        index["weight_map"].as_object().unwrap().len(),
        whole.files().tensors().len()
    );
}

#[test]
fn an_interrupted_run_goes_on_with_the_first_missing_file() {
    let base = scratch("resume");
    let input = tiny(&base, "model_bf16.safetensors");
    shard(&input, 3);
    quantize(&input, &base.join("whole"), Recipe::Te, &[]).unwrap();
    let output = base.join("out");
    let started = OutputFolder::start(&output, &input, serde_json::json!("quantize")).unwrap();
    let first = "model-00001-of-00003.safetensors";
    fs::copy(base.join("whole").join(first), started.file(first)).unwrap();
    let written = fs::metadata(started.file(first)).unwrap().modified().unwrap();
    // What a process leaves that was killed while it wrote.
    fs::write(started.file("model-00002-of-00003.safetensors.partial"), "half").unwrap();
    drop(started);
    let converted = quantize(&input, &output, Recipe::Te, &[]).unwrap();
    assert_eq!((converted.shards, converted.resumed), (3, 1));
    assert_eq!(fs::metadata(output.join(first)).unwrap().modified().unwrap(), written);
    assert!(contents(&output) == contents(&base.join("whole")));
}

#[test]
fn a_shard_that_an_earlier_run_left_damaged_is_made_again() {
    let base = scratch("damaged_shard");
    let input = tiny(&base, "model_bf16.safetensors");
    shard(&input, 3);
    quantize(&input, &base.join("whole"), Recipe::Te, &[]).unwrap();
    let output = base.join("out");
    let started = OutputFolder::start(&output, &input, serde_json::json!("quantize")).unwrap();
    let [first, second] = [1, 2].map(|i| format!("model-{i:05}-of-00003.safetensors"));
    // Cut short; and another shard's tensors.
    let bytes = fs::read(base.join("whole").join(&first)).unwrap();
    fs::write(started.file(&first), &bytes[..1000]).unwrap();
    fs::write(started.file(&second), &bytes).unwrap();
    drop(started);
    let converted = quantize(&input, &output, Recipe::Te, &[]).unwrap();
    assert_eq!((converted.shards, converted.resumed), (3, 0));
    assert!(contents(&output) == contents(&base.join("whole")));
}

#[test]
fn excluded_modules_stay_dense_and_are_listed() {
    let base = scratch("exclude");
    let input = tiny(&base, "model_bf16.safetensors");
    let output = base.join("out");
    quantize(
        &input,
        &output,
        Recipe::Te,
        &["model.layers.0.self_attn", "model.layers.1.self_attn.o_proj"],
    )
    .unwrap();
    let folder = Nvfp4Folder::open(&output).unwrap().unwrap();
    assert_eq!(folder.modules().len(), 56 - 5);
    let q = folder.files().tensor("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!(q.dtype(), Dtype::BF16);
    let ignore = &json(&output.join("config.json"))["quantization_config"]["ignore"];
    for module in [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.o_proj",
        "lm_head",
    ] {
        assert!(ignore.as_array().unwrap().iter().any(|name| name == module), "{module}");
    }
    let refused = |path: &str| {
        quantize(&input, &base.join("other"), Recipe::Te, &[path])
            .unwrap_err()
            .to_string()
    };
    assert!(refused("model.layers.0.self_attn.q_proj").contains("q_proj, model.layers.0.self_attn.k_proj"));
    let expected = "the experts of model.layers.1.mlp.experts stay dense together";
    assert!(refused("model.layers.1.mlp.experts.3").contains(expected));
    assert!(refused("model.layers.0.self").contains("no such module"));
    assert!(refused("lm_head").contains("no such module"));
    assert!(!base.join("other.partial").exists());
}

/// Replaces the values of a tensor, or its shape.
fn change_tensor(folder: &Path, name: &str, change: impl Fn(&mut TensorSpec, &mut Vec<u8>)) {
    let path = folder.join("model.safetensors");
    let copy = folder.join("changed.safetensors");
    let file = SafetensorsFile::open(&path).unwrap();
    let changed: Vec<_> = file
        .tensors()
        .map(|tensor| {
            let (name_, dtype, shape) = (tensor.name().into(), tensor.dtype(), tensor.shape().into());
            let mut spec = TensorSpec {
                name: name_,
                dtype,
                shape,
            };
            let mut bytes = tensor.bytes.to_vec();
            if tensor.name() == name {
                change(&mut spec, &mut bytes);
            }
            (spec, bytes)
        })
        .collect();
    let specs = changed.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer = burn_nvfp4::safetensors_file::SafetensorsWriter::create(&copy, specs, Default::default()).unwrap();
    for (spec, bytes) in &changed {
        writer.write(&spec.name, bytes).unwrap();
    }
    writer.finish().unwrap();
    fs::rename(copy, path).unwrap();
}

#[test]
fn weights_that_cannot_be_packed_are_refused_by_file_and_tensor() {
    let base = scratch("refused");
    let input = tiny(&base, "model_bf16.safetensors");
    let output = base.join("out");
    let name = "model.layers.0.self_attn.k_proj.weight";
    change_tensor(&input, name, |_, bytes| {
        bytes[10..12].copy_from_slice(&0x7fc0u16.to_le_bytes())
    });
    let error = format!("{:#}", quantize(&input, &output, Recipe::Te, &[]).unwrap_err());
    assert!(
        error.contains(&format!("model.safetensors: {name}: a value is NaN or infinite")),
        "{error}"
    );
    assert!(!output.exists());

    let base = scratch("unaligned");
    let input = tiny(&base, "model_bf16.safetensors");
    change_tensor(&input, name, |spec, bytes| {
        spec.shape = vec![32, 24];
        bytes.truncate(32 * 24 * 2);
    });
    let error = format!(
        "{:#}",
        quantize(&input, &base.join("out"), Recipe::Te, &[]).unwrap_err()
    );
    assert!(
        error.contains("d_in = 24 is not a multiple of 16") && error.contains("k_proj"),
        "{error}"
    );
    assert!(!base.join("out.partial").exists());
}

#[test]
fn a_model_without_layers_to_quantize_is_refused() {
    let base = scratch("nothing");
    let input = tiny(&base, "model_bf16.safetensors");
    let file = SafetensorsFile::open(&input.join("model.safetensors")).unwrap();
    let norms: Vec<_> = file.tensors().filter(|tensor| tensor.name().contains("norm")).collect();
    write(&base.join("norms.safetensors"), &norms);
    fs::rename(base.join("norms.safetensors"), input.join("model.safetensors")).unwrap();
    let error = quantize(&input, &base.join("out"), Recipe::Te, &[])
        .unwrap_err()
        .to_string();
    assert!(error.contains("no layer to quantize"), "{error}");

    change_json(&input.join("config.json"), |config| {
        config["quantization_config"] = serde_json::json!({"quant_method": "gptq"});
    });
    let error = quantize(&input, &base.join("out"), Recipe::Te, &[])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("config.json: quantization_config.quant_method: \"gptq\" is not supported"),
        "{error}"
    );
}

#[test]
fn a_quantized_model_is_not_quantized_again() {
    let base = scratch("again");
    let error = quantize(&tool("modelopt/w4a4"), &base.join("out"), Recipe::Te, &[])
        .unwrap_err()
        .to_string();
    assert!(error.contains("quantized already (modelopt)"), "{error}");
}
