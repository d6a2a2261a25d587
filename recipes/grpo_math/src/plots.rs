//! Charts of a run, as SVG: each is a file of its own, and a part of the report that follows its colours.
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use std::error::Error;

use crate::metrics::{HELD_OUT, HELD_OUT_GREEDY, MetricsLine, Position, VALIDATION};

/// Width and height in pixels: legible at half a desktop's width and at a phone's.
const SIZE: (u32, u32) = (520, 320);
/// Text and axes; the report replaces it by its own text colour.
const INK: RGBColor = RGBColor(0x1f, 0x29, 0x37);
/// Grid lines; the report replaces them too.
const GRID: RGBColor = RGBColor(0xd1, 0xd5, 0xdb);
/// Series, legible on white and on near-black, told apart by the colour-blind (Okabe and Ito, a little darker).
const SERIES: [RGBColor; 5] = [
    RGBColor(0x1c, 0x7e, 0xd6),
    RGBColor(0xe0, 0x6c, 0x00),
    RGBColor(0x0c, 0x9d, 0x6f),
    RGBColor(0xc0, 0x56, 0xa0),
    RGBColor(0x8a, 0x8f, 0x98),
];

/// A named line.
#[derive(Clone, Debug)]
pub struct Series {
    /// For the legend.
    pub name: &'static str,
    /// `(step, value)`, finite.
    pub points: Vec<(f64, f64)>,
    /// Whether each point is marked: for the few of an evaluation.
    pub marked: bool,
}

/// A chart of one quantity over the steps.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Name of its file, without `.svg`.
    pub file: &'static str,
    /// What is shown.
    pub title: &'static str,
    /// Quantity and unit of the vertical axis.
    pub y_label: &'static str,
    /// What a step is.
    pub x_label: &'static str,
    /// Lines; empty ones are left out.
    pub series: Vec<Series>,
    /// What a reader should see in it.
    pub caption: &'static str,
}

/// The charts that these metrics can fill.
pub fn charts(lines: &[MetricsLine]) -> Vec<Chart> {
    let series = |name, field: &str, scale: f64, marked| Series {
        name,
        points: lines
            .iter()
            .filter_map(|line| Some((line.grpo_step()? as f64, scale * line.get(field)?)))
            .collect(),
        marked,
    };
    let line = |name, field: &str| series(name, field, 1.0, false);
    let percent = |name, field: &str, marked| series(name, field, 100.0, marked);
    let step = "GRPO step";
    let mut charts = vec![
        Chart {
            file: "accuracy",
            title: "Held-out accuracy",
            y_label: "right answers, %",
            x_label: step,
            series: vec![
                percent("sampled", HELD_OUT, true),
                percent("greedy", HELD_OUT_GREEDY, true),
            ],
            caption: "Problems that were never trained on, in the rollout's precision.",
        },
        Chart {
            file: "reward",
            title: "Reward",
            y_label: "right answers, %",
            x_label: step,
            series: vec![
                percent("completions", "reward/mean", false),
                percent("groups of one reward", "frac_reward_zero_std", false),
            ],
            caption: "Share of sampled completions that were right, and of groups that were all right or all wrong: these teach nothing.",
        },
        Chart {
            file: "gap",
            title: "Gap of rollout and trainer",
            y_label: "mean |Δ log-prob|, nats",
            x_label: step,
            series: vec![
                line("all of it", "sampling/sampling_logp_difference/mean"),
                series("weights", "mismatch/delta_weight/mean", 1.0, true),
                series("activations", "mismatch/delta_act/mean", 1.0, true),
                series("numerics", "mismatch/delta_num/mean", 1.0, true),
            ],
            caption: "How differently the two sides see the sampled tokens, and where the difference comes from.",
        },
        Chart {
            file: "gap_tail",
            title: "Tail of the gap",
            y_label: "|Δ log-prob|, nats",
            x_label: step,
            series: vec![
                line("largest", "sampling/sampling_logp_difference/max"),
                line("99th percentile", "sampling/sampling_logp_difference/p99"),
            ],
            caption: "The tokens on which the two sides agree least.",
        },
        Chart {
            file: "entropy",
            title: "Entropy",
            y_label: "nats a token",
            x_label: step,
            series: vec![line("entropy", "actor/entropy")],
            caption: "How undecided the policy is. At zero it has nothing left to explore.",
        },
        Chart {
            file: "grad_norm",
            title: "Gradient norm",
            y_label: "global L2 norm",
            x_label: step,
            series: vec![line("gradient norm", "actor/grad_norm")],
            caption: "Before clipping, mean over the minibatches of a step.",
        },
        Chart {
            file: "response_length",
            title: "Length of completions",
            y_label: "tokens",
            x_label: step,
            series: vec![line("mean length", "response_length/mean")],
            caption: "With the end of sequence.",
        },
        Chart {
            file: "clipping",
            title: "Clipped tokens",
            y_label: "tokens, %",
            x_label: step,
            series: vec![percent("ratio clipped", "actor/pg_clipfrac", false)],
            caption: "Tokens whose ratio of current to old policy left the trust region.",
        },
    ];
    charts.push(warmup_chart(lines));
    charts.push(Chart {
        file: "speed",
        title: "Speed",
        y_label: "tokens per second",
        x_label: step,
        series: vec![
            line("sampled", "perf/rollout_tokens_per_s"),
            line("trained on", "perf/train_tokens_per_s"),
        ],
        caption: "On this machine; the only chart that another run of the same seed does not repeat.",
    });
    charts.retain(|chart| chart.series.iter().any(|series| !series.points.is_empty()));
    charts
}

