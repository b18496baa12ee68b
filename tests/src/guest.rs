//! [`Guest`]: the front end of a virtual machine and its guest, driven by hand: it speaks
//! vhost-user and fills rings of virtio-blk. A test can make it send any message.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rblk_fabric::Region;

use crate::program::{DEADLINE, Ended, program, run, wait_for};

/// Bytes of the guest's memory.
pub const MEMORY: u64 = 4 << 20;
/// Where the guest has its memory, and where its front end has it.
pub const GUEST: u64 = 1 << 32;
const USER: u64 = 0x7f00_0000_0000;
/// Where the data of requests may be; rings are before that.
pub const DATA: u64 = 1 << 20;
/// Requests of a ring.
pub const RING: u16 = 16;
/// Bytes between two rings: 16 descriptors, and both rings; then the heads of requests.
const RING_BYTES: u64 = 64 << 10;
const AVAILABLE: u64 = 4 << 10;
const USED: u64 = 8 << 10;
/// Heads and statuses of requests, by their number in the ring.
const HEADS: u64 = 16 << 10;
/// Indirect tables.
const TABLES: u64 = 32 << 10;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const VERSION_1: u64 = 1 << 32;
const PROTOCOL: u64 = 1 << 30;
/// INDIRECT_DESC.
const TABLES_BIT: u64 = 1 << 28;
/// VIRTIO_BLK_F_FLUSH.
pub const FLUSH: u64 = 1 << 9;
const MQ: u64 = 1 << 12;

/// A process that serves a volume to guests.
#[derive(Debug)]
pub struct Served {
    child: Child,
    /// Its socket.
    pub socket: PathBuf,
    log: PathBuf,
    name: String,
}

impl Served {
    /// Starts `rblk-initiator vhost` for a volume, with further arguments, and waits until guests
    /// may connect.
    ///
    /// # Panics
    /// The program ends, or opens no socket.
    #[must_use]
    pub fn start(dir: &Path, address: &str, volume: &str, args: &[&str]) -> Self {
        let (socket, log) = (dir.join("guest.sock"), dir.join("vhost.log"));
        let file = File::options().create(true).append(true).open(&log).expect("a log");
        // Mount names are unique on a host, and several tests run at once.
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("test-{}-{number}", std::process::id());
        let mut child = Command::new(program("rblk-initiator"))
            .args(["vhost", "--foreground", "--name", &name, address, volume, "--socket"])
            .arg(&socket)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .expect("rblk-initiator");
        let mut said = child.stdout.take().expect("its output");
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut line = [0; 1];
            let _ = sender.send(said.read_exact(&mut line));
        });
        let ready = receiver.recv_timeout(DEADLINE);
        let served = Self { child, socket, log, name };
        assert!(matches!(ready, Ok(Ok(()))), "it does not serve:\n{}", served.log());
        served
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The first line of its log with these words. Waits for it: another thread writes the log.
    ///
    /// # Panics
    /// It does not come.
    pub fn line_with(&self, words: &str) -> String {
        let find = |line: &&str| line.contains(words);
        wait_for(words, || self.log().lines().find(find).map(str::to_owned))
    }

    /// Acknowledged writes of its guest that no FLUSH covered. Needs root, which lists the mount.
    ///
    /// # Panics
    /// The status lacks that number.
    #[must_use]
    pub fn unflushed_writes(&self) -> u64 {
        let status = self.status();
        status["unflushed_writes"].as_u64().unwrap_or_else(|| panic!("{status}"))
    }

    /// The `status` of its mount, in JSON. Needs root, which lists the mount.
    ///
    /// # Panics
    /// The command fails.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        let mut status = Command::new(program("rblk-initiator"));
        let ended = run(status.args(["status", &self.name, "--output", "json"]));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.stdout).expect("JSON")
    }

    /// The name of its mount.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM and waits for the end. Returns the exit code.
    ///
    /// # Panics
    /// The process does not end.
    pub fn terminate(&mut self) -> Option<i32> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).expect("an id"));
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let child = &mut self.child;
        wait_for("the end", || child.try_wait().ok().flatten()).code()
    }

    /// Ends the process by `umount --force` and waits. Returns the exit code. Needs root, which
    /// lists the mount.
    ///
    /// # Panics
    /// The command fails, or the process does not end.
    pub fn unmount_by_force(&mut self) -> Option<i32> {
        let ended = unmount(&self.name);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let child = &mut self.child;
        wait_for("the end", || child.try_wait().ok().flatten()).code()
    }

    /// The exit code, if the process has ended by itself; `Some(None)`, if a signal ended it.
    ///
    /// # Panics
    /// The system cannot tell.
    pub fn exit_code(&mut self) -> Option<Option<i32>> {
        self.child.try_wait().expect("its state").map(|status| status.code())
    }

    /// The thread of that name.
    ///
    /// # Panics
    /// No thread has that name.
    #[must_use]
    pub fn thread(&self, name: &str) -> nix::unistd::Pid {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("threads");
        let is_it = |task: &std::fs::DirEntry| {
            let found = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            found.trim_end() == name
        };
        let found = tasks.flatten().find(is_it).unwrap_or_else(|| panic!("no thread {name}"));
        let number = found.file_name().to_string_lossy().parse().expect("a number");
        nix::unistd::Pid::from_raw(number)
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Whether the process still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

/// `rblk-initiator umount --force` of a mount.
///
/// # Panics
/// The command does not end.
#[must_use]
pub fn unmount(name: &str) -> Ended {
    run(Command::new(program("rblk-initiator")).args(["umount", "--force", name]))
}

impl Drop for Served {
    fn drop(&mut self) {
        self.kill();
        // A killed process leaves these files in the directory of mounts.
        for end in ["sock", "lock"] {
            let _ = std::fs::remove_file(format!("/run/rblk/mounts/{}.{end}", self.name));
        }
        if std::thread::panicking() {
            eprintln!("log of rblk-initiator vhost:\n{}", self.log());
        }
    }
}

/// The type of a request to the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// VIRTIO_BLK_T_IN.
    Read = 0,
    /// VIRTIO_BLK_T_OUT.
    Write = 1,
    /// VIRTIO_BLK_T_FLUSH.
    Flush = 4,
    /// VIRTIO_BLK_T_GET_ID.
    Id = 8,
    /// VIRTIO_BLK_T_DISCARD.
    Discard = 11,
    /// VIRTIO_BLK_T_WRITE_ZEROES.
    WriteZeroes = 13,
}

