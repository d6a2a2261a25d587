//! `Fusion`: each operation is a custom one of its stream. Shapes are checked before an operation is registered: a panic on the
//! device's thread would come late and elsewhere.
use super::{check_cache, check_rotation, fits_kernels, permute_rows_backward};
use crate::{
    layer_backend::{ExpertOrder, LayerBackend, composite, takes_dense_product},
    modules::{attention::LayerCache, rotary::Rotation},
};
use burn::tensor::{DType, Int, Shape, Tensor, TensorPrimitive};
use burn_backend::{
    Element as _,
    tensor::{FloatTensor, IntElem},
};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};
use burn_nvfp4::cube::custom_op::{Call, defer};

impl<B: FusionBackend + LayerBackend> LayerBackend for Fusion<B> {
    fn has_dense_product(device: &Self::Device) -> bool {
        B::has_dense_product(device)
    }

    fn dense_product(x: Tensor<Self, 2>, w: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !takes_dense_product(&x, &w) {
            return x.matmul(w);
        }
        let ([rows, k], [w_rows, n]) = (x.dims(), w.dims());
        assert_eq!(k, w_rows, "values of a row, and rows of the weight");
        let inputs = [primitive(x), primitive(w)];
        one("quads_dense_product", inputs, Shape::from([rows, n]), |call| {
            let (x, w) = (next(call), next(call));
            B::dense_product(x, w)
        })
    }

    fn dense_product_weight_backward(x: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !takes_dense_product(&x, &grad) {
            return x.transpose().matmul(grad);
        }
        let ([rows, k], [grad_rows, n]) = (x.dims(), grad.dims());
        assert_eq!(rows, grad_rows, "rows, and those of the gradient");
        let inputs = [primitive(x), primitive(grad)];
        one(
            "quads_dense_product_weight_backward",
            inputs,
            Shape::from([k, n]),
            |call| {
                let (x, grad) = (next(call), next(call));
                B::dense_product_weight_backward(x, grad)
            },
        )
    }

    fn rms_norm(x: Tensor<Self, 2>, gamma: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        if !(fits_kernels(&x) && fits_kernels(&gamma)) {
            return composite::rms_norm(x, gamma, epsilon);
        }
        assert_eq!(
            x.dims()[1],
            gamma.dims()[0],
            "values of a row, and of the norm's weight"
        );
        let shape = x.shape();
        one("quads_rms_norm", [primitive(x), primitive(gamma)], shape, move |call| {
            let (x, gamma) = (next(call), next(call));
            B::rms_norm(x, gamma, epsilon)
        })
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
        assert_eq!(
            x.dims()[1],
            gamma.dims()[0],
            "values of a row, and of the norm's weight"
        );
        assert_eq!(x.dims(), grad.dims(), "the rows, and their gradient");
        let outputs = [x.shape(), gamma.shape()].map(|shape| (shape, DType::F32));
        let inputs = vec![primitive(x), primitive(gamma), primitive(grad)];
        let gradients = defer::<B>("quads_rms_norm_backward", inputs, outputs, move |call| {
            let (x, gamma, grad) = (next(call), next(call), next(call));
            let (dx, d_gamma) = B::rms_norm_backward(x, gamma, epsilon, grad);
            call.give_float(dx.into_primitive().tensor());
            call.give_float(d_gamma.into_primitive().tensor());
        });
        let [dx, d_gamma] = exactly(gradients);
        (float(dx), float(d_gamma))
    }

    fn swiglu(gate_up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !fits_kernels(&gate_up) {
            return composite::swiglu(gate_up);
        }
        let [rows, width] = gate_up.dims();
        assert!(width.is_multiple_of(2), "gate and up have {width} columns together");
        let shape = Shape::from([rows, width / 2]);
        one("quads_swiglu", [primitive(gate_up)], shape, |call| {
            B::swiglu(next(call))
        })
    }

    fn swiglu_backward(gate_up: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !(fits_kernels(&gate_up) && fits_kernels(&grad)) {
            return composite::swiglu_backward(gate_up, grad);
        }
        let [rows, width] = gate_up.dims();
        assert_eq!(
            [rows, width],
            [grad.dims()[0], 2 * grad.dims()[1]],
            "gate and up, and the gradient"
        );
        let shape = gate_up.shape();
        one(
            "quads_swiglu_backward",
            [primitive(gate_up), primitive(grad)],
            shape,
            |call| {
                let (gate_up, grad) = (next(call), next(call));
                B::swiglu_backward(gate_up, grad)
            },
        )
    }

    fn softmax_rows(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !fits_kernels(&x) {
            return composite::softmax_rows(x);
        }
        let shape = x.shape();
        one("quads_softmax_rows", [primitive(x)], shape, |call| {
            B::softmax_rows(next(call))
        })
    }

    fn softmax_rows_backward(y: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !(fits_kernels(&y) && fits_kernels(&grad)) {
            return composite::softmax_rows_backward(y, grad);
        }
        assert_eq!(y.dims(), grad.dims(), "the rows, and their gradient");
        let shape = y.shape();
        one(
            "quads_softmax_rows_backward",
            [primitive(y), primitive(grad)],
            shape,
            |call| {
                let (y, grad) = (next(call), next(call));
                B::softmax_rows_backward(y, grad)
            },
        )
    }

