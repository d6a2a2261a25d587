//! On `Autodiff` each operation is one node, whose backward pass is an operation of the inner backend.
use super::{AttentionInput, ExpertOrder, HeadNorms, LayerBackend};
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
    tensor::{Int, Tensor, TensorPrimitive},
};
use burn_backend::tensor::FloatTensor;
use core::{fmt, marker::PhantomData};

impl<B: LayerBackend, C: CheckpointStrategy> LayerBackend for Autodiff<B, C> {
    fn has_dense_product(device: &Self::Device) -> bool {
        B::has_dense_product(device)
    }

    fn dense_product(x: Tensor<Self, 2>, w: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let product = |x: FloatTensor<B>, w: FloatTensor<B>| primitive(B::dense_product(wrap(x), wrap(w)));
        let gradients = ProductGradients {
            dx: |grad, w, ()| primitive(B::dense_product(wrap(grad), wrap::<B, 2>(w).transpose())),
            dw: |x, grad, ()| primitive(B::dense_product_weight_backward(wrap(x), wrap(grad))),
        };
        wrap(product_node::<B, C, ()>(
            primitive(x),
            primitive(w),
            (),
            product,
            gradients,
        ))
    }

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
        let inner = gate_up.clone().inner();
        let output = B::swiglu(inner.clone());
        unary_node(gate_up, output, inner, B::swiglu_backward)
    }

    fn causal_attention(input: AttentionInput<Self>) -> Tensor<Self, 3> {
        let parents = [input.query, input.key, input.value].map(primitive);
        let [query, key, value] = parents.clone().map(|x| wrap(x.primitive));
        let inner = |norms| AttentionInput {
            query,
            key,
            value,
            norms,
            cos: input.cos.inner(),
            sin: input.sin.inner(),
            padding: input.padding.map(Tensor::inner),
            heads: input.heads,
        };
        match input.norms {
            None => attention_node(parents, inner(None)),
            Some(norms) => {
                let weights = [norms.query, norms.key].map(primitive);
                let [query, key] = weights.clone().map(|x| wrap(x.primitive));
                let ([q, k, v], [q_norm, k_norm]) = (parents, weights);
                let norms = HeadNorms {
                    query,
                    key,
                    epsilon: norms.epsilon,
                };
                attention_node([q, k, v, q_norm, k_norm], inner(Some(norms)))
            }
        }
    }

    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        Tensor::from_inner(B::top_experts(logits.inner(), k))
    }

    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        let ordered = B::order_by_expert(expert_ids.inner(), experts);
        ExpertOrder {
            order: Tensor::from_inner(ordered.order),
            inverse: Tensor::from_inner(ordered.inverse),
            counts: Tensor::from_inner(ordered.counts),
        }
    }

    fn permute_rows(x: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        let kept = (inner_order(order), x.dims()[0]);
        let output = B::permute_rows(x.clone().inner(), &kept.0);
        unary_node(x, output, kept, |(order, tokens), grad| {
            B::permute_rows_backward(grad, &order, tokens)
        })
    }

    fn unpermute_rows(rows: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        let order = inner_order(order);
        let output = B::unpermute_rows(rows.clone().inner(), &order);
        unary_node(rows, output, order, |order, grad| {
            B::unpermute_rows_backward(grad, &order)
        })
    }
}

/// Gradients of a product of `x` and `w`: of `x` from that of the product and `w`, of `w` from `x` and that of the product.
#[derive(Clone, Debug)]
pub(crate) struct ProductGradients<B: Backend, S> {
    pub dx: fn(FloatTensor<B>, FloatTensor<B>, S) -> FloatTensor<B>,
    pub dw: fn(FloatTensor<B>, FloatTensor<B>, S) -> FloatTensor<B>,
}

