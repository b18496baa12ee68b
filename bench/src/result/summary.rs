//! [`Summary`]: several rounds of one thing, and ratios of rounds that two of them have.
//!
//! Only numbers count: what is infinite or none is left out, and nothing at all has no summary.

use std::collections::BTreeMap;

/// Several rounds of one thing.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
    /// Rounds.
    pub count: usize,
}

impl Summary {
    /// The median and the spread of what is a number; `None` if nothing is.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Self { median, low, high, count: values.len() })
    }
}

/// The ratios of rounds that both have.
#[must_use]
pub fn paired(ours: &BTreeMap<u32, f64>, theirs: &BTreeMap<u32, f64>) -> Option<Summary> {
    Summary::of(ours.iter().filter_map(|(round, ours)| {
        let theirs = theirs.get(round)?;
        (*theirs > 0.0).then(|| ours / theirs)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_of_numbers_only() {
        assert_eq!(Summary::of([]), None);
        assert_eq!(Summary::of([f64::NAN, f64::INFINITY]), None);
        let three = Summary::of([3.0, 1.0, f64::NAN, 2.0]).unwrap();
        assert_eq!(three, Summary { median: 2.0, low: 1.0, high: 3.0, count: 3 });
        assert!((Summary::of([1.0, 4.0]).unwrap().median - 2.5).abs() < 1e-9);
    }
}
