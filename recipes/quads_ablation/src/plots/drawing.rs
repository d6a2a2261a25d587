//! How a plot is drawn: lines with bands over the steps, lines with whiskers over a setting, or a dot a row. Colours,
//! sizes and pages are those of `grpo_math`'s charts.
use grpo_math::plots::{self, INK, LARGEST, SERIES, SIZE, digits_for, style_mesh};
use plotters::{
    coord::{
        Shift,
        ranged1d::{AsRangedCoord, Ranged, ValueFormatter},
    },
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use std::error::Error;

/// Text of labels.
const FONT: (&str, u32) = ("sans-serif", 15);
/// Height of a row of the legend, and of labels that must not overlap.
const ROW: i32 = 19;
/// Names in a row of the legend.
const NAMES: usize = 3;
/// A logarithmic axis ends so far below its largest value.
const DECADES: f64 = 1e-4;

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Name of its file, without `.svg`.
    pub file: String,
    /// What is shown.
    pub title: String,
    /// How to read it.
    pub caption: String,
    /// Quantity and unit of the horizontal axis.
    pub x_label: String,
    /// Quantity and unit of the vertical axis.
    pub y_label: String,
    /// What is in it.
    pub drawing: Drawing,
}

/// What is in a plot.
#[derive(Clone, Debug)]
pub enum Drawing {
    /// Lines from left to right.
    Lines {
        /// One an arm.
        lines: Vec<Line>,
        /// Whether the vertical axis is.
        logarithmic: bool,
        /// Names of the places 0, 1, 2, … of the horizontal axis; numbers where there are none.
        ticks: Vec<String>,
    },
    /// A row an arm.
    Dots {
        /// From top to bottom.
        dots: Vec<Dot>,
        /// A value that is marked.
        reference: Option<f64>,
    },
}

/// An arm's line.
#[derive(Clone, Debug)]
pub struct Line {
    /// At its end.
    pub label: String,
    /// In the legend, beside the label.
    pub name: String,
    /// Colour and dashes.
    pub look: Look,
    /// From left to right.
    pub points: Vec<Mark>,
    /// Whether points are marked and ranges drawn as whiskers, not as a band.
    pub whiskers: bool,
}

/// A point of a line with its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Place on the horizontal axis.
    pub x: f64,
    /// Lower end of the range.
    pub low: f64,
    /// Where the line passes.
    pub middle: f64,
    /// Upper end of the range.
    pub high: f64,
}

/// An arm's row.
#[derive(Clone, Debug)]
pub struct Dot {
    /// At the left.
    pub label: String,
    /// Colour.
    pub look: Look,
    /// The dot.
    pub middle: f64,
    /// Lower end of the bar.
    pub low: f64,
    /// Upper end of the bar.
    pub high: f64,
    /// The rings.
    pub each: Vec<f64>,
}

/// Colour and dashes of an arm, the same in every plot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// Of line and label.
    pub colour: RGBColor,
    /// Length of dashes and of what is between them, in pixels.
    pub dashes: Option<(i32, i32)>,
}

impl Look {
    /// Of an arm. Arms of one plot differ in colour; dashes tell them apart without colours.
    pub fn of(arm: &str) -> Self {
        let [blue, orange, green, pink, grey] = SERIES;
        let (colour, dashes) = match arm {
            "A" => (INK, None),
            "B" => (orange, None),
            "C" => (grey, Some((7, 4))),
            "D" => (pink, Some((3, 3))),
            "E" => (blue, None),
            "E+" => (green, Some((12, 3))),
            "F" => (orange, Some((7, 4))),
            "F'" => (pink, None),
            "G" => (grey, Some((3, 3))),
            "H" => (blue, Some((12, 3))),
            _ => (green, None),
        };
        Self { colour, dashes }
    }
}

