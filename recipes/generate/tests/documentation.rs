//! The commands that the documentation tells people to type run, on a tiny model.
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The words of a line of the shell; single quotes hold words together.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    let words = parts.flat_map(|(index, part)| match index % 2 {
        0 => part.split_whitespace().map(String::from).collect(),
        _ => vec![part.to_string()],
    });
    words.collect()
}

/// This recipe's commands on a page.
fn commands(page: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("cargo run --release -p generate -- "));
    lines.map(words).collect()
}

/// A whole folder, where there is none yet.
fn model(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for file in [
        "qwen3moe_tiny/config.json",
        "qwen3moe_tiny/model.safetensors",
        "text_tiny/tokenizer.json",
        "text_tiny/tokenizer_config.json",
        "text_tiny/generation_config.json",
    ] {
        let from = root().join("tests/fixtures").join(file);
        fs::copy(&from, folder.join(from.file_name().unwrap())).unwrap();
    }
}

#[test]
fn every_command_in_the_documentation_runs() {
    let mut run = 0;
    for page in ["recipes/generate/README.md", "docs/how-to/use-a-hugging-face-model.md"] {
        let base = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("generate_documented");
        let _ = fs::remove_dir_all(&base);
        for words in commands(&root().join(page)) {
            let at = words.iter().position(|word| word == "--model").expect("a model");
            model(&base.join(&words[at + 1]));
            let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
            // The tiny model has few positions.
            let output = command
                .current_dir(&base)
                .args(&words)
                .args(["--max-new-tokens", "8"])
                .stdin(Stdio::null())
                .output()
                .unwrap();
            assert!(output.status.success(), "{page}: {words:?}: {output:?}");
            run += 1;
        }
    }
    assert!(run >= 4, "found only {run}");
}
