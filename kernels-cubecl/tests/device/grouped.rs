//! Grouped matmul: tokens sorted by expert, counts that only the device knows.
use crate::matmul::{assert_within_bound, decode, routes};
use crate::{Client, Random, client, download, upload};
use cubecl::prelude::*;
use kernels_cubecl::device::{
    Element, MatmulOptions, Matrix, PackedWeight, Residual, Route, Routing, grouped_matmul, matmul, quantize,
};
use kernels_cubecl::{Compensation, Nvfp4Weight, WeightLayout, host};

fn experts(count: usize, rows: usize, k: usize) -> Vec<Nvfp4Weight> {
    let expert = |e| {
        // Outer scales differ from expert to expert.
        let w: Vec<f32> = Random::new(e as u64 + 60)
            .weights(rows, k)
            .iter()
            .map(|v| v * (e + 1) as f32)
            .collect();
        host::quantize_weight(&w, rows, k, WeightLayout::RowMajor, None).unwrap()
    };
    (0..count).map(expert).collect()
}

fn upload_experts(client: &Client, experts: &[Nvfp4Weight]) -> PackedWeight {
    PackedWeight::from_host(client, &experts.iter().map(Nvfp4Weight::view).collect::<Vec<_>>()).unwrap()
}

pub fn routing(client: &Client, counts: &[u32], gather: Option<&[u32]>) -> Routing {
    Routing {
        counts: client.create_from_slice(u32::as_bytes(counts)),
        tokens: counts.iter().sum::<u32>() as usize,
        gather: gather.map(|gather| client.create_from_slice(u32::as_bytes(gather))),
    }
}

fn options(route: Route) -> MatmulOptions {
    MatmulOptions {
        route: Some(route),
        output: Element::F32,
    }
}

#[test]
fn each_token_meets_its_expert() {
    let Some(client) = client() else { return };
    let (rows, k) = (72, 208);
    let all = experts(6, rows, k);
    let w = upload_experts(&client, &all);
    // Empty experts at the start, in the middle and at the end; tiles that are full, and not.
    for counts in [
        [0, 5, 0, 40, 16, 0],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 70],
        [33, 8, 9, 7, 0, 64],
    ] {
        let tokens = counts.iter().sum::<u32>() as usize;
        let x = Random::new(1).activations(tokens, k);
        let matrix = upload(&client, Element::F32, &x, tokens, k);
        for compensation in [None, Some(Compensation::All)] {
            let residual = Residual::new(&client, compensation.as_ref(), k).unwrap();
            let packed = quantize(&client, &matrix, &residual).unwrap();
            let xq = host::quantize_activations(&x, tokens, k, compensation.as_ref())
                .unwrap()
                .decode();
            for route in routes(&client) {
                let y = grouped_matmul(&client, &packed, &w, &routing(&client, &counts, None), options(route)).unwrap();
                let y = download(&client, &y);
                let mut first = 0;
                for (expert, count) in all.iter().zip(counts) {
                    let last = first + count as usize;
                    let name = format!("{route:?}, {counts:?}, {compensation:?}");
                    assert_within_bound(
                        &name,
                        &y[first * rows..last * rows],
                        &xq[first * k..last * k],
                        &decode(expert),
                        k,
                    );
                    first = last;
                }
            }
        }
    }
}

/// Codes of a token are made once and taken by each of its experts.
#[test]
fn tokens_are_gathered_by_index() {
    let Some(client) = client() else { return };
    let (tokens, rows, k) = (9, 40, 128);
    let w = upload_experts(&client, &experts(4, rows, k));
    let x = Random::new(2).activations(tokens, k);
    let counts = [7, 0, 9, 2];
    let gather: Vec<u32> = [0, 2, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 1].to_vec();
    let sorted: Vec<f32> = gather.iter().flat_map(|&t| x[t as usize * k..][..k].to_vec()).collect();
    let packed = quantize(&client, &upload(&client, Element::F32, &x, tokens, k), &Residual::All).unwrap();
    let whole = upload(&client, Element::F32, &sorted, gather.len(), k);
    let sorted = quantize(&client, &whole, &Residual::All).unwrap();
    for route in routes(&client) {
        let bits = |y: Matrix| download(&client, &y).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let gathered = routing(&client, &counts, Some(&gather));
        let gathered = bits(grouped_matmul(&client, &packed, &w, &gathered, options(route)).unwrap());
        let plain =
            bits(grouped_matmul(&client, &sorted, &w, &routing(&client, &counts, None), options(route)).unwrap());
        assert!(gathered == plain, "{route:?}");
    }
}

/// A token's bits do not depend on other tokens, nor on how many its expert gets; they are those of a dense matmul.
#[test]
fn a_token_s_bits_are_its_own() {
    let Some(client) = client() else { return };
    let (rows, k) = (56, 320);
    let all = experts(3, rows, k);
    let w = upload_experts(&client, &all);
    let dense = upload_experts(&client, &all[1..2]);
    let token = Random::new(3).activations(1, k);
    for compensation in [None, Some(Compensation::All)] {
        let residual = Residual::new(&client, compensation.as_ref(), k).unwrap();
        let quantized = |x: &[f32]| {
            let rows = x.len() / k;
            quantize(&client, &upload(&client, Element::F32, x, rows, k), &residual).unwrap()
        };
        for route in routes(&client) {
            let alone = matmul(&client, &quantized(&token), &dense, options(route)).unwrap();
            let alone = download(&client, &alone);
            for (before, among) in [(0, 1), (3, 1), (0, 9), (17, 40), (1, 130)] {
                let counts = [before, among, 2];
                let total = counts.iter().sum::<u32>() as usize;
                let mut x = Random::new(4).activations(total, k);
                let at = (before + among - 1) as usize;
                x[at * k..][..k].copy_from_slice(&token);
                let y = grouped_matmul(
                    &client,
                    &quantized(&x),
                    &w,
                    &routing(&client, &counts, None),
                    options(route),
                );
                let y = download(&client, &y.unwrap());
                let bits = |y: &[f32]| y.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert!(
                    bits(&y[at * rows..][..rows]) == bits(&alone),
                    "{route:?}, {counts:?}, {compensation:?}"
                );
            }
        }
    }
}

#[test]
fn many_experts() {
    let Some(client) = client() else { return };
    let (count, rows, k) = (300, 16, 64);
    let all = experts(count, rows, k);
    let w = upload_experts(&client, &all);
    let counts: Vec<u32> = (0..count as u32).map(|e| if e % 3 == 0 { e % 5 } else { 0 }).collect();
    let tokens = counts.iter().sum::<u32>() as usize;
    let x = Random::new(5).activations(tokens, k);
    let packed = quantize(&client, &upload(&client, Element::F32, &x, tokens, k), &Residual::None).unwrap();
    let xq = host::quantize_activations(&x, tokens, k, None).unwrap().decode();
    for route in routes(&client) {
        let y = grouped_matmul(&client, &packed, &w, &routing(&client, &counts, None), options(route)).unwrap();
        let y = download(&client, &y);
        let mut first = 0;
        for (expert, count) in all.iter().zip(&counts) {
            let last = first + *count as usize;
            let name = format!("{route:?}");
            assert_within_bound(
                &name,
                &y[first * rows..last * rows],
                &xq[first * k..last * k],
                &decode(expert),
                k,
            );
            first = last;
        }
    }
}
