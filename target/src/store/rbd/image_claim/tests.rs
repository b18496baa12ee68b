//! Claims by members that are paused, killed and late, over a small model of a cluster: its lock,
//! its fenced clients, and objects that learn of a fence with the first request by a newer map.
//! Clients that are no members take the lock of a dead owner, too.

use std::collections::BTreeMap;

use super::*;

/// Objects of the image.
const OBJECTS: usize = 3;
/// What a record says of a host that comes back.
const HOLDERS: [Option<AccessMode>; 4] =
    [None, Some(AccessMode::Shared), Some(AccessMode::Exclusive), Some(AccessMode::Exclusive)];
/// Time that a fence by librbd lasts, as it breaks a lock, unless it is told not to fence.
const SHORT: u64 = 200;
/// Time between two looks: several acts of another member.
const PAUSE: u64 = 10;
/// Time after which the cluster drops the watch of a client that it does not hear of.
const WATCH: u64 = 60;

/// A mistake in the acts of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    None,
    /// The client that serves does not wait for the map with the fence.
    ServesBeforeMap,
    /// A client that fences nobody does not wait for the map with the fences of others.
    OldMap,
    /// The fence lasts as long as that of librbd.
    ShortFence,
    /// Librbd fences, too, and first.
    LibrbdFences,
    /// An owner is not fenced at all, neither by the claim nor by librbd.
    NoFence,
    /// The owner's note is replaced without a comparison, and the lock is taken without a look.
    TwoClaims,
    /// An owner that hands over gives the lock back before its writes have ended.
    CleanLie,
    /// A member that starts anew does not fence the client that it had before.
    ReopensEarly,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Idle,
    Claims,
    Serves,
    HandsOver,
    Lost,
}

struct Member {
    claim: Claim,
    next: Option<Act>,
    mode: Mode,
    client: String,
    epoch: u64,
    // The newest map that its client has.
    map: u64,
    paused_until: u64,
    heard_at: u64,
    // The epoch at its last look before it took the lock.
    looked_at: u64,
}

/// The events beside an owner that is killed.
#[derive(Clone, Copy)]
struct Chaos {
    pauses: bool,
    // A member dies between two acts of a claim, and of a hand-over.
    kills: bool,
    foreigners: bool,
}

impl Chaos {
    const ALL: Self = Self { pauses: true, kills: true, foreigners: true };
    const NONE: Self = Self { pauses: false, kills: false, foreigners: false };
}

struct Write {
    client: String,
    owner_epoch: u64,
    map: u64,
    object: usize,
}

struct World {
    mistake: Mistake,
    chaos: Chaos,
    // There was no chaos from the first moment.
    is_calm: bool,
    random: u64,
    now: u64,
    map: u64,
    // The map that fenced a client, and the end of that.
    fenced: BTreeMap<String, (u64, u64)>,
    lock: Option<String>,
    note: OwnerNote,
    // Of each object: the newest map that its OSD has, and the epoch of the last writer.
    objects: [(u64, u64); OBJECTS],
    writes: Vec<Write>,
    members: Vec<Member>,
    clients: u64,
    owned: u64,
    stale: Option<String>,
    // A client that is no member and has the lock.
    foreigner: Option<String>,
    // Such a client had the lock after an owner that did not give the image back.
    was_foreign: bool,
}

