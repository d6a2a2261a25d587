//! One GRPO step of a Qwen3-MoE of 1 B parameters, 0.3 B of them active, by part, and decoding with it.
//!
//! ```text
//! cargo bench -p burn-quads --features cuda --bench moe_train_step [-- --out FILE]
//! ```
//!
//! Random weights and random tokens: only time and memory mean anything. 16 rows of 1,024 tokens, W4A16 trainer with f32
//! masters and AdamW in f32, rollout in W4A4 with compensation of all channels. `--small` takes a tiny model on short rows
//! (to try the benchmark where there is no GPU), `--without-fusion` Burn's backend without Fusion; `--micro-rows N` (4)
//! rows run forward and backward at once; `--rows`, `--tokens`, `--layers`, `--decode-rows`, `--new-tokens` change sizes
//! (no rows to decode: no decoding).
//!
//! Each part is run three times and the last time counts: the first compiles kernels and chooses among them, the second those
//! that continue the optimizer's moments. The device is waited for after each part, so parts do not overlap; a step of the
//! learner, timed as a whole after them, may be shorter than their sum. Memory is what `nvidia-smi` shows for the GPU, four
//! times a second, this process's and anybody else's.
//!
//! Runs on CUDA or Vulkan with the feature of that name (CUDA where both are on), else on the CPU.
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module},
    optim::{GradientsAccumulator, GradientsParams, Optimizer},
    tensor::backend::Backend,
};
use burn_backend::tensor::Device;
use burn_nvfp4::{Nvfp4, Nvfp4Backend, Precision};
use burn_quads::{
    grpo::{AdamWOptimizer, GrpoConfig, Learner, LossBatch, Normalizer, RolloutBatch, optimizer::global_norm},
    layer_backend::LayerBackend,
    modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig},
    rollout::{RolloutEngine, SamplingParams},
    sync::sync,
    token_log_probs::{CompletionRows, ScoreOptions, TokenRow, score, token_log_probs},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[cfg(feature = "cuda")]
type Gpu = burn::backend::Cuda;
#[cfg(all(feature = "vulkan", not(feature = "cuda")))]
type Gpu = burn::backend::Vulkan;
#[cfg(not(any(feature = "vulkan", feature = "cuda")))]
type Gpu = burn::backend::Flex;

/// `Gpu` without Fusion.
#[cfg(any(feature = "vulkan", feature = "cuda"))]
type Plain = <Gpu as Unfused>::Backend;
#[cfg(not(any(feature = "vulkan", feature = "cuda")))]
type Plain = Gpu;

#[cfg(any(feature = "vulkan", feature = "cuda"))]
trait Unfused {
    type Backend;
}

#[cfg(any(feature = "vulkan", feature = "cuda"))]
impl<B: burn_fusion::FusionBackend> Unfused for burn_fusion::Fusion<B> {
    type Backend = B;
}

type Trainer<B> = Autodiff<Nvfp4<B>>;
type Model<B> = QuadsMoe<Trainer<B>>;

/// Sizes, from the command line.
struct Options {
    model: QuadsMoeConfig,
    rows: usize,
    tokens: usize,
    micro_rows: usize,
    /// Without any nothing is decoded.
    decode_rows: usize,
    new_tokens: usize,
    fusion: bool,
    out: Option<PathBuf>,
}

