use super::*;

fn sample(system: &str, round: u32, iops: f64) -> Sample {
    Sample { system: system.into(), cell: "c".into(), round, iops, ..Sample::default() }
}

#[test]
fn ratios_are_of_the_same_round() {
    let mut run = Run::begin("r");
    // The machine became twice as fast after round 1: both ratios are 1.5 all the same.
    for (round, ours, theirs) in [(1, 150.0, 100.0), (2, 300.0, 200.0)] {
        run.set_sample(sample("a", round, ours));
        run.set_sample(sample("b", round, theirs));
    }
    // A round that one of them does not have, or that measured nothing, has no ratio.
    run.set_sample(sample("a", 3, 900.0));
    run.set_sample(sample("a", 4, 900.0));
    run.set_sample(sample("b", 4, 0.0));
    let ratio = run.ratio("a", "b", "c", |s| s.iops).unwrap();
    assert_eq!(ratio, Summary { median: 1.5, low: 1.5, high: 1.5, count: 2 });
    assert_eq!(run.ratio("a", "nobody", "c", |s| s.iops), None);
}

#[test]
fn what_is_measured_again_replaces_what_was() {
    let mut run = Run::begin("r");
    run.set_sample(sample("a", 1, 1.0));
    run.set_sample(sample("a", 1, 2.0));
    assert_eq!(run.samples.len(), 1);
    assert!((run.sample("a", "c", 1).unwrap().iops - 2.0).abs() < 1e-9);
    run.set_system(SystemInfo {
        key: "a".into(),
        error: Some("no".into()),
        ..SystemInfo::default()
    });
    run.set_system(SystemInfo { key: "a".into(), ..SystemInfo::default() });
    assert_eq!(run.systems.len(), 1);
    assert_eq!(run.systems[0].error, None);
}

#[test]
fn a_run_is_read_back_and_an_older_one_too() {
    let mut run = Run::begin("r");
    run.set_sample(sample("a", 1, 1.0));
    run.cost = Some(Report::default());
    let text = serde_json::to_string(&run).unwrap();
    assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), run);
    let old: Run = serde_json::from_str(r#"{"schema":1,"samples":[{"system":"x"}]}"#).unwrap();
    assert_eq!(old.samples[0].system, "x");
    assert_eq!(old.scale, None);
}
