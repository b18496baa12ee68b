//! Random operations on both ends of an in-memory link, compared with a model: what memory must
//! hold and which completions must come, in which order. And the same with the link cut somewhere.

mod conformance;
mod soft_pairs;

use std::collections::HashSet;

use conformance::{Pair, Side, bytes_of, fill, pattern, wr};
use proptest::prelude::*;
use rblk_fabric::soft::network::{Conditions, End};
use rblk_fabric::{Access, MemoryRegion, QpLimits, SendOp, WcOpcode, WcStatus};
use soft_pairs::memory_pair;

const OPS: usize = 24;
const LONGEST: usize = 20_000;

#[derive(Clone, Copy, Debug)]
enum What {
    Send,
    Write,
    WriteWithImm,
    Read,
}

#[derive(Clone, Copy, Debug)]
struct Op {
    what: What,
    len: usize,
    from: usize,
    to: usize,
    signaled: bool,
}

fn op() -> impl Strategy<Value = Op> {
    let what = prop_oneof![
        Just(What::Send),
        Just(What::Write),
        Just(What::WriteWithImm),
        Just(What::Read)
    ];
    let len = prop_oneof![4 => 1..200usize, 2 => 200..5000usize, 1 => 5000..LONGEST];
    (what, len, 0..LONGEST, 0..LONGEST, any::<bool>())
        .prop_map(|(what, len, from, to, signaled)| Op { what, len, from, to, signaled })
}

fn conditions() -> impl Strategy<Value = Conditions> {
    (any::<bool>(), 0..3u64, 0..5u64, prop_oneof![Just(300usize), Just(10_000), Just(200_000)])
        .prop_map(|(fragment, delay_min, more, buffer)| Conditions {
            fragment,
            delay_min,
            delay_max: delay_min + more,
            buffer,
        })
}

fn limits() -> QpLimits {
    let wrs = u32::try_from(OPS).unwrap();
    QpLimits {
        send_wrs: wrs,
        recv_wrs: wrs,
        send_sges: 2,
        recv_sges: 1,
        inline_bytes: 0,
        reads_out: 32,
        reads_in: 32,
    }
}

/// The memory of one end.
struct Memory {
    source: MemoryRegion,
    /// Written by the peer's WRITEs only.
    window: MemoryRegion,
    /// Never written: what READs fetch.
    constant: MemoryRegion,
    /// One slot per own READ.
    sinks: MemoryRegion,
    /// One slot per RECV.
    inbox: MemoryRegion,
}

impl Memory {
    fn new(side: &mut Side, seed: u8) -> Self {
        let memory = Self {
            source: side.memory(2 * LONGEST, Access::LOCAL_READ),
            window: side.memory(2 * LONGEST, Access::REMOTE),
            constant: side.memory(2 * LONGEST, Access { remote_read: true, ..Access::LOCAL_READ }),
            sinks: side.memory(OPS * LONGEST, Access::LOCAL_WRITE),
            inbox: side.memory(OPS * LONGEST, Access::LOCAL_WRITE),
        };
        fill(&memory.source, seed);
        fill(&memory.constant, seed ^ 0x55);
        for slot in 0..OPS {
            let sge = memory.inbox.sge(slot * LONGEST, u32::try_from(LONGEST).unwrap()).unwrap();
            side.recv(1000 + slot as u64, sge);
        }
        memory
    }
}

fn post(side: &mut Side, mine: &Memory, peer: &Memory, at: usize, op: &Op, signaled: bool) {
    let len = u32::try_from(op.len).unwrap();
    let from = mine.source.sge(op.from, len).unwrap();
    let (kind, sge) = match op.what {
        What::Send => (SendOp::Send, from),
        What::Write => (SendOp::Write(peer.window.remote(op.to)), from),
        What::WriteWithImm => {
            (SendOp::WriteWithImm(peer.window.remote(op.to), u32::try_from(at).unwrap()), from)
        }
        What::Read => (
            SendOp::Read(peer.constant.remote(op.from)),
            mine.sinks.sge(at * LONGEST, len).unwrap(),
        ),
    };
    side.post(&[wr(at as u64, kind, sge, signaled)]);
}

