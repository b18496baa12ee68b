//! [`ActivePath`]: a path that an engine works on: its CQ, its lanes, and the lane of each request.

use std::time::{Duration, Instant};

use rblk_fabric::Sge;
use rblk_fabric::{Completion, Poller, QpIndex, WcOpcode, WcStatus};
use rblk_protocol::limits::LANES_MAX;
use rblk_protocol::width::narrow;
use rblk_protocol::{
    CapsuleError, CommandCapsule, Features, Immediate, Mutation, ResponseList, Sequence, Status,
    Tag,
};

use super::PathEnd;
use super::answer::{CommandAnswer, LaneIndex};
use super::beat::Due;
use super::lane::{CompletedWr, Lane};
use super::path::{DeadPath, Path, Tested};
use super::pulse::Pulse;
use super::stats::QueueStats;
use super::terms::PathTerms;
use super::ways::WayIndex;
use super::ways::choice::{WayLoad, WayTerms};

/// The content of a completion.
pub(super) enum LaneArrival {
    /// No answer: SENDs are done.
    None,
    /// A READ was answered by a WRITE_WITH_IMM.
    Immediate(CommandAnswer),
    /// A list of responses, at that offset of the slots.
    Responses { by: LaneIndex, list: ResponseList, at: usize },
}

/// The action due by the heart-beat of a path.
pub(super) enum BeatDue {
    /// Nothing; so many KEEP_ALIVEs were queued.
    Nothing { asked: u64 },
    /// The silence lasts too long: poll for real, even if that takes a system call, and check
    /// again.
    Look { asked: u64 },
    /// The silence has lasted too long.
    Dead,
}

/// A path in use.
pub(super) struct ActivePath {
    poller: Box<dyn Poller>,
    terms: PathTerms,
    // Common to all lanes: no two commands of a path have one number.
    sequence: Sequence,
    // Every lane has passed its self-test.
    ready: bool,
    // Some lane may have WRs to post.
    has_wrs: bool,
    lanes: Box<[Lane]>,
    // By tag, the lane of the last request sent by this path. `NONE` if there is none, or if the
    // tag's last request was sent by the path of another way.
    lane_of: Box<[LaneIndex]>,
}

impl ActivePath {
    /// Takes a path over, with its RECVs and its self-tests ready to be posted. Returns the remains
    /// of a path that cannot be taken over, or does not `fit` the queue.
    pub(super) fn begin(path: Path, fits: bool, now: Instant) -> Result<Self, Box<DeadPath>> {
        let Path { mut poller, connections, proofs, memory, accept, epoch, volume, .. } = path;
        let (lane_bytes, way, way_terms) = (path.lane_bytes, path.way, path.way_terms);
        let lane_of = vec![LaneIndex::NONE; usize::from(accept.depth.get())].into_boxed_slice();
        if let Some(Tested { lanes, sequence }) = path.tested {
            let terms = PathTerms::new(memory, accept, epoch, volume, lane_bytes);
            let terms = terms.of_way(way, way_terms);
            let lanes = lanes.into_iter().enumerate();
            let lanes = lanes.map(|(at, lane)| Lane::tested(at, lane, &terms)).collect();
            let path =
                Self { poller, terms, sequence, ready: true, has_wrs: false, lanes, lane_of };
            return if fits { Ok(path) } else { Err(Box::new(path.end())) };
        }
        let proven = if accept.features.has(Features::AUTH) { connections.len() } else { 0 };
        let fits = fits
            && (1..=usize::from(LANES_MAX)).contains(&connections.len())
            && proofs.len() == proven;
        let mut qps = Vec::with_capacity(connections.len());
        let all = connections.len();
        let mut left = connections.into_iter();
        for connection in left.by_ref() {
            match poller.attach(connection) {
                Ok(qp) => qps.push(qp),
                Err(_) => break,
            }
        }
        if !fits || qps.len() < all {
            for qp in &qps {
                poller.fail(*qp);
            }
            let attached: Vec<_> = qps.iter().filter_map(|qp| poller.detach(*qp)).collect();
            let connections = attached.into_iter().chain(left).collect();
            return Err(Box::new(DeadPath { connections, poller, memory, way }));
        }
        let terms = PathTerms::new(memory, accept, epoch, volume, lane_bytes);
        let terms = terms.of_way(way, way_terms);
        let mut sequence = Sequence(0);
        let lanes = qps.iter().enumerate().map(|(index, qp)| {
            sequence = sequence.next();
            Lane::begin(index, *qp, &terms, sequence, proofs.get(index), now)
        });
        let lanes = lanes.collect();
        Ok(Self { poller, terms, sequence, ready: false, has_wrs: true, lanes, lane_of })
    }

    /// The path for a later queue, once every lane is tested and no WR is queued.
    pub(super) fn into_path(self) -> Path {
        let Self { poller, terms, sequence, lanes, .. } = self;
        let lanes = lanes.into_iter().map(Lane::into_tested).collect();
        terms.into_path(poller, Tested { lanes, sequence })
    }

