//! [`Volumes`]: the volumes as control has them beside [`Core`]: stores, and the change under way.
//! Core decides the steps of a change. Control carries them out: by mail to every poll group, or at
//! the store by a thread that may block.

pub(super) mod change_files;
pub(super) mod lost_images;
mod settling;
mod store_work;
pub(super) mod wanted;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::{ByteSize, VolumeConfig};
use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_operate::target::volume_notes::VolumeNotes;
use rblk_protocol::Name;
use tokio::sync::oneshot;

use crate::control::connect::devices::Devices;
use crate::control::core::{Core, VolumeChange};
use crate::control::groups::Groups;
use crate::control::observe::event_log::EventLog;
use crate::control::persist::{Persister, base_of_now};
use crate::control::running_config::RunningConfig;
use crate::data::poll_group::group_thread::GroupHandle;
use crate::data::poll_group::{SettleTicket, StepTicket, ToGroup, VolumeStep};
use crate::pool::opening::OpenedVolume;
use crate::record::{AtRisk, ServedVolume, VolumeRecord};
use crate::store::{OpenStore, StoreIdentity};
use crate::volume::ids::VolumeIndex;
use crate::volume::{Placement, Volume};
use change_files::ChangeFiles;
use lost_images::{LostImage, LostImages};
use settling::SettlesUnderWay;
use store_work::{StoreDone, StoreWork, StoreWorks};
use wanted::{altered, anew, forgets, served, take_memory};

/// The outcome of a change.
pub(crate) type ChangeOutcome = Result<ChangedVolume, String>;

/// A volume after a change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ChangedVolume {
    /// Its configuration; none: it was removed.
    pub config: Option<VolumeConfig>,
    /// Its size.
    pub bytes: u64,
    /// The data that is lost, if it was removed by force and its store did not take everything.
    pub given_up: Option<String>,
}

/// News of the store of a volume.
#[derive(Debug)]
pub(super) enum VolumeNews {
    /// Work at a store ended.
    StoreDone(StoreDone),
    /// An image is lost.
    Lost(LostImage),
}

/// A change that is being carried out, for the client that waits for it.
#[derive(Debug)]
struct Underway {
    change: VolumeChange,
    files: ChangeFiles,
    // As they will be. No configuration: the volume goes.
    volume: Arc<Volume>,
    config: Option<VolumeConfig>,
    before: Option<Arc<Volume>>,
    reply: oneshot::Sender<ChangeOutcome>,
    since: Instant,
    // Poll groups that have not done the step.
    waiting: usize,
    failure: Option<String>,
    // The length of its file before it was made longer.
    lengthened: Option<u64>,
    // Why not all of the change was done.
    note: Option<String>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Volumes {
    backings: HashMap<VolumeIndex, OpenStore>,
    // For people, by name.
    notes: HashMap<String, VolumeNotes>,
    // The index of the next new volume, and the number of indexes.
    next: u16,
    places: u16,
    ticket: u64,
    underway: Option<Underway>,
    works: StoreWorks,
    settling: SettlesUnderWay,
    lost: LostImages,
    // The first volume of this run that was removed without its store.
    given_up: Option<String>,
}

impl Volumes {
    /// The volumes of a target that starts: so many, with these stores and notes. It has `places`
    /// for volumes in its life.
    pub(super) fn new(
        count: usize,
        backings: HashMap<VolumeIndex, OpenStore>,
        notes: HashMap<String, VolumeNotes>,
        places: u16,
    ) -> Self {
        let lost = LostImages::new();
        backings.iter().for_each(|(volume, store)| lost.listen_to(*volume, store));
        Self {
            lost,
            backings,
            notes,
            next: u16::try_from(count).unwrap_or(u16::MAX),
            places,
            ticket: 0,
            underway: None,
            works: StoreWorks::new(),
            settling: SettlesUnderWay::default(),
            given_up: None,
        }
    }

    /// The first volume of this run that was removed without its store.
    pub(super) fn given_up(&self) -> Option<&str> {
        self.given_up.as_deref()
    }

