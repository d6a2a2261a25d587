//! What is read, what is refused, and what it says.
use super::*;
use burn::{backend::Flex, module::Module};
use burn_nvfp4::Nvfp4;

fn qwen() -> QuadsMoeConfig {
    QuadsMoeConfig::new(32, 64, 3, 4, 2, 16, 4, 2, 48)
}

fn olmoe() -> QuadsMoeConfig {
    qwen()
        .with_qk_norm(QkNorm::Projection)
        .with_clip_qkv(Some(0.75))
        .with_attention_bias(true)
}

fn all() -> [QuadsMoeConfig; 4] {
    let dense = qwen()
        .with_mlp_only_layers(vec![0])
        .with_intermediate_size(Some(80))
        .with_attention_bias(true);
    [
        qwen(),
        olmoe(),
        dense.clone().with_tie_word_embeddings(true),
        dense.with_decoder_sparse_step(2).with_mlp_only_layers(vec![]),
    ]
}

/// The tiny config.json with some fields changed; null removes.
fn changed(changes: Value) -> Result<QuadsMoeConfig, ConfigError> {
    let mut json: Map<String, Value> = serde_json::from_str(&qwen().to_json()).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(json.remove(field)),
            value => drop(json.insert(field.clone(), value.clone())),
        }
    }
    QuadsMoeConfig::from_json(&Value::Object(json).to_string())
}

#[track_caller]
fn refused(changes: Value) -> String {
    changed(changes).expect_err("must be refused").to_string()
}

#[test]
fn config_json_survives_a_round_trip() {
    for config in all() {
        let config = config
            .with_norm_topk_prob(false)
            .with_rope_theta(10000.0)
            .with_rms_norm_eps(1e-5);
        let read = QuadsMoeConfig::from_json(&config.to_json()).unwrap();
        assert_eq!(read.to_json(), config.to_json());
        assert_eq!((read.rope_theta, read.rms_norm_eps), (10000.0, 1e-5));
        assert_eq!(read.clip_qkv, config.clip_qkv);
        assert!(!read.norm_topk_prob);
    }
}

#[test]
fn parameters_are_counted_as_the_module_counts_them() {
    for config in all() {
        let model = config.init::<Nvfp4<Flex>>(&Default::default());
        assert_eq!(
            config.num_params(),
            Some(model.num_params() as u64),
            "{}",
            config.to_json()
        );
    }
    let huge = QuadsMoeConfig {
        vocab_size: usize::MAX,
        ..qwen()
    };
    assert_eq!(huge.num_params(), None);
}

#[test]
fn what_the_model_does_not_have_is_refused_by_name_and_all_at_once() {
    let error = refused(json!({
        "use_sliding_window": true,
        "hidden_act": "gelu",
        "shared_expert_intermediate_size": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        "attention_dropout": 0.1,
    }));
    for expected in [
        "use_sliding_window = true: sliding windows are not supported",
        "hidden_act = \"gelu\": only silu is supported",
        "shared_expert_intermediate_size = 64: not supported",
        "attention_dropout = 0.1: dropout is not supported",
        "is not supported",
    ] {
        assert!(error.contains(expected), "{expected} is not in {error}");
    }
    for (changes, expected) in [
        (
            json!({"model_type": "mixtral"}),
            "model_type = \"mixtral\": only qwen3_moe and olmoe are supported",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "rope_scaling",
        ),
        (
            json!({"rope_scaling": {"rope_type": "default", "factor": 2.0}}),
            "factor is not supported",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5}}),
            "partial_rotary_factor is not supported",
        ),
        (
            json!({"rope_scaling": 2}),
            "rope_scaling = 2: expected an object, found a number",
        ),
        (
            json!({"sliding_window": 4096, "use_sliding_window": null}),
            "sliding_window = 4096: sliding windows",
        ),
        (
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            "only full_attention is supported",
        ),
        (
            json!({"architectures": ["Qwen3MoeForSequenceClassification"]}),
            "only Qwen3MoeForCausalLM is supported",
        ),
        (json!({"clip_qkv": 8.0}), "clip_qkv = 8.0: not supported"),
        (json!({"auto_map": {"AutoModel": "x.py"}}), "auto_map"),
        (
            json!({"num_local_experts": 5}),
            "num_local_experts = 5: num_experts says 4",
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1e4}}),
            "rope_theta = 1000000.0: rope_parameters says 10000",
        ),
        (
            json!({"mlp_only_layers": [3], "intermediate_size": 64}),
            "mlp_only_layers = 3: must be below num_hidden_layers = 3",
        ),
        (
            json!({"mlp_only_layers": [0, 1, 2]}),
            "mlp_only_layers = [0, 1, 2]: must leave a mixture-of-experts layer",
        ),
        (
            json!({"mlp_only_layers": [-1]}),
            "mlp_only_layers = [-1]: must be a list of whole numbers",
        ),
        (
            json!({"decoder_sparse_step": 0}),
            "decoder_sparse_step = 0: must be at least 1",
        ),
        (
            json!({"hidden_size": 1e30}),
            "hidden_size = 1e+30: must be a whole number",
        ),
        (
            json!({"num_hidden_layers": 1u64 << 60}),
            "num_hidden_layers = 1152921504606846976: must be at most",
        ),
        (
            json!({"norm_topk_prob": "yes"}),
            "norm_topk_prob = \"yes\": must be true or false",
        ),
    ] {
        let error = refused(changes.clone());
        assert!(error.contains(expected), "{changes}: {error}");
    }
}

