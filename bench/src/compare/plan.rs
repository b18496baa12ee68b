//! Systems by key, workloads by key or by the name of a set, and the order of a round. Pure.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::args::CompareEngine;
use crate::peer::nvmet::Transport;
use crate::peer::target::Carrier;
use crate::peer::{Kind, NbdKind, Variant};
use crate::result::{Cell, Family, SystemInfo, system};

#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) info: SystemInfo,
    pub(crate) kind: Kind,
}

impl Candidate {
    fn new(key: &str, title: &str, family: Family, transport: &str, kind: Kind) -> Self {
        let info = SystemInfo {
            key: key.to_owned(),
            title: title.to_owned(),
            family,
            transport: transport.to_owned(),
            ..SystemInfo::default()
        };
        Self { info, kind }
    }

    /// A known system.
    fn of(key: &str) -> Option<Self> {
        use Family::{Floor, Kernel, Rblk};
        let [verbs, tcp] = [Carrier::Verbs, Carrier::Tcp].map(Variant::plain);
        let spin = || vec!["--spin=always".to_owned()];
        let spinning = Variant { target_flags: spin(), mount_flags: spin(), ..verbs.clone() };
        let nbd = |qemu, unix| Kind::NbdEngine(NbdKind { qemu, unix });
        let (title, family, transport, kind) = match key {
            "rblk-verbs" => ("rblk verbs", Rblk, "rdma", Kind::Rblk(verbs)),
            "rblk-verbs-spin" => ("rblk verbs, spinning", Rblk, "rdma", Kind::Rblk(spinning)),
            "rblk-tcp" => ("rblk TCP", Rblk, "tcp", Kind::Rblk(tcp)),
            "nvme-rdma" => ("nvme-rdma", Kernel, "rdma", Kind::Nvme(Transport::Rdma)),
            "nvme-tcp" => ("nvme-tcp", Kernel, "tcp", Kind::Nvme(Transport::Tcp)),
            "rblk-engine" => ("rblk verbs, fio's engine", Rblk, "rdma", Kind::RblkEngine(verbs)),
            "rblk-engine-tcp" => ("rblk TCP, fio's engine", Rblk, "tcp", Kind::RblkEngine(tcp)),
            "nbdkit-tcp" => ("nbdkit, TCP", Kernel, "tcp", nbd(false, false)),
            "nbdkit-unix" => ("nbdkit, Unix socket", Kernel, "unix", nbd(false, true)),
            "qemu-nbd-tcp" => ("qemu-nbd, TCP", Kernel, "tcp", nbd(true, false)),
            "qemu-nbd-unix" => ("qemu-nbd, Unix socket", Kernel, "unix", nbd(true, true)),
            "tgt" => ("tgt, iscsi-perf", Kernel, "tcp", Kind::Iscsi),
            "nbd" => ("NBD", Kernel, "tcp", Kind::Nbd),
            "ublk-null" => ("ublk null", Floor, "", Kind::UblkNull),
            "socket" => ("the socket alone", Floor, "tcp", Kind::Socket),
            "local" => ("local RAM disk", Floor, "", Kind::Local),
            system::LOCAL_FILE => ("local file", Floor, "", Kind::LocalFile),
            _ => return None,
        };
        Some(Self::new(key, title, family, transport, kind))
    }

    /// A disk that is there already, under the name of a known system or another one.
    fn given(name: &str, path: &str, family: Family, transport: &str) -> Self {
        let kind = Kind::Given(PathBuf::from(path));
        match Self::of(name) {
            Some(known) => Self { kind, ..known },
            None => Self::new(name, name, family, transport, kind),
        }
    }
}

/// The key that stands for no system: only variants are measured.
const NONE: &str = "none";

/// The systems of `compare` without --systems.
pub(crate) fn keys_for(engine: CompareEngine, keys: &[String]) -> Vec<String> {
    match engine {
        CompareEngine::Direct if keys.is_empty() => system::ENGINES.map(str::to_owned).to_vec(),
        CompareEngine::Direct | CompareEngine::Disk => keys.to_vec(),
    }
}

/// The systems to measure.
///
/// `keys` are known ones; no key means all disks but the spinning one and the local
/// file, `none` means none.
/// `variants` are `NAME=WORDS` ([`Variant::parse`]); `rblk` are disks of ours as `PATH` or
/// `NAME=PATH`, `peers` are others as `NAME=PATH`. With either of the last two only `keys` and
/// `variants` are set up.
pub(crate) fn systems(
    keys: &[String],
    variants: &[String],
    rblk: &[String],
    peers: &[String],
) -> Result<Vec<Candidate>> {
    let mut systems = Vec::new();
    let given = !rblk.is_empty() || !peers.is_empty();
    if keys.is_empty() && !given {
        let not_all = [system::RBLK_VERBS_SPIN, system::LOCAL_FILE];
        let all = system::DISKS.into_iter().filter(|key| !not_all.contains(key));
        systems.extend(all.filter_map(Candidate::of));
    }
    for key in keys.iter().filter(|key| *key != NONE) {
        let known = || system::all().collect::<Vec<_>>().join(", ");
        let candidate = Candidate::of(key);
        systems
            .push(candidate.with_context(|| format!("no system `{key}`; there are {}", known()))?);
    }
    for text in variants {
        let (name, words) =
            text.split_once('=').with_context(|| format!("`{text}` is not NAME=WORDS"))?;
        let variant = Variant::parse(words)?;
        let transport = if variant.carrier == Carrier::Tcp { "tcp" } else { "rdma" };
        let title = format!("rblk {name}");
        let kind = if variant.engine { Kind::RblkEngine(variant) } else { Kind::Rblk(variant) };
        systems.push(Candidate::new(name, &title, Family::Rblk, transport, kind));
    }
    for text in rblk {
        let (name, path) = text.split_once('=').unwrap_or((system::RBLK_VERBS, text));
        systems.push(Candidate::given(name, path, Family::Rblk, "rdma"));
    }
    for text in peers {
        let (name, path) =
            text.split_once('=').with_context(|| format!("`{text}` is not NAME=DEVICE"))?;
        systems.push(Candidate::given(name, path, Family::Kernel, ""));
    }
    for (at, one) in systems.iter().enumerate() {
        let key = &one.info.key;
        if key.is_empty() || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        {
            bail!("`{key}` is no name of a system: letters, digits, dash, dot");
        }
        if systems[..at].iter().any(|other| other.info.key == *key) {
            bail!("the system `{key}` comes twice");
        }
    }
    Ok(systems)
}

