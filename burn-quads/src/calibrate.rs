//! Calibration: which channels of each quantized layer's input have the largest residuals, and the masks that compensate
//! them (the paper's rule of residual activation compensation).
//!
//! Masks are made from forward passes over representative sequences, after warm-up:
//!
//! ```
//! use burn::backend::Flex;
//! use burn_nvfp4::{Granularity, Nvfp4};
//! use burn_quads::{calibrate::Calibrator, modules::moe_config::QuadsMoeConfig};
//!
//! let device = Default::default();
//! let model = QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 32).init_seeded::<Nvfp4<Flex>>(0, &device);
//! let calibrator = Calibrator::new(&model);
//! calibrator.run(&[vec![1, 5, 9], vec![1, 7, 3]], 64);
//! let masks = calibrator.masks(Granularity::Channel, 0.5)?;
//! let model = model.with_residual_masks(&masks)?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use kernels_cubecl::Granularity;

use crate::{
    backend::QuadsBackend,
    causal_lm::TokenBatch,
    modules::{
        moe::QuadsMoe,
        residual_masks::ResidualMasks,
        residual_probe::{ProbeError, ResidualProbe},
    },
};

/// Measures the residuals of every quantized layer's input.
///
/// The model's own forward pass is measured, at its own precision. Inputs that layers share are measured once: q, k and v
/// together, gate and up of all experts together; `down` over the tokens of all experts, in their order.
#[derive(Debug)]
pub struct Calibrator<B: Backend> {
    model: QuadsMoe<B>,
    probes: Vec<(String, ResidualProbe)>,
}

impl<B: QuadsBackend> Calibrator<B> {
    /// A calibrator of `model`, whose parameters are shared, not copied.
    pub fn new(model: &QuadsMoe<B>) -> Self {
        let mut model = model.clone();
        let probes = model
            .sites_mut()
            .into_iter()
            .map(|site| {
                let probe = ResidualProbe::new(site.k);
                site.activations.set_probe(Some(probe.clone()));
                (site.name, probe)
            })
            .collect();
        Self { model, probes }
    }

    /// Runs `sequences` through the model, in order; neighbours of equal length go together, at most `batch` at once. The
    /// sums do not depend on `batch`, but for last bits of the model's own forward pass.
    ///
    /// # Panics
    /// When `batch` is zero, a sequence is longer than the model allows, or a layer's input is no multiple of 16 wide.
    pub fn run(&self, sequences: &[Vec<u32>], batch: usize) {
        run_sequences(&self.model, sequences, batch);
    }

    /// `Σ r²` of each channel, by layer in forward order.
    pub fn energies(&self) -> impl Iterator<Item = (&str, Vec<f32>)> {
        self.probes
            .iter()
            .map(|(layer, probe)| (layer.as_str(), probe.energies(Granularity::Channel)))
    }

    /// The masks: of each layer's channels (or blocks of channels) the `fraction` with the largest sums.
    ///
    /// # Errors
    /// When nothing was run, `fraction` is not in (0, 1], or a sum is not finite; the first such layer is named.
    pub fn masks(&self, granularity: Granularity, fraction: f32) -> Result<ResidualMasks, CalibrationError> {
        let masks = self.probes.iter().map(|(layer, probe)| {
            let mask = probe.mask(granularity, fraction).map_err(|source| CalibrationError {
                layer: layer.clone(),
                source,
            })?;
            Ok((layer.clone(), mask))
        });
        masks.collect()
    }
}

/// Forward passes over `sequences`, as [`Calibrator::run`] has them.
pub(crate) fn run_sequences<B: QuadsBackend>(model: &QuadsMoe<B>, sequences: &[Vec<u32>], batch: usize) {
    assert!(batch > 0, "a calibration batch must hold at least one sequence");
    let device = model.embed_tokens.weight.device();
    for equal in sequences.chunk_by(|a, b| a.len() == b.len()) {
        let seq = equal[0].len();
        if seq == 0 {
            continue;
        }
        for rows in equal.chunks(batch) {
            let ids: Vec<i64> = rows.concat().into_iter().map(i64::from).collect();
            let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows.len(), seq]), &device);
            model.hidden_states(&TokenBatch::new(tokens));
        }
    }
}

/// Why no masks could be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{layer}: {source}")]
pub struct CalibrationError {
    /// The first layer at fault.
    pub layer: String,
    /// What is wrong there.
    pub source: ProbeError,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer_backend::rms_norm;
    use crate::modules::moe_config::QuadsMoeConfig;
    use burn::backend::Flex;
    use burn_nvfp4::{Nvfp4, Precision};
    use kernels_cubecl::{ResidualMask, host};

    type B = Nvfp4<Flex>;

