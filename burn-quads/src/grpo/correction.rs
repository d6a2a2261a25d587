//! Corrections for rollouts that were sampled by another policy than the one that learns.
//!
//! With `r = π_old / π_rollout` (the trainer's log-probs of the sampled tokens before the update, over the rollout
//! engine's), a correction turns the ratios into weights that multiply the policy loss of each token; no gradient flows
//! through them. The KL term is not weighted (as in TRL).
use serde::{Deserialize, Serialize};

use super::{GrpoError, loss::LOG_RATIO_BOUND};

/// Which weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// No correction: every weight is 1.
    #[default]
    None,
    /// Truncated importance sampling: `min(r, clip_max)` of each token; default 2 (verl; TRL `token_truncate`).
    #[serde(alias = "token_truncate")]
    Tis,
    /// `r` of each token where `clip_min ≤ r ≤ clip_max`, else 0; default [0.5, 5] (IcePop; TRL `token_mask`).
    #[serde(alias = "token_mask")]
    Icepop,
    /// `min(R, clip_max)` for a whole completion, `R` the product of its `r`; default 2 (TRL).
    SequenceTruncate,
    /// `R` where `R ≤ clip_max`, else 0, `R` the product of the `r` of a completion; default 3 (TRL's default).
    /// The product grows with the length, so long completions are dropped first.
    SequenceMask,
    /// The same with the geometric mean of the `r` of a completion, which does not depend on its length. The default
    /// bound of 3 lets nearly everything pass; published bands are as narrow as [0.99, 1.01].
    SequenceMaskMean,
}

/// A correction and its bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Correction {
    /// Which weights.
    pub mode: CorrectionMode,
    /// Lower bound of the ratio; the mode's default when absent.
    pub clip_min: Option<f32>,
    /// Upper bound of the ratio; the mode's default when absent.
    pub clip_max: Option<f32>,
}

/// Weights of the tokens of some completions.
#[derive(Clone, Debug, PartialEq)]
pub struct CorrectionWeights {
    /// One weight a token, completion after completion.
    pub values: Vec<f32>,
    /// Tokens whose rollout log-prob is not finite: their ratio is taken as 1.
    pub unscored_tokens: usize,
    /// Tokens with weight 0.
    pub rejected_tokens: usize,
    /// Tokens that count.
    pub tokens: usize,
}

impl CorrectionWeights {
    /// Fraction of the tokens that count with weight 0.
    pub fn rejected_fraction(&self) -> f64 {
        self.rejected_tokens as f64 / self.tokens.max(1) as f64
    }
}

impl Correction {
    /// A mode with its default bounds.
    pub fn new(mode: CorrectionMode) -> Self {
        Self {
            mode,
            ..Self::default()
        }
    }

    /// The bounds in force.
    pub fn bounds(&self) -> (f64, f64) {
        let (low, high) = match self.mode {
            CorrectionMode::None => (0.0, f64::INFINITY),
            CorrectionMode::Tis | CorrectionMode::SequenceTruncate => (0.0, 2.0),
            CorrectionMode::Icepop => (0.5, 5.0),
            CorrectionMode::SequenceMask | CorrectionMode::SequenceMaskMean => (0.0, 3.0),
        };
        (
            self.clip_min.map_or(low, f64::from),
            self.clip_max.map_or(high, f64::from),
        )
    }

    /// Refuses bounds that cannot work.
    pub fn validate(&self) -> Result<(), GrpoError> {
        let (low, high) = self.bounds();
        if !(low >= 0.0 && low.is_finite()) {
            return Err(GrpoError::option("correction.clip_min", "a number of at least 0", low));
        }
        if high.is_nan() || high <= low {
            return Err(GrpoError::option(
                "correction.clip_max",
                format!("a number above clip_min ({low})"),
                high,
            ));
        }
        Ok(())
    }

