//! [`Ending`]: how the serving of a mount comes to its end: an unmount in good order or by force,
//! or the hand-over to another program.
//!
//! In good order the page cache is written back first, while the mount goes on as before. The
//! driver fails what comes after the stop, and a write-back may take as long as the target does. A
//! loss after which every FLUSH fails (`on_loss`) does not keep a disk from being unmounted: an
//! unmount is how its users recover from the loss.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rblk_config::said_once;

use super::mounted::Mount;
use super::socket::{Ask, Asked, Response};
use super::task::{self, Running};
use super::upgrade;
use super::write_back::{IfUsed, WrittenBack, elsewhere};

/// How long an unmount waits for a lost target to be back.
const RECONNECT_WAIT: Duration = Duration::from_secs(2);
/// Time for the write-back when a command waits for the answer; a little less than it waits.
const SYNC_ASKED: Duration = Duration::from_secs(55);
/// Time for the write-back by force: the command has its answer within 5 s.
const SYNC_FORCED: Duration = Duration::from_secs(3);
/// Time for the write-back when this process is told to end.
const SYNC_TERMINATED: Duration = Duration::from_secs(80);

/// How a mount stops being served.
#[derive(Debug)]
pub(super) enum End {
    Unmount { force: bool },
    HandOver(PathBuf),
}

/// What is under way on the way to the end.
#[derive(Debug, Default)]
pub(super) struct Ending {
    // The request that is answered when the mount has ended.
    pending: Option<Asked>,
    // The write-back before the unmount.
    syncing: Running<WrittenBack>,
    // Whatever comes of the write-back, the disk goes.
    forced: bool,
    // An unmount that waits for a lost target, and until when.
    waiting: Option<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    // `None` if this process was told to end.
    request: Option<Asked>,
    until: Instant,
}

impl Ending {
    /// An unmount in good order is under way.
    fn has_begun(&self) -> bool {
        self.syncing.is_some() || self.waiting.is_some()
    }

    /// When the wait for a lost target ends, if there is one: call [`Self::go_on`] then.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|waiting| waiting.until)
    }

    /// The result of the write-back, for [`Self::on_synced`]. Cancel safe.
    pub(super) async fn synced(&mut self) -> anyhow::Result<WrittenBack> {
        task::next(&mut self.syncing).await
    }

    /// A request of the mount's socket.
    pub(super) fn on_ask(&mut self, request: Asked, mount: &mut Mount) -> Option<End> {
        let response = match &request.ask {
            Ask::Status => Response::Status(Box::new(mount.status())),
            Ask::Reload { target_keys } => mount.reload_keys(target_keys),
            Ask::Unmount { force: false } | Ask::Upgrade { .. } if self.has_begun() => {
                Response::Busy(format!("{} is being unmounted", mount.disk()))
            }
            Ask::Upgrade { program } => match upgrade::refusal(mount, program) {
                None => {
                    let end = End::HandOver(program.clone());
                    self.pending = Some(request);
                    return Some(end);
                }
                Some(response) => response,
            },
            Ask::Unmount { force: true } => {
                let has_begun = self.has_begun();
                self.pending = Some(request);
                if has_begun || mount.link().is_over() || mount.waits_for_target() {
                    return Some(End::Unmount { force: true });
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

    /// This process is told to end: the second time, at once.
    pub(super) fn on_terminate(&mut self) -> Option<End> {
        if self.has_begun() {
            return Some(End::Unmount { force: true });
        }
        self.wait(None);
        None
    }

    /// Begins an unmount in good order. A lost target may be back in a moment: right after a
    /// recovery, it is.
    fn wait(&mut self, request: Option<Asked>) {
        self.waiting = Some(Waiting { request, until: Instant::now() + RECONNECT_WAIT });
    }

    /// Goes on with an unmount that waits for a lost target. When the time is over a request is
    /// refused; without one, this process has to end.
    pub(super) fn go_on(&mut self, mount: &Mount) -> Option<End> {
        let Waiting { request, until } = self.waiting.take()?;
        if !mount.waits_for_target() {
            self.pending = request;
            return self.begin_unmount(mount);
        }
        if Instant::now() < until {
            self.waiting = Some(Waiting { request, until });
            return None;
        }
        let Some(request) = request else { return Some(End::Unmount { force: true }) };
        let _ = request.reply.send(Response::Busy(format!(
            "{}: the target is not connected, and requests may wait for it; --force fails them",
            mount.disk()
        )));
        None
    }

    /// Begins the write-back. A request is refused if the disk is in use; without one, this process
    /// ends all the same.
    fn begin_unmount(&mut self, mount: &Mount) -> Option<End> {
        match (mount.link().is_over(), self.pending.is_some()) {
            (false, true) => self.write_back(mount, IfUsed::Refuse, SYNC_ASKED),
            (false, false) => self.write_back(mount, IfUsed::Sync, SYNC_TERMINATED),
            // Every write has failed for some time, and fails. Its users must let go all the same.
            (true, true) => self.write_back(mount, IfUsed::OnlyLook, SYNC_ASKED),
            (true, false) => return Some(End::Unmount { force: true }),
        }
        None
    }

    fn write_back(&mut self, mount: &Mount, if_used: IfUsed, within: Duration) {
        let disk = mount.disk().to_owned();
        let written = tokio::task::spawn_blocking(move || elsewhere(&disk, if_used, within));
        self.syncing = Some(tokio::spawn(async move { written.await? }));
    }

    /// The page cache is written back, or is not. In the second case the request is told, and the
    /// mount goes on.
    pub(super) fn on_synced(
        &mut self,
        result: anyhow::Result<WrittenBack>,
        mount: &Mount,
    ) -> Option<End> {
        let device = mount.disk();
        if self.forced {
            return Some(End::Unmount { force: true });
        }
        let response = match result {
            Ok(WrittenBack::Done(left)) => {
                if let Some(left) = left {
                    tracing::warn!(
                        device,
                        "ended while in use: {left}; what was written until now is kept"
                    );
                }
                return Some(End::Unmount { force: mount.link().is_over() });
            }
            Ok(WrittenBack::Unflushed(errno)) if mount.durability().fails_every_flush() => {
                tracing::warn!(
                    device,
                    errno,
                    "lost: acknowledged writes may be lost, so the FLUSH of the unmount failed, too; every page is \
                     written, and the unmount goes on"
                );
                return Some(End::Unmount { force: false });
            }
            Ok(WrittenBack::Unflushed(errno)) => {
                failed(device, &std::io::Error::from_raw_os_error(errno).into())
            }
            Ok(WrittenBack::InUse(user)) => Response::Busy(format!("{device} is in use: {user}")),
            Err(error) => failed(device, &error),
        };
        match self.pending.take() {
            Some(request) => {
                let _ = request.reply.send(response);
                None
            }
            // This process has to end, and there is no command that could decide.
            None => Some(End::Unmount { force: true }),
        }
    }

    /// Answers the request that waits for the end. Returns whether there was one.
    pub(super) fn answer(self, response: Response) -> bool {
        // An error means that the command does not wait any more.
        self.pending.map(|pending| pending.reply.send(response)).is_some()
    }
}

fn failed(device: &str, error: &anyhow::Error) -> Response {
    let text = format!(
        "{device}: writing back the page cache: {}; it stays mounted, --force gives up what cannot \
         be written",
        said_once(error.as_ref())
    );
    tracing::error!("{text}");
    Response::Error(text)
}
