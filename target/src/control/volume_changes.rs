//! [`Volumes`]: the volumes as control has them beside [`Core`](super::core::Core): configuration,
//! stores, and the change under way. Core decides the steps of a change. Control carries them out:
//! by mail to every poll group, or at the store by a thread that may block.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rblk_config::{ByteSize, CacheMode, TargetConfig, VolumeConfig, named_in_rights};
use rblk_fabric::{PageKind, Region};
use tokio::sync::{mpsc, oneshot};

use super::Control;
use super::core::VolumeOrder;
use crate::data::poll_group::{StepTicket, ToGroup, VolumeStep};
use crate::pool::opening::OpenedVolume;
use crate::pool::reflink::CloneFile;
use crate::record::holders::VolumeUuid;
use crate::record::{AtRisk, ServedVolume, VolumeRecord};
use crate::store::StoreIdentity;
use crate::store::backing::Backing;
use crate::volume::ids::VolumeIndex;
use crate::volume::limits::Limiter;
use crate::volume::{Placement, Volume};
use rblk_operate::target::ask::{LimitsWish, Wish};
use rblk_operate::target::events::{EventKind, Occurrence};

/// A change of one volume.
#[derive(Clone, Debug)]
pub(crate) enum VolumeChange {
    /// Serve a volume. Its index is not chosen yet.
    Add(VolumeConfig, Arc<OpenedVolume>),
    /// Serve a volume no longer.
    Remove {
        /// The volume's name.
        name: String,
        /// The volume's index: another volume of this name is left alone.
        which: Option<VolumeIndex>,
        /// Also if hosts have it open.
        force: bool,
    },
    /// Give a volume another size.
    Resize {
        /// The volume's name.
        name: String,
        /// The size; none: that of its file or device now.
        size: Option<ByteSize>,
        /// Whether it may become smaller.
        shrink: bool,
    },
    /// Configure the volume of this name like this.
    Become(VolumeConfig),
    /// Write dirty blocks back; change nothing else.
    WriteBack {
        /// Its name.
        name: String,
    },
    /// Clone the file of a volume. The volume stays as it is.
    Snapshot {
        /// Its name.
        name: String,
        /// The new file.
        file: Arc<CloneFile>,
    },
}

impl VolumeChange {
    /// The change in a word, for the log.
    fn word(&self) -> &'static str {
        match self {
            Self::Add(..) => "add",
            Self::Remove { .. } => "remove",
            Self::Resize { .. } => "resize",
            Self::Become(_) => "set",
            Self::WriteBack { .. } => "write back",
            Self::Snapshot { .. } => "snapshot",
        }
    }
}

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

/// A change that may be carried out.
#[derive(Debug)]
struct Plan {
    order: VolumeOrder,
    config: Option<VolumeConfig>,
    name: String,
    opened: Option<Arc<OpenedVolume>>,
    clone: Option<Arc<CloneFile>>,
}

impl Plan {
    /// A plan that opens and clones nothing.
    pub(super) fn new(order: VolumeOrder, config: Option<VolumeConfig>, name: String) -> Self {
        Self { order, config, name, opened: None, clone: None }
    }
}

/// A change that is being carried out.
#[derive(Debug)]
struct Underway {
    plan: Plan,
    bytes: u64,
    before: Option<Arc<Volume>>,
    reply: oneshot::Sender<ChangeOutcome>,
    // Poll groups that have not done the step.
    waiting: usize,
    failure: Option<String>,
    // The length of its file before it was made longer.
    lengthened: Option<u64>,
    // Why not all of the change was done.
    note: Option<String>,
}

/// The end of work at a store.
pub(super) type StoreDone = (StepTicket, Result<StoreWork, String>);

/// The work that was done at a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StoreWork {
    /// The store has its new size. The former length, if the file was made longer.
    Sized(Option<u64>),
    /// The file is as long as before; or (false) writes have reached past that length.
    CutBack(bool),
    /// The file is cloned, or can be.
    Cloned,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Volumes {
    // The running configuration: that of the start, with every change since.
    running: TargetConfig,
    backings: HashMap<VolumeIndex, Arc<Backing>>,
    // The index of the next new volume, and the number of indexes.
    next: u16,
    places: u16,
    ticket: u64,
    underway: Option<Underway>,
    // The first volume of this run that was removed without its store.
    given_up: Option<String>,
    done: (mpsc::UnboundedSender<StoreDone>, mpsc::UnboundedReceiver<StoreDone>),
}

