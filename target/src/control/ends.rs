//! [`Ends`]: the reports of a target that stops on acknowledged data that its stores do not take:
//! at once, while it tries again, and at the end.
//!
//! A client of the control socket that ordered the end gets its outcome before the process ends
//! ([`Ends::tell`]).

use std::time::Duration;

use rblk_config::ByteSize;
use tokio::sync::{mpsc, oneshot};

use super::core::Core;
use super::groups::Groups;
use super::observe::event_log::{EventLog, name_of};
use super::persist::Persister;
use super::requests::departure::Departure;
use crate::cache::Unsaved;
use crate::data::poll_group::group_thread::GroupHandle;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::ask::EndReport;
use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_operate::target::status::UnsavedStatus;

/// How long the clients may take to pass the end on.
const TELL_TIME: Duration = Duration::from_secs(1);

/// How a run ended.
#[derive(Debug)]
pub(crate) struct RunEnd {
    /// All acknowledged data is durable, and no fence is owed.
    pub clean: bool,
    /// Volumes with acknowledged data that was given up.
    pub given_up: Vec<UnsavedStatus>,
    /// Sessions that had not left in time.
    pub stayed: usize,
    /// The program that takes the place of this one, if one does.
    pub departure: Option<Departure>,
}

/// Held by a task until it has sent the end of the target to its client.
#[derive(Debug)]
pub(crate) struct Telling {
    _kept: mpsc::Sender<()>,
}

/// Takes the end of the target for a client.
pub(crate) type EndReply = oneshot::Sender<(EndReport, Telling)>;

/// The data that stores refuse while the target stops, and the clients that wait for its end.
#[derive(Debug, Default)]
pub(super) struct Ends {
    // By poll group.
    refused: Vec<(usize, Vec<Unsaved>)>,
    askers: Vec<EndReply>,
}

impl Ends {
    /// Adds a client that waits for the end.
    pub(super) fn ask(&mut self, reply: Option<EndReply>) {
        self.askers.extend(reply);
    }

    /// Reports the end to all clients, and gives their tasks a moment to pass it on.
    async fn tell(&mut self, report: &EndReport) {
        let (kept, mut told) = mpsc::channel(1);
        for asker in self.askers.drain(..) {
            let _ = asker.send((report.clone(), Telling { _kept: kept.clone() }));
        }
        drop(kept);
        // Ends when the last `Telling` is dropped.
        let _ = tokio::time::timeout(TELL_TIME, told.recv()).await;
    }

    /// The data that the stores refuse, one entry for each volume.
    fn refused(&self) -> Vec<Unsaved> {
        Unsaved::merged(self.refused.iter().flat_map(|(_, unsaved)| unsaved))
    }

    /// Notes the data that the stores of a poll group refuse. Returns the volumes for which that is
    /// news, and those that are no longer refused anything.
    fn note(&mut self, group: usize, unsaved: Vec<Unsaved>) -> (Vec<Unsaved>, Vec<VolumeIndex>) {
        let before = self.refused();
        self.refused.retain(|(other, _)| *other != group);
        self.refused.push((group, unsaved));
        let now = self.refused();
        let is_in = |list: &[Unsaved], volume| list.iter().any(|one| one.volume == volume);
        let over = before.iter().map(|one| one.volume).filter(|volume| !is_in(&now, *volume));
        let over = over.collect();
        (now.into_iter().filter(|one| !is_in(&before, one.volume)).collect(), over)
    }

    /// While the target stops: the data that its stores refuse.
    pub(super) fn refused_status(&self, core: &Core) -> Vec<UnsavedStatus> {
        unsaved_status(&self.refused(), core)
    }

