//! The faults of ublk by the release of the kernel: [`judge`], which is pure.
//!
//! - [`Effect::Crash`] came with 529d4d632788 "ublk: implement NUMA-aware memory allocation", and
//!   was mended by 011af85ccd87 "ublk: reorder tag_set initialization before queue allocation".
//! - [`Effect::NoStart`] came with c2c8089f325e "ublk: validate ublk server pid", and was mended by
//!   47bdf1d29cae "ublk: fix ublksrv pid handling for pid namespaces".
//! - [`Effect::Stuck`] came with the driver, and was mended by c258f5c4502c "ublk: fix deadlock
//!   when reading partition table" (CVE-2025-68823).
//!
//! The releases are those of kernel.org, and of the builds of Ubuntu that are known. Another
//! distribution that counts by itself may have the cause or the fix of any fault.

use std::fmt;
use std::path::Path;

use super::kernel_release::{Fixes, KernelRelease, KernelVersion};
use super::pid_namespace;

/// What the kernel does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Effect {
    /// ADD_DEV reads a null pointer while it holds the lock of all ublk devices.
    Crash,
    /// START_DEV and END_USER_RECOVERY compare the id of the process in its own pid namespace with
    /// the id in the first one.
    NoStart,
    /// The completion of a request closes the disk, which waits for itself.
    Stuck,
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Crash => {
                "adding a ublk disk crashes in the kernel: the command never returns, and no ublk \
                 disk can be added or removed until this host restarts"
            }
            Self::NoStart => {
                "a ublk disk cannot be started from a pid namespace, such as that of a container \
                 (EINVAL)"
            }
            Self::Stuck => {
                "a ublk disk may hang for good, if a program opens it while another ends with I/O \
                 under way"
            }
        })
    }
}

/// A release of kernel.org: series and patch.
type Release = (u32, u32, u32);

/// Releases of kernel.org with a fault, from the first one to the last one before `good`.
struct Range {
    effect: Effect,
    from: Release,
    good: Release,
}

/// In the order of the report. A series that ended with a fault names a release of a later one.
const RANGES: [Range; 4] = [
    Range { effect: Effect::Crash, from: (6, 18, 4), good: (6, 18, 6) },
    Range { effect: Effect::NoStart, from: (6, 16, 0), good: (6, 18, 8) },
    // Older series have the fault, too, and later releases of 6.6 the fix.
    Range { effect: Effect::Stuck, from: (6, 7, 0), good: (6, 12, 70) },
    Range { effect: Effect::Stuck, from: (6, 13, 0), good: (6, 18, 6) },
];

/// Builds of Ubuntu that crash as [`Effect::Crash`] says.
struct UbuntuBuilds {
    flavour: &'static str,
    /// Earlier ones are not known to have the cause.
    suspect: u32,
    /// This one and the later ones were seen to crash.
    seen: u32,
    good: u32,
}

/// The series of Ubuntu's [`BUILDS`].
const UBUNTU: KernelVersion = KernelVersion(6, 17);

const BUILDS: [UbuntuBuilds; 3] = [
    UbuntuBuilds { flavour: "generic", suspect: 24, seen: 35, good: 41 },
    UbuntuBuilds { flavour: "aws", suspect: 1000, seen: 1017, good: 1020 },
    UbuntuBuilds { flavour: "azure", suspect: 1014, seen: 1015, good: 1021 },
];

/// The series to which distributions took the cause of [`Effect::Crash`].
const BACKPORTED: [KernelVersion; 2] = [UBUNTU, KernelVersion(6, 18)];

/// How sure a fault is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Certainty {
    /// A mount fails, or does worse.
    Certain,
    /// It may happen.
    Possible,
}

/// A fault of ublk in a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UblkFault {
    /// How sure it is.
    pub certainty: Certainty,
    release: String,
    effect: Effect,
    /// The first good release; `None` for a distribution whose builds are not known.
    good: Option<String>,
}

