//! Tokenizers and chat templates, against transformers.
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn_quads::text::{ChatMessage, ChatTemplate, TextTokenizer};
use proptest::prelude::*;
use serde_json::Value;

fn fixture() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/text_tiny"))
}

fn reference() -> Value {
    serde_json::from_slice(&fs::read(fixture().join("reference.json")).unwrap()).unwrap()
}

fn temporary(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hf_text").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn messages(value: &Value) -> Vec<ChatMessage> {
    let text = |message: &Value, field: &str| message[field].as_str().unwrap().to_string();
    let turns = value.as_array().unwrap().iter();
    turns
        .map(|message| ChatMessage::new(text(message, "role"), text(message, "content")))
        .collect()
}

#[test]
fn texts_are_encoded_and_decoded_as_by_transformers() {
    let tokenizer = TextTokenizer::open(fixture()).unwrap();
    assert_eq!(
        (tokenizer.vocab_size(), tokenizer.token_id("<|im_end|>")),
        (128, Some(127))
    );
    for example in reference()["texts"].as_array().unwrap() {
        let (text, ids) = (example["text"].as_str().unwrap(), ids(&example["ids"]));
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(
            tokenizer.decode_with_special_tokens(&ids).unwrap(),
            example["decoded"],
            "{text:?}"
        );
        assert_eq!(tokenizer.decode(&ids).unwrap(), example["without_special"], "{text:?}");
    }
}

#[test]
fn chats_are_rendered_and_encoded_as_by_transformers() {
    let tokenizer = TextTokenizer::open(fixture()).unwrap();
    let template = ChatTemplate::open(fixture()).unwrap();
    for example in reference()["chats"].as_array().unwrap() {
        let mut options: BTreeMap<String, Value> = serde_json::from_value(example["options"].clone()).unwrap();
        let prompt = options.remove("add_generation_prompt").unwrap().as_bool().unwrap();
        let text = template
            .render(&messages(&example["messages"]), prompt, &options)
            .unwrap();
        assert_eq!(text, example["text"].as_str().unwrap());
        assert_eq!(tokenizer.encode_rendered(&text).unwrap(), ids(&example["ids"]));
    }
}

#[test]
fn a_template_of_its_own_file_comes_first() {
    let folder = temporary("jinja");
    fs::copy(
        fixture().join("tokenizer_config.json"),
        folder.join("tokenizer_config.json"),
    )
    .unwrap();
    fs::write(
        folder.join("chat_template.jinja"),
        "{{ messages | length }}{{ eos_token }}{{ pad_token }}\n",
    )
    .unwrap();
    let template = ChatTemplate::open(&folder).unwrap();
    let text = template
        .render(&[ChatMessage::new("user", "a")], true, &BTreeMap::new())
        .unwrap();
    assert_eq!(text, "1<|im_end|><|endoftext|>");

    fs::remove_file(folder.join("chat_template.jinja")).unwrap();
    let several = r#"{"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    fs::write(folder.join("tokenizer_config.json"), several).unwrap();
    let template = ChatTemplate::open(&folder).unwrap();
    assert_eq!(template.render(&[], true, &BTreeMap::new()).unwrap(), "d");
}

#[test]
fn a_conversation_that_the_template_refuses_is_an_error_with_its_words() {
    let template = ChatTemplate::open(fixture()).unwrap();
    let render = |messages: &[ChatMessage]| {
        template
            .render(messages, true, &BTreeMap::new())
            .unwrap_err()
            .to_string()
    };
    let error = render(&[ChatMessage::new("tool", "a")]);
    assert!(error.contains("tokenizer_config.json: line 7: no role tool"), "{error}");
    let error = render(&[ChatMessage::new("user", "a"), ChatMessage::new("system", "b")]);
    assert!(error.ends_with("the system speaks first"), "{error}");
}

#[test]
fn a_stream_gives_whole_characters_as_soon_as_they_are_certain() {
    let tokenizer = TextTokenizer::open(fixture()).unwrap();
    let ids = tokenizer.encode("caf\u{e9} \u{1F600}!").unwrap();
    let mut stream = tokenizer.stream();
    let pieces: Vec<_> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(pieces, ["c", "a", "f", "é", " ", "", "", "", "\u{1F600}", "!"]);
    assert_eq!(stream.finish().unwrap(), "");

    // Cut in the middle of a character.
    let mut stream = tokenizer.stream();
    let text: String = ids[..7].iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(text + &stream.finish().unwrap(), "café \u{FFFD}");
}

