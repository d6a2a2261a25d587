//! Log-probs of sampled tokens, as trainer and rollout see them.
//!
//! With routing replay (`rollout.routing_replay`) the trainer takes the experts that the rollout chose. What is scored to
//! measure the gap has to do the same: otherwise a token that the two sides would route differently shows up as a gap that
//! the run does not have.
use anyhow::Result;
use burn::module::AutodiffModule;
use burn_nvfp4::Precision;
use burn_quads::{
    mismatch::Mismatch,
    token_log_probs::{RowRouting, ScoreOptions, Scores, TokenRow, score},
};

use crate::{
    backend::{Policy, Sampler},
    sampling::Rollouts,
};

/// The trainer's model in a precision, for scoring without gradients: f32 masters, rounded on the way.
pub fn trainer_side(policy: &Policy, precision: &Precision) -> Result<Sampler> {
    Ok(policy.valid().with_precision(precision.clone())?)
}

/// Log-probs of the completions' tokens, completion after completion; with `replay` through the experts that the rollout
/// chose, where it recorded them.
pub fn token_log_probs(model: &Sampler, rollouts: &Rollouts, temperature: f32, replay: bool) -> Vec<f32> {
    let recorded = rollouts
        .completions
        .iter()
        .map(|completion| completion.expert_ids.as_ref().filter(|_| replay));
    let scores = score_tokens(model, rollouts, temperature, recorded, false);
    scores.log_probs.concat()
}

/// Log-probs of the same tokens as both sides see them, by completion.
#[derive(Clone, Debug, PartialEq)]
pub struct BothSides {
    /// The trainer's.
    pub trainer: Vec<Vec<f32>>,
    /// The rollout's.
    pub rollout: Vec<Vec<f32>>,
}

impl BothSides {
    /// How far they differ.
    pub fn mismatch(&self) -> Mismatch {
        Mismatch::new(&self.trainer.concat(), &self.rollout.concat())
    }
}

/// Scores tokens, that either may have sampled, by a trainer and a rollout. With `replay` the trainer takes the experts
/// that this rollout chooses for them.
pub fn both_sides(
    trainer: &Sampler,
    rollout: &Sampler,
    rollouts: &Rollouts,
    temperature: f32,
    replay: bool,
) -> BothSides {
    let live = || rollouts.completions.iter().map(|_| None);
    let rollout = score_tokens(rollout, rollouts, temperature, live(), replay);
    let trainer = match replay {
        true => score_tokens(trainer, rollouts, temperature, rollout.routing.iter().map(Some), false),
        false => score_tokens(trainer, rollouts, temperature, live(), false),
    };
    BothSides {
        trainer: trainer.log_probs,
        rollout: rollout.log_probs,
    }
}

/// The gap of a trainer and a rollout, scored by [`both_sides`].
pub fn mismatch(trainer: &Sampler, rollout: &Sampler, rollouts: &Rollouts, temperature: f32, replay: bool) -> Mismatch {
    both_sides(trainer, rollout, rollouts, temperature, replay).mismatch()
}

/// `routing`, one a completion: experts to take instead of the router's choice.
fn score_tokens<'a>(
    model: &Sampler,
    rollouts: &'a Rollouts,
    temperature: f32,
    routing: impl Iterator<Item = Option<&'a RowRouting>>,
    record_routing: bool,
) -> Scores {
    let completions = rollouts.prompts.iter().zip(&rollouts.completions).zip(routing);
    let rows: Vec<_> = completions
        .map(|((prompt, completion), routing)| TokenRow {
            prompt,
            completion: &completion.tokens,
            routing,
        })
        .collect();
    let options = ScoreOptions {
        temperature,
        record_routing,
        ..ScoreOptions::default()
    };
    score(model, &rows, &options)
}

