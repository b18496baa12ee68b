//! Volumes that change while they are open: the sessions that get the news, the time, and the entry
//! of LIST then.

use rblk_protocol::{AsyncEvent, KeyedDescriptor, VolumeEntry, VolumeFlags, VolumeListHeader};

use super::*;

const CHANGED: u32 = AsyncEvent::VolumesChanged as u32;

impl World {
    /// Gives a volume this many blocks, and perhaps takes the right to write.
    fn change(&mut self, index: u16, blocks: u64, read_only: bool) {
        let changed =
            Volume { blocks: BlockCount(blocks), read_only, ..Volume::clone(&volume(index)) };
        self.core.holdings.exports_mut().put(Arc::new(changed));
        self.core.volume_changed(VolumeIndex(index));
        self.carry_out();
    }

    /// The entry of LIST for a volume that the session has open.
    fn ask(&mut self, link: Link, index: u16) -> Result<VolumeEntry, Status> {
        self.ask_with_room(link, u32::from(index) + 1, 4096)
    }

    fn ask_with_room(&mut self, link: Link, volume: u32, room: u32) -> Result<VolumeEntry, Status> {
        let command = CommandCapsule {
            volume: VolumeHandle(volume),
            buffer: Some(KeyedDescriptor { address: 0, length: room, rkey: 7 }),
            ..CommandCapsule::new(Opcode::ListVolumes, Tag(70), link.epoch, Sequence(1))
        };
        self.core.command(link.at, link.admission, &command, &[], self.now);
        self.carry_out();
        let said = self.answer(link, 70).expect("at once");
        if said.status != Status::Ok {
            return Err(said.status);
        }
        let (header, entry) = said.payload.split_at(VolumeListHeader::BYTES);
        let header = VolumeListHeader::from_wire(header).unwrap();
        assert_eq!((header.entries, header.total), (1, 1));
        Ok(VolumeEntry::from_wire(entry).unwrap())
    }

    fn park(&mut self, link: Link, tag: u16) -> Option<u32> {
        self.send(link, tag, Opcode::AsyncEvent, 0, &[]);
        self.told(link, tag)
    }

    fn told(&mut self, link: Link, tag: u16) -> Option<u32> {
        self.answer(link, tag).map(|said| {
            assert_eq!(said.status, Status::Ok);
            said.value
        })
    }

    fn holder(&mut self, host: u8, index: u16, mode: AccessMode) -> Link {
        let link = self.session(host);
        assert_eq!(self.open(link, 1, open_as(index, mode)).unwrap().status, Status::Ok);
        link
    }
}

#[test]
fn sessions_with_a_volume_open_learn_that_it_changed() {
    let mut w = World::new();
    let writer = w.holder(1, 0, AccessMode::Exclusive);
    let reader = w.holder(2, 0, AccessMode::ReadOnly);
    let other = w.holder(3, 1, AccessMode::Exclusive);
    for link in [writer, reader, other] {
        assert_eq!(w.park(link, 5), None, "nothing happened");
    }
    w.change(0, 300, false);
    assert_eq!(w.told(writer, 5), Some(CHANGED));
    assert_eq!(w.told(reader, 5), Some(CHANGED));
    assert_eq!(w.told(other, 5), None, "it has another volume");
    let entry = w.ask(writer, 0).unwrap();
    assert_eq!((entry.blocks.0, entry.uuid), (300, [1; 16]));
    assert!(!entry.flags.has(VolumeFlags::READ_ONLY));
    assert!(w.ask(reader, 0).unwrap().flags.has(VolumeFlags::READ_ONLY), "it opened it so");
    assert_eq!(w.park(writer, 6), None, "that was all");
}

#[test]
fn changes_without_a_parked_event_are_reported_once_at_the_next() {
    let mut w = World::new();
    let link = w.holder(1, 0, AccessMode::Exclusive);
    w.change(0, 200, false);
    w.change(0, 300, true);
    assert_eq!(w.park(link, 5), Some(CHANGED));
    let entry = w.ask(link, 0).unwrap();
    assert_eq!(entry.blocks.0, 300);
    assert!(entry.flags.has(VolumeFlags::READ_ONLY));
    assert_eq!(w.park(link, 6), None);
    w.change(0, 300, false);
    assert_eq!(w.told(link, 6), Some(CHANGED));
    assert!(!w.ask(link, 0).unwrap().flags.has(VolumeFlags::READ_ONLY));
}

