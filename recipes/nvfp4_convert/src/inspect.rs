//! A table of the tensors of a checkpoint: what is packed, how, and how far it is from the original.
use anyhow::{Context, Result};
use burn_nvfp4::{
    checkpoint::{LayerName, divisor},
    safetensors_file::FileTensor,
};
use kernels_cubecl::OuterScale;
use std::collections::BTreeMap;

use crate::{
    elements::{decode, is_float},
    source::Source,
    table::{Align, bytes, table},
};

/// Lines of the table: layers of a kind in experts of a block stand together unless `each`.
///
/// # Errors
/// When a packed layer is damaged, or `original` lacks it or has it in another shape.
pub fn inspect(source: &Source, original: Option<&Source>, each: bool) -> Result<String> {
    let mut lines: BTreeMap<(Vec<Key>, String), Line> = BTreeMap::new();
    for tensor in source.folder().tensors() {
        let line = match source.packed().and_then(|packed| packed.module_of(tensor.name())) {
            None => Line::dense(&tensor),
            // Once for all its tensors.
            Some(_) if tensor.dtype() != burn_nvfp4::safetensors_file::Dtype::U8 => continue,
            Some(module) => packed_line(source, module, original)?,
        };
        let name = if each { line.name.clone() } else { together(&line.name) };
        let key = (natural_order(&name), line.format.clone());
        match lines.get_mut(&key) {
            Some(first) if first.shape == line.shape => first.add(&line),
            Some(_) => {
                lines.insert((natural_order(&line.name), line.format.clone()), line);
            }
            None => {
                lines.insert(key, Line { name, ..line });
            }
        }
    }
    let header = [
        ("layer", Align::Left),
        ("", Align::Right),
        ("shape", Align::Left),
        ("format", Align::Left),
        ("bytes", Align::Right),
        ("outer scale", Align::Left),
        ("error", Align::Right),
    ];
    let rows: Vec<Vec<String>> = lines.values().map(Line::cells).collect();
    let (packed, total) = lines.values().fold((0, 0), |(packed, total), line| {
        (packed + if line.packed { line.bytes } else { 0 }, total + line.bytes)
    });
    let mut text = table(&header, &rows);
    text.push_str(&format!("{} in all, {} of them packed\n", bytes(total), bytes(packed)));
    if original.is_some() {
        text.push_str("error: Euclidean norm of the difference from the original, over the original's\n");
    }
    Ok(text)
}

/// One layer or tensor, or some of a kind.
struct Line {
    name: String,
    count: usize,
    shape: Vec<usize>,
    format: String,
    packed: bool,
    bytes: u64,
    /// Smallest and largest, as what a block scale is divided by.
    outer_scales: Option<(f32, f32)>,
    /// Squared norms of differences and of originals.
    error: Option<(f64, f64)>,
}

impl Line {
    fn dense(tensor: &FileTensor<'_>) -> Self {
        Self {
            name: tensor.name().into(),
            count: 1,
            shape: tensor.shape().into(),
            format: tensor.dtype().to_string(),
            packed: false,
            bytes: tensor.bytes.len() as u64,
            outer_scales: None,
            error: None,
        }
    }

    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        if let (Some((low, high)), Some((other_low, other_high))) = (&mut self.outer_scales, other.outer_scales) {
            (*low, *high) = (low.min(other_low), high.max(other_high));
        }
        if let (Some((error, norm)), Some((other_error, other_norm))) = (&mut self.error, other.error) {
            *error += other_error;
            *norm += other_norm;
        }
    }

    fn cells(&self) -> Vec<String> {
        let count = if self.count == 1 {
            String::new()
        } else {
            format!("x{}", self.count)
        };
        let outer_scales = self
            .outer_scales
            .map_or(String::new(), |(low, high)| match low == high {
                true => format!("1/{low}"),
                false => format!("1/{low} to 1/{high}"),
            });
        let error = self
            .error
            .map_or(String::new(), |error| format!("{:.2} %", 100.0 * relative(error)));
        vec![
            self.name.clone(),
            count,
            format!("{:?}", self.shape),
            self.format.clone(),
            bytes(self.bytes),
            outer_scales,
            error,
        ]
    }
}

