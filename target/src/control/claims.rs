//! [`Claims`]: the images of a group of targets that this member takes, hands over and loses.
//!
//! A claim opens the image, on a thread that may block, and then adds its volume. An owner that is
//! asked hands over if nobody has the volume here any more but the host that has come to the other
//! member, or if a host takes the volume over; then the volume goes by a change like others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::{TargetConfig, VolumeConfig};
use rblk_protocol::Name;
use tokio::sync::{mpsc, oneshot};

use super::core::{Core, Ticket, VolumeChange};
use super::volumes::ChangeOutcome;
use super::volumes::change_files::ChangeFiles;
use crate::pool::opening::{AwayVolume, OpenedVolume, member_of, open_one};
use crate::store::OpenStore;
use crate::store::rbd::group_member::{GroupMember, MoreWishes};
use crate::store::rbd::image_claim::{AskAnswer, Wish};
use crate::store::rbd::owner_question::{Ask, AskTicket};
use crate::volume::ids::VolumeIndex;

/// How long a member that lost an image by force does not take it back by force: two members that
/// cannot reach each other must not fence each other in turn.
const DAMPING: Duration = Duration::from_secs(30);
/// How long a client waits for a volume that it has ordered to be handed over.
const MOVE_DEADLINE: Duration = Duration::from_secs(60);
/// How long a member that is about to stop hands volumes over. What it still has then ends with it.
const LEAVE_DEADLINE: Duration = Duration::from_secs(15);
/// Why a member that is about to stop takes no volume.
pub(super) const LEAVES: &str =
    "this member of the target is about to stop: ask another member for the volume";
/// A change that has been under way for so long may be stuck. No volume is handed over meanwhile.
pub(super) const LONG_CHANGE: Duration = Duration::from_secs(3);

/// A claim that has ended.
type EndedClaim = (Name, Result<Arc<OpenedVolume>, AwayVolume>);

/// A question of another member for a volume.
type Question = (VolumeIndex, AskTicket, Ask);

/// A proof that this member has the image of a volume.
type Proof = (VolumeIndex, Ticket);

/// News of the group.
#[derive(Debug)]
pub(super) enum ClaimNews {
    /// The image of a volume is open, or cannot be had.
    Ended(Name, Result<Arc<OpenedVolume>, AwayVolume>),
    /// Another member asks for a volume.
    Asked(VolumeIndex, AskTicket, Ask),
    /// This member has the image of a volume.
    Proven(VolumeIndex, Ticket),
}

/// A change that waits until no other one is under way.
#[derive(Debug)]
enum DueChange {
    Serve(Box<VolumeConfig>, Arc<OpenedVolume>),
    Yield(Name),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Claims {
    target: Name,
    member: Option<GroupMember>,
    // The volumes of the group that this member does not serve.
    others: BTreeMap<Name, VolumeConfig>,
    ended: (mpsc::UnboundedSender<EndedClaim>, mpsc::UnboundedReceiver<EndedClaim>),
    asked: (mpsc::UnboundedSender<Question>, mpsc::UnboundedReceiver<Question>),
    proven: (mpsc::UnboundedSender<Proof>, mpsc::UnboundedReceiver<Proof>),
    due: Vec<DueChange>,
    under_way: Option<(DueChange, oneshot::Receiver<ChangeOutcome>)>,
    // The volumes that another member took by force, and when.
    lost: BTreeMap<Name, Instant>,
    // Clients that wait until a volume is handed over, and since when.
    orders: Vec<MoveOrder>,
    // The claims under way.
    claiming: BTreeMap<Name, MoreWishes>,
    // Since when this member hands all its volumes over, because it is about to stop.
    leaving: Option<Instant>,
}

/// A client waits until a volume is handed over.
#[derive(Debug)]
struct MoveOrder {
    name: Name,
    since: Instant,
    reply: oneshot::Sender<Result<(), String>>,
}

impl Claims {
    /// Those of a target with this name and configuration. `others`: volumes of the configuration
    /// that it does not serve at its start.
    pub(super) fn new(target: Name, config: &TargetConfig, others: Vec<VolumeConfig>) -> Self {
        let member = member_of(config);
        let is_member = member.is_some();
        let others = others.into_iter().filter(|volume| is_member && volume.image.is_some());
        let others = others.filter_map(|volume| Some((Name::new(&volume.name).ok()?, volume)));
        Self {
            target,
            member,
            others: others.collect(),
            ended: mpsc::unbounded_channel(),
            asked: mpsc::unbounded_channel(),
            proven: mpsc::unbounded_channel(),
            due: Vec::new(),
            under_way: None,
            lost: BTreeMap::new(),
            orders: Vec::new(),
            claiming: BTreeMap::new(),
            leaving: None,
        }
    }

