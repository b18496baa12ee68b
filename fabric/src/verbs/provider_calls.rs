//! [`ProviderCalls`]: the functions of a provider that the data path calls.
//!
//! `ibv_post_send` and its like are inline functions in verbs.h. Each calls a function that the
//! library of the provider put into the context. They are looked up once, when a poller is made,
//! so that the data path calls the provider directly.

use std::io;

use super::device::Device;
use super::ffi;
use crate::error::{FabricError, Result};

type PostSend = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_send_wr,
    *mut *mut ffi::ibv_send_wr,
) -> i32;
type PostRecv = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_recv_wr,
    *mut *mut ffi::ibv_recv_wr,
) -> i32;
type PollCq = unsafe extern "C" fn(*mut ffi::ibv_cq, i32, *mut ffi::ibv_wc) -> i32;
type ReqNotify = unsafe extern "C" fn(*mut ffi::ibv_cq, i32) -> i32;

/// The functions of one context. They may be called while its device is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProviderCalls {
    pub(super) post_send: PostSend,
    pub(super) post_recv: PostRecv,
    pub(super) poll_cq: PollCq,
    pub(super) req_notify: ReqNotify,
}

impl ProviderCalls {
    /// The functions of a device.
    ///
    /// # Errors
    /// The provider lacks one of them.
    pub(super) fn of(device: &Device) -> Result<Self> {
        let missing = |call| FabricError::Call { call, source: io::ErrorKind::Unsupported.into() };
        // SAFETY: the context is open while `device` lives.
        let ops = unsafe { &(*device.context()).ops };
        Ok(Self {
            post_send: ops.post_send.ok_or_else(|| missing("ibv_post_send"))?,
            post_recv: ops.post_recv.ok_or_else(|| missing("ibv_post_recv"))?,
            poll_cq: ops.poll_cq.ok_or_else(|| missing("ibv_poll_cq"))?,
            req_notify: ops.req_notify_cq.ok_or_else(|| missing("ibv_req_notify_cq"))?,
        })
    }
}
