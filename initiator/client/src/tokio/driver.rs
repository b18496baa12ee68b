//! [`Driver`]: the single future that works for all tasks of a queue.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use rblk_fabric::Readiness;

use super::handle::Handle;
use super::shared::QueueTasks;
use crate::Queue;

/// Works for the tasks of one queue, while [`Self::run`] is polled.
#[must_use = "requests wait until Driver::run is polled"]
pub struct Driver {
    shared: Rc<QueueTasks>,
    // An `AsyncFd` of a copy of the queue's descriptor: the queue may be gone first.
    event: Readiness,
}

impl Driver {
    /// A queue, for the tasks of this thread.
    ///
    /// # Errors
    /// The system has no descriptor.
    ///
    /// # Panics
    /// Outside of a runtime of tokio with I/O enabled.
    pub fn new(queue: Queue) -> io::Result<(Handle, Self)> {
        let event = Readiness::new([Some(queue.event_fd()), None])?;
        let shared = Rc::new(QueueTasks::new(queue));
        Ok((Handle::new(Rc::clone(&shared)), Self { shared, event }))
    }

    /// Sends requests and brings completions, until the handle is
    /// [closed](super::Handle::close) or its last clone is dropped, and no request is under way
    /// any more. Returns the queue then.
    ///
    /// When this future is dropped, the queue is dropped: see [`Queue`].
    ///
    /// # Errors
    /// The queue cannot go on, as of [`Queue::poll`]. Every request fails with
    /// [`Why::Ended`](super::Why::Ended).
    ///
    /// # Panics
    /// When polled outside of a runtime of tokio with time enabled.
    pub async fn run(self) -> io::Result<Queue> {
        let mut done = Vec::with_capacity(self.shared.depth());
        loop {
            let busy = self.shared.turn(&mut done)?;
            if let Some(queue) = self.shared.finished() {
                return Ok(queue);
            }
            // Woken tasks run first: their new requests go with the next turn.
            match busy {
                true => pass().await,
                false => match self.shared.arm()? {
                    Some(longest) => self.sleep(longest).await?,
                    None => pass().await,
                },
            }
        }
    }

    /// Sleeps until the next event, until a task submits, or so long.
    async fn sleep(&self, longest: Duration) -> io::Result<()> {
        let mut over = pin!(tokio::time::sleep(longest));
        // The next turn takes the events of the queue. A later event is a new edge.
        let mut readable = pin!(self.event.readable());
        poll_fn(|context| {
            if self.shared.is_kicked(context.waker()) || over.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(()));
            }
            readable.as_mut().poll(context)
        })
        .await
    }
}

/// Lets the other tasks of the thread run first, once.
async fn pass() {
    let mut passed = false;
    poll_fn(|context| match std::mem::replace(&mut passed, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("depth", &self.shared.depth()).finish_non_exhaustive()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.end();
    }
}
