//! The rollout engine on a real model: what it samples is what scoring says, whatever the batching.
use burn::{
    backend::Flex,
    module::Param,
    tensor::{Int, Tensor},
};
use burn_nvfp4::{Nvfp4, Precision};
use burn_quads::{
    causal_lm::TokenBatch,
    modules::{
        attention::{CacheStep, TokenPlace},
        linear::QuadsLinearConfig,
        moe::QuadsMoe,
        moe_config::QuadsMoeConfig,
    },
    rollout::{CachedLm, Completion, FinishReason, RolloutEngine, RolloutError, SamplingParams},
    sync::pack_model,
    token_log_probs::{ScoreOptions, Scores, TokenRow, score},
};
use std::{collections::HashMap, sync::LazyLock};

type B = Nvfp4<Flex>;

const VOCAB: usize = 24;
const EOS: u32 = 3;
const MAX_SEQ_LEN: usize = 48;

/// A small model with a head sharp enough that tokens differ in probability.
fn dense_model() -> QuadsMoe<B> {
    let config = QuadsMoeConfig::new(VOCAB, 64, 2, 4, 2, 16, 4, 2, 48)
        .with_max_position_embeddings(64)
        .with_precision(Precision::High);
    let mut model = config.init_seeded::<B>(11, &Default::default());
    model.lm_head = model.lm_head.map(|head| head.map(|w| w * 3.0));
    model
}

static MODELS: LazyLock<HashMap<&str, QuadsMoe<B>>> = LazyLock::new(|| {
    let dense = dense_model();
    ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"]
        .into_iter()
        .map(|name| {
            let precision: Precision = name.parse().unwrap();
            (name, pack_model(dense.clone(), &precision, None).unwrap().0)
        })
        .collect()
});

fn model(precision: &str) -> &'static QuadsMoe<B> {
    &MODELS[precision]
}

fn params(max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        max_new_tokens,
        eos_token_ids: vec![EOS],
        seed: 5,
        record_routing: false,
    }
}

/// `n` prompts of 1 to 9 tokens, every third one equal to the one before.
fn prompts(n: usize) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for i in 0..n {
        let prompt = match prompts.last() {
            Some(last) if i % 3 == 2 => last.clone(),
            _ => (0..1 + i * 5 % 9)
                .map(|j| ((i * 7 + j * j * 3 + j) % VOCAB) as u32)
                .collect(),
        };
        prompts.push(prompt);
    }
    prompts
}

fn generate(model: &QuadsMoe<B>, slots: usize, prompts: &[Vec<u32>], params: &SamplingParams) -> Vec<Completion> {
    RolloutEngine::new(slots, MAX_SEQ_LEN)
        .unwrap()
        .generate(model, prompts, params)
        .unwrap()
}

fn scored(model: &QuadsMoe<B>, prompts: &[Vec<u32>], completions: &[Completion], temperature: f32) -> Scores {
    let rows: Vec<TokenRow> = completions
        .iter()
        .map(|completion| TokenRow {
            prompt: &prompts[completion.prompt],
            completion: &completion.tokens,
            routing: None,
        })
        .collect();
    let options = ScoreOptions {
        temperature,
        record_routing: true,
        ..Default::default()
    };
    score(model, &rows, &options)
}

/// |Δ log-prob| of every sampled token, between the engine and scoring of whole sequences.
fn differences(completions: &[Completion], scores: &Scores) -> Vec<f32> {
    let pairs = completions.iter().zip(&scores.log_probs);
    pairs
        .flat_map(|(completion, scored)| {
            assert_eq!(completion.log_probs.len(), scored.len());
            completion.log_probs.iter().zip(scored).map(|(a, b)| (a - b).abs())
        })
        .collect()
}

fn mean(x: &[f32]) -> f32 {
    x.iter().sum::<f32>() / x.len() as f32
}

fn largest(x: &[f32]) -> f32 {
    x.iter().copied().fold(0.0, f32::max)
}

#[test]
fn decoding_gives_the_log_probs_of_scoring() {
    let prompts = prompts(96);
    for temperature in [1.0, 0.7] {
        let params = SamplingParams {
            temperature,
            ..params(30)
        };
        let completions = generate(model("high"), 16, &prompts, &params);
        let scores = scored(model("high"), &prompts, &completions, temperature);
        let differences = differences(&completions, &scores);
        assert!(differences.len() > 1000, "{} tokens", differences.len());
        assert!(largest(&differences) <= 1e-5, "max |Δlogp| {}", largest(&differences));
    }
}

