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
//! let mut calibrator = Calibrator::new(&model);
//! calibrator.run(&[vec![1, 5, 9], vec![1, 7, 3]], 64);
//! let masks = calibrator.masks(Granularity::Channel, 0.5)?;
//! let model = model.with_residual_masks(&masks)?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use kernels_cubecl::{Granularity, ResidualMask};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::{
    backend::QuadsBackend,
    causal_lm::TokenBatch,
    modules::{activation_site::EnergyProbe, moe::QuadsMoe},
};

/// Measures the residuals of every quantized layer's input.
///
/// The model's own forward pass is measured, at its own precision. Inputs that layers share are measured once: q, k and v
/// together, gate and up of all experts together; `down` over the tokens of all experts, in their order.
#[derive(Debug)]
pub struct Calibrator<B: Backend> {
    model: QuadsMoe<B>,
    probes: Vec<(String, EnergyProbe)>,
    rows: usize,
}

impl<B: QuadsBackend> Calibrator<B> {
    /// A calibrator of `model`, whose parameters are shared, not copied.
    pub fn new(model: &QuadsMoe<B>) -> Self {
        let mut model = model.clone();
        let probes = model
            .sites_mut()
            .into_iter()
            .map(|site| {
                let probe = EnergyProbe::new(site.k);
                site.activations.set_probe(Some(probe.clone()));
                (site.name, probe)
            })
            .collect();
        Self { model, probes, rows: 0 }
    }

    /// Runs `sequences` through the model, in order; neighbours of equal length go together, at most `batch` at once. The
    /// sums do not depend on `batch`, but for last bits of the model's own forward pass.
    ///
    /// # Panics
    /// When `batch` is zero, a sequence is longer than the model allows, or a layer's input is no multiple of 16 wide.
    pub fn run(&mut self, sequences: &[Vec<u32>], batch: usize) {
        assert!(batch > 0, "a calibration batch must hold at least one sequence");
        let device = self.model.embed_tokens.weight.device();
        for equal in sequences.chunk_by(|a, b| a.len() == b.len()) {
            let seq = equal[0].len();
            if seq == 0 {
                continue;
            }
            for rows in equal.chunks(batch) {
                let ids: Vec<i64> = rows.concat().into_iter().map(i64::from).collect();
                let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows.len(), seq]), &device);
                self.model.hidden_states(&TokenBatch::new(tokens));
                self.rows += rows.len() * seq;
            }
        }
    }

    /// `Σ r²` of each channel, by layer in forward order.
    pub fn energies(&self) -> impl Iterator<Item = (&str, Vec<f32>)> {
        self.probes
            .iter()
            .map(|(layer, probe)| (layer.as_str(), probe.sums(Granularity::Channel)))
    }

    /// The masks: of each layer's channels (or blocks of channels) the `fraction` with the largest sums.
    ///
    /// # Errors
    /// When nothing was run, `fraction` is not in (0, 1], or a sum is not finite.
    pub fn masks(&self, granularity: Granularity, fraction: f32) -> Result<ResidualMasks, CalibrationError> {
        if self.rows == 0 {
            return Err(CalibrationError::Empty);
        }
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(CalibrationError::Fraction { fraction });
        }
        let mut masks = BTreeMap::new();
        for (layer, probe) in &self.probes {
            let channels = probe.sums(Granularity::Channel);
            if let Some(channel) = channels.iter().position(|sum| !sum.is_finite()) {
                let layer = layer.clone();
                return Err(CalibrationError::NonFinite { layer, channel });
            }
            let mask = ResidualMask::from_energy(&probe.sums(granularity), channels.len(), granularity, fraction);
            masks.insert(layer.clone(), mask);
        }
        Ok(ResidualMasks(masks))
    }
}

/// Why no masks could be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// No token went through the model.
    #[error("calibration has seen no tokens")]
    Empty,
    /// A share outside (0, 1].
    #[error("expected a compensated fraction in (0, 1], got {fraction}")]
    Fraction {
        /// The value.
        fraction: f32,
    },
    /// The model has diverged.
    #[error("residuals of channel {channel} of {layer} are not finite: the model has diverged")]
    NonFinite {
        /// The layer.
        layer: String,
        /// The channel.
        channel: usize,
    },
}