    /// A client orders that a volume is handed over, and waits for that.
    pub(super) fn order(
        &mut self,
        name: Name,
        reply: oneshot::Sender<Result<(), String>>,
        since: Instant,
    ) {
        self.orders.push(MoveOrder { name, since, reply });
        self.yield_soon(name);
    }

    /// A volume is handed over, or is not.
    fn answer_order(&mut self, name: Name, result: &Result<(), String>) {
        for order in self.orders.extract_if(.., |order| order.name == name) {
            // An error means that the client is gone.
            drop(order.reply.send(result.clone()));
        }
    }

    /// Ends the waits of clients that have lasted for too long. A hand-over that has not begun does
    /// not begin any more. `busy`: the other change that is under way for long.
    pub(super) fn end_late_orders(&mut self, now: Instant, busy: Option<&str>) {
        let is_late =
            |order: &MoveOrder| now.saturating_duration_since(order.since) >= MOVE_DEADLINE;
        let late = self.orders.iter().find(|order| is_late(order)).map(|order| order.name);
        let Some(name) = late else { return };
        let within = MOVE_DEADLINE.as_secs();
        let why = match self.is_yielding(name) {
            true => format!("the hand-over of {name} has not ended within {within} s, and goes on"),
            false => {
                if self.leaving.is_none() {
                    self.stays(name);
                }
                let busy = busy.unwrap_or("another change was under way");
                format!("{name} is not handed over, and stays here: {busy}")
            }
        };
        self.answer_order(name, &Err(why));
    }

    /// Whether the hand-over of a volume is under way.
    pub(super) fn is_yielding(&self, name: Name) -> bool {
        let of_name = |due: &DueChange| matches!(due, DueChange::Yield(other) if *other == name);
        self.under_way.as_ref().is_some_and(|(due, _)| of_name(due))
    }

    /// A volume is not to be handed over any more, if that has not begun.
    fn stays(&mut self, name: Name) {
        self.due.retain(|due| !matches!(due, DueChange::Yield(other) if *other == name));
    }

    /// A volume is not handed over to a member that asks, unless a client has ordered it, or this
    /// member is about to stop.
    pub(super) fn refuses(&mut self, name: Name) {
        if self.leaving.is_none() && !self.orders.iter().any(|order| order.name == name) {
            self.stays(name);
        }
    }

    /// This member is about to stop. It hands these volumes over, the first ones first, and takes
    /// none any more. Returns those whose images are open, and that it does not begin to serve: the
    /// claims of them have ended.
    pub(super) fn leave(
        &mut self,
        volumes: impl IntoIterator<Item = Name>,
        now: Instant,
    ) -> Vec<Name> {
        self.leaving.get_or_insert(now);
        let served = self.due.extract_if(.., |due| matches!(due, DueChange::Serve(..)));
        let names = served.filter_map(|due| match due {
            DueChange::Serve(config, _) => Name::new(&config.name).ok(),
            DueChange::Yield(_) => None,
        });
        let unserved = names.collect();
        volumes.into_iter().for_each(|name| self.yield_soon(name));
        unserved
    }

    /// The hand-overs that have not begun do not begin any more: what this member still has ends
    /// with it.
    pub(super) fn end_leave(&mut self) {
        for due in std::mem::take(&mut self.due) {
            if let DueChange::Yield(name) = due {
                let why = "the target stops, and has not handed the volume over";
                self.answer_order(name, &Err(why.to_owned()));
            }
        }
    }

