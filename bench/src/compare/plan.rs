//! What is measured: systems by key, workloads by key or by the name of a set, and the order of it
//! all.
//!
//! Pure: nothing here looks at the machine.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::args::CompareEngine;
use crate::peer::nvmet::Transport;
use crate::peer::rblk::Carrier;
use crate::peer::{Kind, NbdKind, Variant};
use crate::result::{Cell, Family, SystemInfo, system};

/// A system of the plan.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What a report says of it.
    pub info: SystemInfo,
    /// What it is.
    pub kind: Kind,
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

    /// A server of NBD for fio's engine.
    fn nbd(key: &str, title: &str, qemu: bool, unix: bool) -> Self {
        let transport = if unix { "unix" } else { "tcp" };
        Self::new(key, title, Family::Kernel, transport, Kind::NbdEngine(NbdKind { qemu, unix }))
    }

    /// A known system.
    fn of(key: &str) -> Option<Self> {
        let rblk = |carrier| Kind::Rblk(Variant::plain(carrier));
        let candidate = match key {
            system::RBLK_VERBS => {
                Self::new(key, "rblk verbs", Family::Rblk, "rdma", rblk(Carrier::Verbs))
            }
            system::RBLK_VERBS_SPIN => {
                let mut variant = Variant::plain(Carrier::Verbs);
                variant.target_flags.push("--spin=always".to_owned());
                variant.mount_flags.push("--spin=always".to_owned());
                Self::new(key, "rblk verbs, spinning", Family::Rblk, "rdma", Kind::Rblk(variant))
            }
            system::RBLK_TCP => Self::new(key, "rblk TCP", Family::Rblk, "tcp", rblk(Carrier::Tcp)),
            system::NVME_RDMA => {
                let kind = Kind::Nvme(Transport::Rdma);
                Self::new(key, "nvme-rdma", Family::Kernel, "rdma", kind)
            }
            system::NVME_TCP => {
                let kind = Kind::Nvme(Transport::Tcp);
                Self::new(key, "nvme-tcp", Family::Kernel, "tcp", kind)
            }
            system::RBLK_ENGINE => {
                let kind = Kind::RblkEngine(Variant::plain(Carrier::Verbs));
                Self::new(key, "rblk verbs, fio's engine", Family::Rblk, "rdma", kind)
            }
            system::RBLK_ENGINE_TCP => {
                let kind = Kind::RblkEngine(Variant::plain(Carrier::Tcp));
                Self::new(key, "rblk TCP, fio's engine", Family::Rblk, "tcp", kind)
            }
            system::NBDKIT_TCP => Self::nbd(key, "nbdkit, TCP", false, false),
            system::NBDKIT_UNIX => Self::nbd(key, "nbdkit, Unix socket", false, true),
            system::QEMU_NBD_TCP => Self::nbd(key, "qemu-nbd, TCP", true, false),
            system::QEMU_NBD_UNIX => Self::nbd(key, "qemu-nbd, Unix socket", true, true),
            system::TGT => Self::new(key, "tgt, iscsi-perf", Family::Kernel, "tcp", Kind::Iscsi),
            system::NBD => Self::new(key, "NBD", Family::Kernel, "tcp", Kind::Nbd),
            system::UBLK_NULL => Self::new(key, "ublk null", Family::Floor, "", Kind::UblkNull),
            system::LOCAL => Self::new(key, "local RAM disk", Family::Floor, "", Kind::Local),
            _ => return None,
        };
        Some(candidate)
    }
}

/// The key that stands for no system: only variants are measured.
const NONE: &str = "none";

/// The keys of systems that stand for how fio is to reach them, if nobody named any.
#[must_use]
pub fn keys_for(engine: CompareEngine, keys: &[String]) -> Vec<String> {
    match engine {
        CompareEngine::Direct if keys.is_empty() => system::ENGINES.map(str::to_owned).to_vec(),
        CompareEngine::Direct | CompareEngine::Disk => keys.to_vec(),
    }
}

