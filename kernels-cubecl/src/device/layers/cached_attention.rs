//! Attention of new tokens over a cache of keys and values, in place: one cube a token and key head, tile after tile of
//! columns with the softmax carried along.
use super::{Reduction, cube_row, reduce_over_cube, row_grid};
use crate::device::{
    check::{check_dense, check_f32, check_len, check_reach, check_shared},
    matrix::{Element, Error, Matrix, allocate, array},
};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube, and columns of a tile.
const TILE: usize = 128;
/// Below every other score.
const LOWEST: f32 = f32::MIN;

/// Keys and values of sequences, f32 without gaps.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    /// `[slots, kv_heads, head_dim, key_columns]`.
    pub keys: Handle,
    /// `[slots, kv_heads, value_rows, head_dim]`.
    pub values: Handle,
    /// Sequences.
    pub slots: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Columns of the keys, at least `value_rows`.
    pub key_columns: usize,
    /// Tokens that a slot has room for.
    pub value_rows: usize,
}

impl KeyValueCache {
    /// The most query heads that may share a key head.
    pub const MAX_GROUP: usize = 16;
    /// The most channels of a head.
    pub const MAX_HEAD_DIM: usize = 256;

    /// Whether the kernel can serve so many query heads a key head, of so many channels, on this device.
    pub fn fits<R: Runtime>(client: &ComputeClient<R>, group: usize, head_dim: usize) -> bool {
        (1..=Self::MAX_GROUP).contains(&group)
            && (1..=Self::MAX_HEAD_DIM).contains(&head_dim)
            && check_shared(client, "attention", shared_bytes(group, head_dim)).is_ok()
    }
}

/// `Σ softmax(q · k / √head_dim) · v` over columns `0..=position` of each token's slot, for each head: f32
/// `[tokens, heads · head_dim]`.
///
/// `query` is `[tokens, heads · head_dim]`, without gaps; `places` `[tokens, 2]` i32 holds slot and position of each token, which
/// must lie inside the cache.
///
/// # Errors
/// `query` is not f32 or has gaps; its width is not that of some whole query heads for each key head, at most
/// [`KeyValueCache::MAX_GROUP`]; heads are wider than [`KeyValueCache::MAX_HEAD_DIM`], or the device cannot hold them; keys have
/// fewer columns than values have rows, or the cache is beyond the reach of 32-bit indices.
pub fn cached_attention<R: Runtime>(
    client: &ComputeClient<R>,
    query: &Matrix,
    cache: &KeyValueCache,
    places: &Handle,
) -> Result<Matrix, Error> {
    check_f32("attention", query)?;
    let (tokens, width) = (query.rows, query.columns);
    let (kv_heads, d) = (cache.kv_heads, cache.head_dim);
    let group = width / (kv_heads * d).max(1);
    check_len("width of the queries", group * kv_heads * d, width)?;
    check_dense("elements from one query or channel to the next", query)?;
    check_len(
        "query heads of a key head, at most",
        group.min(KeyValueCache::MAX_GROUP),
        group,
    )?;
    check_len("channels of a head, at most", d.min(KeyValueCache::MAX_HEAD_DIM), d)?;
    let columns = cache.key_columns.max(cache.value_rows);
    check_len("columns of the keys, at least", columns, cache.key_columns)?;
    check_shared(client, "attention", shared_bytes(group, d))?;
    let heads_of_all = cache.slots.saturating_mul(kv_heads);
    check_reach(
        "attention to a cache",
        heads_of_all.saturating_mul(d).saturating_mul(columns),
    )?;
    let y = allocate(client, tokens * width);
    if tokens * width > 0 {
        // SAFETY: one cube a token and key head, and cubes past the last repeat it; columns are read up to the position, which
        // lies inside the cache.
        unsafe {
            attend::launch_unchecked::<R>(
                client,
                row_grid(tokens * kv_heads),
                CubeDim::new_1d(TILE as u32),
                array(&query.handle, tokens * width),
                array(&cache.keys, heads_of_all * d * cache.key_columns),
                array(&cache.values, heads_of_all * cache.value_rows * d),
                array(places, 2 * tokens),
                array(&y, tokens * width),
                (tokens * kv_heads) as u32,
                kv_heads as u32,
                cache.key_columns as u32,
                cache.value_rows as u32,
                (d as f32).powf(-0.5),
                group,
                d,
            );
        }
    }
    Ok(Matrix::contiguous(y, Element::F32, tokens, width))
}

