//! Both engines against a model, and their behaviour under faults.

mod device;
mod errors;
mod flushes;
mod group_images;
mod image;
mod model;
mod opening;
mod ring;
mod segments;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_fabric::{PageKind, Region};
use tempfile::TempDir;

use super::*;

const VOLUME: VolumeIndex = VolumeIndex(3);
const MIB: usize = 1 << 20;
const MIB32: u32 = 1 << 20;

/// An op, and its segments of the region.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Io {
    kind: OpKind,
    memory: Vec<Segment>,
}

impl Io {
    fn named(&self, token: u64) -> Op {
        Op { token: OpToken(token), volume: VOLUME, kind: self.kind }
    }
}

/// An engine and a way to let it work.
trait Engine: Store {
    fn work(&mut self);

    fn start(&mut self, token: u64, io: &Io) -> Result<(), Op> {
        self.submit(io.named(token), &io.memory)
    }

    /// Submits all ops, works until they have ended, and returns the results in the order of `all`.
    fn run(&mut self, all: &[Io]) -> Vec<Result<u32, Errno>> {
        let mut results = vec![None; all.len()];
        let mut done = Vec::new();
        let mut next = 0;
        let deadline = Instant::now() + Duration::from_secs(60);
        while results.iter().any(Option::is_none) {
            assert!(Instant::now() < deadline, "{} ops never ended", self.in_flight());
            while let Some(io) = all.get(next) {
                match self.start(next as u64, io) {
                    Ok(()) => next += 1,
                    Err(back) => {
                        assert_eq!(back, io.named(next as u64));
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

    fn run_one(&mut self, io: Io) -> Result<u32, Errno> {
        self.run(&[io])[0]
    }
}

impl Engine for UringStore {
    fn work(&mut self) {
        self.turn(TurnSleep::Until(Duration::from_secs(1)), &mut WatchSet::default()).unwrap();
    }
}

impl Engine for SyncStore {
    fn work(&mut self) {}
}

/// A directory beside the test program: on a disk, where the system's temporary directory may be in
/// memory.
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
fn on_both(path: &Path, check: impl Fn(&mut dyn Engine, &Region)) {
    let backing = Arc::new(Backing::open(path, &options(512, Direct::Preferred)).unwrap());
    let region = region(8 * MIB);
    check(&mut uring(&region, 16, &backing), &region);
    check(&mut sync(&region, &backing), &region);
}

/// I/O works with memory that is aligned as the backing reports, and no better.
fn check_memory_alignment(backing: &Arc<Backing>) {
    let memory = backing.memory_alignment();
    assert!(memory.is_power_of_two() && memory <= 4096, "{memory}");
    let region = region(64 << 10);
    let block = backing.block_size();
    let stride = (block + memory) as usize;
    let segments: Vec<_> = (0..2).map(|i| segment(memory as usize + i * stride, block)).collect();
    let data = pattern(11, 0, 2 * block as usize);
    scatter(&region, &segments, &data);
    let mut store = uring(&region, 4, backing);
    for memory in [&segments[..], &segments[..1]] {
        let len = memory.iter().map(|segment| segment.len).sum();
        assert_eq!(store.run_one(write_from(0, memory, false)), Ok(len), "{memory:?}");
        for segment in memory {
            region.zero(segment.offset, segment.len as usize);
        }
        assert_eq!(store.run_one(read_into(0, memory)), Ok(len), "{memory:?}");
        assert!(gather(&region, memory) == data[..len as usize], "{memory:?}");
    }
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

fn segment(offset: usize, len: u32) -> Segment {
    Segment { offset, len }
}

fn read_into(offset: u64, memory: &[Segment]) -> Io {
    let len = memory.iter().map(|segment| segment.len).sum();
    Io { kind: OpKind::Read { offset, len }, memory: memory.to_vec() }
}

fn write_from(offset: u64, memory: &[Segment], fua: bool) -> Io {
    let len = memory.iter().map(|segment| segment.len).sum();
    Io { kind: OpKind::Write { offset, len, fua }, memory: memory.to_vec() }
}

fn read(offset: u64, at: usize, len: u32) -> Io {
    read_into(offset, &[segment(at, len)])
}

fn write(offset: u64, at: usize, len: u32) -> Io {
    write_from(offset, &[segment(at, len)], false)
}

fn flush() -> Io {
    Io { kind: OpKind::Flush, memory: Vec::new() }
}

fn discard(offset: u64, len: u64) -> Io {
    Io { kind: OpKind::Discard { offset, len }, memory: Vec::new() }
}

fn zeroes(offset: u64, len: u64, may_unmap: bool) -> Io {
    Io { kind: OpKind::WriteZeroes { offset, len, may_unmap }, memory: Vec::new() }
}

/// Bytes that depend on their place.
fn pattern(seed: u8, at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(|i| seed ^ (i % 251).to_le_bytes()[0]).collect()
}

/// The bytes of the segments, one after another.
fn gather(region: &Region, memory: &[Segment]) -> Vec<u8> {
    let mut all = Vec::new();
    for segment in memory {
        let mut part = vec![0; segment.len as usize];
        region.read(segment.offset, &mut part);
        all.extend(part);
    }
    all
}

/// Writes bytes into the segments.
fn scatter(region: &Region, memory: &[Segment], bytes: &[u8]) {
    let mut rest = bytes;
    for segment in memory {
        let (part, after) = rest.split_at(segment.len as usize);
        region.write(segment.offset, part);
        rest = after;
    }
}
