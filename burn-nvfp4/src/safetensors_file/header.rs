//! The header of a safetensors file: eight bytes of length, then a JSON object of names, types, shapes and places.
use super::strict_json::{UniqueMap, twice};
use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor},
};
use std::{collections::BTreeMap, fmt, ops::Range};

/// Bytes before the header.
pub(super) const LENGTH_BYTES: usize = 8;
/// What the reference implementation accepts.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;
/// More dimensions than any weight has: a header is not a way to fill memory with ones.
const MAX_RANK: usize = 8;
/// The entry that is no tensor.
pub(super) const METADATA: &str = "__metadata__";

/// One tensor of a file, as its header describes it, and found to be possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// Its bytes, from the end of the header.
    pub bytes: Range<usize>,
}

/// A header that fits its file.
#[derive(Debug, Default)]
pub(super) struct Header {
    /// Free text by name.
    pub metadata: BTreeMap<String, String>,
    /// In the order of their bytes.
    pub tensors: Vec<TensorInfo>,
}

/// What is wrong with a header, and with which tensor.
#[derive(Debug)]
pub(super) struct HeaderError {
    pub tensor: Option<String>,
    pub problem: String,
}

impl Header {
    /// Reads a header in front of `data_len` bytes of tensors.
    pub(super) fn parse(json: &[u8], data_len: usize) -> Result<Self, HeaderError> {
        let mut current = None;
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let parsed = HeaderSeed { current: &mut current }.deserialize(&mut deserializer);
        let parsed = parsed.and_then(|header| deserializer.end().map(|()| header));
        let mut header = parsed.map_err(|error| HeaderError {
            tensor: current,
            problem: format!("the header is damaged: {error}"),
        })?;
        // Tensors without elements lie before the one that starts where they do.
        header
            .tensors
            .sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
        header.check(data_len)?;
        Ok(header)
    }

    /// The tensors must cover the data from end to end, each as large as type and shape say.
    fn check(&self, data_len: usize) -> Result<(), HeaderError> {
        let mut end = 0;
        for tensor in &self.tensors {
            let refuse = |problem: String| HeaderError {
                tensor: Some(tensor.name.clone()),
                problem,
            };
            let Range { start, end: stop } = tensor.bytes;
            if start > stop || stop > data_len {
                return Err(refuse(format!(
                    "bytes {start}..{stop} are not within the {data_len} of the file"
                )));
            }
            if start != end {
                let relation = if start < end {
                    "overlap the tensor before"
                } else {
                    "leave a hole"
                };
                return Err(refuse(format!(
                    "bytes {start}..{stop} {relation}, expected to start at {end}"
                )));
            }
            let (dtype, shape) = (tensor.dtype, &tensor.shape);
            let size = byte_size(dtype, shape).ok_or_else(|| {
                refuse(format!(
                    "{dtype} {shape:?} is larger than any memory, or no whole bytes"
                ))
            })?;
            if stop - start != size {
                let given = stop - start;
                return Err(refuse(format!(
                    "{dtype} {shape:?} needs {size} bytes, the header gives it {given}"
                )));
            }
            end = stop;
        }
        match end == data_len {
            true => Ok(()),
            false => Err(HeaderError {
                tensor: None,
                problem: format!("{data_len} bytes of tensors, the header describes {end}"),
            }),
        }
    }

    /// The file's first bytes: length and JSON, padded to whole words as the reference implementation does.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut json = serde_json::Map::new();
        // Written by hand, because an object of serde_json sorts its names and tensors go in the order of their bytes.
        let mut text = String::from("{");
        if !self.metadata.is_empty() {
            for (key, value) in &self.metadata {
                json.insert(key.clone(), value.clone().into());
            }
            push_entry(&mut text, METADATA, &serde_json::Value::Object(json).to_string());
        }
        for tensor in &self.tensors {
            let shape = tensor.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            let Range { start, end } = tensor.bytes;
            let entry = format!(
                r#"{{"dtype":"{}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#,
                tensor.dtype
            );
            push_entry(&mut text, &tensor.name, &entry);
        }
        text.push('}');
        let mut bytes = text.into_bytes();
        bytes.resize(bytes.len().next_multiple_of(LENGTH_BYTES), b' ');
        let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
        file.append(&mut bytes);
        file
    }
}

fn push_entry(text: &mut String, name: &str, value: &str) {
    if text.len() > 1 {
        text.push(',');
    }
    text.push_str(&serde_json::Value::from(name).to_string());
    text.push(':');
    text.push_str(value);
}

/// Bytes of a tensor; `None` when they overflow or are not whole.
pub(super) fn byte_size(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Reads the whole object; `current` is the tensor being read, for the error.
struct HeaderSeed<'a> {
    current: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Header;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            *self.current = Some(name.clone());
            if name == METADATA {
                if metadata.is_some() {
                    return Err(twice(&name));
                }
                metadata = Some(map.next_value::<UniqueMap<String>>()?.0);
            } else {
                let entry: Entry = map.next_value()?;
                if tensors.contains_key(&name) {
                    return Err(twice(&name));
                }
                tensors.insert(name, entry);
            }
            *self.current = None;
        }
        let tensors = tensors.into_iter().map(|(name, entry)| TensorInfo {
            name,
            dtype: entry.dtype,
            shape: entry.shape.0,
            bytes: entry.data_offsets[0]..entry.data_offsets[1],
        });
        Ok(Header {
            metadata: metadata.unwrap_or_default(),
            tensors: tensors.collect(),
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Shape,
    data_offsets: [usize; 2],
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_RANK} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = vec![];
                while let Some(dim) = seq.next_element::<usize>()? {
                    if dims.len() == MAX_RANK {
                        return Err(A::Error::invalid_length(MAX_RANK + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}
