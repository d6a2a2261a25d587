//! Unmodified linear layers with packed weights.
use burn::{
    backend::Flex,
    module::Module,
    nn::LinearConfig,
    tensor::{Distribution, Tensor},
};
use burn_nvfp4::{Nvfp4, PackLinears, Precision, packed_weight};

type B = Nvfp4<Flex>;

#[test]
fn a_packed_layer_computes_close_to_the_dense_one() {
    let device = Default::default();
    let layer = LinearConfig::new(64, 32).init::<B>(&device);
    let x = Tensor::<B, 3>::random([2, 5, 64], Distribution::Normal(0.0, 1.0), &device);
    let y = layer.forward(x.clone());
    let (packed, audit) = PackLinears::default().precision(Precision::W4A4).pack(layer).unwrap();
    assert!(packed_weight(&packed.weight.val()).is_some());
    println!("{audit}");
    let error = (packed.forward(x) - y.clone()).powf_scalar(2.0).mean().sqrt() / y.powf_scalar(2.0).mean().sqrt();
    let error = error.into_scalar();
    assert!(error > 0.01 && error < 0.25, "{error}");
}
