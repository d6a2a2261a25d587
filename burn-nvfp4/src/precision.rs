//! How a linear layer computes: the format of its weight and of its activations.
use burn_backend::quantization::{BlockSize, QuantLevel, QuantMode, QuantParam, QuantScheme, QuantStore, QuantValue};
use kernels_cubecl::{Activation, Compensation, Granularity, ResidualMask, Selection};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, MapAccess, Visitor},
};
use std::{fmt, str::FromStr};

use crate::PackError;

/// Storage of a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// E2M1 codes, an E4M3 scale for 16 values along `d_in`, an f32 scale a tensor or group: 4.5 bits a weight.
    Nvfp4,
    /// E4M3 codes and an f32 scale an output channel: 8 bits a weight.
    Fp8,
}

impl WeightFormat {
    /// The scheme that Burn's API shows for such a tensor. It names the format; it has no room for the outer scale.
    pub fn scheme(self) -> QuantScheme {
        let (value, param, store, level) = match self {
            Self::Nvfp4 => (
                QuantValue::E2M1,
                QuantParam::UE4M3,
                QuantStore::PackedNative(0),
                QuantLevel::Block(BlockSize::new([kernels_cubecl::BLOCK as u8])),
            ),
            Self::Fp8 => (
                QuantValue::E4M3,
                QuantParam::F32,
                QuantStore::Native,
                QuantLevel::Tensor,
            ),
        };
        QuantScheme {
            value,
            param,
            store,
            level,
            mode: QuantMode::Symmetric,
        }
    }
    /// The format that a scheme names, if it is one of ours.
    pub fn from_scheme(scheme: &QuantScheme) -> Option<Self> {
        [Self::Nvfp4, Self::Fp8]
            .into_iter()
            .find(|format| format.scheme() == *scheme)
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "nvfp4",
            Self::Fp8 => "fp8",
        })
    }
}

/// Residual activation compensation (RAC): which part of the activations' quantization residual is quantized a second
/// time and added (QUADS, residual activation compensation).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rac {
    /// How channels are chosen.
    pub selection: Selection,
    /// What is chosen: channels or blocks of them.
    pub granularity: Granularity,
    /// The share that is chosen, in (0, 1]. Unused when all are.
    pub fraction: f32,
}

impl Default for Rac {
    /// Every channel: the least error, and in decoding about the cost of half (`docs/decisions/0004`).
    fn default() -> Self {
        Self {
            selection: Selection::All,
            granularity: Granularity::Channel,
            fraction: 0.5,
        }
    }
}

/// Precision of a linear layer.
///
/// As text, in TOML and on the command line: `high`, `w4a16`, `w4a4`, `w4a4_rac`, `fp8`; with settings,
/// `w4a4_rac(per_token, block16, 0.25)` or a table `{ w4a4_rac = { selection = "per_token", … } }`.
#[derive(Clone, Debug, PartialEq)]
pub enum Precision {
    /// Weights and activations stay as they are.
    High,
    /// NVFP4 weights, activations in full precision.
    W4A16,
    /// NVFP4 weights and activations.
    W4A4,
    /// NVFP4 weights and activations, with residual activation compensation.
    W4A4Rac(Rac),
    /// FP8 (E4M3) weights and activations: the baseline.
    Fp8,
}

impl Precision {
    /// How the weight is stored; `None` when it stays dense.
    pub fn weight_format(&self) -> Option<WeightFormat> {
        match self {
            Self::High => None,
            Self::W4A16 | Self::W4A4 | Self::W4A4Rac(_) => Some(WeightFormat::Nvfp4),
            Self::Fp8 => Some(WeightFormat::Fp8),
        }
    }
    /// How activations enter the product.
    ///
    /// # Errors
    ///
    /// [`PackError::MissingMask`] for calibrated compensation without a mask, [`PackError::Fraction`] for a share
    /// outside (0, 1].
    pub fn activation(&self, mask: Option<&ResidualMask>) -> Result<Activation, PackError> {
        Ok(match self {
            Self::High | Self::W4A16 => Activation::Full,
            Self::W4A4 => Activation::Nvfp4,
            Self::Fp8 => Activation::Fp8,
            Self::W4A4Rac(rac) => Activation::Compensated(match rac.selection {
                Selection::All => Compensation::All,
                Selection::Calibrated => Compensation::Mask(mask.ok_or(PackError::MissingMask)?.clone()),
                Selection::PerToken => {
                    if !(rac.fraction > 0.0 && rac.fraction <= 1.0) {
                        return Err(PackError::Fraction { fraction: rac.fraction });
                    }
                    Compensation::PerToken {
                        granularity: rac.granularity,
                        fraction: rac.fraction,
                    }
                }
            }),
        })
    }
}

const SELECTIONS: [(&str, Selection); 3] = [
    ("all", Selection::All),
    ("calibrated", Selection::Calibrated),
    ("per_token", Selection::PerToken),
];
const GRANULARITIES: [(&str, Granularity); 3] = [
    ("channel", Granularity::Channel),
    ("block16", Granularity::Block16),
    ("block64", Granularity::Block64),
];

fn name<T: PartialEq + Copy>(table: &[(&'static str, T)], value: T) -> &'static str {
    table.iter().find(|(_, v)| *v == value).map_or("?", |(name, _)| name)
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::High => f.write_str("high"),
            Self::W4A16 => f.write_str("w4a16"),
            Self::W4A4 => f.write_str("w4a4"),
            Self::W4A4Rac(rac) if *rac == Rac::default() => f.write_str("w4a4_rac"),
            Self::W4A4Rac(rac) => write!(
                f,
                "w4a4_rac({}, {}, {})",
                name(&SELECTIONS, rac.selection),
                name(&GRANULARITIES, rac.granularity),
                rac.fraction
            ),
            Self::Fp8 => f.write_str("fp8"),
        }
    }
}

/// A text that names no [`Precision`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown precision `{text}`: expected high, w4a16, w4a4, w4a4_rac, fp8 or w4a4_rac(all | calibrated | per_token, channel | block16 | block64, fraction in (0, 1])"
)]
pub struct ParsePrecisionError {
    text: String,
}

