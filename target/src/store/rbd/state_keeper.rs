//! [`StateKeeper`]: the thread of the [`StateObject`] of an image that this member owns, and
//! [`ImageRecord`], the record of the volume there.
//!
//! A call to a cluster that does not answer ends when it answers again. So it is made by a thread
//! of its own, and whoever waits for a record gives up after [`DEADLINE`]: the records of all other
//! volumes wait behind this one. The thread remembers a change whose end nobody waited for.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::cluster::checked;
use super::image_claim::AskAnswer;
use super::open_image::boot_ms;
use super::owner_question::{Ask, AskTicket, SaidAnswer, receive, say};
use super::ownership::owner_note::OwnerNote;
use super::ownership::state_change::KeptText;
use super::ownership::state_tenure::StateTenure;
use super::state_object::StateObject;
use super::state_record::{StateRecord, StateText};

/// How long a record is waited for.
const DEADLINE: Duration = Duration::from_secs(10);
/// Seconds after which the cluster forgets the watch of a client that it does not hear of.
const WATCH_SECONDS: u32 = 30;
/// Time between two tries to begin a watch.
const WATCH_RETRY: Duration = Duration::from_secs(3);

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
    // The image is not given back before, by [`boot_ms`].
    not_before: u64,
}

impl StateKeeper {
    /// Begins to keep the object, as the owner of this note, which gives the image back at that
    /// moment or later. The cluster must not end before the keeper has.
    pub(super) fn begin(object: StateObject, note: OwnerNote, not_before: u64) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let to_self = orders.clone();
        let spawned = thread::Builder::new().name("rblk-state".to_owned()).spawn(move || {
            let mut keeping = Keeping {
                object: &object,
                tenure: StateTenure::new(note),
                on_ask: None,
                watch: None,
                watch_at: None,
                is_unheard: false,
                to_self,
            };
            keeping.watch();
            let is_lost = keeping.run(&received);
            // No question comes any more.
            keeping.watch = None;
            // Another client than a member may have a lost image. The next owner finds the note of
            // one that has not the lock any more, and lets no host resume.
            if !is_lost {
                keeping.give_back();
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
            thread::sleep(Duration::from_millis(self.not_before.saturating_sub(boot_ms())));
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

/// What the thread does next.
#[derive(PartialEq, Eq, Debug)]
enum NextDue<T> {
    Order(T),
    Watch,
    // Nobody gives orders any more.
    End,
}

/// Waits for an order, or until a try to watch is due. Orders that come one after the other do not
/// delay that.
fn next_due<T>(orders: &Receiver<T>, watch_at: Option<Instant>) -> NextDue<T> {
    let Some(at) = watch_at else { return orders.recv().map_or(NextDue::End, NextDue::Order) };
    let left = at.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return NextDue::Watch;
    }
    match orders.recv_timeout(left) {
        Ok(order) => NextDue::Order(order),
        Err(RecvTimeoutError::Timeout) => NextDue::Watch,
        Err(RecvTimeoutError::Disconnected) => NextDue::End,
    }
}

/// The work of the thread.
struct Keeping<'o> {
    object: &'o StateObject,
    tenure: StateTenure,
    on_ask: Option<OnAsk>,
    watch: Option<Watch<'o>>,
    // When the next try to watch is due, if there is no watch.
    watch_at: Option<Instant>,
    // A try to watch has failed since the last watch.
    is_unheard: bool,
    to_self: Sender<StateOrder>,
}

impl Keeping<'_> {
    /// Returns whether the image is lost.
    fn run(&mut self, orders: &Receiver<StateOrder>) -> bool {
        loop {
            // Without a watch another member fences this one when a host asks it for the image.
            let order = match next_due(orders, self.watch_at) {
                NextDue::Order(order) => order,
                NextDue::Watch => {
                    self.watch();
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
                        (Some(ask), Some(on_ask)) => on_ask(ticket, ask),
                        // Nothing of this volume is served yet.
                        (Some(_), None) => self.answer(ticket, AskAnswer::Stays, None),
                        (None, _) => {}
                    }
                }
                StateOrder::Answer(ticket, said, why) => self.answer(ticket, said, why),
                StateOrder::Listen(on_ask) => self.on_ask = Some(on_ask),
                StateOrder::WatchAnew => {
                    self.watch = None;
                    self.watch();
                }
                StateOrder::End(is_lost) => return is_lost,
            }
        }
    }

