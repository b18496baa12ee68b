//! Volumes of a group: an OPEN claims one that this member does not serve, and one that is handed
//! over takes its hosts with it.

use std::collections::BTreeSet;

use rblk_config::VolumeConfig;

use super::super::VolumeChange;
use super::*;
use crate::control::claims::answer_to;
use crate::store::rbd::image_claim::AskAnswer;
use crate::store::rbd::owner_question::Ask;

const V: u16 = VOLUMES;
const BASE: Generation = Generation(1000);

fn of_image() -> Arc<Volume> {
    at_place(V)
}

/// The volume at a place of this run, which it has once.
fn at_place(place: u16) -> Arc<Volume> {
    let index = VolumeIndex(place);
    Arc::new(Volume { index, placement: Placement::Store, ..Volume::clone(&volume(V)) })
}

impl World {
    fn carry(&mut self, change: &VolumeChange) {
        self.carry_at(V, change);
    }

    fn carry_at(&mut self, place: u16, change: &VolumeChange) {
        self.core.change(change, at_place(place), self.now).unwrap();
        self.carry_out();
        while self.steps.pop().is_some() {
            self.core.stepped(Ok(()), self.now);
            self.carry_out();
        }
        assert_eq!(self.altered.pop(), Some(Ok(())));
    }

    /// The claim under way succeeds: the volume is served.
    fn claimed(&mut self) {
        self.claimed_at(V);
    }

    fn claimed_at(&mut self, place: u16) {
        let name = volume_name(V);
        self.carry_at(place, &VolumeChange::Add(VolumeConfig::rbd(name.as_str(), "rbd/v")));
        self.core.claim_ended(name, &Ok(()));
        self.carry_out();
    }

    /// The claim under way fails.
    fn elsewhere(&mut self) {
        self.core.claim_ended(volume_name(V), &Err("member a serves it".to_owned()));
        self.carry_out();
    }
}

fn member() -> World {
    let mut w = World::new();
    w.core.leave_to_others(volume_name(V), None);
    w
}

#[test]
fn an_open_claims_a_volume_that_another_member_has() {
    let mut w = member();
    let (one, other) = (w.session(1), w.session(2));
    assert_eq!(w.open(one, 1, exclusive(V)), None);
    assert_eq!(w.open(other, 1, exclusive(V)), None, "it waits for the same claim");
    // The claim under way takes the wishes of both.
    assert_eq!(w.claims, [(volume_name(V), Wish::Fresh); 2]);
    w.elsewhere();
    for link in [one, other] {
        let said = w.answer(link, 1).unwrap();
        assert_eq!(
            (said.status, said.text().as_str()),
            (Status::ShuttingDown, "member a serves it")
        );
    }
    // It comes back with the generation that the other member gave it.
    let generation = Generation(7);
    assert_eq!(w.open(one, 2, OpenRequest { generation, ..exclusive(V) }), None);
    assert_eq!(w.claims.pop(), Some((volume_name(V), Wish::Return(HostId([1; 16]), generation))));
    w.core.adopt_shared(of_image().uuid, (Some(holder_of(generation)), None), BASE);
    w.claimed();
    assert_eq!(w.answer(one, 2).unwrap().generation(), generation);
    assert_eq!(w.open(other, 2, exclusive(V)).unwrap().status, Status::InUse);
    let unknown = OpenRequest { name: Name::new("unknown").unwrap(), ..exclusive(V) };
    assert_eq!(w.open(other, 3, unknown).unwrap().status, Status::NoSuchVolume);
}

fn holder_of(generation: Generation) -> HolderRecord {
    HolderRecord {
        volume: of_image().uuid,
        generation,
        mode: AccessMode::Exclusive,
        host: HostId([1; 16]),
        host_name: host_name(1),
        present: true,
    }
}

/// The owner was fenced, and the holder may have gone back to it.
#[test]
fn no_other_host_gets_a_volume_while_a_former_owner_may_answer_its_holder() {
    let (mut w, generation) = (member(), Generation(7));
    let (holder, other) = (w.session(1), w.session(2));
    assert_eq!(w.open(holder, 1, returning(V, generation)), None);
    w.core.adopt_shared(of_image().uuid, (Some(holder_of(generation)), None), BASE);
    w.core.keep_for_holder(VolumeIndex(V), w.now + Duration::from_secs(11));
    w.claimed();
    assert_eq!(w.answer(holder, 1).unwrap().generation(), generation);
    assert_eq!(w.open(other, 1, taking_over(V)), None);
    w.pass(Duration::from_secs(10));
    assert_eq!(w.answer(other, 1), None, "the former owner may answer the holder");
    assert_eq!(w.open(holder, 2, returning(V, generation)).unwrap().generation(), generation);
    w.pass(Duration::from_secs(1));
    w.bury_the_dying();
    assert_eq!(w.answer(other, 1).unwrap().generation(), Generation(generation.0 + 1));
    let holder = w.session(1);
    assert_eq!(w.open(holder, 1, returning(V, generation)).unwrap().status, Status::Fenced);
}

