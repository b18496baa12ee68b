//! The two kinds of plots: [`Bars`] for things beside each other, [`Lines`] for one thing that
//! grows.
//!
//! Both take plain values and draw those that are there. A missing value is named in words, and so
//! is an empty plot.

use super::axis::Axis;
use super::number;
use super::style;
use super::svg::{Anchor, Svg};
use super::text_width::{fit, width_of};
use crate::result::{Summary, Unit};

/// How a value is written: its unit, or as a ratio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// With a unit.
    Unit(Unit),
    /// `1.57×`.
    Ratio,
    /// Parts of a whole as percent: `99.9 %`.
    Part,
}

impl Form {
    fn zero_axis(self, values: impl IntoIterator<Item = f64>) -> Axis {
        match self {
            Self::Unit(Unit::Bytes | Unit::BytesPerSecond) => Axis::from_zero_bytes(values),
            _ => Axis::from_zero(values),
        }
    }

    /// A value for people.
    #[must_use]
    pub fn write(self, value: f64) -> String {
        match self {
            Self::Unit(unit) => number::with_unit(value, unit),
            Self::Ratio => number::ratio(value),
            // As many digits as there are nines.
            Self::Part => format!("{} %", (value * 1e6).round() / 1e4),
        }
    }
}

/// One bar, or why there is none.
#[derive(Clone, PartialEq, Debug)]
pub struct Bar {
    /// What it is of.
    pub label: String,
    /// Its look.
    pub look: usize,
    /// What was measured, or why nothing was.
    pub value: Result<Summary, String>,
    /// What it should reach, if anything.
    pub need: Option<f64>,
    /// Whether it may leave the plot, so that it does not make the others small.
    pub floor: bool,
    /// More about it, where the pointer is.
    pub tip: String,
}

/// A value to compare with, across all bars or lines.
#[derive(Clone, PartialEq, Debug)]
pub struct Mean {
    /// The value.
    pub value: f64,
    /// What it is.
    pub label: String,
}

/// Bars beside each other, lying, with whiskers from the least to the most of the rounds.
#[derive(Clone, PartialEq, Debug)]
pub struct Bars {
    /// What is shown.
    pub title: String,
    /// How values are written.
    pub form: Form,
    /// The bars, from above.
    pub bars: Vec<Bar>,
    /// Values to compare with.
    pub means: Vec<Mean>,
    /// Width of the drawing.
    pub width: f64,
}

/// One line.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Line {
    /// What it is of.
    pub label: String,
    /// Its look.
    pub look: usize,
    /// Whether it is dashed.
    pub dashed: bool,
    /// By ascending first value: where, what, the least and the most.
    pub points: Vec<(f64, Summary)>,
}

/// Which axis a direction has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// From zero, by differences.
    Zero,
    /// By factors.
    Log,
    /// By factors, with the values that were set written.
    Set,
    /// Whole numbers one after another.
    Steps,
    /// Parts up to 99.99 %.
    Nines,
}

/// A direction of [`Lines`].
#[derive(Clone, PartialEq, Debug)]
pub struct Direction {
    /// What is on it.
    pub label: String,
    /// How its values are written.
    pub form: Form,
    /// Which axis it has.
    pub layout: Layout,
}

/// Lines over an axis.
#[derive(Clone, PartialEq, Debug)]
pub struct Lines {
    /// What is shown.
    pub title: String,
    /// To the right.
    pub x: Direction,
    /// Up.
    pub y: Direction,
    /// The lines.
    pub lines: Vec<Line>,
    /// Values of `y` to compare with.
    pub means: Vec<Mean>,
    /// Whether every point has a mark.
    pub marks: bool,
}

/// At most so many characters.
fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

#[expect(clippy::cast_precision_loss, reason = "rows and columns are few")]
fn nth(n: usize) -> f64 {
    n as f64
}

