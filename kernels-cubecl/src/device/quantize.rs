//! Activations to codes, block scales and units; with compensation the residual in the same kernel.
//!
//! One cube a row. A unit (thread) keeps its blocks of 16 in registers: it takes their amax, waits for the row's, encodes,
//! subtracts what the codes give, and encodes the selected rest once more. Every product is exact because the row's
//! scale is a power of two, so contraction to fused multiply-adds changes no bit.
use super::check::check_len;
use super::format::{BIASES, INFINITE, e2m1_biased, e2m1_value, e4m3_decode, e4m3_encode};
use super::matrix::{Element, Error, Matrix, PackedActivations, allocate, array, upload};
use super::{K_STEP, selection};
use crate::nvfp4::SIXTH;
use crate::residual::unit_count;
use crate::{Activation, BLOCK, Compensation, Granularity, ResidualMask};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Which residuals are quantized a second time; a [`Compensation`] with its mask on the device.
#[derive(Clone, Debug)]
pub enum Residual {
    /// None: plain W4A4.
    None,
    /// Every channel.
    All,
    /// A fixed mask over so many channels.
    Mask(DeviceMask),
    /// So many units of each row.
    PerToken(Granularity, usize),
}

/// A fixed mask in device memory.
#[derive(Clone, Debug)]
pub struct DeviceMask {
    /// `[ceil(k/32)]`: [`ResidualMask::words`].
    words: Handle,
    /// `[kp/64]`: not 0 where a K step has a bit; none if all have.
    steps: Option<Handle>,
    k: usize,
}

impl DeviceMask {
    fn new<R: Runtime>(client: &ComputeClient<R>, mask: &ResidualMask) -> Self {
        let steps: Vec<u32> = mask
            .words()
            .chunks(2)
            .map(|step| u32::from(step.iter().any(|word| *word != 0)))
            .collect();
        let sparse = steps.contains(&0);
        Self {
            words: upload(client, u32::as_bytes(mask.words())),
            steps: sparse.then(|| upload(client, u32::as_bytes(&steps))),
            k: mask.k(),
        }
    }
}

impl Residual {
    /// Puts a compensation's mask on the device; do this once a layer.
    ///
    /// # Errors
    /// The compensation does not fit `k`.
    pub fn new<R: Runtime>(
        client: &ComputeClient<R>,
        compensation: Option<&Compensation>,
        k: usize,
    ) -> Result<Self, Error> {
        let Some(compensation) = compensation else {
            return Ok(Self::None);
        };
        Activation::Compensated(compensation.clone()).check(k)?;
        Ok(match compensation {
            Compensation::All => Self::All,
            Compensation::Mask(mask) => Self::Mask(DeviceMask::new(client, mask)),
            Compensation::PerToken { granularity, fraction } => {
                Self::PerToken(*granularity, unit_count(granularity.units(k), *fraction))
            }
        })
    }

    fn kind(&self) -> Kind {
        match self {
            Self::None => Kind::None,
            Self::All => Kind::All,
            Self::Mask(_) => Kind::Mask,
            Self::PerToken(Granularity::Channel, _) => Kind::Channels,
            Self::PerToken(Granularity::Block16, _) => Kind::Blocks16,
            Self::PerToken(Granularity::Block64, _) => Kind::Blocks64,
        }
    }
}

/// The part of [`Residual`] that is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    None,
    All,
    Mask,
    Channels,
    Blocks16,
    Blocks64,
}

impl Kind {
    fn per_token(self) -> bool {
        matches!(self, Self::Channels | Self::Blocks16 | Self::Blocks64)
    }
}

/// How elements of `x` are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Load {
    /// Vectors along `k`.
    Vectors,
    /// Single elements anywhere.
    Elements,
    /// bf16 as the upper or lower half of a u32 word; vectors of words along `k`.
    WordVectors,
    /// The same, single elements anywhere.
    Words,
}

/// What is compiled into a quantization kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Units of a cube, a power of two of at least 32.
    pub units: usize,
    /// Blocks a unit holds.
    pub blocks: usize,
    pub load: Load,
    pub kind: Kind,
    /// Rows fill the units' blocks: no unit has less to load than the others.
    pub full: bool,
    /// Compiled by NVIDIA's compiler: planes of 32 units, f32 subnormals that count, correctly rounded division.
    pub nvidia: bool,
}

