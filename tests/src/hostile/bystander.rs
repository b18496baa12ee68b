//! [`Bystander`]: an honest host that works on its volume while hostile peers attack. It checks
//! every byte that it reads, and notes how long it had to wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rblk_protocol::width::wide64;

use crate::bed::pattern;
use crate::lab::CpuWaits;
use crate::program::Client;

/// Bytes of one request.
const BLOCK: usize = 16 << 10;
/// Blocks that it works on.
const BLOCKS: usize = 64;
/// A longer request also reads how long the ends had no CPU.
const LATE: Duration = Duration::from_millis(200);

/// Observations of a bystander.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Requests that were answered.
    pub requests: u64,
    /// The longest time that one took, without the time in which threads of the target and of this
    /// process were ready to run and had no CPU.
    pub longest: Duration,
}

/// How long the two ends were ready to run and had no CPU. Zero if the kernel does not count that.
#[derive(Debug)]
struct Waits {
    ends: Vec<CpuWaits>,
    until: Duration,
}

/// An honest host. See the module.
#[derive(Debug)]
pub struct Bystander {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Client, Seen)>,
}

fn offset(block: usize) -> u64 {
    wide64(block * BLOCK)
}

fn content(block: usize, round: usize) -> Vec<u8> {
    pattern(wide64(block * 1_000_003 + round), BLOCK)
}

impl Waits {
    fn of(target: u32) -> Self {
        let ends = [target, std::process::id()];
        let counted = ends.into_iter().filter(|_| CpuWaits::are_counted());
        Self { ends: counted.map(CpuWaits::start).collect(), until: Duration::ZERO }
    }

    /// The time since the last call.
    fn anew(&mut self) -> Duration {
        let so_far = self.ends.iter().map(CpuWaits::so_far).sum();
        so_far - std::mem::replace(&mut self.until, so_far).min(so_far)
    }
}

impl Bystander {
    /// Begins to work on a volume of the target with this process id: each round writes a block,
    /// and reads back another one.
    #[must_use]
    pub fn start(mut client: Client, target: u32) -> Self {
        for block in 0..BLOCKS {
            client.write(offset(block), &content(block, 0));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            let mut waits = Waits::of(target);
            let mut rounds = [0; BLOCKS];
            let mut round = 0;
            while !told.load(Ordering::Relaxed) {
                round += 1;
                if round % BLOCKS == 0 {
                    waits.anew();
                }
                let (write, read) = (round % BLOCKS, round * 7 % BLOCKS);
                let begun = Instant::now();
                client.write(offset(write), &content(write, round));
                rounds[write] = round;
                seen.note(begun.elapsed(), &mut waits);
                let begun = Instant::now();
                let bytes = client.read(offset(read), BLOCK);
                seen.note(begun.elapsed(), &mut waits);
                assert!(
                    bytes == content(read, rounds[read]),
                    "block {read} of the bystander changed"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            for (block, of) in rounds.into_iter().enumerate() {
                let bytes = client.read(offset(block), BLOCK);
                assert!(bytes == content(block, of), "block {block} of the bystander changed");
            }
            (client, seen)
        });
        Self { stop, thread }
    }

    /// Whether it still works.
    #[must_use]
    pub fn is_well(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Reads everything back and ends.
    ///
    /// # Panics
    /// A byte was wrong, or a request failed.
    pub fn end(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok((client, seen)) => {
                client.logout();
                seen
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Seen {
    fn note(&mut self, took: Duration, waits: &mut Waits) {
        self.requests += 1;
        // Reading the waits costs more than a request.
        let no_cpu = if took > LATE { waits.anew() } else { Duration::ZERO };
        self.longest = self.longest.max(took.saturating_sub(no_cpu));
    }
}
