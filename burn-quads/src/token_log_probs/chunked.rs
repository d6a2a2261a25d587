//! The head, a chunk of tokens at a time, and its gradient.
use crate::{
    backend::runs_on_gpu,
    layer_backend::{LayerBackend, product, product_weight_backward},
};
use burn::{
    backend::autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    prelude::Backend,
    tensor::{
        DType, IndexingUpdateOp, Int, Tensor, TensorPrimitive,
        backend::AutodiffBackend,
        ops::{FloatTensor, IntTensor},
    },
};

/// Logits that live at once: 16 MiB of f32, which caches hold, and 128 MiB on GPUs, where tokens are worked on side by side
/// and few of them take as long as many.
fn logits_at_once<B: Backend>(device: &B::Device) -> usize {
    match runs_on_gpu::<B>(device) {
        true => 1 << 25,
        false => 1 << 22,
    }
}

/// Tokens a chunk.
fn chunk_tokens(vocab: usize, logits: usize) -> usize {
    (logits / vocab.max(1)).max(1)
}

/// Logits of a chunk at a temperature in f32, `[tokens, vocab]`.
fn logits<B: LayerBackend>(hidden: Tensor<B, 2>, head: &Tensor<B, 2>, temperature: f32) -> Tensor<B, 2> {
    let logits = in_dtype(product(hidden, head.clone()), DType::F32);
    if temperature == 1.0 {
        logits
    } else {
        logits / temperature
    }
}

fn in_dtype<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(dtype)
    }
}

fn check_shapes<B: Backend>(hidden: &Tensor<B, 2>, head: &Tensor<B, 2>, targets: &Tensor<B, 1, Int>, temperature: f32) {
    let ([tokens, width], [head_width, _]) = (hidden.dims(), head.dims());
    assert_eq!(
        width, head_width,
        "hidden is [{tokens}, {width}], the head's first side {head_width}"
    );
    assert_eq!(
        tokens,
        targets.dims()[0],
        "{tokens} hidden states, {} targets",
        targets.dims()[0]
    );
    assert!(
        temperature > 0.0 && temperature.is_finite(),
        "a temperature is a positive number, got {temperature}"
    );
}

/// Chunks of `hidden` and `targets` in order.
fn chunks<B: Backend>(
    hidden: &Tensor<B, 2>,
    targets: &Tensor<B, 1, Int>,
    size: usize,
) -> impl Iterator<Item = (std::ops::Range<usize>, Tensor<B, 2>, Tensor<B, 2, Int>)> {
    let tokens = hidden.dims()[0];
    (0..tokens).step_by(size).map(move |start| {
        let end = (start + size).min(tokens);
        let whole = start == 0 && end == tokens;
        let (hidden, targets) = match whole {
            true => (hidden.clone(), targets.clone()),
            false => (
                hidden.clone().narrow(0, start, end - start),
                targets.clone().narrow(0, start, end - start),
            ),
        };
        (start..end, hidden, targets.unsqueeze_dim(1))
    })
}

fn forward<B: LayerBackend>(
    hidden: &Tensor<B, 2>,
    head: &Tensor<B, 2>,
    targets: &Tensor<B, 1, Int>,
    temperature: f32,
    chunk_logits: usize,
) -> Tensor<B, 1> {
    let size = chunk_tokens(head.dims()[1], chunk_logits);
    let log_probs = chunks(hidden, targets, size)
        .map(|(_, hidden, targets)| {
            let (shifted, log_sum) = B::log_softmax_parts(logits(hidden, head, temperature));
            (shifted.gather(1, targets) - log_sum).squeeze_dim(1)
        })
        .collect::<Vec<_>>();
    concatenate(log_probs, &hidden.device())
}

