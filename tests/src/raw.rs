//! [`RawPeer`] and [`RawTarget`]: ends driven by hand, which send messages that no correct end
//! sends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::soft::network::{FaultyWire, Network};
use rblk_fabric::{
    Access, Completion, Connection, Device, MemoryRegion, PageKind, Poller, ProtectionDomain,
    QpIndex, QpLimits, RecvWr, Region, RemoteBuffer, Rkey, SendOp, SendWr, SgeList, WcOpcode,
    WcStatus, WrId,
};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::path::{DeadPath, LaneProof, Path, PathLayout, PathMemory};
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::WayTerms;
use rblk_initiator::engine::{Engine, PathEnd, QueueStats};
use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_protocol::auth::{Hellos, QueueKey, SessionSecret};
use rblk_protocol::limits::{ACCEPT_BYTES, COMMAND_BYTES, HELLO_BYTES, RESPONSE_BYTES};
use rblk_protocol::{
    BlockSize, CommandCapsule, CommandList, ConnectionKind, Epoch, Features, HelloAccept,
    Immediate, InstanceId, KeyedDescriptor, Nonce, Opcode, QueueDepth, ResponseCapsule,
    ResponseList, SELF_TEST_BYTES, Sequence, Status, Tag, Version, VolumeHandle, self_test_pattern,
};
use rblk_rig::inprocess::{QueueOptions, RawEnd, soft_handle};
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};

use crate::bed::{Bed, PATIENCE};

/// Bytes a peer lends to the target.
pub const LENT_BYTES: usize = 1 << 20;
const SEND_SLOTS: usize = 64;
const SEND_STRIDE: usize = 20 << 10;
const RECVS: u16 = 256;
const RECV_STRIDE: usize = 4096;
const RECV_BYTES: u32 = 4096;

/// Something the peer received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// A response.
    Response(ResponseCapsule),
    /// An immediate.
    Immediate(Immediate),
    /// The connection ended, with this status.
    End(WcStatus),
}

fn sizes() -> QpLimits {
    QpLimits {
        send_wrs: 1024,
        recv_wrs: RECVS.into(),
        send_sges: 1,
        recv_sges: 1,
        inline_bytes: 0,
        reads_out: 0,
        reads_in: 16,
    }
}

#[derive(Debug)]
struct Mouth {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    slots: MemoryRegion,
    next_send: usize,
    recvs_at: usize,
}

impl Mouth {
    fn new(pd: &ProtectionDomain, poller: Box<dyn Poller>, qp: QpIndex) -> Self {
        let recvs_at = SEND_SLOTS * SEND_STRIDE;
        let bytes = recvs_at + usize::from(RECVS) * RECV_STRIDE;
        let region = Region::allocate(bytes, PageKind::Normal).expect("memory");
        let slots = pd.register(&region, Access::LOCAL_WRITE).expect("a registration");
        let mut mouth = Self { poller, qp, slots, next_send: 0, recvs_at };
        for slot in 0..RECVS {
            mouth.post_recv(slot);
        }
        mouth
    }

    fn post_recv(&mut self, slot: u16) {
        let at = self.recvs_at + usize::from(slot) * RECV_STRIDE;
        let sge = self.slots.sge(at, RECV_BYTES).expect("inside");
        let wr = RecvWr::one(WrId(slot.into()), sge);
        // On a dead QP it flushes.
        let _ = self.poller.post_recv(self.qp, &[wr]);
    }

    fn post(&mut self, op: SendOp, bytes: &[u8]) {
        assert!(bytes.len() <= SEND_STRIDE, "too long for a slot");
        let at = self.next_send * SEND_STRIDE;
        self.next_send = (self.next_send + 1) % SEND_SLOTS;
        self.slots.region().write(at, bytes);
        let sge = self.slots.sge(at, u32::try_from(bytes.len()).expect("short")).expect("inside");
        let sges = SgeList::one(sge);
        let wr = SendWr { id: WrId(1 << 16), op, sges, signaled: true, inline: false };
        let _ = self.poller.post_send(self.qp, &[wr]);
    }