/// Adds the local file, which shows what the way to a volume in a file costs.
pub(crate) fn add_local_file(systems: &mut Vec<Candidate>) {
    if !systems.iter().any(|one| one.info.key == system::LOCAL_FILE) {
        systems.extend(Candidate::of(system::LOCAL_FILE));
    }
}

/// The workloads of `text`: names of sets (`gate`, `full`, `smoke`, `jobs`) and keys, comma
/// between. Those of a set are with the first of `queues`; the gate's come again with each other
/// number of queues.
pub(crate) fn cells(text: &str, queues: &[u16]) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    let mut add = |cell: Cell| {
        if !cells.contains(&cell) {
            cells.push(cell);
        }
    };
    let (first, others) = queues.split_first().context("no number of queues")?;
    if queues.contains(&0) {
        bail!("a device has one queue at least");
    }
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        match set(word, u32::from(*first)) {
            Some(of_first) => {
                of_first.into_iter().for_each(&mut add);
                for queues in others {
                    let gate = if word == "smoke" { "smoke" } else { "gate" };
                    set(gate, u32::from(*queues)).into_iter().flatten().for_each(&mut add);
                }
            }
            None => add(cell(word)?),
        }
    }
    if cells.is_empty() {
        bail!("no workload in `{text}`");
    }
    Ok(cells)
}

/// The cells of a set: keys without jobs and queues.
fn set(name: &str, queues: u32) -> Option<Vec<Cell>> {
    let keys = match name {
        "smoke" => "randread-4k-qd1 write-128k-qd16",
        "gate" => {
            "randread-4k-qd1 randwrite-4k-qd1 randread-4k-qd32 randwrite-4k-qd32 \
             read-128k-qd16 write-128k-qd16"
        }
        "full" => {
            "randread-4k-qd1 randwrite-4k-qd1 randread-4k-qd8 randwrite-4k-qd8 \
             randread-4k-qd32 randwrite-4k-qd32 randread-4k-qd128 randwrite-4k-qd128 \
             read-128k-qd16 write-128k-qd16 read-1m-qd8 write-1m-qd8 randrw70-4k-qd32"
        }
        "jobs" => {
            "randread-4k-qd8-j1 randread-4k-qd8-j4 randread-4k-qd8-j16 randread-4k-qd8-j64 \
             randread-4k-qd256-j1"
        }
        _ => return None,
    };
    let jobs = |key: &str| if key.contains("-j") { "" } else { "-j1" };
    keys.split_whitespace().map(|key| parse(&format!("{key}{}-q{queues}", jobs(key)))).collect()
}

/// A cell by its key, as `randread-4k-qd8-j1-q1` or `randrw70-4k-qd32-j1-q1`.
fn cell(key: &str) -> Result<Cell> {
    parse(key).with_context(|| {
        format!("`{key}` is neither gate, full, jobs, smoke nor a key as randread-4k-qd8-j1-q1")
    })
}

fn parse(key: &str) -> Option<Cell> {
    let mut words = key.split('-');
    let rw = words.next()?;
    let (rw, percent) = match rw.strip_prefix("randrw") {
        Some(percent) => ("randrw", percent.parse().ok().filter(|p| *p <= 100)?),
        None if ["randread", "randwrite", "read", "write"].contains(&rw) => {
            (rw, if rw.ends_with("read") { 100 } else { 0 })
        }
        None => return None,
    };
    let size = words.next()?;
    let split = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
    let shift = match &size[split..] {
        "" => 0,
        "k" => 10,
        "m" => 20,
        _ => return None,
    };
    let bytes = size[..split].parse::<u64>().ok()?.checked_mul(1 << shift)?;
    let mut number = |prefix: &str| words.next()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let (depth, jobs, queues) = (number("qd")?, number("j")?, number("q")?);
    let sane = bytes > 0
        && bytes.is_multiple_of(512)
        && bytes <= 64 << 20
        && (1..=4096).contains(&depth)
        && (1..=1024).contains(&jobs)
        && (1..=256).contains(&queues)
        && words.next().is_none();
    sane.then(|| Cell::new(rw, bytes, depth, jobs, queues, percent))
}

/// The order of `count` systems in a round, from 1: each round begins with another system, so that
/// the effect of a system on the next, and of a machine that drifts, fall on all alike.
pub(crate) fn order(count: usize, round: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    if count > 0 {
        let start = usize::try_from(round.saturating_sub(1)).unwrap_or(0);
        order.rotate_left(start % count);
        // Every second time around, backwards: each system has each other one before and after it.
        if (start / count) % 2 == 1 {
            order.reverse();
        }
    }
    order
}

#[cfg(test)]
mod tests;