/// splitmix64, for the order in which things happen.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Posts everything, interleaved with polls as the dice say.
fn play(p: &mut Pair, memory: (&Memory, &Memory), ops: (&[Op], &[Op]), all: bool, dice: &mut Dice) {
    let (mut a, mut b) = (0, 0);
    while a < ops.0.len() || b < ops.1.len() {
        match dice.below(5) {
            0 if a < ops.0.len() => {
                let signaled = all || ops.0[a].signaled || a + 1 == ops.0.len();
                post(&mut p.a, memory.0, memory.1, a, &ops.0[a], signaled);
                a += 1;
            }
            1 if b < ops.1.len() => {
                let signaled = all || ops.1[b].signaled || b + 1 == ops.1.len();
                post(&mut p.b, memory.1, memory.0, b, &ops.1[b], signaled);
                b += 1;
            }
            2 => {
                p.a.poll();
            }
            3 => {
                p.b.poll();
            }
            _ => (p.tick)(),
        }
    }
}

fn check_sends(side: &Side, mine: &Memory, ops: &[Op], constant_seed: u8) {
    let sends: Vec<_> = side.seen.iter().filter(|c| c.id.0 < 1000).collect();
    let expected: Vec<_> =
        (0..ops.len()).filter(|at| ops[*at].signaled || at + 1 == ops.len()).collect();
    assert_eq!(
        sends.iter().map(|c| usize::try_from(c.id.0).unwrap()).collect::<Vec<_>>(),
        expected
    );
    for (done, at) in sends.iter().zip(expected) {
        let (opcode, bytes) = match ops[at].what {
            What::Send => (WcOpcode::Send, 0),
            What::Write | What::WriteWithImm => (WcOpcode::Write, 0),
            What::Read => (WcOpcode::Read, ops[at].len),
        };
        assert_eq!(
            (done.status, done.opcode, done.byte_len as usize),
            (WcStatus::Success, opcode, bytes)
        );
    }
    for (at, op) in ops.iter().enumerate().filter(|(_, op)| matches!(op.what, What::Read)) {
        let expected: Vec<u8> = (0..op.len).map(|i| pattern(constant_seed, op.from + i)).collect();
        assert!(bytes_of(&mine.sinks, at * LONGEST, op.len) == expected, "READ {at}");
    }
}

