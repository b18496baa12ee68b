//! Replays the corpora: every kept input goes to its target again. An input that once broke the
//! code is kept as `found-...`.

use std::fs;
use std::path::Path;

use rblk_fuzz::{ALL, corpus};

/// Replays one target: its seeds are accepted, and each input of its corpus does no harm.
fn replay(name: &str) {
    let target = ALL.iter().find(|target| target.name == name).expect("a target");
    for (at, seed) in (target.seeds)().iter().enumerate() {
        assert!(
            (target.run)(seed),
            "seed {at} is not accepted: the code changed, the seed did not"
        );
    }
    let inputs = corpus::read(name).expect("a corpus");
    let count = inputs.len();
    let mut accepted = 0;
    for (at, input) in inputs.iter().enumerate() {
        println!("{name} {at} {}: {} bytes", input.name, input.bytes.len());
        accepted += u32::from((target.run)(&input.bytes));
    }
    println!("{name}: {count} inputs, {accepted} accepted");
    assert!(count >= 2, "{name} has {count} inputs");
    assert!(accepted >= 1, "no input of {name} is accepted: make a new corpus");
}

macro_rules! replayed {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { replay(stringify!($name)); })*

        #[test]
        fn every_target_is_replayed_and_has_a_program() {
            let replayed = [$(stringify!($name)),*];
            let all: Vec<_> = ALL.iter().map(|target| target.name).collect();
            assert_eq!(all, replayed);
            let root = Path::new(env!("CARGO_MANIFEST_DIR"));
            for name in all {
                assert!(root.join(format!("src/bin/{name}.rs")).exists(), "{name}");
            }
            for entry in fs::read_dir(corpus::directory()).expect("the corpora") {
                let file = entry.expect("an entry").path();
                let is_known = |name: &&str| corpus::path(name) == file;
                assert!(replayed.iter().any(is_known), "{} is of no target", file.display());
            }
        }
    };
}

replayed!(
    hello,
    admin_body,
    handshake,
    capsule,
    control_core,
    target_engine,
    initiator_engine,
    tcp_frame,
    tcp_handshake,
    target_config,
    mount_config,
    note,
    guest_note,
    record,
    holders,
    lineage,
    vhost_front_end,
);

/// The corpora stay small enough for a repository.
#[test]
fn the_corpora_are_small() {
    let mut bytes = 0;
    for target in ALL {
        bytes += fs::metadata(corpus::path(target.name)).expect("a corpus").len();
    }
    assert!(bytes <= 1 << 20, "{bytes} bytes: minimise them, see docs/internals/testing.md");
}
