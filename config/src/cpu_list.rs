//! [`CpuList`]: CPUs in the words of the kernel.

use std::fmt;
use std::ops::RangeInclusive;
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

impl CpuList {
    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
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
        assert!(list.has(8) && list.has(11) && !list.has(9) && !list.is_empty());
        assert_eq!(list.to_string(), "0-2,8,10-11");
        assert!("\n".parse::<CpuList>().unwrap().is_empty());
        for text in ["garbage", "3-1", "1,", "1-", "70000", "-1"] {
            assert_eq!(text.parse::<CpuList>(), Err(NoCpuList), "{text}");
        }
    }
}
