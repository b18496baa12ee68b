//! Cases of what arrives: messages, RDMA in both directions, and the events that wake whoever
//! sleeps for them.

use std::time::{Duration, Instant};

use rblk_fabric::{Access, RecvWr, Recvs, SendOp, SendWr, SgeList, WcOpcode, WrId};

use super::{Expect, OK, PATIENCE, Pair, bytes_of, fill, wr};

pub(super) fn send_and_recv(p: &mut Pair, _: &Expect) {
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
pub(super) fn nothing_is_slept_through(p: &mut Pair, _: &Expect) {
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

pub(super) fn write_then_send_is_ordered(p: &mut Pair, _: &Expect) {
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

pub(super) fn immediate_arrives(p: &mut Pair, _: &Expect) {
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

pub(super) fn read_fetches(p: &mut Pair, _: &Expect) {
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

pub(super) fn gather(p: &mut Pair, _: &Expect) {
    let a = p.a.memory(8192, Access::LOCAL_READ);
    let other = p.a.memory(8192, Access::LOCAL_READ);
    let window = p.b.memory(8192, Access::REMOTE);
    fill(&a, 1);
    fill(&other, 2);
    let sges = SgeList::two(a.sge(10, 1000).unwrap(), other.sge(4096, 3000).unwrap());
    let op = SendOp::Write(window.remote(1));
    p.a.post(&[SendWr { id: WrId(1), op, sges, signaled: true, inline: false }]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, OK)]);
    let mut expected = bytes_of(&a, 10, 1000);
    expected.extend(bytes_of(&other, 4096, 3000));
    assert_eq!(bytes_of(&window, 1, 4000), expected);
}

pub(super) fn scatter(p: &mut Pair, _: &Expect) {
    let a = p.a.memory(8192, Access::LOCAL_WRITE);
    let window = p.b.memory(8192, Access::REMOTE);
    fill(&window, 3);
    let sges = SgeList::two(a.sge(5000, 3000).unwrap(), a.sge(100, 1000).unwrap());
    let op = SendOp::Read(window.remote(1));
    p.a.post(&[SendWr { id: WrId(2), op, sges, signaled: true, inline: false }]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(2, OK)]);
    let mut got = bytes_of(&a, 5000, 3000);
    got.extend(bytes_of(&a, 100, 1000));
    assert_eq!(got, bytes_of(&window, 1, 4000));
}

pub(super) fn scattered_messages(p: &mut Pair, _: &Expect) {
    let a = p.a.memory(16384, Access::LOCAL_READ);
    fill(&a, 7);
    let (sink, other) =
        (p.b.memory(16384, Access::LOCAL_WRITE), p.b.memory(8192, Access::LOCAL_WRITE));
    let pieces = [(&sink, 8192, 4096), (&other, 100, 1000), (&sink, 1, 4096), (&other, 4096, 64)];
    let mut sges = SgeList::default();
    for (memory, offset, len) in pieces {
        assert!(sges.push(memory.sge(offset, len).unwrap()));
    }
    // A RECV of a table is posted again and again, in any order.
    let table = [5, 6].map(|id| RecvWr { id: WrId(id), sges });
    for (row, bytes) in [(1u16, 1u32), (0, 4096), (1, 4097), (1, 5096), (0, 9192), (0, 9256)] {
        for (memory, offset, len) in pieces {
            memory.region().zero(offset, len as usize);
        }
        p.b.poller.post_recvs(p.b.qp, Recvs { table: &table, rows: &[row] }).unwrap();
        let sges = SgeList::one(a.sge(3, bytes).unwrap());
        p.a.post(&[SendWr { id: WrId(1), op: SendOp::Send, sges, signaled: true, inline: false }]);
        let (sent, came) = (p.a.seen.len() + 1, p.b.seen.len() + 1);
        p.until_a(sent);
        p.until_b(came);
        let completion = p.b.seen[came - 1];
        assert_eq!((completion.id.0, completion.status), (u64::from(row) + 5, OK));
        assert_eq!(completion.byte_len, bytes);
        let mut got = Vec::new();
        for (memory, offset, len) in pieces {
            got.extend(bytes_of(memory, offset, len as usize));
        }
        let (came, behind) = got.split_at(bytes as usize);
        assert_eq!(came, bytes_of(&a, 3, bytes as usize), "{bytes} bytes");
        assert!(behind.iter().all(|byte| *byte == 0), "no more than {bytes} bytes are written");
    }
    // What is longer than all pieces is refused.
    p.b.poller.post_recvs(p.b.qp, Recvs { table: &table, rows: &[0] }).unwrap();
    let sges = SgeList::one(a.sge(0, 9257).unwrap());
    p.a.post(&[SendWr { id: WrId(2), op: SendOp::Send, sges, signaled: true, inline: false }]);
    let (sent, came) = (p.a.seen.len() + 1, p.b.seen.len() + 1);
    p.until_a(sent);
    p.until_b(came);
    assert_ne!(p.a.seen[sent - 1].status, OK);
    assert_ne!(p.b.seen[came - 1].status, OK);
}

pub(super) fn a_message_of_four_pieces(p: &mut Pair, _: &Expect) {
    let a = p.a.memory(16384, Access::LOCAL_READ);
    let other = p.a.memory(8192, Access::REMOTE);
    let sink = p.b.memory(16384, Access::LOCAL_WRITE);
    fill(&a, 1);
    fill(&other, 2);
    p.b.recv(5, sink.sge(64, 16000).unwrap());
    let mut sges = SgeList::one(a.sge(3, 100).unwrap());
    sges.grow_first(92);
    assert!(sges.push_second(a.sge(9000, 4096).unwrap()));
    assert!(sges.push_second(other.sge(1, 4097).unwrap()));
    assert!(sges.push_second(a.sge(4000, 1).unwrap()));
    assert!(!sges.push_second(a.sge(0, 1).unwrap()));
    p.a.post(&[SendWr { id: WrId(1), op: SendOp::Send, sges, signaled: true, inline: false }]);
    p.until_b(1);
    let mut expected = bytes_of(&a, 3, 192);
    expected.extend(bytes_of(&a, 4000, 1));
    expected.extend(bytes_of(&other, 1, 4097));
    expected.extend(bytes_of(&a, 9000, 4096));
    assert_eq!(p.b.seen[0].byte_len as usize, expected.len());
    assert_eq!(bytes_of(&sink, 64, expected.len()), expected);
}

pub(super) fn large_both_ways(p: &mut Pair, _: &Expect) {
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

/// READ responses with messages of the peer between them: every byte lands in its place.
pub(super) fn reads_among_messages(p: &mut Pair, _: &Expect) {
    const PART: usize = 3000;
    const MESSAGE: usize = 700;
    let (window, source) = (p.b.memory(64 << 10, Access::REMOTE), p.b.memory(8192, Access::REMOTE));
    let (sink, written) =
        (p.a.memory(64 << 10, Access::LOCAL_WRITE), p.a.memory(8192, Access::REMOTE));
    let inbox = p.a.memory(8192, Access::LOCAL_WRITE);
    fill(&window, 5);
    fill(&source, 6);
    for round in 0..24usize {
        sink.region().zero(0, 64 << 10);
        inbox.region().zero(0, 8192);
        written.region().zero(0, 8192);
        let (came, answered) = (p.a.seen.len(), p.b.seen.len());
        for at in 0..2 {
            p.a.recv(100 + at as u64, inbox.sge(at * 4096, 4096).unwrap());
        }
        // Each READ has two places, the second one before the first.
        let reads = [0, 1, 2, 3].map(|at: usize| {
            let (one, two) = (at * 8192 + 4096 + at, at * 8192 + round);
            let sges = SgeList::two(
                sink.sge(one, 1000).unwrap(),
                sink.sge(two, u32::try_from(PART).unwrap() - 1000).unwrap(),
            );
            let op = SendOp::Read(window.remote(at * PART + round));
            SendWr { id: WrId(at as u64), op, sges, signaled: true, inline: false }
        });
        p.a.post(&reads);
        for _ in 0..round % 6 {
            p.drive();
        }
        let message = |at: usize| source.sge(at * 1000, u32::try_from(MESSAGE).unwrap()).unwrap();
        p.b.post(&[wr(10, SendOp::Send, message(0), false)]);
        for _ in 0..round % 3 {
            p.drive();
        }
        p.b.post(&[
            wr(11, SendOp::Write(written.remote(round)), message(1), false),
            wr(12, SendOp::Send, message(2), true),
        ]);
        p.until_a(came + 6);
        p.until_b(answered + 1);
        assert!(p.a.outcome()[came..].iter().all(|(_, status)| *status == OK), "{round}");
        for at in 0..4 {
            let mut got = bytes_of(&sink, at * 8192 + 4096 + at, 1000);
            got.extend(bytes_of(&sink, at * 8192 + round, PART - 1000));
            assert_eq!(got, bytes_of(&window, at * PART + round, PART), "{round}: READ {at}");
        }
        assert_eq!(bytes_of(&inbox, 0, MESSAGE), bytes_of(&source, 0, MESSAGE), "{round}");
        assert_eq!(bytes_of(&inbox, 4096, MESSAGE), bytes_of(&source, 2000, MESSAGE), "{round}");
        assert_eq!(bytes_of(&written, round, MESSAGE), bytes_of(&source, 1000, MESSAGE), "{round}");
    }
}

/// Messages of the peer while READs land in live memory: each byte of a sink is the old one or the
/// new one, all the time.
pub(super) fn reads_into_live_memory(p: &mut Pair, _: &Expect) {
    const READS: usize = 4;
    const PART: usize = 3000;
    const OLD: u8 = 100;
    let (window, source) = (p.b.memory(64 << 10, Access::REMOTE), p.b.memory(8192, Access::REMOTE));
    let sink = p.a.memory(64 << 10, Access { remote_write: true, ..Access::LIVE_WRITE });
    let inbox = p.a.memory(8192, Access::LOCAL_WRITE);
    // No byte of a message is in the window or in the sink before.
    window.region().write(0, &[[3; 32 << 10], [4; 32 << 10]].concat());
    source.region().write(0, &[200; 8192]);
    for round in 0..24usize {
        sink.region().write(0, &[OLD; 64 << 10]);
        let (came, answered) = (p.a.seen.len(), p.b.seen.len());
        p.a.recv(100, inbox.sge(0, 4096).unwrap());
        let message = source.sge(round, 4000).unwrap();
        p.b.post(&[wr(10, SendOp::Send, message, true)]);
        p.b.poll();
        let reads = [0, 1, 2, 3].map(|at: usize| {
            let place = sink.sge(at * 8192, u32::try_from(PART).unwrap()).unwrap();
            wr(at as u64, SendOp::Read(window.remote(at * PART)), place, true)
        });
        p.a.post(&reads);
        let is_whole = || {
            (0..READS).all(|at| {
                let (got, new) =
                    (bytes_of(&sink, at * 8192, PART), bytes_of(&window, at * PART, PART));
                got.iter().zip(&new).all(|(got, new)| *got == OLD || got == new)
            })
        };
        for _ in 0..round % 4 {
            p.a.poll();
            assert!(is_whole(), "{round}: other bytes are in a sink");
        }
        p.until("READs and the message", |p| {
            assert!(is_whole(), "{round}: other bytes are in a sink");
            p.a.seen.len() > came + READS && p.b.seen.len() > answered
        });
        assert!(p.a.outcome()[came..].iter().all(|(_, status)| *status == OK), "{round}");
        for at in 0..READS {
            let got = bytes_of(&sink, at * 8192, PART);
            assert_eq!(got, bytes_of(&window, at * PART, PART), "{round}: READ {at}");
        }
        assert_eq!(bytes_of(&inbox, 0, 4000), bytes_of(&source, round, 4000), "{round}");
    }
}