fn warmup_chart(lines: &[MetricsLine]) -> Chart {
    let points = lines
        .iter()
        .filter_map(|line| match line.position {
            Position::Warmup(step) => Some((step as f64, 100.0 * line.get(VALIDATION)?)),
            Position::Grpo(_) => None,
        })
        .collect();
    Chart {
        file: "warmup",
        title: "Warm-up",
        y_label: "right answers, %",
        x_label: "warm-up step",
        series: vec![Series {
            name: "validation problems",
            points,
            marked: true,
        }],
        caption: "Supervised learning, stopped on validation problems of its own.",
    }
}

impl Chart {
    /// The chart as an SVG file, on white.
    pub fn to_svg(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        let svg = self.draw()?;
        let (open, rest) = svg.split_once('>').ok_or("plotters wrote no element")?;
        Ok(format!(
            "{open}><rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>{rest}"
        ))
    }

    /// The chart as a part of the report: no background, text in the text's colour, and a name for screen readers.
    pub fn to_inline_svg(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        let svg = self.draw()?;
        let hex = |c: RGBColor| format!("#{:02X}{:02X}{:02X}", c.0, c.1, c.2);
        let svg = svg.replace(&hex(INK), "currentColor");
        let svg = svg.replace(&format!("stroke=\"{}\"", hex(GRID)), "style=\"stroke:var(--grid)\"");
        let name = format!("<svg role=\"img\" aria-label=\"{}: {}\"", self.title, self.caption);
        Ok(svg.replacen("<svg", &name, 1))
    }

    fn draw(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            self.draw_on(&root)
                .map_err(|error| format!("chart {}: {error}", self.file))?;
            root.present()
                .map_err(|error| format!("chart {}: {error}", self.file))?;
        }
        Ok(svg)
    }

    fn draw_on(&self, root: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Box<dyn Error>> {
        let shown: Vec<_> = self
            .series
            .iter()
            .enumerate()
            .filter(|(_, s)| !s.points.is_empty())
            .collect();
        let points = || shown.iter().flat_map(|(_, series)| &series.points);
        let (mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY);
        let (mut low, mut high) = (0f64, 0f64);
        for &(x, y) in points() {
            (first, last) = (first.min(x), last.max(x));
            (low, high) = (low.min(y), high.max(y));
        }
        let percent = self.y_label.contains('%');
        let high = match percent {
            true if high > 50.0 => 100.0,
            _ if high > low => high + 0.06 * (high - low),
            _ => low + 1.0,
        };
        let last = if last > first { last } else { first + 1.0 };

        let title = TextStyle::from(("sans-serif", 18).into_font().style(FontStyle::Bold)).color(&INK);
        root.draw_text(self.title, &title, (12, 10))?;
        self.draw_legend(root, &shown)?;

        let text = TextStyle::from(("sans-serif", 15).into_font()).color(&INK);
        let mut chart = ChartBuilder::on(root)
            .margin_top(if shown.len() > 1 { 58 } else { 38 })
            .margin_right(18)
            .margin_bottom(6)
            .margin_left(4)
            .x_label_area_size(44)
            .y_label_area_size(66)
            .build_cartesian_2d(first..last, low..high)?;
        let digits = digits_for(high - low);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(1)
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(text.clone())
            .axis_desc_style(text)
            .x_labels(7)
            .y_labels(6)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.digits$}"))
            .x_desc(self.x_label)
            .y_desc(self.y_label)
            .draw()?;
        for (index, series) in shown {
            let colour = SERIES[index % SERIES.len()];
            chart.draw_series(LineSeries::new(series.points.iter().copied(), colour.stroke_width(2)))?;
            if series.marked || series.points.len() == 1 {
                chart.draw_series(
                    series
                        .points
                        .iter()
                        .map(|&point| Circle::new(point, 3, colour.filled())),
                )?;
            }
        }
        Ok(())
    }

    /// Names of the lines in a row under the title; one line alone is named by the title.
    fn draw_legend(
        &self,
        root: &DrawingArea<SVGBackend<'_>, Shift>,
        shown: &[(usize, &Series)],
    ) -> Result<(), Box<dyn Error>> {
        if shown.len() < 2 {
            return Ok(());
        }
        let text = TextStyle::from(("sans-serif", 15).into_font())
            .color(&INK)
            .pos(Pos::new(HPos::Left, VPos::Center));
        let mut x = 14;
        for (index, series) in shown {
            let colour = SERIES[index % SERIES.len()];
            root.draw(&Rectangle::new([(x, 41), (x + 14, 45)], colour.filled()))?;
            root.draw_text(series.name, &text, (x + 20, 43))?;
            // No font is measured here: seven pixels a character is wide enough for any sans-serif of this size.
            x += 36 + 7 * series.name.chars().count() as i32;
        }
        Ok(())
    }
}

