//! Problems in free text, from JSON lines: what `grpo_math --data` trains and evaluates on.
//!
//! | fields | whose | the reference answer is |
//! |---|---|---|
//! | `question`, `answer` | GSM8K | behind the last `####`, else the whole field |
//! | `problem`, `solution` | MATH | in the last `\boxed{…}` |
//! | `prompt`, `answer` | anyone's | as for `question` |
use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use burn_nvfp4::safetensors_file::{SafetensorsError, regular_file, strict_json};
use serde_json::{Map, Value};

use crate::rewards::final_answer;

/// A question and its right answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextProblem {
    /// What the policy is asked.
    pub prompt: String,
    /// What [`math_reward`](crate::rewards::math_reward) compares with.
    pub answer: String,
}

/// The names of the fields, where they are not the usual ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldNames {
    /// Of the prompt; by default the first there is of `question`, `problem`, `prompt`.
    pub prompt: Option<String>,
    /// Of the answer; by default the first there is of `answer`, `solution`.
    pub answer: Option<String>,
}

const PROMPTS: [&str; 3] = ["question", "problem", "prompt"];
const ANSWERS: [&str; 2] = ["answer", "solution"];

/// Why problems could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The file is absent, or no file.
    #[error(transparent)]
    File(#[from] SafetensorsError),
    /// The file system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
    /// A line is no problem.
    #[error("{}, line {line}: {problem}", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// There is nothing in it.
    #[error("{}: no problems: expected one JSON object a line", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Reads a problem from every line that is not blank.
///
/// # Errors
/// [`DatasetError`] names the file, the line and the field. Nothing is skipped silently.
pub fn load_problems(path: &Path, fields: &FieldNames) -> Result<Vec<TextProblem>, DatasetError> {
    let io = |source| DatasetError::Io {
        path: path.into(),
        source,
    };
    let mut problems = vec![];
    let (file, _) = regular_file::open(path)?;
    for (index, line) in BufReader::new(file).split(b'\n').enumerate() {
        let line = line.map_err(io)?;
        let refuse = |problem| DatasetError::Line {
            path: path.into(),
            line: index + 1,
            problem,
        };
        let line = utf8(&line, index == 0).map_err(refuse)?;
        if line.trim().is_empty() {
            continue;
        }
        problems.push(text_problem(line, fields).map_err(refuse)?);
    }
    match problems.is_empty() {
        true => Err(DatasetError::Empty { path: path.into() }),
        false => Ok(problems),
    }
}

/// A line's text. Some editors begin a file with a byte order mark, which is no part of its text.
fn utf8(line: &[u8], first: bool) -> Result<&str, String> {
    if first && (line.starts_with(&[0xFF, 0xFE]) || line.starts_with(&[0xFE, 0xFF])) {
        return Err("begins with a byte order mark of UTF-16; expected UTF-8".into());
    }
    let line = line
        .strip_prefix("\u{feff}".as_bytes())
        .filter(|_| first)
        .unwrap_or(line);
    std::str::from_utf8(line).map_err(|error| {
        let at = error.valid_up_to();
        format!("byte 0x{:02X} at position {} is not UTF-8", line[at], at + 1)
    })
}

fn text_problem(line: &str, fields: &FieldNames) -> Result<TextProblem, String> {
    let value = strict_json::parse(line.as_bytes())?;
    let object = value.as_object().ok_or("expected a JSON object")?;
    let (name, prompt) = field(object, fields.prompt.as_deref(), &PROMPTS)?;
    let Value::String(prompt) = prompt else {
        return Err(format!("{name}: expected text, got {}", kind(prompt)));
    };
    if prompt.trim().is_empty() {
        return Err("the prompt is empty".into());
    }
    let (name, answer) = field(object, fields.answer.as_deref(), &ANSWERS)?;
    let answer = match answer {
        Value::String(text) => reference_answer(name, text)?,
        Value::Number(number) => number.to_string(),
        other => return Err(format!("{name}: expected text or a number, got {}", kind(other))),
    };
    Ok(TextProblem {
        prompt: prompt.clone(),
        answer,
    })
}

/// The field that was asked for, or the first of the usual ones.
fn field<'a>(
    object: &'a Map<String, Value>,
    asked: Option<&'a str>,
    usual: &[&'static str],
) -> Result<(&'a str, &'a Value), String> {
    let found = match asked {
        Some(name) => object.get(name).map(|value| (name, value)),
        None => usual
            .iter()
            .find_map(|name| object.get(*name).map(|value| (*name, value))),
    };
    let expected = asked.map_or_else(|| usual.join(" or "), String::from);
    let names: Vec<&str> = object.keys().take(8).map(String::as_str).collect();
    found.ok_or_else(|| format!("no field {expected}; it has {}", names.join(", ")))
}

/// The answer in the text of a field: behind `####`, in a box, or all of it. A worked solution must mark its answer.
fn reference_answer(name: &str, text: &str) -> Result<String, String> {
    let worked = name == "solution";
    let marked = ["####", "\\boxed", "\\fbox"].iter().any(|mark| text.contains(mark));
    let answer = match (marked, worked) {
        (true, _) => final_answer(text).unwrap_or_default(),
        (false, true) => return Err(format!("{name}: no \\boxed{{…}} and no #### in it")),
        (false, false) => text.trim().to_string(),
    };
    match answer.is_empty() {
        true => Err(format!("{name}: the answer is empty")),
        false => Ok(answer),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(name: &str, text: &[u8], fields: &FieldNames) -> Result<Vec<TextProblem>, String> {
        let path = std::env::temp_dir().join(format!("burn-quads-dataset-{}-{name}.jsonl", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let problems = load_problems(&path, fields).map_err(|error| error.to_string());
        std::fs::remove_file(&path).unwrap();
        problems.map_err(|error| error.replace(&path.display().to_string(), "FILE"))
    }

    fn problem(prompt: &str, answer: &str) -> TextProblem {
        TextProblem {
            prompt: prompt.into(),
            answer: answer.into(),
        }
    }

    #[test]
    fn the_usual_formats() {
        let text = r#####"{"question": "2 and 2?", "answer": "2+2 = <<2+2=4>>4\n#### 4"}

{"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": 1}
{"prompt": "Six?", "answer": 6}
{"prompt": "Day?", "answer": " Monday "}
"#####;
        let expected = vec![
            problem("2 and 2?", "4"),
            problem("Half?", "\\frac{1}{2}"),
            problem("Six?", "6"),
            problem("Day?", "Monday"),
        ];
        assert_eq!(load("usual", text.as_bytes(), &FieldNames::default()), Ok(expected));
    }

    #[test]
    fn the_encoding_is_utf8_and_a_line_that_is_not_is_named() {
        let good = r#"{"question": "é?", "answer": "1"}"#;
        let load = |bytes: &[u8]| load("utf8", bytes, &FieldNames::default());
        let marked = [b"\xEF\xBB\xBF", good.as_bytes(), b"\r\n"].concat();
        assert_eq!(load(&marked), Ok(vec![problem("é?", "1")]));
        let latin = [good.as_bytes(), b"\n{\"question\": \"\xE9?\", \"answer\": \"1\"}"].concat();
        assert_eq!(
            load(&latin).unwrap_err(),
            "FILE, line 2: byte 0xE9 at position 15 is not UTF-8"
        );
        for bytes in [b"\xFF\xFE{\0".as_slice(), b"\xFE\xFF\0{"] {
            let expected = "FILE, line 1: begins with a byte order mark of UTF-16; expected UTF-8";
            assert_eq!(load(bytes).unwrap_err(), expected);
        }
        let within = [good.as_bytes(), b"\n\xEF\xBB\xBF", good.as_bytes()].concat();
        assert!(
            load(&within).unwrap_err().starts_with("FILE, line 2: "),
            "a mark is at the beginning only"
        );
    }

    #[test]
    fn fields_can_be_named() {
        let fields = FieldNames {
            prompt: Some("q".into()),
            answer: Some("a".into()),
        };
        let text = br#"{"q": "1?", "a": "1", "question": "other", "answer": "other"}"#;
        assert_eq!(load("named", text, &fields), Ok(vec![problem("1?", "1")]));
        let error = load("unnamed", br#"{"question": "1?", "answer": "1"}"#, &fields).unwrap_err();
        assert_eq!(error, "FILE, line 1: no field q; it has answer, question");
    }

    #[test]
    fn a_line_that_is_no_problem_is_named() {
        let good = r#"{"question": "1?", "answer": "1"}"#;
        for (line, problem) in [
            ("{", "EOF while parsing an object at line 1 column 1"),
            ("[1]", "expected a JSON object"),
            (
                r#"{"question": "1?", "answer": "1", "answer": "2"}"#,
                "\"answer\" occurs twice at line 1 column 48",
            ),
            (
                r#"{"answer": "1"}"#,
                "no field question or problem or prompt; it has answer",
            ),
            (
                r#"{"question": ["1"], "answer": "1"}"#,
                "question: expected text, got a list",
            ),
            (r#"{"question": " ", "answer": "1"}"#, "the prompt is empty"),
            (r#"{"question": "1?"}"#, "no field answer or solution; it has question"),
            (
                r#"{"question": "1?", "answer": null}"#,
                "answer: expected text or a number, got null",
            ),
            (
                "{\"question\": \"1?\", \"answer\": \"####\"}",
                "answer: the answer is empty",
            ),
            (
                r#"{"problem": "1?", "solution": "it is 1"}"#,
                "solution: no \\boxed{…} and no #### in it",
            ),
            (
                r#"{"problem": "1?", "solution": "\\boxed{1"}"#,
                "solution: the answer is empty",
            ),
        ] {
            let error = load("line", format!("{good}\n\n{line}\n").as_bytes(), &FieldNames::default()).unwrap_err();
            assert_eq!(error, format!("FILE, line 3: {problem}"));
        }
        let error = load("empty", b"\n \n", &FieldNames::default()).unwrap_err();
        assert_eq!(error, "FILE: no problems: expected one JSON object a line");
        let error = load_problems(Path::new("/dev/zero"), &FieldNames::default()).unwrap_err();
        assert_eq!(error.to_string(), "/dev/zero: is a device, expected a file");
        let deep = "[".repeat(100_000);
        assert!(
            load("deep", deep.as_bytes(), &FieldNames::default())
                .unwrap_err()
                .contains("recursion limit")
        );
    }
}
