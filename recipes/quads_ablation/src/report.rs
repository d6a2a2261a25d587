//! What is written beside `results.json`: the tables, the plots, and `report.html`, one page that needs no network and no
//! script.
use anyhow::{Context, Result, anyhow};
use grpo_math::{atomic_write::write_atomically, report::STYLE, results::duration};
use std::{fmt::Write, fs, path::Path};

use crate::{
    answer,
    arms::ARMS,
    machine,
    plots::{self, Plot, Section},
    results::{Results, Series},
    statistics::READING,
    table::{self, Table, escape},
};

const MORE_STYLE: &str = include_str!("report.css");

/// When an arm counts as collapsed, as it was written down before the runs.
pub const COLLAPSE_RULE: &str = "accuracy: held-out pass@1 in the arm's own rollout precision is below 70 % of its running \
    maximum at 20 evaluations in a row; skipped: from step 20 on, more than 5 % of the updates so far were left out for numbers that were not \
    finite; gap: over the last third of the steps so far, 30 at least, the largest |Δ log-prob| rises while the reward falls (as means over \
    5 steps: rank correlations with the step of +0.5 and -0.5 at least, the reward ending below 90 % of where it began). The earliest counts.";

/// Writes `table.txt`, `table.md`, `plots/*.svg` and `report.html` into a folder, each whole or not at all.
///
/// # Errors
/// When a file cannot be written, or arms of a seed answered other numbers of problems.
pub fn write(results: &Results, folder: &Path) -> Result<()> {
    let figures = folder.join("plots");
    fs::create_dir_all(&figures).with_context(|| format!("cannot make {}", figures.display()))?;
    write_atomically(&folder.join("table.txt"), table::to_text(results)?.as_bytes())?;
    write_atomically(&folder.join("table.md"), table::to_markdown(results)?.as_bytes())?;
    for plot in plots::sections(results)?.iter().flat_map(|section| &section.plots) {
        let svg = plot.to_svg().map_err(|error| anyhow!("{error}"))?;
        write_atomically(&figures.join(format!("{}.svg", plot.file)), svg.as_bytes())?;
    }
    write_atomically(&folder.join("report.html"), to_html(results)?.as_bytes())
}

/// The page.
///
/// # Errors
/// When arms of a seed answered other numbers of problems, or a plot cannot be drawn.
pub fn to_html(results: &Results) -> Result<String> {
    let plots = plots::sections(results)?;
    let mut page = String::new();
    write_head(&mut page, results)?;
    page.push_str("<section class=\"answer\">\n");
    for sentence in answer::sentences(results)? {
        writeln!(page, "<p>{}</p>", escape(&sentence))?;
    }
    page.push_str("</section>\n<nav>");
    for section in &plots {
        let name = escape(&section.name);
        write!(page, "<a href=\"#{name}\">{name}</a>")?;
    }
    page.push_str("<a href=\"#declared\">declared beforehand</a></nav>\n<section>\n<h2>The arms</h2>\n");
    page.push_str(&wide(&arms()));
    page.push_str("</section>\n<section>\n<h2>The paper's figures beside ours</h2>\n");
    let paper = table::paper(results)?;
    write!(
        page,
        "<p class=\"soft\">{}</p>\n{}</section>\n",
        escape(&paper.note),
        wide(&paper)
    )?;
    let sections = table::sections(results)?;
    // The first is the paper's table; the others are in the order of the plots.
    for ((heading, tables), Section { name, plots }) in sections.iter().skip(1).zip(&plots) {
        write!(
            page,
            "<section id=\"{}\">\n<h2>{}</h2>\n",
            escape(name),
            escape(heading)
        )?;
        let (first, rest) = tables.split_at(tables.len().min(2));
        for table in first {
            write_table(&mut page, table)?;
        }
        write_plots(&mut page, plots)?;
        for table in rest {
            write_table(&mut page, table)?;
        }
        page.push_str("</section>\n");
    }
    write_declared(&mut page, results)?;
    page.push_str("</main>\n</body>\n</html>\n");
    Ok(page)
}

fn write_head(page: &mut String, results: &Results) -> std::fmt::Result {
    let (state, about) = match results.quick {
        true => (
            "<span class=\"state open\">Short run</span>",
            " This short run shows that the recipe works, and little else.",
        ),
        false => ("", ""),
    };
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>QUADS, arm by arm</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>\n{STYLE}{MORE_STYLE}</style>\n\
         </head>\n<body>\n<main>\n<header>\n{state}\n<h1>QUADS, arm by arm</h1>\n\
         <p class=\"lead\">Reinforcement learning (GRPO) on 4-bit rollouts: every arm starts from the same warm-up checkpoint of \
         its seed and differs in its precisions alone. NVFP4 is emulated.{about}</p>\n</header>\n"
    )
}

fn arms() -> Table {
    Table {
        title: "The arms".into(),
        note: String::new(),
        header: ["arm", "trainer", "rollout", "what it shows"].map(String::from).into(),
        rows: ARMS
            .iter()
            .map(|arm| {
                let (trainer, rollout) = table::precisions_of(arm.letter);
                vec![arm.letter.into(), trainer, rollout, arm.about.into()]
            })
            .collect(),
        words: 4,
    }
}

