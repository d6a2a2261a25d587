//! `[rac]`, and precisions by name.
use burn_nvfp4::{Precision, Rac};
use kernels_cubecl::{Granularity, Selection};

use super::{ConfigError, Layers, sections::MANY};

type Result<T> = std::result::Result<T, ConfigError>;

/// `[rac]`
#[derive(Clone, Debug)]
pub struct RacConfig {
    /// What is compensated, and how much of it.
    pub rac: Rac,
    /// Prompts that masks are calibrated on.
    pub calibration_prompts: usize,
    /// Steps between two calibrations; 0: once.
    pub recalibrate_every: usize,
}

impl RacConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let selections = [
            ("all", Selection::All),
            ("per_token", Selection::PerToken),
            ("calibrated", Selection::Calibrated),
        ];
        let granularities = [
            ("channel", Granularity::Channel),
            ("block16", Granularity::Block16),
            ("block64", Granularity::Block64),
        ];
        let fraction = layers.number("rac.fraction", "above 0, at most 1", |share| {
            share > 0.0 && share <= 1.0
        })?;
        Ok(Self {
            rac: Rac {
                selection: layers.choice("rac.selection", &selections)?,
                granularity: layers.choice("rac.granularity", &granularities)?,
                fraction: fraction as f32,
            },
            calibration_prompts: layers.count("rac.calibration_prompts", 1..=1_000_000)?,
            recalibrate_every: layers.count("rac.recalibrate_every", 0..=MANY)?,
        })
    }
}

/// The precisions, by the names that every setting and table uses.
pub const PRECISIONS: [&str; 5] = ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"];

/// A precision by its name; `rac` is what `w4a4_rac` compensates.
pub fn precision(name: &str, rac: Rac) -> Option<Precision> {
    match name {
        "high" => Some(Precision::High),
        "w4a16" => Some(Precision::W4A16),
        "w4a4" => Some(Precision::W4A4),
        "w4a4_rac" => Some(Precision::W4A4Rac(rac)),
        "fp8" => Some(Precision::Fp8),
        _ => None,
    }
}

/// The name of a precision, without what it compensates.
pub fn precision_name(precision: &Precision) -> &'static str {
    match precision {
        Precision::High => "high",
        Precision::W4A16 => "w4a16",
        Precision::W4A4 => "w4a4",
        Precision::W4A4Rac(_) => "w4a4_rac",
        Precision::Fp8 => "fp8",
    }
}

pub(super) fn read_precision(layers: &Layers, key: &str) -> Result<Precision> {
    let rac = RacConfig::read(layers)?.rac;
    precision(layers.text(key), rac).ok_or_else(|| layers.refuse(key, format!("one of {}", PRECISIONS.join(", "))))
}
