//! [`Plan`]: the kinds and the frequencies of the events of a sequence, from a seed.

use rblk_rig::seed::Random;

use super::directory::Kind;

/// An event in the world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A run begins, with some of the volumes.
    Start,
    /// A start fails after it has read the records.
    FailedStart,
    /// A start is killed while it writes the records.
    KilledStart,
    /// A host opens a volume, for the first time or after it was away.
    Open,
    /// A host writes.
    Write,
    /// A host writes durably.
    WriteDurably,
    /// A host flushes.
    Flush,
    /// Memory is written to the kernel and to disks.
    Flow,
    /// A volume changes while it is served.
    Alter,
    /// A volume is added.
    Add,
    /// A volume is removed, perhaps by force.
    Remove,
    /// The run ends well.
    Stop,
    /// The run ends before all is written.
    GiveUp,
    /// Another program takes the place of this one, or dies on the way.
    Upgrade,
    /// The process is killed, perhaps in the middle of a write of a record.
    Kill,
    /// The machine loses its power.
    Cut,
    /// The next sync of a store loses writes.
    LoseSync,
    /// The state directory takes no more, or takes everything again.
    Fault,
    /// A record vanishes.
    Vanish,
    /// Losses that could not be noted are noted, if the directory permits that now.
    Tick,
}

impl Event {
    /// All events, with their usual weights.
    const ALL: [(Self, u64); 20] = [
        (Self::Start, 20),
        (Self::FailedStart, 4),
        (Self::KilledStart, 3),
        (Self::Open, 10),
        (Self::Write, 60),
        (Self::WriteDurably, 2),
        (Self::Flush, 5),
        (Self::Flow, 3),
        (Self::Alter, 6),
        (Self::Add, 3),
        (Self::Remove, 3),
        (Self::Stop, 3),
        (Self::GiveUp, 1),
        (Self::Upgrade, 3),
        (Self::Kill, 4),
        (Self::Cut, 3),
        (Self::LoseSync, 1),
        (Self::Fault, 1),
        (Self::Vanish, 1),
        (Self::Tick, 2),
    ];

    fn fits(self, is_up: bool) -> bool {
        match self {
            Self::Start | Self::FailedStart | Self::KilledStart => !is_up,
            Self::Flow | Self::Cut | Self::LoseSync | Self::Fault | Self::Vanish => true,
            _ => is_up,
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Decides everything.
    pub seed: u64,
    /// Where records are kept.
    pub kind: Kind,
    /// Events.
    pub events: u64,
    weights: Vec<(Event, u64)>,
}

impl Plan {
    /// The plan of a seed. Some events are rare or absent in a sequence and others frequent, so
    /// that different orders occur.
    #[must_use]
    pub fn random(seed: u64, kind: Kind) -> Self {
        let mut random = Random::new(seed ^ 0x7275_6e73);
        let events = [15, 40, 100][random.index(3)];
        let weights = Event::ALL.map(|(event, weight)| {
            let is_needed = matches!(event, Event::Start | Event::Open | Event::Write);
            let factor = [0, 1, 1, 4][random.index(4)];
            (event, weight * if is_needed { 1 } else { factor })
        });
        Self { seed, kind, events, weights: weights.to_vec() }
    }

    /// The next event, while a process serves or (false) none does.
    #[must_use]
    pub fn draw(&self, random: &mut Random, is_up: bool) -> Event {
        let fits = |(event, _): &&(Event, u64)| event.fits(is_up);
        let all = self.weights.iter().filter(fits).map(|(_, weight)| weight).sum();
        let mut at = random.below(all);
        for (event, weight) in self.weights.iter().filter(fits) {
            if at < *weight {
                return *event;
            }
            at -= weight;
        }
        Event::Start
    }
}
