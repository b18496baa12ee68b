//! One queue of a volume, as control sees it: how it is started, its mail, and what it tells. The
//! data thread of a hardware queue is [`crate::front::disk`]. What it has in common with the queue
//! of a program ([`crate::front::program`]) is [`target_side`].

mod epoll;
pub mod path_change;
mod paths;
mod publisher;
mod target_side;
pub mod undestroyed;
mod watch;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_runtime::mailbox::{Receiver, Refused, Sender, mailbox};
use tokio::sync::oneshot;

pub(crate) use self::epoll::Epoll;
pub(crate) use self::paths::MAIL;
pub(crate) use self::target_side::{TargetParts, TargetSide};
use self::undestroyed::UndestroyedPath;
pub(crate) use self::watch::Watch;
pub use self::watch::WatchToken;
use crate::engine::durability::retain::Retained;
use crate::engine::path::{DeadPath, Path};
use crate::engine::{DigestFailure, PathEnd, QueueStats};

/// Control to queue thread.
#[derive(Debug)]
pub enum ToQueue {
    /// Use this path from now on, or as soon as those before it are destroyed.
    Connect(Box<Path>),
    /// Drop the present path; requests wait.
    Disconnect,
    /// Fail requests with this errno from now on, or as soon as dead paths are destroyed; or let
    /// them wait again.
    Fail(Option<i32>),
    /// Drop the present path, so that no more writes are acknowledged, and answer with copies of
    /// the writes that no FLUSH covered; `None` when the queue retains nothing.
    TakeStock(oneshot::Sender<Option<Vec<Retained>>>),
    /// Take requests but send none, or send them again. [`FromQueue::Quiet`] tells, once for each
    /// `Hold(true)`, when nothing that was sent is unanswered.
    Hold(bool),
    /// Hold. When nothing that was sent is unanswered, or after that time, drop the path and leave
    /// the device as it is, with the requests it gave us: its next server gets them. Ends the
    /// thread.
    Leave(Duration),
}

/// More than a queue can have unread: one of each kind, and the questions of one try to connect.
const MAIL_MAX: usize = 16;

/// The mailbox of a queue. Mail is put in by [`ToQueue::post`].
///
/// # Errors
/// The system has no descriptor.
pub(crate) fn mail() -> io::Result<(Sender<ToQueue>, Receiver<ToQueue>)> {
    mailbox(MAIL_MAX)
}

/// What became of mail to a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Posted {
    /// Whether the queue gets it. It does not, when it has left.
    pub(crate) is_taken: bool,
    /// Paths that came back unread, and are being destroyed.
    pub(crate) paths: u32,
}

impl ToQueue {
    /// Puts mail into the box of a queue. Earlier mail that was not read, and that this makes
    /// pointless, comes back: a queue that its program does not drive has one path in its box, and
    /// no more, however often the target comes and goes.
    pub(crate) fn post(self, mail: &Sender<Self>) -> Posted {
        let (is_taken, back) = match mail.send_over(self, Self::supersedes) {
            Ok(back) => (true, back),
            Err(Refused(refused)) => (false, vec![refused]),
        };
        let mut paths = 0;
        for back in back {
            if let Self::Connect(path) = back {
                path.retire();
                paths += 1;
            }
        }
        Posted { is_taken, paths }
    }

    /// Whether earlier mail changes nothing where this follows it.
    fn supersedes(&self, earlier: &Self) -> bool {
        match earlier {
            // `Connect` ends the present path, too.
            Self::Connect(_) | Self::Disconnect => {
                matches!(self, Self::Connect(_) | Self::Disconnect)
            }
            // That `Fail` ends the present path counts while there is one: where it has failed and
            // is to wait again, a `Connect` or a `Disconnect` is in the box, too.
            Self::Fail(_) => matches!(self, Self::Fail(_)),
            Self::Hold(_) => matches!(self, Self::Hold(_)),
            Self::TakeStock(reply) => reply.is_closed(),
            Self::Leave(_) => false,
        }
    }
}

/// Queue thread to control.
#[derive(Debug)]
pub(crate) enum FromQueue {
    /// A path ended; control destroys what is left of it.
    PathEnded {
        /// Which queue.
        queue: u16,
        /// Why.
        end: PathEnd,
        /// What is left.
        dead: Box<DeadPath>,
        /// To be dropped when that is destroyed.
        undestroyed: Option<UndestroyedPath>,
    },
    /// The queue is held, and everything it sent is answered.
    Quiet {
        /// Which queue.
        queue: u16,
    },
    /// Requests failed because their data did not come through twice.
    DigestFailure {
        /// Which queue.
        queue: u16,
        /// Which requests.
        failure: DigestFailure,
    },
    /// The thread left: the disk is stopped, control asked for it, or something broke.
    Stopped {
        /// Which queue.
        queue: u16,
        /// What broke, if something did.
        error: Option<String>,
    },
}

/// Control's end of a running queue.
#[derive(Debug)]
pub(crate) struct QueueHandle {
    /// Mail to the thread.
    pub mail: Sender<ToQueue>,
    /// Its counters.
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

    /// Of a queue that a program drives: it has no thread of ours.
    pub(crate) fn without_thread(mail: Sender<ToQueue>, stats: Arc<QueueStats>) -> Self {
        Self { mail, stats, thread: None }
    }

    /// Waits for the thread to end.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It reported what broke it by `FromQueue::Stopped`.
            let _ = thread.join();
        }
    }
}
