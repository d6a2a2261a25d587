//! The mixture-of-experts language model (Qwen3-MoE, OLMoE).
use burn::{
    module::{Initializer, Module, Param},
    nn::{Embedding, EmbeddingConfig, RmsNorm, RmsNormConfig},
    tensor::{Int, Tensor, backend::Backend},
};
use burn_nvfp4::{PackError, Precision};

use super::{
    activation_site::ActivationSite,
    attention::{AttentionContext, QuadsAttentionConfig},
    decoder_layer::{DecoderLayer, MoeBlock},
    experts::QuadsExpertsConfig,
    moe_config::{ConfigError, QuadsMoeConfig},
    residual_masks::{MaskError, ResidualMasks},
    rotary::{RotaryEmbedding, RotaryEmbeddingConfig},
    router::RouterConfig,
    straight_through::Backward,
};
use crate::{
    backend::QuadsBackend,
    causal_lm::{CausalLm, HiddenOutput, TokenBatch},
    layer_backend::{product, rms_norm},
};

/// A decoder-only mixture-of-experts language model: grouped-query attention with QK-norm and rotary positions, SwiGLU
/// experts behind a softmax top-k router (some layers may be dense), RMS norms.
///
/// Attention projections and experts run in a [`Precision`]; embedding, head, routers and norms are dense always. The
/// same type is the trainer's model (f32 masters on `Autodiff<Nvfp4<B>>`) and, after [`sync`](crate::sync::sync), the
/// rollout's (packed weights on `Nvfp4<B>`).
#[derive(Module, Debug)]
pub struct QuadsMoe<B: Backend> {
    /// `[vocab, hidden]`.
    pub embed_tokens: Embedding<B>,
    /// The decoder layers.
    pub layers: Vec<DecoderLayer<B>>,
    /// Before the head.
    pub norm: RmsNorm<B>,
    /// `[hidden, vocab]`; absent when the head is the transposed embedding.
    pub lm_head: Option<Param<Tensor<B, 2>>>,
    /// Rotary frequencies.
    pub rope: RotaryEmbedding<B>,
    #[module(skip)]
    config: QuadsMoeConfig,
}

/// Why a model cannot run in a precision.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PrecisionError {
    /// A dimension does not fit the precision.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A setting of the precision itself, such as the compensated fraction.
    #[error("{precision}: {source}")]
    Setting {
        /// The precision asked for.
        precision: String,
        /// What is wrong with it.
        source: PackError,
    },
    /// The precision compensates calibrated channels, and a layer has no mask.
    #[error("{precision}: {layer} has no calibrated mask; calibrate first, then set the masks")]
    MissingMask {
        /// The precision asked for.
        precision: String,
        /// The first layer without a mask.
        layer: String,
    },
}

impl QuadsMoeConfig {
    /// Makes the model with weights from the backend's own generator, drawn when they are first used.
    ///
    /// # Panics
    /// When [`validate`](Self::validate) refuses the configuration, or the precision needs calibrated masks.
    pub fn init<B: Backend>(&self, device: &B::Device) -> QuadsMoe<B> {
        if let Err(error) = self.validate() {
            panic!("QuadsMoeConfig: {error}");
        }
        let norm = || {
            RmsNormConfig::new(self.hidden_size)
                .with_epsilon(self.rms_norm_eps)
                .init(device)
        };
        let layer = |index: usize| DecoderLayer {
            input_layernorm: norm(),
            self_attn: QuadsAttentionConfig::new(
                self.hidden_size,
                self.num_attention_heads,
                self.num_key_value_heads,
                self.head_dim,
            )
            .with_attention_bias(self.attention_bias)
            .with_qk_norm(self.qk_norm)
            .with_clip_qkv(self.clip_qkv)
            .with_rms_norm_eps(self.rms_norm_eps)
            .with_precision(self.precision.clone())
            .init(device),
            post_attention_layernorm: norm(),
            mlp: MoeBlock {
                gate: self.is_moe_layer(index).then(|| {
                    RouterConfig::new(self.hidden_size, self.num_experts, self.num_experts_per_tok)
                        .with_normalize(self.norm_topk_prob)
                        .init(device)
                }),
                experts: QuadsExpertsConfig::new(
                    self.experts_of_layer(index),
                    self.hidden_size,
                    self.expert_size_of_layer(index),
                )
                .with_precision(self.precision.clone())
                .init(device),
            },
        };
        let head = Initializer::KaimingUniform {
            gain: 1.0 / 3.0f64.sqrt(),
            fan_out_only: false,
        };
        let model = QuadsMoe {
            embed_tokens: EmbeddingConfig::new(self.vocab_size, self.hidden_size).init(device),
            layers: (0..self.num_hidden_layers).map(layer).collect(),
            norm: norm(),
            lm_head: (!self.tie_word_embeddings).then(|| {
                let shape = [self.hidden_size, self.vocab_size];
                head.init_with(shape, Some(self.hidden_size), Some(self.vocab_size), device)
            }),
            rope: RotaryEmbeddingConfig::new(self.max_position_embeddings, self.head_dim)
                .with_theta(self.rope_theta)
                .init(device),
            config: self.clone(),
        };
        if let Err(error) = model.check_precision(&self.precision) {
            panic!("QuadsMoeConfig: {error}");
        }
        model
    }
}

