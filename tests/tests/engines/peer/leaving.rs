//! Initiators that leave are no lost connections; initiators that leave with unanswered commands
//! are.

use rblk_protocol::Opcode;
use rblk_rig::ram_store::StoreConditions;
use rblk_tests::bed::PATIENCE;

use super::*;

const READS: u16 = 5;

/// How the connection ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum How {
    /// The initiator disconnects.
    Disconnects,
    /// The path breaks: answers on their way get no acknowledgement.
    Breaks,
}

/// Lost connections of a target after the initiator ends the connection after `READS` commands,
/// with all answers or none.
fn lost(how: How, answered: bool) -> u64 {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, by_send());
    if !answered {
        let slow = StoreConditions { delay_min: 5000, delay_max: 5000, ..Default::default() };
        bed.rig.store_mut().set_conditions(slow);
    }
    for tag in 0..READS {
        let command = peer.transfer(Opcode::Read, tag, u64::from(tag) * 8, 8);
        if answered {
            assert_eq!(status_of(ask(&mut bed, &mut peer, &command)), Status::Ok);
        } else {
            peer.send(&command.to_wire());
        }
    }
    if !answered {
        for _ in 0..50 {
            bed.rig.step();
        }
        assert!(peer.listen().is_empty(), "it was to be unanswered");
    }
    let before = bed.rig.target_counts().lost_connections;
    if how == How::Breaks {
        peer.wire.cut();
    }
    drop(peer);
    bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
    let lost = bed.rig.target_counts().lost_connections - before;
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    assert_unharmed(&mut bed, bystander);
    lost
}

#[test]
fn a_host_that_leaves_without_open_commands_is_not_lost() {
    assert_eq!(lost(How::Disconnects, true), 0);
    // Like an initiator that destroys its QP before it acknowledges the last answer.
    assert_eq!(lost(How::Breaks, true), 0);
}

#[test]
fn a_host_that_leaves_with_open_commands_is_lost() {
    assert_eq!(lost(How::Disconnects, false), 1);
    assert_eq!(lost(How::Breaks, false), 1);
}
