//! The documentation is tested: chapters are listed, links lead somewhere, Rust blocks are compiled and run as
//! documentation tests of this package, and no block is of a kind that nothing checks.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace")
        .to_path_buf()
}

/// Every page that a reader of the repository sees, relative to its root.
fn pages() -> Vec<PathBuf> {
    fn collect(dir: &Path, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && !["target", "runs", "fixtures"].contains(&name.as_str()) {
                    collect(&path, into);
                }
            } else if name.ends_with(".md") {
                into.push(path);
            }
        }
    }
    let mut all = vec![];
    collect(&root(), &mut all);
    all.sort();
    assert!(all.len() > 10, "found only {all:?}");
    all.into_iter()
        .map(|p| p.strip_prefix(root()).expect("inside").to_path_buf())
        .collect()
}

struct Block {
    page: PathBuf,
    line: usize,
    info: String,
}

fn blocks() -> Vec<Block> {
    let mut found = vec![];
    for page in pages() {
        let text = fs::read_to_string(root().join(&page)).expect("a page");
        let mut open = false;
        for (at, line) in text.lines().enumerate() {
            if let Some(info) = line.trim_start().strip_prefix("```") {
                if !open {
                    found.push(Block {
                        page: page.clone(),
                        line: at + 1,
                        info: info.trim().to_string(),
                    });
                }
                open = !open;
            }
        }
        assert!(!open, "{}: a code block is not closed", page.display());
    }
    found
}

#[test]
fn every_code_block_is_of_a_kind_that_is_checked() {
    let doctests = fs::read_to_string(root().join("tests/src/lib.rs")).expect("the documentation tests");
    for Block { page, line, info } in blocks() {
        let at = format!("{}:{line}", page.display());
        match info.as_str() {
            // `no_run`: needs a model that no test has; compiled all the same.
            "rust" | "rust,no_run" => {
                let include = format!("../../{}\"", page.display());
                assert!(
                    doctests.contains(&include),
                    "{at}: add the page to tests/src/lib.rs, so that its code runs"
                );
            }
            // `sh` and `toml` blocks are run by recipes/grpo_math/tests/documentation.rs; `text` is no code
            "sh" | "toml" | "text" => {}
            other => panic!("{at}: nothing checks a block of kind `{other}`; use rust, sh, toml or text"),
        }
    }
}

#[test]
fn the_summary_lists_every_chapter_and_nothing_else() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).expect("docs/SUMMARY.md");
    let listed: BTreeSet<PathBuf> = links(&summary).map(PathBuf::from).collect();
    let present: BTreeSet<PathBuf> = pages()
        .iter()
        .filter_map(|p| p.strip_prefix("docs").ok().map(Path::to_path_buf))
        .filter(|p| p != Path::new("SUMMARY.md"))
        .collect();
    assert_eq!(listed, present);
}

#[test]
fn every_relative_link_leads_to_a_file() {
    for page in pages() {
        let text = fs::read_to_string(root().join(&page)).expect("a page");
        for link in links(&text).filter(|l| !l.contains("://") && !l.starts_with('#')) {
            let target = link.split('#').next().expect("a first part");
            let path = root().join(&page).parent().expect("a folder").join(target);
            assert!(path.exists(), "{}: link to {link} leads nowhere", page.display());
        }
    }
}

/// The targets of `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}
