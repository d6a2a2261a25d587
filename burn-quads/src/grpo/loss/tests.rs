use burn::backend::{Autodiff, Flex};
use proptest::prelude::*;

use super::*;

const KINDS: [LossKind; 6] = [
    LossKind::Grpo,
    LossKind::Bnpo,
    LossKind::DrGrpo,
    LossKind::Dapo,
    LossKind::Cispo,
    LossKind::Gspo,
];

fn batch<'a>(lengths: &'a [usize], mask: &'a [bool], advantages: &'a [f32], log_probs: &'a [f32]) -> LossBatch<'a> {
    LossBatch {
        lengths,
        mask,
        advantages,
        log_probs,
        old_log_probs: None,
        reference_log_probs: None,
        rollout_log_probs: None,
        weights: None,
    }
}

fn evaluate(config: &LossConfig, batch: &LossBatch<'_>) -> LossOutput {
    config.evaluate(batch, &Normalizer::of(batch, 8))
}

#[test]
fn ratio_one_gives_minus_the_advantage() {
    let mask = [true; 3];
    let batch = batch(&[1, 2], &mask, &[2.0, -1.0], &[-0.5, -1.0, -1.5]);
    for (kind, expected) in [
        (LossKind::Grpo, (-2.0 + 1.0) / 2.0),
        (LossKind::Gspo, (-2.0 + 1.0) / 2.0),
        (LossKind::Bnpo, (-2.0 + 1.0 + 1.0) / 3.0),
        (LossKind::Dapo, (-2.0 + 1.0 + 1.0) / 3.0),
        (LossKind::DrGrpo, (-2.0 + 1.0 + 1.0) / 16.0),
        (LossKind::Cispo, (2.0 * 0.5 - 1.0 - 1.5) / 3.0),
    ] {
        let output = evaluate(&LossConfig::new(kind), &batch);
        assert!((output.loss - expected).abs() < 1e-9, "{kind:?} {}", output.loss);
        assert_eq!(output.stats.ppo_kl(), 0.0);
    }
}

#[test]
fn clip_takes_the_gradient_away_on_its_side_only() {
    // Ratios 1.25 (inside [0.8, 1.28]), 1.5, 0.5 for both signs of the advantage.
    let log_probs = [1.25f32.ln(), 1.5f32.ln(), 0.5f32.ln()].repeat(2);
    let old = [0.0; 6];
    let mask = [true; 6];
    let mut batch = batch(&[3, 3], &mask, &[1.0, -1.0], &log_probs);
    batch.old_log_probs = Some(&old);
    let output = evaluate(&LossConfig::new(LossKind::Bnpo), &batch);
    let moved = output.gradient.iter().map(|&g| g != 0.0).collect::<Vec<_>>();
    assert_eq!(moved, [true, false, true, true, true, false]);
    assert!((output.stats.clip_high_mean() - 1.0 / 6.0).abs() < 1e-12);
    assert!((output.stats.clip_low_mean() - 1.0 / 6.0).abs() < 1e-12);
    assert_eq!(
        (output.stats.clip_low_min(), output.stats.clip_high_max()),
        (0.0, 1.0 / 3.0)
    );

    let two_sided = LossConfig {
        delta: Some(1.4),
        ..LossConfig::new(LossKind::Bnpo)
    };
    let output = evaluate(&two_sided, &batch);
    assert_eq!(output.gradient[4], 0.0, "ratio 1.5 passes delta 1.4");
    assert!((output.stats.clip_delta_mean() - 1.0 / 6.0).abs() < 1e-12);
}

#[test]
fn fully_masked_row_has_no_gradient_and_leaves_the_token_denominators() {
    let lengths = [2, 2];
    let mask = [true, true, false, false];
    let log_probs = [-0.5, -1.0, f32::NAN, f32::NEG_INFINITY];
    let alone_mask = [true, true];
    for kind in KINDS {
        let output = evaluate(
            &LossConfig::new(kind),
            &batch(&lengths, &mask, &[1.0, -3.0], &log_probs),
        );
        assert!(output.loss.is_finite(), "{kind:?}");
        assert_eq!(output.gradient[2..], [0.0, 0.0], "{kind:?}");
        let alone = evaluate(
            &LossConfig::new(kind),
            &batch(&[2], &alone_mask, &[1.0], &log_probs[..2]),
        );
        // The row mean of grpo and the constant length of dr_grpo count the row (as TRL does), tokens do not.
        let rows = match kind {
            LossKind::Grpo | LossKind::Gspo | LossKind::DrGrpo => 2.0,
            _ => 1.0,
        };
        assert!((output.loss * rows - alone.loss).abs() < 1e-12, "{kind:?}");
    }
}

