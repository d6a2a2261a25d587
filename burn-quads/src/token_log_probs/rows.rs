//! Prompts with completions as one padded rectangle, and the positions in it that predict a completion's token.
use burn::{
    prelude::Backend,
    tensor::{Bool, Int, Tensor, TensorData},
};

use crate::causal_lm::{RoutingReplay, TokenBatch};

/// Experts chosen for the tokens of one row, in the order in which the model reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRouting {
    /// Experts a token.
    pub top_k: usize,
    /// Ids of each mixture-of-experts layer, `[positions, top_k]`; positions start at the prompt's first token.
    /// Fewer positions than tokens leave the rest to the live router.
    pub layers: Vec<Vec<i32>>,
}

/// One prompt with one completion.
#[derive(Clone, Copy, Debug)]
pub struct TokenRow<'a> {
    /// The prompt's token ids, one at least.
    pub prompt: &'a [u32],
    /// The completion's token ids.
    pub completion: &'a [u32],
    /// Experts to use instead of the router's choice.
    pub routing: Option<&'a RowRouting>,
}

/// Rows padded on the right to one rectangle `[rows, width]`.
///
/// The last token of a completion is predicted but never read, so the width is one less than the longest row.
#[derive(Clone, Debug)]
pub struct CompletionRows {
    rows: usize,
    width: usize,
    tokens: Vec<i64>,
    padding: Option<Vec<bool>>,
    /// Index in the flattened rectangle of the position that predicts each completion token.
    predictors: Vec<i64>,
    targets: Vec<i64>,
    lengths: Vec<usize>,
    /// Layers of ids `[rows · width, top_k]`.
    replay: Option<(usize, Vec<Vec<i32>>)>,
}

impl CompletionRows {
    /// Lays the rows out.
    ///
    /// # Panics
    ///
    /// If a prompt is empty, or routings differ in layers or `top_k`.
    pub fn new(rows: &[TokenRow<'_>]) -> Self {
        let read = |row: &TokenRow<'_>| {
            assert!(!row.prompt.is_empty(), "a prompt has one token at least");
            row.prompt.len() + row.completion.len().saturating_sub(1)
        };
        let width = rows.iter().map(read).max().unwrap_or(0);
        let mut tokens = vec![0; rows.len() * width];
        let mut padding = vec![true; rows.len() * width];
        let mut predictors = Vec::new();
        let mut targets = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let start = index * width;
            let ids = row.prompt.iter().chain(row.completion).take(read(row));
            for (position, &token) in ids.enumerate() {
                tokens[start + position] = i64::from(token);
                padding[start + position] = false;
            }
            let first = start + row.prompt.len() - 1;
            predictors.extend((first..first + row.completion.len()).map(|position| position as i64));
            targets.extend(row.completion.iter().map(|&token| i64::from(token)));
        }
        Self {
            rows: rows.len(),
            width,
            tokens,
            padding: padding.contains(&true).then_some(padding),
            predictors,
            targets,
            lengths: rows.iter().map(|row| row.completion.len()).collect(),
            replay: replay(rows, width),
        }
    }

    /// Completion tokens of each row.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// What the model reads.
    pub fn input<B: Backend>(&self, device: &B::Device) -> TokenBatch<B> {
        let shape = [self.rows, self.width];
        let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(self.tokens.clone(), shape), device);
        let padding = self
            .padding
            .clone()
            .map(|padding| Tensor::<B, 2, Bool>::from_data(TensorData::new(padding, shape), device));
        let replay = self.replay.as_ref().map(|(top_k, layers)| RoutingReplay {
            expert_ids: layers
                .iter()
                .map(|ids| {
                    let shape = [self.rows * self.width, *top_k];
                    Tensor::from_data(TensorData::new(ids.clone(), shape), device)
                })
                .collect(),
        });
        TokenBatch {
            tokens,
            positions: None,
            padding,
            replay,
        }
    }

    /// The states that predict the completions' tokens, row after row: `[batch, seq, d]` to `[completion tokens, d]`.
    pub fn predicting_states<B: Backend>(&self, hidden: Tensor<B, 3>) -> Tensor<B, 2> {
        let [rows, width, size] = hidden.dims();
        let device = hidden.device();
        let predictors = TensorData::new(self.predictors.clone(), [self.predictors.len()]);
        hidden
            .reshape([rows * width, size])
            .select(0, Tensor::from_data(predictors, &device))
    }

    /// The completions' tokens, row after row: `[completion tokens]`.
    pub fn targets<B: Backend>(&self, device: &B::Device) -> Tensor<B, 1, Int> {
        Tensor::from_data(TensorData::new(self.targets.clone(), [self.targets.len()]), device)
    }

    /// Cuts expert ids `[rows · width, top_k]` by layer into rows, without those of padding.
    pub(super) fn routing_of_rows<B: Backend>(&self, expert_ids: Vec<Tensor<B, 2, Int>>) -> Vec<RowRouting> {
        let top_k = expert_ids.first().map_or(0, |ids| ids.dims()[1]);
        let layers = expert_ids
            .into_iter()
            .map(|ids| ids.into_data().iter::<i32>().collect::<Vec<_>>())
            .collect::<Vec<_>>();
        (0..self.rows)
            .map(|row| {
                let cells = row * self.width..(row + 1) * self.width;
                let read = match &self.padding {
                    Some(padding) => padding[cells.clone()].iter().filter(|&&pad| !pad).count(),
                    None => self.width,
                };
                let ids = cells.start * top_k..(cells.start + read) * top_k;
                RowRouting {
                    top_k,
                    layers: layers.iter().map(|layer| layer[ids.clone()].to_vec()).collect(),
                }
            })
            .collect()
    }
}

