//! Handshakes that go well, and those that somebody on the way, or at the other end, disturbs.

use proptest::prelude::*;

use super::*;
use crate::features::Features;
use crate::hello::tests::asked;
use crate::hello::{HelloAccept, HelloRequest};
use crate::identifiers::{Epoch, HostId, InstanceId, Name, Nonce};
use crate::negotiate::{Offer, negotiate};
use crate::status_code::Status;
use crate::tag::{QueueDepth, Tag};
use crate::{CommandCapsule, Opcode};

const LOGIN: Sequence = Sequence(2);

fn key(number: u8) -> SecretKey {
    SecretKey::from_bytes(&mut [number; 32])
}

fn request() -> HelloRequest {
    HelloRequest { features: Features::AUTH.or(Features::CAPSULE_LISTS), ..asked() }
}

fn accept() -> HelloAccept {
    let offer = Offer {
        depth: QueueDepth::new(16).unwrap(),
        features: Features(u32::MAX),
        in_capsule_bytes: 4096,
        io_max_bytes: 1 << 20,
        instance: InstanceId([0xbb; 16]),
        nonce: Nonce([0xcc; 16]),
    };
    negotiate(&request(), &offer).unwrap()
}

fn hellos() -> Hellos {
    Hellos::new(&request(), &accept())
}

fn login() -> [u8; LoginRequest::BYTES] {
    let host_name = Name::new("db1").unwrap();
    LoginRequest { host: HostId([7; 16]), host_name, keep_alive_ms: 5000, join: None }.to_wire()
}

/// What is done to the messages on their way.
type Tamper<'t> = &'t dyn Fn(usize, &mut Vec<u8>);

const HONEST: Tamper<'static> = &|_, _| {};

/// A handshake of host key 1 with a target that has those keys; the host expects key 2.
fn shake(
    keys: &[SecretKey],
    theirs: &Hellos,
    carrier: Carrier,
    tamper: Tamper,
) -> Result<(InitiatorSeal, LoggedIn), AuthError> {
    let (ours, target_key) = (hellos(), key(2).public());
    let (initiator, first) = InitiatorHandshake::begin(&key(1), &target_key, &ours, Carrier::Tcp)?;
    let mut target = TargetHandshake::new(keys, theirs, carrier);
    let mut first = first.to_vec();
    tamper(1, &mut first);
    let mut second = target.read_first(&first)?.to_vec();
    tamper(2, &mut second);
    let (third, seal) = initiator.finish(&second, &login(), LOGIN)?;
    let mut third = third.to_vec();
    tamper(3, &mut third);
    Ok((seal, target.read_last(&third, LOGIN)?))
}

fn shaken() -> (InitiatorSeal, LoggedIn) {
    shake(&[key(2)], &hellos(), Carrier::Tcp, HONEST).unwrap()
}

#[test]
fn both_ends_know_each_other() {
    let (_, logged_in) = shaken();
    assert_eq!(logged_in.host, key(1).public());
    assert_eq!(logged_in.target, key(2).public());
    assert_eq!(logged_in.login, login());
}

#[test]
fn a_target_may_have_two_keys_for_a_while() {
    for keys in [[key(2), key(3)], [key(3), key(2)]] {
        let (_, logged_in) = shake(&keys, &hellos(), Carrier::Tcp, HONEST).unwrap();
        assert_eq!(logged_in.target, key(2).public());
    }
}

#[test]
fn an_impostor_learns_nothing_and_proves_nothing() {
    for keys in [&[][..], &[key(3)], &[key(3), key(4)]] {
        let failed = shake(keys, &hellos(), Carrier::Tcp, HONEST);
        assert_eq!(failed.err(), Some(AuthError::Handshake));
    }
    // It cannot read the first message, and makes up a second.
    let (initiator, _) =
        InitiatorHandshake::begin(&key(1), &key(2).public(), &hellos(), Carrier::Tcp).unwrap();
    let (_, first) =
        InitiatorHandshake::begin(&key(3), &key(2).public(), &hellos(), Carrier::Tcp).unwrap();
    assert!(initiator.finish(&first, &login(), LOGIN).is_err());
}

