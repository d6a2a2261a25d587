//! What a backend must know for `Nvfp4` to wrap it.
//!
//! The defaults compute on the host: they read tensors back and call `kernels_cubecl::host`. A backend that can lend
//! its memory overrides [`with_floats`](Nvfp4Backend::with_floats) and [`with_bytes`](Nvfp4Backend::with_bytes), one
//! with kernels of its own the operations.
use burn_backend::{
    Backend, Shape, TensorMetadata, read_sync,
    tensor::{Device, FloatTensor, IntTensor},
};
use kernels_cubecl::{Activation, WeightLayout, host};

use crate::{
    PackError, PackedWeight, WeightFormat, host_route,
    reference::{
        add_to_rows, check_bias, check_linear, floats_tensor, group_counts, grouped_linear_by_slices,
        grouped_weight_gradient_by_slices, rows,
    },
};

/// A backend that [`Nvfp4`](crate::Nvfp4) can wrap.
///
/// Operations on activations panic, as Burn's do, when shapes do not match; the message has both.
pub trait Nvfp4Backend: Backend {
    /// Rows of packed weights are stored padded with zeros to a multiple of this many values.
    const ROW_STEP: usize = 1;

    /// Whether [`fake_quantize_weight`](Nvfp4Backend::fake_quantize_weight) leaves weights on their device. May wait for the
    /// device the first time it is asked.
    fn packs_on_device(_device: &Device<Self>) -> bool {
        false
    }

    /// Lends the values of a float tensor, as f32 in row-major order.
    fn with_floats<R>(tensor: &FloatTensor<Self>, read: impl FnOnce(&[f32]) -> R) -> R {
        let data = read_sync(Self::float_into_data(tensor.clone())).expect("a tensor can be read back");
        if data.shape.num_elements() == 0 {
            // What some devices give for nothing is not aligned.
            return read(&[]);
        }
        read(data.convert::<f32>().as_slice().expect("f32 data"))
    }
    /// Lends the values of a U8 tensor in row-major order.
    fn with_bytes<R>(tensor: &IntTensor<Self>, read: impl FnOnce(&[u8]) -> R) -> R {
        let data = read_sync(Self::int_into_data(tensor.clone())).expect("a tensor can be read back");
        read(data.convert::<u8>().as_bytes())
    }

    /// Packs `[d_in, d_out]` or `[groups, d_in, d_out]`. `amax` (`[1]` or `[groups]`) is the largest magnitude that
    /// the NVFP4 outer scale covers, for weights that share it; without it each group's own. FP8 has channel scales
    /// and ignores it. Activations of the result stay in full precision, see [`PackedWeight::with_activation`].
    ///
    /// # Errors
    ///
    /// [`PackError`]: shape, `d_in` not a multiple of 16, a non-finite value, an `amax` below the weight's own.
    fn pack_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> Result<PackedWeight<Self>, PackError> {
        host_route::pack_weight::<Self>(weight, format, amax)
    }

    /// The values of a packed weight, in the shape and type of its view.
    fn unpack_weight(weight: &PackedWeight<Self>) -> FloatTensor<Self> {
        let (d_in, d_out) = (weight.d_in(), weight.d_out());
        let mut values = vec![0.0; weight.groups() * d_in * d_out];
        weight.with_views(|views| {
            for (group, view) in views.iter().enumerate() {
                let out = &mut values[group * d_in * d_out..(group + 1) * d_in * d_out];
                host::dequantize_weight(*view, WeightLayout::Transposed, out)
                    .expect("a packed weight has the lengths of its shape");
            }
        });
        let mut shape = weight.shape();
        let rank = shape.num_dims();
        (shape[rank - 2], shape[rank - 1]) = (d_in, d_out);
        let dense = floats_tensor::<Self>(values, shape, &weight.device(), weight.dtype());
        // A view, as the transpose of a dense weight is: products round alike.
        match weight.is_transposed() {
            true => Self::float_swap_dims(dense, rank - 2, rank - 1),
            false => dense,
        }
    }

