//! A model of your own with `QuadsLinear` layers: trained with 4-bit weights in sight, then packed for inference.
//!
//! `cargo run --release -p burn-quads --example own_model` (a few seconds)
//!
//! A small network learns the surface `sin(3x) · cos(2y)`, once in f32 and once with quantization-aware training (`w4a16`).
//! Then both are packed, and the table has the root mean square error at points that were not trained on: in float, with
//! 4-bit weights, and with 4-bit activations too, without and with residual activation compensation.
use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module},
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    prelude::*,
    tensor::activation::silu,
};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, PackError, Precision, Rac};
use burn_quads::{
    backend::QuadsBackend,
    modules::linear::{QuadsLinear, QuadsLinearConfig},
};

type Inner = Nvfp4<Flex>; // was: Flex
type Trainer = Autodiff<Inner>;

/// An ordinary Burn module. The first layer has two inputs, which blocks of 16 do not cover, and stays as it was.
#[derive(Module, Debug)]
struct Surface<B: Backend> {
    input: Linear<B>,
    hidden: QuadsLinear<B>, // was: Linear<B>
    output: QuadsLinear<B>, // was: Linear<B>
}

impl<B: QuadsBackend> Surface<B> {
    fn new(precision: Precision, device: &B::Device) -> Self {
        let linear = |d_input, d_output| {
            QuadsLinearConfig::new(d_input, d_output)
                .with_precision(precision.clone())
                .init(device)
        };
        Self {
            input: LinearConfig::new(2, 32).init(device),
            hidden: linear(32, 32),
            output: linear(32, 1),
        }
    }

    /// `[points, 2]` to `[points, 1]`.
    fn forward(&self, points: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = silu(self.input.forward(points));
        let x = silu(self.hidden.forward(x));
        self.output.forward(x)
    }

    fn mean_square_error(&self, points: Tensor<B, 2>) -> Tensor<B, 1> {
        let x = points.clone().narrow(1, 0, 1);
        let y = points.clone().narrow(1, 1, 1);
        let height = (x * 3.0).sin() * (y * 2.0).cos();
        (self.forward(points) - height).powi_scalar(2).mean()
    }
}

impl<B: Nvfp4Backend> Surface<Nvfp4<B>> {
    fn pack(mut self, precision: &Precision) -> Result<Self, PackError> {
        self.hidden = self.hidden.pack(precision)?;
        self.output = self.output.pack(precision)?;
        Ok(self)
    }
}

/// A square grid of points in `[-1, 1]²`, `[side · side, 2]`.
fn grid<B: Backend>(side: i64, device: &B::Device) -> Tensor<B, 2> {
    let axis = Tensor::<B, 1, Int>::arange(0..side, device).float() * (2.0 / (side - 1) as f64) - 1.0;
    let x = axis.clone().repeat_dim(0, side as usize).unsqueeze_dim(1);
    let y = axis.unsqueeze_dim::<2>(1).repeat_dim(1, side as usize);
    Tensor::cat(vec![x, y.reshape([-1, 1])], 1)
}

fn train(precision: Precision, device: &burn::tensor::Device<Trainer>) -> Surface<Trainer> {
    Trainer::seed(device, 1);
    let points = grid(20, device);
    let mut model = Surface::new(precision, device);
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.0).init();
    let steps = 2000;
    for step in 0..steps {
        let loss = model.mean_square_error(points.clone());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let learning_rate = 1e-2 * (1.0 - step as f64 / steps as f64);
        model = optimizer.step(learning_rate, model, grads);
    }
    model
}

fn main() -> Result<(), PackError> {
    let device = Default::default();
    let unseen = grid::<Inner>(33, &device);
    let error = |model: &Surface<Inner>| model.mean_square_error(unseen.clone()).sqrt().into_scalar();
    println!(
        "{:16}{:>8}{:>8}{:>8}{:>10}",
        "trained in", "float", "w4a16", "w4a4", "w4a4_rac"
    );
    for precision in [Precision::High, Precision::W4A16] {
        let trained = train(precision.clone(), &device).valid();
        let mut float = trained.clone();
        float.hidden = float.hidden.with_precision(Precision::High);
        float.output = float.output.with_precision(Precision::High);
        print!("{:16}{:8.4}", precision.to_string(), error(&float));
        for precision in [Precision::W4A16, Precision::W4A4] {
            print!("{:8.4}", error(&trained.clone().pack(&precision)?));
        }
        println!("{:10.4}", error(&trained.pack(&Precision::W4A4Rac(Rac::default()))?));
    }
    Ok(())
}
