//! Flex lends its memory to single passes on the host.
use super::{AttentionGradients, AttentionInput, CachedQkv, HeadNorms, LayerBackend, composite};
use crate::{
    host::{
        cached_attention::CachedAttention,
        causal_attention::CausalAttention,
        rms_norm::{rms_norm, rms_norm_backward},
        swiglu::{swiglu, swiglu_backward},
    },
    modules::attention::{CacheStep, LayerCache},
};
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexTensor};

impl LayerBackend for Flex {
    fn rms_norm(x: Tensor<Self, 2>, gamma: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        if x.dtype() != DType::F32 {
            return composite::rms_norm(x, gamma, epsilon);
        }
        let shape = x.shape();
        let (x, gamma) = (contiguous(x), contiguous(gamma));
        tensor(rms_norm(slice(&x), slice(&gamma), epsilon as f32), shape)
    }

    fn rms_norm_backward(
        x: Tensor<Self, 2>,
        gamma: Tensor<Self, 1>,
        epsilon: f64,
        grad: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        if x.dtype() != DType::F32 {
            return composite::rms_norm_backward(x, gamma, epsilon, grad);
        }
        let (shape, gamma_shape) = (x.shape(), gamma.shape());
        let (x, gamma, grad) = (contiguous(x), contiguous(gamma), contiguous(grad));
        let (dx, d_gamma) = rms_norm_backward(slice(&x), slice(&gamma), epsilon as f32, slice(&grad));
        (tensor(dx, shape), tensor(d_gamma, gamma_shape))
    }

    fn swiglu(gate_up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if gate_up.dtype() != DType::F32 {
            return composite::swiglu(gate_up);
        }
        let [rows, width] = gate_up.dims();
        let y = swiglu(slice(&contiguous(gate_up)), width / 2);
        tensor(y, Shape::new([rows, width / 2]))
    }

    fn swiglu_backward(gate_up: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if gate_up.dtype() != DType::F32 {
            return composite::swiglu_backward(gate_up, grad);
        }
        let shape = gate_up.shape();
        let (gate_up, grad) = (contiguous(gate_up), contiguous(grad));
        tensor(swiglu_backward(slice(&gate_up), shape[1] / 2, slice(&grad)), shape)
    }

    fn causal_attention(input: AttentionInput<Self>) -> Tensor<Self, 3> {
        if input.query.dtype() != DType::F32 {
            return composite::causal_attention(input);
        }
        let shape = input.query.shape();
        Lent::new(input).with(|attention| tensor(attention.forward(), shape))
    }

    fn causal_attention_backward(input: AttentionInput<Self>, grad: Tensor<Self, 3>) -> AttentionGradients<Self> {
        if input.query.dtype() != DType::F32 {
            return composite::causal_attention_backward(input, grad);
        }
        let (query, key) = (input.query.shape(), input.key.shape());
        let norm = input.norms.as_ref().map(|norms| norms.query.shape());
        let grads = Lent::new(input).with(|attention| attention.backward(slice(&contiguous(grad))));
        AttentionGradients {
            query: tensor(grads.query, query),
            key: tensor(grads.key, key.clone()),
            value: tensor(grads.value, key),
            norms: norm.map(|shape| [grads.query_norm, grads.key_norm].map(|grad| tensor(grad, shape.clone()))),
        }
    }

    fn cached_attention(qkv: CachedQkv<Self>, cache: &mut LayerCache<Self>, step: &CacheStep) -> Tensor<Self, 2> {
        if qkv.query.dtype() != DType::F32 {
            return composite::cached_attention(qkv, cache, step);
        }
        let shape = qkv.query.shape();
        step.check(shape[0], cache);
        let (keys, values) = cache.take();
        let [_, kv_heads, max_seq_len, head_dim] = values.dims();
        let [_, _, _, key_columns] = keys.dims();
        let (query, key, value) = (contiguous(qkv.query), contiguous(qkv.key), contiguous(qkv.value));
        let (query_norm, key_norm, epsilon) = lent_norms(qkv.norms, head_dim);
        let (cos, sin) = (contiguous(qkv.rope.cos), contiguous(qkv.rope.sin));
        let attention = CachedAttention {
            heads: qkv.heads,
            kv_heads,
            head_dim,
            max_seq_len,
            key_columns,
            query: slice(&query),
            key: slice(&key),
            value: slice(&value),
            query_norm: slice(&query_norm),
            key_norm: slice(&key_norm),
            epsilon,
            cos: slice(&cos),
            sin: slice(&sin),
            step,
        };
        // Nobody shares the cache's tensors, so this writes in place.
        let (mut keys, mut values) = (contiguous(keys), contiguous(values));
        let mixed = attention.run(keys.storage_mut(), values.storage_mut());
        cache.restore(from_flex(keys), from_flex(values));
        tensor(mixed, shape)
    }
}

/// The tensors of an [`AttentionInput`], in row-major order.
struct Lent {
    sizes: [usize; 5],
    floats: [FlexTensor; 7],
    epsilon: Option<f32>,
    padding: Option<FlexTensor>,
}

impl Lent {
    fn new(input: AttentionInput<Flex>) -> Self {
        let [batch, seq, width] = input.query.dims();
        let head_dim = width / input.heads;
        let kv_heads = input.key.dims()[2] / head_dim;
        let (query_norm, key_norm, epsilon) = lent_norms(input.norms, head_dim);
        Self {
            sizes: [batch, seq, input.heads, kv_heads, head_dim],
            floats: [
                contiguous(input.query),
                contiguous(input.key),
                contiguous(input.value),
                query_norm,
                key_norm,
                contiguous(input.cos),
                contiguous(input.sin),
            ],
            epsilon,
            padding: input.padding.map(|padding| padding.into_primitive().to_contiguous()),
        }
    }

    fn with<R>(&self, run: impl FnOnce(CausalAttention<'_>) -> R) -> R {
        let [batch, seq, heads, kv_heads, head_dim] = self.sizes;
        let [query, key, value, query_norm, key_norm, cos, sin] = self.floats.each_ref().map(slice);
        run(CausalAttention {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            query,
            key,
            value,
            query_norm,
            key_norm,
            epsilon: self.epsilon,
            cos,
            sin,
            padding: self.padding.as_ref().map(|padding| padding.storage::<u8>()),
        })
    }
}

/// Weights of query and key norms, and their epsilon; without norms ones that multiply nothing away, and none.
fn lent_norms(norms: Option<HeadNorms<Flex>>, head_dim: usize) -> (FlexTensor, FlexTensor, Option<f32>) {
    match norms {
        Some(norms) => (
            contiguous(norms.query),
            contiguous(norms.key),
            Some(norms.epsilon as f32),
        ),
        None => {
            let ones = FlexTensor::from_data(TensorData::new(vec![1f32; head_dim], [head_dim]));
            (ones.clone(), ones, None)
        }
    }
}

fn contiguous<const D: usize>(x: Tensor<Flex, D>) -> FlexTensor {
    x.into_primitive().tensor().to_contiguous()
}

/// The values of a contiguous tensor.
fn slice(x: &FlexTensor) -> &[f32] {
    x.as_slice::<f32>().expect("a contiguous f32 tensor")
}

fn tensor<const D: usize>(values: Vec<f32>, shape: Shape) -> Tensor<Flex, D> {
    from_flex(FlexTensor::from_data(TensorData::new(values, shape)))
}

fn from_flex<const D: usize>(x: FlexTensor) -> Tensor<Flex, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}
