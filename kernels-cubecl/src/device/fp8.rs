//! The FP8 baseline: W8A8, E4M3 codes with one f32 scale a row, per token for activations and per output channel for
//! weights.
//!
//! The matmul uses FP8 tensor cores where the compiler reaches them. **On Hopper it does not**: there is no `wgmma` in
//! CubeCL, and `mma.sync` on E4M3 is emulated with f16 instructions. Its figures there are an emulation's; compare with
//! cuBLASLt.
//!
//! The tensor-core kernel is made for few rows: weights are the 16-row operand, a warp walks over `k` in chunks of 256 of
//! which each lane holds 64 consecutive values of two rows, and `splits` warps take chunks in turn. More rows come in
//! further cubes.
use super::check::check_len;
use super::format::{INFINITE, e4m3_encode, scale_output};
use super::grouping::{Groups, locate, source_row};
use super::matrix::{Element, Error, Matrix, allocate, array};
use super::route::{MatmulOptions, Route, Routing};
use super::{K_STEP, portable};
use crate::WeightLayout;
use cubecl::cmma::MmaDefinition;
use cubecl::e4m3;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// FP8 rows in device memory: activations, or the weights of one or several experts.
#[derive(Clone, Debug)]
pub struct Fp8Rows {
    /// `[rows, kp/4]` words.
    pub codes: Handle,
    /// `[rows]` f32: `value = e4m3 · scale`; NaN for a row that is not finite.
    pub scales: Handle,
    /// Experts; 1 for activations and dense layers.
    pub experts: usize,
    /// Rows, of all experts together.
    pub rows: usize,
    /// Values a row.
    pub k: usize,
}

impl Fp8Rows {
    /// Values a row, padded.
    pub fn padded_k(&self) -> usize {
        self.k.next_multiple_of(K_STEP)
    }

    /// Copies codes (`[rows, k]`) and scales to the host, for inspection and checkpoints; waits for the device.
    ///
    /// # Errors
    /// The device could not be read.
    pub fn read_back<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<(Vec<u8>, Vec<f32>), Error> {
        let kp = self.padded_k();
        let codes = super::matrix::read_rows(client, &self.codes, self.rows, kp, self.k, "FP8 codes")?;
        Ok((
            codes,
            super::matrix::read(client, &self.scales, self.rows, "FP8 scales")?,
        ))
    }
}

/// Units of a quantization cube.
const UNITS: usize = 256;

/// Quantizes `[tokens, k]` activations, one scale a row.
///
/// # Errors
/// The element type is not one of the device's.
pub fn quantize_fp8<R: Runtime>(client: &ComputeClient<R>, x: &Matrix) -> Result<Fp8Rows, Error> {
    let shape = Shape {
        experts: 1,
        rows: x.rows,
        k: x.columns,
        strides: x.strides,
    };
    match x.element {
        Element::F32 => Ok(encode::<R, f32>(client, &x.handle, x.span(), shape, false)),
        Element::BF16 if !x.element.is_native(client) => {
            Ok(encode::<R, u32>(client, &x.handle, x.span().div_ceil(2), shape, true))
        }
        element if !element.is_native(client) => Err(Error::Unsupported {
            what: format!("quantizing {element:?}"),
            why: "the device lacks the type".into(),
        }),
        Element::F16 => Ok(encode::<R, half::f16>(client, &x.handle, x.span(), shape, false)),
        Element::BF16 => Ok(encode::<R, half::bf16>(client, &x.handle, x.span(), shape, false)),
    }
}

/// Quantizes f32 masters, `[experts, rows, k]` in `layout` without gaps, one scale an output channel. A channel that is not
/// finite gets a scale of NaN.
pub fn pack_weight_fp8<R: Runtime>(
    client: &ComputeClient<R>,
    w: &Handle,
    [experts, rows, k]: [usize; 3],
    layout: WeightLayout,
) -> Fp8Rows {
    let strides = match layout {
        WeightLayout::RowMajor => [k, 1],
        WeightLayout::Transposed => [1, rows],
    };
    encode::<R, f32>(
        client,
        w,
        experts * rows * k,
        Shape {
            experts,
            rows,
            k,
            strides,
        },
        false,
    )
}

struct Shape {
    experts: usize,
    rows: usize,
    k: usize,
    strides: [usize; 2],
}

