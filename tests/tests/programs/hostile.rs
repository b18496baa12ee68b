//! A hostile peer against the real target over TCP, with an honest host beside it: see
//! `rblk_tests::hostile`. The lab runs the same cases over RDMA devices.

use rblk_tests::hostile::Party;
use rblk_tests::hostile::noise::Transport;
use rblk_tests::program::Target;

#[test]
fn a_hostile_peer_harms_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let party = Party::default();
    // The flag overrides this address.
    let config = party.config(dir.path(), &["tcp://127.0.0.1:7721".to_owned()]);
    let target = Target::start(dir.path(), &["--config", config.to_str().unwrap()]);
    party.meet(&target.address, Transport::Tcp, &|| target.status());
}
