//! [`Persister`]: makes the records for the next run durable for control, and brings back the
//! outcomes. Losses of acknowledged writes are noted until that is done. The start is here too: the
//! records that earlier runs left, and the volumes that have another store now.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use rblk_protocol::{Generation, WriteVerifier};
use tokio::sync::mpsc;

use super::ControlParts;
use super::core::Ticket;
use crate::record::holders::{HolderRecord, Holders, ServedFrom, VolumeUuid};
use crate::record::losses::LossNotes;
use crate::record::{
    AtRisk, GroupKeepers, Keeping, RecordOutcome, RecordWriter, Records, ServedVolume,
    SharedPlaces, StateDirectory,
};
use crate::store::{Backing, OpenStore, StoreIdentity};
use crate::volume::{Placement, Volume};

/// The records of this run's volumes, on their way to the disk.
#[derive(Debug)]
pub(super) struct Persister {
    keeping: Keeping,
    writer: RecordWriter,
    // Until the run begins, with the volumes that it will serve.
    loaded: Option<(Records, Vec<ServedVolume>)>,
    news: mpsc::UnboundedReceiver<RecordOutcome>,
    losses: LossNotes,
    // The records of volumes that a group of targets has in turn.
    shared: SharedPlaces,
}

impl Persister {
    /// Reads the records that earlier runs left. Writes nothing. Returns the holders to start with.
    ///
    /// # Errors
    /// A record is there and cannot be read, or the system has no thread left.
    pub(super) fn open(parts: &mut ControlParts) -> anyhow::Result<(Self, Holders)> {
        let (tell, news) = mpsc::unbounded_channel();
        // An error means that control has ended, and nothing waits for the news.
        let writer = RecordWriter::start(Box::new(move |news| drop(tell.send(news))))
            .context("the thread that writes records")?;
        let directory = std::mem::replace(&mut parts.state, StateDirectory::nothing());
        let keeping = directory.keeping();
        let shared = SharedPlaces::default();
        parts.backings.values().for_each(|store| share(&shared, store));
        let keepers = GroupKeepers::new(directory, shared.clone());
        let mut records = Records::on_this_machine(Box::new(keepers))?;
        let served = |volume: &Arc<Volume>| {
            let store = parts.backings.get(&volume.index);
            let attachment = store.and_then(OpenStore::attachment);
            ServedVolume { attachment, ..ServedVolume::from(&**volume) }
        };
        let served: Vec<ServedVolume> = parts.volumes.iter().map(served).collect();
        for volume in &served {
            let before = records.load(volume)?;
            tracing::info!(volume = %volume.name, %before, "the record of the volume as the last run left it");
            let is_unknown = records.record(&volume.volume).is_some_and(|r| r.holder().is_none());
            if keeping.was_used && is_unknown && records.is_new(&volume.volume) {
                tracing::warn!(
                    volume = %volume.name,
                    "there is no record of this volume in state_dir: it is new, or its record is gone. A mount of it \
                     that comes back is refused (fenced) and has to be mounted anew. If the record was moved away, \
                     stop this target and put it back"
                );
            }
        }
        let mut holders = holders_of(&records, keeping, &shared);
        compare_stores(&mut holders, &mut records, parts);
        let has_store = parts.volumes.iter().any(|v| matches!(v.placement, Placement::Store));
        if !keeping.is_kept && has_store {
            tracing::warn!(
                "cannot record the holders of the volumes (state_dir): after the next start of this target, an \
                 initiator that comes back is let in even if another host held its volume meanwhile"
            );
        }
        let losses = LossNotes::default();
        let loaded = Some((records, served));
        Ok((Self { keeping, writer, loaded, news, losses, shared }, holders))
    }

    /// A volume is about to be served from this store, which may have a place for its record.
    pub(super) fn share(&self, store: &OpenStore) {
        share(&self.shared, store);
    }

    /// Whether the members of a group have the record of a volume in turn.
    pub(super) fn is_shared(&self, volume: &VolumeUuid) -> bool {
        self.shared.has(volume)
    }

    /// Makes durable that hosts may write now. Call it when nothing of the start can fail any more,
    /// and before any volume is served. Returns the verifiers of the volumes. Waits for the disk.
    pub(super) fn begin(&mut self) -> Vec<(VolumeUuid, WriteVerifier)> {
        let Some((mut records, served)) = self.loaded.take() else { return Vec::new() };
        served.iter().for_each(|volume| records.put_at_risk(volume));
        records.write_all();
        let verifiers = records.iter().filter_map(|r| Some((r.volume(), r.verifier()?)));
        let verifiers = verifiers.collect();
        self.writer.begin(records);
        verifiers
    }

    /// How this run keeps records for the next one.
    pub(super) fn keeping(&self) -> Keeping {
        self.keeping
    }

    /// Begins to make the record of a holder durable. Returns the outcome if it is known at once;
    /// otherwise it comes from [`Self::next`].
    pub(super) fn persist(
        &self,
        ticket: Ticket,
        record: HolderRecord,
    ) -> Option<Result<(), String>> {
        (!self.writer.set_holder(ticket.0, record)).then(|| Err(gone()))
    }

    /// Notes, soon, the store that a volume is served from.
    pub(super) fn serve_from(&self, volume: VolumeUuid, store: Option<StoreIdentity>) {
        self.writer.set_store(volume, store);
    }