    /// Completions of RECVs with their bytes, and the first failure.
    fn poll(&mut self) -> (Vec<(Completion, Vec<u8>)>, Option<WcStatus>) {
        let mut heard = Vec::new();
        let mut end = None;
        loop {
            let mut one = [Completion::default()];
            if self.poller.poll(&mut one).expect("a CQ") == 0 {
                return (heard, end);
            }
            let [completion] = one;
            if completion.status != WcStatus::Success {
                end = end.or(Some(completion.status));
            } else if completion.id.0 >> 16 == 0 {
                let slot = u16::try_from(completion.id.0).expect("a slot");
                let mut bytes = vec![0; (completion.byte_len as usize).min(RECV_STRIDE)];
                let at = self.recvs_at + usize::from(slot) * RECV_STRIDE;
                self.slots.region().read(at, &mut bytes);
                heard.push((completion, bytes));
                self.post_recv(slot);
            }
        }
    }
}

/// An initiator's end driven by hand, against the target of a [`Bed`].
#[derive(Debug)]
pub struct RawPeer {
    mouth: Mouth,
    pd: ProtectionDomain,
    /// Memory the target may read and write.
    pub lent: MemoryRegion,
    /// The link.
    pub wire: FaultyWire,
    /// The hellos of the connection.
    pub hellos: Hellos,
    /// Epoch of its commands.
    pub epoch: Epoch,
    depth: QueueDepth,
    lists: bool,
    digests: bool,
    sequence: Sequence,
    volume: VolumeHandle,
    ended: Option<WcStatus>,
}

impl RawPeer {
    /// A connection of a session, connected and silent.
    ///
    /// # Panics
    /// The connection cannot be made.
    #[must_use]
    pub fn new(
        bed: &mut Bed,
        session: SessionIndex,
        kind: ConnectionKind,
        volume: VolumeIndex,
        options: QueueOptions,
    ) -> Self {
        let end = bed.rig.raw_connection(session, kind, options, sizes()).expect("a connection");
        let RawEnd { pd, poller, qp, wire, hellos } = end;
        let region = Region::allocate(LENT_BYTES, PageKind::Normal).expect("memory");
        let lent = pd.register(&region, Access::REMOTE).expect("a registration");
        Self {
            mouth: Mouth::new(&pd, poller, qp),
            pd,
            lent,
            wire,
            hellos,
            epoch: bed.rig.epoch(session),
            depth: QueueDepth::new(options.depth).expect("a depth"),
            lists: options.features.has(Features::CAPSULE_LISTS),
            digests: options.features.has(Features::DIGEST),
            sequence: Sequence(0),
            volume: VolumeHandle(u32::from(volume.0) + 1),
            ended: None,
        }
    }

    /// An I/O connection that has passed its self-test.
    ///
    /// # Panics
    /// The self-test fails.
    #[must_use]
    pub fn tested(
        bed: &mut Bed,
        session: SessionIndex,
        volume: VolumeIndex,
        options: QueueOptions,
    ) -> Self {
        let kind = ConnectionKind::Io { queue: 63 };
        let mut peer = Self::new(bed, session, kind, volume, options);
        let command = peer.self_test();
        peer.send(&command.to_wire());
        match peer.hear(bed) {
            Heard::Response(_) | Heard::Immediate(_) => peer,
            end @ Heard::End(_) => panic!("no self-test: {end:?}"),
        }
    }

    /// A proper command, to be spoilt.
    pub fn command(&mut self, opcode: Opcode, tag: u16) -> CommandCapsule {
        self.sequence = self.sequence.next();
        let mut command = CommandCapsule::new(opcode, Tag(tag), self.epoch, self.sequence);
        command.volume = self.volume;
        command.flags.digest = self.digests;
        command
    }

    /// The bytes that the target wrote into the buffer of a [`Self::self_test`].
    #[must_use]
    pub fn written(&self) -> [u8; SELF_TEST_BYTES] {
        let mut written = [0; SELF_TEST_BYTES];
        self.lent.region().read(LENT_BYTES - SELF_TEST_BYTES, &mut written);
        written
    }

