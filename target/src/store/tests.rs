//! Both engines against a model, and what must happen when something is wrong.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use proptest::prelude::*;
use rblk_fabric::{PageKind, Region};
use tempfile::TempDir;

use super::*;

const VOLUME: VolumeIndex = VolumeIndex(3);
const MIB: usize = 1 << 20;
const MIB32: u32 = 1 << 20;

/// An engine and a way to let it work.
trait Engine: Store {
    fn work(&mut self);

    /// Submits everything, works until all of it is done and returns the results in the order of `ops`.
    fn run(&mut self, ops: &[OpKind]) -> Vec<Result<u32, Errno>> {
        let mut results = vec![None; ops.len()];
        let mut done = Vec::new();
        let mut next = 0;
        let deadline = Instant::now() + Duration::from_secs(60);
        while results.iter().any(Option::is_none) {
            assert!(Instant::now() < deadline, "{} ops never ended", self.in_flight());
            while let Some(&kind) = ops.get(next) {
                let op = Op { token: OpToken(next as u64), volume: VOLUME, kind };
                match self.submit(op) {
                    Ok(()) => next += 1,
                    Err(back) => {
                        assert_eq!(back, op);
                        break;
                    }
                }
            }
            self.work();
            self.reap(&mut done);
            for OpDone { token, result } in done.drain(..) {
                let place = &mut results[usize::try_from(token.0).unwrap()];
                assert_eq!(place.replace(result), None, "done twice");
            }
        }
        assert_eq!(self.in_flight(), 0);
        results.into_iter().map(Option::unwrap).collect()
    }

    fn run_one(&mut self, op: OpKind) -> Result<u32, Errno> {
        self.run(&[op])[0]
    }
}

impl Engine for UringStore {
    fn work(&mut self) {
        self.turn(Wait::Until(Duration::from_secs(1)), &mut WatchSet::default()).unwrap();
    }
}

impl Engine for SyncStore {
    fn work(&mut self) {}
}

/// Next to the test program: on a disk, where the system's temporary directory may be in memory.
fn directory() -> TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn file(directory: &Path, name: &str, size: u64) -> PathBuf {
    let path = directory.join(name);
    File::create(&path).unwrap().set_len(size).unwrap();
    path
}

fn options(block_size: u32, direct: Direct) -> OpenOptions {
    OpenOptions { block_size, direct, ..OpenOptions::default() }
}

fn region(bytes: usize) -> Arc<Region> {
    Region::allocate(bytes, PageKind::Normal).unwrap()
}

fn uring(region: &Arc<Region>, capacity: u32, backing: &Arc<Backing>) -> UringStore {
    let options = UringOptions { capacity, volumes: 4, registered: None };
    let mut store = UringStore::new(Arc::clone(region), &options).unwrap();
    store.add_volume(VOLUME, Arc::clone(backing)).unwrap();
    store
}

fn sync(region: &Arc<Region>, backing: &Arc<Backing>) -> SyncStore {
    let mut store = SyncStore::new(Arc::clone(region), 4, 64);
    store.add_volume(VOLUME, Arc::clone(backing)).unwrap();
    store
}

/// Both engines over one backing of a file of `size` bytes in blocks of 512 bytes.
fn on_both(path: &Path, check: impl Fn(&mut dyn EngineOf, &Region)) {
    let backing = Arc::new(Backing::open(path, &options(512, Direct::Preferred)).unwrap());
    let region = region(8 * MIB);
    check(&mut uring(&region, 16, &backing), &region);
    check(&mut sync(&region, &backing), &region);
}

/// `Engine`, for `dyn`.
trait EngineOf {
    fn one(&mut self, op: OpKind) -> Result<u32, Errno>;
}

impl<E: Engine> EngineOf for E {
    fn one(&mut self, op: OpKind) -> Result<u32, Errno> {
        self.run_one(op)
    }
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

fn read(offset: u64, extent_offset: usize, len: u32) -> OpKind {
    OpKind::Read { offset, extent_offset, len }
}

fn write(offset: u64, extent_offset: usize, len: u32) -> OpKind {
    OpKind::Write { offset, extent_offset, len, fua: false }
}

// ---- Against the model --------------------------------------------------------------------------------

const BLOCKS: usize = 96;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write { fua: bool, seed: u8 },
    Flush,
    Discard,
    WriteZeroes { may_unmap: bool },
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => Just(Kind::Read),
        4 => (any::<bool>(), any::<u8>()).prop_map(|(fua, seed)| Kind::Write { fua, seed }),
        1 => Just(Kind::Flush),
        1 => Just(Kind::Discard),
        1 => any::<bool>().prop_map(|may_unmap| Kind::WriteZeroes { may_unmap }),
    ]
}

