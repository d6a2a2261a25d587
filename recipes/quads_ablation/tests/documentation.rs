//! The commands that the documentation tells people to type are understood, and the quick ones run.
mod tiny;

use quads_ablation::{
    arms::ARMS,
    series::{DECLARED, Declaration},
};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tiny::{folder, program, succeed, tiny};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// This recipe's commands on a page, as words.
fn commands(page: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
    let words = |line: &str| line.split_whitespace().map(String::from).collect();
    let lines = text.lines();
    let ours = lines.filter_map(|line| line.strip_prefix("cargo run --release -p quads_ablation"));
    ours.map(|rest| words(rest.strip_prefix(" --").unwrap_or(rest)))
        .collect()
}

#[test]
fn every_command_in_the_documentation_is_understood() {
    let out = folder("documented");
    // What the page that reports is sent to.
    succeed(&mut tiny(&out.join("runs/ablation_quick"), &["--arms", "A"]));
    fs::rename(out.join("runs/ablation_quick/quick"), out.join("calm")).unwrap();
    fs::create_dir_all(out.join("runs/ablation")).unwrap();
    fs::rename(out.join("calm"), out.join("runs/ablation/calm")).unwrap();
    let mut pages = vec![
        root().join("README.md"),
        root().join("recipes/quads_ablation/README.md"),
    ];
    for folder in ["docs", "docs/how-to"] {
        let entries = fs::read_dir(root().join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path());
        pages.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    let mut run = 0;
    for page in pages {
        for words in commands(&page) {
            let mut command = program();
            command.current_dir(&out).args(&words);
            if words.first().is_none_or(|word| word != "report") && words.iter().all(|word| word != "--list") {
                // It would take hours.
                command.args(["--out", "elsewhere"]);
                if !words.iter().any(|word| word == "--dry-run") {
                    command.arg("--dry-run");
                }
            }
            succeed(&mut command);
            run += 1;
        }
    }
    assert!(run >= 6, "found only {run}");
}

#[test]
fn the_page_names_every_arm_and_every_series() {
    let page = fs::read_to_string(root().join("recipes/quads_ablation/README.md")).unwrap();
    for arm in &ARMS {
        assert!(page.contains(&format!("\n| {} | ", arm.letter)), "{}", arm.letter);
    }
    for series in Declaration::read(DECLARED, false).unwrap().series {
        assert!(page.contains(&format!("`{}`", series.group())), "{}", series.name);
    }
}
