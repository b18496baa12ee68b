//! Peers on the way or in the place of a target, without its key.

use rblk_fabric::ConnectOptions;
use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::{Credentials, Session};
use rblk_protocol::auth::{
    Carrier, LoggedIn, PublicKey, SecretKey, SessionSecret, TargetHandshake, TargetSeal,
};
use rblk_protocol::{
    CommandCapsule, Features, HelloAccept, HelloRequest, InstanceId, Opcode, QueueDepth, Status,
    VolumeListHeader,
};

use super::target::{Answer, Manners, hellos, listen};
use super::{connect, login_reply, runtime};

/// The manipulation of the target's messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mischief {
    None,
    /// AUTH is removed from the accept.
    StripAccept,
    /// AUTH is removed from the request on its way to the target.
    StripRequest,
    /// The accept grants less than the target did.
    LowerDepth,
    /// The accept is of another run.
    OtherInstance,
    /// The first message comes back as the second.
    Reflect,
    /// The second message of the first connection is sent on every later one.
    Replay,
    /// A bit of the second message is flipped.
    Flip,
    /// The sealed answer to the first LIST answers every later one.
    ReplayReply,
    /// The answer to LIST is not sealed.
    NoSeal,
    /// A bit of the answer to LIST is flipped.
    FlipReply,
    /// The length of the sealed answer to LIST is beyond its buffer.
    LongReply,
}

struct Target {
    key: SecretKey,
    mischief: Mischief,
    handshake: Option<TargetHandshake>,
    seal: Option<TargetSeal>,
    second: Option<Vec<u8>>,
    list: Option<Vec<u8>>,
    hosts: Vec<PublicKey>,
    heard: Vec<Opcode>,
}

impl Manners for Target {
    fn has_proofs(&self) -> bool {
        true
    }

    fn connected(&mut self, asked: &HelloRequest, accept: HelloAccept) -> HelloAccept {
        let strip = |features: Features| features.without(Features::AUTH);
        let heard = match self.mischief {
            Mischief::StripRequest => HelloRequest { features: strip(asked.features), ..*asked },
            _ => *asked,
        };
        let keys = [self.key.clone()];
        self.handshake = Some(TargetHandshake::new(&keys, &hellos(&heard, &accept), Carrier::Tcp));
        match self.mischief {
            Mischief::StripAccept => HelloAccept { features: strip(accept.features), ..accept },
            Mischief::LowerDepth => HelloAccept { depth: QueueDepth::new(8).unwrap(), ..accept },
            Mischief::OtherInstance => HelloAccept { instance: InstanceId([9; 16]), ..accept },
            _ => accept,
        }
    }

    fn answer(&mut self, command: &CommandCapsule, body: &[u8]) -> Option<Answer> {
        self.heard.push(command.opcode);
        match command.opcode {
            Opcode::Authenticate => Some(self.authenticate(body)),
            Opcode::Login => {
                let handshake = self.handshake.as_mut().unwrap();
                let logged_in = handshake.read_last(body, command.sequence).ok()?;
                let LoggedIn { host, seal, ticket, .. } = logged_in;
                self.hosts.push(host);
                let payload = SessionSecret::from_bytes(&[5; 32]).login_payload(&login_reply());
                let sealed = seal.seal_reply(ticket, Status::Ok, 0, &*payload).unwrap();
                self.seal = Some(seal);
                Some(Answer::sealed(sealed))
            }
            Opcode::ListVolumes => Some(self.list(command, body)),
            other => panic!("{other:?}"),
        }
    }
}

impl Target {
    fn authenticate(&mut self, body: &[u8]) -> Answer {
        let Ok(second) = self.handshake.as_mut().unwrap().read_first(body) else {
            return Answer { status: Status::NotAllowed, ..Answer::ok([]) };
        };
        let mut second = second.to_vec();
        match self.mischief {
            Mischief::Reflect => second = body.to_vec(),
            Mischief::Flip => second[40] ^= 4,
            Mischief::Replay => second = self.second.get_or_insert(second).clone(),
            _ => {}
        }
        Answer::ok(second)
    }

