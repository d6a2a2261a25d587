//! How far the logits of a packed model are from those of its original, on given text.
use anyhow::Result;
use burn::{
    backend::Flex,
    tensor::{Int, Tensor, TensorData, activation::log_softmax},
};
use burn_nvfp4::{Nvfp4, Precision};
use burn_quads::{QuadsMoe, checkpoint::ModelFolder};
use std::path::Path;

use crate::prompts;

type B = Nvfp4<Flex>;

/// The gap over all tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitsGap {
    /// Positions compared.
    pub tokens: usize,
    /// Mean absolute difference of a logit.
    pub mean: f64,
    /// Largest absolute difference of a logit.
    pub max: f64,
    /// Share of positions whose likeliest token is the same.
    pub same_top: f64,
    /// Mean absolute difference of the log-probability of the token that follows; NaN without one.
    pub log_prob: f64,
    /// Mean Kullback-Leibler divergence of the packed model's distribution from the original's, in nats.
    pub divergence: f64,
}

/// Runs the text of `file` through both models, all of which are loaded: the original in f32, the packed one in `precision`.
///
/// # Errors
/// When a model is no Qwen3-MoE or OLMoE, or the text cannot be read.
pub fn measure(packed: &Path, original: &Path, file: &Path, limit: usize, precision: &Precision) -> Result<LogitsGap> {
    let (packed, original) = (ModelFolder::open(packed)?, ModelFolder::open(original)?);
    let sequences = prompts::read(file, &original, limit)?;
    let (packed, _) = packed.load_packed::<Flex>(precision, None, &Default::default(), |_| {})?;
    let original = original.load::<B>(&Default::default(), |_| {})?;
    let mut sums = Sums::default();
    for sequence in sequences.iter().filter(|sequence| !sequence.is_empty()) {
        sums.add(&logits(&packed, sequence), &logits(&original, sequence), sequence);
    }
    Ok(sums.gap())
}

/// `[seq, vocab]`: logits, and log-probabilities.
fn logits(model: &QuadsMoe<B>, sequence: &[u32]) -> [Vec<f32>; 2] {
    let ids: Vec<i64> = sequence.iter().map(|id| i64::from(*id)).collect();
    let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, sequence.len()]), &Default::default());
    let logits = model.forward(tokens);
    let values = |tensor: Tensor<B, 3>| tensor.into_data().convert::<f32>().to_vec().expect("converted to f32");
    [values(logits.clone()), values(log_softmax(logits, 2))]
}

#[derive(Default)]
struct Sums {
    tokens: usize,
    logits: usize,
    difference: f64,
    max: f64,
    same_top: usize,
    following: usize,
    log_prob: f64,
    divergence: f64,
}

impl Sums {
    fn add(&mut self, packed: &[Vec<f32>; 2], original: &[Vec<f32>; 2], sequence: &[u32]) {
        let vocabulary = packed[0].len() / sequence.len();
        for (packed, original) in packed[0].chunks(vocabulary).zip(original[0].chunks(vocabulary)) {
            self.tokens += 1;
            self.logits += vocabulary;
            for (a, b) in packed.iter().zip(original) {
                let difference = f64::from((a - b).abs());
                self.difference += difference;
                // NaN is the largest of all.
                if difference.is_nan() || difference > self.max {
                    self.max = difference;
                }
            }
            self.same_top += usize::from(top(packed) == top(original));
        }
        let log_probs = packed[1].chunks(vocabulary).zip(original[1].chunks(vocabulary));
        for (at, (packed, original)) in log_probs.enumerate() {
            let terms = packed
                .iter()
                .zip(original)
                .map(|(p, o)| f64::from(o.exp()) * f64::from(o - p));
            self.divergence += terms.sum::<f64>();
            if let Some(next) = sequence.get(at + 1) {
                self.following += 1;
                self.log_prob += f64::from((packed[*next as usize] - original[*next as usize]).abs());
            }
        }
    }

    fn gap(&self) -> LogitsGap {
        let tokens = self.tokens as f64;
        LogitsGap {
            tokens: self.tokens,
            mean: self.difference / self.logits as f64,
            max: self.max,
            same_top: self.same_top as f64 / tokens,
            log_prob: self.log_prob / self.following as f64,
            divergence: self.divergence / tokens,
        }
    }
}

fn top(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_by_hand() {
        // Two positions of two tokens: probabilities (1/2, 1/2) against (1/4, 3/4), then the same twice.
        let quarter = (0.25f32.ln(), 0.75f32.ln());
        let half = 0.5f32.ln();
        let original = [vec![0.0, 0.0, 1.0, 2.0], vec![half, half, half, half]];
        let packed = [vec![0.5, -0.5, 1.0, 2.0], vec![quarter.0, quarter.1, half, half]];
        let mut sums = Sums::default();
        sums.add(&packed, &original, &[1, 0]);
        let gap = sums.gap();
        assert_eq!((gap.tokens, gap.mean, gap.max), (2, 0.25, 0.5));
        // Of equal logits the last is the likeliest.
        assert_eq!(gap.same_top, 0.5);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(close(gap.log_prob, 0.5f64.ln() - 0.25f64.ln()));
        let divergence = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!(close(gap.divergence, divergence / 2.0));
    }

    #[test]
    fn nan_is_not_hidden() {
        let mut sums = Sums::default();
        sums.add(
            &[vec![f32::NAN, 1.0], vec![f32::NAN, 1.0]],
            &[vec![0.0, 0.0], vec![0.0, 0.0]],
            &[0],
        );
        assert!(sums.gap().max.is_nan() && sums.gap().mean.is_nan());
    }
}
