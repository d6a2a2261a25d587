//! JSON in which a name that occurs twice in an object is an error: readers that keep the first and readers that keep the
//! last would see different models.
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, fmt, marker::PhantomData};

/// Parses a JSON text of any kind. Nesting beyond 128 levels is refused.
///
/// # Errors
/// What is wrong, with line and column.
pub fn parse(text: &[u8]) -> Result<Value, String> {
    parse_as::<UniqueValue>(text).map(|value| value.0)
}

/// Parses a JSON object; as [`parse`].
///
/// # Errors
/// As [`parse`], and when the text is another JSON value.
pub fn parse_object(text: &[u8]) -> Result<Map<String, Value>, String> {
    match parse(text)? {
        Value::Object(object) => Ok(object),
        other => Err(format!("expected a JSON object, found {}", kind(&other))),
    }
}

/// What a JSON value is, for messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

pub(super) fn parse_as<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

/// An object whose values are all of one type.
pub(super) struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, V>()? {
                    if entries.contains_key(&key) {
                        return Err(twice(&key));
                    }
                    entries.insert(key, value);
                }
                Ok(UniqueMap(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

pub(super) fn twice<E: Error>(key: &str) -> E {
    E::custom(format_args!("{key:?} occurs twice"))
}

struct UniqueValue(Value);

impl<'de> Deserialize<'de> for UniqueValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;
        impl<'de> Visitor<'de> for AnyValue {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E: Error>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
                Ok(Value::String(value.into()))
            }

            fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
                Ok(Value::String(value))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut values = vec![];
                while let Some(UniqueValue(value)) = seq.next_element()? {
                    values.push(value);
                }
                Ok(Value::Array(values))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut object = Map::new();
                while let Some((key, UniqueValue(value))) = map.next_entry::<String, UniqueValue>()? {
                    if object.contains_key(&key) {
                        return Err(twice(&key));
                    }
                    object.insert(key, value);
                }
                Ok(Value::Object(object))
            }
        }
        deserializer.deserialize_any(AnyValue).map(UniqueValue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ordinary_json_is_read_as_serde_json_reads_it() {
        let text = r#"{"a": [1, -2, 3.5, null, true, "x\u00e9"], "b": {"c": {}}, "d": 1e400}"#;
        assert!(parse(text.as_bytes()).is_err(), "1e400 is no f64");
        let text = text.replace("1e400", "18446744073709551615");
        let expected: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(parse(text.as_bytes()).unwrap(), expected);
        assert_eq!(parse(b"1").unwrap(), json!(1));
    }

    #[test]
    fn a_name_that_occurs_twice_is_an_error_at_any_depth() {
        for text in [r#"{"a": 1, "a": 1}"#, r#"{"b": [{"a": 1, "c": 2, "a": 3}]}"#] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.starts_with("\"a\" occurs twice"), "{error}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error_not_a_stack_overflow() {
        let bomb = "[".repeat(1_000_000);
        assert!(parse(bomb.as_bytes()).unwrap_err().contains("recursion limit"));
        let bomb = r#"{"a":"#.repeat(1_000_000);
        assert!(parse(bomb.as_bytes()).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn another_value_is_no_object() {
        assert_eq!(
            parse_object(b"[1]").unwrap_err(),
            "expected a JSON object, found a list"
        );
    }
}
