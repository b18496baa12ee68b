//! The upgrade of a target: another program takes the place of this one, and mounts notice nothing
//! but a pause.
//!
//! ```text
//! asked        is it allowed (predecessor.rs)?   ask the other program   write dirty blocks back
//! begun        no new connections, mounts get the event, and leave (core/draining.rs)
//! all left     poll groups stop, everything is durable: `Departure` goes to `serve`, which becomes
//!              the other program
//! new program  `Took`: the mounts that shall come back, and those that are back
//! ```
//!
//! A refusal before the beginning leaves everything as it was.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rblk_config::TargetConfig;
use rblk_protocol::Name;
use tokio::sync::mpsc;

use super::file_work::{self, with_files};
use super::orders::{asked, send_change};
use super::predecessor::{Agreed, Predecessor};
use super::remembered::Remembered;
use super::reread::Reread;
use crate::control::core::{Core, VolumeChange};
use crate::control::groups::Groups;
use crate::control::hand_over::{Checked, ClockMoment, FORMS, HandOver, Leaves, Mounted};
use crate::control::observe::event_log::{EventLog, name_of};
use crate::control::peers::session::Session;
use crate::control::persist::Persister;
use crate::control::volumes::Volumes;
use crate::control::volumes::change_files::ChangeFiles;
use crate::control::{Control, Description, ToControl};
use crate::memory::demand::Demand;
use crate::store::OpenStore;
use crate::volume::{Placement, Volume};
use rblk_operate::target::ask::{Response, STOPPING, stopping};
use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_operate::target::status::UpgradeStatus;

/// The things that a run leaves to the program that follows it.
#[derive(Debug)]
pub(crate) struct Departure {
    /// The other program.
    pub program: PathBuf,
    /// The message to it.
    pub note: HandOver,
    /// The open files for it, and the configurations.
    pub leaves: Leaves,
}

/// An upgrade that has begun.
#[derive(Debug)]
struct BegunUpgrade {
    agreed: Agreed,
    told: ClockMoment,
    mounts: Vec<Mounted>,
    // Commands that had no reply until then.
    abandoned: u64,
}

/// The take-over by this program.
#[derive(Debug)]
struct TakenOver {
    note: HandOver,
    ready: ClockMoment,
    // By mount.
    back: Vec<bool>,
    last_back: Option<ClockMoment>,
    // The end of the wait for mounts that are away.
    until: Instant,
    is_over: bool,
}

/// The upgrades that a run takes part in. See the module.
#[derive(Debug, Default)]
pub(in crate::control) struct Upgrades {
    begun: Option<BegunUpgrade>,
    // Until this run is ready.
    inherited: Option<HandOver>,
    took: Option<TakenOver>,
}

impl Upgrades {
    /// The upgrades of a run that took over from the program that wrote the note.
    pub(in crate::control) fn after(note: Option<HandOver>) -> Self {
        Self { inherited: note, ..Self::default() }
    }

    /// Mounts can connect, and are waited for until `until`.
    pub(in crate::control) fn ready(&mut self, until: Instant) {
        self.took = self.inherited.take().map(|note| TakenOver {
            back: vec![false; note.mounts.len()],
            ready: ClockMoment::now(),
            last_back: None,
            until,
            is_over: false,
            note,
        });
    }

    /// Whether a mount shall come back and is away.
    pub(in crate::control) fn is_waiting(&self) -> bool {
        self.took.as_ref().is_some_and(|took| !took.is_over && took.back.contains(&false))
    }

    /// The upgrade as `status` shows it.
    pub(in crate::control) fn status(&self) -> Option<UpgradeStatus> {
        let TakenOver { note, ready, back, last_back, .. } = self.took.as_ref()?;
        let millis =
            |at: ClockMoment| u64::try_from(at.since(note.told).as_millis()).unwrap_or(u64::MAX);
        let away = note.mounts.iter().zip(back).filter(|(_, back)| !**back);
        let away: Vec<String> = away.map(|(mount, _)| mount.host.clone()).collect();
        Some(UpgradeStatus {
            from_version: note.version.clone(),
            failed: note.failed.clone(),
            ready_ms: millis(*ready),
            pause_ms: away.is_empty().then(|| millis(last_back.unwrap_or(*ready))),
            mounts: back.len(),
            back: back.len() - away.len(),
            away,
            stayed: note.stayed,
            sent_again: note.unanswered,
            clean: note.clean,
        })
    }

