//! [`Claiming`]: a claim of a member under way: the product's [`Claim`], and the calls of its acts,
//! as `claiming.rs` of the target makes them.

use std::collections::VecDeque;

use nix::errno::Errno;
use rblk_target::store::rbd::header_lock::LockOwner;
use rblk_target::store::rbd::image_claim::{
    Act, Claim, Event as Happened, FormerHosts, Outcome, Wish,
};
use rblk_target::store::rbd::owner_question::Ask;
use rblk_target::store::rbd::ownership::fence_call::FenceCall;
use rblk_target::store::rbd::ownership::lock_proof::former_answers_until;
use rblk_target::store::rbd::ownership::owner_note::OwnerNote;
use rblk_target::store::rbd::state_record::holder_in;

use super::air::{Air, Event, Purpose, Question, Timer, Whose};
use super::cluster::{Answer, Call, of};
use super::member_name;

/// Milliseconds after which nobody waits for a claim any more.
pub const CLAIM_LATE: u64 = 60_000;
/// Milliseconds between two looks at an owner.
const PAUSE: u64 = 100;

/// How a claim went on.
#[derive(Debug)]
pub enum Course {
    /// It waits for something.
    Waits,
    /// The member owns the image: the note, the lock, a moment at which it was proven, and the
    /// hosts that a former owner may still answer until then.
    Owned(OwnerNote, LockOwner, u64, (FormerHosts, u64)),
    /// The member does not get the image.
    Ended(String),
}

/// See the module.
#[derive(Debug)]
pub struct Claiming {
    /// The number.
    pub number: u64,
    whose: Whose,
    /// The client.
    pub client: String,
    claim: Claim,
    act: Act,
    calls: VecDeque<Call>,
    seen: OwnerNote,
    locked: Option<(LockOwner, u64)>,
    locked_at: u64,
    asked: u64,
    /// Nobody waits for it.
    pub is_abandoned: bool,
    more: Vec<Wish>,
}

impl Claiming {
    /// A claim of a member, by a new client.
    pub fn begin(air: &mut Air, whose: Whose, wish: Wish, may_break: bool) -> (Self, Course) {
        air.made += 1;
        let client = format!("m{}.{}", whose.member, air.made);
        let lag = air.random.below(air.map_delay);
        let mut cluster = of(&air.cluster);
        let map = cluster.map_at(air.now.saturating_sub(lag));
        cluster.connect(&client, whose.member, map);
        drop(cluster);
        let number = air.number();
        let member = member_name(whose.member);
        let own = OwnerNote { member, ..OwnerNote::default() };
        let mut claim = Claim::new(own, wish, may_break);
        let act = claim.next(Happened::Begin);
        let mut it = Self {
            number,
            whose,
            client,
            claim,
            act,
            calls: VecDeque::new(),
            seen: OwnerNote::default(),
            locked: None,
            locked_at: 0,
            asked: 0,
            is_abandoned: false,
            more: Vec::new(),
        };
        air.after(CLAIM_LATE, Event::Timer(whose, Timer::ClaimLate(number)));
        let course = it.begin_act(air);
        (it, course)
    }

    /// Another host asks for the volume.
    pub fn raise(&mut self, wish: Wish) {
        self.more.push(wish);
    }

    fn go_on(&mut self, air: &mut Air, event: Happened) -> Course {
        self.act = self.claim.next(event);
        self.begin_act(air)
    }

    fn begin_act(&mut self, air: &mut Air) -> Course {
        let is_free = self.locked.is_none() && self.is_abandoned;
        if is_free && self.claim.may_stop_before(&self.act) {
            return Course::Ended("it was given up".to_owned());
        }
        for wish in self.more.drain(..) {
            self.claim.raise(wish);
        }
        let fence = |client: Option<&String>| {
            let calls = FenceCall::all(client.is_some()).iter();
            calls
                .filter_map(|call| match call {
                    FenceCall::Refuse => client.cloned().map(Call::Refuse),
                    FenceCall::NewestMap => Some(Call::NewestMap),
                })
                .collect()
        };
        self.calls = match &self.act {
            Act::Look => [Call::ReadOwner, Call::ReadLock].into(),
            Act::ReadHolder => [Call::ReadRecord].into(),
            Act::Ask => {
                self.ask(air);
                return Course::Waits;
            }
            Act::FindWatch(client) => [Call::FindWatch(client.clone())].into(),
            Act::Lock => [Call::Acquire, Call::ReadLock].into(),
            Act::Fence(client) => fence(Some(client)),
            Act::NewestMap => fence(None),
            Act::Break(client) => [Call::Break(client.clone())].into(),
            Act::Swap(epoch, note) => [Call::Swap(*epoch, note.clone())].into(),
            Act::Unlock => [Call::Unlock].into(),
            Act::Pause => {
                let timer = Timer::Pause(self.number);
                air.after(PAUSE, Event::Timer(self.whose, timer));
                return Course::Waits;
            }
            Act::End(outcome) => return self.end(outcome.clone()),
        };
        self.next_call(air)
    }

