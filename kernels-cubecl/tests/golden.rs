//! Golden files: TransformerEngine's tensor recipe (`golden.json`, key `te`) and the activation recipe with its second
//! pass (`row_pow2.json`), bit for bit. The scripts that made them are beside them.
use kernels_cubecl::nvfp4::{self, Operand};
use kernels_cubecl::{
    Activation, BLOCK, Compensation, Error, Granularity, Nvfp4View, OuterScale, ParameterType, Pass, QuantizedRows,
    ResidualMask, Selection, WeightLayout, WeightRecipe, WeightView, amax, e2m1, e4m3, encode_scale, host,
};
use serde_json::Value;

fn load(name: &str) -> Value {
    let path = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/nvfp4/{}"), name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_str(&text).unwrap()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    list(value)
        .iter()
        .map(|v| u8::try_from(v.as_u64().unwrap()).unwrap())
        .collect()
}

/// Bits of f32 values: hexadecimal strings in `golden.json`, integers in `row_pow2.json`.
fn bits(value: &Value) -> Vec<u32> {
    let one = |v: &Value| match v.as_str() {
        Some(hex) => u32::from_str_radix(hex, 16).unwrap(),
        None => u32::try_from(v.as_u64().unwrap()).unwrap(),
    };
    value
        .as_array()
        .map_or_else(|| vec![one(value)], |values| values.iter().map(one).collect())
}

fn floats(value: &Value) -> Vec<f32> {
    bits(value).into_iter().map(f32::from_bits).collect()
}

fn shape(value: &Value) -> [usize; 2] {
    [0, 1].map(|i| usize::try_from(value["shape"][i].as_u64().unwrap()).unwrap())
}

fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The tensor recipe from its primitives: scales, packed codes, decoded values.
fn quantize_tensor(x: &[f32], encode_scale: f32) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut scales, mut packed, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let outer = OuterScale::Multiply(1.0 / encode_scale);
    for block in x.chunks(BLOCK) {
        let block = nvfp4::encode_block(block, encode_scale, Operand::Weight);
        let step = outer.step(e4m3::decode(block.scale));
        scales.push(block.scale);
        packed.extend(nvfp4::pack(&block.codes));
        values.extend(block.codes.iter().map(|code| nvfp4::decode(*code, step)));
    }
    (scales, packed, values)
}

fn assert_te(name: &str, x: &[f32], te: &Value) {
    let scale = encode_scale(amax(x));
    let (scales, packed, values) = quantize_tensor(x, scale);
    assert_eq!(
        vec![amax(x).to_bits()],
        bits(&te["global_amax_f32bits"]),
        "{name}: amax"
    );
    assert_eq!(
        vec![scale.to_bits()],
        bits(&te["global_encode_scale_f32bits"]),
        "{name}: encode scale"
    );
    assert_eq!(
        vec![(1.0 / scale).to_bits()],
        bits(&te["global_decode_scale_f32bits"]),
        "{name}: decode scale"
    );
    assert_eq!(scales, bytes(&te["block_scale"]), "{name}: block scales");
    assert_eq!(packed, bytes(&te["packed"]), "{name}: codes");
    assert_eq!(to_bits(&values), bits(&te["dequant_f32bits"]), "{name}: values");
}

#[test]
fn every_te_case_bit_for_bit() {
    let golden = load("golden.json");
    let cases = golden["cases"].as_object().unwrap();
    assert!(cases.len() >= 18, "{} cases", cases.len());
    for (name, case) in cases {
        let x = floats(&case["input_f32bits"]);
        assert_te(name, &x, &case["te"]);
    }
}

#[test]
fn every_te_case_as_a_weight_in_both_layouts() {
    for (name, case) in load("golden.json")["cases"].as_object().unwrap() {
        let (x, [rows, k], te) = (floats(&case["input_f32bits"]), shape(case), &case["te"]);
        let transposed: Vec<f32> = (0..rows * k).map(|at| x[at % rows * k + at / rows]).collect();
        for (layout, x) in [(WeightLayout::RowMajor, &x), (WeightLayout::Transposed, &transposed)] {
            let packed = host::quantize_weight(x, rows, k, layout, None);
            if let Some(at) = x.iter().position(|v| !v.is_finite()) {
                let (row, column) = match layout {
                    WeightLayout::RowMajor => (at / k, at % k),
                    WeightLayout::Transposed => (at % rows, at / rows),
                };
                assert!(
                    matches!(packed, Err(Error::NonFinite { row: r, column: c, .. }) if (r, c) == (row, column)),
                    "{name}: {packed:?}"
                );
                continue;
            }
            let packed = packed.unwrap();
            assert_eq!(packed.codes, bytes(&te["packed"]), "{name}, {layout:?}");
            assert_eq!(packed.block_scales, bytes(&te["block_scale"]), "{name}, {layout:?}");
            let OuterScale::Multiply(outer) = packed.outer_scale else {
                panic!("{name}: our weights multiply")
            };
            assert_eq!(
                vec![outer.to_bits()],
                bits(&te["global_decode_scale_f32bits"]),
                "{name}"
            );
            let mut values = vec![f32::NAN; rows * k];
            let view = WeightView::Nvfp4(packed.view());
            host::dequantize_weight(view, WeightLayout::RowMajor, &mut values).unwrap();
            assert_eq!(to_bits(&values), bits(&te["dequant_f32bits"]), "{name}, {layout:?}");
        }
    }
}

