//! The operations of [`LayerBackend`](super::LayerBackend), made of Burn's: their definition, and the default of every
//! backend.
use super::{AttentionGradients, AttentionInput, CachedQkv, ExpertOrder, HeadNorms, LayerBackend, MASKED_SCORE};
use crate::modules::{
    attention::{CacheStep, LayerCache},
    rotary::Rotation,
};
use burn::{
    prelude::Backend,
    tensor::{
        Bool, IndexingUpdateOp, Int, Tensor, TensorData,
        activation::{sigmoid, softmax},
    },
};

pub(super) fn rms_norm<B: Backend>(x: Tensor<B, 2>, gamma: Tensor<B, 1>, epsilon: f64) -> Tensor<B, 2> {
    let inverse = inverse_rms(x.clone(), epsilon);
    x * inverse * gamma.unsqueeze()
}

fn inverse_rms<B: Backend>(x: Tensor<B, 2>, epsilon: f64) -> Tensor<B, 2> {
    (x.square().mean_dim(1) + epsilon).sqrt().recip()
}

pub(super) fn rms_norm_backward<B: Backend>(
    x: Tensor<B, 2>,
    gamma: Tensor<B, 1>,
    epsilon: f64,
    grad: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 1>) {
    let inverse = inverse_rms(x.clone(), epsilon);
    let normed = x * inverse.clone();
    let d_gamma = column_sums(grad.clone() * normed.clone());
    let grad = grad * gamma.unsqueeze();
    let along = (grad.clone() * normed.clone()).mean_dim(1);
    ((grad - normed * along) * inverse, d_gamma)
}

/// Rows that one thread of a GPU adds up, at most about so many.
const ROWS_A_SUM: usize = 256;

/// The sum of all rows, `[d]`: of blocks of them first, since a GPU may have one thread for each sum, and a head's norm has as
/// many rows as there are tokens and heads.
pub(super) fn column_sums<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 1> {
    let [rows, d] = x.dims();
    let blocks = rows / ROWS_A_SUM;
    if blocks < 2 {
        return x.sum_dim(0).squeeze_dim(0);
    }
    let whole = blocks * ROWS_A_SUM;
    let sums = x.clone().narrow(0, 0, whole).reshape([blocks, ROWS_A_SUM, d]);
    let sums = sums.sum_dim(1).reshape([blocks, d]);
    column_sums(match rows - whole {
        0 => sums,
        rest => Tensor::cat(vec![sums, x.narrow(0, whole, rest)], 0),
    })
}

fn halves<B: Backend>(x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let [_, width] = x.dims();
    let gate = x.clone().narrow(1, 0, width / 2);
    (gate, x.narrow(1, width / 2, width / 2))
}

pub(super) fn swiglu<B: Backend>(gate_up: Tensor<B, 2>) -> Tensor<B, 2> {
    let (gate, up) = halves(gate_up);
    gate.clone() * sigmoid(gate) * up
}

pub(super) fn swiglu_backward<B: Backend>(gate_up: Tensor<B, 2>, grad: Tensor<B, 2>) -> Tensor<B, 2> {
    let (gate, up) = halves(gate_up);
    let sigmoid = sigmoid(gate.clone());
    let silu = gate * sigmoid.clone();
    let d_up = grad.clone() * silu.clone();
    // silu' = σ + x·σ·(1 − σ) = silu + σ·(1 − silu)
    let slope = silu.clone() + sigmoid * (silu.neg() + 1.0);
    Tensor::cat(vec![grad * up * slope, d_up], 1)
}

pub(super) fn softmax_rows<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    softmax(x, 1)
}

pub(super) fn softmax_rows_backward<B: Backend>(y: Tensor<B, 2>, grad: Tensor<B, 2>) -> Tensor<B, 2> {
    let along = (grad.clone() * y.clone()).sum_dim(1);
    y * (grad - along)
}

pub(super) fn log_softmax_parts<B: Backend>(x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let shifted = x.clone() - x.max_dim(1);
    let log_sum = shifted.clone().exp().sum_dim(1).log();
    (shifted, log_sum)
}

/// Softmax over the keys of attention scores.
fn attention_weights<B: LayerBackend>(scores: Tensor<B, 4>) -> Tensor<B, 4> {
    let shape = scores.dims();
    let [batch, heads, queries, keys] = shape;
    B::softmax_rows(scores.reshape([batch * heads * queries, keys])).reshape(shape)
}

