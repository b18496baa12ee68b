//! What every provider must do, as cases over a connected pair of QPs.
//!
//! A test file makes pairs (`Pair`) of its provider and hands a maker to [`run`]. Where providers may differ, an
//! [`Expect`] says what this one does.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::time::{Duration, Instant};

use rblk_fabric::{
    Access, Completion, MemoryRegion, PageKind, Poller, ProtectionDomain, QpIndex, QpLimits,
    RecvWr, Region, RemoteBuffer, SendOp, SendWr, Sge, SgeList, WcOpcode, WcStatus, WrId,
};

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
    /// A WR that the peer refuses completes with the reason; else it may complete well, when it was sent.
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
        self.poller.post_recv(self.qp, &[RecvWr { id: WrId(id), sge }]).unwrap();
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
    QpLimits { send_wrs: 8, recv_wrs: 8, send_sges: 4, inline_bytes: 0, reads_out: 4, reads_in: 4 }
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
    ("send_and_recv", send_and_recv),
    ("nothing_is_slept_through", nothing_is_slept_through),
    ("write_then_send_is_ordered", write_then_send_is_ordered),
    ("immediate_arrives", immediate_arrives),
    ("read_fetches", read_fetches),
    ("gather_and_scatter", gather_and_scatter),
    ("large_both_ways", large_both_ways),
    ("no_recv_is_rnr", no_recv_is_rnr),
    ("immediate_without_recv_is_rnr", immediate_without_recv_is_rnr),
    ("recv_too_short", recv_too_short),
    ("recv_memory_bad", recv_memory_bad),
    ("bad_rkey", bad_rkey),
    ("wrong_access", wrong_access),
    ("remote_bounds", remote_bounds),
    ("local_protection_after_good_ones", local_protection_after_good_ones),
    ("read_sink_needs_local_write", read_sink_needs_local_write),
    ("empty_messages_are_refused", empty_messages_are_refused),
    ("read_depth", read_depth),
    ("queue_fills_and_empties", queue_fills_and_empties),
    ("recv_queue_fills", recv_queue_fills),
    ("fail_flushes_in_order", fail_flushes_in_order),
    ("posting_after_error", posting_after_error),
    ("peer_death", peer_death),
    ("dead_region_is_not_written", dead_region_is_not_written),
    ("dead_qp_guards_memory", dead_qp_guards_memory),
    ("death_amid_writes_guards_memory", death_amid_writes_guards_memory),
    ("dead_key_is_not_written", dead_key_is_not_written),
    ("dead_key_is_not_written_with_immediate", dead_key_is_not_written_with_immediate),
    ("dead_key_is_not_read", dead_key_is_not_read),
    ("unknown_qp", unknown_qp),
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

fn send_and_recv(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::LOCAL_READ);
    let to = p.b.memory(4096, Access::LOCAL_WRITE);
    fill(&from, 3);
    for i in 0..3u32 {
        p.b.recv(10 + u64::from(i), to.sge(i as usize * 1000, 900).unwrap());
    }
    p.a.post(&[
        wr(1, SendOp::Send, from.sge(0, 64).unwrap(), false),
        wr(2, SendOp::Send, from.sge(100, 900).unwrap(), false),
        wr(3, SendOp::Send, from.sge(7, 1).unwrap(), true),
    ]);
    p.until_b(3);
    p.until_a(1);
    let lens: Vec<_> = p.b.seen.iter().map(|c| (c.id.0, c.status, c.opcode, c.byte_len)).collect();
    let recv = WcOpcode::Recv;
    assert_eq!(lens, [(10, OK, recv, 64), (11, OK, recv, 900), (12, OK, recv, 1)]);
    assert_eq!(bytes_of(&to, 0, 64), bytes_of(&from, 0, 64));
    assert_eq!(bytes_of(&to, 1000, 900), bytes_of(&from, 100, 900));
    assert_eq!(bytes_of(&to, 2000, 1), bytes_of(&from, 7, 1));
    p.settle();
    assert_eq!(p.a.outcome(), [(3, OK)], "unsignaled successes are silent");
    assert_eq!(p.a.seen[0].opcode, WcOpcode::Send);
}

