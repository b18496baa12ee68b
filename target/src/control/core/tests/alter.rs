//! Volumes that are added, removed and changed while hosts come and go: scenes, and random events
//! against a model of the served volumes and their users.

use std::collections::BTreeSet;

use rblk_config::VolumeConfig;
use rblk_protocol::WriteVerifier;

use super::super::{OrderError, VolumeChange};
use super::*;

const STORED: BlockCount = BlockCount(800);

/// A volume with a store.
fn stored(index: u16, blocks: BlockCount) -> Volume {
    Volume { placement: Placement::Store, blocks, ..Volume::clone(&volume(index)) }
}

/// A change, and the volume as it makes it.
type Order = (VolumeChange, Arc<Volume>);

fn add(volume: Volume) -> Order {
    let config = VolumeConfig::file(volume.name.as_str(), "/srv/v.img");
    (VolumeChange::Add(config), Arc::new(volume))
}

fn alter(volume: Volume, shrink: bool) -> Order {
    let name = volume.name.to_string();
    (VolumeChange::Resize { name, size: None, shrink }, Arc::new(volume))
}

fn remove(index: u16, force: bool) -> Order {
    let name = volume_name(index).to_string();
    (VolumeChange::Remove { name, which: None, force }, volume(index))
}

fn write_back(index: u16) -> Order {
    (VolumeChange::WriteBack { name: volume_name(index).to_string() }, volume(index))
}

fn snapshot(volume: Volume) -> Order {
    (VolumeChange::Snapshot { name: volume.name.to_string() }, Arc::new(volume))
}

impl World {
    fn order(&mut self, (change, volume): Order) -> Result<(), OrderError> {
        let result = self.core.change(&change, volume, self.now);
        self.carry_out();
        result
    }

    fn add(&mut self, volume: Volume) -> Result<(), OrderError> {
        self.order(add(volume))
    }

    fn alter(&mut self, volume: Volume, shrink: bool) -> Result<(), OrderError> {
        self.order(alter(volume, shrink))
    }

    fn remove(&mut self, index: u16, force: bool) -> Result<(), OrderError> {
        self.order(remove(index, force))
    }

    fn stepped(&mut self, result: Result<(), String>) {
        self.core.stepped(result, self.now);
        self.carry_out();
    }

    /// Carries out every step that core orders, and returns them.
    fn do_all(&mut self) -> Vec<VolumeStep> {
        let mut done = Vec::new();
        while let Some(step) = self.steps.pop() {
            done.push(step);
            self.stepped(Ok(()));
        }
        assert_eq!(self.altered.pop(), Some(Ok(())));
        done
    }

    fn opened(&mut self, link: Link, tag: u16, request: OpenRequest) -> Option<OpenReply> {
        let said = self.open(link, tag, request)?;
        assert_eq!(said.status, Status::Ok, "{}", said.text());
        Some(OpenReply::from_wire(&said.payload).unwrap())
    }
}

/// A world with another volume, which has a store.
fn with_stored() -> (World, u16) {
    let mut w = World::new();
    w.add(stored(VOLUMES, STORED)).unwrap();
    assert_eq!(w.do_all(), [VolumeStep::Record, VolumeStep::Add, VolumeStep::Access]);
    (w, VOLUMES)
}

