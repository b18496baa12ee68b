//! Messages between control and a data thread.

use std::sync::Arc;

use rblk_fabric::{AcceptParams, MemoryRegion, Poller};
use rblk_protocol::{AccessMode, CommandCapsule, Epoch, Status, Tag};

use super::slow::SlowIo;
use crate::cache::{StoreFailure, Unsaved};
use crate::data::connection::{ConnectionParams, EndedMemory};
use crate::data::poll_group::trace_ring::TraceRing;
use crate::store::OpenStore;
use crate::store::backing::Backing;
use crate::volume::Volume;
use crate::volume::ids::{AdmissionId, ConnectionId, HostIndex, SessionIndex, VolumeIndex};
use crate::volume::limits::Limiter;
use rblk_operate::target::volume_counts::VolumeStats;

/// Memory of a poll group, registered with one device. All connections of the device send from it
/// and READ into it. Clones name the same registrations. A device whose connections have [memory of
/// their own](crate::data::connection::BounceMemory) (iWARP) has none.
#[derive(Clone, Debug)]
pub struct PollerMemory {
    /// The poll group's arena.
    pub arena: Arc<MemoryRegion>,
    /// Zeros, as long as the largest read.
    pub zeros: Arc<MemoryRegion>,
    /// Memory volumes, by index.
    pub volumes: Vec<(VolumeIndex, Arc<MemoryRegion>)>,
}

/// A notice about a session, for every poll group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A session opened a volume.
    Open {
        /// The session.
        session: SessionIndex,
        /// The volume.
        volume: VolumeIndex,
        /// The access mode.
        mode: AccessMode,
    },
    /// A session closed a volume, or lost it: later commands are refused.
    Close {
        /// The session.
        session: SessionIndex,
        /// The volume.
        volume: VolumeIndex,
        /// The status for later commands.
        refusal: Status,
    },
    /// Ends every connection of a session with an epoch below `before`. Each reports
    /// [`FromGroup::ConnectionGone`] when none of its resources is in use any more.
    EndConnections {
        /// The session.
        session: SessionIndex,
        /// Ends epochs below this.
        before: Epoch,
    },
    /// Ends every connection of one epoch of a session, as [`Self::EndConnections`] does.
    EndEpoch {
        /// The session.
        session: SessionIndex,
        /// The epoch.
        epoch: Epoch,
    },
    /// A session belongs to this host.
    Host {
        /// The session.
        session: SessionIndex,
        /// The host.
        host: HostIndex,
    },
    /// Forgets a session; its connections are gone.
    ForgetSession {
        /// The session.
        session: SessionIndex,
    },
}

/// The number of a step. Control counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepTicket(pub u64);

/// The number of a settle. Control counts them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SettleTicket(pub u64);

/// A step of the change of a volume. Control orders one at a time and waits until it is done
/// everywhere. Each variant says what holds then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VolumeStep {
    /// The next run will know that hosts may write to it as it will be.
    Record,
    /// The next run will know the smaller risk of the volume as it is now: all other writes are
    /// durable.
    Lower,
    /// The file has the size of the volume.
    Store,
    /// The file is as long as before, unless writes have reached past that length.
    CutBack,
    /// Its file system can clone files.
    Probe,
    /// Its file is cloned.
    Clone,
    /// Every poll group serves another volume ([`ToGroup::AddVolume`]), which no command can name
    /// before [`Self::Access`].
    Add,
    /// Every shard knows the new size, which is larger.
    Grow,
    /// Every poll group checks commands against the volume as it is. Writes that were held go on.
    Access,
    /// No new write begins before [`Self::Access`], and none is in flight. Reads go on.
    Hold,
    /// No poll group takes commands for it. The connections of all sessions that ever opened it
    /// have ended, and nothing of them is in use any more.
    Close,
    /// What is dirty is in the store, durably. Without [`Self::Close`] or [`Self::Hold`] before it:
    /// what was dirty when it began.
    WriteBack,
    /// After [`Self::Close`]: nothing works on it in any shard.
    Quiet,
    /// After [`Self::Quiet`]: every shard has the new size and cache mode, and nothing of the
    /// volume in its cache.
    Reshape,
    /// After [`Self::Quiet`]: every poll group has forgotten it and its store.
    Drop,
    /// Every poll group has given it up, whatever works on it: what is dirty is lost. What its
    /// store still does ends in memory that nothing else uses before that, and then its store is
    /// closed.
    Abandon,
}

