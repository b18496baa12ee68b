//! Every command through the real engines of both ends, over the in-memory fabric.

use nix::errno::Errno;
use rblk_fabric::soft::network::Conditions;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{AccessMode, BlockCount, Features, Lba, Status, Tag};
use rblk_rig::inprocess::{QueueOptions, RigOptions, Stuck};
use rblk_rig::ram_store::{Kind, StoreConditions};
use rblk_target::store::OpKind;
use rblk_target::volume::CacheMode;
use rblk_tests::bed::{
    Bed, FROZEN, FROZEN_BYTES, MEMORY, NULL, PATIENCE, STORE, VOLUME_BYTES, pattern,
};

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENODEV: i32 = 19;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

fn without_immediates() -> QueueOptions {
    QueueOptions { features: Features::default(), ..QueueOptions::default() }
}

#[test]
fn data_of_every_size_comes_back_as_it_was_written() {
    for options in [QueueOptions::default(), without_immediates()] {
        for volume in [MEMORY, STORE] {
            let mut bed = Bed::new(&RigOptions { seed: 1, ..RigOptions::default() });
            let queue = bed.queue(volume, options);
            // Both sides of the in-capsule limit, and of the size of one extent.
            for blocks in [1, 2, 7, 8, 9, 16, 64, 255, 256, 1024, 2048] {
                let len = blocks * 512;
                let offset = VOLUME_BYTES / 2 + 512 * (blocks as u64 % 5);
                let bytes = pattern(blocks as u64, len);
                bed.write(queue, offset, &bytes);
                assert!(bed.read(queue, offset, len) == bytes, "{len} bytes, volume {volume:?}");
            }
            assert_eq!(bed.rig.take_path_ends(queue), []);
        }
    }
}

#[test]
fn a_null_volume_reads_zeros_after_any_write() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(NULL, QueueOptions::default());
    for len in [512, 4096, 4608, 1 << 20] {
        bed.write(queue, 0, &pattern(3, len));
        assert!(bed.read(queue, 0, len).iter().all(|b| *b == 0));
    }
    for op in [IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes] {
        let len = if op == IoOp::Flush { 0 } else { 4096 };
        assert_eq!(bed.io(queue, op, 0, len), 0);
    }
}

#[test]
fn flush_discard_and_zeroes_have_their_effects() {
    for volume in [MEMORY, STORE] {
        let mut bed = Bed::new(&RigOptions::default());
        let queue = bed.queue(volume, QueueOptions::default());
        bed.write(queue, 0, &pattern(4, 64 << 10));
        assert_eq!(bed.io(queue, IoOp::Flush, 0, 0), 0);
        assert_eq!(bed.io(queue, IoOp::Discard, 4096, 4096), 0);
        assert_eq!(bed.io(queue, IoOp::WriteZeroes, 16384, 8192), 0);
        let mut expected = pattern(4, 64 << 10);
        expected[4096..8192].fill(0);
        expected[16384..24576].fill(0);
        assert!(bed.read(queue, 0, 64 << 10) == expected, "volume {volume:?}");
        // Longer than any data command may be.
        assert_eq!(bed.io(queue, IoOp::WriteZeroes, 0, VOLUME_BYTES), 0);
        assert!(bed.read(queue, 0, 64 << 10).iter().all(|b| *b == 0));
    }
}

#[test]
fn fua_and_unmap_reach_the_store_and_only_when_asked() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    bed.rig.store_mut().keep_log();
    for len in [4096, 8192] {
        for fua in [false, true] {
            let io = Io { fua, ..bed.rig.request(queue, IoOp::Write, 0, len) };
            assert_eq!(bed.run_io(queue, io), i32::try_from(len).unwrap());
            let log = bed.rig.store_mut().take_log();
            assert!(
                matches!(log[..], [op] if matches!(op.kind, OpKind::Write { fua: f, .. } if f == fua)),
                "{len} bytes, fua {fua}: {log:?}"
            );
        }
    }
    for may_unmap in [false, true] {
        let io = Io { may_unmap, ..bed.rig.request(queue, IoOp::WriteZeroes, 0, 4096) };
        assert_eq!(bed.run_io(queue, io), 0);
        let log = bed.rig.store_mut().take_log();
        assert!(
            matches!(log[..], [op] if matches!(op.kind, OpKind::WriteZeroes { may_unmap: m, .. } if m == may_unmap)),
            "{log:?}"
        );
    }
}

