//! The largest magnitudes of what enters each packed layer: static activation scales for inference engines.
//!
//! Rollouts here need none, because each token has a scale of its own. Engines quantize all tokens by one scale for a layer,
//! which has to be measured on representative text.
use std::collections::BTreeMap;

use burn::tensor::backend::Backend;

use crate::{
    backend::QuadsBackend,
    calibrate::run_sequences,
    modules::{moe::QuadsMoe, range_probe::RangeProbe},
};

/// The largest magnitude of the input of each layer, by its name in checkpoints of the Hub.
#[derive(Clone, Debug, PartialEq)]
pub struct InputRanges {
    /// `model.layers.0.self_attn.q_proj` and its largest magnitude, and so on for every layer that is packed.
    ///
    /// q, k and v of an attention have one input, and so have gate and up of all experts of a block. Each expert's down has
    /// its own.
    pub amax: BTreeMap<String, f32>,
    /// Experts that no token was sent to: their down has the largest magnitude of its block.
    pub unseen: Vec<String>,
}

/// Why there are no ranges.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InputRangeError {
    /// There was nothing to measure.
    #[error("calibration has seen no tokens")]
    Empty,
    /// The model has diverged.
    #[error("the input of {module} is not finite: the model has diverged")]
    NonFinite {
        /// The first layer at fault.
        module: String,
    },
}

impl InputRanges {
    /// Runs `sequences` through the model, at its own precision; neighbours of equal length go together, at most `batch` at
    /// once.
    ///
    /// # Errors
    /// [`InputRangeError`]
    ///
    /// # Panics
    /// When `batch` is zero, or a sequence is longer than the model allows.
    pub fn measure<B: QuadsBackend>(
        model: &QuadsMoe<B>,
        sequences: &[Vec<u32>],
        batch: usize,
    ) -> Result<Self, InputRangeError> {
        let (model, probes) = probed(model);
        run_sequences(&model, sequences, batch);
        let mut ranges = Self {
            amax: BTreeMap::new(),
            unseen: vec![],
        };
        for (layer, [qkv, output, input, hidden]) in probes.into_iter().enumerate() {
            let name = |rest: &str| format!("model.layers.{layer}.{rest}");
            let mut add = |module: String, range: Option<f32>| {
                let range = range.ok_or(InputRangeError::Empty)?;
                if !range.is_finite() {
                    return Err(InputRangeError::NonFinite { module });
                }
                ranges.amax.insert(module, range);
                Ok(())
            };
            let first = |probe: &RangeProbe| probe.ranges().first().copied().flatten();
            for projection in ["q_proj", "k_proj", "v_proj"] {
                add(name(&format!("self_attn.{projection}")), first(&qkv))?;
            }
            add(name("self_attn.o_proj"), first(&output))?;
            let hidden = hidden.ranges();
            let largest = hidden.iter().flatten().copied().max_by(f32::total_cmp);
            for (expert, range) in hidden.into_iter().enumerate() {
                let parent = match model.config().is_moe_layer(layer) {
                    true => name(&format!("mlp.experts.{expert}")),
                    false => name("mlp"),
                };
                add(format!("{parent}.gate_proj"), first(&input))?;
                add(format!("{parent}.up_proj"), first(&input))?;
                add(format!("{parent}.down_proj"), range.or(largest))?;
                if range.is_none() {
                    ranges.unseen.push(parent);
                }
            }
        }
        match ranges.amax.is_empty() {
            true => Err(InputRangeError::Empty),
            false => Ok(ranges),
        }
    }
}

