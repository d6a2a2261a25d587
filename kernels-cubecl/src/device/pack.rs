//! Weights to codes: the amax of a sharing group first, then codes and block scales, dense and per expert, from f32
//! masters in any layout.
//!
//! TransformerEngine's recipe divides: `1/S` and `1/(sf · 1/S)`. Where a device's division is not correctly rounded
//! ([`divides_exactly`] finds out), [`Packer`] packs on the host.
use super::K_STEP;
use super::check::check_len;
use super::format::{INFINITE, e2m1_encode, e4m3_decode, e4m3_encode};
use super::matrix::{Error, PackedWeight, allocate, array, upload};
use crate::nvfp4::SIXTH;
use crate::{BLOCK, WeightLayout};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube in all kernels of this file.
const UNITS: u32 = 256;

/// Largest magnitude of each expert of a sharing group, filled by one call of [`Amax::include`] for each of its weights.
#[derive(Clone, Debug)]
pub struct Amax {
    /// `[experts]`: bits of the largest magnitude, NaN ignored.
    pub(super) largest: Handle,
    /// `[experts]`: the same with NaN, so that at least the bits of infinity when a value is not finite.
    pub(super) worst: Handle,
    pub(super) experts: usize,
}

impl Amax {
    /// Of nothing: 0.
    pub fn new<R: Runtime>(client: &ComputeClient<R>, experts: usize) -> Self {
        let zeros = vec![0u32; experts];
        Self {
            largest: upload(client, u32::as_bytes(&zeros)),
            worst: upload(client, u32::as_bytes(&zeros)),
            experts,
        }
    }

    /// Includes a weight, `[experts, rows · k]` f32 without gaps.
    pub fn include<R: Runtime>(&self, client: &ComputeClient<R>, w: &Handle, values: usize) {
        if values == 0 || self.experts == 0 {
            return;
        }
        // Enough cubes to fill a large device, each with many values.
        let cubes = values.div_ceil(UNITS as usize * 16).clamp(1, 1024);
        // SAFETY: indices are checked against `values`.
        unsafe {
            largest_magnitude::launch_unchecked::<R>(
                client,
                CubeCount::Static(cubes as u32, self.experts as u32, 1),
                CubeDim::new_1d(UNITS),
                array(w, values * self.experts),
                array(&self.largest, self.experts),
                array(&self.worst, self.experts),
                values as u32,
                cubes as u32,
            );
        }
    }

    /// Whether each expert's values are finite; waits for the device. For the check after a sync, not for a forward pass.
    ///
    /// # Errors
    /// The device could not be read.
    pub fn read_finite<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<Vec<bool>, Error> {
        let worst = super::matrix::read::<R, u32>(client, &self.worst, self.experts, "amax of a weight")?;
        Ok(worst.into_iter().map(|bits| bits < INFINITE).collect())
    }
}

/// Packs weights where the bits come out right: on the device if it divides exactly, else on the host.
#[derive(Clone, Copy, Debug)]
pub struct Packer {
    on_device: bool,
}

impl Packer {
    /// Tries the device's division, and logs if weights will be packed on the host. Waits for the device: once, when a
    /// backend starts.
    ///
    /// # Errors
    /// The device could not be read.
    pub fn new<R: Runtime>(client: &ComputeClient<R>) -> Result<Self, Error> {
        let on_device = divides_exactly(client)?;
        if !on_device {
            tracing::warn!("this device's division is not correctly rounded: weights are packed on the host");
        }
        Ok(Self { on_device })
    }

    /// Whether weights stay on the device.
    pub fn is_on_device(self) -> bool {
        self.on_device
    }

    /// One that packs on the host whatever the device can do.
    pub fn on_host() -> Self {
        Self { on_device: false }
    }

    /// [`pack_weight`], or the same bits from the host, which waits for the device.
    ///
    /// # Errors
    /// As [`pack_weight`]; on the host a value that is not finite is refused, and the device could fail to be read.
    pub fn pack<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        w: &Handle,
        shape: [usize; 3],
        layout: WeightLayout,
        amax: &Amax,
    ) -> Result<PackedWeight, Error> {
        let [experts, rows, k] = shape;
        if self.on_device || experts * rows * k == 0 {
            return pack_weight(client, w, shape, layout, amax);
        }
        check_len("experts of an amax", experts, amax.experts)?;
        let values = super::matrix::read::<R, f32>(client, w, experts * rows * k, "a weight")?;
        let largest = super::matrix::read::<R, f32>(client, &amax.largest, experts, "amax of a weight")?;
        let experts = values.chunks(rows * k).zip(largest);
        let pack = |(w, amax): (&[f32], f32)| crate::host::quantize_weight(w, rows, k, layout, Some(amax));
        let packed = experts.map(pack).collect::<Result<Vec<_>, _>>()?;
        let views: Vec<_> = packed.iter().map(crate::Nvfp4Weight::view).collect();
        PackedWeight::from_host(client, &views)
    }
}

