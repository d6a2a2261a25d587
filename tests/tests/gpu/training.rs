//! Straight-through gradients of a linear layer.
use crate::support::{Stack, assert_close, data, tensor, values};
use burn::{
    backend::{Autodiff, Flex},
    module::Param,
    tensor::Tensor,
};
use burn_nvfp4::{Nvfp4, Precision};
use burn_quads::{
    backend::QuadsBackend,
    modules::linear::{QuadsLinear, QuadsLinearConfig},
};

fn layer<B: QuadsBackend>(precision: &Precision) -> QuadsLinear<B> {
    let mut layer = QuadsLinearConfig::new(48, 24)
        .with_precision(precision.clone())
        .init::<B>(&Default::default());
    layer.weight = Param::from_tensor(tensor(&data(1, [48, 24])));
    layer.bias = layer.bias.map(|_| Param::from_tensor(tensor(&data(2, [24]))));
    layer
}

/// Output, and gradients of input, weight and bias.
fn step<B: QuadsBackend>(precision: &Precision) -> [Vec<f32>; 4] {
    let layer = layer::<Autodiff<B>>(precision);
    let x = tensor::<Autodiff<B>, 2>(&data(3, [7, 48])).require_grad();
    let y = layer.forward(x.clone());
    let up: Tensor<Autodiff<B>, 2> = tensor(&data(4, [7, 24]));
    let grads = (y.clone() * up).sum().backward();
    [
        values(y.inner()),
        values(x.grad(&grads).unwrap()),
        values(layer.weight.val().grad(&grads).unwrap()),
        values(layer.bias.unwrap().val().grad(&grads).unwrap()),
    ]
}

pub fn a_linear_layer_trains_as_on_flex<B: Stack>() {
    let tolerance = if std::any::type_name::<B>().contains("Cuda") {
        4e-3
    } else {
        1e-5
    };
    for precision in ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"] {
        let precision: Precision = precision.parse().unwrap();
        let (actual, expected) = (step::<Nvfp4<B>>(&precision), step::<Nvfp4<Flex>>(&precision));
        for (part, (a, e)) in ["output", "dx", "dw", "db"].iter().zip(actual.iter().zip(&expected)) {
            assert_close(a, e, tolerance, &format!("{precision}, {part}"));
        }
    }
}
