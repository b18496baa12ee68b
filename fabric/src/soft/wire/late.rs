//! RDMA that lands after the end of a QP: a mode of the in-memory network, for tests.
//!
//! On a card a QP in the error state still touches memory. RDMA that is under way still lands,
//! flushes come later, and only a destroyed QP touches nothing. This mode does the same where the
//! device says so
//! ([`DeviceCaps::touches_until_destroyed`](crate::DeviceCaps::touches_until_destroyed)). Every
//! READ that was under way, and the RECV of the next message, get bytes that no peer sent, and
//! every WRITE of the peer that was on the link lands. Both happen at a moment that the seed
//! decides, and once more when the QP is dropped. Code that uses such memory again too early finds
//! its data spoiled.

use std::sync::Arc;

use rblk_protocol::width::wide;

use super::frame::{FrameHeader, FrameKind, HEADER};
use super::inbound::{Inbound, Sink};
use crate::region::Region;
use crate::soft::keys::KeyTable;
use crate::work::{Rkey, SgeList};

/// The payload of a late READ: bytes that no test writes.
const GARBAGE: u8 = 0xdb;

/// Bytes that are to land late.
#[derive(Debug)]
pub(in crate::soft) struct LateBytes {
    region: Arc<Region>,
    offset: usize,
    bytes: Vec<u8>,
}

impl LateBytes {
    /// Writes the bytes to their place.
    pub(in crate::soft) fn land(&self) {
        self.region.write(self.offset, &self.bytes);
    }
}

/// The RDMA that lands after the end of a QP. `sinks` are its READs on the wire and the RECV of the
/// next message, `inbound` is the frame that has begun to arrive, `unread` are the bytes of the
/// peer that were not received.
pub(in crate::soft) fn landings<'a>(
    keys: &KeyTable,
    sinks: impl Iterator<Item = &'a SgeList>,
    inbound: &Inbound,
    unread: &[u8],
) -> Vec<LateBytes> {
    let mut landings = Vec::new();
    for sge in sinks.flat_map(SgeList::as_slice) {
        if let Some((region, offset)) = keys.local_place(*sge) {
            let bytes = vec![GARBAGE; wide(sge.len)];
            landings.push(LateBytes { region, offset, bytes });
        }
    }
    for (key, addr, bytes) in writes(inbound, unread) {
        // No WRITE has more than 32 bits of length.
        let len = u32::try_from(bytes.len()).unwrap_or(0);
        if let Some((region, offset)) = keys.remote_place(key, addr, len) {
            landings.push(LateBytes { region, offset, bytes: bytes.to_vec() });
        }
    }
    landings
}

/// WRITEs of the peer, or as much of them as there is, in bytes that were not received.
fn writes<'b>(inbound: &Inbound, unread: &'b [u8]) -> Vec<(Rkey, u64, &'b [u8])> {
    let mut writes = Vec::new();
    let mut rest = unread;
    let take = |rest: &mut &'b [u8], len: usize| {
        let (now, later) = rest.split_at(len.min(rest.len()));
        *rest = later;
        now
    };
    if let Some(body) = inbound.body() {
        let now = take(&mut rest, wide(body.left()));
        if let Sink::Write { key, addr } | Sink::WriteWithImm { key, addr, .. } = body.sink {
            writes.push((key, addr + u64::from(body.done), now));
        }
    }
    let (mut partial, have) = inbound.partial_header();
    if have > 0 && rest.len() >= HEADER - have {
        partial[have..].copy_from_slice(take(&mut rest, HEADER - have));
        if let Ok(header) = FrameHeader::decode(&partial) {
            push_write(&header, &mut writes, take(&mut rest, payload(&header)));
        }
    }
    while let Some((header, later)) = rest.split_first_chunk::<HEADER>() {
        rest = later;
        let Ok(header) = FrameHeader::decode(header) else { break };
        push_write(&header, &mut writes, take(&mut rest, payload(&header)));
    }
    writes.retain(|(_, _, bytes)| !bytes.is_empty());
    writes
}

fn push_write<'b>(
    header: &FrameHeader,
    writes: &mut Vec<(Rkey, u64, &'b [u8])>,
    payload: &'b [u8],
) {
    if matches!(header.kind, FrameKind::Write | FrameKind::WriteWithImm) {
        writes.push((Rkey(header.key), header.addr, payload));
    }
}

/// Bytes behind a header.
fn payload(header: &FrameHeader) -> usize {
    match header.kind {
        FrameKind::Send | FrameKind::Write | FrameKind::WriteWithImm | FrameKind::ReadResponse => {
            wide(header.len)
        }
        _ => 0,
    }
}