/// Launch table: units a cube and blocks a unit for rows of `kp` channels. Few rows want all units at once; many rows
/// share out what a row costs over more blocks.
fn shape(tokens: usize, kp: usize, most_units: usize) -> (usize, usize) {
    let blocks = kp / BLOCK;
    let most = if tokens <= 128 { 512 } else { 128 };
    let units = blocks.next_power_of_two().clamp(32, most_units.min(most));
    match blocks.div_ceil(units).max(1) {
        // More would not stay in registers.
        5.. => {
            let units = blocks.div_ceil(4).next_power_of_two().min(most_units.min(1024));
            (units, blocks.div_ceil(units))
        }
        per_unit => (units, per_unit),
    }
}

/// Quantizes `x` (`[tokens, k]`); with a residual, its second pass follows the first.
///
/// # Errors
/// `k` is not a multiple of 16, or a mask covers another number of channels.
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    residual: &Residual,
) -> Result<PackedActivations, Error> {
    let (tokens, k) = (x.rows, x.columns);
    Activation::Nvfp4.check(k)?;
    if let Residual::Mask(mask) = residual {
        check_len("channels of a residual mask", k, mask.k)?;
    }
    let kp = k.next_multiple_of(K_STEP);
    let kind = residual.kind();
    let passes = if kind == Kind::None { 1 } else { 2 };
    let packed = PackedActivations {
        codes: allocate(client, passes * tokens * kp / 8),
        block_scales: allocate(client, passes * tokens * kp / 64),
        units: allocate(client, tokens),
        tokens,
        k,
        passes,
        residual_steps: match residual {
            Residual::Mask(mask) => mask.steps.clone(),
            _ => None,
        },
    };
    if tokens == 0 {
        return Ok(packed);
    }
    let hardware = &client.properties().hardware;
    let (units, blocks) = shape(tokens, kp, hardware.max_units_per_cube as usize);
    let nvidia = R::name(client).contains("cuda");
    let load = load(client, x);
    let plan = Plan {
        units,
        blocks,
        load,
        kind,
        full: k == units * blocks * BLOCK,
        nvidia,
    };
    match (x.element, load) {
        (_, Load::WordVectors | Load::Words) => launch::<R, u32>(client, x, residual, &packed, plan),
        (Element::F32, _) => launch::<R, f32>(client, x, residual, &packed, plan),
        (Element::F16, _) => launch::<R, half::f16>(client, x, residual, &packed, plan),
        (Element::BF16, _) => launch::<R, half::bf16>(client, x, residual, &packed, plan),
    }?;
    Ok(packed)
}

/// The quickest way to read `x` that its type and strides allow.
fn load<R: Runtime>(client: &ComputeClient<R>, x: &Matrix) -> Load {
    // 16 bytes at a time.
    let width = 16 / x.element.size();
    let aligned = x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    let vectors = x.strides[1] == 1 && x.strides[0].is_multiple_of(width) && aligned;
    match (x.element == Element::BF16 && !x.element.is_native(client), vectors) {
        (false, true) => Load::Vectors,
        (false, false) => Load::Elements,
        (true, true) => Load::WordVectors,
        (true, false) => Load::Words,
    }
}

fn launch<R: Runtime, F: Numeric + CubeElement>(
    client: &ComputeClient<R>,
    x: &Matrix,
    residual: &Residual,
    packed: &PackedActivations,
    plan: Plan,
) -> Result<(), Error> {
    if x.element == Element::F16 && !x.element.is_native(client) {
        return Err(Error::Unsupported {
            what: "quantizing f16".into(),
            why: "the device has no f16".into(),
        });
    }
    let width = match plan.load {
        Load::Vectors => 16 / x.element.size(),
        Load::WordVectors => 4,
        Load::Elements | Load::Words => 1,
    };
    let (tokens, kp) = (packed.tokens, packed.padded_k());
    let (mask, mask_words, count) = match residual {
        Residual::Mask(mask) => (&mask.words, mask.k.div_ceil(32), 0),
        Residual::PerToken(_, count) => (&packed.units, 1, *count),
        Residual::None | Residual::All => (&packed.units, 1, 0),
    };
    // Scalars of the kernel's type: words hold two bf16.
    let scalars = match plan.load {
        Load::WordVectors | Load::Words => x.span().div_ceil(2),
        Load::Vectors | Load::Elements => x.span(),
    };
    // SAFETY: rows past `tokens` and blocks past `k` are neither read nor written, and the buffers hold all others.
    unsafe {
        quantize_rows::launch_unchecked::<F, R>(
            client,
            rows_grid(tokens),
            CubeDim::new_1d(plan.units as u32),
            width,
            array(&x.handle, scalars.next_multiple_of(width)),
            array(mask, mask_words),
            array(&packed.codes, packed.passes * tokens * kp / 8),
            array(&packed.block_scales, packed.passes * tokens * kp / 64),
            // Aliases `mask` where there is none; it is not read then.
            array(&packed.units, tokens),
            tokens as u32,
            packed.k as u32,
            x.strides[0] as u32,
            x.strides[1] as u32,
            count as u32,
            0,
            plan,
        );
    }
    Ok(())
}

