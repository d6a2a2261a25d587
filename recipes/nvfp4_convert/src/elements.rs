//! Tensors of F32, BF16 and F16 a part at a time, so that no dense copy of a whole one is needed.
use anyhow::Result;
use burn_nvfp4::safetensors_file::{Dtype, FileTensor};
use half::{bf16, f16};
use rayon::prelude::*;

/// Whether a type is one of those that weights are stored in.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Decodes little-endian elements, exactly.
///
/// # Panics
/// When [`is_float`] says no, or the lengths differ.
pub fn decode(dtype: Dtype, bytes: &[u8], values: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], values: &mut [f32], element: impl Fn([u8; N]) -> f32) {
        let elements = bytes.as_chunks::<N>().0;
        assert_eq!(elements.len(), values.len(), "elements");
        for (value, bytes) in values.iter_mut().zip(elements) {
            *value = element(*bytes);
        }
    }
    match dtype {
        Dtype::F32 => each(bytes, values, f32::from_le_bytes),
        // The upper half of an f32: plain arithmetic becomes vector code.
        Dtype::BF16 => each(bytes, values, |bytes| {
            f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
        }),
        Dtype::F16 => each(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
        other => unreachable!("{other} is no type of weights"),
    }
}

/// Encodes values, rounding to nearest, ties to even.
///
/// # Panics
/// As [`decode`].
pub fn encode(dtype: Dtype, values: &[f32], bytes: &mut [u8]) {
    fn each<const N: usize>(values: &[f32], bytes: &mut [u8], element: impl Fn(f32) -> [u8; N]) {
        let elements = bytes.as_chunks_mut::<N>().0;
        assert_eq!(elements.len(), values.len(), "elements");
        for (bytes, value) in elements.iter_mut().zip(values) {
            *bytes = element(*value);
        }
    }
    match dtype {
        Dtype::F32 => each(values, bytes, f32::to_le_bytes),
        Dtype::BF16 => each(values, bytes, |value| bf16::from_f32(value).to_le_bytes()),
        Dtype::F16 => each(values, bytes, |value| f16::from_f32(value).to_le_bytes()),
        other => unreachable!("{other} is no type of weights"),
    }
}

/// Bytes in a piece of work: enough to be worth a thread, few enough to stay in its cache.
const PIECE: usize = 1 << 19;

/// Largest magnitude of a part of a tensor's bytes.
///
/// # Errors
/// Names the tensor when it is of another type, or a value is not finite.
pub fn amax(tensor: &FileTensor<'_>, bytes: &[u8]) -> Result<f32> {
    // Magnitudes order as their bits do.
    let largest = |bytes: &[u8]| match tensor.dtype() {
        Dtype::F32 => bytes
            .as_chunks()
            .0
            .iter()
            .fold(0, |most, bytes| most.max(u32::from_le_bytes(*bytes) & 0x7fff_ffff)),
        // As signed numbers, of which the oldest vector instructions know the larger.
        _ => {
            let elements = bytes.as_chunks().0.iter();
            elements.fold(0, |most, bytes| most.max(i16::from_le_bytes(*bytes) & 0x7fff)) as u32
        }
    };
    if !is_float(tensor.dtype()) {
        return Err(tensor
            .error(format!("{}, expected F32, BF16 or F16", tensor.dtype()))
            .into());
    }
    let bits = bytes.par_chunks(PIECE).map(largest).max().unwrap_or(0);
    let amax = match tensor.dtype() {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::BF16 => f32::from_bits(bits << 16),
        _ => f16::from_bits(bits as u16).to_f32(),
    };
    match amax.is_finite() {
        true => Ok(amax),
        false => Err(tensor
            .error("a value is NaN or infinite: nothing can stand for it in 4 bits")
            .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_nvfp4::safetensors_file::{SafetensorsFile, SafetensorsWriter, TensorSpec};
    use std::collections::BTreeMap;

    #[test]
    fn elements_come_back() {
        let values = [0.0, -0.0, 1.0, -1.5, 65504.0, 6.103_515_6e-5];
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let mut bytes = vec![0; values.len() * dtype.bitsize() / 8];
            encode(dtype, &values, &mut bytes);
            let mut back = [f32::NAN; 6];
            decode(dtype, &bytes, &mut back);
            let largest = if dtype == Dtype::BF16 { 65536.0 } else { 65504.0 };
            let expected = [0.0, -0.0, 1.0, -1.5, largest, 6.103_515_6e-5];
            assert_eq!(back.map(f32::to_bits), expected.map(f32::to_bits), "{dtype}");
        }
    }

    #[test]
    fn the_largest_magnitude_is_found_in_whichever_piece() {
        let folder = std::env::temp_dir().join(format!("nvfp4_convert_pieces_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("x.safetensors");
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let mut values = vec![0.5; 1_000_003];
            values[999_999] = -7.0;
            let spec = TensorSpec {
                name: "w".into(),
                dtype,
                shape: vec![values.len()],
            };
            let mut writer = SafetensorsWriter::create(&path, vec![spec], BTreeMap::new()).unwrap();
            let mut bytes = vec![0; values.len() * dtype.bitsize() / 8];
            encode(dtype, &values, &mut bytes);
            writer.write("w", &bytes).unwrap();
            writer.finish().unwrap();
            let file = SafetensorsFile::open(&path).unwrap();
            let tensor = file.tensor("w").unwrap();
            assert_eq!(amax(&tensor, tensor.bytes).unwrap(), 7.0, "{dtype}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_largest_magnitude_is_found_and_nan_is_refused() {
        let folder = std::env::temp_dir().join(format!("nvfp4_convert_amax_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            for (value, expected) in [(-3.5, Some(3.5)), (f32::NAN, None), (f32::NEG_INFINITY, None)] {
                let path = folder.join("x.safetensors");
                let spec = TensorSpec {
                    name: "w".into(),
                    dtype,
                    shape: vec![3],
                };
                let mut writer = SafetensorsWriter::create(&path, vec![spec], BTreeMap::new()).unwrap();
                let mut bytes = vec![0; 3 * dtype.bitsize() / 8];
                encode(dtype, &[1.0, value, -2.0], &mut bytes);
                writer.write("w", &bytes).unwrap();
                writer.finish().unwrap();
                let file = SafetensorsFile::open(&path).unwrap();
                let tensor = file.tensor("w").unwrap();
                match (amax(&tensor, tensor.bytes), expected) {
                    (Ok(actual), Some(expected)) => assert_eq!(actual, expected, "{dtype}"),
                    (Err(error), None) => assert!(error.to_string().contains("x.safetensors: w: a value is NaN")),
                    (actual, _) => panic!("{dtype} {value}: {actual:?}"),
                }
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