/// Residual masks by layer: `layers.N.self_attn.qkv_proj`, `layers.N.self_attn.o_proj`,
/// `layers.N.mlp.experts.gate_up_proj`, `layers.N.mlp.experts.down_proj`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResidualMasks(BTreeMap<String, ResidualMask>);

/// Why masks do not fit a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("residual masks do not fit the model: {}", .0.join("; "))]
pub struct MaskError(Vec<String>);

/// Why masks could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MaskFileError {
    /// The file system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
    /// The file is no safetensors file, or cut short.
    #[error("{}: {source}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },
    /// A tensor is no mask.
    #[error("{}: {layer}: {problem}", .path.display())]
    Mask {
        /// The file.
        path: PathBuf,
        /// The tensor.
        layer: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl ResidualMasks {
    /// The mask of a layer.
    pub fn get(&self, layer: &str) -> Option<&ResidualMask> {
        self.0.get(layer)
    }

    /// All masks, by the name of the layer.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ResidualMask)> {
        self.0.iter().map(|(layer, mask)| (layer.as_str(), mask))
    }

    /// Writes the masks to a safetensors file: for each layer one byte a channel, 1 where it is compensated.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), MaskFileError> {
        let bytes: Vec<(&String, Vec<u8>)> = self
            .0
            .iter()
            .map(|(layer, mask)| (layer, (0..mask.k()).map(|c| u8::from(mask.contains(c))).collect()))
            .collect();
        let views = bytes.iter().map(|(layer, bytes)| {
            let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes);
            (layer, view.expect("the bytes were made for this shape"))
        });
        safetensors::serialize_to_file(views, None, path).map_err(|error| failed(path, error))
    }

    /// Reads masks that [`save`](Self::save) wrote. Whether they fit a model,
    /// [`QuadsMoe::with_residual_masks`] checks.
    ///
    /// # Errors
    /// When the file cannot be read, or holds something else.
    pub fn load(path: &Path) -> Result<Self, MaskFileError> {
        let bytes = std::fs::read(path).map_err(|source| MaskFileError::Io {
            path: path.into(),
            source,
        })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| failed(path, error))?;
        let mut masks = BTreeMap::new();
        for (layer, tensor) in file.iter() {
            let refuse = |problem: String| MaskFileError::Mask {
                path: path.into(),
                layer: layer.into(),
                problem,
            };
            if tensor.dtype() != Dtype::U8 || tensor.shape().len() != 1 {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                return Err(refuse(format!(
                    "{dtype:?} {shape:?} is no mask, expected U8 [channels]"
                )));
            }
            if let Some(byte) = tensor.data().iter().find(|byte| **byte > 1) {
                return Err(refuse(format!("a mask holds 0 and 1, found {byte}")));
            }
            let channels: Vec<bool> = tensor.data().iter().map(|byte| *byte == 1).collect();
            masks.insert(layer.to_string(), ResidualMask::from_channels(&channels));
        }
        Ok(Self(masks))
    }

    /// Whether the masks are exactly those of `model`.
    pub(crate) fn check<B: Backend>(&self, model: &QuadsMoe<B>) -> Result<(), MaskError> {
        let sites = model.sites();
        let mut problems = vec![];
        for site in &sites {
            match self.get(&site.name) {
                None => problems.push(format!("{} has none", site.name)),
                Some(mask) if mask.k() != site.k => {
                    let (name, k) = (&site.name, site.k);
                    problems.push(format!("{name} has {} channels, expected {k}", mask.k()));
                }
                Some(_) => {}
            }
        }
        let unexpected = self
            .0
            .keys()
            .filter(|name| !sites.iter().any(|site| site.name == **name));
        problems.extend(unexpected.map(|name| format!("{name} is not a layer of the model")));
        match problems.is_empty() {
            true => Ok(()),
            false => Err(MaskError(problems)),
        }
    }
}

