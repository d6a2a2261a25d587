//! `QuadsMoe` against transformers: checkpoints of both architectures, in all namings and types, with every intermediate.
use std::path::{Path, PathBuf};

use burn::{
    backend::{Autodiff, Flex},
    module::Param,
    prelude::Backend,
    tensor::{
        Int, Tensor, TensorData,
        activation::{log_softmax, softmax},
    },
};
use burn_nvfp4::{Nvfp4, Precision, safetensors_file::SafetensorsFile};
use burn_quads::{
    backend::QuadsBackend,
    causal_lm::TokenBatch,
    checkpoint::ModelFolder,
    modules::{attention::AttentionContext, moe::QuadsMoe},
    rollout::{RolloutEngine, SamplingParams},
    sync::pack_model,
};
use safetensors::Dtype;

type Inner = Nvfp4<Flex>;
type Trainer = Autodiff<Inner>;

/// A checkpoint, and where transformers' results for it lie.
struct Case {
    name: String,
    folder: ModelFolder,
    reference: SafetensorsFile,
    greedy: serde_json::Value,
}

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

/// A folder of links to a fixture's files, as the Hub's cache has them.
fn linked(test: &str, fixture: &str, config: &str, weights: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hf_parity").join(test);
    let folder = folder.join(format!("{fixture}-{config}-{weights}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for (file, link) in [(config, "config.json"), (weights, "model.safetensors")] {
        std::os::unix::fs::symlink(fixtures().join(fixture).join(file), folder.join(link)).unwrap();
    }
    folder
}

fn case(name: String, folder: &Path, fixture: &Path) -> Case {
    let text = std::fs::read(fixture.join("reference.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    Case {
        folder: ModelFolder::open(folder).unwrap_or_else(|error| panic!("{name}: {error}")),
        reference: SafetensorsFile::open(&fixture.join("reference.safetensors")).unwrap(),
        greedy: json["greedy"].clone(),
        name,
    }
}

/// Every checkpoint there is.
fn cases(test: &str) -> Vec<Case> {
    let mut cases = vec![];
    for fixture in ["qwen3moe_tiny", "olmoe_tiny"] {
        for (config, weights) in [
            ("config.json", "model.safetensors"),
            ("config_v4.json", "model.safetensors"),
            ("config.json", "model_bf16.safetensors"),
            ("config.json", "model_fused_bf16.safetensors"),
        ] {
            let folder = linked(test, fixture, config, weights);
            let name = format!("{fixture} {config} {weights}");
            cases.push(case(name, &folder, &fixtures().join(fixture)));
        }
    }
    for variant in ["qwen3moe_variant", "qwen3moe_sparse_step", "olmoe_clip"] {
        let folder = fixtures().join("hf_variants").join(variant);
        cases.push(case(variant.into(), &folder, &folder));
    }
    cases
}

impl Case {
    fn model<B: QuadsBackend>(&self) -> QuadsMoe<B> {
        let loaded = self.folder.load(&Default::default(), |_| {});
        loaded.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn data(&self, name: &str) -> TensorData {
        let tensor = self.reference.tensor(name);
        let tensor = tensor.unwrap_or_else(|| panic!("{}: the reference has no {name}", self.name));
        let shape = tensor.shape().to_vec();
        match tensor.dtype() {
            Dtype::I32 => {
                let words = tensor.bytes.as_chunks::<4>().0.iter();
                TensorData::new(words.map(|word| i32::from_le_bytes(*word)).collect::<Vec<_>>(), shape)
            }
            _ => TensorData::new(tensor.to_f32().unwrap(), shape),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.reference.tensor(name).is_some()
    }

    fn ids<B: Backend, const D: usize>(&self, name: &str) -> Tensor<B, D, Int> {
        Tensor::from_data(self.data(name), &Default::default())
    }

    #[track_caller]
    fn assert_close(&self, name: &str, actual: TensorData) {
        self.assert_within(name, actual, 1.0);
    }

    #[track_caller]
    fn assert_relatively_close(&self, name: &str, actual: TensorData) {
        let largest = self.data(name).iter::<f32>().map(f32::abs).fold(0.0, f32::max);
        self.assert_within(name, actual, largest);
    }

    #[track_caller]
    fn assert_within(&self, name: &str, actual: TensorData, unit: f32) {
        let expected = self.data(name);
        // Rows of all sequences may be one dimension or two.
        assert_eq!(actual.num_elements(), expected.num_elements(), "{}: {name}", self.name);
        assert_eq!(actual.shape.last(), expected.shape.last(), "{}: {name}", self.name);
        let pairs = actual.iter::<f32>().zip(expected.iter::<f32>());
        let difference = pairs
            .map(|(a, e)| (a - e).abs())
            .fold(0.0, |largest: f32, d| match d.is_nan() {
                true => f32::INFINITY,
                false => largest.max(d),
            });
        assert!(
            difference <= 1e-4 * unit,
            "{}: {name} differs by {difference}, unit {unit}",
            self.name
        );
    }
}

#[test]
fn every_hidden_state_router_logit_expert_and_logit_is_that_of_transformers() {
    for case in cases("hidden") {
        let model = case.model::<Inner>();
        assert_eq!(model.precision(), &Precision::High);
        let tokens: Tensor<Inner, 2, Int> = case.ids("input_ids");
        let [batch, seq] = tokens.dims();
        let context = AttentionContext::new(&model.rope, seq, None, None);
        let mut x = model.embed_tokens.forward(tokens.clone());
        let mut routed = vec![];
        for (index, layer) in model.layers.iter().enumerate() {
            let name = |what: &str| format!("{what}.layer_{index}");
            let (y, routing) = layer.forward_with(
                x,
                |attention, x| {
                    let y = attention.forward(x, &context);
                    if case.has(&name("attn_out")) {
                        case.assert_close(&name("attn_out"), y.clone().into_data());
                    }
                    y
                },
                None,
            );
            x = y;
            case.assert_close(&format!("hidden.layer_{index}_out"), x.clone().into_data());
            assert_eq!(
                routing.is_some(),
                case.has(&name("router_logits")),
                "{}: layer {index}",
                case.name
            );
            if let Some(routing) = routing {
                case.assert_close(&name("router_logits"), routing.logits.into_data());
                if case.has(&name("router_topk_weights")) {
                    case.assert_close(&name("router_topk_weights"), routing.weights.into_data());
                }
                let ids = |data: TensorData| data.iter::<i64>().collect::<Vec<_>>();
                let expected = ids(case.data(&name("router_topk_index")));
                assert_eq!(
                    ids(routing.expert_ids.into_data()),
                    expected,
                    "{}: layer {index}",
                    case.name
                );
                routed.push(expected);
            }
        }
        let output = model.hidden_states(&TokenBatch::new(tokens.clone()));
        case.assert_close("hidden.final_norm", output.hidden.clone().into_data());
        assert_eq!(output.expert_ids.len(), routed.len(), "{}", case.name);
        case.assert_close("logits", model.forward(tokens.clone()).into_data());

        let width = model.config().hidden_size;
        let hidden = output.hidden.narrow(1, 0, seq - 1).reshape([batch * (seq - 1), width]);
        let next = tokens.narrow(1, 1, seq - 1).reshape([batch * (seq - 1), 1]);
        let log_probs = log_softmax(model.logits(hidden), 1).gather(1, next);
        case.assert_close("token_logprobs", log_probs.reshape([batch, seq - 1]).into_data());
        let balance = balance_loss(output.router_logits, output.expert_ids);
        case.assert_close("aux_loss", balance.into_data());
    }
}

#[test]
fn a_left_padded_row_is_that_of_transformers() {
    for case in cases("padded") {
        let model = case.model::<Inner>();
        let attended: Tensor<Inner, 2, Int> = case.ids("padded.attention_mask");
        let hidden = model.hidden_states(&TokenBatch {
            tokens: case.ids("padded.input_ids"),
            positions: Some(case.ids("padded.position_ids")),
            padding: Some(attended.clone().equal_elem(0)),
            replay: None,
        });
        let [batch, seq, width] = hidden.hidden.dims();
        let logits = model.logits(hidden.hidden.reshape([batch * seq, width]));
        let vocab = model.config().vocab_size;
        // The reference has zeros at padding.
        let logits = logits.reshape([batch, seq, vocab]) * attended.float().reshape([batch, seq, 1]);
        case.assert_close("padded.logits", logits.into_data());
    }
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
fn gradients_are_those_of_transformers() {
    for case in cases("gradients") {
        let model = case.model::<Trainer>();
        let tokens: Tensor<Trainer, 2, Int> = case.ids("input_ids");
        let [batch, seq] = tokens.dims();
        let predicting = batch * (seq - 1);
        let output = model.hidden_states(&TokenBatch::new(tokens.clone()));
        let width = model.config().hidden_size;
        let hidden = output.hidden.narrow(1, 0, seq - 1).reshape([predicting, width]);
        let next = tokens.narrow(1, 1, seq - 1).reshape([predicting, 1]);
        let nll = -log_softmax(model.logits(hidden), 1).gather(1, next).mean();
        case.assert_close("grad.loss_nll", nll.clone().into_data());
        let balance = balance_loss(output.router_logits, output.expert_ids);
        let grads = (nll + balance * 0.01).backward();

        let mut checked = 0;
        let mut check = |name: String, grad: Option<TensorData>| {
            let name = format!("grad.model.{name}");
            if case.has(&name) {
                let grad = grad.unwrap_or_else(|| panic!("{}: {name} has no gradient", case.name));
                case.assert_relatively_close(&name, grad);
                checked += 1;
            }
        };
        let vector = |x: &Param<Tensor<Trainer, 1>>| x.val().grad(&grads).map(|grad| grad.into_data());
        let matrix = |x: &Param<Tensor<Trainer, 2>>| x.val().grad(&grads).map(|grad| grad.transpose().into_data());
        let embedding = model.embed_tokens.weight.val().grad(&grads);
        check("embed_tokens.weight".into(), embedding.map(|grad| grad.into_data()));
        check("norm.weight".into(), vector(&model.norm.gamma));
        for (index, layer) in model.layers.iter().enumerate() {
            let path = |name: &str| format!("layers.{index}.{name}");
            let attn = &layer.self_attn;
            for (name, linear) in [
                ("q_proj", &attn.q_proj),
                ("k_proj", &attn.k_proj),
                ("v_proj", &attn.v_proj),
                ("o_proj", &attn.o_proj),
            ] {
                check(path(&format!("self_attn.{name}.weight")), matrix(&linear.weight));
                check(
                    path(&format!("self_attn.{name}.bias")),
                    linear.bias.as_ref().and_then(vector),
                );
            }
            check(path("self_attn.q_norm.weight"), vector(&attn.q_norm.gamma));
            check(path("self_attn.k_norm.weight"), vector(&attn.k_norm.gamma));
            check(path("input_layernorm.weight"), vector(&layer.input_layernorm.gamma));
            let experts = &layer.mlp.experts;
            let part = |weight: &Param<Tensor<Trainer, 3>>, expert: usize, columns: std::ops::Range<usize>| {
                let grad = weight
                    .val()
                    .grad(&grads)
                    .unwrap()
                    .narrow(0, expert, 1)
                    .squeeze_dim::<2>(0);
                Some(grad.narrow(1, columns.start, columns.len()).transpose().into_data())
            };
            let [_, ff, hidden] = experts.dims();
            match &layer.mlp.gate {
                Some(gate) => {
                    check(path("mlp.gate.weight"), matrix(&gate.weight));
                    if gate.weight.dims()[1] > 3 {
                        let (gate_up, down) = (&experts.gate_up_proj, &experts.down_proj);
                        check(path("mlp.experts.gate_up_proj.expert_3"), part(gate_up, 3, 0..2 * ff));
                        check(path("mlp.experts.down_proj.expert_3"), part(down, 3, 0..hidden));
                    }
                }
                None => {
                    check(path("mlp.gate_proj.weight"), part(&experts.gate_up_proj, 0, 0..ff));
                    check(path("mlp.up_proj.weight"), part(&experts.gate_up_proj, 0, ff..2 * ff));
                    check(path("mlp.down_proj.weight"), part(&experts.down_proj, 0, 0..hidden));
                }
            }
        }
        let head = model.lm_head.as_ref().filter(|_| case.has("grad.lm_head.weight"));
        assert!(
            head.is_none(),
            "{}: the head's gradient is there and was not compared",
            case.name
        );
        let expected = case
            .reference
            .tensors()
            .filter(|tensor| tensor.name().starts_with("grad.model."));
        assert_eq!(checked, expected.count(), "{}: gradients compared", case.name);
    }
}

#[test]
fn greedy_continuations_are_those_of_transformers_id_for_id() {
    for case in cases("greedy") {
        let model = case.model::<Inner>();
        let ids = |value: &serde_json::Value| -> Vec<u32> {
            value
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap() as u32)
                .collect()
        };
        let examples = case.greedy.as_array().unwrap();
        let prompts: Vec<_> = examples.iter().map(|example| ids(&example["prompt"])).collect();
        let longest = examples
            .iter()
            .map(|example| ids(&example["new_tokens"]).len())
            .max()
            .unwrap();
        let params = SamplingParams {
            temperature: 0.0,
            max_new_tokens: longest,
            eos_token_ids: case.folder.eos_token_ids().to_vec(),
            seed: 0,
            record_routing: false,
        };
        let eos = model.config().vocab_size as u32 - 1;
        assert_eq!(params.eos_token_ids, [eos], "{}", case.name);
        // Two slots for more prompts: slots are used again.
        let mut engine = RolloutEngine::<Inner>::new(2, 48).unwrap();
        let completions = engine.generate(&model, &prompts, &params).unwrap();
        for (completion, example) in completions.iter().zip(examples) {
            assert_eq!(completion.tokens, ids(&example["new_tokens"]), "{}", case.name);
        }
    }
}

#[test]
fn every_checkpoint_packs_and_rolls_out_in_every_precision() {
    for case in cases("packed") {
        let tokens: Tensor<Inner, 2, Int> = case.ids("input_ids");
        let dense = case.model::<Inner>();
        let spread = (dense.forward(tokens.clone()).var(2).mean().into_scalar()).sqrt();
        for (precision, bound) in [
            (Precision::Fp8, 0.3),
            (Precision::W4A16, 1.0),
            (Precision::W4A4Rac(Default::default()), 1.0),
        ] {
            let (packed, audit) = pack_model(case.model::<Inner>(), &precision, None).unwrap();
            // q, k, v, o, gate_up and down of each layer.
            assert_eq!(audit.packed(), 6 * packed.layers.len(), "{}", case.name);
            let difference = (packed.forward(tokens.clone()) - dense.forward(tokens.clone()))
                .abs()
                .mean()
                .into_scalar();
            assert!(
                difference > 0.0 && difference < bound * spread,
                "{}: {precision}: {difference} of {spread}",
                case.name
            );
        }
    }
}

#[test]
fn loading_reports_every_parameter_and_byte() {
    let case = cases("progress").remove(2);
    let mut last = (0, 0, 0);
    let model: QuadsMoe<Inner> = case
        .folder
        .load(&Default::default(), |progress| {
            assert!(
                progress.bytes > last.1 && progress.bytes <= progress.total_bytes,
                "{progress:?}"
            );
            last = (last.0 + 1, progress.bytes, progress.total_bytes);
        })
        .unwrap();
    assert_eq!(last.0, burn_quads::checkpoint::named_param_ids(&model).len());
    assert_eq!((last.1, last.2), (2 * 140672, 2 * 140672));
}