impl Bars {
    /// Draws them.
    #[must_use]
    pub fn draw(&self) -> Svg {
        const ROW: f64 = 26.0;
        const BAR: f64 = 17.0;
        /// Most pixels of a label.
        const LABEL: f64 = 240.0;
        /// Labels are bold, and the reader's font may be a wide one.
        const BOLD: f64 = 1.18;
        let top = if self.means.is_empty() { 34.0 } else { 50.0 };
        let bottom = top + ROW * nth(self.bars.len().max(1));
        let mut svg = Svg::new(self.width, bottom + 26.0, &self.title);
        svg.text((0.0, 15.0), Anchor::Start, "head", &self.title, None);
        let widest = self.bars.iter().map(|bar| width_of(&bar.label)).fold(40.0, f64::max);
        let left = widest.min(LABEL) * BOLD + 14.0;
        // Where lines cross the plot, values stand in a column of their own.
        let column = !self.means.is_empty();
        let right = self.width - if column { 88.0 } else { 64.0 };
        let axis = self.axis();
        let x = |value: f64| left + axis.at(value) * (right - left);
        for tick in axis.ticks() {
            svg.line((x(*tick), top), (x(*tick), bottom), "grid", None);
            let text = self.form.write(*tick);
            svg.text((x(*tick), bottom + 16.0), Anchor::Middle, "small", &text, None);
        }
        for (n, bar) in self.bars.iter().enumerate() {
            let middle = top + ROW * (nth(n) + 0.5);
            let label = fit(&bar.label, LABEL);
            svg.text((left - 10.0, middle + 4.0), Anchor::End, "name", &label, Some(&bar.label));
            match &bar.value {
                Ok(value) => self.bar(&mut svg, bar, value, middle, BAR, &x),
                Err(why) => {
                    let text = cut(&format!("not measured: {why}"), 58);
                    svg.text((left + 6.0, middle + 4.0), Anchor::Start, "small", &text, Some(why));
                }
            }
        }
        svg.line((left, top), (left, bottom), "axis", None);
        for mean in &self.means {
            svg.line(
                (x(mean.value), top - 4.0),
                (x(mean.value), bottom),
                "mean",
                Some(&mean.label),
            );
            let half = width_of(&mean.label) / 2.0;
            let anchor =
                if x(mean.value) + half > self.width { Anchor::End } else { Anchor::Middle };
            svg.text((x(mean.value), top - 9.0), anchor, "small", &mean.label, None);
        }
        if self.bars.is_empty() {
            svg.text((left, top + 16.0), Anchor::Start, "soft", "nothing was measured", None);
        }
        svg
    }

    /// An axis for all bars; floors that are much longer than the rest are cut.
    fn axis(&self) -> Axis {
        let most = |floor: bool| {
            let bars = self.bars.iter().filter(|bar| bar.floor == floor);
            let values = bars.flat_map(|bar| {
                let high = bar.value.as_ref().map(|value| value.high).ok();
                high.into_iter().chain(bar.need)
            });
            values.filter(|value| value.is_finite()).fold(0.0, f64::max)
        };
        let (bars, floors) = (most(false), most(true));
        let most = if bars > 0.0 { bars.max(floors.min(bars * 2.0)) } else { floors };
        self.form.zero_axis(self.means.iter().map(|mean| mean.value).chain([most]))
    }

