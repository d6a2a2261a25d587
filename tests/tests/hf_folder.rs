//! Folders of the Hub: what is saved is what was loaded, and whatever is wrong with one is said before anything is made.
use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::{
    backend::Flex,
    module::{Module, Param},
    tensor::Tensor,
};
use burn_nvfp4::{
    Nvfp4, Precision,
    safetensors_file::{Dtype, INDEX_FILE, SafetensorsFile, SafetensorsFolder, SafetensorsWriter, TensorSpec},
};
use burn_quads::{
    QuadsMoeConfig,
    checkpoint::{FolderFormat, ModelFolder, save_folder},
    modules::{attention::QkNorm, moe::QuadsMoe},
    sync::pack_model,
};
use proptest::prelude::*;
use serde_json::{Value, json};

type B = Nvfp4<Flex>;

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

fn temporary(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hf_folder").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// A folder with copies of files, to be damaged.
fn copied(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let folder = temporary(name);
    for (from, to) in files {
        fs::copy(fixtures().join(from), folder.join(to)).unwrap();
    }
    folder
}

/// All checkpoints: name, folder, and the fixture that has its references.
fn checkpoints(test: &str) -> Vec<(String, PathBuf, PathBuf)> {
    let mut folders = vec![];
    for fixture in ["qwen3moe_tiny", "olmoe_tiny"] {
        for (config, weights) in [
            ("config.json", "model.safetensors"),
            ("config_v4.json", "model_bf16.safetensors"),
            ("config.json", "model_fused_bf16.safetensors"),
        ] {
            let name = format!("{fixture}-{}", weights.trim_end_matches(".safetensors"));
            let files = [
                (format!("{fixture}/{config}"), "config.json"),
                (format!("{fixture}/{weights}"), "model.safetensors"),
            ];
            let files = files.each_ref().map(|(from, to)| (from.as_str(), *to));
            let folder = copied(&format!("{test}/{name}"), &files);
            folders.push((name, folder, fixtures().join(fixture)));
        }
    }
    for variant in ["qwen3moe_variant", "qwen3moe_sparse_step", "olmoe_clip"] {
        let folder = fixtures().join("hf_variants").join(variant);
        folders.push((variant.into(), folder.clone(), folder));
    }
    folders
}

fn open(folder: &Path) -> ModelFolder {
    ModelFolder::open(folder).unwrap_or_else(|error| panic!("{error}"))
}

fn load(folder: &Path) -> QuadsMoe<B> {
    open(folder)
        .load(&Default::default(), |_| {})
        .unwrap_or_else(|error| panic!("{error}"))
}

/// The bytes of each file of a folder.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            (
                path.file_name().unwrap().to_str().unwrap().to_string(),
                fs::read(&path).unwrap(),
            )
        })
        .collect();
    files.sort();
    files
}

#[test]
fn what_is_loaded_is_saved_byte_for_byte() {
    for (name, source, _) in checkpoints("stable/source") {
        let (first, second) = (
            temporary(&format!("stable/1/{name}")),
            temporary(&format!("stable/2/{name}")),
        );
        let folder = open(&source);
        save_folder(&load(&source), &first, &FolderFormat::like(&folder)).unwrap();
        save_folder(&load(&first), &second, &FolderFormat::like(&open(&first))).unwrap();
        assert!(contents(&first) == contents(&second), "{name}");

        let read = |folder: &Path, file: &str| fs::read(folder.join(file)).unwrap();
        assert!(read(&first, "config.json") == read(&source, "config.json"), "{name}");
        if folder.files().files().len() == 1 {
            // The very file that transformers wrote.
            let same = read(&first, "model.safetensors") == read(&source, "model.safetensors");
            assert!(same, "{name}: model.safetensors");
        }
        let saved = SafetensorsFolder::open(&first).unwrap();
        assert_eq!(saved.tensors().len(), folder.files().tensors().len(), "{name}");
        for tensor in folder.files().tensors() {
            let saved = saved.tensor(tensor.name()).unwrap();
            assert_eq!(
                (saved.dtype(), saved.shape()),
                (tensor.dtype(), tensor.shape()),
                "{name}"
            );
            assert!(saved.bytes == tensor.bytes, "{name}: {}", tensor.name());
        }
        let generation = "generation_config.json";
        if source.join(generation).exists() {
            assert!(read(&first, generation) == read(&source, generation), "{name}");
        }
    }
}