    fn list(&mut self, command: &CommandCapsule, body: &[u8]) -> Answer {
        let seal = self.seal.as_mut().unwrap();
        let opened = seal.open_command(command.sequence, &command.to_wire(), body);
        let (_, ticket) = opened.unwrap();
        let page = VolumeListHeader { entries: 0, total: 0 }.to_wire();
        let mut sealed = seal.seal_reply(ticket, Status::Ok, 0, &page).unwrap();
        match self.mischief {
            Mischief::NoSeal => return Answer::ok(page),
            Mischief::LongReply => return Answer { value: u32::MAX, ..Answer::sealed(sealed) },
            Mischief::FlipReply => sealed[3] ^= 1,
            Mischief::ReplayReply => sealed = self.list.get_or_insert(sealed).clone(),
            _ => {}
        }
        Answer::sealed(sealed)
    }
}

/// The results of two sessions in turn, each with two LISTs, and the commands that the target
/// received.
struct Came {
    results: Vec<Result<(), SessionError>>,
    heard: Vec<Opcode>,
    hosts: Vec<PublicKey>,
    host: PublicKey,
}

fn sessions(mischief: Mischief) -> Came {
    runtime().block_on(async {
        let (key, own) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
        let (target_key, host) = (key.public(), own.public());
        let credentials = Credentials::new(own, vec![target_key]).unwrap();
        let target = Target {
            key,
            mischief,
            handshake: None,
            seal: None,
            second: None,
            list: None,
            hosts: Vec::new(),
            heard: Vec::new(),
        };
        let (address, target) = listen(target).await;
        let mut results = Vec::new();
        for _ in 0..2 {
            let session = connect(&address, &ConnectOptions::default(), Some(&credentials)).await;
            results.push(match session {
                Ok(mut session) => list_twice(&mut session).await,
                Err(error) => Err(error),
            });
        }
        let target = target.lock().unwrap();
        Came { results, heard: target.heard.clone(), hosts: target.hosts.clone(), host }
    })
}

async fn list_twice(session: &mut Session) -> Result<(), SessionError> {
    for _ in 0..2 {
        assert!(session.list().await?.is_empty());
    }
    Ok(())
}

#[test]
fn a_target_with_the_key_is_believed() {
    let Came { results, hosts, host, .. } = sessions(Mischief::None);
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    assert_eq!(hosts, [host; 2]);
}

#[test]
fn a_replayed_or_reflected_handshake() {
    for mischief in [Mischief::Reflect, Mischief::Flip] {
        let Came { results, heard, .. } = sessions(mischief);
        for result in results {
            assert!(matches!(result, Err(SessionError::WrongTargetKey { .. })), "{result:?}");
        }
        assert!(!heard.contains(&Opcode::Login), "{mischief:?}: this host says nothing of itself");
    }
    let Came { results, .. } = sessions(Mischief::Replay);
    assert!(results[0].is_ok(), "{results:?}");
    assert!(matches!(results[1], Err(SessionError::WrongTargetKey { .. })), "{results:?}");
}

#[test]
fn a_stripped_feature_bit_fails_the_handshake() {
    let Came { results, heard, .. } = sessions(Mischief::StripAccept);
    for result in results {
        assert!(matches!(result, Err(SessionError::NoProof { .. })), "{result:?}");
    }
    assert_eq!(heard, [], "there is no session without proofs");
    for mischief in [Mischief::StripRequest, Mischief::LowerDepth, Mischief::OtherInstance] {
        let Came { results, heard, .. } = sessions(mischief);
        for result in results {
            let failed = matches!(result, Err(SessionError::WrongTargetKey { .. }));
            assert!(failed, "{mischief:?}: {result:?}");
        }
        assert!(!heard.contains(&Opcode::Login), "{mischief:?}");
    }
}

#[test]
fn an_unproven_answer_does_not_count() {
    for mischief in [Mischief::NoSeal, Mischief::FlipReply, Mischief::LongReply] {
        let Came { results, .. } = sessions(mischief);
        for result in results {
            let unproven =
                matches!(result, Err(SessionError::Unproven { what: Opcode::ListVolumes, .. }));
            assert!(unproven, "{mischief:?}: {result:?}");
        }
    }
    let Came { results, heard, .. } = sessions(Mischief::ReplayReply);
    assert!(results.iter().all(Result::is_err), "{results:?}");
    let lists = heard.iter().filter(|opcode| **opcode == Opcode::ListVolumes).count();
    assert_eq!(lists, 3, "the first answer was fine, and none after it");
}