    /// While the target stops, stores refuse other data than before.
    pub(super) fn on_refused(
        &mut self,
        group: usize,
        unsaved: Vec<Unsaved>,
        (core, groups): (&Core, &Groups),
        events: &mut EventLog,
    ) {
        let (news, over) = self.note(group, unsaved);
        for one in news {
            let name = name_of(one.volume, core);
            // Those of all poll groups: the other groups may not have met a refusal yet.
            let of_group =
                |group: &GroupHandle| Some(group.volume_stats(one.volume)?.snapshot().dirty_bytes);
            let bytes = groups.iter().filter_map(of_group).sum::<u64>().max(one.dirty_bytes);
            tracing::error!(
                volume = name,
                dirty_bytes = bytes,
                cause = one.cause,
                "the target stops, and the store refuses acknowledged data: it is tried again until `stop_timeout` is \
                 over, and is lost then; mend the store or make room now"
            );
            let size = ByteSize(bytes);
            let text = format!(
                "the target stops, and the store refuses {size} of acknowledged data: {}",
                one.cause
            );
            let what = Occurrence::new(EventKind::StoreError, text);
            events.happened(Occurrence { volume: name, ..what });
        }
        for volume in over {
            let volume = name_of(volume, core);
            tracing::info!(volume, "the store has taken the acknowledged data that it refused");
        }
    }

    /// Reports the data that the poll groups gave up, in the log and to the clients that wait for
    /// the end.
    pub(super) async fn tell_end(
        &mut self,
        (core, groups): (&Core, &Groups),
        events: &mut EventLog,
    ) -> Vec<UnsavedStatus> {
        let given_up = unsaved_status(&groups.unsaved(), core);
        for one in &given_up {
            let UnsavedStatus { volume, dirty_bytes, cause } = one;
            tracing::error!(
                volume,
                dirty_bytes,
                cause,
                "the target stopped, and acknowledged data is lost: its store did not take it in time"
            );
            let text = format!("the target stopped, and acknowledged data is lost: {one}");
            events.happened(Occurrence::new(EventKind::LostWrites, text).of_volume(volume));
        }
        let error = groups.failure().map(ToOwned::to_owned);
        self.tell(&EndReport { unsaved: given_up.clone(), error }).await;
        given_up
    }
}

fn unsaved_status(unsaved: &[Unsaved], core: &Core) -> Vec<UnsavedStatus> {
    let status = |one: &Unsaved| UnsavedStatus {
        volume: name_of(one.volume, core).unwrap_or_default(),
        dirty_bytes: one.dirty_bytes,
        cause: one.cause.clone(),
    };
    unsaved.iter().map(status).collect()
}

/// Whether a run with this end loses nothing: every acknowledged write is durable, no sync has
/// failed, and no fence is owed. The only place that decides this.
pub(super) fn is_clean(given_up: &[UnsavedStatus], core: &Core, persister: &Persister) -> bool {
    given_up.is_empty() && persister.losses().next().is_none() && !core.owes_fences()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsaved(volume: u16, dirty_bytes: u64) -> Unsaved {
        let cause = "No space left on device (os error 28)".to_owned();
        Unsaved { volume: VolumeIndex(volume), dirty_bytes, cause }
    }

    #[test]
    fn a_refused_volume_is_news_once_for_all_groups() {
        let mut ends = Ends::default();
        assert_eq!(ends.note(0, vec![unsaved(3, 4096)]), (vec![unsaved(3, 4096)], vec![]));
        assert_eq!(ends.note(1, vec![unsaved(3, 8192)]), (vec![], vec![]));
        assert_eq!(ends.refused(), [unsaved(3, 12288)]);
        let (news, over) = ends.note(0, vec![unsaved(1, 4096)]);
        assert_eq!((news, over), (vec![unsaved(1, 4096)], vec![]), "the other group has it still");
        assert_eq!(ends.note(1, vec![]), (vec![], vec![VolumeIndex(3)]));
        assert_eq!(ends.note(0, vec![]), (vec![], vec![VolumeIndex(1)]));
        assert_eq!(ends.refused(), []);
    }

    #[tokio::test]
    async fn a_client_gets_the_end_before_the_process_ends() {
        let mut ends = Ends::default();
        let (reply, told) = oneshot::channel();
        ends.ask(Some(reply));
        ends.ask(None);
        let reader = tokio::spawn(async move {
            let (report, telling) = told.await.unwrap();
            drop(telling);
            report
        });
        let status = UnsavedStatus { volume: "v".into(), dirty_bytes: 2 << 20, cause: "x".into() };
        let report = EndReport { unsaved: vec![status], error: None };
        ends.tell(&report).await;
        assert_eq!(reader.await.unwrap(), report);
        assert!(
            rblk_operate::target::status::GivenUp(report.unsaved)
                .to_string()
                .contains("lost: volume `v` 2MiB (x). Mounts")
        );
    }
}
