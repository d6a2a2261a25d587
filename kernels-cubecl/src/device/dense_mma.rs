//! Products of dense f32 matrices on bf16 tensor cores, grouped by expert or of one weight.
//!
//! An f32 is split into two bf16: `high` is the value rounded, `low` what that leaves, rounded. Of the four products of two
//! values the tensor core makes three, `high · high + high · low + low · high`, and adds them up in f32. A split leaves
//! 2^-16 of its value and the fourth product is 2^-16 of the whole, so that a sum errs by
//! `(3 · 2^-16 + (k + 8) · 2^-23) · Σ|x · w|` at most, of values above 2^-117. Infinity, and what rounds to no finite bf16 (above
//! 3.39e38), makes NaN.
//!
//! Both products are one: lines of the left operand times lines of the right, summed along their depth. In the matmul lines
//! are tokens and columns of the weight, and the depth is `k`; in the outer product lines are columns, and the depth is an
//! expert's tokens. A cube takes a tile of the output. For each step of the depth it splits both operands' values on the
//! way to shared memory, where they lie as they do in memory: `ldmatrix` transposes where it has to. Two buffers: while
//! warps multiply one step, the next one's values are on their way. One barrier a step.
//!
//! The order of a sum depends on the depth alone, not on the tile or on how the operands are read: 16 after 16, and of
//! those `low · high` before `high · low` before `high · high`.
use super::grouping::{Groups, locate, rows_of_expert};
use super::matrix::{Matrix, MatrixStack, array};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;

/// An operand's tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Side {
    /// Lines of the tile.
    lines: usize,
    /// Of the summed axis, at a time.
    depth: usize,
    /// Units that load it.
    threads: usize,
    /// Neighbours in memory lie along the depth, not across lines.
    along_depth: bool,
    /// Four neighbours at a time: they are aligned, and all or none of them are inside.
    vectors: bool,
}

impl Side {
    /// Neighbours lie along the axis of stride 1. `extent` is its length, of which four values must not stick out;
    /// `aligned` are what a vector's place is a multiple of.
    fn new(handle: &Handle, along_depth: bool, stride: usize, extent: usize, aligned: &[usize]) -> Self {
        let fits = |n: &usize| n.is_multiple_of(4);
        Self {
            lines: 0,
            depth: 0,
            threads: 0,
            along_depth,
            vectors: stride == 1
                && fits(&extent)
                && aligned.iter().all(fits)
                && handle.offset_start.unwrap_or(0).is_multiple_of(16),
        }
    }

    /// Groups of four values a unit.
    fn loads(&self) -> usize {
        self.size() / self.threads
    }

    /// Groups of eight values in a row of shared memory.
    fn chunks(&self) -> usize {
        (if self.along_depth { self.depth } else { self.lines }) / 8
    }

    /// Rows of shared memory from one load of a unit to the next.
    fn rows(&self) -> usize {
        self.threads / (2 * self.chunks())
    }

    /// Groups of four values in shared memory: of the high halves, and the same of the low ones.
    fn size(&self) -> usize {
        self.lines * self.depth / 4
    }
}

/// What is compiled into a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Warps along the output's rows and columns.
    warps: (usize, usize),
    /// MMA tiles of a warp: 16 rows by 8 columns.
    tiles: (usize, usize),
    left: Side,
    right: Side,
    /// Outputs are stored in pairs.
    pairs: bool,
}

impl Plan {
    /// A tile for so many rows and columns of an expert's product; the bits are the same in every tile.
    fn new(rows: usize, columns: usize, left: Side, right: Side) -> Self {
        // Few rows are a matter of memory, so that they take more of it at a time. With many, a warp has 64 × 64 outputs, for
        // which it reads shared memory the least, and registers for no deeper steps: two cubes fit a multiprocessor.
        let (warps, tiles, depth) = if rows <= 32 || columns <= 64 {
            ((1, 4), (2, 2), 32)
        } else {
            ((2, 2), (4, 8), 16)
        };
        let side = |side, lines| Side {
            lines,
            depth,
            threads: warps.0 * warps.1 * 32,
            ..side
        };
        Self {
            warps,
            tiles,
            left: side(left, warps.0 * tiles.0 * 16),
            right: side(right, warps.1 * tiles.1 * 8),
            pairs: columns.is_multiple_of(2),
        }
    }
}