#[test]
fn each_change_takes_its_steps() {
    use VolumeStep::{
        Access, Close, Drop, Grow, Hold, Lower, Quiet, Record, Reshape, Store, WriteBack,
    };
    let (mut w, index) = with_stored();
    let steps = |w: &mut World, volume: Volume, shrink| {
        w.alter(volume, shrink).unwrap();
        w.do_all()
    };
    let as_it_was = || stored(index, STORED);
    let read_only = || Volume { read_only: true, ..as_it_was() };
    assert_eq!(steps(&mut w, read_only(), false), [Hold, Access]);
    assert_eq!(steps(&mut w, as_it_was(), false), [Record, Access], "nothing that it waits for");
    assert_eq!(steps(&mut w, Volume { read_ahead_bytes: 7, ..as_it_was() }, false), [Access]);
    let larger = stored(index, BlockCount(1600));
    assert_eq!(steps(&mut w, larger.clone(), false), [Store, Grow, Access]);
    let error = w.alter(as_it_was(), false).unwrap_err();
    assert!(matches!(error, OrderError::Smaller { was: 819_200, bytes: 409_600, .. }), "{error}");
    let closed = [Close, WriteBack, Quiet, Reshape, Store, Access];
    assert_eq!(steps(&mut w, as_it_was(), true), closed);
    let cached = Volume { cache: CacheMode::WriteBack, ..as_it_was() };
    let cleared = [Record, Close, WriteBack, Quiet, Reshape, Access];
    assert_eq!(steps(&mut w, cached.clone(), false), cleared);
    let lowered = [Close, WriteBack, Quiet, Reshape, Lower, Access];
    assert_eq!(steps(&mut w, read_only(), false), lowered, "nothing is left in memory");
    assert_eq!(steps(&mut w, cached.clone(), false), cleared);
    // The last block was cached as far as it reached.
    let odd = Volume { cache: CacheMode::WriteBack, ..stored(index, BlockCount(801)) };
    assert_eq!(steps(&mut w, odd, false), [Store, Grow, Access]);
    let even = Volume { cache: CacheMode::WriteBack, ..larger };
    let closed = [Store, Close, WriteBack, Quiet, Reshape, Access];
    assert_eq!(steps(&mut w, even, false), closed);
    let read_only = Volume { read_only: true, ..stored(index, BlockCount(2400)) };
    let cached = Volume { cache: CacheMode::WriteBack, ..read_only };
    assert_eq!(steps(&mut w, cached, false), closed);
    w.remove(index, false).unwrap();
    assert_eq!(w.do_all(), [Close, WriteBack, Quiet, Drop, Lower]);
    assert_eq!(w.remove(index, false), Err(OrderError::Unknown));
}

#[test]
fn an_open_waits_for_a_closed_volume_and_gets_its_new_state() {
    let (mut w, index) = with_stored();
    w.alter(stored(index, BlockCount(400)), true).unwrap();
    let link = w.session(1);
    assert_eq!(w.open(link, 1, exclusive(index)), None, "it is closed");
    assert_eq!(w.open(link, 2, exclusive(0)).unwrap().status, Status::Ok, "others are not");
    assert_eq!(w.do_all().len(), 6);
    let said = w.answer(link, 1).expect("it is open again");
    assert_eq!(OpenReply::from_wire(&said.payload).unwrap().blocks, BlockCount(400));
    // An OPEN that waits for a volume that goes is refused.
    w.remove(index, true).unwrap();
    let other = w.session(2);
    assert_eq!(w.open(other, 1, exclusive(index)), None);
    w.do_all();
    assert_eq!(w.answer(other, 1).unwrap().status, Status::NoSuchVolume);
}

#[test]
fn a_failure_rolls_back() {
    let (mut w, index) = with_stored();
    let fail = |w: &mut World| {
        w.steps.clear();
        w.stepped(Err("a disk".to_owned()));
    };
    w.alter(stored(index, BlockCount(400)), true).unwrap();
    w.stepped(Ok(()));
    fail(&mut w);
    assert_eq!(w.steps, [VolumeStep::Access], "write-back failed: the volume is as it was");
    assert_eq!(w.core.altered().unwrap().blocks, STORED);
    w.stepped(Ok(()));
    assert_eq!(w.altered.pop(), Some(Err("a disk".to_owned())));
    w.steps.clear();
    let link = w.session(1);
    assert_eq!(w.opened(link, 1, exclusive(index)).unwrap().blocks, STORED);

    // A removal that cannot write dirty blocks, and one with connections that do not end.
    w.log_out(link);
    w.bury(link);
    w.remove(index, false).unwrap();
    w.stepped(Ok(()));
    fail(&mut w);
    w.stepped(Ok(()));
    assert!(w.altered.pop().unwrap().is_err());
    w.remove(index, false).unwrap();
    w.steps.clear();
    w.pass(Duration::from_secs(61));
    assert_eq!(w.steps, [VolumeStep::Access]);
    w.stepped(Ok(()));
    assert!(w.altered.pop().unwrap().unwrap_err().contains("did not end within 60 s"));
    assert!(w.core.volumes().iter().any(|volume| volume.index.0 == index));

    // If one poll group cannot serve a new volume, all drop it.
    w.add(stored(index + 1, STORED)).unwrap();
    fail(&mut w);
    assert_eq!(w.steps, [VolumeStep::Drop]);
    w.stepped(Ok(()));
    assert!(w.altered.pop().unwrap().is_err());
    assert!(w.core.volumes().iter().all(|volume| volume.index.0 != index + 1));
}

