//! The state that a program of a guest leaves to the next one: writes that no FLUSH covered, losses
//! to report, and rings. A front end and a guest driven by hand, the real program, and a target
//! that keeps dirty blocks in its memory.

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use rblk_tests::guest::{Ask, DATA, GUEST, Guest, Served};
use rblk_tests::program::{Client, Target, program, run, wait_for};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const BLOCK: u32 = 4096;

struct Bed {
    served: Served,
    target: Target,
    args: Vec<&'static str>,
    // Dropped last: the logs must outlive the processes.
    dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("v.img");
        File::create(&store).unwrap().set_len(2 << 20).unwrap();
        let text = format!(
            "write_back_delay = '1h'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\ncache = 'write-back'\n",
            store.display()
        );
        std::fs::write(dir.path().join("target.toml"), text).unwrap();
        let config = dir.path().join("target.toml").display().to_string();
        let target = Target::start(dir.path(), &["--config", &config]);
        let args = vec!["--queues", "2"];
        let served = Served::start(dir.path(), &target.address.to_string(), "v", &args);
        Self { served, target, args, dir }
    }

    fn note(&self) -> PathBuf {
        self.dir.path().join("guest.sock.note")
    }

    fn start_target(&mut self) {
        let config = self.dir.path().join("target.toml").display().to_string();
        self.target.start_again(self.dir.path(), &["--config", &config]);
    }

    fn start_program(&mut self) {
        let address = self.target.address.to_string();
        self.served = Served::start(self.dir.path(), &address, "v", &self.args);
    }

    /// Kills the target with its dirty blocks, and starts it again.
    fn lose_target(&mut self) {
        self.target.kill();
        self.start_target();
    }

    /// The guest leaves, and the program notices that. The log has the lines of all programs so
    /// far.
    fn leave<T>(&self, guest: T) {
        let left = || self.served.log().matches("the front end has gone").count();
        let before = left();
        drop(guest);
        wait_for("the front end to be gone", || (left() > before).then_some(()));
    }

    fn end_program(&mut self) {
        assert_eq!(self.served.terminate(), Some(0), "{}", self.served.log());
    }

    fn stored(&self, sector: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK as usize];
        let store = File::open(self.dir.path().join("v.img")).unwrap();
        store.read_exact_at(&mut bytes, sector * 512).unwrap();
        bytes
    }
}

fn write(guest: &mut Guest, sector: u64, byte: u8) {
    guest.fill(GUEST + DATA, &[byte; BLOCK as usize]);
    assert_eq!(guest.one(0, Ask::Write, sector, &[(GUEST + DATA, BLOCK)]), OK);
}

fn read(guest: &mut Guest, sector: u64) -> u8 {
    guest.fill(GUEST + DATA, &[0xee; BLOCK as usize]);
    assert_eq!(guest.one(0, Ask::Read, sector, &[(GUEST + DATA, BLOCK)]), OK);
    guest.bytes(GUEST + DATA, 1)[0]
}

fn flush(guest: &mut Guest, ring: u16) -> u8 {
    guest.one(ring, Ask::Flush, 0, &[])
}

/// The program is told to end while its guest has unflushed writes, and then the target dies.
#[test]
fn writes_of_a_guest_are_durable_before_the_program_ends() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.end_program();
    bed.lose_target();
    bed.start_program();
    guest.connect_again(&bed.served);
    let flushed = flush(&mut guest, 1);
    assert_eq!((flushed, read(&mut guest, 8)), (OK, 7), "what was written is there");
    // After a guest has left, its writes become durable, and no note stays.
    write(&mut guest, 16, 8);
    bed.leave(guest);
    wait_for("the store has it", || (bed.stored(16) == [8; BLOCK as usize]).then_some(()));
    bed.end_program();
    assert!(!bed.note().exists());
}

/// The target dies while the program still has unflushed writes of its guest, and the program is
/// told to end before the target is back.
#[test]
fn a_loss_while_the_program_is_away_is_reported_to_the_guest() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.target.kill();
    bed.end_program();
    bed.start_target();
    bed.start_program();
    guest.connect_again(&bed.served);
    let (flushed, found) = (flush(&mut guest, 1), read(&mut guest, 8));
    assert_eq!(flushed, IO_ERROR, "the flush said {flushed}, and the write is gone: {found}");
    bed.served.line_with("writes that the process before this one acknowledged");
    // Every FLUSH fails, also in later processes.
    bed.end_program();
    bed.start_program();
    guest.connect_again(&bed.served);
    assert_eq!(flush(&mut guest, 0), IO_ERROR);
    bed.served.kill();
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    assert_eq!(flush(&mut guest, 0), IO_ERROR);
    // The loss ends when no guest is left that could rely on the lost data.
    bed.leave(guest);
    bed.end_program();
    assert!(!bed.note().exists());
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 9);
    assert_eq!(flush(&mut guest, 0), OK);
}

