//! [`StateKeeper`]: the thread of the [`StateObject`] of an image that this member owns, and
//! [`ImageRecord`], the record of the volume there.
//!
//! A call to a cluster that does not answer ends when it answers again. So it is made by a thread
//! of its own, and whoever waits for a record gives up after [`DEADLINE`]: the records of all other
//! volumes wait behind this one. The thread remembers a change whose end nobody waited for.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::calls::object_watch::{KeptWatch, NextDue, OnNews, WatchNews, next_due};
use super::image_claim::AskAnswer;
use super::owner_question::{Ask, AskTicket, SaidAnswer, say};
use super::ownership::owner_note::OwnerNote;
use super::ownership::state_change::KeptText;
use super::ownership::state_tenure::StateTenure;
use super::state_object::StateObject;
use super::state_record::{StateRecord, StateText};

/// How long a record is waited for.
const DEADLINE: Duration = Duration::from_secs(10);
/// The harm while no member can ask this one.
const UNHEARD: &str =
    "other members cannot ask this one for an image: they fence it when a host asks them for it";

/// Learns of the questions of other members.
pub(super) type OnAsk = Box<dyn Fn(AskTicket, Ask) + Send>;

/// An order to the thread.
enum StateOrder {
    Read(SyncSender<Result<KeptText, Errno>>),
    // The expected and the next revision.
    Replace((u64, u64), Vec<u8>, SyncSender<Result<bool, Errno>>),
    Asked(AskTicket, Vec<u8>),
    Answer(AskTicket, AskAnswer, Option<String>),
    Listen(OnAsk),
    // The watch is broken.
    WatchAnew,
    // The flag: the image is lost, or may be.
    End(bool),
}

/// See the module. The drop gives the image back, and waits for the thread.
#[derive(Debug)]
pub(super) struct StateKeeper {
    orders: Sender<StateOrder>,
    thread: Option<JoinHandle<()>>,
    is_lost: bool,
    // The image is not given back before.
    not_before: Instant,
}

impl StateKeeper {
    /// Begins to keep the object, as the owner of this note, which gives the image back at that
    /// moment or later. The cluster must not end before the keeper has.
    pub(super) fn begin(
        object: StateObject,
        note: OwnerNote,
        not_before: Instant,
    ) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let to_self = orders.clone();
        let spawned = thread::Builder::new().name("rblk-state".to_owned()).spawn(move || {
            let on_news: OnNews = Arc::new(move |news| {
                // An error means that the thread ends.
                let _ = to_self.send(match news {
                    WatchNews::Notice(ticket, text) => StateOrder::Asked(ticket, text),
                    WatchNews::Broken => StateOrder::WatchAnew,
                });
            });
            let watch = KeptWatch::begin(&object, UNHEARD, on_news);
            let tenure = StateTenure::new(note);
            let asked = Vec::new();
            let mut keeping = Keeping { object: &object, tenure, asked, on_ask: None, watch };
            let is_lost = keeping.run(&received);
            let Keeping { tenure, watch, .. } = keeping;
            // No question comes any more.
            drop(watch);
            // Another client than a member may have a lost image. The next owner finds the note of
            // one that has not the lock any more, and lets no host resume.
            if !is_lost {
                give_back(&tenure, &object);
            }
        });
        Ok(Self { orders, thread: Some(spawned?), is_lost: false, not_before })
    }

    /// The image is lost, or may be: it is not given back.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// The record of the volume there.
    pub(super) fn record(&self, volume: [u8; 16], place: String) -> ImageRecord {
        StateRecord::new(volume, RecordOrders(self.orders.clone()), place)
    }

    /// A way to listen to other members, and to answer them.
    pub(super) fn asking(&self) -> Asking {
        Asking(self.orders.clone())
    }
}

