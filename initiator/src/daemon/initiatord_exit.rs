//! [`exit_of`]: the exit code of `rblk-initiatord`.

use std::error::Error;

use rblk_config::Exit;
use rblk_fabric::{AddressError, FabricError};
use rblk_operate::mount::flags::exit_of_cause;

use super::flag_credentials::KeyWithoutTarget;
use crate::front::ublk::UblkError;
use crate::mount::note::leftovers::Refused;
use crate::mount::note::neighbour::HeldHere;
use crate::mount::{AlreadyMounted, BadKernel, BadSocket};
use crate::volume::error::SessionError;
use crate::volume::host_identity::BadHostId;
use crate::volume::session::TargetKeysError;

/// The exit code for an error of this program.
#[must_use]
pub fn exit_of(error: &anyhow::Error) -> Exit {
    rblk_operate::exit_of(error, |cause| of_cause(cause).or_else(|| exit_of_cause(cause)))
}

/// The exit code for a cause that only this daemon knows.
fn of_cause(cause: &(dyn Error + 'static)) -> Option<Exit> {
    if let Some(error) = cause.downcast_ref::<SessionError>() {
        return Some(error.exit());
    }
    if cause.is::<AddressError>()
        || cause.is::<KeyWithoutTarget>()
        || cause.is::<BadHostId>()
        || cause.is::<TargetKeysError>()
        || cause.is::<BadSocket>()
    {
        return Some(Exit::Usage);
    }
    if cause.is::<AlreadyMounted>()
        || cause.is::<HeldHere>()
        || matches!(cause.downcast_ref::<Refused>(), Some(Refused::Other { .. }))
    {
        return Some(Exit::AlreadyThere);
    }
    if let Some(error) = cause.downcast_ref::<UblkError>() {
        return Some(match error {
            UblkError::NotPermitted { .. } => Exit::NotPermitted,
            UblkError::NoDriver { .. }
            | UblkError::NoIoUring { .. }
            | UblkError::FeatureMissing { .. }
            | UblkError::OtherPid { .. }
            | UblkError::TooManyDevices { .. } => Exit::HostLacks,
            _ => Exit::Failure,
        });
    }
    if cause.is::<BadKernel>() {
        return Some(Exit::HostLacks);
    }
    let lacks = matches!(
        cause.downcast_ref::<FabricError>(),
        Some(FabricError::NoDevice | FabricError::MemlockTooSmall { .. } | FabricError::NoVerbs(_))
    );
    lacks.then_some(Exit::HostLacks)
}