    /// The open store of a volume.
    pub(super) fn backing(&self, volume: VolumeIndex) -> Option<&OpenStore> {
        self.backings.get(&volume)
    }

    /// The stores of volumes that have one.
    pub(super) fn backings(&self) -> &HashMap<VolumeIndex, OpenStore> {
        &self.backings
    }

    /// The notes on a volume, for people.
    pub(super) fn notes(&self, name: &str) -> VolumeNotes {
        self.notes.get(name).cloned().unwrap_or_default()
    }

    /// The next news of a store. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<VolumeNews> {
        tokio::select! {
            Some(done) = self.works.next() => Some(VolumeNews::StoreDone(done)),
            Some(lost) = self.lost.next() => Some(VolumeNews::Lost(lost)),
            else => None,
        }
    }

    /// The image of a volume is lost: no poll group answers for it, and the volume goes, as soon as
    /// no other change is under way.
    pub(super) fn lose(&mut self, volume: VolumeIndex, groups: &mut Groups) {
        let running: Vec<usize> = groups.running().collect();
        for group in running.iter().copied() {
            groups.send(group, ToGroup::Lost(volume));
        }
        self.lost.add(volume, running);
    }

    /// A poll group knows that a volume is lost, or has ended (`None`).
    pub(super) fn knows_loss(
        &mut self,
        group: usize,
        volume: Option<VolumeIndex>,
        groups: &mut Groups,
    ) {
        for volume in self.lost.knows(group, volume) {
            (0..groups.len()).for_each(|group| groups.send(group, ToGroup::LetGo(volume)));
        }
    }

    /// Whether a change is under way.
    pub(super) fn is_changing(&self) -> bool {
        self.underway.is_some()
    }

    /// The change that has been under way for at least so long, for people.
    pub(super) fn long_change(&self, at_least: Duration) -> Option<String> {
        let Underway { change, since, .. } = self.underway.as_ref()?;
        let (name, word, time) = (change.name(), change.word(), since.elapsed());
        let text = || {
            format!("a change of volume {name} ({word}) takes long, {} s by now", time.as_secs())
        };
        (time >= at_least).then(text)
    }

    /// Whether a volume with a lost image is still served.
    pub(super) fn has_lost(&self) -> bool {
        !self.lost.waiting().is_empty()
    }

    /// Begins to end a volume with a lost image, if no change is under way.
    pub(super) fn end_lost(
        &mut self,
        core: &mut Core,
        (running, persister): (&RunningConfig, &Persister),
    ) {
        let Some(which) = self.lost.waiting().first().copied() else { return };
        if self.underway.is_some() {
            return;
        }
        if let Some(volume) = core.volume(which) {
            let change = VolumeChange::Lose { name: volume.name.to_string(), which };
            // Nothing waits for the end of this change.
            let (reply, _) = oneshot::channel();
            let wanted = (change, ChangeFiles::default(), false);
            self.change(wanted, core, (running, persister), reply);
            if self.underway.is_none() {
                // Another change is about to begin. The next tick tries again.
                return;
            }
        }
        self.lost.remove(which);
    }

    /// Makes the writes of hosts to a volume durable, in every poll group.
    pub(super) fn settle(
        &mut self,
        ticket: SettleTicket,
        volume: VolumeIndex,
        groups: &mut Groups,
    ) {
        self.settling.begin(ticket, volume, groups);
    }

    /// A poll group has made the writes to a volume durable, or not.
    pub(super) fn settled(
        &mut self,
        ticket: SettleTicket,
        result: Result<(), String>,
        core: &mut Core,
    ) {
        if let Some(result) = self.settling.ended(ticket, result) {
            core.settled(ticket, result);
        }
    }

    /// Whether a change may be carried out. Nothing changes.
    ///
    /// # Errors
    /// The text for the client.
    pub(super) fn judge(
        &self,
        (change, files): (&VolumeChange, &ChangeFiles),
        core: &Core,
        (running, persister): (&RunningConfig, &Persister),
    ) -> Result<(), String> {
        let (volume, _) = self.wanted((change, files), core, (running, persister))?;
        core.judge(change, &volume).map_err(|error| error.to_string())
    }

