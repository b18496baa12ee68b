//! [`World`]: a machine with volumes and a state directory, the hosts, and the events.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use rblk_config::VolumeConfig;
use rblk_rig::seed::Random;
use rblk_target::control::core::{Effect, VolumeChange};
use rblk_target::data::poll_group::VolumeStep;
use rblk_target::record::AtRisk;
use rblk_target::volume::{CacheMode, Volume};

use super::directory::Fault;
use super::holder::cells_of;
use super::plan::Event;
use super::run::{Config, Serving, volume};
use super::{Account, CELLS, Directory, Disk, HOSTS, Holder, Known, Plan, Run, VOLUMES};

/// Counts of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Runs that served.
    pub runs: u64,
    /// Hosts that came back with unflushed writes, and met their old verifier.
    pub kept: u64,
    /// Hosts that came back with unflushed writes, and heard of a loss.
    pub told: u64,
    /// Hosts among these that lost a write.
    pub gone: u64,
    /// Live changes that succeeded, and that failed.
    pub changes: [u64; 2],
    /// Upgrades.
    pub upgrades: u64,
    /// Losses that were hidden since they could be noted nowhere.
    pub excused: u64,
}

impl Report {
    /// Adds the counts of another report.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.kept += other.kept;
        self.told += other.told;
        self.gone += other.gone;
        self.upgrades += other.upgrades;
        self.excused += other.excused;
        for (sum, more) in self.changes.iter_mut().zip(other.changes) {
            *sum += more;
        }
    }
}

/// How far a start gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    Read,
    PartOfRecords,
    Begun,
}

/// See the module.
#[derive(Debug)]
pub struct World {
    plan: Plan,
    random: Random,
    now: Instant,
    directory: Directory,
    boot: u64,
    verifiers: Arc<AtomicU64>,
    disks: [Disk; VOLUMES],
    caches: [CacheMode; VOLUMES],
    accounts: [Account; VOLUMES],
    holders: [Holder; HOSTS],
    run: Option<Run>,
    writes: u64,
    dies: bool,
    report: Report,
    // The story of a sequence that broke a rule.
    story: Option<Vec<String>>,
}

const MODES: [CacheMode; 3] = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];

fn by_mode(cache: CacheMode) -> AtRisk {
    if cache == CacheMode::WriteBack { AtRisk::Process } else { AtRisk::Machine }
}

impl World {
    /// Runs a sequence.
    ///
    /// # Panics
    /// A rule was broken.
    #[must_use]
    pub fn run(plan: Plan) -> Report {
        Self::tried(plan, None)
    }

    fn tried(plan: Plan, story: Option<Vec<String>>) -> Report {
        let mut world = Self::new(plan, story);
        for _ in 0..world.plan.events {
            let is_up = world.run.is_some();
            let event = world.plan.draw(&mut world.random, is_up);
            world.happens(event);
        }
        world.finish();
        world.report
    }

    fn new(plan: Plan, story: Option<Vec<String>>) -> Self {
        let mut random = Random::new(plan.seed);
        Self {
            directory: Directory::new(plan.kind),
            plan,
            now: Instant::now(),
            boot: 1,
            verifiers: Arc::default(),
            disks: std::array::from_fn(|_| Disk::new(CELLS)),
            caches: std::array::from_fn(|_| MODES[random.index(3)]),
            random,
            accounts: std::array::from_fn(|_| Account::default()),
            holders: std::array::from_fn(|_| Holder::default()),
            run: None,
            writes: 0,
            dies: false,
            report: Report::default(),
            story,
        }
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut self.story {
            story.push(what());
        }
    }

    fn broken(&self, what: &str) -> ! {
        let Some(story) = &self.story else {
            // Runs the sequence again, with its story.
            let _ = Self::tried(self.plan.clone(), Some(Vec::new()));
            panic!("seed {}: {what}\n  and not when it is run again", self.plan.seed)
        };
        let from = story.len().saturating_sub(60);
        let story = story[from..].join("\n  ");
        panic!("seed {}: {what}\n  {story}", self.plan.seed)
    }

