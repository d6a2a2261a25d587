//! Measures the quantization residuals of a layer's input, from which a calibrated mask is chosen.
use std::sync::{Arc, Mutex};

use burn::tensor::{Tensor, backend::Backend};
use kernels_cubecl::{Granularity, ResidualMask, host};

/// Sums `Σ r²` of each channel and block over the rows that pass a layer's input, in the order in which they pass; `r` is
/// the residual of NVFP4 quantization. Clones share the sums.
///
/// ```
/// use burn::{backend::Flex, tensor::{Distribution, Tensor}};
/// use burn_nvfp4::{Granularity, Nvfp4, Precision, Rac, Selection};
/// use burn_quads::{QuadsLinearConfig, modules::residual_probe::ResidualProbe};
///
/// let device = Default::default();
/// let layer = QuadsLinearConfig::new(64, 32).init::<Nvfp4<Flex>>(&device);
///
/// let probe = ResidualProbe::new(64);
/// let measured = layer.with_probe(Some(probe.clone()));
/// measured.forward(Tensor::<_, 2>::random([16, 64], Distribution::Default, &device));
///
/// let mask = probe.mask(Granularity::Channel, 0.5)?; // the paper's rule
/// let layer = measured.with_probe(None).with_residual_mask(Some(mask));
/// let calibrated = Rac { selection: Selection::Calibrated, ..Rac::default() };
/// let rollout = layer.pack(&Precision::W4A4Rac(calibrated))?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ResidualProbe(Arc<Mutex<Sums>>);

#[derive(Debug)]
struct Sums {
    k: usize,
    rows: usize,
    /// In the order of [`GRANULARITIES`].
    energies: [Vec<f32>; 3],
}

/// A block's sum is not that of its channels: each row's block is summed first.
const GRANULARITIES: [Granularity; 3] = [Granularity::Channel, Granularity::Block16, Granularity::Block64];

/// Why a probe gives no mask.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProbeError {
    /// No row passed.
    #[error("calibration has seen no tokens")]
    Empty,
    /// A share outside (0, 1].
    #[error("expected a compensated fraction in (0, 1], got {fraction}")]
    Fraction {
        /// The value.
        fraction: f32,
    },
    /// The model has diverged.
    #[error("the residuals of channel {channel} are not finite: the model has diverged")]
    NonFinite {
        /// The channel.
        channel: usize,
    },
}

impl ResidualProbe {
    /// For inputs of `k` channels, a multiple of 16.
    pub fn new(k: usize) -> Self {
        Self(Arc::new(Mutex::new(Sums {
            k,
            rows: 0,
            energies: GRANULARITIES.map(|granularity| vec![0.0; granularity.units(k)]),
        })))
    }

    /// Channels of the inputs.
    pub fn k(&self) -> usize {
        self.sums().k
    }

    /// The sums so far, one a channel or block.
    pub fn energies(&self, granularity: Granularity) -> Vec<f32> {
        let index = GRANULARITIES.iter().position(|g| *g == granularity);
        self.sums().energies[index.expect("all granularities are listed")].clone()
    }

    /// The mask that compensates the `fraction` of the channels or blocks with the largest sums (at least one; ties to the
    /// lower index).
    ///
    /// # Errors
    /// [`ProbeError`]: nothing has passed, `fraction` is not in (0, 1], or a sum is not finite.
    pub fn mask(&self, granularity: Granularity, fraction: f32) -> Result<ResidualMask, ProbeError> {
        let (k, rows) = {
            let sums = self.sums();
            (sums.k, sums.rows)
        };
        if rows == 0 {
            return Err(ProbeError::Empty);
        }
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(ProbeError::Fraction { fraction });
        }
        let channels = self.energies(Granularity::Channel);
        if let Some(channel) = channels.iter().position(|sum| !sum.is_finite()) {
            return Err(ProbeError::NonFinite { channel });
        }
        Ok(ResidualMask::from_energy(
            &self.energies(granularity),
            k,
            granularity,
            fraction,
        ))
    }

    /// Adds the rows `[rows, k]`.
    pub(crate) fn add<B: Backend>(&self, x: Tensor<B, 2>) {
        let [rows, k] = x.dims();
        let x = x.into_data().convert::<f32>();
        let x = x.as_slice().expect("converted to f32");
        let mut sums = self.sums();
        sums.rows += rows;
        for (granularity, energies) in GRANULARITIES.into_iter().zip(sums.energies.iter_mut()) {
            host::accumulate_residual_energy(x, rows, k, granularity, energies)
                .unwrap_or_else(|error| panic!("residuals of an input [{rows}, {k}]: {error}"));
        }
    }

    fn sums(&self) -> std::sync::MutexGuard<'_, Sums> {
        self.0.lock().expect("no thread panics while it holds the sums")
    }
}