/// Whether the device can run these kernels.
pub(super) fn is_available<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let matmul = &properties.features.matmul;
    let scalar = |kind| StorageType::Scalar(ElemType::Float(kind));
    let (bf16, f32) = (scalar(FloatKind::BF16), scalar(FloatKind::F32));
    let mma = matmul
        .mma
        .iter()
        .any(|c| (c.a_type, c.b_type, c.cd_type) == (bf16, bf16, f32) && (c.m, c.n, c.k) == (16, 8, 16));
    let planes = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    planes && mma && matmul.ldmatrix.contains(&bf16) && hardware.max_shared_memory_size >= 32 * 1024
}

/// Writes `y` (`[tokens, n]`): `y[t] = x[t] · w[e]` for each row `t` of expert `e`. Without `counts` all rows belong to the only
/// expert.
pub(super) fn launch_matmul<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    w: &MatrixStack,
    counts: Option<&Handle>,
    y: &Handle,
) {
    let [experts, k, n] = w.shape;
    // Tokens of an expert start anywhere, so that vectors across them would not be aligned.
    let left = match x.strides {
        [1, column] if column != 1 => Side::new(&x.handle, false, 0, 0, &[]),
        [row, column] => Side::new(&x.handle, true, column, k, &[row]),
    };
    let right = match w.strides {
        [group, 1, column] if column != 1 => Side::new(&w.handle, true, 1, k, &[group, column]),
        [group, row, column] => Side::new(&w.handle, false, column, n, &[group, row]),
    };
    let plan = Plan::new(x.rows.div_ceil(experts), n, left, right);
    let groups = match counts {
        Some(counts) => Groups::experts(client, counts, experts, x.rows, plan.left.lines, None),
        None => Groups::dense(x.rows, plan.left.lines),
    };
    // SAFETY: rows, columns and depths past the operands' are neither read nor written.
    unsafe {
        multiply::launch_unchecked::<R>(
            client,
            CubeCount::Static(n.div_ceil(plan.right.lines) as u32, groups.tiles as u32, 1),
            CubeDim::new_1d(plan.left.threads as u32),
            array(&x.handle, x.span()),
            array(&w.handle, w.span()),
            array(groups.table(&x.handle), groups.table_len()),
            array(y, x.rows * n),
            x.rows as u32,
            k as u32,
            n as u32,
            x.strides[0] as u32,
            x.strides[1] as u32,
            w.strides[0] as u32,
            w.strides[1] as u32,
            w.strides[2] as u32,
            groups.is_grouped(),
            plan,
        );
    }
}

/// Writes `out` (`[experts, m, n]`): `x[rows of e]ᵀ · g[rows of e]`. Without `counts` all rows belong to the only expert.
pub(super) fn launch_outer<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    g: &Matrix,
    counts: Option<&Handle>,
    experts: usize,
    out: &Handle,
) {
    let (m, n) = (x.columns, g.columns);
    let side = |operand: &Matrix| match operand.strides {
        [1, column] if column != 1 => Side::new(&operand.handle, true, 0, 0, &[]),
        [row, column] => Side::new(&operand.handle, false, column, operand.columns, &[row]),
    };
    let plan = Plan::new(m, n, side(x), side(g));
    let cubes = |lines: usize, tile: usize| lines.div_ceil(tile) as u32;
    // SAFETY: rows and columns past the operands' are neither read nor written.
    unsafe {
        outer_product::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes(n, plan.right.lines), cubes(m, plan.left.lines), experts as u32),
            CubeDim::new_1d(plan.left.threads as u32),
            array(&x.handle, x.span()),
            array(&g.handle, g.span()),
            array(counts.unwrap_or(&x.handle), experts),
            array(out, experts * m * n),
            x.rows as u32,
            m as u32,
            n as u32,
            x.strides[0] as u32,
            x.strides[1] as u32,
            g.strides[0] as u32,
            g.strides[1] as u32,
            counts.is_some(),
            plan,
        );
    }
}

/// Where an operand's tile lies.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The tile's first value.
    start: usize,
    /// From one line to the next.
    line: usize,
    /// From one depth to the next.
    depth: usize,
    /// Lines that there are, from the tile's first.
    lines: usize,
}

/// Grid: x over columns of the output, y over tiles of tokens.
#[cube(launch_unchecked)]
fn multiply(
    x: &Array<f32>,
    w: &Array<f32>,
    table: &Array<u32>,
    y: &mut Array<f32>,
    tokens: u32,
    k: u32,
    n: u32,
    x_row: u32,
    x_column: u32,
    w_group: u32,
    w_row: u32,
    w_column: u32,
    #[comptime] grouped: bool,
    #[comptime] plan: Plan,
) {
    let (expert, first, last) = locate(table, tokens, plan.left.lines, grouped);
    let n = n as usize;
    let column = CUBE_POS_X as usize * plan.right.lines;
    if first < last {
        let left = Place {
            start: first * x_row as usize,
            line: x_row as usize,
            depth: x_column as usize,
            lines: last - first,
        };
        let right = Place {
            start: expert * w_group as usize + column * w_column as usize,
            line: w_column as usize,
            depth: w_row as usize,
            lines: n - column,
        };
        multiply_tile(x, w, y, left, right, k as usize, first * n + column, n, plan);
    }
}

