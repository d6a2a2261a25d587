//! Operations with straight-through gradients.
//!
//! The layers are written once, against [`QuadsBackend`]. On [`Nvfp4<B>`] its operations run in the kernels of `B`, on
//! Flex alone in the same ones, without packed weights; on `Autodiff<B>` each of them is one node of the graph:
//!
//! | operation | forward | gradient |
//! |---|---|---|
//! | `fake_quantize_weight` | the stored (packed) value of each weight | identity |
//! | `fake_quantize_activations` | what a matmul sees of its input | identity |
//! | `with_gradient_of` | a value that was computed before | that of another computation of the same thing |
//! | `grouped_linear` | `y_e = x_e · w_e` for each expert `e` | `dx_e = g_e · w_eᵀ`, `dw_e = x_eᵀ · g_e` |
//!
//! What has no straight-through gradient is in [`LayerBackend`].
use burn::backend::{
    Autodiff, Flex,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, unary},
    },
};
use burn_backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, Nvfp4Tensor, WeightFormat};
use kernels_cubecl::Activation;

use crate::layer_backend::{LayerBackend, ProductGradients, product_node};

/// What the layers of this crate ask of a backend beyond Burn's own operations.
pub trait QuadsBackend: LayerBackend {
    /// The values that packing `w` (`[d_in, d_out]`, or `[experts, d_in, d_out]`) would store, as a dense tensor; the
    /// gradient passes unchanged. `amax`, `[1]` or `[experts]`, replaces the weight's own largest magnitude when
    /// several weights share an outer scale. A non-finite weight gives NaN everywhere.
    fn fake_quantize_weight(
        w: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;

    /// The activations `[.., k]` as a matmul in the setting `activation` sees them; the gradient passes unchanged.
    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self>;

    /// `value` as it is, with the gradient of what `surrogate` computes in its place. Without gradients `surrogate` is not
    /// asked.
    ///
    /// # Panics
    /// When the two have different shapes.
    fn with_gradient_of(value: FloatTensor<Self>, surrogate: impl FnOnce() -> FloatTensor<Self>) -> FloatTensor<Self>;

    /// Products of consecutive groups of rows with their own weights.
    ///
    /// `x` is `[rows, d_in]`, its first `counts[0]` rows belonging to group 0 and so on; `w` is `[groups, d_in, d_out]`,
    /// dense or packed; the result is `[rows, d_out]`. A group without rows costs nothing and gets a zero gradient.
    /// The gradient of `x` goes through the stored values of a packed `w`, which itself gets none.
    fn grouped_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self>;

    /// Gradient of [`grouped_linear`](Self::grouped_linear) in `x`: `[rows, d_out]` to `[rows, d_in]`.
    fn grouped_linear_x_backward(
        grad: FloatTensor<Self>,
        w: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Gradient of [`grouped_linear`](Self::grouped_linear) in `w`, `[groups, d_in, d_out]`.
    fn grouped_linear_weight_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Whether `w` is stored in NVFP4 or FP8.
    fn is_packed(w: &FloatTensor<Self>) -> bool;
}

/// Whether B is one of Burn's GPU backends, decorated or not.
pub(crate) fn runs_on_gpu<B: Backend>(device: &B::Device) -> bool {
    B::name(device).contains("cubecl<")
}

/// `dx_e = g_e · w_eᵀ`.
fn grouped_x_backward<B: Nvfp4Backend>(
    grad: FloatTensor<B>,
    w: FloatTensor<B>,
    counts: IntTensor<B>,
) -> FloatTensor<B> {
    B::grouped_linear(grad, B::float_swap_dims(w, 1, 2), counts)
}

impl<B: Nvfp4Backend + LayerBackend> QuadsBackend for Nvfp4<B> {
    fn fake_quantize_weight(
        w: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Nvfp4Tensor::Dense(B::fake_quantize_weight(w.dense(), format, amax.map(|a| a.dense())))
    }

    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self> {
        match activation {
            Activation::Full => x,
            _ => Nvfp4Tensor::Dense(B::fake_quantize_activations(x.dense(), activation)),
        }
    }

    fn with_gradient_of(value: FloatTensor<Self>, _: impl FnOnce() -> FloatTensor<Self>) -> FloatTensor<Self> {
        value
    }

    fn grouped_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        Nvfp4Tensor::Dense(match w {
            Nvfp4Tensor::Packed(w) => B::packed_grouped_linear(x.dense(), &w, counts),
            Nvfp4Tensor::Dense(w) => B::grouped_linear(x.dense(), w, counts),
        })
    }

    fn grouped_linear_x_backward(
        grad: FloatTensor<Self>,
        w: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Nvfp4Tensor::Dense(grouped_x_backward::<B>(grad.dense(), w.dense(), counts))
    }

    fn grouped_linear_weight_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Nvfp4Tensor::Dense(B::grouped_linear_weight_backward(x.dense(), grad.dense(), counts))
    }

