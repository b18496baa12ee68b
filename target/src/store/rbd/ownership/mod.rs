//! The decisions about the ownership of an image that need no call to a cluster. The simulation of
//! a group makes them, too.
//!
//! - [`owner_note`]: the owner, as the object beside the image names it; [`state_change`]: changes
//!   of that object; [`state_tenure`]: the changes of an owner.
//! - [`fence_call`]: the calls that fence a client; [`before_lone`]: a target in no group is about
//!   to take the lock of an image.
//! - [`lock_proof`]: for how long an owner may believe that it has the lock.

pub mod before_lone;
pub mod fence_call;
pub mod lock_proof;
pub mod owner_note;
pub mod state_change;
pub mod state_tenure;