#[test]
fn forbidden_requests_are_refused_without_harm() {
    let mut bed = Bed::new(&RigOptions::default());
    let frozen = bed.queue(FROZEN, QueueOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    for op in [IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
        assert_eq!(bed.io(frozen, op, 0, 4096), -EROFS, "{op:?} on a read-only volume");
        assert_eq!(bed.io(frozen, op, 0, 1 << 20), -EROFS, "{op:?} on a read-only volume");
    }
    assert!(bed.read(frozen, 512, 4096) == pattern(7, FROZEN_BYTES)[512..4608]);
    let end = VOLUME_BYTES / 512;
    let cases = [
        (end, 1, 512, -EINVAL),
        (end - 1, 2, 1024, -EINVAL),
        (u64::MAX, 1, 512, -EINVAL),
        (1 << 55, 8, 4096, -EINVAL),
        (0, 2, 512, -EINVAL),
        (0, 1, 1024, -EINVAL),
        (0, 0, 512, -EINVAL),
        (end - 1, 1, 512, 512),
    ];
    for (lba, count, data_bytes, result) in cases {
        for op in [IoOp::Read, IoOp::Write] {
            let io = Io {
                lba: Lba(lba),
                count: BlockCount(count),
                data_bytes,
                ..bed.rig.request(queue, op, 0, 512)
            };
            assert_eq!(bed.run_io(queue, io), result, "{op:?} {lba} {count} {data_bytes}");
        }
    }
    let flush = Io { lba: Lba(1), ..bed.rig.request(queue, IoOp::Flush, 0, 0) };
    assert_eq!(bed.run_io(queue, flush), -EINVAL, "a flush has no range");
    assert_eq!(bed.io(queue, IoOp::Discard, VOLUME_BYTES - 512, 1024), -EINVAL);
    assert_eq!(bed.rig.take_path_ends(queue), [], "errors are no reason to end a connection");
    bed.write(queue, 0, &pattern(9, 4096));
}

#[test]
fn a_volume_is_served_while_it_is_open_and_as_it_was_opened() {
    let mut bed = Bed::new(&RigOptions::default());
    let stranger = bed.rig.begin_session();
    let closed = bed.rig.add_queue(stranger, STORE, QueueOptions::default()).unwrap();
    bed.rig.settle(PATIENCE).unwrap();
    assert_eq!(bed.io(closed, IoOp::Read, 0, 4096), -ENODEV, "never opened");
    bed.rig.open(stranger, STORE, AccessMode::ReadOnly);
    assert_eq!(bed.io(closed, IoOp::Read, 0, 4096), 4096);
    assert_eq!(bed.io(closed, IoOp::Write, 0, 4096), -EROFS, "opened for reading");
    bed.rig.open(stranger, STORE, AccessMode::Exclusive);
    assert_eq!(bed.io(closed, IoOp::Write, 0, 4096), 4096);
    bed.rig.close(stranger, STORE, Status::Fenced);
    assert_eq!(bed.io(closed, IoOp::Write, 0, 4096), -Status::Fenced.errno());
    bed.rig.close(stranger, STORE, Status::NoSuchVolume);
    assert_eq!(bed.io(closed, IoOp::Flush, 0, 0), -ENODEV);
    let queue = bed.queue(STORE, QueueOptions::default());
    assert_eq!(bed.io(queue, IoOp::Read, 0, 4096), 4096, "another session keeps it open");
}

/// A session that cannot write has nothing to make durable: its FLUSHes cost the store nothing, and
/// a stalled store does not delay them.
#[test]
fn a_reader_flushes_nothing() {
    for cache in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut bed = Bed::with_cache(&RigOptions::default(), cache);
        let writer = bed.queue(STORE, QueueOptions::default());
        bed.write(writer, 0, &pattern(1, 4096));
        let session = bed.rig.begin_session();
        bed.rig.open(session, STORE, AccessMode::ReadOnly);
        bed.rig.open(session, FROZEN, AccessMode::ReadOnly);
        let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
        for volume in [STORE, FROZEN] {
            let reader = bed.rig.add_queue(session, volume, QueueOptions::default()).unwrap();
            bed.rig.run(PATIENCE, |rig| rig.is_connected(reader)).unwrap();
            bed.rig.store_mut().set_conditions(stalled);
            assert_eq!(bed.io(reader, IoOp::Flush, 0, 0), 0, "{cache:?}");
            bed.rig.store_mut().set_conditions(StoreConditions::default());
        }
        // The writer's FLUSH does wait for the store.
        bed.rig.store_mut().set_conditions(stalled);
        bed.submit(writer, 0, IoOp::Flush, 0, 0);
        assert!(bed.rig.run(1000, |rig| rig.outstanding(writer) == 0).is_err(), "{cache:?}");
        bed.rig.store_mut().set_conditions(StoreConditions::default());
        assert_eq!(bed.outcomes(1)[0].result, 0, "{cache:?}");
    }
}

