//! Ends of a target with acknowledged but unflushed writes: no write is lost, or its loss is
//! reported, according to `on_loss`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rblk_config::{CacheMode, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, DEADLINE, Fio, Lab, MountFlags, Mounted, Target, pattern, run, until,
};

use super::{FIO_DEADLINE, KIB, MIB, NEVER, config, errno, open, serve, size, with_delay};

/// A mounted volume with acknowledged writes that no flush covered: small and large ones, and some
/// blocks twice.
struct Unflushed<'l> {
    name: &'static str,
    image: PathBuf,
    mounted: Mounted<'l>,
    device: File,
    writes: Vec<(u64, Vec<u8>)>,
}

impl<'l> Unflushed<'l> {
    fn write(lab: &'l Lab, name: &'static str) -> Self {
        let flags = MountFlags::new(lab.rdma(), name);
        let flags = match name {
            "retained" => flags.flag("--retain", "64MiB"),
            "once" => flags.flag("--on-loss", "once"),
            _ => flags,
        };
        let mounted = Mounted::new(lab, &flags);
        let device = open(mounted.device());
        let mut writes = Vec::new();
        for (number, len) in (0..).zip([4 * KIB, 64 * KIB, 20 * KIB, 256 * KIB].repeat(10)) {
            let data = pattern(100 + number, size(len));
            let offset = number * 700 * KIB;
            Aligned::write_at(&device, &pattern(7, 8192), offset).expect("writing");
            Aligned::write_at(&device, &data, offset).expect("writing");
            writes.push((offset, data));
        }
        Self { name, image: lab.path(&format!("{name}.img")), mounted, device, writes }
    }

    fn count(&self, read: impl Fn(u64, usize) -> Vec<u8>) -> usize {
        self.writes.iter().filter(|(offset, data)| read(*offset, data.len()) == *data).count()
    }

    /// The number of writes that the device has.
    fn found(&self) -> usize {
        self.count(|offset, len| Aligned::read_at(&self.device, len, offset).expect("reading"))
    }

    /// The number of writes that the store has.
    fn stored(&self) -> usize {
        let file = File::open(&self.image).expect("opening the image");
        self.count(|offset, len| {
            let mut data = vec![0; len];
            file.read_exact_at(&mut data, offset).expect("reading the image");
            data
        })
    }

    /// Every write is there, no request failed, and a flush brings the writes to the store.
    fn nothing_is_lost(&self) {
        let all = self.writes.len();
        assert_eq!(self.found(), all, "{}: acknowledged writes are gone", self.name);
        self.device.sync_all().unwrap_or_else(|e| panic!("{}: fsync: {e}", self.name));
        assert_eq!(self.stored(), all, "{}: fsync did not bring them to the store", self.name);
        let status = self.mounted.status();
        assert_eq!((status.losses, status.total.errors), (0, 0), "{}", self.name);
    }

    /// The next flush fails, and no later one.
    fn loss_is_told_once(&self) {
        let status = self.mounted.status();
        assert_eq!((status.losses, status.loss_untold), (1, true), "{}", self.name);
        assert_eq!(self.found(), 0, "{}: they were in memory only", self.name);
        assert_eq!(errno(self.device.sync_all()), libc::EIO, "the loss is told");
        assert!(!self.mounted.status().loss_untold);
        for _ in 0..3 {
            self.device.sync_all().expect("it is told once");
        }
        // The disk works on.
        let data = pattern(3, 64 << 10);
        Aligned::write_at(&self.device, &data, 0).expect("writing");
        self.device.sync_all().expect("fsync");
        assert!(Aligned::read_at(&self.device, data.len(), 0).expect("reading") == data);
        assert_eq!(self.mounted.status().losses, 1);
    }

    /// Every flush fails, from every user of the disk. `umount` ends that.
    fn loss_is_told_until_the_remount(&self) {
        assert_eq!(self.found(), 0, "{}: they were in memory only", self.name);
        let other = open(self.mounted.device());
        let fails = || {
            for _ in 0..3 {
                assert_eq!(errno(self.device.sync_all()), libc::EIO);
                assert_eq!(errno(other.sync_all()), libc::EIO, "the other user hears it, too");
            }
            let status = self.mounted.status();
            assert!(status.loss_untold && status.lost.is_some(), "{status:?}");
        };
        fails();
        let data = pattern(3, 64 << 10);
        Aligned::write_at(&self.device, &data, 0).expect("writes go on");
        assert!(Aligned::read_at(&self.device, data.len(), 0).expect("reads go on") == data);
        fails();
    }

    fn umount(self) {
        drop(self.device);
        self.mounted.umount();
    }
}

/// Waits until a mount has noticed the loss of its target.
fn wait_for_loss(mounted: &Mounted<'_>) {
    until("the initiator to notice", DEADLINE, || {
        (mounted.status().state == "reconnecting").then_some(())
    });
}

