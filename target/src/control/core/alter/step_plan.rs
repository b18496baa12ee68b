//! The steps of a change, and the way back.

use rblk_protocol::Mutation;

use super::volume_change::VolumeChange;
use crate::cache::SLOT_BYTES;
use crate::data::poll_group::VolumeStep;
use crate::record::AtRisk;
use crate::volume::{CacheMode, Placement, Volume};

impl VolumeStep {
    /// A step that may fail late and can be given up, since its wait changes nothing. A file's
    /// length does not qualify: a late change would cut off newer writes of hosts.
    pub(super) fn has_deadline(self) -> bool {
        use VolumeStep::{Clone, Close, Hold, Lower, Probe, Quiet, Record, WriteBack};
        matches!(self, Record | Lower | Close | WriteBack | Quiet | Probe | Hold | Clone)
    }

    /// The work that did not end in time.
    pub(super) fn waits_for(self) -> &'static str {
        match self {
            Self::Record | Self::Lower => "the write of its record (state_dir)",
            Self::Close => "the connections of its hosts",
            Self::WriteBack => "the writes of its dirty blocks",
            _ => "the work of its store",
        }
    }
}

/// The steps of a change that makes `after` of `before`; for a new volume there is none before.
pub(super) fn steps_of(
    change: &VolumeChange,
    before: Option<&Volume>,
    after: &Volume,
) -> Vec<VolumeStep> {
    use VolumeStep::{
        Abandon, Access, Add, Clone, Close, Drop, Hold, Lower, Probe, Quiet, Record, WriteBack,
    };
    match (change, before) {
        (VolumeChange::Add(_), _) => vec![Record, Add, Access],
        (VolumeChange::Lose { .. }, _) => vec![Close, Abandon],
        (VolumeChange::Yield { .. }, _) if Mutation::GroupCleanLie.is_on() => {
            vec![Close, Drop, Lower]
        }
        (VolumeChange::Remove { .. } | VolumeChange::Yield { .. }, _) => match after.placement {
            Placement::Store => vec![Close, WriteBack, Quiet, Drop, Lower],
            Placement::Memory(_) | Placement::Null => vec![Close, Quiet, Drop],
        },
        (VolumeChange::WriteBack { .. }, _) => vec![WriteBack],
        (VolumeChange::Snapshot { .. }, _) => {
            vec![Probe, WriteBack, Hold, WriteBack, Clone, Access]
        }
        (VolumeChange::Resize { .. } | VolumeChange::Become(_), before) => {
            steps_between(before.unwrap_or(after), after)
        }
    }
}

/// The steps that make one volume of another.
fn steps_between(before: &Volume, after: &Volume) -> Vec<VolumeStep> {
    let risk = |volume: &Volume| {
        let by_writes = AtRisk::by_writes_to(volume).filter(|_| !volume.read_only);
        by_writes.unwrap_or(AtRisk::Nothing)
    };
    let mut steps = steps_to(before, after);
    if risk(after) > risk(before) {
        steps.insert(0, VolumeStep::Record);
    }
    if AtRisk::by_writes_to(after) < AtRisk::by_writes_to(before) {
        steps.insert(steps.len() - 1, VolumeStep::Lower);
    }
    steps
}

/// The steps that change the volume itself.
fn steps_to(before: &Volume, after: &Volume) -> Vec<VolumeStep> {
    use VolumeStep::{Access, Add, Close, Drop, Grow, Hold, Quiet, Reshape, Store, WriteBack};
    let becomes_read_only = after.read_only && !before.read_only;
    let (was, bytes) = (before.size_bytes(), after.size_bytes());
    let is_partial = was % (SLOT_BYTES as u64) != 0 && before.cache != CacheMode::None;
    match before.placement {
        Placement::Memory(_) if was != bytes => vec![Close, Quiet, Store, Drop, Add, Access],
        Placement::Memory(_) | Placement::Null if becomes_read_only => vec![Hold, Access],
        Placement::Memory(_) | Placement::Null => vec![Access],
        Placement::Store if bytes < was => {
            vec![Close, WriteBack, Quiet, Reshape, Store, Access]
        }
        // The last block is cached as far as it reached.
        Placement::Store
            if bytes > was && (is_partial || before.cache != after.cache || becomes_read_only) =>
        {
            vec![Store, Close, WriteBack, Quiet, Reshape, Access]
        }
        Placement::Store if bytes > was => vec![Store, Grow, Access],
        Placement::Store if before.cache != after.cache => {
            vec![Close, WriteBack, Quiet, Reshape, Access]
        }
        // A write-back volume does not come here: read-only changes its cache mode, too, which
        // closes it.
        Placement::Store if becomes_read_only => vec![Hold, Access],
        Placement::Store => vec![Access],
    }
}

/// The steps that lead back when one failed after these. `grew`: the volume was to be larger.
pub(super) fn steps_back(
    done: &[VolumeStep],
    failed: Option<VolumeStep>,
    is_new: bool,
    grew: bool,
) -> Vec<VolumeStep> {
    let has = |step| done.contains(&step);
    let mut back = match () {
        // Some poll groups may serve it.
        () if is_new => vec![VolumeStep::Drop],
        () if has(VolumeStep::Hold) => vec![VolumeStep::Access],
        () if !has(VolumeStep::Close) => Vec::new(),
        () if has(VolumeStep::Drop) => vec![VolumeStep::Add, VolumeStep::Access],
        () if has(VolumeStep::Reshape) => vec![VolumeStep::Reshape, VolumeStep::Access],
        () => vec![VolumeStep::Access],
    };
    if !is_new && (has(VolumeStep::Record) || failed == Some(VolumeStep::Record)) {
        back.push(VolumeStep::Lower);
    }
    let is_longer = has(VolumeStep::Store) || failed == Some(VolumeStep::Store);
    // Commands of a shard that has the new size may have come to the end of the file.
    if grew && !is_new && is_longer && !has(VolumeStep::Grow) && !has(VolumeStep::Reshape) {
        back.push(VolumeStep::CutBack);
    }
    back
}