    /// Begins a change, and answers when it has ended.
    ///
    /// `is_alone`: it is not a part of a configuration that was checked as a whole.
    pub(super) fn change(
        &mut self,
        (change, files, is_alone): (VolumeChange, ChangeFiles, bool),
        core: &mut Core,
        (running, persister): (&RunningConfig, &Persister),
        reply: oneshot::Sender<ChangeOutcome>,
    ) {
        let before = core.volume_named(change.name()).cloned();
        let wanted = (&change, &files, is_alone);
        match self.begin(wanted, core, (running, persister)) {
            Ok((volume, config)) => {
                self.underway = Some(Underway {
                    change,
                    files,
                    volume,
                    config,
                    before,
                    reply,
                    since: Instant::now(),
                    waiting: 0,
                    failure: None,
                    lengthened: None,
                    note: None,
                });
            }
            // An error means that the client is gone.
            Err(refused) => drop(reply.send(Err(refused))),
        }
    }

    fn begin(
        &mut self,
        (change, files, is_alone): (&VolumeChange, &ChangeFiles, bool),
        core: &mut Core,
        (running, persister): (&RunningConfig, &Persister),
    ) -> Result<(Arc<Volume>, Option<VolumeConfig>), String> {
        let (mut volume, config) = self.wanted((change, files), core, (running, persister))?;
        if is_alone {
            running.check_volume(change.name(), config.as_ref())?;
        }
        // Before memory is allocated, which a refused change does not need.
        core.judge(change, &volume).map_err(|error| error.to_string())?;
        if let (true, Some(before)) = (change.alters(), core.volume(volume.index)) {
            take_memory(Arc::make_mut(&mut volume), before)?;
        }
        let begun = core.change(change, Arc::clone(&volume), Instant::now());
        begun.map_err(|error| error.to_string())?;
        if change.is_addition() {
            self.next = volume.index.0 + 1;
            if let Some(backing) = files.opened.as_ref().and_then(|opened| opened.backing.clone()) {
                self.backings.insert(volume.index, backing);
            }
        }
        tracing::info!(volume = change.name(), change = change.word(), "a volume changes");
        Ok((volume, config))
    }

    /// The volume and its configuration as a change makes them. No configuration: the volume goes.
    /// Nothing changes.
    fn wanted(
        &self,
        (change, files): (&VolumeChange, &ChangeFiles),
        core: &Core,
        (running, persister): (&RunningConfig, &Persister),
    ) -> Result<(Arc<Volume>, Option<VolumeConfig>), String> {
        let name = change.name();
        match change {
            VolumeChange::Add(config) => {
                let volume = self.added((config, files), core, (running, persister))?;
                Ok((Arc::new(volume), Some(config.clone())))
            }
            VolumeChange::Remove { which, .. } => {
                running.volume(name)?;
                let volume = served(name, core)?;
                if which.is_some_and(|which| which != volume.index) {
                    return Err(anew(name));
                }
                Ok((Arc::clone(volume), None))
            }
            VolumeChange::Lose { which, .. } => {
                running.volume(name)?;
                let volume = served(name, core)?;
                if *which != volume.index {
                    return Err(anew(name));
                }
                Ok((Arc::clone(volume), None))
            }
            VolumeChange::Yield { .. } => {
                running.volume(name)?;
                Ok((Arc::clone(served(name, core)?), None))
            }
            VolumeChange::WriteBack { .. } => {
                let config = running.volume(name)?.clone();
                Ok((Arc::clone(served(name, core)?), Some(config)))
            }
            VolumeChange::Resize { size, .. } => {
                let mut config = running.volume(name)?.clone();
                let bytes = self.size_wanted(name, *size, core)?;
                if config.size.is_some() {
                    config.size = Some(ByteSize(bytes));
                }
                self.wanted_altered(config, Some(bytes), core, running)
            }
            VolumeChange::Become(config) => {
                let bytes = config.size.map(|size| size.0);
                self.wanted_altered(config.clone(), bytes, core, running)
            }
            VolumeChange::Snapshot { .. } => {
                // A snapshot changes nothing of its volume.
                let config = running.volume(name)?.clone();
                let volume = served(name, core)?;
                let backing = self.backing(volume.index);
                if let Some(image) = backing.and_then(OpenStore::image) {
                    let image = image.name();
                    return Err(format!(
                        "{name} is an image of a Ceph cluster: `rbd snap create {image}@NAME` makes a snapshot, and \
                         `rblk-target volume add` serves {image}@NAME"
                    ));
                }
                if !backing.and_then(OpenStore::local).is_some_and(|backing| backing.is_file()) {
                    return Err(format!(
                        "{name} is not in a regular file, and only a file can be cloned: clone a block device with the tool \
                        that made it (LVM, ZFS)"
                    ));
                }
                Ok((Arc::clone(volume), Some(config)))
            }
        }
    }

