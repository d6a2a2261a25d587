//! Packed operands back to values: fake quantization for training, and weights for whoever needs them dense.
use super::format::{INFINITE, e2m1_decode, e4m3_decode, e4m3_encode};
use super::matrix::{Element, Matrix, PackedActivations, PackedWeight, allocate, array};
use super::pack::Amax;
use crate::WeightLayout;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube in all kernels of this file.
const UNITS: usize = 256;
/// Cubes along x; more go along y.
const WIDTH: usize = 32_768;

/// What is known of a weight before it is packed, on the device.
#[derive(Clone, Debug)]
pub struct WeightCheck {
    /// One word: [`NOT_FINITE`] and [`AMAX_TOO_SMALL`].
    flags: Handle,
}

/// A value, or a given amax, is NaN or infinite.
const NOT_FINITE: u32 = 1;
/// A given amax is below the weight's own.
const AMAX_TOO_SMALL: u32 = 2;

impl WeightCheck {
    /// Checks what `own` has included, and `given` (`[experts]` f32) against it.
    pub fn new<R: Runtime>(client: &ComputeClient<R>, own: &Amax, given: Option<&Handle>) -> Self {
        let flags = allocate(client, 1);
        // SAFETY: both arrays have a word an expert.
        unsafe {
            check_weight::launch_unchecked::<R>(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                array(&own.largest, own.experts),
                array(&own.worst, own.experts),
                array(given.unwrap_or(&own.largest), own.experts),
                array(&flags, 1),
                own.experts as u32,
            );
        }
        Self { flags }
    }

    /// Whether the weight can be packed; waits for the device.
    ///
    /// # Errors
    /// The device could not be read.
    pub fn read_sound<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<bool, super::Error> {
        Ok(super::matrix::read::<R, u32>(client, &self.flags, 1, "check of a weight")?[0] == 0)
    }
}

impl Amax {
    /// `given` (`[experts]` f32, not negative) in place of the magnitudes that were included.
    pub fn replaced_by(&self, given: Handle) -> Self {
        Self {
            largest: given,
            ..self.clone()
        }
    }
}

/// How a weight is decoded.
#[derive(Clone, Copy, Debug)]
pub struct DecodeOptions<'a> {
    /// Order of the values.
    pub layout: WeightLayout,
    /// Outer scales divide the block scales instead of multiplying them (compressed-tensors' convention).
    pub divide: bool,
    /// NaN everywhere where this says that the weight was not finite.
    pub check: Option<&'a WeightCheck>,
}

/// The values of a packed weight, f32 `[experts, rows, k]` in the layout that the options ask for.
pub fn decode_weight<R: Runtime>(client: &ComputeClient<R>, w: &PackedWeight, options: DecodeOptions<'_>) -> Handle {
    let values = w.experts * w.rows * w.k;
    let out = allocate(client, values);
    if values == 0 {
        return out;
    }
    let kp = w.padded_k();
    let words = w.rows * (w.k / 8);
    // SAFETY: words past the last are not read, nor their values written.
    unsafe {
        decode_words::launch_unchecked::<R>(
            client,
            grid(words, w.experts),
            CubeDim::new_1d(UNITS as u32),
            array(&w.codes, w.experts * w.rows * kp / 8),
            array(&w.block_scales, w.experts * w.rows * kp / 64),
            array(&w.outer_scales, w.experts),
            array(options.check.map_or(&w.codes, |check| &check.flags), 1),
            array(&out, values),
            w.rows as u32,
            w.k as u32,
            words as u32,
            options.layout == WeightLayout::Transposed,
            options.divide,
            options.check.is_some(),
        );
    }
    out
}

/// The values that a product sees of quantized activations: both passes, f32 `[tokens, k]`. NaN in rows that were not
/// finite.
pub fn decode_activations<R: Runtime>(client: &ComputeClient<R>, x: &PackedActivations) -> Matrix {
    let values = x.tokens * x.k;
    let out = allocate(client, values);
    if values > 0 {
        let kp = x.padded_k();
        let words = x.tokens * (x.k / 8);
        // SAFETY: words past the last are not read, nor their values written.
        unsafe {
            decode_rows::launch_unchecked::<R>(
                client,
                grid(words, 1),
                CubeDim::new_1d(UNITS as u32),
                array(&x.codes, x.passes * x.tokens * kp / 8),
                array(&x.block_scales, x.passes * x.tokens * kp / 64),
                array(&x.units, x.tokens),
                array(&out, values),
                x.tokens as u32,
                x.k as u32,
                x.passes == 2,
            );
        }
    }
    Matrix::contiguous(out, Element::F32, x.tokens, x.k)
}

/// FP8 weights in device memory: E4M3 bytes `[experts · rows, kp]` and a scale a row.
#[derive(Clone, Debug)]
pub struct Fp8Codes {
    /// `[experts · rows, kp/4]` words.
    pub codes: Handle,
    /// `[experts · rows]` f32.
    pub scales: Handle,
    /// Experts; 1 for a dense layer.
    pub experts: usize,
    /// Rows of an expert, `d_out`.
    pub rows: usize,
    /// Values a row.
    pub k: usize,
    /// Values a row, padded to a multiple of 4.
    pub padded_k: usize,
}

