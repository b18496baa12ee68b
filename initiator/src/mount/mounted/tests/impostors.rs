//! Impostors at the address of a target or on the way to it. A mount with keys believes none of
//! them, and waits.

use rblk_config::DigestWish;
use rblk_config::key_file;
use rblk_fabric::ConnectOptions;
use rblk_protocol::auth::{PublicKey, SecretKey};

use super::*;
use crate::volume::session::{Credentials, QueueWish};

fn key() -> SecretKey {
    SecretKey::generate().unwrap()
}

pub(super) fn honest(key: &SecretKey) -> Proofs {
    Proofs { keys: vec![key.clone()], seals: true, refuses: None }
}

/// The configuration of a mount with those target keys, with a key file in that directory.
pub(super) fn config_with_keys(
    toy: &Toy,
    keys: Vec<PublicKey>,
    directory: &std::path::Path,
) -> MountConfig {
    let key_file = directory.join("host.key");
    let _ = key_file::create(&key_file);
    let mut config = config(&[toy]);
    (config.target_keys, config.key_file) = (keys, key_file);
    config
}

/// Attends until a try has failed for that reason and was repeated.
async fn until_refused(mount: &mut Mount, why: &str) {
    until_status(mount, |status| status.last_loss.as_ref().is_some_and(|text| text.contains(why)))
        .await;
    let status = mount.status();
    assert_eq!(status.state, "reconnecting", "{why}");
    assert_eq!(mount.volume.link().facts().fenced, None, "{why}");
    assert!(!mount.volume.link().is_over(), "{why}");
}

#[test]
fn a_target_with_another_key_fences_no_mount() {
    runtime().block_on(async {
        let (toy, directory, target) = (Toy::new().await, tempfile::tempdir().unwrap(), key());
        toy.is(|manners| manners.proofs = Some(honest(&target)));
        let config = config_with_keys(&toy, vec![target.public()], directory.path());
        let mut mount = mounted(&config).await;
        assert_eq!(toy.heard(), [login(false, 1), open(0)]);

        let fences = |manners: &mut Manners| {
            manners.is_dead = false;
            manners.open = (Status::Fenced, "held by mallory");
        };
        let die = |toy: &Toy| toy.is(|manners| manners.is_dead = true);
        // A different key.
        die(&toy);
        until_status(&mut mount, |status| status.state == "reconnecting").await;
        toy.is(|manners| {
            fences(manners);
            manners.proofs = Some(honest(&key()));
        });
        until_refused(&mut mount, "does not prove the key of target_keys").await;
        // No key.
        toy.is(|manners| manners.proofs = None);
        until_refused(&mut mount, "does not prove its key").await;
        assert_eq!(toy.heard(), [], "nobody logged in there");
        // A man in the middle passes the proofs on, and forges the replies that follow.
        for refuses in [Status::Fenced, Status::NotAllowed, Status::NoSuchSession] {
            toy.is(|manners| {
                manners.proofs = Some(Proofs { refuses: Some(refuses), ..honest(&target) });
            });
            let begun = Instant::now();
            let refused = (Opcode::Login, refuses);
            let times = |toy: &Toy| {
                let manners = toy.manners.lock().unwrap();
                manners.handshakes.iter().filter(|said| **said == refused).count()
            };
            while times(&toy) < 3 {
                assert!(begun.elapsed() < TIME_LIMIT, "{refuses}");
                attend(&mut mount).await;
            }
            assert_eq!(mount.status().state, "reconnecting", "{refuses}");
            assert!(
                mount.volume.link().facts().fenced.is_none() && !mount.volume.link().is_over(),
                "{refuses}"
            );
        }
        toy.is(|manners| manners.proofs = Some(Proofs { seals: false, ..honest(&target) }));
        until_refused(&mut mount, "not proven to be the target's").await;
        // The true target again.
        toy.is(|manners| {
            manners.open = (Status::Ok, "");
            manners.proofs = Some(honest(&target));
        });
        until_status(&mut mount, |status| status.state == "connected").await;
        let resumed = |heard: &Heard| !matches!(heard, Heard::Login { resumed: false, .. });
        assert!(toy.heard().iter().all(resumed), "it has gone on with its session");
    });
}

#[test]
fn no_peer_without_proof_ends_a_session() {
    runtime().block_on(async {
        let (toy, directory, target) = (Toy::new().await, tempfile::tempdir().unwrap(), key());
        toy.is(|manners| manners.proofs = Some(honest(&target)));
        let config = config_with_keys(&toy, vec![target.public()], directory.path());
        let mut mount = mounted(&config).await;
        assert_eq!(toy.heard(), [login(false, 1), open(0)]);
        // Any peer may refuse a connection.
        for reason in [RejectReason::NoSuchSession, RejectReason::StaleEpoch] {
            toy.is(|manners| manners.is_dead = true);
            until_status(&mut mount, |status| status.state == "reconnecting").await;
            toy.is(|manners| (manners.is_dead, manners.rejects) = (false, Some((true, reason))));
            until_refused(&mut mount, "did not prove that it is the target").await;
            toy.is(|manners| manners.rejects = None);
            until_status(&mut mount, |status| status.state == "connected").await;
            let resumed = |heard: &Heard| !matches!(heard, Heard::Login { resumed: false, .. });
            assert!(toy.heard().iter().all(resumed), "{reason:?}");
        }
        // A sealed reply of the target counts.
        toy.is(|manners| manners.is_dead = true);
        until_status(&mut mount, |status| status.state == "reconnecting").await;
        toy.is(|manners| (manners.is_dead, manners.knows_session) = (false, false));
        until_status(&mut mount, |status| status.state == "connected").await;
        assert_eq!(toy.heard(), [login(false, 1), open(5)]);
    });
}

