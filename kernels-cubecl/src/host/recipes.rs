//! Packing by each [`WeightRecipe`], one strip of a tile at a time.
use super::rounding::{to_e2m1_code, to_e4m3};
use super::tile::{self, BLOCKS};
use crate::recipe::{COMPRESSED_TENSORS_ZERO, MODELOPT_LEAST, bf16};
use crate::{BLOCK, OuterScale, ParameterType, WeightRecipe, e2m1, encode_scale};

/// How a block becomes its scale and codes.
#[derive(Clone, Copy)]
pub(super) enum Encoder {
    /// Values are multiplied with an inverse: TransformerEngine's recipe.
    Multiply { encode_scale: f32 },
    /// Values are divided by a step.
    Divide(Tool),
}

impl Encoder {
    /// For a weight whose outer scale covers `amax`.
    pub(super) fn new(recipe: WeightRecipe, amax: f32) -> Self {
        let (OuterScale::Multiply(outer) | OuterScale::Divide(outer)) = recipe.outer_scale(amax);
        match recipe {
            WeightRecipe::TransformerEngine => Self::Multiply {
                encode_scale: encode_scale(amax),
            },
            WeightRecipe::ModelOpt => Self::Divide(Tool::ModelOpt { scale_2: outer }),
            WeightRecipe::CompressedTensors(parameters) => Self::Divide(Tool::CompressedTensors {
                global: outer,
                parameters,
            }),
        }
    }

    /// Codes of each block of a strip, eight a word, and its E4M3 scale.
    #[inline(always)]
    pub(super) fn encode<const LANES: usize>(
        self,
        strip: &[[f32; LANES]],
        mut block: impl FnMut(usize, [[u32; LANES]; 2], &[f32; LANES]),
    ) {
        let blocks = strip.as_chunks().0.iter().enumerate();
        match self {
            Self::Multiply { encode_scale } => {
                let scales = tile::block_scales(strip, encode_scale);
                for ((b, values), scales) in blocks.zip(&scales) {
                    block(b, tile::encode(values, &scales.inverses), &scales.scales);
                }
            }
            Self::Divide(tool) => {
                let scales = tool_block_scales(strip, tool);
                for ((b, values), scales) in blocks.zip(&scales) {
                    block(b, encode_quotients(values, &scales.steps), &scales.scales);
                }
            }
        }
    }
}

/// Block scales of a strip by the recipe of a tool, and the steps to divide by: one of each a block and lane.
#[inline(always)]
fn tool_block_scales<const LANES: usize>(strip: &[[f32; LANES]], tool: Tool) -> [ToolBlockScales<LANES>; BLOCKS] {
    let amax = tile::block_amax(strip);
    let mut blocks = [ToolBlockScales {
        scales: [0.0; LANES],
        steps: [0.0; LANES],
    }; BLOCKS];
    for (block, amax) in blocks.iter_mut().zip(&amax) {
        match tool {
            Tool::ModelOpt { scale_2 } => {
                for lane in 0..LANES {
                    let scale = f32::from_bits(amax[lane]) / (e2m1::MAX * scale_2);
                    let least = if scale < MODELOPT_LEAST { MODELOPT_LEAST } else { scale };
                    let scale = to_e4m3(if scale == 0.0 { 1.0 } else { least });
                    block.scales[lane] = scale;
                    block.steps[lane] = scale * scale_2;
                }
            }
            Tool::CompressedTensors { global, parameters } => {
                for lane in 0..LANES {
                    let sixth = f32::from_bits(amax[lane]) / e2m1::MAX;
                    let sixth = match parameters {
                        ParameterType::F32 => sixth,
                        ParameterType::Bf16 => bf16(sixth),
                    };
                    let scale = to_e4m3(global * sixth);
                    let scale = if scale == 0.0 { COMPRESSED_TENSORS_ZERO } else { scale };
                    block.scales[lane] = scale;
                    block.steps[lane] = scale / global;
                }
            }
        }
    }
    blocks
}

/// A recipe that divides by the step, with its outer scale.
#[derive(Clone, Copy)]
pub(super) enum Tool {
    /// [`WeightRecipe::ModelOpt`](crate::WeightRecipe::ModelOpt).
    ModelOpt { scale_2: f32 },
    /// [`WeightRecipe::CompressedTensors`](crate::WeightRecipe::CompressedTensors).
    CompressedTensors { global: f32, parameters: ParameterType },
}

/// The scales of one block in each lane.
#[derive(Clone, Copy)]
struct ToolBlockScales<const LANES: usize> {
    pub scales: [f32; LANES],
    /// What values are divided by before they are rounded.
    pub steps: [f32; LANES],
}

/// Codes of one block in each lane, eight a word; a zero has no sign.
#[inline(always)]
fn encode_quotients<const LANES: usize>(block: &[[f32; LANES]; BLOCK], steps: &[f32; LANES]) -> [[u32; LANES]; 2] {
    let mut words = [[0; LANES]; 2];
    for (lines, words) in block.as_chunks::<8>().0.iter().zip(&mut words) {
        for (i, line) in lines.iter().enumerate() {
            for lane in 0..LANES {
                let y = line[lane] / steps[lane];
                let sign = if y < 0.0 { 8 } else { 0 };
                words[lane] |= (to_e2m1_code(y.abs()) | sign) << (4 * i);
            }
        }
    }
    words
}
