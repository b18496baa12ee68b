//! Mounts that come and go, and connections that come and go, leave nothing behind at either end.

use rblk_tests::lab::{
    Aligned, DEADLINE, FarHost, MountFlags, Mounted, Target, Usage, pattern, rdma_resources, run,
    until,
};

use super::{KIB, MIB, serve_file};

/// A huge page or two more is no leak; the memory of one connection per cycle would be.
const GROWTH_KIB: u64 = 8 << 10;

/// Compares what a process held before and after; the memory may differ a little.
fn is_flat(who: &str, before: &Usage, mut after: Usage, cycles: usize) {
    let grown = after.rss_kib.saturating_sub(before.rss_kib);
    assert!(grown < GROWTH_KIB, "the {who} grew by {grown} KiB in {cycles} cycles");
    after.rss_kib = before.rss_kib;
    assert_eq!(&after, before, "the {who} after {cycles} cycles");
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
        is_flat("target", &before.0, after.0, cycles);
        assert_eq!(after.1, before.1, "objects of the RDMA core");
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
        let begun = std::time::Instant::now();
        let cycle = |number: usize| {
            let status = mounted.status();
            let in_use = far.hosts().iter().position(|host| status.address.contains(host));
            let cut = far.cut_cable(in_use.expect("a cable"));
            let data = pattern(number as u64, 128 << 10);
            let offset = number as u64 % 8 * 128 * KIB;
            Aligned::write_at(&file, &data, offset).expect("writing");
            assert!(Aligned::read_at(&file, data.len(), offset).expect("reading") == data);
            println!(
                "{number} {:.1?} {}",
                begun.elapsed(),
                mounted.status().last_loss.unwrap_or_default()
            );
            drop(cut);
            assert!(mounted.wait_connected() > status.epoch, "there was no new connection");
            until("the old connections to end", DEADLINE, || {
                let status = target.status();
                (status.sessions.len() == 1 && status.sessions[0].connections == 3).then_some(())
            });
        };
        (0..4).for_each(cycle);
        let look = || (Usage::of(target.pid()), Usage::of(mounted.pid()), rdma_resources());
        let before = look();
        let cycles = lab.times(50, 500);
        (4..4 + cycles).for_each(cycle);
        let after = look();
        println!("{}: before {before:?}", lab.test());
        println!("{}: after {cycles} reconnects {after:?}", lab.test());
        is_flat("target", &before.0, after.0, cycles);
        is_flat("initiator", &before.1, after.1, cycles);
        assert_eq!(after.2, before.2, "objects of the RDMA core");
        assert_eq!(mounted.status().total.errors, 0);
        drop(file);
        mounted.umount();
    });
}
