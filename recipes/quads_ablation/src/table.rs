//! Tables: made once of the results, written as text for the terminal, as Markdown and as HTML.
use anyhow::Result;
use grpo_math::results::nats;
use std::collections::BTreeMap;

use crate::{
    arms::Arm,
    checks::checks,
    results::{ArmRun, Family, Gap, LayerError, Results, Series, Side, Tried},
    statistics::{Difference, Spread, final_difference},
};

/// Columns of the curves that tables look at.
const MEAN_GAP: &str = "sampling/sampling_logp_difference/mean";
const P99_GAP: &str = "sampling/sampling_logp_difference/p99";
const MAX_GAP: &str = "sampling/sampling_logp_difference/max";

/// Characters of a line in the terminal.
const WIDTH: usize = 118;

/// A table.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// How to read it.
    pub note: String,
    /// Headings.
    pub header: Vec<String>,
    /// As many cells a row as there are headings.
    pub rows: Vec<Vec<String>>,
    /// Columns from the left that hold words.
    pub words: usize,
}

impl Table {
    fn new(title: &str, note: &str, words: usize, header: &[&str]) -> Self {
        Self {
            title: title.into(),
            note: note.into(),
            header: header.iter().map(|heading| heading.to_string()).collect(),
            rows: Vec::new(),
            words,
        }
    }

    fn push(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.header.len(), "{}: {cells:?}", self.title);
        self.rows.push(cells);
    }

    /// For the terminal: at most 118 characters a line, where words can be wrapped and columns moved below.
    pub fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        for line in wrapped(&self.note, WIDTH) {
            text += &format!("{line}\n");
        }
        let mut next = 1;
        while next < self.header.len() {
            let mut columns = vec![0];
            let mut width = 2 + self.width(0);
            while next < self.header.len() {
                let wraps = next + 1 == self.words;
                if columns.len() > 1 && !wraps && width + 2 + self.width(next) > WIDTH {
                    break;
                }
                width += 2 + self.width(next);
                columns.push(next);
                next += 1;
            }
            text += &self.block(&columns);
            if next < self.header.len() {
                text.push('\n');
            }
        }
        text
    }

    fn width(&self, column: usize) -> usize {
        let cells = self
            .rows
            .iter()
            .chain([&self.header])
            .map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    }

    /// Some of the columns, aligned; the last column of words is wrapped.
    fn block(&self, columns: &[usize]) -> String {
        let mut text = String::new();
        for row in [&self.header].into_iter().chain(&self.rows) {
            let mut line = String::new();
            for &column in columns {
                let (cell, width) = (&row[column], self.width(column));
                line += "  ";
                if column > 0 && column + 1 == self.words && Some(&column) == columns.last() {
                    let indent = line.chars().count();
                    let parts = wrapped(cell, (WIDTH.saturating_sub(indent)).max(30));
                    line += &parts.join(&format!("\n{}", " ".repeat(indent)));
                } else if column < self.words {
                    line += &format!("{cell:<width$}");
                } else {
                    line += &format!("{cell:>width$}");
                }
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    /// For documents.
    pub fn to_markdown(&self) -> String {
        let row = |cells: &[String]| format!("| {} |\n", cells.join(" | ").replace('\n', " "));
        let mut text = format!("**{}**\n\n", self.title);
        if !self.note.is_empty() {
            text += &format!("{}\n\n", self.note);
        }
        text += &row(&self.header);
        let dashes = |column: usize| if column < self.words { "---" } else { "---:" };
        let dashes: Vec<&str> = (0..self.header.len()).map(dashes).collect();
        text += &format!("|{}|\n", dashes.join("|"));
        for cells in &self.rows {
            text += &row(cells);
        }
        text
    }

    /// For the report: a `table` element.
    pub fn to_html(&self) -> String {
        let cells = |cells: &[String], tag: &str| {
            let cell = |(column, cell): (usize, &String)| {
                let mut classes = Vec::new();
                if column < self.words {
                    classes.push("words");
                }
                if column < self.words && self.width(column) > 30 {
                    classes.push("long");
                }
                if cell.starts_with("FAILS") {
                    classes.push("fails");
                }
                let class = match classes.is_empty() {
                    true => String::new(),
                    false => format!(" class=\"{}\"", classes.join(" ")),
                };
                format!("<{tag}{class}>{}</{tag}>", escape(cell))
            };
            cells.iter().enumerate().map(cell).collect::<String>()
        };
        let mut html = format!("<table>\n<tr>{}</tr>\n", cells(&self.header, "th"));
        for row in &self.rows {
            html += &format!("<tr>{}</tr>\n", cells(row, "td"));
        }
        html + "</table>\n"
    }
}

/// Words in lines of so many characters, where no word is longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => *line += &format!(" {word}"),
            _ => lines.push(word.into()),
        }
    }
    lines
}

