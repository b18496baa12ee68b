//! A volume that changes under a mounted disk: it grows twice under a file system with fio on it,
//! and becomes read-only and writable again.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rblk_operate::target::flags::CONTROL_SOCKET;
use rblk_tests::lab::{FileSystem, Fio, KernelFeature, Running, pattern, run};

use super::*;

/// Sizes of the volume.
const SIZES: [u64; 3] = [128 * MIB, 192 * MIB, 320 * MIB];
/// Bytes for each of the two jobs of fio.
const FIO_BYTES: u64 = 24 * MIB;

/// Waits until a mount and its disk have that size.
fn until_size(mount: &Mounted<'_>, bytes: u64) {
    until("the disk to have its new size", DEADLINE, || {
        let status = mount.look()?;
        let sizes = (status.size_bytes, status.disk_size_bytes, mount.sysfs().number("size") * 512);
        (sizes == (bytes, bytes, bytes)).then_some(())
    });
}

/// Changes a volume of the running target.
fn change(lab: &Lab, words: &[&str]) {
    let mut command = lab.program("rblk-target");
    command.arg("volume").args(words).args(["--control-socket", CONTROL_SOCKET]);
    let _ = Running::start(command).finish(2 * DEADLINE).ok();
}

/// Changes the size of a volume's file while no target serves it.
fn restart_with<'l>(
    lab: &'l Lab,
    mut target: Target<'l>,
    config: &TargetConfig,
    bytes: u64,
) -> Target<'l> {
    target.terminate();
    target.wait(DEADLINE);
    let file = File::options().write(true).open(lab.path("volume"));
    file.and_then(|file| file.set_len(bytes)).expect("the image takes another size");
    serve(lab, config)
}

/// Free bytes of a file system.
fn free(dir: &Path) -> u64 {
    let at = dir.display().to_string();
    let text = sh(&["stat", "-f", "-c", "%a %S", &at]);
    let mut numbers = text.split_whitespace().map(|n| n.parse::<u64>().expect("a number"));
    numbers.next().expect("blocks") * numbers.next().expect("their size")
}

#[test]
#[ignore = "needs root, ublk and an RDMA device"]
fn a_mounted_file_system_grows_twice_with_its_volume() {
    if KernelFeature::RESIZE_IN_USE.is_missing() {
        return;
    }
    run("grow_twice", |lab| {
        let image: PathBuf = lab.image("volume", SIZES[0]);
        let config = config(&image, CacheMode::WriteBack, 16 * MIB);
        let target = serve(lab, &config);
        let mount = mount(lab);
        until_size(&mount, SIZES[0]);
        let device = mount.dev();
        sh(&["mkfs.ext4", "-q", "-F", &device]);
        let dir = lab.path("fs");
        let fs = FileSystem::mount("ext4", &device, &dir, &[]);
        let work = Fio::verify(&dir.join("fio"), FIO_BYTES).with("time_based", 1);
        let mut fio = work.with("runtime", 3600).start();
        // Afterwards free space changes only with the size of the file system.
        until("the files of both jobs to be there", DEADLINE, || {
            let file = std::fs::metadata(dir.join("fio")).ok()?;
            (file.blocks() * 512 > 2 * FIO_BYTES - 8 * MIB).then_some(())
        });
        for (round, bytes) in (0u64..).zip(SIZES[1..].iter().copied()) {
            let before = free(&dir);
            let epoch = mount.status().epoch;
            change(lab, &["resize", "v0", &bytes.to_string()]);
            until_size(&mount, bytes);
            assert_eq!(mount.status().epoch, epoch, "it heard of it without a reconnect");
            sh(&["resize2fs", &device]);
            let grown = free(&dir).saturating_sub(before);
            assert!(grown > 32 * MIB, "{grown} bytes more are free");
            // More data than was free before.
            let data = pattern(round, size(before + 16 * MIB));
            std::fs::write(dir.join(format!("new{round}")), data).expect("the new room is usable");
            assert!(fio.is_running(), "{:?}", fio.finish(DEADLINE));
        }
        let result = fio.stop(FIO_DEADLINE).ok();
        assert_eq!(result.errors, 0);
        fs.umount();
        // Every check of an unmounted file system, without a repair.
        sh(&["fsck.ext4", "-f", "-n", &device]);
        let fs = FileSystem::mount("ext4", &device, &dir, &["-o", "ro"]);
        for round in 0u64.. {
            let Ok(data) = std::fs::read(dir.join(format!("new{round}"))) else {
                assert_eq!(round, 2);
                break;
            };
            assert!(data == pattern(round, data.len()), "file {round} has other data");
        }
        fs.umount();
        // A starting target takes the size of the file.
        let target = restart_with(lab, target, &config, SIZES[2] + MIB);
        until_size(&mount, SIZES[2] + MIB);
        mount.umount();
        drop(target);
    });
}

#[test]
#[ignore = "needs root, ublk and an RDMA device"]
fn a_disk_becomes_read_only_and_writable_again_with_its_volume() {
    run("read_only_and_back", |lab| {
        let image = lab.image("volume", SIZES[0]);
        let config = config(&image, CacheMode::WriteThrough, 16 * MIB);
        let target = serve(lab, &config);
        let mount = mount(lab);
        let device = mount.device().to_owned();
        let data = pattern(1, 4096);
        let write = |at: u64| Aligned::write_at(&open(&device), &data, at);
        write(0).expect("it is writable");
        let until_read_only = |yes: bool| {
            until("the disk to follow", DEADLINE, || {
                let is = mount.sysfs().number("ro") == 1;
                (mount.look()?.read_only == yes && is == yes).then_some(())
            });
        };
        until_read_only(false);
        change(lab, &["set", "v0", "--read-only"]);
        until_read_only(true);
        // EROFS, or EPERM from the disk.
        let refused = Aligned::open(&device, true, 0).and_then(|f| Aligned::write_at(&f, &data, 0));
        assert!([1, 13, 30, 5].contains(&errno(refused)));
        let reader = Aligned::open(&device, false, 0).expect("it can be read");
        assert!(Aligned::read_at(&reader, 4096, 0).expect("it can be read") == data);
        drop(reader);
        change(lab, &["set", "v0", "--read-only=false"]);
        until_read_only(false);
        write(4096).expect("it is writable again");
        mount.umount();
        drop(target);
    });
}
