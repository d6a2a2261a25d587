//! A linear layer with a precision.
use burn::{
    config::Config,
    module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param},
    nn::Linear,
    tensor::{Tensor, TensorPrimitive, backend::Backend, module::linear},
};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, PackError, Precision, WeightFormat, pack, packed_weight};
use kernels_cubecl::{BLOCK, ResidualMask};

use super::{
    activation_site::{ActivationSite, is_packed},
    residual_probe::ResidualProbe,
    straight_through::Backward,
};
use crate::{backend::QuadsBackend, layer_backend::takes_dense_product};

/// Configuration of a [`QuadsLinear`].
#[derive(Config, Debug)]
pub struct QuadsLinearConfig {
    /// Input features. A multiple of 16 in the NVFP4 precisions.
    pub d_input: usize,
    /// Output features.
    pub d_output: usize,
    /// Whether a bias is added. It is never quantized.
    #[config(default = true)]
    pub bias: bool,
    /// The precision of the product.
    #[config(default = "Precision::W4A16")]
    pub precision: Precision,
    /// How weight and bias are drawn.
    #[config(default = "Initializer::KaimingUniform{gain: 1.0 / 3.0f64.sqrt(), fan_out_only: false}")]
    pub initializer: Initializer,
}

impl QuadsLinearConfig {
    /// Makes the layer.
    ///
    /// # Panics
    /// When `precision` packs weights in NVFP4 and `d_input` is not a multiple of 16.
    pub fn init<B: Backend>(&self, device: &B::Device) -> QuadsLinear<B> {
        let (fan_in, fan_out) = (Some(self.d_input), Some(self.d_output));
        let init = &self.initializer;
        QuadsLinear {
            weight: init.init_with([self.d_input, self.d_output], fan_in, fan_out, device),
            bias: self
                .bias
                .then(|| init.init_with([self.d_output], fan_in, fan_out, device)),
            precision: Precision::High,
            backward: Backward::default(),
            input: ActivationSite::default(),
        }
        .with_precision(self.precision.clone())
    }
}

/// A linear layer `y = x · W + b` that trains in, and rolls out in, a chosen [`Precision`].
///
/// The weight is an f32 master. While it is dense, the forward pass rounds it (and, where the precision says so, the
/// input) to the values that a packed matmul works with, and gradients pass straight through:
///
/// | precision | forward | `dx` | `dW` |
/// |---|---|---|---|
/// | `high` | `x · W` | `g · Wᵀ` | `xᵀ · g` |
/// | `w4a16` | `x · q(W)` | `g · q(W)ᵀ` | `xᵀ · g` |
/// | `w4a4`, `w4a4_rac`, `fp8` | `x̂ · q(W)` | `g · q(W)ᵀ` | `x̂ᵀ · g` |
///
/// With [`Backward::Unquantized`] all gradients are those of the first row.
///
/// Once the weight is packed ([`sync`](crate::sync), or [`pack`](Self::pack)), the backend multiplies with the
/// codes in the activation setting that the packed weight carries.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct QuadsLinear<B: Backend> {
    /// `[d_input, d_output]`.
    pub weight: Param<Tensor<B, 2>>,
    /// `[d_output]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// The precision of the product while the weight is dense.
    #[module(skip)]
    precision: Precision,
    /// What the gradient goes through while the weight is dense.
    #[module(skip)]
    backward: Backward,
    /// Compensation and calibration of the input.
    #[module(skip)]
    pub(crate) input: ActivationSite,
}

impl<B: Backend> QuadsLinear<B> {
    /// The precision of the product.
    pub fn precision(&self) -> &Precision {
        &self.precision
    }

    /// `[d_input, d_output]`.
    pub fn dims(&self) -> [usize; 2] {
        self.weight.lazy_shape().dims()
    }