impl Volumes {
    /// The first volume of this run that was removed without its store.
    pub(super) fn given_up(&self) -> Option<&str> {
        self.given_up.as_deref()
    }

    /// The volumes of a target that starts.
    pub(super) fn new(
        running: TargetConfig,
        backings: HashMap<VolumeIndex, Arc<Backing>>,
        places: u16,
    ) -> Self {
        let next = u16::try_from(running.volumes.len()).unwrap_or(u16::MAX);
        let done = mpsc::unbounded_channel();
        Self { running, backings, next, places, ticket: 0, underway: None, given_up: None, done }
    }

    /// The open store of a volume.
    pub(super) fn backing(&self, volume: VolumeIndex) -> Option<&Arc<Backing>> {
        self.backings.get(&volume)
    }

    /// The running configuration.
    pub(super) fn running(&self) -> &TargetConfig {
        &self.running
    }

    /// The stores of volumes that have one.
    pub(super) fn backings(&self) -> &HashMap<VolumeIndex, Arc<Backing>> {
        &self.backings
    }

    /// The running configuration, to note other changes.
    pub(super) fn running_mut(&mut self) -> &mut TargetConfig {
        &mut self.running
    }

    /// The next work at a store that ended. Cancel safe.
    pub(super) async fn store_done(&mut self) -> Option<StoreDone> {
        self.done.1.recv().await
    }

    fn config_of(&self, name: &str) -> Result<&VolumeConfig, String> {
        self.running.volumes.iter().find(|volume| volume.name == name).ok_or_else(|| {
            format!("there is no volume {name}; `rblk-target volume list` shows all")
        })
    }
}

/// The configuration with one volume changed, added (`Some`) or removed.
fn with_volume(running: &TargetConfig, name: &str, config: Option<&VolumeConfig>) -> TargetConfig {
    let mut changed = running.clone();
    let at = changed.volumes.iter().position(|volume| volume.name == name);
    match (at, config) {
        (Some(at), Some(config)) => changed.volumes[at] = config.clone(),
        (Some(at), None) => drop(changed.volumes.remove(at)),
        (None, Some(config)) => changed.volumes.push(config.clone()),
        (None, None) => {}
    }
    changed
}

impl Control {
    /// Whether a change may be carried out. Nothing changes.
    pub(super) fn judge(&self, change: &VolumeChange) -> Result<(), String> {
        let plan = self.plan(change, false)?;
        self.core.judge(&plan.order).map_err(|error| error.to_string())
    }

