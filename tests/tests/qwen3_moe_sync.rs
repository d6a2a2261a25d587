//! Trainer and rollout differ by no code: what the forward pass of quantization-aware training multiplies with is what
//! `sync` packs, for every layer, after an optimizer step.
use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module, Param},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Int, Tensor, TensorData},
};
use burn_nvfp4::{Granularity, Nvfp4, Outcome, Precision, Rac, Selection, packed_weight};
use burn_quads::{
    calibrate::Calibrator,
    causal_lm::TokenBatch,
    checkpoint::named_param_ids,
    modules::residual_masks::ResidualMasks,
    modules::{linear::OuterScaleGroup, moe::QuadsMoe, moe_config::QuadsMoeConfig},
    sync::{pack_model, sync},
};
use kernels_cubecl::{WeightLayout, host};

type Inner = Nvfp4<Flex>;
type Trainer = Autodiff<Inner>;

fn config() -> QuadsMoeConfig {
    QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 48)
}

fn tokens<B: burn::prelude::Backend>() -> Tensor<B, 2, Int> {
    let ids: Vec<i64> = (0..3 * 10).map(|i| (i * i + 3 * i) % 32).collect();
    Tensor::from_data(TensorData::new(ids, [3, 10]), &Default::default())
}

/// A model after one step of AdamW.
fn trained(precision: Precision) -> QuadsMoe<Trainer> {
    let model = config()
        .with_precision(precision)
        .init_seeded::<Trainer>(5, &Default::default());
    let loss = model.forward(tokens()).powi_scalar(2).mean();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    AdamWConfig::new().init().step(1e-2, model, grads)
}

/// A weight of the trainer, the amax that its outer scale covers (its own when absent), what the forward pass multiplies
/// with, and what sync packed.
struct Weight<const D: usize> {
    name: String,
    master: Tensor<Inner, D>,
    amax: Option<f32>,
    forward: Tensor<Inner, D>,
    packed: Tensor<Inner, D>,
}

impl<const D: usize> Weight<D> {
    fn check(self) {
        let name = self.name;
        let packed = packed_weight(&self.packed).unwrap_or_else(|| panic!("{name} is not packed"));
        let master = self.master.into_data();
        let values = master.as_slice::<f32>().unwrap();
        let (d_in, d_out) = (packed.d_in(), packed.d_out());
        let (mut codes, mut block_scales, mut outer_scales) = (vec![], vec![], vec![]);
        for group in values.chunks(d_in * d_out) {
            let weight = host::quantize_weight(group, d_out, d_in, WeightLayout::Transposed, self.amax).unwrap();
            codes.extend(weight.codes);
            block_scales.extend(weight.block_scales);
            let kernels_cubecl::OuterScale::Multiply(scale) = weight.outer_scale else {
                panic!("our own weights multiply")
            };
            outer_scales.push(scale);
        }
        assert_eq!(packed.codes(), codes, "codes of {name}");
        assert_eq!(packed.block_scales(), block_scales, "block scales of {name}");
        assert_eq!(packed.outer_scales(), outer_scales, "outer scales of {name}");

        let bits = |t: Tensor<Inner, D>| -> Vec<u32> { t.into_data().iter::<f32>().map(f32::to_bits).collect() };
        assert_eq!(bits(self.forward), bits(self.packed.dequantize()), "values of {name}");
    }
}

#[test]
fn every_layer_of_the_qat_forward_equals_what_sync_packs_after_an_optimizer_step() {
    let trainer = trained(Precision::W4A16);
    let (rollout, audit) = sync(&trainer, &Precision::W4A4Rac(Rac::default()), None).unwrap();
    for (index, (t, r)) in trainer.layers.iter().zip(&rollout.layers).enumerate() {
        let (attn, packed) = (&t.self_attn, &r.self_attn);
        let amax = attn.qkv().amax().inner().into_scalar();
        let [q, k, v] = attn.qkv().quantized_weights();
        let [o] = OuterScaleGroup::new([&attn.o_proj]).quantized_weights();
        for (name, master, amax, forward, packed) in [
            ("q_proj", &attn.q_proj, Some(amax), q, &packed.q_proj),
            ("k_proj", &attn.k_proj, Some(amax), k, &packed.k_proj),
            ("v_proj", &attn.v_proj, Some(amax), v, &packed.v_proj),
            ("o_proj", &attn.o_proj, None, o, &packed.o_proj),
        ] {
            Weight {
                name: format!("layer {index} {name}"),
                master: master.weight.val().inner(),
                amax,
                forward: forward.inner(),
                packed: packed.weight.val(),
            }
            .check();
        }
        let [gate_up, down] = t.mlp.experts.quantized_weights();
        for (name, master, forward, packed) in [
            (
                "gate_up_proj",
                &t.mlp.experts.gate_up_proj,
                gate_up,
                &r.mlp.experts.gate_up_proj,
            ),
            ("down_proj", &t.mlp.experts.down_proj, down, &r.mlp.experts.down_proj),
        ] {
            Weight {
                name: format!("layer {index} {name}"),
                master: master.val().inner(),
                amax: None,
                forward: forward.inner(),
                packed: packed.val(),
            }
            .check();
        }
    }
    assert_eq!(audit.packed(), 2 * 6);
}

