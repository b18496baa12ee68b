//! perftest in the same run, on the device that rblk and nvme-rdma use: what the wire itself gives,
//! round by round.

use std::net::IpAddr;

use anyhow::Result;

use crate::fabric::perftest::{self, PerfPlace};
use crate::fabric::sysfs;
use crate::result::Run;
use crate::{child, interrupt};

/// What is run: the program, bytes, QPs. A mount on a software device has two QPs for a queue, and
/// one on a card.
const RUNS: [(&str, u64, u32); 6] = [
    ("ib_send_lat", 64, 1),
    ("ib_write_lat", 4096, 1),
    ("ib_write_bw", 128 << 10, 1),
    ("ib_read_bw", 128 << 10, 1),
    ("ib_write_bw", 128 << 10, 2),
    ("ib_read_bw", 128 << 10, 2),
];

/// Seconds of each bandwidth.
const SECONDS: u64 = 2;

/// A device for perftest.
#[derive(Debug)]
pub struct Wire(PerfPlace);

impl Wire {
    /// The device of an address, if there is one and perftest is installed.
    #[must_use]
    pub fn of(address: IpAddr) -> Option<Self> {
        let all = sysfs::gids();
        let gid = sysfs::gid_of(address, &all)?;
        child::is_installed("ib_send_lat").then(|| Self(PerfPlace::of(gid)))
    }

    /// Measures what `run` does not have of a round yet.
    ///
    /// # Errors
    /// Interrupted. A program that fails is an entry with an error.
    pub fn measure(&self, run: &mut Run, round: u32) -> Result<()> {
        for (tool, bytes, qps) in RUNS {
            interrupt::check()?;
            let has = |perf: &&crate::result::Perf| {
                (&*perf.tool, perf.bytes, perf.qps.max(1), perf.round) == (tool, bytes, qps, round)
            };
            if run.perftest.iter().any(|perf| has(&perf)) {
                continue;
            }
            let mut perf = perftest::run_with(qps, tool, &self.0, bytes, false, SECONDS);
            interrupt::check()?;
            perf.round = round;
            let value = match (&perf.error, perf.mean_us, perf.mib_per_s) {
                (Some(error), ..) => format!("not measured: {error}"),
                (None, Some(us), _) => format!("{us:.1} us"),
                (None, None, Some(mib)) => format!("{mib:.1} MiB/s"),
                (None, None, None) => "nothing".to_owned(),
            };
            eprintln!("round {round} {tool:<14} {bytes:>7} bytes, {qps} QPs: {value}");
            run.perftest.push(perf);
        }
        Ok(())
    }
}