    /// Begins to make durable that a volume is served like this. The outcome comes from
    /// [`Self::next`].
    ///
    /// # Errors
    /// The writer cannot begin.
    pub(super) fn serve(&self, number: u64, served: ServedVolume) -> Result<(), String> {
        self.writer.serve(number, served).then_some(()).ok_or_else(gone)
    }

    /// Takes back that a volume is served, after its start failed: no host could write to it.
    pub(super) fn take_back(&self, volume: VolumeUuid) {
        self.writer.take_back(volume);
    }

    /// Begins to note that this run made all data of a volume durable, except the data at this
    /// risk. The outcome comes from [`Self::next`].
    ///
    /// # Errors
    /// The writer cannot begin.
    pub(super) fn lower_risk(
        &self,
        number: u64,
        volume: VolumeUuid,
        risk: AtRisk,
    ) -> Result<(), String> {
        self.writer.lower_risk(number, volume, risk).then_some(()).ok_or_else(gone)
    }

    /// Acknowledged writes of a volume are lost, and that is to be noted. The flushes of its store,
    /// if that reports them, wait for the note.
    pub(super) fn lost(&mut self, volume: VolumeUuid, backing: Option<Arc<Backing>>) {
        if self.losses.lost(volume, backing) {
            self.note_loss(volume);
        }
    }

    /// A volume is served anew, with a new verifier.
    pub(super) fn forget_loss(&mut self, volume: &VolumeUuid) {
        self.losses.forget(volume);
    }

    /// The loss of a volume was noted, or not.
    pub(super) fn loss_noted(&mut self, volume: VolumeUuid, noted: bool) {
        if self.losses.ended(&volume, noted) {
            self.note_loss(volume);
        }
    }

    /// Notes the losses again that could not be noted.
    pub(super) fn note_losses_again(&mut self) {
        self.losses.due().into_iter().for_each(|volume| self.note_loss(volume));
    }

    fn note_loss(&mut self, volume: VolumeUuid) {
        if !self.writer.lose(volume) {
            let _ = self.losses.ended(&volume, false);
        }
    }

    /// Whether a loss is to be noted again.
    pub(super) fn owes_losses(&self) -> bool {
        self.losses.owes()
    }

    /// The volumes that lost acknowledged writes in this run.
    pub(super) fn losses(&self) -> impl Iterator<Item = VolumeUuid> {
        self.losses.volumes().copied()
    }

    /// Begins to compare the records on the disk with those of this run.
    pub(super) fn compare(&self, reply: Sender<Result<(), String>>) {
        self.writer.compare(reply);
    }

    /// The next outcome. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<RecordOutcome> {
        self.news.recv().await
    }

    /// Ends the run. All acknowledged data of the volumes of `saved` is durable; those of `lost`
    /// may have lost writes, and that may not be noted. Returns the records as texts. Waits for the
    /// disk.
    pub(super) fn end(self, saved: &[VolumeUuid], lost: &[VolumeUuid]) -> Vec<String> {
        let Some(mut records) = self.writer.end() else { return Vec::new() };
        for volume in lost {
            records.lose(volume);
            records.write_loss(volume);
        }
        for volume in saved {
            records.lower_risk(volume, AtRisk::Nothing);
        }
        for (_, error) in records.write(&saved.iter().copied().collect()) {
            tracing::warn!(
                error,
                "cannot note the clean stop (state_dir): initiators will take the next start for a loss"
            );
        }
        records.texts()
    }
}

fn share(places: &SharedPlaces, store: &OpenStore) {
    if let Some(image) = store.image()
        && let Some(record) = image.record()
    {
        places.put(image.uuid(), Arc::new(record.clone()));
    }
}

/// The holders that earlier runs left.
fn holders_of(records: &Records, keeping: Keeping, shared: &SharedPlaces) -> Holders {
    let mut holders = match keeping {
        Keeping { is_forgetful: true, .. } => Holders::forgetful(base_of_now()),
        // A record may have been moved away.
        Keeping { was_used: true, .. } => Holders::durable([]).with_base(base_of_now()),
        Keeping { .. } => Holders::durable([]),
    };
    for record in records.iter() {
        let (volume, holder, store) =
            (record.volume(), record.holder().cloned(), record.store().cloned());
        match shared.has(&volume) {
            true => holders.adopt_shared(volume, (holder, store), base_of_now()),
            false => holders.adopt(volume, holder, store),
        }
    }
    holders
}

/// Above all generations given before now, unless a million holders came every second.
pub(super) fn base_of_now() -> Generation {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Generation(u64::try_from(since.as_micros()).unwrap_or(0))
}

fn gone() -> String {
    "the thread that writes records is gone".to_owned()
}

/// Fences the mounts of volumes that have another file or device than before.
fn compare_stores(holders: &mut Holders, records: &mut Records, parts: &ControlParts) {
    for (uuid, store) in &parts.stores {
        let served = holders.serve(*uuid, store.as_ref());
        records.set_store(uuid, store.clone());
        let volume = parts.volumes.iter().find(|volume| volume.uuid == *uuid);
        let (ServedFrom::Replaced, Some(volume)) = (served, volume) else { continue };
        if let Some(holder) = holders.record(uuid) {
            records.set_holder(holder.clone());
        }
        let path = parts.volume_notes.get(volume.name.as_str()).and_then(|n| n.path.as_deref());
        tracing::error!(
            volume = %volume.name,
            path,
            "this is not the file or device from which the volume was served before: a mount that comes back is \
             refused (fenced), because its caches belong to the former one. Unmount it and mount it again; if the \
             path is wrong, stop this target and put the old store back"
        );
    }
}