/// A descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// Where the guest has it.
    pub at: u64,
    /// Bytes.
    pub len: u32,
    /// Its flags: `NEXT`, `WRITE`, indirect.
    pub flags: u16,
    /// The index of the next descriptor, if the flags name one.
    pub next: u16,
}

#[derive(Debug)]
struct Ring {
    kick: EventFd,
    call: EventFd,
    offered: u16,
    seen: u16,
}

/// A guest, and its front end.
#[derive(Debug)]
pub struct Guest {
    stream: UnixStream,
    back: UnixStream,
    /// Its memory.
    pub memory: Arc<Region>,
    file: File,
    rings: Vec<Ring>,
}

/// Memory that can be shared.
///
/// # Panics
/// The kernel gives no memory.
#[must_use]
pub fn shareable(len: u64) -> File {
    let file = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).expect("memory"));
    file.set_len(len).expect("memory");
    file
}

impl Guest {
    /// Connects, and starts `rings` rings.
    ///
    /// # Panics
    /// The other end refuses.
    #[must_use]
    pub fn connect(served: &Served, rings: u16) -> Self {
        Self::connect_with(served, rings, FLUSH)
    }

    /// Connects with these further features.
    ///
    /// # Panics
    /// As for [`Self::connect`].
    #[must_use]
    pub fn connect_with(served: &Served, rings: u16, features: u64) -> Self {
        let mut guest = Self::greet(served, features);
        let file = guest.file.try_clone().expect("its memory");
        guest.share(&[(GUEST, MEMORY, USER, 0)], &[&file]);
        for ring in 0..rings {
            guest.start(ring, 0);
        }
        guest
    }

    /// Connects, and only negotiates features.
    ///
    /// # Panics
    /// As for [`Self::connect`].
    #[must_use]
    pub fn greet(served: &Served, features: u64) -> Self {
        let stream = UnixStream::connect(&served.socket).expect("the socket");
        stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
        stream.set_write_timeout(Some(DEADLINE)).expect("a deadline");
        let (back, theirs) = UnixStream::pair().expect("a channel");
        back.set_read_timeout(Some(DEADLINE)).expect("a deadline");
        let file = shareable(MEMORY);
        let memory = Region::map_file(&file).expect("its memory");
        let mut guest = Self { stream, back, memory, file, rings: Vec::new() };
        let offered = guest.question(1, &[]);
        let offered = u64::from_le_bytes(offered.try_into().expect("abilities"));
        assert_ne!(offered & PROTOCOL, 0);
        let protocol = guest.question(15, &[]);
        guest.tell(16, &protocol, &[]);
        guest.ask(3, &[], &[]).expect("an owner");
        let wanted = (VERSION_1 | PROTOCOL | TABLES_BIT | MQ | features) & offered;
        guest.ask(2, &wanted.to_le_bytes(), &[]).expect("abilities");
        guest.ask(21, &[], &[theirs.as_raw_fd()]).expect("a channel");
        guest
    }

