//! The error state of a QP.

use std::mem;

use rblk_protocol::width::narrow;

use super::ffi;

fn state_mask() -> i32 {
    narrow(ffi::ibv_qp_attr_mask::IBV_QP_STATE.0)
}

/// Moves a QP to the error state, from any state.
///
/// There is no result: a QP refuses only when the QP or its device is dead already.
///
/// # Safety
/// `qp` is a QP that is not freed during the call.
pub(super) unsafe fn move_to_error(qp: *mut ffi::ibv_qp) {
    // SAFETY: an all-zero ibv_qp_attr is a value of plain integers.
    let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
    attr.qp_state = ffi::ibv_qp_state::IBV_QPS_ERR;
    // SAFETY: the caller's promise.
    let _ = unsafe { ffi::ibv_modify_qp(qp, &raw mut attr, state_mask()) };
}
