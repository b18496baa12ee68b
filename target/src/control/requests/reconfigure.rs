//! The configuration of a running target, read again: the differences, and their application, whole
//! or not at all.
//!
//! Everything that can be refused is checked before anything changes: the files, the stores of new
//! volumes, which are opened and locked, the table of hosts, and the effect of each change on hosts
//! that have the volume open. Then come the changes that take something from hosts: keys, rights,
//! writes. Then the other changes of volumes, and last those that give hosts more. So no host
//! reaches a new volume by a right that goes in the same edit. If a change of a volume fails all
//! the same, for example by a disk, it is led back with those before it. Keys, rights and writes
//! that hosts lost by then stay lost.

use std::collections::HashMap;
use std::sync::Arc;

use rblk_config::{
    Difference, HostConfig, TargetConfig, VolumeConfig, VolumeDifference, losers, narrowed,
};
use tokio::sync::mpsc;

use super::orders::{asked, open, send_change, store_faults, unfit};
use super::reread::{Reading, Reread};
use crate::control::ToControl;
use crate::control::core::{Hosts, VolumeChange};
use crate::control::volumes::change_files::ChangeFiles;
use crate::pool::opening::AwayVolume;
use rblk_operate::target::ask::{LimitsWish, ReloadReport, Response, STOPPING};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::store_fault::StoreFault;

/// Replaces the whole table of hosts by that of the configuration as it is now. A configuration
/// that is refused changes nothing. Does not wait for a change under way: a key may have to go at
/// once.
pub(in crate::control) async fn hosts(
    requests: &mpsc::Sender<ToControl>,
    reread: &Arc<Reread>,
) -> Response {
    let (config, reading) = match reread.read().await {
        Ok(read) => read,
        Err(error) => return Response::refused(format!("the hosts stay as they were: {error}")),
    };
    match let_in_only(requests, (config.hosts.clone(), reading)).await {
        Ok(ended) => Response::Hosts(reread.report(&config.hosts, ended)),
        Err(error) => Response::refused(format!("the hosts stay as they were: {error}")),
    }
}

/// Changes the limits of a host, as `host set` asks for. Returns its entry now.
///
/// # Errors
/// Nothing has changed, for that reason.
pub(in crate::control) async fn limit_host(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: String,
    limits: LimitsWish,
) -> Result<HostConfig, Refusal> {
    let _lock = reread.lock_changes().await;
    let answer = asked(requests, |reply| ToControl::LimitHost(name, limits, reply)).await;
    answer.unwrap_or_else(|| Err(STOPPING.into()))
}

/// Makes control let in these hosts and no others, unless it has those of a later reading. Returns
/// the hosts that lost sessions.
async fn let_in_only(
    requests: &mpsc::Sender<ToControl>,
    (hosts, reading): (Vec<HostConfig>, Reading),
) -> Result<Vec<String>, String> {
    let answer = asked(requests, |reply| ToControl::Hosts(hosts, reading, reply)).await;
    answer.unwrap_or_else(|| Err(STOPPING.to_owned()))
}

/// Reads the configuration again, and applies all changes that need no restart.
///
/// # Errors
/// Nothing has changed, for that reason.
pub(crate) async fn everything(
    requests: &mpsc::Sender<ToControl>,
    reread: &Arc<Reread>,
    dry_run: bool,
) -> Result<ReloadReport, String> {
    let _lock = reread.lock_changes().await;
    let nothing = |error: String| format!("nothing was reloaded: {error}");
    let (config, reading) = reread.read().await.map_err(nothing)?;
    let running = asked(requests, ToControl::Running).await;
    let running = running.ok_or_else(|| nothing(STOPPING.to_owned()))?;
    let difference = Difference::between(&running, &config).map_err(|e| nothing(e.to_string()))?;
    let faults = store_faults(requests).await.map_err(nothing)?;
    let PreparedReload { changes, mut refused, away } =
        prepared(requests, reread, &difference).await;
    refused.extend(unfit_changes(&changes, &running, &faults));
    refused.extend(Hosts::new(&config.hosts).err().map(|error| error.to_string()));
    let mut report = ReloadReport {
        dry_run,
        difference,
        refused,
        store_faults: faults.into_iter().collect(),
        access: reread.report(&config.hosts, Vec::new()),
    };
    if dry_run {
        return Ok(report);
    }
    if !report.refused.is_empty() {
        let still = still_let_in(&losers(&running.hosts, &config.hosts));
        return Err(nothing(report.refused.join("; ") + &still));
    }
    let changes = Ordered::new(changes, &report.difference);
    let (volumes, hosts) = (config.volumes, (config.hosts, reading));
    report.access.ended = carry_out(requests, changes, &running, hosts).await?;
    // No answer means that the target is stopping.
    let _ = asked(requests, |reply| ToControl::VolumesOfFiles(volumes, away, reply)).await;
    tracing::info!(
        volumes = report.difference.volumes.len(),
        hosts = ?report.difference.hosts,
        restart = report.difference.restart.len(),
        "the configuration was reloaded"
    );
    Ok(report)
}