/// Whether b's poller has an event, or gets one while a and the time go on.
fn event(p: &mut Pair, wait: Duration) -> bool {
    let start = Instant::now();
    loop {
        let mut fds = p.b.poller.event_fds().map(|fd| {
            // The kernel skips the entry of a descriptor that is none.
            let fd = fd.map_or(-1, |fd| std::os::fd::AsRawFd::as_raw_fd(&fd));
            libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
        });
        // SAFETY: two valid pollfds.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, 0) } > 0 {
            return true;
        }
        if start.elapsed() >= wait {
            return false;
        }
        (p.tick)();
        p.a.poll();
        std::thread::yield_now();
    }
}

/// Arming as often as one likes, taking events or not: whoever armed, looked, and sleeps is woken.
fn nothing_is_slept_through(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::LOCAL_READ);
    let to = p.b.memory(4096, Access::LOCAL_WRITE);
    let send = |p: &mut Pair, round| {
        p.a.post(&[wr(round, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
    };
    for round in 0..40 {
        p.b.recv(round, to.sge(0, 64).unwrap());
        let count = usize::try_from(round).unwrap() + 1;
        if round % 2 == 0 {
            for _ in 0..=round % 3 {
                p.b.poller.arm().unwrap();
                assert_eq!(p.b.poll(), 0);
            }
            // Looked through, and the event is left where it is.
            send(p, round);
            p.until_b(count);
        } else {
            // What is left of earlier rounds ends a sleep or two.
            let asleep = (0..8).any(|_| {
                p.b.poller.arm().unwrap();
                assert_eq!(p.b.poll(), 0);
                let woken = event(p, Duration::ZERO);
                if woken {
                    p.b.poller.clear_event();
                }
                !woken
            });
            assert!(asleep, "round {round}: events without end");
            for _ in 0..round % 3 {
                p.b.poller.arm().unwrap();
            }
            send(p, round);
            assert!(event(p, PATIENCE), "round {round}: slept through");
            p.b.poller.clear_event();
            p.until_b(count);
        }
        p.until_a(count);
    }
}

fn write_then_send_is_ordered(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(65536, Access::LOCAL_READ);
    let window = p.b.memory(65536, Access::REMOTE);
    let inbox = p.b.memory(4096, Access::LOCAL_WRITE);
    for round in 0..20u8 {
        fill(&from, round);
        p.b.recv(round.into(), inbox.sge(0, 64).unwrap());
        p.a.post(&[
            wr(100, SendOp::Write(window.remote(0)), from.sge(0, 65536).unwrap(), false),
            wr(101, SendOp::Send, from.sge(0, 64).unwrap(), true),
        ]);
        p.until_b(usize::from(round) + 1);
        assert_eq!(bytes_of(&window, 0, 65536), bytes_of(&from, 0, 65536), "data before the RECV");
        p.until_a(usize::from(round) + 1);
    }
}

fn immediate_arrives(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::LOCAL_READ);
    let window = p.b.memory(4096, Access::REMOTE);
    let inbox = p.b.memory(4096, Access::LOCAL_WRITE);
    fill(&from, 9);
    p.b.recv(1, inbox.sge(0, 64).unwrap());
    let op = SendOp::WriteWithImm(window.remote(8), 0xdead_beef);
    p.a.post(&[wr(2, op, from.sge(0, 3000).unwrap(), true)]);
    p.until_b(1);
    p.until_a(1);
    let got = p.b.seen[0];
    assert_eq!((got.id.0, got.status, got.opcode), (1, OK, WcOpcode::RecvWithImm));
    assert_eq!((got.byte_len, got.imm), (3000, 0xdead_beef));
    assert_eq!(bytes_of(&window, 8, 3000), bytes_of(&from, 0, 3000));
    assert_eq!(bytes_of(&inbox, 0, 64), [0; 64]);
    assert_eq!((p.a.seen[0].status, p.a.seen[0].opcode), (OK, WcOpcode::Write));
}

fn read_fetches(p: &mut Pair, _: &Expect) {
    let sink = p.a.memory(16384, Access::REMOTE);
    let window = p.b.memory(16384, Access::REMOTE);
    fill(&window, 77);
    for i in 0..4usize {
        let sge = sink.sge(i * 4096, 4096).unwrap();
        p.a.post(&[wr(i as u64, SendOp::Read(window.remote(i * 4096)), sge, true)]);
    }
    p.until_a(4);
    assert_eq!(p.a.outcome(), [(0, OK), (1, OK), (2, OK), (3, OK)]);
    assert!(p.a.seen.iter().all(|c| c.byte_len == 4096 && c.opcode == WcOpcode::Read));
    assert_eq!(bytes_of(&sink, 0, 16384), bytes_of(&window, 0, 16384));
    assert!(p.b.seen.is_empty());
}

fn gather_and_scatter(p: &mut Pair, _: &Expect) {
    let a = p.a.memory(8192, Access::REMOTE);
    let other = p.a.memory(8192, Access::LOCAL_READ);
    let window = p.b.memory(8192, Access::REMOTE);
    fill(&a, 1);
    fill(&other, 2);
    let sges = SgeList::two(a.sge(10, 1000).unwrap(), other.sge(4096, 3000).unwrap());
    let op = SendOp::Write(window.remote(1));
    p.a.post(&[SendWr { id: WrId(1), op, sges, signaled: true, inline: false }]);
    p.until_a(1);
    let mut expected = bytes_of(&a, 10, 1000);
    expected.extend(bytes_of(&other, 4096, 3000));
    assert_eq!(bytes_of(&window, 1, 4000), expected);
    let sges = SgeList::two(a.sge(5000, 3000).unwrap(), a.sge(100, 1000).unwrap());
    let op = SendOp::Read(window.remote(1));
    p.a.post(&[SendWr { id: WrId(2), op, sges, signaled: true, inline: false }]);
    p.until_a(2);
    assert_eq!(p.a.outcome(), [(1, OK), (2, OK)]);
    let mut got = bytes_of(&a, 5000, 3000);
    got.extend(bytes_of(&a, 100, 1000));
    assert_eq!(got, expected);
}

fn large_both_ways(p: &mut Pair, _: &Expect) {
    const LEN: u32 = 1 << 20;
    let mine = p.a.memory(4 << 20, Access::REMOTE);
    let theirs = p.b.memory(4 << 20, Access::REMOTE);
    fill(&mine, 5);
    fill(&theirs, 6);
    let (left, right) = (bytes_of(&mine, 0, 1 << 20), bytes_of(&theirs, 1 << 20, 1 << 20));
    // a writes its 1st MiB to b's 3rd and reads b's 2nd into its 2nd; b does the mirror image.
    p.a.post(&[
        wr(1, SendOp::Write(theirs.remote(2 << 20)), mine.sge(0, LEN).unwrap(), false),
        wr(2, SendOp::Read(theirs.remote(1 << 20)), mine.sge(1 << 20, LEN).unwrap(), true),
    ]);
    p.b.post(&[
        wr(3, SendOp::Write(mine.remote(2 << 20)), theirs.sge(1 << 20, LEN).unwrap(), false),
        wr(4, SendOp::Read(mine.remote(0)), theirs.sge(3 << 20, LEN).unwrap(), true),
    ]);
    p.until_a(1);
    p.until_b(1);
    assert_eq!((p.a.outcome(), p.b.outcome()), (vec![(2, OK)], vec![(4, OK)]));
    assert!(bytes_of(&theirs, 2 << 20, 1 << 20) == left, "a's write");
    assert!(bytes_of(&mine, 1 << 20, 1 << 20) == right, "a's read");
    assert!(bytes_of(&mine, 2 << 20, 1 << 20) == right, "b's write");
    assert!(bytes_of(&theirs, 3 << 20, 1 << 20) == left, "b's read");
}

/// The requester's first WR fails with its cause, the rest flush, and the responder dies where it does.
fn refused(p: &mut Pair, expect: &Expect, first: u64, cause: WcStatus, last: u64) {
    p.until("the refusal", |p| p.a.status_of(last).is_some());
    let cause = expect.told(cause, p.a.status_of(first));
    let expected: Vec<_> =
        (first..=last).map(|id| (id, if id == first { cause } else { FLUSHED })).collect();
    assert_eq!(p.a.outcome(), expected);
    if expect.responder_dies {
        p.until("the responder's flush", |p| p.b.status_of(900).is_some());
        assert_eq!(p.b.status_of(900), Some(FLUSHED));
    }
}

fn no_recv_is_rnr(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    p.a.recv(3, sge);
    p.a.post(&[wr(1, SendOp::Send, sge, false), wr(2, SendOp::Send, sge, false)]);
    p.until_a(3);
    assert_eq!(p.a.outcome(), [(1, expect.rnr), (2, FLUSHED), (3, FLUSHED)]);
    assert!(p.b.seen.is_empty());
}

fn immediate_without_recv_is_rnr(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    let op = SendOp::WriteWithImm(window.remote(0), 1);
    p.a.post(&[wr(1, op, from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, expect.told(expect.rnr, p.a.status_of(1)))]);
}

fn recv_too_short(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let to = p.b.memory(4096, Access::REMOTE);
    p.b.recv(900, to.sge(0, 63).unwrap());
    p.b.recv(901, to.sge(0, 64).unwrap());
    p.a.post(&[wr(1, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    p.until_b(2);
    assert_eq!(p.a.outcome(), [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(p.b.outcome(), [(900, WcStatus::LocalLength), (901, FLUSHED)]);
    assert_eq!(bytes_of(&to, 0, 64), [0; 64]);
}

fn recv_memory_bad(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let to = p.b.memory(4096, Access::LOCAL_READ);
    p.b.recv(900, to.sge(0, 64).unwrap());
    p.a.post(&[wr(1, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    p.until_b(1);
    assert_eq!(p.a.outcome(), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(p.b.outcome(), [(900, WcStatus::LocalProtection)]);
}

fn guarded(p: &mut Pair) {
    let spare = p.b.memory(4096, Access::REMOTE);
    p.b.recv(900, spare.sge(0, 64).unwrap());
}

fn bad_rkey(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    let good = window.remote(0);
    let bad = RemoteBuffer { rkey: rblk_fabric::Rkey(good.rkey.0 ^ 0x5500_0000), ..good };
    let sge = from.sge(0, 64).unwrap();
    p.a.post(&[
        wr(1, SendOp::Write(bad), sge, false),
        wr(2, SendOp::Write(good), sge, true),
        wr(3, SendOp::Read(good), sge, false),
    ]);
    refused(p, expect, 1, WcStatus::RemoteAccess, 3);
    assert_eq!(bytes_of(&window, 0, 4096), [0; 4096]);
}

fn wrong_access(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    fill(&from, 1);
    let read_only = p.b.memory(4096, Access { remote_read: true, ..Access::LOCAL_WRITE });
    guarded(p);
    let sge = from.sge(0, 64).unwrap();
    // The READ is allowed, and is answered before the refusal.
    p.a.post(&[
        wr(1, SendOp::Read(read_only.remote(0)), sge, true),
        wr(2, SendOp::Write(read_only.remote(0)), sge, true),
    ]);
    p.until_a(2);
    let told = expect.told(WcStatus::RemoteAccess, p.a.status_of(2));
    assert_eq!(p.a.outcome(), [(1, OK), (2, told)]);
    if expect.responder_dies {
        p.until_b(1);
        assert_eq!(p.b.outcome(), [(900, FLUSHED)]);
    }
    assert_eq!(bytes_of(&read_only, 0, 64), [0; 64]);
}

fn remote_bounds(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(8192, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    // Up to the last byte is fine, one past it is not.
    let tail = window.remote(4096 - 64);
    p.a.post(&[wr(1, SendOp::Write(tail), from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, OK)]);
    p.a.seen.clear();
    p.a.post(&[
        wr(2, SendOp::Write(tail), from.sge(0, 65).unwrap(), true),
        wr(3, SendOp::Write(tail), from.sge(0, 64).unwrap(), true),
    ]);
    refused(p, expect, 2, WcStatus::RemoteAccess, 3);
}

/// An address at the top of the address space, whose end wraps around.
pub fn remote_wrap_around(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(8192, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    let wrap = RemoteBuffer { addr: u64::MAX - 10, ..window.remote(0) };
    p.a.post(&[wr(1, SendOp::Read(wrap), from.sge(0, 64).unwrap(), true)]);
    refused(p, expect, 1, WcStatus::RemoteAccess, 1);
}

fn local_protection_after_good_ones(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    let good = from.sge(0, 64).unwrap();
    let past = Sge { addr: good.addr + 4096 - 63, ..good };
    p.a.recv(9, good);
    p.a.post(&[
        wr(1, SendOp::Write(window.remote(0)), good, true),
        wr(2, SendOp::Write(window.remote(0)), good, false),
        wr(3, SendOp::Write(window.remote(0)), past, false),
        wr(4, SendOp::Write(window.remote(0)), good, false),
    ]);
    p.until_a(4);
    assert_eq!(
        p.a.outcome(),
        [(1, OK), (3, WcStatus::LocalProtection), (4, FLUSHED), (9, FLUSHED)]
    );
}

fn read_sink_needs_local_write(p: &mut Pair, _: &Expect) {
    let sink = p.a.memory(4096, Access::LOCAL_READ);
    let window = p.b.memory(4096, Access::REMOTE);
    fill(&window, 4);
    p.a.post(&[wr(1, SendOp::Read(window.remote(0)), sink.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, WcStatus::LocalProtection)]);
    assert_eq!(bytes_of(&sink, 0, 64), [0; 64]);
}

fn empty_messages_are_refused(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    p.a.post(&[wr(1, SendOp::Send, from.sge(0, 0).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, WcStatus::LocalLength)]);
}

fn read_depth(p: &mut Pair, expect: &Expect) {
    let sink = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    let read = |id| wr(id, SendOp::Read(window.remote(0)), sink.sge(0, 64).unwrap(), true);
    p.a.post(&[read(1), read(2), read(3), read(4)]);
    p.until_a(4);
    assert_eq!(p.a.outcome(), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    p.a.seen.clear();
    p.a.post(&[read(1), read(2), read(3), read(4), read(5)]);
    p.until_a(5);
    let last = if expect.read_depth_refused { WcStatus::RemoteInvalidRequest } else { OK };
    assert_eq!(p.a.outcome(), [(1, OK), (2, OK), (3, OK), (4, OK), (5, last)]);
}

fn queue_fills_and_empties(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    let write =
        |id, signaled| wr(id, SendOp::Write(window.remote(0)), from.sge(0, 64).unwrap(), signaled);
    for round in 0..5usize {
        let batch: Vec<_> = (0..10).map(|id| write(id, id == 7)).collect();
        let refused = p.a.poller.post_send(p.a.qp, &batch).unwrap_err();
        assert_eq!(refused.posted, 8);
        assert_eq!(refused.source.raw_os_error(), Some(12), "ENOMEM");
        p.until_a(round + 1);
        assert_eq!(p.a.seen[round].id.0, 7);
    }
    p.settle();
    assert_eq!(p.a.seen.len(), 5);
    let counters = p.a.poller.counters();
    assert_eq!((counters.writes, counters.signaled, counters.send_doorbells), (40, 5, 5));
}

fn recv_queue_fills(p: &mut Pair, _: &Expect) {
    let to = p.b.memory(4096, Access::REMOTE);
    let batch: Vec<_> =
        (0..10).map(|id| RecvWr { id: WrId(id), sge: to.sge(0, 64).unwrap() }).collect();
    let refused = p.b.poller.post_recv(p.b.qp, &batch).unwrap_err();
    assert_eq!((refused.posted, refused.source.raw_os_error()), (8, Some(12)));
}

fn fail_flushes_in_order(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let spare = p.b.memory(4096, Access::REMOTE);
    p.b.recv(900, spare.sge(0, 64).unwrap());
    for id in 0..4 {
        p.a.recv(id, from.sge(0, 64).unwrap());
    }
    p.a.poller.fail(p.a.qp);
    p.a.poller.fail(p.a.qp);
    p.until_a(4);
    assert_eq!(p.a.outcome(), [(0, FLUSHED), (1, FLUSHED), (2, FLUSHED), (3, FLUSHED)]);
    // The peer sees it too.
    p.until_b(1);
    assert_eq!(p.b.outcome(), [(900, FLUSHED)]);
}

fn posting_after_error(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    p.a.poller.fail(p.a.qp);
    for round in 0..5 {
        p.a.recv(1, sge);
        p.a.post(&[wr(2, SendOp::Send, sge, false), wr(3, SendOp::Send, sge, true)]);
        p.until_a(3 * (round + 1));
    }
    assert!(p.a.seen.iter().all(|c| c.status == FLUSHED));
    let mut sends: Vec<_> = p.a.seen.iter().map(|c| c.id.0).filter(|id| *id != 1).collect();
    sends.dedup();
    assert_eq!(sends, [2, 3, 2, 3, 2, 3, 2, 3, 2, 3]);
}

fn peer_death(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(1 << 20, Access::REMOTE);
    let window = p.b.memory(1 << 20, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    p.a.recv(9, sge);
    p.b.poller.fail(p.b.qp);
    let write = |id| wr(id, SendOp::Write(window.remote(0)), from.sge(0, 1 << 20).unwrap(), true);
    p.a.post(&[write(1), write(2)]);
    p.until_a(3);
    let outcome = p.a.outcome();
    assert!(expect.peer_death.contains(&outcome[0].1), "{outcome:?}");
    assert_eq!((outcome[0].0, &outcome[1..]), (1, &[(2, FLUSHED), (9, FLUSHED)][..]));
    assert!(bytes_of(&window, 0, 64) == [0; 64]);
}

fn dead_region_is_not_written(p: &mut Pair, expect: &Expect) {
    if !expect.dead_region {
        return;
    }
    let from = p.a.memory(1 << 20, Access::REMOTE);
    fill(&from, 200);
    let window = p.b.memory(1 << 20, Access::REMOTE);
    guarded(p);
    let region = std::sync::Arc::clone(window.region());
    let write = wr(1, SendOp::Write(window.remote(0)), from.sge(0, 1 << 20).unwrap(), true);
    p.a.post(&[write]);
    // Somewhere in the middle, or before: then the region dies.
    for _ in 0..3 {
        p.a.poll();
        p.b.poll();
    }
    if !p.a.seen.is_empty() {
        return;
    }
    drop(window);
    region.zero(0, 1 << 20);
    p.until_a(1);
    let mut bytes = vec![0; 1 << 20];
    region.read(0, &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0), "bytes landed in a dead region");
    // All of it may have been there already when the region died.
    let seen = p.a.seen[0].status;
    assert!(seen == OK || seen == expect.told(WcStatus::RemoteAccess, Some(seen)), "{seen:?}");
}

/// RDMA of a requester that does not know yet that the responder gave its QP up: the memory is registered still.
fn dead_qp_guards_memory(p: &mut Pair, expect: &Expect) {
    const LEN: u32 = 16 << 10;
    let from = p.a.memory(1 << 16, Access::REMOTE);
    let window = p.b.memory(1 << 16, Access::REMOTE);
    fill(&from, 1);
    fill(&window, 2);
    guarded(p);
    p.b.poller.fail(p.b.qp);
    let write = |id| wr(id, SendOp::Write(window.remote(0)), from.sge(0, LEN).unwrap(), true);
    let sink = from.sge(1 << 15, LEN).unwrap();
    let mut last = wr(2, SendOp::Write(window.remote(0)), from.sge(0, LEN).unwrap(), true);
    if expect.immediates {
        last.op = SendOp::WriteWithImm(window.remote(0), 7);
    }
    // One may be refused at once: the end may have come already.
    let _ = p
        .a
        .poller
        .post_send(p.a.qp, &[write(1), last, wr(3, SendOp::Read(window.remote(0)), sink, true)]);
    if expect.refusal_is_told {
        p.until_a(3);
        assert!(p.a.seen.iter().all(|c| c.status != OK), "{:?}", p.a.outcome());
    }
    p.settle();
    assert_eq!(p.b.status_of(900), Some(FLUSHED));
    assert_unharmed(&window, 2);
    // Nor was anything read out of it.
    assert_unharmed(&from, 1);
}

/// Writes are landing when the responder gives its QP up: from then on its memory is its own.
fn death_amid_writes_guards_memory(p: &mut Pair, _: &Expect) {
    const LEN: u32 = 1 << 18;
    let from = p.a.memory(LEN as usize, Access::REMOTE);
    let window = p.b.memory(LEN as usize, Access::REMOTE);
    fill(&from, 1);
    guarded(p);
    let write = |id| wr(id, SendOp::Write(window.remote(0)), from.sge(0, LEN).unwrap(), true);
    p.a.post(&[write(1), write(2), write(3), write(4)]);
    let last = pattern(1, LEN as usize - 1);
    p.until("the first write", |_| bytes_of(&window, LEN as usize - 1, 1) == [last]);
    p.b.poller.fail(p.b.qp);
    fill(&window, 2);
    p.settle();
    assert_unharmed(&window, 2);
}

fn assert_unharmed(mr: &MemoryRegion, seed: u8) {
    let len = mr.region().len();
    let fresh: Vec<u8> = (0..len).map(|at| pattern(seed, at)).collect();
    assert!(bytes_of(mr, 0, len) == fresh, "the guard pattern of seed {seed} is spoilt");
}

/// The QP lives and the memory is registered, but not under the key that the requester has.
fn dead_key(p: &mut Pair, expect: &Expect, op: impl Fn(RemoteBuffer) -> SendOp) {
    const LEN: u32 = 16 << 10;
    let from = p.a.memory(1 << 16, Access::REMOTE);
    let old = p.b.memory(1 << 16, Access::REMOTE);
    fill(&from, 1);
    guarded(p);
    let sge = from.sge(0, LEN).unwrap();
    // While it lives, the key opens.
    p.a.post(&[wr(1, SendOp::Write(old.remote(0)), sge, true)]);
    p.until_a(1);
    assert_eq!(p.a.status_of(1), Some(OK));
    let region = std::sync::Arc::clone(old.region());
    let remote = old.remote(0);
    let new = p.b.pd.register(&region, Access::REMOTE).unwrap();
    drop(old);
    assert_ne!(new.rkey(), remote.rkey);
    assert_eq!(new.remote(0).addr, remote.addr);
    fill(&new, 2);
    let op = op(remote);
    let is_read = matches!(op, SendOp::Read(_));
    p.a.post(&[wr(2, op, sge, true)]);
    if expect.refusal_is_told {
        p.until_a(2);
        let told = expect.told(WcStatus::RemoteAccess, p.a.status_of(2));
        assert_eq!(p.a.status_of(2), Some(told));
    } else if is_read {
        p.until_a(2);
        assert_ne!(p.a.status_of(2), Some(OK));
    }
    p.settle();
    assert_unharmed(&new, 2);
    assert_unharmed(&from, 1);
}

fn dead_key_is_not_written(p: &mut Pair, expect: &Expect) {
    dead_key(p, expect, SendOp::Write);
}

fn dead_key_is_not_written_with_immediate(p: &mut Pair, expect: &Expect) {
    if expect.immediates {
        dead_key(p, expect, |remote| SendOp::WriteWithImm(remote, 7));
        assert!(p.b.seen.iter().all(|c| c.status != OK), "no immediate of a refused write");
    }
}

fn dead_key_is_not_read(p: &mut Pair, expect: &Expect) {
    dead_key(p, expect, SendOp::Read);
}

fn unknown_qp(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    let error = p.a.poller.post_send(QpIndex(77), &[wr(1, SendOp::Send, sge, true)]).unwrap_err();
    assert_eq!((error.posted, error.source.raw_os_error()), (0, Some(22)));
    assert!(p.a.poller.post_recv(QpIndex(77), &[RecvWr { id: WrId(0), sge }]).is_err());
    assert!(p.a.poller.detach(QpIndex(77)).is_none());
    p.a.poller.fail(QpIndex(77));
    assert!(p.a.poller.detach(p.a.qp).is_some());
    assert!(p.a.poller.post_send(p.a.qp, &[wr(1, SendOp::Send, sge, true)]).is_err());
}
