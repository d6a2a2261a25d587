//! Where settings come from: the shipped defaults, then a file, then `--set`. The defaults are the schema: a key that
//! they do not have does not exist, and a value has the type of its default.
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    ops::RangeInclusive,
    path::Path,
};
use toml::{Table, Value};

use super::{ConfigError, suggest::unknown};

/// The shipped defaults, with a comment for every setting.
pub const DEFAULTS: &str = include_str!("../../default.toml");
/// What differs where a model is loaded.
const TEXT_DEFAULTS: &str = include_str!("../../text_defaults.toml");

/// Settings by dotted key, and where each came from.
#[derive(Debug)]
pub struct Layers {
    values: BTreeMap<String, Value>,
    origins: BTreeMap<String, String>,
    /// Keys that have been read: a setting that nothing reads would be a lie.
    read: RefCell<BTreeSet<String>>,
}

impl Layers {
    /// The shipped defaults.
    pub fn defaults() -> Self {
        let table: Table = DEFAULTS.parse().expect("a test reads the shipped defaults");
        let mut values = BTreeMap::new();
        flatten("", &table, &mut values);
        Self {
            values,
            origins: BTreeMap::new(),
            read: RefCell::default(),
        }
    }

    /// The defaults, a file over them, assignments over both. Where a model is loaded the defaults for that come between.
    pub fn of_user(file: Option<&Path>, assignments: &[String]) -> Result<Self, ConfigError> {
        let asked = |mut layers: Self| {
            if let Some(file) = file {
                layers.lay_file(file)?;
            }
            for assignment in assignments {
                layers.lay_assignment(assignment)?;
            }
            Ok(layers)
        };
        let layers = asked(Self::defaults())?;
        match layers.text("model.folder") {
            "" => Ok(layers),
            _ => asked(Self::text_defaults()),
        }
    }

    /// The shipped defaults for a model that is loaded.
    fn text_defaults() -> Self {
        let mut layers = Self::defaults();
        layers
            .lay_text(TEXT_DEFAULTS, "the defaults of a loaded model")
            .expect("a test reads the shipped defaults");
        layers.origins.clear();
        layers
    }

