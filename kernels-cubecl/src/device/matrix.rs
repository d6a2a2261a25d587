//! Buffers on the device with their shapes.
use super::K_STEP;
use crate::{BLOCK, Nvfp4View, OuterScale, Pass, QuantizedRows, ResidualPass};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Why a device refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The input itself is wrong.
    #[error(transparent)]
    Input(#[from] crate::Error),
    /// The device cannot run what was asked for.
    #[error("{what} is not available on this device: {why}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What is missing.
        why: String,
    },
    /// Operands that do not belong together.
    #[error("{what}: expected {expected}, got {actual}")]
    Mismatch {
        /// Which size.
        what: &'static str,
        /// The one operand's.
        expected: usize,
        /// The other's.
        actual: usize,
    },
    /// A device buffer could not be read.
    #[error("reading {what} from the device: {why}")]
    Read {
        /// Which buffer.
        what: &'static str,
        /// The runtime's message.
        why: String,
    },
}

/// Element type of a dense matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32 bits.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an f32. Devices without the type read it as halves of u32 words.
    BF16,
}

impl Element {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Whether kernels on this device can compute with and store the type.
    pub fn is_native<R: Runtime>(self, client: &ComputeClient<R>) -> bool {
        let uses = match self {
            Self::F32 => return true,
            Self::F16 => half::f16::supported_uses(client),
            Self::BF16 => half::bf16::supported_uses(client),
        };
        use cubecl::features::TypeUsage;
        uses.contains(TypeUsage::Conversion) && uses.contains(TypeUsage::Buffer)
    }
}

/// A strided `[rows, columns]` matrix in device memory.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The buffer; element `[0, 0]` lies at its start.
    pub handle: Handle,
    /// Element type.
    pub element: Element,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Elements from one row, resp. column, to the next.
    pub strides: [usize; 2],
}

impl Matrix {
    /// A row-major matrix without gaps.
    pub fn contiguous(handle: Handle, element: Element, rows: usize, columns: usize) -> Self {
        Self {
            handle,
            element,
            rows,
            columns,
            strides: [columns, 1],
        }
    }

    /// Elements from the first to the last, both included.
    pub(super) fn span(&self) -> usize {
        match self.rows.checked_mul(self.columns) {
            Some(0) | None => 0,
            Some(_) => (self.rows - 1) * self.strides[0] + (self.columns - 1) * self.strides[1] + 1,
        }
    }
}

/// Strided f32 matrices `[groups, rows, columns]` in device memory.
#[derive(Clone, Debug)]
pub struct MatrixStack {
    /// The buffer; element `[0, 0, 0]` lies at its start.
    pub handle: Handle,
    /// Matrices, and rows and columns of each.
    pub shape: [usize; 3],
    /// Elements from one to the next, along each dimension.
    pub strides: [usize; 3],
}

impl MatrixStack {
    pub(super) fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        (0..3).map(|i| (self.shape[i] - 1) * self.strides[i]).sum::<usize>() + 1
    }
}

/// Quantized activations in device memory; [`device`](super) gives the layout.
#[derive(Clone, Debug)]
pub struct PackedActivations {
    /// `[passes · tokens, kp/8]` words.
    pub codes: Handle,
    /// `[passes · tokens, kp/64]` words.
    pub block_scales: Handle,
    /// `[tokens]` f32.
    pub units: Handle,
    /// Rows.
    pub tokens: usize,
    /// Channels.
    pub k: usize,
    /// 2 with a residual pass, else 1.
    pub passes: usize,
    /// `[kp/64]` words, not 0 where a fixed mask has a bit in that K step: a hint to skip the others.
    pub residual_steps: Option<Handle>,
}

impl PackedActivations {
    /// Channels, padded.
    pub fn padded_k(&self) -> usize {
        self.k.next_multiple_of(K_STEP)
    }

    /// Copies everything to the host, for inspection; waits for the device. The residual's masks are not kept on the
    /// device: they come back empty.
    ///
    /// # Errors
    /// The device could not be read.
    pub fn read_back<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<QuantizedRows, Error> {
        let units = read::<R, f32>(client, &self.units, self.tokens, "units of activations")?;
        let rows = self.tokens * self.passes;
        let codes = read_rows(
            client,
            &self.codes,
            rows,
            self.padded_k() / 2,
            self.k / 2,
            "codes of activations",
        )?;
        let block_scales = read_rows(
            client,
            &self.block_scales,
            rows,
            self.padded_k() / BLOCK,
            self.k / BLOCK,
            "block scales of activations",
        )?;
        let pass = |index: usize| Pass {
            codes: codes[index * self.tokens * (self.k / 2)..][..self.tokens * (self.k / 2)].to_vec(),
            block_scales: block_scales[index * self.tokens * (self.k / BLOCK)..][..self.tokens * (self.k / BLOCK)]
                .to_vec(),
        };
        Ok(QuantizedRows {
            tokens: self.tokens,
            k: self.k,
            encode_scales: units.iter().map(|unit| 1.0 / unit).collect(),
            first: pass(0),
            residual: (self.passes == 2).then(|| ResidualPass {
                masks: Vec::new(),
                pass: pass(1),
            }),
        })
    }
}

