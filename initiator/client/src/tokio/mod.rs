//! A queue for the tasks of a thread: each request is a future. With the feature `tokio`.
//!
//! ```no_run
#![doc = include_str!("../../examples/tasks.rs")]
//! ```
//!
//! # One thread, one queue, many tasks
//!
//! A [`Handle`] and its clones belong to one thread, as the [`Queue`](crate::Queue) below them
//! does: they are not `Send`. So the path of a request has no lock, no atomic counter and no
//! channel, and a completion wakes a task of the same thread. A program with several threads gives
//! each of them a queue, a current-thread runtime, and a handle.
//!
//! One future, [`Driver::run`], works for all tasks: it sends the requests submitted since its last
//! turn together, and brings completions. It sleeps in the [descriptor](crate::Queue::event_fd) of
//! the queue, in the reactor of tokio: `spin` of the configuration has no effect. Spawn it with
//! `tokio::task::spawn_local`, or poll it beside the tasks. While the driver is not polled,
//! requests wait, and the [other queues](crate::Queue) of the volume may have to.
//!
//! # More requests than the queue takes
//!
//! A request begins when its future is polled first. While the queue is full, the next requests
//! wait their turn, in the order in which they began. Tasks wait in [`Handle::buffer`] for a free
//! buffer, in the order of their calls.
//!
//! # Futures that are dropped
//!
//! A future that is dropped, by a time-out or by `select!`, gives its request up:
//!
//! - A request that still waits for its turn is never sent. Its buffer is free at once.
//! - A request that is under way cannot be taken back. Its buffer stays in the queue, out of reach,
//!   until the completion has arrived: only then another request gets the buffer. So a lost target
//!   keeps the buffers of dropped futures.
//! - A write may still be done after its future was dropped, before or after later requests. Wait
//!   for [`Handle::settled`] before the same blocks are written again.
//!
//! [`Handle::close`] ends the work in order. After a drop of the driver the queue is dropped, too:
//! the remaining futures get [`Why::Ended`], without their buffers, and the memory stays mapped
//! until the device is done with it.

mod buffer;
mod driver;
mod failed;
mod handle;
mod operation;
mod requests;
mod shared;
mod waiters;
mod waits;

pub use buffer::Buffer;
pub use driver::Driver;
pub use failed::{Failed, Why};
pub use handle::Handle;
