//! [`MemberCalls`]: how the members of a group reach a member that serves no image of the cluster,
//! and how that one reaches them: by notices to an object that the called member watches.
//!
//! Each member watches an object of its own, `rblk.member.TARGET/MEMBER` in the pool and namespace
//! of the images. A notice to an object waits for all that watch it, so a member that stands still
//! delays no call to another one. The client of the cluster for this lasts as long as the process:
//! the end of a client may wait for its cluster. A member that does not watch is not alive, or does
//! not reach the cluster.

use std::fmt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_config::ImageName;
use serde::{Deserialize, Serialize};

use super::object_watch::{KeptWatch, NextDue, OnNews, WatchNews, next_due};
use crate::store::rbd::cluster::ClusterPlace;
use crate::store::rbd::group_look::{GroupLook, GroupLooker};
use crate::store::rbd::owner_question::{AskTicket, answers_in, notify, say};
use crate::store::rbd::ownership::owner_note::OwnerNote;
use crate::store::rbd::ownership::state_change::{StateChange, StatePlace};
use crate::store::rbd::state_object::StateObject;

/// Time between two tries to connect.
const CONNECT_RETRY: Duration = Duration::from_secs(10);
/// How long a member that lives may take to say so.
const THERE_DEADLINE: Duration = Duration::from_secs(4);
/// Time between two calls to a member that does not watch.
const CALL_PAUSE: Duration = Duration::from_millis(250);
/// How long a member may take to serve a volume that it was told to take.
pub(crate) const TAKE_DEADLINE: Duration = Duration::from_secs(60);
/// Time between two looks for the owner of an image that a member was told to take.
const OWNER_PAUSE: Duration = Duration::from_millis(500);
/// How long a member that owns an image may take to say so.
const ANSWER_LATE: Duration = Duration::from_secs(1);
/// How long the end of the watch is waited for.
const END_WAIT: Duration = Duration::from_secs(2);
/// The harm while no member can call this one.
const UNHEARD: &str = "`volume move --to` cannot reach this member from others";

/// An order to a member to take a volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct TakeCall {
    /// The name of the volume.
    pub volume: String,
    /// The name of its image.
    pub image: String,
    /// The number of the order, which the owner knows.
    pub order: u64,
}

/// A call to a member.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct MemberCall {
    // The member that calls.
    from: String,
    // None: the member says only that it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    take: Option<TakeCall>,
}

/// The answer to a call.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct CallAnswer {
    // Why the member does not serve the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

/// Learns that another member, of this name, tells this one to take a volume.
type OnTake = Box<dyn Fn(AskTicket, String, TakeCall) + Send>;

/// An order to the thread.
#[derive(Debug)]
enum CallOrder {
    Notice(AskTicket, Vec<u8>),
    Answer(AskTicket, CallAnswer),
    WatchAnew,
    End,
}

/// The member whose calls these are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CalledMember {
    /// The name of the target, which all members have.
    pub target: String,
    /// Its name in the group.
    pub member: String,
}

/// See the module. The drop ends the watch.
pub(crate) struct MemberCalls {
    called: CalledMember,
    // An image there: the object is in its pool and namespace.
    image: ImageName,
    looker: Arc<OnceLock<&'static GroupLooker>>,
    orders: Sender<CallOrder>,
    ended: Mutex<Receiver<()>>,
}

impl fmt::Debug for MemberCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberCalls").field("called", &self.called).finish_non_exhaustive()
    }
}

impl MemberCalls {
    /// Begins to listen to calls, by a client of this cluster, in the pool of this image. Without a
    /// thread for it, nobody can call.
    pub(crate) fn begin(
        called: CalledMember,
        (place, image): (ClusterPlace, ImageName),
        on_take: impl Fn(AskTicket, String, TakeCall) + Send + 'static,
    ) -> Self {
        let (orders, received) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let looker = Arc::new(OnceLock::new());
        let listens = CallListener {
            called: called.clone(),
            place,
            image: image.clone(),
            looker: Arc::clone(&looker),
            to_self: orders.clone(),
            on_take: Box::new(on_take),
        };
        let spawned = thread::Builder::new().name("rblk-calls".to_owned()).spawn(move || {
            listens.run(&received);
            drop(end);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "{UNHEARD}");
        }
        Self { called, image, looker, orders, ended: Mutex::new(ended) }
    }

    /// Whether a call about an image of this cluster goes by the object of this.
    pub(crate) fn reaches(&self, image: &ImageName) -> bool {
        (&self.image.pool, &self.image.namespace) == (&image.pool, &image.namespace)
    }

