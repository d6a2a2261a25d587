//! What a loss reads, and what it is divided by.

/// Completions with what a loss needs to know of their tokens.
///
/// Slices "of tokens" have one entry a token, completion after completion, with `lengths` saying how many each has.
/// A padded rectangle is the case of equal lengths with a mask.
#[derive(Clone, Copy, Debug)]
pub struct LossBatch<'a> {
    /// Tokens of each completion.
    pub lengths: &'a [usize],
    /// False at tokens that do not count.
    pub mask: &'a [bool],
    /// Advantage of each completion.
    pub advantages: &'a [f32],
    /// Log-probs of tokens under the policy that learns.
    pub log_probs: &'a [f32],
    /// Log-probs of tokens under the policy before the first update on this batch; absent: the same as `log_probs`.
    pub old_log_probs: Option<&'a [f32]>,
    /// Log-probs of tokens under the reference policy; needed when β > 0.
    pub reference_log_probs: Option<&'a [f32]>,
    /// Log-probs of tokens under the rollout policy; only the off-policy mask reads them, the old ones stand in.
    pub rollout_log_probs: Option<&'a [f32]>,
    /// Weights of tokens from the rollout correction.
    pub weights: Option<&'a [f32]>,
}

impl LossBatch<'_> {
    /// Tokens that count.
    pub fn tokens(&self) -> usize {
        self.mask.iter().filter(|&&counts| counts).count()
    }

    pub(super) fn assert_shapes(&self, beta: f32) {
        let tokens = self.lengths.iter().sum::<usize>();
        let fits = |name: &str, slice: Option<usize>| {
            if let Some(length) = slice {
                assert_eq!(length, tokens, "{name}: one entry for each of {tokens} tokens");
            }
        };
        fits("mask", Some(self.mask.len()));
        fits("log_probs", Some(self.log_probs.len()));
        fits("old_log_probs", self.old_log_probs.map(<[f32]>::len));
        fits("reference_log_probs", self.reference_log_probs.map(<[f32]>::len));
        fits("rollout_log_probs", self.rollout_log_probs.map(<[f32]>::len));
        fits("weights", self.weights.map(<[f32]>::len));
        assert_eq!(
            self.advantages.len(),
            self.lengths.len(),
            "advantages: one entry a completion"
        );
        assert!(
            beta == 0.0 || self.reference_log_probs.is_some(),
            "reference_log_probs: needed with beta {beta}"
        );
    }
}

/// What a loss is divided by. A minibatch may be computed in parts (micro-batches) that are summed: the denominators
/// are those of the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalizer {
    /// Completions of the minibatch, those without a token included.
    pub rows: usize,
    /// bnpo: tokens of the minibatch that count. dapo, cispo: those of the rollout batch, over its minibatches.
    pub tokens: f64,
    /// dr_grpo: the constant length.
    pub max_completion_length: usize,
}

impl Normalizer {
    /// Of a batch that is the whole minibatch and the whole rollout batch.
    pub fn of(batch: &LossBatch<'_>, max_completion_length: usize) -> Self {
        Self {
            rows: batch.lengths.len(),
            tokens: batch.tokens() as f64,
            max_completion_length,
        }
    }
}
