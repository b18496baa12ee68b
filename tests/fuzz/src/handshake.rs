//! The proofs of both ends: texts of keys, the Noise handshake, sealed commands and replies, and
//! the proofs of I/O connections. Messages that changed on their way are refused, and no others.

use rblk_protocol::auth::{
    COMMAND_SEAL_BYTES, Carrier, Hellos, InitiatorHandshake, KEY_BYTES, LoggedIn, PublicKey,
    QueueKey, SecretKey, SessionSecret, TargetHandshake,
};
use rblk_protocol::limits::{ACCEPT_BYTES, HELLO_BYTES};
use rblk_protocol::{
    CommandCapsule, Epoch, HostId, LoginRequest, Name, Nonce, Opcode, Sequence, Status, Tag,
};

use crate::Input;

/// Byte 0 selects the input.
pub fn run(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    match input.below(6) {
        0 => texts(input.bytes(usize::MAX)),
        1 => messages(&mut input).is_some(),
        2 => seals(&mut input),
        3 => raw(&mut input),
        4 => proofs(&mut input),
        _ => {
            let payload = input.bytes(usize::MAX);
            let Ok((reply, secret)) = SessionSecret::from_login_payload(payload) else {
                return false;
            };
            assert_eq!(secret.login_payload(&reply)[..], *payload, "changed by a write");
            true
        }
    }
}

fn texts(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let public = text.parse::<PublicKey>();
    if let Ok(key) = &public {
        assert_eq!(key.to_string(), text, "a key with two texts");
    }
    let secret = SecretKey::from_file_text(text);
    if let Ok(key) = &secret {
        let again = SecretKey::from_file_text(&key.file_text()).expect("what was written");
        assert_eq!(again.public(), key.public(), "changed by a write");
        assert!(!format!("{key:?}").contains("secret:"), "a secret in a log");
    }
    public.is_ok() || secret.is_ok()
}

/// The bytes with some bits changed by the input, and whether they changed.
fn edited(bytes: &[u8], input: &mut Input<'_>) -> (Vec<u8>, bool) {
    let mut copy = bytes.to_vec();
    for _ in 0..input.below(3) {
        let (at, bits) = (usize::from(input.u16()) % bytes.len().max(1), input.u8());
        if let Some(byte) = copy.get_mut(at) {
            *byte ^= bits;
        }
    }
    if input.below(32) == 31 {
        copy.truncate(usize::from(input.u16()) % (bytes.len() + 1));
    }
    let is_changed = copy != bytes;
    (copy, is_changed)
}

fn secret(number: u8) -> SecretKey {
    SecretKey::from_bytes(&mut [number | 1; KEY_BYTES])
}

fn hellos(number: u8) -> Hellos {
    Hellos::from_private_data(&[number; HELLO_BYTES], &[number; ACCEPT_BYTES]).expect("hellos")
}

fn login() -> [u8; LoginRequest::BYTES] {
    let host_name = Name::new("db1").expect("a name");
    LoginRequest { host: HostId([1; 16]), host_name, keep_alive_ms: 5000, join: None }.to_wire()
}

/// A handshake in which each message may be changed on its way, and each end may have other hellos,
/// another carrier or another key than the other end assumes.
fn messages(input: &mut Input<'_>) -> Option<(rblk_protocol::auth::InitiatorSeal, LoggedIn)> {
    let odd = input.u8();
    let (host, target) = (secret(3), secret(5));
    let theirs = if odd & 1 != 0 { secret(7).public() } else { target.public() };
    let (ours, seen) = (hellos(1), hellos(if odd & 2 != 0 { 2 } else { 1 }));
    let carrier = if odd & 4 != 0 { Carrier::Tcp } else { Carrier::Memory };
    let keys = if odd & 8 != 0 { vec![secret(9), target.clone()] } else { vec![target.clone()] };
    let is_odd = odd & 7 != 0;

    let (initiator, first) =
        InitiatorHandshake::begin(&host, &theirs, &ours, Carrier::Memory).expect("random bytes");
    let mut answerer = TargetHandshake::new(&keys, &seen, carrier);
    let (first, first_changed) = edited(&first, input);
    let second = answerer.read_first(&first);
    assert_eq!(second.is_ok(), !first_changed && !is_odd, "message 1");
    let (second, second_changed) = edited(&second.ok()?, input);
    let sequence = Sequence(2);
    let third = initiator.finish(&second, &login(), sequence);
    assert_eq!(third.is_ok(), !second_changed, "message 2");
    let (third, seal) = third.ok()?;
    let (third, third_changed) = edited(&third, input);
    let logged_in = answerer.read_last(&third, sequence);
    assert_eq!(logged_in.is_ok(), !third_changed, "message 3");
    let logged_in = logged_in.ok()?;
    assert_eq!((logged_in.host, logged_in.target), (host.public(), target.public()));
    assert_eq!(logged_in.login, login(), "another LOGIN");
    Some((seal, logged_in))
}

