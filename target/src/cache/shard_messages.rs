//! Messages between poll groups and shards: plain values.
//!
//! A request with a [`PartToken`] gets exactly one answer, with the request's token. Other requests
//! get none. Memory goes with the message: the owner of the [`Segments`] must give them back.

use std::cell::Cell;
use std::marker::PhantomData;

use nix::errno::Errno;
use rblk_protocol::Tag;

use crate::store::{OpKind, Segment};
use crate::volume::ids::{ConnectionId, HostIndex, SessionIndex, VolumeIndex};
use crate::volume::timing::Spent;

/// Runs of the arena that a shard lent, in the order of the volume's bytes.
///
/// Lent runs are pinned: the shard neither changes nor reuses them until [`ShardRequest::Release`],
/// [`ShardRequest::Write`] or [`ShardRequest::Cancel`] returns them. `Segments` is not `Clone`, so
/// runs come back once. Dropped runs would stay pinned until the target ends. So a drop is a bug:
/// it panics in debug builds, and other builds log an error. Under an [`ArenaEnds`] guard the arena
/// goes away as well, and a drop is allowed. `Segments::default()` has no runs and may be dropped.
#[must_use = "lent slots stay pinned until they are given back"]
#[derive(Debug, PartialEq, Eq)]
pub struct Segments {
    runs: Runs,
    // The session whose peers keep the runs.
    session: SessionIndex,
}

// One run is by far the most frequent case, and needs no list.
#[derive(Debug, PartialEq, Eq)]
enum Runs {
    One(Segment),
    // No run, or more than one.
    List(Vec<Segment>),
}

impl Default for Runs {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl Default for Segments {
    fn default() -> Self {
        Self { runs: Runs::default(), session: SessionIndex::NONE }
    }
}

impl Drop for Segments {
    #[inline]
    fn drop(&mut self) {
        if !self.is_empty() {
            self.leak();
        }
    }
}

impl Segments {
    /// One run, lent to a session.
    #[inline]
    pub(crate) fn one(session: SessionIndex, run: Segment) -> Self {
        Self { runs: Runs::One(run), session }
    }

    /// The runs of a list, lent to a session. The second value is the list, if its memory is not
    /// needed.
    pub(super) fn of_list(
        session: SessionIndex,
        list: Vec<Segment>,
    ) -> (Self, Option<Vec<Segment>>) {
        match list[..] {
            [run] => (Self::one(session, run), Some(list)),
            _ => (Self { runs: Runs::List(list), session }, None),
        }
    }

    /// The session that the runs were lent to.
    #[inline]
    pub(super) fn session(&self) -> SessionIndex {
        self.session
    }

    /// The list, if the runs are in one. The caller gives the runs back.
    #[inline]
    pub(super) fn into_list(mut self) -> Option<Vec<Segment>> {
        match std::mem::take(&mut self.runs) {
            Runs::One(_) => None,
            Runs::List(list) => Some(list),
        }
    }

    /// A single run, without a list, came back.
    #[inline(always)]
    pub(super) fn came_back(mut self) {
        debug_assert!(matches!(self.runs, Runs::One(_)), "a list goes back to the others");
        self.runs = Runs::default();
    }

    #[cold]
    fn leak(&self) {
        if std::thread::panicking() || ArenaEnds::is_so() {
            return;
        }
        let bytes = self.bytes();
        debug_assert!(false, "{bytes} bytes of lent memory were dropped: {self:?}");
        tracing::error!(bytes, "bug: lent memory was dropped and stays pinned");
    }

    /// The runs.
    #[must_use]
    #[inline]
    pub(crate) fn as_slice(&self) -> &[Segment] {
        match &self.runs {
            Runs::One(run) => std::slice::from_ref(run),
            Runs::List(list) => list,
        }
    }

    /// Bytes of all runs.
    #[must_use]
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.as_slice().iter().map(|run| u64::from(run.len)).sum()
    }

