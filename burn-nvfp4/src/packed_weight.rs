//! A packed weight: codes and scales in B's own tensors, and how activations meet it.
use burn_backend::{
    Backend, FloatDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};
use kernels_cubecl::{Activation, BLOCK, Compensation, Fp8View, Nvfp4View, OuterScale, WeightView};
#[cfg(feature = "cubecl")]
use std::{any::Any, sync::OnceLock};
use std::{borrow::Cow, fmt, sync::Arc};

use crate::{Nvfp4Backend, PackError, WeightFormat};

/// A packed weight `[d_in, d_out]`, or a stack of them `[groups, d_in, d_out]` (experts).
///
/// Stored as rows: `groups · d_out` rows of `d_in` values, blocks along `d_in`. Cloning shares the storage. Leading
/// dimensions of one and a transposition are a matter of the view; the storage never moves. A backend may pad the rows with
/// zeros, to a multiple of its [`Nvfp4Backend::ROW_STEP`]: what leaves the storage (bytes, records, files) has no padding.
#[derive(Clone, Debug)]
pub struct PackedWeight<B: Backend> {
    storage: Arc<Storage<B>>,
    /// Rank of the view: 2, or 3 and more with leading ones.
    rank: usize,
    /// The last two dimensions of the view are `[d_out, d_in]`.
    transposed: bool,
    /// The float type the tensor stands for.
    dtype: FloatDType,
    #[cfg(feature = "cubecl")]
    kept: Kept,
}

/// What an NVFP4 outer scale does to a block scale: makers of checkpoints differ, and so do the roundings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OuterScaleConvention {
    /// It multiplies: ours, `1/S`, and ModelOpt's `weight_scale_2`.
    #[default]
    Multiply,
    /// It divides: compressed-tensors' `weight_global_scale`.
    Divide,
}

/// The tensors of a packed weight.
#[derive(Clone, Debug)]
pub struct Storage<B: Backend> {
    /// Format of codes and scales.
    pub format: WeightFormat,
    /// How activations enter a product with the weight.
    pub activation: Activation,
    /// Matrices in the stack, 1 for a single weight.
    pub groups: usize,
    /// Length of the contraction axis.
    pub d_in: usize,
    /// Outputs.
    pub d_out: usize,
    /// U8 `[groups · d_out, d_in/2]` for NVFP4, the even element in the low nibble; `[groups · d_out, d_in]` for FP8. With
    /// `d_in` padded where the backend pads.
    pub codes: IntTensor<B>,
    /// E4M3 bytes, U8 `[groups · d_out, d_in/16]` for NVFP4, `d_in` padded likewise; `[0]` for FP8.
    pub block_scales: IntTensor<B>,
    /// F32: NVFP4's outer scale a group, `[groups]`; FP8's channel scales `[groups · d_out]`.
    pub outer_scales: FloatTensor<B>,
    /// What NVFP4's outer scales do to the block scales.
    pub convention: OuterScaleConvention,
}

