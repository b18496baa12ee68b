//! Lines of a plot as they are measured, with the exponent of their growth.

use super::fit::{LINEAR, exponent};
use crate::result::{Axis, Point, ScaleLine, ScalePlot, Summary};

/// Points, by ascending `x`.
#[derive(Clone, Debug, Default)]
pub(super) struct Line(Vec<Point>);

/// An empty plot.
pub(super) fn plot(key: &str, title: &str, x: Axis, y: Axis, note: String) -> ScalePlot {
    ScalePlot { key: key.to_owned(), title: title.to_owned(), x, y, note, ..ScalePlot::default() }
}

impl Line {
    /// Adds a point with its spread.
    pub(super) fn add(&mut self, x: f64, of: Summary) {
        self.0.push(Point { x, y: of.median, low: of.low, high: of.high });
    }

    /// Adds a point without one.
    pub(super) fn add_one(&mut self, x: f64, y: f64) {
        self.0.push(Point { x, y, low: y, high: y });
    }

    /// A line that is only to be looked at.
    pub(super) fn plain(self, label: &str) -> ScaleLine {
        ScaleLine { label: label.to_owned(), points: self.0, slope: None, flagged: false }
    }

    /// A line whose `y` is what all of `x` cost together, fitted from `least` on.
    pub(super) fn growth_from(self, label: &str, least: f64) -> ScaleLine {
        let all: Vec<(f64, f64)> =
            self.0.iter().filter(|p| p.x >= least).map(|p| (p.x, p.y)).collect();
        self.fitted(label, &all)
    }

    /// A line whose `y` is what one costs among `x`: all of them cost `x * y`.
    pub(super) fn growth_of_all(self, label: &str) -> ScaleLine {
        let all: Vec<(f64, f64)> = self.0.iter().map(|p| (p.x, p.x * p.y)).collect();
        self.fitted(label, &all)
    }

    /// A line whose `y` is how many a second there are of work that is divided among `x`: one for
    /// each costs `x / y`.
    pub(super) fn growth_of_rate(self, label: &str) -> ScaleLine {
        let rated = self.0.iter().filter(|p| p.y > 0.0);
        let all: Vec<(f64, f64)> = rated.map(|p| (p.x, p.x / p.y)).collect();
        self.fitted(label, &all)
    }

    fn fitted(self, label: &str, all: &[(f64, f64)]) -> ScaleLine {
        let slope = exponent(all);
        let flagged = slope.is_some_and(|slope| slope > LINEAR);
        ScaleLine { label: label.to_owned(), points: self.0, slope, flagged }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(of: fn(f64) -> f64) -> Line {
        let mut line = Line::default();
        for x in [1.0, 10.0, 100.0, 1000.0] {
            line.add_one(x, of(x));
        }
        line
    }

    #[test]
    fn growth_is_judged_by_what_all_cost() {
        let near = |line: &ScaleLine, exponent: f64| {
            assert!((line.slope.unwrap() - exponent).abs() < 1e-9, "{line:?}");
            line.flagged
        };
        // Memory of all sessions: linear is right, a square is not.
        assert!(!near(&line(|x| 5000.0 * x).growth_from("l", 1.0), 1.0));
        assert!(near(&line(|x| x * x).growth_from("l", 1.0), 2.0));
        // The time of one: the same each is right, longer each time is not.
        assert!(!near(&line(|_| 42.0).growth_of_all("l"), 1.0));
        assert!(near(&line(f64::sqrt).growth_of_all("l"), 1.5));
        // The same rate for all is right, a rate that falls is not.
        assert!(!near(&line(|_| 9000.0).growth_of_rate("l"), 1.0));
        assert!(near(&line(|x| 9000.0 / x).growth_of_rate("l"), 2.0));
        // What is small is left out where it is said so.
        let bent = line(|x| if x < 10.0 { 500.0 } else { x });
        assert!(!near(&bent.growth_from("l", 10.0), 1.0));
        assert_eq!(line(|x| x).plain("l").slope, None);
    }
}