impl Options {
    fn from_arguments() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let small = arguments.iter().any(|argument| argument == "--small");
        let mut options = Self {
            model: match small {
                true => QuadsMoeConfig::new(64, 64, 2, 4, 2, 16, 8, 2, 32),
                // vocabulary, hidden, layers, query heads, key heads, head, experts, experts a token, expert's width
                false => QuadsMoeConfig::new(32_768, 1024, 24, 16, 4, 64, 32, 8, 384),
            },
            rows: 16,
            tokens: if small { 24 } else { 1024 },
            micro_rows: 4,
            decode_rows: if small { 8 } else { 64 },
            new_tokens: if small { 4 } else { 24 },
            fusion: true,
            out: None,
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} takes a value"));
            let number_from = |least: usize, text: String| -> usize {
                let number = text.parse().ok().filter(|n| *n >= least);
                number.unwrap_or_else(|| panic!("{argument} takes a number from {least} up, not {text}"))
            };
            let number = |text: String| number_from(1, text);
            match argument.as_str() {
                "--small" => {}
                "--without-fusion" => options.fusion = false,
                "--rows" => options.rows = number(value()),
                "--tokens" => options.tokens = number(value()),
                "--micro-rows" => options.micro_rows = number(value()),
                "--layers" => options.model.num_hidden_layers = number(value()),
                "--decode-rows" => options.decode_rows = number_from(0, value()),
                "--new-tokens" => options.new_tokens = number(value()),
                "--out" => options.out = Some(value().into()),
                // Cargo passes this to every benchmark.
                "--bench" => {}
                other => panic!(
                    "unknown argument {other}; there are --small, --without-fusion, --rows, --tokens, --micro-rows, \
                     --layers, --decode-rows, --new-tokens and --out"
                ),
            }
        }
        options
    }
}

