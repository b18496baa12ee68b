//! Verbs numbers to seam values, and how a `wr_id` is cut up. Pure.
//!
//! `wr_id`, from the top: 16 bits QP index, 8 bits generation of that index, 40 bits of the caller.
//! The generation tells completions of a QP that was detached from those of its successor on the
//! same index.

use super::ffi::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use crate::work::{Completion, QpIndex, WcOpcode, WcStatus, WrId};

/// Packs a `wr_id`. Bits of `id` beyond the caller's are dropped.
pub(super) fn pack_wr_id(qp: QpIndex, generation: u8, id: WrId) -> u64 {
    (u64::from(qp.0) << 48) | (u64::from(generation) << WrId::BITS) | (id.0 & WrId::MASK)
}

/// The opposite of [`pack_wr_id`].
pub(super) fn unpack_wr_id(wr_id: u64) -> (QpIndex, u8, WrId) {
    let [q1, q0, generation, ..] = wr_id.to_be_bytes();
    (QpIndex(u16::from_be_bytes([q1, q0])), generation, WrId(wr_id & WrId::MASK))
}

/// `enum ibv_wc_status` in seam words.
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

/// `enum ibv_wc_opcode` in seam words.
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

/// A whole completion, and the generation its WR was posted in.
pub(super) fn completion(wc: &ibv_wc) -> (Completion, u8) {
    let (qp, generation, id) = unpack_wr_id(wc.wr_id());
    let mut completion = Completion { qp, id, ..Completion::default() };
    if let Some((raw, _vendor)) = wc.error() {
        // Opcode and lengths are undefined now.
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
    // `len` widens a u32, so this cannot saturate.
    u32::try_from(wc.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wr_id_round_trips() {
        for (qp, generation, id) in
            [(0, 0, 0), (u16::MAX, u8::MAX, WrId::MASK), (0x1234, 0x56, 0x78_9abc_def0)]
        {
            let packed = pack_wr_id(QpIndex(qp), generation, WrId(id));
            assert_eq!(unpack_wr_id(packed), (QpIndex(qp), generation, WrId(id)));
        }
        assert_eq!(pack_wr_id(QpIndex(0x1234), 0x56, WrId(0x78_9abc_def0)), 0x1234_5678_9abc_def0);
        // Bits that are not the caller's cannot reach another QP.
        assert_eq!(unpack_wr_id(pack_wr_id(QpIndex(1), 2, WrId(u64::MAX))).0, QpIndex(1));
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
