//! The method's layers and model: forward, gradients, sync, rollout.
use crate::support::{Stack, assert_close, bits, splits_f32, tensor, values};
use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Param},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Int, Tensor, TensorData, backend::Backend},
};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, Precision, packed_weight};
use burn_quads::{
    backend::QuadsBackend,
    layer_backend::LayerBackend,
    modules::{
        experts::{QuadsExperts, QuadsExpertsConfig},
        moe::QuadsMoe,
        moe_config::QuadsMoeConfig,
        rotary::RotaryEmbeddingConfig,
        router::Routing,
    },
    rollout::{Completion, RolloutEngine, SamplingParams},
    sync::{pack_model, sync},
    token_log_probs::{token_log_probs, token_log_probs_and_entropies},
};

const PRECISIONS: [&str; 5] = ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"];

/// Neither bf16 tensor cores for values in two parts, nor TF32 inside attention, as on CUDA.
fn is_exact<B>() -> bool {
    !splits_f32::<B>()
}

fn experts<B: QuadsBackend>(precision: &Precision) -> QuadsExperts<B> {
    let mut experts: QuadsExperts<B> = QuadsExpertsConfig::new(5, 48, 32)
        .with_precision(precision.clone())
        .init(&Default::default());
    experts.gate_up_proj = Param::from_tensor(tensor(&crate::support::data(1, [5, 48, 64])));
    experts.down_proj = Param::from_tensor(tensor(&crate::support::data(2, [5, 32, 48])));
    experts
}

fn routing<B: Backend>() -> Routing<B> {
    let device = Default::default();
    // Expert 3 has no token.
    let ids = [[0, 2], [2, 4], [1, 2], [4, 0], [2, 1], [0, 4], [2, 0]];
    Routing {
        expert_ids: Tensor::from_data(ids, &device),
        weights: tensor::<B, 2>(&crate::support::data(3, [7, 2])) + 1.0,
        logits: Tensor::zeros([7, 5], &device),
    }
}

/// Output, and gradients of input and weights.
fn experts_step<B: QuadsBackend>(precision: &Precision) -> [Vec<f32>; 4] {
    let experts = experts::<Autodiff<B>>(precision);
    let x = tensor::<Autodiff<B>, 2>(&crate::support::data(4, [7, 48])).require_grad();
    let y = experts.forward(x.clone(), &routing());
    let up: Tensor<Autodiff<B>, 2> = tensor(&crate::support::data(5, [7, 48]));
    let grads = (y.clone() * up).sum().backward();
    [
        values(y.inner()),
        values(x.grad(&grads).unwrap()),
        values(experts.gate_up_proj.val().grad(&grads).unwrap()),
        values(experts.down_proj.val().grad(&grads).unwrap()),
    ]
}

pub fn experts_and_their_gradients_are_those_of_flex<B: Stack>() {
    // Two products of f32, which bf16 tensor cores take in two parts each.
    let grouped = if is_exact::<B>() { 1e-5 } else { 3e-4 };
    for precision in PRECISIONS {
        let precision: Precision = precision.parse().unwrap();
        let (actual, expected) = (
            experts_step::<Nvfp4<B>>(&precision),
            experts_step::<Nvfp4<Flex>>(&precision),
        );
        for (part, (a, e)) in ["output", "dx", "d gate_up", "d down"]
            .iter()
            .zip(actual.iter().zip(&expected))
        {
            // The input of down is computed: a last-bit difference can flip a code of it.
            let tolerance = match precision {
                Precision::High | Precision::W4A16 => grouped,
                _ => 1e-2,
            };
            assert_close(a, e, tolerance, &format!("{precision}, {part}"));
        }
    }
    // Packed, for inference.
    for precision in &PRECISIONS[1..] {
        let precision: Precision = precision.parse().unwrap();
        let packed = experts::<Nvfp4<B>>(&precision).pack(&precision).unwrap();
        let expected = experts::<Nvfp4<Flex>>(&precision).pack(&precision).unwrap();
        let x = crate::support::data(6, [7, 48]);
        let (a, e) = (
            values(packed.forward(tensor(&x), &routing())),
            values(expected.forward(tensor(&x), &routing())),
        );
        let tolerance = if precision == Precision::W4A16 { grouped } else { 1e-2 };
        assert_close(&a, &e, tolerance, &format!("packed, {precision}"));
    }
}

