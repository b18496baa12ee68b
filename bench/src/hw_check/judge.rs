//! Pure rules: numbers in, [`Finding`]s out.
//!
//! A failure keeps rblk from working or breaks a promise that rblk relies on. A warning makes rblk
//! slower or smaller than the device could be. Times of software devices are never judged: they are
//! those of the processor.

use std::time::Duration;

use rblk_fabric::{DeviceFacts, QpFacts, QpLimits};
use rblk_operate::doctor::Finding;

use crate::sysfs::{Card, Host, Pcie};

/// Packets of so few bytes cost the most.
const SMALL_MTU: u32 = 1024;
/// QPs that a target with some mounts uses.
const FEW_QPS: u32 = 1024;
const ARENA_BYTES: u64 = 64 << 30;
/// READs outstanding below which writes wait for round trips.
const FEW_READS: u32 = 4;
/// How long one call may take before others notice.
const LONG: Duration = Duration::from_secs(1);

/// State, speed and kind of the port.
pub(super) fn port(card: &Card, facts: Option<&DeviceFacts>) -> Vec<Finding> {
    let state = card.state.split(": ").last().unwrap_or_default();
    let is_active = facts.map_or(state == "ACTIVE", |facts| facts.is_active);
    let words = format!("{} {} {}", state.to_lowercase(), card.link_layer, card.rate);
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = vec![if is_active {
        Finding::ok("port", words)
    } else {
        Finding::fail("port", format!("not active: {words}"))
            .fix(format!("ip link set {} up; rdma link", card.interface))
    }];
    let mut firmware = vec![card.hca.clone(), card.board.clone(), card.firmware.clone()];
    firmware.insert(0, card.driver.clone());
    firmware.retain(|word| !word.is_empty());
    if card.is_virtual {
        firmware.push("a virtual function".to_owned());
    }
    if !firmware.is_empty() {
        found.push(Finding::ok("firmware", firmware.join(", ")));
    }
    found
}

pub(super) fn mtu(facts: &DeviceFacts, card: &Card, is_iwarp: bool) -> Finding {
    let DeviceFacts { mtu, max_mtu, .. } = *facts;
    let of = card.interface_mtu.map(|mtu| format!(" (interface {}: {mtu} B)", card.interface));
    let words = format!("{mtu} B of {max_mtu} B{}", of.unwrap_or_default());
    match mtu {
        _ if is_iwarp => Finding::skip("MTU", "iWARP has none of its own: TCP cuts the stream"),
        0 => Finding::skip("MTU", "the device does not say"),
        small if small <= SMALL_MTU && max_mtu > small => {
            let fix = match card.interface_mtu {
                Some(_) => format!(
                    "ip link set {} mtu 4200, on both ends and on each switch between them",
                    card.interface
                ),
                None => "mtu_cap of opensm, and the MTU of the subnet's partition".to_owned(),
            };
            Finding::warn("MTU", format!("{words}: more packets than needed")).fix(fix)
        }
        _ => Finding::ok("MTU", words),
    }
}

pub(super) fn gid(card: &Card, index: Option<u32>, is_roce: bool) -> Finding {
    let index = index.map_or_else(|| "unknown".to_owned(), |index| index.to_string());
    match card.gid_type.as_str() {
        _ if !is_roce => Finding::skip("RoCE version", "not RoCE"),
        "RoCE v2" => Finding::ok("RoCE version", format!("v2, GID index {index}")),
        "" => Finding::skip("RoCE version", "sysfs does not say"),
        other => Finding::warn("RoCE version", format!("{other}, GID index {index}: not routed"))
            .fix("an address with a RoCE v2 GID: rdma_cm takes v2 where there is one"),
    }
}

pub(super) fn pcie(pcie: Option<&Pcie>) -> Finding {
    let Some(Pcie { speed, max_speed, width, max_width }) = pcie else {
        return Finding::skip("PCIe", "the device is on no PCIe bus that sysfs shows");
    };
    let now = format!("x{width} at {speed} GT/s");
    if width < max_width || speed < max_speed {
        let most = format!("x{max_width} at {max_speed} GT/s");
        let words = format!("{now}, of {most}: less bandwidth than the card has");
        return Finding::warn("PCIe", words)
            .fix("another slot; the BIOS setting of the slot; lspci -vv shows LnkSta");
    }
    Finding::ok("PCIe", now)
}