fn encode<R: Runtime, F: Numeric + CubeElement>(
    client: &ComputeClient<R>,
    x: &Handle,
    scalars: usize,
    shape: Shape,
    words: bool,
) -> Fp8Rows {
    let rows = shape.experts * shape.rows;
    let kp = shape.k.next_multiple_of(K_STEP);
    let encoded = Fp8Rows {
        codes: allocate(client, rows * kp / 4),
        scales: allocate(client, rows),
        experts: shape.experts,
        rows,
        k: shape.k,
    };
    if rows > 0 {
        // SAFETY: indices are checked against the rows and against `k`.
        unsafe {
            encode_rows::launch_unchecked::<F, R>(
                client,
                super::quantize::rows_grid(rows),
                CubeDim::new_1d(UNITS as u32),
                array(x, scalars),
                array(&encoded.codes, rows * kp / 4),
                array(&encoded.scales, rows),
                rows as u32,
                shape.rows as u32,
                shape.k as u32,
                (shape.rows * shape.k) as u32,
                shape.strides[0] as u32,
                shape.strides[1] as u32,
                0,
                words,
            );
        }
    }
    encoded
}

/// One cube a row: its amax, then its codes.
#[cube(launch_unchecked)]
fn encode_rows<F: Numeric>(
    x: &Array<F>,
    codes: &mut Array<u32>,
    scales: &mut Array<f32>,
    rows: u32,
    expert_rows: u32,
    k: u32,
    expert_stride: u32,
    row_stride: u32,
    column_stride: u32,
    zero: u32,
    #[comptime] words: bool,
) {
    let mut shared = SharedMemory::<u32>::new(UNITS);
    let inside = CUBE_POS < rows as usize;
    let row = min(CUBE_POS, rows as usize - 1);
    let base = row / expert_rows as usize * expert_stride as usize + row % expert_rows as usize * row_stride as usize;
    let unit_pos = UNIT_POS as usize;
    let k = k as usize;
    let mut amax = 0u32;
    for column in range_stepped(unit_pos, k, UNITS) {
        let value = load_element(x, base + column * column_stride as usize, words);
        amax = max(amax, u32::reinterpret(value) & 0x7fff_ffffu32);
    }
    shared[unit_pos] = amax;
    #[unroll]
    for level in 0..8u32 {
        let width = comptime!(UNITS >> (level + 1));
        sync_cube();
        if unit_pos < width {
            shared[unit_pos] = max(shared[unit_pos], shared[unit_pos + width]);
        }
    }
    sync_cube();
    let amax = shared[0];
    let finite = amax < INFINITE;
    let quotient = f32::reinterpret(select(finite, amax, 0u32)) / 448.0;
    let scale = select(quotient == 0.0, 1.0f32, quotient);
    if inside {
        if unit_pos == 0 {
            scales[row] = f32::reinterpret(select(finite, u32::reinterpret(scale), 0x7fc0_0000u32 | zero));
        }
        let row_words = k.div_ceil(64usize) * 16;
        for at in range_stepped(unit_pos, row_words, UNITS) {
            let mut word = 0u32;
            #[unroll]
            for j in 0..4usize {
                let column = at * 4 + j;
                if column < k && finite {
                    let quotient = load_element(x, base + column * column_stride as usize, words) / scale;
                    let byte = e4m3_encode(quotient.abs()) | (u32::reinterpret(quotient) >> 24u32) & 128u32;
                    word |= byte << comptime!(8 * j as u32);
                }
            }
            codes[row * row_words + at] = word;
        }
    }
}

#[cube]
fn load_element<F: Numeric>(x: &Array<F>, index: usize, #[comptime] words: bool) -> f32 {
    if comptime!(words) {
        let word = u32::cast_from(x[index / 2]) >> u32::cast_from((index % 2) * 16);
        f32::reinterpret(word << 16u32)
    } else {
        f32::cast_from(x[index])
    }
}

/// `y = x̂ · ŵᵀ` of FP8 operands, `[tokens, rows]`; with a `routing` grouped by expert. Of the routes only
/// [`Route::Portable`] and [`Route::Decode`], which stands for tensor cores here, apply.
///
/// # Errors
/// The operands differ in `k` or experts, or the device lacks the route or the output type.
pub fn matmul_fp8<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Fp8Rows,
    w: &Fp8Rows,
    routing: Option<&Routing>,
    options: MatmulOptions,
) -> Result<Matrix, Error> {
    check_len("contraction length of the activations", w.k, x.k)?;
    if routing.is_none() {
        check_len("experts of a dense matmul", 1, w.experts)?;
    }
    let tensor_cores = has_tensor_cores(client);
    let route = options
        .route
        .unwrap_or(if tensor_cores { Route::Decode } else { Route::Portable });
    if !(route == Route::Portable || route == Route::Decode && tensor_cores) {
        return Err(Error::Unsupported {
            what: format!("{route:?} for FP8"),
            why: "it lacks the instructions".into(),
        });
    }
    if !options.output.is_native(client) {
        let what = format!("{:?} output", options.output);
        return Err(Error::Unsupported {
            what,
            why: "it has no such type".into(),
        });
    }
    let tokens = routing.map_or(x.rows, |routing| routing.tokens);
    let rows = w.rows / w.experts.max(1);
    tracing::debug!(?route, tokens, rows, k = w.k, experts = w.experts, "FP8 matmul");
    let y = allocate(client, (tokens * rows * options.output.size()).div_ceil(4));
    if tokens * rows > 0 && x.rows > 0 {
        match options.output {
            Element::F32 => launch::<R, f32>(client, route, x, w, routing, &y),
            Element::F16 => launch::<R, half::f16>(client, route, x, w, routing, &y),
            Element::BF16 => launch::<R, half::bf16>(client, route, x, w, routing, &y),
        }
    }
    Ok(Matrix::contiguous(y, options.output, tokens, rows))
}