fn wide(table: &Table) -> String {
    format!("<div class=\"wide\" tabindex=\"0\">{}</div>\n", table.to_html())
}

fn write_table(page: &mut String, table: &Table) -> std::fmt::Result {
    write!(
        page,
        "<h3>{}</h3>\n<p class=\"soft\">{}</p>\n{}",
        escape(&table.title),
        escape(&table.note),
        wide(table)
    )
}

fn write_plots(page: &mut String, plots: &[Plot]) -> Result<()> {
    page.push_str("<div class=\"charts\">\n");
    for plot in plots {
        let svg = plot.to_inline_svg().map_err(|error| anyhow!("{error}"))?;
        let caption = escape(&plot.caption);
        write!(
            page,
            "<figure class=\"chart\">\n{svg}\n<figcaption>{caption}</figcaption>\n</figure>\n"
        )?;
    }
    page.push_str("</div>\n");
    Ok(())
}

fn write_declared(page: &mut String, results: &Results) -> std::fmt::Result {
    let facts = [
        ("collapse", COLLAPSE_RULE.to_string()),
        ("intervals", READING.to_string()),
        ("command", results.command.clone()),
        ("machine", machine::told(results)),
        (
            "time",
            format!(
                "{}, the arms' and warm-ups' wall times added up",
                duration(results.machine.total_s)
            ),
        ),
    ];
    page.push_str("<section id=\"declared\">\n<h2>Declared beforehand, and how to run it again</h2>\n<dl>\n");
    for (name, text) in facts {
        writeln!(page, "<dt>{name}</dt><dd>{}</dd>", escape(&text))?;
    }
    page.push_str("</dl>\n");
    for series in &results.series {
        let name = escape(&series.name);
        let seeds: Vec<String> = series.seeds.iter().map(|seed| seed.seed.to_string()).collect();
        let settings: String = settings(series).map(|line| escape(&line) + "\n").collect();
        write!(
            page,
            "<details><summary>Settings of {name}: {} arms, seeds {}</summary>\n<pre>{settings}</pre></details>\n",
            series.arms().len(),
            seeds.join(", ")
        )?;
    }
    write!(
        page,
        "<p class=\"soft\">Settings are those that differ from the defaults of grpo_math, the same for every arm. Beside this \
         page: <code>results.json</code>, <code>table.txt</code>, <code>table.md</code>, <code>plots/</code>.</p>\n</section>\n\
         <footer>Written by quads_ablation {}.</footer>\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn settings(series: &Series) -> impl Iterator<Item = String> + '_ {
    series.settings.iter().map(|(name, value)| format!("{name} = {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn everything_is_written_and_the_page_stands_alone() {
        let folder = std::env::temp_dir().join(format!("quads_ablation_{}_report", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let results = synthetic::results();
        write(&results, &folder).unwrap();
        let page = fs::read_to_string(folder.join("report.html")).unwrap();
        for text in [
            "naive 4-bit rollouts (B) collapsed in 2 of 5 runs of calm and stress each (accuracy 2)",
            "51.37, collapses near step 150",
            "What was to be shown",
            "id=\"stress\"",
            "trainer.learning_rate = 0.001",
            "a synthetic processor",
            "1 h 30 min",
            "below 70 % of its running maximum",
            "prefers-color-scheme: dark",
        ] {
            assert!(page.contains(text), "{text} is missing");
        }
        // An SVG's name space is no address that anyone asks.
        let asked = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!asked.contains("http") && !asked.contains("<script") && !asked.contains("NaN"));
        assert_eq!(page.matches("<svg").count(), 30);
        assert_eq!(fs::read_dir(folder.join("plots")).unwrap().count(), 30);
        let ids: Vec<&str> = page
            .split("id=\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
            .collect();
        for target in page.split("href=\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(ids.contains(&target), "nothing at #{target}");
        }
        let text = fs::read_to_string(folder.join("table.txt")).unwrap();
        assert_eq!(text, table::to_text(&results).unwrap());
        assert!(folder.join("table.md").exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn failed_checks_are_marked_and_names_are_escaped() {
        let mut results = synthetic::results();
        results.series.truncate(1);
        results.series[0].about = "a < b & \"c\"".into();
        results.series[0].seeds[2].gaps[4].mean = 1.0;
        let page = to_html(&results).unwrap();
        assert!(page.contains("a &lt; b &amp; &quot;c&quot;") && !page.contains("a < b"));
        assert!(page.contains("<td class=\"words fails\">FAILS in 1 of 5 seeds (3)</td>"));
    }

    #[test]
    fn a_report_without_results_is_one_all_the_same() {
        let mut results = synthetic::results();
        results.series.clear();
        results.quick = true;
        let page = to_html(&results).unwrap();
        assert!(page.contains("Short run") && page.contains("none of no runs"));
    }
}