impl fmt::Display for UblkFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { release, effect, good, .. } = self;
        match good {
            Some(good) => {
                write!(f, "Linux {release}: {effect}; the first good release is {good}")
            }
            None => write!(
                f,
                "Linux {release}: on some builds of distributions {effect}; a good one names `ublk: \
                 reorder tag_set initialization before queue allocation` in its changelog"
            ),
        }
    }
}

/// The faults of ublk for this process, in the running kernel.
#[must_use]
pub fn of_this_process() -> Vec<UblkFault> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    judge(&release, pid_namespace::is_own(Path::new("/")))
}

/// The faults of ublk in the kernel of that release, as `uname -r` writes it. `in_namespace`: the
/// process that asks is in a pid namespace of its own. An unreadable release has none.
#[must_use]
pub fn judge(release: &str, in_namespace: bool) -> Vec<UblkFault> {
    let release = release.trim();
    let Some(parsed) = KernelRelease::parse(release) else { return Vec::new() };
    let fault = |certainty, effect, good| UblkFault {
        certainty,
        release: release.to_owned(),
        effect,
        good,
    };
    let patch = match parsed.fixes {
        Fixes::Upstream(patch) => patch,
        Fixes::Build { number, flavour } => {
            let found = of_build(parsed.series, number, &flavour);
            return found
                .map(|(certainty, good)| fault(certainty, Effect::Crash, good))
                .into_iter()
                .collect();
        }
    };
    let at = (parsed.series.0, parsed.series.1, patch);
    let here = RANGES.iter().filter(|range| range.from <= at && at < range.good);
    let mut found: Vec<UblkFault> = Vec::new();
    for Range { effect, good: (major, minor, patch), .. } in here {
        let certainty = match effect {
            Effect::Crash => Certainty::Certain,
            Effect::NoStart if in_namespace => Certainty::Certain,
            Effect::NoStart => continue,
            Effect::Stuck => Certainty::Possible,
        };
        if found.iter().all(|other| other.effect != *effect) {
            found.push(fault(certainty, *effect, Some(format!("{major}.{minor}.{patch}"))));
        }
    }
    found
}

/// The known faults: the first bad release, the effect, and the first good release. For documents.
#[must_use]
pub fn known() -> Vec<[String; 3]> {
    let release = |(major, minor, patch): Release| format!("{major}.{minor}.{patch}");
    let of_range =
        |range: &Range| [release(range.from), range.effect.to_string(), release(range.good)];
    let of_builds = |builds: &UbuntuBuilds| {
        let build =
            |number: u32| format!("{}.{}.0-{number}-{}", UBUNTU.0, UBUNTU.1, builds.flavour);
        [build(builds.seen), Effect::Crash.to_string(), build(builds.good)]
    };
    RANGES.iter().map(of_range).chain(BUILDS.iter().map(of_builds)).collect()
}

