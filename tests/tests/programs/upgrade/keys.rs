//! Upgrades of a target with hosts that prove their keys.

use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::Credentials;
use rblk_protocol::auth::{PublicKey, SecretKey};

use super::*;

/// A configuration that lets in the hosts with these keys, with a new key for the target.
fn with_keys(dir: &Path, hosts: &[(&str, &SecretKey)]) {
    let before = std::fs::read_to_string(configuration(dir)).unwrap();
    let hosts = hosts.iter().map(|(name, key)| {
        let key = key.public();
        format!(
            "[[host]]\nname = '{name}'\nkeys = ['{key}']\nvolumes = ['v:rw']\ntake_over = true\n"
        )
    });
    let (file, hosts) = (dir.join("target.key").display().to_string(), hosts.collect::<String>());
    let keys = format!("listen = ['tcp://127.0.0.1:1']\nauth = 'required'\nkey_file = '{file}'\n");
    std::fs::write(dir.join("target.toml"), keys + &before + &hosts).unwrap();
}

fn start_with_keys(dir: &Path, hosts: &[(&str, &SecretKey)]) -> (Target, PublicKey) {
    let file = dir.join("target.key").display().to_string();
    let made = run(Command::new(program("rblk-target")).args(["key", "new", "--file", &file]));
    with_keys(dir, hosts);
    let target = Target::start(dir, &["--config", &dir.join("target.toml").display().to_string()]);
    (target, made.stdout.trim_end().parse().expect("a key"))
}

fn prove(
    target: &Target,
    its: PublicKey,
    key: &SecretKey,
    claim: VolumeClaim,
) -> Result<Client, SessionError> {
    let credentials = Credentials::new(key.clone(), vec![its]).unwrap();
    Client::prove(&target.address, "v", 1, Some(&credentials), claim)
}

#[test]
fn a_key_that_goes_while_a_target_hands_over_stays_gone() {
    let [kept, revoked] = [(); 2].map(|()| SecretKey::generate().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (target, its) = start_with_keys(dir.path(), &[("db1", &kept), ("db2", &revoked)]);
    // A mount that stays for a while: there is time between the request and the hand-over.
    let client = prove(&target, its, &revoked, AccessMode::Exclusive.into()).expect("it may");
    let upgrade = begin(&target, &["--timeout", "2s"]);
    wait_for("the begin", || target.log().contains("another program takes over").then_some(()));
    with_keys(dir.path(), &[("db1", &kept)]);
    let mut reload = Command::new(program("rblk-target"));
    reload.args(["reload", "--hosts", "--control-socket"]).arg(&target.socket);
    let reloaded = run(&mut reload);
    assert_eq!(reloaded.code, Some(0), "{reloaded:?}");
    let (code, said, complaint) = end(upgrade);
    assert!(!said.is_null(), "{code:?} {complaint}\n{}", target.log());
    drop(client);
    let mut dump = Command::new(program("rblk-target"));
    let dumped = run(dump.args(["dump", "--control-socket"]).arg(&target.socket)).stdout;
    assert!(dumped.contains("name = \"db1\"") && !dumped.contains("name = \"db2\""), "{dumped}");
    let claim: VolumeClaim = VolumeClaim { take_over: true, ..AccessMode::Exclusive.into() };
    let refused = prove(&target, its, &revoked, claim).unwrap_err();
    assert!(refused.to_string().contains("key"), "its key was revoked: {refused}");
    prove(&target, its, &kept, claim).expect("its key was not");
}

#[test]
fn a_target_that_could_not_start_again_is_not_left() {
    let key = SecretKey::generate().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (target, its) = start_with_keys(dir.path(), &[("db1", &key)]);
    let client = prove(&target, its, &key, AccessMode::Exclusive.into()).expect("it may");
    let instance = target.status().instance;
    // The next program would have another key.
    let (old, new) = (dir.path().join("target.key"), dir.path().join("new.key"));
    std::fs::rename(&old, &new).unwrap();
    let config = dir.path().join("target.toml");
    let text = std::fs::read_to_string(&config).unwrap().replace("target.key", "new.key");
    std::fs::write(&config, text).unwrap();
    let refused = run(&mut command(&target, &[]));
    let pieces = ["could not start again", &old.display().to_string(), "serves as before"];
    assert_refused(&refused, 1, &pieces);
    assert_eq!(target.status().instance, instance);
    client.logout();
}
