//! [`Axis`]: where a value is between the ends of a plot, and which values are written beside it.

/// How values are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Equal steps are equal differences.
    Linear,
    /// Equal steps are equal factors.
    Log,
    /// Parts of a whole up to 1 (not reached): equal steps are equal factors of what is missing, so
    /// that 0.9, 0.99 and 0.999 are as far from each other.
    Nines,
}

/// A range of values.
#[derive(Clone, PartialEq, Debug)]
pub struct Axis {
    kind: Kind,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

/// The last of [`Kind::Nines`]: what comes after is not told apart.
const MOST_NINES: f64 = 0.9999;

impl Axis {
    /// From 0 to a little over the largest value.
    #[must_use]
    pub fn from_zero(values: impl IntoIterator<Item = f64>) -> Self {
        Self::zero(values, 1000.0)
    }

    /// The same for bytes: ticks are round in KiB, MiB and so on.
    #[must_use]
    pub fn from_zero_bytes(values: impl IntoIterator<Item = f64>) -> Self {
        Self::zero(values, 1024.0)
    }

    fn zero(values: impl IntoIterator<Item = f64>, thousand: f64) -> Self {
        let most = values.into_iter().filter(|v| v.is_finite()).fold(0.0, f64::max);
        let high = if most > 0.0 { most } else { 1.0 };
        let prefix = thousand.powf(high.log(thousand).floor());
        let step = step(high / prefix / 5.0) * prefix;
        let mut ticks = Vec::new();
        // At most six by the choice of the step; bounded all the same.
        for n in 0_u8..12 {
            let tick = f64::from(n) * step;
            if tick > high * 1.001 {
                break;
            }
            ticks.push(tick);
        }
        Self { kind: Kind::Linear, low: 0.0, high: high * 1.02, ticks }
    }