    fn happens(&mut self, event: Event) {
        self.tell(|| format!("{event:?}"));
        match event {
            Event::Start => self.start(Reach::Begun),
            Event::FailedStart => self.start(Reach::Read),
            Event::KilledStart => self.start(Reach::PartOfRecords),
            Event::Open => self.open_some(),
            Event::Write => self.write(false),
            Event::WriteDurably => self.write(true),
            Event::Flush => self.flush_some(),
            Event::Flow => (0..VOLUMES).for_each(|v| self.disks[v].flow(&mut self.random)),
            Event::Alter => self.alter(),
            Event::Add => self.add(),
            Event::Remove => self.remove(),
            Event::Stop => self.stop(true),
            Event::GiveUp => self.stop(false),
            Event::Upgrade => self.upgrade(),
            Event::Kill => self.kill(),
            Event::Cut => self.cut(),
            Event::LoseSync => {
                let number = self.random.index(VOLUMES);
                self.disks[number].lose_next();
            }
            Event::Fault => self.fault(),
            Event::Vanish => self.vanish(),
            Event::Tick => self.tick(),
        }
    }

    fn is_faulty(&self) -> bool {
        self.directory.fault() != Fault::None
    }

    // Starts and ends.

    fn start(&mut self, reach: Reach) {
        let all = self.random.chance(300);
        let mut configs = Vec::new();
        for number in 0..VOLUMES {
            if self.random.chance(300) {
                self.caches[number] = MODES[self.random.index(3)];
            }
            let (cache, cells) = (self.caches[number], self.disks[number].len());
            let read_only = self.random.chance(250);
            if all || self.random.chance(600) {
                configs.push((number, Config { cache, read_only, cells }));
            }
        }
        self.start_with(&configs, reach);
    }

    fn start_with(&mut self, configs: &[(usize, Config)], reach: Reach) {
        self.tell(|| format!("  {reach:?} {configs:?}"));
        assert!(self.run.is_none(), "a process serves already");
        let Some(mut run) = Run::load(&self.directory, self.boot, &self.verifiers, configs) else {
            return;
        };
        if reach == Reach::Read {
            return;
        }
        let before = self.directory.before();
        for (number, config) in configs.iter().filter(|(_, config)| !config.read_only) {
            self.accounts[*number].expose(by_mode(config.cache));
        }
        run.begin();
        if reach == Reach::PartOfRecords {
            self.directory.interrupted(&before, &mut self.random);
            configs.iter().for_each(|(number, _)| self.accounts[*number].tear());
            return self.process_ended();
        }
        self.directory.synced();
        let is_kept = !self.is_faulty();
        for (number, config) in configs {
            if !is_kept {
                self.accounts[*number].count("the record was not written");
            }
            // Without writers the record of a volume stays as it is.
            if !is_kept || !config.read_only {
                self.accounts[*number].set_kept(is_kept);
            }
        }
        self.report.runs += 1;
        self.run = Some(run);
        // Most hosts wait for the run.
        for (host, (number, _)) in
            (0..HOSTS).flat_map(|host| configs.iter().map(move |c| (host, c)))
        {
            if self.random.chance(600) {
                self.open(host, *number);
            }
        }
    }

    /// The process is gone.
    fn process_ended(&mut self) {
        self.run = None;
        for number in 0..VOLUMES {
            self.disks[number].end_process();
            let is_hidden = self.accounts[number].end_process();
            self.report.excused += u64::from(is_hidden);
            for holder in &mut self.holders {
                let claim = &mut holder.claims[number];
                claim.is_open = false;
                if is_hidden {
                    claim.drop_unflushed();
                }
            }
        }
    }

    fn kill(&mut self) {
        let before = self.directory.before();
        self.writes += 1;
        if let Some(run) = &mut self.run {
            // Ends in the middle of the write of a record.
            if let Some(number) = run.served.keys().next().copied() {
                run.hold(number, 0, self.writes);
            }
        }
        self.directory.interrupted(&before, &mut self.random);
        self.process_ended();
    }

    fn cut(&mut self) {
        self.kill();
        self.boot += 1;
        self.disks.iter_mut().for_each(Disk::cut);
        self.accounts.iter_mut().for_each(Account::cut);
        self.directory.cut(&mut self.random);
        self.check_durable();
    }

