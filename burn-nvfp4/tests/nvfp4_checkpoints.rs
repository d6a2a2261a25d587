//! NVFP4 checkpoints: files of llm-compressor and ModelOpt decode to their references bit for bit, can be made again byte
//! for byte, and go in and out of `Nvfp4<B>` as they are.
use burn::{
    backend::Flex,
    tensor::{Distribution, Tensor, TensorData},
};
use burn_nvfp4::{
    Nvfp4, OuterScaleConvention, PackError, Precision,
    checkpoint::{
        CheckpointFormat, CheckpointLayer, ExportedWeight, LayerName, Nvfp4Folder, QuantizationScheme, load_weight,
    },
    pack, packed_weight,
    safetensors_file::{SafetensorsFile, SafetensorsFolder, SafetensorsWriter},
};
use kernels_cubecl::{Nvfp4View, Nvfp4Weight, OuterScale, ParameterType, WeightLayout, WeightRecipe, amax, host};
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

type B = Nvfp4<Flex>;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn checkpoint(name: &str) -> Nvfp4Folder {
    let path = fixtures().join("nvfp4_checkpoints").join(name);
    Nvfp4Folder::open(&path).unwrap().expect("a quantized model")
}

/// Bit for bit.
#[track_caller]
fn assert_same(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let differs = |at: &usize| actual[*at].to_bits() != expected[*at].to_bits();
    if let Some(at) = (0..actual.len()).find(differs) {
        panic!("{what}: value {at} is {}, expected {}", actual[at], expected[at]);
    }
}

const CT_BF16: WeightRecipe = WeightRecipe::CompressedTensors(ParameterType::Bf16);

/// The weights that the tools packed, packed here: module and weight.
fn packed_here(recipe: WeightRecipe, modules: &[String]) -> Vec<Nvfp4Weight> {
    let source = SafetensorsFolder::from_file(&fixtures().join("qwen3moe_tiny/model_bf16.safetensors")).unwrap();
    let weight = |module: &str| source.tensor(&format!("{module}.weight")).unwrap();
    let pack = |module: &String| {
        let name = LayerName::parse(module).unwrap();
        let sharing = name
            .sharing()
            .map(|name| amax(&weight(&name.module()).to_f32().unwrap()));
        let [rows, k] = *weight(module).shape() else { panic!() };
        let values = weight(module).to_f32().unwrap();
        let amax = sharing.reduce(f32::max);
        host::quantize_weight_by(recipe, &values, rows, k, WeightLayout::RowMajor, amax).unwrap()
    };
    modules.iter().map(pack).collect()
}

fn modules(folder: &Nvfp4Folder) -> Vec<String> {
    folder.modules().map(String::from).collect()
}

/// Bytes of codes and of block scales that differ, and outer scales.
fn differing(folder: &Nvfp4Folder, packed: &[Nvfp4Weight]) -> [usize; 3] {
    let count = |a: &[u8], b: &[u8]| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).filter(|(a, b)| a != b).count()
    };
    let mut differing = [0; 3];
    for (module, packed) in folder.modules().zip(packed) {
        let file = folder.layer(module).unwrap().unwrap().weight;
        differing[0] += count(file.codes, &packed.codes);
        differing[1] += count(file.block_scales, &packed.block_scales);
        differing[2] += usize::from(file.outer_scale != packed.outer_scale);
    }
    differing
}

#[test]
fn files_of_the_tools_decode_to_their_references_bit_for_bit() {
    for (name, format, w4a4) in [
        ("compressed_tensors/w4a16", CheckpointFormat::CompressedTensors, false),
        ("modelopt/w4a4", CheckpointFormat::ModelOpt, true),
    ] {
        let folder = checkpoint(name);
        assert_eq!(*folder.scheme(), QuantizationScheme { format, w4a4 });
        assert_eq!(folder.modules().len(), 56);
        let path = folder.path().join("reference.safetensors");
        let reference = SafetensorsFile::open(&path).unwrap();
        for module in folder.modules() {
            let layer = folder.layer(module).unwrap().unwrap();
            assert_eq!(layer.input_scale.is_some(), w4a4, "{module}");
            let expected = reference.tensor(&format!("dequant.{module}.weight")).unwrap();
            assert_eq!(expected.shape(), [layer.weight.rows, layer.weight.k], "{module}");
            assert_same(&layer.dequantize(), &expected.to_f32().unwrap(), module);
        }
    }
    // The same weights, with activation scales.
    let (weight_only, both) = (
        checkpoint("compressed_tensors/w4a16"),
        checkpoint("compressed_tensors/w4a4"),
    );
    assert!(both.scheme().w4a4);
    for module in weight_only.modules() {
        let [a, b] = [&weight_only, &both].map(|folder| folder.layer(module).unwrap().unwrap());
        assert_eq!(
            (a.weight.codes, a.weight.outer_scale),
            (b.weight.codes, b.weight.outer_scale),
            "{module}"
        );
        assert!(
            matches!(b.input_scale, Some(OuterScale::Divide(scale)) if scale > 0.0),
            "{module}"
        );
    }
}

