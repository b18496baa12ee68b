//! Volumes of rblk for programs, without a block device: no kernel between the program and the
//! network card, and no copy of the data.
//!
//! # An example
//!
//! ```no_run
#![doc = include_str!("../examples/tour.rs")]
//! ```
//!
//! # Where to begin
//!
//! | type | purpose |
//! | --- | --- |
//! | [`Config`], [`Options`] | which volume of which target, with which keys; [`Options::open`] |
//! | [`Volume`] | its size, its [`State`], its losses; gives [`Queue`]s; [`Volume::close`] |
//! | [`Queue`] | one thread's way to it: [`Queue::submit`], [`Queue::wait`], [`Queue::event_fd`] |
//! | [`Buffer`] | registered memory for the data of one request |
//! | [`Request`], [`Completion`] | read, write, flush, discard, write zeroes; how that ended |
//! | [`OpenError`], [`Refused`], [`IoError`] | errors before, at and after `submit` |
//! | `tokio::Handle` | the same as futures, for many tasks of one thread |
//!
//! # How it works
//!
//! - [`Options::open`] opens a volume with the [configuration](Config) of a mount: the same
//!   addresses, keys, digests, retained writes and limits. The code is the same, so the manual of
//!   mounts applies here: a lost target is tried again while requests wait, the requests of a dead
//!   connection are sent again in order, a host that lost its volume to another host is fenced, and
//!   a flush reports writes that a target has lost.
//! - A thread of the [`Volume`], `rblk-control`, keeps the session. It does not touch data.
//! - Each [`Queue`] belongs to one thread of the program and has connections of its own. Queues
//!   share no lock. A queue works inside [`Queue::poll`] and [`Queue::wait`] only. A thread that
//!   also waits for other events adds [`Queue::event_fd`] to them.
//! - A [`Buffer`] is registered memory of one queue. The data of a request goes between the memory
//!   of the target and the buffer by RDMA. The buffer moves into the [`Request`], so the program
//!   cannot use or free it while the card may touch it, and the [`Completion`] brings it back.
//! - [`Counts::copied_bytes`] is 0 unless `retain` keeps copies of writes. Over `tcp://` the kernel
//!   copies between buffer and socket, once at each end.
//!
//! - Tasks of tokio share a queue by the module `tokio`, with the feature of that name.
//!
//! # Facts for every program
//!
//! - A completed write is as durable as a disk's: on a volume with a volatile cache, until a
//!   [`Request::flush`] was completed, it may be in the memory of the target only. A program that
//!   ends without one loses nothing as long as the target lives.
//! - Requests that are under way at the same time have no order.
//! - A request without an answer never times out, unless the configuration has `fail_after`: see
//!   [`State`]. A dropped [`Queue`] gives all of its requests up.
//! - To a target each open volume is a holder of its own, unless programs share an id or a key: see
//!   [`Options::host_id`].
//! - Buffers are pinned memory over RDMA: the limit is `ulimit -l`. They are queues x (depth +
//!   spare buffers) x `max_io`, and are counted twice. A child of `fork` does not have them.
//! - Encrypted TCP needs the kernel's module `tls`, which a program without privileges cannot load:
//!   `modprobe tls`.
//!
//! # Stability
//!
//! Versions follow semver: a program that compiles with one version compiles with later versions of
//! the same major number (before 1.0: of the same minor number). Types that may grow are
//! `#[non_exhaustive]`. [`Config`] has the keys of the mount's configuration: build it with
//! `Config::new` or `Config::parse` and set fields, so that new fields do not break the program.
//! The crate `rblk-initiator` behind this one guarantees nothing. The API has only types of rblk
//! and of `std`, so a new major version of tokio does not force one of this crate. A minor version
//! may ask for a newer Rust, as `rust-version` in `Cargo.toml` says. Every version of the library
//! talks to every target with which it shares a version of the protocol, as a mount does.
//!
//! # Features
//!
//! - `verbs`: RDMA. Links libibverbs and librdmacm. Without it the library speaks `tcp://` only.
//! - `tokio`: the module `tokio`, requests as futures.
//!
//! Both are off by default.

#![forbid(unsafe_code)]

mod options;
#[cfg(feature = "tokio")]
pub mod tokio;

pub use options::Options;
pub use rblk_config::{
    ByteSize, ConfigError, DigestWish, Duration, Encrypt, KeyFileError, MountConfig as Config,
    OnLoss, Spin,
};
pub use rblk_initiator::front::program::{
    Buffer, Completion, Counts, IoError, KeyError, NotClosed, OpenError, PublicKey, Queue, Reason,
    Refused, Request, SecretKey, State, Volume,
};

// A queue moves to the thread that uses it; buffers and completions may move, too.
const _: fn() = || {
    fn goes_to_threads<T: Send>() {}
    goes_to_threads::<Volume>();
    goes_to_threads::<Queue>();
    goes_to_threads::<Buffer>();
    goes_to_threads::<Completion>();
};

// Several threads may read the state of a volume, and read a buffer.
const _: fn() = || {
    fn is_shared<T: Sync>() {}
    is_shared::<Volume>();
    is_shared::<Buffer>();
    is_shared::<Config>();
    is_shared::<Options>();
};