pub(super) fn causal_attention<B: LayerBackend>(input: AttentionInput<B>) -> Tensor<B, 3> {
    let [batch, seq, width] = input.query.dims();
    let (heads, d) = (input.heads, width / input.heads);
    let kv_heads = input.key.dims()[2] / d;
    let rotation = Rotation::new(input.cos, input.sin);
    let rotate = |x: Tensor<B, 2>, heads: usize| B::rotate(x.reshape([batch, seq, heads, d]), &rotation);
    let query = input.query.reshape([batch * seq * heads, d]);
    let key = input.key.reshape([batch * seq * kv_heads, d]);
    let (query, key) = norm_heads(query, key, input.norms);
    let query = rotate(query, heads) * (d as f32).powf(-0.5);
    let key = rotate(key, kv_heads);
    let value = input.value.reshape([batch, seq, kv_heads, d]).swap_dims(1, 2);

    // The query heads of one key head become rows of one product.
    let group_rows = heads / kv_heads * seq;
    let query = query.swap_dims(1, 2).reshape([batch, kv_heads, group_rows, d]);
    let scores = query
        .matmul(key.swap_dims(1, 2).swap_dims(2, 3))
        .reshape([batch, heads, seq, seq])
        .mask_fill(mask(batch, seq, input.padding, &value.device()), MASKED_SCORE);
    attention_weights(scores)
        .reshape([batch, kv_heads, group_rows, seq])
        .matmul(value)
        .reshape([batch, heads, seq, d])
        .swap_dims(1, 2)
        .reshape([batch, seq, width])
}

/// Rows of heads, normed.
fn norm_heads<B: LayerBackend>(
    query: Tensor<B, 2>,
    key: Tensor<B, 2>,
    norms: Option<HeadNorms<B>>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    match norms {
        None => (query, key),
        Some(norms) => (
            B::rms_norm(query, norms.query, norms.epsilon),
            B::rms_norm(key, norms.key, norms.epsilon),
        ),
    }
}

/// True where a query (dimension 2) must not see a key (dimension 3): `[batch or 1, 1, seq, seq]`.
fn mask<B: Backend>(
    batch: usize,
    seq: usize,
    padding: Option<Tensor<B, 2, Bool>>,
    device: &B::Device,
) -> Tensor<B, 4, Bool> {
    let causal = Tensor::<B, 2, Bool>::tril_mask([seq, seq], 0, device).unsqueeze::<4>();
    match padding {
        Some(padding) => {
            let keys = padding.reshape([batch, 1, 1, seq]).expand([batch, 1, seq, seq]);
            causal.expand([batch, 1, seq, seq]).bool_or(keys)
        }
        None => causal,
    }
}

