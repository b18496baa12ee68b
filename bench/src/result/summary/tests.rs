use super::*;

#[test]
fn a_summary_is_of_numbers_only() {
    assert_eq!(Summary::of([]), None);
    assert_eq!(Summary::of([f64::NAN, f64::INFINITY]), None);
    let three = Summary::of([3.0, 1.0, f64::NAN, 2.0]).unwrap();
    assert_eq!(three, Summary { median: 2.0, low: 1.0, high: 3.0, count: 3 });
    assert!((Summary::of([1.0, 4.0]).unwrap().median - 2.5).abs() < 1e-9);
}
