//! [`Flips`]: bits that flip between an RDMA device and the programs.
//!
//! A library that is preloaded into both daemons (`flip.c`) flips bits in delivered data, before
//! the daemons learn of the delivery. The programs are the ones that users run.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

const SOURCE: &str = include_str!("flip.c");

/// The kinds of deliveries of a device, in the order of `flip.c`.
pub const DELIVERIES: [&str; 6] =
    ["commands", "data in commands", "RDMA READ", "answers", "RDMA WRITE", "trailers"];

/// One flip in this many deliveries of each kind, on average; 0 for none.
pub type FlipRates = [u64; DELIVERIES.len()];

/// The library, compiled, with its plan and its counters.
#[derive(Debug)]
pub struct Flips {
    library: PathBuf,
    counts: PathBuf,
    plan: String,
}

impl Flips {
    /// Compiles the library.
    ///
    /// # Panics
    /// The compiler fails.
    #[must_use]
    pub fn new(lab: &Lab, seed: u64, rates: FlipRates) -> Self {
        let [source, library, counts] =
            ["flip.c", "flip.so", "flips"].map(|name| lab.path(&format!("{seed}-{name}")));
        std::fs::write(&source, SOURCE).expect("writing the source");
        let words = ["cc", "-O1", "-shared", "-fPIC", "-o"].map(str::to_owned);
        let files = [&library, &source].map(|path| path.display().to_string());
        let _ = start(&[&words[..], &files].concat()).finish(2 * DEADLINE).ok();
        File::create(&counts).and_then(|file| file.set_len(4096)).expect("a file of counters");
        let plan = rates.iter().fold(seed.to_string(), |plan, rate| format!("{plan} {rate}"));
        Self { library, counts, plan }
    }

    /// Environment variables that preload the library into both daemons.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("LD_PRELOAD", self.library.display().to_string()),
            ("RBLK_FLIP", self.plan.clone()),
            ("RBLK_FLIP_COUNT", self.counts.display().to_string()),
        ]
    }

    /// Deliveries and flips of each kind so far.
    ///
    /// # Panics
    /// The counters cannot be read.
    #[must_use]
    pub fn counts(&self) -> [(u64, u64); DELIVERIES.len()] {
        let file = File::open(&self.counts).expect("the counters");
        let number = |at: usize| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, 8 * at as u64).expect("a counter");
            u64::from_ne_bytes(bytes)
        };
        std::array::from_fn(|kind| (number(2 * kind), number(2 * kind + 1)))
    }

    /// All flips so far.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts().iter().map(|(_, flips)| flips).sum()
    }
}