    /// `x [.., d_in] · weight`, `[.., d_out]`: activations enter as the weight's setting says, sums are f32.
    fn packed_linear(x: FloatTensor<Self>, weight: &PackedWeight<Self>) -> FloatTensor<Self> {
        Self::packed_linear_bias(x, weight, None)
    }

    /// [`packed_linear`](Nvfp4Backend::packed_linear) plus `bias [d_out]`, added in f32 before the one cast to the
    /// type of `x`.
    fn packed_linear_bias(
        x: FloatTensor<Self>,
        weight: &PackedWeight<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let mut shape = x.shape();
        let last = shape.num_dims() - 1;
        check_linear(&shape, weight);
        check_bias(bias.as_ref().map(TensorMetadata::shape), weight);
        let tokens: usize = (0..last).map(|dim| shape[dim]).product();
        let mut y = vec![0.0; tokens * weight.d_out()];
        Self::with_floats(&x, |x| {
            weight.with_views(|views| host::matmul(x, tokens, views[0], weight.activation(), &mut y))
        })
        .unwrap_or_else(|error| panic!("linear: input {shape}, packed weight {}: {error}", weight.shape()));
        if let Some(bias) = bias {
            Self::with_floats(&bias, |bias| add_to_rows(&mut y, bias));
        }
        shape[last] = weight.d_out();
        floats_tensor::<Self>(y, shape, &Self::float_device(&x), x.dtype().into())
    }

    /// One product a group: `x [tokens, d_in]` is sorted by group, `counts [groups]` says how many rows each has.
    /// `[tokens, d_out]`; a group without rows costs nothing. Counts that stay on their device cannot be checked: rows past
    /// their sum are undefined there.
    fn packed_grouped_linear(
        x: FloatTensor<Self>,
        weight: &PackedWeight<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let shape = x.shape();
        let weights = Shape::from([weight.groups(), weight.d_in(), weight.d_out()]);
        let counts = group_counts::<Self>(counts, &shape, &weights);
        let mut y = vec![0.0; shape[0] * weight.d_out()];
        Self::with_floats(&x, |x| {
            weight.with_views(|views| host::grouped_matmul(x, &counts, views, weight.activation(), &mut y))
        })
        .unwrap_or_else(|error| {
            panic!(
                "grouped linear: input {shape}, packed weight {}: {error}",
                weight.shape()
            )
        });
        let shape = Shape::from([shape[0], weight.d_out()]);
        floats_tensor::<Self>(y, shape, &Self::float_device(&x), x.dtype().into())
    }

    /// What [`pack_weight`](Nvfp4Backend::pack_weight) and [`unpack_weight`](Nvfp4Backend::unpack_weight) make of a
    /// weight, bit for bit. A non-finite weight gives NaN everywhere: divergence must be seen.
    ///
    /// # Panics
    ///
    /// On the other [`PackError`]s. Where the weight stays on its device, an `amax` below the weight's own cannot be
    /// refused: the largest values saturate.
    fn fake_quantize_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        host_route::fake_quantize_weight::<Self>(weight, format, amax)
    }

    /// The values that a product sees in place of `x [.., k]`.
    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self> {
        if *activation == Activation::Full {
            return x;
        }
        let shape = x.shape();
        let (tokens, k) = rows(&shape);
        let mut values = vec![0.0; tokens * k];
        Self::with_floats(&x, |x| {
            host::fake_quantize_activations(x, tokens, k, activation, &mut values)
        })
        .unwrap_or_else(|error| panic!("fake quantization of activations {shape}: {error}"));
        floats_tensor::<Self>(values, shape, &Self::float_device(&x), x.dtype().into())
    }

    /// [`packed_grouped_linear`](Nvfp4Backend::packed_grouped_linear) with dense weights `[groups, d_in, d_out]`.
    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        grouped_linear_by_slices::<Self>(x, weight, counts)
    }

    /// Gradient of [`grouped_linear`](Nvfp4Backend::grouped_linear) in the weights, `[groups, d_in, d_out]`:
    /// `x_eᵀ · g_e` from `x [tokens, d_in]` and `grad [tokens, d_out]`, zeros for a group without rows.
    fn grouped_linear_weight_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        grouped_weight_gradient_by_slices::<Self>(x, grad, counts)
    }
}

#[cfg(test)]
mod tests;
