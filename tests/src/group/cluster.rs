//! [`Cluster`]: the model of a Ceph cluster with one image: its monitors, objects, lock and watches.
//!
//! - A map of OSDs says which clients are fenced. An object has the newest map that its OSD knows. It
//!   learns of a newer one with the first call by it, or after a while, and refuses a fenced client
//!   only then.
//! - A call has the map that its client had when it was sent.
//! - Breaking a lock fences its owner for an hour, in the place of any longer fence.
//! - The cluster forgets the watches of a client that it has not heard of for 30 s.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use rblk_target::store::rbd::header_lock::LockOwner;
use rblk_target::store::rbd::ownership::owner_note::OwnerNote;
use rblk_target::store::rbd::ownership::state_change::{
    KeptText, OWNER, REVISION, StateChange, StatePlace,
};

use super::{BLOCKS, OBJECTS, object_of};

/// Milliseconds for which the watch of a silent client lasts.
const WATCH: u64 = 30_000;
/// Milliseconds for which librbd fences the owner of a lock that it breaks.
const SHORT_FENCE: u64 = 3_600_000;
/// The end of a fence for ever.
const FOR_EVER: u64 = u64::MAX;

/// A fence: the map that began it, the map that ended it, and when it ends.
#[derive(Clone, Copy, Debug)]
struct Fence {
    since: u64,
    ended: Option<u64>,
    until: u64,
}

/// A client of the cluster: one of a member each time that it opens the image.
#[derive(Clone, Debug)]
pub struct Client {
    /// The member.
    pub member: usize,
    /// The newest map that it has.
    pub map: u64,
    /// The epoch of the note of its member as the owner; 0: it is not.
    pub epoch: u64,
    /// Its image is open, or its process is alive.
    pub is_open: bool,
    /// It watches the object beside the image.
    pub watches_state: bool,
    // Since when the cluster does not hear of it any more, as its process is gone.
    died: Option<u64>,
}

/// An object of the image.
#[derive(Clone, Debug, Default)]
struct DataObject {
    map: u64,
    // The epoch of the last owner with an op here.
    epoch: u64,
    values: BTreeMap<usize, u64>,
}

/// The object beside the image.
#[derive(Debug, Default)]
struct StateData {
    map: u64,
    exists: bool,
    attributes: BTreeMap<&'static str, String>,
    text: Option<Vec<u8>>,
}

/// A call of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// Read a block.
    Read(usize),
    /// Write a block.
    Write(usize, u64),
    /// The note of the owner.
    ReadOwner,
    /// The owner of the lock.
    ReadLock,
    /// The record.
    ReadRecord,
    /// Have the monitors refuse a client for ever.
    Refuse(String),
    /// The newest map.
    NewestMap,
    /// Whether a client watches the image.
    FindWatch(String),
    /// Take the lock, if its owner is gone.
    Acquire,
    /// Break the lock of a client.
    Break(String),
    /// Note an owner.
    Swap(u64, OwnerNote),
    /// Give the lock back.
    Unlock,
}

/// The answer to a call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The cluster has fenced the client, or fails otherwise.
    Failed(Errno),
    /// Done, or not: the lock is another client's, or a comparison failed.
    Done(bool),
    /// The value of a block.
    Value(u64),
    /// The note.
    Owner(OwnerNote),
    /// The owner of the lock.
    Lock(Option<LockOwner>),
    /// The record.
    Record(KeptText),
}

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    /// The time in milliseconds.
    pub now: u64,
    /// The newest map.
    pub map: u64,
    // When each map was made.
    maps: Vec<u64>,
    fences: BTreeMap<String, Fence>,
    /// Its clients, also those that are gone.
    pub clients: BTreeMap<String, Client>,
    /// Since when it hears nothing of a member.
    pub silent_since: Vec<Option<u64>>,
    objects: Vec<DataObject>,
    state: StateData,
    header_map: u64,
    lock: Option<LockOwner>,
    cookies: u64,
    /// The first write of a former owner behind an op of a later one.
    pub late_write: Option<String>,
    /// Refused calls.
    pub refused: u64,
}

