//! What a run leaves to the next one.

use super::*;
use crate::store::VolumeIndex;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::{BlockCount, BlockSize};

const FRESH: Lineage = Lineage { process: [1; 16], machine: [2; 16] };

fn remembered(clean: bool) -> Remembered {
    Remembered {
        version: FORM,
        boot_id: "b".to_owned(),
        process: to_hex([3; 16]),
        machine: to_hex([4; 16]),
        clean,
    }
}

#[test]
fn each_end_of_the_run_before() {
    let kept = Lineage { process: [3; 16], machine: [4; 16] };
    let after = |old: &Remembered, boot| begin(Some(old), boot, FRESH);
    assert_eq!(after(&remembered(true), "b"), (Before::Clean, kept));
    assert_eq!(after(&remembered(true), "other"), (Before::Clean, kept));
    assert_eq!(
        after(&remembered(false), "b"),
        (Before::ProcessDied, Lineage { process: [1; 16], machine: [4; 16] })
    );
    assert_eq!(after(&remembered(false), "other"), (Before::MachineDied, FRESH));
    assert_eq!(begin(None, "b", FRESH), (Before::Unknown, FRESH));
}

#[test]
fn what_is_not_ours_is_unknown() {
    let damage: [fn(&mut Remembered); 6] = [
        |r| r.version = 2,
        |r| r.process.clear(),
        |r| r.machine.truncate(31),
        |r| r.machine = "0".repeat(32),
        |r| r.process = format!("+{}", "0".repeat(31)),
        |r| r.process = "ü".repeat(16),
    ];
    for (at, damage) in damage.iter().enumerate() {
        let mut old = remembered(true);
        damage(&mut old);
        assert_eq!(begin(Some(&old), "b", FRESH), (Before::Unknown, FRESH), "{at}");
    }
    // A boot without id is no boot we know.
    let mut old = remembered(false);
    old.boot_id.clear();
    assert_eq!(begin(Some(&old), "", FRESH).0, Before::MachineDied);
}

#[test]
fn runs_of_a_target() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("made/on/the/way");
    let name = Name::new("store1").unwrap();
    let run = |boot: &str| LineageFile::open_on(&state, &name, boot).unwrap();

    let first = run("b1");
    assert!(!read(&state.join("store1.lineage")).unwrap().unwrap().clean, "before it serves");
    assert!(!first.is_inherited());
    first.mark_clean();
    let before = first.lineage();
    drop(first);

    let after_stop = run("b2");
    assert_eq!(after_stop.lineage(), before);
    assert!(after_stop.is_inherited());
    drop(after_stop);

    let after_kill = run("b2");
    assert_ne!(after_kill.lineage().process, before.process);
    assert_eq!(after_kill.lineage().machine, before.machine);
    let killed = after_kill.lineage();
    drop(after_kill);

    let after_crash = run("b3");
    assert_ne!(after_crash.lineage().process, killed.process);
    assert_ne!(after_crash.lineage().machine, killed.machine);
    after_crash.mark_clean();
    let crashed = after_crash.lineage();
    drop(after_crash);

    fs::write(state.join("store1.lineage"), "{\"clean\":true}").unwrap();
    assert_ne!(run("b3").lineage().machine, crashed.machine, "unreadable");
}

#[test]
fn a_renounced_run_has_no_heir_however_it_ends() {
    for (mark, boot) in [(true, "b1"), (false, "b1"), (true, "b2"), (false, "b2")] {
        let directory = tempfile::tempdir().unwrap();
        let name = Name::new("store1").unwrap();
        let run = |boot: &str| LineageFile::open_on(directory.path(), &name, boot).unwrap();
        let first = run("b1");
        let before = first.lineage();
        first.renounce();
        let noted = read(&directory.path().join("store1.lineage")).unwrap().unwrap();
        assert!(!noted.clean);
        // Once is enough: what was noted stays.
        first.renounce();
        assert_eq!(read(&directory.path().join("store1.lineage")).unwrap(), Some(noted));
        assert_eq!(first.lineage(), before, "this run goes on as it is");
        if mark {
            first.mark_clean();
        }
        drop(first);
        let second = run(boot);
        assert_ne!(second.lineage().process, before.process, "{mark}, {boot}");
        assert_ne!(second.lineage().machine, before.machine, "{mark}, {boot}");
        // And that one is a run as any other.
        let after = second.lineage();
        second.mark_clean();
        drop(second);
        assert_eq!(run(boot).lineage(), after);
    }
}

