//! Operations that are no product with activations: on a packed weight they give what they give on its values.
mod by_hand;

use burn::tensor::{Bool, DType, Int, Tensor, activation, module::embedding};
use burn_nvfp4::{Precision, pack, packed_weight};
use by_hand::{B, bits, tensor, values};

/// The same weight as a quantized tensor, as a lazy float tensor, and dense.
fn weights() -> [Tensor<B, 2>; 3] {
    let quantized = pack(tensor::<B, 2>(1, [32, 24]), &Precision::W4A4, None, None).unwrap();
    let lazy = quantized.clone().dequantize();
    let dense = Tensor::from_data(lazy.to_data(), &Default::default());
    assert!(packed_weight(&quantized).is_some() && packed_weight(&lazy).is_some() && packed_weight(&dense).is_none());
    [quantized, lazy, dense]
}

fn same<const D: usize>(name: &str, operation: impl Fn(Tensor<B, 2>) -> Tensor<B, D>) {
    let [quantized, lazy, dense] = weights().map(&operation);
    for (kind, result) in [("quantized", quantized), ("lazy", lazy)] {
        assert_eq!(result.dims(), dense.dims(), "{name} of a {kind} tensor");
        let result = result.dequantize();
        assert_eq!(
            result.to_data().dtype,
            dense.to_data().dtype,
            "{name} of a {kind} tensor"
        );
        let wide = |t: &Tensor<B, D>| bits(&t.clone().cast(DType::F32));
        assert_eq!(wide(&result), wide(&dense), "{name} of a {kind} tensor");
    }
}
fn same_int<const D: usize>(name: &str, operation: impl Fn(Tensor<B, 2>) -> Tensor<B, D, Int>) {
    let [quantized, lazy, dense] = weights().map(|w| operation(w).into_data());
    assert!(quantized == dense && lazy == dense, "{name}");
}
fn same_bool<const D: usize>(name: &str, operation: impl Fn(Tensor<B, 2>) -> Tensor<B, D, Bool>) {
    let [quantized, lazy, dense] = weights().map(|w| operation(w).into_data());
    assert!(quantized == dense && lazy == dense, "{name}");
}

fn indices() -> Tensor<B, 1, Int> {
    Tensor::from_ints([3, 0, 31, 3], &Default::default())
}
fn other() -> Tensor<B, 2> {
    tensor(2, [32, 24])
}

#[test]
fn shapes_and_selections() {
    same("slice", |w| w.slice([3..9, 2..20]));
    same("slice with step", |w| w.slice(burn::tensor::s![0..32;3, ..]));
    same("narrow", |w| w.narrow(1, 4, 8));
    same("chunk", |w| w.chunk(3, 1).remove(1));
    same("select", |w| w.select(0, indices()));
    same("gather", |w| {
        w.gather(0, indices().unsqueeze_dim::<2>(1).repeat_dim(1, 24))
    });
    same("flip", |w| w.flip([0]));
    same("reshape", |w| w.reshape([24, 32]));
    same("flatten", |w| w.flatten::<1>(0, 1));
    same("expand", |w| w.expand([3, 32, 24]));
    same("repeat_dim", |w| w.repeat_dim(0, 2));
    same("swap_dims", |w| w.swap_dims(0, 1));
    same("permute", |w| w.permute([1, 0]));
    same("transpose", |w| w.transpose());
    same("unsqueeze", |w| w.unsqueeze::<4>());
    same("unsqueeze in the middle", |w| w.unsqueeze_dim::<3>(1));
    same("unsqueeze at the end", |w| w.unsqueeze_dim::<3>(2));
    same("movedim", |w| w.unsqueeze::<3>().movedim(0, 2));
    same("split", |w| w.split(10, 0).remove(3));
    same("slice_assign", |w| {
        w.slice_assign([0..2, 0..2], Tensor::ones([2, 2], &Default::default()))
    });
    same("assigned from", |w| {
        other().slice_assign([0..2, 0..2], w.slice([5..7, 5..7]).dequantize())
    });
    same("select_assign", |w| {
        let values = Tensor::ones([4, 24], &Default::default());
        w.select_assign(0, indices(), values, burn::tensor::IndexingUpdateOp::Add)
    });
    same("cat first", |w| Tensor::cat(vec![w.dequantize(), other()], 0));
    same("cat last", |w| Tensor::cat(vec![other(), w], 1));
    same("cat alike", |w| Tensor::cat(vec![w.clone(), w], 0));
    same("stack", |w| {
        Tensor::stack::<3>(vec![w.clone().dequantize(), w.dequantize()], 0)
    });
    same("embedding", |w| embedding(w, indices().unsqueeze()));
    same("cast", |w| w.dequantize().cast(DType::F16));
}