    /// A proper SELF_TEST.
    pub fn self_test(&mut self) -> CommandCapsule {
        let tag = self.depth.connection_tag();
        let mut command = self.command(Opcode::SelfTest, tag.0);
        let at = LENT_BYTES - SELF_TEST_BYTES;
        command.buffer = Some(self.descriptor(at, SELF_TEST_BYTES));
        command
    }

    /// A proper READ or keyed WRITE of blocks of 512 bytes, with its data at the beginning of the
    /// lent memory.
    pub fn transfer(&mut self, opcode: Opcode, tag: u16, lba: u64, blocks: u32) -> CommandCapsule {
        let mut command = self.command(opcode, tag);
        command.lba = rblk_protocol::Lba(lba);
        command.count = rblk_protocol::BlockCount(blocks.into());
        command.buffer = Some(self.descriptor(0, blocks as usize * 512));
        command
    }

    /// A descriptor of a part of the lent memory.
    ///
    /// # Panics
    /// The part is not inside.
    #[must_use]
    pub fn descriptor(&self, at: usize, len: usize) -> KeyedDescriptor {
        assert!(at + len <= LENT_BYTES, "inside what is lent");
        let remote = self.lent.remote(at);
        let length = u32::try_from(len).expect("short");
        KeyedDescriptor { address: remote.addr, length, rkey: remote.rkey.0 }
    }

    /// Lends the memory under a new key; the old key is dead.
    ///
    /// # Panics
    /// The memory cannot be registered.
    pub fn lend_anew(&mut self) {
        let region = Arc::clone(self.lent.region());
        self.lent = self.pd.register(&region, Access::REMOTE).expect("a registration");
    }

    /// Sends a message as it is.
    pub fn send(&mut self, bytes: &[u8]) {
        self.mouth.post(SendOp::Send, bytes);
    }

    /// Writes into the target's memory, if the target permits that.
    pub fn write_remote(&mut self, addr: u64, rkey: u32, bytes: &[u8]) {
        let to = RemoteBuffer { addr, rkey: Rkey(rkey) };
        self.mouth.post(SendOp::Write(to), bytes);
    }

    /// Everything that arrived so far.
    ///
    /// # Panics
    /// A message is none of a target.
    pub fn listen(&mut self) -> Vec<Heard> {
        let (messages, end) = self.mouth.poll();
        let mut heard = Vec::new();
        for (completion, bytes) in &messages {
            if completion.opcode == WcOpcode::RecvWithImm {
                heard.push(Heard::Immediate(Immediate::from_bits(completion.imm)));
                continue;
            }
            let mut list =
                ResponseList::new(bytes.len(), self.lists, self.depth).expect("responses");
            list = list.with_digests(self.digests);
            while let Some(response) = list.take(|at, one| {
                one.copy_from_slice(&bytes[at..at + RESPONSE_BYTES]);
            }) {
                heard.push(Heard::Response(response.expect("a response")));
            }
        }
        if let (Some(status), None) = (end, self.ended) {
            self.ended = Some(status);
            heard.push(Heard::End(status));
        }
        heard
    }

    /// Steps the rig until `count` answers arrived, or the end of the connection.
    ///
    /// # Panics
    /// Neither arrives.
    pub fn hear_answers(&mut self, bed: &mut Bed, count: usize) -> Vec<Heard> {
        let mut heard = Vec::new();
        let came = bed.rig.run(PATIENCE, |_| {
            heard.extend(self.listen());
            heard.len() >= count || heard.iter().any(|h| matches!(h, Heard::End(_)))
        });
        assert!(came.is_ok(), "{count} answers, not {heard:?}");
        heard
    }

    /// Steps the rig until a message arrives.
    ///
    /// # Panics
    /// No message arrives, or several do.
    pub fn hear(&mut self, bed: &mut Bed) -> Heard {
        let mut heard = Vec::new();
        let came = bed.rig.run(PATIENCE, |_| {
            heard.extend(self.listen());
            !heard.is_empty()
        });
        assert!(came.is_ok(), "the target says nothing");
        assert_eq!(heard.len(), 1, "{heard:?}");
        heard[0]
    }

    /// Whether the connection is dead.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.ended.is_some()
    }
}

