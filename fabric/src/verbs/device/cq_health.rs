//! [`CqHealth`]: whether a CQ still works. The thread that reads device events sets it, the poller
//! reads it.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::verbs::ffi;

/// Whether one CQ is broken: it overran, or its device is gone. It stays broken.
#[derive(Debug)]
pub(in crate::verbs) struct CqHealth {
    // Address of the CQ, only compared.
    cq: usize,
    broken: AtomicBool,
}

impl CqHealth {
    /// Of a CQ that works.
    pub(in crate::verbs) fn of(cq: *mut ffi::ibv_cq) -> Self {
        Self { cq: cq as usize, broken: AtomicBool::new(false) }
    }

    /// Whether this is the CQ at that address.
    pub(super) fn is_of(&self, cq: *mut ffi::ibv_cq) -> bool {
        self.cq == cq as usize
    }

    /// Whether nothing will complete on the CQ any more.
    #[inline]
    pub(in crate::verbs) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    pub(in crate::verbs) fn mark_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }
}
