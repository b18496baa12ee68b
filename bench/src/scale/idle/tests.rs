use super::*;

#[test]
fn a_process_tells_its_processor_time() {
    let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 1 0 5";
    assert_eq!(processor_time_in(stat), Some(Duration::from_secs(2)));
    assert_eq!(processor_time_in("7 (x"), None);
    assert!(processor_time(std::process::id()).is_some());
}
