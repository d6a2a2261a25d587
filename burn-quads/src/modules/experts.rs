//! The experts of a mixture-of-experts layer, as grouped products over tokens sorted by expert.
use burn::{
    config::Config,
    module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param},
    tensor::{Int, Tensor, TensorPrimitive, backend::Backend},
};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, PackError, Precision, WeightFormat, pack};
use kernels_cubecl::{BLOCK, ResidualMask};

use super::{
    activation_site::{ActivationSite, is_packed},
    residual_probe::ResidualProbe,
    router::Routing,
    straight_through::Backward,
};
use crate::backend::QuadsBackend;

/// Configuration of [`QuadsExperts`].
#[derive(Config, Debug)]
pub struct QuadsExpertsConfig {
    /// Number of experts.
    pub experts: usize,
    /// Features of a token. A multiple of 16 in the NVFP4 precisions.
    pub d_model: usize,
    /// Hidden features of an expert. A multiple of 16 in the NVFP4 precisions.
    pub d_ff: usize,
    /// The precision of the products.
    #[config(default = "Precision::W4A16")]
    pub precision: Precision,
    /// How the weights are drawn.
    #[config(default = "Initializer::KaimingUniform{gain: 1.0 / 3.0f64.sqrt(), fan_out_only: false}")]
    pub initializer: Initializer,
}

impl QuadsExpertsConfig {
    /// Makes the experts.
    ///
    /// # Panics
    /// When `precision` packs weights in NVFP4 and `d_model` or `d_ff` is not a multiple of 16.
    pub fn init<B: Backend>(&self, device: &B::Device) -> QuadsExperts<B> {
        let Self {
            experts, d_model, d_ff, ..
        } = *self;
        let init = |d_in: usize, d_out: usize| {
            let shape = [experts, d_in, d_out];
            self.initializer.init_with(shape, Some(d_in), Some(d_out), device)
        };
        QuadsExperts {
            gate_up_proj: init(d_model, 2 * d_ff),
            down_proj: init(d_ff, d_model),
            precision: Precision::High,
            backward: Backward::default(),
            input: ActivationSite::default(),
            hidden: ActivationSite::default(),
        }
        .with_precision(self.precision.clone())
    }
}

/// SwiGLU experts: `down(silu(gate(x)) · up(x))`, each token's results added with its routing weights.
///
/// Gate and up lie side by side in one weight, so they share an outer scale for each expert, the input is quantized once
/// and one product serves both. Precision works as in [`QuadsLinear`](super::linear::QuadsLinear). A token's result does
/// not depend on the other tokens, nor on how many there are; an expert without tokens costs nothing.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct QuadsExperts<B: Backend> {
    /// `[experts, d_model, 2 · d_ff]`, gate before up.
    pub gate_up_proj: Param<Tensor<B, 3>>,
    /// `[experts, d_ff, d_model]`.
    pub down_proj: Param<Tensor<B, 3>>,
    /// The precision of the products while the weights are dense.
    #[module(skip)]
    precision: Precision,
    /// What the gradient goes through while the weights are dense.
    #[module(skip)]
    backward: Backward,
    /// Compensation and calibration of the input of gate and up.
    #[module(skip)]
    pub(crate) input: ActivationSite,
    /// Compensation and calibration of the input of down.
    #[module(skip)]
    pub(crate) hidden: ActivationSite,
}

impl<B: Backend> QuadsExperts<B> {
    /// The precision of the products.
    pub fn precision(&self) -> &Precision {
        &self.precision
    }

    /// `[experts, d_ff, d_model]`.
    pub fn dims(&self) -> [usize; 3] {
        self.down_proj.lazy_shape().dims()
    }

