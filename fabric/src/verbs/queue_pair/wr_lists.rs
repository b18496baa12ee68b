//! [`WrLists`]: the linked lists of WRs that a provider takes, rewritten for each call.

use std::mem;
use std::ptr;

use rblk_protocol::width::narrow;

use crate::verbs::completion_queue::work_completion::WrIdPrefix;
use crate::verbs::ffi;
use crate::work::{MAX_SGE, Recvs, SendOp, SendWr, Sge, SgeList};

/// WRs of one list.
pub(in crate::verbs) const BATCH: usize = 64;

/// Memory for one list of each kind. A list points into this value, so the poller keeps it in a box
/// that it never moves the value out of.
pub(in crate::verbs) struct WrLists {
    sends: [ffi::ibv_send_wr; BATCH],
    recvs: [ffi::ibv_recv_wr; BATCH],
    sges: [[ffi::ibv_sge; MAX_SGE]; BATCH],
}

impl WrLists {
    pub(in crate::verbs) fn new() -> Box<Self> {
        // SAFETY: integers, null pointers and plain unions: all-zero is a value of each.
        Box::new(unsafe { mem::zeroed::<Self>() })
    }

    /// Writes a list of RECVs, at most [`BATCH`] and at least one. The list is valid until the next
    /// one is written.
    #[inline]
    pub(in crate::verbs) fn recvs(
        &mut self,
        wrs: Recvs<'_>,
        wr_ids: WrIdPrefix,
    ) -> *mut ffi::ibv_recv_wr {
        let count = wrs.rows.len();
        assert!((1..=BATCH).contains(&count), "a list of {count} RECVs");
        let head = self.recvs.as_mut_ptr();
        for (i, wr) in wrs.iter().enumerate() {
            let last = i + 1 == count;
            let sges = &mut self.sges[i];
            // A RECV for WRITE_WITH_IMM alone needs no memory.
            let used = write_sges(&wr.sges, sges);
            // SAFETY: `i` is below BATCH, so `head + i`, and `head + i + 1` unless it is the last,
            // are inside the array, which the box keeps in place.
            unsafe {
                *head.add(i) = ffi::ibv_recv_wr {
                    wr_id: wr_ids.pack(wr.id),
                    next: if last { ptr::null_mut() } else { head.add(i + 1) },
                    sg_list: sges.as_mut_ptr(),
                    num_sge: narrow(used),
                };
            }
        }
        head
    }

    /// Writes a list of send WRs, at most [`BATCH`] and at least one. `inline` says of each whether
    /// the provider is to copy its payload. The list is valid until the next one is written.
    #[inline]
    pub(in crate::verbs) fn sends(
        &mut self,
        wrs: &[SendWr],
        wr_ids: WrIdPrefix,
        mut inline: impl FnMut(&SendWr) -> bool,
    ) -> *mut ffi::ibv_send_wr {
        assert!((1..=BATCH).contains(&wrs.len()), "a list of {} send WRs", wrs.len());
        let head = self.sends.as_mut_ptr();
        for (i, wr) in wrs.iter().enumerate() {
            // SAFETY: `i` is below BATCH, so the index is inside the array, which the box keeps in
            // place, or one past it.
            let next = unsafe { head.add(i + 1) };
            let next = if i + 1 == wrs.len() { ptr::null_mut() } else { next };
            let sges = &mut self.sges[i];
            // SAFETY: the index is inside the array.
            let target = unsafe { &mut *head.add(i) };
            write_send(wr, wr_ids.pack(wr.id), next, sges, target);
            if inline(wr) {
                target.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
            }
        }
        head
    }
}

fn raw_sge(sge: &Sge) -> ffi::ibv_sge {
    ffi::ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey.0 }
}

/// Writes the entries that have bytes: some devices take a length of 0 for 2^31. Returns how many.
#[inline]
fn write_sges(list: &SgeList, sges: &mut [ffi::ibv_sge; MAX_SGE]) -> usize {
    let mut used = 0;
    for sge in list.as_slice().iter().filter(|sge| sge.len > 0) {
        sges[used] = raw_sge(sge);
        used += 1;
    }
    used
}

/// Writes one send WR of a list.
#[inline]
fn write_send(
    wr: &SendWr,
    wr_id: u64,
    next: *mut ffi::ibv_send_wr,
    sges: &mut [ffi::ibv_sge; MAX_SGE],
    target: &mut ffi::ibv_send_wr,
) {
    let used = write_sges(&wr.sges, sges);
    // SAFETY: integers, null pointers and plain unions: all-zero is a value.
    *target = unsafe { mem::zeroed() };
    (target.wr_id, target.next) = (wr_id, next);
    target.sg_list = sges.as_mut_ptr();
    target.num_sge = narrow(used);
    if wr.signaled {
        target.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    let remote = match wr.op {
        SendOp::Send => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
            None
        }
        SendOp::Write(remote) => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            Some(remote)
        }
        SendOp::WriteWithImm(remote, imm) => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            target.__bindgen_anon_1.imm_data = imm.to_be();
            Some(remote)
        }
        SendOp::Read(remote) => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_READ;
            Some(remote)
        }
    };
    if let Some(remote) = remote {
        target.wr.rdma.remote_addr = remote.addr;
        target.wr.rdma.rkey = remote.rkey.0;
    }
}