impl<B: Nvfp4Backend> PackedWeight<B> {
    /// From codes and scales. `rank` is 2 for a single weight, 3 for a stack.
    ///
    /// # Panics
    ///
    /// When a tensor does not have the shape that [`Storage`] says.
    pub fn new(storage: Storage<B>, rank: usize) -> Self {
        let Storage {
            groups, d_in, d_out, ..
        } = storage;
        let rows = groups * d_out;
        let d_in = padded_row::<B>(d_in);
        let (codes, block_scales, outer_scales) = match storage.format {
            WeightFormat::Nvfp4 => (
                [rows, d_in / 2].into(),
                [rows, d_in / BLOCK].into(),
                Shape::from([groups]),
            ),
            WeightFormat::Fp8 => ([rows, d_in].into(), Shape::from([0]), Shape::from([rows])),
        };
        assert_eq!(storage.codes.shape(), codes, "codes of a packed weight");
        assert_eq!(
            storage.block_scales.shape(),
            block_scales,
            "block scales of a packed weight"
        );
        assert_eq!(
            storage.outer_scales.shape(),
            outer_scales,
            "outer scales of a packed weight"
        );
        assert!(
            rank >= 3 || (rank == 2 && groups == 1),
            "{groups} groups in a weight of rank {rank}"
        );
        Self {
            storage: Arc::new(storage),
            rank,
            transposed: false,
            dtype: FloatDType::F32,
            #[cfg(feature = "cubecl")]
            kept: Kept::default(),
        }
    }
    /// The tensors.
    pub fn storage(&self) -> &Storage<B> {
        &self.storage
    }
    /// Format of codes and scales.
    pub fn format(&self) -> WeightFormat {
        self.storage.format
    }
    /// How activations enter a product with the weight.
    pub fn activation(&self) -> &Activation {
        &self.storage.activation
    }
    /// Matrices in the stack, 1 for a single weight.
    pub fn groups(&self) -> usize {
        self.storage.groups
    }
    /// Length of the contraction axis.
    pub fn d_in(&self) -> usize {
        self.storage.d_in
    }
    /// Outputs.
    pub fn d_out(&self) -> usize {
        self.storage.d_out
    }
    /// Whether the last two dimensions of the view are `[d_out, d_in]`.
    pub fn is_transposed(&self) -> bool {
        self.transposed
    }
    /// The float type the tensor stands for.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }
    /// Rank of the view.
    pub fn rank(&self) -> usize {
        self.rank
    }
    /// Shape of the view.
    pub fn shape(&self) -> Shape {
        let mut dims = vec![1; self.rank];
        if self.rank > 2 {
            dims[self.rank - 3] = self.groups();
        }
        let matrix = [self.d_in(), self.d_out()];
        dims[self.rank - 2] = matrix[usize::from(self.transposed)];
        dims[self.rank - 1] = matrix[usize::from(!self.transposed)];
        Shape::from(dims)
    }
    /// Length of the contraction axis as it is stored.
    pub fn padded_d_in(&self) -> usize {
        padded_row::<B>(self.d_in())
    }
    /// Bytes that codes, scales and residual mask take, padding included.
    pub fn bytes(&self) -> usize {
        let rows = self.groups() * self.d_out();
        let mask = match self.activation() {
            Activation::Compensated(Compensation::Mask(mask)) => 4 * mask.words().len(),
            _ => 0,
        };
        mask + match self.format() {
            WeightFormat::Nvfp4 => rows * (self.padded_d_in() / 2 + self.padded_d_in() / BLOCK) + 4 * self.groups(),
            WeightFormat::Fp8 => rows * (self.padded_d_in() + 4),
        }
    }
    /// The codes, as [`Storage::codes`] lays them out, without padding.
    pub fn codes(&self) -> Vec<u8> {
        let [codes, _] = self.row_bytes();
        B::with_bytes(&self.storage.codes, |bytes| codes.strip(bytes).into_owned())
    }
    /// The block scales, as [`Storage::block_scales`] lays them out, without padding.
    pub fn block_scales(&self) -> Vec<u8> {
        let [_, block_scales] = self.row_bytes();
        B::with_bytes(&self.storage.block_scales, |bytes| {
            block_scales.strip(bytes).into_owned()
        })
    }
    /// Bytes of a row of codes, and of block scales.
    pub(crate) fn row_bytes(&self) -> [RowBytes; 2] {
        RowBytes::of::<B>(self.format(), self.d_in())
    }
    /// The outer scales, as [`Storage::outer_scales`] lays them out.
    pub fn outer_scales(&self) -> Vec<f32> {
        B::with_floats(&self.storage.outer_scales, <[f32]>::to_vec)
    }
    /// Device of the tensors.
    pub fn device(&self) -> Device<B> {
        B::int_device(&self.storage.codes)
    }
    /// The same weight on another device.
    pub fn to_device(self, device: &Device<B>) -> Self {
        if self.device() == *device {
            return self;
        }
        let storage = Arc::unwrap_or_clone(self.storage);
        let storage = Storage {
            codes: B::int_to_device(storage.codes, device),
            block_scales: B::int_to_device(storage.block_scales, device),
            outer_scales: B::float_to_device(storage.outer_scales, device),
            ..storage
        };
        Self {
            storage: Arc::new(storage),
            #[cfg(feature = "cubecl")]
            kept: Kept::default(),
            ..self
        }
    }
    /// The same codes and scales with another activation setting.
    ///
    /// # Errors
    ///
    /// The activation does not fit `d_in`: a mask over another number of channels, say.
    pub fn with_activation(self, activation: Activation) -> Result<Self, PackError> {
        if let Activation::Compensated(Compensation::Mask(mask)) = &activation
            && mask.k() != self.d_in()
        {
            return Err(PackError::MaskLength {
                expected: self.d_in(),
                actual: mask.k(),
            });
        }
        activation.check(self.d_in())?;
        if *self.activation() == activation {
            return Ok(self);
        }
        let storage = Storage {
            activation,
            ..Arc::unwrap_or_clone(self.storage)
        };
        Ok(Self {
            storage: Arc::new(storage),
            #[cfg(feature = "cubecl")]
            kept: Kept::default(),
            ..self
        })
    }
    /// All but the tensors.
    #[cfg(feature = "cubecl")]
    pub(crate) fn frame(&self) -> Frame {
        let storage = self.storage();
        Frame {
            format: storage.format,
            activation: storage.activation.clone(),
            groups: storage.groups,
            d_in: storage.d_in,
            d_out: storage.d_out,
            convention: storage.convention,
            rank: self.rank,
            transposed: self.transposed,
            dtype: self.dtype,
            kept: self.kept.clone(),
        }
    }
    /// What the backend keeps of it, shared by all views.
    #[cfg(feature = "cubecl")]
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }
    pub(crate) fn with_dtype(self, dtype: FloatDType) -> Self {
        Self { dtype, ..self }
    }

    // Views. What keeps the weight packed is a matter of the last two dimensions; all others are ones, or the groups.

    /// The last two dimensions swapped.
    pub(crate) fn transposed(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }
    /// Whether swapping these dimensions swaps the matrix and nothing else.
    pub(crate) fn is_matrix_swap(&self, dim1: usize, dim2: usize) -> bool {
        dim1 != dim2 && dim1 + 2 >= self.rank && dim2 + 2 >= self.rank
    }
    /// The view under a permutation of dimensions, if it stays one.
    pub(crate) fn permuted(&self, axes: &[usize]) -> Option<Self> {
        let (outer, matrix) = axes.split_at_checked(self.rank - 2)?;
        let in_place = outer.iter().enumerate().all(|(at, axis)| at == *axis);
        let (first, second) = (self.rank - 2, self.rank - 1);
        match *matrix {
            [a, b] if in_place && (a, b) == (first, second) => Some(self.clone()),
            [a, b] if in_place && (a, b) == (second, first) => Some(self.clone().transposed()),
            _ => None,
        }
    }
    /// The view under a reshape that only adds or removes leading ones.
    pub(crate) fn reshaped(&self, shape: &Shape) -> Option<Self> {
        let rank = shape.num_dims();
        if rank < 2 || (rank < 3 && self.groups() != 1) {
            return None;
        }
        let view = Self { rank, ..self.clone() };
        (view.shape() == *shape).then_some(view)
    }

    // Products.

    /// Whether this is a weight `[d_in, d_out]` as linear layers hold it.
    pub(crate) fn is_linear_weight(&self) -> bool {
        self.rank == 2 && !self.transposed
    }
    /// `lhs [.., tokens, d_in] · self`: with packed operands where the contraction runs along the blocks, else dense.
    pub(crate) fn matmul(self, lhs: FloatTensor<B>) -> FloatTensor<B> {
        let dims = lhs.shape();
        if self.transposed || dims.num_dims() != self.rank {
            let dtype = lhs.dtype().into();
            return B::float_matmul(lhs, B::unpack_weight(&self.with_dtype(dtype)));
        }
        if self.groups() == 1 {
            return B::packed_linear(lhs, &self);
        }
        self.batched_matmul(lhs, dims)
    }
    /// One product a group: `lhs [.., groups or 1, tokens, d_in]`.
    fn batched_matmul(&self, lhs: FloatTensor<B>, mut dims: Shape) -> FloatTensor<B> {
        let (rank, groups) = (self.rank, self.groups());
        if dims[rank - 3] == 1 {
            dims[rank - 3] = groups;
        }
        assert_eq!(
            (dims[rank - 3], dims[rank - 1]),
            (groups, self.d_in()),
            "matmul: input {} does not match the packed weight {}",
            lhs.shape(),
            self.shape()
        );
        let batch: usize = (0..rank - 3).map(|dim| dims[dim]).product();
        let tokens = dims[rank - 2];
        let lhs = B::float_expand(lhs, dims.clone());
        let lhs = B::float_reshape(lhs, Shape::from([batch, groups, tokens, self.d_in()]));
        let lhs = B::float_swap_dims(lhs, 0, 1);
        let rows = Shape::from([groups * batch * tokens, self.d_in()]);
        let counts = burn_backend::TensorData::new(vec![(batch * tokens) as i32; groups], [groups]);
        let counts = B::int_from_data(counts, &self.device());
        let y = B::packed_grouped_linear(B::float_reshape(lhs, rows), self, counts);
        let y = B::float_reshape(y, Shape::from([groups, batch, tokens, self.d_out()]));
        dims[rank - 1] = self.d_out();
        B::float_reshape(B::float_swap_dims(y, 0, 1), dims)
    }

    /// The weight of each group, on the host.
    pub(crate) fn with_views<R>(&self, read: impl FnOnce(&[WeightView<'_>]) -> R) -> R {
        let storage = &*self.storage;
        let (rows, k) = (storage.d_out, storage.d_in);
        let [code_rows, scale_rows] = self.row_bytes();
        B::with_bytes(&storage.codes, |codes| {
            B::with_bytes(&storage.block_scales, |block_scales| {
                let (codes, block_scales) = (&code_rows.strip(codes), &scale_rows.strip(block_scales));
                B::with_floats(&storage.outer_scales, |outer_scales| {
                    let views: Vec<_> = (0..storage.groups)
                        .map(|group| match storage.format {
                            WeightFormat::Nvfp4 => WeightView::Nvfp4(Nvfp4View {
                                rows,
                                k,
                                codes: part(codes, group, rows * k / 2),
                                block_scales: part(block_scales, group, rows * k / BLOCK),
                                outer_scale: match storage.convention {
                                    OuterScaleConvention::Multiply => OuterScale::Multiply(outer_scales[group]),
                                    OuterScaleConvention::Divide => OuterScale::Divide(outer_scales[group]),
                                },
                            }),
                            WeightFormat::Fp8 => WeightView::Fp8(Fp8View {
                                rows,
                                k,
                                codes: part(codes, group, rows * k),
                                channel_scales: part(outer_scales, group, rows),
                            }),
                        })
                        .collect();
                    read(&views)
                })
            })
        })
    }
}

/// What a backend makes of a weight at its first product and keeps beside it: the operands of its kernels, a residual mask
/// in the device's memory among them.
#[cfg(feature = "cubecl")]
#[derive(Clone, Default)]
pub(crate) struct Kept(Arc<OnceLock<Box<dyn Any + Send + Sync>>>);

#[cfg(feature = "cubecl")]
impl Kept {
    /// What was made before, or is made now.
    ///
    /// # Panics
    /// If something of another type was made: a weight has one backend.
    pub(crate) fn get_or_make<T: Send + Sync + 'static>(&self, make: impl FnOnce() -> T) -> &T {
        let kept = self.0.get_or_init(|| Box::new(make()));
        kept.downcast_ref().expect("one backend makes one type")
    }
}