#[test]
fn quantized_decoding_gives_the_log_probs_of_scoring_on_average() {
    let prompts = prompts(96);
    for name in ["w4a16", "w4a4", "w4a4_rac", "fp8"] {
        let completions = generate(model(name), 16, &prompts, &params(30));
        let differences = differences(&completions, &scored(model(name), &prompts, &completions, 1.0));
        let moved = differences.iter().filter(|&&d| d > 1e-5).count() as f32 / differences.len() as f32;
        println!(
            "{name}: {} tokens, mean |Δlogp| {:.1e}, max {:.1e}, {:.2} % of the tokens above 1e-5",
            differences.len(),
            mean(&differences),
            largest(&differences),
            100.0 * moved
        );
        assert!(
            mean(&differences) <= 1e-3,
            "{name}: mean |Δlogp| {}",
            mean(&differences)
        );
    }
}

/// Cached attention and attention over whole sequences differ in their last bits. Quantized activations hide that, as
/// their codes are the same, unless a value lies at a rounding tie and its code flips. How often that happens.
/// (Not so in FP8, whose row scale is the row's largest magnitude itself, last bit and all.)
#[test]
fn codes_rarely_flip_between_decoding_and_scoring() {
    let device = Default::default();
    let (rows, seq) = (64usize, 40usize);
    let tokens: Vec<i32> = (0..rows * seq)
        .map(|i| ((i * i * 5 + i * 3 + i / 7) % VOCAB) as i32)
        .collect();
    let tokens = Tensor::<B, 1, Int>::from_ints(tokens.as_slice(), &device).reshape([rows, seq]);
    for name in ["w4a4", "w4a4_rac"] {
        let model = model(name);
        let whole = model.hidden_states(&TokenBatch::new(tokens.clone())).hidden;
        let mut cache = model.cache_config(rows, seq).init::<B>(&device);
        let mut different = 0;
        for position in 0..seq {
            let step = CacheStep {
                tokens: (0..rows).map(|slot| TokenPlace { slot, position }).collect(),
                copies: vec![],
            };
            let column = tokens.clone().narrow(1, position, 1).reshape([rows]);
            let decoded = model.forward_cached(column, &mut cache, &step).hidden.into_data();
            let scored = whole.clone().narrow(1, position, 1).into_data();
            let (a, b) = (decoded.as_slice::<f32>().unwrap(), scored.as_slice::<f32>().unwrap());
            different += a.chunks(64).zip(b.chunks(64)).filter(|(a, b)| a != b).count();
        }
        let share = different as f64 / (rows * seq) as f64;
        println!(
            "{name}: the last hidden state of {:.2} % of {} tokens differs",
            100.0 * share,
            rows * seq
        );
        assert!(share < 0.05, "{name}: {share}");
    }
}

#[test]
fn a_packed_linear_gives_a_row_the_same_bits_alone_and_among_others() {
    let device = Default::default();
    let x = Tensor::<B, 2>::random([40, 64], burn::tensor::Distribution::Normal(0.0, 1.0), &device);
    for name in ["w4a16", "w4a4", "w4a4_rac", "fp8"] {
        let precision: Precision = name.parse().unwrap();
        let mut linear = QuadsLinearConfig::new(64, 48)
            .with_precision(precision.clone())
            .init::<B>(&device);
        let packed = burn_nvfp4::pack(linear.weight.val(), &precision, None, None).unwrap();
        linear.weight = Param::from_tensor(packed);
        let whole = linear.forward(x.clone()).into_data();
        let rows = (0..40).map(|i| linear.forward(x.clone().narrow(0, i, 1))).collect();
        assert_eq!(Tensor::cat(rows, 0).into_data(), whole, "{name}");
    }
}

/// Tokens must be equal; log-probs up to the dense matmul, whose bits may depend on the number of rows.
fn assert_same(a: &[Completion], b: &[Completion], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_eq!(
            (a.prompt, &a.tokens, a.finish),
            (b.prompt, &b.tokens, b.finish),
            "{what}"
        );
        for (x, y) in a.log_probs.iter().zip(&b.log_probs) {
            assert!((x - y).abs() <= tolerance, "{what}: {x} and {y}");
        }
    }
}

#[test]
fn the_number_of_slots_does_not_matter() {
    let prompts = prompts(40);
    for name in ["high", "w4a16", "w4a4_rac"] {
        let many = generate(model(name), 64, &prompts, &params(30));
        for slots in [1, 7] {
            let few = generate(model(name), slots, &prompts, &params(30));
            let bits = many == few;
            println!(
                "{name}: 64 slots and {slots} give {} bits",
                if bits { "equal" } else { "different" }
            );
            assert_same(&many, &few, 1e-5, name);
        }
    }
}

