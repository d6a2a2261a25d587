//! The model and its checkpoints of one file; `hf_parity` compares it with transformers.
use std::path::PathBuf;

use burn::{
    backend::Flex,
    module::Module,
    prelude::Backend,
    tensor::{Int, Tensor, TensorData},
};
use burn_nvfp4::{Nvfp4, Precision};
use burn_quads::{
    backend::QuadsBackend,
    causal_lm::{RoutingReplay, TokenBatch},
    checkpoint,
    modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig},
};
use safetensors::{Dtype, SafeTensors};

type Inner = Nvfp4<Flex>;

fn fixture(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/qwen3moe_tiny")).join(file)
}

fn config() -> QuadsMoeConfig {
    let text = std::fs::read_to_string(fixture("config.json")).unwrap();
    QuadsMoeConfig::from_json(&text).unwrap()
}

fn model<B: QuadsBackend>() -> QuadsMoe<B> {
    let model = config().init(&Default::default());
    checkpoint::load(model, &fixture("model.safetensors")).unwrap()
}

/// The tensors that transformers computed.
struct Reference(Vec<u8>);

impl Reference {
    fn open() -> Self {
        Self(std::fs::read(fixture("reference.safetensors")).unwrap())
    }

    fn data(&self, name: &str) -> TensorData {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        let shape = tensor.shape().to_vec();
        let words = tensor.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        match tensor.dtype() {
            Dtype::F32 => TensorData::new(words.map(f32::from_le_bytes).collect::<Vec<_>>(), shape),
            Dtype::I32 => TensorData::new(words.map(i32::from_le_bytes).collect::<Vec<_>>(), shape),
            other => panic!("{name} is {other:?}"),
        }
    }

    fn ids<B: Backend, const D: usize>(&self, name: &str) -> Tensor<B, D, Int> {
        Tensor::from_data(self.data(name), &Default::default())
    }
}

#[test]
fn replaying_its_own_routing_changes_no_bit() {
    let reference = Reference::open();
    let model = model::<Inner>();
    let batch = TokenBatch::new(reference.ids("input_ids"));
    let output = model.hidden_states(&batch);
    let replay = RoutingReplay {
        expert_ids: output.expert_ids.clone(),
    };
    let replayed = model.hidden_states(&TokenBatch {
        replay: Some(replay),
        ..batch
    });
    assert_eq!(replayed.hidden.into_data(), output.hidden.into_data());
}

#[test]
fn a_checkpoint_survives_a_round_trip() {
    let model = model::<Inner>();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("round_trip.safetensors");
    checkpoint::save(&model, &path).unwrap();
    let original = std::fs::read(fixture("model.safetensors")).unwrap();
    let written = std::fs::read(&path).unwrap();
    let (original, written) = (
        SafeTensors::deserialize(&original).unwrap(),
        SafeTensors::deserialize(&written).unwrap(),
    );
    assert_eq!(original.len(), written.len());
    for (name, tensor) in original.iter() {
        assert_eq!(written.tensor(name).unwrap(), tensor, "{name}");
    }

    // Into another model of the same shape: its parameters get the values and keep their ids.
    let other = config().init_seeded::<Inner>(1, &Default::default());
    let ids = checkpoint::named_param_ids(&other);
    let loaded = checkpoint::load(other, &path).unwrap();
    assert_eq!(checkpoint::named_param_ids(&loaded), ids);
    assert_eq!(loaded.num_params(), 140672);
}