    /// Begins an upgrade: another program takes the place of this one as soon as the mounts have
    /// left.
    pub(in crate::control) fn begin(&mut self, agreed: Agreed, core: &mut Core, groups: &Groups) {
        if core.is_draining() {
            return;
        }
        tracing::info!(program = %agreed.program.display(), "another program takes over");
        let (mounts, abandoned) = (mounts(core), abandoned(core, groups));
        self.begun = Some(BegunUpgrade { agreed, told: ClockMoment::now(), mounts, abandoned });
        core.drain_for_upgrade(Instant::now());
    }

    /// The things that this run leaves to another program, if it makes room for one. The poll
    /// groups have stopped. `records` of it is empty: the records are written last.
    pub(in crate::control) fn departure(
        &mut self,
        name: &Name,
        (core, groups): (&Core, &Groups),
        (running, volumes): (&TargetConfig, &Volumes),
    ) -> Option<Departure> {
        let begun = self.begun.take().filter(|_| core.is_upgrading())?;
        let note = HandOver {
            form: FORMS[1],
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            told: begun.told,
            mounts: begun.mounts,
            stayed: core.stayed(),
            unanswered: abandoned(core, groups).saturating_sub(begun.abandoned),
            ..HandOver::default()
        };
        let Agreed { program, config, hosts } = begun.agreed;
        // Keys may have gone since: the judged configuration must not bring them back.
        let hosts = (running.hosts != hosts).then(|| running.hosts.clone());
        let leaves = Leaves {
            name: name.to_string(),
            ran: running.dump().unwrap_or_default(),
            judged: config,
            hosts,
            // The next program opens images anew: their clients end with this one.
            stores: stores(core, volumes)
                .into_iter()
                .filter_map(|(name, store)| Some((name, Arc::clone(store.local()?))))
                .collect(),
            records: Vec::new(),
        };
        Some(Departure { program, note, leaves })
    }

    /// Logs the take-over by this program.
    pub(in crate::control) fn tell(&self, events: &mut EventLog) {
        let Some(status) = self.status() else { return };
        let UpgradeStatus { from_version, failed, ready_ms, mounts, .. } = status;
        let text = match failed {
            Some(why) => {
                tracing::error!(why, "the upgrade failed: this program serves again");
                format!("the upgrade failed, and version {from_version} serves again: {why}")
            }
            None => {
                tracing::info!(from_version, ready_ms, mounts, "took over");
                format!("took over from version {from_version}; mounts to come back: {mounts}")
            }
        };
        events.happened(Occurrence::new(EventKind::Upgrade, text));
    }

    /// Notes the mounts that came back since the upgrade.
    pub(in crate::control) fn look_for_mounts(&mut self, core: &Core, events: &mut EventLog) {
        let sessions: Vec<(String, Vec<String>, usize)> = core
            .sessions()
            .iter()
            .map(|s| (s.host_name.to_string(), volumes_of(s, core), s.connections()))
            .collect();
        let Some(took) = &mut self.took else { return };
        let before = took.back.iter().filter(|back| **back).count();
        note_back(&took.note.mounts, &mut took.back, &sessions);
        let back = took.back.iter().filter(|back| **back).count();
        if back > before {
            took.last_back = Some(ClockMoment::now());
        }
        if back == took.back.len() {
            let pause_ms = self.status().and_then(|status| status.pause_ms).unwrap_or(0);
            tracing::info!(pause_ms, mounts = back, "every mount is back");
            let text = format!("every mount is back after {pause_ms} ms: {back}");
            events.happened(Occurrence::new(EventKind::Upgrade, text));
        } else if Instant::now() > took.until {
            tracing::warn!(away = took.back.len() - back, "mounts did not come back");
            took.is_over = true;
        }
    }
}

/// Whether a session is a mount that came back.
fn is_back(mount: &Mounted, host: &str, volumes: &[String], connections: usize) -> bool {
    // The admin connection and a queue.
    let connected = if mount.queues { connections >= 2 } else { connections >= 1 };
    mount.host == host && connected && mount.volumes == volumes
}

/// Notes the mounts that are back, among the present sessions: host, volumes, connections. Each
/// session is one mount at most.
fn note_back(mounts: &[Mounted], back: &mut [bool], sessions: &[(String, Vec<String>, usize)]) {
    let mut is_free = vec![true; sessions.len()];
    for (mount, back) in mounts.iter().zip(back) {
        let found =
            sessions.iter().zip(&is_free).position(|((host, volumes, connections), free)| {
                *free && is_back(mount, host, volumes, *connections)
            });
        if let Some(found) = found {
            is_free[found] = false;
            *back = true;
        }
    }
}

