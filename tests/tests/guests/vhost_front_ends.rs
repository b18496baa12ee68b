//! Front ends that send too much, too slowly, or block shared objects: the process that serves the
//! disk goes on, and ends when it is told to. The real program, and a front end and a guest driven
//! by hand.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rblk_tests::guest::{Ask, DATA, GUEST, Guest, MEMORY, RING, Served, shareable};
use rblk_tests::guest_disk::GuestDisk;
use rblk_tests::program::wait_for;

const OK: u8 = 0;
const ENABLE: u32 = 18;
const SET_CALL: u32 = 13;
const SET_ERROR: u32 = 14;
const SET_KICK: u32 = 12;
const SET_BACK_CHANNEL: u32 = 21;
/// A forced end must be faster than the wait of the command.
const SOON: Duration = Duration::from_secs(5);

/// Checks that the next front end is served, and that the process ends in good order.
fn goes_on_and_ends(mut disk: GuestDisk) {
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(read(&mut guest), OK);
    drop(guest);
    assert_eq!(disk.served.terminate(), Some(0), "{}", disk.served.log());
}

fn read(guest: &mut Guest) -> u8 {
    guest.one(0, Ask::Read, 0, &[(GUEST + DATA, 512)])
}

fn message(request: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap();
    [[request, 1, len].map(u32::to_le_bytes).concat(), body.to_vec()].concat()
}

fn event() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap()
}

/// A burst of orders, faster than a ring takes them: the last one counts.
#[test]
fn a_burst_of_enables_is_taken() {
    for orders in [200, 5000] {
        let disk = GuestDisk::new("1");
        let mut guest = Guest::connect(&disk.served, 1);
        for last in [1u32, 0, 1] {
            let mut burst = Vec::new();
            for order in 0..orders {
                let enable = if order + 1 == orders { last } else { order % 2 };
                burst.extend(message(ENABLE, &[0, enable].map(u32::to_le_bytes).concat()));
            }
            guest.send_raw(&burst).unwrap();
            // This answer follows the whole burst.
            assert_eq!(guest.config().len(), 60);
            guest.request(0, 0, Ask::Read, 0, &[(GUEST + DATA, 512)]);
            if last == 0 {
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(guest.done(0), None, "a ring that is not enabled");
                assert!(guest.ask(ENABLE, &[0, 1].map(u32::to_le_bytes).concat(), &[]).unwrap());
            }
            assert_eq!(guest.wait(0), (0, OK), "{orders} orders, the last one {last}");
        }
        drop(guest);
        goes_on_and_ends(disk);
    }
}

/// A burst of events, each with a descriptor: the newest one is used.
#[test]
fn a_burst_of_events_is_taken() {
    let disk = GuestDisk::new("2");
    let mut guest = Guest::connect(&disk.served, 2);
    for number in [200, 2000] {
        let ring = 0u64.to_le_bytes();
        let (old, new) = (event(), event());
        for order in 0..number {
            let call = if order + 1 == number { &new } else { &old };
            guest.tell(SET_CALL, &ring, &[call.as_fd().as_raw_fd()]);
            guest.tell(SET_ERROR, &ring, &[old.as_fd().as_raw_fd()]);
        }
        assert_eq!(guest.config().len(), 60);
        // An older event took the calls that the ring owed.
        let _ = fcntl(&old, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
        let _ = old.read();
        guest.request(0, 0, Ask::Read, 0, &[(GUEST + DATA, 512)]);
        assert!(new.read().unwrap() > 0, "the newest event is not used");
        assert_eq!(guest.wait(0), (0, OK));
    }
    // A running ring refuses any other kick.
    for _ in 0..200 {
        let kick = event();
        let body = 0u64.to_le_bytes();
        assert!(!guest.ask(SET_KICK, &body, &[kick.as_fd().as_raw_fd()]).unwrap());
    }
    assert_eq!(read(&mut guest), OK);
    disk.served.line_with("refused a request of the front end");
    let refusals = disk.served.log().matches("refused a request of the front end").count();
    assert!((1..20).contains(&refusals), "{refusals} lines");
    for _ in 0..100 {
        let base = guest.stop(0);
        guest.start(0, base);
    }
    assert_eq!(read(&mut guest), OK);
    drop(guest);
    goes_on_and_ends(disk);
}

/// A front end that shares other memory again and again, while requests are under way.
#[test]
fn a_burst_of_memories_is_taken() {
    let disk = GuestDisk::new("2");
    let mut guest = Guest::connect(&disk.served, 2);
    let (at, len, user, offset) = Guest::own_part();
    let table = |parts: &[[u64; 4]]| {
        let count = u32::try_from(parts.len()).unwrap();
        let mut body = [count, 0].map(u32::to_le_bytes).concat();
        body.extend(parts.iter().flatten().flat_map(|field| field.to_le_bytes()));
        body
    };
    // With and without a second file: each time the paths register all memory again.
    let own = [at, len, user, offset];
    let (small, large) = (table(&[own]), table(&[own, [at + len, len, user + len, 0]]));
    let (file, other) = (guest.file().as_raw_fd(), shareable(MEMORY));
    for round in 0..10 {
        guest.request(0, 0, Ask::Read, 0, &[(GUEST + DATA, 512)]);
        for _ in 0..10 {
            guest.tell(5, &large, &[file, other.as_raw_fd()]);
            guest.tell(5, &small, &[file]);
        }
        assert_eq!(guest.wait(0), (0, OK), "round {round}");
        assert_eq!(guest.config().len(), 60, "round {round}");
    }
    drop(guest);
    goes_on_and_ends(disk);
}

/// The guest never reads its call event.
#[test]
fn a_guest_that_never_takes_a_call_holds_up_no_ring() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    for number in 0..500u16 {
        guest.request(0, number % RING, Ask::Read, 0, &[(GUEST + DATA, 512)]);
        let done = wait_for("a request is done", || guest.done(0));
        assert_eq!(done, (number % RING, OK));
    }
    drop(guest);
    goes_on_and_ends(disk);
}