fn packed_line(source: &Source, module: &str, original: Option<&Source>) -> Result<Line> {
    let packed = source.require_packed()?;
    let layer = packed.layer(module)?.context("a module of the folder")?;
    let error = original.map(|original| layer_error(&layer.dequantize(), &dense_layer(original, module)?, module));
    let scale = divisor(layer.weight.outer_scale);
    let convention = match layer.weight.outer_scale {
        OuterScale::Divide(_) => "nvfp4, divides",
        OuterScale::Multiply(_) => "nvfp4, multiplies",
    };
    Ok(Line {
        name: module.into(),
        count: 1,
        shape: vec![layer.weight.rows, layer.weight.k],
        format: format!(
            "{convention}{}",
            if layer.input_scale.is_some() { ", w4a4" } else { "" }
        ),
        packed: true,
        bytes: layer.bytes() as u64,
        outer_scales: Some((scale, scale)),
        error: error.transpose()?,
    })
}

/// The dense values of a layer of a model, from whichever naming it has, or decoded.
///
/// # Errors
/// When the model has no such layer.
pub(crate) fn dense_layer(model: &Source, module: &str) -> Result<Vec<f32>> {
    if let Some(layer) = model.packed().map(|packed| packed.layer(module)).transpose()?.flatten() {
        return Ok(layer.dequantize());
    }
    let missing = || format!("{}: no tensor for {module}", model.path.display());
    if let Some(tensor) = model.tensor(&format!("{module}.weight")) {
        return Ok(tensor.to_f32()?);
    }
    // Experts in one tensor.
    let layer = LayerName::parse(module).with_context(missing)?;
    let (path, expert) = layer.expert().with_context(missing)?;
    let (fused, part, parts) = match layer.projection.name() {
        "gate_proj" => ("gate_up_proj", 0, 2),
        "up_proj" => ("gate_up_proj", 1, 2),
        name => (name, 0, 1),
    };
    let tensor = model.tensor(&format!("{path}.{fused}")).with_context(missing)?;
    let experts = tensor.shape().first().copied().unwrap_or(0);
    anyhow::ensure!(is_float(tensor.dtype()) && expert < experts, missing());
    let size = tensor.bytes.len() / experts / parts;
    let bytes = &tensor.bytes[(expert * parts + part) * size..][..size];
    let mut values = vec![0.0; size / (tensor.dtype().bitsize() / 8)];
    decode(tensor.dtype(), bytes, &mut values);
    Ok(values)
}

/// Squared norms of the difference from an original, and of that.
///
/// # Errors
/// When the numbers of values differ.
pub(crate) fn layer_error(values: &[f32], original: &[f32], module: &str) -> Result<(f64, f64)> {
    anyhow::ensure!(
        values.len() == original.len(),
        "{module}: {} values, the original has {}",
        values.len(),
        original.len()
    );
    let pairs = values.iter().zip(original);
    Ok(pairs.fold((0.0, 0.0), |(error, norm), (value, original)| {
        let (value, original) = (f64::from(*value), f64::from(*original));
        (error + (value - original).powi(2), norm + original.powi(2))
    }))
}

/// Norm of the difference over that of the original; 0 for zeros that stayed zeros.
pub(crate) fn relative((error, norm): (f64, f64)) -> f64 {
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// The name of a layer with its expert's number left out.
fn together(name: &str) -> String {
    let mut experts = false;
    let parts = name.split('.').map(|part| {
        let number = experts && part.parse::<usize>().is_ok();
        experts = part == "experts";
        if number { "*" } else { part }
    });
    parts.collect::<Vec<_>>().join(".")
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Number(usize),
    Text(String),
}

/// So that layer 10 comes after layer 9.
fn natural_order(name: &str) -> Vec<Key> {
    let key = |part: &str| part.parse().map_or_else(|_| Key::Text(part.into()), Key::Number);
    name.split('.').map(key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_stand_together() {
        assert_eq!(
            together("model.layers.3.mlp.experts.12.up_proj"),
            "model.layers.3.mlp.experts.*.up_proj"
        );
        assert_eq!(
            together("model.layers.3.mlp.gate.weight"),
            "model.layers.3.mlp.gate.weight"
        );
    }

    #[test]
    fn numbers_are_in_order() {
        assert!(natural_order("layers.9.x") < natural_order("layers.10.a"));
    }

    #[test]
    fn an_error_is_relative_to_the_original() {
        let error = layer_error(&[3.0, 4.5], &[3.0, 4.0], "a").unwrap();
        assert_eq!(relative(error), 0.1);
        assert_eq!(relative(layer_error(&[0.0], &[0.0], "a").unwrap()), 0.0);
        assert!(layer_error(&[0.0], &[], "a").is_err());
    }
}
