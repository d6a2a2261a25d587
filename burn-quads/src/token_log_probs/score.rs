//! Scoring: log-probs of completions under a model, without gradients.
use burn::tensor::Transaction;

use super::{CompletionRows, RowRouting, TokenRow, token_log_probs_and_entropies};
use crate::{causal_lm::CausalLm, layer_backend::LayerBackend};

/// How to score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreOptions {
    /// Logits are divided by it: the temperature that the completions were sampled at.
    pub temperature: f32,
    /// Rows a forward pass.
    pub rows_per_forward: usize,
    /// Also return the experts that the model chose.
    pub record_routing: bool,
}

impl Default for ScoreOptions {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            rows_per_forward: 256,
            record_routing: false,
        }
    }
}

/// Scores of completions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Log-prob of each completion token, by row.
    pub log_probs: Vec<Vec<f32>>,
    /// Entropy in nats of the distribution that each completion token was drawn from, by row.
    pub entropies: Vec<Vec<f32>>,
    /// Experts of the tokens that were read, by row; empty unless asked for.
    pub routing: Vec<RowRouting>,
}

/// Log-probs of the rows' completions given their prompts.
///
/// # Panics
///
/// If a prompt is empty, the temperature is not positive or `rows_per_forward` is 0.
pub fn score<B: LayerBackend, M: CausalLm<B>>(model: &M, rows: &[TokenRow<'_>], options: &ScoreOptions) -> Scores {
    assert!(options.rows_per_forward > 0, "rows_per_forward: at least 1");
    let head = model.head_weight();
    let device = head.device();
    let mut scores = Scores::default();
    for rows in rows.chunks(options.rows_per_forward) {
        let layout = CompletionRows::new(rows);
        let output = model.hidden_states(&layout.input(&device));
        let (log_probs, entropies) = token_log_probs_and_entropies(
            layout.predicting_states(output.hidden),
            head.clone(),
            layout.targets(&device),
            options.temperature,
        );
        let [log_probs, entropies] = Transaction::default()
            .register(log_probs)
            .register(entropies)
            .execute()
            .try_into()
            .expect("two tensors were registered");
        let (log_probs, entropies) = (
            log_probs.iter::<f32>().collect::<Vec<_>>(),
            entropies.iter::<f32>().collect::<Vec<_>>(),
        );
        scores.log_probs.extend(by_row(&log_probs, layout.lengths()));
        scores.entropies.extend(by_row(&entropies, layout.lengths()));
        if options.record_routing {
            scores.routing.extend(layout.routing_of_rows(output.expert_ids));
        }
    }
    scores
}

fn by_row<'a>(values: &'a [f32], lengths: &'a [usize]) -> impl Iterator<Item = Vec<f32>> + 'a {
    let mut rest = values;
    lengths.iter().map(move |&length| {
        let (row, tail) = rest.split_at(length);
        rest = tail;
        row.to_vec()
    })
}