    /// The experts in another precision.
    ///
    /// # Panics
    /// When `precision` packs weights in NVFP4 and `d_model` or `d_ff` is not a multiple of 16.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        let [_, d_ff, d_model] = self.dims();
        assert!(
            precision.weight_format() != Some(WeightFormat::Nvfp4)
                || (d_model.is_multiple_of(BLOCK) && d_ff.is_multiple_of(BLOCK)),
            "experts of d_model = {d_model}, d_ff = {d_ff} cannot run in {precision}: NVFP4 needs both to be multiples of \
             {BLOCK}",
        );
        self.precision = precision;
        self
    }

    /// The experts with another straight-through gradient. That of SwiGLU is taken at the values of the forward pass either
    /// way.
    pub fn with_backward(mut self, backward: Backward) -> Self {
        self.backward = backward;
        self
    }

    /// The calibrated residual masks of the inputs of gate and up, `[d_model]`, and of down, `[d_ff]`.
    pub fn residual_masks(&self) -> [Option<&ResidualMask>; 2] {
        [self.input.mask(), self.hidden.mask()]
    }

    /// The experts with calibrated residual masks, one for the input of gate and up (`[d_model]`) and one for that of down
    /// (`[d_ff]`), which `w4a4_rac` uses when its selection is calibrated; or without. Masks come from a [`ResidualProbe`].
    ///
    /// # Panics
    /// When a mask does not have the channels of its input.
    pub fn with_residual_masks(mut self, input: Option<ResidualMask>, hidden: Option<ResidualMask>) -> Self {
        let [_, d_ff, d_model] = self.dims();
        self.input.set_checked_mask("gate_up_proj", d_model, input);
        self.hidden.set_checked_mask("down_proj", d_ff, hidden);
        self
    }

    /// The experts that also measure the inputs of gate and up, and of down, or no longer do.
    ///
    /// # Panics
    /// When a probe is not for the channels of its input.
    pub fn with_probes(mut self, input: Option<ResidualProbe>, hidden: Option<ResidualProbe>) -> Self {
        let [_, d_ff, d_model] = self.dims();
        self.input.set_checked_probe("gate_up_proj", d_model, input);
        self.hidden.set_checked_probe("down_proj", d_ff, hidden);
        self
    }
}

/// Why experts could not be packed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{tensor}: {source}")]
pub struct ExpertsPackError {
    /// `gate_up_proj` or `down_proj`.
    pub tensor: &'static str,
    /// What is wrong with it.
    pub source: PackError,
}

impl<B: Nvfp4Backend> QuadsExperts<Nvfp4<B>> {
    /// The experts for inference: both weights packed in `precision`, with an outer scale for each expert. The masters are
    /// gone.
    ///
    /// # Errors
    /// [`ExpertsPackError`] names the weight: a non-finite value, a width that does not fit, [`Precision::High`], or a
    /// precision that needs a calibrated mask where none was set.
    pub fn pack(mut self, precision: &Precision) -> Result<Self, ExpertsPackError> {
        let named = |tensor| move |source| ExpertsPackError { tensor, source };
        let gate_up_proj = pack(self.gate_up_proj.val(), precision, None, self.input.mask());
        let gate_up_proj = gate_up_proj.map_err(named("gate_up_proj"))?;
        let down_proj = pack(self.down_proj.val(), precision, None, self.hidden.mask()).map_err(named("down_proj"))?;
        self.gate_up_proj = Param::initialized(self.gate_up_proj.id, gate_up_proj);
        self.down_proj = Param::initialized(self.down_proj.id, down_proj);
        self.precision = precision.clone();
        Ok(self)
    }
}

impl<B: QuadsBackend> QuadsExperts<B> {
    /// `x` `[tokens, d_model]` through the experts that `routing` chose: `[tokens, d_model]`.
    pub fn forward(&self, x: Tensor<B, 2>, routing: &Routing<B>) -> Tensor<B, 2> {
        let [experts, _, d_model] = self.dims();
        let [tokens, top_k] = routing.expert_ids.dims();
        // A row is a token and one of its experts.
        let order = B::order_by_expert(routing.expert_ids.clone().reshape([tokens * top_k]), experts);

        self.input.observe(&x);
        let packed = is_packed(&self.down_proj.val());
        assert_eq!(
            is_packed(&self.gate_up_proj.val()),
            packed,
            "gate_up_proj and down_proj must both be packed, or neither: pack them with QuadsExperts::pack"
        );
        let quantize = |site: &ActivationSite, x| match packed {
            true => x,
            false => site.quantize(x, &self.precision),
        };
        let backward = match packed {
            true => Backward::Quantized,
            false => self.backward.within(&self.precision),
        };
        let masters = [&self.gate_up_proj, &self.down_proj];
        let [gate_up_proj, down_proj] = match packed {
            true => masters.map(|weight| weight.val()),
            false => self.quantized_weights().map(|weight| backward.values(weight)),
        };
        let product = |x, weight| grouped_linear(x, weight, order.counts.clone());
        // Quantized before the rows are repeated: once a token.
        let rows = B::permute_rows(backward.values(quantize(&self.input, x.clone())), &order);
        let gate_up = backward.of(product(rows, gate_up_proj), || {
            product(B::permute_rows(x, &order), masters[0].val())
        });
        let hidden = B::swiglu(gate_up);
        self.hidden.observe_sorted(&hidden, &order);
        let rows = backward.values(quantize(&self.hidden, hidden.clone()));
        let rows = backward.of(product(rows, down_proj), || product(hidden, masters[1].val()));

        // Back to token order, then summed in the router's order: the same sum whatever the batch.
        let by_token = B::unpermute_rows(rows, &order).reshape([tokens, top_k, d_model]);
        let weights = routing.weights.clone().reshape([tokens, top_k, 1]);
        (by_token * weights).sum_dim(1).reshape([tokens, d_model])
    }

