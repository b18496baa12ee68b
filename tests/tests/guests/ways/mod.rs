//! Mounts whose way to the target changes while they go on: another address, another key, a network
//! that drops large packets. The disks are those of guests, by the real programs.
//!
//! `list`, `status` and `reload` need root, so most of these tests do.

#![forbid(unsafe_code)]

mod all_paths;
mod data;
mod fallback;
mod keys;
mod names;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_tests::guest::{Ask, DATA, GUEST, Guest, Served};
use rblk_tests::program::{Ended, Target, program, run, wait_for};
use rblk_tests::relay::Relay;

const OK: u8 = 0;

/// A target with the volume `v`, and a relay to it that listens.
struct Bed {
    target: Target,
    relay: Relay,
    // Dropped last: the logs must outlive the processes.
    dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = configuration(dir.path()).display().to_string();
        let target = Target::start(dir.path(), &["--config", &config]);
        let relay = Relay::new(&target.address);
        relay.listen();
        Self { target, relay, dir }
    }

    /// A disk with the relay's address first, and the target's own address second.
    fn serve(&self, more: &[&str]) -> Served {
        let own = self.target.address.to_string();
        let args = [&["--path", own.as_str(), "--queues", "1"], more].concat();
        Served::start(self.dir.path(), &self.relay.address.to_string(), "v", &args)
    }

    fn upgrade(&self) {
        let mut upgrade = Command::new(program("rblk-target"));
        upgrade.args(["upgrade", "--control-socket"]).arg(&self.target.socket);
        let ended = run(&mut upgrade);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

/// A configuration with one volume on a file.
fn configuration(dir: &Path) -> PathBuf {
    let volume = dir.join("v.img");
    File::create(&volume).unwrap().set_len(4 << 20).unwrap();
    let path = dir.join("target.toml");
    let text = format!("[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\n", volume.display());
    std::fs::write(&path, text).unwrap();
    path
}

fn initiator(args: &[&str]) -> Ended {
    run(Command::new(program("rblk-initiator")).args(args))
}

/// The guest's address of its data.
const AT: u64 = GUEST + DATA;