/// Whole blocks of rows among them: nothing is left to fill up then, and nothing must be launched over nothing.
pub fn rows_are_sorted_by_expert_as_on_flex<B: Stack>() {
    fn sorted<B: LayerBackend>(ids: &[i32], experts: usize) -> [Vec<i64>; 3] {
        let ids = TensorData::new(ids.to_vec(), [ids.len()]);
        let order = B::order_by_expert(Tensor::<B, 1, Int>::from_data(ids, &Default::default()), experts);
        [order.order, order.inverse, order.counts].map(|list| list.into_data().iter::<i64>().collect())
    }
    // Neither data nor values of no element: CubeCL 0.10 uploads and reads nothing empty on CUDA.
    let sorted_nothing = B::order_by_expert(Tensor::<B, 1, Int>::empty([0], &Default::default()), 6);
    assert_eq!([sorted_nothing.order.dims(), sorted_nothing.inverse.dims()], [[0], [0]]);
    assert_eq!(sorted_nothing.counts.into_data().iter::<i64>().sum::<i64>(), 0);
    for rows in [1, 5, 127, 128, 129, 256, 384, 1000] {
        // Expert 3 has no row.
        let ids: Vec<i32> = (0..rows).map(|i| [0, 5, 2, 2, 1, 4, 5][i * i % 7]).collect();
        assert_eq!(sorted::<B>(&ids, 6), sorted::<Flex>(&ids, 6), "{rows} rows");
    }
}

pub fn rows_are_permuted_by_expert_as_on_flex<B: Stack>() {
    fn permuted<B: LayerBackend>(tokens: usize, top_k: usize) -> [Vec<f32>; 4] {
        let ids: Vec<i32> = (0..(tokens * top_k) as i32).map(|i| i * i % 7).collect();
        let ids = TensorData::new(ids, [tokens * top_k]);
        let order = B::order_by_expert(Tensor::<B, 1, Int>::from_data(ids, &Default::default()), 7);
        let x: Tensor<B, 2> = tensor(&crate::support::data(8, [tokens, 20]));
        let rows: Tensor<B, 2> = tensor(&crate::support::data(9, [tokens * top_k, 20]));
        [
            values(B::permute_rows(x, &order)),
            values(B::permute_rows_backward(rows.clone(), &order, tokens)),
            values(B::unpermute_rows(rows.clone(), &order)),
            values(B::unpermute_rows_backward(rows, &order)),
        ]
    }
    for (tokens, top_k) in [(1, 1), (5, 2), (64, 4), (300, 3)] {
        let here = permuted::<B>(tokens, top_k);
        let there = permuted::<Flex>(tokens, top_k);
        for (part, (a, e)) in ["permuted", "its gradient", "back", "its gradient"]
            .iter()
            .zip(here.iter().zip(&there))
        {
            // A token's rows may be added in another order.
            assert_close(a, e, 1e-6, &format!("{tokens} tokens, {top_k} experts each, {part}"));
        }
    }
}

