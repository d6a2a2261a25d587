//! One update of a model's parameters: clip the gradient by its global norm, AdamW, and what to do when the gradient is
//! no number.
use burn::{
    module::{AutodiffModule, ModuleVisitor, Param},
    optim::{AdamW, AdamWConfig, GradientsParams, Optimizer, adaptor::OptimizerAdaptor},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use serde::{Deserialize, Serialize};

use super::{GrpoError, LrSchedule};
use crate::backend::runs_on_gpu;

/// Burn's AdamW over a model's parameters; its `to_record` and `load_record` carry the moments.
pub type AdamWOptimizer<B, M> = OptimizerAdaptor<AdamW, M, B>;

/// Settings of the updates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The learning rate.
    pub schedule: LrSchedule,
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay: each update takes `learning rate · weight_decay` of every parameter.
    pub weight_decay: f32,
    /// The gradient is scaled down to this norm over all parameters; absent: never.
    pub max_grad_norm: Option<f32>,
    /// Updates in a row that may be skipped because the loss or gradient is not finite; one more ends the training.
    pub max_skipped_steps: usize,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            schedule: LrSchedule::default(),
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: Some(1.0),
            max_skipped_steps: 10,
        }
    }
}

impl OptimizerConfig {
    /// Refuses settings that cannot work.
    pub fn validate(&self) -> Result<(), GrpoError> {
        self.schedule.validate()?;
        for (option, beta) in [("optimizer.beta_1", self.beta_1), ("optimizer.beta_2", self.beta_2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(GrpoError::option(option, "a number in [0, 1)", beta));
            }
        }
        if !(self.epsilon > 0.0 && self.epsilon.is_finite()) {
            return Err(GrpoError::option(
                "optimizer.epsilon",
                "a finite number above 0",
                self.epsilon,
            ));
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return Err(GrpoError::option(
                "optimizer.weight_decay",
                "a finite number of at least 0",
                self.weight_decay,
            ));
        }
        if let Some(norm) = self.max_grad_norm
            && !(norm > 0.0 && norm.is_finite())
        {
            return Err(GrpoError::option(
                "optimizer.max_grad_norm",
                "a finite number above 0, or none",
                norm,
            ));
        }
        Ok(())
    }

    /// An AdamW without history.
    pub fn init<B: AutodiffBackend, M: AutodiffModule<B>>(&self) -> AdamWOptimizer<B, M> {
        AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
            .init()
    }
}

/// What became of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// The parameters moved.
    Applied {
        /// Norm of the gradient over all parameters, before clipping.
        grad_norm: f64,
    },
    /// The parameters and moments are what they were.
    Skipped {
        /// What was not finite: `loss` or `gradient norm`.
        quantity: &'static str,
    },
}

/// Counts of updates that were skipped; part of what a resumed run needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedSteps {
    /// In all.
    pub total: usize,
    /// Since the last update that was applied.
    pub consecutive: usize,
}

