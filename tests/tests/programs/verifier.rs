//! Real targets that restart, cleanly or not: their verifiers, and the consequences that an
//! initiator draws.

use std::path::Path as File;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_client::{Config, Options, Queue, Request, State, Volume};
use rblk_config::{ByteSize, OnLoss};
use rblk_fabric::{Address, ConnectOptions, PageKind, Region};
use rblk_initiator::engine::durability::retain::RetainRing;
use rblk_initiator::engine::durability::{Durability, Ledger};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_initiator::queue::ToQueue;
use rblk_initiator::volume::resolve_unflushed::{UnflushedParts, flush, resolve_unflushed};
use rblk_initiator::volume::session::{HostIdentity, QueueWish, Session};
use rblk_protocol::{
    AccessMode, BlockSize, Features, HostId, Name, OpenReply, QueueDepth, Tag, WriteVerifier,
};
use rblk_runtime::mailbox::mailbox;
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, DEADLINE, Target, program, run as run_program};

const FILE_BYTES: usize = 1 << 20;
const WRITES: u64 = 40;

fn start(dir: &File, more: &[&str]) -> Target {
    let file = format!("v={}", dir.join("v.img").display());
    let mut flags = vec!["--name", "store1", "--file", &file];
    flags.extend(more);
    Target::start(dir, &flags)
}

fn verifier(target: &Target, volume: &str) -> WriteVerifier {
    let client = Client::connect(&target.address, volume, 1).expect("a client");
    let verifier = client.volume.verifier;
    client.logout();
    verifier
}

/// Pretends that the machine has booted since the target ran.
fn boot(dir: &File) {
    let files = std::fs::read_dir(dir).expect("a directory").map(|e| e.expect("a file").path());
    let is_record = |path: &std::path::PathBuf| path.extension().is_some_and(|of| of == "volume");
    let records: Vec<_> = files.filter(is_record).collect();
    assert!(!records.is_empty());
    for path in records {
        let mut record: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).expect("a record")).expect("JSON");
        assert!(record["boot_id"].is_string());
        record["boot_id"] = "another".into();
        std::fs::write(&path, record.to_string()).expect("written");
    }
}

#[test]
fn a_verifier_changes_with_what_it_stands_for() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("v.img"), vec![0; FILE_BYTES]).unwrap();
    let mut target = start(dir.path(), &["--memory", "m=1MiB"]);
    let (first, memory) = (verifier(&target, "v"), verifier(&target, "m"));
    assert_eq!(verifier(&target, "v"), first, "the same run");
    target.terminate();
    assert_eq!(target.wait(), Some(0));

    boot(dir.path());
    let mut target = start(dir.path(), &["--memory", "m=1MiB"]);
    assert_eq!(verifier(&target, "v"), first, "it stopped cleanly before the machine did");
    assert_ne!(verifier(&target, "m"), memory, "memory goes with every run");
    target.kill();

    let mut target = start(dir.path(), &[]);
    assert_eq!(verifier(&target, "v"), first, "the kernel has what a killed process wrote");
    target.kill();

    boot(dir.path());
    let target = start(dir.path(), &[]);
    assert_ne!(verifier(&target, "v"), first, "the machine died with it");
}

fn wish() -> QueueWish {
    QueueWish {
        depth: QueueDepth::new(8).unwrap(),
        io_max_bytes: 64 << 10,
        in_capsule_bytes: 4096,
        features: Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS),
        digest: rblk_config::DigestWish::Off,
        lanes: None,
        queues: 1,
    }
}

async fn open(address: &Address) -> (Session, OpenReply) {
    let host = HostIdentity { id: HostId([1; 16]), name: Name::new("test").unwrap() };
    let options =
        ConnectOptions { timeout: DEADLINE, detect: 3 * DEADLINE, ..ConnectOptions::default() };
    let mut session = Session::connect(address, &options, &host, None, None).await.unwrap();
    let volume = session.open(&Name::new("v").unwrap(), AccessMode::Exclusive).await.unwrap();
    (session, volume)
}

