//! Memory of the target: the arena, and what it demands of the host.

pub mod arena;
pub(crate) mod bits;
pub mod demand;
