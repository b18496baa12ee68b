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
    /// The first host does not reach the member that it uses or asks.
    LinkUsed(u64),
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
    /// The next member that has the lock and waits for the map is stopped, and loses the lock.
    StopNextClaim(u64),
    /// Every member but the owner dies.
    KillOthers(u64),
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
        let mut faults = Self::story(&mut random);
        for _ in 0..count {
            let gap = [300, 2_000, 15_000][random.index(3)];
            let fault = Self::fault(&mut random, members, has_long);
            faults.push((random.within(20, gap), fault));
        }
        // Late writes matter most where OSDs learn late of a fence.
        let is_late = matches!(faults.get(1), Some((1_500, Fault::PauseOwner(30_000))));
        let (write_back, map_delay) =
            if is_late { (true, 60_000) } else { (write_back, map_delay) };
        Self { seed, members, write_back, retain, map_delay, faults }
    }

    /// In half of the plans, faults that go together.
    fn story(random: &mut Random) -> Vec<(u64, Fault)> {
        let gap = random.within(50, 1_500);
        match random.below(12) {
            // Its hosts still reach the owner while another member is about to serve.
            0 => vec![
                (gap, Fault::CutOwner(40_000)),
                (gap, Fault::Mount(1, true)),
                (25_000, Fault::Slow(10)),
            ],
            // Two members claim at once.
            1 => vec![(gap, Fault::StopNextClaim(random.within(4_000, 9_000))), (gap, Fault::Move)],
            // The only member takes the image back while its own writes are late.
            2 => vec![
                (gap, Fault::Slow(30_000)),
                (gap, Fault::KillOthers(40_000)),
                (gap, Fault::DropLock(random.within(10, 1_500))),
            ],
            // Late writes of an owner before the last one.
            3 => vec![
                (gap, Fault::Slow(30_000)),
                (1_500, Fault::PauseOwner(30_000)),
                (6_050, Fault::Move),
                (150, Fault::Move),
                (150, Fault::Move),
                (150, Fault::Move),
            ],
            // The holder has written at the next owner, and asks the former one, which is cut off.
            4 => vec![
                (gap, Fault::CutOwner(30_000)),
                (random.within(10, 1_500), Fault::LinkUsed(2_200)),
                (random.within(5_500, 7_500), Fault::LinkUsed(8_000)),
            ],
            // The holder goes back to the owner while another member claims the image for it.
            5 => vec![
                (gap, Fault::LinkUsed(random.within(2_100, 2_500))),
                (random.within(2_000, 2_200), Fault::CutOwner(random.within(2_000, 3_500))),
                (random.within(50, 300), Fault::LinkUsed(3_000)),
                (random.within(3_000, 4_000), Fault::CutOwner(30_000)),
                (300, Fault::Mount(1, true)),
            ],
            _ => Vec::new(),
        }
    }

    /// Whether no fault of it is a reason to fence a mount: no process dies, nobody takes the
    /// volume over, no lock is lost, nothing is stopped or cut off for as long as the cluster waits
    /// for a client, and no host asks for the volume while the holder is away for longer than a
    /// lease.
    #[must_use]
    pub fn is_gentle(&self) -> bool {
        let mounts = self.faults.iter().any(|(_, fault)| matches!(fault, Fault::Mount(..)));
        self.faults.iter().all(|(_, fault)| match fault {
            Fault::Move | Fault::Watch(_) | Fault::Slow(_) | Fault::Host(..) => true,
            Fault::Link(_, _, time) | Fault::LinkOwner(time) | Fault::LinkUsed(time) => {
                !mounts || *time < 8_000
            }
            Fault::Pause(_, time) | Fault::PauseOwner(time) => *time < 25_000,
            Fault::Cut(_, time) | Fault::CutOwner(time) => *time < 25_000,
            Fault::Mount(_, take_over) => !take_over,
            Fault::Kill(..) | Fault::KillOwner(_) | Fault::KillOthers(_) => false,
            Fault::DropLock(_) | Fault::DropNextLock(_) | Fault::StopNextClaim(_) => false,
        })
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
