//! [`Waiting`]: the commands of one poll group that wait because a volume or host is over its
//! limit, in lines, and the order of these lines. Pure: time is an argument.
//!
//! A line belongs to one session and one volume. Only the first command of a line has a time at
//! which it may start ([`Head::Due`]); when it has started, the next command gets one. The line
//! with the earliest time is served first. Within a line the order is that of arrival.
//!
//! The lines hold at most as many commands as the connections of the group may have outstanding,
//! and no line is empty. When a connection ends, only its own lines are searched: many may end at
//! once.

use std::collections::VecDeque;

use super::bucket::Ticks;
use crate::volume::ids::{SessionIndex, VolumeIndex};

/// The session and the volume of a line's commands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LineName {
    /// The session.
    pub(crate) session: SessionIndex,
    /// The volume.
    pub(crate) volume: VolumeIndex,
}

/// The state of a line's first command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Head {
    /// The command needs a time: it has just become the first, or the limits changed.
    Unasked,
    /// The command waits for this time.
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
struct WaitingLine<T> {
    name: LineName,
    head: Head,
    waiting: VecDeque<T>,
}

impl<T> WaitingLine<T> {
    /// Takes the time of the line's first command away, and passes a command that had one to
    /// `booked`.
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
    // Sorted by name.
    lines: Vec<WaitingLine<T>>,
    // Lower bound of the times of all lines.
    next: Ticks,
    // Lists of ended lines, for reuse.
    spare: Vec<VecDeque<T>>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), next: NEVER, spare: Vec::new() }
    }
}

const NEVER: Ticks = Ticks(u64::MAX);

impl<T> Waiting<T> {
    /// The index of a line, or the index at which it would be.
    fn place(&self, name: LineName) -> Result<usize, usize> {
        self.lines.binary_search_by_key(&name, |line| line.name)
    }

    /// Whether commands wait in this line: a new command then waits behind them.
    pub(crate) fn has(&self, name: LineName) -> bool {
        self.place(name).is_ok()
    }

    /// Adds a command at the end of its line, or as the first of a new line, until `due`.
    pub(crate) fn push(&mut self, name: LineName, due: Ticks, item: T) {
        match self.place(name) {
            Ok(at) => self.lines[at].waiting.push_back(item),
            Err(at) => {
                let mut waiting = self.spare.pop().unwrap_or_default();
                waiting.push_back(item);
                self.lines.insert(at, WaitingLine { name, head: Head::Due(due), waiting });
                self.next = self.next.min(due);
            }
        }
    }

    /// Whether any command waits.
    #[inline(always)]
    pub(crate) fn has_any(&self) -> bool {
        !self.lines.is_empty()
    }

    /// Whether a line may be due.
    #[inline]
    pub(crate) fn is_due(&self, now: Ticks) -> bool {
        self.next <= now
    }

    /// The time before which no line is due; `None` if no command waits.
    #[inline]
    pub(crate) fn next(&self) -> Option<Ticks> {
        self.has_any().then_some(self.next)
    }

    /// The first line, if it is due: its name, the state of its first command, and that command.
    pub(crate) fn first(&mut self, now: Ticks) -> Option<(LineName, Head, &T)> {
        let line = self.lines.iter().min_by_key(|line| line.head.at());
        self.next = line.map_or(NEVER, |line| line.head.at());
        let line = line.filter(|line| line.head.at() <= now)?;
        Some((line.name, line.head, line.waiting.front()?))
    }

    /// Sets the time of a line's first command.
    pub(crate) fn set_due(&mut self, name: LineName, due: Ticks) {
        if let Ok(at) = self.place(name) {
            self.lines[at].head = Head::Due(due);
            self.next = self.next.min(due);
        }
    }

    /// Takes the first command of a line, which starts.
    pub(crate) fn pop(&mut self, name: LineName) -> Option<T> {
        let at = self.place(name).ok()?;
        let line = &mut self.lines[at];
        let item = line.waiting.pop_front();
        line.head = Head::Unasked;
        self.next = Head::Unasked.at();
        self.leave_if_empty(at);
        item
    }

