//! Data of requests outside the queue's own buffers: the target moves it to and from memory that
//! other programs share.

#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rblk_config::DigestWish;
use rblk_fabric::{ConnectOptions, PageKind, Region};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::path::{DataPlace, MemoryIndex, Path as QueuePath, QueueMemory};
use rblk_initiator::engine::{Engine, PathEnd, QueueStats};
use rblk_initiator::volume::session::{HostIdentity, QueueWish, Session};
use rblk_protocol::{AccessMode, BlockSize, Features, HostId, Name, QueueDepth, Tag};
use rblk_tests::bed::pattern;
use rblk_tests::program::{DEADLINE, Target};

const IO_MAX: u32 = 64 << 10;
const MEMORY: usize = 256 << 10;

/// A session with one queue, and the memory that it registers.
struct Bed {
    _target: Target,
    runtime: tokio::runtime::Runtime,
    session: Session,
    memory: QueueMemory,
    file: File,
}

impl Bed {
    fn new(dir: &Path) -> Self {
        let target = Target::start(dir, &["--memory", "m=4MiB"]);
        let path = dir.join("memory");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(MEMORY as u64).unwrap();
        let shared = Region::map_file(&file).unwrap();
        let buffers = Region::allocate(4 * stride(DigestWish::Auto), PageKind::Normal).unwrap();
        let memory = QueueMemory { buffers, shared: [shared].into() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let host = HostIdentity { id: HostId([7; 16]), name: Name::new("shared").unwrap() };
        let options = ConnectOptions { timeout: DEADLINE, ..ConnectOptions::default() };
        let connect = Session::connect(&target.address, &options, &host, None, None);
        let session = runtime.block_on(connect).unwrap();
        Self { _target: target, runtime, session, memory, file }
    }

    fn path(&mut self, digest: DigestWish) -> QueuePath {
        let Self { runtime, session, memory, .. } = self;
        runtime.block_on(async {
            let volume = session.open(&Name::new("m").unwrap(), AccessMode::Shared).await.unwrap();
            session.connect_queue(0, wish(digest), volume.handle, memory).await.unwrap()
        })
    }

    /// The bytes that another program finds in its memory.
    fn other_reads(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

fn wish(digest: DigestWish) -> QueueWish {
    QueueWish {
        depth: QueueDepth::new(4).unwrap(),
        io_max_bytes: IO_MAX,
        in_capsule_bytes: 4096,
        features: Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS),
        digest,
        lanes: Some(1),
        queues: 1,
    }
}

fn stride(digest: DigestWish) -> usize {
    wish(digest).buffer_stride()
}

fn engine(memories: usize) -> (Engine, Arc<QueueStats>) {
    let stats = Arc::new(QueueStats::default());
    let engine =
        Engine::new(wish(DigestWish::Off).depth, stride(DigestWish::Auto), Arc::clone(&stats));
    (engine.with_data_max(IO_MAX as usize).with_shared(memories), stats)
}

fn io(op: IoOp, offset: u64, len: usize) -> Io {
    Io::new(op, offset, len as u64, BlockSize::new(4096).unwrap()).unwrap()
}

/// Runs one request with its data at that offset of the shared memory.
fn do_at(engine: &mut Engine, io: Io, offset: usize) -> usize {
    let memory = MemoryIndex::shared(0).unwrap();
    engine.submit_at(Tag(1), io, DataPlace { memory, offset }).unwrap();
    let (begun, mut result) = (Instant::now(), None);
    while result.is_none() {
        assert!(begun.elapsed() < DEADLINE, "a request does not end");
        engine.turn(Instant::now(), |_, ended| result = Some(ended));
    }
    usize::try_from(result.unwrap()).expect("a request failed")
}

#[test]
fn data_moves_between_the_volume_and_the_memory_of_another_program() {
    let dir = tempfile::tempdir().unwrap();
    let mut bed = Bed::new(dir.path());
    let (mut engine, stats) = engine(1);
    let path = bed.path(DigestWish::Off);
    engine.connect(path, Instant::now());
    // In-capsule data, and data by RDMA READ; both come back by RDMA WRITE.
    for (seed, len) in [(3, 4096), (5, IO_MAX as usize)] {
        let bytes = pattern(seed, len);
        bed.file.write_all_at(&bytes, 4096).unwrap();
        assert_eq!(do_at(&mut engine, io(IoOp::Write, 1 << 20, len), 4096), len);
        let before = bed.other_reads(0, 128 << 10);
        assert_eq!(do_at(&mut engine, io(IoOp::Read, 1 << 20, len), 128 << 10), len);
        assert!(bed.other_reads(128 << 10, len) == bytes, "{len} bytes");
        assert!(bed.other_reads(0, 128 << 10) == before, "a read changed other memory");
    }
    assert_eq!(stats.snapshot().copied_bytes, 0);
}

/// The digest of a READ would land behind its data, in memory of the other program.
#[test]
fn a_path_with_digests_is_not_used_with_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut bed = Bed::new(dir.path());
    let (mut engine, _) = engine(1);
    let path = bed.path(DigestWish::Crc32c);
    assert!(path.accept.features.has(Features::DIGEST));
    engine.connect(path, Instant::now());
    let ended = engine.take_ended().map(|(end, _)| end);
    assert_eq!(ended, Some(PathEnd::Unusable));
    assert!(!engine.is_connected());
}

#[test]
fn a_path_that_has_not_registered_the_memory_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let mut bed = Bed::new(dir.path());
    let (mut engine, _) = engine(2);
    let path = bed.path(DigestWish::Off);
    engine.connect(path, Instant::now());
    assert_eq!(engine.take_ended().map(|(end, _)| end), Some(PathEnd::Unusable));
}