/// Text in HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// All tables of the results, under the headings of their sections.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn sections(results: &Results) -> Result<Vec<(String, Vec<Table>)>> {
    let mut sections = vec![("The paper's figures beside ours".into(), vec![paper(results)?])];
    for series in results.main_series() {
        sections.push((heading(series), series_tables(series)?));
    }
    for family in results.families() {
        let tables = vec![ends_along(&family)?, checkpoints_along(&family)?];
        sections.push((format!("{}: {} varied", family.name, family.setting), tables));
    }
    Ok(sections)
}

/// `stress: what it is for`.
pub fn heading(series: &Series) -> String {
    match series.about.is_empty() {
        true => series.name.clone(),
        false => format!("{}: {}", series.name, series.about),
    }
}

/// The tables of one series, the most important first.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn series_tables(series: &Series) -> Result<Vec<Table>> {
    let tables = [
        accuracy(series),
        differences(series)?,
        precisions(series),
        check_table(series)?,
        gaps(series),
        parts(series),
        activations(series),
        choice(series),
    ];
    Ok(tables.into_iter().filter(|table| !table.rows.is_empty()).collect())
}

/// The tables as one text for the terminal.
///
/// # Errors
/// As [`sections`].
pub fn to_text(results: &Results) -> Result<String> {
    let mut text = String::new();
    for (heading, tables) in sections(results)? {
        text += &format!("=== {heading}\n\n");
        for table in tables {
            text += &format!("{}\n", table.to_text());
        }
    }
    Ok(text)
}

/// The tables as Markdown.
///
/// # Errors
/// As [`sections`].
pub fn to_markdown(results: &Results) -> Result<String> {
    let mut text = String::new();
    for (heading, tables) in sections(results)? {
        text += &format!("## {heading}\n\n");
        for table in tables {
            text += &format!("{}\n", table.to_markdown());
        }
    }
    Ok(text)
}

/// Start and end, and who collapsed.
fn accuracy(series: &Series) -> Table {
    let mut table = Table::new(
        "Pass@1 in the precision of the arm's own rollout, %",
        &format!(
            "Mean ± standard error over the seeds; {} held-out problems, one sample each. Collapsed: by which rule, at which step \
             of which run first; a run that met a rule goes on, and can recover.",
            problems(series)
        ),
        3,
        &[
            "arm",
            "trainer",
            "rollout",
            "start",
            "end",
            "collapsed",
            "range of the end",
        ],
    );
    for letter in series.arms() {
        let [start, end] = [true, false].map(|start| share(series, letter, start, Side::Own));
        let collapsed: Vec<&ArmRun> = series.runs(letter).filter(|run| run.collapse.is_some()).collect();
        let steps: Vec<String> = collapsed
            .iter()
            .flat_map(|r| &r.collapse)
            .map(|c| format!("{} {}", c.rule, c.step))
            .collect();
        let count = series.runs(letter).count();
        let collapsed = match collapsed.len() {
            0 => format!("0 of {count}"),
            number => format!("{number} of {count} ({})", steps.join(", ")),
        };
        let stopped = series.runs(letter).filter(|run| run.stopped.is_some()).count();
        let collapsed = match stopped {
            0 => collapsed,
            number => format!("{collapsed}, {number} stopped early"),
        };
        let (trainer, rollout) = precisions_of(letter);
        let range = end.map_or("—".into(), |end| {
            format!("{:.1} to {:.1}", 100.0 * end.low, 100.0 * end.high)
        });
        table.push([
            letter.into(),
            trainer,
            rollout,
            percent(start),
            percent(end),
            collapsed,
            range,
        ]);
    }
    table
}