    /// Answers a member that told this one to take a volume.
    pub(crate) fn answer(&self, ticket: AskTicket, taken: Result<(), String>) {
        // An error means that the target ends.
        let _ = self.orders.send(CallOrder::Answer(ticket, CallAnswer { why_not: taken.err() }));
    }

    /// Tells another member to take a volume, and waits until it serves it. Blocks for about
    /// [`TAKE_DEADLINE`] at most.
    ///
    /// # Errors
    /// It does not, and why.
    pub(crate) fn take(&self, to: &str, take: TakeCall, image: &ImageName) -> Result<(), String> {
        let volume = take.volume.clone();
        let stays = |why: String| format!("{why}: {volume} is not moved");
        let object = self.object_of(to).map_err(stays)?;
        // A dead member would be waited for.
        if !self.is_there(&object).map_err(stays)? {
            return Err(stays(format!(
                "no member `{to}` of this target answers: it does not run, does not reach the cluster, has another \
                 name, or is older than this command"
            )));
        }
        match self.call_or_look((to, object), take, image).map_err(stays)? {
            Some(CallAnswer { why_not: None }) => Ok(()),
            Some(CallAnswer { why_not: Some(why) }) => {
                Err(format!("member `{to}` does not take {volume}: {why}"))
            }
            None => Err(format!(
                "member `{to}` has not taken {volume} within {} s: `rblk-target group status` says who has it",
                TAKE_DEADLINE.as_secs()
            )),
        }
    }

    /// Calls a member to take an image, and looks for its owner meanwhile. A member that was
    /// started again has the watch of its former process for 30 s, and a notice waits for that one,
    /// too.
    fn call_or_look(
        &self,
        (to, object): (&str, StateObject),
        take: TakeCall,
        image: &ImageName,
    ) -> Result<Option<CallAnswer>, String> {
        let call = MemberCall { from: self.called.member.clone(), take: Some(take) };
        let (news, outcome) = mpsc::channel();
        let (called, looked) = (news.clone(), news);
        let (looker, to, image) = (Arc::clone(&self.looker), to.to_owned(), image.clone());
        // A former process of that member may be noted as the owner.
        let before = looker.get().and_then(|looker| looker.look(&image).ok());
        let before = before.map_or(u64::MAX, |look| look.owner.epoch);
        let begin = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let begun = thread::Builder::new().name(name.to_owned()).spawn(work);
            begun.map(drop).map_err(|error| error.to_string())
        };
        begin(
            "rblk-call",
            Box::new(move || {
                // An error means that the owner is known by a look.
                let _ = called.send(Some(call_member(&object, &call, TAKE_DEADLINE)));
            }),
        )?;
        begin(
            "rblk-owner",
            Box::new(move || {
                let mut since = None;
                // The end of the call ends the looks.
                while looked.send(None).is_ok() {
                    thread::sleep(OWNER_PAUSE);
                    let look = looker.get().and_then(|looker| looker.look(&image).ok());
                    let owns = look.is_some_and(|GroupLook { owner, lock, .. }| {
                        owner.member == to && owner.epoch > before && lock == Some(owner.client)
                    });
                    let long = owns.then(|| *since.get_or_insert_with(Instant::now));
                    if long.is_some_and(|since: Instant| since.elapsed() >= ANSWER_LATE) {
                        let taken = Ok(Some(CallAnswer::default()));
                        return drop(looked.send(Some(taken)));
                    }
                }
            }),
        )?;
        let deadline = Instant::now() + TAKE_DEADLINE + THERE_DEADLINE;
        loop {
            match outcome.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Some(ended)) => return ended,
                Ok(None) => {}
                Err(_) => return Ok(None),
            }
        }
    }

    /// The owner of an image. None: the cluster does not tell now.
    pub(crate) fn owner_of(&self, image: &ImageName) -> Option<OwnerNote> {
        Some(self.looker.get()?.look(image).ok()?.owner)
    }

    fn object_of(&self, member: &str) -> Result<StateObject, String> {
        let looker =
            self.looker.get().ok_or("this member does not reach the cluster".to_owned())?;
        let place = (&*self.called.target, member);
        let object = looker.object_of(&self.image, place);
        object.map_err(|errno| format!("cannot open the pool {} ({errno})", self.image.pool))
    }

    /// Whether a member answers. One that has just started may not watch yet, and the cluster may
    /// still wait for its former process.
    fn is_there(&self, object: &StateObject) -> Result<bool, String> {
        let began = Instant::now();
        loop {
            let call = MemberCall { from: self.called.member.clone(), take: None };
            if call_member(object, &call, THERE_DEADLINE / 2)?.is_some() {
                return Ok(true);
            }
            if began.elapsed() >= THERE_DEADLINE {
                return Ok(false);
            }
            thread::sleep(CALL_PAUSE);
        }
    }
}

