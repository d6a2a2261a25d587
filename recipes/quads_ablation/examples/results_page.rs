//! Makes the generated part of `docs/results.md` anew from the files in `docs/results/`. With the path of a
//! `results.json`, its series are put there first, with thinned curves.
use anyhow::Result;
use quads_ablation::{page, results::Results};
use std::path::Path;

fn main() -> Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let folder = docs.join("results");
    for path in std::env::args().skip(1) {
        for file in page::keep(&Results::read(Path::new(&path))?, &folder)? {
            println!("wrote {}", file.display());
        }
    }
    page::update(&docs.join("results.md"), &folder)?;
    println!(
        "wrote docs/results.md from {} files of results",
        page::read(&folder)?.len()
    );
    Ok(())
}
