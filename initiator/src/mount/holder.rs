//! [`find_holder`]: what uses a disk or a partition of it, so that it cannot be taken away.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rblk_config::quoted::Quoted;

use super::namespace::unescape;

/// How many processes are named.
const PROCESSES_MAX: usize = 3;
/// File systems on block devices whose mounts have a number of their own. Only of these the kernel
/// itself has opened the device that they name; another, such as one of FUSE, may name any text.
const OWN_NUMBER: [&str; 2] = ["btrfs", "bcachefs"];

/// What uses a block device, in words; `None` when nothing does. Opening a disk may read it, and
/// closing it may write it back, so do not call this in the process that serves the disk.
pub(super) fn find_holder(device: &str) -> Option<String> {
    holder_in(Path::new("/"), device).or_else(|| exclusive_opener(device))
}

/// The file systems, the swap and the devices on a disk and its partitions, of the files of the
/// kernel below `root`.
fn holder_in(root: &Path, device: &str) -> Option<String> {
    let disk = device.rsplit('/').next().unwrap_or(device);
    let sys = root.join("sys/block").join(disk);
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let mounts = mountinfo(root);
    let swaps = read("proc/swaps");
    let parts = entries(&sys).into_iter().filter(|name| sys.join(name).join("partition").exists());
    let parts = parts.map(|name| (format!("its partition /dev/{name} is "), sys.join(&name), name));
    std::iter::once((String::new(), sys.clone(), disk.to_owned())).chain(parts).find_map(
        |(what, sys, name)| {
            let number = fs::read_to_string(sys.join("dev")).unwrap_or_default();
            let node = format!("/dev/{name}");
            if let Some(Mounted { at, .. }) = mounted(&mounts, &node, number.trim()) {
                let path = Quoted(&at);
                return Some(format!(
                    "{what}mounted at {at}; `umount {path}` first, or use --force"
                ));
            }
            if swaps.lines().any(|line| line.split_whitespace().next() == Some(&node)) {
                return Some(format!(
                    "{what}used for swap; `swapoff {node}` first, or use --force"
                ));
            }
            let holders = entries(&sys.join("holders"));
            let named = holders.iter().map(|holder| with_name(root, holder));
            let named: Vec<String> = named.collect();
            (!named.is_empty()).then(|| {
                format!("{what}held by {}; see `lsblk {device}`, or use --force", named.join(", "))
            })
        },
    )
}

/// The mounts of this host as its first process sees them, else as this process does.
fn mountinfo(root: &Path) -> String {
    let read = |path: &str| fs::read(root.join(path)).unwrap_or_default();
    let mut mounts = read("proc/1/mountinfo");
    if mounts.is_empty() {
        mounts = read("proc/self/mountinfo");
    }
    String::from_utf8_lossy(&mounts).into_owned()
}

/// A mount of a device.
struct Mounted {
    at: String,
    /// The file system.
    kind: String,
}

/// Where a device is mounted first, by its number; by its node for what is [`OWN_NUMBER`].
fn mounted(mountinfo: &str, node: &str, number: &str) -> Option<Mounted> {
    mountinfo.lines().find_map(|line| {
        let (fields, of_fs) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(2);
        let mut of_fs = of_fs.split(' ');
        let (own_number, at) = (fields.next()?, fields.nth(1)?);
        let (kind, source) = (of_fs.next()?, of_fs.next()?);
        let is_it = own_number == number || OWN_NUMBER.contains(&kind) && source == node;
        let text = |raw: &str| String::from_utf8_lossy(&unescape(raw.as_bytes())).into_owned();
        is_it.then(|| Mounted { at: text(at), kind: text(kind) })
    })
}

/// A device, with the name that people gave it.
fn with_name(root: &Path, device: &str) -> String {
    let file = root.join("sys/block").join(device).join("dm/name");
    match fs::read_to_string(file) {
        Ok(name) => format!("{device} ({})", name.trim()),
        Err(_) => device.to_owned(),
    }
}

