//! Random READs of 4 KiB over a large region, on normal pages and on huge ones: whether the card's
//! table of pages has room for an arena.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use rblk_fabric::{Access, PageKind, Region};
use rblk_operate::doctor::Finding;

use super::Out;
use super::ends::{Ends, Link, limits};
use super::judge::{self, bytes_words, float};
use super::load::{self, Load};
use super::registration::{SmallPages, huge_free, more_huge_pages};
use super::site::Site;
use crate::sysfs::Host;

const QPS: usize = 4;
const DEPTH: usize = 16;
const READ: u32 = 4 << 10;
const SHARE: u64 = 4;

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let caps = site.device.caps();
    let root = Path::new("/");
    let free = Host::read(root, &caps.name).available / SHARE;
    let wanted: u64 = site.by_effort(64 << 20, 64 << 30, 64 << 30);
    let bytes = wanted.min(free).min(caps.max_region_bytes) & !((2 << 20) - 1);
    if bytes == 0 {
        out.add(Finding::skip("normal pages", "too little memory is free"));
        return Ok(());
    }
    out.tell(&format!("  a region of {}", bytes_words(bytes)));
    let normal = rate(site, bytes, PageKind::Normal)?;
    let huge_bytes = huge_free(root);
    let huge = match huge_bytes >= bytes {
        true => Some(rate(site, bytes, PageKind::Huge2MiB)?),
        false => None,
    };
    out.figure("region_bytes", float(bytes));
    out.figure("normal_reads_per_s", normal);
    out.add(Finding::ok("region", bytes_words(bytes)));
    out.add_all(judge::random(normal, huge, caps.kernel_software));
    match huge {
        Some(huge) => out.figure("huge_reads_per_s", huge),
        None => out.add(
            Finding::skip("huge pages", format!("{} are free for it", bytes_words(huge_bytes)))
                .fix(more_huge_pages(root, bytes)),
        ),
    }
    Ok(())
}

fn rate(site: &Site, bytes: u64, pages: PageKind) -> Result<f64> {
    let mut ends = Ends::new(site, 256)?;
    let sizes = limits(site.device.caps(), u32::try_from(DEPTH).unwrap_or(1));
    let links = (0..QPS).map(|_| ends.connect(site, sizes, &[]));
    let links: Vec<Link> = links.collect::<Result<_>>()?;
    let region = Region::allocate(usize::try_from(bytes)?, pages)?;
    let small = SmallPages::only(pages)?;
    let far = ends.b.pd.register(&region, Access::REMOTE)?;
    drop(small);
    let load = Load { is_read: true, bytes: READ, depth: DEPTH, is_random: true };
    let own = ends.a.memory(load::window(&load, QPS), Access::REMOTE)?;
    let time =
        site.by_effort(Duration::from_millis(100), Duration::from_secs(5), Duration::from_secs(20));
    let moved = load::run(&mut ends, &links, (&own, &far), load, time)?;
    links.into_iter().for_each(|link| ends.close(link));
    Ok(moved.per_s)
}
