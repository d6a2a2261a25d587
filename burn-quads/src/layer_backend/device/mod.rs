//! GPUs: the kernels of [`kernels_cubecl::device`] in place of what Burn's operations would take dozens of launches for, with
//! one thread for each result of a sum, or wait for (Burn sorts on the host). The kernels are for f32; but for the logits of
//! experts, which are cast, other types take the definitions.
//!
//! Burn's `scatter` and `select_assign` walk over all indices one after the other, with a thread for each of the other
//! dimensions alone: for the rows of a batch that is milliseconds, so rows are gathered instead.
mod fusion;

use super::{ExpertOrder, LayerBackend, composite, takes_dense_product};
use crate::modules::{attention::LayerCache, rotary::Rotation};
use burn::{
    prelude::Backend,
    tensor::{DType, Int, Shape, Tensor, TensorPrimitive},
};
use burn_backend::TensorMetadata;
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::server::Handle;
use kernels_cubecl::device::{self, Element, KeyValueCache, MAX_VALUES, Matrix, RotaryRows};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> LayerBackend for CubeBackend<R, F, I, BT> {
    fn has_dense_product(device: &Self::Device) -> bool {
        device::dense_products_use_bf16(&R::client(device))
    }

    fn dense_product(x: Tensor<Self, 2>, w: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !takes_dense_product(&x, &w) {
            return x.matmul(w);
        }
        let (x, w) = (primitive(x), primitive(w));
        let y = device::matmul_dense(&x.client, &matrix(&x), &matrix(&w));
        float(&x, done(y))
    }

    fn dense_product_weight_backward(x: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !takes_dense_product(&x, &grad) {
            return x.transpose().matmul(grad);
        }
        let (x, grad) = (primitive(x), primitive(grad));
        let dw = device::outer_product_dense(&x.client, &matrix(&x), &matrix(&grad));
        float(&x, done(dw))
    }

    fn rms_norm(x: Tensor<Self, 2>, gamma: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        if !(fits_kernels(&x) && fits_kernels(&gamma)) {
            return composite::rms_norm(x, gamma, epsilon);
        }
        let (x, gamma) = (primitive(x), primitive(gamma));
        let y = device::rms_norm(&x.client, &matrix(&x), &one_row(gamma), epsilon as f32);
        float(&x, done(y))
    }

    fn rms_norm_backward(
        x: Tensor<Self, 2>,
        gamma: Tensor<Self, 1>,
        epsilon: f64,
        grad: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        if !(fits_kernels(&x) && fits_kernels(&gamma) && fits_kernels(&grad)) {
            return composite::rms_norm_backward(x, gamma, epsilon, grad);
        }
        let (x, gamma, grad) = (primitive(x), primitive(gamma), primitive(grad));
        let gradients = done(device::rms_norm_backward(
            &x.client,
            &matrix(&x),
            &one_row(gamma),
            epsilon as f32,
            &matrix(&grad),
        ));
        (
            float(&x, gradients.x),
            composite::column_sums(float(&x, gradients.gamma_rows)),
        )
    }

    fn swiglu(gate_up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !fits_kernels(&gate_up) {
            return composite::swiglu(gate_up);
        }
        let gate_up = primitive(gate_up);
        let y = device::swiglu(&gate_up.client, &matrix(&gate_up));
        float(&gate_up, done(y))
    }

    fn swiglu_backward(gate_up: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !(fits_kernels(&gate_up) && fits_kernels(&grad)) {
            return composite::swiglu_backward(gate_up, grad);
        }
        let (gate_up, grad) = (primitive(gate_up), primitive(grad));
        let slopes = device::swiglu_backward(&gate_up.client, &matrix(&gate_up), &matrix(&grad));
        float(&gate_up, done(slopes))
    }

    fn softmax_rows(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !fits_kernels(&x) {
            return composite::softmax_rows(x);
        }
        let x = primitive(x);
        let y = device::softmax(&x.client, &matrix(&x));
        float(&x, done(y))
    }

    fn softmax_rows_backward(y: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !(fits_kernels(&y) && fits_kernels(&grad)) {
            return composite::softmax_rows_backward(y, grad);
        }
        let (y, grad) = (primitive(y), primitive(grad));
        let dx = device::softmax_backward(&y.client, &matrix(&y), &matrix(&grad));
        float(&y, done(dx))
    }

    fn log_softmax_parts(x: Tensor<Self, 2>) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let [rows, columns] = x.dims();
        if !fits_kernels(&x) || rows * columns == 0 {
            return composite::log_softmax_parts(x);
        }
        let like = primitive(x.clone());
        let parts = done(device::log_softmax_parts(&like.client, &matrix(&like)));
        (x - float(&like, parts.largest), float(&like, parts.log_sum))
    }

    fn rotate(x: Tensor<Self, 4>, rotation: &Rotation<Self>) -> Tensor<Self, 4> {
        if !(fits_kernels(&x) && fits_kernels(&rotation.cos) && fits_kernels(&rotation.sin)) {
            return rotation.apply(x);
        }
        check_rotation(&x, rotation);
        let [batch, seq, heads, d] = x.dims();
        let [tables, _, _] = rotation.cos.dims();
        let rows = |table: &Tensor<Self, 3>| {
            let table = into_contiguous(primitive(table.clone()));
            Matrix::contiguous(table.handle, Element::F32, tables * seq, d)
        };
        let table = RotaryRows {
            cos: rows(&rotation.cos),
            sin: rows(&rotation.sin),
        };
        let x = into_contiguous(primitive(x));
        let heads_of_all = Matrix::contiguous(x.handle.clone(), Element::F32, batch * seq * heads, d);
        let y = device::rotate_heads(&x.client, &heads_of_all, heads, &table);
        float::<R, F, I, BT, 2>(&x, done(y)).reshape([batch, seq, heads, d])
    }

    fn attend_to_cache(
        query: Tensor<Self, 3>,
        cache: &LayerCache<Self>,
        places: Tensor<Self, 2, Int>,
        longest: usize,
    ) -> Tensor<Self, 2> {
        check_cache(&query, cache, &places);
        let [tokens, heads, head_dim] = query.dims();
        let [slots, kv_heads, _, key_columns] = cache.keys.dims();
        let [_, _, value_rows, _] = cache.values.dims();
        let f32s = fits_kernels(&query) && fits_kernels(&cache.keys) && fits_kernels(&cache.values);
        let client = R::client(&query.device());
        if !(f32s && KeyValueCache::fits(&client, heads / kv_heads, head_dim)) {
            return composite::attend_to_cache(query, cache, places, longest);
        }
        let whole = |x: &Tensor<Self, 4>| into_contiguous(primitive(x.clone())).handle;
        let cache = KeyValueCache {
            keys: whole(&cache.keys),
            values: whole(&cache.values),
            slots,
            kv_heads,
            head_dim,
            key_columns,
            value_rows,
        };
        let query = into_contiguous(primitive(query));
        let queries = Matrix::contiguous(query.handle.clone(), Element::F32, tokens, heads * head_dim);
        let places = into_contiguous(places.cast(DType::I32).into_primitive()).handle;
        let y = device::cached_attention(&query.client, &queries, &cache, &places);
        float(&query, done(y))
    }

    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        let [tokens, _] = logits.dims();
        // Nothing is launched over no element, which CUDA refuses; a cast would be.
        if tokens == 0 {
            return Tensor::empty([0, k], &logits.device());
        }
        let logits = primitive(logits.cast(DType::F32));
        let chosen = device::top_experts(&logits.client, &matrix(&logits), k);
        int(&logits, done(chosen), [tokens, k])
    }

    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        let [rows] = expert_ids.dims();
        if rows == 0 {
            let nothing = || Tensor::empty([0], &expert_ids.device());
            return ExpertOrder {
                order: nothing(),
                inverse: nothing(),
                counts: Tensor::zeros([experts], &expert_ids.device()),
            };
        }
        let ids = into_contiguous(expert_ids.cast(DType::I32).into_primitive());
        let sorted = device::order_by_expert(&ids.client, &ids.handle, rows, experts);
        ExpertOrder {
            order: int(&ids, sorted.order, [rows]),
            inverse: int(&ids, sorted.inverse, [rows]),
            counts: int(&ids, sorted.counts, [experts]),
        }
    }

    fn permute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>, tokens: usize) -> Tensor<Self, 2> {
        permute_rows_backward(grad, order, tokens)
    }
}