/// What `nvidia-smi` shows while it lives.
struct Memory {
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Memory {
    /// MiB of the first GPU in use.
    fn used() -> Option<u64> {
        let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"];
        let output = Command::new("nvidia-smi").args(query).output().ok()?;
        String::from_utf8(output.stdout)
            .ok()?
            .lines()
            .next()?
            .trim()
            .parse()
            .ok()
    }

    fn watch() -> Self {
        let memory = Self {
            peak: Arc::default(),
            stop: Arc::default(),
        };
        if Self::used().is_some() {
            let (peak, stop) = (memory.peak.clone(), memory.stop.clone());
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    peak.fetch_max(Self::used().unwrap_or(0), Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(250));
                }
            });
        }
        memory
    }

    /// The largest use since the last call, in MiB; none without an NVIDIA GPU.
    fn take_peak(&self) -> Option<u64> {
        Some(self.peak.swap(0, Ordering::Relaxed)).filter(|peak| *peak > 0)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A part of a step.
struct Part {
    name: &'static str,
    milliseconds: f64,
    peak: Option<u64>,
}

/// Times parts, and waits for the device after each.
struct Timer<B: Backend> {
    device: B::Device,
    memory: Memory,
    parts: Vec<Part>,
}

impl<B: Backend> Timer<B> {
    fn time<T>(&mut self, name: &'static str, run: impl FnOnce() -> T) -> T {
        B::sync(&self.device).expect("the device answers");
        let start = Instant::now();
        let result = run();
        B::sync(&self.device).expect("the device answers");
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        let peak = self.memory.take_peak();
        match self.parts.iter_mut().find(|part| part.name == name) {
            Some(part) => {
                part.milliseconds += milliseconds;
                part.peak = part.peak.max(peak);
            }
            None => self.parts.push(Part {
                name,
                milliseconds,
                peak,
            }),
        }
        eprintln!("  {name}: {milliseconds:.0} ms");
        result
    }
}

/// Rows of random tokens, in groups of eight with two rewards.
fn random_batch(options: &Options) -> RolloutBatch {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let vocab = options.model.vocab_size as u32;
    let mut tokens = |count: usize| -> Vec<u32> { (0..count).map(|_| rng.random_range(0..vocab)).collect() };
    let group_size = 8.min(options.rows);
    let prompt = (options.tokens / 16).max(1);
    let mut batch = RolloutBatch::default();
    for row in 0..options.rows {
        match row % group_size {
            0 => batch.prompts.push(tokens(prompt)),
            _ => batch.prompts.push(batch.prompts[row - 1].clone()),
        }
        // The last token is predicted, never read.
        batch.completions.push(tokens(options.tokens - prompt + 1));
        batch.truncated.push(true);
        batch.group.push(row / group_size);
        batch.rewards.push((row % 2) as f32);
    }
    batch
}

/// Forward, backward and update, with the losses of the learner and in its order.
fn update<B: Nvfp4Backend + LayerBackend>(
    timer: &mut Timer<B>,
    model: Model<B>,
    optimizer: &mut AdamWOptimizer<Trainer<B>, Model<B>>,
    config: &GrpoConfig,
    batch: &RolloutBatch,
) -> Model<B> {
    let advantages =
        burn_quads::grpo::group_advantages(&batch.rewards, &batch.group, config.group_size, config.scale_rewards)
            .expect("groups of one size")
            .values;
    let micro_rows = config.micro_batch_rows.expect("it was set");
    let tokens: usize = batch.completions.iter().map(Vec::len).sum();
    let normalizer = Normalizer {
        rows: batch.rows(),
        tokens: tokens as f64,
        max_completion_length: config.max_completion_length,
    };
    let mut accumulator = GradientsAccumulator::new();
    for first in (0..batch.rows()).step_by(micro_rows) {
        let rows = first..(first + micro_rows).min(batch.rows());
        let token_rows: Vec<TokenRow<'_>> = rows.clone().map(|row| batch.row(row, false)).collect();
        let (log_probs, values) = timer.time("forward", || {
            let (head, device) = (model.head_weight(), Default::default());
            let layout = CompletionRows::new(&token_rows);
            let hidden = model.hidden_states(&layout.input(&device)).hidden;
            let states = layout.predicting_states(hidden);
            let log_probs = token_log_probs(states, head, layout.targets(&device), 1.0);
            let values: Vec<f32> = log_probs.clone().into_data().iter::<f32>().collect();
            (log_probs, values)
        });
        let lengths: Vec<usize> = rows.clone().map(|row| batch.completions[row].len()).collect();
        let output = config.loss.evaluate(
            &LossBatch {
                lengths: &lengths,
                mask: &vec![true; values.len()],
                advantages: &advantages[rows],
                log_probs: &values,
                old_log_probs: None,
                reference_log_probs: None,
                rollout_log_probs: None,
                weights: None,
            },
            &normalizer,
        );
        timer.time("backward", || {
            let gradients = output.attach(log_probs).backward();
            accumulator.accumulate(&model, GradientsParams::from_grads(gradients, &model));
        });
    }
    let gradients = accumulator.grads();
    timer.time("gradient norm", || global_norm(&model, &gradients));
    timer.time("AdamW", || optimizer.step(1e-6, model, gradients))
}

/// Decoding, from the times at which tokens came.
struct Decoding {
    /// Milliseconds of the step that reads the prompts.
    prompts: f64,
    /// Median milliseconds of the others.
    step: f64,
}

fn decode<B: Nvfp4Backend + LayerBackend>(
    options: &Options,
    model: &QuadsMoe<Nvfp4<B>>,
    engine: &mut RolloutEngine<Nvfp4<B>>,
) -> Decoding {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let vocab = options.model.vocab_size as u32;
    let prompts: Vec<Vec<u32>> = (0..options.decode_rows)
        .map(|_| (0..16).map(|_| rng.random_range(0..vocab)).collect())
        .collect();
    let params = SamplingParams {
        temperature: 1.0,
        max_new_tokens: options.new_tokens,
        eos_token_ids: vec![],
        seed: 0,
        record_routing: false,
    };
    let start = Instant::now();
    let mut ends = Vec::new();
    let mut sampled = 0;
    engine
        .generate_observed(model, &prompts, &params, |_| {
            sampled += 1;
            if sampled % options.decode_rows == 0 {
                ends.push(start.elapsed().as_secs_f64() * 1e3);
            }
        })
        .expect("finite logits");
    let mut steps: Vec<f64> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
    steps.sort_by(f64::total_cmp);
    Decoding {
        prompts: ends[0],
        step: steps.get(steps.len() / 2).copied().unwrap_or(f64::NAN),
    }
}

fn run<B: Nvfp4Backend + LayerBackend>(options: &Options, backend: &str) {
    let device: Device<B> = Default::default();
    let start = Instant::now();
    let mut model: Model<B> = options.model.init(&device);
    let total = model.num_params();
    let config = &options.model;
    let experts = 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers;
    let active = total - experts * (config.num_experts - config.num_experts_per_tok);
    let embedding = config.vocab_size * config.hidden_size;
    println!(
        "{} layers, hidden {}, {} heads of {} over {}, {} experts of {}, {} a token, vocabulary {}",
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.num_key_value_heads,
        config.num_experts,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        config.vocab_size
    );
    println!(
        "{total} parameters, {active} of them for a token ({} without the embedding); {} rows of {} tokens, {} at once",
        active - embedding,
        options.rows,
        options.tokens,
        options.micro_rows
    );
    let grpo = GrpoConfig {
        group_size: 8.min(options.rows),
        max_completion_length: options.tokens + 1,
        micro_batch_rows: Some(options.micro_rows),
        score_rows: options.micro_rows,
        ..GrpoConfig::default()
    };
    let mut batch = random_batch(options);
    let rollout_precision: Precision = "w4a4_rac".parse().expect("a precision");
    let mut optimizer = grpo.optimizer.init();
    let mut timer = Timer::<B> {
        device: device.clone(),
        memory: Memory::watch(),
        parts: Vec::new(),
    };
    let mut engine = RolloutEngine::new(options.decode_rows.max(1), 16 + options.new_tokens).expect("room for tokens");
    let mut decoding = None;
    for round in 0..3 {
        eprintln!("round {round}, {:.1} s after the start", start.elapsed().as_secs_f64());
        timer.parts.clear();
        let rollout = timer.time("sync (packing)", || sync(&model, &rollout_precision, None));
        let (rollout, _) = rollout.expect("finite weights");
        decoding = (options.decode_rows > 0).then(|| decode::<B>(options, &rollout, &mut engine));
        drop(rollout);
        let scores = timer.time("scoring (old log-probs)", || {
            let policy = model.valid();
            let rows: Vec<_> = (0..batch.rows()).map(|row| batch.row(row, false)).collect();
            let options = ScoreOptions {
                rows_per_forward: grpo.score_rows,
                ..ScoreOptions::default()
            };
            score(&policy, &rows, &options)
        });
        batch.rollout_log_probs = scores.log_probs;
        model = update::<B>(&mut timer, model, &mut optimizer, &grpo, &batch);
    }
    drop(optimizer);
    let parts = std::mem::take(&mut timer.parts);
    let mut learner = Learner::new(model, grpo).expect("settings that work");
    learner.step(&batch).expect("a step");
    timer.time("a step of the learner", || learner.step(&batch).expect("a step"));
    let step = timer.parts.pop().expect("it was timed");

    println!("{backend}; milliseconds, and MiB of the device at most");
    let print = |part: &Part| {
        let peak = part.peak.map_or("-".into(), |peak| peak.to_string());
        println!("{:28} {:10.1} {peak:>10}", part.name, part.milliseconds);
    };
    parts.iter().for_each(print);
    print(&step);
    if let Some(decoding) = &decoding {
        println!(
            "decoding, {} rows: {:.1} ms a step, {:.0} tokens/s; {:.1} ms for the step with the prompts of 16 tokens",
            options.decode_rows,
            decoding.step,
            options.decode_rows as f64 / decoding.step * 1e3,
            decoding.prompts
        );
    }
    if let Some(out) = &options.out {
        let json =
            |part: &Part| serde_json::json!({"part": part.name, "ms": part.milliseconds, "peak_device_mib": part.peak});
        let report = serde_json::json!({
            "backend": backend,
            "model": config,
            "parameters": total,
            "active_parameters": active,
            "rows": options.rows,
            "tokens": options.tokens,
            "micro_rows": options.micro_rows,
            "parts": parts.iter().map(json).collect::<Vec<_>>(),
            "step": json(&step),
            "decode_rows": options.decode_rows,
            "decode_step_ms": decoding.as_ref().map(|decoding| decoding.step),
            "prompt_step_ms": decoding.as_ref().map(|decoding| decoding.prompts),
        });
        let text = serde_json::to_string_pretty(&report).expect("JSON");
        std::fs::write(out, text).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
    }
}

fn main() {
    let options = Options::from_arguments();
    match options.fusion {
        true => run::<Gpu>(&options, std::any::type_name::<Gpu>()),
        false => run::<Plain>(&options, std::any::type_name::<Plain>()),
    }
}