impl SkippedSteps {
    /// Counts an update, and gives up when too many in a row were skipped.
    pub(super) fn count(&mut self, update: Update, config: &OptimizerConfig, step: usize) -> Result<(), GrpoError> {
        match update {
            Update::Applied { .. } => self.consecutive = 0,
            Update::Skipped { quantity } => {
                self.total += 1;
                self.consecutive += 1;
                tracing::warn!("step {step}: update skipped, its {quantity} is not finite");
                if self.consecutive > config.max_skipped_steps {
                    return Err(GrpoError::Diverged {
                        consecutive: self.consecutive,
                        quantity,
                        step,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Moves a model along its gradient, unless that is not finite.
pub(super) fn update<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    mut gradients: GradientsParams,
    optimizer: &mut AdamWOptimizer<B, M>,
    max_grad_norm: Option<f32>,
    learning_rate: f64,
) -> (M, Update) {
    let grad_norm = global_norm(&model, &gradients);
    if !grad_norm.is_finite() {
        let quantity = "gradient norm";
        return (model, Update::Skipped { quantity });
    }
    if let Some(max) = max_grad_norm {
        // As in PyTorch, whose small number in the divisor spares a branch for the gradient 0.
        let factor = max as f64 / (grad_norm + 1e-6);
        if factor < 1.0 {
            scale(&model, &mut gradients, factor as f32);
        }
    }
    let model = optimizer.step(learning_rate, model, gradients);
    (model, Update::Applied { grad_norm })
}

/// Euclidean norm of all gradients together; not finite if one element is not, or if the sum of squares overflows f32.
pub fn global_norm<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M, gradients: &GradientsParams) -> f64 {
    struct Squares<'a, B: AutodiffBackend> {
        gradients: &'a GradientsParams,
        sums: Vec<Tensor<B::InnerBackend, 1>>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.gradients.get::<B::InnerBackend, D>(param.id) {
                self.sums.push(sum(gradient.clone() * gradient));
            }
        }
    }
    let mut squares = Squares::<B> {
        gradients,
        sums: Vec::new(),
    };
    model.visit(&mut squares);
    if squares.sums.is_empty() {
        return 0.0;
    }
    // One read for all parameters; added in f64 in the order of the module.
    Tensor::cat(squares.sums, 0)
        .into_data()
        .iter::<f64>()
        .sum::<f64>()
        .sqrt()
}

/// The sum of all values, `[1]`.
fn sum<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    match runs_on_gpu::<B>(&x.device()) {
        true => sum_of_stretches(x.flatten(0, D - 1)),
        false => x.sum(),
    }
}

/// Values that one thread of a GPU adds up.
const STRETCH: usize = 1024;

/// Stretch by stretch: over a whole tensor at once Burn's GPU backends keep four cubes busy.
fn sum_of_stretches<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    let len = x.dims()[0];
    let stretches = len / STRETCH;
    if stretches < 2 {
        return x.sum();
    }
    let whole = stretches * STRETCH;
    let sums = x.clone().narrow(0, 0, whole).reshape([stretches, STRETCH]).sum_dim(1);
    let sum = sum_of_stretches(sums.reshape([stretches]));
    match len - whole {
        0 => sum,
        rest => sum + x.narrow(0, whole, rest).sum(),
    }
}

fn scale<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M, gradients: &mut GradientsParams, factor: f32) {
    struct Scale<'a> {
        gradients: &'a mut GradientsParams,
        factor: f32,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) {
                self.gradients.register(param.id, gradient * self.factor);
            }
        }
    }
    model.visit(&mut Scale { gradients, factor });
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::{Autodiff, Flex},
        nn::{Linear, LinearConfig},
        tensor::Int,
    };

    use super::*;

    type B = Autodiff<Flex>;

    /// A layer of two weights whose gradient is `gradient`.
    fn layer(gradient: [f32; 2]) -> (Linear<B>, GradientsParams) {
        let device = Default::default();
        let layer = LinearConfig::new(2, 1).with_bias(false).init::<B>(&device);
        let loss = layer.forward(Tensor::<B, 2>::from_floats([gradient], &device)).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &layer);
        (layer, gradients)
    }

    fn weights(layer: &Linear<B>) -> Vec<f32> {
        layer.weight.val().into_data().to_vec().unwrap()
    }

    #[test]
    fn stretches_add_up_to_the_sum_over_all() {
        for len in [
            1,
            STRETCH,
            2 * STRETCH - 1,
            2 * STRETCH,
            5 * STRETCH + 3,
            3 * STRETCH * STRETCH + STRETCH + 7,
        ] {
            // Sums below 2^24 are exact, whatever their order.
            let values = Tensor::<Flex, 1, Int>::arange(0..len as i64, &Default::default())
                .remainder_scalar(7)
                .float();
            let sum: f32 = sum_of_stretches(values.clone()).into_scalar();
            assert_eq!(sum, values.sum().into_scalar(), "{len} values");
        }
    }

    #[test]
    fn gradient_is_scaled_to_the_norm_over_all_parameters() {
        let (layer, mut gradients) = layer([3.0, 4.0]);
        assert_eq!(global_norm(&layer, &gradients), 5.0);
        scale(&layer, &mut gradients, 0.2);
        assert!((global_norm(&layer, &gradients) - 1.0).abs() < 1e-6);
        assert_eq!(global_norm(&layer, &GradientsParams::new()), 0.0);
    }

    #[test]
    fn a_gradient_that_is_not_finite_leaves_parameters_and_moments_alone() {
        let config = OptimizerConfig::default();
        let mut optimizer = config.init();
        for bad in [f32::NAN, f32::INFINITY, 1e30] {
            let (layer, gradients) = layer([1.0, bad]);
            let before = weights(&layer);
            let (layer, result) = update(layer, gradients, &mut optimizer, Some(1.0), 0.1);
            assert_eq!(
                result,
                Update::Skipped {
                    quantity: "gradient norm"
                }
            );
            assert_eq!(weights(&layer), before);
            assert!(optimizer.to_record().is_empty());
        }
    }

    #[test]
    fn first_update_moves_each_weight_by_the_learning_rate() {
        let config = OptimizerConfig::default();
        let (layer, gradients) = layer([3.0, -4.0]);
        let before = weights(&layer);
        let (layer, result) = update(layer, gradients, &mut config.init(), Some(1.0), 0.01);
        assert_eq!(result, Update::Applied { grad_norm: 5.0 });
        let moved = weights(&layer);
        assert!((moved[0] - before[0] + 0.01).abs() < 1e-6 && (moved[1] - before[1] - 0.01).abs() < 1e-6);
    }

    #[test]
    fn too_many_skipped_updates_in_a_row_end_the_training() {
        let config = OptimizerConfig {
            max_skipped_steps: 2,
            ..OptimizerConfig::default()
        };
        let mut skipped = SkippedSteps::default();
        let bad = Update::Skipped { quantity: "loss" };
        let good = Update::Applied { grad_norm: 1.0 };
        for update in [bad, bad, good, bad, bad] {
            skipped.count(update, &config, 7).unwrap();
        }
        let error = skipped.count(bad, &config, 7).unwrap_err().to_string();
        assert!(error.starts_with("training diverged: 3 updates in a row had a loss that is not finite (step 7)"));
        assert_eq!(
            skipped,
            SkippedSteps {
                total: 5,
                consecutive: 3
            }
        );
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let error = |change: fn(&mut OptimizerConfig)| {
            let mut config = OptimizerConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(error(|c| c.beta_1 = 1.0).starts_with("optimizer.beta_1: expected"));
        assert!(error(|c| c.beta_2 = f32::NAN).starts_with("optimizer.beta_2: expected"));
        assert!(error(|c| c.epsilon = 0.0).starts_with("optimizer.epsilon: expected"));
        assert!(error(|c| c.weight_decay = -0.1).starts_with("optimizer.weight_decay: expected"));
        assert!(error(|c| c.max_grad_norm = Some(0.0)).starts_with("optimizer.max_grad_norm: expected"));
        assert_eq!(OptimizerConfig::default().validate(), Ok(()));
    }
}
