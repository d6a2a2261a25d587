//! Flex, Burn's CPU backend: lends its memory, and runs one gemm a group.
use burn_backend::{DType, Shape, TensorData};
use burn_flex::{Flex, FlexTensor};
use gemm::Parallelism;
use rayon::prelude::*;

use crate::{
    Nvfp4Backend,
    reference::{group_counts, grouped_linear_by_slices},
};

impl Nvfp4Backend for Flex {
    fn with_floats<R>(tensor: &FlexTensor, read: impl FnOnce(&[f32]) -> R) -> R {
        if let Some(values) = tensor.as_slice::<f32>() {
            return read(values);
        }
        // Another layout, or another type: one copy, gone after the call.
        let data = tensor.clone().into_data().convert::<f32>();
        read(data.as_slice().expect("f32 data"))
    }
    fn with_bytes<R>(tensor: &FlexTensor, read: impl FnOnce(&[u8]) -> R) -> R {
        if let Some(values) = tensor.as_slice::<u8>() {
            return read(values);
        }
        let data = tensor.clone().into_data().convert::<u8>();
        read(data.as_slice().expect("u8 data"))
    }
    /// One gemm a group that has rows, straight into the output; groups run in parallel.
    fn grouped_linear(x: FlexTensor, weight: FlexTensor, counts: FlexTensor) -> FlexTensor {
        if x.dtype() != DType::F32 || weight.dtype() != DType::F32 {
            return grouped_linear_by_slices::<Flex>(x, weight, counts);
        }
        let (shape, dims) = (x.layout().shape().clone(), weight.layout().shape().clone());
        let counts = group_counts::<Flex>(counts, &shape, &dims);
        let (tokens, d_in, d_out) = (shape[0], dims[1], dims[2]);
        let mut y = vec![0.0; tokens * d_out];
        let (x, weight) = (Matrices::new(&x), Matrices::new(&weight));

        let mut groups = Vec::with_capacity(counts.len());
        let (mut start, mut rest) = (0, y.as_mut_slice());
        for (group, count) in counts.into_iter().enumerate() {
            let (out, after) = rest.split_at_mut(count * d_out);
            if count > 0 {
                groups.push((x.row(start), weight.matrix(group), count, out));
            }
            (start, rest) = (start + count, after);
        }
        groups
            .into_par_iter()
            .for_each(|(x, weight, rows, out)| gemm_into(out, x, weight, [rows, d_in, d_out]));
        FlexTensor::from_data(TensorData::new(y, Shape::from([tokens, d_out])))
    }
}

/// The storage of a tensor of rank 2 or 3, and where its parts lie in it.
struct Matrices<'a> {
    storage: &'a [f32],
    offset: usize,
    /// Of the first dimension, of the last but one, and of the last.
    strides: [isize; 3],
}

/// A matrix: where it starts in the storage, strides of rows and columns.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    storage: &'a [f32],
    start: isize,
    row_stride: isize,
    column_stride: isize,
}

impl<'a> Matrices<'a> {
    fn new(tensor: &'a FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        let rank = strides.len();
        Self {
            storage: tensor.storage(),
            offset: tensor.layout().start_offset(),
            strides: [strides[0], strides[rank - 2], strides[rank - 1]],
        }
    }
    /// The rows from `row` on, of a tensor of rank 2.
    fn row(&self, row: usize) -> Matrix<'a> {
        self.matrix(row)
    }
    /// Matrix `index` of a stack.
    fn matrix(&self, index: usize) -> Matrix<'a> {
        let [first, row_stride, column_stride] = self.strides;
        let start = self.offset as isize + index as isize * first;
        Matrix {
            storage: self.storage,
            start,
            row_stride,
            column_stride,
        }
    }
}

impl Matrix<'_> {
    /// Whether all of `rows × columns` lies within the storage.
    fn holds(&self, rows: usize, columns: usize) -> bool {
        let span = |n: usize, stride: isize| (n as isize - 1) * stride;
        let (rows, columns) = (span(rows, self.row_stride), span(columns, self.column_stride));
        let low = self.start + rows.min(0) + columns.min(0);
        let high = self.start + rows.max(0) + columns.max(0);
        low >= 0 && (high as usize) < self.storage.len()
    }
}

/// `out [m, n] = x [m, k] · w [k, n]`, `out` row-major.
fn gemm_into(out: &mut [f32], x: Matrix<'_>, w: Matrix<'_>, [m, k, n]: [usize; 3]) {
    assert_eq!(out.len(), m * n, "output of a grouped linear");
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(
        x.holds(m, k) && w.holds(k, n),
        "operands of a grouped linear lie outside their storage"
    );
    // As in Flex: threads pay off from about 192³ multiplications on.
    let parallelism = match m * k * n {
        0..7_077_888 => Parallelism::None,
        _ => Parallelism::Rayon(0),
    };
    // SAFETY: `out` has m · n elements and is ours alone; both operands lie in their storage, checked above.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            x.storage.as_ptr().offset(x.start),
            x.column_stride,
            x.row_stride,
            w.storage.as_ptr().offset(w.start),
            w.column_stride,
            w.row_stride,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
