//! Bits that flip on the way: a proxy between an initiator and the real `rblk-targetd` flips bits
//! in the streams of I/O connections. No read may return a wrong byte, and no wrong byte may be
//! stored.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rblk_config::DigestWish;
use rblk_fabric::{Address, ConnectOptions, PageKind, Region};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_initiator::volume::session::{HostIdentity, QueueWish, Session};
use rblk_protocol::{AccessMode, BlockSize, Features, HostId, Name, QueueDepth, Tag};
use rblk_rig::seed::Random;
use rblk_tests::bed::pattern;
use rblk_tests::long::times;
use rblk_tests::program::{Client, DEADLINE, Target};

const VOLUME: usize = 4 << 20;
const IO_MAX: u32 = 64 << 10;
const DEPTH: u16 = 4;
/// Bytes of a stream before the first flip: the hellos stay intact.
const SPARED: usize = 256;
/// Bytes between two flips, on average.
const BETWEEN: usize = 192 << 10;
/// The place of the kind of a connection in the first bytes of its stream: in the hello, after 20
/// bytes of the software provider. 0 is an admin connection.
const KIND_AT: usize = 20 + 5;

/// Flips bits in I/O connections.
struct Proxy {
    address: Address,
    flips: Arc<AtomicU64>,
}

impl Proxy {
    fn start(target: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
        let flips = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&flips);
        // The threads end with the process, or with their streams.
        std::thread::spawn(move || {
            for (connection, from) in (0u64..).zip(listener.incoming()) {
                let (Ok(from), Ok(to)) = (from, TcpStream::connect(target)) else { continue };
                let _ = (from.set_nodelay(true), to.set_nodelay(true));
                let mut hello = [0; KIND_AT + 1];
                let peeked = peek(&from, &mut hello);
                let is_io = peeked && hello[KIND_AT] != 0;
                for (way, (from, to)) in
                    (0u64..).zip([(dup(&from), dup(&to)), (dup(&to), dup(&from))])
                {
                    let flips = is_io.then(|| Arc::clone(&counter));
                    let random = Random::new(seed ^ connection << 1 ^ way);
                    std::thread::spawn(move || pump(from, to, flips, random));
                }
            }
        });
        Self { address, flips }
    }

    fn flips(&self) -> u64 {
        self.flips.load(Ordering::Relaxed)
    }
}

fn dup(stream: &TcpStream) -> TcpStream {
    stream.try_clone().unwrap()
}