/// Of rows in a tensor of their own, and in one that is a view of another.
pub fn the_operations_of_a_layer_are_those_of_flex<B: Stack>() {
    fn results<B: LayerBackend>(view: bool) -> Vec<(&'static str, Vec<f32>)> {
        let rows = |seed, columns| match view {
            false => tensor::<B, 2>(&crate::support::data(seed, [66, columns])),
            true => tensor::<B, 2>(&crate::support::data(seed, [columns + 3, 66]))
                .narrow(0, 2, columns)
                .transpose(),
        };
        let gamma = tensor::<B, 1>(&crate::support::data(20, [24]));
        let rope = RotaryEmbeddingConfig::new(33, 6).init::<B>(&Default::default());
        let positions: Vec<i32> = (0..66).map(|i| i * i % 31).collect();
        let positions = Tensor::from_data(TensorData::new(positions, [2, 33]), &Default::default());
        let heads = || match view {
            false => tensor::<B, 4>(&crate::support::data(21, [2, 33, 3, 6])),
            true => tensor::<B, 4>(&crate::support::data(21, [2, 3, 33, 6])).swap_dims(1, 2),
        };
        let weights = B::softmax_rows(rows(22, 24) * 4.0);
        let (shifted, log_sum) = B::log_softmax_parts(rows(22, 24) * 4.0);
        vec![
            ("rms_norm", values(B::rms_norm(rows(23, 24), gamma, 1e-6))),
            ("swiglu", values(B::swiglu(rows(24, 24)))),
            (
                "swiglu's gradient",
                values(B::swiglu_backward(rows(24, 24), rows(25, 12))),
            ),
            ("softmax", values(weights.clone())),
            (
                "softmax's gradient",
                values(B::softmax_rows_backward(weights, rows(26, 24))),
            ),
            ("rows less their largest", values(shifted)),
            ("log of the sum", values(log_sum)),
            ("rotated alike", values(B::rotate(heads(), &rope.first(33)))),
            (
                "rotated by position",
                values(B::rotate(heads(), &rope.rotation(positions))),
            ),
        ]
    }
    for view in [false, true] {
        for ((what, a), (_, e)) in results::<B>(view).into_iter().zip(results::<Flex>(view)) {
            assert_close(&a, &e, 1e-5, &format!("{what}, view: {view}"));
        }
    }
}

pub fn the_gradients_of_a_norm_are_those_of_flex<B: Stack>() {
    fn gradients<B: LayerBackend>(rows: usize) -> [Vec<f32>; 2] {
        let [x, grad] = [10, 11].map(|seed| tensor::<B, 2>(&crate::support::data(seed, [rows, 24])));
        let (dx, d_gamma) = B::rms_norm_backward(x, tensor(&crate::support::data(12, [24])), 1e-6, grad);
        [values(dx), values(d_gamma)]
    }
    // Sums of one row, of one block of rows, and of blocks of blocks with rows beside them.
    for rows in [1, 300, 1300, 132_000] {
        let parts = gradients::<B>(rows).into_iter().zip(gradients::<Flex>(rows));
        for (part, (a, e)) in ["dx", "d gamma"].iter().zip(parts) {
            assert_close(&a, &e, 1e-5, &format!("{rows} rows, {part}"));
        }
    }
}

/// Log-probs, and gradients of hidden states and head, with more logits than live at once.
pub fn log_probs_and_their_gradients_are_those_of_flex<B: Stack>() {
    const VOCAB: usize = 1 << 16;
    const TOKENS: usize = 520;
    fn step<B: LayerBackend>() -> [Vec<f32>; 4] {
        let hidden = tensor::<B, 2>(&crate::support::data(13, [TOKENS, 8]));
        let head = tensor::<B, 2>(&crate::support::data(14, [8, VOCAB])) * 3.0;
        let targets: Vec<i32> = (0..TOKENS).map(|i| (i * 977 % VOCAB) as i32).collect();
        let targets = TensorData::new(targets, [TOKENS]);
        let targets = || Tensor::<B, 1, Int>::from_data(targets.clone(), &Default::default());
        let (_, entropies) = token_log_probs_and_entropies(hidden.clone(), head.clone(), targets(), 1.0);
        let [hidden, head] = [hidden, head].map(|x| Tensor::<Autodiff<B>, 2>::from_inner(x).require_grad());
        let log_probs = token_log_probs(hidden.clone(), head.clone(), Tensor::from_inner(targets()), 1.0);
        let up: Tensor<Autodiff<B>, 1> = tensor(&crate::support::data(15, [TOKENS]));
        let grads = (log_probs.clone() * up).sum().backward();
        [
            values(log_probs.inner()),
            values(entropies),
            values(hidden.grad(&grads).unwrap()),
            values(head.grad(&grads).unwrap()),
        ]
    }
    // Sums of as many terms as there are tokens in the vocabulary.
    let tolerance = if is_exact::<B>() { 1e-4 } else { 5e-4 };
    for (part, (a, e)) in ["log-probs", "entropies", "d hidden", "d head"]
        .iter()
        .zip(step::<B>().into_iter().zip(step::<Flex>()))
    {
        assert_close(&a, &e, tolerance, part);
    }
}

