//! Measures the largest magnitude of a layer's input, from which a static activation scale is made.
use std::sync::{Arc, Mutex, MutexGuard};

use burn::tensor::{Int, Tensor, backend::Backend};

/// The largest magnitude of the rows that pass a layer's input, apart for each group of rows (tokens of an expert). Clones
/// share it.
#[derive(Clone, Debug, Default)]
pub struct RangeProbe(Arc<Mutex<Vec<Option<f32>>>>);

impl RangeProbe {
    /// That of each group so far; `None` where no row has passed. NaN and infinity are as large as can be.
    pub fn ranges(&self) -> Vec<Option<f32>> {
        self.lock().clone()
    }

    /// Adds rows `[rows, k]` of one group.
    pub(crate) fn add<B: Backend>(&self, x: Tensor<B, 2>) {
        let [rows, _] = x.dims();
        self.add_groups(x, &[rows]);
    }

    /// Adds rows `[rows, k]` sorted by group, of which `counts` says how many each has.
    pub(crate) fn add_sorted<B: Backend>(&self, x: Tensor<B, 2>, counts: Tensor<B, 1, Int>) {
        let counts: Vec<usize> = counts.into_data().iter::<i64>().map(|count| count as usize).collect();
        self.add_groups(x, &counts);
    }

    fn add_groups<B: Backend>(&self, x: Tensor<B, 2>, counts: &[usize]) {
        let k = x.dims()[1];
        let x = x.into_data().convert::<f32>();
        let mut x: &[f32] = x.as_slice().expect("converted to f32");
        let mut ranges = self.lock();
        let groups = ranges.len().max(counts.len());
        ranges.resize(groups, None);
        for (range, count) in ranges.iter_mut().zip(counts).filter(|(_, count)| **count > 0) {
            let (rows, rest) = x.split_at(count * k);
            // Magnitudes order as their bits do, and NaN is above them all.
            let bits = rows
                .iter()
                .map(|value| value.to_bits() & 0x7fff_ffff)
                .max()
                .unwrap_or(0);
            *range = Some(f32::from_bits(bits.max(range.map_or(0, f32::to_bits))));
            x = rest;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<f32>>> {
        self.0.lock().expect("no thread panics while it holds the ranges")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn rows(values: [[f32; 2]; 4]) -> Tensor<Flex, 2> {
        Tensor::from_data(values, &Default::default())
    }

    #[test]
    fn each_group_has_the_largest_magnitude_of_its_rows() {
        let probe = RangeProbe::default();
        let counts = |counts: [i64; 3]| Tensor::from_data(counts, &Default::default());
        probe.add_sorted(
            rows([[1.0, -2.0], [0.5, 0.0], [3.0, 0.0], [0.0, -4.0]]),
            counts([2, 0, 2]),
        );
        assert_eq!(probe.ranges(), [Some(2.0), None, Some(4.0)]);
        probe
            .clone()
            .add_sorted(rows([[-8.0, 0.0], [0.0; 2], [0.0; 2], [0.0; 2]]), counts([1, 3, 0]));
        assert_eq!(probe.ranges(), [Some(8.0), Some(0.0), Some(4.0)]);
    }

    #[test]
    fn nothing_hides_a_value_that_is_not_finite() {
        let probe = RangeProbe::default();
        probe.add(rows([[1.0, f32::NAN], [0.5, 0.0], [3.0, 0.0], [0.0, -4.0]]));
        probe.add(rows([[9.0; 2]; 4]));
        assert!(probe.ranges()[0].unwrap().is_nan());
    }
}
