//! Problems in JSON lines.
use std::path::Path;

use burn_quads::dataset::{FieldNames, load_problems};

use crate::{
    harness::{Target, about},
    mutate::Form,
};

const TARGET: Target = Target {
    form: Form::Json,
    dictionary: &[
        "\"question\":",
        "\"answer\":",
        "question",
        "problem",
        "prompt",
        "answer",
        "solution",
        "#### 1",
        "\\\\boxed{1}",
        "\\boxed{",
        "\\u0000",
        "\\ud800",
        "\n",
        "\r\n",
        "null",
        "[",
        "{",
    ],
    accepted: &["byte_order_mark", "controls", "nested_whole", "number_long", "usual"],
    file: |_| "problems.jsonl",
    ..Target::new("dataset", read)
};

#[test]
fn no_line_breaks_loading() {
    TARGET.run();
}

fn read(folder: &Path, _: &[u8]) -> Result<(), String> {
    let path = folder.join("problems.jsonl");
    let problems = load_problems(&path, &FieldNames::default()).map_err(|error| about(&path, error))?;
    for problem in problems {
        assert!(
            !problem.prompt.trim().is_empty() && !problem.answer.is_empty(),
            "{problem:?}"
        );
    }
    Ok(())
}
