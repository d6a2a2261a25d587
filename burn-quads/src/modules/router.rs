//! The router of a mixture of experts: which experts a token goes to, and with which weights.
use burn::{
    config::Config,
    module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param},
    tensor::{DType, Int, Tensor, backend::Backend},
};

use crate::layer_backend::{LayerBackend, product};

/// Configuration of a [`Router`].
#[derive(Config, Debug)]
pub struct RouterConfig {
    /// Features of a token.
    pub d_model: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts a token goes to.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are scaled to sum to one (Qwen3-MoE does, OLMoE does not).
    #[config(default = true)]
    pub normalize: bool,
    /// How the weight is drawn.
    #[config(default = "Initializer::KaimingUniform{gain: 1.0 / 3.0f64.sqrt(), fan_out_only: false}")]
    pub initializer: Initializer,
}

impl RouterConfig {
    /// Makes the router.
    ///
    /// # Panics
    /// When `top_k` is zero or above `experts`.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Router<B> {
        assert!(
            (1..=self.experts).contains(&self.top_k),
            "a router of {} experts cannot choose top_k = {}",
            self.experts,
            self.top_k
        );
        Router {
            weight: self.initializer.init_with(
                [self.d_model, self.experts],
                Some(self.d_model),
                Some(self.experts),
                device,
            ),
            top_k: self.top_k,
            normalize: self.normalize,
        }
    }
}

/// Softmax over all experts in f32, then the `top_k` most probable. Never quantized.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Router<B: Backend> {
    /// `[d_model, experts]`.
    pub weight: Param<Tensor<B, 2>>,
    /// Experts a token goes to.
    pub top_k: usize,
    /// Whether the weights of the chosen experts sum to one.
    pub normalize: bool,
}

/// Where each token goes.
#[derive(Clone, Debug)]
pub struct Routing<B: Backend> {
    /// `[tokens, top_k]`, the most probable first unless replayed.
    pub expert_ids: Tensor<B, 2, Int>,
    /// `[tokens, top_k]`.
    pub weights: Tensor<B, 2>,
    /// `[tokens, experts]`.
    pub logits: Tensor<B, 2>,
}

impl<B: Backend> Routing<B> {
    /// All of `x` `[tokens, d_model]` to expert 0 with weight 1: what a dense layer does.
    pub(crate) fn to_one_expert(x: &Tensor<B, 2>) -> Self {
        let (tokens, device) = (x.dims()[0], x.device());
        Self {
            expert_ids: Tensor::zeros([tokens, 1], &device),
            weights: Tensor::ones([tokens, 1], (&device, x.dtype())),
            logits: Tensor::zeros([tokens, 1], (&device, x.dtype())),
        }
    }
}

impl<B: LayerBackend> Router<B> {
    /// Routes `x` `[tokens, d_model]`.
    ///
    /// `replay`, `[tokens, top_k]`, are expert ids of another pass over the same tokens (routing replay, R3); a row that
    /// starts with -1 is routed here. The weights always come from the live logits, so the router keeps its gradient.
    ///
    /// # Panics
    /// When `replay` has another shape.
    pub fn forward(&self, x: Tensor<B, 2>, replay: Option<Tensor<B, 2, Int>>) -> Routing<B> {
        let logits = product(x, self.weight.val());
        let probabilities = B::softmax_rows(logits.clone().cast(DType::F32));
        // Logits decide, not probabilities: rounding in the softmax makes ties.
        let chosen = B::top_experts(logits.clone().detach(), self.top_k);
        let expert_ids = match replay {
            None => chosen,
            Some(replay) => {
                assert_eq!(
                    replay.dims(),
                    chosen.dims(),
                    "replayed expert ids must be [tokens, top_k] of this pass"
                );
                let live = replay.clone().narrow(1, 0, 1).lower_elem(0).expand(chosen.dims());
                replay.mask_where(live, chosen)
            }
        };
        // From the dense probabilities: an id that is no longer among the top has its true weight, not zero.
        let weights = probabilities.gather(1, expert_ids.clone());
        let weights = match self.normalize {
            true => weights.clone() / weights.sum_dim(1),
            false => weights,
        };
        Routing {
            expert_ids,
            weights: weights.cast(logits.dtype()),
            logits,
        }
    }
}

