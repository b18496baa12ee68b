//! Images of a real cluster that members of a group own in turn.

use std::io;
use std::sync::mpsc;
use std::thread;

use rblk_protocol::{AccessMode, Generation, HostId, Name, WriteVerifier};

use super::image::{Cluster, loss_of, open};
use super::*;
use crate::record::holders::HolderRecord;
use crate::record::{AtRisk, BootId, KeepError, Keeper, KeeperContent, Revision, VolumeRecord};
use crate::store::rbd::fencing::fence_rights::require_fencing;
use crate::store::rbd::group_member::{GroupMember, MoreWishes};
use crate::store::rbd::image_claim::{AskAnswer, Wish};
use crate::store::rbd::ownership::lock_proof::PROVEN;
use crate::store::rbd::{ClusterPlace, ImageError, ImageOptions, wait_until_closed};

const IMAGE: &str = "rbd/v";

fn cluster() -> Cluster {
    let cluster = Cluster::start();
    cluster.run("rbd create --size 1M rbd/v");
    cluster
}

/// The clients that are fenced, as the cluster lists them. A member asks whether it may fence
/// others by an entry of an address that nobody has (RFC 5737).
fn fenced(cluster: &Cluster) -> Vec<String> {
    let listed = cluster.run("ceph osd blocklist ls");
    let lines = listed.lines().filter(|line| line.contains(':') && !line.contains("192.0.2.1"));
    lines.map(ToOwned::to_owned).collect()
}

fn member(cluster: &Cluster, name: &str, wish: Wish) -> ImageOptions {
    let addresses = vec![format!("tcp://{name}:7721")];
    let group = GroupMember {
        name: name.to_owned(),
        addresses,
        wish,
        may_break: true,
        more: MoreWishes::default(),
    };
    ImageOptions { group: Some(group), ..cluster.options(IMAGE) }
}

fn record(image: &Image, mark: u8) -> VolumeRecord {
    let mut record = VolumeRecord::new(image.uuid());
    record.set_name(Name::new("v").unwrap());
    record.vouch_anew(WriteVerifier([mark; 16]));
    record.put_at_risk(AtRisk::Process, &BootId::new("a boot"));
    record
}

fn kept(image: &Image) -> KeeperContent {
    image.record().unwrap().read().unwrap()
}

/// The trait's model: one record, with the number of its writes.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_record_beside_an_image_agrees_with_the_model() {
    let cluster = cluster();
    let image = open(member(&cluster, "a", Wish::Idle)).unwrap();
    let keeper = image.record().unwrap();
    let mut model: Option<(VolumeRecord, Revision)> = None;
    let mut random = 7_u64;
    for step in 0..200_u8 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (next, expected) = (record(&image, step.max(1)), Revision((random >> 33) % 40));
        let at = model.as_ref().map_or(Revision::NONE, |(_, at)| *at);
        match (random >> 40) % 8 {
            0 => {
                keeper.renounce().unwrap();
                model.iter_mut().for_each(|(kept, _)| kept.renounce());
            }
            1 => {
                cluster.run(&format!("rados -p rbd rm {}", object(&image)));
                // With the note of its owner: nobody may write any more.
                let error = keeper.replace(&next, at).unwrap_err();
                assert!(matches!(error, KeepError::Io(_)), "{error}");
                return assert!(step > 0 && model.is_some(), "the model has seen a record");
            }
            2 | 3 => match keeper.replace(&next, expected) {
                Ok(revision) => {
                    assert_eq!(expected, at);
                    model = Some((next, revision));
                }
                Err(KeepError::Conflict { found, expected: named }) => {
                    assert_eq!((found, named), (at, expected));
                    assert_ne!(found, expected);
                }
                Err(KeepError::Io(error)) => {
                    assert!(model.is_none() && expected != Revision::NONE, "{step}: {error}");
                }
            },
            _ => {
                let revision = keeper.replace(&next, at).unwrap();
                assert_eq!(revision, at.next());
                model = Some((next, revision));
            }
        }
        let expected = model.clone();
        let expected =
            expected.map_or(KeeperContent::Nothing, |(r, at)| KeeperContent::Record(r, at));
        assert_eq!(kept(&image), expected, "step {step}");
    }
}

/// The object beside an image.
fn object(image: &Image) -> String {
    let identity = image.identity().unwrap().to_string();
    format!("rblk.state.{}", identity.rsplit('/').next().unwrap())
}

