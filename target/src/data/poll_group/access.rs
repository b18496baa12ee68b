//! [`AccessTable`]: the volumes, and the volumes that each session opened.
//!
//! Invariant: a connection of a session finds only the volumes that its own session opened. A
//! session that takes a place clears it ([`AccessTable::begin`]), whatever notices came for the
//! previous session. So [`AccessTable::opened`] need not compare the sessions.

use std::sync::Arc;

use rblk_protocol::width::wide;
use rblk_protocol::{AccessMode, CommandCapsule, Status};

use crate::volume::ids::{SessionIndex, VolumeIndex};
use crate::volume::limits::Limiter;
use crate::volume::{Placement, Volume};
use rblk_operate::target::volume_counts::VolumeStats;

/// The access of a session to a volume.
#[derive(Clone, Copy)]
pub(super) enum Opened {
    /// The session opened the volume in this mode.
    Mode(AccessMode),
    /// The session closed the volume, or lost it: its commands get this status.
    Refused(Status),
}

/// A volume, and this poll group's counters of its commands.
#[derive(Clone)]
struct Exported {
    // None: no command finds the volume now. Commands that found it still count.
    volume: Option<Arc<Volume>>,
    // The volume in place of `volume`, while its store is silent: commands under way find it, and
    // new ones do not. So they leave the I/O path at the test for a volume that is hidden.
    silent: Option<Arc<Volume>>,
    is_silent: bool,
    stats: Arc<VolumeStats>,
}

impl Exported {
    /// No command finds the volume.
    fn hidden(stats: Arc<VolumeStats>) -> Self {
        Self { volume: None, silent: None, is_silent: false, stats }
    }

    /// For commands under way.
    #[inline]
    fn volume(&self) -> Option<&Arc<Volume>> {
        self.volume.as_ref().or(self.silent.as_ref())
    }
}

/// Volumes and sessions. See the module.
#[derive(Default)]
pub(super) struct AccessTable {
    volumes: Vec<Option<Exported>>,
    // By session index.
    sessions: Vec<View>,
    // Some volume or host has limits, or had.
    has_limits: bool,
    // Volumes with a lost store. An index is used once in a run.
    lost: Vec<VolumeIndex>,
}

/// The volumes that one session opened.
#[derive(Default)]
struct View {
    life: u32,
    // By volume.
    opened: Vec<Option<Opened>>,
    // The limits of the session's host.
    limits: Option<Arc<Limiter>>,
}

impl AccessTable {
    /// Exports a volume.
    pub(super) fn add(&mut self, volume: Arc<Volume>, stats: Arc<VolumeStats>) {
        let at = wide(volume.index.0);
        self.has_limits |= volume.limits.is_some();
        if self.volumes.len() <= at {
            self.volumes.resize(at + 1, None);
        }
        self.volumes[at] = Some(Exported { volume: Some(volume), ..Exported::hidden(stats) });
    }

    /// Adds a volume with its counters. No command finds the volume yet.
    pub(super) fn announce(&mut self, volume: VolumeIndex, stats: Arc<VolumeStats>) {
        let at = wide(volume.0);
        if self.volumes.len() <= at {
            self.volumes.resize(at + 1, None);
        }
        self.volumes[at] = Some(Exported::hidden(stats));
    }

    /// Opens an announced volume to commands, unless its store is lost.
    pub(super) fn open_to_commands(&mut self, volume: Arc<Volume>) {
        if self.is_lost(volume.index) {
            return;
        }
        let place = self.volumes.get_mut(wide(volume.index.0)).and_then(Option::as_mut);
        debug_assert!(place.is_some(), "{} is served and was not announced", volume.name);
        self.has_limits |= volume.limits.is_some();
        if let Some(place) = place {
            let shown = if place.is_silent { &mut place.silent } else { &mut place.volume };
            *shown = Some(volume);
        }
    }

    /// Hides a volume from commands.
    pub(super) fn remove(&mut self, volume: VolumeIndex) {
        if let Some(place) = self.volumes.get_mut(wide(volume.0)).and_then(Option::as_mut) {
            (place.volume, place.silent) = (None, None);
        }
    }