    /// Tries to begin a watch, and says so once if that fails.
    fn watch(&mut self) {
        let object = self.object.name();
        match Watch::begin(self.object, self.to_self.clone()) {
            Ok(watch) => {
                (self.watch, self.watch_at) = (Some(watch), None);
                if std::mem::take(&mut self.is_unheard) {
                    tracing::info!(object, "other members can ask this one for an image again");
                }
            }
            Err(errno) => {
                self.watch_at = Some(Instant::now() + WATCH_RETRY);
                if !std::mem::replace(&mut self.is_unheard, true) {
                    tracing::warn!(
                        object, %errno,
                        "other members cannot ask this one for an image: they fence it when a host asks them for it; \
                         this one tries again every few seconds"
                    );
                }
            }
        }
    }

    fn answer(&self, ticket: AskTicket, answer: AskAnswer, why: Option<String>) {
        let epoch = self.tenure.note().epoch;
        say(self.object, ticket, &SaidAnswer { epoch, answer, why });
    }

    /// Notes that nobody owns the image. Without this, the next owner fences this client.
    fn give_back(&self) {
        match self.tenure.give_back(self.object) {
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(object = self.object.name(), "another member has it by now")
            }
            Err(errno) => {
                tracing::warn!(object = self.object.name(), %errno, "cannot give an image back");
            }
        }
    }
}

/// A watch of the object, by which other members reach the owner. The drop ends it.
struct Watch<'o> {
    object: &'o StateObject,
    number: u64,
    argument: *mut Sender<StateOrder>,
}

impl<'o> Watch<'o> {
    fn begin(object: &'o StateObject, orders: Sender<StateOrder>) -> Result<Self, Errno> {
        let argument = Box::into_raw(Box::new(orders));
        let mut number = 0;
        // SAFETY: an open pool; the argument lives until the watch has ended.
        let watched = checked(unsafe {
            (object.library().rados_watch3)(
                object.pool(),
                object.object().as_ptr(),
                &raw mut number,
                on_notice,
                on_broken,
                WATCH_SECONDS,
                argument.cast(),
            )
        });
        match watched {
            Ok(_) => Ok(Self { object, number, argument }),
            Err(errno) => {
                // SAFETY: made above; no watch has it.
                drop(unsafe { Box::from_raw(argument) });
                Err(errno)
            }
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        // SAFETY: the watch is its own.
        let ended =
            unsafe { (self.object.library().rados_unwatch2)(self.object.pool(), self.number) };
        if checked(ended).is_ok() {
            self.object.flush_watches();
            // SAFETY: made by `Box::into_raw`; no callback runs after the end of the watch.
            drop(unsafe { Box::from_raw(self.argument) });
        }
    }
}

unsafe extern "C" fn on_notice(
    argument: *mut c_void,
    notice: u64,
    watch: u64,
    _: u64,
    data: *mut c_void,
    len: usize,
) {
    // SAFETY: the argument of the watch, which lives as long as the watch.
    let orders = unsafe { &*argument.cast::<Sender<StateOrder>>() };
    // SAFETY: librados gives so many bytes for the time of the call.
    let text = unsafe { receive(data, len) };
    // An error means that the thread ends.
    let _ = orders.send(StateOrder::Asked(AskTicket { notice, watch }, text));
}

unsafe extern "C" fn on_broken(argument: *mut c_void, _: u64, errno: c_int) {
    // SAFETY: the argument of the watch, which lives as long as the watch.
    let orders = unsafe { &*argument.cast::<Sender<StateOrder>>() };
    // An error means that the thread ends.
    let _ = orders.send(StateOrder::WatchAnew);
    // The looks at the lock find out whether the image is lost.
    let errno = Errno::from_raw(errno.wrapping_neg());
    tracing::warn!(%errno, "the watch of an image's state is broken: other members cannot ask");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_do_not_delay_a_try_to_watch() {
        let (give, orders) = mpsc::channel();
        (0..3).for_each(|order| give.send(order).unwrap());
        let now = Instant::now();
        assert_eq!(next_due(&orders, Some(now)), NextDue::Watch);
        assert_eq!(next_due(&orders, Some(now + Duration::from_secs(3600))), NextDue::Order(0));
        assert_eq!(next_due(&orders, None), NextDue::Order(1));
        assert_eq!(next_due(&orders, Some(now)), NextDue::Watch, "an order waits");
        assert_eq!(next_due(&orders, None), NextDue::Order(2));
        assert_eq!(
            next_due(&orders, Some(Instant::now() + Duration::from_millis(1))),
            NextDue::Watch
        );
        drop(give);
        assert_eq!(next_due(&orders, None), NextDue::End);
        assert_eq!(next_due(&orders, Some(now + Duration::from_secs(3600))), NextDue::End);
    }
}