#[test]
fn no_unmasked_token_gives_loss_zero_without_a_division() {
    for kind in KINDS {
        for (lengths, mask) in [(vec![2], vec![false; 2]), (vec![0], vec![]), (vec![], vec![])] {
            let log_probs = vec![f32::NAN; mask.len()];
            let advantages = vec![1.0; lengths.len()];
            let output = evaluate(&LossConfig::new(kind), &batch(&lengths, &mask, &advantages, &log_probs));
            assert_eq!(output.loss, 0.0, "{kind:?}");
            assert!(output.gradient.iter().all(|&g| g == 0.0));
            assert_eq!(output.stats.clip_region_mean(), 0.0);
            assert_eq!((output.stats.clip_low_min(), output.stats.clip_high_max()), (0.0, 0.0));
        }
    }
}

#[test]
fn ratio_overflow_is_clamped_before_the_exponential() {
    let mask = [true; 2];
    let old = [-1e4, -1e4];
    for kind in KINDS {
        let config = LossConfig {
            beta: 0.1,
            kl_times_ratio: true,
            ..LossConfig::new(kind)
        };
        for advantage in [1.0, -1.0] {
            let advantages = [advantage];
            let mut batch = batch(&[2], &mask, &advantages, &[-1.0, -1.0]);
            batch.old_log_probs = Some(&old);
            batch.reference_log_probs = Some(&[5e3, -5e3]);
            let output = evaluate(&config, &batch);
            assert!(output.loss.is_finite(), "{kind:?}");
            assert!(output.gradient.iter().all(|g| g.is_finite()), "{kind:?}");
        }
    }
}

#[test]
fn nan_log_prob_of_a_counting_token_shows_in_the_loss() {
    let mask = [true; 2];
    let old = [-1.0; 2];
    for kind in KINDS {
        for old in [None, Some(&old[..])] {
            for advantage in [1.0, -1.0] {
                let config = LossConfig {
                    delta: (kind != LossKind::Cispo).then_some(3.0),
                    ..LossConfig::new(kind)
                };
                let advantages = [advantage];
                let mut batch = batch(&[2], &mask, &advantages, &[-1.0, f32::NAN]);
                batch.old_log_probs = old;
                assert!(evaluate(&config, &batch).loss.is_nan(), "{kind:?}");
            }
        }
    }
}

#[test]
fn rejected_token_is_selected_away_not_multiplied_by_zero() {
    let mask = [true; 2];
    let mut batch = batch(&[2], &mask, &[1.0], &[-1.0, f32::NAN]);
    batch.weights = Some(&[1.0, 0.0]);
    let output = evaluate(&LossConfig::new(LossKind::Dapo), &batch);
    assert_eq!((output.loss, output.gradient[1]), (-0.5, 0.0));
}

#[test]
fn weights_multiply_the_policy_term_and_not_the_kl() {
    let mask = [true; 1];
    let weights = [0.5];
    let reference = [-1.5];
    let mut batch = batch(&[1], &mask, &[2.0], &[-1.0]);
    batch.reference_log_probs = Some(&reference);
    batch.weights = Some(&weights);
    let config = LossConfig {
        beta: 0.25,
        ..LossConfig::new(LossKind::Dapo)
    };
    let k3 = (-0.5f64).exp() + 0.5 - 1.0;
    let output = evaluate(&config, &batch);
    assert!((output.loss - (-2.0 * 0.5 + 0.25 * k3)).abs() < 1e-9);
    assert!((output.stats.kl() - k3).abs() < 1e-9);
    assert!((output.stats.kl_loss() - k3).abs() < 1e-9);
}