/// A record with a host that has the volume alone.
fn held_by(image: &Image, host: HostId, generation: Generation) -> VolumeRecord {
    let (mut held, host_name) = (record(image, 1), Name::new("h").unwrap());
    let (volume, mode, present) = (image.uuid(), AccessMode::Exclusive, true);
    held.set_holder(Some(HolderRecord { volume, generation, mode, host, host_name, present }));
    held
}

/// The holder may have gone back to the former owner, which answers it from its cache.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_owner_gives_an_image_back_when_the_one_before_answers_nobody() {
    let cluster = cluster();
    let a = open(member(&cluster, "a", Wish::Idle)).unwrap();
    let (host, generation) = (HostId([5; 16]), Generation(9));
    a.record().unwrap().replace(&held_by(&a, host, generation), Revision::NONE).unwrap();
    a.on_ask(|_, _| {});
    let returns = Wish::Return(host, generation);
    let b = open(member(&cluster, "b", returns)).unwrap();
    let (left, begun) = (b.for_holder_alone(), Instant::now());
    assert!(left > PROVEN / 2 && fenced(&cluster).len() == 1, "{left:?}");
    // Nobody serves its volume any more.
    b.on_ask(|_, _| {});
    drop(b);
    let c = open(member(&cluster, "c", returns)).unwrap();
    assert!(begun.elapsed() >= left, "{:?} of {left:?}", begun.elapsed());
    assert_eq!(fenced(&cluster).len(), 1, "the owner that lives is waited for");
    assert!(c.for_holder_alone().is_zero());
    let (proven, proofs) = mpsc::channel();
    c.prove(move || proven.send(()).unwrap_or_default());
    proofs.recv_timeout(Duration::from_secs(10)).unwrap();
    // The client of the first owner is fenced, and nothing is proven.
    let (proven, proofs) = mpsc::channel::<()>();
    a.prove(move || proven.send(()).unwrap_or_default());
    assert!(proofs.recv().is_err(), "the image is lost");
    drop((a, c));
    assert!(wait_until_closed(Duration::from_secs(30)));
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_owner_that_does_not_answer_is_fenced_for_ever() {
    let cluster = cluster();
    let a = open(member(&cluster, "a", Wish::Idle)).unwrap();
    let (host, generation) = (HostId([5; 16]), Generation(9));
    let held = held_by(&a, host, generation);
    let first = a.record().unwrap().replace(&held, Revision::NONE).unwrap();
    // A host that has not held the volume disturbs nobody, whether or not the owner answers.
    let stale = Wish::Return(host, Generation(8));
    for wish in [Wish::Idle, Wish::Fresh, stale, Wish::Return(HostId([6; 16]), generation)] {
        let error = open(member(&cluster, "b", wish)).unwrap_err();
        let ImageError::Elsewhere { member, addresses, .. } = &error else { panic!("{error}") };
        assert_eq!((member.as_str(), &addresses[..]), ("a", &["tcp://a:7721".to_owned()][..]));
    }
    // Questions come, and nobody answers.
    let (asked, questions) = mpsc::channel();
    a.on_ask(move |_, ask| drop(asked.send(ask)));
    let b = open(member(&cluster, "b", Wish::Return(host, generation))).unwrap();
    let ask = questions.recv().unwrap();
    assert!(ask.member == "b" && ask.is_of(host) && ask.generation == 9, "{ask:?}");
    assert_eq!(kept(&b), KeeperContent::Record(held, first));
    assert!(loss_of(&a).contains("fenced"), "{}", loss_of(&a));
    let error = a.record().unwrap().replace(&record(&a, 2), first).unwrap_err();
    let KeepError::Io(error) = error else { panic!("{error}") };
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    let second = b.record().unwrap().replace(&record(&b, 3), first).unwrap();
    assert_eq!(kept(&b), KeeperContent::Record(record(&b, 3), second));
    // Longer than the hour of librbd.
    let fenced = fenced(&cluster);
    let year = |line: &String| line.split_whitespace().nth(1)?.get(..4)?.parse::<u32>().ok();
    let until: Vec<u32> = fenced.iter().filter_map(year).collect();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let this_year = 1970 + u32::try_from(now.as_secs() / 31_556_952).unwrap();
    assert!(!until.is_empty() && until.iter().all(|year| *year >= this_year + 9), "{fenced:?}");
    drop((a, b));
    assert!(wait_until_closed(Duration::from_secs(30)));
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_owner_that_answers_hands_over_or_stays_and_is_not_fenced() {
    let cluster = cluster();
    let a = open(member(&cluster, "a", Wish::Idle)).unwrap();
    let first = a.record().unwrap().replace(&record(&a, 1), Revision::NONE).unwrap();
    let (asked, questions) = mpsc::channel();
    a.on_ask(move |ticket, _| {
        let _ = asked.send(ticket);
    });
    let claim = |options| thread::spawn(move || open(options));
    let other = claim(member(&cluster, "b", Wish::TakeOver));
    let why = "a change of volume w takes long";
    a.answer(questions.recv().unwrap(), AskAnswer::Stays, Some(why.to_owned()));
    let error = other.join().unwrap().unwrap_err();
    assert!(matches!(error, ImageError::Elsewhere { .. }) && error.to_string().contains(why));
    let other = claim(member(&cluster, "b", Wish::TakeOver));
    a.answer(questions.recv().unwrap(), AskAnswer::HandsOver, None);
    let begun = Instant::now();
    let second = a.record().unwrap().replace(&record(&a, 2), first).unwrap();
    let expected = KeeperContent::Record(record(&a, 2), second);
    drop(a);
    let b = other.join().unwrap().unwrap();
    println!("handed over in {:?}", begun.elapsed());
    assert_eq!(kept(&b), expected);
    assert_eq!(fenced(&cluster), [""; 0]);
    drop(b);
    assert!(wait_until_closed(Duration::from_secs(30)));
    // A client that is no member keeps its lock, and a member that is gone keeps nothing.
    let alone = cluster.open(IMAGE).unwrap();
    let error = open(member(&cluster, "a", Wish::TakeOver)).unwrap_err();
    assert!(matches!(error, ImageError::Locked { .. }), "{error}");
    drop(alone);
    assert!(wait_until_closed(Duration::from_secs(30)));
    open(member(&cluster, "a", Wish::Idle)).unwrap();
}

/// An image goes from a group to a target in none, and back.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_image_has_another_identity_after_a_group_and_after_a_lone_target() {
    let cluster = cluster();
    let closed = |image: Image| {
        let found = (image.identity().unwrap(), image.uuid());
        drop(image);
        assert!(wait_until_closed(Duration::from_secs(30)));
        found
    };
    let alone = || closed(open(cluster.options(IMAGE)).unwrap());
    let grouped = |name| closed(open(member(&cluster, name, Wish::Idle)).unwrap());
    let first = alone();
    assert_eq!((alone(), grouped("a")), (first.clone(), first.clone()));
    assert_eq!(grouped("b"), first, "a hand-over fences nobody");
    let second = alone();
    assert_eq!(alone(), second);
    let third = grouped("a");
    assert_eq!(grouped("b"), third);
    let identities = [&first, &second, &third].map(|(identity, _)| identity.to_string());
    assert!(identities[1].ends_with("~1") && identities[2].ends_with("~2"), "{identities:?}");
    assert!([second.1, third.1].iter().all(|uuid| *uuid == first.1), "one volume");
    // Members close in good order. A lone target gives nothing back: its client is fenced.
    assert_eq!(fenced(&cluster).len(), 1);
}