/// The values of FP8 weights, f32 `[experts, k, rows]`.
pub fn decode_weight_fp8<R: Runtime>(client: &ComputeClient<R>, w: &Fp8Codes) -> Handle {
    let values = w.experts * w.rows * w.k;
    let out = allocate(client, values);
    if values > 0 {
        // SAFETY: values past the last are not written.
        unsafe {
            decode_bytes::launch_unchecked::<R>(
                client,
                grid(w.rows * w.k, w.experts),
                CubeDim::new_1d(UNITS as u32),
                array(&w.codes, w.experts * w.rows * w.padded_k / 4),
                array(&w.scales, w.experts * w.rows),
                array(&out, values),
                w.rows as u32,
                w.k as u32,
                w.padded_k as u32,
            );
        }
    }
    out
}

/// Rows that share an FP8 scale: `[rows, k]`, or the columns of `[experts, k, rows]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Axis {
    /// `[tokens, k]`, a scale a token.
    Tokens {
        /// Tokens.
        tokens: usize,
        /// Values of each.
        k: usize,
    },
    /// `[experts, k, rows]`, a scale an output channel of each expert.
    Channels {
        /// Experts.
        experts: usize,
        /// Values of a channel.
        k: usize,
        /// Channels of an expert.
        rows: usize,
    },
}

/// What FP8 makes of f32 values without gaps: `e4m3(x/scale) · scale`, `scale = amax/448`. A row that is not finite is NaN;
/// with a `check` that is, everything.
pub fn fake_quantize_fp8<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    axis: Fp8Axis,
    check: Option<&WeightCheck>,
) -> Handle {
    let (groups, rows, k) = match axis {
        Fp8Axis::Tokens { tokens, k } => (1, tokens, k),
        Fp8Axis::Channels { experts, k, rows } => (experts, rows, k),
    };
    let values = groups * rows * k;
    let out = allocate(client, values);
    if values > 0 {
        let channels = matches!(axis, Fp8Axis::Channels { .. });
        // SAFETY: one cube a row; rows past the last are neither read nor written.
        unsafe {
            round_fp8::launch_unchecked::<R>(
                client,
                grid(rows * UNITS, groups),
                CubeDim::new_1d(UNITS as u32),
                array(x, values),
                array(check.map_or(x, |check| &check.flags), 1),
                array(&out, values),
                rows as u32,
                k as u32,
                channels,
                check.is_some(),
            );
        }
    }
    out
}

/// Cubes for so many units in each of so many groups: x and y over the units, z over the groups.
fn grid(units: usize, groups: usize) -> CubeCount {
    let cubes = units.div_ceil(UNITS);
    CubeCount::Static(cubes.min(WIDTH) as u32, cubes.div_ceil(WIDTH) as u32, groups as u32)
}

/// Position of the cube among those of its group.
#[cube]
fn cube_of_group() -> usize {
    CUBE_POS_Y as usize * WIDTH + CUBE_POS_X as usize
}

#[cube(launch_unchecked)]
fn check_weight(largest: &Array<u32>, worst: &Array<u32>, given: &Array<u32>, flags: &mut Array<u32>, experts: u32) {
    let mut found = 0u32;
    for expert in 0..experts as usize {
        if max(worst[expert], given[expert]) >= INFINITE {
            found |= NOT_FINITE;
        }
        if given[expert] < largest[expert] {
            found |= AMAX_TOO_SMALL;
        }
    }
    flags[0] = found;
}

/// One unit for the eight codes of a word.
#[cube(launch_unchecked)]
fn decode_words(
    codes: &Array<u32>,
    block_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    flags: &Array<u32>,
    out: &mut Array<f32>,
    rows: u32,
    k: u32,
    words: u32,
    #[comptime] transposed: bool,
    #[comptime] divide: bool,
    #[comptime] checked: bool,
) {
    let rows = rows as usize;
    let k = k as usize;
    let steps = k.div_ceil(64usize);
    let at = cube_of_group() * UNITS + UNIT_POS as usize;
    let expert = CUBE_POS_Z as usize;
    if at < words as usize {
        // Neighbouring units write neighbouring values.
        let mut row = at / (k / 8);
        let mut column = at % (k / 8) * 8;
        if comptime!(transposed) {
            row = at % rows;
            column = at / rows * 8;
        }
        let packed_row = expert * rows + row;
        let word = codes[packed_row * steps * 8 + column / 8];
        let byte = block_scales[packed_row * steps + column / 64] >> u32::cast_from(8 * (column / 16 % 4));
        let mut step = e4m3_decode(byte);
        if comptime!(divide) {
            step /= outer_scales[expert];
        } else {
            step *= outer_scales[expert];
        }
        if comptime!(checked) {
            // Not a constant: CUDA's compiler takes no reference to one, others take a constant NaN for a mistake.
            let finite = flags[0] & NOT_FINITE == 0u32;
            step = f32::reinterpret(select(finite, u32::reinterpret(step), 0x7fc0_0000u32));
        }
        #[unroll]
        for j in 0..8usize {
            let mut index = packed_row * k + column + j;
            if comptime!(transposed) {
                index = (expert * k + column + j) * rows + row;
            }
            out[index] = e2m1_decode(word >> comptime!(4 * j as u32)) * step;
        }
    }
}

