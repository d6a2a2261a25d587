//! Folders of packed models, in and out: files of llm-compressor and ModelOpt give their references' logits, and a model
//! packed here goes to their formats and back as it is.
use burn::{
    backend::Flex,
    module::{Module, ModuleVisitor, Param},
    tensor::{Int, Tensor, TensorData},
};
use burn_nvfp4::{
    Nvfp4, Outcome, OuterScaleConvention, Precision, Rac,
    checkpoint::{CheckpointFormat, Nvfp4Folder},
    packed_weight,
    safetensors_file::{Dtype, SafetensorsFile, SafetensorsWriter, TensorSpec},
};
use burn_quads::{
    checkpoint::{FolderFormat, ModelFolder, PackedFormat, save_packed_folder},
    modules::moe::QuadsMoe,
    sync::pack_model,
};
use kernels_cubecl::OuterScale;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

type B = Nvfp4<Flex>;

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

fn packed(name: &str) -> PathBuf {
    fixtures().join("nvfp4_checkpoints").join(name)
}

fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join("nvfp4_folders")
        .join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    path
}

fn load(folder: &Path, precision: &Precision) -> QuadsMoe<B> {
    let folder = ModelFolder::open(folder).unwrap();
    folder
        .load_packed(precision, None, &Default::default(), |_| {})
        .unwrap()
        .0
}

fn refused(folder: &Path, precision: &Precision) -> String {
    let folder = ModelFolder::open(folder).unwrap();
    let loaded = folder.load_packed::<Flex>(precision, None, &Default::default(), |_| {});
    loaded.map(|_| ()).unwrap_err().to_string()
}

/// Logits of the reference's rows.
fn logits(model: &QuadsMoe<B>, reference: &SafetensorsFile) -> Vec<f32> {
    let ids = reference.tensor("input_ids").unwrap();
    let [rows, seq] = *ids.shape() else { panic!() };
    let values: Vec<i32> = ids
        .bytes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| i32::from_le_bytes(*bytes))
        .collect();
    let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(values, [rows, seq]), &Default::default());
    model.forward(tokens).into_data().to_vec().unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// What a packed parameter consists of.
struct Stored {
    codes: Vec<u8>,
    block_scales: Vec<u8>,
    outer_scales: Vec<f32>,
    convention: OuterScaleConvention,
}

/// Every packed parameter, in the model's order.
fn stored(model: &QuadsMoe<B>) -> Vec<Stored> {
    struct Packed(Vec<Stored>);
    impl ModuleVisitor<B> for Packed {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(weight) = packed_weight(&param.val()) {
                self.0.push(Stored {
                    codes: weight.codes(),
                    block_scales: weight.block_scales(),
                    outer_scales: weight.outer_scales(),
                    convention: weight.storage().convention,
                });
            }
        }
    }
    let mut packed = Packed(vec![]);
    model.visit(&mut packed);
    packed.0
}

#[test]
fn logits_of_the_tools_files_are_their_references() {
    for name in ["compressed_tensors/w4a16", "compressed_tensors/w4a4", "modelopt/w4a4"] {
        let reference = SafetensorsFile::open(&packed(name).join("reference.safetensors")).unwrap();
        let model = load(&packed(name), &Precision::W4A16);
        let expected = reference.tensor("weight_only.logits").unwrap().to_f32().unwrap();
        let difference = largest_difference(&logits(&model, &reference), &expected);
        assert!(difference <= 1e-4, "{name}: {difference}");
        println!("{name}: largest difference of a logit {difference:.1e}");
        if let Some(fake_quantized) = reference.tensor("tool_fakequant.logits") {
            // In BF16, and by a scale for the whole tensor: informative.
            let values = fake_quantized.to_f32().unwrap();
            println!(
                "{name}: {:.2} from the tool's own forward pass",
                largest_difference(&expected, &values)
            );
        }
    }
}

