//! Two RDMA devices of a mount that uses all its paths: what each carries, and what both gain.

use rblk_tests::lab::{
    Counts, FarHost, Fio, KernelFeature, MountFlags, Mounted, Target, device_packets, run, until,
};

use super::{FIO_DEADLINE, MIB, serve_file};

/// Bytes of a request.
const BYTES: u64 = 128 << 10;
/// Where both carry the data, neither carries more than so many percent of the packets.
const MOST: u64 = 60;

/// A run with large requests.
struct Large {
    mib_per_second: f64,
    /// Packets by device, sent and received.
    packets: [u64; 2],
}

impl Large {
    fn measure(mounted: &Mounted<'_>, rw: &str, bytes: u64) -> Self {
        let counts = || [0, 1].map(|cable| device_packets(&FarHost::near_device(cable)));
        let before = counts();
        let fio = Fio::new(mounted.device(), rw).with("bs", BYTES).with("iodepth", 16);
        let result = fio.with("size", bytes).run(FIO_DEADLINE).ok();
        let since = |(now, then): (&Counts, &Counts)| {
            let packets = now.since(then);
            packets.get("sent_pkts") + packets.get("rcvd_pkts")
        };
        let after = counts();
        let packets = [0, 1].map(|at| since((&after[at], &before[at])));
        let moved = (result.reads + result.writes) * BYTES;
        let mib_per_second = (moved / MIB) as f64 / result.took.as_secs_f64();
        Self { mib_per_second, packets }
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn two_devices_carry_equal_halves() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("two_devices_carry_equal_halves", |lab| {
        let far = FarHost::with_cables(lab, 2);
        let (_, served) = serve_file(lab, 64 * MIB);
        let target = Target::start(lab, &served.on(&far));
        let [one, two] = [0, 1].map(|cable| format!("rdma://{}", far.hosts()[cable]));
        let bytes = u64::try_from(lab.times(64, 512)).expect("a few") * MIB;
        let mut speeds = Vec::new();
        for all in [false, true] {
            let flags = MountFlags::new(one.clone(), "v0");
            let flags = if all { flags.path(&two).flag("--paths", "all") } else { flags };
            let mounted = Mounted::new(lab, &flags);
            if all {
                let joined = || mounted.log().contains("one more path carries requests");
                until("the other path", FIO_DEADLINE, || joined().then_some(()));
            }
            for rw in ["write", "read"] {
                let Large { mib_per_second, packets } = Large::measure(&mounted, rw, bytes);
                speeds.push(mib_per_second);
                let which = if all { "two devices" } else { "one device" };
                println!(
                    "{}: {rw} 128k, {which}: {mib_per_second:.1} MiB/s, packets {packets:?}",
                    lab.test()
                );
                let total: u64 = packets.iter().sum();
                let is_fair = packets.iter().all(|one| one * 100 <= total * MOST);
                assert_eq!(is_fair, all, "{rw} by {which}: {packets:?}");
            }
            for path in mounted.status().paths {
                println!("{}: {}: {:?}", lab.test(), path.address, path.work);
            }
            mounted.umount();
        }
        let ratio = |at: usize| speeds[at + 2] / speeds[at];
        println!(
            "{}: two devices against one: writes {:.2}, reads {:.2} times",
            lab.test(),
            ratio(0),
            ratio(1)
        );
        drop(target);
    });
}
