//! The volume of a target changes while it is mounted.

use rblk_protocol::{VolumeEntry, VolumeListHeader};

use super::impostors::{config_with_keys, honest};
use super::*;

/// Blocks, and read-only.
type Shape = (u64, bool);

pub(super) fn opened((blocks, read_only): Shape) -> OpenReply {
    let flags = VolumeFlags::default().with(VolumeFlags::READ_ONLY, read_only);
    OpenReply { blocks: BlockCount(blocks), flags, ..volume(Generation(5)) }
}

/// The toy's reply to LIST.
pub(super) fn listed(command: &CommandCapsule, shape: Option<Shape>) -> (Status, Vec<u8>) {
    let mut list = VolumeListHeader { entries: 0, total: 0 }.to_wire().to_vec();
    match shape.map(opened) {
        _ if command.volume == VolumeHandle(0) => (Status::Ok, list),
        None => (Status::VolumeGone, Vec::new()),
        Some(opened) => {
            assert_eq!(command.volume, opened.handle);
            list = VolumeListHeader { entries: 1, total: 1 }.to_wire().to_vec();
            let OpenReply { flags, block_size, blocks, uuid, .. } = opened;
            let entry = VolumeEntry { name: name("v"), flags, block_size, blocks, uuid };
            list.extend(entry.to_wire());
            (Status::Ok, list)
        }
    }
}

impl Toy {
    fn becomes(&self, volume: Option<Shape>) {
        self.is(|manners| {
            manners.volume = volume;
            manners.has_news = true;
        });
    }

    fn lists(&self) -> u32 {
        self.manners.lock().unwrap().lists
    }
}

fn shape(status: &MountStatus) -> (u64, bool, &str) {
    (status.size_bytes / 4096, status.read_only, &status.state)
}

#[test]
fn a_new_size_and_read_only_are_heard_while_the_session_goes_on() {
    runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let target = rblk_protocol::auth::SecretKey::generate().unwrap();
        for with_keys in [false, true] {
            let toy = Toy::new().await;
            let mut config = config(&[&toy]);
            if with_keys {
                toy.is(|manners| manners.proofs = Some(honest(&target)));
                config = config_with_keys(&toy, vec![target.public()], directory.path());
            }
            let mut mount = mounted(&config).await;
            assert_eq!(shape(&mount.status()), (256, false, "connected"));
            for next in [(512, false), (1024, true), (1024, false), (128, false)] {
                toy.becomes(Some(next));
                let wanted = (next.0, next.1, "connected");
                until_status(&mut mount, |status| shape(status) == wanted).await;
            }
            assert_eq!(toy.lists(), 4);
            assert_eq!(toy.heard(), [login(false, 1), open(0)], "no reconnect");
        }
    });
}

#[test]
fn news_that_come_with_no_change_change_nothing() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        let before = mount.volume.link().facts().clone();
        toy.becomes(Some((256, false)));
        while toy.lists() == 0 {
            attend(&mut mount).await;
        }
        for _ in 0..5 {
            attend(&mut mount).await;
        }
        assert_eq!(*mount.volume.link().facts(), before);
        assert_eq!(toy.lists(), 1);
    });
}

#[test]
fn unsealed_replies_change_no_mount_with_keys() {
    runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let target = rblk_protocol::auth::SecretKey::generate().unwrap();
        let toy = Toy::new().await;
        toy.is(|manners| manners.proofs = Some(honest(&target)));
        let config = config_with_keys(&toy, vec![target.public()], directory.path());
        let mut mount = mounted(&config).await;
        // A man in the middle swallows every LIST and reports that the volume is gone.
        toy.is(|manners| manners.answers_in_the_clear = true);
        toy.becomes(None);
        until_status(&mut mount, |status| status.state == "reconnecting").await;
        toy.is(|manners| {
            manners.answers_in_the_clear = false;
            manners.volume = Some((256, false));
        });
        until_status(&mut mount, |status| status.state == "connected").await;
        assert_eq!(shape(&mount.status()), (256, false, "connected"));
    });
}

#[test]
fn a_session_ends_in_good_order_while_an_answer_is_awaited() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        toy.is(|manners| manners.answers_lists = false);
        toy.becomes(Some((512, false)));
        while toy.lists() == 0 {
            attend(&mut mount).await;
        }
        attend(&mut mount).await;
        assert_eq!(shape(&mount.status()), (256, false, "connected"), "it is kept alive meanwhile");
        // LOGOUT is not sent before the answer to LIST, but the session ends in time all the same.
        let begun = Instant::now();
        mount.volume.end_session(Some(Duration::from_millis(50))).await;
        assert!(begun.elapsed() < TIME_LIMIT);
        assert_eq!(toy.heard(), [login(false, 1), open(0)]);
    });
}

#[test]
fn another_size_after_a_reconnect_is_no_other_volume() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        for next in [(512, true), (100, false)] {
            toy.is(|manners| manners.is_dead = true);
            until_status(&mut mount, |status| status.state == "reconnecting").await;
            toy.is(|manners| {
                manners.is_dead = false;
                manners.volume = Some(next);
            });
            let wanted = (next.0, next.1, "connected");
            until_status(&mut mount, |status| shape(status) == wanted).await;
        }
        assert_eq!(toy.lists(), 0, "OPEN says it");
    });
}

#[test]
fn requests_of_a_removed_volume_fail_until_it_is_back() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        toy.becomes(None);
        until_status(&mut mount, |status| status.state == "volume removed").await;
        assert!(!mount.volume.link().is_over());
        until_status(&mut mount, |status| {
            status.last_loss.as_ref().is_some_and(|why| why.contains("has no volume `v`"))
        })
        .await;
        assert_eq!(mount.status().state, "volume removed", "it was asked again");
        toy.is(|manners| manners.volume = Some((512, false)));
        until_status(&mut mount, |status| status.state == "connected").await;
        assert_eq!(shape(&mount.status()), (512, false, "connected"));
        let heard = toy.heard();
        assert!(
            heard[2..].iter().all(|h| *h == open(5) || matches!(h, Heard::Login { .. })),
            "{heard:?}"
        );
    });
}

#[test]
fn a_volume_that_was_removed_while_the_target_was_out_of_reach() {
    runtime().block_on(async {
        for (instance, state) in [(1, "volume removed"), (2, "reconnecting")] {
            let toy = Toy::new().await;
            let mut mount = mounted(&config(&[&toy])).await;
            toy.is(|manners| {
                manners.is_dead = true;
                manners.volume = None;
            });
            until_status(&mut mount, |status| status.state == "reconnecting").await;
            toy.is(|manners| {
                manners.is_dead = false;
                manners.instance = instance;
            });
            until_status(&mut mount, |status| {
                status.last_loss.as_ref().is_some_and(|why| why.contains("has no volume `v`"))
            })
            .await;
            assert_eq!(mount.status().state, state, "run {instance}");
        }
    });
}
