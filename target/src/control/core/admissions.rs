//! [`Admissions`]: every connection that was admitted and has not ended, and what it is.
//!
//! An admin connection is a *stranger* until its LOGIN is accepted. Then it is a *member* of a
//! session. An I/O connection is a member from the start. Strangers have places of their own, few
//! in all and fewer an address, and take nothing else: no session, and nothing of another's. Their
//! poll group ends them when they have not logged in in time.

use std::collections::BTreeMap;

use rblk_protocol::{Epoch, SessionId};

use crate::identity::{AdmissionId, SessionIndex};

/// Strangers at a time.
pub(super) const STRANGERS_MAX: usize = 32;
/// Strangers of one address at a time.
pub(super) const STRANGERS_PER_ADDRESS: usize = 4;

/// A connection that has not logged in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Stranger {
    /// Where it comes from, for people.
    pub(super) peer: String,
    /// The id of the session that its LOGIN begins, if it begins one.
    pub(super) fresh: SessionId,
    /// The session that it wants to resume, and in which epoch.
    pub(super) resume: Option<(SessionId, Epoch)>,
    /// Bytes of its memory.
    pub(super) memory_bytes: u64,
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
}

/// What a connection is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// It has not logged in.
    Stranger(Stranger),
    /// It is of a session.
    Member(Member),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Admissions {
    // Connections so far.
    count: u64,
    strangers: BTreeMap<AdmissionId, Stranger>,
    members: BTreeMap<AdmissionId, Member>,
}

impl Admissions {
    /// Whether there is a place for another stranger from there.
    ///
    /// # Errors
    /// Which places are taken, for the peer.
    pub(super) fn may_add_stranger(&self, peer: &str) -> Result<(), String> {
        if self.strangers.len() >= STRANGERS_MAX {
            return Err(format!(
                "{STRANGERS_MAX} connections wait for their login here: connect again in 5 s"
            ));
        }
        let address = address_of(peer);
        let theirs = self.strangers.values().filter(|s| address_of(&s.peer) == address).count();
        if theirs >= STRANGERS_PER_ADDRESS {
            return Err(format!(
                "{STRANGERS_PER_ADDRESS} connections of your address wait for their login: connect again in 5 s"
            ));
        }
        Ok(())
    }

    /// A connection is admitted.
    pub(super) fn add(&mut self, standing: Standing) -> AdmissionId {
        self.count += 1;
        let id = AdmissionId(self.count);
        match standing {
            Standing::Stranger(stranger) => drop(self.strangers.insert(id, stranger)),
            Standing::Member(member) => drop(self.members.insert(id, member)),
        }
        id
    }

    /// What a connection is; `None` when it has ended.
    pub(super) fn get(&self, id: AdmissionId) -> Option<Standing> {
        let member = self.members.get(&id).copied().map(Standing::Member);
        member.or_else(|| self.strangers.get(&id).cloned().map(Standing::Stranger))
    }

    /// A stranger logged in.
    pub(super) fn adopt(&mut self, id: AdmissionId, member: Member) {
        let stranger = self.strangers.remove(&id);
        debug_assert!(stranger.is_some(), "{id:?} is no stranger");
        self.members.insert(id, member);
    }

    /// A connection ended. Returns what it was.
    pub(super) fn remove(&mut self, id: AdmissionId) -> Option<Standing> {
        let member = self.members.remove(&id).map(Standing::Member);
        member.or_else(|| self.strangers.remove(&id).map(Standing::Stranger))
    }

    /// Connections that have not logged in.
    pub(super) fn strangers(&self) -> usize {
        self.strangers.len()
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

    fn stranger(peer: &str) -> Standing {
        let peer = peer.to_owned();
        Standing::Stranger(Stranger {
            peer,
            fresh: SessionId([1; 16]),
            resume: None,
            memory_bytes: 1,
        })
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
        let ids: Vec<_> =
            (0..STRANGERS_PER_ADDRESS).map(|n| all.add(stranger(&format!("a:{n}")))).collect();
        assert!(all.may_add_stranger("a:99").unwrap_err().contains("your address"));
        all.may_add_stranger("b:99").unwrap();
        let session = SessionIndex { index: 0, life: 1 };
        all.adopt(ids[0], Member { session, epoch: Epoch(1), queue: None, memory_bytes: 1 });
        all.may_add_stranger("a:99").unwrap();
        all.add(stranger("a:99"));
        assert!(all.may_add_stranger("a:98").is_err());
        assert_eq!(all.remove(ids[1]), Some(stranger("a:1")));
        assert_eq!(all.remove(ids[1]), None);
        all.may_add_stranger("a:98").unwrap();
        assert_eq!(all.strangers(), STRANGERS_PER_ADDRESS - 1);
    }
}
