//! The status of a target with what is concluded from it: its condition in one word, and what is
//! wrong, in sentences. And what it uses of its limits.

use super::Control;
use super::status::{self, TargetStatus};
use super::usage;
use crate::condition::Condition;
use crate::warnings::warnings;

/// All that people and programs are told of a target now.
pub(super) fn of(control: &Control) -> TargetStatus {
    let mut status = TargetStatus { usage: usage::of(control), ..status::of(control) };
    status.condition = Condition::of(&status).word().to_owned();
    status.warnings = warnings(&status);
    status
}
