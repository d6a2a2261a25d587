//! `config.json`, as versions 4 and 5 of transformers write it for Qwen3-MoE and OLMoE.
//!
//! Every field that changes what the model computes must be there: the defaults of transformers differ between versions.
//! A field that this model does not know is refused by name, because ignoring it would compute something else.
use burn_nvfp4::{Precision, safetensors_file::strict_json};
use serde_json::{Map, Value, json};

use crate::modules::{
    attention::QkNorm,
    moe_config::{ConfigError, QuadsMoeConfig, refuse},
};

/// Fields that say nothing about what a forward pass computes.
const WITHOUT_EFFECT: [&str; 26] = [
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    // How the weights are stored: whoever loads them has to know.
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "task_specific_params",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_cache",
    "vocab_size",
];

/// Fields of both architectures that are read.
const READ: [&str; 16] = [
    "attention_bias",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "head_dim",
];

impl QuadsMoeConfig {
    /// Reads the `config.json` of a Qwen3-MoE or OLMoE checkpoint, as version 4 or 5 of transformers writes it. The
    /// precision is [`Precision::High`]; set it with `with_precision`. How the weights are stored
    /// (`quantization_config`) is no part of it.
    ///
    /// # Errors
    /// A missing field, an impossible value, a name that occurs twice, or features that this model does not have
    /// (sliding windows, scaled rotary positions, shared experts, dropout, …), each by its name.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let json = &strict_json::parse_object(text.as_bytes()).map_err(ConfigError::Json)?;
        let olmoe = match json.get("model_type").and_then(Value::as_str) {
            Some("qwen3_moe") => false,
            Some("olmoe") => true,
            _ => {
                let found = json.get("model_type").unwrap_or(&Value::Null);
                return Err(refuse("model_type", found, "only qwen3_moe and olmoe are supported"));
            }
        };
        refuse_unsupported(json, olmoe)?;
        let hidden_size = size(json, "hidden_size")?;
        let num_attention_heads = size(json, "num_attention_heads")?;
        let config = Self {
            vocab_size: size(json, "vocab_size")?,
            hidden_size,
            num_hidden_layers: size(json, "num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: match (olmoe, json.get("num_key_value_heads")) {
                (true, None | Some(Value::Null)) => num_attention_heads,
                _ => size(json, "num_key_value_heads")?,
            },
            head_dim: match json.get("head_dim") {
                None | Some(Value::Null) => head_dim(hidden_size, num_attention_heads)?,
                Some(_) => size(json, "head_dim")?,
            },
            num_experts: same(json, "num_experts", "num_local_experts")?,
            num_experts_per_tok: size(json, "num_experts_per_tok")?,
            moe_intermediate_size: size(
                json,
                if olmoe {
                    "intermediate_size"
                } else {
                    "moe_intermediate_size"
                },
            )?,
            norm_topk_prob: flag(json, "norm_topk_prob")?,
            rope_theta: rope_theta(json)?,
            rms_norm_eps: number(json, "rms_norm_eps")?,
            max_position_embeddings: size(json, "max_position_embeddings")?,
            tie_word_embeddings: flag(json, "tie_word_embeddings")?,
            attention_bias: flag(json, "attention_bias")?,
            qk_norm: if olmoe { QkNorm::Projection } else { QkNorm::Head },
            clip_qkv: match json.get("clip_qkv") {
                None | Some(Value::Null) => None,
                Some(_) => Some(number(json, "clip_qkv")?),
            },
            mlp_only_layers: if olmoe { vec![] } else { sizes(json, "mlp_only_layers")? },
            decoder_sparse_step: if olmoe { 1 } else { size(json, "decoder_sparse_step")? },
            intermediate_size: if olmoe {
                None
            } else {
                Some(size(json, "intermediate_size")?)
            },
            precision: Precision::High,
        };
        config.validate()?;
        Ok(config)
    }

    /// The `config.json` that transformers (version 4 and 5) reads, for weights in f32; the precision is not part of it.
    pub fn to_json(&self) -> String {
        let mut json = json!({
            "attention_bias": self.attention_bias,
            // The defaults of OLMoE's class are tokens of its own vocabulary.
            "bos_token_id": null,
            "dtype": "float32",
            "eos_token_id": null,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "norm_topk_prob": self.norm_topk_prob,
            "num_attention_heads": self.num_attention_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": null,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "vocab_size": self.vocab_size,
        });
        let architecture = match self.qk_norm {
            QkNorm::Head => json!({
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "decoder_sparse_step": self.decoder_sparse_step,
                "head_dim": self.head_dim,
                // Width of dense layers; transformers wants a number even where there are none.
                "intermediate_size": self.intermediate_size.unwrap_or(self.moe_intermediate_size),
                "mlp_only_layers": self.mlp_only_layers,
                "moe_intermediate_size": self.moe_intermediate_size,
                "use_sliding_window": false,
            }),
            QkNorm::Projection => json!({
                "architectures": ["OlmoeForCausalLM"],
                "model_type": "olmoe",
                "clip_qkv": self.clip_qkv,
                "intermediate_size": self.moe_intermediate_size,
            }),
        };
        let fields = json.as_object_mut().expect("an object");
        fields.extend(architecture.as_object().expect("an object").clone());
        serde_json::to_string_pretty(&json).expect("numbers, flags and names are JSON")
    }

    /// Parameters of the model; `None` when there are more than a computer can count.
    pub fn num_params(&self) -> Option<u64> {
        let sum = |terms: &[Option<u64>]| terms.iter().try_fold(0u64, |sum, term| sum.checked_add((*term)?));
        let product = |factors: &[usize]| {
            let mut factors = factors.iter();
            factors.try_fold(1u64, |product, n| product.checked_mul(u64::try_from(*n).ok()?))
        };
        let (hidden, head_dim) = (self.hidden_size, self.head_dim);
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let bias = usize::from(self.attention_bias);
        let (q_heads, k_heads) = match self.qk_norm {
            QkNorm::Head => (1, 1),
            QkNorm::Projection => (heads, kv_heads),
        };
        let attention = sum(&[
            product(&[2, hidden, heads, head_dim]),
            product(&[2, hidden, kv_heads, head_dim]),
            product(&[bias, heads, head_dim]),
            product(&[bias, 2, kv_heads, head_dim]),
            product(&[bias, hidden]),
            product(&[q_heads, head_dim]),
            product(&[k_heads, head_dim]),
        ]);
        let moe = sum(&[
            product(&[hidden, self.num_experts]),
            product(&[3, self.num_experts, hidden, self.moe_intermediate_size]),
        ]);
        let dense = product(&[3, hidden, self.intermediate_size.unwrap_or(0)]);
        let dense_layers = (0..self.num_hidden_layers)
            .filter(|layer| !self.is_moe_layer(*layer))
            .count() as u64;
        let layers = self.num_hidden_layers as u64;
        let heads = if self.tie_word_embeddings { 1 } else { 2 };
        sum(&[
            product(&[heads, self.vocab_size, hidden]),
            product(&[hidden]),
            layers.checked_mul(sum(&[attention, product(&[2, hidden])])?),
            (layers - dense_layers).checked_mul(moe?),
            dense_layers.checked_mul(dense?),
        ])
    }
}