/// Place of the device in the host, and its interrupts.
pub(super) fn near(
    card: &Card,
    host: &Host,
    facts: &DeviceFacts,
    is_software: bool,
) -> Vec<Finding> {
    let mut found = Vec::new();
    found.push(match card.numa_node {
        Some(node) if host.numa_nodes > 1 => Finding::ok(
            "NUMA node",
            format!("{node}, CPUs {}: use them for `cpus` of the target", card.cpus),
        ),
        Some(node) => Finding::ok("NUMA node", node.to_string()),
        None if is_software || host.numa_nodes <= 1 => {
            Finding::skip("NUMA node", "of no matter here")
        }
        None => Finding::warn("NUMA node", format!("unknown on a host with {}", host.numa_nodes))
            .fix("the BIOS tells nodes of slots; on a VM, the hypervisor does"),
    });
    let vectors = facts.vectors;
    found.push(if vectors > 1 || is_software {
        Finding::ok("completion vectors", vectors.to_string())
    } else {
        let words = format!("{vectors}: all data threads share one interrupt");
        Finding::warn("completion vectors", words).fix("ethtool -L, or more MSI-X vectors")
    });
    found
}

pub(super) fn rights(host: &Host) -> Vec<Finding> {
    let size = |bytes: u64| match bytes {
        u64::MAX => "unlimited".to_owned(),
        bytes => bytes_words(bytes),
    };
    let locks = match host.memlock {
        _ if host.locks_beyond => Finding::ok("memlock", "any amount (CAP_IPC_LOCK)"),
        None => Finding::skip("memlock", "the system does not say"),
        Some((soft, _)) if soft >= ARENA_BYTES => Finding::ok("memlock", size(soft)),
        Some((soft, hard)) => {
            let words = format!("{} (hard limit {})", size(soft), size(hard));
            Finding::warn("memlock", words)
                .fix("ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit")
        }
    };
    let cgroup = match &host.cgroup {
        None => Finding::ok("rdma cgroup", "no limit"),
        Some(line) => Finding::warn("rdma cgroup", line.clone())
            .fix("more in rdma.max of that cgroup: one object for each QP, CQ, MR and PD"),
    };
    vec![locks, cgroup]
}

pub(super) fn limits(facts: &DeviceFacts) -> Vec<Finding> {
    let words = format!(
        "{} QPs of {} WRs, {} SGEs, {} CQs of {} entries, {} MRs of {}, {} PDs",
        facts.max_qps,
        facts.max_wrs,
        facts.max_sges,
        facts.max_cqs,
        facts.max_cq_entries,
        facts.max_mrs,
        bytes_words(facts.max_mr_bytes),
        facts.max_pds,
    );
    let mut found = vec![Finding::ok("limits", words)];
    let mut few = |is_few: bool, what: &str, value: String, effect: &str| {
        if is_few {
            found.push(Finding::warn(what, format!("{value}: {effect}")));
        }
    };
    few(facts.max_qps < FEW_QPS, "QPs", facts.max_qps.to_string(), "few mounts at a time");
    let effect = "an arena larger than this cannot be registered";
    few(facts.max_mr_bytes < ARENA_BYTES, "MR size", bytes_words(facts.max_mr_bytes), effect);
    few(facts.max_sges < 4, "SGEs", facts.max_sges.to_string(), "payloads take more WRs");
    let reads = facts.max_reads_out.min(facts.max_reads_in);
    let words = format!("{} out, {} in", facts.max_reads_out, facts.max_reads_in);
    found.push(match reads {
        0 => Finding::fail("READ depth", format!("{words}: rblk needs RDMA READ")),
        few if few < FEW_READS => {
            Finding::warn("READ depth", format!("{words}: large writes wait for round trips"))
        }
        _ => Finding::ok("READ depth", words),
    });
    found
}