/// One cube a row, in two dimensions: a dimension holds at most 65,535.
pub(super) fn rows_grid(rows: usize) -> CubeCount {
    const WIDTH: usize = 32_768;
    CubeCount::Static(rows.min(WIDTH) as u32, rows.div_ceil(WIDTH) as u32, 1)
}

/// Grid: [`rows_grid`]. `zero` is 0, unknown to the compiler.
#[cube(launch_unchecked)]
fn quantize_rows<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    mask: &Array<u32>,
    codes: &mut Array<Vector<u32, Const<2>>>,
    block_scales: &mut Array<u32>,
    units: &mut Array<f32>,
    tokens: u32,
    k: u32,
    row_stride: u32,
    column_stride: u32,
    count: u32,
    zero: u32,
    #[comptime] plan: Plan,
) {
    let unit_pos = UNIT_POS as usize;
    let k = k as usize;
    let steps = k.div_ceil(64usize);
    let cube = CUBE_POS;
    let inside = cube < tokens as usize;
    // Cubes past the last row redo it and write nothing: barriers want all units of a cube.
    let row = min(cube, tokens as usize - 1);

    let mut reduce = SharedMemory::<u32>::new(plan.units);
    let mut bytes = SharedMemory::<u32>::new(comptime!(2 * plan.units * plan.blocks));

    let mut v = Array::<f32>::new(comptime!(plan.blocks * 16));
    let mut block_amax = Array::<u32>::new(plan.blocks);
    // All loads before the first use: a row takes one latency, not one a block.
    #[unroll]
    for b in 0..plan.blocks {
        let block = comptime!(b * plan.units) + unit_pos;
        let row_start = row * row_stride as usize;
        let column_stride = column_stride as usize;
        if comptime!(plan.full) {
            load_block(
                x,
                &mut v,
                row_start,
                block * 16,
                column_stride,
                comptime!(b * 16),
                plan.load,
            );
        } else {
            #[unroll]
            for j in 0..16usize {
                v[comptime!(b * 16 + j)] = 0.0;
            }
            if block * 16 < k {
                load_block(
                    x,
                    &mut v,
                    row_start,
                    block * 16,
                    column_stride,
                    comptime!(b * 16),
                    plan.load,
                );
            }
        }
    }
    let mut largest = 0u32;
    #[unroll]
    for b in 0..plan.blocks {
        block_amax[b] = largest_magnitude(&v, comptime!(b * 16));
        largest = max(largest, block_amax[b]);
    }
    let amax = selection::cube_max(largest, &mut reduce, plan);
    let finite = amax < INFINITE;
    // Of a row that is not finite nothing is stored but zeros.
    let keep = select(finite, 0xffff_ffffu32, 0u32);
    let scale_bits = select_bits(finite, row_scale_bits(amax));
    let mut scale = f32::reinterpret(scale_bits);
    let mut unit = f32::reinterpret(comptime!(254u32 << 23) - scale_bits);
    if inside && unit_pos == 0 {
        // Bits of NaN: some compilers take a constant NaN for a mistake.
        units[row] = f32::reinterpret(select(finite, u32::reinterpret(unit), 0x7fc0_0000u32 | zero));
    }

    // The decoded value may exceed the largest f32: half the row, in doubled units, has the same codes.
    let huge = finite && amax >= comptime!(2f32.powi(127).to_bits());
    if huge {
        #[unroll]
        for i in 0..comptime!(plan.blocks * 16) {
            v[i] = v[i] * 0.5;
        }
        #[unroll]
        for b in 0..plan.blocks {
            block_amax[b] = u32::reinterpret(f32::reinterpret(block_amax[b]) * 0.5);
        }
        scale *= 2.0;
        unit *= 0.5;
    }
    #[unroll]
    for b in 0..plan.blocks {
        let block = comptime!(b * plan.units) + unit_pos;
        let (low, high, byte) = encode_block(
            &mut v,
            block_amax[b],
            scale,
            unit,
            comptime!(b * 16),
            comptime!(plan.kind != Kind::None),
            plan,
        );
        bytes[block] = byte & keep;
        if inside && block < steps * 4 {
            codes[row * (steps * 4) + block] = pair(low & keep, high & keep);
        }
    }
    if comptime!(plan.kind != Kind::None) {
        if huge {
            #[unroll]
            for i in 0..comptime!(plan.blocks * 16) {
                v[i] = v[i] * 2.0;
            }
            scale *= 0.5;
            unit *= 2.0;
        }
        if comptime!(plan.kind == Kind::Mask) {
            #[unroll]
            for b in 0..plan.blocks {
                let block = comptime!(b * plan.units) + unit_pos;
                let mut selected = 0u32;
                if block * 16 < k {
                    selected = mask[block / 2] >> u32::cast_from((block % 2) * 16);
                }
                #[unroll]
                for j in 0..16usize {
                    if (selected >> comptime!(j as u32)) & 1u32 == 0u32 {
                        v[comptime!(b * 16 + j)] = 0.0;
                    }
                }
            }
        }
        if comptime!(plan.kind.per_token()) {
            selection::keep_largest(&mut v, &mut reduce, k, count, zero, plan);
        }
        #[unroll]
        for b in 0..plan.blocks {
            let block = comptime!(b * plan.units) + unit_pos;
            let amax = largest_magnitude(&v, comptime!(b * 16));
            let (low, high, byte) = encode_block(&mut v, amax, scale, unit, comptime!(b * 16), false, plan);
            bytes[comptime!(plan.units * plan.blocks) + block] = byte & keep;
            if inside && block < steps * 4 {
                codes[(row + tokens as usize) * (steps * 4) + block] = pair(low & keep, high & keep);
            }
        }
    }
    sync_cube();
    if inside {
        for step in range_stepped(unit_pos, steps, plan.units) {
            block_scales[row * steps + step] = scale_word(&bytes, step * 4);
            if comptime!(plan.kind != Kind::None) {
                block_scales[(row + tokens as usize) * steps + step] =
                    scale_word(&bytes, comptime!(plan.units * plan.blocks) + step * 4);
            }
        }
    }
}