    /// Lays a TOML file over the settings.
    pub fn lay_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let origin = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Unreadable {
            path: origin.clone(),
            error,
        })?;
        self.lay_text(&text, &origin)
    }

    /// Lays TOML text over the settings; `origin` is what errors call it.
    pub fn lay_text(&mut self, text: &str, origin: &str) -> Result<(), ConfigError> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
            origin: origin.into(),
            // It means that the integers of TOML have a sign.
            message: error.to_string().trim_end().replace(
                "u64 value was too large",
                &format!("expected a whole number, at most {}", i64::MAX),
            ),
        })?;
        self.lay_table("", table, origin)
    }

    fn lay_table(&mut self, section: &str, table: Table, origin: &str) -> Result<(), ConfigError> {
        for (name, value) in table {
            let key = join(section, &name);
            match value {
                Value::Table(table) if self.is_section(&key) => self.lay_table(&key, table, origin)?,
                value => self.lay(key, value, origin)?,
            }
        }
        Ok(())
    }

    /// Lays one `section.key=value` over the settings. A value of a setting that is text needs no quotes.
    pub fn lay_assignment(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let origin = "--set";
        let Some((key, text)) = assignment.split_once('=') else {
            return Err(ConfigError::Assignment(assignment.into()));
        };
        let (key, text) = (key.trim(), text.trim());
        let parsed = format!("value = {text}")
            .parse::<Table>()
            .ok()
            .and_then(|mut table| table.remove("value"));
        // The parser refuses whole numbers of more than 64 bits, without a word on why.
        let digits = text.trim_start_matches(['+', '-']);
        if let (Some(default @ Value::Integer(_)), None) = (self.values.get(key), &parsed)
            && !digits.is_empty()
            && digits.bytes().all(|byte| byte.is_ascii_digit())
        {
            return Err(ConfigError::Value {
                key: key.into(),
                value: text.into(),
                origin: origin.into(),
                expected: match text.starts_with('-') {
                    true => format!("{}, at least {}", type_name(default), i64::MIN),
                    false => format!("{}, at most {}", type_name(default), i64::MAX),
                },
            });
        }
        let value = match (self.values.get(key), parsed) {
            (Some(Value::String(_)), Some(Value::String(text))) => Value::String(text),
            (Some(Value::String(_)), _) | (_, None) => Value::String(text.into()),
            (_, Some(value)) => value,
        };
        self.lay(key.into(), value, origin)
    }

    /// Lays one value over the setting `key`.
    pub fn lay(&mut self, key: String, value: Value, origin: &str) -> Result<(), ConfigError> {
        let Some(default) = self.values.get(&key) else {
            return Err(match self.is_section(&key) {
                true => ConfigError::Value {
                    value: "one value".into(),
                    origin: origin.into(),
                    expected: format!("settings, as {key}.… = …"),
                    key,
                },
                false => unknown(self.values.keys(), key, origin),
            });
        };
        let value = match (default, value) {
            (Value::Float(_), Value::Integer(whole)) => Value::Float(whole as f64),
            (_, value) => value,
        };
        if !default.same_type(&value) {
            return Err(ConfigError::Value {
                key,
                value: shown(&value),
                origin: origin.into(),
                expected: type_name(default).into(),
            });
        }
        self.values.insert(key.clone(), value);
        self.origins.insert(key, origin.into());
        Ok(())
    }

    /// Whether nothing was laid over the default of a setting.
    pub fn is_default(&self, key: &str) -> bool {
        !self.origins.contains_key(key)
    }

    /// Replaces a whole number; `origin` is what errors call it.
    pub(super) fn fit(&mut self, key: &str, count: usize, origin: &str) {
        let count = i64::try_from(count).expect("what memory holds is counted in 63 bits");
        self.values.insert(key.into(), Value::Integer(count));
        self.origins.insert(key.into(), origin.into());
    }

    fn is_section(&self, key: &str) -> bool {
        let prefix = format!("{key}.");
        self.values.keys().any(|known| known.starts_with(&prefix))
    }

    /// The defaults' text with these values in place of its own.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut section = String::new();
        for line in DEFAULTS.lines() {
            if let Some(header) = line.strip_prefix('[') {
                section = header.trim_end_matches(']').to_string();
            }
            match line.split_once(" = ").filter(|_| !line.starts_with('#')) {
                Some((name, _)) => {
                    let value = &self.values[&join(&section, name)];
                    text.push_str(&format!("{name} = {value}\n"));
                }
                None => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text
    }

    /// Keys with their values, in the order of the keys.
    pub fn values(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Keys that nothing has read.
    pub fn unread(&self) -> Vec<String> {
        let read = self.read.borrow();
        self.values.keys().filter(|key| !read.contains(*key)).cloned().collect()
    }

    fn value(&self, key: &str) -> &Value {
        self.read.borrow_mut().insert(key.to_string());
        self.values
            .get(key)
            .unwrap_or_else(|| panic!("default.toml has no {key}"))
    }

    /// The error for a value of `key` that is impossible.
    pub fn refuse(&self, key: &str, expected: impl Display) -> ConfigError {
        ConfigError::Value {
            key: key.into(),
            value: shown(&self.values[key]),
            origin: self.origins.get(key).cloned().unwrap_or_else(|| "default.toml".into()),
            expected: expected.to_string(),
        }
    }

    /// A whole number within a range.
    pub fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, ConfigError> {
        let whole = self
            .value(key)
            .as_integer()
            .and_then(|whole| usize::try_from(whole).ok());
        whole.filter(|whole| range.contains(whole)).ok_or_else(|| {
            let expected = format!("a whole number from {} to {}", range.start(), range.end());
            self.refuse(key, expected)
        })
    }

    /// A number that satisfies a condition, as it is and as f32; `expected` puts the condition into words. Never NaN nor
    /// infinite.
    pub fn number(&self, key: &str, expected: &str, holds: impl Fn(f64) -> bool) -> Result<f64, ConfigError> {
        let number = self
            .value(key)
            .as_float()
            .filter(|number| number.is_finite() && holds(*number))
            .ok_or_else(|| self.refuse(key, format!("a number, {expected}")))?;
        let single = f64::from(number as f32);
        match single.is_finite() && holds(single) {
            true => Ok(number),
            false => Err(self.refuse(key, format!("a number, {expected}, that f32 can hold"))),
        }
    }

    /// True or false.
    pub fn flag(&self, key: &str) -> bool {
        self.value(key).as_bool().expect("a value has the type of its default")
    }

    /// Text.
    pub fn text(&self, key: &str) -> &str {
        self.value(key).as_str().expect("a value has the type of its default")
    }

    /// One of a few names.
    pub fn choice<T: Clone>(&self, key: &str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let text = self.text(key);
        let choice = choices.iter().find(|(name, _)| *name == text);
        choice.map(|(_, choice)| choice.clone()).ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
            self.refuse(key, format!("one of {}", names.join(", ")))
        })
    }
}

fn join(section: &str, name: &str) -> String {
    if section.is_empty() {
        name.into()
    } else {
        format!("{section}.{name}")
    }
}

fn flatten(section: &str, table: &Table, values: &mut BTreeMap<String, Value>) {
    for (name, value) in table {
        match value {
            Value::Table(table) => flatten(&join(section, name), table, values),
            value => {
                values.insert(join(section, name), value.clone());
            }
        }
    }
}

