//! Models that are not packed: `Nvfp4<Flex>` gives Flex's bits, in forward passes and in training.
mod by_hand;

use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param},
    nn::{
        BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
        gru::{Gru, GruConfig},
        lstm::{Lstm, LstmConfig},
        pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{
        Int, Tensor, activation,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_nvfp4::Nvfp4;
use by_hand::{noise, tensor};

/// Sets every parameter to reproducible values, the same on every backend.
struct Fill(u32);
impl<B: Backend> ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|old| {
            let grad = old.is_require_grad();
            (tensor::<B, D>(seed, old.dims()) * 0.2).set_require_grad(grad)
        })
    }
}

/// All parameters' bits, in order.
#[derive(Default)]
struct Bits(Vec<u32>);
impl<B: Backend> ModuleVisitor<B> for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.extend(by_hand::bits(&param.val()));
    }
}

#[derive(Module, Debug)]
struct Everything<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    pool: AdaptiveAvgPool2d,
    lstm: Lstm<B>,
    gru: Gru<B>,
    layer_norm: LayerNorm<B>,
    embedding: Embedding<B>,
    encoder: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> Everything<B> {
    fn new() -> Self {
        let device = Default::default();
        let model = Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).init(&device),
            norm: BatchNormConfig::new(4).init(&device),
            pool: AdaptiveAvgPool2dConfig::new([4, 4]).init(),
            lstm: LstmConfig::new(16, 32, true).init(&device),
            gru: GruConfig::new(32, 32, true).init(&device),
            layer_norm: LayerNormConfig::new(32).init(&device),
            embedding: EmbeddingConfig::new(11, 32).init(&device),
            encoder: TransformerEncoderConfig::new(32, 64, 4, 2)
                .with_dropout(0.0)
                .init(&device),
            output: LinearConfig::new(32, 11).init(&device),
        };
        model.map(&mut Fill(0))
    }
    /// Images `[batch, 1, 8, 8]` and tokens `[batch, 4]` to logits `[batch, 4, 11]`.
    fn forward(&self, images: Tensor<B, 4>, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let x = self
            .pool
            .forward(activation::relu(self.norm.forward(self.conv.forward(images))));
        let x = x.flatten::<3>(2, 3); // [batch, 4, 16]
        let (x, _) = self.lstm.forward(x, None);
        let x = self.gru.forward(x, None);
        let x = self.layer_norm.forward(x) + self.embedding.forward(tokens);
        self.output
            .forward(self.encoder.forward(TransformerEncoderInput::new(x)))
    }
}

fn inputs<B: Backend>() -> (Tensor<B, 4>, Tensor<B, 2, Int>) {
    let tokens = Tensor::<B, 2, Int>::from_ints([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 1]], &Default::default());
    (tensor(99, [3, 1, 8, 8]), tokens)
}

#[test]
fn forward_bits_are_those_of_flex() {
    fn run<B: Backend>() -> Vec<u32> {
        let (images, tokens) = inputs::<B>();
        by_hand::bits(&Everything::<B>::new().forward(images, tokens))
    }
    let plain = run::<Flex>();
    assert!(plain.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    assert_eq!(plain, run::<Nvfp4<Flex>>());
}

#[test]
fn training_bits_are_those_of_flex() {
    /// Loss of each step, parameters at the end, and what the trained model says.
    fn run<B: AutodiffBackend>() -> (Vec<u32>, Vec<u32>, Vec<u32>) {
        let mut model = Everything::<B>::new();
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for _ in 0..6 {
            let (images, tokens) = inputs::<B>();
            let logits = activation::log_softmax(model.forward(images, tokens.clone()), 2);
            let loss = logits.gather(2, tokens.unsqueeze_dim(2)).mean().neg();
            losses.extend(by_hand::bits(&loss.clone()));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-2, model, gradients);
        }
        let mut params = Bits::default();
        model.visit(&mut params);
        let (images, tokens) = inputs::<B::InnerBackend>();
        (losses, params.0, by_hand::bits(&model.valid().forward(images, tokens)))
    }
    let plain = run::<Autodiff<Flex>>();
    let losses: Vec<f32> = plain.0.iter().map(|bits| f32::from_bits(*bits)).collect();
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "it learns: {losses:?}");
    assert_eq!(plain, run::<Autodiff<Nvfp4<Flex>>>());
}

#[test]
fn random_numbers_are_those_of_flex() {
    fn run<B: Backend>() -> Vec<u32> {
        let device = Default::default();
        B::seed(&device, 7);
        by_hand::bits(&Tensor::<B, 1>::random(
            [64],
            burn::tensor::Distribution::Normal(0.0, 1.0),
            &device,
        ))
    }
    // Flex's seed is global to the process, and only this test seeds it.
    let plain = run::<Flex>();
    assert_eq!(plain, run::<Nvfp4<Flex>>());
    assert_ne!(noise(1, 4), noise(2, 4));
}
