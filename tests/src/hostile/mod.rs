//! A hostile peer that is written from `docs/internals/wire.md` alone, and an honest host beside
//! it.
//!
//! | file | contents |
//! |---|---|
//! | `wire.rs` | hellos, capsules and bodies as bytes |
//! | `noise.rs` | the handshake, the seal, the proofs of queues |
//! | `end.rs` | one connection that sends any bytes |
//! | `visitor.rs` | a host that connects and leaves again and again |
//! | `rogue.rs` | a host that is let in by its key, and then breaks the rules |
//! | `cases.rs` | each rule, broken once |
//! | `crowd.rs` | connections from many addresses that say a hello and nothing else |
//! | `bystander.rs` | the honest host |
//! | `party.rs` | the keys of all, and the checks when they meet |
//!
//! The peer uses `rblk-fabric` to reach a device, and no code of the initiator.

pub mod bystander;
pub mod cases;
pub mod crowd;
pub mod end;
pub mod noise;
pub mod party;
pub mod rogue;
pub mod visitor;
pub mod wire;

pub use party::Party;
