//! What packing did to each linear layer of a model.
use serde::Serialize;
use std::fmt;

use crate::Precision;

/// What became of a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is packed and computes in this precision.
    Packed(Precision),
    /// It stays dense, for this reason.
    Left(String),
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerAudit {
    /// Path in the model; empty when the model is a linear layer itself.
    pub path: String,
    /// Shape of the weight, `[d_in, d_out]` or `[groups, d_in, d_out]`.
    pub shape: Vec<usize>,
    /// What became of it.
    pub outcome: Outcome,
    /// Bytes of the weight before.
    pub bytes_before: usize,
    /// Bytes of the weight after, scales and mask included.
    pub bytes_after: usize,
}

/// What packing did to a model, layer by layer in the model's order. Its `Display` is a table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PackingAudit {
    /// The layers.
    pub layers: Vec<LayerAudit>,
}

impl PackingAudit {
    /// Adds a layer.
    pub fn push(&mut self, layer: LayerAudit) {
        self.layers.push(layer);
    }
    /// The layer of a path.
    pub fn layer(&self, path: &str) -> Option<&LayerAudit> {
        self.layers.iter().find(|layer| layer.path == path)
    }
    /// Layers that are packed.
    pub fn packed(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| matches!(layer.outcome, Outcome::Packed(_)))
            .count()
    }
    /// Bytes of all weights before.
    pub fn bytes_before(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes_before).sum()
    }
    /// Bytes of all weights after.
    pub fn bytes_after(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes_after).sum()
    }
    /// The layer with the widest output, when one is wider than all others: often the head, which is better left
    /// dense.
    pub fn likely_head(&self) -> Option<&LayerAudit> {
        let width = |layer: &LayerAudit| layer.shape.last().copied().unwrap_or(0);
        let widest = self.layers.iter().max_by_key(|layer| width(layer))?;
        let alone = self.layers.iter().filter(|layer| width(layer) == width(widest)).count() == 1;
        (alone && self.layers.len() > 1).then_some(widest)
    }
}

impl fmt::Display for PackingAudit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = self.likely_head().map(|layer| layer.path.as_str());
        let mut rows = vec![["layer", "shape", "precision", "before", "after", ""].map(String::from)];
        for layer in &self.layers {
            let (precision, mut note) = match &layer.outcome {
                Outcome::Packed(precision) => (precision.to_string(), Vec::new()),
                Outcome::Left(reason) => ("dense".to_string(), vec![reason.clone()]),
            };
            if head == Some(layer.path.as_str()) {
                note.push("widest output: a likely head".to_string());
            }
            rows.push([
                if layer.path.is_empty() {
                    "(the model)".to_string()
                } else {
                    layer.path.clone()
                },
                format!("{:?}", layer.shape),
                precision,
                bytes(layer.bytes_before),
                bytes(layer.bytes_after),
                note.join("; "),
            ]);
        }
        rows.push([
            format!("{} of {} layers packed", self.packed(), self.layers.len()),
            String::new(),
            String::new(),
            bytes(self.bytes_before()),
            bytes(self.bytes_after()),
            String::new(),
        ]);
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 5] = std::array::from_fn(width);
        for row in &rows {
            let [path, shape, precision, before, after, note] = row;
            let line = format!(
                "{path:0$}  {shape:1$}  {precision:2$}  {before:>3$}  {after:>4$}  {note}",
                widths[0], widths[1], widths[2], widths[3], widths[4]
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn bytes(count: usize) -> String {
    match count {
        0..10_000 => format!("{count} B"),
        10_000..10_000_000 => format!("{:.1} KB", count as f64 / 1e3),
        _ => format!("{:.1} MB", count as f64 / 1e6),
    }
}
