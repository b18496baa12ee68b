//! [`CqShares`]: the entries that each account has of each CQ. Pure.
//!
//! A CQ of a poll group has room for the WRs of many connections, and no more. A [`Payer`] may
//! have at most three quarters of the entries that the others leave, so that one that connects
//! often or deep leaves room for a next one. A connection is booked on its address until it has
//! proven its session. All strangers together have at most a quarter of a CQ, from however many
//! addresses they come.

use std::collections::BTreeMap;

use rblk_protocol::RejectReason;

use crate::control::core::ConnectRefusal;
use crate::control::peers::account::Payer;
use crate::volume::ids::AdmissionId;

/// The CQ of a device in a poll group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::control) struct CqPlace {
    /// The place of the device.
    pub(in crate::control) device: usize,
    /// The poll group.
    pub(in crate::control) group: usize,
}

#[derive(Debug)]
struct CqShare {
    cq: CqPlace,
    account: Payer,
    entries: u32,
    is_stranger: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(in crate::control) struct CqShares {
    by_connection: BTreeMap<AdmissionId, CqShare>,
    // Entries taken.
    by_account: BTreeMap<(CqPlace, Payer), u32>,
    by_cq: BTreeMap<CqPlace, u32>,
    by_strangers: BTreeMap<CqPlace, u32>,
}

/// Why a connection gets no entries: the text for its peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::control) enum NoEntries {
    /// Its account would have too large a part.
    Share(&'static str),
    /// Strangers have their part. The earlier ones soon prove themselves or end.
    Crowded(&'static str),
}

impl NoEntries {
    /// The text for the peer.
    pub(in crate::control) fn text(&self) -> &'static str {
        match self {
            Self::Share(text) | Self::Crowded(text) => text,
        }
    }
}

impl From<NoEntries> for ConnectRefusal {
    fn from(why: NoEntries) -> Self {
        let reason = match why {
            NoEntries::Share(_) => RejectReason::LimitReached,
            NoEntries::Crowded(_) => RejectReason::Crowded,
        };
        Self { reason, text: why.text().to_owned() }
    }
}

impl CqShares {
    /// A stranger takes entries of a CQ that has `capacity` of them.
    ///
    /// # Errors
    /// [`NoEntries`].
    pub(in crate::control) fn take_for_stranger(
        &mut self,
        id: AdmissionId,
        cq: CqPlace,
        account: Payer,
        entries: u32,
        capacity: u32,
    ) -> Result<(), NoEntries> {
        let theirs = self.by_strangers.get(&cq).copied().unwrap_or(0);
        // A connection above the whole part fits if no other is there.
        if theirs > 0 && theirs.saturating_add(entries) > capacity / 4 {
            return Err(NoEntries::Crowded(
                "too many connections have proven nothing here: connect again",
            ));
        }
        self.take(id, cq, account, entries, capacity)?;
        if let Some(share) = self.by_connection.get_mut(&id) {
            share.is_stranger = true;
            *self.by_strangers.entry(cq).or_insert(0) += entries;
        }
        Ok(())
    }

    /// A connection takes entries of a CQ that has `capacity` of them.
    ///
    /// # Errors
    /// [`NoEntries::Share`].
    pub(in crate::control) fn take(
        &mut self,
        id: AdmissionId,
        cq: CqPlace,
        account: Payer,
        entries: u32,
        capacity: u32,
    ) -> Result<(), NoEntries> {
        let of_account = (cq, account);
        let own = self.by_account.get(&of_account).copied().unwrap_or(0);
        let all = self.by_cq.get(&cq).copied().unwrap_or(0);
        let left = capacity.saturating_sub(all.saturating_sub(own));
        if own.saturating_add(entries) > left / 4 * 3 {
            return Err(NoEntries::Share(
                "your share of a CQ is used: fewer --queues or --lanes, less --queue-depth, \
                        more --poll-groups",
            ));
        }
        debug_assert!(!self.by_connection.contains_key(&id), "{id:?} takes twice");
        self.put(id, CqShare { cq, account: of_account.1, entries, is_stranger: false });
        Ok(())
    }

    /// A connection has proven its session: books its entries there. `capacity` is the number of
    /// entries of a CQ.
    ///
    /// # Errors
    /// The account would have too large a part: they stay booked on the address.
    pub(in crate::control) fn book_on(
        &mut self,
        id: AdmissionId,
        account: Payer,
        capacity: impl FnOnce(CqPlace) -> u32,
    ) -> Result<(), NoEntries> {
        let Some(CqShare { cq, entries, .. }) = self.by_connection.get(&id) else { return Ok(()) };
        let (cq, entries, capacity) = (*cq, *entries, capacity(*cq));
        let Some(CqShare { account: before, .. }) = self.give_back(id) else { return Ok(()) };
        let taken = self.take(id, cq, account, entries, capacity);
        if taken.is_err() {
            self.put(id, CqShare { cq, account: before, entries, is_stranger: false });
        }
        taken
    }

    /// The CQ of a connection.
    pub(in crate::control) fn cq_of(&self, id: AdmissionId) -> Option<CqPlace> {
        self.by_connection.get(&id).map(|share| share.cq)
    }

    fn put(&mut self, id: AdmissionId, share: CqShare) {
        let CqShare { cq, ref account, entries, .. } = share;
        *self.by_account.entry((cq, account.clone())).or_insert(0) += entries;
        *self.by_cq.entry(cq).or_insert(0) += entries;
        self.by_connection.insert(id, share);
    }

