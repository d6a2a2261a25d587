//! The plots of the comparison: which there are. How they are drawn is in `plots/drawing.rs`.
mod drawing;

use anyhow::Result;

pub use drawing::{Dot, Drawing, Line, Look, Mark, Plot};

use crate::{
    arms::Arm,
    results::{Family, Results, Series, Side},
    statistics::{Spread, final_difference},
    table::plain_number,
};

/// Arms of one plot: eleven lines in one could not be told apart. A is in both, to compare with.
const GROUPS: [(&str, &[&str]); 2] = [
    ("quads", &["A", "B", "C", "D", "E", "E+"]),
    ("others", &["A", "F", "F'", "G", "H", "I"]),
];

/// Points of a line at most: a step more or less is not seen.
const POINTS: usize = 60;

/// A quantity that is followed over the steps.
struct Followed {
    file: &'static str,
    title: &'static str,
    y_label: &'static str,
    column: &'static str,
    scale: f64,
    logarithmic: bool,
    caption: &'static str,
}

const FOLLOWED: [Followed; 5] = [
    Followed {
        file: "pass1",
        title: "Held-out pass@1, own rollout",
        y_label: "right answers, %",
        column: "eval/pass@1",
        scale: 100.0,
        logarithmic: false,
        caption: "Each arm in its own rollout precision.",
    },
    Followed {
        file: "gap_mean",
        title: "Mean gap of rollout and trainer",
        y_label: "mean |Δ log-prob|, nats",
        column: "sampling/sampling_logp_difference/mean",
        scale: 1.0,
        logarithmic: true,
        caption: "Over the tokens that each arm samples itself, so a collapsed arm can have a small gap.",
    },
    Followed {
        file: "gap_max",
        title: "Largest gap of a token",
        y_label: "max |Δ log-prob|, nats",
        column: "sampling/sampling_logp_difference/max",
        scale: 1.0,
        logarithmic: true,
        caption: "The token of a step on which the two sides agree least.",
    },
    Followed {
        file: "entropy",
        title: "Entropy",
        y_label: "nats a token",
        column: "actor/entropy",
        scale: 1.0,
        logarithmic: false,
        caption: "How undecided the policy is.",
    },
    Followed {
        file: "grad_norm",
        title: "Gradient norm",
        y_label: "global L2 norm",
        column: "actor/grad_norm",
        scale: 1.0,
        logarithmic: true,
        caption: "Before clipping, mean over the minibatches of a step.",
    },
];

/// Of logarithmic plots.
const BELOW: &str = " What is too small for the axis lies on its bottom.";

/// The plots of one series or family, under its heading.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name of the series, or of the family.
    pub name: String,
    /// What can be shown of it.
    pub plots: Vec<Plot>,
}

/// All plots that the results can fill, in the order of the tables' sections.
///
/// # Errors
/// When arms of a seed answered other numbers of problems.
pub fn sections(results: &Results) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    for series in results.main_series() {
        sections.push(Section {
            name: series.name.clone(),
            plots: of_series(series)?,
        });
    }
    for family in results.families() {
        sections.push(Section {
            name: family.name.into(),
            plots: of_family(&family)?,
        });
    }
    Ok(sections)
}

fn of_series(series: &Series) -> Result<Vec<Plot>> {
    let mut plots = vec![final_plot(series), difference_plot(series)?];
    for followed in &FOLLOWED {
        for (group, arms) in GROUPS {
            plots.push(followed.plot(series, group, arms));
        }
    }
    plots.retain(|plot| !plot.is_empty());
    Ok(plots)
}

impl Followed {
    fn plot(&self, series: &Series, group: &str, arms: &[&str]) -> Plot {
        let lines: Vec<Line> = arms.iter().map(|arm| self.line(series, arm)).collect();
        // The reference alone is no comparison.
        let others = lines
            .iter()
            .zip(arms)
            .any(|(line, arm)| *arm != "A" && !line.points.is_empty());
        let below = if self.logarithmic { BELOW } else { "" };
        let drawn = |line: &Line| others && !line.points.is_empty();
        Plot {
            file: format!("{}_{}_{group}", series.name, self.file),
            title: self.title.into(),
            caption: format!(
                "{} Median over the seeds; the band is their range.{below}",
                self.caption
            ),
            x_label: "GRPO step".into(),
            y_label: self.y_label.into(),
            drawing: Drawing::Lines {
                lines: lines.into_iter().filter(drawn).collect(),
                logarithmic: self.logarithmic,
                ticks: Vec::new(),
            },
        }
    }

