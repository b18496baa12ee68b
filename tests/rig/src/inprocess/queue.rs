//! The initiators' queues of a [`Rig`].

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use rblk_fabric::soft::network::FaultyWire;
use rblk_fabric::{Completion, Device, DeviceCaps, PageKind, QpLimits, Region};
use rblk_initiator::engine::durability::Ledger;
use rblk_initiator::engine::inflight::WrongState;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::path::{DeadPath, Path, PathLayout, PathMemory};
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::WayTerms;
use rblk_initiator::engine::{Engine, PathEnd, QueueStats};
use rblk_initiator::queue::path_change::PathChange;
use rblk_operate::mount::mount_times::MountTimes;
use rblk_operate::mount::path_status::PathWork;
use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_protocol::{ConnectionKind, Features, Mutation, QueueDepth, Tag, VolumeHandle};
use rblk_runtime::Moment;
use rblk_target::store::Store;
use rblk_target::volume::Volume;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};

use super::destroying::Ended;
use super::poller::timed;
use super::target::Made;
use super::{Join, Outcome, QueueOptions, RawEnd, Rig, timing};
use crate::allocations;

/// Names an I/O queue of a rig.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QueueId(usize);

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) engine: Engine,
    stats: Arc<QueueStats>,
    buffers: Arc<Region>,
    options: QueueOptions,
    // None in a rig that the caller's control drives.
    session: Option<(SessionIndex, u16)>,
    volume: VolumeHandle,
    change: PathChange,
    // Of the last path of each way, one for each lane.
    wires: BTreeMap<WayIndex, Vec<FaultyWire>>,
    ended: Vec<(WayIndex, PathEnd)>,
    // Outcomes of one turn.
    done: Vec<(Tag, i32)>,
    frozen: bool,
    // With `Mutation::BufferReuseInitiator`: dead paths with QPs that stay.
    kept_alive: Vec<DeadPath>,
}

impl Queue {
    /// One turn of the engine. Its own function, so that profiles name it.
    #[inline(never)]
    fn turn(&mut self, now: Moment) -> bool {
        let Self { engine, done, .. } = self;
        engine.turn(now, |tag, result| done.push((tag, result)))
    }

    #[inline(never)]
    fn submit(&mut self, tag: Tag, io: Io) -> Result<(), WrongState> {
        self.engine.submit(tag, io)
    }
}

impl<S: Store> Rig<S> {
    fn queue(&self, id: QueueId) -> &Queue {
        self.queues[id.0].as_ref().expect("a queue that was not dropped")
    }

    fn queue_mut(&mut self, id: QueueId) -> &mut Queue {
        self.queues[id.0].as_mut().expect("a queue that was not dropped")
    }

    /// An I/O queue of a session for one of its volumes, connected.
    ///
    /// # Errors
    /// Memory is short, or the sizes do not fit.
    pub fn add_queue(
        &mut self,
        session: SessionIndex,
        volume: VolumeIndex,
        options: QueueOptions,
    ) -> Result<QueueId> {
        let id = self.add_engine(volume, options, None)?;
        let of_session = |q: &&Queue| q.session.is_some_and(|(of, _)| of == session);
        let number = self.queues.iter().flatten().filter(of_session).count();
        self.queue_mut(id).session = Some((session, u16::try_from(number)?));
        self.reconnect(id)?;
        Ok(id)
    }

    /// An I/O queue for a volume, without a path. With a ledger it tracks durable writes.
    ///
    /// # Errors
    /// Memory is short.
    pub fn add_engine(
        &mut self,
        volume: VolumeIndex,
        options: QueueOptions,
        ledger: Option<Ledger>,
    ) -> Result<QueueId> {
        let depth = QueueDepth::new(options.depth).context("queue depth")?;
        let stride = options.buffer_stride();
        let buffers = Region::allocate(stride * usize::from(options.depth), PageKind::Normal)?;
        let stats = Arc::new(QueueStats::default());
        let mut engine = Engine::new(depth, stride, Arc::clone(&stats))
            .with_data_max(options.io_max_bytes as usize);
        if let Some(ledger) = ledger {
            engine = engine.with_ledger(ledger);
        }
        self.queues.push(Some(Queue {
            engine,
            stats,
            buffers,
            options,
            session: None,
            change: PathChange::new(u16::try_from(self.queues.len()).unwrap_or(u16::MAX)),
            volume: VolumeHandle(u32::from(volume.0) + 1),
            wires: BTreeMap::new(),
            ended: Vec::new(),
            done: Vec::with_capacity(depth.tags()),
            frozen: false,
            kept_alive: Vec::new(),
        }));
        Ok(QueueId(self.queues.len() - 1))
    }

