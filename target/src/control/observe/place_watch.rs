//! [`PlaceWatch`]: looks at the stores of volumes and at `state_dir` while they are used.
//!
//! A target holds its files open, so its own work does not show whether a path still leads to them,
//! and an idle directory does not show that it is full. So Watch looks at them: for a client, if
//! the last look is too old, and once a minute without one.
//!
//! Each look is a task of its own that may block: a file system that does not answer delays neither
//! control nor the look at another store. A place has one look at most. [`AT_ONCE`] looks run at a
//! time beside hanging ones, of which there are [`HANGING`] at most. A place whose look exceeds
//! [`PATIENCE`] counts as one that does not answer, and no client waits for it any longer. The time
//! is an argument.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::ports;
use crate::control::core::Core;
use crate::control::observe::event_log::{EventLog, name_of};
use crate::control::requests::file_work::FileWork;
use crate::record::durable::FILE_MODE;
use crate::store::OpenStore;
use crate::volume::Volume;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_operate::target::status::{PortStatus, TargetStatus};
use rblk_operate::target::store_fault::{StoreFault, StoreFaultKind};
use rblk_operate::target::store_room::StoreRoom;

/// How old a look at a store may be when a client asks.
const STORE_AGE: Duration = Duration::from_millis(200);
/// How old a look at `state_dir`, which writes there, may be when a client asks.
const STATE_AGE: Duration = Duration::from_secs(1);
/// Time between looks without a client.
const PERIOD: Duration = Duration::from_secs(60);
/// Time between looks at images, without a client: such a look asks nothing of the cluster.
const IMAGE_PERIOD: Duration = Duration::from_secs(2);
/// How long a client waits for looks. A longer look is reported as a fault.
const PATIENCE: Duration = Duration::from_millis(500);
/// Looks at a time, without those that hang.
const AT_ONCE: usize = 16;
/// Looks that take longer than [`PATIENCE`]. Tokio has 512 threads for them and for all other work
/// with files.
const HANGING: usize = 128;
/// Bytes that a look writes to test whether `state_dir` takes them: more than an inode holds.
const PROBE_BYTES: usize = 4096;

/// The stores of volumes that have one.
type Backings = HashMap<VolumeIndex, OpenStore>;

/// A place to look at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Watched {
    Store(VolumeIndex),
    StateDir,
    Ports,
}

/// The outcome of a look.
#[derive(Debug)]
enum LookResult {
    Store(Option<StoreFault>, Option<StoreRoom>),
    /// The device and inode of the directory; or why it cannot be used.
    StateDir(Result<(u64, u64), String>),
    /// The ports of each RDMA device, by its name, and the network interfaces.
    Ports(HashMap<String, Vec<PortStatus>>),
}

/// A look that ended.
#[derive(Debug)]
pub(in crate::control) struct Looked {
    place: Watched,
    found: LookResult,
}

/// A place in the queue for a look.
#[derive(Debug)]
struct Queued {
    place: Watched,
    backing: Option<OpenStore>,
    since: Instant,
}

/// The last observations of a place.
#[derive(Debug, Default)]
struct PlaceState {
    // When the last look ended that had an outcome.
    looked: Option<Instant>,
    // When the look under way began.
    began: Option<Instant>,
    fault: Option<StoreFault>,
    room: Option<StoreRoom>,
}

/// A change in the state of a place, for the log.
#[derive(Debug)]
struct PlaceNews {
    place: Watched,
    /// The fault; `None`: it is mended.
    fault: Option<String>,
}

/// A client that waits for looks.
#[derive(Debug)]
pub(in crate::control) enum Asker {
    /// It gets the state of everything.
    Status(oneshot::Sender<TargetStatus>),
    /// It gets the faults of the stores of volumes now, by name.
    Faults(oneshot::Sender<HashMap<String, StoreFault>>),
}

/// See the module.
#[derive(Debug)]
pub(in crate::control) struct PlaceWatch {
    seen: HashMap<Watched, PlaceState>,
    queue: VecDeque<Queued>,
    // The file for the test whether `state_dir` can be written; the directory it was in at first.
    probe: Option<PathBuf>,
    directory: Option<(u64, u64)>,
    state_fault: Option<String>,
    root: Option<PathBuf>,
    ports: HashMap<String, Vec<PortStatus>>,
    // When all places are looked at next.
    next_round: Option<Instant>,
    askers: Vec<Asker>,
    answer_at: Option<Instant>,
    ended: (mpsc::UnboundedSender<Looked>, mpsc::UnboundedReceiver<Looked>),
}

