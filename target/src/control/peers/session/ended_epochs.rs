//! [`EndedEpochs`]: epochs of one session that a LOGIN or a DROP ends.

use rblk_protocol::{DropRequest, Epoch};

/// Epochs that end together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EndedEpochs {
    /// None: a way joins for the first time.
    None,
    /// This one: the way that joins had it.
    One(Epoch),
    /// All below this one: a host that lost all its ways is back.
    Below(Epoch),
    /// Those of a DROP.
    Of(DropRequest),
}

impl EndedEpochs {
    /// Whether an epoch is one of them.
    #[must_use]
    pub(crate) fn has(&self, epoch: Epoch) -> bool {
        match self {
            Self::None => false,
            Self::One(one) => *one == epoch,
            Self::Below(first) => epoch < *first,
            Self::Of(request) => request.epochs().contains(&epoch),
        }
    }
}
