//! Precisions in configurations and in records.
mod by_hand;

use burn::{
    config::Config,
    record::{BinBytesRecorder, FullPrecisionSettings, NamedMpkBytesRecorder, PrecisionSettings, Record, Recorder},
    tensor::backend::Backend,
};
use burn_nvfp4::{Granularity, Precision, Rac, Selection};
use by_hand::B;

#[derive(Config, Debug, PartialEq)]
struct Settings {
    precision: Precision,
}

fn parse(json: &str) -> Result<Precision, String> {
    Settings::load_binary(json.as_bytes())
        .map(|s| s.precision)
        .map_err(|error| format!("{error:?}"))
}

fn all() -> [Precision; 6] {
    let rac = Rac {
        selection: Selection::PerToken,
        granularity: Granularity::Block16,
        fraction: 0.25,
    };
    [
        Precision::High,
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac::default()),
        Precision::W4A4Rac(rac),
        Precision::Fp8,
    ]
}

#[test]
fn names_and_tables_in_configurations() {
    for (name, precision) in ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"].into_iter().zip([
        Precision::High,
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac::default()),
        Precision::Fp8,
    ]) {
        assert_eq!(parse(&format!("{{\"precision\":\"{name}\"}}")), Ok(precision.clone()));
        let written = Settings::new(precision).to_string();
        assert_eq!(
            written.split_whitespace().collect::<String>(),
            format!("{{\"precision\":\"{name}\"}}")
        );
    }
    let table = r#"{"precision":{"w4a4_rac":{"selection":"per_token","granularity":"block16","fraction":0.25}}}"#;
    assert_eq!(parse(table), Ok(all()[4].clone()));
    assert_eq!(
        parse(&Settings::new(all()[4].clone()).to_string()),
        Ok(all()[4].clone())
    );
    let partial = r#"{"precision":{"w4a4_rac":{"selection":"calibrated"}}}"#;
    let calibrated = Rac {
        selection: Selection::Calibrated,
        ..Rac::default()
    };
    assert_eq!(parse(partial), Ok(Precision::W4A4Rac(calibrated)));

    let error = parse(r#"{"precision":"w4a5"}"#).unwrap_err();
    assert!(
        error.contains("unknown precision `w4a5`: expected high, w4a16, w4a4"),
        "{error}"
    );
    let error = parse(r#"{"precision":{"w4a4_rac":{"fractoin":0.5}}}"#).unwrap_err();
    assert!(error.contains("fractoin") && error.contains("fraction"), "{error}");
}

/// A record that is a precision.
struct Saved(Precision);
impl<B: Backend> Record<B> for Saved {
    type Item<S: PrecisionSettings> = Precision;
    fn into_item<S: PrecisionSettings>(self) -> Precision {
        self.0
    }
    fn from_item<S: PrecisionSettings>(item: Precision, _device: &B::Device) -> Self {
        Self(item)
    }
}

#[test]
fn binary_formats_keep_them_too() {
    let device = Default::default();
    for precision in all() {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let bytes: Vec<u8> = Recorder::<B>::record(&recorder, Saved(precision.clone()), ()).unwrap();
        let back: Saved = Recorder::<B>::load(&recorder, bytes, &device).unwrap();
        assert_eq!(back.0, precision);
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let bytes: Vec<u8> = Recorder::<B>::record(&recorder, Saved(precision.clone()), ()).unwrap();
        let back: Saved = Recorder::<B>::load(&recorder, bytes, &device).unwrap();
        assert_eq!(back.0, precision);
    }
}
