//! GPUs: what in the definitions would wait for the device, or keep one thread of it busy. Burn sorts on the host; the few
//! largest of a row, and an order by expert, need no sort. Burn's `scatter` and `select_assign` walk over all indices one after
//! the other, with a thread for each of the other dimensions alone: for the rows of a batch that is milliseconds.
use super::{ExpertOrder, LayerBackend};
use burn::{
    prelude::Backend,
    tensor::{DType, IndexingUpdateOp, Int, Tensor},
};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::{Fusion, FusionBackend};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> LayerBackend for CubeBackend<R, F, I, BT> {
    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        top_experts(logits, k)
    }
    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        order_by_expert(expert_ids, experts)
    }
    fn permute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>, tokens: usize) -> Tensor<Self, 2> {
        permute_rows_backward(grad, order, tokens)
    }
}

impl<B: FusionBackend + LayerBackend> LayerBackend for Fusion<B> {
    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        top_experts(logits, k)
    }
    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        order_by_expert(expert_ids, experts)
    }
    fn permute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>, tokens: usize) -> Tensor<Self, 2> {
        permute_rows_backward(grad, order, tokens)
    }
}

/// In place of NaN, which has no place in an order; finite, so that it can be found.
const NOT_A_NUMBER: f32 = -1e38;

/// The largest, then the largest of the others, and so on.
fn top_experts<B: Backend>(logits: Tensor<B, 2>, k: usize) -> Tensor<B, 2, Int> {
    let [tokens, _] = logits.dims();
    if tokens == 0 {
        return Tensor::empty([0, k], &logits.device());
    }
    let logits = logits.cast(DType::F32);
    let mut logits = logits.clone().mask_fill(logits.is_nan(), NOT_A_NUMBER);
    let mut chosen = Vec::with_capacity(k);
    for _ in 0..k {
        let largest = logits.clone().argmax(1);
        let taken = Tensor::full(largest.dims(), f32::NEG_INFINITY, &logits.device());
        logits = logits.scatter(1, largest.clone(), taken, IndexingUpdateOp::Add);
        chosen.push(largest);
    }
    Tensor::cat(chosen, 1)
}

/// Rows that are counted together: a running count costs the square of its length.
const BLOCK: usize = 128;

/// A row's place is the number of rows of lower experts, and of earlier rows of its own.
fn order_by_expert<B: Backend>(expert_ids: Tensor<B, 1, Int>, experts: usize) -> ExpertOrder<B> {
    let rows = expert_ids.dims()[0];
    let device = expert_ids.device();
    let zeros = |n: usize| Tensor::<B, 1, Int>::zeros([n], &device);
    // Nothing is launched over no element, which CUDA refuses.
    if rows == 0 {
        let nothing = || Tensor::empty([0], &device);
        return ExpertOrder {
            order: nothing(),
            inverse: nothing(),
            counts: zeros(experts),
        };
    }
    let blocks = rows.div_ceil(BLOCK);
    let padded = match blocks * BLOCK - rows {
        0 => expert_ids.clone(),
        // Rows of no expert fill the last block.
        missing => Tensor::cat(vec![expert_ids.clone(), zeros(missing).add_scalar(experts as i64)], 0),
    };
    let belongs = padded
        .reshape([blocks, BLOCK, 1])
        .expand([blocks, BLOCK, experts])
        .equal(
            Tensor::arange(0..experts as i64, &device)
                .reshape([1, 1, experts])
                .expand([blocks, BLOCK, experts]),
        )
        .int();
    let by_block = belongs.clone().sum_dim(1);
    let before_block = by_block.clone().cumsum(0) - by_block.clone();
    let counts = by_block.sum_dim(0).reshape([experts]);
    let first = counts.clone().cumsum(0) - counts.clone();
    let place = belongs.cumsum(1) + before_block + first.reshape([1, 1, experts]);
    let place = place.reshape([blocks * BLOCK, experts]).narrow(0, 0, rows);
    let inverse = place.gather(1, expert_ids.reshape([rows, 1])).reshape([rows]) - 1;
    let index = Tensor::arange(0..rows as i64, &device);
    let places = inverse.clone().reshape([rows, 1]);
    ExpertOrder {
        order: zeros(rows).scatter_nd(places, index, IndexingUpdateOp::Assign),
        inverse,
        counts,
    }
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
