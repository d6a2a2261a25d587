//! Packed weights under `Autodiff`: frozen, with exact gradients to what is around them.
mod by_hand;

use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module},
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Tensor, backend::Backend},
};
use burn_nvfp4::{Nvfp4, PackLinears, Precision, pack, packed_weight};
use by_hand::{B, bits, tensor, values};

type A = Autodiff<Nvfp4<Flex>>;

/// The gradient that the stored values give: `g · ŵᵀ`, on a plain dense backend.
fn expected_gradient(weight: Tensor<B, 2>, grad: Vec<f32>) -> Vec<u32> {
    let device = Default::default();
    let [_, d_out] = weight.dims();
    let weight = Tensor::<Flex, 2>::from_data(weight.to_data(), &device);
    let grad = Tensor::<Flex, 1>::from_floats(grad.as_slice(), &device).reshape([-1, d_out as i32]);
    bits(&grad.matmul(weight.transpose()))
}

#[test]
fn the_gradient_of_the_input_goes_through_the_stored_weight() {
    let layer = LinearConfig::new(64, 32)
        .with_bias(false)
        .init::<B>(&Default::default());
    for precision in [Precision::W4A16, Precision::W4A4, Precision::Fp8] {
        let packed = PackLinears::default()
            .precision(precision.clone())
            .pack(layer.clone())
            .unwrap()
            .0;
        let frozen: Linear<A> = packed.clone().train();
        let x = tensor::<A, 3>(1, [2, 3, 64]).require_grad();
        let upstream = tensor::<A, 3>(2, [2, 3, 32]);
        let y = frozen.forward(x.clone());
        assert_eq!(
            bits(&y),
            bits(&packed.forward(x.clone().inner())),
            "{precision}: the forward pass is the packed one"
        );
        let grads = (y * upstream.clone()).sum().backward();
        assert_eq!(
            bits(&x.grad(&grads).unwrap()),
            expected_gradient(packed.weight.val(), values(&upstream)),
            "{precision}"
        );
        assert!(frozen.weight.val().grad(&grads).is_none());
    }
}

#[test]
fn a_matmul_has_the_same_gradient() {
    let weight = pack(tensor::<B, 2>(3, [64, 32]), &Precision::W4A4, None, None).unwrap();
    let x = tensor::<A, 2>(4, [5, 64]).require_grad();
    let frozen = Tensor::<A, 2>::from_inner(weight.clone().dequantize());
    let grads = x.clone().matmul(frozen).sum().backward();
    assert_eq!(
        bits(&x.grad(&grads).unwrap()),
        expected_gradient(weight.dequantize(), vec![1.0; 5 * 32])
    );
}

#[derive(Module, Debug)]
struct Adapted<B: Backend> {
    base: Linear<B>,
    down: Linear<B>,
    up: Linear<B>,
}

impl<B: Backend> Adapted<B> {
    fn new() -> Self {
        let device = Default::default();
        let linear = |i, o| LinearConfig::new(i, o).with_bias(false).init(&device);
        Self {
            base: linear(64, 32),
            down: linear(64, 16),
            up: linear(16, 32),
        }
    }
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.base.forward(x.clone()) + self.up.forward(self.down.forward(x))
    }
}

#[test]
fn an_adapter_trains_on_a_frozen_packed_base() {
    let packer = PackLinears::default().precision(Precision::W4A4).except(["down", "up"]);
    // Packed on the autodiff backend itself.
    let (mut model, audit) = packer.pack(Adapted::<A>::new()).unwrap();
    assert_eq!(audit.packed(), 1);
    let base = packed_weight(&model.base.weight.val().inner()).unwrap();
    let x = tensor::<A, 2>(5, [32, 64]);
    let target = tensor::<A, 2>(6, [32, 32]);
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..60 {
        let loss = (model.forward(x.clone()) - target.clone()).powf_scalar(2.0).mean();
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        assert!(gradients.get::<B, 2>(model.base.weight.id).is_none());
        model = optimizer.step(1e-2, model, gradients);
    }
    assert!(losses[59] < 0.5 * losses[0], "{losses:?}");
    let after = packed_weight(&model.base.weight.val().inner()).unwrap();
    assert_eq!(
        (after.codes(), after.block_scales()),
        (base.codes(), base.block_scales())
    );

    let inference = model.valid();
    let packed = packed_weight(&inference.base.weight.val()).expect("valid() keeps it packed");
    assert_eq!(packed.codes(), base.codes());
    assert_eq!(bits(&inference.forward(x.clone().inner())), bits(&model.forward(x)));
}

#[test]
fn parameters_keep_their_ids_and_count() {
    let layer = LinearConfig::new(64, 32).init::<B>(&Default::default());
    let (id, count) = (layer.weight.id, layer.num_params());
    let packed = PackLinears::default().pack(layer).unwrap().0;
    assert_eq!((packed.weight.id, packed.num_params()), (id, count));
    let device = Default::default();
    for moved in [
        packed.clone().to_device(&device),
        packed.clone().fork(&device),
        packed.clone().no_grad(),
    ] {
        assert!(packed_weight(&moved.weight.val()).is_some());
        assert_eq!(bits(&moved.weight.val()), bits(&packed.weight.val()));
    }
    assert_eq!(packed.devices(), vec![device]);
    let trained: Linear<A> = packed.train();
    assert!(packed_weight(&trained.clone().fork(&device).valid().weight.val()).is_some());
}