/// Control to data thread.
#[derive(Debug)]
pub enum ToGroup {
    /// Serves another device, or a device again after its CQ broke.
    AddPoller {
        /// The place, which is the device's index. It must be empty.
        place: usize,
        /// The CQ and its QPs.
        poller: Box<dyn Poller>,
        /// This group's memory there, if it is registered with the device.
        memory: Option<PollerMemory>,
    },
    /// Serves another volume.
    AddVolume {
        /// The volume.
        volume: Arc<Volume>,
        /// Its store, if it has one.
        backing: Option<OpenStore>,
        /// This poll group's counters of the volume.
        stats: Arc<VolumeStats>,
        /// For a volume in memory: its registrations, each with the place of its device.
        registered: Vec<(usize, Arc<MemoryRegion>)>,
        /// The step that this is, [`VolumeStep::Add`]; none: hosts may open it at once.
        step: Option<StepTicket>,
    },
    /// Do a step of the change of a volume, from [`VolumeStep::Grow`] on. A step before it that is
    /// not done is given up.
    Step {
        /// The number for the answer.
        ticket: StepTicket,
        /// The volume as it is after the step.
        volume: Arc<Volume>,
        /// The step.
        step: VolumeStep,
    },
    /// The store of a volume is lost: ends the connections of its hosts, and answers nothing more
    /// for it. The answer is [`FromGroup::KnowsLoss`].
    Lost(VolumeIndex),
    /// Every poll group knows that the store of a volume is lost: its ops may end, with errors that
    /// no connection takes to a host. [`VolumeStep::Abandon`] follows.
    LetGo(VolumeIndex),
    /// Makes durable the data that hosts wrote to a volume so far, while it is served. Several may
    /// run at a time.
    Settle {
        /// The number for the answer.
        ticket: SettleTicket,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Serves another connection: posts its RECVs, then accepts it.
    AddConnection {
        /// Index of the device's poller.
        poller: usize,
        /// The prepared QP.
        connection: rblk_fabric::Connection,
        /// Its parameters.
        params: Box<ConnectionParams>,
        /// The answer to the peer.
        accept: AcceptParams,
    },
    /// Fills this ring with slow commands, or none (`None`).
    Trace(Option<Arc<TraceRing>>),
    /// A notice about a session, the same for all poll groups.
    Notice(Notice),
    /// The QP of an [ended](FromGroup::Ended) connection is destroyed: the memory lent to its
    /// device is free.
    Destroyed {
        /// The connection.
        connection: ConnectionId,
    },
    /// The LOGIN of an admin connection was accepted: the connection belongs to a session now, and
    /// has no deadline any more.
    Adopt {
        /// The connection.
        connection: ConnectionId,
        /// Its session.
        session: SessionIndex,
        /// Its epoch.
        epoch: Epoch,
        /// The connection ends after a longer silence.
        silence: std::time::Duration,
    },
    /// Sets the limits per second of a session's host, for all its sessions together.
    LimitHost {
        /// The session.
        session: SessionIndex,
        /// None: unlimited.
        limits: Option<Arc<Limiter>>,
    },
    /// Ends a connection soon, after its earlier answers are sent.
    Expel {
        /// The connection.
        connection: ConnectionId,
    },
    /// Ends a connection without a proof at once: another connection took its place.
    Evict {
        /// The connection's name for control. The connection may have ended meanwhile.
        admission: AdmissionId,
    },
    /// Answers an admin command.
    Reply {
        /// Its connection.
        connection: ConnectionId,
        /// Its tag.
        tag: Tag,
        /// Outcome.
        status: Status,
        /// Value of the response.
        value: u32,
        /// Data to write first to the command's descriptor; at most a reply area.
        payload: Vec<u8>,
    },
    /// Ends all connections, makes all data durable, and leaves the thread, at the latest after the
    /// stop timeout ([`Tuning`](crate::data::poll_group::group_thread::Tuning)).
    Stop,
}

/// Data thread to control.
#[derive(Debug)]
pub enum FromGroup {
    /// An admin command arrived.
    Admin {
        /// The poll group to answer.
        group: usize,
        /// Its connection.
        connection: ConnectionId,
        /// Its name for control.
        admission: AdmissionId,
        /// The command.
        command: CommandCapsule,
        /// Its in-capsule data.
        body: Vec<u8>,
    },
    /// The self-test of an I/O connection proved its session. Sent once, before the connection's
    /// end.
    Proven {
        /// Its poll group.
        group: usize,
        /// The connection.
        connection: ConnectionId,
        /// Its name for control.
        admission: AdmissionId,
    },
    /// A connection ended, and has no command, no RDMA and no store I/O left.
    ConnectionGone {
        /// Its name for control.
        admission: AdmissionId,
        /// The session, as far as the poll group knows it.
        session: SessionIndex,
        /// The kind of connection.
        kind: rblk_protocol::ConnectionKind,
        /// Its epoch.
        epoch: Epoch,
        /// The QP, for control to destroy; `None` when it could not be attached, or is already
        /// destroyed.
        connection: Option<rblk_fabric::Connection>,
        /// Its memory, to free after the QP.
        memory: Box<EndedMemory>,
        /// The reason, for the log.
        reason: &'static str,
    },
    /// A connection ended. Control destroys its QP, and then sends [`ToGroup::Destroyed`] to this
    /// poll group: until then the group keeps the memory that the device might still touch, and the
    /// connection is not gone.
    Ended {
        /// The poll group.
        group: usize,
        /// The connection.
        connection: ConnectionId,
        /// The QP, in the error state.
        qp: Option<rblk_fabric::Connection>,
    },
    /// A CQ broke, or its device is gone: the CQ takes no new connection, and its connections end.
    /// Sent once.
    PollerBroken {
        /// The poll group.
        group: usize,
        /// The device's place.
        poller: usize,
    },
    /// Every connection of a broken CQ was removed: the CQ's place is empty.
    PollerGone {
        /// The poll group.
        group: usize,
        /// The device's place.
        place: usize,
        /// The CQ, for control to destroy.
        poller: Box<dyn Poller>,
        /// This group's memory there, to deregister after the CQ.
        memory: Option<PollerMemory>,
    },
    /// A sync of a volume's store failed: acknowledged writes may be lost. Sent once. The failed
    /// flushes wait for [`Backing::loss_noted`].
    LostWrites {
        /// The volume.
        volume: VolumeIndex,
        /// Its store.
        backing: Arc<Backing>,
    },
    /// The poll group answers nothing more for a volume with a lost store ([`ToGroup::Lost`]).
    KnowsLoss {
        /// The poll group.
        group: usize,
        /// The volume.
        volume: VolumeIndex,
    },
    /// A store began to fail operations. Failures in the next seconds are not reported.
    StoreFailed(StoreFailure),
    /// A command took longer than the administrator's threshold.
    SlowIo {
        /// The poll group.
        group: usize,
        /// The command.
        slow: SlowIo,
    },
    /// A [`ToGroup::Step`] finished or failed.
    Stepped {
        /// The poll group.
        group: usize,
        /// The step.
        ticket: StepTicket,
        /// The reason of a failure.
        result: Result<(), String>,
    },
    /// A [`ToGroup::Settle`] ended.
    Settled {
        /// The poll group.
        group: usize,
        /// The settle.
        ticket: SettleTicket,
        /// The reason why the store does not have all data durably.
        result: Result<(), String>,
    },
    /// After [`ToGroup::Stop`]: the stores of these volumes refuse dirty blocks of the group's
    /// shard, which retries. Sent when the volumes or their bytes change; empty when all blocks are
    /// in the stores.
    Refused {
        /// The poll group.
        group: usize,
        /// The volumes.
        unsaved: Vec<Unsaved>,
    },
    /// The thread ended after [`ToGroup::Stop`], or failed.
    Stopped {
        /// The poll group.
        group: usize,
        /// The volumes with acknowledged data in the group's shard that is not durable, or not
        /// known to be. All others are safe. With `error`, the state of every volume is unknown.
        unsaved: Vec<Unsaved>,
        /// The failure, if any.
        error: Option<String>,
    },
}
