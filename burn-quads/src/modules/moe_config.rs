//! Configuration of the mixture-of-experts language model, and its `config.json`.
use burn::config::Config;
use burn_nvfp4::{Precision, WeightFormat};
use kernels_cubecl::BLOCK;
use serde_json::{Map, Value, json};

/// Configuration of a [`QuadsMoe`](super::moe::QuadsMoe), with the field names of Qwen3-MoE's `config.json`.
#[derive(Config, Debug)]
pub struct QuadsMoeConfig {
    /// Tokens.
    pub vocab_size: usize,
    /// Features of a token. A multiple of 16 in the NVFP4 precisions.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Features of a head; even. `num_attention_heads · head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts a token goes to.
    pub num_experts_per_tok: usize,
    /// Hidden features of an expert. A multiple of 16 in the NVFP4 precisions.
    pub moe_intermediate_size: usize,
    /// Whether the weights of the chosen experts sum to one.
    #[config(default = true)]
    pub norm_topk_prob: bool,
    /// Base of the rotary frequencies.
    #[config(default = 1e6)]
    pub rope_theta: f64,
    /// Added to the mean square in the norms.
    #[config(default = 1e-6)]
    pub rms_norm_eps: f64,
    /// Longest sequence, in tokens.
    #[config(default = 4096)]
    pub max_position_embeddings: usize,
    /// Whether the head is the transposed embedding.
    #[config(default = false)]
    pub tie_word_embeddings: bool,
    /// Precision of the attention projections and the experts. Embedding, head, routers and norms stay dense.
    #[config(default = "Precision::W4A16")]
    pub precision: Precision,
}

/// Why a configuration was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A field has an impossible value.
    #[error("{field} = {value}: {expected}")]
    Field {
        /// The field, named as in `config.json`.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A field of `config.json` is absent.
    #[error("{field} is missing from config.json")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// The text is not a JSON object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
}

fn refuse(field: &'static str, value: impl ToString, expected: impl Into<String>) -> ConfigError {
    ConfigError::Field {
        field,
        value: value.to_string(),
        expected: expected.into(),
    }
}

