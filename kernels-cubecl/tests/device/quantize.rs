//! Codes, block scales and units equal the host's, bit for bit.
use crate::{Client, Random, client, golden, round_to, to_bytes, upload};
use kernels_cubecl::device::{Element, Matrix, Residual, quantize};
use kernels_cubecl::{Compensation, Granularity, QuantizedRows, ResidualMask, host};

/// Without the masks, which the device does not keep; a scale of NaN as a number.
fn comparable(mut rows: QuantizedRows) -> (Vec<u32>, QuantizedRows) {
    if let Some(residual) = &mut rows.residual {
        residual.masks.clear();
    }
    let nan_as_zero = |s: &f32| if s.is_nan() { 0 } else { s.to_bits() };
    let scales = rows.encode_scales.iter().map(nan_as_zero).collect();
    rows.encode_scales.clear();
    (scales, rows)
}

fn assert_equals_host(client: &Client, name: &str, x: &Matrix, values: &[f32], compensation: Option<&Compensation>) {
    let expected = host::quantize_activations(values, x.rows, x.columns, compensation).unwrap();
    let residual = Residual::new(client, compensation, x.columns).unwrap();
    let packed = quantize(client, x, &residual).unwrap();
    let actual = packed.read_back(client).unwrap();
    let ((actual_scales, actual), (expected_scales, expected)) = (comparable(actual), comparable(expected));
    assert_eq!(actual_scales, expected_scales, "{name}: encode scales");
    assert_eq!(
        actual.first.block_scales, expected.first.block_scales,
        "{name}: block scales"
    );
    assert_eq!(actual.first.codes, expected.first.codes, "{name}: codes");
    if let (Some(actual), Some(expected)) = (&actual.residual, &expected.residual) {
        assert_eq!(
            actual.pass.block_scales, expected.pass.block_scales,
            "{name}: block scales of the residual"
        );
        assert_eq!(actual.pass.codes, expected.pass.codes, "{name}: codes of the residual");
    }
    assert_eq!(actual, expected, "{name}");
    // Padding is zero on every call.
    let (kp, rows) = (packed.padded_k(), packed.tokens * packed.passes);
    for (handle, per_row, used) in [
        (&packed.codes, kp / 2, x.columns / 2),
        (&packed.block_scales, kp / 16, x.columns / 16),
    ] {
        let bytes = client.read_one(handle.clone()).unwrap();
        let padding = bytes[..rows * per_row]
            .chunks_exact(per_row.max(1))
            .flat_map(|row| &row[used..]);
        assert!(padding.clone().all(|byte| *byte == 0), "{name}: padding");
    }
}

fn compensations(x: &[f32], tokens: usize, k: usize) -> Vec<Option<Compensation>> {
    let mut all = vec![None, Some(Compensation::All)];
    for granularity in [Granularity::Channel, Granularity::Block16, Granularity::Block64] {
        let mut energy = vec![0.0; granularity.units(k)];
        host::accumulate_residual_energy(x, tokens, k, granularity, &mut energy).unwrap();
        all.push(Some(Compensation::Mask(ResidualMask::from_energy(
            &energy,
            k,
            granularity,
            0.5,
        ))));
        all.push(Some(Compensation::PerToken {
            granularity,
            fraction: 0.5,
        }));
    }
    all
}

#[test]
fn every_row_recipe_case_bit_for_bit() {
    let Some(client) = client() else { return };
    let mut residuals = 0;
    for (name, case) in golden::rows()["cases"].as_object().unwrap() {
        let (x, [tokens, k]) = (golden::floats(&case["input_f32bits"]), golden::shape(case));
        let matrix = upload(&client, Element::F32, &x, tokens, k);
        let actual = quantize(&client, &matrix, &Residual::None)
            .unwrap()
            .read_back(&client)
            .unwrap();
        assert_eq!(
            actual.first.block_scales,
            golden::bytes(&case["block_scale"]),
            "{name}: block scales"
        );
        assert_eq!(actual.first.codes, golden::bytes(&case["packed"]), "{name}: codes");
        for (kind, golden) in case["residual"].as_object().unwrap() {
            let name = format!("{name}, {kind}");
            let parts: Vec<&str> = kind.split('/').collect();
            let granularity = || serde_json::from_value::<Granularity>(parts[1].into()).unwrap();
            let compensation = match parts[0] {
                "all" => Compensation::All,
                "per_token" => Compensation::PerToken {
                    granularity: granularity(),
                    fraction: parts[2].parse().unwrap(),
                },
                _ => {
                    let mut energy = vec![0.0; granularity().units(k)];
                    host::accumulate_residual_energy(&x, tokens, k, granularity(), &mut energy).unwrap();
                    Compensation::Mask(ResidualMask::from_energy(
                        &energy,
                        k,
                        granularity(),
                        parts[2].parse().unwrap(),
                    ))
                }
            };
            let residual = Residual::new(&client, Some(&compensation), k).unwrap();
            let actual = quantize(&client, &matrix, &residual)
                .unwrap()
                .read_back(&client)
                .unwrap();
            let actual = actual.residual.unwrap().pass;
            assert_eq!(
                actual.block_scales,
                golden::bytes(&golden["block_scale"]),
                "{name}: block scales"
            );
            assert_eq!(actual.codes, golden::bytes(&golden["packed"]), "{name}: codes");
            residuals += 1;
        }
    }
    assert!(residuals >= 29, "{residuals} second passes");
}