    /// The layer in another precision.
    ///
    /// # Panics
    /// When `precision` packs weights in NVFP4 and `d_input` is not a multiple of 16.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        let [d_input, d_output] = self.dims();
        assert!(
            precision.weight_format() != Some(WeightFormat::Nvfp4) || d_input.is_multiple_of(BLOCK),
            "a linear layer of d_input = {d_input}, d_output = {d_output} cannot run in {precision}: NVFP4 needs d_input \
             to be a multiple of {BLOCK}; pad the input, or use the precision high",
        );
        self.precision = precision;
        self
    }

    /// The layer with another straight-through gradient.
    pub fn with_backward(mut self, backward: Backward) -> Self {
        self.backward = backward;
        self
    }

    /// The calibrated residual mask over `d_input`, if there is one.
    pub fn residual_mask(&self) -> Option<&ResidualMask> {
        self.input.mask()
    }

    /// The layer with a calibrated residual mask, which `w4a4_rac` uses when its selection is calibrated, or without one.
    /// Masks come from a [`ResidualProbe`].
    ///
    /// # Panics
    /// When the mask does not have `d_input` channels.
    pub fn with_residual_mask(mut self, mask: Option<ResidualMask>) -> Self {
        let [d_input, _] = self.dims();
        self.input.set_checked_mask("a linear layer's input", d_input, mask);
        self
    }

    /// The layer that also measures its inputs, or no longer does.
    ///
    /// # Panics
    /// When the probe is not for `d_input` channels.
    pub fn with_probe(mut self, probe: Option<ResidualProbe>) -> Self {
        let [d_input, _] = self.dims();
        self.input.set_checked_probe("a linear layer's input", d_input, probe);
        self
    }
}

impl<B: QuadsBackend> QuadsLinear<B> {
    /// `[.., d_input]` to `[.., d_output]`.
    ///
    /// # Panics
    /// When the last dimension is not `d_input`, or the precision needs a calibrated mask that was never set.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let [y] = OuterScaleGroup::new([self]).forward(x);
        y
    }

    /// The values of a dense weight that the forward pass multiplies with. `amax`, `[1]`, is the largest magnitude of the
    /// group that shares the outer scale.
    fn quantized_weight(&self, amax: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
        let weight = self.weight.val();
        let Some(format) = self.precision.weight_format() else {
            return weight;
        };
        let amax = amax.map(|amax| amax.into_primitive().tensor());
        let weight = B::fake_quantize_weight(weight.into_primitive().tensor(), format, amax);
        Tensor::from_primitive(TensorPrimitive::Float(weight))
    }
}

impl<B: Nvfp4Backend> QuadsLinear<Nvfp4<B>> {
    /// The layer for inference: its weight packed in `precision`, with an outer scale of its own. The master is gone.
    ///
    /// # Errors
    /// [`PackError`]: a non-finite weight, a `d_input` that does not fit, [`Precision::High`], or a precision that needs a
    /// calibrated mask where none was set.
    pub fn pack(self, precision: &Precision) -> Result<Self, PackError> {
        let [packed] = OuterScaleGroup::new([&self]).pack(precision)?;
        Ok(packed)
    }

    /// The layer with its weight packed in `precision` under the outer scale of `amax`.
    fn pack_with(
        &self,
        precision: &Precision,
        amax: Option<Tensor<Nvfp4<B>, 1>>,
        mask: Option<&ResidualMask>,
    ) -> Result<Self, PackError> {
        let weight = pack(self.weight.val(), precision, amax, mask)?;
        let mut packed = self.clone();
        packed.weight = Param::initialized(self.weight.id, weight);
        packed.precision = precision.clone();
        Ok(packed)
    }
}

/// Layers on one input that share an outer scale (q, k and v of an attention), so that one fused matmul can serve them
/// and checkpoint tools, which do the same, agree.
///
/// The scale comes from the largest magnitude over all members' f32 masters, at each forward pass and at each packing:
/// pack such layers with [`pack`](Self::pack), since one by one they would get other codes than they trained with.
/// They have one input, the first member's: its residual mask and its probe count.
#[derive(Clone, Copy, Debug)]
pub struct OuterScaleGroup<'a, B: Backend, const N: usize> {
    members: [&'a QuadsLinear<B>; N],
}