fn concatenate<B: Backend>(mut parts: Vec<Tensor<B, 1>>, device: &B::Device) -> Tensor<B, 1> {
    match parts.len() {
        // Neither zeros nor data: CUDA refuses to launch over no element.
        0 => Tensor::empty([0], device),
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

/// Log-probs and entropies `[tokens]` of `targets` on a backend without gradients.
///
/// `hidden` `[tokens, d]` are the states that predict the targets, `head` is `[d, vocab]`, logits are divided by
/// `temperature`. Entropies are in nats.
///
/// # Panics
///
/// If the shapes do not fit or the temperature is not a positive number.
pub fn token_log_probs_and_entropies<B: LayerBackend>(
    hidden: Tensor<B, 2>,
    head: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    temperature: f32,
) -> (Tensor<B, 1>, Tensor<B, 1>) {
    check_shapes(&hidden, &head, &targets, temperature);
    let size = chunk_tokens(head.dims()[1], logits_at_once::<B>(&hidden.device()));
    let (log_probs, entropies): (Vec<_>, Vec<_>) = chunks(&hidden, &targets, size)
        .map(|(_, hidden, targets)| {
            let (shifted, log_sum) = B::log_softmax_parts(logits(hidden, &head, temperature));
            let log_probs = shifted.clone().gather(1, targets) - log_sum.clone();
            let all = shifted - log_sum;
            // A token of probability 0 adds 0: its infinite log-prob must not meet the 0.
            let entropies = -(all.clone().exp() * all.clamp_min(f32::MIN)).sum_dim(1);
            (log_probs.squeeze_dim::<1>(1), entropies.squeeze_dim::<1>(1))
        })
        .unzip();
    let device = hidden.device();
    (concatenate(log_probs, &device), concatenate(entropies, &device))
}

/// Log-probs `[tokens]` of `targets`, with gradients to `hidden` and `head`.
///
/// `hidden` `[tokens, d]` are the states that predict the targets, `head` is `[d, vocab]`, logits are divided by
/// `temperature`.
///
/// # Panics
///
/// If the shapes do not fit or the temperature is not a positive number.
pub fn token_log_probs<B: DifferentiableLogProbs>(
    hidden: Tensor<B, 2>,
    head: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    temperature: f32,
) -> Tensor<B, 1> {
    check_shapes(&hidden, &head, &targets, temperature);
    let chunk_logits = logits_at_once::<B>(&hidden.device());
    Tensor::from_primitive(TensorPrimitive::Float(B::token_log_probs(
        hidden.into_primitive().tensor(),
        head.into_primitive().tensor(),
        targets.into_primitive(),
        temperature,
        chunk_logits,
    )))
}

/// Backends that have [`token_log_probs`] as one operation: `Autodiff` of any [`LayerBackend`].
pub trait DifferentiableLogProbs: AutodiffBackend<InnerBackend: LayerBackend> {
    /// See [`token_log_probs`]; at most `chunk_logits` logits live at once (one token's at least).
    fn token_log_probs(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        targets: IntTensor<Self>,
        temperature: f32,
        chunk_logits: usize,
    ) -> FloatTensor<Self>;
}

fn float<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

#[derive(Debug)]
struct TokenLogProbs;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    hidden: Tensor<B, 2>,
    head: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    temperature: f32,
    chunk_logits: usize,
}

impl<B: LayerBackend> Backward<B, 2> for TokenLogProbs {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let State {
            hidden,
            head,
            targets,
            temperature,
            chunk_logits,
        } = ops.state;
        let gradient = float::<B, 1>(grads.consume::<B>(&ops.node)) / temperature;
        let [hidden_node, head_node] = ops.parents;
        let size = chunk_tokens(head.dims()[1], chunk_logits);
        let mut hidden_parts = Vec::new();
        let mut head_sum: Option<Tensor<B, 2>> = None;
        for (range, hidden, targets) in chunks(&hidden, &targets, size) {
            // d log p / d logits = (one at the target − softmax) / temperature
            let gradient = gradient
                .clone()
                .narrow(0, range.start, range.len())
                .unsqueeze_dim::<2>(1);
            let (shifted, log_sum) = B::log_softmax_parts(logits(hidden.clone(), &head, temperature));
            let softmax = (shifted - log_sum).exp();
            let logits = (softmax * gradient.clone().neg()).scatter(1, targets, gradient, IndexingUpdateOp::Add);
            let logits = in_dtype(logits, hidden.dtype());
            if hidden_node.is_some() {
                hidden_parts.push(product(logits.clone(), head.clone().transpose()));
            }
            if head_node.is_some() {
                let part = product_weight_backward(hidden, logits);
                head_sum = Some(match head_sum {
                    Some(sum) => sum + part,
                    None => part,
                });
            }
        }
        if let Some(node) = hidden_node {
            let gradient = match hidden_parts.len() {
                0 => hidden.zeros_like(),
                1 => hidden_parts.remove(0),
                _ => Tensor::cat(hidden_parts, 0),
            };
            grads.register::<B>(node.id, gradient.into_primitive().tensor());
        }
        if let Some(node) = head_node {
            let gradient = head_sum.unwrap_or_else(|| head.zeros_like());
            grads.register::<B>(node.id, gradient.into_primitive().tensor());
        }
    }
}