impl PlaceWatch {
    /// No place was looked at yet. `probe` is a file beside the records of the target, if it keeps
    /// any. `root` has the ports of devices, below `sys`, if they are looked at.
    pub(in crate::control) fn new(probe: Option<PathBuf>, root: Option<PathBuf>) -> Self {
        Self {
            seen: HashMap::new(),
            queue: VecDeque::new(),
            probe,
            directory: None,
            state_fault: None,
            root,
            ports: HashMap::new(),
            next_round: None,
            askers: Vec::new(),
            answer_at: None,
            ended: mpsc::unbounded_channel(),
        }
    }

    /// The fault of the store of a volume.
    pub(in crate::control) fn fault_of(&self, volume: VolumeIndex) -> Option<&StoreFault> {
        self.seen.get(&Watched::Store(volume))?.fault.as_ref()
    }

    /// The space of the store of a volume, as it was seen last.
    pub(in crate::control) fn room_of(&self, volume: VolumeIndex) -> Option<&StoreRoom> {
        self.seen.get(&Watched::Store(volume))?.room.as_ref()
    }

    /// The ports of a device, as they were seen last.
    pub(in crate::control) fn ports_of(&self, device: &str) -> Vec<PortStatus> {
        self.ports.get(device).cloned().unwrap_or_default()
    }

    /// Why `state_dir` cannot be used.
    pub(in crate::control) fn state_fault(&self) -> Option<&str> {
        self.state_fault.as_deref()
    }

    /// The next look that ended; `None`: it is time for [`Self::late`]. Cancel safe.
    pub(in crate::control) async fn next(&mut self) -> Option<Looked> {
        match self.due() {
            None => self.ended.1.recv().await,
            Some(due) => {
                let looked = tokio::time::timeout_at(due.into(), self.ended.1.recv()).await;
                looked.ok().flatten()
            }
        }
    }

    fn due(&self) -> Option<Instant> {
        self.answer_at.into_iter().chain(self.next_round).min()
    }

    /// Begins to look at every place that was not looked at for too long: `age` for a store.
    fn look(&mut self, backings: &Backings, age: Duration, now: Instant) {
        self.look_unless(backings, (age, age, STATE_AGE), now);
    }

    /// Looks without a client: at images often, since such a look asks nothing of the cluster.
    fn look_by_itself(&mut self, backings: &Backings, now: Instant) {
        let rarely = PERIOD.saturating_sub(IMAGE_PERIOD / 2);
        self.look_unless(backings, (STORE_AGE, rarely, rarely), now);
    }

    /// Begins to look at every place that was not looked at for longer: an image, another store,
    /// and all other places.
    fn look_unless(
        &mut self,
        backings: &Backings,
        (age, local_age, state_age): (Duration, Duration, Duration),
        now: Instant,
    ) {
        self.seen.retain(|place, _| match place {
            Watched::Store(index) => backings.contains_key(index),
            Watched::StateDir | Watched::Ports => true,
        });
        let stores = backings.iter();
        let stores = stores.map(|(index, backing)| {
            let age = if backing.image().is_some() { age } else { local_age };
            (Watched::Store(*index), Some(backing), age)
        });
        let has_store = !backings.is_empty();
        let state = self.probe.iter().filter(|_| has_store);
        let state = state.map(|_| (Watched::StateDir, None, state_age));
        let ports = self.root.iter().map(|_| (Watched::Ports, None, state_age));
        let all: Vec<_> = stores.chain(state).chain(ports).collect();
        for (place, backing, age) in all {
            let seen = self.seen.entry(place).or_default();
            let is_old = seen.looked.is_none_or(|at| now.saturating_duration_since(at) >= age);
            let is_queued = self.queue.iter().any(|queued| queued.place == place);
            if is_old && seen.began.is_none() && !is_queued {
                self.queue.push_back(Queued { place, backing: backing.cloned(), since: now });
            }
        }
        let has_image = backings.values().any(|store| store.image().is_some());
        let period = if has_image { IMAGE_PERIOD } else { PERIOD };
        self.next_round = has_store.then(|| now + period);
        self.begin(now);
    }

