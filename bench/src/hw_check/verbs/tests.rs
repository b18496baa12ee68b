use super::*;

#[test]
fn the_words_of_a_doctor_are_taken_over() {
    let json = r#"{"findings":[{"verdict":"ok","subject":"route","found":"eth0"},
        {"verdict":"fail","subject":"ublk","found":"none","fix":"modprobe ublk_drv"},
        {"verdict":"fail","subject":"connect","found":"nobody","fix":"start it"},
        {"verdict":"skip","subject":"x","found":"y"}],"failures":1,"warnings":0}"#;
    let found = findings_of(json).unwrap();
    let brief: Vec<_> = found.iter().map(|f| (f.verdict, f.subject.as_str())).collect();
    let want = [
        (Verdict::Ok, "doctor: route"),
        (Verdict::Fail, "doctor: connect"),
        (Verdict::Skip, "doctor: x"),
    ];
    assert_eq!(brief, want);
    assert_eq!(found[1].fix.as_deref(), Some("start it"));
    for bad in ["", "{}", "[1]", r#"{"findings":[{"verdict":"ok"}]}"#] {
        assert_eq!(findings_of(bad), None, "{bad}");
    }
}

#[test]
fn patterns_of_two_seeds_differ() {
    assert!((0..4096).any(|at| pattern(at, 1) != pattern(at, 2)));
    assert!((0..4096).all(|at| pattern(at, 9) != 0));
}