/// What [`attend`] shares among the units of a cube.
fn shared_bytes(group: usize, head_dim: usize) -> usize {
    size_of::<f32>() * (group * head_dim + group * TILE + group)
}

#[cube(launch_unchecked)]
fn attend(
    query: &Array<f32>,
    keys: &Array<f32>,
    values: &Array<f32>,
    places: &Array<i32>,
    y: &mut Array<f32>,
    rows: u32,
    kv_heads: u32,
    key_columns: u32,
    value_rows: u32,
    scale: f32,
    #[comptime] group: usize,
    #[comptime] d: usize,
) {
    let width = comptime!(group * d);
    let outputs = comptime!((group * d).div_ceil(TILE));
    let unit_pos = UNIT_POS as usize;
    let row = min(cube_row(), rows as usize - 1);
    let token = row / kv_heads as usize;
    let head = places[2 * token] as usize * kv_heads as usize + row % kv_heads as usize;
    let seen = places[2 * token + 1] as usize + 1;
    let key_columns = key_columns as usize;
    let first_key = head * d * key_columns;
    let first_value = head * value_rows as usize * d;

    let mut queries = SharedMemory::<f32>::new(width);
    // Of each query head, a value a column: what is reduced, then weights.
    let mut shared = SharedMemory::<f32>::new(comptime!(group * TILE));
    let mut factors = SharedMemory::<f32>::new(group);
    for at in range_stepped(unit_pos, width, TILE) {
        queries[at] = query[row * width + at] * scale;
    }
    // The same in all units; sums are of a unit's own columns.
    let mut largest = Array::<f32>::new(group);
    let mut sums = Array::<f32>::new(group);
    #[unroll]
    for q in 0..group {
        largest[q] = LOWEST;
        sums[q] = 0.0;
    }
    let mut mixed = Array::<f32>::new(outputs);
    #[unroll]
    for o in 0..outputs {
        mixed[o] = 0.0;
    }
    sync_cube();
    for tile in 0..seen.div_ceil(TILE) {
        let column = tile * TILE + unit_pos;
        let inside = column < seen;
        let mut scores = Array::<f32>::new(group);
        #[unroll]
        for q in 0..group {
            scores[q] = 0.0;
        }
        if inside {
            for i in 0..d {
                let key = keys[first_key + i * key_columns + column];
                #[unroll]
                for q in 0..group {
                    scores[q] += queries[comptime!(q * d) + i] * key;
                }
            }
        }
        #[unroll]
        for q in 0..group {
            shared[comptime!(q * TILE) + unit_pos] = select(inside, scores[q], LOWEST);
        }
        reduce_over_cube(&mut shared, group, TILE, Reduction::Largest);
        let mut now = Array::<f32>::new(group);
        #[unroll]
        for q in 0..group {
            now[q] = max(largest[q], shared[comptime!(q * TILE)]);
        }
        sync_cube();
        #[unroll]
        for q in 0..group {
            let factor = f32::exp(largest[q] - now[q]);
            let weight = select(inside, f32::exp(scores[q] - now[q]), 0.0f32);
            sums[q] = sums[q] * factor + weight;
            largest[q] = now[q];
            shared[comptime!(q * TILE) + unit_pos] = weight;
            if unit_pos == 0 {
                factors[q] = factor;
            }
        }
        sync_cube();
        let columns = min(seen - tile * TILE, TILE);
        #[unroll]
        for o in 0..outputs {
            let at = comptime!(o * TILE) + unit_pos;
            if at < width {
                let q = at / d;
                let mut sum = mixed[o] * factors[q];
                for column in 0..columns {
                    sum += shared[q * TILE + column] * values[first_value + (tile * TILE + column) * d + at % d];
                }
                mixed[o] = sum;
            }
        }
        sync_cube();
    }
    #[unroll]
    for q in 0..group {
        shared[comptime!(q * TILE) + unit_pos] = sums[q];
    }
    reduce_over_cube(&mut shared, group, TILE, Reduction::Sum);
    #[unroll]
    for o in 0..outputs {
        let at = comptime!(o * TILE) + unit_pos;
        if at < width {
            y[row * width + at] = mixed[o] / shared[at / d * TILE];
        }
    }
}
