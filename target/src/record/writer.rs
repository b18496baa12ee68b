//! [`RecordWriter`]: the thread that writes the records of a run, so that a slow disk delays one
//! OPEN or one change of a volume, and nothing else.
//!
//! Changes take effect in the order of the calls. Waiting changes are written together, each record
//! once.

use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use rblk_operate::said_once;

use super::{AtRisk, Records, ServedVolume, VolumeRecord};
use crate::record::holders::{HolderRecord, VolumeUuid};
use crate::store::StoreIdentity;

/// The outcomes of changes, in the order of the changes.
#[derive(Debug)]
pub(crate) enum RecordOutcome {
    /// The holder of this number is durable, or may not be.
    Holder(u64, Result<(), String>),
    /// The volume of the step of this number may be served: its record; or why not.
    Serve(u64, Result<Box<VolumeRecord>, String>),
    /// The record of the step of this number states the lower risk, or may still state the higher
    /// one.
    Lower(u64, Result<(), String>),
    /// Whether the next run is certain to know that the volume lost writes.
    Loss(VolumeUuid, bool),
}

/// Takes the news.
pub(crate) type Tell = Box<dyn Fn(RecordOutcome) + Send>;

#[derive(Debug)]
enum Change {
    Begin(Box<Records>),
    Holder(u64, HolderRecord),
    Store(VolumeUuid, Option<StoreIdentity>),
    Serve(u64, ServedVolume),
    TakeBack(VolumeUuid),
    Lower(u64, VolumeUuid, AtRisk),
    Lose(VolumeUuid),
    Compare(Sender<Result<(), String>>),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    changes: Sender<Change>,
    thread: JoinHandle<Option<Records>>,
}

impl RecordWriter {
    /// A thread that writes nothing until [`Self::begin`].
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(tell: Tell) -> io::Result<Self> {
        let (changes, from_control) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("records".to_owned())
            .spawn(move || run(&from_control, &tell))?;
        Ok(Self { changes, thread })
    }

    /// Writes these records. Call it once, and first.
    pub(crate) fn begin(&self, records: Records) {
        // An error means that the thread is gone: later calls report that.
        let _ = self.send(Change::Begin(Box::new(records)));
    }

    /// Writes the last holder of a volume, soon. False if the thread is gone.
    #[must_use]
    pub(crate) fn set_holder(&self, number: u64, holder: HolderRecord) -> bool {
        self.send(Change::Holder(number, holder))
    }

    /// Notes, soon, the store of a volume.
    pub(crate) fn set_store(&self, volume: VolumeUuid, store: Option<StoreIdentity>) {
        // Without the thread no holder is let in, so no host has to be fenced later.
        let _ = self.send(Change::Store(volume, store));
    }

    /// Reads the record of a volume, if this run did not serve it before, and notes the risk of
    /// writes to it. False if the thread is gone.
    #[must_use]
    pub(crate) fn serve(&self, number: u64, served: ServedVolume) -> bool {
        self.send(Change::Serve(number, served))
    }

    /// Takes back that a volume is served, after its start failed: no host could write to it.
    pub(crate) fn take_back(&self, volume: VolumeUuid) {
        // Without the thread the record overstates the risk, which is safe.
        let _ = self.send(Change::TakeBack(volume));
    }

    /// Notes that this run made all data of a volume durable, except the data at this risk. False
    /// if the thread is gone.
    #[must_use]
    pub(crate) fn lower_risk(&self, number: u64, volume: VolumeUuid, risk: AtRisk) -> bool {
        self.send(Change::Lower(number, volume, risk))
    }

    /// Notes that acknowledged writes of a volume may be lost. False if the thread is gone.
    #[must_use]
    pub(crate) fn lose(&self, volume: VolumeUuid) -> bool {
        self.send(Change::Lose(volume))
    }

    /// Compares the kept records with those of this run. Answers with the first difference.
    pub(crate) fn compare(&self, reply: Sender<Result<(), String>>) {
        // Without the thread the sender is dropped, and the receiver sees that.
        let _ = self.send(Change::Compare(reply));
    }

