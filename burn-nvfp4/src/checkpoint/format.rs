//! The two formats, and the tensors that make up a packed layer.
use crate::{
    OuterScaleConvention,
    safetensors_file::{Dtype, SafetensorsError, SafetensorsWriter, TensorSpec},
};
use kernels_cubecl::{BLOCK, OuterScale};
use std::{borrow::Cow, fmt, str::FromStr};

use super::layer::{CheckpointLayer, divisor, multiplier};

/// Whose format a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CheckpointFormat {
    /// compressed-tensors' `nvfp4-pack-quantized`: what llm-compressor writes.
    CompressedTensors,
    /// NVIDIA ModelOpt's unified Hugging Face checkpoint.
    ModelOpt,
}

/// Both.
pub const FORMATS: [CheckpointFormat; 2] = [CheckpointFormat::CompressedTensors, CheckpointFormat::ModelOpt];

/// A part of a packed layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// E2M1 codes.
    Codes,
    /// E4M3 block scales.
    BlockScales,
    /// The outer scale.
    OuterScale,
    /// The static outer scale of the activations.
    InputScale,
}

/// All parts; the last is there in W4A4 files alone.
pub const PARTS: [Part; 4] = [Part::Codes, Part::BlockScales, Part::OuterScale, Part::InputScale];

impl CheckpointFormat {
    /// Name of a part, after the module's and a dot.
    pub fn part_name(self, part: Part) -> &'static str {
        match (self, part) {
            (Self::CompressedTensors, Part::Codes) => "weight_packed",
            (Self::ModelOpt, Part::Codes) => "weight",
            (_, Part::BlockScales) => "weight_scale",
            (Self::CompressedTensors, Part::OuterScale) => "weight_global_scale",
            (Self::ModelOpt, Part::OuterScale) => "weight_scale_2",
            (Self::CompressedTensors, Part::InputScale) => "input_global_scale",
            (Self::ModelOpt, Part::InputScale) => "input_scale",
        }
    }

    /// What its outer scales do to block scales.
    pub fn convention(self) -> OuterScaleConvention {
        match self {
            Self::CompressedTensors => OuterScaleConvention::Divide,
            Self::ModelOpt => OuterScaleConvention::Multiply,
        }
    }

    /// A scale of its convention.
    pub fn outer_scale(self, value: f32) -> OuterScale {
        match self.convention() {
            OuterScaleConvention::Divide => OuterScale::Divide(value),
            OuterScaleConvention::Multiply => OuterScale::Multiply(value),
        }
    }

    /// A scale as the number that its files hold.
    pub fn scale_value(self, scale: OuterScale) -> f32 {
        match self.convention() {
            OuterScaleConvention::Divide => divisor(scale),
            OuterScaleConvention::Multiply => multiplier(scale),
        }
    }

    /// The tensors of a packed layer `[d_out, d_in]`.
    pub fn tensor_specs(self, module: &str, d_out: usize, d_in: usize, input_scale: bool) -> Vec<TensorSpec> {
        let scalar = match self {
            Self::CompressedTensors => vec![1],
            Self::ModelOpt => vec![],
        };
        let parts = PARTS
            .into_iter()
            .filter(|part| input_scale || *part != Part::InputScale);
        let spec = |part| {
            let (dtype, shape) = match part {
                Part::Codes => (Dtype::U8, vec![d_out, d_in / 2]),
                Part::BlockScales => (Dtype::F8_E4M3, vec![d_out, d_in / BLOCK]),
                Part::OuterScale | Part::InputScale => (Dtype::F32, scalar.clone()),
            };
            let name = format!("{module}.{}", self.part_name(part));
            TensorSpec { name, dtype, shape }
        };
        parts.map(spec).collect()
    }

    /// The tensors of a packed layer, by name. Codes and block scales go out as they are; a scale of the other convention is
    /// inverted.
    pub fn tensors<'a>(self, layer: &CheckpointLayer<'a>) -> Vec<(String, Cow<'a, [u8]>)> {
        let scale = |scale| Cow::Owned(self.scale_value(scale).to_le_bytes().to_vec());
        let part = |part| {
            let bytes = match part {
                Part::Codes => Cow::Borrowed(layer.weight.codes),
                Part::BlockScales => Cow::Borrowed(layer.weight.block_scales),
                Part::OuterScale => scale(layer.weight.outer_scale),
                Part::InputScale => scale(layer.input_scale?),
            };
            Some((format!("{}.{}", layer.module, self.part_name(part)), bytes))
        };
        PARTS.into_iter().filter_map(part).collect()
    }

    /// Writes a packed layer to a file that was made to hold its [`tensor_specs`](Self::tensor_specs).
    ///
    /// # Errors
    /// As [`SafetensorsWriter::write`].
    pub fn write(self, writer: &mut SafetensorsWriter, layer: &CheckpointLayer<'_>) -> Result<(), SafetensorsError> {
        let mut tensors = self.tensors(layer).into_iter();
        tensors.try_for_each(|(name, bytes)| writer.write(&name, &bytes))
    }
}

impl fmt::Display for CheckpointFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CompressedTensors => "compressed-tensors",
            Self::ModelOpt => "modelopt",
        })
    }
}

impl FromStr for CheckpointFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = FORMATS.into_iter().find(|format| format.to_string() == text);
        named.ok_or_else(|| format!("unknown checkpoint format `{text}`: compressed-tensors or modelopt"))
    }
}
