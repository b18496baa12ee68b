//! [`WayJoin`]: a try to add one more way to a session, as a task of its own: LOGIN beside the
//! living ways, and a tested path for each queue.

use std::sync::Arc;

use rblk_fabric::{Address, ConnectOptions, Region};
use rblk_protocol::{InstanceId, SessionId, VolumeHandle};

use crate::engine::path::{Path, QueueMemory};
use crate::volume::error::SessionError;
use crate::volume::reconnect::NotTested;
use crate::volume::session::{Entry, QueueWish, Session};
use crate::volume::setup::KnownBy;
use crate::volume::ways::WayTry;

/// The way does not lead to the session.
#[derive(Debug, thiserror::Error)]
#[error("another target, or another run of it, answers there")]
pub(super) struct Elsewhere;

/// A try to join.
#[derive(Debug)]
pub(super) struct WayJoin {
    pub(super) attempt: WayTry,
    pub(super) address: Address,
    pub(super) options: ConnectOptions,
    pub(super) known_by: KnownBy,
    pub(super) session: SessionId,
    pub(super) instance: InstanceId,
    pub(super) volume: VolumeHandle,
    pub(super) wish: QueueWish,
    /// The memory of each queue that gets a path.
    pub(super) buffers: Vec<Option<Arc<Region>>>,
    /// Memory of other programs, which every queue may use.
    pub(super) shared: Arc<[Arc<Region>]>,
}

/// A way that has joined.
#[derive(Debug)]
pub(super) struct JoinedWay {
    pub(super) session: Session,
    pub(super) paths: Vec<(u16, Path)>,
}

impl WayJoin {
    /// Connects, logs in beside the others, connects every queue and tests its path.
    ///
    /// # Errors
    /// [`Elsewhere`], [`SessionError`], [`NotTested`].
    pub(super) async fn run(self) -> anyhow::Result<JoinedWay> {
        let Self { attempt, address, options, known_by, .. } = &self;
        let memories: Vec<_> =
            self.buffers.iter().flatten().map(|buffers| self.memory(buffers)).collect();
        let entry = Entry {
            resume: Some((self.session, attempt.epoch)),
            join: Some(attempt.join),
            asks_ways: true,
        };
        let known_by = (&known_by.host, known_by.credentials());
        let mut session =
            Session::connect_for(address, options, known_by, entry, &memories).await?;
        session.set_way(attempt.way);
        match self.connect(&mut session).await {
            Ok(paths) => Ok(JoinedWay { session, paths }),
            Err(error) => {
                session.admin.close();
                Err(error)
            }
        }
    }

    fn memory(&self, buffers: &Arc<Region>) -> QueueMemory {
        QueueMemory { buffers: Arc::clone(buffers), shared: Arc::clone(&self.shared) }
    }

    async fn connect(&self, session: &mut Session) -> anyhow::Result<Vec<(u16, Path)>> {
        let leads_to_it = self.attempt.leads_to(self.session, self.instance, &session.login());
        if !session.has_ways() || !leads_to_it {
            return Err(Elsewhere.into());
        }
        let mut paths = Vec::new();
        for (queue, buffers) in (0u16..).zip(&self.buffers) {
            let Some(buffers) = buffers else { continue };
            let memory = self.memory(buffers);
            let path = session.connect_queue(queue, self.wish, self.volume, &memory).await?;
            paths.push((queue, path.test().await.map_err(NotTested)?));
        }
        Ok(paths)
    }
}

/// Whether a way leads to another target, another run, or one that does not know the session.
pub(super) fn is_misled(error: &anyhow::Error) -> bool {
    let is_gone = error.downcast_ref::<SessionError>().is_some_and(SessionError::is_session_gone);
    is_gone || error.is::<Elsewhere>()
}