/// Trainer and rollout of an arm, in words.
pub fn precisions_of(letter: &str) -> (String, String) {
    let Some(arm) = Arm::find(letter) else {
        return ("—".into(), "—".into());
    };
    let name = |precision: &str| match precision {
        "high" => "high".to_string(),
        "fp8" => "FP8".into(),
        "w4a4_rac" => "W4A4 + RAC".into(),
        other => other.to_uppercase(),
    };
    let setting = |key: &str| {
        arm.settings
            .iter()
            .find(|(name, _)| *name == key)
            .map(|(_, value)| *value)
    };
    let trainer = match setting("trainer.backward") {
        Some(backward) => format!("{}, backward {backward}", name(arm.trainer)),
        None => name(arm.trainer),
    };
    let mut rollout = name(arm.rollout);
    match setting("rac.selection") {
        Some("all") => rollout += " all",
        Some(_) => rollout += " half",
        None => {}
    }
    if setting("grpo.correction").is_some() {
        rollout += ", TIS";
    }
    if setting("rollout.routing_replay").is_some() {
        rollout += ", replay";
    }
    (trainer, rollout)
}

/// The final policies where they are at home and all in common precisions.
fn precisions(series: &Series) -> Table {
    let mut header = vec!["arm"];
    header.extend(Side::ALL.map(Side::name));
    let mut table = Table::new(
        "Pass@1 of the final policy by precision, %",
        "Mean ± standard error over the seeds, with the range. What an arm loses in its own precision but not in high precision \
         is lost by sampling, not by learning.",
        1,
        &header,
    );
    for letter in series.arms() {
        let cell = |side| match share(series, letter, false, side) {
            Some(spread) => format!(
                "{} ({:.1} to {:.1})",
                percent(Some(spread)),
                100.0 * spread.low,
                100.0 * spread.high
            ),
            None => "—".into(),
        };
        table.push(std::iter::once(letter.to_string()).chain(Side::ALL.map(cell)));
    }
    table
}

/// Every arm less A.
fn differences(series: &Series) -> Result<Table> {
    let mut header = vec!["arm"];
    header.extend(Side::ALL.map(Side::name));
    let mut table = Table::new(
        "Difference to A at the end, in points of pass@1",
        "Mean [paired 95 % bootstrap interval] (seeds above / below zero). With few seeds read both \
         together.",
        1,
        &header,
    );
    for letter in series.arms() {
        if letter == "A" {
            continue;
        }
        let mut cells = vec![letter.to_string()];
        for side in Side::ALL {
            cells.push(difference_cell(final_difference(series, letter, "A", side)?));
        }
        if cells[1..].iter().any(|cell| cell != "—") {
            table.push(cells);
        }
    }
    Ok(table)
}

fn difference_cell(difference: Option<Difference>) -> String {
    match difference {
        Some(difference) => {
            let [above, _, below] = difference.signs();
            format!("{difference} ({above} / {below})")
        }
        None => "—".into(),
    }
}

/// The gap between trainer and rollout, at the beginning and at the end.
fn gaps(series: &Series) -> Table {
    let mut table = Table::new(
        "Gap |Δ log-prob| between trainer and rollout, nats",
        "Mean over the seeds. At the warm-up checkpoint all arms score the same tokens; at the end each scores what it sampled \
         in its last step, and an arm that has collapsed can have a small gap.",
        1,
        &[
            "arm",
            "checkpoint: mean",
            "99th perc.",
            "max",
            "of B's mean",
            "end: mean",
            "99th perc.",
            "max",
        ],
    );
    let naive = mean(series.gaps("B").map(|gap| gap.mean));
    for letter in series.arms() {
        let gap = |of: fn(&Gap) -> f64| mean(series.gaps(letter).map(of));
        let end = |column: &str| mean(series.runs(letter).filter_map(|run| run.curve.last(column)));
        let share = match (gap(|gap| gap.mean), naive) {
            (Some(mean), Some(naive)) if naive > 0.0 => short_percent(mean / naive),
            _ => "—".into(),
        };
        table.push([
            letter.into(),
            number(gap(|gap| gap.mean)),
            number(gap(|gap| gap.p99)),
            number(gap(|gap| gap.max)),
            share,
            number(end(MEAN_GAP)),
            number(end(P99_GAP)),
            number(end(MAX_GAP)),
        ]);
    }
    table
}

