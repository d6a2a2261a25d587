//! Makes the generated part of `docs/results.md` anew from the files in `docs/results/`. With paths of `results.json` files,
//! their series are put there first, with thinned curves; a series that has less than its file there is not
//! (`quads_ablation::page::keep`).
use anyhow::Result;
use quads_ablation::{
    page::{self, Taken},
    results::Results,
};
use std::{path::Path, process::ExitCode};

fn main() -> Result<ExitCode> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let folder = docs.join("results");
    let mut refused = false;
    for path in std::env::args().skip(1) {
        for (series, taken) in page::keep(&Results::read(Path::new(&path))?, &folder)? {
            match taken {
                Taken::Whole(file) => println!("{series}: wrote {}", file.display()),
                Taken::ChoiceOnly(file, reason) => {
                    println!(
                        "{series}: its choice is in {} now, whose arms stay: {reason}",
                        file.display()
                    );
                }
                Taken::Refused(reason) => {
                    eprintln!("error: {series} was not taken: {reason}");
                    refused = true;
                }
            }
        }
    }
    page::update(&docs.join("results.md"), &folder)?;
    println!(
        "wrote docs/results.md from {} files of results",
        page::read(&folder)?.len()
    );
    Ok(ExitCode::from(u8::from(refused)))
}