#[test]
fn files_that_are_absent_damaged_or_no_files_are_named() {
    let folder = temporary("damaged");
    let tokenizer = |folder: &Path| TextTokenizer::open(folder).unwrap_err().to_string();
    let template = |folder: &Path| ChatTemplate::open(folder).unwrap_err().to_string();
    assert!(tokenizer(&folder).contains("tokenizer.json: No such file"));
    assert!(template(&folder).ends_with("the model was not made for chats"));

    std::os::unix::fs::symlink("/dev/zero", folder.join("tokenizer.json")).unwrap();
    assert!(tokenizer(&folder).ends_with("tokenizer.json: is a device, expected a file"));
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    for damaged in [
        "",
        "{}",
        "[1]",
        r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}"#,
    ] {
        fs::write(folder.join("tokenizer.json"), damaged).unwrap();
        let error = tokenizer(&folder);
        assert!(
            error.starts_with(&format!("{}: ", folder.join("tokenizer.json").display())),
            "{error}"
        );
    }
    fs::write(folder.join("tokenizer.json"), "[".repeat(1_000_000)).unwrap();
    tokenizer(&folder);

    for (config, expected) in [
        (r#"{"chat_template": "{% if %}"}"#, "tokenizer_config.json: line 1: "),
        (
            r#"{"chat_template": "a", "chat_template": "b"}"#,
            "tokenizer_config.json: \"chat_template\" occurs twice",
        ),
        (r#"{"chat_template": 3}"#, "the model was not made for chats"),
        ("[", "tokenizer_config.json: EOF"),
    ] {
        fs::write(folder.join("tokenizer_config.json"), config).unwrap();
        let error = template(&folder);
        assert!(error.contains(expected), "{error}");
    }
    fs::remove_file(folder.join("tokenizer_config.json")).unwrap();
    fs::create_dir(folder.join("chat_template.jinja")).unwrap();
    assert!(template(&folder).ends_with("chat_template.jinja: is a folder, expected a file"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_text_of_known_characters_survives(text in "[ -~\n\u{e9}\u{1F600}]{0,200}") {
        let tokenizer = TextTokenizer::open(fixture()).unwrap();
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(&tokenizer.decode_with_special_tokens(&ids).unwrap(), &text);
        let mut stream = tokenizer.stream();
        let mut streamed = String::new();
        for id in &ids {
            streamed += &stream.push(*id).unwrap();
        }
        streamed += &stream.finish().unwrap();
        prop_assert_eq!(streamed, tokenizer.decode(&ids).unwrap());
    }

    #[test]
    fn no_ids_make_decoding_panic(ids in prop::collection::vec(0u32..300, 0..100)) {
        let tokenizer = TextTokenizer::open(fixture()).unwrap();
        let mut stream = tokenizer.stream();
        for id in &ids {
            stream.push(*id).unwrap();
        }
        stream.finish().unwrap();
        tokenizer.decode(&ids).unwrap();
    }

    #[test]
    fn no_change_of_tokenizer_json_ends_the_process(
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..8, prop::sample::select(&["", "0", "\"", "{", "}", "[", "null", "-1", "999999999999"][..])), 1..4),
    ) {
        let mut text = fs::read_to_string(fixture().join("tokenizer.json")).unwrap();
        for (index, remove, piece) in changes {
            let floor = |text: &str, mut at: usize| { while !text.is_char_boundary(at) { at -= 1 } at };
            let at = floor(&text, index.index(text.len()));
            let end = floor(&text, (at + remove).min(text.len()));
            text.replace_range(at..end.max(at), piece);
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hf_text/any_tokenizer");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("tokenizer.json"), text).unwrap();
        if let Ok(tokenizer) = TextTokenizer::open(&folder) {
            let _ = tokenizer.encode("what is 1 + 1? é").map(|ids| tokenizer.decode(&ids));
        }
    }
}