/// Rounds of ops. The ops of one round run together: their ranges are parts of the volume cut at the given
/// places, so none overlaps another.
fn rounds() -> impl Strategy<Value = Vec<Vec<(Kind, usize, usize)>>> {
    let round =
        (prop::collection::vec(kind(), 1..12), prop::collection::btree_set(0..=BLOCKS, 2..24));
    prop::collection::vec(round, 1..12).prop_map(|rounds| {
        rounds
            .into_iter()
            .map(|(kinds, cuts)| {
                let cuts: Vec<_> = cuts.into_iter().collect();
                cuts.windows(2)
                    .zip(kinds)
                    .map(|(cut, kind)| (kind, cut[0], cut[1] - cut[0]))
                    .collect()
            })
            .collect()
    })
}

fn pattern(seed: u8, at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(|i| seed ^ (i % 251).to_le_bytes()[0]).collect()
}

/// Runs the rounds on an engine and on a `Vec`, and compares everything read, and at last the whole volume.
fn compare(
    engine: &mut impl Engine,
    region: &Region,
    block: usize,
    rounds: &[Vec<(Kind, usize, usize)>],
) -> Result<(), TestCaseError> {
    let mut model = vec![0; BLOCKS * block];
    for round in rounds {
        let mut ops = Vec::new();
        let mut expected = Vec::new();
        for &(kind, first, blocks) in round {
            // The place in the region is that in the volume, so extents are apart as ranges are.
            let (at, len) = (first * block, blocks * block);
            let (offset, bytes) = (at as u64, len as u64);
            let len32 = u32::try_from(len).unwrap();
            let (op, result) = match kind {
                Kind::Read => {
                    region.write(at, &vec![0xEE; len]);
                    (read(offset, at, len32), len32)
                }
                Kind::Write { fua, seed } => {
                    let data = pattern(seed, at, len);
                    region.write(at, &data);
                    model[at..at + len].copy_from_slice(&data);
                    (OpKind::Write { offset, extent_offset: at, len: len32, fua }, len32)
                }
                Kind::Flush => (OpKind::Flush, 0),
                Kind::Discard => {
                    model[at..at + len].fill(0);
                    (OpKind::Discard { offset, len: bytes }, 0)
                }
                Kind::WriteZeroes { may_unmap } => {
                    model[at..at + len].fill(0);
                    (OpKind::WriteZeroes { offset, len: bytes, may_unmap }, 0)
                }
            };
            ops.push(op);
            expected.push(Ok(result));
        }
        prop_assert_eq!(engine.run(&ops), expected);
        for &(kind, first, blocks) in round {
            if matches!(kind, Kind::Read) {
                let mut got = vec![0; blocks * block];
                region.read(first * block, &mut got);
                prop_assert!(
                    got == model[first * block..][..got.len()],
                    "read of {blocks} at {first}"
                );
            }
        }
    }
    let all = u32::try_from(model.len()).unwrap();
    prop_assert_eq!(engine.run(&[read(0, 0, all)]), [Ok(all)]);
    let mut got = vec![0; model.len()];
    region.read(0, &mut got);
    prop_assert!(got == model, "the volume at the end");
    Ok(())
}

fn both_agree(
    directory: &Path,
    block: usize,
    direct: Direct,
    rounds: &[Vec<(Kind, usize, usize)>],
) -> Result<(), TestCaseError> {
    let block_size = u32::try_from(block).unwrap();
    let region = region(BLOCKS * block);
    let open = |name| {
        let path = file(directory, name, (BLOCKS * block) as u64);
        (Arc::new(Backing::open(&path, &options(block_size, direct)).unwrap()), path)
    };
    let (ours, ours_path) = open("uring");
    let (reference, reference_path) = open("sync");
    compare(&mut uring(&region, 4, &ours), &region, block, rounds)?;
    compare(&mut sync(&region, &reference), &region, block, rounds)?;
    // The same files in the eyes of everyone else.
    prop_assert!(fs::read(ours_path).unwrap() == fs::read(reference_path).unwrap());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn engines_agree_in_blocks_of_512(rounds in rounds()) {
        both_agree(directory().path(), 512, Direct::Preferred, &rounds)?;
    }

    #[test]
    fn engines_agree_in_blocks_of_4096(rounds in rounds()) {
        both_agree(directory().path(), 4096, Direct::Preferred, &rounds)?;
    }

    #[test]
    fn engines_agree_through_the_page_cache(rounds in rounds()) {
        both_agree(directory().path(), 512, Direct::Off, &rounds)?;
    }

    // tmpfs has no ZERO_RANGE: here zeroes are written.
    #[test]
    fn engines_agree_on_tmpfs(rounds in rounds()) {
        match tempfile::tempdir_in("/dev/shm") {
            Ok(directory) => both_agree(directory.path(), 512, Direct::Preferred, &rounds)?,
            Err(error) => eprintln!("skipped: no tmpfs to use: {error}"),
        }
    }
}