/// The precision with the weights of one and the activations of another, if there is one.
pub fn weights_and_activations(weights: &Precision, activations: &Precision) -> Option<Precision> {
    let full = matches!(activations, Precision::High | Precision::W4A16);
    match (weights, activations) {
        (Precision::High, _) => full.then_some(Precision::High),
        (Precision::Fp8, _) => (*activations == Precision::Fp8).then_some(Precision::Fp8),
        (_, Precision::Fp8) => None,
        (_, _) if full => Some(Precision::W4A16),
        (_, _) => Some(activations.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, problems::Problems, sampling::Sampling, session::fresh_policy};
    use burn_nvfp4::Rac;
    use burn_quads::sync::sync;

    #[test]
    fn the_decomposition_mixes_what_can_be_mixed() {
        use Precision::{Fp8, High, W4A4, W4A4Rac, W4A16};
        let rac = W4A4Rac(Rac::default());
        for (weights, activations, mixed) in [
            (&rac, &W4A16, Some(W4A16)),
            (&W4A4, &High, Some(W4A16)),
            (&rac, &W4A4, Some(W4A4)),
            (&W4A4, &rac, Some(rac.clone())),
            (&High, &W4A16, Some(High)),
            (&Fp8, &Fp8, Some(Fp8)),
            (&Fp8, &High, None),
            (&High, &W4A4, None),
            (&W4A4, &Fp8, None),
        ] {
            assert_eq!(
                weights_and_activations(weights, activations),
                mixed,
                "{weights} with {activations}"
            );
        }
    }

    /// A policy that nothing was taught, and completions that its W4A4 rollout sampled, with their experts.
    fn sampled() -> (Policy, Rollouts) {
        let settings = [
            "task.addition.digits=2",
            "rollout.routing_replay=true",
            "rollout.max_new_tokens=6",
            "model.num_experts=8",
            // Large logits: a rounded activation moves a log-prob visibly.
            "model.init_gain=3",
        ];
        let config = Config::load(None, &settings.map(String::from)).unwrap();
        let problems = Problems::draw(&config).unwrap();
        let policy = fresh_policy(&config, &problems).unwrap();
        let (packed, _) = sync(&policy, &Precision::W4A4, None).unwrap();
        let prompts: Vec<_> = problems.training.iter().take(64).collect();
        let mut sampling = Sampling::new(&config, &problems).unwrap();
        let rollouts = sampling.rollouts(&packed, &prompts, 7).unwrap();
        (policy, rollouts)
    }

    #[test]
    fn the_same_weights_and_activations_agree_to_the_bit_on_any_route() {
        let (policy, mut rollouts) = sampled();
        let packed = |precision| sync(&policy, &precision, None).unwrap().0;
        let agree = |rollouts: &Rollouts| {
            let trainer = token_log_probs(&trainer_side(&policy, &Precision::W4A16).unwrap(), rollouts, 1.0, true);
            let rollout = token_log_probs(&packed(Precision::W4A16), rollouts, 1.0, true);
            assert!(trainer == rollout, "the trainer's W4A16 weights are the packed ones");
            trainer
        };
        let replayed = agree(&rollouts);
        // Experts that no router would choose: only a replay makes the two sides agree on these.
        for completion in &mut rollouts.completions {
            for layer in &mut completion.expert_ids.as_mut().unwrap().layers {
                for id in layer {
                    *id = (*id + 3) % 8;
                }
            }
        }
        let elsewhere = agree(&rollouts);
        assert_ne!(replayed, elsewhere, "the experts that are given are taken");
        for completion in &mut rollouts.completions {
            completion.expert_ids = None;
        }
        assert_ne!(
            replayed,
            agree(&rollouts),
            "here trainer and rollout choose different experts for some tokens"
        );
    }

    #[test]
    fn replay_takes_route_flips_out_of_the_gap() {
        let (policy, rollouts) = sampled();
        let trainer = trainer_side(&policy, &Precision::W4A16).unwrap();
        let gap = |rollout: Precision, replay| {
            let (packed, _) = sync(&policy, &rollout, None).unwrap();
            mismatch(&trainer, &packed, &rollouts, 1.0, replay)
        };
        let (live, replayed) = (gap(Precision::W4A4, false), gap(Precision::W4A4, true));
        assert!(
            replayed.mean < live.mean && replayed.max < live.max,
            "{} {} and {} {}",
            replayed.mean,
            replayed.max,
            live.mean,
            live.max
        );
        // The pairing's rollout chooses, so a rollout that is the trainer agrees with it whatever was recorded.
        for replay in [false, true] {
            assert_eq!(gap(Precision::W4A16, replay).max, 0.0);
        }
    }
}
