//! [`Events`]: the recent events of hosts and volumes, for people and for programs.
//!
//! Bounded in number and in rate, both by kind: many events of one kind neither push those of
//! another kind out nor fill the log. Events beyond that are counted, and the next event of the
//! kind has their number. Pure: the time is an argument.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The `target` of the log lines that carry an event with its fields: for a journal. In a plain log
/// other lines say the same to people.
pub const EVENT_LINES: &str = "rblk_event";

/// Events of one kind that are kept.
const KEPT_PER_KIND: usize = 64;
/// Events of one kind that may come at once.
const BURST: u32 = 16;
/// Time until another event may come after that.
const PACE: Duration = Duration::from_secs(1);

/// The kind of an event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A host began a session.
    Connect,
    /// A host came back to its session.
    Resume,
    /// A host that holds a volume has lost its connections. Its session is kept for the lease.
    Loss,
    /// A host ended its session in good order, or left while it held no volume.
    Leave,
    /// The lease of a lost session ended.
    Expire,
    /// A host lost a volume to another host.
    Fence,
    /// A host failed its proof.
    Refuse,
    /// A session ended because its key is no longer allowed.
    Revoke,
    /// Acknowledged writes may be lost.
    LostWrites,
    /// A store failed an operation.
    StoreError,
    /// The file or device of a volume is not the served one any more.
    StoreFault,
    /// The target cannot write to `state_dir`.
    StateDir,
    /// A command took longer than `slow_io`.
    SlowIo,
    /// A device or its CQ broke.
    Device,
    /// The target begins to stop.
    Drain,
    /// Another program takes the place of the target, or has taken it.
    Upgrade,
    /// A kind that a later version of the target has. No target of this version reports it.
    #[serde(other)]
    Later,
}

impl EventKind {
    /// Every kind that this version reports.
    pub const ALL: [Self; 16] = [
        Self::Connect,
        Self::Resume,
        Self::Loss,
        Self::Leave,
        Self::Expire,
        Self::Fence,
        Self::Refuse,
        Self::Revoke,
        Self::LostWrites,
        Self::StoreError,
        Self::StoreFault,
        Self::StateDir,
        Self::SlowIo,
        Self::Device,
        Self::Drain,
        Self::Upgrade,
    ];

    /// The word in JSON, metrics and the journal.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Resume => "resume",
            Self::Loss => "loss",
            Self::Leave => "leave",
            Self::Expire => "expire",
            Self::Fence => "fence",
            Self::Refuse => "refuse",
            Self::Revoke => "revoke",
            Self::LostWrites => "lost-writes",
            Self::StoreError => "store-error",
            Self::StoreFault => "store-fault",
            Self::StateDir => "state-dir",
            Self::SlowIo => "slow-io",
            Self::Device => "device",
            Self::Drain => "drain",
            Self::Upgrade => "upgrade",
            Self::Later => "later",
        }
    }

    /// Whether an administrator should look at it.
    #[must_use]
    pub fn is_warning(self) -> bool {
        !matches!(self, Self::Connect | Self::Resume | Self::Leave | Self::Drain | Self::Upgrade)
    }

    fn place(self) -> usize {
        Self::ALL.iter().position(|kind| *kind == self).unwrap_or(0)
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// An event without a number and a time yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Occurrence {
    /// The kind.
    pub kind: EventKind,
    /// The host.
    pub host: Option<String>,
    /// The volume.
    pub volume: Option<String>,
    /// The address of the host.
    pub address: Option<String>,
    /// The event in words.
    pub text: String,
}

impl Occurrence {
    /// An occurrence of a kind, in words.
    #[must_use]
    pub fn new(kind: EventKind, text: impl Into<String>) -> Self {
        Self { kind, host: None, volume: None, address: None, text: text.into() }
    }

    /// Adds the host and its address.
    #[must_use]
    pub fn of_host(self, host: impl ToString, address: &str) -> Self {
        Self { host: Some(host.to_string()), address: Some(address.to_owned()), ..self }
    }

    /// Adds the volume.
    #[must_use]
    pub fn of_volume(self, volume: impl ToString) -> Self {
        Self { volume: Some(volume.to_string()), ..self }
    }
}

/// An event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Its number: each is higher than those before, from 1 in each run of the target.
    pub number: u64,
    /// Its time, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The kind.
    pub kind: EventKind,
    /// The host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The address of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The event in words.
    pub text: String,
    /// Events of this kind that were left out before this one, because there were too many.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The events after a number.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EventsReport {
    /// The run of the target, in hexadecimal. Another run counts from 1 again.
    pub instance: String,
    /// The highest number so far; 0 before the first event. Later events have higher ones.
    pub last: u64,
    /// The events that are kept, oldest first.
    pub events: Vec<Event>,
}

/// The limit on the rate of a kind.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    left: u32,
    since: Option<Instant>,
    left_out: u64,
    total: u64,
}

impl Allowance {
    const FULL: Self = Self { left: BURST, since: None, left_out: 0, total: 0 };

    /// Whether another event of the kind may come now.
    fn take(&mut self, now: Instant) -> bool {
        self.total += 1;
        let passed = self.since.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let more = u32::try_from(passed.as_secs() / PACE.as_secs()).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(more).min(BURST);
        if self.since.is_none() || more > 0 {
            self.since = Some(now);
        }
        if self.left == 0 {
            self.left_out += 1;
            return false;
        }
        self.left -= 1;
        true
    }
}

