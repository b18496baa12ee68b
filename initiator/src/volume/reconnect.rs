//! Reconnecting to the target: [`Try`] and [`probe`] are tasks of their own, so that the mount can
//! answer its socket meanwhile, and can end them. [`Tries`] holds the running ones. Their results
//! go to the mount's [`Course`](super::course::Course), which decides.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rblk_fabric::{Address, ConnectOptions, Region};
use rblk_operate::said_once;
use rblk_protocol::{InstanceId, LoginReply, Name, OpenReply};
use tokio::sync::{mpsc, oneshot};

use super::course::{OpenVerdict, OtherTarget};
use super::error::SessionError;
use super::resolve_unflushed::{UnflushedParts, resolve_unflushed};
use super::session::{Entry, QueueWish, Session, VolumeClaim};
use super::setup::KnownBy;
use super::task::{self, Running};
use crate::engine::PathEnd;
use crate::engine::path::{Path, QueueMemory};
use crate::engine::ways::WayIndex;

/// Time for the mount to answer a try. It takes longer only when it ends.
const STEP_DEADLINE: Duration = Duration::from_secs(10);
/// Time for the LOGOUT of an unneeded session.
const LOGOUT_TIME: Duration = Duration::from_secs(1);

/// A different volume came back.
#[derive(Debug, thiserror::Error)]
#[error(
    "volume `{volume}` {how}; its requests fail now: unmount it, check the target, mount again"
)]
pub(super) struct VolumeChanged {
    volume: String,
    how: &'static str,
}

/// A path did not pass its self-test.
#[derive(Debug, thiserror::Error)]
#[error("the target does not answer a self-test as it should: {0:?}")]
pub(crate) struct NotTested(pub(crate) PathEnd);

/// The mount ends while a try runs for it.
#[derive(Debug, thiserror::Error)]
#[error("the mount is ending")]
struct MountEnds;

/// The parameters of a try.
#[derive(Debug)]
pub(super) struct Try {
    pub(super) address: Address,
    /// Their timeout applies to each step.
    pub(super) options: ConnectOptions,
    pub(super) known_by: KnownBy,
    pub(super) entry: Entry,
    /// The way of its paths.
    pub(super) way: WayIndex,
    pub(super) volume_name: Name,
    pub(super) claim: VolumeClaim,
    pub(super) wish: QueueWish,
    /// The memory of each queue that gets a path.
    pub(super) buffers: Vec<Option<Arc<Region>>>,
    /// Memory of other programs, which every queue may use.
    pub(super) shared: Arc<[Arc<Region>]>,
    /// Whether the paths are tested before the queues get them.
    pub(super) tests_paths: bool,
    /// The account of durable writes.
    pub(super) account: UnflushedParts,
}

/// A session with a path for every queue that has not left.
#[derive(Debug)]
pub(super) struct Reconnected {
    pub(super) session: Session,
    pub(super) paths: Vec<(u16, Path)>,
}

/// A step of a try. The try goes on when the mount has answered.
#[derive(Debug)]
pub(super) enum TryStep {
    /// The try has a session.
    LoggedIn(LoginReply, oneshot::Sender<Result<(), OtherTarget>>),
    /// The try has the volume.
    Opened(Box<OpenReply>, oneshot::Sender<OpenVerdict>),
}

/// The answer of the mount to a [`TryStep`]. It goes nowhere if the try was ended meanwhile.
#[derive(Debug)]
pub(crate) enum StepAnswer {
    /// Whether the session is one of the same target.
    LoggedIn(Result<(), OtherTarget>, oneshot::Sender<Result<(), OtherTarget>>),
    /// How the try goes on.
    Opened(OpenVerdict, oneshot::Sender<OpenVerdict>),
}

impl StepAnswer {
    /// Lets the try go on.
    pub(super) fn send(self) {
        match self {
            Self::LoggedIn(result, answer) => {
                let _ = answer.send(result);
            }
            Self::Opened(verdict, answer) => {
                let _ = answer.send(verdict);
            }
        }
    }
}