/// A member that is cut off from the cluster does not know of the next owner.
#[test]
fn a_host_that_comes_back_to_a_member_waits_for_a_newer_proof() {
    let (mut w, generation) = (member(), Generation(7));
    let link = w.session(1);
    assert_eq!(w.open(link, 1, returning(V, generation)), None);
    w.core.adopt_shared(of_image().uuid, (Some(holder_of(generation)), None), BASE);
    w.claimed();
    assert_eq!(w.answer(link, 1).unwrap().generation(), generation);
    w.silent_cluster = true;
    assert_eq!(w.open(link, 2, returning(V, generation)), None);
    assert_eq!(w.proofs.len(), 1);
    w.prove_all();
    assert_eq!(w.answer(link, 2).unwrap().generation(), generation);
    // The cluster does not answer: the host tries another member, and keeps the volume here.
    assert_eq!(w.open(link, 4, returning(V, generation)), None);
    w.pass(Duration::from_secs(31));
    assert_eq!(w.answer(link, 4).unwrap().status, Status::ShuttingDown);
    let other = w.session(2);
    assert_eq!(w.open(other, 1, exclusive(V)).unwrap().status, Status::InUse);
    // A target in no group is the only one, and has nothing to prove.
    let generation = w.open(other, 2, exclusive(0)).unwrap().generation();
    assert_eq!(w.open(other, 3, returning(0, generation)).unwrap().generation(), generation);
}

/// The process of a mount dies before the answer, and the next one comes back.
#[test]
fn a_holder_that_is_cut_off_during_its_open_keeps_the_volume_for_a_lease() {
    let (mut w, generation) = (member(), Generation(7));
    let (holder, other) = (w.session(1), w.session(2));
    assert_eq!(w.open(holder, 1, returning(V, generation)), None);
    w.core.adopt_shared(of_image().uuid, (Some(holder_of(generation)), None), BASE);
    w.silent_cluster = true;
    w.claimed();
    assert_eq!(w.answer(holder, 1), None, "nothing proves yet that this member has the image");
    w.bury(holder);
    w.silent_cluster = false;
    w.prove_all();
    assert_eq!(w.open(other, 1, exclusive(V)).unwrap().status, Status::InUse);
    let again = w.session(1);
    assert_eq!(w.open(again, 1, returning(V, generation)).unwrap().generation(), generation);
    w.bury(again);
    w.pass(LEASE + Duration::from_secs(1));
    assert!(w.open(other, 2, exclusive(V)).unwrap().generation() > generation);
}

/// A host that has not held the volume waits for the end of a dead owner, and the holder comes.
#[test]
fn a_claim_under_way_learns_of_the_holder() {
    let mut w = member();
    let (other, holder) = (w.session(2), w.session(1));
    assert_eq!(w.open(other, 1, exclusive(V)), None);
    assert_eq!(w.open(holder, 1, returning(V, Generation(7))), None);
    let returns = Wish::Return(HostId([1; 16]), Generation(7));
    assert_eq!(w.claims, [(volume_name(V), Wish::Fresh), (volume_name(V), returns)]);
    // No host waits for longer than until it may try another member.
    w.pass(Duration::from_secs(31));
    for link in [other, holder] {
        assert_eq!(w.answer(link, 1).unwrap().status, Status::ShuttingDown);
    }
}

/// A member that is cut off answers from its cache, while another one has the volume already.
#[test]
fn a_host_that_only_reads_gets_no_volume_of_a_group() {
    let mut w = member();
    let (writer, reader) = (w.session(1), w.session(2));
    assert_eq!(w.open(writer, 1, exclusive(V)), None);
    w.core.adopt_shared(of_image().uuid, (None, None), BASE);
    w.claimed();
    assert_eq!(w.answer(writer, 1).unwrap().status, Status::Ok);
    let said = w.open(reader, 1, open_as(V, AccessMode::ReadOnly)).unwrap();
    assert_eq!(said.status, Status::NotSupported);
    assert!(said.text().contains("rbd snap create"), "{}", said.text());
    // Also if no host writes to it now: one may come.
    w.log_out(writer);
    let said = w.open(reader, 2, open_as(V, AccessMode::ReadOnly)).unwrap();
    assert_eq!(said.status, Status::NotSupported);
    // Volumes that are in no group have hosts that read.
    assert_eq!(w.open(reader, 3, open_as(0, AccessMode::ReadOnly)).unwrap().status, Status::Ok);
}

#[test]
fn an_owner_with_a_change_that_is_stuck_stays_and_says_why() {
    let mut w = member();
    let link = w.session(1);
    assert_eq!(w.open(link, 1, exclusive(V)), None);
    w.claimed();
    let ask = |take_over| Ask { take_over, ..Ask::of("b", Wish::Fresh) };
    let answer = |take_over, busy: Option<&str>| {
        answer_to(&ask(take_over), VolumeIndex(V), &w.core, busy.map(ToOwned::to_owned))
    };
    assert_eq!(answer(true, None), (AskAnswer::HandsOver, None));
    let busy = "a change of volume x (resize) takes long";
    assert_eq!(answer(true, Some(busy)), (AskAnswer::Stays, Some(busy.to_owned())));
    assert_eq!(answer(false, Some(busy)), (AskAnswer::Stays, None), "it stays anyway");
}

