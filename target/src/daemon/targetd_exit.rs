//! [`exit_of`]: the exit code of `rblk-targetd`.

use std::error::Error;

use rblk_config::Exit;
use rblk_fabric::{AddressError, FabricError};
use rblk_operate::target::flags::exit_of_cause;

use crate::memory::demand::NotEnoughMemory;
use crate::pool::opening::WrongSize;
use crate::store::{StoreError, StoreErrorKind};
use rblk_operate::target::status::GivenUp;

/// The exit code for an error of this program.
#[must_use]
pub fn exit_of(error: &anyhow::Error) -> Exit {
    rblk_operate::exit_of(error, |cause| exit_of_cause(cause).or_else(|| of_cause(cause)))
}

/// The exit code for a cause that only this daemon knows.
fn of_cause(cause: &(dyn Error + 'static)) -> Option<Exit> {
    if cause.is::<AddressError>() {
        return Some(Exit::Usage);
    }
    if let Some(error) = cause.downcast_ref::<StoreError>() {
        return Some(match error.kind() {
            StoreErrorKind::Permission => Exit::NotPermitted,
            _ => Exit::Store,
        });
    }
    if cause.is::<WrongSize>() {
        return Some(Exit::Store);
    }
    if cause.is::<GivenUp>() {
        return Some(Exit::GaveUp);
    }
    if cause.is::<NotEnoughMemory>() {
        return Some(Exit::HostLacks);
    }
    match cause.downcast_ref::<FabricError>()? {
        FabricError::NoDevice
        | FabricError::Environment(_)
        | FabricError::MemlockTooSmall { .. }
        | FabricError::NoVerbs(_) => Some(Exit::HostLacks),
        FabricError::Listen { .. } | FabricError::Unreachable { .. } => Some(Exit::Unreachable),
        _ => None,
    }
}