impl World {
    fn new(seed: u64, mistake: Mistake, chaos: Chaos) -> Self {
        let member = |number: u64| Member {
            claim: Claim::new(OwnerNote::default(), Wish::Idle, true),
            next: None,
            mode: Mode::Idle,
            client: format!("m{number}.0"),
            epoch: 0,
            map: 0,
            paused_until: 0,
            heard_at: 0,
            looked_at: 0,
        };
        Self {
            mistake,
            chaos,
            is_calm: !(chaos.kills || chaos.pauses || chaos.foreigners),
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            now: 0,
            map: 1,
            fenced: BTreeMap::new(),
            lock: None,
            note: OwnerNote::default(),
            objects: [(0, 0); OBJECTS],
            writes: Vec::new(),
            members: (0..3).map(member).collect(),
            clients: 0,
            owned: 0,
            stale: None,
            foreigner: None,
            was_foreign: false,
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn pick(&mut self, limit: usize) -> usize {
        usize::try_from(self.below(limit as u64)).unwrap()
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    fn fence(&mut self, by: usize, client: &str, until: u64) {
        let is_own = client.starts_with(&format!("m{by}."));
        if !(self.is(Mistake::NoFence) || is_own && self.is(Mistake::ReopensEarly)) {
            self.map += 1;
            let (map, now) = (self.map, self.now);
            let entry = self.fenced.entry(client.to_owned()).or_insert((map, until));
            // One that is in force stays as it is.
            if now >= entry.1 {
                *entry = (map, until);
            }
        }
    }

    /// Whether an OSD with that map refuses a client.
    fn refuses(&self, client: &str, map: u64) -> bool {
        let fence = self.fenced.get(client);
        fence.is_some_and(|(since, until)| map >= *since && self.now < *until)
    }

    /// Librbd breaks the lock of a client.
    fn taken_by_librbd(&mut self, by: usize, client: &str) {
        if self.is(Mistake::LibrbdFences) {
            self.fence(by, client, self.now + SHORT);
        }
    }

    fn is_alive(&self, client: &str) -> bool {
        if self.foreigner.as_deref() == Some(client) {
            return true;
        }
        self.members.iter().any(|m| m.client == client && self.now < m.heard_at + WATCH)
    }

    fn owner(&mut self, client: &str) -> Option<usize> {
        let now = self.now;
        self.members.iter().position(|m| m.client == client && m.paused_until <= now)
    }

    /// Carries out an act of a member's claim.
    fn act(&mut self, at: usize, act: Act) -> Option<Event> {
        let own = self.members[at].client.clone();
        Some(match act {
            Act::Look => {
                if self.lock.as_ref() != Some(&own) {
                    self.members[at].looked_at = self.note.epoch;
                }
                Event::Seen(self.note.clone(), self.lock.clone())
            }
            Act::ReadHolder => Event::Holder(HOLDERS[self.pick(HOLDERS.len())]),
            Act::FindWatch(client) => Event::Watched(self.is_alive(&client)),
            Act::Ask => Event::Answered(self.asked()),
            Act::Lock => Event::Locked(self.take_lock(at, own)),
            Act::Fence(client) => {
                let is_short = self.is(Mistake::ShortFence);
                self.fence(at, &client, if is_short { self.now + SHORT } else { u64::MAX });
                if !self.is(Mistake::ServesBeforeMap) {
                    self.members[at].map = self.map;
                }
                Event::Fenced
            }
            Act::NewestMap => {
                if !self.is(Mistake::OldMap) {
                    self.members[at].map = self.map;
                }
                Event::HasMap
            }
            Act::Break(client) => {
                let fences = !matches!(self.mistake, Mistake::NoFence | Mistake::ReopensEarly);
                assert!(!fences || self.fenced.contains_key(&client));
                let has_it = self.lock.as_ref() == Some(&client);
                if has_it {
                    self.taken_by_librbd(at, &client);
                    self.lock = None;
                }
                Event::Broken(has_it)
            }
            Act::Swap(epoch, note) => {
                let fits = self.note.epoch == epoch || self.is(Mistake::TwoClaims);
                if fits && !self.refuses(&own, self.map) {
                    self.swapped(at, note);
                }
                Event::Swapped(fits && self.note.client == own)
            }
            Act::Unlock => {
                self.lock.take_if(|client| *client == own);
                Event::Unlocked
            }
            Act::Pause => {
                self.members[at].paused_until = self.now + PAUSE;
                Event::Paused
            }
            Act::End(outcome) => {
                self.ended(at, outcome);
                return None;
            }
        })
    }

    /// Takes the lock for a client, if its owner is gone or dead, as librbd does.
    fn take_lock(&mut self, at: usize, client: String) -> Option<String> {
        let free = match self.lock.clone() {
            None => true,
            Some(owner) if self.is_alive(&owner) => false,
            Some(owner) => {
                self.taken_by_librbd(at, &owner);
                true
            }
        };
        if !free && !self.is(Mistake::TwoClaims) {
            return None;
        }
        self.lock = Some(client.clone());
        Some(client)
    }

    /// A member is the owner. Its note says whether hosts of before may resume.
    fn swapped(&mut self, at: usize, note: OwnerNote) {
        let rises = note.lineage > self.note.lineage;
        if self.was_foreign && !rises && self.mistake == Mistake::None {
            self.stale = Some(format!("hosts resume after a client that is no member: {note:?}"));
        }
        // Another owner came and died between its look and its lock.
        let was_late = self.members[at].looked_at != self.note.epoch;
        if self.is_calm && rises && !was_late {
            self.stale = Some(format!("hosts are fenced for nothing: {note:?}"));
        }
        (self.note, self.was_foreign) = (note, false);
    }

    /// A client that is no member comes, goes, or dies with the lock.
    fn foreign_step(&mut self) {
        if let Some(client) = self.foreigner.take() {
            if self.below(3) > 0 {
                self.lock.take_if(|owner| *owner == client);
            }
            return;
        }
        if self.members.iter().any(|member| member.mode == Mode::Claims) {
            return;
        }
        match self.lock.clone() {
            Some(owner) if self.is_alive(&owner) => return,
            // A program that fences for less than a machine is suspended leaves late writes to
            // those who come after it: nobody lengthens that fence.
            Some(owner) => self.fence(usize::MAX, &owner, u64::MAX),
            None => {}
        }
        self.clients += 1;
        let client = format!("f.{}", self.clients);
        (self.foreigner, self.lock) = (Some(client.clone()), Some(client));
        self.was_foreign |= !self.note.client.is_empty();
    }

    fn asked(&mut self) -> Option<AskAnswer> {
        let owner = self.lock.clone()?;
        let at = self.owner(&owner)?;
        let stays = self.below(4) == 0;
        let owner = &mut self.members[at];
        match owner.mode {
            Mode::Serves if stays => Some(AskAnswer::Stays),
            Mode::Serves | Mode::HandsOver => {
                owner.mode = Mode::HandsOver;
                Some(AskAnswer::HandsOver)
            }
            Mode::Idle | Mode::Claims | Mode::Lost => None,
        }
    }

    fn ended(&mut self, at: usize, outcome: Outcome) {
        let member = &mut self.members[at];
        member.mode = Mode::Idle;
        if let Outcome::Owned(note) = outcome {
            self.owned += 1;
            (member.mode, member.epoch) = (Mode::Serves, note.epoch);
        }
    }

    fn wish(&mut self) -> Wish {
        match self.below(4) {
            0 => Wish::Idle,
            1 => Wish::Fresh,
            2 => Wish::TakeOver,
            _ => Wish::Return(HostId([1; 16]), Generation(1)),
        }
    }

    fn begin(&mut self, at: usize) {
        self.clients += 1;
        let wish = self.wish();
        let note = OwnerNote { member: format!("m{at}"), ..OwnerNote::default() };
        let (clients, map, now) = (self.clients, self.map, self.now);
        let member = &mut self.members[at];
        member.claim = Claim::new(note, wish, true);
        member.client = format!("m{at}.{clients}");
        (member.map, member.heard_at) = (map, now);
        member.mode = Mode::Claims;
        member.next = Some(member.claim.next(Event::Begin));
    }

    fn step(&mut self, at: usize) {
        self.members[at].heard_at = self.now;
        let mode = self.members[at].mode;
        match mode {
            Mode::Idle => self.begin(at),
            Mode::Claims if self.chaos.kills && self.below(30) == 0 => {
                self.members[at].mode = Mode::Idle;
            }
            Mode::Claims => {
                let Some(act) = self.members[at].next.take() else { return };
                if self.below(20) == 0 {
                    // Another host asks for the volume.
                    let wish = self.wish();
                    self.members[at].claim.raise(wish);
                }
                let event = self.act(at, act);
                self.members[at].next = event.map(|event| self.members[at].claim.next(event));
            }
            Mode::Serves => self.serve(at),
            Mode::HandsOver => self.hand_over(at),
            Mode::Lost => {
                // The next claim of this member has a client of its own.
                self.members[at].mode = Mode::Idle;
            }
        }
    }

    fn serve(&mut self, at: usize) {
        if self.below(60) == 0 {
            // It is killed, and starts anew, while writes are still on their way.
            self.members[at].mode = Mode::Idle;
            return;
        }
        let (client, map) = (self.members[at].client.clone(), self.members[at].map);
        let has_lock = self.lock.as_ref() == Some(&client);
        if self.below(3) == 0 && (!has_lock || self.refuses(&client, self.map)) {
            self.members[at].mode = Mode::Lost;
            return;
        }
        let (owner_epoch, object) = (self.members[at].epoch, self.pick(3));
        self.writes.push(Write { client, owner_epoch, map, object });
    }

    fn hand_over(&mut self, at: usize) {
        let client = self.members[at].client.clone();
        if self.writes.iter().any(|write| write.client == client) && !self.is(Mistake::CleanLie) {
            return;
        }
        if self.lock.as_ref() != Some(&client) {
            // It was paused, and nothing proves its lock: it gives nothing back.
            self.members[at].mode = Mode::Lost;
            return;
        }
        if self.note.client == client {
            let (closing, epoch) = (client.clone(), self.note.epoch + 1);
            self.note = OwnerNote { client: String::new(), closing, epoch, ..self.note.clone() };
            if self.chaos.kills && self.below(4) == 0 {
                self.members[at].mode = Mode::Idle;
                return;
            }
        }
        self.lock.take_if(|owner| *owner == client);
        self.members[at].mode = Mode::Idle;
    }

    /// A write reaches its object. Those of one client may overtake each other.
    fn land(&mut self) {
        if self.writes.is_empty() {
            return;
        }
        let at = self.pick(self.writes.len());
        let write = self.writes.swap_remove(at);
        let (map, last) = &mut self.objects[write.object];
        *map = (*map).max(write.map);
        let (map, last) = (*map, *last);
        if self.refuses(&write.client, map) {
            return;
        }
        if write.owner_epoch < last {
            let Write { client, owner_epoch, object, .. } = write;
            self.stale = Some(format!(
                "a write of {client} (epoch {owner_epoch}) to object {object} after one of epoch {last}"
            ));
            return;
        }
        self.objects[write.object].1 = write.owner_epoch;
    }

    /// Returns the number of owners, or the stale write.
    fn run(mut self) -> Result<u64, String> {
        self.pass(3000)?;
        Ok(self.owned)
    }

    fn pass(&mut self, time: u64) -> Result<(), String> {
        for _ in 0..time {
            self.now += 1;
            match self.below(12) {
                0..=2 => self.land(),
                3 if self.chaos.pauses && self.below(8) == 0 => {
                    let (at, long) = (self.pick(3), self.below(2) * 2 * SHORT);
                    self.members[at].paused_until = self.now + 20 + long;
                }
                4 if self.chaos.foreigners && self.below(8) == 0 => self.foreign_step(),
                _ => {
                    let at = self.pick(3);
                    if self.members[at].paused_until <= self.now {
                        self.step(at);
                    }
                }
            }
            if let Some(stale) = self.stale.take() {
                return Err(stale);
            }
        }
        Ok(())
    }
}

#[test]
fn no_former_owner_writes_after_a_new_one() {
    for (chaos, some) in [(Chaos::ALL, 5_000), (Chaos::NONE, 10_000)] {
        let mut owners = 0;
        for seed in 1..2000 {
            let owned = World::new(seed, Mistake::None, chaos).run();
            owners += owned.unwrap_or_else(|stale| panic!("seed {seed}: {stale}"));
        }
        assert!(owners > some, "the members do claim: {owners}");
    }
}

#[test]
fn an_image_has_an_owner_again_whenever_a_member_died() {
    for seed in 1..1000 {
        let mut world = World::new(seed, Mistake::None, Chaos::ALL);
        world.pass(200 + seed % 100).unwrap();
        // The chaos ends. It may still be the reason why hosts are fenced.
        world.chaos = Chaos::NONE;
        world.is_calm = false;
        world.foreigner = None;
        world.members.iter_mut().for_each(|member| member.paused_until = 0);
        let owned = world.owned;
        world.pass(3000).unwrap();
        assert!(world.owned > owned, "seed {seed}: lock {:?}, {:?}", world.lock, world.note);
    }
}

#[test]
fn each_mistake_shows() {
    for mistake in [
        Mistake::ServesBeforeMap,
        Mistake::OldMap,
        Mistake::ShortFence,
        Mistake::LibrbdFences,
        Mistake::NoFence,
        Mistake::TwoClaims,
        Mistake::CleanLie,
        Mistake::ReopensEarly,
    ] {
        let fails = |seed: &u64| World::new(*seed, mistake, Chaos::ALL).run().is_err();
        assert!((1..6000).any(|seed| fails(&seed)), "{mistake:?} is not found");
    }
}

fn note(client: &str) -> OwnerNote {
    OwnerNote {
        member: "a".to_owned(),
        client: client.to_owned(),
        epoch: 7,
        ..OwnerNote::default()
    }
}

fn claim(wish: Wish, may_break: bool) -> Claim {
    let own = OwnerNote { member: "b".to_owned(), ..OwnerNote::default() };
    let mut claim = Claim::new(own, wish, may_break);
    assert_eq!(claim.next(Event::Begin), Act::Look);
    claim
}

#[test]
fn an_owner_that_does_not_answer_is_fenced_before_and_after_its_lock_is_broken() {
    let seen = || Event::Seen(note("x"), Some("x".to_owned()));
    let mut claim = claim(Wish::TakeOver, true);
    assert_eq!(claim.next(seen()), Act::Ask);
    silent(&mut claim);
    assert_eq!(claim.next(Event::Fenced), Act::Break("x".to_owned()));
    assert_eq!(claim.next(Event::Broken(true)), Act::Look);
    assert_eq!(claim.next(Event::Seen(note("x"), None)), Act::Lock);
    assert_eq!(claim.next(Event::Locked(Some("y".to_owned()))), Act::Look);
    assert_eq!(claim.next(Event::Seen(note("x"), Some("y".to_owned()))), Act::Fence("x".into()));
    let own = OwnerNote { member: "b".to_owned(), client: "y".to_owned(), epoch: 8, ..note("") };
    assert_eq!(claim.next(Event::Fenced), Act::Swap(7, own.clone()));
    assert_eq!(claim.next(Event::Swapped(true)), Act::End(Outcome::Owned(own)));
}

/// Goes on with a look to the question, with a record that has the host as the holder.
fn asks(claim: &mut Claim, seen: Event) -> Act {
    match claim.next(seen) {
        Act::ReadHolder => claim.next(Event::Holder(Some(AccessMode::Exclusive))),
        act => act,
    }
}

/// The owner does not answer, and is fenced.
fn silent(claim: &mut Claim) {
    assert_eq!(claim.next(Event::Answered(None)), Act::Look);
    let seen = Event::Seen(note("x"), Some("x".to_owned()));
    assert_eq!(claim.next(seen), Act::Fence("x".to_owned()));
}

/// The lock of the fenced owner is broken and taken, and the note is about to change.
fn taken(claim: &mut Claim) {
    assert_eq!(claim.next(Event::Fenced), Act::Break("x".to_owned()));
    claim.next(Event::Broken(true));
    assert_eq!(claim.next(Event::Seen(note("x"), None)), Act::Lock);
    claim.next(Event::Locked(Some("y".to_owned())));
    claim.next(Event::Seen(note("x"), Some("y".to_owned())));
    assert!(matches!(claim.next(Event::Fenced), Act::Swap(..)));
}

/// A hand-over ends while the owner is asked: nobody answers any more.
#[test]
fn an_owner_that_gave_the_image_back_while_it_was_asked_is_not_fenced() {
    let mut claim = claim(Wish::TakeOver, true);
    let lock = || Some("x".to_owned());
    let given_back = OwnerNote { epoch: 8, closing: "x".to_owned(), ..note("") };
    assert_eq!(claim.next(Event::Seen(note("x"), lock())), Act::Ask);
    assert_eq!(claim.next(Event::Answered(None)), Act::Look);
    // It closes the image, which takes long.
    for _ in 0..PAUSES_OF_HAND_OVER {
        let act = claim.next(Event::Seen(given_back.clone(), lock()));
        assert_eq!(act, Act::FindWatch("x".to_owned()));
        assert_eq!(claim.next(Event::Watched(true)), Act::Pause);
        assert_eq!(claim.next(Event::Paused), Act::Look);
    }
    // Librbd finds out whether it is dead. No write of it is under way, and its hosts may resume.
    assert_eq!(claim.next(Event::Seen(given_back.clone(), lock())), Act::Lock);
    assert_eq!(claim.next(Event::Locked(Some("y".to_owned()))), Act::Look);
    let locked = Event::Seen(given_back, Some("y".to_owned()));
    assert_eq!(claim.next(locked), Act::NewestMap);
    let act = claim.next(Event::HasMap);
    let Act::Swap(8, swapped) = act else { panic!("{act:?}") };
    assert_eq!((swapped.epoch, swapped.lineage, swapped.closing.as_str()), (9, 0, ""));
    // Another client than the one that closes it is foreign.
    let other = OwnerNote { epoch: 8, closing: "w".to_owned(), ..note("") };
    assert!(!other.is_closing(Some("x")) && !OwnerNote::default().is_closing(None));
}

/// The owner has no watch, and has none a moment later.
fn dead(claim: &mut Claim, seen: &Event, client: &str) {
    assert_eq!(claim.next(Event::Watched(false)), Act::Pause);
    for _ in 1..PAUSES_OF_MISSED {
        assert_eq!(claim.next(Event::Paused), Act::Pause);
    }
    assert_eq!(claim.next(Event::Paused), Act::Look);
    assert_eq!(claim.next(seen.clone()), Act::FindWatch(client.to_owned()));
    assert_eq!(claim.next(Event::Watched(false)), Act::Fence(client.to_owned()));
}

/// A slow OSD breaks the watch of a living owner, and its librbd begins another one.
#[test]
fn an_owner_that_has_no_watch_for_a_moment_is_not_fenced() {
    let of = |client: &str| Some(client.to_owned());
    let again = |claim: &mut Claim| {
        let mut act = claim.next(Event::Watched(false));
        while act == Act::Pause {
            act = claim.next(Event::Paused);
        }
        assert_eq!(act, Act::Look);
    };
    for wish in [Wish::Idle, Wish::Fresh] {
        // It watches again.
        let mut dies = claim(wish, true);
        assert_eq!(dies.next(Event::Seen(note("x"), of("x"))), Act::Ask);
        assert_eq!(dies.next(Event::Answered(None)), Act::FindWatch("x".to_owned()));
        again(&mut dies);
        let act = dies.next(Event::Seen(note("x"), of("x")));
        assert_eq!(act, Act::FindWatch("x".to_owned()));
        assert_eq!(dies.next(Event::Watched(true)), Act::Pause);
        assert_eq!(dies.next(Event::Paused), Act::Look);
        // One look without a watch later is the first one again.
        dies.next(Event::Seen(note("x"), of("x")));
        again(&mut dies);
        // It has given the image back meanwhile, or another member is the owner.
        assert_eq!(dies.next(Event::Seen(OwnerNote { epoch: 8, ..note("") }, None)), Act::Lock);
        let mut other = claim(wish, true);
        other.next(Event::Seen(note("x"), of("x")));
        other.next(Event::Answered(None));
        again(&mut other);
        let now = OwnerNote { epoch: 8, ..note("z") };
        assert_eq!(other.next(Event::Seen(now, of("z"))), Act::Ask);
    }
    // A client that is no member.
    let mut unnoted = claim(Wish::TakeOver, true);
    let seen = || Event::Seen(note("x"), of("z"));
    while unnoted.next(seen()) == Act::Pause {
        unnoted.next(Event::Paused);
    }
    again(&mut unnoted);
    assert_eq!(unnoted.next(seen()), Act::FindWatch("z".to_owned()));
    let foreign = Act::End(Outcome::Foreign("z".to_owned()));
    assert_eq!(unnoted.next(Event::Watched(true)), foreign);
}

/// A host that may disturb the owner comes while its watch is looked for once more.
#[test]
fn the_holder_does_not_wait_for_the_second_look_at_an_owner_without_a_watch() {
    let seen = || Event::Seen(note("x"), Some("x".to_owned()));
    let mut claim = claim(Wish::Idle, true);
    claim.next(seen());
    assert_eq!(claim.next(Event::Answered(None)), Act::FindWatch("x".to_owned()));
    let mut act = claim.next(Event::Watched(false));
    claim.raise(Wish::Return(HostId([1; 16]), Generation(3)));
    while act == Act::Pause {
        act = claim.next(Event::Paused);
    }
    assert_eq!((act, claim.next(seen())), (Act::Look, Act::ReadHolder));
}

/// The owner does not answer: the cluster drops it when it is dead.
fn outlives(claim: &mut Claim) {
    assert_eq!(claim.next(Event::Answered(None)), Act::FindWatch("x".to_owned()));
    assert_eq!(claim.next(Event::Watched(true)), Act::Pause);
    assert_eq!(claim.next(Event::Paused), Act::Look);
}

#[test]
fn a_host_with_an_old_generation_disturbs_no_owner() {
    let mut claim = claim(Wish::Return(HostId([1; 16]), Generation(3)), true);
    let seen = Event::Seen(note("x"), Some("x".to_owned()));
    assert_eq!(claim.next(seen), Act::ReadHolder);
    assert_eq!(claim.next(Event::Holder(None)), Act::Ask);
    assert_eq!(claim.wish(), Wish::Fresh, "the owner is told of no holder");
    let seen = || Event::Seen(note("x"), Some("x".to_owned()));
    outlives(&mut claim);
    assert_eq!(claim.next(seen()), Act::FindWatch("x".to_owned()));
    dead(&mut claim, &seen(), "x");
    assert_eq!(claim.next(Event::Fenced), Act::Lock);
    let elsewhere = Act::End(Outcome::Elsewhere(note("x")));
    assert_eq!(claim.next(Event::Locked(None)), elsewhere, "another member was faster");
}

/// The claim waits for the end of a dead owner, which takes the cluster half a minute.
#[test]
fn the_holder_does_not_wait_for_the_claim_of_a_host_that_may_not_have_the_image() {
    let returns = |host| Wish::Return(HostId([host; 16]), Generation(3));
    let seen = || Event::Seen(note("x"), Some("x".to_owned()));
    for weak in [Wish::Idle, Wish::Fresh, returns(2)] {
        let mut claim = claim(weak, true);
        if claim.next(seen()) == Act::ReadHolder {
            assert_eq!(claim.next(Event::Holder(None)), Act::Ask);
        }
        outlives(&mut claim);
        claim.raise(Wish::Fresh);
        assert_eq!(claim.next(seen()), Act::FindWatch("x".to_owned()), "{weak:?}");
        assert_eq!(claim.next(Event::Watched(true)), Act::Pause);
        claim.raise(returns(1));
        assert_eq!(claim.next(Event::Paused), Act::Look);
        // The record of the holder is read first, and the owner is asked again.
        assert_eq!(claim.next(seen()), Act::ReadHolder, "{weak:?}");
        assert_eq!(claim.next(Event::Holder(Some(AccessMode::Exclusive))), Act::Ask);
        assert_eq!(claim.wish(), returns(1));
        silent(&mut claim);
    }
    // The owner answers the weaker question, and is asked the stronger one.
    let mut claim = claim(Wish::Fresh, true);
    assert_eq!(claim.next(seen()), Act::Ask);
    claim.raise(Wish::TakeOver);
    assert_eq!(claim.next(Event::Answered(Some(AskAnswer::Stays))), Act::Look);
    assert_eq!(claim.next(seen()), Act::Ask);
    assert_eq!(claim.wish(), Wish::TakeOver);
    let elsewhere = Act::End(Outcome::Elsewhere(note("x")));
    assert_eq!(claim.next(Event::Answered(Some(AskAnswer::Stays))), elsewhere);
}

/// A former owner answers from its cache until it notices that nothing proves its lock.
#[test]
fn a_former_owner_may_answer_after_a_fence_and_only_the_holder_if_that_one_came_back() {
    let returns = Wish::Return(HostId([1; 16]), Generation(3));
    for (wish, holder, former) in [
        (Wish::TakeOver, None, FormerHosts::All),
        (returns, Some(AccessMode::Shared), FormerHosts::All),
        (returns, Some(AccessMode::Exclusive), FormerHosts::Holder),
    ] {
        let seen = || Event::Seen(note("x"), Some("x".to_owned()));
        let mut claim = claim(wish, true);
        if claim.next(seen()) == Act::ReadHolder {
            assert_eq!(claim.next(Event::Holder(holder)), Act::Ask);
        }
        silent(&mut claim);
        taken(&mut claim);
        if claim.next(Event::Swapped(true)) == Act::ReadHolder {
            assert!(matches!(claim.next(Event::Holder(holder)), Act::End(Outcome::Owned(_))));
        }
        assert_eq!(claim.former(), former, "{wish:?} {holder:?}");
    }
    // The cluster has dropped a dead owner, or one that the cluster did not reach.
    let mut dropped = claim(Wish::Idle, true);
    let seen = Event::Seen(note("x"), Some("x".to_owned()));
    assert_eq!(dropped.next(seen.clone()), Act::Ask);
    assert_eq!(dropped.next(Event::Answered(None)), Act::FindWatch("x".to_owned()));
    dead(&mut dropped, &seen, "x");
    assert_eq!(dropped.next(Event::Fenced), Act::Lock);
    dropped.next(Event::Locked(Some("y".to_owned())));
    let act = dropped.next(Event::Seen(note("x"), Some("y".to_owned())));
    assert_eq!(act, Act::Fence("x".to_owned()));
    assert!(matches!(dropped.next(Event::Fenced), Act::Swap(..)));
    assert_eq!(dropped.former(), FormerHosts::All);
    // It was given back.
    let mut free = claim(Wish::TakeOver, true);
    assert_eq!(free.next(Event::Seen(note(""), None)), Act::Lock);
    free.next(Event::Locked(Some("y".to_owned())));
    assert_eq!(free.next(Event::Seen(note(""), Some("y".to_owned()))), Act::NewestMap);
    assert!(matches!(free.next(Event::HasMap), Act::Swap(..)));
    assert_eq!(free.former(), FormerHosts::Nobody);
}

/// A new owner has other hosts, perhaps, than the one whose record was read.
#[test]
fn the_holder_is_read_again_when_the_image_has_another_owner() {
    let mut claim = claim(Wish::Return(HostId([1; 16]), Generation(3)), true);
    let seen = Event::Seen(note("x"), Some("x".to_owned()));
    assert_eq!(asks(&mut claim, seen), Act::Ask);
    assert_eq!(claim.next(Event::Answered(None)), Act::Look);
    // Another member was faster, and a host has taken the volume over there.
    let other = || Event::Seen(OwnerNote { epoch: 8, ..note("z") }, Some("z".to_owned()));
    assert_eq!(claim.next(other()), Act::ReadHolder);
    assert_eq!(claim.next(Event::Holder(None)), Act::Ask);
    assert_eq!(claim.next(Event::Answered(None)), Act::FindWatch("z".to_owned()), "not fenced");
}

/// The owner goes on after the look: a second host joins there before the fence.
#[test]
fn the_record_at_the_end_decides_whether_a_former_owner_may_answer_others() {
    for last in HOLDERS {
        let mut claim = claim(Wish::Return(HostId([1; 16]), Generation(3)), true);
        let seen = Event::Seen(note("x"), Some("x".to_owned()));
        assert_eq!(asks(&mut claim, seen), Act::Ask);
        silent(&mut claim);
        taken(&mut claim);
        assert_eq!(claim.next(Event::Swapped(true)), Act::ReadHolder);
        assert!(matches!(claim.next(Event::Holder(last)), Act::End(Outcome::Owned(_))));
        let former = match last {
            Some(AccessMode::Exclusive) => FormerHosts::Holder,
            _ => FormerHosts::All,
        };
        assert_eq!(claim.former(), former, "{last:?}");
    }
}

/// The owner is noted: a claim that failed now would leave the note of a client that is gone.
#[test]
fn a_record_that_cannot_be_read_at_the_end_costs_a_wait_and_not_the_image() {
    let mut claim = claim(Wish::Return(HostId([1; 16]), Generation(3)), true);
    let seen = Event::Seen(note("x"), Some("x".to_owned()));
    assert_eq!(claim.next(seen), Act::ReadHolder);
    assert_eq!(claim.despite_failure(), None, "nothing is noted yet");
    assert_eq!(claim.next(Event::Holder(Some(AccessMode::Exclusive))), Act::Ask);
    silent(&mut claim);
    taken(&mut claim);
    assert_eq!(claim.despite_failure(), None);
    assert_eq!(claim.next(Event::Swapped(true)), Act::ReadHolder);
    let event = claim.despite_failure().expect("the claim goes on");
    assert!(matches!(claim.next(event), Act::End(Outcome::Owned(_))));
    assert_eq!(claim.former(), FormerHosts::All);
}

#[test]
fn only_the_holder_and_a_take_over_disturb_an_owner() {
    let returns = Wish::Return(HostId([1; 16]), Generation(3));
    for (wish, may_break, breaks) in [
        (Wish::Idle, true, false),
        (Wish::Fresh, true, false),
        (returns, true, true),
        (returns, false, false),
        (Wish::TakeOver, true, true),
    ] {
        let seen = || Event::Seen(note("x"), Some("x".to_owned()));
        let mut asking = claim(wish, may_break);
        assert_eq!(asks(&mut asking, seen()), Act::Ask);
        if breaks {
            silent(&mut asking);
        } else {
            // The cluster finds out whether the owner is dead.
            outlives(&mut asking);
            for _ in 1..PAUSES_OF_DEAD {
                assert_eq!(asking.next(seen()), Act::FindWatch("x".to_owned()));
                assert_eq!(asking.next(Event::Watched(true)), Act::Pause);
                assert_eq!(asking.next(Event::Paused), Act::Look);
            }
            assert_eq!(asking.next(seen()), Act::FindWatch("x".to_owned()));
            asking.next(Event::Watched(true));
            asking.next(Event::Paused);
            assert_eq!(asking.next(seen()), Act::End(Outcome::Elsewhere(note("x"))));
        }
        let mut stays = claim(wish, may_break);
        asks(&mut stays, seen());
        let act = stays.next(Event::Answered(Some(AskAnswer::Stays)));
        assert_eq!(act, Act::End(Outcome::Elsewhere(note("x"))));
    }
}

#[test]
fn an_owner_that_hands_over_is_waited_for_and_not_fenced() {
    let seen = || Event::Seen(note("x"), Some("x".to_owned()));
    let mut claim = claim(Wish::TakeOver, true);
    assert_eq!(claim.next(seen()), Act::Ask);
    assert_eq!(claim.next(Event::Answered(Some(AskAnswer::HandsOver))), Act::Pause);
    assert_eq!(claim.next(Event::Paused), Act::Look);
    assert_eq!(claim.next(seen()), Act::Pause);
    assert_eq!(claim.next(Event::Paused), Act::Look);
    let given_back = OwnerNote { epoch: 8, ..note("") };
    assert_eq!(claim.next(Event::Seen(given_back.clone(), None)), Act::Lock);
    assert_eq!(claim.next(Event::Locked(Some("y".to_owned()))), Act::Look);
    assert_eq!(claim.next(Event::Seen(given_back, Some("y".to_owned()))), Act::NewestMap);
    let act = claim.next(Event::HasMap);
    assert!(matches!(act, Act::Swap(8, OwnerNote { epoch: 9, .. })), "{act:?}");
    // Another member was faster.
    assert_eq!(claim.next(Event::Swapped(false)), Act::Unlock);
    assert!(matches!(claim.next(Event::Unlocked), Act::End(Outcome::Elsewhere(_))));
}

#[test]
fn a_client_that_is_no_member_keeps_its_lock_while_it_lives() {
    let mut claim = claim(Wish::TakeOver, true);
    let mut act = Act::Look;
    for _ in 0..100 {
        act = match act {
            Act::Look => claim.next(Event::Seen(note("x"), Some("a librbd client".to_owned()))),
            Act::Pause => claim.next(Event::Paused),
            Act::FindWatch(client) => {
                assert_eq!(client, "a librbd client");
                claim.next(Event::Watched(true))
            }
            end => {
                assert_eq!(end, Act::End(Outcome::Foreign("a librbd client".to_owned())));
                return;
            }
        };
    }
    panic!("it looks for ever");
}

/// A member was killed between its lock and its note, or another client has the image's lock.
#[test]
fn the_lock_of_a_dead_client_that_is_not_noted_is_taken_and_no_host_may_resume() {
    let mut claim = claim(Wish::Fresh, true);
    let seen = || Event::Seen(note("x"), Some("z".to_owned()));
    for _ in 0..LOOKS_AT_UNCLEAR {
        assert_eq!(claim.next(seen()), Act::Pause);
        assert_eq!(claim.next(Event::Paused), Act::Look);
    }
    assert_eq!(claim.next(seen()), Act::FindWatch("z".to_owned()));
    // Before librbd fences it for an hour.
    dead(&mut claim, &seen(), "z");
    assert_eq!(claim.next(Event::Fenced), Act::Lock);
    assert_eq!(claim.next(Event::Locked(Some("y".to_owned()))), Act::Look);
    let locked = Event::Seen(note("x"), Some("y".to_owned()));
    assert_eq!(claim.next(locked), Act::Fence("z".to_owned()));
    assert_eq!(claim.next(Event::Fenced), Act::Fence("x".to_owned()));
    let act = claim.next(Event::Fenced);
    assert!(matches!(act, Act::Swap(7, OwnerNote { epoch: 8, lineage: 1, .. })), "{act:?}");
}

/// The owner has lost the image to another client, which is gone. The owner gave nothing back.
#[test]
fn no_host_may_resume_if_a_lock_went_without_its_note() {
    let mut claim = claim(Wish::Return(HostId([1; 16]), Generation(3)), true);
    let mut act = Act::Look;
    let swapped = loop {
        act = match act {
            Act::Look => claim.next(Event::Seen(note("x"), None)),
            Act::Pause => claim.next(Event::Paused),
            Act::Lock => {
                assert_eq!(claim.next(Event::Locked(Some("y".to_owned()))), Act::Look);
                claim.next(Event::Seen(note("x"), Some("y".to_owned())))
            }
            Act::Fence(client) => {
                assert_eq!(client, "x");
                claim.next(Event::Fenced)
            }
            Act::Swap(7, note) => break note,
            act => panic!("{act:?}"),
        };
    };
    assert_eq!((swapped.lineage, swapped.epoch), (1, 8));
}

#[test]
fn a_target_in_no_group_and_a_group_raise_the_lineage_when_one_follows_the_other() {
    assert_eq!(OwnerNote::default().of_alone("s"), None, "no group ever had the image");
    let of_group = OwnerNote { lineage: 4, ..note("x") };
    let alone = of_group.of_alone("s").unwrap();
    assert_eq!((alone.lineage, alone.epoch, alone.is_alone()), (5, 8, true));
    let again = alone.of_alone("t").unwrap();
    assert_eq!((again.lineage, again.epoch), (5, 9), "its own restart fences nobody");
    // It lives, and is asked nothing: it does not watch. Dead, it is taken as an unknown client.
    let mut claim = claim(Wish::TakeOver, true);
    let seen = || Event::Seen(again.clone(), Some("t".to_owned()));
    for _ in 0..LOOKS_AT_UNCLEAR {
        assert_eq!(claim.next(seen()), Act::Pause);
        claim.next(Event::Paused);
    }
    assert_eq!(claim.next(seen()), Act::FindWatch("t".to_owned()));
    dead(&mut claim, &seen(), "t");
    assert_eq!(claim.next(Event::Fenced), Act::Lock);
    claim.next(Event::Locked(Some("y".to_owned())));
    let locked = Event::Seen(again.clone(), Some("y".to_owned()));
    assert_eq!(claim.next(locked), Act::Fence("t".to_owned()));
    let act = claim.next(Event::Fenced);
    assert!(matches!(act, Act::Swap(9, OwnerNote { epoch: 10, lineage: 6, .. })), "{act:?}");
}

#[test]
fn an_owner_that_has_given_the_image_back_and_is_slow_to_close_it_is_not_fenced() {
    let mut claim = claim(Wish::TakeOver, true);
    let lock = || Some("x".to_owned());
    assert_eq!(claim.next(Event::Seen(note("x"), lock())), Act::Ask);
    assert_eq!(claim.next(Event::Answered(Some(AskAnswer::HandsOver))), Act::Pause);
    let given_back = OwnerNote { epoch: 8, ..note("") };
    for _ in 0..PAUSES_OF_HAND_OVER {
        assert_eq!(claim.next(Event::Paused), Act::Look);
        assert_eq!(claim.next(Event::Seen(given_back.clone(), lock())), Act::Pause);
    }
}

#[test]
fn a_volume_that_is_moved_here_is_waited_for_and_no_owner_is_fenced_for_it() {
    let seen = || Event::Seen(note("x"), Some("x".to_owned()));
    for order in [None, Some(4)] {
        let mut moved = claim(Wish::Order(order), true);
        assert_eq!(moved.next(seen()), Act::Ask);
        assert_eq!(moved.next(Event::Answered(Some(AskAnswer::HandsOver))), Act::Pause);
        assert_eq!(moved.next(Event::Paused), Act::Look);
        let back = OwnerNote { epoch: 8, next: "b".to_owned(), ..note("") };
        assert_eq!(moved.next(Event::Seen(back, None)), Act::Lock);
        // The owner does not answer: it may be busy for a moment.
        let mut silent = claim(Wish::Order(order), true);
        assert_eq!(silent.next(seen()), Act::Ask);
        assert_eq!(silent.next(Event::Answered(None)), Act::FindWatch("x".to_owned()));
        // A host that has lost the owner comes meanwhile.
        silent.raise(Wish::Return(HostId([1; 16]), Generation(3)));
        assert_eq!(silent.next(Event::Watched(true)), Act::Pause);
        assert_eq!(silent.next(Event::Paused), Act::Look);
        assert_eq!(asks(&mut silent, seen()), Act::Ask);
        assert_eq!(silent.next(Event::Answered(None)), Act::Look);
        assert_eq!(silent.next(seen()), Act::Fence("x".to_owned()));
    }
}

#[test]
fn an_image_that_is_promised_to_another_member_is_left_to_it_for_a_moment() {
    let back = OwnerNote { epoch: 8, next: "c".to_owned(), ..note("") };
    let mut claim = claim(Wish::Return(HostId([1; 16]), Generation(3)), true);
    for _ in 0..PAUSES_OF_PROMISE {
        assert_eq!(claim.next(Event::Seen(back.clone(), None)), Act::Pause);
        assert_eq!(claim.next(Event::Paused), Act::Look);
    }
    assert_eq!(claim.next(Event::Seen(back, None)), Act::Lock, "the other one has died");
}