/// Whether the first bytes arrived.
fn peek(stream: &TcpStream, bytes: &mut [u8]) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline {
        match stream.peek(bytes) {
            Ok(seen) if seen == bytes.len() => return true,
            Ok(0) | Err(_) => return false,
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    false
}

/// Carries one way of a stream to its end, and flips a bit now and then.
fn pump(mut from: TcpStream, mut to: TcpStream, flips: Option<Arc<AtomicU64>>, mut random: Random) {
    let mut buffer = vec![0; 64 << 10];
    let mut left = SPARED + random.index(2 * BETWEEN);
    while let Ok(count) = from.read(&mut buffer) {
        if count == 0 {
            break;
        }
        if let Some(flips) = &flips {
            let mut rest = &mut buffer[..count];
            while left < rest.len() {
                rest[left] ^= 1 << random.index(8);
                flips.fetch_add(1, Ordering::Relaxed);
                rest = &mut rest[left + 1..];
                left = random.index(2 * BETWEEN);
            }
            left -= rest.len();
        }
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(std::net::Shutdown::Both), to.shutdown(std::net::Shutdown::Both));
}

/// The possible contents of one block of the volume.
#[derive(Clone, Copy, Default)]
struct Block {
    // Seeds of its possible patterns. The second is of a write with an unknown outcome.
    now: u64,
    maybe: Option<u64>,
}

const BLOCK: usize = 4096;

fn content(seed: u64) -> Vec<u8> {
    if seed == 0 { vec![0; BLOCK] } else { pattern(seed, BLOCK) }
}

/// An initiator that writes and reads through the proxy, and remembers its writes.
struct User {
    engine: Engine,
    stats: Arc<QueueStats>,
    buffers: Arc<Region>,
    wish: QueueWish,
    runtime: tokio::runtime::Runtime,
    address: Address,
    session: Option<Session>,
    blocks: Vec<Block>,
    random: Random,
    seeds: u64,
    eio: u64,
    paths: u64,
}

/// A request under way.
#[derive(Clone, Copy)]
struct Pending {
    op: IoOp,
    first: usize,
    count: usize,
    seed: u64,
}

impl User {
    fn new(address: &Address, seed: u64) -> Self {
        let depth = QueueDepth::new(DEPTH).unwrap();
        let wish = QueueWish {
            depth,
            io_max_bytes: IO_MAX,
            in_capsule_bytes: 4096,
            features: Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS),
            digest: DigestWish::Crc32c,
            lanes: Some(1),
            queues: 1,
        };
        let bytes = wish.buffer_stride() * usize::from(DEPTH);
        let buffers = Region::allocate(bytes, PageKind::Normal).unwrap();
        let stats = Arc::new(QueueStats::default());
        let mut engine = Engine::new(depth, wish.buffer_stride(), Arc::clone(&stats))
            .with_data_max(IO_MAX as usize);
        // After a flip in a length an end may wait for bytes that never come.
        engine.set_pulse(Some(Pulse::of(Duration::from_millis(400))));
        Self {
            engine,
            stats,
            buffers,
            wish,
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            address: address.clone(),
            session: None,
            blocks: vec![Block::default(); VOLUME / BLOCK],
            random: Random::new(seed),
            seeds: 0,
            eio: 0,
            paths: 0,
        }
    }

    /// Continues with a new session, after as many attempts as needed: a bit may flip in the
    /// self-test, too.
    fn reconnect(&mut self) {
        while let Some((_, dead)) = self.engine.take_ended() {
            drop(dead);
        }
        let Self { runtime, session, address, wish, buffers, .. } = self;
        let old = session.take();
        let (next, path) = runtime.block_on(async {
            if let Some(old) = old {
                old.logout(Duration::from_secs(5)).await;
            }
            let host = HostIdentity { id: HostId([7; 16]), name: Name::new("flips").unwrap() };
            let options = ConnectOptions {
                timeout: DEADLINE,
                detect: 3 * DEADLINE,
                ..ConnectOptions::default()
            };
            let mut session = Session::connect(address, &options, &host, None, None).await.unwrap();
            let volume = session.open(&Name::new("m").unwrap(), AccessMode::Shared).await.unwrap();
            let path = session
                .connect_queue(0, *wish, volume.handle, &Arc::clone(buffers).into())
                .await
                .unwrap();
            (session, path)
        });
        assert!(path.accept.features.has(Features::DIGEST));
        self.session = Some(next);
        self.paths += 1;
        self.engine.connect(path, Instant::now());
    }

    fn submit(&mut self, tag: u16) -> Pending {
        let op = if self.random.chance(500) { IoOp::Write } else { IoOp::Read };
        let count = 1 + [0, 0, 0, 1, 7, 15][self.random.index(6)];
        // Each tag has its own range, so no two requests overlap.
        let share = VOLUME / BLOCK / usize::from(DEPTH);
        let first = usize::from(tag) * share + self.random.index(share - count);
        self.seeds += 1;
        let pending = Pending { op, first, count, seed: self.seeds << 8 };
        let at = self.wish.buffer_stride() * usize::from(tag);
        for block in 0..count {
            match op {
                IoOp::Write => {
                    let seed = pending.seed + block as u64;
                    self.blocks[first + block].maybe = Some(seed);
                    self.buffers.write(at + block * BLOCK, &content(seed));
                }
                _ => self.buffers.write(at + block * BLOCK, &[0xee; BLOCK]),
            }
        }
        // The default block size of a target.
        let size = BlockSize::new(4096).unwrap();
        let (offset, len) = ((first * BLOCK) as u64, (count * BLOCK) as u64);
        self.engine.submit(Tag(tag), Io::new(op, offset, len, size).unwrap()).unwrap();
        pending
    }

    /// Takes the end of a request: checks the bytes of a read, and remembers those of a write.
    fn ended(&mut self, tag: u16, pending: Pending, result: i32) {
        let Pending { op, first, count, seed } = pending;
        if result < 0 {
            assert_eq!(result, -5, "no other error comes of a flipped bit");
            self.eio += 1;
            return;
        }
        for block in 0..count {
            let known = &mut self.blocks[first + block];
            if op == IoOp::Write {
                *known = Block { now: seed + block as u64, maybe: None };
                continue;
            }
            let mut found = vec![0; BLOCK];
            let at = self.wish.buffer_stride() * usize::from(tag) + block * BLOCK;
            self.buffers.read(at, &mut found);
            known.assert_may_hold(&found, first + block);
        }
    }

    fn run(&mut self, until: impl Fn() -> bool) {
        let mut pending: Vec<Option<Pending>> = vec![None; usize::from(DEPTH)];
        let mut last = Instant::now();
        self.reconnect();
        loop {
            let stop = until();
            for tag in 0..DEPTH {
                if !stop && pending[usize::from(tag)].is_none() {
                    pending[usize::from(tag)] = Some(self.submit(tag));
                }
            }
            if stop && pending.iter().all(Option::is_none) {
                return;
            }
            let mut done = Vec::new();
            if !self.engine.turn(Instant::now(), |tag, result| done.push((tag.0, result))) {
                std::thread::yield_now();
            }
            for (tag, result) in done {
                last = Instant::now();
                let request = pending[usize::from(tag)].take().expect("a request");
                self.ended(tag, request, result);
            }
            let _ = self.engine.take_digest_failure();
            if !self.engine.is_connected() && self.engine.outstanding() > 0 && self.has_ended() {
                self.reconnect();
            }
            assert!(last.elapsed() < DEADLINE, "a request does not end");
        }
    }

    /// Whether the path ended.
    fn has_ended(&mut self) -> bool {
        let mut any = false;
        while let Some((_, dead)) = self.engine.take_ended() {
            drop(dead);
            any = true;
        }
        any
    }
}

