//! [`Volumes`]: the volumes as control has them beside [`Core`](super::core::Core): configuration,
//! stores, and the change under way. Core decides which steps a change takes. Here they are carried
//! out: by mail to every poll group, or at the store by a thread that may block.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use rblk_config::{ByteSize, CacheMode, StoreKind, TargetConfig, VolumeConfig};
use rblk_fabric::{PageKind, Region};
use tokio::sync::{mpsc, oneshot};

use super::Control;
use super::ask::LimitsWish;
use super::core::{Step, VolumeOrder};
use crate::exports::OpenedVolume;
use crate::limits::Limiter;
use crate::poll_group::{StepTicket, ToGroup, VolumeStep};
use crate::store::backing::Backing;
use crate::store::{StoreIdentity, VolumeIndex};
use crate::volume::{Placement, Volume};

/// A change of one volume.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Serve it. Its index is not chosen yet.
    Add(VolumeConfig, Arc<OpenedVolume>),
    /// Serve it no longer.
    Remove {
        /// Its name.
        name: String,
        /// Also if hosts have it open.
        force: bool,
    },
    /// Another size.
    Resize {
        /// Its name.
        name: String,
        /// The size; none: that of its file or device now.
        size: Option<ByteSize>,
        /// It may become smaller.
        shrink: bool,
    },
    /// The volume of this name is configured so from now on.
    Become(VolumeConfig),
}

impl Change {
    /// For the log.
    fn word(&self) -> &'static str {
        match self {
            Self::Add(..) => "add",
            Self::Remove { .. } => "remove",
            Self::Resize { .. } => "resize",
            Self::Become(_) => "set",
        }
    }
}

/// What a change led to.
pub(crate) type Outcome = Result<Changed, String>;

/// A volume after a change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Changed {
    /// Its configuration; none: it was removed.
    pub config: Option<VolumeConfig>,
    /// Its size.
    pub bytes: u64,
}

/// A change that may be carried out.
#[derive(Debug)]
struct Plan {
    order: VolumeOrder,
    config: Option<VolumeConfig>,
    name: String,
    opened: Option<Arc<OpenedVolume>>,
}

/// A change that is being carried out.
#[derive(Debug)]
struct Underway {
    plan: Plan,
    bytes: u64,
    before: Option<Arc<Volume>>,
    reply: oneshot::Sender<Outcome>,
    // Poll groups that have not done the step.
    waiting: usize,
    failure: Option<String>,
}

/// The end of work at a store.
type StoreDone = (StepTicket, Result<(), String>);

/// See the module.
#[derive(Debug)]
pub(super) struct Volumes {
    // What the target runs with: the configuration of its start, with every change since.
    running: TargetConfig,
    backings: HashMap<VolumeIndex, Arc<Backing>>,
    // The index of the next new volume, and how many there are.
    next: u16,
    places: u16,
    ticket: u64,
    underway: Option<Underway>,
    done: (mpsc::UnboundedSender<StoreDone>, mpsc::UnboundedReceiver<StoreDone>),
}

impl Volumes {
    /// The volumes of a target that starts.
    pub(super) fn new(
        running: TargetConfig,
        backings: HashMap<VolumeIndex, Arc<Backing>>,
        places: u16,
    ) -> Self {
        let next = u16::try_from(running.volumes.len()).unwrap_or(u16::MAX);
        let done = mpsc::unbounded_channel();
        Self { running, backings, next, places, ticket: 0, underway: None, done }
    }

    /// What the target runs with.
    pub(super) fn running(&self) -> &TargetConfig {
        &self.running
    }

    /// What the target runs with, to note other changes.
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
    pub(super) fn judge(&self, change: &Change) -> Result<(), String> {
        let plan = self.plan(change, false)?;
        self.core.judge(&plan.order).map_err(|error| error.to_string())
    }

    /// Begins a change, and answers when it has ended.
    ///
    /// `is_alone`: it is not a part of a configuration that was checked as a whole.
    pub(super) fn change(
        &mut self,
        change: &Change,
        is_alone: bool,
        reply: oneshot::Sender<Outcome>,
    ) {
        match self.begin_change(change, is_alone) {
            Ok((plan, bytes, before)) => {
                let underway = Underway { plan, bytes, before, reply, waiting: 0, failure: None };
                self.volumes.underway = Some(underway);
            }
            // An error means that nobody waits for the answer.
            Err(refused) => drop(reply.send(Err(refused))),
        }
    }

