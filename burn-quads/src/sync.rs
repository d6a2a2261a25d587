//! Trainer weights to rollout weights: after each optimizer step every weight and every scale is packed anew.
use burn::{
    module::{AutodiffModule, Param},
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_nvfp4::{
    LayerAudit, Nvfp4, Nvfp4Backend, Outcome, PackError, PackingAudit, Precision, WeightFormat, pack, packed_weight,
};
use kernels_cubecl::ResidualMask;

use crate::{
    layer_backend::LayerBackend,
    modules::{
        moe::{PrecisionError, QuadsMoe},
        residual_masks::{MaskError, ResidualMasks},
    },
};

/// Why the weights could not be packed.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// The model cannot run in the precision.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// The masks belong to another model.
    #[error(transparent)]
    Masks(#[from] MaskError),
    /// A weight could not be packed: most often it holds NaN or an infinity.
    #[error("{tensor}: {source}")]
    Pack {
        /// Path of the weight.
        tensor: String,
        /// What is wrong with it.
        source: PackError,
    },
    /// A packed weight has a scale that is NaN or infinite.
    #[error("{tensor}: a packed scale is not finite")]
    Scale {
        /// Path of the weight.
        tensor: String,
    },
    /// The self-check failed: a packed weight does not decode to what the trainer's forward pass uses.
    #[error("{tensor}: {differing} of {elements} packed values differ from the trainer's")]
    SelfCheck {
        /// Path of the weight.
        tensor: String,
        /// Values that differ.
        differing: usize,
        /// Values compared.
        elements: usize,
    },
}

/// The rollout's model: every quantized layer of `trainer` packed in `precision`, and what became of each layer.
///
/// `masks` are needed when the precision compensates calibrated channels. In [`Precision::High`] nothing is packed. The
/// result shares no state with the trainer but the dense parameters, which are copied when either side changes them.
///
/// Every sync checks itself: the decoded values of one layer must equal those of the trainer's forward pass, and all scales
/// must be finite.
///
/// # Errors
/// [`SyncError`]; the tensor at fault is named.
pub fn sync<B, A>(
    trainer: &QuadsMoe<A>,
    precision: &Precision,
    masks: Option<&ResidualMasks>,
) -> Result<(QuadsMoe<Nvfp4<B>>, PackingAudit), SyncError>
where
    B: Nvfp4Backend + LayerBackend,
    A: AutodiffBackend<InnerBackend = Nvfp4<B>>,
{
    pack_model(trainer.valid(), precision, masks)
}

/// [`sync`] of a model that is not being trained, such as a loaded checkpoint.
///
/// # Errors
/// As [`sync`].
pub fn pack_model<B: Nvfp4Backend + LayerBackend>(
    mut model: QuadsMoe<Nvfp4<B>>,
    precision: &Precision,
    masks: Option<&ResidualMasks>,
) -> Result<(QuadsMoe<Nvfp4<B>>, PackingAudit), SyncError> {
    if let Some(masks) = masks {
        model = model.with_residual_masks(masks)?;
    }
    let mut model = model.with_precision(precision.clone())?;
    let mut packing = Packing {
        precision,
        audit: PackingAudit::default(),
    };
    packing.leave("embed_tokens.weight", &model.embed_tokens.weight, "embedding");
    for (index, layer) in model.layers.iter_mut().enumerate() {
        let path = |name: &str| format!("layers.{index}.{name}");
        let attention = &mut layer.self_attn;
        // One outer scale for q, k and v, from the masters as they are now.
        let amax = (precision.weight_format() == Some(WeightFormat::Nvfp4)).then(|| attention.qkv().amax());
        let check = (index == 0 && precision.weight_format().is_some()).then(|| attention.qkv().quantized_weights());
        let mask = attention.q_proj.input.mask().cloned();
        for (name, linear) in [
            ("q_proj", &mut attention.q_proj),
            ("k_proj", &mut attention.k_proj),
            ("v_proj", &mut attention.v_proj),
        ] {
            let path = path(&format!("self_attn.{name}.weight"));
            packing.pack(path, &mut linear.weight, amax.clone(), mask.as_ref())?;
        }
        if let Some(expected) = check {
            let packed = [&attention.q_proj, &attention.k_proj, &attention.v_proj];
            for ((name, packed), expected) in ["q_proj", "k_proj", "v_proj"].into_iter().zip(packed).zip(expected) {
                self_check(path(&format!("self_attn.{name}.weight")), &packed.weight, expected)?;
            }
        }
        let mask = attention.o_proj.input.mask().cloned();
        let name = path("self_attn.o_proj.weight");
        packing.pack(name, &mut attention.o_proj.weight, None, mask.as_ref())?;

        if let Some(gate) = &layer.mlp.gate {
            packing.leave(&path("mlp.gate.weight"), &gate.weight, "router");
        }
        let experts = &mut layer.mlp.experts;
        let (input, hidden) = (experts.input.mask().cloned(), experts.hidden.mask().cloned());
        let name = path("mlp.experts.gate_up_proj");
        packing.pack(name, &mut experts.gate_up_proj, None, input.as_ref())?;
        let name = path("mlp.experts.down_proj");
        packing.pack(name, &mut experts.down_proj, None, hidden.as_ref())?;
    }
    match &model.lm_head {
        Some(head) => packing.leave("lm_head", head, "head"),
        None => packing.leave("lm_head", &model.embed_tokens.weight, "head, tied to the embedding"),
    }
    Ok((model, packing.audit))
}

struct Packing<'a> {
    precision: &'a Precision,
    audit: PackingAudit,
}

