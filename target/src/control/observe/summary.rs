//! The status of a target with its conclusions: the condition in one word, and the faults, in
//! sentences. And the use of its limits.

use super::{status_report, usage};
use crate::control::Control;
use rblk_operate::target::condition::Condition;
use rblk_operate::target::status::TargetStatus;
use rblk_operate::target::warnings::warnings;

/// The whole status of a target now, for people and programs.
pub(in crate::control) fn of(control: &Control) -> TargetStatus {
    let mut status = TargetStatus { usage: usage::of(control), ..status_report::of(control) };
    status.condition = Condition::of(&status).word().to_owned();
    status.warnings = warnings(&status);
    status
}
