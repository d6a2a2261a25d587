//! Completions of problems, and how many of them are right.
use anyhow::{Context, Result};
use burn_quads::{
    rewards::pass_at_k,
    rollout::{Completion, FinishReason, RolloutEngine, SamplingParams},
    tasks::Problem,
};

use crate::{
    backend::{Rollout, Sampler},
    config::{Config, EvalConfig},
    language::Language,
    problems::Problems,
    results::{Accuracy, PassAtK},
    seeds,
};

/// The rollout engine with the settings of a run.
#[derive(Debug)]
pub struct Sampling {
    engine: RolloutEngine<Rollout>,
    language: Language,
    params: SamplingParams,
    evaluation_seed: u64,
    evaluation: EvalConfig,
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
        let longest = problems.max_prompt_tokens() + config.rollout.max_new_tokens;
        Ok(Self {
            engine: RolloutEngine::new(config.rollout.slots, longest)?,
            language: problems.language.clone(),
            params: SamplingParams {
                temperature: config.rollout.temperature as f32,
                max_new_tokens: config.rollout.max_new_tokens,
                eos_token_ids: problems.language.eos_token_ids(),
                seed: 0,
                // For replay, or to count the tokens that the trainer routes differently.
                record_routing: true,
            },
            evaluation_seed: seeds::seed(config.run.seed, "evaluation", 0),
            evaluation: config.eval.clone(),
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

    /// Pass@1 at the rollout's temperature, one sample a problem. Every call of a run draws the same random numbers, so that
    /// two policies differ by what they are, not by luck.
    pub fn pass_at_1(&mut self, model: &Sampler, problems: &[Problem]) -> Result<f64> {
        Ok(share(&self.judged(model, problems, 1, self.params.temperature)?))
    }

    /// What `model` would have returned had it sampled the completions of `rollouts`: their log-probs, and with
    /// `record_routing` their experts, as the rollout engine computes them.
    pub fn given(&mut self, model: &Sampler, rollouts: &Rollouts, record_routing: bool) -> Result<Rollouts> {
        let params = SamplingParams {
            record_routing,
            ..self.params.clone()
        };
        let tokens: Vec<&[u32]> = rollouts.completions.iter().map(|c| c.tokens.as_slice()).collect();
        let completions = self.engine.generate_given(model, &rollouts.prompts, &tokens, &params);
        Ok(Rollouts {
            completions: completions.context("cannot score completions")?,
            ..rollouts.clone()
        })
    }

    /// Accuracy sampled, `eval.samples` times a problem, and greedy; and which samples were right, problem after problem.
    pub fn accuracy(&mut self, model: &Sampler, problems: &[Problem]) -> Result<(Accuracy, Vec<bool>)> {
        let pass_at = self.evaluation.pass_at;
        let judged = self.sampled(model, problems)?;
        let accuracy = Accuracy {
            sampled: self.pass_at(1, &judged),
            at_k: (pass_at > 1).then(|| PassAtK {
                k: pass_at,
                share: self.pass_at(pass_at, &judged),
            }),
            greedy: share(&self.judged(model, problems, 1, 0.0)?),
        };
        Ok((accuracy, judged))
    }

    /// Pass@k of completions, `eval.samples` of each problem, by the unbiased estimator.
    pub fn pass_at(&self, k: usize, right: &[bool]) -> f64 {
        let samples = self.evaluation.samples;
        let right = right
            .chunks(samples)
            .map(|samples| samples.iter().filter(|right| **right).count());
        mean(right.map(|right| pass_at_k(samples, right, k)))
    }

    /// Which of `eval.samples` completions of each problem are right, problem after problem.
    pub fn sampled(&mut self, model: &Sampler, problems: &[Problem]) -> Result<Vec<bool>> {
        self.judged(model, problems, self.evaluation.samples, self.params.temperature)
    }

    /// Which of `samples` completions of each problem are right, problem after problem.
    fn judged(&mut self, model: &Sampler, problems: &[Problem], samples: usize, temperature: f32) -> Result<Vec<bool>> {
        let repeated: Vec<&Problem> = problems
            .iter()
            .flat_map(|problem| std::iter::repeat_n(problem, samples))
            .collect();
        let params = SamplingParams {
            temperature,
            seed: self.evaluation_seed,
            record_routing: false,
            ..self.params.clone()
        };
        let rewards = self.sample(model, &repeated, &params)?.rewards;
        Ok(rewards.iter().map(|reward| *reward == 1.0).collect())
    }

    fn sample(&mut self, model: &Sampler, problems: &[&Problem], params: &SamplingParams) -> Result<Rollouts> {
        let prompts = problems.iter().map(|problem| self.language.prompt(problem));
        let prompts: Vec<Vec<u32>> = prompts.collect::<Result<_, _>>()?;
        let completions = self
            .engine
            .generate(model, &prompts, params)
            .context("cannot sample completions")?;
        let rewards = problems
            .iter()
            .zip(&completions)
            .map(|(problem, completion)| self.language.reward(problem, &completion.tokens));
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

/// Share of what is true.
fn share(flags: &[bool]) -> f64 {
    mean(flags.iter().map(|flag| f64::from(u8::from(*flag))))
}

/// Mean of a few numbers; 0 of none.
pub fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}