#[test]
fn a_refused_queue_of_a_proven_session_ends_no_session() {
    runtime().block_on(async {
        let (toy, target) = (Toy::new().await, key());
        let credentials = Credentials::new(key(), vec![target.public()]).unwrap();
        let buffers = Region::allocate(2 * 4096, PageKind::Normal).unwrap();
        let wish = QueueWish {
            depth: QueueDepth::new(2).unwrap(),
            io_max_bytes: 4096,
            in_capsule_bytes: 4096,
            features: Features::default(),
            digest: DigestWish::Off,
            lanes: Some(1),
            queues: 1,
        };
        let (options, host) = (ConnectOptions::default(), host());
        for reason in [RejectReason::NoSuchSession, RejectReason::StaleEpoch] {
            for credentials in [Some(&credentials), None] {
                toy.is(|manners| {
                    manners.proofs = credentials.map(|_| honest(&target));
                    manners.rejects = Some((false, reason));
                });
                let session = Session::connect(&toy.address, &options, &host, credentials, None);
                let mut session = session.await.unwrap();
                let path = session
                    .connect_queue(0, wish, VolumeHandle(1), &Arc::clone(&buffers).into())
                    .await;
                let error = path.expect_err("it was refused");
                assert_eq!(error.is_session_gone(), credentials.is_none(), "{error}");
                assert!(error.is_transient(), "{error}");
            }
        }
    });
}

#[test]
fn a_proven_reply_counts() {
    runtime().block_on(async {
        let (toy, directory, target) = (Toy::new().await, tempfile::tempdir().unwrap(), key());
        toy.is(|manners| manners.proofs = Some(honest(&target)));
        let config = config_with_keys(&toy, vec![target.public()], directory.path());
        let mut mount = mounted(&config).await;
        toy.is(|manners| manners.open = (Status::Fenced, "held by b (10.0.0.2)"));
        // A hint that any peer could give. The answer to the next OPEN is proven.
        mount.on_event(Ok(TargetNews::Event(Some(AsyncEvent::Fenced))));
        assert_eq!(mount.status().state, "reconnecting");
        until_status(&mut mount, |status| status.state == "fenced").await;
        assert_eq!(mount.volume.link().facts().fenced.as_deref(), Some("held by b (10.0.0.2)"));
    });
}

#[test]
fn a_hint_alone_fences_no_mount() {
    runtime().block_on(async {
        let (toy, directory, target) = (Toy::new().await, tempfile::tempdir().unwrap(), key());
        toy.is(|manners| manners.proofs = Some(honest(&target)));
        let config = config_with_keys(&toy, vec![target.public()], directory.path());
        let mut mount = mounted(&config).await;
        mount.on_event(Ok(TargetNews::Event(Some(AsyncEvent::Fenced))));
        until_status(&mut mount, |status| status.state == "connected" && status.epoch == 2).await;
        assert_eq!(mount.volume.link().facts().fenced, None);
    });
}

#[test]
fn a_target_may_change_its_key() {
    runtime().block_on(async {
        let (toy, directory) = (Toy::new().await, tempfile::tempdir().unwrap());
        let (old, new) = (key(), key());
        toy.is(|manners| manners.proofs = Some(honest(&old)));
        let keys = vec![new.public(), old.public()];
        let config = config_with_keys(&toy, keys, directory.path());
        let mut mount = mounted(&config).await;
        toy.is(|manners| manners.is_dead = true);
        until_status(&mut mount, |status| status.state == "reconnecting").await;
        toy.is(|manners| {
            manners.is_dead = false;
            manners.proofs = Some(honest(&new));
        });
        until_status(&mut mount, |status| status.state == "connected").await;
    });
}

#[test]
fn a_first_mount_says_which_key_is_wrong() {
    runtime().block_on(async {
        let (toy, directory, target) = (Toy::new().await, tempfile::tempdir().unwrap(), key());
        let config = config_with_keys(&toy, vec![target.public()], directory.path());
        let refusal = async |proofs: Option<Proofs>| {
            toy.is(|manners| manners.proofs = proofs);
            let why = RefCell::default();
            let error = connect_first(first(&config, false), host(), &why).await.unwrap_err();
            let session_error = error.downcast_ref::<SessionError>().unwrap();
            assert_eq!(session_error.exit(), rblk_config::Exit::Refused);
            error.to_string()
        };
        let text = refusal(Some(honest(&key()))).await;
        assert!(text.contains(&target.public().to_string()) && text.contains("key show"), "{text}");
        let text = refusal(None).await;
        assert!(text.contains("auth = \"required\""), "{text}");
        let proofs = Proofs { refuses: Some(Status::NotAllowed), ..honest(&target) };
        let text = refusal(Some(proofs)).await;
        let own = config.secret_key().unwrap().unwrap().public().to_string();
        assert!(text.contains(&own) && text.contains("[[host]]"), "{text}");
        assert!(toy.heard().is_empty());

        std::fs::remove_file(&config.key_file).unwrap();
        let why = RefCell::default();
        let error = connect_first(first(&config, false), host(), &why).await.unwrap_err();
        assert!(error.to_string().contains("rblk-initiator key new"), "{error}");
    });
}