fn entries(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// A program that has it for itself, or a mount that this namespace does not show.
fn exclusive_opener(device: &str) -> Option<String> {
    let opened = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device);
    if opened.err()?.raw_os_error() != Some(libc::EBUSY) {
        return None;
    }
    let who = match openers(Path::new("/"), device) {
        names if names.is_empty() => {
            "a mount in another namespace, or a program, has it for itself".to_owned()
        }
        names => format!("{} has it open for itself", names.join(", ")),
    };
    Some(format!("{who}; end that first, or use --force"))
}

/// Processes that have a device or one of its partitions open, other than this one.
fn openers(root: &Path, device: &str) -> Vec<String> {
    let own = std::process::id().to_string();
    let is_it = |path: &Path| {
        let rest = path.to_str().and_then(|path| path.strip_prefix(device));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
    };
    let proc = root.join("proc");
    let processes = entries(&proc).into_iter().filter(|name| name.parse::<u32>().is_ok());
    let has = |pid: &String| {
        let fds = proc.join(pid).join("fd");
        let links = entries(&fds).into_iter().filter_map(|fd| fs::read_link(fds.join(fd)).ok());
        *pid != own && links.into_iter().any(|link| is_it(&link))
    };
    let named = |pid: String| {
        let comm = fs::read_to_string(proc.join(&pid).join("comm")).unwrap_or_default();
        format!("process {pid} ({})", comm.trim())
    };
    processes.filter(has).take(PROCESSES_MAX).map(named).collect()
}

/// Where a disk is mounted, and the file system on it; else what holds it. `None`: nobody that
/// shows itself. The disk is not opened.
#[must_use]
pub fn device_user(device: &str) -> Option<String> {
    user_in(Path::new("/"), device)
}

