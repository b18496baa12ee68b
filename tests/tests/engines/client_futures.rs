//! Futures of `rblk-client` that are dropped over the in-memory network. Its devices touch memory
//! until their QPs are destroyed. The tests follow the owner of each buffer, step by step.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use rblk_client::tokio::{Driver, Handle};
use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::front::program::detached::Detached;
use rblk_protocol::{BlockSize, ConnectionKind, QueueDepth, VolumeHandle};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_tests::bed::{Bed, PATIENCE, STORE};
use tokio::task::{LocalSet, spawn_local, yield_now};

const DEPTH: u16 = 4;
const DATA_MAX: usize = 16 << 10;

struct World {
    bed: Bed,
    control: Detached,
}

impl World {
    /// A path in the next epoch.
    fn connect(&mut self) -> Vec<FaultyWire> {
        let rig = &mut self.bed.rig;
        self.control.disconnect();
        rig.new_epoch(self.bed.session).expect("the target lets go");
        let kind = ConnectionKind::Io { queue: 0 };
        let join = rig.join_by_hand(self.bed.session, kind).expect("a new epoch");
        let volume = VolumeHandle(u32::from(STORE.0) + 1);
        let memory = self.control.memory().expect("the memory of the queue");
        let options =
            QueueOptions { depth: DEPTH, io_max_bytes: 16 << 10, ..QueueOptions::default() };
        let (path, wires) = rig.path(&[join], volume, options, &memory).expect("a path");
        self.control.connect(path);
        wires
    }

    /// Lets the network, the target and the tasks work until the condition is true.
    async fn run(&mut self, what: &str, handle: &Handle, mut look: impl FnMut() -> bool) {
        for _ in 0..PATIENCE {
            if look() {
                return;
            }
            self.bed.rig.step();
            turn(handle).await;
        }
        panic!("{what} did not happen: {handle:?}");
    }
}

/// A turn of the driver. The in-memory network has no descriptor that wakes the driver, but a
/// request wakes it: here a request that waits for its turn, or is refused.
async fn turn(handle: &Handle) {
    let mut empty = Box::pin(handle.discard(0, 0));
    let polled = poll_fn(|context| Poll::Ready(empty.as_mut().poll(context))).await;
    assert!(!matches!(polled, Poll::Ready(Ok(()))), "an empty range");
    drop(empty);
    yield_now().await;
}

/// Lets the tasks work, but neither the network nor the target.
async fn tasks_only(handle: &Handle) {
    for _ in 0..100 {
        turn(handle).await;
    }
}

type Read = Pin<Box<dyn Future<Output = ()>>>;

/// Starts a read into every buffer.
async fn reads(handle: &Handle) -> Vec<Read> {
    let mut reads: Vec<Read> = Vec::new();
    for _ in 0..DEPTH {
        let queue = handle.clone();
        let mut read: Read = Box::pin(async move {
            let buffer = queue.buffer().await.expect("a buffer");
            queue.read(buffer, 0, DATA_MAX).await.expect("the data");
        });
        let begun = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
        assert!(begun.is_pending());
        reads.push(read);
    }
    tasks_only(handle).await;
    assert_eq!((handle.under_way(), handle.free_buffers()), (usize::from(DEPTH), 0));
    reads
}

fn test(body: impl AsyncFnOnce(World, Handle, tokio::task::JoinHandle<()>)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let (depth, block) = (QueueDepth::new(DEPTH).unwrap(), BlockSize::new(512).unwrap());
        let (control, queue) = Detached::new(depth, DATA_MAX, 0, block).unwrap();
        let rig = RigOptions { late_rdma: true, ..RigOptions::default() };
        let (handle, driver) = Driver::new(queue).unwrap();
        let driver = spawn_local(async move { drop(driver.run().await.expect("the queue")) });
        body(World { bed: Bed::new(&rig), control }, handle, driver).await;
    });
}

#[test]
fn the_buffer_of_a_dropped_future_is_not_reused_before_its_completion() {
    test(async |mut world, handle, driver| {
        let wires = world.connect();
        let reads = reads(&handle).await;
        drop(reads);
        let waits = handle.clone();
        let waits = spawn_local(async move { waits.buffer().await.expect("a buffer") });
        tasks_only(&handle).await;
        let parked =
            |handle: &Handle| (handle.given_up(), handle.free_buffers()) == (usize::from(DEPTH), 0);
        assert!(parked(&handle) && !waits.is_finished(), "{handle:?}");
        // Its connection dies and is destroyed, and another one takes the request: the request is
        // under way all the time.
        wires.iter().for_each(FaultyWire::cut);
        tasks_only(&handle).await;
        world.connect();
        tasks_only(&handle).await;
        assert!(parked(&handle) && !waits.is_finished(), "{handle:?}");
        drop(world.control.next_end().expect("its path"));
        tasks_only(&handle).await;
        assert!(parked(&handle) && !waits.is_finished(), "{handle:?}");
        let settled = handle.clone();
        let settled = spawn_local(async move { settled.settled().await });
        world.run("the completions", &handle, || settled.is_finished()).await;
        drop(waits.await.unwrap());
        assert_eq!((handle.under_way(), handle.free_buffers()), (0, usize::from(DEPTH)));
        drop(handle);
        driver.await.unwrap();
    });
}

#[test]
fn the_memory_outlives_a_dropped_driver_as_long_as_a_device_may_touch_it() {
    test(async |mut world, handle, driver| {
        let _wires = world.connect();
        let reads = reads(&handle).await;
        driver.abort();
        assert!(driver.await.unwrap_err().is_cancelled());
        drop((reads, handle));
        let ended = world.control.next_end().expect("its path");
        // The answers of the target arrive in memory.
        for _ in 0..200 {
            world.bed.rig.step();
        }
        assert!(world.control.memory().is_some(), "unmapped under a device");
        drop(ended);
        assert!(world.control.memory().is_none(), "mapped when nobody can touch it");
    });
}
