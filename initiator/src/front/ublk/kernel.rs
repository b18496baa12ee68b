//! The release of the running kernel, for properties without a feature bit.

use std::path::Path;

/// The first release that wakes a thread for an event behind the minimal time of a wait
/// (`min_wait_usec`; liburing issues 1477 and 1504). Earlier kernels have the feature, and may
/// sleep on for the whole time-out.
pub(super) const MIN_WAIT_WAKES: Release = Release(6, 19);

/// Major and minor number of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Release(pub(super) u32, pub(super) u32);

impl Release {
    /// The running kernel. `None`: its release cannot be read.
    pub(super) fn running() -> Option<Self> {
        let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/osrelease")).ok()?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.trim().split(|c: char| !c.is_ascii_digit());
        Some(Self(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_as_kernels_write_them() {
        for (text, expected) in [
            ("6.12.48+deb13-amd64\n", Some(Release(6, 12))),
            ("7.2.12\n", Some(Release(7, 2))),
            ("6.19-rc3", Some(Release(6, 19))),
            ("6.1.0-28-amd64", Some(Release(6, 1))),
            ("", None),
            ("linux", None),
            ("7", None),
        ] {
            assert_eq!(Release::parse(text), expected, "{text:?}");
        }
        assert!(Release(6, 18) < MIN_WAIT_WAKES && Release(7, 0) > MIN_WAIT_WAKES);
        assert!(Release::running().is_some(), "the kernel of this host says its release");
    }
}
