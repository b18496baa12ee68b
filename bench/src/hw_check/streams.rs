//! Bandwidth and latency of WRITE and READ by size and QPs, and the counters after that.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use rblk_fabric::Access;
use rblk_operate::doctor::Finding;

use super::Out;
use super::counters;
use super::ends::{Ends, Link, limits};
use super::judge;
use super::load::{self, Load, Moved};
use super::site::Site;
use crate::sysfs::Card;

const SIZES: [(u32, &str); 2] = [(4 << 10, "4 KiB"), (128 << 10, "128 KiB")];
const QPS: [usize; 4] = [1, 2, 4, 8];
const DEPTH: usize = 16;

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let caps = site.device.caps();
    let root = Path::new("/");
    let index = site.gid.as_ref().map_or(0, |gid| gid.index);
    let card = Card::read(root, &caps.name, site.port(), index);
    let count = || counters::read(root, &caps.name, site.port(), &card.interface);
    let before = count();
    let time =
        site.by_effort(Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(10));
    let qps = site.by_effort(&QPS[..2], &QPS[..], &QPS[..]);
    let most = qps.last().copied().unwrap_or(1);
    let entries = u32::try_from(2 * DEPTH * most).unwrap_or(u32::MAX);
    let mut ends = Ends::new(site, entries.max(64).min(caps.max_cq_entries))?;
    let sizes = limits(caps, u32::try_from(DEPTH).unwrap_or(1));
    let links = (0..most).map(|_| ends.connect(site, sizes, &[]));
    let links: Vec<Link> = links.collect::<Result<_>>()?;
    let room = DEPTH * most * SIZES[1].0 as usize;
    let own = ends.a.memory(room, Access::REMOTE)?;
    let far = ends.b.memory(room, Access::REMOTE)?;
    // A software device is as fast as the processor.
    let link = if caps.kernel_software { None } else { card.gigabits() };
    for is_read in [false, true] {
        let what = if is_read { "READ" } else { "WRITE" };
        for (bytes, size) in SIZES {
            let alone = Load { is_read, bytes, depth: 1, is_random: false };
            let moved = load::run(&mut ends, &links[..1], (&own, &far), alone, time)?;
            let key = format!("{}_{bytes}", what.to_lowercase());
            out.add(latency(&format!("{what} {size}, one"), &moved));
            out.figure(format!("{key}_p50_ns"), judge::float(moved.times.at(500_000)));
            out.figure(format!("{key}_p99_ns"), judge::float(moved.times.at(990_000)));
            let load = Load { depth: DEPTH, ..alone };
            let mut rates = Vec::new();
            for count in qps {
                let moved = load::run(&mut ends, &links[..*count], (&own, &far), load, time)?;
                out.figure(format!("{key}_bytes_per_s_{count}_qps"), moved.bytes_per_s);
                rates.push((*count, moved));
            }
            out.add(rate(&format!("{what} {size}, many"), bytes, &rates, link));
        }
    }
    links.into_iter().for_each(|link| ends.close(link));
    let changed = counters::changed(&before, &count());
    for (name, by) in &changed {
        out.figure(format!("counter {name}"), judge::float(*by));
    }
    match before.is_empty() {
        true => out.add(Finding::skip("counters", "the device has none")),
        false => out.add(judge::counters(&changed)),
    }
    let words = "not compared here: mount with `relaxed_ordering` true and false, and compare";
    out.add(Finding::skip("relaxed ordering", words));
    if card.interface.is_empty() || !crate::child::is_installed("ethtool") {
        let words = "PFC and pause frames: no interface, or no ethtool";
        out.add(Finding::skip("pause", words).fix("apt install ethtool"));
    }
    Ok(())
}

fn latency(subject: &str, moved: &Moved) -> Finding {
    let us = |ns: u64| format!("{:.1} us", Duration::from_nanos(ns).as_secs_f64() * 1e6);
    let (p50, p99) = (us(moved.times.at(500_000)), us(moved.times.at(990_000)));
    Finding::ok(subject, format!("p50 {p50}, p99 {p99}"))
}

/// All numbers of QPs in one line. Large transfers are judged by the link.
fn rate(subject: &str, bytes: u32, rates: &[(usize, Moved)], link: Option<f64>) -> Finding {
    let best = rates.iter().map(|(_, moved)| moved.bytes_per_s).fold(0.0, f64::max);
    let link = link.filter(|_| bytes == SIZES[1].0);
    let mut found = judge::bandwidth(subject, best, link);
    let each = rates.iter().map(|(count, moved)| match bytes == SIZES[1].0 {
        true => format!("{} {:.0} MiB/s", qps(*count), moved.bytes_per_s / f64::from(1 << 20)),
        false => format!("{} {:.0}/s", qps(*count), moved.per_s),
    });
    found.found += &format!("; {}", each.collect::<Vec<_>>().join(", "));
    found
}

fn qps(count: usize) -> String {
    match count {
        1 => "1 QP".to_owned(),
        _ => format!("{count} QPs"),
    }
}
