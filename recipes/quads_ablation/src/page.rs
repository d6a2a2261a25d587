//! The generated part of `docs/results.md`: made of the files in `docs/results/`, compared with them by a test, and written
//! by the example `results_page`.
use anyhow::{Context, Result, bail};
use grpo_math::{atomic_write::write_atomically, results::duration};
use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{answer, results::Results, table};

/// Before the generated part.
pub const BEGIN: &str = "<!-- generated from docs/results by the example results_page: begin -->";
/// After it.
pub const END: &str = "<!-- generated from docs/results by the example results_page: end -->";
/// The series that come first, in this order; others follow by their names.
const FIRST: [&str; 3] = ["calm", "stress", "hard"];
/// Steps of a curve in a file of the repository, about.
const STEPS: usize = 50;

/// Results in the repository.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Name of the file.
    pub file: String,
    /// What is in it.
    pub results: Results,
}

/// Every `.json` file of a folder, plain series first; none where there is no such folder.
///
/// # Errors
/// When a file cannot be used, or two have a series of the same name; they are named.
pub fn read(folder: &Path) -> Result<Vec<Kept>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut kept: Vec<Kept> = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot read {}", folder.display()))?
            .path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let results = Results::read(&path)?;
            kept.push(Kept { file, results });
        }
    }
    let place = |kept: &Kept| {
        let name = kept.results.series.first().map_or("", |series| series.name.as_str());
        let plain = FIRST.iter().position(|first| *first == name);
        (plain.unwrap_or(FIRST.len()), kept.file.clone())
    };
    kept.sort_by_key(place);
    for (at, one) in kept.iter().enumerate() {
        for name in one.results.series.iter().map(|series| &series.name) {
            let same = |other: &&Kept| other.results.series.iter().any(|series| series.name == *name);
            if let Some(other) = kept[..at].iter().find(same) {
                bail!("{} and {} both have the series {name}", other.file, one.file);
            }
        }
    }
    Ok(kept)
}

/// Puts results into a folder, one file a series, with thinned curves; returns the files. A short run is one file, `quick.json`.
///
/// # Errors
/// When a file cannot be written.
pub fn keep(results: &Results, folder: &Path) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut files = Vec::new();
    for (name, alone) in results.by_series() {
        let runs = alone.series.iter().flat_map(|s| &s.seeds).flat_map(|s| &s.arms);
        let steps = runs.map(|run| run.steps).max().unwrap_or(0);
        // Of these, so that evaluations fall on steps that stay.
        let every = [1, 2, 5, 10, 20, 50, 100]
            .into_iter()
            .find(|every| steps / every <= STEPS)
            .unwrap_or(200);
        let path = folder.join(format!("{name}.json"));
        alone.thinned(every).write(&path)?;
        files.push(path);
    }
    Ok(files)
}

/// The generated part.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn generated(kept: &[Kept]) -> Result<String> {
    let full: Vec<&Kept> = kept.iter().filter(|kept| !kept.results.quick).collect();
    let Some(first) = full.first() else {
        return Ok("## The answer\n\nNo results of a full run are in `docs/results/` yet.\n".into());
    };
    let mut all = first.results.clone();
    for other in &full[1..] {
        all.series.extend(other.results.series.iter().cloned());
    }
    let mut text = String::from("## The answer\n\n");
    for sentence in answer::sentences(&all)? {
        text += &format!("{sentence}\n\n");
    }
    for (heading, tables) in table::sections(&all)? {
        text += &format!("## {heading}\n\n");
        for table in tables {
            text += &format!("{}\n", table.to_markdown());
        }
    }
    text += "## Where these numbers are\n\n| file | command | machine | wall times of its arms |\n|---|---|---|---|\n";
    for Kept { file, results } in kept {
        let machine = &results.machine;
        let processor = machine.processor.as_deref().unwrap_or("unnamed");
        // Of this file: the machine's total is that of all series that were run together.
        let arms = results.series.iter().flat_map(|s| &s.seeds).flat_map(|s| &s.arms);
        let seconds = arms.map(|arm| arm.wall_s).sum();
        let short = if results.quick {
            " (the short run, in none of these tables)"
        } else {
            ""
        };
        text += &format!(
            "| [`{file}`](results/{file}){short} | `{}` | {processor}, {} processors, `{}` | {} |\n",
            results.command,
            machine.processors,
            machine.device,
            duration(seconds)
        );
    }
    Ok(text)
}