#[test]
fn every_case_of_the_tools_as_a_weight() {
    let recipes = [
        (WeightRecipe::ModelOpt, "modelopt", "weight_scale_2_f32bits"),
        (
            WeightRecipe::CompressedTensors(ParameterType::F32),
            "compressed_tensors",
            "weight_global_scale_f32bits",
        ),
    ];
    for (recipe, tool, outer_scale) in recipes {
        let mut compared = 0;
        for (name, case) in load("golden.json")["cases"].as_object().unwrap() {
            let (x, [rows, k], expected) = (floats(&case["input_f32bits"]), shape(case), &case[tool]);
            // Not finite: refused. A scale that cannot be inverted, ModelOpt's for zeros: ours is 1.
            let outer_scale = floats(&expected[outer_scale])[0];
            if !(x.iter().all(|v| v.is_finite()) && (1.0 / outer_scale).is_finite()) {
                continue;
            }
            let packed = host::quantize_weight_by(recipe, &x, rows, k, WeightLayout::RowMajor, None).unwrap();
            let outer = match recipe {
                WeightRecipe::CompressedTensors(_) => OuterScale::Divide(outer_scale),
                _ => OuterScale::Multiply(outer_scale),
            };
            assert_eq!(packed.outer_scale, outer, "{tool}, {name}");
            assert_eq!(packed.block_scales, bytes(&expected["block_scale"]), "{tool}, {name}");
            assert_eq!(packed.codes, bytes(&expected["packed"]), "{tool}, {name}");
            compared += 1;
        }
        assert!(compared >= 13, "{tool}: {compared} cases");
    }
}

#[test]
fn rounding_table_of_e2m1() {
    let golden = load("golden.json");
    let codes = bytes(&golden["rne_table"]["code"]);
    for (x, code) in floats(&golden["rne_table"]["in_f32bits"]).into_iter().zip(codes) {
        assert_eq!(e2m1::encode(x), code, "{x}");
    }
    for (code, value) in list(&golden["meta"]["e2m1_table_codes_0_15"]).iter().enumerate() {
        let value: f32 = value.as_str().unwrap().parse().unwrap();
        assert_eq!(e2m1::decode(code as u8).to_bits(), value.to_bits(), "code {code}");
    }
}

#[test]
fn value_table_of_e4m3() {
    let golden = load("golden.json");
    for (byte, value) in list(&golden["e4m3_table"]).iter().enumerate() {
        let (ours, golden) = (
            e4m3::decode(byte as u8),
            value.as_str().unwrap().parse::<f32>().unwrap(),
        );
        assert!(
            ours.to_bits() == golden.to_bits() || ours.is_nan() && golden.is_nan(),
            "byte {byte:02x}: {ours}"
        );
    }
}

#[test]
fn residual_primitive_with_its_own_scale() {
    let case = &load("golden.json")["residual_two_pass"];
    let (x, [rows, k]) = (floats(&case["input_f32bits"]), shape(case));
    assert_te("pass 1", &x, &case["pass1"]);
    let (_, _, values) = quantize_tensor(&x, encode_scale(amax(&x)));
    let cols: Vec<usize> = list(&case["cols"])
        .iter()
        .map(|c| c.as_u64().unwrap() as usize)
        .collect();
    let residual: Vec<f32> = (0..rows)
        .flat_map(|row| cols.iter().map(move |c| row * k + c))
        .map(|at| x[at] - values[at])
        .collect();
    assert_eq!(to_bits(&residual), bits(&case["residual_f32bits"]), "residual");
    assert_te("pass 2", &residual, &case["pass2"]);
}

