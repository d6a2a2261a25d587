//! The sampling loop.
use super::{
    CachedLm, Completion, SampledToken, SamplingParams,
    routing::RoutingCache,
    sampler::{NonFiniteLogit, Sample, sample, take},
    scheduler::Scheduler,
};
use crate::modules::attention::{KvCache, KvCacheConfig};
use burn::{
    prelude::Backend,
    tensor::{Int, Tensor, TensorData},
};
use rand::Rng;
use rayon::prelude::*;

/// Why no completions could be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // The messages say what the fields are.
pub enum RolloutError {
    /// An engine must hold at least one sequence of one token.
    #[error("a rollout engine needs at least one slot and one token a slot, got {slots} slots of {max_seq_len} tokens")]
    NoRoom { slots: usize, max_seq_len: usize },
    /// The model's rotary tables are shorter than the engine's slots.
    #[error("the model has {positions} positions, fewer than the engine's max_seq_len of {max_seq_len}")]
    TooFewPositions { positions: usize, max_seq_len: usize },
    /// A prompt without tokens gives no logits to sample from.
    #[error("prompt {prompt} is empty")]
    EmptyPrompt { prompt: usize },
    /// The completion might not fit.
    #[error(
        "prompt {prompt} has {len} tokens; with max_new_tokens = {max_new_tokens} that exceeds max_seq_len = {max_seq_len}"
    )]
    TooLong {
        prompt: usize,
        len: usize,
        max_new_tokens: usize,
        max_seq_len: usize,
    },
    /// A token that the model does not have.
    #[error("prompt {prompt} has token {token} at position {position}; the vocabulary has {vocab_size} tokens")]
    UnknownToken {
        prompt: usize,
        position: usize,
        token: u32,
        vocab_size: usize,
    },
    /// Not a temperature.
    #[error("temperature must be 0 or a positive number, got {0}")]
    Temperature(f32),
    /// Nothing to sample.
    #[error("max_new_tokens must be at least 1, got 0")]
    NoNewTokens,
    /// Completions of other prompts.
    #[error("{prompts} prompts, but {completions} completions of them")]
    CompletionCount { prompts: usize, completions: usize },
    /// A completion that sampling with these parameters cannot have written.
    #[error("the completion of prompt {prompt} has {len} tokens; with these parameters it ends after {end}")]
    CompletionEnd { prompt: usize, len: usize, end: String },
    /// The model has diverged.
    #[error(
        "the logits for token {step} of the completion of prompt {prompt} are not finite: {value} for token {token}"
    )]
    NonFiniteLogits {
        prompt: usize,
        /// Tokens sampled before.
        step: usize,
        token: usize,
        value: f32,
    },
}

/// Samples completions by continuous batching over a cache that is allocated once.
///
/// A completion depends on the model, its prompt, its index and [`SamplingParams`] only. The order of batches, the number
/// of slots and of threads do not enter: streams of random numbers belong to requests, cached attention and packed
/// layers compute each row for itself. What remains is the dense matmul of the backend (the head, the routers, every
/// layer in `high`), whose last bits may depend on the number of rows; not so for f32 where
/// [`LayerBackend::has_dense_product`](crate::layer_backend::LayerBackend::has_dense_product). On GPUs packed layers may take
/// another route, with other last bits, for more rows: `burn_nvfp4::cube::pin_route` keeps them on one.
#[derive(Debug)]
pub struct RolloutEngine<B: Backend> {
    slots: usize,
    max_seq_len: usize,
    cache: Option<(KvCacheConfig, KvCache<B>)>,
}

impl<B: Backend> RolloutEngine<B> {
    /// An engine that runs up to `slots` sequences at once, each of up to `max_seq_len` tokens, prompt included. The
    /// cache is allocated for the first model, and again only for one of other dimensions.
    ///
    /// # Errors
    /// When either is 0.
    pub fn new(slots: usize, max_seq_len: usize) -> Result<Self, RolloutError> {
        if slots == 0 || max_seq_len == 0 {
            return Err(RolloutError::NoRoom { slots, max_seq_len });
        }
        Ok(Self {
            slots,
            max_seq_len,
            cache: None,
        })
    }

    /// One completion for each prompt, in the order of `prompts`. Equal prompts (a group) are computed once.
    ///
    /// # Errors
    /// When a prompt or a parameter does not fit, before anything is computed; when a logit is not finite.
    pub fn generate(
        &mut self,
        model: &impl CachedLm<B>,
        prompts: &[Vec<u32>],
        params: &SamplingParams,
    ) -> Result<Vec<Completion>, RolloutError> {
        self.generate_observed(model, prompts, params, |_| {})
    }