/// A target's end driven by hand, against an [`Engine`].
#[derive(Debug)]
pub struct RawTarget {
    /// The engine.
    pub engine: Engine,
    /// Its buffers.
    pub buffers: Arc<Region>,
    /// Requests that ended, with their results.
    pub outcomes: Vec<(Tag, i32)>,
    /// The engine's memory that its self-test named.
    pub scratch: KeyedDescriptor,
    mouth: Mouth,
    // The ends of the other lanes, with the most recent one last.
    others: Vec<Mouth>,
    stats: Arc<QueueStats>,
    network: Network,
    near: ProtectionDomain,
    now: Instant,
    options: QueueOptions,
    depth: QueueDepth,
    block_size: BlockSize,
}

impl RawTarget {
    /// An engine with a new path to this target.
    ///
    /// # Panics
    /// The engine or the path cannot be made.
    #[must_use]
    pub fn new(options: QueueOptions) -> Self {
        let network = Network::new(options.depth.into());
        let near = Device::Soft(network.device()).alloc_pd().expect("a PD");
        let depth = QueueDepth::new(options.depth).expect("a depth");
        let (stride, stats) = (options.buffer_stride(), Arc::new(QueueStats::default()));
        let buffers = Region::allocate(stride * usize::from(options.depth), PageKind::Normal)
            .expect("memory");
        let mut engine = Engine::new(depth, stride, Arc::clone(&stats))
            .with_data_max(options.io_max_bytes as usize);
        let now = Instant::now();
        let (path, mouth, others) = connect(&network, &near, &buffers, options, Epoch(1));
        let scratch = scratch_of(&path);
        engine.connect(path, now);
        Self {
            engine,
            buffers,
            outcomes: Vec::new(),
            scratch,
            mouth,
            others,
            stats,
            network,
            near,
            now,
            options,
            depth,
            block_size: BlockSize::new(512).expect("a block size"),
        }
    }

    /// An engine after a correct answer to its self-test.
    ///
    /// # Panics
    /// The engine rejects the answer.
    #[must_use]
    pub fn tested(options: QueueOptions) -> Self {
        let mut target = Self::new(options);
        target.pass_self_test();
        target
    }

    /// Switches to the next lane; after the last lane, to the first one.
    pub fn switch_lane(&mut self) {
        if !self.others.is_empty() {
            std::mem::swap(&mut self.mouth, &mut self.others[0]);
            self.others.rotate_left(1);
        }
    }

    fn pass_self_test(&mut self) {
        for _ in 0..self.options.lanes {
            assert!(!self.engine.is_connected(), "a lane was not tested");
            let command = self.next_command();
            let with_imm = self.options.features.has(Features::WRITE_WITH_IMM);
            self.answer_self_test(&command, &self_test_pattern(command.sequence), with_imm);
            self.steps(20);
            self.switch_lane();
        }
        assert!(self.engine.is_connected(), "the self-test was answered");
    }

    /// Gives the engine another path to this target, over the same buffers, and answers its
    /// self-test. Destroys the old path, and forgets this end's QP of it.
    ///
    /// # Panics
    /// The engine rejects the answer.
    pub fn reconnect(&mut self) {
        self.engine.disconnect();
        while let Some((_, dead)) = self.engine.take_ended() {
            drop(dead);
        }
        let (path, mouth, others) =
            connect(&self.network, &self.near, &self.buffers, self.options, Epoch(2));
        self.scratch = scratch_of(&path);
        (self.mouth, self.others) = (mouth, others);
        self.engine.connect(path, self.now);
        self.pass_self_test();
    }

    /// The end of this end of the connection, if it came.
    pub fn hear_end(&mut self) -> Option<WcStatus> {
        self.mouth.poll().1
    }

    /// Writes to memory of the engine.
    pub fn write(&mut self, to: KeyedDescriptor, bytes: &[u8]) {
        let to = RemoteBuffer { addr: to.address, rkey: Rkey(to.rkey) };
        self.mouth.post(SendOp::Write(to), bytes);
    }

