//! Products of dense f32 matrices: what is not packed, and the gradients of all of it. For experts, like the packed products, they
//! take the counts from the device and wait for nothing; a row's bits depend on the row and the weight alone. `dense_mma` makes
//! them where there are bf16 tensor cores, the kernels of this file those of experts anywhere.
use super::check::{check_f32, check_len, check_reach};
use super::grouping::{Groups, locate, rows_of_expert};
use super::matrix::{Matrix, MatrixStack, allocate, array};
use super::{Element, Error, dense_mma};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Outputs along either side of a cube.
const TILE: usize = 64;
/// Of the summed axis, at a time.
const DEPTH: usize = 16;
/// Words from one line of a tile to the next; odd, against bank conflicts.
const PITCH: usize = TILE + 1;
/// Units of a cube: 16 × 16, each for 4 × 4 outputs.
const UNITS: usize = 256;

/// In errors.
const PRODUCT: &str = "a dense product";

/// `y[t] = x[t] · w[e]` for each row `t` of expert `e`: `x` is `[tokens, k]` f32, `w` `[experts, k, n]`, `counts` `[experts]`
/// u32 with the sum `tokens`; rows are sorted by expert.
///
/// # Errors
/// The operands differ in `k`, are beyond the reach of 32-bit indices, or `x` is not f32.
pub fn grouped_matmul_dense<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    w: &MatrixStack,
    counts: &Handle,
) -> Result<Matrix, Error> {
    let [experts, k, n] = w.shape;
    check_f32(PRODUCT, x)?;
    check_len("contraction length of the activations", k, x.columns)?;
    check_reach(PRODUCT, w.span())?;
    check_reach(PRODUCT, x.rows.saturating_mul(n))?;
    let y = allocate(client, x.rows * n);
    if x.rows * n > 0 && experts > 0 && dense_mma::is_available(client) {
        dense_mma::launch_matmul(client, x, w, Some(counts), &y);
    } else if x.rows * n > 0 && experts > 0 {
        let groups = Groups::experts(client, counts, experts, x.rows, TILE, None);
        // SAFETY: rows, columns and depths past the operands' are neither read nor written.
        unsafe {
            multiply::launch_unchecked::<R>(
                client,
                CubeCount::Static(n.div_ceil(TILE) as u32, groups.tiles as u32, 1),
                CubeDim::new_2d(16, 16),
                array(&x.handle, x.span()),
                array(&w.handle, w.span()),
                array(groups.table(&x.handle), groups.table_len()),
                array(&y, x.rows * n),
                x.rows as u32,
                k as u32,
                n as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
                w.strides[0] as u32,
                w.strides[1] as u32,
                w.strides[2] as u32,
                w.strides[2] != 1 && w.strides[1] == 1,
            );
        }
    }
    Ok(Matrix::contiguous(y, Element::F32, x.rows, n))
}

/// `dw[e] = x[rows of e]ᵀ · g[rows of e]`, f32 `[experts, m, n]` without gaps, of `x` `[tokens, m]` and `g` `[tokens, n]`; an
/// expert without rows gets zeros.
///
/// # Errors
/// The operands differ in rows, are not f32, or are beyond the reach of 32-bit indices.
pub fn grouped_outer_product<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    g: &Matrix,
    counts: &Handle,
    experts: usize,
) -> Result<Handle, Error> {
    let (m, n) = check_outer(x, g, experts)?;
    let out = allocate(client, experts * m * n);
    if experts * m * n > 0 && dense_mma::is_available(client) {
        dense_mma::launch_outer(client, x, g, Some(counts), experts, &out);
    } else if experts * m * n > 0 {
        // SAFETY: rows and columns past the operands' are neither read nor written.
        unsafe {
            outer_product::launch_unchecked::<R>(
                client,
                CubeCount::Static(n.div_ceil(TILE) as u32, m.div_ceil(TILE) as u32, experts as u32),
                CubeDim::new_2d(16, 16),
                array(&x.handle, x.span()),
                array(&g.handle, g.span()),
                array(counts, experts),
                array(&out, experts * m * n),
                x.rows as u32,
                m as u32,
                n as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
                g.strides[0] as u32,
                g.strides[1] as u32,
            );
        }
    }
    Ok(out)
}

