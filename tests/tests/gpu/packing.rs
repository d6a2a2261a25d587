//! Codes, scales and values have Flex's bits.
use crate::support::{Stack, activations, bits, data, float, lazy, mask, noise, on, on_flex, read, settings, tensor};
use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData, TensorPrimitive},
};
use burn_nvfp4::{
    Activation, Nvfp4, Nvfp4Backend, Nvfp4QTensor, Nvfp4Tensor, PackedWeight, WeightFormat, packed_weight,
};

const SHAPES: [&[usize]; 6] = [&[64, 24], &[48, 40], &[16, 1], &[208, 7], &[3, 80, 16], &[5, 128, 33]];

fn weight(seed: u32, shape: &[usize]) -> TensorData {
    let count = shape.iter().product();
    let values = noise(seed, count).into_iter().map(|v| v * 0.02).collect();
    TensorData::new::<f32, _>(values, shape.to_vec())
}

fn assert_same<B: Stack>(a: &PackedWeight<B>, b: &PackedWeight<Flex>, what: &str) {
    assert_eq!(a.codes(), b.codes(), "codes, {what}");
    assert_eq!(a.block_scales(), b.block_scales(), "block scales, {what}");
    assert_eq!(bits(&a.outer_scales()), bits(&b.outer_scales()), "outer scales, {what}");
    assert_eq!((a.shape(), a.activation()), (b.shape(), b.activation()), "{what}");
}

pub fn a_packed_weight_has_the_bytes_of_flex<B: Stack>() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            let data = weight(seed as u32, shape);
            let what = format!("{format} {shape:?}");
            let packed = on::<B>(&data, format, &Activation::Full);
            assert_same(&packed, &on_flex(&data, format, &Activation::Full), &what);
            // The padding is memory too.
            let (d_in, rows) = (packed.d_in().next_multiple_of(64), packed.groups() * packed.d_out());
            let expected = match format {
                WeightFormat::Nvfp4 => rows * (d_in / 2 + d_in / 16) + 4 * packed.groups(),
                WeightFormat::Fp8 => rows * (d_in + 4),
            };
            assert_eq!(packed.bytes(), expected, "{what}");
        }
    }
    // In another layout.
    let data = weight(9, &[24, 64]);
    let transposed = tensor::<B, 2>(&data).transpose().into_primitive().tensor();
    let expected = tensor::<Flex, 2>(&data).transpose().into_primitive().tensor();
    assert_same(
        &B::pack_weight(transposed, WeightFormat::Nvfp4, None).unwrap(),
        &Flex::pack_weight(expected, WeightFormat::Nvfp4, None).unwrap(),
        "transposed",
    );
    let zeros = TensorData::zeros::<f32, _>([32, 8]);
    assert_same(
        &on::<B>(&zeros, WeightFormat::Nvfp4, &Activation::Full),
        &on_flex(&zeros, WeightFormat::Nvfp4, &Activation::Full),
        "zeros",
    );
}

pub fn weights_share_an_outer_scale_by_their_amax<B: Stack>() {
    let data = weight(1, &[3, 64, 24]);
    let amax = TensorData::new(vec![0.5f32, 0.75, 0.031], [3]);
    let pack = |w, amax| B::pack_weight(w, WeightFormat::Nvfp4, Some(amax)).unwrap();
    let expected = Flex::pack_weight(float::<Flex>(&data), WeightFormat::Nvfp4, Some(float::<Flex>(&amax))).unwrap();
    assert_same(&pack(float::<B>(&data), float::<B>(&amax)), &expected, "a given amax");
    let faked = B::fake_quantize_weight(float::<B>(&data), WeightFormat::Nvfp4, Some(float::<B>(&amax)));
    assert_eq!(
        bits(&read::<B>(&faked)),
        bits(&read::<Flex>(&Flex::unpack_weight(&expected)))
    );
}

pub fn what_cannot_be_packed_is_refused_with_the_words_of_flex<B: Stack>() {
    let compare = |data: TensorData, amax: Option<Vec<f32>>| {
        let amax = amax.map(|amax| {
            let len = amax.len();
            TensorData::new(amax, [len])
        });
        let a = B::pack_weight(float::<B>(&data), WeightFormat::Nvfp4, amax.as_ref().map(float::<B>));
        let b = Flex::pack_weight(
            float::<Flex>(&data),
            WeightFormat::Nvfp4,
            amax.as_ref().map(float::<Flex>),
        );
        assert_eq!(a.unwrap_err().to_string(), b.unwrap_err().to_string());
    };
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = noise(2, 2 * 32 * 6);
        values[32 * 6 + 6 * 9 + 4] = bad;
        compare(TensorData::new(values, [2, 32, 6]), None);
    }
    compare(weight(3, &[30, 8]), None);
    compare(weight(3, &[32]), None);
    compare(data(3, [32, 8]), Some(vec![1e-3]));
    compare(data(3, [32, 8]), Some(vec![9.0, 9.0]));
    compare(data(3, [32, 8]), Some(vec![f32::NAN]));
}

