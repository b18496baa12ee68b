//! Messages between control and a data thread.

use std::sync::Arc;

use rblk_fabric::{AcceptParams, MemoryRegion, Poller};
use rblk_protocol::{AccessMode, CommandCapsule, Epoch, Status, Tag};

use super::slow::SlowIo;
use crate::cache::{StoreFailure, Unsaved};
use crate::data::connection::{ConnectionParams, EndedMemory};
use crate::data::poll_group::trace_ring::TraceRing;
use crate::store::backing::Backing;
use crate::volume::Volume;
use crate::volume::counts::VolumeStats;
use crate::volume::ids::{AdmissionId, ConnectionId, HostIndex, SessionIndex, VolumeIndex};
use crate::volume::limits::Limiter;

/// Memory of a poll group as one device knows it, which all its connections send from, and where
/// what they READ lands. Clones name the same registrations. A device whose connections have
/// [memory of their own](crate::data::connection::BounceMemory) for that (iWARP) knows none.
#[derive(Clone, Debug)]
pub struct PollerMemory {
    /// The poll group's arena.
    pub arena: Arc<MemoryRegion>,
    /// Zeros, as long as the largest read.
    pub zeros: Arc<MemoryRegion>,
    /// Memory volumes, by index.
    pub volumes: Vec<(VolumeIndex, Arc<MemoryRegion>)>,
}