/// Refuses checkpoints of models that are not this one, rather than computing something else.
fn refuse_unsupported(json: &Map<String, Value>, olmoe: bool) -> Result<(), ConfigError> {
    let architecture = if olmoe {
        "OlmoeForCausalLM"
    } else {
        "Qwen3MoeForCausalLM"
    };
    let mut problems = vec![];
    for (field, value) in json.iter().filter(|(_, value)| !value.is_null()) {
        let problem = match field.as_str() {
            "architectures" if *value != json!([architecture]) => format!("only {architecture} is supported"),
            "hidden_act" if value != "silu" => "only silu is supported".into(),
            "attention_dropout" if value.as_f64() != Some(0.0) => "dropout is not supported".into(),
            "use_sliding_window" if *value != json!(false) => "sliding windows are not supported".into(),
            // Without its switch it is a default that differs between versions.
            "sliding_window" if json.get("use_sliding_window") != Some(&json!(false)) => {
                "sliding windows are not supported".into()
            }
            "layer_types" if !all_full_attention(value) => "only full_attention is supported".into(),
            "rope_scaling" | "rope_parameters" => match rope_problem(value) {
                Some(problem) => problem,
                None => continue,
            },
            "hidden_act" | "attention_dropout" | "use_sliding_window" | "sliding_window" | "layer_types" => continue,
            "clip_qkv" if olmoe => continue,
            "mlp_only_layers" | "decoder_sparse_step" | "moe_intermediate_size" if !olmoe => continue,
            field if READ.contains(&field) || WITHOUT_EFFECT.contains(&field) => continue,
            _ => "not supported".into(),
        };
        problems.push(format!("{field} = {}: {problem}", shortened(value)));
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(ConfigError::Unsupported { problems }),
    }
}