    /// For how long this member has handed its volumes over because it is about to stop, and how
    /// much longer that may take.
    pub(super) fn leaving(&self, now: Instant) -> Option<(Duration, Duration)> {
        let lasted = now.saturating_duration_since(self.leaving?);
        Some((lasted, LEAVE_DEADLINE.saturating_sub(lasted)))
    }

    /// Whether this member is about to stop, and has handed over what it could. `is_stuck`: the
    /// change that is under way does not get on, and the others wait for it.
    pub(super) fn has_left(&self, is_stuck: bool, now: Instant) -> bool {
        let is_done = self.due.is_empty() && self.under_way.is_none();
        self.leaving(now).is_some_and(|(_, left)| is_done || is_stuck || left.is_zero())
    }

    /// The volume whose hand-over is under way.
    pub(super) fn yielding(&self) -> Option<Name> {
        match self.under_way.as_ref()? {
            (DueChange::Yield(name), _) => Some(*name),
            (DueChange::Serve(..), _) => None,
        }
    }

    /// Whether the target is a member of a group.
    pub(super) fn is_member(&self) -> bool {
        self.member.is_some()
    }

    /// The configuration of a volume of the group that this member does not serve.
    pub(super) fn other(&self, name: Name) -> Option<&VolumeConfig> {
        self.others.get(&name)
    }

    /// The volumes of the group that this member does not serve.
    pub(super) fn others(&self) -> impl Iterator<Item = Name> {
        self.others.keys().copied()
    }

    /// A volume of the group is served here no longer.
    pub(super) fn leaves(&mut self, name: Name, config: VolumeConfig) {
        if self.is_member() && config.image.is_some() {
            self.others.insert(name, config);
        }
    }

    /// A volume of the group is served here, by whichever order.
    pub(super) fn begins(&mut self, name: Name, volume: VolumeIndex, store: &OpenStore) {
        self.others.remove(&name);
        self.listen_to(volume, store);
        // Its change was under way when the order to stop came.
        if self.leaving.is_some() && store.image().is_some_and(|image| image.record().is_some()) {
            self.yield_soon(name);
        }
    }

    /// The volumes of the group that this member does not serve, by its configuration now. Returns
    /// those that it had before.
    pub(super) fn configure(&mut self, others: BTreeMap<Name, VolumeConfig>) -> BTreeSet<Name> {
        std::mem::replace(&mut self.others, others).into_keys().collect()
    }

    /// Another member has taken a volume by force.
    pub(super) fn loses(&mut self, name: Name, now: Instant) {
        self.lost.insert(name, now);
        // A question that waited while this process stood still.
        self.stays(name);
        self.answer_order(name, &Err("another member has taken the volume".to_owned()));
    }

    /// Learns of the questions of other members for a volume.
    pub(super) fn listen_to(&self, volume: VolumeIndex, store: &OpenStore) {
        if let Some(image) = store.image() {
            let asked = self.asked.0.clone();
            // An error means that control has ended.
            image.on_ask(move |ticket, ask| drop(asked.send((volume, ticket, ask))));
        }
    }

    /// Finds out whether this member still has the image of a volume. A store without an image is
    /// no other member's.
    pub(super) fn prove(&self, proof: Proof, store: Option<&OpenStore>) {
        let proven = self.proven.0.clone();
        // An error means that control has ended.
        let tell = move || {
            let _ = proven.send(proof);
        };
        match store.map(OpenStore::image) {
            Some(Some(image)) => image.prove(tell),
            Some(None) => tell(),
            // The volume is about to go.
            None => {}
        }
    }

    /// The next news. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<ClaimNews> {
        tokio::select! {
            Some((name, result)) = self.ended.1.recv() => {
                self.claiming.remove(&name);
                Some(ClaimNews::Ended(name, result))
            }
            Some((volume, ticket, ask)) = self.asked.1.recv() => {
                Some(ClaimNews::Asked(volume, ticket, ask))
            }
            Some((volume, ticket)) = self.proven.1.recv() => {
                Some(ClaimNews::Proven(volume, ticket))
            }
            else => None,
        }
    }

