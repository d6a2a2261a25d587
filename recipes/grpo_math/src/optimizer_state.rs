//! AdamW's state as safetensors: for the parameter at `PATH`, `PATH.moment_1` and `PATH.moment_2` in its shape, and
//! `PATH.time` `[1]`, the updates it has had. Parameters without an update yet are absent.
use anyhow::{Context, Result, bail};
use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer, adaptor::OptimizerAdaptor, record::AdaptorRecord},
    tensor::{Tensor, TensorData, backend::AutodiffBackend},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// The optimizer of the whole run.
pub type AdamWOptimizer<B, M> = OptimizerAdaptor<AdamW, M, B>;

/// Writes the state of the optimizer of `model`.
pub fn save<B, M>(optimizer: &AdamWOptimizer<B, M>, model: &M, path: &Path) -> Result<()>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let mut writer = Writer {
        path: Vec::new(),
        records: optimizer.to_record().into_iter().collect(),
        tensors: BTreeMap::new(),
    };
    model.visit(&mut writer);
    let views = writer.tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes);
        (name, view.expect("the bytes were made for this shape"))
    });
    safetensors::serialize_to_file(views, None, path).with_context(|| format!("cannot write {}", path.display()))
}

/// Reads the state that [`save`] wrote into the optimizer of `model`.
pub fn load<B, M>(optimizer: AdamWOptimizer<B, M>, model: &M, path: &Path) -> Result<AdamWOptimizer<B, M>>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = SafeTensors::deserialize(&bytes).with_context(|| format!("cannot read {}", path.display()))?;
    let mut reader: Reader<'_, B> = Reader {
        path: Vec::new(),
        left: file.names().into_iter().map(String::from).collect(),
        file,
        records: Vec::new(),
        problem: None,
    };
    model.visit(&mut reader);
    if let Some(problem) = reader.problem {
        bail!("{}: {problem}", path.display());
    }
    if let Some(name) = reader.left.first() {
        bail!("{}: {name} belongs to no parameter of the model", path.display());
    }
    Ok(optimizer.load_record(reader.records.into_iter().collect()))
}

struct Writer<B: AutodiffBackend> {
    path: Vec<String>,
    records: std::collections::HashMap<ParamId, AdaptorRecord<AdamW, B>>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Writer<B> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(record) = self.records.remove(&param.id) else {
            return;
        };
        let state: AdamWState<B::InnerBackend, D> = record.into_state();
        let AdaptiveMomentumState {
            time,
            moment_1,
            moment_2,
            ..
        } = state.momentum;
        let path = self.path.join(".");
        for (name, moment) in [("moment_1", moment_1), ("moment_2", moment_2)] {
            let shape = moment.dims().to_vec();
            let values: Vec<f32> = moment.into_data().iter::<f32>().collect();
            let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
            self.tensors
                .insert(format!("{path}.{name}"), (Dtype::F32, shape, bytes));
        }
        let time = (time as u64).to_le_bytes().to_vec();
        self.tensors.insert(format!("{path}.time"), (Dtype::U64, vec![1], time));
    }
}

struct Reader<'a, B: AutodiffBackend> {
    path: Vec<String>,
    file: SafeTensors<'a>,
    left: BTreeSet<String>,
    records: Vec<(ParamId, AdaptorRecord<AdamW, B>)>,
    problem: Option<String>,
}