#[test]
fn arithmetic() {
    same("add", |w| w + other());
    same("add to", |w| other() + w);
    same("add to itself", |w| w.clone() + w);
    same("sub", |w| w - other());
    same("mul", |w| w * other());
    same("div", |w| w / other());
    same("div by", |w| other() / w);
    same("powf", |w| w.abs().powf(other().abs()));
    same("remainder", |w| w.remainder(other()));
    same("add_scalar", |w| w + 1.5);
    same("sub_scalar", |w| w - 1.5);
    same("mul_scalar", |w| w * 1.5);
    same("div_scalar", |w| w / 1.5);
    same("powf_scalar", |w| w.powf_scalar(2.0));
    same("powi_scalar", |w| w.powi_scalar(3));
    same("neg", |w| -w);
    same("recip", |w| w.recip());
    same("abs", |w| w.abs());
    same("sign", |w| w.sign());
    same("exp", |w| w.exp());
    same("log", |w| w.abs().log());
    same("log1p", |w| w.abs().log1p());
    same("sqrt", |w| w.abs().sqrt());
    same("sin", |w| w.sin());
    same("cos", |w| w.cos());
    same("tanh", |w| w.tanh());
    same("erf", |w| w.erf());
    same("clamp", |w| w.clamp(-0.5, 0.5));
    same("clamp_min", |w| w.clamp_min(0.0));
    same("clamp_max", |w| w.clamp_max(0.0));
    same("round", |w| w.round());
    same("softmax", |w| activation::softmax(w, 1));
    same("relu", activation::relu);
    same("gelu", activation::gelu);
    same("on the left of a matmul", |w| w.matmul(tensor(3, [24, 8])));
    same("on both sides of a matmul", |w| {
        w.clone().transpose().matmul(w.clone().dequantize() * 1.0)
    });
    same("mask_fill", |w| {
        let mask = other().greater_elem(0.0);
        w.mask_fill(mask, 7.0)
    });
    same("mask_where", |w| {
        let mask = other().greater_elem(0.0);
        w.mask_where(mask, other())
    });
}

#[test]
fn reductions_and_order() {
    same("sum", |w| w.sum());
    same("sum_dim", |w| w.sum_dim(0));
    same("mean", |w| w.mean());
    same("mean_dim", |w| w.mean_dim(1));
    same("prod_dim", |w| w.prod_dim(1));
    same("cumsum", |w| w.cumsum(0));
    same("max", |w| w.max());
    same("max_dim", |w| w.max_dim(0));
    same("max_dim_with_indices", |w| w.max_dim_with_indices(0).0);
    same("max_abs", |w| w.max_abs());
    same("min", |w| w.min());
    same("min_dim", |w| w.min_dim(1));
    same("sort", |w| w.sort(1));
    same("sort_descending", |w| w.sort_descending(0));
    same("sort_with_indices", |w| w.sort_with_indices(0).0);
    same("topk", |w| w.topk(3, 1));
    same("var", |w| w.var(1));
    same_int("argmax", |w| w.argmax(1));
    same_int("argmin", |w| w.argmin(0));
    same_int("argsort", |w| w.argsort(1));
    same_int("max_dim indices", |w| w.max_dim_with_indices(0).1);
    same_int("int", |w| (w * 10.0).int());
    same_bool("equal", |w| w.clone().equal(w));
    same_bool("greater", |w| w.greater(other()));
    same_bool("lower_elem", |w| w.lower_elem(0.25));
    same_bool("any", |w| w.any());
    same_bool("all_dim", |w| w.all_dim(1));
    same_bool("is_nan", |w| w.is_nan());
}

