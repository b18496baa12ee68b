//! How fast something grows: the exponent of a power law through points.

/// Growth that is worse than linear: the exponent 1 with room for noise.
pub const LINEAR: f64 = 1.05;

/// The exponent `b` of `y = a * x^b` that fits best: the slope of a line through the logarithms.
/// Points that have none are left out; `None` if fewer than two different `x` are left.
#[must_use]
pub fn exponent(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points
        .iter()
        .filter(|(x, y)| *x > 0.0 && *y > 0.0 && x.is_finite() && y.is_finite())
        .map(|(x, y)| (x.ln(), y.ln()))
        .collect();
    #[allow(clippy::cast_precision_loss, reason = "a handful of points")]
    let count = logs.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / count;
    let (mx, my) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = logs.iter().map(|(x, _)| (x - mx) * (x - mx)).sum();
    let together: f64 = logs.iter().map(|(x, y)| (x - mx) * (y - my)).sum();
    // Points of one x have a spread of rounding errors at most.
    (logs.len() >= 2 && spread > 1e-12).then(|| together / spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn law(exponent: f64, xs: &[f64]) -> Vec<(f64, f64)> {
        xs.iter().map(|x| (*x, 7.0 * x.powf(exponent))).collect()
    }

    #[test]
    fn power_laws_have_their_exponent() {
        let xs = [1.0, 2.0, 5.0, 10.0, 100.0, 1000.0];
        for b in [-1.0, 0.0, 0.5, 1.0, 2.0] {
            let found = exponent(&law(b, &xs)).unwrap();
            assert!((found - b).abs() < 1e-9, "{b} is told as {found}");
        }
        // A fixed cost beside a linear one is better than linear.
        let mixed: Vec<(f64, f64)> = xs.iter().map(|x| (*x, 100.0 + x)).collect();
        assert!(exponent(&mixed).unwrap() < 1.0);
        // A square within linear noise is not.
        let worse: Vec<(f64, f64)> = xs.iter().map(|x| (*x, x + 0.01 * x * x)).collect();
        assert!(exponent(&worse).unwrap() > LINEAR);
    }

    #[test]
    fn what_cannot_be_fitted_is_not() {
        assert_eq!(exponent(&[]), None);
        assert_eq!(exponent(&[(1.0, 1.0)]), None);
        assert_eq!(exponent(&[(3.0, 1.0), (3.0, 2.0)]), None);
        assert_eq!(exponent(&[(0.0, 1.0), (-1.0, 2.0), (1.0, 1.0), (2.0, 0.0)]), None);
        let with_holes = [(0.0, 5.0), (1.0, 2.0), (2.0, f64::NAN), (4.0, 8.0)];
        assert!((exponent(&with_holes).unwrap() - 1.0).abs() < 1e-9);
    }
}