impl Block {
    fn assert_may_hold(self, found: &[u8], at: usize) {
        let may =
            found == content(self.now) || self.maybe.is_some_and(|seed| found == content(seed));
        assert!(may, "block {at} holds what was never written there");
    }
}

#[test]
fn each_flipped_bit_is_found() {
    let flips = times(300, 10_000);
    let dir = tempfile::tempdir().unwrap();
    for (seed, volume) in [(1, "--memory"), (2, "--file")] {
        let file = dir.path().join("image");
        let spec = match volume {
            "--memory" => format!("m={VOLUME}"),
            _ => {
                std::fs::File::create(&file).unwrap().set_len(VOLUME as u64).unwrap();
                format!("m={}", file.display())
            }
        };
        let target = Target::start(dir.path(), &[volume, &spec]);
        let direct: SocketAddr =
            target.address.to_string().trim_start_matches("tcp://").parse().unwrap();
        let proxy = Proxy::start(direct, seed);
        let mut user = User::new(&proxy.address, seed);
        user.run(|| proxy.flips() >= flips);
        let (counts, there) = (user.stats.snapshot(), target.status().total);
        let found = (counts.digest_mismatches, there.digest_mismatches);
        println!(
            "{} flips: {found:?} mismatches (initiator, target), {} retries, {} EIO, {} paths, {} reads, {} writes",
            proxy.flips(),
            counts.digest_retries,
            user.eio,
            user.paths,
            counts.reads,
            counts.writes,
        );
        assert!(found.0 > 0 && found.1 > 0 && counts.digest_retries > 0, "{found:?}");
        // Checks the stored bytes, past the proxy.
        let mut client = Client::claim(&target.address, "m", 9, AccessMode::Shared).unwrap();
        for (at, block) in user.blocks.iter().enumerate() {
            block.assert_may_hold(&client.read((at * BLOCK) as u64, BLOCK), at);
        }
        client.logout();
    }
}
