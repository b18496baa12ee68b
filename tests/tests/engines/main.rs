//! Both engines in this process, over the in-memory network: data, order, limits, storage, and the
//! models and simulations of both ends.
//!
//! One program, because each program costs a link and its own copy of both ends' code.
//! `cargo xtask test` runs each module in a process of its own; by hand:
//! `cargo test -p rblk-tests --test engines storage_model::`.

mod broken_cq;
mod cache_groups;
mod cache_max;
mod cache_min;
mod changing_volumes;
mod client_futures;
mod counters;
mod data_path;
mod digests;
mod engine;
mod faults;
mod groups;
mod iwarp;
mod landing;
mod lanes;
mod late_rdma;
mod limits;
mod lists;
mod lost_stores;
mod model;
mod ownership;
mod peer;
mod runs;
mod short_of_memory;
mod simulation;
mod snapshots;
mod storage_crash;
mod storage_faults;
mod storage_model;
mod target_bounds;
mod undriven;
mod ways;