impl QuadsMoeConfig {
    /// Checks every field against the others.
    ///
    /// # Errors
    /// The first field with an impossible value, and what was expected.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("num_experts", self.num_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            if value == 0 {
                return Err(refuse(field, value, "must be at least 1"));
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let heads = self.num_attention_heads;
            return Err(refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                format!("must divide num_attention_heads = {heads}"),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(refuse("head_dim", self.head_dim, "must be even, for rotary positions"));
        }
        if self.num_experts_per_tok > self.num_experts {
            let experts = self.num_experts;
            return Err(refuse(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                format!("must not exceed num_experts = {experts}"),
            ));
        }
        for (field, value) in [("rope_theta", self.rope_theta), ("rms_norm_eps", self.rms_norm_eps)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(refuse(field, value, "must be a positive number"));
            }
        }
        self.validate_precision(&self.precision)
    }

    /// Whether every quantized layer of the model can run in `precision`.
    pub(crate) fn validate_precision(&self, precision: &Precision) -> Result<(), ConfigError> {
        if precision.weight_format() != Some(WeightFormat::Nvfp4) {
            return Ok(());
        }
        let attention = self.num_attention_heads * self.head_dim;
        for (field, value) in [
            ("hidden_size", self.hidden_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("num_attention_heads * head_dim", attention),
        ] {
            if !value.is_multiple_of(BLOCK) {
                let expected = format!("must be a multiple of {BLOCK} in the precision {precision}");
                return Err(refuse(field, value, expected));
            }
        }
        Ok(())
    }

    /// Reads the `config.json` of a Qwen3-MoE checkpoint, as version 4 or 5 of transformers writes it. The precision is
    /// [`Precision::High`]; set it with `with_precision`.
    ///
    /// # Errors
    /// A missing field, an impossible value, or a feature that this model does not have (dense layers, attention biases,
    /// sliding windows, scaled rotary positions).
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let json: Value = serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        let json = json
            .as_object()
            .ok_or_else(|| ConfigError::Json("another JSON value".into()))?;
        refuse_unsupported(json)?;
        // Version 5 of transformers moved the rotary settings and renamed the number of experts.
        let rope = json.get("rope_parameters").and_then(Value::as_object);
        let config = Self {
            vocab_size: size(json, "vocab_size")?,
            hidden_size: size(json, "hidden_size")?,
            num_hidden_layers: size(json, "num_hidden_layers")?,
            num_attention_heads: size(json, "num_attention_heads")?,
            num_key_value_heads: size(json, "num_key_value_heads")?,
            head_dim: size(json, "head_dim")?,
            num_experts: match json.contains_key("num_experts") {
                true => size(json, "num_experts")?,
                false => size(json, "num_local_experts")?,
            },
            num_experts_per_tok: size(json, "num_experts_per_tok")?,
            moe_intermediate_size: size(json, "moe_intermediate_size")?,
            norm_topk_prob: flag(json, "norm_topk_prob")?,
            rope_theta: number(
                rope.filter(|r| r.contains_key("rope_theta")).unwrap_or(json),
                "rope_theta",
            )?,
            rms_norm_eps: number(json, "rms_norm_eps")?,
            max_position_embeddings: size(json, "max_position_embeddings")?,
            tie_word_embeddings: flag(json, "tie_word_embeddings")?,
            precision: Precision::High,
        };
        config.validate()?;
        Ok(config)
    }

    /// The `config.json` that transformers (version 4 and 5) reads; the precision is not part of it.
    pub fn to_json(&self) -> String {
        let json = json!({
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": false,
            "decoder_sparse_step": 1,
            "dtype": "float32",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            // Width of dense layers, of which there are none; transformers wants a number.
            "intermediate_size": self.moe_intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.moe_intermediate_size,
            "norm_topk_prob": self.norm_topk_prob,
            "num_attention_heads": self.num_attention_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_sliding_window": false,
            "vocab_size": self.vocab_size,
        });
        serde_json::to_string_pretty(&json).expect("numbers, flags and names are JSON")
    }
}

/// Refuses checkpoints of models that are not this one, rather than computing something else.
fn refuse_unsupported(json: &Map<String, Value>) -> Result<(), ConfigError> {
    let absent = |field: &str| matches!(json.get(field), None | Some(Value::Null));
    let not = |field: &str, accepted: &[Value]| !absent(field) && !accepted.contains(&json[field]);
    let default_rope = |field: &str| {
        let kind = &json[field]["rope_type"];
        kind.is_null() || kind == "default"
    };
    for (field, accepted, expected) in [
        ("model_type", json!("qwen3_moe"), "only qwen3_moe is supported"),
        ("hidden_act", json!("silu"), "only silu is supported"),
        ("attention_bias", json!(false), "attention biases are not supported"),
        ("use_sliding_window", json!(false), "sliding windows are not supported"),
        ("mlp_only_layers", json!([]), "dense layers are not supported"),
        ("decoder_sparse_step", json!(1), "dense layers are not supported"),
    ] {
        if not(field, &[accepted]) {
            return Err(refuse(field, &json[field], expected));
        }
    }
    for field in ["rope_scaling", "rope_parameters"] {
        if !absent(field) && !default_rope(field) {
            return Err(refuse(field, &json[field], "only rope_type = default is supported"));
        }
    }
    Ok(())
}

fn required<'a>(json: &'a Map<String, Value>, field: &'static str) -> Result<&'a Value, ConfigError> {
    json.get(field).ok_or(ConfigError::Missing { field })
}

fn size(json: &Map<String, Value>, field: &'static str) -> Result<usize, ConfigError> {
    let value = required(json, field)?;
    let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
    size.ok_or_else(|| refuse(field, value, "must be a whole number"))
}

