//! Changes of inputs: of their bytes, of JSON values, and of files that begin with a header of JSON.
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

/// The largest input: what the reward's bound on time is given for.
pub const MAX_BYTES: usize = 64 << 10;

/// How inputs are built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Of pieces of text.
    Text,
    /// One JSON value, mostly.
    Json,
    /// Eight bytes of length, a header of JSON, data; or one JSON value.
    Safetensors,
}

/// Numbers at which arithmetic goes wrong.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2",
    "7",
    "16",
    "127",
    "255",
    "65536",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "0.1",
];
/// Bit patterns of f32 that no scale should have.
const FLOATS: [u32; 8] = [
    0,
    1,
    0x8000_0000,
    0x0080_0000,
    0x7F7F_FFFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
];
const BYTES: [u8; 8] = [0, 1, 0x7E, 0x7F, 0x80, 0xFF, b'"', b'\\'];

/// One to four changes of `input`.
pub fn mutate(rng: &mut ChaCha8Rng, form: Form, input: &[u8], corpus: &[&[u8]], words: &[&str]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..rng.random_range(1..=4) {
        bytes = match form {
            Form::Text => change_bytes(rng, bytes, corpus, words),
            Form::Json => change_json(rng, bytes, corpus, words),
            Form::Safetensors => change_file(rng, bytes, corpus, words),
        };
        bytes.truncate(MAX_BYTES);
    }
    bytes
}

fn place(rng: &mut ChaCha8Rng, bytes: &[u8]) -> usize {
    rng.random_range(0..=bytes.len())
}

/// A stretch of up to `longest` bytes.
fn stretch(rng: &mut ChaCha8Rng, bytes: &[u8], longest: usize) -> std::ops::Range<usize> {
    let start = place(rng, bytes);
    start..(start + rng.random_range(0..=longest)).min(bytes.len())
}

fn change_bytes(rng: &mut ChaCha8Rng, mut bytes: Vec<u8>, corpus: &[&[u8]], words: &[&str]) -> Vec<u8> {
    let at = place(rng, &bytes);
    match rng.random_range(0..12) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
        1 if at < bytes.len() => bytes[at] = *BYTES.choose(rng).unwrap(),
        2 if at < bytes.len() => bytes[at] = rng.random(),
        3 => drop(bytes.drain(stretch(rng, &bytes, 16))),
        4 => bytes.truncate(at),
        5 => {
            let copy = bytes[stretch(rng, &bytes, 40)].to_vec();
            bytes.splice(at..at, copy);
        }
        // Up to the largest input, now and then.
        6 if rng.random_ratio(1, 4) => {
            let copy = bytes[stretch(rng, &bytes, 12)].to_vec();
            if !copy.is_empty() {
                let most = (MAX_BYTES - bytes.len().min(MAX_BYTES)) / copy.len();
                let times = most >> rng.random_range(0..10);
                bytes.splice(at..at, copy.repeat(times));
            }
        }
        7 => {
            let other = *corpus.choose(rng).unwrap();
            let from = place(rng, other);
            bytes.truncate(at);
            bytes.extend(&other[from..]);
        }
        8 => {
            let other = *corpus.choose(rng).unwrap();
            let copy = other[stretch(rng, other, 40)].to_vec();
            bytes.splice(at..at, copy);
        }
        9 => change_number(rng, &mut bytes),
        _ => {
            let word = words.choose(rng).unwrap_or(&"0").as_bytes().to_vec();
            bytes.splice(at..at, word);
        }
    }
    bytes
}

/// Another number for one that is there.
fn change_number(rng: &mut ChaCha8Rng, bytes: &mut Vec<u8>) {
    let at = place(rng, bytes);
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|n| at + n) else {
        return;
    };
    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = NUMBERS.choose(rng).unwrap().bytes();
    bytes.splice(start..start + digits, number);
}

fn change_json(rng: &mut ChaCha8Rng, bytes: Vec<u8>, corpus: &[&[u8]], words: &[&str]) -> Vec<u8> {
    if rng.random_ratio(1, 3) {
        return change_bytes(rng, bytes, corpus, words);
    }
    match serde_json::from_slice(&bytes) {
        Ok(mut value) => {
            change_value(rng, &mut value, words);
            value.to_string().into_bytes()
        }
        Err(_) => change_bytes(rng, bytes, corpus, words),
    }
}

fn change_value(rng: &mut ChaCha8Rng, whole: &mut Value, words: &[&str]) {
    let count = nodes(whole);
    let (mut from, mut to) = (rng.random_range(0..count), rng.random_range(0..count));
    let other = node(whole, &mut from).expect("one of them").clone();
    let value = node(whole, &mut to).expect("one of them");
    let word = *words.choose(rng).unwrap_or(&"");
    match (rng.random_range(0..8), value) {
        (0, value) => *value = other,
        (1, value) => *value = Value::Null,
        (2, value) => *value = word.into(),
        (3, value) => {
            for _ in 0..rng.random_range(1..140) {
                *value = json!([value.take()]);
            }
        }
        (4 | 5, Value::Object(fields)) if !fields.is_empty() => {
            let name = fields.keys().nth(rng.random_range(0..fields.len())).unwrap().clone();
            fields.remove(&name);
        }
        (4 | 5, Value::Array(values)) if !values.is_empty() => {
            let copy = values[rng.random_range(0..values.len())].clone();
            let times = 1 << rng.random_range(0..8);
            values.extend(std::iter::repeat_n(copy, times));
        }
        (6, Value::Object(fields)) => drop(fields.insert(word.into(), other)),
        (_, Value::Bool(flag)) => *flag = !*flag,
        (_, value) => {
            // Numbers beyond f64 are no values; they come from changes of bytes.
            *value = serde_json::from_str(NUMBERS.choose(rng).unwrap()).unwrap_or(Value::Null);
        }
    }
}

fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(values) => values.iter().map(nodes).sum(),
        Value::Object(fields) => fields.values().map(nodes).sum(),
        _ => 0,
    }
}

/// The value that `left` others come before.
fn node<'a>(value: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(values) => values.iter_mut().find_map(|value| node(value, left)),
        Value::Object(fields) => fields.values_mut().find_map(|value| node(value, left)),
        _ => None,
    }
}

fn change_file(rng: &mut ChaCha8Rng, bytes: Vec<u8>, corpus: &[&[u8]], words: &[&str]) -> Vec<u8> {
    if bytes.starts_with(b"{") {
        return change_json(rng, bytes, corpus, words);
    }
    let length = bytes
        .first_chunk()
        .and_then(|length| usize::try_from(u64::from_le_bytes(*length)).ok());
    let end = length
        .and_then(|length| length.checked_add(8))
        .filter(|end| *end <= bytes.len());
    let (Some(end), true) = (end, rng.random_ratio(7, 8)) else {
        return change_bytes(rng, bytes, corpus, words);
    };
    let (mut header, mut data) = (bytes[8..end].to_vec(), bytes[end..].to_vec());
    match rng.random_range(0..4) {
        0 if !data.is_empty() => {
            let at = rng.random_range(0..data.len());
            data[at] = *BYTES.choose(rng).unwrap();
        }
        1 if data.len() >= 4 => {
            let at = rng.random_range(0..=data.len() - 4);
            data[at..at + 4].copy_from_slice(&FLOATS.choose(rng).unwrap().to_le_bytes());
        }
        _ => header = change_json(rng, header, corpus, words),
    }
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], &header, &data].concat()
}
