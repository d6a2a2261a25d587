//! One body of plain Rust, compiled for each instruction set and chosen at run time.
//!
//! A [`Kernel`]'s `run`, and all it calls, is `#[inline(always)]`: it becomes part of a function that is compiled for
//! the instruction set, and the compiler turns its loops over arrays into vector code. The bits do not depend on the
//! choice, with one exception, written where it matters: without a fused multiply-add, products are rounded before
//! they are added.

/// Work that is worth an instruction set of its own.
pub(super) trait Kernel {
    /// What `run` returns.
    type Output;
    /// `TOKENS` × `LANES` sums fit the registers; `LANES` is a whole number of vectors. With `FUSED`, a multiply-add
    /// is one instruction. Must be `#[inline(always)]`.
    fn run<const TOKENS: usize, const LANES: usize, const FUSED: bool>(self) -> Self::Output;
}

/// Runs a kernel on the widest instruction set at hand.
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512<K: Kernel>(kernel: K) -> K::Output {
            kernel.run::<8, 32, true>()
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<K: Kernel>(kernel: K) -> K::Output {
            kernel.run::<6, 16, true>()
        }
        let (has_avx2, has_avx512) = (
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl"),
        );
        if has_avx2 && has_avx512 {
            // SAFETY: every feature that the function is compiled for was detected.
            return unsafe { avx512(kernel) };
        }
        if has_avx2 {
            // SAFETY: as above.
            return unsafe { avx2(kernel) };
        }
    }
    kernel.run::<4, 8, { cfg!(any(target_arch = "aarch64", target_feature = "fma")) }>()
}

/// `a · b + c`, fused where that is an instruction (elsewhere `mul_add` would be a function call).
#[inline(always)]
pub(super) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}
