//! The ways of a [`TargetLink`] in the status of its mount, which calls them paths.

use std::time::Instant;

use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::path_status::{PathStatus, PathTry};

use super::TargetLink;
use crate::engine::ways::WayIndex;
use crate::volume::history::millis;
use crate::volume::setup::Endpoint;
use crate::volume::ways::{Standing, WayState};

impl TargetLink {
    /// Fills in the paths, and the connection of the first that is in use.
    pub(super) fn report_paths(&self, status: &mut MountStatus) {
        status.one_path = self.one_path;
        status.paths = self.paths();
        let Some(first) = status.paths.iter().find(|path| path.is_in_use()) else { return };
        status.address.clone_from(&first.address);
        status.rdma_device.clone_from(&first.rdma_device);
        status.transport.clone_from(&first.transport);
    }

    fn paths(&self) -> Vec<PathStatus> {
        let Some(ways) = &self.ways else { return Vec::new() };
        let standings = ways.lives.standings().enumerate();
        standings.map(|(at, standing)| self.path(at, &standing)).collect()
    }

    fn path(&self, at: usize, standing: &Standing) -> PathStatus {
        let Standing { state, is_probed, since, lost } = *standing;
        let tried = match state {
            // The session is over, and with it every way.
            _ if !self.has_ways() => Some(PathTry::Waiting),
            WayState::Live(_) => None,
            WayState::Joining(_) => Some(PathTry::Joining),
            WayState::Away if is_probed => Some(PathTry::Probed),
            WayState::Away => Some(PathTry::Waiting),
        };
        let lived = matches!(state, WayState::Live(_)) && tried.is_some();
        let since = self.course.lost_at().filter(|_| lived).unwrap_or(since);
        let known = WayIndex::new(at).and_then(|way| self.ways.as_ref()?.endpoint(way));
        let Endpoint { rdma_device, transport, .. } = known.cloned().unwrap_or_default();
        PathStatus {
            address: self.setup.addresses.get(at).map(ToString::to_string).unwrap_or_default(),
            rdma_device,
            transport,
            state: PathStatus::word(tried).to_owned(),
            for_ms: millis(Instant::now().saturating_duration_since(since)),
            lost,
            reason: tried.and_then(|_| self.faults.get(at).cloned().flatten()),
            ..PathStatus::default()
        }
    }
}