    fn line(&self, series: &Series, arm: &str) -> Line {
        let steps = series.runs(arm).map(|run| run.steps).max().unwrap_or(0);
        let every = steps.div_ceil(POINTS).max(1);
        let curves: Vec<Vec<(usize, f64)>> = series
            .runs(arm)
            .map(|run| match self.column.starts_with("eval/") {
                // Evaluations are few already.
                true => run.curve.points(self.column).collect(),
                false => run.curve.thinned(every).points(self.column).collect(),
            })
            .collect();
        let mut steps: Vec<usize> = curves.iter().flatten().map(|(step, _)| *step).collect();
        steps.sort_unstable();
        steps.dedup();
        let mark = |step: usize| {
            let at_step = |curve: &Vec<(usize, f64)>| Some(curve.iter().find(|(at, _)| *at == step)?.1 * self.scale);
            let spread = Spread::of(curves.iter().filter_map(at_step))?;
            Some(Mark {
                x: step as f64,
                low: spread.low,
                middle: spread.median,
                high: spread.high,
            })
        };
        Line {
            label: arm.into(),
            name: short_name(arm),
            look: Look::of(arm),
            points: steps.into_iter().filter_map(mark).collect(),
            whiskers: false,
        }
    }
}

/// A few words for a legend.
fn short_name(arm: &str) -> String {
    let words = match arm {
        "A" => "full precision",
        "B" => "naive",
        "C" => "FP8 rollout",
        "D" => "QAT alone",
        "E" => "QUADS",
        "E+" => "QUADS, all ch.",
        "F" => "symmetric",
        "F'" => "symm., q. backward",
        "G" => "naive + TIS",
        "H" => "RAC alone",
        "I" => "naive + replay",
        _ => return Arm::find(arm).map_or(String::new(), |arm| arm.about.into()),
    };
    words.into()
}

fn final_plot(series: &Series) -> Plot {
    let dot = |arm: &str| {
        let shares: Vec<f64> = series.runs(arm).map(|run| 100.0 * run.end.own.share()).collect();
        let spread = Spread::of(shares.iter().copied())?;
        let error = spread.standard_error.unwrap_or(0.0);
        Some(Dot {
            label: arm.into(),
            look: Look::of(arm),
            middle: spread.mean,
            low: spread.mean - error,
            high: spread.mean + error,
            each: shares,
        })
    };
    Plot {
        file: format!("{}_final", series.name),
        title: "Pass@1 at the end, own rollout".into(),
        caption: "Dot and bar: mean ± standard error over the seeds. Rings: the seeds.".into(),
        x_label: "right answers, %".into(),
        y_label: String::new(),
        drawing: Drawing::Dots {
            dots: series.arms().into_iter().filter_map(dot).collect(),
            reference: None,
        },
    }
}

fn difference_plot(series: &Series) -> Result<Plot> {
    let mut dots = Vec::new();
    for arm in series.arms().into_iter().filter(|arm| *arm != "A") {
        if let Some(difference) = final_difference(series, arm, "A", Side::Own)? {
            dots.push(Dot {
                label: arm.into(),
                look: Look::of(arm),
                middle: 100.0 * difference.mean,
                low: 100.0 * difference.low,
                high: 100.0 * difference.high,
                each: difference.by_seed.iter().map(|seed| 100.0 * seed).collect(),
            });
        }
    }
    Ok(Plot {
        file: format!("{}_differences", series.name),
        title: "Difference to A at the end".into(),
        caption: "Dot and bar: mean and paired 95 % bootstrap interval, each arm in its own rollout precision. Rings: the seeds."
            .into(),
        x_label: "points of pass@1".into(),
        y_label: String::new(),
        drawing: Drawing::Dots {
            dots,
            reference: Some(0.0),
        },
    })
}