#[test]
fn a_loaded_model_says_what_is_packed_and_is_as_small_as_its_file() {
    let folder = ModelFolder::open(packed("modelopt/w4a4")).unwrap();
    let mut parameters = 0;
    let mut last = 0;
    let (model, audit) = folder
        .load_packed::<Flex>(&Precision::W4A4, None, &Default::default(), |progress| {
            parameters += 1;
            assert!(progress.bytes > last && progress.bytes <= progress.total_bytes);
            last = progress.bytes;
        })
        .unwrap();
    assert_eq!(model.precision(), &Precision::W4A4);
    // Per layer q, k, v, o, and two stacks of experts.
    assert_eq!(audit.packed(), 2 * 6);
    assert_eq!(
        audit.layer("layers.1.mlp.experts.down_proj").unwrap().outcome,
        Outcome::Packed(Precision::W4A4)
    );
    let dense = |path: &str| matches!(audit.layer(path).unwrap().outcome, Outcome::Left(_));
    assert!(dense("lm_head") && dense("embed_tokens.weight") && dense("layers.0.mlp.gate.weight"));
    assert_eq!(parameters, audit.layers.len());
    // 4.5 bits a weight, and an outer scale for each weight or expert.
    let packed: usize = audit
        .layers
        .iter()
        .filter(|layer| !dense(&layer.path))
        .map(|layer| layer.bytes_after)
        .sum();
    assert_eq!(packed, 61_440 + 7_680 + 4 * 2 * (4 + 8 + 8));
}

#[test]
fn rollout_precisions_run_on_packed_files() {
    let reference = SafetensorsFile::open(&packed("modelopt/w4a4").join("reference.safetensors")).unwrap();
    let weight_only = logits(&load(&packed("modelopt/w4a4"), &Precision::W4A16), &reference);
    let difference = |precision| {
        let model = load(&packed("modelopt/w4a4"), &precision);
        let logits = logits(&model, &reference);
        let differences = logits.iter().zip(&weight_only).map(|(a, b)| (a - b).abs());
        differences.sum::<f32>() / weight_only.len() as f32
    };
    let (w4a4, compensated) = (
        difference(Precision::W4A4),
        difference(Precision::W4A4Rac(Rac::default())),
    );
    // On the mean: a token that goes to another expert has another logit by far.
    assert!(0.0 < compensated && compensated < 0.5 * w4a4, "{compensated}, {w4a4}");
}

#[test]
fn a_model_packed_here_goes_out_and_comes_back_as_it_is() {
    let original = ModelFolder::open(fixtures().join("qwen3moe_tiny")).unwrap();
    let dense = original.load::<B>(&Default::default(), |_| {}).unwrap();
    let (model, _) = pack_model(dense, &Precision::W4A16, None).unwrap();
    let reference = SafetensorsFile::open(&packed("modelopt/w4a4").join("reference.safetensors")).unwrap();
    let expected = logits(&model, &reference);
    for format in [CheckpointFormat::ModelOpt, CheckpointFormat::CompressedTensors] {
        let path = scratch(&format!("export_{format}"));
        let like = FolderFormat::like(&original).with_shard_bytes(100_000);
        save_packed_folder(&model, &path, &like, &PackedFormat::new(format)).unwrap();
        let read = load(&path, &Precision::W4A16);
        let (ours, theirs) = (stored(&model), stored(&read));
        assert_eq!((ours.len(), theirs.len()), (12, 12));
        for (ours, read) in ours.into_iter().zip(theirs) {
            assert!(
                ours.codes == read.codes && ours.block_scales == read.block_scales,
                "{format}"
            );
            assert_eq!(read.convention, format.convention());
            let scales: Vec<f32> = match format.convention() {
                OuterScaleConvention::Multiply => ours.outer_scales,
                OuterScaleConvention::Divide => ours.outer_scales.iter().map(|scale| 1.0 / scale).collect(),
            };
            assert_eq!(read.outer_scales, scales, "{format}");
        }
        let read = logits(&read, &reference);
        match format.convention() {
            OuterScaleConvention::Multiply => assert_eq!(read, expected),
            OuterScaleConvention::Divide => assert!(largest_difference(&read, &expected) < 1e-4),
        }
        assert!(path.join("model.safetensors.index.json").exists(), "several shards");
        let config: serde_json::Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        let ignored: Vec<String> = serde_json::from_value(config["quantization_config"]["ignore"].clone()).unwrap();
        assert!(ignored.contains(&"lm_head".to_string()) && ignored.contains(&"model.layers.1.mlp.gate".to_string()));
        assert_eq!(
            path.join("hf_quant_config.json").exists(),
            format == CheckpointFormat::ModelOpt
        );

        // And once more from there, with other types of the dense rest.
        let again = scratch(&format!("again_{format}"));
        let like = FolderFormat::like(&ModelFolder::open(&path).unwrap()).with_dtype(Dtype::BF16);
        let model = load(&path, &Precision::W4A4);
        save_packed_folder(&model, &again, &like, &PackedFormat::new(CheckpointFormat::ModelOpt)).unwrap();
        let again = Nvfp4Folder::open(&again).unwrap().unwrap();
        assert_eq!(again.scheme().format, CheckpointFormat::ModelOpt);
        assert_eq!(again.files().tensor("lm_head.weight").unwrap().dtype(), Dtype::BF16);
    }
}

