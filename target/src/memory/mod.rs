//! Memory of the target: the arena, and what it demands of the host.

pub mod arena;
pub mod demand;
