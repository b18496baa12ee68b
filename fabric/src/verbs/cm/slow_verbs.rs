//! [`SlowVerbs`]: the slow verbs of one connection, which no caller waits for: accepting the peer,
//! the error state of the QP, telling the peer that the connection ends.
//!
//! Data threads and the task of rdma_cm events ask for them here. A thread of [`Threads`] makes the
//! calls, for one id one at a time and in the order in which a connection lives: a connection that
//! ends before it is accepted is refused, and never accepted. Each verb is called once: data thread
//! and peer often ask for the same end. The id and its QP are destroyed when no call is under way
//! and none will begin ([`SlowVerbs::close`]).

use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rblk_protocol::width::narrow;

use crate::verbs::device_caps::is_iwarp;
use crate::verbs::ffi;
use crate::verbs::qp_state;
use crate::verbs::threads::{SlowWork, Threads};

/// A rejection always carries a byte. Without it, a rejection on iWARP looks like "nothing
/// listens".
const NO_REASON: [u8; 1] = [0];

/// The threads of this process that make these verbs.
static THREADS: Threads<Arc<SlowVerbs>> = Threads::new("verbs-calls", 64);

/// The slow verbs of an id.
#[derive(Debug)]
pub(in crate::verbs) struct SlowVerbs {
    id: NonNull<ffi::RawCmId>,
    state: Mutex<CallState>,
    // Notified when no call is under way.
    rests: Condvar,
}

/// How a peer is accepted.
#[derive(Debug)]
pub(super) struct Accept {
    /// The reply to the peer.
    pub(super) hello: Box<[u8]>,
    /// The other fields of the reply: `private_data` is set before the call.
    pub(super) param: ffi::ConnParam,
    /// The refusal if the connection ends before that.
    pub(super) refusal: Box<[u8]>,
}

#[derive(Debug, Default)]
struct CallState {
    // Null before it is made and when it is about to be destroyed.
    qp: QpPointer,
    accept: Option<Accept>,
    error: bool,
    disconnect: bool,
    // The end was asked for, now or earlier.
    ended: bool,
    // The QP was moved to the error state, or is about to be.
    in_error: bool,
    // The peer was told of the end, or is about to be.
    told: bool,
    // A thread makes the calls, or is about to.
    at_work: bool,
    closed: bool,
}

#[derive(Clone, Copy, Debug)]
struct QpPointer(*mut ffi::ibv_qp);