    /// [`generate`](Self::generate), and `observe` sees every token as soon as it is sampled.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn generate_observed(
        &mut self,
        model: &impl CachedLm<B>,
        prompts: &[Vec<u32>],
        params: &SamplingParams,
        mut observe: impl FnMut(SampledToken),
    ) -> Result<Vec<Completion>, RolloutError> {
        self.run(model, prompts, params, None, &mut observe)
    }

    /// What [`generate`](Self::generate) would have returned had it drawn these `completions`: the same forward passes
    /// over the same cache, hence the log-probs of the given tokens as this engine computes them.
    ///
    /// # Errors
    /// As [`generate`](Self::generate); when a completion does not end where one of `params` does.
    pub fn generate_given(
        &mut self,
        model: &impl CachedLm<B>,
        prompts: &[Vec<u32>],
        completions: &[&[u32]],
        params: &SamplingParams,
    ) -> Result<Vec<Completion>, RolloutError> {
        if prompts.len() != completions.len() {
            return Err(RolloutError::CompletionCount {
                prompts: prompts.len(),
                completions: completions.len(),
            });
        }
        let vocab_size = model.vocab_size();
        for (prompt, tokens) in completions.iter().enumerate() {
            if let Some(position) = tokens.iter().position(|&token| token as usize >= vocab_size) {
                return Err(RolloutError::UnknownToken {
                    prompt,
                    position: prompts[prompt].len() + position,
                    token: tokens[position],
                    vocab_size,
                });
            }
            let ends = |token: &u32| params.eos_token_ids.contains(token);
            let eos = tokens.iter().position(ends).map(|at| at + 1);
            if eos.unwrap_or(params.max_new_tokens).min(params.max_new_tokens) != tokens.len() {
                let end = match eos.filter(|&end| end <= params.max_new_tokens) {
                    Some(end) => format!("token {end}, an end of sequence"),
                    None => format!("max_new_tokens = {}", params.max_new_tokens),
                };
                let len = tokens.len();
                return Err(RolloutError::CompletionEnd { prompt, len, end });
            }
        }
        self.run(model, prompts, params, Some(completions), &mut |_| {})
    }

    fn run(
        &mut self,
        model: &impl CachedLm<B>,
        prompts: &[Vec<u32>],
        params: &SamplingParams,
        given: Option<&[&[u32]]>,
        observe: &mut impl FnMut(SampledToken),
    ) -> Result<Vec<Completion>, RolloutError> {
        self.check(model, prompts, params)?;
        let config = model.cache_config(self.slots, self.max_seq_len);
        let cache = match self.cache.take() {
            Some((made_for, cache)) if made_for == config => cache,
            _ => config.init(&model.device()),
        };
        let (_, cache) = self.cache.insert((config, cache));
        let mut run = Run {
            model,
            cache,
            params,
            given,
            scheduler: Scheduler::new(self.slots, prompts, params),
            routing: None,
            completions: vec![None; prompts.len()],
        };
        while run.step(self.slots, self.max_seq_len, observe)? {}
        Ok(run.completions.into_iter().flatten().collect())
    }

    fn check(
        &self,
        model: &impl CachedLm<B>,
        prompts: &[Vec<u32>],
        params: &SamplingParams,
    ) -> Result<(), RolloutError> {
        let (max_seq_len, max_new_tokens) = (self.max_seq_len, params.max_new_tokens);
        if model.max_positions() < max_seq_len {
            return Err(RolloutError::TooFewPositions {
                positions: model.max_positions(),
                max_seq_len,
            });
        }
        if !(params.temperature.is_finite() && params.temperature >= 0.0) {
            return Err(RolloutError::Temperature(params.temperature));
        }
        if max_new_tokens == 0 {
            return Err(RolloutError::NoNewTokens);
        }
        let vocab_size = model.vocab_size();
        for (prompt, tokens) in prompts.iter().enumerate() {
            if tokens.is_empty() {
                return Err(RolloutError::EmptyPrompt { prompt });
            }
            if tokens.len().saturating_add(max_new_tokens) > max_seq_len {
                return Err(RolloutError::TooLong {
                    prompt,
                    len: tokens.len(),
                    max_new_tokens,
                    max_seq_len,
                });
            }
            if let Some(position) = tokens.iter().position(|&t| t as usize >= vocab_size) {
                return Err(RolloutError::UnknownToken {
                    prompt,
                    position,
                    token: tokens[position],
                    vocab_size,
                });
            }
        }
        Ok(())
    }
}

