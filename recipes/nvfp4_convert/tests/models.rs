//! What runs the model: activation scales from text, and the gap between the logits of a packed model and its original.
mod folders;

use burn::backend::Flex;
use burn_nvfp4::{
    Nvfp4, Precision,
    checkpoint::{CheckpointFormat, Nvfp4Folder},
};
use burn_quads::{
    checkpoint::{FolderFormat, ModelFolder, PackedFormat, save_packed_folder},
    sync::pack_model,
};
use folders::{fixtures, json, scratch, tiny};
use kernels_cubecl::OuterScale;
use nvfp4_convert::{
    calibrate::{calibrate, remarks},
    logits_gap,
    quantize::Recipe,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn program(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4_convert"));
    command.args(arguments).output().unwrap()
}

fn calibration() -> PathBuf {
    fixtures().join("nvfp4_checkpoints/calibration.jsonl")
}

fn tool(name: &str) -> Nvfp4Folder {
    let folder = Nvfp4Folder::open(&fixtures().join("nvfp4_checkpoints").join(name)).unwrap();
    folder.unwrap()
}

#[test]
fn activation_scales_are_those_of_the_tools_on_the_same_tokens() {
    let base = scratch("calibrate");
    let input = tiny(&base, "model_bf16.safetensors");
    let ranges = calibrate(&input, &calibration(), 512).unwrap();
    assert_eq!(ranges.amax.len(), 56);
    assert_eq!(ranges.unseen, [""; 0]);
    for name in ["compressed_tensors/w4a4", "modelopt/w4a4"] {
        let theirs = tool(name);
        for module in theirs.modules() {
            let theirs = match theirs.layer(module).unwrap().unwrap().input_scale.unwrap() {
                OuterScale::Divide(scale) => 2688.0 / scale,
                OuterScale::Multiply(scale) => 2688.0 * scale,
            };
            let ours = ranges.amax[module];
            if module.ends_with("down_proj") {
                // They send every token to every expert, and ModelOpt takes the largest of all experts.
                assert!(
                    ours <= 1.03 * theirs && ours > 0.3 * theirs,
                    "{name}, {module}: {ours}, {theirs}"
                );
            } else {
                // They run in BF16.
                assert!(
                    (ours - theirs).abs() < 0.02 * theirs,
                    "{name}, {module}: {ours}, {theirs}"
                );
            }
        }
    }
}

#[test]
fn a_calibrated_model_says_how_activations_are_quantized() {
    let base = scratch("w4a4");
    let input = tiny(&base, "model_bf16.safetensors");
    let path = |name: &str| base.join(name).to_str().unwrap().to_string();
    let (input, file) = (input.to_str().unwrap(), calibration());
    for (recipe, algorithm) in [("compressed-tensors", None), ("modelopt", Some("NVFP4"))] {
        let output = path(recipe);
        let arguments = [
            "quantize",
            input,
            &output,
            "--recipe",
            recipe,
            "--calibrate",
            file.to_str().unwrap(),
        ];
        let said = program(&arguments);
        assert!(said.status.success(), "{said:?}");
        let said = String::from_utf8(said.stdout).unwrap();
        assert!(said.contains("have no residual compensation"), "{said}");
        let folder = Nvfp4Folder::open(Path::new(&output)).unwrap().unwrap();
        assert!(folder.scheme().w4a4);
        assert!(
            folder
                .modules()
                .all(|module| folder.layer(module).unwrap().unwrap().input_scale.is_some())
        );
        let config = json(&Path::new(&output).join("config.json"));
        let group = &config["quantization_config"]["config_groups"]["group_0"];
        assert_eq!(group["input_activations"]["num_bits"], 4);
        assert_eq!(config["quantization_config"]["quant_algo"].as_str(), algorithm);
    }
    // Few tokens leave experts without any: their scale is the layer's, and is reported.
    let few = base.join("few.jsonl");
    fs::write(&few, "{\"input_ids\": [5, 9]}\n\n").unwrap();
    let ranges = calibrate(Path::new(input), &few, 512).unwrap();
    assert!(!ranges.unseen.is_empty());
    let text = remarks(&ranges);
    assert!(
        text.contains("had no token") && text.contains(&ranges.unseen[0]),
        "{text}"
    );
}

#[test]
fn lines_that_are_no_prompts_are_refused_by_their_number() {
    let base = scratch("lines");
    let input = tiny(&base, "model_bf16.safetensors");
    let file = base.join("x.jsonl");
    let error = |text: &str| {
        fs::write(&file, text).unwrap();
        format!("{:#}", calibrate(&input, &file, 512).unwrap_err())
    };
    let first = "{\"input_ids\": [1]}\n";
    for (line, expected) in [
        ("{", "line 2: EOF"),
        ("[1]", "line 2: expected a JSON object, found a list"),
        (
            "{\"ids\": [1]}",
            "line 2: expected input_ids, or a text in one of text, prompt, question, problem",
        ),
        (
            "{\"input_ids\": [-1]}",
            "line 2: input_ids: expected a list of token ids",
        ),
        ("{\"input_ids\": [128]}", "line 2: token id 128, and the model has 128"),
        ("{\"prompt\": 3}", "line 2: prompt: expected a string, found a number"),
        ("{\"prompt\": \"a\"}", "tokenizer.json"),
    ] {
        let error = error(&format!("{first}{line}"));
        assert!(error.contains(expected), "{line}: {error}");
    }
    assert!(error("").contains("no tokens"));
    assert!(error("{\"input_ids\": []}").contains("no tokens"));
}

#[test]
fn logits_are_compared_with_the_originals() {
    let base = scratch("gap");
    let input = tiny(&base, "model_bf16.safetensors");
    let packed = fixtures().join("nvfp4_checkpoints/compressed_tensors/w4a16");
    let gap = |precision| logits_gap::measure(&packed, &input, &calibration(), 16, &precision).unwrap();
    let weight_only = gap(Precision::W4A16);
    assert_eq!(weight_only.tokens, 16 * 16);
    assert!(
        weight_only.mean > 0.05 && weight_only.mean < weight_only.max,
        "{weight_only:?}"
    );
    assert!((0.5..1.0).contains(&weight_only.same_top), "{weight_only:?}");
    assert!(
        weight_only.divergence > 0.0 && weight_only.log_prob > 0.0,
        "{weight_only:?}"
    );
    let naive = gap(Precision::W4A4);
    assert!(
        naive.mean > weight_only.mean && naive.divergence > weight_only.divergence,
        "{naive:?}"
    );

    let (packed, input, prompts) = (packed.to_str().unwrap(), input.to_str().unwrap(), calibration());
    let arguments = [
        "verify",
        packed,
        "--original",
        input,
        "--prompts",
        prompts.to_str().unwrap(),
        "--max-tokens",
        "16",
    ];
    let said = program(&arguments);
    assert!(said.status.success(), "{said:?}");
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(
        said.contains("logits in w4a16 over 256 tokens: mean difference 0."),
        "{said}"
    );
}

#[test]
fn layers_that_stay_dense_run_in_full_precision() {
    let base = scratch("dense_layers");
    let input = tiny(&base, "model_bf16.safetensors");
    let gap = |name: &str, exclude: &[&str]| {
        let output = base.join(name);
        folders::quantize(&input, &output, Recipe::Te, exclude).unwrap();
        logits_gap::measure(&output, &input, &calibration(), 16, &Precision::W4A4).unwrap()
    };
    let all = gap("all", &[]);
    let experts_alone = gap(
        "experts_alone",
        &["model.layers.0.self_attn", "model.layers.1.self_attn"],
    );
    assert!(experts_alone.mean < all.mean, "{experts_alone:?}, {all:?}");
    let one_output = gap(
        "one_output",
        &[
            "model.layers.0",
            "model.layers.1.mlp",
            "model.layers.1.self_attn.q_proj",
            "model.layers.1.self_attn.k_proj",
            "model.layers.1.self_attn.v_proj",
        ],
    );
    assert!(
        one_output.mean > 0.0 && one_output.mean < 0.3 * all.mean,
        "{one_output:?}, {all:?}"
    );
}

#[test]
fn our_recipe_makes_the_file_that_a_rollout_s_model_is_saved_as() {
    let base = scratch("rollout");
    let input = tiny(&base, "model.safetensors");
    let folder = ModelFolder::open(&input).unwrap();
    let model = folder.load::<Nvfp4<Flex>>(&Default::default(), |_| {}).unwrap();
    let (rollout, _) = pack_model(model, &Precision::W4A4Rac(Default::default()), None).unwrap();
    let format = PackedFormat::new(CheckpointFormat::ModelOpt);
    let saved = base.join("saved");
    save_packed_folder(&rollout, &saved, &FolderFormat::like(&folder), &format).unwrap();

    let input = input.to_str().unwrap();
    let output = base.join("converted");
    let said = program(&[
        "quantize",
        input,
        output.to_str().unwrap(),
        "--recipe",
        "te",
        "--format",
        "modelopt",
    ]);
    assert!(said.status.success(), "{said:?}");
    let [converted, saved] = [&output, &saved].map(|path| fs::read(path.join("model.safetensors")).unwrap());
    assert!(converted == saved, "the files differ");
}