/// The sizes of a QP, beside the wanted ones.
pub(super) fn queue(depth: u32, asked: &QpLimits, facts: Option<&QpFacts>) -> Finding {
    let subject = format!("QP of {depth} WRs");
    if asked.send_wrs < depth {
        let words = format!("the device has {} WRs at most", asked.send_wrs);
        let fix = format!("`queue_depth` of at most {}", asked.send_wrs / 4);
        return Finding::warn(subject, words).fix(fix);
    }
    let Some(facts) = facts else { return Finding::ok(subject, "granted") };
    let mut words = format!(
        "{} send and {} receive WRs, {} SGEs, {} B inline",
        facts.send_wrs, facts.recv_wrs, facts.send_sges, facts.inline_bytes
    );
    if facts.mtu > 0 {
        words += &format!(", path MTU {} B", facts.mtu);
    }
    if facts.ack_timeout > 0 {
        let first = Duration::from_nanos(4096_u64 << facts.ack_timeout.min(31));
        words += &format!(", ACK timeout {first:.1?} x {}", facts.retries);
    }
    // Zero means that the provider does not know.
    let less = |granted: u32, asked: u32| granted > 0 && granted < asked;
    if less(facts.send_wrs, asked.send_wrs) || less(facts.recv_wrs, asked.recv_wrs) {
        return Finding::fail(subject, format!("{words}: less than was asked for"));
    }
    if less(facts.send_sges, asked.send_sges) {
        return Finding::warn(subject, format!("{words}: fewer SGEs than asked for"));
    }
    Finding::ok(subject, words)
}

pub(super) fn registration(what: &str, bytes: u64, time: Duration, is_software: bool) -> Finding {
    let found = format!("registered in {time:.2?}");
    let per_gib = time.as_secs_f64() * f64::from(1 << 30) / float(bytes);
    if !is_software && bytes >= 1 << 30 && per_gib > 1.0 {
        let words = format!("{found}: a target of that arena starts so much later");
        return Finding::warn(what, words).fix("huge pages for the arena");
    }
    Finding::ok(what, found)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct StepTimes {
    pub(super) median: Duration,
    pub(super) max: Duration,
}

impl StepTimes {
    pub(super) fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        Self { median, max: times.last().copied().unwrap_or_default() }
    }
}

pub(super) fn step(name: &str, count: usize, times: StepTimes, is_software: bool) -> Finding {
    let StepTimes { median, max } = times;
    let subject = format!("{count}: {name}");
    let words = format!("median {median:.2?}, longest {max:.2?}");
    match max > LONG && !is_software {
        true => Finding::warn(subject, format!("{words}: hosts that reconnect wait for it")),
        false => Finding::ok(subject, words),
    }
}

/// How long a connection beside the storm got no answer.
pub(super) fn stall(count: usize, longest: Duration, is_software: bool) -> Finding {
    let subject = format!("{count}: a neighbour");
    let words = format!("longest time without an answer {longest:.2?}");
    match longest {
        // Its mount would count the path as dead.
        long if long > 5 * LONG && !is_software => {
            Finding::fail(subject, format!("{words}: `detect` is 5 s unless set"))
        }
        long if long > LONG / 2 && !is_software => {
            Finding::warn(subject, format!("{words}: the device stops others while it connects"))
        }
        _ => Finding::ok(subject, words),
    }
}

/// Completions and data after a QP was in the error state, over all rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Drained {
    pub(super) outstanding: u64,
    pub(super) before: u64,
    pub(super) late: u64,
    /// The longest time from the first empty look to a later completion.
    pub(super) delay: Duration,
    /// WRs that never completed while the QP lived.
    pub(super) missing: u64,
    /// Rounds in which memory changed after the first empty look.
    pub(super) changed_late: u64,
    /// Rounds in which memory changed after all completions, while the QP lived.
    pub(super) changed_flushed: u64,
    /// Rounds in which memory changed after the QP was destroyed.
    pub(super) changed_destroyed: u64,
}