/// Makes a write to the event block, as the other side can: clears `O_NONBLOCK`, and fills the
/// counter.
fn fill(event: &EventFd) {
    fcntl(event, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    let _ = event.write(1);
    let count = event.read().unwrap();
    assert!(count > 0);
    event.write(u64::MAX - 1).unwrap();
}

/// A guest with a ring that has a full call event. Its requests complete all the same.
fn with_full_call(disk: &GuestDisk) -> Guest {
    let mut guest = Guest::connect(&disk.served, 2);
    fill(guest.call_event(0));
    for number in 0..4 {
        guest.request(0, number, Ask::Read, 0, &[(GUEST + DATA, 512)]);
        let done = wait_for("a request whose call waits is done", || guest.done(0));
        assert_eq!(done, (number, OK));
    }
    guest
}

#[test]
fn a_call_that_blocks_holds_up_no_ring() {
    let mut disk = GuestDisk::new("2");
    let guest = with_full_call(&disk);
    assert_eq!(disk.served.terminate(), Some(0), "{}", disk.served.log());
    drop(guest);
}

#[test]
#[ignore = "needs root: the mount is listed"]
fn as_root_a_call_that_blocks_holds_up_no_unmount() {
    let mut disk = GuestDisk::new("2");
    let guest = with_full_call(&disk);
    let begun = Instant::now();
    assert_eq!(disk.served.unmount_by_force(), Some(0), "{}", disk.served.log());
    assert!(begun.elapsed() < SOON);
    drop(guest);
}

/// An error event that blocks. The front end hears by it that a ring is broken.
#[test]
fn an_error_event_that_blocks_holds_up_no_ring() {
    let mut disk = GuestDisk::new("2");
    let mut guest = Guest::connect(&disk.served, 2);
    let error = event();
    let ring = 0u64.to_le_bytes();
    assert!(guest.ask(SET_ERROR, &ring, &[error.as_fd().as_raw_fd()]).unwrap());
    assert_eq!(read(&mut guest), OK);
    fill(&error);
    guest.claim_to_offer(0, RING + 2);
    disk.served.line_with("a ring of the guest is broken");
    assert_eq!(guest.one(1, Ask::Read, 0, &[(GUEST + DATA, 512)]), OK);
    assert_eq!(guest.stop(0), 1);
    assert_eq!(disk.served.terminate(), Some(0), "{}", disk.served.log());
}

/// A descriptor other than an eventfd could block a write or a read, so it is refused.
#[test]
fn a_descriptor_that_is_no_eventfd_is_refused() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    let (read_end, write_end) = nix::unistd::pipe().unwrap();
    let ring = 0u64.to_le_bytes();
    for request in [SET_CALL, SET_ERROR] {
        assert!(!guest.ask(request, &ring, &[write_end.as_raw_fd()]).unwrap());
    }
    assert_eq!(read(&mut guest), OK);
    guest.stop(0);
    assert!(!guest.ask(SET_KICK, &ring, &[read_end.as_raw_fd()]).unwrap());
    disk.served.line_with("an event that is no eventfd, but pipe:");
    drop(guest);
    goes_on_and_ends(disk);
}

