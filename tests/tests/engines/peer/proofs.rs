//! I/O connections that have to prove that they belong to their session.

use std::time::Duration;

use rblk_fabric::soft::network::Conditions;
use rblk_protocol::auth::{QueueKey, QueueProof, SessionSecret, TargetProof};
use rblk_protocol::{ConnectionKind, Epoch, Nonce, Opcode, Sequence};
use rblk_tests::bed::{MEMORY, PATIENCE};

use super::*;

const QUEUE: u16 = 5;

fn secret(byte: u8) -> SessionSecret {
    SessionSecret::from_bytes(&[byte; 32])
}

fn key(byte: u8, epoch: u32, queue: u16) -> QueueKey {
    QueueKey::new(&secret(byte), Epoch(epoch), queue)
}

/// A bed that makes later connections prove the secret of sevens.
fn suspicious(rig: &RigOptions) -> (Bed, QueueId, SessionIndex) {
    let (mut bed, bystander, suspect) = watched(rig);
    bed.rig.require_proof(secret(7));
    (bed, bystander, suspect)
}

fn connect(bed: &mut Bed, session: SessionIndex) -> RawPeer {
    RawPeer::new(bed, session, ConnectionKind::Io { queue: QUEUE }, STORE, by_send())
}

fn prove(peer: &RawPeer, key: &QueueKey) -> (QueueProof, TargetProof) {
    key.prove(&peer.hellos, Nonce([9; 16]))
}

/// Sends a self-test with `body` in its capsule. Returns its sequence.
fn test(peer: &mut RawPeer, body: &[u8]) -> Sequence {
    let mut command = peer.self_test();
    command.in_capsule_bytes = u32::try_from(body.len()).unwrap();
    peer.send(&[command.to_wire().as_slice(), body].concat());
    command.sequence
}

fn read(bed: &mut Bed, peer: &mut RawPeer) -> Status {
    let command = peer.transfer(Opcode::Read, 1, 0, 8);
    status_of(ask(bed, peer, &command))
}

#[test]
fn both_ends_of_a_queue_prove_the_secret_of_the_session() {
    let (mut bed, bystander, suspect) = suspicious(&RigOptions::default());
    let mut peer = connect(&mut bed, suspect);
    assert_eq!(read(&mut bed, &mut peer), Status::NotReady, "nothing before the proof");
    let (proof, expected) = prove(&peer, &key(7, 1, QUEUE));
    for round in 0..2 {
        let sequence = test(&mut peer, proof.as_bytes());
        assert_eq!(status_of(peer.hear(&mut bed)), Status::Ok);
        assert!(expected.is_answer(sequence, &peer.written()), "round {round}");
        assert_eq!(bed.rig.proven(), 1, "told once");
    }
    assert_eq!(read(&mut bed, &mut peer), Status::Ok);
    assert_eq!(bed.rig.target_counts().failed_proofs, 0);
    assert_unharmed(&mut bed, bystander);
}

#[test]
fn a_queue_proof_of_another_queue_epoch_or_session_is_refused() {
    let wrong = [key(7, 1, QUEUE + 1), key(7, 2, QUEUE), key(8, 1, QUEUE)];
    for case in 0..wrong.len() + 4 {
        let (mut bed, bystander, suspect) = suspicious(&RigOptions::default());
        let mut peer = connect(&mut bed, suspect);
        let (right, _) = prove(&peer, &key(7, 1, QUEUE));
        let mut body = match wrong.get(case) {
            Some(key) => prove(&peer, key).0.as_bytes().to_vec(),
            None => right.as_bytes().to_vec(),
        };
        match case.checked_sub(wrong.len()) {
            None => {}
            // The proof of another connection of the same queue; none; half a proof; a flipped bit.
            Some(0) => {
                let other = connect(&mut bed, suspect);
                body = prove(&other, &key(7, 1, QUEUE)).0.as_bytes().to_vec();
            }
            Some(1) => body.clear(),
            Some(2) => body.truncate(24),
            Some(_) => body[47] ^= 0x80,
        }
        test(&mut peer, &body);
        assert!(matches!(peer.hear(&mut bed), Heard::End(_)), "case {case}");
        assert_eq!(peer.written(), [0; 64], "case {case}: the target proves nothing either");
        let counts = bed.rig.target_counts();
        assert_eq!((counts.failed_proofs, bed.rig.proven()), (1, 0), "case {case}");
        assert_unharmed(&mut bed, bystander);
    }
}

