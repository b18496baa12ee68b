use super::*;

fn cell(rw: &str, percent: u32) -> Cell {
    Cell::new(rw, 4096, 32, 1, 1, percent)
}

#[test]
fn the_program_is_told_a_cell() {
    let words = words(&cell("randread", 100), "iscsi://x/y/1", 3).join(" ");
    assert!(words.contains("-m 32 -b 8 -t 4 -r iscsi://x/y/1"), "{words}");
    assert!(can(&cell("read", 100)) && !can(&cell("randwrite", 0)) && !can(&cell("randrw", 70)));
    assert!(!can(&Cell::new("read", 4096, 1, 2, 1, 100)));
}

#[test]
fn its_last_rate_counts() {
    let said = "lba 1, iops current 9 (1 MB/s), iops average 23289 (90 MB/s), in_flight 32\r\
                iops average 21507 (84 MB/s)        \n\nfinished.\n";
    let measured = parse(said, &cell("randread", 100), 3).unwrap();
    assert!((measured.iops - 21507.0).abs() < 1e-9);
    assert!((measured.latency.mean_ns - 32e9 / 21507.0).abs() < 1.0);
    assert!(parse("iops average 0 (0 MB/s)", &cell("read", 100), 3).is_err());
    assert!(parse("connection refused", &cell("read", 100), 3).is_err());
    assert!(parse("iops average many", &cell("read", 100), 3).is_err());
}
