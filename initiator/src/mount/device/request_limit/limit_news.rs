//! [`LimitNews`]: what the process that limits a disk says, in lines.

use std::fmt;

/// A line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum LimitNews {
    /// The disk is limited.
    Limited,
    /// No CPU of this host submits to this queue.
    NoCpu(u16),
    /// The kernel refused every read of a round for this queue.
    Refused(u16),
    /// The process ends its work.
    Failed(String),
}

impl fmt::Display for LimitNews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited => f.write_str("limited"),
            Self::NoCpu(queue) => write!(f, "no-cpu {queue}"),
            Self::Refused(queue) => write!(f, "refused {queue}"),
            Self::Failed(why) => write!(f, "failed {}", why.replace('\n', " ")),
        }
    }
}

impl LimitNews {
    /// Reads a line. `None` for one of another program.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let queue = rest.parse();
        match word {
            "limited" => Some(Self::Limited),
            "no-cpu" => queue.ok().map(Self::NoCpu),
            "refused" => queue.ok().map(Self::Refused),
            "failed" => Some(Self::Failed(rest.to_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_survive_the_way_between_two_processes() {
        for news in [
            LimitNews::Limited,
            LimitNews::NoCpu(0),
            LimitNews::Refused(4095),
            LimitNews::Failed("the disk has a scheduler".to_owned()),
        ] {
            assert_eq!(LimitNews::parse(&news.to_string()), Some(news));
        }
        assert_eq!(LimitNews::parse("refused"), None);
        assert_eq!(LimitNews::parse("refused x"), None);
        assert_eq!(LimitNews::parse(""), None);
        let odd = LimitNews::Failed("two\nlines".to_owned()).to_string();
        assert_eq!(odd.lines().count(), 1);
    }
}
