//! [`Moves`]: volumes of a group that go to the member that a person names.
//!
//! ```text
//! a member that is told so       the named member
//! order N: calls it          ->  claims the image (claims.rs), as order N
//! the owner, if it gave
//! order N: hands over        <-  asks the owner
//!                            <-  serves the volume, and answers the call
//! ```
//!
//! So nothing is handed over to a member that does not live, or does not reach the cluster. A
//! member that stood still meanwhile takes nothing later: the owner does not have the order any
//! more. The way of the host to the new owner may lead over other members. They leave the image to
//! the one that it is promised to
//! ([`OwnerNote::next`](crate::store::rbd::ownership::owner_note::OwnerNote::next)), and the new
//! owner stays the owner for a moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::{BackingConfig, ImageName, VolumeConfig};
use rblk_protocol::Name;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::store::rbd::ClusterPlace;
use crate::store::rbd::calls::member_calls::{CalledMember, MemberCalls, TakeCall};
use crate::store::rbd::owner_question::AskTicket;
use crate::store::rbd::ownership::owner_note::OwnerNote;

/// How long a member that a volume was moved to stays its owner, whichever member asks for it.
const MOVED_HERE: Duration = Duration::from_secs(10);
/// How long an order may take, whatever the cluster does.
const ORDER_DEADLINE: Duration = Duration::from_secs(70);
/// Pauses between two looks for the owner of a volume that was handed over: the first and the
/// longest one.
const LOOK_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Why the owner of a volume stays.
pub(super) const JUST_MOVED: &str = "the volume was moved here a moment ago";
/// Why the owner of a volume stays.
pub(super) const NO_ORDER: &str = "the order did not come from it, or has ended: use `rblk-target volume move NAME --to MEMBER` at the member that \
                                   serves it, or at the one that is to serve it";

/// Takes the outcome of an order to move a volume.
pub(super) type MoveReply = oneshot::Sender<Result<(), String>>;

/// The caller that waits until this member serves a volume.
#[derive(Debug)]
pub(super) enum TakeReply {
    /// A client of the control socket.
    Client(MoveReply),
    /// Another member, by these calls.
    Member(usize, AskTicket),
}

/// News of moves.
#[derive(Debug)]
pub(super) enum MoveNews {
    /// The member of this name tells this one to take a volume.
    Told(String, TakeCall, TakeReply),
    /// An order to another member has ended.
    Ended(Name, Result<(), String>, MoveReply),
    /// A volume that was handed over has an owner again.
    Found(Name, ImageName, OwnerNote),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Moves {
    // None: the target is in no group.
    own: Option<CalledMember>,
    // By user of a cluster. They last as long as the target runs.
    calls: Vec<(ClusterPlace, Arc<MemberCalls>)>,
    // The orders of this member to others, and their numbers.
    orders: BTreeMap<Name, u64>,
    // The callers that wait until this member serves a volume.
    takes: Vec<(Name, TakeReply)>,
    // The volumes that were moved here, and when.
    moved_here: BTreeMap<Name, Instant>,
    // The looks for the owners of volumes.
    sought: BTreeMap<Name, AbortHandle>,
    news: (mpsc::UnboundedSender<MoveNews>, mpsc::UnboundedReceiver<MoveNews>),
}

impl Moves {
    /// Those of a target, or of the member of a group.
    pub(super) fn new(target: Name, member: Option<String>) -> Self {
        Self {
            own: member.map(|member| CalledMember { target: target.to_string(), member }),
            calls: Vec::new(),
            orders: BTreeMap::new(),
            takes: Vec::new(),
            moved_here: BTreeMap::new(),
            sought: BTreeMap::new(),
            news: mpsc::unbounded_channel(),
        }
    }

    /// The name of this member.
    pub(super) fn member(&self) -> Option<&str> {
        self.own.as_ref().map(|own| &*own.member)
    }

    /// Listens to calls about the images of these volumes.
    pub(super) fn listen<'v>(&mut self, volumes: impl IntoIterator<Item = &'v VolumeConfig>) {
        let Some(own) = self.own.clone() else { return };
        for (place, image) in volumes.into_iter().filter_map(image_of) {
            if self.calls_about(&place, &image).is_some() {
                continue;
            }
            let (at, news) = (self.calls.len(), self.news.0.clone());
            let of_image = (place.clone(), image);
            let calls = MemberCalls::begin(own.clone(), of_image, move |ticket, from, take| {
                // An error means that control has ended.
                let _ = news.send(MoveNews::Told(from, take, TakeReply::Member(at, ticket)));
            });
            self.calls.push((place, Arc::new(calls)));
        }
    }