impl FromStr for Precision {
    type Err = ParsePrecisionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text.trim()).ok_or_else(|| ParsePrecisionError { text: text.to_string() })
    }
}

fn parse(text: &str) -> Option<Precision> {
    Some(match text {
        "high" => Precision::High,
        "w4a16" => Precision::W4A16,
        "w4a4" => Precision::W4A4,
        "w4a4_rac" => Precision::W4A4Rac(Rac::default()),
        "fp8" => Precision::Fp8,
        _ => {
            let settings = text.strip_prefix("w4a4_rac(")?.strip_suffix(')')?;
            let mut settings = settings.split(',').map(str::trim);
            let selection = settings.next()?;
            let selection = SELECTIONS.iter().find(|(name, _)| *name == selection)?.1;
            let granularity = settings.next()?;
            let granularity = GRANULARITIES.iter().find(|(name, _)| *name == granularity)?.1;
            let fraction: f32 = settings.next()?.parse().ok()?;
            if settings.next().is_some() || !(fraction > 0.0 && fraction <= 1.0) {
                return None;
            }
            Precision::W4A4Rac(Rac {
                selection,
                granularity,
                fraction,
            })
        }
    })
}

/// The form of binary formats, which cannot tell a name from a table.
#[derive(Serialize, Deserialize)]
enum Plain {
    High,
    W4A16,
    W4A4,
    W4A4Rac(Rac),
    Fp8,
}

/// A name, or a table with the settings of compensation. Not serde's `untagged`, whose errors name no key.
struct Readable;

impl<'de> Visitor<'de> for Readable {
    type Value = Precision;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a precision: a name such as \"w4a4\", or { w4a4_rac = { selection, granularity, fraction } }")
    }
    fn visit_str<E: de::Error>(self, name: &str) -> Result<Precision, E> {
        name.parse().map_err(E::custom)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<Precision, A::Error> {
        let precision = match table.next_key::<String>()?.as_deref() {
            Some("w4a4_rac") => Precision::W4A4Rac(table.next_value()?),
            Some(key) => return Err(de::Error::unknown_field(key, &["w4a4_rac"])),
            None => return Err(de::Error::missing_field("w4a4_rac")),
        };
        match table.next_key::<String>()? {
            Some(key) => Err(de::Error::unknown_field(&key, &["w4a4_rac"])),
            None => Ok(precision),
        }
    }
}

impl Serialize for Precision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return match self {
                Self::W4A4Rac(rac) if *rac != Rac::default() => serializer.collect_map([("w4a4_rac", rac)]),
                precision => serializer.collect_str(precision),
            };
        }
        match self {
            Self::High => Plain::High,
            Self::W4A16 => Plain::W4A16,
            Self::W4A4 => Plain::W4A4,
            Self::W4A4Rac(rac) => Plain::W4A4Rac(*rac),
            Self::Fp8 => Plain::Fp8,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Precision {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return deserializer.deserialize_any(Readable);
        }
        Ok(match Plain::deserialize(deserializer)? {
            Plain::High => Self::High,
            Plain::W4A16 => Self::W4A16,
            Plain::W4A4 => Self::W4A4,
            Plain::W4A4Rac(rac) => Self::W4A4Rac(rac),
            Plain::Fp8 => Self::Fp8,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Precision; 7] = [
        Precision::High,
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac {
            selection: Selection::All,
            granularity: Granularity::Channel,
            fraction: 0.5,
        }),
        Precision::W4A4Rac(Rac {
            selection: Selection::PerToken,
            granularity: Granularity::Block64,
            fraction: 0.25,
        }),
        Precision::W4A4Rac(Rac {
            selection: Selection::Calibrated,
            granularity: Granularity::Block16,
            fraction: 1.0,
        }),
        Precision::Fp8,
    ];

    #[test]
    fn text_round_trips() {
        for precision in ALL {
            assert_eq!(precision.to_string().parse(), Ok(precision.clone()), "{precision}");
        }
        let names: Vec<String> = ALL.iter().map(ToString::to_string).collect();
        assert_eq!(names[..4], ["high", "w4a16", "w4a4", "w4a4_rac"]);
        assert_eq!(names[4], "w4a4_rac(per_token, block64, 0.25)");
        for wrong in [
            "",
            "W4A4",
            "w4a4_rac()",
            "w4a4_rac(all, channel)",
            "w4a4_rac(all, channel, 0)",
            "bf16",
        ] {
            let error = wrong.parse::<Precision>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("unknown precision `{wrong}`: expected high, w4a16")),
                "{error}"
            );
        }
    }

    #[test]
    fn the_share_of_channels_is_checked() {
        let rac = |fraction| {
            Precision::W4A4Rac(Rac {
                selection: Selection::PerToken,
                fraction,
                ..Rac::default()
            })
        };
        for fraction in [0.0, -0.5, 1.5, f32::NAN] {
            assert!(
                matches!(rac(fraction).activation(None), Err(PackError::Fraction { .. })),
                "{fraction}"
            );
        }
        assert!(rac(1.0).activation(None).is_ok());
    }

    #[test]
    fn schemes_name_formats() {
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            assert_eq!(WeightFormat::from_scheme(&format.scheme()), Some(format));
        }
        assert_eq!(WeightFormat::from_scheme(&QuantScheme::default()), None);
    }
}
