//! Losses of acknowledged writes in the note for the next process.

use rblk_config::OnLoss;
use rblk_protocol::Status;

use super::*;
use crate::engine::durability::{Answered, Durability, Ledger};
use crate::engine::io::{Io, IoOp};

#[test]
fn a_new_or_reported_loss_must_be_noted() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        mount.set_durability(Durability::inheriting_loss(OnLoss::Once, false));
        assert!(!mount.note.owes_loss(), "there is no device to recover");
        mount.adopt_device(7, DeviceToken::new(7));
        // The loss in the dead process's note is not reported yet.
        assert!(mount.note.owes_loss());
        mount.note.set_noted_loss();
        assert!(!mount.note.owes_loss());
        let mut ledger =
            Ledger::new(Arc::clone(mount.volume.durability()), QueueDepth::new(2).unwrap(), None);
        mount.volume.durability().arrived();
        let flush = Io::new(IoOp::Flush, 0, 0, BlockSize::new(4096).unwrap()).unwrap();
        ledger.submitted(Tag(0));
        // A change of the loss wakes the writer of the note; nothing else does.
        let woken = async || {
            let change = mount.volume.durability().loss_changed();
            tokio::time::timeout(Duration::ZERO, change).await.is_ok()
        };
        assert!(!woken().await);
        assert!(ledger.must_fail(Tag(0), &flush));
        assert!(mount.note.owes_loss(), "it is told: nobody must tell it again");
        assert!(woken().await && !woken().await);
        ledger.submitted(Tag(0));
        assert!(!ledger.must_fail(Tag(0), &flush));
        assert!(!woken().await);
        mount.volume.durability().lose(1);
        assert!(woken().await);
    });
}

#[test]
fn a_loss_that_every_flush_tells_is_noted_at_once_and_for_good() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        assert_eq!(mount.volume.durability().on_loss(), OnLoss::UntilRemount, "the default");
        mount.adopt_device(7, DeviceToken::new(7));
        mount.volume.durability().arrived();
        assert_eq!((mount.status().lost, mount.note.owes_loss()), (None, false));
        let mut ledger =
            Ledger::new(Arc::clone(mount.volume.durability()), QueueDepth::new(2).unwrap(), None);
        let flush = Io::new(IoOp::Flush, 0, 0, BlockSize::new(4096).unwrap()).unwrap();
        let mut ends = |status| {
            ledger.submitted(Tag(0));
            assert!(!ledger.must_fail(Tag(0), &flush));
            ledger.plan(Tag(0), &flush);
            ledger.answered(Tag(0), &flush, status, |_, _| {})
        };
        assert_eq!(ends(Status::Ok), Answered::Done);
        ends(Status::StoreError);
        let change = mount.volume.durability().loss_changed();
        assert!(tokio::time::timeout(Duration::ZERO, change).await.is_ok());
        assert!(mount.note.owes_loss());
        assert_eq!(mount.note.step(), Duration::ZERO);
        let status = mount.status();
        assert!(status.loss_untold);
        assert_eq!(
            status.lost.unwrap(),
            "acknowledged writes may be lost; every FLUSH fails until the disk is unmounted and mounted again"
        );
        mount.note.set_noted_loss();
        for _ in 0..3 {
            assert_eq!(ends(Status::Ok), Answered::Lost);
            assert!(!mount.note.owes_loss(), "the next process has to tell it, too");
        }
    });
}

#[test]
fn a_flush_that_fails_after_a_loss_does_not_keep_the_disk_mounted() {
    use crate::mount::device::write_back::WrittenBack;
    use crate::mount::unmount::{MountEnd, UnmountProgress};
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        for (on_loss, lost, force) in [
            (OnLoss::UntilRemount, true, false),
            // This failure may be the first report of the loss.
            (OnLoss::UntilRemount, false, true),
            (OnLoss::Once, true, true),
        ] {
            mount.set_durability(Durability::new(on_loss));
            if lost {
                mount.volume.durability().lose(0);
            }
            // This process has to end. A process that goes on would stay, with the reason in its
            // reply.
            let unflushed = Ok(WrittenBack::Unflushed(libc::EIO));
            match UnmountProgress::default().on_synced(unflushed, &mount) {
                Some(MountEnd::Unmount { force: by_force }) => {
                    assert_eq!(by_force, force, "{on_loss} {lost}");
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn a_note_that_cannot_be_written_is_owed_and_keeps_the_next_program_away() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        // The directory does not exist, also for root.
        mount.note = NoteKeeper::new(
            "no/directory",
            mount.volume.config(),
            mount.volume.durability(),
            true,
            0,
        );
        mount.adopt_device(7, DeviceToken::new(7));
        assert_eq!((mount.note_loss(), mount.refuses_hand_over()), (None, None));
        mount.volume.durability().lose(0);
        for _ in 0..2 {
            let again = mount.note_loss().expect("a next try");
            assert!(again > Instant::now());
            assert!(mount.note.owes_loss(), "the next process would not know of the loss");
        }
        let Some(Response::Busy(why)) = mount.refuses_hand_over() else { panic!("handed over") };
        assert!(why.contains("cannot be written"), "{why}");
        // The note is written at last.
        mount.note.set_noted_loss();
        assert_eq!((mount.note_loss(), mount.refuses_hand_over()), (None, None));
    });
}

#[test]
fn copies_that_the_target_refused_keep_the_next_program_away() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        mount.volume.set_retain_bytes(4096);
        mount.set_durability(Durability::inheriting(OnLoss::UntilRemount));
        assert_eq!(mount.refuses_hand_over(), None, "the target has what is not flushed");
        mount.volume.durability().hold_copies(mount.volume.durability().horizon());
        let Some(Response::Busy(why)) = mount.refuses_hand_over() else { panic!("handed over") };
        assert!(why.contains("copies that the target refuses of 1 writes"), "{why}");
        mount.volume.durability().rewritten(mount.volume.durability().horizon(), 1);
        assert_eq!(mount.refuses_hand_over(), None);
    });
}