/// Whether an FP8 MMA compiles for the device; on sm_89 and sm_90 it may be emulated.
fn has_tensor_cores<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let e4m3 = StorageType::Scalar(ElemType::Float(FloatKind::E4M3));
    let mut shapes = client.properties().features.matmul.mma.iter();
    shapes.any(|c| c.a_type == e4m3 && c.b_type == e4m3 && (c.m, c.n, c.k) == (16, 8, 32))
}

/// What is compiled into a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Warps that share the chunks of `k`; depends on `k` alone.
    splits: usize,
    /// Tiles of 8 tokens.
    tiles: usize,
    grouped: bool,
    gathered: bool,
}

fn launch<R: Runtime, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    route: Route,
    x: &Fp8Rows,
    w: &Fp8Rows,
    routing: Option<&Routing>,
    y: &Handle,
) {
    let groups = |tile: usize| match routing {
        None => Groups::dense(x.rows, tile),
        Some(r) => Groups::experts(client, &r.counts, w.experts, r.tokens, tile, r.gather.as_ref()),
    };
    if route == Route::Portable {
        return portable::launch_fp8::<R, Y>(client, x, w, &groups(portable::TILE), y);
    }
    let (kp, rows) = (x.padded_k(), w.rows / w.experts);
    let each = routing.map_or(x.rows, |r| r.tokens.div_ceil(w.experts));
    let plan = Plan {
        splits: kp.div_ceil(CHUNK).clamp(1, 8),
        tiles: each.div_ceil(8).clamp(1, 4),
        grouped: routing.is_some(),
        gathered: routing.is_some_and(|r| r.gather.is_some()),
    };
    let groups = groups(8 * plan.tiles);
    // SAFETY: rows and chunks past the operands' are read from inside them and count as zero, or are not stored.
    unsafe {
        multiply_fp8::launch_unchecked::<Y, R>(
            client,
            CubeCount::Static(rows.div_ceil(16) as u32, groups.tiles as u32, 1),
            CubeDim::new_1d(32 * plan.splits as u32),
            array(&x.codes, x.rows * kp / 4),
            array(&x.scales, x.rows),
            array(&w.codes, w.rows * kp / 4),
            array(&w.scales, w.rows),
            array(groups.table(&x.scales), groups.table_len()),
            array(groups.gather(&x.scales), groups.gather_len()),
            array(y, groups.tokens * rows),
            groups.tokens as u32,
            rows as u32,
            kp as u32,
            plan,
        );
    }
}

/// Values of `k` that a warp takes at a time.
const CHUNK: usize = 256;

/// Grid: x over rows of the weight, y over tiles of tokens.
#[cube(launch_unchecked)]
fn multiply_fp8<Y: Float>(
    x_codes: &Array<Vector<u32, Const<4>>>,
    x_scales: &Array<f32>,
    w_codes: &Array<Vector<u32, Const<4>>>,
    w_scales: &Array<f32>,
    table: &Array<u32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    tokens: u32,
    rows: u32,
    kp: u32,
    #[comptime] plan: Plan,
) {
    let (expert, first, last) = locate(table, tokens, comptime!(8 * plan.tiles), plan.grouped);
    if first < last {
        multiply_fp8_tile::<Y>(
            x_codes,
            x_scales,
            w_codes,
            w_scales,
            gather,
            y,
            rows as usize,
            kp as usize,
            expert,
            first,
            last,
            plan,
        );
    }
}