#[test]
fn a_wait_for_a_store_has_a_deadline_and_rolls_back() {
    let (mut w, index) = with_stored();
    w.alter(stored(index, BlockCount(400)), true).unwrap();
    w.stepped(Ok(()));
    w.stepped(Ok(()));
    assert_eq!(w.steps.pop(), Some(VolumeStep::Quiet));
    w.steps.clear();
    w.pass(Duration::from_secs(61));
    assert_eq!(w.steps, [VolumeStep::Access]);
    assert_eq!(w.core.altered().unwrap().blocks, STORED);
    w.stepped(Ok(()));
    let error = w.altered.pop().unwrap().unwrap_err();
    assert_eq!(error, "the work of its store did not end within 60 s");
    // The volume was to grow: its file is cut back.
    let cached = |blocks| Volume { cache: CacheMode::WriteBack, ..stored(index, blocks) };
    w.steps.clear();
    w.alter(cached(BlockCount(801)), false).unwrap();
    assert_eq!(w.steps.pop(), Some(VolumeStep::Record));
    w.stepped(Ok(()));
    w.stepped(Ok(()));
    w.steps.clear();
    w.stepped(Err("a disk".to_owned()));
    assert_eq!(w.steps, [VolumeStep::Access]);
    w.stepped(Ok(()));
    assert_eq!(w.steps.pop(), Some(VolumeStep::Lower));
    w.stepped(Ok(()));
    assert_eq!(w.steps.pop(), Some(VolumeStep::CutBack));
    w.stepped(Ok(()));
    assert_eq!(w.altered.pop(), Some(Err("a disk".to_owned())));
}

#[test]
fn an_open_times_out_during_a_long_change() {
    let (mut w, index) = with_stored();
    w.alter(stored(index, BlockCount(400)), true).unwrap();
    let link = w.session(1);
    assert_eq!(w.open(link, 1, exclusive(index)), None);
    w.pass(Duration::from_secs(31));
    let said = w.answer(link, 1).expect("it is answered");
    assert_eq!(said.status, Status::TimedOut);
    assert!(said.text().contains("is being changed") && said.text().contains("try again"));
}

#[test]
fn a_removal_by_force_ends_and_fences() {
    for (steps_done, late) in [(0, true), (1, true), (1, false), (2, true), (3, false)] {
        let (mut w, index) = with_stored();
        let link = w.session(1);
        let generation = w.opened(link, 1, exclusive(index)).unwrap().generation;
        w.remove(index, true).unwrap();
        (0..steps_done).for_each(|_| w.stepped(Ok(())));
        w.steps.clear();
        if late {
            w.pass(Duration::from_secs(61));
        } else {
            w.stepped(Err("a disk".to_owned()));
        }
        assert_eq!(
            (&w.steps[..], w.given_up.len()),
            (&[VolumeStep::Abandon][..], 1),
            "{steps_done}"
        );
        w.stepped(Ok(()));
        assert_eq!(w.altered.pop(), Some(Ok(())));
        assert!(w.core.volumes().iter().all(|volume| volume.index.0 != index));
        w.bury_the_dying();
        // The volume is added again under its name, as another volume.
        let again = Volume { index: VolumeIndex(index + 1), ..stored(index, STORED) };
        w.steps.clear();
        w.add(again).unwrap();
        w.do_all();
        let said = w.open(link, 2, returning(index, generation)).unwrap();
        assert_eq!(said.status, Status::Fenced, "{}", said.text());
        assert!(said.text().contains("before all was written"), "{}", said.text());
    }
}