/// Grid: x over columns of the output, y over its rows, z over experts.
#[cube(launch_unchecked)]
fn outer_product(
    x: &Array<f32>,
    g: &Array<f32>,
    counts: &Array<u32>,
    out: &mut Array<f32>,
    tokens: u32,
    m: u32,
    n: u32,
    x_row: u32,
    x_column: u32,
    g_row: u32,
    g_column: u32,
    #[comptime] grouped: bool,
    #[comptime] plan: Plan,
) {
    let m = m as usize;
    let n = n as usize;
    let expert = CUBE_POS_Z as usize;
    let (first, last) = rows_of_expert(counts, expert, tokens, grouped);
    let row = CUBE_POS_Y as usize * plan.left.lines;
    let column = CUBE_POS_X as usize * plan.right.lines;
    let left = Place {
        start: first * x_row as usize + row * x_column as usize,
        line: x_column as usize,
        depth: x_row as usize,
        lines: m - row,
    };
    let right = Place {
        start: first * g_row as usize + column * g_column as usize,
        line: g_column as usize,
        depth: g_row as usize,
        lines: n - column,
    };
    let start = (expert * m + row) * n + column;
    multiply_tile(x, g, out, left, right, last - first, start, n, plan);
}

/// A tile of the output, from `start`; its rows are `row` apart.
#[cube]
fn multiply_tile(
    left: &Array<f32>,
    right: &Array<f32>,
    out: &mut Array<f32>,
    left_at: Place,
    right_at: Place,
    depths: usize,
    start: usize,
    row: usize,
    #[comptime] plan: Plan,
) {
    let mut left_tile = SharedMemory::<Vector<bf16, Const<4>>>::new_aligned(comptime!(4 * plan.left.size()), 16usize);
    let mut right_tile = SharedMemory::<Vector<bf16, Const<4>>>::new_aligned(comptime!(4 * plan.right.size()), 16usize);
    let mut left_values = Array::<Vector<f32, Const<4>>>::new(comptime!(plan.left.loads()));
    let mut right_values = Array::<Vector<f32, Const<4>>>::new(comptime!(plan.right.loads()));
    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.tiles.0 * plan.tiles.1) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }

    let steps = depths.div_ceil(plan.left.depth);
    let left_from = vectors_from(left_at, plan.left);
    let right_from = vectors_from(right_at, plan.right);
    fetch(left, left_at, &left_from, &mut left_values, 0usize, depths, plan.left);
    fetch(
        right,
        right_at,
        &right_from,
        &mut right_values,
        0usize,
        depths,
        plan.right,
    );
    put(&mut left_tile, &left_values, 0usize, plan.left);
    put(&mut right_tile, &right_values, 0usize, plan.right);
    sync_cube();
    for step in 0..steps {
        // Past the last step these are zeros, which nobody reads: without a branch the compiler mixes this work and the MMAs.
        let next = step + 1;
        let first = next * plan.left.depth;
        fetch(left, left_at, &left_from, &mut left_values, first, depths, plan.left);
        fetch(
            right,
            right_at,
            &right_from,
            &mut right_values,
            first,
            depths,
            plan.right,
        );
        #[unroll]
        for part in 0..comptime!(plan.left.depth / 16) {
            multiply_part(&left_tile, &right_tile, &mut sums, step % 2, part, plan);
        }
        put(&mut left_tile, &left_values, next % 2, plan.left);
        put(&mut right_tile, &right_values, next % 2, plan.right);
        sync_cube();
    }

    let lane = UNIT_POS_X as usize % 32;
    let warp = UNIT_POS_X as usize / 32;
    let line0 = warp / plan.warps.1 * comptime!(plan.tiles.0 * 16) + lane / 4;
    let column0 = warp % plan.warps.1 * comptime!(plan.tiles.1 * 8) + lane % 4 * 2;
    #[unroll]
    for i in 0..comptime!(2 * plan.tiles.0) {
        let line = line0 + comptime!(8 * i);
        if line < left_at.lines {
            #[unroll]
            for j in 0..plan.tiles.1 {
                let column = column0 + comptime!(8 * j);
                let at = start + line * row + column;
                let sum = sums.index(comptime!(i / 2 * plan.tiles.1 + j));
                let values = sum[comptime!(i % 2)];
                if comptime!(plan.pairs) {
                    if column < right_at.lines {
                        let mut pairs = out.to_slice_mut().into_vectorized().with_vector_size::<Const<2>>();
                        pairs[at / 2] = values;
                    }
                } else {
                    #[unroll]
                    for e in 0..2usize {
                        if column + e < right_at.lines {
                            out[at + e] = values[e];
                        }
                    }
                }
            }
        }
    }
}

