//! [`Effect`]: an action that core orders from its caller.

use std::sync::Arc;
use std::time::Duration;

use rblk_protocol::{Epoch, Name, Status, Tag};

use crate::data::poll_group::{Notice, SettleTicket, VolumeStep};
use crate::record::holders::HolderRecord;
use crate::store::rbd::image_claim::Wish;
use crate::volume::ids::{AdmissionId, ConnectionId, SessionIndex, VolumeIndex};
use crate::volume::limits::Limiter;

/// The connection of an admin command, which also takes its reply.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ConnectionRef {
    /// The poll group.
    pub group: usize,
    /// The connection there.
    pub connection: ConnectionId,
}

/// The number of an [`Effect::Persist`] or an [`Effect::Prove`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// An action for the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Answer an admin command. Does nothing if the connection is gone by now.
    Reply {
        /// The connection.
        to: ConnectionRef,
        /// The command's tag.
        tag: Tag,
        /// Outcome.
        status: Status,
        /// Value of the response.
        value: u32,
        /// Written to the command's descriptor first.
        payload: Vec<u8>,
    },
    /// The LOGIN of an admin connection was accepted: tell its poll group the session.
    Adopt {
        /// The connection. May be gone by now; then there is nothing to do.
        connection: ConnectionRef,
        /// Its name.
        admission: AdmissionId,
        /// Its session.
        session: SessionIndex,
        /// Its epoch.
        epoch: Epoch,
        /// The connection ends when it is silent for longer.
        silence: Duration,
    },
    /// End a connection that failed its proof, once the replies before are sent.
    Expel {
        /// The connection. May be gone by now; then there is nothing to do.
        connection: ConnectionRef,
    },
    /// End a connection that has proven nothing: its place went to a newer one.
    Evict {
        /// Its name. The connection may be gone by now; then there is nothing to do.
        admission: AdmissionId,
    },
    /// Tell every poll group the limits per second of the host of a session.
    LimitHost {
        /// The session.
        session: SessionIndex,
        /// `None`: no limit.
        limits: Option<Arc<Limiter>>,
    },
    /// Tell every poll group.
    All(Notice),
    /// Make the record durable, in the order of these effects, and then call
    /// [`persisted`](super::Core::persisted), now or later. Before that call, no peer hears of
    /// anything that the next run must know.
    Persist {
        /// To name in that call.
        ticket: Ticket,
        /// The new record.
        record: HolderRecord,
    },
    /// Find out, later than now, that this member still has the image of a volume of the group, and
    /// then call [`proven`](super::Core::proven). A volume has one proof under way at a time.
    Prove {
        /// To name in that call.
        ticket: Ticket,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Claim the image of a volume of the group, and then call
    /// [`claim_ended`](super::Core::claim_ended).
    Claim {
        /// The volume's name.
        name: Name,
        /// Why.
        wish: Wish,
    },
    /// Make durable all writes of hosts to the volume so far, and then call
    /// [`settled`](super::Core::settled).
    Settle {
        /// To name in that call.
        ticket: SettleTicket,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Carry out a step of the alteration of [`altered`](super::Core::altered), and then call
    /// [`stepped`](super::Core::stepped).
    Step(VolumeStep),
    /// The step before has taken too long. Stop waiting for it.
    GiveUpStep,
    /// A removal by force goes on without the store, for this reason.
    GivenUp(String),
    /// The alteration has ended. On an error the volume is as it was.
    Altered(Result<(), String>),
    /// The drain is over: stop every poll group. Comes once.
    StopGroups,
}
