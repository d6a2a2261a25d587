use proptest::prelude::*;

use super::*;
use crate::token_log_probs::RowRouting;

#[test]
fn equal_policies_have_no_gap() {
    let lp = [-0.1, -2.0, -0.5];
    let mismatch = Mismatch::new(&lp, &lp);
    assert_eq!((mismatch.mean, mismatch.p99, mismatch.max), (0.0, 0.0, 0.0));
    assert_eq!((mismatch.kl, mismatch.k3_kl, mismatch.k3_kl_reverse), (0.0, 0.0, 0.0));
    assert_eq!((mismatch.effective_sample_size, mismatch.is_mean), (1.0, 1.0));
    assert!((mismatch.probs_pearson - 1.0).abs() < 1e-12);
    assert_eq!(mismatch.warning(0.0), None);
}

#[test]
fn one_token_by_hand() {
    let d = 3f64.ln();
    // Exact in f32: the rollout's log-prob is 0.
    let mismatch = Mismatch::new(&[d as f32], &[0.0]);
    let close = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-6, "{got} {expected}");
    close(mismatch.mean, d);
    close(mismatch.kl, -d);
    close(mismatch.k3_kl, 3.0 - 1.0 - d);
    close(mismatch.k3_kl_reverse, 3.0 * d - 2.0);
    close(mismatch.chi2_token, 8.0);
    close(mismatch.is_mean, 3.0);
    close(mismatch.out_of_bounds, 1.0);
    close(mismatch.probs_diff_max, 2.0);
}

#[test]
fn both_kl_estimates_agree_with_the_sum_over_the_vocabulary() {
    // Expectation over rollout tokens, each token as often as its probability in eighths.
    let rollout = [4.0, 2.0, 1.0, 1.0].map(|p: f64| p / 8.0);
    let trainer = [2.0, 3.0, 1.0, 2.0].map(|p: f64| p / 8.0);
    let tokens = [0, 0, 0, 0, 1, 1, 2, 3];
    let of = |probs: [f64; 4]| tokens.map(|token| probs[token].ln() as f32);
    let mismatch = Mismatch::new(&of(trainer), &of(rollout));
    let kl = |p: [f64; 4], q: [f64; 4]| p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
    assert!((mismatch.k3_kl - kl(rollout, trainer)).abs() < 1e-6);
    assert!((mismatch.kl - kl(rollout, trainer)).abs() < 1e-6);
    assert!((mismatch.k3_kl_reverse - kl(trainer, rollout)).abs() < 1e-6);
}

#[test]
fn effective_sample_size_of_one_heavy_token() {
    // Ratios 3, 1, 1, 1: (6)² / (4 · 12).
    let mismatch = Mismatch::new(&[3f32.ln(), 0.0, 0.0, 0.0], &[0.0; 4]);
    assert!((mismatch.effective_sample_size - 0.75).abs() < 1e-6);
    assert_eq!(mismatch.out_of_bounds, 0.25);
}

#[test]
fn p99_leaves_one_in_a_hundred_above_it() {
    let mut trainer = vec![0.0; 200];
    trainer[7] = -4.0;
    trainer[8] = -3.0;
    trainer[9] = -2.0;
    let mismatch = Mismatch::new(&trainer, &[0.0; 200]);
    assert_eq!((mismatch.p99, mismatch.max), (2.0, 4.0));
    assert_eq!(
        Mismatch::new(&[-1.0, 0.0], &[0.0; 2]).p99,
        1.0,
        "few tokens: the greatest"
    );
}

#[test]
fn tokens_without_a_log_prob_are_left_out_and_counted() {
    let mismatch = Mismatch::new(&[-1.0, -1.0, f32::NEG_INFINITY], &[f32::NAN, -1.5, -1.0]);
    assert_eq!((mismatch.tokens, mismatch.unscored_tokens), (1, 2));
    assert_eq!(mismatch.mean, 0.5);
    let none = Mismatch::new(&[], &[]);
    assert!(none.metrics().iter().all(|(_, value)| value.is_finite()));
    assert_eq!((none.is_mean, none.effective_sample_size), (1.0, 1.0));
}

#[test]
fn a_ratio_that_overflows_is_clamped() {
    let mismatch = Mismatch::new(&[0.0], &[-1e30]);
    assert!(mismatch.metrics().iter().all(|(_, value)| value.is_finite()));
}

#[test]
fn the_warning_names_the_gap_and_the_bound() {
    let mismatch = Mismatch::new(&[-1.0, -1.0], &[-1.5, -1.0]);
    assert_eq!(mismatch.warning(0.25), None);
    let warning = mismatch.warning(0.2).unwrap();
    assert_eq!((warning.mean, warning.max), (0.25, 0.5));
    assert!(warning.to_string().contains("mismatch.warn_above = 0.2"));
}