/// `x · w` of f32 `[rows, k]` and `[k, n]`, on bf16 tensor cores as [`grouped_matmul_dense`] is there: a row's bits depend on the
/// row and the weight alone.
///
/// # Errors
/// The device has none ([`dense_products_use_bf16`]); the operands differ in `k`, are not f32, or are beyond the reach of 32-bit
/// indices or of a grid.
pub fn matmul_dense<R: Runtime>(client: &ComputeClient<R>, x: &Matrix, w: &Matrix) -> Result<Matrix, Error> {
    check_f32(PRODUCT, x)?;
    check_f32(PRODUCT, w)?;
    check_bf16(client)?;
    check_len("contraction length of the activations", w.rows, x.columns)?;
    let (rows, n) = (x.rows, w.columns);
    check_reach(PRODUCT, rows.saturating_mul(n))?;
    if rows > MAX_ROWS {
        return Err(Error::Unsupported {
            what: format!("a dense product of {rows} rows"),
            why: format!("a grid has tiles for {MAX_ROWS}"),
        });
    }
    let y = allocate(client, rows * n);
    if rows * n > 0 {
        let w = MatrixStack {
            handle: w.handle.clone(),
            shape: [1, w.rows, n],
            strides: [0, w.strides[0], w.strides[1]],
        };
        dense_mma::launch_matmul(client, x, &w, None, &y);
    }
    Ok(Matrix::contiguous(y, Element::F32, rows, n))
}

/// `xᵀ · g` of f32 `[rows, m]` and `[rows, n]`, as [`matmul_dense`].
///
/// # Errors
/// The device has no bf16 tensor cores; the operands differ in rows, are not f32, or are beyond the reach of 32-bit indices.
pub fn outer_product_dense<R: Runtime>(client: &ComputeClient<R>, x: &Matrix, g: &Matrix) -> Result<Matrix, Error> {
    check_bf16(client)?;
    let (m, n) = check_outer(x, g, 1)?;
    let out = allocate(client, m * n);
    if m * n > 0 {
        dense_mma::launch_outer(client, x, g, None, 1, &out);
    }
    Ok(Matrix::contiguous(out, Element::F32, m, n))
}

/// A grid has 65,535 tiles of 32 rows at least.
const MAX_ROWS: usize = 65_535 * 32;

/// Columns of `x` and of `g`, of which each expert's product has as many rows and columns.
fn check_outer(x: &Matrix, g: &Matrix, experts: usize) -> Result<(usize, usize), Error> {
    check_f32(PRODUCT, x)?;
    check_f32(PRODUCT, g)?;
    check_len("rows of the gradient", x.rows, g.rows)?;
    let (m, n) = (x.columns, g.columns);
    check_reach(PRODUCT, experts.saturating_mul(m).saturating_mul(n))?;
    Ok((m, n))
}

fn check_bf16<R: Runtime>(client: &ComputeClient<R>) -> Result<(), Error> {
    match dense_products_use_bf16(client) {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: "a product of f32 on bf16 tensor cores".into(),
            why: "it has none".into(),
        }),
    }
}

