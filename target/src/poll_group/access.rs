//! [`Access`]: the volumes, and which session opened which of them.

use std::sync::Arc;

use rblk_protocol::width::wide;
use rblk_protocol::{AccessMode, CommandCapsule, Status};

use crate::identity::SessionIndex;
use crate::store::VolumeIndex;
use crate::volume::{Placement, Volume};

/// What a session may do with a volume.
#[derive(Clone, Copy)]
pub(super) enum Opened {
    /// It opened the volume so.
    Mode(AccessMode),
    /// It closed the volume, or lost it: commands are told this.
    Refused(Status),
}

/// Volumes and sessions. See the module.
#[derive(Default)]
pub(super) struct Access {
    volumes: Vec<Option<Arc<Volume>>>,
    // By session, then by volume.
    sessions: Vec<Vec<Option<Opened>>>,
}

impl Access {
    /// Exports a volume.
    pub(super) fn add(&mut self, volume: Arc<Volume>) {
        let at = wide(volume.index.0);
        if self.volumes.len() <= at {
            self.volumes.resize(at + 1, None);
        }
        self.volumes[at] = Some(volume);
    }

    /// Says what a session may do with a volume from now on.
    pub(super) fn set(&mut self, session: SessionIndex, volume: VolumeIndex, opened: Opened) {
        let (at, volume) = (wide(session.0), wide(volume.0));
        if self.sessions.len() <= at {
            self.sessions.resize_with(at + 1, Vec::new);
        }
        let view = &mut self.sessions[at];
        if view.len() <= volume {
            view.resize(volume + 1, None);
        }
        view[volume] = Some(opened);
    }

    /// Forgets a session.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        if let Some(view) = self.sessions.get_mut(wide(session.0)) {
            view.clear();
        }
    }

    /// The volume that a command names, and how its session opened it.
    ///
    /// # Errors
    /// What the command is told.
    #[inline]
    pub(super) fn opened(
        &self,
        session: SessionIndex,
        command: &CommandCapsule,
    ) -> Result<(&Arc<Volume>, AccessMode), Status> {
        let index = Volume::index_of(command.volume).ok_or(Status::NoSuchVolume)?;
        let opened = self
            .sessions
            .get(wide(session.0))
            .and_then(|view| view.get(wide(index.0)).copied().flatten())
            .ok_or(Status::NoSuchVolume)?;
        let mode = match opened {
            Opened::Mode(mode) => mode,
            Opened::Refused(status) => return Err(status),
        };
        let volume = self.volumes.get(wide(index.0)).and_then(Option::as_ref);
        Ok((volume.ok_or(Status::VolumeGone)?, mode))
    }

    /// The volume with that index.
    pub(super) fn volume(&self, volume: VolumeIndex) -> Option<&Volume> {
        self.volumes.get(wide(volume.0))?.as_deref()
    }

    /// Where the bytes of a volume are.
    #[inline]
    pub(super) fn placement(&self, volume: VolumeIndex) -> Option<&Placement> {
        self.volume(volume).map(|volume| &volume.placement)
    }
}
