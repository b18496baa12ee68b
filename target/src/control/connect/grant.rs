//! [`Terms`]: the grant of a connection, with the memory for it.
//!
//! Invariant: the memory was laid out for exactly this grant. Hello and parameters of a connection
//! are made from its terms, so the peer gets no feature that the receive slots have no room for.

use rblk_fabric::ProtectionDomain;
use rblk_protocol::{Features, HelloAccept};

use crate::data::connection::{ConnectionMemory, Layout, NoMemory, SpareMemory};

/// The grant of a connection, with the memory for it.
#[derive(Debug)]
pub struct Terms {
    /// The grant, as the peer gets it.
    pub accept: HelloAccept,
    /// The memory.
    pub memory: ConnectionMemory,
}

impl Terms {
    /// Allocates and registers memory for the negotiated grant. Without memory for the data of
    /// several commands in a message, [`Features::DATA_LISTS`] is not granted. An admin connection
    /// names the `spares` of its domain, and takes memory of those if there is some.
    ///
    /// # Errors
    /// There is no memory for small receive slots either.
    pub fn new(
        pd: &ProtectionDomain,
        mut accept: HelloAccept,
        spares: Option<&SpareMemory>,
    ) -> Result<Self, NoMemory> {
        loop {
            let digests = accept.features.has(Features::DIGEST);
            let layout = Layout::new(accept.depth, accept.message_data_bytes(), spares.is_some())
                .with_digests(digests);
            let spare = spares.and_then(|spares| ConnectionMemory::of_spares(spares, layout));
            let memory = spare.map_or_else(|| ConnectionMemory::allocate(pd, layout), Ok);
            match memory {
                Err(error) if accept.features.has(Features::DATA_LISTS) => {
                    tracing::warn!(%error, "no memory for larger receive slots: going without");
                    accept.features = accept.features.without(Features::DATA_LISTS);
                }
                memory => return Ok(Self { accept, memory: memory? }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::Device;
    use rblk_fabric::soft::network::Network;
    use rblk_protocol::{InstanceId, Nonce, QueueDepth, Version};

    use super::*;

    const LISTS: Features = Features::CAPSULE_LISTS;

    /// The terms when this many bytes can be registered, and the number of registered bytes.
    fn granted(features: Features, max: usize) -> Option<(HelloAccept, usize)> {
        let network = Network::with_region_max(1, max as u64);
        let pd = Device::Soft(network.device()).alloc_pd().unwrap();
        let accept = HelloAccept {
            version: Version::NEWEST,
            depth: QueueDepth::new(128).unwrap(),
            features,
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 20,
            instance: InstanceId([2; 16]),
            nonce: Nonce([3; 16]),
        };
        let terms = Terms::new(&pd, accept, None).ok()?;
        assert!(terms.memory.layout().bytes() <= terms.memory.region().len());
        assert_eq!(HelloAccept { features, ..terms.accept }, accept, "all else is as it was");
        Some((terms.accept, terms.memory.region().len()))
    }

    #[test]
    fn data_lists_are_granted_where_there_is_memory_for_their_slots() {
        let both = LISTS.or(Features::DATA_LISTS);
        let (accept, small) = granted(LISTS, usize::MAX).unwrap();
        assert_eq!(accept.features, LISTS);
        let (accept, large) = granted(both, usize::MAX).unwrap();
        assert_eq!(accept.features, both);
        assert!(large - small >= 130 * 2 * 4096, "{small} and {large} bytes");
        for (max, features, bytes) in
            [(large, both, large), (large - 1, LISTS, small), (small, LISTS, small)]
        {
            let (accept, len) = granted(both, max).unwrap();
            assert_eq!((accept.features, len), (features, bytes), "of {max} bytes");
        }
        assert_eq!(granted(both, small - 1), None);
        assert_eq!(granted(LISTS, small - 1), None);
    }
}