#[test]
fn hosts_of_a_volume_that_is_handed_over_are_not_told_that_it_is_gone() {
    let mut w = member();
    let link = w.session(1);
    assert_eq!(w.open(link, 1, exclusive(V)), None);
    w.claimed();
    let generation = w.answer(link, 1).unwrap().generation();
    let change = VolumeChange::Yield { name: volume_name(V).to_string() };
    w.core.change(&change, of_image(), w.now).unwrap();
    w.carry_out();
    let again = OpenRequest { generation, ..exclusive(V) };
    assert_eq!(w.open(link, 2, again), None, "it waits for the end of the change");
    while w.steps.pop().is_some() {
        w.core.stepped(Ok(()), w.now);
        w.carry_out();
    }
    assert_eq!(w.answer(link, 2).unwrap().status, Status::ShuttingDown);
    // The other member is about to claim it.
    assert_eq!(w.open(link, 3, again).unwrap().status, Status::ShuttingDown);
    assert_eq!(w.claims.len(), 1);
    // It did not.
    w.pass(Duration::from_secs(6));
    assert_eq!(w.open(link, 4, again), None);
    assert_eq!(w.claims.len(), 2);
}

/// A hands a volume over, host 2 gets it from B, and the volume comes back to the same run of A.
#[test]
fn a_volume_that_comes_back_in_the_same_run_has_the_holder_that_it_had_elsewhere() {
    for is_lost in [false, true] {
        let mut w = member();
        let (one, two) = (w.session(1), w.session(2));
        assert_eq!(w.open(one, 1, exclusive(V)), None);
        w.claimed();
        let first = w.answer(one, 1).unwrap().generation();
        let at_b = HolderRecord { host: HostId([2; 16]), ..w.durable[&of_image().uuid].clone() };
        let at_b = HolderRecord { generation: Generation(first.0 + 5), ..at_b };
        let name = volume_name(V).to_string();
        if is_lost {
            w.core.lose(VolumeIndex(V));
            w.core.leave_to_others(volume_name(V), None);
            w.carry(&VolumeChange::Lose { name, which: VolumeIndex(V) });
        } else {
            w.carry(&VolumeChange::Yield { name });
        }
        w.pass(Duration::from_secs(6));
        // The host with the newer generation is the holder.
        assert_eq!(w.open(two, 2, returning(V, at_b.generation)), None);
        w.core.adopt_shared(of_image().uuid, (Some(at_b.clone()), None), BASE);
        w.claimed_at(V + 1);
        assert_eq!(w.answer(two, 2).unwrap().generation(), at_b.generation, "{is_lost}");
        assert_eq!(w.open(one, 3, returning(V, first)).unwrap().status, Status::Fenced);
        // No generation falls.
        assert_eq!(w.open(one, 4, taking_over(V)), None, "the holder's connections end first");
        w.bury_the_dying();
        let taken = w.answer(one, 4).unwrap().generation();
        assert_eq!(taken, Generation(at_b.generation.0 + 1));
    }
}

/// `volume add` serves a volume of the group, and `volume remove` ends it: it is not elsewhere.
#[test]
fn a_volume_that_is_added_is_elsewhere_no_longer() {
    let mut w = member();
    let link = w.session(1);
    w.carry(&VolumeChange::Add(VolumeConfig::rbd(volume_name(V).as_str(), "rbd/v")));
    let generation = w.open(link, 1, exclusive(V)).unwrap().generation();
    assert!(w.claims.is_empty() && !w.core.holdings.is_elsewhere(volume_name(V)));
    // Its host is told that it goes, and is fenced if its image is lost.
    w.core.lose(VolumeIndex(V));
    w.carry(&VolumeChange::Lose { name: volume_name(V).to_string(), which: VolumeIndex(V) });
    assert!(w.durable[&of_image().uuid].generation > generation);
}

/// The configuration is read again.
#[test]
fn a_reload_tells_which_volumes_can_be_claimed() {
    let mut w = World::new();
    let link = w.session(1);
    assert_eq!(w.open(link, 1, exclusive(V)).unwrap().status, Status::NoSuchVolume);
    w.core.configure_others(&BTreeSet::from([volume_name(V)]));
    assert_eq!(w.open(link, 2, exclusive(V)), None);
    assert_eq!(w.claims.len(), 1);
    // The claim under way ends, whatever the files say.
    w.core.configure_others(&BTreeSet::new());
    w.elsewhere();
    assert_eq!(w.answer(link, 2).unwrap().status, Status::ShuttingDown);
    w.core.configure_others(&BTreeSet::new());
    assert_eq!(w.open(link, 3, exclusive(V)).unwrap().status, Status::NoSuchVolume);
}
