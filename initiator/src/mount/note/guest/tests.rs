use rblk_protocol::{
    BlockCount, BlockSize, InstanceId, Name, OpenReply, VolumeHandle, WriteVerifier,
};
use serde_json::{Value, json};

use super::*;

fn facts() -> Facts {
    Facts {
        resume: None,
        volume: OpenReply {
            handle: VolumeHandle(7),
            flags: VolumeFlags::VOLATILE_CACHE,
            block_size: BlockSize::new(4096).unwrap(),
            blocks: BlockCount(1 << 20),
            discard_granularity_bytes: 65_536,
            uuid: [1; 16],
            verifier: WriteVerifier([0xfe; 16]),
            generation: Generation(u64::MAX),
        },
        instance: InstanceId([3; 16]),
        target_name: Name::new("store1").unwrap(),
        fenced: None,
    }
}

const CLEAN: GuestDoubts = GuestDoubts { maybe_unflushed: false, loss_untold: false };
const DOUBT: GuestDoubts = GuestDoubts { maybe_unflushed: true, loss_untold: false };
const LOSS: GuestDoubts = GuestDoubts { maybe_unflushed: false, loss_untold: true };

fn note(doubts: GuestDoubts) -> GuestNote {
    GuestNote::of("vol0", &facts(), doubts, OnLoss::UntilRemount, vec![1])
}

#[test]
fn a_note_is_read_as_it_was_written_and_replaces_the_older_one() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vm1.sock");
    assert_eq!(GuestNote::read(&socket).unwrap(), None);
    for doubts in [DOUBT, LOSS, CLEAN] {
        note(doubts).write(&socket).unwrap();
        assert_eq!(GuestNote::read(&socket).unwrap(), Some(note(doubts)));
    }
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let mode = std::fs::metadata(GuestNote::path(&socket)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    GuestNote::remove(&socket).unwrap();
    GuestNote::remove(&socket).unwrap();
    assert_eq!(GuestNote::read(&socket).unwrap(), None);
}

#[test]
fn a_note_that_cannot_be_written_leaves_the_older_one() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vm1.sock");
    note(DOUBT).write(&socket).unwrap();
    std::fs::create_dir(dir.path().join("vm1.sock.note.new")).unwrap();
    let said = note(CLEAN).write(&socket).unwrap_err().to_string();
    assert!(said.contains("vm1.sock.note") && said.contains("has to have room"), "{said}");
    assert_eq!(GuestNote::read(&socket).unwrap(), Some(note(DOUBT)));
}