impl<B: AutodiffBackend> Reader<'_, B> {
    fn bytes(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Vec<u8>, String> {
        let tensor = self.file.tensor(name).map_err(|_| format!("{name} is missing"))?;
        if (tensor.dtype(), tensor.shape()) != (dtype, shape) {
            let (found, of) = (tensor.shape(), tensor.dtype());
            return Err(format!("{name} is {of:?} {found:?}, expected {dtype:?} {shape:?}"));
        }
        self.left.remove(name);
        Ok(tensor.data().to_vec())
    }

    fn state<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<B, D>>,
    ) -> Result<AdamWState<B::InnerBackend, D>, String> {
        let shape = param.lazy_shape();
        let mut moment = |name: &str| -> Result<Tensor<B::InnerBackend, D>, String> {
            let bytes = self.bytes(&format!("{path}.{name}"), Dtype::F32, &shape)?;
            let (values, _) = bytes.as_chunks::<4>();
            let values: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            Ok(Tensor::from_data(
                TensorData::new(values, shape.clone()),
                &param.lazy_device(),
            ))
        };
        let (moment_1, moment_2) = (moment("moment_1")?, moment("moment_2")?);
        let time = self.bytes(&format!("{path}.time"), Dtype::U64, &[1])?;
        let time = time.try_into().map_or(0, u64::from_le_bytes);
        Ok(AdamWState::new(AdaptiveMomentumState::new(
            time as usize,
            moment_1,
            moment_2,
        )))
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Reader<'_, B> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let path = self.path.join(".");
        if !self.left.contains(&format!("{path}.time")) {
            return;
        }
        match self.state(&path, param) {
            Ok(state) => self.records.push((param.id, AdaptorRecord::from_state(state))),
            Err(problem) => _ = self.problem.get_or_insert(problem),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        backend::{Autodiff, Flex},
        module::Module,
        nn::{Linear, LinearConfig},
        optim::{AdamWConfig, GradientsParams},
    };
    use std::path::PathBuf;

    type B = Autodiff<Flex>;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("grpo_math_{}_{name}.safetensors", std::process::id()))
    }

    fn step(model: Linear<B>, optimizer: &mut AdamWOptimizer<B, Linear<B>>) -> Linear<B> {
        let x = Tensor::<B, 2>::from_floats([[1.0, -2.0, 0.5]], &Default::default());
        let loss = model.forward(x).powi_scalar(2).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        optimizer.step(0.1, model, gradients)
    }

    fn bits(model: &Linear<B>) -> Vec<u32> {
        let weight = model.weight.val().into_data();
        let bias = model.bias.as_ref().unwrap().val().into_data();
        weight
            .iter::<f32>()
            .chain(bias.iter::<f32>())
            .map(f32::to_bits)
            .collect()
    }

    #[test]
    fn an_optimizer_read_back_takes_the_same_steps() {
        let model: Linear<B> = LinearConfig::new(3, 2).init(&Default::default());
        let fresh = || AdamWConfig::new().init::<B, Linear<B>>();
        let mut optimizer = fresh();
        let model = step(step(model, &mut optimizer), &mut optimizer);
        let path = scratch("steps");
        save(&optimizer, &model, &path).unwrap();
        let mut read = load(fresh(), &model, &path).unwrap();
        let continued = step(step(model.clone(), &mut read), &mut read);
        let uninterrupted = step(step(model.clone(), &mut optimizer), &mut optimizer);
        assert_eq!(bits(&continued), bits(&uninterrupted));
        let mut forgetful = fresh();
        let restarted = step(step(model, &mut forgetful), &mut forgetful);
        assert_ne!(bits(&restarted), bits(&uninterrupted), "the state matters");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_state_of_another_model_is_refused_by_name() {
        let device = Default::default();
        let (small, large) = (
            LinearConfig::new(3, 2).init(&device),
            LinearConfig::new(3, 4).init::<B>(&device),
        );
        let mut optimizer = AdamWConfig::new().init::<B, Linear<B>>();
        let small = step(small, &mut optimizer);
        let path = scratch("other");
        save(&optimizer, &small, &path).unwrap();
        let error = load(AdamWConfig::new().init(), &large, &path)
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.ends_with("weight.moment_1 is F32 [3, 2], expected F32 [3, 4]"),
            "{error}"
        );
        let no_bias: Linear<B> = LinearConfig::new(3, 2).with_bias(false).init(&device);
        let error = load(AdamWConfig::new().init(), &no_bias, &path)
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.ends_with("bias.moment_1 belongs to no parameter of the model"),
            "{error}"
        );
        assert_eq!(small.num_params(), 8);
        std::fs::remove_file(path).unwrap();
    }
}