    /// Whether an image is open here, and its volume is about to be served.
    fn is_serving_soon(&self, name: Name) -> bool {
        let of_name = |due: &DueChange| matches!(due, DueChange::Serve(config, _) if Name::new(&config.name) == Ok(name));
        self.due.iter().any(of_name) || self.under_way.as_ref().is_some_and(|(due, _)| of_name(due))
    }

    /// Begins to claim the image of a volume. A claim under way takes the wish, too. This member
    /// does not claim what it has: it would ask itself, or fence itself.
    pub(super) fn begin(&mut self, name: Name, wish: Wish) {
        if self.is_serving_soon(name) {
            return;
        }
        if let Some(claim) = self.claiming.get(&name) {
            claim.push(wish);
            return;
        }
        let (ended, target) = (self.ended.0.clone(), self.target);
        if self.leaving.is_some() {
            return drop(ended.send((name, Err(AwayVolume::new(name, LEAVES)))));
        }
        let (Some(member), Some(config)) = (self.member.clone(), self.others.get(&name).cloned())
        else {
            drop(ended.send((name, Err(AwayVolume::new(name, "the volume is in no group")))));
            return;
        };
        let is_old = |at: &Instant| at.elapsed() >= DAMPING;
        let may_break = self.lost.get(&name).is_none_or(is_old);
        tracing::info!(volume = %name, ?wish, may_break, "claims the image of a volume");
        let more = MoreWishes::default();
        self.claiming.insert(name, more.clone());
        tokio::task::spawn_blocking(move || {
            let member = GroupMember { wish, may_break, more, ..member };
            let opened = open_one(0, &config, (&target, Some(&member)));
            let opened = opened.map(Arc::new);
            let opened = opened.map_err(|error| AwayVolume::unopened(name, &error));
            // An error means that control has ended.
            drop(ended.send((name, opened)));
        });
    }

    /// An image is open: its volume is to be served.
    ///
    /// # Errors
    /// Why it is not.
    pub(super) fn serve_soon(
        &mut self,
        name: Name,
        opened: Arc<OpenedVolume>,
    ) -> Result<(), &'static str> {
        let config = self.others.get(&name).cloned();
        let config = config.ok_or("the volume is not configured any more")?;
        if self.leaving.is_some() {
            return Err(LEAVES);
        }
        self.due.push(DueChange::Serve(Box::new(config), opened));
        Ok(())
    }

    /// A volume is to be served by another member.
    pub(super) fn yield_soon(&mut self, name: Name) {
        let is_due = |due: &DueChange| matches!(due, DueChange::Yield(other) if *other == name);
        if !self.is_yielding(name) && !self.due.iter().any(is_due) {
            self.due.push(DueChange::Yield(name));
        }
    }

    /// Whether a change or a client waits, or a change is under way.
    pub(super) fn owes(&self) -> bool {
        !self.due.is_empty() || self.under_way.is_some() || !self.orders.is_empty()
    }

    /// The next change to begin, if none of this is under way.
    pub(super) fn next_change(
        &mut self,
    ) -> Option<(VolumeChange, ChangeFiles, oneshot::Sender<ChangeOutcome>)> {
        if self.under_way.is_some() || self.due.is_empty() {
            return None;
        }
        let due = self.due.remove(0);
        let (change, files) = match &due {
            DueChange::Serve(config, opened) => (
                VolumeChange::Add(VolumeConfig::clone(config)),
                ChangeFiles::of_new(Arc::clone(opened)),
            ),
            DueChange::Yield(name) => {
                (VolumeChange::Yield { name: name.to_string() }, ChangeFiles::default())
            }
        };
        let (reply, answer) = oneshot::channel();
        self.under_way = Some((due, answer));
        Some((change, files, reply))
    }

    /// The change under way has ended, if it has.
    pub(super) fn ended_change(&mut self) -> Option<EndedChange> {
        let (_, answer) = self.under_way.as_mut()?;
        let result = match answer.try_recv() {
            Err(oneshot::error::TryRecvError::Empty) => return None,
            Err(oneshot::error::TryRecvError::Closed) => Err("the target stops".to_owned()),
            Ok(outcome) => outcome.map(drop),
        };
        let (due, _) = self.under_way.take()?;
        Some(match due {
            DueChange::Serve(config, _) => {
                let name = Name::new(&config.name).ok()?;
                if result.is_ok() {
                    self.others.remove(&name);
                }
                if result.is_ok() && self.leaving.is_some() {
                    self.yield_soon(name);
                }
                EndedChange::Served(name, result)
            }
            DueChange::Yield(name) => {
                self.answer_order(name, &result);
                EndedChange::Yielded(name, result)
            }
        })
    }
}