#[test]
fn the_packed_model_computes_what_the_trainer_computes() {
    // In each precision trainer and rollout see the same weights and activations; only the order of sums differs.
    for precision in [Precision::High, Precision::W4A16, Precision::Fp8] {
        let trainer = trained(precision.clone());
        let (rollout, _) = sync(&trainer, &precision, None).unwrap();
        let expected = trainer.forward(tokens()).inner();
        let difference = (rollout.forward(tokens()) - expected).abs().max().into_scalar();
        assert!(difference < 1e-4, "{precision}: {difference}");
    }
    // Where activations are quantized, a last-bit difference upstream can flip a code, so the mean is compared.
    for precision in [Precision::W4A4, Precision::W4A4Rac(Rac::default())] {
        let trainer = trained(precision.clone());
        let (rollout, _) = sync(&trainer, &precision, None).unwrap();
        let expected = trainer.forward(tokens()).inner();
        let difference = (rollout.forward(tokens()) - expected).abs().mean().into_scalar();
        assert!(difference < 1e-3, "{precision}: {difference}");
    }
}

#[test]
fn sync_leaves_the_trainer_alone_and_follows_it() {
    let trainer = trained(Precision::W4A16);
    let before = trainer.clone();
    let (first, _) = sync(&trainer, &Precision::W4A4, None).unwrap();
    let loss = trainer.forward(tokens()).powi_scalar(2).mean();
    let grads = GradientsParams::from_grads(loss.backward(), &trainer);
    let trainer = AdamWConfig::new().init().step(1e-2, trainer, grads);
    let (second, _) = sync(&trainer, &Precision::W4A4, None).unwrap();

    let master = |m: &QuadsMoe<Trainer>| m.layers[1].mlp.experts.down_proj.val().into_data();
    assert_ne!(master(&before), master(&trainer));
    let codes = |m: &QuadsMoe<Inner>| packed_weight(&m.layers[1].mlp.experts.down_proj.val()).unwrap().codes();
    assert_ne!(codes(&first), codes(&second));
    assert_eq!(named_param_ids(&second), named_param_ids(&trainer.valid()));
}

#[test]
fn the_audit_lists_every_weight_and_says_why_some_stay_dense() {
    let (_, audit) = sync(&trained(Precision::W4A16), &Precision::W4A4, None).unwrap();
    let outcome = |path: &str| audit.layer(path).unwrap_or_else(|| panic!("{path}")).outcome.clone();
    let left = |reason: &str| Outcome::Left(reason.to_string());
    assert_eq!(outcome("embed_tokens.weight"), left("embedding"));
    assert_eq!(outcome("layers.1.mlp.gate.weight"), left("router"));
    assert_eq!(outcome("lm_head"), left("head"));
    assert_eq!(
        outcome("layers.0.self_attn.q_proj.weight"),
        Outcome::Packed(Precision::W4A4)
    );
    let experts = audit.layer("layers.0.mlp.experts.gate_up_proj").unwrap();
    assert_eq!(experts.shape, [4, 64, 96]);
    assert_eq!(experts.bytes_before, 4 * 64 * 96 * 4);
    // 4.5 bits a weight and one f32 an expert.
    assert_eq!(experts.bytes_after, 4 * 64 * 96 * 9 / 16 + 4 * 4);

    let tied = config()
        .with_tie_word_embeddings(true)
        .init_seeded::<Inner>(1, &Default::default());
    let (_, audit) = pack_model(tied, &Precision::W4A4, None).unwrap();
    assert_eq!(
        audit.layer("lm_head").unwrap().outcome,
        left("head, tied to the embedding")
    );

    let (_, audit) = sync(&trained(Precision::W4A16), &Precision::High, None).unwrap();
    assert_eq!(audit.packed(), 0);
    assert_eq!(
        audit.layer("layers.0.self_attn.o_proj.weight").unwrap().outcome,
        left("precision high")
    );
}