/// A host takes a volume over whose owner does not answer members, but may answer its hosts.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_nothing_is_served_while_a_former_owner_may_answer_from_its_cache() {
    let cluster = cluster();
    let a = open(member(&cluster, "a", Wish::Idle)).unwrap();
    a.on_ask(|_, _| {});
    let begun = Instant::now();
    let b = open(member(&cluster, "b", Wish::TakeOver)).unwrap();
    // The last proof of the lock of A is from after the begin.
    assert!(begun.elapsed() > PROVEN, "{:?}", begun.elapsed());
    assert!(!b.is_silent(), "it has a newer proof of its own");
    drop((a, b));
    assert!(wait_until_closed(Duration::from_secs(30)));
}

/// The object beside an image is gone for a moment, and the watch of its owner with it.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_owner_whose_watch_could_not_begin_anew_is_asked_again_later() {
    let cluster = cluster();
    let a = Arc::new(open(member(&cluster, "a", Wish::Idle)).unwrap());
    let asked = Arc::clone(&a);
    a.on_ask(move |ticket, _| asked.answer(ticket, AskAnswer::Stays, None));
    let object = object(&a);
    let attributes = ["rblk.owner", "rblk.epoch"];
    let values = attributes.map(|name| {
        cluster.run(&format!("rados -p rbd getxattr {object} {name}")).trim().to_owned()
    });
    cluster.run(&format!("rados -p rbd rm {object}"));
    // The watch breaks, and there is nothing to watch.
    thread::sleep(Duration::from_secs(2));
    cluster.run(&format!("rados -p rbd create {object}"));
    for (name, value) in attributes.iter().zip(&values) {
        cluster.run(&format!("rados -p rbd setxattr {object} {name} {}", value.replace(' ', "+")));
    }
    let watched = || cluster.run(&format!("rados -p rbd listwatchers {object}"));
    let deadline = Instant::now() + Duration::from_secs(20);
    while !watched().contains("watcher=") {
        assert!(Instant::now() < deadline, "nobody watches");
        thread::sleep(Duration::from_millis(200));
    }
    let error = open(member(&cluster, "b", Wish::TakeOver)).unwrap_err();
    assert!(matches!(error, ImageError::Elsewhere { .. }), "the owner was asked: {error}");
    assert_eq!(fenced(&cluster), [""; 0]);
    a.on_ask(|_, _| {});
    drop(a);
    assert!(wait_until_closed(Duration::from_secs(30)));
}