#[test]
fn files_of_the_tools_can_be_made_byte_for_byte() {
    for (name, recipe) in [
        ("compressed_tensors/w4a16", CT_BF16),
        ("compressed_tensors/w4a4", CT_BF16),
        ("modelopt/w4a4", WeightRecipe::ModelOpt),
    ] {
        let folder = checkpoint(name);
        let packed = packed_here(recipe, &modules(&folder));
        assert_eq!(differing(&folder, &packed), [0, 0, 0], "{name}");
    }
}

/// What `docs/how-to/nvfp4-checkpoints.md` says. Of 61,440 bytes of codes and 7,680 block scales; the outer scale of
/// compressed-tensors is rounded to BF16 and a divisor, so that all 56 differ.
#[test]
fn our_recipe_differs_from_the_tools_in_few_bytes() {
    let (compressed, modelopt) = (checkpoint("compressed_tensors/w4a16"), checkpoint("modelopt/w4a4"));
    let ours = packed_here(WeightRecipe::TransformerEngine, &modules(&compressed));
    assert_eq!(ours.iter().map(|weight| weight.codes.len()).sum::<usize>(), 61_440);
    assert_eq!(
        ours.iter().map(|weight| weight.block_scales.len()).sum::<usize>(),
        7_680
    );
    assert_eq!(differing(&compressed, &ours), [1003, 187, 56]);
    assert_eq!(differing(&modelopt, &ours), [49, 3, 15]);
    // From parameters in f32, compressed-tensors would differ as little as ModelOpt.
    let from_f32 = packed_here(
        WeightRecipe::CompressedTensors(ParameterType::F32),
        &modules(&compressed),
    );
    assert!(differing(&modelopt, &from_f32)[0] < 100);
}

#[test]
fn cases_at_the_edges_equal_the_tools() {
    let path = "nvfp4_checkpoints/compressed_tensors/linear_cases.safetensors";
    let file = SafetensorsFile::open(&fixtures().join(path)).unwrap();
    let floats = |name: &str| file.tensor(name).unwrap().to_f32().unwrap();
    let bytes = |name: &str| file.tensor(name).unwrap().bytes;
    let weight = floats("weight");
    let cases = [
        (
            "ct",
            WeightRecipe::CompressedTensors(ParameterType::F32),
            "weight_packed",
            "weight_global_scale",
        ),
        ("mo", WeightRecipe::ModelOpt, "weight", "weight_scale_2"),
    ];
    for (tool, recipe, codes, outer) in cases {
        let packed = host::quantize_weight_by(recipe, &weight, 16, 64, WeightLayout::RowMajor, None).unwrap();
        let (OuterScale::Multiply(scale) | OuterScale::Divide(scale)) = packed.outer_scale;
        assert_eq!(vec![scale], floats(&format!("{tool}.{outer}")), "{tool}");
        assert_eq!(packed.block_scales, bytes(&format!("{tool}.weight_scale")), "{tool}");
        assert_eq!(packed.codes, bytes(&format!("{tool}.{codes}")), "{tool}");
        let layer = CheckpointLayer {
            module: "layer".into(),
            weight: packed.view(),
            input_scale: None,
        };
        // Equal as numbers: ModelOpt's own decoder has no negative zero.
        let (decoded, expected) = (layer.dequantize(), floats(&format!("{tool}.dequant")));
        let differing = decoded.iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert_eq!(differing, 0, "{tool}");
    }
}