/// Line and depth of the first four values that a unit loads. Others follow `side.rows()` rows of shared memory later.
#[cube]
fn position(#[comptime] side: Side) -> (usize, usize) {
    let row = UNIT_POS_X as usize / comptime!(2 * side.chunks());
    let column = UNIT_POS_X as usize % comptime!(2 * side.chunks()) * 4;
    if comptime!(side.along_depth) {
        (row, column)
    } else {
        (column, row)
    }
}

/// Where a unit's vectors of the first step lie. A line past the end is another one's, whose products are not stored.
#[cube]
fn vectors_from(at: Place, #[comptime] side: Side) -> Array<usize> {
    let (line, depth) = position(side);
    let mut from = Array::<usize>::new(comptime!(side.loads()));
    #[unroll]
    for i in 0..comptime!(side.loads()) {
        if comptime!(side.along_depth) {
            let line = min(line + comptime!(i * side.rows()), at.lines - 1);
            from[i] = (at.start + line * at.line + depth) / 4;
        } else {
            from[i] = (at.start + min(line, at.lines - 4)) / 4 + (depth + comptime!(i * side.rows())) * (at.depth / 4);
        }
    }
    from
}

/// Loads this unit's values of the step from depth `first`. A depth past the end is zero.
#[cube]
fn fetch(
    source: &Array<f32>,
    at: Place,
    from: &Array<usize>,
    values: &mut Array<Vector<f32, Const<4>>>,
    first: usize,
    depths: usize,
    #[comptime] side: Side,
) {
    let (line, depth) = position(side);
    let depth = first + depth;
    #[unroll]
    for i in 0..comptime!(side.loads()) {
        let mut four = Vector::<f32, Const<4>>::zeroed();
        if comptime!(side.vectors) {
            let vectors = source.to_slice().into_vectorized().with_vector_size::<Const<4>>();
            if comptime!(side.along_depth) {
                if depth < depths {
                    four = vectors[from[i] + first / 4];
                }
            } else {
                if depth + comptime!(i * side.rows()) < depths {
                    four = vectors[from[i] + first * (at.depth / 4)];
                }
            }
        } else {
            #[unroll]
            for j in 0..4usize {
                let (lines, depths_on) = comptime!(if side.along_depth {
                    (i * side.rows(), j)
                } else {
                    (j, i * side.rows())
                });
                let line = min(line + lines, at.lines - 1);
                let depth = depth + depths_on;
                if depth < depths {
                    four[j] = source[at.start + line * at.line + depth * at.depth];
                }
            }
        }
        values[i] = four;
    }
}

/// Splits this unit's values into a buffer of shared memory: high halves, then low ones.
#[cube]
fn put(
    tile: &mut SharedMemory<Vector<bf16, Const<4>>>,
    values: &Array<Vector<f32, Const<4>>>,
    buffer: usize,
    #[comptime] side: Side,
) {
    let row = UNIT_POS_X as usize / comptime!(2 * side.chunks());
    let column = UNIT_POS_X as usize % comptime!(2 * side.chunks());
    let at = buffer * comptime!(2 * side.size()) + column % 2;
    #[unroll]
    for i in 0..comptime!(side.loads()) {
        let four = values[i];
        let mut high = Vector::<u32, Const<2>>::empty();
        let mut low = Vector::<u32, Const<2>>::empty();
        #[unroll]
        for h in 0..2usize {
            let (a, b) = (four[comptime!(2 * h)], four[comptime!(2 * h + 1)]);
            let word = round_pair(a, b);
            high[h] = word;
            low[h] = round_pair(
                a - f32::reinterpret(word << 16u32),
                b - f32::reinterpret(word & 0xffff_0000u32),
            );
        }
        let to = at + chunk_at(row + comptime!(i * side.rows()), column / 2, side);
        tile[to] = Vector::<bf16, Const<4>>::reinterpret(high);
        tile[to + comptime!(side.size())] = Vector::<bf16, Const<4>>::reinterpret(low);
    }
}

