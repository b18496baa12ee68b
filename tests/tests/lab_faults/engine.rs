//! Faults below the engine of fio: a program with a volume of its own, without a block device, that
//! checks every byte it wrote. Each fault is a stall.
//!
//! The guest has the files of its host, so its fio is the one that the engine was built for.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_tests::lab::{DEADLINE, FarHost, Fio, Lab, RunningFio, Target, run, until};

use super::{DETECT, KIB, MIB, PATIENCE, serve_file};

/// The engine, beside the programs.
///
/// # Panics
/// It is not there.
fn engine(lab: &Lab) -> PathBuf {
    let path = lab.programs().join("librblk_fio.so");
    let name = path.display();
    assert!(path.exists(), "{name} is missing: cargo xtask fio-engine --profile lab --out {name}");
    path
}

/// fio on `v0` of an address, until it is told to stop.
fn fio(lab: &Lab, address: &str) -> RunningFio {
    let config = lab.path("engine.toml");
    let text = format!("target = ['{address}']\nvolume = 'v0'\ndetect = '2s'\n");
    std::fs::write(&config, text).expect("a configuration");
    let [_, key_file, _, target_key] =
        <[String; 4]>::try_from(lab.proofs()).expect("two flags with their values");
    // fio takes a colon for the end of a name.
    let name = format!("{address}/v0").replace(':', "\\:");
    Fio::new(Path::new(&name), "randwrite")
        .with("ioengine", format!("external:{}", engine(lab).display()))
        .with("thread", 1)
        .with("rblk_sleep", 1)
        .with("rblk_config", config.display())
        .with("rblk_key_file", key_file)
        .with("rblk_target_key", target_key)
        .with("bsrange", "4k-128k")
        .with("iodepth", 16)
        .with("size", "100%")
        .with("rate", "2M,2M")
        .with("verify", "crc32c")
        .with("verify_backlog", 32)
        .with("verify_fatal", 1)
        .with("verify_state_save", 0)
        .start()
}

/// Waits until fio has written, and read again, since now.
fn wait_for_io(fio: &mut RunningFio, target: &Target<'_>) {
    let moved = |fio: &mut RunningFio| {
        assert!(fio.is_running(), "fio has ended");
        let total = target.status().total;
        (total.written_bytes, total.read_bytes)
    };
    let (written, read) = moved(fio);
    until("fio to go on", PATIENCE, || {
        let (now_written, now_read) = moved(fio);
        (now_written > written + 512 * KIB && now_read > read + 512 * KIB).then_some(())
    });
}

fn faults_below_fio(lab: &Lab, transport: &str) {
    let far = FarHost::new(lab);
    let flags = serve_file(lab, 1024 * MIB).on(&far);
    let mut target = Target::start(lab, &flags);
    let mut fio = fio(lab, &format!("{transport}://{}", far.host()));
    let times = lab.times(2, 25);
    for _ in 0..times {
        wait_for_io(&mut fio, &target);
        target.kill();
        target = Target::start(lab, &flags);
        wait_for_io(&mut fio, &target);
        let cut = far.cut();
        std::thread::sleep(DETECT + Duration::from_secs(1));
        drop(cut);
    }
    wait_for_io(&mut fio, &target);
    let result = fio.stop(DEADLINE).ok();
    let (writes, reads) = (result.writes, result.reads);
    println!("{}: {writes} writes and {reads} reads, {times} kills and cuts", lab.test());
    until("the end of the session", DEADLINE, || target.status().sessions.is_empty().then_some(()));
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fio_engine_sees_a_stall_rdma() {
    run("fio_engine_sees_a_stall_rdma", |lab| faults_below_fio(lab, "rdma"));
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fio_engine_sees_a_stall_tcp() {
    run("fio_engine_sees_a_stall_tcp", |lab| faults_below_fio(lab, "tcp"));
}
