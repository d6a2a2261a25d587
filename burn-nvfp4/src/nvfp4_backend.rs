//! What a backend must know for `Nvfp4` to wrap it.
//!
//! The defaults compute on the host: they read tensors back and call `kernels_cubecl::host`. A backend that can lend
//! its memory overrides [`with_floats`](Nvfp4Backend::with_floats) and [`with_bytes`](Nvfp4Backend::with_bytes), one
//! with kernels of its own the operations.
use burn_backend::{
    Backend, DType, FloatDType, IntDType, Shape, Slice, TensorData, TensorMetadata, read_sync,
    tensor::{Device, FloatTensor, IntTensor},
};
use kernels_cubecl::{Activation, BLOCK, Error, OuterScale, WeightLayout, host};

use crate::{PackError, PackedWeight, Storage, WeightFormat};

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
        let amax = match amax {
            Some(amax) if format == WeightFormat::Nvfp4 => Some(Self::with_floats(&amax, <[f32]>::to_vec)),
            _ => None,
        };
        if let Some(actual) = amax.as_ref().map(Vec::len).filter(|len| *len != groups) {
            return Err(PackError::AmaxLength {
                expected: groups,
                actual,
            });
        }
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
            divide: false,
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
        match Self::pack_weight(weight, format, amax) {
            Ok(packed) => Self::unpack_weight(&packed),
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

    /// Sum over all rows of `x [.., k]` of each channel's squared first-pass residual, `[k]`.
    fn residual_energy(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let shape = x.shape();
        let (tokens, k) = rows(&shape);
        let energy = Self::with_floats(&x, |x| host::residual_energy(x, tokens, k))
            .unwrap_or_else(|error| panic!("residual energy of activations {shape}: {error}"));
        floats_tensor::<Self>(energy, Shape::from([k]), &Self::float_device(&x), FloatDType::F32)
    }

    /// [`packed_grouped_linear`](Nvfp4Backend::packed_grouped_linear) with dense weights `[groups, d_in, d_out]`.
    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        grouped_linear_by_slices::<Self>(x, weight, counts)
    }
}

/// `(groups, d_in, d_out)` of a weight that can be packed.
fn weight_dims(shape: &Shape, format: WeightFormat) -> Result<(usize, usize, usize), PackError> {
    let (groups, d_in, d_out) = match shape.num_dims() {
        2 => (1, shape[0], shape[1]),
        3 => (shape[0], shape[1], shape[2]),
        _ => return Err(PackError::Rank { shape: shape.clone() }),
    };
    if format == WeightFormat::Nvfp4 && !d_in.is_multiple_of(BLOCK) {
        return Err(PackError::UnalignedInput { d_in });
    }
    Ok((groups, d_in, d_out))
}

/// Codes and scales of all groups, one after the other.
struct PackedGroups {
    codes: Vec<u8>,
    codes_shape: Shape,
    block_scales: Vec<u8>,
    block_scales_shape: Shape,
    outer_scales: Vec<f32>,
    outer_scales_shape: Shape,
}