#[test]
fn a_queue_that_proves_nothing_has_five_seconds() {
    let tick = Duration::from_millis(10);
    let (mut bed, bystander, suspect) = suspicious(&RigOptions { tick, ..RigOptions::default() });
    let mut peer = connect(&mut bed, suspect);
    let begun = bed.rig.elapsed();
    while bed.rig.elapsed() - begun < Duration::from_millis(4900) {
        assert_eq!(read(&mut bed, &mut peer), Status::NotReady);
    }
    for _ in 0..100 {
        bed.rig.step();
    }
    assert!(peer.listen().iter().any(|heard| matches!(heard, Heard::End(_))));
    // A connection that has proven itself stays.
    let mut peer = connect(&mut bed, suspect);
    let (proof, _) = prove(&peer, &key(7, 1, QUEUE));
    test(&mut peer, proof.as_bytes());
    assert_eq!(status_of(peer.hear(&mut bed)), Status::Ok);
    for _ in 0..1000 {
        bed.rig.step();
        // Polls, so that the peer takes all messages.
        assert_eq!(peer.listen(), []);
    }
    assert_eq!(read(&mut bed, &mut peer), Status::Ok);
    assert_unharmed(&mut bed, bystander);
}

/// The kernel may place data of an encrypted stream before it has authenticated the data. So this
/// data must not land directly in a volume in memory, where others read it; without encryption it
/// does.
#[test]
fn data_of_an_encrypted_stream_is_not_in_a_memory_volume_before_all_of_it_came() {
    for features in [Features::AUTH, Features::AUTH.or(Features::ENCRYPT)] {
        let is_encrypted = features.has(Features::ENCRYPT);
        let (mut bed, bystander, suspect) = suspicious(&RigOptions::default());
        let options = QueueOptions { features: by_send().features.or(features), ..by_send() };
        let kind = ConnectionKind::Io { queue: QUEUE };
        let mut peer = RawPeer::new(&mut bed, suspect, kind, MEMORY, options);
        let (proof, _) = prove(&peer, &key(7, 1, QUEUE));
        test(&mut peer, proof.as_bytes());
        assert_eq!(status_of(peer.hear(&mut bed)), Status::Ok);
        let bytes = usize::try_from(options.io_max_bytes).unwrap();
        peer.lent.region().write(0, &vec![0xa5; bytes]);
        let command = peer.transfer(Opcode::Write, 1, 0, options.io_max_bytes / 512);
        // The data arrives in small pieces.
        bed.rig.network().set_conditions(Conditions { buffer: 4096, ..Conditions::default() });
        peer.send(&command.to_wire());
        let landed = |bed: &Bed| {
            let mut data = vec![0; bytes];
            bed.rig.memory(MEMORY).unwrap().read(0, &mut data);
            data.iter().filter(|byte| **byte == 0xa5).count()
        };
        let mut partly = false;
        let mut heard = Vec::new();
        for _ in 0..PATIENCE {
            bed.rig.step();
            let now = landed(&bed);
            partly |= now > 0 && now < bytes;
            heard.extend(peer.listen());
            if !heard.is_empty() {
                break;
            }
        }
        assert_eq!(heard.into_iter().map(status_of).collect::<Vec<_>>(), [Status::Ok]);
        assert_eq!(landed(&bed), bytes);
        assert_eq!(partly, !is_encrypted, "encrypted: {is_encrypted}");
        bed.rig.network().set_conditions(Conditions::default());
        assert_unharmed(&mut bed, bystander);
    }
}
