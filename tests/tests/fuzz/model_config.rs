//! `config.json`, `generation_config.json` and `hf_quant_config.json`: each input is all three, in turn.
use std::{fs, os::unix::fs::symlink, path::Path};

use burn_nvfp4::checkpoint::folder::read_scheme;
use burn_quads::{QuadsMoeConfig, checkpoint::ModelFolder};

use crate::{
    harness::{Target, about},
    mutate::Form,
};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/hf_variants/olmoe_clip");

const TARGET: Target = Target {
    form: Form::Json,
    dictionary: &[
        "model_type",
        "qwen3_moe",
        "olmoe",
        "num_local_experts",
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "layer_types",
        "clip_qkv",
        "quantization_config",
        "quant_method",
        "compressed-tensors",
        "modelopt",
        "config_groups",
        "kv_cache_scheme",
        "input_activations",
        "quantization",
        "eos_token_id",
        "\"vocab_size\":1,",
        "null",
        "[",
        "{",
    ],
    accepted: &[
        "compressed_tensors",
        "generation_config",
        "hf_quant_config",
        "modelopt",
        "olmoe",
        "qwen3_moe",
        // Possible on their own; refused when they are compared with the weights, before a model is made.
        "positions_endless",
        "sizes_overflow",
    ],
    prepare,
    file: |_| "config.json",
    ..Target::new("model_config", read)
};

#[test]
fn no_configuration_breaks_reading() {
    TARGET.run();
}

/// `model/` has the input for its configuration, `settings/` beside one that is sound.
fn prepare(folder: &Path) {
    for name in ["model", "settings"] {
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        symlink(format!("{FIXTURE}/model.safetensors"), folder.join("model.safetensors")).unwrap();
    }
    symlink("../config.json", folder.join("model/config.json")).unwrap();
    symlink(format!("{FIXTURE}/config.json"), folder.join("settings/config.json")).unwrap();
    for name in ["generation_config.json", "hf_quant_config.json"] {
        symlink("../config.json", folder.join("settings").join(name)).unwrap();
    }
}

/// All readers have to hold; accepted where the one accepts it that such an input is for.
fn read(folder: &Path, input: &[u8]) -> Result<(), String> {
    let (model, settings) = (folder.join("model"), folder.join("settings"));
    let text = String::from_utf8_lossy(input);
    if let Ok(config) = QuadsMoeConfig::from_json(&text) {
        assert_eq!(config.validate(), Ok(()));
        config.num_params();
        let again = QuadsMoeConfig::from_json(&config.to_json()).unwrap();
        assert_eq!(again.to_json(), config.to_json());
    }
    let scheme = |folder: &Path| read_scheme(folder).map_err(|error| about(folder, error));
    let open = |folder: &Path| ModelFolder::open(folder).map_err(|error| about(folder, error));
    let config = scheme(&model).and_then(|_| open(&model));
    let config = config.map(|opened| assert_eq!(opened.config_text(), text));
    let generation_config = open(&settings).map(drop);
    let hf_quant_config = scheme(&settings).map(drop);
    match (text.contains("model_type"), text.contains("\"quantization\"")) {
        (true, _) => config,
        (false, true) => hf_quant_config,
        (false, false) => generation_config,
    }
}