fn failed(path: &Path, error: safetensors::SafeTensorError) -> MaskFileError {
    let path = path.into();
    match error {
        safetensors::SafeTensorError::IoError(source) => MaskFileError::Io { path, source },
        source => MaskFileError::Format { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer_backend::rms_norm;
    use crate::modules::moe_config::QuadsMoeConfig;
    use burn::backend::Flex;
    use burn_nvfp4::{Nvfp4, Precision};
    use kernels_cubecl::host;

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

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("burn-quads-{}-{name}.safetensors", std::process::id()))
    }

    #[test]
    fn inputs_of_the_first_layer_are_measured_in_order_and_once() {
        let model = model();
        let mut calibrator = Calibrator::new(&model);
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
        let mut calibrator = Calibrator::new(&model);
        calibrator.run(&sequences(), 2);
        let before = energies(&calibrator);
        model.forward(Tensor::zeros([1, 4], &Default::default()));
        assert_eq!(energies(&calibrator), before);
    }

    #[test]
    fn masks_choose_the_largest_sums() {
        let mut calibrator = Calibrator::new(&model());
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
            let mut calibrator = Calibrator::new(&model());
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
        let mut calibrator = Calibrator::new(&model);
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
        assert_eq!(calibrator.probes[0].1.sums(Granularity::Block16), expected);
        let mask = masks.get("layers.0.self_attn.qkv_proj").unwrap();
        assert_eq!(
            *mask,
            ResidualMask::from_energy(&expected, 64, Granularity::Block16, 0.5)
        );
    }

    #[test]
    fn masks_survive_a_file() {
        let mut calibrator = Calibrator::new(&model());
        calibrator.run(&sequences(), 64);
        let masks = calibrator.masks(Granularity::Block16, 0.5).unwrap();
        let path = file("masks");
        masks.save(&path).unwrap();
        let loaded = ResidualMasks::load(&path).unwrap();
        assert_eq!(loaded, masks);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let error = ResidualMasks::load(&path).unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_with_something_else_is_refused() {
        let path = file("no-masks");
        let data = [2u8, 0, 1, 1];
        let view = |dtype, shape: Vec<usize>| TensorView::new(dtype, shape, &data).unwrap();
        let load = |view| {
            safetensors::serialize_to_file([("layers.0.x", view)], None, &path).unwrap();
            ResidualMasks::load(&path).unwrap_err().to_string()
        };
        assert!(load(view(Dtype::U8, vec![4])).ends_with("layers.0.x: a mask holds 0 and 1, found 2"));
        assert!(load(view(Dtype::F32, vec![1])).ends_with("F32 [1] is no mask, expected U8 [channels]"));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn nothing_seen_and_impossible_fractions_are_errors() {
        let mut calibrator = Calibrator::new(&model());
        assert_eq!(
            calibrator.masks(Granularity::Channel, 0.5),
            Err(CalibrationError::Empty)
        );
        calibrator.run(&sequences(), 64);
        for fraction in [0.0, -1.0, 1.5, f32::NAN] {
            assert!(matches!(
                calibrator.masks(Granularity::Channel, fraction),
                Err(CalibrationError::Fraction { .. })
            ));
        }
    }

    #[test]
    fn a_diverged_model_is_named() {
        let mut model = model().with_precision(Precision::High).unwrap();
        model.norm.gamma = model.norm.gamma.map(|g| g * f32::NAN);
        let gamma = model.layers[1].input_layernorm.gamma.clone();
        model.layers[1].input_layernorm.gamma = gamma.map(|g| g * f32::NAN);
        let mut calibrator = Calibrator::new(&model);
        calibrator.run(&sequences(), 64);
        let error = calibrator.masks(Granularity::Channel, 0.5).unwrap_err().to_string();
        assert_eq!(
            error,
            "residuals of channel 0 of layers.1.self_attn.qkv_proj are not finite: the model has diverged"
        );
    }
}
