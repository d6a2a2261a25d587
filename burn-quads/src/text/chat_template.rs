//! The template that turns a conversation into the text that a model was trained on.
use super::{TextError, python_json};
use burn_nvfp4::safetensors_file::{regular_file, strict_json};
use minijinja::{
    Environment, Error, ErrorKind, Value, filters,
    value::{Kwargs, StringInput},
};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    thread,
};

const JINJA_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";
/// Templates are pages of text; the configuration lists added tokens.
const MAX_BYTES: u64 = 16 << 20;
const NAME: &str = "chat";
/// Ten times the largest template that is in use.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// Stack to compile a template with, for each of its bytes: the library descends once for each operator (`- - - 1`).
const STACK_PER_BYTE: usize = 4 << 10;
/// Steps of a rendering. A turn takes a hundred or so: what takes more has no end in sight.
const FUEL: u64 = 1_000_000;
/// Spaces by which a template may indent.
const MAX_INDENT: usize = 64;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`, or what the template knows besides.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl ChatMessage {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// The chat template of a Hub folder.
///
/// It sees what transformers shows it: `messages`, `add_generation_prompt`, the special tokens by name (`eos_token`, …),
/// and further variables; Python's string methods, `raise_exception`, and a `tojson` that spells as Python does.
///
/// A template is a program of whoever made the folder. It reaches neither files nor network, and ends after a million
/// steps; what it builds up in memory is not bounded.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    path: PathBuf,
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or else `chat_template` (the one named `default` where there are several) in
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// When neither is there, or it is damaged.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let folder = folder.as_ref();
        let (jinja, config_path) = (folder.join(JINJA_FILE), folder.join(CONFIG_FILE));
        let config = match config_path.symlink_metadata() {
            Err(_) => Map::new(),
            Ok(_) => {
                let text = regular_file::read(&config_path, MAX_BYTES)?;
                strict_json::parse_object(&text).map_err(|problem| TextError::Damaged {
                    path: config_path.clone(),
                    problem,
                })?
            }
        };
        let (path, source) = if jinja.symlink_metadata().is_ok() {
            let source = regular_file::read_text(&jinja, MAX_BYTES)?;
            (jinja, source)
        } else {
            let source = template_in(&config).ok_or_else(|| TextError::NoChatTemplate { folder: folder.into() })?;
            (config_path, source)
        };
        let environment = compile(source).map_err(|problem| TextError::Template {
            path: path.clone(),
            problem,
        })?;
        Ok(Self {
            environment,
            path,
            special_tokens: special_tokens(&config),
        })
    }

    /// The text of a conversation. With `add_generation_prompt` it ends where the assistant's next turn begins.
    /// `variables` are what else the template knows, such as `enable_thinking`.
    ///
    /// # Errors
    /// When the template refuses the conversation, or uses what is not known here.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        variables: &BTreeMap<String, Json>,
    ) -> Result<String, TextError> {
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        let tokens = self.special_tokens.iter();
        context.extend(tokens.map(|(name, token)| (name.as_str(), Value::from(token.as_str()))));
        context.extend(
            variables
                .iter()
                .map(|(name, value)| (name.as_str(), Value::from_serialize(value))),
        );
        context.insert("messages", Value::from_serialize(messages));
        context.insert("add_generation_prompt", add_generation_prompt.into());
        let template = self.environment.get_template(NAME).expect("it was added");
        template.render(context).map_err(|error| TextError::Template {
            path: self.path.clone(),
            problem: describe(&error),
        })
    }
}

/// Compiles a template on a stack that suffices for whatever is in it; a stack that overflows ends the process.
fn compile(source: String) -> Result<Environment<'static>, String> {
    if source.len() > MAX_TEMPLATE_BYTES {
        let bytes = source.len();
        return Err(format!(
            "{bytes} bytes, more than the {MAX_TEMPLATE_BYTES} that are accepted here"
        ));
    }
    let stack = (1 << 20) + STACK_PER_BYTE * source.len();
    let compile = move || {
        let mut environment = environment();
        let added = environment.add_template_owned(NAME, source);
        added.map_err(|error| describe(&error)).map(|()| environment)
    };
    let thread = thread::Builder::new().stack_size(stack).spawn(compile);
    let compiled = thread.map_err(|error| error.to_string())?.join();
    compiled.unwrap_or_else(|_| Err("the template's library cannot read it".into()))
}

/// As transformers sets Jinja up.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("indent", indent);
    environment.add_filter("tojson", |value: Value, options: Kwargs| -> Result<Value, Error> {
        let indent = bounded_indent(options.get("indent")?)?;
        options.assert_all_used()?;
        let json = python_json::dumps(&value, indent)
            .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
        Ok(Value::from_safe_string(json))
    });
    environment
}

/// Jinja's `indent`, of at most [`MAX_INDENT`] spaces.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    bounded_indent(width)?;
    bounded_indent(options.peek("width")?)?;
    filters::indent(text, width, first, blank, options)
}

/// The library would make as many spaces as a template asks for.
fn bounded_indent(width: Option<usize>) -> Result<Option<usize>, Error> {
    match width.filter(|width| *width > MAX_INDENT) {
        Some(width) => {
            let problem = format!("an indent of {width}, at most {MAX_INDENT} are accepted here");
            Err(Error::new(ErrorKind::InvalidOperation, problem))
        }
        None => Ok(width),
    }
}

/// Message and line.
fn describe(error: &Error) -> String {
    let message = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    match error.line() {
        Some(line) => format!("line {line}: {message}"),
        None => message,
    }
}

fn template_in(config: &Map<String, Json>) -> Option<String> {
    let template = config.get("chat_template")?;
    let template = match template.as_array() {
        None => template,
        Some(several) => several
            .iter()
            .find(|template| template["name"] == "default")?
            .get("template")?,
    };
    template.as_str().map(str::to_string)
}

/// Tokens by name: a string, or an object that holds it.
fn special_tokens(config: &Map<String, Json>) -> BTreeMap<String, String> {
    let tokens = config.iter().filter(|(name, _)| name.ends_with("_token"));
    let text = |token: &Json| {
        token
            .as_str()
            .or_else(|| token.get("content")?.as_str())
            .map(str::to_string)
    };
    tokens
        .filter_map(|(name, token)| Some((name.clone(), text(token)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, variables: Json) -> Result<String, String> {
        let template = ChatTemplate {
            environment: compile(source.to_string())?,
            path: "chat_template.jinja".into(),
            special_tokens: BTreeMap::from([("eos_token".into(), "</s>".into())]),
        };
        let variables = variables.as_object().unwrap().clone().into_iter().collect();
        let messages = [ChatMessage::new("user", "a <b> \"c\" é")];
        template
            .render(&messages, true, &variables)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn tojson_spells_as_python_does() {
        let source = "{{ messages[0].content | tojson }} {{ x | tojson }}\n{{ y | tojson(indent=2) }}";
        let text = render(source, json!({"x": {"a": [1, 2.5, null, true]}, "y": [1]}));
        assert_eq!(
            text.unwrap(),
            "\"a <b> \\\"c\\\" é\" {\"a\": [1, 2.5, null, true]}\n[\n  1\n]"
        );
    }

    #[test]
    fn blocks_leave_no_lines_and_strings_have_pythons_methods() {
        let source = "{% for m in messages %}\n  {% if m.content.startswith('a') %}\n{{ m.role.upper() }}\n  {% endif %}\n{% endfor %}\n{{ eos_token }}{{ undefined_name }}\n";
        assert_eq!(render(source, json!({})).unwrap(), "USER\n</s>");
    }

    #[test]
    fn what_a_template_refuses_and_what_is_unknown_is_said_with_its_line() {
        let error = render("\n{{ raise_exception('no tools') }}", json!({})).unwrap_err();
        assert_eq!(error, "the chat template in chat_template.jinja: line 2: no tools");
        let error = render("{{ strftime_now('%Y') }}", json!({})).unwrap_err();
        assert!(error.contains("strftime_now"), "{error}");
        let error = render("{% if %}", json!({})).unwrap_err();
        assert!(error.starts_with("line 1: "), "{error}");
    }

    #[test]
    fn a_template_without_end_ends() {
        let endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        assert!(render(endless, json!({})).is_err());
        let long = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
        let error = render(long, json!({})).unwrap_err();
        assert!(error.contains("ran out of fuel"), "{error}");
    }

    #[test]
    fn long_chains_of_operators_do_not_overflow_the_stack() {
        for (head, link, tail) in [
            ("", "- ", "1"),
            ("", "not ", "1"),
            ("1", "+1", ""),
            ("1", "**1", ""),
            ("x", ".a", ""),
            ("x", "|trim", ""),
            ("x", "[0]", ""),
            ("1", " if 1 else 1", ""),
        ] {
            let times = (MAX_TEMPLATE_BYTES - 20) / link.len();
            let _ = render(&format!("{{{{ {head}{}{tail} }}}}", link.repeat(times)), json!({}));
        }
        let error = render(&" ".repeat(MAX_TEMPLATE_BYTES + 1), json!({})).unwrap_err();
        assert!(error.starts_with("262145 bytes, more than"), "{error}");
    }

    #[test]
    fn an_indent_beyond_any_page_is_refused() {
        for source in [
            "{{ messages | tojson(indent=99999999999999) }}",
            "{{ 'a\nb' | indent(99999999999999) }}",
            "{{ 'a\nb' | indent(width=99999999999999) }}",
        ] {
            let error = render(source, json!({})).unwrap_err();
            assert!(error.contains("an indent of 99999999999999, at most 64"), "{error}");
        }
        let text = render("{{ 'a\nb\n\nc' | indent(2) }}{{ 'a\nb' | indent(1, true) }}", json!({}));
        assert_eq!(text.unwrap(), "a\n  b\n\n  c a\n b");
    }
}