#[test]
fn sessions_and_queues_do_not_mix() {
    let mut bed = Bed::new(&RigOptions::default());
    let other = bed.rig.begin_session();
    bed.open_all(other);
    let mut queues = Vec::new();
    for volume in [MEMORY, STORE] {
        for _ in 0..3 {
            queues.push(bed.queue(volume, QueueOptions { depth: 4, ..QueueOptions::default() }));
            let options = QueueOptions { depth: 8, ..without_immediates() };
            queues.push(bed.rig.add_queue(other, volume, options).unwrap());
        }
    }
    bed.rig.settle(PATIENCE).unwrap();
    for (at, queue) in queues.iter().enumerate() {
        for tag in 0..4u16 {
            let at = at as u64 * 4 + u64::from(tag);
            bed.rig.fill_buffer(*queue, Tag(tag), &pattern(at, 16384));
            bed.submit(*queue, tag, IoOp::Write, at * 16384, 16384);
        }
    }
    assert!(bed.outcomes(queues.len() * 4).iter().all(|o| o.result == 16384));
    // Each queue reads the data of its neighbour on the same volume.
    for volume in queues.chunks(6) {
        for (at, queue) in volume.iter().enumerate() {
            let writer = queues.iter().position(|q| *q == volume[(at + 1) % 6]).unwrap();
            let at = writer as u64 * 4;
            assert!(bed.read(*queue, at * 16384, 16384) == pattern(at, 16384));
        }
    }
}

