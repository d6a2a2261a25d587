//! The generated part of `docs/results.md`: made of the files in `docs/results/`, compared with them by a test, and written
//! by the example `results_page`.
use anyhow::{Context, Result, bail};
use grpo_math::{atomic_write::write_atomically, results::duration};
use std::{
    cmp::Ordering,
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    answer, machine,
    results::{ArmRun, Results, Seed, Series},
    table,
};

/// Before the generated part.
pub const BEGIN: &str = "<!-- generated from docs/results by the example results_page: begin -->";
/// After it.
pub const END: &str = "<!-- generated from docs/results by the example results_page: end -->";
/// The series that come first, in this order; others follow by their names, families last.
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

impl Kept {
    /// Plain series come first, families last, by the value that they are named after.
    fn place(&self) -> (usize, &str, f64, &str) {
        let series = self.results.series.first();
        let plain = series.and_then(|series| FIRST.iter().position(|first| *first == series.name));
        let member = series.and_then(|series| Some((series.group(), series.value()?)));
        let (family, value) = member.unwrap_or_default();
        (plain.unwrap_or(FIRST.len()), family, value, &self.file)
    }
}

/// Every `.json` file of a folder, plain series first and families last; none where there is no such folder.
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
    kept.sort_by(|one, other| one.place().partial_cmp(&other.place()).unwrap_or(Ordering::Equal));
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

/// What became of a series that was to be put into the folder.
#[derive(Clone, Debug, PartialEq)]
pub enum Taken {
    /// The file is of this run.
    Whole(PathBuf),
    /// The file's arms stay, for the reason given; how their setting was chosen is of this run.
    ChoiceOnly(PathBuf, String),
    /// Nothing was changed, for the reason given.
    Refused(String),
}

/// Puts results into a folder, one file a series, with thinned curves, and tells of each what was done. A short run is one
/// file, `quick.json`.
///
/// A file never becomes emptier: it is replaced by results of the same settings that have all of its arms, with as many steps,
/// and all of its gaps. Of others nothing is taken but how the arms' setting was chosen, where the settings are the same. Who wants a
/// smaller or another series removes the file first.
///
/// # Errors
/// When a file cannot be read or written.
pub fn keep(results: &Results, folder: &Path) -> Result<Vec<(String, Taken)>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut taken = Vec::new();
    for (name, alone) in results.by_series() {
        let path = folder.join(format!("{name}.json"));
        let there = path.exists().then(|| Results::read(&path)).transpose()?;
        let what = match merged(&alone, there) {
            Merged::New(results) => {
                results.thinned(thinning(&results)).write(&path)?;
                Taken::Whole(path)
            }
            Merged::Choice(results, reason) => {
                results.write(&path)?;
                Taken::ChoiceOnly(path, reason)
            }
            Merged::Refused(reason) => Taken::Refused(reason),
        };
        taken.push((name.to_string(), what));
    }
    Ok(taken)
}

/// Every how many steps of the curves stay.
fn thinning(results: &Results) -> usize {
    let runs = results.series.iter().flat_map(|s| &s.seeds).flat_map(|s| &s.arms);
    let steps = runs.map(|run| run.steps).max().unwrap_or(0);
    // Of these, so that evaluations fall on steps that stay.
    let every = [1, 2, 5, 10, 20, 50, 100];
    every.into_iter().find(|every| steps / every <= STEPS).unwrap_or(200)
}

enum Merged {
    New(Results),
    Choice(Results, String),
    Refused(String),
}