#[test]
fn metrics_keep_their_order_and_serialise_as_a_map() {
    let metrics = Mismatch::new(&[-1.0], &[-1.5]).metrics();
    let names = metrics.iter().map(|entry| entry.0).collect::<Vec<_>>();
    assert_eq!(
        names[..3],
        [
            "sampling/sampling_logp_difference/mean",
            "sampling/sampling_logp_difference/p99",
            "sampling/sampling_logp_difference/max"
        ]
    );
    let json = serde_json::to_string(&metrics).unwrap();
    assert!(
        json.starts_with(r#"{"sampling/sampling_logp_difference/mean":0.5,"#),
        "{json}"
    );
}

#[test]
fn routes_flip_when_the_set_of_experts_differs() {
    let routing = |layers: [[i32; 6]; 2]| RowRouting {
        top_k: 2,
        layers: layers.map(|ids| ids.to_vec()).to_vec(),
    };
    let trainer = [routing([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 0, 1]])];
    let rollout = [routing([[1, 0, 2, 1, -1, -1], [0, 1, 0, 2, 0, 1]])];
    let flips = RouteFlips::new(&trainer, &rollout).unwrap();
    assert_eq!(flips.decisions, 5);
    assert_eq!(flips.flip_rate, 2.0 / 5.0);
    assert_eq!(flips.token_flip_rate, 1.0 / 3.0);
    let shorter = [RowRouting {
        top_k: 2,
        layers: vec![vec![0, 1], vec![0, 1]],
    }];
    assert_eq!(RouteFlips::new(&trainer, &shorter).unwrap().decisions, 2);
    assert_eq!(RouteFlips::new(&[], &[]).unwrap().flip_rate, 0.0);
    let other = [RowRouting {
        top_k: 1,
        ..shorter[0].clone()
    }];
    let error = RouteFlips::new(&trainer, &other).unwrap_err().to_string();
    assert_eq!(
        error,
        "expert_ids[0]: expected (layers, top_k) (2, 2), as the model has, got (2, 1)"
    );
    let error = RouteFlips::new(&trainer, &[]).unwrap_err().to_string();
    assert_eq!(error, "expert_ids: expected 1 rows, got 0");
}

proptest! {
    #[test]
    fn the_parts_of_the_gap_add_up_exactly(
        tokens in prop::collection::vec((-30.0f32..0.0, -1.0f32..1.0, -1.0f32..1.0, -1e-4f32..1e-4), 0..50)
    ) {
        let of = |get: fn(&(f32, f32, f32, f32)) -> f32| tokens.iter().map(get).collect::<Vec<_>>();
        let trainer = of(|t| t.0);
        let weights = of(|t| t.0 + t.1);
        let precision = of(|t| t.0 + t.1 + t.2);
        let engine = of(|t| t.0 + t.1 + t.2 + t.3);
        let parts = Decomposition::new(&trainer, &weights, &precision, &engine);
        for token in 0..tokens.len() {
            prop_assert_eq!(parts.weight[token] + parts.activation[token] + parts.numerics[token], parts.total[token]);
            let whole = engine[token] as f64 - trainer[token] as f64;
            prop_assert!((parts.total[token] - whole).abs() <= 1e-14);
        }
        prop_assert!(parts.metrics().iter().all(|(_, value)| value.is_finite()));
    }

    #[test]
    fn kl_estimates_are_never_negative(pairs in prop::collection::vec((-40.0f32..0.0, -40.0f32..0.0), 0..40)) {
        let (trainer, rollout): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let mismatch = Mismatch::new(&trainer, &rollout);
        prop_assert!(mismatch.k3_kl >= 0.0 && mismatch.k3_kl_reverse >= -1e-9);
        prop_assert!(mismatch.effective_sample_size > 0.0 && mismatch.effective_sample_size <= 1.0 + 1e-12);
        prop_assert!(mismatch.p99 <= mismatch.max);
    }
}

#[test]
fn a_token_that_one_pass_could_not_score_is_left_out_of_every_part() {
    let parts = Decomposition::new(&[-1.0, -1.0], &[-1.0, -1.25], &[f32::NAN, -1.5], &[-1.0, -2.0]);
    assert_eq!(parts.unscored_tokens, 1);
    assert_eq!(
        (parts.weight[0], parts.activation[0], parts.numerics[0]),
        (-0.25, -0.25, -0.5)
    );
    assert_eq!(parts.total, [-1.0]);
}
