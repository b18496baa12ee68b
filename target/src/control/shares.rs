//! [`CqShares`]: who has how many entries of which CQ. Pure.
//!
//! A CQ of a poll group has room for the WRs of many connections, and no more. A peer may have at
//! most three quarters of what the other peers leave, so that one that connects often or deep
//! leaves room for a next one.

use std::collections::BTreeMap;

use crate::identity::AdmissionId;

/// The CQ of a device in a poll group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct CqPlace {
    /// The place of the device.
    pub(super) device: usize,
    /// The poll group.
    pub(super) group: usize,
}

#[derive(Debug)]
struct Share {
    cq: CqPlace,
    peer: String,
    entries: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct CqShares {
    by_connection: BTreeMap<AdmissionId, Share>,
    // Entries taken.
    by_peer: BTreeMap<(CqPlace, String), u32>,
    by_cq: BTreeMap<CqPlace, u32>,
}

impl CqShares {
    /// A connection of a peer takes entries of a CQ that has `capacity` of them.
    ///
    /// # Errors
    /// The text for the peer: it would have too large a part.
    pub(super) fn take(
        &mut self,
        id: AdmissionId,
        cq: CqPlace,
        peer: &str,
        entries: u32,
        capacity: u32,
    ) -> Result<(), String> {
        let of_peer = (cq, peer.to_owned());
        let own = self.by_peer.get(&of_peer).copied().unwrap_or(0);
        let all = self.by_cq.get(&cq).copied().unwrap_or(0);
        let left = capacity.saturating_sub(all.saturating_sub(own));
        if own.saturating_add(entries) > left / 4 * 3 {
            return Err(
                "your share of a CQ is used: fewer --queues or --lanes, less --queue-depth, \
                        more --poll-groups"
                    .to_owned(),
            );
        }
        self.by_peer.insert(of_peer, own + entries);
        self.by_cq.insert(cq, all + entries);
        let before = self.by_connection.insert(id, Share { cq, peer: peer.to_owned(), entries });
        debug_assert!(before.is_none(), "{id:?} takes twice");
        Ok(())
    }

    /// A connection ended. One that took nothing gives nothing back.
    pub(super) fn give_back(&mut self, id: AdmissionId) {
        let Some(Share { cq, peer, entries }) = self.by_connection.remove(&id) else { return };
        let of_peer = (cq, peer);
        if let Some(own) = self.by_peer.get_mut(&of_peer) {
            *own = own.saturating_sub(entries);
            if *own == 0 {
                self.by_peer.remove(&of_peer);
            }
        }
        if let Some(all) = self.by_cq.get_mut(&cq) {
            *all = all.saturating_sub(entries);
        }
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::limits::REJECT_TEXT_BYTES;

    use super::*;

    #[test]
    fn one_peer_never_takes_a_whole_completion_queue() {
        let mut shares = CqShares::default();
        let (cq, other) = (CqPlace { device: 0, group: 0 }, CqPlace { device: 0, group: 1 });
        let mut ids = (0..).map(AdmissionId);
        let mut fill = |shares: &mut CqShares, peer: &str, entries| {
            let mut taken = Vec::new();
            loop {
                let id = ids.next().unwrap();
                match shares.take(id, cq, peer, entries, 1000) {
                    Ok(()) => taken.push(id),
                    Err(text) => {
                        assert!(text.len() <= REJECT_TEXT_BYTES, "{} bytes", text.len());
                        return taken;
                    }
                }
            }
        };
        let first = fill(&mut shares, "a", 10);
        assert_eq!(first.len(), 75);
        assert_eq!(fill(&mut shares, "b", 10).len(), 18);
        assert_eq!(fill(&mut shares, "c", 10).len(), 5, "and still there is room");
        shares.take(AdmissionId(9999), other, "a", 700, 1000).expect("of another CQ");
        // What a peer gives back is everybody's.
        first.into_iter().for_each(|id| shares.give_back(id));
        shares.give_back(AdmissionId(12345));
        assert_eq!(fill(&mut shares, "b", 10).len(), 71 - 18);
    }
}
