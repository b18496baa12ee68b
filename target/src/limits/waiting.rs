//! [`Waiting`]: the commands of one poll group that wait because a volume or host is over its
//! limit, in lines, and whose turn it is. Pure: time is an argument.
//!
//! A line is of one session and one volume. Only the first of a line has a time at which it may
//! begin ([`Head::Due`]); when it has begun, the next gets one. The line whose time comes first is
//! served first. Within a line the order is that of arrival.
//!
//! There are at most as many commands here as the connections of the group may have outstanding,
//! and no line is empty.

use std::collections::VecDeque;

use super::bucket::Ticks;
use crate::identity::SessionIndex;
use crate::store::VolumeIndex;

/// Whose commands a line has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LineName {
    /// The session.
    pub(crate) session: SessionIndex,
    /// The volume.
    pub(crate) volume: VolumeIndex,
}

/// What the first of a line waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Head {
    /// A time has to be asked for: it is new in its place, or the limits have changed.
    Unasked,
    /// This time.
    Due(Ticks),
}

impl Head {
    fn at(self) -> Ticks {
        match self {
            Self::Unasked => Ticks(0),
            Self::Due(at) => at,
        }
    }
}

#[derive(Debug)]
struct Line<T> {
    name: LineName,
    head: Head,
    waiting: VecDeque<T>,
}

impl<T> Line<T> {
    /// Its first has no time any more; if it had one, it is given to `booked`.
    fn lose_time(&mut self, booked: &mut impl FnMut(LineName, &T)) {
        if let (Head::Due(_), Some(first)) = (self.head, self.waiting.front()) {
            booked(self.name, first);
        }
        self.head = Head::Unasked;
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    lines: Vec<Line<T>>,
    // The earliest time of a line.
    next: Ticks,
    // Lists of lines that ended, to be used again.
    spare: Vec<VecDeque<T>>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), next: NEVER, spare: Vec::new() }
    }
}

const NEVER: Ticks = Ticks(u64::MAX);

impl<T> Waiting<T> {
    /// Whether commands of that line wait: what comes now waits behind them.
    pub(crate) fn has(&self, name: LineName) -> bool {
        self.lines.iter().any(|line| line.name == name)
    }

    /// A command waits: behind its line, or as the first of a new line, until `due`.
    pub(crate) fn push(&mut self, name: LineName, due: Ticks, item: T) {
        if let Some(line) = self.lines.iter_mut().find(|line| line.name == name) {
            return line.waiting.push_back(item);
        }
        let mut waiting = self.spare.pop().unwrap_or_default();
        waiting.push_back(item);
        self.lines.push(Line { name, head: Head::Due(due), waiting });
        self.next = self.next.min(due);
    }

    /// Whether any command waits.
    #[inline(always)]
    pub(crate) fn has_any(&self) -> bool {
        self.next != NEVER
    }

    /// Whether a line has to be looked at by now.
    #[inline]
    pub(crate) fn is_due(&self, now: Ticks) -> bool {
        self.next <= now
    }

    /// The time at which a line has to be looked at; none if nothing waits.
    #[inline]
    pub(crate) fn next(&self) -> Option<Ticks> {
        self.has_any().then_some(self.next)
    }

    /// The line that has to be looked at first, if one has by now: its name, its first command, and
    /// what that waits for.
    pub(crate) fn first(&self, now: Ticks) -> Option<(LineName, Head, &T)> {
        let line = self.lines.iter().min_by_key(|line| line.head.at())?;
        let item = line.waiting.front()?;
        (line.head.at() <= now).then_some((line.name, line.head, item))
    }

    /// The first of a line has this time.
    pub(crate) fn set_due(&mut self, name: LineName, due: Ticks) {
        if let Some(line) = self.lines.iter_mut().find(|line| line.name == name) {
            line.head = Head::Due(due);
        }
        self.find_next();
    }

    /// The first of a line begins.
    pub(crate) fn pop(&mut self, name: LineName) -> Option<T> {
        let at = self.lines.iter().position(|line| line.name == name)?;
        let line = &mut self.lines[at];
        let item = line.waiting.pop_front();
        line.head = Head::Unasked;
        if line.waiting.is_empty() {
            let Line { waiting, .. } = self.lines.swap_remove(at);
            self.spare.push(waiting);
        }
        self.find_next();
        item
    }

    /// The limits of these lines have changed: their first ask for a time anew. Those that had one
    /// are given to `booked`.
    pub(crate) fn ask_anew(
        &mut self,
        changed: impl Fn(LineName) -> bool,
        mut booked: impl FnMut(LineName, &T),
    ) {
        for line in self.lines.iter_mut().filter(|line| changed(line.name)) {
            line.lose_time(&mut booked);
        }
        self.find_next();
    }

