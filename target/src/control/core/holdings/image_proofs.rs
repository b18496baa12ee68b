//! [`ImageProofs`]: the proofs that this member still has the images of volumes of a group.
//!
//! A host that comes back may have had the volume from another member meanwhile. So its OPEN waits
//! for a proof that is newer than the OPEN. A volume has one proof under way at a time, and all
//! OPENs that come meanwhile wait for the next one.

use std::collections::BTreeMap;

use crate::control::core::effect::{Effect, Ticket};
use crate::control::core::outbox::Outbox;
use crate::volume::ids::VolumeIndex;

/// The proofs of one volume.
#[derive(Debug)]
struct OfVolume {
    under_way: Ticket,
    next: Option<Ticket>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ImageProofs(BTreeMap<VolumeIndex, OfVolume>);

impl ImageProofs {
    /// Asks for a proof of a volume. Returns its ticket, which is this one if no OPEN waits for the
    /// next proof yet.
    pub(super) fn ask(&mut self, volume: VolumeIndex, ticket: Ticket, out: &mut Outbox) -> Ticket {
        match self.0.get_mut(&volume) {
            Some(proofs) => *proofs.next.get_or_insert(ticket),
            None => {
                self.0.insert(volume, OfVolume { under_way: ticket, next: None });
                out.order(Effect::Prove { ticket, volume });
                ticket
            }
        }
    }

    /// The proof of a ticket is there. Returns false if nobody waits for it any more.
    pub(super) fn proven(
        &mut self,
        (volume, ticket): (VolumeIndex, Ticket),
        out: &mut Outbox,
    ) -> bool {
        let Some(proofs) = self.0.get_mut(&volume).filter(|it| it.under_way == ticket) else {
            return false;
        };
        match proofs.next.take() {
            Some(next) => {
                proofs.under_way = next;
                out.order(Effect::Prove { ticket: next, volume });
            }
            None => drop(self.0.remove(&volume)),
        }
        true
    }

    /// A volume is gone.
    pub(super) fn forget(&mut self, volume: VolumeIndex) {
        self.0.remove(&volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: VolumeIndex = VolumeIndex(3);

    fn asked(out: &mut Outbox) -> Vec<u64> {
        let ticket = |effect| match effect {
            Effect::Prove { ticket, volume: V } => ticket.0,
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| out.next_effect()).map(ticket).collect()
    }

    #[test]
    fn opens_that_come_during_a_proof_wait_for_the_next_one() {
        let (mut proofs, mut out) = (ImageProofs::default(), Outbox::default());
        assert_eq!(proofs.ask(V, Ticket(1), &mut out), Ticket(1));
        assert_eq!(proofs.ask(V, Ticket(2), &mut out), Ticket(2));
        assert_eq!(proofs.ask(V, Ticket(3), &mut out), Ticket(2), "it has not begun");
        assert_eq!(asked(&mut out), [1]);
        assert!(
            !proofs.proven((V, Ticket(2)), &mut out) && proofs.proven((V, Ticket(1)), &mut out)
        );
        assert_eq!(asked(&mut out), [2]);
        assert_eq!(proofs.ask(V, Ticket(4), &mut out), Ticket(4));
        assert!(proofs.proven((V, Ticket(2)), &mut out) && proofs.proven((V, Ticket(4)), &mut out));
        assert_eq!(asked(&mut out), [4]);
        proofs.ask(V, Ticket(5), &mut out);
        proofs.forget(V);
        assert!(!proofs.proven((V, Ticket(5)), &mut out), "the volume is gone");
        assert_eq!(proofs.ask(V, Ticket(6), &mut out), Ticket(6));
    }
}