    fn log_softmax_parts(x: Tensor<Self, 2>) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        if !fits_kernels(&x) {
            return composite::log_softmax_parts(x);
        }
        let outputs = [x.shape(), Shape::from([x.dims()[0], 1])].map(|shape| (shape, DType::F32));
        let parts = defer::<B>("quads_log_softmax_parts", vec![primitive(x)], outputs, |call| {
            let (shifted, log_sum) = B::log_softmax_parts(next(call));
            call.give_float(shifted.into_primitive().tensor());
            call.give_float(log_sum.into_primitive().tensor());
        });
        let [shifted, log_sum] = exactly(parts);
        (float(shifted), float(log_sum))
    }

    fn rotate(x: Tensor<Self, 4>, rotation: &Rotation<Self>) -> Tensor<Self, 4> {
        if !(fits_kernels(&x) && fits_kernels(&rotation.cos) && fits_kernels(&rotation.sin)) {
            return rotation.apply(x);
        }
        check_rotation(&x, rotation);
        let shape = x.shape();
        let table = [&rotation.cos, &rotation.sin].map(|table| primitive(table.clone()));
        let inputs = [primitive(x)].into_iter().chain(table);
        one("quads_rotate", inputs, shape, |call| {
            let (x, cos, sin) = (next(call), next(call), next(call));
            B::rotate(x, &Rotation::new(cos, sin))
        })
    }

    fn attend_to_cache(
        query: Tensor<Self, 3>,
        cache: &LayerCache<Self>,
        places: Tensor<Self, 2, Int>,
        longest: usize,
    ) -> Tensor<Self, 2> {
        check_cache(&query, cache, &places);
        if !fits_kernels(&query) {
            return composite::attend_to_cache(query, cache, places, longest);
        }
        let [tokens, heads, d] = query.dims();
        let inputs = [
            primitive(query),
            primitive(cache.keys.clone()),
            primitive(cache.values.clone()),
        ];
        let inputs = inputs.into_iter().chain([places.into_primitive()]);
        let shape = Shape::from([tokens, heads * d]);
        one("quads_attend_to_cache", inputs, shape, move |call| {
            let (query, keys, values) = (next(call), next(call), next(call));
            let places = Tensor::from_primitive(call.int());
            B::attend_to_cache(query, &LayerCache { keys, values }, places, longest)
        })
    }

    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        let [tokens, experts] = logits.dims();
        assert!(k <= experts, "{k} of {experts} experts cannot be chosen");
        let output = (Shape::from([tokens, k]), IntElem::<B>::dtype());
        let chosen = defer::<B>("quads_top_experts", vec![primitive(logits)], [output], move |call| {
            let chosen = B::top_experts(next(call), k);
            call.give_int(chosen.into_primitive());
        });
        let [chosen] = exactly(chosen);
        Tensor::from_primitive(chosen)
    }

    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        let [rows] = expert_ids.dims();
        let outputs = [rows, rows, experts].map(|len| (Shape::from([len]), IntElem::<B>::dtype()));
        let inputs = vec![expert_ids.into_primitive()];
        let sorted = defer::<B>("quads_order_by_expert", inputs, outputs, move |call| {
            let sorted = B::order_by_expert(Tensor::from_primitive(call.int()), experts);
            for part in [sorted.order, sorted.inverse, sorted.counts] {
                call.give_int(part.into_primitive());
            }
        });
        let [order, inverse, counts] = exactly(sorted).map(Tensor::from_primitive);
        ExpertOrder { order, inverse, counts }
    }

    fn permute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>, tokens: usize) -> Tensor<Self, 2> {
        permute_rows_backward(grad, order, tokens)
    }
}

type Registered<B> = FusionTensor<<B as FusionBackend>::FusionRuntime>;

/// Registers what gives one f32 tensor.
fn one<B: FusionBackend + LayerBackend, const D: usize>(
    name: &'static str,
    inputs: impl IntoIterator<Item = Registered<B>>,
    shape: Shape,
    run: impl Fn(&mut Call<'_, B>) -> Tensor<B, D> + Send + Sync + 'static,
) -> Tensor<Fusion<B>, D> {
    let inputs = inputs.into_iter().collect();
    let output = defer::<B>(name, inputs, [(shape, DType::F32)], move |call| {
        let output = run(call);
        call.give_float(output.into_primitive().tensor());
    });
    let [output] = exactly(output);
    float(output)
}

/// The next input of a deferred operation.
fn next<B: FusionBackend, const D: usize>(call: &mut Call<'_, B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(call.float()))
}

fn primitive<B: FusionBackend, const D: usize>(x: Tensor<Fusion<B>, D>) -> FloatTensor<Fusion<B>> {
    x.into_primitive().tensor()
}

fn float<B: FusionBackend, const D: usize>(x: FloatTensor<Fusion<B>>) -> Tensor<Fusion<B>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

fn exactly<T, const N: usize>(outputs: Vec<T>) -> [T; N] {
    let outputs: Result<[T; N], _> = outputs.try_into();
    outputs.unwrap_or_else(|_| unreachable!("one tensor for each that was registered"))
}
