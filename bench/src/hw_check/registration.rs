//! Time to register memory, by size and pages.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use rblk_operate::doctor::Finding;

use super::card::{Host, meminfo};
use super::judge::{self, bytes_words};
use super::out::Out;
use super::site::Site;
use crate::fabric::registration;
use crate::interrupt;
use crate::result::Pages;

/// Part of the memory that is free which a check may take.
const SHARE: u64 = 2;

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let sizes = site.by_effort([16 << 20, 64 << 20, 256 << 20], GIBS, GIBS);
    let caps = site.device.caps();
    let pd = site.device.alloc_pd()?;
    for bytes in sizes {
        for pages in [Pages::Normal, Pages::Huge] {
            interrupt::check()?;
            let kind = if pages == Pages::Huge { "huge pages" } else { "normal pages" };
            let subject = format!("{}, {kind}", bytes_words(bytes));
            let free = match pages {
                Pages::Huge => huge_free(Path::new("/")),
                _ => Host::read(Path::new("/"), &caps.name).available / SHARE,
            };
            if bytes > free {
                out.add(short(Path::new("/"), &subject, bytes, free, pages));
                continue;
            }
            if bytes > caps.max_region_bytes {
                let words = format!("an MR has {} at most", bytes_words(caps.max_region_bytes));
                out.add(Finding::warn(subject, words));
                continue;
            }
            out.tell(&format!("  registering {subject}"));
            match registration::one(&pd, bytes, pages) {
                Ok(took) => {
                    // A target registers memory that nobody has touched.
                    let time = Duration::from_secs_f64(took.fresh_ns.max(0.0) / 1e9);
                    let again = Duration::from_secs_f64(took.register_ns.max(0.0) / 1e9);
                    let mut found =
                        judge::registration(&subject, bytes, time, caps.kernel_software);
                    found.found += &format!("; {again:.2?} of memory that is there");
                    out.add(found);
                    let word = if pages == Pages::Huge { "huge" } else { "normal" };
                    let mib = bytes >> 20;
                    out.figure(format!("fresh_ns_{mib}_mib_{word}"), took.fresh_ns);
                    out.figure(format!("register_ns_{mib}_mib_{word}"), took.register_ns);
                    out.figure(format!("deregister_ns_{mib}_mib_{word}"), took.deregister_ns);
                }
                Err(error) => {
                    out.add(Finding::fail(subject, format!("{error:#}")));
                }
            }
        }
    }
    Ok(())
}

const GIBS: [u64; 3] = [1 << 30, 4 << 30, 64 << 30];

/// Bytes of huge pages that nobody has.
pub(super) fn huge_free(root: &Path) -> u64 {
    let dir = root.join("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free = std::fs::read_to_string(dir).ok().and_then(|text| text.trim().parse::<u64>().ok());
    // Those that are promised to somebody are among the free ones.
    let promised = meminfo_count(root, "HugePages_Rsvd:");
    free.unwrap_or(0).saturating_sub(promised) << 21
}

fn meminfo_count(root: &Path, field: &str) -> u64 {
    // Counts have no unit, and `meminfo` takes them for KiB.
    meminfo(root, field).map_or(0, |bytes| bytes >> 10)
}

/// The command by which `bytes` of huge pages are free, beside those that others have.
pub(super) fn more_huge_pages(root: &Path, bytes: u64) -> String {
    let missing = bytes.saturating_sub(huge_free(root)).div_ceil(2 << 20);
    let pages = meminfo_count(root, "HugePages_Total:").saturating_add(missing);
    format!("sysctl vm.nr_hugepages={pages}")
}

fn short(root: &Path, subject: &str, bytes: u64, free: u64, pages: Pages) -> Finding {
    let words = format!("{} are free for it", bytes_words(free));
    match pages {
        Pages::Huge => Finding::skip(subject, words).fix(more_huge_pages(root, bytes)),
        _ => Finding::skip(subject, words),
    }
}