    /// The limits of the lines `changed` have changed: their first commands need new times. Passes
    /// commands that had a time to `booked`.
    pub(crate) fn ask_anew(
        &mut self,
        changed: impl Fn(LineName) -> bool,
        mut booked: impl FnMut(LineName, &T),
    ) {
        for line in self.lines.iter_mut().filter(|line| changed(line.name)) {
            line.lose_time(&mut booked);
            self.next = Head::Unasked.at();
        }
    }

    /// Removes commands of a line. If the first of them had a time, passes it to `booked`. Does not
    /// search other lines.
    pub(crate) fn drop_of(
        &mut self,
        name: LineName,
        dropped: impl Fn(&T) -> bool,
        mut booked: impl FnMut(LineName, &T),
    ) {
        let Ok(at) = self.place(name) else { return };
        let line = &mut self.lines[at];
        if line.waiting.front().is_some_and(&dropped) {
            line.lose_time(&mut booked);
            self.next = Head::Unasked.at();
        }
        line.waiting.retain(|item| !dropped(item));
        self.leave_if_empty(at);
    }

    /// Removes a line without commands.
    fn leave_if_empty(&mut self, at: usize) {
        if self.lines[at].waiting.is_empty() {
            let WaitingLine { waiting, .. } = self.lines.remove(at);
            self.spare.push(waiting);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use rblk_config::Limits;
    use rblk_runtime::Micros;

    use super::*;
    use crate::volume::limits::Limiter;

    fn line(session: u16) -> LineName {
        let session = SessionIndex { index: session, life: 1 };
        LineName { session, volume: VolumeIndex(0) }
    }

    fn limiter(iops: u32) -> Arc<Limiter> {
        let limits = Limits { iops: Some(iops), iops_burst: Some(1), ..Limits::default() };
        Limiter::renewed(None, limits).unwrap()
    }

    /// Starts the commands of all due lines, and returns their sessions.
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
                // Answered at once; the host then sends its next command.
                waiting.push(line(session), at(us), 0);
            }
        }
        assert!(served[1].abs_diff(served[2]) <= 2, "{served:?}");
        assert!((950..=1002).contains(&(served[1] + served[2])), "{served:?}");
    }

    #[test]
    fn dropped_commands_never_start_and_the_next_gets_a_new_time() {
        let mut waiting = Waiting::default();
        for item in 0..4 {
            waiting.push(line(1), at(50), item);
        }
        waiting.push(line(2), at(70), 9);
        assert_eq!(waiting.next(), Some(at(50)));
        let mut booked = Vec::new();
        waiting.drop_of(line(1), |item| item % 2 == 0, |name, item| booked.push((name, *item)));
        assert_eq!(booked, [(line(1), 0)], "only the first has a time");
        assert_eq!(waiting.first(at(0)), Some((line(1), Head::Unasked, &1)));
        waiting.drop_of(line(1), |item| *item < 9, |_, _| panic!("no time"));
        assert!(!waiting.has(line(1)) && waiting.has(line(2)));
        assert_eq!(waiting.first(at(69)), None);
        assert_eq!((waiting.next(), waiting.is_due(at(69))), (Some(at(70)), false));
        waiting.drop_of(line(2), |_| true, |_, _| {});
        assert_eq!(waiting.next(), None);
        assert_eq!(waiting.first(at(u64::MAX >> 20)), None);
        assert!(!waiting.is_due(at(u64::MAX >> 20)));
    }

    #[test]
    fn ended_connections_search_only_their_own_lines() {
        let mut waiting = Waiting::default();
        for session in 0..1000 {
            (0..8).for_each(|item| waiting.push(line(session), at(50), item));
        }
        let looked = Cell::new(0);
        for session in (0..1000).rev() {
            let is_dropped = |_: &u32| looked.replace(looked.get() + 1) < u32::MAX;
            waiting.drop_of(line(session), is_dropped, |_, _| {});
        }
        assert!(!waiting.has_any());
        assert!(looked.get() <= 1000 * (8 + 1), "{}", looked.get());
    }

    #[test]
    fn new_limits_apply_to_waiting_commands() {
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
