//! [`Threads`]: threads of this process that make verbs that may take long.
//!
//! A card's firmware takes milliseconds for one of them, and the driver of an iWARP card waits up
//! to twelve seconds in `rdma_accept`. One thread always waits for work, so that a caller starts
//! none, and a call that blocks delays no other. A caller pays a short lock and a wake-up. Work of
//! one kind never waits for work of the same kind, so a full set of threads goes on.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long a thread waits for work before it ends. The last one goes on waiting.
const LINGER: Duration = Duration::from_secs(10);

/// The work of a thread.
pub(super) trait SlowWork: Send + 'static {
    /// Does it.
    fn run(self);
}

/// Work that its caller describes.
pub(super) type Call = Box<dyn FnOnce() + Send>;

impl SlowWork for Call {
    fn run(self) {
        self();
    }
}

/// The threads for one kind of work, and the work that waits for a thread.
#[derive(Debug)]
pub(super) struct Threads<W: 'static> {
    name: &'static str,
    most: usize,
    queue: Mutex<PendingWork<W>>,
    work: Condvar,
}

#[derive(Debug)]
struct PendingWork<W> {
    waiting: VecDeque<W>,
    threads: usize,
    idle: usize,
}

impl<W: SlowWork> Threads<W> {
    /// None yet. Their name, and how many there are at most: more calls that block at once wait for
    /// each other.
    pub(super) const fn new(name: &'static str, most: usize) -> Self {
        let queue = PendingWork { waiting: VecDeque::new(), threads: 0, idle: 0 };
        Self { name, most, queue: Mutex::new(queue), work: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, PendingWork<W>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that a thread waits for work. Not for data threads.
    pub(super) fn begin(&'static self) {
        let mut queue = self.lock();
        if queue.threads == 0 {
            queue.threads = 1;
            drop(queue);
            self.start();
        }
    }

    /// Has a thread do this. Where no thread was ever begun, or could be, the caller does it.
    pub(super) fn serve(&'static self, work: W) {
        let mut queue = self.lock();
        if queue.threads == 0 {
            drop(queue);
            return work.run();
        }
        queue.waiting.push_back(work);
        drop(queue);
        self.work.notify_one();
    }

    /// Starts a thread that was counted already. If the start fails and no thread is left, the
    /// caller does the waiting work.
    fn start(&'static self) {
        let started = thread::Builder::new().name(self.name.into()).spawn(|| self.run());
        if let Err(error) = started {
            tracing::error!(%error, threads = self.name, "no thread for calls that may take long");
            let mut queue = self.lock();
            queue.threads -= 1;
            let left = if queue.threads == 0 { queue.waiting.drain(..).collect() } else { vec![] };
            drop(queue);
            left.into_iter().for_each(W::run);
        }
    }

    fn run(&'static self) {
        while let Some(work) = self.next() {
            work.run();
        }
    }

    /// The next work; `None`: no work for long, and another thread waits, too.
    fn next(&'static self) -> Option<W> {
        let mut queue = self.lock();
        queue.idle += 1;
        let work = loop {
            if let Some(work) = queue.waiting.pop_front() {
                break work;
            }
            // Each of a hundred idle mounts has such a thread: the last one sets no timer.
            if queue.idle == 1 {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
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
        if queue.idle == 0 && queue.threads < self.most {
            queue.threads += 1;
            drop(queue);
            self.start();
        }
        Some(work)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_call_that_blocks_delays_no_other() {
        static THREADS: Threads<Call> = Threads::new("test", 3);
        let (ends, ended) = mpsc::channel();
        let (release, blocked) = mpsc::channel::<()>();
        THREADS.begin();
        THREADS.serve(Box::new(move || assert!(blocked.recv().is_err())));
        for _ in 0..100 {
            let ends = ends.clone();
            THREADS.serve(Box::new(move || ends.send(()).unwrap()));
            ended.recv_timeout(PATIENCE).expect("work is done beside a call that blocks");
        }
        assert!(THREADS.lock().threads <= 3);
        drop(release);
    }

    #[test]
    fn without_threads_the_caller_works() {
        static THREADS: Threads<Call> = Threads::new("test", 1);
        let (ends, ended) = mpsc::channel();
        THREADS.serve(Box::new(move || ends.send(thread::current().id()).unwrap()));
        assert_eq!(ended.try_recv(), Ok(thread::current().id()));
    }
}