#[cube]
fn multiply_fp8_tile<Y: Float>(
    x_codes: &Array<Vector<u32, Const<4>>>,
    x_scales: &Array<f32>,
    w_codes: &Array<Vector<u32, Const<4>>>,
    w_scales: &Array<f32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    rows: usize,
    kp: usize,
    expert: usize,
    first: usize,
    last: usize,
    #[comptime] plan: Plan,
) {
    let def = MmaDefinition::<e4m3, e4m3, f32>::new(16usize, 8usize, 32usize);
    let lane = UNIT_POS_PLANE as usize;
    let split = UNIT_POS as usize / 32;
    let row0 = CUBE_POS_X as usize * 16;
    let vectors = kp / 16;
    let mut w_at = Array::<u32>::new(2usize);
    #[unroll]
    for h in 0..2usize {
        w_at[h] = u32::cast_from((expert * rows + min(row0 + lane / 4 + comptime!(8 * h), rows - 1)) * vectors);
    }
    let mut x_at = Array::<u32>::new(plan.tiles);
    #[unroll]
    for b in 0..plan.tiles {
        let token = min(first + comptime!(8 * b) + lane / 4, last - 1);
        let source = source_row(gather, token, plan.gathered);
        x_at[b] = u32::cast_from(source * vectors);
    }
    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..plan.tiles {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }
    let chunks = kp.div_ceil(CHUNK);
    let piece = lane % 4 * 4;
    let mut codes = Array::<Vector<u32, Const<4>>>::new(8usize);
    load_chunk(w_codes, &w_at, &mut codes, split * 16 + piece, vectors);
    for chunk in range_stepped(split, chunks, plan.splits) {
        let at = chunk * 16 + piece;
        let mut now = Array::<Vector<u32, Const<4>>>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            now[i] = codes[i];
        }
        if chunk + plan.splits < chunks {
            load_chunk(w_codes, &w_at, &mut codes, at + comptime!(plan.splits * 16), vectors);
        }
        #[unroll]
        for v in 0..4usize {
            #[unroll]
            for b in 0..plan.tiles {
                // A piece past the end counts as zero on this side.
                let mut x = Vector::<u32, Const<4>>::zeroed();
                if at + v < vectors {
                    x = x_codes[x_at[b] as usize + at + v];
                }
                #[unroll]
                for q in 0..2usize {
                    let mut left = Array::<Vector<e4m3, Const<4>>>::new(4usize);
                    let upper = now[comptime!(2 * v)];
                    let lower = now[comptime!(2 * v + 1)];
                    left[0] = Vector::<e4m3, Const<4>>::reinterpret(upper[comptime!(2 * q)]);
                    left[1] = Vector::<e4m3, Const<4>>::reinterpret(lower[comptime!(2 * q)]);
                    left[2] = Vector::<e4m3, Const<4>>::reinterpret(upper[comptime!(2 * q + 1)]);
                    left[3] = Vector::<e4m3, Const<4>>::reinterpret(lower[comptime!(2 * q + 1)]);
                    let mut right = Array::<Vector<e4m3, Const<4>>>::new(2usize);
                    right[0] = Vector::<e4m3, Const<4>>::reinterpret(x[comptime!(2 * q)]);
                    right[1] = Vector::<e4m3, Const<4>>::reinterpret(x[comptime!(2 * q + 1)]);
                    let sum = sums.index_mut(b);
                    def.execute_inplace(&left, &right, sum);
                }
            }
        }
    }
    // [split][tile][element][lane]
    let per_warp = comptime!(plan.tiles * 128);
    let mut partial = SharedMemory::<f32>::new(comptime!(plan.splits * plan.tiles * 128));
    #[unroll]
    for b in 0..plan.tiles {
        let sum = sums.index(b);
        #[unroll]
        for e in 0..4usize {
            let pair = sum[comptime!(e / 2)];
            partial[split * per_warp + comptime!((b * 4 + e) * 32) + lane] = pair[comptime!(e % 2)];
        }
    }
    sync_cube();
    for at in range_stepped(UNIT_POS as usize, per_warp, comptime!(32 * plan.splits)) {
        let token = first + at / 128 * 8 + 2 * (at % 4) + at / 32 % 2;
        let row = row0 + at / 64 % 2 * 8 + at % 32 / 4;
        if token < last && row < rows {
            let mut sum = 0.0f32;
            #[unroll]
            for z in 0..plan.splits {
                sum += partial[at + comptime!(z) * per_warp];
            }
            let source = source_row(gather, token, plan.gathered);
            y[token * rows + row] = Y::cast_from(scale_output(sum, x_scales[source], w_scales[expert * rows + row]));
        }
    }
}

/// Four vectors of both rows, `codes[2v + row]`; a piece past the end is read from the row's start and meets zeros.
#[cube]
fn load_chunk(
    w_codes: &Array<Vector<u32, Const<4>>>,
    w_at: &Array<u32>,
    codes: &mut Array<Vector<u32, Const<4>>>,
    at: usize,
    vectors: usize,
) {
    let at = select(at < vectors, at, 0usize);
    #[unroll]
    for v in 0..4usize {
        #[unroll]
        for h in 0..2usize {
            codes[comptime!(2 * v + h)] = w_codes[w_at[h] as usize + at + v];
        }
    }
}