impl Drop for StateKeeper {
    fn drop(&mut self) {
        if !self.is_lost {
            thread::sleep(self.not_before.saturating_duration_since(Instant::now()));
        }
        // Errors mean that the thread has ended.
        let _ = self.orders.send(StateOrder::End(self.is_lost));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The questions of other members to the owner of an image.
#[derive(Clone, Debug)]
pub(super) struct Asking(Sender<StateOrder>);

impl Asking {
    /// Has a function called for each question. Without one, the owner stays.
    pub(super) fn listen(&self, on_ask: OnAsk) {
        let _ = self.0.send(StateOrder::Listen(on_ask));
    }

    /// Answers a question, with the reason of an owner that stays.
    pub(super) fn answer(&self, ticket: AskTicket, answer: AskAnswer, why: Option<String>) {
        let _ = self.0.send(StateOrder::Answer(ticket, answer, why));
    }
}

/// The work of the thread.
struct Keeping<'o> {
    object: &'o StateObject,
    tenure: StateTenure,
    // The questions without an answer, and the members that ask.
    asked: Vec<(AskTicket, String, bool)>,
    on_ask: Option<OnAsk>,
    // Without it another member fences this one when a host asks it for the image.
    watch: KeptWatch<'o>,
}

impl Keeping<'_> {
    /// Returns whether the image is lost.
    fn run(&mut self, orders: &Receiver<StateOrder>) -> bool {
        loop {
            let order = match next_due(orders, self.watch.again_at()) {
                NextDue::Order(order) => order,
                NextDue::Watch => {
                    self.watch.again();
                    continue;
                }
                NextDue::End => return false,
            };
            match order {
                // An error means that nobody waits any more.
                StateOrder::Read(reply) => drop(reply.send(self.object.record())),
                StateOrder::Replace(revisions, text, reply) => {
                    let replaced = self.tenure.replace(self.object, revisions, &text);
                    if reply.send(replaced).is_err() && replaced == Ok(true) {
                        self.tenure.not_told(revisions);
                    }
                }
                StateOrder::Asked(ticket, text) => {
                    match (Ask::parse(&text), &self.on_ask) {
                        (Some(ask), Some(on_ask)) => {
                            self.asked.push((ticket, ask.member.clone(), ask.order.is_some()));
                            on_ask(ticket, ask);
                        }
                        // Nothing of this volume is served yet.
                        (Some(_), None) => self.answer(ticket, AskAnswer::Stays, None),
                        (None, _) => {}
                    }
                }
                StateOrder::Answer(ticket, said, why) => {
                    let gets_it = said == AskAnswer::HandsOver;
                    for (_, member, by_order) in self.asked.extract_if(.., |it| it.0 == ticket) {
                        self.tenure.promise(&member, gets_it, by_order);
                    }
                    self.answer(ticket, said, why);
                }
                StateOrder::Listen(on_ask) => self.on_ask = Some(on_ask),
                StateOrder::WatchAnew => self.watch.again(),
                StateOrder::End(is_lost) => return is_lost,
            }
        }
    }

    fn answer(&self, ticket: AskTicket, answer: AskAnswer, why: Option<String>) {
        let epoch = self.tenure.note().epoch;
        say(self.object, ticket, &SaidAnswer { epoch, answer, why });
    }
}

/// Notes that nobody owns the image. Without this, the next owner fences this client.
fn give_back(tenure: &StateTenure, object: &StateObject) {
    match tenure.give_back(object) {
        Ok(true) => {}
        Ok(false) => tracing::info!(object = object.name(), "another member has it by now"),
        Err(errno) => {
            tracing::warn!(object = object.name(), %errno, "cannot give an image back");
        }
    }
}

/// The record of a volume on an image, in the object beside it.
pub(crate) type ImageRecord = StateRecord<RecordOrders>;

/// Orders to the thread that has the object.
#[derive(Clone, Debug)]
pub(crate) struct RecordOrders(Sender<StateOrder>);

impl RecordOrders {
    fn asked<T>(
        &self,
        order: impl FnOnce(SyncSender<Result<T, Errno>>) -> StateOrder,
    ) -> io::Result<T> {
        let (reply, answer) = mpsc::sync_channel(0);
        let closed = || io::Error::new(io::ErrorKind::NotConnected, "the image is closed");
        self.0.send(order(reply)).map_err(|_| closed())?;
        match answer.recv_timeout(DEADLINE) {
            Ok(result) => result.map_err(|errno| match errno {
                Errno::ESHUTDOWN => io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "the cluster has fenced this target",
                ),
                errno => errno.into(),
            }),
            Err(RecvTimeoutError::Disconnected) => Err(closed()),
            Err(RecvTimeoutError::Timeout) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the cluster did not answer within {} s", DEADLINE.as_secs()),
            )),
        }
    }
}

impl StateText for RecordOrders {
    fn kept(&self) -> io::Result<KeptText> {
        self.asked(StateOrder::Read)
    }

    fn replace_text(&self, text: Vec<u8>, revisions: (u64, u64)) -> io::Result<bool> {
        self.asked(|reply| StateOrder::Replace(revisions, text, reply))
    }
}
