//! The neighbour's volume and session at the target.

use rblk_rig::seed::Random;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};

/// The neighbour's volume.
pub const VOLUME: VolumeIndex = VolumeIndex(1);
/// Bytes of that volume.
pub const BYTES: usize = 192 << 10;
/// The neighbour's session. The target's control gives this one to no other host.
pub const SESSION: SessionIndex = SessionIndex { index: 77, life: 1 };

/// The bytes of the volume in the simulation of a seed.
#[must_use]
pub fn image(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    Random::new(seed ^ 0x6e62).fill(&mut bytes);
    bytes
}
