//! [`Target`]: a target that loses unflushed writes when it dies. Its store may fail.

use std::collections::BTreeSet;
use std::sync::Arc;

use rblk_fabric::soft::network::{FaultyWire, Network};
use rblk_fabric::{
    Access, Completion, Connection, Device, MemoryRegion, PageKind, Poller, PollerHandle, QpIndex,
    QpLimits, RecvWr, Region, RemoteBuffer, Rkey, SendOp, SendWr, SgeList, WcStatus, WrId,
};
use rblk_initiator::engine::path::{Path, PathLayout, PathMemory};
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::WayTerms;
use rblk_protocol::limits::COMMAND_BYTES;
use rblk_protocol::{
    CommandCapsule, Epoch, Features, HelloAccept, InstanceId, Nonce, Opcode, ResponseCapsule,
    Status, Version, VolumeHandle, self_test_pattern,
};

use super::{BLOCKS, IO_MAX, Random, depth};

const STRIDE: usize = COMMAND_BYTES + IO_MAX as usize;
const RECVS: u16 = 32;
const SENDS_AT: usize = STRIDE * RECVS as usize;
const SEND_SLOTS: usize = 64;

/// One connection at the target.
pub(super) struct Far {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    slots: MemoryRegion,
    next_send: usize,
    // Waiting commands, with their data.
    pub(super) pending: Vec<(CommandCapsule, Vec<u8>)>,
    wire: FaultyWire,
}

impl Far {
    fn post_recv(&mut self, slot: u16) {
        let sge =
            self.slots.sge(usize::from(slot) * STRIDE, u32::try_from(STRIDE).unwrap()).unwrap();
        let _ = self.poller.post_recv(self.qp, &[RecvWr::one(WrId(slot.into()), sge)]);
    }

    fn post(&mut self, op: SendOp, bytes: &[u8]) {
        let at = SENDS_AT + self.next_send * 64;
        self.next_send = (self.next_send + 1) % SEND_SLOTS;
        self.slots.region().write(at, bytes);
        let sge = self.slots.sge(at, u32::try_from(bytes.len()).unwrap()).unwrap();
        let id = WrId(1 << 16);
        let _ = self.poller.post_send(
            self.qp,
            &[SendWr { id, op, sges: SgeList::one(sge), signaled: true, inline: false }],
        );
    }

    pub(super) fn answer(&mut self, command: &CommandCapsule, status: Status) {
        let response = ResponseCapsule::new(command.tag, command.sequence, status);
        self.post(SendOp::Send, &response.to_wire());
    }

    pub(super) fn hear(&mut self) {
        loop {
            let mut one = [Completion::default()];
            if self.poller.poll(&mut one).unwrap() == 0 {
                return;
            }
            let [completion] = one;
            if completion.status != WcStatus::Success || completion.id.0 >> 16 != 0 {
                continue;
            }
            let slot = u16::try_from(completion.id.0).unwrap();
            let mut bytes = vec![0; completion.byte_len as usize];
            self.slots.region().read(usize::from(slot) * STRIDE, &mut bytes);
            self.post_recv(slot);
            let fixed = bytes.first_chunk::<COMMAND_BYTES>().unwrap();
            let command = CommandCapsule::from_wire(fixed, bytes.len(), depth()).unwrap();
            if command.opcode == Opcode::SelfTest {
                let buffer = command.buffer.unwrap();
                let to = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
                self.post(SendOp::Write(to), &self_test_pattern(command.sequence));
                self.answer(&command, Status::Ok);
            } else {
                self.pending.push((command, bytes[COMMAND_BYTES..].to_vec()));
            }
        }
    }
}

/// A target: its memory, and the blocks that would survive its death.
pub(super) struct Target {
    pub(super) network: Network,
    device: Device,
    pub(super) memory: Vec<u64>,
    pub(super) disk: Vec<u64>,
    pub(super) connections: Vec<Far>,
    // The store fails: a FLUSH makes nothing durable, and returns an error.
    pub(super) fails_flushes: bool,
    // Blocks that refuse data and zeroes.
    pub(super) bad: BTreeSet<usize>,
    // The status of a write to a bad block.
    pub(super) bad_status: Status,
}

fn soft(handle: &PollerHandle) -> &rblk_fabric::soft::PollerHandle {
    #[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
    let PollerHandle::Soft(handle) = handle else { panic!("a poller of another provider") };
    handle
}

