//! From logits to a token and its log-probability.

/// A logit is NaN or infinite.
#[derive(Debug, PartialEq)]
pub(super) struct NonFiniteLogit {
    pub token: usize,
    pub value: f32,
}

/// A drawn token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    pub token: u32,
    pub log_prob: f32,
}

/// Draws from `softmax(logits / temperature)` with `number`, one of [0, 1) that is uniformly distributed: in f64 and in index
/// order, so that the result depends on nothing else. Temperature 0 takes the largest logit whatever the number.
pub(super) fn sample(logits: &[f32], temperature: f32, number: f64) -> Result<Sample, NonFiniteLogit> {
    let softmax = Softmax::new(logits, temperature)?;
    let token = if temperature == 0.0 {
        logits.iter().position(|&x| x == softmax.largest)
    } else {
        let mut left = number * softmax.total;
        softmax.weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        })
    };
    // Rounding can leave a number just below the total unmatched: it belongs to the last token that has probability.
    let token = token
        .or_else(|| softmax.weights.iter().rposition(|&weight| weight > 0.0))
        .unwrap_or(0);
    Ok(softmax.sample(token as u32))
}

/// A token that was drawn elsewhere, with the log-probability that [`sample`] would have given it.
pub(super) fn take(logits: &[f32], temperature: f32, token: u32) -> Result<Sample, NonFiniteLogit> {
    Ok(Softmax::new(logits, temperature)?.sample(token))
}

/// `softmax(logits / temperature)`; at temperature 0 that of temperature 1.
struct Softmax<'a> {
    logits: &'a [f32],
    largest: f32,
    scale: f64,
    /// What each token has of the total.
    weights: Vec<f64>,
    total: f64,
}

impl<'a> Softmax<'a> {
    fn new(logits: &'a [f32], temperature: f32) -> Result<Self, NonFiniteLogit> {
        if let Some((token, &value)) = logits.iter().enumerate().find(|(_, x)| !x.is_finite()) {
            return Err(NonFiniteLogit { token, value });
        }
        let mut softmax = Self {
            logits,
            largest: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            scale: if temperature == 0.0 {
                1.0
            } else {
                1.0 / temperature as f64
            },
            weights: Vec::new(),
            total: 0.0,
        };
        softmax.weights = logits.iter().map(|&x| softmax.exponent(x).exp()).collect();
        softmax.total = softmax.weights.iter().sum();
        Ok(softmax)
    }

    fn exponent(&self, logit: f32) -> f64 {
        (logit as f64 - self.largest as f64) * self.scale
    }

    fn sample(&self, token: u32) -> Sample {
        Sample {
            token,
            log_prob: (self.exponent(self.logits[token as usize]) - self.total.ln()) as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn rng() -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(3)
    }

    #[test]
    fn frequencies_follow_the_tempered_softmax() {
        let logits = [1.0f32, -0.5, 0.25, 2.0];
        let temperature = 0.7;
        let weights: Vec<f64> = logits.iter().map(|&x| (x as f64 / temperature as f64).exp()).collect();
        let total: f64 = weights.iter().sum();
        let (mut rng, draws) = (rng(), 100_000);
        let mut counts = [0; 4];
        for _ in 0..draws {
            let sample = sample(&logits, temperature, rng.random()).unwrap();
            counts[sample.token as usize] += 1;
            let expected = (weights[sample.token as usize] / total).ln();
            assert!((sample.log_prob as f64 - expected).abs() < 1e-6);
        }
        for (count, weight) in counts.into_iter().zip(weights) {
            let p = weight / total;
            let deviation = (p * (1.0 - p) / draws as f64).sqrt();
            assert!((count as f64 / draws as f64 - p).abs() < 5.0 * deviation, "{counts:?}");
        }
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_largest() {
        let sample = sample(&[0.0, 3.0, 3.0, -1.0], 0.0, 0.9).unwrap();
        assert_eq!(sample.token, 1);
        let expected = -(2.0 + (-3f64).exp() + (-4f64).exp()).ln();
        assert!((sample.log_prob as f64 - expected).abs() < 1e-6);
    }

    #[test]
    fn a_token_without_probability_is_never_drawn() {
        let mut rng = rng();
        for _ in 0..1000 {
            let sample = sample(&[-1e30, 0.0, -1e30], 1.0, rng.random()).unwrap();
            assert_eq!((sample.token, sample.log_prob), (1, 0.0));
        }
    }

    #[test]
    fn huge_logits_do_not_overflow() {
        let sample = sample(&[3e38, -3e38], 0.01, 0.5).unwrap();
        assert_eq!((sample.token, sample.log_prob), (0, 0.0));
    }

    #[test]
    fn a_non_finite_logit_is_named() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = sample(&[0.0, value], 1.0, 0.5).unwrap_err();
            assert_eq!(error.token, 1);
        }
    }
}