#[test]
fn another_type_changes_the_weights_and_one_word_of_the_configuration() {
    let source = copied(
        "dtype/source",
        &[
            ("qwen3moe_tiny/config.json", "config.json"),
            ("qwen3moe_tiny/model.safetensors", "model.safetensors"),
        ],
    );
    let out = temporary("dtype/out");
    let format = FolderFormat::like(&open(&source)).with_dtype(Dtype::BF16);
    save_folder(&load(&source), &out, &format).unwrap();
    let expected = fs::read(fixtures().join("qwen3moe_tiny/model_bf16.safetensors")).unwrap();
    assert!(fs::read(out.join("model.safetensors")).unwrap() == expected);
    let config =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
    let mut changed = config(&source);
    changed["dtype"] = json!("bfloat16");
    assert_eq!(config(&out), changed);
    assert_eq!(open(&out).dtype(), Some(Dtype::BF16));
}

#[test]
fn large_models_are_saved_in_shards() {
    let source = copied(
        "shards/source",
        &[
            ("olmoe_tiny/config.json", "config.json"),
            ("olmoe_tiny/model.safetensors", "model.safetensors"),
        ],
    );
    let out = temporary("shards/out");
    let limit = 100_000;
    save_folder(
        &load(&source),
        &out,
        &FolderFormat::like(&open(&source)).with_shard_bytes(limit),
    )
    .unwrap();
    let names: Vec<_> = contents(&out).into_iter().map(|(name, _)| name).collect();
    let shards = names.iter().filter(|name| name.ends_with(".safetensors")).count();
    assert!(
        shards > 5 && names.contains(&format!("model-00002-of-{shards:05}.safetensors")),
        "{names:?}"
    );
    for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
        let bytes: usize = SafetensorsFile::open(&out.join(name))
            .unwrap()
            .tensors()
            .map(|t| t.bytes.len())
            .sum();
        assert!(bytes as u64 <= limit, "{name}: {bytes}");
    }
    let index: Value = serde_json::from_slice(&fs::read(out.join(INDEX_FILE)).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 4 * 149056);
    let (loaded, original) = (open(&out), open(&source));
    assert_eq!(loaded.files().tensors().len(), original.files().tensors().len());
    for tensor in original.files().tensors() {
        assert!(loaded.files().tensor(tensor.name()).unwrap().bytes == tensor.bytes);
    }
}

/// Models made here, of both architectures with all that they can have.
fn own_models() -> [(&'static str, QuadsMoeConfig); 3] {
    let tiny = QuadsMoeConfig::new(32, 64, 3, 4, 2, 32, 4, 2, 48).with_precision(Precision::High);
    let dense = tiny
        .clone()
        .with_mlp_only_layers(vec![2])
        .with_intermediate_size(Some(80));
    let olmoe = QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 48).with_precision(Precision::High);
    [
        ("own-qwen3moe", tiny),
        (
            "own-qwen3moe-dense-tied",
            dense.with_tie_word_embeddings(true).with_attention_bias(true),
        ),
        (
            "own-olmoe",
            olmoe.with_qk_norm(QkNorm::Projection).with_clip_qkv(Some(0.5)),
        ),
    ]
}

/// Folders for `tests/interop/check_transformers.py`, each with what it must compute.
#[test]
fn folders_for_transformers_are_written() {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hf_interop");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    for (name, source, reference) in checkpoints("interop") {
        let out = root.join(&name);
        save_folder(&load(&source), &out, &FolderFormat::like(&open(&source))).unwrap();
        fs::copy(
            reference.join("reference.safetensors"),
            out.join("expected.safetensors"),
        )
        .unwrap();
    }
    let floats =
        |tensor: Tensor<B, 3>| -> Vec<u8> { tensor.into_data().iter::<f32>().flat_map(f32::to_le_bytes).collect() };
    for (name, config) in own_models() {
        let model = config.init_seeded::<B>(3, &Default::default());
        let out = root.join(name);
        save_folder(
            &model,
            &out,
            &FolderFormat::new(&config, Dtype::F32).with_shard_bytes(50_000),
        )
        .unwrap();
        let ids: Vec<i32> = (0..2 * 9).map(|i| (i * 7 + 3) % 32).collect();
        let logits = model.forward(Tensor::from_data(
            burn::tensor::TensorData::new(ids.clone(), [2, 9]),
            &Default::default(),
        ));
        let spec = |name: &str, dtype, shape: &[usize]| TensorSpec {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        };
        let specs = vec![
            spec("input_ids", Dtype::I32, &[2, 9]),
            spec("logits", Dtype::F32, &[2, 9, 32]),
        ];
        let mut writer =
            SafetensorsWriter::create(&out.join("expected.safetensors"), specs, Default::default()).unwrap();
        writer
            .write(
                "input_ids",
                &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>(),
            )
            .unwrap();
        writer.write("logits", &floats(logits)).unwrap();
        writer.finish().unwrap();
    }
}