/// Digits after the point that tell the labels of an axis apart.
fn digits_for(span: f64) -> usize {
    (1.0 - span.log10()).ceil().clamp(0.0, 6.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Vec<MetricsLine> {
        let mut warmup = MetricsLine::new(Position::Warmup(10));
        warmup.push(VALIDATION, 0.31);
        let grpo = (0..5).map(|step| {
            let mut line = MetricsLine::new(Position::Grpo(step));
            line.push("reward/mean", (step > 0).then_some(0.1 * step as f64));
            let gap = if step == 3 { f64::NAN } else { 0.01 };
            line.push("sampling/sampling_logp_difference/mean", (step > 0).then_some(gap));
            line.push(HELD_OUT, (step % 4 == 0).then_some(0.3));
            line
        });
        std::iter::once(warmup).chain(grpo).collect()
    }

    #[test]
    fn charts_without_data_are_left_out() {
        let names: Vec<_> = charts(&lines()).iter().map(|chart| chart.file).collect();
        assert_eq!(names, ["accuracy", "reward", "gap", "warmup"]);
        assert!(charts(&[]).is_empty());
    }

    #[test]
    fn a_chart_names_its_axes_and_lines() {
        let gap = charts(&lines()).into_iter().find(|chart| chart.file == "gap").unwrap();
        let svg = gap.to_svg().unwrap();
        for text in [
            "Gap of rollout and trainer",
            "mean |Δ log-prob|, nats",
            "GRPO step",
            "#FFFFFF",
        ] {
            assert!(svg.contains(text), "{text} is missing");
        }
        let points = svg.matches("<polyline").count();
        assert!(
            points >= 1 && !svg.contains("NaN"),
            "a value that is not finite is left out: {svg}"
        );
    }

    #[test]
    fn an_inline_chart_follows_the_page() {
        let chart = charts(&lines()).remove(0);
        let svg = chart.to_inline_svg().unwrap();
        assert!(svg.starts_with("<svg role=\"img\" aria-label=\"Held-out accuracy: "));
        assert!(svg.contains("currentColor") && svg.contains("var(--grid)") && !svg.contains("#1F2937"));
        assert!(!svg.contains("#FFFFFF"));
    }

    #[test]
    fn one_point_is_drawn_and_flat_lines_have_a_scale() {
        for values in [vec![(1.0, 0.0)], vec![(1.0, 2.0), (2.0, 2.0)]] {
            let chart = Chart {
                file: "x",
                title: "x",
                y_label: "y",
                x_label: "x",
                series: vec![Series {
                    name: "x",
                    points: values,
                    marked: false,
                }],
                caption: "",
            };
            chart.to_svg().unwrap();
        }
    }

    #[test]
    fn axis_labels_have_the_digits_they_need() {
        assert_eq!([100.0, 10.0, 1.0, 0.02, 3e-5].map(digits_for), [0, 0, 1, 3, 6]);
    }
}
