//! [`UnmountProgress`]: the end of a served mount: an unmount in good order or by force, or the
//! hand-over to another program.
//!
//! In good order the page cache is written back first, while the mount goes on: the driver fails
//! requests after the stop, and a write-back takes as long as the target needs. A loss after which
//! every FLUSH fails (`on_loss`) does not keep a disk from being unmounted: an unmount is how its
//! users recover from the loss.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rblk_operate::said_once;

use super::device::write_back::{IfUsed, Left, WrittenBack, elsewhere};
use super::mounted::Mount;
use super::socket::Asked;
use super::upgrade;
use crate::volume::task::{self, Running};
use rblk_operate::mount::mount_ask::{Ask, Response};

/// Time that an unmount waits for a lost target.
const RECONNECT_WAIT: Duration = Duration::from_secs(2);
/// Time for the write-back while a command waits for the answer; a little less than the command
/// waits.
const SYNC_ASKED: Duration = Duration::from_secs(55);
/// Time for the write-back by force: the command has its answer within 5 s.
const SYNC_FORCED: Duration = Duration::from_secs(3);
/// Time for the write-back after a signal to end.
const SYNC_TERMINATED: Duration = Duration::from_secs(80);

/// The log line for an unmount that overtakes another.
const CUT_SHORT: &str =
    "the disk goes before its page cache is written back, and unwritten data is lost";

/// The end of a served mount.
#[derive(Debug)]
pub(super) enum MountEnd {
    Unmount { force: bool },
    HandOver(PathBuf),
}

/// The progress of the end.
#[derive(Debug, Default)]
pub(super) struct UnmountProgress {
    // The request that is answered when the mount has ended.
    pending: Option<Asked>,
    // The write-back before the unmount.
    syncing: Running<WrittenBack>,
    // The disk is removed even if the write-back fails.
    forced: bool,
    // An unmount that waits for a lost target, with its deadline.
    waiting: Option<WaitingUnmount>,
    // The time of the first signal to end.
    told: Option<Instant>,
}

#[derive(Debug)]
struct WaitingUnmount {
    // `None` after a signal to end.
    request: Option<Asked>,
    until: Instant,
}

impl UnmountProgress {
    /// An unmount with an endless write-back.
    #[cfg(test)]
    pub(super) fn writing_back(pending: Option<Asked>, forced: bool) -> Self {
        let syncing = Some(tokio::spawn(std::future::pending()));
        Self { pending, syncing, forced, ..Self::default() }
    }

    /// An unmount in good order is under way.
    fn has_begun(&self) -> bool {
        self.syncing.is_some() || self.waiting.is_some()
    }