/// A loop device over a file, gone when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(file: &Path, block_size: &str) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: only root can make a loop device");
            return None;
        }
        let out =
            Command::new("losetup").args(["-f", "--show", "-b", block_size]).arg(file).output();
        match out {
            Ok(out) if out.status.success() => {
                Some(Self(PathBuf::from(String::from_utf8(out.stdout).unwrap().trim())))
            }
            other => {
                eprintln!("skipped: no loop device: {other:?}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

#[test]
fn block_device() {
    let directory = directory();
    let file = file(directory.path(), "disk", 64 * MIB as u64);
    let Some(device) = LoopDevice::attach(&file, "4096") else { return };
    let error = Backing::open(&device.0, &options(512, Direct::Required)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misaligned);
    assert!(
        error.to_string().contains("blocks of 4096 bytes, the volume has block_size 512"),
        "{error}"
    );

    let backing = Arc::new(Backing::open(&device.0, &options(4096, Direct::Required)).unwrap());
    assert_eq!((backing.kind(), backing.size_bytes()), (BackingKind::BlockDevice, 64 * MIB as u64));
    assert!(backing.direct() && backing.alignment() == 4096);
    assert!(backing.can_discard() && backing.discard_granularity() >= 512, "{backing:?}");
    let error = Backing::open(&device.0, &options(4096, Direct::Required)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Locked);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");

    let region = region(8 * MIB);
    let mut store = uring(&region, 16, &backing);
    let bytes = 4 * MIB32;
    region.write(0, &pattern(7, 0, 4 * MIB));
    let fua = OpKind::Write { offset: 8 * MIB as u64, extent_offset: 0, len: bytes, fua: true };
    let zeroes = |at: usize, may_unmap| OpKind::WriteZeroes {
        offset: at as u64,
        len: MIB as u64,
        may_unmap,
    };
    assert_eq!(store.run(&[fua, write(0, 0, bytes)]), [Ok(bytes), Ok(bytes)]);
    assert_eq!(store.run_one(OpKind::Flush), Ok(0));
    let blocks = fs::metadata(&file).unwrap().blocks();
    let discard = OpKind::Discard { offset: 0, len: 4 * MIB as u64 };
    let changes = [discard, zeroes(8 * MIB, false), zeroes(9 * MIB, true)];
    assert_eq!(store.run(&changes), [Ok(0), Ok(0), Ok(0)]);
    assert!(backing.can_discard(), "the kernel refused discard");
    assert!(fs::metadata(&file).unwrap().blocks() < blocks, "discard reached the file below");
    assert_eq!(store.run_one(read(8 * MIB as u64, 4 * MIB, bytes)), Ok(bytes));
    let mut got = vec![1; 4 * MIB];
    region.read(4 * MIB, &mut got);
    assert!(
        got[..2 * MIB].iter().all(|&b| b == 0) && got[2 * MIB..] == pattern(7, 2 * MIB, 2 * MIB)
    );
    assert_eq!(store.run_one(read(64 * MIB as u64, 0, 4096)), Err(Errno::EINVAL));
    drop(store);
    drop(backing);
    Backing::open(&device.0, &options(4096, Direct::Required)).unwrap();
}

// ---- Opening ------------------------------------------------------------------------------------------

#[test]
fn opening_says_what_is_wrong() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let open = |path: &Path| Backing::open(path, &options(4096, Direct::Preferred)).unwrap_err();
    let check = |path: &Path, kind: StoreErrorKind, words: &[&str]| {
        let error = open(path);
        let text = error.to_string();
        assert_eq!(error.kind(), kind, "{text}");
        for word in words.iter().chain([&path.to_str().unwrap()]) {
            assert!(text.contains(word), "{text:?} lacks {word:?}");
        }
    };
    check(&at("none"), StoreErrorKind::NotFound, &["truncate -s"]);
    check(&at("none").join("below"), StoreErrorKind::NotFound, &[]);
    check(directory.path(), StoreErrorKind::Io, &["is a directory"]);
    check(Path::new("/dev/null"), StoreErrorKind::Io, &["character device"]);
    file(directory.path(), "empty", 0);
    check(&at("empty"), StoreErrorKind::BadSize, &["size is 0", "truncate -s 64G"]);
    file(directory.path(), "odd", 8192 + 512);
    check(&at("odd"), StoreErrorKind::BadSize, &["8704", "4096", "truncate -s 12288"]);
    assert_eq!(
        Backing::open(&at("odd"), &options(600, Direct::Off)).unwrap_err().to_string(),
        "block_size 600: must be a power of two between 512 and 65536"
    );
}

#[test]
fn opening_without_permission() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    if is_root() {
        // Root may open anything, except what is marked immutable.
        let immutable =
            |flag| Command::new("chattr").arg(flag).arg(&path).status().is_ok_and(|s| s.success());
        if !immutable("+i") {
            eprintln!("skipped: the file system has no immutable files");
            return;
        }
        let error = Backing::open(&path, &options(4096, Direct::Off)).unwrap_err();
        assert!(immutable("-i"));
        assert_eq!(error.kind(), StoreErrorKind::Permission, "{error}");
    } else {
        let error = Backing::open(&path, &options(4096, Direct::Off)).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Permission, "{error}");
        assert!(error.to_string().contains("read and write"));
    }
}