    /// A volume that is added.
    fn added(
        &self,
        (config, files): (&VolumeConfig, &ChangeFiles),
        core: &Core,
        (running, persister): (&RunningConfig, &Persister),
    ) -> Result<Volume, String> {
        let opened = files.opened.as_ref().ok_or("its store is not open")?;
        if opened.backing.is_some() && persister.keeping().is_nothing {
            return Err(forgets(running.get(), config));
        }
        if self.next >= self.places {
            return Err(format!(
                "this run of the target has given out all of its {} places for volumes, and uses none \
                 twice: restart it to add more",
                self.places
            ));
        }
        let index = VolumeIndex(self.next);
        let volume = Volume { index, ..(*opened.volume).clone() };
        // A snapshot has no lock that would keep a second volume from it.
        if let Some(same) = core.volumes().iter().find(|other| other.uuid == volume.uuid) {
            return Err(format!("{} has the same store as {}", config.name, same.name));
        }
        Ok(volume)
    }

    /// The size that is asked for, or the size of the file or device of a volume.
    fn size_wanted(&self, name: &str, size: Option<ByteSize>, core: &Core) -> Result<u64, String> {
        if let Some(size) = size {
            return Ok(size.0);
        }
        let volume = served(name, core)?;
        let backing = self.backing(volume.index);
        let backing = backing.ok_or_else(|| format!("{name} has no file: name its new size"))?;
        backing.measured().map_err(|error| error.to_string())
    }

    fn wanted_altered(
        &self,
        config: VolumeConfig,
        bytes: Option<u64>,
        core: &Core,
        running: &RunningConfig,
    ) -> Result<(Arc<Volume>, Option<VolumeConfig>), String> {
        running.volume(&config.name)?;
        let before = served(&config.name, core)?;
        let volume = altered(&config, bytes, before, (running, &self.backings))?;
        Ok((Arc::new(volume), Some(config)))
    }

    /// Carries out a step of the change under way.
    pub(super) fn begin_step(
        &mut self,
        step: VolumeStep,
        core: &mut Core,
        groups: &mut Groups,
        (devices, persister): (&mut Devices, &Persister),
    ) {
        self.ticket += 1;
        let ticket = StepTicket(self.ticket);
        let Some(volume) = core.altered().map(Arc::clone) else { return };
        let backing = self.backing(volume.index).cloned();
        let begun = match step {
            VolumeStep::Record => self.begin_record(ticket, &volume, persister),
            VolumeStep::Lower => self.begin_lower(ticket, &volume, persister),
            VolumeStep::Store => {
                let before = self.underway.as_ref().and_then(|underway| underway.before.clone());
                self.works.size(ticket, volume, before, backing);
                Ok(())
            }
            VolumeStep::CutBack => {
                let underway = self.underway.as_mut();
                let len = underway.and_then(|underway| underway.lengthened.take());
                let local = backing.as_ref().and_then(OpenStore::local).cloned();
                let (Some(len), Some(backing)) = (len, local) else {
                    return core.stepped(Ok(()), Instant::now());
                };
                self.works.cut_back(ticket, backing, len, volume.size_bytes());
                Ok(())
            }
            VolumeStep::Probe | VolumeStep::Clone => {
                let underway = self.underway.as_ref();
                let clone = underway.and_then(|underway| underway.files.clone.clone());
                self.works.clone_file(ticket, step, (clone, backing));
                Ok(())
            }
            _ => self.begin_everywhere(ticket, (&volume, step), groups, devices),
        };
        if let Err(error) = begun {
            core.stepped(Err(error), Instant::now());
        }
    }

