//! The thread of a poll group, with completion queues that break while it sleeps or looks: it goes
//! on, and takes another in the same place.
#![allow(missing_docs)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rblk_fabric::soft::network::Network;
use rblk_fabric::{
    AcceptParams, Access, Completion, Connection, DataPath, Device, DeviceCaps, FabricError,
    PageKind, Poller, PollerCounters, PostError, QpIndex, Recvs, Region, SendWr,
};
use rblk_runtime::spin::SpinMode;
use rblk_target::cache::{Shard, ShardOptions};
use rblk_target::data::poll_group::group_thread::{GroupHandle, POLLERS_MAX, Tuning, start};
use rblk_target::data::poll_group::other_groups::OtherGroups;
use rblk_target::data::poll_group::{FromGroup, PollerMemory, ToGroup};
use rblk_target::memory::arena::Arena;
use rblk_target::store::uring::{UringOptions, UringStore};
use tokio::sync::mpsc;

const WORKS: u32 = 0;
const FAILS_TO_ARM: u32 = 1;
const FAILS_TO_POLL: u32 = 2;

/// A poller that breaks when it is told to.
#[derive(Debug)]
struct Fragile(Box<dyn Poller>, Arc<AtomicU32>);

impl Fragile {
    fn check(&self, how: u32) -> rblk_fabric::Result<()> {
        if self.1.load(Ordering::Relaxed) != how {
            return Ok(());
        }
        let source = std::io::ErrorKind::BrokenPipe.into();
        Err(FabricError::Call { call: "completion queue", source })
    }
}

impl Poller for Fragile {
    fn attach(&mut self, connection: Connection) -> rblk_fabric::Result<QpIndex> {
        self.0.attach(connection)
    }
    fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        self.0.detach(qp)
    }
}

impl DataPath for Fragile {
    fn caps(&self) -> &DeviceCaps {
        self.0.caps()
    }
    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> rblk_fabric::Result<()> {
        self.0.accept(qp, params)
    }
    fn post_recvs(&mut self, qp: QpIndex, recvs: Recvs<'_>) -> Result<(), PostError> {
        self.0.post_recvs(qp, recvs)
    }
    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> Result<(), PostError> {
        self.0.post_send(qp, wrs)
    }
    fn poll(&mut self, out: &mut [Completion]) -> rblk_fabric::Result<usize> {
        self.check(FAILS_TO_POLL)?;
        self.0.poll(out)
    }
    fn arm(&mut self) -> rblk_fabric::Result<()> {
        self.check(FAILS_TO_ARM)?;
        self.0.arm()
    }
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.0.event_fds()
    }
    fn clear_event(&mut self) {
        self.0.clear_event();
    }
    fn fail(&mut self, qp: QpIndex) {
        self.0.fail(qp);
    }
    fn counters(&self) -> PollerCounters {
        self.0.counters()
    }
}

fn group() -> (GroupHandle, mpsc::UnboundedReceiver<FromGroup>, Arc<Region>) {
    let arena = Region::allocate(16 << 20, PageKind::Normal).unwrap();
    let store = UringStore::new(Arc::clone(&arena), &UringOptions::default()).unwrap();
    let part = Arena::over(Arc::clone(&arena), 0..arena.len(), 1 << 20).unwrap();
    let options = ShardOptions {
        dirty_max_bytes: 1 << 20,
        write_back_delay: Duration::from_secs(1),
        write_back_max_bytes: 1 << 20,
        seed: 1,
    };
    let shard = Shard::new(store, part, options, Instant::now());
    let (to_control, told) = mpsc::unbounded_channel();
    let others = OtherGroups::connect(1).unwrap().remove(0);
    let tuning = Tuning {
        cpu: None,
        spin: SpinMode::Never,
        slow_io: None,
        stop_timeout: Duration::from_secs(30),
    };
    (start(0, shard, others, tuning, to_control).unwrap(), told, arena)
}

/// What the thread says next, unless it says nothing for long.
fn next(told: &mut mpsc::UnboundedReceiver<FromGroup>) -> FromGroup {
    let deadline = Instant::now() + Duration::from_secs(100);
    loop {
        match told.try_recv() {
            Ok(message) => return message,
            Err(mpsc::error::TryRecvError::Empty) => {}
            Err(error) => panic!("{error}: the thread ended"),
        }
        assert!(Instant::now() < deadline, "the thread says nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_thread_outlives_its_completion_queues() {
    let (mut handle, mut told, arena) = group();
    let device = Device::Soft(Network::new(1).device());
    let pd = device.alloc_pd().unwrap();
    let register = |access| Arc::new(pd.register(&arena, access).unwrap());
    let memory = PollerMemory {
        arena: register(Access::LOCAL_WRITE),
        zeros: register(Access::LOCAL_READ),
        volumes: Vec::new(),
    };
    let add = |handle: &GroupHandle, place, state: u32| {
        let state = Arc::new(AtomicU32::new(state));
        let (poller, _) = pd.poller(64).unwrap();
        let poller = Box::new(Fragile(poller, Arc::clone(&state)));
        let mail = ToGroup::AddPoller { place, poller, memory: Some(memory.clone()) };
        handle.mail.send(mail).unwrap();
        state
    };
    // The last place that can be watched, and one of another device, which goes on.
    let last = POLLERS_MAX - 1;
    let _other = add(&handle, 0, WORKS);
    for how in [FAILS_TO_ARM, FAILS_TO_POLL, FAILS_TO_ARM] {
        add(&handle, last, how);
        let broken = next(&mut told);
        assert!(
            matches!(broken, FromGroup::PollerBroken { group: 0, poller } if poller == last),
            "{broken:?}"
        );
        let gone = next(&mut told);
        assert!(
            matches!(gone, FromGroup::PollerGone { group: 0, place, .. } if place == last),
            "{gone:?}"
        );
    }
    // It watches the new one: the place of the old ones is free.
    add(&handle, last, WORKS);
    handle.mail.send(ToGroup::Stop).unwrap();
    let end = next(&mut told);
    assert!(
        matches!(end, FromGroup::Stopped { group: 0, ref unsaved, error: None } if unsaved.is_empty()),
        "once for each, and nothing else: {end:?}"
    );
    handle.join();
}
