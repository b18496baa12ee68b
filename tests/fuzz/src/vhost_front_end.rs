//! The disk of a guest, from a hostile front end: sequences of messages with their descriptors, in
//! bursts and with pauses, while the threads of the rings are slow. The disk survives each
//! execution, and serves a good front end after it.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
use rblk_config::ByteSize;
use rblk_initiator::FuzzedDisk;

use crate::Input;

const RINGS: u16 = 3;
const STEPS: u32 = 48;
const MEMORY: u64 = 1 << 20;
const GUEST: u64 = 1 << 32;
const USER: u64 = 0x7f00_0000_0000;
/// Bytes of the rings of a guest: descriptors, the available ring, the used ring.
const RING_BYTES: u64 = 16 << 10;
/// A longer wait is a hang.
const PATIENCE: Duration = Duration::from_secs(15);

const BURSTS: [u32; 8] = [1, 1, 1, 1, 2, 8, 70, 300];
const REQUESTS: [u8; 22] =
    [1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16, 17, 18, 18, 21, 24, 25, 77];

struct Bed {
    disk: FuzzedDisk,
    memories: [File; 2],
    small: File,
    // An eventfd without O_NONBLOCK with a full counter: a write to it blocks.
    full: EventFd,
    pipe: (OwnedFd, OwnedFd),
    _dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("guest.sock");
        let disk = FuzzedDisk::start(&socket, RINGS, ByteSize(2 * MEMORY)).expect("a disk");
        let memory = |len| {
            let file = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).expect("memory"));
            file.set_len(len).expect("memory");
            file
        };
        let full = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).expect("an event");
        full.write(u64::MAX - 1).expect("a full one");
        let (memories, small) = ([memory(MEMORY), memory(MEMORY)], memory(4096));
        let pipe = nix::unistd::pipe().expect("a pipe");
        Self { disk, memories, small, full, pipe, _dir: dir }
    }

    /// A descriptor of a kind.
    fn descriptor(&self, kind: u8, event: &EventFd) -> RawFd {
        match kind {
            0 => self.memories[0].as_raw_fd(),
            1 => self.memories[1].as_raw_fd(),
            2 => self.small.as_raw_fd(),
            3 => self.full.as_fd().as_raw_fd(),
            4 => self.pipe.0.as_raw_fd(),
            5 => self.pipe.1.as_raw_fd(),
            _ => event.as_fd().as_raw_fd(),
        }
    }
}

/// A front end that is connected.
struct FrontEnd {
    stream: UnixStream,
    heard: usize,
}

impl FrontEnd {
    fn connect(bed: &Bed) -> Self {
        let stream = UnixStream::connect(bed.disk.socket()).expect("the socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a deadline");
        stream.set_write_timeout(Some(PATIENCE)).expect("a deadline");
        Self { stream, heard: 0 }
    }

    /// Sends a message. Returns whether the other end is still there.
    fn send(&mut self, request: u32, flags: u32, body: &[u8], files: &[RawFd]) -> bool {
        let len = u32::try_from(body.len()).expect("a short body");
        let bytes = [[request, flags, len].map(u32::to_le_bytes).concat(), body.to_vec()].concat();
        let rights = [ControlMessage::ScmRights(files)];
        let rights = if files.is_empty() { &[][..] } else { &rights[..] };
        let io = [IoSlice::new(&bytes)];
        let sent =
            sendmsg::<()>(self.stream.as_raw_fd(), &io, rights, MsgFlags::MSG_NOSIGNAL, None);
        match sent {
            Ok(sent) => sent == bytes.len(),
            Err(nix::errno::Errno::EAGAIN) => panic!("messages are taken no longer"),
            Err(_) => false,
        }
    }

    /// Takes the answers that have arrived.
    fn take_answers(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(1..) = recv(self.stream.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT)
            .inspect(|received| self.heard += received)
        {}
    }

    /// Hangs up, and waits until the other end has, too. Returns whether it sent any answer.
    fn leave(mut self) -> bool {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return self.heard > 0,
                Ok(received) => self.heard += received,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    panic!("the disk is wedged")
                }
                Err(_) => return self.heard > 0,
            }
        }
    }
}