/// Gradients of [`causal_attention`]: the forward pass again, then back through it step by step. (Differentiating it with
/// Autodiff would wait for a lock that the backward pass around it holds.)
pub(super) fn causal_attention_backward<B: LayerBackend>(
    input: AttentionInput<B>,
    grad: Tensor<B, 3>,
) -> AttentionGradients<B> {
    let [batch, seq, width] = input.query.dims();
    let (heads, d) = (input.heads, width / input.heads);
    let kv_heads = input.key.dims()[2] / d;
    let group_rows = heads / kv_heads * seq;
    let scale = (d as f32).powf(-0.5);
    let rotation = Rotation::new(input.cos.clone(), input.sin.clone());
    // The table's sine has the sign of its half: negated, it turns back.
    let back = Rotation::new(input.cos, input.sin.neg());

    let query = input.query.reshape([batch * seq * heads, d]);
    let key = input.key.reshape([batch * seq * kv_heads, d]);
    let (normed_query, normed_key) = norm_heads(query.clone(), key.clone(), input.norms.clone());
    let rotated_query = B::rotate(normed_query.reshape([batch, seq, heads, d]), &rotation) * scale;
    let rotated_key = B::rotate(normed_key.reshape([batch, seq, kv_heads, d]), &rotation);
    let by_group = |x: Tensor<B, 4>| x.swap_dims(1, 2).reshape([batch, kv_heads, group_rows, d]);
    let q = by_group(rotated_query);
    let k = rotated_key.swap_dims(1, 2);
    let v = input.value.reshape([batch, seq, kv_heads, d]).swap_dims(1, 2);
    let mask = mask(batch, seq, input.padding, &v.device());
    let masked = |scores: Tensor<B, 4>, value: f32| {
        let scores = scores.reshape([batch, heads, seq, seq]);
        scores.mask_fill(mask.clone().expand([batch, heads, seq, seq]), value)
    };
    let scores = masked(q.clone().matmul(k.clone().swap_dims(2, 3)), MASKED_SCORE);
    let weights = attention_weights(scores).reshape([batch, kv_heads, group_rows, seq]);

    let grad = by_group(grad.reshape([batch, seq, heads, d]));
    let d_value = weights.clone().swap_dims(2, 3).matmul(grad.clone());
    let d_weights = grad.matmul(v.swap_dims(2, 3));
    let by_row = |x: Tensor<B, 4>| x.reshape([batch * heads * seq, seq]);
    let d_scores = B::softmax_rows_backward(by_row(weights), by_row(d_weights));
    let d_scores =
        masked(d_scores.reshape([batch, kv_heads, group_rows, seq]), 0.0).reshape([batch, kv_heads, group_rows, seq]);
    let d_query = d_scores.clone().matmul(k).reshape([batch, heads, seq, d]);
    let d_key = d_scores.swap_dims(2, 3).matmul(q);

    let d_query = B::rotate(d_query.swap_dims(1, 2) * scale, &back).reshape([batch * seq * heads, d]);
    let d_key = B::rotate(d_key.swap_dims(1, 2), &back).reshape([batch * seq * kv_heads, d]);
    let (d_query, d_key, norms) = match input.norms {
        None => (d_query, d_key, None),
        Some(norms) => {
            let (d_query, d_query_norm) = B::rms_norm_backward(query, norms.query, norms.epsilon, d_query);
            let (d_key, d_key_norm) = B::rms_norm_backward(key, norms.key, norms.epsilon, d_key);
            (d_query, d_key, Some([d_query_norm, d_key_norm]))
        }
    };
    AttentionGradients {
        query: d_query.reshape([batch, seq, width]),
        key: d_key.reshape([batch, seq, kv_heads * d]),
        value: d_value.swap_dims(1, 2).reshape([batch, seq, kv_heads * d]),
        norms,
    }
}

/// Keys and values as views `[slots, columns, kv_heads, head_dim]`: a place in them is a slot and a column.
struct Columns<B: Backend> {
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
}

impl<B: Backend> Columns<B> {
    /// Writes `[n, kv_heads, head_dim]` each to `n` places `[n, 2]`, in one operation whatever `n` is.
    fn assign(self, places: Tensor<B, 2, Int>, key: Tensor<B, 3>, value: Tensor<B, 3>) -> Self {
        Self {
            keys: self.keys.scatter_nd(places.clone(), key, IndexingUpdateOp::Assign),
            values: self.values.scatter_nd(places, value, IndexingUpdateOp::Assign),
        }
    }
}

/// Slots and columns as `[n, 2]`.
fn places<B: Backend>(list: impl ExactSizeIterator<Item = (usize, usize)>, device: &B::Device) -> Tensor<B, 2, Int> {
    let count = list.len();
    let list: Vec<i32> = list.flat_map(|(slot, column)| [slot as i32, column as i32]).collect();
    // One dimension: GPUs leave gaps between the rows of two.
    Tensor::<B, 1, Int>::from_data(TensorData::new(list, [2 * count]), device).reshape([count, 2])
}

/// [`LayerBackend::cached_attention`].
pub(crate) fn cached_attention<B: LayerBackend>(
    qkv: CachedQkv<B>,
    cache: &mut LayerCache<B>,
    step: &CacheStep,
) -> Tensor<B, 2> {
    let [tokens, _] = qkv.query.dims();
    step.check(tokens, cache);
    let (keys, values) = cache.take();
    let device = keys.device();
    let [_, kv_heads, _, d] = values.dims();
    let of_tokens = places(step.tokens.iter().map(|t| (t.slot, t.position)), &device);
    let rotation = qkv.rope.rotation(of_tokens.clone().narrow(1, 1, 1));
    let rotate = |x: Tensor<B, 2>, heads: usize| B::rotate(x.reshape([tokens, 1, heads, d]), &rotation);
    let query = qkv.query.reshape([tokens * qkv.heads, d]);
    let key = qkv.key.reshape([tokens * kv_heads, d]);
    let (query, key) = norm_heads(query, key, qkv.norms);
    let query = rotate(query, qkv.heads).reshape([tokens, qkv.heads, d]);
    let key = rotate(key, kv_heads).reshape([tokens, kv_heads, d]);
    let value = qkv.value.reshape([tokens, kv_heads, d]);

    let mut columns = Columns {
        keys: keys.permute([0, 3, 1, 2]),
        values: values.permute([0, 2, 1, 3]),
    };
    if tokens > 0 {
        columns = columns.assign(of_tokens.clone(), key, value);
    }
    let (to, from): (Vec<_>, Vec<_>) = step.copied_columns().into_iter().unzip();
    if !to.is_empty() {
        let from = places(from.into_iter(), &device);
        let (key, value) = (
            columns.keys.clone().gather_nd::<2, 3>(from.clone()),
            columns.values.clone().gather_nd::<2, 3>(from),
        );
        columns = columns.assign(places(to.into_iter(), &device), key, value);
    }
    cache.restore(columns.keys.permute([0, 2, 3, 1]), columns.values.permute([0, 2, 1, 3]));

    let longest = step.tokens.iter().map(|t| t.position + 1).max().unwrap_or(0);
    B::attend_to_cache(query, cache, of_tokens, longest)
}