pub(super) fn drained(seen: &Drained) -> Vec<Finding> {
    let Drained { outstanding, before, late, delay, missing, .. } = *seen;
    let flushes = if late > 0 {
        format!(
            "{late} of {outstanding} completions came after the CQ was empty, up to {delay:.2?} \
             later: an empty CQ says nothing about a dead QP, and rblk does not rely on it"
        )
    } else {
        format!("all of {before} completions came before the CQ was empty")
    };
    let mut found = vec![Finding::ok("flush", flushes)];
    if missing > 0 {
        found.push(Finding::warn(
            "no flush",
            format!("{missing} of {outstanding} WRs never completed: rblk does not wait for them"),
        ));
    }
    let rounds = [
        (seen.changed_late, "after the CQ was empty"),
        (seen.changed_flushed, "after the flushes"),
    ];
    for (count, when) in rounds.into_iter().filter(|(count, _)| *count > 0) {
        let words =
            format!("{count} times data of a READ landed {when}: rblk waits for destruction");
        found.push(Finding::ok("late data", words));
    }
    found.push(match seen.changed_destroyed {
        0 => Finding::ok("after destruction", "no byte landed"),
        some => Finding::fail(
            "after destruction",
            format!("{some} times data landed in memory of a QP that was destroyed: data is lost"),
        )
        .fix("do not use this device, firmware and driver; report them"),
    });
    found
}

pub(super) fn wakes(rounds: u64, slept: u64, lost: u64) -> Finding {
    let words = format!("{rounds} round trips, {slept} sleeps, {lost} wake-ups lost");
    match lost {
        0 if slept == 0 => Finding::warn("wake-ups", format!("{words}: nothing was proved")),
        0 => Finding::ok("wake-ups", words),
        _ => {
            Finding::fail("wake-ups", format!("{words}: requests stand still until a timer looks"))
                .fix("another firmware or driver; report this one")
        }
    }
}

/// Bandwidth of large transfers with the best number of QPs, beside the link's.
pub(super) fn bandwidth(what: &str, bytes_per_s: f64, gigabits: Option<f64>) -> Finding {
    let gbit = bytes_per_s * 8.0 / 1e9;
    let words = format!("{:.0} MiB/s ({gbit:.1} Gbit/s)", bytes_per_s / f64::from(1 << 20));
    match gigabits {
        Some(link) if gbit < link / 2.0 => {
            let words = format!("{words}, of a link of {link} Gbit/s");
            Finding::warn(what, words)
                .fix("see PCIe and NUMA above; compare with ib_write_bw and ib_read_bw")
        }
        _ => Finding::ok(what, words),
    }
}

/// Counters of trouble among those that went up.
pub(super) fn counters(changed: &[(String, u64)]) -> Finding {
    let bad: Vec<String> = changed
        .iter()
        .filter(|(name, _)| is_trouble(name))
        .map(|(name, by)| format!("{name} +{by}"))
        .collect();
    match bad.is_empty() {
        true => Finding::ok("counters", "no loss, no retry, no pause"),
        false => Finding::warn("counters", bad.join(", "))
            .fix("docs/hardware.md: flow control, ECN, cables"),
    }
}

/// Whether a counter tells of loss, of something sent again, or of a pause.
fn is_trouble(name: &str) -> bool {
    const PARTS: [&str; 16] = [
        "out_of_seq",
        "packet_seq_err",
        "rnr_",
        "_rnr",
        "timeout_err",
        "retry_exceeded",
        "retry_err",
        "retrans",
        "implied_nak",
        "duplicate_request",
        "_discards",
        "_errors",
        "symbol_error",
        "link_downed",
        "pause",
        "missing_resp",
    ];
    let name = name.to_ascii_lowercase();
    PARTS.iter().any(|part| name.contains(part))
}

pub(super) fn random(normal: f64, huge: Option<f64>, is_software: bool) -> Vec<Finding> {
    let mut found = vec![Finding::ok("normal pages", format!("{normal:.0} READs/s"))];
    let Some(huge) = huge else { return found };
    let words = format!("{huge:.0} READs/s, {:.2} of normal pages", huge / normal.max(1.0));
    found.push(match huge > 1.2 * normal && !is_software {
        true => Finding::warn("huge pages", format!("{words}: the card's table of pages is small"))
            .fix("huge pages for the arena"),
        false => Finding::ok("huge pages", words),
    });
    found
}

pub(super) fn bytes_words(bytes: u64) -> String {
    if bytes >= 1 << 60 {
        return "any size".to_owned();
    }
    for (unit, name) in [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= unit {
            return match bytes % unit {
                0 => format!("{} {name}", bytes / unit),
                _ => format!("{:.1} {name}", float(bytes) / float(unit)),
            };
        }
    }
    format!("{bytes} B")
}

#[allow(clippy::cast_precision_loss, reason = "53 bits are enough for what people read")]
pub(super) fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests;