/// Byte 0: how slow the rings are, and whether they are started. Then the acts of the front end.
pub fn run(data: &[u8]) -> bool {
    static BED: OnceLock<Mutex<Bed>> = OnceLock::new();
    let bed = BED.get_or_init(|| Mutex::new(Bed::new()));
    let mut bed = bed.lock().expect("one at a time");
    let mut input = Input::new(data);
    let kind = input.u8();
    FuzzedDisk::set_pace(u32::from(kind & 7) * 40);
    let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).expect("an event");
    for memory in &bed.memories {
        memory
            .write_all_at(&vec![0; usize::try_from(RING_BYTES).expect("a size")], 0)
            .expect("memory");
    }
    let mut front_end = FrontEnd::connect(&bed);
    let mut is_there = kind & 8 == 0 || begin(&mut front_end, &bed, &event, kind);
    for _ in 0..STEPS {
        if input.is_empty() || !is_there {
            break;
        }
        is_there = act(&mut front_end, &bed, &event, &mut input);
    }
    FuzzedDisk::set_pace(0);
    let answered = front_end.leave();
    bed.disk.must_be_served();
    let mut next = FrontEnd::connect(&bed);
    assert!(next.send(1, 1, &[], &[]));
    next.stream.read_exact(&mut [0; 20]).expect("an answer to the next front end");
    assert!(!next.leave());
    answered
}

/// Negotiates features, shares memory, and starts rings.
fn begin(front_end: &mut FrontEnd, bed: &Bed, event: &EventFd, kind: u8) -> bool {
    let mut is_there = front_end.send(2, 1, &(1u64 << 32 | 1 << 30).to_le_bytes(), &[])
        && front_end.send(16, 1, &0x229u64.to_le_bytes(), &[])
        && front_end.send(5, 1, &table(&[(0, MEMORY)]), &[bed.memories[0].as_raw_fd()]);
    let call = if kind & 0x10 != 0 { &bed.full } else { event };
    for ring in 0..u32::from(kind >> 5) % u32::from(RINGS + 1) {
        let number = u64::from(ring).to_le_bytes();
        is_there = is_there
            && front_end.send(8, 1, &state(ring, 16), &[])
            && front_end.send(10, 1, &state(ring, 0), &[])
            && front_end.send(9, 1, &places(ring, 0), &[])
            && front_end.send(13, 1, &number, &[call.as_fd().as_raw_fd()])
            && front_end.send(12, 1, &number, &[event.as_fd().as_raw_fd()])
            && front_end.send(18, 1, &state(ring, 1), &[]);
    }
    is_there
}

fn state(ring: u32, number: u32) -> Vec<u8> {
    [ring, number].map(u32::to_le_bytes).concat()
}

fn places(ring: u32, shift: u64) -> Vec<u8> {
    let at = USER + u64::from(ring) * RING_BYTES / 4 + shift;
    let mut body = state(ring, 0);
    body.extend([at, at + 0x800, at + 0x400, 0].map(u64::to_le_bytes).concat());
    body
}

fn table(parts: &[(u64, u64)]) -> Vec<u8> {
    let mut body = state(u32::try_from(parts.len()).expect("few"), 0);
    for (offset, len) in parts {
        let fields = [GUEST + offset, *len, USER + offset, *offset];
        body.extend(fields.map(u64::to_le_bytes).concat());
    }
    body
}

/// One act of a front end. Returns whether the other end is still there.
fn act(front_end: &mut FrontEnd, bed: &Bed, event: &EventFd, input: &mut Input<'_>) -> bool {
    match input.below(8) {
        0..=3 => talk(front_end, bed, event, input),
        4 => {
            std::thread::sleep(Duration::from_micros(u64::from(input.u8()) * 8));
            true
        }
        5 => {
            // The guest writes to its rings, and kicks.
            let place = u64::from(input.u16()) % RING_BYTES;
            let bytes = input.bytes(24);
            let memory = &bed.memories[usize::from(input.below(2))];
            memory.write_all_at(bytes, place).expect("memory");
            let _ = event.write(1);
            true
        }
        6 => {
            // A request of one or more descriptors, in the next free place of a ring.
            let ring = u64::from(input.below(3)) * RING_BYTES / 4;
            let memory = &bed.memories[0];
            for index in 0..3u64 {
                let at = GUEST + 0x8000 + u64::from(input.u16());
                let (len, flags) = (u32::from(input.u16()), u16::from(input.below(8)));
                let next = u16::from(input.below(16));
                let mut bytes = at.to_le_bytes().to_vec();
                bytes.extend(len.to_le_bytes());
                bytes.extend([flags, next].map(u16::to_le_bytes).concat());
                memory.write_all_at(&bytes, ring + index * 16).expect("memory");
            }
            let head = [u16::from(input.below(16)); 16].map(u16::to_le_bytes).concat();
            memory.write_all_at(&head, ring + 0x404).expect("memory");
            memory.write_all_at(&[input.u8(), 0], ring + 0x402).expect("memory");
            let _ = event.write(1);
            true
        }
        _ => {
            let sent = front_end.stream.write_all(input.bytes(40));
            front_end.take_answers();
            sent.is_ok()
        }
    }
}

