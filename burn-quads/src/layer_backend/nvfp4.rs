//! [`Nvfp4`] runs the operations of the backend that it decorates: none of them multiplies with a packed weight.
use super::{AttentionGradients, AttentionInput, CachedQkv, ExpertOrder, HeadNorms, LayerBackend};
use crate::modules::{
    attention::{CacheStep, LayerCache},
    rotary::{RotaryEmbedding, Rotation},
};
use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, Nvfp4Tensor};

impl<B: Nvfp4Backend + LayerBackend> LayerBackend for Nvfp4<B> {
    fn has_dense_product(device: &Self::Device) -> bool {
        B::has_dense_product(device)
    }

    /// A packed weight multiplies in its activation setting, as in Burn's matmul.
    fn dense_product(x: Tensor<Self, 2>, w: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if matches!(w.clone().into_primitive().tensor(), Nvfp4Tensor::Packed(_)) {
            return x.matmul(w);
        }
        wrap(B::dense_product(unwrap(x), unwrap(w)))
    }

    fn dense_product_weight_backward(x: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrap(B::dense_product_weight_backward(unwrap(x), unwrap(grad)))
    }

    fn rms_norm(x: Tensor<Self, 2>, gamma: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        wrap(B::rms_norm(unwrap(x), unwrap(gamma), epsilon))
    }

    fn rms_norm_backward(
        x: Tensor<Self, 2>,
        gamma: Tensor<Self, 1>,
        epsilon: f64,
        grad: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        let (dx, d_gamma) = B::rms_norm_backward(unwrap(x), unwrap(gamma), epsilon, unwrap(grad));
        (wrap(dx), wrap(d_gamma))
    }

    fn swiglu(gate_up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrap(B::swiglu(unwrap(gate_up)))
    }

    fn swiglu_backward(gate_up: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrap(B::swiglu_backward(unwrap(gate_up), unwrap(grad)))
    }

    fn softmax_rows(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrap(B::softmax_rows(unwrap(x)))
    }

    fn softmax_rows_backward(y: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrap(B::softmax_rows_backward(unwrap(y), unwrap(grad)))
    }

    fn log_softmax_parts(x: Tensor<Self, 2>) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let (shifted, log_sum) = B::log_softmax_parts(unwrap(x));
        (wrap(shifted), wrap(log_sum))
    }

    fn rotate(x: Tensor<Self, 4>, rotation: &Rotation<Self>) -> Tensor<Self, 4> {
        let inner = Rotation::new(unwrap(rotation.cos.clone()), unwrap(rotation.sin.clone()));
        wrap(B::rotate(unwrap(x), &inner))
    }

    fn causal_attention(input: AttentionInput<Self>) -> Tensor<Self, 3> {
        wrap(B::causal_attention(unwrap_input(input)))
    }

    fn causal_attention_backward(input: AttentionInput<Self>, grad: Tensor<Self, 3>) -> AttentionGradients<Self> {
        let grads = B::causal_attention_backward(unwrap_input(input), unwrap(grad));
        AttentionGradients {
            query: wrap(grads.query),
            key: wrap(grads.key),
            value: wrap(grads.value),
            norms: grads.norms.map(|norms| norms.map(wrap)),
        }
    }

    fn cached_attention(qkv: CachedQkv<Self>, cache: &mut LayerCache<Self>, step: &CacheStep) -> Tensor<Self, 2> {
        let (keys, values) = cache.take();
        let mut inner = LayerCache {
            keys: unwrap(keys),
            values: unwrap(values),
        };
        let qkv = CachedQkv {
            query: unwrap(qkv.query),
            key: unwrap(qkv.key),
            value: unwrap(qkv.value),
            norms: qkv.norms.map(unwrap_norms),
            rope: RotaryEmbedding {
                cos: unwrap(qkv.rope.cos),
                sin: unwrap(qkv.rope.sin),
            },
            heads: qkv.heads,
        };
        let mixed = B::cached_attention(qkv, &mut inner, step);
        cache.restore(wrap(inner.keys), wrap(inner.values));
        wrap(mixed)
    }

    fn attend_to_cache(
        query: Tensor<Self, 3>,
        cache: &LayerCache<Self>,
        places: Tensor<Self, 2, Int>,
        longest: usize,
    ) -> Tensor<Self, 2> {
        let inner = LayerCache {
            keys: unwrap(cache.keys.clone()),
            values: unwrap(cache.values.clone()),
        };
        let places = Tensor::from_primitive(places.into_primitive());
        wrap(B::attend_to_cache(unwrap(query), &inner, places, longest))
    }

    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        int(B::top_experts(unwrap(logits), k))
    }

    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        let ordered = B::order_by_expert(Tensor::from_primitive(expert_ids.into_primitive()), experts);
        ExpertOrder {
            order: int(ordered.order),
            inverse: int(ordered.inverse),
            counts: int(ordered.counts),
        }
    }

    fn permute_rows(x: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        wrap(B::permute_rows(unwrap(x), &unwrap_order(order)))
    }

    fn permute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>, tokens: usize) -> Tensor<Self, 2> {
        wrap(B::permute_rows_backward(unwrap(grad), &unwrap_order(order), tokens))
    }

    fn unpermute_rows(rows: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        wrap(B::unpermute_rows(unwrap(rows), &unwrap_order(order)))
    }

    fn unpermute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        wrap(B::unpermute_rows_backward(unwrap(grad), &unwrap_order(order)))
    }
}

fn unwrap<B: Nvfp4Backend, const D: usize>(x: Tensor<Nvfp4<B>, D>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x.into_primitive().tensor().dense()))
}

fn wrap<B: Nvfp4Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<Nvfp4<B>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(Nvfp4Tensor::Dense(x.into_primitive().tensor())))
}

/// Tensors of whole numbers are B's own.
fn int<B: Nvfp4Backend, const D: usize>(x: Tensor<B, D, Int>) -> Tensor<Nvfp4<B>, D, Int> {
    Tensor::from_primitive(x.into_primitive())
}

fn unwrap_order<B: Nvfp4Backend>(order: &ExpertOrder<Nvfp4<B>>) -> ExpertOrder<B> {
    let inner = |x: &Tensor<Nvfp4<B>, 1, Int>| Tensor::from_primitive(x.clone().into_primitive());
    ExpertOrder {
        order: inner(&order.order),
        inverse: inner(&order.inverse),
        counts: inner(&order.counts),
    }
}

fn unwrap_norms<B: Nvfp4Backend>(norms: HeadNorms<Nvfp4<B>>) -> HeadNorms<B> {
    HeadNorms {
        query: unwrap(norms.query),
        key: unwrap(norms.key),
        epsilon: norms.epsilon,
    }
}

fn unwrap_input<B: Nvfp4Backend>(input: AttentionInput<Nvfp4<B>>) -> AttentionInput<B> {
    AttentionInput {
        query: unwrap(input.query),
        key: unwrap(input.key),
        value: unwrap(input.value),
        norms: input.norms.map(unwrap_norms),
        cos: unwrap(input.cos),
        sin: unwrap(input.sin),
        padding: input
            .padding
            .map(|padding| Tensor::from_primitive(padding.into_primitive())),
        heads: input.heads,
    }
}
