//! The answer in three sentences, made from the numbers whatever they are.
use anyhow::Result;

use crate::{
    checks::checks,
    results::{Results, Series, Side},
    statistics::{Difference, final_difference},
};

/// What naive rollouts did, what QUADS did, and how much of what was to be shown holds. Plain text.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn sentences(results: &Results) -> Result<[String; 3]> {
    let naive = format!(
        "Naive 4-bit rollouts (B) collapsed in {}, by the rule declared beforehand; at the end they answered, against full \
         precision (A), {}.",
        collapsed(results, "B"),
        against_a(results, "B")?
    );
    let quads = format!(
        "QUADS as published (E) collapsed in {} and answered {}; with every channel compensated (E+) {} collapsed, and the \
         answers were {}.",
        collapsed(results, "E"),
        against_a(results, "E")?,
        collapsed(results, "E+"),
        against_a(results, "E+")?
    );
    Ok([naive, quads, verdicts(results)?])
}

/// `2 of 10 runs`.
fn collapsed(results: &Results, arm: &str) -> String {
    let runs: Vec<_> = results.main_series().flat_map(|series| series.runs(arm)).collect();
    let collapsed = runs.iter().filter(|run| run.collapse.is_some()).count();
    match runs.len() {
        0 => "none of no runs".into(),
        1 => format!("{collapsed} of 1 run"),
        all => format!("{collapsed} of {all} runs"),
    }
}

/// What the final difference to A is, series by series.
fn against_a(results: &Results, arm: &str) -> Result<String> {
    let mut parts = Vec::new();
    for series in results.main_series() {
        let difference = final_difference(series, arm, "A", Side::Own)?;
        parts.extend(difference.map(|difference| told(series, &difference)));
    }
    Ok(match parts.is_empty() {
        true => "nothing that could be compared: no seed has both arms".into(),
        false => parts.join("; "),
    })
}

fn told(series: &Series, difference: &Difference) -> String {
    let words = match (difference.is_clear(), difference.mean < 0.0) {
        (true, true) => "worse",
        (true, false) => "better",
        (false, _) => "no differently as far as these seeds can tell",
    };
    format!("{words} in {} ({difference} points)", series.name)
}

/// How many checks hold, and which do not.
fn verdicts(results: &Results) -> Result<String> {
    let (mut held, mut failed, mut unmeasured) = (0, Vec::new(), 0);
    for series in results.main_series() {
        for check in checks(series)? {
            match check.holds() {
                Some(true) => held += 1,
                Some(false) => failed.push(format!("{}: {} ({})", series.name, check.says, check.verdict())),
                None => unmeasured += 1,
            }
        }
    }
    let mut sentence = format!(
        "Of the {} checks of what was to be shown, {held} hold in every seed",
        held + failed.len()
    );
    sentence += &match failed.is_empty() {
        true => ", and none fails".to_string(),
        false => format!(", and {} do not: {}", failed.len(), failed.join("; ")),
    };
    if unmeasured > 0 {
        sentence += &format!(" ({unmeasured} more could not be made, for want of their arms)");
    }
    Ok(sentence + ".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn losing_and_winning_are_both_said() {
        let mut results = synthetic::results();
        let [naive, quads, checks] = sentences(&results).unwrap();
        assert!(
            naive.contains("collapsed in 4 of 10 runs") && naive.contains("worse in calm (-"),
            "{naive}"
        );
        assert!(
            quads.contains("0 of 10 runs") && quads.contains("worse in stress (-"),
            "{quads}"
        );
        assert_eq!(
            checks,
            "Of the 16 checks of what was to be shown, 16 hold in every seed, and none fails."
        );
        // The other way round: A and E change places, nothing collapses, and the smaller gap is the larger.
        for series in &mut results.series {
            for seed in &mut series.seeds {
                if seed.arms.len() == 11 {
                    let (one, other) = seed.arms.split_at_mut(4);
                    std::mem::swap(&mut one[0].end, &mut other[0].end);
                    one[1].end = one[0].end.clone();
                    one[1].collapse = None;
                    seed.gaps[4].mean = 1.0;
                }
            }
        }
        let [naive, quads, checks] = sentences(&results).unwrap();
        assert!(naive.contains("0 of 10 runs"), "{naive}");
        assert!(
            naive.contains("no differently as far as these seeds can tell in calm (0.0 [0.0, 0.0] points)"),
            "{naive}"
        );
        assert!(quads.contains("better in calm (+"), "{quads}");
        assert!(
            checks.contains("14 hold in every seed, and 2 do not: calm: "),
            "{checks}"
        );
    }

    #[test]
    fn what_was_not_run_is_said() {
        let mut results = synthetic::results();
        results.series = vec![synthetic::series("quick", &[synthetic::ARMS[0]], [1, 20, 64])];
        let [naive, _, checks] = sentences(&results).unwrap();
        assert!(
            naive.contains("none of no runs") && naive.contains("no seed has both arms"),
            "{naive}"
        );
        assert!(
            checks.contains("(7 more could not be made, for want of their arms)"),
            "{checks}"
        );
    }
}