impl<B: Backend> QuadsMoe<B> {
    /// The configuration.
    pub fn config(&self) -> &QuadsMoeConfig {
        &self.config
    }

    /// The precision of attention projections and experts.
    pub fn precision(&self) -> &Precision {
        &self.config.precision
    }

    /// The model in another precision; weights stay as they are.
    ///
    /// # Errors
    /// When a dimension does not fit, or the precision compensates calibrated channels and no masks were set with
    /// [`with_residual_masks`](Self::with_residual_masks).
    pub fn with_precision(mut self, precision: Precision) -> Result<Self, PrecisionError> {
        self.config.validate_precision(&precision)?;
        self.check_precision(&precision)?;
        self.layers = self
            .layers
            .into_iter()
            .map(|layer| DecoderLayer {
                self_attn: layer.self_attn.with_precision(precision.clone()),
                mlp: MoeBlock {
                    experts: layer.mlp.experts.with_precision(precision.clone()),
                    ..layer.mlp
                },
                ..layer
            })
            .collect();
        self.config.precision = precision;
        Ok(self)
    }

    /// The model with another straight-through gradient of its quantized layers; what it computes stays the same.
    pub fn with_backward(mut self, backward: Backward) -> Self {
        self.layers = self
            .layers
            .into_iter()
            .map(|layer| DecoderLayer {
                self_attn: layer.self_attn.with_backward(backward),
                mlp: MoeBlock {
                    experts: layer.mlp.experts.with_backward(backward),
                    ..layer.mlp
                },
                ..layer
            })
            .collect();
        self
    }