/// The model with probes, and those of each layer's inputs in forward order.
fn probed<B: Backend>(model: &QuadsMoe<B>) -> (QuadsMoe<B>, Vec<[RangeProbe; 4]>) {
    let mut model = model.clone();
    let mut layers: Vec<[RangeProbe; 4]> = vec![];
    for (index, site) in model.sites_mut().into_iter().enumerate() {
        if index % 4 == 0 {
            layers.push(Default::default());
        }
        let probe = &layers.last().expect("there is one")[index % 4];
        site.activations.set_range_probe(Some(probe.clone()));
    }
    (model, layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{layer_backend::rms_norm, modules::moe_config::QuadsMoeConfig};
    use burn::{
        backend::Flex,
        tensor::{Int, Tensor},
    };
    use burn_nvfp4::Nvfp4;

    type B = Nvfp4<Flex>;

    fn model(dense: Vec<usize>) -> QuadsMoe<B> {
        QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 32)
            .with_mlp_only_layers(dense)
            .with_intermediate_size(Some(48))
            .init_seeded(3, &Default::default())
    }

    #[test]
    fn every_packed_layer_has_the_range_of_its_input() {
        let model = model(vec![]);
        let sequences: Vec<Vec<u32>> = (0..8)
            .map(|i| (0..16).map(|t| (i * 11 + t * 5) % 32).collect())
            .collect();
        let ranges = InputRanges::measure(&model, &sequences, 3).unwrap();
        assert_eq!(ranges.amax.len(), 2 * (4 + 3 * 4));
        // The input of q, k and v of the first layer is the norm of the embedding.
        let ids: Vec<i64> = sequences.concat().into_iter().map(i64::from).collect();
        let x = model
            .embed_tokens
            .forward(Tensor::<B, 1, Int>::from_ints(&ids[..], &Default::default()).unsqueeze());
        let largest = rms_norm(&model.layers[0].input_layernorm, x).abs().max().into_scalar();
        for projection in ["q_proj", "k_proj", "v_proj"] {
            assert_eq!(ranges.amax[&format!("model.layers.0.self_attn.{projection}")], largest);
        }
        let of = |name: &str| ranges.amax[&format!("model.layers.1.mlp.experts.{name}")];
        assert_eq!(of("0.gate_proj"), of("3.up_proj"));
        assert!((0..4).any(|expert| of(&format!("{expert}.down_proj")) != of("0.down_proj")));
        assert!(ranges.amax.values().all(|range| *range > 0.0));
        assert_eq!(ranges.unseen, [""; 0]);
        // It does not depend on how many go at once.
        let again = InputRanges::measure(&model, &sequences, 1).unwrap();
        assert!(
            again
                .amax
                .iter()
                .all(|(module, range)| (range - ranges.amax[module]).abs() < 1e-4 * range)
        );
    }

    #[test]
    fn an_expert_without_tokens_has_the_largest_of_its_block() {
        // One token goes to two of four experts.
        let ranges = InputRanges::measure(&model(vec![]), &[vec![7]], 1).unwrap();
        assert_eq!(ranges.unseen.len(), 2 * 2);
        for parent in &ranges.unseen {
            let layer = parent.rsplit_once('.').unwrap().0;
            let downs = ranges
                .amax
                .iter()
                .filter(|(module, _)| module.starts_with(layer) && module.ends_with("down_proj"));
            let largest = downs.map(|(_, range)| *range).fold(0.0, f32::max);
            assert_eq!(ranges.amax[&format!("{parent}.down_proj")], largest, "{parent}");
        }
    }

    #[test]
    fn a_dense_layer_is_one_expert_without_a_number() {
        let ranges = InputRanges::measure(&model(vec![1]), &[vec![1, 2, 3]], 1).unwrap();
        assert!(ranges.amax.contains_key("model.layers.1.mlp.down_proj"));
        assert!(!ranges.amax.contains_key("model.layers.1.mlp.experts.0.down_proj"));
    }

    #[test]
    fn nothing_seen_is_an_error() {
        let measured = |sequences: &[Vec<u32>]| InputRanges::measure(&model(vec![]), sequences, 1);
        assert_eq!(measured(&[]), Err(InputRangeError::Empty));
        assert_eq!(measured(&[vec![]]), Err(InputRangeError::Empty));
    }
}
