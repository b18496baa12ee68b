use super::*;

#[test]
fn cells_have_names() {
    let cell = Cell::new("randread", 4096, 32, 1, 1, 100);
    assert_eq!(
        (cell.key.as_str(), cell.title().as_str()),
        ("randread-4k-qd32-j1-q1", "4k randread QD32")
    );
    let cell = Cell::new("randrw", 4096, 32, 4, 2, 70);
    assert_eq!(cell.key, "randrw70-4k-qd32-j4-q2");
    assert_eq!(cell.title(), "4k 70:30 mix QD32, 4 jobs, 2 queues");
    assert_eq!(Cell::new("read", 1 << 20, 8, 1, 1, 100).key, "read-1m-qd8-j1-q1");
    assert_eq!(Cell::new("read", 512, 8, 1, 1, 100).key, "read-512-qd8-j1-q1");
}
