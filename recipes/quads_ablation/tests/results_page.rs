//! `docs/results.md` says what the files in `docs/results/` say.
use quads_ablation::page;
use std::{fs, path::PathBuf};

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

#[test]
fn the_page_is_that_of_the_files() {
    let kept = page::read(&docs().join("results")).unwrap();
    if kept.is_empty() {
        println!("docs/results/ has no results: the page is checked to say so");
    }
    let text = fs::read_to_string(docs().join("results.md")).unwrap();
    let new = page::replaced(&text, &page::generated(&kept).unwrap()).unwrap();
    let line = text.lines().zip(new.lines()).position(|(old, new)| old != new);
    assert!(
        text == new,
        "docs/results.md is not that of docs/results/ (first difference: line {:?}); \
         `cargo run --release -p quads_ablation --example results_page` makes it anew",
        line.map(|line| line + 1)
    );
}

#[test]
fn files_of_results_are_small() {
    for kept in page::read(&docs().join("results")).unwrap() {
        let bytes = fs::metadata(docs().join("results").join(&kept.file)).unwrap().len();
        assert!(bytes < 1_000_000, "{}: {bytes} bytes", kept.file);
    }
}