impl Try {
    /// Connects, logs in, opens the volume, settles the acknowledged writes if it must, and
    /// connects every queue. If the mount ends meanwhile, the try logs out, so that other hosts
    /// find the volume free at once.
    pub(super) async fn run(self, steps: mpsc::Sender<TryStep>) -> anyhow::Result<Reconnected> {
        let Self { address, options, known_by, entry, .. } = &self;
        let known_by = (&known_by.host, known_by.credentials());
        let queues = self.buffers.iter().flatten().map(|buffers| self.memory(buffers));
        let queues: Vec<_> = queues.collect();
        let mut session = Session::connect_for(address, options, known_by, *entry, &queues).await?;
        session.set_way(self.way);
        match self.open(&mut session, &steps).await {
            Ok(paths) => Ok(Reconnected { session, paths }),
            Err(error) => {
                let unwanted = error.is::<OtherTarget>()
                    || error.is::<MountEnds>()
                    || matches!(error.downcast_ref(), Some(SessionError::Fenced { .. }));
                if unwanted {
                    session.logout(LOGOUT_TIME).await;
                } else {
                    // So the target knows at once that this epoch is over.
                    session.admin.close();
                }
                Err(error)
            }
        }
    }

    fn memory(&self, buffers: &Arc<Region>) -> QueueMemory {
        QueueMemory { buffers: Arc::clone(buffers), shared: Arc::clone(&self.shared) }
    }

    async fn open(
        &self,
        session: &mut Session,
        steps: &mpsc::Sender<TryStep>,
    ) -> anyhow::Result<Vec<(u16, Path)>> {
        let login = session.login();
        ask(steps, |answer| TryStep::LoggedIn(login, answer)).await??;
        let volume = session.open(&self.volume_name, self.claim).await?;
        match ask(steps, |answer| TryStep::Opened(Box::new(volume), answer)).await? {
            OpenVerdict::Go => {}
            OpenVerdict::ResolveUnflushed => {
                resolve_unflushed(session, &volume, &self.account).await?
            }
            OpenVerdict::Changed(how) => {
                return Err(VolumeChanged { volume: self.volume_name.to_string(), how }.into());
            }
        }
        let mut paths = Vec::new();
        for (queue, buffers) in (0u16..).zip(&self.buffers) {
            let Some(buffers) = buffers else { continue };
            let memory = self.memory(buffers);
            let path = tokio::select! {
                path = session.connect_queue(queue, self.wish, volume.handle, &memory) => path?,
                () = steps.closed() => return Err(MountEnds.into()),
            };
            let (depth, io_max) = (path.accept.depth, path.accept.io_max_bytes);
            if depth != self.wish.depth || io_max < self.wish.io_max_bytes {
                anyhow::bail!(
                    "the target now grants depth {} and {io_max} bytes per command; this mount was made with {} and {}. Restore its queue_depth_max and max_io, or mount anew",
                    depth.get(),
                    self.wish.depth.get(),
                    self.wish.io_max_bytes
                );
            }
            let path = match self.tests_paths {
                true => path.test().await.map_err(NotTested)?,
                false => path,
            };
            paths.push((queue, path));
        }
        Ok(paths)
    }
}

/// Reports a step to the mount, and waits for its answer.
async fn ask<T>(
    steps: &mpsc::Sender<TryStep>,
    step: impl FnOnce(oneshot::Sender<T>) -> TryStep,
) -> anyhow::Result<T> {
    let exchange = async {
        let (sender, answer) = oneshot::channel();
        steps.send(step(sender)).await.map_err(|_| MountEnds)?;
        answer.await.map_err(|_| MountEnds.into())
    };
    tokio::time::timeout(STEP_DEADLINE, exchange).await.context("the mount does not answer")?
}

