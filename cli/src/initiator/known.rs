//! [`KnownMounts`]: the mounts of this host: those that answer, and dead ones.

use std::time::Duration;

use anyhow::Context;
use rblk_operate::mount::left::{self, LeftDisk, LeftMount};
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::status_of;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::not_there::NotMounted;
use rblk_operate::mount::run_dir::{must_be_readable, names};
use rblk_operate::{Output, said_once};
use tokio::runtime::Runtime;

use super::initiatord::initiatord;
use super::silent::Silent;
use crate::program::top::RATES_TIME;

/// Time for a mount to report its state.
pub(super) const STATUS_TIME: Duration = Duration::from_secs(2);

/// Refuses a name without a mount, living or dead.
pub(super) fn must_be_known(name: &str) -> anyhow::Result<()> {
    rblk_protocol::Name::new(name).with_context(|| format!("the name {name}"))?;
    must_be_readable()?;
    if names().iter().any(|known| known == name) {
        return Ok(());
    }
    Err(NotMounted { what: name.to_owned() }.into())
}

/// The users of the disks of mounts, for a table. The daemon looks once for all disks. If it
/// cannot look, each disk has the user `?`, and a warning names the reason.
pub(super) fn users(mounts: &[MountStatus], output: Output) -> impl Fn(&str) -> Option<String> {
    let disks: Vec<String> = mounts.iter().map(|mount| mount.device.clone()).collect();
    let asked = match disks.is_empty() {
        true => Ok(Vec::new()),
        false => initiatord().and_then(|daemon| left::users(&daemon, &disks)),
    };
    let found = asked.unwrap_or_else(|error| {
        let error = said_once(error.as_ref());
        output.aside(format_args!(
            "rblk-initiator: WARN the users of the disks are unknown: {error}"
        ));
        vec![Some("?".to_owned()); disks.len()]
    });
    let known: Vec<(String, Option<String>)> = disks.into_iter().zip(found).collect();
    move |device| known.iter().find(|(disk, _)| disk == device)?.1.clone()
}

pub(super) async fn status(name: &str) -> Option<MountStatus> {
    status_of(name, STATUS_TIME).await
}

/// The mounts that answer. With `rates`, they have measured rates; the first question takes a
/// second for that.
pub(super) fn living(runtime: &Runtime, rates: bool) -> Vec<MountStatus> {
    let ask_all = || -> Vec<MountStatus> {
        names().iter().filter_map(|name| runtime.block_on(status(name))).collect()
    };
    let mounts = ask_all();
    if rates && mounts.iter().any(measures) {
        std::thread::sleep(RATES_TIME);
        return ask_all();
    }
    mounts
}

/// Whether a mount is measuring its rates. An older process measures none.
fn measures(mount: &MountStatus) -> bool {
    mount.rates.is_none() && mount.state == "connected" && !mount.latency_by_queue.is_empty()
}

/// The mounts of this host.
pub(super) struct KnownMounts {
    /// The mounts that answer, and dead mounts with a device.
    pub(super) mounts: Vec<MountStatus>,
    /// The mounts that do not answer, with a line about each.
    pub(super) silent: Vec<Silent>,
    /// Disks without a note.
    pub(super) disks: Vec<LeftDisk>,
}

/// Every mount of this host, dead ones too, with a line about each mount that does not answer.
/// `rates` is the argument of [`living`]. With `disks`, disks without a note too.
pub(super) fn all_mounts(
    names: &[String],
    rates: bool,
    disks: bool,
) -> anyhow::Result<KnownMounts> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut mounts = living(&runtime, rates);
    let unanswered = |name: &&String| !mounts.iter().any(|mount| mount.name == **name);
    let unanswered: Vec<String> = names.iter().filter(unanswered).cloned().collect();
    let (silent, disks) = dead_mounts(&unanswered, &mut mounts, disks)?;
    mounts.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(KnownMounts { mounts, silent, disks })
}

/// A line about each mount that does not answer, and with `disks` the disks without a note. Adds
/// the mounts with a device to `mounts`.
pub(super) fn dead_mounts(
    names: &[String],
    mounts: &mut Vec<MountStatus>,
    disks: bool,
) -> anyhow::Result<(Vec<Silent>, Vec<LeftDisk>)> {
    let dead: Vec<String> =
        names.iter().filter(|name| !MountLock::is_held(name)).cloned().collect();
    let left = match dead.is_empty() && !disks {
        true => left::Leftovers::default(),
        false => left::look(&initiatord()?, &dead)?,
    };
    let mut found = left.mounts.into_iter();
    let silent = names.iter().filter_map(|name| match dead.contains(name) {
        true => of_dead(found.next()?, mounts),
        false => {
            let problem = format!("{name}: its process does not answer");
            Some(Silent::mount(name, "no answer", problem))
        }
    });
    let silent = silent.collect();
    Ok((silent, left.disks))
}

/// The line about a mount with a dead process. Adds the mount to `mounts` if it has a device.
fn of_dead(left: LeftMount, mounts: &mut Vec<MountStatus>) -> Option<Silent> {
    let LeftMount { name, found } = left;
    let silent = |state: &str, problem| Some(Silent::mount(&name, state, problem));
    let found = match found {
        Ok(found) => found,
        Err(error) => return silent("dead", format!("{name}: its process died; {error}")),
    };
    let word = found.word?;
    mounts.extend(found.note);
    match word.as_str() {
        "bad note" => silent(&word, found.note_fault?),
        "ending" | "no server" => silent(
            &word,
            format!(
                "{name}: its process died and requests wait; `rblk-initiator recover {name}` recovers it, \
                 `rblk-initiator umount --force {name}` fails them"
            ),
        ),
        _ => silent(
            &word,
            format!("{name}: its process died; `rblk-initiator umount {name}` clears what it left"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_daemon_the_users_of_disks_are_unknown_and_not_none() {
        // No daemon is beside the program of this test.
        assert!(!initiatord().unwrap().exists());
        let mounts = [MountStatus { device: "/dev/ublkb0".to_owned(), ..Default::default() }];
        let used_by = users(&mounts, Output::Table);
        assert_eq!(used_by("/dev/ublkb0").as_deref(), Some("?"));
        assert_eq!(used_by("/dev/ublkb1"), None);
    }
}