    fn model() -> QuadsMoe<B> {
        QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 32).init_seeded(3, &Default::default())
    }

    fn sequences() -> Vec<Vec<u32>> {
        let lengths = [5, 5, 5, 7, 7, 5];
        (0u32..)
            .zip(lengths)
            .map(|(i, n)| (0..n).map(|t| (i * 11 + t * 5) % 32).collect())
            .collect()
    }

    fn energies(calibrator: &Calibrator<B>) -> Vec<(String, Vec<f32>)> {
        calibrator
            .energies()
            .map(|(layer, sums)| (layer.to_string(), sums))
            .collect()
    }

    #[test]
    fn inputs_of_the_first_layer_are_measured_in_order_and_once() {
        let model = model();
        let calibrator = Calibrator::new(&model);
        calibrator.run(&sequences(), 2);
        // The input of q, k and v is the norm of the embedding.
        let mut expected = vec![0.0; 64];
        for sequence in sequences() {
            let (n, ids): (_, Vec<i64>) = (sequence.len(), sequence.into_iter().map(i64::from).collect());
            let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, n]), &Default::default());
            let x = rms_norm(&model.layers[0].input_layernorm, model.embed_tokens.forward(tokens)).into_data();
            let x = x.as_slice::<f32>().unwrap();
            host::accumulate_residual_energy(x, n, 64, Granularity::Channel, &mut expected).unwrap();
        }
        assert_eq!(
            energies(&calibrator)[0],
            ("layers.0.self_attn.qkv_proj".to_string(), expected)
        );
        let layers: Vec<_> = energies(&calibrator)
            .into_iter()
            .map(|(layer, sums)| (layer, sums.len()))
            .collect();
        assert_eq!(layers.len(), 8);
        assert_eq!(layers[1], ("layers.0.self_attn.o_proj".to_string(), 64));
        assert_eq!(layers[2], ("layers.0.mlp.experts.gate_up_proj".to_string(), 64));
        assert_eq!(layers[7], ("layers.1.mlp.experts.down_proj".to_string(), 32));
        assert!(
            energies(&calibrator)
                .iter()
                .all(|(_, sums)| sums.iter().all(|sum| *sum > 0.0))
        );
    }

    #[test]
    fn the_model_itself_is_not_measured_afterwards() {
        let model = model();
        let calibrator = Calibrator::new(&model);
        calibrator.run(&sequences(), 2);
        let before = energies(&calibrator);
        model.forward(Tensor::zeros([1, 4], &Default::default()));
        assert_eq!(energies(&calibrator), before);
    }

    #[test]
    fn masks_choose_the_largest_sums() {
        let calibrator = Calibrator::new(&model());
        calibrator.run(&sequences(), 64);
        let masks = calibrator.masks(Granularity::Channel, 0.25).unwrap();
        for (layer, energy) in calibrator.energies() {
            let mask = masks.get(layer).unwrap();
            let chosen = |set: bool| {
                (0..mask.k())
                    .filter(move |c| mask.contains(*c) == set)
                    .map(|c| energy[c])
            };
            assert_eq!(chosen(true).count(), mask.k() / 4, "{layer}");
            let smallest = chosen(true).fold(f32::INFINITY, f32::min);
            assert!(chosen(false).all(|e| e <= smallest), "{layer}");
        }
    }

    #[test]
    fn sums_do_not_depend_on_the_batch() {
        let run = |batch| {
            let calibrator = Calibrator::new(&model());
            calibrator.run(&sequences(), batch);
            energies(&calibrator)
        };
        let alone = run(1);
        for (layer, (name, sums)) in run(64).into_iter().enumerate() {
            // The model's own last bits may depend on the batch, hence not to the bit.
            let close = sums.iter().zip(&alone[layer].1).all(|(a, b)| (a - b).abs() <= 1e-4 * b);
            assert!(close, "{name}: {sums:?}, one at a time {:?}", alone[layer].1);
        }
    }

    #[test]
    fn blocks_are_summed_row_by_row() {
        let model = model();
        let calibrator = Calibrator::new(&model);
        calibrator.run(&sequences(), 1);
        let masks = calibrator.masks(Granularity::Block16, 0.5).unwrap();
        let mut expected = vec![0.0; 4];
        for sequence in sequences() {
            let (n, ids): (_, Vec<i64>) = (sequence.len(), sequence.into_iter().map(i64::from).collect());
            let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, n]), &Default::default());
            let x = rms_norm(&model.layers[0].input_layernorm, model.embed_tokens.forward(tokens)).into_data();
            let x = x.as_slice::<f32>().unwrap();
            host::accumulate_residual_energy(x, n, 64, Granularity::Block16, &mut expected).unwrap();
        }
        assert_eq!(calibrator.probes[0].1.energies(Granularity::Block16), expected);
        let mask = masks.get("layers.0.self_attn.qkv_proj").unwrap();
        assert_eq!(
            *mask,
            ResidualMask::from_energy(&expected, 64, Granularity::Block16, 0.5)
        );
    }

    #[test]
    fn nothing_seen_and_impossible_fractions_are_errors() {
        let calibrator = Calibrator::new(&model());
        let refused = |fraction| calibrator.masks(Granularity::Channel, fraction).unwrap_err();
        let error = refused(0.5);
        assert_eq!(error.source, ProbeError::Empty);
        assert_eq!(
            error.to_string(),
            "layers.0.self_attn.qkv_proj: calibration has seen no tokens"
        );
        calibrator.run(&sequences(), 64);
        for fraction in [0.0, -1.0, 1.5, f32::NAN] {
            assert!(matches!(refused(fraction).source, ProbeError::Fraction { .. }));
        }
    }

    #[test]
    fn a_diverged_model_is_named() {
        let mut model = model().with_precision(Precision::High).unwrap();
        model.norm.gamma = model.norm.gamma.map(|g| g * f32::NAN);
        let gamma = model.layers[1].input_layernorm.gamma.clone();
        model.layers[1].input_layernorm.gamma = gamma.map(|g| g * f32::NAN);
        let calibrator = Calibrator::new(&model);
        calibrator.run(&sequences(), 64);
        let error = calibrator.masks(Granularity::Channel, 0.5).unwrap_err().to_string();
        assert_eq!(
            error,
            "layers.1.self_attn.qkv_proj: the residuals of channel 0 are not finite: the model has diverged"
        );
    }
}