/// One call of [`RolloutEngine::generate`].
struct Run<'a, B: Backend, M> {
    model: &'a M,
    cache: &'a mut KvCache<B>,
    params: &'a SamplingParams,
    /// Tokens to take instead of sampled ones, one list a prompt.
    given: Option<&'a [&'a [u32]]>,
    scheduler: Scheduler<'a>,
    routing: Option<RoutingCache>,
    completions: Vec<Option<Completion>>,
}

impl<B: Backend, M: CachedLm<B>> Run<'_, B, M> {
    /// Runs every token that is due, samples one more for each sequence, and collects those that end. False when none is
    /// left.
    fn step(
        &mut self,
        slots: usize,
        max_seq_len: usize,
        observe: &mut impl FnMut(SampledToken),
    ) -> Result<bool, RolloutError> {
        let Some(batch) = self.scheduler.next_batch() else {
            return Ok(false);
        };
        let tokens = int_tensor(&batch.tokens, &self.model.device());
        let output = self.model.forward_cached(tokens, self.cache, &batch.step);
        let logits = self.model.logits(output.hidden.narrow(0, 0, batch.sampling.len()));
        let samples = self.sample(logits, &batch.sampling)?;
        for (&slot, sample) in batch.sampling.iter().zip(&samples) {
            observe(SampledToken {
                prompt: self.scheduler.sequence(slot).request,
                token: sample.token,
            });
        }
        if self.params.record_routing {
            let layers: Vec<Vec<i32>> = output.expert_ids.into_iter().map(int_rows).collect();
            let top_k = layers.first().map_or(0, |ids| ids.len() / batch.tokens.len());
            self.routing
                .get_or_insert_with(|| RoutingCache::new(slots, max_seq_len, layers.len(), top_k))
                .write(&batch.step, &layers);
        }
        for ended in self.scheduler.advance(&batch.sampling, &samples) {
            let prompt = ended.completion.prompt;
            self.completions[prompt] = Some(Completion {
                expert_ids: self.routing.as_ref().map(|r| r.read(ended.slot, ended.positions)),
                ..ended.completion
            });
        }
        Ok(true)
    }

    fn sample(&mut self, logits: Tensor<B, 2>, slots: &[usize]) -> Result<Vec<Sample>, RolloutError> {
        let [_, vocab] = logits.dims();
        let logits: Vec<f32> = logits.into_data().convert::<f32>().into_vec().expect("f32 logits");
        let temperature = self.params.temperature;
        // In the order of the slots, each from its sequence: which thread draws does not matter.
        let choices: Vec<Choice> = slots
            .iter()
            .map(|&slot| {
                let sequence = self.scheduler.sequence(slot);
                match self.given {
                    Some(given) => Choice::Given(given[sequence.request][sequence.sampled()]),
                    None if temperature == 0.0 => Choice::Drawn(0.0),
                    None => Choice::Drawn(sequence.rng.random()),
                }
            })
            .collect();
        let samples: Vec<_> = (logits.par_chunks_exact(vocab), &choices)
            .into_par_iter()
            .with_min_len(LOGITS_A_TASK.div_ceil(vocab))
            .map(|(row, choice)| match *choice {
                Choice::Given(token) => take(row, temperature, token),
                Choice::Drawn(number) => sample(row, temperature, number),
            })
            .collect();
        let rows = slots.iter().zip(samples);
        rows.map(|(&slot, sampled)| {
            sampled.map_err(|NonFiniteLogit { token, value }| {
                let sequence = self.scheduler.sequence(slot);
                RolloutError::NonFiniteLogits {
                    prompt: sequence.request,
                    step: sequence.sampled(),
                    token,
                    value,
                }
            })
        })
        .collect()
    }
}

/// Logits that are worth a task of their own.
const LOGITS_A_TASK: usize = 1 << 14;

/// How a row's token is chosen.
enum Choice {
    Given(u32),
    /// With a number, which temperature 0 does not need.
    Drawn(f64),
}

fn int_tensor<B: Backend>(tokens: &[u32], device: &B::Device) -> Tensor<B, 1, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let len = tokens.len();
    Tensor::from_data(TensorData::new(tokens, [len]), device)
}

fn int_rows<B: Backend>(ids: Tensor<B, 2, Int>) -> Vec<i32> {
    ids.into_data().convert::<i32>().into_vec().expect("i32 ids")
}
