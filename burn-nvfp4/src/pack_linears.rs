//! Packs the linear layers of a model that knows nothing of it.
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Shape, Tensor, backend::Backend},
};
use burn_backend::{FloatDType, TensorMetadata};
use kernels_cubecl::ResidualMask;
use std::collections::BTreeMap;

use crate::{
    LayerAudit, Nvfp4Backend, Nvfp4Tensor, Outcome, PackError, PackableBackend, PackedWeight, PackingAudit, Precision,
    Rac,
    near_paths::near,
    pack::{lazy_float, pack_primitive},
    packable::{for_record, for_use},
    reference::floats_tensor,
};

/// Packs the weight of every `nn::Linear` of a model.
///
/// ```
/// # use burn::{backend::Flex, module::Module, nn::{Linear, LinearConfig}, tensor::backend::Backend};
/// # use burn_nvfp4::{Nvfp4, PackLinears, Precision};
/// #[derive(Module, Debug)]
/// struct Classifier<B: Backend> {
///     hidden: Linear<B>,
///     output: Linear<B>,
/// }
/// # let device = Default::default();
/// # let model = Classifier::<Nvfp4<Flex>> {
/// #     hidden: LinearConfig::new(64, 64).init(&device),
/// #     output: LinearConfig::new(64, 10).init(&device),
/// # };
/// let (model, audit) = PackLinears::default().precision(Precision::W4A4).except(["output"]).pack(model)?;
/// println!("{audit}");
/// # assert_eq!(audit.packed(), 1);
/// # Ok::<(), burn_nvfp4::PackError>(())
/// ```
///
/// [`pack`](PackLinears::pack) looks at the whole model first and gives errors back. As a Burn mapper,
/// `model.map(&mut PackLinears::default())` does the same in one pass and panics with the error; call
/// [`finish`](PackLinears::finish) to get the audit, and the error of a path that matched no layer, which otherwise
/// is a panic when the mapper is dropped.
///
/// The default precision is `w4a4_rac` on all channels. A layer that is packed already keeps its codes and gets the
/// new activation setting.
///
/// A packed parameter is a float tensor whose values are decoded when something other than a product asks for them,
/// so it works under `Autodiff` too: there it is frozen. Saved through its module it stays packed. Burn forgets how a
/// parameter is saved when a module goes to or from `Autodiff` (`train`, `valid`), and loads records into fresh
/// modules as quantized tensors, which `Autodiff` cannot use: map the module once more with `PackLinears` in either
/// case.
#[derive(Debug)]
pub struct PackLinears {
    precision: Precision,
    except: Vec<String>,
    groups: Vec<Vec<String>>,
    masks: BTreeMap<String, ResidualMask>,
    leave_unpackable: bool,
    /// Name and container of each module on the way to the current one.
    trail: Vec<(String, String)>,
    /// What a visit of the model found.
    survey: Option<Survey>,
    audit: PackingAudit,
    error: Option<PackError>,
    /// Errors wait for `finish` instead of being panics.
    deferred: bool,
    finished: bool,
}

#[derive(Debug, Default)]
struct Survey {
    linears: Vec<String>,
    /// Largest magnitude of the layers in groups.
    amax: BTreeMap<String, f32>,
}

impl Default for PackLinears {
    fn default() -> Self {
        Self {
            precision: Precision::W4A4Rac(Rac::default()),
            except: Vec::new(),
            groups: Vec::new(),
            masks: BTreeMap::new(),
            leave_unpackable: false,
            trail: Vec::new(),
            survey: None,
            audit: PackingAudit::default(),
            error: None,
            deferred: false,
            finished: false,
        }
    }
}