pub fn the_experts_of_largest_logits_are_those_of_flex<B: Stack>() {
    let chosen_for_nobody = B::top_experts(Tensor::<B, 2>::empty([0, 20], &Default::default()), 8);
    assert_eq!(chosen_for_nobody.dims(), [0, 8]);
    for tokens in [1, 16, 300] {
        let logits = crate::support::data(7, [tokens, 20]);
        let here = B::top_experts(tensor::<B, 2>(&logits), 8);
        let there = Flex::top_experts(tensor::<Flex, 2>(&logits), 8);
        let [here, there] = [here.into_data(), there.into_data()].map(|ids| ids.iter::<i64>().collect::<Vec<_>>());
        assert_eq!(here, there, "{tokens} tokens");
    }
}

fn config() -> QuadsMoeConfig {
    QuadsMoeConfig::new(24, 64, 2, 4, 2, 16, 4, 2, 48).with_max_position_embeddings(64)
}

/// The model whose parameters Flex draws, so that all backends have the same.
fn model<B: QuadsBackend>(precision: &Precision) -> QuadsMoe<B> {
    let config = config().with_precision(precision.clone());
    let drawn = config.init_seeded::<Nvfp4<Flex>>(11, &Default::default());
    let mut model = config.init_seeded::<B>(11, &Default::default());
    // Draws come from the host's generator: check that they did.
    assert_eq!(
        bits(&values(model.layers[1].mlp.experts.down_proj.val())),
        bits(&values(drawn.layers[1].mlp.experts.down_proj.val()))
    );
    model.lm_head = model.lm_head.map(|head| head.map(|w| w * 3.0));
    model
}

fn tokens<B: Backend>() -> Tensor<B, 2, Int> {
    let ids: Vec<i64> = (0..3 * 10).map(|i| (i * i + 3 * i) % 24).collect();
    Tensor::from_data(TensorData::new(ids, [3, 10]), &Default::default())
}

/// Logits, and the gradients of some parameters.
fn model_step<B: QuadsBackend>(precision: &Precision) -> Vec<Vec<f32>> {
    let model = model::<Autodiff<B>>(precision);
    let logits = model.forward(tokens());
    let grads = logits.clone().powi_scalar(2).mean().backward();
    let (first, last) = (&model.layers[0], &model.layers[1]);
    vec![
        values(logits.inner()),
        values(first.self_attn.q_proj.weight.val().grad(&grads).unwrap()),
        values(first.mlp.experts.gate_up_proj.val().grad(&grads).unwrap()),
        values(last.mlp.experts.down_proj.val().grad(&grads).unwrap()),
    ]
}

pub fn a_model_and_its_gradients_are_those_of_flex<B: Stack>() {
    for precision in ["high", "w4a16"] {
        let precision: Precision = precision.parse().unwrap();
        let (actual, expected) = (
            model_step::<Nvfp4<B>>(&precision),
            model_step::<Nvfp4<Flex>>(&precision),
        );
        let tolerance = if is_exact::<B>() { 1e-4 } else { 2e-2 };
        for (part, (a, e)) in ["logits", "dq", "d gate_up", "d down"]
            .iter()
            .zip(actual.iter().zip(&expected))
        {
            assert_close(a, e, tolerance, &format!("{precision}, {part}"));
        }
    }
}

