//! [`must_serve_disks`]: no mount begins on a kernel whose ublk is known to fail.

use rblk_operate::ublk_faults::{Certainty, UblkFault, of_this_process};

/// The kernel's ublk fails.
#[derive(Debug, thiserror::Error)]
#[error("{fault} (--any-kernel mounts all the same)")]
pub(crate) struct BadKernel {
    fault: UblkFault,
}

/// Refuses a kernel whose ublk fails, before anything is asked of the driver or of the target, and
/// logs a fault that may happen. `any`: the caller wants the mount on any kernel, such as one that
/// was mended and kept its number.
///
/// # Errors
/// [`BadKernel`].
pub(super) fn must_serve_disks(any: bool) -> Result<(), BadKernel> {
    let Some(certain) = check(of_this_process(), any) else { return Ok(()) };
    Err(BadKernel { fault: certain })
}

/// Logs the faults, and returns a certain one unless any kernel will do.
fn check(faults: Vec<UblkFault>, any: bool) -> Option<UblkFault> {
    let (certain, possible): (Vec<_>, Vec<_>) =
        faults.into_iter().partition(|fault| fault.certainty == Certainty::Certain);
    let mut certain = certain.into_iter();
    if !any && let Some(fault) = certain.next() {
        return Some(fault);
    }
    for fault in certain.chain(possible) {
        tracing::warn!("{fault}");
    }
    None
}

#[cfg(test)]
mod tests {
    use rblk_operate::ublk_faults::judge;

    use super::*;

    #[test]
    fn only_a_certain_fault_refuses_a_mount_and_consent_lifts_it() {
        let refused = |release, any| check(judge(release, false), any).is_some();
        assert!(refused("6.18.5+deb13-amd64", false));
        assert!(!refused("6.18.5+deb13-amd64", true));
        assert!(!refused("6.17.13+deb13-amd64", false), "it may hang, and may not");
        assert!(!refused("7.2.12+deb13-amd64", false));
        let fault = judge("6.18.5", false).remove(0);
        let text = BadKernel { fault }.to_string();
        assert!(text.contains("6.18.6 (--any-kernel"), "{text}");
    }
}
