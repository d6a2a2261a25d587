//! Grouped products: counts that only the device knows.
use crate::support::{
    Stack, activations, assert_close, assert_product, bits, counts, data, float, lazy, on, on_flex, read, settings,
    splits_f32, tensor, tolerance, values,
};
use burn::{
    backend::Flex,
    tensor::{FloatDType, Shape, Tensor, TensorData},
};
use burn_nvfp4::{Activation, Nvfp4, Nvfp4Backend, WeightFormat};

const GROUPS: [[i32; 4]; 5] = [[3, 4, 1, 4], [0, 12, 0, 0], [5, 0, 0, 7], [0, 0, 0, 12], [12, 0, 0, 0]];

/// The weight of one group of a stack.
fn matrix(stack: &TensorData, group: usize) -> TensorData {
    let [_, d_in, d_out] = stack.shape.dims();
    let values = stack.as_slice::<f32>().unwrap();
    TensorData::new(values[group * d_in * d_out..][..d_in * d_out].to_vec(), [d_in, d_out])
}

pub fn packed_groups_are_separate_products<B: Stack>() {
    for k in [48, 64] {
        let (x, stack) = (activations(1, [12, k]), data(2, [4, k, 10]));
        for (format, activation) in settings(k) {
            let weight = on::<B>(&stack, format, &activation);
            let x_hat = read::<Flex>(&Flex::fake_quantize_activations(float::<Flex>(&x), &activation));
            for group in GROUPS {
                let y = B::packed_grouped_linear(float::<B>(&x), &weight, counts::<B>(&group));
                let y = read::<B>(&y);
                let mut start = 0;
                for (g, count) in group.into_iter().enumerate() {
                    let rows = count as usize;
                    let w = on_flex(&matrix(&stack, g), format, &activation);
                    assert_product(
                        &y[start * 10..][..rows * 10],
                        &x_hat[start * k..][..rows * k],
                        &read::<Flex>(&Flex::unpack_weight(&w)),
                        [rows, k, 10],
                        tolerance::<B>(&activation, k),
                        &format!("{format}, {activation:?}, {group:?}"),
                    );
                    start += rows;
                }
            }
            // Not of data: CubeCL 0.10 uploads nothing empty to CUDA.
            let none = B::float_empty(Shape::from([0, k]), &Default::default(), FloatDType::F32);
            let none = B::packed_grouped_linear(none, &weight, counts::<B>(&[0; 4]));
            assert_eq!(read::<B>(&none).len(), 0);
        }
    }
}

/// Of the largest value: that of Flex but for the order of sums, and on bf16 tensor cores for what a split leaves.
fn dense_tolerance<B: Stack>() -> f32 {
    match splits_f32::<B>() {
        true => 1e-4,
        false => 1e-6,
    }
}

pub fn dense_groups_are_separate_products<B: Stack>() {
    for [rows, k, n] in [[12, 20, 10], [12, 80, 130]] {
        let (x, w) = (data(3, [rows, k]), data(4, [4, k, n]));
        for group in GROUPS {
            let expected = Flex::grouped_linear(float::<Flex>(&x), float::<Flex>(&w), counts::<Flex>(&group));
            let y = B::grouped_linear(float::<B>(&x), float::<B>(&w), counts::<B>(&group));
            assert_close(
                &read::<B>(&y),
                &read::<Flex>(&expected),
                dense_tolerance::<B>(),
                &format!("{group:?}"),
            );
        }
    }
    // Views: a column-major input, and the transposed weights of a backward pass.
    let (x, w) = (data(5, [20, 14]), data(6, [4, 10, 20]));
    fn view<B: Nvfp4Backend>(x: &TensorData, w: &TensorData) -> Vec<f32> {
        let x = tensor::<B, 2>(x).transpose().slice(2..14).into_primitive().tensor();
        let w = tensor::<B, 3>(w).swap_dims(1, 2).into_primitive().tensor();
        read::<B>(&B::grouped_linear(x, w, counts::<B>(&[2, 6, 0, 4])))
    }
    assert_close(
        &view::<B>(&x, &w),
        &view::<Flex>(&x, &w),
        dense_tolerance::<B>(),
        "views",
    );
}

pub fn gradients_of_groups_are_those_of_flex<B: Stack>() {
    for [rows, m, n] in [[12, 20, 10], [12, 70, 130]] {
        let (x, g) = (data(7, [rows, m]), data(8, [rows, n]));
        for group in GROUPS {
            let expected =
                Flex::grouped_linear_weight_backward(float::<Flex>(&x), float::<Flex>(&g), counts::<Flex>(&group));
            let dw = B::grouped_linear_weight_backward(float::<B>(&x), float::<B>(&g), counts::<B>(&group));
            assert_close(
                &read::<B>(&dw),
                &read::<Flex>(&expected),
                dense_tolerance::<B>(),
                &format!("{group:?}"),
            );
        }
    }
}

pub fn a_stack_multiplies_group_by_group<B: Stack>() {
    let stack = data(9, [3, 32, 10]);
    let packed = lazy::<B, 3>(on::<B>(&stack, WeightFormat::Nvfp4, &Activation::Nvfp4));
    let x = tensor::<Nvfp4<B>, 4>(&data(10, [2, 3, 5, 32]));
    let y = x.clone().matmul(packed.unsqueeze());
    for group in 0..3 {
        let weight = on::<B>(&matrix(&stack, group), WeightFormat::Nvfp4, &Activation::Nvfp4);
        let part = |x: Tensor<Nvfp4<B>, 4>| x.slice([0..2, group..group + 1]);
        let own = values(part(x.clone()).reshape([2 * 5, 32]).matmul(lazy::<B, 2>(weight)));
        assert_eq!(bits(&values(part(y.clone()))), bits(&own), "group {group}");
    }
}
