//! [`exit_of`]: the exit code of `rblk-initiator`.

use rblk_config::Exit;
use rblk_operate::mount::flags::exit_of_cause;
use rblk_operate::mount::left::NotFound;

/// The exit code for an error of this program.
pub(super) fn exit_of(error: &anyhow::Error) -> Exit {
    rblk_operate::exit_of(error, |cause| {
        let not_found = cause.downcast_ref::<NotFound>().map(NotFound::exit);
        not_found.or_else(|| exit_of_cause(cause))
    })
}