#[test]
fn a_fence_that_cannot_be_written_is_written_again() {
    let (mut w, index) = with_stored();
    let link = w.session(1);
    let generation = w.opened(link, 1, exclusive(index)).unwrap().generation;
    w.remove(index, true).unwrap();
    w.slow_disk = true;
    w.stepped(Err("a disk".to_owned()));
    w.stepped(Ok(()));
    assert_eq!(w.altered.pop(), Some(Ok(())), "nobody waits for the record");
    let fail = |w: &mut World| {
        assert!(w.core.owes_fences(), "a run that ended now would not end clean");
        let (ticket, record) = w.on_their_way.remove(0);
        assert!(record.generation > generation && w.on_their_way.is_empty());
        w.core.persisted(ticket, Err("No space left".to_owned()));
        w.carry_out();
        record
    };
    let record = fail(&mut w);
    for _ in 0..3 {
        // No host opens the volume, which is not served any more.
        assert!(w.on_their_way.is_empty());
        w.pass(Duration::from_millis(500));
        assert_eq!(fail(&mut w), record);
    }
    w.pass(Duration::from_millis(500));
    w.write_all();
    assert!(!w.core.owes_fences());
    w.pass(Duration::from_millis(500));
    assert!(w.on_their_way.is_empty(), "once is enough");
    assert_eq!(w.durable[&record.volume], record);
}

#[test]
fn a_fence_waits_for_a_claim_of_its_volume() {
    let (mut w, index) = with_stored();
    let link = w.session(1);
    let generation = w.opened(link, 1, exclusive(index)).unwrap().generation;
    w.slow_disk = true;
    let other = w.session(2);
    assert_eq!(w.opened(other, 1, taking_over(index)), None);
    w.remove(index, true).unwrap();
    w.stepped(Err("a disk".to_owned()));
    w.stepped(Ok(()));
    w.pass(Duration::from_millis(500));
    assert_eq!(w.on_their_way.len(), 1, "the claim alone");
    assert!(w.core.owes_fences());
    w.write_all();
    assert_eq!(w.on_their_way.len(), 1, "and then the fence");
    let fence = w.on_their_way[0].1.clone();
    assert!(fence.generation > generation && !fence.present);
    w.write_all();
    assert!(!w.core.owes_fences() && w.on_their_way.is_empty());
    assert_eq!(w.durable[&fence.volume], fence);
}

#[test]
fn a_snapshot_releases_held_writes_at_any_failure() {
    use VolumeStep::{Access, Clone, Hold, Probe, WriteBack};
    let (mut w, index) = with_stored();
    let link = w.session(1);
    w.opened(link, 1, exclusive(index)).unwrap();
    let snapshot = || snapshot(stored(index, STORED));
    w.order(snapshot()).unwrap();
    let other = w.session(2);
    let said = w.open(other, 1, open_as(index, AccessMode::ReadOnly)).expect("it stays open");
    assert_eq!(said.status, Status::Ok);
    assert!(matches!(w.order(snapshot()), Err(OrderError::Busy(_))));
    assert_eq!(w.do_all(), [Probe, WriteBack, Hold, WriteBack, Clone, Access]);

    // One step after the other fails. From the hold on, writes are let go on.
    for done in 0..5 {
        w.order(snapshot()).unwrap();
        (0..done).for_each(|_| w.stepped(Ok(())));
        w.steps.clear();
        w.stepped(Err("a disk".to_owned()));
        if done >= 2 {
            assert_eq!(w.steps, [Access], "after {done}");
            w.stepped(Ok(()));
        }
        assert_eq!(w.altered.pop(), Some(Err("a disk".to_owned())), "after {done}");
        w.steps.clear();
    }
    // A step takes too long: the first write-back has no limit here, the steps after the hold do.
    for done in 2..5 {
        w.order(snapshot()).unwrap();
        w.stepped(Ok(()));
        w.pass(Duration::from_secs(50));
        assert!(w.altered.is_empty());
        for _ in 1..done {
            w.stepped(Ok(()));
            w.pass(Duration::from_secs(2));
        }
        w.steps.clear();
        w.pass(Duration::from_secs(9));
        assert_eq!(w.steps, [Access], "after {done}");
        w.stepped(Ok(()));
        assert!(w.altered.pop().unwrap().unwrap_err().contains("did not end within 10 s"));
        w.steps.clear();
    }
    assert_eq!(w.order(self::snapshot(stored(99, STORED))), Err(OrderError::Unknown));
}

