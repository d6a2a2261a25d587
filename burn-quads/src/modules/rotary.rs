//! Rotary position embedding in the rotate-half form of Hugging Face's Qwen3 and Llama.
//!
//! Channel `i` of a head is rotated together with channel `i + head_dim / 2` (Burn's own `RotaryEncoding` pairs
//! neighbours instead) by the angle `position · theta^(-2i / head_dim)`.
use burn::{
    config::Config,
    module::Module,
    prelude::Backend,
    tensor::{Int, Tensor, TensorData},
};

/// Configuration of a [`RotaryEmbedding`].
#[derive(Config, Debug)]
pub struct RotaryEmbeddingConfig {
    /// Number of positions in the tables.
    pub max_seq_len: usize,
    /// Channels of one head; even.
    pub head_dim: usize,
    /// Base of the frequencies (`rope_theta`).
    #[config(default = "10000.0")]
    pub theta: f64,
}

impl RotaryEmbeddingConfig {
    /// Computes the tables, in f64, rounded to f32 once.
    ///
    /// # Panics
    /// If `head_dim` is odd or zero, or `theta` is not a positive number.
    pub fn init<B: Backend>(&self, device: &B::Device) -> RotaryEmbedding<B> {
        let (n, d) = (self.max_seq_len, self.head_dim);
        assert!(
            d > 0 && d.is_multiple_of(2),
            "rotary embedding: head_dim must be even and positive, got {d}"
        );
        assert!(
            self.theta.is_finite() && self.theta > 0.0,
            "rotary embedding: theta must be a positive number, got {}",
            self.theta
        );
        let (mut cos, mut sin) = (vec![0f32; n * d], vec![0f32; n * d]);
        for position in 0..n {
            for i in 0..d / 2 {
                let angle = position as f64 * self.theta.powf(-2.0 * i as f64 / d as f64);
                let (s, c) = angle.sin_cos();
                let (low, high) = (position * d + i, position * d + i + d / 2);
                cos[low] = c as f32;
                cos[high] = c as f32;
                sin[low] = -s as f32;
                sin[high] = s as f32;
            }
        }
        RotaryEmbedding {
            cos: Tensor::from_data(TensorData::new(cos, [n, d]), device),
            sin: Tensor::from_data(TensorData::new(sin, [n, d]), device),
        }
    }
}

/// Cosine and sine of every position, shared by all layers. Constants: neither trained nor saved.
#[derive(Module, Debug)]
pub struct RotaryEmbedding<B: Backend> {
    /// `[max_seq_len, head_dim]`, both halves alike.
    pub(crate) cos: Tensor<B, 2>,
    /// `[max_seq_len, head_dim]`, the first half negated: `x · cos + swap_halves(x) · sin` is the rotation.
    pub(crate) sin: Tensor<B, 2>,
}

impl<B: Backend> RotaryEmbedding<B> {
    /// Number of positions in the tables.
    pub fn max_seq_len(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The rotations of `positions` `[batch, seq]`, each below [`Self::max_seq_len`].
    pub fn rotation(&self, positions: Tensor<B, 2, Int>) -> Rotation<B> {
        let [batch, seq] = positions.dims();
        let head_dim = self.cos.dims()[1];
        let index = positions.reshape([batch * seq]);
        let rows = |table: &Tensor<B, 2>| {
            let rows = table.clone().select(0, index.clone());
            rows.reshape([batch, seq, head_dim])
        };
        Rotation::new(rows(&self.cos), rows(&self.sin))
    }

    /// The rotations of positions `0..seq`, for every row of a batch alike.
    ///
    /// # Panics
    /// If `seq` exceeds [`Self::max_seq_len`].
    pub fn first(&self, seq: usize) -> Rotation<B> {
        let max = self.max_seq_len();
        assert!(
            seq <= max,
            "rotary embedding: a sequence of {seq} tokens exceeds the table of {max} positions"
        );
        let rows = |table: &Tensor<B, 2>| table.clone().narrow(0, 0, seq).unsqueeze();
        Rotation::new(rows(&self.cos), rows(&self.sin))
    }
}

/// What [`RotaryEmbedding`] does to the tokens of one batch: gathered once, applied in every layer.
#[derive(Clone, Debug)]
pub struct Rotation<B: Backend> {
    /// `[batch or 1, seq, head_dim]`.
    pub(crate) cos: Tensor<B, 3>,
    pub(crate) sin: Tensor<B, 3>,
}

impl<B: Backend> Rotation<B> {
    /// From rows of a [`RotaryEmbedding`]'s tables.
    pub(crate) fn new(cos: Tensor<B, 3>, sin: Tensor<B, 3>) -> Self {
        Self { cos, sin }
    }

