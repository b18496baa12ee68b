//! The status of a target with what is concluded from it: its condition in one word, and what is
//! wrong, in sentences. And what it uses of its limits.

use super::{report, usage};
use crate::control::Control;
use crate::operate::condition::Condition;
use crate::operate::status::TargetStatus;
use crate::operate::warnings::warnings;

/// All that people and programs are told of a target now.
pub(in crate::control) fn of(control: &Control) -> TargetStatus {
    let mut status = TargetStatus { usage: usage::of(control), ..report::of(control) };
    status.condition = Condition::of(&status).word().to_owned();
    status.warnings = warnings(&status);
    status
}
