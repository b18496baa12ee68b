//! Hellos: request, accept and reject of a connection, and the target's answer to a request. An
//! accepted message stays the same through a write and a read.

use rblk_protocol::{
    ConnectionKind, Epoch, Features, HelloAccept, HelloReject, HelloRequest, InstanceId, Nonce,
    Offer, QueueDepth, RejectReason, SessionId, Version, limits, negotiate,
};

use crate::Input;

/// Byte 0 selects one of the three. An accept is read as the answer to one of a few requests.
pub fn run(data: &[u8]) -> bool {
    let Some((kind, bytes)) = data.split_first() else { return false };
    match kind % 3 {
        0 => request(bytes),
        1 => {
            let Some((wish, bytes)) = bytes.split_first() else { return false };
            accept(bytes, &asked(*wish))
        }
        _ => reject(bytes),
    }
}

fn request(bytes: &[u8]) -> bool {
    let Ok(request) = HelloRequest::from_wire(bytes) else { return false };
    assert_eq!(HelloRequest::from_wire(&request.to_wire()), Ok(request), "changed by a write");
    // The bytes decide the offer, too.
    let mut input = Input::new(&bytes[bytes.len().saturating_sub(16)..]);
    let offer = Offer {
        depth: QueueDepth::new(1 + input.u16() % limits::QUEUE_DEPTH_MAX).expect("a depth"),
        features: Features(u32::from(input.u8())),
        in_capsule_bytes: input.u32() % (limits::IN_CAPSULE_MAX_BYTES + 1),
        io_max_bytes: limits::IO_MIN_BYTES << (input.u8() % 11),
        instance: InstanceId([2; 16]),
        nonce: Nonce([4; 16]),
    };
    if let Ok(accept) = negotiate(&request, &offer) {
        assert!(accept.depth <= request.depth && accept.depth <= offer.depth, "too deep");
        assert!(accept.in_capsule_bytes <= request.in_capsule_bytes, "too much in capsule");
        assert!(accept.io_max_bytes <= offer.io_max_bytes, "too long an I/O");
        assert_eq!(accept.features.without(request.features), Features(0), "nobody asked for it");
        let wire = accept.to_wire();
        assert_eq!(HelloAccept::from_wire(&wire, &request), Ok(accept), "refused by who asked");
    }
    true
}

fn accept(bytes: &[u8], asked: &HelloRequest) -> bool {
    let Ok(accept) = HelloAccept::from_wire(bytes, asked) else { return false };
    let again = HelloAccept::from_wire(&accept.to_wire(), asked);
    assert_eq!(again, Ok(accept), "changed by a write");
    assert!(accept.depth <= asked.depth, "deeper than asked");
    assert_eq!(accept.features.without(asked.features), Features(0), "nobody asked for it");
    let _ = accept.message_data_bytes();
    true
}

fn reject(bytes: &[u8]) -> bool {
    let Ok(reject) = HelloReject::from_wire(bytes) else { return false };
    assert!(!reject.text.chars().any(char::is_control), "control characters for a terminal");
    let again = HelloReject::from_wire(&reject.to_wire()).expect("what was written");
    assert_eq!(again.reason, reject.reason, "changed by a write");
    assert!(reject.text.starts_with(&again.text), "changed by a write");
    true
}

fn asked(wish: u8) -> HelloRequest {
    let io = wish & 1 == 1;
    HelloRequest {
        kind: if io {
            ConnectionKind::Io { queue: u16::from(wish) % 64 }
        } else {
            ConnectionKind::Admin
        },
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        depth: QueueDepth::new(1 + u16::from(wish)).expect("a depth"),
        features: Features(u32::from(wish >> 1)),
        in_capsule_bytes: u32::from(wish) << 6,
        io_max_bytes: limits::IO_MIN_BYTES << (wish >> 5),
        epoch: Epoch(u32::from(io)),
        reads_in: wish,
        session: SessionId([u8::from(io); 16]),
    }
}

/// A hello of each kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let offer = Offer {
        depth: QueueDepth::new(128).expect("a depth"),
        features: Features(7),
        in_capsule_bytes: 4096,
        io_max_bytes: 1 << 20,
        instance: InstanceId([2; 16]),
        nonce: Nonce([4; 16]),
    };
    let mut seeds = Vec::new();
    for wish in [0, 1, 31, 255] {
        let asked = asked(wish);
        seeds.push([&[0], &asked.to_wire()[..]].concat());
        if let Ok(accept) = negotiate(&asked, &offer) {
            seeds.push([&[1, wish], &accept.to_wire()[..]].concat());
        }
    }
    let reject = HelloReject {
        reason: Some(RejectReason::ShuttingDown),
        oldest: Version::OLDEST,
        newest: Version::NEWEST,
        text: "the target is draining".to_owned(),
    };
    seeds.push([&[2], &reject.to_wire()[..]].concat());
    seeds
}
