//! Packing of weights to FP8.
use super::dispatch::{Kernel, Vectors};
use super::parallel;
use super::rounding::{e4m3_byte, to_e4m3};
use super::tile::Matrix;
use super::weights::{finite_amax, piece_rows};
use crate::{Error, Fp8Weight, WeightLayout, e4m3};

/// Packs a weight to E4M3 with one scale, `amax/448`, a row (output channel).
///
/// # Errors
/// `w` does not have `rows · k` values, or a value is not finite.
pub fn quantize_weight_fp8(w: &[f32], rows: usize, k: usize, layout: WeightLayout) -> Result<Fp8Weight, Error> {
    finite_amax(w, rows, k, layout)?;
    let mut codes = vec![0; rows * k];
    let mut channel_scales = vec![1.0; rows];
    if !w.is_empty() {
        let (pieces, piece) = piece_rows(rows, w.len());
        let chunks = codes.chunks_mut(piece * k).zip(channel_scales.chunks_mut(piece));
        parallel::run(
            pieces,
            chunks.enumerate().map(|(i, (codes, channel_scales))| QuantizeRowsFp8 {
                w: Matrix {
                    values: w,
                    rows,
                    k,
                    layout,
                    offset: 0,
                },
                row: i * piece,
                codes,
                channel_scales,
            }),
        );
    }
    Ok(Fp8Weight {
        rows,
        k,
        codes,
        channel_scales,
    })
}

/// Scale of an FP8 row: `amax/448`, 1 when that is 0.
pub(super) fn fp8_scale(amax: f32) -> f32 {
    let scale = amax / e4m3::MAX;
    if scale == 0.0 { 1.0 } else { scale }
}

struct QuantizeRowsFp8<'a> {
    w: Matrix<&'a [f32]>,
    row: usize,
    codes: &'a mut [u8],
    channel_scales: &'a mut [f32],
}

impl Kernel for QuantizeRowsFp8<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(self, _: V) {
        let k = self.w.k;
        let panels = self
            .codes
            .chunks_mut(LANES * k)
            .zip(self.channel_scales.chunks_mut(LANES));
        let mut tile = vec![[0.0; LANES]; k];
        for (panel, (codes, channel_scales)) in panels.enumerate() {
            self.w.load(self.row + panel * LANES, 0, &mut tile);
            let mut amax = [0; LANES];
            for line in &tile {
                for lane in 0..LANES {
                    amax[lane] = amax[lane].max(line[lane].to_bits() & 0x7fff_ffff);
                }
            }
            let mut scales = [0.0; LANES];
            for lane in 0..LANES {
                scales[lane] = fp8_scale(f32::from_bits(amax[lane]));
            }
            channel_scales.copy_from_slice(&scales[..channel_scales.len()]);
            for (c, line) in tile.iter().enumerate() {
                let mut bytes = [0; LANES];
                for lane in 0..LANES {
                    let y = line[lane] / scales[lane];
                    bytes[lane] = (e4m3_byte(to_e4m3(y.abs())) | y.to_bits() >> 24 & 0x80) as u8;
                }
                for lane in 0..channel_scales.len() {
                    codes[lane * k + c] = bytes[lane];
                }
            }
        }
    }
}