/// Where the gap comes from.
fn parts(series: &Series) -> Table {
    let mut table = Table::new(
        "Parts of the gap at the warm-up checkpoint, mean |δ| in nats",
        "Per token the parts add up to the gap; their means of absolute values need not. The residue is the largest miss of a \
         token.",
        1,
        &["arm", "weights", "activations", "numerics", "largest residue"],
    );
    for letter in series.arms() {
        let part = |of: fn(&Gap) -> Option<f64>| mean(series.gaps(letter).filter_map(of));
        let residues = series.gaps(letter).filter_map(|gap| gap.residue);
        let cells = [
            part(|gap| gap.weight),
            part(|gap| gap.activation),
            part(|gap| gap.numerics),
            residues.fold(None, |largest: Option<f64>, r| Some(largest.map_or(r, |l| l.max(r)))),
        ];
        if cells.iter().any(Option::is_some) {
            table.push(std::iter::once(letter.to_string()).chain(cells.map(number)));
        }
    }
    table
}

/// How well activations survive, over the layers.
fn activations(series: &Series) -> Table {
    let mut table = Table::new(
        "Activations of the final policy, over its layers",
        "Mean over layers and seeds (in brackets: the worst layer). Error: relative, of W4A4 activations without compensation and \
         as the arm's rollout rounds them. Channels: largest over median root-mean-square. Captured: share of the squared \
         residual in the calibrated half of the channels.",
        1,
        &["arm", "error, W4A4", "error, own", "channels", "captured"],
    );
    for letter in series.arms() {
        let layers: Vec<&LayerError> = series.runs(letter).flat_map(|run| &run.layers).collect();
        let cell = |of: fn(&LayerError) -> f64, told: fn(f64) -> String, worst: fn(f64, f64) -> f64| {
            let values = layers.iter().map(|layer| of(layer)).filter(|value| value.is_finite());
            match mean(values.clone()) {
                Some(mean) => format!("{} ({})", told(mean), told(values.fold(mean, worst))),
                None => "—".into(),
            }
        };
        if !layers.is_empty() {
            table.push([
                letter.into(),
                cell(|layer| layer.w4a4, short_percent, f64::max),
                cell(|layer| layer.own, short_percent, f64::max),
                cell(|layer| layer.channel_ratio, |ratio| format!("{ratio:.1}"), f64::max),
                cell(|layer| layer.captured, short_percent, f64::min),
            ]);
        }
    }
    table
}

fn check_table(series: &Series) -> Result<Table> {
    let mut table = Table::new(
        "What was to be shown",
        "Checkpoint: the end of the warm-up, where all arms score the same tokens; numbers by seed, in nats where no unit \
         is given. Checks that fail stay in the table.",
        3,
        &["check", "verdict", "numbers"],
    );
    let checks = checks(series)?;
    if checks.iter().any(|check| check.holds().is_some()) {
        for check in checks {
            table.push([check.says.to_string(), check.verdict(), check.numbers()]);
        }
    }
    Ok(table)
}

/// How a setting was chosen before the arms ran.
fn choice(series: &Series) -> Table {
    let Some(choice) = &series.choice else {
        return Table::new("", "", 1, &[]);
    };
    let mut header = vec![choice.key.clone()];
    header.extend(choice.seeds.iter().map(|seed| format!("seed {seed}")));
    header.extend(["mean", ""].map(String::from));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = Table::new(
        &format!("The choice of {}, by arm {} alone", choice.key, choice.arm),
        &format!(
            "Pass@1 at the end, %, with seeds that no arm is compared on. Taken: {}.",
            choice.rule
        ),
        1,
        &header,
    );
    for Tried { value, pass_at_1 } in &choice.tried {
        let taken = if *value == choice.chosen { "taken" } else { "" };
        let shares = pass_at_1.iter().map(|share| Spread::of([*share]));
        let cells = shares.chain([Spread::of(pass_at_1.iter().copied())]);
        let cells = cells.map(|spread| spread.map_or("—".into(), |spread| format!("{:.1}", 100.0 * spread.mean)));
        table.push([value.clone()].into_iter().chain(cells).chain([taken.into()]));
    }
    table
}

/// Arms that a family shows.
const OF_FAMILIES: [&str; 6] = ["A", "B", "C", "D", "E", "E+"];