#[test]
fn a_layer_becomes_a_packed_weight_as_it_is() {
    for name in ["compressed_tensors/w4a16", "modelopt/w4a4"] {
        let folder = checkpoint(name);
        let layer = folder.layer("model.layers.1.self_attn.k_proj").unwrap().unwrap();
        let tensor = load_weight::<Flex, 2>(
            &[std::slice::from_ref(&layer)],
            &Precision::W4A4,
            None,
            &Default::default(),
        )
        .unwrap();
        assert_eq!(tensor.dims(), [64, 32]);
        let packed = packed_weight(&tensor).unwrap();
        assert_eq!(
            (packed.codes(), packed.block_scales()),
            (layer.weight.codes.to_vec(), layer.weight.block_scales.to_vec())
        );
        assert_eq!(packed.storage().convention, folder.scheme().format.convention());
        let values: Vec<f32> = tensor.dequantize().transpose().into_data().to_vec().unwrap();
        assert_same(&values, &layer.dequantize(), name);
    }
}

#[test]
fn experts_become_one_stack_with_gate_before_up() {
    let folder = checkpoint("compressed_tensors/w4a16");
    let layers = |projections: &[&str]| -> Vec<Vec<CheckpointLayer<'_>>> {
        let layer = |expert, projection: &&str| {
            let module = format!("model.layers.0.mlp.experts.{expert}.{projection}");
            folder.layer(&module).unwrap().unwrap()
        };
        (0..8)
            .map(|expert| projections.iter().map(|name| layer(expert, name)).collect())
            .collect()
    };
    let stack = |layers: &[Vec<CheckpointLayer<'_>>]| {
        let groups: Vec<&[CheckpointLayer<'_>]> = layers.iter().map(Vec::as_slice).collect();
        load_weight::<Flex, 3>(&groups, &Precision::W4A16, None, &Default::default())
    };
    let both = layers(&["gate_proj", "up_proj"]);
    let tensor = stack(&both).unwrap();
    assert_eq!(tensor.dims(), [8, 64, 64]);
    for (expert, layers) in both.iter().enumerate() {
        let values = tensor.clone().dequantize().narrow(0, expert, 1).squeeze_dim::<2>(0);
        let values: Vec<f32> = values.transpose().into_data().to_vec().unwrap();
        let expected: Vec<f32> = layers.iter().flat_map(CheckpointLayer::dequantize).collect();
        assert_same(&values, &expected, &format!("expert {expert}"));
    }

    // Experts have outer scales of their own: two of them are no pair.
    let mut mixed = layers(&["gate_proj", "up_proj"]);
    mixed[0][1] = folder.layer("model.layers.0.mlp.experts.1.up_proj").unwrap().unwrap();
    let error = stack(&mixed).unwrap_err();
    assert!(
        matches!(&error, PackError::OuterScales { first, other }
        if first.ends_with("0.gate_proj") && other.ends_with("1.up_proj")),
        "{error}"
    );
    let mut short = layers(&["gate_proj", "up_proj"]);
    short[3].pop();
    let error = stack(&short).unwrap_err().to_string();
    assert!(
        error.contains("experts.3.gate_proj") && error.contains("[64, 64] and [32, 64]"),
        "{error}"
    );
}

