//! The model of a target over many runs: the promises of its records to hosts, compared with the
//! fate of the hosts' writes. See [`World`].
//!
//! Each sequence is drawn by a seed: runs with some of the volumes, writes of several hosts, kills,
//! starts that fail, live changes, upgrades, stops, stores that lose writes, power cuts, state
//! directories that take no more. The records and the steps of a live change are the product's
//! ([`Records`](rblk_target::record::Records), [`Core`](rblk_target::control::core::Core)). [`Run`]
//! repeats control's calls between them.
//!
//! Three rules:
//!
//! - A host that comes back to its old verifier has lost no acknowledged write.
//! - A host that comes back to another verifier, with unflushed writes, hears of a loss. Then
//!   writes of that volume could be gone since the host got its verifier.
//! - A write that a FLUSH covered is never lost.
//!
//! [`Account`] counts the events after which writes "could be gone", for each volume alone. The
//! design reports more losses than there are, and so does the account:
//!
//! - The process died while the volume was write-back and writable, though nothing was dirty.
//! - The machine died between the first run that let hosts write and the stop that synced, though
//!   everything had reached the disk.
//! - A stop gave the volume up.
//! - A record could not be written, vanished, or could not be understood.
//!
//! There is one gap, which the target logs: a loss that could be noted nowhere, because the state
//! directory took neither a record nor a new name, is hidden if the process ends before a later try
//! succeeds. [`Report::excused`] counts these.

mod account;
mod directory;
mod disk;
mod holder;
mod plan;
mod run;
mod world;

pub use account::Account;
pub use directory::{Directory, Fault, Kind};
pub use disk::Disk;
pub use holder::{Claim, Holder, Known};
pub use plan::{Event, Plan};
pub use run::Run;
pub use world::{Report, World};

/// Volumes of the world.
pub const VOLUMES: usize = 3;
/// Hosts of the world. Each has cells of its own in every volume.
pub const HOSTS: usize = 3;
/// Most cells of a volume.
pub const CELLS: usize = 6;

/// The identity of a volume.
#[must_use]
pub fn uuid(volume: usize) -> [u8; 16] {
    [u8::try_from(volume + 1).unwrap_or(u8::MAX); 16]
}
