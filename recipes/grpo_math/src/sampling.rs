//! Completions of problems, and how many of them are right.
use anyhow::{Context, Result};
use burn_quads::{
    rollout::{Completion, FinishReason, RolloutEngine, SamplingParams},
    tasks::{Problem, Vocabulary},
};

use crate::{
    backend::{Rollout, Sampler},
    config::Config,
    problems::Problems,
    results::Accuracy,
    seeds,
};

/// The rollout engine with the settings of a run.
#[derive(Debug)]
pub struct Sampling {
    engine: RolloutEngine<Rollout>,
    vocabulary: Vocabulary,
    params: SamplingParams,
    evaluation_seed: u64,
}

/// Completions of problems, one a prompt, with their rewards.
#[derive(Clone, Debug)]
pub struct Rollouts {
    /// Token ids of the prompts.
    pub prompts: Vec<Vec<u32>>,
    /// What the policy wrote.
    pub completions: Vec<Completion>,
    /// 1: exactly right.
    pub rewards: Vec<f32>,
}

impl Sampling {
    /// An engine that fits the problems of a run.
    pub fn new(config: &Config, problems: &Problems) -> Result<Self> {
        let longest = problems.mixture.max_prompt_tokens() + config.rollout.max_new_tokens;
        Ok(Self {
            engine: RolloutEngine::new(config.rollout.slots, longest)?,
            vocabulary: problems.vocabulary.clone(),
            params: SamplingParams {
                temperature: config.rollout.temperature as f32,
                max_new_tokens: config.rollout.max_new_tokens,
                eos_token_ids: vec![Vocabulary::EOS],
                seed: 0,
                record_routing: config.rollout.routing_replay,
            },
            evaluation_seed: seeds::seed(config.run.seed, "evaluation", 0),
        })
    }

    /// Samples one completion for each problem, at the rollout's temperature.
    pub fn rollouts(&mut self, model: &Sampler, problems: &[&Problem], seed: u64) -> Result<Rollouts> {
        let params = SamplingParams {
            seed,
            ..self.params.clone()
        };
        self.sample(model, problems, &params)
    }

    /// Pass@1 at the rollout's temperature. Every call of a run draws the same random numbers, so that two policies
    /// differ by what they are, not by luck.
    pub fn pass_at_1(&mut self, model: &Sampler, problems: &[Problem]) -> Result<f64> {
        self.share_right(model, problems, self.params.temperature)
    }

    /// Accuracy sampled and greedy.
    pub fn accuracy(&mut self, model: &Sampler, problems: &[Problem]) -> Result<Accuracy> {
        Ok(Accuracy {
            sampled: self.pass_at_1(model, problems)?,
            greedy: self.share_right(model, problems, 0.0)?,
        })
    }

    fn share_right(&mut self, model: &Sampler, problems: &[Problem], temperature: f32) -> Result<f64> {
        let problems: Vec<&Problem> = problems.iter().collect();
        let params = SamplingParams {
            temperature,
            seed: self.evaluation_seed,
            record_routing: false,
            ..self.params.clone()
        };
        Ok(self.sample(model, &problems, &params)?.mean_reward())
    }

    fn sample(&mut self, model: &Sampler, problems: &[&Problem], params: &SamplingParams) -> Result<Rollouts> {
        let prompts = problems
            .iter()
            .map(|problem| self.vocabulary.encode_prompt(&problem.prompt));
        let prompts: Vec<Vec<u32>> = prompts.collect::<Result<_, _>>()?;
        let completions = self
            .engine
            .generate(model, &prompts, params)
            .context("cannot sample completions")?;
        let rewards = problems
            .iter()
            .zip(&completions)
            .map(|(problem, completion)| problem.reward(&self.vocabulary, &completion.tokens));
        Ok(Rollouts {
            rewards: rewards.collect::<Result<_, _>>()?,
            prompts,
            completions,
        })
    }
}

impl Rollouts {
    /// Mean reward.
    pub fn mean_reward(&self) -> f64 {
        mean(self.rewards.iter().map(|reward| f64::from(*reward)))
    }

    /// Tokens sampled.
    pub fn tokens(&self) -> usize {
        self.completions.iter().map(|completion| completion.tokens.len()).sum()
    }

    /// Which completions were cut off.
    pub fn truncated(&self) -> Vec<bool> {
        self.completions
            .iter()
            .map(|completion| completion.finish == FinishReason::Length)
            .collect()
    }
}

/// Mean of a few numbers; 0 of none.
pub fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}
