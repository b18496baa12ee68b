//! [`OpenError`]: the reasons why a volume could not be opened.

use std::error::Error;
use std::fmt;

use rblk_operate::said_once;

use crate::volume::begin::may_pass;

/// The reason why a volume could not be opened. It names the fault and the remedy.
#[derive(Debug)]
pub struct OpenError(anyhow::Error);

impl OpenError {
    pub(super) fn new(error: anyhow::Error) -> Self {
        Self(error)
    }

    /// Whether a later try may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        may_pass(&self.0)
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&said_once(self.0.as_ref()))
    }
}

// The text includes the causes, so there is no source.
impl Error for OpenError {}
