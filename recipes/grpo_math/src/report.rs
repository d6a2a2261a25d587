//! `report.html`: what a run did, in one file that needs no network and no script.
use std::{error::Error, fmt::Write};

use crate::{
    plots::Chart,
    results::{Results, duration, nats, percent},
};

/// Style of the page, for the reports of other recipes too.
pub const STYLE: &str = include_str!("report.css");

/// Whether a run is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// All its steps are done.
    Complete,
    /// It stopped on the way; the text says where.
    Stopped(String),
    /// It is under way; the text says where.
    Running(String),
}

/// What the report shows.
#[derive(Clone, Debug)]
pub struct Report<'a> {
    /// Name of the run's folder.
    pub name: &'a str,
    /// Whether it is over.
    pub state: State,
    /// What was run: a name and a value a row.
    pub plan: &'a [(String, String)],
    /// What came out, once the run is over.
    pub results: Option<&'a Results>,
    /// The charts.
    pub charts: &'a [Chart],
    /// The packing audit, as text.
    pub audit: &'a str,
    /// The settings, as TOML.
    pub config: &'a str,
    /// The command that goes on with the run, or prolongs it.
    pub continue_command: &'a str,
}

impl Report<'_> {
    /// The page.
    pub fn to_html(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        let mut page = String::new();
        let name = escape(self.name);
        let (class, state) = match &self.state {
            State::Complete => ("state", "Complete".to_string()),
            State::Stopped(at) => ("state open", format!("Stopped {at}")),
            State::Running(at) => ("state open", format!("Running, {at}")),
        };
        write!(
            page,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{name}: GRPO on NVFP4 rollouts</title>\n<link rel=\"icon\" href=\"data:,\">\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<header>\n\
             <span class=\"{class}\">{}</span>\n<h1>{name}</h1>\n\
             <p class=\"lead\">A mixture-of-experts model, trained by GRPO on 4-bit (NVFP4) rollouts.</p>\n</header>\n",
            escape(&state)
        )?;
        if let Some(results) = self.results {
            write_figures(&mut page, results)?;
        }
        write!(page, "<section>\n<h2>How it went</h2>\n<div class=\"charts\">\n")?;
        for chart in self.charts {
            let svg = chart.to_inline_svg()?;
            write!(
                page,
                "<figure class=\"chart\">\n{svg}\n<figcaption>{}</figcaption>\n</figure>\n",
                escape(chart.caption)
            )?;
        }
        page.push_str("</div>\n</section>\n");
        if let Some(results) = self.results {
            write_tables(&mut page, results)?;
        }
        page.push_str("<section>\n<h2>What was run</h2>\n<dl>\n");
        for (name, value) in self.plan {
            writeln!(page, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value))?;
        }
        page.push_str("</dl>\n");
        if !self.audit.is_empty() {
            write_details(&mut page, "Which layers are packed", self.audit)?;
        }
        write_details(&mut page, "All settings (config.toml)", self.config)?;
        page.push_str("</section>\n");
        let intro = match self.state {
            State::Complete => "More steps, from the last checkpoint:",
            State::Stopped(_) => "From the last checkpoint, as if it had never stopped:",
            State::Running(_) => "It is under way. Should it stop, this goes on from the last checkpoint:",
        };
        write!(
            page,
            "<section>\n<h2>How to go on</h2>\n<p>{intro}</p>\n<pre class=\"command\">{}</pre>\n\
             <p>Beside this page: <code>metrics.jsonl</code> (one line a step), <code>checkpoints/</code> (safetensors with \
             Hugging Face names), <code>plots/</code> (these charts as files), <code>config.toml</code>, and at the end \
             <code>results.json</code> (the tables for programs).</p>\n</section>\n\
             <footer>Written by grpo_math {}. 4-bit arithmetic is emulated on the CPU, bit for bit.</footer>\n\
             </main>\n</body>\n</html>\n",
            escape(self.continue_command),
            env!("CARGO_PKG_VERSION")
        )?;
        Ok(page)
    }
}

