//! The requests that control answers.

use std::time::Instant;

use rblk_operate::target::events::EventsReport;
use rblk_operate::target::refusal::Refusal;
use rblk_protocol::Name;
use tokio::sync::oneshot;

use super::core::{Core, OrderError, VolumeChange};
use super::moves::{MoveReply, TakeReply};
use super::observe::past::PastReport;
use super::observe::place_watch::Asker;
use super::observe::summary;
use super::peers::session::Session;
use super::peers::whom::meant;
use super::requests::departure::may_upgrade;
use super::requests::predecessor::Agreed;
use super::volumes::ChangeOutcome;
use super::volumes::change_files::ChangeFiles;
use super::{Control, Description, ToControl};
use crate::store::rbd::image_claim::Wish;
use crate::volume::ids::VolumeIndex;

/// Why a volume stays.
const ALONE: &str = "a group has a `member` name for each target, and images of a Ceph cluster";

impl Control {
    pub(super) fn on_request(&mut self, request: ToControl) {
        match request {
            ToControl::Status(reply) => {
                if self.rates.ask(Instant::now()) {
                    self.rates.take(&self.groups, self.core.volumes(), Instant::now());
                }
                self.ask_looks(Asker::Status(reply));
            }
            ToControl::StoreFaults(reply) => self.ask_looks(Asker::Faults(reply)),
            ToControl::Events(after, reply) => {
                let _ = reply.send(self.events_after(after));
            }
            ToControl::Past(reply) => drop(reply.send(self.past())),
            ToControl::Drain(reply) => {
                self.watch.warn_of_stores(self.core.volumes());
                self.ends.ask(reply);
                self.leave(Instant::now());
            }
            ToControl::MayUpgrade(forced, reply) => {
                let _ = reply.send(may_upgrade(self, forced));
            }
            ToControl::Upgrade(agreed) => self.upgrade(*agreed),
            ToControl::Hosts(hosts, reading, reply) => {
                let _ = reply.send(self.running.let_in_only(&hosts, reading, &mut self.core));
            }
            ToControl::LimitHost(name, limits, reply) => {
                let _ = reply.send(self.running.limit_host(&name, limits, &mut self.core));
            }
            ToControl::Running(reply) => {
                let _ = reply.send(Box::new(self.running.get().clone()));
            }
            ToControl::BeginTrace(volume, slower, reply) => {
                let begun = match self.core.volume_named(&volume) {
                    Some(volume) => self.traces.begin(volume, slower, &mut self.groups),
                    None => Err(Refusal::no_volume(&volume)),
                };
                // The client may be gone already.
                if let Err(Ok(begun)) = reply.send(begun) {
                    self.traces.end(begun.number(), &mut self.groups);
                }
            }
            ToControl::EndTrace(number) => self.traces.end(number, &mut self.groups),
            ToControl::Judge(changes, reply) => {
                let parts = (&self.running, &self.persister);
                let faults = changes.iter().filter_map(|(change, files)| {
                    self.volumes.judge((change, files), &self.core, parts).err()
                });
                let _ = reply.send(faults.collect());
            }
            ToControl::Change { change, files, alone, reply } => {
                self.change(*change, (files, alone), reply);
            }
            ToControl::HandOver(name, reply) => self.hand_over(&name, reply),
            ToControl::MoveTo(name, to, reply) => self.move_to(&name, to, reply),
            ToControl::VolumesOfFiles(volumes, unopened, reply) => {
                self.configure_others(volumes, unopened, reply);
            }
            ToControl::CloseToOthers { name, which, close, reply } => {
                let _ = reply.send(close_to_others(&name, which, close, &mut self.core));
            }
            ToControl::HostOf(session, reply) => {
                let session = self.core.sessions().get(session);
                let _ = reply.send(session.map_or_else(String::new, |s| s.host_name.to_string()));
            }
            ToControl::Kick(whom, reply) => {
                let _ = reply.send(kick(&whom, &mut self.core));
            }
        }
    }

    /// Begins an upgrade, unless this member hands its volumes over because it is about to stop.
    fn upgrade(&mut self, agreed: Agreed) {
        match self.claims.leaving(Instant::now()) {
            None => self.upgrades.begin(agreed, &mut self.core, &self.groups),
            Some(_) => tracing::info!("no other program takes over: the target is stopping"),
        }
    }