/// # Panics
/// When the rotations are not those of the heads' tokens.
fn check_rotation<B: Backend>(x: &Tensor<B, 4>, rotation: &Rotation<B>) {
    let [batch, seq, _, d] = x.dims();
    for table in [&rotation.cos, &rotation.sin] {
        let [tables, table_seq, table_d] = table.dims();
        assert!(
            [table_seq, table_d] == [seq, d] && (tables == 1 || tables == batch) && d.is_multiple_of(2),
            "heads [{batch}, {seq}, .., {d}], rotations [{tables}, {table_seq}, {table_d}]"
        );
    }
}

/// # Panics
/// When queries or places are not those of the cache.
fn check_cache<B: Backend>(query: &Tensor<B, 3>, cache: &LayerCache<B>, places: &Tensor<B, 2, Int>) {
    let ([tokens, heads, d], keys, values) = (query.dims(), cache.keys.dims(), cache.values.dims());
    assert!(
        keys[..3] == [values[0], values[1], d]
            && values[3] == d
            && keys[3] >= values[2]
            && keys[1] > 0
            && heads.is_multiple_of(keys[1]),
        "queries [{tokens}, {heads}, {d}], keys {keys:?}, values {values:?}"
    );
    assert_eq!(places.dims(), [tokens, 2], "slot and position of each token");
}