/// A TCP socket that waits in close for a minute, since its peer takes nothing; and the peer.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 4096]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    let linger = libc::linger { l_onoff: 1, l_linger: 60 };
    setsockopt(&socket, sockopt::Linger, &linger).unwrap();
    (socket, peer)
}

/// No thread of the disk waits for the close of a refused descriptor.
#[test]
fn refused_descriptors_are_closed_without_a_wait() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    let begun = Instant::now();
    let mut peers = Vec::new();
    for request in [SET_CALL, SET_ERROR, SET_BACK_CHANNEL] {
        let (socket, peer) = lingering();
        peers.push(peer);
        let sent = socket.as_raw_fd();
        // The process takes the request after this end has closed the socket, and then has the last
        // descriptor of it.
        let process = Pid::from_raw(disk.served.pid().try_into().unwrap());
        kill(process, Signal::SIGSTOP).unwrap();
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(socket);
            kill(process, Signal::SIGCONT).unwrap();
        });
        let body = if request == SET_BACK_CHANNEL { &[][..] } else { &[0; 8] };
        assert!(!guest.ask(request, body, &[sent]).unwrap());
        closing.join().unwrap();
    }
    assert_eq!(read(&mut guest), OK);
    drop(guest);
    goes_on_and_ends(disk);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    drop(peers);
}

/// A body that comes a byte at a time: each byte in time, but the whole never.
fn drip(guest: &mut Guest) {
    let _ = guest.send_raw(&[2u32, 1, 4096].map(u32::to_le_bytes).concat());
    let _ = guest.send_raw(&[0]);
}

/// Continues a drip until the program hangs up.
fn drip_on(mut guest: Guest) -> JoinHandle<()> {
    drip(&mut guest);
    std::thread::spawn(move || {
        while guest.send_raw(&[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(200));
        }
    })
}

#[test]
fn a_message_that_drips_ends() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    drip(&mut guest);
    let begun = Instant::now();
    while guest.send_raw(&[0]).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(15), "it may drip for ever");
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(guest);
    goes_on_and_ends(disk);
}

#[test]
fn a_message_that_drips_holds_up_no_signal() {
    let mut disk = GuestDisk::new("1");
    let dripping = drip_on(Guest::connect(&disk.served, 1));
    let begun = Instant::now();
    assert_eq!(disk.served.terminate(), Some(0), "{}", disk.served.log());
    assert!(begun.elapsed() < SOON);
    dripping.join().unwrap();
}

#[test]
#[ignore = "needs root: the mount is listed"]
fn as_root_a_message_that_drips_holds_up_no_unmount() {
    let mut disk = GuestDisk::new("1");
    let dripping = drip_on(Guest::connect(&disk.served, 1));
    let begun = Instant::now();
    assert_eq!(disk.served.unmount_by_force(), Some(0), "{}", disk.served.log());
    assert!(begun.elapsed() < SOON);
    dripping.join().unwrap();
}

/// A stopped thread of a process, as if the kernel held it up.
struct HeldThread(Pid);

impl HeldThread {
    fn new(thread: Pid) -> Self {
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(thread).unwrap();
        waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        Self(thread)
    }

