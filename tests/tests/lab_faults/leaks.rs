//! Mounts that come and go, and connections that come and go, leave nothing behind at either end.

use std::collections::BTreeMap;

use rblk_initiator::mount::status::MountStatus;
use rblk_tests::lab::{
    Aligned, DEADLINE, FarHost, MountFlags, Mounted, Target, Usage, pattern, rdma_resources, run,
    until, within,
};

use super::{KIB, MIB, PATIENCE, serve_file};

/// A huge page or two more is no leak; the memory of one connection per cycle would be.
const GROWTH_KIB: u64 = 8 << 10;

/// Compares what a process held before and holds now. Threads of a pool may take a while to go.
fn is_flat(who: &str, pid: u32, before: &Usage, cycles: usize) {
    until(&format!("the {who} to hold what it held before {cycles} cycles"), DEADLINE, || {
        let now = Usage::of(pid);
        (now.files <= before.files && now.threads <= before.threads).then_some(())
    });
    let grown = Usage::of(pid).rss_kib.saturating_sub(before.rss_kib);
    assert!(grown < GROWTH_KIB, "the {who} grew by {grown} KiB in {cycles} cycles");
}

/// What a path had is given back by others than who connects the next.
fn no_objects_left(before: &BTreeMap<String, u64>) {
    until("the RDMA core to have as many objects as before", DEADLINE, || {
        (rdma_resources() == *before).then_some(())
    });
}

#[test]
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
        // The first ones register with the device and fill pools.
        (0..2).for_each(|_| cycle());
        let before = (Usage::of(target.pid()), rdma_resources());
        let cycles = lab.times(50, 2000);
        let mut sizes = Vec::new();
        for _ in 0..cycles {
            cycle();
            sizes.push(Usage::of(target.pid()).rss_kib);
        }
        let after = (Usage::of(target.pid()), rdma_resources());
        let every = sizes.iter().step_by(cycles / 10).collect::<Vec<_>>();
        println!("{}: before {before:?}", lab.test());
        println!("{}: after {cycles} cycles {after:?}; KiB meanwhile: {every:?}", lab.test());
        is_flat("target", target.pid(), &before.0, cycles);
        no_objects_left(&before.1);
    });
}

#[test]
fn reconnects_leak_nothing() {
    run("reconnects_leak_nothing", |lab| {
        let far = FarHost::with_cables(lab, 2);
        let target = Target::start(lab, &serve_file(lab, 64 * MIB).on(&far));
        let [one, two] = [0, 1].map(|cable| format!("rdma://{}", far.hosts()[cable]));
        let flags = MountFlags::new(one, "v0").path(&two);
        let flags = flags.flag("--detect", "500ms").flag("--failback", "0s");
        let mounted = Mounted::new(lab, &flags);
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        // Each cuts the cable that is in use, so that the other one is taken.
        let cycle = |number: usize| {
            let status = mounted.status();
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
            drop(cut);
            mounted.wait_connected();
            let now = mounted.status();
            let looks = |s: &MountStatus| format!("epoch {} by {}", s.epoch, s.address);
            assert!(
                now.epoch > status.epoch && now.address != status.address,
                "cycle {number}, cable {in_use}: {} became {}",
                looks(&status),
                looks(&now)
            );
            until("the old connections to end", DEADLINE, || {
                let status = target.status();
                (status.sessions.len() == 1 && status.sessions[0].connections == 3).then_some(())
            });
        };
        (0..4).for_each(cycle);
        let look = || (Usage::of(target.pid()), Usage::of(mounted.pid()), rdma_resources());
        let before = look();
        let cycles = lab.times(50, 500);
        let mut sizes = Vec::new();
        for number in 4..4 + cycles {
            cycle(number);
            sizes.push([target.pid(), mounted.pid()].map(|pid| Usage::of(pid).rss_kib));
        }
        let after = look();
        let every: Vec<_> = sizes.iter().step_by(cycles / 10).collect();
        println!("{}: before {before:?}", lab.test());
        println!("{}: after {cycles} reconnects {after:?}", lab.test());
        println!("{}: KiB of target and initiator meanwhile: {every:?}", lab.test());
        is_flat("target", target.pid(), &before.0, cycles);
        is_flat("initiator", mounted.pid(), &before.1, cycles);
        no_objects_left(&before.2);
        assert_eq!(mounted.status().total.errors, 0);
        drop(file);
        mounted.umount();
    });
}
