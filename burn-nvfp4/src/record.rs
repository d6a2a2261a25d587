//! Packed weights as bytes, for Burn's records.
//!
//! Little-endian: a header of 44 bytes (magic, version, format, flags, rank, activation setting, fraction, groups,
//! d_in, d_out), the words of the residual mask if there is one, codes, block scales, outer scales, without a device's
//! padding. Burn stores the
//! bytes with the logical shape and the scheme of the format and converts nothing, so a round trip is bit-equal.
use burn_backend::{Bytes, DType, ExecutionError, FloatDType, TensorData, tensor::Device};
use kernels_cubecl::{Activation, BLOCK, Compensation, Granularity, ResidualMask};

use crate::{
    Nvfp4Backend, OuterScaleConvention, PackedWeight, Storage, WeightFormat,
    reference::{block_scales_tensor, codes_tensor, floats_tensor},
};

const MAGIC: &[u8; 7] = b"BNVFP4W";
const VERSION: u8 = 1;
/// Bytes before the residual mask.
const HEADER: usize = 44;
const DIVIDE: u8 = 1;
const TRANSPOSED: u8 = 2;
const GRANULARITIES: [Granularity; 3] = [Granularity::Channel, Granularity::Block16, Granularity::Block64];

/// What is wrong with the bytes of a packed weight.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RecordError {
    /// The bytes end before a part does.
    #[error("{part}: expected {expected} bytes at offset {offset}, but the data ends at {len}")]
    Short {
        /// The part.
        part: &'static str,
        /// Its length.
        expected: usize,
        /// Where it starts.
        offset: usize,
        /// Length of the data.
        len: usize,
    },
    /// Bytes follow the last part.
    #[error("expected {expected} bytes, got {len}")]
    Long {
        /// Length that the header asks for.
        expected: usize,
        /// Length of the data.
        len: usize,
    },
    /// A field has a value that no packed weight has.
    #[error("{field}: expected {expected}, got {actual}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it may hold.
        expected: String,
        /// What it holds.
        actual: String,
    },
}

fn field(field: &'static str, expected: impl Into<String>, actual: impl std::fmt::Debug) -> RecordError {
    RecordError::Field {
        field,
        expected: expected.into(),
        actual: format!("{actual:?}"),
    }
}