#[test]
fn activation_scales_make_a_w4a4_folder() {
    let model = load(&packed("compressed_tensors/w4a4"), &Precision::W4A16);
    let theirs = Nvfp4Folder::open(&packed("compressed_tensors/w4a4")).unwrap().unwrap();
    let mut input_scales: BTreeMap<String, OuterScale> = theirs
        .modules()
        .map(|module| {
            (
                module.to_string(),
                theirs.layer(module).unwrap().unwrap().input_scale.unwrap(),
            )
        })
        .collect();
    let like = FolderFormat::like(&ModelFolder::open(packed("compressed_tensors/w4a4")).unwrap());
    let path = scratch("w4a4");
    let format = PackedFormat {
        checkpoint: CheckpointFormat::CompressedTensors,
        input_scales: Some(input_scales.clone()),
    };
    save_packed_folder(&model, &path, &like, &format).unwrap();
    // Every byte is theirs: nothing was lost on the way through the model.
    let [ours, theirs] =
        [&path, &packed("compressed_tensors/w4a4")].map(|path| fs::read(path.join("model.safetensors")).unwrap());
    assert!(ours == theirs);

    input_scales.remove("model.layers.1.mlp.experts.5.up_proj");
    let format = PackedFormat {
        input_scales: Some(input_scales),
        ..format
    };
    let error = save_packed_folder(&model, &scratch("short"), &like, &format)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "model.layers.1.mlp.experts.5.up_proj: no scale of its activations"
    );
}

#[test]
fn what_is_not_packed_to_nvfp4_is_not_saved_as_such() {
    let original = ModelFolder::open(fixtures().join("qwen3moe_tiny")).unwrap();
    let dense = original.load::<B>(&Default::default(), |_| {}).unwrap();
    let save = |model: &QuadsMoe<B>| {
        let format = PackedFormat::new(CheckpointFormat::ModelOpt);
        let path = scratch("refused");
        let error = save_packed_folder(model, &path, &FolderFormat::like(&original), &format).unwrap_err();
        assert!(!path.exists());
        error.to_string()
    };
    assert!(save(&dense).starts_with("no weight is packed"));
    let (fp8, _) = pack_model(dense, &Precision::Fp8, None).unwrap();
    assert!(save(&fp8).contains("q_proj.weight is packed to fp8"));
}

/// A folder with the file of a tool, changed.
fn changed(name: &str, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
    let path = scratch(name);
    fs::create_dir_all(&path).unwrap();
    let from = packed("compressed_tensors/w4a16");
    fs::copy(from.join("config.json"), path.join("config.json")).unwrap();
    let mut bytes = fs::read(from.join("model.safetensors")).unwrap();
    change(&mut bytes);
    fs::write(path.join("model.safetensors"), bytes).unwrap();
    path
}