/// What a family shows: accuracy, differences and gaps by the setting that is varied.
fn of_family(family: &Family<'_>) -> Result<Vec<Plot>> {
    let ticks: Vec<String> = family.members.iter().map(|(value, _)| plain_number(*value)).collect();
    let line = |arm: &str, mark: &dyn Fn(&Series, f64) -> Result<Option<Mark>>| -> Result<Line> {
        let mut points = Vec::new();
        // Whiskers of different arms stand beside each other.
        let place = GROUPS[0].1.iter().position(|other| *other == arm).unwrap_or(0);
        for (at, (_, series)) in family.members.iter().enumerate() {
            points.extend(mark(series, at as f64 + 0.03 * (place as f64 - 2.5))?);
        }
        Ok(Line {
            label: arm.into(),
            name: short_name(arm),
            look: Look::of(arm),
            points,
            whiskers: true,
        })
    };
    let spread = |values: Vec<f64>, x: f64| {
        Spread::of(values).map(|spread| Mark {
            x,
            low: spread.low,
            middle: spread.mean,
            high: spread.high,
        })
    };
    let (mut shares, mut gaps, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    for arm in GROUPS[0].1 {
        shares.push(line(arm, &|series, x| {
            Ok(spread(
                series.runs(arm).map(|run| 100.0 * run.end.own.share()).collect(),
                x,
            ))
        })?);
        gaps.push(line(arm, &|series, x| {
            Ok(spread(series.gaps(arm).map(|gap| gap.mean).collect(), x))
        })?);
        if *arm != "A" {
            differences.push(line(arm, &|series, x| {
                let difference = final_difference(series, arm, "A", Side::Own)?;
                Ok(difference.map(|difference| Mark {
                    x,
                    low: 100.0 * difference.low,
                    middle: 100.0 * difference.mean,
                    high: 100.0 * difference.high,
                }))
            })?);
        }
    }
    let plot = |what: &str, title: &str, caption: &str, y_label: &str, lines: Vec<Line>, logarithmic| Plot {
        file: format!("{}_{what}", family.name),
        title: title.into(),
        caption: caption.into(),
        x_label: family.setting.into(),
        y_label: y_label.into(),
        drawing: Drawing::Lines {
            lines: lines.into_iter().filter(|line| !line.points.is_empty()).collect(),
            logarithmic,
            ticks: ticks.clone(),
        },
    };
    let mut plots = vec![
        plot(
            "final",
            "Pass@1 at the end, own rollout",
            "Mean over the seeds; the whisker is their range.",
            "right answers, %",
            shares,
            false,
        ),
        plot(
            "differences",
            "Difference to A at the end",
            "Mean and paired 95 % bootstrap interval, own rollout precision.",
            "points of pass@1",
            differences,
            false,
        ),
        plot(
            "gap",
            "Mean gap at the warm-up checkpoint",
            &format!("The same tokens for all arms; mean over the seeds, the whisker is their range.{BELOW}"),
            "mean |Δ log-prob|, nats",
            gaps,
            true,
        ),
    ];
    plots.retain(|plot| !plot.is_empty());
    Ok(plots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    fn files(results: &Results) -> Vec<String> {
        let sections = sections(results).unwrap();
        sections
            .iter()
            .flat_map(|section| &section.plots)
            .map(|plot| plot.file.clone())
            .collect()
    }

    #[test]
    fn every_quantity_has_its_plots() {
        let files = files(&synthetic::results());
        for file in [
            "calm_final",
            "calm_differences",
            "stress_pass1_quads",
            "stress_pass1_others",
            "stress_gap_mean_quads",
            "stress_gap_max_others",
            "stress_entropy_quads",
            "stress_grad_norm_quads",
            "rate_final",
            "size_differences",
            "size_gap",
        ] {
            assert!(files.iter().any(|name| name == file), "{file} is not among {files:?}");
        }
        assert_eq!(files.len(), 2 * 12 + 2 * 3);
    }

    #[test]
    fn plots_without_data_are_left_out() {
        let two = [synthetic::ARMS[0], synthetic::ARMS[1]];
        let mut results = Results {
            series: vec![synthetic::series("quick", &two, [1, 20, 64])],
            ..synthetic::results()
        };
        assert!(files(&results).iter().all(|file| !file.ends_with("_others")));
        for run in &mut results.series[0].seeds[0].arms {
            run.curve = Default::default();
        }
        assert_eq!(files(&results), ["quick_final", "quick_differences"]);
        results.series.clear();
        assert!(files(&results).is_empty());
    }

    #[test]
    fn the_line_is_the_median_and_the_band_the_range() {
        let mut series = synthetic::series("stress", &synthetic::ARMS, [3, 20, 64]);
        for (seed, value) in series.seeds.iter_mut().zip([0.5, 0.1, 0.9]) {
            let column = seed.arms[0].curve.columns.get_mut("eval/pass@1").unwrap();
            column.fill(None);
            column[10] = Some(value);
        }
        let line = FOLLOWED[0].line(&series, "A");
        assert_eq!(line.points.len(), 1);
        let mark = &line.points[0];
        assert_eq!((mark.x, mark.low, mark.middle, mark.high), (10.0, 10.0, 50.0, 90.0));
    }
}
