//! [`negotiate`]: the answer of a target to a hello.

use crate::features::Features;
use crate::hello::{HelloAccept, HelloRequest, RejectReason};
use crate::identifiers::{InstanceId, Nonce};
use crate::limits;
use crate::tag::QueueDepth;
use crate::version::Version;

/// The abilities and limits of a target, for one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Deepest queue.
    pub depth: QueueDepth,
    /// Abilities of the target and of its device.
    pub features: Features,
    /// In-capsule data its receive slots hold.
    pub in_capsule_bytes: u32,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// The run of the target.
    pub instance: InstanceId,
    /// The target's random value for this connection.
    pub nonce: Nonce,
}

/// The agreed terms: the most that both ends can, and never more than requested.
///
/// # Errors
/// The reason to reject with.
pub fn negotiate(asked: &HelloRequest, offer: &Offer) -> Result<HelloAccept, RejectReason> {
    let newest = asked.newest.min(Version::NEWEST);
    if newest < asked.oldest || newest < Version::OLDEST {
        return Err(RejectReason::Version);
    }
    let io_max_bytes = asked.io_max_bytes.min(offer.io_max_bytes);
    if io_max_bytes < limits::IO_MIN_BYTES {
        return Err(RejectReason::Malformed);
    }
    let mut features = asked.features.and(offer.features).possible();
    if io_max_bytes > limits::DIGEST_IO_MAX_BYTES {
        features = features.without(Features::DIGEST);
    }
    Ok(HelloAccept {
        version: newest,
        depth: asked.depth.min(offer.depth),
        features,
        in_capsule_bytes: asked.in_capsule_bytes.min(offer.in_capsule_bytes).min(io_max_bytes),
        io_max_bytes,
        instance: offer.instance,
        nonce: offer.nonce,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hello::tests::asked;
    use proptest::prelude::*;

    fn offer() -> Offer {
        Offer {
            depth: QueueDepth::new(64).unwrap(),
            features: Features::WRITE_WITH_IMM,
            in_capsule_bytes: 8192,
            io_max_bytes: 1 << 18,
            instance: InstanceId([0xbb; 16]),
            nonce: Nonce([0xcc; 16]),
        }
    }

    #[test]
    fn golden_accept() {
        let accept = negotiate(&asked(), &offer()).unwrap();
        let mut golden = vec![b'r', b'b', b'l', b'k', 64, 0, 3, 0, 64, 0, 0, 0, 1, 0, 0, 0];
        golden.extend([0, 16, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        golden.extend([0xbb; 16]);
        golden.extend([0xcc; 16]);
        assert_eq!(accept.to_wire().as_slice(), golden);
        assert_eq!(HelloAccept::from_wire(&golden, &asked()), Ok(accept));
    }

    #[test]
    fn a_target_cannot_grant_more_than_asked() {
        let fine = negotiate(&asked(), &offer()).unwrap();
        for greedy in [
            HelloAccept { version: Version(4), ..fine },
            HelloAccept { depth: QueueDepth::new(129).unwrap(), ..fine },
            HelloAccept { features: Features(4), ..fine },
            HelloAccept { in_capsule_bytes: 4097, ..fine },
            HelloAccept { io_max_bytes: (1 << 20) + 1, ..fine },
            HelloAccept { io_max_bytes: 0, ..fine },
        ] {
            assert!(HelloAccept::from_wire(&greedy.to_wire(), &asked()).is_err(), "{greedy:?}");
        }
    }

    #[test]
    fn data_lists_come_with_lists_only() {
        let (lists, data) = (Features::CAPSULE_LISTS, Features::DATA_LISTS);
        let both = lists.or(data);
        for (ours, theirs, agreed) in [
            (both, both, both),
            (both, lists, lists),
            (lists, both, lists),
            (both, data, Features(0)),
            (data, both, Features(0)),
            (data, data, Features(0)),
        ] {
            let asked = HelloRequest { features: ours, ..asked() };
            let accept = negotiate(&asked, &Offer { features: theirs, ..offer() }).unwrap();
            assert_eq!(accept.features, agreed);
        }
        let asked = HelloRequest { features: both, ..asked() };
        let accept = negotiate(&asked, &Offer { features: both, ..offer() }).unwrap();
        let alone = HelloAccept { features: data, ..accept };
        assert_eq!(HelloAccept::from_wire(&accept.to_wire(), &asked), Ok(accept));
        assert!(HelloAccept::from_wire(&alone.to_wire(), &asked).is_err());
    }

    #[test]
    fn encryption_comes_with_proofs_only() {
        let (auth, encrypt) = (Features::AUTH, Features::ENCRYPT);
        let both = auth.or(encrypt);
        let asked = HelloRequest { features: both, ..asked() };
        for (theirs, agreed) in [(both, both), (auth, auth), (encrypt, Features(0))] {
            let accept = negotiate(&asked, &Offer { features: theirs, ..offer() }).unwrap();
            assert_eq!(accept.features, agreed);
            let alone = HelloAccept { features: encrypt, ..accept };
            assert!(HelloAccept::from_wire(&alone.to_wire(), &asked).is_err());
        }
    }

    #[test]
    fn an_encrypted_stream_needs_no_digests() {
        let all = Features::AUTH.or(Features::ENCRYPT).or(Features::DIGEST);
        let io_max_bytes = limits::DIGEST_IO_MAX_BYTES;
        let asked = HelloRequest { features: all, io_max_bytes, ..asked() };
        for (theirs, agreed) in [
            (all, Features::AUTH.or(Features::ENCRYPT)),
            (all.without(Features::ENCRYPT), Features::AUTH.or(Features::DIGEST)),
        ] {
            let accept = negotiate(&asked, &Offer { features: theirs, ..offer() }).unwrap();
            assert_eq!(accept.features, agreed);
        }
    }

    #[test]
    fn digests_are_for_commands_of_two_stripes() {
        let offer = Offer { features: Features::DIGEST, io_max_bytes: u32::MAX, ..offer() };
        for (io_max_bytes, agreed) in [
            (limits::DIGEST_IO_MAX_BYTES, Features::DIGEST),
            (limits::DIGEST_IO_MAX_BYTES + 512, Features(0)),
        ] {
            let asked = HelloRequest { features: Features::DIGEST, io_max_bytes, ..asked() };
            assert_eq!(negotiate(&asked, &offer).unwrap().features, agreed);
        }
    }

    #[test]
    fn there_is_room_for_a_proof() {
        let accept = negotiate(&asked(), &offer()).unwrap();
        let with = |features, in_capsule_bytes| {
            HelloAccept { features, in_capsule_bytes, ..accept }.message_data_bytes()
        };
        assert_eq!(with(Features::AUTH, 0), 48);
        assert_eq!(with(Features::AUTH, 512), 512);
    }

    #[test]
    fn a_message_has_room_for_data_of_several_up_to_a_bound() {
        let accept = negotiate(&asked(), &offer()).unwrap();
        let with = |features, in_capsule_bytes| {
            HelloAccept { features, in_capsule_bytes, ..accept }.message_data_bytes()
        };
        for (one, several) in
            [(0, 0), (512, 1536), (4096, 12288), (8192, 16384), (16384, 16384), (20000, 20000)]
        {
            assert_eq!(with(Features::CAPSULE_LISTS, one), one);
            assert_eq!(with(Features::CAPSULE_LISTS.or(Features::DATA_LISTS), one), several);
        }
        assert_eq!(with(Features::DATA_LISTS, u32::MAX), u32::MAX);
    }

    #[test]
    fn versions_that_do_not_meet_are_refused() {
        let future = HelloRequest { newest: Version(9), oldest: Version(8), ..asked() };
        assert_eq!(negotiate(&future, &offer()), Err(RejectReason::Version));
        let wide = HelloRequest { newest: Version(9), ..asked() };
        assert_eq!(negotiate(&wide, &offer()).unwrap().version, Version(3));
        // Version 1 knows no generations, so an initiator could still write requests queued before
        // it was fenced. Version 2 has no place for a proof.
        for old in [1, 2].map(Version) {
            let past = HelloRequest { newest: old, oldest: old, ..asked() };
            assert_eq!(negotiate(&past, &offer()), Err(RejectReason::Version));
        }
    }

    proptest! {
        #[test]
        fn whatever_is_negotiated_the_initiator_accepts(
            depth in 1u16..=1024, features: u32, in_capsule: u32, io_max in 4096u32..,
        ) {
            let asked = HelloRequest {
                depth: QueueDepth::new(depth).unwrap(),
                features: Features(features),
                in_capsule_bytes: in_capsule,
                io_max_bytes: io_max,
                ..asked()
            };
            let accept = negotiate(&asked, &offer()).unwrap();
            prop_assert_eq!(HelloAccept::from_wire(&accept.to_wire(), &asked), Ok(accept));
        }
    }
}