    /// Begins a change, unless this member hands its volumes over: then it takes no more of them.
    fn change(
        &mut self,
        change: VolumeChange,
        (files, alone): (ChangeFiles, bool),
        reply: oneshot::Sender<ChangeOutcome>,
    ) {
        if change.is_addition() && self.claims.leaving(Instant::now()).is_some() {
            // An error means that the client is gone.
            return drop(reply.send(Err(OrderError::Stopping.to_string())));
        }
        let parts = (&self.running, &self.persister);
        self.volumes.change((change, files, alone), &mut self.core, parts, reply);
    }

    /// Moves a volume to a member, and answers when that one serves it.
    fn move_to(&mut self, name: &str, to: String, reply: MoveReply) {
        // An error means that the client is gone.
        let refuse = |reply: MoveReply, why: String| drop(reply.send(Err(why)));
        if !self.claims.is_member() {
            return refuse(reply, format!("{name} is not moved: {ALONE}"));
        }
        if self.moves.member() == Some(&*to) {
            return self.take(name, (None, Wish::Order(None)), TakeReply::Client(reply));
        }
        let Ok(named) = Name::new(name) else {
            return refuse(reply, format!("there is no volume {name} here"));
        };
        let config =
            self.running.volume(name).ok().filter(|_| self.core.volume_named(name).is_some());
        match config.or_else(|| self.claims.other(named)) {
            Some(config) => self.moves.order((named, config), to, reply),
            None => refuse(reply, format!("there is no volume {name} here")),
        }
    }

    /// Hands a volume over, and answers when that is done.
    fn hand_over(&mut self, name: &str, reply: oneshot::Sender<Result<(), String>>) {
        let volume = self.core.volume_named(name).map(|volume| (volume.index, volume.name));
        let image = volume.and_then(|(index, _)| self.volumes.backing(index)?.image());
        // An error means that the client is gone.
        match (volume, image.is_some() && self.claims.is_member()) {
            (None, _) => drop(reply.send(Err(format!("there is no volume {name} here")))),
            (Some(_), false) => {
                drop(reply.send(Err(format!("{name} is served by this target alone: {ALONE}"))))
            }
            (Some((_, name)), true) => {
                self.claims.order(name, reply, Instant::now());
            }
        }
    }

    /// Answers a client once the stores were looked at.
    fn ask_looks(&mut self, asker: Asker) {
        self.watch.ask(asker, self.volumes.backings());
        self.answer_askers();
    }

    /// Answers the clients that have nothing more to wait for.
    pub(super) fn answer_askers(&mut self) {
        let ready = self.watch.ready_askers();
        ready.into_iter().for_each(|asker| self.answer(asker));
    }

    /// Answers the clients that wait for looks, with the state as it was seen last.
    pub(super) fn answer_all_askers(&mut self) {
        let all = self.watch.all_askers();
        all.into_iter().for_each(|asker| self.answer(asker));
    }

    fn answer(&self, asker: Asker) {
        // An error means that the client is gone.
        match asker {
            Asker::Status(reply) => drop(reply.send(summary::of(self))),
            Asker::Faults(reply) => drop(reply.send(self.watch.faults(self.core.volumes()))),
        }
    }

    /// The recent work of volumes.
    fn past(&self) -> PastReport {
        let Description { instance, started, .. } = self.description;
        self.sampling.report(instance, started)
    }

    /// The events after this number.
    pub(super) fn events_after(&self, number: u64) -> EventsReport {
        let (last, events) = self.events.events().after(number);
        EventsReport { instance: self.description.instance.to_string(), last, events }
    }
}

/// Closes a volume to hosts that do not have it open, or (false) opens it to all again. Returns the
/// volume's index and its users.
fn close_to_others(
    name: &str,
    which: Option<VolumeIndex>,
    close: bool,
    core: &mut Core,
) -> Option<(VolumeIndex, Vec<String>)> {
    let index = core.volume_named(name)?.index;
    if which.is_some_and(|which| which != index) {
        return None;
    }
    core.close_to_others(index, close);
    Some((index, core.users(index)))
}

/// Ends the sessions of a host or a peer, or the session of that number. Returns their names.
fn kick(whom: &str, core: &mut Core) -> Result<Vec<String>, String> {
    let name =
        |session: &Session| (session.index, format!("{} ({})", session.host_name, session.peer));
    let meant: Vec<_> = meant(core.sessions().iter(), whom)?.into_iter().map(name).collect();
    let now = Instant::now();
    let kicked = meant.into_iter().filter(|(session, _)| core.kick(*session, now));
    Ok(kicked.map(|(_, name)| name).collect())
}