    /// Begins as many looks as there is room for.
    fn begin(&mut self, now: Instant) {
        let began = self.seen.values().filter_map(|seen| seen.began);
        let (hanging, running): (Vec<_>, Vec<_>) = began.partition(|began| is_late(*began, now));
        let (hanging, mut running) = (hanging.len(), running.len());
        while running < AT_ONCE
            && hanging + running < HANGING + AT_ONCE
            && let Some(Queued { place, backing, .. }) = self.queue.pop_front()
        {
            let Some(seen) = self.seen.get_mut(&place) else { continue };
            seen.began = Some(now);
            running += 1;
            let ended = self.ended.0.clone();
            let (probe, root) = (self.probe.clone(), self.root.clone());
            let work = FileWork::begin(self.name_of(place, backing.as_ref()));
            tokio::task::spawn_blocking(move || {
                let found = match (place, backing) {
                    (Watched::Ports, _) => LookResult::Ports(ports::all(&root.unwrap_or_default())),
                    (_, Some(backing)) => LookResult::Store(backing.fault(), backing.room()),
                    (_, None) => LookResult::StateDir(probe_state(&probe.unwrap_or_default())),
                };
                drop(work);
                // An error means that control has ended.
                let _ = ended.send(Looked { place, found });
            });
        }
    }

    /// Names a place for people.
    fn name_of(&self, place: Watched, backing: Option<&OpenStore>) -> String {
        match (place, backing) {
            (_, Some(store)) => store.local().map_or("a Ceph cluster".to_owned(), |backing| {
                backing.path().display().to_string()
            }),
            (Watched::StateDir, _) => shown(self.probe.as_deref().and_then(Path::parent)),
            (Watched::Ports | Watched::Store(_), None) => "its RDMA devices".to_owned(),
        }
    }

    /// A look has ended.
    fn ended(&mut self, Looked { place, found }: Looked, now: Instant) -> Option<PlaceNews> {
        // No entry: the volume is gone.
        let seen = self.seen.get_mut(&place)?;
        (seen.began, seen.looked) = (None, Some(now));
        match found {
            LookResult::Ports(ports) => {
                self.ports = ports;
                None
            }
            LookResult::Store(fault, room) => {
                seen.room = room;
                let was = std::mem::replace(&mut seen.fault, fault);
                let kind = |fault: &Option<StoreFault>| fault.as_ref().map(|fault| fault.kind);
                (kind(&was) != kind(&seen.fault)).then(|| PlaceNews {
                    place,
                    fault: seen.fault.as_ref().map(ToString::to_string),
                })
            }
            LookResult::StateDir(found) => {
                let directory = self.probe.as_deref().and_then(Path::parent);
                let fault = match (found, self.directory) {
                    (Ok(there), Some(first)) if there != first => Some(format!(
                        "{} (state_dir) is not the directory that it was, so the target may not know the holders of \
                         the volumes after a restart: put the former directory back",
                        shown(directory)
                    )),
                    (Ok(there), _) => {
                        self.directory = Some(there);
                        None
                    }
                    (Err(error), _) => Some(format!(
                        "{} (state_dir) cannot be written ({error}), so no host can newly open a volume for writing: \
                         make room, or let the target write there",
                        shown(directory)
                    )),
                };
                self.state_news(fault)
            }
        }
    }

    fn state_news(&mut self, fault: Option<String>) -> Option<PlaceNews> {
        let was = std::mem::replace(&mut self.state_fault, fault);
        let fault = self.state_fault.clone();
        (was.is_some() != fault.is_some()).then_some(PlaceNews { place: Watched::StateDir, fault })
    }

    /// Notes the looks that take too long, and those that wait for such a look.
    fn late(&mut self, backings: &Backings, now: Instant) -> Vec<PlaceNews> {
        let queued = self.queue.iter().map(|queued| (queued.place, queued.since));
        let begun = self.seen.iter().filter_map(|(place, seen)| Some((*place, seen.began?)));
        let late: Vec<Watched> = queued
            .chain(begun)
            .filter(|(_, since)| is_late(*since, now))
            .map(|(place, _)| place)
            .collect();
        let mut news = Vec::new();
        let mut state_is_late = false;
        for place in late {
            let Watched::Store(index) = &place else {
                state_is_late |= place == Watched::StateDir;
                continue;
            };
            let Some(seen) = self.seen.get_mut(&place) else { continue };
            let Some(backing) = backings.get(index) else { continue };
            let is_new = seen.fault.as_ref().map(|f| f.kind) != Some(StoreFaultKind::CannotSee);
            seen.fault = backing.silence();
            if is_new && let Some(silent) = &seen.fault {
                news.push(PlaceNews { place, fault: Some(silent.to_string()) });
            }
        }
        if state_is_late {
            let directory = self.probe.as_deref().and_then(Path::parent);
            let text = format!(
                "{} (state_dir) cannot be written: its file system does not answer",
                shown(directory)
            );
            news.extend(self.state_news(Some(text)));
        }
        news
    }

    /// Whether a client should wait for the looks under way.
    fn is_looking(&self, now: Instant) -> bool {
        self.seen.values().filter_map(|seen| seen.began).any(|began| !is_late(began, now))
    }

