//! librblk: the crate `rblk-client` for programs in C. [`include/rblk.h`](../include/rblk.h) is the
//! documentation for its users.
//!
//! Invariants:
//! - No function unwinds into C, and none waits for another thread that is inside a queue.
//! - What a handle points to is never freed ([`handle`]): a handle that was closed gives an error.
//! - A pointer that a program gives is used after it was compared with null, and with the buffers
//!   of the queue. Of what cannot be checked, the header says what must be true.
//! - The functions for requests and completions allocate nothing.

mod call;
mod failure;
mod handle;
mod options;
mod queue;
mod requests;
mod volume;