    fn send(&self, change: Change) -> bool {
        self.changes.send(change).is_ok()
    }

    /// Waits until all changes are written. Returns the records; `None` if it never began.
    pub(crate) fn end(self) -> Option<Records> {
        drop(self.changes);
        self.thread.join().ok().flatten()
    }
}

fn run(from_control: &Receiver<Change>, tell: &Tell) -> Option<Records> {
    let Ok(Change::Begin(records)) = from_control.recv() else { return None };
    let mut records = *records;
    while let Ok(first) = from_control.recv() {
        let mut batch = Batch::default();
        std::iter::once(first)
            .chain(from_control.try_iter())
            .for_each(|change| batch.take(change, &mut records));
        batch.end(&mut records, tell);
    }
    Some(records)
}

/// Changes that are written together.
#[derive(Debug, Default)]
struct Batch {
    changed: BTreeSet<VolumeUuid>,
    lost: BTreeSet<VolumeUuid>,
    // The news to send when all is written, and their volumes.
    news: Vec<(VolumeUuid, PendingOutcome)>,
    comparing: Vec<Sender<Result<(), String>>>,
}

#[derive(Debug)]
enum PendingOutcome {
    Holder(u64),
    Lower(u64),
    Serve(u64, Result<(), String>),
}

impl Batch {
    fn take(&mut self, change: Change, records: &mut Records) {
        match change {
            Change::Begin(_) => debug_assert!(false, "it began"),
            Change::Holder(number, holder) => {
                self.changed.insert(holder.volume);
                self.news.push((holder.volume, PendingOutcome::Holder(number)));
                records.set_holder(holder);
            }
            Change::Store(volume, store) => {
                self.changed.insert(volume);
                records.set_store(&volume, store);
            }
            Change::Serve(number, served) => {
                let volume = served.volume;
                let loaded = records.load(&served).map_err(|error| said_once(error.as_ref()));
                if loaded.is_ok() {
                    records.put_at_risk(&served);
                    self.changed.insert(volume);
                }
                self.news.push((volume, PendingOutcome::Serve(number, loaded.map(drop))));
            }
            Change::TakeBack(volume) => {
                self.changed.insert(volume);
                records.take_back(&volume);
            }
            Change::Lower(number, volume, risk) => {
                self.changed.insert(volume);
                self.news.push((volume, PendingOutcome::Lower(number)));
                records.lower_risk(&volume, risk);
            }
            Change::Lose(volume) => {
                self.lost.insert(volume);
                records.lose(&volume);
            }
            Change::Compare(reply) => self.comparing.push(reply),
        }
    }

    fn end(self, records: &mut Records, tell: &Tell) {
        // Losses first: replies of flushes wait for them.
        for volume in &self.lost {
            tell(RecordOutcome::Loss(*volume, records.write_loss(volume)));
        }
        let failed = records.write(&self.changed);
        for (volume, error) in &failed {
            let volume = records.record(volume).and_then(VolumeRecord::name);
            let volume = volume.map(tracing::field::display);
            tracing::error!(volume, error, "cannot write the record of the volume (state_dir)");
        }
        for (volume, pending) in self.news {
            let result = failed.get(&volume).cloned().map_or(Ok(()), Err);
            tell(match pending {
                PendingOutcome::Holder(number) => RecordOutcome::Holder(number, result),
                PendingOutcome::Lower(number) => RecordOutcome::Lower(number, result),
                PendingOutcome::Serve(number, loaded) => RecordOutcome::Serve(
                    number,
                    loaded.and(result).and_then(|()| of(records, &volume)),
                ),
            });
        }
        for reply in self.comparing {
            // An error means that the receiver is gone.
            let _ = reply.send(records.compare());
        }
    }
}

fn of(records: &Records, volume: &VolumeUuid) -> Result<Box<VolumeRecord>, String> {
    let record = records.record(volume).cloned().map(Box::new);
    record.ok_or_else(|| "its record is gone".to_owned())
}