/// The events of a run. See the module.
#[derive(Debug)]
pub struct Events {
    last: u64,
    kept: VecDeque<Event>,
    allowances: [Allowance; EventKind::ALL.len()],
}

impl Default for Events {
    fn default() -> Self {
        let allowances = [Allowance::FULL; EventKind::ALL.len()];
        Self { last: 0, kept: VecDeque::new(), allowances }
    }
}

impl Events {
    /// Notes an occurrence. Returns the event, unless there are too many of its kind.
    pub fn note(&mut self, what: Occurrence, now: Instant, unix_ms: u64) -> Option<&Event> {
        let allowance = self.allowances.get_mut(what.kind.place())?;
        if !allowance.take(now) {
            return None;
        }
        let left_out = std::mem::take(&mut allowance.left_out);
        if self.kept.iter().filter(|event| event.kind == what.kind).count() >= KEPT_PER_KIND
            && let Some(oldest) = self.kept.iter().position(|event| event.kind == what.kind)
        {
            self.kept.remove(oldest);
        }
        self.last += 1;
        let Occurrence { kind, host, volume, address, text } = what;
        let number = self.last;
        self.kept.push_back(Event { number, unix_ms, kind, host, volume, address, text, left_out });
        self.kept.back()
    }

    /// The highest number so far, and the kept events after a number.
    #[must_use]
    pub fn after(&self, number: u64) -> (u64, Vec<Event>) {
        (self.last, self.kept.iter().filter(|event| event.number > number).cloned().collect())
    }

    /// The number of events of each kind, those left out included.
    #[must_use]
    pub fn totals(&self) -> Vec<EventCount> {
        let counts = EventKind::ALL.into_iter().zip(&self.allowances);
        counts.map(|(kind, allowance)| EventCount { kind, total: allowance.total }).collect()
    }
}

/// The number of events of a kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EventCount {
    /// The kind.
    pub kind: EventKind,
    /// The number since the start.
    pub total: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(host: &str) -> Occurrence {
        Occurrence::new(EventKind::Loss, "gone").of_host(host, "tcp://192.0.2.1:5")
    }

    #[test]
    fn an_event_of_a_later_version_is_understood() {
        let text = r#"{"number":1,"unix_ms":2,"kind":"of-tomorrow","text":"something new"}"#;
        let event: Event = serde_json::from_str(text).expect("an event");
        assert_eq!(event.kind, EventKind::Later);
    }

    #[test]
    fn many_of_one_kind_push_no_other_out() {
        let (mut events, mut now) = (Events::default(), Instant::now());
        events.note(Occurrence::new(EventKind::LostWrites, "lost").of_volume("v"), now, 1).unwrap();
        for host in 0..1000 {
            now += PACE;
            events.note(loss(&host.to_string()), now, 2).unwrap();
        }
        let (last, kept) = events.after(0);
        assert_eq!((last, kept.len()), (1001, KEPT_PER_KIND + 1));
        assert_eq!(kept[0].volume.as_deref(), Some("v"), "the oldest of all");
        let hosts: Vec<&str> = kept[1..].iter().filter_map(|event| event.host.as_deref()).collect();
        assert_eq!((hosts[0], hosts[KEPT_PER_KIND - 1]), ("936", "999"));
        assert_eq!(events.after(1000).1.len(), 1);
        assert!(events.after(1001).1.is_empty());
    }

    #[test]
    fn events_beyond_the_burst_are_only_counted() {
        let (mut events, now) = (Events::default(), Instant::now());
        let told = (0..100).filter(|_| events.note(loss("a"), now, 1).is_some()).count();
        assert_eq!(told, BURST as usize);
        events.note(Occurrence::new(EventKind::Drain, "d"), now, 1).expect("of another kind");
        // Between two paces nothing is gained, and asking does not delay the next one.
        assert_eq!(events.note(loss("a"), now + PACE / 2, 1), None);
        let next = events.note(loss("b"), now + PACE, 9).expect("one a pace").clone();
        assert_eq!((next.left_out, next.unix_ms), (101 - u64::from(BURST), 9));
        assert_eq!(events.note(loss("b"), now + PACE, 9), None);
        let totals = events.totals();
        let of = |kind| totals.iter().find(|count| count.kind == kind).map(|count| count.total);
        assert_eq!((of(EventKind::Loss), of(EventKind::Drain)), (Some(103), Some(1)));
        assert_eq!(of(EventKind::Fence), Some(0));
        // A long silence gives a whole burst, and no more.
        let later = now + PACE * 1000;
        let told = (0..100).filter(|_| events.note(loss("a"), later, 1).is_some()).count();
        assert_eq!(told, BURST as usize);
    }

    #[test]
    fn the_word_of_a_kind_is_that_of_its_json() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.word());
            assert_eq!(EventKind::ALL[kind.place()], kind);
        }
        let mut events = Events::default();
        let event = events.note(Occurrence::new(EventKind::Drain, "d"), Instant::now(), 5).unwrap();
        let json = serde_json::to_string(event).unwrap();
        assert_eq!(json, r#"{"number":1,"unix_ms":5,"kind":"drain","text":"d"}"#);
        assert_eq!(&serde_json::from_str::<Event>(&json).unwrap(), event);
    }
}
