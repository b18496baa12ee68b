//! [`Run`]: one process that serves volumes: the product's records and core, and between them the
//! calls of control, in its order.
//!
//! | here | there |
//! | --- | --- |
//! | [`Run::load`] | `Persister::open` |
//! | [`Run::begin`] | `Persister::begin`, `Control::begin` |
//! | [`Run::record`] | `Change::Serve`, `Volumes::on_served` |
//! | [`Run::note_safe`] | `Volumes::begin_lower` |
//! | [`Run::lose`] | `Persister::lost`, `LossNotes` |
//! | [`Run::take_back`] | `Volumes::changed`, of an addition that failed |
//! | [`Run::hold`] | `Change::Holder` |
//! | [`Run::end`] | `Control::end`, `Persister::end` |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, Generation, HostId, InstanceId, Name, WriteVerifier,
};
use rblk_target::control::core::{Capacity, Core, CoreParts};
use rblk_target::record::holders::{HolderRecord, Holders};
use rblk_target::record::{AtRisk, BootId, Fresh, Records, ServedVolume};
use rblk_target::volume::ids::VolumeIndex;
use rblk_target::volume::{CacheMode, Placement, Volume};

use super::{Directory, uuid};

/// Bytes of a cell.
const CELL: u32 = 4096;

/// How a volume is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Its cache mode.
    pub cache: CacheMode,
    /// No host may write.
    pub read_only: bool,
    /// Its size.
    pub cells: usize,
}

/// A volume that a run serves.
#[derive(Clone, Debug)]
pub struct Serving {
    /// The core's description.
    pub volume: Arc<Volume>,
    /// The verifier in the replies to OPEN.
    pub verifier: WriteVerifier,
    /// Its store was opened for reading.
    pub is_for_reading: bool,
    /// Hosts could write in this run.
    pub was_writable: bool,
    /// A sync failed, so every later sync of this run fails.
    pub is_latched: bool,
}

