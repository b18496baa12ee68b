//! [`KernelRelease`]: the release of a kernel, as far as it says which fixes the kernel has.

/// Major and minor number of a kernel: its series.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct KernelVersion(pub u32, pub u32);

impl KernelVersion {
    /// Of a text such as `6.12.95-amd64`.
    #[must_use]
    pub fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit());
        Some(Self(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// The running kernel. `None`: it does not say.
    #[must_use]
    pub fn running() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
    }
}

/// How a kernel counts the fixes within its series.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Fixes {
    /// As kernel.org does: the kernel has the fixes of that release of the series, and of all
    /// before it. A release candidate has none.
    Upstream(u32),
    /// By a number of the distribution (RHEL, Ubuntu), with fixes that the distribution chose.
    Build {
        /// That number.
        number: u32,
        /// The text behind it, such as `generic`.
        flavour: String,
    },
}

/// The release of a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct KernelRelease {
    /// Its series.
    pub(crate) series: KernelVersion,
    /// Its fixes.
    pub(crate) fixes: Fixes,
}

impl KernelRelease {
    /// Of the text of `uname -r`. A distribution that counts by itself leaves the third number at 0
    /// and writes its own number behind a hyphen.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let series = KernelVersion::parse(text)?;
        let behind = text.split('.').nth(1)?.trim_start_matches(|c: char| c.is_ascii_digit());
        let rest = text.splitn(3, '.').nth(2).filter(|_| behind.is_empty()).unwrap_or("0");
        let (patch, rest) = number(rest).unwrap_or((0, ""));
        let own = rest.strip_prefix('-').and_then(number).filter(|_| patch == 0);
        let fixes = match own {
            Some((number, rest)) => {
                let flavour = rest.trim_start_matches('-').to_owned();
                Fixes::Build { number, flavour }
            }
            None => Fixes::Upstream(patch),
        };
        Some(Self { series, fixes })
    }
}

/// The number at the beginning, and the text behind it.
fn number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    Some((digits.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_as_kernels_write_them() {
        let of = |text: &str| KernelRelease::parse(text).map(|r| (r.series.0, r.series.1, r.fixes));
        let upstream = |a, b, patch| Some((a, b, Fixes::Upstream(patch)));
        for (text, expected) in [
            // Debian, Fedora, Arch, openSUSE Tumbleweed, kernel.org.
            ("6.18.2+deb13-amd64\n", upstream(6, 18, 2)),
            ("6.12.48+deb12-amd64", upstream(6, 12, 48)),
            ("6.12.90+deb12.1-amd64", upstream(6, 12, 90)),
            ("6.18.5-200.fc43.x86_64", upstream(6, 18, 5)),
            ("6.18.4-arch1-1", upstream(6, 18, 4)),
            ("6.18.4-zabbly+", upstream(6, 18, 4)),
            ("6.18.4-1-default", upstream(6, 18, 4)),
            ("7.2.12", upstream(7, 2, 12)),
            ("6.18.0", upstream(6, 18, 0)),
            // Candidates.
            ("6.17.0-rc3", upstream(6, 17, 0)),
            ("6.19-rc3", upstream(6, 19, 0)),
            ("7.3-amd64", upstream(7, 3, 0)),
            ("7.0", upstream(7, 0, 0)),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
        for (text, series, number, flavour) in [
            ("6.17.0-35-generic", (6, 17), 35, "generic"),
            ("6.17.0-1019-aws", (6, 17), 1019, "aws"),
            ("5.14.0-362.8.1.el9_3.x86_64", (5, 14), 362, ".8.1.el9_3.x86_64"),
            ("6.12.0-55.9.1.el10_0.x86_64", (6, 12), 55, ".9.1.el10_0.x86_64"),
            ("6.1.0-28-amd64", (6, 1), 28, "amd64"),
        ] {
            let build = Fixes::Build { number, flavour: flavour.to_owned() };
            assert_eq!(of(text), Some((series.0, series.1, build)), "{text}");
        }
        for text in ["", "linux", "6", "x.y", "99999999999.1"] {
            assert_eq!(of(text), None, "{text}");
        }
        assert!(KernelVersion::running().is_some(), "the kernel of this host says its release");
    }
}
