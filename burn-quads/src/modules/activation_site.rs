//! Where activations enter a quantized layer: which residuals are compensated there, and what measures them.
use burn::tensor::{Tensor, TensorPrimitive};
use burn_nvfp4::Precision;
use kernels_cubecl::{Activation, ResidualMask};

use super::{error_probe::ErrorProbe, range_probe::RangeProbe, residual_probe::ResidualProbe};
use crate::{backend::QuadsBackend, layer_backend::ExpertOrder};

/// The input of one or several quantized layers that share it (q/k/v of an attention; gate and up of the experts).
#[derive(Clone, Debug, Default)]
pub struct ActivationSite {
    mask: Option<ResidualMask>,
    probe: Option<ResidualProbe>,
    range_probe: Option<RangeProbe>,
    error_probe: Option<ErrorProbe>,
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
    pub fn set_probe(&mut self, probe: Option<ResidualProbe>) {
        self.probe = probe;
    }

    /// From now on the largest magnitude of every input is measured by `probe`; see
    /// [`InputRanges`](crate::input_ranges::InputRanges).
    pub fn set_range_probe(&mut self, probe: Option<RangeProbe>) {
        self.range_probe = probe;
    }

    /// From now on the quantization error of every input is measured by `probe`; see
    /// [`ActivationError`](crate::activation_errors::ActivationError).
    pub fn set_error_probe(&mut self, probe: Option<ErrorProbe>) {
        self.error_probe = probe;
    }

    /// [`set_mask`](Self::set_mask) for an input of `k` channels.
    ///
    /// # Panics
    /// When the mask has another number of channels; `name` says where.
    pub(crate) fn set_checked_mask(&mut self, name: &str, k: usize, mask: Option<ResidualMask>) {
        if let Some(mask) = &mask {
            let channels = mask.k();
            assert_eq!(
                channels, k,
                "the residual mask of {name} has {channels} channels, expected {k}"
            );
        }
        self.set_mask(mask);
    }

    /// [`set_probe`](Self::set_probe) for an input of `k` channels.
    ///
    /// # Panics
    /// When the probe is for another number of channels; `name` says where.
    pub(crate) fn set_checked_probe(&mut self, name: &str, k: usize, probe: Option<ResidualProbe>) {
        if let Some(probe) = &probe {
            let channels = probe.k();
            assert_eq!(
                channels, k,
                "the probe of {name} is for {channels} channels, expected {k}"
            );
        }
        self.set_probe(probe);
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
    pub(crate) fn observe<B: QuadsBackend>(&self, x: &Tensor<B, 2>) {
        if let Some(probe) = &self.probe {
            probe.add(x.clone());
        }
        if let Some(probe) = &self.range_probe {
            probe.add(x.clone());
        }
        if let Some(probe) = &self.error_probe {
            probe.add(x);
        }
    }

    /// Measures an input whose rows are sorted by expert, in this order.
    pub(crate) fn observe_sorted<B: QuadsBackend>(&self, x: &Tensor<B, 2>, order: &ExpertOrder<B>) {
        if let Some(probe) = &self.probe {
            probe.add(B::unpermute_rows(x.clone(), order));
        }
        if let Some(probe) = &self.range_probe {
            probe.add_sorted(x.clone(), order.counts.clone());
        }
        if let Some(probe) = &self.error_probe {
            probe.add(&B::unpermute_rows(x.clone(), order));
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

/// Whether a weight is stored packed, in which case it runs in its own activation setting.
pub(crate) fn is_packed<B: QuadsBackend, const D: usize>(weight: &Tensor<B, D>) -> bool {
    match weight.clone().into_primitive() {
        TensorPrimitive::QFloat(_) => true,
        TensorPrimitive::Float(weight) => B::is_packed(&weight),
    }
}