    /// Answers a self-test with these bytes.
    ///
    /// # Panics
    /// The command names no buffer.
    pub fn answer_self_test(&mut self, command: &CommandCapsule, bytes: &[u8], with_imm: bool) {
        let buffer = command.buffer.expect("a buffer");
        if with_imm {
            let imm = Immediate::new(command.tag, command.sequence);
            self.write_with_imm(buffer, bytes, imm);
        } else {
            self.write(buffer, bytes);
            self.respond(&ResponseCapsule::new(command.tag, command.sequence, Status::Ok));
        }
    }

    /// Advances the time and lets both ends work.
    pub fn steps(&mut self, count: u32) {
        self.steps_of(count, Duration::from_micros(10));
    }

    /// [`Self::steps`] with steps of length `tick`.
    pub fn steps_of(&mut self, count: u32, tick: Duration) {
        for _ in 0..count {
            self.now += tick;
            self.network.advance(1);
            let outcomes = &mut self.outcomes;
            self.engine.turn(self.now, |tag, result| outcomes.push((tag, result)));
        }
    }

    /// The next command of the engine.
    ///
    /// # Panics
    /// None comes.
    pub fn next_command(&mut self) -> CommandCapsule {
        for _ in 0..1000 {
            self.steps(1);
            let mut commands = self.commands();
            if let Some(command) = commands.pop() {
                assert!(commands.is_empty(), "one command at a time");
                return command;
            }
        }
        panic!("the engine sends nothing");
    }

    /// Commands that came in and were not taken yet.
    ///
    /// # Panics
    /// One cannot be parsed.
    pub fn commands(&mut self) -> Vec<CommandCapsule> {
        self.messages().into_iter().flatten().collect()
    }

    /// Messages that came in and were not taken yet, as the commands in them.
    ///
    /// # Panics
    /// One cannot be parsed, or has data that does not fit our RECVs.
    pub fn messages(&mut self) -> Vec<Vec<CommandCapsule>> {
        let of = |message: Vec<(CommandCapsule, _)>| message.into_iter().map(|(c, _)| c).collect();
        self.messages_with_data().into_iter().map(of).collect()
    }

    /// [`Self::messages`], with the data of each command.
    ///
    /// # Panics
    /// As [`Self::messages`].
    pub fn messages_with_data(&mut self) -> Vec<Vec<(CommandCapsule, Vec<u8>)>> {
        let (heard, _) = self.mouth.poll();
        let features = self.options.features;
        let parse = |bytes: &Vec<u8>| {
            let mut list =
                CommandList::new(bytes.len().try_into().expect("short"), features, self.depth);
            let mut commands = Vec::new();
            let read = |at| bytes[at..at + COMMAND_BYTES].try_into().expect("as many");
            while let Some(command) = list.take(read) {
                let command = command.expect("a good command");
                let data = &bytes[list.data_offset(&command)..];
                let data = &data[..command.in_capsule_bytes as usize];
                commands.push((command, data.to_vec()));
            }
            commands
        };
        heard.iter().map(|(_, bytes)| parse(bytes)).collect()
    }

    /// Lets the engine end its path, and returns the dead path, with its memory still registered.
    ///
    /// # Panics
    /// The engine has no path.
    pub fn drop_path(&mut self) -> DeadPath {
        self.engine.disconnect();
        self.engine.take_ended().expect("a path").1
    }

    /// Submits a request of one block and returns its command.
    ///
    /// # Panics
    /// The engine does not send it.
    pub fn request(&mut self, op: IoOp, tag: u16) -> CommandCapsule {
        let len = if op == IoOp::Flush { 0 } else { 512 };
        let io = Io::new(op, 0, len, self.block_size).expect("whole blocks");
        // A command with in-capsule data does not fit our RECVs, so this one names a key.
        self.engine.submit(Tag(tag), io).expect("a free tag");
        self.next_command()
    }

    /// Sends a message as it is.
    pub fn send(&mut self, bytes: &[u8]) {
        self.mouth.post(SendOp::Send, bytes);
    }

    /// Sends a response, with its digest where that was agreed.
    pub fn respond(&mut self, response: &ResponseCapsule) {
        let digests = self.options.features.has(Features::DIGEST);
        self.send(&if digests { response.to_wire_sealed() } else { response.to_wire() });
    }