/// The state of a target that the next program has to serve.
///
/// # Errors
/// Why no program can take over. `forced` leaves out the reasons that only mounts pay for.
pub(in crate::control) fn may_upgrade(
    control: &Control,
    forced: bool,
) -> Result<Predecessor, String> {
    let Control { description, core, groups, reception, persister, running, volumes, .. } = control;
    if core.is_draining() || control.claims.leaving(Instant::now()).is_some() {
        return Err("the target is stopping".to_owned());
    }
    let Description { name, listening, outages, .. } = description;
    // The first address without a listener.
    if let Some(outage) = listening.iter().find_map(|address| outages.of(address)) {
        return Err(format!(
            "no host can connect to {} now ({}), and a start needs all addresses: mend this one first",
            outage.address, outage.why
        ));
    }
    nothing_hangs()?;
    if control.moves.takes_any() {
        return Err("this member is taking a volume of its group: try again in a minute".to_owned());
    }
    if !forced {
        would_lose(core, volumes, persister)?;
        would_wait(volumes)?;
    }
    let (running, devices) = (running.get(), reception.devices());
    let demand = Demand::of(running, groups.len());
    let named = (name.to_string(), listening.clone());
    Ok(Predecessor {
        gives_back: demand.given_back(devices.arena().kind()),
        devices: devices.iter().map(|device| device.caps().clone()).collect(),
        serves: Checked::of_this_program(running, named, demand),
        running: running.clone(),
        stores: stores(core, volumes),
        remembered: Remembered::begin(persister),
        forced,
    })
}

/// The open stores, by volume.
fn stores(core: &Core, volumes: &Volumes) -> Vec<(String, OpenStore)> {
    let opened = |volume: &Arc<Volume>| {
        let backing = volumes.backing(volume.index)?;
        Some((volume.name.to_string(), backing.clone()))
    };
    core.volumes().iter().filter_map(opened).collect()
}

/// A thread that waits in the kernel cannot end, and the next program would wait for it without a
/// limit, with the locks of all stores.
fn nothing_hangs() -> Result<(), String> {
    let Some((place, time)) = file_work::hanging(Instant::now()) else { return Ok(()) };
    Err(format!(
        "a thread of the target has waited for {place} for {} s: no program can take over before its disk or file \
         system answers. Mend it first",
        time.as_secs()
    ))
}

/// Whether an image is not given back for a while: mounts would wait.
fn would_wait(volumes: &Volumes) -> Result<(), String> {
    let images = volumes.backings().values().filter_map(OpenStore::image);
    let left = images.map(|image| image.for_holder_alone()).max().unwrap_or_default();
    if left.is_zero() {
        return Ok(());
    }
    Err(format!(
        "this member took a volume over a moment ago, and its image is not given back for another {} s: try again \
         then, or use --force",
        left.as_secs() + 1
    ))
}

/// Whether mounts would lose something, or believe so.
fn would_lose(core: &Core, volumes: &Volumes, persister: &Persister) -> Result<(), String> {
    for volume in core.volumes() {
        let is_open = core.sessions().is_open(volume.index);
        let lost = match volume.placement {
            Placement::Store => false,
            Placement::Memory(_) => true,
            Placement::Null => is_open,
        };
        if lost {
            return Err(format!(
                "volume `{}` is in the memory of this process: its data would be lost, and a mount of it fails \
                 until it is mounted anew. Remove the volume first, or use --force",
                volume.name
            ));
        }
    }
    if let Some(name) = volumes.given_up() {
        return Err(format!(
            "volume `{name}` was removed by force without its store, which may keep this process from ending in \
             good order: mounts would report a loss. Restart the target when that is no harm, or use --force"
        ));
    }
    if core.volumes().is_empty() || persister.keeping().is_kept {
        return Ok(());
    }
    Err("the target cannot remember how this run ends (state_dir; its log says why): mounts would report a loss. \
         Put the directory right and restart the target, or use --force"
        .to_owned())
}

/// The names of the volumes that a session opened.
fn volumes_of(session: &Session, core: &Core) -> Vec<String> {
    let mut volumes: Vec<String> =
        session.opened().filter_map(|(index, _)| name_of(index, core)).collect();
    volumes.sort_unstable();
    volumes
}

/// The mounts of this run.
fn mounts(core: &Core) -> Vec<Mounted> {
    let connected = core.sessions().iter().filter(|session| session.connections() > 0);
    let mount = |session: &Session| Mounted {
        host: session.host_name.to_string(),
        volumes: volumes_of(session, core),
        queues: session.connections() > 1,
    };
    connected.map(mount).filter(|mount| !mount.volumes.is_empty()).collect()
}

