//! `--list` and `--dry-run`.
use anyhow::Result;
use std::fmt::Write;

use crate::{
    arms::ARMS,
    collapse,
    plan::{Plan, RULE, State},
    series::Series,
};

/// Arms, series and rules.
pub fn list(series: &[Series]) -> String {
    let mut text = String::from("Arms\n");
    for arm in &ARMS {
        let settings: Vec<_> = arm
            .settings
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let more = if settings.is_empty() {
            String::new()
        } else {
            format!("\n{:31}{}", "", settings.join(" "))
        };
        let _ = writeln!(
            text,
            "  {:<3} trainer {:<6} rollout {:<9} {}{more}",
            arm.letter, arm.trainer, arm.rollout, arm.about
        );
    }
    text.push_str("\nSeries\n");
    for series in series {
        let arms: Vec<_> = series.arms.iter().map(|arm| arm.letter).collect();
        let seeds: Vec<_> = series.seeds.iter().map(u64::to_string).collect();
        let _ = writeln!(text, "  {}: {}", series.name, series.about);
        let _ = writeln!(text, "    arms {}; seeds {}", arms.join(" "), seeds.join(" "));
        if let Some(choice) = &series.choice {
            let _ = writeln!(
                text,
                "    {} is chosen from {} by arm {} with seeds {:?}: {RULE}",
                choice.key,
                choice.grid.join(", "),
                choice.arm.letter,
                choice.seeds
            );
        }
        for (key, value) in &series.settings {
            let _ = writeln!(text, "    {key} = {value}");
        }
    }
    let _ = write!(
        text,
        "\nAn arm counts as collapsed when\n  accuracy: held-out pass@1 in its own precision is below {:.0} % of its running maximum at \
         {} evaluations in a row,\n  skipped:  more than {:.0} % of its updates were skipped (from step {} on), or\n  gap:      \
         its largest |Δ log-prob| rises while its reward falls, over the last third of the steps so far (at least {}):\n            \
         rank correlations with the step of +{} and -{} at least, the reward ending below {:.0} % of where it began\n",
        100.0 * collapse::FALLEN,
        collapse::EVALUATIONS,
        100.0 * collapse::SKIPPED,
        collapse::SKIPPED_FROM,
        collapse::WINDOW,
        collapse::CORRELATION,
        collapse::CORRELATION,
        100.0 * collapse::REWARD_FALLEN
    );
    text
}

/// What would be run.
///
/// # Errors
/// When something was made with other settings, or cannot be read.
pub fn dry_run(plan: &Plan) -> Result<String> {
    let (left, done) = plan.left()?;
    let mut text = format!("{} to run, {done} done\n", left.len());
    for (job, state) in &left {
        let more = match state {
            State::Begun => " (goes on)",
            State::Done | State::Missing => "",
        };
        writeln!(text, "  {}{more}", job.name())?;
    }
    Ok(text)
}
