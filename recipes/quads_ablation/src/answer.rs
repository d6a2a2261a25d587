//! The answer in a few sentences, made from the numbers whatever they are.
use anyhow::Result;

use std::collections::BTreeMap;

use crate::{
    checks::checks,
    results::{ArmRun, Family, Results, Series, Side},
    statistics::{Difference, final_difference, points},
    table::{plain_number, rules_of_collapse},
};

/// What naive rollouts did, what QUADS did, how both depend on what a family of series varies, and how much of what was to be shown
/// holds. Plain text.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn sentences(results: &Results) -> Result<Vec<String>> {
    let mut sentences = vec![
        format!(
            "By the rules declared beforehand, naive 4-bit rollouts (B) collapsed in {}. At the end they answered, against full \
             precision (A), {}.",
            collapsed(results, "B"),
            against_a(results, "B")?
        ),
        format!(
            "QUADS as published (E) collapsed in {}, and answered {}.",
            collapsed(results, "E"),
            against_a(results, "E")?
        ),
        format!(
            "With every channel compensated (E+) it collapsed in {}, and answered {}.",
            collapsed(results, "E+"),
            against_a(results, "E+")?
        ),
    ];
    for family in results.families() {
        sentences.extend(along(&family)?);
    }
    sentences.push(verdicts(results)?);
    Ok(sentences)
}