/// A change of this that has ended.
#[derive(Debug)]
pub(super) enum EndedChange {
    /// A volume is served, or not.
    Served(Name, Result<(), String>),
    /// A volume is served no longer, or still.
    Yielded(Name, Result<(), String>),
}

/// Whether the owner hands a volume over to the member that asks. `busy`: a change of another
/// volume is under way for long, and nothing is handed over before its end. Then the owner stays,
/// with this reason: it serves the volume.
#[must_use]
pub fn answer_to(
    ask: &Ask,
    volume: VolumeIndex,
    core: &Core,
    busy: Option<String>,
) -> (AskAnswer, Option<String>) {
    match (may_have(ask, volume, core), busy) {
        (true, None) => (AskAnswer::HandsOver, None),
        (true, Some(busy)) => (AskAnswer::Stays, Some(busy)),
        (false, _) => (AskAnswer::Stays, None),
    }
}

/// Whether the member that asks may have a volume.
fn may_have(ask: &Ask, volume: VolumeIndex, core: &Core) -> bool {
    let Some(volume) = core.volume(volume) else { return true };
    let is_holder = core.holders().record(&volume.uuid).is_some_and(|it| ask.is_of_holder(it));
    let is_alone = || core.connected_hosts(volume.index).all(|host| ask.is_of(host));
    ask.take_over || (is_holder && is_alone())
}

#[cfg(test)]
mod tests {
    use rblk_config::ByteSize;

    use super::*;

    fn claims() -> Claims {
        let config = TargetConfig { member: Some("a".to_owned()), ..TargetConfig::default() };
        Claims::new(Name::new("store").unwrap(), &config, Vec::new())
    }

    #[test]
    fn an_image_that_is_open_is_not_claimed_again() {
        let (mut claims, name) = (claims(), Name::new("v").unwrap());
        let config = VolumeConfig::memory("v", ByteSize(1 << 20));
        let opened = open_one(0, &config, (&Name::new("store").unwrap(), None)).unwrap();
        claims.others.insert(name, config);
        claims.serve_soon(name, Arc::new(opened)).unwrap();
        claims.begin(name, Wish::TakeOver);
        assert!(claims.claiming.is_empty(), "its change waits");
        let _change = claims.next_change().unwrap();
        claims.begin(name, Wish::TakeOver);
        assert!(claims.claiming.is_empty(), "its change is under way");
    }