/// A message, or a burst of equal ones.
fn talk(front_end: &mut FrontEnd, bed: &Bed, event: &EventFd, input: &mut Input<'_>) -> bool {
    let request = u32::from(input.pick(&REQUESTS).unwrap_or(1));
    let how = input.u8();
    let count = BURSTS[usize::from(how & 7)];
    // Each memory table and each stop of a burst takes full effect, so a few are enough.
    let count = if matches!(request, 5 | 11) { count.min(8) } else { count };
    let flags = if how & 8 != 0 { 1 | 8 } else { 1 };
    let ring = u32::from(input.below(4));
    let number = u32::from(input.u8());
    let event_word = u64::from(ring) | if number & 0x40 != 0 { 0x100 } else { 0 };
    let mut body = match request {
        2 => (u64::from(number) << 28).to_le_bytes().to_vec(),
        16 => 0x229u64.to_le_bytes().to_vec(),
        5 if number & 1 != 0 => table(&[(0, MEMORY / 2), (MEMORY / 2, MEMORY / 2)]),
        5 => table(&[(0, MEMORY)]),
        8 => state(ring, 1 << (number % 12)),
        9 => places(ring, u64::from(number & 3) * 8),
        10 | 11 => state(ring, number),
        12..=14 => event_word.to_le_bytes().to_vec(),
        18 => state(ring, number & 1),
        24 => [vec![0; 4], number.to_le_bytes().to_vec(), vec![0; 4 + number as usize]].concat(),
        _ => Vec::new(),
    };
    if how & 0x40 != 0 {
        let bytes = input.bytes(16);
        let at = usize::from(input.u8()) % (body.len() + 1);
        let end = (at + bytes.len()).min(body.len());
        body.splice(at..end, bytes.iter().copied());
    }
    let mut files = Vec::new();
    for _ in 0..if how & 0x80 != 0 { input.below(12) } else { files_of(request, number) } {
        let kind = if how & 0x10 != 0 { input.below(8) } else { kind_of(request) };
        files.push(bed.descriptor(kind, event));
    }
    for _ in 0..count {
        if !front_end.send(request, flags, &body, &files) {
            return false;
        }
        front_end.take_answers();
    }
    true
}

/// How many descriptors come with a request.
fn files_of(request: u32, number: u32) -> u8 {
    match request {
        5 if number & 1 != 0 => 2,
        5 | 12..=14 | 21 => u8::from(number & 0x40 == 0),
        _ => 0,
    }
}

fn kind_of(request: u32) -> u8 {
    if request == 5 { 0 } else { 7 }
}

/// Front ends that start rings of any pace, and then send every message once, and in bursts.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for kind in [0x00, 0x08, 0x28, 0x4b, 0x69, 0x7f] {
        for how in [0, 6, 7] {
            let mut seed = vec![kind];
            // Features, so that the disk reads the rest.
            seed.extend([0, 0, 0, 0, 0]);
            for request in [16, 13, 11, 12, 3, 10] {
                seed.extend([0, request, how, 0, 1]);
            }
            // A request, kicked.
            seed.extend([6, 0, 0, 0, 16, 0, 1, 1, 16, 0, 0, 2, 3, 2, 64, 0, 1, 0, 2, 0, 0, 1]);
            seed.extend([4, 40, 0, 8, how & 1, 0, 0]);
            seeds.push(seed);
        }
    }
    seeds
}
