//! [`Plan`]: a run of the simulation of a group, and its faults.

use rblk_rig::seed::Random;

use super::HOSTS;

/// Something that goes wrong, or that people order. Times are milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A member dies, and starts again after a while.
    Kill(usize, u64),
    /// The owner dies.
    KillOwner(u64),
    /// A member is stopped for a while.
    Pause(usize, u64),
    /// The owner is stopped.
    PauseOwner(u64),
    /// A member does not reach the cluster.
    Cut(usize, u64),
    /// The owner does not reach the cluster.
    CutOwner(u64),
    /// A host does not reach a member.
    Link(usize, usize, u64),
    /// A host does not reach the owner.
    LinkOwner(u64),
    /// The owner hands over by order.
    Move,
    /// A host mounts the volume, perhaps by force.
    Mount(usize, bool),
    /// The process of a mount dies.
    Host(usize, u64),
    /// librbd loses its lock for a moment.
    DropLock(u64),
    /// librbd loses the next lock for a moment, as soon as it has it.
    DropNextLock(u64),
    /// Other members cannot ask the owner.
    Watch(u64),
    /// Some writes take long.
    Slow(u64),
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// Members of the group.
    pub members: usize,
    /// Members cache writes.
    pub write_back: bool,
    /// Hosts keep writes until a FLUSH covers them.
    pub retain: bool,
    /// Milliseconds that OSDs and clients may take to learn of a map.
    pub map_delay: u64,
    /// The faults, each with the time since the one before.
    pub faults: Vec<(u64, Fault)>,
}

impl Plan {
    /// The plan of a seed.
    #[must_use]
    pub fn random(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x67_706c_616e);
        let members = 2 + random.index(2);
        let write_back = random.chance(500);
        let retain = random.chance(500);
        let map_delay = [50, 2_000, 60_000][random.index(3)];
        let count = random.within(3, 12);
        let has_long = random.chance(30);
        let mut faults = Vec::new();
        for _ in 0..count {
            let gap = [300, 2_000, 15_000][random.index(3)];
            let fault = Self::fault(&mut random, members, has_long);
            faults.push((random.within(20, gap), fault));
        }
        Self { seed, members, write_back, retain, map_delay, faults }
    }

    fn fault(random: &mut Random, members: usize, has_long: bool) -> Fault {
        let (member, host) = (random.index(members), random.index(HOSTS));
        let long = if has_long { 4_000_000 } else { 50_000 };
        let most = [600, 8_000, 40_000, long][random.index(4)];
        let time = random.within(most / 3, most);
        match random.below(30) {
            0 => Fault::Kill(member, time),
            1 | 2 => Fault::KillOwner(time),
            3 => Fault::Pause(member, time),
            4..=6 => Fault::PauseOwner(time),
            7 => Fault::Cut(member, time),
            8..=10 => Fault::CutOwner(time),
            11 => Fault::Link(host, member, time),
            12 | 13 => Fault::LinkOwner(time),
            14..=17 => Fault::Move,
            18..=21 => Fault::Mount(host, random.chance(700)),
            22 => Fault::Host(host, time.min(10_000)),
            23 => Fault::DropLock(random.within(10, 2_500)),
            24 | 25 => Fault::DropNextLock(random.within(10, 2_500)),
            26 => Fault::Watch(time),
            _ => Fault::Slow(time),
        }
    }
}
