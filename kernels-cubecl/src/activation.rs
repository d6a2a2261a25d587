//! How activations enter a matmul, and activations once quantized.
use crate::{BLOCK, Compensation, Error, nvfp4};

/// How activations enter a matmul with a packed weight.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum Activation {
    /// As they are, f32 (A16).
    #[default]
    Full,
    /// NVFP4, one power-of-two outer scale a row (A4).
    Nvfp4,
    /// NVFP4, and the selected part of the residual quantized a second time.
    Compensated(Compensation),
    /// E4M3 with one f32 scale a row.
    Fp8,
}

impl Activation {
    /// The compensation, if there is one.
    pub fn compensation(&self) -> Option<&Compensation> {
        match self {
            Self::Compensated(compensation) => Some(compensation),
            _ => None,
        }
    }

    /// Whether activations of `k` channels can enter like this.
    ///
    /// # Errors
    /// `k` is not a multiple of 16 though blocks are asked for, a mask covers another number of channels, or a
    /// fraction is not in (0, 1].
    pub fn check(&self, k: usize) -> Result<(), Error> {
        if matches!(self, Self::Nvfp4 | Self::Compensated(_)) && !k.is_multiple_of(BLOCK) {
            return Err(Error::UnalignedK { k });
        }
        match self.compensation() {
            Some(Compensation::Mask(mask)) if mask.k() != k => Err(Error::Length {
                what: "residual mask, channels",
                expected: k,
                actual: mask.k(),
            }),
            Some(Compensation::PerToken { fraction, .. }) if !(*fraction > 0.0 && *fraction <= 1.0) => {
                Err(Error::Fraction { fraction: *fraction })
            }
            _ => Ok(()),
        }
    }
}

/// Codes and block scales of one pass over `[tokens, k]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// `[tokens, k/2]`.
    pub codes: Vec<u8>,
    /// `[tokens, k/16]`, E4M3.
    pub block_scales: Vec<u8>,
}

/// The second pass: the selected residuals, quantized with the row's own encode scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidualPass {
    /// `[tokens, ceil(k/32)]`: bit `c % 32` of word `c / 32` is set when channel `c` is compensated.
    pub masks: Vec<u32>,
    /// Codes and scales; blocks stay in their places.
    pub pass: Pass,
}

/// Quantized activations, every part open to inspection.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedRows {
    /// Rows.
    pub tokens: usize,
    /// Channels.
    pub k: usize,
    /// `[tokens]`: `S` of each row, a power of two. NaN for a row that holds NaN or an infinity: its codes are zeros
    /// and all its values decode to NaN.
    pub encode_scales: Vec<f32>,
    /// First pass.
    pub first: Pass,
    /// Second pass, with compensation.
    pub residual: Option<ResidualPass>,
}

impl QuantizedRows {
    /// The values that a matmul sees, `[tokens, k]`: first pass plus second.
    pub fn decode(&self) -> Vec<f32> {
        let mut values = self.values_in_units();
        for (row, encode_scale) in self.encode_scales.iter().enumerate() {
            let row = &mut values[row * self.k..][..self.k];
            row.iter_mut().for_each(|value| *value *= 1.0 / encode_scale);
        }
        values
    }

    /// The values of one pass, `[tokens, k]`.
    pub fn decode_pass(&self, pass: &Pass) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.tokens * self.k);
        for (row, encode_scale) in self.encode_scales.iter().enumerate() {
            for c in 0..self.k {
                let index = row * self.k + c;
                let step = nvfp4::decode_scale(pass.block_scales[index / BLOCK]) * (1.0 / encode_scale);
                values.push(nvfp4::decode(nvfp4::unpack(&pass.codes, index), step));
            }
        }
        values
    }

    /// The values in units of `1/encode_scale`, `[tokens, k]`: both passes share it, so their sum is exact.
    pub(crate) fn values_in_units(&self) -> Vec<f32> {
        let pass = |pass: &Pass, index: usize| {
            nvfp4::decode(
                nvfp4::unpack(&pass.codes, index),
                nvfp4::decode_scale(pass.block_scales[index / BLOCK]),
            )
        };
        let residual = self.residual.as_ref().map(|residual| &residual.pass);
        (0..self.tokens * self.k)
            .map(|index| pass(&self.first, index) + residual.map_or(-0.0, |residual| pass(residual, index)))
            .collect()
    }

    /// Whether the buffers have the lengths that the shape says.
    ///
    /// # Errors
    /// Names the buffer, with both lengths; `k` that is not a multiple of 16.
    pub fn check(&self) -> Result<(), Error> {
        if !self.k.is_multiple_of(BLOCK) {
            return Err(Error::UnalignedK { k: self.k });
        }
        Error::check_length("encode scales of activations", &[self.tokens], self.encode_scales.len())?;
        for pass in [Some(&self.first), self.residual.as_ref().map(|residual| &residual.pass)]
            .into_iter()
            .flatten()
        {
            Error::check_length("codes of activations", &[self.tokens, self.k / 2], pass.codes.len())?;
            Error::check_length(
                "block scales of activations",
                &[self.tokens, self.k / BLOCK],
                pass.block_scales.len(),
            )?;
        }
        Ok(())
    }
}
