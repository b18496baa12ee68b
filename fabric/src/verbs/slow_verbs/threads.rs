//! [`VerbThreads`]: the threads of this process that make the verbs that may take long.
//!
//! A card's firmware takes milliseconds for one of them, and the driver of an iWARP card waits up
//! to twelve seconds in `rdma_accept`. One thread always waits for work, so that who asks starts
//! none, and a call that blocks delays no other. Who asks pays a short lock and a wake-up.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::SlowVerbs;

/// Threads at most. More calls that block at once wait for each other.
const THREADS_MAX: usize = 64;
/// How long a thread waits for work before it ends. The last one goes on waiting.
const LINGER: Duration = Duration::from_secs(10);

/// The threads, and what waits for one.
#[derive(Debug)]
pub(super) struct VerbThreads {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Debug)]
struct Queue {
    waiting: VecDeque<Arc<SlowVerbs>>,
    threads: usize,
    idle: usize,
}

/// Those of this process.
pub(super) static VERB_THREADS: VerbThreads = VerbThreads {
    queue: Mutex::new(Queue { waiting: VecDeque::new(), threads: 0, idle: 0 }),
    work: Condvar::new(),
};

impl VerbThreads {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that a thread waits for work. Called where a connection begins, by control.
    pub(super) fn begin(&'static self) {
        let mut queue = self.lock();
        if queue.threads == 0 {
            queue.threads = 1;
            drop(queue);
            self.start();
        }
    }

    /// Has a thread make the calls that `verbs` has been asked for. Where no thread could ever be
    /// started, the caller makes them.
    pub(super) fn serve(&'static self, verbs: Arc<SlowVerbs>) {
        let mut queue = self.lock();
        if queue.threads == 0 {
            drop(queue);
            return verbs.make_calls();
        }
        queue.waiting.push_back(verbs);
        drop(queue);
        self.work.notify_one();
    }

    /// Starts a thread that was counted already. What no thread is left for is done here.
    fn start(&'static self) {
        let started = thread::Builder::new().name("verbs-calls".into()).spawn(|| self.run());
        if let Err(error) = started {
            tracing::error!(%error, "no thread for the calls of RDMA connections");
            let mut queue = self.lock();
            queue.threads -= 1;
            let left = if queue.threads == 0 { queue.waiting.drain(..).collect() } else { vec![] };
            drop(queue);
            left.iter().for_each(|verbs| verbs.make_calls());
        }
    }

    fn run(&'static self) {
        while let Some(verbs) = self.next() {
            verbs.make_calls();
        }
    }

    /// What to do next; `None`: nothing for long, and another thread waits, too.
    fn next(&'static self) -> Option<Arc<SlowVerbs>> {
        let mut queue = self.lock();
        queue.idle += 1;
        let verbs = loop {
            if let Some(verbs) = queue.waiting.pop_front() {
                break verbs;
            }
            let waited = self.work.wait_timeout(queue, LINGER);
            let (now, wait) = waited.unwrap_or_else(PoisonError::into_inner);
            queue = now;
            if wait.timed_out() && queue.waiting.is_empty() && queue.idle > 1 {
                queue.idle -= 1;
                queue.threads -= 1;
                return None;
            }
        };
        queue.idle -= 1;
        if queue.idle == 0 && queue.threads < THREADS_MAX {
            queue.threads += 1;
            drop(queue);
            self.start();
        }
        Some(verbs)
    }
}