/// Expert ids of all rows by layer; -1 where there are none.
fn replay(rows: &[TokenRow<'_>], width: usize) -> Option<(usize, Vec<Vec<i32>>)> {
    let first = rows.iter().find_map(|row| row.routing)?;
    let (top_k, layers) = (first.top_k, first.layers.len());
    let mut ids = vec![vec![-1; rows.len() * width * top_k]; layers];
    for (index, row) in rows.iter().enumerate() {
        let Some(routing) = row.routing else { continue };
        assert_eq!(
            (routing.top_k, routing.layers.len()),
            (top_k, layers),
            "all routings of a batch have the same top_k and layers"
        );
        let start = index * width * top_k;
        for (all, of_row) in ids.iter_mut().zip(&routing.layers) {
            let length = of_row.len().min(width * top_k);
            all[start..start + length].copy_from_slice(&of_row[..length]);
        }
    }
    Some((top_k, ids))
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn row<'a>(prompt: &'a [u32], completion: &'a [u32]) -> TokenRow<'a> {
        TokenRow {
            prompt,
            completion,
            routing: None,
        }
    }

    #[test]
    fn rows_are_padded_on_the_right_and_the_last_token_is_not_read() {
        let device = Default::default();
        let rows = CompletionRows::new(&[row(&[5, 6], &[7, 8, 9]), row(&[1], &[2]), row(&[3, 4], &[])]);
        let input = rows.input::<Flex>(&device);
        assert_eq!(
            input.tokens.into_data().iter::<i64>().collect::<Vec<_>>(),
            [5, 6, 7, 8, 1, 0, 0, 0, 3, 4, 0, 0]
        );
        let padding = input.padding.unwrap().into_data().iter::<bool>().collect::<Vec<_>>();
        let (f, t) = (false, true);
        assert_eq!(padding, [f, f, f, f, f, t, t, t, f, f, t, t]);
        assert_eq!(rows.predictors, [1, 2, 3, 4]);
        assert_eq!(rows.targets, [7, 8, 9, 2]);
        assert_eq!(rows.lengths(), [3, 1, 0]);
    }

    #[test]
    fn rows_of_one_length_need_no_padding() {
        let rows = CompletionRows::new(&[row(&[5, 6], &[7]), row(&[1], &[2, 3])]);
        assert!(rows.input::<Flex>(&Default::default()).padding.is_none());
    }

    #[test]
    fn replayed_ids_stand_at_their_tokens_and_minus_one_elsewhere() {
        let routing = RowRouting {
            top_k: 2,
            layers: vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]],
        };
        let with = TokenRow {
            routing: Some(&routing),
            ..row(&[1, 2], &[3])
        };
        let rows = CompletionRows::new(&[row(&[1, 2, 3], &[4]), with]);
        let replay = rows.input::<Flex>(&Default::default()).replay.unwrap();
        let layer = |index: usize| {
            let data = replay.expert_ids[index].clone().into_data();
            assert_eq!(data.shape.as_slice(), [6, 2]);
            data.iter::<i32>().collect::<Vec<_>>()
        };
        assert_eq!(layer(0), [-1, -1, -1, -1, -1, -1, 0, 1, 2, 3, -1, -1]);
        assert_eq!(layer(1)[6..], [4, 5, 6, 7, -1, -1]);
    }

    #[test]
    #[should_panic(expected = "a prompt has one token at least")]
    fn an_empty_prompt_is_refused() {
        CompletionRows::new(&[row(&[], &[1])]);
    }
}