#[test]
fn users_of_a_volume_are_named_and_can_be_kicked() {
    let (mut w, index) = with_stored();
    let link = w.session(1);
    w.opened(link, 1, exclusive(index)).unwrap();
    let error = w.remove(index, false).unwrap_err();
    assert_eq!(error.to_string(), format!("v{index} is in use: host1 (peer1)"));
    let cached = Volume { cache: CacheMode::WriteBack, ..stored(index, STORED) };
    let error = w.alter(cached, false).unwrap_err();
    assert!(matches!(error, OrderError::WriteBackInUse { .. }), "{error}");
    assert!(w.core.kick(link.session, w.now));
    w.carry_out();
    assert!(w.is_dying(link) && !w.core.kick(SessionIndex { index: 9, life: 9 }, w.now));
    w.bury_the_dying();
    assert_eq!(w.core.sessions().iter().count(), 0);
    // The host may come again, and has its old generation.
    let again = w.session(1);
    let generation = w.core.generation(VolumeIndex(index));
    assert!(w.opened(again, 1, returning(index, generation)).is_some());
    // While the volume is closed to others, this host may come back, and no other.
    w.core.close_to_others(VolumeIndex(index), true);
    let other = w.session(2);
    let request = open_as(index, AccessMode::ReadOnly);
    assert_eq!(w.open(other, 1, request).unwrap().status, Status::InUse);
    assert!(w.opened(again, 2, returning(index, generation)).is_some());
    w.core.close_to_others(VolumeIndex(index), false);
    assert!(w.opened(other, 2, request).is_some());
}

#[test]
fn a_volume_keeps_its_verifier_when_its_cache_mode_changes() {
    let (mut w, index) = with_stored();
    let vouched = WriteVerifier([5; 16]);
    w.core.vouch(stored(index, STORED).uuid, vouched);
    let mut told = Vec::new();
    for (at, cache) in
        [CacheMode::WriteBack, CacheMode::WriteThrough, CacheMode::None].into_iter().enumerate()
    {
        w.alter(Volume { cache, ..stored(index, STORED) }, false).unwrap();
        w.do_all();
        let link = w.session(u8::try_from(at).unwrap() + 1);
        told.push(w.opened(link, 1, taking_over(index)).unwrap().verifier);
        w.bury(link);
        w.bury_the_dying();
        w.pass(2 * LEASE);
    }
    assert_eq!(told, [vouched; 3]);
}

#[test]
fn a_higher_risk_is_recorded_first() {
    let (mut w, index) = with_stored();
    w.alter(Volume { cache: CacheMode::WriteBack, ..stored(index, STORED) }, false).unwrap();
    assert_eq!(w.steps, [VolumeStep::Record]);
    // If the record cannot be written, nothing changes.
    w.stepped(Err("a full disk".to_owned()));
    assert_eq!(w.steps.pop(), Some(VolumeStep::Lower), "the disk may have it all the same");
    w.stepped(Err("a full disk".to_owned()));
    assert_eq!(w.altered.pop(), Some(Err("a full disk".to_owned())));
    assert_eq!(w.core.volume(VolumeIndex(index)).unwrap().cache, CacheMode::None);
    w.steps.clear();
    w.add(stored(index + 1, STORED)).unwrap();
    w.pass(Duration::from_secs(61));
    assert_eq!(
        w.steps,
        [VolumeStep::Record, VolumeStep::Drop],
        "it is waited for, with a deadline"
    );
    w.stepped(Ok(()));
    let error = w.altered.pop().unwrap().unwrap_err();
    assert!(error.contains("its record (state_dir)"), "{error}");
}

