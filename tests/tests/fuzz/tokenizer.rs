//! `tokenizer.json`.
use std::{path::Path, time::Duration};

use burn_quads::text::TextTokenizer;

use crate::{
    harness::{Target, about},
    mutate::Form,
};

const TARGET: Target = Target {
    form: Form::Json,
    dictionary: &[
        "BPE",
        "Unigram",
        "WordPiece",
        "WordLevel",
        "ByteLevel",
        "Metaspace",
        "Split",
        "Sequence",
        "Replace",
        "Regex",
        "TemplateProcessing",
        "special_tokens",
        "vocab",
        "merges",
        "unk_token",
        "<unk>",
        "",
        "a",
        "\u{120}",
        "\\s+",
        "(?i:a)|b",
        "[",
        "{",
    ],
    accepted: &[
        "byte_level_bpe",
        "id_of_added_shared",
        "ids_huge",
        "ids_shared",
        "normalizers",
        "padded_without_end",
        "prepend_long",
        "regex_empty",
        "template",
        "template_without_text",
        "token_empty",
        "truncated_to_nothing",
        "unigram",
        "unigram_not_finite",
        "vocab_empty",
        "word_level",
        "word_piece",
    ],
    time: Duration::from_secs(1),
    // The library compiles patterns of up to 10 MiB, more than once.
    memory: 64 << 20,
    file: |_| "tokenizer.json",
    ..Target::new("tokenizer", read)
};

#[test]
fn no_tokenizer_breaks_text() {
    TARGET.run();
}

/// Accepted where it turns texts into ids and back.
fn read(folder: &Path, _: &[u8]) -> Result<(), String> {
    let tokenizer = TextTokenizer::open(folder).map_err(|error| about(folder, error))?;
    let long = "a".repeat(200);
    let texts = ["", "a", "ab ba  <|end|>é\u{1F600}\n", &long];
    let results = texts.map(|text| {
        let ids = tokenizer.encode(text).map_err(|error| about(folder, error))?;
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
        tokenizer.decode(&ids).map(drop).map_err(|error| about(folder, error))
    });
    let mut stream = tokenizer.stream();
    for id in [0, 1, 2, 3, 4, u32::MAX] {
        let _ = stream.push(id).map_err(|error| about(folder, error));
    }
    let _ = stream.finish().map_err(|error| about(folder, error));
    results.into_iter().collect()
}
