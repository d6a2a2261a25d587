//! `[model]`: the mixture of experts.
use burn_nvfp4::Precision;
use burn_quads::modules::moe_config::QuadsMoeConfig;

use super::{ConfigError, Layers};

type Result<T> = std::result::Result<T, ConfigError>;

/// `[model]`
#[derive(Clone, Debug)]
pub struct ModelConfig {
    template: QuadsMoeConfig,
    /// Multiplies the first weights of all matrices.
    pub init_gain: f64,
    /// Outlier channels that are put behind each norm after the warm-up.
    pub outlier_channels: usize,
    /// What they are multiplied by.
    pub outlier_gain: f32,
}

impl ModelConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let size = |key| layers.count(key, 1..=65_536);
        let positive = |key| layers.number(key, "above 0", |number| number > 0.0);
        let template = QuadsMoeConfig::new(
            Self::UNKNOWN_VOCABULARY,
            size("model.hidden_size")?,
            size("model.num_hidden_layers")?,
            size("model.num_attention_heads")?,
            size("model.num_key_value_heads")?,
            size("model.head_dim")?,
            size("model.num_experts")?,
            size("model.num_experts_per_tok")?,
            size("model.moe_intermediate_size")?,
        )
        .with_norm_topk_prob(layers.flag("model.norm_topk_prob"))
        .with_rope_theta(positive("model.rope_theta")?)
        .with_rms_norm_eps(positive("model.rms_norm_eps")?);
        template.validate().map_err(|error| {
            let text = error.to_string();
            let (field, expected) = match &error {
                burn_quads::modules::moe_config::ConfigError::Field { field, expected, .. } => {
                    (*field, expected.as_str())
                }
                _ => ("hidden_size", text.as_str()),
            };
            // A complaint about a product of two settings is filed under the first.
            let key = format!("model.{}", field.split(' ').next().unwrap_or(field));
            layers.refuse(&key, format!("{field}: {expected}"))
        })?;
        let init_gain = positive("model.init_gain")?;
        Ok(Self {
            init_gain,
            outlier_channels: layers.count("model.outlier_channels", 0..=65_536)?,
            outlier_gain: positive("model.outlier_gain")? as f32,
            template,
        })
    }

    const UNKNOWN_VOCABULARY: usize = 1;

    /// The sizes; the vocabulary's is set by [`for_vocabulary`](Self::for_vocabulary).
    pub fn shape(&self) -> &QuadsMoeConfig {
        &self.template
    }

    /// The model's configuration for a vocabulary and sequences up to a length, in high precision.
    pub fn for_vocabulary(&self, tokens: usize, max_tokens: usize) -> QuadsMoeConfig {
        let mut config = self.template.clone();
        config.vocab_size = tokens;
        config.max_position_embeddings = max_tokens;
        config.precision = Precision::High;
        config
    }
}