#[test]
fn an_opener_in_a_new_generation_reads_only_durable_writes() {
    let (mut w, index) = with_stored();
    w.slow_store = true;
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(index)), None);
    assert_eq!(w.settles.len(), 1);
    w.settle_all(&Ok(()));
    let said = w.answer(first, 1).expect("it is durable");
    let generation = OpenReply::from_wire(&said.payload).unwrap().generation;
    // A reader, or a host in the same generation, learns of a loss in another way.
    let reader = w.session(3);
    assert!(w.opened(reader, 1, open_as(index, AccessMode::ReadOnly)).is_some());
    assert!(w.opened(first, 2, returning(index, generation)).is_some());
    assert!(w.settles.is_empty());
    // The next holder: first the connections of the one before end.
    let second = w.session(2);
    assert_eq!(w.open(second, 1, taking_over(index)), None);
    assert!(w.settles.is_empty(), "commands of the holder before may still write");
    w.bury_the_dying();
    assert_eq!((w.settles.len(), w.answer(second, 1)), (1, None));
    w.settle_all(&Err("no space".to_owned()));
    let said = w.answer(second, 1).expect("it is refused");
    assert_eq!(said.status, Status::StoreError);
    assert!(said.text().contains("no space") && said.text().contains("read-only"));
    // The host may try again, and the wait has an end.
    assert_eq!(w.open(second, 2, exclusive(index)), None);
    w.pass(Duration::from_secs(31));
    let said = w.answer(second, 2).expect("it is refused");
    assert_eq!(said.status, Status::TimedOut);
    assert!(said.text().contains("its store does not answer"), "{}", said.text());
    // A late answer has no effect.
    w.settle_all(&Ok(()));
    assert!(w.core.users(VolumeIndex(index)).iter().all(|user| !user.contains("host2")));
}

/// The served volumes and their users.
#[derive(Default)]
struct Model {
    // Blocks and read-only, by index.
    served: BTreeMap<u16, (u64, bool)>,
    used: BTreeSet<u16>,
    // Indexes that were ever used.
    spent: BTreeSet<u16>,
}

/// The order under way, as the model sees it.
struct Pending {
    index: u16,
    after: Option<(u64, bool)>,
    closes: bool,
}