/// Over copies of the slots' columns up to the longest, masked.
pub(super) fn attend_to_cache<B: LayerBackend>(
    query: Tensor<B, 3>,
    cache: &LayerCache<B>,
    places: Tensor<B, 2, Int>,
    longest: usize,
) -> Tensor<B, 2> {
    let [tokens, heads, d] = query.dims();
    let [_, kv_heads, _, _] = cache.values.dims();
    let slots = places.clone().narrow(1, 0, 1).reshape([tokens]);
    let positions = places.narrow(1, 1, 1);
    let keys = cache.keys.clone().narrow(3, 0, longest).select(0, slots.clone());
    let values = cache.values.clone().narrow(2, 0, longest).select(0, slots);
    let beyond: Tensor<B, 2, Bool> = Tensor::<B, 1, Int>::arange(0..longest as i64, &query.device())
        .reshape([1, longest])
        .expand([tokens, longest])
        .greater(positions.expand([tokens, longest]));
    let query = (query * (d as f32).powf(-0.5)).reshape([tokens, kv_heads, heads / kv_heads, d]);
    let scores = query
        .matmul(keys)
        .mask_fill(beyond.reshape([tokens, 1, 1, longest]), MASKED_SCORE);
    attention_weights(scores).matmul(values).reshape([tokens, heads * d])
}

pub(super) fn top_experts<B: Backend>(logits: Tensor<B, 2>, k: usize) -> Tensor<B, 2, Int> {
    logits.argsort_descending(1).narrow(1, 0, k)
}

pub(super) fn order_by_expert<B: Backend>(expert_ids: Tensor<B, 1, Int>, experts: usize) -> ExpertOrder<B> {
    let (rows, device) = (expert_ids.dims()[0], expert_ids.device());
    let index = Tensor::arange(0..rows as i64, &device);
    let zeros = |n: usize| Tensor::<B, 1, Int>::zeros([n], &device);
    // Every key is distinct, so rows of one expert stay in order whatever sort the backend has.
    let order = (expert_ids.clone() * rows as i64 + index.clone()).argsort(0);
    let inverse = zeros(rows).scatter(0, order.clone(), index, IndexingUpdateOp::Add);
    let ones = zeros(rows).add_scalar(1);
    let counts = zeros(experts).scatter(0, expert_ids, ones, IndexingUpdateOp::Add);
    ExpertOrder { order, inverse, counts }
}

/// The token of each row that is sorted by expert.
pub(super) fn tokens_of_rows<B: Backend>(order: &ExpertOrder<B>, tokens: usize) -> Tensor<B, 1, Int> {
    let top_k = order.order.dims()[0] / tokens.max(1);
    order.order.clone() / top_k.max(1) as i64
}

pub(super) fn permute_rows<B: Backend>(x: Tensor<B, 2>, order: &ExpertOrder<B>) -> Tensor<B, 2> {
    let tokens = tokens_of_rows(order, x.dims()[0]);
    x.select(0, tokens)
}

pub(super) fn permute_rows_backward<B: Backend>(
    grad: Tensor<B, 2>,
    order: &ExpertOrder<B>,
    tokens: usize,
) -> Tensor<B, 2> {
    let zeros = Tensor::zeros([tokens, grad.dims()[1]], &grad.device());
    let of_rows = tokens_of_rows(order, tokens);
    zeros.select_assign(0, of_rows, grad, IndexingUpdateOp::Add)
}
