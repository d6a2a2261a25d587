//! The unbiased estimator of pass@k.

/// The probability that at least one of `k` samples is right, estimated without bias from `correct` right ones among `n`:
/// `1 − C(n − correct, k) / C(n, k)` (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
///
/// # Panics
/// When `correct > n`, or `k` is not in `1..=n`.
pub fn pass_at_k(n: usize, correct: usize, k: usize) -> f64 {
    assert!(correct <= n, "{correct} right samples of {n}");
    assert!((1..=n).contains(&k), "pass@{k} of {n} samples: expected k in 1..={n}");
    if n - correct < k {
        return 1.0;
    }
    1.0 - (n - correct + 1..=n)
        .map(|i| 1.0 - k as f64 / i as f64)
        .product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_share_of_draws_with_a_right_sample() {
        assert_eq!(pass_at_k(4, 1, 1), 0.25);
        assert_eq!(pass_at_k(4, 0, 4), 0.0);
        assert_eq!(pass_at_k(4, 4, 1), 1.0);
        // Every pair of 5 samples, 2 of them right: 10 pairs, 3 of them all wrong.
        assert!((pass_at_k(5, 2, 2) - 0.7).abs() < 1e-15);
        assert_eq!(pass_at_k(5, 2, 4), 1.0);
    }

    #[test]
    fn counted_over_all_draws() {
        for n in 1..=8usize {
            for correct in 0..=n {
                for k in 1..=n {
                    let draws = (0u32..1 << n).filter(|draw| draw.count_ones() as usize == k);
                    let (mut all, mut right) = (0, 0);
                    for draw in draws {
                        all += 1;
                        right += u32::from(draw & ((1 << correct) - 1) != 0);
                    }
                    let expected = f64::from(right) / f64::from(all);
                    assert!((pass_at_k(n, correct, k) - expected).abs() < 1e-12, "{n} {correct} {k}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "pass@0 of 4 samples")]
    fn no_samples_are_refused() {
        pass_at_k(4, 1, 0);
    }
}