/// The results of one series, and what its file has before.
fn merged(new: &Results, there: Option<Results>) -> Merged {
    let [series] = &new.series[..] else {
        return Merged::Refused("expected the results of one series".into());
    };
    let Some(mut there) = there else {
        return match series.arms().is_empty() {
            true => Merged::Refused("none of its arms has run, and there is no file of it".into()),
            false => Merged::New(new.clone()),
        };
    };
    let [before] = &mut there.series[..] else {
        return Merged::Refused("its file has other series too".into());
    };
    if let Some(differing) = differing(series, before) {
        return Merged::Refused(format!(
            "its file was made with other settings ({differing}); remove it to replace it"
        ));
    }
    let choice = [&series.choice, &before.choice].map(Option::as_ref);
    let larger = match choice {
        [Some(new), Some(before)] => Some(if new.covers(before) { new } else { before }),
        [new, before] => new.or(before),
    };
    let larger = larger.cloned();
    match missing(series, before) {
        None => {
            let mut new = new.clone();
            new.series[0].choice = larger;
            Merged::New(new)
        }
        Some(missing) if series.choice.is_some() && larger == series.choice => {
            before.choice = larger;
            Merged::Choice(there, missing)
        }
        Some(missing) => Merged::Refused(format!(
            "these results have less than its file, {missing}; remove the file to replace it all the same"
        )),
    }
}

/// Settings that are not the same, in words.
fn differing(new: &Series, before: &Series) -> Option<String> {
    let keys: BTreeSet<_> = new.settings.keys().chain(before.settings.keys()).collect();
    let value = |series: &Series, key| {
        series
            .settings
            .get(key)
            .cloned()
            .unwrap_or_else(|| "the default".into())
    };
    let differing = keys
        .into_iter()
        .filter(|key| new.settings.get(*key) != before.settings.get(*key));
    let told: Vec<String> = differing
        .map(|key| format!("{key} was {} and is {}", value(before, key), value(new, key)))
        .collect();
    (!told.is_empty()).then(|| told.join("; "))
}

/// Whether a run of an arm is shorter than another, was given up where the other was not, or is judged on fewer problems.
fn lesser(run: &ArmRun, than: &ArmRun) -> bool {
    run.steps < than.steps
        || (run.stopped.is_some() && than.stopped.is_none())
        || run.end.own.0.len() < than.end.own.0.len()
}

