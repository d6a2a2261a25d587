//! Measures what quantization does to a layer's input: its error, and how unequal the channels are.
use std::sync::{Arc, Mutex, MutexGuard};

use burn::tensor::{Tensor, TensorPrimitive};
use kernels_cubecl::Activation;

use crate::backend::QuadsBackend;

/// Sums over the rows that pass a layer's input, `x` as it is and `x̂` as a matmul in an activation setting sees it. Clones
/// share the sums.
#[derive(Clone, Debug)]
pub struct ErrorProbe {
    activation: Activation,
    sums: Arc<Mutex<Sums>>,
}

#[derive(Clone, Debug, Default)]
struct Sums {
    /// `Σ x²` of each channel.
    energies: Vec<f64>,
    /// `Σ (x − x̂)²`.
    error: f64,
}

impl ErrorProbe {
    /// For inputs of `k` channels that are quantized as `activation` says.
    pub fn new(k: usize, activation: Activation) -> Self {
        Self {
            activation,
            sums: Arc::new(Mutex::new(Sums {
                energies: vec![0.0; k],
                ..Sums::default()
            })),
        }
    }

    /// `‖x − x̂‖ / ‖x‖` of all rows together; 0 of none. NaN when a value is not finite.
    pub fn relative_error(&self) -> f64 {
        let sums = self.sums();
        ratio(sums.error, sums.energies.iter().sum()).sqrt()
    }

    /// `Σ x²` of all rows.
    pub fn energy(&self) -> f64 {
        self.sums().energies.iter().sum()
    }

    /// The root mean square of the channel where it is largest over that of the median channel (the lower of two): 1 where all
    /// are equal, infinite where half of them are 0. `None` when nothing has passed.
    pub fn largest_over_median(&self) -> Option<f64> {
        let mut energies = self.sums().energies.clone();
        energies.sort_by(f64::total_cmp);
        let (largest, median) = (*energies.last()?, energies[(energies.len() - 1) / 2]);
        (largest > 0.0).then(|| (largest / median).sqrt())
    }

    /// Adds the rows `[rows, k]`.
    pub(crate) fn add<B: QuadsBackend>(&self, x: &Tensor<B, 2>) {
        let [_, k] = x.dims();
        let quantized = B::fake_quantize_activations(x.clone().into_primitive().tensor(), &self.activation);
        let quantized = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(quantized));
        let values = |x: Tensor<B, 2>| {
            x.into_data()
                .convert::<f32>()
                .to_vec::<f32>()
                .expect("converted to f32")
        };
        let (x, quantized) = (values(x.clone()), values(quantized));
        let mut sums = self.sums();
        for (x, quantized) in x.chunks(k).zip(quantized.chunks(k)) {
            for (channel, (x, quantized)) in x.iter().zip(quantized).enumerate() {
                sums.energies[channel] += f64::from(*x).powi(2);
                sums.error += (f64::from(*x) - f64::from(*quantized)).powi(2);
            }
        }
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().expect("no thread panics while it holds the sums")
    }
}

/// 0 of nothing.
pub(crate) fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn rows(values: Vec<f32>) -> Tensor<Flex, 2> {
        let n = values.len() / 16;
        Tensor::<Flex, 1>::from_floats(values.as_slice(), &Default::default()).reshape([n, 16])
    }

    #[test]
    fn sums_are_over_all_rows() {
        let probe = ErrorProbe::new(16, Activation::Nvfp4);
        assert_eq!((probe.relative_error(), probe.largest_over_median()), (0.0, None));
        // 6 is on the grid; beside it 2.4 becomes 2, and 0.2 becomes 0.
        let mut row = [0.0; 16];
        (row[3], row[5], row[9]) = (6.0, 2.4, 0.2);
        probe.add(&rows([row, [0.0; 16]].concat()));
        let expected = ((0.4f64.powi(2) + 0.2f64.powi(2)) / (36.0 + 2.4f64.powi(2) + 0.2f64.powi(2))).sqrt();
        assert!(
            (probe.relative_error() - expected).abs() < 1e-6,
            "{}",
            probe.relative_error()
        );
        assert_eq!(probe.largest_over_median(), Some(f64::INFINITY), "most channels are 0");
        let full = ErrorProbe::new(16, Activation::Full);
        full.add(&rows((0..32).map(|i| if i % 16 == 7 { 30.0 } else { 3.0 }).collect()));
        assert_eq!(full.relative_error(), 0.0);
        assert_eq!(full.largest_over_median(), Some(10.0));
    }
}
