//! [`Writer`]: writes its own blocks, synchronises, and notes the results.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use rblk_rig::seed::Random;
use rblk_tests::lab::{Aligned, BLOCK, DEADLINE, Diary, Fault, FaultyDisk};

use super::WRITERS;
use super::plan::{Plan, Scene, Way};

/// A writer first writes the first block of each of its chunks, then the second of each, and so on.
const CHUNKS: u64 = FaultyDisk::BYTES / FaultyDisk::CHUNK_BYTES;
const CHUNKS_OF_A_WRITER: u64 = (CHUNKS - 1) / WRITERS as u64;
const BLOCKS_OF_A_CHUNK: u64 = FaultyDisk::CHUNK_BYTES / BLOCK as u64;
/// The bursts after the fault, if no write fails.
const BURSTS_AFTER: u64 = 8;

/// State shared by the writers of a round and the test.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) acknowledged: AtomicU64,
    pub(super) faulty: AtomicBool,
}

/// A writer: a thread that stops at its first error.
pub(super) struct Writer {
    pub(super) plan: Arc<Plan>,
    pub(super) way: Way,
    pub(super) diary: Diary,
    pub(super) random: Random,
    pub(super) file: File,
    /// The device, opened so that each write is durable when it is acknowledged.
    pub(super) durable: Option<File>,
    pub(super) shared: Arc<Shared>,
    /// Reports that the writer is ready for the fault.
    pub(super) ready: Option<Sender<()>>,
    pub(super) go: Receiver<()>,
}

/// A step of a writer; an error is noted in the diary, and ends the writer.
type Step = Result<(), ()>;

impl Writer {
    /// The files of a writer: for writes, and for writes that are durable when acknowledged.
    pub(super) fn open(device: &Path, way: Way) -> io::Result<(File, Option<File>)> {
        Ok(match way {
            Way::Direct => (Aligned::open(device, true, 0)?, None),
            Way::Buffered => (File::options().write(true).open(device)?, None),
            Way::Fua => {
                (Aligned::open(device, true, 0)?, Some(Aligned::open(device, true, libc::O_DSYNC)?))
            }
        })
    }

    /// Writes until an error or the end of the scene. Returns the diary.
    pub(super) fn work(mut self) -> Diary {
        let _ = match self.plan.scene {
            Scene::DuringSyncs => self.during_syncs(),
            Scene::BetweenSyncs => self.between_syncs(),
        };
        self.diary
    }

    fn during_syncs(&mut self) -> Step {
        let since = Instant::now();
        while !self.shared.faulty.load(Ordering::Relaxed) {
            self.burst()?;
            if self.shared.acknowledged.load(Ordering::Relaxed) >= self.plan.writes_before {
                self.tell_ready();
            }
            assert!(since.elapsed() < 2 * DEADLINE, "the fault does not come");
        }
        (0..BURSTS_AFTER).try_for_each(|_| self.burst())
    }

    fn between_syncs(&mut self) -> Step {
        self.burst()?;
        for _ in 0..self.random.within(4, 12) {
            self.write(false)?;
        }
        // For a thin pool: all writers together write more than its room.
        if self.plan.fault == Fault::Full {
            for _ in 0..10 {
                self.write(false)?;
            }
        }
        self.tell_ready();
        self.go.recv_timeout(2 * DEADLINE).expect("the fault has come and gone");
        self.write(false)?;
        self.sync()?;
        (0..BURSTS_AFTER / 2).try_for_each(|_| self.burst())
    }

    fn tell_ready(&mut self) {
        if let Some(ready) = self.ready.take() {
            ready.send(()).expect("the test listens");
        }
    }

    /// A few writes, and a sync that covers them.
    fn burst(&mut self) -> Step {
        for _ in 0..self.random.within(1, 3) {
            self.write(self.way == Way::Fua)?;
        }
        if self.way == Way::Fua { Ok(()) } else { self.sync() }
    }

    fn write(&mut self, durable: bool) -> Step {
        let begun = self.diary.begun();
        let again = self.random.chance(120) && begun > 0;
        let place = if again { self.random.below(begun) } else { begun };
        let chunk = 1 + self.diary.writer() + WRITERS as u64 * (place % CHUNKS_OF_A_WRITER);
        let block = chunk * BLOCKS_OF_A_CHUNK + place / CHUNKS_OF_A_WRITER % BLOCKS_OF_A_CHUNK;
        let bytes = self.diary.begin(block);
        let file = if durable { self.durable.as_ref().expect("a second file") } else { &self.file };
        match file.write_all_at(Aligned::of(&bytes).as_ref(), block * BLOCK as u64) {
            Ok(()) if durable => self.diary.cover_last(),
            Ok(()) => self.diary.acknowledge(),
            Err(error) if durable => return self.failed("durable write", &error),
            Err(error) => return self.failed("write", &error),
        }
        self.shared.acknowledged.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn sync(&mut self) -> Step {
        match self.file.sync_data() {
            Ok(()) => self.diary.cover_all(),
            Err(error) => return self.failed("sync", &error),
        }
        Ok(())
    }

    fn failed(&mut self, what: &'static str, error: &io::Error) -> Step {
        self.diary.failed.push((what, error.raw_os_error().unwrap_or(0)));
        Err(())
    }
}