#[test]
fn direct_io_is_reported() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let direct =
        |direct| Backing::open(&path, &options(4096, direct)).map(|backing| backing.direct());
    assert!(!direct(Direct::Off).unwrap());
    match direct(Direct::Required) {
        Ok(on) => assert!(on && direct(Direct::Preferred).unwrap()),
        Err(StoreError::NoDirect { .. }) => assert!(!direct(Direct::Preferred).unwrap()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn one_writer_or_many_readers() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let writing = options(4096, Direct::Off);
    let reading = OpenOptions { read_only: true, ..writing };
    let writer = Backing::open(&path, &writing).unwrap();
    for options in [&writing, &reading] {
        let error = Backing::open(&path, options).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Locked);
        let me = format!("process {} (", std::process::id());
        assert!(error.to_string().contains(&me), "{error}");
    }
    assert_eq!(open_in_child(&path, &[]), "Locked");
    drop(writer);
    let reader = Backing::open(&path, &reading).unwrap();
    Backing::open(&path, &reading).unwrap();
    assert_eq!(Backing::open(&path, &writing).unwrap_err().kind(), StoreErrorKind::Locked);
    assert_eq!(open_in_child(&path, &[]), "Locked");
    drop(reader);
    assert_eq!(open_in_child(&path, &[]), "open");
}

/// Runs `child` below in a process of its own, with a wrapper before it, and returns its last line.
fn open_in_child(path: &Path, wrapper: &[&str]) -> String {
    let out = child_command(path, wrapper).output().unwrap();
    String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .find_map(|line| line.strip_prefix("child: "))
        .map_or_else(|| panic!("{}", String::from_utf8_lossy(&out.stderr)), str::to_owned)
}

