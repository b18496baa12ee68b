//! Peers that break the rules: their own connection ends, or their command gets a status, and
//! nothing else happens.

mod answers;
mod capsules;
mod leaving;
mod memory;
mod proofs;
mod strangers;

use rblk_protocol::{CommandCapsule, Features, Status};
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_target::volume::ids::SessionIndex;
use rblk_tests::bed::{Bed, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer};

const DEPTH: u16 = 8;

fn options() -> QueueOptions {
    QueueOptions { depth: DEPTH, io_max_bytes: 64 << 10, ..QueueOptions::default() }
}

fn by_send() -> QueueOptions {
    QueueOptions { features: Features::default(), ..options() }
}

/// A bed with a well-behaved queue in its own session, and a session for the suspect.
fn watched(rig: &RigOptions) -> (Bed, QueueId, SessionIndex) {
    let mut bed = Bed::new(rig);
    let bystander = bed.queue(STORE, options());
    let suspect = bed.rig.begin_session();
    bed.open_all(suspect);
    (bed, bystander, suspect)
}

/// Checks that the honest queue is served as usual.
fn assert_unharmed(bed: &mut Bed, bystander: QueueId) {
    bed.write(bystander, 4096, &pattern(21, 16384));
    assert!(bed.read(bystander, 4096, 16384) == pattern(21, 16384));
    assert_eq!(bed.rig.take_path_ends(bystander), []);
}

fn ask(bed: &mut Bed, peer: &mut RawPeer, command: &CommandCapsule) -> Heard {
    peer.send(&command.to_wire());
    peer.hear(bed)
}

fn status_of(heard: Heard) -> Status {
    match heard {
        Heard::Response(response) => response.status,
        other => panic!("no response: {other:?}"),
    }
}