    /// The end of the wait for a lost target, if there is one: call [`Self::go_on`] then.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|waiting| waiting.until)
    }

    /// The result of the write-back, for [`Self::on_synced`]. Cancel safe.
    pub(super) async fn synced(&mut self) -> anyhow::Result<WrittenBack> {
        task::next(&mut self.syncing).await
    }

    /// A request of the mount's socket.
    pub(super) fn on_ask(&mut self, request: Asked, mount: &mut Mount) -> Option<MountEnd> {
        let response = match &request.ask {
            Ask::Status => Response::Status(Box::new(mount.status())),
            Ask::Reload { target_keys } => mount.reload_keys(target_keys),
            Ask::Unmount { force: false } | Ask::Upgrade { .. } if self.has_begun() => {
                Response::Busy(format!("{} is being unmounted", mount.disk()))
            }
            Ask::Upgrade { program } => match upgrade::refusal(mount, program) {
                None => {
                    let end = MountEnd::HandOver(program.clone());
                    self.pending = Some(request);
                    return Some(end);
                }
                Some(response) => response,
            },
            Ask::Unmount { force: true } => {
                let has_begun = self.has_begun();
                self.pending = Some(request);
                if has_begun {
                    let device = mount.disk();
                    tracing::warn!(device, "--force: {CUT_SHORT}");
                }
                if has_begun || mount.volume().link().is_over() || mount.volume().waits_for_target()
                {
                    return Some(MountEnd::Unmount { force: true });
                }
                self.forced = true;
                self.write_back(mount, IfUsed::Sync, SYNC_FORCED);
                return None;
            }
            Ask::Unmount { force: false } => {
                self.wait(Some(request));
                return None;
            }
        };
        let _ = request.reply.send(response);
        None
    }

    /// Handles a signal to end: the second signal ends at once. The first one joins the unmount of
    /// a command, if one is under way, and ends even if that unmount is refused.
    pub(super) fn on_terminate(&mut self, device: &str) -> Option<MountEnd> {
        if self.told.is_some() {
            tracing::warn!(device, "told to end a second time: {CUT_SHORT}");
            return Some(MountEnd::Unmount { force: true });
        }
        self.told = Some(Instant::now());
        if !self.has_begun() {
            self.wait(None);
        }
        None
    }

    /// Starts an unmount in good order. A lost target may be back in a moment: right after a
    /// recovery, it is.
    fn wait(&mut self, request: Option<Asked>) {
        self.waiting = Some(WaitingUnmount { request, until: Instant::now() + RECONNECT_WAIT });
    }

    /// Continues an unmount that waits for a lost target. After the deadline a request is refused;
    /// without one, this process has to end.
    pub(super) fn go_on(&mut self, mount: &Mount) -> Option<MountEnd> {
        let WaitingUnmount { request, until } = self.waiting.take()?;
        if !mount.volume().waits_for_target() {
            self.pending = request;
            return self.begin_unmount(mount);
        }
        if Instant::now() < until {
            self.waiting = Some(WaitingUnmount { request, until });
            return None;
        }
        if let Some(request) = request {
            let _ = request.reply.send(Response::Busy(format!(
                "{}: the target is not connected, and requests may wait for it; --force fails them",
                mount.disk()
            )));
        }
        self.told.map(|_| MountEnd::Unmount { force: true })
    }

    /// Starts the write-back. A request is refused if the disk is in use; without one, this process
    /// ends all the same.
    fn begin_unmount(&mut self, mount: &Mount) -> Option<MountEnd> {
        match (mount.volume().link().is_over(), self.pending.is_some()) {
            (false, true) => self.write_back(mount, IfUsed::Refuse, SYNC_ASKED),
            (false, false) => self.write_back(mount, IfUsed::Sync, self.time_left()),
            // Every write has failed for some time, and will fail. The users must let go all the
            // same.
            (true, true) => self.write_back(mount, IfUsed::OnlyLook, SYNC_ASKED),
            (true, false) => return Some(MountEnd::Unmount { force: true }),
        }
        None
    }

    /// The rest of the time for the write-back after a signal to end. The write-back of a command
    /// may have used some.
    fn time_left(&self) -> Duration {
        let passed = self.told.map(|told| told.elapsed()).unwrap_or_default();
        SYNC_TERMINATED.saturating_sub(passed)
    }

    fn write_back(&mut self, mount: &Mount, if_used: IfUsed, within: Duration) {
        let disk = mount.disk().to_owned();
        let written = tokio::task::spawn_blocking(move || elsewhere(&disk, if_used, within));
        self.syncing = Some(tokio::spawn(async move { written.await? }));
    }

    /// Handles the end of the write-back. After a failure, the command gets the reply, and the
    /// mount goes on, unless it has to end.
    pub(super) fn on_synced(
        &mut self,
        result: anyhow::Result<WrittenBack>,
        mount: &Mount,
    ) -> Option<MountEnd> {
        let device = mount.disk();
        let why = match result {
            Ok(WrittenBack::Done(left)) => {
                say_left(device, &left);
                return Some(MountEnd::Unmount {
                    force: self.forced || mount.volume().link().is_over(),
                });
            }
            Ok(WrittenBack::Unflushed(errno))
                if mount.volume().durability().fails_every_flush() =>
            {
                tracing::warn!(
                    device,
                    errno,
                    "lost: acknowledged writes may be lost, so the FLUSH of the unmount failed, too; every page is \
                     written, and the unmount goes on"
                );
                return Some(MountEnd::Unmount { force: self.forced });
            }
            Ok(WrittenBack::InUse(user)) => {
                let text = format!("{device} is in use: {user}");
                return self.stay_or_end(Response::Busy(text));
            }
            Ok(WrittenBack::Unflushed(errno)) => {
                said_once(&std::io::Error::from_raw_os_error(errno))
            }
            Err(error) => said_once(error.as_ref()),
        };
        let text = format!("{device}: writing back the page cache: {why}; {}", self.consequence());
        tracing::error!("{text}");
        self.stay_or_end(Response::Error(text))
    }

    /// The consequence of a failed write-back.
    fn consequence(&self) -> &'static str {
        match (self.forced, self.pending.is_some(), self.told.is_some()) {
            (true, ..) => "the disk goes by force, and unwritten data is lost",
            (false, true, false) => {
                "it stays mounted, --force gives up the data that cannot be written"
            }
            (false, true, true) => "this process was told to end, and tries once more",
            (false, false, _) => "this process ends, and unwritten data is lost",
        }
    }

    /// The write-back of an unmount was refused or failed. The command gets the reply, and the
    /// mount goes on. After a signal to end, the mount begins an unmount that users of the disk
    /// cannot stop.
    fn stay_or_end(&mut self, response: Response) -> Option<MountEnd> {
        if self.forced {
            return Some(MountEnd::Unmount { force: true });
        }
        // Without a command, no user can decide.
        let Some(request) = self.pending.take() else {
            return Some(MountEnd::Unmount { force: true });
        };
        let _ = request.reply.send(response);
        if self.told.is_some() {
            self.wait(None);
        }
        None
    }

    /// Answers the waiting request. Returns whether there was one.
    pub(super) fn answer(self, response: Response) -> bool {
        // An error means that the command no longer waits.
        self.pending.map(|pending| pending.reply.send(response)).is_some()
    }
}

/// Logs the leftovers of a removed disk that may still be in use.
fn say_left(device: &str, left: &Left) {
    let in_use = match &left.used {
        Some(used) => format!("ended while in use: {used}"),
        None => "ended".to_owned(),
    };
    match &left.unsynced {
        Some(why) => tracing::error!(
            device,
            "{in_use}; unwritten data of a file system on it may be lost, because the sync failed: {why}"
        ),
        None if left.used.is_some() => {
            tracing::warn!(device, "{in_use}; all data written until now is kept");
        }
        None => {}
    }
}
