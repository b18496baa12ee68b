//! [`Visitor`]: a host that connects and leaves again and again.
//!
//! All its visits share one thread, one PD and one CQ. A visitor registers no memory and posts
//! nothing, so nearly the whole cost of a visit is the target's.

use rblk_fabric::{
    Address, ConnectionHello, Established, FabricError, Poller, PollerHandle, ProtectionDomain,
    QpLimits, Route,
};
use tokio::runtime::{Builder, Runtime};

use super::end::{Knock, options, sizes, until_let_in};
use super::wire::Hello;

/// A host that comes and goes.
#[derive(Debug)]
pub struct Visitor {
    address: Address,
    limits: QpLimits,
    // The runtime of the caller's thread. An event of rdma_cm then wakes no other thread.
    runtime: Runtime,
    // Dropped before its PD.
    handle: PollerHandle,
    _poller: Box<dyn Poller>,
    pd: ProtectionDomain,
}

impl Visitor {
    /// A visitor of the target at this address.
    ///
    /// # Panics
    /// There is no way to the target.
    #[must_use]
    pub fn new(address: &Address) -> Self {
        let limits = QpLimits { send_wrs: 1, recv_wrs: 1, ..sizes() };
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let route = runtime.block_on(Route::resolve(address, &options())).expect("a route");
        let pd = route.device().alloc_pd().expect("a PD");
        // The QP of a visit may be destroyed while the next one begins.
        let (poller, handle) = pd.poller(8 * (limits.send_wrs + limits.recv_wrs)).expect("a CQ");
        Self { address: address.clone(), limits, runtime, handle, _poller: poller, pd }
    }

    /// Connects and leaves at once. Knocks until there is a place for a stranger; returns how often
    /// there was none.
    ///
    /// # Panics
    /// The target does not let it in.
    pub fn visit(&self, hello: &Hello) -> usize {
        let (established, refused) = until_let_in(hello, || self.knock(hello).map_err(Knock::of));
        drop(established);
        refused
    }

    fn knock(&self, hello: &Hello) -> Result<Established, FabricError> {
        let hello = ConnectionHello(hello.bytes());
        self.runtime.block_on(async {
            let route = Route::resolve(&self.address, &options()).await?;
            route.connect(&self.pd, &self.handle, self.limits, &hello).await
        })
    }
}
