//! Completions and reference answers.
use std::{path::Path, time::Duration};

use burn_quads::rewards::{exact_reward, final_answer, math_reward, same_answer};

use crate::{
    harness::Target,
    mutate::{Form, MAX_BYTES},
};

const TARGET: Target = Target {
    form: Form::Text,
    dictionary: &[
        "\\boxed{",
        "\\boxed ",
        "}",
        "{",
        "\\{",
        "\\}",
        "####",
        "answer",
        "Answer: ",
        " is ",
        "**",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "\\frac",
        "\\sqrt[",
        "\\text{",
        "\\left(",
        "\\cup",
        "\\pi",
        "\\infty",
        "^{",
        "_",
        "(",
        ")",
        "]",
        ",",
        " or ",
        "-",
        "!",
        "9",
        ".",
        "e9",
        "%",
        "$",
        "½",
        "\u{a0}",
        "\n---\n",
    ],
    accepted: &[
        "answer_colon",
        "answer_tags",
        "bold",
        "boxed",
        "boxed_last_wins",
        "boxed_list",
        "characters_of_four_bytes",
        "commas_many",
        "expression",
        "hashes",
        "interval",
        "mixed_number",
        "scientific",
        "set",
        "tuple",
        "units",
    ],
    time: Duration::from_millis(10),
    ..Target::new("reward", read)
};

#[test]
fn no_completion_breaks_judging() {
    TARGET.run();
}

/// Accepted where the answer is right.
fn read(_: &Path, input: &[u8]) -> Result<(), String> {
    let mut text = String::from_utf8_lossy(input).into_owned();
    // What is no UTF-8 has grown.
    text.truncate(text.floor_char_boundary(MAX_BYTES));
    let (completion, reference) = text.rsplit_once("\n---\n").unwrap_or((&text, "1"));
    let (math, exact) = (math_reward(completion, reference), exact_reward(completion, reference));
    for reward in [math, exact] {
        assert!(reward == 0.0 || reward == 1.0, "{reward}");
    }
    let answer = final_answer(completion);
    let right = answer.as_deref().is_some_and(|answer| same_answer(answer, reference));
    assert_eq!(math == 1.0, right);
    match right {
        true => Ok(()),
        false => Err(format!("{answer:?} is not {reference:?}")),
    }
}
