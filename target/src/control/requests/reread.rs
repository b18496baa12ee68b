//! [`Reread`]: the configuration that a target was started with, read again.

use std::sync::Arc;

use rblk_config::{Auth, HostConfig, TargetConfig};
use rblk_operate::said_once;
use rblk_protocol::Name;
use tokio::sync::{Mutex, MutexGuard};

use super::file_work::with_files;
use crate::pool::opening::member_of;
use crate::store::rbd::group_member::GroupMember;
use rblk_operate::target::ask::HostsReport;

/// The number of a reading of the files. A greater one is of files that were read later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Reading(pub(in crate::control) u64);

/// Reads the configuration that the target was started with again: files and flags.
pub(crate) struct Reread {
    read: Box<dyn Fn() -> anyhow::Result<TargetConfig> + Send + Sync>,
    /// The name of the target, of which the identities of its volumes are made.
    target: Name,
    /// The member of a group that the target is.
    member: Option<GroupMember>,
    has_file: bool,
    /// Whether hosts must prove their keys. A reload does not change that.
    required: bool,
    /// One change at a time, so that the last reading is used last. Not for hosts, which may have
    /// to lose rights at once.
    changes: Mutex<()>,
    /// The latest, and one at a time.
    readings: Mutex<Reading>,
}

impl Reread {
    /// `read` reads the configuration, and may block. `started` is the configuration of the start.
    pub(crate) fn new(
        started: &TargetConfig,
        (target, has_file): (Name, bool),
        read: impl Fn() -> anyhow::Result<TargetConfig> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let required = started.authentication() == Auth::Required;
        let (changes, readings) = (Mutex::new(()), Mutex::default());
        let member = member_of(started);
        let read = Box::new(read);
        Arc::new(Self { read, target, member, has_file, required, changes, readings })
    }

    /// The member of a group that the target is.
    pub(crate) fn member(&self) -> Option<&GroupMember> {
        self.member.as_ref()
    }

    /// Waits for the change before. Until the guard is dropped, nothing else changes.
    pub(in crate::control) async fn lock_changes(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().await
    }

    /// The name of the target.
    pub(crate) fn target(&self) -> Name {
        self.target
    }

    /// Whether there is a file to read, and not flags alone.
    pub(crate) fn has_file(&self) -> bool {
        self.has_file
    }

    /// Reads the configuration as it is now.
    pub(in crate::control) async fn read(
        self: &Arc<Self>,
    ) -> Result<(TargetConfig, Reading), String> {
        let mut latest = self.readings.lock().await;
        latest.0 += 1;
        let reader = Arc::clone(self);
        let read = move || (reader.read)().map_err(|error| said_once(error.as_ref()));
        let place = "the files of its configuration".to_owned();
        let config =
            with_files(place, || "the configuration was not read".to_owned(), read).await?;
        Ok((config, *latest))
    }

    /// The report on a reload of these hosts.
    pub(in crate::control) fn report(
        &self,
        hosts: &[HostConfig],
        ended: Vec<String>,
    ) -> HostsReport {
        let hosts = hosts.iter().map(|host| host.name.clone()).collect();
        HostsReport { hosts, required: self.required, ended }
    }
}
