//! Which tokens run next, and in which slot of the cache: continuous batching.
//!
//! Requests wait in order. A slot whose sequence has ended takes the next request in the same step in which the other
//! slots decode on. Requests with the same prompt (a group) compute it once: the first one runs it, the others copy its
//! keys and values and run only the last prompt token, whose logits each of them samples from.
use super::{Completion, FinishReason, SamplingParams, sampler::Sample};
use crate::modules::attention::{CacheStep, PrefixCopy, TokenPlace};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;

/// Prompt tokens that may start in one step beyond the first request's: bounds the memory of a step.
const PREFILL_TOKENS: usize = 4096;

/// A request in a slot.
pub(super) struct Sequence {
    pub request: usize,
    pub rng: ChaCha8Rng,
    /// Tokens whose keys and values are in the cache.
    cached: usize,
    completion: Vec<u32>,
    log_probs: Vec<f32>,
}

impl Sequence {
    /// Tokens sampled so far.
    pub(super) fn sampled(&self) -> usize {
        self.completion.len()
    }
}

#[derive(Default)]
struct Slot {
    sequence: Option<Sequence>,
    /// The prompt whose keys and values the slot holds, also after its sequence has ended.
    prompt: Option<usize>,
}

/// The tokens of one step.
pub(super) struct Batch {
    /// The newest token of each running sequence, then the rest of new prompts.
    pub tokens: Vec<u32>,
    /// Where they go.
    pub step: CacheStep,
    /// Slots of the first tokens, whose logits are sampled from.
    pub sampling: Vec<usize>,
}

/// A sequence that has ended, and the slot that still holds it.
pub(super) struct Ended {
    pub slot: usize,
    pub positions: usize,
    pub completion: Completion,
}

pub(super) struct Scheduler<'a> {
    prompts: &'a [Vec<u32>],
    /// For each request, the first request with the same prompt.
    same_prompt: Vec<usize>,
    params: &'a SamplingParams,
    next: usize,
    slots: Vec<Slot>,
}

