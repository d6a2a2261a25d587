//! What the reference route needs on the host: packing group by group, and tensors from and to it.
use burn_backend::{
    Backend, DType, FloatDType, IntDType, Shape, Slice, TensorData, TensorMetadata, read_sync,
    tensor::{Device, FloatTensor, IntTensor},
};
use kernels_cubecl::{BLOCK, Error, OuterScale, WeightLayout, host};

use crate::{Nvfp4Backend, PackError, PackedWeight, WeightFormat, packed_weight::RowBytes};

/// `(groups, d_in, d_out)` of a weight that can be packed.
pub(crate) fn weight_dims(shape: &Shape, format: WeightFormat) -> Result<(usize, usize, usize), PackError> {
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
pub(crate) struct PackedGroups {
    pub(crate) codes: Vec<u8>,
    pub(crate) block_scales: Vec<u8>,
    pub(crate) outer_scales: Vec<f32>,
    pub(crate) outer_scales_shape: Shape,
}

/// Packs `groups` matrices `[d_in, d_out]`, each under its own outer scale.
pub(crate) fn pack_groups(
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
            block_scales: Vec::with_capacity(rows * d_in / BLOCK),
            outer_scales: Vec::with_capacity(groups),
            outer_scales_shape: [groups].into(),
        },
        WeightFormat::Fp8 => PackedGroups {
            codes: Vec::with_capacity(rows * d_in),
            block_scales: Vec::new(),
            outer_scales: Vec::with_capacity(rows),
            outer_scales_shape: [rows].into(),
        },
    };
    for group in 0..groups {
        let w = &w[group * d_in * d_out..(group + 1) * d_in * d_out];
        let layout = WeightLayout::Transposed;
        let located = |error| located(error, group);
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

/// The largest magnitudes that the outer scales of `groups` weights cover, where they are given and matter.
pub(crate) fn group_amax<B: Nvfp4Backend>(
    amax: Option<FloatTensor<B>>,
    groups: usize,
    format: WeightFormat,
) -> Result<Option<Vec<f32>>, PackError> {
    let amax = match amax {
        Some(amax) if format == WeightFormat::Nvfp4 => Some(B::with_floats(&amax, <[f32]>::to_vec)),
        _ => None,
    };
    match amax.as_ref().map(Vec::len).filter(|len| *len != groups) {
        Some(actual) => Err(PackError::AmaxLength {
            expected: groups,
            actual,
        }),
        None => Ok(amax),
    }
}

/// What matrices `[d_in, d_out]` decode to once packed by [`pack_groups`], bit for bit.
pub(crate) fn round_groups(w: &[f32], d_in: usize, d_out: usize, amax: Option<&[f32]>) -> Result<Vec<f32>, PackError> {
    let mut values = vec![0.0; w.len()];
    let size = (d_in * d_out).max(1);
    for (group, (w, values)) in w.chunks(size).zip(values.chunks_mut(size)).enumerate() {
        let amax = amax.map(|amax| amax[group]);
        host::fake_quantize_weight(w, d_out, d_in, WeightLayout::Transposed, amax, values)
            .map_err(|error| located(error, group))?;
    }
    Ok(values)
}

/// Names the place in a weight `[groups, d_in, d_out]`, whose rows are a kernel's columns.
fn located(error: Error, group: usize) -> PackError {
    match error {
        Error::NonFinite { row, column, value } => PackError::NonFinite {
            group,
            row: column,
            column: row,
            value,
        },
        error => PackError::Kernel(error),
    }
}

/// A U8 tensor. Made flat and reshaped: a device may otherwise leave gaps between rows.
fn bytes_tensor<B: Backend>(values: Vec<u8>, shape: Shape, device: &Device<B>) -> IntTensor<B> {
    let flat = [values.len()];
    let tensor = B::int_from_data(TensorData::new(values, flat), device);
    let tensor = match tensor.dtype() {
        DType::U8 => tensor,
        _ => B::int_cast(tensor, IntDType::U8),
    };
    B::int_reshape(tensor, shape)
}

/// [`Storage::codes`](crate::Storage::codes) from bytes without padding.
pub(crate) fn codes_tensor<B: Nvfp4Backend>(
    bytes: Vec<u8>,
    format: WeightFormat,
    d_in: usize,
    rows: usize,
    device: &Device<B>,
) -> IntTensor<B> {
    let [codes, _] = RowBytes::of::<B>(format, d_in);
    bytes_tensor::<B>(codes.pad(bytes), [rows, codes.stored].into(), device)
}

/// [`Storage::block_scales`](crate::Storage::block_scales) from bytes without padding.
pub(crate) fn block_scales_tensor<B: Nvfp4Backend>(
    bytes: Vec<u8>,
    format: WeightFormat,
    d_in: usize,
    rows: usize,
    device: &Device<B>,
) -> IntTensor<B> {
    let [_, scales] = RowBytes::of::<B>(format, d_in);
    let shape = match format {
        WeightFormat::Nvfp4 => Shape::from([rows, scales.stored]),
        WeightFormat::Fp8 => Shape::from([0]),
    };
    bytes_tensor::<B>(scales.pad(bytes), shape, device)
}

/// A float tensor of type `dtype`.
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
pub(crate) fn rows(shape: &Shape) -> (usize, usize) {
    let last = shape.num_dims() - 1;
    ((0..last).map(|dim| shape[dim]).product(), shape[last])
}

/// Adds `bias [n]` to each row of `y [.., n]`.
pub(crate) fn add_to_rows(y: &mut [f32], bias: &[f32]) {
    if bias.is_empty() {
        return;
    }
    for row in y.chunks_exact_mut(bias.len()) {
        for (y, bias) in row.iter_mut().zip(bias) {
            *y += bias;
        }
    }
}

/// [`Nvfp4Backend::grouped_linear`](crate::Nvfp4Backend::grouped_linear) in operations of Burn: one slice and one matmul a group.
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

/// [`Nvfp4Backend::grouped_linear_weight_backward`](crate::Nvfp4Backend::grouped_linear_weight_backward) likewise.
pub(crate) fn grouped_weight_gradient_by_slices<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    counts: IntTensor<B>,
) -> FloatTensor<B> {
    let (d_in, d_out) = (x.shape()[1], grad.shape()[1]);
    let counts = read_counts::<B>(counts);
    let (device, dtype) = (B::float_device(&x), x.dtype().into());
    if counts.is_empty() {
        return B::float_zeros(Shape::from([0, d_in, d_out]), &device, dtype);
    }
    let mut first = 0;
    let by_group = counts.into_iter().map(|rows| {
        let range = [Slice::from(first..first + rows)];
        first += rows;
        let product = if rows == 0 {
            B::float_zeros(Shape::from([d_in, d_out]), &device, dtype)
        } else {
            let x = B::float_slice(x.clone(), &range);
            B::float_matmul(B::float_transpose(x), B::float_slice(grad.clone(), &range))
        };
        B::float_reshape(product, Shape::from([1, d_in, d_out]))
    });
    B::float_cat(by_group.collect(), 0)
}

