//! The real programs, both ends on this machine: commands, output, signals, files, and librblk.
//!
//! One program, because each program costs a link. `cargo xtask test` runs each module in a process
//! of its own; by hand: `cargo test -p rblk-tests --test programs commands::`.

mod accounts;
mod authentication;
mod cache_status;
mod capi;
mod ceph;
mod ceph_groups;
mod ceph_page;
mod checks;
mod client_tasks;
mod commands;
mod crowds;
mod doctor;
mod events;
mod fencing;
mod fio_engine;
mod flipped_bits;
mod form;
mod help;
mod hostile;
mod hosts;
mod http;
mod idle;
mod lent;
mod normal_events;
mod page;
mod previous;
mod records;
mod said_once;
mod screen;
mod served_stores;
mod signals;
mod stopping;
mod traces;
mod unprivileged;
mod upgrade;
mod verifier;
mod volumes;
