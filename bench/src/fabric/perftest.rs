//! perftest (`ib_send_lat`, `ib_write_bw`, ...) on the same device: what the device can do,
//! measured by another program.
//!
//! Both ends run here, the server first. A latency of perftest is half of a round trip, except that
//! of a READ. Its "MB/sec" are MiB/s.

use std::net::{IpAddr, TcpListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::sysfs::Gid;
use crate::result::Perf;
use crate::{child, interrupt};

/// What a program may take beyond its time.
const GRACE: Duration = Duration::from_secs(20);
/// How often something is looked at that is waited for.
const TICK: Duration = Duration::from_millis(10);
/// Round trips of a latency.
const ROUNDS: u32 = 1000;
/// Round trips of a latency by events, where each may take several wake-ups of an emulated machine.
const EVENT_ROUNDS: u32 = 200;
/// Words that are one column's name together with the next one.
const FIRST_WORDS: [&str; 5] = ["BW", "99%", "99.9%", "tps", "BW_peak"];

/// Where it runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PerfPlace {
    /// The device's name.
    pub device: String,
    /// The port of the device.
    pub port: u32,
    /// Index of the GID; none for devices that connect only by rdma_cm (iWARP), or have none
    /// (InfiniBand).
    pub gid_index: Option<u32>,
    /// Whether it has to connect by rdma_cm.
    pub by_cm: bool,
    /// Address of the device.
    pub ip: IpAddr,
}

impl PerfPlace {
    /// By the GID of an address.
    #[must_use]
    pub fn of(gid: &Gid) -> Self {
        Self {
            device: gid.device.clone(),
            port: gid.port,
            gid_index: (!gid.is_iwarp).then_some(gid.index),
            by_cm: gid.is_iwarp,
            ip: gid.ip,
        }
    }
}

/// Runs one program at one size, with its error in the result if it fails.
#[must_use]
pub fn run(tool: &str, place: &PerfPlace, bytes: u64, events: bool, seconds: u64) -> Perf {
    run_with(1, tool, place, bytes, events, seconds)
}

/// The same, with so many QPs at once, which only a bandwidth can have.
#[must_use]
pub fn run_with(
    qps: u32,
    tool: &str,
    place: &PerfPlace,
    bytes: u64,
    events: bool,
    seconds: u64,
) -> Perf {
    let perf = Perf { tool: tool.to_owned(), bytes, round: 1, events, qps, ..Perf::default() };
    match measure(qps, tool, place, bytes, events, seconds) {
        Ok(columns) => {
            let rate = columns.get("BW average[MB/sec]").or(columns.get("BW average[MiB/sec]"));
            let (mean_us, mib_per_s) = (columns.get("t_avg[usec]"), rate.filter(|r| *r > 0.0));
            // On a machine that is too busy for its time it says 0.
            let nothing = mean_us.is_none() && mib_per_s.is_none();
            let error = nothing.then(|| "it measured nothing".to_owned());
            Perf { mean_us, mib_per_s, error, ..perf }
        }
        Err(error) => Perf { error: Some(format!("{error:#}")), ..perf },
    }
}

fn measure(
    qps: u32,
    tool: &str,
    place: &PerfPlace,
    bytes: u64,
    events: bool,
    seconds: u64,
) -> Result<Columns> {
    let port = free_port(place.ip)?;
    let command = || {
        let mut command = Command::new(tool);
        command.args(["-F", "-d", &place.device, "-i", &place.port.to_string()]);
        command.args(["-p", &port.to_string(), "-s", &bytes.to_string()]);
        if let Some(index) = place.gid_index {
            command.args(["-x", &index.to_string()]);
        }
        if place.by_cm {
            command.arg("-R");
        }
        if events {
            command.arg("-e");
        }
        if tool.ends_with("_bw") {
            command.args(["-D", &seconds.max(1).to_string()]);
            if qps > 1 {
                command.args(["-q", &qps.to_string()]);
            }
        } else {
            let rounds = if events { EVENT_ROUNDS } else { ROUNDS };
            command.args(["-n", &rounds.to_string()]);
        }
        command
    };
    let mut server = command();
    let mut server = child::spawn(server.stdout(Stdio::null()).stderr(Stdio::null())).map(Ended)?;
    if place.by_cm {
        // It listens by rdma_cm, which nothing shows.
        interrupt::sleep(Duration::from_secs(1))?;
    } else {
        wait_for_listener(&mut server, port)?;
    }
    let limit = GRACE + Duration::from_secs(seconds);
    let said = child::output(command().arg(place.ip.to_string()), limit)?;
    Columns::parse(&said).with_context(|| format!("{tool} said: {}", child::tail(&said)))
}

