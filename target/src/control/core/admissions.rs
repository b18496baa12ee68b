//! [`Admissions`]: every connection that was admitted and has not ended, and what it is.
//!
//! An admin connection is a *stranger* until its LOGIN is accepted. Then it is a *member* of a
//! session. An I/O connection is a member from the start, and proves that in its self-test, where
//! it has to.
//!
//! Strangers have places of their own, few in all and fewer an address, and take nothing else: no
//! session, and nothing of another's. Their poll group ends them when they have not logged in in
//! time.

use std::collections::BTreeMap;

use rblk_protocol::auth::TargetHandshake;
use rblk_protocol::{Epoch, SessionId};

use crate::identity::{AdmissionId, SessionIndex};

/// Strangers at a time.
pub(super) const STRANGERS_MAX: usize = 64;
/// Strangers of one address at a time. At boot a host mounts all its volumes at once.
pub(super) const STRANGERS_PER_ADDRESS: usize = 16;

/// An admin connection that has not logged in.
#[derive(Debug)]
pub(super) struct Stranger {
    /// Where it comes from, for people.
    pub(super) peer: String,
    /// The id of the session that its LOGIN begins, if it begins one.
    pub(super) fresh: SessionId,
    /// The session that it wants to resume, and in which epoch.
    pub(super) resume: Option<(SessionId, Epoch)>,
    /// Bytes of its memory.
    pub(super) memory_bytes: u64,
    /// How it proves who it is, where it has to.
    pub(super) handshake: Option<TargetHandshake>,
}

/// A connection of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Member {
    /// The session.
    pub(super) session: SessionIndex,
    /// The epoch.
    pub(super) epoch: Epoch,
    /// The queue; `None` for admin.
    pub(super) queue: Option<u16>,
    /// Bytes of its memory.
    pub(super) memory_bytes: u64,
    /// It has proven that it is of the session, or need not. Else it does not own its queue number.
    pub(super) is_proven: bool,
    /// Its stream is encrypted.
    pub(super) is_encrypted: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Admissions {
    // Connections so far.
    count: u64,
    strangers: BTreeMap<AdmissionId, Stranger>,
    members: BTreeMap<AdmissionId, Member>,
    // Members that have proven nothing and come from elsewhere than their session: they have the
    // places of strangers. With where they come from.
    foreign: BTreeMap<AdmissionId, String>,
}

impl Admissions {
    /// Whether there is a place for another stranger from there.
    ///
    /// # Errors
    /// Which places are taken, for the peer.
    pub(super) fn may_add_stranger(&self, peer: &str) -> Result<(), String> {
        if self.strangers() >= STRANGERS_MAX {
            return Err(format!(
                "{STRANGERS_MAX} connections wait for their login here: connect again"
            ));
        }
        let address = address_of(peer);
        let peers = self.strangers.values().map(|stranger| &stranger.peer);
        let theirs = peers.chain(self.foreign.values()).filter(|peer| address_of(peer) == address);
        if theirs.count() >= STRANGERS_PER_ADDRESS {
            return Err(format!(
                "{STRANGERS_PER_ADDRESS} connections of your address wait for their login: connect again"
            ));
        }
        Ok(())
    }

    /// An admin connection is admitted.
    pub(super) fn add_stranger(&mut self, stranger: Stranger) -> AdmissionId {
        let id = self.next_id();
        self.strangers.insert(id, stranger);
        id
    }

    /// An I/O connection is admitted. `foreign` says where it comes from, if it has the place of a
    /// stranger.
    pub(super) fn add_member(&mut self, member: Member, foreign: Option<&str>) -> AdmissionId {
        let id = self.next_id();
        self.members.insert(id, member);
        if let Some(peer) = foreign {
            self.foreign.insert(id, peer.to_owned());
        }
        id
    }

    fn next_id(&mut self) -> AdmissionId {
        self.count += 1;
        AdmissionId(self.count)
    }

    /// A connection that has not logged in.
    pub(super) fn stranger_mut(&mut self, id: AdmissionId) -> Option<&mut Stranger> {
        self.strangers.get_mut(&id)
    }

