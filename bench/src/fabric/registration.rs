//! What it costs to register memory, by size and by the pages under it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::prctl;
use rblk_fabric::{Access, PageKind, ProtectionDomain, Region};

use crate::interrupt;
use crate::result::{Pages, Registration};

/// Registrations of one region that the median is of, as far as there is time.
const TRIES: usize = 9;
/// Regions that were never touched, for each of which there is one first registration.
const FRESH_TRIES: usize = 3;
/// When fewer tries have to do.
const ENOUGH: Duration = Duration::from_secs(2);
const HUGE_BYTES: u64 = 2 << 20;

/// Sizes from one page up to `largest`, each twice the one before.
#[must_use]
pub fn sizes(largest: u64) -> Vec<u64> {
    let mut sizes: Vec<u64> =
        (12..48).map(|power| 1 << power).take_while(|size| *size <= largest).collect();
    if sizes.last().is_some_and(|last| *last != largest) {
        sizes.push(largest);
    }
    sizes
}

/// Measures all sizes up to `largest` bytes on all pages there are, with a word to `tell` for pages
/// there are not.
///
/// # Errors
/// This process was asked to end.
pub(super) fn measure(
    pd: &ProtectionDomain,
    largest: u64,
    mut tell: impl FnMut(String),
) -> Result<Vec<Registration>> {
    let mut all = Vec::new();
    for pages in [Pages::Normal, Pages::Transparent, Pages::Huge] {
        if pages == Pages::Transparent && !transparent_pages() {
            tell("transparent huge pages are switched off".to_owned());
            continue;
        }
        for bytes in sizes(largest) {
            if pages != Pages::Normal && bytes < HUGE_BYTES {
                continue;
            }
            match one(pd, bytes, pages) {
                Ok(registration) => all.push(registration),
                Err(error) if pages == Pages::Huge => {
                    tell(format!(
                        "no more huge pages ({error:#}); `sysctl vm.nr_hugepages={}` reserves them",
                        largest / HUGE_BYTES
                    ));
                    break;
                }
                // Larger ones will not do, either: memory, or the limit of what may be locked.
                Err(error) if !interrupt::is_set() => {
                    tell(format!("registration ends at {bytes} bytes: {error:#}"));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(all)
}

/// Measures one size on one kind of pages.
///
/// # Errors
/// There is no such memory, it cannot be registered, or this process was asked to end.
pub(crate) fn one(pd: &ProtectionDomain, bytes: u64, pages: Pages) -> Result<Registration> {
    let begin = Instant::now();
    let mut fresh = Vec::new();
    for _ in 0..FRESH_TRIES {
        let region = allocate(bytes, pages)?;
        fresh.push(timed(pd, &region, pages)?.0);
        if begin.elapsed() > ENOUGH {
            break;
        }
    }
    let region = allocate(bytes, pages)?;
    let _small = SmallPages::only(pages)?;
    region.zero(0, region.len());
    let (mut on, mut off) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    for _ in 0..TRIES {
        let (register, deregister) = timed(pd, &region, pages)?;
        on.push(register);
        off.push(deregister);
        if begin.elapsed() > ENOUGH {
            break;
        }
    }
    Ok(Registration {
        bytes,
        pages,
        register_ns: median(&mut on),
        fresh_ns: median(&mut fresh),
        deregister_ns: median(&mut off),
    })
}

fn allocate(bytes: u64, pages: Pages) -> Result<Arc<Region>> {
    let kind = if pages == Pages::Huge { PageKind::Huge2MiB } else { PageKind::Normal };
    Ok(Region::allocate(usize::try_from(bytes)?, kind)?)
}

/// Registers and deregisters; how long each took, in nanoseconds.
fn timed(pd: &ProtectionDomain, region: &Arc<Region>, pages: Pages) -> Result<(f64, f64)> {
    interrupt::check()?;
    let _small = SmallPages::only(pages)?;
    let begin = Instant::now();
    let memory = pd.register(region, Access::REMOTE)?;
    let register = begin.elapsed();
    let begin = Instant::now();
    drop(memory);
    let deregister = begin.elapsed();
    Ok((ns(register), ns(deregister)))
}

/// While it lives, memory that this process touches for the first time gets pages of 4 KiB.
pub(crate) struct SmallPages(bool);

impl SmallPages {
    /// Small pages if these are wanted, else all as it is.
    pub(crate) fn only(pages: Pages) -> Result<Self> {
        let small = pages == Pages::Normal;
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

fn transparent_pages() -> bool {
    let file = "/sys/kernel/mm/transparent_hugepage/enabled";
    std::fs::read_to_string(file).is_ok_and(|words| !words.contains("[never]"))
}

#[allow(clippy::cast_precision_loss, reason = "53 bits of nanoseconds are a hundred days")]
fn ns(time: Duration) -> f64 {
    time.as_nanos() as f64
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_and_end_at_the_largest() {
        assert_eq!(sizes(16384), [4096, 8192, 16384]);
        assert_eq!(sizes(20000), [4096, 8192, 16384, 20000]);
        assert!(sizes(4095).is_empty());
        assert_eq!(sizes(1 << 30).len(), 19);
    }

    #[test]
    fn the_software_provider_registers_everything() {
        let device = rblk_fabric::Device::Soft(rblk_fabric::soft::Device::tcp());
        let pd = device.alloc_pd().unwrap();
        let all = measure(&pd, 4 << 20, |_| {}).unwrap();
        let normal: Vec<u64> =
            all.iter().filter(|r| r.pages == Pages::Normal).map(|r| r.bytes).collect();
        assert_eq!(normal, sizes(4 << 20));
        assert!(all.iter().all(|r| r.register_ns > 0.0));
    }
}
