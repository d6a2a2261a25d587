//! Packed weights equal TransformerEngine's golden cases and the host, bit for bit.
use crate::{Client, Random, client, golden};
use cubecl::prelude::*;
use kernels_cubecl::device::{Amax, Packer, divides_exactly, pack_weight};
use kernels_cubecl::{Nvfp4Weight, OuterScale, WeightLayout, amax, host};

/// The device, if its division is correctly rounded: packing happens on the host otherwise.
pub fn exact_client() -> Option<Client> {
    let client = client()?;
    if divides_exactly(&client).unwrap() {
        return Some(client);
    }
    #[cfg(feature = "cuda")]
    panic!("CUDA's division is correctly rounded");
    #[cfg(not(feature = "cuda"))]
    eprintln!("SKIPPED: this device's division is not correctly rounded; weights are packed on the host");
    #[cfg(not(feature = "cuda"))]
    None
}

fn pack(client: &Client, w: &[f32], shape: [usize; 3], layout: WeightLayout) -> (Vec<Nvfp4Weight>, Vec<bool>) {
    let handle = client.create_from_slice(f32::as_bytes(w));
    let amax = Amax::new(client, shape[0]);
    amax.include(client, &handle, shape[1] * shape[2]);
    let packed = pack_weight(client, &handle, shape, layout, &amax).unwrap();
    (packed.read_back(client).unwrap(), amax.read_finite(client).unwrap())
}

#[test]
fn every_te_case_in_both_layouts() {
    let Some(client) = exact_client() else { return };
    let golden = golden::tensors();
    let cases = golden["cases"].as_object().unwrap();
    assert!(cases.len() >= 18, "{} cases", cases.len());
    for (name, case) in cases {
        let (x, [rows, k], te) = (golden::floats(&case["input_f32bits"]), golden::shape(case), &case["te"]);
        if !cfg!(feature = "cuda") && x.iter().any(|v| v.is_subnormal()) {
            eprintln!("{name}: has f32 subnormals, which Vulkan devices may flush");
            continue;
        }
        let transposed: Vec<f32> = (0..rows * k).map(|at| x[at % rows * k + at / rows]).collect();
        for (layout, w) in [(WeightLayout::RowMajor, &x), (WeightLayout::Transposed, &transposed)] {
            let (packed, finite) = pack(&client, w, [1, rows, k], layout);
            assert_eq!(finite, [x.iter().all(|v| v.is_finite())], "{name}, {layout:?}: finite");
            assert_eq!(
                packed[0].block_scales,
                golden::bytes(&te["block_scale"]),
                "{name}, {layout:?}: block scales"
            );
            assert_eq!(
                packed[0].codes,
                golden::bytes(&te["packed"]),
                "{name}, {layout:?}: codes"
            );
            let outer = golden::floats(&te["global_decode_scale_f32bits"])[0];
            assert_eq!(
                packed[0].outer_scale,
                OuterScale::Multiply(outer),
                "{name}, {layout:?}: outer scale"
            );
        }
    }
}

#[test]
fn random_weights_and_experts_equal_the_host() {
    let Some(client) = exact_client() else { return };
    for (seed, [experts, rows, k]) in [[1, 1, 16], [1, 33, 80], [3, 17, 64], [5, 40, 208], [1, 130, 1024]]
        .into_iter()
        .enumerate()
    {
        let mut random = Random::new(seed as u64 + 40);
        let mut w = random.weights(experts * rows, k);
        w.iter_mut().step_by(97).for_each(|v| *v *= 30.0);
        for layout in [WeightLayout::RowMajor, WeightLayout::Transposed] {
            let expected: Vec<Nvfp4Weight> = w
                .chunks(rows * k)
                .map(|w| host::quantize_weight(w, rows, k, layout, None).unwrap())
                .collect();
            let (packed, finite) = pack(&client, &w, [experts, rows, k], layout);
            assert_eq!(packed, expected, "{experts} x {rows} x {k}, {layout:?}");
            assert_eq!(finite, vec![true; experts]);
        }
    }
}

#[test]
fn a_group_shares_its_largest_value() {
    let Some(client) = exact_client() else { return };
    let (rows, k) = (24, 48);
    let weights = [1.0, 20.0, 0.1].map(|gain| {
        Random::new(3)
            .weights(rows, k)
            .iter()
            .map(|v| v * gain)
            .collect::<Vec<_>>()
    });
    let largest = weights.iter().map(|w| amax(w)).fold(0.0, f32::max);
    let handles = weights.clone().map(|w| client.create_from_slice(f32::as_bytes(&w)));
    let group = Amax::new(&client, 1);
    handles.iter().for_each(|w| group.include(&client, w, rows * k));
    for (w, handle) in weights.iter().zip(&handles) {
        let packed = pack_weight(&client, handle, [1, rows, k], WeightLayout::RowMajor, &group).unwrap();
        let expected = host::quantize_weight(w, rows, k, WeightLayout::RowMajor, Some(largest)).unwrap();
        assert_eq!(packed.read_back(&client).unwrap(), [expected]);
    }
}

/// The way that devices take whose division is not correctly rounded.
#[test]
fn packing_on_the_host_gives_the_same_bits() {
    let Some(client) = client() else { return };
    let [experts, rows, k] = [3, 20, 112];
    let w = Random::new(21).weights(experts * rows, k);
    let handle = client.create_from_slice(f32::as_bytes(&w));
    let amax = Amax::new(&client, experts);
    amax.include(&client, &handle, rows * k);
    for layout in [WeightLayout::RowMajor, WeightLayout::Transposed] {
        let expected: Vec<Nvfp4Weight> = w
            .chunks(rows * k)
            .map(|w| host::quantize_weight(w, rows, k, layout, None).unwrap())
            .collect();
        for packer in [Packer::new(&client).unwrap(), Packer::on_host()] {
            let packed = packer
                .pack(&client, &handle, [experts, rows, k], layout, &amax)
                .unwrap();
            assert_eq!(packed.read_back(&client).unwrap(), expected, "{packer:?}, {layout:?}");
        }
    }
}
