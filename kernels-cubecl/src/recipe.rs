//! Whose formulas a weight is packed by. They differ in the last bit of a scale or a tie, so files equal those of a tool
//! only if its very formulas are used. Decoding knows no recipe: codes, block scales and outer scale say it all.
//!
//! ```text
//! ModelOpt            s2   = amax / 2688                                        # multiplies
//!                     sf   = e4m3(clamp(block_amax / (6 * s2), 2^-9, 448))      # 1 for a zero block
//!                     code = e2m1(x / (f32(sf) * s2))
//! compressed-tensors  G    = T(T(1 / max(amax, FLT_MIN)) * 2688)                # divides; 1 when that is not finite
//!                     sf   = e4m3(min(G * T(block_amax / 6), 448))              # 1/8 when that is 0
//!                     code = e2m1(x / (f32(sf) / G))
//! ```
//!
//! All in f32, each operation rounded once. `T` rounds to the type of the model's parameters, in which llm-compressor
//! observes them: BF16 or F32. Both give -0 the code 0, and values that round to zero from below the code 8.
use crate::{BLOCK, OuterScale, e2m1, e4m3, encode_scale, nvfp4};

/// The makers whose packed weights can be made byte for byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightRecipe {
    /// NVIDIA TransformerEngine's, ours: [`nvfp4`](mod@crate::nvfp4).
    #[default]
    TransformerEngine,
    /// NVIDIA ModelOpt's (`NVFP4QTensor`, version 0.47).
    ModelOpt,
    /// llm-compressor's and compressed-tensors' (version 0.20), from parameters of a type.
    CompressedTensors(ParameterType),
}

/// The type of the parameters that a model was loaded with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParameterType {
    /// Scales are computed in f32.
    #[default]
    F32,
    /// Scales are computed in BF16, except for the last product.
    Bf16,
}

impl ParameterType {
    fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 => bf16(x),
        }
    }
}

/// Smallest block scale that ModelOpt writes.
pub(crate) const MODELOPT_LEAST: f32 = 1.0 / 512.0;
/// What compressed-tensors writes in place of a block scale of 0.
pub(crate) const COMPRESSED_TENSORS_ZERO: f32 = 0.125;

impl WeightRecipe {
    /// The outer scale of a tensor, or of a group of tensors that share one, whose largest magnitude is `amax`.
    ///
    /// ModelOpt's formula gives 0 for a tensor of zeros, and a scale without a finite reciprocal for one that is nearly
    /// that; such tensors get 1 here, and decode to zeros.
    pub fn outer_scale(self, amax: f32) -> OuterScale {
        match self {
            Self::TransformerEngine => OuterScale::Multiply(1.0 / encode_scale(amax)),
            Self::ModelOpt => {
                let scale = amax / (e2m1::MAX * e4m3::MAX);
                OuterScale::Multiply(if (1.0 / scale).is_finite() { scale } else { 1.0 })
            }
            Self::CompressedTensors(parameters) => {
                let reciprocal = parameters.round(1.0 / amax.max(f32::MIN_POSITIVE));
                let scale = parameters.round(reciprocal * (e2m1::MAX * e4m3::MAX));
                OuterScale::Divide(if scale.is_finite() { scale } else { 1.0 })
            }
        }
    }