type Drawn = Result<(), Box<dyn Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Plot {
    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        match &self.drawing {
            Drawing::Lines { lines, .. } => lines.iter().all(|line| line.points.is_empty()),
            Drawing::Dots { dots, .. } => dots.is_empty(),
        }
    }

    /// As an SVG file, on white.
    pub fn to_svg(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        plots::on_white(&self.draw()?)
    }

    /// As a part of the report.
    pub fn to_inline_svg(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        Ok(plots::inline(
            &self.draw()?,
            &format!("{}: {}", self.title, self.caption),
        ))
    }

    fn draw(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        let height = match &self.drawing {
            Drawing::Lines { lines, .. } => SIZE.1 + (lines.len().div_ceil(NAMES) as i32 * ROW) as u32,
            Drawing::Dots { dots, .. } => 110 + 22 * dots.len() as u32,
        };
        plots::draw(&self.file, (SIZE.0, height), |root| {
            let title = TextStyle::from(("sans-serif", 18).into_font().style(FontStyle::Bold)).color(&INK);
            root.draw_text(&self.title, &title, (12, 10))?;
            match &self.drawing {
                Drawing::Dots { dots, reference } => self.draw_dots(root, dots, *reference),
                Drawing::Lines {
                    lines,
                    logarithmic,
                    ticks,
                } => {
                    let lines: Vec<Line> = lines.iter().map(drawable).collect();
                    let x = x_range(&lines, ticks);
                    match logarithmic {
                        true => {
                            let (low, high) = logarithmic_range(&lines);
                            let y = (low..high).log_scale().with_key_points(decades(low, high));
                            self.draw_lines(root, &lines, x, y, (low, high), ticks, &|y| short(*y))
                        }
                        false => {
                            let (low, high) = linear_range(&lines, self.y_label.contains('%'));
                            let digits = digits_for(high - low);
                            let label = |y: &f64| format!("{y:.digits$}");
                            self.draw_lines(root, &lines, x, low..high, (low, high), ticks, &label)
                        }
                    }
                }
            }
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn draw_lines<Y>(
        &self,
        root: &Area<'_>,
        lines: &[Line],
        (first, last): (f64, f64),
        y: Y,
        (low, high): (f64, f64),
        ticks: &[String],
        y_formatter: &dyn Fn(&f64) -> String,
    ) -> Drawn
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        draw_legend(root, lines)?;
        let text = TextStyle::from(FONT.into_font()).color(&INK);
        let rows = lines.len().div_ceil(NAMES) as i32;
        let mut chart = ChartBuilder::on(root)
            .margin_top(40 + ROW * rows)
            .margin_right(36)
            .margin_bottom(6)
            .margin_left(4)
            .x_label_area_size(44)
            .y_label_area_size(68)
            .build_cartesian_2d(first..last, y)?;
        let place = |x: &f64| match (x.round(), ticks) {
            (_, []) => format!("{x:.0}"),
            (at, ticks) if (x - at).abs() < 1e-6 && at >= 0.0 => ticks.get(at as usize).cloned().unwrap_or_default(),
            _ => String::new(),
        };
        style_mesh(&mut chart.configure_mesh(), text)
            .disable_x_mesh()
            .x_labels(if ticks.is_empty() { 6 } else { ticks.len() })
            .y_labels(6)
            .x_label_formatter(&place)
            .y_label_formatter(&y_formatter)
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .draw()?;
        let inside = |y: f64| y.clamp(low, high);
        if low < 0.0 {
            chart.draw_series(LineSeries::new([(first, 0.0), (last, 0.0)], INK.mix(0.5)))?;
        }
        for line in lines.iter().filter(|line| !line.whiskers && line.points.len() > 1) {
            let upper = line.points.iter().map(|mark| (mark.x, inside(mark.high)));
            let lower = line.points.iter().rev().map(|mark| (mark.x, inside(mark.low)));
            let band: Vec<(f64, f64)> = upper.chain(lower).collect();
            chart.draw_series([Polygon::new(band, line.look.colour.mix(0.10).filled())])?;
        }
        for line in lines {
            let points = line.points.iter().map(|mark| (mark.x, inside(mark.middle)));
            let style = line.look.colour.stroke_width(2);
            match line.look.dashes {
                None => chart.draw_series(LineSeries::new(points.clone(), style))?,
                Some((dash, between)) => {
                    chart.draw_series(DashedLineSeries::new(points.clone(), dash, between, style))?
                }
            };
            if line.whiskers || line.points.len() == 1 {
                chart.draw_series(points.map(|point| Circle::new(point, 3, line.look.colour.filled())))?;
            }
            if line.whiskers {
                let bars = line.points.iter().map(|mark| {
                    let ends = vec![(mark.x, inside(mark.low)), (mark.x, inside(mark.high))];
                    PathElement::new(ends, line.look.colour.stroke_width(1))
                });
                chart.draw_series(bars)?;
            }
        }
        let ends = lines.iter().filter_map(|line| {
            let mark = line.points.last()?;
            Some((line, chart.backend_coord(&(mark.x, inside(mark.middle)))))
        });
        let bottom = chart.backend_coord(&(first, low)).1;
        draw_end_labels(root, ends.collect(), bottom)
    }

    fn draw_dots(&self, root: &Area<'_>, dots: &[Dot], reference: Option<f64>) -> Drawn {
        let values = dots
            .iter()
            .flat_map(|dot| dot.each.iter().chain([&dot.low, &dot.high, &dot.middle]));
        let values = values
            .copied()
            .filter(|value| value.abs() <= LARGEST.1)
            .chain(reference);
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match low < high {
            true => (low - 0.04 * (high - low), high + 0.04 * (high - low)),
            false if low.is_finite() => (low - 1.0, low + 1.0),
            false => (0.0, 1.0),
        };
        let text = TextStyle::from(FONT.into_font()).color(&INK);
        let rows = dots.len();
        let mut chart = ChartBuilder::on(root)
            .margin_top(38)
            .margin_right(18)
            .margin_bottom(6)
            .margin_left(4)
            .x_label_area_size(44)
            .y_label_area_size(44)
            .build_cartesian_2d(low..high, (rows as f64 - 0.5)..-0.5)?;
        let digits = digits_for(high - low);
        style_mesh(&mut chart.configure_mesh(), text.clone())
            .disable_y_mesh()
            .y_labels(0)
            .x_labels(6)
            .x_label_formatter(&|x| format!("{x:.digits$}"))
            .x_desc(&self.x_label)
            .draw()?;
        if let Some(value) = reference {
            let ends = [(value, -0.5), (value, rows as f64 - 0.5)];
            chart.draw_series(LineSeries::new(ends, INK.stroke_width(1)))?;
        }
        for (row, dot) in dots.iter().enumerate() {
            let y = row as f64;
            let inside = |x: f64| x.clamp(low, high);
            let colour = dot.look.colour;
            let bar = vec![(inside(dot.low), y), (inside(dot.high), y)];
            chart.draw_series([PathElement::new(bar, colour.stroke_width(3))])?;
            let rings = dot.each.iter().filter(|value| value.is_finite());
            chart.draw_series(rings.map(|value| Circle::new((inside(*value), y), 4, colour.stroke_width(1))))?;
            chart.draw_series([Circle::new((inside(dot.middle), y), 5, colour.filled())])?;
            let place = chart.backend_coord(&(low, y));
            let label = text.pos(Pos::new(HPos::Right, VPos::Center));
            root.draw_text(&dot.label, &label, (place.0 - 12, place.1))?;
        }
        Ok(())
    }
}

/// Names of the lines under the title, each with a piece of its line.
fn draw_legend(root: &Area<'_>, lines: &[Line]) -> Drawn {
    let text = TextStyle::from(FONT.into_font())
        .color(&INK)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (index, line) in lines.iter().enumerate() {
        let (row, column) = ((index / NAMES) as i32, (index % NAMES) as i32);
        let (x, y) = (14 + 168 * column, 43 + ROW * row);
        let (dash, between) = line.look.dashes.unwrap_or((22, 0));
        let mut from = x;
        while from < x + 22 {
            let to = (from + dash).min(x + 22);
            root.draw(&PathElement::new(
                vec![(from, y), (to, y)],
                line.look.colour.stroke_width(3),
            ))?;
            from = to + between.max(1);
        }
        root.draw_text(&format!("{} {}", line.label, line.name), &text, (x + 28, y))?;
    }
    Ok(())
}

/// The label of each line at its end, moved apart where lines end close together.
fn draw_end_labels(root: &Area<'_>, mut ends: Vec<(&Line, (i32, i32))>, bottom: i32) -> Drawn {
    ends.sort_by_key(|(_, place)| place.1);
    let heights = apart(&ends.iter().map(|(_, place)| place.1).collect::<Vec<_>>(), 16, bottom);
    for ((line, place), y) in ends.iter().zip(heights) {
        let bold = FONT.into_font().style(FontStyle::Bold);
        let text = TextStyle::from(bold)
            .color(&line.look.colour)
            .pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(&line.label, &text, (place.0 + 6, y))?;
    }
    Ok(())
}

/// Rising heights moved so far apart that none is less than `distance` from the next, and none lies below `bottom`.
fn apart(heights: &[i32], distance: i32, bottom: i32) -> Vec<i32> {
    let mut moved: Vec<i32> = Vec::with_capacity(heights.len());
    for &height in heights {
        moved.push(moved.last().map_or(height, |last| height.max(last + distance)));
    }
    let mut limit = bottom;
    for height in moved.iter_mut().rev() {
        *height = (*height).min(limit);
        limit = *height - distance;
    }
    moved
}

/// Without points that no axis can show.
fn drawable(line: &Line) -> Line {
    let shown = |mark: &&Mark| {
        let values = [mark.low, mark.middle, mark.high];
        mark.x.abs() <= LARGEST.0 && values.iter().all(|value| value.abs() <= LARGEST.1)
    };
    Line {
        points: line.points.iter().filter(shown).copied().collect(),
        ..line.clone()
    }
}

fn x_range(lines: &[Line], ticks: &[String]) -> (f64, f64) {
    if !ticks.is_empty() {
        return (-0.3, ticks.len() as f64 - 0.7);
    }
    let places = lines.iter().flat_map(|line| &line.points).map(|mark| mark.x);
    let (first, last) = places.fold((f64::INFINITY, f64::NEG_INFINITY), |(f, l), x| (f.min(x), l.max(x)));
    match last > first {
        true => (first, last),
        false if first.is_finite() => (first, first + 1.0),
        false => (0.0, 1.0),
    }
}

fn linear_range(lines: &[Line], percent: bool) -> (f64, f64) {
    let marks = lines.iter().flat_map(|line| &line.points);
    let values = marks.flat_map(|mark| [mark.low, mark.high]);
    let (low, high) = values.fold((0f64, 0f64), |(l, h), v| (l.min(v), h.max(v)));
    let room = 0.06 * (high - low);
    match percent {
        true if high > 50.0 && low == 0.0 => (0.0, 100.0),
        _ if high > low => (if low < 0.0 { low - room } else { 0.0 }, high + room),
        _ => (low, low + 1.0),
    }
}

/// From the smallest middle that the axis reaches down to, to the largest value: what is smaller lies on the bottom.
fn logarithmic_range(lines: &[Line]) -> (f64, f64) {
    let marks = || lines.iter().flat_map(|line| &line.points);
    let high = marks().map(|mark| mark.high).fold(0.0, f64::max);
    if high <= 0.0 {
        return (0.1, 1.0);
    }
    let reached = marks()
        .map(|mark| mark.middle)
        .filter(|middle| *middle >= high * DECADES);
    let low = reached.fold(high, f64::min);
    (0.8 * low.min(high / 3.0), 1.2 * high)
}

/// Powers of ten between the ends, with twos and fives where these alone are too few.
fn decades(low: f64, high: f64) -> Vec<f64> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let wide = high / low > 150.0;
    let factors: &[f64] = if wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let points = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    points.filter(|value| (low..=high).contains(value)).collect()
}