    /// Ends the run in good order, or (false) gives up before all is written.
    fn stop(&mut self, all: bool) {
        let Some(run) = &self.run else { return };
        let mut unsaved = BTreeSet::new();
        let stores: Vec<usize> =
            run.served.iter().filter(|(_, s)| !s.is_for_reading).map(|(v, _)| *v).collect();
        for number in stores {
            let is_tried = all || self.random.chance(500);
            if !(is_tried && self.sync(number)) {
                unsaved.insert(number);
            }
        }
        let before = self.directory.before();
        let Some(run) = self.run.take() else { return };
        let wrote: Vec<usize> =
            run.served.iter().filter(|(_, s)| s.was_writable).map(|(v, _)| *v).collect();
        let (saved, lost) = run.end(&unsaved);
        self.tell(|| format!("  saved {saved:?}, lost {lost:?}"));
        let is_killed = all && self.random.chance(100);
        if is_killed || self.is_faulty() {
            self.accounts.iter_mut().for_each(Account::tear);
        }
        if is_killed {
            self.directory.interrupted(&before, &mut self.random);
        } else {
            self.directory.synced();
        }
        for (number, is_noted) in lost {
            if unsaved.contains(&number) {
                self.accounts[number].lose(is_noted && !is_killed);
            }
            if is_noted && !is_killed {
                self.accounts[number].noted();
            }
        }
        let is_written = !is_killed && !self.is_faulty();
        for number in saved.into_iter().filter(|number| is_written && wrote.contains(number)) {
            self.accounts[number].set_kept(true);
            self.accounts[number].lower(AtRisk::Nothing);
        }
        self.process_ended();
    }

    fn upgrade(&mut self) {
        let Some(run) = &self.run else { return };
        let configs: Vec<(usize, Config)> =
            run.served.iter().map(|(number, serving)| (*number, serving.config())).collect();
        self.report.upgrades += 1;
        self.stop(true);
        match self.random.index(6) {
            0..=2 => self.start_with(&configs, Reach::Begun),
            // The new program cannot start, and the old one goes on.
            3 => {
                self.start_with(&configs, Reach::Read);
                self.start_with(&configs, Reach::Begun);
            }
            4 => self.start_with(&configs, Reach::PartOfRecords),
            _ => {
                self.start_with(&configs, Reach::Begun);
                self.kill();
            }
        }
    }

    // Other events of stores and records.

    fn sync(&mut self, number: usize) -> bool {
        let Some(run) = &mut self.run else { return false };
        let Some(serving) = run.served.get_mut(&number) else { return false };
        if serving.is_latched {
            return false;
        }
        if self.disks[number].sync(&mut self.random) {
            return true;
        }
        serving.is_latched = true;
        self.lost(number);
        false
    }

    fn lost(&mut self, number: usize) {
        let Some(run) = &mut self.run else { return };
        let is_noted = run.lose(number);
        self.directory.synced();
        self.accounts[number].lose(is_noted);
        self.tell(|| format!("  v{number} lost writes, noted: {is_noted}"));
    }

    fn tick(&mut self) {
        let Some(run) = &mut self.run else { return };
        for number in run.owed.clone() {
            if run.lose(number) {
                self.accounts[number].noted();
            }
        }
        self.directory.synced();
    }

    fn fault(&mut self) {
        let fault = match self.directory.fault() {
            Fault::None => [Fault::Full, Fault::Late, Fault::Unwritable, Fault::Unreadable]
                [self.random.index(4)],
            _ => Fault::None,
        };
        self.tell(|| format!("  {fault:?}"));
        self.directory.set_fault(fault);
    }

    fn vanish(&mut self) {
        let number = self.random.index(VOLUMES);
        self.directory.vanish(number);
        self.accounts[number].count("the record vanished");
        self.accounts[number].set_kept(false);
    }

    // Hosts.

    fn open_some(&mut self) {
        let (host, number) = (self.random.index(HOSTS), self.random.index(VOLUMES));
        if self.random.chance(150) {
            self.begin_anew(host, number);
        } else {
            self.open(host, number);
        }
    }