    /// Ends the path, and returns its remains: the QPs are in the error state.
    pub(super) fn end(self) -> DeadPath {
        let Self { mut poller, terms, lanes, .. } = self;
        let way = terms.way();
        if Mutation::BufferReuseInitiator.is_on() {
            return DeadPath { connections: Vec::new(), poller, memory: terms.into_memory(), way };
        }
        // Fail all lanes first.
        for lane in &lanes {
            poller.fail(lane.qp());
        }
        let connections = lanes.iter().filter_map(|lane| poller.detach(lane.qp())).collect();
        DeadPath { connections, poller, memory: terms.into_memory(), way }
    }

    /// Every lane has passed its self-test: requests may be sent.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    #[inline]
    pub(super) fn terms(&self) -> &PathTerms {
        &self.terms
    }

    /// Its way.
    #[inline]
    pub(super) fn way(&self) -> WayIndex {
        self.terms.way()
    }

    /// What is known of its way.
    pub(super) fn way_terms(&self) -> WayTerms {
        self.terms.way_terms()
    }

    /// What it owes.
    pub(super) fn load(&self) -> WayLoad {
        WayLoad {
            unanswered: self.lanes.iter().map(Lane::awaited).sum(),
            awaited_bytes: self.lanes.iter().map(Lane::awaited_bytes).min().unwrap_or(0),
        }
    }

    /// The CQ of all lanes.
    pub(super) fn poller(&self) -> &dyn Poller {
        &*self.poller
    }

    /// The CQ of all lanes, to post to it and to poll it.
    #[inline]
    pub(super) fn poller_mut(&mut self) -> &mut (dyn Poller + 'static) {
        &mut *self.poller
    }

    /// Whether a lane has waited longer than that for its self-test's answer.
    #[cold]
    #[inline(never)]
    pub(super) fn tests_for_longer(&self, than: Duration, now: Instant) -> bool {
        self.lanes.iter().any(|lane| lane.tests_for_longer(than, now))
    }

    /// Takes a completion. Inlined, so that no arrival is copied.
    #[inline(always)]
    pub(super) fn take(&mut self, completion: &Completion) -> Result<LaneArrival, PathEnd> {
        if completion.status != WcStatus::Success {
            return Err(PathEnd::Lost(completion.status));
        }
        let Some(by) = self.find(completion.qp) else {
            return Err(broken("completion of an unknown QP"));
        };
        let (lane, terms) = self.lane(by);
        let slot = match CompletedWr::of(completion.id) {
            CompletedWr::Send => {
                lane.send_completed();
                return Ok(LaneArrival::None);
            }
            CompletedWr::Recv(slot) => slot,
        };
        if slot >= terms.layout().recv_slots() {
            return Err(broken("completion of an unknown RECV"));
        }
        let at = lane.received(terms, slot);
        self.has_wrs = true;
        let terms = &self.terms;
        match completion.opcode {
            WcOpcode::RecvWithImm => {
                let imm = Immediate::from_bits(completion.imm);
                if !terms.with_imm() || terms.layout().depth.check(imm.tag.0).is_none() {
                    return Err(broken("an immediate that was not agreed or has a bad tag"));
                }
                let (tag, check, status) = (imm.tag, imm.check, Status::Ok);
                let written = completion.byte_len;
                Ok(LaneArrival::Immediate(CommandAnswer {
                    by,
                    tag,
                    status,
                    check,
                    immediate: true,
                    written,
                }))
            }
            WcOpcode::Recv => {
                let bytes = completion.byte_len as usize;
                let list = ResponseList::new(bytes, terms.with_lists(), terms.layout().depth)
                    .map_err(|_| unreadable())?
                    .with_digests(terms.with_digests());
                Ok(LaneArrival::Responses { by, list, at })
            }
            _ => Err(broken("a RECV completed as something else")),
        }
    }

    /// The next answer in a list of responses.
    #[inline]
    pub(super) fn next_answer(
        &self,
        by: LaneIndex,
        list: &mut ResponseList,
        at: usize,
    ) -> Option<Result<CommandAnswer, PathEnd>> {
        let slots = self.terms.memory().slots.region();
        let response = list.take(|from, bytes| slots.read(at + from, bytes))?;
        let bad = |error| match error {
            CapsuleError::Digest => PathEnd::Corrupted,
            _ => unreadable(),
        };
        Some(response.map_err(bad).map(|response| {
            let (tag, status, check) = (response.tag, response.status, response.check);
            CommandAnswer { by, tag, status, check, immediate: false, written: 0 }
        }))
    }

    /// Takes an answer to a command of the connection itself. Returns whether it completed a lane's
    /// self-test.
    pub(super) fn own_answer(&mut self, answer: &CommandAnswer) -> Result<bool, PathEnd> {
        let (lane, terms) = self.lane(answer.by);
        let passed = lane.own_answer(terms, answer)?;
        if passed {
            self.ready = self.lanes.iter().all(Lane::is_ready);
        }
        Ok(passed)
    }