    #[test]
    fn an_order_to_hand_over_ends_while_another_change_is_stuck() {
        let (mut claims, now) = (claims(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        let (reply, mut answer) = oneshot::channel();
        claims.order(v, reply, now);
        claims.yield_soon(w);
        claims.end_late_orders(now + MOVE_DEADLINE / 2, None);
        assert!(answer.try_recv().is_err() && claims.owes());
        claims.end_late_orders(now + MOVE_DEADLINE, Some("volume x is resized"));
        let why = answer.try_recv().unwrap().unwrap_err();
        assert!(why.contains("stays here: volume x is resized"), "{why}");
        // It is not handed over later, when nobody expects it.
        let (change, ..) = claims.next_change().unwrap();
        assert_eq!((change.word(), change.name()), ("hand over", "w"));
        assert!(claims.is_yielding(w) && claims.next_change().is_none());
    }

    #[test]
    fn a_hand_over_that_is_slow_goes_on_without_its_client() {
        let (mut claims, now) = (claims(), Instant::now());
        let v = Name::new("v").unwrap();
        let (reply, mut answer) = oneshot::channel();
        claims.order(v, reply, now);
        let (_, _, ended) = claims.next_change().unwrap();
        claims.end_late_orders(now + MOVE_DEADLINE, None);
        let why = answer.try_recv().unwrap().unwrap_err();
        assert!(why.contains("goes on"), "{why}");
        assert!(ended.send(Ok(crate::control::volumes::ChangedVolume::default())).is_ok());
        assert!(matches!(claims.ended_change(), Some(EndedChange::Yielded(_, Ok(())))));
        assert!(!claims.owes());
    }

    #[test]
    fn a_member_that_is_about_to_stop_hands_all_over_and_takes_nothing() {
        let (mut claims, now) = (claims(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        let config = VolumeConfig::memory("w", ByteSize(1 << 20));
        let open = || open_one(0, &config, (&Name::new("store").unwrap(), None)).unwrap();
        claims.others.insert(w, config.clone());
        claims.serve_soon(w, Arc::new(open())).unwrap();
        assert_eq!(claims.leaving(now), None);
        assert_eq!(claims.leave([v], now), [w], "its host asks another member");
        let why = claims.serve_soon(w, Arc::new(open())).unwrap_err();
        assert!(why.contains("about to stop"), "{why}");
        claims.begin(w, Wish::TakeOver);
        assert!(claims.claiming.is_empty(), "no image is opened");
        // Another member that asks for the volume does not make this one keep it.
        claims.refuses(v);
        assert!(!claims.has_left(false, now));
        let (change, _, ended) = claims.next_change().unwrap();
        assert_eq!((change.word(), change.name()), ("hand over", "v"));
        assert!(!claims.has_left(false, now));
        assert!(ended.send(Ok(crate::control::volumes::ChangedVolume::default())).is_ok());
        assert!(matches!(claims.ended_change(), Some(EndedChange::Yielded(_, Ok(())))));
        assert!(claims.has_left(false, now) && claims.due.is_empty());
    }

    #[test]
    fn a_hand_over_that_is_stuck_does_not_keep_a_member_from_stopping() {
        let (mut claims, now) = (claims(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        let (reply, mut answer) = oneshot::channel();
        claims.order(w, reply, now);
        let _ = claims.leave([v, w], now);
        let _change = claims.next_change().unwrap();
        assert!(claims.yielding() == Some(w) && !claims.has_left(false, now + LEAVE_DEADLINE / 2));
        assert!(claims.has_left(true, now) && claims.has_left(false, now + LEAVE_DEADLINE));
        claims.end_leave();
        assert!(claims.due.is_empty() && answer.try_recv().is_err(), "its hand-over goes on");
    }

    #[test]
    fn a_hand_over_that_has_not_begun_ends_with_the_target() {
        let (mut claims, now) = (claims(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        let (reply, mut answer) = oneshot::channel();
        claims.yield_soon(v);
        claims.order(w, reply, now);
        let _ = claims.leave([], now);
        let _change = claims.next_change().unwrap();
        claims.end_late_orders(now + MOVE_DEADLINE, None);
        assert!(answer.try_recv().unwrap().is_err(), "its client does not wait any more");
        assert!(claims.due.iter().any(|due| matches!(due, DueChange::Yield(name) if *name == w)));
        claims.end_leave();
        assert!(claims.due.is_empty());
    }

    #[test]
    fn a_member_that_asks_takes_back_no_order_of_a_client() {
        let (mut claims, now) = (claims(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        let (reply, _answer) = oneshot::channel();
        claims.order(v, reply, now);
        claims.yield_soon(w);
        claims.refuses(v);
        claims.refuses(w);
        let (change, ..) = claims.next_change().unwrap();
        assert_eq!((change.word(), change.name()), ("hand over", "v"));
        assert!(claims.due.is_empty());
    }
}
