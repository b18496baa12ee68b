//! Messages between poll groups and shards: plain values.
//!
//! A request with a [`PartToken`] is answered exactly once, with the same token. The others are not
//! answered. Memory goes with the message: the owner of the [`Segments`] must give them back.

use std::cell::Cell;
use std::marker::PhantomData;

use nix::errno::Errno;
use rblk_protocol::Tag;

use crate::store::{OpKind, Segment};
use crate::volume::ids::{ConnectionId, HostIndex, SessionIndex, VolumeIndex};
use crate::volume::timing::Spent;

/// Runs of the arena that a shard has lent, in the order of the volume's bytes.
///
/// They are pinned: the shard neither changes nor reuses them until they come back, by
/// [`ShardRequest::Release`], [`ShardRequest::Write`] or [`ShardRequest::Cancel`]. Not `Clone`, so
/// that they come back once. Dropping runs would pin them until the target ends, so that is a bug:
/// it panics in debug builds, and is logged as an error in others. [`ArenaEnds`] says that the
/// arena goes away as well. `Segments::default()` has no runs and may be dropped.
#[must_use = "lent slots stay pinned until they are given back"]
#[derive(Debug, PartialEq, Eq)]
pub struct Segments {
    runs: Runs,
    // Whose peers keep the runs.
    session: SessionIndex,
}

// One run, the most frequent by far, needs no list.
#[derive(Debug, PartialEq, Eq)]
enum Runs {
    One(Segment),
    // None, or more than one.
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

    /// Of a list, lent to a session. The second is the list, if its memory is not needed.
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

    /// The run came back, and is in no list.
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

    /// Calls `act` for each run of the bytes `from..to`: with the run, and with the place in these
    /// bytes at which the run begins.
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
    // Guards of this thread.
    static ARENAS_END: Cell<u32> = const { Cell::new(0) };
}

/// While this guard lives, its thread may drop lent memory: all shards of the arena go away, so
/// nothing is left to give the memory back to.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct ArenaEnds(PhantomData<*const ()>);

impl ArenaEnds {
    /// From now on, until the guard is dropped.
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

/// Names a part of a command at the poll group that asks.
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
    /// Which part of it.
    pub part: u8,
}

impl PartToken {
    /// What a poll group asks its own shard for by order of control, and not for a command. No
    /// connection has this name.
    #[must_use]
    pub(crate) const fn of_control(group: u16, number: u16) -> Self {
        let connection = ConnectionId { index: u16::MAX, generation: u32::MAX };
        Self { group, session: SessionIndex::NONE, connection, tag: Tag(number), part: 0 }
    }

    /// The number of [`Self::of_control`]; `None` for what a command asks for.
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
    /// The bytes, pinned. Answered by [`ShardReply::Read`].
    Read {
        /// Who asks.
        from: PartToken,
        /// Whose bytes.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Memory for a write. Answered by [`ShardReply::Reserved`].
    Reserve {
        /// Who asks.
        from: PartToken,
        /// Whose bytes.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// The data is in the reserved memory: write it. Answered by [`ShardReply::Done`].
    Write {
        /// Who asks.
        from: PartToken,
        /// The reservation, which ends.
        job: JobId,
        /// Its memory.
        memory: Segments,
        /// Answer only when it is durable.
        fua: bool,
    },
    /// The data of a reservation will not come: the reservation ends.
    Cancel {
        /// The reservation.
        job: JobId,
        /// Its memory.
        memory: Segments,
    },
    /// Slots that were lent for a read are not needed any more.
    Release {
        /// What was lent.
        memory: Segments,
    },
    /// The bytes may be read soon. A hint: nothing waits for it, and no error is reported.
    Prefetch {
        /// Whose bytes.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Hand every block to the store that was dirty when this came. Durable only after a
    /// [`Self::Sync`]. Answered by [`ShardReply::Done`].
    Flush {
        /// Who asks.
        from: PartToken,
        /// Whose blocks.
        volume: VolumeIndex,
    },
    /// Make durable what the store has. Answered by [`ShardReply::Done`].
    Sync {
        /// Who asks.
        from: PartToken,
        /// Whose store.
        volume: VolumeIndex,
    },
    /// Discard or zero a range, all of which is this shard's unless `held`. Answered by
    /// [`ShardReply::Done`].
    Change {
        /// Who asks.
        from: PartToken,
        /// Whose bytes.
        volume: VolumeIndex,
        /// [`OpKind::Discard`] or [`OpKind::WriteZeroes`].
        kind: OpKind,
        /// Every shard holds the range for the asker: only the store is to be told.
        held: bool,
    },
    /// Let no other job work on a range of the store until [`Self::Unhold`]. Reads that the cache
    /// can answer go on. Answered by [`ShardReply::Held`].
    Hold {
        /// Who asks.
        from: PartToken,
        /// Whose bytes.
        volume: VolumeIndex,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Ends a hold. Answered by [`ShardReply::Done`]: from then on no read finds data that the
    /// change made old.
    Unhold {
        /// Who asks.
        from: PartToken,
        /// The hold.
        job: JobId,
        /// What happened to the store during the hold.
        outcome: Changed,
    },
}

/// How a discard or zeroing ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// The range of the store was changed: what is cached of it is old.
    Yes,
    /// It failed: the store's bytes are unknown.
    Unknown,
    /// It was not tried.
    No,
}

/// Whose lent slots should come back to a shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlotsOf {
    /// Everybody's.
    All,
    /// Those of the sessions of some hosts.
    Hosts(Box<[HostIndex]>),
}

impl SlotsOf {
    /// Whether those of the sessions of a host are among them.
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
    /// To [`ShardRequest::Read`].
    Read {
        /// Who asked.
        to: PartToken,
        /// The bytes, or the store's errno.
        result: Result<Segments, Errno>,
        /// What it waited for.
        spent: Spent,
    },
    /// To [`ShardRequest::Reserve`].
    Reserved {
        /// Who asked.
        to: PartToken,
        /// The reservation.
        job: JobId,
        /// Where the data goes.
        memory: Segments,
    },
    /// To [`ShardRequest::Hold`].
    Held {
        /// Who asked.
        to: PartToken,
        /// The hold.
        job: JobId,
    },
    /// To the others.
    Done {
        /// Who asked.
        to: PartToken,
        /// The store's errno, if it failed.
        result: Result<(), Errno>,
        /// What it waited for.
        spent: Spent,
    },
}

impl ShardReply {
    /// What the shard did for it, as far as that is known yet.
    #[inline]
    pub(crate) fn spent(&self) -> Spent {
        match self {
            Self::Read { spent, .. } | Self::Done { spent, .. } => *spent,
            Self::Reserved { .. } | Self::Held { .. } => Spent::default(),
        }
    }

    /// Who asked.
    #[must_use]
    pub(crate) fn to(&self) -> PartToken {
        match self {
            Self::Read { to, .. }
            | Self::Reserved { to, .. }
            | Self::Held { to, .. }
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
    fn lent_memory_that_is_dropped_is_a_bug() {
        drop(run());
    }

    #[test]
    fn what_was_given_back_or_never_lent_is_dropped_quietly() {
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