#[test]
fn reading_and_printing() {
    let [quantized, lazy, dense] = weights();
    assert_eq!(lazy.to_data(), dense.to_data());
    assert_eq!(format!("{lazy}"), format!("{dense}"));
    assert_eq!((lazy.dtype(), lazy.shape()), (dense.dtype(), dense.shape()));
    assert_eq!((quantized.shape(), quantized.device()), (dense.shape(), dense.device()));
    // Burn reads several tensors in one transaction, each kind its own way.
    let ids = indices();
    let data = burn::tensor::Transaction::default()
        .register(quantized.clone())
        .register(lazy)
        .register(ids.clone())
        .register(dense.clone())
        .register(quantized.clone())
        .execute();
    assert_eq!(data.len(), 5);
    assert_eq!(
        (&data[0], &data[1], &data[3], &data[4]),
        (
            &quantized.to_data(),
            &dense.to_data(),
            &dense.to_data(),
            &quantized.to_data()
        )
    );
    assert_eq!(data[2], ids.to_data());
}

#[test]
fn what_keeps_a_weight_packed() {
    let weight = pack(tensor::<B, 2>(4, [32, 24]), &Precision::W4A4, None, None).unwrap();
    let packed = |w: &Tensor<B, 2>| packed_weight(w).is_some();
    for w in [weight.clone(), weight.dequantize()] {
        assert!(
            packed(&w.clone().transpose())
                && packed(&w.clone().permute([1, 0]))
                && packed(&w.clone().reshape([32, 24]))
        );
        assert!(
            packed(&w.clone().detach().set_require_grad(false)) && packed(&w.clone().to_device(&Default::default()))
        );
        assert!(packed(&w.clone().expand([32, 24])));
        assert!(packed_weight(&w.clone().unsqueeze::<3>()).is_some());
        assert!(packed_weight(&w.clone().unsqueeze_dim::<3>(1)).is_none());
        assert!(!packed(&(w.clone() * 1.0)) && !packed(&w.clone().slice(0..16)) && !packed(&w.reshape([24, 32])));
    }
}

/// Burn's own quantization is B's business.
#[test]
fn other_schemes_are_those_of_flex() {
    use burn::{
        backend::Flex,
        tensor::{
            backend::Backend,
            quantization::{QuantLevel, QuantScheme, QuantStore, QuantValue},
        },
    };
    fn run<Any: Backend>() -> (burn::tensor::TensorData, Vec<u32>, Vec<u32>) {
        let scheme = QuantScheme::default()
            .with_value(QuantValue::Q8S)
            .with_level(QuantLevel::Tensor)
            .with_store(QuantStore::Native);
        let w = tensor::<Any, 2>(5, [32, 24]).quantize_dynamic(&scheme);
        let x = tensor::<Any, 2>(6, [3, 32]);
        let back = Tensor::<Any, 2>::from_data(w.clone().into_data(), &Default::default());
        (w.clone().into_data(), bits(&back.dequantize()), bits(&x.matmul(w)))
    }
    assert_eq!(run::<Flex>(), run::<B>());
}

#[test]
fn burns_own_call_packs_with_full_precision_activations() {
    let w = tensor::<B, 2>(7, [32, 24]);
    let scheme = burn_nvfp4::WeightFormat::Nvfp4.scheme();
    let packed = packed_weight(&w.clone().quantize_dynamic(&scheme)).unwrap();
    let expected = packed_weight(&pack(w.clone(), &Precision::W4A16, None, None).unwrap()).unwrap();
    assert_eq!(
        (packed.codes(), packed.activation()),
        (expected.codes(), expected.activation())
    );
    let error = std::panic::catch_unwind(|| tensor::<B, 2>(7, [20, 24]).quantize_dynamic(&scheme)).unwrap_err();
    let error = error.downcast_ref::<String>().unwrap();
    assert!(
        error.contains("shape [20, 24]: d_in = 20 is not a multiple of 16"),
        "{error}"
    );
    assert_eq!(values(&w).len(), 32 * 24);
}
