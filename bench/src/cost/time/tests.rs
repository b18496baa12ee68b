use super::*;

#[test]
fn a_hit_is_what_the_cache_adds_to_a_read() {
    let case = Case { op: Op::Read, bytes: 4096, depth: 32, volume: Volume::Memory };
    let end = |engine_ns| EndTime { engine_ns, with_fabric_ns: engine_ns };
    let time = |case, ns| TimeCost { case, ios: 1, initiator: end(1.0), target: end(ns) };
    let memory = time(case, 100.0);
    let cached = time(Case { volume: Volume::Cached, ..case }, 140.0);
    assert_eq!(hit_ns(&[memory, cached], &cached), Some(40.0));
    assert_eq!(hit_ns(&[cached], &cached), None);
    assert_eq!(hit_ns(&[memory, cached], &memory), None);
}

#[test]
fn readings_of_the_clock_are_taken_off() {
    let at = |ns, below_ns, readings| EngineTime { ns, below_ns, readings };
    let time = EndTime::of(at(2100, 1000, 4), at(100, 0, 0), 10, 50.0);
    assert!((time.engine_ns - 180.0).abs() < 1e-9);
    assert!((time.with_fabric_ns - 260.0).abs() < 1e-9);
}