/// Whether the products of this device run on bf16 tensor cores, of f32 values split in two. An output is then off by
/// `(3 · 2^-16 + (k + 8) · 2^-23) · Σ|x · w|` at most, of values above 2^-117; elsewhere by `(k + 8) · 2^-23 · Σ|x · w|`.
pub fn dense_products_use_bf16<R: Runtime>(client: &ComputeClient<R>) -> bool {
    dense_mma::is_available(client)
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
    #[comptime] along_k: bool,
) {
    let k = k as usize;
    let n = n as usize;
    let (expert, first, last) = locate(table, tokens, TILE, true);
    let column = CUBE_POS_X as usize * TILE;
    let mut tile_x = SharedMemory::<f32>::new(DEPTH * PITCH);
    let mut tile_w = SharedMemory::<f32>::new(DEPTH * PITCH);
    let mut sums = zero_sums();
    let steps = select(first < last, k.div_ceil(DEPTH), 0usize);
    for step in 0..steps {
        sync_cube();
        #[unroll]
        for i in 0..comptime!(DEPTH * TILE / UNITS) {
            let at = comptime!(i * UNITS) + UNIT_POS as usize;
            // Activations lie along k.
            let depth = at % DEPTH;
            let line = at / DEPTH;
            let mut value = 0.0f32;
            if first + line < last && step * DEPTH + depth < k {
                value = x[(first + line) * x_row as usize + (step * DEPTH + depth) * x_column as usize];
            }
            tile_x[depth * PITCH + line] = value;
            let mut depth_w = at / TILE;
            let mut line_w = at % TILE;
            if comptime!(along_k) {
                depth_w = depth;
                line_w = line;
            }
            let mut weight = 0.0f32;
            if column + line_w < n && step * DEPTH + depth_w < k {
                let row = (step * DEPTH + depth_w) * w_row as usize;
                weight = w[expert * w_group as usize + row + (column + line_w) * w_column as usize];
            }
            tile_w[depth_w * PITCH + line_w] = weight;
        }
        sync_cube();
        add_products(&tile_x, &tile_w, &mut sums);
    }
    #[unroll]
    for i in 0..16usize {
        let row = first + UNIT_POS_Y as usize + comptime!(i / 4 * 16);
        let at = column + UNIT_POS_X as usize + comptime!(i % 4 * 16);
        if row < last && at < n {
            y[row * n + at] = sums[i];
        }
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
) {
    let m = m as usize;
    let n = n as usize;
    let expert = CUBE_POS_Z as usize;
    let (first, last) = rows_of_expert(counts, expert, tokens, true);
    let row = CUBE_POS_Y as usize * TILE;
    let column = CUBE_POS_X as usize * TILE;
    let mut tile_x = SharedMemory::<f32>::new(DEPTH * PITCH);
    let mut tile_g = SharedMemory::<f32>::new(DEPTH * PITCH);
    let mut sums = zero_sums();
    for step in 0..(last - first).div_ceil(DEPTH) {
        sync_cube();
        #[unroll]
        for i in 0..comptime!(DEPTH * TILE / UNITS) {
            let at = comptime!(i * UNITS) + UNIT_POS as usize;
            let depth = at / TILE;
            let line = at % TILE;
            let token = first + step * DEPTH + depth;
            let mut a = 0.0f32;
            let mut b = 0.0f32;
            if token < last && row + line < m {
                a = x[token * x_row as usize + (row + line) * x_column as usize];
            }
            if token < last && column + line < n {
                b = g[token * g_row as usize + (column + line) * g_column as usize];
            }
            tile_x[depth * PITCH + line] = a;
            tile_g[depth * PITCH + line] = b;
        }
        sync_cube();
        add_products(&tile_x, &tile_g, &mut sums);
    }
    #[unroll]
    for i in 0..16usize {
        let line = row + UNIT_POS_Y as usize + comptime!(i / 4 * 16);
        let at = column + UNIT_POS_X as usize + comptime!(i % 4 * 16);
        if line < m && at < n {
            out[(expert * m + line) * n + at] = sums[i];
        }
    }
}

#[cube]
fn zero_sums() -> Array<f32> {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0;
    }
    sums
}

/// Adds a tile's products to a unit's 4 × 4 sums: rows and columns 16 apart.
#[cube]
fn add_products(a: &SharedMemory<f32>, b: &SharedMemory<f32>, sums: &mut Array<f32>) {
    let mut left = Array::<f32>::new(4usize);
    let mut right = Array::<f32>::new(4usize);
    #[unroll]
    for depth in 0..DEPTH {
        #[unroll]
        for i in 0..4usize {
            left[i] = a[comptime!(depth * PITCH + i * 16) + UNIT_POS_Y as usize];
            right[i] = b[comptime!(depth * PITCH + i * 16) + UNIT_POS_X as usize];
        }
        #[unroll]
        for i in 0..16usize {
            sums[i] = fma(left[comptime!(i / 4)], right[comptime!(i % 4)], sums[i]);
        }
    }
}