#[test]
fn a_flipped_bit_in_any_message_is_found() {
    for (message, bytes) in [(1, FIRST_BYTES), (2, SECOND_BYTES), (3, THIRD_BYTES)] {
        for bit in 0..bytes * 8 {
            // A public key has 255 bits. But the hash of the handshake has all 256.
            let failed = shake(&[key(2)], &hellos(), Carrier::Tcp, &|number, sent| {
                if number == message {
                    sent[bit / 8] ^= 1 << (bit % 8);
                }
            });
            assert_eq!(failed.err(), Some(AuthError::Handshake), "bit {bit} of message {message}");
        }
    }
}

#[test]
fn a_flipped_bit_in_a_hello_is_found() {
    let (request, accept) = (request().to_wire(), accept().to_wire());
    for bit in 0..(request.len() + accept.len()) * 8 {
        let (mut request, mut accept) = (request, accept);
        match bit / 8 {
            at if at < request.len() => request[at] ^= 1 << (bit % 8),
            at => accept[at - request.len()] ^= 1 << (bit % 8),
        }
        let theirs = Hellos::from_private_data(&request, &accept).unwrap();
        let failed = shake(&[key(2)], &theirs, Carrier::Tcp, HONEST);
        assert_eq!(failed.err(), Some(AuthError::Handshake), "bit {bit}");
    }
}

#[test]
fn a_stripped_feature_bit_fails_the_handshake() {
    for stripped in [Features::AUTH, Features::CAPSULE_LISTS] {
        let request = HelloRequest { features: request().features.without(stripped), ..request() };
        let theirs = Hellos::new(&request, &accept());
        let failed = shake(&[key(2)], &theirs, Carrier::Tcp, HONEST);
        assert_eq!(failed.err(), Some(AuthError::Handshake));
    }
}

#[test]
fn a_handshake_does_not_move_to_another_carrier() {
    for carrier in [Carrier::Verbs, Carrier::Iwarp, Carrier::Memory] {
        let failed = shake(&[key(2)], &hellos(), carrier, HONEST);
        assert_eq!(failed.err(), Some(AuthError::Handshake));
    }
}

#[test]
fn a_replayed_or_reflected_message_fails() {
    let begin =
        || InitiatorHandshake::begin(&key(1), &key(2).public(), &hellos(), Carrier::Tcp).unwrap();
    let target = || TargetHandshake::new(&[key(2)], &hellos(), Carrier::Tcp);
    let (initiator, first) = begin();
    let mut heard = target();
    let second = heard.read_first(&first).unwrap();
    let (third, _) = initiator.finish(&second, &login(), LOGIN).unwrap();
    assert_eq!(heard.read_first(&first).err(), Some(AuthError::Order), "twice");

    // An eavesdropper sends to the same target what it heard: the first message is taken, since
    // anybody could make one. The last is not.
    let mut replayed = target();
    replayed.read_first(&first).unwrap();
    assert_eq!(replayed.read_last(&third, LOGIN).err(), Some(AuthError::Handshake));
    assert_eq!(replayed.read_last(&third, LOGIN).err(), Some(AuthError::Order), "over");

    // An old answer, and one's own message.
    let (initiator, first) = begin();
    assert!(initiator.finish(&second, &login(), LOGIN).is_err());
    let (initiator, _) = begin();
    assert!(initiator.finish(&first, &login(), LOGIN).is_err());
    assert_eq!(target().read_last(&third, LOGIN).err(), Some(AuthError::Order));
}

#[test]
fn messages_have_one_length() {
    for message in [1, 2, 3] {
        for grow in [true, false] {
            let failed = shake(&[key(2)], &hellos(), Carrier::Tcp, &|number, sent| {
                if number == message {
                    sent.resize(if grow { sent.len() + 1 } else { sent.len() - 1 }, 0);
                }
            });
            assert!(matches!(failed.err(), Some(AuthError::Length { .. })), "{message}");
        }
    }
}