impl Packing<'_> {
    /// Packs a weight in place and checks its scales.
    fn pack<B: Nvfp4Backend, const D: usize>(
        &mut self,
        path: String,
        weight: &mut Param<Tensor<Nvfp4<B>, D>>,
        amax: Option<Tensor<Nvfp4<B>, 1>>,
        mask: Option<&ResidualMask>,
    ) -> Result<(), SyncError> {
        if self.precision.weight_format().is_none() {
            self.leave(&path, weight, &format!("precision {}", self.precision));
            return Ok(());
        }
        let dense = weight.val();
        let (shape, bytes_before) = (dense.dims().to_vec(), dense_bytes(&dense));
        let tensor = pack(dense, self.precision, amax, mask).map_err(|source| SyncError::Pack {
            tensor: path.clone(),
            source,
        })?;
        let packed = packed_weight(&tensor).expect("it was packed just now");
        // E4M3 has no infinity; NaN is 0x7F with either sign.
        let finite = packed.block_scales().iter().all(|scale| scale & 0x7F != 0x7F)
            && packed.outer_scales().iter().all(|scale| scale.is_finite());
        if !finite {
            return Err(SyncError::Scale { tensor: path });
        }
        self.audit.push(LayerAudit {
            path,
            shape,
            outcome: Outcome::Packed(self.precision.clone()),
            bytes_before,
            bytes_after: packed.bytes(),
        });
        *weight = Param::initialized(weight.id, tensor);
        Ok(())
    }

    /// Records a weight that stays dense.
    fn leave<B: Nvfp4Backend, const D: usize>(
        &mut self,
        path: &str,
        weight: &Param<Tensor<Nvfp4<B>, D>>,
        reason: &str,
    ) {
        let bytes = dense_bytes(&weight.val());
        self.audit.push(LayerAudit {
            path: path.into(),
            shape: weight.dims().to_vec(),
            outcome: Outcome::Left(reason.into()),
            bytes_before: bytes,
            bytes_after: bytes,
        });
    }
}

fn dense_bytes<B: Nvfp4Backend, const D: usize>(tensor: &Tensor<Nvfp4<B>, D>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

/// Whether a packed weight decodes to `expected`, bit for bit.
fn self_check<B: Nvfp4Backend, const D: usize>(
    path: String,
    weight: &Tensor<Nvfp4<B>, D>,
    expected: Tensor<Nvfp4<B>, D>,
) -> Result<(), SyncError> {
    let bits =
        |tensor: Tensor<Nvfp4<B>, D>| -> Vec<u32> { tensor.into_data().iter::<f32>().map(f32::to_bits).collect() };
    let (actual, expected) = (bits(weight.clone().dequantize()), bits(expected));
    match actual.iter().zip(&expected).filter(|(a, e)| a != e).count() {
        0 => Ok(()),
        differing => Err(SyncError::SelfCheck {
            tensor: path,
            differing,
            elements: expected.len(),
        }),
    }
}
