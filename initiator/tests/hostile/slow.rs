//! A target that notices the first message of a connection only when the next one comes, as
//! Soft-iWARP does now and then.

use std::time::Duration;

use rblk_fabric::ConnectOptions;
use rblk_protocol::{CommandCapsule, Opcode};

use super::target::{Answer, Manners, listen};
use super::{connect, login_reply, runtime};

struct Slow;

impl Manners for Slow {
    fn has_proofs(&self) -> bool {
        false
    }

    fn is_slow_to_look(&self) -> bool {
        true
    }

    fn answer(&mut self, command: &CommandCapsule, _: &[u8]) -> Option<Answer> {
        assert_eq!(command.opcode, Opcode::Login);
        Some(Answer::ok(login_reply().to_wire()))
    }
}

#[test]
fn a_stranger_does_not_rely_on_its_first_message() {
    runtime().block_on(async {
        let (address, _) = listen(Slow).await;
        // A larger `detect` makes KEEP_ALIVEs rarer.
        let detect = Duration::from_secs(300);
        let options = ConnectOptions {
            timeout: Duration::from_secs(20),
            detect,
            ..ConnectOptions::default()
        };
        connect(&address, &options, None).await.unwrap();
    });
}
