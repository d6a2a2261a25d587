//! One body of plain Rust, compiled for each instruction set and chosen at run time.
//!
//! A [`Kernel`]'s `run`, and all it calls, is `#[inline(always)]`: it becomes part of a function that is compiled for
//! the instruction set, and the compiler turns its loops over arrays into vector code. The product's inner loop, where
//! most time goes, names its vector instructions through [`Vectors`] instead of leaving them to the compiler.
//!
//! The bits do not depend on the choice, with one exception: without a fused multiply-add, products are rounded before
//! they are added.

use super::rounding::from_e2m1;

/// Work that is worth an instruction set of its own.
pub(super) trait Kernel {
    /// What `run` returns.
    type Output;
    /// `TOKENS` × `LANES` sums fit the registers of `V`; `LANES` is `COUNT` vectors. Must be `#[inline(always)]`.
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(self, vectors: V) -> Self::Output;
}

/// Runs a kernel on the widest instruction set at hand.
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512<K: Kernel>(kernel: K, vectors: x86::Avx512) -> K::Output {
            kernel.run::<_, 8, 2, 32>(vectors)
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<K: Kernel>(kernel: K, vectors: x86::Avx2) -> K::Output {
            kernel.run::<_, 6, 2, 16>(vectors)
        }
        if let Some(vectors) = x86::Avx512::detect() {
            // SAFETY: `vectors` exists only where every feature was detected that the function is compiled for.
            return unsafe { avx512(kernel, vectors) };
        }
        if let Some(vectors) = x86::Avx2::detect() {
            // SAFETY: as above.
            return unsafe { avx2(kernel, vectors) };
        }
    }
    kernel.run::<_, 4, 2, 8>(Portable)
}

/// Vectors of f32. A value of the type is proof that the processor has the instructions.
pub(super) trait Vectors: Copy {
    /// A vector.
    type Vector: Copy;
    /// Vector `index` of `line`.
    fn load(self, line: &[f32], index: usize) -> Self::Vector;
    /// Writes vector `index` of `line`.
    fn store(self, vector: Self::Vector, line: &mut [f32], index: usize);
    /// `a · b + c` in each lane, fused where that is an instruction.
    fn multiply_add(self, a: f32, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// E2M1 values times `step`: the codes are bits `shift..shift + 4` of vector `index` of `words`.
    fn decode_e2m1(self, words: &[u32], index: usize, shift: u32, step: Self::Vector) -> Self::Vector;
}

/// Plain Rust, four lanes: what the compiler makes of it on the baseline of any processor.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Vectors for Portable {
    type Vector = [f32; 4];

    #[inline(always)]
    fn load(self, line: &[f32], index: usize) -> [f32; 4] {
        line.as_chunks().0[index]
    }

    #[inline(always)]
    fn store(self, vector: [f32; 4], line: &mut [f32], index: usize) {
        line.as_chunks_mut().0[index] = vector;
    }

