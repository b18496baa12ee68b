//! The configuration of a target that runs, read again: what is different, and how the target gets
//! there, whole or not at all.
//!
//! Everything that can be refused is looked at before anything changes: the files, the stores of
//! new volumes, which are opened and locked, and what each change means for hosts that have the
//! volume open. What then fails all the same, as by a disk, is led back.

use std::sync::Arc;

use rblk_config::{Difference, VolumeChange, VolumeConfig};
use tokio::sync::mpsc;

use super::Request;
use super::ask::{ReloadReport, Response, stopping};
use super::orders::{asked, carry, open};
use super::reread::Reread;
use super::volumes::Change;

/// Replaces the whole table of hosts by that of the configuration as it is now. A configuration
/// that is refused changes nothing.
pub(super) async fn hosts(requests: &mpsc::Sender<Request>, reread: &Arc<Reread>) -> Response {
    let _turn = reread.turn().await;
    let config = match reread.read().await {
        Ok(config) => config,
        Err(error) => return Response::Error(format!("the hosts stay as they were: {error}")),
    };
    let hosts = config.hosts.clone();
    match asked(requests, |reply| Request::Hosts(hosts, reply)).await {
        Some(ended) => Response::Hosts(reread.report(&config.hosts, ended)),
        None => stopping(),
    }
}

/// Reads the configuration again, and changes everything that can change without a restart.
///
/// # Errors
/// Nothing has changed, for that reason.
pub(crate) async fn everything(
    requests: &mpsc::Sender<Request>,
    reread: &Arc<Reread>,
    dry_run: bool,
) -> Result<ReloadReport, String> {
    let _turn = reread.turn().await;
    let nothing = |error: String| format!("nothing was reloaded: {error}");
    let config = reread.read().await.map_err(nothing)?;
    let running = asked(requests, Request::Running).await;
    let running = running.ok_or_else(|| nothing("the target is stopping".to_owned()))?;
    let difference = Difference::between(&running, &config).map_err(|e| nothing(e.to_string()))?;
    let (changes, refused) = prepared(requests, reread, &difference).await;
    let mut report = ReloadReport {
        dry_run,
        difference,
        refused,
        access: reread.report(&config.hosts, Vec::new()),
    };
    if dry_run {
        return Ok(report);
    }
    if !report.refused.is_empty() {
        return Err(nothing(report.refused.join("; ")));
    }
    carry_all(requests, changes, &running.volumes).await.map_err(nothing)?;
    if !report.difference.hosts.is_empty() {
        let hosts = config.hosts;
        let ended = asked(requests, |reply| Request::Hosts(hosts, reply)).await;
        report.access.ended = ended.unwrap_or_default();
    }
    tracing::info!(
        volumes = report.difference.volumes.len(),
        hosts = ?report.difference.hosts,
        restart = report.difference.restart.len(),
        "the configuration was reloaded"
    );
    Ok(report)
}

/// The changes that lead to a configuration, with the stores of new volumes opened, in the order in
/// which they are made: what can be led back comes first. Also why it is refused.
async fn prepared(
    requests: &mpsc::Sender<Request>,
    reread: &Reread,
    difference: &Difference,
) -> (Vec<Change>, Vec<String>) {
    let (mut changes, mut removals, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    for change in &difference.volumes {
        match change {
            VolumeChange::Add { volume } => match open(reread.target(), volume.clone()).await {
                Ok(opened) => changes.push(Change::Add(volume.clone(), opened)),
                Err(error) => refused.push(error),
            },
            VolumeChange::Alter { volume, .. } => changes.push(Change::Become(volume.clone())),
            VolumeChange::Remove { name } => {
                removals.push(Change::Remove { name: name.clone(), force: false });
            }
        }
    }
    changes.extend(removals);
    let judged = changes.clone();
    match asked(requests, |reply| Request::Judge(judged, reply)).await {
        Some(faults) => refused.extend(faults),
        None => refused.push("the target is stopping".to_owned()),
    }
    (changes, refused)
}

/// Makes the changes one after the other. If one fails, the ones before it are led back.
async fn carry_all(
    requests: &mpsc::Sender<Request>,
    changes: Vec<Change>,
    before: &[VolumeConfig],
) -> Result<(), String> {
    let mut back: Vec<Change> = Vec::new();
    for change in changes {
        let undo = undo_of(&change, before);
        match carry(requests, change, false).await {
            Ok(_) => back.extend(undo),
            Err(error) => {
                for undo in back.into_iter().rev() {
                    if let Err(error) = carry(requests, undo, false).await {
                        tracing::error!(error, "a change of a volume cannot be led back");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// What undoes a change. A file that has become larger stays so. A volume that was removed had no
/// users, and its data is in its store: `volume add` serves it again.
fn undo_of(change: &Change, before: &[VolumeConfig]) -> Option<Change> {
    match change {
        Change::Add(volume, _) => Some(Change::Remove { name: volume.name.clone(), force: true }),
        Change::Become(volume) => {
            let old = before.iter().find(|old| old.name == volume.name)?;
            Some(Change::Become(VolumeConfig { size: volume.size, ..old.clone() }))
        }
        Change::Remove { .. } | Change::Resize { .. } | Change::Snapshot { .. } => None,
    }
}