    /// Whether there is nothing to give back.
    #[must_use]
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.as_slice().is_empty()
    }

    /// Calls `act` for each run of the bytes `from..to`, with the run and its offset from `from`.
    pub(crate) fn each_run(&self, from: u32, to: u32, mut act: impl FnMut(Segment, u32)) {
        let mut start = 0;
        for run in self.as_slice() {
            let end = start + run.len;
            let (low, high) = (from.max(start), to.min(end));
            if low < high {
                let offset = run.offset + (low - start) as usize;
                act(Segment { offset, len: high - low }, low - from);
            }
            start = end;
        }
    }
}

thread_local! {
    // Number of this thread's live guards.
    static ARENAS_END: Cell<u32> = const { Cell::new(0) };
}

/// While this guard lives, its thread may drop lent memory: all shards of the arena go away, so no
/// shard is left to take the memory back.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct ArenaEnds(PhantomData<*const ()>);

impl ArenaEnds {
    /// Allows drops until the guard is dropped.
    pub fn begin() -> Self {
        ARENAS_END.set(ARENAS_END.get() + 1);
        Self(PhantomData)
    }

    fn is_so() -> bool {
        ARENAS_END.get() > 0
    }
}

impl Drop for ArenaEnds {
    fn drop(&mut self) {
        ARENAS_END.set(ARENAS_END.get() - 1);
    }
}

/// Names a part of a command at the asking poll group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PartToken {
    /// The poll group.
    pub group: u16,
    /// The session of the connection.
    pub session: SessionIndex,
    /// The connection.
    pub connection: ConnectionId,
    /// The command.
    pub tag: Tag,
    /// The number of the part in the command.
    pub part: u8,
}

impl PartToken {
    /// A token for a request that a poll group sends to its own shard by an order of control, not
    /// for a command. No connection has this name.
    #[must_use]
    pub(crate) const fn of_control(group: u16, number: u16) -> Self {
        let connection = ConnectionId { index: u16::MAX, generation: u32::MAX };
        Self { group, session: SessionIndex::NONE, connection, tag: Tag(number), part: 0 }
    }

    /// The number passed to [`Self::of_control`]; `None` for a request of a command.
    #[must_use]
    #[inline]
    pub(crate) fn number_of_control(&self) -> Option<u16> {
        let is_of_control = self.connection.index == u16::MAX && self.session == SessionIndex::NONE;
        is_of_control.then_some(self.tag.0)
    }
}

/// Names a job of a shard for the poll group that asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct JobId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

#[cfg(test)]
impl JobId {
    /// A job of no shard.
    pub(crate) fn test(index: u32) -> Self {
        Self { index, generation: 0 }
    }
}