    /// Has every poll group do a step.
    fn begin_everywhere(
        &mut self,
        ticket: StepTicket,
        (volume, step): (&Arc<Volume>, VolumeStep),
        groups: &mut Groups,
        devices: &mut Devices,
    ) -> Result<(), String> {
        let count = groups.len();
        if let Some(underway) = &mut self.underway {
            (underway.waiting, underway.failure) = (count, None);
        }
        if step == VolumeStep::Add {
            let backing = self.backing(volume.index).cloned();
            return begin_add(ticket, (volume, backing), groups, devices);
        }
        if matches!(step, VolumeStep::Drop | VolumeStep::Abandon) {
            devices.remove_volume(volume.index);
        }
        for group in 0..count {
            let volume = Arc::clone(volume);
            groups.send(group, ToGroup::Step { ticket, volume, step });
        }
        Ok(())
    }

    /// Makes durable that hosts may write to a volume as it will be.
    fn begin_record(
        &self,
        ticket: StepTicket,
        volume: &Volume,
        persister: &Persister,
    ) -> Result<(), String> {
        let begins = self.underway.as_ref().is_some_and(|it| it.files.opened.is_some());
        if let (true, Some(store)) = (begins, self.backing(volume.index)) {
            persister.share(store);
        }
        let attachment = self.backing(volume.index).and_then(OpenStore::attachment);
        let served = ServedVolume { begins, attachment, ..ServedVolume::from(volume) };
        persister.serve(ticket.0, served)
    }

    /// Makes the smaller risk of the volume as it is now durable: this run has synced all other
    /// writes.
    fn begin_lower(
        &self,
        ticket: StepTicket,
        volume: &Volume,
        persister: &Persister,
    ) -> Result<(), String> {
        let is_removed = self.underway.as_ref().is_some_and(|it| it.config.is_none());
        let risk = AtRisk::by_writes_to(volume).filter(|_| !is_removed);
        persister.lower_risk(ticket.0, volume.uuid, risk.unwrap_or(AtRisk::Nothing))
    }

    /// The record states the smaller risk, or still overstates it.
    pub(super) fn on_lowered(
        &self,
        ticket: StepTicket,
        result: Result<(), String>,
        core: &mut Core,
    ) {
        if ticket.0 == self.ticket {
            core.stepped(result, Instant::now());
        }
    }

    /// The record says that hosts may write to a volume, or it cannot be written.
    pub(super) fn on_served(
        &self,
        ticket: StepTicket,
        result: Result<Box<VolumeRecord>, String>,
        core: &mut Core,
        persister: &mut Persister,
    ) {
        if ticket.0 != self.ticket {
            return;
        }
        let volume = core.altered().map(Arc::clone);
        let opened = self.underway.as_ref().and_then(|underway| underway.files.opened.clone());
        let result = match (result, volume, opened) {
            (Ok(record), Some(volume), Some(opened)) => {
                persister.forget_loss(&volume.uuid);
                let (holder, store) = (record.holder().cloned(), record.store().cloned());
                match persister.is_shared(&volume.uuid) {
                    true => core.adopt_shared(volume.uuid, (holder, store), base_of_now()),
                    false => core.adopt(volume.uuid, holder, store),
                }
                if let Some(image) = opened.backing.as_ref().and_then(OpenStore::image) {
                    let until = Instant::now() + image.for_holder_alone();
                    core.keep_for_holder(volume.index, until);
                }
                if let Some(verifier) = record.verifier() {
                    core.vouch(volume.uuid, verifier);
                }
                compare_store(&volume, &opened, core, persister);
                Ok(())
            }
            (result, ..) => result.map(drop),
        };
        let result =
            result.map_err(|error| format!("the target cannot remember it (state_dir): {error}"));
        core.stepped(result, Instant::now());
    }