/// The checkpoint with `change` applied to its tensors, in a file of its own.
fn changed(
    name: &str,
    change: impl Fn(&mut Vec<(String, safetensors::tensor::TensorView<'_>)>),
) -> (PathBuf, Result<QuadsMoe<Inner>, checkpoint::CheckpointError>) {
    let original = std::fs::read(fixture("model.safetensors")).unwrap();
    let mut tensors = SafeTensors::deserialize(&original).unwrap().tensors();
    change(&mut tensors);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    let loaded = checkpoint::load(config().init(&Default::default()), &path);
    (path, loaded)
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_every_tensor_at_fault() {
    static ZEROS: [u8; 256] = [0; 256];
    let (path, loaded) = changed("other.safetensors", |tensors| {
        tensors.retain(|(name, _)| name != "model.layers.1.mlp.experts.5.up_proj.weight");
        for (name, tensor) in tensors.iter_mut() {
            let (dtype, shape) = match name.as_str() {
                "model.norm.weight" => (Dtype::F32, vec![32]),
                "model.layers.0.self_attn.q_norm.weight" => (Dtype::I32, vec![16]),
                _ => continue,
            };
            let bytes = &ZEROS[..4 * shape[0]];
            *tensor = safetensors::tensor::TensorView::new(dtype, shape, bytes).unwrap();
        }
        let bias = safetensors::tensor::TensorView::new(Dtype::F32, vec![64], &ZEROS).unwrap();
        tensors.push(("model.layers.0.self_attn.q_proj.bias".to_string(), bias));
    });
    let expected = [
        "missing: model.layers.1.mlp.experts.5.up_proj.weight [32, 64]",
        "shape: model.norm.weight is [32], expected [64]",
        "type: model.layers.0.self_attn.q_norm.weight is I32, expected F32, BF16 or F16",
        "unexpected: model.layers.0.self_attn.q_proj.bias [64]",
    ];
    let error = loaded.unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{} does not fit the model:", path.display())),
        "{error}"
    );
    for line in expected {
        assert!(error.lines().any(|l| l == line), "{line} is not in {error}");
    }
    assert_eq!(error.lines().count(), 1 + expected.len(), "{error}");
}

#[test]
fn a_damaged_or_absent_file_is_named() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("damaged.safetensors");
    let bytes = std::fs::read(fixture("model.safetensors")).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    for path in [path, PathBuf::from("no/such/file.safetensors")] {
        let loaded = checkpoint::load(config().init::<Inner>(&Default::default()), &path);
        let error = loaded.unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()), "{error}");
    }
}

#[test]
fn a_packed_model_is_not_saved_as_a_checkpoint() {
    let (packed, _) = burn_quads::sync::pack_model(model::<Inner>(), &Precision::W4A4, None).unwrap();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("packed.safetensors");
    let error = checkpoint::save(&packed, &path).unwrap_err().to_string();
    assert!(
        error.starts_with("layers.0.self_attn.q_proj.weight is QFloat"),
        "{error}"
    );
}

#[test]
fn both_spellings_of_config_json_are_read() {
    let v4 = std::fs::read_to_string(fixture("config_v4.json")).unwrap();
    let v4 = QuadsMoeConfig::from_json(&v4).unwrap();
    assert_eq!(v4.to_json(), config().to_json());
    assert_eq!((v4.num_experts, v4.rope_theta), (8, 1e6));
}

#[test]
fn initial_weights_depend_on_the_seed_alone() {
    let weights = |seed| {
        let model = config().init_seeded::<Inner>(seed, &Default::default());
        let experts = model.layers[1].mlp.experts.down_proj.val().into_data();
        (model.embed_tokens.weight.val().into_data(), experts)
    };
    assert_eq!(weights(1), weights(1));
    assert_ne!(weights(1).1, weights(2).1);
    let (embedding, down) = weights(1);
    let spread = |data: &TensorData| {
        let n = data.num_elements() as f64;
        (data.iter::<f64>().map(|x| x * x).sum::<f64>() / n).sqrt()
    };
    assert!((spread(&embedding) - 1.0).abs() < 0.02);
    // Uniform in ±1/√32.
    assert!((spread(&down) * (3.0 * 32.0f64).sqrt() - 1.0).abs() < 0.02);
    assert!(down.iter::<f32>().all(|w| w.abs() <= 1.0 / 32f32.sqrt()));
}