/// Why the store faults of volumes forbid these changes.
fn unfit_changes(
    changes: &[(VolumeChange, ChangeFiles)],
    running: &TargetConfig,
    faults: &HashMap<String, StoreFault>,
) -> Vec<String> {
    let why = |(change, _): &(VolumeChange, ChangeFiles)| {
        let before = running.volumes.iter().find(|volume| volume.name == change.name())?;
        unfit(faults.get(change.name())?, change, before)
    };
    changes.iter().filter_map(why).collect()
}

/// Carries out the judged changes: narrowing ones first, widening ones last. Returns the hosts that
/// lost sessions.
async fn carry_out(
    requests: &mpsc::Sender<ToControl>,
    changes: Ordered,
    running: &TargetConfig,
    (hosts, reading): (Vec<HostConfig>, Reading),
) -> Result<Vec<String>, String> {
    let nothing = |error: String| format!("nothing was reloaded: {error}");
    let (left, mut ended) = (narrowed(&running.hosts, &hosts), Vec::new());
    let narrows = !losers(&running.hosts, &hosts).is_empty();
    if narrows {
        ended = let_in_only(requests, (left, reading)).await.map_err(nothing)?;
    }
    carry_all(requests, changes.0, &running.volumes).await.map_err(|error| match narrows {
        false => nothing(error),
        true => format!(
            "no volume was changed: {error}; the rights that the files take from hosts are taken, and the rights that \
             they give are not given"
        ),
    })?;
    if running.hosts != hosts {
        let more = let_in_only(requests, (hosts, reading)).await;
        ended.extend(more.map_err(|error| format!("only the volumes were reloaded: {error}"))?);
    }
    Ok(ended)
}

/// The note to a refusal when keys or rights should have gone.
fn still_let_in(losers: &[String]) -> String {
    match losers {
        [] => String::new(),
        losers => format!(
            "; keys and rights that the files take from {} are still valid: `rblk-target reload --hosts` takes them \
             now, whatever becomes of the rest",
            losers.join(", ")
        ),
    }
}

/// Changes in the order in which they are made: narrowing ones come first, and removals, which
/// cannot be led back, come last.
struct Ordered(Vec<(VolumeChange, ChangeFiles)>);

impl Ordered {
    fn new(changes: Vec<(VolumeChange, ChangeFiles)>, difference: &Difference) -> Self {
        let narrowing = difference.volumes.iter().filter(|change| change.narrows());
        let narrowing: Vec<&str> = narrowing.map(VolumeDifference::name).collect();
        let is_first = |(change, _): &(VolumeChange, ChangeFiles)| {
            matches!(change, VolumeChange::Become(_)) && narrowing.contains(&change.name())
        };
        let (mut first, rest): (Vec<_>, Vec<_>) = changes.into_iter().partition(is_first);
        first.extend(rest);
        Self(first)
    }
}

/// The changes that lead to a configuration.
struct PreparedReload {
    changes: Vec<(VolumeChange, ChangeFiles)>,
    /// The reasons to refuse it.
    refused: Vec<String>,
    /// The volumes of a group that this member does not get.
    away: Vec<AwayVolume>,
}

