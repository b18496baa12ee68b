use super::*;

const TEXT: &str = "# callgrind format\nversion: 1\npositions: line\nevents: Ir\nsummary: 80\n\n\
    ob=(1) /bin/x\nfl=(1) ???\nfn=(1) turn<a, b>\n16 20\ncfn=(2) poll\ncalls=3 50\n16 12\n+1 5\n\
    cfn=(3)\n\nfn=(2)\n* 7\ncfi=(2) y.rs\ncfn=(4) memcpy\ncalls=1 0\n* 5\n";

#[test]
fn costs_of_functions_and_of_calls() {
    let text = TEXT.replace("cfn=(3)\n", "");
    let profile = Profile::parse(&text).unwrap();
    let of = |from: &'static str, to: &'static str| {
        profile.sum(move |caller, callee| caller == from && callee == to)
    };
    assert_eq!(of("turn<a, b>", "poll"), Arc { calls: 3, cost: 12 });
    assert_eq!(of("poll", "memcpy"), Arc { calls: 1, cost: 5 });
    assert_eq!(of("memcpy", "poll"), Arc::default());
    assert_eq!(profile.hottest(9), [("turn<a, b>", 25), ("poll", 7)]);
    assert_eq!(profile.hottest(1), [("turn<a, b>", 25)]);
    assert_eq!(profile.sum(|_, _| true), Arc { calls: 4, cost: 17 });
}

#[test]
fn names_need_not_be_compressed() {
    let text = "events: Ir\nfn=(anonymous)::f\n0 3\ncfn=g\ncalls=2 0\n0 9\nfn=g\n0 9\n";
    let profile = Profile::parse(text).unwrap();
    assert_eq!(profile.hottest(9), [("g", 9), ("(anonymous)::f", 3)]);
    assert_eq!(profile.sum(|_, to| to == "g"), Arc { calls: 2, cost: 9 });
}

#[test]
fn what_is_no_profile_is_refused() {
    // A number without a name, a cost and calls without a function, two events.
    for text in [TEXT, "0 5\n", "fn=f\ncalls=1 0\n0 5\n", "events: Ir Dr\n", "fn=f\n0 x\n"] {
        assert!(Profile::parse(text).is_err(), "{text}");
    }
}