fn capsule(sequence: Sequence, sealed_body: usize) -> [u8; 64] {
    let mut command = CommandCapsule::new(Opcode::OpenVolume, Tag(0), Epoch(1), sequence);
    command.in_capsule_bytes = u32::try_from(sealed_body).unwrap();
    command.to_wire()
}

#[test]
fn commands_and_answers_are_sealed() {
    let (mut initiator, logged_in) = shaken();
    let LoggedIn { seal: mut target, ticket, .. } = logged_in;
    let sealed = target.seal_reply(ticket, Status::Ok, 3, b"hello").unwrap();
    assert_eq!(sealed.len(), 5 + super::super::REPLY_SEAL_BYTES);
    let reply = initiator.open_reply(LOGIN, &sealed).unwrap();
    assert_eq!((reply.status, reply.value, &**reply.payload), (Status::Ok, 3, &b"hello"[..]));

    let sequence = Sequence(9);
    let bytes = 4 + super::super::COMMAND_SEAL_BYTES;
    let capsule = capsule(sequence, bytes);
    let sealed = initiator.seal_command(sequence, &capsule, b"open").unwrap();
    assert_eq!(sealed.len(), bytes);
    let (body, ticket) = target.open_command(sequence, &capsule, &sealed).unwrap();
    assert_eq!(**body, b"open"[..]);
    let refused = target.seal_reply(ticket, Status::Fenced, 0, &[]).unwrap();
    assert_eq!(initiator.open_reply(sequence, &refused).unwrap().status, Status::Fenced);
    // An answer to another command.
    assert_eq!(initiator.open_reply(LOGIN, &refused), Err(AuthError::Seal));
    // A second time, or in a number that was used.
    assert_eq!(target.open_command(sequence, &capsule, &sealed).err(), Some(AuthError::Order));
    assert_eq!(initiator.seal_command(sequence, &capsule, b"open").err(), Some(AuthError::Order));
}

