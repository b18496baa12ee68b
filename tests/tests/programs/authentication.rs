//! A target that asks for proof, as a process: the hosts that get in, the hosts that do not, and
//! the end of a session when its key is revoked.

use std::fs;
use std::path::Path;
use std::process::Command;

use rblk_config::Encrypt;
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::{Credentials, VolumeClaim};
use rblk_protocol::auth::{PublicKey, SecretKey};
use rblk_protocol::{AccessMode, Generation, RejectReason};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Ended, Target, program, run, wait_for};

struct Bed {
    directory: tempfile::TempDir,
    target: Target,
    key: PublicKey,
}

fn command(name: &str, args: &[&str]) -> Ended {
    run(Command::new(program(name)).args(args))
}

/// The entry of a host.
fn host(name: &str, key: &SecretKey, volumes: &str) -> String {
    let key = key.public();
    format!("[[host]]\nname = '{name}'\nkeys = ['{key}']\nvolumes = [{volumes}]\n")
}

fn write(directory: &Path, hosts: &[String]) {
    write_with(directory, "", hosts);
}

fn write_with(directory: &Path, keys: &str, hosts: &[String]) {
    let key_file = directory.join("target.key");
    let volume = |name| format!("[[volume]]\nname = '{name}'\nstore = 'memory'\nsize = '1MiB'\n");
    let text = format!(
        // A file must name an address; the flag of the test overrides it.
        "listen = ['tcp://127.0.0.1:1']\nauth = 'required'\nkey_file = '{}'\n{keys}{}{}{}",
        key_file.display(),
        volume("a"),
        volume("b"),
        hosts.concat()
    );
    fs::write(directory.join("target.toml"), text).unwrap();
}

/// Makes the key of a target.
fn new_key(directory: &Path) -> PublicKey {
    let file = directory.join("target.key").display().to_string();
    let made = command("rblk-target", &["key", "new", "--file", &file]);
    made.stdout.trim_end().parse().unwrap()
}

impl Bed {
    fn new(hosts: &[String]) -> Self {
        Self::with("", hosts)
    }

    fn with(keys: &str, hosts: &[String]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let key = new_key(directory.path());
        write_with(directory.path(), keys, hosts);
        let config = directory.path().join("target.toml").display().to_string();
        let target = Target::start(directory.path(), &["--config", &config]);
        Self { directory, target, key }
    }

    /// A client with a key of its own, which knows the target by its key.
    fn client(
        &self,
        key: &SecretKey,
        claim: impl Into<VolumeClaim>,
    ) -> Result<Client, SessionError> {
        let credentials = Credentials::new(key.clone(), vec![self.key]).unwrap();
        Client::prove(&self.target.address, "a", 1, Some(&credentials), claim)
    }
}

#[test]
fn hosts_that_prove_their_keys_are_served() {
    let [one, two] = [(); 2].map(|()| SecretKey::generate().unwrap());
    let bed = Bed::new(&[host("db1", &one, "'a:rw'"), host("db2", &two, "'a:ro'")]);
    let mut a = bed.client(&one, AccessMode::Exclusive).unwrap();
    a.write(4096, &pattern(1, 8192));
    assert!(a.read(4096, 8192) == pattern(1, 8192));
    let names: Vec<String> = a.list().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["a"], "it may not know of b");
    let status = bed.target.status();
    let session = &status.sessions[0];
    assert_eq!((status.auth.as_str(), session.host.as_str()), ("required", "db1"));
    assert_eq!(session.key, Some(one.public().to_string()));
    assert_eq!((session.connections, status.strangers, status.unproven), (2, 0, 0));
    // Limits of the other host's rights.
    let refused = bed.client(&two, AccessMode::Exclusive).unwrap_err();
    assert!(refused.to_string().contains("a:ro"), "{refused}");
    let by_force =
        VolumeClaim { mode: AccessMode::Exclusive, take_over: true, generation: Generation::FRESH };
    bed.client(&two, by_force).unwrap_err();
    let mut reader = bed.client(&two, AccessMode::ReadOnly).unwrap();
    assert!(reader.read(4096, 8192) == pattern(1, 8192));
    a.logout();
    reader.logout();
}

impl Bed {
    /// A client that wants its data encrypted, or not.
    fn encrypting(&self, key: &SecretKey, encrypt: Encrypt) -> Result<Client, SessionError> {
        let credentials = Credentials::new(key.clone(), vec![self.key]).unwrap();
        let credentials = credentials.encrypting(encrypt);
        let (address, claim) = (&self.target.address, AccessMode::Exclusive);
        Client::prove(address, "a", 1, Some(&credentials), claim)
    }
}

