use super::*;

#[test]
fn a_bin_is_near_its_times() {
    let mut last = 0;
    for power in 0..40 {
        for step in 0..200_u64 {
            let ns = (1_u64 << power) + step * (1_u64 << power) / 200;
            let bin = bin_of(ns);
            assert!(bin >= last, "{ns}: bins ascend");
            last = bin;
            let middle = middle_of(bin);
            assert!(middle.abs_diff(ns) * 100 <= ns, "{ns} is told as {middle}");
            assert_eq!(bin_of(middle), bin, "{ns}: the middle is inside");
        }
    }
    assert_eq!(bin_of(0), 0);
    assert_eq!(bin_of(u64::MAX), BINS - 1);
}

#[test]
fn percentiles_are_those_of_the_times() {
    let mut histogram = Histogram::new();
    assert_eq!(histogram.at(500_000), 0);
    (1..=10_000).for_each(|us| histogram.record(us * 1000));
    for (share, ns) in [(500_000, 5_000_000_u64), (990_000, 9_900_000), (999_900, 9_999_000)] {
        let told = histogram.at(share);
        assert!(told.abs_diff(ns) * 100 <= ns, "{told} for {ns}");
    }
    assert_eq!(histogram.at(0), histogram.at(1));
    assert_eq!((histogram.at(1_000_000), histogram.count()), (10_000_000, 10_000));
}
