//! Completions and reference answers.
use std::{path::Path, time::Duration};

use burn_quads::rewards::math_reward;

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
        "boxed_in_boxed",
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
    // It is made of all the other functions; the bound on time is its own.
    match math_reward(completion, reference) {
        1.0 => Ok(()),
        0.0 => Err("another answer".into()),
        reward => panic!("a reward of {reward}"),
    }
}