/// A request to a shard. Ranges are bytes. Ranges of reads and writes lie within one stripe, unless
/// there is only one shard.
#[derive(Debug, PartialEq, Eq)]
pub enum ShardRequest {
    /// Looks up the bytes and pins them. Answered by [`ShardReply::Read`].
    Read {
        /// The command part to answer.
        from: PartToken,
        /// The volume.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Allocates memory for a write. Answered by [`ShardReply::Reserved`].
    Reserve {
        /// The command part to answer.
        from: PartToken,
        /// The volume.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// The data is in the reserved memory: write it. Answered by [`ShardReply::Done`].
    Write {
        /// The command part to answer.
        from: PartToken,
        /// The reservation, which ends.
        job: JobId,
        /// Its memory.
        memory: Segments,
        /// Answer only when the data is durable.
        fua: bool,
    },
    /// The data of a reservation will not come: the reservation ends.
    Cancel {
        /// The reservation.
        job: JobId,
        /// Its memory.
        memory: Segments,
    },
    /// Returns slots that were lent for a read.
    Release {
        /// The lent slots.
        memory: Segments,
    },
    /// The bytes may be read soon. A hint: no request waits for it, and errors are not reported.
    Prefetch {
        /// The volume.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Hands the store every block that is dirty when this request arrives. The blocks are durable
    /// only after a [`Self::Sync`]. Answered by [`ShardReply::Done`].
    Flush {
        /// The command part to answer.
        from: PartToken,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Makes all data in the store durable. Answered by [`ShardReply::Done`].
    Sync {
        /// The command part to answer.
        from: PartToken,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Discards or zeroes a range. The whole range belongs to this shard unless `locked`. Answered
    /// by [`ShardReply::Done`].
    Change {
        /// The command part to answer.
        from: PartToken,
        /// The volume.
        volume: VolumeIndex,
        /// [`OpKind::Discard`] or [`OpKind::WriteZeroes`].
        kind: OpKind,
        /// Every shard locked the range for the asker: this shard only submits the change to the
        /// store.
        locked: bool,
    },
    /// Keeps other jobs away from a range of the store until [`Self::UnlockRange`]. Reads that the
    /// cache can answer continue. Answered by [`ShardReply::RangeLocked`].
    LockRange {
        /// The command part to answer.
        from: PartToken,
        /// The volume.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Ends a lock. Answered by [`ShardReply::Done`]: after that, no read finds data that the
    /// change made old.
    UnlockRange {
        /// The command part to answer.
        from: PartToken,
        /// The lock.
        job: JobId,
        /// The outcome of the change at the store.
        outcome: Changed,
    },
}

/// The outcome of a discard or zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// The store changed the range: cached blocks of it are old.
    Yes,
    /// The change failed: the store's bytes are unknown.
    Unknown,
    /// The change was not tried.
    No,
}

/// The sessions that should return lent slots to a shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlotsOf {
    /// All sessions.
    All,
    /// The sessions of some hosts.
    Hosts(Box<[HostIndex]>),
}

impl SlotsOf {
    /// Whether the sessions of a host are included.
    #[must_use]
    pub(super) fn has(&self, host: HostIndex) -> bool {
        match self {
            Self::All => true,
            Self::Hosts(hosts) => hosts.contains(&host),
        }
    }
}

/// A shard's answer.
#[derive(Debug, PartialEq, Eq)]
pub enum ShardReply {
    /// Answers [`ShardRequest::Read`].
    Read {
        /// The asking command part.
        to: PartToken,
        /// The bytes, or the store's errno.
        result: Result<Segments, Errno>,
        /// The request's waits.
        spent: Spent,
    },
    /// Answers [`ShardRequest::Reserve`].
    Reserved {
        /// The asking command part.
        to: PartToken,
        /// The reservation.
        job: JobId,
        /// The memory for the data.
        memory: Segments,
    },
    /// Answers [`ShardRequest::LockRange`].
    RangeLocked {
        /// The asking command part.
        to: PartToken,
        /// The lock.
        job: JobId,
    },
    /// Answers the other requests.
    Done {
        /// The asking command part.
        to: PartToken,
        /// The store's errno, if it failed.
        result: Result<(), Errno>,
        /// The request's waits.
        spent: Spent,
    },
}

impl ShardReply {
    /// The shard's work for the request, as far as it is known yet.
    #[inline]
    pub(crate) fn spent(&self) -> Spent {
        match self {
            Self::Read { spent, .. } | Self::Done { spent, .. } => *spent,
            Self::Reserved { .. } | Self::RangeLocked { .. } => Spent::default(),
        }
    }

    /// The asking command part.
    #[must_use]
    pub(crate) fn to(&self) -> PartToken {
        match self {
            Self::Read { to, .. }
            | Self::Reserved { to, .. }
            | Self::RangeLocked { to, .. }
            | Self::Done { to, .. } => *to,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Segments {
        Segments::one(SessionIndex { index: 1, life: 1 }, Segment { offset: 4096, len: 512 })
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "512 bytes of lent memory were dropped")]
    fn dropping_lent_memory_is_a_bug() {
        drop(run());
    }

    #[test]
    fn returned_or_never_lent_memory_is_dropped_quietly() {
        drop(Segments::default());
        assert_eq!(run().into_list(), None);
        let mut held = run();
        assert_eq!(std::mem::take(&mut held).into_list(), None);
        let two = vec![Segment { offset: 0, len: 512 }, Segment { offset: 8192, len: 512 }];
        let (memory, rest) = Segments::of_list(SessionIndex { index: 1, life: 1 }, two.clone());
        assert_eq!((memory.into_list(), rest), (Some(two), None));
    }

    #[test]
    fn memory_of_an_arena_that_ends_is_dropped_quietly() {
        let _ends = ArenaEnds::begin();
        drop(run());
    }
}
