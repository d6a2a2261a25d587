//! Where activations enter a quantized layer: which residuals are compensated there, and the statistics that choose them.
use std::sync::{Arc, Mutex};

use burn::tensor::{Tensor, TensorPrimitive, backend::Backend};
use burn_nvfp4::Precision;
use kernels_cubecl::{Activation, Granularity, ResidualMask, host};

use crate::backend::QuadsBackend;

/// The input of one or several quantized layers that share it (q/k/v of an attention; gate and up of the experts).
#[derive(Clone, Debug, Default)]
pub struct ActivationSite {
    mask: Option<ResidualMask>,
    probe: Option<EnergyProbe>,
}

impl ActivationSite {
    /// The calibrated residual mask, if there is one.
    pub fn mask(&self) -> Option<&ResidualMask> {
        self.mask.as_ref()
    }

    /// Sets or removes the calibrated residual mask.
    pub fn set_mask(&mut self, mask: Option<ResidualMask>) {
        self.mask = mask;
    }

    /// From now on every input is also measured by `probe`; see [`Calibrator`](crate::calibrate::Calibrator).
    pub fn set_probe(&mut self, probe: Option<EnergyProbe>) {
        self.probe = probe;
    }

    /// How `precision` lets activations in here.
    ///
    /// # Panics
    /// When the precision needs a calibrated mask and there is none:
    /// [`QuadsMoe::with_precision`](crate::modules::moe::QuadsMoe::with_precision) refuses that earlier.
    pub(crate) fn activation(&self, precision: &Precision) -> Activation {
        precision
            .activation(self.mask())
            .unwrap_or_else(|error| panic!("activations of a {precision} layer: {error}"))
    }

    /// Measures the input, rows in token order, if a probe is set.
    pub(crate) fn observe<B: Backend>(&self, x: impl FnOnce() -> Tensor<B, 2>) {
        if let Some(probe) = &self.probe {
            probe.add(x());
        }
    }

    /// `x` as a matmul in `precision` sees it.
    pub(crate) fn quantize<B: QuadsBackend>(&self, x: Tensor<B, 2>, precision: &Precision) -> Tensor<B, 2> {
        match self.activation(precision) {
            Activation::Full => x,
            activation => {
                let x = B::fake_quantize_activations(x.into_primitive().tensor(), &activation);
                Tensor::from_primitive(TensorPrimitive::Float(x))
            }
        }
    }
}

/// Sums `Σ r²` of each channel and block over the rows that pass, in the order in which they pass; `r` is the residual of
/// NVFP4 quantization. Clones share the sums.
#[derive(Clone, Debug)]
pub struct EnergyProbe(Arc<Mutex<[Vec<f32>; 3]>>);

/// In the order of a probe's sums. A block's sum is not that of its channels: each row's block is summed first.
const GRANULARITIES: [Granularity; 3] = [Granularity::Channel, Granularity::Block16, Granularity::Block64];

impl EnergyProbe {
    /// For inputs of `k` channels.
    pub fn new(k: usize) -> Self {
        Self(Arc::new(Mutex::new(
            GRANULARITIES.map(|granularity| vec![0.0; granularity.units(k)]),
        )))
    }

    fn add<B: Backend>(&self, x: Tensor<B, 2>) {
        let [rows, k] = x.dims();
        let x = x.into_data().convert::<f32>();
        let x = x.as_slice().expect("converted to f32");
        let mut sums = self.0.lock().expect("no thread panics while it holds the sums");
        for (granularity, sums) in GRANULARITIES.into_iter().zip(sums.iter_mut()) {
            host::accumulate_residual_energy(x, rows, k, granularity, sums)
                .unwrap_or_else(|error| panic!("residuals of an input [{rows}, {k}]: {error}"));
        }
    }

    /// The sums so far, one a channel or block.
    pub fn sums(&self, granularity: Granularity) -> Vec<f32> {
        let sums = self.0.lock().expect("no thread panics while it holds the sums");
        let index = GRANULARITIES.iter().position(|g| *g == granularity);
        sums[index.expect("all granularities are listed")].clone()
    }
}

/// Whether a weight is stored packed, in which case it runs in its own activation setting.
pub(crate) fn is_packed<B: QuadsBackend, const D: usize>(weight: &Tensor<B, D>) -> bool {
    match weight.clone().into_primitive() {
        TensorPrimitive::QFloat(_) => true,
        TensorPrimitive::Float(weight) => B::is_packed(&weight),
    }
}