impl Target {
    pub(super) fn new(seed: u64) -> Self {
        let network = Network::new(seed);
        let device = Device::Soft(network.device());
        let (memory, disk) = (vec![0; BLOCKS], vec![0; BLOCKS]);
        Self {
            network,
            device,
            memory,
            disk,
            connections: Vec::new(),
            fails_flushes: false,
            bad: BTreeSet::new(),
            bad_status: Status::StoreError,
        }
    }

    pub(super) fn connect(&mut self, buffers: &Arc<Region>) -> Path {
        let (near, far) = (self.device.alloc_pd().unwrap(), self.device.alloc_pd().unwrap());
        let layout = PathLayout { depth: depth() };
        let memory = PathMemory::register(&near, &Arc::clone(buffers).into(), layout, 1).unwrap();
        let (near_poller, near_handle) = near.poller(512).unwrap();
        let (mut poller, far_handle) = far.poller(512).unwrap();
        let sizes = QpLimits {
            send_wrs: 256,
            recv_wrs: RECVS.into(),
            send_sges: 1,
            recv_sges: 1,
            inline_bytes: 0,
            reads_out: 1,
            reads_in: 0,
        };
        let (a, b, wire) = self
            .network
            .pair(
                (soft(&near_handle), layout.qp_limits(0, 1, Features::default())),
                (soft(&far_handle), sizes),
            )
            .unwrap();
        let qp = poller.attach(Connection::Soft(b)).unwrap();
        let region = Region::allocate(SENDS_AT + SEND_SLOTS * 64, PageKind::Normal).unwrap();
        let slots = far.register(&region, Access::LOCAL_WRITE).unwrap();
        let mut end = Far { poller, qp, slots, next_send: 0, pending: Vec::new(), wire };
        for slot in 0..RECVS {
            end.post_recv(slot);
        }
        self.connections.push(end);
        let accept = HelloAccept {
            version: Version::NEWEST,
            depth: depth(),
            features: Features::default(),
            in_capsule_bytes: IO_MAX,
            io_max_bytes: IO_MAX,
            instance: InstanceId([1; 16]),
            nonce: Nonce([2; 16]),
        };
        Path {
            poller: near_poller,
            connections: vec![Connection::Soft(a)],
            proofs: Vec::new(),
            tested: None,
            memory,
            accept,
            epoch: Epoch(1),
            volume: VolumeHandle(1),
            lane_bytes: 1,
            way: WayIndex::FIRST,
            way_terms: WayTerms::default(),
        }
    }

    fn carry_out(&mut self, command: &CommandCapsule, data: &[u8]) -> Status {
        if command.opcode == Opcode::Flush {
            if self.fails_flushes {
                return Status::StoreError;
            }
            self.disk.clone_from(&self.memory);
            return Status::Ok;
        }
        let (first, count) = (command.lba.0, command.count.0);
        let range = usize::try_from(first).unwrap()..usize::try_from(first + count).unwrap();
        if command.opcode != Opcode::Discard && self.bad.range(range).next().is_some() {
            return self.bad_status;
        }
        for at in 0..usize::try_from(command.count.0).unwrap() {
            let block = usize::try_from(command.lba.0).unwrap() + at;
            self.memory[block] = match command.opcode {
                Opcode::Write => {
                    u64::from_le_bytes(data[at * 512..at * 512 + 8].try_into().unwrap())
                }
                _ => 0,
            };
            if command.flags.fua {
                self.disk[block] = self.memory[block];
            }
        }
        Status::Ok
    }

    /// Carries out some waiting commands, in any order, and answers most of them.
    pub(super) fn turn(&mut self, random: &mut Random) {
        self.network.advance(1);
        for at in 0..self.connections.len() {
            self.connections[at].hear();
            while !self.connections[at].pending.is_empty() && !random.one_in(4) {
                let pick = random.below(self.connections[at].pending.len());
                let (command, data) = self.connections[at].pending.swap_remove(pick);
                let status = self.carry_out(&command, &data);
                self.connections[at].answer(&command, status);
            }
        }
    }

    /// Dies, and starts again: of the unflushed blocks only some stay. The store works again.
    pub(super) fn crash(&mut self, random: &mut Random) {
        self.fails_flushes = false;
        for end in &mut self.connections {
            end.wire.cut();
        }
        self.connections.clear();
        for block in 0..BLOCKS {
            if random.one_in(3) {
                self.disk[block] = self.memory[block];
            }
        }
        self.memory.clone_from(&self.disk);
    }
}
