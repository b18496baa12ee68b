//! Work completions of verbs, turned into [`Completion`]s; and the parts of a `wr_id`. Pure.
//!
//! A `wr_id` has, from the top: 16 bits for the QP index, 8 bits for the generation of that index,
//! 40 bits for the caller. The generation tells the completions of a detached QP from those of the
//! next QP on the same index.

use rblk_protocol::width::narrow;

use crate::verbs::ffi::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use crate::work::{Completion, QpIndex, WcOpcode, WcStatus, WrId};

/// The part of a `wr_id` that names the QP and its generation. All `wr_id`s of a QP begin with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::verbs) struct WrIdPrefix(u64);

impl WrIdPrefix {
    pub(in crate::verbs) fn new(qp: QpIndex, generation: u8) -> Self {
        Self((u64::from(qp.0) << 48) | (u64::from(generation) << WrId::BITS))
    }

    pub(super) fn qp(self) -> QpIndex {
        unpack_wr_id(self.0).0
    }

    #[inline]
    pub(in crate::verbs) fn generation(self) -> u8 {
        unpack_wr_id(self.0).1
    }

    /// A whole `wr_id`. Bits of `id` above the caller's 40 are dropped.
    #[inline]
    pub(in crate::verbs) fn pack(self, id: WrId) -> u64 {
        self.0 | (id.0 & WrId::MASK)
    }
}

/// The QP, its generation and the caller's part of a `wr_id`.
#[inline]
pub(super) fn unpack_wr_id(wr_id: u64) -> (QpIndex, u8, WrId) {
    let [q1, q0, generation, ..] = wr_id.to_be_bytes();
    (QpIndex(u16::from_be_bytes([q1, q0])), generation, WrId(wr_id & WrId::MASK))
}

/// The [`WcStatus`] of an `enum ibv_wc_status`.
pub(super) fn status(raw: u32) -> WcStatus {
    match raw {
        ibv_wc_status::IBV_WC_SUCCESS => WcStatus::Success,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        ibv_wc_status::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        ibv_wc_status::IBV_WC_LOC_PROT_ERR | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => {
            WcStatus::LocalProtection
        }
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalidRequest,
        ibv_wc_status::IBV_WC_REM_OP_ERR => WcStatus::RemoteOperation,
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExceeded,
        ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExceeded,
        other => WcStatus::Other(other),
    }
}

/// The [`WcOpcode`] of an `enum ibv_wc_opcode`.
pub(super) fn opcode(raw: u32) -> WcOpcode {
    match raw {
        ibv_wc_opcode::IBV_WC_SEND => WcOpcode::Send,
        ibv_wc_opcode::IBV_WC_RDMA_WRITE => WcOpcode::Write,
        ibv_wc_opcode::IBV_WC_RDMA_READ => WcOpcode::Read,
        ibv_wc_opcode::IBV_WC_RECV => WcOpcode::Recv,
        ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWithImm,
        other => WcOpcode::Other(other),
    }
}

/// The completion of a WC, and the generation of the QP when the WR was posted.
#[inline]
pub(in crate::verbs) fn completion(wc: &ibv_wc) -> (Completion, u8) {
    let (qp, generation, id) = unpack_wr_id(wc.wr_id());
    let mut completion = Completion { qp, id, ..Completion::default() };
    if let Some((raw, _vendor)) = wc.error() {
        // Opcode and lengths are undefined.
        completion.status = status(raw);
        return (completion, generation);
    }
    completion.opcode = opcode(wc.opcode());
    match completion.opcode {
        WcOpcode::Recv | WcOpcode::Read => completion.byte_len = byte_len(wc),
        WcOpcode::RecvWithImm => {
            completion.byte_len = byte_len(wc);
            completion.imm = u32::from_be(wc.imm_data);
        }
        _ => {}
    }
    (completion, generation)
}

fn byte_len(wc: &ibv_wc) -> u32 {
    // `len` returns a u32 as a usize.
    narrow(wc.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wr_id_round_trips() {
        for (qp, generation, id) in
            [(0, 0, 0), (u16::MAX, u8::MAX, WrId::MASK), (0x1234, 0x56, 0x78_9abc_def0)]
        {
            let packed = WrIdPrefix::new(QpIndex(qp), generation).pack(WrId(id));
            assert_eq!(unpack_wr_id(packed), (QpIndex(qp), generation, WrId(id)));
        }
        let prefix = WrIdPrefix::new(QpIndex(0x1234), 0x56);
        assert_eq!(prefix.pack(WrId(0x78_9abc_def0)), 0x1234_5678_9abc_def0);
        assert_eq!((prefix.qp(), prefix.generation()), (QpIndex(0x1234), 0x56));
        // Bits that are not the caller's cannot name another QP.
        let prefix = WrIdPrefix::new(QpIndex(1), 2);
        assert_eq!(unpack_wr_id(prefix.pack(WrId(u64::MAX))).0, QpIndex(1));
    }

    #[test]
    fn every_number_is_a_value() {
        // Numbers of `enum ibv_wc_status` (verbs.h), which the wire of uverbs fixes.
        let known = [
            (0, WcStatus::Success),
            (1, WcStatus::LocalLength),
            (4, WcStatus::LocalProtection),
            (5, WcStatus::Flushed),
            (8, WcStatus::LocalProtection),
            (9, WcStatus::RemoteInvalidRequest),
            (10, WcStatus::RemoteAccess),
            (11, WcStatus::RemoteOperation),
            (12, WcStatus::RetryExceeded),
            (13, WcStatus::RnrRetryExceeded),
            (2, WcStatus::Other(2)),
            (21, WcStatus::Other(21)),
            (u32::MAX, WcStatus::Other(u32::MAX)),
        ];
        for (raw, expected) in known {
            assert_eq!(status(raw), expected);
        }
        assert_eq!(opcode(128), WcOpcode::Recv);
        assert_eq!(opcode(129), WcOpcode::RecvWithImm);
        assert_eq!(opcode(77), WcOpcode::Other(77));
    }
}