/// What every poll group is told of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A session opened a volume.
    Open {
        /// The session.
        session: SessionIndex,
        /// The volume.
        volume: VolumeIndex,
        /// How.
        mode: AccessMode,
    },
    /// A session closed a volume, or lost it: later commands are refused.
    Close {
        /// The session.
        session: SessionIndex,
        /// The volume.
        volume: VolumeIndex,
        /// What later commands are told.
        refusal: Status,
    },
    /// End every connection of a session with an epoch below `before`. Each reports
    /// [`FromGroup::ConnectionGone`] when nothing of it is in use any more.
    EndConnections {
        /// The session.
        session: SessionIndex,
        /// Epochs below this.
        before: Epoch,
    },
    /// A session is of that host.
    Host {
        /// The session.
        session: SessionIndex,
        /// Its host.
        host: HostIndex,
    },
    /// Forget a session; its connections are gone.
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
pub enum Step {
    /// The next run will know that hosts may write to it as it will be.
    Record,
    /// The next run will know that what is not at risk by the volume as it is now was made durable.
    Lower,
    /// The file has the size of the volume.
    Store,
    /// The file is as long as before, unless something was written behind that.
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
    /// Serve another device, or one again whose CQ broke.
    AddPoller {
        /// Its place: the index of the device. It is empty.
        place: usize,
        /// The CQ and its QPs.
        poller: Box<dyn Poller>,
        /// Our memory there, if the device knows it.
        memory: Option<PollerMemory>,
    },
    /// Serve another volume.
    AddVolume {
        /// The volume.
        volume: Arc<Volume>,
        /// Its file, for volumes with a store.
        backing: Option<Arc<Backing>>,
        /// Where this poll group tells of it.
        stats: Arc<VolumeStats>,
        /// Its memory, for volumes in memory, as the devices know it, by their places.
        registered: Vec<(usize, Arc<MemoryRegion>)>,
        /// The step that this is, [`Step::Add`]; none: hosts may open it at once.
        step: Option<StepTicket>,
    },
    /// Do a step of the change of a volume, from [`Step::Grow`] on. A step before it that is not
    /// done is given up.
    Step {
        /// To name in the answer.
        ticket: StepTicket,
        /// The volume as it is after the step.
        volume: Arc<Volume>,
        /// What to do.
        step: Step,
    },
    /// Make durable what hosts wrote to a volume so far, while it is served. Several at a time.
    Settle {
        /// To name in the answer.
        ticket: SettleTicket,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Serve another connection: post its RECVs, then accept it.
    AddConnection {
        /// Index of the device's poller.
        poller: usize,
        /// The prepared QP.
        connection: rblk_fabric::Connection,
        /// What it is.
        params: Box<ConnectionParams>,
        /// The answer to the peer.
        accept: AcceptParams,
    },
    /// Tell this ring of slow commands, or (`None`) none any more.
    Trace(Option<Arc<TraceRing>>),
    /// What concerns a session, and all poll groups alike.
    Notice(Notice),
    /// The QP of a connection that [ended](FromGroup::Ended) is destroyed: what was lent to its
    /// device is free.
    Destroyed {
        /// The connection.
        connection: ConnectionId,
    },
    /// The LOGIN of an admin connection was accepted: from now on it is of a session, and has no
    /// deadline.
    Adopt {
        /// The connection.
        connection: ConnectionId,
        /// Its session.
        session: SessionIndex,
        /// Its epoch.
        epoch: Epoch,
        /// It ends when it says nothing for longer.
        silence: std::time::Duration,
    },
    /// The host of a session may have so much per second from now on, all its sessions together.
    LimitHost {
        /// The session.
        session: SessionIndex,
        /// None: as much as comes.
        limits: Option<Arc<Limiter>>,
    },
    /// End a connection soon, when the answers before are sent.
    Expel {
        /// The connection.
        connection: ConnectionId,
    },
    /// End a connection now, which has proven nothing: its place went to another one.
    Evict {
        /// Its name for control. It may have ended meanwhile.
        admission: AdmissionId,
    },
    /// Answer an admin command.
    Reply {
        /// Its connection.
        connection: ConnectionId,
        /// Its tag.
        tag: Tag,
        /// Outcome.
        status: Status,
        /// Value of the response.
        value: u32,
        /// Written to the command's descriptor first; at most a reply area.
        payload: Vec<u8>,
    },
    /// End all connections, make everything durable, and leave the thread; at the latest when the
    /// time for that is over ([`Tuning`](crate::data::poll_group::group_thread::Tuning)).
    Stop,
}

/// Data thread to control.
#[derive(Debug)]
pub enum FromGroup {
    /// An admin command arrived.
    Admin {
        /// Which poll group to answer.
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
    /// An I/O connection has proven in its self-test that it is of its session. Told once, and
    /// before its end.
    Proven {
        /// Its poll group.
        group: usize,
        /// The connection.
        connection: ConnectionId,
        /// Its name for control.
        admission: AdmissionId,
    },
    /// A connection ended and nothing of it is in use any more: no command, no RDMA, no store I/O.
    ConnectionGone {
        /// Its name for control.
        admission: AdmissionId,
        /// The session, as far as the poll group knew.
        session: SessionIndex,
        /// What it was.
        kind: rblk_protocol::ConnectionKind,
        /// Its epoch.
        epoch: Epoch,
        /// The QP, to be destroyed by control; `None` when it could not even be attached, or is
        /// destroyed.
        connection: Option<rblk_fabric::Connection>,
        /// Its memory, to be freed after the QP.
        memory: Box<EndedMemory>,
        /// Why, for the log.
        reason: &'static str,
    },
    /// A connection ended. Destroy its QP, and then tell this poll group by [`ToGroup::Destroyed`]:
    /// until then it keeps what the device might still touch, and the connection is not gone.
    Ended {
        /// The poll group.
        group: usize,
        /// The connection.
        connection: ConnectionId,
        /// The QP, in the error state.
        qp: Option<rblk_fabric::Connection>,
    },
    /// A CQ broke, or its device is gone: it takes no connection any more, and those that it had
    /// end. Told once.
    PollerBroken {
        /// The poll group.
        group: usize,
        /// The device's place.
        poller: usize,
    },
    /// Every connection of a CQ that broke is buried: its place is empty.
    PollerGone {
        /// The poll group.
        group: usize,
        /// The device's place.
        place: usize,
        /// The CQ, to be destroyed by control.
        poller: Box<dyn Poller>,
        /// Our memory there, to be deregistered after the CQ.
        memory: Option<PollerMemory>,
    },
    /// A sync of a volume's store failed: writes that were acknowledged may be lost. Told once. The
    /// flushes that failed of it wait for [`Backing::loss_noted`].
    LostWrites {
        /// The volume.
        volume: VolumeIndex,
        /// Its store.
        backing: Arc<Backing>,
    },
    /// A store began to fail operations. More of them in the next seconds are not told.
    StoreFailed(StoreFailure),
    /// A command took longer than the administrator wants to see.
    SlowIo {
        /// The poll group.
        group: usize,
        /// The command.
        slow: SlowIo,
    },
    /// A [`ToGroup::Step`] is done, or cannot be.
    Stepped {
        /// Which poll group.
        group: usize,
        /// The step.
        ticket: StepTicket,
        /// Why it cannot be.
        result: Result<(), String>,
    },
    /// A [`ToGroup::Settle`] has ended.
    Settled {
        /// Which poll group.
        group: usize,
        /// Which settle.
        ticket: SettleTicket,
        /// Why the store does not have everything durably.
        result: Result<(), String>,
    },
    /// After [`ToGroup::Stop`]: the stores of these volumes refuse what is dirty in its shard. It
    /// is tried again. Told when the volumes or their bytes change; empty: all of it is in the
    /// stores.
    Refused {
        /// Which poll group.
        group: usize,
        /// The volumes.
        unsaved: Vec<Unsaved>,
    },
    /// The thread left after [`ToGroup::Stop`], or broke.
    Stopped {
        /// Which poll group.
        group: usize,
        /// The volumes of which something that was acknowledged is not durable, or not known to be,
        /// in its shard. All others are safe. With `error` nothing is known of any volume.
        unsaved: Vec<Unsaved>,
        /// What broke, if something did.
        error: Option<String>,
    },
}