/// Checks whether this run of the target answers at another address: starts a session there, opens
/// nothing, and ends it at once.
pub(super) async fn probe(
    address: Address,
    options: ConnectOptions,
    known_by: KnownBy,
    instance: InstanceId,
) -> anyhow::Result<()> {
    let (host, credentials) = (&known_by.host, known_by.credentials());
    let session = Session::connect(&address, &options, host, credentials, None).await?;
    let LoginReply { instance: found, target_name: name, .. } = session.login();
    session.logout(LOGOUT_TIME).await;
    anyhow::ensure!(found == instance, "another target answers there, with the name `{name}`");
    Ok(())
}

/// The running try and the running probe, if any.
#[derive(Debug)]
pub(super) struct Tries {
    connecting: Running<Reconnected>,
    // The address of the try.
    address: String,
    steps: (mpsc::Sender<TryStep>, mpsc::Receiver<TryStep>),
    probing: Running<Option<String>>,
    // The index of the probed address.
    probed: usize,
}

/// News of a try or a probe.
#[derive(Debug)]
pub(super) enum TryNews {
    /// The try has made a step, and waits for an answer.
    Step(TryStep),
    /// The try has ended.
    Tried(anyhow::Result<Box<Reconnected>>),
    /// The probe of an address has ended: the reason why this run of the target does not answer
    /// there; `None` if it does.
    Probed(usize, Option<String>),
}

impl Tries {
    /// No try and no probe.
    pub(super) fn new() -> Self {
        let (connecting, probing) = (None, None);
        Self { connecting, address: String::new(), steps: mpsc::channel(1), probing, probed: 0 }
    }

    /// Begins a try.
    pub(super) fn begin(&mut self, attempt: Try) {
        self.address = attempt.address.to_string();
        self.connecting = Some(tokio::spawn(attempt.run(self.steps.0.clone())));
    }

    /// The address of the last try, for people.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Begins a probe of the address with that index.
    pub(super) fn begin_probe(
        &mut self,
        index: usize,
        address: Address,
        options: ConnectOptions,
        known_by: KnownBy,
        instance: InstanceId,
    ) {
        self.probed = index;
        self.probing = Some(tokio::spawn(async move {
            let shown = address.to_string();
            let answers = probe(address, options, known_by, instance).await;
            let fault = answers.err().map(|error| said_once(error.as_ref()));
            match &fault {
                None => tracing::debug!(address = shown, "a better address answers"),
                Some(error) => tracing::debug!(address = shown, error, "a probe failed"),
            }
            Ok(fault)
        }));
    }

    /// The next news. Cancel safe.
    pub(super) async fn next(&mut self) -> TryNews {
        tokio::select! {
            Some(step) = self.steps.1.recv() => TryNews::Step(step),
            result = task::next(&mut self.connecting) => TryNews::Tried(result.map(Box::new)),
            result = task::next(&mut self.probing) => {
                let fault = result.unwrap_or_else(|error| Some(error.to_string()));
                TryNews::Probed(self.probed, fault)
            }
        }
    }

    /// The mount ends: a try ends at its next step, and logs out if it has a session. Probes end.
    pub(super) fn dismiss(&mut self) {
        self.steps.1.close();
        task::abort(&mut self.probing);
    }

    /// [`Self::dismiss`], and waits until the try has ended. Afterwards nothing runs.
    pub(super) async fn end(&mut self, within: Duration) {
        self.dismiss();
        if self.connecting.is_none() {
            return;
        }
        let ends = async {
            let result = loop {
                tokio::select! {
                    // A dropped question ends the try.
                    Some(_) = self.steps.1.recv() => {}
                    result = task::next(&mut self.connecting) => break result,
                }
            };
            // The try had succeeded before it heard of the end.
            if let Ok(Reconnected { session, .. }) = result {
                session.logout(LOGOUT_TIME).await;
            }
        };
        if tokio::time::timeout(within, ends).await.is_err() {
            task::abort(&mut self.connecting);
        }
    }

    /// Ends tries and probes at any step. A session can be resumed.
    pub(super) fn abort(&mut self) {
        task::abort(&mut self.connecting);
        task::abort(&mut self.probing);
    }
}
