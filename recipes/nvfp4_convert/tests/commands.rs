//! `dequantize`, `convert`, `inspect`, `verify`, and the program as a whole.
mod folders;

use burn_nvfp4::{
    checkpoint::{CheckpointFormat, Nvfp4Folder},
    safetensors_file::{Dtype, SafetensorsFile},
};
use folders::{contents, fixtures, json, quantize, scratch, shard, tiny};
use kernels_cubecl::OuterScale;
use nvfp4_convert::{
    convert::Convert,
    dequantize::{DenseType, Dequantize},
    inspect::inspect,
    quantize::Recipe,
    shards,
    source::Source,
    verify::verify,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn tool(name: &str) -> PathBuf {
    fixtures().join("nvfp4_checkpoints").join(name)
}

fn convert(input: &Path, output: &Path, format: CheckpointFormat) -> anyhow::Result<()> {
    let source = Source::open(input)?;
    shards::convert(&source, output, "convert".into(), &Convert::new(&source, format)?)?;
    Ok(())
}

fn dequantize(input: &Path, output: &Path, dtype: DenseType) -> anyhow::Result<()> {
    let source = Source::open(input)?;
    shards::convert(&source, output, "dequantize".into(), &Dequantize::new(&source, dtype)?)?;
    Ok(())
}

#[test]
fn dequantized_models_have_the_values_of_the_reference() {
    let base = scratch("dequantize");
    for name in ["compressed_tensors/w4a16", "modelopt/w4a4"] {
        let reference = SafetensorsFile::open(&tool(name).join("reference.safetensors")).unwrap();
        for dtype in [DenseType::F32, DenseType::Bf16] {
            let output = base.join(format!("{dtype:?}_{}", name.replace('/', "_")));
            dequantize(&tool(name), &output, dtype).unwrap();
            let config = json(&output.join("config.json"));
            assert!(config.get("quantization_config").is_none());
            assert_eq!(
                config["dtype"],
                if dtype == DenseType::F32 { "float32" } else { "bfloat16" }
            );
            assert!(!output.join("hf_quant_config.json").exists());
            let dense = SafetensorsFile::open(&output.join("model.safetensors")).unwrap();
            // The same names as the original's.
            let original = SafetensorsFile::open(&fixtures().join("qwen3moe_tiny/model_bf16.safetensors")).unwrap();
            let names = |file: &SafetensorsFile| {
                let mut names: Vec<_> = file.tensors().map(|tensor| tensor.name().to_string()).collect();
                names.sort();
                names
            };
            assert_eq!(names(&dense), names(&original));
            for expected in reference
                .tensors()
                .filter(|tensor| tensor.name().starts_with("dequant."))
            {
                let tensor = dense.tensor(expected.name().strip_prefix("dequant.").unwrap()).unwrap();
                let expected_bytes = match dtype {
                    DenseType::F32 => expected.bytes.to_vec(),
                    DenseType::Bf16 => {
                        let values = expected.to_f32().unwrap();
                        values
                            .iter()
                            .flat_map(|value| half::bf16::from_f32(*value).to_le_bytes())
                            .collect()
                    }
                };
                assert!(tensor.bytes == expected_bytes, "{}", expected.name());
            }
        }
    }
    let error = dequantize(&tiny(&base, "model_bf16.safetensors"), &base.join("x"), DenseType::F32).unwrap_err();
    assert!(error.to_string().contains("the model is not quantized"), "{error}");
}

#[test]
fn converted_models_have_the_same_codes_and_block_scales() {
    let base = scratch("convert");
    for (name, format) in [
        ("compressed_tensors/w4a16", CheckpointFormat::ModelOpt),
        ("compressed_tensors/w4a4", CheckpointFormat::ModelOpt),
        ("modelopt/w4a4", CheckpointFormat::CompressedTensors),
    ] {
        let output = base.join(name.replace('/', "_"));
        convert(&tool(name), &output, format).unwrap();
        let [before, after] = [&tool(name), &output].map(|path| Nvfp4Folder::open(path).unwrap().unwrap());
        assert_eq!(after.scheme().format, format);
        assert_eq!(after.scheme().w4a4, before.scheme().w4a4);
        assert_eq!(
            output.join("hf_quant_config.json").exists(),
            format == CheckpointFormat::ModelOpt
        );
        for module in before.modules() {
            let [before, after] = [&before, &after].map(|folder| folder.layer(module).unwrap().unwrap());
            assert_eq!(before.weight.codes, after.weight.codes, "{module}");
            assert_eq!(before.weight.block_scales, after.weight.block_scales, "{module}");
            let product = |a: OuterScale, b: OuterScale| match (a, b) {
                (OuterScale::Multiply(a), OuterScale::Divide(b)) | (OuterScale::Divide(a), OuterScale::Multiply(b)) => {
                    a * b
                }
                _ => panic!("{module}: the same convention"),
            };
            let scales = [
                Some((before.weight.outer_scale, after.weight.outer_scale)),
                before.input_scale.zip(after.input_scale),
            ];
            for (before, after) in scales.into_iter().flatten() {
                assert!((product(before, after) - 1.0).abs() < 2e-7, "{module}");
            }
        }
        // The dense rest is untouched.
        for tensor in before
            .files()
            .tensors()
            .filter(|tensor| before.module_of(tensor.name()).is_none())
        {
            assert!(
                after.files().tensor(tensor.name()).unwrap().bytes == tensor.bytes,
                "{}",
                tensor.name()
            );
        }
    }
    let error = convert(&tool("modelopt/w4a4"), &base.join("x"), CheckpointFormat::ModelOpt).unwrap_err();
    assert!(error.to_string().contains("has the format modelopt already"), "{error}");
}

#[test]
fn inspect_shows_layers_formats_bytes_and_errors() {
    let base = scratch("inspect");
    let original = Source::open(&tiny(&base, "model_bf16.safetensors")).unwrap();
    let packed = Source::open(&tool("compressed_tensors/w4a16")).unwrap();
    let text = inspect(&packed, Some(&original), false).unwrap();
    let line = |name: &str| {
        text.lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name}\n{text}"))
    };
    let experts = line("model.layers.0.mlp.experts.*.up_proj");
    for part in ["x8", "[32, 64]", "nvfp4, divides", "9248 B", "1/", " to 1/"] {
        assert!(experts.contains(part), "{part}: {experts}");
    }
    let error: f64 = experts.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    assert!((8.5..10.5).contains(&error), "{experts}");
    assert!(line("model.embed_tokens.weight").contains("BF16"));
    assert!(line("model.layers.1.self_attn.q_proj").contains("2308 B"));
    let each = inspect(&packed, None, true).unwrap();
    assert!(each.contains("model.layers.0.mlp.experts.7.up_proj"));
    assert!(inspect(&original, None, false).unwrap().contains("0 B of them packed"));
}

