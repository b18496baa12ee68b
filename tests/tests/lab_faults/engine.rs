//! Faults below the engine of fio: a program with its own volume, without a block device, that
//! verifies every byte. Each fault is a stall.

use std::time::Duration;

use rblk_tests::lab::{DEADLINE, FarHost, Fio, KernelFeature, Lab, Target, run, until};

use super::{DETECT, MIB, PATIENCE, serve_file};

fn faults_below_fio(lab: &Lab, transport: &str) {
    let far = FarHost::new(lab);
    let flags = serve_file(lab, 1024 * MIB).on(&far);
    let mut target = Target::start(lab, &flags);
    let mut fio = Fio::endless_by_engine(lab, &format!("{transport}://{}", far.host())).start();
    let times = lab.times(1, 3);
    for _ in 0..times {
        fio.wait_for_io(&target, PATIENCE);
        target.kill();
        target = Target::start(lab, &flags);
        fio.wait_for_io(&target, PATIENCE);
        let cut = far.cut();
        std::thread::sleep(DETECT + Duration::from_secs(1));
        drop(cut);
    }
    fio.wait_for_io(&target, PATIENCE);
    let result = fio.stop(DEADLINE).ok();
    let (writes, reads) = (result.writes, result.reads);
    println!("{}: {writes} writes and {reads} reads, {times} kills and cuts", lab.test());
    until("the end of the session", DEADLINE, || target.status().sessions.is_empty().then_some(()));
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fio_engine_sees_a_stall_rdma() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("fio_engine_sees_a_stall_rdma", |lab| faults_below_fio(lab, "rdma"));
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fio_engine_sees_a_stall_tcp() {
    run("fio_engine_sees_a_stall_tcp", |lab| faults_below_fio(lab, "tcp"));
}