impl PackLinears {
    /// The precision that packed layers compute in.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }
    /// Layers that stay dense, by their exact paths: `encoder.layers.0.mha.query`.
    pub fn except<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.except.extend(paths.into_iter().map(Into::into));
        self
    }
    /// Layers that share one outer scale, by their exact paths: the query, key and value of an attention, say. May be
    /// called once a group. The scale covers the largest magnitude of them all, so all must be seen before the first
    /// is packed: use [`pack`](PackLinears::pack), or `model.visit(&mut packer)` before `model.map(&mut packer)`.
    pub fn share<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.groups.push(paths.into_iter().map(Into::into).collect());
        self
    }
    /// The residual mask of a layer, for calibrated compensation.
    pub fn residual_mask(mut self, path: impl Into<String>, mask: ResidualMask) -> Self {
        self.masks.insert(path.into(), mask);
        self
    }
    /// Leaves layers dense whose `d_in` is not a multiple of 16, instead of refusing the model.
    pub fn leave_unpackable(mut self) -> Self {
        self.leave_unpackable = true;
        self
    }

    /// Packs a model.
    ///
    /// # Errors
    ///
    /// [`PackError`], naming the layer: what [`pack`](crate::pack()) refuses, and paths that match no layer.
    pub fn pack<B: Backend, M: Module<B>>(mut self, model: M) -> Result<(M, PackingAudit), PackError>
    where
        Self: ModuleMapper<B> + ModuleVisitor<B>,
    {
        self.deferred = true;
        model.visit(&mut self);
        self.check_paths()?;
        let model = model.map(&mut self);
        Ok((model, self.finish()?))
    }

    /// What has been done so far.
    pub fn audit(&self) -> &PackingAudit {
        &self.audit
    }

    /// The audit, after `model.map(&mut packer)`.
    ///
    /// # Errors
    ///
    /// A path that matched no layer.
    pub fn finish(mut self) -> Result<PackingAudit, PackError> {
        self.finished = true;
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        self.check_paths()?;
        Ok(std::mem::take(&mut self.audit))
    }

    /// Paths that name no layer, or one twice.
    fn check_paths(&mut self) -> Result<(), PackError> {
        let checked = self.find_path_error();
        // Reported once is enough: not again from `drop`.
        self.finished |= checked.is_err();
        checked
    }
    fn find_path_error(&self) -> Result<(), PackError> {
        let linears: Vec<&str> = match &self.survey {
            Some(survey) => survey.linears.iter().map(String::as_str).collect(),
            None => self.audit.layers.iter().map(|layer| layer.path.as_str()).collect(),
        };
        let options = self.except.iter().map(|path| ("except", path));
        let options = options.chain(self.groups.iter().flatten().map(|path| ("share", path)));
        for (option, path) in options.chain(self.masks.keys().map(|path| ("residual_mask", path))) {
            if !linears.contains(&path.as_str()) {
                return Err(PackError::UnknownPath {
                    option,
                    path: path.clone(),
                    near: near(path, &linears),
                });
            }
        }
        let mut members: Vec<&String> = self.groups.iter().flatten().collect();
        members.sort();
        if let Some(twice) = members.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(PackError::Sharing {
                reason: format!("layer `{}` is named twice", twice[0]),
            });
        }
        if let Some(path) = members.iter().find(|path| self.except.contains(path)) {
            return Err(PackError::Sharing {
                reason: format!("layer `{path}` is excepted, so it has no scale to share"),
            });
        }
        Ok(())
    }

    /// Path of the linear layer whose weight is at hand.
    fn linear(&self) -> Option<String> {
        let ((name, container), modules) = self.trail.split_last()?;
        let is_weight = name == "weight" && container == "Struct:Linear";
        is_weight.then(|| {
            modules
                .iter()
                .map(|(name, _)| name.as_str())
                .collect::<Vec<_>>()
                .join(".")
        })
    }
    fn group(&self, path: &str) -> Option<&[String]> {
        self.groups
            .iter()
            .find(|group| group.iter().any(|member| member == path))
            .map(Vec::as_slice)
    }
    fn measure<B: Nvfp4Backend>(&mut self, path: String, weight: Nvfp4Tensor<B>) {
        let in_group = self.group(&path).is_some();
        let survey = self.survey.get_or_insert_default();
        if in_group {
            let amax = B::with_floats(&weight.dense(), kernels_cubecl::amax);
            // An infinity is the error of its own layer, when that is packed.
            if amax.is_finite() {
                survey.amax.insert(path.clone(), amax);
            }
        }
        survey.linears.push(path);
    }
    fn shared_amax(&self, path: &str) -> Option<f32> {
        let group = self.group(path)?;
        let Some(survey) = &self.survey else {
            panic!(
                "PackLinears::share needs the amax of the whole group before its first layer is packed: use \
                 PackLinears::pack(model), or model.visit(&mut packer) before model.map(&mut packer)"
            );
        };
        Some(
            group
                .iter()
                .filter_map(|member| survey.amax.get(member))
                .fold(0.0, |amax, own| own.max(amax)),
        )
    }

    /// The packed weight, or `None` when the layer stays as it is.
    fn pack_layer<B: Nvfp4Backend>(&mut self, path: &str, weight: Nvfp4Tensor<B>) -> Option<PackedWeight<B>> {
        let shape = weight.shape();
        let bytes_before = bytes(&weight);
        let packed = self.try_pack(path, weight);
        let (packed, outcome) = match packed {
            Ok(Ok(packed)) => {
                let outcome = Outcome::Packed(self.precision.clone());
                (Some(packed), outcome)
            }
            Ok(Err(reason)) => (None, Outcome::Left(reason)),
            Err(error) => {
                let error = error.in_layer(path);
                if !self.deferred {
                    self.finished = true;
                    panic!("{error}");
                }
                let outcome = Outcome::Left(error.to_string());
                self.error.get_or_insert(error);
                (None, outcome)
            }
        };
        self.audit.push(LayerAudit {
            path: path.to_string(),
            shape: shape.to_vec(),
            outcome,
            bytes_before,
            bytes_after: packed.as_ref().map_or(bytes_before, PackedWeight::bytes),
        });
        packed
    }
    fn try_pack<B: Nvfp4Backend>(
        &self,
        path: &str,
        weight: Nvfp4Tensor<B>,
    ) -> Result<Result<PackedWeight<B>, String>, PackError> {
        let left = |reason: &str| Ok(Err(reason.to_string()));
        let is_packed = matches!(weight, Nvfp4Tensor::Packed(_));
        if self.except.iter().any(|except| except == path) {
            return left(if is_packed {
                "excepted, but packed before"
            } else {
                "excepted"
            });
        }
        if self.precision == Precision::High {
            return left(if is_packed {
                "precision high, but packed before"
            } else {
                "precision high"
            });
        }
        let amax = match &weight {
            Nvfp4Tensor::Dense(weight) => self.shared_amax(path).map(|amax| {
                let amax = floats_tensor::<B>(vec![amax], Shape::from([1]), &B::float_device(weight), FloatDType::F32);
                Tensor::from_primitive(burn::tensor::TensorPrimitive::Float(Nvfp4Tensor::Dense(amax)))
            }),
            Nvfp4Tensor::Packed(_) => None,
        };
        match pack_primitive(weight, &self.precision, amax, self.masks.get(path)) {
            Ok(packed) => Ok(Ok(packed)),
            Err(error @ PackError::UnalignedInput { .. }) if self.leave_unpackable => left(&error.to_string()),
            Err(error) => Err(error),
        }
    }
}