/// A number of a logarithmic axis.
fn short(value: f64) -> String {
    match value.abs() {
        small if small < 1e-3 => format!("{value:.0e}"),
        _ => format!("{}", (value * 1e6).round() / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(arm: &str, values: &[(f64, f64, f64)]) -> Line {
        let mark = |(at, (low, middle, high)): (usize, &(f64, f64, f64))| Mark {
            x: at as f64,
            low: *low,
            middle: *middle,
            high: *high,
        };
        Line {
            label: arm.into(),
            name: "name".into(),
            look: Look::of(arm),
            points: values.iter().enumerate().map(mark).collect(),
            whiskers: false,
        }
    }

    fn plot(drawing: Drawing) -> Plot {
        Plot {
            file: "x".into(),
            title: "Title".into(),
            caption: "Caption <&\">.".into(),
            x_label: "GRPO step".into(),
            y_label: "nats".into(),
            drawing,
        }
    }

    #[test]
    fn a_plot_names_its_axes_and_lines_and_follows_the_page() {
        for logarithmic in [false, true] {
            let lines = vec![
                line("B", &[(0.1, 0.2, 0.3), (0.2, 0.3, 0.9)]),
                line("E+", &[(0.01, 0.02, 0.03), (0.02, 0.03, 0.04)]),
            ];
            let plot = plot(Drawing::Lines {
                lines,
                logarithmic,
                ticks: Vec::new(),
            });
            let (file, part) = (plot.to_svg().unwrap(), plot.to_inline_svg().unwrap());
            for text in ["Title", "GRPO step", "nats", "B name", "E+ name", "#FFFFFF", "<polygon"] {
                assert!(file.contains(text), "{text} is missing");
            }
            assert!(
                part.starts_with("<svg role=\"img\" aria-label=\"Title: Caption &lt;&amp;&quot;>.\""),
                "{part}"
            );
            assert!(part.contains("currentColor") && !part.contains("#1F2937") && !part.contains("#FFFFFF"));
        }
    }

    #[test]
    fn numbers_that_no_axis_can_show_are_left_out() {
        let values = [
            (0.0, 0.0, 0.0),
            (f64::NAN, 1.0, 2.0),
            (0.0, 1.0, f64::INFINITY),
            (1e308, 1e308, 1e308),
            (-1.0, 1e-320, 1e-300),
        ];
        for values in [&values[..], &values[..1], &values[4..], &[]] {
            for logarithmic in [false, true] {
                let drawing = Drawing::Lines {
                    lines: vec![line("A", values)],
                    logarithmic,
                    ticks: Vec::new(),
                };
                let svg = plot(drawing).to_svg().unwrap();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
        let dot = |value: f64| Dot {
            label: "A".into(),
            look: Look::of("A"),
            middle: value,
            low: value,
            high: value,
            each: vec![value],
        };
        for value in [0.0, 5.0, f64::NAN, f64::INFINITY, 1e300] {
            for reference in [None, Some(0.0)] {
                let dots = vec![dot(value)];
                plot(Drawing::Dots { dots, reference }).to_svg().unwrap();
            }
        }
    }

    #[test]
    fn labels_are_moved_apart_and_stay_in_the_plot() {
        assert_eq!(apart(&[10, 50], 16, 300), [10, 50]);
        assert_eq!(apart(&[10, 12, 13], 16, 300), [10, 26, 42]);
        assert_eq!(apart(&[290, 300, 300], 16, 300), [268, 284, 300]);
        assert_eq!(apart(&[], 16, 300), Vec::<i32>::new());
    }

    #[test]
    fn arms_of_one_plot_differ_in_colour() {
        for arms in [["A", "B", "C", "D", "E", "E+"], ["A", "F", "F'", "G", "H", "I"]] {
            for (at, arm) in arms.iter().enumerate() {
                for other in &arms[..at] {
                    assert_ne!(Look::of(arm).colour, Look::of(other).colour, "{arm} and {other}");
                }
            }
        }
    }

    #[test]
    fn a_logarithmic_axis_has_few_round_labels() {
        assert_eq!(decades(0.008, 0.9), [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]);
        let wide = decades(2e-6, 3.0);
        assert_eq!(wide.len(), 6);
        assert_eq!(
            [1e-5, 0.01, 0.2, 5.0, 100.0].map(short),
            ["1e-5", "0.01", "0.2", "5", "100"]
        );
        let range = logarithmic_range(&[line("A", &[(0.0, 0.0, 0.0)]), line("B", &[(0.1, 0.2, 0.4)])]);
        assert!(range.0 > 0.0 && range.0 < 0.14 && range.1 > 0.4, "{range:?}");
    }
}