/// A value as people write it: TOML writes 1e39 with all its zeros.
fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        value => value.to_string(),
    }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "text",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a section",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(assignment: &str) -> String {
        Layers::defaults().lay_assignment(assignment).unwrap_err().to_string()
    }

    #[test]
    fn a_setting_takes_the_last_value() {
        let mut layers = Layers::defaults();
        layers
            .lay_text(
                "[grpo]\nsteps = 3\nclip_low = 1\n[task.addition]\ndigits = 2",
                "mine.toml",
            )
            .unwrap();
        layers.lay_assignment("grpo.steps=4").unwrap();
        assert_eq!(layers.count("grpo.steps", 0..=9).unwrap(), 4);
        assert_eq!(layers.count("task.addition.digits", 0..=9).unwrap(), 2);
        assert_eq!(layers.number("grpo.clip_low", "", |_| true).unwrap(), 1.0);
    }

    #[test]
    fn text_needs_no_quotes_in_an_assignment() {
        for assignment in ["run.name=fast", "run.name = \"fast\"", "run.name='fast'"] {
            let mut layers = Layers::defaults();
            layers.lay_assignment(assignment).unwrap();
            assert_eq!(layers.text("run.name"), "fast");
        }
        let mut layers = Layers::defaults();
        layers.lay_assignment("run.name=5").unwrap();
        assert_eq!(layers.text("run.name"), "5");
        layers.lay_assignment("task.modular.operations=+-*").unwrap();
        assert_eq!(layers.text("task.modular.operations"), "+-*");
    }

    #[test]
    fn an_unknown_key_is_refused_with_what_was_meant() {
        assert_eq!(
            refused("grpo.step=4"),
            "unknown setting grpo.step (from --set): did you mean grpo.steps?"
        );
        assert_eq!(
            refused("grpo.learning_rate=1"),
            "unknown setting grpo.learning_rate (from --set): did you mean trainer.learning_rate?"
        );
        assert_eq!(
            refused("checkpoint.whenever=4"),
            "unknown setting checkpoint.whenever (from --set): [checkpoint] has checkpoint.every, checkpoint.keep"
        );
        assert_eq!(
            refused("x=4"),
            "unknown setting x (from --set): --print-config shows all settings"
        );
        let file = Layers::defaults()
            .lay_text("[gpro]\nsteps = 4", "mine.toml")
            .unwrap_err();
        assert_eq!(
            file.to_string(),
            "unknown setting gpro (from mine.toml): --print-config shows all settings"
        );
    }

    #[test]
    fn a_value_of_another_type_is_refused_with_the_key() {
        assert_eq!(
            refused("grpo.steps=many"),
            "grpo.steps = \"many\" (from --set): expected a whole number"
        );
        assert_eq!(
            refused("grpo.steps=1.5"),
            "grpo.steps = 1.5 (from --set): expected a whole number"
        );
        assert_eq!(
            refused("model.norm_topk_prob=1"),
            "model.norm_topk_prob = 1 (from --set): expected true or false"
        );
        assert_eq!(
            refused("grpo=1"),
            "grpo = one value (from --set): expected settings, as grpo.… = …"
        );
        assert_eq!(refused("grpo.steps"), "--set grpo.steps: expected section.key=value");
    }

    #[test]
    fn whole_numbers_beyond_64_bits_are_refused_with_the_bound() {
        assert_eq!(
            refused("run.seed=18446744073709551615"),
            "run.seed = 18446744073709551615 (from --set): expected a whole number, at most 9223372036854775807"
        );
        assert_eq!(
            refused("run.seed=-99999999999999999999"),
            "run.seed = -99999999999999999999 (from --set): expected a whole number, at least -9223372036854775808"
        );
        assert_eq!(
            refused("run.seed=-"),
            "run.seed = \"-\" (from --set): expected a whole number"
        );
        let file = Layers::defaults().lay_text("[run]\nseed = 18446744073709551615", "mine.toml");
        let error = file.unwrap_err().to_string();
        assert!(
            error.contains("line 2") && error.ends_with("expected a whole number, at most 9223372036854775807"),
            "{error}"
        );
    }

    #[test]
    fn impossible_values_name_the_range_and_where_the_value_is_from() {
        let mut layers = Layers::defaults();
        layers
            .lay_text("[grpo]\nsteps = -3\nclip_low = nan\nloss = \"ppo\"", "mine.toml")
            .unwrap();
        assert_eq!(
            layers.count("grpo.steps", 1..=9).unwrap_err().to_string(),
            "grpo.steps = -3 (from mine.toml): expected a whole number from 1 to 9"
        );
        assert_eq!(
            layers
                .number("grpo.clip_low", "0 to 1", |_| true)
                .unwrap_err()
                .to_string(),
            "grpo.clip_low = nan (from mine.toml): expected a number, 0 to 1"
        );
        assert_eq!(
            layers
                .choice("grpo.loss", &[("grpo", 1), ("dapo", 2)])
                .unwrap_err()
                .to_string(),
            "grpo.loss = \"ppo\" (from mine.toml): expected one of grpo, dapo"
        );
    }

    #[test]
    fn the_written_file_reads_back_and_keeps_the_comments() {
        let mut layers = Layers::defaults();
        for assignment in ["grpo.steps=7", "run.name=a \"quoted\" name", "grpo.kl_coefficient=1e-7"] {
            layers.lay_assignment(assignment).unwrap();
        }
        let text = layers.to_toml();
        assert!(text.contains("\nsteps = 7\n") && text.contains("# Optimizer steps on each batch of rollouts."));
        let mut read = Layers::defaults();
        read.lay_text(&text, "config.toml").unwrap();
        assert_eq!(read.values, layers.values);
        assert_eq!(
            Layers::defaults().to_toml().parse::<Table>().unwrap(),
            DEFAULTS.parse::<Table>().unwrap()
        );
    }
}
