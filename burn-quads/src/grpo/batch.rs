//! One rollout batch: what was asked, what was sampled, and how it was rewarded.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::GrpoError;
use crate::token_log_probs::{RowRouting, TokenRow};

/// Completions of one rollout, one entry a row in every field.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RolloutBatch {
    /// Prompt token ids, one token at least.
    pub prompts: Vec<Vec<u32>>,
    /// Sampled token ids: exactly those of the rollout, never text tokenised again. The end-of-sequence token is
    /// included (its probability is learned too), nothing follows it.
    pub completions: Vec<Vec<u32>>,
    /// Log-prob of each sampled token under the rollout policy, at the sampling temperature.
    pub rollout_log_probs: Vec<Vec<f32>>,
    /// True where sampling stopped at the length limit: the last token is no end of sequence.
    pub truncated: Vec<bool>,
    /// Which rows belong together: rows of one prompt share a number.
    pub group: Vec<usize>,
    /// Rewards; NaN for a completion that could not be judged.
    pub rewards: Vec<f32>,
    /// Experts that the rollout chose, for routing replay and the flip rate.
    pub expert_ids: Option<Vec<RowRouting>>,
}

/// What to do with completions that ran into the length limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overlong {
    /// What to do.
    pub mode: OverlongMode,
    /// `soft`: tokens before the limit over which the penalty grows.
    pub cache: usize,
}

/// See [`Overlong`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverlongMode {
    /// Learn from them like from others.
    #[default]
    Keep,
    /// Their tokens do not count, neither in the loss nor in what it is divided by.
    Mask,
    /// DAPO's soft punishment: the reward falls linearly by up to 1 over the last `cache` tokens before the limit.
    Soft,
}

impl Overlong {
    /// Refuses settings that cannot work.
    pub fn validate(&self, max_completion_length: usize) -> Result<(), GrpoError> {
        if self.mode == OverlongMode::Soft && !(1..=max_completion_length).contains(&self.cache) {
            return Err(GrpoError::option(
                "overlong.cache",
                format!("1 to max_completion_length ({max_completion_length}) with overlong.mode = \"soft\""),
                self.cache,
            ));
        }
        Ok(())
    }

    /// What is added to the reward of a completion of `length` tokens; 0 unless `soft`.
    pub fn penalty(&self, length: usize, max_completion_length: usize) -> f32 {
        if self.mode != OverlongMode::Soft {
            return 0.0;
        }
        let over = (length + self.cache).saturating_sub(max_completion_length);
        -(over.min(self.cache) as f32 / self.cache as f32)
    }
}

