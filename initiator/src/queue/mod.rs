//! One queue of a volume, as control sees it: how it is started, its mail, and what it tells. The
//! data thread of a hardware queue is [`thread`]. What it has in common with the queue of a program
//! ([`crate::client`]) is [`target_side`].

mod epoll;
mod gathering;
mod paths;
mod placement;
mod publisher;
mod target_side;
mod thread;
mod watch;

use std::io;
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_protocol::BlockSize;
use rblk_runtime::data_thread;
use rblk_runtime::mailbox::{Receiver, Refused, Sender, mailbox};
use rblk_runtime::spin::SpinMode;
use tokio::sync::{mpsc, oneshot};

pub(crate) use self::epoll::Epoll;
pub(crate) use self::paths::MAIL;
pub(crate) use self::target_side::{TargetParts, TargetSide};
use self::thread::QueueThread;
pub(crate) use self::watch::Watch;
use crate::admin::Pulse;
use crate::durability::Ledger;
use crate::engine::{DigestFailure, PathEnd, QueueStats};
use crate::path::{DeadPath, Path};
use crate::retain::Retained;
use crate::ublk::{Buffers, QueueConfig};
use crate::undestroyed::UndestroyedPath;

/// How long a thread may take to fetch every tag.
const START_DEADLINE: Duration = Duration::from_secs(10);

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

/// What a queue thread is made of.
#[derive(Debug)]
pub(crate) struct QueueParts {
    /// The ublk queue.
    pub config: QueueConfig,
    /// One buffer per tag.
    pub buffers: Buffers,
    /// Bytes of each memory of other programs that requests may have their data in.
    pub shared: Arc<[u64]>,
    /// Most data of a request: the rest of its buffer is for a trailer.
    pub data_max: usize,
    /// Block size of the volume.
    pub block_size: BlockSize,
    /// The account of what is durable, made for the queue's depth. None for a volume whose writes
    /// are durable when they are answered.
    pub ledger: Option<Ledger>,
    /// How soon a path is given up on which the target owes an answer and is silent.
    pub pulse: Option<Pulse>,
    /// How long to look for work before sleeping.
    pub spin: SpinMode,
    /// The CPUs that the thread is to run on. Empty: any.
    pub cpus: Vec<usize>,
    /// For control.
    pub outbox: mpsc::UnboundedSender<FromQueue>,
}

/// Starts the thread and waits until it has fetched every tag.
///
/// # Errors
/// The ublk queue could not be made.
pub(crate) fn start(parts: QueueParts) -> io::Result<QueueHandle> {
    let (mail, receiver) = mail()?;
    let stats = Arc::new(QueueStats::default());
    let engine_stats = Arc::clone(&stats);
    let (ready, is_ready) = sync_mpsc::sync_channel(1);
    let queue = parts.config.queue_id();
    let thread =
        std::thread::Builder::new().name(format!("rblk-queue-{queue}")).spawn(move || {
            let outbox = parts.outbox.clone();
            placement::run_on(&parts.cpus);
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let spin = parts.spin;
                let mut thread = QueueThread::new(parts, receiver, engine_stats)?;
                // On an error, control has given up waiting, and drops the mailbox.
                let _ = ready.send(Ok(()));
                data_thread::run(&mut thread, spin)
            }));
            let error = match result {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it panicked".to_owned()),
            };
            if let Some(error) = &error {
                // No one waits for it when the queue was ready already.
                let _ = ready.try_send(Err(io::Error::other(error.clone())));
            }
            let _ = outbox.send(FromQueue::Stopped { queue, error });
        })?;
    match is_ready.recv_timeout(START_DEADLINE) {
        Ok(Ok(())) => Ok(QueueHandle { mail, stats, thread: Some(thread) }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "a queue thread did not start")),
    }
}
