//! Admin connections that have not logged in: they have little time, with any messages.

use std::time::Duration;

use rblk_protocol::{ConnectionKind, Epoch, Opcode};
use rblk_target::data::poll_group::ToGroup;

use super::*;

/// A step of the bed: long enough that seconds pass.
const TICK: Duration = Duration::from_millis(10);

/// A stranger that sends a command every half second. Returns the answers until it is dead, or 20 s
/// are over, and the time of its death.
fn chat(opcode: Opcode, adopt: bool) -> (Vec<Status>, Option<Duration>) {
    let mut bed = Bed::new(&RigOptions { tick: TICK, ..RigOptions::default() });
    let bystander = bed.queue(STORE, options());
    let mut peer =
        RawPeer::new(&mut bed, SessionIndex::NONE, ConnectionKind::Admin, STORE, by_send());
    let begun = bed.rig.elapsed();
    let (mut heard, mut dead) = (Vec::new(), None);
    for round in 0..40 {
        if dead.is_none() {
            let command = peer.command(opcode, 1);
            peer.send(&command.to_wire());
        }
        for _ in 0..50 {
            bed.rig.step();
            for said in peer.listen() {
                match said {
                    Heard::Response(response) => heard.push(response.status),
                    Heard::End(_) => dead = Some(bed.rig.elapsed() - begun),
                    Heard::Immediate(_) => panic!("no data"),
                }
            }
            for asked in bed.rig.take_admin() {
                if adopt && round == 0 {
                    let session = bed.session;
                    let silence = Duration::from_secs(2);
                    let (connection, epoch) = (asked.connection, Epoch(1));
                    let adopt = ToGroup::Adopt { connection, session, epoch, silence };
                    bed.rig.mail_to(asked.group, adopt);
                }
                bed.rig.reply(&asked, Status::NotReady, 0, Vec::new());
            }
        }
    }
    assert_unharmed(&mut bed, bystander);
    (heard, dead)
}

#[test]
fn a_stranger_has_five_seconds_with_any_messages() {
    for opcode in [Opcode::KeepAlive, Opcode::Login, Opcode::ListVolumes, Opcode::AsyncEvent] {
        let (heard, dead) = chat(opcode, false);
        assert!(heard.len() >= 9, "{opcode:?}: it was heard: {heard:?}");
        let dead = dead.expect("it is ended");
        let (least, most) = (Duration::from_secs(5), Duration::from_secs(6));
        assert!(least <= dead && dead <= most, "{opcode:?}: after {dead:?}");
    }
}

#[test]
fn one_whose_login_was_accepted_has_no_such_deadline() {
    let (heard, dead) = chat(Opcode::Login, true);
    assert_eq!((heard.len(), dead), (40, None));
}
