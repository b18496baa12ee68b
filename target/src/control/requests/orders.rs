//! Orders from the control socket: changes of volumes, the end of sessions. One change at a time.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rblk_config::{ByteSize, Exit, VolumeConfig};
use tokio::sync::{mpsc, oneshot};

use super::file_work::with_files;
use super::reread::Reread;
use crate::control::ToControl;
use crate::control::core::VolumeChange;
use crate::control::volumes::change_files::ChangeFiles;
use crate::control::volumes::wanted::anew;
use crate::control::volumes::{ChangeOutcome, ChangedVolume};
use crate::pool::opening::{AwayVolume, OpenedVolume, open_one};
use rblk_operate::target::ask::{Response, VolumeEdit, VolumeReport, stopping};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::store_fault::{StoreFault, StoreFaultKind};

/// How long a client waits for a volume that another member is to serve, if the cluster does not
/// answer. Each other wait is shorter.
const MOVE_DEADLINE: Duration = Duration::from_secs(75);
/// Time between two looks whether a volume is still in use.
const LOOK: Duration = Duration::from_millis(100);

/// Serves another volume.
pub(in crate::control) async fn add(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    volume: VolumeConfig,
) -> Result<VolumeReport, Refusal> {
    let _lock = reread.lock_changes().await;
    let name = volume.name.clone();
    // Before its store is opened: this target may hold it.
    if running(requests, &name).await.is_ok() {
        return Err(Refusal::served_already(&name));
    }
    let opened = open(reread, volume.clone()).await.map_err(|away| away.why)?;
    let contradiction = opened.contradiction.map(|found| found.to_string());
    let addition = (VolumeChange::Add(volume), ChangeFiles::of_new(opened));
    let report = change(requests, addition).await?;
    Ok(VolumeReport { contradiction, ..report })
}

/// Removes a volume; with `force` also if hosts have it open.
pub(in crate::control) async fn remove(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: String,
    force: bool,
) -> Result<VolumeReport, Refusal> {
    let _lock = reread.lock_changes().await;
    change_if_store_fit(requests, VolumeChange::Remove { name, which: None, force }).await
}

/// Hands a volume over to another member of the group.
pub(in crate::control) async fn hand_over(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: String,
) -> Response {
    let _lock = reread.lock_changes().await;
    match asked(requests, |reply| ToControl::HandOver(name, reply)).await {
        None => stopping(),
        Some(Ok(())) => Response::Done,
        Some(Err(why)) => Response::refused(why),
    }
}

/// Moves a volume to a member of the group.
pub(in crate::control) async fn move_to(
    requests: &mpsc::Sender<ToControl>,
    name: String,
    to: String,
) -> Response {
    let late = format!(
        "{name} is not served by member `{to}` within {} s: `rblk-target group status` says who has it",
        MOVE_DEADLINE.as_secs()
    );
    let moved = asked(requests, |reply| ToControl::MoveTo(name, to, reply));
    match tokio::time::timeout(MOVE_DEADLINE, moved).await {
        Err(_) => Response::refused(late),
        Ok(None) => stopping(),
        Ok(Some(Ok(()))) => Response::Done,
        Ok(Some(Err(why))) => Response::refused(why),
    }
}

/// Gives a volume another size; none: that of its file or device.
pub(in crate::control) async fn resize(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: String,
    size: Option<ByteSize>,
    shrink: bool,
) -> Result<VolumeReport, Refusal> {
    let _lock = reread.lock_changes().await;
    change_if_store_fit(requests, VolumeChange::Resize { name, size, shrink }).await
}

/// Gives a volume other values.
pub(in crate::control) async fn set(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: String,
    edit: VolumeEdit,
) -> Result<VolumeReport, Refusal> {
    let _lock = reread.lock_changes().await;
    let config = edit.on(&running(requests, &name).await?);
    change_if_store_fit(requests, VolumeChange::Become(config)).await
}

/// Removes a volume as soon as no host has it open. Meanwhile no other host may open it. `gone`
/// ends when the client is gone: then the volume stays. A removal that has begun goes to its end. A
/// later volume of the same name is another one, and stays.
pub(in crate::control) async fn remove_when_unused(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: String,
    gone: impl Future<Output = io::Result<u8>>,
) -> Response {
    tokio::pin!(gone);
    let given_up = || Response::refused("the command that asked for it has ended");
    let close = |which, close| {
        let name = name.clone();
        asked(requests, move |reply| ToControl::CloseToOthers { name, which, close, reply })
    };
    let (mut which, mut failure) = (None, None);
    let response = loop {
        let users = match close(which, true).await {
            None => return stopping(),
            Some(None) if which.is_some() => return Response::refused(anew(&name)),
            Some(None) => return Response::refused(Refusal::no_volume(&name)),
            Some(Some((index, users))) => {
                which = Some(index);
                users
            }
        };
        if users.is_empty() {
            if let Some(failure) = failure {
                break Response::Error(failure);
            }
            let _lock = tokio::select! {
                lock = reread.lock_changes() => lock,
                _ = &mut gone => break given_up(),
            };
            let removal = VolumeChange::Remove { name: name.clone(), which, force: false };
            match change_if_store_fit(requests, removal).await {
                Ok(report) => return Response::Volume(Box::new(report)),
                // A host may have come back since the look.
                Err(error) => failure = Some(error),
            }
            continue;
        }
        failure = None;
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            _ = &mut gone => break given_up(),
        }
    };
    let _ = close(which, false).await;
    response
}

