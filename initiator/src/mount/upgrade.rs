//! Handing a device over to another program in this process's place, while it is in use: its users
//! notice a pause.
//!
//! The queues hold what comes, wait for the answers of what was sent, and let go of the device,
//! which then waits for its next server with everything that was not sent. What was acknowledged is
//! flushed, for the program that comes next has no copies of it. The session is kept: the next
//! program goes on with it in a higher epoch. Then the program takes this process over by exec, so
//! that whoever watches the process, or has its log, notices nothing. Where that fails, this
//! program goes on, by the very same way.
//!
//! All that is a crash in good order: whatever goes wrong on the way, [`recover`](super::recover)
//! is the answer.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use nix::unistd::execv;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::lock::MountLock;
use super::settle::flush;
use super::signals::Signals;
use super::socket::{MountSocket, Response};
use super::{Mount, OnReady, next_event, pulse, recover, send};
use crate::queue::{FromQueue, QueueHandle, ToQueue};
use crate::ublk::Device;

/// What a queue thread may take beyond the time it has for its answers.
const QUEUE_GRACE: Duration = Duration::from_secs(5);

/// A mount that is served.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) mount: Mount,
    pub(super) device: Device,
    pub(super) socket: MountSocket,
    pub(super) lock: MountLock,
    pub(super) from_queues: mpsc::UnboundedReceiver<FromQueue>,
}

/// A device that is left to a program.
#[derive(Debug)]
pub(super) struct HandOver {
    pub(super) lock: MountLock,
    pub(super) program: PathBuf,
}

impl Serving {
    /// Serves until the mount is unmounted, or breaks. Hands the device over when that is asked
    /// for; goes on with it where that fails.
    pub(super) async fn run(
        self,
        signals: &mut Signals,
        on_ready: OnReady<'_>,
    ) -> anyhow::Result<()> {
        let mut serving = self;
        loop {
            let Serving { mount, device, socket, lock, from_queues } = serving;
            let ended =
                mount.serve(device, socket, lock, from_queues, signals, &mut *on_ready).await?;
            let Some(HandOver { lock, program }) = ended else { return Ok(()) };
            let error = become_program(&program, &lock);
            tracing::error!(%error, program = %program.display(), "cannot hand over; going on");
            // Another process that this one starts must not hold the name.
            if let Err(error) = lock.close_on_exec() {
                tracing::warn!(%error, "the lock of the mount");
            }
            serving = recover::again(lock, signals).await?;
        }
    }
}

/// Replaces this program. Returns only the failure.
fn become_program(program: &Path, lock: &MountLock) -> std::io::Error {
    if let Err(error) = lock.keep_over_exec() {
        return error;
    }
    let words = ["rblk-initiatord", "recover", lock.name(), "--foreground", "--lock-on-stdin"];
    let program = CString::new(program.as_os_str().as_bytes());
    let words: Result<Vec<CString>, _> = words.into_iter().map(CString::new).collect();
    match (program, words) {
        // Not by way of a shell, which would take a damaged program for a script and end.
        (Ok(program), Ok(words)) => match execv(&program, &words) {
            Err(error) => error.into(),
            Ok(never) => match never {},
        },
        _ => std::io::ErrorKind::InvalidInput.into(),
    }
}

impl Mount {
    /// Whether a program can be one to hand over to, as far as that shows from here.
    pub(super) fn may_upgrade(&self, program: &Path) -> Result<(), Response> {
        let unflushed = self.durability.unflushed();
        if self.session.is_none() && self.status.retain_bytes > 0 && unflushed > 0 {
            return Err(Response::Busy(format!(
                "{}: the target is away, and copies of {unflushed} writes that it has not flushed are kept in this \
                 process only",
                self.status.device
            )));
        }
        let refuse = |why: &str| Err(Response::Error(format!("{}: {why}", program.display())));
        if !program.is_absolute() {
            return refuse("not an absolute path");
        }
        match program.metadata() {
            Err(error) => refuse(&error.to_string()),
            Ok(meta) if !meta.is_file() || meta.permissions().mode() & 0o111 == 0 => {
                refuse("not a program")
            }
            Ok(_) => Ok(()),
        }
    }

    /// Lets go of the device, with nothing sent and unanswered and nothing acknowledged and
    /// unflushed as far as the target lets us within its time, and notes how far that was.
    pub(super) async fn leave(
        &mut self,
        device: Device,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> anyhow::Result<()> {
        let detect = self.config.detect.get();
        if let Some(task) = self.again.take() {
            task.abort();
        }
        if let Some(task) = self.probing.take() {
            task.abort();
        }
        for queue in &self.queues {
            send(queue, ToQueue::Leave(detect));
        }
        let deadline = Instant::now() + detect + QUEUE_GRACE;
        let mut quiet = true;
        while quiet && self.stopped < self.queues.len() {
            let session_pulse = pulse(&self.config);
            tokio::select! {
                Some(message) = from_queues.recv() => {
                    if let Err(error) = self.on_queue(message) {
                        tracing::warn!(%error, "on the way out");
                    }
                }
                event = next_event(&mut self.session, session_pulse, &self.queues) => self.on_event(event),
                () = tokio::time::sleep_until(deadline) => quiet = false,
            }
        }
        if quiet {
            self.queues.iter_mut().for_each(QueueHandle::join);
        } else {
            // The exec ends their threads, and then the driver sees that they are gone.
            tracing::error!(
                device = self.status.device,
                "queues do not let go; going on all the same"
            );
        }
        while let Ok(message) = from_queues.try_recv() {
            let _ = self.on_queue(message);
        }
        let flushed = quiet && self.flush_all(detect).await;
        let maybe_unflushed = self.status.volatile_cache && !flushed;
        if let Some(session) = self.session.take() {
            // No LOGOUT: the session goes on.
            session.admin.close();
        }
        self.note_with(maybe_unflushed);
        if device.holders() > 1 {
            tracing::error!(
                "something still holds the device's node: no other process can serve it"
            );
        }
        Ok(())
    }

    /// Has the target make durable what it acknowledged. Returns whether it did; no queue has a
    /// path any more.
    async fn flush_all(&mut self, within: Duration) -> bool {
        if self.durability.unflushed() == 0 {
            return true;
        }
        let account = self.account();
        let Some(session) = &mut self.session else { return false };
        let flushed = tokio::time::timeout(within, flush(session, &self.known.volume, &account));
        match flushed.await.context("it takes too long").flatten() {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    writes = self.durability.unflushed(),
                    "cannot flush before the hand-over"
                );
                false
            }
        }
    }
}
