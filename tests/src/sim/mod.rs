//! A deterministic simulation of hosts, their mounts and a target over a faulty network, from one
//! seed.
//!
//! | part | content | product code in it |
//! |---|---|---|
//! | [`plan`] | the parts of a run and its faults | - |
//! | [`site`] | the target and its lives | control, poll groups, cache, fencing, verifiers |
//! | [`process`] | the server of one mount | course, engines, accounts of durability, replay |
//! | [`admin`] | an admin connection, as capsules over a QP | the capsules and the QP |
//! | [`neighbour`] | another host with a volume of its own, which reads | its engine |
//! | [`kernel`] | the requests of a device, also when its server dies | - |
//! | [`world`] | all parts together, and the [oracle](crate::oracle) that checks | - |
//!
//! QPs behave as those of cards: one is over only when it is destroyed, which takes steps. Until
//! then RDMA under way lands in the memory that was lent to it.
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