fn check_receives(side: &Side, mine: &Memory, ops: &[Op], source_seed: u8) {
    let mut window = vec![0; 2 * LONGEST];
    let mut slot = 0;
    let recvs: Vec<_> = side.seen.iter().filter(|c| c.id.0 >= 1000).collect();
    for (at, op) in ops.iter().enumerate() {
        let payload: Vec<u8> = (0..op.len).map(|i| pattern(source_seed, op.from + i)).collect();
        if matches!(op.what, What::Write | What::WriteWithImm) {
            window[op.to..op.to + op.len].copy_from_slice(&payload);
        }
        if matches!(op.what, What::Send | What::WriteWithImm) {
            let got = recvs[slot];
            let (opcode, imm) = match op.what {
                What::Send => (WcOpcode::Recv, 0),
                _ => (WcOpcode::RecvWithImm, at),
            };
            assert_eq!(
                (got.id.0, got.status, got.opcode),
                (1000 + slot as u64, WcStatus::Success, opcode)
            );
            assert_eq!((got.byte_len as usize, got.imm as usize), (op.len, imm));
            if matches!(op.what, What::Send) {
                assert!(bytes_of(&mine.inbox, slot * LONGEST, op.len) == payload, "SEND {at}");
            }
            slot += 1;
        }
    }
    assert_eq!(recvs.len(), slot);
    assert!(bytes_of(&mine.window, 0, 2 * LONGEST) == window, "the window");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_model(
        seed: u64,
        conditions in conditions(),
        a in prop::collection::vec(op(), 1..OPS),
        b in prop::collection::vec(op(), 1..OPS),
    ) {
        let (mut p, _wire, _network) = memory_pair(seed, conditions, limits(), limits());
        let (ma, mb) = (Memory::new(&mut p.a, 1), Memory::new(&mut p.b, 2));
        play(&mut p, (&ma, &mb), (&a, &b), false, &mut Dice(seed));
        let last = |ops: &[Op]| ops.len() as u64 - 1;
        let (last_a, last_b) = (last(&a), last(&b));
        p.until("the last", |p| p.a.status_of(last_a).is_some() && p.b.status_of(last_b).is_some());
        p.settle();
        check_sends(&p.a, &ma, &a, 2 ^ 0x55);
        check_sends(&p.b, &mb, &b, 1 ^ 0x55);
        check_receives(&p.b, &mb, &a, 1);
        check_receives(&p.a, &ma, &b, 2);
    }

    #[test]
    fn a_cut_completes_everything_once(
        seed: u64,
        conditions in conditions(),
        cut in 0..60_000usize,
        hard: bool,
        a in prop::collection::vec(op(), 1..OPS),
        b in prop::collection::vec(op(), 1..OPS),
    ) {
        let (mut p, wire, _network) = memory_pair(seed, conditions, limits(), limits());
        let (ma, mb) = (Memory::new(&mut p.a, 1), Memory::new(&mut p.b, 2));
        let mut dice = Dice(seed);
        if !hard {
            wire.cut_after(End::A, cut);
        }
        play(&mut p, (&ma, &mb), (&a, &b), true, &mut dice);
        for _ in 0..cut % 50 {
            p.drive();
        }
        wire.cut();
        let (want_a, want_b) = (a.len() + OPS, b.len() + OPS);
        p.until("the flush", |p| p.a.seen.len() >= want_a && p.b.seen.len() >= want_b);
        p.settle();
        for (side, ops) in [(&p.a, &a), (&p.b, &b)] {
            let ids: HashSet<_> = side.seen.iter().map(|c| c.id.0).collect();
            prop_assert_eq!(ids.len(), side.seen.len(), "each once");
            for (queue, count) in [(0..1000, ops.len()), (1000..2000, OPS)] {
                let own: Vec<_> = side.seen.iter().filter(|c| queue.contains(&c.id.0)).collect();
                prop_assert_eq!(own.len(), count);
                prop_assert!(own.is_sorted_by_key(|c| c.id.0), "in order");
                let bad: Vec<_> = own.iter().map(|c| c.status).skip_while(|s| *s == WcStatus::Success).collect();
                prop_assert!(bad.iter().skip(1).all(|s| *s == WcStatus::Flushed), "{:?}", bad);
            }
        }
    }

    #[test]
    fn the_same_seed_does_the_same(
        seed: u64,
        conditions in conditions(),
        a in prop::collection::vec(op(), 1..OPS),
        b in prop::collection::vec(op(), 1..OPS),
    ) {
        let once = || {
            let (mut p, wire, _network) = memory_pair(seed, conditions, limits(), limits());
            let (ma, mb) = (Memory::new(&mut p.a, 1), Memory::new(&mut p.b, 2));
            play(&mut p, (&ma, &mb), (&a, &b), false, &mut Dice(seed));
            let mut trace = Vec::new();
            for _ in 0..60 {
                p.drive();
                trace.push((p.a.seen.len(), p.b.seen.len(), wire.under_way(End::A), wire.under_way(End::B)));
            }
            (trace, p.a.seen.clone(), p.b.seen.clone())
        };
        prop_assert_eq!(once(), once());
    }
}
