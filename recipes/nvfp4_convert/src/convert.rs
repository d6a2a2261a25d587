//! From one NVFP4 format to the other: codes and block scales as they are, outer scales inverted.
use anyhow::{Result, bail};
use burn_nvfp4::{
    checkpoint::{CheckpointFormat, Nvfp4Folder, QuantizationScheme},
    safetensors_file::{FileTensor, SafetensorsWriter, TensorSpec},
};

use crate::{
    dequantize::{layer_of_codes, unpacked},
    shards::Conversion,
    source::Source,
};

/// Conversion of a model.
pub struct Convert<'a> {
    packed: &'a Nvfp4Folder,
    scheme: QuantizationScheme,
}

impl<'a> Convert<'a> {
    /// Of a quantized model, to a format.
    ///
    /// # Errors
    /// When the model is not quantized, or has that format.
    pub fn new(source: &'a Source, format: CheckpointFormat) -> Result<Self> {
        let packed = source.require_packed()?;
        let scheme = packed.scheme();
        if scheme.format == format {
            bail!("{}: the model has the format {format} already", source.path.display());
        }
        let w4a4 = scheme.w4a4;
        Ok(Self {
            packed,
            scheme: QuantizationScheme { format, w4a4 },
        })
    }
}

impl Conversion for Convert<'_> {
    fn specs(&self, tensor: &FileTensor<'_>) -> Result<Vec<TensorSpec>> {
        Ok(match layer_of_codes(self.packed, tensor)? {
            Some(layer) => {
                let (d_out, d_in) = (layer.weight.rows, layer.weight.k);
                self.scheme
                    .format
                    .tensor_specs(&layer.module, d_out, d_in, self.scheme.w4a4)
            }
            None => unpacked(self.packed, tensor).into_iter().collect(),
        })
    }

    fn write(&self, tensor: &FileTensor<'_>, writer: &mut SafetensorsWriter) -> Result<()> {
        if let Some(layer) = layer_of_codes(self.packed, tensor)? {
            self.scheme.format.write(writer, &layer)?;
        } else if unpacked(self.packed, tensor).is_some() {
            writer.write(tensor.name(), tensor.bytes)?;
        }
        Ok(())
    }

    fn scheme(&self) -> Option<QuantizationScheme> {
        Some(self.scheme.clone())
    }
}
