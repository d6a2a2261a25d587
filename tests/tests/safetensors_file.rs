//! Checkpoint files of others: whatever is in them, reading ends in tensors or in an error that says where.
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

use burn_nvfp4::safetensors_file::{
    Dtype, INDEX_FILE, SINGLE_FILE, SafetensorsFile, SafetensorsFolder, SafetensorsWriter, TensorSpec, regular_file,
};
use proptest::prelude::*;
use safetensors::{SafeTensors, tensor::TensorView};

fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join("safetensors_file")
        .join(name);
    if path.exists() {
        std::fs::remove_dir_all(&path).unwrap();
    }
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn fixture() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/qwen3moe_tiny/model.safetensors"
    ))
}

/// A file of a header and `data` bytes.
fn file_of(path: &Path, header: &str, data: usize) -> PathBuf {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    std::fs::write(path, bytes).unwrap();
    path.into()
}

#[track_caller]
fn refused(path: &Path) -> String {
    let error = SafetensorsFile::open(path).expect_err("must be refused").to_string();
    let prefix = format!("{}: ", path.display());
    error
        .strip_prefix(&prefix)
        .unwrap_or_else(|| panic!("{error} does not start with the file"))
        .to_string()
}

#[test]
fn a_file_reads_as_the_reference_implementation_reads_it() {
    let bytes = std::fs::read(fixture()).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let file = SafetensorsFile::open(&fixture()).unwrap();
    assert_eq!(file.tensors().len(), expected.len());
    for tensor in file.tensors() {
        let expected = expected.tensor(tensor.name()).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (expected.dtype(), expected.shape()));
        assert!(tensor.bytes == expected.data(), "{}", tensor.name());
    }
    assert_eq!(file.metadata(), &BTreeMap::from([("format".into(), "pt".into())]));
    assert!(file.tensor("model.norm.bias").is_none());
}

#[test]
fn floats_of_three_widths_become_f32_exactly() {
    let path = folder("floats").join("a.safetensors");
    let data = [0x00, 0x3C, 0x01, 0x80];
    let view = |dtype| TensorView::new(dtype, vec![2], &data).unwrap();
    let single = TensorView::new(Dtype::F32, vec![1], &data).unwrap();
    let views = [
        ("half", view(Dtype::F16)),
        ("brain", view(Dtype::BF16)),
        ("single", single),
        ("int", view(Dtype::I16)),
    ];
    safetensors::serialize_to_file(views, None, &path).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    let floats = |name| file.tensor(name).unwrap().to_f32();
    assert_eq!(floats("half").unwrap(), [1.0, -2f32.powi(-24)]);
    assert_eq!(floats("brain").unwrap(), [2f32.powi(-7), -f32::from_bits(0x0001_0000)]);
    assert_eq!(floats("single").unwrap(), [f32::from_bits(0x8001_3C00)]);
    let error = floats("int").unwrap_err().to_string();
    assert!(
        error.ends_with("a.safetensors: int: I16, expected F32, BF16 or F16"),
        "{error}"
    );
}