/// The program is killed, and so is the target, before the guest flushes.
#[test]
fn a_kill_of_the_program_hides_no_loss() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.served.kill();
    // The target lives: the write is there, and a FLUSH covers it.
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    assert_eq!(flush(&mut guest, 1), OK);
    assert!(bed.stored(8) == [7; BLOCK as usize]);
    write(&mut guest, 8, 8);
    bed.served.kill();
    bed.lose_target();
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    assert_eq!(flush(&mut guest, 1), IO_ERROR, "what was written is gone");
}

/// The next program makes unflushed writes of a killed one durable, before a front end may connect.
#[test]
fn the_next_program_makes_unflushed_writes_durable_itself() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.served.kill();
    bed.start_program();
    wait_for("a doubt that is over", || {
        bed.served.log().contains("the writes of the guest are durable").then_some(())
    });
    assert!(bed.stored(8) == [7; BLOCK as usize]);
    bed.lose_target();
    let mut guest = Guest::connect(&bed.served, 2);
    assert_eq!((flush(&mut guest, 0), read(&mut guest, 8)), (OK, 7));
}

/// With `on_loss = "once"` one FLUSH of the guest reports a loss. The program's own FLUSH at its
/// end does not count.
#[test]
fn the_flush_at_the_end_of_a_program_reports_no_loss() {
    let mut bed = Bed::new();
    bed.end_program();
    bed.args.extend(["--on-loss", "once"]);
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.lose_target();
    // This request needs the new session: then the loss is known.
    assert_eq!(read(&mut guest, 8), 0);
    write(&mut guest, 8, 8);
    bed.end_program();
    assert!(bed.stored(8) == [8; BLOCK as usize]);
    bed.start_program();
    guest.connect_again(&bed.served);
    assert_eq!(flush(&mut guest, 0), IO_ERROR);
    assert_eq!(flush(&mut guest, 0), OK);
}

/// Another host had the volume while no program ran: the guest's cached data is old.
#[test]
fn a_guest_whose_volume_another_host_had_has_to_be_reset() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.end_program();
    let mut other = Client::connect(&bed.target.address, "v", 9).unwrap();
    other.write(4096, &[9; BLOCK as usize]);
    other.logout();
    bed.start_program();
    // The program may serve before its last lines are in its log.
    wait_for("the word of the program", || {
        bed.served.log().contains("another host had it").then_some(())
    });
    guest.connect_again(&bed.served);
    guest.request(0, 3, Ask::Read, 8, &[(GUEST + DATA, BLOCK)]);
    assert_eq!(flush(&mut guest, 1), OK);
    assert_eq!(guest.done(0), None);
    let mut guest = {
        drop(guest);
        Guest::connect(&bed.served, 2)
    };
    assert_eq!(read(&mut guest, 8), 9);
}

/// After a kill of the program it is unknown which requests were answered. Requests in such a ring
/// are left alone until the guest resets its disk.
#[test]
fn rings_of_a_killed_program_wait_for_a_reset() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    write(&mut guest, 16, 7);
    bed.served.kill();
    for _ in 0..2 {
        bed.start_program();
        guest.connect_again(&bed.served);
        guest.request(0, 3, Ask::Read, 8, &[(GUEST + DATA, BLOCK)]);
        // The other ring was never used.
        guest.request(1, 0, Ask::Read, 8, &[(GUEST + DATA, BLOCK)]);
        assert_eq!(guest.wait(1), (0, OK));
        assert_eq!(guest.done(0), None);
        assert!(bed.served.log().contains("reset the guest"), "{}", bed.served.log());
        // A clean end of the process does not resolve the doubt about a ring.
        bed.end_program();
    }
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    assert_eq!(read(&mut guest, 8), 7);
    write(&mut guest, 8, 9);
    // The reset has resolved the doubt.
    bed.end_program();
    bed.start_program();
    guest.connect_again(&bed.served);
    assert_eq!(read(&mut guest, 8), 9);
    assert_eq!(flush(&mut guest, 0), OK);
}

/// A program with fewer rings knows nothing of the others, so it passes the doubt on, after a clean
/// end and after a kill.
#[test]
fn rings_in_doubt_outlast_a_program_that_has_fewer() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    guest.fill(GUEST + DATA, &[7; BLOCK as usize]);
    assert_eq!(guest.one(1, Ask::Write, 8, &[(GUEST + DATA, BLOCK)]), OK);
    bed.served.kill();
    for is_killed in [true, false] {
        bed.args = vec!["--queues", "1"];
        bed.start_program();
        match is_killed {
            true => bed.served.kill(),
            false => bed.end_program(),
        }
    }
    bed.args = vec!["--queues", "2"];
    bed.start_program();
    guest.connect_again(&bed.served);
    guest.request(1, 1, Ask::Read, 8, &[(GUEST + DATA, BLOCK)]);
    assert_eq!(read(&mut guest, 8), 7);
    assert_eq!(guest.done(1), None, "a ring in doubt is served");
}