    fn begin_change(
        &mut self,
        change: &Change,
        is_alone: bool,
    ) -> Result<(Plan, u64, Option<Arc<Volume>>), String> {
        let plan = self.plan(change, true)?;
        if is_alone {
            let whole = with_volume(&self.volumes.running, &plan.name, plan.config.as_ref());
            whole.validate().map_err(|error| error.to_string())?;
        }
        let bytes = match &plan.order {
            VolumeOrder::Add(volume) | VolumeOrder::Alter { volume, .. } => volume.size_bytes(),
            VolumeOrder::Remove { .. } => 0,
        };
        let before = self.volume_named(&plan.name).cloned();
        let now = Instant::now();
        self.core.judge(&plan.order).map_err(|error| error.to_string())?;
        if let (VolumeOrder::Add(volume), Some(opened)) = (&plan.order, &plan.opened) {
            self.compare_store(volume, opened);
        }
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
        self.persister.serve(volume.uuid, identity.clone());
        if self.core.serve_from(volume, identity.as_ref()) {
            tracing::error!(
                volume = %volume.name,
                "this may be another file, device or memory than the one this volume was served from before: a \
                 mount that comes back is refused (fenced)"
            );
        }
    }

    fn volume_named(&self, name: &str) -> Option<&Arc<Volume>> {
        self.core.volumes().iter().find(|volume| volume.name.as_str() == name)
    }

