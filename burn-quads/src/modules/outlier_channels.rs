//! Outlier channels that change nothing but how well activations can be quantized.
use burn::{
    module::Param,
    tensor::{Tensor, TensorData},
};
use rand::{SeedableRng, seq::index::sample};
use rand_chacha::ChaCha8Rng;

use super::{activation_site::is_packed, moe::QuadsMoe};
use crate::backend::QuadsBackend;

impl<B: QuadsBackend> QuadsMoe<B> {
    /// The model with `channels` outlier channels behind each norm that quantized layers read: there the norm's weight is
    /// multiplied by `gain`, and the rows of the weights that read it (q, k and v; router, gate and up) divided by it.
    /// Large models grow such channels by themselves; a small one has none.
    ///
    /// What the model computes stays the same: to the bit when `gain` is a power of two (short of overflow and underflow),
    /// to the rounding of f32 otherwise. Quantized, it does not: in a block of 16 the outlier takes the scale, and its
    /// neighbours lose their bits. Which channels, `seed` decides, for each norm anew.
    ///
    /// # Panics
    /// When there are fewer channels than `channels`, `gain` is not a finite number above 0, or a weight is packed.
    pub fn with_outlier_channels(mut self, channels: usize, gain: f32, seed: u64) -> Self {
        let width = self.config().hidden_size;
        assert!(
            channels <= width,
            "{channels} outlier channels: the model has {width} channels"
        );
        assert!(
            gain > 0.0 && gain.is_finite(),
            "outlier channels of gain {gain}: expected a finite number above 0"
        );
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let device = self.embed_tokens.weight.lazy_device();
        for layer in &mut self.layers {
            let [attention, experts] = [(); 2].map(|()| {
                let mut gains = vec![1.0; width];
                sample(&mut rng, width, channels)
                    .into_iter()
                    .for_each(|channel| gains[channel] = gain);
                Tensor::<B, 1>::from_data(TensorData::new(gains, [width]), &device)
            });
            multiply(&mut layer.input_layernorm.gamma, attention.clone());
            for linear in [
                &mut layer.self_attn.q_proj,
                &mut layer.self_attn.k_proj,
                &mut layer.self_attn.v_proj,
            ] {
                divide(&mut linear.weight, attention.clone().reshape([width, 1]));
            }
            multiply(&mut layer.post_attention_layernorm.gamma, experts.clone());
            if let Some(gate) = &mut layer.mlp.gate {
                divide(&mut gate.weight, experts.clone().reshape([width, 1]));
            }
            divide(&mut layer.mlp.experts.gate_up_proj, experts.reshape([1, width, 1]));
        }
        self
    }
}

fn multiply<B: QuadsBackend, const D: usize>(param: &mut Param<Tensor<B, D>>, factors: Tensor<B, D>) {
    change(param, |weight| weight * factors);
}

fn divide<B: QuadsBackend, const D: usize>(param: &mut Param<Tensor<B, D>>, factors: Tensor<B, D>) {
    change(param, |weight| weight / factors);
}

