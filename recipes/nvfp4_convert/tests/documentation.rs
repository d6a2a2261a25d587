//! The commands that the documentation tells people to type run, on a tiny model.
mod folders;

use folders::{fixtures, scratch};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// This recipe's commands on a page, as words.
fn commands(page: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
    let mut in_shell = false;
    let mut commands = vec![];
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            in_shell = kind == "sh";
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let arguments = match words.as_slice() {
            ["cargo", "run", "--release", "-p", "nvfp4_convert", "--", arguments @ ..] => arguments,
            ["nvfp4_convert", arguments @ ..] => arguments,
            _ => continue,
        };
        if in_shell {
            commands.push(arguments.iter().map(|word| word.to_string()).collect());
        }
    }
    commands
}

/// A dense model with the tokenizer that fits it, where there is none yet.
fn model(folder: &Path) {
    if folder.exists() {
        return;
    }
    fs::create_dir_all(folder).unwrap();
    for file in [
        "qwen3moe_tiny/config.json",
        "qwen3moe_tiny/model.safetensors",
        "text_tiny/tokenizer.json",
        "text_tiny/tokenizer_config.json",
    ] {
        let from = fixtures().join(file);
        fs::copy(&from, folder.join(from.file_name().unwrap())).unwrap();
    }
}

#[test]
fn every_command_in_the_documentation_runs() {
    let mut run = 0;
    for page in ["recipes/nvfp4_convert/README.md", "docs/how-to/nvfp4-checkpoints.md"] {
        let base = scratch(&format!("documented_{}", page.replace('/', "_")));
        for words in commands(&root().join(page)) {
            let after = |flag: &str| words.iter().position(|word| word == flag).map(|at| &words[at + 1]);
            for flag in ["--calibrate", "--prompts"] {
                if let Some(file) = after(flag) {
                    fs::write(base.join(file), "{\"prompt\": \"abc\"}\n{\"input_ids\": [1, 2, 3]}\n").unwrap();
                }
            }
            if words[0] == "quantize" {
                model(&base.join(&words[1]));
                // The page shows it several ways.
                let _ = fs::remove_dir_all(base.join(&words[2]));
            }
            let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4_convert"));
            let output = command.current_dir(&base).args(&words).output().unwrap();
            assert!(output.status.success(), "{page}: {words:?}: {output:?}");
            run += 1;
        }
    }
    assert!(run >= 9, "found only {run}");
}