/// A product as one node. `x` is kept where `w` needs a gradient, and the other way round; `kept` is what gradients need besides.
pub(crate) fn product_node<B: Backend, C: CheckpointStrategy, S: Clone + Send + fmt::Debug + 'static>(
    x: FloatTensor<Autodiff<B, C>>,
    w: FloatTensor<Autodiff<B, C>>,
    kept: S,
    product: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
    gradients: ProductGradients<B, S>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Product<S>(PhantomData<S>);
    impl<B: Backend, S: Clone + Send + fmt::Debug + 'static> Backward<B, 2> for Product<S> {
        type State = (
            Option<FloatTensor<B>>,
            Option<FloatTensor<B>>,
            S,
            ProductGradients<B, S>,
        );

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [node_x, node_w] = ops.parents;
            let (x, w, kept, gradients) = ops.state;
            let grad = grads.consume::<B>(&ops.node);
            if let (Some(node), Some(w)) = (node_x, w) {
                let dx = (gradients.dx)(grad.clone(), w, kept.clone());
                grads.register::<B>(node.id, dx);
            }
            if let (Some(node), Some(x)) = (node_w, x) {
                let dw = (gradients.dw)(x, grad, kept);
                grads.register::<B>(node.id, dw);
            }
        }
    }
    let state = (
        w.is_tracked().then(|| x.primitive.clone()),
        x.is_tracked().then(|| w.primitive.clone()),
        kept,
        gradients,
    );
    let output = product(x.primitive, w.primitive);
    let prep = Backward::<B, 2>::prepare::<C>(Product(PhantomData::<S>), [x.node, w.node])
        .compute_bound()
        .stateful();
    match prep {
        OpsKind::Tracked(prep) => prep.finish(state, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

/// `output` as one node whose parent is `x`; `backward` makes the gradient of `x` of what was kept and that of `output`.
fn unary_node<B: LayerBackend, C: CheckpointStrategy, S: Clone + Send + fmt::Debug + 'static>(
    x: Tensor<Autodiff<B, C>, 2>,
    output: Tensor<B, 2>,
    kept: S,
    backward: fn(S, Tensor<B, 2>) -> Tensor<B, 2>,
) -> Tensor<Autodiff<B, C>, 2> {
    #[derive(Debug)]
    struct Unary<S>(PhantomData<S>);
    impl<B: LayerBackend, S: Clone + Send + fmt::Debug + 'static> Backward<B, 1> for Unary<S> {
        type State = (S, fn(S, Tensor<B, 2>) -> Tensor<B, 2>);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (kept, backward) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                primitive(backward(kept, wrap(grad)))
            });
        }
    }
    let prep = Backward::<B, 1>::prepare::<C>(Unary(PhantomData::<S>), [primitive(x).node])
        .compute_bound()
        .stateful();
    let output = primitive(output);
    wrap(match prep {
        OpsKind::Tracked(prep) => prep.finish((kept, backward), output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    })
}

fn inner_order<B: LayerBackend, C: CheckpointStrategy>(order: &ExpertOrder<Autodiff<B, C>>) -> ExpertOrder<B> {
    ExpertOrder {
        order: order.order.clone().inner(),
        inverse: order.inverse.clone().inner(),
        counts: order.counts.clone().inner(),
    }
}

/// Causal attention as one node, whose parents are query, key and value, and the weights of the norms if there are any.
fn attention_node<B: LayerBackend, C: CheckpointStrategy, const N: usize>(
    parents: [FloatTensor<Autodiff<B, C>>; N],
    input: AttentionInput<B>,
) -> Tensor<Autodiff<B, C>, 3> {
    #[derive(Debug)]
    struct Attention;
    impl<B: LayerBackend, const N: usize> Backward<B, N> for Attention {
        type State = AttentionInput<B>;

        fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
            let grad = wrap(grads.consume::<B>(&ops.node));
            let inputs = B::causal_attention_backward(ops.state, grad);
            let tokens = [inputs.query, inputs.key, inputs.value].map(primitive);
            let norms = inputs.norms.map(|norms| norms.map(primitive));
            let inputs = tokens.into_iter().chain(norms.into_iter().flatten());
            for (node, grad) in ops.parents.into_iter().zip(inputs) {
                if let Some(node) = node {
                    grads.register::<B>(node.id, grad);
                }
            }
        }
    }
    let output = primitive(B::causal_attention(input.clone()));
    let prep = Backward::<B, N>::prepare::<C>(Attention, parents.map(|parent| parent.node))
        .compute_bound()
        .stateful();
    wrap(match prep {
        OpsKind::Tracked(prep) => prep.finish(input, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    })
}

fn wrap<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}
