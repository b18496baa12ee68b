//! Replays the corpora: every kept input goes to its target again. An input that once broke the
//! code is kept as `found-...`.

use std::fs;
use std::path::{Path, PathBuf};

use rblk_fuzz::{ALL, Target};

fn corpus(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name)
}

/// Replays one target: its seeds are accepted, and each input of its corpus does no harm.
fn replay(name: &str) {
    let target = ALL.iter().find(|target| target.name == name).expect("a target");
    for (at, seed) in (target.seeds)().iter().enumerate() {
        assert!(
            (target.run)(seed),
            "seed {at} is not accepted: the code changed, the seed did not"
        );
    }
    let corpus = corpus(target);
    let entries = fs::read_dir(&corpus)
        .unwrap_or_else(|error| panic!("no corpus at {}: {error}", corpus.display()));
    let (mut count, mut accepted) = (0, 0);
    for entry in entries {
        let path = entry.expect("an entry").path();
        println!("{}", path.display());
        let data = fs::read(&path).expect("an input");
        count += 1;
        accepted += u32::from((target.run)(&data));
    }
    println!("{name}: {count} inputs, {accepted} accepted");
    assert!(count >= 2, "{} has {count} inputs", corpus.display());
    assert!(accepted >= 1, "no input of {} is accepted: make a new corpus", corpus.display());
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
            for entry in fs::read_dir(root.join("corpus")).expect("the corpora") {
                let name = entry.expect("an entry").file_name();
                assert!(replayed.iter().any(|known| name == *known), "{name:?} is of no target");
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
        for entry in fs::read_dir(corpus(&target)).expect("a corpus") {
            bytes += entry.expect("an entry").metadata().expect("its size").len();
        }
    }
    assert!(bytes <= 1 << 20, "{bytes} bytes: minimise them, see docs/internals/testing.md");
}
