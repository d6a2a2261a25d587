//! Golden files, compiled in.
use serde_json::Value;

pub fn tensors() -> Value {
    serde_json::from_str(include_str!("../../../tests/fixtures/nvfp4/golden.json")).unwrap()
}

pub fn rows() -> Value {
    serde_json::from_str(include_str!("../../../tests/fixtures/nvfp4/row_pow2.json")).unwrap()
}

pub fn bytes(value: &Value) -> Vec<u8> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| u8::try_from(v.as_u64().unwrap()).unwrap())
        .collect()
}

/// Bits of f32 values: hexadecimal strings in `golden.json`, integers in `row_pow2.json`.
pub fn floats(value: &Value) -> Vec<f32> {
    let one = |v: &Value| match v.as_str() {
        Some(hex) => f32::from_bits(u32::from_str_radix(hex, 16).unwrap()),
        None => f32::from_bits(u32::try_from(v.as_u64().unwrap()).unwrap()),
    };
    value
        .as_array()
        .map_or_else(|| vec![one(value)], |values| values.iter().map(one).collect())
}

pub fn shape(value: &Value) -> [usize; 2] {
    [0, 1].map(|i| usize::try_from(value["shape"][i].as_u64().unwrap()).unwrap())
}
