//! One body of plain Rust, compiled for each instruction set and chosen at run time.

/// Numbers that are computed side by side: two vectors of AVX-512, four of AVX2.
pub(super) const LANES: usize = 32;

/// Rows of one piece of work for a thread. Fixed, so that sums over pieces do not depend on the number of threads.
pub(super) const ROWS: usize = 128;

/// Work that is worth an instruction set of its own. `run` and all it calls are `#[inline(always)]`: they become part of
/// a function that is compiled for the instruction set, and loops over lanes become vector code.
pub(super) trait Kernel {
    type Output;
    /// With `FUSED`, a multiply-add is one instruction.
    fn run<const FUSED: bool>(self) -> Self::Output;
}

/// Runs a kernel on the widest instruction set at hand.
#[inline]
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512<K: Kernel>(kernel: K) -> K::Output {
            kernel.run::<true>()
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<K: Kernel>(kernel: K) -> K::Output {
            kernel.run::<true>()
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                // SAFETY: every feature that the function is compiled for was detected.
                return unsafe { avx512(kernel) };
            }
            // SAFETY: as above.
            return unsafe { avx2(kernel) };
        }
    }
    kernel.run::<{ cfg!(any(target_arch = "aarch64", target_feature = "fma")) }>()
}

/// `a · b + c`, fused where that is an instruction (elsewhere `mul_add` would be a function call).
#[inline(always)]
pub(super) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Combines all lanes by halves: a fixed order in which the compiler sees vectors, and no long chain.
#[inline(always)]
pub(super) fn reduce<const N: usize>(mut lanes: [f32; N], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The larger number; the first where they do not compare.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// `Σ x²`, in lanes.
#[inline(always)]
pub(super) fn sum_of_squares<const FUSED: bool>(x: &[f32]) -> f32 {
    const SUMS: usize = 16;
    let mut sums = [0f32; SUMS];
    let blocks = x.chunks_exact(SUMS);
    for (sum, x) in sums.iter_mut().zip(blocks.remainder()) {
        *sum = x * x;
    }
    for block in blocks {
        for lane in 0..SUMS {
            sums[lane] = multiply_add::<FUSED>(block[lane], block[lane], sums[lane]);
        }
    }
    reduce(sums, |a, b| a + b)
}

/// `e^x` within 2 ulp; 0 below -87, `e^88` above 88, NaN for NaN. Plain arithmetic (Cephes' `expf`: `2^n · e^r`,
/// `|r| ≤ ln 2 / 2`), so that a loop over lanes becomes vector code and does not ask the C library.
#[inline(always)]
pub(super) fn exp<const FUSED: bool>(x: f32) -> f32 {
    /// 1.5 · 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > 88.0 { 88.0 } else { x };
    let shifted = multiply_add::<FUSED>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = multiply_add::<FUSED>(n, -LN_2_HIGH, clamped);
    let r = multiply_add::<FUSED>(n, -LN_2_LOW, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = multiply_add::<FUSED>(p, r, c);
    }
    let p = multiply_add::<FUSED>(p * r, r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { p * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for i in -880_000..870_000 {
            let x = -i as f32 * 1e-4;
            let expected = (x as f64).exp();
            for y in [exp::<false>(x), exp::<true>(x)] {
                let error = (y as f64 - expected).abs() / expected;
                assert!(error < 2.4e-7, "exp({x}) = {y} off by {error:e}");
            }
        }
        assert_eq!(exp::<true>(0.0), 1.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<true>(f32::INFINITY), exp::<true>(88.0));
        assert!(exp::<true>(f32::NAN).is_nan());
    }
}