#[cfg(feature = "cubecl")]
impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.get().is_some() { "Kept(..)" } else { "Kept" })
    }
}

/// A packed weight without its tensors, to be made again with those of another backend.
#[cfg(feature = "cubecl")]
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    format: WeightFormat,
    activation: Activation,
    groups: usize,
    d_in: usize,
    d_out: usize,
    convention: OuterScaleConvention,
    rank: usize,
    transposed: bool,
    dtype: FloatDType,
    kept: Kept,
}

#[cfg(feature = "cubecl")]
impl Frame {
    /// The weight with these tensors.
    pub(crate) fn fill<B: Nvfp4Backend>(
        self,
        codes: IntTensor<B>,
        block_scales: IntTensor<B>,
        outer_scales: FloatTensor<B>,
    ) -> PackedWeight<B> {
        let storage = Storage {
            format: self.format,
            activation: self.activation,
            groups: self.groups,
            d_in: self.d_in,
            d_out: self.d_out,
            codes,
            block_scales,
            outer_scales,
            convention: self.convention,
        };
        PackedWeight {
            transposed: self.transposed,
            dtype: self.dtype,
            kept: self.kept,
            ..PackedWeight::new(storage, self.rank)
        }
    }
}

/// `d_in` as a backend stores it.
fn padded_row<B: Nvfp4Backend>(d_in: usize) -> usize {
    d_in.next_multiple_of(B::ROW_STEP)
}