    /// Encodes up to [`BLOCK`] values as one block, for a tensor whose largest magnitude is `amax`: the definition.
    pub fn encode_block(self, x: &[f32], amax: f32) -> nvfp4::Block {
        let block_amax = nvfp4::amax(x);
        let (scale, step) = match (self, self.outer_scale(amax)) {
            (Self::TransformerEngine, _) => {
                return nvfp4::encode_block(x, encode_scale(amax), nvfp4::Operand::Weight);
            }
            (Self::CompressedTensors(parameters), OuterScale::Divide(global)) => {
                let scale = e4m3::encode((global * parameters.round(block_amax / e2m1::MAX)).min(e4m3::MAX));
                let scale = match scale {
                    0 => e4m3::encode(COMPRESSED_TENSORS_ZERO),
                    scale => scale,
                };
                (scale, e4m3::decode(scale) / global)
            }
            (_, OuterScale::Multiply(outer) | OuterScale::Divide(outer)) => {
                let scale = match block_amax / (e2m1::MAX * outer) {
                    0.0 => 1.0,
                    scale => scale.clamp(MODELOPT_LEAST, e4m3::MAX),
                };
                let scale = e4m3::encode(scale);
                (scale, e4m3::decode(scale) * outer)
            }
        };
        let mut codes = [0; BLOCK];
        for (code, value) in codes.iter_mut().zip(x) {
            let quotient = value / step;
            *code = match quotient == 0.0 {
                true => 0,
                false => e2m1::encode(quotient),
            };
        }
        nvfp4::Block { scale, codes }
    }
}

/// The nearest BF16 value, ties to even.
#[inline(always)]
pub(crate) fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_scales_are_those_of_the_tools() {
        // 2688/0.4863281 is 5527.1, which BF16 has no value for.
        let amax = 0.486_328_1;
        let outer = |recipe: WeightRecipe| recipe.outer_scale(amax);
        let compressed = |parameters| outer(WeightRecipe::CompressedTensors(parameters));
        assert_eq!(compressed(ParameterType::Bf16), OuterScale::Divide(5536.0));
        assert!(matches!(compressed(ParameterType::F32), OuterScale::Divide(g) if (g - 5527.13).abs() < 0.01));
        assert!(matches!(outer(WeightRecipe::ModelOpt), OuterScale::Multiply(s) if (s * 5527.13 - 1.0).abs() < 1e-5));
    }

    #[test]
    fn zeros_have_a_scale_that_can_be_inverted() {
        let recipes = [
            WeightRecipe::TransformerEngine,
            WeightRecipe::ModelOpt,
            WeightRecipe::CompressedTensors(ParameterType::F32),
            WeightRecipe::CompressedTensors(ParameterType::Bf16),
        ];
        let scales = [0x00, 0x38, 0x20, 0x20];
        for (recipe, scale) in recipes.into_iter().zip(scales) {
            for amax in [0.0, 1e-45, 1e-38, 1e-36] {
                let (OuterScale::Multiply(outer) | OuterScale::Divide(outer)) = recipe.outer_scale(amax);
                // TransformerEngine's encode scale is at most FLT_MAX.
                assert!(
                    outer.is_finite() && outer >= 1.0 / f32::MAX,
                    "{recipe:?} {amax}: {outer}"
                );
            }
            let block = recipe.encode_block(&[0.0; BLOCK], 0.0);
            assert_eq!((block.scale, block.codes), (scale, [0; BLOCK]), "{recipe:?}");
        }
    }

    #[test]
    fn a_zero_loses_its_sign_and_a_small_value_keeps_it() {
        let mut x = [1.0; BLOCK];
        (x[0], x[1], x[2]) = (-0.0, -1e-3, 1e-3);
        let codes = |recipe: WeightRecipe| recipe.encode_block(&x, 1.0).codes[..3].to_vec();
        assert_eq!(codes(WeightRecipe::TransformerEngine), [8, 8, 0]);
        assert_eq!(codes(WeightRecipe::ModelOpt), [0, 8, 0]);
        assert_eq!(codes(WeightRecipe::CompressedTensors(ParameterType::Bf16)), [0, 8, 0]);
    }

    #[test]
    fn bf16_ties_go_to_even() {
        let one = |extra: u32| f32::from_bits(0x3f80_0000 + extra);
        assert_eq!(bf16(one(0x8000)), 1.0);
        assert_eq!(bf16(one(0x8001)), one(0x1_0000));
        assert_eq!(bf16(one(0x1_8000)), one(0x2_0000));
        assert_eq!(bf16(f32::INFINITY), f32::INFINITY);
        assert_eq!(bf16(f32::MAX), f32::INFINITY);
    }
}
