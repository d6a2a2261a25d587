//! Residual activation compensation (RAC): which part of the quantization residual is quantized a second time.
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Which residuals are compensated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// One fixed mask a layer, from calibration (the paper's rule).
    Calibrated,
    /// The largest residuals of each token.
    PerToken,
    /// Every channel.
    #[default]
    All,
}

/// The unit of selection along `k`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Single channels (the paper).
    #[default]
    Channel,
    /// Blocks of 16 channels.
    Block16,
    /// Blocks of 64 channels.
    Block64,
}

impl Granularity {
    /// Channels in a unit.
    pub fn channels(self) -> usize {
        match self {
            Self::Channel => 1,
            Self::Block16 => 16,
            Self::Block64 => 64,
        }
    }
}

/// Residual activation compensation of one layer, ready to run.
#[derive(Clone, Debug, PartialEq)]
pub enum Compensation {
    /// Every channel.
    All,
    /// A fixed mask over `k`.
    Mask(ResidualMask),
    /// `ceil(fraction · n)` channels or blocks of each token, by the sum of squared residuals.
    PerToken {
        /// Unit of selection.
        granularity: Granularity,
        /// Share of the units, in (0, 1].
        fraction: f32,
    },
}

/// A fixed mask over `k`: bit `c % 32` of word `c / 32` is set when channel `c` is compensated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidualMask {
    k: usize,
    words: Arc<[u32]>,
}

impl ResidualMask {
    /// From one flag a channel.
    pub fn from_channels(channels: &[bool]) -> Self {
        let mut words = vec![0u32; channels.len().div_ceil(32)];
        for (c, _) in channels.iter().enumerate().filter(|(_, set)| **set) {
            words[c / 32] |= 1 << (c % 32);
        }
        Self {
            k: channels.len(),
            words: words.into(),
        }
    }
    /// From one flag a channel or block, over `k` channels; the last block may be partial.
    pub fn from_units(units: &[bool], k: usize, granularity: Granularity) -> Self {
        let channels: Vec<bool> = (0..k).map(|c| units[c / granularity.channels()]).collect();
        Self::from_channels(&channels)
    }
    /// The `ceil(fraction · n)` channels or blocks with the largest `energy` (one value a channel or block), ties to the
    /// lower index. A fraction of 1 or more selects everything, of 0 or less nothing.
    pub fn from_energy(energy: &[f32], k: usize, granularity: Granularity, fraction: f32) -> Self {
        Self::from_units(&select_units(energy, fraction), k, granularity)
    }
    /// Number of channels.
    pub fn k(&self) -> usize {
        self.k
    }
    /// The words, low bit first.
    pub fn words(&self) -> &[u32] {
        &self.words
    }
    /// Whether channel `c` is compensated.
    pub fn contains(&self, c: usize) -> bool {
        self.words[c / 32] >> (c % 32) & 1 == 1
    }
}

/// Sum of squares over each unit of `residual`, in index order; a last partial unit counts as one.
pub(crate) fn unit_energy(residual: &[f32], granularity: Granularity) -> Vec<f32> {
    residual
        .chunks(granularity.channels())
        .map(|unit| unit.iter().fold(0.0, |sum, r| sum + r * r))
        .collect()
}

/// The units with the `ceil(fraction · n)` largest energies, ties to the lower index, NaN last: one flag a unit.
pub(crate) fn select_units(energy: &[f32], fraction: f32) -> Vec<bool> {
    let mut order: Vec<usize> = (0..energy.len()).collect();
    let rank = |unit: &usize| {
        if energy[*unit].is_nan() {
            f32::NEG_INFINITY
        } else {
            energy[*unit]
        }
    };
    order.sort_by(|a, b| rank(b).total_cmp(&rank(a))); // stable: equal energies stay in index order
    let mut selected = vec![false; energy.len()];
    for unit in &order[..unit_count(energy.len(), fraction)] {
        selected[*unit] = true;
    }
    selected
}

/// `ceil(fraction · n)`, at most `n`. The fraction means the decimal that the user wrote: as an f32, 0.1 is a little more
/// than a tenth, and a tenth of 10 would come out as 2.
fn unit_count(n: usize, fraction: f32) -> usize {
    let fraction: f64 = fraction.to_string().parse().unwrap_or(0.0);
    ((fraction * n as f64).ceil() as usize).min(n)
}