#[test]
fn an_arena_of_one_extent_serves_a_deep_queue_in_order() {
    for options in [QueueOptions::default(), without_immediates()] {
        let options = QueueOptions { depth: 128, io_max_bytes: 64 << 10, ..options };
        let rig =
            RigOptions { arena_bytes: 64 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
        let mut bed = Bed::new(&rig);
        let queue = bed.queue(STORE, options);
        for op in [IoOp::Write, IoOp::Read] {
            for tag in 0..128u16 {
                let offset = u64::from(tag) << 16;
                if op == IoOp::Write {
                    bed.rig.fill_buffer(queue, Tag(tag), &pattern(offset, 64 << 10));
                }
                bed.submit(queue, tag, op, offset % VOLUME_BYTES, 64 << 10);
            }
            let outcomes = bed.outcomes(128);
            assert!(outcomes.iter().all(|o| o.result == 64 << 10));
            let order: Vec<u16> = outcomes.iter().map(|o| o.tag.0).collect();
            let fair: Vec<u16> = (0..128).collect();
            assert_eq!(order, fair, "first come, first served: {op:?}");
        }
        assert!(bed.rig.target_counts().memory_waits > 200);
    }
}

#[test]
fn small_requests_do_not_overtake_a_large_one_that_waits_for_memory() {
    let rig =
        RigOptions { arena_bytes: 256 << 10, io_max_bytes: 128 << 10, ..RigOptions::default() };
    let mut bed = Bed::new(&rig);
    let options = QueueOptions { depth: 64, io_max_bytes: 128 << 10, ..QueueOptions::default() };
    let (greedy, modest) = (bed.queue(STORE, options), bed.queue(STORE, options));
    // A stream of small reads that would keep a bit of every large extent indefinitely.
    let mut large_done = 0;
    let mut small_since = 0u32;
    for tag in 0..63u16 {
        bed.submit(greedy, tag, IoOp::Read, u64::from(tag) * 4096, 4096);
    }
    bed.submit(modest, 0, IoOp::Read, 0, 128 << 10);
    let done = bed.rig.run(PATIENCE, |rig| {
        for outcome in rig.take_outcomes() {
            if outcome.queue == modest {
                large_done += 1;
                small_since = 0;
                let io = rig.request(modest, IoOp::Read, 0, 128 << 10);
                rig.submit(modest, Tag(0), io).unwrap();
            } else {
                small_since += 1;
                assert!(small_since < 1000, "a large read starves");
                let io = rig.request(greedy, IoOp::Read, 0, 4096);
                rig.submit(greedy, outcome.tag, io).unwrap();
            }
        }
        large_done >= 50
    });
    assert!(done.is_ok(), "{large_done} large reads ended");
}

#[test]
fn an_idle_connection_returns_its_memory_to_waiting_ones() {
    let rig =
        RigOptions { arena_bytes: 128 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let mut bed = Bed::new(&rig);
    let options = QueueOptions { depth: 128, io_max_bytes: 64 << 10, ..QueueOptions::default() };
    let (idle, busy) = (bed.queue(STORE, options), bed.queue(STORE, options));
    // Two reads fill the arena. Unsignaled work requests of an idle connection keep their extents.
    for tag in 0..2 {
        bed.submit(idle, tag, IoOp::Read, 0, 64 << 10);
    }
    bed.outcomes(2);
    for _ in 0..20 {
        bed.read(busy, 0, 64 << 10);
    }
}

#[test]
fn one_read_credit_serves_a_deep_queue_of_large_writes() {
    let mut bed = Bed::new(&RigOptions { seed: 5, ..RigOptions::default() });
    for volume in [MEMORY, STORE] {
        let options = QueueOptions {
            depth: 64,
            io_max_bytes: 32 << 10,
            reads_out: 1,
            ..QueueOptions::default()
        };
        let queue = bed.queue(volume, options);
        for tag in 0..64u16 {
            bed.rig.fill_buffer(queue, Tag(tag), &pattern(tag.into(), 32 << 10));
            bed.submit(queue, tag, IoOp::Write, u64::from(tag) << 15, 32 << 10);
        }
        assert!(bed.outcomes(64).iter().all(|o| o.result == 32 << 10));
        for tag in 0..64 {
            assert!(bed.read(queue, tag << 15, 32 << 10) == pattern(tag, 32 << 10));
        }
        // A second READ at a time would have ended the connection.
        assert_eq!(bed.rig.take_path_ends(queue), []);
    }
    assert!(bed.rig.target_counts().read_credit_waits >= 60);
}

#[test]
fn send_queues_never_overflow_on_a_link_that_barely_moves() {
    for depth in [1, 2, 3, 17, 128] {
        for options in [QueueOptions::default(), without_immediates()] {
            let mut bed = Bed::new(&RigOptions { seed: depth.into(), ..RigOptions::default() });
            let queue = bed.queue(MEMORY, QueueOptions { depth, ..options });
            bed.rig.network().set_conditions(Conditions {
                fragment: true,
                delay_min: 0,
                delay_max: 50,
                buffer: 300,
            });
            let mut begun = 0u32;
            for tag in 0..depth {
                bed.submit(queue, tag, IoOp::Read, 0, 512);
                begun += 1;
            }
            let mut ended = 0;
            while ended < begun {
                for outcome in bed.outcomes(1) {
                    assert_eq!(outcome.result, 512, "depth {depth}");
                    ended += 1;
                    if begun < 300 {
                        begun += 1;
                        bed.submit(queue, outcome.tag.0, IoOp::Read, 0, 512);
                    }
                }
            }
            assert_eq!(bed.rig.take_path_ends(queue), []);
        }
    }
}

#[test]
fn a_store_error_is_the_answer_to_its_request_and_to_no_other() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    let cases = [
        (Kind::Read, IoOp::Read, Errno::EIO, EIO),
        (Kind::Write, IoOp::Write, Errno::ENOSPC, ENOSPC),
        (Kind::Write, IoOp::Write, Errno::EDQUOT, ENOSPC),
        (Kind::Read, IoOp::Read, Errno::ENXIO, ENODEV),
        (Kind::Discard, IoOp::Discard, Errno::EOPNOTSUPP, 95),
        (Kind::WriteZeroes, IoOp::WriteZeroes, Errno::EROFS, EROFS),
        (Kind::Write, IoOp::Write, Errno::EPERM, EIO),
    ];
    for (kind, op, from, to) in cases {
        let unlucky = 13;
        bed.rig.store_mut().fail_next(kind, unlucky * 16384, from);
        for tag in 0..32u16 {
            bed.submit(queue, tag, op, u64::from(tag) * 16384, 16384);
        }
        let data = matches!(op, IoOp::Read | IoOp::Write);
        for outcome in bed.outcomes(32) {
            let fine = if data { 16384 } else { 0 };
            let expected = if u64::from(outcome.tag.0) == unlucky { -to } else { fine };
            assert_eq!(outcome.result, expected, "{op:?} {from:?} tag {}", outcome.tag.0);
        }
    }
    bed.rig.store_mut().fail_next(Kind::Flush, 0, Errno::EIO);
    assert_eq!(bed.io(queue, IoOp::Flush, 0, 0), -EIO);
    assert_eq!(bed.io(queue, IoOp::Flush, 0, 0), 0);
    assert_eq!(bed.rig.queue_counts(queue).errors, cases.len() as u64 + 1);
    assert_eq!(bed.rig.target_counts().failed_commands, cases.len() as u64 + 1);
}

#[test]
fn an_errno_without_a_name_is_an_error_and_no_success() {
    // Drivers of the kernel return such numbers, for instance ENOTSUPP (524). `Errno::from_raw` has
    // no name for it.
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    for (kind, op) in [(Kind::Read, IoOp::Read), (Kind::Write, IoOp::Write)] {
        bed.rig.store_mut().fail_next(kind, 0, Errno::from_raw(524));
        assert_eq!(bed.io(queue, op, 0, 4096), -EIO, "{op:?}");
    }
}

#[test]
fn a_full_store_delays_and_loses_nothing() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions { depth: 64, ..QueueOptions::default() });
    let conditions = StoreConditions { capacity: 1, delay_max: 3, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(conditions);
    for round in 0..4u64 {
        for tag in 0..64u16 {
            let op = if round % 2 == 0 { IoOp::Write } else { IoOp::Read };
            if op == IoOp::Write {
                bed.rig.fill_buffer(queue, Tag(tag), &pattern(round + u64::from(tag), 8192));
            }
            bed.submit(queue, tag, op, u64::from(tag) * 8192, 8192);
        }
        assert!(bed.outcomes(64).iter().all(|o| o.result == 8192));
        if round % 2 == 1 {
            for tag in 0..64u16 {
                let bytes = pattern(round - 1 + u64::from(tag), 8192);
                assert!(bed.rig.buffer(queue, Tag(tag), 8192) == bytes);
            }
        }
    }
}