    /// Work at a store ended.
    pub(super) fn on_store_done(&mut self, (ticket, result): StoreDone, core: &mut Core) {
        if ticket.0 != self.ticket {
            return;
        }
        if let Some(underway) = &mut self.underway {
            match &result {
                Ok(StoreWork::Sized(was)) => underway.lengthened = *was,
                Ok(StoreWork::CutBack(false)) => {
                    let text =
                        "its file stays longer, since something was written behind its former end";
                    underway.note = Some(text.to_owned());
                }
                Ok(StoreWork::CutBack(true) | StoreWork::Cloned) | Err(_) => {}
            }
        }
        core.stepped(result.map(drop), Instant::now());
    }

    /// A removal by force goes on without the store, for this reason.
    pub(super) fn go_without_store(&mut self, why: &str, groups: &Groups, events: &mut EventLog) {
        let Some(underway) = &mut self.underway else { return };
        let name = underway.change.name().to_owned();
        self.given_up.get_or_insert_with(|| name.clone());
        let lost = match dirty_bytes(underway, groups) {
            0 => String::new(),
            bytes => format!("; about {} that hosts wrote are not in its store", ByteSize(bytes)),
        };
        let text = format!(
            "{why}{lost}. Its file or device stays locked until its store answers or the target restarts. Hosts that \
             had it cannot resume: unmount it there"
        );
        let what = Occurrence::new(EventKind::LostWrites, format!("removed by force: {text}"));
        underway.note = Some(text);
        events.happened(Occurrence { volume: Some(name), ..what });
    }

    /// The poll groups are about to give up the volume of the change under way: tells the dirty
    /// blocks of one with a lost image. Those of a removal by force are told already.
    pub(super) fn tell_dropped_blocks(&mut self, groups: &Groups, events: &mut EventLog) {
        let Some(underway) = &mut self.underway else { return };
        let bytes = dirty_bytes(underway, groups);
        if bytes == 0 || !matches!(underway.change, VolumeChange::Lose { .. }) {
            return;
        }
        let name = underway.change.name().to_owned();
        self.given_up.get_or_insert_with(|| name.clone());
        let text = format!(
            "its image is lost, and about {} that hosts wrote are not in it: `write-back` had acknowledged them. Hosts \
             that had it cannot resume: unmount it there",
            ByteSize(bytes)
        );
        underway.note = Some(text.clone());
        let what = Occurrence::new(EventKind::LostWrites, text);
        events.happened(Occurrence { volume: Some(name), ..what });
    }

    /// A poll group has done a step, or cannot.
    pub(super) fn group_stepped(
        &mut self,
        group: usize,
        ticket: StepTicket,
        result: Result<(), String>,
        core: &mut Core,
    ) {
        if ticket.0 != self.ticket {
            // That step was given up.
            return;
        }
        let Some(underway) = &mut self.underway else { return };
        if let Err(error) = result {
            tracing::error!(group, error, "a volume cannot change");
            underway.failure.get_or_insert(error);
        }
        underway.waiting = underway.waiting.saturating_sub(1);
        if underway.waiting == 0 {
            let result = underway.failure.take().map_or(Ok(()), Err);
            core.stepped(result, Instant::now());
        }
    }

    /// Stops waiting for the step under way.
    pub(super) fn give_up_step(&mut self) {
        self.ticket += 1;
    }

