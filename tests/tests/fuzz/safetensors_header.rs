//! Headers of safetensors files, and indices of shards.
use std::{fs, path::Path};

use burn_nvfp4::safetensors_file::{INDEX_FILE, SINGLE_FILE, SafetensorsFolder};

use crate::{
    harness::{Target, about},
    mutate::Form,
};

const TARGET: Target = Target {
    form: Form::Safetensors,
    dictionary: &[
        "__metadata__",
        "dtype",
        "shape",
        "data_offsets",
        "F32",
        "BF16",
        "F8_E4M3",
        "F4",
        "U8",
        "BOOL",
        "\"a\":",
        "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
        "weight_map",
        "shard.safetensors",
        "../",
        "\\u0000",
        "[",
        "{",
    ],
    accepted: &[
        "whole",
        "metadata",
        "no_tensors",
        "shape_empty_and_huge",
        "name_with_controls",
        "index",
    ],
    prepare,
    file: |input| {
        if input.starts_with(b"{") {
            INDEX_FILE
        } else {
            SINGLE_FILE
        }
    },
    ..Target::new("safetensors_header", read)
};

#[test]
fn no_header_and_no_index_breaks_reading() {
    TARGET.run();
}

/// The shard that an index may name: one tensor `a`.
fn prepare(folder: &Path) {
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  "#;
    let length = (header.len() as u64).to_le_bytes();
    fs::write(
        folder.join("shard.safetensors"),
        [&length[..], header, &[0; 4]].concat(),
    )
    .unwrap();
}

fn read(folder: &Path, input: &[u8]) -> Result<(), String> {
    let opened = SafetensorsFolder::open(folder).map_err(|error| about(folder, error))?;
    let mut bytes = 0;
    for tensor in opened.tensors() {
        bytes += tensor.bytes.len();
        let elements = tensor.shape().iter().product::<usize>();
        assert_eq!(
            8 * tensor.bytes.len(),
            elements * tensor.dtype().bitsize(),
            "{:?}",
            tensor.info
        );
        match tensor.to_f32() {
            Ok(values) => assert_eq!(values.len(), elements),
            Err(error) => drop(about(folder, error)),
        }
    }
    assert!(input.starts_with(b"{") || bytes < input.len());
    Ok(())
}