#[test]
fn a_read_that_the_store_cut_short_is_an_error() {
    for short_by in [512, 4096] {
        let mut bed = Bed::new(&RigOptions::default());
        let queue = bed.queue(STORE, QueueOptions::default());
        let conditions = StoreConditions { short_by, ..StoreConditions::default() };
        bed.rig.store_mut().set_conditions(conditions);
        assert_eq!(bed.io(queue, IoOp::Read, 0, 4096), -EIO, "short by {short_by}");
        assert_eq!(bed.rig.take_path_ends(queue), []);
    }
}

#[test]
fn a_volume_the_store_does_not_know_is_gone() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    bed.rig.store_mut().set_volume(STORE, Vec::new());
    assert_eq!(bed.io(queue, IoOp::Read, 0, 4096), -EIO, "it shrank under us");
}

/// One capsule in each message.
fn one_by_one() -> QueueOptions {
    QueueOptions { features: Features::WRITE_WITH_IMM, ..QueueOptions::default() }
}

/// Runs I/Os at a depth in a steady state. Returns the increments of the counters.
fn counted(
    options: QueueOptions,
    op: IoOp,
    bytes: u64,
    ios: u64,
) -> (
    rblk_operate::mount::queue_counts::QueueCounts,
    rblk_operate::target::group_counts::StatsSnapshot,
) {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, options);
    let rounds = |bed: &mut Bed, ios: u64| {
        for _ in 0..ios / u64::from(options.depth) {
            for tag in 0..options.depth {
                bed.submit(queue, tag, op, u64::from(tag) * bytes, bytes);
            }
            bed.outcomes(usize::from(options.depth));
        }
    };
    rounds(&mut bed, 10 * u64::from(options.depth));
    let (i, t) = (bed.rig.queue_counts(queue), bed.rig.target_counts());
    rounds(&mut bed, ios);
    let (i2, t2) = (bed.rig.queue_counts(queue), bed.rig.target_counts());
    (i2.since(&i), t2.since(&t))
}