/// The systems that were asked for.
///
/// `keys` are known ones; no key means all disks but those that spin all the time, `none` means
/// none.
/// `variants` are `NAME=WORDS` ([`Variant::parse`]); `rblk` are disks of ours as `PATH` or
/// `NAME=PATH`, `peers` are others as `NAME=PATH`. With either of the last two nothing is set up
/// but what `keys` and `variants` say.
///
/// # Errors
/// A key is unknown, or a word has the wrong form, or a key comes twice.
pub fn systems(
    keys: &[String],
    variants: &[String],
    rblk: &[String],
    peers: &[String],
) -> Result<Vec<Candidate>> {
    let mut systems = Vec::new();
    let given = !rblk.is_empty() || !peers.is_empty();
    if keys.is_empty() && !given {
        let all = system::ORDER.into_iter().filter(|key| *key != system::RBLK_VERBS_SPIN);
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
        let kind = Kind::Given(PathBuf::from(path));
        let known = Candidate::of(name).map(|known| known.info);
        let title = known.as_ref().map_or(name, |info| &info.title).to_owned();
        let transport = known.map_or("rdma".to_owned(), |info| info.transport);
        systems.push(Candidate::new(name, &title, Family::Rblk, &transport, kind));
    }
    for text in peers {
        let (name, path) =
            text.split_once('=').with_context(|| format!("`{text}` is not NAME=DEVICE"))?;
        let kind = Kind::Given(PathBuf::from(path));
        let known = Candidate::of(name).map(|known| known.info);
        let family = known.as_ref().map_or(Family::Kernel, |info| info.family);
        let title = known.as_ref().map_or(name, |info| &info.title).to_owned();
        let transport = known.map_or(String::new(), |info| info.transport);
        systems.push(Candidate::new(name, &title, family, &transport, kind));
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

/// The workloads of `text`: names of sets (`gate`, `full`, `smoke`, `jobs`) and keys, comma
/// between. Those of a set are with the first of `queues`; the gate's come again with each other
/// number of queues.
///
/// # Errors
/// A word is neither a set nor a key.
pub fn cells(text: &str, queues: &[u16]) -> Result<Vec<Cell>> {
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
            Some(set) => {
                set.into_iter().for_each(&mut add);
                for queues in others {
                    let gate = if word == "smoke" { "smoke" } else { "gate" };
                    set_of_more(gate, u32::from(*queues)).into_iter().for_each(&mut add);
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

fn set_of_more(name: &str, queues: u32) -> Vec<Cell> {
    set(name, queues).unwrap_or_default()
}

/// The cells of a set.
fn set(name: &str, queues: u32) -> Option<Vec<Cell>> {
    let cell = |rw, bytes, depth, jobs| Cell::new(rw, bytes, depth, jobs, queues, read_percent(rw));
    let mut cells = Vec::new();
    match name {
        "smoke" => {
            cells.push(cell("randread", 4 << 10, 1, 1));
            cells.push(cell("write", 128 << 10, 16, 1));
        }
        "gate" => {
            for depth in [1, 32] {
                cells.push(cell("randread", 4 << 10, depth, 1));
                cells.push(cell("randwrite", 4 << 10, depth, 1));
            }
            cells.push(cell("read", 128 << 10, 16, 1));
            cells.push(cell("write", 128 << 10, 16, 1));
        }
        "full" => {
            for depth in [1, 8, 32, 128] {
                cells.push(cell("randread", 4 << 10, depth, 1));
                cells.push(cell("randwrite", 4 << 10, depth, 1));
            }
            for (bytes, depth) in [(128 << 10, 16), (1 << 20, 8)] {
                cells.push(cell("read", bytes, depth, 1));
                cells.push(cell("write", bytes, depth, 1));
            }
            cells.push(cell("randrw", 4 << 10, 32, 1));
        }
        "jobs" => {
            for jobs in [1, 4, 16, 64] {
                cells.push(cell("randread", 4 << 10, 8, jobs));
            }
            cells.push(cell("randread", 4 << 10, 256, 1));
        }
        _ => return None,
    }
    Some(cells)
}

fn read_percent(rw: &str) -> u32 {
    match rw {
        "read" | "randread" => 100,
        "write" | "randwrite" => 0,
        _ => 70,
    }
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
        None if ["randread", "randwrite", "read", "write"].contains(&rw) => (rw, read_percent(rw)),
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

/// The order of `count` systems in a round, from 1: each round begins with another one, so that
/// what one system does to the next, and a machine that drifts, fall on all alike.
#[must_use]
pub fn order(count: usize, round: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    if count > 0 {
        let start = usize::try_from(round.saturating_sub(1)).unwrap_or(0);
        order.rotate_left(start % count);
        // Every second time around, backwards: each has each other one before and after it.
        if (start / count) % 2 == 1 {
            order.reverse();
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(cells: &[Cell]) -> Vec<&str> {
        cells.iter().map(|cell| cell.key.as_str()).collect()
    }

    #[test]
    fn every_key_of_a_set_is_a_key() {
        for name in ["smoke", "gate", "full", "jobs"] {
            for queues in [1, 4] {
                for cell in set(name, queues).unwrap() {
                    assert_eq!(parse(&cell.key).as_ref(), Some(&cell));
                }
            }
        }
        assert_eq!(set("gate", 1).unwrap().len(), 6);
        assert_eq!(set("full", 1).unwrap().len(), 13);
    }

    #[test]
    fn keys_that_are_none_are_refused() {
        for key in [
            "",
            "gates",
            "randread",
            "randread-4k",
            "randread-4k-qd0-j1-q1",
            "randread-4g-qd1-j1-q1",
            "randread-100-qd1-j1-q1",
            "randread-4k-qd1-j1-q1-x1",
            "randrw101-4k-qd1-j1-q1",
            "trim-4k-qd1-j1-q1",
            "read-99999999999999999999m-qd1-j1-q1",
        ] {
            assert!(cell(key).is_err(), "{key}");
        }
    }

    #[test]
    fn sets_and_keys_make_a_list_without_doubles() {
        let all = cells("gate,randread-4k-qd1-j1-q1,randrw50-4k-qd4-j2-q1", &[1, 2]).unwrap();
        assert_eq!(all.len(), 13);
        assert_eq!(keys(&all)[6], "randread-4k-qd1-j1-q2");
        assert_eq!(keys(&all)[12], "randrw50-4k-qd4-j2-q1");
        assert_eq!(cells("full", &[1, 2, 4]).unwrap().len(), 13 + 6 + 6);
        assert!(cells(" , ", &[1]).is_err() && cells("gate", &[1, 0]).is_err());
    }

    #[test]
    fn systems_are_told_by_keys() {
        let all = systems(&[], &[], &[], &[]).unwrap();
        assert_eq!(all.len(), system::ORDER.len() - 1);
        let direct = keys_for(CompareEngine::Direct, &[]);
        assert_eq!(systems(&direct, &[], &[], &[]).unwrap().len(), system::ENGINES.len());
        assert!(keys_for(CompareEngine::Disk, &[]).is_empty());
        assert_eq!(keys_for(CompareEngine::Direct, &["nbd".to_owned()]), ["nbd"]);
        let one = |text: &str| [text.to_owned()];
        let given = systems(&[], &[], &one("/dev/ublkb0"), &one("nvme-rdma=/dev/nvme1n1")).unwrap();
        assert_eq!(given.len(), 2);
        assert_eq!(given[0].info.key, "rblk-verbs");
        assert_eq!(
            (given[1].info.key.as_str(), given[1].info.family),
            ("nvme-rdma", Family::Kernel)
        );
        let variants = systems(&one("local"), &one("one=tcp A=1"), &[], &[]).unwrap();
        assert_eq!(
            (variants[1].info.key.as_str(), variants[1].info.transport.as_str()),
            ("one", "tcp")
        );
        assert_eq!(systems(&one("none"), &one("one="), &[], &[]).unwrap().len(), 1);
        assert!(systems(&one("nvme"), &[], &[], &[]).is_err());
        assert!(systems(&one("local"), &one("local=tcp"), &[], &[]).is_err());
        assert!(systems(&[], &one("a/b=tcp"), &[], &[]).is_err());
    }

    #[test]
    fn each_round_begins_with_another_system() {
        assert_eq!(order(3, 1), [0, 1, 2]);
        assert_eq!(order(3, 2), [1, 2, 0]);
        assert_eq!(order(3, 3), [2, 0, 1]);
        assert_eq!(order(3, 4), [2, 1, 0]);
        assert_eq!(order(0, 5), [0; 0]);
        assert_eq!(order(1, 2), [0]);
    }
}