fn trained<B: Stack>(precision: &Precision) -> QuadsMoe<Autodiff<Nvfp4<B>>> {
    let model = model::<Autodiff<Nvfp4<B>>>(precision);
    let loss = model.forward(tokens()).powi_scalar(2).mean();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    AdamWConfig::new().init().step(1e-2, model, grads)
}

pub fn sync_packs_what_the_trainer_multiplies_with<B: Stack>() {
    let trainer = trained::<B>(&Precision::W4A16);
    let (rollout, audit) = sync(&trainer, &"w4a4_rac".parse().unwrap(), None).unwrap();
    assert_eq!(audit.packed(), 2 * 6);
    for (t, r) in trainer.layers.iter().zip(&rollout.layers) {
        let [gate_up, down] = t.mlp.experts.quantized_weights();
        for (forward, packed) in [(gate_up, &r.mlp.experts.gate_up_proj), (down, &r.mlp.experts.down_proj)] {
            assert!(packed_weight(&packed.val()).is_some());
            assert_eq!(bits(&values(forward.inner())), bits(&values(packed.val().dequantize())));
        }
        let [q, k, v] = t.self_attn.qkv().quantized_weights();
        let packed = [&r.self_attn.q_proj, &r.self_attn.k_proj, &r.self_attn.v_proj];
        for (forward, packed) in [q, k, v].into_iter().zip(packed) {
            assert_eq!(
                bits(&values(forward.inner())),
                bits(&values(packed.weight.val().dequantize()))
            );
        }
    }
    // The packed model computes what the trainer computes.
    let (rollout, _) = sync(&trainer, &Precision::W4A16, None).unwrap();
    let tolerance = if is_exact::<B>() { 1e-4 } else { 2e-2 };
    let expected = values(trainer.valid().forward(tokens()));
    assert_close(
        &values(rollout.forward(tokens())),
        &expected,
        tolerance,
        "the packed model",
    );
}

fn rollout<B: Nvfp4Backend + LayerBackend>(precision: &Precision, temperature: f32) -> Vec<Completion> {
    let model = model::<Nvfp4<B>>(&Precision::High);
    let model = match precision {
        Precision::High => model,
        precision => pack_model(model, precision, None).unwrap().0,
    };
    let prompts = [vec![1, 5, 7], vec![2], vec![1, 5, 7], vec![9, 8, 7, 6, 5]];
    let params = SamplingParams {
        temperature,
        max_new_tokens: 6,
        eos_token_ids: vec![3],
        seed: 5,
        record_routing: false,
    };
    RolloutEngine::new(3, 32)
        .unwrap()
        .generate(&model, &prompts, &params)
        .unwrap()
}

pub fn a_rollout_is_that_of_flex<B: Stack>() {
    for precision in PRECISIONS {
        let precision: Precision = precision.parse().unwrap();
        let (actual, expected) = (rollout::<B>(&precision, 1.0), rollout::<Flex>(&precision, 1.0));
        let tolerance = match precision {
            Precision::High | Precision::W4A16 if is_exact::<B>() => 1e-4,
            _ => 0.1,
        };
        for (a, e) in actual.iter().zip(&expected) {
            // Sampled from the same random numbers: the same tokens while the log-probs agree.
            let same = a.tokens.iter().zip(&e.tokens).take_while(|(a, e)| a == e).count();
            assert!(same > 0, "{precision}: {:?} and {:?}", a.tokens, e.tokens);
            if tolerance < 1e-3 {
                assert_eq!(a.tokens, e.tokens, "{precision}");
            }
            for (a, e) in a.log_probs.iter().zip(&e.log_probs).take(same) {
                assert!((a - e).abs() <= tolerance, "{precision}: log-prob {a}, on Flex {e}");
            }
        }
    }
}
