//! What quantization does to the inputs of each layer: how large the error is, with compensation and without, and how much of
//! it a calibrated mask would catch.
use burn_nvfp4::{Precision, Rac};
use kernels_cubecl::Granularity;

use crate::{
    backend::QuadsBackend,
    calibrate::{CalibrationError, run_sequences},
    modules::{
        error_probe::{ErrorProbe, ratio},
        moe::QuadsMoe,
        residual_probe::ResidualProbe,
    },
};

/// The input of one layer, or of several that share it, over all tokens that passed. Errors are `‖x − x̂‖ / ‖x‖`.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationError {
    /// Path of the layer; q, k and v together are `qkv_proj`.
    pub layer: String,
    /// In W4A4, without compensation.
    pub w4a4: f64,
    /// In the precision asked for; 0 where activations stay as they are.
    pub precision: f64,
    /// Root mean square of the largest channel over that of the median one; `None` where nothing, or nothing but zeros, passed.
    pub largest_over_median: Option<f64>,
    /// Share of the squared W4A4 residual that falls on the channels (or blocks) of a calibrated mask, one made from these very
    /// activations.
    pub captured: f64,
}

impl ActivationError {
    /// Measures every layer of `model` on `sequences`, in forward order. The model's own forward pass is measured, at its own
    /// precision; neighbours of equal length go together, at most `batch` at once.
    ///
    /// `rac` says how large the calibrated mask is, and of what. Where `precision` itself compensates calibrated channels, it
    /// does so by the masks of the model ([`QuadsMoe::with_residual_masks`]).
    ///
    /// # Errors
    /// When nothing was run, `rac.fraction` is not in (0, 1], or an activation is not finite; the first such layer is named.
    ///
    /// # Panics
    /// When `batch` is zero, a sequence is longer than the model allows, a layer's input is no multiple of 16 wide, or
    /// `precision` needs a mask where there is none.
    pub fn measure<B: QuadsBackend>(
        model: &QuadsMoe<B>,
        precision: &Precision,
        rac: &Rac,
        sequences: &[Vec<u32>],
        batch: usize,
    ) -> Result<Vec<Self>, CalibrationError> {
        let mut model = model.clone();
        let mut probes = vec![];
        for site in model.sites_mut() {
            let asked = ErrorProbe::new(site.k, site.activations.activation(precision));
            let residuals = ResidualProbe::new(site.k);
            site.activations.set_probe(Some(residuals.clone()));
            site.activations.set_error_probe(Some(asked.clone()));
            probes.push((site.name, residuals, asked));
        }
        run_sequences(&model, sequences, batch);
        let measured = probes.into_iter().map(|(layer, residuals, asked)| {
            let mask = residuals.mask(rac.granularity, rac.fraction);
            let mask = mask.map_err(|source| CalibrationError {
                layer: layer.clone(),
                source,
            })?;
            let energies = residuals.energies(Granularity::Channel);
            let residual = |kept: &dyn Fn(usize) -> bool| -> f64 {
                let of = energies.iter().enumerate().filter(|(channel, _)| kept(*channel));
                of.map(|(_, energy)| f64::from(*energy)).sum()
            };
            let all = residual(&|_| true);
            Ok(Self {
                w4a4: ratio(all, asked.energy()).sqrt(),
                precision: asked.relative_error(),
                largest_over_median: asked.largest_over_median(),
                captured: ratio(residual(&|channel| mask.contains(channel)), all),
                layer,
            })
        });
        measured.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::moe_config::QuadsMoeConfig;
    use burn::backend::Flex;
    use burn_nvfp4::{Nvfp4, Selection};

    type B = Nvfp4<Flex>;

    fn model() -> QuadsMoe<B> {
        let config = QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 32).with_precision(Precision::High);
        config.init_seeded(3, &Default::default())
    }

    fn sequences() -> Vec<Vec<u32>> {
        (0u32..6)
            .map(|i| (0..7).map(|t| (i * 11 + t * 5) % 32).collect())
            .collect()
    }

    fn rac(selection: Selection, fraction: f32) -> Rac {
        Rac {
            selection,
            granularity: Granularity::Channel,
            fraction,
        }
    }

    fn measure(model: &QuadsMoe<B>, precision: &Precision, fraction: f32) -> Vec<ActivationError> {
        let rac = rac(Selection::Calibrated, fraction);
        ActivationError::measure(model, precision, &rac, &sequences(), 64).unwrap()
    }

    #[test]
    fn errors_order_as_the_precisions_do() {
        let model = model();
        let [full, plain, all] = [
            Precision::W4A16,
            Precision::W4A4,
            Precision::W4A4Rac(rac(Selection::All, 1.0)),
        ]
        .map(|precision| measure(&model, &precision, 0.5));
        assert_eq!(full.len(), 8);
        assert_eq!(full[0].layer, "layers.0.self_attn.qkv_proj");
        assert_eq!(full[7].layer, "layers.1.mlp.experts.down_proj");
        for ((full, plain), all) in full.iter().zip(&plain).zip(&all) {
            let layer = &full.layer;
            assert_eq!(full.precision, 0.0, "{layer}");
            assert!((plain.precision - plain.w4a4).abs() < 1e-5, "{layer}: {plain:?}");
            assert!((0.05..0.2).contains(&plain.w4a4), "{layer}: {plain:?}");
            assert!(all.precision < 0.2 * plain.w4a4, "{layer}: {all:?}");
            assert!(plain.captured > 0.5 && plain.captured < 1.0, "{layer}: {plain:?}");
            assert!(plain.largest_over_median.unwrap() >= 1.0, "{layer}: {plain:?}");
        }
        for (half, whole) in plain.iter().zip(measure(&model, &Precision::W4A4, 1.0)) {
            assert_eq!((whole.captured, whole.w4a4), (1.0, half.w4a4));
        }
    }

    #[test]
    fn outlier_channels_are_seen_where_they_are() {
        let plain = measure(&model(), &Precision::W4A4, 0.5);
        let outliers = measure(&model().with_outlier_channels(2, 32.0, 1), &Precision::W4A4, 0.5);
        for (plain, outliers) in plain.iter().zip(&outliers) {
            let behind_a_norm = ["qkv_proj", "gate_up_proj"]
                .iter()
                .any(|name| plain.layer.ends_with(name));
            let ratio = outliers.largest_over_median.unwrap() / plain.largest_over_median.unwrap();
            match behind_a_norm {
                true => assert!(ratio > 10.0, "{outliers:?} and {plain:?}"),
                // In high precision what comes later is the same.
                false => assert_eq!(plain, outliers),
            }
        }
    }

    #[test]
    fn nothing_to_measure_is_an_error_with_the_layer() {
        let rac = rac(Selection::Calibrated, 0.5);
        let error = ActivationError::measure(&model(), &Precision::W4A4, &rac, &[], 64).unwrap_err();
        assert_eq!(
            error.to_string(),
            "layers.0.self_attn.qkv_proj: calibration has seen no tokens"
        );
    }
}