impl RolloutBatch {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.prompts.len()
    }

    /// Sampled tokens of all rows.
    pub fn tokens(&self) -> usize {
        self.completions.iter().map(Vec::len).sum()
    }

    /// Row `row` as the model reads it, with the rollout's experts if `replay` asks for them.
    pub fn row(&self, row: usize, replay: bool) -> TokenRow<'_> {
        TokenRow {
            prompt: &self.prompts[row],
            completion: &self.completions[row],
            routing: match &self.expert_ids {
                Some(expert_ids) if replay => Some(&expert_ids[row]),
                _ => None,
            },
        }
    }

    /// Cuts every completion after its first end-of-sequence token and marks those without one as truncated.
    ///
    /// Our rollout engine stops there by itself; engines that sample whole blocks do not.
    pub fn end_at_eos(&mut self, eos_token_ids: &[u32]) {
        for row in 0..self.rows() {
            let end = self.completions[row]
                .iter()
                .position(|token| eos_token_ids.contains(token));
            self.truncated[row] = end.is_none();
            if let Some(end) = end {
                self.completions[row].truncate(end + 1);
                self.rollout_log_probs[row].truncate(end + 1);
                if let Some(expert_ids) = &mut self.expert_ids {
                    let RowRouting { top_k, layers } = &mut expert_ids[row];
                    let read = self.prompts[row].len() + end;
                    layers.iter_mut().for_each(|ids| ids.truncate(read * *top_k));
                }
            }
        }
    }

    /// Refuses a batch whose fields do not fit together, or that has tokens outside a vocabulary of `vocab` tokens; the
    /// error names the field and row.
    pub fn validate(&self, vocab: usize) -> Result<(), GrpoError> {
        let rows = self.rows();
        let lengths = [
            ("completions", self.completions.len()),
            ("rollout_log_probs", self.rollout_log_probs.len()),
            ("truncated", self.truncated.len()),
            ("group", self.group.len()),
            ("rewards", self.rewards.len()),
            ("expert_ids", self.expert_ids.as_ref().map_or(rows, Vec::len)),
        ];
        for (field, length) in lengths {
            if length != rows {
                return Err(GrpoError::batch(
                    field,
                    format!("{rows} rows, as many as prompts"),
                    length,
                ));
            }
        }
        for row in 0..rows {
            if self.prompts[row].is_empty() {
                return Err(GrpoError::batch(format!("prompts[{row}]"), "one token at least", 0));
            }
            for (field, tokens) in [("prompts", &self.prompts[row]), ("completions", &self.completions[row])] {
                if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                    return Err(GrpoError::batch(
                        format!("{field}[{row}]"),
                        format!("token ids below the model's vocabulary of {vocab}"),
                        token,
                    ));
                }
            }
            let (tokens, log_probs) = (self.completions[row].len(), self.rollout_log_probs[row].len());
            if tokens != log_probs {
                return Err(GrpoError::batch(
                    format!("rollout_log_probs[{row}]"),
                    format!("one for each of {tokens} completion tokens"),
                    log_probs,
                ));
            }
        }
        self.validate_groups()?;
        self.validate_expert_ids()
    }

    /// Groups with rows of several prompts compare answers to different questions, and nothing else would show it.
    fn validate_groups(&self) -> Result<(), GrpoError> {
        let mut first_rows = BTreeMap::new();
        for (row, group) in self.group.iter().enumerate() {
            let first = *first_rows.entry(group).or_insert(row);
            if self.prompts[row] != self.prompts[first] {
                return Err(GrpoError::batch(
                    format!("group {group}"),
                    "rows of one prompt",
                    format!("different prompts in rows {first} and {row}"),
                ));
            }
        }
        Ok(())
    }

    fn validate_expert_ids(&self) -> Result<(), GrpoError> {
        let Some(expert_ids) = &self.expert_ids else {
            return Ok(());
        };
        for (row, routing) in expert_ids.iter().enumerate() {
            let shape = |routing: &RowRouting| (routing.top_k, routing.layers.len());
            if shape(routing) != shape(&expert_ids[0]) {
                return Err(GrpoError::batch(
                    format!("expert_ids[{row}]"),
                    format!("(top_k, layers) {:?} as in row 0", shape(&expert_ids[0])),
                    format!("{:?}", shape(routing)),
                ));
            }
            let read = (self.prompts[row].len() + self.completions[row].len()).saturating_sub(1);
            for layer in &routing.layers {
                if routing.top_k == 0 || layer.len() % routing.top_k != 0 || layer.len() / routing.top_k > read {
                    return Err(GrpoError::batch(
                        format!("expert_ids[{row}]"),
                        format!("top_k ({}) ids for each of at most {read} tokens", routing.top_k),
                        format!("{} ids", layer.len()),
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> RolloutBatch {
        RolloutBatch {
            prompts: vec![vec![1, 2], vec![1, 2]],
            completions: vec![vec![5, 9, 7, 9], vec![5, 6, 7, 8]],
            rollout_log_probs: vec![vec![-1.0, -2.0, -3.0, -4.0]; 2],
            truncated: vec![false; 2],
            group: vec![0; 2],
            rewards: vec![1.0, 0.0],
            expert_ids: None,
        }
    }

    #[test]
    fn eos_token_is_included_and_everything_after_it_excluded() {
        let mut batch = batch();
        let routing = RowRouting {
            top_k: 1,
            layers: vec![vec![0, 1, 2, 3, 4]],
        };
        batch.expert_ids = Some(vec![routing; 2]);
        batch.end_at_eos(&[9, 3]);
        let positions = batch.expert_ids.as_ref().unwrap().iter().map(|row| row.layers[0].len());
        assert_eq!(positions.collect::<Vec<_>>(), [3, 5], "the last token is never read");
        assert_eq!(batch.completions[0], [5, 9]);
        assert_eq!(batch.rollout_log_probs[0], [-1.0, -2.0]);
        assert_eq!(batch.completions[1], [5, 6, 7, 8]);
        assert_eq!(
            batch.truncated,
            [false, true],
            "truncated: the last token is no end of sequence"
        );
        let before = batch.clone();
        batch.end_at_eos(&[9, 3]);
        assert_eq!(batch, before);
    }

    #[test]
    fn soft_penalty_grows_linearly_over_the_last_tokens() {
        let overlong = Overlong {
            mode: OverlongMode::Soft,
            cache: 4,
        };
        let penalties = [5, 6, 7, 9, 10, 11].map(|length| overlong.penalty(length, 10));
        assert_eq!(penalties, [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]);
        assert_eq!(Overlong::default().penalty(10, 10), 0.0);
        assert!(overlong.validate(10).is_ok());
        let error = overlong.validate(3).unwrap_err().to_string();
        assert!(error.starts_with("overlong.cache: expected 1 to max_completion_length (3)"));
    }

    #[test]
    fn fields_that_do_not_fit_are_refused_by_name() {
        assert_eq!(batch().validate(10), Ok(()));
        let error = |change: fn(&mut RolloutBatch)| {
            let mut batch = batch();
            change(&mut batch);
            batch.validate(10).unwrap_err().to_string()
        };
        assert_eq!(
            error(|batch| batch.rewards.truncate(1)),
            "rewards: expected 2 rows, as many as prompts, got 1"
        );
        assert_eq!(
            error(|batch| batch.completions[1][2] = 10),
            "completions[1]: expected token ids below the model's vocabulary of 10, got 10"
        );
        assert_eq!(
            error(|batch| batch.prompts[1][0] = 3),
            "group 0: expected rows of one prompt, got different prompts in rows 0 and 1"
        );
        assert!(error(|batch| batch.prompts[1].clear()).starts_with("prompts[1]: expected one token"));
        assert_eq!(
            error(|batch| batch.rollout_log_probs[1].truncate(3)),
            "rollout_log_probs[1]: expected one for each of 4 completion tokens, got 3"
        );
        let routing = |ids: usize| RowRouting {
            top_k: 2,
            layers: vec![vec![0; ids]],
        };
        let mut with = batch();
        with.expert_ids = Some(vec![routing(10), routing(4)]);
        assert_eq!(with.validate(10), Ok(()));
        with.expert_ids = Some(vec![routing(10), routing(12)]);
        assert!(
            with.validate(10)
                .unwrap_err()
                .to_string()
                .starts_with("expert_ids[1]: expected top_k (2) ids")
        );
    }
}
