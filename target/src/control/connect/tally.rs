//! [`Tally`]: the block commands of I/O connections, by session and by device, those of connections
//! that ended included.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::volume::ids::{AdmissionId, SessionIndex};
use rblk_operate::target::status::QueueStatus;
use rblk_operate::target::traffic::{IoCounts, IoStats};

/// An I/O connection.
#[derive(Debug)]
pub(in crate::control) struct IoConnection {
    /// Its session.
    pub(in crate::control) session: SessionIndex,
    /// Its number there.
    pub(in crate::control) queue: u16,
    /// The poll group that serves it.
    pub(in crate::control) group: usize,
    /// The name of its device.
    pub(in crate::control) device: String,
    /// The counters of its poll group.
    pub(in crate::control) io: Arc<IoStats>,
}

/// The I/O connections, and the counts of those that ended.
#[derive(Debug, Default)]
pub(in crate::control) struct Tally {
    queues: BTreeMap<AdmissionId, IoConnection>,
    // Of connections that ended.
    by_session: HashMap<SessionIndex, IoCounts>,
    by_device: HashMap<String, IoCounts>,
}

impl Tally {
    /// Adds a connection.
    pub(in crate::control) fn add(&mut self, id: AdmissionId, queue: IoConnection) {
        self.queues.insert(id, queue);
    }

    /// Removes a connection after the last use of its resources. `lives`: whether a session still
    /// exists.
    pub(in crate::control) fn ended(
        &mut self,
        id: AdmissionId,
        lives: impl Fn(SessionIndex) -> bool,
    ) {
        let Some(queue) = self.queues.remove(&id) else { return };
        let counts = queue.io.snapshot().ended();
        self.by_device.entry(queue.device).or_default().add(&counts);
        self.by_session.entry(queue.session).or_default().add(&counts);
        self.by_session.retain(|session, _| lives(*session));
    }

    /// The commands of a session, and its connections by their numbers.
    pub(in crate::control) fn session(
        &self,
        session: SessionIndex,
    ) -> (IoCounts, Vec<QueueStatus>) {
        let mut sum = self.by_session.get(&session).copied().unwrap_or_default();
        let mut queues: Vec<QueueStatus> = Vec::new();
        for queue in self.queues.values().filter(|queue| queue.session == session) {
            let io = queue.io.snapshot();
            sum.add(&io);
            let IoConnection { queue, group: poll_group, ref device, .. } = *queue;
            queues.push(QueueStatus { queue, poll_group, device: device.clone(), io });
        }
        queues.sort_by_key(|queue| queue.queue);
        (sum, queues)
    }

    /// The commands that came by a device.
    pub(in crate::control) fn device(&self, device: &str) -> IoCounts {
        let mut sum = self.by_device.get(device).copied().unwrap_or_default();
        let queues = self.queues.values().filter(|queue| queue.device == device);
        queues.for_each(|queue| sum.add(&queue.io.snapshot()));
        sum
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::Opcode;

    use super::*;
    use rblk_operate::target::traffic::IoKind;

    #[test]
    fn counts_of_ended_connections_stay_with_their_session_and_device() {
        let [first, second] = [1, 2].map(|index| SessionIndex { index, life: 1 });
        let mut tally = Tally::default();
        let read = IoKind::of(Opcode::Read).unwrap();
        let queue = |session, queue, reads| {
            let io = Arc::new(IoStats::default());
            io.begin();
            (0..reads).for_each(|_| io.answered(read, 0, false));
            IoConnection { session, queue, group: 0, device: "mlx5_0".to_owned(), io }
        };
        tally.add(AdmissionId(1), queue(first, 1, 10));
        tally.add(AdmissionId(2), queue(first, 0, 20));
        tally.add(AdmissionId(3), queue(second, 0, 5));
        let (sum, queues) = tally.session(first);
        assert_eq!((sum.reads, sum.in_flight), (30, 2));
        assert_eq!(
            queues.iter().map(|q| (q.queue, q.io.reads)).collect::<Vec<_>>(),
            [(0, 20), (1, 10)]
        );
        assert_eq!(tally.device("mlx5_0").reads, 35);

        tally.ended(AdmissionId(1), |_| true);
        let (sum, queues) = tally.session(first);
        assert_eq!((sum.reads, sum.in_flight, queues.len()), (30, 1, 1));
        tally.ended(AdmissionId(2), |session| session == second);
        assert_eq!(tally.session(first).0, IoCounts::default(), "the session is gone");
        let device = tally.device("mlx5_0");
        assert_eq!((device.reads, device.in_flight), (35, 1));
        assert_eq!(tally.device("rxe0"), IoCounts::default());
    }
}