#[test]
fn random_rows_of_every_shape_and_compensation() {
    let Some(client) = client() else { return };
    let shapes = [
        (1, 16),
        (3, 64),
        (5, 80),
        (2, 528),
        (7, 1040),
        (37, 256),
        (4, 2048),
        (2, 8192),
    ];
    for (seed, (tokens, k)) in shapes.into_iter().enumerate() {
        let x = Random::new(seed as u64).activations(tokens, k);
        let matrix = upload(&client, Element::F32, &x, tokens, k);
        for compensation in compensations(&x, tokens, k) {
            let name = format!("{tokens} x {k}, {compensation:?}");
            assert_equals_host(
                &client,
                &name[..name.len().min(100)],
                &matrix,
                &x,
                compensation.as_ref(),
            );
        }
    }
}

/// Every midpoint of E2M1, zero and tiny blocks, rows at the ends of f32, and rows that are not finite.
#[test]
fn rows_at_the_edges() {
    let Some(client) = client() else { return };
    let k = 96;
    let mut random = Random::new(99);
    let midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0];
    let scales = [1.0, 3e38, 1e38, 1e30, 1e-20, 1e-30, 448.0 * 6.0, 1.3125, 1.0 / 3.0];
    let mut x = Vec::new();
    for scale in scales {
        let row: Vec<f32> = (0..k)
            .map(|i| match i / 16 {
                0 => midpoints[i % 8] / 6.0 * if i % 16 < 8 { 1.0 } else { -1.0 },
                1 => 0.0,
                2 => random.normal() * 1e-4,
                3 => -0.0,
                _ => (random.uniform() - 0.5) * 2.0,
            })
            .collect();
        x.extend(row.iter().map(|v| v * scale));
    }
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row: Vec<f32> = (0..k).map(|_| random.normal()).collect();
        row[37] = poison;
        x.extend(&row);
        x.extend((0..k).map(|_| random.normal()));
    }
    x.extend(vec![0.0; k]);
    x.extend(vec![f32::MAX; k]);
    let tokens = x.len() / k;
    let matrix = upload(&client, Element::F32, &x, tokens, k);
    let granularities = [Granularity::Channel, Granularity::Block16, Granularity::Block64];
    let per_token = granularities.map(|granularity| {
        Some(Compensation::PerToken {
            granularity,
            fraction: 0.3,
        })
    });
    for compensation in [None, Some(Compensation::All)].into_iter().chain(per_token) {
        assert_equals_host(
            &client,
            &format!("{compensation:?}"),
            &matrix,
            &x,
            compensation.as_ref(),
        );
    }
}

#[test]
fn every_element_type_and_stride() {
    let Some(client) = client() else { return };
    let (tokens, k) = (6, 144);
    for element in [Element::F32, Element::F16, Element::BF16] {
        let x = round_to(element, &Random::new(5).activations(tokens, k));
        let name = |layout: &str| format!("{element:?}, {layout}");
        let all = Some(&Compensation::All);
        assert_equals_host(
            &client,
            &name("row-major"),
            &upload(&client, element, &x, tokens, k),
            &x,
            all,
        );
        // Columns one after the other, as a transposed view has them.
        let transposed: Vec<f32> = (0..tokens * k).map(|at| x[at % tokens * k + at / tokens]).collect();
        let mut matrix = upload(&client, element, &transposed, tokens, k);
        matrix.strides = [1, tokens];
        assert_equals_host(&client, &name("transposed"), &matrix, &x, all);
        // Rows of a wider matrix, at a stride that vectors divide and at one that they do not.
        for gap in [16, 3] {
            let wide: Vec<f32> = x
                .chunks(k)
                .flat_map(|row| row.iter().copied().chain(vec![7e3; gap]))
                .collect();
            let mut matrix = upload(&client, element, &wide, tokens, k);
            matrix.strides = [k + gap, 1];
            assert_equals_host(&client, &name(&format!("gap {gap}")), &matrix, &x, all);
        }
    }
}

#[test]
fn many_rows_and_none() {
    let Some(client) = client() else { return };
    for tokens in [0, 40_000] {
        let x = Random::new(8).activations(tokens, 16);
        let matrix = upload(&client, Element::BF16, &x, tokens, 16);
        assert_equals_host(
            &client,
            &format!("{tokens} rows"),
            &matrix,
            &round_to(Element::BF16, &x),
            None,
        );
    }
    let offset = 64;
    let x = Random::new(9).activations(3, 32);
    let mut bytes = vec![0xff; offset];
    bytes.extend(to_bytes(Element::F32, &x));
    let mut matrix = Matrix::contiguous(client.create_from_slice(&bytes), Element::F32, 3, 32);
    matrix.handle = matrix.handle.offset_start(offset as u64);
    if cfg!(feature = "cuda") {
        // Vulkan asks for offsets of 256 bytes and more.
        assert_equals_host(&client, "a part of a buffer", &matrix, &x, None);
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let Some(client) = client() else { return };
    let matrix = upload(&client, Element::F32, &[0.0; 24], 1, 24);
    let error = quantize(&client, &matrix, &Residual::None).unwrap_err();
    assert_eq!(error.to_string(), "k = 24 is not a multiple of 16, the NVFP4 block");
    let mask = Compensation::Mask(ResidualMask::from_channels(&[true; 16]));
    let residual = Residual::new(&client, Some(&mask), 16).unwrap();
    let matrix = upload(&client, Element::F32, &[0.0; 32], 1, 32);
    let error = quantize(&client, &matrix, &residual).unwrap_err();
    assert_eq!(error.to_string(), "channels of a residual mask: expected 32, got 16");
}