/// Packs f32 masters, `[experts, rows, k]` in `layout` without gaps, under the outer scales of a group's `amax`.
///
/// The primitive: NaN encodes as +6 and infinities saturate, as TransformerEngine has it. Whether the weight was finite,
/// [`Amax::read_finite`] tells.
///
/// # Errors
/// `k` is not a multiple of 16, or `amax` is of another number of experts.
pub fn pack_weight<R: Runtime>(
    client: &ComputeClient<R>,
    w: &Handle,
    [experts, rows, k]: [usize; 3],
    layout: WeightLayout,
    amax: &Amax,
) -> Result<PackedWeight, Error> {
    if !k.is_multiple_of(BLOCK) {
        return Err(crate::Error::UnalignedK { k }.into());
    }
    check_len("experts of an amax", experts, amax.experts)?;
    let kp = k.next_multiple_of(K_STEP);
    let packed = PackedWeight {
        codes: allocate(client, experts * rows * kp / 8),
        block_scales: allocate(client, experts * rows * kp / 64),
        outer_scales: allocate(client, experts),
        experts,
        rows,
        k,
    };
    if experts * rows * k == 0 {
        return Ok(packed);
    }
    let steps = rows * (kp / 64);
    // SAFETY: indices are checked against the number of steps, and columns against `k`.
    unsafe {
        pack_steps::launch_unchecked::<R>(
            client,
            CubeCount::Static(steps.div_ceil(UNITS as usize) as u32, experts as u32, 1),
            CubeDim::new_1d(UNITS),
            array(w, experts * rows * k),
            array(&amax.largest, experts),
            array(&packed.codes, experts * rows * kp / 8),
            array(&packed.block_scales, experts * rows * kp / 64),
            array(&packed.outer_scales, experts),
            rows as u32,
            k as u32,
            layout == WeightLayout::Transposed,
        );
    }
    Ok(packed)
}

/// Whether f32 division is correctly rounded on this device, tried on the divisions of packing. Waits for the device:
/// ask once, when a backend starts.
///
/// # Errors
/// The device could not be read.
pub fn divides_exactly<R: Runtime>(client: &ComputeClient<R>) -> Result<bool, Error> {
    let mut pairs = Vec::new();
    let mut state = 0x9e37_79b9u32;
    for i in 0..16_384u32 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Positive, of moderate exponents: operands of packing.
        let b = f32::from_bits((state >> 9) | (110 + i % 36) << 23);
        pairs.extend([if i % 2 == 0 { 1.0 } else { 2688.0 }, b]);
    }
    let out = allocate(client, pairs.len() / 2);
    // SAFETY: one unit for each of the quotients.
    unsafe {
        divide::launch_unchecked::<R>(
            client,
            CubeCount::Static((pairs.len() / 2) as u32 / UNITS, 1, 1),
            CubeDim::new_1d(UNITS),
            array(&upload(client, f32::as_bytes(&pairs)), pairs.len()),
            array(&out, pairs.len() / 2),
        );
    }
    let quotients = super::matrix::read::<R, f32>(client, &out, pairs.len() / 2, "quotients")?;
    Ok(pairs
        .chunks_exact(2)
        .zip(quotients)
        .all(|(pair, q)| pair[0] / pair[1] == q))
}

#[cube(launch_unchecked)]
fn divide(pairs: &Array<f32>, out: &mut Array<f32>) {
    out[ABSOLUTE_POS] = pairs[2 * ABSOLUTE_POS] / pairs[2 * ABSOLUTE_POS + 1];
}

