//! [`Host`]: an initiator driven by hand on an iWARP connection.

use rblk_protocol::limits::{ADMIN_DEPTH, RESPONSE_BYTES};
use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, CommandCapsule, ConnectionKind, Epoch, Features, Generation,
    HelloAccept, HelloRequest, HostId, KeyedDescriptor, Lba, LoginReply, LoginRequest, Name,
    Opcode, OpenReply, OpenRequest, QueueDepth, ResponseCapsule, SELF_TEST_BYTES, Sequence,
    SessionId, Status, Tag, Version, VolumeHandle, self_test_pattern,
};

use super::stream::{Arrival, Place, ReadRequest, Stream};

/// Bytes that an end lends.
pub(crate) const LENT_BYTES: usize = 256 << 10;
/// The tag of the lent memory.
const STAG: u32 = 0x0052_4200;
/// The address of the lent memory.
const BASE: u64 = 0x10_0000;
/// Most data of one command.
pub(crate) const IO_MAX: u32 = 64 << 10;
const DEPTH: u16 = 8;

/// One connection, and the memory that it lends.
#[derive(Debug)]
struct End {
    stream: Stream,
    memory: Vec<u8>,
    epoch: Epoch,
    depth: QueueDepth,
    sequence: Sequence,
}

impl End {
    fn connect(address: &str, kind: ConnectionKind, epoch: Epoch, session: SessionId) -> Self {
        let depth = if kind == ConnectionKind::Admin { ADMIN_DEPTH } else { DEPTH };
        let asked = HelloRequest {
            kind,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(depth).expect("a depth"),
            features: Features::default(),
            in_capsule_bytes: 4096,
            io_max_bytes: IO_MAX,
            epoch,
            reads_in: 0,
            session,
        };
        let (stream, told) = Stream::connect(address, &asked.to_wire());
        let accept = HelloAccept::from_wire(&told, &asked).expect("an accept");
        Self {
            stream,
            memory: vec![0; LENT_BYTES],
            epoch,
            depth: accept.depth,
            sequence: Sequence(0),
        }
    }

    fn command(&mut self, opcode: Opcode, tag: Tag) -> CommandCapsule {
        self.sequence = self.sequence.next();
        CommandCapsule::new(opcode, tag, self.epoch, self.sequence)
    }

    fn lend(bytes: usize) -> KeyedDescriptor {
        assert!(bytes <= LENT_BYTES);
        KeyedDescriptor { address: BASE, length: u32::try_from(bytes).expect("short"), rkey: STAG }
    }

    fn at(place: Place) -> usize {
        assert_eq!(place.stag, STAG, "the tag of what is lent");
        usize::try_from(place.offset - BASE).expect("inside")
    }

    fn serve(&mut self, read: &ReadRequest) {
        let from = Self::at(read.source);
        let bytes = self.memory[from..from + read.bytes as usize].to_vec();
        self.stream.answer(read, 0, &bytes);
    }

