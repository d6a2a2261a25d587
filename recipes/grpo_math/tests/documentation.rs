//! What the documentation tells people to type works: its settings are accepted and its commands run, on a tiny model.
mod tiny_run;

use clap::Parser;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tiny_run::{SETTINGS, TEXT_SETTINGS, folder, succeed, text_model, text_problems};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the workspace")
        .to_path_buf()
}

/// The pages that people are sent to.
fn pages() -> Vec<PathBuf> {
    let mut pages = vec![
        root().join("README.md"),
        root().join("CONTRIBUTING.md"),
        root().join("recipes/grpo_math/README.md"),
    ];
    for folder in ["docs", "docs/how-to", "docs/decisions"] {
        let entries = fs::read_dir(root().join(folder)).expect("a folder of the book");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        pages.extend(paths.filter(|path| path.extension().is_some_and(|e| e == "md")));
    }
    pages.sort();
    pages
}

/// Code blocks of one page: kind and text.
fn blocks(page: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
    let mut blocks = vec![];
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(kind), None) => open = Some((kind.trim().to_string(), String::new())),
            (None, Some((_, code))) => *code += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}

#[test]
fn every_settings_file_in_the_documentation_is_accepted() {
    let folder = folder("documented_settings");
    let mut files = 0;
    for page in pages() {
        for (_, code) in blocks(&page).iter().filter(|(kind, _)| kind == "toml") {
            let file = folder.join("settings.toml");
            fs::write(&file, code).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
            let output = command
                .arg("--config")
                .arg(&file)
                .arg("--print-config")
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {said}\n{code}", page.display());
            files += 1;
        }
    }
    assert!(files >= 2, "found only {files}");
}

#[test]
fn every_command_in_the_documentation_runs() {
    let mut commands = 0;
    for page in pages() {
        let name = page.strip_prefix(root()).expect("inside").display().to_string();
        let folder = folder(&format!("documented_commands_{}", name.replace(['/', '.'], "_")));
        let mut settings_file = String::new();
        let mut done = BTreeSet::new();
        for (kind, code) in blocks(&page) {
            match kind.as_str() {
                "toml" => settings_file = code,
                "sh" => {
                    for line in code.lines().filter(|line| !line.trim().is_empty()) {
                        run(line, &name, &folder, &settings_file, &mut done);
                        commands += 1;
                    }
                }
                _ => {}
            }
        }
    }
    assert!(commands >= 10, "found only {commands}");
}

/// Runs one documented command in `folder`, with a tiny model where it starts a run.
fn run(line: &str, page: &str, folder: &Path, settings_file: &str, done: &mut BTreeSet<String>) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let arguments = match words.as_slice() {
        ["cargo", "run", "--release", "-p", "grpo_math"] => vec![],
        ["cargo", "run", "--release", "-p", "grpo_math", "--", arguments @ ..] => arguments.to_vec(),
        ["grpo_math", arguments @ ..] => arguments.to_vec(),
        // The other recipes run theirs.
        ["cargo", "run", "--release", "-p", package, "--", ..]
            if root()
                .join("recipes")
                .join(package)
                .join("tests/documentation.rs")
                .exists() =>
        {
            return;
        }
        // What this build has no device for is at least a command line.
        [
            "cargo",
            "run",
            "--release",
            "-p",
            "grpo_math",
            "--features",
            _,
            "--",
            arguments @ ..,
        ] => {
            let command = ["grpo_math"].iter().chain(arguments);
            if let Err(error) = grpo_math::cli::Cli::try_parse_from(command) {
                panic!("{page}: `{line}`: {error}");
            }
            return;
        }
        // Needs a GPU, or a device that only the continuous integration installs.
        ["cargo", "bench", "-p", package, "--features", _, "--bench", bench, ..]
            if root().join(package).join("benches").join(bench).exists()
                || root()
                    .join(package)
                    .join("benches")
                    .join(format!("{bench}.rs"))
                    .exists() =>
        {
            return;
        }
        ["python3", script, ..] if root().join(script).exists() => return,
        [
            "QUADS_REQUIRE_DEVICE=1",
            "cargo",
            "test",
            "--release",
            "--workspace",
            "--features",
            _,
            "--test",
            test,
        ] if root().join("tests/tests").join(test).exists() => return,
        // The continuous integration runs these.
        ["cargo", "test", "--release", "--workspace"] => return,
        [
            "cargo",
            "run" | "bench",
            "--release",
            "-p",
            package,
            "--example",
            example,
        ] if root()
            .join(package)
            .join("examples")
            .join(format!("{example}.rs"))
            .exists() =>
        {
            return;
        }
        ["cargo", "bench", "-p", package, "--bench", bench]
        | ["cargo", "bench", "-p", package, "--bench", bench, "--", ..]
            if root()
                .join(package)
                .join("benches")
                .join(format!("{bench}.rs"))
                .exists() =>
        {
            return;
        }
        _ => panic!("{page}: nothing runs `{line}`"),
    };
    let tiny = || SETTINGS.iter().flat_map(|setting| ["--set", setting]);
    let binary = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
        command.current_dir(folder);
        command
    };
    let after = |flag: &str| {
        arguments
            .iter()
            .position(|a| *a == flag)
            .and_then(|at| arguments.get(at + 1))
    };
    if let Some(needed) = after("--resume").or(after("--run")) {
        // The page sends people to a run that they have made before.
        if done.insert(needed.to_string()) && !folder.join(needed).exists() {
            let name = Path::new(needed).file_name().expect("a name").to_str().expect("text");
            succeed(binary().args(["--name", name]).args(tiny()));
        }
    }
    if let Some(file) = after("--config") {
        // The one written down above it, or that of a run made before.
        let file = folder.join(file);
        if !file.exists() {
            fs::write(file, settings_file).unwrap();
        }
    }
    let mut command = binary();
    command.args(&arguments);
    if let Some(model) = after("--model") {
        text_model(&folder.join(model));
        for (flag, questions) in [("--data", 0..20), ("--held-out", 20..30)] {
            if let Some(file) = after(flag) {
                text_problems(&folder.join(file), questions);
            }
        }
        command.args(TEXT_SETTINGS.iter().flat_map(|setting| ["--set", setting]));
        succeed(&mut command);
        return;
    }
    if !["--resume", "--run", "--print-config", "--help", "drift"]
        .iter()
        .any(|flag| arguments.contains(flag))
    {
        command.args(tiny());
    }
    succeed(&mut command);
}