/// The rows of each group.
fn read_counts<B: Backend>(counts: IntTensor<B>) -> Vec<usize> {
    let counts = read_sync(B::int_into_data(counts)).expect("a tensor can be read back");
    counts
        .iter::<i64>()
        .map(|count| usize::try_from(count).unwrap_or_else(|_| panic!("grouped linear: {count} rows in a group")))
        .collect()
}

/// Refuses an input that does not match the packed weight of a linear layer.
pub(crate) fn check_linear<B: Nvfp4Backend>(x: &Shape, weight: &PackedWeight<B>) {
    assert!(
        x[x.num_dims() - 1] == weight.d_in() && weight.groups() == 1,
        "linear: input {x} does not match the packed weight {}: expected a last dimension of {}",
        weight.shape(),
        weight.d_in()
    );
}

/// Refuses a bias that does not match the packed weight of a linear layer.
pub(crate) fn check_bias<B: Nvfp4Backend>(bias: Option<Shape>, weight: &PackedWeight<B>) {
    if let Some(bias) = bias {
        assert_eq!(bias, Shape::from([weight.d_out()]), "bias of a linear layer");
    }
}

/// Refuses operands of a grouped product that do not belong together; what the counts are, only their device knows.
#[cfg(feature = "cubecl")]
pub(crate) fn check_grouped(x: &Shape, weights: &Shape, counts: &Shape) {
    check_grouped_input(x, weights);
    assert!(
        counts.num_elements() == weights[0],
        "grouped linear: expected {} counts, got {}",
        weights[0],
        counts.num_elements()
    );
}

fn check_grouped_input(x: &Shape, weights: &Shape) {
    assert_eq!(
        weights.num_dims(),
        3,
        "grouped linear: expected weights [groups, d_in, d_out], got {weights}"
    );
    assert!(
        x.num_dims() == 2 && x[1] == weights[1],
        "grouped linear: input {x} does not match the weights {weights}: expected [tokens, {}]",
        weights[1]
    );
}

/// Shape of the gradient of grouped weights, `[groups, d_in, d_out]`; refuses operands of different lengths.
#[cfg(feature = "cubecl")]
pub(crate) fn check_outer(x: &Shape, grad: &Shape, counts: &Shape) -> Shape {
    assert!(
        x.num_dims() == 2 && grad.num_dims() == 2 && x[0] == grad[0],
        "gradient of a grouped linear: input {x} and gradient {grad} differ in rows"
    );
    Shape::from([counts.num_elements(), x[1], grad[1]])
}

/// Reads the rows of each group, and checks them against `x [tokens, d_in]`.
pub(crate) fn group_counts<B: Backend>(counts: IntTensor<B>, x: &Shape, weights: &Shape) -> Vec<usize> {
    check_grouped_input(x, weights);
    let groups = weights[0];
    let counts = read_counts::<B>(counts);
    assert!(
        counts.len() == groups && counts.iter().sum::<usize>() == x[0],
        "grouped linear: expected {groups} counts that sum to {} rows, got {counts:?}",
        x[0]
    );
    counts
}
