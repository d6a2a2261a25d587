//! Charts of a run, as SVG: each is a file of its own, and a part of the report that follows its colours.
use plotters::{
    chart::MeshStyle,
    coord::{
        Shift,
        ranged1d::{Ranged, ValueFormatter},
    },
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use std::error::Error;

/// Width and height in pixels: legible at half a desktop's width and at a phone's.
pub const SIZE: (u32, u32) = (520, 320);
/// Text and axes; the report replaces it by its own text colour.
pub const INK: RGBColor = RGBColor(0x1f, 0x29, 0x37);
/// Grid lines; the report replaces them too.
pub const GRID: RGBColor = RGBColor(0xd1, 0xd5, 0xdb);
/// Series, legible on white and on near-black, told apart by the colour-blind (Okabe and Ito, a little darker).
pub const SERIES: [RGBColor; 5] = [
    RGBColor(0x1c, 0x7e, 0xd6),
    RGBColor(0xe0, 0x6c, 0x00),
    RGBColor(0x0c, 0x9d, 0x6f),
    RGBColor(0xc0, 0x56, 0xa0),
    RGBColor(0x8a, 0x8f, 0x98),
];

/// Steps and values that are larger are not drawn: an axis that long tells nothing, and Plotters looks for its labels
/// for ever.
pub const LARGEST: (f64, f64) = (1e12, 1e30);

/// A named line.
#[derive(Clone, Debug)]
pub struct Series {
    /// For the legend.
    pub name: &'static str,
    /// `(step, value)`.
    points: Vec<(f64, f64)>,
    /// Whether each point is marked: for the few of an evaluation.
    pub marked: bool,
}

impl Series {
    /// A line through points `(step, value)`; those that no axis can show are left out.
    pub fn new(name: &'static str, points: impl Iterator<Item = (f64, f64)>, marked: bool) -> Self {
        // NaN is not below anything.
        let drawable = |&(x, y): &(f64, f64)| x.abs() <= LARGEST.0 && y.abs() <= LARGEST.1;
        Self {
            name,
            points: points.filter(drawable).collect(),
            marked,
        }
    }

    /// `(step, value)`, each finite and drawable.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.points
    }
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

impl Chart {
    /// The chart as an SVG file, on white.
    pub fn to_svg(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        on_white(&self.draw()?)
    }

    /// The chart as a part of the report: no background, text in the text's colour, and a name for screen readers.
    pub fn to_inline_svg(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        Ok(inline(&self.draw()?, &format!("{}: {}", self.title, self.caption)))
    }

    fn draw(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        draw(self.file, SIZE, |root| self.draw_on(root))
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
        let (first, last) = match last > first {
            true => (first, last),
            // One step, or none.
            false if first.is_finite() => (first, first + 1.0),
            false => (0.0, 1.0),
        };

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
        style_mesh(&mut chart.configure_mesh(), text)
            .disable_x_mesh()
            .x_labels(7)
            .y_labels(6)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| match high - low < 1e6 {
                true => format!("{y:.digits$}"),
                false => format!("{y:.1e}"),
            })
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

/// An SVG without a background. Errors name the chart by its `file`.
pub fn draw(
    file: &str,
    size: (u32, u32),
    draw_on: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Box<dyn Error>>,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        draw_on(&root).map_err(|error| format!("chart {file}: {error}"))?;
        root.present().map_err(|error| format!("chart {file}: {error}"))?;
    }
    Ok(svg)
}

/// Grid lines without finer ones between, ink for axes, one style for all text.
pub fn style_mesh<'m, 'a, 'b, X, Y, DB>(
    mesh: &'m mut MeshStyle<'a, 'b, X, Y, DB>,
    text: TextStyle<'b>,
) -> &'m mut MeshStyle<'a, 'b, X, Y, DB>
where
    X: Ranged<ValueType: Clone> + ValueFormatter<X::ValueType>,
    Y: Ranged<ValueType: Clone> + ValueFormatter<Y::ValueType>,
    DB: DrawingBackend,
{
    mesh.max_light_lines(1)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(text.clone())
        .axis_desc_style(text)
}

/// What [`draw`] drew, as a file of its own.
pub fn on_white(svg: &str) -> Result<String, Box<dyn Error + Send + Sync>> {
    let (open, rest) = svg.split_once('>').ok_or("plotters wrote no element")?;
    Ok(format!(
        "{open}><rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>{rest}"
    ))
}

/// What [`draw`] drew, as a part of a page whose colours it follows, with a name for screen readers.
pub fn inline(svg: &str, name: &str) -> String {
    let hex = |c: RGBColor| format!("#{:02X}{:02X}{:02X}", c.0, c.1, c.2);
    let svg = svg.replace(&hex(INK), "currentColor");
    let svg = svg.replace(&format!("stroke=\"{}\"", hex(GRID)), "style=\"stroke:var(--grid)\"");
    let name = name.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
    svg.replacen("<svg", &format!("<svg role=\"img\" aria-label=\"{name}\""), 1)
}

/// Digits after the point that tell the labels of an axis apart.
pub fn digits_for(span: f64) -> usize {
    (1.0 - span.log10()).ceil().clamp(0.0, 6.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        charts::charts,
        metrics::{HELD_OUT, MetricsLine, Position, VALIDATION},
    };

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
        // With the values that once made the labels' search endless.
        let ones = |value: f64| vec![(1.0, 1.0), (2.0, value), (3.0, 1.0)];
        for values in [
            vec![(1.0, 0.0)],
            vec![(1.0, 2.0), (2.0, 2.0)],
            vec![(1.0, 1e-320), (2.0, 1e-300)],
            vec![(1.0, LARGEST.1), (2.0, -LARGEST.1)],
            vec![(LARGEST.0, 1.0), (LARGEST.0 - 1.0, 2.0)],
            vec![(1e300, 1.0), (1e16, 1.0)],
            ones(1e308),
            ones(-1e308),
            ones(f64::MAX),
            ones(f64::INFINITY),
            ones(f64::NAN),
            ones(1e40),
        ] {
            let chart = Chart {
                file: "x",
                title: "x",
                y_label: "y",
                x_label: "x",
                series: vec![Series::new("x", values.into_iter(), false)],
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