    /// Whether a request under way went by that lane.
    #[inline]
    pub(super) fn went_by(&self, tag: Tag, index: LaneIndex) -> bool {
        self.lane_of.get(tag.index()) == Some(&index)
    }

    /// Whether a request under way went by this path.
    pub(super) fn carries(&self, tag: Tag) -> bool {
        self.lane_of.get(tag.index()).is_some_and(|index| *index != LaneIndex::NONE)
    }

    /// A request of that tag was sent by the path of another way.
    pub(super) fn sent_by_other(&mut self, tag: Tag) {
        if let Some(index) = self.lane_of.get_mut(tag.index()) {
            *index = LaneIndex::NONE;
        }
    }

    /// A request of that lane was answered.
    #[inline]
    pub(super) fn answered(&mut self, index: LaneIndex, bytes: u32) {
        self.lane(index).0.request_answered(bytes);
    }

    /// The lane of a command with so many bytes for the target to move.
    #[inline]
    pub(super) fn choose(&self, keyed_bytes: u32) -> LaneIndex {
        if self.lanes.len() == 1 || !self.terms.shares_lanes(keyed_bytes) {
            return LaneIndex::FIRST;
        }
        let least = (0u8..).zip(&self.lanes).min_by_key(|(_, lane)| lane.awaited_bytes());
        least.map_or(LaneIndex::FIRST, |(at, _)| LaneIndex(at))
    }

    /// Whether that lane has room for a command.
    #[inline]
    pub(super) fn can_send(&self, index: LaneIndex) -> bool {
        self.lanes[usize::from(index.0)].can_send()
    }

    /// Queues the command of a request with so many bytes of data.
    #[inline]
    pub(super) fn send(
        &mut self,
        index: LaneIndex,
        command: &CommandCapsule,
        data: Option<Sge>,
        bytes: u32,
    ) {
        self.lane_of[command.tag.index()] = index;
        self.has_wrs = true;
        let (lane, terms) = self.lane(index);
        lane.queue_command(terms, command, data);
        lane.request_sent(bytes);
    }

    /// Asks a silent target for an answer. Call it after all completions were taken, and before new
    /// WRs are posted: after too long a silence nothing more is sent.
    pub(super) fn keep_beat(&mut self, pulse: Pulse, now: Instant) -> BeatDue {
        let (mut look, mut asked) = (false, 0);
        for index in self.indices() {
            match self.lane(index).0.check_beat(pulse, now) {
                Due::Nothing => {}
                Due::Ask => {
                    let sequence = self.next_sequence();
                    let (lane, terms) = self.lane(index);
                    asked += u64::from(lane.ask(terms, sequence));
                    self.has_wrs = true;
                }
                Due::Look => look = true,
                Due::Dead => return BeatDue::Dead,
            }
        }
        if look {
            self.poller.clear_event();
            return BeatDue::Look { asked };
        }
        BeatDue::Nothing { asked }
    }

    /// Whether some lane may have WRs to post.
    #[inline]
    pub(super) fn has_wrs(&self) -> bool {
        self.has_wrs
    }

    /// Posts the WRs of all lanes.
    pub(super) fn post(&mut self, stats: &QueueStats) -> Result<(), rblk_fabric::PostError> {
        self.has_wrs = false;
        self.lanes.iter_mut().try_for_each(|lane| lane.post(&mut *self.poller, stats))
    }

    /// Index of the lane with that QP.
    #[inline]
    fn find(&self, qp: QpIndex) -> Option<LaneIndex> {
        (0u8..).zip(&self.lanes).find(|(_, lane)| lane.qp() == qp).map(|(at, _)| LaneIndex(at))
    }

    /// The lane with an index from [`Self::find`] or [`Self::choose`].
    #[inline]
    fn lane(&mut self, index: LaneIndex) -> (&mut Lane, &PathTerms) {
        (&mut self.lanes[usize::from(index.0)], &self.terms)
    }

    /// The indices of all lanes.
    fn indices(&self) -> impl Iterator<Item = LaneIndex> + use<> {
        (0..narrow(self.lanes.len())).map(LaneIndex)
    }

    /// The number of the next command.
    #[inline]
    pub(super) fn next_sequence(&mut self) -> Sequence {
        self.sequence = self.sequence.next();
        self.sequence
    }
}

/// The target broke a rule. Out of line, so that a normal turn does not prepare the words.
#[cold]
#[inline(never)]
pub(super) fn broken(rule: &'static str) -> PathEnd {
    PathEnd::Protocol(rule)
}

/// The message is no list of responses.
#[cold]
#[inline(never)]
fn unreadable() -> PathEnd {
    PathEnd::Protocol("a response that cannot be parsed")
}
