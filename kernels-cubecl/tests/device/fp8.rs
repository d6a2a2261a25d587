//! The FP8 baseline: codes and scales equal the host's bits, products agree within the bound.
use crate::grouped::routing;
use crate::matmul::assert_within_bound;
use crate::pack::exact_client;
use crate::{Random, download, round_to, upload};
use cubecl::prelude::*;
use kernels_cubecl::device::{Element, Fp8Rows, MatmulOptions, Route, matmul_fp8, pack_weight_fp8, quantize_fp8};
use kernels_cubecl::{Fp8Weight, WeightLayout, e4m3, host};

/// Values that codes and scales stand for, `[rows, k]`.
fn decode((codes, scales): &(Vec<u8>, Vec<f32>), k: usize) -> Vec<f64> {
    let value = |(at, code): (usize, &u8)| f64::from(e4m3::decode(*code)) * f64::from(scales[at / k]);
    codes.iter().enumerate().map(value).collect()
}

#[test]
fn weights_equal_the_host_in_both_layouts() {
    let Some(client) = exact_client() else { return };
    for (seed, [experts, rows, k]) in [[1, 3, 16], [1, 40, 100], [4, 9, 208], [2, 33, 1024]]
        .into_iter()
        .enumerate()
    {
        let w = Random::new(seed as u64).weights(experts * rows, k);
        for layout in [WeightLayout::RowMajor, WeightLayout::Transposed] {
            let expected: Vec<Fp8Weight> = w
                .chunks(rows * k)
                .map(|w| host::quantize_weight_fp8(w, rows, k, layout).unwrap())
                .collect();
            let packed = pack_weight_fp8(
                &client,
                &client.create_from_slice(f32::as_bytes(&w)),
                [experts, rows, k],
                layout,
            );
            let (codes, scales) = packed.read_back(&client).unwrap();
            let all = |part: fn(&Fp8Weight) -> Vec<u8>| expected.iter().flat_map(part).collect::<Vec<_>>();
            assert_eq!(codes, all(|w| w.codes.clone()), "{experts} x {rows} x {k}, {layout:?}");
            let expected: Vec<f32> = expected.iter().flat_map(|w| w.channel_scales.clone()).collect();
            assert_eq!(scales, expected, "{experts} x {rows} x {k}, {layout:?}");
        }
    }
}

/// As weights: the same rule a row. A row that is not finite gets a scale of NaN.
#[test]
fn activations_of_every_type() {
    let Some(client) = exact_client() else { return };
    let (tokens, k) = (7, 144);
    for element in [Element::F32, Element::F16, Element::BF16] {
        let mut x = round_to(element, &Random::new(3).activations(tokens, k));
        x[2 * k..3 * k].fill(0.0);
        let expected = host::quantize_weight_fp8(&x, tokens, k, WeightLayout::RowMajor).unwrap();
        x[4 * k + 7] = f32::INFINITY;
        let (codes, scales) = quantize_fp8(&client, &upload(&client, element, &x, tokens, k))
            .unwrap()
            .read_back(&client)
            .unwrap();
        for row in 0..tokens {
            if row == 4 {
                assert!(scales[row].is_nan());
                continue;
            }
            assert_eq!(scales[row], expected.channel_scales[row], "{element:?}, row {row}");
            assert_eq!(
                codes[row * k..][..k],
                expected.codes[row * k..][..k],
                "{element:?}, row {row}"
            );
        }
    }
}

#[test]
fn products_agree_dense_and_grouped() {
    let Some(client) = exact_client() else { return };
    let counts = [3u32, 0, 41, 9];
    let tokens = counts.iter().sum::<u32>() as usize;
    for (rows, k) in [(24, 64), (72, 208), (40, 1000), (130, 2112)] {
        let x = Random::new(1).activations(tokens, k);
        let x = quantize_fp8(&client, &upload(&client, Element::F32, &x, tokens, k)).unwrap();
        let xq: Vec<f32> = decode(&x.read_back(&client).unwrap(), k)
            .iter()
            .map(|v| *v as f32)
            .collect();
        let pack = |experts: usize| -> Fp8Rows {
            let w = Random::new(2).weights(experts * rows, k);
            let handle = client.create_from_slice(f32::as_bytes(&w));
            pack_weight_fp8(&client, &handle, [experts, rows, k], WeightLayout::RowMajor)
        };
        let (dense, experts) = (pack(1), pack(4));
        let values = decode(&experts.read_back(&client).unwrap(), k);
        for route in [Route::Portable, Route::Decode] {
            let options = MatmulOptions {
                route: Some(route),
                output: Element::F32,
            };
            let Ok(y) = matmul_fp8(&client, &x, &dense, None, options) else {
                assert!(route == Route::Decode && cfg!(not(feature = "cuda")), "{route:?}");
                continue;
            };
            let name = format!("{route:?}, {tokens} x {rows} x {k}");
            assert_within_bound(&name, &download(&client, &y), &xq, &values[..rows * k], k);
            let y = matmul_fp8(&client, &x, &experts, Some(&routing(&client, &counts, None)), options).unwrap();
            let y = download(&client, &y);
            let mut first = 0;
            for (expert, count) in values.chunks(rows * k).zip(counts) {
                let last = first + count as usize;
                assert_within_bound(
                    &name,
                    &y[first * rows..last * rows],
                    &xq[first * k..last * k],
                    expert,
                    k,
                );
                first = last;
            }
        }
    }
}
