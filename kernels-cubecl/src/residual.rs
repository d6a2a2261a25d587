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

    /// Units in `k` channels; a last partial one counts.
    pub fn units(self, k: usize) -> usize {
        k.div_ceil(self.channels())
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
    ///
    /// # Panics
    /// `units` does not have [`Granularity::units`]`(k)` flags.
    pub fn from_units(units: &[bool], k: usize, granularity: Granularity) -> Self {
        assert_eq!(
            units.len(),
            granularity.units(k),
            "one flag a channel or block of {k} channels"
        );
        let channels: Vec<bool> = (0..k).map(|c| units[c / granularity.channels()]).collect();
        Self::from_channels(&channels)
    }
    /// The `ceil(fraction · n)` channels or blocks with the largest `energy` (one value a channel or block), ties to the
    /// lower index. A fraction of 1 or more selects everything, of 0 or less nothing.
    ///
    /// # Panics
    /// `energy` does not have [`Granularity::units`]`(k)` values.
    pub fn from_energy(energy: &[f32], k: usize, granularity: Granularity, fraction: f32) -> Self {
        let mut selected = vec![false; energy.len()];
        let ranks: Vec<u32> = energy.iter().map(|energy| rank(*energy)).collect();
        select_units(&ranks, unit_count(energy.len(), fraction), &mut selected);
        Self::from_units(&selected, k, granularity)
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
#[inline(always)]
pub(crate) fn unit_energy(residual: &[f32], granularity: Granularity, energy: &mut [f32]) {
    if granularity == Granularity::Channel {
        // As below, but a loop that becomes vector code.
        for (energy, r) in energy.iter_mut().zip(residual) {
            *energy = r * r;
        }
    } else {
        for (energy, unit) in energy.iter_mut().zip(residual.chunks(granularity.channels())) {
            *energy = unit.iter().fold(0.0, |sum, r| sum + r * r);
        }
    }
}

/// An integer that orders as energies do, NaN lowest. Energies are not negative, so that their bits order them.
#[inline(always)]
pub(crate) fn rank(energy: f32) -> u32 {
    if energy.is_nan() { 0 } else { energy.to_bits() + 1 }
}

/// Flags the `count` units of largest rank, ties to the lower index.
#[inline(always)]
pub(crate) fn select_units(ranks: &[u32], count: usize, selected: &mut [bool]) {
    let count = count.min(ranks.len());
    let at_least = |bound: u32| ranks.iter().fold(0u32, |n, rank| n + u32::from(*rank >= bound)) as usize;
    // Bit by bit, the largest bound that `count` units reach: no sorting, and every row takes the same time.
    let mut bound = 0;
    for bit in (0..31).rev() {
        let candidate = bound | 1 << bit;
        if at_least(candidate) >= count {
            bound = candidate;
        }
    }
    let mut ties = count - at_least(bound + 1).min(count);
    for (selected, &rank) in selected.iter_mut().zip(ranks) {
        let tied = rank == bound && ties > 0;
        ties -= usize::from(tied);
        *selected = rank > bound || tied;
    }
}

/// `ceil(fraction · n)`, at most `n`. The fraction means the decimal that the user wrote: as an f32, 0.1 is a little more
/// than a tenth, and a tenth of 10 would come out as 2.
pub(crate) fn unit_count(n: usize, fraction: f32) -> usize {
    let fraction: f64 = fraction.to_string().parse().unwrap_or(0.0);
    ((fraction * n as f64).ceil() as usize).min(n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn select(energy: &[f32], fraction: f32) -> Vec<usize> {
        let mask = ResidualMask::from_energy(energy, energy.len(), Granularity::Channel, fraction);
        (0..energy.len()).filter(|&c| mask.contains(c)).collect()
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        assert_eq!(select(&[1.0, 2.0, 2.0, 2.0, 0.0], 0.4), [1, 2]);
        assert_eq!(select(&[0.0; 4], 0.5), [0, 1]);
        assert_eq!(select(&[f32::INFINITY, 1.0, f32::INFINITY], 0.1), [0]);
    }

    #[test]
    fn nan_is_selected_last() {
        assert_eq!(select(&[f32::NAN, 0.0, 1.0, f32::NAN], 0.5), [1, 2]);
        assert_eq!(select(&[f32::NAN, 0.0, 1.0, f32::NAN], 0.75), [0, 1, 2]);
    }

    #[test]
    fn fractions_count_as_they_are_written() {
        assert_eq!(unit_count(10, 0.1), 1);
        assert_eq!(unit_count(1000, 0.3), 300);
        assert_eq!(unit_count(128, 0.5), 64);
        assert_eq!(unit_count(3, 0.5), 2);
        assert_eq!(unit_count(7, 1.0), 7);
        assert_eq!(
            (unit_count(7, 2.0), unit_count(7, -1.0), unit_count(7, f32::NAN)),
            (7, 0, 0)
        );
        assert_eq!(select(&[1.0, 2.0], 0.0), [] as [usize; 0]);
    }

    #[test]
    fn a_last_partial_block_counts_as_one() {
        let mask = ResidualMask::from_energy(&[0.0, 1.0], 24, Granularity::Block16, 0.5);
        let set: Vec<usize> = (0..24).filter(|&c| mask.contains(c)).collect();
        assert_eq!(set, (16..24).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn selection_is_a_stable_sort_by_energy(
            energy in prop::collection::vec(prop_oneof![0f32..4.0, (0u32..4).prop_map(|n| n as f32)], 0..80),
            fraction in 0.01f32..1.0,
        ) {
            let mut order: Vec<usize> = (0..energy.len()).collect();
            order.sort_by(|a, b| energy[*b].total_cmp(&energy[*a]));
            let mut expected = order[..unit_count(energy.len(), fraction)].to_vec();
            expected.sort();
            prop_assert_eq!(select(&energy, fraction), expected);
        }
    }
}