#[test]
fn off_policy_mask_drops_what_the_policy_has_left_and_only_there() {
    let mask = [true; 3];
    let rollout = [0.0, f32::NAN, 0.0];
    let mut batch = batch(&[1, 1, 1], &mask, &[-1.0, -1.0, 1.0], &[-0.5; 3]);
    batch.rollout_log_probs = Some(&rollout);
    let config = LossConfig {
        off_policy_mask_threshold: Some(0.1),
        ..LossConfig::new(LossKind::Dapo)
    };
    let output = evaluate(&config, &batch);
    let kept = output.gradient.iter().map(|&g| g != 0.0).collect::<Vec<_>>();
    assert_eq!(kept, [false, true, true]);
    assert_eq!(output.stats.off_policy_rows(), 1);
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    let valid = LossConfig::default();
    let error = |config: LossConfig| config.validate().unwrap_err().to_string();
    for epsilon in [-0.1, 1.0, f32::NAN] {
        let config = LossConfig {
            epsilon_low: Some(epsilon),
            ..valid
        };
        assert!(error(config).starts_with("loss.epsilon_low: expected a number in [0, 1), got"));
    }
    let high = |value| LossConfig {
        epsilon_high: Some(value),
        ..valid
    };
    assert!(error(high(-0.1)).starts_with("loss.epsilon_high"));
    assert!(error(high(f32::INFINITY)).starts_with("loss.epsilon_high"));
    let delta = |value, kind| LossConfig {
        delta: Some(value),
        ..LossConfig::new(kind)
    };
    assert!(error(delta(1.28, LossKind::Dapo)).starts_with("loss.delta"));
    assert!(error(delta(9.0, LossKind::Cispo)).starts_with("loss.delta"));
    let beta = LossConfig { beta: -1e-3, ..valid };
    assert!(error(beta).starts_with("loss.beta"));
    let threshold = LossConfig {
        off_policy_mask_threshold: Some(-1.0),
        ..valid
    };
    assert!(error(threshold).starts_with("loss.off_policy_mask_threshold"));
    for kind in KINDS {
        assert_eq!(LossConfig::new(kind).validate(), Ok(()));
    }
}

#[test]
fn attached_loss_has_the_value_and_the_gradient_in_burn() {
    type B = Autodiff<Flex>;
    let device = Default::default();
    let values = [-0.5, -1.0, -1.5];
    let mask = [true, false, true];
    let output = evaluate(&LossConfig::default(), &batch(&[1, 2], &mask, &[2.0, -1.0], &values));
    let log_probs = Tensor::<B, 1>::from_floats(values, &device).require_grad();
    let loss = output.attach(log_probs.clone());
    assert!((loss.clone().into_scalar() as f64 - output.loss).abs() < 1e-6);
    let gradient = log_probs.grad(&(loss * 3.0).backward()).unwrap();
    let expected = output.gradient.iter().map(|g| g * 3.0).collect::<Vec<_>>();
    assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), expected);
}

/// A batch of completions with everything that a loss can read.
#[derive(Clone, Debug)]
struct Case {
    lengths: Vec<usize>,
    mask: Vec<bool>,
    advantages: Vec<f32>,
    log_probs: Vec<f32>,
    old: Vec<f32>,
    reference: Vec<f32>,
    weights: Vec<f32>,
}

