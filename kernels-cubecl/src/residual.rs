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