fn child_command(path: &Path, wrapper: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut words = wrapper.iter().map(std::ffi::OsStr::new).chain([program.as_os_str()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args([
        "--exact",
        "store::tests::child",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env("RBLK_TEST_CHILD", path).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Not a test: the other process of the tests that need one.
#[test]
#[ignore = "run by other tests"]
fn child() {
    let Some(path) = std::env::var_os("RBLK_TEST_CHILD") else { return };
    let open = options(512, Direct::Preferred);
    let backing = match Backing::open(Path::new(&path), &open) {
        Ok(backing) => Arc::new(backing),
        Err(error) => {
            println!("\nchild: {:?}", error.kind());
            return;
        }
    };
    let Some(work) = std::env::var_os("RBLK_TEST_WORK") else {
        println!("\nchild: open");
        return;
    };
    let region = region(16 * MIB);
    let mut store = uring(&region, 16, &backing);
    if work == "once" {
        let result = store.run(&[write(0, 4096, 8192), read(0, 0, 4096)]);
        println!("\nchild: {:?} {result:?}", store.warnings());
        return;
    }
    // Writes until killed.
    println!("\nchild: writing");
    loop {
        store
            .run(&[write(0, 0, 4 * MIB32), write(4 * MIB as u64, 0, 4 * MIB32), OpKind::Flush])
            .into_iter()
            .for_each(|result| assert!(result.is_ok()));
    }
}

#[test]
fn lock_of_a_killed_writer_is_free_when_its_io_has_ended() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8 * MIB as u64);
    let mut child = child_command(&path, &[]).env("RBLK_TEST_WORK", "for ever").spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut text = String::new();
    while !text.contains("child: writing") {
        let mut byte = [0; 64];
        let bytes = out.read(&mut byte).unwrap();
        assert!(bytes > 0, "{text}");
        text += &String::from_utf8_lossy(&byte[..bytes]);
    }
    std::thread::sleep(Duration::from_millis(50));
    let error = Backing::open(&path, &options(512, Direct::Off)).unwrap_err();
    assert!(error.to_string().contains(&format!("process {} (", child.id())), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = Instant::now();
    let waiting = OpenOptions { lock_wait: Duration::from_secs(30), ..options(512, Direct::Off) };
    Backing::open(&path, &waiting).unwrap();
    eprintln!("the lock was free {:?} after the process had ended", killed.elapsed());
}

#[test]
fn works_where_memory_cannot_be_registered() {
    if !is_root() {
        eprintln!("skipped: only root can run a process without CAP_IPC_LOCK here");
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let limited = ["prlimit", "--memlock=1048576:1048576", "setpriv", "--bounding-set=-ipc_lock"];
    if !limited.iter().step_by(2).all(|tool| Command::new(tool).arg("--version").output().is_ok()) {
        eprintln!("skipped: no prlimit and setpriv");
        return;
    }
    let mut command = child_command(&path, &limited);
    let out = command.env("RBLK_TEST_WORK", "once").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        text.contains("PlainBuffers { bytes: 16777216, errno: ENOMEM }] [Ok(8192), Ok(4096)]"),
        "{text}"
    );
}

// ---- Refusals and faults ------------------------------------------------------------------------------

#[test]
fn refuses_what_is_out_of_range() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    on_both(&path, |engine, region| {
        let end = MIB as u64;
        let huge = u64::MAX - 511;
        for op in [
            read(end, 0, 512),
            write(end - 512, 0, 1024),
            read(huge, 0, 4096),
            read(0, region.len() - 512, 1024),
            write(0, usize::MAX - 100, 512),
            OpKind::Discard { offset: end - 512, len: 1024 },
            OpKind::Discard { offset: 512, len: u64::MAX },
            OpKind::WriteZeroes { offset: 0, len: end + 512, may_unmap: false },
        ] {
            assert_eq!(engine.one(op), Err(Errno::EINVAL), "{op:?}");
        }
        assert_eq!(engine.one(read(0, 0, 0)), Ok(0));
        assert_eq!(engine.one(OpKind::Discard { offset: end, len: 0 }), Ok(0));
    });
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB as u64);
}

#[test]
fn read_only_backing_refuses_changes() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let options = OpenOptions { read_only: true, ..options(512, Direct::Preferred) };
    let backing = Arc::new(Backing::open(&path, &options).unwrap());
    assert!(backing.read_only() && !backing.can_discard() && !backing.can_zero_fast());
    let region = region(MIB);
    let changes = [
        write(0, 0, 512),
        OpKind::Discard { offset: 0, len: 512 },
        OpKind::WriteZeroes { offset: 0, len: 512, may_unmap: true },
    ];
    let all = |engine: &mut dyn EngineOf| {
        for op in changes {
            assert_eq!(engine.one(op), Err(Errno::EROFS));
        }
        assert_eq!(engine.one(read(0, 0, 512)), Ok(512));
        assert_eq!(engine.one(OpKind::Flush), Ok(0));
    };
    all(&mut uring(&region, 4, &backing));
    all(&mut sync(&region, &backing));
}

#[test]
fn file_that_shrank_is_an_io_error() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    for (size, direct) in [
        (8192, Direct::Preferred),
        (8192, Direct::Off),
        (5000, Direct::Preferred),
        (5000, Direct::Off),
    ] {
        File::options().write(true).open(&path).unwrap().set_len(MIB as u64).unwrap();
        let backing = Arc::new(Backing::open(&path, &options(512, direct)).unwrap());
        File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        let region = region(MIB);
        let check = |engine: &mut dyn EngineOf| {
            assert_eq!(engine.one(read(0, 0, 4096)), Ok(4096));
            assert_eq!(
                engine.one(read(4096, 0, 16384)),
                Err(Errno::EIO),
                "across the end at {size}"
            );
            assert_eq!(engine.one(read(65536, 0, 4096)), Err(Errno::EIO), "past the end");
        };
        let mut store = uring(&region, 4, &backing);
        check(&mut store);
        assert_eq!(store.counters().errors, 2);
        check(&mut sync(&region, &backing));
        assert!(matches!(
            backing.refresh_size(),
            Err(StoreError::Shrank { .. } | StoreError::NotWholeBlocks { .. })
        ));
        assert_eq!(backing.size_bytes(), MIB as u64);
    }
}