impl<B: Backend> ModuleDisplay for Router<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model, experts] = self.weight.lazy_shape().dims();
        content
            .add("d_model", &d_model)
            .add("experts", &experts)
            .add("top_k", &self.top_k)
            .add("normalize", &self.normalize)
            .optional()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        backend::{Autodiff, Flex},
        tensor::{TensorData, Tolerance},
    };

    type B = Flex;

    /// A router whose logits are its input.
    fn router<B: Backend>(top_k: usize, normalize: bool) -> Router<B> {
        let mut router = RouterConfig::new(4, 4, top_k)
            .with_normalize(normalize)
            .init(&Default::default());
        router.weight = Param::from_tensor(Tensor::eye(4, &Default::default()));
        router
    }

    fn logits<B: Backend>() -> Tensor<B, 2> {
        // Probabilities 0.1, 0.4, 0.2, 0.3 and 0.25 each.
        let row = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        Tensor::from_data([row, [0.0; 4]], &Default::default())
    }

    #[track_caller]
    fn assert_close(actual: TensorData, expected: [[f32; 2]; 2]) {
        actual.assert_approx_eq::<f32>(&expected.into(), Tolerance::absolute(1e-6));
    }

    #[test]
    fn chooses_the_most_probable_and_ties_go_to_the_lower_id() {
        let routing = router::<B>(2, false).forward(logits(), None);
        let ids: Vec<i64> = routing.expert_ids.into_data().iter::<i64>().collect();
        assert_eq!(ids, [1, 3, 0, 1]);
        assert_close(routing.weights.into_data(), [[0.4, 0.3], [0.25, 0.25]]);
    }

    #[test]
    fn normalized_weights_sum_to_one() {
        let routing = router::<B>(2, true).forward(logits(), None);
        assert_close(routing.weights.into_data(), [[4.0 / 7.0, 3.0 / 7.0], [0.5, 0.5]]);
    }

    #[test]
    fn replayed_ids_get_the_weights_of_the_live_logits() {
        let replay = Tensor::from_data([[0, 2], [-1, 0]], &Default::default());
        let routing = router::<B>(2, false).forward(logits(), Some(replay));
        let ids: Vec<i64> = routing.expert_ids.into_data().iter::<i64>().collect();
        assert_eq!(ids, [0, 2, 0, 1], "the second row is routed here");
        assert_close(routing.weights.into_data(), [[0.1, 0.2], [0.25, 0.25]]);
    }

    #[test]
    fn the_gradient_of_a_weight_is_that_of_the_softmax() {
        type A = Autodiff<B>;
        let x = logits::<A>().require_grad();
        let replay = Tensor::from_data([[0, 2], [0, 1]], &Default::default());
        let routing = router::<A>(2, false).forward(x.clone(), Some(replay));
        let grads = routing.weights.slice([0..1, 0..1]).sum().backward();
        // d p₀ / d x = p₀ · (δ₀ − p)
        let expected = [[0.1 * 0.9, -0.1 * 0.4, -0.1 * 0.2, -0.1 * 0.3], [0.0; 4]];
        let grad = x.grad(&grads).unwrap().into_data();
        grad.assert_approx_eq::<f32>(&expected.into(), Tolerance::absolute(1e-6));
    }

    #[test]
    #[should_panic(expected = "a router of 4 experts cannot choose top_k = 5")]
    fn more_experts_than_there_are_cannot_be_chosen() {
        RouterConfig::new(4, 4, 5).init::<B>(&Default::default());
    }
}