/// `a, b and c`.
fn list<T: AsRef<str>>(words: &[T]) -> String {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

/// Things that the same is said of, in the order of the first of each.
fn grouped<K: PartialEq, V>(pairs: Vec<(K, V)>) -> Vec<(K, Vec<V>)> {
    let mut groups: Vec<(K, Vec<V>)> = Vec::new();
    for (key, value) in pairs {
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

/// Where B, E and E+ end along the values of a family's setting; `None` where no arm can be compared.
fn along(family: &Family<'_>) -> Result<Option<String>> {
    let mut arms = Vec::new();
    for arm in ["B", "E", "E+"] {
        let mut ends = Vec::new();
        for (_, series) in &family.members {
            ends.push(final_difference(series, arm, "A", Side::Own)?);
        }
        if ends.iter().any(Option::is_some) {
            let told = |end: &Option<Difference>| end.as_ref().map_or("—".into(), |end| points(end.mean));
            let from = if arms.is_empty() { " points from A" } else { "" };
            arms.push(format!(
                "{arm} ends {}{from}",
                list(&ends.iter().map(told).collect::<Vec<_>>())
            ));
        }
    }
    let values: Vec<String> = family.members.iter().map(|(value, _)| plain_number(*value)).collect();
    let told = format!(
        "Along {} ({}: {}), {}.",
        family.setting,
        family.name,
        list(&values),
        arms.join("; ")
    );
    Ok((!arms.is_empty()).then_some(told))
}

/// `0 of 5 runs of calm and stress each, 2 of 5 of hard (gap 2) (of these 2, 1 ended with more right answers than they began with)`.
fn collapsed(results: &Results, arm: &str) -> String {
    let (mut counts, mut all, mut better) = (Vec::new(), 0, 0);
    for series in results.main_series() {
        let collapsed: Vec<&ArmRun> = series.runs(arm).filter(|run| run.collapse.is_some()).collect();
        all += collapsed.len();
        better += collapsed
            .iter()
            .filter(|run| run.end.own.share() > run.start.own.share())
            .count();
        let runs = series.runs(arm).count();
        if runs > 0 {
            counts.push(((collapsed.len(), runs, rules_of_collapse(series, arm)), &series.name));
        }
    }
    let mut parts = Vec::new();
    for ((collapsed, runs, rules), names) in grouped(counts) {
        let named = match (parts.is_empty(), runs) {
            (true, 1) => " run",
            (true, _) => " runs",
            (false, _) => "",
        };
        let each = if names.len() > 1 { " each" } else { "" };
        parts.push(format!("{collapsed} of {runs}{named} of {}{each}{rules}", list(&names)));
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

/// What the final difference to A is in each series, those together of which the same can be said.
fn against_a(results: &Results, arm: &str) -> Result<String> {
    let mut differences = Vec::new();
    for series in results.main_series() {
        if let Some(difference) = final_difference(series, arm, "A", Side::Own)? {
            differences.push((in_words(&difference), with_numbers(series, &difference)));
        }
    }
    let told = |(words, series): (&str, Vec<String>)| format!("{words} in {}", list(&series));
    Ok(match differences.is_empty() {
        true => "nothing that could be compared: no seed has both arms".into(),
        false => grouped(differences)
            .into_iter()
            .map(told)
            .collect::<Vec<_>>()
            .join("; "),
    })
}

fn in_words(difference: &Difference) -> &'static str {
    match (difference.is_clear(), difference.mean < 0.0) {
        (true, true) => "worse",
        (true, false) => "better",
        (false, _) => "no differently as far as these seeds can tell",
    }
}

/// `calm (-7.3 [-11.2, -3.8] points; 5 seeds, 0 above and 5 below)`.
fn with_numbers(series: &Series, difference: &Difference) -> String {
    let [above, _, below] = difference.signs();
    let seeds = match difference.by_seed.len() {
        1 => "one seed, which says nothing of others".to_string(),
        all => format!("{all} seeds, {above} above and {below} below"),
    };
    format!("{} ({difference} points; {seeds})", series.name)
}

/// How many checks hold, and which do not.
fn verdicts(results: &Results) -> Result<String> {
    let (mut held, mut failed, mut unmeasured) = (0, Vec::new(), 0);
    let mut but: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for series in results.main_series().filter(|series| !series.seeds.is_empty()) {
        for check in checks(series)? {
            match check.holds() {
                Some(true) => {
                    held += 1;
                    if let Some(says) = check.but() {
                        but.entry(says).or_default().push(&series.name);
                    }
                }
                Some(false) => failed.push(format!("{}: {} ({})", series.name, check.says, check.verdict())),
                None => unmeasured += 1,
            }
        }
    }
    if held + failed.len() == 0 {
        return Ok("None of the checks of what was to be shown could be made, for want of their arms.".into());
    }
    let but = but
        .into_iter()
        .map(|(says, series)| format!(", in {} {says}", list(&series)));
    let mut sentence = format!(
        "Of the {} checks of what was to be shown, series by series, {held} hold (those that look at single seeds in every one; the \
         aim in the mean{})",
        held + failed.len(),
        but.collect::<String>()
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
    sentence.push('.');
    if !results.families().is_empty() {
        sentence += " Those of the families stand in their tables.";
    }
    Ok(sentence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn losing_and_winning_are_both_said() {
        let mut results = synthetic::results();
        let [naive, quads, all_channels, rates, sizes, checks] = &sentences(&results).unwrap()[..] else {
            panic!("a sentence for each family");
        };
        assert!(
            naive.contains("collapsed in 2 of 5 runs of calm and stress each (accuracy 2) (of these 4, 0 ended")
                && naive.contains("worse in calm (-")
                && naive.contains(" points; 5 seeds, 0 above and 5 below) and stress (-"),
            "{naive}"
        );
        assert!(
            quads.starts_with(
                "QUADS as published (E) collapsed in 0 of 5 runs of calm and stress each, and answered worse in calm (-"
            ),
            "{quads}"
        );
        assert!(
            all_channels.contains("(E+) it collapsed in 0 of 5 runs of calm and stress each"),
            "{all_channels}"
        );
        assert!(
            rates.starts_with("Along trainer.learning_rate (rate: 1e-4, 3e-4 and 1e-3), B ends -")
                && rates.contains(" points from A; E ends -")
                && sizes.contains("(size: 64, 128 and 256), B ends -")
                && sizes.contains("; E+ ends -"),
            "{rates}\n{sizes}"
        );
        assert_eq!(
            checks,
            "Of the 14 checks of what was to be shown, series by series, 14 hold (those that look at single seeds in every one; the aim \
             in the mean), and none fails. Those of the families stand in their tables."
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
        let [naive, quads, _, _, _, checks] = &sentences(&results).unwrap()[..] else {
            panic!("some sentences");
        };
        assert!(naive.contains("0 of 5 runs of calm and stress each."), "{naive}");
        assert!(
            naive.contains(
                "no differently as far as these seeds can tell in calm (0.0 [0.0, 0.0] points; 5 seeds, 0 above and 0 below)"
            ),
            "{naive}"
        );
        assert!(quads.contains("better in calm (+"), "{quads}");
        assert!(
            checks.contains(
                "12 hold (those that look at single seeds in every one; the aim in the mean), and 2 do not: calm: "
            ),
            "{checks}"
        );
    }

    #[test]
    fn what_was_not_run_is_said() {
        let mut results = synthetic::results();
        results.series = vec![synthetic::series("quick", &[synthetic::ARMS[0]], [1, 20, 64])];
        let [naive, _, _, checks] = &sentences(&results).unwrap()[..] else {
            panic!("no sentence for a family, for want of one");
        };
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