/// The changes that lead to a configuration, with the stores of new volumes opened, in the order in
/// which they are made: removals, which cannot be led back, come last.
async fn prepared(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    difference: &Difference,
) -> PreparedReload {
    let (mut changes, mut removals, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    let mut away = Vec::new();
    for change in &difference.volumes {
        match change {
            VolumeDifference::Add { volume } => match open(reread, volume.clone()).await {
                Ok(opened) => {
                    let addition = VolumeChange::Add(volume.clone());
                    changes.push((addition, ChangeFiles::of_new(opened)));
                }
                Err(one) if reread.member().is_some() && volume.image.is_some() => {
                    tracing::info!(volume = one.name, why = one.why, "the volume is not added");
                    away.push(one);
                }
                Err(one) => refused.push(one.why),
            },
            VolumeDifference::Alter { volume, .. } => {
                changes.push((VolumeChange::Become(volume.clone()), ChangeFiles::default()));
            }
            VolumeDifference::Remove { name } => {
                let (name, which) = (name.clone(), None);
                let removal = VolumeChange::Remove { name, which, force: false };
                removals.push((removal, ChangeFiles::default()));
            }
        }
    }
    changes.extend(removals);
    let judged = changes.clone();
    match asked(requests, |reply| ToControl::Judge(judged, reply)).await {
        Some(faults) => refused.extend(faults),
        None => refused.push(STOPPING.to_owned()),
    }
    PreparedReload { changes, refused, away }
}

/// Makes the changes one after the other. If one fails, the ones before it are led back.
async fn carry_all(
    requests: &mpsc::Sender<ToControl>,
    changes: Vec<(VolumeChange, ChangeFiles)>,
    before: &[VolumeConfig],
) -> Result<(), String> {
    let (mut back, mut gone): (Vec<VolumeChange>, Vec<String>) = (Vec::new(), Vec::new());
    for change in changes {
        let undo = undo_of(&change.0, before);
        let removed = change.0.is_removal().then(|| change.0.name().to_owned());
        match send_change(requests, change, false).await {
            Ok(_) => {
                back.extend(undo);
                gone.extend(removed);
            }
            Err(mut error) => {
                for undo in back.into_iter().rev() {
                    let undo = (undo, ChangeFiles::default());
                    if let Err(more) = send_change(requests, undo, false).await {
                        tracing::error!(error = more, "a change of a volume cannot be led back");
                        error += &format!("; a change before it cannot be undone: {more}");
                    }
                }
                if !gone.is_empty() {
                    error += &format!("; removed already: {}", gone.join(", "));
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// The change that undoes a change. A file that has become larger stays so. A volume that was
/// removed had no users, and its data is in its store: `volume add` serves it again.
fn undo_of(change: &VolumeChange, before: &[VolumeConfig]) -> Option<VolumeChange> {
    match change {
        VolumeChange::Add(volume) => {
            Some(VolumeChange::Remove { name: volume.name.clone(), which: None, force: true })
        }
        VolumeChange::Become(volume) => {
            let old = before.iter().find(|old| old.name == volume.name)?;
            Some(VolumeChange::Become(VolumeConfig { size: volume.size, ..old.clone() }))
        }
        VolumeChange::Remove { .. }
        | VolumeChange::Lose { .. }
        | VolumeChange::Yield { .. }
        | VolumeChange::Resize { .. }
        | VolumeChange::WriteBack { .. }
        | VolumeChange::Snapshot { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;

    /// The hosts of a configuration that changes with each reading.
    fn reread() -> Arc<Reread> {
        let read = AtomicU64::new(0);
        let name = rblk_protocol::Name::new("t").unwrap();
        Reread::new(&TargetConfig::default(), (name, true), move || {
            let time = read.fetch_add(1, Ordering::Relaxed) + 1;
            let hosts = vec![HostConfig::new(format!("read-{time}"), Vec::new(), Vec::new())];
            Ok(TargetConfig { hosts, ..TargetConfig::default() })
        })
    }

    #[test]
    fn hosts_are_reloaded_while_something_else_changes() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (requests, mut orders) = mpsc::channel(1);
            let reread = reread();
            let _lock = reread.lock_changes().await;
            for time in 1..=2 {
                let control = async {
                    let Some(ToControl::Hosts(read, reading, reply)) = orders.recv().await else {
                        panic!("no hosts");
                    };
                    let name = read[0].name.clone();
                    assert_eq!((name, reading), (format!("read-{time}"), Reading(time)));
                    reply.send(Ok(vec!["gone".to_owned()])).unwrap();
                };
                let both = async { tokio::join!(hosts(&requests, &reread), control).0 };
                let said = tokio::time::timeout(Duration::from_secs(20), both).await;
                let Response::Hosts(report) = said.expect("it waits for no turn") else {
                    panic!("no report");
                };
                assert_eq!(report.ended, ["gone"]);
            }
        });
    }
}
