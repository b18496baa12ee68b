//! A hostile peer against the real target over TCP, with an honest host beside it: see
//! `rblk_tests::hostile`. The lab runs the same cases over RDMA devices.

use std::path::Path;

use rblk_protocol::auth::SecretKey;
use rblk_tests::bed::pattern;
use rblk_tests::hostile::Party;
use rblk_tests::hostile::noise::Transport;
use rblk_tests::program::Target;

/// What the target may hold more when all is over, in MiB: what an allocator keeps.
const GROWTH_MIB: u64 = 24;

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

#[test]
fn a_hostile_peer_harms_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let party = Party::generate();
    let config = dir.path().join("target.toml");
    write(&config, &party.config(dir.path()));
    let target = Target::start(dir.path(), &["--config", config.to_str().unwrap()]);
    party.crash(&target.address, Transport::Tcp, &mut || target.status(), GROWTH_MIB);
    let _ = (SecretKey::generate(), pattern(0, 1));
}
