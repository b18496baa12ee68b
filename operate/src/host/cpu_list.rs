//! [`CpuList`]: CPUs in the words of the kernel.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

/// CPUs, as files of sysfs list them: `0-3,8` (cpuset(7), "List format").
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct CpuList(Vec<RangeInclusive<u16>>);

/// The text is no list of CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a list of CPUs, such as 0-3,8")]
pub struct NoCpuList;

impl FromStr for CpuList {
    type Err = NoCpuList;

    fn from_str(text: &str) -> Result<Self, NoCpuList> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then_some(first..=last)
        };
        text.split(',').map(range).collect::<Option<Vec<_>>>().map(Self).ok_or(NoCpuList)
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, range) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl FromIterator<u16> for CpuList {
    fn from_iter<I: IntoIterator<Item = u16>>(cpus: I) -> Self {
        Self(cpus.into_iter().map(|cpu| cpu..=cpu).collect())
    }
}

impl CpuList {
    /// The CPUs that this host uses. None where the kernel does not say it.
    #[must_use]
    pub fn online() -> Self {
        Self::read(Path::new("/sys/devices/system/cpu/online"))
    }

    /// The list in a file of sysfs. None where there is no such file, or no list in it.
    #[must_use]
    pub fn read(path: &Path) -> Self {
        std::fs::read_to_string(path).unwrap_or_default().parse().unwrap_or_default()
    }

    /// Those of `cpus` that it does not have, with commas. `None`: it has all. A list without CPUs
    /// is one that could not be read: nothing is known of them.
    #[must_use]
    pub fn lacks(&self, cpus: &[u16]) -> Option<String> {
        let missing = cpus.iter().filter(|cpu| !self.0.is_empty() && !self.has(**cpu));
        let missing: Vec<String> = missing.map(u16::to_string).collect();
        (!missing.is_empty()).then(|| missing.join(", "))
    }

    /// Whether it has this one.
    #[must_use]
    pub fn has(&self, cpu: u16) -> bool {
        self.0.iter().any(|range| range.contains(&cpu))
    }

    /// All, in the order of the list.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().cloned().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_those_of_the_kernel() {
        let list: CpuList = "0-2,8,10-11\n".parse().unwrap();
        assert_eq!(list.iter().collect::<Vec<_>>(), [0, 1, 2, 8, 10, 11]);
        assert!(list.has(8) && list.has(11) && !list.has(9));
        assert_eq!(list.to_string(), "0-2,8,10-11");
        assert_eq!("\n".parse(), Ok(CpuList::default()));
        for text in ["garbage", "3-1", "1,", "1-", "70000", "-1"] {
            assert_eq!(text.parse::<CpuList>(), Err(NoCpuList), "{text}");
        }
    }

    #[test]
    fn single_cpus_are_a_list() {
        for cpus in [&[][..], &[3], &[0, 2, 64]] {
            let list: CpuList = cpus.iter().copied().collect();
            assert_eq!(list.to_string().parse(), Ok(list.clone()));
            assert_eq!(list.iter().collect::<Vec<_>>(), cpus);
        }
    }

    #[test]
    fn a_list_that_cannot_be_read_lacks_nothing() {
        let list: CpuList = "0-3,8".parse().unwrap();
        assert_eq!(list.lacks(&[0, 3, 8]), None);
        assert_eq!(list.lacks(&[2, 900, 4]).as_deref(), Some("900, 4"));
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in ["", "garbage"] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(CpuList::read(file.path()).lacks(&[900]), None, "{text}");
        }
        assert_eq!(CpuList::read(Path::new("/no/such/file")).lacks(&[900]), None);
    }
}
