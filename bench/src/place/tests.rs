use super::*;

#[test]
fn this_machine_is_known() {
    let place = here();
    assert!(!place.kernel.is_empty() && place.cpus > 0);
    assert!(place.facts.iter().any(|fact| fact.name == "memory"));
}

#[test]
fn fields_are_found() {
    let text = "processor\t: 0\nmodel name\t: A B\nmodel name\t: C\n";
    assert_eq!(field(text, "model name"), Some("A B".to_owned()));
    assert_eq!(field(text, "flags"), None);
}