    /// The store of a volume is silent, and commands have to wait; or it speaks again (false).
    pub(super) fn set_silent(&mut self, volume: VolumeIndex, is_silent: bool) {
        let place = self.volumes.get_mut(wide(volume.0)).and_then(Option::as_mut);
        let Some(place) = place.filter(|place| place.is_silent != is_silent) else { return };
        place.is_silent = is_silent;
        std::mem::swap(&mut place.volume, &mut place.silent);
    }

    /// Whether the volume of a command is only hidden because its store is silent.
    #[cold]
    pub(super) fn is_silent(&self, volume: VolumeIndex) -> bool {
        let place = self.volumes.get(wide(volume.0)).and_then(Option::as_ref);
        place.is_some_and(|place| place.silent.is_some())
    }

    /// Hides a volume from commands for the rest of the run: its store is lost.
    pub(super) fn lose(&mut self, volume: VolumeIndex) {
        self.remove(volume);
        if !self.is_lost(volume) {
            self.lost.push(volume);
        }
    }

    /// Whether the store of a volume is lost.
    #[cold]
    pub(super) fn is_lost(&self, volume: VolumeIndex) -> bool {
        self.lost.contains(&volume)
    }

    /// Whether a session ever opened a volume: its commands may name it.
    pub(super) fn knows(&self, session: SessionIndex, volume: VolumeIndex) -> bool {
        let view = self.sessions.get(wide(session.index)).filter(|view| view.life == session.life);
        view.is_some_and(|view| view.opened.get(wide(volume.0)).is_some_and(Option::is_some))
    }

    /// Whether a session may write to a volume of a store.
    pub(super) fn writes_to_store(&self, session: SessionIndex) -> bool {
        let view = self.sessions.get(wide(session.index)).filter(|view| view.life == session.life);
        let opened = view.map_or(&[][..], |view| &view.opened);
        let may_write = |opened: &Option<Opened>| match opened {
            Some(Opened::Mode(mode)) => *mode != AccessMode::ReadOnly,
            _ => false,
        };
        let in_store = |exported: &Option<Exported>| {
            let volume = exported.as_ref().and_then(Exported::volume);
            volume.is_some_and(|volume| matches!(volume.placement, Placement::Store))
        };
        opened.iter().zip(&self.volumes).any(|(view, of)| may_write(view) && in_store(of))
    }

    /// Whether the session of a command has its volume open while the volume changes: the volume
    /// exists but cannot be used.
    #[cold]
    pub(super) fn is_changing(&self, session: SessionIndex, command: &CommandCapsule) -> bool {
        let Some(volume) = Volume::index_of(command.volume) else { return false };
        let view = self.sessions.get(wide(session.index));
        let opened = view.and_then(|view| view.opened.get(wide(volume.0)).copied().flatten());
        matches!(opened, Some(Opened::Mode(_))) && self.volume(volume).is_none()
    }

    /// Sets the access of a session to a volume.
    pub(super) fn set(&mut self, session: SessionIndex, volume: VolumeIndex, opened: Opened) {
        self.begin(session);
        let Some(View { opened: view, .. }) = self.sessions.get_mut(wide(session.index)) else {
            return;
        };
        let volume = wide(volume.0);
        if view.len() <= volume {
            view.resize(volume + 1, None);
        }
        view[volume] = Some(opened);
    }

    /// Gives a session its place, and clears the previous session's volumes and limits.
    pub(super) fn begin(&mut self, session: SessionIndex) {
        if session == SessionIndex::NONE {
            return;
        }
        let at = wide(session.index);
        if self.sessions.len() <= at {
            self.sessions.resize_with(at + 1, View::default);
        }
        let view = &mut self.sessions[at];
        if view.life != session.life {
            view.opened.clear();
            view.limits = None;
            view.life = session.life;
        }
    }

