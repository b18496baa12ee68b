//! Claims by members that are paused, killed and late, over a small model of a cluster: its lock,
//! its fenced clients, and objects that learn of a fence with the first request by a newer map.

use std::collections::BTreeMap;

use super::*;

/// Objects of the image.
const OBJECTS: usize = 3;
/// Time that a fence by librbd lasts, as it breaks a lock.
const SHORT: u64 = 200;
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
}

struct Write {
    client: String,
    owner_epoch: u64,
    map: u64,
    object: usize,
}

struct World {
    mistake: Mistake,
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
}

impl World {
    fn new(seed: u64, mistake: Mistake) -> Self {
        let member = |number: u64| Member {
            claim: Claim::new(OwnerNote::default(), Wish::Idle, true),
            next: None,
            mode: Mode::Idle,
            client: format!("m{number}.0"),
            epoch: 0,
            map: 0,
            paused_until: 0,
            heard_at: 0,
        };
        Self {
            mistake,
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
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
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
            // A new entry replaces the end of one that is in force, and OSDs know that one.
            let since = if now < entry.1 { entry.0 } else { map };
            *entry = (since, until);
        }
    }

    /// Whether an OSD with that map refuses a client.
    fn refuses(&self, client: &str, map: u64) -> bool {
        let fence = self.fenced.get(client);
        fence.is_some_and(|(since, until)| map >= *since && self.now < *until)
    }