impl<B: LayerBackend, C: CheckpointStrategy> DifferentiableLogProbs for Autodiff<B, C> {
    fn token_log_probs(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        targets: IntTensor<Self>,
        temperature: f32,
        chunk_logits: usize,
    ) -> FloatTensor<Self> {
        let state = State::<B> {
            hidden: float(hidden.primitive.clone()),
            head: float(head.primitive.clone()),
            targets: Tensor::from_primitive(targets),
            temperature,
            chunk_logits,
        };
        let output = forward(&state.hidden, &state.head, &state.targets, temperature, chunk_logits)
            .into_primitive()
            .tensor();
        match TokenLogProbs
            .prepare::<C>([hidden.node.clone(), head.node.clone()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(state, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::Flex,
        tensor::{Distribution, activation::log_softmax},
    };

    use super::*;

    type B = Autodiff<Flex>;

    fn random<const D: usize>(shape: [usize; D], scale: f64) -> Tensor<Flex, D> {
        Tensor::random(shape, Distribution::Normal(0.0, scale), &Default::default())
    }

    fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
        tensor.into_data().to_vec().unwrap()
    }

    fn assert_close(got: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!(
                (got - expected).abs() <= tolerance * (1.0 + expected.abs()),
                "{got} {expected}"
            );
        }
    }

    /// The plain form: a log-softmax of everything.
    fn plain<B: Backend>(
        hidden: Tensor<B, 2>,
        head: Tensor<B, 2>,
        targets: Tensor<B, 1, Int>,
        temperature: f32,
    ) -> Tensor<B, 1> {
        log_softmax(hidden.matmul(head) / temperature, 1)
            .gather(1, targets.unsqueeze_dim(1))
            .squeeze_dim(1)
    }

    #[test]
    fn two_equal_logits_share_the_probability() {
        let device = Default::default();
        let hidden = Tensor::<Flex, 2>::from_floats([[1.0]], &device);
        let head = Tensor::from_floats([[3.0, 3.0]], &device);
        let targets = Tensor::from_ints([1], &device);
        let (log_probs, entropies) = token_log_probs_and_entropies(hidden, head, targets, 0.5);
        assert_close(&values(log_probs), &[-(2f32.ln())], 1e-6);
        assert_close(&values(entropies), &[2f32.ln()], 1e-6);
    }

    #[test]
    fn value_and_gradient_equal_the_plain_form_for_every_chunking() {
        let device = Default::default();
        let (tokens, width, vocab) = (7, 5, 11);
        let (hidden, head) = (random([tokens, width], 1.0), random([width, vocab], 1.0));
        let weights = Tensor::<B, 1>::from_inner(random([tokens], 1.0));
        let targets = Tensor::<B, 1, Int>::from_ints([0, 10, 3, 3, 7, 1, 2], &device);
        for temperature in [1.0, 0.7] {
            let run = |chunk_logits: Option<usize>| {
                let hidden = Tensor::<B, 2>::from_inner(hidden.clone()).require_grad();
                let head = Tensor::<B, 2>::from_inner(head.clone()).require_grad();
                let log_probs = match chunk_logits {
                    None => plain(hidden.clone(), head.clone(), targets.clone(), temperature),
                    Some(size) => float(B::token_log_probs(
                        hidden.clone().into_primitive().tensor(),
                        head.clone().into_primitive().tensor(),
                        targets.clone().into_primitive(),
                        temperature,
                        size,
                    )),
                };
                let grads = (log_probs.clone() * weights.clone()).sum().backward();
                let gradients = (hidden.grad(&grads).unwrap(), head.grad(&grads).unwrap());
                (values(log_probs), values(gradients.0), values(gradients.1))
            };
            let expected = run(None);
            for size in [0, 11, 30, 33, 1 << 20] {
                let got = run(Some(size));
                assert_close(&got.0, &expected.0, 1e-6);
                assert_close(&got.1, &expected.1, 1e-5);
                assert_close(&got.2, &expected.2, 1e-5);
            }
        }
    }

    #[test]
    fn half_precision_states_have_f32_log_probs_and_their_own_gradients() {
        let device = Default::default();
        let run = |dtype: DType| {
            let hidden = Tensor::<B, 2>::from_floats([[0.5, -1.0], [0.25, 2.0]], &device)
                .cast(dtype)
                .require_grad();
            let head = Tensor::<B, 2>::from_floats([[1.0, 0.5, -0.5], [0.25, -1.0, 2.0]], &device)
                .cast(dtype)
                .require_grad();
            let targets = Tensor::<B, 1, Int>::from_ints([2, 0], &device);
            let log_probs = token_log_probs(hidden.clone(), head.clone(), targets, 1.0);
            assert_eq!(log_probs.dtype(), DType::F32);
            let grads = log_probs.clone().sum().backward();
            let (hidden, head) = (hidden.grad(&grads).unwrap(), head.grad(&grads).unwrap());
            assert_eq!((hidden.dtype(), head.dtype()), (dtype, dtype));
            let wide = |gradient: Tensor<Flex, 2>| values(gradient.cast(DType::F32));
            (values(log_probs), [wide(hidden), wide(head)].concat())
        };
        let (half, single) = (run(DType::BF16), run(DType::F32));
        assert_close(&half.0, &single.0, 2e-2);
        assert_close(&half.1, &single.1, 2e-2);
    }

    #[test]
    fn a_frozen_head_or_trunk_gets_no_gradient() {
        let device = Default::default();
        let targets = Tensor::<B, 1, Int>::from_ints([0, 1], &device);
        let hidden = Tensor::<B, 2>::from_inner(random([2, 3], 1.0));
        let head = Tensor::<B, 2>::from_inner(random([3, 4], 1.0));
        let trained = hidden.clone().require_grad();
        let grads = token_log_probs(trained.clone(), head.clone(), targets.clone(), 1.0)
            .sum()
            .backward();
        assert!(trained.grad(&grads).is_some() && head.grad(&grads).is_none());
        let trained = head.require_grad();
        let grads = token_log_probs(hidden.clone(), trained.clone(), targets, 1.0)
            .sum()
            .backward();
        assert!(trained.grad(&grads).is_some() && hidden.grad(&grads).is_none());
    }

    #[test]
    fn extreme_logits_stay_finite() {
        let device = Default::default();
        let hidden = Tensor::<Flex, 2>::from_floats([[1.0], [1.0]], &device);
        let head = Tensor::from_floats([[1e5, -1e5, f32::NEG_INFINITY]], &device);
        let targets = Tensor::from_ints([0, 1], &device);
        let (log_probs, entropies) = token_log_probs_and_entropies(hidden, head, targets, 1.0);
        assert_eq!(values(log_probs), [0.0, -2e5]);
        assert_eq!(values(entropies), [0.0, 0.0]);
    }

    #[test]
    fn no_tokens_give_no_log_probs() {
        let device = Default::default();
        let hidden = Tensor::<Flex, 2>::zeros([0, 3], &device);
        let (log_probs, entropies) =
            token_log_probs_and_entropies(hidden, random([3, 4], 1.0), Tensor::zeros([0], &device), 1.0);
        assert_eq!((log_probs.dims(), entropies.dims()), ([0], [0]));
    }

    #[test]
    #[should_panic(expected = "a temperature is a positive number, got 0")]
    fn temperature_zero_is_refused() {
        let device = Default::default();
        token_log_probs_and_entropies(
            random([1, 3], 1.0),
            random([3, 4], 1.0),
            Tensor::zeros([1], &device),
            0.0,
        );
    }
}