#[test]
fn a_model_made_here_comes_back_from_its_folder() {
    for (name, config) in own_models() {
        let out = temporary("own").join(name);
        let model = config.init_seeded::<B>(3, &Default::default());
        save_folder(&model, &out, &FolderFormat::new(&config, Dtype::F32)).unwrap();
        let loaded = load(&out);
        assert_eq!(loaded.config().to_json(), config.to_json());
        let tokens = || Tensor::from_data([[1, 5, 9, 30]], &Default::default());
        assert_eq!(
            loaded.forward(tokens()).into_data(),
            model.forward(tokens()).into_data(),
            "{name}"
        );
        assert_eq!(loaded.num_params(), model.num_params());
    }
}

#[test]
fn nothing_is_written_over_and_nothing_half_written_is_left() {
    let folder = temporary("refused");
    let config = own_models()[0].1.clone();
    let model = config.init_seeded::<B>(3, &Default::default());
    let format = FolderFormat::new(&config, Dtype::F16);
    let out = folder.join("out");
    let error = |model: &QuadsMoe<B>, out: &Path, format: &FolderFormat| {
        save_folder(model, out, format).unwrap_err().to_string()
    };

    save_folder(&model, &out, &format).unwrap();
    let expected = format!(
        "{}: exists already, and a model is never written over another",
        out.display()
    );
    assert_eq!(error(&model, &out, &format), expected);

    let out = folder.join("other");
    let (packed, _) = pack_model(model.clone(), &Precision::W4A4, None).unwrap();
    assert!(error(&packed, &out, &format).starts_with("layers.0.self_attn.q_proj.weight is QFloat"));

    let other = FolderFormat::new(&config.clone().with_rope_theta(1e4), Dtype::F32);
    assert!(error(&model, &out, &other).starts_with("rope_theta: the model differs from"));

    let mut large = model.clone();
    large.norm.gamma = Param::from_tensor(large.norm.gamma.val() * 1e5);
    assert_eq!(
        error(&large, &out, &format),
        "model.norm.weight: 100000 is beyond the range of F16"
    );
    let names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["out"], "no partial folder is left");

    // An interrupted save is no hindrance.
    fs::create_dir(folder.join("other.partial")).unwrap();
    fs::write(folder.join("other.partial/junk"), "junk").unwrap();
    save_folder(&model, &out, &format).unwrap();
    assert_eq!(contents(&out).len(), 2);
}

/// A small folder, to be damaged.
fn small(name: &str) -> PathBuf {
    let variant = "hf_variants/olmoe_clip";
    let file = |file: &str| format!("{variant}/{file}");
    let files = [
        file("config.json"),
        file("model.safetensors"),
        file("generation_config.json"),
    ];
    copied(
        name,
        &[
            (&files[0], "config.json"),
            (&files[1], "model.safetensors"),
            (&files[2], "generation_config.json"),
        ],
    )
}

fn refused(folder: &Path) -> String {
    let loaded = ModelFolder::open(folder).and_then(|opened| opened.load::<B>(&Default::default(), |_| {}));
    let error = loaded.expect_err("must be refused").to_string();
    assert!(error.starts_with(&folder.display().to_string()), "{error}");
    error
}