    /// Begins to look for a client, at every store that was not looked at for too long.
    pub(in crate::control) fn ask(&mut self, asker: Asker, backings: &Backings) {
        let now = Instant::now();
        let age = match asker {
            Asker::Status(_) => STORE_AGE,
            Asker::Faults(_) => Duration::ZERO,
        };
        self.look(backings, age, now);
        self.askers.push(asker);
        self.answer_at.get_or_insert(now + PATIENCE);
    }

    /// Looks at every store, as for a client.
    pub(in crate::control) fn look_at_stores(&mut self, backings: &Backings) {
        self.look(backings, STORE_AGE, Instant::now());
    }

    /// A look has ended, or something is due.
    pub(in crate::control) fn on_looked(
        &mut self,
        looked: Option<Looked>,
        backings: &Backings,
        (core, events): (&Core, &mut EventLog),
    ) {
        let now = Instant::now();
        let mut news: Vec<PlaceNews> = Vec::new();
        match looked {
            Some(looked) => news.extend(self.ended(looked, now)),
            None => {
                news = self.late(backings, now);
                if self.next_round.is_some_and(|at| now >= at) {
                    self.look_by_itself(backings, now);
                }
            }
        }
        self.begin(now);
        news.into_iter().for_each(|news| tell(news, core, events));
    }

    /// The clients that have nothing more to wait for.
    pub(in crate::control) fn ready_askers(&mut self) -> Vec<Asker> {
        let now = Instant::now();
        let is_time = self.answer_at.is_some_and(|at| now >= at);
        if is_time || !self.is_looking(now) { self.all_askers() } else { Vec::new() }
    }

    /// All clients that wait, to be answered with the state as it was seen last.
    pub(in crate::control) fn all_askers(&mut self) -> Vec<Asker> {
        self.answer_at = None;
        std::mem::take(&mut self.askers)
    }

    /// The faults of stores, by the names of the volumes.
    pub(in crate::control) fn faults(
        &self,
        volumes: &[Arc<Volume>],
    ) -> HashMap<String, StoreFault> {
        let fault = |index| self.fault_of(index).cloned();
        volumes.iter().filter_map(|v| Some((v.name.to_string(), fault(v.index)?))).collect()
    }

    /// Repeats in the log the faults by which data is lost when the target ends.
    pub(in crate::control) fn warn_of_stores(&self, volumes: &[Arc<Volume>]) {
        for (volume, fault) in self.faults(volumes) {
            tracing::error!(volume, "the target begins to stop, and {fault}");
        }
    }
}

/// Logs a fault once, and its end.
fn tell(PlaceNews { place, fault }: PlaceNews, core: &Core, events: &mut EventLog) {
    let (kind, volume) = match place {
        // Ports only stand in `status`.
        Watched::Ports => return,
        Watched::StateDir => (EventKind::StateDir, None),
        Watched::Store(index) => {
            let Some(name) = name_of(index, core) else { return };
            (EventKind::StoreFault, Some(name))
        }
    };
    let name = volume.as_deref();
    let Some(fault) = fault else {
        match place {
            Watched::StateDir => tracing::info!("state_dir can be written again"),
            Watched::Ports => {}
            Watched::Store(_) => {
                tracing::info!(volume = name, "its store is as it is served again");
            }
        }
        return;
    };
    tracing::error!(volume = name, "{fault}");
    events.happened(Occurrence { volume, ..Occurrence::new(kind, fault) });
}

fn is_late(since: Instant, now: Instant) -> bool {
    now >= since + PATIENCE
}

fn shown(directory: Option<&Path>) -> String {
    directory.unwrap_or(Path::new("")).display().to_string()
}