#[test]
fn a_session_is_asked_about_no_volume_that_it_does_not_have() {
    let mut w = World::new();
    let link = w.holder(1, 0, AccessMode::Exclusive);
    assert_eq!(w.ask(link, 1), Err(Status::VolumeGone), "another");
    assert_eq!(w.ask_with_room(link, u32::MAX, 4096), Err(Status::VolumeGone), "none");
    assert_eq!(w.ask_with_room(link, 1, 111), Err(Status::BadLength), "an entry does not fit");
    assert!(w.ask_with_room(link, 1, 112).is_ok());
    w.send(link, 8, Opcode::CloseVolume, 1, &[]);
    assert_eq!(w.ask(link, 0), Err(Status::VolumeGone), "closed");
}

#[test]
fn a_session_that_ended_leaves_no_news_to_the_next_one_of_its_place() {
    let mut w = World::new();
    let link = w.holder(1, 0, AccessMode::Exclusive);
    w.change(0, 200, false);
    w.log_out(link);
    w.bury(link);
    let next = w.holder(2, 0, AccessMode::Exclusive);
    assert_eq!(w.park(next, 5), None);
    // News for an epoch that is over go to the next one, and no older event is answered.
    let old = next;
    w.change(0, 300, false);
    assert_eq!(w.told(old, 5), Some(CHANGED));
    w.change(0, 400, false);
    let new = w.connect(ConnectionKind::Admin, old.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(new, 1, 2), None);
    w.bury(old);
    assert_eq!(w.answer(new, 1).unwrap().status, Status::Ok);
    let new = w.as_it_is(new);
    assert_eq!(w.park(new, 6), Some(CHANGED));
}

#[test]
fn a_drain_comes_before_other_news() {
    let mut w = World::new();
    let link = w.holder(1, 0, AccessMode::Exclusive);
    w.change(0, 200, false);
    w.core.drain(w.now);
    w.carry_out();
    assert_eq!(w.park(link, 5), Some(AsyncEvent::Draining as u32));
    assert_eq!(w.park(link, 6), Some(CHANGED));
}

#[test]
fn an_upgrade_falls_back_to_an_event_that_every_version_knows() {
    let mut w = World::new();
    let (parked, late) =
        (w.holder(1, 0, AccessMode::Exclusive), w.holder(2, 1, AccessMode::Exclusive));
    assert_eq!(w.park(parked, 5), None);
    w.core.drain_for_upgrade(w.now);
    w.carry_out();
    assert_eq!(w.told(parked, 5), Some(AsyncEvent::Upgrading as u32));
    assert_eq!(w.park(late, 5), Some(AsyncEvent::Upgrading as u32), "it had nothing parked");
    // A session that parks again does not know that event.
    assert_eq!(w.park(parked, 6), Some(AsyncEvent::Draining as u32));
    assert_eq!(w.park(parked, 7), None, "that was all");
    assert!(w.core.is_upgrading());
    // A stop that is ordered meanwhile wins, and a second upgrade does not take it back.
    w.core.drain(w.now);
    w.core.drain_for_upgrade(w.now);
    assert!(!w.core.is_upgrading());
    assert_eq!(w.park(late, 6), Some(AsyncEvent::Draining as u32));
    assert_eq!(w.park(late, 7), None);
}

#[test]
fn an_upgrade_waits_for_mounts_as_long_as_they_hold_their_requests() {
    let mut w = World::new();
    let (first, second) =
        (w.holder(1, 0, AccessMode::Exclusive), w.holder(2, 1, AccessMode::Exclusive));
    w.core.drain_for_upgrade(w.now);
    let begun = w.now;
    let stops = |w: &mut World| {
        std::iter::from_fn(|| w.core.next_effect()).any(|e| e == Effect::StopGroups)
    };
    w.core.tick(begun + Duration::from_millis(1400));
    assert!(!stops(&mut w), "both may still leave");
    w.bury(first);
    w.core.tick(begun + Duration::from_millis(1600));
    assert!(stops(&mut w));
    assert_eq!(w.core.stayed(), 1);
    w.bury(second);
    assert_eq!(w.core.stayed(), 1, "it was ended");
}

#[test]
fn a_volume_that_became_read_only_goes_back_to_its_holder_only() {
    let mut w = World::new();
    let link = w.session(1);
    let generation = w.open(link, 1, exclusive(0)).unwrap().generation();
    w.change(0, 100, true);
    let again = w.open(link, 2, returning(0, generation)).unwrap();
    assert_eq!(again.status, Status::Ok);
    let reply = OpenReply::from_wire(&again.payload).unwrap();
    assert!(reply.flags.has(VolumeFlags::READ_ONLY));
    let other = w.session(2);
    assert_eq!(w.open(other, 1, exclusive(0)).unwrap().status, Status::ReadOnly);
    assert_eq!(w.open(link, 3, exclusive(0)).unwrap().status, Status::ReadOnly, "not as new");
}