    fn check_precision(&self, precision: &Precision) -> Result<(), PrecisionError> {
        for site in self.sites() {
            match precision.activation(site.activations.mask()) {
                Ok(_) => {}
                Err(PackError::MissingMask) => {
                    return Err(PrecisionError::MissingMask {
                        precision: precision.to_string(),
                        layer: site.name,
                    });
                }
                Err(source) => {
                    return Err(PrecisionError::Setting {
                        precision: precision.to_string(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// The model with calibrated residual masks, which `w4a4_rac` uses on the trainer's side when its selection is
    /// calibrated, and [`sync`](crate::sync::sync) on the rollout's.
    ///
    /// # Errors
    /// When `masks` does not have exactly the layers of this model, each with its size.
    pub fn with_residual_masks(mut self, masks: &ResidualMasks) -> Result<Self, MaskError> {
        let layers: Vec<_> = self.sites().into_iter().map(|site| (site.name, site.k)).collect();
        masks.check(&layers)?;
        for site in self.sites_mut() {
            site.activations.set_mask(masks.get(&site.name).cloned());
        }
        Ok(self)
    }

    /// The inputs of quantized layers, in forward order.
    pub(crate) fn sites(&self) -> Vec<Site<&ActivationSite>> {
        let sites = self.layers.iter().map(|layer| {
            let (attn, experts) = (&layer.self_attn, &layer.mlp.experts);
            [&attn.q_proj.input, &attn.o_proj.input, &experts.input, &experts.hidden]
        });
        named_sites(&self.config, sites.collect())
    }

    /// [`sites`](Self::sites), to be changed.
    pub(crate) fn sites_mut(&mut self) -> Vec<Site<&mut ActivationSite>> {
        let config = self.config.clone();
        let sites = self.layers.iter_mut().map(|layer| {
            let (attn, experts) = (&mut layer.self_attn, &mut layer.mlp.experts);
            [
                &mut attn.q_proj.input,
                &mut attn.o_proj.input,
                &mut experts.input,
                &mut experts.hidden,
            ]
        });
        named_sites(&config, sites.collect())
    }
}

/// An input of quantized layers.
pub(crate) struct Site<A> {
    /// Path of the layer; q, k and v together are `qkv_proj`.
    pub name: String,
    /// Channels.
    pub k: usize,
    pub activations: A,
}

/// Names the inputs of each decoder layer, given in forward order.
fn named_sites<A>(config: &QuadsMoeConfig, layers: Vec<[A; 4]>) -> Vec<Site<A>> {
    let mut named = Vec::with_capacity(4 * layers.len());
    for (layer, sites) in layers.into_iter().enumerate() {
        let names = [
            ("self_attn.qkv_proj", config.hidden_size),
            ("self_attn.o_proj", config.num_attention_heads * config.head_dim),
            ("mlp.experts.gate_up_proj", config.hidden_size),
            ("mlp.experts.down_proj", config.expert_size_of_layer(layer)),
        ];
        for ((name, k), activations) in names.into_iter().zip(sites) {
            named.push(Site {
                name: format!("layers.{layer}.{name}"),
                k,
                activations,
            });
        }
    }
    named
}

impl<B: QuadsBackend> QuadsMoe<B> {
    /// Logits `[batch, seq, vocab]` of whole rows `[batch, seq]` without padding.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, seq] = tokens.dims();
        let hidden = self.hidden_states(&TokenBatch::new(tokens)).hidden;
        let hidden = hidden.reshape([batch * seq, self.config.hidden_size]);
        self.logits(hidden).reshape([batch, seq, self.config.vocab_size])
    }

    /// The last hidden states of whole sequences under causal attention.
    ///
    /// # Panics
    /// When positions, padding or replayed ids do not have the shape that the tokens ask for.
    pub fn hidden_states(&self, input: &TokenBatch<B>) -> HiddenOutput<B> {
        let [batch, seq] = input.tokens.dims();
        let check = |what: &str, dims: [usize; 2]| {
            assert_eq!(dims, [batch, seq], "{what} must have the shape of the tokens");
        };
        if let Some(positions) = &input.positions {
            check("positions", positions.dims());
        }
        if let Some(padding) = &input.padding {
            check("padding", padding.dims());
        }
        if let Some(replay) = &input.replay {
            assert_eq!(
                replay.expert_ids.len(),
                self.layers.iter().filter(|layer| layer.mlp.gate.is_some()).count(),
                "routing replay must have one tensor a mixture-of-experts layer"
            );
        }
        let context = AttentionContext::new(&self.rope, seq, input.positions.clone(), input.padding.clone());
        let mut x = self.embed_tokens.forward(input.tokens.clone());
        let mut expert_ids = Vec::with_capacity(self.layers.len());
        let mut router_logits = Vec::with_capacity(self.layers.len());
        let mut replayed = input.replay.iter().flat_map(|replay| &replay.expert_ids);
        for layer in &self.layers {
            let replay = layer.mlp.gate.as_ref().and_then(|_| replayed.next().cloned());
            let (y, routing) = layer.forward_with(x, |attention, x| attention.forward(x, &context), replay);
            x = y;
            if let Some(routing) = routing {
                expert_ids.push(routing.expert_ids);
                router_logits.push(routing.logits);
            }
        }
        HiddenOutput {
            hidden: rms_norm(&self.norm, x),
            expert_ids,
            router_logits,
        }
    }

    /// The head: `[n, hidden]` to logits `[n, vocab]`.
    pub fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        product(hidden, self.head_weight())
    }

    /// The head's weight, `[hidden, vocab]`.
    pub fn head_weight(&self) -> Tensor<B, 2> {
        match &self.lm_head {
            Some(weight) => weight.val(),
            None => self.embed_tokens.weight.val().transpose(),
        }
    }
}

impl<B: QuadsBackend> CausalLm<B> for QuadsMoe<B> {
    fn hidden_states(&self, input: &TokenBatch<B>) -> HiddenOutput<B> {
        QuadsMoe::hidden_states(self, input)
    }

    fn head_weight(&self) -> Tensor<B, 2> {
        QuadsMoe::head_weight(self)
    }
}