#[test]
fn a_flipped_bit_of_a_sealed_message_is_found() {
    let (mut initiator, logged_in) = shaken();
    let LoggedIn { seal: mut target, .. } = logged_in;
    let sequence = Sequence(9);
    let capsule = capsule(sequence, 4 + super::super::COMMAND_SEAL_BYTES);
    let sealed = initiator.seal_command(sequence, &capsule, b"open").unwrap();
    for bit in 0..(capsule.len() + sealed.len()) * 8 {
        let (mut capsule, mut sealed) = (capsule, sealed.clone());
        match bit / 8 {
            at if at < capsule.len() => capsule[at] ^= 1 << (bit % 8),
            at => sealed[at - capsule.len()] ^= 1 << (bit % 8),
        }
        let failed = target.open_command(sequence, &capsule, &sealed);
        assert_eq!(failed.err(), Some(AuthError::Seal), "bit {bit}");
    }
    let (_, ticket) = target.open_command(sequence, &capsule, &sealed).unwrap();
    let sealed = target.seal_reply(ticket, Status::Ok, 0, b"volume").unwrap();
    for bit in 0..sealed.len() * 8 {
        let mut sealed = sealed.clone();
        sealed[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(initiator.open_reply(sequence, &sealed), Err(AuthError::Seal), "bit {bit}");
    }
    for cut in 0..sealed.len() {
        assert_eq!(initiator.open_reply(sequence, &sealed[..cut]), Err(AuthError::Seal));
    }
}

#[test]
fn a_sealed_command_is_not_an_answer() {
    let (mut initiator, logged_in) = shaken();
    let capsule = capsule(Sequence(9), 4 + super::super::COMMAND_SEAL_BYTES);
    let sealed = initiator.seal_command(Sequence(9), &capsule, b"open").unwrap();
    assert_eq!(initiator.open_reply(Sequence(9), &sealed), Err(AuthError::Seal), "reflected");
    let LoggedIn { seal: mut target, ticket, .. } = logged_in;
    let reply = target.seal_reply(ticket, Status::Ok, 0, &[0; 80]).unwrap();
    let failed = target.open_command(LOGIN, &capsule, &reply);
    assert_eq!(failed.err(), Some(AuthError::Seal), "reflected");
}

/// The bytes of a handshake whose ephemeral keys are known, and of what is sealed after it.
#[test]
fn golden_handshake() {
    let prologue = hellos().prologue(Carrier::Tcp);
    assert_eq!(prologue.len(), 13 + 48 + 64 + 1);
    assert!(prologue.starts_with(b"rblk admin v3rblk") && prologue.ends_with(&[0xcc, 3]));
    let (initiator, first) =
        InitiatorHandshake::begin_by(&key(1), &key(2).public(), &prologue, Some(&[3; 32])).unwrap();
    let mut target = TargetHandshake::new(&[key(2)], &hellos(), Carrier::Tcp);
    let second = target.read_first_by(&first, Some(&[4; 32])).unwrap();
    let (third, mut seal) = initiator.finish(&second, &login(), LOGIN).unwrap();
    let logged_in = target.read_last(&third, LOGIN).unwrap();
    let command = seal.seal_command(Sequence(3), &capsule(Sequence(3), 80), &[]).unwrap();
    let reply = logged_in.seal.seal_reply(logged_in.ticket, Status::Ok, 5, b"abc").unwrap();
    assert_eq!(hex(&first), GOLDEN[0]);
    assert_eq!(hex(&second), GOLDEN[1]);
    assert_eq!(hex(&third), GOLDEN[2]);
    assert_eq!(hex(&command), GOLDEN[3]);
    assert_eq!(hex(&reply), GOLDEN[4]);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// Made by another implementation of Noise (Python), from the same keys.
const GOLDEN: [&str; 5] = [
    "5dfedd3b6bd47f6fa28ee15d969d5bb0ea53774d488bdaf9df1c6e0124b3ef22e43eada1ffe9eec61194e265f7163d69",
    "ac01b2209e86354fb853237b5de0f4fab13c7fcbf433a61c019369617fecf10bc18fcbcee00e613df33d79c08a9960c4",
    "0fb9555d61c54baa26e90407f0728f4fda71d042e7e2060a6e3f963cdbca9f124bb11115e4831d4941a5c424e3f5118156b63d2f573f71c630653aa1ab04e513426e7b2dd34596a7bc56d1aa550123292ccfd0c93de45add215c593e0cdbdc6ff74bb8d7ff097ac79da8bd3c65d7737b52c7a3967018efc6167161b3c4d6d722b494c2f6a6039c6e4f1e4160a39bfe32b774198ce6d7e31cf8f7a61566c6022c",
    "98fc6714c0fd4387e6a2a469c1cb1f5c6f932215d28f5c60b5e03f298c1b9ba57b894e0f187df89849be9edeef4b7be412137df74f765b0ee30b4a8ec59f94c0dec84ee7dab523cfbe3133cafa75ffba",
    "58855442f0fb0bda8d4fece816b11550be5d27552fe304f859f44f",
];

proptest! {
    #[test]
    fn any_bytes_are_survived(first: [u8; FIRST_BYTES], third in any::<Vec<u8>>(), bytes: Vec<u8>) {
        let mut target = TargetHandshake::new(&[key(2)], &hellos(), Carrier::Tcp);
        prop_assert!(target.read_first(&first).is_err());
        prop_assert!(target.read_last(&third, LOGIN).is_err());
        let mut target = TargetHandshake::new(&[key(2)], &hellos(), Carrier::Tcp);
        prop_assert!(target.read_first(&bytes).is_err());
        prop_assert!(Hellos::from_private_data(&bytes, &bytes).is_ok() == (bytes.len() >= 64));
    }
}
