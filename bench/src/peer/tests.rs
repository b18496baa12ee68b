use super::*;

#[test]
fn variants_are_told_in_words() {
    let variant = Variant::parse(
        "tcp RBLK_LOG=warn --spin=always target:--poll-groups=1 mount:--max-io=256KiB programs=/x",
    )
    .unwrap();
    assert_eq!(variant.carrier, Carrier::Tcp);
    assert_eq!(variant.environment, [("RBLK_LOG".to_owned(), "warn".to_owned())]);
    assert_eq!(variant.target_flags, ["--spin=always", "--poll-groups=1"]);
    assert_eq!(variant.mount_flags, ["--spin=always", "--max-io=256KiB"]);
    assert_eq!(variant.programs, Some("/x".into()));
    assert!(!variant.engine);
    let variant = Variant::parse("engine tcp engine:digest=\"off\"").unwrap();
    assert!(variant.engine && variant.engine_lines == ["digest=\"off\""]);
    assert!(Variant::parse("fast").is_err());
    assert_eq!(Variant::parse("").unwrap(), Variant::plain(Carrier::Verbs));
}
