//! Lists of segments: lists that fit or do not fit, the longest lists, and transfers that the
//! kernel splits.

use super::*;

#[test]
fn lists_that_do_not_fit_are_refused() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    on_both(&path, |engine, region| {
        let inside = segment(0, 512);
        let len = region.len();
        let with = |kind, memory: &[Segment]| Io { kind, memory: memory.to_vec() };
        let reading = |len| OpKind::Read { offset: 0, len };
        let writing = |len| OpKind::Write { offset: 0, len, fua: false };
        for kind in [reading, writing as fn(u32) -> OpKind] {
            for io in [
                // Too short, too long, by one byte and by one segment.
                with(kind(512), &[]),
                with(kind(1024), &[inside]),
                with(kind(1024), &[inside, segment(512, 511)]),
                with(kind(1024), &[inside, segment(512, 513)]),
                with(kind(512), &[inside, inside]),
                with(kind(0), &[inside]),
                // 2^32 bytes are not 0 bytes.
                with(kind(0), &vec![segment(0, 4 * MIB32); MAX_SEGMENTS]),
                // A later segment is outside, not the first.
                with(kind(1024), &[inside, segment(len - 511, 512)]),
                with(kind(1024), &[inside, segment(len, 512)]),
                with(kind(1024), &[inside, segment(usize::MAX - 511, 512)]),
                with(kind(1024), &[inside, segment(usize::MAX, 512)]),
                with(kind(512), &[segment(len + 1, 0), inside]),
            ] {
                assert_eq!(engine.run_one(io.clone()), Err(Errno::EINVAL), "{io:?}");
            }
            assert_eq!(engine.run_one(with(kind(0), &[])), Ok(0));
            assert_eq!(engine.run_one(with(kind(0), &[segment(len, 0)])), Ok(0));
        }
        for io in [flush(), discard(0, 512), zeroes(0, 512, true)] {
            let given = with(io.kind, &[inside]);
            assert_eq!(engine.run_one(given.clone()), Err(Errno::EINVAL), "{given:?}");
            assert_eq!(engine.run_one(io), Ok(0));
        }
    });
}

#[test]
fn the_longest_list_and_one_more() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    on_both(&path, |engine, region| {
        // From the end of the region to its start, so that no two segments are adjacent.
        let apart: Vec<_> =
            (0..=MAX_SEGMENTS).map(|i| segment(region.len() - (i + 1) * 512, 512)).collect();
        let adjacent: Vec<_> = (0..=MAX_SEGMENTS).map(|i| segment(i * 512, 512)).collect();
        for (seed, list) in [(1, apart), (2, adjacent)] {
            let longest = &list[..MAX_SEGMENTS];
            let bytes = MAX_SEGMENTS * 512;
            let data = pattern(seed, 0, bytes);
            scatter(region, longest, &data);
            let done = Ok(u32::try_from(bytes).unwrap());
            assert_eq!(engine.run_one(write_from(512, longest, true)), done);
            scatter(region, longest, &vec![0; bytes]);
            assert_eq!(engine.run_one(read_into(512, longest)), done);
            assert!(gather(region, longest) == data);
            assert_eq!(engine.run_one(write_from(0, &list, false)), Err(Errno::EINVAL));
            assert_eq!(engine.run_one(read_into(0, &list)), Err(Errno::EINVAL));
        }
    });
}

#[test]
fn many_lists_at_once() {
    const OPS: usize = 64;
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    let mut store = uring(&region, 16, &backing);
    // The lists grow and shrink from op to op, in slots that had other lists before.
    let segments = |op: usize| 1 + op * 7 % 16;
    let list = |op: usize| -> Vec<_> {
        (0..segments(op)).rev().map(|i| segment((i * OPS + op) * 1024, 512)).collect()
    };
    let offset = |op: usize| (op * 16 * 512) as u64;
    for op in 0..OPS {
        scatter(&region, &list(op), &pattern(3, op, segments(op) * 512));
    }
    let writes: Vec<_> = (0..OPS).map(|op| write_from(offset(op), &list(op), false)).collect();
    assert!(store.run(&writes).iter().all(Result::is_ok));
    region.zero(0, MIB);
    let reads: Vec<_> = (0..OPS).map(|op| read_into(offset(op), &list(op))).collect();
    assert!(store.run(&reads).iter().all(Result::is_ok));
    for op in 0..OPS {
        assert!(gather(&region, &list(op)) == pattern(3, op, segments(op) * 512), "{op}");
    }
}

// Most bytes that the kernel moves with one entry: MAX_RW_COUNT of linux/fs.h, with pages of 4 KiB.
const MOST_AT_ONCE: usize = 0x7fff_f000;

// Bytes in front of those that the two tests below check.
const BEFORE: usize = MOST_AT_ONCE - 96 * 1024;

/// A list slightly longer than one kernel transfer; the border is inside a segment. The bytes from
/// `BEFORE` on have their own places, and those before share one.
fn longer_than_the_kernel_moves() -> (Vec<Segment>, Vec<Segment>) {
    let step = 8 * MIB;
    let shared = (0..BEFORE.div_ceil(step))
        .map(|i| segment(0, u32::try_from(step.min(BEFORE - i * step)).unwrap()))
        .collect();
    // Separate, and in reverse order.
    let own = (0..96).rev().map(|i| segment(step + i * 16 * 1024, 12800)).collect();
    (shared, own)
}

fn check_transfer_in_two(path: &Path, write: bool) {
    let backing = Arc::new(Backing::open(path, &options(512, Direct::Preferred)).unwrap());
    let region = region(16 * MIB);
    let (shared, own) = longer_than_the_kernel_moves();
    assert!(!(MOST_AT_ONCE - BEFORE).is_multiple_of(own[0].len as usize), "inside a segment");
    let all = [&shared[..], &own].concat();
    let len: u32 = all.iter().map(|segment| segment.len).sum();
    assert!(all.len() <= MAX_SEGMENTS && len as usize > MOST_AT_ONCE);
    let data = pattern(5, BEFORE, own.len() * own[0].len as usize);
    scatter(&region, &own, &data);
    let mut store = uring(&region, 4, &backing);
    let first =
        if write { write_from(0, &all, true) } else { write_from(BEFORE as u64, &own, true) };
    assert!(store.run_one(first).is_ok());
    scatter(&region, &own, &vec![0; data.len()]);
    let second = if write { read_into(BEFORE as u64, &own) } else { read_into(0, &all) };
    assert!(store.run_one(second).is_ok());
    assert!(gather(&region, &own) == data);
    assert_eq!(store.counters().short, 1, "the kernel moved all of it at once");
}

#[test]
fn a_read_goes_on_inside_a_segment() {
    let directory = directory();
    let path = file(directory.path(), "disk", 1 << 32);
    check_transfer_in_two(&path, false);
}

#[test]
#[ignore = "writes 2 GiB"]
fn a_write_goes_on_inside_a_segment() {
    let directory = directory();
    let path = file(directory.path(), "disk", 1 << 32);
    check_transfer_in_two(&path, true);
}