/// One run of random events.
struct Chance {
    w: World,
    seed: u64,
    model: Model,
    pending: Option<Pending>,
    holders: BTreeMap<u16, Link>,
    tag: u16,
}

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) % bound
    }

    fn any_served(&mut self) -> Option<u16> {
        let all: Vec<u16> = self.model.served.keys().copied().collect();
        let at = self.below(all.len().max(1) as u64);
        all.get(usize::try_from(at).unwrap()).copied()
    }

    fn volume(&self, index: u16) -> Volume {
        let (blocks, read_only) = self.model.served[&index];
        Volume { read_only, ..stored(index, BlockCount(blocks)) }
    }

    fn begin(&mut self, order: Order) {
        let (change, volume) = &order;
        let (index, facts) = (volume.index.0, (volume.blocks.0, volume.read_only));
        let (after, allowed) = match change {
            VolumeChange::Remove { force, .. } => {
                (None, *force || !self.model.used.contains(&index))
            }
            VolumeChange::WriteBack { .. } => (self.model.served.get(&index).copied(), true),
            VolumeChange::Resize { shrink, .. } => {
                let (blocks, _) = self.model.served[&index];
                (Some(facts), *shrink || facts.0 >= blocks)
            }
            VolumeChange::Add(_) | VolumeChange::Snapshot { .. } => (Some(facts), true),
            VolumeChange::Become(_) | VolumeChange::Lose { .. } | VolumeChange::Yield { .. } => {
                unreachable!("it is not drawn")
            }
        };
        let closes = match (&after, self.model.served.get(&index)) {
            (None, _) => true,
            (Some((blocks, _)), Some((was, _))) => blocks < was,
            (Some(_), None) => false,
        };
        let result = self.w.order(order);
        assert_eq!(result.is_ok(), allowed && self.pending.is_none(), "{result:?}");
        if result.is_ok() {
            if after.is_none() {
                self.model.used.remove(&index);
                self.holders.remove(&index);
            }
            self.model.spent.insert(index);
            self.pending = Some(Pending { index, after, closes });
        }
    }

    fn order(&mut self) {
        let force = self.below(2) == 0;
        match (self.below(6), self.any_served()) {
            (0, _) | (_, None) => {
                let index = self.model.spent.last().map_or(0, |last| last + 1);
                self.begin(add(stored(index, STORED)));
            }
            (1, Some(index)) => {
                self.begin(remove(index, force));
            }
            (4, Some(index)) => {
                self.begin(snapshot(self.volume(index)));
            }
            (5, Some(index)) => self.begin(write_back(index)),
            (2, Some(index)) => {
                let blocks = BlockCount(8 * (1 + self.below(200)));
                self.begin(alter(Volume { blocks, ..self.volume(index) }, force));
            }
            (_, Some(index)) => {
                self.begin(alter(Volume { read_only: force, ..self.volume(index) }, false));
            }
        }
    }

    fn step(&mut self) {
        let Some(step) = self.w.steps.pop() else { return };
        let fails = self.below(8) == 0 && step != VolumeStep::Lower;
        self.w.stepped(if fails { Err("chance".to_owned()) } else { Ok(()) });
        self.look();
    }

    /// The change under way may have ended, by its last step or by its deadline.
    fn look(&mut self) {
        let Some(result) = self.w.altered.pop() else { return };
        let Pending { index, after, .. } = self.pending.take().expect("one was under way");
        if result.is_ok() {
            match after {
                Some(facts) => drop(self.model.served.insert(index, facts)),
                None => drop(self.model.served.remove(&index)),
            }
        }
    }

    fn open(&mut self) {
        let index = match self.any_served() {
            Some(index) if self.below(4) > 0 => index,
            _ => 999,
        };
        if self.model.used.contains(&index) {
            return;
        }
        let host = u8::try_from(1 + self.below(3)).unwrap();
        if self.w.core.sessions().iter().count() >= 8 {
            return;
        }
        let link = self.w.session(host);
        self.tag = (self.tag + 1) % 100 + 10;
        let said = self.w.open(link, self.tag, open_as(index, AccessMode::ReadOnly));
        let closed = self.pending.as_ref().is_some_and(|p| p.index == index && p.closes);
        match (self.model.served.get(&index), said) {
            (_, None) => {
                assert!(closed, "only a closed volume is waited for");
                self.w.bury(link);
                self.w.pass(LEASE + Duration::from_secs(1));
            }
            (Some((blocks, _)), Some(said)) if said.status == Status::Ok => {
                let reply = OpenReply::from_wire(&said.payload).unwrap();
                assert!(!closed && reply.blocks.0 == *blocks);
                self.model.used.insert(index);
                self.holders.insert(index, link);
            }
            (served, Some(said)) => {
                assert_eq!((served, said.status), (None, Status::NoSuchVolume));
                self.w.log_out(link);
                self.w.bury(link);
            }
        }
    }

    fn leave(&mut self) {
        let Some((index, link)) = self.holders.pop_first() else { return };
        self.model.used.remove(&index);
        if self.below(2) == 0 {
            self.w.log_out(link);
            self.w.bury(link);
        } else {
            assert!(self.w.core.kick(link.session, self.w.now));
            self.w.carry_out();
        }
    }

    fn check(&mut self) {
        self.w.bury_the_dying();
        self.look();
        let busy = self.pending.as_ref().map(|pending| pending.index);
        for volume in self.w.core.volumes() {
            let facts = self.model.served.get(&volume.index.0);
            assert_eq!(facts, Some(&(volume.blocks.0, volume.read_only)), "{}", volume.name);
        }
        assert_eq!(self.w.core.volumes().len(), self.model.served.len());
        assert_eq!(self.w.core.altered().map(|v| v.index.0), busy);
        for index in self.model.served.keys() {
            let users = self.w.core.users(VolumeIndex(*index));
            assert_eq!(!users.is_empty(), self.model.used.contains(index), "{index}: {users:?}");
        }
    }
}

#[test]
fn random_changes_agree_with_a_model() {
    let (mut changed, mut failed) = (0, 0);
    for seed in 1..400 {
        println!("seed {seed}");
        let mut w = World::new();
        let served: BTreeMap<u16, (u64, bool)> = (0..VOLUMES).map(|v| (v, (100, false))).collect();
        for index in served.keys() {
            w.core.holdings.exports_mut().put(Arc::new(stored(*index, BlockCount(100))));
        }
        let spent = served.keys().copied().collect();
        let model = Model { served, used: BTreeSet::new(), spent };
        let holders = BTreeMap::new();
        let mut run = Chance { w, seed, model, pending: None, holders, tag: 0 };
        for _ in 0..150 {
            match run.below(8) {
                0 | 1 => run.order(),
                2..=4 => run.step(),
                5 | 6 => run.open(),
                _ => run.leave(),
            }
            run.check();
        }
        changed += run.model.spent.len();
        failed += usize::from(run.pending.is_some());
    }
    assert!(changed > 1000 && failed > 10, "{changed} {failed}");
}