    /// Connects again, as QEMU does when the program is back: the guest goes on with its memory,
    /// and each of its rings with the first request that has no answer.
    ///
    /// # Panics
    /// The other end refuses.
    pub fn connect_again(&mut self, served: &Served) {
        let Self { stream, back, .. } = Self::greet(served, FLUSH);
        (self.stream, self.back) = (stream, back);
        let file = self.file.try_clone().expect("its memory");
        self.share(&[Self::own_part()], &[&file]);
        for ring in (0..).take(self.rings.len()) {
            let Ring { offered, seen, .. } = self.rings[usize::from(ring)];
            self.start(ring, seen.wrapping_add(self.taken(ring)));
            let state = &mut self.rings[usize::from(ring)];
            (state.offered, state.seen) = (offered, seen);
        }
    }

    /// Sends a message without an answer.
    ///
    /// # Panics
    /// The other end has hung up.
    pub fn tell(&mut self, request: u32, body: &[u8], files: &[RawFd]) {
        self.send(request, 1, body, files).expect("to send");
    }

    /// Sends bytes that may be no message.
    ///
    /// # Errors
    /// The other end hung up.
    pub fn send_raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    fn send(
        &mut self,
        request: u32,
        flags: u32,
        body: &[u8],
        files: &[RawFd],
    ) -> std::io::Result<()> {
        let len = u32::try_from(body.len()).expect("a short body");
        let mut bytes = [request, flags, len].map(u32::to_le_bytes).concat();
        bytes.extend(body);
        let rights = [ControlMessage::ScmRights(files)];
        let rights = if files.is_empty() { &[][..] } else { &rights[..] };
        let io = [IoSlice::new(&bytes)];
        let sent =
            sendmsg::<()>(self.stream.as_raw_fd(), &io, rights, MsgFlags::MSG_NOSIGNAL, None)?;
        assert_eq!(sent, bytes.len());
        Ok(())
    }

    fn answer(&mut self) -> std::io::Result<Vec<u8>> {
        let mut header = [0; 12];
        self.stream.read_exact(&mut header)?;
        let len = u32::from_le_bytes(header[8..].try_into().expect("4 bytes"));
        let mut body = vec![0; len as usize];
        self.stream.read_exact(&mut body)?;
        Ok(body)
    }

    /// Asks a question that has an answer.
    ///
    /// # Panics
    /// No answer arrives.
    #[must_use]
    pub fn question(&mut self, request: u32, body: &[u8]) -> Vec<u8> {
        self.send(request, 1, body, &[]).expect("to ask");
        self.answer().expect("an answer")
    }

    /// Asks for an action. Returns whether the other end did it.
    ///
    /// # Errors
    /// The other end hung up.
    pub fn ask(&mut self, request: u32, body: &[u8], files: &[RawFd]) -> std::io::Result<bool> {
        self.send(request, 1 | 8, body, files)?;
        Ok(self.answer()? == [0; 8])
    }

    /// Shares memory: guest's address, length, front end's address, offset in the file.
    ///
    /// # Panics
    /// The other end does not take it.
    pub fn share(&mut self, parts: &[(u64, u64, u64, u64)], files: &[&File]) {
        assert!(self.try_share(parts, files).expect("an answer"), "the memory is refused");
    }

    /// Shares memory like [`Self::share`]. Returns whether the other end took it.
    ///
    /// # Errors
    /// The other end hung up.
    pub fn try_share(
        &mut self,
        parts: &[(u64, u64, u64, u64)],
        files: &[&File],
    ) -> std::io::Result<bool> {
        let count = u32::try_from(parts.len()).expect("few");
        let mut body = [count, 0].map(u32::to_le_bytes).concat();
        for (guest, len, user, offset) in parts {
            body.extend([guest, len, user, offset].map(|field| field.to_le_bytes()).concat());
        }
        let files: Vec<_> = files.iter().map(|file| file.as_raw_fd()).collect();
        self.ask(5, &body, &files)
    }

    /// The file of its memory.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The memory as it was shared at first.
    #[must_use]
    pub fn own_part() -> (u64, u64, u64, u64) {
        (GUEST, MEMORY, USER, 0)
    }

    /// The event by which a ring calls its guest.
    #[must_use]
    pub fn call_event(&self, ring: u16) -> &EventFd {
        &self.rings[usize::from(ring)].call
    }