impl Case {
    fn batch(&self) -> LossBatch<'_> {
        LossBatch {
            old_log_probs: Some(&self.old),
            reference_log_probs: Some(&self.reference),
            weights: Some(&self.weights),
            ..batch(&self.lengths, &self.mask, &self.advantages, &self.log_probs)
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    prop::collection::vec((0usize..5, -2.0f32..2.0), 1..5).prop_flat_map(|rows| {
        let tokens = rows.iter().map(|row| row.0).sum::<usize>();
        let token = (any::<bool>(), -3.0f32..0.0, -0.6f32..0.6, -0.6f32..0.6, 0.0f32..2.0);
        prop::collection::vec(token, tokens).prop_map(move |tokens| Case {
            lengths: rows.iter().map(|row| row.0).collect(),
            advantages: rows.iter().map(|row| row.1).collect(),
            mask: tokens.iter().map(|token| token.0).collect(),
            log_probs: tokens.iter().map(|token| token.1).collect(),
            old: tokens.iter().map(|token| token.1 + token.2).collect(),
            reference: tokens.iter().map(|token| token.1 + token.3).collect(),
            weights: tokens.iter().map(|token| token.4).collect(),
        })
    })
}

fn config() -> impl Strategy<Value = LossConfig> {
    (0usize..6, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(kind, kl, kl_times_ratio, delta)| LossConfig {
        // Wide for gspo, whose default range a finite difference would step across.
        epsilon_low: Some(0.2),
        epsilon_high: (KINDS[kind] != LossKind::Cispo).then_some(0.28),
        delta: (delta && KINDS[kind] != LossKind::Cispo).then_some(1.5),
        beta: if kl { 0.3 } else { 0.0 },
        kl_times_ratio,
        ..LossConfig::new(KINDS[kind])
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn gradient_is_the_slope_of_the_loss(case in case(), config in config()) {
        // cispo's weight has no gradient, so its loss is no antiderivative: it is covered by the golden cases.
        prop_assume!(config.kind != LossKind::Cispo);
        let batch = case.batch();
        let normalizer = Normalizer::of(&batch, 8);
        let analytic = config.evaluate(&batch, &normalizer).gradient;
        const STEP: f32 = 1.0 / 1024.0; // exact in f32, so that the difference of log-probs is the step
        for t in 0..case.mask.len() {
            let at = |offset: f32| {
                let mut log_probs = case.log_probs.clone();
                log_probs[t] += offset;
                let moved = log_probs[t] as f64;
                let batch = LossBatch { log_probs: &log_probs, ..batch };
                let output = config.evaluate(&batch, &normalizer);
                (moved, output.loss, output.stats)
            };
            let (left, middle, right) = (at(-STEP), at(0.0), at(STEP));
            // A kink between the points makes the difference quotient an average of two slopes.
            let same_side = [&left, &right].iter().all(|side| {
                side.2.clip_region_mean() == middle.2.clip_region_mean()
                    && side.2.clip_delta_mean() == middle.2.clip_delta_mean()
            });
            if same_side {
                let slope = (right.1 - left.1) / (right.0 - left.0);
                prop_assert!((slope - analytic[t] as f64).abs() < 1e-4, "token {t}: {slope} {}", analytic[t]);
            }
        }
    }

    #[test]
    fn parts_of_a_minibatch_add_up_to_the_whole(case in case(), config in config(), cut in 0usize..5) {
        let batch = case.batch();
        let normalizer = Normalizer::of(&batch, 8);
        let whole = config.evaluate(&batch, &normalizer);
        let cut = cut.min(case.lengths.len());
        let token_cut = case.lengths[..cut].iter().sum::<usize>();
        let part = |rows: std::ops::Range<usize>, tokens: std::ops::Range<usize>| {
            config.evaluate(
                &LossBatch {
                    lengths: &case.lengths[rows.clone()],
                    mask: &case.mask[tokens.clone()],
                    advantages: &case.advantages[rows],
                    log_probs: &case.log_probs[tokens.clone()],
                    old_log_probs: Some(&case.old[tokens.clone()]),
                    reference_log_probs: Some(&case.reference[tokens.clone()]),
                    rollout_log_probs: None,
                    weights: Some(&case.weights[tokens]),
                },
                &normalizer,
            )
        };
        let first = part(0..cut, 0..token_cut);
        let second = part(cut..case.lengths.len(), token_cut..case.mask.len());
        prop_assert!((first.loss + second.loss - whole.loss).abs() < 1e-9);
        prop_assert_eq!([first.gradient, second.gradient].concat(), whole.gradient);
        let mut stats = first.stats;
        stats.merge(&second.stats);
        prop_assert_eq!(stats.clip_region_mean(), whole.stats.clip_region_mean());
        prop_assert_eq!(stats.clip_low_min(), whole.stats.clip_low_min());
        prop_assert!((stats.ppo_kl() - whole.stats.ppo_kl()).abs() < 1e-9);
        prop_assert!((stats.kl() - whole.stats.kl()).abs() < 1e-9);
    }
}