impl Default for QpPointer {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

// SAFETY: an id may be used from any thread, and its QP, too. Both live until `close` has returned,
// and nothing is called after that.
unsafe impl Send for SlowVerbs {}
// SAFETY: as for Send; everything that changes is under the lock.
unsafe impl Sync for SlowVerbs {}

/// One call, or two that belong together.
#[derive(Debug)]
enum Call {
    Accept(Accept),
    Reject(Box<[u8]>),
    End { error: bool, tell: bool },
}

impl SlowVerbs {
    /// Those of an id that has no QP yet.
    pub(super) fn of(id: NonNull<ffi::RawCmId>) -> Arc<Self> {
        THREADS.begin();
        Arc::new(Self { id, state: Mutex::default(), rests: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, CallState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the id has a QP.
    pub(super) fn have_qp(&self, qp: *mut ffi::ibv_qp) {
        self.lock().qp = QpPointer(qp);
    }

    /// Accepts the peer. If that fails, the QP is moved to the error state: its RECVs are flushed.
    pub(super) fn accept(self: &Arc<Self>, accept: Accept) {
        self.ask(|state| state.accept = Some(accept));
    }

    /// Moves the QP to the error state.
    pub(in crate::verbs) fn error(self: &Arc<Self>) {
        self.ask(|state| state.error = true);
    }

    /// Moves the QP to the error state, and tells the peer, unless the peer was told already.
    pub(super) fn end(self: &Arc<Self>) {
        self.ask(|state| {
            (state.error, state.ended) = (true, true);
            state.disconnect |= !state.told;
        });
    }

    /// The peer ended the connection, and waits for the answer before it frees its side. It may
    /// have done so when it was told of an end here: it waits then, too.
    pub(in crate::verbs) fn disconnected(self: &Arc<Self>) {
        self.ask(|state| (state.error, state.disconnect, state.ended) = (true, true, true));
    }

    /// The handshake is complete. Where the end was asked for before, the kernel could not tell the
    /// peer until now.
    pub(in crate::verbs) fn established(self: &Arc<Self>) {
        self.ask(|state| state.disconnect |= state.ended);
    }

    fn ask(self: &Arc<Self>, what: impl FnOnce(&mut CallState)) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        what(&mut state);
        state.error &= !state.in_error;
        let asks = state.accept.is_some() || state.error || state.disconnect;
        let begins = asks && !state.at_work;
        state.at_work |= begins;
        drop(state);
        if begins {
            THREADS.serve(Arc::clone(self));
        }
    }

    /// Makes the calls that were asked for, and those that are asked for meanwhile.
    fn make_calls(&self) {
        loop {
            let mut state = self.lock();
            let Some((call, qp)) = next(&mut state) else {
                state.at_work = false;
                drop(state);
                self.rests.notify_all();
                return;
            };
            drop(state);
            self.make(call, qp);
        }
    }

    /// Makes the calls that are left, and none begins after that. Waits for a call that is under
    /// way: a destroy would wait for it in the kernel.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        while state.at_work {
            state = self.rests.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.qp = QpPointer::default();
    }

    fn make(&self, call: Call, QpPointer(qp): QpPointer) {
        match call {
            Call::Accept(accept) => self.make_accept(accept, QpPointer(qp)),
            // SAFETY: the id lives until `close` returned, and this call is under way.
            Call::Reject(reason) => unsafe { reject(self.id, &reason) },
            // SAFETY: as above, of the QP.
            Call::End { error, tell } => self.make_end(error && !qp.is_null(), tell, qp),
        }
    }

    fn make_end(&self, error: bool, tell: bool, qp: *mut ffi::ibv_qp) {
        // SAFETY: as in `make`.
        let disconnect = || unsafe { ffi::rdma_disconnect(self.id.as_ptr()) } == 0;
        // SAFETY: as in `make`, of the QP.
        let move_to_error = || unsafe { qp_state::move_to_error(qp) };
        if self.disconnect_moves_qp() {
            // rdma_disconnect fails before there is a connection.
            if !(tell && disconnect()) && error {
                move_to_error();
            }
            return;
        }
        if error {
            move_to_error();
        }
        if tell {
            disconnect();
        }
    }

    /// Whether `rdma_disconnect` also moves the QP to the error state (rdma_disconnect(3)). On
    /// iWARP the QP would first send its queued WRs (`ucma_modify_qp_sqd` of librdmacm).
    fn disconnect_moves_qp(&self) -> bool {
        // SAFETY: the id lives until `close` returned.
        let context = NonNull::new(unsafe { (*self.id.as_ptr()).verbs });
        // SAFETY: the context of an id is open as long as the id lives.
        context.is_some_and(|context| !unsafe { is_iwarp(context) })
    }

    fn make_accept(&self, Accept { hello, mut param, .. }: Accept, qp: QpPointer) {
        param.private_data = hello.as_ptr().cast();
        // SAFETY: the id lives as in `make`; `param` and the hello live during the call.
        if unsafe { ffi::rdma_accept(self.id.as_ptr(), &raw mut param) } == 0 {
            return;
        }
        let error = io::Error::last_os_error();
        tracing::warn!(%error, "rdma_accept failed: the peer has gone, or the device has");
        self.make(Call::End { error: true, tell: true }, qp);
    }
}

impl SlowWork for Arc<SlowVerbs> {
    fn run(self) {
        self.make_calls();
    }
}

/// The next call, in the order of a connection's life. The end comes before an accept that has not
/// begun.
fn next(state: &mut CallState) -> Option<(Call, QpPointer)> {
    let qp = state.qp;
    if let Some(accept) = state.accept.take() {
        let refused = state.ended || state.closed;
        let call = if refused { Call::Reject(accept.refusal) } else { Call::Accept(accept) };
        return Some((call, qp));
    }
    let error = std::mem::take(&mut state.error) && !state.in_error;
    let tell = std::mem::take(&mut state.disconnect);
    state.in_error |= error && !qp.0.is_null();
    state.told |= tell;
    (error || tell).then_some((Call::End { error, tell }, qp))
}

/// Refuses the peer. There is no result, because the peer may be gone already.
///
/// # Safety
/// The id lives during the call.
pub(super) unsafe fn reject(id: NonNull<ffi::RawCmId>, reason: &[u8]) {
    let reason = if reason.is_empty() { &NO_REASON } else { reason };
    let len = narrow(reason.len().min(usize::from(u8::MAX)));
    // SAFETY: `reason` has at least `len` bytes and lives during the call; the id does, too.
    if unsafe { ffi::rdma_reject(id.as_ptr(), reason.as_ptr().cast(), len) } != 0 {
        tracing::debug!(error = %io::Error::last_os_error(), "rdma_reject");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept() -> Accept {
        // SAFETY: integers and a null pointer: all-zero is a value.
        let param = unsafe { std::mem::zeroed() };
        Accept { hello: Box::default(), param, refusal: Box::new([7]) }
    }

    #[test]
    fn calls_are_made_in_the_order_of_a_life() {
        let mut state = CallState { accept: Some(accept()), ..CallState::default() };
        // A failed completion, before the accept was made.
        state.error = true;
        assert!(matches!(next(&mut state), Some((Call::Accept(_), _))));
        assert!(matches!(next(&mut state), Some((Call::End { error: true, tell: false }, _))));
        assert!(next(&mut state).is_none());
    }

    #[test]
    fn a_qp_is_moved_to_the_error_state_once() {
        let qp = QpPointer(ptr::dangling_mut());
        let mut state = CallState { qp, error: true, disconnect: true, ..CallState::default() };
        let mut ends = |error, disconnect| {
            (state.error, state.disconnect) = (error, disconnect);
            match next(&mut state) {
                Some((Call::End { error, tell }, _)) => Some((error, tell)),
                None => None,
                Some((call, _)) => panic!("{call:?}"),
            }
        };
        assert_eq!(ends(true, true), Some((true, true)));
        assert_eq!(ends(true, false), None);
        // The peer ends the connection, too, and waits for the answer.
        assert_eq!(ends(true, true), Some((false, true)));
    }

    #[test]
    fn who_has_ended_is_refused_and_not_accepted() {
        for (ended, closed) in [(true, false), (false, true)] {
            let mut state =
                CallState { accept: Some(accept()), ended, closed, ..CallState::default() };
            let call = next(&mut state).map(|(call, _)| call);
            assert!(matches!(&call, Some(Call::Reject(why)) if **why == [7]), "{call:?}");
        }
    }
}