    /// A new mount of the host. Nothing needs the writes of the old mount any more.
    fn begin_anew(&mut self, host: usize, number: usize) {
        let Some(run) = self.run.as_mut().filter(|run| run.served.contains_key(&number)) else {
            return;
        };
        self.writes += 1;
        let is_durable = run.hold(number, host, self.writes);
        self.directory.synced();
        let is_kept = is_durable && !self.is_faulty();
        self.accounts[number].set_kept(is_kept);
        let claim = &mut self.holders[host].claims[number];
        claim.drop_unflushed();
        (claim.told, claim.is_open) = (None, false);
        if is_durable {
            self.open(host, number);
        }
    }

    /// A host opens a volume, and compares verifiers.
    fn open(&mut self, host: usize, number: usize) {
        let Some(serving) = self.run.as_ref().and_then(|run| run.served.get(&number)) else {
            return;
        };
        let (verifier, is_latched) = (serving.verifier, serving.is_latched);
        let claim = &self.holders[host].claims[number];
        let (unflushed, told, causes) = (claim.unflushed(), claim.told, claim.causes);
        let account = self.accounts[number].clone();
        let is_gone = claim.cells().find(|(at, known)| {
            matches!(known, Known::Acknowledged(value) if self.disks[number].read(*at) != *value)
        });
        self.tell(|| {
            format!("  host {host} opens v{number}: {told:?} -> {verifier:?}, {unflushed} unflushed, {account:?}")
        });
        if told == Some(verifier) {
            // After a failed sync, every FLUSH of this run reports the loss.
            if let Some((at, known)) = is_gone.filter(|_| !is_latched) {
                let disk = &self.disks[number];
                self.broken(&format!(
                    "host {host} finds the verifier of v{number} it knows, and {known:?} of cell {at} is gone: {disk:?}"
                ));
            }
            self.report.kept += u64::from(unflushed > 0);
        } else if unflushed > 0 {
            if account.causes() == causes {
                self.broken(&format!(
                    "host {host} is told that v{number} lost writes, and nothing could be gone (last: {})",
                    account.last()
                ));
            }
            self.report.told += 1;
            self.report.gone += u64::from(is_gone.is_some());
        }
        let causes = account.causes();
        let claim = &mut self.holders[host].claims[number];
        if told != Some(verifier) {
            claim.drop_unflushed();
        }
        (claim.told, claim.is_open, claim.causes) = (Some(verifier), true, causes);
        self.check_durable();
    }

    /// Checks that every write that a FLUSH covered is on the disk.
    fn check_durable(&self) {
        for (host, holder) in self.holders.iter().enumerate() {
            for (number, claim) in holder.claims.iter().enumerate() {
                for (at, known) in claim.cells() {
                    let disk = &self.disks[number];
                    if matches!(known, Known::Durable(value) if disk.durable(at) != value) {
                        self.broken(&format!(
                            "{known:?} of host {host} in v{number}, cell {at}, is gone: {disk:?}"
                        ));
                    }
                }
            }
        }
    }

    /// A host and a volume that it has open.
    fn some_user(&mut self) -> Option<(usize, usize)> {
        let (host, number) = (self.random.index(HOSTS), self.random.index(VOLUMES));
        let is_open = self.holders[host].claims[number].is_open;
        let is_served = self.run.as_ref().is_some_and(|run| run.served.contains_key(&number));
        (is_open && is_served).then_some((host, number))
    }

    fn write(&mut self, durably: bool) {
        let Some((host, number)) = self.some_user() else { return };
        let Some(serving) = self.run.as_ref().and_then(|run| run.served.get(&number)) else {
            return;
        };
        let (config, is_latched) = (serving.config(), serving.is_latched);
        let cells: Vec<usize> = cells_of(host).filter(|at| *at < config.cells).collect();
        if config.read_only || cells.is_empty() {
            return;
        }
        let at = cells[self.random.index(cells.len())];
        self.writes += 1;
        let value = self.writes;
        self.tell(|| format!("  host {host} writes {value} to v{number}, cell {at}"));
        let cached = config.cache == CacheMode::WriteBack;
        let known = if !durably {
            self.disks[number].write(at, value, cached);
            Known::Acknowledged(value)
        } else if !is_latched && self.disks[number].write_durably(at, value) {
            Known::Durable(value)
        } else {
            // The write fails and reports earlier losses, as a FLUSH would.
            self.sync(number);
            let claim = &mut self.holders[host].claims[number];
            claim.drop_unflushed();
            return claim.forget(at);
        };
        self.holders[host].claims[number].answered(at, known);
    }