    fn is_packed(w: &FloatTensor<Self>) -> bool {
        matches!(w, Nvfp4Tensor::Packed(_))
    }
}

impl QuadsBackend for Flex {
    fn fake_quantize_weight(
        w: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        <Self as Nvfp4Backend>::fake_quantize_weight(w, format, amax)
    }

    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self> {
        <Self as Nvfp4Backend>::fake_quantize_activations(x, activation)
    }

    fn with_gradient_of(value: FloatTensor<Self>, _: impl FnOnce() -> FloatTensor<Self>) -> FloatTensor<Self> {
        value
    }

    fn grouped_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        <Self as Nvfp4Backend>::grouped_linear(x, w, counts)
    }

    fn grouped_linear_x_backward(
        grad: FloatTensor<Self>,
        w: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        grouped_x_backward::<Self>(grad, w, counts)
    }

    fn grouped_linear_weight_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        <Self as Nvfp4Backend>::grouped_linear_weight_backward(x, grad, counts)
    }

    fn is_packed(_: &FloatTensor<Self>) -> bool {
        false
    }
}

/// A unary node whose gradient is the identity.
fn straight_through<B: QuadsBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    forward: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct StraightThrough;
    impl<B: Backend> Backward<B, 1> for StraightThrough {
        type State = ();
        fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            unary::<B, _>(ops.parents, ops.node, grads, |grad| grad)
        }
    }
    let prep = Backward::<B, 1>::prepare::<C>(StraightThrough, [x.node.clone()]);
    prep.compute_bound().stateless(forward(x.primitive))
}

impl<B: QuadsBackend, C: CheckpointStrategy> QuadsBackend for Autodiff<B, C> {
    fn fake_quantize_weight(
        w: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let amax = amax.map(|amax| amax.primitive);
        straight_through::<B, C>(w, |w| B::fake_quantize_weight(w, format, amax))
    }

    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self> {
        match activation {
            Activation::Full => x,
            _ => straight_through::<B, C>(x, |x| B::fake_quantize_activations(x, activation)),
        }
    }

    fn with_gradient_of(value: FloatTensor<Self>, surrogate: impl FnOnce() -> FloatTensor<Self>) -> FloatTensor<Self> {
        let surrogate = surrogate();
        let shapes = [value.primitive.shape(), surrogate.primitive.shape()];
        assert_eq!(
            shapes[0], shapes[1],
            "a value and what its gradient is taken of have one shape"
        );
        straight_through::<B, C>(surrogate, |_| value.primitive)
    }

    fn grouped_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        let kept = counts.clone();
        let product = |x, w| B::grouped_linear(x, w, counts);
        let gradients = ProductGradients {
            dx: B::grouped_linear_x_backward,
            dw: B::grouped_linear_weight_backward,
        };
        product_node::<B, C, _>(x, w, kept, product, gradients)
    }

    fn grouped_linear_x_backward(_: FloatTensor<Self>, _: FloatTensor<Self>, _: IntTensor<Self>) -> FloatTensor<Self> {
        unreachable!("gradients of gradients are not supported")
    }

    fn grouped_linear_weight_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        unreachable!("gradients of gradients are not supported")
    }

    fn is_packed(w: &FloatTensor<Self>) -> bool {
        B::is_packed(&w.primitive)
    }
}