impl Drop for PackLinears {
    fn drop(&mut self) {
        let used = !self.audit.layers.is_empty();
        if used
            && !self.finished
            && !std::thread::panicking()
            && let Err(error) = self.find_path_error()
        {
            panic!("{error}");
        }
    }
}

fn bytes<B: Nvfp4Backend>(weight: &Nvfp4Tensor<B>) -> usize {
    match weight {
        Nvfp4Tensor::Packed(weight) => weight.bytes(),
        weight => weight.shape().num_elements() * weight.dtype().size(),
    }
}

impl<B: PackableBackend> ModuleMapper<B> for PackLinears {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.trail.push((name.to_string(), container.to_string()));
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.trail.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let Some(path) = self.linear() else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let weight = B::to_nvfp4(tensor.clone()).into_primitive().tensor();
        match self.pack_layer(&path, weight) {
            Some(weight) => {
                let saved = mapper.clone();
                let tensor = B::from_nvfp4(lazy_float(weight)).set_require_grad(false);
                Param::from_mapped_value(id, tensor, mapper.clone())
                    .save_mapper(move |tensor| for_record(saved.on_save(tensor)))
                    .load_mapper(move |tensor| mapper.on_load(for_use(tensor)))
            }
            None => Param::from_mapped_value(id, tensor, mapper),
        }
    }
}

impl<B: PackableBackend> ModuleVisitor<B> for PackLinears {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.trail.push((name.to_string(), container.to_string()));
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.trail.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(path) = self.linear() {
            self.measure(path, B::to_nvfp4(param.val()).into_primitive().tensor());
        }
    }
}