    /// Rotates `[batch, seq, heads, head_dim]`.
    pub fn apply(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, seq, heads, d] = x.dims();
        let half = d / 2;
        let swapped = Tensor::cat(vec![x.clone().narrow(3, half, half), x.clone().narrow(3, 0, half)], 3);
        // One row for each sequence: a factor that all sequences share is then a row vector, which backends multiply
        // with at full speed.
        let row = seq * heads * d;
        let factor = |t: &Tensor<B, 3>| {
            let rows = t.dims()[0];
            t.clone()
                .unsqueeze_dim::<4>(2)
                .repeat_dim(2, heads)
                .reshape([rows, row])
        };
        let x = x.reshape([batch, row]) * factor(&self.cos) + swapped.reshape([batch, row]) * factor(&self.sin);
        x.reshape([batch, seq, heads, d])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{backend::Flex, tensor::Tolerance};

    #[test]
    fn rotates_channel_i_with_channel_i_plus_half() {
        let device = Default::default();
        let rope = RotaryEmbeddingConfig::new(8, 4).with_theta(100.0).init::<Flex>(&device);
        let x = Tensor::<Flex, 4>::from_data([[[[1.0, 2.0, 3.0, 4.0]]]], &device);
        let rotated = rope.rotation(Tensor::from_data([[3]], &device)).apply(x).into_data();
        // Angles at position 3: 3 · 100^0 = 3 and 3 · 100^(-1/2) = 0.3.
        let (s0, c0) = 3f32.sin_cos();
        let (s1, c1) = 0.3f32.sin_cos();
        let expected = TensorData::from([[[[c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, 3.0 * c0 + s0, 4.0 * c1 + 2.0 * s1]]]]);
        rotated.assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
    }

    #[test]
    fn a_dot_product_depends_on_the_distance_only() {
        let device = Default::default();
        let rope = RotaryEmbeddingConfig::new(64, 8).init::<Flex>(&device);
        let q = Tensor::<Flex, 4>::from_data([[[[0.3, -1.0, 0.7, 2.0, -0.2, 0.9, 1.1, -0.4]]]], &device);
        let k = Tensor::<Flex, 4>::from_data([[[[1.0, 0.1, -0.6, 0.5, 0.8, -1.3, 0.2, 0.4]]]], &device);
        let dot = |p: i32, r: i32| -> f32 {
            let at = |x: &Tensor<Flex, 4>, position: i32| {
                rope.rotation(Tensor::from_data([[position]], &device)).apply(x.clone())
            };
            (at(&q, p) * at(&k, r)).sum().into_scalar()
        };
        assert!((dot(5, 2) - dot(45, 42)).abs() < 1e-5);
        assert!((dot(5, 2) - dot(5, 4)).abs() > 1e-2);
    }

    #[test]
    fn consecutive_positions_equal_gathered_ones() {
        let device = Default::default();
        let rope = RotaryEmbeddingConfig::new(8, 4).init::<Flex>(&device);
        let x = Tensor::<Flex, 4>::random([2, 5, 3, 4], burn::tensor::Distribution::Default, &device);
        let positions = Tensor::arange(0..5, &device).reshape([1, 5]).repeat_dim(0, 2);
        assert_eq!(
            rope.first(5).apply(x.clone()).into_data(),
            rope.rotation(positions).apply(x).into_data()
        );
    }
}
