//! What every provider must do, as cases over a connected pair of QPs.
//!
//! A test file makes pairs (`Pair`) of its provider and hands a maker to [`run`]. Where providers
//! may differ, an [`Expect`] says what this one does.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

mod deaths;
mod refusals;
mod transfers;

use std::time::{Duration, Instant};

use rblk_fabric::{
    Access, Completion, MemoryRegion, PageKind, Poller, ProtectionDomain, QpIndex, QpLimits,
    RecvWr, Region, SendOp, SendWr, Sge, SgeList, WcStatus, WrId,
};

#[allow(unused_imports, reason = "each test file uses its part")]
pub use self::refusals::remote_wrap_around;

/// How long a case waits for completions. Only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where providers may differ.
#[derive(Clone, Debug)]
pub struct Expect {
    /// What a SEND without a RECV completes with.
    pub rnr: WcStatus,
    /// READs beyond the depth are refused (a card may stall its send queue instead).
    pub read_depth_refused: bool,
    /// The QP that refused a request dies by itself.
    pub responder_dies: bool,
    /// What the oldest WR may complete with when the peer is gone.
    pub peer_death: Vec<WcStatus>,
    /// A region may be deregistered while the peer writes to it, and the peer's WR fails.
    pub dead_region: bool,
    /// A WR that the peer refuses completes with the reason; else it may complete well, when it was
    /// sent.
    pub refusal_is_told: bool,
    /// The word of a refusal may not arrive: the requester then finds the responder dead.
    pub refusal_may_be_lost: bool,
    /// WRITE_WITH_IMM is there.
    pub immediates: bool,
}

impl Expect {
    /// What a WR completes with that was refused for `cause`, given what was seen.
    fn told(&self, cause: WcStatus, seen: Option<WcStatus>) -> WcStatus {
        match seen {
            Some(WcStatus::RetryExceeded) if self.refusal_may_be_lost => WcStatus::RetryExceeded,
            _ => cause,
        }
    }
}

/// One end.
pub struct Side {
    pub pd: ProtectionDomain,
    pub poller: Box<dyn Poller>,
    pub qp: QpIndex,
    /// Completions seen, in order.
    pub seen: Vec<Completion>,
}

impl Side {
    pub fn new(pd: ProtectionDomain, poller: Box<dyn Poller>, qp: QpIndex) -> Self {
        Self { pd, poller, qp, seen: Vec::new() }
    }

    pub fn memory(&self, len: usize, access: Access) -> MemoryRegion {
        let region = Region::allocate(len, PageKind::Normal).unwrap();
        self.pd.register(&region, access).unwrap()
    }

    pub fn recv(&mut self, id: u64, sge: Sge) {
        self.poller.post_recv(self.qp, &[RecvWr::one(WrId(id), sge)]).unwrap();
    }

    pub fn post(&mut self, wrs: &[SendWr]) {
        self.poller.post_send(self.qp, wrs).unwrap();
    }

    pub fn poll(&mut self) -> usize {
        let mut out = [Completion::default(); 7];
        let count = self.poller.poll(&mut out).unwrap();
        self.seen.extend(&out[..count]);
        count
    }

    /// (id, status) of all completions so far.
    pub fn outcome(&self) -> Vec<(u64, WcStatus)> {
        self.seen.iter().map(|c| (c.id.0, c.status)).collect()
    }

    pub fn status_of(&self, id: u64) -> Option<WcStatus> {
        self.seen.iter().find(|c| c.id.0 == id).map(|c| c.status)
    }
}

/// Two connected ends.
pub struct Pair {
    pub a: Side,
    pub b: Side,
    /// Called between polls: lets virtual time pass where there is some.
    pub tick: Box<dyn FnMut()>,
}

impl Pair {
    /// Polls both ends once.
    pub fn drive(&mut self) -> usize {
        (self.tick)();
        self.a.poll() + self.b.poll()
    }

    /// Polls until it holds.
    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        while !holds(self) {
            if self.drive() == 0 {
                std::thread::yield_now();
            }
            assert!(
                start.elapsed() < PATIENCE,
                "waited too long for {what}: a saw {:?}, b saw {:?}",
                self.a.outcome(),
                self.b.outcome()
            );
        }
    }

    pub fn until_a(&mut self, count: usize) {
        self.until("completions of a", |p| p.a.seen.len() >= count);
    }

    pub fn until_b(&mut self, count: usize) {
        self.until("completions of b", |p| p.b.seen.len() >= count);
    }

    /// Polls for a while, to see that nothing more comes.
    pub fn settle(&mut self) {
        for _ in 0..300 {
            self.drive();
        }
    }
}