/// What a series lacks of what was there before, in words.
fn missing(new: &Series, before: &Series) -> Option<String> {
    let (mut arms, mut gaps) = (Vec::new(), Vec::new());
    for seed in &before.seeds {
        let found = new.seeds.iter().find(|found| found.seed == seed.seed);
        for arm in &seed.arms {
            let run = found.and_then(|found| found.arm(&arm.arm));
            if run.is_none_or(|run| lesser(run, arm)) {
                arms.push(format!("{} of seed {}", arm.arm, seed.seed));
            }
        }
        // Of the arms that were run: an earlier build measured those of all others as well.
        let gap = |seed: &Seed, arm: &str| seed.gap(arm).is_some();
        if seed
            .arms
            .iter()
            .any(|arm| gap(seed, &arm.arm) && !found.is_some_and(|found| gap(found, &arm.arm)))
        {
            gaps.push(seed.seed.to_string());
        }
    }
    let all = before.seeds.iter().flat_map(|seed| &seed.arms).count();
    let mut lacks = Vec::new();
    if let Some(first) = arms.first() {
        lacks.push(format!(
            "{} of its {all} arms are missing or shorter, the first is {first}",
            arms.len()
        ));
    }
    if !gaps.is_empty() {
        lacks.push(format!("gaps are missing of the seeds {}", gaps.join(", ")));
    }
    (!lacks.is_empty()).then(|| lacks.join("; "))
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
        // Of this file: the machine's total is that of all series that were run together.
        let arms = results.series.iter().flat_map(|s| &s.seeds).flat_map(|s| &s.arms);
        let seconds = arms.map(|arm| arm.wall_s).sum();
        let short = if results.quick {
            " (the short run, in none of these tables)"
        } else {
            ""
        };
        text += &format!(
            "| [`{file}`](results/{file}){short} | `{}` | {} | {} |\n",
            results.command,
            machine::told(results),
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
    use crate::{
        series::{DECLARED, Declaration},
        synthetic,
    };

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
        let taken = keep(&results, &folder).unwrap();
        assert_eq!(taken.len(), 8);
        assert_eq!(taken[7], ("calm".into(), Taken::Whole(folder.join("calm.json"))));
        let mut quick = synthetic::results();
        quick.quick = true;
        quick.series = vec![synthetic::series("quick", &synthetic::ARMS, [1, 6, 64])];
        keep(&quick, &folder).unwrap();
        let kept = read(&folder).unwrap();
        let names: Vec<&str> = kept.iter().map(|kept| kept.file.as_str()).collect();
        assert_eq!(
            names,
            [
                "calm.json",
                "stress.json",
                "quick.json",
                "rate-0.0001.json",
                "rate-0.0003.json",
                "rate-0.001.json",
                "size-64.json",
                "size-128.json",
                "size-256.json",
            ],
            "plain series, others, families by their values"
        );
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

    /// All series that are declared.
    fn all_declared() -> Results {
        let declared = Declaration::read(DECLARED, false).unwrap();
        let of = |declared: &crate::series::Series| {
            let has = |arm: &(&str, f64, f64)| declared.arms.iter().any(|other| other.letter == arm.0);
            let arms: Vec<_> = synthetic::ARMS.into_iter().filter(has).collect();
            let mut series = synthetic::series(&declared.name, &arms, [declared.seeds.len(), 20, 64]);
            series.about = declared.about.clone();
            series.settings.extend(declared.settings.clone());
            if declared.choice.is_some() {
                series.settings.insert("trainer.learning_rate".into(), "0.0001".into());
                series.choice = Some(synthetic::choice());
            }
            // As an earlier build measured them: of every arm, run or not.
            for (seed, all) in series
                .seeds
                .iter_mut()
                .zip(synthetic::series("x", &synthetic::ARMS, [5, 20, 64]).seeds)
            {
                seed.gaps = all.gaps;
            }
            series
        };
        Results {
            series: declared.series.iter().map(of).collect(),
            ..synthetic::results()
        }
    }

    #[test]
    fn all_series_make_a_page_of_plain_ones_amplifiers_and_one_short_section_a_family() {
        let folder = scratch("all");
        let mut all = all_declared();
        // As several machines bring them.
        let families = all.series.split_off(7);
        for series in [all.series, families] {
            keep(
                &Results {
                    series,
                    ..synthetic::results()
                },
                &folder,
            )
            .unwrap();
        }
        let text = generated(&read(&folder).unwrap()).unwrap();
        if let Ok(path) = std::env::var("QUADS_SYNTHETIC_PAGE") {
            fs::write(path, &text).unwrap();
        }
        let sections: Vec<&str> = text.split("\n## ").collect();
        let names: Vec<&str> = sections
            .iter()
            .filter_map(|section| section.split([':', '\n']).next())
            .collect();
        assert_eq!(
            names,
            [
                "## The answer",
                "The paper's figures beside ours",
                "calm",
                "stress",
                "hard",
                "outliers",
                "rollout_old",
                "stale",
                "scaling",
                "sweep",
                "Where these numbers are",
            ]
        );
        for (section, rows) in [(sections[8], 2), (sections[9], 4)] {
            let lines = |begin: &str| section.lines().filter(|line| line.starts_with(begin)).count();
            // Two tables, each with a heading and a line below it.
            assert_eq!((lines("**"), lines("|")), (2, 2 * (2 + rows)), "{section}");
        }
        let paper = sections[1].lines().find(|line| line.starts_with("|  | paper")).unwrap();
        assert_eq!(paper.matches("ours, ").count(), 6, "{paper}");
        fs::remove_dir_all(folder).unwrap();
    }

    /// A series whose learning rate was chosen, as a run of it alone.
    fn hard(seeds: usize) -> Results {
        let mut series = synthetic::series("hard", &synthetic::ARMS, [seeds, 20, 64]);
        series.settings.insert("trainer.learning_rate".into(), "0.0001".into());
        Results {
            series: vec![series],
            ..synthetic::results()
        }
    }

    #[test]
    fn a_file_never_becomes_emptier() {
        let folder = scratch("emptier");
        let path = folder.join("hard.json");
        let put = |results: &Results| -> Taken {
            let mut taken = keep(results, &folder).unwrap();
            assert_eq!(taken.len(), 1);
            taken.remove(0).1
        };
        let refused = |results: &Results, expected: &str| {
            let before = fs::read(&path).ok();
            match put(results) {
                Taken::Refused(reason) => assert!(reason.contains(expected), "{reason}\nwithout {expected}"),
                other => panic!("{other:?}, not {expected}"),
            }
            assert_eq!(fs::read(&path).ok(), before, "{expected}");
        };
        // Nothing to begin a file with.
        let mut chosen_only = hard(3);
        chosen_only.series[0].choice = Some(synthetic::choice());
        for seed in &mut chosen_only.series[0].seeds {
            seed.arms.clear();
        }
        refused(&chosen_only, "none of its arms has run, and there is no file of it");
        assert_eq!(put(&hard(3)), Taken::Whole(path.clone()));

        // Fewer seeds, an arm that is not there, one that did not get as far, gaps that were not measured.
        refused(
            &hard(2),
            "11 of its 33 arms are missing or shorter, the first is A of seed 3; gaps are missing of the seeds 3",
        );
        let without = |damage: fn(&mut Series)| {
            let mut less = hard(3);
            damage(&mut less.series[0]);
            less
        };
        let less = without(|series| drop(series.seeds[1].arms.remove(4)));
        refused(
            &less,
            "1 of its 33 arms are missing or shorter, the first is E of seed 2",
        );
        let less = without(|series| series.seeds[1].arms[4].steps = 19);
        refused(&less, "the first is E of seed 2");
        let less = without(|series| series.seeds[1].arms[4].stopped = Some("out of memory".into()));
        refused(&less, "the first is E of seed 2");
        let less = without(|series| series.seeds[1].arms[4].end.own.0.truncate(63));
        refused(&less, "the first is E of seed 2");
        let less = without(|series| drop(series.seeds[1].gaps.pop()));
        refused(&less, "gaps are missing of the seeds 2");
        let mut other = hard(5);
        other.series[0].settings.insert("grpo.steps".into(), "30".into());
        refused(&other, "other settings (grpo.steps was 20 and is 30); remove it");

        // The choice is taken all the same, where the settings agree, and nothing but it.
        let before = Results::read(&path).unwrap();
        for run in [&chosen_only, &chosen_only] {
            let Taken::ChoiceOnly(file, reason) = put(run) else {
                panic!("the choice alone");
            };
            assert!(
                file == path && reason.starts_with("33 of its 33 arms are missing"),
                "{reason}"
            );
        }
        let mut after = Results::read(&path).unwrap();
        assert_eq!(after.series[0].choice.take(), Some(synthetic::choice()));
        assert_eq!(after, before);
        let mut less = chosen_only.clone();
        less.series[0].choice.as_mut().unwrap().tried.pop();
        refused(&less, "33 of its 33 arms are missing");
        let mut other = chosen_only.clone();
        other.series[0].settings.insert("grpo.steps".into(), "30".into());
        refused(&other, "grpo.steps was 20 and is 30");

        // More of the same replaces it, and what is known of the choice stays.
        assert_eq!(put(&hard(4)), Taken::Whole(path.clone()));
        let after = Results::read(&path).unwrap();
        assert_eq!(
            (after.series[0].seeds.len(), &after.series[0].choice),
            (4, &Some(synthetic::choice()))
        );
        let text = generated(&read(&folder).unwrap()).unwrap();
        assert!(
            text.contains("The choice of trainer.learning_rate, by arm A alone"),
            "{text}"
        );
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