impl<'a, B: Backend, const N: usize> OuterScaleGroup<'a, B, N> {
    /// A group of at least one layer.
    ///
    /// # Panics
    /// When the members differ in precision, gradient or input size.
    pub fn new(members: [&'a QuadsLinear<B>; N]) -> Self {
        let first = members[0];
        for member in &members[1..] {
            assert!(
                member.precision == first.precision
                    && member.backward == first.backward
                    && member.dims()[0] == first.dims()[0],
                "layers that share an outer scale must agree in precision, gradient and d_input: {} ({:?}) with {} and {} \
                 ({:?}) with {}",
                first.precision,
                first.backward,
                first.dims()[0],
                member.precision,
                member.backward,
                member.dims()[0],
            );
        }
        Self { members }
    }

    /// The largest magnitude over all members, `[1]`, outside the autodiff graph.
    pub fn amax(&self) -> Tensor<B, 1> {
        // A detached parameter still asks for its gradient, for which Burn would look for the place of the maximum. One side
        // after the other: a GPU has a thread for each row of what is left, and would have one for all.
        let amax = |member: &QuadsLinear<B>| {
            let weight = member.weight.val().detach().set_require_grad(false);
            weight.abs().max_dim(1).max_dim(0).reshape([1])
        };
        let first = amax(self.members[0]);
        self.members[1..]
            .iter()
            .fold(first, |largest, member| largest.max_pair(amax(member)))
    }
}

impl<B: Nvfp4Backend, const N: usize> OuterScaleGroup<'_, Nvfp4<B>, N> {
    /// The layers for inference, in their order: their weights packed in `precision` under the shared outer scale, each
    /// with the first member's residual mask.
    ///
    /// # Errors
    /// As [`QuadsLinear::pack`].
    pub fn pack(&self, precision: &Precision) -> Result<[QuadsLinear<Nvfp4<B>>; N], PackError> {
        let mask = self.members[0].input.mask();
        let dense = self.members.iter().all(|m| packed_weight(&m.weight.val()).is_none());
        // FP8 has scales of its own for each channel; packed weights keep the scales that they have.
        let shared = N > 1 && dense && precision.weight_format() == Some(WeightFormat::Nvfp4);
        let amax = shared.then(|| self.amax());
        let packed: Result<Vec<_>, _> = self
            .members
            .iter()
            .map(|member| member.pack_with(precision, amax.clone(), mask))
            .collect();
        Ok(packed?
            .try_into()
            .unwrap_or_else(|_| unreachable!("one layer a member")))
    }
}

impl<B: QuadsBackend, const N: usize> OuterScaleGroup<'_, B, N> {
    /// The largest magnitude where the outer scale depends on it: not within one weight, whose own is found on the way.
    fn shared_amax(&self) -> Option<Tensor<B, 1>> {
        let nvfp4 = self.members[0].precision.weight_format() == Some(WeightFormat::Nvfp4);
        (N > 1 && nvfp4).then(|| self.amax())
    }

    /// The values of dense weights that the forward pass multiplies with, `[d_input, d_output]` each.
    pub fn quantized_weights(&self) -> [Tensor<B, 2>; N] {
        let amax = self.shared_amax();
        self.members.map(|member| member.quantized_weight(amax.clone()))
    }

    /// The outputs of all members, `[.., d_input]` to `[.., d_output]` each; the input is quantized once.
    ///
    /// # Panics
    /// As [`QuadsLinear::forward`].
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> [Tensor<B, D>; N] {
        let first = self.members[0];
        let shape = x.dims();
        let d_input = first.dims()[0];
        assert_eq!(
            shape[D - 1],
            d_input,
            "the input of a linear layer has shape {shape:?}, expected [.., {d_input}]"
        );
        // One matrix: the gradient of a weight is then one product, not one for each leading index.
        let rows = shape[..D - 1].iter().product::<usize>();
        let x = x.reshape([rows, d_input]);
        first.input.observe(&x);
        let packed = is_packed(&first.weight.val());
        for member in &self.members[1..] {
            assert_eq!(
                is_packed(&member.weight.val()),
                packed,
                "layers that share an outer scale must all be packed, or none: pack them with OuterScaleGroup::pack"
            );
        }
        let backward = match packed {
            true => Backward::Quantized,
            false => first.backward.within(&first.precision),
        };
        let (x_hat, weights) = match packed {
            true => (x.clone(), self.members.map(|member| member.weight.val())),
            false => (
                backward.values(first.input.quantize(x.clone(), &first.precision)),
                self.quantized_weights().map(|weight| backward.values(weight)),
            ),
        };
        let mut weights = weights.into_iter();
        self.members.map(|member| {
            let weight = weights.next().expect("one weight a member");
            let bias = || member.bias.as_ref().map(|bias| bias.val());
            let y = backward.of(rows_linear(x_hat.clone(), weight, bias()), || {
                rows_linear(x.clone(), member.weight.val(), bias())
            });
            let mut shape = shape;
            shape[D - 1] = member.dims()[1];
            y.reshape(shape)
        })
    }
}

