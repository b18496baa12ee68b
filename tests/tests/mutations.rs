//! The mutations of `tests/mutations` still fit the source: each breaks a rule, which the
//! simulation must notice.

use std::fs;
use std::path::{Path, PathBuf};

/// A place of a patch: its file, and the lines that must be there.
struct Place {
    file: PathBuf,
    lines: String,
}

fn places(patch: &str) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    let mut file = PathBuf::new();
    for line in patch.lines() {
        if let Some(path) = line.strip_prefix("+++ b/") {
            file = path.into();
        } else if line.starts_with("@@") {
            places.push(Place { file: file.clone(), lines: String::new() });
        } else if let Some(place) = places.last_mut()
            && !line.starts_with("diff --git")
            && !line.starts_with("---")
            && let Some(is) = line.strip_prefix([' ', '-'])
        {
            place.lines.push_str(is);
            place.lines.push('\n');
        }
    }
    places
}

#[test]
fn every_mutation_fits_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut rules = std::collections::BTreeMap::new();
    for entry in fs::read_dir(root.join("tests/mutations")).expect("the mutations") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "patch") {
            continue;
        }
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let patch = fs::read_to_string(&path).expect("a patch");
        let places = places(&patch);
        assert!(!places.is_empty(), "{name} changes nothing");
        for place in places {
            let source = fs::read_to_string(root.join(&place.file)).unwrap_or_default();
            assert_eq!(
                source.matches(&place.lines).count(),
                1,
                "{name} does not fit {} any more: make it anew. It wants\n{}",
                place.file.display(),
                place.lines
            );
        }
        let rule: Vec<&str> = name.splitn(3, '_').take(1).collect();
        *rules.entry(rule.concat()).or_insert(0) += 1;
    }
    let names: Vec<&str> = rules.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        ["buffer", "destroy", "epoch", "fencing", "flush", "loss", "replay"],
        "a rule has no mutation"
    );
    assert!(rules.values().all(|count| *count >= 2), "two for each: {rules:?}");
}