/// 16 elements from column `column` on, into `v[at..]`.
#[cube]
fn load_block<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    v: &mut Array<f32>,
    row_start: usize,
    column: usize,
    column_stride: usize,
    #[comptime] at: usize,
    #[comptime] load: Load,
) {
    let n = N::value();
    if comptime!(load == Load::Vectors) {
        let first = (row_start + column) / n;
        #[unroll]
        for i in 0..comptime!(16 / n) {
            let vector = x[first + i];
            #[unroll]
            for j in 0..n {
                v[comptime!(at + i * n + j)] = f32::cast_from(vector[j]);
            }
        }
    } else if comptime!(load == Load::WordVectors) {
        let first = (row_start + column) / 8;
        #[unroll]
        for i in 0..2usize {
            let vector = x[first + i];
            #[unroll]
            for j in 0..4usize {
                let word = u32::cast_from(vector[j]);
                v[comptime!(at + 8 * i + 2 * j)] = f32::reinterpret(word << 16u32);
                v[comptime!(at + 8 * i + 2 * j + 1)] = f32::reinterpret(word & 0xffff_0000u32);
            }
        }
    } else {
        #[unroll]
        for j in 0..16usize {
            let index = row_start + (column + j) * column_stride;
            if comptime!(load == Load::Elements) {
                let element = x[index];
                v[comptime!(at + j)] = f32::cast_from(element[0usize]);
            } else {
                let vector = x[index / 2];
                let word = u32::cast_from(vector[0usize]) >> u32::cast_from((index % 2) * 16);
                v[comptime!(at + j)] = f32::reinterpret(word << 16u32);
            }
        }
    }
}

/// Bits of the row's encode scale: [`row_encode_scale`](crate::nvfp4::row_encode_scale) from the bits of the amax.
#[cube]
fn row_scale_bits(amax: u32) -> u32 {
    let exponent = i32::cast_from(amax >> 23u32) - 127;
    let above = select((amax & 0x7f_ffffu32) > 0x28_0000u32, 1, 0);
    let scale = min(max(11 - exponent - above, -126), 126) + 127;
    let bits = u32::cast_from(scale) << 23u32;
    select(amax == 0u32, 0x3f80_0000u32, bits)
}

/// The scale's bits, those of 1 for a row that is not finite.
#[cube]
fn select_bits(finite: bool, bits: u32) -> u32 {
    select(finite, bits, 0x3f80_0000u32)
}

/// Bits of the largest magnitude in `v[at..at + 16]`; more than those of infinity if there is a NaN.
#[cube]
fn largest_magnitude(v: &Array<f32>, #[comptime] at: usize) -> u32 {
    let mut largest = 0u32;
    #[unroll]
    for j in 0..16usize {
        largest = max(largest, u32::reinterpret(v[comptime!(at + j)]) & 0x7fff_ffffu32);
    }
    largest
}