#[test]
fn an_invalid_note_is_refused() {
    let good = serde_json::to_value(note(DOUBT)).unwrap();
    assert_eq!(GuestNote::parse(good.to_string().as_bytes()), Ok(note(DOUBT)));
    let changed = |key: &str, value: Value| {
        let mut bad = good.clone();
        bad[key] = value;
        bad.to_string().into_bytes()
    };
    let mut cut = good.to_string().into_bytes();
    cut.pop();
    for text in [
        vec![],
        cut,
        changed("form", json!(2)),
        changed("verifier", json!("fe")),
        changed("verifier", json!("+".repeat(32))),
        changed("generation", json!(-1)),
        changed("maybe_unflushed", Value::Null),
        changed("rings_in_doubt", json!([65_536])),
        changed("on_loss", json!("never")),
    ] {
        assert!(GuestNote::parse(&text).is_err(), "{}", String::from_utf8_lossy(&text));
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vm1.sock");
    let long = " ".repeat(usize::try_from(form::LEN_MAX).unwrap()) + &good.to_string();
    std::fs::write(GuestNote::path(&socket), long).unwrap();
    let said = GuestNote::read(&socket).unwrap_err().to_string();
    assert!(said.contains("it is too long") && said.contains("remove the file"), "{said}");
}

#[test]
fn no_guest_outlives_the_start_of_its_host() {
    let note = GuestNote { boot: "one".to_owned(), ..note(DOUBT) };
    assert!(note.is_of_boot("one") && !note.is_of_boot("two"));
    // Without a boot id, the note may be of this start.
    assert!(note.is_of_boot(""));
    assert!(GuestNote { boot: String::new(), ..note }.is_of_boot("two"));
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vm1.sock");
    GuestNote { boot: "another".to_owned(), ..self::note(DOUBT) }.write(&socket).unwrap();
    assert_eq!(GuestNote::read(&socket).unwrap(), None);
}

#[test]
fn a_note_outlives_its_process_while_it_is_needed() {
    for (doubts, guest_stays, outlives) in [
        (CLEAN, false, false),
        // No guest is left that needs the report.
        (LOSS, false, false),
        (DOUBT, false, true),
        (CLEAN, true, true),
        (LOSS, true, true),
    ] {
        let left = GuestLeft { guest_stays, rings_in_doubt: vec![0] };
        assert_eq!(GuestNote::outlives(doubts, &left), outlives, "{doubts:?} {guest_stays}");
    }
}

/// The losses, whether a doubt is open, and whether the loss is new.
fn found(inherited: &InheritedGuestState) -> (u64, bool, bool) {
    let InheritedGuestState { account, is_new_loss, .. } = inherited;
    (account.losses(), account.inherits_doubt(), *is_new_loss)
}

#[test]
fn the_next_process_knows_at_least_as_much() {
    let same = facts();
    let mut restarted = facts();
    restarted.volume.verifier = WriteVerifier([0xfd; 16]);
    let both = GuestDoubts { maybe_unflushed: true, loss_untold: true };
    for (doubts, facts, expected) in [
        (CLEAN, &same, (0, false, false)),
        (CLEAN, &restarted, (0, false, false)),
        (DOUBT, &same, (0, true, false)),
        (DOUBT, &restarted, (1, false, true)),
        (LOSS, &same, (1, false, false)),
        (LOSS, &restarted, (1, false, false)),
        (both, &same, (1, true, false)),
        (both, &restarted, (1, false, true)),
    ] {
        let inherited = note(doubts).inherit(facts, OnLoss::UntilRemount, false);
        assert_eq!(found(&inherited), expected, "{doubts:?}");
        assert_eq!(inherited.other, None);
        assert_eq!(inherited.left, GuestLeft { guest_stays: true, rings_in_doubt: vec![1] });
    }
}

#[test]
fn a_loss_that_every_flush_tells_outlives_a_change_of_the_mode() {
    use OnLoss::{Once, UntilRemount};
    for (noted, doubts, asked, expected) in [
        (Once, DOUBT, UntilRemount, UntilRemount),
        (UntilRemount, DOUBT, Once, Once),
        (UntilRemount, LOSS, Once, UntilRemount),
        (Once, LOSS, UntilRemount, UntilRemount),
        (Once, LOSS, Once, Once),
    ] {
        let note = GuestNote { on_loss: noted, ..note(doubts) };
        let inherited = note.inherit(&facts(), asked, false);
        assert_eq!(inherited.account.on_loss(), expected, "{noted} {asked}");
    }
}

#[test]
fn a_note_of_another_volume_is_kept_while_it_is_needed() {
    let mut other = facts();
    other.volume.uuid = [2; 16];
    let socket = Path::new("/run/vm1.sock");
    for (doubts, is_needed) in [(CLEAN, false), (DOUBT, true), (LOSS, true)] {
        assert!(note(doubts).must_not_be_needed(&facts(), socket).is_ok());
        let found = note(doubts).must_not_be_needed(&other, socket);
        assert_eq!(found.is_err(), is_needed, "{doubts:?}");
        if let Err(error) = found {
            let said = error.to_string();
            assert!(said.contains("/run/vm1.sock.note") && said.contains("\"vol0\""), "{said}");
            assert!(said.contains("end the virtual machine and remove the file"), "{said}");
        }
    }
}

#[test]
fn no_ring_resumes_on_a_volume_that_its_guest_did_not_leave() {
    let every = every_ring();
    let away = note(DOUBT).inherit(&facts(), OnLoss::Once, true);
    assert_eq!(away.left.rings_in_doubt, every);
    assert_eq!((found(&away), away.other), ((0, true, false), Some("another host had it")));
    // The note does not count for another volume.
    let mut other = facts();
    other.volume.uuid = [2; 16];
    let other = note(DOUBT).inherit(&other, OnLoss::Once, false);
    assert_eq!(other.left.rings_in_doubt, every);
    assert_eq!((found(&other), other.other), ((0, false, false), Some("it is a different volume")));
    // The memory of another run of the target counts as another volume.
    let mut run = facts();
    run.instance = InstanceId([4; 16]);
    assert_eq!(note(DOUBT).inherit(&run, OnLoss::Once, false).other, None);
    run.volume.flags = run.volume.flags.with(VolumeFlags::EPHEMERAL, true);
    assert!(note(DOUBT).inherit(&run, OnLoss::Once, false).other.is_some());
    // A killed process without a note.
    let unknown = InheritedGuestState::unknown(OnLoss::Once);
    assert_eq!(unknown.left, GuestLeft { guest_stays: true, rings_in_doubt: every });
    assert!(unknown.account.inherits_doubt());
}