#[test]
fn damaged_headers_are_refused_with_the_tensor_at_fault() {
    let path = folder("headers").join("a.safetensors");
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let a = |entry: String| format!(r#"{{"a":{entry}}}"#);
    let f32 = |shape: &str, offsets: &str| a(entry("F32", shape, offsets));
    let max = u64::MAX;
    for (header, expected) in [
        (f32("[2]", "[0,8]"), "16 bytes of tensors, the header describes 8"),
        (f32("[4]", "[0,24]"), "a: bytes 0..24 are not within the 16 of the file"),
        (
            f32("[4]", &format!("[0,{max}]")),
            "a: bytes 0..18446744073709551615 are not within the 16",
        ),
        (f32("[4]", "[16,0]"), "a: bytes 16..0 are not within"),
        (
            f32("[3]", "[0,16]"),
            "a: F32 [3] needs 12 bytes, the header gives it 16",
        ),
        (f32("[4]", "[4,16]"), "a: bytes 4..16 leave a hole"),
        (
            f32(&format!("[{max},{max}]"), "[0,16]"),
            "a: F32 [18446744073709551615, 18446744073709551615] is larger than any memory",
        ),
        (
            f32(&format!("[{}]", max / 4 + 1), "[0,16]"),
            "is larger than any memory",
        ),
        (f32("[-4]", "[0,16]"), "a: the header is damaged: invalid value"),
        (f32("[4.0]", "[0,16]"), "a: the header is damaged: invalid type"),
        (
            f32("[1,1,1,1,1,1,1,1,4]", "[0,16]"),
            "a: the header is damaged: invalid length 9, expected at most 8 dimensions",
        ),
        (f32("4", "[0,16]"), "a: the header is damaged: invalid type"),
        (
            a(entry("F31", "[4]", "[0,16]")),
            "a: the header is damaged: unknown variant `F31`",
        ),
        (
            a(r#"{"dtype":"F32","shape":[4]}"#.into()),
            "a: the header is damaged: missing field `data_offsets`",
        ),
        (
            a(r#"{"dtype":"F32","shape":[4],"data_offsets":[0,16],"b":1}"#.into()),
            "a: the header is damaged: unknown field",
        ),
        (
            format!(r#"{{"a":{0},"a":{0}}}"#, entry("F32", "[4]", "[0,16]")),
            "a: the header is damaged: \"a\" occurs twice",
        ),
        (
            format!(
                r#"{{"a":{0},"b":{1}}}"#,
                entry("F32", "[4]", "[0,16]"),
                entry("F32", "[2]", "[8,16]")
            ),
            "b: bytes 8..16 overlap the tensor before, expected to start at 16",
        ),
        (
            r#"{"__metadata__":{"a":1}}"#.into(),
            "__metadata__: the header is damaged: invalid type",
        ),
        (
            r#"{"__metadata__":{"a":"1","a":"2"}}"#.into(),
            "__metadata__: the header is damaged: \"a\" occurs twice",
        ),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), "occurs twice"),
        ("[]".into(), "the header is damaged: invalid type: sequence"),
        ("".into(), "the header is damaged: EOF"),
        (f32("[4]", "[0,16]") + "x", "the header is damaged: trailing characters"),
        (r#"{"a":"#.repeat(50_000), "a: the header is damaged"),
        ("[".repeat(50_000), "the header is damaged"),
        (
            a(format!(r#"{{"shape":{}"#, "[".repeat(50_000))),
            "a: the header is damaged",
        ),
    ] {
        let error = refused(&file_of(&path, &header, 16));
        assert!(error.contains(expected), "{header:.80}: {error}");
    }
    std::fs::write(&path, b"\x10\0\0\0\0\0\0\0{\"\xFF\xFE\":{}}       ").unwrap();
    assert!(refused(&path).contains("the header is damaged"), "not UTF-8");
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let path = folder("cut").join("a.safetensors");
    let bytes = std::fs::read(fixture()).unwrap();
    for len in [0, 1, 7, 8, 9, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..len]).unwrap();
        refused(&path);
    }
    std::fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
    assert!(refused(&path).contains("bytes of tensors, the header describes"));
}

#[test]
fn a_header_longer_than_its_file_allocates_nothing() {
    let path = folder("length").join("a.safetensors");
    for (length, expected) in [
        (1u64, "a header of 1 bytes does not fit into a file of 8"),
        (99_999_999, "does not fit into a file of 8"),
        (100_000_001, "more than the 100000000 of the format"),
        (u64::MAX, "a header of 18446744073709551615 bytes, more than"),
    ] {
        std::fs::write(&path, length.to_le_bytes()).unwrap();
        assert!(refused(&path).contains(expected));
    }
}

#[test]
fn tensors_without_elements_are_read() {
    let path = folder("empty").join("a.safetensors");
    let header = r#"{"b":{"dtype":"F32","shape":[0,9],"data_offsets":[4,4]},"c":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}  "#;
    let file = SafetensorsFile::open(&file_of(&path, header, 4)).unwrap();
    let names: Vec<_> = file
        .tensors()
        .map(|tensor| (tensor.name().to_string(), tensor.bytes.len()))
        .collect();
    assert_eq!(names, [("a".into(), 0), ("c".into(), 4), ("b".into(), 0)]);
    let file = SafetensorsFile::open(&file_of(&path, "{}", 0)).unwrap();
    assert_eq!(file.tensors().len(), 0);
}

#[cfg(unix)]
#[test]
fn links_to_files_work_and_folders_pipes_and_devices_are_refused() {
    let folder = folder("links");
    let link = |target: &Path| {
        let path = folder.join("link.safetensors");
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink(target, &path).unwrap();
        path
    };
    SafetensorsFile::open(&link(&fixture())).unwrap();
    assert_eq!(refused(&link(&folder)), "is a folder, expected a file");
    assert_eq!(refused(&link(Path::new("/dev/zero"))), "is a device, expected a file");
    assert!(refused(&link(Path::new("nowhere"))).contains("No such file"));
    let pipe = folder.join("pipe.safetensors");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    assert_eq!(refused(&pipe), "is a pipe, expected a file");
    let error = regular_file::read(&link(Path::new("/dev/zero")), 10)
        .unwrap_err()
        .to_string();
    assert!(error.ends_with("is a device, expected a file"), "{error}");
    let error = regular_file::read(&fixture(), 10).unwrap_err().to_string();
    assert!(
        error.ends_with("bytes, more than the 10 that are accepted here"),
        "{error}"
    );
}

/// A folder of two shards with an index, and the index's text.
fn sharded(name: &str) -> (PathBuf, String) {
    let folder = folder(name);
    let data = [1u8; 8];
    let view = || TensorView::new(Dtype::F32, vec![2], &data).unwrap();
    safetensors::serialize_to_file([("a", view()), ("b", view())], None, &folder.join("1.safetensors")).unwrap();
    safetensors::serialize_to_file([("c", view())], None, &folder.join("2.safetensors")).unwrap();
    let index =
        r#"{"metadata":{"total_size":24},"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"}}"#;
    std::fs::write(folder.join(INDEX_FILE), index).unwrap();
    (folder, index.into())
}

#[test]
fn shards_are_found_through_their_index() {
    let (folder, _) = sharded("shards");
    let checkpoint = SafetensorsFolder::open(&folder).unwrap();
    assert_eq!(checkpoint.files().len(), 2);
    let names: Vec<_> = checkpoint.tensors().map(|tensor| tensor.name().to_string()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(checkpoint.tensor("c").unwrap().bytes, [1; 8]);
    assert!(checkpoint.tensor("d").is_none());
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let (folder, index) = sharded("bad_index");
    for (from, to, expected) in [
        (
            r#""c":"2"#,
            r#""c":"1"#,
            "1.safetensors: c: not there, though model.safetensors.index.json lists it",
        ),
        (
            r#""b":"1"#,
            r#""b":"2"#,
            "1.safetensors: b: the index says it lies in 2.safetensors",
        ),
        (
            r#","b":"1.safetensors""#,
            "",
            "1.safetensors: b: the index does not list it",
        ),
        (r#""c":"2"#, r#""c":"3"#, "3.safetensors: No such file"),
        (
            r#""c":"2"#,
            r#""c":"../2"#,
            r#"weight_map names "../2.safetensors", which is no file of this folder"#,
        ),
        (
            r#""c":"2.safetensors""#,
            r#""c":"/dev/zero""#,
            "which is no file of this folder",
        ),
        (
            r#""c":"2.safetensors""#,
            r#""c":"..""#,
            "which is no file of this folder",
        ),
        (r#""c":"2"#, r#""b":"2"#, r#""b" occurs twice"#),
        (r#""c":"2.safetensors""#, r#""c":2"#, "invalid type"),
        ("weight_map", "weights", "missing field `weight_map`"),
    ] {
        let changed = index.replacen(from, to, 1);
        assert_ne!(changed, index);
        std::fs::write(folder.join(INDEX_FILE), changed).unwrap();
        let error = SafetensorsFolder::open(&folder).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.starts_with(&folder.display().to_string()), "{error}");
    }
}

#[test]
fn a_folder_without_weights_is_refused() {
    let folder = folder("nothing");
    let error = SafetensorsFolder::open(&folder).unwrap_err().to_string();
    assert!(
        error.ends_with("holds neither model.safetensors nor model.safetensors.index.json"),
        "{error}"
    );
    std::fs::copy(fixture(), folder.join(SINGLE_FILE)).unwrap();
    assert_eq!(SafetensorsFolder::open(&folder).unwrap().files().len(), 1);
}

#[test]
fn what_is_written_equals_the_reference_implementation_byte_for_byte_in_any_order() {
    let folder = folder("writer");
    let bytes = std::fs::read(fixture()).unwrap();
    let file = SafetensorsFile::open(&fixture()).unwrap();
    let specs: Vec<_> = file
        .tensors()
        .map(|tensor| TensorSpec {
            name: tensor.name().into(),
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
        })
        .collect();
    let path = folder.join("a.safetensors");
    let mut writer = SafetensorsWriter::create(&path, specs, file.metadata().clone()).unwrap();
    for tensor in file.tensors().collect::<Vec<_>>().into_iter().rev() {
        writer.write(tensor.name(), tensor.bytes).unwrap();
    }
    assert!(!path.exists(), "not before it is whole");
    writer.finish().unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);

    let data = [0u8; 8];
    let names = ["é \"quoted\"", "b", "a", "z"];
    let dtypes = [Dtype::F32, Dtype::U8, Dtype::BF16, Dtype::U8];
    let views = || {
        let pairs = names.into_iter().zip(dtypes);
        pairs.map(|(name, dtype)| (name, TensorView::new(dtype, vec![64 / dtype.bitsize()], &data).unwrap()))
    };
    let metadata = HashMap::from([("with \"quotes\"".to_string(), "and\nlines".to_string())]);
    let expected = safetensors::serialize(views(), Some(metadata.clone())).unwrap();
    let specs = views().map(|(name, view)| TensorSpec {
        name: name.into(),
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
    });
    let mut writer = SafetensorsWriter::create(&path, specs.collect(), metadata.into_iter().collect()).unwrap();
    names.iter().for_each(|name| writer.write(name, &data).unwrap());
    writer.finish().unwrap();
    assert!(std::fs::read(&path).unwrap() == expected);
}

#[test]
fn a_file_that_was_not_written_whole_does_not_exist() {
    let folder = folder("partial");
    let path = folder.join("a.safetensors");
    let spec = |name: &str, shape: Vec<usize>| TensorSpec {
        name: name.into(),
        dtype: Dtype::F32,
        shape,
    };
    let create = |specs| SafetensorsWriter::create(&path, specs, BTreeMap::new());
    let mut writer = create(vec![spec("a", vec![2]), spec("b", vec![1])]).unwrap();
    writer.write("a", &[0; 8]).unwrap();
    for (name, bytes, expected) in [
        ("a", 8, "a: it was written before"),
        ("b", 8, "b: F32 [1] has 4 bytes, got 8"),
        ("c", 8, "c: the file was not made to hold it"),
    ] {
        let error = writer.write(name, &vec![0; bytes]).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    }
    let error = writer.finish().unwrap_err().to_string();
    assert!(
        error.ends_with("b: the file was made to hold it, and it was not written"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");

    for (specs, expected) in [
        (vec![spec("a", vec![2]), spec("a", vec![1])], "a: occurs twice"),
        (
            vec![spec("a", vec![usize::MAX, 2])],
            "a: larger than any memory, or no whole bytes",
        ),
        (
            vec![spec("__metadata__", vec![])],
            "__metadata__: the format keeps this name for itself",
        ),
    ] {
        let error = create(specs).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

/// A small file with tensors of several types.
fn small() -> Vec<u8> {
    let data = [3u8; 64];
    let view = |dtype, shape: &[usize], bytes: usize| TensorView::new(dtype, shape.to_vec(), &data[..bytes]).unwrap();
    let views = [
        ("model.a.weight", view(Dtype::F32, &[2, 3], 24)),
        ("model.b.weight", view(Dtype::BF16, &[4], 8)),
        ("model.c.weight_scale", view(Dtype::F8_E4M3, &[2, 2], 4)),
        ("model.d", view(Dtype::F32, &[0, 5], 0)),
    ];
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize(views, Some(metadata)).unwrap()
}

/// Reads everything that the file offers.
fn read_all(path: &Path) {
    match SafetensorsFile::open(path) {
        Ok(file) => {
            let len = std::fs::metadata(path).unwrap().len() as usize;
            let total: usize = file.tensors().map(|tensor| tensor.bytes.len()).sum();
            assert!(total <= len);
            for tensor in file.tensors() {
                assert!(file.tensor(tensor.name()).is_some());
                if let Ok(floats) = tensor.to_f32() {
                    assert_eq!(floats.len(), tensor.shape().iter().product::<usize>());
                }
            }
        }
        Err(error) => assert!(error.to_string().starts_with(&path.display().to_string()), "{error}"),
    }
}

/// Pieces that damage a header in telling ways.
const PIECES: [&str; 16] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "0",
    "-1",
    "18446744073709551615",
    "1e999",
    "null",
    "\"F32\"",
    "\"a\":",
    "\\u0000",
    " ",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn no_change_of_bytes_makes_reading_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = small();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("changed_bytes.safetensors");
        std::fs::write(&path, bytes).unwrap();
        read_all(&path);
    }

    #[test]
    fn no_change_of_the_header_makes_reading_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, prop::sample::select(&PIECES[..])), 1..6),
    ) {
        let bytes = small();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = String::from_utf8(bytes[8..8 + len].to_vec()).unwrap();
        for (index, remove, piece) in changes {
            let at = index.index(header.len());
            let end = (at + remove).min(header.len());
            header.replace_range(at..end, piece);
        }
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(&bytes[8 + len..]);
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("changed_header.safetensors");
        std::fs::write(&path, file).unwrap();
        read_all(&path);
    }

    #[test]
    fn no_bytes_at_all_make_reading_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("any_bytes.safetensors");
        std::fs::write(&path, bytes).unwrap();
        read_all(&path);
    }
}
