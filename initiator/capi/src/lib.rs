//! librblk: the crate `rblk-client` for programs in C. [`include/rblk.h`](../include/rblk.h) is the
//! documentation for its users.
//!
//! Invariants:
//! - No function unwinds into C, and none waits for another thread that is inside a queue.
//! - The memory of a handle is never freed ([`handle`]): a closed handle gives an error.
//! - A pointer from the program is used only after it was compared with null, and with the buffers
//!   of the queue. The header states the conditions that cannot be checked.
//! - The functions for requests and completions allocate nothing.

mod c_options;
mod call;
mod failure;
mod handle;
mod queue;
mod submit;
mod volume;
