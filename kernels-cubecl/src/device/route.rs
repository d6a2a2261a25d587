//! Which kernel multiplies: one entry, a choice by what the device reports and by the shape, and the launch table.
use super::matrix::{Element, Error, Matrix, PackedActivations, PackedWeight, allocate};
use super::portable;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A matmul kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// u32 and f32 arithmetic, on any runtime.
    Portable,
}

impl Route {
    /// All routes, the most specific first.
    pub const ALL: [Self; 1] = [Self::Portable];

    /// Whether the device can run it.
    pub fn is_available<R: Runtime>(self, _client: &ComputeClient<R>) -> bool {
        match self {
            Self::Portable => true,
        }
    }

    /// The route for this many rows of activations.
    pub fn pick<R: Runtime>(_client: &ComputeClient<R>, _tokens: usize) -> Self {
        Self::Portable
    }
}

/// How a matmul runs.
#[derive(Clone, Copy, Debug)]
pub struct MatmulOptions {
    /// The route; chosen by the device and the number of rows when none is given. A row's bits are the same in every call
    /// that runs on the same route, so give one where results of different batch sizes must agree.
    pub route: Option<Route>,
    /// Element type of the output.
    pub output: Element,
}

impl Default for MatmulOptions {
    fn default() -> Self {
        Self {
            route: None,
            output: Element::F32,
        }
    }
}

/// How tokens are spread over experts.
pub(super) struct Group {
    table: Option<Handle>,
    /// Tiles of tokens, at most.
    pub tiles: usize,
}

impl Group {
    fn dense(tokens: usize, tile: usize) -> Self {
        Self {
            table: None,
            tiles: tokens.div_ceil(tile),
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

    /// Whether there is a table.
    pub fn is_grouped(&self) -> bool {
        self.table.is_some()
    }
}

/// `y = x̂ · ŵᵀ`, `[tokens, rows]`, row-major.
///
/// # Errors
/// The operands differ in `k`, the weight is one of experts, or the device lacks the route or the output type.
pub fn matmul<R: Runtime>(
    client: &ComputeClient<R>,
    x: &PackedActivations,
    w: &PackedWeight,
    options: MatmulOptions,
) -> Result<Matrix, Error> {
    if x.k != w.k {
        return Err(Error::Mismatch {
            what: "contraction length of the activations",
            expected: w.k,
            actual: x.k,
        });
    }
    if w.experts != 1 {
        return Err(Error::Mismatch {
            what: "experts of a dense matmul",
            expected: 1,
            actual: w.experts,
        });
    }
    let route = options.route.unwrap_or_else(|| Route::pick(client, x.tokens));
    if !route.is_available(client) {
        return Err(Error::Unsupported {
            what: format!("{route:?}"),
            why: "it lacks the instructions".into(),
        });
    }
    if !options.output.is_native(client) {
        return Err(Error::Unsupported {
            what: format!("{:?} output", options.output),
            why: "it has no such type".into(),
        });
    }
    tracing::debug!(
        ?route,
        tokens = x.tokens,
        rows = w.rows,
        k = w.k,
        passes = x.passes,
        "matmul"
    );
    let y = allocate(client, (x.tokens * w.rows * options.output.size()).div_ceil(4));
    if x.tokens * w.rows > 0 {
        match options.output {
            Element::F32 => run::<R, f32>(client, route, x, w, &y),
            Element::F16 => run::<R, half::f16>(client, route, x, w, &y),
            Element::BF16 => run::<R, half::bf16>(client, route, x, w, &y),
        }
    }
    Ok(Matrix::contiguous(y, options.output, x.tokens, w.rows))
}

fn run<R: Runtime, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    route: Route,
    x: &PackedActivations,
    w: &PackedWeight,
    y: &Handle,
) {
    match route {
        Route::Portable => portable::launch::<R, Y>(client, x, w, &Group::dense(x.tokens, portable::TILE), y),
    }
}
