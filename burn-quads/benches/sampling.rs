//! Tokens per second of sampling in each precision, beside the dense f32 model.
//!
//! `cargo bench -p burn-quads --bench sampling` for the setting of the requirement (d_model 128, 4 layers, 64 rows);
//! `-- --hidden 64 --layers 2 --rows 256 --rounds 9` for another. All precisions run in one process and take turns, so
//! that whatever else the machine does falls on all of them; ratios are medians over rounds of ratios within a round.
use burn::backend::Flex;
use burn_nvfp4::{Nvfp4, Precision};
use burn_quads::{
    modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig},
    rollout::{RolloutEngine, SamplingParams},
    sync::pack_model,
};
use std::time::Instant;

type B = Nvfp4<Flex>;

const VOCAB: usize = 32;
const PROMPT: usize = 16;
const NEW_TOKENS: usize = 48;

/// The value after `--name`, or a default.
fn option(name: &str, default: usize) -> usize {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|a| a == name) {
        Some(i) => arguments
            .get(i + 1)
            .and_then(|value| value.parse().ok())
            .unwrap_or_else(|| panic!("{name} needs a number")),
        None => default,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let (hidden, layers) = (option("--hidden", 128), option("--layers", 4));
    let (rows, rounds) = (option("--rows", 64), option("--rounds", 7));
    let config = QuadsMoeConfig::new(VOCAB, hidden, layers, 4, 2, hidden / 4, 8, 2, hidden)
        .with_max_position_embeddings(PROMPT + NEW_TOKENS)
        .with_precision(Precision::High);
    let dense: QuadsMoe<B> = config.init_seeded(1, &Default::default());
    let prompts: Vec<Vec<u32>> = (0..rows)
        .map(|i| (0..PROMPT).map(|j| ((i * 7 + j * (i + 3)) % VOCAB) as u32).collect())
        .collect();
    let params = SamplingParams {
        temperature: 1.0,
        max_new_tokens: NEW_TOKENS,
        eos_token_ids: vec![],
        seed: 1,
        record_routing: false,
    };

    let names = ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"];
    let mut runs: Vec<_> = names
        .iter()
        .map(|name| {
            let precision: Precision = name.parse().expect("a precision");
            let (model, _) = pack_model(dense.clone(), &precision, None).expect("the model can be packed");
            let engine = RolloutEngine::new(rows, PROMPT + NEW_TOKENS).expect("room");
            (model, engine, Vec::new())
        })
        .collect();
    // The first round warms up and is not counted.
    for round in 0..=rounds {
        for (model, engine, seconds) in &mut runs {
            let start = Instant::now();
            engine.generate(model, &prompts, &params).expect("completions");
            if round > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }

    println!("d_model {hidden}, {layers} layers, {rows} rows, {PROMPT} + {NEW_TOKENS} tokens, {rounds} rounds, Flex");
    println!("{:<10}{:>12}{:>12}{:>12}", "precision", "tokens/s", "best", "of dense");
    let dense_seconds = runs[0].2.clone();
    for (name, (_, _, seconds)) in names.iter().zip(&runs) {
        let tokens = (rows * NEW_TOKENS) as f64;
        let ratio = median(dense_seconds.iter().zip(seconds).map(|(dense, s)| dense / s).collect());
        let best = seconds.iter().copied().fold(f64::MAX, f64::min);
        let typical = tokens / median(seconds.clone());
        println!(
            "{name:<10}{typical:>12.0}{:>12.0}{:>10.0} %",
            tokens / best,
            100.0 * ratio
        );
    }
}
