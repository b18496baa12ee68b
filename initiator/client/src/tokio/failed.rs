//! [`Failed`]: a failed request of a task.

use std::io;

use super::buffer::Buffer;
use super::shared::Over;
use crate::{IoError, Reason};

/// A request failed.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
#[non_exhaustive]
pub struct Failed {
    /// The reason.
    pub why: Why,
    /// The buffer of a read or a write. No device touches it any more. `None` if the queue
    /// [ended](Why::Ended) with the request under way.
    pub buffer: Option<Buffer>,
}

/// The reason why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The target's error, or the state of the volume.
    #[error(transparent)]
    Io(IoError),
    /// The request is invalid. It was not sent.
    #[error(transparent)]
    Refused(Reason),
    /// The handle is closed. The request was not sent.
    #[error("the handle is closed: send requests before Handle::close")]
    Closed,
    /// The driver is gone, and the queue with it. A write may have been done, or not.
    #[error("the driver of the queue was dropped or has failed: keep Driver::run polled")]
    Ended,
}

impl From<Over> for Why {
    fn from(over: Over) -> Self {
        match over {
            Over::Closed => Self::Closed,
            Over::Ended => Self::Ended,
        }
    }
}

impl From<Failed> for io::Error {
    fn from(failed: Failed) -> Self {
        match failed.why {
            Why::Io(error) => error.into(),
            why => Self::other(why),
        }
    }
}
