//! What a device does after a QP's end: a mode of the in-memory network, for tests.
//!
//! On a card a QP in the error state is not over. RDMA that it is amid still lands, flushes come
//! when it pleases, and only the destroyed QP touches nothing. Here, where the device says so
//! ([`DeviceCaps::touches_until_destroyed`](crate::DeviceCaps::touches_until_destroyed)), every
//! READ that was under way gets bytes that nobody sent, and every WRITE of the peer that was on the
//! link lands, at a moment decided by the seed and once more at the very end, when the QP is
//! dropped. Who lends that memory again earlier has it spoiled.

use std::sync::Arc;

use super::frame::{HEADER, Header, Kind};
use super::queue_pair::QueuePair;
use super::receive::Sink;
use crate::region::Region;
use crate::work::Rkey;

/// What a late READ brings: not what anybody wrote.
const NOBODYS: u8 = 0xdb;

/// Bytes that are to land late.
#[derive(Debug)]
pub(super) struct Landing {
    region: Arc<Region>,
    offset: usize,
    bytes: Vec<u8>,
}

impl Landing {
    /// They land.
    pub(super) fn land(&self) {
        self.region.write(self.offset, &self.bytes);
    }
}

impl QueuePair {
    /// The QP is about to end: leaves the network what is to land later. Nothing where the device
    /// lets go at once.
    pub(super) fn leave_behind(&mut self) {
        let Some(keys) = self.late_keys.clone() else { return };
        let bytes = self.link.left_behind();
        // A turn may hold the lock already. It is refused only while keys change, which a test in
        // one thread has not.
        let Some(keys) = keys.try_read() else { return };
        let mut landings = Vec::new();
        let reads = self.reads_pending.iter().filter_map(|at| self.slot(*at));
        for sge in reads.flat_map(|slot| slot.wr.sges.as_slice()) {
            if let Some((region, offset)) = keys.local_place(*sge) {
                let bytes = vec![NOBODYS; sge.len as usize];
                landings.push(Landing { region, offset, bytes });
            }
        }
        for (key, addr, bytes) in self.writes_on(&bytes) {
            let len = u32::try_from(bytes.len()).unwrap_or(0);
            if let Some((region, offset)) = keys.remote_place(key, addr, len) {
                landings.push(Landing { region, offset, bytes: bytes.to_vec() });
            }
        }
        self.link.land_late(landings);
    }

    /// WRITEs of the peer, or what there is of them, in bytes that were not received.
    fn writes_on<'b>(&self, bytes: &'b [u8]) -> Vec<(Rkey, u64, &'b [u8])> {
        let mut writes = Vec::new();
        let mut rest = bytes;
        let take = |rest: &mut &'b [u8], len: usize| {
            let (now, later) = rest.split_at(len.min(rest.len()));
            *rest = later;
            now
        };
        if let Some(body) = self.inbound.body() {
            let now = take(&mut rest, (body.len - body.done) as usize);
            if let Sink::Write { key, addr } | Sink::WriteWithImm { key, addr, .. } = body.sink {
                writes.push((key, addr + u64::from(body.done), now));
            }
        }
        let (mut partial, have) = self.inbound.partial_header();
        if have > 0 && rest.len() >= HEADER - have {
            partial[have..].copy_from_slice(take(&mut rest, HEADER - have));
            if let Ok(header) = Header::decode(&partial) {
                Self::write_of(&header, &mut writes, take(&mut rest, payload(&header)));
            }
        }
        while let Some((header, later)) = rest.split_first_chunk::<HEADER>() {
            rest = later;
            let Ok(header) = Header::decode(header) else { break };
            Self::write_of(&header, &mut writes, take(&mut rest, payload(&header)));
        }
        writes.retain(|(_, _, bytes)| !bytes.is_empty());
        writes
    }

    fn write_of<'b>(header: &Header, writes: &mut Vec<(Rkey, u64, &'b [u8])>, payload: &'b [u8]) {
        if matches!(header.kind, Kind::Write | Kind::WriteWithImm) {
            writes.push((Rkey(header.key), header.addr, payload));
        }
    }
}

/// Bytes behind a header.
fn payload(header: &Header) -> usize {
    match header.kind {
        Kind::Send | Kind::Write | Kind::WriteWithImm | Kind::ReadResponse => header.len as usize,
        _ => 0,
    }
}