/// A page with its generated part made anew.
///
/// # Errors
/// When the page does not have each marker once, in order.
pub fn replaced(page: &str, generated: &str) -> Result<String> {
    let (before, rest) = page.split_once(BEGIN).with_context(|| format!("no line `{BEGIN}`"))?;
    let (_, after) = rest
        .split_once(END)
        .with_context(|| format!("no line `{END}` after the first marker"))?;
    if after.contains(BEGIN) || after.contains(END) || before.contains(END) {
        bail!("a marker of the generated part is there twice");
    }
    Ok(format!("{before}{BEGIN}\n\n{}\n\n{END}{after}", generated.trim_end()))
}

/// Writes the generated part of a page anew from a folder of results.
///
/// # Errors
/// When the page or a file of the folder cannot be used.
pub fn update(page: &Path, folder: &Path) -> Result<()> {
    let text = fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
    let new = replaced(&text, &generated(&read(folder)?)?).with_context(|| format!("cannot use {}", page.display()))?;
    write_atomically(page, new.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("quads_ablation_{}_{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn results_are_kept_by_series_and_make_the_page() {
        let folder = scratch("page");
        let mut results = synthetic::results();
        results.series.swap(0, 7);
        let files = keep(&results, &folder).unwrap();
        assert_eq!(files.len(), 8);
        assert!(files[7].ends_with("calm.json"));
        let mut quick = synthetic::results();
        quick.quick = true;
        quick.series = vec![synthetic::series("quick", &synthetic::ARMS, [1, 6, 64])];
        keep(&quick, &folder).unwrap();
        let kept = read(&folder).unwrap();
        let names: Vec<&str> = kept.iter().map(|kept| kept.file.as_str()).collect();
        assert_eq!(names[..3], ["calm.json", "stress.json", "quick.json"]);
        let stress = &kept[1].results.series[0];
        assert_eq!(
            stress.seeds[0].arms[0].curve.step.len(),
            52,
            "every fifth step of 250, and the last but one"
        );
        assert_eq!(stress.seeds[0].arms[0].end, results.series[1].seeds[0].arms[0].end);
        let page = folder.join("page.md");
        fs::write(&page, format!("# Title\n\n{BEGIN}\nold\n{END}\n\nEnd.\n")).unwrap();
        update(&page, &folder).unwrap();
        let text = fs::read_to_string(&page).unwrap();
        for says in [
            "# Title\n",
            "\nEnd.\n",
            "## The answer",
            "## stress: ",
            "(results/quick.json) (the short run",
            "| 72.86 |",
            // 55 and 11 runs of 61.25 s.
            "| 56 min 09 s |",
            "| 11 min 14 s |",
        ] {
            assert!(text.contains(says), "{says} is missing: {text}");
        }
        assert!(!text.contains("## quick") && !text.contains("\nold\n"));
        let again = replaced(&text, &generated(&kept).unwrap()).unwrap();
        assert_eq!(again, text, "made once more, it is the same");
        fs::copy(folder.join("calm.json"), folder.join("other.json")).unwrap();
        let error = read(&folder).unwrap_err().to_string();
        assert_eq!(error, "calm.json and other.json both have the series calm");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn without_results_the_page_says_so() {
        let kept = read(&scratch("no_results")).unwrap();
        assert!(
            generated(&kept)
                .unwrap()
                .ends_with("No results of a full run are in `docs/results/` yet.\n")
        );
    }

    #[test]
    fn a_page_without_its_markers_is_refused() {
        for (page, expected) in [
            ("text", "no line `<!-- generated"),
            (BEGIN, "after the first marker"),
            (&format!("{BEGIN}{END}{END}")[..], "there twice"),
        ] {
            let error = replaced(page, "x").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