impl Serving {
    /// How it is served.
    #[must_use]
    pub fn config(&self) -> Config {
        let Volume { cache, read_only, blocks, .. } = *self.volume;
        Config { cache, read_only, cells: usize::try_from(blocks.0).unwrap_or(0) }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Run {
    records: Records,
    /// Plans the steps of a change.
    pub core: Core,
    /// By number.
    pub served: BTreeMap<usize, Serving>,
    /// Volumes that lost writes in this run.
    pub lost: BTreeSet<usize>,
    /// Volumes whose loss is not noted yet.
    pub owed: BTreeSet<usize>,
    next: u16,
}

/// A volume as the target describes it.
#[must_use]
pub(super) fn volume(number: usize, index: u16, config: Config) -> Arc<Volume> {
    Arc::new(Volume {
        index: VolumeIndex(index),
        name: Name::new(&format!("v{number}")).expect("a name"),
        uuid: uuid(number),
        block_size: BlockSize::new(CELL).expect("a size"),
        blocks: BlockCount(config.cells as u64),
        read_only: config.read_only,
        placement: Placement::Store,
        cache: config.cache,
        cache_min_bytes: 0,
        cache_max_bytes: None,
        read_ahead_bytes: 0,
        discard: true,
        discard_granularity_bytes: CELL,
        is_durable_at_once: false,
        limits: None,
    })
}

fn fresh(counter: &Arc<AtomicU64>) -> Fresh {
    let counter = Arc::clone(counter);
    Box::new(move || {
        let number = counter.fetch_add(1, Ordering::Relaxed) + 1;
        WriteVerifier(u128::from(number).to_be_bytes())
    })
}

fn only(number: usize) -> BTreeSet<[u8; 16]> {
    BTreeSet::from([uuid(number)])
}

impl Run {
    /// Reads the records of the volumes to serve. `None`: a record cannot be read, and the start
    /// fails.
    #[must_use]
    pub fn load(
        directory: &Directory,
        boot: u64,
        counter: &Arc<AtomicU64>,
        configs: &[(usize, Config)],
    ) -> Option<Self> {
        let boot = BootId::new(&format!("boot {boot}"));
        let mut records = Records::new(directory.keepers(), boot, fresh(counter));
        let mut served = BTreeMap::new();
        for (at, (number, config)) in configs.iter().enumerate() {
            let volume = volume(*number, u16::try_from(at).ok()?, *config);
            records.load(&ServedVolume::from(&*volume)).ok()?;
            let serving = Serving {
                verifier: WriteVerifier([0; 16]),
                is_for_reading: volume.read_only,
                was_writable: !volume.read_only,
                is_latched: false,
                volume,
            };
            served.insert(*number, serving);
        }
        let parts = CoreParts {
            name: Name::new("t").ok()?,
            instance: InstanceId([9; 16]),
            volumes: served.values().map(|serving| Arc::clone(&serving.volume)).collect(),
            capacity: Capacity::new(8, None, 64 << 30),
            lease: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(10),
            holders: Holders::durable([]),
            auth: None,
        };
        let core = Core::new(parts, Instant::now());
        let next = u16::try_from(configs.len()).ok()?;
        let (lost, owed) = (BTreeSet::new(), BTreeSet::new());
        Some(Self { records, core, served, lost, owed, next })
    }

    /// Notes that hosts may write.
    pub fn begin(&mut self) {
        for serving in self.served.values() {
            self.records.put_at_risk(&ServedVolume::from(&*serving.volume));
        }
        self.records.write_all();
        for serving in self.served.values_mut() {
            let record = self.records.record(&serving.volume.uuid);
            let verifier = record.and_then(|record| record.verifier());
            serving.verifier = verifier.expect("it was loaded");
        }
    }

    /// The index of a volume that is added.
    #[must_use]
    pub fn next_index(&mut self) -> u16 {
        self.next += 1;
        self.next - 1
    }

    /// Makes the risk durable before hosts may write to the changed volume.
    ///
    /// # Errors
    /// The record cannot be read or written.
    pub fn record(&mut self, number: usize, volume: &Volume) -> Result<(), String> {
        let is_new = !self.served.contains_key(&number);
        let served = ServedVolume::from(volume);
        self.records.load(&served).map_err(|error| error.to_string())?;
        self.records.put_at_risk(&served);
        if let Some(error) = self.records.write(&only(number)).remove(&uuid(number)) {
            return Err(error);
        }
        if is_new {
            self.lost.remove(&number);
            self.owed.remove(&number);
        }
        Ok(())
    }

    /// Withdraws an addition that failed.
    pub fn take_back(&mut self, number: usize) {
        self.records.take_back(&uuid(number));
        let _ = self.records.write(&only(number));
    }

    /// The verifier of the record now.
    #[must_use]
    pub fn verifier(&self, number: usize) -> Option<WriteVerifier> {
        self.records.record(&uuid(number)).and_then(|record| record.verifier())
    }

    /// Notes the risk after a change has ended. Not for a change that was given up.
    pub fn note_safe(&mut self, number: usize) {
        let risk = match self.served.get(&number) {
            Some(serving) => AtRisk::by_writes_to(&serving.volume).expect("a store"),
            None => AtRisk::Nothing,
        };
        self.records.lower_risk(&uuid(number), risk);
        let _ = self.records.write(&only(number));
    }

    /// Notes that acknowledged writes are lost. Returns whether the next run will certainly know.
    pub fn lose(&mut self, number: usize) -> bool {
        self.lost.insert(number);
        self.records.lose(&uuid(number));
        let is_noted = self.records.write_loss(&uuid(number));
        if is_noted {
            self.owed.remove(&number);
        } else {
            self.owed.insert(number);
        }
        is_noted
    }

    /// Records the first holder of a volume. Returns whether the record is durable.
    pub fn hold(&mut self, number: usize, host: usize, generation: u64) -> bool {
        self.records.set_holder(HolderRecord {
            volume: uuid(number),
            generation: Generation(generation),
            mode: AccessMode::Shared,
            host: HostId([u8::try_from(host).unwrap_or(0); 16]),
            host_name: Name::new("h").expect("a name"),
            present: true,
        });
        self.records.write(&only(number)).is_empty()
    }

    /// Ends the process in good order. `unsaved`: volumes that it could not make durable. Returns
    /// the safe volumes, and the lost ones, each with true if the loss is noted.
    pub fn end(mut self, unsaved: &BTreeSet<usize>) -> (Vec<usize>, Vec<(usize, bool)>) {
        let is_safe = |number: &&usize| !unsaved.contains(number) && !self.lost.contains(number);
        let saved: Vec<usize> = self.served.keys().filter(is_safe).copied().collect();
        let lost: Vec<usize> = self.lost.union(unsaved).copied().collect();
        let lost = lost.into_iter().map(|number| (number, self.lose(number))).collect();
        for number in &saved {
            self.records.lower_risk(&uuid(*number), AtRisk::Nothing);
        }
        let _ = self.records.write(&saved.iter().map(|number| uuid(*number)).collect());
        (saved, lost)
    }
}
