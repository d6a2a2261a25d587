//! Which kernel multiplies: one entry, a choice by what the device reports and by the shape, and the launch.
use super::check::check_len;
use super::grouping::Groups;
use super::matrix::{Element, Error, Matrix, PackedActivations, PackedWeight, allocate};
use super::{bf16_mma, block_scaled_mma, decode, portable};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A matmul kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Block-scaled FP4 tensor cores: sm_120 and sm_121.
    BlockScaledMma,
    /// Few rows on 16-bit tensor cores (sm_80 and up): memory-bound, residual rows beside the activations' rows.
    Decode,
    /// Many rows on 16-bit tensor cores (sm_80 and up); operands are decoded on the way.
    Bf16Mma,
    /// u32 and f32 arithmetic, on any runtime.
    Portable,
}

impl Route {
    /// All routes, the most specific first.
    pub const ALL: [Self; 4] = [Self::BlockScaledMma, Self::Decode, Self::Bf16Mma, Self::Portable];

    /// Whether the device can run it.
    pub fn is_available<R: Runtime>(self, client: &ComputeClient<R>) -> bool {
        let properties = client.properties();
        let matmul = &properties.features.matmul;
        let planes = properties.hardware.plane_size_min == 32 && properties.hardware.plane_size_max == 32;
        match self {
            Self::BlockScaledMma => {
                let e2m1 = StorageType::Packed(ElemType::Float(FloatKind::E2M1), 2);
                matmul
                    .scaled_mma
                    .iter()
                    .any(|c| c.a_type == e2m1 && c.k == 64 && c.scales_factor == 4)
            }
            Self::Decode | Self::Bf16Mma => {
                let f16 = StorageType::Scalar(ElemType::Float(FloatKind::F16));
                let mma = matmul
                    .mma
                    .iter()
                    .any(|c| c.a_type == f16 && (c.m, c.n, c.k) == (16, 8, 16));
                // What a cube takes at least.
                let shared = properties.hardware.max_shared_memory_size;
                planes && mma && matmul.ldmatrix.contains(&f16) && shared >= 48 * 1024
            }
            Self::Portable => true,
        }
    }

    /// The route for so many rows of activations, of each expert on average.
    pub fn pick<R: Runtime>(client: &ComputeClient<R>, tokens: usize) -> Self {
        let fits = |route: &Self| match route {
            Self::Decode => tokens <= 16,
            // One instruction does what decoding takes many for; but few rows are a matter of memory alone.
            Self::BlockScaledMma => tokens > 16 || !Self::Decode.is_available(client),
            Self::Bf16Mma | Self::Portable => true,
        };
        Self::ALL
            .into_iter()
            .find(|route| fits(route) && route.is_available(client))
            .unwrap_or(Self::Portable)
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

/// Tokens of a grouped matmul, sorted by expert.
#[derive(Clone, Debug)]
pub struct Routing {
    /// `[experts]` u32: how many tokens each has. Their sum is `tokens`, or less.
    pub counts: Handle,
    /// Rows of the output.
    pub tokens: usize,
    /// `[tokens]` u32: the row of the activations for each row of the output; the same row if there is none.
    pub gather: Option<Handle>,
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
    check_len("experts of a dense matmul", 1, w.experts)?;
    let route = options.route.unwrap_or_else(|| Route::pick(client, x.tokens));
    multiply(client, x, w, None, route, options.output)
}

/// Grouped matmul for experts: row `i` of `y` (`[routing.tokens, rows]`) is the product of a row of activations with the
/// weight of the expert that `i` falls to. Only the device knows the counts; an expert without tokens costs nothing. Rows
/// past the sum of the counts are not written.
///
/// # Errors
/// As [`matmul`]; without a `gather`, `routing.tokens` must be the rows of `x`.
pub fn grouped_matmul<R: Runtime>(
    client: &ComputeClient<R>,
    x: &PackedActivations,
    w: &PackedWeight,
    routing: &Routing,
    options: MatmulOptions,
) -> Result<Matrix, Error> {
    if routing.gather.is_none() {
        check_len("rows of a grouped matmul", x.tokens, routing.tokens)?;
    }
    let each = routing.tokens.div_ceil(w.experts.max(1));
    let route = options.route.unwrap_or_else(|| Route::pick(client, each));
    multiply(client, x, w, Some(routing), route, options.output)
}

fn multiply<R: Runtime>(
    client: &ComputeClient<R>,
    x: &PackedActivations,
    w: &PackedWeight,
    routing: Option<&Routing>,
    route: Route,
    output: Element,
) -> Result<Matrix, Error> {
    check_len("contraction length of the activations", w.k, x.k)?;
    if !route.is_available(client) {
        return Err(Error::Unsupported {
            what: format!("{route:?}"),
            why: "it lacks the instructions".into(),
        });
    }
    if !output.is_native(client) {
        return Err(Error::Unsupported {
            what: format!("{output:?} output"),
            why: "it has no such type".into(),
        });
    }
    let tokens = routing.map_or(x.tokens, |routing| routing.tokens);
    let (rows, k, experts, passes) = (w.rows, w.k, w.experts, x.passes);
    tracing::debug!(?route, tokens, rows, k, experts, passes, "matmul");
    let y = allocate(client, (tokens * w.rows * output.size()).div_ceil(4));
    if tokens * w.rows > 0 && k == 0 {
        return Err(Error::Mismatch {
            what: "contraction length",
            expected: 16,
            actual: 0,
        });
    }
    if tokens * w.rows > 0 && x.tokens > 0 && w.experts > 0 {
        match output {
            Element::F32 => launch::<R, f32>(client, route, x, w, routing, &y),
            Element::F16 => launch::<R, half::f16>(client, route, x, w, routing, &y),
            Element::BF16 => launch::<R, half::bf16>(client, route, x, w, routing, &y),
        }
    }
    Ok(Matrix::contiguous(y, output, tokens, w.rows))
}

fn launch<R: Runtime, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    route: Route,
    x: &PackedActivations,
    w: &PackedWeight,
    routing: Option<&Routing>,
    y: &Handle,
) {
    let groups = |tile: usize| match routing {
        None => Groups::dense(x.tokens, tile),
        Some(r) => Groups::experts(client, &r.counts, w.experts, r.tokens, tile, r.gather.as_ref()),
    };
    let (grouped, gathered) = (routing.is_some(), routing.is_some_and(|r| r.gather.is_some()));
    let tokens = routing.map_or(x.tokens, |r| r.tokens.div_ceil(w.experts));
    let residual = x.passes == 2;
    match route {
        Route::Portable => portable::launch::<R, Y>(client, x, w, &groups(portable::TILE), y),
        Route::Decode => {
            let plan = decode::Plan::new(tokens, w.rows, x.padded_k(), residual, grouped, gathered);
            decode::launch::<R, Y>(client, x, w, &groups(plan.tokens()), plan, y);
        }
        Route::Bf16Mma => {
            let shared = client.properties().hardware.max_shared_memory_size;
            let plan = bf16_mma::Plan::new(tokens, w.rows, shared, residual);
            let plan = bf16_mma::Plan {
                grouped,
                gathered,
                ..plan
            };
            bf16_mma::launch::<R, Y>(client, x, w, &groups(plan.tokens()), plan, y);
        }
        Route::BlockScaledMma => {
            let plan = block_scaled_mma::Plan::new(tokens, residual, grouped, gathered);
            block_scaled_mma::launch::<R, Y>(client, x, w, &groups(plan.tokens()), plan, y);
        }
    }
}