/// A packed NVFP4 weight, or one for each of several experts, in device memory.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    /// `[experts, rows, kp/8]` words.
    pub codes: Handle,
    /// `[experts, rows, kp/64]` words.
    pub block_scales: Handle,
    /// `[experts]` f32, to multiply with.
    pub outer_scales: Handle,
    /// Experts; 1 for a dense layer.
    pub experts: usize,
    /// Rows, `d_out`.
    pub rows: usize,
    /// Values a row, `d_in`.
    pub k: usize,
}

impl PackedWeight {
    /// Values a row, padded.
    pub fn padded_k(&self) -> usize {
        self.k.next_multiple_of(K_STEP)
    }

    /// Copies packed host weights, one an expert, to the device.
    ///
    /// # Errors
    /// A buffer does not have the length that its shape says, or the experts differ in shape.
    pub fn from_host<R: Runtime>(client: &ComputeClient<R>, experts: &[Nvfp4View]) -> Result<Self, Error> {
        let (rows, k) = experts.first().map_or((0, 0), |w| (w.rows, w.k));
        let (mut codes, mut block_scales, mut outer_scales) = (Vec::new(), Vec::new(), Vec::new());
        let kp = k.next_multiple_of(K_STEP);
        for (group, w) in experts.iter().enumerate() {
            crate::WeightView::Nvfp4(*w).check()?;
            if (w.rows, w.k) != (rows, k) {
                let (first_rows, first_k) = (rows, k);
                return Err(crate::Error::GroupShape {
                    group,
                    rows: w.rows,
                    k: w.k,
                    first_rows,
                    first_k,
                }
                .into());
            }
            pad_rows(w.codes, k / 2, kp / 2, &mut codes);
            pad_rows(w.block_scales, k / BLOCK, kp / BLOCK, &mut block_scales);
            outer_scales.push(match w.outer_scale {
                OuterScale::Multiply(s) => s,
                OuterScale::Divide(s) => 1.0 / s,
            });
        }
        Ok(Self {
            codes: upload(client, &codes),
            block_scales: upload(client, &block_scales),
            outer_scales: upload(client, f32::as_bytes(&outer_scales)),
            experts: experts.len(),
            rows,
            k,
        })
    }

    /// Copies everything to the host, one weight an expert, for inspection and checkpoints; waits for the device.
    ///
    /// # Errors
    /// The device could not be read.
    pub fn read_back<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<Vec<crate::Nvfp4Weight>, Error> {
        let rows = self.rows * self.experts;
        let codes = read_rows(
            client,
            &self.codes,
            rows,
            self.padded_k() / 2,
            self.k / 2,
            "codes of a weight",
        )?;
        let (stride, used) = (self.padded_k() / BLOCK, self.k / BLOCK);
        let scales = read_rows(
            client,
            &self.block_scales,
            rows,
            stride,
            used,
            "block scales of a weight",
        )?;
        let outer = read::<R, f32>(client, &self.outer_scales, self.experts, "outer scales of a weight")?;
        let expert = |(i, outer): (usize, f32)| crate::Nvfp4Weight {
            rows: self.rows,
            k: self.k,
            codes: codes[i * self.rows * self.k / 2..][..self.rows * self.k / 2].to_vec(),
            block_scales: scales[i * self.rows * used..][..self.rows * used].to_vec(),
            outer_scale: OuterScale::Multiply(outer),
        };
        Ok(outer.into_iter().enumerate().map(expert).collect())
    }
}

/// Appends rows of `used` bytes, each padded with zeros to `stride`.
fn pad_rows(bytes: &[u8], used: usize, stride: usize, out: &mut Vec<u8>) {
    for row in bytes.chunks_exact(used.max(1)) {
        out.extend_from_slice(row);
        out.resize(out.len() + stride - used, 0);
    }
}

/// Copies bytes to the device; an empty buffer gets one word, since some runtimes have no empty buffers.
pub(super) fn upload<R: Runtime>(client: &ComputeClient<R>, bytes: &[u8]) -> Handle {
    if bytes.is_empty() {
        client.create_from_slice(&[0; 16])
    } else {
        client.create_from_slice(bytes)
    }
}

/// A buffer of `words` 32-bit words, at least four.
pub(super) fn allocate<R: Runtime>(client: &ComputeClient<R>, words: usize) -> Handle {
    client.empty(4 * words.max(4))
}

/// An array argument. `len` counts scalars, also where the kernel sees vectors.
pub(super) fn array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: callers pass the number of scalars that the buffer was allocated or checked for.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), len.max(1)) }
}

pub(super) fn read<R: Runtime, T: CubeElement + Clone>(
    client: &ComputeClient<R>,
    handle: &Handle,
    len: usize,
    what: &'static str,
) -> Result<Vec<T>, Error> {
    let bytes = client.read_one(handle.clone()).map_err(|e| Error::Read {
        what,
        why: e.to_string(),
    })?;
    Ok(T::from_bytes(&bytes)[..len].to_vec())
}

/// The first `used` of every `stride` bytes.
pub(super) fn read_rows<R: Runtime>(
    client: &ComputeClient<R>,
    handle: &Handle,
    rows: usize,
    stride: usize,
    used: usize,
    what: &'static str,
) -> Result<Vec<u8>, Error> {
    let bytes = read::<R, u8>(client, handle, rows * stride, what)?;
    Ok(bytes
        .chunks_exact(stride.max(1))
        .flat_map(|row| &row[..used])
        .copied()
        .collect())
}