    fn is_alive(&self, client: &str) -> bool {
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
            Act::Look => Event::Seen(self.note.clone(), self.lock.clone()),
            Act::Ask => Event::Answered(self.asked()),
            Act::Lock => {
                let free = match self.lock.clone() {
                    None => true,
                    Some(client) if self.is_alive(&client) => false,
                    Some(client) => {
                        self.fence(at, &client, self.now + SHORT);
                        true
                    }
                };
                if free || self.is(Mistake::TwoClaims) {
                    self.lock = Some(own.clone());
                    return Some(Event::Locked(Some(own)));
                }
                Event::Locked(None)
            }
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
                    self.fence(at, &client, self.now + SHORT);
                    self.lock = None;
                }
                Event::Broken(has_it)
            }
            Act::Swap(epoch, note) => {
                let fits = self.note.epoch == epoch || self.is(Mistake::TwoClaims);
                if fits && !self.refuses(&own, self.map) {
                    self.note = note;
                }
                Event::Swapped(fits && self.note.client == own)
            }
            Act::Unlock => {
                self.lock.take_if(|client| *client == own);
                Event::Unlocked
            }
            Act::Pause => Event::Paused,
            Act::End(outcome) => {
                self.ended(at, outcome);
                return None;
            }
        })
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

    fn begin(&mut self, at: usize) {
        self.clients += 1;
        let wish = match self.below(4) {
            0 => Wish::Idle,
            1 => Wish::Fresh,
            2 => Wish::TakeOver,
            _ => Wish::Return(HostId([1; 16]), Generation(1)),
        };
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
        match self.members[at].mode {
            Mode::Idle => self.begin(at),
            Mode::Claims => {
                let Some(act) = self.members[at].next.take() else { return };
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
        if self.below(3) == 0 && !(has_lock && !self.refuses(&client, self.map)) {
            self.members[at].mode = Mode::Lost;
            return;
        }
        let (owner_epoch, object) = (self.members[at].epoch, self.below(3) as usize);
        self.writes.push(Write { client, owner_epoch, map, object });
    }

    fn hand_over(&mut self, at: usize) {
        let client = self.members[at].client.clone();
        if self.writes.iter().any(|write| write.client == client) && !self.is(Mistake::CleanLie) {
            return;
        }
        if self.note.client == client {
            let epoch = self.note.epoch + 1;
            self.note = OwnerNote { client: String::new(), epoch, ..self.note.clone() };
        }
        self.lock.take_if(|owner| *owner == client);
        self.members[at].mode = Mode::Idle;
    }

    /// A write reaches its object. Those of one client may overtake each other.
    fn land(&mut self) {
        if self.writes.is_empty() {
            return;
        }
        let at = self.below(self.writes.len() as u64) as usize;
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
        for _ in 0..3000 {
            self.now += 1;
            match self.below(12) {
                0..=2 => self.land(),
                3 if self.below(8) == 0 => {
                    let (at, long) = (self.below(3) as usize, self.below(2) * 2 * SHORT);
                    self.members[at].paused_until = self.now + 20 + long;
                }
                _ => {
                    let at = self.below(3) as usize;
                    if self.members[at].paused_until <= self.now {
                        self.step(at);
                    }
                }
            }
            if let Some(stale) = self.stale {
                return Err(stale);
            }
        }
        Ok(self.owned)
    }
}

#[test]
fn no_former_owner_writes_after_a_new_one() {
    let mut owners = 0;
    for seed in 1..2000 {
        let owned = World::new(seed, Mistake::None).run();
        owners += owned.unwrap_or_else(|stale| panic!("seed {seed}: {stale}"));
    }
    assert!(owners > 20_000, "the members do claim: {owners}");
}

#[test]
fn each_mistake_shows() {
    for mistake in [
        Mistake::ServesBeforeMap,
        Mistake::OldMap,
        Mistake::ShortFence,
        Mistake::NoFence,
        Mistake::TwoClaims,
        Mistake::CleanLie,
        Mistake::ReopensEarly,
    ] {
        let found = (1..2000).find(|seed| World::new(*seed, mistake).run().is_err());
        assert!(found.is_some(), "{mistake:?} is not found");
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
    assert_eq!(claim.next(Event::Answered(None)), Act::Fence("x".to_owned()));
    assert_eq!(claim.next(Event::Fenced), Act::Break("x".to_owned()));
    assert_eq!(claim.next(Event::Broken(true)), Act::Look);
    assert_eq!(claim.next(Event::Seen(note("x"), None)), Act::Lock);
    assert_eq!(claim.next(Event::Locked(Some("y".to_owned()))), Act::Look);
    assert_eq!(claim.next(Event::Seen(note("x"), Some("y".to_owned()))), Act::Fence("x".into()));
    let own = OwnerNote { member: "b".to_owned(), client: "y".to_owned(), epoch: 8, ..note("") };
    assert_eq!(claim.next(Event::Fenced), Act::Swap(7, own.clone()));
    assert_eq!(claim.next(Event::Swapped(true)), Act::End(Outcome::Owned(own)));
}

#[test]
fn only_the_holder_and_a_take_over_disturb_an_owner() {
    let returns = Wish::Return(HostId([1; 16]), Generation(3));
    for (wish, may_break, breaks) in [
        (Wish::Fresh, true, false),
        (returns, true, true),
        (returns, false, false),
        (Wish::TakeOver, true, true),
    ] {
        let seen = || Event::Seen(note("x"), Some("x".to_owned()));
        let mut silent = claim(wish, may_break);
        assert_eq!(silent.next(seen()), Act::Ask);
        let act = silent.next(Event::Answered(None));
        assert_eq!(matches!(act, Act::Fence(_)), breaks, "{wish:?}");
        if !breaks {
            // librbd finds out whether the owner is dead.
            assert_eq!(act, Act::Lock);
            let elsewhere = Act::End(Outcome::Elsewhere(note("x")));
            assert_eq!(silent.next(Event::Locked(None)), elsewhere);
        }
        let mut stays = claim(wish, may_break);
        stays.next(seen());
        let act = stays.next(Event::Answered(Some(AskAnswer::Stays)));
        assert_eq!(act, Act::End(Outcome::Elsewhere(note("x"))));
    }
    let mut idle = claim(Wish::Idle, true);
    assert_eq!(idle.next(Event::Seen(note("x"), Some("x".to_owned()))), Act::Lock);
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
fn a_client_that_is_no_member_keeps_its_lock() {
    let mut claim = claim(Wish::TakeOver, true);
    let mut act = Act::Look;
    for _ in 0..100 {
        act = match act {
            Act::Look => claim.next(Event::Seen(note("x"), Some("a librbd client".to_owned()))),
            Act::Pause => claim.next(Event::Paused),
            end => {
                assert_eq!(end, Act::End(Outcome::Foreign("a librbd client".to_owned())));
                return;
            }
        };
    }
    panic!("it looks for ever");
}