    fn calls_about(&self, place: &ClusterPlace, image: &ImageName) -> Option<&Arc<MemberCalls>> {
        let reaches = |(of, calls): &&(_, Arc<MemberCalls>)| of == place && calls.reaches(image);
        self.calls.iter().find(reaches).map(|(_, calls)| calls)
    }

    /// The next news. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<MoveNews> {
        self.news.1.recv().await
    }

    /// Tells another member to take a volume, and answers when it serves it.
    pub(super) fn order(
        &mut self,
        (name, config): (Name, &VolumeConfig),
        to: String,
        reply: MoveReply,
    ) {
        let found = image_of(config);
        let calls = found.as_ref().and_then(|(place, image)| self.calls_about(place, image));
        let refused = match (&found, calls, self.orders.contains_key(&name)) {
            (Some((_, image)), Some(calls), false) => {
                new_order().map(|order| (image.clone(), Arc::clone(calls), order))
            }
            (.., true) => Err(format!("{name} is being moved already")),
            _ => Err(format!("{name} is not on an image that several members can serve")),
        };
        let (image, calls, order) = match refused {
            Ok(parts) => parts,
            // An error means that the client is gone.
            Err(why) => return drop(reply.send(Err(why))),
        };
        tracing::info!(volume = %name, to, order, "tells another member to take a volume");
        self.orders.insert(name, order);
        let take = TakeCall { volume: name.to_string(), image: image.to_string(), order };
        let news = self.news.0.clone();
        let taken = tokio::task::spawn_blocking(move || calls.take(&to, take, &image));
        tokio::spawn(async move {
            let taken = match tokio::time::timeout(ORDER_DEADLINE, taken).await {
                Ok(taken) => taken.unwrap_or_else(|error| Err(error.to_string())),
                Err(_) => Err(format!(
                    "the cluster does not answer: `rblk-target group status` says who has {name}"
                )),
            };
            // An error means that control has ended.
            let _ = news.send(MoveNews::Ended(name, taken, reply));
        });
    }

    /// Whether this member has told another one, by this order, to take a volume.
    pub(super) fn has_order(&self, name: Name, order: u64) -> bool {
        self.orders.get(&name) == Some(&order)
    }

    /// Whether this member is told to take a volume.
    pub(super) fn takes_any(&self) -> bool {
        !self.takes.is_empty()
    }

    /// Whether this member has told another one to take a volume.
    pub(super) fn has_orders(&self, name: Name) -> bool {
        self.orders.contains_key(&name)
    }

    /// An order to another member has ended.
    pub(super) fn order_ended(&mut self, name: Name) {
        self.orders.remove(&name);
    }

    /// This member is about to take a volume.
    pub(super) fn take(&mut self, name: Name, reply: TakeReply) {
        self.takes.push((name, reply));
    }

    /// A claim has ended, with the volume served here or not.
    pub(super) fn claim_ended(&mut self, name: Name, taken: &Result<(), String>, now: Instant) {
        let replies: Vec<_> = self.takes.extract_if(.., |(other, _)| *other == name).collect();
        if taken.is_ok() && !replies.is_empty() {
            self.moved_here.insert(name, now);
        }
        replies.into_iter().for_each(|(_, reply)| self.reply(reply, taken.clone()));
    }

    /// Tells whether this member serves a volume, or why it does not.
    pub(super) fn reply(&self, reply: TakeReply, taken: Result<(), String>) {
        match reply {
            // An error means that the client is gone.
            TakeReply::Client(reply) => drop(reply.send(taken)),
            TakeReply::Member(at, ticket) => {
                if let Some((_, calls)) = self.calls.get(at) {
                    calls.answer(ticket, taken);
                }
            }
        }
    }

    /// Whether a volume was moved here a moment ago, or is about to be: the way of its host may
    /// lead over other members.
    pub(super) fn is_moved_here(&self, name: Name, now: Instant) -> bool {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < MOVED_HERE;
        self.moved_here.get(&name).is_some_and(is_recent)
            || self.takes.iter().any(|(other, _)| *other == name)
    }

    /// Looks for the next owner of a volume that was handed over, until there is one. The image may
    /// not be given back yet.
    pub(super) fn seek_owner(&mut self, name: Name, config: &VolumeConfig) {
        let Some((place, image)) = image_of(config) else { return };
        let Some(calls) = self.calls_about(&place, &image).cloned() else { return };
        let (news, own) = (self.news.0.clone(), self.member().map(ToOwned::to_owned));
        let looks = tokio::spawn(async move {
            let (mut pause, longest) = LOOK_PAUSES;
            loop {
                let (looks, of) = (Arc::clone(&calls), image.clone());
                let looked = tokio::task::spawn_blocking(move || looks.owner_of(&of)).await;
                let is_next = |note: &OwnerNote| {
                    !note.client.is_empty() && Some(&note.member) != own.as_ref()
                };
                if let Some(note) = looked.ok().flatten().filter(is_next) {
                    // An error means that control has ended.
                    return drop(news.send(MoveNews::Found(name, image, note)));
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        });
        self.seek_no_longer(name);
        self.sought.insert(name, looks.abort_handle());
    }

    /// The owner of a volume is known, or nobody has to know it any more.
    pub(super) fn seek_no_longer(&mut self, name: Name) {
        if let Some(looks) = self.sought.remove(&name) {
            looks.abort();
        }
    }
}

/// The image of a volume that members of a group can serve in turn, and its cluster.
fn image_of(config: &VolumeConfig) -> Option<(ClusterPlace, ImageName)> {
    match config.backing() {
        Ok(BackingConfig::Rbd { image, cluster, .. }) if image.snap.is_none() => {
            Some((ClusterPlace::from(&cluster), image))
        }
        _ => None,
    }
}

/// The number of an order, which no other order has, of this run or another.
fn new_order() -> Result<u64, String> {
    let mut number = [0; 8];
    getrandom::fill(&mut number).map_err(|error| error.to_string())?;
    Ok(u64::from_ne_bytes(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moves() -> Moves {
        Moves::new(Name::new("store").unwrap(), Some("a".to_owned()))
    }

    #[test]
    fn a_volume_that_was_moved_here_stays_for_a_moment() {
        let (mut moves, now) = (moves(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        let (reply, mut answer) = oneshot::channel();
        moves.take(v, TakeReply::Client(reply));
        assert!(moves.is_moved_here(v, now), "its host may be on its way");
        moves.claim_ended(w, &Ok(()), now);
        assert!(answer.try_recv().is_err() && !moves.is_moved_here(w, now), "a host asked for it");
        moves.claim_ended(v, &Ok(()), now);
        assert_eq!(answer.try_recv().unwrap(), Ok(()));
        assert!(moves.is_moved_here(v, now + MOVED_HERE / 2));
        assert!(!moves.is_moved_here(v, now + MOVED_HERE));
    }

    #[test]
    fn a_client_learns_why_a_volume_is_not_moved_here() {
        let (mut moves, now) = (moves(), Instant::now());
        let v = Name::new("v").unwrap();
        let (reply, mut answer) = oneshot::channel();
        moves.take(v, TakeReply::Client(reply));
        moves.claim_ended(v, &Err("member `b` stays".to_owned()), now);
        assert_eq!(answer.try_recv().unwrap().unwrap_err(), "member `b` stays");
        assert!(!moves.is_moved_here(v, now));
    }

    #[test]
    fn a_volume_goes_by_the_order_that_is_under_way_and_by_no_other_one() {
        let mut moves = moves();
        let v = Name::new("v").unwrap();
        moves.orders.insert(v, 7);
        assert!(moves.has_order(v, 7) && !moves.has_order(v, 6));
        moves.order_ended(v);
        assert!(!moves.has_order(v, 7));
        assert_ne!(new_order(), new_order());
        // A volume in memory is of one target.
        let (reply, mut answer) = oneshot::channel();
        let config = VolumeConfig::memory("v", rblk_config::ByteSize(1 << 20));
        moves.order((v, &config), "b".to_owned(), reply);
        assert!(answer.try_recv().unwrap().unwrap_err().contains("several members"));
    }
}
