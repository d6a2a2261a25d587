//! Packs one tensor, and looks inside a packed one.
use burn::tensor::{Tensor, TensorPrimitive};
use kernels_cubecl::ResidualMask;

use crate::{Nvfp4, Nvfp4Backend, Nvfp4QTensor, Nvfp4Tensor, PackError, PackedWeight, Precision};

/// Packs a weight `[d_in, d_out]`, or a stack `[groups, d_in, d_out]`.
///
/// `amax` (`[1]`, or `[groups]`) is the largest magnitude that the outer scale covers, for weights that share one;
/// without it each weight's own. `mask`, over `d_in`, is what calibrated compensation needs.
///
/// The result is a quantized tensor, so that Burn's records keep it packed; `dequantize` costs nothing and gives the
/// lazy float tensor, which products use packed too. A weight that is packed already keeps its codes and scales and
/// gets the new activation setting.
///
/// # Errors
///
/// [`PackError`]: the shape, `d_in` not a multiple of 16, a non-finite value, an `amax` below the weight's own or not
/// one a group, a missing or foreign mask, a weight packed in another format, or `Precision::High`.
pub fn pack<B: Nvfp4Backend, const D: usize>(
    weight: Tensor<Nvfp4<B>, D>,
    precision: &Precision,
    amax: Option<Tensor<Nvfp4<B>, 1>>,
    mask: Option<&ResidualMask>,
) -> Result<Tensor<Nvfp4<B>, D>, PackError> {
    let packed = pack_primitive(weight.into_primitive().tensor(), precision, amax, mask)?;
    Ok(quantized(packed))
}

pub(crate) fn pack_primitive<B: Nvfp4Backend>(
    weight: Nvfp4Tensor<B>,
    precision: &Precision,
    amax: Option<Tensor<Nvfp4<B>, 1>>,
    mask: Option<&ResidualMask>,
) -> Result<PackedWeight<B>, PackError> {
    let format = precision.weight_format().ok_or(PackError::NothingToPack)?;
    let activation = precision.activation(mask)?;
    let packed = match weight {
        Nvfp4Tensor::Packed(weight) if weight.format() == format => weight,
        Nvfp4Tensor::Packed(weight) => {
            return Err(PackError::AlreadyPacked {
                expected: format,
                actual: weight.format(),
            });
        }
        Nvfp4Tensor::Dense(weight) => {
            let amax = amax.map(|amax| amax.into_primitive().tensor().dense());
            B::pack_weight(weight, format, amax)?
        }
    };
    packed.with_activation(activation)
}

/// The packed weight in a tensor, if it holds one.
pub fn packed_weight<B: Nvfp4Backend, const D: usize>(weight: &Tensor<Nvfp4<B>, D>) -> Option<PackedWeight<B>> {
    match weight.clone().into_primitive() {
        TensorPrimitive::Float(Nvfp4Tensor::Packed(weight))
        | TensorPrimitive::QFloat(Nvfp4QTensor::Lazy {
            tensor: Nvfp4Tensor::Packed(weight),
            ..
        }) => Some(weight),
        _ => None,
    }
}

/// A packed weight as a quantized tensor: what records keep packed.
pub(crate) fn quantized<B: Nvfp4Backend, const D: usize>(weight: PackedWeight<B>) -> Tensor<Nvfp4<B>, D> {
    assert_eq!(weight.shape().num_dims(), D, "rank of the tensor");
    let scheme = weight.format().scheme();
    let tensor = Nvfp4Tensor::Packed(weight);
    Tensor::from_primitive(TensorPrimitive::QFloat(Nvfp4QTensor::Lazy { tensor, scheme }))
}

/// A packed weight as a float tensor: what every operation, and `Autodiff`, can take.
pub(crate) fn lazy_float<B: Nvfp4Backend, const D: usize>(weight: PackedWeight<B>) -> Tensor<Nvfp4<B>, D> {
    assert_eq!(weight.shape().num_dims(), D, "rank of the tensor");
    Tensor::from_primitive(TensorPrimitive::Float(Nvfp4Tensor::Packed(weight)))
}
