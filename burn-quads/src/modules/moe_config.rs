//! Configuration of the mixture-of-experts language model, and its `config.json`.
use burn::config::Config;
use burn_nvfp4::{Precision, WeightFormat};
use kernels_cubecl::BLOCK;

use super::attention::QkNorm;

/// More layers than any model has.
const MAX_LAYERS: usize = 10_000;

/// Configuration of a [`QuadsMoe`](super::moe::QuadsMoe), with the field names of `config.json`. The architectures are
/// those of Qwen3-MoE ([`QkNorm::Head`]) and OLMoE ([`QkNorm::Projection`]).
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
    /// Whether the attention projections have a bias.
    #[config(default = false)]
    pub attention_bias: bool,
    /// What the norms of queries and keys run over.
    #[config(default = "QkNorm::Head")]
    pub qk_norm: QkNorm,
    /// Largest magnitude of queries, keys and values. Needs [`QkNorm::Projection`].
    pub clip_qkv: Option<f64>,
    /// Layers, counted from 0, with one dense expert of `intermediate_size` instead of a mixture.
    #[config(default = "vec![]")]
    pub mlp_only_layers: Vec<usize>,
    /// Of the others, layers whose number (counted from 1) is not a multiple of it are dense too.
    #[config(default = 1)]
    pub decoder_sparse_step: usize,
    /// Hidden features of a dense layer; needed where there is one. A multiple of 16 in the NVFP4 precisions.
    pub intermediate_size: Option<usize>,
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
    /// The checkpoint is of a model that has more, or other, than this one.
    #[error("the model is not supported: {}", .problems.join("; "))]
    Unsupported {
        /// Each field with its value and what is wrong with it.
        problems: Vec<String>,
    },
    /// The text is not a JSON object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
}

