//! What `Nvfp4<Flex>` costs over `Flex` while nothing is packed: forward, backward and sampling of a small transformer
//! language model of unmodified Burn modules.
//!
//! `cargo bench -p burn-nvfp4 --bench decorator_overhead [-- --pairs N]`
//!
//! Both backends run in one process, in pairs whose order alternates; the figure is the median of the pairs' ratios,
//! which slow drifts of the machine leave alone.
use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig},
    optim::GradientsParams,
    tensor::{
        Int, Tensor, TensorData, activation,
        backend::{AutodiffBackend, Backend},
        module::attention,
        ops::AttentionModuleOptions,
    },
};
use burn_nvfp4::Nvfp4;
use std::{hint::black_box, time::Instant};

const VOCABULARY: usize = 32;
const D_MODEL: usize = 128;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const BATCH: usize = 16;
const SEQUENCE: usize = 32;
const SAMPLED: usize = 16;
const LIMIT: f64 = 1.05;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    attention_norm: RmsNorm<B>,
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    output: Linear<B>,
    norm: RmsNorm<B>,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

#[derive(Module, Debug)]
struct LanguageModel<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: Vec<Block<B>>,
    norm: RmsNorm<B>,
    head: Linear<B>,
}

/// Keys and values of a block so far, `[batch, heads, seq, d_head]`.
type Cache<B> = Vec<Option<(Tensor<B, 4>, Tensor<B, 4>)>>;

impl<B: Backend> Block<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).with_bias(false).init(device);
        let d_ff = D_MODEL * 8 / 3 / 16 * 16;
        Self {
            attention_norm: RmsNormConfig::new(D_MODEL).init(device),
            query: linear(D_MODEL, D_MODEL),
            key: linear(D_MODEL, D_MODEL),
            value: linear(D_MODEL, D_MODEL),
            output: linear(D_MODEL, D_MODEL),
            norm: RmsNormConfig::new(D_MODEL).init(device),
            gate: linear(D_MODEL, d_ff),
            up: linear(D_MODEL, d_ff),
            down: linear(d_ff, D_MODEL),
        }
    }
    fn forward(&self, x: Tensor<B, 3>, cache: Option<&mut Option<(Tensor<B, 4>, Tensor<B, 4>)>>) -> Tensor<B, 3> {
        let [batch, seq, d_model] = x.dims();
        let heads = |t: Tensor<B, 3>| t.reshape([batch, seq, HEADS, d_model / HEADS]).swap_dims(1, 2);
        let h = self.attention_norm.forward(x.clone());
        let query = heads(self.query.forward(h.clone()));
        let (mut key, mut value) = (heads(self.key.forward(h.clone())), heads(self.value.forward(h)));
        if let Some(cache) = cache {
            if let Some((keys, values)) = cache.take() {
                key = Tensor::cat(vec![keys, key], 2);
                value = Tensor::cat(vec![values, value], 2);
            }
            *cache = Some((key.clone(), value.clone()));
        }
        let options = AttentionModuleOptions {
            is_causal: seq > 1,
            ..Default::default()
        };
        let context = attention(query, key, value, None, None, options);
        let x = x + self
            .output
            .forward(context.swap_dims(1, 2).reshape([batch, seq, d_model]));
        let h = self.norm.forward(x.clone());
        x + self
            .down
            .forward(activation::silu(self.gate.forward(h.clone())) * self.up.forward(h))
    }
}

impl<B: Backend> LanguageModel<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, D_MODEL).init(device),
            positions: EmbeddingConfig::new(SEQUENCE, D_MODEL).init(device),
            blocks: (0..LAYERS).map(|_| Block::new(device)).collect(),
            norm: RmsNormConfig::new(D_MODEL).init(device),
            head: LinearConfig::new(D_MODEL, VOCABULARY).with_bias(false).init(device),
        }
    }
    /// Tokens `[batch, seq]` from position `start` on to logits `[batch, seq, vocabulary]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>, start: usize, cache: Option<&mut Cache<B>>) -> Tensor<B, 3> {
        let seq = tokens.dims()[1];
        let positions = Tensor::<B, 1, Int>::arange(start as i64..(start + seq) as i64, &tokens.device());
        let mut x = self.tokens.forward(tokens) + self.positions.forward(positions.unsqueeze());
        let mut cache = cache;
        for (at, block) in self.blocks.iter().enumerate() {
            x = block.forward(x, cache.as_deref_mut().map(|cache| &mut cache[at]));
        }
        self.head.forward(self.norm.forward(x))
    }
    /// Greedy sampling with a cache, half a sequence after half a sequence of prompt.
    fn sample(&self, prompt: Tensor<B, 2, Int>) -> Vec<i64> {
        let mut cache: Cache<B> = vec![None; LAYERS];
        let [batch, length] = prompt.dims();
        let mut logits = self.forward(prompt, 0, Some(&mut cache));
        let mut sampled = Vec::new();
        for step in 0..SAMPLED {
            let seq = logits.dims()[1];
            let last = logits.slice([0..batch, seq - 1..seq]).reshape([batch, VOCABULARY]);
            let tokens = last.argmax(1);
            sampled.extend(tokens.to_data().iter::<i64>());
            if step + 1 < SAMPLED {
                logits = self.forward(tokens, length + step, Some(&mut cache));
            } else {
                break;
            }
        }
        sampled
    }
}