fn all_full_attention(value: &Value) -> bool {
    let layers = value.as_array();
    layers.is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention"))
}

/// What is wrong with rotary settings; version 4 of transformers has called the kind `type` too.
fn rope_problem(value: &Value) -> Option<String> {
    let Some(settings) = value.as_object() else {
        return Some(format!("expected an object, found {}", strict_json::kind(value)));
    };
    for (field, value) in settings.iter().filter(|(_, value)| !value.is_null()) {
        match field.as_str() {
            "rope_type" | "type" if value != "default" => return Some("only rope_type = default is supported".into()),
            "rope_type" | "type" | "rope_theta" => {}
            "partial_rotary_factor" if value.as_f64() == Some(1.0) => {}
            field => return Some(format!("{field} is not supported")),
        }
    }
    None
}

/// A value, for a message of one line.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Version 5 of transformers moved the rotary settings.
fn rope_theta(json: &Map<String, Value>) -> Result<f64, ConfigError> {
    let moved = json.get("rope_parameters").and_then(Value::as_object);
    let moved = moved.filter(|rope| rope.contains_key("rope_theta"));
    let theta = number(moved.unwrap_or(json), "rope_theta")?;
    match json.get("rope_theta").filter(|value| !value.is_null()) {
        Some(other) if other.as_f64() != Some(theta) => {
            let expected = format!("rope_parameters says {theta}");
            Err(refuse("rope_theta", other, expected))
        }
        _ => Ok(theta),
    }
}

fn head_dim(hidden_size: usize, heads: usize) -> Result<usize, ConfigError> {
    match heads > 0 && hidden_size.is_multiple_of(heads) {
        true => Ok(hidden_size / heads),
        false => Err(ConfigError::Missing { field: "head_dim" }),
    }
}

/// A size that has two names.
fn same(json: &Map<String, Value>, field: &'static str, other: &'static str) -> Result<usize, ConfigError> {
    if !json.contains_key(field) && json.contains_key(other) {
        return size(json, other);
    }
    let value = size(json, field)?;
    match json.contains_key(other) && size(json, other)? != value {
        true => Err(refuse(other, &json[other], format!("{field} says {value}"))),
        false => Ok(value),
    }
}

fn required<'a>(json: &'a Map<String, Value>, field: &'static str) -> Result<&'a Value, ConfigError> {
    json.get(field).ok_or(ConfigError::Missing { field })
}

fn as_size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|size| usize::try_from(size).ok())
}

fn size(json: &Map<String, Value>, field: &'static str) -> Result<usize, ConfigError> {
    let value = required(json, field)?;
    as_size(value).ok_or_else(|| refuse(field, shortened(value), "must be a whole number"))
}

fn sizes(json: &Map<String, Value>, field: &'static str) -> Result<Vec<usize>, ConfigError> {
    let value = required(json, field)?;
    if value.is_null() {
        return Ok(vec![]);
    }
    let sizes = value.as_array().and_then(|list| list.iter().map(as_size).collect());
    sizes.ok_or_else(|| refuse(field, shortened(value), "must be a list of whole numbers"))
}

fn number(json: &Map<String, Value>, field: &'static str) -> Result<f64, ConfigError> {
    let value = required(json, field)?;
    value
        .as_f64()
        .ok_or_else(|| refuse(field, shortened(value), "must be a number"))
}

fn flag(json: &Map<String, Value>, field: &'static str) -> Result<bool, ConfigError> {
    let value = required(json, field)?;
    value
        .as_bool()
        .ok_or_else(|| refuse(field, shortened(value), "must be true or false"))
}

#[cfg(test)]
mod tests;