    /// Forgets a session.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        if let Some(view) = self.sessions.get_mut(wide(session.index))
            && view.life == session.life
        {
            view.opened.clear();
            view.limits = None;
        }
    }

    /// Sets the limits of a session's host.
    pub(super) fn set_limits(&mut self, session: SessionIndex, limits: Option<Arc<Limiter>>) {
        self.begin(session);
        self.has_limits |= limits.is_some();
        if let Some(view) = self.sessions.get_mut(wide(session.index)) {
            view.limits = limits;
        }
    }

    /// Whether a command may be over a limit: some volume or host has limits, or had. Where none
    /// ever had, limits cost only this test.
    #[inline(always)]
    pub(super) fn has_limits(&self) -> bool {
        self.has_limits
    }

    /// The limits of a session's host.
    pub(super) fn host_limits(&self, session: SessionIndex) -> Option<&Limiter> {
        self.sessions.get(wide(session.index))?.limits.as_deref()
    }

    /// The volume that a command names, and the access mode of its session.
    ///
    /// # Errors
    /// The status for the command's response.
    #[inline]
    pub(super) fn opened(
        &self,
        session: SessionIndex,
        command: &CommandCapsule,
    ) -> Result<(&Volume, AccessMode), Status> {
        let index = Volume::index_of(command.volume).ok_or(Status::NoSuchVolume)?;
        let view = self.sessions.get(wide(session.index)).ok_or(Status::NoSuchVolume)?;
        let opened = view.opened.get(wide(index.0)).copied().flatten();
        let opened = opened.ok_or(Status::NoSuchVolume)?;
        let mode = match opened {
            Opened::Mode(mode) => mode,
            Opened::Refused(status) => return Err(status),
        };
        let exported = self.volumes.get(wide(index.0)).and_then(Option::as_ref);
        let Some(Exported { volume: Some(volume), .. }) = exported else {
            return Err(Status::VolumeGone);
        };
        Ok((volume, mode))
    }

    /// The volume with that index.
    pub(super) fn volume(&self, volume: VolumeIndex) -> Option<&Volume> {
        self.volumes.get(wide(volume.0))?.as_ref()?.volume().map(AsRef::as_ref)
    }

    /// The counters of a volume's commands.
    #[inline]
    pub(super) fn stats(&self, volume: VolumeIndex) -> Option<&VolumeStats> {
        self.volumes.get(wide(volume.0))?.as_ref().map(|exported| &*exported.stats)
    }

    /// The place of a volume's bytes.
    #[inline]
    pub(super) fn placement(&self, volume: VolumeIndex) -> Option<&Placement> {
        self.volume(volume).map(|volume| &volume.placement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::tests::stored_block;

    const V: VolumeIndex = VolumeIndex(0);

    fn table() -> AccessTable {
        let mut table = AccessTable::default();
        table.add(stored_block(), Arc::default());
        table
    }

    fn is_open(table: &AccessTable) -> bool {
        table.volumes[0].as_ref().unwrap().volume.is_some()
    }

    #[test]
    fn new_commands_do_not_find_a_silent_volume_and_those_under_way_do() {
        let mut table = table();
        for is_silent in [true, true, false, false] {
            table.set_silent(V, is_silent);
            assert_eq!((is_open(&table), table.is_silent(V)), (!is_silent, is_silent));
            assert!(table.volume(V).is_some() && table.placement(V).is_some());
        }
        // A change while it is silent.
        table.set_silent(V, true);
        table.open_to_commands(stored_block());
        assert!(!is_open(&table) && table.is_silent(V));
        table.remove(V);
        assert!(!table.is_silent(V) && table.volume(V).is_none());
        table.open_to_commands(stored_block());
        assert!(!is_open(&table) && table.is_silent(V));
        table.set_silent(V, false);
        assert!(is_open(&table));
    }

    #[test]
    fn no_step_opens_a_lost_volume_again() {
        for is_silent in [false, true] {
            let mut table = table();
            table.set_silent(V, is_silent);
            table.lose(V);
            table.open_to_commands(stored_block());
            table.set_silent(V, false);
            assert!(!is_open(&table) && table.volume(V).is_none() && table.is_lost(V));
        }
    }
}