/// A server that is gone when it is not needed any more.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        child::end(&mut self.0);
    }
}

fn free_port(ip: IpAddr) -> Result<u16> {
    let free = TcpListener::bind((ip, 0)).with_context(|| format!("no port at {ip}"))?;
    Ok(free.local_addr()?.port())
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
#[derive(Clone, PartialEq, Debug)]
struct Columns(Vec<(String, f64)>);

impl Columns {
    fn parse(said: &str) -> Option<Self> {
        let mut names: Vec<String> = Vec::new();
        let mut last = None;
        for line in said.lines() {
            let line = line.trim();
            if line.starts_with("#bytes") {
                names = Self::names(line);
            } else if let Some(numbers) = Self::numbers(line)
                && !names.is_empty()
                && numbers.len() >= 2
            {
                last = Some(numbers);
            }
        }
        Some(Self(names.into_iter().zip(last?).collect()))
    }

    fn names(line: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        let mut joined = false;
        for word in line.split_whitespace() {
            match names.last_mut().filter(|_| joined) {
                Some(name) => *name = format!("{name} {word}"),
                None => names.push(word.to_owned()),
            }
            joined = FIRST_WORDS.contains(&word);
        }
        names
    }

    fn numbers(line: &str) -> Option<Vec<f64>> {
        let numbers: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
        numbers.ok()
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = "\
---------------------------------------------------------------------------------------
                    Send Latency Test
 Dual-port       : OFF\t\tDevice         : rxe0
 Mtu             : 4096[B]
 local address: LID 0000 QPN 0x0011 PSN 0xaa3cd8
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      1000          40.12          1033.10      47.71      \t       49.23       \t33.31\t\t80.05   \t\t1033.10
---------------------------------------------------------------------------------------
";

    const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 131072     2829             0.00               117.42\t\t   0.000939
---------------------------------------------------------------------------------------
";

    #[test]
    fn columns_go_by_their_names() {
        let latency = Columns::parse(LATENCY).unwrap();
        assert_eq!(latency.get("t_avg[usec]"), Some(49.23));
        assert_eq!(latency.get("99% percentile[usec]"), Some(80.05));
        assert_eq!(latency.get("99.9% percentile[usec]"), Some(1033.10));
        assert_eq!(latency.get("BW average[MB/sec]"), None);
        let bandwidth = Columns::parse(BANDWIDTH).unwrap();
        assert_eq!(bandwidth.get("BW average[MB/sec]"), Some(117.42));
        assert_eq!(bandwidth.get("#bytes"), Some(131_072.0));
    }

    #[test]
    fn what_has_no_numbers_has_no_columns() {
        assert_eq!(Columns::parse("Couldn't connect to 10.9.0.1:18515\n"), None);
        assert_eq!(Columns::parse("1 2 3\n"), None);
        let head = BANDWIDTH.lines().next().unwrap();
        assert_eq!(Columns::parse(head), None);
    }

    #[test]
    fn listeners_are_told_from_connections() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   1: 0100007F:1F90 0100007F:4854 01 00000000:00000000 00:00000000 00000000     0
";
        assert!(has_listener(table, 0x4853));
        assert!(!has_listener(table, 0x1F90));
        assert!(!has_listener(table, 0x4854));
        assert!(!has_listener("", 1));
    }
}