    #[inline(always)]
    fn multiply_add(self, a: f32, b: [f32; 4], mut c: [f32; 4]) -> [f32; 4] {
        for lane in 0..4 {
            // `mul_add` is a function call where it is no instruction.
            c[lane] = match cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                true => a.mul_add(b[lane], c[lane]),
                false => a * b[lane] + c[lane],
            };
        }
        c
    }

    #[inline(always)]
    fn decode_e2m1(self, words: &[u32], index: usize, shift: u32, mut step: [f32; 4]) -> [f32; 4] {
        let words: &[u32; 4] = &words.as_chunks().0[index];
        for lane in 0..4 {
            step[lane] *= from_e2m1(words[lane] >> shift);
        }
        step
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vectors;
    use crate::e2m1;
    use std::arch::x86_64::*;

    /// AVX-512, with a private field: made by `detect` alone.
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(());

    /// AVX2 and FMA, likewise.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    impl Avx512 {
        pub(super) fn detect() -> Option<Self> {
            #[cfg(test)]
            if super::tests::widest() < 2 {
                return None;
            }
            let detected = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma");
            detected.then_some(Self(()))
        }
    }

    impl Avx2 {
        pub(super) fn detect() -> Option<Self> {
            #[cfg(test)]
            if super::tests::widest() < 1 {
                return None;
            }
            let detected = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            detected.then_some(Self(()))
        }
    }

    // SAFETY of all blocks below: `self` proves that the processor has the instructions, and the pointers are those of
    // arrays as long as the vector.

    impl Vectors for Avx512 {
        type Vector = __m512;

        #[inline(always)]
        fn load(self, line: &[f32], index: usize) -> __m512 {
            let values: &[f32; 16] = &line.as_chunks().0[index];
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, vector: __m512, line: &mut [f32], index: usize) {
            let values: &mut [f32; 16] = &mut line.as_chunks_mut().0[index];
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), vector) }
        }

        #[inline(always)]
        fn multiply_add(self, a: f32, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(_mm512_set1_ps(a), b, c) }
        }

        #[inline(always)]
        fn decode_e2m1(self, words: &[u32], index: usize, shift: u32, step: __m512) -> __m512 {
            let words: &[u32; 16] = &words.as_chunks().0[index];
            unsafe {
                let codes = _mm512_srlv_epi32(
                    _mm512_loadu_epi32(words.as_ptr().cast()),
                    _mm512_set1_epi32(shift as i32),
                );
                // The permutation looks at the low four bits only.
                let values = _mm512_permutexvar_ps(codes, _mm512_loadu_ps(e2m1::VALUES.as_ptr()));
                _mm512_mul_ps(values, step)
            }
        }
    }

    impl Vectors for Avx2 {
        type Vector = __m256;

        #[inline(always)]
        fn load(self, line: &[f32], index: usize) -> __m256 {
            let values: &[f32; 8] = &line.as_chunks().0[index];
            unsafe { _mm256_loadu_ps(values.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, vector: __m256, line: &mut [f32], index: usize) {
            let values: &mut [f32; 8] = &mut line.as_chunks_mut().0[index];
            unsafe { _mm256_storeu_ps(values.as_mut_ptr(), vector) }
        }

        #[inline(always)]
        fn multiply_add(self, a: f32, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(_mm256_set1_ps(a), b, c) }
        }

        #[inline(always)]
        fn decode_e2m1(self, words: &[u32], index: usize, shift: u32, step: __m256) -> __m256 {
            let words: &[u32; 8] = &words.as_chunks().0[index];
            unsafe {
                let words = _mm256_loadu_si256(words.as_ptr().cast());
                let codes = _mm256_srlv_epi32(words, _mm256_set1_epi32(shift as i32));
                // The permutation looks at the low three bits only: the magnitude. The sign is the bit above.
                let magnitudes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(e2m1::VALUES.as_ptr()), codes);
                let signs = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), _mm256_set1_epi32(i32::MIN));
                _mm256_xor_ps(_mm256_mul_ps(magnitudes, step), _mm256_castsi256_ps(signs))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Activation, Compensation, WeightLayout, WeightView, host};
    use std::cell::Cell;

    thread_local! {
        static WIDEST: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Number of the widest instruction set that this thread may use; 0 is the portable one.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn widest() -> usize {
        WIDEST.get()
    }

    /// Bits of everything that is computed in kernels, on one thread: products of exact operands, and others.
    fn results(widest: usize) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
        WIDEST.set(widest);
        let (tokens, rows, k) = (13, 43, 336);
        let spread = |i: usize| ((i * 7919 % 2003) as f32 - 1001.0) * 2f32.powi((i * 31 % 17) as i32 - 9);
        let x: Vec<f32> = (0..tokens * k).map(spread).collect();
        let w: Vec<f32> = (0..rows * k).map(|i| spread(i + 5)).collect();
        let (mut exact, mut rounded) = (Vec::new(), Vec::new());
        let packed = host::quantize_weight(&w, rows, k, WeightLayout::Transposed, None).unwrap();
        let fp8 = host::quantize_weight_fp8(&w, rows, k, WeightLayout::Transposed).unwrap();
        exact.push(
            [&packed.codes[..], &packed.block_scales, &fp8.codes]
                .concat()
                .into_iter()
                .map(u32::from)
                .collect(),
        );
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let mut out = vec![0.0; rows * k];
        host::fake_quantize_weight(&w, rows, k, WeightLayout::RowMajor, None, &mut out).unwrap();
        exact.push(bits(&out));
        let per_token = Compensation::PerToken {
            granularity: crate::Granularity::Channel,
            fraction: 0.5,
        };
        let compensated = [Compensation::All, per_token].map(Activation::Compensated);
        for activation in [Activation::Full, Activation::Fp8, Activation::Nvfp4]
            .iter()
            .chain(&compensated)
        {
            let mut xq = vec![0.0; tokens * k];
            host::fake_quantize_activations(&x, tokens, k, activation, &mut xq).unwrap();
            exact.push(bits(&xq));
            for view in [WeightView::Nvfp4(packed.view()), WeightView::Fp8(fp8.view())] {
                let mut out = vec![0.0; rows * k];
                host::dequantize_weight(view, WeightLayout::Transposed, &mut out).unwrap();
                exact.push(bits(&out));
                let mut product = vec![0.0; tokens * rows];
                host::matmul(&x, tokens, view, activation, &mut product).unwrap();
                match activation {
                    Activation::Nvfp4 | Activation::Fp8 => exact.push(bits(&product)),
                    _ => rounded.push(product),
                }
            }
        }
        (exact, rounded)
    }

    #[test]
    fn instruction_sets_agree() {
        let (exact, rounded) = results(usize::MAX);
        for narrower in [0, 1] {
            let (narrow_exact, narrow_rounded) = results(narrower);
            assert_eq!(exact, narrow_exact, "instruction set {narrower}");
            // Without a fused multiply-add, inexact products are rounded once more.
            for (a, b) in rounded.iter().flatten().zip(narrow_rounded.iter().flatten()) {
                let scale = rounded.iter().flatten().fold(0f32, |largest, y| largest.max(y.abs()));
                assert!((a - b).abs() <= 1e-5 * scale, "instruction set {narrower}: {a} {b}");
            }
        }
        let avx2 = results(1).1;
        if cfg!(target_arch = "x86_64") {
            assert!(avx2 == rounded, "both have a fused multiply-add");
        }
    }
}