#[test]
fn block_scaled_mma_tile_is_exact() {
    let golden = load("golden.json");
    let tile = &golden["mma_m16n8k64"];
    let (b_codes, b_scales) = (
        bytes(&tile["b_packed_8x32 (col n, K contiguous)"]),
        bytes(&tile["sfb_8x4"]),
    );
    let a = QuantizedRows {
        tokens: 16,
        k: 64,
        encode_scales: vec![1.0; 16],
        first: Pass {
            codes: bytes(&tile["a_packed_16x32"]),
            block_scales: bytes(&tile["sfa_16x4"]),
        },
        residual: None,
    };
    for outer_scale in [OuterScale::Multiply(1.0), OuterScale::Divide(1.0)] {
        let b = WeightView::Nvfp4(Nvfp4View {
            rows: 8,
            k: 64,
            codes: &b_codes,
            block_scales: &b_scales,
            outer_scale,
        });
        let mut d = vec![f32::NAN; 16 * 8];
        host::matmul_quantized(&a, b, &mut d).unwrap();
        assert_eq!(to_bits(&d), bits(&tile["d_16x8_f32bits"]), "packed operands");
        let mut d = vec![f32::NAN; 16 * 8];
        host::matmul(&a.decode(), 16, b, &Activation::Full, &mut d).unwrap();
        assert_eq!(to_bits(&d), bits(&tile["d_16x8_f32bits"]), "decoded activations");
    }
}

fn selection(name: &str) -> (Selection, Granularity, f32) {
    let parts: Vec<&str> = name.split('/').collect();
    let parse = |s: &str| Value::String(s.to_string());
    match parts[..] {
        [selection, granularity, fraction] => (
            serde_json::from_value(parse(selection)).unwrap(),
            serde_json::from_value(parse(granularity)).unwrap(),
            fraction.parse().unwrap(),
        ),
        _ => (serde_json::from_value(parse(name)).unwrap(), Granularity::Channel, 1.0),
    }
}

/// NumPy's `packbits` along each row: most significant bit first.
fn numpy_bits(masks: &[u32], tokens: usize, k: usize) -> Vec<u8> {
    let words = k.div_ceil(32);
    let set = |row: usize, c: usize| c < k && masks[row * words + c / 32] >> (c % 32) & 1 == 1;
    (0..tokens)
        .flat_map(|row| (0..k.div_ceil(8)).map(move |byte| (row, byte)))
        .map(|(row, byte)| (0..8).fold(0, |sum, bit| sum << 1 | u8::from(set(row, 8 * byte + bit))))
        .collect()
}

#[test]
fn every_row_recipe_case_bit_for_bit() {
    let mut second_passes = 0;
    for (name, case) in load("row_pow2.json")["cases"].as_object().unwrap() {
        let (x, [tokens, k]) = (floats(&case["input_f32bits"]), shape(case));
        let first = host::quantize_activations(&x, tokens, k, None).unwrap();
        assert_eq!(
            to_bits(&first.encode_scales),
            bits(&case["encode_scale_f32bits"]),
            "{name}: encode scales"
        );
        assert_eq!(
            first.first.block_scales,
            bytes(&case["block_scale"]),
            "{name}: block scales"
        );
        assert_eq!(first.first.codes, bytes(&case["packed"]), "{name}: codes");
        assert_eq!(
            to_bits(&first.decode()),
            bits(&case["dequant_f32bits"]),
            "{name}: values"
        );
        let mut xq = vec![f32::NAN; tokens * k];
        host::fake_quantize_activations(&x, tokens, k, &Activation::Nvfp4, &mut xq).unwrap();
        assert_eq!(
            to_bits(&xq),
            bits(&case["dequant_f32bits"]),
            "{name}: fake quantization"
        );

        for (kind, golden) in case["residual"].as_object().unwrap() {
            let name = format!("{name}, {kind}");
            let (selection, granularity, fraction) = selection(kind);
            let compensation = match selection {
                Selection::All => Compensation::All,
                Selection::PerToken => Compensation::PerToken { granularity, fraction },
                Selection::Calibrated => {
                    let mut energy = vec![0.0; k.div_ceil(granularity.channels())];
                    host::accumulate_residual_energy(&x, tokens, k, granularity, &mut energy).unwrap();
                    Compensation::Mask(ResidualMask::from_energy(&energy, k, granularity, fraction))
                }
            };
            let quantized = host::quantize_activations(&x, tokens, k, Some(&compensation)).unwrap();
            assert_eq!(quantized.first, first.first, "{name}: the first pass does not change");
            let residual = quantized.residual.as_ref().unwrap();
            assert_eq!(
                numpy_bits(&residual.masks, tokens, k),
                bytes(&golden["mask"]),
                "{name}: mask"
            );
            assert_eq!(
                residual.pass.block_scales,
                bytes(&golden["block_scale"]),
                "{name}: block scales"
            );
            assert_eq!(residual.pass.codes, bytes(&golden["packed"]), "{name}: codes");
            assert_eq!(
                to_bits(&quantized.decode()),
                bits(&golden["sum_dequant_f32bits"]),
                "{name}: values"
            );
            let activation = Activation::Compensated(compensation);
            host::fake_quantize_activations(&x, tokens, k, &activation, &mut xq).unwrap();
            assert_eq!(
                to_bits(&xq),
                bits(&golden["sum_dequant_f32bits"]),
                "{name}: fake quantization"
            );
            second_passes += 1;
        }
    }
    assert!(second_passes >= 29, "{second_passes} second passes");
}