#[test]
fn a_loss_that_cannot_be_noted_still_changes_the_lineage() {
    // The run is killed (no clean end) or stops, and the machine goes on: what a crash of the
    // program alone would keep.
    for stops in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let name = Name::new("store1").unwrap();
        let run = || LineageFile::open_on(directory.path(), &name, "b").unwrap();
        let first = run();
        let before = first.lineage();
        // As on a full disk: there is no room for another file.
        let blocked = directory.path().join("store1.lineage.new");
        fs::create_dir(&blocked).unwrap();
        assert!(first.renounce(), "the removal of the file says it, too");
        assert!(!first.owes_note());
        fs::remove_dir(&blocked).unwrap();
        if stops {
            first.mark_clean();
        }
        drop(first);
        let second = run();
        assert_ne!(second.lineage().machine, before.machine);
        assert_ne!(second.lineage().process, before.process);
    }
}

#[test]
fn what_is_not_remembered_can_be_renounced() {
    assert!(LineageFile::forgetful().unwrap().renounce());
    let directory = tempfile::tempdir().unwrap();
    let name = Name::new("store1").unwrap();
    let run = || LineageFile::open_on(directory.path(), &name, "b").unwrap();
    let first = run();
    // Nothing can be written there: at least the end is not clean.
    let blocked = directory.path().join("store1.lineage.new");
    fs::create_dir(&blocked).unwrap();
    first.renounce();
    fs::remove_dir(&blocked).unwrap();
    first.mark_clean();
    let before = first.lineage();
    drop(first);
    assert_ne!(run().lineage().process, before.process);
}

#[test]
fn a_second_target_of_the_name_remembers_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let name = Name::new("store1").unwrap();
    let first = LineageFile::open_on(directory.path(), &name, "b").unwrap();
    let second = LineageFile::open_on(directory.path(), &name, "b").unwrap();
    assert_ne!(second.lineage().machine, first.lineage().machine);
    let holders = directory.path().join("store1.holders");
    assert_eq!(first.beside("holders"), Beside::Ours(holders.clone()));
    assert_eq!(second.beside("holders"), Beside::Foreign(holders));
    second.mark_clean();
    drop(second);
    let text = read(&directory.path().join("store1.lineage")).unwrap().unwrap();
    assert_eq!((text.clean, text.machine), (false, to_hex(first.lineage().machine)));
}

#[test]
fn what_is_there_is_read_where_nothing_can_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let name = Name::new("store1").unwrap();
    fs::create_dir(directory.path().join("store1.lineage.new")).unwrap();
    let file = LineageFile::open_on(directory.path(), &name, "b").unwrap();
    assert_eq!(file.beside("holders"), Beside::Nothing);
    let holders = directory.path().join("store1.holders");
    fs::write(&holders, "").unwrap();
    assert_eq!(file.beside("holders"), Beside::Ours(holders));
    assert_eq!(LineageFile::forgetful().unwrap().beside("holders"), Beside::Nothing);
}

#[test]
fn no_place_to_remember() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let name = Name::new("store1").unwrap();
    let one = LineageFile::open_on(&file, &name, "b").unwrap();
    one.mark_clean();
    let two = LineageFile::open_on(&file, &name, "b").unwrap();
    assert_ne!(one.lineage(), two.lineage());
}

#[test]
fn volumes_follow_what_holds_their_writes() {
    let volume = |placement, cache| Volume {
        index: VolumeIndex(0),
        name: Name::new("v").unwrap(),
        uuid: [0; 16],
        block_size: BlockSize::new(512).unwrap(),
        blocks: BlockCount(1),
        read_only: false,
        placement,
        cache,
        cache_min_bytes: 0,
        cache_max_bytes: None,
        read_ahead_bytes: 0,
        discard: true,
        discard_granularity_bytes: 512,
        limits: None,
    };
    let instance = InstanceId([9; 16]);
    let of = |placement, cache| FRESH.verifier_for(&volume(placement, cache), instance);
    let machine = WriteVerifier(FRESH.machine);
    assert_eq!(of(Placement::Store, CacheMode::None), machine);
    assert_eq!(of(Placement::Store, CacheMode::WriteThrough), machine);
    assert_eq!(of(Placement::Store, CacheMode::WriteBack), WriteVerifier(FRESH.process));
    assert_eq!(of(Placement::Null, CacheMode::None), WriteVerifier(instance.0));
    let memory = Region::allocate(512, PageKind::Normal).unwrap();
    assert_eq!(of(Placement::Memory(memory), CacheMode::None), WriteVerifier(instance.0));
}