#[test]
fn a_request_does_not_depend_on_the_others() {
    let prompts = prompts(30);
    let together = generate(model("high"), 4, &prompts, &params(20));
    // The first requests alone: their streams of random numbers are those of their indices.
    let fewer = generate(model("high"), 4, &prompts[..11], &params(20));
    assert_same(&together[..11], &fewer, 1e-5, "the first 11 of 30");
    // One by one, greedily.
    let greedy = SamplingParams {
        temperature: 0.0,
        ..params(20)
    };
    let together = generate(model("high"), 4, &prompts, &greedy);
    for (i, completion) in together.iter().enumerate() {
        let alone = generate(model("high"), 1, &prompts[i..=i], &greedy);
        assert_eq!(alone[0].tokens, completion.tokens, "prompt {i}");
    }
}

#[test]
fn greedy_tokens_are_the_most_probable() {
    let prompts = prompts(12);
    let greedy = SamplingParams {
        temperature: 0.0,
        ..params(12)
    };
    for completion in generate(model("high"), 5, &prompts, &greedy) {
        let prompt = &prompts[completion.prompt];
        let row: Vec<i32> = prompt.iter().chain(&completion.tokens).map(|&t| t as i32).collect();
        let tokens = Tensor::<B, 1, Int>::from_ints(row.as_slice(), &Default::default()).unsqueeze();
        let logits = model("high").forward(tokens);
        let best: Vec<i32> = logits.argmax(2).into_data().convert::<i32>().into_vec().unwrap();
        for (i, &token) in completion.tokens.iter().enumerate() {
            assert_eq!(token as i32, best[prompt.len() - 1 + i]);
        }
    }
}

#[test]
fn a_completion_ends_with_eos_or_at_its_length() {
    let prompts = prompts(60);
    let completions = generate(model("w4a4"), 8, &prompts, &params(12));
    let (mut ended, mut truncated) = (0, 0);
    for (i, completion) in completions.iter().enumerate() {
        assert_eq!(completion.prompt, i);
        assert_eq!(completion.tokens.len(), completion.log_probs.len());
        let eos = completion.tokens.iter().position(|&t| t == EOS);
        match completion.finish {
            FinishReason::Eos => {
                assert_eq!(eos, Some(completion.tokens.len() - 1), "EOS is the last token");
                ended += 1;
            }
            FinishReason::Length => {
                assert_eq!((eos, completion.tokens.len()), (None, 12));
                truncated += 1;
            }
        }
    }
    assert!(ended > 5 && truncated > 5, "{ended} ended, {truncated} truncated");
}

#[test]
fn samples_of_a_group_differ_and_follow_the_policy() {
    // One prompt, many samples: the first token's frequencies are its probabilities.
    let prompts = vec![vec![1, 2, 4, 8]; 2000];
    let completions = generate(model("w4a4_rac"), 128, &prompts, &params(1));
    let mut counts = [0usize; VOCAB];
    let mut probabilities = [0f64; VOCAB];
    for completion in &completions {
        let token = completion.tokens[0] as usize;
        counts[token] += 1;
        probabilities[token] = (completion.log_probs[0] as f64).exp();
    }
    for (count, p) in counts.into_iter().zip(probabilities) {
        let deviation = (2000.0 * p * (1.0 - p)).sqrt();
        assert!((count as f64 - 2000.0 * p).abs() <= 4.0 * deviation + 1.0);
    }
    assert!(counts.iter().filter(|&&n| n > 0).count() > 10);
}

#[test]
fn runs_repeat_bit_for_bit_on_any_number_of_threads() {
    let prompts = prompts(24);
    for name in ["high", "w4a4_rac"] {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| generate(model(name), 8, &prompts, &params(20)))
        };
        let first = run(1);
        assert_eq!(first, run(1), "{name}: a second run");
        assert_eq!(first, run(3), "{name}: three threads");
    }
}

#[test]
fn another_seed_gives_other_samples() {
    let prompts = prompts(10);
    let other = SamplingParams { seed: 6, ..params(20) };
    let tokens = |params: &SamplingParams| -> Vec<Vec<u32>> {
        let completions = generate(model("high"), 4, &prompts, params);
        completions.into_iter().map(|c| c.tokens).collect()
    };
    assert_ne!(tokens(&params(20)), tokens(&other));
}