    /// The values of dense `gate_up_proj` and `down_proj` that the forward pass multiplies with.
    pub fn quantized_weights(&self) -> [Tensor<B, 3>; 2] {
        [&self.gate_up_proj, &self.down_proj].map(|weight| {
            let weight = weight.val();
            let Some(format) = self.precision.weight_format() else {
                return weight;
            };
            let weight = B::fake_quantize_weight(weight.into_primitive().tensor(), format, None);
            Tensor::from_primitive(TensorPrimitive::Float(weight))
        })
    }
}

fn grouped_linear<B: QuadsBackend>(x: Tensor<B, 2>, w: Tensor<B, 3>, counts: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    let (x, w) = (x.into_primitive().tensor(), w.into_primitive().tensor());
    let y = B::grouped_linear(x, w, counts.into_primitive());
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

impl<B: Backend> ModuleDisplay for QuadsExperts<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [experts, d_ff, d_model] = self.dims();
        content
            .add("experts", &experts)
            .add("d_model", &d_model)
            .add("d_ff", &d_ff)
            .add("precision", &self.precision.to_string())
            .optional()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::linear::{QuadsLinear, QuadsLinearConfig};
    use burn::{
        backend::{Autodiff, Flex},
        tensor::{Distribution, TensorData, Tolerance, activation::silu},
    };
    use burn_nvfp4::{Rac, packed_weight};
    use kernels_cubecl::{Granularity, Selection};

    type B = Nvfp4<Flex>;
    type A = Autodiff<B>;

    fn experts<B: Backend>(precision: Precision) -> QuadsExperts<B> {
        QuadsExpertsConfig::new(3, 32, 16)
            .with_precision(precision)
            .init(&Default::default())
    }

    fn routing<B: Backend, const T: usize>(ids: [[i64; 2]; T], weights: [[f32; 2]; T]) -> Routing<B> {
        let device = Default::default();
        Routing {
            expert_ids: Tensor::from_data(ids, &device),
            weights: Tensor::from_data(weights, &device),
            logits: Tensor::zeros([T, 3], &device),
        }
    }

    fn random<B: Backend>(tokens: usize) -> Tensor<B, 2> {
        Tensor::random([tokens, 32], Distribution::Normal(0.0, 1.0), &Default::default())
    }

    /// One expert's part as a layer of its own.
    fn linear(weight: &Tensor<B, 3>, expert: usize, columns: std::ops::Range<usize>) -> QuadsLinear<B> {
        let weight = weight.clone().narrow(0, expert, 1).squeeze_dim::<2>(0);
        let weight = weight.narrow(1, columns.start, columns.len());
        let [d_in, d_out] = weight.dims();
        let mut linear = QuadsLinearConfig::new(d_in, d_out)
            .with_bias(false)
            .with_precision(Precision::High)
            .init(&Default::default());
        linear.weight = Param::from_tensor(weight);
        linear
    }

    #[test]
    fn equals_the_weighted_sum_of_single_experts() {
        let experts = experts::<B>(Precision::High);
        let x = random::<B>(2);
        // Expert 1 has no token.
        let routing = routing([[2, 0], [0, 2]], [[0.75, 0.25], [0.5, 0.5]]);
        let output = experts.forward(x.clone(), &routing);

        let (gate_up, down) = (experts.gate_up_proj.val(), experts.down_proj.val());
        let expert = |e: usize, x: Tensor<B, 2>| {
            let gate = linear(&gate_up, e, 0..16).forward(x.clone());
            let up = linear(&gate_up, e, 16..32).forward(x);
            linear(&down, e, 0..32).forward(silu(gate) * up)
        };
        let token = |t: usize| x.clone().narrow(0, t, 1);
        let expected = Tensor::cat(
            vec![
                expert(2, token(0)) * 0.75 + expert(0, token(0)) * 0.25,
                expert(0, token(1)) * 0.5 + expert(2, token(1)) * 0.5,
            ],
            0,
        );
        output
            .into_data()
            .assert_approx_eq::<f32>(&expected.into_data(), Tolerance::absolute(1e-6));
    }

    #[test]
    fn a_tokens_bits_do_not_depend_on_the_others_once_packed() {
        for precision in [
            Precision::W4A16,
            Precision::W4A4,
            Precision::W4A4Rac(Default::default()),
        ] {
            let experts = experts::<B>(precision.clone()).pack(&precision).unwrap();
            let x = random::<B>(5);
            let ids = [[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]];
            let weights = [[0.5, 0.5], [0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.8, 0.2]];
            let together = experts.forward(x.clone(), &routing(ids, weights));
            for t in 0..5 {
                let alone = experts.forward(x.clone().narrow(0, t, 1), &routing([ids[t]], [weights[t]]));
                let together = together.clone().narrow(0, t, 1);
                assert_eq!(alone.into_data(), together.into_data(), "token {t}, {precision}");
            }
        }
    }

    /// All precisions that quantize, with masks for those that need them.
    fn quantized() -> Vec<Precision> {
        let rac = |selection| {
            Precision::W4A4Rac(Rac {
                selection,
                ..Rac::default()
            })
        };
        vec![
            Precision::W4A16,
            Precision::W4A4,
            rac(Selection::All),
            rac(Selection::Calibrated),
            rac(Selection::PerToken),
            Precision::Fp8,
        ]
    }

    fn masked<B: Backend>(precision: Precision) -> QuadsExperts<B> {
        let mask = |k: usize| ResidualMask::from_channels(&(0..k).map(|c| c % 3 == 0).collect::<Vec<_>>());
        experts(precision).with_residual_masks(Some(mask(32)), Some(mask(16)))
    }

    #[test]
    fn packed_experts_equal_the_dense_ones_in_every_precision() {
        let (ids, weights) = ([[2, 0], [0, 2], [2, 0]], [[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]]);
        for precision in quantized() {
            let experts = masked::<B>(precision.clone());
            let x = random::<B>(3);
            let dense = experts.forward(x.clone(), &routing(ids, weights));
            let expected = experts.quantized_weights().map(Tensor::into_data);
            let packed = experts.pack(&precision).unwrap();
            let decoded = [&packed.gate_up_proj, &packed.down_proj].map(|w| w.val().dequantize().into_data());
            assert_eq!(decoded, expected, "{precision}");
            assert!(packed_weight(&packed.gate_up_proj.val()).is_some());
            let difference = (dense - packed.forward(x, &routing(ids, weights)))
                .abs()
                .max()
                .into_scalar();
            assert!(difference < 1e-5, "{precision}: {difference}");
        }
    }

    #[test]
    fn gradients_go_through_the_stored_weights_and_the_quantized_inputs() {
        // One expert, so that the products can be written down: y = ĥ · q(D), h = swiglu(x̂ · q(G)).
        let ids = [[0, 1], [0, 1], [0, 1]];
        let all_to_the_first = [[1.0, 0.0]; 3];
        for precision in quantized() {
            let experts = masked::<A>(precision.clone());
            let (x, g) = (random::<A>(3).require_grad(), random::<B>(3));
            let output = experts.forward(x.clone(), &routing(ids, all_to_the_first));
            let grads = (output * Tensor::from_inner(g.clone())).sum().backward();

            // The same formula on plain tensors, straight-through by construction: the quantized values are leaves.
            let [gate_up, down] = experts.quantized_weights().map(Tensor::inner);
            let first = |w: Tensor<B, 3>| w.narrow(0, 0, 1).squeeze_dim::<2>(0);
            let leaf = |t: Tensor<B, 2>| Tensor::<A, 2>::from_inner(t).require_grad();
            let (gate_up, down) = (leaf(first(gate_up)), leaf(first(down)));
            let x_hat = leaf(experts.input.quantize(x.clone(), &precision).inner());
            let product = x_hat.clone().matmul(gate_up.clone());
            let hidden = silu(product.clone().narrow(1, 0, 16)) * product.narrow(1, 16, 16);
            let h_hat = leaf(experts.hidden.quantize(hidden.clone(), &precision).inner());
            let outer = (h_hat.clone().matmul(down.clone()) * Tensor::from_inner(g.clone()))
                .sum()
                .backward();
            let d_hidden = h_hat.grad(&outer).unwrap();
            let inner = (hidden * Tensor::from_inner(d_hidden)).sum().backward();

            let close = |actual: Tensor<B, 2>, expected: Tensor<B, 2>, what: &str| {
                let difference = (actual - expected).abs().max().into_scalar();
                assert!(difference < 1e-5, "{what} in {precision} differs by {difference}");
            };
            close(x.grad(&grads).unwrap(), x_hat.grad(&inner).unwrap(), "dx");
            let d_gate_up = first(experts.gate_up_proj.grad(&grads).unwrap());
            close(d_gate_up, gate_up.grad(&inner).unwrap(), "d gate_up_proj");
            let d_down = first(experts.down_proj.grad(&grads).unwrap());
            close(d_down, down.grad(&outer).unwrap(), "d down_proj");
        }
    }

    #[test]
    fn an_unquantized_backward_goes_through_the_masters_at_the_values_of_the_forward() {
        let ids = [[0, 1], [0, 1], [0, 1]];
        let all_to_the_first = [[1.0, 0.0]; 3];
        for precision in quantized() {
            let experts = masked::<A>(precision.clone());
            let (x, g) = (random::<A>(3).require_grad(), random::<B>(3));
            let routing = routing(ids, all_to_the_first);
            let value = experts.forward(x.clone(), &routing).into_data();
            let experts = experts.with_backward(Backward::Unquantized);
            let output = experts.forward(x.clone(), &routing);
            assert_eq!(output.to_data(), value, "{precision}: the forward pass is the same");
            let grads = (output * Tensor::from_inner(g.clone())).sum().backward();

            // dh = g · Dᵀ; dp = dh · swiglu'(p) at p = x̂ · q(G), the forward's; dG = xᵀ · dp; dx = dp · Gᵀ.
            let first = |w: Tensor<B, 3>| w.narrow(0, 0, 1).squeeze_dim::<2>(0);
            let [gate_up_hat, _] = experts.quantized_weights().map(Tensor::inner);
            let [gate_up, down] = [&experts.gate_up_proj, &experts.down_proj].map(|w| first(w.val().inner()));
            let x_hat = experts.input.quantize(x.clone().inner(), &precision);
            let product = Tensor::<A, 2>::from_inner(x_hat.matmul(first(gate_up_hat))).require_grad();
            let hidden = silu(product.clone().narrow(1, 0, 16)) * product.clone().narrow(1, 16, 16);
            let d_hidden = g.clone().matmul(down.transpose());
            let inner = (hidden.clone() * Tensor::from_inner(d_hidden)).sum().backward();
            let d_product = product.grad(&inner).unwrap();

            let close = |actual: Tensor<B, 2>, expected: Tensor<B, 2>, what: &str| {
                let difference = (actual - expected).abs().max().into_scalar();
                assert!(difference < 1e-5, "{what} in {precision} differs by {difference}");
            };
            let d_down = first(experts.down_proj.grad(&grads).unwrap());
            close(d_down, hidden.inner().transpose().matmul(g), "d down_proj");
            let d_gate_up = first(experts.gate_up_proj.grad(&grads).unwrap());
            let x_rows = x.clone().inner().transpose();
            close(d_gate_up, x_rows.matmul(d_product.clone()), "d gate_up_proj");
            close(x.grad(&grads).unwrap(), d_product.matmul(gate_up.transpose()), "dx");
        }
    }

    #[test]
    fn a_weight_that_cannot_be_packed_is_named() {
        let mut experts = experts::<B>(Precision::W4A16);
        experts.down_proj = experts.down_proj.map(|w| w.slice_fill([1..2, 0..1, 0..1], f32::NAN));
        let error = experts.clone().pack(&Precision::W4A4).unwrap_err();
        assert_eq!(error.tensor, "down_proj");
        assert!(error.to_string().starts_with("down_proj: "), "{error}");
        assert_eq!(
            experts.pack(&Precision::High).unwrap_err().source,
            PackError::NothingToPack
        );
    }

    #[test]
    #[should_panic(expected = "the residual mask of down_proj has 32 channels, expected 16")]
    fn a_mask_of_another_width_is_refused() {
        let mask = ResidualMask::from_channels(&[true; 32]);
        experts::<B>(Precision::W4A16).with_residual_masks(Some(mask.clone()), Some(mask));
    }

    #[test]
    fn probes_measure_the_inputs_in_token_order() {
        let experts = experts::<B>(Precision::High);
        let (x, routing) = (
            random::<B>(4),
            routing([[2, 0], [0, 1], [1, 2], [0, 2]], [[0.5, 0.5]; 4]),
        );
        let plain = experts.forward(x.clone(), &routing).into_data();
        let probes = [32, 16].map(ResidualProbe::new);
        let [input, hidden] = probes.clone().map(Some);
        let measured = experts.with_probes(input, hidden);
        assert_eq!(measured.forward(x.clone(), &routing).into_data(), plain);
        let expected = ResidualProbe::new(32);
        expected.add(x);
        for granularity in [Granularity::Channel, Granularity::Block16] {
            assert_eq!(probes[0].energies(granularity), expected.energies(granularity));
        }
        // Four tokens, two experts each.
        assert!(probes[1].energies(Granularity::Channel).iter().all(|sum| *sum > 0.0));
        assert!(probes[1].mask(Granularity::Channel, 0.5).is_ok());
    }

    #[test]
    fn gradients_equal_finite_differences_of_the_surrogate() {
        // With the stored weights q held fixed, w4a16 computes f(x, q) and the straight-through gradient of a weight is
        // df/dq. The surrogate is the same module in `high` with q as its weights.
        let device = Default::default();
        let trainer = experts::<A>(Precision::W4A16);
        let x = random::<A>(4).require_grad();
        let ids = [[0, 2], [2, 0], [0, 2], [2, 0]];
        let weights = [[0.5, 0.5], [0.9, 0.1], [0.7, 0.3], [0.6, 0.4]];
        let coefficients: Tensor<B, 2> = random(4);
        let output = trainer.forward(x.clone(), &routing(ids, weights));
        let grads = (output * Tensor::from_inner(coefficients.clone())).sum().backward();

        let [gate_up, down] = trainer.quantized_weights().map(|w| w.inner().into_data());
        let x_data = x.clone().inner().into_data();
        let surrogate = |gate_up: &TensorData, down: &TensorData, x: &TensorData| -> f32 {
            let mut experts = experts::<B>(Precision::High);
            experts.gate_up_proj = Param::from_data(gate_up.clone(), &device);
            experts.down_proj = Param::from_data(down.clone(), &device);
            let output = experts.forward(Tensor::from_data(x.clone(), &device), &routing(ids, weights));
            (output * coefficients.clone()).sum().into_scalar()
        };
        let bump = |data: &TensorData, at: usize, by: f32| {
            let mut data = data.clone();
            data.as_mut_slice::<f32>().unwrap()[at] += by;
            data
        };
        let h = 1e-2;
        let check = |what: &str, at: usize, grad: &TensorData, difference: f32| {
            let grad = grad.as_slice::<f32>().unwrap()[at];
            let expected = difference / (2.0 * h);
            assert!(
                (grad - expected).abs() < 2e-3 * (1.0 + expected.abs()),
                "{what}[{at}]: {grad}, {expected}"
            );
        };
        let d_gate_up = trainer.gate_up_proj.grad(&grads).unwrap().into_data();
        let d_down = trainer.down_proj.grad(&grads).unwrap().into_data();
        let dx = x.grad(&grads).unwrap().into_data();
        for at in (0..x_data.num_elements()).step_by(7) {
            let f = |by| surrogate(&gate_up, &down, &bump(&x_data, at, by));
            check("x", at, &dx, f(h) - f(-h));
        }
        for at in (0..gate_up.num_elements()).step_by(97) {
            let f = |by| surrogate(&bump(&gate_up, at, by), &down, &x_data);
            check("gate_up_proj", at, &d_gate_up, f(h) - f(-h));
        }
        for at in (0..down.num_elements()).step_by(61) {
            let f = |by| surrogate(&gate_up, &bump(&down, at, by), &x_data);
            check("down_proj", at, &d_down, f(h) - f(-h));
        }
        // The expert that no token chose.
        let idle = trainer.down_proj.grad(&grads).unwrap().narrow(0, 1, 1).abs().max();
        assert_eq!(idle.into_scalar(), 0.0);
    }

    #[test]
    #[should_panic(expected = "experts of d_model = 32, d_ff = 24 cannot run in w4a16")]
    fn a_width_that_blocks_do_not_cover_is_refused() {
        QuadsExpertsConfig::new(2, 32, 24).init::<B>(&Default::default());
    }
}