/// Whether the kernels take a tensor.
fn fits_kernels<B: Backend, const D: usize>(x: &Tensor<B, D>) -> bool {
    x.dtype() == DType::F32 && x.shape().num_elements() <= MAX_VALUES
}

fn primitive<R, F, I, BT, const D: usize>(x: Tensor<CubeBackend<R, F, I, BT>, D>) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    x.into_primitive().tensor()
}

/// An f32 tensor of rank 2, whatever its strides, within the reach of the kernels.
fn matrix<R: CubeRuntime>(x: &CubeTensor<R>) -> Matrix {
    let [rows, columns] = x.shape().dims();
    let last = {
        let strides = x.meta.strides();
        rows.saturating_sub(1) * strides[0] + columns.saturating_sub(1) * strides[1]
    };
    let x = match last < MAX_VALUES {
        true => x.clone(),
        false => into_contiguous(x.clone()),
    };
    let strides = x.meta.strides();
    Matrix {
        strides: [strides[0], strides[1]],
        ..Matrix::contiguous(x.handle.clone(), Element::F32, rows, columns)
    }
}

/// An f32 tensor of rank 1.
fn one_row<R: CubeRuntime>(x: CubeTensor<R>) -> Matrix {
    let [columns] = x.shape().dims();
    Matrix::contiguous(into_contiguous(x).handle, Element::F32, 1, columns)
}

/// A kernel's result. Operands that do not fit are the caller's mistake, as in Burn's own operations.
fn done<T>(result: Result<T, device::Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// A kernel's matrix as a tensor, on the device of `like`.
fn float<R, F, I, BT, const D: usize>(like: &CubeTensor<R>, y: Matrix) -> Tensor<CubeBackend<R, F, I, BT>, D>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let shape = Shape::from([y.rows, y.columns]);
    let y = CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, y.handle, DType::F32);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// A kernel's i32s in the backend's type of whole numbers.
fn int<R, F, I, BT, const D: usize>(
    like: &CubeTensor<R>,
    values: Handle,
    shape: [usize; D],
) -> Tensor<CubeBackend<R, F, I, BT>, D, Int>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let values = CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        Shape::from(shape),
        values,
        DType::I32,
    );
    let values: Tensor<CubeBackend<R, F, I, BT>, D, Int> = Tensor::from_primitive(values);
    values.cast(I::dtype())
}

/// A token's rows are gathered side by side and added.
fn permute_rows_backward<B: Backend>(grad: Tensor<B, 2>, order: &ExpertOrder<B>, tokens: usize) -> Tensor<B, 2> {
    let [rows, d] = grad.dims();
    if rows == 0 {
        // No token either; nothing is launched over no element.
        return Tensor::empty([tokens, d], &grad.device());
    }
    grad.select(0, order.inverse.clone())
        .reshape([tokens, rows / tokens, d])
        .sum_dim(1)
        .reshape([tokens, d])
}