fn pack_groups(
    w: &[f32],
    groups: usize,
    d_in: usize,
    d_out: usize,
    format: WeightFormat,
    amax: Option<&[f32]>,
) -> Result<PackedGroups, PackError> {
    let rows = groups * d_out;
    let mut packed = match format {
        WeightFormat::Nvfp4 => PackedGroups {
            codes: Vec::with_capacity(rows * d_in / 2),
            codes_shape: [rows, d_in / 2].into(),
            block_scales: Vec::with_capacity(rows * d_in / BLOCK),
            block_scales_shape: [rows, d_in / BLOCK].into(),
            outer_scales: Vec::with_capacity(groups),
            outer_scales_shape: [groups].into(),
        },
        WeightFormat::Fp8 => PackedGroups {
            codes: Vec::with_capacity(rows * d_in),
            codes_shape: [rows, d_in].into(),
            block_scales: Vec::new(),
            block_scales_shape: [0].into(),
            outer_scales: Vec::with_capacity(rows),
            outer_scales_shape: [rows].into(),
        },
    };
    for group in 0..groups {
        let w = &w[group * d_in * d_out..(group + 1) * d_in * d_out];
        let layout = WeightLayout::Transposed;
        let located = |error| match error {
            Error::NonFinite { row, column, value } => PackError::NonFinite {
                group,
                row: column,
                column: row,
                value,
            },
            error => PackError::Kernel(error),
        };
        match format {
            WeightFormat::Nvfp4 => {
                let amax = amax.map(|amax| amax[group]);
                let weight = host::quantize_weight(w, d_out, d_in, layout, amax).map_err(located)?;
                packed.codes.extend(weight.codes);
                packed.block_scales.extend(weight.block_scales);
                let (OuterScale::Multiply(scale) | OuterScale::Divide(scale)) = weight.outer_scale;
                packed.outer_scales.push(scale);
            }
            WeightFormat::Fp8 => {
                let weight = host::quantize_weight_fp8(w, d_out, d_in, layout).map_err(located)?;
                packed.codes.extend(weight.codes);
                packed.outer_scales.extend(weight.channel_scales);
            }
        }
    }
    Ok(packed)
}

pub(crate) fn bytes_tensor<B: Backend>(values: Vec<u8>, shape: Shape, device: &Device<B>) -> IntTensor<B> {
    let tensor = B::int_from_data(TensorData::new(values, shape), device);
    match tensor.dtype() {
        DType::U8 => tensor,
        _ => B::int_cast(tensor, IntDType::U8),
    }
}

pub(crate) fn floats_tensor<B: Backend>(
    values: Vec<f32>,
    shape: Shape,
    device: &Device<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let tensor = B::float_from_data(TensorData::new(values, shape), device);
    match tensor.dtype() == dtype.into() {
        true => tensor,
        false => B::float_cast(tensor, dtype),
    }
}

/// `(product of all dimensions but the last, the last)`.
fn rows(shape: &Shape) -> (usize, usize) {
    let last = shape.num_dims() - 1;
    ((0..last).map(|dim| shape[dim]).product(), shape[last])
}

fn add_to_rows(y: &mut [f32], bias: &[f32]) {
    if bias.is_empty() {
        return;
    }
    for row in y.chunks_exact_mut(bias.len()) {
        for (y, bias) in row.iter_mut().zip(bias) {
            *y += bias;
        }
    }
}

/// [`Nvfp4Backend::grouped_linear`] in operations of Burn: one slice and one matmul a group.
pub(crate) fn grouped_linear_by_slices<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    counts: IntTensor<B>,
) -> FloatTensor<B> {
    let (shape, dims) = (x.shape(), weight.shape());
    let counts = group_counts::<B>(counts, &shape, &dims);
    let mut parts = Vec::new();
    let mut start = 0;
    for (group, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
        let rows = B::float_slice(x.clone(), &[Slice::from(start..start + count), Slice::full()]);
        let matrix = B::float_slice(
            weight.clone(),
            &[Slice::from(group..group + 1), Slice::full(), Slice::full()],
        );
        let matrix = B::float_reshape(matrix, Shape::from([dims[1], dims[2]]));
        parts.push(B::float_matmul(rows, matrix));
        start += count;
    }
    if parts.is_empty() {
        let shape = Shape::from([0, dims[2]]);
        return B::float_zeros(shape, &B::float_device(&x), x.dtype().into());
    }
    B::float_cat(parts, 0)
}

