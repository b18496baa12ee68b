//! [`ChangeFiles`]: the open files that a change of a volume works with.

use std::sync::Arc;

use crate::pool::opening::OpenedVolume;
use crate::pool::reflink::CloneFile;

/// See the module. Most changes need none.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChangeFiles {
    /// The store of a new volume.
    pub(in crate::control) opened: Option<Arc<OpenedVolume>>,
    /// The new file of a snapshot.
    pub(in crate::control) clone: Option<Arc<CloneFile>>,
}

impl ChangeFiles {
    /// Those of a new volume.
    pub(in crate::control) fn of_new(opened: Arc<OpenedVolume>) -> Self {
        Self { opened: Some(opened), clone: None }
    }

    /// That of a snapshot.
    pub(in crate::control) fn of_snapshot(clone: Arc<CloneFile>) -> Self {
        Self { opened: None, clone: Some(clone) }
    }
}