/// A connection that starts no ring, such as a probe, is no new guest.
#[test]
fn a_probe_does_not_end_the_guest() {
    let mut bed = Bed::new();
    let mut guest = Guest::connect(&bed.served, 2);
    write(&mut guest, 8, 7);
    bed.served.kill();
    bed.start_program();
    bed.leave(UnixStream::connect(bed.dir.path().join("guest.sock")).unwrap());
    bed.end_program();
    assert!(bed.note().exists(), "the note went with a connection that was none of the guest's");
    bed.start_program();
    guest.connect_again(&bed.served);
    guest.request(0, 1, Ask::Read, 8, &[(GUEST + DATA, BLOCK)]);
    guest.request(1, 0, Ask::Read, 8, &[(GUEST + DATA, BLOCK)]);
    assert_eq!(guest.wait(1), (0, OK));
    assert_eq!(guest.done(0), None, "a ring in doubt is served");
}

/// For a guest that does not flush, every change of its disk is durable before the answer.
#[test]
fn zeros_are_durable_at_once_for_a_guest_that_does_not_flush() {
    // Fewer tags than the ring has requests.
    let mut bed = Bed::new();
    bed.end_program();
    bed.args.extend(["--queue-depth", "3"]);
    bed.start_program();
    let mut guest = Guest::connect_with(&bed.served, 2, 0);
    write(&mut guest, 8, 7);
    assert!(bed.stored(8) == [7; BLOCK as usize]);
    let range = [&8u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
    guest.fill(GUEST + DATA, &range);
    let flushes = |bed: &Bed| bed.target.status().volumes[0].io.flushes;
    assert_eq!(flushes(&bed), 0);
    assert_eq!(guest.one(0, Ask::WriteZeroes, 0, &[(GUEST + DATA, 16)]), OK);
    assert_eq!(flushes(&bed), 1, "zeros that were answered are not durable");
    assert!(bed.stored(8) == [0; BLOCK as usize]);
    assert_eq!(guest.one(1, Ask::Discard, 0, &[(GUEST + DATA, 16)]), OK);
    assert_eq!(flushes(&bed), 2);
    // A refused request needs no flush.
    guest.fill(GUEST + DATA, &[0xff; 16]);
    assert_ne!(guest.one(0, Ask::WriteZeroes, 0, &[(GUEST + DATA, 16)]), OK);
    assert_eq!(flushes(&bed), 2);
    // A full ring of requests at once.
    guest.fill(GUEST + DATA, &range);
    for number in 0..16 {
        guest.request(0, number, Ask::WriteZeroes, 0, &[(GUEST + DATA, 16)]);
    }
    for _ in 0..16 {
        assert_eq!(guest.wait(0).1, OK);
    }
    assert_eq!(flushes(&bed), 18);
}

/// An unreadable note, or one that cannot be written, keeps the program from serving. The message
/// has the fix.
#[test]
fn an_unusable_note_is_refused_with_the_fix() {
    let mut bed = Bed::new();
    bed.end_program();
    let refused = |bed: &Bed| {
        let ended = run(Command::new(program("rblk-initiator"))
            .args(["vhost", "--foreground", &bed.target.address.to_string(), "v", "--socket"])
            .arg(&bed.served.socket));
        assert_ne!(ended.code, Some(0), "{ended:?}");
        ended.stderr
    };
    std::fs::write(bed.note(), "{").unwrap();
    let said = refused(&bed);
    assert!(said.contains("guest.sock.note"), "{said}");
    assert!(said.contains("end the virtual machine and remove the file"), "{said}");
    // The note of another volume, with a loss to report.
    std::fs::remove_file(bed.note()).unwrap();
    bed.start_program();
    bed.served.kill();
    let text = std::fs::read_to_string(bed.note()).unwrap();
    let mut note: serde_json::Value = serde_json::from_str(&text).unwrap();
    note["uuid"] = "0".repeat(32).into();
    let text = note.to_string();
    std::fs::write(bed.note(), &text).unwrap();
    let said = refused(&bed);
    assert!(said.contains("served volume") && said.contains("remove the file"), "{said}");
    assert_eq!(std::fs::read_to_string(bed.note()).unwrap(), text, "it is still there");
    std::fs::remove_file(bed.note()).unwrap();
    std::fs::create_dir(bed.dir.path().join("guest.sock.note.new")).unwrap();
    let said = refused(&bed);
    assert!(said.contains("The directory of the socket has to have room"), "{said}");
    std::fs::remove_dir(bed.dir.path().join("guest.sock.note.new")).unwrap();
    bed.start_program();
    let mut guest = Guest::connect(&bed.served, 2);
    assert_eq!(flush(&mut guest, 0), OK);
}

/// A package that is upgraded asks for this on every host, so the answer must help.
#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_an_upgrade_says_that_the_disk_of_a_guest_stays() {
    let bed = Bed::new();
    let before = bed.served.status();
    let name = bed.served.name().to_owned();
    let said = run(Command::new(program("rblk-initiator")).args(["upgrade", &name]));
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stderr.contains("cannot be handed over: version "), "{said:?}");
    assert!(said.stderr.contains("`rblk-initiator vhost` is the new program"), "{said:?}");
    assert_eq!(bed.served.status()["pid"], before["pid"]);
}
