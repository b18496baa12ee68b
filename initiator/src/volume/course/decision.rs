//! Inputs and outputs of a [`Course`](super::Course).

use std::time::Duration;

use rblk_protocol::{Epoch, Generation, InstanceId, Name, OpenReply, SessionId, VolumeFlags};

/// The fixed configuration of a course.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Number of addresses, at least one. They are named by index, in the order of preference.
    pub addresses: usize,
    /// Silence after which a path counts as lost.
    pub detect: Duration,
    /// Time limit of a connect.
    pub connect_timeout: Duration,
    /// First pause between two rounds.
    pub reconnect_delay: Duration,
    /// Time until requests for a lost target fail; without a limit if absent.
    pub fail_after: Option<Duration>,
    /// Time between two tries of a better address; zero never goes back.
    pub failback: Duration,
}

impl Rules {
    /// Time limit of each step of a try: the next address must not wait long for a try at a dead
    /// one.
    #[must_use]
    pub fn try_limit(&self) -> Duration {
        self.connect_timeout.min(self.detect.max(Duration::from_secs(1)))
    }
}

/// A mount's facts about its volume and target: enough to reconnect, also for another process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The session, and the highest epoch named in it; `None` when it is gone.
    pub resume: Option<(SessionId, Epoch)>,
    /// The last OPEN reply: a try names its generation.
    pub volume: OpenReply,
    /// The run of the target that served the volume last.
    pub instance: InstanceId,
    /// The target's name.
    pub target_name: Name,
    /// The host that fenced this mount, and holds the volume.
    pub fenced: Option<String>,
}

impl Facts {
    /// Whether the volume has a flag.
    pub(crate) fn has(&self, flag: VolumeFlags) -> bool {
        self.volume.flags.has(flag)
    }

    /// Bytes of the volume.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.volume.blocks.bytes(self.volume.block_size).unwrap_or(0)
    }
}

/// The state of a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CourseState {
    /// Requests are served.
    Connected,
    /// Requests wait.
    Lost,
    /// Requests fail until the target is back.
    Failing,
    /// The target serves the volume no longer: requests fail until it does again.
    Removed,
    /// Another host holds the volume: every request fails, permanently.
    Fenced,
    /// The volume was replaced by a different one: every request fails, permanently.
    Changed,
}

/// An act that the caller carries out now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// Connect, log in, open, do as [`OpenVerdict`] says, connect the queues. Call
    /// `Course::logged_in`, `Course::opened` or `Course::fenced`, and at last `Course::arrived` or
    /// `Course::failed`. There is one try at a time.
    Try(Attempt),
    /// Fail requests until the next [`Arrival`].
    Fail,
    /// Hold new requests until the next path. Call `Course::quiet` when every sent request is
    /// answered.
    Hold,
    /// End the session and the paths. The target counts as lost now, and a try is due.
    Leave(Leaving),
    /// Check whether this run of the target answers at that address, and call `Course::probed`.
    Probe(usize),
}

/// A try to reconnect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attempt {
    /// The index of its address.
    pub address: usize,
    /// The session and the epoch to raise it to; `None` begins a new session.
    pub resume: Option<(SessionId, Epoch)>,
    /// The generation to name in OPEN.
    pub generation: Generation,
    /// Time limit of each step, except for a LOGIN or OPEN that waits for the end of older
    /// connections.
    pub limit: Duration,
}

/// The reason to leave a target that lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leaving {
    /// The target drains.
    Drain,
    /// Another program takes the target's place.
    Upgrade,
    /// A better address answers again.
    Back {
        /// The index of the address.
        to: usize,
    },
}

/// The kind of a loss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LossKind {
    /// A connection died, or was silent.
    Path,
    /// The path is remade with fewer features.
    Renegotiate,
}

/// The reason for a failed try.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The target does not know the session, or knows it in a higher epoch: start a new one.
    SessionGone,
    /// Any other reason. The next try may succeed.
    Transient,
}

/// The reply to an OPEN, judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenVerdict {
    /// Connect the queues.
    Go,
    /// First settle the acknowledged writes: the verifier changed.
    ResolveUnflushed,
    /// A different volume answered: the course is over. How it changed.
    Changed(&'static str),
}

/// An address led to another target than the mount's: a mistake of the configuration.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "another target answers there: `{found}`, and the volume is of `{expected}`; if it is the same target under a new \
     name, start it with `--name {expected}`"
)]
pub struct OtherTarget {
    /// The name of that target.
    pub found: String,
    /// The mount's target.
    pub expected: String,
}

/// The target is back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// The index of its address.
    pub address: usize,
    /// Duration of the loss.
    pub stalled: Duration,
    /// Requests failed before, for any reason, and may wait again.
    pub was_failing: bool,
    /// The verifier changed.
    pub verifier_changed: bool,
}