/// Opens the store of a volume. An error says whether another member of the group serves it.
pub(in crate::control) async fn open(
    reread: &Reread,
    config: VolumeConfig,
) -> Result<Arc<OpenedVolume>, AwayVolume> {
    let (target, member) = (reread.target(), reread.member().cloned());
    let name = config.name.clone();
    let late = || format!("the file or device of {name} was not opened");
    let place =
        config.path.as_deref().map_or(format!("volume {name}"), |path| path.display().to_string());
    let open = move || {
        let opened = open_one(0, &config, (&target, member.as_ref()));
        Ok(opened.map(Arc::new).map_err(|error| AwayVolume::unopened(&config.name, &error)))
    };
    let opened = with_files(place, late, open).await;
    opened.unwrap_or_else(|why| Err(AwayVolume::new(&name, why)))
}

/// Asks control, and waits for the answer. `None`: the target is stopping.
pub(crate) async fn asked<T>(
    requests: &mpsc::Sender<ToControl>,
    request: impl FnOnce(oneshot::Sender<T>) -> ToControl,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    requests.send(request(reply)).await.ok()?;
    answer.await.ok()
}

/// Carries out a change, with the open files that it works with. `alone`: see
/// [`ToControl::Change`].
pub(in crate::control) async fn send_change(
    requests: &mpsc::Sender<ToControl>,
    (change, files): (VolumeChange, ChangeFiles),
    alone: bool,
) -> ChangeOutcome {
    let change = |reply| ToControl::Change { change: Box::new(change), files, alone, reply };
    let outcome = asked(requests, change).await;
    outcome.unwrap_or_else(|| Err("the target is stopping".to_owned()))
}

/// Carries out a change that is no part of a reload.
pub(in crate::control) async fn change(
    requests: &mpsc::Sender<ToControl>,
    change: (VolumeChange, ChangeFiles),
) -> Result<VolumeReport, String> {
    let name = change.0.name().to_owned();
    let ChangedVolume { config, bytes, given_up } = send_change(requests, change, true).await?;
    let (store_fault, contradiction) = (None, None);
    Ok(VolumeReport {
        name,
        volume: config,
        size_bytes: bytes,
        given_up,
        store_fault,
        contradiction,
    })
}

/// The faults of the stores of volumes now, by name.
pub(in crate::control) async fn store_faults(
    requests: &mpsc::Sender<ToControl>,
) -> Result<HashMap<String, StoreFault>, String> {
    let faults = asked(requests, ToControl::StoreFaults).await;
    faults.ok_or_else(|| "the target is stopping".to_owned())
}

/// Carries out a change that is no part of a reload, if the store of the volume is fit for it.
async fn change_if_store_fit(
    requests: &mpsc::Sender<ToControl>,
    wanted: VolumeChange,
) -> Result<VolumeReport, Refusal> {
    let before = running(requests, wanted.name()).await?;
    let fault = store_faults(requests).await?.remove(wanted.name());
    let Some(fault) = fault else {
        return Ok(change(requests, (wanted, ChangeFiles::default())).await?);
    };
    if let Some(why) = unfit(&fault, &wanted, &before) {
        return Err(why.into());
    }
    let report = change(requests, (wanted, ChangeFiles::default())).await?;
    Ok(VolumeReport { store_fault: Some(fault), ..report })
}

/// Why a volume with a faulty store does not take this change. `before` is its configuration now.
pub(in crate::control) fn unfit(
    fault: &StoreFault,
    wanted: &VolumeChange,
    before: &VolumeConfig,
) -> Option<String> {
    let name = &before.name;
    match wanted {
        VolumeChange::Remove { force: false, .. } if fault.ends_with_target => Some(format!(
            "{name} is not removed, since its data would be gone: {fault}. `volume remove {name} --force` does it \
             all the same"
        )),
        VolumeChange::Resize { .. } if fault.is_astray() => {
            Some(format!("the size of {name} does not change: {fault}"))
        }
        VolumeChange::Become(config) if fault.is_astray() && config.size != before.size => {
            Some(format!("the size of {name} does not change: {fault}"))
        }
        VolumeChange::Become(config)
            if fault.kind == StoreFaultKind::ReadOnly && before.read_only && !config.read_only =>
        {
            Some(format!("{name} stays read-only: {fault}"))
        }
        _ => None,
    }
}

async fn running(requests: &mpsc::Sender<ToControl>, name: &str) -> Result<VolumeConfig, Refusal> {
    let running = asked(requests, ToControl::Running).await.ok_or("the target is stopping")?;
    let config = running.volumes.into_iter().find(|volume| volume.name == name);
    config.ok_or_else(|| Refusal::no_volume(name))
}

/// The configuration that the target runs with.
pub(in crate::control) async fn dump(requests: &mpsc::Sender<ToControl>) -> Response {
    let Some(running) = asked(requests, ToControl::Running).await else { return stopping() };
    running.dump().map_or_else(|error| Response::refused(error.to_string()), Response::Dump)
}

/// Ends sessions.
pub(in crate::control) async fn kick(
    requests: &mpsc::Sender<ToControl>,
    session: String,
) -> Response {
    let named = session.clone();
    match asked(requests, |reply| ToControl::Kick(session, reply)).await {
        None => stopping(),
        Some(Err(unclear)) => Response::Error(Refusal::new(Exit::Usage, unclear)),
        Some(Ok(ended)) if ended.is_empty() => Response::Error(Refusal::no_such_thing(format!(
            "no session is of {named}; `rblk-target session list` shows all"
        ))),
        Some(Ok(ended)) => Response::Kicked(ended),
    }
}
