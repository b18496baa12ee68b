//! A deterministic simulation of hosts, their mounts and a target over a faulty network, from one
//! seed.
//!
//! | part | what it is | what is real in it |
//! |---|---|---|
//! | [`plan`] | what a run is made of and what goes wrong in it | - |
//! | [`site`] | the target and its lives | control, poll groups, cache, fencing, verifiers |
//! | [`process`] | the server of one mount | course, engines, accounts of what is durable, replay |
//! | [`admin`] | an admin connection, as capsules over a QP | the capsules and the QP |
//! | [`neighbour`] | another host with a volume of its own, which reads | its engine |
//! | [`kernel`] | the requests of a device, also when its server dies | - |
//! | [`world`] | all of them together, and the [oracle](crate::oracle) that watches | - |
//!
//! QPs are as those of cards: over only when they are destroyed, which takes steps. Until then RDMA
//! that was under way lands in what they were lent.
//!
//! Time is a count of steps of a millisecond. Nothing sleeps, and the seed decides everything that
//! is random, so a run can be repeated from its seed, and its [`log`] compared.

pub mod admin;
pub mod kernel;
pub mod log;
pub mod neighbour;
pub mod plan;
pub mod process;
pub mod site;
pub mod world;

pub use plan::Plan;
pub use world::World;