/// Changes a parameter that stays a leaf of the graph, if it is one.
fn change<B: QuadsBackend, const D: usize>(
    param: &mut Param<Tensor<B, D>>,
    change: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
) {
    assert!(
        !is_packed(&param.val()),
        "outlier channels are put into dense weights, before they are packed"
    );
    *param = param.clone().map(|weight| {
        let trained = weight.is_require_grad();
        change(weight.detach()).detach().set_require_grad(trained)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::{attention::QkNorm, moe_config::QuadsMoeConfig};
    use burn::{
        backend::{Autodiff, Flex},
        tensor::Int,
    };
    use burn_nvfp4::{Nvfp4, Precision};

    type B = Nvfp4<Flex>;

    /// Qwen3-MoE and OLMoE, with a head of their own and without, one with a dense layer.
    fn configs() -> [QuadsMoeConfig; 3] {
        let qwen = QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 32).with_precision(Precision::High);
        let tied = qwen
            .clone()
            .with_tie_word_embeddings(true)
            .with_mlp_only_layers(vec![1])
            .with_intermediate_size(Some(48));
        let olmoe = qwen.clone().with_qk_norm(QkNorm::Projection).with_clip_qkv(Some(0.7));
        [qwen, tied, olmoe]
    }

    fn logits(model: &QuadsMoe<B>, precision: Precision) -> Vec<f32> {
        let tokens: Vec<i64> = (0..40).map(|i| (i * 11 + 3) % 32).collect();
        let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(tokens, [4, 10]), &Default::default());
        let model = model.clone().with_precision(precision).unwrap();
        model.forward(tokens).into_data().to_vec().unwrap()
    }

    /// `‖a − b‖ / ‖b‖`
    fn relative(a: &[f32], b: &[f32]) -> f64 {
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>();
        (norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())).sqrt()
    }

    #[test]
    fn high_precision_logits_stay_and_quantized_activations_lose() {
        for config in configs() {
            let model = config.init_seeded::<B>(5, &Default::default());
            let before = logits(&model, Precision::High);
            let error = |model: &QuadsMoe<B>| relative(&logits(model, Precision::W4A4), &before);
            let plain = error(&model);
            for gain in [32.0, 0.125, 20.0] {
                let outliers = model.clone().with_outlier_channels(3, gain, 7);
                let after = logits(&outliers, Precision::High);
                match gain == 20.0 {
                    true => assert!(relative(&after, &before) < 1e-5, "{}", relative(&after, &before)),
                    false => assert_eq!(after, before, "a power of two changes no bit"),
                }
                if gain > 1.0 {
                    assert!(error(&outliers) > 1.1 * plain, "{} and {plain}", error(&outliers));
                }
            }
        }
    }

    #[test]
    fn the_seed_chooses_the_channels_of_each_norm() {
        let model = configs()[0].init_seeded::<B>(5, &Default::default());
        let chosen = |seed| -> Vec<Vec<usize>> {
            let model = model.clone().with_outlier_channels(3, 32.0, seed);
            let gammas = model
                .layers
                .iter()
                .flat_map(|l| [&l.input_layernorm.gamma, &l.post_attention_layernorm.gamma]);
            let outliers = |gamma: Vec<f32>| {
                gamma
                    .iter()
                    .enumerate()
                    .filter(|(_, g)| **g == 32.0)
                    .map(|(c, _)| c)
                    .collect()
            };
            gammas
                .map(|gamma| outliers(gamma.val().into_data().to_vec().unwrap()))
                .collect()
        };
        let channels = chosen(7);
        assert!(channels.iter().all(|channels| channels.len() == 3), "{channels:?}");
        assert!(channels[0] != channels[1] && channels[1] != channels[2], "{channels:?}");
        assert_eq!(channels, chosen(7));
        assert_ne!(channels, chosen(8));
        assert_eq!(chosen(7).len(), 4, "the norm before the head stays");
    }

    #[test]
    fn what_is_trained_stays_trainable() {
        let model = configs()[0]
            .init_seeded::<Autodiff<B>>(5, &Default::default())
            .with_outlier_channels(2, 32.0, 7);
        let grads = model
            .forward(Tensor::zeros([1, 4], &Default::default()))
            .sum()
            .backward();
        let layer = &model.layers[0];
        assert!(layer.input_layernorm.gamma.grad(&grads).is_some());
        assert!(layer.self_attn.q_proj.weight.grad(&grads).is_some());
        assert!(layer.mlp.experts.gate_up_proj.grad(&grads).is_some());
    }

    #[test]
    #[should_panic(expected = "65 outlier channels: the model has 64 channels")]
    fn more_channels_than_there_are_are_refused() {
        configs()[0]
            .init_seeded::<B>(5, &Default::default())
            .with_outlier_channels(65, 32.0, 7);
    }
}
