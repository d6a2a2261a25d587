//! RMS norm of rows: `y = x / √(mean(x²) + ε) · γ`.
use super::vector::{Kernel, ROWS, dispatch, multiply_add, reduce, sum_of_squares};
use rayon::prelude::*;

/// `x` is `[rows, gamma.len()]`.
pub(crate) fn rms_norm(x: &[f32], gamma: &[f32], epsilon: f32) -> Vec<f32> {
    let mut y = vec![0f32; x.len()];
    let chunk = (ROWS * gamma.len()).max(1);
    let run = |x: &[f32], y: &mut [f32]| dispatch(Forward { x, gamma, epsilon, y });
    match x.len() <= chunk {
        true => run(x, &mut y),
        false => y
            .par_chunks_mut(chunk)
            .zip(x.par_chunks(chunk))
            .for_each(|(y, x)| run(x, y)),
    }
    y
}

/// Gradients of `x` and `gamma`.
pub(crate) fn rms_norm_backward(x: &[f32], gamma: &[f32], epsilon: f32, grad: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let d = gamma.len();
    let chunk = (ROWS * d).max(1);
    let mut dx = vec![0f32; x.len()];
    // By chunks of a fixed number of rows, added in order: the same sums on any number of threads.
    let mut partial = vec![0f32; x.len().div_ceil(chunk) * d];
    dx.par_chunks_mut(chunk)
        .zip(partial.par_chunks_mut(d.max(1)))
        .zip(x.par_chunks(chunk).zip(grad.par_chunks(chunk)))
        .for_each(|((dx, dgamma), (x, grad))| {
            dispatch(Backward {
                x,
                gamma,
                epsilon,
                grad,
                dx,
                dgamma,
            });
        });
    let mut dgamma = vec![0f32; d];
    for partial in partial.chunks_exact(d.max(1)) {
        for (sum, x) in dgamma.iter_mut().zip(partial) {
            *sum += x;
        }
    }
    (dx, dgamma)
}

#[inline(always)]
fn inverse_rms<const FUSED: bool>(x: &[f32], epsilon: f32) -> f32 {
    1.0 / (sum_of_squares::<FUSED>(x) / x.len() as f32 + epsilon).sqrt()
}

struct Forward<'a> {
    x: &'a [f32],
    gamma: &'a [f32],
    epsilon: f32,
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let d = self.gamma.len();
        for (x, y) in self.x.chunks_exact(d).zip(self.y.chunks_exact_mut(d)) {
            let inverse = inverse_rms::<FUSED>(x, self.epsilon);
            for ((y, x), gamma) in y.iter_mut().zip(x).zip(self.gamma) {
                *y = x * inverse * gamma;
            }
        }
    }
}

struct Backward<'a> {
    x: &'a [f32],
    gamma: &'a [f32],
    epsilon: f32,
    grad: &'a [f32],
    dx: &'a mut [f32],
    dgamma: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (d, gamma) = (self.gamma.len(), self.gamma);
        let rows = self.x.chunks_exact(d).zip(self.grad.chunks_exact(d));
        for ((x, grad), dx) in rows.zip(self.dx.chunks_exact_mut(d)) {
            let inverse = inverse_rms::<FUSED>(x, self.epsilon);
            // dx = (g − n · mean(g · n)) / rms with n = x / rms and g = γ · dy.
            for (((dgamma, dx), (x, grad)), gamma) in
                self.dgamma.iter_mut().zip(&mut *dx).zip(x.iter().zip(grad)).zip(gamma)
            {
                *dgamma += grad * (x * inverse);
                *dx = grad * gamma;
            }
            let along = dot::<FUSED>(dx, x) * inverse * inverse / d as f32;
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = (*dx - x * along) * inverse;
            }
        }
    }
}

/// `Σ a · b`, in lanes.
#[inline(always)]
fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    const SUMS: usize = 16;
    let mut sums = [0f32; SUMS];
    let (a, b) = (a.chunks_exact(SUMS), b.chunks_exact(SUMS));
    for (sum, (a, b)) in sums.iter_mut().zip(a.remainder().iter().zip(b.remainder())) {
        *sum = a * b;
    }
    for (a, b) in a.zip(b) {
        for lane in 0..SUMS {
            sums[lane] = multiply_add::<FUSED>(a[lane], b[lane], sums[lane]);
        }
    }
    reduce(sums, |a, b| a + b)
}