    /// Kills the queue's process. With `silent` its machine dies, so that the target hears nothing.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn drop_queue(&mut self, id: QueueId, silent: bool) {
        let Some(mut queue) = self.queues[id.0].take() else { return };
        if silent {
            queue.wires.values().flatten().for_each(FaultyWire::silence);
        }
        self.outcomes.retain(|outcome| outcome.queue != id);
        queue.engine.disconnect();
        while let Some((_, dead)) = queue.engine.take_ended() {
            drop(dead);
        }
        self.note(&[6, id.0 as u64]);
    }

    /// Stops a queue's thread, or continues it. A stopped queue has no turns.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn freeze(&mut self, id: QueueId, frozen: bool) {
        self.queue_mut(id).frozen = frozen;
    }

    /// Gives a queue of [`Self::add_queue`] a new path in its session's epoch. A path it still has
    /// ends.
    ///
    /// # Errors
    /// Connections of an older epoch are not gone, or memory is short.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn reconnect(&mut self, id: QueueId) -> Result<()> {
        let (session, queue) = self.queue(id).session.context("a queue of a session")?;
        let options = self.queue(id).options;
        let joins = (0..options.lanes).map(|lane| {
            let queue = if options.lanes > 1 { QueueOptions::lane(queue, lane) } else { queue };
            self.join_by_hand(session, ConnectionKind::Io { queue })
        });
        let joins = joins.collect::<Result<Vec<_>>>()?;
        self.connect_queue(id, &joins)
    }

    /// Gives a queue a new path, with a lane for each join. A path it still has ends.
    ///
    /// # Errors
    /// Memory is short.
    ///
    /// # Panics
    /// There is no such queue, or the target is dead.
    pub fn connect_queue(&mut self, id: QueueId, joins: &[Join]) -> Result<()> {
        let queue = self.queue(id);
        let (options, volume) = (queue.options, queue.volume);
        let buffers = Arc::clone(&queue.buffers);
        let (path, wires) = self.path(joins, volume, options, &buffers)?;
        self.give_path(id, path, wires);
        Ok(())
    }

    /// Gives a queue a path that was made with its options over its buffers. A path it still has
    /// ends.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn give_path(&mut self, id: QueueId, path: Path, wires: Vec<FaultyWire>) {
        let queue = self.queue_mut(id);
        queue.wires = BTreeMap::from([(path.way, wires)]);
        queue.engine.disconnect();
        drop(queue.change.set_next(Box::new(path)));
        self.go_on(id.0);
    }

    /// Gives a queue with several ways one more path, as soon as the last one of that way is
    /// destroyed and dropped.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn join_path(&mut self, id: QueueId, path: Path, wires: Vec<FaultyWire>) {
        let queue = self.queue_mut(id);
        queue.wires.insert(path.way, wires);
        drop(queue.change.set_join(Box::new(path)));
        self.go_on(id.0);
    }

    /// Ends the path of a way of a queue, from the initiator's side, or the one that waits to be
    /// its next.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn end_way(&mut self, id: QueueId, way: WayIndex) {
        let queue = self.queue_mut(id);
        queue.engine.end_way(way);
        drop(queue.change.take_join(way));
    }

    /// Fails every request of a queue with that errno, or lets requests wait again, as soon as its
    /// dead paths are destroyed.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn fail_requests(&mut self, id: QueueId, errno: Option<i32>) {
        self.queue_mut(id).change.set_failing(errno);
    }

    /// Hands over the ended paths of a queue for destruction, and does the work that waited for
    /// their ends. Returns whether there was any.
    fn go_on(&mut self, at: usize) -> bool {
        let (now, steps) = (self.now, self.steps);
        let mut busy = false;
        while let Some((queue, (end, dead))) =
            self.queues[at].as_mut().and_then(|q| q.engine.take_ended().map(|ended| (q, ended)))
        {
            busy = true;
            queue.ended.push((dead.way, end));
            if Mutation::BufferReuseInitiator.is_on() {
                queue.kept_alive.push(dead);
                self.note(&[2, at as u64]);
                continue;
            }
            let undestroyed = queue.change.count(&dead);
            self.destroys.add(steps, Ended::Initiator { dead, undestroyed });
            self.destroy_due();
            self.note(&[2, at as u64]);
        }
        for dead in self.queues[at].iter_mut().flat_map(|queue| &mut queue.kept_alive) {
            let _ = dead.poller.poll(&mut [Completion::default(); 16]);
        }
        if let Some(Queue { engine, change, .. }) = &mut self.queues[at] {
            busy |= !change.apply(engine, now).is_empty();
        }
        busy
    }

    /// What a queue with several ways has sent by one.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn sent_by(&self, queue: QueueId, way: WayIndex) -> PathWork {
        self.queue(queue).stats.by_way(way)
    }

    /// Whether every path of a queue that ended so far is destroyed.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn has_let_go(&self, queue: QueueId) -> bool {
        self.queue(queue).change.has_let_go()
    }

    /// A queue's buffers, one after the other.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn buffers(&self, id: QueueId) -> &Arc<Region> {
        &self.queue(id).buffers
    }

    /// A path to the target for an engine with these buffers, with a lane for each join.
    ///
    /// # Errors
    /// Memory is short, or the sizes do not fit.
    ///
    /// # Panics
    /// The target is dead.
    pub fn path(
        &mut self,
        joins: &[Join],
        volume: VolumeHandle,
        options: QueueOptions,
        buffers: &Arc<Region>,
    ) -> Result<(Path, Vec<FaultyWire>)> {
        let layout = PathLayout { depth: QueueDepth::new(options.depth).context("queue depth")? };
        let memory = PathMemory::register(
            &self.initiator_pd,
            &Arc::clone(buffers).into(),
            layout,
            joins.len(),
        )?;
        let caps = self.initiator_pd_caps();
        let sizes = layout.qp_limits(caps.inline_bytes, options.reads_out, options.features);
        let entries = u32::try_from(joins.len())? * (sizes.send_wrs + sizes.recv_wrs);
        let (poller, handle) = self.initiator_pd.poller(entries)?;
        let poller = timed(poller);
        let (first, others) = joins.split_first().context("a lane at least")?;
        let Made { connection, wire, accept, .. } =
            self.connect(*first, options, &handle, sizes)?;
        let (mut connections, mut wires) = (vec![connection], vec![wire]);
        // As in `Session::connect_queue`: further lanes carry no in-capsule data.
        let features = options.features.without(Features::DATA_LISTS);
        let options = QueueOptions { in_capsule_bytes: 0, features, ..options };
        for join in others {
            let Made { connection, wire, .. } = self.connect(*join, options, &handle, sizes)?;
            connections.push(connection);
            wires.push(wire);
        }
        let epoch = first.epoch;
        let path = Path {
            poller,
            connections,
            proofs: Vec::new(),
            tested: None,
            memory,
            accept,
            epoch,
            volume,
            lane_bytes: 1,
            way: WayIndex::FIRST,
            way_terms: WayTerms::default(),
        };
        Ok((path, wires))
    }

    fn initiator_pd_caps(&self) -> DeviceCaps {
        Device::Soft(self.network.device()).caps().clone()
    }

    /// A connection in the session's present epoch. The caller drives the initiator's end.
    ///
    /// # Errors
    /// As [`Self::reconnect`].
    pub fn raw_connection(
        &mut self,
        session: SessionIndex,
        kind: ConnectionKind,
        options: QueueOptions,
        sizes: QpLimits,
    ) -> Result<RawEnd> {
        let join = self.join_by_hand(session, kind)?;
        self.raw_end(join, options, sizes)
    }

    /// A connection. The caller drives the initiator's end.
    ///
    /// # Errors
    /// Memory is short, or the sizes do not fit.
    ///
    /// # Panics
    /// The target is dead.
    pub fn raw_end(
        &mut self,
        join: Join,
        options: QueueOptions,
        sizes: QpLimits,
    ) -> Result<RawEnd> {
        let pd = Device::Soft(self.network.device()).alloc_pd()?;
        let (mut poller, handle) = pd.poller(sizes.send_wrs + sizes.recv_wrs)?;
        let Made { connection, wire, hellos, .. } = self.connect(join, options, &handle, sizes)?;
        let qp = poller.attach(connection)?;
        Ok(RawEnd { pd, poller, qp, wire, hellos })
    }

    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn wire(&self, queue: QueueId) -> Option<&FaultyWire> {
        self.wires(queue).first()
    }

    /// The links of all lanes of the last path of a queue with one way.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn wires(&self, queue: QueueId) -> &[FaultyWire] {
        self.wires_of(queue, WayIndex::FIRST)
    }

    /// The links of all lanes of the last path of each way.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn all_wires(&self, queue: QueueId) -> Vec<FaultyWire> {
        self.queue(queue).wires.values().flatten().cloned().collect()
    }

    /// The links of all lanes of the last path of a way.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn wires_of(&self, queue: QueueId, way: WayIndex) -> &[FaultyWire] {
        self.queue(queue).wires.get(&way).map_or(&[], Vec::as_slice)
    }

    /// Ends a queue's path from the initiator's side.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn disconnect(&mut self, queue: QueueId) {
        self.queue_mut(queue).engine.disconnect();
    }

    /// A queue's engine.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn engine_mut(&mut self, queue: QueueId) -> &mut Engine {
        &mut self.queue_mut(queue).engine
    }

    /// Whether a queue's path has passed its self-test.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn is_connected(&self, queue: QueueId) -> bool {
        self.queue(queue).engine.is_connected()
    }

    /// Requests of a queue that are not answered.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn outstanding(&self, queue: QueueId) -> usize {
        self.queue(queue).engine.outstanding()
    }

    /// Why the paths of a queue ended, oldest first, since the last call.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn take_path_ends(&mut self, queue: QueueId) -> Vec<PathEnd> {
        self.take_way_ends(queue).into_iter().map(|(_, end)| end).collect()
    }

    /// The same, with the way of each path.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn take_way_ends(&mut self, queue: QueueId) -> Vec<(WayIndex, PathEnd)> {
        std::mem::take(&mut self.queue_mut(queue).ended)
    }

    /// Puts bytes into a tag's buffer.
    ///
    /// # Panics
    /// The bytes do not fit, or there is no such queue.
    pub fn fill_buffer(&self, queue: QueueId, tag: Tag, bytes: &[u8]) {
        let queue = self.queue(queue);
        let stride = queue.options.buffer_stride();
        assert!(bytes.len() <= stride, "longer than the buffer");
        queue.buffers.write(tag.index() * stride, bytes);
    }

    /// Copies bytes from a tag's buffer.
    ///
    /// # Panics
    /// The buffer is shorter, or there is no such queue.
    #[must_use]
    pub fn buffer(&self, queue: QueueId, tag: Tag, len: usize) -> Vec<u8> {
        let queue = self.queue(queue);
        let stride = queue.options.buffer_stride();
        assert!(len <= stride, "longer than the buffer");
        let mut bytes = vec![0; len];
        queue.buffers.read(tag.index() * stride, &mut bytes);
        bytes
    }

    /// Submits a request to a queue. The tag's buffer has its data, if any.
    ///
    /// # Errors
    /// The tag is in use or out of bounds.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn submit(&mut self, queue: QueueId, tag: Tag, io: Io) -> Result<(), WrongState> {
        self.note(&[1, queue.0 as u64, u64::from(tag.0), io.lba.0, io.count.0]);
        let allocated = allocations::of_this_thread();
        let engine = self.queues[queue.0].as_mut().expect("a queue that was not dropped");
        let submitted = timing::turn(&mut self.times.initiator, || engine.submit(tag, io));
        self.allocations.initiator += allocations::of_this_thread() - allocated;
        submitted
    }

    /// A request over a range in bytes of the queue's volume.
    ///
    /// # Panics
    /// There is no such queue or volume, or the range is not whole blocks.
    #[must_use]
    pub fn request(&self, queue: QueueId, op: IoOp, offset: u64, len: u64) -> Io {
        let handle = self.queue(queue).volume;
        let volume = Volume::index_of(handle).and_then(|i| self.volumes.get(usize::from(i.0)));
        let size = volume.expect("a volume of the rig").block_size;
        Io::new(op, offset, len, size).expect("whole blocks")
    }

    /// One turn of a queue. Returns whether anything happened.
    pub(super) fn turn_queue(&mut self, at: usize) -> bool {
        let now = self.now;
        let Some(queue) = self.queues[at].as_mut().filter(|queue| !queue.frozen) else {
            return false;
        };
        let allocated = allocations::of_this_thread();
        let now: Moment = now.into();
        let mut busy = timing::turn(&mut self.times.initiator, || queue.turn(now));
        self.allocations.initiator += allocations::of_this_thread() - allocated;
        let from = self.outcomes.len();
        let of = QueueId(at);
        self.outcomes.extend(queue.done.drain(..).map(|(tag, result)| Outcome {
            queue: of,
            tag,
            result,
        }));
        busy |= self.go_on(at);
        for at in from..self.outcomes.len() {
            let Outcome { queue, tag, result } = self.outcomes[at];
            let result = u64::from(result.cast_unsigned());
            self.note(&[3, queue.0 as u64, u64::from(tag.0), result]);
        }
        busy
    }

    /// A queue's counters.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn queue_counts(&self, queue: QueueId) -> QueueCounts {
        self.queue(queue).stats.snapshot()
    }

    /// The times of a queue's requests.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn queue_times(&self, queue: QueueId) -> MountTimes {
        self.queue(queue).stats.times()
    }
}