/// Encodes `v[at..at + 16]`: two words of codes and the scale's byte; leaves what the codes do not cover when asked to.
#[cube]
fn encode_block(
    v: &mut Array<f32>,
    amax: u32,
    scale: f32,
    unit: f32,
    #[comptime] at: usize,
    #[comptime] residual: bool,
    #[comptime] plan: Plan,
) -> (u32, u32, u32) {
    let byte = e4m3_encode(min(f32::reinterpret(amax) * (scale * SIXTH), f32::MAX));
    let value = e4m3_decode(byte);
    let reciprocal = if comptime!(plan.nvidia) {
        min(1.0 / value, f32::MAX)
    } else {
        reciprocal(byte)
    };
    let inverse = min(reciprocal * scale, f32::MAX);
    let step = value * unit;
    let low = encode_half(v, inverse, step, at, residual, plan);
    let high = encode_half(v, inverse, step, comptime!(at + 8), residual, plan);
    (low, high, byte)
}

/// Encodes eight values to a word.
///
/// Magnitudes and signs are collected apart, a shift and an addition a value each; [`e2m1_biased`]'s bias is taken off the
/// word once.
#[cube]
fn encode_half(
    v: &mut Array<f32>,
    inverse: f32,
    step: f32,
    #[comptime] at: usize,
    #[comptime] residual: bool,
    #[comptime] plan: Plan,
) -> u32 {
    let mut word = 0u32;
    let mut signs = 0u32;
    #[unroll]
    for i in 0..8usize {
        let j = comptime!(at + 7 - i);
        let x = v[j];
        let biased = e2m1_biased((x * inverse).abs());
        word = (word << 4u32) + biased;
        signs = (signs << 1u32) | (u32::reinterpret(x) >> 31u32);
        if comptime!(residual) {
            v[j] = x - e2m1_value(biased, u32::reinterpret(x) & 0x8000_0000u32, plan.nvidia) * step;
        }
    }
    // One bit to every fourth.
    let signs = (signs | (signs << 12u32)) & 0x000f_000fu32;
    let signs = (signs | (signs << 6u32)) & 0x0303_0303u32;
    let signs = (signs | (signs << 3u32)) & 0x1111_1111u32;
    (word - comptime!(BIASES)) | (signs << 3u32)
}

/// `1 / e4m3(byte)`, correctly rounded, and the largest f32 for byte 0.
///
/// `1/(8 + m)` for the eight mantissas, times a power of two: a reciprocal's mantissa does not depend on the exponent.
#[cube]
fn reciprocal(byte: u32) -> f32 {
    // A normal number is (8 + m) · 2^(e - 10). A subnormal, m · 2^-9, becomes one by shifting m up to its hidden bit.
    let subnormal = byte < 8u32;
    let shift = select(byte < 2u32, 3u32, select(byte < 4u32, 2u32, 1u32));
    let mantissa = select(subnormal, byte << shift, byte) & 7u32;
    let power = select(subnormal, 9u32 + shift, 10u32 - (byte >> 3u32));
    let result = f32::reinterpret(mantissa_reciprocal(mantissa) + (power << 23u32));
    select(byte == 0u32, f32::MAX, result)
}

/// Bits of `1/(8 + m)`.
#[cube]
fn mantissa_reciprocal(m: u32) -> u32 {
    let low = select(
        m < 2u32,
        select(
            m == 0u32,
            comptime!((1.0f32 / 8.0).to_bits()),
            comptime!((1.0f32 / 9.0).to_bits()),
        ),
        select(
            m == 2u32,
            comptime!((1.0f32 / 10.0).to_bits()),
            comptime!((1.0f32 / 11.0).to_bits()),
        ),
    );
    let high = select(
        m < 6u32,
        select(
            m == 4u32,
            comptime!((1.0f32 / 12.0).to_bits()),
            comptime!((1.0f32 / 13.0).to_bits()),
        ),
        select(
            m == 6u32,
            comptime!((1.0f32 / 14.0).to_bits()),
            comptime!((1.0f32 / 15.0).to_bits()),
        ),
    );
    select(m < 4u32, low, high)
}

#[cube]
fn pair(low: u32, high: u32) -> Vector<u32, Const<2>> {
    let mut vector = Vector::<u32, Const<2>>::empty();
    vector[0usize] = low;
    vector[1usize] = high;
    vector
}

/// Four bytes from `at` on as a word.
#[cube]
fn scale_word(bytes: &SharedMemory<u32>, at: usize) -> u32 {
    bytes[at] | (bytes[at + 1] << 8u32) | (bytes[at + 2] << 16u32) | (bytes[at + 3] << 24u32)
}