#[test]
fn no_field_that_matters_has_a_default() {
    let json: Map<String, Value> = serde_json::from_str(&qwen().to_json()).unwrap();
    let optional = [
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "pad_token_id",
        "use_sliding_window",
    ];
    for field in json.keys().filter(|field| !optional.contains(&field.as_str())) {
        let error = refused(json!({ field.clone(): null }));
        assert!(error.starts_with(field), "{field}: {error}");
    }
    // Both architectures compute it where it is absent.
    assert_eq!(changed(json!({"head_dim": null})).unwrap().head_dim, 16);
    let error = refused(json!({"head_dim": null, "hidden_size": 66}));
    assert_eq!(error, "head_dim is missing from config.json");
}

#[test]
fn both_generations_of_keys_are_read() {
    let v5 = changed(json!({
        "num_experts": null, "num_local_experts": 4,
        "rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_window": null, "layer_types": ["full_attention", "full_attention", "full_attention"],
    }))
    .unwrap();
    assert_eq!((v5.num_experts, v5.rope_theta), (4, 5e5));
    let v4 = changed(
        json!({"rope_scaling": {"type": "default"}, "sliding_window": 4096, "dtype": null, "torch_dtype": "bfloat16"}),
    );
    assert_eq!(v4.unwrap().to_json(), qwen().to_json());
}

#[test]
fn a_text_that_is_no_object_or_says_things_twice_is_refused() {
    for text in [
        "[1]",
        "",
        "{",
        "\"a\"",
        r#"{"model_type": "olmoe", "model_type": "qwen3_moe"}"#,
    ] {
        assert!(
            matches!(QuadsMoeConfig::from_json(text), Err(ConfigError::Json(_))),
            "{text}"
        );
    }
    assert!(QuadsMoeConfig::from_json(&r#"{"a":["#.repeat(100_000)).is_err());
}

#[test]
fn the_published_models_are_described_as_they_are() {
    // Fields and values of Qwen/Qwen3-30B-A3B and allenai/OLMoE-1B-7B-0125-Instruct; totals as the Hub gives them.
    let qwen = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-6,
        "rope_scaling": null, "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936,
    });
    let olmoe = json!({
        "_name_or_path": "somewhere", "architectures": ["OlmoeForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "clip_qkv": null, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
        "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.47.1", "use_cache": false,
        "vocab_size": 50304,
    });
    for (json, parameters) in [(qwen, 30_532_122_624), (olmoe, 6_919_161_856)] {
        let config = QuadsMoeConfig::from_json(&json.to_string()).unwrap();
        assert_eq!(config.num_params(), Some(parameters));
        // All of it fits NVFP4's blocks.
        assert_eq!(config.with_precision(Precision::W4A4).validate(), Ok(()));
    }
}