/// Commands and replies of a connection that is logged in.
fn seals(input: &mut Input<'_>) -> bool {
    let Some((mut ours, logged_in)) = messages(&mut Input::new(&[])) else {
        panic!("a handshake without a fault");
    };
    let LoggedIn { mut seal, .. } = logged_in;
    let mut sequence = Sequence(2);
    let mut count = 0;
    while !input.is_empty() {
        sequence = Sequence(sequence.0.saturating_add(u32::from(input.u8())));
        let mut capsule = CommandCapsule::new(Opcode::OpenVolume, Tag(1), Epoch(1), sequence);
        let length = usize::from(input.below(64));
        let body = input.bytes(length);
        capsule.in_capsule_bytes = u32::try_from(body.len() + COMMAND_SEAL_BYTES).expect("short");
        let wire = capsule.to_wire();
        // A sequence that does not rise is refused before anything is sealed.
        let Ok(sealed) = ours.seal_command(sequence, &wire, body) else { return count > 0 };
        let (sealed, is_changed) = edited(&sealed, input);
        let (seen, other) = edited(&wire, input);
        let Ok(seen) = <[u8; 64]>::try_from(seen) else { return count > 0 };
        let opened = seal.open_command(sequence, &seen, &sealed);
        assert_eq!(opened.is_ok(), !is_changed && !other, "a command");
        let Ok((opened, ticket)) = opened else { return count > 0 };
        assert_eq!(&opened[..], body, "another body");
        let status = input.pick(&Status::ALL).unwrap_or(Status::Ok);
        let reply = seal.seal_reply(ticket, status, input.u32(), body).expect("a reply");
        let (reply, is_changed) = edited(&reply, input);
        let answer = ours.open_reply(sequence, &reply);
        assert_eq!(answer.is_ok(), !is_changed, "a reply");
        let Ok(answer) = answer else { return count > 0 };
        assert_eq!((answer.status, &answer.payload[..]), (status, body), "another reply");
        count += 1;
    }
    count > 0
}

/// Messages from nowhere.
fn raw(input: &mut Input<'_>) -> bool {
    let (host, target) = (secret(3), secret(5));
    let mut answerer =
        TargetHandshake::new(std::slice::from_ref(&target), &hellos(1), Carrier::Memory);
    let length = usize::from(input.u8());
    assert!(answerer.read_first(input.bytes(length)).is_err(), "it knew no key");
    assert!(answerer.read_last(input.bytes(length), Sequence(1)).is_err(), "out of order");
    let (initiator, _) =
        InitiatorHandshake::begin(&host, &target.public(), &hellos(1), Carrier::Memory)
            .expect("random bytes");
    assert!(
        initiator.finish(input.bytes(length), &login(), Sequence(1)).is_err(),
        "it knew no key"
    );
    false
}

/// The proofs of an I/O connection.
fn proofs(input: &mut Input<'_>) -> bool {
    let odd = input.u8();
    let session = SessionSecret::from_bytes(&[5; 32]);
    let key = QueueKey::new(&session, Epoch(1), 1);
    let (epoch, queue) = (Epoch(1 + u32::from(odd & 1)), 1 + u16::from(odd >> 1 & 1));
    let other = QueueKey::new(&session, epoch, queue);
    let (proof, expected) = key.prove(&hellos(1), Nonce(input.array()));
    let (body, is_changed) = edited(proof.as_bytes(), input);
    let is_odd = odd & 7 != 0;
    let answer = other.check(&hellos(if odd & 4 != 0 { 2 } else { 1 }), &body);
    assert_eq!(answer.is_ok(), !is_changed && !is_odd, "the proof of the initiator");
    let Ok(answer) = answer else { return false };
    let sequence = Sequence(input.u32());
    let written = answer.answer(sequence);
    let (seen, is_changed) = edited(&written, input);
    let Ok(seen) = seen.try_into() else { return false };
    assert_eq!(expected.is_answer(sequence, &seen), !is_changed, "the proof of the target");
    true
}

/// Each without a fault, and a few with one.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let key = secret(3);
    let reply = rblk_protocol::LoginReply {
        session: rblk_protocol::SessionId([2; 16]),
        epoch: Epoch(1),
        instance: rblk_protocol::InstanceId([3; 16]),
        queues_max: 64,
        target_name: Name::new("store1").expect("a name"),
    };
    let payload = SessionSecret::from_bytes(&[5; 32]).login_payload(&reply);
    vec![
        [&[0], key.public().to_string().as_bytes()].concat(),
        [&[0], key.file_text().as_bytes()].concat(),
        vec![1, 0],
        vec![1, 8],
        vec![2, 1, 3, b'a', b'b', b'c', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        vec![4, 0],
        [&[5], &payload[..]].concat(),
    ]
}
