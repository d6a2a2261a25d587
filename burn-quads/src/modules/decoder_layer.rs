//! One decoder layer: attention and a mixture of experts (or one dense expert), each behind a norm and around a residual.
use burn::{
    module::Module,
    nn::RmsNorm,
    tensor::{Int, Tensor, backend::Backend},
};

use super::{
    attention::QuadsAttention,
    experts::QuadsExperts,
    router::{Router, Routing},
};
use crate::{backend::QuadsBackend, layer_backend::rms_norm};

/// A router and its experts; or, in a dense layer, one expert that every token goes through.
#[derive(Module, Debug)]
pub struct MoeBlock<B: Backend> {
    /// Chooses the experts; absent in a dense layer.
    pub gate: Option<Router<B>>,
    /// The experts.
    pub experts: QuadsExperts<B>,
}

impl<B: QuadsBackend> MoeBlock<B> {
    /// `x` `[tokens, hidden]` to `[tokens, hidden]`, and where the tokens went if the layer has a router. `replay` as in
    /// [`Router::forward`].
    pub fn forward(&self, x: Tensor<B, 2>, replay: Option<Tensor<B, 2, Int>>) -> (Tensor<B, 2>, Option<Routing<B>>) {
        match &self.gate {
            Some(gate) => {
                let routing = gate.forward(x.clone(), replay);
                (self.experts.forward(x, &routing), Some(routing))
            }
            None => (self.experts.forward(x.clone(), &Routing::to_one_expert(&x)), None),
        }
    }
}

/// One decoder layer of Qwen3-MoE or OLMoE.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Before the attention.
    pub input_layernorm: RmsNorm<B>,
    /// The attention.
    pub self_attn: QuadsAttention<B>,
    /// Before router and experts.
    pub post_attention_layernorm: RmsNorm<B>,
    /// Router and experts.
    pub mlp: MoeBlock<B>,
}

impl<B: QuadsBackend> DecoderLayer<B> {
    /// `x` `[.., hidden]` through the layer, with `attend` as its attention: over whole sequences when training and
    /// scoring, over a cache when sampling. `replay` as in [`Router::forward`].
    pub fn forward_with<const D: usize>(
        &self,
        x: Tensor<B, D>,
        attend: impl FnOnce(&QuadsAttention<B>, Tensor<B, D>) -> Tensor<B, D>,
        replay: Option<Tensor<B, 2, Int>>,
    ) -> (Tensor<B, D>, Option<Routing<B>>) {
        let shape = x.dims();
        let hidden = shape[D - 1];
        let tokens = shape[..D - 1].iter().product::<usize>();
        let x = x.clone() + attend(&self.self_attn, rms_norm(&self.input_layernorm, x));
        let normed = rms_norm(&self.post_attention_layernorm, x.clone());
        let (y, routing) = self.mlp.forward(normed.reshape([tokens, hidden]), replay);
        (x + y.reshape(shape), routing)
    }
}