fn user_in(root: &Path, device: &str) -> Option<String> {
    let name = device.rsplit('/').next().unwrap_or(device);
    let sys = root.join("sys/block").join(name);
    let number = fs::read_to_string(sys.join("dev")).unwrap_or_default();
    let mount = mounted(&mountinfo(root), device, number.trim());
    mount.map(|mount| format!("{} ({})", mount.at, mount.kind)).or_else(|| {
        let holders = entries(&sys.join("holders"));
        (!holders.is_empty()).then(|| holders.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel shows of `/dev/ublkb0` with two partitions.
    struct Kernel(tempfile::TempDir);

    impl Kernel {
        fn new() -> Self {
            let kernel = Self(tempfile::tempdir().unwrap());
            kernel.write("sys/block/ublkb0/dev", "259:0\n");
            for part in ["ublkb0p1", "ublkb0p2"] {
                let number = if part == "ublkb0p1" { "259:1\n" } else { "259:2\n" };
                kernel.write(&format!("sys/block/ublkb0/{part}/partition"), "1\n");
                kernel.write(&format!("sys/block/ublkb0/{part}/dev"), number);
            }
            kernel.write("proc/1/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
            kernel.write(
                "proc/swaps",
                "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n",
            );
            kernel
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn holder(&self) -> Option<String> {
            holder_in(self.0.path(), "/dev/ublkb0")
        }
    }

    #[test]
    fn nothing_holds_an_idle_disk() {
        assert_eq!(Kernel::new().holder(), None);
    }

    #[test]
    fn mounts_of_disk_and_partitions_are_named() {
        let kernel = Kernel::new();
        let mount = |line: &str| kernel.write("proc/1/mountinfo", line);
        mount("30 22 259:0 / /a\\040b rw - ext4 /dev/disk/by-label/x rw\n");
        let text = "mounted at /a b; `umount '/a b'` first, or use --force";
        assert_eq!(kernel.holder().as_deref(), Some(text));
        mount("30 22 259:2 / /mnt rw shared:1 - ext4 /dev/ublkb0p2 rw\n");
        let text = kernel.holder().unwrap();
        assert!(
            text.starts_with("its partition /dev/ublkb0p2 is mounted at /mnt; `umount /mnt`"),
            "{text}"
        );
        // btrfs has a number of its own.
        mount("30 22 0:44 / /mnt rw - btrfs /dev/ublkb0 rw\n");
        assert!(kernel.holder().unwrap().starts_with("mounted at /mnt"));
        mount("30 22 259:10 / /mnt rw - ext4 /dev/ublkb01 rw\n");
        assert_eq!(kernel.holder(), None);
    }

    /// Whoever mounts a file system of FUSE chooses the text of its source.
    #[test]
    fn a_source_that_only_looks_like_the_disk_is_not_named() {
        let kernel = Kernel::new();
        let node = "/dev/ublkb0";
        for kind in ["fuse", "fuse.sshfs", "fuseblk", "tmpfs", "nfs4"] {
            let line = format!("30 22 0:44 / /mnt/x rw - {kind} {node} rw\n");
            kernel.write("proc/1/mountinfo", &line);
            assert_eq!(kernel.holder(), None, "{kind}");
            assert_eq!(user_in(kernel.0.path(), node), None, "{kind}");
        }
        let fuse = "30 22 0:44 / /mnt/x rw - fuse /dev/ublkb0 rw\n";
        let real = "31 22 259:0 / /mnt/$(id) rw - xfs /dev/disk/by-label/x rw\n";
        kernel.write("proc/1/mountinfo", &format!("{fuse}{real}"));
        let text = "mounted at /mnt/$(id); `umount '/mnt/$(id)'` first, or use --force";
        assert_eq!(kernel.holder().as_deref(), Some(text));
        assert_eq!(user_in(kernel.0.path(), node).as_deref(), Some("/mnt/$(id) (xfs)"));
        kernel.write("proc/1/mountinfo", "30 22 0:44 / /mnt rw - btrfs /dev/ublkb0 rw\n");
        assert_eq!(user_in(kernel.0.path(), node).as_deref(), Some("/mnt (btrfs)"));
    }

    #[test]
    fn swap_is_named() {
        let kernel = Kernel::new();
        kernel.write(
            "proc/swaps",
            "Filename Type\n/dev/ublkb0p1                          partition 1 0 -2\n",
        );
        let text = kernel.holder().unwrap();
        assert!(text.contains("/dev/ublkb0p1 is used for swap; `swapoff /dev/ublkb0p1`"), "{text}");
        kernel.write("proc/swaps", "Filename Type\n/dev/ublkb0 partition 1 0 -2\n");
        assert!(kernel.holder().unwrap().starts_with("used for swap; `swapoff /dev/ublkb0`"));
    }

    #[test]
    fn devices_on_top_are_named() {
        let kernel = Kernel::new();
        kernel.write("sys/block/ublkb0/ublkb0p1/holders/dm-0", "");
        kernel.write("sys/block/dm-0/dm/name", "vg-data\n");
        let text = kernel.holder().unwrap();
        assert!(
            text.starts_with("its partition /dev/ublkb0p1 is held by dm-0 (vg-data);"),
            "{text}"
        );
        kernel.write("sys/block/ublkb0/holders/md0", "");
        assert!(kernel.holder().unwrap().starts_with("held by md0;"));
    }

    #[test]
    fn processes_that_have_it_open_are_named() {
        let kernel = Kernel::new();
        for (pid, link) in [(4242, "/dev/ublkb0"), (4243, "/dev/ublkb01"), (4244, "/dev/ublkb0p1")]
        {
            kernel.write(&format!("proc/{pid}/comm"), "qemu\n");
            let fds = kernel.0.path().join(format!("proc/{pid}/fd"));
            fs::create_dir_all(&fds).unwrap();
            std::os::unix::fs::symlink(link, fds.join("7")).unwrap();
        }
        let found = openers(kernel.0.path(), "/dev/ublkb0");
        assert_eq!(found, ["process 4242 (qemu)", "process 4244 (qemu)"]);
    }
}