    /// Waits for the end of the process. Returns its exit code.
    fn wait_for_end(&self, served: &mut Served, within: Duration) -> Option<i32> {
        let begun = Instant::now();
        loop {
            // The tracer must reap the thread before the process can end.
            let _ = waitpid(self.0, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG));
            if let Some(code) = served.exit_code() {
                return code;
            }
            assert!(begun.elapsed() < within, "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for HeldThread {
    fn drop(&mut self) {
        // A process with a traced thread cannot be waited for.
        let _ = ptrace::detach(self.0, None);
    }
}

fn terminate(served: &Served) {
    kill(Pid::from_raw(i32::try_from(served.pid()).unwrap()), Signal::SIGTERM).unwrap();
}

/// Even with a stopped thread the process ends after a time limit: soon, if it is told twice.
#[test]
fn a_stopped_thread_holds_up_no_signal() {
    for (thread, signals, within) in
        [("rblk-front-end", 2, 10), ("rblk-ring-0", 2, 10), ("rblk-front-end", 1, 50)]
    {
        let mut disk = GuestDisk::new("1");
        let mut guest = Guest::connect(&disk.served, 1);
        assert_eq!(read(&mut guest), OK);
        let held = HeldThread::new(disk.served.thread(thread));
        for _ in 0..signals {
            terminate(&disk.served);
            std::thread::sleep(Duration::from_millis(100));
        }
        let code = held.wait_for_end(&mut disk.served, Duration::from_secs(within));
        assert_eq!(code, Some(1), "{}", disk.served.log());
        assert!(disk.served.log().contains("did not end in time"), "{}", disk.served.log());
        // The session is over, so the next process gets the volume at once. It leaves the rings
        // alone.
        let address = disk.target.address.to_string();
        disk.served = Served::start(disk.dir(), &address, "v", &["--queues", "1"]);
        drop(guest);
        goes_on_and_ends(disk);
    }
}

#[test]
#[ignore = "needs root: the mount is listed"]
fn as_root_a_stopped_thread_holds_up_no_unmount() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(read(&mut guest), OK);
    let held = HeldThread::new(disk.served.thread("rblk-front-end"));
    let begun = Instant::now();
    let name = disk.served.name().to_owned();
    let umount = std::thread::spawn(move || rblk_tests::guest::unmount(&name));
    let code = held.wait_for_end(&mut disk.served, Duration::from_secs(10));
    assert_eq!(code, Some(1), "{}", disk.served.log());
    assert!(begun.elapsed() < SOON);
    assert_eq!(umount.join().unwrap().code, Some(0));
}

/// A ring that the front end cannot stop breaks the disk: the process ends with a failure.
#[test]
fn a_broken_disk_is_a_failure() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(read(&mut guest), OK);
    let held = HeldThread::new(disk.served.thread("rblk-ring-0"));
    drop(guest);
    let code = held.wait_for_end(&mut disk.served, Duration::from_secs(60));
    assert_eq!(code, Some(1), "{}", disk.served.log());
    let log = disk.served.log();
    assert!(log.contains("the disk of the guest broke: ring 0 is not done"), "{log}");
}

#[test]
fn more_memory_than_a_guest_may_have_is_refused() {
    let disk = GuestDisk::with("1", &["--memory-max", "4MiB"]);
    let mut guest = Guest::connect(&disk.served, 1);
    let (at, _, user, _) = Guest::own_part();
    let large = shareable(MEMORY + 4096);
    assert!(!guest.try_share(&[(at, MEMORY, user, 0)], &[&large]).unwrap());
    disk.served.line_with("has 4100KiB, and --memory-max allows 4MiB");
    assert_eq!(read(&mut guest), OK);
    drop(guest);
    goes_on_and_ends(disk);
}

/// Pages of a file on another file system depend on the server of that file system.
#[test]
fn memory_in_a_file_of_another_file_system_is_refused() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    let zero = File::options().read(true).write(true).open("/dev/zero").unwrap();
    assert!(!guest.try_share(&[Guest::own_part()], &[&zero]).unwrap());
    disk.served.line_with("none of a memfd, tmpfs or hugetlbfs");
    // A file on tmpfs, as of QEMU's memory-backend-file.
    let shm = tempfile::tempfile_in("/dev/shm").unwrap();
    shm.set_len(MEMORY).unwrap();
    assert!(guest.try_share(&[Guest::own_part()], &[&shm]).unwrap());
    drop(guest);
    goes_on_and_ends(disk);
}

/// A front end that cuts the file of its guest's memory ends the process of that guest. The log
/// names the reason.
#[test]
fn a_memory_that_is_cut_is_named() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(read(&mut guest), OK);
    guest.file().set_len(0).unwrap();
    guest.kick(0);
    let code = wait_for("the end", || disk.served.exit_code());
    assert_eq!(code, None, "by a signal");
    let log = disk.served.log();
    assert!(log.contains("SIGBUS: byte ") && log.contains("its front end cut the file"), "{log}");
}