/// Whether a build of a distribution crashes, and its first good build.
fn of_build(
    series: KernelVersion,
    number: u32,
    flavour: &str,
) -> Option<(Certainty, Option<String>)> {
    if !BACKPORTED.contains(&series) {
        return None;
    }
    let known = BUILDS.iter().find(|known| series == UBUNTU && known.flavour == flavour);
    let Some(known) = known else { return Some((Certainty::Possible, None)) };
    let certainty = match number {
        _ if number < known.suspect || number >= known.good => return None,
        _ if number >= known.seen => Certainty::Certain,
        _ => Certainty::Possible,
    };
    Some((certainty, Some(format!("{}.{}.0-{}-{flavour}", series.0, series.1, known.good))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The effects that are certain, those that are possible, and the good releases.
    fn of(release: &str, in_namespace: bool) -> Vec<(Certainty, Effect, Option<String>)> {
        let found = judge(release, in_namespace).into_iter();
        found.map(|fault| (fault.certainty, fault.effect, fault.good)).collect()
    }

    fn good(release: &str) -> Option<String> {
        Some(release.to_owned())
    }

    #[test]
    fn releases_of_kernel_org_have_the_faults_of_their_range() {
        use Certainty::{Certain, Possible};
        use Effect::{Crash, Stuck};
        for release in ["6.18.4-arch1-1", "6.18.5+deb13-amd64", "6.18.5-200.fc43.x86_64"] {
            let expected = [(Certain, Crash, good("6.18.6")), (Possible, Stuck, good("6.18.6"))];
            assert_eq!(of(release, false), expected, "{release}");
        }
        for release in ["6.17.13+deb13-amd64", "6.17.0-rc3", "6.18.3", "6.16.12+deb13-amd64"] {
            let expected = [(Possible, Stuck, good("6.18.6"))];
            assert_eq!(of(release, false), expected, "{release}");
        }
        assert_eq!(of("6.12.48+deb12-amd64", true), [(Possible, Stuck, good("6.12.70"))]);
        for release in [
            "6.12.70+deb13-amd64",
            "6.12.118+deb13-amd64",
            "6.18.6",
            "6.18.15+deb13-amd64",
            "6.19-rc1",
            "7.0.4",
            "7.2.12+deb13-amd64",
            "7.3-rc2",
            "6.1.0-50-amd64",
            "",
            "x.y",
        ] {
            assert_eq!(of(release, false), [], "{release}");
        }
    }

    #[test]
    fn a_pid_namespace_counts_where_the_kernel_compares_ids() {
        use Certainty::Certain;
        let no_start = (Certain, Effect::NoStart, good("6.18.8"));
        for release in ["6.16.3+deb13-amd64", "6.17.13", "6.18.0", "6.18.7+deb13-amd64"] {
            assert!(of(release, true).contains(&no_start), "{release}");
            assert!(!of(release, false).contains(&no_start), "{release}");
        }
        for release in ["6.15.11", "6.18.8", "6.18.15+deb13-amd64", "6.19.0", "7.2.12"] {
            assert!(!of(release, true).contains(&no_start), "{release}");
        }
    }

    #[test]
    fn builds_of_distributions_are_certain_only_where_they_were_seen() {
        use Certainty::{Certain, Possible};
        for (release, certainty, first_good) in [
            ("6.17.0-35-generic", Certain, good("6.17.0-41-generic")),
            ("6.17.0-40-generic", Certain, good("6.17.0-41-generic")),
            ("6.17.0-24-generic", Possible, good("6.17.0-41-generic")),
            ("6.17.0-1019-aws", Certain, good("6.17.0-1020-aws")),
            ("6.17.0-1015-azure", Certain, good("6.17.0-1021-azure")),
            ("6.17.0-1014-azure", Possible, good("6.17.0-1021-azure")),
            ("6.17.0-1009-oracle", Possible, None),
            ("6.18.0-9-generic", Possible, None),
        ] {
            assert_eq!(of(release, false), [(certainty, Effect::Crash, first_good)], "{release}");
        }
        for release in [
            "6.17.0-14-generic",
            "6.17.0-41-generic",
            "6.17.0-1020-aws",
            "6.17.0-1022-azure",
            "6.8.0-146-generic",
            "7.0.0-38-generic",
            "5.14.0-362.8.1.el9_3.x86_64",
            "6.12.0-55.9.1.el10_0.x86_64",
        ] {
            assert_eq!(of(release, true), [], "{release}");
        }
    }

    #[test]
    fn a_fault_names_the_release_the_effect_and_the_first_good_release() {
        let text = judge("6.18.5+deb13-amd64\n", false)[0].to_string();
        for part in ["Linux 6.18.5+deb13-amd64:", "never returns", "first good release is 6.18.6"] {
            assert!(text.contains(part), "{text}");
        }
        let text = judge("6.18.0-9-generic", false)[0].to_string();
        assert!(text.contains("reorder tag_set"), "{text}");
    }

    #[test]
    fn every_range_ends_above_its_beginning() {
        for Range { from, good, .. } in RANGES {
            assert!(from < good);
        }
        for UbuntuBuilds { suspect, seen, good, .. } in BUILDS {
            assert!(suspect <= seen && seen < good);
        }
    }
}
