//! Numbers of a step by name, under the names of verl and TRL where these have one.
use serde::{Serialize, Serializer, ser::SerializeMap};

/// Names with numbers, in a fixed order. Serialises as a map.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics(Vec<(&'static str, f64)>);

impl Metrics {
    /// No metrics.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metric at the end.
    pub fn push(&mut self, name: &'static str, value: f64) {
        debug_assert!(self.get(name).is_none(), "{name} twice");
        self.0.push((name, value));
    }

    /// Adds all metrics of `other` at the end.
    pub fn extend(&mut self, other: &Self) {
        for &(name, value) in &other.0 {
            self.push(name, value);
        }
    }

    /// The value of a metric.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|entry| entry.0 == name).map(|entry| entry.1)
    }

    /// All metrics in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.0.iter().copied()
    }
}

impl Serialize for Metrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<const N: usize> From<[(&'static str, f64); N]> for Metrics {
    fn from(metrics: [(&'static str, f64); N]) -> Self {
        Self(metrics.to_vec())
    }
}