pub(crate) fn refuse(field: &'static str, value: impl ToString, expected: impl Into<String>) -> ConfigError {
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
            ("decoder_sparse_step", self.decoder_sparse_step),
        ] {
            if value == 0 {
                return Err(refuse(field, value, "must be at least 1"));
            }
        }
        if self.num_hidden_layers > MAX_LAYERS {
            let expected = format!("must be at most {MAX_LAYERS}");
            return Err(refuse("num_hidden_layers", self.num_hidden_layers, expected));
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
        if let Some(clip) = self.clip_qkv {
            if !(clip.is_finite() && clip > 0.0) {
                return Err(refuse("clip_qkv", clip, "must be a positive number"));
            }
            if self.qk_norm != QkNorm::Projection {
                return Err(refuse("clip_qkv", clip, "needs qk_norm = projection"));
            }
        }
        self.validate_dense_layers()?;
        if self.qk_norm == QkNorm::Projection {
            self.validate_olmoe()?;
        }
        self.validate_precision(&self.precision)
    }

    /// What OLMoE, the only model with norms over whole projections, does not have.
    fn validate_olmoe(&self) -> Result<(), ConfigError> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        if heads.checked_mul(self.head_dim) != Some(hidden) {
            let expected =
                format!("must be hidden_size / num_attention_heads = {hidden} / {heads} with qk_norm = projection");
            return Err(refuse("head_dim", self.head_dim, expected));
        }
        match (0..self.num_hidden_layers).find(|layer| !self.is_moe_layer(*layer)) {
            Some(layer) => Err(refuse("mlp_only_layers", layer, "dense layers need qk_norm = head")),
            None => Ok(()),
        }
    }

    fn validate_dense_layers(&self) -> Result<(), ConfigError> {
        let layers = self.num_hidden_layers;
        let listed = self.mlp_only_layers.len();
        if listed > layers {
            let expected = format!("must not list more than num_hidden_layers = {layers}");
            return Err(refuse("mlp_only_layers", format!("{listed} layers"), expected));
        }
        if let Some(layer) = self.mlp_only_layers.iter().find(|layer| **layer >= layers) {
            let expected = format!("must be below num_hidden_layers = {layers}");
            return Err(refuse("mlp_only_layers", layer, expected));
        }
        let dense = (0..layers).filter(|layer| !self.is_moe_layer(*layer)).count();
        if dense == layers {
            let layers = format!("{:?}", self.mlp_only_layers);
            return Err(refuse(
                "mlp_only_layers",
                layers,
                "must leave a mixture-of-experts layer",
            ));
        }
        match self.intermediate_size {
            Some(0) => Err(refuse("intermediate_size", 0, "must be at least 1")),
            None if dense > 0 => Err(refuse(
                "intermediate_size",
                "none",
                "must be set where layers are dense",
            )),
            _ => Ok(()),
        }
    }

    /// Whether a layer, counted from 0, has a router.
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.decoder_sparse_step) && !self.mlp_only_layers.contains(&layer)
    }

    /// Experts of a layer: one where it is dense.
    pub(crate) fn experts_of_layer(&self, layer: usize) -> usize {
        if self.is_moe_layer(layer) { self.num_experts } else { 1 }
    }

    /// Hidden features of each expert of a layer.
    pub(crate) fn expert_size_of_layer(&self, layer: usize) -> usize {
        match self.is_moe_layer(layer) {
            true => self.moe_intermediate_size,
            false => self.intermediate_size.expect("validated: dense layers have a size"),
        }
    }

    /// Whether every quantized layer of the model can run in `precision`.
    pub(crate) fn validate_precision(&self, precision: &Precision) -> Result<(), ConfigError> {
        if precision.weight_format() != Some(WeightFormat::Nvfp4) {
            return Ok(());
        }
        let attention = self.num_attention_heads * self.head_dim;
        let dense = (0..self.num_hidden_layers).find(|layer| !self.is_moe_layer(*layer));
        let dense = dense.map(|layer| ("intermediate_size", self.expert_size_of_layer(layer)));
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("num_attention_heads * head_dim", attention),
        ];
        for (field, value) in sizes.into_iter().chain(dense) {
            if !value.is_multiple_of(BLOCK) {
                let expected = format!("must be a multiple of {BLOCK} in the precision {precision}");
                return Err(refuse(field, value, expected));
            }
        }
        Ok(())
    }
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
    fn layers_are_dense_by_list_and_by_step() {
        let config = QuadsMoeConfig {
            num_hidden_layers: 6,
            decoder_sparse_step: 2,
            mlp_only_layers: vec![3],
            intermediate_size: Some(80),
            ..tiny()
        };
        let moe: Vec<_> = (0..6).map(|layer| config.is_moe_layer(layer)).collect();
        assert_eq!(moe, [false, true, false, false, false, true]);
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(
            refused(QuadsMoeConfig {
                intermediate_size: None,
                ..config.clone()
            }),
            "intermediate_size = none: must be set where layers are dense"
        );
        assert_eq!(
            refused(QuadsMoeConfig {
                intermediate_size: Some(72),
                ..config
            }),
            "intermediate_size = 72: must be a multiple of 16 in the precision w4a16"
        );
    }

    #[test]
    fn norms_over_projections_are_those_of_olmoe() {
        let olmoe = tiny().with_qk_norm(QkNorm::Projection).with_clip_qkv(Some(1.0));
        assert_eq!(olmoe.validate(), Ok(()));
        assert_eq!(
            refused(tiny().with_clip_qkv(Some(1.0))),
            "clip_qkv = 1: needs qk_norm = projection"
        );
        assert_eq!(
            refused(olmoe.clone().with_clip_qkv(Some(0.0))),
            "clip_qkv = 0: must be a positive number"
        );
        assert_eq!(
            refused(QuadsMoeConfig { head_dim: 32, ..olmoe }),
            "head_dim = 32: must be hidden_size / num_attention_heads = 64 / 4 with qk_norm = projection"
        );
    }
}
