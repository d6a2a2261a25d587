//! The binary, on a tiny model with a tokenizer of its own.
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use burn_quads::text::{ChatMessage, ChatTemplate, TextTokenizer};

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures"))
}

/// A whole folder, of links as in the Hub's cache.
fn model(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("generate").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    for file in [
        "qwen3moe_tiny/config.json",
        "qwen3moe_tiny/model.safetensors",
        "text_tiny/tokenizer.json",
        "text_tiny/tokenizer_config.json",
        "text_tiny/generation_config.json",
    ] {
        let from = fixtures().join(file);
        std::os::unix::fs::symlink(&from, folder.join(from.file_name().unwrap())).unwrap();
    }
    folder
}

fn generate(folder: &Path, arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_generate"))
        .arg("--model")
        .arg(folder)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[track_caller]
fn text(folder: &Path, arguments: &[&str], input: &str) -> (String, String) {
    let output = generate(folder, arguments, input);
    let (out, err) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(output.status.success(), "{err}");
    (out, err)
}

#[test]
fn a_prompt_goes_on_as_transformers_lets_it_go_on() {
    let folder = model("prompt");
    let tokenizer = TextTokenizer::open(&folder).unwrap();
    let reference = fs::read(fixtures().join("qwen3moe_tiny/reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_slice(&reference).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        let list = value.as_array().unwrap().iter();
        list.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let mut compared = 0;
    for example in reference["greedy"].as_array().unwrap() {
        let prompt = tokenizer.decode_with_special_tokens(&ids(&example["prompt"])).unwrap();
        // Not every list of ids is what the tokenizer makes of its text.
        if tokenizer.encode(&prompt).unwrap() != ids(&example["prompt"]) {
            continue;
        }
        let (out, err) = text(
            &folder,
            &["--prompt", &prompt, "--max-new-tokens", "24", "--precision", "high"],
            "",
        );
        let new_tokens = ids(&example["new_tokens"]);
        assert_eq!(out, format!("{prompt}{}\n", tokenizer.decode(&new_tokens).unwrap()));
        let ending = if new_tokens.len() == 24 {
            "cut off by --max-new-tokens"
        } else {
            "to its end"
        };
        assert!(err.contains(&format!("{} tokens, {ending}", new_tokens.len())), "{err}");
        assert!(err.contains("0 of ") && err.contains("tokens/s"), "{err}");
        compared += 1;
    }
    assert!(compared >= 2, "only {compared} prompts were compared");
}

#[test]
fn every_precision_answers() {
    let folder = model("precisions");
    for precision in ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"] {
        let arguments = [
            "--chat",
            "what is 1 + 1?",
            "--max-new-tokens",
            "8",
            "--precision",
            precision,
            "--verbose",
        ];
        let (_, err) = text(&folder, &arguments, "");
        let packed = if precision == "high" { 0 } else { 12 };
        assert!(
            err.contains(&format!(": {packed} of ")) && err.contains(&format!("packed in {precision}")),
            "{err}"
        );
        assert!(err.contains("layers.1.mlp.experts.down_proj"), "{err}");
    }
}

#[test]
fn a_folder_that_is_packed_already_stays_packed() {
    let folder = model("packed");
    for file in ["config.json", "model.safetensors"] {
        fs::remove_file(folder.join(file)).unwrap();
        let from = fixtures().join("nvfp4_checkpoints/compressed_tensors/w4a16").join(file);
        fs::copy(from, folder.join(file)).unwrap();
    }
    let arguments = |precision| ["--prompt", "what is", "--max-new-tokens", "8", "--precision", precision];
    let (_, err) = text(&folder, &arguments("w4a4_rac"), "");
    assert!(err.contains(": 12 of ") && err.contains("packed in w4a4_rac"), "{err}");
    let output = generate(&folder, &arguments("fp8"), "");
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(
        err.lines().last().unwrap().starts_with("error: ") && err.contains("cannot run in fp8"),
        "{err}"
    );
    let output = generate(&folder, &arguments("high"), "");
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(
        err.contains("--precision high asks for dense ones: take w4a16"),
        "{err}"
    );
}

#[test]
fn a_conversation_remembers_what_was_said() {
    let folder = model("conversation");
    let options = [
        "--chat",
        "--system",
        "be brief",
        "--max-new-tokens",
        "6",
        "--precision",
        "high",
    ];
    let (out, _) = text(&folder, &options, "the sum?\n\nwhat is it?\n");
    // The second answer alone, from the first as it was given.
    let (first, _) = text(&folder, &options, "the sum?\n");
    let (first, second) = (first.strip_suffix('\n').unwrap(), out.strip_prefix(&first).unwrap());
    let messages = [
        ChatMessage::new("system", "be brief"),
        ChatMessage::new("user", "the sum?"),
        ChatMessage::new("assistant", first),
        ChatMessage::new("user", "what is it?"),
    ];
    let prompt = ChatTemplate::open(&folder)
        .unwrap()
        .render(&messages, true, &Default::default())
        .unwrap();
    let (alone, _) = text(
        &folder,
        &["--prompt", &prompt, "--max-new-tokens", "6", "--precision", "high"],
        "",
    );
    assert_eq!(alone.strip_prefix(&prompt), Some(second));
}

#[test]
fn a_seed_decides_where_the_temperature_is_above_zero() {
    let folder = model("seed");
    let run = |seed: &str| {
        text(
            &folder,
            &[
                "--prompt",
                "what is",
                "--temperature",
                "2",
                "--seed",
                seed,
                "--max-new-tokens",
                "16",
            ],
            "",
        )
        .0
    };
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let folder = model("errors");
    let error = |arguments: &[&str]| {
        let output = generate(&folder, arguments, "");
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.lines().last().unwrap().starts_with("error: "), "{err}");
        err
    };
    assert!(error(&["--prompt", "a", "--device", "cuda:0"]).contains("--device cuda:0: this build has cpu"));
    assert!(error(&["--prompt", "a", "--max-new-tokens", "256"]).contains("the model has 256 positions"));
    assert!(error(&["--prompt", ""]).contains("prompt 0 is empty"));
    // A cause that an error tells itself is not told twice.
    let absent = folder.join("absent").display().to_string();
    let text = error(&["--prompt", "a", "--residual-masks", &absent]);
    assert_eq!(text.matches("No such file").count(), 1, "{text}");
    fs::remove_file(folder.join("tokenizer_config.json")).unwrap();
    assert!(error(&["--chat", "a"]).contains("the model was not made for chats"));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    assert!(error(&["--prompt", "a"]).contains("holds neither model.safetensors nor"));
    let output = generate(&folder, &["--prompt", "a", "--precision", "w3"], "");
    assert_eq!(output.status.code(), Some(2));
}
