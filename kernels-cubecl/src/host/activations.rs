//! Quantization of activations: to values, and to codes that can be looked at.
use super::rows;
use crate::nvfp4::{self, Operand};
use crate::residual::unit_energy;
use crate::{
    Activation, BLOCK, Compensation, Error, Granularity, Pass, QuantizedRows, ResidualMask, ResidualPass, amax,
};

/// Quantizes `[tokens, k]` activations to codes; with `compensation` the selected residuals a second time. Written as
/// the definition reads, with the formats' own conversions; the values that it decodes to are those of
/// [`fake_quantize_activations`], which is the quick way to them.
///
/// # Errors
/// `x` does not have `tokens · k` values, `k` is not a multiple of 16, or the compensation does not fit `k`.
pub fn quantize_activations(
    x: &[f32],
    tokens: usize,
    k: usize,
    compensation: Option<&Compensation>,
) -> Result<QuantizedRows, Error> {
    compensation
        .map_or(Activation::Nvfp4, |c| Activation::Compensated(c.clone()))
        .check(k)?;
    Error::check_length("activations", &[tokens, k], x.len())?;
    let mut quantized = QuantizedRows {
        tokens,
        k,
        encode_scales: Vec::with_capacity(tokens),
        first: Pass::default(),
        residual: compensation.map(|_| ResidualPass {
            masks: Vec::new(),
            pass: Pass::default(),
        }),
    };
    for row in 0..tokens {
        let row = &x[row * k..][..k];
        let finite = row.iter().all(|value| value.is_finite());
        // A row that is not finite gets zero codes under a NaN scale.
        let (row, scale) = if finite {
            (row.to_vec(), nvfp4::row_encode_scale(amax(row)))
        } else {
            (vec![0.0; k], 1.0)
        };
        quantized.encode_scales.push(if finite { scale } else { f32::NAN });
        let values = push_row(&mut quantized.first, &row, scale);
        if let (Some(compensation), Some(second)) = (compensation, &mut quantized.residual) {
            let difference = |(x, value): (&f32, &f32)| nvfp4::residual(*x, *value, 1.0 / scale);
            let mut residual: Vec<f32> = row.iter().zip(&values).map(difference).collect();
            let mask = row_mask(compensation, &residual);
            second.masks.extend(mask.words());
            for (c, r) in residual.iter_mut().enumerate() {
                if !mask.contains(c) {
                    *r = 0.0; // before the second block amax
                }
            }
            push_row(&mut second.pass, &residual, scale);
        }
    }
    Ok(quantized)
}

/// The values that a matmul sees in place of `x`, `[tokens, k]`: pass 1 plus pass 2. A row that holds NaN or an
/// infinity becomes NaN; [`Activation::Full`] copies.
///
/// # Errors
/// As [`quantize_activations`]; `out` must be as long as `x`.
pub fn fake_quantize_activations(
    x: &[f32],
    tokens: usize,
    k: usize,
    activation: &Activation,
    out: &mut [f32],
) -> Result<(), Error> {
    activation.check(k)?;
    Error::check_length("activations", &[tokens, k], x.len())?;
    Error::check_length("fake-quantized activations", &[tokens, k], out.len())?;
    if x.is_empty() || *activation == Activation::Full {
        out.copy_from_slice(x);
        return Ok(());
    }
    let mut units = vec![0.0; tokens];
    rows::quantize(x, k, activation, out, &mut units);
    for (row, unit) in out.chunks_exact_mut(k).zip(units) {
        row.iter_mut().for_each(|value| *value *= unit);
    }
    Ok(())
}

/// Adds the squared first-pass residuals of each row, summed over units of `granularity`, to `energy`
/// (`[ceil(k / unit)]`). Calls on consecutive batches equal one call on all rows, bit for bit. A row that holds NaN or
/// an infinity makes every sum NaN.
///
/// # Errors
/// As [`quantize_activations`]; `energy` must have one value a unit.
pub fn accumulate_residual_energy(
    x: &[f32],
    tokens: usize,
    k: usize,
    granularity: Granularity,
    energy: &mut [f32],
) -> Result<(), Error> {
    Error::check_length("residual energy", &[granularity.units(k)], energy.len())?;
    let mut residual = vec![0.0; x.len()];
    fake_quantize_activations(x, tokens, k, &Activation::Nvfp4, &mut residual)?;
    if x.is_empty() {
        return Ok(());
    }
    residual.iter_mut().zip(x).for_each(|(value, x)| *value = x - *value);
    let mut row_energy = vec![0.0; energy.len()];
    for row in residual.chunks_exact(k) {
        unit_energy(row, granularity, &mut row_energy);
        for (total, row) in energy.iter_mut().zip(&row_energy) {
            *total += row;
        }
    }
    Ok(())
}

/// The mask of one row.
fn row_mask(compensation: &Compensation, residual: &[f32]) -> ResidualMask {
    match compensation {
        Compensation::All => ResidualMask::from_channels(&vec![true; residual.len()]),
        Compensation::Mask(mask) => mask.clone(),
        Compensation::PerToken { granularity, fraction } => {
            let mut energy = vec![0.0; granularity.units(residual.len())];
            unit_energy(residual, *granularity, &mut energy);
            ResidualMask::from_energy(&energy, residual.len(), *granularity, *fraction)
        }
    }
}

/// Quantizes one row into `pass`; returns its values in units of `1/encode_scale`.
fn push_row(pass: &mut Pass, row: &[f32], encode_scale: f32) -> Vec<f32> {
    let mut values = Vec::with_capacity(row.len());
    for block in row.chunks_exact(BLOCK) {
        let block = nvfp4::encode_block(block, encode_scale, Operand::Activation);
        values.extend(
            block
                .codes
                .iter()
                .map(|code| nvfp4::decode(*code, nvfp4::decode_scale(block.scale))),
        );
        pass.block_scales.push(block.scale);
        pass.codes.extend(nvfp4::pack(&block.codes));
    }
    values
}
