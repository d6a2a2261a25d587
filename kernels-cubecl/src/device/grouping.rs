//! Which tokens belong to which expert: a table of tiles, made on the device from counts that only the device knows.
use super::matrix::{allocate, array};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of the cube that makes the table.
const UNITS: usize = 256;

/// How a matmul's tokens are spread over cubes: tiles of tokens, each of one expert.
pub(super) struct Groups {
    table: Option<Handle>,
    gather: Option<Handle>,
    /// Tiles, at most.
    pub tiles: usize,
    /// Rows of the output.
    pub tokens: usize,
}

impl Groups {
    /// All tokens, one weight.
    pub fn dense(tokens: usize, tile: usize) -> Self {
        Self {
            table: None,
            gather: None,
            tiles: tokens.div_ceil(tile),
            tokens,
        }
    }

    /// `tokens` rows sorted by expert, `counts[e]` (u32) of them for expert `e`; row `i` of the output belongs to row
    /// `gather[i]` of the activations, if there is a `gather`.
    pub fn experts<R: Runtime>(
        client: &ComputeClient<R>,
        counts: &Handle,
        experts: usize,
        tokens: usize,
        tile: usize,
        gather: Option<&Handle>,
    ) -> Self {
        // Every expert may end in a tile that is not full.
        let tiles = tokens.div_ceil(tile) + experts.min(tokens);
        let table = allocate(client, 3 * tiles);
        // SAFETY: the table has three words a tile.
        unsafe {
            fill_table::launch_unchecked::<R>(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                array(counts, experts),
                array(&table, 3 * tiles),
                experts as u32,
                tiles as u32,
                tile as u32,
            );
        }
        Self {
            table: Some(table),
            gather: gather.cloned(),
            tiles,
            tokens,
        }
    }

    /// The table, or a buffer that stands in for it and is not read.
    pub fn table<'a>(&'a self, otherwise: &'a Handle) -> &'a Handle {
        self.table.as_ref().unwrap_or(otherwise)
    }

    /// Words of the table.
    pub fn table_len(&self) -> usize {
        if self.is_grouped() { 3 * self.tiles } else { 1 }
    }

    /// The rows to take, or a stand-in.
    pub fn gather<'a>(&'a self, otherwise: &'a Handle) -> &'a Handle {
        self.gather.as_ref().unwrap_or(otherwise)
    }

    /// Words of the rows to take.
    pub fn gather_len(&self) -> usize {
        if self.is_gathered() { self.tokens } else { 1 }
    }

    /// Whether tokens belong to several experts.
    pub fn is_grouped(&self) -> bool {
        self.table.is_some()
    }

    /// Whether rows of activations are taken by index.
    pub fn is_gathered(&self) -> bool {
        self.gather.is_some()
    }
}

/// A tile's expert, its first token, and the end of the expert's tokens or of all tokens.
#[cube]
pub(super) fn locate(
    table: &Array<u32>,
    tokens: u32,
    #[comptime] tile: usize,
    #[comptime] grouped: bool,
) -> (usize, usize, usize) {
    let at = CUBE_POS_Y as usize;
    let mut expert = 0usize;
    let mut first = at * tile;
    let mut last = tokens as usize;
    if comptime!(grouped) {
        expert = table[3 * at] as usize;
        first = table[3 * at + 1] as usize;
        last = table[3 * at + 2] as usize;
    }
    (expert, first, last)
}

/// An expert's first row and their end, of `rows` that are sorted by expert; without `grouped` all rows.
#[cube]
pub(super) fn rows_of_expert(
    counts: &Array<u32>,
    expert: usize,
    rows: u32,
    #[comptime] grouped: bool,
) -> (usize, usize) {
    let mut first = 0usize;
    let mut last = rows as usize;
    if comptime!(grouped) {
        for before in 0..expert {
            first += counts[before] as usize;
        }
        last = min(first + counts[expert] as usize, rows as usize);
    }
    (min(first, last), last)
}

/// The row of activations of a token, which must be one of those that there are.
#[cube]
pub(super) fn source_row(gather: &Array<u32>, token: usize, #[comptime] gathered: bool) -> usize {
    let mut source = token;
    if comptime!(gathered) {
        source = gather[token] as usize;
    }
    source
}

/// One cube: `table[tile] = (expert, first token, end of the expert's tokens)`; tiles left over get no tokens.
#[cube(launch_unchecked)]
fn fill_table(counts: &Array<u32>, table: &mut Array<u32>, experts: u32, tiles: u32, tile: u32) {
    let mut shared = SharedMemory::<u32>::new(UNITS);
    let unit_pos = UNIT_POS as usize;
    // Tokens and tiles of the experts before this round's.
    let mut tokens_before = 0u32;
    let mut tiles_before = 0u32;
    for round in 0..(experts as usize).div_ceil(UNITS) {
        let expert = round * UNITS + unit_pos;
        let mut count = 0u32;
        if expert < experts as usize {
            count = counts[expert];
        }
        sync_cube();
        shared[unit_pos] = count;
        sync_cube();
        let mut first = tokens_before;
        let mut at = tiles_before;
        // Whose experts there are.
        for other in 0..min(experts as usize - round * UNITS, UNITS) {
            let count = shared[other];
            let others = count.div_ceil(tile);
            if other < unit_pos {
                first += count;
                at += others;
            }
            tokens_before += count;
            tiles_before += others;
        }
        for i in 0..count.div_ceil(tile) {
            if at + i < tiles {
                let entry = 3 * (at + i) as usize;
                table[entry] = u32::cast_from(expert);
                table[entry + 1] = first + i * tile;
                table[entry + 2] = first + count;
            }
        }
    }
    for entry in range_stepped(tiles_before as usize + unit_pos, tiles as usize, UNITS) {
        table[3 * entry] = 0u32;
        table[3 * entry + 1] = 0u32;
        table[3 * entry + 2] = 0u32;
    }
}