    /// Begins a change, and answers when it has ended.
    ///
    /// `is_alone`: it is not a part of a configuration that was checked as a whole.
    pub(super) fn change(
        &mut self,
        change: &VolumeChange,
        is_alone: bool,
        reply: oneshot::Sender<ChangeOutcome>,
    ) {
        match self.begin_change(change, is_alone) {
            Ok((plan, bytes, before)) => {
                self.volumes.underway = Some(Underway {
                    plan,
                    bytes,
                    before,
                    reply,
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

    fn begin_change(
        &mut self,
        change: &VolumeChange,
        is_alone: bool,
    ) -> Result<(Plan, u64, Option<Arc<Volume>>), String> {
        let plan = self.plan(change, true)?;
        if is_alone {
            let hosts = &self.volumes.running.hosts;
            if let (None, Some(rights)) = (&plan.config, named_in_rights(hosts, &plan.name)) {
                return Err(rights);
            }
            let whole = with_volume(&self.volumes.running, &plan.name, plan.config.as_ref());
            whole.validate().map_err(|error| of_volume(&whole, &plan.name, &error.to_string()))?;
        }
        let bytes = match &plan.order {
            VolumeOrder::Add(volume)
            | VolumeOrder::Alter { volume, .. }
            | VolumeOrder::Snapshot(volume) => volume.size_bytes(),
            VolumeOrder::Remove { .. } | VolumeOrder::WriteBack(_) => 0,
        };
        let before = self.volume_named(&plan.name).cloned();
        let now = Instant::now();
        self.core.judge(&plan.order).map_err(|error| error.to_string())?;
        self.core.order(plan.order.clone(), now).map_err(|error| error.to_string())?;
        if let VolumeOrder::Add(volume) = &plan.order {
            self.volumes.next = volume.index.0 + 1;
            if let Some(backing) = plan.opened.as_ref().and_then(|opened| opened.backing.clone()) {
                self.volumes.backings.insert(volume.index, backing);
            }
        }
        tracing::info!(volume = plan.name, change = change.word(), "a volume changes");
        Ok((plan, bytes, before))
    }

    /// Fences the hosts of a volume that was served from another file or device before.
    fn compare_store(&mut self, volume: &Volume, opened: &OpenedVolume) {
        let identity: Option<StoreIdentity> =
            opened.backing.as_ref().and_then(|backing| backing.identity().cloned());
        self.persister.serve_from(volume.uuid, identity.clone());
        if self.core.serve_from(volume, identity.as_ref()) {
            tracing::error!(
                volume = %volume.name,
                "this may be another file, device or memory than the one this volume was served from before: a \
                 mount that comes back is refused (fenced)"
            );
        }
    }

    pub(super) fn volume_named(&self, name: &str) -> Option<&Arc<Volume>> {
        self.core.volumes().iter().find(|volume| volume.name.as_str() == name)
    }

    /// The plan of a change. With `real`, allocates its memory.
    fn plan(&self, change: &VolumeChange, real: bool) -> Result<Plan, String> {
        match change {
            VolumeChange::Add(config, opened) => {
                if opened.backing.is_some() && self.persister.keeping().is_nothing {
                    return Err(forgets(&self.volumes.running, config));
                }
                if self.volumes.next >= self.volumes.places {
                    return Err(format!(
                        "this run of the target has given out all of its {} places for volumes, and uses none \
                         twice: restart it to add more",
                        self.volumes.places
                    ));
                }
                let index = VolumeIndex(self.volumes.next);
                let volume = Arc::new(Volume { index, ..(*opened.volume).clone() });
                let (order, name) = (VolumeOrder::Add(volume), config.name.clone());
                let plan = Plan::new(order, Some(config.clone()), name);
                Ok(Plan { opened: Some(Arc::clone(opened)), ..plan })
            }
            VolumeChange::Remove { name, which, force } => {
                self.volumes.config_of(name)?;
                let volume = self.volume_named(name).ok_or("it is not served")?.index;
                if which.is_some_and(|which| which != volume) {
                    return Err(anew(name));
                }
                let order = VolumeOrder::Remove { volume, force: *force };
                Ok(Plan::new(order, None, name.clone()))
            }
            VolumeChange::WriteBack { name } => {
                let config = Some(self.volumes.config_of(name)?.clone());
                let volume = self.volume_named(name).ok_or("it is not served")?.index;
                let order = VolumeOrder::WriteBack(volume);
                Ok(Plan::new(order, config, name.clone()))
            }
            VolumeChange::Resize { name, size, shrink } => {
                let mut config = self.volumes.config_of(name)?.clone();
                let bytes = self.size_wanted(name, *size)?;
                if config.size.is_some() {
                    config.size = Some(ByteSize(bytes));
                }
                self.plan_of_alter(config, Some(bytes), *shrink, real)
            }
            VolumeChange::Become(config) => {
                let bytes = config.size.map(|size| size.0);
                self.plan_of_alter(config.clone(), bytes, false, real)
            }
            VolumeChange::Snapshot { name, file } => self.plan_of_snapshot(name, file),
        }
    }

    /// The size that is asked for, or the size of the file or device of a volume.
    fn size_wanted(&self, name: &str, size: Option<ByteSize>) -> Result<u64, String> {
        if let Some(size) = size {
            return Ok(size.0);
        }
        let volume = self.volume_named(name).ok_or("it is not served")?;
        let backing = self.volumes.backings.get(&volume.index);
        let backing = backing.ok_or_else(|| format!("{name} has no file: name its new size"))?;
        backing.measured().map_err(|error| error.to_string())
    }

    fn plan_of_alter(
        &self,
        config: VolumeConfig,
        bytes: Option<u64>,
        shrink: bool,
        real: bool,
    ) -> Result<Plan, String> {
        let name = config.name.clone();
        let old = self.volumes.config_of(&name)?;
        if (old.store, &old.path, old.block_size, old.direct)
            != (config.store, &config.path, config.block_size, config.direct)
        {
            return Err(format!(
                "store, path, block_size and direct of {name} cannot change while it is served: remove it first \
                 (`rblk-target volume remove {name}`)"
            ));
        }
        let before = self.volume_named(&name).ok_or("it is not served")?;
        let limits = Limiter::renewed(before.limits.as_ref(), config.limits);
        let mut volume = Volume { read_only: config.read_only, limits, ..(**before).clone() };
        let bytes = bytes.unwrap_or(before.size_bytes());
        let block = before.block_size;
        volume.blocks = block.blocks_in(bytes).filter(|blocks| blocks.0 > 0).ok_or_else(|| {
            format!("{bytes} bytes are not a multiple of the block size {}", block.bytes())
        })?;
        if let Some(backing) = self.volumes.backings.get(&before.index) {
            if backing.read_only() && !config.read_only {
                return Err(format!(
                    "the store of {name} was opened for reading: remove it and add it again without read_only"
                ));
            }
            let is_fixed = !backing.is_file() || backing.read_only();
            let has = backing.measured().map_err(|error| error.to_string())?;
            if is_fixed && bytes > has {
                return Err(format!("the store of {name} has {has} bytes, and {bytes} are more"));
            }
            if backing.memory_alignment() <= config.block_size {
                volume.cache = config.cache.unwrap_or_default();
            }
            volume.cache_min_bytes = config.cache_min.unwrap_or_default().0;
            volume.cache_max_bytes = config.cache_max.map(|max| max.0);
            volume.read_ahead_bytes = u32::try_from(config.read_ahead.0).unwrap_or(u32::MAX);
        }
        if let (Placement::Memory(_), true) = (&before.placement, bytes != before.size_bytes()) {
            if bytes < before.size_bytes() && !shrink {
                // Judged before memory is taken.
                let order = VolumeOrder::Alter { volume: Arc::new(volume), shrink };
                return Ok(Plan::new(order, Some(config), name));
            }
            if real {
                let len = usize::try_from(bytes).map_err(|error| error.to_string())?;
                let region = Region::allocate(len, PageKind::Normal);
                volume.placement = Placement::Memory(region.map_err(|error| error.to_string())?);
            }
        }
        let order = VolumeOrder::Alter { volume: Arc::new(volume), shrink };
        Ok(Plan::new(order, Some(config), name))
    }

    /// A snapshot changes nothing of its volume.
    fn plan_of_snapshot(&self, name: &str, file: &Arc<CloneFile>) -> Result<Plan, String> {
        let config = self.volumes.config_of(name)?.clone();
        let volume = self.volume_named(name).ok_or("it is not served")?;
        let backing = self.volumes.backings.get(&volume.index);
        if !backing.is_some_and(|backing| backing.is_file()) {
            return Err(format!(
                "{name} is not in a regular file, and only a file can be cloned: for a block device use what \
                 makes it (LVM, ZFS)"
            ));
        }
        let order = VolumeOrder::Snapshot(Arc::clone(volume));
        let plan = Plan::new(order, Some(config), name.to_owned());
        Ok(Plan { clone: Some(Arc::clone(file)), ..plan })
    }

    /// Carries out a step of the change under way.
    pub(super) fn begin_step(&mut self, step: VolumeStep) {
        self.volumes.ticket += 1;
        let ticket = StepTicket(self.volumes.ticket);
        let Some(volume) = self.core.altered().map(Arc::clone) else { return };
        match step {
            VolumeStep::Record => return self.begin_record(ticket, &volume),
            VolumeStep::Lower => return self.begin_lower(ticket, &volume),
            VolumeStep::Store => return self.begin_store_work(ticket, &volume),
            VolumeStep::CutBack => return self.begin_cut_back(ticket, &volume),
            VolumeStep::Probe | VolumeStep::Clone => {
                return self.begin_clone(ticket, &volume, step);
            }
            _ => {}
        }
        let groups = self.groups.len();
        if let Some(underway) = &mut self.volumes.underway {
            (underway.waiting, underway.failure) = (groups, None);
        }
        if step == VolumeStep::Add {
            return self.begin_add(ticket, &volume);
        }
        if matches!(step, VolumeStep::Drop | VolumeStep::Abandon) {
            self.devices.remove_volume(volume.index);
        }
        for group in 0..groups {
            let volume = Arc::clone(&volume);
            self.groups.send(group, ToGroup::Step { ticket, volume, step });
        }
    }

    /// Has every poll group serve another volume.
    fn begin_add(&mut self, ticket: StepTicket, volume: &Arc<Volume>) {
        let registered = match &volume.placement {
            Placement::Memory(region) => match self.devices.add_volume(volume.index, region) {
                Ok(registered) => registered,
                Err(error) => {
                    let error = format!("a device cannot register its memory: {error}");
                    return self.core.stepped(Err(error), Instant::now());
                }
            },
            Placement::Store | Placement::Null => Vec::new(),
        };
        let backing = self.volumes.backings.get(&volume.index).cloned();
        let stats: Vec<_> =
            self.groups.iter_mut().map(|handle| handle.new_stats(volume.index)).collect();
        for (group, stats) in stats.into_iter().enumerate() {
            let mail = ToGroup::AddVolume {
                volume: Arc::clone(volume),
                backing: backing.clone(),
                stats,
                registered: registered.clone(),
                step: Some(ticket),
            };
            self.groups.send(group, mail);
        }
    }

    /// Makes durable that hosts may write to a volume as it will be.
    fn begin_record(&mut self, ticket: StepTicket, volume: &Arc<Volume>) {
        let begins = self.volumes.underway.as_ref().is_some_and(|it| it.plan.opened.is_some());
        let served = ServedVolume { begins, ..ServedVolume::from(&**volume) };
        if let Err(error) = self.persister.serve(ticket.0, served) {
            self.core.stepped(Err(error), Instant::now());
        }
    }

    /// Makes the smaller risk of the volume as it is now durable: this run has synced all other
    /// writes.
    fn begin_lower(&mut self, ticket: StepTicket, volume: &Arc<Volume>) {
        let is_removed = self.volumes.underway.as_ref().is_some_and(|it| it.plan.config.is_none());
        let risk = AtRisk::by_writes_to(volume).filter(|_| !is_removed);
        let risk = risk.unwrap_or(AtRisk::Nothing);
        if let Err(error) = self.persister.lower_risk(ticket.0, volume.uuid, risk) {
            self.core.stepped(Err(error), Instant::now());
        }
    }

    /// The record states the smaller risk, or still overstates it.
    pub(super) fn on_lowered(&mut self, ticket: StepTicket, result: Result<(), String>) {
        if ticket.0 == self.volumes.ticket {
            self.core.stepped(result, Instant::now());
        }
    }

    /// The record says that hosts may write to a volume, or it cannot be written.
    pub(super) fn on_served(
        &mut self,
        ticket: StepTicket,
        result: Result<Box<VolumeRecord>, String>,
    ) {
        if ticket.0 != self.volumes.ticket {
            return;
        }
        let volume = self.core.altered().map(Arc::clone);
        let opened =
            self.volumes.underway.as_ref().and_then(|underway| underway.plan.opened.clone());
        let result = match (result, volume, opened) {
            (Ok(record), Some(volume), Some(opened)) => {
                self.losses.forget(&volume.uuid);
                let (holder, store) = (record.holder().cloned(), record.store().cloned());
                self.core.adopt(volume.uuid, holder, store);
                if let Some(verifier) = record.verifier() {
                    self.core.vouch(volume.uuid, verifier);
                }
                self.compare_store(&volume, &opened);
                Ok(())
            }
            (result, ..) => result.map(drop),
        };
        let result =
            result.map_err(|error| format!("the target cannot remember it (state_dir): {error}"));
        self.core.stepped(result, Instant::now());
    }

    /// Notes that a volume was removed without its store.
    fn note_given_up(&mut self, uuid: VolumeUuid) {
        if self.losses.lost(uuid, None) {
            self.note_loss(uuid);
        }
    }

    /// Gives the store of a volume its size, or the new memory of a volume its contents.
    fn begin_store_work(&self, ticket: StepTicket, volume: &Arc<Volume>) {
        let (done, volume) = (self.volumes.done.0.clone(), Arc::clone(volume));
        let backing = self.volumes.backings.get(&volume.index).cloned();
        let before = self.volumes.underway.as_ref().and_then(|underway| underway.before.clone());
        let before = before.or_else(|| self.volume_named(volume.name.as_str()).cloned());
        tokio::task::spawn_blocking(move || {
            let result = match (&volume.placement, before.as_ref().map(|old| &old.placement)) {
                (Placement::Memory(to), Some(Placement::Memory(from))) => {
                    // No poll group touches either.
                    from.copy_to(0, to, 0, from.len().min(to.len()));
                    Ok(StoreWork::Sized(None))
                }
                _ => backing.map_or(Ok(StoreWork::Sized(None)), |backing| {
                    let work = backing.resize(volume.size_bytes()).map(StoreWork::Sized);
                    work.map_err(|error| error.to_string())
                }),
            };
            // An error means that control has ended.
            let _ = done.send((ticket, result));
        });
    }

    /// Gives a file the length that it had before it was made longer.
    fn begin_cut_back(&mut self, ticket: StepTicket, volume: &Arc<Volume>) {
        let len = self.volumes.underway.as_mut().and_then(|underway| underway.lengthened.take());
        let backing = self.volumes.backings.get(&volume.index).cloned();
        let (Some(len), Some(backing)) = (len, backing) else {
            return self.core.stepped(Ok(()), Instant::now());
        };
        let (done, size) = (self.volumes.done.0.clone(), volume.size_bytes());
        tokio::task::spawn_blocking(move || {
            let cut = backing.cut_back(len, size).map(StoreWork::CutBack);
            // An error means that control has ended.
            let _ = done.send((ticket, cut.map_err(|error| error.to_string())));
        });
    }

    /// Clones the file of a volume, or tests whether that can be done.
    fn begin_clone(&self, ticket: StepTicket, volume: &Volume, step: VolumeStep) {
        let (done, backing) =
            (self.volumes.done.0.clone(), self.volumes.backings.get(&volume.index).cloned());
        let clone = self.volumes.underway.as_ref().and_then(|underway| underway.plan.clone.clone());
        tokio::task::spawn_blocking(move || {
            let result = match (clone, backing) {
                (Some(clone), Some(backing)) if step == VolumeStep::Probe => clone.probe(&backing),
                (Some(clone), Some(backing)) => clone.share_all(&backing),
                _ => Ok(()),
            };
            // An error means that control has ended.
            let cloned = result.map(|()| StoreWork::Cloned).map_err(|error| error.to_string());
            let _ = done.send((ticket, cloned));
        });
    }

    /// Work at a store ended.
    pub(super) fn on_store_done(&mut self, (ticket, result): StoreDone) {
        if ticket.0 != self.volumes.ticket {
            return;
        }
        if let Some(underway) = &mut self.volumes.underway {
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
        self.core.stepped(result.map(drop), Instant::now());
    }

    /// A removal by force goes on without the store, for this reason.
    pub(super) fn given_up(&mut self, why: String) {
        let Some(underway) = &mut self.volumes.underway else { return };
        self.volumes.given_up.get_or_insert_with(|| underway.plan.name.clone());
        let index = underway.before.as_ref().map(|volume| volume.index);
        let dirty = |handle: &crate::data::poll_group::group_thread::GroupHandle| {
            handle.volume_stats(index?).map(|stats| stats.snapshot().dirty_bytes)
        };
        let bytes: u64 = self.groups.iter().filter_map(dirty).sum();
        let lost = match bytes {
            0 => String::new(),
            bytes => format!("; about {} that hosts wrote are not in its store", ByteSize(bytes)),
        };
        let text = format!(
            "{why}{lost}. Its file or device stays locked until its store answers or the target restarts. Hosts that \
             had it cannot resume: unmount it there"
        );
        let what = Occurrence::new(EventKind::LostWrites, format!("removed by force: {text}"));
        let volume = Some(underway.plan.name.clone());
        underway.note = Some(text);
        self.happened(Occurrence { volume, ..what });
    }

    /// A poll group has done a step, or cannot.
    pub(super) fn stepped(&mut self, group: usize, ticket: StepTicket, result: Result<(), String>) {
        if ticket.0 != self.volumes.ticket {
            // That step was given up.
            return;
        }
        let Some(underway) = &mut self.volumes.underway else { return };
        if let Err(error) = result {
            tracing::error!(group, error, "a volume cannot change");
            underway.failure.get_or_insert(error);
        }
        underway.waiting = underway.waiting.saturating_sub(1);
        if underway.waiting == 0 {
            let result = underway.failure.take().map_or(Ok(()), Err);
            self.core.stepped(result, Instant::now());
        }
    }

    /// Stops waiting for the step under way.
    pub(super) fn give_up_step(&mut self) {
        self.volumes.ticket += 1;
    }

    /// The change under way has ended.
    pub(super) fn changed(&mut self, result: Result<(), String>) {
        let Some(Underway { plan, bytes, before, reply, note, .. }) = self.volumes.underway.take()
        else {
            return;
        };
        let result = match (result, &note) {
            (Err(error), Some(note)) => Err(format!("{error}; {note}")),
            (result, _) => result,
        };
        let (index, is_new) = match &plan.order {
            VolumeOrder::Add(volume) => (volume.index, true),
            VolumeOrder::Alter { volume, .. } | VolumeOrder::Snapshot(volume) => {
                (volume.index, false)
            }
            VolumeOrder::Remove { volume, .. } | VolumeOrder::WriteBack(volume) => (*volume, false),
        };
        match &result {
            Ok(()) => {
                let config = plan.config.as_ref();
                self.volumes.running = with_volume(&self.volumes.running, &plan.name, config);
                if let Some(opened) = &plan.opened {
                    let notes = opened.notes.clone();
                    self.description.volume_notes.insert(plan.name.clone(), notes);
                }
                tracing::info!(volume = plan.name, "a volume has changed");
            }
            Err(error) => tracing::error!(volume = plan.name, error, "a volume stays as it was"),
        }
        let is_served = |uuid| self.core.volumes().iter().any(|volume| volume.uuid == uuid);
        match (&plan.order, before) {
            (_, Some(before)) if note.is_some() && !is_served(before.uuid) => {
                self.note_given_up(before.uuid);
            }
            (VolumeOrder::Add(volume), None) if result.is_err() => {
                self.persister.take_back(volume.uuid);
            }
            _ => {}
        }
        let is_gone = if result.is_ok() { plan.config.is_none() } else { is_new };
        if is_gone {
            // Drops the last reference to the file, which unlocks it, unless its store still works.
            self.volumes.backings.remove(&index);
            self.groups.iter_mut().for_each(|handle| handle.forget_volume(index));
            self.description.volume_notes.remove(&plan.name);
        }
        let outcome = result.map(|()| ChangedVolume { config: plan.config, bytes, given_up: note });
        drop(plan.opened);
        // An error means that the client is gone.
        let _ = reply.send(outcome);
    }
}

/// Why a target that began without a file or device takes none.
fn forgets(running: &TargetConfig, volume: &VolumeConfig) -> String {
    let path = volume.path.as_deref().unwrap_or(Path::new(""));
    format!(
        "this target began without a volume on a file or device, so this run keeps no record of hosts and losses in \
         {} (state_dir), and the next start would refuse the mounts of {}: write `[[volume]]` with `name = \"{1}\"`, \
         `store = \"file\"` and `path = {:?}` into the configuration, and restart the target. From then on volumes \
         on files and devices can be added while it runs",
        running.state_dir.display(),
        volume.name,
        path
    )
}

/// A fault of a volume in words of the command that changes it: by its name, and not by its place
/// in a file.
fn of_volume(whole: &TargetConfig, name: &str, fault: &str) -> String {
    let at = whole.volumes.iter().position(|volume| volume.name == name);
    let read_only_back = whole
        .volumes
        .iter()
        .any(|v| v.name == name && v.read_only && v.cache == Some(CacheMode::WriteBack));
    if read_only_back {
        return format!(
            "{name} is read-only then, and its cache is write-back, which is for writes: change both, \
             `rblk-target volume set {name} --read-only --cache write-through`"
        );
    }
    match at {
        Some(at) => fault.replace(&format!("volume[{at}]."), &format!("{name}: ")),
        None => fault.to_owned(),
    }
}

pub(super) fn anew(name: &str) -> String {
    format!(
        "{name} was removed by another command meanwhile; if a volume of that name is served now, it is another one, \
         and stays"
    )
}

/// Other values for a volume. What is absent stays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolumeEdit {
    pub read_only: Option<bool>,
    pub cache: Option<CacheMode>,
    pub read_ahead: Option<ByteSize>,
    pub cache_min: Option<Wish<ByteSize>>,
    pub cache_max: Option<Wish<ByteSize>>,
    pub limits: LimitsWish,
}

impl VolumeEdit {
    /// The volume with these values.
    pub(crate) fn on(self, config: &VolumeConfig) -> VolumeConfig {
        let mut config = config.clone();
        config.limits = self.limits.on(config.limits);
        config.read_only = self.read_only.unwrap_or(config.read_only);
        // The rules of the configuration decide whether its store may have one.
        config.cache = self.cache.or(config.cache);
        config.read_ahead = self.read_ahead.unwrap_or(config.read_ahead);
        config.cache_min = Wish::on(self.cache_min, config.cache_min);
        config.cache_max = Wish::on(self.cache_max, config.cache_max);
        config
    }
}