impl<'a> Scheduler<'a> {
    pub(super) fn new(slots: usize, prompts: &'a [Vec<u32>], params: &'a SamplingParams) -> Self {
        let mut first = HashMap::new();
        let same_prompt = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| *first.entry(prompt.as_slice()).or_insert(i))
            .collect();
        Self {
            prompts,
            same_prompt,
            params,
            next: 0,
            slots: (0..slots).map(|_| Slot::default()).collect(),
        }
    }

    /// Fills free slots from the queue, then lists every token that is not in the cache yet. `None` when all requests
    /// have ended.
    pub(super) fn next_batch(&mut self) -> Option<Batch> {
        let copies = self.admit();
        let (mut tokens, mut places, mut sampling) = (vec![], vec![], vec![]);
        let (mut prompt_tokens, mut prompt_places) = (vec![], vec![]);
        for (slot, sequence) in self.running() {
            let prompt = &self.prompts[sequence.request];
            let last = prompt.len() + sequence.completion.len() - 1;
            let token = sequence.completion.last().unwrap_or(&prompt[prompt.len() - 1]);
            tokens.push(*token);
            places.push(TokenPlace { slot, position: last });
            sampling.push(slot);
            let rest = sequence.cached..last;
            prompt_tokens.extend(rest.clone().map(|position| prompt[position]));
            prompt_places.extend(rest.map(|position| TokenPlace { slot, position }));
        }
        tokens.append(&mut prompt_tokens);
        places.append(&mut prompt_places);
        (!sampling.is_empty()).then_some(Batch {
            tokens,
            step: CacheStep { tokens: places, copies },
            sampling,
        })
    }

    fn running(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(i, slot)| Some((i, slot.sequence.as_ref()?)))
    }

    /// Starts waiting requests in free slots; gives the prefixes to copy.
    fn admit(&mut self) -> Vec<PrefixCopy> {
        let mut copies = Vec::new();
        let mut started = 0;
        while self.next < self.prompts.len() {
            let request = self.next;
            let prompt = self.same_prompt[request];
            let prefix = self.prompts[request].len() - 1;
            let Some(slot) = self.free_slot(prompt) else {
                break;
            };
            let holder = match self.slots[slot].prompt == Some(prompt) {
                true => Some(slot),
                false => self.slots.iter().position(|s| s.prompt == Some(prompt)),
            };
            if holder.is_none() {
                if started > 0 && started + prefix > PREFILL_TOKENS {
                    break;
                }
                started += prefix;
            }
            if let Some(from) = holder.filter(|&from| from != slot && prefix > 0) {
                copies.push(PrefixCopy {
                    from,
                    to: slot,
                    len: prefix,
                });
            }
            self.slots[slot] = Slot {
                sequence: Some(self.start(request, if holder.is_some() { prefix } else { 0 })),
                prompt: Some(prompt),
            };
            self.next += 1;
        }
        copies
    }

    /// A free slot, one that holds the prompt if there is one. So prefixes are copied out of running slots only, and no
    /// slot is copied from and given a new prompt in one step.
    fn free_slot(&self, prompt: usize) -> Option<usize> {
        let free = || (0..self.slots.len()).filter(|&i| self.slots[i].sequence.is_none());
        free()
            .find(|&i| self.slots[i].prompt == Some(prompt))
            .or_else(|| free().next())
    }

    fn start(&self, request: usize, cached: usize) -> Sequence {
        let mut rng = ChaCha8Rng::seed_from_u64(self.params.seed);
        rng.set_stream(request as u64);
        Sequence {
            request,
            rng,
            cached,
            completion: Vec::with_capacity(self.params.max_new_tokens),
            log_probs: Vec::with_capacity(self.params.max_new_tokens),
        }
    }

    /// The running sequence of a slot.
    pub(super) fn sequence(&mut self, slot: usize) -> &mut Sequence {
        self.slots[slot]
            .sequence
            .as_mut()
            .expect("a slot in the batch runs a sequence")
    }

    /// Appends what was sampled for `slots`, and takes out the sequences that end with it.
    pub(super) fn advance(&mut self, slots: &[usize], samples: &[Sample]) -> Vec<Ended> {
        let mut ended = Vec::new();
        for (&slot, sample) in slots.iter().zip(samples) {
            let params = self.params;
            let prompt_len = self.prompts[self.sequence(slot).request].len();
            let sequence = self.sequence(slot);
            sequence.cached = prompt_len + sequence.completion.len();
            sequence.completion.push(sample.token);
            sequence.log_probs.push(sample.log_prob);
            let finish = if params.eos_token_ids.contains(&sample.token) {
                FinishReason::Eos
            } else if sequence.completion.len() == params.max_new_tokens {
                FinishReason::Length
            } else {
                continue;
            };
            let positions = sequence.cached;
            let sequence = self.slots[slot].sequence.take().expect("it ran");
            ended.push(Ended {
                slot,
                positions,
                completion: Completion {
                    prompt: sequence.request,
                    tokens: sequence.completion,
                    log_probs: sequence.log_probs,
                    finish,
                    expert_ids: None,
                },
            });
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: u32 = 0;

    fn params(max_new_tokens: usize) -> SamplingParams {
        SamplingParams {
            temperature: 1.0,
            max_new_tokens,
            eos_token_ids: vec![EOS],
            seed: 0,
            record_routing: false,
        }
    }

    /// What a step fed: (token, slot, position) of each, and the copies.
    fn fed(batch: &Batch) -> Vec<(u32, usize, usize)> {
        let places = batch.step.tokens.iter();
        batch
            .tokens
            .iter()
            .zip(places)
            .map(|(&t, p)| (t, p.slot, p.position))
            .collect()
    }

    fn samples(tokens: &[u32]) -> Vec<Sample> {
        tokens.iter().map(|&token| Sample { token, log_prob: 0.0 }).collect()
    }

    #[test]
    fn a_finished_slot_is_refilled_while_the_others_decode_on() {
        let prompts = vec![vec![5, 6], vec![7], vec![8, 9, 10]];
        let params = params(3);
        let mut scheduler = Scheduler::new(2, &prompts, &params);
        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(6, 0, 1), (7, 1, 0), (5, 0, 0)]);
        assert_eq!(batch.sampling, [0, 1]);
        let ended = scheduler.advance(&batch.sampling, &samples(&[20, EOS]));
        assert_eq!(ended.len(), 1);
        assert_eq!((ended[0].slot, ended[0].completion.prompt), (1, 1));
        assert_eq!(ended[0].completion.finish, FinishReason::Eos);

        // Request 2 starts in slot 1 in the very next step.
        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(20, 0, 2), (10, 1, 2), (8, 1, 0), (9, 1, 1)]);
        scheduler.advance(&batch.sampling, &samples(&[21, 30]));
        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(21, 0, 3), (30, 1, 3)]);
        let ended = scheduler.advance(&batch.sampling, &samples(&[22, 31]));
        assert_eq!(ended[0].completion.tokens, [20, 21, 22]);
        assert_eq!(ended[0].completion.finish, FinishReason::Length);
        assert_eq!(ended[0].positions, 4, "the last token is never fed");

        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(31, 1, 4)]);
        scheduler.advance(&batch.sampling, &samples(&[EOS]));
        assert!(scheduler.next_batch().is_none());
    }

    #[test]
    fn a_group_computes_its_prompt_once() {
        let prompts = vec![vec![5, 6, 7]; 4];
        let params = params(1);
        let mut scheduler = Scheduler::new(3, &prompts, &params);
        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(7, 0, 2), (7, 1, 2), (7, 2, 2), (5, 0, 0), (6, 0, 1)]);
        let copy = |to| PrefixCopy { from: 0, to, len: 2 };
        assert_eq!(batch.step.copies, [copy(1), copy(2)]);
        scheduler.advance(&batch.sampling, &samples(&[1, 1, 1]));
        // A free slot holds the prompt still: the fourth sample computes and copies nothing.
        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(7, 0, 2)]);
        assert!(batch.step.copies.is_empty());
    }

    #[test]
    fn a_prefix_is_copied_from_a_running_slot_only() {
        let (a, b, c) = (vec![5, 6], vec![7, 8], vec![9, 10]);
        let prompts = [&a, &b, &b, &a, &a, &c].map(Vec::clone);
        let params = params(9);
        let mut scheduler = Scheduler::new(3, &prompts, &params);
        let batch = scheduler.next_batch().unwrap();
        scheduler.advance(&batch.sampling, &samples(&[EOS, EOS, EOS]));
        // The first A runs where A is; the second copies it from there; C overwrites a slot that nobody needs.
        let batch = scheduler.next_batch().unwrap();
        assert_eq!(fed(&batch), [(6, 0, 1), (6, 1, 1), (10, 2, 1), (9, 2, 0)]);
        assert_eq!(batch.step.copies, [PrefixCopy { from: 0, to: 1, len: 1 }]);
    }

    #[test]
    fn a_step_starts_a_bounded_number_of_prompt_tokens() {
        let prompts: Vec<Vec<u32>> = (0..8).map(|i| vec![i + 1; 1001]).collect();
        let params = params(1);
        let mut scheduler = Scheduler::new(8, &prompts, &params);
        assert_eq!(scheduler.next_batch().unwrap().sampling.len(), 4);
        assert_eq!(scheduler.next_batch().unwrap().sampling.len(), 8);
    }
}