    fn flush_some(&mut self) {
        let Some((host, number)) = self.some_user() else { return };
        self.flush(host, number);
    }

    fn flush(&mut self, host: usize, number: usize) {
        let is_durable = self.sync(number);
        let claim = &mut self.holders[host].claims[number];
        if is_durable {
            claim.flushed();
            self.check_durable();
        } else {
            claim.drop_unflushed();
        }
    }

    // Live changes.

    fn alter(&mut self) {
        let number = self.random.index(VOLUMES);
        let Some(serving) = self.run.as_ref().and_then(|run| run.served.get(&number)) else {
            return;
        };
        let (old, is_for_reading) = (Arc::clone(&serving.volume), serving.is_for_reading);
        let mut config = serving.config();
        let name = old.name.to_string();
        let order = match self.random.index(8) {
            0 => (VolumeChange::Snapshot { name }, old),
            1 => (VolumeChange::WriteBack { name }, old),
            change => {
                match change {
                    2 | 3 => config.cache = MODES[self.random.index(3)],
                    4 | 5 => config.read_only = is_for_reading || !config.read_only,
                    _ => config.cells = 2 + self.random.index(CELLS - 1),
                }
                let fits = !is_for_reading || config.cells <= self.disks[number].len();
                if !fits {
                    return;
                }
                let volume = volume(number, old.index.0, config);
                (VolumeChange::Resize { name, size: None, shrink: true }, volume)
            }
        };
        self.change(number, order);
    }

    fn add(&mut self) {
        let number = self.random.index(VOLUMES);
        let (cache, cells) = (MODES[self.random.index(3)], self.disks[number].len());
        let config = Config { cache, cells, read_only: self.random.chance(250) };
        let Some(run) = self.run.as_mut().filter(|run| !run.served.contains_key(&number)) else {
            return;
        };
        let volume = volume(number, run.next_index(), config);
        let config = VolumeConfig::file(volume.name.as_str(), "/srv/v.img");
        self.change(number, (VolumeChange::Add(config), volume));
    }

    fn remove(&mut self) {
        let number = self.random.index(VOLUMES);
        let force = self.random.chance(300);
        let Some(serving) = self.run.as_ref().and_then(|run| run.served.get(&number)) else {
            return;
        };
        let volume = Arc::clone(&serving.volume);
        let name = volume.name.to_string();
        self.change(number, (VolumeChange::Remove { name, which: None, force }, volume));
    }

    /// Carries out a change that makes a volume, step by step.
    fn change(&mut self, number: usize, (change, volume): (VolumeChange, Arc<Volume>)) {
        self.tell(|| format!("  v{number}: {change:?} {volume:?}"));
        let before = self.run.as_ref().and_then(|run| run.served.get(&number)).cloned();
        let exposed = self.accounts[number].exposed();
        let Some(run) = &mut self.run else { return };
        if run.core.change(&change, Arc::clone(&volume), self.now).is_err() {
            return;
        }
        let mut done = Vec::new();
        let mut is_given_up = false;
        let result = loop {
            let Some(run) = &mut self.run else { return };
            match run.core.next_effect() {
                Some(Effect::Step(step)) => {
                    let Some(volume) = run.core.altered().map(Arc::clone) else { return };
                    let result = self.carry_out(number, step, &volume);
                    if std::mem::take(&mut self.dies) {
                        return self.kill();
                    }
                    done.extend(result.is_ok().then_some(step));
                    let Some(run) = &mut self.run else { return };
                    run.core.stepped(result, self.now);
                }
                Some(Effect::GivenUp(_)) => is_given_up = true,
                Some(Effect::Altered(result)) => break result,
                Some(_) => {}
                None => self.broken("the change does not end"),
            }
        };
        self.tell(|| format!("  {done:?}: {result:?}, given up: {is_given_up}"));
        self.report.changes[usize::from(result.is_err())] += 1;
        if result.is_ok() {
            self.changed(number, &change, volume);
        }
        if result.is_err() {
            self.accounts[number].restore(exposed);
        }
        if before.is_some() {
            self.note_safe(number, is_given_up, &done);
        } else if let (Err(_), Some(run)) = (&result, &mut self.run) {
            run.take_back(number);
            self.directory.synced();
        }
        if done.contains(&VolumeStep::Close) {
            // The volume's hosts come back at once.
            let has = |host: &usize| self.holders[*host].claims[number].is_open;
            let hosts: Vec<usize> = (0..HOSTS).filter(has).collect();
            hosts.into_iter().for_each(|host| self.open(host, number));
        }
    }

