//! A hostile peer over the RDMA device of the lab, with an honest host beside it.

use rblk_tests::hostile::Party;
use rblk_tests::hostile::end::keep_device;
use rblk_tests::hostile::noise::Transport;
use rblk_tests::lab::{Target, TargetFlags, run};

/// What the device of the lab speaks (`enum rdma_node_type`: 4 is an RNIC).
fn transport() -> Transport {
    let devices = std::fs::read_dir("/sys/class/infiniband").expect("RDMA devices").flatten();
    let types = devices.map(|device| std::fs::read_to_string(device.path().join("node_type")));
    let is_iwarp = types.flatten().any(|kind| kind.starts_with('4'));
    if is_iwarp { Transport::Iwarp } else { Transport::Verbs }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_hostile_peer_harms_nobody() {
    keep_device();
    run("a_hostile_peer_harms_nobody", |lab| {
        let party = Party::default();
        let config = party.config(lab.dir(), &[lab.tcp()]);
        let flags = TargetFlags::default().flag("--config", &config.display().to_string());
        let target = Target::start(lab, &flags);
        let address = lab.rdma().parse().expect("an address");
        party.meet(&address, transport(), &|| target.status());
    });
}