/// A cluster that a simulation and the records of its members share.
pub type SharedCluster = Arc<Mutex<Cluster>>;

/// The cluster, for one call.
pub fn of(cluster: &SharedCluster) -> MutexGuard<'_, Cluster> {
    cluster.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// A cluster with a new image, for so many members.
    #[must_use]
    pub fn new(members: usize) -> Self {
        Self {
            now: 0,
            map: 1,
            maps: vec![0, 0],
            fences: BTreeMap::new(),
            clients: BTreeMap::new(),
            silent_since: vec![None; members],
            objects: vec![DataObject { map: 1, ..DataObject::default() }; OBJECTS],
            state: StateData { map: 1, ..StateData::default() },
            header_map: 1,
            lock: None,
            cookies: 0,
            late_write: None,
            refused: 0,
        }
    }

    fn next_map(&mut self) -> u64 {
        self.map += 1;
        self.maps.push(self.now);
        self.map
    }

    /// The newest map that was made before that moment.
    #[must_use]
    pub fn map_at(&self, then: u64) -> u64 {
        let made = self.maps.iter().rposition(|made| *made <= then);
        u64::try_from(made.unwrap_or(1)).unwrap_or(1).max(1)
    }

    /// An OSD learns of a map.
    pub fn learn(&mut self, object: usize, map: u64) {
        let place = match object.checked_sub(OBJECTS) {
            None => &mut self.objects[object].map,
            Some(0) => &mut self.state.map,
            Some(_) => &mut self.header_map,
        };
        *place = map.max(*place);
    }

    fn fence(&mut self, client: &str, until: u64) {
        let in_force = self.fences.get(client).filter(|fence| fence.ended.is_none()).copied();
        let since = in_force.map_or_else(|| self.next_map(), |fence| fence.since);
        self.fences.insert(client.to_owned(), Fence { since, ended: None, until });
    }

    /// The monitors end the fences that are over.
    pub fn end_fences(&mut self) {
        let now = self.now;
        let is_over = |fence: &Fence| fence.ended.is_none() && fence.until <= now;
        if self.fences.values().any(is_over) {
            let map = self.next_map();
            let over = self.fences.values_mut().filter(|fence| is_over(fence));
            over.for_each(|fence| fence.ended = Some(map));
        }
    }

    fn refuses(&self, client: &str, map: u64) -> bool {
        let in_force =
            |fence: &Fence| map >= fence.since && fence.ended.is_none_or(|end| map < end);
        self.fences.get(client).is_some_and(in_force)
    }

    /// Whether the newest map fences a client.
    #[must_use]
    pub fn is_fenced(&self, client: &str) -> bool {
        self.refuses(client, self.map)
    }

    /// Whether the cluster still has the watch of a client.
    #[must_use]
    pub fn is_watched(&self, client: &str) -> bool {
        let Some(it) = self.clients.get(client) else { return false };
        let silent = self.silent_since[it.member];
        let since = it.died.into_iter().chain(silent).min();
        let is_old = since.is_some_and(|since| self.now >= since + WATCH);
        it.is_open && !is_old && !self.refuses(client, self.header_map)
    }

    /// A client connects, with the map that a monitor has.
    pub fn connect(&mut self, client: &str, member: usize, map: u64) {
        let (epoch, is_open, watches_state, died) = (0, true, false, None);
        let client_of = Client { member, map, epoch, is_open, watches_state, died };
        self.clients.insert(client.to_owned(), client_of);
    }

    /// A client closes its image in good order.
    pub fn close(&mut self, client: &str) {
        if let Some(it) = self.clients.get_mut(client) {
            (it.is_open, it.watches_state) = (false, false);
        }
        if !self.refuses(client, self.header_map) {
            self.lock.take_if(|lock| lock.address == client);
        }
    }

    /// The process of a client dies.
    pub fn died(&mut self, client: &str) {
        let now = self.now;
        if let Some(it) = self.clients.get_mut(client).filter(|it| it.died.is_none()) {
            it.died = Some(now);
        }
    }

    /// The owner of the lock, as the cluster has it.
    #[must_use]
    pub fn lock(&self) -> Option<&LockOwner> {
        self.lock.as_ref()
    }

    /// librbd gives the lock up for a moment, as an OSD comes back.
    pub fn drop_lock(&mut self) -> Option<String> {
        self.lock.take().map(|lock| lock.address)
    }

    /// librbd takes a lock again that it gave up, unless another client has it.
    pub fn take_again(&mut self, client: &str) {
        let is_there = self.clients.get(client).is_some_and(|it| {
            it.is_open && it.died.is_none() && self.silent_since[it.member].is_none()
        });
        if self.lock.is_none() && is_there && !self.refuses(client, self.header_map) {
            self.take(client);
        }
    }

    fn take(&mut self, client: &str) {
        self.cookies += 1;
        let cookie = format!("auto {}", self.cookies);
        self.lock = Some(LockOwner { address: client.to_owned(), cookie });
    }

    /// The note of the owner.
    #[must_use]
    pub fn note(&self) -> OwnerNote {
        let words = self.state.attributes.get(OWNER);
        words.map(|words| serde_json::from_str(words).expect("a note")).unwrap_or_default()
    }

    fn record(&self) -> KeptText {
        let revision = self.state.attributes.get(REVISION).and_then(|text| text.parse().ok());
        let text = self.state.text.clone().filter(|text| !text.is_empty())?;
        Some((text, revision.unwrap_or(0)))
    }

    /// Carries out a call, sent with that map.
    pub fn carry_out(&mut self, client: &str, map: u64, call: &Call) -> Answer {
        let place = match call {
            Call::Read(block) | Call::Write(block, _) => &mut self.objects[object_of(*block)].map,
            Call::ReadOwner | Call::ReadRecord | Call::Swap(..) => &mut self.state.map,
            Call::ReadLock | Call::FindWatch(_) | Call::Acquire | Call::Break(_) | Call::Unlock => {
                &mut self.header_map
            }
            Call::Refuse(_) | Call::NewestMap => {
                return match self.refuses(client, self.map) {
                    // The monitors refuse nobody, but librados knows then that it is fenced.
                    true => self.fenced(),
                    false => self.of_monitors(client, call),
                };
            }
        };
        *place = map.max(*place);
        let known = *place;
        if self.refuses(client, known) {
            return self.fenced();
        }
        match call {
            Call::Read(block) => {
                let object = self.touched(client, *block, false);
                Answer::Value(object.values.get(block).copied().unwrap_or(0))
            }
            Call::Write(block, value) => {
                self.touched(client, *block, true).values.insert(*block, *value);
                Answer::Done(true)
            }
            Call::ReadOwner => Answer::Owner(self.note()),
            Call::ReadRecord => Answer::Record(self.record()),
            Call::Swap(epoch, note) => {
                let place = SimPlace::new(self, client, map);
                match place.swap_owner(*epoch, note) {
                    Ok(swapped) => Answer::Done(swapped),
                    Err(errno) => Answer::Failed(errno),
                }
            }
            Call::ReadLock => Answer::Lock(self.lock.clone()),
            Call::FindWatch(other) => Answer::Done(self.is_watched(other)),
            Call::Acquire => Answer::Done(self.acquire(client)),
            Call::Break(other) => {
                let has_it = self.lock.as_ref().is_some_and(|lock| lock.address == *other);
                if has_it {
                    self.break_lock(client, other);
                }
                Answer::Done(has_it)
            }
            Call::Unlock => {
                self.lock.take_if(|lock| lock.address == client);
                Answer::Done(true)
            }
            Call::Refuse(_) | Call::NewestMap => unreachable!("answered above"),
        }
    }

    fn fenced(&mut self) -> Answer {
        self.refused += 1;
        Answer::Failed(Errno::ESHUTDOWN)
    }

    fn of_monitors(&mut self, client: &str, call: &Call) -> Answer {
        match call {
            Call::Refuse(other) => self.fence(other, FOR_EVER),
            _ => self.give_newest_map(client),
        }
        Answer::Done(true)
    }

    fn give_newest_map(&mut self, client: &str) {
        let map = self.map;
        self.clients.get_mut(client).expect("a client").map = map;
    }

    /// An owner has an op at an object.
    fn touched(&mut self, client: &str, block: usize, writes: bool) -> &mut DataObject {
        let epoch = self.clients.get(client).map_or(0, |it| it.epoch);
        let object = &mut self.objects[object_of(block)];
        if writes && epoch < object.epoch {
            let last = object.epoch;
            self.late_write.get_or_insert_with(|| {
                format!("a write of {client} (epoch {epoch}) to block {block} behind an op of epoch {last}")
            });
        }
        object.epoch = object.epoch.max(epoch);
        object
    }

    fn acquire(&mut self, client: &str) -> bool {
        match self.lock.as_ref().map(|lock| lock.address.clone()) {
            Some(owner) if owner == client => return true,
            Some(owner) if self.is_watched(&owner) => return false,
            Some(owner) => self.break_lock(client, &owner),
            None => {}
        }
        self.take(client);
        true
    }

    fn break_lock(&mut self, client: &str, owner: &str) {
        let until = self.now + SHORT_FENCE;
        self.fence(owner, until);
        self.give_newest_map(client);
        self.header_map = self.map;
        self.lock = None;
    }

    /// The values of all blocks.
    #[must_use]
    pub fn values(&self) -> Vec<u64> {
        let value = |block: usize| self.objects[object_of(block)].values.get(&block).copied();
        (0..BLOCKS).map(|block| value(block).unwrap_or(0)).collect()
    }

    /// Has an OSD take a change of the object beside the image.
    fn change_state(
        &mut self,
        client: &str,
        map: u64,
        change: &StateChange,
    ) -> Result<bool, Errno> {
        self.state.map = map.max(self.state.map);
        if self.refuses(client, self.state.map) {
            self.refused += 1;
            return Err(Errno::ESHUTDOWN);
        }
        let state = &mut self.state;
        match (change.creates, state.exists) {
            (true, true) => return Err(Errno::EEXIST),
            (false, false) if !change.only_if.is_empty() => return Err(Errno::ENOENT),
            _ => {}
        }
        let value = |name| state.attributes.get(name).map_or("", String::as_str);
        if !change.only_if.iter().all(|(name, wanted)| value(name) == wanted) {
            return Ok(false);
        }
        state.exists = true;
        state.attributes.extend(change.sets.iter().cloned());
        if change.text.is_some() {
            state.text.clone_from(&change.text);
        }
        Ok(true)
    }
}

