//! [`EndedMemory`]: the memory of an ended connection, until its QP is destroyed.

use rblk_fabric::MemoryRegion;

use super::bounce::BounceMemory;
use super::connection_params::ConnectionParams;
use super::spare_memory::SpareMemory;

/// The memory of an ended connection. Its drop, after the QP is destroyed, makes it spare or
/// deregisters it.
#[derive(Debug)]
pub struct EndedMemory {
    // `None` only during the drop.
    memory: Option<MemoryRegion>,
    _bounce: Option<BounceMemory>,
    spares: Option<SpareMemory>,
}

impl From<ConnectionParams> for EndedMemory {
    fn from(params: ConnectionParams) -> Self {
        let ConnectionParams { memory, bounce, spares, .. } = params;
        Self { memory: Some(memory.into_registered()), _bounce: bounce, spares }
    }
}

impl Drop for EndedMemory {
    fn drop(&mut self) {
        if let (Some(memory), Some(spares)) = (self.memory.take(), &self.spares) {
            spares.put(memory);
        }
    }
}
