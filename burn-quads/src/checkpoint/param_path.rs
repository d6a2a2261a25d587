//! Parameters by their path in the module tree.
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Tensor, backend::Backend},
};

/// Where a visitor is in the module tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct ParamPath(Vec<String>);

impl ParamPath {
    pub fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    pub fn exit(&mut self) {
        self.0.pop();
    }

    /// The names from the root down.
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }
}

impl std::fmt::Display for ParamPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("."))
    }
}

/// The parameters of a module by path, in the fixed order of its fields.
pub fn named_param_ids<B: Backend, M: Module<B>>(model: &M) -> Vec<(String, ParamId)> {
    #[derive(Default)]
    struct Names {
        path: ParamPath,
        names: Vec<(String, ParamId)>,
    }
    impl<B: Backend> ModuleVisitor<B> for Names {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.names.push((self.path.to_string(), param.id));
        }
    }
    let mut visitor = Names::default();
    model.visit(&mut visitor);
    visitor.names
}