/// The object beside the image, as a client reaches it.
#[derive(Debug)]
struct SimPlace<'c> {
    cluster: Mutex<&'c mut Cluster>,
    client: &'c str,
    map: u64,
}

impl<'c> SimPlace<'c> {
    fn new(cluster: &'c mut Cluster, client: &'c str, map: u64) -> Self {
        Self { cluster: Mutex::new(cluster), client, map }
    }
}

impl StatePlace for SimPlace<'_> {
    fn carry_out(&self, change: &StateChange) -> Result<bool, Errno> {
        let mut cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        cluster.change_state(self.client, self.map, change)
    }
}

/// The object beside the image, for the records of a member.
#[derive(Debug)]
pub struct MemberPlace<'c> {
    /// The cluster.
    pub cluster: &'c SharedCluster,
    /// The client.
    pub client: &'c str,
}

impl MemberPlace<'_> {
    /// The record.
    ///
    /// # Errors
    /// The client is fenced.
    pub fn record(&self) -> Result<KeptText, Errno> {
        let mut cluster = of(self.cluster);
        let map = cluster.clients[self.client].map;
        match cluster.carry_out(self.client, map, &Call::ReadRecord) {
            Answer::Record(kept) => Ok(kept),
            Answer::Failed(errno) => Err(errno),
            other => unreachable!("{other:?}"),
        }
    }
}

impl StatePlace for MemberPlace<'_> {
    fn carry_out(&self, change: &StateChange) -> Result<bool, Errno> {
        let mut cluster = of(self.cluster);
        let map = cluster.clients[self.client].map;
        cluster.change_state(self.client, map, change)
    }
}
