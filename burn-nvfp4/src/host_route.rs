//! Packing on the host, on any backend: the defaults of [`Nvfp4Backend`], and what a device falls back to.
use burn_backend::{FloatDType, TensorMetadata, tensor::FloatTensor};
use kernels_cubecl::{Activation, Error};

use crate::{
    Nvfp4Backend, OuterScaleConvention, PackError, PackedWeight, Storage, WeightFormat,
    reference::{block_scales_tensor, codes_tensor, floats_tensor, group_amax, pack_groups, round_groups, weight_dims},
};

/// [`Nvfp4Backend::pack_weight`].
pub(crate) fn pack_weight<B: Nvfp4Backend>(
    weight: FloatTensor<B>,
    format: WeightFormat,
    amax: Option<FloatTensor<B>>,
) -> Result<PackedWeight<B>, PackError> {
    let shape = weight.shape();
    let device = B::float_device(&weight);
    let (groups, d_in, d_out) = weight_dims(&shape, format)?;
    let amax = group_amax::<B>(amax, groups, format)?;
    let dtype = weight.dtype().into();
    let packed = B::with_floats(&weight, |w| {
        pack_groups(w, groups, d_in, d_out, format, amax.as_deref())
    })?;
    let storage = Storage {
        format,
        activation: Activation::Full,
        groups,
        d_in,
        d_out,
        codes: codes_tensor::<B>(packed.codes, format, d_in, groups * d_out, &device),
        block_scales: block_scales_tensor::<B>(packed.block_scales, format, d_in, groups * d_out, &device),
        outer_scales: floats_tensor::<B>(packed.outer_scales, packed.outer_scales_shape, &device, FloatDType::F32),
        convention: OuterScaleConvention::Multiply,
    };
    Ok(PackedWeight::new(storage, shape.num_dims()).with_dtype(dtype))
}

/// [`Nvfp4Backend::fake_quantize_weight`].
pub(crate) fn fake_quantize_weight<B: Nvfp4Backend>(
    weight: FloatTensor<B>,
    format: WeightFormat,
    amax: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let (shape, device, dtype) = (weight.shape(), B::float_device(&weight), weight.dtype().into());
    let faked = match format {
        // Straight to the values, without codes in between.
        WeightFormat::Nvfp4 => weight_dims(&shape, format).and_then(|(groups, d_in, d_out)| {
            let amax = group_amax::<B>(amax, groups, format)?;
            let values = B::with_floats(&weight, |w| round_groups(w, d_in, d_out, amax.as_deref()))?;
            Ok(floats_tensor::<B>(values, shape.clone(), &device, dtype))
        }),
        WeightFormat::Fp8 => B::pack_weight(weight, format, amax).map(|packed| B::unpack_weight(&packed)),
    };
    match faked {
        Ok(values) => values,
        Err(PackError::NonFinite { .. }) => B::float_full(shape, f32::NAN.into(), &device, dtype),
        Err(PackError::Kernel(Error::Amax { amax, .. })) if !amax.is_finite() => {
            B::float_full(shape, f32::NAN.into(), &device, dtype)
        }
        Err(error) => panic!("fake quantization of a weight {shape}: {error}"),
    }
}