fn number(json: &Map<String, Value>, field: &'static str) -> Result<f64, ConfigError> {
    let value = required(json, field)?;
    value.as_f64().ok_or_else(|| refuse(field, value, "must be a number"))
}

fn flag(json: &Map<String, Value>, field: &'static str) -> Result<bool, ConfigError> {
    let value = required(json, field)?;
    value
        .as_bool()
        .ok_or_else(|| refuse(field, value, "must be true or false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> QuadsMoeConfig {
        QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 64)
    }

    fn refused(config: QuadsMoeConfig) -> String {
        config.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn every_impossible_field_is_named_with_what_was_expected() {
        assert_eq!(tiny().validate(), Ok(()));
        assert_eq!(
            refused(QuadsMoeConfig {
                num_key_value_heads: 3,
                ..tiny()
            }),
            "num_key_value_heads = 3: must divide num_attention_heads = 4"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                num_experts_per_tok: 5,
                ..tiny()
            }),
            "num_experts_per_tok = 5: must not exceed num_experts = 4"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                hidden_size: 72,
                ..tiny()
            }),
            "hidden_size = 72: must be a multiple of 16 in the precision w4a16"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                moe_intermediate_size: 24,
                ..tiny()
            }),
            "moe_intermediate_size = 24: must be a multiple of 16 in the precision w4a16"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                num_attention_heads: 2,
                head_dim: 4,
                ..tiny()
            }),
            "num_attention_heads * head_dim = 8: must be a multiple of 16 in the precision w4a16"
        );
        assert_eq!(
            refused(QuadsMoeConfig { head_dim: 15, ..tiny() }),
            "head_dim = 15: must be even, for rotary positions"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                vocab_size: 0,
                ..tiny()
            }),
            "vocab_size = 0: must be at least 1"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                rope_theta: f64::NAN,
                ..tiny()
            }),
            "rope_theta = NaN: must be a positive number"
        );
        // Without NVFP4 blocks any width will do.
        assert_eq!(
            QuadsMoeConfig {
                hidden_size: 72,
                precision: Precision::High,
                ..tiny()
            }
            .validate(),
            Ok(())
        );
    }

    #[test]
    fn config_json_survives_a_round_trip() {
        let config = QuadsMoeConfig {
            norm_topk_prob: false,
            rope_theta: 10000.0,
            tie_word_embeddings: true,
            precision: Precision::High,
            ..tiny()
        };
        let read = QuadsMoeConfig::from_json(&config.to_json()).unwrap();
        assert_eq!(read.to_json(), config.to_json());
        assert_eq!(read.rope_theta, 10000.0);
        assert!(read.tie_word_embeddings && !read.norm_topk_prob);
    }

    #[test]
    fn config_json_of_another_architecture_is_refused() {
        let mut json: Value = serde_json::from_str(&tiny().to_json()).unwrap();
        json["mlp_only_layers"] = json!([1]);
        let error = QuadsMoeConfig::from_json(&json.to_string()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mlp_only_layers = [1]: dense layers are not supported"
        );

        json["mlp_only_layers"] = json!([]);
        json["rope_parameters"] = json!({"rope_type": "yarn", "rope_theta": 1e6});
        let error = QuadsMoeConfig::from_json(&json.to_string()).unwrap_err();
        assert!(
            error.to_string().contains("only rope_type = default is supported"),
            "{error}"
        );

        json["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
        assert_eq!(QuadsMoeConfig::from_json(&json.to_string()).unwrap().rope_theta, 5e5);

        json.as_object_mut().unwrap().remove("head_dim");
        let error = QuadsMoeConfig::from_json(&json.to_string()).unwrap_err();
        assert_eq!(error.to_string(), "head_dim is missing from config.json");

        assert!(matches!(QuadsMoeConfig::from_json("[1]"), Err(ConfigError::Json(_))));
    }
}
