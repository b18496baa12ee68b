//! [`LookOrder`]: the orders to the thread that looks after the lock of an image, and
//! [`ProofOrders`], the way to give them.

use std::fmt;
use std::sync::mpsc::Sender;

/// Called when a look that began later has found the lock in place. Dropped when it is lost.
pub(super) type OnProof = Box<dyn FnOnce() + Send>;

/// An order to the thread.
pub(super) enum LookOrder {
    /// Look at once.
    Prove(OnProof),
    /// Look no more.
    End,
}

/// See the module.
#[derive(Clone)]
pub(super) struct ProofOrders(Sender<LookOrder>);

impl fmt::Debug for ProofOrders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProofOrders")
    }
}

impl ProofOrders {
    /// To the thread that receives these.
    pub(super) fn new(orders: Sender<LookOrder>) -> Self {
        Self(orders)
    }

    /// Asks for a proof that is newer than this call.
    pub(super) fn ask(&self, on_proof: OnProof) {
        // An error means that the image is closed.
        let _ = self.0.send(LookOrder::Prove(on_proof));
    }

    /// The thread is to end.
    pub(super) fn end(&self) {
        // An error means that it has ended.
        let _ = self.0.send(LookOrder::End);
    }
}