    /// The change under way has ended. Returns the volume that is served newly, if there is one.
    pub(super) fn changed(
        &mut self,
        result: Result<(), String>,
        core: &Core,
        groups: &mut Groups,
        (running, persister): (&mut RunningConfig, &mut Persister),
    ) -> Option<(Name, VolumeIndex)> {
        let underway = self.underway.take()?;
        let Underway { change, files, volume, config, before, reply, note, .. } = underway;
        let result = match (result, &note) {
            (Err(error), Some(note)) => Err(format!("{error}; {note}")),
            (result, _) => result,
        };
        let name = change.name();
        match &result {
            Ok(()) => {
                running.put_volume(name, config.as_ref());
                if let Some(opened) = &files.opened {
                    self.notes.insert(name.to_owned(), opened.notes.clone());
                }
                if let (true, Some(store)) = (change.is_addition(), self.backing(volume.index)) {
                    // Not before: only a volume that is served can go. A loss meanwhile is reported
                    // at once.
                    self.lost.listen_to(volume.index, store);
                }
                tracing::info!(volume = name, "a volume has changed");
            }
            Err(error) => tracing::error!(volume = name, error, "a volume stays as it was"),
        }
        let is_served = |uuid| core.volumes().iter().any(|volume| volume.uuid == uuid);
        match before {
            // The record of a volume of a group is at its next owner.
            Some(before) if persister.is_shared(&before.uuid) && !is_served(before.uuid) => {
                persister.forget_loss(&before.uuid);
            }
            Some(before) if note.is_some() && !is_served(before.uuid) => {
                persister.lost(before.uuid, None);
            }
            None if change.is_addition() && result.is_err() => persister.take_back(volume.uuid),
            _ => {}
        }
        let is_gone = if result.is_ok() { config.is_none() } else { change.is_addition() };
        if is_gone {
            // Drops the last reference to the file, which unlocks it, unless its store still works.
            self.backings.remove(&volume.index);
            groups.iter_mut().for_each(|handle| handle.forget_volume(volume.index));
            self.notes.remove(name);
        }
        let has_size = !change.is_removal() && !matches!(change, VolumeChange::WriteBack { .. });
        let bytes = if has_size { volume.size_bytes() } else { 0 };
        let is_begun = result.is_ok() && change.is_addition();
        let outcome = result.map(|()| ChangedVolume { config, bytes, given_up: note });
        drop(files);
        // An error means that the client is gone.
        let _ = reply.send(outcome);
        is_begun.then_some((volume.name, volume.index))
    }
}

/// The dirty bytes of the volume of a change, in all poll groups.
fn dirty_bytes(underway: &Underway, groups: &Groups) -> u64 {
    let index = underway.before.as_ref().map(|volume| volume.index);
    let dirty = |handle: &GroupHandle| {
        handle.volume_stats(index?).map(|stats| stats.snapshot().dirty_bytes)
    };
    groups.iter().filter_map(dirty).sum()
}

/// Has every poll group serve another volume.
fn begin_add(
    ticket: StepTicket,
    (volume, backing): (&Arc<Volume>, Option<OpenStore>),
    groups: &mut Groups,
    devices: &mut Devices,
) -> Result<(), String> {
    let registered = match &volume.placement {
        Placement::Memory(region) => devices
            .add_volume(volume.index, region)
            .map_err(|error| format!("a device cannot register its memory: {error}"))?,
        Placement::Store | Placement::Null => Vec::new(),
    };
    let stats: Vec<_> = groups.iter_mut().map(|handle| handle.new_stats(volume.index)).collect();
    for (group, stats) in stats.into_iter().enumerate() {
        let mail = ToGroup::AddVolume {
            volume: Arc::clone(volume),
            backing: backing.clone(),
            stats,
            registered: registered.clone(),
            step: Some(ticket),
        };
        groups.send(group, mail);
    }
    Ok(())
}

/// Fences the hosts of a volume that was served from another file or device before.
fn compare_store(volume: &Volume, opened: &OpenedVolume, core: &mut Core, persister: &Persister) {
    let identity: Option<StoreIdentity> = opened.backing.as_ref().and_then(OpenStore::identity);
    persister.serve_from(volume.uuid, identity.clone());
    if core.serve_from(volume, identity.as_ref()) {
        tracing::error!(
            volume = %volume.name,
            "this may be another file, device or memory than the one this volume was served from before: a \
             mount that comes back is refused (fenced)"
        );
    }
}