#[test]
fn an_engine_forgets_the_model_before() {
    // The cache is kept; its prompts are not, since a synced model has other weights.
    let prompts = prompts(6);
    let mut engine = RolloutEngine::new(3, MAX_SEQ_LEN).unwrap();
    engine.generate(model("w4a4"), &prompts, &params(8)).unwrap();
    let second = engine.generate(model("high"), &prompts, &params(8)).unwrap();
    assert_same(
        &second,
        &generate(model("high"), 3, &prompts, &params(8)),
        0.0,
        "high after w4a4",
    );
}

#[test]
fn recorded_experts_are_those_of_scoring_and_can_be_replayed() {
    let prompts = prompts(12);
    let params = SamplingParams {
        record_routing: true,
        ..params(15)
    };
    let completions = generate(model("high"), 5, &prompts, &params);
    let scores = scored(model("high"), &prompts, &completions, 1.0);
    let mut recorded = Vec::new();
    for (completion, scored) in completions.iter().zip(&scores.routing) {
        let experts = completion.expert_ids.as_ref().expect("routing was asked for");
        let positions = prompts[completion.prompt].len() + completion.tokens.len() - 1;
        assert_eq!(experts.layers.len(), 2);
        assert_eq!(experts.layers[0].len(), positions * experts.top_k);
        assert_eq!(experts, scored);
        recorded.push(experts.clone());
    }
    // Replayed into scoring, the same ids change nothing.
    let rows: Vec<TokenRow> = completions
        .iter()
        .zip(&recorded)
        .map(|(completion, routing)| TokenRow {
            prompt: &prompts[completion.prompt],
            completion: &completion.tokens,
            routing: Some(routing),
        })
        .collect();
    let replayed = score(model("high"), &rows, &ScoreOptions::default());
    assert!(largest(&differences(&completions, &replayed)) <= 1e-5);
    let without = generate(model("high"), 5, &prompts, &self::params(15));
    assert!(without.iter().all(|completion| completion.expert_ids.is_none()));
}

#[test]
fn no_prompts_give_no_completions() {
    assert_eq!(generate(model("high"), 2, &[], &params(4)), []);
}

#[test]
fn impossible_requests_are_refused_by_name() {
    let model = model("high");
    let refused = |prompts: &[Vec<u32>], params: &SamplingParams| {
        let mut engine = RolloutEngine::new(2, 16).unwrap();
        engine.generate(model, prompts, params).unwrap_err().to_string()
    };
    assert_eq!(refused(&[vec![1], vec![]], &params(4)), "prompt 1 is empty");
    assert_eq!(
        refused(&[vec![1; 13]], &params(4)),
        "prompt 0 has 13 tokens; with max_new_tokens = 4 that exceeds max_seq_len = 16"
    );
    assert_eq!(
        refused(&[vec![1, 24]], &params(4)),
        "prompt 0 has token 24 at position 1; the vocabulary has 24 tokens"
    );
    assert_eq!(
        refused(&[vec![1]], &params(0)),
        "max_new_tokens must be at least 1, got 0"
    );
    for temperature in [-0.5, f32::NAN, f32::INFINITY] {
        let params = SamplingParams {
            temperature,
            ..params(4)
        };
        assert_eq!(
            refused(&[vec![1]], &params),
            format!("temperature must be 0 or a positive number, got {temperature}")
        );
    }
    let no_room = |slots, max_seq_len| RolloutEngine::<B>::new(slots, max_seq_len).unwrap_err();
    assert_eq!(
        no_room(0, 16),
        RolloutError::NoRoom {
            slots: 0,
            max_seq_len: 16
        }
    );
    assert_eq!(
        no_room(2, 0),
        RolloutError::NoRoom {
            slots: 2,
            max_seq_len: 0
        }
    );
    let mut engine = RolloutEngine::new(2, 65).unwrap();
    assert_eq!(
        engine.generate(model, &[vec![1]], &params(4)).unwrap_err(),
        RolloutError::TooFewPositions {
            positions: 64,
            max_seq_len: 65
        }
    );
}