/// Without TLS in this kernel, no session is shown as encrypted, and a host that requires
/// encryption is refused.
#[test]
fn data_over_tcp_is_encrypted_where_the_kernel_can() {
    let can = kernel_has_tls();
    let one = SecretKey::generate().unwrap();
    let bed = Bed::new(&[host("db1", &one, "'*:rw'")]);
    for (encrypt, encrypted) in [(Encrypt::Auto, can.is_ok()), (Encrypt::Off, false)] {
        let mut client = bed.encrypting(&one, encrypt).unwrap();
        client.write(4096, &pattern(1, 8192));
        assert!(client.read(4096, 8192) == pattern(1, 8192));
        let status = bed.target.status();
        assert_eq!(status.sessions[0].encrypted, encrypted, "{encrypt:?}");
        assert_eq!(status.total.bad_records, 0);
        client.logout();
        wait_for("its end", || bed.target.status().sessions.is_empty().then_some(()));
    }
    match (bed.encrypting(&one, Encrypt::Required), can) {
        (Ok(mut client), Ok(())) => {
            client.write(0, &pattern(2, 4096));
            assert!(bed.target.status().sessions[0].encrypted);
            client.logout();
        }
        (Err(error), Err(why)) => {
            assert!(matches!(error, SessionError::NotEncrypted { .. }), "{error}");
            assert!(error.to_string().contains(&why.to_string()), "{error}");
        }
        (client, can) => panic!("{client:?}, and TLS of the kernel: {can:?}"),
    }
}

#[test]
fn a_target_that_must_encrypt_does_so_or_does_not_start() {
    let one = SecretKey::generate().unwrap();
    let (hosts, keys) = ([host("db1", &one, "'*:rw'")], "encrypt = 'required'\n");
    let Err(why) = kernel_has_tls() else {
        let bed = Bed::with(keys, &hosts);
        bed.encrypting(&one, Encrypt::Auto).unwrap().logout();
        match bed.encrypting(&one, Encrypt::Off).unwrap_err() {
            SessionError::Refused { reject, .. } => {
                assert_eq!(reject.reason, Some(RejectReason::NotEncrypted));
            }
            other => panic!("{other}"),
        }
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    new_key(directory.path());
    write_with(directory.path(), keys, &hosts);
    let path = |name: &str| directory.path().join(name).display().to_string();
    let args = ["serve", "--config", &path("target.toml"), "--control-socket", &path("c.sock")];
    let ended = command("rblk-target", &[&args[..], &["--listen", "tcp://127.0.0.1:1"]].concat());
    assert!(ended.code != Some(0) && ended.stderr.contains(&why.to_string()), "{ended:?}");
}

#[test]
fn hosts_without_a_valid_key_are_refused() {
    let known = SecretKey::generate().unwrap();
    let bed = Bed::new(&[host("db1", &known, "'*:rw'")]);
    let mut held = bed.client(&known, AccessMode::Exclusive).unwrap();
    // Without a key.
    match Client::connect(&bed.target.address, "a", 2).unwrap_err() {
        SessionError::Refused { reject, .. } => {
            assert_eq!(reject.reason, Some(RejectReason::NotAllowed));
            assert!(reject.text.contains("prove their keys"), "{}", reject.text);
        }
        other => panic!("{other}"),
    }
    // With a key that no host has.
    let stranger = SecretKey::generate().unwrap();
    let refused = bed.client(&stranger, AccessMode::Exclusive).unwrap_err();
    assert!(matches!(refused, SessionError::HostNotAllowed { .. }), "{refused}");
    // With a key that the target does not have: the initiator refuses.
    let other = Credentials::new(known.clone(), vec![stranger.public()]).unwrap();
    let address = &bed.target.address;
    let refused = Client::prove(address, "a", 1, Some(&other), AccessMode::Exclusive).unwrap_err();
    assert!(matches!(refused, SessionError::WrongTargetKey { .. }), "{refused}");
    assert_eq!(bed.target.status().unproven, 2);
    held.write(0, &pattern(2, 4096));
    held.logout();
}

#[test]
fn a_revoked_key_ends_its_session_at_once() {
    let [one, two] = [(); 2].map(|()| SecretKey::generate().unwrap());
    let (first, second) = (host("db1", &one, "'*:rw'"), host("db2", &two, "'*:rw'"));
    let bed = Bed::new(&[first, second.clone()]);
    let mut held = bed.client(&one, AccessMode::Exclusive).unwrap();
    held.write(0, &pattern(3, 4096));
    write(bed.directory.path(), &[second]);
    let socket = bed.target.socket.display().to_string();
    let reload = command("rblk-target", &["reload", "--control-socket", &socket]);
    assert_eq!(reload.code, Some(0), "{reload:?}");
    assert!(reload.stdout.contains("db1"), "it says whose session ended: {reload:?}");
    wait_for("the end of the session", || bed.target.status().sessions.is_empty().then_some(()));
    let refused = bed.client(&one, AccessMode::Exclusive).unwrap_err();
    assert!(matches!(refused, SessionError::HostNotAllowed { .. }), "{refused}");
    // Its volume is free at once.
    bed.client(&two, AccessMode::Exclusive).unwrap().logout();
}

/// More readers than the target lets wait for their LOGIN at a time, as after the boot of a host.
#[test]
fn many_readers_of_one_host_log_in_at_once() {
    const READERS: usize = 40;
    let one = SecretKey::generate().unwrap();
    let bed = Bed::new(&[host("db1", &one, "'a:ro'")]);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|_| scope.spawn(|| bed.client(&one, AccessMode::ReadOnly).map(Client::logout)))
            .collect();
        for reader in readers {
            reader.join().unwrap().unwrap();
        }
    });
    assert_eq!(bed.target.status().strangers, 0);
}
