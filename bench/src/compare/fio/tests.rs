use super::*;

const SIDE: &str =
    r#"{"io_bytes":0,"total_ios":0,"runtime":0,"lat_ns":{"min":0,"max":0,"mean":0.0}}"#;

#[test]
fn both_directions_count() {
    let json = r#"note: both iodepth >= 1
{"fio version":"fio-3.33","jobs":[{"jobname":"x","error":0,"total_err":0,"usr_cpu":10.0,"sys_cpu":15.0,
 "job options":{"numjobs":"2"},
 "read":{"io_bytes":4096000,"total_ios":1000,"runtime":2000,"lat_ns":{"max":9000,"mean":1000.0,
  "bins":{"1000":990,"8000":10}}},
 "write":{"io_bytes":4096000,"total_ios":1000,"runtime":2000,"lat_ns":{"max":5000,"mean":3000.0,
  "bins":{"3000":1000}}}}]}"#;
    let measured = parse(json).unwrap();
    assert!((measured.iops - 1000.0).abs() < 1e-9 && (measured.cpu.fio - 0.5).abs() < 1e-9);
    assert!((measured.bytes_per_s - 4_096_000.0).abs() < 1e-6);
    let latency = &measured.latency;
    assert!((latency.mean_ns - 2000.0).abs() < 1e-9);
    assert_eq!((latency.p50, latency.p99, latency.p999, latency.max), (3000, 3000, 8000, 9000));
    assert_eq!(latency.bins.iter().map(|(_, count)| count).sum::<u64>(), 2000);
}

#[test]
fn a_run_that_measured_nothing_is_an_error() {
    let json = format!(r#"{{"jobs":[{{"error":5,"read":{SIDE},"write":{SIDE}}}]}}"#);
    assert!(parse(&json).unwrap_err().to_string().contains("error 5"));
    assert!(parse("fio: nothing").is_err());
    assert!(parse(r#"{"jobs":[]}"#).is_err());
}

#[test]
fn bins_become_fewer_and_stay_near() {
    for nanoseconds in [0_u64, 1, 15, 16, 17, 100, 12_345, 387_072, 1 << 40] {
        let near = coarse(nanoseconds);
        assert!(
            near >= nanoseconds && (near - nanoseconds) * 16 <= nanoseconds.max(16),
            "{nanoseconds}: {near}"
        );
    }
    assert_eq!((coarse(1024), coarse(1087), coarse(1088)), (1088, 1088, 1152));
}

#[test]
fn a_mix_says_its_share() {
    let cell = Cell::new("randrw", 4096, 32, 1, 1, 70);
    let words = words(&cell, &Access::Disk("/dev/x".into()), 1 << 20, 4, Path::new("/o"));
    for word in ["--rw=randrw", "--rwmixread=70", "--bs=4096", "--runtime=4", "--size=1048576"] {
        assert!(words.iter().any(|w| w == word), "{word}");
    }
}