/// Reads the rows of each group, and checks them against `x [tokens, d_in]`.
pub(crate) fn group_counts<B: Backend>(counts: IntTensor<B>, x: &Shape, weights: &Shape) -> Vec<usize> {
    assert_eq!(
        weights.num_dims(),
        3,
        "grouped linear: expected weights [groups, d_in, d_out], got {weights}"
    );
    let (groups, d_in) = (weights[0], weights[1]);
    assert!(
        x.num_dims() == 2 && x[1] == d_in,
        "grouped linear: input {x} does not match the weights {weights}: expected [tokens, {d_in}]"
    );
    let counts = read_sync(B::int_into_data(counts)).expect("a tensor can be read back");
    let counts: Vec<usize> = counts
        .iter::<i64>()
        .map(|count| usize::try_from(count).unwrap_or_else(|_| panic!("grouped linear: {count} rows in a group")))
        .collect();
    assert!(
        counts.len() == groups && counts.iter().sum::<usize>() == x[0],
        "grouped linear: expected {groups} counts that sum to {} rows, got {counts:?}",
        x[0]
    );
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Nvfp4, Nvfp4Tensor};
    use burn_backend::tensor::Device;
    use burn_flex::Flex;
    use kernels_cubecl::{Compensation, Granularity, ResidualMask};

    /// A backend that lends nothing and has no kernels: every operation reads back.
    type Plain = Nvfp4<Flex>;
    impl Nvfp4Backend for Plain {}

    fn device() -> Device<Flex> {
        Default::default()
    }
    fn noise(seed: usize, shape: &[usize]) -> TensorData {
        let count: usize = shape.iter().product();
        let values = (0..count)
            .map(|i| (((i + seed) * 7919 % 1013) as f32 - 506.0) / 300.0)
            .collect();
        TensorData::new::<f32, _>(values, Shape::from(shape.to_vec()))
    }
    fn flex(data: TensorData) -> FloatTensor<Flex> {
        use burn_backend::ops::FloatTensorOps;
        Flex::float_from_data(data, &device())
    }
    fn plain(data: TensorData) -> FloatTensor<Plain> {
        Nvfp4Tensor::Dense(flex(data))
    }
    fn same(on_plain: FloatTensor<Plain>, on_flex: FloatTensor<Flex>) {
        let read = |tensor: &FloatTensor<Flex>| Flex::with_floats(tensor, |v| v.iter().map(|v| v.to_bits()).collect());
        let (a, b): (Vec<u32>, Vec<u32>) = (read(&on_plain.clone().dense()), read(&on_flex));
        assert_eq!((on_plain.shape(), a), (on_flex.shape(), b));
    }

    #[test]
    fn the_defaults_compute_what_flex_computes() {
        let counts = TensorData::new(vec![2i32, 0, 3], [3]);
        let mask = ResidualMask::from_channels(&[true; 32]);
        for (format, activation) in [
            (WeightFormat::Nvfp4, Activation::Full),
            (WeightFormat::Nvfp4, Activation::Nvfp4),
            (WeightFormat::Nvfp4, Activation::Compensated(Compensation::Mask(mask))),
            (
                WeightFormat::Nvfp4,
                Activation::Compensated(Compensation::PerToken {
                    granularity: Granularity::Channel,
                    fraction: 0.3,
                }),
            ),
            (WeightFormat::Fp8, Activation::Fp8),
        ] {
            let amax = noise(3, &[1]).dtype;
            assert_eq!(amax, DType::F32);
            let amax = TensorData::new(vec![4.0f32], [1]);
            let on_flex = Flex::pack_weight(flex(noise(1, &[32, 6])), format, Some(flex(amax.clone()))).unwrap();
            let on_plain = Plain::pack_weight(plain(noise(1, &[32, 6])), format, Some(plain(amax))).unwrap();
            let on_flex = on_flex.with_activation(activation.clone()).unwrap();
            let on_plain = on_plain.with_activation(activation.clone()).unwrap();
            assert_eq!(on_plain.codes(), on_flex.codes());
            assert_eq!(on_plain.block_scales(), on_flex.block_scales());
            assert_eq!(on_plain.outer_scales(), on_flex.outer_scales());
            same(Plain::unpack_weight(&on_plain), Flex::unpack_weight(&on_flex));
            let (x, bias) = (noise(5, &[2, 3, 32]), noise(7, &[6]));
            same(
                Plain::packed_linear_bias(plain(x.clone()), &on_plain, Some(plain(bias.clone()))),
                Flex::packed_linear_bias(flex(x.clone()), &on_flex, Some(flex(bias))),
            );
            same(
                Plain::fake_quantize_activations(plain(x.clone()), &activation),
                Flex::fake_quantize_activations(flex(x), &activation),
            );
            let stack = noise(9, &[3, 32, 6]);
            same(
                Plain::fake_quantize_weight(plain(stack.clone()), format, None),
                Flex::fake_quantize_weight(flex(stack.clone()), format, None),
            );
            let on_flex = Flex::pack_weight(flex(stack.clone()), format, None).unwrap();
            let on_plain = Plain::pack_weight(plain(stack.clone()), format, None).unwrap();
            let x = noise(11, &[5, 32]);
            use burn_backend::ops::IntTensorOps;
            let int = |data: TensorData| Flex::int_from_data(data, &device());
            same(
                Plain::packed_grouped_linear(plain(x.clone()), &on_plain, int(counts.clone())),
                Flex::packed_grouped_linear(flex(x.clone()), &on_flex, int(counts.clone())),
            );
            same(
                Plain::grouped_linear(plain(x.clone()), plain(stack.clone()), int(counts.clone())),
                Flex::grouped_linear(flex(x.clone()), flex(stack), int(counts.clone())),
            );
            same(Plain::residual_energy(plain(x.clone())), Flex::residual_energy(flex(x)));
        }
    }

    #[test]
    fn packing_twice_over_still_multiplies() {
        let w = Plain::pack_weight(plain(noise(1, &[32, 6])), WeightFormat::Nvfp4, None).unwrap();
        let twice: FloatTensor<Nvfp4<Plain>> = Nvfp4Tensor::Packed(w.clone());
        use burn_backend::ops::FloatTensorOps;
        let y = Nvfp4::<Plain>::float_matmul(Nvfp4Tensor::Dense(plain(noise(2, &[4, 32]))), twice);
        same(y.dense(), Plain::packed_linear(plain(noise(2, &[4, 32])), &w).dense());
    }

    #[test]
    fn a_non_finite_weight_fakes_nan_everywhere() {
        let mut values: Vec<f32> = noise(1, &[32, 6]).to_vec().unwrap();
        values[40] = f32::NAN;
        let weight = flex(TensorData::new(values, [32, 6]));
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            let faked = Flex::fake_quantize_weight(weight.clone(), format, None);
            Flex::with_floats(&faked, |values| {
                assert!(values.len() == 192 && values.iter().all(|v| v.is_nan()))
            });
        }
        let amax = flex(TensorData::new(vec![f32::NAN], [1]));
        let faked = Flex::fake_quantize_weight(flex(noise(1, &[32, 6])), WeightFormat::Nvfp4, Some(amax));
        Flex::with_floats(&faked, |values| assert!(values.iter().all(|v| v.is_nan())));
    }

    #[test]
    fn what_cannot_be_packed_is_said() {
        let error = |shape: &[usize]| Flex::pack_weight(flex(noise(1, shape)), WeightFormat::Nvfp4, None).unwrap_err();
        assert_eq!(error(&[20, 4]), PackError::UnalignedInput { d_in: 20 });
        assert_eq!(
            error(&[16]).to_string(),
            "expected a weight [d_in, d_out] or [groups, d_in, d_out], got shape [16]"
        );
        assert!(matches!(error(&[2, 2, 16, 4]), PackError::Rank { .. }));
        let amax = |values: Vec<f32>| {
            let len = values.len();
            let amax = flex(TensorData::new(values, [len]));
            Flex::pack_weight(flex(noise(1, &[2, 16, 4])), WeightFormat::Nvfp4, Some(amax)).map(|_| ())
        };
        assert_eq!(amax(vec![9.0]), Err(PackError::AmaxLength { expected: 2, actual: 1 }));
        assert!(
            amax(vec![9.0, 1e-3])
                .unwrap_err()
                .to_string()
                .starts_with("amax 0.001 given for a weight whose own is")
        );
        assert_eq!(amax(vec![9.0, 9.0]), Ok(()));
    }
}