    /// What a change means here. With `real` memory is allocated for it.
    fn plan(&self, change: &Change, real: bool) -> Result<Plan, String> {
        match change {
            Change::Add(config, opened) => {
                if opened.backing.is_some() && !self.losses.can_remember() {
                    return Err("this run of the target remembers no hosts and no losses, because it began \
                                without a volume on a file or device: write the volume into the configuration, \
                                and restart the target"
                        .to_owned());
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
                Ok(Plan {
                    order: VolumeOrder::Add(volume),
                    config: Some(config.clone()),
                    name: config.name.clone(),
                    opened: Some(Arc::clone(opened)),
                })
            }
            Change::Remove { name, force } => {
                self.volumes.config_of(name)?;
                let volume = self.volume_named(name).ok_or("it is not served")?.index;
                let order = VolumeOrder::Remove { volume, force: *force };
                Ok(Plan { order, config: None, name: name.clone(), opened: None })
            }
            Change::Resize { name, size, shrink } => {
                let mut config = self.volumes.config_of(name)?.clone();
                let bytes = self.size_wanted(name, *size)?;
                if config.size.is_some() {
                    config.size = Some(ByteSize(bytes));
                }
                self.plan_of_alter(config, Some(bytes), *shrink, real)
            }
            Change::Become(config) => {
                let bytes = config.size.map(|size| size.0);
                self.plan_of_alter(config.clone(), bytes, false, real)
            }
        }
    }

    /// The size that is asked for, or that the file or device of a volume has.
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
        let limits = Limiter::renewed(before.limits.as_ref(), config.limits());
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
            volume.read_ahead_bytes = u32::try_from(config.read_ahead.0).unwrap_or(u32::MAX);
        }
        if let (Placement::Memory(_), true) = (&before.placement, bytes != before.size_bytes()) {
            if bytes < before.size_bytes() && !shrink {
                // Judged before memory is taken.
                let order = VolumeOrder::Alter { volume: Arc::new(volume), shrink };
                return Ok(Plan { order, config: Some(config), name, opened: None });
            }
            if real {
                let len = usize::try_from(bytes).map_err(|error| error.to_string())?;
                let region = Region::allocate(len, PageKind::Normal);
                volume.placement = Placement::Memory(region.map_err(|error| error.to_string())?);
            }
        }
        let order = VolumeOrder::Alter { volume: Arc::new(volume), shrink };
        Ok(Plan { order, config: Some(config), name, opened: None })
    }

    /// Carries out a step of the change under way.
    pub(super) fn begin_step(&mut self, step: Step) {
        self.volumes.ticket += 1;
        let ticket = StepTicket(self.volumes.ticket);
        let Some(volume) = self.core.altered().map(Arc::clone) else { return };
        if step == Step::Store {
            return self.begin_store_work(ticket, &volume);
        }
        let groups = self.groups.len();
        if let Some(underway) = &mut self.volumes.underway {
            (underway.waiting, underway.failure) = (groups, None);
        }
        let mails = match self.mails_of(step, &volume) {
            Ok(mails) => mails,
            Err(error) => return self.core.stepped(Err(error), Instant::now()),
        };
        for (group, step) in mails.into_iter().enumerate() {
            self.groups.send(group, ToGroup::Step { ticket, volume: volume.index, step });
        }
    }

    /// The mail of a step, by poll group.
    fn mails_of(&mut self, step: Step, volume: &Arc<Volume>) -> Result<Vec<VolumeStep>, String> {
        if step == Step::Add {
            return self.mails_of_add(volume);
        }
        if step == Step::Drop {
            self.devices.remove_volume(volume.index);
        }
        let mail = || match step {
            Step::Grow => VolumeStep::Grow { size_bytes: volume.size_bytes() },
            Step::Close => VolumeStep::Close,
            Step::WriteBack => VolumeStep::WriteBack,
            Step::Reshape => VolumeStep::Reshape(Arc::clone(volume)),
            Step::Drop => VolumeStep::Drop,
            Step::Access | Step::Add | Step::Store => VolumeStep::Access(Arc::clone(volume)),
        };
        Ok((0..self.groups.len()).map(|_| mail()).collect())
    }

    fn mails_of_add(&mut self, volume: &Arc<Volume>) -> Result<Vec<VolumeStep>, String> {
        let registered = match &volume.placement {
            Placement::Memory(region) => self
                .devices
                .add_volume(volume.index, region)
                .map_err(|error| format!("a device cannot register its memory: {error}"))?,
            Placement::Store | Placement::Null => Vec::new(),
        };
        let backing = self.volumes.backings.get(&volume.index).cloned();
        let mail = |handle: &mut crate::poll_group::thread::Handle| VolumeStep::Add {
            volume: Arc::clone(volume),
            backing: backing.clone(),
            stats: handle.new_stats(volume.index),
            registered: registered.clone(),
        };
        Ok(self.groups.iter_mut().map(mail).collect())
    }

    /// Gives the store of a volume its size, or the memory of a volume in memory its contents.
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
                    Ok(())
                }
                _ => backing.map_or(Ok(()), |backing| {
                    backing.resize(volume.size_bytes()).map_err(|error| error.to_string())
                }),
            };
            // An error means that control has ended.
            let _ = done.send((ticket, result));
        });
    }

    /// Work at a store ended.
    pub(super) fn on_store_done(&mut self, (ticket, result): StoreDone) {
        if ticket.0 == self.volumes.ticket {
            self.core.stepped(result, Instant::now());
        }
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

    /// Nothing waits for the step under way any more.
    pub(super) fn give_up_step(&mut self) {
        self.volumes.ticket += 1;
    }

    /// The change under way has ended.
    pub(super) fn changed(&mut self, result: Result<(), String>) {
        let Some(Underway { plan, bytes, reply, .. }) = self.volumes.underway.take() else {
            return;
        };
        let (index, is_new) = match &plan.order {
            VolumeOrder::Add(volume) => (volume.index, true),
            VolumeOrder::Alter { volume, .. } => (volume.index, false),
            VolumeOrder::Remove { volume, .. } => (*volume, false),
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
        let is_gone = if result.is_ok() { plan.config.is_none() } else { is_new };
        if is_gone {
            // The last of those who have the file open: it is unlocked now.
            self.volumes.backings.remove(&index);
            self.groups.iter_mut().for_each(|handle| handle.forget_volume(index));
            self.description.volume_notes.remove(&plan.name);
        }
        let outcome = result.map(|()| Changed { config: plan.config, bytes });
        drop(plan.opened);
        // An error means that nobody waits for the answer.
        let _ = reply.send(outcome);
    }
}

/// A volume with other values, as `volume set` asks for.
pub(crate) fn set(
    config: &VolumeConfig,
    read_only: Option<bool>,
    cache: Option<CacheMode>,
    read_ahead: Option<ByteSize>,
    limits: LimitsWish,
) -> VolumeConfig {
    let mut config = config.clone();
    config = config.clone().with_limits(limits.on(config.limits()));
    config.read_only = read_only.unwrap_or(config.read_only);
    if cache.is_some() && config.store == StoreKind::File {
        config.cache = cache;
    } else if cache.is_some() {
        // The rules of the configuration say what is wrong.
        config.cache = cache;
    }
    config.read_ahead = read_ahead.unwrap_or(config.read_ahead);
    config
}
