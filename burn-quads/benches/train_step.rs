//! One training step of a tiny mixture of experts, in pieces: `cargo bench -p burn-quads --bench train_step`.
//!
//! Prints the median of several repetitions in milliseconds, on the shape of the default recipe: 256 sequences of 12
//! tokens, hidden size 64, 2 layers, 4 experts of width 64, 2 a token.
use std::{hint::black_box, time::Instant};

use burn::{
    backend::{Autodiff, Flex},
    module::AutodiffModule,
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Int, Tensor, TensorData, activation::log_softmax},
};
use burn_nvfp4::{Nvfp4, Precision, Rac};
use burn_quads::{
    modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig},
    sync::sync,
};

type Inner = Nvfp4<Flex>;
type Trainer = Autodiff<Inner>;

const BATCH: usize = 256;
const SEQ: usize = 12;
const VOCAB: usize = 16;

fn median(mut run: impl FnMut() -> f64) -> f64 {
    run();
    let mut times: Vec<f64> = (0..9).map(|_| run()).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let value = black_box(run());
    (value, start.elapsed().as_secs_f64() * 1e3)
}

fn loss(model: &QuadsMoe<Trainer>, tokens: &Tensor<Trainer, 2, Int>) -> Tensor<Trainer, 1> {
    let logits = model.forward(tokens.clone()).reshape([BATCH * SEQ, VOCAB]);
    let targets = tokens.clone().reshape([BATCH * SEQ, 1]);
    log_softmax(logits, 1).gather(1, targets).mean().neg()
}

fn main() {
    let device = Default::default();
    let ids: Vec<i64> = (0..BATCH * SEQ)
        .map(|i| (i * i % 7 + i) as i64 % VOCAB as i64)
        .collect();
    let ids = TensorData::new(ids, [BATCH, SEQ]);
    let tokens = Tensor::<Trainer, 2, Int>::from_data(ids.clone(), &device);
    let inner_tokens = Tensor::<Inner, 2, Int>::from_data(ids, &device);
    println!(
        "{:32} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "trainer", "score", "forward", "backward", "AdamW", "sync"
    );
    for precision in [
        Precision::High,
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac::default()),
        Precision::Fp8,
    ] {
        let mut model = QuadsMoeConfig::new(VOCAB, 64, 2, 4, 4, 16, 4, 2, 64)
            .with_precision(precision.clone())
            .init_seeded::<Trainer>(0, &device);
        let valid = model.valid();
        let score = median(|| timed(|| valid.forward(inner_tokens.clone())).1);
        let forward = median(|| timed(|| loss(&model, &tokens)).1);
        let backward = median(|| {
            let loss = loss(&model, &tokens);
            timed(|| loss.backward()).1
        });
        let mut optimizer = AdamWConfig::new().init();
        let step = median(|| {
            let grads = GradientsParams::from_grads(loss(&model, &tokens).backward(), &model);
            let (stepped, time) = timed(|| optimizer.step(1e-3, model.clone(), grads));
            model = stepped;
            time
        });
        let rollout = Precision::W4A4Rac(Rac::default());
        let sync = median(|| timed(|| sync(&model, &rollout, None).unwrap()).1);
        println!(
            "{:32} {score:9.2} {forward:9.2} {backward:9.2} {step:9.2} {sync:9.2}",
            precision.to_string()
        );
    }
}