/// `x · w + bias` of rows.
fn rows_linear<B: QuadsBackend>(x: Tensor<B, 2>, weight: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
    if is_packed(&weight) || !takes_dense_product(&x, &weight) {
        return linear(x, weight, bias);
    }
    let y = B::dense_product(x, weight);
    match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    }
}

/// Burn's layer with the same parameters (and their ids), in [`Precision::W4A16`]: quantization-aware training of an
/// existing model.
///
/// # Panics
/// When `d_input` is not a multiple of 16.
impl<B: Backend> From<Linear<B>> for QuadsLinear<B> {
    fn from(linear: Linear<B>) -> Self {
        Self {
            weight: linear.weight,
            bias: linear.bias,
            precision: Precision::High,
            backward: Backward::default(),
            input: ActivationSite::default(),
        }
        .with_precision(Precision::W4A16)
    }
}

impl<B: Backend> ModuleDisplay for QuadsLinear<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = self.dims();
        content
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.bias.is_some())
            .add("precision", &self.precision.to_string())
            .optional()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        backend::{Autodiff, Flex},
        module::Module,
        nn::LinearConfig,
        tensor::{Distribution, TensorData},
    };
    use burn_nvfp4::Rac;
    use kernels_cubecl::{Granularity, Selection};

    type B = Nvfp4<Flex>;
    type A = Autodiff<B>;

    fn random<B: Backend, const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Default::default())
    }

    fn layer<B: Backend>(d_input: usize, precision: Precision) -> QuadsLinear<B> {
        QuadsLinearConfig::new(d_input, 24)
            .with_precision(precision)
            .init(&Default::default())
    }

    fn eye<B: Backend>(size: usize) -> Tensor<B, 2> {
        Tensor::eye(size, &Default::default())
    }

    #[test]
    fn weights_are_rounded_to_the_nvfp4_grid() {
        // amax 2688 = 6 · 448 makes the outer scale 1; the block's amax of 6 then has block scale 1, and the values are those
        // of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code.
        let mut column = [0.2, 0.3, -0.75, 1.1, 2.5, -3.4, 5.0, 6.0].repeat(2);
        column.extend([0.0; 16]);
        column[16] = 2688.0;
        let mut linear = QuadsLinearConfig::new(32, 1)
            .with_bias(false)
            .init::<B>(&Default::default());
        linear.weight = Param::from_data(TensorData::new(column, [32, 1]), &Default::default());
        let [weight] = OuterScaleGroup::new([&linear]).quantized_weights();
        let mut expected = [0.0f32, 0.5, -1.0, 1.0, 2.0, -3.0, 4.0, 6.0].repeat(2);
        expected.extend([0.0; 16]);
        expected[16] = 2688.0;
        assert_eq!(weight.into_data(), TensorData::new(expected, [32, 1]));
    }

    #[test]
    fn the_dense_forward_uses_the_values_that_packing_stores() {
        for precision in [
            Precision::W4A16,
            Precision::W4A4,
            Precision::W4A4Rac(Rac::default()),
            Precision::Fp8,
        ] {
            let linear = layer::<B>(48, precision.clone());
            let [weight] = OuterScaleGroup::new([&linear]).quantized_weights();
            let packed = pack(linear.weight.val(), &precision, None, None).unwrap();
            assert_eq!(weight.into_data(), packed.dequantize().into_data(), "{precision}");
        }
    }

    #[test]
    fn a_packed_layer_equals_the_dense_one_in_every_precision() {
        let mask = ResidualMask::from_channels(&[vec![true; 16], vec![false; 32]].concat());
        let calibrated = Rac {
            selection: Selection::Calibrated,
            ..Rac::default()
        };
        let per_token = Rac {
            selection: Selection::PerToken,
            granularity: Granularity::Block16,
            fraction: 0.5,
        };
        for precision in [
            Precision::W4A16,
            Precision::W4A4,
            Precision::W4A4Rac(Rac::default()),
            Precision::W4A4Rac(calibrated),
            Precision::W4A4Rac(per_token),
            Precision::Fp8,
        ] {
            let mut linear = layer::<B>(48, precision.clone());
            linear = linear.with_residual_mask(Some(mask.clone()));
            let x = random([2, 3, 48]);
            // Before cloning: Burn draws parameters at first use, so clones of an unused layer would differ.
            let dense = linear.forward(x.clone()).into_data();
            let packed = linear.clone().pack(&precision).unwrap();
            assert!(packed_weight(&packed.weight.val()).is_some());
            let packed = packed.forward(x).into_data();
            assert_eq!(dense.shape, packed.shape);
            for (d, p) in dense.iter::<f32>().zip(packed.iter::<f32>()) {
                assert!((d - p).abs() <= 1e-5 * (1.0 + d.abs()), "{precision}: {d} and {p}");
            }
        }
    }

    #[test]
    fn gradients_go_through_the_stored_weights_and_the_quantized_input() {
        let mask = ResidualMask::from_channels(&[vec![true; 8], vec![false; 24]].concat());
        let rac = |selection, granularity| {
            Precision::W4A4Rac(Rac {
                selection,
                granularity,
                fraction: 0.5,
            })
        };
        for precision in [
            Precision::High,
            Precision::W4A16,
            Precision::W4A4,
            rac(Selection::All, Granularity::Channel),
            rac(Selection::Calibrated, Granularity::Channel),
            rac(Selection::PerToken, Granularity::Channel),
            rac(Selection::PerToken, Granularity::Block16),
            Precision::Fp8,
        ] {
            let linear = layer::<A>(32, precision.clone()).with_residual_mask(Some(mask.clone()));
            let x = random::<A, 2>([5, 32]).require_grad();
            let g = random::<B, 2>([5, 24]);
            let grads = (linear.forward(x.clone()) * Tensor::from_inner(g.clone()))
                .sum()
                .backward();

            let [weight] = OuterScaleGroup::new([&linear]).quantized_weights().map(Tensor::inner);
            let x_hat = linear.input.quantize(x.clone(), &precision).inner();
            let equal = |actual: Tensor<B, 2>, expected: Tensor<B, 2>, what: &str| {
                let difference = (actual - expected).abs().max().into_scalar();
                assert!(difference < 1e-5, "{what} in {precision} differs by {difference}");
            };
            equal(x.grad(&grads).unwrap(), g.clone().matmul(weight.transpose()), "dx");
            equal(
                linear.weight.grad(&grads).unwrap(),
                x_hat.transpose().matmul(g.clone()),
                "dw",
            );
            let db = linear.bias.as_ref().unwrap().grad(&grads).unwrap().unsqueeze();
            equal(db, g.sum_dim(0), "db");
        }
    }

    #[test]
    fn an_unquantized_backward_is_that_of_full_precision_under_the_same_forward() {
        for precision in [
            Precision::High,
            Precision::W4A16,
            Precision::W4A4,
            Precision::W4A4Rac(Rac::default()),
            Precision::Fp8,
        ] {
            let quantized = [(); 2].map(|()| layer::<A>(32, precision.clone()));
            let x = random::<A, 2>([5, 32]).require_grad();
            let g = random::<B, 2>([5, 24]);
            let y = OuterScaleGroup::new(quantized.each_ref()).forward(x.clone());
            let linears = quantized
                .clone()
                .map(|linear| linear.with_backward(Backward::Unquantized));
            let z = OuterScaleGroup::new(linears.each_ref()).forward(x.clone());
            for (y, z) in y.iter().zip(&z) {
                assert_eq!(y.to_data(), z.to_data(), "{precision}: the forward pass is the same");
            }
            let [first, second] = z;
            let grads = ((first + second) * Tensor::from_inner(g.clone())).sum().backward();

            let equal = |actual: Tensor<B, 2>, expected: Tensor<B, 2>, what: &str| {
                let difference = (actual - expected).abs().max().into_scalar();
                assert!(difference < 1e-5, "{what} in {precision} differs by {difference}");
            };
            let [one, other] = linears.each_ref().map(|linear| linear.weight.val().inner());
            let dx = g.clone().matmul((one + other).transpose());
            equal(x.grad(&grads).unwrap(), dx, "dx");
            for linear in &linears {
                let dw = x.clone().inner().transpose().matmul(g.clone());
                equal(linear.weight.grad(&grads).unwrap(), dw, "dw");
                let db = linear.bias.as_ref().unwrap().grad(&grads).unwrap().unsqueeze();
                equal(db, g.clone().sum_dim(0), "db");
            }
        }
    }

    #[test]
    #[should_panic(
        expected = "must agree in precision, gradient and d_input: w4a4 (Quantized) with 32 and w4a4 (Unquantized)"
    )]
    fn a_group_has_one_backward() {
        let [first, second] = [(); 2].map(|()| layer::<B>(32, Precision::W4A4));
        OuterScaleGroup::new([&first, &second.with_backward(Backward::Unquantized)]);
    }

    #[test]
    fn gradients_equal_finite_differences_of_the_surrogate() {
        // y = x · (q + w − w₀) with q the stored values: quadratic in x and in w, so central differences are exact.
        let linear = layer::<A>(32, Precision::W4A16);
        let bias = linear.bias.as_ref().unwrap().val().inner();
        let x = random::<A, 2>([3, 32]).require_grad();
        let grads = linear.forward(x.clone()).powi_scalar(2).sum().backward();

        let [q] = OuterScaleGroup::new([&linear]).quantized_weights().map(Tensor::inner);
        let x0 = x.clone().inner();
        let loss = |x: Tensor<B, 2>, q: Tensor<B, 2>| -> f64 {
            let y = x.matmul(q) + bias.clone().unsqueeze();
            y.into_data().iter::<f64>().map(|y| y * y).sum()
        };
        let bump = |t: &Tensor<B, 2>, at: usize, by: f32| {
            let mut data = t.to_data();
            data.as_mut_slice::<f32>().unwrap()[at] += by;
            Tensor::from_data(data, &Default::default())
        };
        let h = 0.25;
        let check = |grad: Tensor<B, 2>, what: &str, loss: &dyn Fn(usize, f32) -> f64| {
            for (at, grad) in grad.into_data().iter::<f64>().enumerate() {
                let expected = (loss(at, h) - loss(at, -h)) / (2.0 * f64::from(h));
                assert!(
                    (grad - expected).abs() < 1e-3 * (1.0 + expected.abs()),
                    "{what}[{at}]: {grad}, {expected}"
                );
            }
        };
        check(x.grad(&grads).unwrap(), "dx", &|at, by| {
            loss(bump(&x0, at, by), q.clone())
        });
        check(linear.weight.grad(&grads).unwrap(), "dw", &|at, by| {
            loss(x0.clone(), bump(&q, at, by))
        });
    }

    #[test]
    fn a_group_shares_the_outer_scale_of_its_largest_member() {
        let [small, mut large] = [(); 2].map(|()| layer::<B>(32, Precision::W4A16));
        large.weight = large.weight.map(|w| w * 10.0);
        let group = OuterScaleGroup::new([&small, &large]);
        let amax = group.amax();
        assert_eq!(
            amax.to_data(),
            large.weight.val().abs().max().into_data(),
            "the largest magnitude of all members"
        );
        let packed = group.pack(&Precision::W4A16).unwrap().map(|linear| linear.weight.val());
        let scales = packed.each_ref().map(|w| packed_weight(w).unwrap().outer_scales());
        assert_eq!(scales[0], scales[1]);
        let alone = small.clone().pack(&Precision::W4A16).unwrap().weight.val();
        assert_ne!(packed_weight(&alone).unwrap().outer_scales(), scales[0]);
        for (weight, packed) in group.quantized_weights().into_iter().zip(packed) {
            assert_eq!(weight.into_data(), packed.dequantize().into_data());
        }
        // What the forward pass multiplies with, seen through it.
        let outputs = group.forward(eye(32));
        for ((output, weight), member) in outputs.into_iter().zip(group.quantized_weights()).zip([&small, &large]) {
            let bias = member.bias.as_ref().unwrap().val().unsqueeze();
            assert_eq!(output.into_data(), (weight + bias).into_data());
        }
    }

    #[test]
    fn a_packed_group_has_one_input() {
        let calibrated = Precision::W4A4Rac(Rac {
            selection: Selection::Calibrated,
            ..Rac::default()
        });
        let mask = ResidualMask::from_channels(&[vec![true; 8], vec![false; 24]].concat());
        let [first, second] = [(); 2].map(|()| layer::<B>(32, Precision::W4A16));
        let error = OuterScaleGroup::new([&first, &second]).pack(&calibrated).unwrap_err();
        assert!(matches!(error, PackError::MissingMask), "{error}");

        let first = first.with_residual_mask(Some(mask)).with_precision(calibrated.clone());
        let second = second.with_precision(calibrated.clone());
        let x = random::<B, 2>([4, 32]);
        let trained = OuterScaleGroup::new([&first, &second]).forward(x.clone());
        let [first, second] = OuterScaleGroup::new([&first, &second]).pack(&calibrated).unwrap();
        let packed = OuterScaleGroup::new([&first, &second]).forward(x);
        for (trained, packed) in trained.into_iter().zip(packed) {
            let difference = (trained - packed).abs().max().into_scalar();
            assert!(difference < 1e-5, "{difference}");
        }
    }

    #[test]
    #[should_panic(expected = "must all be packed, or none")]
    fn half_a_packed_group_is_refused() {
        let [first, second] = [(); 2].map(|()| layer::<B>(32, Precision::W4A16));
        let second = second.pack(&Precision::W4A16).unwrap();
        OuterScaleGroup::new([&first, &second]).forward(random::<B, 2>([4, 32]));
    }

    #[test]
    #[should_panic(expected = "the residual mask of a linear layer's input has 16 channels, expected 32")]
    fn a_mask_of_another_width_is_refused() {
        let mask = ResidualMask::from_channels(&[true; 16]);
        layer::<B>(32, Precision::W4A16).with_residual_mask(Some(mask));
    }

    #[test]
    fn inputs_of_any_rank_are_rows() {
        let linear = layer::<B>(32, Precision::W4A4);
        let x = random::<B, 4>([2, 1, 3, 32]);
        let y = linear.forward(x.clone());
        assert_eq!(y.dims(), [2, 1, 3, 24]);
        let row = linear.forward(x.slice([1..2, 0..1, 2..3]).reshape([32]));
        assert_eq!(row.into_data(), y.slice([1..2, 0..1, 2..3]).reshape([24]).into_data());
    }

    #[test]
    fn a_non_finite_weight_is_seen_in_every_output() {
        let mut linear = layer::<B>(32, Precision::W4A16);
        linear.weight = linear.weight.map(|w| w.slice_fill([0..1, 0..1], f32::INFINITY));
        let y = linear.forward(random::<B, 2>([2, 32]));
        assert!(y.into_data().iter::<f32>().all(f32::is_nan));
    }

    #[test]
    fn a_burn_layer_keeps_its_parameters() {
        let burn = LinearConfig::new(32, 24).init::<B>(&Default::default());
        let (weight, id) = (burn.weight.val().into_data(), burn.weight.id);
        let linear = QuadsLinear::from(burn);
        assert_eq!(linear.precision(), &Precision::W4A16);
        assert_eq!((linear.weight.val().into_data(), linear.weight.id), (weight, id));
        assert_eq!(linear.num_params(), 32 * 24 + 24);
    }

    #[test]
    #[should_panic(
        expected = "a linear layer of d_input = 20, d_output = 24 cannot run in w4a16: NVFP4 needs d_input to be a multiple of 16"
    )]
    fn a_d_input_that_blocks_do_not_cover_is_refused() {
        layer::<B>(20, Precision::W4A16);
    }

    #[test]
    fn any_d_input_will_do_without_blocks() {
        for precision in [Precision::High, Precision::Fp8] {
            assert_eq!(
                layer::<B>(20, precision).forward(random::<B, 2>([2, 20])).dims(),
                [2, 24]
            );
        }
    }

    #[test]
    #[should_panic(expected = "the input of a linear layer has shape [2, 16], expected [.., 32]")]
    fn an_input_of_another_width_is_refused() {
        layer::<B>(32, Precision::High).forward(random::<B, 2>([2, 16]));
    }
}
