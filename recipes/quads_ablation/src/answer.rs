//! The answer in three sentences, made from the numbers whatever they are.
use anyhow::Result;

use std::collections::BTreeMap;

use crate::{
    checks::checks,
    results::{ArmRun, Results, Series, Side},
    statistics::{Difference, final_difference},
};

/// What naive rollouts did, what QUADS did, and how much of what was to be shown holds. Plain text.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn sentences(results: &Results) -> Result<[String; 3]> {
    let naive = format!(
        "By the rules declared beforehand, naive 4-bit rollouts (B) collapsed in {}; at the end they answered, against full \
         precision (A), {}.",
        collapsed(results, "B"),
        against_a(results, "B")?
    );
    let quads = format!(
        "QUADS as published (E) collapsed in {}, and answered {}; with every channel compensated (E+) it collapsed in {}, and \
         answered {}.",
        collapsed(results, "E"),
        against_a(results, "E")?,
        collapsed(results, "E+"),
        against_a(results, "E+")?
    );
    Ok([naive, quads, verdicts(results)?])
}

/// `0 of 5 runs of calm, 2 of 5 of stress (gap 2) (of these 2, 1 ended with more right answers than they began with)`.
fn collapsed(results: &Results, arm: &str) -> String {
    let (mut parts, mut all, mut better) = (Vec::new(), 0, 0);
    for series in results.main_series() {
        let runs = series.runs(arm).count();
        let collapsed: Vec<&ArmRun> = series.runs(arm).filter(|run| run.collapse.is_some()).collect();
        all += collapsed.len();
        better += collapsed
            .iter()
            .filter(|run| run.end.own.share() > run.start.own.share())
            .count();
        let mut rules: BTreeMap<&str, usize> = BTreeMap::new();
        for rule in collapsed.iter().flat_map(|run| &run.collapse) {
            *rules.entry(&rule.rule).or_default() += 1;
        }
        let mut notes: Vec<String> = rules.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
        let stopped = series.runs(arm).filter(|run| run.stopped.is_some()).count();
        if stopped > 0 {
            notes.push(format!("{stopped} stopped early"));
        }
        let notes = match notes.is_empty() {
            true => String::new(),
            false => format!(" ({})", notes.join(", ")),
        };
        let named = match (parts.is_empty(), runs) {
            (_, 0) => continue,
            (true, 1) => " run",
            (true, _) => " runs",
            (false, _) => "",
        };
        parts.push(format!(
            "{} of {runs}{named} of {}{notes}",
            collapsed.len(),
            series.name
        ));
    }
    match (parts.is_empty(), all) {
        (true, _) => "none of no runs".into(),
        (_, 0) => parts.join(", "),
        (_, all) => format!(
            "{} (of these {all}, {better} ended with more right answers than they began with)",
            parts.join(", ")
        ),
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
    let [above, _, below] = difference.signs();
    let seeds = match difference.by_seed.len() {
        1 => "one seed, which says nothing of others".to_string(),
        all => format!("{all} seeds, {above} above and {below} below"),
    };
    format!("{words} in {} ({difference} points; {seeds})", series.name)
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
    if held + failed.len() == 0 {
        return Ok("None of the checks of what was to be shown could be made, for want of their arms.".into());
    }
    let mut sentence = format!(
        "Of the {} checks of what was to be shown, series by series, {held} hold (those that look at single seeds in every one)",
        held + failed.len()
    );
    sentence += &match failed.is_empty() {
        true => ", and none fails".to_string(),
        false => {
            let verb = if failed.len() == 1 { "does" } else { "do" };
            format!(", and {} {verb} not: {}", failed.len(), failed.join("; "))
        }
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
            naive.contains(
                "collapsed in 2 of 5 runs of calm (accuracy 2), 2 of 5 of stress (accuracy 2) (of these 4, 0 ended"
            ) && naive.contains("worse in calm (-")
                && naive.contains(" points; 5 seeds, 0 above and 5 below)"),
            "{naive}"
        );
        assert!(
            quads.contains("0 of 5 runs of calm, 0 of 5 of stress") && quads.contains("worse in stress (-"),
            "{quads}"
        );
        assert_eq!(
            checks,
            "Of the 14 checks of what was to be shown, series by series, 14 hold (those that look at single seeds in every one), and \
             none fails."
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
        assert!(naive.contains("0 of 5 runs of calm, 0 of 5 of stress;"), "{naive}");
        assert!(
            naive.contains(
                "no differently as far as these seeds can tell in calm (0.0 [0.0, 0.0] points; 5 seeds, 0 above and 0 below)"
            ),
            "{naive}"
        );
        assert!(quads.contains("better in calm (+"), "{quads}");
        assert!(
            checks.contains("12 hold (those that look at single seeds in every one), and 2 do not: calm: "),
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
            checks.contains("(6 more could not be made, for want of their arms)"),
            "{checks}"
        );
    }
}