pub fn limits() -> QpLimits {
    QpLimits {
        send_wrs: 8,
        recv_wrs: 8,
        send_sges: 4,
        recv_sges: 4,
        inline_bytes: 0,
        reads_out: 4,
        reads_in: 4,
    }
}

pub fn wr(id: u64, op: SendOp, sge: Sge, signaled: bool) -> SendWr {
    SendWr { id: WrId(id), op, sges: SgeList::one(sge), signaled, inline: false }
}

pub fn fill(mr: &MemoryRegion, seed: u8) {
    let bytes: Vec<u8> = (0..mr.region().len()).map(|i| pattern(seed, i)).collect();
    mr.region().write(0, &bytes);
}

#[allow(clippy::cast_possible_truncation, reason = "a pattern")]
pub fn pattern(seed: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31) ^ ((at >> 8) as u8) ^ ((at >> 16) as u8).wrapping_add(7) ^ seed
}

pub fn bytes_of(mr: &MemoryRegion, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mr.region().read(offset, &mut bytes);
    bytes
}

const OK: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::Flushed;

type Case = fn(&mut Pair, &Expect);

/// The cases by name.
pub const CASES: &[(&str, Case)] = &[
    ("send_and_recv", transfers::send_and_recv),
    ("nothing_is_slept_through", transfers::nothing_is_slept_through),
    ("write_then_send_is_ordered", transfers::write_then_send_is_ordered),
    ("immediate_arrives", transfers::immediate_arrives),
    ("read_fetches", transfers::read_fetches),
    ("gather", transfers::gather),
    ("scatter", transfers::scatter),
    ("scattered_messages", transfers::scattered_messages),
    ("a_message_of_four_pieces", transfers::a_message_of_four_pieces),
    ("large_both_ways", transfers::large_both_ways),
    ("reads_among_messages", transfers::reads_among_messages),
    ("reads_into_live_memory", transfers::reads_into_live_memory),
    ("no_recv_is_rnr", refusals::no_recv_is_rnr),
    ("immediate_without_recv_is_rnr", refusals::immediate_without_recv_is_rnr),
    ("recv_too_short", refusals::recv_too_short),
    ("recv_memory_bad", refusals::recv_memory_bad),
    ("bad_rkey", refusals::bad_rkey),
    ("wrong_access", refusals::wrong_access),
    ("remote_bounds", refusals::remote_bounds),
    ("local_protection_after_good_ones", refusals::local_protection_after_good_ones),
    ("read_sink_needs_local_write", refusals::read_sink_needs_local_write),
    ("empty_messages_are_refused", refusals::empty_messages_are_refused),
    ("read_depth", refusals::read_depth),
    ("queue_fills_and_empties", refusals::queue_fills_and_empties),
    ("recv_queue_fills", refusals::recv_queue_fills),
    ("fail_flushes_in_order", deaths::fail_flushes_in_order),
    ("posting_after_error", deaths::posting_after_error),
    ("peer_death", deaths::peer_death),
    ("dead_region_is_not_written", deaths::dead_region_is_not_written),
    ("dead_qp_guards_memory", deaths::dead_qp_guards_memory),
    ("death_amid_writes_guards_memory", deaths::death_amid_writes_guards_memory),
    ("dead_key_is_not_written", deaths::dead_key_is_not_written),
    ("dead_key_is_not_written_with_immediate", deaths::dead_key_is_not_written_with_immediate),
    ("dead_key_is_not_read", deaths::dead_key_is_not_read),
    ("unknown_qp", refusals::unknown_qp),
];

/// Runs every case on a fresh pair; the name is printed when one fails.
pub fn run(expect: &Expect, mut make: impl FnMut(QpLimits, QpLimits) -> Pair) {
    for (name, case) in CASES {
        let mut pair = make(limits(), limits());
        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&mut pair, expect)));
        if let Err(panic) = result {
            eprintln!("conformance case {name} failed");
            std::panic::resume_unwind(panic);
        }
    }
}