/// One unit for the eight codes of a word, of both passes.
#[cube(launch_unchecked)]
fn decode_rows(
    codes: &Array<u32>,
    block_scales: &Array<u32>,
    units: &Array<f32>,
    out: &mut Array<f32>,
    tokens: u32,
    k: u32,
    #[comptime] residual: bool,
) {
    let tokens = tokens as usize;
    let k = k as usize;
    let steps = k.div_ceil(64usize);
    let at = cube_of_group() * UNITS + UNIT_POS as usize;
    if at < tokens * (k / 8) {
        let row = at / (k / 8);
        let column = at % (k / 8) * 8;
        let shift = u32::cast_from(8 * (column / 16 % 4));
        let word = codes[row * steps * 8 + column / 8];
        let step = e4m3_decode(block_scales[row * steps + column / 64] >> shift);
        let mut second = 0u32;
        let mut second_step = 0.0f32;
        if comptime!(residual) {
            let row = row + tokens;
            second = codes[row * steps * 8 + column / 8];
            second_step = e4m3_decode(block_scales[row * steps + column / 64] >> shift);
        }
        let unit = units[row];
        #[unroll]
        for j in 0..8usize {
            let shift = comptime!(4 * j as u32);
            let mut value = e2m1_decode(word >> shift) * step;
            if comptime!(residual) {
                value += e2m1_decode(second >> shift) * second_step;
            }
            out[row * k + column + j] = value * unit;
        }
    }
}

/// One unit a value; neighbouring units write neighbouring rows.
#[cube(launch_unchecked)]
fn decode_bytes(codes: &Array<u32>, scales: &Array<f32>, out: &mut Array<f32>, rows: u32, k: u32, padded_k: u32) {
    let rows = rows as usize;
    let k = k as usize;
    let at = cube_of_group() * UNITS + UNIT_POS as usize;
    let expert = CUBE_POS_Z as usize;
    if at < rows * k {
        let row = expert * rows + at % rows;
        let column = at / rows;
        let byte = codes[row * (padded_k as usize / 4) + column / 4] >> u32::cast_from(8 * (column % 4));
        let magnitude = u32::reinterpret(e4m3_decode(byte) * scales[row]);
        out[expert * rows * k + at] = f32::reinterpret(magnitude | ((byte & 128u32) << 24u32));
    }
}

/// One cube a row.
#[cube(launch_unchecked)]
fn round_fp8(
    x: &Array<f32>,
    flags: &Array<u32>,
    out: &mut Array<f32>,
    rows: u32,
    k: u32,
    #[comptime] channels: bool,
    #[comptime] checked: bool,
) {
    let mut shared = SharedMemory::<u32>::new(UNITS);
    let rows = rows as usize;
    let k = k as usize;
    let row = cube_of_group();
    let unit_pos = UNIT_POS as usize;
    // Of the row's first value, and from one value to the next.
    let mut start = row * k;
    let mut stride = 1usize;
    if comptime!(channels) {
        start = CUBE_POS_Z as usize * rows * k + row;
        stride = rows;
    }
    let mut own = 0u32;
    if row < rows {
        for i in range_stepped(unit_pos, k, UNITS) {
            own = max(own, u32::reinterpret(x[start + i * stride]) & 0x7fff_ffffu32);
        }
    }
    shared[unit_pos] = own;
    #[unroll]
    for level in 0..8u32 {
        let width = comptime!(UNITS >> (level + 1));
        sync_cube();
        if unit_pos < width {
            shared[unit_pos] = max(shared[unit_pos], shared[unit_pos + width]);
        }
    }
    sync_cube();
    let largest = shared[0];
    let mut finite = largest < INFINITE;
    if comptime!(checked) {
        finite = finite && flags[0] & NOT_FINITE == 0u32;
    }
    let quotient = f32::reinterpret(largest) / 448.0;
    let scale = select(quotient == 0.0, 1.0f32, quotient);
    if row < rows {
        for i in range_stepped(unit_pos, k, UNITS) {
            let bits = u32::reinterpret(x[start + i * stride]);
            let magnitude = f32::reinterpret(bits & 0x7fff_ffffu32) / scale;
            let value = e4m3_decode(e4m3_encode(magnitude)) * scale;
            let signed = u32::reinterpret(value) | (bits & 0x8000_0000u32);
            out[start + i * stride] = f32::reinterpret(select(finite, signed, 0x7fc0_0000u32));
        }
    }
}
