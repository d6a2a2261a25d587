//! On `Autodiff` each operation is one node, whose backward pass is an operation of the inner backend.
use super::{AttentionInput, LayerBackend};
use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind, unary},
        },
    },
    prelude::Backend,
    tensor::{Tensor, TensorPrimitive},
};
use burn_backend::tensor::FloatTensor;

impl<B: LayerBackend, C: CheckpointStrategy> LayerBackend for Autodiff<B, C> {
    fn rms_norm(x: Tensor<Self, 2>, gamma: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        #[derive(Debug)]
        struct RmsNorm;
        impl<B: LayerBackend> Backward<B, 2> for RmsNorm {
            type State = (Tensor<B, 2>, Tensor<B, 1>, f64);

            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                let [node_x, node_gamma] = ops.parents;
                let (x, gamma, epsilon) = ops.state;
                let grad = wrap(grads.consume::<B>(&ops.node));
                let (dx, d_gamma) = B::rms_norm_backward(x, gamma, epsilon, grad);
                if let Some(node) = node_x {
                    grads.register::<B>(node.id, primitive(dx));
                }
                if let Some(node) = node_gamma {
                    grads.register::<B>(node.id, primitive(d_gamma));
                }
            }
        }
        let (x, gamma) = (primitive(x), primitive(gamma));
        let nodes = [x.node, gamma.node];
        let (x, gamma) = (wrap::<B, 2>(x.primitive), wrap::<B, 1>(gamma.primitive));
        let output = primitive(B::rms_norm(x.clone(), gamma.clone(), epsilon));
        let prep = Backward::<B, 2>::prepare::<C>(RmsNorm, nodes)
            .compute_bound()
            .stateful();
        wrap(match prep {
            OpsKind::Tracked(prep) => prep.finish((x, gamma, epsilon), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        })
    }

    fn swiglu(gate_up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        #[derive(Debug)]
        struct Swiglu;
        impl<B: LayerBackend> Backward<B, 1> for Swiglu {
            type State = Tensor<B, 2>;

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let gate_up = ops.state;
                unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                    primitive(B::swiglu_backward(gate_up, wrap(grad)))
                });
            }
        }
        let gate_up = primitive(gate_up);
        let node = gate_up.node;
        let gate_up = wrap::<B, 2>(gate_up.primitive);
        let output = primitive(B::swiglu(gate_up.clone()));
        let prep = Backward::<B, 1>::prepare::<C>(Swiglu, [node])
            .compute_bound()
            .stateful();
        wrap(match prep {
            OpsKind::Tracked(prep) => prep.finish(gate_up, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        })
    }

    fn causal_attention(input: AttentionInput<Self>) -> Tensor<Self, 3> {
        #[derive(Debug)]
        struct Attention;
        impl<B: LayerBackend> Backward<B, 5> for Attention {
            type State = AttentionInput<B>;

            fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, _: &mut Checkpointer) {
                let grad = wrap(grads.consume::<B>(&ops.node));
                let inputs = B::causal_attention_backward(ops.state, grad);
                let inputs = [
                    primitive(inputs.query),
                    primitive(inputs.key),
                    primitive(inputs.value),
                    primitive(inputs.query_norm),
                    primitive(inputs.key_norm),
                ];
                for (node, grad) in ops.parents.into_iter().zip(inputs) {
                    if let Some(node) = node {
                        grads.register::<B>(node.id, grad);
                    }
                }
            }
        }
        let (query, key, value) = (primitive(input.query), primitive(input.key), primitive(input.value));
        let (query_norm, key_norm) = (primitive(input.query_norm), primitive(input.key_norm));
        let nodes = [query.node, key.node, value.node, query_norm.node, key_norm.node];
        let input = AttentionInput {
            query: wrap(query.primitive),
            key: wrap(key.primitive),
            value: wrap(value.primitive),
            query_norm: wrap(query_norm.primitive),
            key_norm: wrap(key_norm.primitive),
            epsilon: input.epsilon,
            cos: input.cos.inner(),
            sin: input.sin.inner(),
            padding: input.padding.map(Tensor::inner),
            heads: input.heads,
        };
        let output = primitive(B::causal_attention(input.clone()));
        let prep = Backward::<B, 5>::prepare::<C>(Attention, nodes)
            .compute_bound()
            .stateful();
        wrap(match prep {
            OpsKind::Tracked(prep) => prep.finish(input, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        })
    }
}

fn wrap<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}
