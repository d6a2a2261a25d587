use burn::backend::{Autodiff, Flex};

use super::*;
use crate::{
    grpo::{LrSchedule, test_model::TinyLm},
    token_log_probs::{ScoreOptions, score},
};

type B = Autodiff<Flex>;

fn learner(learning_rate: f64, epsilon: f32) -> SupervisedLearner<B, TinyLm<B>> {
    let config = OptimizerConfig {
        schedule: LrSchedule::constant(learning_rate),
        epsilon,
        max_grad_norm: None,
        max_skipped_steps: 1,
        ..OptimizerConfig::default()
    };
    SupervisedLearner::new(TinyLm::new(1), config).unwrap()
}

fn rows<'a>() -> [TokenRow<'a>; 3] {
    let row = |prompt, completion| TokenRow {
        prompt,
        completion,
        routing: None,
    };
    [row(&[1], &[2, 3, 4]), row(&[2, 5], &[6]), row(&[3], &[1, 0])]
}

#[test]
fn the_policy_learns_the_completions() {
    let mut learner = learner(0.05, 1e-8);
    let before = score::<Flex, _>(&TinyLm::new(1), &rows(), &ScoreOptions::default());
    let tokens = before.log_probs.concat();
    let expected = -tokens.iter().sum::<f32>() as f64 / tokens.len() as f64;
    let first = learner.step(&rows(), 3).unwrap().loss;
    assert!((first - expected).abs() < 1e-6 && first > 1.0, "{first} {expected}");
    for _ in 0..100 {
        learner.step(&rows(), 3).unwrap();
    }
    let last = learner.step(&rows(), 3).unwrap();
    assert!(last.loss < 0.05, "{last:?}");
    assert!(matches!(last.update, Update::Applied { grad_norm } if grad_norm > 0.0));
    assert_eq!(learner.steps(), 102);
}

#[test]
fn parts_of_a_batch_give_the_gradient_of_the_whole() {
    // With ε = 1 AdamW's first move is g / (|g| + 1): close to linear, so that it shows differences of gradients.
    let updated = |micro| {
        let mut learner = learner(1.0, 1.0);
        let output = learner.step(&rows(), micro).unwrap();
        (output.loss, learner.into_model().values())
    };
    let whole = updated(3);
    for micro in [1, 2] {
        let parts = updated(micro);
        assert!((parts.0 - whole.0).abs() < 1e-6);
        assert!(
            parts
                .1
                .iter()
                .zip(&whole.1)
                .all(|(part, whole)| (part - whole).abs() < 1e-5)
        );
    }
}

#[test]
fn a_loss_that_is_not_finite_is_skipped_and_counted_until_there_are_too_many() {
    let mut learner = learner(0.1, 1e-8);
    let mut model = learner.model.take().unwrap();
    model.head = model.head.map(|head| head * f32::NAN);
    learner.model = Some(model);
    let before = learner.model().values().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let output = learner.step(&rows(), 2).unwrap();
    assert_eq!(output.update, Update::Skipped { quantity: "loss" });
    assert!(matches!(
        learner.step(&rows(), 2),
        Err(GrpoError::Diverged { consecutive: 2, .. })
    ));
    assert_eq!(learner.skipped_steps().total, 2);
    let after = learner.model().values().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(before, after);
}

#[test]
fn rows_that_cannot_work_are_refused_by_name() {
    let mut learner = learner(0.1, 1e-8);
    assert!(
        learner
            .step(&rows(), 0)
            .unwrap_err()
            .to_string()
            .starts_with("micro_batch_rows: expected at least 1")
    );
    let error = |rows: &[TokenRow<'_>]| self::learner(0.1, 1e-8).step(rows, 4).unwrap_err().to_string();
    let mut bad = rows();
    bad[1].prompt = &[];
    assert!(error(&bad).starts_with("rows[1].prompt: expected one token"));
    let mut bad = rows();
    bad[2].completion = &[1, 7];
    assert_eq!(
        error(&bad),
        "rows[2]: expected token ids below the model's vocabulary of 7, got 7"
    );
    assert!(error(&[]).starts_with("rows: expected one completion token"));
}