/// Number of commands without an answer when their connections ended.
fn abandoned(core: &Core, groups: &Groups) -> u64 {
    let of = |volume| groups.iter().filter_map(move |group| group.volume_stats(volume));
    let volumes = core.volumes().iter();
    volumes.flat_map(|volume| of(volume.index)).map(|stats| stats.abandoned()).sum()
}

/// Orders an upgrade to another program. A response that is no error says that it has begun.
pub(in crate::control) async fn upgrade(
    requests: &mpsc::Sender<ToControl>,
    reread: &Arc<Reread>,
    program: PathBuf,
    force: bool,
) -> Response {
    let _lock = reread.lock_changes().await;
    let Some(before) = asked(requests, |reply| ToControl::MayUpgrade(force, reply)).await else {
        return stopping();
    };
    let before = match before {
        Ok(before) => before,
        Err(error) => return Response::refused(error),
    };
    let volumes = before.volumes_on_stores();
    let unseen = || "the target cannot tell whether another program could take over".to_owned();
    let place = program.display().to_string();
    let agreed = match with_files(place, unseen, move || before.may_be_followed_by(&program)).await
    {
        Ok(agreed) => agreed,
        Err(error) => return Response::refused(error),
    };
    // While everything is served, so that little is left to write in the pause.
    for volume in volumes {
        let name = volume.clone();
        let change = (VolumeChange::WriteBack { name }, ChangeFiles::default());
        if let Err(error) = send_change(requests, change, true).await
            && !force
        {
            if requests.is_closed() || error == STOPPING {
                return stopping();
            }
            return Response::refused(format!(
                "volume `{volume}` cannot be written back: {error}. Mounts may lose what is not in its store: mend \
                 it, or use --force"
            ));
        }
    }
    if let Err(error) = nothing_hangs() {
        return Response::refused(error);
    }
    match requests.send(ToControl::Upgrade(Box::new(agreed))).await {
        Ok(()) => Response::Done,
        Err(_) => stopping(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(host: &str, volume: &str) -> Mounted {
        Mounted { host: host.to_owned(), volumes: vec![volume.to_owned()], queues: true }
    }

    fn session(host: &str, volume: &str, connections: usize) -> (String, Vec<String>, usize) {
        (host.to_owned(), vec![volume.to_owned()], connections)
    }

    #[test]
    fn a_mount_is_back_with_its_volume_and_a_queue() {
        let mounts = [mount("a", "v"), mount("a", "w"), mount("b", "v")];
        let mut back = [false; 3];
        note_back(&mounts, &mut back, &[session("a", "v", 1), session("c", "v", 2)]);
        assert_eq!(back, [false; 3], "no queue; another host");
        note_back(&mounts, &mut back, &[session("a", "w", 2), session("b", "v", 3)]);
        assert_eq!(back, [false, true, true]);
        // A mount that was back stays back.
        note_back(&mounts, &mut back, &[session("a", "v", 2)]);
        assert_eq!(back, [true; 3]);
    }

    #[test]
    fn one_session_is_one_mount() {
        let mounts = [mount("a", "v"), mount("a", "v")];
        let mut back = [false; 2];
        note_back(&mounts, &mut back, &[session("a", "v", 2)]);
        assert_eq!(back, [true, false]);
        note_back(&mounts, &mut back, &[session("a", "v", 2), session("a", "v", 2)]);
        assert_eq!(back, [true; 2]);
    }

    #[test]
    fn the_pause_ends_with_the_last_mount() {
        let told = ClockMoment(1_000_000_000);
        let note = HandOver { told, mounts: vec![mount("a", "v")], ..HandOver::default() };
        let mut upgrades = Upgrades::after(Some(note));
        assert_eq!(upgrades.status(), None, "it is not ready");
        upgrades.ready(Instant::now());
        let status = upgrades.status().unwrap();
        assert!(upgrades.is_waiting());
        assert_eq!((status.pause_ms, status.back, status.away), (None, 0, vec!["a".to_owned()]));
        let took = upgrades.took.as_mut().unwrap();
        (took.back[0], took.last_back) = (true, Some(ClockMoment(told.0 + 250_000_000)));
        let status = upgrades.status().unwrap();
        assert_eq!((status.pause_ms, status.back, status.away.len()), (Some(250), 1, 0));
        assert!(!upgrades.is_waiting());
        // Without mounts only the target counts.
        let mut alone = Upgrades::after(Some(HandOver::default()));
        alone.ready(Instant::now());
        alone.took.as_mut().unwrap().ready = ClockMoment(7_000_000);
        assert_eq!(alone.status().unwrap().pause_ms, Some(7));
        assert_eq!(Upgrades::after(None).status(), None);
    }
}
