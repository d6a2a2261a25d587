//! NVFP4 folders whose bytes somebody changed: an error that names the file, or a model of finite weights; never a panic.
use burn::backend::Flex;
use burn_nvfp4::{Precision, checkpoint::Nvfp4Folder, safetensors_file::SafetensorsError};
use burn_quads::checkpoint::ModelFolder;
use proptest::prelude::*;
use std::{
    fs,
    path::{Path, PathBuf},
};

const FOLDERS: [&str; 3] = ["compressed_tensors/w4a16", "compressed_tensors/w4a4", "modelopt/w4a4"];
/// Bytes of the weights' header, in all three.
const HEADER: usize = 20_000;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/nvfp4_checkpoints")).join(name)
}

/// What becomes of one of the two files.
#[derive(Clone, Debug)]
enum Damage {
    /// Bytes of the weights: place as a share of the file's length, and values.
    Weights(Vec<(f64, u8)>),
    /// Bytes of the header.
    Header(Vec<(usize, u8)>),
    /// Bytes of `config.json`.
    Config(Vec<(f64, u8)>),
    /// The weights end early.
    Short(f64),
}

fn damage() -> impl Strategy<Value = Damage> {
    let bytes = || proptest::collection::vec((0.0..1.0, any::<u8>()), 1..20);
    // What is likely to matter in a header: digits, quotes, brackets and letters.
    let character = prop_oneof![4 => (b' '..=b'~').prop_map(|byte| byte), 1 => any::<u8>()];
    prop_oneof![
        bytes().prop_map(Damage::Weights),
        proptest::collection::vec((0..HEADER, character), 1..4).prop_map(Damage::Header),
        bytes().prop_map(Damage::Config),
        (0.0..1.0).prop_map(Damage::Short),
    ]
}

fn change(bytes: &mut [u8], changes: &[(f64, u8)]) {
    for (share, value) in changes {
        let at = (share * bytes.len() as f64) as usize;
        bytes[at] = *value;
    }
}

fn damaged(folder: &Path, from: &Path, damage: &Damage) {
    fs::create_dir_all(folder).unwrap();
    let mut config = fs::read(from.join("config.json")).unwrap();
    let mut weights = fs::read(from.join("model.safetensors")).unwrap();
    match damage {
        Damage::Weights(changes) => change(&mut weights, changes),
        Damage::Header(changes) => changes.iter().for_each(|(at, value)| weights[*at] = *value),
        Damage::Config(changes) => change(&mut config, changes),
        Damage::Short(share) => weights.truncate((share * weights.len() as f64) as usize),
    }
    fs::write(folder.join("config.json"), config).unwrap();
    fs::write(folder.join("model.safetensors"), weights).unwrap();
}

/// The packed layers, decoded.
fn decode(folder: &Path) -> Result<bool, SafetensorsError> {
    let Some(folder) = Nvfp4Folder::open(folder)? else {
        return Ok(true);
    };
    for module in folder.modules() {
        let layer = folder.layer(module)?.expect("a packed module");
        if !layer.dequantize().iter().all(|value| value.is_finite()) {
            return Ok(false);
        }
    }
    Ok(true)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_damaged_folder_is_refused_by_its_file_or_has_finite_weights(
        name in proptest::sample::select(&FOLDERS),
        damage in damage(),
    ) {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("nvfp4_hostile");
        damaged(&folder, &fixture(name), &damage);
        match decode(&folder) {
            Ok(finite) => prop_assert!(finite, "{damage:?}"),
            Err(error) => {
                let text = error.to_string();
                let named = ["config.json", "model.safetensors"].iter().any(|file| text.contains(file));
                prop_assert!(named || text.contains("nvfp4_hostile: "), "{text}");
                prop_assert!(text.len() < 1000, "{text}");
            }
        }
        // As a model: whatever is wrong with it, no panic.
        if let Ok(folder) = ModelFolder::open(&folder) {
            let loaded = folder.load_packed::<Flex>(&Precision::W4A16, None, &Default::default(), |_| {});
            let _ = loaded.map(|(model, audit)| (model, audit.packed()));
        }
    }
}
