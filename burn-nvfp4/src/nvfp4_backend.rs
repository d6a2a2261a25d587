//! What a backend must know for `Nvfp4` to wrap it.
//!
//! The defaults compute on the host: they read tensors back and call `kernels_cubecl::host`. A backend that can lend
//! its memory overrides [`with_floats`](Nvfp4Backend::with_floats) and [`with_bytes`](Nvfp4Backend::with_bytes), one
//! with kernels of its own the operations.
use burn_backend::{
    Backend, FloatDType, Shape, TensorMetadata, read_sync,
    tensor::{FloatTensor, IntTensor},
};
use kernels_cubecl::{Activation, Error, WeightLayout, host};

use crate::{
    OuterScaleConvention, PackError, PackedWeight, Storage, WeightFormat,
    reference::{
        add_to_rows, bytes_tensor, floats_tensor, group_amax, group_counts, grouped_linear_by_slices, pack_groups,
        round_groups, rows, weight_dims,
    },
};

/// A backend that [`Nvfp4`](crate::Nvfp4) can wrap.
///
/// Operations on activations panic, as Burn's do, when shapes do not match; the message has both.
pub trait Nvfp4Backend: Backend {
    /// Lends the values of a float tensor, as f32 in row-major order.
    fn with_floats<R>(tensor: &FloatTensor<Self>, read: impl FnOnce(&[f32]) -> R) -> R {
        let data = read_sync(Self::float_into_data(tensor.clone())).expect("a tensor can be read back");
        read(data.convert::<f32>().as_slice().expect("f32 data"))
    }
    /// Lends the values of a U8 tensor in row-major order.
    fn with_bytes<R>(tensor: &IntTensor<Self>, read: impl FnOnce(&[u8]) -> R) -> R {
        let data = read_sync(Self::int_into_data(tensor.clone())).expect("a tensor can be read back");
        read(data.convert::<u8>().as_slice().expect("u8 data"))
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
        let shape = weight.shape();
        let device = Self::float_device(&weight);
        let (groups, d_in, d_out) = weight_dims(&shape, format)?;
        let amax = group_amax::<Self>(amax, groups, format)?;
        let dtype = weight.dtype().into();
        let packed = Self::with_floats(&weight, |w| {
            pack_groups(w, groups, d_in, d_out, format, amax.as_deref())
        })?;
        let storage = Storage {
            format,
            activation: Activation::Full,
            groups,
            d_in,
            d_out,
            codes: bytes_tensor::<Self>(packed.codes, packed.codes_shape, &device),
            block_scales: bytes_tensor::<Self>(packed.block_scales, packed.block_scales_shape, &device),
            outer_scales: floats_tensor::<Self>(
                packed.outer_scales,
                packed.outer_scales_shape,
                &device,
                FloatDType::F32,
            ),
            convention: OuterScaleConvention::Multiply,
        };
        Ok(PackedWeight::new(storage, shape.num_dims()).with_dtype(dtype))
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
        assert!(
            shape[last] == weight.d_in() && weight.groups() == 1,
            "linear: input {shape} does not match the packed weight {}: expected a last dimension of {}",
            weight.shape(),
            weight.d_in()
        );
        let tokens: usize = (0..last).map(|dim| shape[dim]).product();
        let mut y = vec![0.0; tokens * weight.d_out()];
        Self::with_floats(&x, |x| {
            weight.with_views(|views| host::matmul(x, tokens, views[0], weight.activation(), &mut y))
        })
        .unwrap_or_else(|error| panic!("linear: input {shape}, packed weight {}: {error}", weight.shape()));
        if let Some(bias) = bias {
            assert_eq!(bias.shape(), Shape::from([weight.d_out()]), "bias of a linear layer");
            Self::with_floats(&bias, |bias| add_to_rows(&mut y, bias));
        }
        shape[last] = weight.d_out();
        floats_tensor::<Self>(y, shape, &Self::float_device(&x), x.dtype().into())
    }

    /// One product a group: `x [tokens, d_in]` is sorted by group, `counts [groups]` says how many rows each has.
    /// `[tokens, d_out]`; a group without rows costs nothing.
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
    /// On the other [`PackError`]s.
    fn fake_quantize_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let (shape, device, dtype) = (weight.shape(), Self::float_device(&weight), weight.dtype().into());
        let faked = match format {
            // Straight to the values, without codes in between.
            WeightFormat::Nvfp4 => weight_dims(&shape, format).and_then(|(groups, d_in, d_out)| {
                let amax = group_amax::<Self>(amax, groups, format)?;
                let values = Self::with_floats(&weight, |w| round_groups(w, d_in, d_out, amax.as_deref()))?;
                Ok(floats_tensor::<Self>(values, shape.clone(), &device, dtype))
            }),
            WeightFormat::Fp8 => Self::pack_weight(weight, format, amax).map(|packed| Self::unpack_weight(&packed)),
        };
        match faked {
            Ok(values) => values,
            Err(PackError::NonFinite { .. }) => Self::float_full(shape, f32::NAN.into(), &device, dtype),
            Err(PackError::Kernel(Error::Amax { amax, .. })) if !amax.is_finite() => {
                Self::float_full(shape, f32::NAN.into(), &device, dtype)
            }
            Err(error) => panic!("fake quantization of a weight {shape}: {error}"),
        }
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
}

#[cfg(test)]
mod tests;
