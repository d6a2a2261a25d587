//! What each tensor of a dense model is to quantization.
use burn_nvfp4::{checkpoint::LayerName, safetensors_file::FileTensor};

use crate::elements::is_float;

/// What a tensor is to quantization.
pub enum Role {
    /// It stays.
    Dense,
    /// One layer.
    Layer(LayerName),
    /// All experts of a block, `[experts, d_out, d_in]`; for each, the layers that lie one after the other along `d_out`.
    Experts {
        /// Path of the experts.
        path: String,
        /// Their names.
        projections: &'static [&'static str],
    },
}

/// Whether a module is the one at `path` or inside it.
pub fn contains(path: &str, module: &str) -> bool {
    let rest = module.strip_prefix(path);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// By its name, shape and type.
pub fn role(tensor: &FileTensor<'_>) -> Role {
    let (name, rank) = (tensor.name(), tensor.shape().len());
    if !is_float(tensor.dtype()) {
        return Role::Dense;
    }
    if let Some(layer) = name
        .strip_suffix(".weight")
        .filter(|_| rank == 2)
        .and_then(LayerName::parse)
    {
        return Role::Layer(layer);
    }
    // Transformers' fused names: no `.weight`.
    let experts = [
        ("gate_up_proj", &["gate_proj", "up_proj"][..]),
        ("down_proj", &["down_proj"]),
    ];
    for (fused, projections) in experts {
        let path = name.strip_suffix(fused).and_then(|path| path.strip_suffix('.'));
        if let Some(path) = path.filter(|path| rank == 3 && path.ends_with(".experts")) {
            return Role::Experts {
                path: path.to_string(),
                projections,
            };
        }
    }
    Role::Dense
}

/// The layers of one of the experts.
pub fn expert_modules<'a>(path: &'a str, expert: usize, projections: &'a [&str]) -> impl Iterator<Item = String> + 'a {
    projections
        .iter()
        .map(move |projection| format!("{path}.{expert}.{projection}"))
}