    /// By factors, over all positive values.
    #[must_use]
    pub fn log(values: impl IntoIterator<Item = f64>) -> Self {
        let (low, high) = values
            .into_iter()
            .filter(|v| v.is_finite() && *v > 0.0)
            .fold((f64::INFINITY, 0.0_f64), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low.is_finite() { (low, high) } else { (1.0, 10.0) };
        // A short range gets round ends, so that there is something to read it by.
        let (low, high) =
            if high / low < 10.0 { (round(low, false), round(high, true)) } else { (low, high) };
        let factors: &[f64] = match (high / low).log10() {
            decades if decades > 5.0 => &[1.0],
            decades if decades > 2.2 => &[1.0, 3.0],
            _ => &[1.0, 2.0, 5.0],
        };
        let mut ticks = Vec::new();
        for exponent in -18_i32..=18 {
            for factor in factors {
                let tick = factor * 10_f64.powi(exponent);
                if tick >= low * 0.999 && tick <= high * 1.001 {
                    ticks.push(tick);
                }
            }
        }
        Self { kind: Kind::Log, low, high, ticks }
    }

    /// The same for bytes: ticks are powers of 2, eight at most.
    #[must_use]
    pub fn log_bytes(values: impl IntoIterator<Item = f64>) -> Self {
        let mut axis = Self::log(values);
        let inside = |shift: &i32| {
            let tick = 2_f64.powi(*shift);
            tick >= axis.low * 0.999 && tick <= axis.high * 1.001
        };
        let shifts: Vec<i32> = (-10..=50).filter(inside).collect();
        let every = shifts.len().div_ceil(8).max(1);
        axis.ticks = shifts.into_iter().step_by(every).map(|shift| 2_f64.powi(shift)).collect();
        axis
    }

    /// By factors, with ticks at the values themselves: what was set, such as depths and sizes.
    #[must_use]
    pub fn log_at(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> =
            values.into_iter().filter(|v| v.is_finite() && *v > 0.0).collect();
        values.sort_by(f64::total_cmp);
        values.dedup_by(|a, b| (*a - *b).abs() < 1e-9);
        Self { ticks: values.clone(), ..Self::log(values) }
    }

    /// Whole numbers one after another, such as runs, with half a step at both ends.
    #[must_use]
    pub fn steps(values: impl IntoIterator<Item = f64>) -> Self {
        let mut ticks: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup_by(|a, b| (*a - *b).abs() < 1e-9);
        let ends = ticks.first().zip(ticks.last()).map(|(low, high)| (low - 0.5, high + 0.5));
        let (low, high) = ends.unwrap_or((0.0, 1.0));
        Self { kind: Kind::Linear, low, high, ticks }
    }

    /// 0 % to 99.99 %.
    #[must_use]
    pub fn nines() -> Self {
        let ticks = vec![0.0, 0.5, 0.9, 0.99, 0.999, 0.9999];
        Self { kind: Kind::Nines, low: 0.0, high: MOST_NINES, ticks }
    }

    /// Where a value is, from 0 to 1; values outside are at the ends.
    #[must_use]
    pub fn at(&self, value: f64) -> f64 {
        let place = |v: f64| match self.kind {
            Kind::Linear => v,
            Kind::Log => v.max(f64::MIN_POSITIVE).ln(),
            Kind::Nines => -(1.0 - v.clamp(0.0, MOST_NINES)).ln(),
        };
        let (low, high) = (place(self.low), place(self.high));
        let at = (place(value) - low) / (high - low);
        if at.is_finite() { at.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Whether a value is more than there is room for.
    #[must_use]
    pub fn is_beyond(&self, value: f64) -> bool {
        value > self.high
    }

    /// The values to write, ascending.
    #[must_use]
    pub fn ticks(&self) -> &[f64] {
        &self.ticks
    }

    /// The same with fewer ticks: none nearer to the one before than `least` of the length.
    #[must_use]
    pub fn thinned(mut self, least: f64) -> Self {
        let mut last = f64::NEG_INFINITY;
        let ticks = std::mem::take(&mut self.ticks);
        for tick in ticks {
            let at = self.at(tick);
            if at - last >= least {
                last = at;
                self.ticks.push(tick);
            }
        }
        self
    }
}

/// The next of 1, 2, 5 times a power of ten, up or down; never the value itself, which stands
/// inside.
fn round(value: f64, up: bool) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let factors = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0];
    let mut inside = factors.into_iter().map(|factor| factor * power);
    let found = if up {
        inside.find(|end| *end > value * 1.001)
    } else {
        inside.rfind(|end| *end < value * 0.999)
    };
    found.unwrap_or(value)
}

/// The next of 1, 2, 2.5, 5 times a power of ten.
fn step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= least * 0.999);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(Axis::from_zero([1.57, 0.3]).ticks(), [0.0, 0.5, 1.0, 1.5]);
        assert_eq!(Axis::from_zero([12926.0]).ticks(), [0.0, 5000.0, 10000.0]);
        assert_eq!(Axis::log([250.0, 440.0]).ticks(), [200.0, 500.0]);
        assert_eq!(Axis::log([100.0]).ticks(), [50.0, 100.0, 200.0]);
        let mib = f64::from(1 << 20);
        assert_eq!(Axis::from_zero_bytes([110.0 * mib]).ticks()[1..3], [25.0 * mib, 50.0 * mib]);
        assert_eq!(Axis::log([30.0, 1000.0]).ticks(), [50.0, 100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(Axis::log_bytes([3.0, 33.0]).ticks(), [4.0, 8.0, 16.0, 32.0]);
        assert!(Axis::log_bytes([1.0, 1e12]).ticks().len() <= 8);
        assert_eq!(Axis::log_at([32.0, 1.0, 8.0, 1.0]).ticks(), [1.0, 8.0, 32.0]);
    }

    #[test]
    fn places_are_between_the_ends() {
        let log = Axis::log([1.0, 100.0]);
        assert!((log.at(10.0) - 0.5).abs() < 1e-9);
        let nines = Axis::nines();
        assert!((nines.at(0.9) - 0.25).abs() < 1e-9 && (nines.at(0.99) - 0.5).abs() < 1e-9);
        for axis in [log, nines, Axis::from_zero([5.0])] {
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0, 1e300] {
                let at = axis.at(value);
                assert!((0.0..=1.0).contains(&at), "{axis:?} {value} {at}");
            }
        }
    }

    #[test]
    fn nothing_to_show_is_no_panic() {
        for axis in [Axis::from_zero([]), Axis::log([]), Axis::log_at([f64::NAN]), Axis::log([0.0])]
        {
            assert!((0.0..=1.0).contains(&axis.at(1.0)));
        }
    }

    #[test]
    fn ticks_leave_room_for_their_texts() {
        let many = Axis::log_at((0..30).map(|n| f64::from(1 << n))).thinned(0.1);
        assert!(many.ticks().len() <= 11, "{:?}", many.ticks());
        assert!((many.ticks()[0] - 1.0).abs() < 1e-9);
    }
}
