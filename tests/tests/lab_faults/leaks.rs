//! Mounts that come and go, and connections that come and go, leave nothing behind at either end.

use std::collections::BTreeMap;
use std::time::Duration;

use rblk_tests::lab::{
    Aligned, DEADLINE, FarHost, KernelFeature, MountFlags, Mounted, Target, Usage, pattern,
    rdma_resources, run, until, within,
};

use super::{KIB, MIB, PATIENCE, serve_file};

/// A huge page or two more is no leak; the memory of one connection per cycle would be.
const GROWTH_KIB: u64 = 8 << 10;

/// Compares the resources of a process with those before. Threads of a pool may end a little later.
fn is_flat(who: &str, pid: u32, before: &Usage, cycles: usize) {
    until(&format!("the {who} to hold what it held before {cycles} cycles"), DEADLINE, || {
        let now = Usage::of(pid);
        (now.files <= before.files && now.threads <= before.threads).then_some(())
    });
    let grown = Usage::of(pid).rss_kib.saturating_sub(before.rss_kib);
    assert!(grown < GROWTH_KIB, "the {who} grew by {grown} KiB in {cycles} cycles");
}

/// The objects of an old path are freed in the background, perhaps after the next connection.
fn no_objects_left(before: &BTreeMap<String, u64>) {
    until("the RDMA core to have no more objects than before", DEADLINE, || {
        let was = |name| before.get(name).copied().unwrap_or(0);
        rdma_resources().iter().all(|(name, count)| *count <= was(name)).then_some(())
    });
}

/// The resources once they are stable and `whole` holds: earlier work neither frees nor takes any
/// more.
fn settled(pids: &[u32], whole: impl Fn() -> bool) -> (Vec<Usage>, BTreeMap<String, u64>) {
    let look = || {
        let usages: Vec<_> = pids.iter().map(|pid| Usage::of(*pid)).collect();
        (usages, rdma_resources())
    };
    let held = |(usages, objects): &(Vec<Usage>, BTreeMap<String, u64>)| {
        let of_each: Vec<_> = usages.iter().map(|usage| (usage.files, usage.threads)).collect();
        (of_each, objects.clone())
    };
    let mut same = 0;
    let mut last = look();
    until("what is held to stay the same", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(100));
        let now = look();
        same = if whole() && held(&now) == held(&last) { same + 1 } else { 0 };
        last = now;
        (same >= 3).then_some(())
    });
    last
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn mount_cycles_leak_nothing() {
    run("mount_cycles_leak_nothing", |lab| {
        let target = Target::start(lab, &serve_file(lab, 64 * MIB));
        let cycle = || {
            let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
            let file = Aligned::open(mounted.device(), true, 0).expect("opening");
            Aligned::write_at(&file, &pattern(1, 128 << 10), 0).expect("writing");
            drop(file);
            mounted.umount();
            until("the session to end", DEADLINE, || {
                target.status().sessions.is_empty().then_some(())
            });
        };
        // The first cycles register with the device and fill pools.
        (0..2).for_each(|_| cycle());
        let before = settled(&[target.pid()], || target.status().sessions.is_empty());
        let cycles = lab.times(10, 30);
        let mut sizes = Vec::new();
        for _ in 0..cycles {
            cycle();
            sizes.push(Usage::of(target.pid()).rss_kib);
        }
        let after = (Usage::of(target.pid()), rdma_resources());
        let every = sizes.iter().step_by(cycles / 10).collect::<Vec<_>>();
        println!("{}: before {before:?}", lab.test());
        println!("{}: after {cycles} cycles {after:?}; KiB meanwhile: {every:?}", lab.test());
        is_flat("target", target.pid(), &before.0[0], cycles);
        no_objects_left(&before.1);
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn reconnects_leak_nothing() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("reconnects_leak_nothing", |lab| {
        let far = FarHost::with_cables(lab, 2);
        let target = Target::start(lab, &serve_file(lab, 64 * MIB).on(&far));
        let [one, two] = [0, 1].map(|cable| format!("rdma://{}", far.hosts()[cable]));
        let flags = MountFlags::new(one, "v0").path(&two);
        let flags = flags.flag("--detect", "500ms").flag("--failback", "0s");
        let mounted = Mounted::new(lab, &flags.flag("--lanes", "2"));
        assert_eq!(mounted.status().lanes, 2);
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        // Two queues of two lanes, and the admin connection.
        let whole = || {
            let status = target.status();
            status.sessions.len() == 1 && status.sessions[0].connections == 5
        };
        // Each cycle cuts the cable in use, so that the mount switches to the other one.
        let cycle = |number: usize| {
            // A machine that stands still for longer than `--detect` may also lose paths, at any
            // time.
            let connected = || mounted.look().filter(|status| status.state == "connected");
            let status = until("the mount to be connected", DEADLINE, connected);
            let in_use = far.hosts().iter().position(|host| status.address.contains(host));
            let in_use = in_use.expect("a cable");
            let cut = far.cut_cable(in_use);
            let data = pattern(number as u64, 128 << 10);
            let offset = number as u64 % 8 * 128 * KIB;
            let device = file.try_clone().expect("a descriptor");
            within("a write and a read", PATIENCE, move || {
                Aligned::write_at(&device, &data, offset).expect("writing");
                let found = Aligned::read_at(&device, data.len(), offset).expect("reading");
                assert!(found == data, "what was read is not what was written");
            });
            let now = until("the other cable to be used", DEADLINE, || {
                connected().filter(|now| now.address != status.address)
            });
            drop(cut);
            assert!(
                now.epoch > status.epoch,
                "cycle {number}, cable {in_use}: epoch {} became {}",
                status.epoch,
                now.epoch
            );
            until("the old connections to end", DEADLINE, || whole().then_some(()));
        };
        (0..4).for_each(cycle);
        let pids = [target.pid(), mounted.pid()];
        let before = settled(&pids, || whole() && mounted.status().state == "connected");
        let cycles = lab.times(10, 30);
        let mut sizes = Vec::new();
        for number in 4..4 + cycles {
            cycle(number);
            sizes.push(pids.map(|pid| Usage::of(pid).rss_kib));
        }
        let after = (pids.map(Usage::of), rdma_resources());
        let every: Vec<_> = sizes.iter().step_by(cycles / 10).collect();
        println!("{}: before {before:?}", lab.test());
        println!("{}: after {cycles} reconnects {after:?}", lab.test());
        println!("{}: KiB of target and initiator meanwhile: {every:?}", lab.test());
        is_flat("target", target.pid(), &before.0[0], cycles);
        is_flat("initiator", mounted.pid(), &before.0[1], cycles);
        no_objects_left(&before.1);
        assert_eq!(mounted.status().total.errors, 0);
        drop(file);
        mounted.umount();
    });
}
