use super::*;

#[test]
fn samples_are_folded_by_window_thread_and_function() {
    let script = "\
        swapper     1.000000000:  ffffffff821f236b pv_native_safe_halt\n\
   rblk-queue-0     1.100000000:  ffffffff820000aa rep_movs_alternative\n\
   rblk-queue-1     1.100000001:  ffffffff820000ab rep_movs_alternative\n\
   rblk-queue-0     1.200000000:      55d0c8a1b2c3 <a::B as c::D>::e\n\
kworker/u8:4-rx     1.300000000:  ffffffff820000cc crc32_le\n\
kworker/u8:0+rx     1.999999999:  ffffffff820000cc crc32_le\n\
        swapper     2.000000000:  ffffffff820000dd handle_softirqs\n\
 a thread: two      2.500000000:      7f00000000aa [unknown]\n\
    no time here\n\n\
    x 1.5: ffffffff820000cc short\n";
    let windows = [
        Window { from: 1_000_000_000, to: 2_000_000_000 },
        Window { from: 5_000_000_000, to: 6_000_000_000 },
        Window { from: 2_000_000_000, to: 2_000_000_001 },
    ];
    let folded = fold(script, &windows);
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let [threads, nothing, last] = folded.as_slice() else { panic!("{folded:?}") };
    let names: Vec<&str> = threads.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["rblk-queue", "kworker rx", ThreadShare::IDLE]);
    assert!(near(threads[0].share, 0.5) && near(threads[2].share, 1.0 / 6.0));
    let functions: Vec<(&str, bool)> =
        threads[0].functions.iter().map(|f| (f.name.as_str(), f.kernel)).collect();
    assert_eq!(functions, [("rep_movs_alternative", true), ("<a::B as c::D>::e", false)]);
    assert!(near(threads[0].functions[0].share, 2.0 / 6.0));
    assert!(nothing.is_empty());
    assert_eq!(last[0].name, "interrupts when idle");
    let odd = sample("  a thread: two      2.500000000:      7f00000000aa [unknown]");
    assert_eq!(odd.map(|s| s.comm), None, "a name with a colon is not understood, not misread");
}

#[test]
fn threads_that_do_the_same_have_one_name() {
    for (comm, name) in [
        ("rblk-queue-0", "rblk-queue"),
        ("ksoftirqd/1", "ksoftirqd"),
        ("iou-wrk-238", "iou-wrk"),
        ("fio", "fio"),
        ("kworker/0:1H", "kworker"),
        ("kworker/u8:3-nvmet-wq", "kworker nvmet-wq"),
        ("md5", "md"),
        ("7", ""),
    ] {
        assert_eq!(thread(comm, ""), name, "{comm}");
    }
}
