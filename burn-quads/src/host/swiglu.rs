//! `silu(gate) · up`, gate and up side by side in a row.
use super::vector::{Kernel, LANES, ROWS, dispatch, exp};
use rayon::prelude::*;
use std::array;

/// `gate_up` `[rows, 2 · d]` to `[rows, d]`.
pub(crate) fn swiglu(gate_up: &[f32], d: usize) -> Vec<f32> {
    let mut y = vec![0f32; gate_up.len() / 2];
    let chunk = (ROWS * d).max(1);
    let run = |gate_up: &[f32], y: &mut [f32]| dispatch(Forward { gate_up, d, y });
    match y.len() <= chunk {
        true => run(gate_up, &mut y),
        false => y
            .par_chunks_mut(chunk)
            .zip(gate_up.par_chunks(2 * chunk))
            .for_each(|(y, gate_up)| run(gate_up, y)),
    }
    y
}

/// The gradient of `gate_up` from that of the result.
pub(crate) fn swiglu_backward(gate_up: &[f32], d: usize, grad: &[f32]) -> Vec<f32> {
    let mut dx = vec![0f32; gate_up.len()];
    let chunk = (ROWS * d).max(1);
    dx.par_chunks_mut(2 * chunk)
        .zip(gate_up.par_chunks(2 * chunk))
        .zip(grad.par_chunks(chunk))
        .for_each(|((dx, gate_up), grad)| dispatch(Backward { gate_up, d, grad, dx }));
    dx
}

#[inline(always)]
fn sigmoid<const FUSED: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FUSED>(-x))
}

#[inline(always)]
fn load(x: &[f32], start: usize) -> [f32; LANES] {
    x[start..start + LANES].try_into().expect("LANES numbers")
}

struct Forward<'a> {
    gate_up: &'a [f32],
    d: usize,
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let d = self.d;
        let value = |gate: f32, up: f32| gate * sigmoid::<FUSED>(gate) * up;
        for (row, y) in self.gate_up.chunks_exact(2 * d).zip(self.y.chunks_exact_mut(d)) {
            let (gate, up) = row.split_at(d);
            let whole = d - d % LANES;
            for i in (0..whole).step_by(LANES) {
                let (gate, up) = (load(gate, i), load(up, i));
                y[i..i + LANES].copy_from_slice(&array::from_fn::<_, LANES, _>(|l| value(gate[l], up[l])));
            }
            for i in whole..d {
                y[i] = value(gate[i], up[i]);
            }
        }
    }
}

struct Backward<'a> {
    gate_up: &'a [f32],
    d: usize,
    grad: &'a [f32],
    dx: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let d = self.d;
        // silu' = σ + x · σ · (1 − σ) = silu + σ · (1 − silu)
        let slopes = |gate: f32, up: f32, grad: f32| {
            let sigmoid = sigmoid::<FUSED>(gate);
            let silu = gate * sigmoid;
            (grad * up * (silu + sigmoid * (1.0 - silu)), grad * silu)
        };
        let rows = self.gate_up.chunks_exact(2 * d).zip(self.grad.chunks_exact(d));
        for ((row, grad), dx) in rows.zip(self.dx.chunks_exact_mut(2 * d)) {
            let (gate, up) = row.split_at(d);
            let (d_gate, d_up) = dx.split_at_mut(d);
            let whole = d - d % LANES;
            for i in (0..whole).step_by(LANES) {
                let (gate, up, grad) = (load(gate, i), load(up, i), load(grad, i));
                let both: [(f32, f32); LANES] = array::from_fn(|l| slopes(gate[l], up[l], grad[l]));
                d_gate[i..i + LANES].copy_from_slice(&both.map(|(d_gate, _)| d_gate));
                d_up[i..i + LANES].copy_from_slice(&both.map(|(_, d_up)| d_up));
            }
            for i in whole..d {
                (d_gate[i], d_up[i]) = slopes(gate[i], up[i], grad[i]);
            }
        }
    }
}