/// Runs a request with the engine's clock stopped, so that no deadline passes.
fn run(engine: &mut Engine, now: Instant, io: Io) -> i32 {
    engine.submit(Tag(0), io).unwrap();
    let begun = Instant::now();
    let mut result = None;
    while result.is_none() {
        assert!(begun.elapsed() < DEADLINE, "{io:?} does not end");
        engine.turn(now, |_, r| result = Some(r));
        std::thread::yield_now();
    }
    result.unwrap()
}

/// Writes without a flush, and the target's machine dies. Returns the account after its settlement
/// with the next target, the bytes that the file should have, and the bytes it has.
fn lose(retain: bool) -> (Arc<Durability>, Vec<u8>, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v.img");
    std::fs::write(&path, vec![0; FILE_BYTES]).unwrap();
    let mut target = start(dir.path(), &[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let buffers = Region::allocate(8 * (64 << 10), PageKind::Normal).unwrap();
    let durability = Durability::new(OnLoss::default());
    let ring = retain.then(|| RetainRing::new(FILE_BYTES, 100));
    let ledger = Ledger::new(Arc::clone(&durability), wish().depth, ring);
    let mut engine =
        Engine::new(wish().depth, 64 << 10, Arc::new(QueueStats::default())).with_ledger(ledger);
    let begun = Instant::now();
    let (session, volume) = runtime.block_on(async {
        let (mut session, volume) = open(&target.address).await;
        let path = session
            .connect_queue(0, wish(), volume.handle, &Arc::clone(&buffers).into())
            .await
            .unwrap();
        engine.connect(path, begun);
        (session, volume)
    });
    let size = BlockSize::new(volume.block_size.bytes()).unwrap();
    let mut expected = vec![0; FILE_BYTES];
    for write in 0..WRITES {
        // The writes overlap, and some exceed a capsule.
        let (at, len) = (write * 3 % 50 * 4096, (1 + write % 5) * 4096);
        let byte = u8::try_from(write + 1).unwrap();
        buffers.write(0, &vec![byte; usize::try_from(len).unwrap()]);
        let io = Io::new(IoOp::Write, at, len, size).unwrap();
        assert_eq!(i64::from(run(&mut engine, begun, io)), i64::try_from(len).unwrap());
        let at = usize::try_from(at).unwrap();
        expected[at..at + usize::try_from(len).unwrap()].fill(byte);
    }
    assert_eq!(durability.unflushed(), WRITES);

    target.kill();
    session.admin.close();
    std::fs::write(&path, vec![0; FILE_BYTES]).unwrap();
    boot(dir.path());
    let target = start(dir.path(), &[]);
    let (mail, mut receiver) = mailbox(8).unwrap();
    let thread = std::thread::spawn(move || {
        let begun = Instant::now();
        while begun.elapsed() < DEADLINE {
            if let Some(ToQueue::TakeStock(reply)) = receiver.receive() {
                reply.send(engine.take_stock()).unwrap();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("there was no request");
    });
    runtime.block_on(async {
        let (mut session, now) = open(&target.address).await;
        assert_ne!(now.verifier, volume.verifier);
        let account = UnflushedParts {
            durability: Arc::clone(&durability),
            queues: vec![mail],
            wish: wish(),
            pulse: Pulse::of(3 * DEADLINE),
        };
        resolve_unflushed(&mut session, &now, &account).await.unwrap();
        session.logout(DEADLINE).await;
    });
    thread.join().unwrap();
    drop(target);
    (durability, expected, std::fs::read(&path).unwrap())
}

#[test]
fn retained_writes_are_written_again() {
    let (durability, expected, found) = lose(true);
    assert!(found == expected, "the file has something else");
    assert_eq!((durability.unflushed(), durability.writes_rewritten()), (0, WRITES));
    assert_eq!(durability.losses(), 0);
}

#[test]
fn writes_without_copies_are_a_loss() {
    let (durability, _, found) = lose(false);
    assert!(found.iter().all(|byte| *byte == 0), "who wrote that?");
    assert_eq!((durability.unflushed(), durability.writes_rewritten()), (0, 0));
    assert!(durability.has_untold_loss() && durability.fails_every_flush());
}

/// The FLUSH of a process that ends: its note afterwards must not have a doubt.
#[test]
fn the_last_flush_of_a_process_enters_the_account() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("v.img"), vec![0; FILE_BYTES]).unwrap();
    let target = start(dir.path(), &[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let durability = Durability::new(OnLoss::default());
    let mut engine = Engine::new(wish().depth, 64 << 10, Arc::new(QueueStats::default()))
        .with_ledger(Ledger::new(Arc::clone(&durability), wish().depth, None));
    let buffers = Region::allocate(8 * (64 << 10), PageKind::Normal).unwrap();
    let begun = Instant::now();
    runtime.block_on(async {
        let (mut session, volume) = open(&target.address).await;
        let memory = Arc::clone(&buffers).into();
        let path = session.connect_queue(0, wish(), volume.handle, &memory).await.unwrap();
        engine.connect(path, begun);
        let io = Io::new(IoOp::Write, 0, 4096, volume.block_size).unwrap();
        assert_eq!((run(&mut engine, begun, io), durability.unflushed()), (4096, 1));
        let account = UnflushedParts {
            durability: Arc::clone(&durability),
            queues: Vec::new(),
            wish: wish(),
            pulse: Pulse::of(3 * DEADLINE),
        };
        flush(&mut session, &volume, &account).await.unwrap();
        assert_eq!(durability.unflushed(), 0);
        session.logout(DEADLINE).await;
    });
}

const BLOCK: usize = 4096;
const SHARE: usize = 2 << 20;

/// A program that retains writes, with a volume of a real target with a write-back cache.
struct Kept {
    dir: tempfile::TempDir,
    target: Target,
    // Dropped before the volume.
    queue: Queue,
    volume: Volume,
}

impl Kept {
    fn new(on_loss: OnLoss) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("v.img"), vec![0; FILE_BYTES]).unwrap();
        let args = Self::configured(dir.path(), false);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let target = Target::start(dir.path(), &args);
        let mut config = Config::new(target.address.to_string(), "v");
        config.queues = Some(1);
        config.queue_depth = 8;
        config.retain = ByteSize(SHARE as u64);
        config.on_loss = on_loss;
        config.reconnect_delay = rblk_config::Duration::from_millis(20);
        let mut volume = Options::new(config).open().unwrap();
        let queue = volume.queue().unwrap();
        Self { dir, target, queue, volume }
    }

    /// The arguments of a target with the volume read-only or writable.
    fn configured(dir: &File, read_only: bool) -> Vec<String> {
        let (path, file) = (dir.join("v.img"), dir.join("target.toml"));
        // Dirty blocks stay in the target's memory until it crashes.
        let cache = if read_only { "write-through" } else { "write-back" };
        let text = format!(
            "write_back_delay = '60s'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\n\
             cache = '{cache}'\nread_only = {read_only}\n",
            path.display()
        );
        std::fs::write(&file, text).unwrap();
        vec!["--config".to_owned(), file.display().to_string()]
    }

    /// Kills the target, which loses its memory, and starts it again.
    fn crash(&mut self, read_only: bool) {
        let args = Self::configured(self.dir.path(), read_only);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        self.target.kill();
        self.target.start_again(self.dir.path(), &args);
    }

    fn order(&self, words: &[&str]) {
        let mut command = Command::new(program("rblk-target"));
        command.arg("volume").args(words).arg("--control-socket").arg(&self.target.socket);
        let ended = run_program(&mut command);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }

    /// The errno of a request, or 0, and its buffer's data.
    fn done(&mut self, request: Request) -> (i32, Vec<u8>) {
        self.queue.submit(request).unwrap();
        let mut done = Vec::new();
        let begun = Instant::now();
        while self.queue.wait(&mut done, Duration::from_secs(1)).unwrap() == 0 {
            assert!(begun.elapsed() < DEADLINE, "no completion");
        }
        let done = done.pop().unwrap();
        let mut data = vec![0; BLOCK];
        if let Some(buffer) = &done.buffer {
            buffer.read(0, &mut data);
        }
        (done.result.err().map_or(0, |error| error.errno()), data)
    }

    fn write(&mut self, block: usize, data: &[u8]) {
        let mut buffer = self.queue.buffer().unwrap();
        buffer.write(0, data);
        assert_eq!(self.done(Request::write(buffer, (block * BLOCK) as u64, BLOCK)).0, 0);
    }

    fn read(&mut self, block: usize) -> Vec<u8> {
        let buffer = self.queue.buffer().unwrap();
        let (errno, data) = self.done(Request::read(buffer, (block * BLOCK) as u64, BLOCK));
        assert_eq!(errno, 0);
        data
    }

    fn flush(&mut self) -> i32 {
        self.done(Request::flush()).0
    }

    /// Drives the queue until the volume satisfies `is_so`.
    fn until(&mut self, what: &str, is_so: impl Fn(&Volume) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.volume) {
            assert!(begun.elapsed() < DEADLINE, "{what} did not happen: {:?}", self.volume);
            self.queue.wait(&mut Vec::new(), Duration::from_millis(5)).unwrap();
        }
    }

    fn file(&self, block: usize) -> Vec<u8> {
        let all = std::fs::read(self.dir.path().join("v.img")).unwrap();
        all[block * BLOCK..(block + 1) * BLOCK].to_vec()
    }
}

#[test]
fn a_smaller_volume_drops_only_the_copies_beyond_its_end() {
    for on_loss in [OnLoss::UntilRemount, OnLoss::Once] {
        let mut kept = Kept::new(on_loss);
        let half = FILE_BYTES / 2 / BLOCK;
        let blocks = [half + 10, 3, half - 1, half];
        for block in blocks {
            kept.write(block, &pattern(block as u64, BLOCK));
        }
        kept.order(&["resize", "v", "512KiB", "--shrink"]);
        kept.crash(false);
        assert_eq!((kept.flush(), kept.volume.losses()), (0, 0), "{on_loss}");
        assert_eq!(kept.volume.unflushed_writes(), 0);
        // After a second crash at once, the repeated writes are in the file.
        kept.crash(false);
        for block in [3, half - 1] {
            assert!(kept.read(block) == pattern(block as u64, BLOCK), "block {block}");
        }
        assert_eq!((kept.flush(), kept.volume.losses()), (0, 0), "{on_loss}");
    }
}

/// The volume comes back read-only, as when an administrator examines it, and then writable.
#[test]
fn copies_wait_for_a_volume_that_is_read_only_for_a_time() {
    for live in [false, true] {
        let mut kept = Kept::new(OnLoss::UntilRemount);
        let (old, new) = (vec![0; BLOCK], pattern(7, BLOCK));
        kept.write(7, &new);
        if live {
            // The queue is not driven yet, so its copies cannot be used.
            kept.crash(false);
            kept.order(&["set", "v", "--cache", "write-through", "--read-only"]);
        } else {
            kept.crash(true);
        }
        // The loss is reported, and the remaining data can be read.
        assert_eq!((kept.flush(), kept.volume.losses()), (5, 1));
        assert!(kept.read(7) == old && kept.volume.state() == State::Connected);
        // No FLUSH covers data that the target lacks.
        assert_eq!((kept.flush(), kept.volume.unflushed_writes()), (5, 1));
        if live {
            kept.order(&["set", "v", "--read-only=false"]);
        } else {
            // A second crash changes nothing.
            kept.crash(true);
            assert!(kept.read(7) == old);
            kept.crash(false);
        }
        kept.until("the writing again", |volume| volume.unflushed_writes() == 0);
        assert!(kept.file(7) == new, "it is durable");
        assert!(kept.read(7) == new);
        // A user has heard of the loss, so it lasts.
        assert_eq!((kept.flush(), kept.volume.losses()), (5, 1));
    }
}

#[test]
fn after_one_reported_loss_reads_stay_the_same() {
    let mut kept = Kept::new(OnLoss::Once);
    kept.write(7, &pattern(7, BLOCK));
    kept.crash(true);
    assert_eq!((kept.flush(), kept.volume.losses()), (5, 1));
    assert!(kept.read(7) == vec![0; BLOCK]);
    kept.crash(false);
    assert!(kept.read(7) == vec![0; BLOCK], "it changed behind the user's back");
    assert_eq!((kept.flush(), kept.volume.losses(), kept.volume.unflushed_writes()), (0, 1, 0));
}
