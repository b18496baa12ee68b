//! [`Wire`]: perftest (`ib_send_lat`, `ib_write_bw`, ...) in the same run, round by round, on the
//! device of rblk and nvme-rdma: the speed of the wire itself.
//!
//! Both ends run here, the server first. A latency of perftest is half of a round trip. Its
//! "MB/sec" are MiB/s.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::peer::target::free_port;
use crate::result::{Perf, Run};
use crate::sysfs::{self, Gid};
use crate::{child, interrupt};

/// Programs, bytes and QPs. A mount on a software device has two QPs for a queue, and one on a
/// card.
const RUNS: [(&str, u64, u32); 6] = [
    ("ib_send_lat", 64, 1),
    ("ib_write_lat", 4096, 1),
    ("ib_write_bw", 128 << 10, 1),
    ("ib_read_bw", 128 << 10, 1),
    ("ib_write_bw", 128 << 10, 2),
    ("ib_read_bw", 128 << 10, 2),
];
const SECONDS: u64 = 2;
/// Time beyond the seconds that a program may take.
const GRACE: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(10);
/// Round trips of a latency.
const ROUNDS: u32 = 1000;
/// Words that are one column's name together with the next one.
const FIRST_WORDS: [&str; 5] = ["BW", "99%", "99.9%", "tps", "BW_peak"];

#[derive(Debug)]
pub(crate) struct Wire(Gid);

impl Wire {
    /// The device of an address, if there is one and perftest is installed.
    pub(crate) fn of(address: IpAddr) -> Option<Self> {
        let all = sysfs::gids();
        let gid = sysfs::gid_of(address, &all)?;
        child::is_installed("ib_send_lat").then(|| Self(gid.clone()))
    }

    /// Measures the programs that `run` does not have of a round yet. A program that fails is an
    /// entry with an error.
    pub(crate) fn measure(&self, run: &mut Run, round: u32) -> Result<()> {
        for (tool, bytes, qps) in RUNS {
            interrupt::check()?;
            let key = |perf: &Perf| (perf.bytes, perf.qps.max(1), perf.round);
            let has = |perf: &Perf| perf.tool == tool && key(perf) == (bytes, qps, round);
            if run.perftest.iter().any(has) {
                continue;
            }
            let perf = Perf { tool: tool.to_owned(), bytes, round, qps, ..Perf::default() };
            let perf = self.one(perf);
            interrupt::check()?;
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

    fn one(&self, perf: Perf) -> Perf {
        let columns = match self.run(&perf) {
            Ok(columns) => columns,
            Err(error) => return Perf { error: Some(format!("{error:#}")), ..perf },
        };
        let get = |name: &str| columns.get(name).copied();
        let rate = get("BW average[MB/sec]").or(get("BW average[MiB/sec]"));
        let (mean_us, mib_per_s) = (get("t_avg[usec]"), rate.filter(|rate| *rate > 0.0));
        // On a machine too busy for the time of the program, perftest prints 0.
        let nothing = mean_us.is_none() && mib_per_s.is_none();
        let error = nothing.then(|| "it measured nothing".to_owned());
        Perf { mean_us, mib_per_s, error, ..perf }
    }

    fn run(&self, perf: &Perf) -> Result<BTreeMap<String, f64>> {
        let (Gid { device, ip, is_iwarp, .. }, tool) = (&self.0, perf.tool.as_str());
        let port = free_port(*ip)?;
        let command = || {
            let mut command = Command::new(tool);
            command.args(["-F", "-d", device, "-i", &self.0.port.to_string()]);
            command.args(["-p", &port.to_string(), "-s", &perf.bytes.to_string()]);
            // iWARP connects by rdma_cm alone.
            match is_iwarp {
                true => command.arg("-R"),
                false => command.args(["-x", &self.0.index.to_string()]),
            };
            if tool.ends_with("_bw") {
                command.args(["-D", &SECONDS.to_string()]);
                if perf.qps > 1 {
                    command.args(["-q", &perf.qps.to_string()]);
                }
            } else {
                command.args(["-n", &ROUNDS.to_string()]);
            }
            command
        };
        let mut server = command();
        let server = child::spawn(server.stdout(Stdio::null()).stderr(Stdio::null()));
        let mut server = server.map(Ended)?;
        if *is_iwarp {
            // A listener of rdma_cm is in no table.
            interrupt::sleep(Duration::from_secs(1))?;
        } else {
            wait_for_listener(&mut server, port)?;
        }
        let limit = GRACE + Duration::from_secs(SECONDS);
        let said = child::output(command().arg(ip.to_string()), limit)?;
        columns(&said).with_context(|| format!("{tool} said: {}", child::tail(&said)))
    }
}

struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        child::end(&mut self.0);
    }
}

/// Waits without connecting: the server takes the first connection for its client.
fn wait_for_listener(server: &mut Ended, port: u16) -> Result<()> {
    let deadline = Instant::now() + GRACE;
    loop {
        let listens = ["/proc/net/tcp", "/proc/net/tcp6"]
            .iter()
            .any(|file| has_listener(&std::fs::read_to_string(file).unwrap_or_default(), port));
        if listens {
            return Ok(());
        }
        if let Some(status) = server.0.try_wait()? {
            bail!("its server ended: {status}");
        }
        if Instant::now() >= deadline {
            bail!("its server does not listen after {GRACE:?}");
        }
        interrupt::sleep(TICK)?;
    }
}

/// Whether a socket listens at that port, by a text like `/proc/net/tcp`.
fn has_listener(table: &str, port: u16) -> bool {
    let place = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, _remote, state) = (words.next(), words.next(), words.next());
        local.is_some_and(|local| local.ends_with(&place)) && state == Some("0A")
    })
}

/// The last line of numbers, by the names above it.
fn columns(said: &str) -> Option<BTreeMap<String, f64>> {
    let (mut names, mut last) = (Vec::<String>::new(), None);
    for line in said.lines().map(str::trim) {
        let words = line.split_whitespace();
        if line.starts_with("#bytes") {
            names.clear();
            for word in words {
                match names.last_mut().filter(|name| FIRST_WORDS.contains(&name.as_str())) {
                    Some(name) => *name = format!("{name} {word}"),
                    None => names.push(word.to_owned()),
                }
            }
        } else if let Ok(numbers) = words.map(str::parse).collect::<Result<Vec<f64>, _>>()
            && numbers.len() >= 2
        {
            last = Some(numbers);
        }
    }
    (!names.is_empty()).then_some(names.into_iter().zip(last?).collect())
}

#[cfg(test)]
mod tests;