pub fn records_are_those_of_flex_in_both_directions<B: Stack>() {
    for (format, activation) in settings(48) {
        for shape in [&[48, 40][..], &[3, 48, 16]] {
            let data = weight(4, shape);
            let (here, there) = (on::<B>(&data, format, &activation), on_flex(&data, format, &activation));
            let (a, b) = (record::<B>(here), record::<Flex>(there.clone()));
            assert_eq!(a.bytes[..], b.bytes[..], "{format}, {activation:?}");
            let back = match shape.len() {
                2 => packed_weight(&Tensor::<Nvfp4<B>, 2>::from_data(b, &Default::default())),
                _ => packed_weight(&Tensor::<Nvfp4<B>, 3>::from_data(b, &Default::default())),
            };
            assert_same(&back.expect("a packed weight"), &there, "a record of Flex");
        }
    }
}

fn record<B: Nvfp4Backend>(weight: PackedWeight<B>) -> TensorData {
    let (rank, scheme) = (weight.rank(), weight.format().scheme());
    let tensor = Nvfp4QTensor::Lazy {
        tensor: Nvfp4Tensor::Packed(weight),
        scheme,
    };
    let tensor = TensorPrimitive::QFloat(tensor);
    match rank {
        2 => Tensor::<Nvfp4<B>, 2>::from_primitive(tensor).into_data(),
        _ => Tensor::<Nvfp4<B>, 3>::from_primitive(tensor).into_data(),
    }
}

pub fn decoded_values_have_the_bits_of_flex<B: Stack>() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            let data = weight(seed as u32 + 20, shape);
            let a = on::<B>(&data, format, &Activation::Full);
            let b = on_flex(&data, format, &Activation::Full);
            assert_eq!(
                bits(&read::<B>(&B::unpack_weight(&a))),
                bits(&read::<Flex>(&Flex::unpack_weight(&b))),
                "{format} {shape:?}"
            );
        }
    }
    let data = weight(30, &[48, 10]);
    let a = lazy::<B, 2>(on::<B>(&data, WeightFormat::Nvfp4, &Activation::Nvfp4)).transpose();
    let b = lazy::<Flex, 2>(on_flex(&data, WeightFormat::Nvfp4, &Activation::Nvfp4)).transpose();
    assert_eq!(
        a.into_data().to_vec::<f32>().unwrap(),
        b.into_data().to_vec::<f32>().unwrap()
    );
}

pub fn fake_quantized_weights_have_the_bits_of_flex<B: Stack>() {
    for (seed, shape) in SHAPES.iter().enumerate() {
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            let data = weight(seed as u32 + 40, shape);
            let a = B::fake_quantize_weight(float::<B>(&data), format, None);
            let b = Flex::fake_quantize_weight(float::<Flex>(&data), format, None);
            assert_eq!(bits(&read::<B>(&a)), bits(&read::<Flex>(&b)), "{format} {shape:?}");
            // What a packed weight decodes to.
            let packed = on::<B>(&data, format, &Activation::Full);
            assert_eq!(bits(&read::<B>(&B::unpack_weight(&packed))), bits(&read::<B>(&a)));
        }
    }
}

pub fn fake_quantized_activations_have_the_bits_of_flex<B: Stack>() {
    for k in [48, 64, 208] {
        for (_, activation) in settings(k) {
            let data = activations(k as u32, [9, k]);
            let a = B::fake_quantize_activations(float::<B>(&data), &activation);
            let b = Flex::fake_quantize_activations(float::<Flex>(&data), &activation);
            assert_eq!(bits(&read::<B>(&a)), bits(&read::<Flex>(&b)), "{activation:?}");
            // Three dimensions, and a row that is not finite.
            let mut values = data.to_vec::<f32>().unwrap();
            values[4 * k + 3] = f32::NEG_INFINITY;
            let data = TensorData::new(values, [3, 3, k]);
            let a = read::<B>(&B::fake_quantize_activations(float::<B>(&data), &activation));
            let b = read::<Flex>(&Flex::fake_quantize_activations(float::<Flex>(&data), &activation));
            let nan = |v: &[f32]| {
                v.iter()
                    .map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() })
                    .collect::<Vec<_>>()
            };
            assert_eq!(nan(&a), nan(&b), "{activation:?}");
        }
    }
    assert_eq!(mask(48).k(), 48);
}

pub fn a_weight_that_is_not_finite_becomes_nan<B: Stack>() {
    for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let mut values = noise(50, 2 * 48 * 6);
            values[77] = bad;
            let data = TensorData::new(values, [2, 48, 6]);
            let faked = B::fake_quantize_weight(float::<B>(&data), format, None);
            assert!(read::<B>(&faked).iter().all(|v| v.is_nan()), "{format}");
        }
    }
    let amax = TensorData::new(vec![f32::INFINITY], [1]);
    let data = data(51, [32, 6]);
    let faked = B::fake_quantize_weight(float::<B>(&data), WeightFormat::Nvfp4, Some(float::<B>(&amax)));
    assert!(read::<B>(&faked).iter().all(|v| v.is_nan()));
}