    fn next_call(&mut self, air: &mut Air) -> Course {
        match self.calls.pop_front() {
            Some(call) => {
                air.call(self.whose, &self.client, call, Purpose::Claim);
                Course::Waits
            }
            None => {
                let event = match &self.act {
                    Act::Fence(_) => Happened::Fenced,
                    _ => Happened::HasMap,
                };
                self.go_on(air, event)
            }
        }
    }

    fn ask(&mut self, air: &mut Air) {
        self.asked = air.number();
        let ask = Ask::of(&member_name(self.whose.member), self.claim.wish());
        let question = Question { by: self.whose, number: self.asked, ask };
        let delay = air.random.within(1, 6);
        air.after(delay, Event::Notifies(question));
    }

    /// The owner has answered, in that epoch; or (none) not in time.
    pub fn answered(
        &mut self,
        air: &mut Air,
        question: u64,
        answer: Option<(u64, rblk_target::store::rbd::image_claim::AskAnswer)>,
    ) -> Course {
        if question != self.asked || self.act != Act::Ask {
            return Course::Waits;
        }
        if answer.is_some_and(|(epoch, _)| epoch != self.seen.epoch) {
            return Course::Waits;
        }
        self.go_on(air, Happened::Answered(answer.map(|(_, answer)| answer)))
    }

    /// A pause is over.
    pub fn paused(&mut self, air: &mut Air) -> Course {
        self.go_on(air, Happened::Paused)
    }

    /// A call has ended.
    pub fn called(&mut self, air: &mut Air, answer: Answer) -> Course {
        let event = match (&self.act, answer) {
            (_, Answer::Failed(errno)) => match self.claim.despite_failure() {
                Some(event) => event,
                None => return Course::Ended(errno.to_string()),
            },
            (Act::Look, Answer::Owner(note)) => {
                self.seen = note;
                return self.next_call(air);
            }
            (Act::Look, Answer::Lock(owner)) => {
                Happened::Seen(self.seen.clone(), owner.map(|owner| owner.address))
            }
            (Act::ReadHolder, Answer::Record(kept)) => {
                Happened::Holder(holder_in(&kept, self.claim.wish()))
            }
            (Act::FindWatch(_), Answer::Done(is)) => Happened::Watched(is),
            (Act::Lock, Answer::Done(false)) => Happened::Locked(None),
            (Act::Lock, Answer::Done(true)) => {
                self.locked_at = air.now;
                return self.next_call(air);
            }
            (Act::Lock, Answer::Lock(None)) => return Course::Ended(Errno::ENOLCK.to_string()),
            (Act::Lock, Answer::Lock(Some(owner))) => {
                let address = owner.address.clone();
                self.locked = Some((owner, self.locked_at));
                Happened::Locked(Some(address))
            }
            (Act::Fence(_) | Act::NewestMap, Answer::Done(_)) => return self.next_call(air),
            (Act::Break(_), Answer::Done(is)) => Happened::Broken(is),
            (Act::Swap(..), Answer::Done(is)) => Happened::Swapped(is),
            (Act::Unlock, Answer::Done(_)) => Happened::Unlocked,
            (act, answer) => unreachable!("{act:?}: {answer:?}"),
        };
        self.go_on(air, event)
    }

    fn end(&mut self, outcome: Outcome) -> Course {
        match (outcome, self.locked.take()) {
            (Outcome::Owned(note), Some((owner, proven_at))) => {
                let former = (self.claim.former(), former_answers_until(proven_at));
                Course::Owned(note, owner, proven_at, former)
            }
            (outcome, _) => Course::Ended(format!("{outcome:?}")),
        }
    }
}