fn change_config(folder: &Path, changes: Value) {
    let text = fs::read(fixtures().join("hf_variants/olmoe_clip/config.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        json[field] = value.clone();
    }
    fs::write(folder.join("config.json"), json.to_string()).unwrap();
}

#[test]
fn every_tensor_that_does_not_fit_is_listed_in_one_error() {
    let folder = small("mismatch");
    change_config(
        &folder,
        json!({"intermediate_size": 32, "tie_word_embeddings": true, "attention_bias": false}),
    );
    let error = refused(&folder);
    let lines: Vec<_> = error.lines().collect();
    assert_eq!(lines[0], format!("{} does not fit the model:", folder.display()));
    for expected in [
        "shape: model.layers.1.mlp.experts.gate_up_proj is [4, 32, 32], expected [4, 64, 32]",
        "shape: model.layers.0.mlp.experts.down_proj is [4, 32, 16], expected [4, 32, 32]",
        "values: lm_head.weight differs from model.embed_tokens.weight, though tie_word_embeddings is true",
        "unexpected: model.layers.0.self_attn.q_proj.bias [32]",
        "unexpected: model.layers.1.self_attn.o_proj.bias [32]",
    ] {
        assert!(lines.contains(&expected), "{expected} is not in {error}");
    }
    assert_eq!(lines.len(), 1 + 4 + 1 + 8);

    change_config(&folder, json!({"num_hidden_layers": 3}));
    let error = refused(&folder);
    assert!(
        error.contains("\nmissing: model.layers.2.mlp.experts.0.up_proj.weight [16, 32]\n"),
        "{error}"
    );
    // Two norms, four projections with a bias each, two head norms, the router, four experts of three.
    assert_eq!(error.lines().count(), 1 + 2 + 8 + 2 + 1 + 12);
}

#[test]
fn a_tied_head_may_be_stored_once_more() {
    let source = fixtures().join("hf_variants/qwen3moe_variant");
    let out = temporary("tied").join("out");
    save_folder(&load(&source), &out, &FolderFormat::like(&open(&source))).unwrap();
    let path = out.join("model.safetensors");
    let file = SafetensorsFile::open(&path).unwrap();
    let name = |name: &str| TensorSpec {
        name: name.into(),
        dtype: Dtype::BF16,
        shape: vec![64, 48],
    };
    let mut specs: Vec<_> = file
        .tensors()
        .map(|t| TensorSpec {
            name: t.name().into(),
            dtype: t.dtype(),
            shape: t.shape().to_vec(),
        })
        .collect();
    specs.push(name("lm_head.weight"));
    let with_head = out.join("with_head.safetensors");
    let mut writer = SafetensorsWriter::create(&with_head, specs, Default::default()).unwrap();
    file.tensors().for_each(|t| writer.write(t.name(), t.bytes).unwrap());
    let embedding = file.tensor("model.embed_tokens.weight").unwrap().bytes.to_vec();
    writer.write("lm_head.weight", &embedding).unwrap();
    writer.finish().unwrap();
    fs::rename(with_head, path).unwrap();
    assert_eq!(load(&out).num_params(), 75744);
}

#[test]
fn a_configuration_that_the_files_cannot_hold_allocates_nothing() {
    let folder = small("huge");
    for (changes, expected) in [
        (
            json!({"vocab_size": 1u64 << 40}),
            "config.json: describes a model of 70368744",
        ),
        (
            json!({"num_experts": 1u64 << 62}),
            "config.json: describes a model of more than 2^64 parameters",
        ),
        (
            json!({"num_hidden_layers": 10_000}),
            "config.json: describes a model of ",
        ),
        (
            json!({"num_hidden_layers": 1u64 << 62}),
            "config.json: num_hidden_layers = 4611686018427387904: must be at most 10000",
        ),
        (
            json!({"max_position_embeddings": 1u64 << 40}),
            "config.json: max_position_embeddings = 1099511627776: the table of positions would exceed 1 GiB",
        ),
        (
            json!({"quantization_config": {"quant_method": "modelopt"}}),
            "config.json: quantization_config: the weights are quantized",
        ),
        (json!({"eos_token_id": "two"}), "config.json"),
    ] {
        change_config(&folder, changes.clone());
        if changes.get("eos_token_id").is_some() {
            fs::remove_file(folder.join("generation_config.json")).unwrap();
        }
        let error = refused(&folder);
        assert!(error.contains(expected), "{changes}: {error}");
    }
}

#[test]
fn files_that_are_absent_damaged_or_no_files_are_named() {
    let folder = small("damaged");
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    let config = fs::read(folder.join("config.json")).unwrap();
    let weights = fs::read(folder.join("model.safetensors")).unwrap();

    write("config.json", &config[..config.len() / 2]);
    assert!(refused(&folder).contains("config.json: config.json is not a JSON object: EOF"));
    write("config.json", "[".repeat(500_000).as_bytes());
    assert!(refused(&folder).contains("recursion limit"));
    write("config.json", &vec![b' '; 2 << 20]);
    assert!(refused(&folder).contains("config.json: 2097152 bytes, more than the 1048576 that are accepted here"));
    write("config.json", b"\xFF{}");
    assert!(refused(&folder).contains("config.json: invalid utf-8"));
    fs::remove_file(folder.join("config.json")).unwrap();
    assert!(refused(&folder).contains("config.json: No such file"));
    std::os::unix::fs::symlink(fixtures(), folder.join("config.json")).unwrap();
    assert!(refused(&folder).contains("config.json: is a folder, expected a file"));
    fs::remove_file(folder.join("config.json")).unwrap();
    write("config.json", &config);

    write("generation_config.json", br#"{"eos_token_id": [63, -1]}"#);
    assert!(
        refused(&folder)
            .contains("generation_config.json: eos_token_id = [63,-1]: must be a token id or a list of them")
    );
    write("generation_config.json", br#"{"eos_token_id": 1, "eos_token_id": 2}"#);
    assert!(refused(&folder).contains("generation_config.json: \"eos_token_id\" occurs twice"));
    write("generation_config.json", br#"{"eos_token_id": [63, 64]}"#);
    let said = "generation_config.json: eos_token_id = [63,64]: the model has no token 64, its vocabulary has 64";
    assert!(refused(&folder).contains(said));
    write("generation_config.json", br#"{"eos_token_id": [63, 7]}"#);

    write("model.safetensors", &weights[..weights.len() - 1]);
    assert!(refused(&folder).contains("model.safetensors: "));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    assert!(refused(&folder).contains("holds neither model.safetensors nor model.safetensors.index.json"));
    std::os::unix::fs::symlink("nowhere", folder.join("model.safetensors")).unwrap();
    assert!(refused(&folder).contains("model.safetensors: No such file"));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    write("model.safetensors", &weights);
    assert_eq!(open(&folder).eos_token_ids(), [63, 7]);
    load(&folder);
}

#[test]
fn a_missing_shard_is_named() {
    let variant = fixtures().join("hf_variants/qwen3moe_variant");
    let folder = temporary("shard");
    for (name, bytes) in contents(&variant) {
        fs::write(folder.join(name), bytes).unwrap();
    }
    load(&folder);
    let shard = folder.join("model-00003-of-00005.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..100]).unwrap();
    assert!(refused(&folder).contains("model-00003-of-00005.safetensors: a header of "));
    fs::remove_file(&shard).unwrap();
    assert!(refused(&folder).contains("model-00003-of-00005.safetensors: No such file"));
}

/// Values that have broken readers of configurations.
const VALUES: [&str; 14] = [
    "0",
    "1",
    "-1",
    "2.5",
    "1e300",
    "18446744073709551615",
    "3000000000",
    "null",
    "true",
    "\"x\"",
    "[]",
    "[0,0,0,1]",
    "{}",
    "[[[[]]]]",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_configuration_makes_loading_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(&VALUES[..])), 1..4),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let variants = ["olmoe_clip", "qwen3moe_variant"];
        let variant = fixtures().join("hf_variants").join(variants[changes.len() % 2]);
        let mut json: serde_json::Map<String, Value> = serde_json::from_slice(&fs::read(variant.join("config.json")).unwrap()).unwrap();
        let names: Vec<String> = json.keys().cloned().collect();
        for (index, value) in changes {
            json.insert(names[index.index(names.len())].clone(), serde_json::from_str(value).unwrap());
        }
        let mut text = Value::Object(json).to_string();
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len()));
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hf_folder/any_config");
        fs::create_dir_all(&folder).unwrap();
        for entry in fs::read_dir(&folder).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        for (name, _) in contents(&variant).iter().filter(|(name, _)| name.contains("safetensors")) {
            std::os::unix::fs::symlink(variant.join(name), folder.join(name)).unwrap();
        }
        fs::write(folder.join("config.json"), text).unwrap();
        let loaded = ModelFolder::open(&folder).and_then(|opened| opened.load::<B>(&Default::default(), |_| {}));
        if let Err(error) = loaded {
            prop_assert!(error.to_string().starts_with(&folder.display().to_string()), "{}", error);
        }
    }
}
