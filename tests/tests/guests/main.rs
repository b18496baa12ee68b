//! Disks of guests, by the real programs: front ends and guests that a test drives, guests under
//! QEMU, losses, and the way to the target; a host that boots from a volume, and one that has the
//! packages.
//!
//! One program, because each program costs a link. `cargo xtask test` runs each module in a process
//! of its own; by hand: `cargo test -p rblk-tests --test guests vhost_losses::`.

mod boot;
mod emulated_host;
mod packages;
mod shared_memory;
mod vhost;
mod vhost_front_ends;
mod vhost_guest;
mod vhost_losses;
mod ways;