    /// These commands wait no more. Those that had a time are given to `booked`. Returns how many
    /// commands there were.
    pub(crate) fn drop_all(
        &mut self,
        dropped: impl Fn(&T) -> bool,
        mut booked: impl FnMut(LineName, &T),
    ) -> usize {
        let mut count = 0;
        for line in &mut self.lines {
            if line.waiting.front().is_some_and(&dropped) {
                line.lose_time(&mut booked);
            }
            let before = line.waiting.len();
            line.waiting.retain(|item| !dropped(item));
            count += before - line.waiting.len();
        }
        self.lines.retain(|line| !line.waiting.is_empty());
        self.find_next();
        count
    }

    fn find_next(&mut self) {
        self.next = self.lines.iter().map(|line| line.head.at()).min().unwrap_or(NEVER);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rblk_config::Limits;
    use rblk_fabric::Micros;

    use super::*;
    use crate::limits::Limiter;

    fn line(session: u16) -> LineName {
        let session = SessionIndex { index: session, life: 1 };
        LineName { session, volume: VolumeIndex(0) }
    }

    fn limiter(iops: u32) -> Arc<Limiter> {
        let limits = Limits { iops: Some(iops), iops_burst: Some(1), ..Limits::default() };
        Limiter::renewed(None, limits).unwrap()
    }

    /// Has every line that is due by now begin commands, and returns their sessions.
    fn begin(waiting: &mut Waiting<u32>, limiter: &Limiter, now: Ticks) -> Vec<u16> {
        let mut begun = Vec::new();
        while let Some((name, head, _)) = waiting.first(now) {
            match head {
                Head::Unasked => waiting.set_due(name, limiter.take(0, now)),
                Head::Due(_) => {
                    waiting.pop(name).unwrap();
                    begun.push(name.session.index);
                }
            }
        }
        begun
    }

    fn at(us: u64) -> Ticks {
        Ticks::of(Micros::new(us))
    }

    #[test]
    fn lines_take_turns_however_long_they_are() {
        let (limiter, mut waiting) = (limiter(1000), Waiting::default());
        for (session, depth) in [(1, 128), (2, 4)] {
            for item in 0..depth {
                if waiting.has(line(session)) || limiter.take(0, at(0)) > at(0) {
                    let due = if waiting.has(line(session)) { at(0) } else { at(1000) };
                    waiting.push(line(session), due, item);
                }
            }
        }
        let mut served = [0_u32; 3];
        for us in (0..1_000_000).step_by(100) {
            for session in begin(&mut waiting, &limiter, at(us)) {
                served[usize::from(session)] += 1;
                // Answered at once, and the host sends its next command.
                waiting.push(line(session), at(us), 0);
            }
        }
        assert!(served[1].abs_diff(served[2]) <= 2, "{served:?}");
        assert!((950..=1002).contains(&(served[1] + served[2])), "{served:?}");
    }

    #[test]
    fn what_was_dropped_never_begins_and_the_next_asks_anew() {
        let mut waiting = Waiting::default();
        for item in 0..4 {
            waiting.push(line(1), at(50), item);
        }
        waiting.push(line(2), at(70), 9);
        assert_eq!(waiting.next(), Some(at(50)));
        let mut booked = Vec::new();
        assert_eq!(
            waiting.drop_all(|item| item % 2 == 0, |name, item| booked.push((name, *item))),
            2
        );
        assert_eq!(booked, [(line(1), 0)], "only the first has a time");
        assert_eq!(waiting.first(at(0)), Some((line(1), Head::Unasked, &1)));
        assert_eq!(waiting.drop_all(|item| *item < 9, |_, _| panic!("no time")), 2);
        assert!(!waiting.has(line(1)) && waiting.has(line(2)));
        assert_eq!((waiting.next(), waiting.first(at(69))), (Some(at(70)), None));
        assert_eq!(waiting.drop_all(|_| true, |_, _| {}), 1);
        assert_eq!(waiting.next(), None);
        assert!(!waiting.is_due(at(u64::MAX >> 20)));
    }

    #[test]
    fn new_limits_count_for_what_waits() {
        let mut waiting = Waiting::default();
        waiting.push(line(1), at(1_000_000), 7);
        waiting.push(line(2), at(1_000_000), 8);
        let mut booked = Vec::new();
        waiting.ask_anew(|name| name == line(1), |_, item| booked.push(*item));
        assert_eq!(booked, [7]);
        assert!(waiting.is_due(at(0)));
        assert_eq!(begin(&mut waiting, &limiter(1000), at(5)), [1]);
        assert_eq!(waiting.next(), Some(at(1_000_000)));
    }
}
