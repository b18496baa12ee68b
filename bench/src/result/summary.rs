//! [`Summary`]: several rounds of one quantity, and ratios of rounds that two systems have.

use std::collections::BTreeMap;

/// Several rounds of one thing.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) count: usize,
}

impl Summary {
    /// The median and the spread of finite values; `None` without any.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
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
pub(crate) fn paired(ours: &BTreeMap<u32, f64>, theirs: &BTreeMap<u32, f64>) -> Option<Summary> {
    Summary::of(ours.iter().filter_map(|(round, ours)| {
        let theirs = theirs.get(round)?;
        (*theirs > 0.0).then(|| ours / theirs)
    }))
}

#[cfg(test)]
mod tests;