/// Writes a file and removes it. Returns the directory that it was in.
fn probe_state(path: &Path) -> Result<(u64, u64), String> {
    let probe = || -> io::Result<(u64, u64)> {
        let directory = fs::metadata(path.parent().unwrap_or(Path::new("/")))?;
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(FILE_MODE);
        let mut file = options.custom_flags(libc::O_NOFOLLOW).open(path)?;
        let written = file.write_all(&[0; PROBE_BYTES]);
        fs::remove_file(path)?;
        written?;
        Ok((directory.dev(), directory.ino()))
    };
    probe().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Backing, OpenOptions};

    fn backings(directory: &Path, count: u16) -> Backings {
        let backing = |index: u16| {
            let path = directory.join(index.to_string());
            File::create(&path).unwrap().set_len(1 << 20).unwrap();
            let backing = Backing::open(&path, &OpenOptions::default()).unwrap();
            OpenStore::Local(Arc::new(backing))
        };
        (0..count).map(|index| (VolumeIndex(index), backing(index))).collect()
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test);
    }

    fn underway(watch: &PlaceWatch) -> usize {
        watch.seen.values().filter(|seen| seen.began.is_some()).count()
    }

    #[test]
    fn a_late_look_is_news_once_and_delays_no_client() {
        let directory = tempfile::tempdir().unwrap();
        let backings = backings(directory.path(), 1);
        let (mut watch, start) = (PlaceWatch::new(None, None), Instant::now());
        run(async {
            watch.look(&backings, STORE_AGE, start);
            assert!(watch.is_looking(start));
            let late = start + PATIENCE;
            assert!(!watch.is_looking(late));
            let news = watch.late(&backings, late);
            let told = news[0].fault.as_deref().unwrap();
            assert!(told.contains("does not answer"), "{told}");
            // The look is still under way: no second one begins, and there is no more news.
            let later = late + PERIOD;
            watch.look(&backings, Duration::ZERO, later);
            assert!(watch.late(&backings, later).is_empty() && !watch.is_looking(later));
            assert_eq!((underway(&watch), watch.queue.len()), (1, 0));
            let fault = watch.fault_of(VolumeIndex(0)).unwrap();
            assert_eq!(fault.kind, StoreFaultKind::CannotSee);
            // The look ends after all.
            let looked = watch.ended.1.recv().await.unwrap();
            let news = watch.ended(looked, later).expect("news");
            assert!(news.fault.is_none() && watch.fault_of(VolumeIndex(0)).is_none());
            // No other look is due until it is old.
            watch.look(&backings, STORE_AGE, later);
            assert_eq!(underway(&watch), 0);
            watch.look(&backings, STORE_AGE, later + STORE_AGE);
            assert_eq!(underway(&watch), 1);
        });
    }

    #[test]
    fn looks_at_many_stores_are_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let all = backings(directory.path(), 20);
        let (mut watch, now) = (PlaceWatch::new(None, None), Instant::now());
        run(async {
            watch.look(&all, STORE_AGE, now);
            watch.look(&all, Duration::ZERO, now);
            assert_eq!((underway(&watch), watch.queue.len()), (AT_ONCE, 20 - AT_ONCE));
            for ended in 1..=20 {
                let looked = watch.ended.1.recv().await.unwrap();
                assert!(watch.ended(looked, now).is_none());
                watch.begin(now);
                assert_eq!(underway(&watch), AT_ONCE.min(20 - ended));
            }
            assert!(!watch.is_looking(now) && watch.seen.len() == 20);
            // Volumes that are gone are forgotten, and so are looks at them.
            watch.look(&all, Duration::ZERO, now);
            watch.look(&Backings::new(), Duration::ZERO, now);
            assert_eq!((watch.seen.len(), watch.next_round), (0, None));
            watch.begin(now);
            assert_eq!((underway(&watch), watch.queue.len()), (0, 0));
        });
    }

    #[test]
    fn looks_that_hang_keep_no_other_look_away() {
        let directory = tempfile::tempdir().unwrap();
        let count = u16::try_from(HANGING + 2 * AT_ONCE + 1).unwrap();
        let all = backings(directory.path(), count);
        let (mut watch, mut now) = (PlaceWatch::new(None, None), Instant::now());
        run(async {
            watch.look(&all, STORE_AGE, now);
            // All of them hang: their ends are not taken.
            for turn in 1..=HANGING / AT_ONCE + 1 {
                assert_eq!(underway(&watch), turn * AT_ONCE);
                now += PATIENCE;
                watch.late(&all, now);
                watch.begin(now);
            }
            assert_eq!((underway(&watch), watch.queue.len()), (HANGING + AT_ONCE, AT_ONCE + 1));
            // A place that has to wait for them counts as silent, and no client waits for it.
            let is_silent = |index| watch.fault_of(VolumeIndex(index)).is_some();
            assert!((0..count).all(is_silent) && !watch.is_looking(now));
        });
    }

    #[test]
    fn a_probe_of_state_dir_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let probe = directory.path().join("t.probe.new");
        let first = probe_state(&probe).unwrap();
        // A crash left a file.
        fs::write(&probe, "half").unwrap();
        assert_eq!(probe_state(&probe), Ok(first));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        // The probe follows no link, which another user may have put there.
        std::os::unix::fs::symlink("elsewhere", &probe).unwrap();
        assert!(probe_state(&probe).is_err());
        assert!(probe_state(&directory.path().join("none/t.probe.new")).is_err());
    }
}
