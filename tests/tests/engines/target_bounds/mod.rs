//! Bounds on the harm that one volume, peer or dead QP may do to others: a store that forgets a
//! volume, peers that take nothing, QPs that do not flush, long zeroing.

mod jam;
mod silent;
mod stuck;
mod zeroing;

use std::time::Duration;

use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;

const MIB: usize = 1 << 20;
const MODES: [CacheMode; 3] = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
/// The volume with a store that may be stuck.
const STUCK: VolumeIndex = VolumeIndex(0);

/// A step of these beds: long enough that seconds pass.
const TICK: Duration = Duration::from_millis(10);
const SECOND: u64 = 100;