/// A member whose user may do everything but fence.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_member_that_may_not_fence_owns_no_image() {
    let cluster = cluster();
    let keyring = cluster.directory().join("weak.keyring");
    let made = "ceph auth get-or-create client.weak mon allow+r osd profile+rbd+pool=rbd -o";
    cluster.run(&format!("{made} {}", keyring.display()));
    let weak = |options: ImageOptions| {
        let user = "weak".to_owned();
        let place = ClusterPlace { user, keyring: Some(keyring.clone()), ..options.cluster };
        open(ImageOptions { cluster: place, ..options })
    };
    for wish in [Wish::Idle, Wish::Fresh, Wish::TakeOver] {
        let error = weak(member(&cluster, "a", wish)).unwrap_err().to_string();
        for piece in
            ["rbd/v: client.weak may not fence", "osd blocklist", "ceph auth caps client.weak mon"]
        {
            assert!(error.contains(piece), "{piece:?} is not in: {error}");
        }
    }
    // An upgrade of a member is refused before anything is closed.
    let may_fence = || {
        let of_rbd = cluster.options(IMAGE);
        let user = "weak".to_owned();
        let place = ClusterPlace { user, keyring: Some(keyring.clone()), ..of_rbd.cluster };
        require_fencing(vec![(place, of_rbd.name)], Duration::from_secs(30))
    };
    let error = may_fence().unwrap_err().to_string();
    assert!(error.contains("ceph auth caps client.weak mon"), "{error}");
    // A target in no group fences nobody, and needs no more than before.
    drop(weak(cluster.options(IMAGE)).unwrap());
    assert!(wait_until_closed(Duration::from_secs(30)));
    cluster.run("ceph auth caps client.weak mon profile+rbd osd profile+rbd+pool=rbd");
    may_fence().unwrap();
    drop(weak(member(&cluster, "a", Wish::Idle)).unwrap());
    assert!(wait_until_closed(Duration::from_secs(30)));
}

/// Nobody waits any more for a claim at a cluster that did not answer.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_claim_that_was_given_up_disturbs_no_owner_when_the_cluster_answers() {
    let cluster = cluster();
    let a = open(member(&cluster, "a", Wish::Idle)).unwrap();
    let first = a.record().unwrap().replace(&record(&a, 1), Revision::NONE).unwrap();
    // Nobody answers for A: a claim would fence it.
    a.on_ask(|_, _| {});
    cluster.script("osd-pause 0");
    let stuck = rbd::begin_open(member(&cluster, "b", Wish::TakeOver)).unwrap();
    thread::sleep(Duration::from_secs(2));
    drop(stuck);
    // Hosts ask again and again: that makes no second client.
    for _ in 0..3 {
        let error = rbd::begin_open(member(&cluster, "b", Wish::TakeOver)).unwrap_err();
        assert!(matches!(error, ImageError::Opening { .. }), "{error}");
    }
    cluster.script("osd-continue 0");
    let deadline = Instant::now() + Duration::from_secs(60);
    // The end of the first one lets another one begin, which finds the living owner.
    let next = loop {
        match rbd::begin_open(member(&cluster, "b", Wish::Idle)) {
            Err(ImageError::Opening { .. }) => assert!(Instant::now() < deadline),
            next => break next.unwrap(),
        }
        thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(fenced(&cluster), [""; 0]);
    assert!(a.record().unwrap().replace(&record(&a, 2), first).is_ok(), "A is the owner");
    drop((next, a));
    assert!(wait_until_closed(Duration::from_secs(60)));
}
