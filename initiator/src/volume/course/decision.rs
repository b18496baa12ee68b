//! What goes into a [`Course`](super::Course), and what comes out.

use std::time::Duration;

use rblk_protocol::{Epoch, Generation, InstanceId, Name, OpenReply, SessionId, VolumeFlags};

/// The configuration of a course. It does not change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Addresses, in the order of preference: they are named by index. At least one.
    pub addresses: usize,
    /// Silence after which a path counts as lost.
    pub detect: Duration,
    /// How long a try to connect may take at most.
    pub connect_timeout: Duration,
    /// First pause between two rounds.
    pub reconnect_delay: Duration,
    /// How long requests wait for a lost target before they fail; without a limit if absent.
    pub fail_after: Option<Duration>,
    /// How often a better address than the one in use is tried; zero never goes back.
    pub failback: Duration,
}

impl Rules {
    /// How long each step of a try may take: the next address must not wait long for a try at a
    /// dead one.
    #[must_use]
    pub fn try_limit(&self) -> Duration {
        self.connect_timeout.min(self.detect.max(Duration::from_secs(1)))
    }
}

/// What a mount knows of its volume and its target: enough to reconnect, also for another process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The session, and the highest epoch that was named in it; `None` when it is gone.
    pub resume: Option<(SessionId, Epoch)>,
    /// The last OPEN that was answered: its generation is the one to name.
    pub volume: OpenReply,
    /// The target's run when the volume was last served.
    pub instance: InstanceId,
    /// The target's name.
    pub target_name: Name,
    /// The host that holds the volume instead: this mount is fenced.
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

/// Where the mount stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
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
    /// The volume became another one: every request fails, permanently.
    Changed,
}

/// Something to be done now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// Connect, log in, open, settle if told so, connect the queues. Tell `Course::logged_in`,
    /// `Course::opened` or `Course::fenced`, and at last `Course::arrived` or `Course::failed`.
    /// There is one at a time.
    Try(Attempt),
    /// Requests fail from now on, until an [`Arrival`] says otherwise.
    Fail,
    /// The queues send nothing new from now on, until the next path. Tell `Course::quiet` when
    /// nothing that was sent is unanswered.
    Hold,
    /// End the session and the paths. The target counts as lost now, and a try is due.
    Leave(Leaving),
    /// See whether the same run of the target answers at that address, and tell `Course::probed`.
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
    /// How long each step may take, except for a LOGIN or OPEN that waits for the end of older
    /// connections.
    pub limit: Duration,
}

/// Why a mount leaves a target that lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leaving {
    /// It drains.
    Drain,
    /// Another program takes its place.
    Upgrade,
    /// A better address answers again.
    Back {
        /// Its index.
        to: usize,
    },
}

/// How the target was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// A connection died, or did not answer.
    Path,
    /// The path is to be made anew with fewer features.
    Renegotiate,
}

/// Why a try failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The target does not know the session, or knows it in a higher epoch: a new one is needed.
    SessionGone,
    /// Anything else. The next try may succeed.
    Transient,
}

/// What the answer to an OPEN means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Connect the queues.
    Go,
    /// Settle what became of acknowledged writes first: the verifier is another one.
    Settle,
    /// It is another volume: the course is over. How it changed.
    Changed(&'static str),
}

/// An address led to another target than the mount's: a mistake of the configuration.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "another target answers there: `{found}`, and the volume is of `{expected}`; if it is the same target under a new \
     name, start it with `--name {expected}`"
)]
pub struct OtherTarget {
    /// The name there.
    pub found: String,
    /// The mount's target.
    pub expected: String,
}

/// The target is back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// The index of its address.
    pub address: usize,
    /// How long it was lost.
    pub stalled: Duration,
    /// Requests were failing, for whatever reason, and may wait again.
    pub was_failing: bool,
    /// The verifier is another one than before.
    pub verifier_changed: bool,
}