/// The data that a record keeps.
pub(crate) async fn into_data<B: Nvfp4Backend>(weight: PackedWeight<B>) -> Result<TensorData, ExecutionError> {
    let storage = weight.storage();
    let (activation, granularity, fraction, mask) = match &storage.activation {
        Activation::Full => (0, Granularity::Channel, 0.0, None),
        Activation::Nvfp4 => (1, Granularity::Channel, 0.0, None),
        Activation::Fp8 => (2, Granularity::Channel, 0.0, None),
        Activation::Compensated(Compensation::All) => (3, Granularity::Channel, 0.0, None),
        Activation::Compensated(Compensation::PerToken { granularity, fraction }) => (4, *granularity, *fraction, None),
        Activation::Compensated(Compensation::Mask(mask)) => (5, Granularity::Channel, 0.0, Some(mask)),
    };
    let granularity = GRANULARITIES.iter().position(|g| *g == granularity).unwrap_or(0);
    let mut flags = 0;
    if storage.convention == OuterScaleConvention::Divide {
        flags |= DIVIDE;
    }
    if weight.is_transposed() {
        flags |= TRANSPOSED;
    }
    let mut bytes = Vec::with_capacity(HEADER + weight.bytes());
    bytes.extend_from_slice(MAGIC);
    let format = match storage.format {
        WeightFormat::Nvfp4 => 0,
        WeightFormat::Fp8 => 1,
    };
    bytes.extend_from_slice(&[
        VERSION,
        format,
        flags,
        weight.rank() as u8,
        activation,
        granularity as u8,
        0,
        0,
        0,
    ]);
    bytes.extend_from_slice(&fraction.to_le_bytes());
    for size in [storage.groups, storage.d_in, storage.d_out] {
        bytes.extend_from_slice(&(size as u64).to_le_bytes());
    }
    for word in mask.map_or(&[][..], ResidualMask::words) {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    for (rows, tensor) in weight
        .row_bytes()
        .into_iter()
        .zip([&storage.codes, &storage.block_scales])
    {
        let data = B::int_into_data(tensor.clone()).await?.convert::<u8>();
        bytes.extend_from_slice(&rows.strip(&data.bytes));
    }
    let outer_scales = B::float_into_data(storage.outer_scales.clone()).await?;
    for scale in outer_scales.iter::<f32>() {
        bytes.extend_from_slice(&scale.to_le_bytes());
    }
    Ok(TensorData {
        bytes: Bytes::from_bytes_vec(bytes),
        shape: weight.shape(),
        dtype: DType::QFloat(storage.format.scheme()),
    })
}

/// Reads what [`into_data`] wrote. Lengths are checked before anything is allocated.
pub(crate) fn from_data<B: Nvfp4Backend>(
    data: &TensorData,
    device: &Device<B>,
) -> Result<PackedWeight<B>, RecordError> {
    let mut bytes = Reader {
        bytes: &data.bytes,
        offset: 0,
    };
    let magic = bytes.take("magic", MAGIC.len())?;
    if magic != MAGIC {
        return Err(field("magic", format!("{MAGIC:?}"), magic));
    }
    let [version, format, flags, rank, activation, granularity, ..] = bytes.array::<9>("header")?;
    if version != VERSION {
        return Err(field("version", VERSION.to_string(), version));
    }
    let format = match format {
        0 => WeightFormat::Nvfp4,
        1 => WeightFormat::Fp8,
        other => return Err(field("format", "0 (nvfp4) or 1 (fp8)", other)),
    };
    if data.dtype != DType::QFloat(format.scheme()) {
        return Err(field("scheme", format!("that of {format}"), data.dtype));
    }
    if flags & !(DIVIDE | TRANSPOSED) != 0 {
        return Err(field("flags", "bits 0 and 1", flags));
    }
    let granularity = *GRANULARITIES
        .get(usize::from(granularity))
        .ok_or_else(|| field("granularity", "0, 1 or 2", granularity))?;
    let fraction = f32::from_le_bytes(bytes.array("fraction")?);
    let (groups, d_in, d_out) = (bytes.size("groups")?, bytes.size("d_in")?, bytes.size("d_out")?);
    let (view, stack) = (usize::from(rank), groups != 1);
    if view < 2 || (stack && view < 3) || view > 8 {
        return Err(field("rank", if stack { "3 to 8" } else { "2 to 8" }, rank));
    }
    if format == WeightFormat::Nvfp4 && !d_in.is_multiple_of(BLOCK) {
        return Err(field("d_in", "a multiple of 16", d_in));
    }
    let activation = match activation {
        0 => Activation::Full,
        1 => Activation::Nvfp4,
        2 => Activation::Fp8,
        3 => Activation::Compensated(Compensation::All),
        4 => Activation::Compensated(Compensation::PerToken { granularity, fraction }),
        5 => Activation::Compensated(Compensation::Mask(mask(&mut bytes, d_in)?)),
        other => return Err(field("activation", "0 to 5", other)),
    };
    activation
        .check(d_in)
        .map_err(|error| field("activation", "one that fits d_in", error.to_string()))?;

    let product = |a: usize, b: usize| {
        a.checked_mul(b)
            .ok_or_else(|| field("shape", "an addressable size", [a, b]))
    };
    let rows = product(groups, d_out)?;
    let (codes_row, scales_row, outer) = match format {
        WeightFormat::Nvfp4 => (d_in / 2, d_in / BLOCK, groups),
        WeightFormat::Fp8 => (d_in, 0, rows),
    };
    let codes = bytes.take("codes", product(rows, codes_row)?)?;
    let block_scales = bytes.take("block scales", product(rows, scales_row)?)?;
    let outer_scales = bytes.take("outer scales", product(outer, 4)?)?;
    if bytes.offset != data.bytes.len() {
        return Err(RecordError::Long {
            expected: bytes.offset,
            len: data.bytes.len(),
        });
    }
    let outer_scales = outer_scales
        .as_chunks::<4>()
        .0
        .iter()
        .map(|scale| f32::from_le_bytes(*scale))
        .collect();
    let storage = Storage {
        format,
        activation,
        groups,
        d_in,
        d_out,
        codes: codes_tensor::<B>(codes.to_vec(), format, d_in, rows, device),
        block_scales: block_scales_tensor::<B>(block_scales.to_vec(), format, d_in, rows, device),
        outer_scales: floats_tensor::<B>(outer_scales, [outer].into(), device, FloatDType::F32),
        convention: match flags & DIVIDE {
            0 => OuterScaleConvention::Multiply,
            _ => OuterScaleConvention::Divide,
        },
    };
    let mut weight = PackedWeight::new(storage, view);
    if flags & TRANSPOSED != 0 {
        weight = weight.transposed();
    }
    if weight.shape() != data.shape {
        return Err(field(
            "shape",
            format!("{}, from the header", weight.shape()),
            &data.shape,
        ));
    }
    Ok(weight)
}

/// A mask over `d_in` channels. Bits beyond `d_in` must be clear.
fn mask(bytes: &mut Reader<'_>, d_in: usize) -> Result<ResidualMask, RecordError> {
    let words = bytes.take("residual mask", 4 * d_in.div_ceil(32))?;
    let words: Vec<u32> = words
        .as_chunks::<4>()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    let channels: Vec<bool> = (0..d_in).map(|c| words[c / 32] >> (c % 32) & 1 == 1).collect();
    let mask = ResidualMask::from_channels(&channels);
    if mask.words() != words {
        return Err(field(
            "residual mask",
            format!("no bits beyond channel {d_in}"),
            words.last(),
        ));
    }
    Ok(mask)
}

struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, part: &'static str, len: usize) -> Result<&'a [u8], RecordError> {
        let short = RecordError::Short {
            part,
            expected: len,
            offset: self.offset,
            len: self.bytes.len(),
        };
        let end = self.offset.checked_add(len).ok_or_else(|| short.clone())?;
        let taken = self.bytes.get(self.offset..end).ok_or(short)?;
        self.offset = end;
        Ok(taken)
    }
    fn array<const N: usize>(&mut self, part: &'static str) -> Result<[u8; N], RecordError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(part, N)?);
        Ok(array)
    }
    fn size(&mut self, part: &'static str) -> Result<usize, RecordError> {
        let size = u64::from_le_bytes(self.array(part)?);
        usize::try_from(size).map_err(|_| field(part, "an addressable size", size))
    }
}