    fn bar(
        &self,
        svg: &mut Svg,
        bar: &Bar,
        value: &Summary,
        middle: f64,
        height: f64,
        x: &impl Fn(f64) -> f64,
    ) {
        let text = self.form.write(value.median);
        let spread = format!(
            "{}: {text} ({} to {}, {} rounds)",
            bar.label,
            self.form.write(value.low),
            self.form.write(value.high),
            value.count
        );
        let tip = if bar.tip.is_empty() { spread } else { format!("{spread}\n{}", bar.tip) };
        let behind = if self.form == Form::Ratio && value.median < 1.0 { " behind" } else { "" };
        let is_single = value.count == 1;
        let single = if is_single { " single" } else { "" };
        let text = if is_single { format!("{text} n=1") } else { text };
        let class = format!("bar {}{behind}{single}", style::class(bar.look));
        let from = (x(0.0), middle - height / 2.0);
        svg.rect(from, (x(value.median) - x(0.0), height), &class, Some(&tip));
        let mut end = x(value.median);
        // As far as the plot goes, and there is more.
        if value.median > 0.0 && self.axis().is_beyond(value.median) {
            for at in [end - 14.0, end - 8.0] {
                svg.line(
                    (at, middle + height / 2.0),
                    (at + 5.0, middle - height / 2.0),
                    "cut",
                    None,
                );
            }
        } else if value.count > 1 {
            let (low, high) = (x(value.low), x(value.high));
            svg.line((low, middle), (high, middle), "whisker", Some(&tip));
            for at in [low, high] {
                svg.line((at, middle - 4.0), (at, middle + 4.0), "whisker", None);
            }
            end = end.max(high);
        }
        if let Some(need) = bar.need {
            let tip = format!("needed: {}", self.form.write(need));
            svg.mark((x(need), middle), 3, "need", Some(&tip));
            end = end.max(x(need) + 4.0);
        }
        if self.means.is_empty() {
            svg.text((end + 7.0, middle + 4.0), Anchor::Start, "", &text, None);
        } else {
            svg.text((self.width - 2.0, middle + 4.0), Anchor::End, "name", &text, Some(&tip));
        }
    }
}

impl Line {
    /// A line through values without spread.
    #[must_use]
    pub fn through(label: &str, look: usize, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let point = |(x, y)| (x, Summary { median: y, low: y, high: y, count: 1 });
        Self {
            label: label.to_owned(),
            look,
            dashed: false,
            points: points.into_iter().map(point).collect(),
        }
    }
}

impl Direction {
    fn axis(&self, values: impl Iterator<Item = f64>, least: f64) -> Axis {
        match self.layout {
            Layout::Zero => self.form.zero_axis(values),
            Layout::Log => match self.form {
                Form::Unit(Unit::Bytes | Unit::BytesPerSecond) => {
                    Axis::log_bytes(values).thinned(least)
                }
                _ => Axis::log(values).thinned(least),
            },
            Layout::Set => Axis::log_at(values).thinned(least),
            Layout::Steps => Axis::steps(values).thinned(least),
            Layout::Nines => Axis::nines(),
        }
    }
}

impl Lines {
    const WIDTH: f64 = 520.0;
    const PLOT: f64 = 230.0;

    /// Draws them.
    #[must_use]
    pub fn draw(&self) -> Svg {
        let legend = self.legend();
        let rows = legend.last().map_or(0, |(row, ..)| row + 1);
        let top = 30.0 + nth(rows) * 18.0 + 22.0;
        let bottom = top + Self::PLOT;
        let mut svg = Svg::new(Self::WIDTH, bottom + 42.0, &self.title);
        svg.text((0.0, 15.0), Anchor::Start, "head", &self.title, None);
        for (row, at, line) in &legend {
            let y = 34.0 + nth(*row) * 18.0;
            svg.line((*at, y), (at + 18.0, y), &Self::class("line", line), None);
            if self.marks {
                svg.mark((at + 9.0, y), line.look, &Self::class("dot", line), None);
            }
            svg.text((at + 24.0, y + 4.0), Anchor::Start, "", &line.label, None);
        }
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let y_values = points().flat_map(|(_, y)| [y.low, y.high]);
        let y_axis = self.y.axis(y_values.chain(self.means.iter().map(|mean| mean.value)), 0.07);
        let x_axis = self.x.axis(points().map(|(x, _)| *x), 0.075);
        let left = y_axis
            .ticks()
            .iter()
            .map(|tick| width_of(&self.y.form.write(*tick)))
            .fold(20.0, f64::max)
            + 12.0;
        let right = Self::WIDTH - 24.0;
        let x = |value: f64| left + x_axis.at(value) * (right - left);
        let y = |value: f64| bottom - y_axis.at(value) * Self::PLOT;
        for tick in y_axis.ticks() {
            svg.line((left, y(*tick)), (right, y(*tick)), "grid", None);
            let text = self.y.form.write(*tick);
            svg.text((left - 8.0, y(*tick) + 4.0), Anchor::End, "small", &text, None);
        }
        for tick in x_axis.ticks() {
            svg.line((x(*tick), bottom), (x(*tick), bottom + 4.0), "axis", None);
            let text = self.x.form.write(*tick);
            svg.text((x(*tick), bottom + 17.0), Anchor::Middle, "small", &text, None);
        }
        svg.line((left, bottom), (right, bottom), "axis", None);
        svg.text((right, bottom + 34.0), Anchor::End, "small", &self.x.label, None);
        svg.text((left, top - 8.0), Anchor::Start, "small", &self.y.label, None);
        for mean in &self.means {
            svg.line((left, y(mean.value)), (right, y(mean.value)), "mean", Some(&mean.label));
            svg.text((right, y(mean.value) - 5.0), Anchor::End, "small", &mean.label, None);
        }
        for line in &self.lines {
            self.line(&mut svg, line, &x, &y);
        }
        if points().next().is_none() {
            svg.text(
                (left + 10.0, top + 20.0),
                Anchor::Start,
                "soft",
                "nothing was measured",
                None,
            );
        }
        svg
    }