/// Bytes of a row of codes or block scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowBytes {
    /// That mean something.
    pub(crate) used: usize,
    /// With the padding of the backend.
    pub(crate) stored: usize,
}

impl RowBytes {
    /// Of codes, and of block scales.
    pub(crate) fn of<B: Nvfp4Backend>(format: WeightFormat, d_in: usize) -> [Self; 2] {
        let both = |values: usize| Self {
            used: d_in / values,
            stored: padded_row::<B>(d_in) / values,
        };
        match format {
            WeightFormat::Nvfp4 => [both(2), both(BLOCK)],
            WeightFormat::Fp8 => [both(1), Self { used: 0, stored: 0 }],
        }
    }
    /// Rows without their padding.
    pub(crate) fn strip<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        if self.used == self.stored {
            return Cow::Borrowed(bytes);
        }
        let rows = bytes.chunks_exact(self.stored);
        Cow::Owned(rows.flat_map(|row| &row[..self.used]).copied().collect())
    }
    /// Rows with their padding.
    pub(crate) fn pad(&self, bytes: Vec<u8>) -> Vec<u8> {
        if self.used == self.stored || self.used == 0 {
            return bytes;
        }
        let mut padded = Vec::with_capacity(bytes.len() / self.used * self.stored);
        for row in bytes.chunks_exact(self.used) {
            padded.extend_from_slice(row);
            padded.resize(padded.len() + self.stored - self.used, 0);
        }
        padded
    }
}

fn part<T>(slice: &[T], group: usize, len: usize) -> &[T] {
    &slice[group * len..(group + 1) * len]
}

impl<B: Nvfp4Backend> fmt::Display for PackedWeight<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}, activations {:?}, {} bytes",
            self.format(),
            self.shape(),
            self.activation(),
            self.bytes()
        )
    }
}