/// A folder with a configuration and packed layers.
fn write_folder(path: &Path, scheme: &QuantizationScheme, layers: &[CheckpointLayer<'_>]) {
    std::fs::create_dir_all(path).unwrap();
    let config = json!({"quantization_config": scheme.quantization_config(&[])});
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let specs = layers.iter().flat_map(|layer| {
        let Nvfp4View { rows, k, .. } = layer.weight;
        scheme.format.tensor_specs(&layer.module, rows, k, scheme.w4a4)
    });
    let mut writer =
        SafetensorsWriter::create(&path.join("model.safetensors"), specs.collect(), BTreeMap::new()).unwrap();
    for layer in layers {
        scheme.format.write(&mut writer, layer).unwrap();
    }
    writer.finish().unwrap();
}

fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join("nvfp4_checkpoints")
        .join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

#[test]
fn a_packed_weight_goes_out_and_comes_back_as_it_is() {
    let device = Default::default();
    let weight = Tensor::<B, 3>::random([3, 32, 24], Distribution::Normal(0.0, 0.02), &device);
    let weight = pack(weight, &Precision::W4A16, None, None).unwrap();
    let packed = packed_weight(&weight).unwrap();
    let exported = ExportedWeight::new(&packed).unwrap();
    assert_eq!((exported.groups(), exported.d_out()), (3, 24));
    for format in [CheckpointFormat::ModelOpt, CheckpointFormat::CompressedTensors] {
        let scheme = QuantizationScheme { format, w4a4: false };
        let layers: Vec<_> = (0..3)
            .flat_map(|expert| [(0..10, "gate"), (10..24, "up")].map(|(rows, name)| (expert, rows, name)))
            .map(|(expert, rows, name)| exported.layer(format!("experts.{expert}.{name}_proj"), expert, rows, None))
            .collect();
        let path = scratch(&format!("own_{format}"));
        write_folder(&path, &scheme, &layers);
        let folder = Nvfp4Folder::open(&path).unwrap().unwrap();
        let layer =
            |expert: usize, name: &str| folder.layer(&format!("experts.{expert}.{name}_proj")).unwrap().unwrap();
        let read: Vec<_> = (0..3)
            .map(|expert| [layer(expert, "gate"), layer(expert, "up")])
            .collect();
        let groups: Vec<&[CheckpointLayer<'_>]> = read.iter().map(|pair| &pair[..]).collect();
        let read = load_weight::<Flex, 3>(&groups, &Precision::W4A16, None, &device).unwrap();
        let read = packed_weight(&read).unwrap();
        assert_eq!(read.codes(), packed.codes(), "{format}");
        assert_eq!(read.block_scales(), packed.block_scales(), "{format}");
        match format.convention() {
            OuterScaleConvention::Multiply => assert_eq!(read.outer_scales(), packed.outer_scales()),
            OuterScaleConvention::Divide => {
                let inverted: Vec<f32> = packed.outer_scales().iter().map(|scale| 1.0 / scale).collect();
                assert_eq!(read.outer_scales(), inverted);
            }
        }
    }
    let fp8 = pack(Tensor::<B, 2>::ones([16, 4], &device), &Precision::Fp8, None, None).unwrap();
    assert!(ExportedWeight::new(&packed_weight(&fp8).unwrap()).is_none());
}

/// A folder with one layer of ones, its file changed before it is opened.
fn damaged(name: &str, scheme: &QuantizationScheme, change: impl Fn(&mut Vec<u8>)) -> String {
    let (codes, block_scales) = (vec![0x22; 2 * 16], vec![0x38; 2 * 2]);
    let layer = CheckpointLayer {
        module: "model.q_proj".into(),
        weight: Nvfp4View {
            rows: 2,
            k: 32,
            codes: &codes,
            block_scales: &block_scales,
            outer_scale: scheme.format.outer_scale(1.0),
        },
        input_scale: scheme.w4a4.then_some(scheme.format.outer_scale(1.0)),
    };
    let path = scratch(name);
    write_folder(&path, scheme, &[layer]);
    let file = path.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    change(&mut bytes);
    std::fs::write(&file, bytes).unwrap();
    let opened = Nvfp4Folder::open(&path).and_then(|folder| {
        let folder = folder.expect("a quantized model");
        folder
            .layer("model.q_proj")
            .map(|layer| layer.expect("a packed layer").dequantize())
    });
    match opened {
        Ok(values) => format!("{:?}", &values[..2]),
        Err(error) => error.to_string(),
    }
}

/// Replaces all `from` by `to`, of the same length.
fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len());
    let at = bytes
        .windows(from.len())
        .position(|window| window == from)
        .expect("is there");
    bytes[at..at + from.len()].copy_from_slice(to);
}

