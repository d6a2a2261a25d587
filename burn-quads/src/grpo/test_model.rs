//! A small language model with everything that the learner relies on: context, a routed layer that can be replayed, and
//! a head.
use burn::{
    module::{Module, Param},
    prelude::Backend,
    tensor::{Int, Tensor, TensorData, activation::softmax},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::RolloutBatch;
use crate::causal_lm::{CausalLm, HiddenOutput, TokenBatch};

pub const VOCAB: usize = 7;
const WIDTH: usize = 6;

/// `h = tanh(mean of the embeddings so far · mix + embedding) · expert · its router weight`, logits `h · head`.
#[derive(Module, Debug)]
pub struct TinyLm<B: Backend> {
    pub embedding: Param<Tensor<B, 2>>,
    pub mix: Param<Tensor<B, 2>>,
    pub router: Param<Tensor<B, 2>>,
    pub experts: Vec<Param<Tensor<B, 2>>>,
    pub head: Param<Tensor<B, 2>>,
}

impl<B: Backend> TinyLm<B> {
    pub fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut matrix = |rows: usize, columns: usize| {
            let values = (0..rows * columns)
                .map(|_| rng.random_range(-1.0f32..1.0))
                .collect::<Vec<_>>();
            Param::from_tensor(Tensor::from_data(
                TensorData::new(values, [rows, columns]),
                &Default::default(),
            ))
        };
        Self {
            embedding: matrix(VOCAB, WIDTH),
            mix: matrix(WIDTH, WIDTH),
            router: matrix(WIDTH, 2),
            experts: vec![matrix(WIDTH, WIDTH), matrix(WIDTH, WIDTH)],
            head: matrix(WIDTH, VOCAB),
        }
    }

    /// All parameters.
    pub fn values(&self) -> Vec<f32> {
        [
            &self.embedding,
            &self.mix,
            &self.router,
            &self.experts[0],
            &self.experts[1],
            &self.head,
        ]
        .into_iter()
        .flat_map(|param| param.val().into_data().iter::<f32>().collect::<Vec<_>>())
        .collect()
    }
}

impl<B: Backend> CausalLm<B> for TinyLm<B> {
    fn hidden_states(&self, input: &TokenBatch<B>) -> HiddenOutput<B> {
        let [batch, seq] = input.tokens.dims();
        let device = input.tokens.device();
        let tokens = input.tokens.clone().reshape([batch * seq]);
        let embedded = self.embedding.val().select(0, tokens).reshape([batch, seq, WIDTH]);
        let counts = Tensor::<B, 1, Int>::arange(1..seq as i64 + 1, &device)
            .float()
            .reshape([1, seq, 1]);
        let average = Tensor::<B, 2>::ones([seq, seq], &device).tril(0).unsqueeze::<3>() / counts;
        let context = average.expand([batch, seq, seq]).matmul(embedded.clone());
        let mixed = (context.reshape([batch * seq, WIDTH]).matmul(self.mix.val())
            + embedded.reshape([batch * seq, WIDTH]))
        .tanh();

        let router_logits = mixed.clone().matmul(self.router.val());
        let chosen = router_logits.clone().argmax(1);
        let expert_ids = match &input.replay {
            None => chosen,
            Some(replay) => {
                let ids = replay.expert_ids[0].clone();
                ids.clone().mask_where(ids.lower_elem(0), chosen)
            }
        };
        let weight = softmax(router_logits.clone(), 1).gather(1, expert_ids.clone());
        let second = expert_ids.clone().float();
        let first = second.clone().neg() + 1.0;
        let routed = mixed.clone().matmul(self.experts[0].val()) * first + mixed.matmul(self.experts[1].val()) * second;
        HiddenOutput {
            hidden: (routed * weight).reshape([batch, seq, WIDTH]),
            expert_ids: vec![expert_ids],
            router_logits: vec![router_logits],
        }
    }

    fn head_weight(&self) -> Tensor<B, 2> {
        self.head.val()
    }
}

/// Four groups of four completions of one to five tokens, with rewards that differ in each group.
pub fn batch(seed: u64) -> RolloutBatch {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut token = |limit: u32| rng.random_range(0..limit);
    let mut batch = RolloutBatch::default();
    for group in 0..4 {
        let prompt = (0..group % 3 + 1).map(|_| token(VOCAB as u32)).collect::<Vec<_>>();
        for member in 0..4 {
            let completion = (0..token(5) + 1).map(|_| token(VOCAB as u32)).collect::<Vec<_>>();
            batch
                .rollout_log_probs
                .push(completion.iter().map(|_| -1.5 - token(100) as f32 / 100.0).collect());
            batch.truncated.push(completion.len() == 5);
            batch.prompts.push(prompt.clone());
            batch.completions.push(completion);
            batch.group.push(group);
            batch
                .rewards
                .push(if member == 0 { 1.0 } else { token(4) as f32 / 4.0 });
        }
    }
    batch
}