/// Grid: x = `cubes`, y = experts.
#[cube(launch_unchecked)]
fn largest_magnitude(
    w: &Array<f32>,
    largest: &mut Array<Atomic<u32>>,
    worst: &mut Array<Atomic<u32>>,
    values: u32,
    cubes: u32,
) {
    let mut shared = SharedMemory::<u32>::new(2 * UNITS as usize);
    let expert = CUBE_POS_Y as usize;
    let unit_pos = UNIT_POS as usize;
    let first = CUBE_POS_X as usize * UNITS as usize + unit_pos;
    let mut own = 0u32;
    let mut own_worst = 0u32;
    for i in range_stepped(first, values as usize, cubes as usize * UNITS as usize) {
        let bits = u32::reinterpret(w[expert * values as usize + i]) & 0x7fff_ffffu32;
        own_worst = max(own_worst, bits);
        own = max(own, select(bits > INFINITE, 0u32, bits));
    }
    shared[unit_pos] = own;
    shared[UNITS as usize + unit_pos] = own_worst;
    #[unroll]
    for level in 0..8u32 {
        let width = comptime!(UNITS as usize >> (level + 1));
        sync_cube();
        if unit_pos < width {
            shared[unit_pos] = max(shared[unit_pos], shared[unit_pos + width]);
            let at = UNITS as usize + unit_pos;
            shared[at] = max(shared[at], shared[at + width]);
        }
    }
    sync_cube();
    if unit_pos == 0 {
        largest[expert].fetch_max(shared[0]);
        worst[expert].fetch_max(shared[UNITS as usize]);
    }
}

/// One unit for 64 values of a row. Grid: x over rows and steps, y = experts.
#[cube(launch_unchecked)]
fn pack_steps(
    w: &Array<f32>,
    largest: &Array<u32>,
    codes: &mut Array<Vector<u32, Const<2>>>,
    block_scales: &mut Array<u32>,
    outer_scales: &mut Array<f32>,
    rows: u32,
    k: u32,
    #[comptime] transposed: bool,
) {
    let rows = rows as usize;
    let k = k as usize;
    let steps = k.div_ceil(64usize);
    let at = CUBE_POS_X as usize * UNITS as usize + UNIT_POS as usize;
    let expert = CUBE_POS_Y as usize;
    if at < rows * steps {
        // Neighbouring units read neighbouring values.
        let mut row = at / steps;
        let mut step = at % steps;
        if transposed {
            row = at % rows;
            step = at / rows;
        }
        let amax = f32::reinterpret(largest[expert]);
        let quotient = min(2688.0 / amax, f32::MAX);
        let scale = select(amax == 0.0 || quotient == 0.0, 1.0f32, quotient);
        let outer = 1.0 / scale;
        if at == 0 {
            outer_scales[expert] = outer;
        }
        let packed_row = expert * rows + row;
        let mut word = 0u32;
        #[unroll]
        for b in 0..4usize {
            let column = step * 64 + comptime!(b * 16);
            let mut low = 0u32;
            let mut high = 0u32;
            if column < k {
                let mut v = Array::<f32>::new(16usize);
                let mut block_amax = 0u32;
                #[unroll]
                for j in 0..16usize {
                    let mut index = packed_row * k + column + j;
                    if transposed {
                        index = (expert * k + column + j) * rows + row;
                    }
                    let x = w[index];
                    let bits = u32::reinterpret(x) & 0x7fff_ffffu32;
                    block_amax = max(block_amax, select(bits > INFINITE, 0u32, bits));
                    v[j] = x;
                }
                let byte = e4m3_encode(min(f32::reinterpret(block_amax) * (scale * SIXTH), f32::MAX));
                let inverse = min(1.0 / (e4m3_decode(byte) * outer), f32::MAX);
                #[unroll]
                for j in 0..16usize {
                    let x = u32::reinterpret(v[j]);
                    let magnitude = x & 0x7fff_ffffu32;
                    let code = e2m1_encode((f32::reinterpret(magnitude) * inverse).abs());
                    // NaN is +6, whatever its sign.
                    let signed = select(magnitude > INFINITE, 7u32, code | (x >> 28u32) & 8u32);
                    let nibble = signed << comptime!(4 * (j as u32 % 8));
                    if comptime!(j < 8) {
                        low |= nibble;
                    } else {
                        high |= nibble;
                    }
                }
                word |= byte << comptime!(8 * b as u32);
            }
            let mut pair = Vector::<u32, Const<2>>::empty();
            pair[0usize] = low;
            pair[1usize] = high;
            codes[packed_row * steps * 4 + step * 4 + b] = pair;
        }
        block_scales[packed_row * steps + step] = word;
    }
}
