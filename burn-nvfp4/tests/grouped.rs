//! Grouped products: tokens sorted by group, each group with its own weight.
mod by_hand;

use burn::{
    backend::Flex,
    tensor::{DType, Int, Tensor, TensorPrimitive},
};
use burn_nvfp4::{Activation, Compensation, Nvfp4Backend, PackedWeight, WeightFormat};
use by_hand::{bits, product, tensor, values};
use std::panic::{AssertUnwindSafe, catch_unwind};

type T<const D: usize> = Tensor<Flex, D>;

fn counts(counts: &[i32]) -> burn::tensor::ops::IntTensor<Flex> {
    Tensor::<Flex, 1, Int>::from_ints(counts, &Default::default()).into_primitive()
}
fn primitive<const D: usize>(tensor: T<D>) -> burn::tensor::ops::FloatTensor<Flex> {
    tensor.into_primitive().tensor()
}
fn dense(x: T<2>, weight: T<3>, group: &[i32]) -> T<2> {
    let y = Flex::grouped_linear(primitive(x), primitive(weight), counts(group));
    Tensor::from_primitive(TensorPrimitive::Float(y))
}
fn packed(x: T<2>, weight: &PackedWeight<Flex>, group: &[i32]) -> T<2> {
    Tensor::from_primitive(TensorPrimitive::Float(Flex::packed_grouped_linear(
        primitive(x),
        weight,
        counts(group),
    )))
}

/// One matmul a group.
fn separately(x: &T<2>, weight: &T<3>, group: &[i32]) -> Vec<u32> {
    let mut all = Vec::new();
    let mut start = 0;
    for (g, count) in group.iter().enumerate() {
        let end = start + *count as usize;
        if end > start {
            let w = weight.clone().slice(g..g + 1).squeeze_dim::<2>(0);
            all.extend(bits(&x.clone().slice(start..end).matmul(w)));
        }
        start = end;
    }
    all
}

#[test]
fn dense_groups_are_separate_matmuls() {
    let x = tensor::<Flex, 2>(1, [12, 20]);
    let weight = tensor::<Flex, 3>(2, [4, 20, 10]);
    for group in [[3, 4, 1, 4], [0, 12, 0, 0], [5, 0, 0, 7], [0, 0, 0, 12]] {
        assert_eq!(
            bits(&dense(x.clone(), weight.clone(), &group)),
            separately(&x, &weight, &group),
            "{group:?}"
        );
    }
    let none = dense(x.clone().slice(0..0), weight, &[0, 0, 0, 0]);
    assert_eq!(none.dims(), [0, 10]);
}

#[test]
fn dense_groups_of_views() {
    let x = tensor::<Flex, 2>(3, [20, 14]).transpose().slice(2..14);
    let weight = tensor::<Flex, 3>(4, [10, 20, 5]).permute([2, 1, 0]).slice(1..5);
    let group = [2, 6, 0, 4];
    assert_eq!(
        bits(&dense(x.clone(), weight.clone(), &group)),
        separately(&x, &weight, &group)
    );
    let x = tensor::<Flex, 2>(5, [12, 20]).flip([0]);
    let y = dense(x.clone(), weight.clone(), &group);
    let copied = Tensor::from_data(x.to_data(), &Default::default());
    let expected = separately(&copied, &weight, &group);
    for (y, expected) in values(&y).iter().zip(expected) {
        assert!((y - f32::from_bits(expected)).abs() < 1e-5);
    }
}

#[test]
fn dense_groups_of_another_type() {
    let x = tensor::<Flex, 2>(6, [6, 16]).cast(DType::F64);
    let weight = tensor::<Flex, 3>(7, [2, 16, 4]).cast(DType::F64);
    let y = dense(x.clone(), weight.clone(), &[2, 4]);
    assert_eq!(y.dtype(), DType::F64);
    let narrow = |t: T<2>| t.cast(DType::F32);
    let expected = separately(&narrow(x), &weight.cast(DType::F32), &[2, 4]);
    for (y, expected) in values(&narrow(y)).iter().zip(expected) {
        assert!((y - f32::from_bits(expected)).abs() < 1e-5);
    }
}

#[test]
fn packed_groups_are_separate_products() {
    let x = tensor::<Flex, 2>(8, [12, 32]);
    let weight = tensor::<Flex, 3>(9, [4, 32, 10]);
    let settings = [
        Activation::Full,
        Activation::Nvfp4,
        Activation::Compensated(Compensation::All),
    ];
    for activation in settings {
        let stack = Flex::pack_weight(primitive(weight.clone()), WeightFormat::Nvfp4, None).unwrap();
        let stack = stack.with_activation(activation.clone()).unwrap();
        for group in [[3, 4, 1, 4], [0, 12, 0, 0], [5, 0, 0, 7]] {
            let y = bits(&packed(x.clone(), &stack, &group));
            let mut expected = Vec::new();
            let mut start = 0;
            for (g, count) in group.into_iter().enumerate() {
                let own = weight.clone().slice(g..g + 1).squeeze_dim::<2>(0);
                let own = Flex::pack_weight(primitive(own), WeightFormat::Nvfp4, None).unwrap();
                let own = own.with_activation(activation.clone()).unwrap();
                let rows = x.clone().slice(start..start + count as usize);
                expected.extend(product(&values(&rows), &own).into_iter().map(f32::to_bits));
                start += count as usize;
            }
            assert_eq!(y, expected, "{activation:?}, {group:?}");
        }
        assert_eq!(packed(x.clone().slice(0..0), &stack, &[0, 0, 0, 0]).dims(), [0, 10]);
    }
}

#[test]
fn counts_that_do_not_fit_are_refused() {
    let x = tensor::<Flex, 2>(10, [6, 16]);
    let weight = tensor::<Flex, 3>(11, [2, 16, 4]);
    let stack = Flex::pack_weight(primitive(weight.clone()), WeightFormat::Nvfp4, None).unwrap();
    for group in [&[2, 3][..], &[6], &[2, 2, 2], &[7, -1]] {
        let attempt = |f: &dyn Fn() -> T<2>| catch_unwind(AssertUnwindSafe(f)).map(|_| ()).unwrap_err();
        for error in [
            attempt(&|| dense(x.clone(), weight.clone(), group)),
            attempt(&|| packed(x.clone(), &stack, group)),
        ] {
            let error = error.downcast_ref::<String>().unwrap();
            let about_counts = error.contains("expected 2 counts that sum to 6 rows") || error.contains("-1 rows");
            assert!(error.starts_with("grouped linear: ") && about_counts, "{error}");
        }
    }
    let narrow = catch_unwind(AssertUnwindSafe(|| dense(tensor(12, [6, 8]), weight.clone(), &[2, 4]))).unwrap_err();
    let narrow = narrow.downcast_ref::<String>().unwrap();
    assert!(
        narrow.contains("input [6, 8] does not match the weights [2, 16, 4]"),
        "{narrow}"
    );
}
