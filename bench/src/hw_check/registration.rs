//! Time to register memory, by size and pages.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::prctl;
use rblk_fabric::{Access, PageKind, ProtectionDomain, Region};
use rblk_operate::doctor::Finding;
use rblk_operate::sysfs::text;

use super::judge::{self, bytes_words};
use super::site::Site;
use super::{Out, interrupt};
use crate::sysfs::{Host, meminfo};

const SHARE: u64 = 2;
/// Registrations of one region, of which the median counts.
const TRIES: usize = 9;
const FRESH_TRIES: usize = 3;
/// Time after which fewer tries do.
const ENOUGH: Duration = Duration::from_secs(2);
const GIBS: [u64; 3] = [1 << 30, 4 << 30, 64 << 30];

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let sizes = site.by_effort([16 << 20, 64 << 20, 256 << 20], GIBS, GIBS);
    let caps = site.device.caps();
    let pd = site.device.alloc_pd()?;
    let root = Path::new("/");
    for bytes in sizes {
        for (pages, word) in [(PageKind::Normal, "normal"), (PageKind::Huge2MiB, "huge")] {
            interrupt::check()?;
            let subject = format!("{}, {word} pages", bytes_words(bytes));
            let free = match pages {
                PageKind::Normal => Host::read(root, &caps.name).available / SHARE,
                PageKind::Huge2MiB => huge_free(root),
            };
            if bytes > free {
                let short =
                    Finding::skip(subject, format!("{} are free for it", bytes_words(free)));
                out.add(match pages {
                    PageKind::Normal => short,
                    PageKind::Huge2MiB => short.fix(more_huge_pages(root, bytes)),
                });
                continue;
            }
            if bytes > caps.max_region_bytes {
                let words = format!("an MR has {} at most", bytes_words(caps.max_region_bytes));
                out.add(Finding::warn(subject, words));
                continue;
            }
            out.tell(&format!("  registering {subject}"));
            let took = match Took::of(&pd, bytes, pages) {
                Ok(took) => took,
                Err(error) => {
                    out.add(Finding::fail(subject, format!("{error:#}")));
                    continue;
                }
            };
            // A target registers memory that was never touched.
            let mut found = judge::registration(&subject, bytes, took.fresh, caps.kernel_software);
            found.found += &format!("; {:.2?} of memory that is there", took.register);
            out.add(found);
            let mib = bytes >> 20;
            for (name, time) in [
                ("fresh", took.fresh),
                ("register", took.register),
                ("deregister", took.deregister),
            ] {
                out.figure(format!("{name}_ns_{mib}_mib_{word}"), time.as_secs_f64() * 1e9);
            }
        }
    }
    Ok(())
}

struct Took {
    fresh: Duration,
    register: Duration,
    deregister: Duration,
}

impl Took {
    fn of(pd: &ProtectionDomain, bytes: u64, pages: PageKind) -> Result<Self> {
        let bytes = usize::try_from(bytes)?;
        let (mut fresh, mut register, mut deregister) = (Vec::new(), Vec::new(), Vec::new());
        let begin = Instant::now();
        while fresh.len() < FRESH_TRIES && (fresh.is_empty() || begin.elapsed() < ENOUGH) {
            fresh.push(timed(pd, &Region::allocate(bytes, pages)?, pages)?.0);
        }
        let region = Region::allocate(bytes, pages)?;
        let small = SmallPages::only(pages)?;
        region.zero(0, region.len());
        drop(small);
        let begin = Instant::now();
        while register.len() < TRIES && (register.is_empty() || begin.elapsed() < ENOUGH) {
            let (on, off) = timed(pd, &region, pages)?;
            register.push(on);
            deregister.push(off);
        }
        let median = |times| judge::StepTimes::of(times).median;
        Ok(Self {
            fresh: median(fresh),
            register: median(register),
            deregister: median(deregister),
        })
    }
}

fn timed(
    pd: &ProtectionDomain,
    region: &Arc<Region>,
    pages: PageKind,
) -> Result<(Duration, Duration)> {
    interrupt::check()?;
    let _small = SmallPages::only(pages)?;
    let begin = Instant::now();
    let memory = pd.register(region, Access::REMOTE)?;
    let register = begin.elapsed();
    let begin = Instant::now();
    drop(memory);
    Ok((register, begin.elapsed()))
}

/// While it lives, the kernel backs memory that is touched for the first time by pages of 4 KiB.
pub(super) struct SmallPages(bool);

impl SmallPages {
    /// Small pages for [`PageKind::Normal`], else no change.
    pub(super) fn only(pages: PageKind) -> Result<Self> {
        let small = pages == PageKind::Normal;
        if small {
            prctl::set_thp_disable(true).context("PR_SET_THP_DISABLE")?;
        }
        Ok(Self(small))
    }
}

impl Drop for SmallPages {
    fn drop(&mut self) {
        if self.0 {
            let _ = prctl::set_thp_disable(false);
        }
    }
}

pub(super) fn huge_free(root: &Path) -> u64 {
    let dir = root.join("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = text(&dir).parse().unwrap_or(0);
    // Reserved pages are among the free ones.
    free.saturating_sub(meminfo_count(root, "HugePages_Rsvd:")) << 21
}

fn meminfo_count(root: &Path, field: &str) -> u64 {
    // Counts have no unit, and `meminfo` takes them for KiB.
    meminfo(root, field).map_or(0, |bytes| bytes >> 10)
}

/// The command that frees `bytes` of huge pages, beside those in use.
pub(super) fn more_huge_pages(root: &Path, bytes: u64) -> String {
    let missing = bytes.saturating_sub(huge_free(root)).div_ceil(2 << 20);
    let pages = meminfo_count(root, "HugePages_Total:").saturating_add(missing);
    format!("sysctl vm.nr_hugepages={pages}")
}