fn write_figures(page: &mut String, results: &Results) -> std::fmt::Result {
    let used = results
        .precisions
        .iter()
        .find(|row| row.precision == results.rollout_precision);
    page.push_str("<section class=\"figures\">\n");
    let mut figure = |value: String, class: &str, name: &str| {
        writeln!(
            page,
            "<div class=\"figure\"><b{class}>{value}</b><span class=\"name\">{name}</span></div>"
        )
    };
    let from_to =
        |before: f64, after: f64| format!("<span class=\"from\">{:.1} →</span> {}", 100.0 * before, percent(after));
    figure(
        from_to(results.before.sampled, results.after.sampled),
        " class=\"long\"",
        "held-out accuracy, sampled",
    )?;
    figure(
        from_to(results.before.greedy, results.after.greedy),
        " class=\"long\"",
        "held-out accuracy, greedy",
    )?;
    if let Some(used) = used {
        figure(nats(used.gap_mean), "", "mean gap to the trainer, nats")?;
    }
    figure(duration(results.machine.total_s), "", "in all, on the CPU")?;
    page.push_str("</section>\n");
    Ok(())
}

fn write_tables(page: &mut String, results: &Results) -> std::fmt::Result {
    write!(
        page,
        "<section>\n<h2>Accuracy, before and after</h2>\n\
         <p class=\"soft\">{} held-out problems, in the rollout's precision ({}).</p>\n<div class=\"wide\"><table>\n\
         <tr><th></th><th>before</th><th>after</th><th>change</th></tr>\n",
        results.held_out_problems,
        escape(&results.rollout_precision)
    )?;
    let rows = [
        ("sampled (pass@1)", results.before.sampled, results.after.sampled),
        ("greedy", results.before.greedy, results.after.greedy),
    ];
    for (name, before, after) in rows {
        let change = 100.0 * (after - before);
        let cells = format!(
            "<td>{}</td><td>{}</td><td>{change:+.1}</td>",
            percent(before),
            percent(after)
        );
        writeln!(page, "<tr><td>{name}</td>{cells}</tr>")?;
    }
    write!(
        page,
        "</table></div>\n</section>\n<section>\n<h2>The final policy in every precision</h2>\n\
         <p class=\"soft\">The gap is |Δ log-prob| to the {} trainer, in nats, over the tokens of {} completions sampled in \
         {}.</p>\n<div class=\"wide\"><table>\n<tr><th>precision</th><th>sampled</th><th>greedy</th><th>mean gap</th>\
         <th>99th perc.</th><th>largest</th></tr>\n",
        escape(&results.trainer_precision),
        results.completions,
        escape(&results.rollout_precision)
    )?;
    for row in &results.precisions {
        let class = if row.precision == results.rollout_precision {
            " class=\"used\""
        } else {
            ""
        };
        writeln!(
            page,
            "<tr{class}><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&row.precision),
            percent(row.accuracy.sampled),
            percent(row.accuracy.greedy),
            nats(row.gap_mean),
            nats(row.gap_p99),
            nats(row.gap_max)
        )?;
    }
    page.push_str("</table></div>\n</section>\n");
    Ok(())
}

fn write_details(page: &mut String, summary: &str, text: &str) -> std::fmt::Result {
    let text = escape(text.trim_end());
    write!(
        page,
        "<details><summary>{}</summary>\n<pre>{text}</pre></details>\n",
        escape(summary)
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let report = Report {
            name: "<b>&\"",
            state: State::Stopped("after <step> 3".into()),
            plan: &[("task".into(), "a < b".into())],
            results: None,
            charts: &[],
            audit: "<w>",
            config: "x = \"<\"",
            continue_command: "go <on>",
        };
        let page = report.to_html().unwrap();
        for text in [
            "&lt;b&gt;&amp;&quot;",
            "after &lt;step&gt; 3",
            "a &lt; b",
            "&lt;w&gt;",
            "go &lt;on&gt;",
        ] {
            assert!(page.contains(text), "{text}");
        }
        assert!(!page.contains("<w>") && !page.contains("<script") && !page.contains("http"));
    }
}