/// Two values as bf16, the first in the lower half.
#[cube]
fn round_pair(a: f32, b: f32) -> u32 {
    let mut pair = Vector::<f32, Const<2>>::empty();
    pair[0usize] = a;
    pair[1usize] = b;
    u32::reinterpret(Vector::<bf16, Const<2>>::cast_from(pair))
}

/// Where eight values of a row lie in shared memory. Eight rows' are spread so that they meet no bank twice.
#[cube]
fn chunk_at(row: usize, chunk: usize, #[comptime] side: Side) -> usize {
    let chunks = comptime!(side.chunks());
    let turn =
        row / comptime!(if chunks < 8 { 8 / chunks } else { 1 }) % comptime!(if chunks < 8 { chunks } else { 8 });
    (row * chunks + (chunk ^ turn)) * 2
}

/// Multiplies 16 depths of a buffer.
#[cube]
fn multiply_part(
    left: &SharedMemory<Vector<bf16, Const<4>>>,
    right: &SharedMemory<Vector<bf16, Const<4>>>,
    sums: &mut Sequence<Array<Vector<f32, Const<2>>>>,
    buffer: usize,
    #[comptime] part: usize,
    #[comptime] plan: Plan,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let lane = UNIT_POS_X as usize % 32;
    let warp = UNIT_POS_X as usize / 32;
    // Lanes give the rows of four 8 × 8 matrices, in the order in which the MMA takes them: the left operand's lines first,
    // the right one's depth first.
    let near = lane % 16;
    let far = lane / 16;
    let line0 = warp / plan.warps.1 * comptime!(plan.tiles.0 * 16);
    let column0 = warp % plan.warps.1 * comptime!(plan.tiles.1 * 8);

    // [plane][tile]
    let mut weights = Sequence::<Array<Vector<bf16, Const<2>>>>::new();
    #[unroll]
    for plane in 0..2usize {
        #[unroll]
        for j in 0..comptime!(plan.tiles.1 / 2) {
            let column = column0 + comptime!(16 * j);
            let at = buffer * comptime!(2 * plan.right.size()) + comptime!(plane * plan.right.size());
            let mut from = at;
            if comptime!(plan.right.along_depth) {
                from += chunk_at(column + far * 8 + lane % 8, comptime!(2 * part) + near / 8, plan.right);
            } else {
                from += chunk_at(comptime!(16 * part) + near, column / 8 + far, plan.right);
            }
            let trans = comptime!(!plan.right.along_depth);
            let four = def.load_matrix::<_, Const<2>>(&right.slice(from, from + 2), MatrixIdent::B, 4usize, trans);
            #[unroll]
            for tile in 0..2usize {
                let mut two = Array::<Vector<bf16, Const<2>>>::new(2usize);
                two[0] = four[comptime!(2 * tile)];
                two[1] = four[comptime!(2 * tile + 1)];
                weights.push(two);
            }
        }
    }
    #[unroll]
    for i in 0..plan.tiles.0 {
        let line = line0 + comptime!(16 * i);
        let mut from = buffer * comptime!(2 * plan.left.size());
        if comptime!(plan.left.along_depth) {
            from += chunk_at(line + near, comptime!(2 * part) + far, plan.left);
        } else {
            from += chunk_at(
                comptime!(16 * part) + far * 8 + lane % 8,
                line / 8 + near / 8,
                plan.left,
            );
        }
        let trans = comptime!(!plan.left.along_depth);
        let high = def.load_matrix::<_, Const<2>>(&left.slice(from, from + 2), MatrixIdent::A, 4usize, trans);
        let from = from + comptime!(plan.left.size());
        let low = def.load_matrix::<_, Const<2>>(&left.slice(from, from + 2), MatrixIdent::A, 4usize, trans);
        // Small products first.
        #[unroll]
        for j in 0..plan.tiles.1 {
            let sum = sums.index_mut(comptime!(i * plan.tiles.1 + j));
            def.execute_inplace(&low, weights.index(j), sum);
        }
        #[unroll]
        for j in 0..plan.tiles.1 {
            let sum = sums.index_mut(comptime!(i * plan.tiles.1 + j));
            def.execute_inplace(&high, weights.index(comptime!(plan.tiles.1 + j)), sum);
        }
        #[unroll]
        for j in 0..plan.tiles.1 {
            let sum = sums.index_mut(comptime!(i * plan.tiles.1 + j));
            def.execute_inplace(&high, weights.index(j), sum);
        }
    }
}