/// Calls a member. None: it does not answer.
fn call_member(
    object: &StateObject,
    call: &MemberCall,
    deadline: Duration,
) -> Result<Option<CallAnswer>, String> {
    let text = serde_json::to_vec(call).map_err(|error| error.to_string())?;
    match notify(object, &text, deadline) {
        Ok(replies) => Ok(answers_in(&replies).next()),
        Err(errno) => Err(format!("cannot call another member ({errno})")),
    }
}

impl Drop for MemberCalls {
    fn drop(&mut self) {
        // An error means that the thread has ended.
        let _ = self.orders.send(CallOrder::End);
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(END_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "a Ceph cluster does not answer, so the watch of a member goes on there"
            );
        }
    }
}

/// The work of the thread.
struct CallListener {
    called: CalledMember,
    place: ClusterPlace,
    image: ImageName,
    looker: Arc<OnceLock<&'static GroupLooker>>,
    to_self: Sender<CallOrder>,
    on_take: OnTake,
}

impl CallListener {
    fn run(self, orders: &Receiver<CallOrder>) {
        let mut is_said = false;
        let object = loop {
            match self.object() {
                Ok(object) => break object,
                Err(error) if !std::mem::replace(&mut is_said, true) => {
                    tracing::warn!(error, "{UNHEARD}; this one tries again every few seconds");
                }
                Err(_) => {}
            }
            match orders.recv_timeout(CONNECT_RETRY) {
                Ok(CallOrder::End) | Err(RecvTimeoutError::Disconnected) => return,
                // Nobody calls without a watch.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            }
        };
        let to_self = self.to_self.clone();
        let on_news: OnNews = Arc::new(move |news| {
            // An error means that the thread ends.
            let _ = to_self.send(match news {
                WatchNews::Notice(ticket, text) => CallOrder::Notice(ticket, text),
                WatchNews::Broken => CallOrder::WatchAnew,
            });
        });
        let mut watch = KeptWatch::begin(&object, UNHEARD, on_news);
        loop {
            match next_due(orders, watch.again_at()) {
                NextDue::Watch | NextDue::Order(CallOrder::WatchAnew) => watch.again(),
                NextDue::Order(CallOrder::Notice(ticket, text)) => {
                    self.on_notice(&object, ticket, &text);
                }
                NextDue::Order(CallOrder::Answer(ticket, answer)) => say(&object, ticket, &answer),
                NextDue::Order(CallOrder::End) | NextDue::End => return,
            }
        }
    }

    /// The object of this member, which exists then.
    fn object(&self) -> Result<StateObject, String> {
        let looker = match self.looker.get() {
            Some(looker) => looker,
            None => {
                let made = GroupLooker::connect(&self.place, &self.image);
                let made = made.map_err(|error| error.to_string())?;
                self.looker.get_or_init(|| Box::leak(Box::new(made)))
            }
        };
        let (image, own) = (&self.image, (&*self.called.target, &*self.called.member));
        let object = looker.object_of(image, own).map_err(|errno| errno.to_string())?;
        match object.carry_out(&StateChange { creates: true, ..StateChange::default() }) {
            Ok(_) | Err(Errno::EEXIST) => Ok(object),
            Err(errno) => Err(format!("{image}: cannot make an object in its pool ({errno})")),
        }
    }

    fn on_notice(&self, object: &StateObject, ticket: AskTicket, text: &[u8]) {
        match serde_json::from_slice(text) {
            Ok(MemberCall { from, take: Some(take) }) => (self.on_take)(ticket, from, take),
            Ok(MemberCall { take: None, .. }) => say(object, ticket, &CallAnswer::default()),
            // Of another program. Without an answer it learns that.
            Err(error) => tracing::debug!(object = object.name(), %error, "a call that is none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_a_later_version_is_understood_as_far_as_it_is_known() {
        let take = TakeCall { volume: "v".to_owned(), image: "rbd/v".to_owned(), order: 7 };
        let call = MemberCall { from: "a".to_owned(), take: Some(take) };
        let text =
            r#"{"from":"a","take":{"volume":"v","image":"rbd/v","order":7,"new":1},"newer":2}"#;
        assert_eq!(serde_json::from_str::<MemberCall>(text).unwrap(), call);
        let text = serde_json::to_string(&call).unwrap();
        assert_eq!(serde_json::from_str::<MemberCall>(&text).unwrap(), call);
        let here: MemberCall = serde_json::from_str(r#"{"from":"a"}"#).unwrap();
        assert_eq!(here.take, None);
        assert_eq!(serde_json::to_string(&CallAnswer::default()).unwrap(), "{}");
    }
}