/// Of these, the ones that any of the series has run.
fn arms_of(family: &Family<'_>) -> Vec<&'static str> {
    let has = |arm: &&str| {
        family
            .members
            .iter()
            .any(|(_, series)| series.runs(arm).next().is_some())
    };
    OF_FAMILIES.into_iter().filter(has).collect()
}

/// Where the arms of series that differ in one setting end.
fn ends_along(family: &Family<'_>) -> Result<Table> {
    let arms = arms_of(family);
    let has_a = arms.contains(&"A");
    let compared: Vec<&str> = arms.iter().copied().filter(|arm| *arm != "A" && has_a).collect();
    let mut header = vec![family.setting.to_string()];
    header.extend(arms.iter().map(|arm| format!("{arm}, %")));
    header.extend(compared.iter().map(|arm| format!("{arm} − A")));
    header.push("collapsed".into());
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = Table::new(
        &format!("The end, by {}", family.setting),
        &format!(
            "First row: {} Pass@1 in the precision of the arm's own rollout, mean ± standard error; differences in points [paired 95 % interval] \
             (seeds above / below zero); runs that met a rule of collapse, by rule.",
            family.members[0].1.about
        ),
        1,
        &header,
    );
    for (value, series) in &family.members {
        let mut cells = vec![plain_number(*value)];
        cells.extend(arms.iter().map(|arm| percent(share(series, arm, false, Side::Own))));
        for arm in &compared {
            cells.push(difference_cell(final_difference(series, arm, "A", Side::Own)?));
        }
        cells.push(collapsed_arms(series));
        table.push(cells);
    }
    Ok(table)
}

/// `B 2 of 3 (gap 2), E 1 of 3 (accuracy 1)`; `0 of 9` where no arm has collapsed or stopped.
fn collapsed_arms(series: &Series) -> String {
    let told = |letter: &&str| {
        let notes = rules_of_collapse(series, letter);
        let collapsed = series.runs(letter).filter(|run| run.collapse.is_some()).count();
        (!notes.is_empty()).then(|| format!("{letter} {collapsed} of {}{notes}", series.runs(letter).count()))
    };
    let arms: Vec<String> = series.arms().iter().filter_map(told).collect();
    match arms.is_empty() {
        true => format!("0 of {}", series.seeds.iter().flat_map(|seed| &seed.arms).count()),
        false => arms.join(", "),
    }
}

/// ` (gap 2, 1 stopped early)`: by which rules how many runs of an arm collapsed; empty where none did.
pub fn rules_of_collapse(series: &Series, letter: &str) -> String {
    let mut rules: BTreeMap<&str, usize> = BTreeMap::new();
    for collapse in series.runs(letter).filter_map(|run| run.collapse.as_ref()) {
        *rules.entry(&collapse.rule).or_default() += 1;
    }
    let mut notes: Vec<String> = rules.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
    let stopped = series.runs(letter).filter(|run| run.stopped.is_some()).count();
    if stopped > 0 {
        notes.push(format!("{stopped} stopped early"));
    }
    match notes.is_empty() {
        true => String::new(),
        false => format!(" ({})", notes.join(", ")),
    }
}

/// The gaps at the warm-up checkpoints of series that differ in one setting, and what was to be shown of each.
fn checkpoints_along(family: &Family<'_>) -> Result<Table> {
    let arms = arms_of(family);
    let mut header = vec![family.setting.to_string()];
    header.extend(arms.iter().map(|arm| format!("gap {arm}")));
    header.extend(["checks that hold", "that do not"].map(String::from));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = Table::new(
        &format!(
            "Gap at the warm-up checkpoint and what was to be shown, by {}",
            family.setting
        ),
        "Mean |Δ log-prob| in nats, mean over the seeds; the same in all rows where the setting has no say in the warm-up. Of the checks, \
         those whose arms have run.",
        1,
        &header,
    );
    for (value, series) in &family.members {
        let mut cells = vec![plain_number(*value)];
        let gap = |arm: &&str| number(mean(series.gaps(arm).map(|gap| gap.mean)));
        cells.extend(arms.iter().map(gap));
        let checks: Vec<_> = checks(series)?
            .into_iter()
            .filter(|check| check.holds().is_some())
            .collect();
        let (held, failed): (Vec<_>, Vec<_>) = checks.iter().partition(|check| check.holds() == Some(true));
        cells.push(format!("{} of {}", held.len(), checks.len()));
        let failed = failed
            .iter()
            .map(|check| format!("{} ({})", check.says, check.verdict()));
        let failed = failed.collect::<Vec<_>>().join("; ");
        cells.push(if failed.is_empty() { "—".into() } else { failed });
        table.push(cells);
    }
    Ok(table)
}

/// The paper's claims with our numbers for the same thing.
pub fn paper(results: &Results) -> Result<Table> {
    let has_arms = |series: &&Series| !series.arms().is_empty();
    let series: Vec<&Series> = results.main_series().filter(has_arms).collect();
    let names: Vec<String> = series.iter().map(|series| format!("ours, {}", series.name)).collect();
    let mut header = vec!["", "paper"];
    header.extend(names.iter().map(String::as_str));
    let mut table = Table::new(
        "QUADS (July 2026: 25B parameters, 2.8B active, GRPO on Blackwell) beside ours",
        "Pass@1 in the rollout's own precision, %, ours as mean ± standard error over the seeds, with collapsed runs; differences in \
         points with paired 95 % intervals (seeds above / below zero). Ours is NVFP4 emulated, on models smaller by about five orders of \
         magnitude. Largest gap: of a run's steps, the largest |Δ log-prob| of a token, mean over the seeds.",
        1,
        &header,
    );
    let mut row = |what: &str, paper: &str, ours: &dyn Fn(&Series) -> Result<String>| -> Result<()> {
        let mut cells = vec![what.to_string(), paper.to_string()];
        for series in &series {
            cells.push(ours(series)?);
        }
        table.push(cells);
        Ok(())
    };
    let ends = |letter: &'static str| {
        move |series: &Series| {
            let collapsed = series.runs(letter).filter(|run| run.collapse.is_some()).count();
            let end = percent(share(series, letter, false, Side::Own));
            Ok(match (end.as_str(), collapsed) {
                ("—", _) | (_, 0) => end,
                (_, number) => format!("{end}, {number} of {} collapsed", series.runs(letter).count()),
            })
        }
    };
    let less = |one: &'static str, other: &'static str| {
        move |series: &Series| Ok(difference_cell(final_difference(series, one, other, Side::Own)?))
    };
    let largest = |letter: &'static str| {
        move |series: &Series| {
            let peak = |run: &ArmRun| run.curve.points(MAX_GAP).map(|(_, value)| value).reduce(f64::max);
            Ok(number(mean(series.runs(letter).filter_map(peak))))
        }
    };
    row("BF16 (ours: A, f32)", "73.15", &ends("A"))?;
    row("FP8 rollout (C)", "72.88", &ends("C"))?;
    row("naive NVFP4 (B)", "51.37, collapses near step 150", &ends("B"))?;
    row("QUADS (E)", "72.86", &ends("E"))?;
    row("QUADS, all channels compensated (E+)", "—", &ends("E+"))?;
    row("QUADS less BF16 (E − A)", "-0.29", &less("E", "A"))?;
    row("all channels less BF16 (E+ − A)", "—", &less("E+", "A"))?;
    row("naive less BF16 (B − A)", "-21.78", &less("B", "A"))?;
    row(
        "QAT without RAC less QUADS (D − E)",
        "stable, less accurate",
        &less("D", "E"),
    )?;
    row("QAT without RAC (D)", "stable", &ends("D"))?;
    row("symmetric W4A4 QAT less QUADS (F − E)", "worse", &less("F", "E"))?;
    row("its stronger backward pass (F' − E)", "worse", &less("F'", "E"))?;
    row("largest gap, naive (B)", "1.3", &largest("B"))?;
    row("largest gap, QUADS (E)", "0.86", &largest("E"))?;
    row("largest gap, floor (A)", "0.74: two engines", &largest("A"))?;
    let elsewhere: &dyn Fn(&Series) -> Result<String> = &|_| Ok("not measured here".into());
    row("rollout throughput, QUADS over FP8", "+16 %", elsewhere)?;
    row("cost of RAC over plain W4A4", "5 to 9 %", elsewhere)?;
    Ok(table)
}

