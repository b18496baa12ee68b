//! Digests of data. The digest of a WRITE is checked before its data is used; the digest of a READ
//! is computed from memory that does not change until the data is sent.
//!
//! A target commits the data of a WRITE part by part. A part is never smaller than the range of one
//! CRC of the command ([`DataDigests`]), so a part is checked alone, and no part holds memory while
//! it waits for another.

use rblk_fabric::Region;
use rblk_protocol::digest::{Crc32c, crc32c, join};
use rblk_protocol::limits::DIGEST_STRIPE_BYTES;
use rblk_protocol::width::wide;
use rblk_protocol::{CommandCapsule, DataDigests, Tag};

use crate::cache::{STRIPE_BYTES, Segments};
use crate::data::connection::Connection;
use crate::data::parts::Part;
use crate::data::poll_group::group_state::GroupState;
use crate::data::request::Span;
use crate::store::Store;

const _: () = assert!(STRIPE_BYTES == DIGEST_STRIPE_BYTES, "a part has a CRC of its own");

/// Whether the in-capsule data of a WRITE, which has arrived, matches its digest. Counts a
/// mismatch.
#[inline(always)]
pub(in crate::data::poll_group) fn fits_capsule<S: Store>(
    group: &GroupState<S>,
    command: &CommandCapsule,
    span: Span,
    (region, at): (&Region, usize),
) -> bool {
    let found = DataDigests::of(span.offset, command.in_capsule_bytes, |from, len| {
        region.sum(at + wide(from), wide(len), crc32c)
    });
    let fits = found == command.data_digests;
    if !fits {
        group.stats.digest_mismatches.add(1);
    }
    fits
}

/// Whether the data of a part of a WRITE, fetched by RDMA READ, matches its digest. Counts a
/// mismatch.
pub(in crate::data::poll_group) fn fits_part<S: Store>(
    group: &GroupState<S>,
    command: &CommandCapsule,
    span: Span,
    part: &Part,
) -> bool {
    let arena = group.shard.slots().region();
    let cut = DataDigests::cut(span.offset, rblk_protocol::width::narrow(span.len));
    let (begin, end) = (part.at(), part.at() + part.len());
    let DataDigests { first, second } = command.data_digests;
    let fits = [(0, cut, first), (cut, u32::MAX, second)].into_iter().all(|(from, to, crc)| {
        let (from, to) = (from.max(begin), to.min(end));
        from >= to || sum(part.memory(), arena, from - begin, to - begin) == crc
    });
    group.stats.digest_mismatches.add(u64::from(!fits));
    fits
}

/// The CRC of the bytes `from..to` of lent memory.
#[inline(never)]
pub(in crate::data::poll_group) fn sum(
    memory: &Segments,
    arena: &Region,
    from: u32,
    to: u32,
) -> u32 {
    if let [run] = memory.as_slice() {
        return arena.sum(run.offset + wide(from), wide(to - from), crc32c);
    }
    let mut crc = Crc32c::default();
    memory.each_run(from, to, |run, _| {
        // The return value for each run is not used.
        arena.sum(run.offset, wide(run.len), |bytes| {
            crc.add(bytes);
            0
        });
    });
    crc.value()
}

/// The CRC of the data of a READ. All its parts have their CRCs.
pub(in crate::data::poll_group) fn whole(connection: &Connection, tag: Tag) -> u32 {
    match connection.request(tag).parts() {
        [part] => part.crc(),
        parts => parts.iter().fold(0, |crc, part| join(crc, part.crc(), part.len())),
    }
}