#[test]
fn a_non_finite_weight_is_an_error_that_names_the_tensor() {
    let mut trainer = trained(Precision::W4A16);
    let experts = &mut trainer.layers[1].mlp.experts;
    let down = experts.down_proj.val().inner().slice_fill([2..3, 7..8, 0..1], f32::NAN);
    experts.down_proj = Param::initialized(experts.down_proj.id, Tensor::from_inner(down).require_grad());
    let error = sync(&trainer, &Precision::W4A4, None).unwrap_err().to_string();
    assert!(
        error.starts_with("layers.1.mlp.experts.down_proj: non-finite value NaN at [2, 7, 0]"),
        "{error}"
    );

    let mut trainer = trained(Precision::W4A16);
    let q = &mut trainer.layers[0].self_attn.q_proj;
    let weight = q.weight.val().inner().slice_fill([0..1, 0..1], f32::INFINITY);
    q.weight = Param::initialized(q.weight.id, Tensor::from_inner(weight).require_grad());
    let error = sync(&trainer, &Precision::W4A16, None).unwrap_err().to_string();
    assert!(error.starts_with("layers.0.self_attn.q_proj.weight: "), "{error}");
}

fn calibrated() -> Precision {
    Precision::W4A4Rac(Rac {
        selection: Selection::Calibrated,
        granularity: Granularity::Block16,
        fraction: 0.5,
    })
}

fn masks(model: &QuadsMoe<Trainer>) -> ResidualMasks {
    let sequences: Vec<Vec<u32>> = (0..4).map(|i| (0..8).map(|t| (i * 7 + t * 3) % 32).collect()).collect();
    let calibrator = Calibrator::new(&model.valid());
    calibrator.run(&sequences, 64);
    calibrator.masks(Granularity::Block16, 0.5).unwrap()
}

#[test]
fn calibrated_compensation_needs_masks_and_uses_them_on_both_sides() {
    let trainer = trained(Precision::W4A16);
    let error = sync(&trainer, &calibrated(), None).unwrap_err().to_string();
    assert!(
        error.contains("layers.0.self_attn.qkv_proj has no calibrated mask"),
        "{error}"
    );
    assert!(trainer.clone().with_precision(calibrated()).is_err());

    let masks = masks(&trainer);
    let (rollout, _) = sync(&trainer, &calibrated(), Some(&masks)).unwrap();
    let trainer = trainer
        .with_residual_masks(&masks)
        .unwrap()
        .with_precision(calibrated())
        .unwrap();
    let difference = |a: Tensor<Inner, 3>, b: Tensor<Inner, 3>| (a - b).abs().mean().into_scalar();
    let both = difference(rollout.forward(tokens()), trainer.forward(tokens()).inner());
    assert!(both < 1e-3, "trainer and rollout differ by {both}");
    // And the masks matter.
    let (plain, _) = sync(&trainer, &Precision::W4A4, None).unwrap();
    assert!(difference(rollout.forward(tokens()), plain.forward(tokens())) > 10.0 * both);
}

#[test]
fn an_impossible_setting_of_the_precision_is_refused_before_anything_runs() {
    let precision = Precision::W4A4Rac(Rac {
        selection: Selection::PerToken,
        granularity: Granularity::Channel,
        fraction: 1.5,
    });
    let error = sync(&trained(Precision::W4A16), &precision, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("expected a compensated fraction in (0, 1], got 1.5"),
        "{error}"
    );
}

#[test]
fn masks_of_another_model_are_refused() {
    let masks = masks(&trained(Precision::W4A16));
    let other = QuadsMoeConfig::new(32, 64, 1, 4, 2, 16, 4, 2, 32).init_seeded::<Inner>(1, &Default::default());
    let error = other.with_residual_masks(&masks).unwrap_err().to_string();
    assert!(
        error.contains("layers.0.mlp.experts.down_proj has 48 channels, expected 32"),
        "{error}"
    );
    assert!(
        error.contains("layers.1.self_attn.o_proj is not a layer of the model"),
        "{error}"
    );
}

#[test]
fn the_trainers_weights_get_gradients_in_every_layer() {
    let model = config().init_seeded::<Trainer>(5, &Default::default());
    let output = model.hidden_states(&TokenBatch::new(tokens()));
    let loss = output.hidden.powi_scalar(3).mean();
    let grads = loss.backward();
    let grads = GradientsParams::from_grads(grads, &model);
    // All but the head, which was not used.
    assert_eq!(grads.len(), named_param_ids(&model).len() - 1);
    assert_eq!(
        model.num_params(),
        config().init_seeded::<Inner>(5, &Default::default()).num_params()
    );
}
