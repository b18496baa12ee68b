//! One queue of a volume, as control sees it: how it is started, its mail, and what it tells. The
//! data thread of a hardware queue is [`crate::front::disk`]. What it has in common with the queue
//! of a program ([`crate::front::program`]) is [`engine_driver`].

mod descriptor_watch;
mod engine_driver;
mod epoll;
pub mod path_change;
mod publisher;
mod queue_paths;
pub mod undestroyed;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_runtime::mailbox::{Receiver, Refused, Sender, mailbox};
use tokio::sync::oneshot;

pub use self::descriptor_watch::DescriptorToken;
pub(crate) use self::descriptor_watch::DescriptorWatch;
pub(crate) use self::engine_driver::{EngineDriver, EngineDriverParts};
pub(crate) use self::epoll::Epoll;
pub(crate) use self::queue_paths::MAIL;
use self::undestroyed::UndestroyedPath;
use crate::engine::durability::retain::Retained;
use crate::engine::path::{DeadPath, Path};
use crate::engine::ways::{PLACES, WayIndex};
use crate::engine::{DigestFailure, PathEnd, QueueStats};

/// Control to queue thread.
#[derive(Debug)]
pub enum ToQueue {
    /// Use this path, as soon as the paths before it are destroyed.
    Connect(Box<Path>),
    /// Use this path beside those of other ways, as soon as the path of its way before it is
    /// destroyed.
    Join(Box<Path>),
    /// Drop the path of that way. Its requests go by other ways, as soon as they may.
    EndWay(WayIndex),
    /// The target has ended the epoch of that way's dead path.
    WayDropped(WayIndex),
    /// Drop every path; requests wait.
    Disconnect,
    /// Fail requests with this errno, as soon as dead paths are destroyed; or let them wait again.
    Fail(Option<i32>),
    /// Drop the present path, so that no more writes are acknowledged, and reply with copies of the
    /// writes that no FLUSH covered; `None` when the queue retains nothing.
    TakeStock(oneshot::Sender<Option<Vec<Retained>>>),
    /// Take requests but send none, or send them again. [`FromQueue::Quiet`] reports, once for each
    /// `Hold(true)`, that every sent request is answered.
    Hold(bool),
    /// Hold. Once every sent request is answered, or after that time, drop the path and leave the
    /// device as it is, with the requests it gave us: its next server gets them. Ends the thread.
    Leave(Duration),
}

/// Limit of the unread mail of a queue: one of each kind, for each way if it is of a way, and the
/// questions of one try to connect.
const MAIL_MAX: usize = 16 + 3 * PLACES;

/// The mailbox of a queue. Mail is put in by [`ToQueue::post`].
///
/// # Errors
/// The system has no descriptor.
pub(crate) fn mail() -> io::Result<(Sender<ToQueue>, Receiver<ToQueue>)> {
    mailbox(MAIL_MAX)
}

/// The fate of mail to a queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MailFate {
    /// Whether the queue receives it. A queue that has left does not.
    pub(crate) is_taken: bool,
    /// The ways of paths that came back unread. They are being destroyed.
    pub(crate) paths: Vec<WayIndex>,
}

impl ToQueue {
    /// Puts mail into the box of a queue. Unread mail that this makes pointless comes back: a queue
    /// that its program does not drive has at most one path in its box, even if the target comes
    /// and goes often.
    pub(crate) fn post(self, mail: &Sender<Self>) -> MailFate {
        let (is_taken, back) = match mail.send_over(self, Self::supersedes) {
            Ok(back) => (true, back),
            Err(Refused(refused)) => (false, vec![refused]),
        };
        let mut paths = Vec::new();
        for back in back {
            if let Self::Connect(path) | Self::Join(path) = back {
                paths.push(path.way);
                path.retire();
            }
        }
        MailFate { is_taken, paths }
    }

    /// Whether earlier mail has no effect before this.
    fn supersedes(&self, earlier: &Self) -> bool {
        match earlier {
            // `Connect` ends the present path, too.
            Self::Connect(_) | Self::Disconnect => self.ends_all_paths(),
            // After the end of the way, only the end of its last epoch matters.
            Self::Join(path) => self.ends_all_paths() || self.ends_way(path.way),
            Self::EndWay(way) => self.ends_all_paths() || self.ends_way(*way),
            Self::WayDropped(way) => {
                let is_same = matches!(self, Self::WayDropped(same) if same == way);
                is_same || self.ends_all_paths() || self.ends_way(*way)
            }
            // `Fail` also ends the present path, which matters only while there is one: if requests
            // failed and must wait again, a `Connect` or a `Disconnect` is in the box, too.
            Self::Fail(_) => matches!(self, Self::Fail(_)),
            Self::Hold(_) => matches!(self, Self::Hold(_)),
            Self::TakeStock(reply) => reply.is_closed(),
            Self::Leave(_) => false,
        }
    }

    fn ends_all_paths(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Disconnect)
    }

    fn ends_way(&self, way: WayIndex) -> bool {
        matches!(self, Self::EndWay(ended) if *ended == way)
    }
}

/// Queue thread to control.
#[derive(Debug)]
pub(crate) enum FromQueue {
    /// A path ended; control destroys its remains.
    PathEnded {
        /// The index of the queue.
        queue: u16,
        /// The reason.
        end: PathEnd,
        /// The remains of the path.
        dead: Box<DeadPath>,
        /// Dropped once the path is destroyed.
        undestroyed: Option<UndestroyedPath>,
    },
    /// The queue is held, and every request that it sent is answered.
    Quiet {
        /// The index of the queue.
        queue: u16,
    },
    /// Requests failed because their data was damaged twice.
    DigestFailure {
        /// The index of the queue.
        queue: u16,
        /// The failed requests.
        failure: DigestFailure,
    },
    /// The thread left: the disk is stopped, control asked for it, or an error occurred.
    Stopped {
        /// The index of the queue.
        queue: u16,
        /// The error, if there was one.
        error: Option<String>,
    },
}

/// Control's end of a running queue.
#[derive(Debug)]
pub(crate) struct QueueHandle {
    /// Mail to the thread.
    pub mail: Sender<ToQueue>,
    /// The counters of the queue.
    pub stats: Arc<QueueStats>,
    thread: Option<JoinHandle<()>>,
}

impl QueueHandle {
    /// Of a queue that has a thread of its own.
    pub(crate) fn with_thread(
        mail: Sender<ToQueue>,
        stats: Arc<QueueStats>,
        thread: JoinHandle<()>,
    ) -> Self {
        Self { mail, stats, thread: Some(thread) }
    }

    /// For a queue that a program drives: without a thread of ours.
    pub(crate) fn without_thread(mail: Sender<ToQueue>, stats: Arc<QueueStats>) -> Self {
        Self { mail, stats, thread: None }
    }

    /// Waits for the thread to end.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread reported its error by `FromQueue::Stopped`.
            let _ = thread.join();
        }
    }
}