    fn carry_out(
        &mut self,
        number: usize,
        step: VolumeStep,
        volume: &Volume,
    ) -> Result<(), String> {
        if self.random.chance(8) {
            self.dies = true;
        }
        let cells = usize::try_from(volume.blocks.0).unwrap_or(0);
        let fails = self.random.chance(40);
        match step {
            VolumeStep::Record => {
                let risk = AtRisk::by_writes_to(volume).expect("a store");
                if !volume.read_only {
                    self.accounts[number].expose(risk);
                }
                let Some(run) = &mut self.run else { return Ok(()) };
                let result = run.record(number, volume);
                self.directory.synced();
                self.accounts[number].set_kept(!self.is_faulty());
                result
            }
            VolumeStep::WriteBack if !self.sync(number) => Err("its store failed".to_owned()),
            VolumeStep::Add | VolumeStep::Close | VolumeStep::Store | VolumeStep::Probe
                if fails =>
            {
                Err("it failed".to_owned())
            }
            VolumeStep::Store | VolumeStep::CutBack => {
                self.disks[number].resize(cells);
                for holder in &mut self.holders {
                    holder.claims[number].cut(cells);
                }
                Ok(())
            }
            VolumeStep::Abandon => {
                self.disks[number].end_process();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Updates the served volumes after a change.
    fn changed(&mut self, number: usize, change: &VolumeChange, volume: Arc<Volume>) {
        let Some(run) = &mut self.run else { return };
        match change {
            VolumeChange::Add(_) => {
                let verifier = run.verifier(number).expect("it was loaded");
                let serving = Serving {
                    is_for_reading: volume.read_only,
                    was_writable: !volume.read_only,
                    volume,
                    verifier,
                    is_latched: false,
                };
                run.served.insert(number, serving);
                self.accounts[number].served_anew();
            }
            VolumeChange::Remove { .. } => {
                for holder in &mut self.holders {
                    holder.claims[number].is_open = false;
                }
            }
            VolumeChange::Resize { .. } => {
                if let Some(serving) = run.served.get_mut(&number) {
                    serving.was_writable |= !volume.read_only;
                    serving.volume = volume;
                }
            }
            _ => {}
        }
    }

    fn note_safe(&mut self, number: usize, is_given_up: bool, done: &[VolumeStep]) {
        let is_faulty = self.is_faulty();
        let Some(run) = &mut self.run else { return };
        let is_removed = done.contains(&VolumeStep::Drop) || done.contains(&VolumeStep::Abandon);
        let removed = if is_removed { run.served.remove(&number) } else { None };
        if is_given_up {
            return self.lost(number);
        }
        run.note_safe(number);
        self.directory.synced();
        if is_faulty {
            return self.accounts[number].tear();
        }
        let serving = removed.as_ref().or_else(|| run.served.get(&number));
        let Some(serving) = serving.filter(|serving| serving.was_writable) else { return };
        let risk = match removed {
            Some(_) => AtRisk::Nothing,
            None => by_mode(serving.volume.cache),
        };
        self.accounts[number].lower(risk);
    }

    /// Serves every volume in the end. Every host comes back and flushes.
    fn finish(&mut self) {
        self.tell(|| "the end".to_owned());
        self.directory.set_fault(Fault::None);
        self.tick();
        let cells: Vec<usize> = self.disks.iter().map(Disk::len).collect();
        let config =
            |number| Config { cache: CacheMode::None, read_only: false, cells: cells[number] };
        let configs: Vec<(usize, Config)> = (0..VOLUMES).map(|v| (v, config(v))).collect();
        for _ in 0..2 {
            match self.random.index(3) {
                0 => self.stop(true),
                1 => self.kill(),
                _ => self.cut(),
            }
            // However the last run ended.
            self.kill();
            self.start_with(&configs, Reach::Begun);
            for host in 0..HOSTS {
                (0..VOLUMES).for_each(|number| self.open(host, number));
            }
        }
    }
}
