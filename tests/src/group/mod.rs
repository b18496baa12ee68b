//! A deterministic simulation of a group of targets in front of one Ceph image, from one seed.
//!
//! | part | content | product code in it |
//! |---|---|---|
//! | [`plan`] | the parts of a run and its faults | - |
//! | [`cluster`] | monitors, objects, lock, watches and fences of a cluster | changes of the object beside the image |
//! | [`claiming`] | the claim of a member | the claim, the calls of a fence |
//! | [`image`] | an image that a member has open | looks at the lock, its proof, the owner's writes, the record |
//! | [`member`] | a process of a target | control, holders, records, changes of volumes, answers to members |
//! | [`serving`] | its cache and the ops of its blocks | - |
//! | [`initiator`] | a mount | the course of its reconnects |
//! | [`register`] | the judge of what hosts read | - |
//! | [`air`] | the clock, and all that is under way | - |
//! | [`world`] | all parts together | - |
//!
//! It judges four things:
//!
//! - No read is stale, and no write is lost that was acknowledged and flushed, or that was
//!   acknowledged while the write verifier stays.
//! - No write of a former owner takes effect behind an op of a later one at that object.
//! - No two owners serve the image whose clients the cluster lets in.
//! - When the faults are over, every request ends, and somebody can mount the volume.
//!
//! Poll groups, engines and their network are those of [`sim`](crate::sim), which has one target.
//! Here a connection carries commands and requests alike, and a cache has six blocks.

pub mod air;
pub mod claiming;
pub mod cluster;
pub mod image;
pub mod initiator;
pub mod member;
pub mod plan;
pub mod register;
mod serving;
pub mod world;

use rblk_protocol::Name;

pub use plan::Plan;
pub use world::{Report, World};

/// Hosts of the world.
pub const HOSTS: usize = 2;
/// Blocks of the volume.
pub const BLOCKS: usize = 6;
/// Objects that have them.
pub const OBJECTS: usize = 3;
/// Bytes of a block.
pub const BLOCK_BYTES: u32 = 4096;
/// The identity of the volume.
pub const UUID: [u8; 16] = [7; 16];

/// The object of a block.
#[must_use]
pub fn object_of(block: usize) -> usize {
    block % OBJECTS
}

/// The name of a member.
#[must_use]
pub fn member_name(member: usize) -> String {
    format!("store{member}")
}

/// The name of the target, which all members share.
#[must_use]
pub fn target_name() -> Name {
    Name::new("group").expect("a name")
}

/// The name of the volume.
#[must_use]
pub fn volume_name() -> Name {
    Name::new("v").expect("a name")
}
