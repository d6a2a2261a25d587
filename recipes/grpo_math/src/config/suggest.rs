//! What somebody may have meant by a setting that does not exist.
use super::ConfigError;

/// The error for a key that is none of those known.
pub(super) fn unknown<'a>(known: impl Iterator<Item = &'a String> + Clone, key: String, origin: &str) -> ConfigError {
    let nearest = known
        .clone()
        .map(|known| (strsim::levenshtein(&key, known), known))
        .min();
    let same_name = known
        .clone()
        .find(|known| known.rsplit('.').next() == key.rsplit('.').next());
    // A few slips of the finger, or the right name in the wrong section.
    let meant = match nearest {
        Some((slips, known)) if slips <= 1 + key.len() / 6 => Some(known),
        _ => same_name,
    };
    let section = key.rsplit_once('.').map(|(section, _)| section).unwrap_or_default();
    let there = known.filter(|known| known.rsplit_once('.').is_some_and(|(of, _)| of == section));
    let there: Vec<_> = there.map(String::as_str).collect();
    ConfigError::Unknown {
        origin: origin.into(),
        hint: match (meant, there.is_empty()) {
            (Some(meant), _) => format!("did you mean {meant}?"),
            (None, false) => format!("[{section}] has {}", there.join(", ")),
            (None, true) => "--print-config shows all settings".into(),
        },
        key,
    }
}
