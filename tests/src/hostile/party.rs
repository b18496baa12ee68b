//! [`Party`]: a target, an honest host and a rogue host, with their keys; and the checks when they
//! meet.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rblk_fabric::Address;
use rblk_initiator::volume::session::Credentials;
use rblk_operate::target::status::TargetStatus;
use rblk_protocol::AccessMode;
use rblk_protocol::auth::SecretKey;

use super::bystander::{Bystander, Seen};
use super::cases::{CASES, HONEST, MINE, MINE_BLOCKS, READABLE, Victim};
use super::noise::{Keys, Transport, key_of};
use super::rogue::{BLOCK, Door};
use crate::lab::{Usage, Witness};
use crate::program::Client;

/// Bytes of each volume.
const BYTES: u64 = MINE_BLOCKS * BLOCK as u64;
/// The longest stall allowed for an honest request, without stalls of the machine itself. Measured
/// on a quiet machine: 20 to 60 ms. A deaf peer once cost 18.9 s.
const STALL: Duration = Duration::from_secs(1);
/// Memory that a target may keep in the end, because an allocator does not return all of it.
const GROWTH_KIB: u64 = 24 << 10;
/// How long leftovers of the cases may take to end.
const END: Duration = Duration::from_secs(60);

/// The parties. See the module.
#[derive(Debug)]
pub struct Party {
    target: SecretKey,
    honest: SecretKey,
    rogue: SecretKey,
}

/// Resources that a target holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Held {
    sessions: usize,
    connections: usize,
    files: usize,
    threads: usize,
}

impl Held {
    fn of(status: &TargetStatus) -> Self {
        let usage = Usage::of(status.pid);
        Self {
            sessions: status.sessions.len(),
            connections: status.sessions.iter().map(|session| session.connections).sum(),
            files: usage.files,
            threads: usage.threads,
        }
    }
}

impl Default for Party {
    fn default() -> Self {
        let key = || SecretKey::generate().expect("a key");
        Self { target: key(), honest: key(), rogue: key() }
    }
}

impl Party {
    /// Writes the key of the target and its configuration into a directory. Returns the path of the
    /// configuration.
    ///
    /// # Panics
    /// The directory takes no files.
    #[must_use]
    pub fn config(&self, dir: &Path, listen: &[String]) -> PathBuf {
        self.config_with(dir, listen, "")
    }

    /// A configuration as [`Self::config`] writes it, with more keys of the target.
    ///
    /// # Panics
    /// The directory takes no files.
    #[must_use]
    pub fn config_with(&self, dir: &Path, listen: &[String], keys: &str) -> PathBuf {
        let (key, config) = (dir.join("party.key"), dir.join("party.toml"));
        let mut file = File::create(&key).expect("a key file");
        file.set_permissions(Permissions::from_mode(0o600)).expect("its mode");
        file.write_all(self.target.file_text().as_bytes()).expect("a key");
        let volume = |name| {
            format!("[[volume]]\nname = \"{name}\"\nstore = \"memory\"\nsize = \"{BYTES}\"\n")
        };
        let host = |name: &str, key: &SecretKey, volumes: &str| {
            let key = key.public();
            format!("[[host]]\nname = \"{name}\"\nkeys = [\"{key}\"]\nvolumes = [{volumes}]\n")
        };
        let text = [
            format!("listen = {listen:?}\nauth = \"required\"\nkey_file = {key:?}\n{keys}"),
            [HONEST, MINE, READABLE].map(volume).concat(),
            host("honest", &self.honest, &format!("\"{HONEST}:rw\"")),
            host("rogue", &self.rogue, &format!("\"{MINE}:rw\", \"{READABLE}:ro\"")),
        ];
        std::fs::write(&config, text.concat()).expect("a configuration");
        config
    }

    /// The keys of the honest host.
    ///
    /// # Panics
    /// Never: there is one key of the target.
    #[must_use]
    pub fn honest(&self) -> Credentials {
        let keys = Credentials::new(self.honest.clone(), vec![self.target.public()]);
        keys.expect("one key of the target")
    }

    /// The address and the keys with which the rogue logs in.
    #[must_use]
    pub fn door(&self, address: &Address, transport: Transport) -> Door {
        let (host, target) = (key_of(&self.rogue.text()), *self.target.public().as_bytes());
        Door { address: address.clone(), transport, keys: Keys { host, target } }
    }

    /// The honest host works, and the rogue tries every case.
    ///
    /// # Panics
    /// A case got through, or the honest host was harmed, or the target holds more than before.
    pub fn meet(&self, address: &Address, transport: Transport, status: &dyn Fn() -> TargetStatus) {
        let client = Client::prove(address, HONEST, 1, Some(&self.honest()), AccessMode::Exclusive);
        let client = client.expect("the honest host");
        let login = client.session.login();
        let victim = Victim { session: login.session.0, epoch: login.epoch.0 };
        let door = self.door(address, transport);
        let witness = Witness::start();
        let moment = witness.now();
        let bystander = Bystander::start(client, status().pid);
        // Its queue was served, so the target knows the proof.
        let before = (Held::of(&status()), Usage::of(status().pid).rss_kib);
        for case in CASES {
            let begun = Instant::now();
            (case.run)(&door, victim);
            assert!(bystander.is_well(), "{}: the honest host was harmed", case.name);
            println!("{:<32} {:.2?}", case.name, begun.elapsed());
        }
        self.ends_as_it_began(before, status);
        let lost = witness.lost_since(&moment);
        let Seen { requests, longest } = bystander.end();
        println!(
            "the honest host: {requests} requests, the longest {longest:.2?}; the machine stood still {lost:.2?}"
        );
        assert!(requests > 500, "only {requests} requests");
        assert!(longest <= STALL + lost, "a request took {longest:.2?}");
    }

    fn ends_as_it_began(&self, (before, rss_kib): (Held, u64), status: &dyn Fn() -> TargetStatus) {
        let until = Instant::now() + END;
        loop {
            let now = Held::of(&status());
            let is_less = now.sessions <= before.sessions
                && now.connections <= before.connections
                && now.files <= before.files
                && now.threads <= before.threads;
            if is_less {
                break;
            }
            assert!(Instant::now() < until, "the target holds {now:?}, before {before:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
        let now_kib = Usage::of(status().pid).rss_kib;
        println!("resident: {rss_kib} KiB before, {now_kib} KiB after");
        assert!(now_kib <= rss_kib + GROWTH_KIB, "the target grew");
    }
}
