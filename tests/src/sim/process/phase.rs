//! [`Trying`]: the progress of one attempt to reach the target.

use std::sync::Arc;
use std::time::Instant;

use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::durability::retain::ReplayLog;
use rblk_initiator::engine::path::Path;
use rblk_initiator::volume::course::{Attempt, Failure};
use rblk_initiator::volume::replay::Replayer;
use rblk_initiator::volume::resolve_unflushed::Judgement;
use rblk_protocol::{Epoch, LoginReply, OpenReply, SessionId, VolumeHandle};

use crate::sim::admin::AdminEnd;

#[derive(Debug)]
pub(super) enum Phase {
    // The connect request is under way.
    Knock { due: u64 },
    // The connect request has no answer.
    Unanswered,
    Login,
    Open,
    Settle(Box<Settling>),
    // The next queue's connect request is under way.
    Queue { due: u64, paths: Vec<(Path, Vec<FaultyWire>)> },
}

#[derive(Debug)]
pub(super) struct Trying {
    pub(super) attempt: Attempt,
    pub(super) take_over: bool,
    pub(super) since: Instant,
    pub(super) phase: Phase,
    pub(super) admin: Option<AdminEnd>,
    pub(super) login: Option<LoginReply>,
    pub(super) volume: Option<OpenReply>,
}

/// The state of an attempt.
#[derive(Debug)]
pub(super) enum Going {
    On,
    Failed(Failure),
    Fenced(String),
    Changed(&'static str),
    Arrived(Vec<(Path, Vec<FaultyWire>)>),
}

#[derive(Debug)]
pub(super) struct Settling {
    pub(super) replayer: Replayer<Arc<ReplayLog>>,
    pub(super) judgement: Judgement,
    pub(super) wires: Vec<FaultyWire>,
    pub(super) begun: bool,
}

/// The end of the I/O connections of a session that has the volume.
pub(super) struct Destination {
    pub(super) address: usize,
    pub(super) session: SessionId,
    pub(super) epoch: Epoch,
    pub(super) volume: VolumeHandle,
}

impl Trying {
    /// Where its I/O connections go, once it has the volume.
    pub(super) fn destination(&self) -> Option<Destination> {
        let (login, volume, address) = (self.login?, self.volume?.handle, self.attempt.address);
        Some(Destination { address, session: login.session, epoch: login.epoch, volume })
    }
}