#[test]
fn a_small_write_is_two_messages_and_no_key() {
    let (i, t) = counted(one_by_one(), IoOp::Write, 4096, 3200);
    assert_eq!((i.sends, i.keyed_commands, i.in_capsule_writes), (3200, 0, 3200));
    assert_eq!((t.sends, t.rdma_reads, t.rdma_writes, t.rdma_writes_with_imm), (3200, 0, 0, 0));
    assert_eq!(i.completions, 3200 + i.signaled, "one completion per I/O");
    assert!(i.signaled <= 3200 / 16 && t.signaled <= 3200 / 16, "{} {}", i.signaled, t.signaled);
}

#[test]
fn a_read_is_two_messages_with_an_immediate_and_three_without() {
    let (i, t) = counted(one_by_one(), IoOp::Read, 4096, 3200);
    assert_eq!((i.sends, i.immediates), (3200, 3200));
    assert_eq!((t.sends, t.rdma_writes, t.rdma_writes_with_imm), (0, 0, 3200));
    assert_eq!(i.completions, 3200 + i.signaled, "one completion per I/O");
    assert!(i.signaled <= 3200 / 16 && t.signaled <= 3200 / 16, "{} {}", i.signaled, t.signaled);
    let (i, t) = counted(without_immediates(), IoOp::Read, 4096, 3200);
    assert_eq!((i.sends, i.immediates), (3200, 0));
    assert_eq!((t.sends, t.rdma_writes, t.rdma_writes_with_imm), (3200, 3200, 0));
    assert_eq!(i.completions, 3200 + i.signaled, "one completion per I/O");
    assert!(t.signaled <= 2 * 3200 / 16, "of two work requests each: {}", t.signaled);
}

#[test]
fn a_large_write_is_pulled_by_one_read() {
    let (i, t) = counted(one_by_one(), IoOp::Write, 16384, 640);
    assert_eq!((i.sends, i.keyed_commands, i.in_capsule_writes), (640, 640, 0));
    assert_eq!((t.sends, t.rdma_reads, t.rdma_writes), (640, 640, 0));
    assert_eq!(i.completions, 640 + i.signaled);
    assert_eq!(t.send_credit_waits, 0);
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let run = |seed: u64| {
        let conditions = Conditions { fragment: true, delay_min: 0, delay_max: 9, buffer: 4096 };
        let mut bed = Bed::new(&RigOptions { seed, conditions, ..RigOptions::default() });
        let queue = bed.queue(STORE, QueueOptions::default());
        let store = StoreConditions { delay_max: 20, errors_per_mille: 50, ..Default::default() };
        bed.rig.store_mut().set_conditions(store);
        for round in 0..20u64 {
            for tag in 0..32u16 {
                let op = [IoOp::Read, IoOp::Write][usize::from(tag % 2)];
                bed.submit(queue, tag, op, round * 4096, 4096 << (round % 3));
            }
            bed.outcomes(32);
        }
        let counts = (bed.rig.target_counts(), bed.rig.queue_counts(queue));
        (bed.rig.fingerprint(), bed.rig.steps(), counts)
    };
    assert_eq!(run(11), run(11));
    assert_ne!(run(11).0, run(12).0);
}

#[test]
fn a_stalled_store_stalls_its_requests_alone() {
    let mut bed = Bed::new(&RigOptions::default());
    let (slow, quick) =
        (bed.queue(STORE, QueueOptions::default()), bed.queue(MEMORY, QueueOptions::default()));
    let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(stalled);
    for tag in 0..32u16 {
        bed.submit(slow, tag, IoOp::Write, u64::from(tag) * 4096, 4096);
    }
    for _ in 0..50 {
        bed.read(quick, 0, 4096);
    }
    assert_eq!(bed.rig.outstanding(slow), 32);
    assert_eq!(bed.rig.settle(1000), Err(Stuck { steps: 1000 }));
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    assert!(bed.outcomes(32).iter().all(|o| o.queue == slow && o.result == 4096));
}