    /// A connection ended. Without entries this does nothing.
    pub(in crate::control) fn gone(&mut self, id: AdmissionId) {
        self.give_back(id);
    }

    fn give_back(&mut self, id: AdmissionId) -> Option<CqShare> {
        let share = self.by_connection.remove(&id)?;
        let of_account = (share.cq, share.account.clone());
        if let Some(own) = self.by_account.get_mut(&of_account) {
            *own = own.saturating_sub(share.entries);
            if *own == 0 {
                self.by_account.remove(&of_account);
            }
        }
        if let Some(all) = self.by_cq.get_mut(&share.cq) {
            *all = all.saturating_sub(share.entries);
        }
        if share.is_stranger
            && let Some(theirs) = self.by_strangers.get_mut(&share.cq)
        {
            *theirs = theirs.saturating_sub(share.entries);
        }
        Some(share)
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::HostId;
    use rblk_protocol::limits::REJECT_TEXT_BYTES;

    use super::*;
    use crate::control::peers::account::Origin;

    fn from(peer: &str) -> Payer {
        Payer::Origin(Origin::of(peer))
    }

    #[test]
    fn naming_a_session_takes_no_share_of_its_host() {
        let mut shares = CqShares::default();
        let (cq, host) = (CqPlace { device: 0, group: 0 }, Payer::Host(HostId([1; 16])));
        let take = |shares: &mut CqShares, id, peer: &str, entries| {
            shares.take(AdmissionId(id), cq, from(peer), entries, 1000)
        };
        take(&mut shares, 1, "[2001:db8::1]:1", 400).unwrap();
        take(&mut shares, 2, "[2001:db8::2]:1", 350).unwrap();
        take(&mut shares, 3, "[2001:db8::3]:1", 1).unwrap_err();
        take(&mut shares, 4, "10.0.0.1:1", 50).unwrap();
        let book =
            |shares: &mut CqShares, id| shares.book_on(AdmissionId(id), host.clone(), |_| 1000);
        book(&mut shares, 4).unwrap();
        take(&mut shares, 5, "10.0.0.1:2", 30).expect("its address has all of its share again");
        // Proofs do not make the share of a host larger.
        book(&mut shares, 1).unwrap();
        book(&mut shares, 2).unwrap_err();
        assert_eq!(shares.by_account[&(cq, host.clone())], 450);
        assert_eq!(shares.by_cq[&cq], 830, "a refusal changes nothing");
        book(&mut shares, 99).expect("it has ended");
        [1, 2, 4, 5].into_iter().for_each(|id| shares.gone(AdmissionId(id)));
        assert_eq!((shares.by_account.len(), shares.by_cq[&cq]), (0, 0));
    }

    #[test]
    fn strangers_from_anywhere_have_a_quarter_together() {
        let mut shares = CqShares::default();
        let (cq, host) = (CqPlace { device: 0, group: 0 }, Payer::Host(HostId([1; 16])));
        let stranger = |shares: &mut CqShares, id: u64, entries| {
            let account = from(&format!("10.0.0.{id}:1"));
            shares.take_for_stranger(AdmissionId(id), cq, account, entries, 1000)
        };
        (1..6).for_each(|id| stranger(&mut shares, id, 50).unwrap());
        let Err(NoEntries::Crowded(text)) = stranger(&mut shares, 6, 50) else { panic!("room") };
        assert!(text.len() <= REJECT_TEXT_BYTES, "{} bytes", text.len());
        shares.take(AdmissionId(7), cq, host.clone(), 560, 1000).expect("of what they leave");
        // A proven connection is no stranger, and neither is one that ended.
        shares.book_on(AdmissionId(1), host, |_| 1000).unwrap_err();
        stranger(&mut shares, 6, 50).unwrap();
        stranger(&mut shares, 8, 50).unwrap_err();
        shares.gone(AdmissionId(2));
        stranger(&mut shares, 8, 50).unwrap();
        (1..9).for_each(|id| shares.gone(AdmissionId(id)));
        assert_eq!((shares.by_strangers[&cq], shares.by_cq[&cq]), (0, 0));
        stranger(&mut shares, 9, 400).expect("alone");
        stranger(&mut shares, 10, 1).unwrap_err();
    }

    #[test]
    fn one_peer_never_takes_a_whole_completion_queue() {
        let mut shares = CqShares::default();
        let (cq, other) = (CqPlace { device: 0, group: 0 }, CqPlace { device: 0, group: 1 });
        let mut ids = (0..).map(AdmissionId);
        let mut fill = |shares: &mut CqShares, peer: &str, entries| {
            let mut taken = Vec::new();
            loop {
                let id = ids.next().unwrap();
                match shares.take(id, cq, from(peer), entries, 1000) {
                    Ok(()) => taken.push(id),
                    Err(NoEntries::Crowded(_)) => panic!("{peer} is no stranger"),
                    Err(NoEntries::Share(text)) => {
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
        shares.take(AdmissionId(9999), other, from("a"), 700, 1000).expect("of another CQ");
        // All accounts may have the entries that a peer gives back.
        first.into_iter().for_each(|id| shares.gone(id));
        shares.gone(AdmissionId(12345));
        assert_eq!(fill(&mut shares, "b", 10).len(), 71 - 18);
    }
}