#[test]
fn folders_that_do_not_fit_are_refused() {
    // In the header, where names end on a quote.
    let rename = |from: &'static str, to: &'static str| {
        move |bytes: &mut Vec<u8>| {
            assert_eq!(from.len(), to.len());
            let at = bytes
                .windows(from.len())
                .position(|window| window == from.as_bytes())
                .unwrap();
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
    };
    let path = changed("missing", rename("model.norm.weight\"", "model.nurm.weight\""));
    let error = refused(&path, &Precision::W4A16);
    assert!(error.contains("missing: model.norm.weight [64]"), "{error}");
    assert!(error.contains("unexpected: model.nurm.weight [64]"), "{error}");

    // Half a layer.
    let path = changed("half", |bytes| {
        rename("1.self_attn.k_proj.weight_packed", "1.self_attn.k_proz.weight_packed")(bytes);
    });
    let error = refused(&path, &Precision::W4A16);
    assert!(
        error.contains("k_proj.weight_scale") || error.contains("k_proz.weight_scale"),
        "{error}"
    );

    assert!(refused(&packed("compressed_tensors/w4a16"), &Precision::Fp8).contains("already packed as nvfp4"));
    assert!(refused(&packed("compressed_tensors/w4a16"), &Precision::High).contains("nothing to pack"));
    assert!(refused(&fixtures().join("qwen3moe_tiny"), &Precision::W4A16).contains("the weights are not packed"));
    let folder = ModelFolder::open(packed("modelopt/w4a4")).unwrap();
    let error = folder.load::<B>(&Default::default(), |_| {}).unwrap_err().to_string();
    assert!(error.contains("load them with `load_packed`"), "{error}");
}

/// The folder of a tool with these modules dense.
fn with_dense(name: &str, modules: &[&str]) -> PathBuf {
    let path = scratch(name);
    fs::create_dir_all(&path).unwrap();
    let from = Nvfp4Folder::open(&packed("compressed_tensors/w4a16")).unwrap().unwrap();
    fs::copy(from.path().join("config.json"), path.join("config.json")).unwrap();
    let mut tensors = vec![];
    for tensor in from.files().tensors() {
        let module = from.module_of(tensor.name()).filter(|module| modules.contains(module));
        let spec = |name: String, dtype, shape: &[usize]| TensorSpec {
            name,
            dtype,
            shape: shape.to_vec(),
        };
        match module {
            None => tensors.push((
                spec(tensor.name().into(), tensor.dtype(), tensor.shape()),
                tensor.bytes.to_vec(),
            )),
            Some(module) if tensor.dtype() == Dtype::U8 => {
                let layer = from.layer(module).unwrap().unwrap();
                let bytes = layer.dequantize().into_iter().flat_map(f32::to_le_bytes).collect();
                let shape = [layer.weight.rows, layer.weight.k];
                tensors.push((spec(format!("{module}.weight"), Dtype::F32, &shape), bytes));
            }
            Some(_) => {}
        }
    }
    let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer = SafetensorsWriter::create(&path.join("model.safetensors"), specs, BTreeMap::new()).unwrap();
    for (spec, bytes) in &tensors {
        writer.write(&spec.name, bytes).unwrap();
    }
    writer.finish().unwrap();
    path
}

#[test]
fn what_one_weight_or_one_product_serves_is_packed_together_or_not_at_all() {
    let reference = SafetensorsFile::open(&packed("compressed_tensors/w4a16").join("reference.safetensors")).unwrap();
    let expected = reference.tensor("weight_only.logits").unwrap().to_f32().unwrap();
    let qkv = ["q_proj", "k_proj", "v_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
    let qkv: Vec<&str> = qkv.iter().map(String::as_str).collect();
    // Decoded, so the same values.
    let model = load(&with_dense("dense_qkv", &qkv), &Precision::W4A16);
    assert!(largest_difference(&logits(&model, &reference), &expected) <= 1e-4);

    for (modules, problem) in [
        (
            &qkv[..1],
            "mixed: model.layers.0.self_attn.k_proj is packed and model.layers.0.self_attn.q_proj is not",
        ),
        (
            &["model.layers.1.mlp.experts.3.up_proj"],
            "mixed: model.layers.1.mlp.experts.0.gate_proj.weight is packed and \
             model.layers.1.mlp.experts.3.up_proj.weight is not, but they are one weight",
        ),
    ] {
        let error = refused(&with_dense("mixed", modules), &Precision::W4A16);
        assert!(error.contains(problem), "{error}");
    }
}