/// Volumes of each kind with unflushed writes. `end` ends the target, and the target is started
/// again.
fn target_ends(lab: &Lab, end: impl Fn(Target<'_>), look: impl Fn(&Unflushed<'_>)) {
    let volume = |(name, cache): (&str, CacheMode)| {
        let mut volume = VolumeConfig::file(name, lab.image(&format!("{name}.img"), 32 * MIB));
        volume.cache = Some(cache);
        volume
    };
    let kinds = [
        ("through", CacheMode::WriteThrough),
        ("back", CacheMode::WriteBack),
        ("retained", CacheMode::WriteBack),
        ("once", CacheMode::WriteBack),
    ];
    let config = TargetConfig {
        volumes: kinds.map(volume).to_vec(),
        ..config(Path::new("/"), CacheMode::WriteBack, 128 * MIB)
    };
    let config = with_delay(config, NEVER);
    let target = serve(lab, &config);
    let volumes = kinds.map(|(name, _)| Unflushed::write(lab, name));
    let before: Vec<(u64, usize)> = volumes
        .iter()
        .map(|volume| (volume.mounted.status().unflushed_writes, volume.stored()))
        .collect();
    let all = volumes[0].writes.len();
    assert_eq!(before[0].1, all, "write-through: the store has what was acknowledged");
    assert_eq!(before[1].1, 0, "write-back: it is in memory only");
    assert!(before[2].1 < all, "write-back, retained: some of it is in memory only");
    end(target);
    let after: Vec<usize> = volumes.iter().map(Unflushed::stored).collect();
    volumes.iter().for_each(|volume| wait_for_loss(&volume.mounted));
    let target = serve(lab, &config);
    for (volume, ((unflushed, before), after)) in volumes.iter().zip(before.iter().zip(after)) {
        volume.mounted.wait_connected();
        let found = volume.found();
        look(volume);
        let status = volume.mounted.status();
        println!(
            "{}: {}: {all} writes, {unflushed} unflushed with what they replaced; the store had {before}, {after} after \
             the target's end; {found} were there then; {} verifier changes, {} writes written again, {} losses",
            lab.test(),
            volume.name,
            status.verifier_changes,
            status.writes_rewritten,
            status.losses
        );
    }
    volumes.into_iter().for_each(Unflushed::umount);
    // A new mount has no loss.
    let again = Mounted::new(lab, &MountFlags::new(lab.rdma(), "back"));
    open(again.device()).sync_all().expect("fsync after the remount");
    again.umount();
    drop(target);
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn write_back_kill() {
    run("write_back_kill", |lab| {
        target_ends(
            lab,
            |target| target.kill(),
            |volume| {
                let changes = volume.mounted.status().verifier_changes;
                let rewritten = volume.mounted.status().writes_rewritten;
                match volume.name {
                    "through" => {
                        volume.nothing_is_lost();
                        assert_eq!(changes, 0, "the kernel has what the store acknowledged");
                    }
                    "once" => {
                        assert_eq!(changes, 1);
                        volume.loss_is_told_once();
                    }
                    "back" => {
                        assert_eq!(changes, 1);
                        volume.loss_is_told_until_the_remount();
                    }
                    _ => {
                        volume.nothing_is_lost();
                        assert_eq!(changes, 1);
                        assert!(rewritten > 0, "nothing was written again");
                    }
                }
            },
        );
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn write_back_stop() {
    run("write_back_stop", |lab| {
        let by_sigterm = |mut target: Target<'_>| {
            target.terminate();
            assert_eq!(target.wait(DEADLINE).code(), Some(0), "{}", target.log());
        };
        target_ends(lab, by_sigterm, |volume| {
            assert_eq!(volume.stored(), volume.writes.len(), "a clean end leaves nothing behind");
            volume.nothing_is_lost();
            assert_eq!(volume.mounted.status().verifier_changes, 0);
        });
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn write_back_kill_under_load() {
    run("write_back_kill_under_load", |lab| {
        let image = lab.image("v0.img", 128 * MIB);
        let config = with_delay(config(&image, CacheMode::WriteBack, 32 * MIB), "300ms");
        let mut target = serve(lab, &config);
        let flags = MountFlags::new(lab.rdma(), "v0").flag("--retain", "64MiB");
        let mounted = Mounted::new(lab, &flags);
        // fio reads all of it back at its end. It has pauses instead of a rate: with a rate,
        // requests missed during an outage would come all at once, and leave little for the next
        // death.
        let mut fio = Fio::new(mounted.device(), "randwrite")
            .with("bsrange", "4k-256k")
            .with("iodepth", 16)
            .with("size", 48 * MIB * lab.long(4))
            .with("thinktime", "30ms")
            .with("verify", "crc32c")
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
            .start();
        let mut before = mounted.counts();
        for death in 1..=2 {
            until("fio to be at work", DEADLINE, || {
                (mounted.counts().since(&before).get("writes") > 20).then_some(())
            });
            assert!(fio.is_running(), "fio ended before death number {death}");
            target.kill();
            wait_for_loss(&mounted);
            before = mounted.counts();
            target = serve(lab, &config);
            mounted.wait_connected();
        }
        let fio = fio.finish(FIO_DEADLINE).ok();
        let status = mounted.status();
        println!(
            "{}: fio found all of its {} writes after 2 deaths of the target; {} unanswered requests were sent again, \
             {} acknowledged writes were written again",
            lab.test(),
            fio.writes,
            status.total.replayed,
            status.writes_rewritten
        );
        assert_eq!((status.losses, status.total.errors), (0, 0));
        assert_eq!(status.verifier_changes, 2);
        mounted.umount();
    });
}