    /// Writes to a buffer of the engine with an immediate.
    pub fn write_with_imm(&mut self, to: KeyedDescriptor, bytes: &[u8], imm: Immediate) {
        let to = RemoteBuffer { addr: to.address, rkey: Rkey(to.rkey) };
        self.mouth.post(SendOp::WriteWithImm(to, imm.to_bits()), bytes);
    }

    /// The engine's counters.
    #[must_use]
    pub fn counts(&self) -> QueueCounts {
        self.stats.snapshot()
    }

    /// Why the engine gave up the path, after a while.
    pub fn path_end(&mut self) -> Option<PathEnd> {
        self.steps(50);
        self.engine.take_ended().map(|(end, _)| end)
    }
}

/// A new path over these buffers, and this end of it: the first lane's, and the others'.
fn connect(
    network: &Network,
    near: &ProtectionDomain,
    buffers: &Arc<Region>,
    options: QueueOptions,
    epoch: Epoch,
) -> (Path, Mouth, Vec<Mouth>) {
    let far = Device::Soft(network.device()).alloc_pd().expect("a PD");
    let depth = QueueDepth::new(options.depth).expect("a depth");
    let layout = PathLayout { depth };
    let lanes = usize::from(options.lanes);
    let memory = PathMemory::register(near, &Arc::clone(buffers).into(), layout, lanes)
        .expect("registrations");
    let near_sizes = layout.qp_limits(0, options.reads_out, options.features);
    let (poller, near_handle) = near.poller(2048 * u32::from(options.lanes)).expect("a CQ");
    let far_sizes = QpLimits { reads_out: options.reads_out, ..sizes() };
    let lane = || {
        let (mut far_poller, far_handle) = far.poller(2048).expect("a CQ");
        let (a, b, _) = network
            .pair(
                (soft_handle(&near_handle).expect("soft"), near_sizes),
                (soft_handle(&far_handle).expect("soft"), far_sizes),
            )
            .expect("a pair");
        let qp = far_poller.attach(Connection::Soft(b)).expect("a QP");
        (Connection::Soft(a), Mouth::new(&far, far_poller, qp))
    };
    let (first, mouth) = lane();
    let (mut connections, others): (Vec<_>, Vec<_>) = (1..lanes).map(|_| lane()).unzip();
    connections.insert(0, first);
    let accept = HelloAccept {
        version: Version::NEWEST,
        depth,
        features: options.features,
        in_capsule_bytes: options.in_capsule_bytes,
        io_max_bytes: options.io_max_bytes,
        instance: InstanceId([1; 16]),
        nonce: Nonce([2; 16]),
    };
    let prove = |lane| {
        let (ours, theirs) = queue_key(epoch, lane).prove(&hellos(), Nonce([3; 16]));
        LaneProof { ours, theirs }
    };
    let proofs = match options.features.has(Features::AUTH) {
        true => (0..options.lanes).map(prove).collect(),
        false => Vec::new(),
    };
    let path = Path {
        poller,
        connections,
        proofs,
        tested: None,
        memory,
        accept,
        epoch,
        volume: VolumeHandle(1),
        lane_bytes: 1,
        way: WayIndex::FIRST,
        way_terms: WayTerms::default(),
    };
    (path, mouth, others)
}

/// The key of one lane when both ends prove their session.
#[must_use]
pub fn queue_key(epoch: Epoch, lane: u16) -> QueueKey {
    QueueKey::new(&SessionSecret::from_bytes(&[5; 32]), epoch, lane)
}

/// Invented hellos for the proofs to cover. No hello was sent.
///
/// # Panics
/// Never: both are long enough.
#[must_use]
pub fn hellos() -> Hellos {
    Hellos::from_private_data(&[1; HELLO_BYTES], &[2; ACCEPT_BYTES]).expect("long enough")
}

fn scratch_of(path: &Path) -> KeyedDescriptor {
    let remote = path.memory.scratch.remote(0);
    let length = u32::try_from(SELF_TEST_BYTES).expect("short");
    KeyedDescriptor { address: remote.addr, length, rkey: remote.rkey.0 }
}