    /// A connection of a session.
    pub(super) fn member(&self, id: AdmissionId) -> Option<Member> {
        self.members.get(&id).copied()
    }

    /// The sessions that have I/O connections, and whether all of these are encrypted. In one pass
    /// over all connections.
    pub(super) fn encryption(&self) -> BTreeMap<SessionIndex, bool> {
        let mut sessions = BTreeMap::new();
        for member in self.members.values().filter(|member| member.queue.is_some()) {
            let is_encrypted = sessions.entry(member.session).or_insert(true);
            *is_encrypted &= member.is_encrypted;
        }
        sessions
    }

    /// A stranger logged in.
    pub(super) fn adopt(&mut self, id: AdmissionId, member: Member) {
        let stranger = self.strangers.remove(&id);
        debug_assert!(stranger.is_some(), "{id:?} is no stranger");
        self.members.insert(id, member);
    }

    /// A connection has proven that it is of its session.
    pub(super) fn prove(&mut self, id: AdmissionId) {
        self.foreign.remove(&id);
        if let Some(member) = self.members.get_mut(&id) {
            member.is_proven = true;
        }
    }

    /// A connection ended. Returns what it was if it was of a session.
    pub(super) fn remove(&mut self, id: AdmissionId) -> Option<Member> {
        self.strangers.remove(&id);
        self.foreign.remove(&id);
        self.members.remove(&id)
    }

    /// Connections that take the places of strangers.
    pub(super) fn strangers(&self) -> usize {
        self.strangers.len() + self.foreign.len()
    }
}

/// The address of a peer without its port: `tcp://192.0.2.1` of `tcp://192.0.2.1:5000`.
pub(crate) fn address_of(peer: &str) -> &str {
    match peer.rsplit_once(':') {
        Some((address, port))
            if !port.is_empty()
                && port.bytes().all(|byte| byte.is_ascii_digit())
                // Not the last group of an address of IPv6 without a port.
                && (address.ends_with(']') || !address.trim_start_matches("tcp:").contains(':')) =>
        {
            address
        }
        _ => peer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stranger(peer: &str) -> Stranger {
        let (peer, fresh) = (peer.to_owned(), SessionId([1; 16]));
        Stranger { peer, fresh, resume: None, memory_bytes: 1, handshake: None }
    }

    fn member(queue: Option<u16>, is_proven: bool) -> Member {
        let session = SessionIndex { index: 0, life: 1 };
        Member { session, epoch: Epoch(1), queue, memory_bytes: 1, is_proven, is_encrypted: false }
    }

    #[test]
    fn an_address_has_no_port() {
        for (peer, address) in [
            ("tcp://192.0.2.1:5000", "tcp://192.0.2.1"),
            ("192.0.2.1:5000", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
            ("tcp://[fe80::1]:5000", "tcp://[fe80::1]"),
            ("[fe80::1]:5000", "[fe80::1]"),
            ("fe80::1", "fe80::1"),
            ("an unknown address", "an unknown address"),
        ] {
            assert_eq!(address_of(peer), address);
        }
    }

    #[test]
    fn a_place_is_free_when_its_stranger_logs_in_or_ends() {
        let mut all = Admissions::default();
        let ids: Vec<_> = (0..STRANGERS_PER_ADDRESS)
            .map(|n| all.add_stranger(stranger(&format!("a:{n}"))))
            .collect();
        assert!(all.may_add_stranger("a:99").unwrap_err().contains("your address"));
        all.may_add_stranger("b:99").unwrap();
        all.adopt(ids[0], member(None, true));
        all.may_add_stranger("a:99").unwrap();
        // One that has not proven that it is of its session.
        let foreign = all.add_member(member(Some(1), false), Some("a:99"));
        assert!(all.may_add_stranger("a:98").is_err());
        all.add_member(member(Some(2), false), None);
        assert_eq!(all.strangers(), STRANGERS_PER_ADDRESS);
        all.prove(foreign);
        all.may_add_stranger("a:98").unwrap();
        assert_eq!(all.remove(ids[1]), None, "of no session");
        assert_eq!(all.remove(foreign), Some(member(Some(1), true)));
        assert_eq!(all.strangers(), STRANGERS_PER_ADDRESS - 2);
    }
}
