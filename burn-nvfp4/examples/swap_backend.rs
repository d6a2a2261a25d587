//! What a user of Burn changes to run a model of their own in W4A4: two lines.
//!
//! `cargo run --release -p burn-nvfp4 --example swap_backend`
use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module},
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Distribution, Int, Tensor, activation::relu, backend::Backend},
};
use burn_nvfp4::{Nvfp4, PackLinears};

// The first change. It was: `type B = Flex;`
type B = Nvfp4<Flex>;

/// An ordinary Burn model: is a point of the plane in an even or an odd ring around the origin?
#[derive(Module, Debug)]
struct Rings<B: Backend> {
    input: Linear<B>,
    hidden_1: Linear<B>,
    hidden_2: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Rings<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            input: LinearConfig::new(2, 128).init(device),
            hidden_1: LinearConfig::new(128, 128).init(device),
            hidden_2: LinearConfig::new(128, 128).init(device),
            output: LinearConfig::new(128, 2).init(device),
        }
    }
    /// Points `[batch, 2]` to logits `[batch, 2]`.
    fn forward(&self, points: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = relu(self.input.forward(points));
        let x = relu(self.hidden_1.forward(x));
        let x = relu(self.hidden_2.forward(x));
        self.output.forward(x)
    }
}

/// Points and the parity of their ring, of width 1/2.
fn batch<B: Backend>(size: usize, device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
    let points = Tensor::<B, 2>::random([size, 2], Distribution::Uniform(-1.0, 1.0), device);
    let radius = points.clone().powf_scalar(2.0).sum_dim(1).sqrt().squeeze_dim::<1>(1);
    (points, radius.mul_scalar(2.0).floor().int().remainder_scalar(2))
}

fn accuracy<B: Backend>(logits: &Tensor<B, 2>, rings: &Tensor<B, 1, Int>) -> f64 {
    let hits = logits
        .clone()
        .argmax(1)
        .squeeze_dim::<1>(1)
        .equal(rings.clone())
        .int()
        .sum();
    100.0 * hits.into_data().iter::<f64>().sum::<f64>() / rings.dims()[0] as f64
}

fn main() -> Result<(), burn_nvfp4::PackError> {
    let device = Default::default();
    B::seed(&device, 1);

    // Training is what it was: nothing is packed, so every operation is Flex's.
    let mut model = Rings::<Autodiff<B>>::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let loss = CrossEntropyLossConfig::new().init(&device);
    for _ in 0..300 {
        let (points, rings) = batch(256, &device);
        let gradients = loss.forward(model.forward(points), rings).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(3e-3, model, gradients);
    }
    let dense = model.valid();

    // The second change: pack the linear layers. `input` has two features, no multiple of NVFP4's block of 16.
    let (packed, audit) = PackLinears::default().except(["input", "output"]).pack(dense.clone())?;

    println!("{audit}");
    let (points, rings) = batch(4096, &device);
    let (before, after) = (dense.forward(points.clone()), packed.forward(points));
    let size = |t: Tensor<B, 2>| t.powf_scalar(2.0).mean().sqrt().into_scalar();
    let error = size(after.clone() - before.clone()) / size(before.clone());
    println!(
        "accuracy       {:.1} % dense, {:.1} % packed",
        accuracy(&before, &rings),
        accuracy(&after, &rings)
    );
    println!("output error   {:.1} %", 100.0 * error);
    println!(
        "linear weights {} bytes dense, {} bytes packed",
        audit.bytes_before(),
        audit.bytes_after()
    );
    Ok(())
}
