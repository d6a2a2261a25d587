//! A quantized model against its original: error of each layer, and whether all else is as it was.
use anyhow::{Result, bail};

use crate::{
    inspect::{dense_layer, layer_error, relative},
    source::Source,
};

/// What is different.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// Packed layers.
    pub layers: usize,
    /// Relative error of all packed weights together.
    pub error: f64,
    /// The layer with the largest relative error, and that.
    pub worst: (String, f64),
    /// Tensors that are not packed and equal the original's, byte for byte.
    pub equal: usize,
}

/// Compares a quantized model with its original.
///
/// # Errors
/// When a layer is damaged, tensors are missing or too many, one that is not packed differs from the original's, or a layer is
/// further from the original than `tolerance`.
pub fn verify(source: &Source, original: &Source, tolerance: f64) -> Result<Verified> {
    let packed = source.require_packed()?;
    let (mut error, mut norm) = (0.0, 0.0);
    let mut worst = (String::new(), 0.0);
    for module in packed.modules() {
        let layer = packed.layer(module)?.expect("a module of the folder");
        let this = layer_error(&layer.dequantize(), &dense_layer(original, module)?, module)?;
        (error, norm) = (error + this.0, norm + this.1);
        // NaN, of an original that has it, is worse than all.
        if worst.0.is_empty() || relative(this).total_cmp(&worst.1).is_gt() {
            worst = (module.to_string(), relative(this));
        }
    }
    let mut equal = 0;
    for tensor in source
        .folder()
        .tensors()
        .filter(|tensor| packed.module_of(tensor.name()).is_none())
    {
        let Some(other) = original.tensor(tensor.name()) else {
            return Err(tensor.error("the original has no such tensor").into());
        };
        if (other.dtype(), other.shape(), other.bytes) != (tensor.dtype(), tensor.shape(), tensor.bytes) {
            return Err(tensor.error(format!("differs from {}", other.path.display())).into());
        }
        equal += 1;
    }
    for tensor in original.folder().tensors() {
        let module = tensor.name().strip_suffix(".weight").unwrap_or(tensor.name());
        let fused = tensor.shape().len() == 3;
        if !fused && source.tensor(tensor.name()).is_none() && !packed.is_packed(module) {
            return Err(tensor.error(format!("missing in {}", source.path.display())).into());
        }
    }
    if worst.1 > tolerance || worst.1.is_nan() {
        bail!(
            "{}: relative error {:.4}, beyond the tolerance of {tolerance}",
            worst.0,
            worst.1
        );
    }
    Ok(Verified {
        layers: packed.modules().len(),
        error: relative((error, norm)),
        worst,
        equal,
    })
}
