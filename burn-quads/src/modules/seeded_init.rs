//! Initial weights that depend on a seed alone, not on the backend, its threads or the order of first use.
use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{Tensor, TensorData, backend::Backend},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{moe::QuadsMoe, moe_config::QuadsMoeConfig};
use crate::checkpoint::ParamPath;

impl QuadsMoeConfig {
    /// Makes the model with weights drawn from the distributions of [`init`](Self::init) by a generator of its own:
    /// norms 1, biases 0, the embedding standard normal, every matrix uniform in `±1/√d_in`.
    ///
    /// # Panics
    /// As [`init`](Self::init).
    pub fn init_seeded<B: Backend>(&self, seed: u64, device: &B::Device) -> QuadsMoe<B> {
        self.init(device).map(&mut SeededInit {
            path: ParamPath::default(),
            rng: ChaCha8Rng::seed_from_u64(seed),
        })
    }
}

struct SeededInit {
    path: ParamPath,
    rng: ChaCha8Rng,
}

/// A standard normal draw. Box-Muller, one of the pair.
pub(crate) fn normal(rng: &mut impl Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    let angle = std::f64::consts::TAU * rng.random::<f64>();
    (radius * angle.cos()) as f32
}

impl<B: Backend> ModuleMapper<B> for SeededInit {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let shape = param.lazy_shape();
        let path = self.path.to_string();
        if path.ends_with(".gamma") {
            return param;
        }
        let elements = 0..shape.num_elements();
        let values: Vec<f32> = if path.ends_with(".bias") {
            vec![0.0; elements.len()]
        } else if path == "embed_tokens.weight" {
            elements.map(|_| normal(&mut self.rng)).collect()
        } else {
            let limit = 1.0 / (shape[D - 2] as f32).sqrt();
            elements.map(|_| self.rng.random_range(-limit..limit)).collect()
        };
        let tensor = Tensor::from_data(TensorData::new(values, shape), &param.lazy_device());
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}