#[test]
fn non_finite_logits_name_prompt_and_step() {
    // Token 7 has a NaN embedding: the prompt that contains it fails at once, and the engine works on afterwards.
    let mut broken = model("high").clone();
    broken.embed_tokens.weight = broken.embed_tokens.weight.map(|w| {
        let nan = Tensor::<B, 2>::full([1, 64], f32::NAN, &w.device());
        w.slice_assign([7..8, 0..64], nan)
    });
    let mut engine = RolloutEngine::new(2, MAX_SEQ_LEN).unwrap();
    let prompts = [vec![1, 2], vec![4, 5], vec![3, 7]];
    let greedy = SamplingParams {
        temperature: 0.0,
        eos_token_ids: vec![],
        ..params(2)
    };
    let error = engine.generate(&broken, &prompts, &greedy).unwrap_err();
    assert!(
        matches!(error, RolloutError::NonFiniteLogits { prompt: 2, step: 0, .. }),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "the logits for token 0 of the completion of prompt 2 are not finite: NaN for token 0"
    );
    let after = engine.generate(model("high"), &prompts, &greedy).unwrap();
    assert_same(
        &after,
        &generate(model("high"), 2, &prompts, &greedy),
        0.0,
        "after an error",
    );
}

#[test]
fn a_plain_backend_samples_too() {
    // Without the decorator, and so without packed weights.
    let device = Default::default();
    let plain = QuadsMoeConfig::new(VOCAB, 64, 2, 4, 2, 16, 4, 2, 48)
        .with_max_position_embeddings(64)
        .with_precision(Precision::High)
        .init_seeded::<Flex>(11, &device);
    let completions = RolloutEngine::new(4, MAX_SEQ_LEN)
        .unwrap()
        .generate(&plain, &prompts(8), &params(10))
        .unwrap();
    let decorated = QuadsMoeConfig::new(VOCAB, 64, 2, 4, 2, 16, 4, 2, 48)
        .with_max_position_embeddings(64)
        .with_precision(Precision::High)
        .init_seeded::<B>(11, &device);
    assert_eq!(completions, generate(&decorated, 4, &prompts(8), &params(10)));
}

fn given(
    model: &QuadsMoe<B>,
    slots: usize,
    prompts: &[Vec<u32>],
    completions: &[Completion],
    params: &SamplingParams,
) -> Result<Vec<Completion>, RolloutError> {
    let tokens: Vec<&[u32]> = completions.iter().map(|completion| &completion.tokens[..]).collect();
    RolloutEngine::new(slots, MAX_SEQ_LEN)
        .unwrap()
        .generate_given(model, prompts, &tokens, params)
}

#[test]
fn given_tokens_get_what_sampling_them_would_have_given() {
    let prompts = prompts(20);
    let params = SamplingParams {
        record_routing: true,
        ..params(9)
    };
    for precision in ["high", "w4a4", "w4a4_rac"] {
        let model = model(precision);
        let sampled = generate(model, 7, &prompts, &params);
        // No random number is drawn: another seed changes nothing.
        let params = SamplingParams {
            seed: 99,
            ..params.clone()
        };
        assert_eq!(
            given(model, 7, &prompts, &sampled, &params).unwrap(),
            sampled,
            "{precision}"
        );
    }
}

#[test]
fn given_tokens_of_another_model_get_this_ones_log_probs() {
    let prompts = prompts(40);
    let written = generate(model("high"), 16, &prompts, &params(9));
    let packed = model("w4a4");
    let engine = given(packed, 16, &prompts, &written, &params(9)).unwrap();
    for (engine, written) in engine.iter().zip(&written) {
        assert_eq!((&engine.tokens, engine.finish), (&written.tokens, written.finish));
        assert_ne!(engine.log_probs, written.log_probs, "4 bits move every log-prob");
    }
    let differences = differences(&engine, &scored(packed, &prompts, &written, 1.0));
    assert!(mean(&differences) < 1e-3, "{}", mean(&differences));
}

#[test]
fn completions_that_cannot_have_been_sampled_are_refused_by_name() {
    let prompts = prompts(1);
    let model = model("high");
    let refused = |tokens: &[&[u32]]| {
        let mut engine = RolloutEngine::new(1, MAX_SEQ_LEN).unwrap();
        let error = engine.generate_given(model, &prompts, tokens, &params(3)).unwrap_err();
        error.to_string()
    };
    assert_eq!(refused(&[]), "1 prompts, but 0 completions of them");
    let end = "the completion of prompt 0 has 2 tokens; with these parameters it ends after";
    assert_eq!(refused(&[&[1, 2]]), format!("{end} max_new_tokens = 3"));
    assert_eq!(refused(&[&[EOS, 2]]), format!("{end} token 1, an end of sequence"));
    assert_eq!(
        refused(&[&[1, 2, 4, 5]]),
        "the completion of prompt 0 has 4 tokens; with these parameters it ends after max_new_tokens = 3"
    );
    let position = prompts[0].len() + 1;
    assert_eq!(
        refused(&[&[1, 24, 2]]),
        format!("prompt 0 has token 24 at position {position}; the vocabulary has 24 tokens")
    );
}