#[test]
fn verify_compares_with_the_original() {
    let base = scratch("verify");
    let input = tiny(&base, "model_bf16.safetensors");
    quantize(&input, &base.join("out"), Recipe::Te, &[]).unwrap();
    let [packed, original] = [&base.join("out"), &input].map(|path| Source::open(path).unwrap());
    let verified = verify(&packed, &original, 0.2).unwrap();
    assert_eq!((verified.layers, verified.equal), (56, 13));
    assert!((0.09..0.1).contains(&verified.error), "{verified:?}");
    assert!(verified.worst.1 >= verified.error);
    let error = verify(&packed, &original, 0.05).unwrap_err().to_string();
    assert!(error.contains("beyond the tolerance of 0.05"), "{error}");
    // From experts in one tensor.
    let fused_base = scratch("verify_fused");
    let fused = Source::open(&tiny(&fused_base, "model_fused_bf16.safetensors")).unwrap();
    assert_eq!(verify(&packed, &fused, 0.2).unwrap(), verified);
    // Against another model.
    let other_base = scratch("verify_other");
    let other = Source::open(&tiny(&other_base, "model.safetensors")).unwrap();
    let error = verify(&packed, &other, 0.2).unwrap_err().to_string();
    assert!(error.contains("differs from"), "{error}");
}

fn program(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4_convert"));
    command.args(arguments).output().unwrap()
}

#[test]
fn the_program_does_it_all_and_says_errors_in_one_line() {
    let base = scratch("program");
    let input = tiny(&base, "model_bf16.safetensors");
    shard(&input, 2);
    let before = contents(&input);
    let path = |name: &str| base.join(name).to_str().unwrap().to_string();
    let input = input.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let output = program(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let said = run(&["quantize", input, &path("out"), "--recipe", "modelopt"]);
    assert!(said.contains("out: ") && said.contains("2 file(s)"), "{said}");
    assert!(run(&["inspect", &path("out")]).contains("nvfp4, multiplies"));
    assert!(run(&["verify", &path("out"), "--original", input]).contains("56 packed layers"));
    run(&["convert", &path("out"), &path("other"), "--to", "compressed-tensors"]);
    run(&["dequantize", &path("other"), &path("dense"), "--dtype", "f32"]);
    assert!(contents(Path::new(input)) == before, "the input is as it was");

    for (arguments, expected) in [
        (
            &["quantize", input, &path("out")][..],
            "exists already, and nothing is overwritten",
        ),
        (
            &["quantize", input, &format!("{input}/inside")],
            "lies inside the input",
        ),
        (&["quantize", &path("absent"), &path("x")], "config.json: No such file"),
        (
            &["verify", &path("out"), "--original", input, "--tolerance", "0.01"],
            "beyond the tolerance of 0.01",
        ),
    ] {
        let output = program(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(
            said.starts_with("error: ") && said.contains(expected) && said.lines().count() == 1,
            "{said}"
        );
    }
    assert_eq!(program(&["quantize"]).status.code(), Some(2));
}

#[test]
fn a_damaged_layer_is_refused_by_every_command() {
    let base = scratch("damaged");
    let folder = base.join("packed");
    fs::create_dir_all(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(tool("compressed_tensors/w4a16").join(file), folder.join(file)).unwrap();
    }
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (name, at) = {
        let file = SafetensorsFile::open(&path).unwrap();
        let scale = file.tensors().find(|tensor| tensor.dtype() == Dtype::F8_E4M3).unwrap();
        (
            scale.name().to_string(),
            bytes
                .windows(scale.bytes.len())
                .position(|window| window == scale.bytes)
                .unwrap(),
        )
    };
    bytes[at] = 0xff;
    fs::write(&path, bytes).unwrap();
    let folder = folder.to_str().unwrap();
    let out = base.join("x").to_str().unwrap().to_string();
    for arguments in [
        &["dequantize", folder, &out][..],
        &["convert", folder, &out, "--to", "modelopt"],
        &["inspect", folder],
        &["verify", folder, "--original", folder],
    ] {
        let output = program(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        let expected = format!("model.safetensors: {name}: block scale 0xff at [0, 0] is NaN");
        assert!(
            !output.status.success() && said.contains(&expected),
            "{arguments:?}: {said}"
        );
    }
    assert!(!base.join("x").exists() && !base.join("x.partial").exists());
}