#[test]
fn grown_file_is_served_after_a_look() {
    let directory = directory();
    let path = file(directory.path(), "disk", 4096);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    let mut store = uring(&region, 4, &backing);
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    assert_eq!(store.run_one(read(4096, 0, 4096)), Err(Errno::EINVAL));
    assert_eq!(backing.refresh_size().unwrap(), 8192);
    assert_eq!(store.run_one(read(4096, 0, 4096)), Ok(4096));
}

/// A tmpfs of 1 MiB, gone when dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: only root can mount a tmpfs");
            return None;
        }
        let directory = directory();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(directory.path());
        assert!(mount.status().unwrap().success(), "cannot mount a tmpfs");
        Some(Self(directory))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn full_disk_is_an_error_of_that_write() {
    let Some(disk) = SmallDisk::mount() else { return };
    let path = file(disk.0.path(), "disk", 8 * MIB as u64);
    on_both(&path, |engine, _| {
        assert_eq!(engine.one(write(0, 0, 4 * MIB32)), Err(Errno::ENOSPC));
        assert_eq!(engine.one(OpKind::Discard { offset: 0, len: 8 * MIB as u64 }), Ok(0));
        assert_eq!(engine.one(write(0, 0, 65536)), Ok(65536));
        // Zeroes have to be written here, and do not fit.
        let zeroes = OpKind::WriteZeroes { offset: 0, len: 8 * MIB as u64, may_unmap: false };
        assert_eq!(engine.one(zeroes), Err(Errno::ENOSPC));
        assert_eq!(
            engine.one(OpKind::WriteZeroes { offset: 0, len: 8 * MIB as u64, may_unmap: true }),
            Ok(0)
        );
    });
}

#[test]
fn ranges_are_64_bit() {
    const TIB: u64 = 1 << 40;
    let directory = directory();
    let path = file(directory.path(), "disk", 3 * TIB);
    on_both(&path, |engine, region| {
        let at = 2 * TIB + 12288;
        region.write(0, &pattern(9, 0, 4096));
        assert_eq!(engine.one(write(at, 0, 4096)), Ok(4096));
        assert_eq!(engine.one(read(at, 4096, 4096)), Ok(4096));
        let mut got = [0; 4096];
        region.read(4096, &mut got);
        assert!(got[..] == pattern(9, 0, 4096));
        assert_eq!(engine.one(OpKind::Discard { offset: 512, len: 3 * TIB - 512 }), Ok(0));
        assert_eq!(engine.one(read(at, 4096, 4096)), Ok(4096));
        region.read(4096, &mut got);
        assert_eq!(got, [0; 4096]);
    });
}

// ---- The ring -----------------------------------------------------------------------------------------

fn small_store(capacity: u32) -> (TempDir, Arc<Region>, UringStore) {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    let store = uring(&region, capacity, &backing);
    (directory, region, store)
}

#[test]
fn full_store_gives_the_op_back() {
    let (_directory, _region, mut store) = small_store(2);
    let op = |token| Op { token: OpToken(token), volume: VOLUME, kind: read(0, 0, 512) };
    let unknown = Op { volume: VolumeIndex(99), ..op(2) };
    store.submit(op(1)).unwrap();
    store.submit(unknown).unwrap();
    assert_eq!(store.submit(op(3)), Err(op(3)));
    assert_eq!(store.in_flight(), 2);
    let mut done = Vec::new();
    while store.in_flight() > 0 {
        store.work();
        store.reap(&mut done);
    }
    done.sort_by_key(|done| done.token);
    let results: Vec<_> = done.iter().map(|done| done.result).collect();
    assert_eq!(results, [Ok(512), Err(Errno::ENXIO)]);
    store.submit(op(3)).unwrap();
}

#[test]
fn volumes_come_and_go() {
    let (directory, region, mut store) = small_store(4);
    let other = file(directory.path(), "other", MIB as u64);
    let other = Arc::new(Backing::open(&other, &options(512, Direct::Preferred)).unwrap());
    let add =
        |store: &mut UringStore, index| store.add_volume(VolumeIndex(index), Arc::clone(&other));
    assert!(matches!(add(&mut store, 3), Err(StoreError::Taken { index: 3, .. })));
    assert!(matches!(add(&mut store, 4), Err(StoreError::TableFull { index: 4, volumes: 4 })));
    assert!(matches!(store.remove_volume(VolumeIndex(0)), Err(StoreError::NoVolume { index: 0 })));
    region.write(0, &[5; 512]);
    store.submit(Op { token: OpToken(0), volume: VOLUME, kind: write(0, 0, 512) }).unwrap();
    assert!(matches!(store.remove_volume(VOLUME), Err(StoreError::Busy { ops: 1, .. })));
    let mut done = Vec::new();
    while done.is_empty() {
        store.work();
        store.reap(&mut done);
    }
    let path = store.remove_volume(VOLUME).unwrap().path().to_owned();
    // Out of the table and dropped: the lock is free.
    drop(Backing::open(&path, &options(512, Direct::Off)).unwrap());
    assert_eq!(store.run_one(read(0, 0, 512)), Err(Errno::ENXIO));
    add(&mut store, 3).unwrap();
    assert_eq!(store.run_one(read(0, 0, 512)), Ok(512));
    let mut got = [9; 512];
    region.read(0, &mut got);
    assert_eq!(got, [0; 512]);
}

