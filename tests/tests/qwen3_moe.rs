//! `QuadsMoe` against the Qwen3-MoE of Hugging Face transformers, on a tiny checkpoint with reference activations.
use std::path::PathBuf;

use burn::{
    backend::{Autodiff, Flex},
    module::Module,
    prelude::Backend,
    tensor::{
        Int, Tensor, TensorData,
        activation::{log_softmax, softmax},
    },
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
type Trainer = Autodiff<Inner>;

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

fn largest_difference(actual: TensorData, expected: &TensorData) -> f32 {
    assert_eq!(actual.shape, expected.shape);
    let pairs = actual.iter::<f32>().zip(expected.iter::<f32>());
    pairs.map(|(a, e)| (a - e).abs()).fold(0.0, f32::max)
}

#[track_caller]
fn assert_close(what: &str, actual: TensorData, expected: &TensorData) {
    let difference = largest_difference(actual, expected);
    assert!(difference <= 1e-4, "{what} differs by {difference}");
}

#[track_caller]
fn assert_relatively_close(what: &str, actual: TensorData, expected: &TensorData) {
    let largest = expected.iter::<f32>().map(f32::abs).fold(0.0, f32::max);
    let difference = largest_difference(actual, expected) / largest;
    assert!(
        difference <= 1e-4,
        "{what} differs by {difference} of its largest value"
    );
}

#[test]
fn hidden_states_routing_and_logits_equal_those_of_transformers() {
    let reference = Reference::open();
    let model = model::<Inner>();
    assert_eq!(model.precision(), &Precision::High);
    let tokens = reference.ids("input_ids");
    let output = model.hidden_states(&TokenBatch::new(tokens.clone()));

    assert_close(
        "hidden",
        output.hidden.into_data(),
        &reference.data("hidden.final_norm"),
    );
    for layer in 0..2 {
        let logits = output.router_logits[layer].clone().into_data();
        assert_close(
            "router logits",
            logits,
            &reference.data(&format!("router_logits.layer_{layer}")),
        );
        let ids = output.expert_ids[layer].clone().into_data();
        let expected = reference.data(&format!("router_topk_index.layer_{layer}"));
        assert_eq!(
            ids.iter::<i64>().collect::<Vec<_>>(),
            expected.iter::<i64>().collect::<Vec<_>>(),
            "experts of layer {layer}"
        );
    }
    assert_close("logits", model.forward(tokens).into_data(), &reference.data("logits"));
}

#[test]
fn a_left_padded_row_equals_that_of_transformers() {
    let reference = Reference::open();
    let model = model::<Inner>();
    let attended: Tensor<Inner, 2, Int> = reference.ids("padded.attention_mask");
    let hidden = model
        .hidden_states(&TokenBatch {
            tokens: reference.ids("padded.input_ids"),
            positions: Some(reference.ids("padded.position_ids")),
            padding: Some(attended.clone().equal_elem(0)),
            replay: None,
        })
        .hidden;
    let [batch, seq, width] = hidden.dims();
    let logits = model.logits(hidden.reshape([batch * seq, width]));
    // The reference has zeros at padding.
    let logits = logits.reshape([batch, seq, 128]) * attended.float().reshape([batch, seq, 1]);
    assert_close("logits", logits.into_data(), &reference.data("padded.logits"));
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

/// Load-balancing loss of transformers, over the tokens of all layers.
fn balance_loss<B: Backend>(logits: Vec<Tensor<B, 2>>, ids: Vec<Tensor<B, 2, Int>>) -> Tensor<B, 1> {
    let probabilities = softmax(Tensor::cat(logits, 0), 1);
    let ids = Tensor::cat(ids, 0);
    let [tokens, top_k] = ids.dims();
    let experts = probabilities.dims()[1];
    let share = ids.one_hot::<3>(experts).float().sum_dim(0) / tokens as f64;
    let probability = probabilities.mean_dim(0).reshape([1, 1, experts]);
    (share.reshape([1, top_k, experts]) * probability).sum() * experts as f64
}

#[test]
fn gradients_equal_those_of_transformers() {
    let reference = Reference::open();
    let model = model::<Trainer>();
    let tokens: Tensor<Trainer, 2, Int> = reference.ids("input_ids");
    let [batch, seq] = tokens.dims();
    let predicting = batch * (seq - 1);
    let output = model.hidden_states(&TokenBatch::new(tokens.clone()));
    let hidden = output.hidden.narrow(1, 0, seq - 1).reshape([predicting, 64]);
    let next = tokens.narrow(1, 1, seq - 1).reshape([predicting, 1]);
    let nll = -log_softmax(model.logits(hidden), 1).gather(1, next).mean();
    assert_close("loss", nll.clone().into_data(), &reference.data("grad.loss_nll"));
    let balance = balance_loss(output.router_logits, output.expert_ids);
    assert_close("balance loss", balance.clone().into_data(), &reference.data("aux_loss"));
    let grads = (nll + balance * 0.01).backward();

    let layer = &model.layers[0];
    let linear = |name: &str, weight: &Tensor<Trainer, 2>| {
        let name = format!("grad.model.layers.{name}.weight");
        let grad = weight.grad(&grads).unwrap().transpose().into_data();
        assert_relatively_close(&name, grad, &reference.data(&name));
    };
    linear("0.self_attn.q_proj", &layer.self_attn.q_proj.weight.val());
    linear("0.self_attn.k_proj", &layer.self_attn.k_proj.weight.val());
    linear("0.mlp.gate", &layer.mlp.gate.weight.val());
    linear("1.mlp.gate", &model.layers[1].mlp.gate.weight.val());

    let norm = |name: &str, gamma: &Tensor<Trainer, 1>| {
        let name = format!("grad.model.{name}.weight");
        let grad = gamma.grad(&grads).unwrap().into_data();
        assert_relatively_close(&name, grad, &reference.data(&name));
    };
    norm("layers.0.input_layernorm", &layer.input_layernorm.gamma.val());
    norm("layers.0.self_attn.q_norm", &layer.self_attn.q_norm.gamma.val());
    norm("layers.0.self_attn.k_norm", &layer.self_attn.k_norm.gamma.val());
    norm("norm", &model.norm.gamma.val());

    let expert = |name: &str, weight: &Tensor<Trainer, 3>| {
        let name = format!("grad.model.layers.0.mlp.experts.{name}.expert_3");
        let grad = weight.grad(&grads).unwrap().narrow(0, 3, 1).squeeze_dim::<2>(0);
        assert_relatively_close(&name, grad.transpose().into_data(), &reference.data(&name));
    };
    let experts = &layer.mlp.experts;
    expert("gate_up_proj", &experts.gate_up_proj.val());
    expert("down_proj", &experts.down_proj.val());
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
                "model.layers.0.self_attn.q_norm.weight" => (Dtype::F16, vec![16]),
                _ => continue,
            };
            let bytes = shape[0] * if dtype == Dtype::F32 { 4 } else { 2 };
            *tensor = safetensors::tensor::TensorView::new(dtype, shape, &ZEROS[..bytes]).unwrap();
        }
        let bias = safetensors::tensor::TensorView::new(Dtype::F32, vec![64], &ZEROS).unwrap();
        tensors.push(("model.layers.0.self_attn.q_proj.bias".to_string(), bias));
    });
    let expected = [
        "missing: model.layers.1.mlp.experts.5.up_proj.weight [32, 64]",
        "shape: model.norm.weight is [32], expected [64]",
        "type: model.layers.0.self_attn.q_norm.weight is F16, expected F32",
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