    fn class(kind: &str, line: &Line) -> String {
        let dash = if line.dashed && kind == "line" { " dash" } else { "" };
        format!("{} {kind}{dash}", style::class(line.look))
    }

    /// Row and place of each line's name.
    fn legend(&self) -> Vec<(usize, f64, &Line)> {
        let (mut row, mut at) = (0, 0.0);
        let mut places = Vec::new();
        for line in &self.lines {
            let width = 24.0 + width_of(&line.label) + 18.0;
            if at + width > Self::WIDTH && at > 0.0 {
                (row, at) = (row + 1, 0.0);
            }
            places.push((row, at, line));
            at += width;
        }
        places
    }

    fn line(&self, svg: &mut Svg, line: &Line, x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) {
        let through: Vec<(f64, f64)> =
            line.points.iter().map(|(at, value)| (x(*at), y(value.median))).collect();
        if through.len() > 1 {
            svg.polyline(&through, &Self::class("line", line), Some(&line.label));
        }
        if !self.marks {
            return;
        }
        // Beside medians of several rounds, one round is not what they are.
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let is_mixed = points().any(|(_, value)| value.count > 1);
        for (at, value) in &line.points {
            let is_once = is_mixed && value.count == 1;
            if value.high > value.low {
                let class = Self::class("spread", line);
                svg.line((x(*at), y(value.low)), (x(*at), y(value.high)), &class, None);
            }
            let spread = if value.count > 1 {
                let (low, high) = (self.y.form.write(value.low), self.y.form.write(value.high));
                format!(" ({low} to {high})")
            } else if is_once {
                " (one round)".to_owned()
            } else {
                String::new()
            };
            let (at_text, text) = (self.x.form.write(*at), self.y.form.write(value.median));
            let tip = format!("{}, {} {at_text}: {text}{spread}", line.label, self.x.label);
            let class = Self::class(if is_once { "once" } else { "dot" }, line);
            svg.mark((x(*at), y(value.median)), line.look, &class, Some(&tip));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bars(bars: Vec<Bar>) -> Bars {
        let mean = Mean { value: 1.0, label: "1.0".into() };
        Bars { title: "t".into(), form: Form::Ratio, bars, means: vec![mean], width: 500.0 }
    }

    fn bar(value: Result<Summary, String>) -> Bar {
        let label = "a <b>".into();
        Bar { label, look: 0, value, need: Some(1.5), floor: false, tip: String::new() }
    }

    #[test]
    fn a_bar_has_its_spread_and_what_is_needed() {
        let value = Summary { median: 1.2, low: 1.1, high: 1.3, count: 3 };
        let text = bars(vec![bar(Ok(value))]).draw().inline();
        assert!(text.contains("a &lt;b&gt;: 1.20× (1.10× to 1.30×, 3 rounds)"), "{text}");
        assert!(text.contains("needed: 1.50×") && text.contains("whisker"), "{text}");
        // One round has no spread.
        let one = Summary { count: 1, ..value };
        assert!(!bars(vec![bar(Ok(one))]).draw().inline().contains("whisker"));
    }

    #[test]
    fn a_floor_does_not_make_the_others_small() {
        let one = |median| Ok(Summary { median, low: median, high: median, count: 1 });
        let mut plot = bars(vec![bar(one(1.0)), Bar { floor: true, ..bar(one(50.0)) }]);
        assert!(plot.axis().is_beyond(50.0) && plot.draw().inline().contains("\"cut\""));
        plot.bars[1].value = one(1.9);
        assert!(!plot.axis().is_beyond(1.9) && !plot.draw().inline().contains("\"cut\""));
        // Alone it has all the room.
        plot.bars.remove(0);
        plot.bars[0].value = one(50.0);
        assert!(!plot.axis().is_beyond(50.0));
    }

    #[test]
    fn runs_are_equally_far_apart_and_one_round_is_marked_beside_medians() {
        let value = |count| Summary { median: 1.2, low: 1.1, high: 1.3, count };
        let points = vec![(1.0, value(1)), (2.0, value(4)), (3.0, value(4))];
        let direction = |layout| Direction { label: "run".into(), form: Form::Ratio, layout };
        let mut plot = Lines {
            title: String::new(),
            x: direction(Layout::Steps),
            y: direction(Layout::Zero),
            lines: vec![Line { label: "a".into(), points, ..Line::default() }],
            means: vec![],
            marks: true,
        };
        let axis = plot.x.axis([1.0, 2.0, 3.0].into_iter(), 0.0);
        let [one, two, three] = [1.0, 2.0, 3.0].map(|run| axis.at(run));
        assert!((two - one - (three - two)).abs() < 1e-9 && one > 0.0 && three < 1.0);
        let text = plot.draw().inline();
        assert_eq!(text.matches("once").count(), 1, "{text}");
        assert!(text.contains("(one round)"), "{text}");
        plot.lines[0].points.truncate(1);
        assert!(!plot.draw().inline().contains("once"), "all of them are of one round");
    }

    #[test]
    fn what_is_missing_is_said() {
        let why = "no module nvme-rdma ".repeat(9);
        let text = bars(vec![bar(Err(why.clone()))]).draw().inline();
        assert!(text.contains("not measured: no module") && text.contains(&why), "{text}");
        assert!(bars(vec![]).draw().inline().contains("nothing was measured"));
        let lines = Lines {
            title: String::new(),
            x: Direction {
                label: "depth".into(),
                form: Form::Unit(Unit::Count),
                layout: Layout::Set,
            },
            y: Direction {
                label: "IOPS".into(),
                form: Form::Unit(Unit::Iops),
                layout: Layout::Zero,
            },
            lines: vec![Line::default()],
            means: vec![],
            marks: true,
        };
        assert!(lines.draw().inline().contains("nothing was measured"));
    }

    #[test]
    fn every_point_says_what_it_is() {
        let lines = Lines {
            title: "t".into(),
            x: Direction {
                label: "depth".into(),
                form: Form::Unit(Unit::Count),
                layout: Layout::Set,
            },
            y: Direction {
                label: "IOPS".into(),
                form: Form::Unit(Unit::Iops),
                layout: Layout::Zero,
            },
            lines: vec![Line::through("rblk", 0, [(1.0, 624.0), (32.0, 4851.0)])],
            means: vec![],
            marks: true,
        };
        let text = lines.draw().inline();
        assert!(text.contains("rblk, depth 32: 4851"), "{text}");
        assert_eq!(text.matches("<polyline").count(), 1);
    }

    #[test]
    fn parts_have_as_many_digits_as_nines() {
        for (part, text) in [(0.5, "50 %"), (0.99, "99 %"), (0.9999, "99.99 %"), (0.0, "0 %")] {
            assert_eq!(Form::Part.write(part), text);
        }
    }
}
