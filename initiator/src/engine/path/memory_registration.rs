//! [`MemoryRegistration`]: the memory of a queue during its registration with a domain, for a later
//! path.
//!
//! Registration takes some 100 ms for each 256 MiB, and requests wait for it after a loss. So it
//! begins before LOGIN is answered, on threads, and ends while the connections are made. The keys
//! are for one path: [`MemoryRegistration::end`] hands them over, and without a path they die here.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rblk_fabric::{Access, FabricError, MemoryRegion, ProtectionDomain, Region};
use tokio::sync::oneshot;

use super::{DataMemory, QueueMemory};

/// The number of threads of this process that register. A registration cannot be stopped after its
/// try was given up.
static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// The count of one such thread, until it ends or panics.
struct AtWork;

impl AtWork {
    fn begin() -> Self {
        AT_WORK.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug)]
enum Direction {
    /// The target may write.
    Sink,
    /// The target may read.
    Source,
}

impl Direction {
    fn access(self) -> Access {
        match self {
            Self::Sink => Access { remote_write: true, ..Access::LOCAL_WRITE },
            Self::Source => Access { remote_read: true, ..Access::LOCAL_READ },
        }
    }

    /// Registers all memory of a queue. Its own comes first.
    fn register(
        self,
        pd: &ProtectionDomain,
        memory: &QueueMemory,
    ) -> Result<Vec<MemoryRegion>, FabricError> {
        let all = std::iter::once(&memory.buffers).chain(memory.shared.iter());
        all.map(|region| pd.register(region, self.access())).collect()
    }
}

/// All memory of a queue for data, its own first, with keys.
#[derive(Debug)]
pub(super) struct QueueData(pub(super) Vec<DataMemory>);

impl QueueData {
    /// Registers on this thread.
    pub(super) fn register(
        pd: &ProtectionDomain,
        memory: &QueueMemory,
    ) -> Result<Self, FabricError> {
        let sinks = Direction::Sink.register(pd, memory)?;
        Ok(Self::of(sinks, Direction::Source.register(pd, memory)?))
    }

    fn of(sinks: Vec<MemoryRegion>, sources: Vec<MemoryRegion>) -> Self {
        let both = sinks.into_iter().zip(sources);
        Self(both.map(|(sinks, sources)| DataMemory { sinks, sources }).collect())
    }
}

type Answer = oneshot::Receiver<Result<Vec<MemoryRegion>, FabricError>>;

/// See the module.
#[derive(Debug)]
pub(crate) struct MemoryRegistration {
    memory: QueueMemory,
    pd: ProtectionDomain,
    // The answers for sinks and sources.
    under_way: Option<(Answer, Answer)>,
}

impl MemoryRegistration {
    /// Starts the registration.
    pub(crate) fn begin(pd: &ProtectionDomain, memory: &QueueMemory) -> Self {
        let start = |direction: Direction| {
            let (sender, answer) = oneshot::channel();
            let (pd, memory) = (pd.clone(), memory.clone());
            let at_work = AtWork::begin();
            let work = move || {
                // The send fails if the keys are not needed any more. They are dropped with the
                // message.
                let _ = sender.send(direction.register(&pd, &memory));
                drop(at_work);
            };
            // Without a thread there is no answer: `end` registers then.
            let _ = thread::Builder::new().name("rblk-register".into()).spawn(work);
            answer
        };
        let under_way = Some((start(Direction::Sink), start(Direction::Source)));
        Self { memory: memory.clone(), pd: pd.clone(), under_way }
    }

    /// Registers in [`Self::end`]. For memory with untouched pages: the kernel makes the pages
    /// during the registration, and a connection made at that time would wait for it.
    fn later(pd: &ProtectionDomain, memory: &QueueMemory) -> Self {
        Self { memory: memory.clone(), pd: pd.clone(), under_way: None }
    }

    /// Whether it is for these buffers.
    fn is_of(&self, buffers: &Arc<Region>) -> bool {
        Arc::ptr_eq(&self.memory.buffers, buffers)
    }

    /// The keys. A failed registration is tried once more: the memory of the path before may still
    /// have been registered.
    pub(super) async fn end(self) -> Result<QueueData, FabricError> {
        let Self { memory, pd, under_way } = self;
        if let Some((sinks, sources)) = under_way
            && let (Ok(Ok(sinks)), Ok(Ok(sources))) = (sinks.await, sources.await)
        {
            return Ok(QueueData::of(sinks, sources));
        }
        let (sender, answer) = oneshot::channel();
        let again = move || drop(sender.send(QueueData::register(&pd, &memory)));
        let thread = thread::Builder::new().name("rblk-register".into()).spawn(again);
        let failed = |source| FabricError::Call { call: "thread", source };
        thread.map_err(failed)?;
        answer.await.map_err(|_| failed(io::Error::other("the thread ended without a result")))?
    }
}

/// Memory that is being registered for the queues of a session, before their paths are requested.
#[derive(Debug, Default)]
pub(crate) struct Early(Vec<MemoryRegistration>);

impl Early {
    /// Starts the registrations, unless an earlier try still registers: a row of failing tries must
    /// not pile up threads and pinned memory.
    pub(crate) fn begin(pd: &ProtectionDomain, queues: &[QueueMemory]) -> Self {
        if AT_WORK.load(Ordering::Relaxed) > 0 {
            return Self::default();
        }
        Self(queues.iter().map(|memory| MemoryRegistration::begin(pd, memory)).collect())
    }

    /// Takes the registration of a queue with this memory, once.
    pub(crate) fn take(
        &mut self,
        pd: &ProtectionDomain,
        memory: &QueueMemory,
    ) -> MemoryRegistration {
        match self.0.iter().position(|early| early.is_of(&memory.buffers)) {
            Some(at) => self.0.swap_remove(at),
            None => MemoryRegistration::later(pd, memory),
        }
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::soft::network::Network;
    use rblk_fabric::{Device, PageKind};

    use super::*;

    #[test]
    fn keys_are_for_one_path() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let pd = Device::Soft(Network::new(1).device()).alloc_pd().unwrap();
        let memory = || QueueMemory::from(Region::allocate(4096, PageKind::Normal).unwrap());
        let (one, other) = (memory(), memory());
        let mut early = Early::begin(&pd, &[one.clone(), other.clone()]);
        let mut keys = |memory: &QueueMemory| {
            let registering = early.take(&pd, memory);
            let QueueData(data) = runtime.block_on(registering.end()).unwrap();
            assert_eq!(data.len(), 1);
            assert!(Arc::ptr_eq(data[0].sinks.region(), &memory.buffers));
            data
        };
        let first = keys(&other);
        let again = keys(&other);
        assert_ne!(first[0].sinks.rkey(), again[0].sinks.rkey(), "two paths share a key");
        assert_ne!(first[0].sinks.rkey(), first[0].sources.rkey());
        keys(&one);
        assert!(early.0.is_empty());
    }
}
