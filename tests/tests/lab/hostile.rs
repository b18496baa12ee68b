//! A hostile peer over the RDMA device of the lab, with an honest host beside it.

use rblk_tests::hostile::Party;
use rblk_tests::hostile::end::keep_device;
use rblk_tests::hostile::noise::Transport;
use rblk_tests::lab::{Target, TargetFlags, run};

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
        let transport = if lab.is_iwarp() { Transport::Iwarp } else { Transport::Verbs };
        party.meet(&address, transport, &|| target.status());
    });
}