#[test]
fn turns_without_work_do_not_enter_the_kernel() {
    let (_directory, _region, mut store) = small_store(4);
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    store.watch(event.as_raw_fd(), WatchToken(0)).unwrap();
    let mut woken = WatchSet::default();
    store.turn(Wait::No, &mut woken).unwrap();
    assert_eq!(store.counters().enters, 1);
    for _ in 0..1000 {
        store.turn(Wait::No, &mut woken).unwrap();
    }
    assert_eq!(store.counters().enters, 1);
    // Polling alone sees a completion that comes later from another thread of the kernel, with one enter to
    // submit and at most a few to collect.
    store.submit(Op { token: OpToken(1), volume: VOLUME, kind: OpKind::Flush }).unwrap();
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while done.is_empty() && Instant::now() < deadline {
        store.turn(Wait::No, &mut woken).unwrap();
        store.reap(&mut done);
    }
    assert_eq!(done.len(), 1);
    assert!(store.counters().enters <= 4, "{:?}", store.counters());
    assert_eq!(store.counters().sleeps, 0);
}

#[test]
fn sleeps_until_woken_or_the_time_is_over() {
    let (_directory, _region, mut store) = small_store(4);
    let event = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap());
    let token = WatchToken(63);
    store.watch(event.as_raw_fd(), token).unwrap();
    assert!(store.watch(event.as_raw_fd(), token).is_err());
    assert!(store.watch(event.as_raw_fd(), WatchToken(64)).is_err());
    assert!(store.watch(-1, WatchToken(1)).is_err());
    let mut woken = WatchSet::default();
    let started = Instant::now();
    store.turn(Wait::Until(Duration::from_millis(50)), &mut woken).unwrap();
    assert!(started.elapsed() >= Duration::from_millis(50) && woken.is_empty());
    // Many times, so that the multishot poll is really used again and again.
    for _ in 0..100 {
        let sender = Arc::clone(&event);
        let thread = std::thread::spawn(move || sender.write(1).unwrap());
        while !woken.contains(token) {
            store.turn(Wait::Until(Duration::from_secs(10)), &mut woken).unwrap();
        }
        woken.clear();
        thread.join().unwrap();
        event.read().unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(store.counters().watch_errors, 0);
    // The longest sleep there is can be said.
    event.write(1).unwrap();
    store.turn(Wait::Until(Duration::MAX), &mut woken).unwrap();
    assert!(woken.contains(token));
    event.read().unwrap();
    // Something there before the watch wakes too; an unwatched token does not.
    store.unwatch(token);
    event.write(1).unwrap();
    let settle = |store: &mut UringStore| {
        let mut woken = WatchSet::default();
        store.turn(Wait::Until(Duration::from_millis(20)), &mut woken).unwrap();
        store.turn(Wait::Until(Duration::from_millis(20)), &mut woken).unwrap();
        woken
    };
    assert!(settle(&mut store).is_empty());
    store.watch(event.as_raw_fd(), token).unwrap();
    assert!(settle(&mut store).contains(token));
    store.unwatch(token);
    store.unwatch(token);
    // On and off within a turn, more often than the queue has room for.
    for _ in 0..1000 {
        store.watch(event.as_raw_fd(), token).unwrap();
        store.unwatch(token);
    }
    settle(&mut store);
    assert!(settle(&mut store).is_empty());
    assert_eq!(store.run_one(read(0, 0, 512)), Ok(512));
}