#[test]
fn hostile_scales_are_refused_by_file_and_tensor() {
    for format in [CheckpointFormat::CompressedTensors, CheckpointFormat::ModelOpt] {
        let scheme = QuantizationScheme { format, w4a4: true };
        let damaged = |change: &dyn Fn(&mut Vec<u8>)| damaged(&format!("scales_{format}"), &scheme, change);
        assert_eq!(damaged(&|_| {}), "[1.0, 1.0]");
        // F32 comes first in a file, then F8_E4M3, then U8: the last 32 bytes are codes, the 4 before them block scales.
        let block_scale = |byte: u8| {
            damaged(&move |bytes| {
                let at = bytes.len() - 32 - 3;
                bytes[at] = byte;
            })
        };
        for (byte, expected) in [
            (0x7f, "is NaN"),
            (0xff, "is NaN"),
            (0xb8, "is negative (-1)"),
            (0x80, "is negative (-0)"),
        ] {
            let error = block_scale(byte);
            assert!(
                error.contains("model.safetensors: model.q_proj.weight_scale: block scale"),
                "{error}"
            );
            assert!(error.contains("at [0, 1]") && error.ends_with(expected), "{error}");
        }
        // Zero is legal: the block decodes to zeros.
        assert_eq!(block_scale(0), "[1.0, 1.0]");
        assert_eq!(
            damaged(&|bytes| {
                let at = bytes.len() - 32 - 4;
                bytes[at] = 0;
            }),
            "[0.0, 0.0]"
        );

        let names = match format {
            CheckpointFormat::CompressedTensors => ["input_global_scale", "weight_global_scale"],
            CheckpointFormat::ModelOpt => ["input_scale", "weight_scale_2"],
        };
        for (index, name) in names.into_iter().enumerate() {
            for scale in [
                0.0,
                -0.0,
                -1.0,
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                1e-45,
                1e-39,
            ] {
                let error = damaged(&|bytes| {
                    let at = bytes.len() - 32 - 4 - 8 + 4 * index;
                    bytes[at..at + 4].copy_from_slice(&scale.to_le_bytes());
                });
                let expected = format!("model.safetensors: model.q_proj.{name}: scale ");
                assert!(error.contains(&expected), "{scale}: {error}");
            }
        }
        let beyond = match format {
            CheckpointFormat::CompressedTensors => 1e-38f32,
            CheckpointFormat::ModelOpt => 1e38,
        };
        let error = damaged(&|bytes| {
            let at = bytes.len() - 32 - 4 - 4;
            bytes[at..at + 4].copy_from_slice(&beyond.to_le_bytes());
            bytes[at + 4] = 0x7e;
        });
        assert!(
            error.contains(names[1]) && error.contains("beyond the range of f32"),
            "{error}"
        );
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_file_and_tensor() {
    let scheme = QuantizationScheme {
        format: CheckpointFormat::CompressedTensors,
        w4a4: false,
    };
    let cases: [(&str, &str, &str); 6] = [
        (r#""dtype":"U8""#, r#""dtype":"I8""#, "weight_packed: I8, expected U8"),
        (
            "[2,16]",
            "[4,8] ",
            "weight_scale: shape [2, 2], the codes ask for [4, 1]",
        ),
        ("[2,16]", "[8,4] ", "weight_packed: 4 bytes a row"),
        (
            r#"[2,2],"data_o"#,
            r#"[4],  "data_o"#,
            "weight_scale: shape [4], the codes ask for [2, 2]",
        ),
        (
            "q_proj.weight_scale",
            "q_prot.weight_scale",
            "weight_scale: missing, though model.q_proj is packed",
        ),
        (
            "weight_global_scale",
            "weight_globol_scale",
            "weight_global_scale: missing, though model.q_proj is packed",
        ),
    ];
    for (from, to, expected) in cases {
        let error = damaged("tensors", &scheme, |bytes| {
            replace(bytes, from.as_bytes(), to.as_bytes())
        });
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn leftovers_of_other_methods_are_refused() {
    let path = scratch("leftovers");
    let scheme = QuantizationScheme {
        format: CheckpointFormat::ModelOpt,
        w4a4: false,
    };
    write_folder(&path, &scheme, &[]);
    let file = |name: &str| {
        let data = TensorData::new(vec![1f32], [1]);
        let bytes: Vec<u8> = data.iter::<f32>().flat_map(f32::to_le_bytes).collect();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &bytes).unwrap();
        safetensors::serialize_to_file([(name, view)], None, &path.join("model.safetensors")).unwrap();
        Nvfp4Folder::open(&path).map(|folder| folder.unwrap().modules().len())
    };
    assert_eq!(file("model.norm.weight").unwrap(), 0);
    let error = file("model.layers.0.self_attn.q_proj.pre_quant_scale")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("q_proj.pre_quant_scale: no part of a layer that modelopt packs"),
        "{error}"
    );
}

#[test]
fn a_model_that_is_not_quantized_is_none() {
    assert!(Nvfp4Folder::open(&fixtures().join("qwen3moe_tiny")).unwrap().is_none());
}

#[test]
fn an_older_modelopt_folder_has_its_own_file_alone() {
    let original = fixtures().join("nvfp4_checkpoints/modelopt/w4a4");
    let path = scratch("older_modelopt");
    std::fs::create_dir_all(&path).unwrap();
    for file in ["model.safetensors", "hf_quant_config.json"] {
        std::fs::copy(original.join(file), path.join(file)).unwrap();
    }
    let config = std::fs::read_to_string(original.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let folder = Nvfp4Folder::open(&path).unwrap().expect("a quantized model");
    assert_eq!(folder.modules().len(), 56);
    assert!(folder.scheme().w4a4);
}