/// Pass@1 of an arm over the seeds, at the start or at the end.
pub fn share(series: &Series, letter: &str, start: bool, side: Side) -> Option<Spread> {
    let evaluation = |run: &ArmRun| match start {
        true => run.start.side(side).share(),
        false => run.end.side(side).share(),
    };
    Spread::of(series.runs(letter).map(evaluation))
}

/// How many problems judge start and end.
pub fn problems(series: &Series) -> usize {
    let runs = series.seeds.iter().flat_map(|seed| &seed.arms);
    runs.map(|run| run.end.own.0.len()).next().unwrap_or(0)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    Spread::of(values).map(|spread| spread.mean)
}

/// `76.5 ± 1.2`, in percent without the sign.
fn percent(spread: Option<Spread>) -> String {
    match spread {
        None => "—".into(),
        Some(Spread {
            mean,
            standard_error: Some(error),
            ..
        }) => format!("{:.1} ± {:.1}", 100.0 * mean, 100.0 * error),
        Some(Spread { mean, .. }) => format!("{:.1}", 100.0 * mean),
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or("—".into(), nats)
}

fn short_percent(share: f64) -> String {
    match 100.0 * share {
        small if small != 0.0 && small < 0.1 => format!("{small:.0e} %"),
        other => format!("{other:.1} %"),
    }
}

/// A setting's value as people write it.
pub fn plain_number(value: f64) -> String {
    match value.abs() {
        small if small > 0.0 && small < 1e-2 => format!("{value:e}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{results::Answers, synthetic};

    fn tiny() -> Table {
        let mut table = Table::new("Title", "Note.", 1, &["arm", "end"]);
        table.push(["E+".into(), "9.5".into()]);
        table.push(["A <b>".into(), "12.5".into()]);
        table
    }

    #[test]
    fn a_table_is_written_in_three_forms() {
        assert_eq!(
            tiny().to_text(),
            "Title\nNote.\n  arm     end\n  E+      9.5\n  A <b>  12.5\n"
        );
        assert_eq!(
            tiny().to_markdown(),
            "**Title**\n\nNote.\n\n| arm | end |\n|---|---:|\n| E+ | 9.5 |\n| A <b> | 12.5 |\n"
        );
        let html = tiny().to_html();
        assert!(html.contains("<th class=\"words\">arm</th><th>end</th>"), "{html}");
        assert!(
            html.contains("<td class=\"words\">A &lt;b&gt;</td><td>12.5</td>"),
            "{html}"
        );
    }

    #[test]
    fn accuracy_is_mean_error_range_and_collapses() {
        let mut series = synthetic::series("stress", &synthetic::ARMS, [3, 20, 100]);
        for (seed, right) in series.seeds.iter_mut().zip([70, 80, 90]) {
            seed.arms[0].end.own = (0..100).map(|at| at < right).collect();
            seed.arms[0].start.own = Answers(vec![false; 100]);
        }
        series.seeds[1].arms[0].stopped = Some("the gradient is not finite".into());
        let table = accuracy(&series);
        assert_eq!(
            table.rows[0],
            [
                "A",
                "high",
                "high",
                "0.0 ± 0.0",
                "80.0 ± 5.8",
                "0 of 3, 1 stopped early",
                "70.0 to 90.0"
            ]
        );
        assert_eq!(table.rows[1][5], "1 of 3 (accuracy 20)");
        let precisions: Vec<&str> = table.rows.iter().map(|row| row[2].as_str()).collect();
        assert_eq!(
            precisions,
            [
                "high",
                "W4A4",
                "FP8",
                "W4A4",
                "W4A4 + RAC half",
                "W4A4 + RAC all",
                "W4A4",
                "W4A4",
                "W4A4, TIS",
                "W4A4 + RAC half",
                "W4A4, replay"
            ]
        );
        assert_eq!(table.rows[7][1], "W4A4, backward quantized");
    }

    #[test]
    fn differences_are_paired_and_leave_a_out() {
        let mut series = synthetic::series("stress", &synthetic::ARMS, [3, 20, 100]);
        for seed in &mut series.seeds {
            seed.arms[1].end = seed.arms[0].end.clone();
        }
        let table = differences(&series).unwrap();
        assert_eq!(table.rows.len(), 10);
        assert_eq!(table.rows[0][..2], ["B", "0.0 [0.0, 0.0] (0 / 0)"]);
    }

    #[test]
    fn a_choice_is_a_table_of_what_was_tried() {
        let mut series = synthetic::series("hard", &synthetic::ARMS, [1, 20, 64]);
        assert!(choice(&series).rows.is_empty());
        series.choice = Some(synthetic::choice());
        let table = choice(&series);
        assert_eq!(
            table.header,
            ["trainer.learning_rate", "seed 101", "seed 102", "mean", ""]
        );
        assert_eq!(table.rows[0], ["1e-4", "81.0", "79.0", "80.0", "taken"]);
        assert_eq!(table.rows[1], ["3e-4", "62.5", "50.0", "56.2", ""]);
        let tables = series_tables(&series).unwrap();
        assert_eq!(tables.last(), Some(&table));
        // Of a series whose arms have not run yet, it is all there is.
        series.seeds.clear();
        assert_eq!(series_tables(&series).unwrap(), [table]);
    }

    #[test]
    fn a_family_is_one_row_a_value() {
        let mut results = synthetic::results();
        let size = results
            .series
            .iter_mut()
            .find(|series| series.name == "size-128")
            .unwrap();
        size.seeds[0].gaps[1].mean = 0.0;
        size.seeds[1].arms[2].stopped = Some("the gradient is not finite".into());
        let families = results.families();
        let [rate, size] = [&families[0], &families[1]].map(|family| ends_along(family).unwrap());
        assert_eq!(
            rate.header,
            [
                "trainer.learning_rate",
                "A, %",
                "B, %",
                "E, %",
                "B − A",
                "E − A",
                "collapsed"
            ]
        );
        assert_eq!(rate.rows.len(), 3);
        assert_eq!(
            (rate.rows[0][0].as_str(), rate.rows[0][6].as_str()),
            ("1e-4", "B 1 of 3 (accuracy 1)")
        );
        assert_eq!(size.header[5..8], ["B − A", "E − A", "E+ − A"]);
        assert_eq!(size.rows[1][8], "B 1 of 3 (accuracy 1), E 0 of 3 (1 stopped early)");
        let [rate, size] = [&families[0], &families[1]].map(|family| checkpoints_along(family).unwrap());
        assert_eq!(
            rate.header[1..],
            ["gap A", "gap B", "gap E", "checks that hold", "that do not"]
        );
        // Without D, E+ or C: of the parts and of the weights.
        assert_eq!(rate.rows[0][4..], ["2 of 2", "—"]);
        assert_eq!(size.rows[0][5..], ["5 of 5", "—"]);
        assert_eq!(
            size.rows[1][5..],
            [
                "4 of 5",
                "checkpoint: mean gap of E+ at most 15 % of B's (FAILS in 1 of 3 seeds (1))"
            ]
        );
    }

    #[test]
    fn all_sections_are_there_in_every_form() {
        let results = synthetic::results();
        let headings: Vec<String> = sections(&results)
            .unwrap()
            .into_iter()
            .map(|(heading, _)| heading)
            .collect();
        assert_eq!(headings.len(), 5);
        assert!(headings[1].starts_with("calm: ") && headings[3].starts_with("rate: trainer.learning_rate"));
        let (text, markdown) = (to_text(&results).unwrap(), to_markdown(&results).unwrap());
        for says in [
            "72.86",
            "51.37, collapses near step 150",
            "What was to be shown",
            "0.86",
        ] {
            assert!(text.contains(says) && markdown.contains(says), "{says}");
        }
        assert!(!text.contains("NaN") && !markdown.contains("NaN"));
    }

    #[test]
    fn what_was_not_run_is_a_dash_and_nothing_fails() {
        let one = [synthetic::ARMS[4]];
        let results = Results {
            series: vec![
                synthetic::series("quick", &one, [1, 20, 64]),
                Series {
                    seeds: Vec::new(),
                    ..synthetic::series("empty", &one, [1, 20, 64])
                },
            ],
            ..synthetic::results()
        };
        let text = to_text(&results).unwrap();
        assert!(text.contains("—") && text.contains("not measured"), "{text}");
        assert!(!text.contains("NaN") && text.contains("64.1"), "{text}");
        assert!(!text.contains(" ± 0"), "one seed has no standard error: {text}");
    }

    #[test]
    fn wide_tables_are_folded_in_the_terminal() {
        let mut table = Table::new("Title", "", 1, &["arm", "one", "two", "three"]);
        table.push(["A".into(), "1".repeat(60), "2".repeat(60), "3".into()]);
        let text = table.to_text();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(text.matches("  arm").count(), 2, "the first column is repeated: {text}");
        let text = to_text(&synthetic::results()).unwrap();
        let wide = text.lines().find(|line| line.chars().count() > WIDTH);
        assert_eq!(wide, None);
    }
}