#[test]
fn a_store_belongs_to_the_thread_of_its_first_turn() {
    let (_directory, _region, mut store) = small_store(4);
    store.submit(Op { token: OpToken(1), volume: VOLUME, kind: read(0, 0, 512) }).unwrap();
    let mut store = std::thread::spawn(move || {
        let mut done = Vec::new();
        while done.is_empty() {
            store.work();
            store.reap(&mut done);
        }
        store
    })
    .join()
    .unwrap();
    if store.warnings().contains(&Warning::NoDeferredCompletions) {
        return;
    }
    store.submit(Op { token: OpToken(2), volume: VOLUME, kind: read(0, 0, 512) }).unwrap();
    let error = store.turn(Wait::No, &mut WatchSet::default()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn a_ring_of_an_older_kernel_works() {
    let (_directory, region, mut store) = small_store(4);
    let backing = store.remove_volume(VOLUME).unwrap();
    let ring = uring::cooperative(256).unwrap();
    let options = UringOptions { capacity: 4, volumes: 4, registered: None };
    let mut store = UringStore::with_ring(ring, region, &options).unwrap();
    assert_eq!(store.warnings(), [Warning::NoDeferredCompletions]);
    store.add_volume(VOLUME, backing).unwrap();
    let ops = [write(0, 0, 65536), OpKind::Flush, read(65536, 65536, 65536)];
    assert_eq!(store.run(&ops), [Ok(65536), Ok(0), Ok(65536)]);
    // Seen by polling too.
    store.submit(Op { token: OpToken(1), volume: VOLUME, kind: OpKind::Flush }).unwrap();
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while done.is_empty() && Instant::now() < deadline {
        store.turn(Wait::No, &mut WatchSet::default()).unwrap();
        store.reap(&mut done);
    }
    assert_eq!(done.len(), 1);
}

#[test]
fn dropping_a_store_ends_its_ops() {
    let (_directory, region, mut store) = small_store(16);
    for token in 0..16 {
        let kind = write(token * 4096, 0, 4096);
        store.submit(Op { token: OpToken(token), volume: VOLUME, kind }).unwrap();
    }
    store.turn(Wait::No, &mut WatchSet::default()).unwrap();
    drop(store);
    assert_eq!(Arc::strong_count(&region), 1, "ended, so nothing is leaked");
}

#[test]
fn dropping_a_store_that_cannot_end_its_ops_leaks_their_memory() {
    let (_directory, region, mut store) = small_store(16);
    std::thread::scope(|scope| {
        let store = &mut store;
        scope.spawn(|| store.turn(Wait::No, &mut WatchSet::default()).unwrap());
    });
    if store.warnings().contains(&Warning::NoDeferredCompletions) {
        return;
    }
    // Another thread's ring: nothing can be submitted or collected here.
    store.submit(Op { token: OpToken(1), volume: VOLUME, kind: write(0, 0, 4096) }).unwrap();
    drop(store);
    assert_eq!(Arc::strong_count(&region), 2);
}

#[test]
fn part_of_the_region_registered() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    for registered in [0..0, 4096..65536, 0..2 * MIB] {
        let options = UringOptions { capacity: 4, volumes: 4, registered: Some(registered) };
        let mut store = UringStore::new(Arc::clone(&region), &options).unwrap();
        assert_eq!(store.warnings(), []);
        store.add_volume(VOLUME, Arc::clone(&backing)).unwrap();
        region.write(4096, &pattern(3, 0, 8192));
        // Inside, across the end, outside.
        assert_eq!(store.run_one(write(0, 4096, 8192)), Ok(8192));
        assert_eq!(store.run_one(read(0, 65536 - 4096, 8192)), Ok(8192));
        assert_eq!(store.run_one(read(0, 131_072, 8192)), Ok(8192));
        for at in [65536 - 4096, 131_072] {
            let mut got = [0; 8192];
            region.read(at, &mut got);
            assert!(got[..] == pattern(3, 0, 8192));
        }
    }
}

#[test]
#[ignore = "pins 1 GiB of memory"]
fn region_of_more_than_one_piece() {
    const PIECE: usize = 1 << 30;
    let directory = directory();
    let path = file(directory.path(), "disk", 8 * MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(PIECE + 8 * MIB);
    let mut store = uring(&region, 16, &backing);
    assert_eq!(store.warnings(), []);
    let bytes = 4 * MIB32;
    // The last extent of the first piece, the first of the second, and what an arena never makes: across.
    for at in [PIECE - 4 * MIB, PIECE, PIECE - 4096] {
        region.write(at, &pattern(1, at, 4 * MIB));
        assert_eq!(store.run_one(write(0, at, bytes)), Ok(bytes));
        region.zero(at, 4 * MIB);
        assert_eq!(store.run_one(read(0, at, bytes)), Ok(bytes));
        let mut got = vec![0; 4 * MIB];
        region.read(at, &mut got);
        assert!(got == pattern(1, at, 4 * MIB));
    }
}