    /// The next response, or `None` when the connection is over. Takes data and serves READs
    /// meanwhile.
    fn response(&mut self) -> Option<ResponseCapsule> {
        loop {
            match self.stream.next() {
                Arrival::End => return None,
                Arrival::Read(read) => self.serve(&read),
                Arrival::Write(to, bytes) => {
                    let at = Self::at(to);
                    self.memory[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                Arrival::Message(message) => {
                    let bytes: &[u8; RESPONSE_BYTES] = message[..].try_into().expect("a response");
                    let response = ResponseCapsule::from_wire(bytes, message.len(), self.depth);
                    return Some(response.expect("a response"));
                }
            }
        }
    }

    fn good(&mut self) -> ResponseCapsule {
        let response = self.response().expect("the connection lives");
        assert_eq!(response.status, Status::Ok);
        response
    }

    fn call(&mut self, opcode: Opcode, body: &[u8]) -> &[u8] {
        let mut command = self.command(opcode, Tag(0));
        command.buffer = Some(Self::lend(4096));
        command.in_capsule_bytes = u32::try_from(body.len()).expect("short");
        self.stream.send(&[&command.to_wire()[..], body].concat());
        self.good();
        &self.memory
    }
}

/// A host with a session, one volume and one I/O connection.
#[derive(Debug)]
pub(crate) struct Host {
    // The session lives as long as its admin connection.
    _admin: End,
    io: End,
    volume: VolumeHandle,
    block_size: BlockSize,
}

impl Host {
    /// Connects to the target at `address`, logs in under that name, opens the volume, connects one
    /// I/O connection and tests it.
    ///
    /// # Panics
    /// The target refuses.
    pub(crate) fn connect(address: &str, name: &str, volume: &str) -> Self {
        let mut admin =
            End::connect(address, ConnectionKind::Admin, Epoch(0), SessionId::default());
        admin.epoch = Epoch(1);
        let mut host = HostId::default();
        host.0[..name.len()].copy_from_slice(name.as_bytes());
        let host_name = Name::new(name).expect("a name");
        let login = LoginRequest { host, host_name, keep_alive_ms: 60_000, join: None };
        let login = LoginReply::from_wire(
            &admin.call(Opcode::Login, &login.to_wire())[..LoginReply::BYTES],
        );
        let login = login.expect("a reply");
        let open = OpenRequest {
            name: Name::new(volume).expect("a name"),
            // Sessions of a rogue follow faster than their leases end.
            mode: AccessMode::Shared,
            take_over: false,
            generation: Generation::FRESH,
        };
        let open = OpenReply::from_wire(
            &admin.call(Opcode::OpenVolume, &open.to_wire())[..OpenReply::BYTES],
        );
        let OpenReply { handle: volume, block_size, .. } = open.expect("a reply");
        let kind = ConnectionKind::Io { queue: 0 };
        let mut io = End::connect(address, kind, login.epoch, login.session);
        let tag = io.depth.connection_tag();
        let mut test = io.command(Opcode::SelfTest, tag);
        test.buffer = Some(End::lend(SELF_TEST_BYTES));
        io.stream.send(&test.to_wire());
        io.good();
        assert_eq!(io.memory[..SELF_TEST_BYTES], self_test_pattern(test.sequence));
        Self { _admin: admin, io, volume, block_size }
    }

    /// Begins to write these bytes to the beginning of the volume. Returns the target's READ of the
    /// bytes, which waits.
    ///
    /// # Panics
    /// The target sends something else.
    pub(crate) fn begin_write(&mut self, bytes: &[u8]) -> ReadRequest {
        self.io.memory[..bytes.len()].copy_from_slice(bytes);
        self.transfer(Opcode::Write, bytes.len());
        let Arrival::Read(read) = self.io.stream.next() else { panic!("no READ") };
        assert_eq!(read.bytes as usize, bytes.len());
        read
    }

    /// Sends a part of the data of a READ. The last part completes the READ.
    pub(crate) fn answer(&mut self, read: &ReadRequest, part: std::ops::Range<usize>) {
        let bytes = self.io.memory[part.clone()].to_vec();
        self.io.stream.answer(read, part.start, &bytes);
    }

    /// Waits for the success of the command.
    ///
    /// # Panics
    /// The command fails, or the connection is over.
    pub(crate) fn finish(&mut self) {
        self.io.good();
    }

    /// Reads from the beginning of the volume.
    ///
    /// # Panics
    /// The read fails.
    pub(crate) fn read(&mut self, bytes: usize) -> Vec<u8> {
        self.io.memory.fill(0xdd);
        self.transfer(Opcode::Read, bytes);
        self.io.good();
        self.io.memory[..bytes].to_vec()
    }

    /// Writes into memory of the target, and returns whether the connection survived.
    pub(crate) fn survives_write(&mut self, to: Place, bytes: &[u8]) -> bool {
        self.io.stream.write(to, bytes);
        // The target answers this only if it accepted the WRITE.
        let tag = self.io.depth.connection_tag();
        let beat = self.io.command(Opcode::KeepAlive, tag);
        self.io.stream.send(&beat.to_wire());
        self.io.response().is_some()
    }

    fn transfer(&mut self, opcode: Opcode, bytes: usize) {
        let mut command = self.io.command(opcode, Tag(1));
        command.volume = self.volume;
        command.lba = Lba(0);
        command.count = BlockCount(bytes as u64 / u64::from(self.block_size.bytes()));
        command.buffer = Some(End::lend(bytes));
        self.io.stream.send(&command.to_wire());
    }
}