/// The three phases on one backend.
struct Subject<A: AutodiffBackend> {
    trained: LanguageModel<A>,
    sampled: LanguageModel<A::InnerBackend>,
    tokens: TensorData,
}

impl<A: AutodiffBackend> Subject<A> {
    fn new() -> Self {
        let device = Default::default();
        let trained = LanguageModel::<A>::new(&device);
        let tokens = (0..BATCH * SEQUENCE)
            .map(|i| (i * 7 % VOCABULARY) as i64)
            .collect::<Vec<_>>();
        Self {
            sampled: trained.valid(),
            trained,
            tokens: TensorData::new(tokens, [BATCH, SEQUENCE]),
        }
    }
    /// Seconds of a forward pass, of the backward pass of a training step, and of sampling.
    fn measure(&self) -> [f64; 3] {
        let device = Default::default();
        let tokens = Tensor::<A::InnerBackend, 2, Int>::from_data(self.tokens.clone(), &device);
        let start = Instant::now();
        black_box(self.sampled.forward(tokens.clone(), 0, None));
        let forward = start.elapsed().as_secs_f64();

        let ids = Tensor::<A, 2, Int>::from_data(self.tokens.clone(), &device);
        let logits = self.trained.forward(ids.clone(), 0, None);
        let loss = activation::log_softmax(logits, 2)
            .gather(2, ids.unsqueeze_dim(2))
            .mean()
            .neg();
        let start = Instant::now();
        black_box(GradientsParams::from_grads(loss.backward(), &self.trained));
        let backward = start.elapsed().as_secs_f64();

        let start = Instant::now();
        black_box(self.sampled.sample(tokens.slice([0..BATCH, 0..SEQUENCE - SAMPLED])));
        [forward, backward, start.elapsed().as_secs_f64()]
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

fn main() {
    let mut arguments = std::env::args();
    let pairs = match arguments.by_ref().find(|argument| argument == "--pairs") {
        Some(_) => arguments
            .next()
            .and_then(|count| count.parse().ok())
            .expect("--pairs takes a number"),
        None => 40,
    };
    let (plain, wrapped) = (
        Subject::<Autodiff<Flex>>::new(),
        Subject::<Autodiff<Nvfp4<Flex>>>::new(),
    );
    for _ in 0..3 {
        plain.measure();
        wrapped.measure();
    }
    let mut times = [[const { Vec::<f64>::new() }; 3], [const { Vec::new() }; 3]];
    let mut ratios = [const { Vec::<f64>::new() }; 3];
    for pair in 0..pairs {
        let (on_plain, on_wrapped) = match pair % 2 {
            0 => {
                let on_plain = plain.measure();
                (on_plain, wrapped.measure())
            }
            _ => {
                let on_wrapped = wrapped.measure();
                (plain.measure(), on_wrapped)
            }
        };
        for phase in 0..3 {
            times[0][phase].push(on_plain[phase]);
            times[1][phase].push(on_wrapped[phase]);
            ratios[phase].push(on_wrapped[phase] / on_plain[phase]);
        }
    }
    println!(
        "d_model {D_MODEL}, {LAYERS} layers, batch {BATCH}, sequence {SEQUENCE}; {pairs} pairs, median milliseconds"
    );
    println!(
        "{:10}{:>10}{:>16}{:>10}{:>22}",
        "phase", "flex", "nvfp4<flex>", "ratio", "middle half of ratios"
    );
    for (phase, name) in ["forward", "backward", "sampling"].into_iter().enumerate() {
        let [plain, wrapped] = [0, 1].map(|side| 1e3 * median(&mut times[side][phase]));
        let ratio = median(&mut ratios[phase]);
        let (low, high) = (ratios[phase][pairs / 4], ratios[phase][pairs * 3 / 4]);
        let verdict = if ratio <= LIMIT {
            ""
        } else {
            "  above the limit of 1.05"
        };
        println!(
            "{name:10}{plain:10.2}{wrapped:16.2}{ratio:10.3}{:>22}{verdict}",
            format!("{low:.3} to {high:.3}")
        );
    }
}