    /// Weights of completions of the given `lengths`.
    ///
    /// All other slices have one entry a token, completion after completion. `mask` is false at tokens that do not
    /// count: they take no part in a completion's ratio.
    pub fn weights(
        &self,
        old_log_probs: &[f32],
        rollout_log_probs: &[f32],
        mask: &[bool],
        lengths: &[usize],
    ) -> CorrectionWeights {
        let tokens = lengths.iter().sum::<usize>();
        assert!(
            old_log_probs.len() == tokens && rollout_log_probs.len() == tokens && mask.len() == tokens,
            "completions have {tokens} tokens, but there are {} old log-probs, {} rollout log-probs, {} mask entries",
            old_log_probs.len(),
            rollout_log_probs.len(),
            mask.len()
        );
        let mut unscored_tokens = 0;
        let log_ratios = (0..tokens)
            .map(|token| {
                if !mask[token] {
                    return 0.0;
                }
                if !rollout_log_probs[token].is_finite() {
                    unscored_tokens += 1;
                    return 0.0;
                }
                let log_ratio = old_log_probs[token] as f64 - rollout_log_probs[token] as f64;
                // A trainer that does not give a number shows in the loss, not here.
                if log_ratio.is_finite() { log_ratio } else { 0.0 }
            })
            .collect::<Vec<_>>();

        let (low, high) = self.bounds();
        let ratio = |log_ratio: f64| log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp();
        let truncate = |ratio: f64| ratio.clamp(low, high);
        let reject = |ratio: f64| if (low..=high).contains(&ratio) { ratio } else { 0.0 };
        let mut values = Vec::with_capacity(tokens);
        let mut start = 0;
        for &length in lengths {
            let row = &log_ratios[start..start + length];
            let counted = mask[start..start + length].iter().filter(|&&counts| counts).count();
            let sum = row.iter().sum::<f64>();
            start += length;
            let of_row = |weight: f64| std::iter::repeat_n(weight as f32, length);
            match self.mode {
                CorrectionMode::None => values.extend(of_row(1.0)),
                CorrectionMode::Tis => values.extend(row.iter().map(|&token| truncate(ratio(token)) as f32)),
                CorrectionMode::Icepop => values.extend(row.iter().map(|&token| reject(ratio(token)) as f32)),
                CorrectionMode::SequenceTruncate => values.extend(of_row(truncate(ratio(sum)))),
                CorrectionMode::SequenceMask => values.extend(of_row(reject(ratio(sum)))),
                CorrectionMode::SequenceMaskMean => {
                    values.extend(of_row(reject(ratio(sum / counted.max(1) as f64))));
                }
            }
        }
        CorrectionWeights {
            rejected_tokens: (0..tokens).filter(|&token| mask[token] && values[token] == 0.0).count(),
            tokens: mask.iter().filter(|&&counts| counts).count(),
            values,
            unscored_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights of one completion whose ratios are given.
    fn weights(correction: Correction, ratios: &[f32]) -> Vec<f32> {
        let old = ratios.iter().map(|ratio| ratio.ln() - 1.0).collect::<Vec<_>>();
        let rollout = vec![-1.0; ratios.len()];
        let mask = vec![true; ratios.len()];
        correction.weights(&old, &rollout, &mask, &[ratios.len()]).values
    }

    fn assert_close(got: &[f32], expected: &[f32]) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-5, "{got} {expected}");
        }
    }

    #[test]
    fn each_mode_does_what_its_name_says() {
        let ratios = [0.25, 1.5, 3.0, 6.0];
        let of = |mode| weights(Correction::new(mode), &ratios);
        assert_close(&of(CorrectionMode::None), &[1.0; 4]);
        assert_close(&of(CorrectionMode::Tis), &[0.25, 1.5, 2.0, 2.0]);
        assert_close(&of(CorrectionMode::Icepop), &[0.0, 1.5, 3.0, 0.0]);
        assert_close(&of(CorrectionMode::SequenceTruncate), &[2.0; 4]); // the product is 6.75
        assert_close(&of(CorrectionMode::SequenceMask), &[0.0; 4]);
        assert_close(&of(CorrectionMode::SequenceMaskMean), &[6.75f32.powf(0.25); 4]);
    }

    #[test]
    fn masking_a_sequence_by_its_sum_drops_long_answers_and_by_its_mean_does_not() {
        let gap = 1.1f32;
        let short = [gap; 4];
        let long = [gap; 64]; // product 446
        assert!(weights(Correction::new(CorrectionMode::SequenceMask), &short)[0] > 0.0);
        assert_eq!(weights(Correction::new(CorrectionMode::SequenceMask), &long)[0], 0.0);
        assert_close(
            &weights(Correction::new(CorrectionMode::SequenceMaskMean), &long),
            &[gap; 64],
        );
    }

    #[test]
    fn nan_rollout_log_prob_is_neutralised_and_counted() {
        for value in [f32::NAN, f32::NEG_INFINITY] {
            for mode in [
                CorrectionMode::Tis,
                CorrectionMode::Icepop,
                CorrectionMode::SequenceMask,
            ] {
                let result = Correction::new(mode).weights(&[-1.0, -1.0], &[value, -1.0], &[true; 2], &[2]);
                assert_eq!(result.values, [1.0, 1.0], "{mode:?}");
                assert_eq!(result.unscored_tokens, 1);
            }
        }
    }

    #[test]
    fn a_token_that_does_not_count_leaves_the_sequence_ratio_alone() {
        let result = Correction::new(CorrectionMode::SequenceMask).weights(
            &[-1.0, 50.0],
            &[-1.5, f32::NAN],
            &[true, false],
            &[2],
        );
        assert_close(&result.values, &[0.5f32.exp(); 2]);
        assert_eq!((result.unscored_tokens, result.tokens), (0, 1));
    }

    #[test]
    fn a_huge_ratio_does_not_overflow() {
        let result = Correction::new(CorrectionMode::SequenceTruncate).weights(&[0.0], &[-1e30], &[true], &[1]);
        assert_eq!(result.values, [2.0]);
        let result = Correction::new(CorrectionMode::Icepop).weights(&[0.0], &[-1e30], &[true], &[1]);
        assert_eq!((result.values[0], result.rejected_tokens), (0.0, 1));
    }

    #[test]
    fn bounds_that_cannot_work_are_refused_by_name() {
        let correction = |clip_min, clip_max| Correction {
            mode: CorrectionMode::Icepop,
            clip_min,
            clip_max,
        };
        let error = |correction: Correction| correction.validate().unwrap_err().to_string();
        assert!(error(correction(Some(-0.1), None)).starts_with("correction.clip_min: expected"));
        assert!(error(correction(Some(f32::NAN), None)).starts_with("correction.clip_min: expected"));
        assert!(error(correction(Some(2.0), Some(2.0))).starts_with("correction.clip_max: expected"));
        assert!(error(correction(None, Some(f32::NAN))).starts_with("correction.clip_max: expected"));
        assert_eq!(correction(None, None).validate(), Ok(()));
    }
}