    /// Describes and starts a ring.
    ///
    /// # Panics
    /// The other end does not start it.
    pub fn start(&mut self, ring: u16, base: u16) {
        // Before a request may be done.
        let mut done = [0; 2];
        self.memory.read(Self::at(ring, USED + 2), &mut done);
        let make = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC).expect("an event");
        let (kick, call) = (make(), make());
        let index = u32::from(ring);
        let state = |number: u32| [index, number].map(u32::to_le_bytes).concat();
        let at = USER + u64::from(ring) * RING_BYTES;
        let mut places = [index, 0].map(u32::to_le_bytes).concat();
        places.extend([at, at + USED, at + AVAILABLE, 0].map(u64::to_le_bytes).concat());
        let event = u64::from(ring).to_le_bytes();
        let kick_fd = [kick.as_fd().as_raw_fd()];
        let call_fd = [call.as_fd().as_raw_fd()];
        for (request, body, files) in [
            (8, state(RING.into()), &[][..]),
            (10, state(base.into()), &[]),
            (9, places, &[]),
            (13, event.to_vec(), &call_fd),
            (12, event.to_vec(), &kick_fd),
            (18, state(1), &[]),
        ] {
            assert!(self.ask(request, &body, files).expect("an answer"), "request {request}");
        }
        let started = Ring { kick, call, offered: base, seen: u16::from_le_bytes(done) };
        match self.rings.get_mut(usize::from(ring)) {
            Some(old) => *old = started,
            None => self.rings.push(started),
        }
    }

    /// Stops a ring. Returns the index of its next request.
    ///
    /// # Panics
    /// No answer arrives.
    pub fn stop(&mut self, ring: u16) -> u16 {
        let answer = self.question(11, &[u32::from(ring), 0].map(u32::to_le_bytes).concat());
        u16::from_le_bytes(answer[4..6].try_into().expect("a number"))
    }

    fn at(ring: u16, within: u64) -> usize {
        usize::try_from(u64::from(ring) * RING_BYTES + within).expect("an address")
    }

    /// Writes a descriptor of a ring.
    pub fn describe(&self, ring: u16, index: u16, descriptor: Descriptor) {
        self.put(Self::at(ring, u64::from(index) * 16), descriptor);
    }

    fn put(&self, place: usize, descriptor: Descriptor) {
        let Descriptor { at, len, flags, next } = descriptor;
        let mut bytes = at.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([flags, next].map(u16::to_le_bytes).concat());
        self.memory.write(place, &bytes);
    }

    /// Offers the chain that begins at a descriptor, and kicks.
    pub fn offer(&mut self, ring: u16, head: u16) {
        let state = &mut self.rings[usize::from(ring)];
        let slot = u64::from(state.offered % RING);
        self.memory.write(Self::at(ring, AVAILABLE + 4 + slot * 2), &head.to_le_bytes());
        state.offered = state.offered.wrapping_add(1);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.memory.write(Self::at(ring, AVAILABLE + 2), &state.offered.to_le_bytes());
        std::sync::atomic::fence(Ordering::SeqCst);
        self.kick(ring);
    }

    /// Sets the available index without a change of the ring's contents, and kicks.
    pub fn claim_to_offer(&self, ring: u16, index: u16) {
        self.memory.write(Self::at(ring, AVAILABLE + 2), &index.to_le_bytes());
        self.kick(ring);
    }

    /// Kicks.
    pub fn kick(&self, ring: u16) {
        let _ = self.rings[usize::from(ring)].kick.write(1);
    }

    /// Offers a request under a number below [`RING`], with its data in these pieces of the guest's
    /// memory, by an indirect table.
    pub fn request(&mut self, ring: u16, number: u16, ask: Ask, sector: u64, data: &[(u64, u32)]) {
        let head = Self::at(ring, HEADS + u64::from(number) * 32);
        let mut bytes = [ask as u32, 0].map(u32::to_le_bytes).concat();
        bytes.extend(sector.to_le_bytes());
        bytes.push(0xff);
        self.memory.write(head, &bytes);
        let table = Self::at(ring, TABLES + u64::from(number) * 1024);
        let guest = |place: usize| GUEST + place as u64;
        let data_flags = if matches!(ask, Ask::Read | Ask::Id) { WRITE } else { 0 };
        let count = u16::try_from(data.len()).expect("few pieces");
        let mut pieces = vec![(guest(head), 16, 0)];
        pieces.extend(data.iter().map(|(at, len)| (*at, *len, data_flags)));
        pieces.push((guest(head) + 16, 1, WRITE));
        for (index, (at, len, flags)) in (0u16..).zip(pieces) {
            let (flags, next) = if index <= count { (flags | NEXT, index + 1) } else { (flags, 0) };
            self.put(table + usize::from(index) * 16, Descriptor { at, len, flags, next });
        }
        let len = (u32::from(count) + 2) * 16;
        let whole = Descriptor { at: guest(table), len, flags: INDIRECT, next: 0 };
        self.describe(ring, number, whole);
        self.offer(ring, number);
    }

    /// The next request that is done: its number and its status. `None`, if none is for now.
    pub fn done(&mut self, ring: u16) -> Option<(u16, u8)> {
        let state = &mut self.rings[usize::from(ring)];
        let mut index = [0; 2];
        self.memory.read(Self::at(ring, USED + 2), &mut index);
        if u16::from_le_bytes(index) == state.seen {
            return None;
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        let mut entry = [0; 8];
        let slot = u64::from(state.seen % RING);
        self.memory.read(Self::at(ring, USED + 4 + slot * 8), &mut entry);
        state.seen = state.seen.wrapping_add(1);
        let number = u16::from_le_bytes([entry[0], entry[1]]);
        let mut status = [0];
        self.memory.read(Self::at(ring, HEADS + u64::from(number) * 32 + 16), &mut status);
        Some((number, status[0]))
    }

    /// Waits for the next completed request, asleep until the guest is called.
    ///
    /// # Panics
    /// No request completes.
    pub fn wait(&mut self, ring: u16) -> (u16, u8) {
        let deadline = std::time::Instant::now() + DEADLINE;
        loop {
            if let Some(done) = self.done(ring) {
                return done;
            }
            assert!(std::time::Instant::now() < deadline, "ring {ring}: nothing is done");
            self.called(ring, Duration::from_millis(500));
        }
    }

    /// Sleeps until the guest is called, at most for `longest`. Returns whether it was called.
    pub fn called(&self, ring: u16, longest: Duration) -> bool {
        let call = &self.rings[usize::from(ring)].call;
        let timeout = PollTimeout::try_from(longest).expect("a short time");
        let called = poll(&mut [PollFd::new(call.as_fd(), PollFlags::POLLIN)], timeout) == Ok(1);
        if called {
            let _ = call.read();
        }
        called
    }

    /// Runs one request to its end. Returns its status.
    pub fn one(&mut self, ring: u16, ask: Ask, sector: u64, data: &[(u64, u32)]) -> u8 {
        self.request(ring, 0, ask, sector, data);
        let (number, status) = self.wait(ring);
        assert_eq!(number, 0);
        status
    }

    /// Writes to the guest's memory.
    pub fn fill(&self, guest: u64, bytes: &[u8]) {
        self.memory.write(usize::try_from(guest - GUEST).expect("an address"), bytes);
    }

    /// Reads the guest's memory.
    #[must_use]
    pub fn bytes(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(usize::try_from(guest - GUEST).expect("an address"), &mut bytes);
        bytes
    }

    /// The configuration of the disk.
    #[must_use]
    pub fn config(&mut self) -> Vec<u8> {
        let mut body = [0u32, 60, 0].map(u32::to_le_bytes).concat();
        body.extend([0; 60]);
        self.question(24, &body)[12..].to_vec()
    }

    /// Waits until the other end says that the configuration has changed.
    ///
    /// # Panics
    /// No message arrives.
    pub fn wait_for_change(&mut self) {
        let mut header = [0; 12];
        self.back.read_exact(&mut header).expect("news");
        assert_eq!(u32::from_le_bytes(header[..4].try_into().expect("4 bytes")), 2);
    }

    /// Whether the other end has hung up, after the messages so far.
    #[must_use]
    pub fn is_hung_up(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 64]), Ok(0) | Err(_))
    }

    /// Switches to memory from a file, and copies the contents. Returns the old memory.
    ///
    /// # Panics
    /// The file cannot be mapped.
    pub fn replace_memory(&mut self, file: &File) -> Arc<Region> {
        let memory = Region::map_file(file).expect("memory");
        std::mem::replace(&mut self.memory, memory)
    }

    /// Makes a ring new, as a guest does that resets its disk.
    pub fn reset(&mut self, ring: u16) {
        for part in [AVAILABLE, USED] {
            self.memory.zero(Self::at(ring, part), 256);
        }
    }

    /// How many completed requests of a ring the guest has not seen.
    #[must_use]
    pub fn taken(&self, ring: u16) -> u16 {
        let mut index = [0; 2];
        self.memory.read(Self::at(ring, USED + 2), &mut index);
        u16::from_le_bytes(index).wrapping_sub(self.rings[usize::from(ring)].seen)
    }
}
