//! [`Use`]: a use of a disk or of its partition, which keeps the disk from being removed. Commands
//! look for one, because they may see every process; [`find_holder`] also tries to open the disk.

use std::fmt;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_config::quoted::Quoted;

use super::block_device::{BlockDevice, entries};
use super::namespace::unescape;
use super::openers::{is_direct_reader, is_writer, mappers, named, openers, processes};

/// File systems that give their mounts a device number of their own. For these kinds alone, the
/// kernel itself has opened the device that the mount names; another kind, such as FUSE, may name
/// any text.
pub(super) const OWN_NUMBER: [&str; 2] = ["btrfs", "bcachefs"];
/// Limit of the depth of stacked block devices.
const STACKED_MAX: u32 = 8;
/// The usual limit of the time that a scan of LVM or udev has a disk open.
const SCAN_TIME: Duration = Duration::from_secs(1);

/// A use of a disk or of its partition, found without opening the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Use {
    /// The used partition, such as `ublkb0p1`; `None` for the disk itself.
    partition: Option<String>,
    what: UseKind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum UseKind {
    /// A file system, and a process of the mount namespace where it is mounted, if that is not the
    /// namespace of the host.
    Mounted {
        mount: DeviceMount,
        only_of: Option<String>,
    },
    Swap,
    /// Devices of the device mapper, of md and the like.
    Holders(Vec<String>),
    /// Loop devices.
    Loops(Vec<String>),
    /// Processes that may write.
    Open(Vec<String>),
    /// Processes that read past the page cache.
    ReadPastTheCache(Vec<String>),
    /// Processes that may write through a mapping.
    Mapped(Vec<String>),
}

impl Use {
    /// Looks for a use. A process with few rights sees less of other processes and their
    /// namespaces.
    #[must_use]
    pub fn find(device: &str) -> Option<Self> {
        Self::find_in(Path::new("/"), device)
    }

    /// Reads the kernel's files below `root`.
    fn find_in(root: &Path, device: &str) -> Option<Self> {
        let disk = device.rsplit('/').next().unwrap_or(device);
        let parts = BlockDevice::all(root, disk);
        let mounts = mountinfo(root);
        let swaps = fs::read_to_string(root.join("proc/swaps")).unwrap_or_default();
        let by = |find: &dyn Fn(&BlockDevice) -> Option<UseKind>| {
            parts.iter().find_map(|part| {
                let partition = (part.name != disk).then(|| part.name.clone());
                find(part).map(|what| Self { partition, what })
            })
        };
        let mounted_in = |text: &str, only_of: Option<&String>| {
            by(&|part| {
                let mount = mounted(text, part)?;
                Some(UseKind::Mounted { mount, only_of: only_of.cloned() })
            })
        };
        let is_swap = |part: &BlockDevice| {
            let mut words = swaps.lines().map(|line| line.split_whitespace().next());
            words.any(|word| word == Some(&part.node())).then_some(UseKind::Swap)
        };
        let held = |part: &BlockDevice| {
            let holders = entries(&part.sys.join("holders"));
            let named = holders.iter().map(|holder| with_name(root, holder)).collect();
            (!holders.is_empty()).then_some(UseKind::Holders(named))
        };
        let under_loops = |part: &BlockDevice| {
            let loops = loops_on(root, &part.node());
            (!loops.is_empty()).then_some(UseKind::Loops(loops))
        };
        let open = |part: &BlockDevice| {
            let processes = openers(root, part, is_writer);
            (!processes.is_empty()).then_some(UseKind::Open(processes))
        };
        let direct = |part: &BlockDevice| {
            let processes = openers(root, part, is_direct_reader);
            (!processes.is_empty()).then_some(UseKind::ReadPastTheCache(processes))
        };
        let elsewhere = || {
            other_namespaces(root)
                .into_iter()
                .find_map(|(pid, text)| mounted_in(&text, Some(&named(&root.join("proc"), &pid))))
        };
        mounted_in(&mounts, None)
            .or_else(|| by(&is_swap))
            .or_else(|| by(&held))
            .or_else(|| by(&under_loops))
            .or_else(elsewhere)
            .or_else(|| by(&open))
            .or_else(|| by(&direct))
    }

    /// Looks for a use that stands against an unmount: also memory that a program maps and may
    /// write. A scan of LVM or udev reads past the page cache for a moment, so a program that only
    /// does this counts only if it still does a second later. May block for that second.
    #[must_use]
    pub fn find_before_unmount(device: &str) -> Option<Self> {
        let root = Path::new("/");
        let found = Self::find(device);
        let is_scan = |used: &Self| matches!(used.what, UseKind::ReadPastTheCache(_));
        let found = match found {
            Some(used) if is_scan(&used) => {
                std::thread::sleep(SCAN_TIME);
                Self::find(device)
            }
            found => found,
        };
        found.or_else(|| Self::find_mapping(root, device))
    }

    /// Finds a program that still maps the disk after it closed the descriptor of that mapping.
    fn find_mapping(root: &Path, device: &str) -> Option<Self> {
        let disk = device.rsplit('/').next().unwrap_or(device);
        let parts = BlockDevice::all(root, disk);
        let nodes: Vec<String> = parts.iter().map(BlockDevice::node).collect();
        let (at, processes) = mappers(root, &nodes)?;
        let partition = (parts[at].name != disk).then(|| parts[at].name.clone());
        Some(Self { partition, what: UseKind::Mapped(processes) })
    }

    /// The reason why the disk cannot be removed, and the remedy.
    #[must_use]
    pub fn refusal(&self, device: &str) -> String {
        let node = self.partition.as_ref().map_or(device.to_owned(), |name| format!("/dev/{name}"));
        let what = match &self.partition {
            Some(_) => format!("its partition {node} is "),
            None => String::new(),
        };
        match &self.what {
            UseKind::Mounted { mount: DeviceMount { at, .. }, only_of: None } => {
                format!("{what}mounted at {at}; `umount {}` first, or use --force", Quoted(at))
            }
            UseKind::Mounted { mount: DeviceMount { at, .. }, only_of: Some(process) } => format!(
                "{what}mounted at {at} in the mount namespace of {process}; end that first, or use --force"
            ),
            UseKind::Swap => format!("{what}used for swap; `swapoff {node}` first, or use --force"),
            UseKind::Holders(names) => {
                format!("{what}held by {}; see `lsblk {device}`, or use --force", names.join(", "))
            }
            UseKind::Loops(names) => format!(
                "{what}below {}; `losetup -d {}` first, or use --force",
                names.join(", "),
                names.join(" ")
            ),
            UseKind::Open(names) => format!(
                "{what}open for writing in {}; end that first, or use --force",
                names.join(", ")
            ),
            UseKind::ReadPastTheCache(names) => format!(
                "{what}open with O_DIRECT in {}; end that first, or use --force",
                names.join(", ")
            ),
            UseKind::Mapped(names) => format!(
                "{what}mapped for writing in {}; end that first, or use --force",
                names.join(", ")
            ),
        }
    }
}

impl Use {
    /// The log's words for a disk that was removed despite this use.
    fn left(&self) -> String {
        match &self.what {
            UseKind::Mounted { mount, .. } => {
                format!("{} at {} was still mounted", mount.kind, mount.at)
            }
            UseKind::Swap => "swap was still on it".to_owned(),
            UseKind::Holders(names) | UseKind::Loops(names) => {
                format!("{} still stood on it", names.join(", "))
            }
            UseKind::Open(names) | UseKind::ReadPastTheCache(names) | UseKind::Mapped(names) => {
                format!("{} still had it open", names.join(", "))
            }
        }
    }
}

/// In few words, for a table.
impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.partition {
            let number = name.rsplit('p').next().unwrap_or(name);
            write!(f, "p{number}: ")?;
        }
        match &self.what {
            UseKind::Mounted { mount, only_of: None } => write!(f, "{} ({})", mount.at, mount.kind),
            UseKind::Mounted { mount, only_of: Some(process) } => {
                write!(f, "{} ({}) of {process}", mount.at, mount.kind)
            }
            UseKind::Swap => f.write_str("swap"),
            UseKind::Holders(names)
            | UseKind::Loops(names)
            | UseKind::Open(names)
            | UseKind::ReadPastTheCache(names)
            | UseKind::Mapped(names) => f.write_str(&names.join(", ")),
        }
    }
}

/// The use of a block device, in words; `None` if there is none. Opening a disk may read it, and
/// closing it may write it back, so do not call this in the process that serves the disk.
pub(super) fn find_holder(device: &str) -> Option<String> {
    let found = Use::find_before_unmount(device).map(|used| used.refusal(device));
    found.or_else(|| exclusive_opener(device))
}

/// The mounts of this host in the namespace of its first process, else of this process.
pub(super) fn mountinfo(root: &Path) -> String {
    let read = |path: &str| fs::read(root.join(path)).unwrap_or_default();
    let mut mounts = read("proc/1/mountinfo");
    if mounts.is_empty() {
        mounts = read("proc/self/mountinfo");
    }
    String::from_utf8_lossy(&mounts).into_owned()
}

/// The mount namespaces other than those of the first process and of this one: the number of a
/// process in each, and the text of its `mountinfo`.
pub(super) fn other_namespaces(root: &Path) -> Vec<(String, String)> {
    let proc = root.join("proc");
    let space = |pid: &str| fs::read_link(proc.join(pid).join("ns/mnt")).ok();
    let mut known: Vec<PathBuf> = ["1", "self"].into_iter().filter_map(space).collect();
    let mut found = Vec::new();
    for pid in processes(&proc) {
        let Some(space) = space(&pid).filter(|space| !known.contains(space)) else { continue };
        known.push(space);
        let text = fs::read(proc.join(&pid).join("mountinfo")).unwrap_or_default();
        found.push((pid, String::from_utf8_lossy(&text).into_owned()));
    }
    found
}

/// A mount of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DeviceMount {
    /// The number of the mount, unique over all namespaces.
    pub(super) id: String,
    /// The number of the file system, `MAJOR:MINOR`.
    pub(super) number: String,
    pub(super) at: String,
    /// The file system.
    pub(super) kind: String,
}

/// The first mount of a device: by its device number, or by its node for the kinds of
/// [`OWN_NUMBER`].
pub(super) fn mounted(mountinfo: &str, part: &BlockDevice) -> Option<DeviceMount> {
    mountinfo.lines().find_map(|line| {
        let (fields, of_fs) = line.split_once(" - ")?;
        let mut fields = fields.split(' ');
        let mut of_fs = of_fs.split(' ');
        let (id, number, at) = (fields.next()?, fields.nth(1)?, fields.nth(1)?);
        let (kind, source) = (of_fs.next()?, of_fs.next()?);
        let text = |raw: &str| String::from_utf8_lossy(&unescape(raw.as_bytes())).into_owned();
        let is_it =
            number == part.number || OWN_NUMBER.contains(&kind) && part.is_at(&text(source));
        is_it.then(|| DeviceMount {
            id: id.to_owned(),
            number: number.to_owned(),
            at: text(at),
            kind: text(kind),
        })
    })
}

/// A device, with its name for people.
fn with_name(root: &Path, device: &str) -> String {
    let file = root.join("sys/block").join(device).join("dm/name");
    match fs::read_to_string(file) {
        Ok(name) => format!("{device} ({})", name.trim()),
        Err(_) => device.to_owned(),
    }
}

/// Loop devices on a block device.
fn loops_on(root: &Path, node: &str) -> Vec<String> {
    let block = root.join("sys/block");
    let names = entries(&block).into_iter().filter(|name| name.starts_with("loop"));
    let is_on = |name: &String| {
        let file = fs::read_to_string(block.join(name).join("loop/backing_file"));
        file.is_ok_and(|file| file.trim_end() == node)
    };
    names.filter(is_on).map(|name| format!("/dev/{name}")).collect()
}

/// The remaining use of a disk that is being removed, in words.
pub(super) fn what_is_left(device: &str) -> Option<String> {
    let found = Use::find(device).map(|used| used.left());
    let disk = device.rsplit('/').next().unwrap_or(device);
    let mounted = || {
        let parts = BlockDevice::all(Path::new("/"), disk);
        let kind = parts.iter().find_map(|part| file_system_on(Path::new("/"), part))?;
        Some(format!("{kind} was still mounted"))
    };
    found.or_else(mounted)
}

/// The kind of a file system that is mounted on a device, in any mount namespace. Some kinds have a
/// directory for each device.
fn file_system_on(root: &Path, part: &BlockDevice) -> Option<&'static str> {
    let has = |kind: &&str| root.join("sys/fs").join(kind).join(&part.name).exists();
    ["f2fs", "xfs", "ext4"].into_iter().find(has)
}

/// A disk, its partitions and the devices stacked on them, the upper ones first.
pub(super) fn stack(root: &Path, device: &str) -> Vec<BlockDevice> {
    let disk = device.rsplit('/').next().unwrap_or(device);
    stack_in(root, disk, STACKED_MAX)
}

fn stack_in(root: &Path, disk: &str, depth: u32) -> Vec<BlockDevice> {
    let mut nodes = Vec::new();
    for part in BlockDevice::all(root, disk).into_iter().rev() {
        let loops = loops_on(root, &part.node()).into_iter();
        let loops = loops.filter_map(|node| node.rsplit('/').next().map(str::to_owned));
        for above in entries(&part.sys.join("holders")).into_iter().chain(loops) {
            if depth > 0 {
                nodes.extend(stack_in(root, &above, depth - 1));
            }
        }
        nodes.push(part);
    }
    nodes
}

/// A program that has the disk open exclusively, or a mount outside this namespace.
fn exclusive_opener(device: &str) -> Option<String> {
    let opened = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device);
    if opened.err()?.raw_os_error() != Some(libc::EBUSY) {
        return None;
    }
    let disk = device.rsplit('/').next().unwrap_or(device);
    let root = Path::new("/");
    let parts = BlockDevice::all(root, disk);
    let names: Vec<String> = parts.iter().flat_map(|part| openers(root, part, |_| true)).collect();
    let who = match names.is_empty() {
        true => match parts.iter().find_map(|part| file_system_on(root, part)) {
            Some(kind) => {
                format!("an {kind} file system on it is mounted in another mount namespace")
            }
            None => "a mount in another namespace, or a program, has it for itself".to_owned(),
        },
        false => format!("{} has it open for itself", names.join(", ")),
    };
    Some(format!("{who}; end that first, or use --force"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's files about `/dev/ublkb0` with two partitions.
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

        fn link(&self, path: &str, to: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let _ = fs::remove_file(&path);
            std::os::unix::fs::symlink(to, path).unwrap();
        }

        /// Adds a process with an open descriptor and its flags in `fdinfo`.
        fn process(&self, pid: u32, open: &str, flags: &str) {
            self.write(&format!("proc/{pid}/comm"), "qemu\n");
            self.link(&format!("proc/{pid}/fd/7"), open);
            let info = format!("pos:\t0\nflags:\t{flags}\nmnt_id:\t26\n");
            self.write(&format!("proc/{pid}/fdinfo/7"), &info);
        }

        fn used(&self) -> Option<Use> {
            Use::find_in(self.0.path(), "/dev/ublkb0")
        }

        fn holder(&self) -> Option<String> {
            self.used().map(|used| used.refusal("/dev/ublkb0"))
        }

        fn brief(&self) -> Option<String> {
            self.used().map(|used| used.to_string())
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
        // btrfs mounts have a device number of their own.
        mount("30 22 0:44 / /mnt rw - btrfs /dev/ublkb0 rw\n");
        assert!(kernel.holder().unwrap().starts_with("mounted at /mnt"));
        mount("30 22 259:10 / /mnt rw - ext4 /dev/ublkb01 rw\n");
        assert_eq!(kernel.holder(), None);
    }

    /// The mounter of a FUSE file system chooses the text of its source.
    #[test]
    fn a_source_that_only_looks_like_the_disk_is_not_named() {
        let kernel = Kernel::new();
        let node = "/dev/ublkb0";
        for kind in ["fuse", "fuse.sshfs", "fuseblk", "tmpfs", "nfs4"] {
            let line = format!("30 22 0:44 / /mnt/x rw - {kind} {node} rw\n");
            kernel.write("proc/1/mountinfo", &line);
            assert_eq!(kernel.holder(), None, "{kind}");
        }
        let fuse = "30 22 0:44 / /mnt/x rw - fuse /dev/ublkb0 rw\n";
        let real = "31 22 259:0 / /mnt/$(id) rw - xfs /dev/disk/by-label/x rw\n";
        kernel.write("proc/1/mountinfo", &format!("{fuse}{real}"));
        let text = "mounted at /mnt/$(id); `umount '/mnt/$(id)'` first, or use --force";
        assert_eq!(kernel.holder().as_deref(), Some(text));
        assert_eq!(kernel.brief().as_deref(), Some("/mnt/$(id) (xfs)"));
        kernel.write("proc/1/mountinfo", "30 22 0:44 / /mnt rw - btrfs /dev/ublkb0 rw\n");
        assert_eq!(kernel.brief().as_deref(), Some("/mnt (btrfs)"));
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
    fn stacked_devices_come_before_their_disk() {
        let kernel = Kernel::new();
        kernel.write("sys/block/ublkb0/ublkb0p1/holders/dm-0", "");
        kernel.write("sys/block/dm-0/holders/dm-1", "");
        kernel.write("sys/block/loop4/loop/backing_file", "/dev/ublkb0p2\n");
        let nodes: Vec<String> =
            stack(kernel.0.path(), "/dev/ublkb0").iter().map(BlockDevice::node).collect();
        let wanted = [
            "/dev/loop4",
            "/dev/ublkb0p2",
            "/dev/dm-1",
            "/dev/dm-0",
            "/dev/ublkb0p1",
            "/dev/ublkb0",
        ];
        assert_eq!(nodes, wanted);
        assert_eq!(stack_in(kernel.0.path(), "ublkb0", 0).len(), 3);
    }

    #[test]
    fn loop_devices_are_named() {
        let kernel = Kernel::new();
        kernel.write("sys/block/loop3/loop/backing_file", "/srv/other.img\n");
        assert_eq!(kernel.holder(), None);
        kernel.write("sys/block/loop4/loop/backing_file", "/dev/ublkb0p2\n");
        let text = "its partition /dev/ublkb0p2 is below /dev/loop4; `losetup -d /dev/loop4` first, or use --force";
        assert_eq!(kernel.holder().as_deref(), Some(text));
        assert_eq!(kernel.brief().as_deref(), Some("p2: /dev/loop4"));
    }

    /// A reader loses nothing, and udev reads each new disk.
    #[test]
    fn processes_that_may_write_or_go_past_the_cache_are_named() {
        let kernel = Kernel::new();
        kernel.process(4241, "/dev/ublkb0", "0100000");
        kernel.process(4243, "/dev/ublkb01", "0100002");
        assert_eq!(kernel.holder(), None);
        let (write, both) = (libc::O_WRONLY, libc::O_RDWR);
        let past_the_cache = libc::O_RDONLY | libc::O_DIRECT;
        for (flags, found) in
            [(write, true), (both, true), (past_the_cache, true), (both | libc::O_PATH, false)]
        {
            kernel.process(4242, "/dev/ublkb0", &format!("0{flags:o}"));
            let how = if flags == past_the_cache { "with O_DIRECT" } else { "for writing" };
            let text = format!("open {how} in process 4242 (qemu); end that first, or use --force");
            assert_eq!(kernel.holder(), found.then_some(text), "{flags:o}");
        }
        kernel.process(4244, "/dev/ublkb0p1", "0100002");
        assert_eq!(kernel.brief().as_deref(), Some("p1: process 4244 (qemu)"));
    }

    /// A program may close the descriptor after it has mapped the disk.
    #[test]
    fn processes_that_write_through_a_mapping_are_named() {
        let kernel = Kernel::new();
        let mapped = |line: &str| {
            kernel.write("proc/4242/comm", "qemu\n");
            kernel.write(
                "proc/4242/maps",
                &format!("00400000-0041f000 r-xp 0 08:01 7 /bin/x\n{line}\n"),
            );
            let found = Use::find_mapping(kernel.0.path(), "/dev/ublkb0");
            found.map(|used| used.refusal("/dev/ublkb0"))
        };
        let text = "mapped for writing in process 4242 (qemu); end that first, or use --force";
        let at = |rights: &str, node: &str| {
            mapped(&format!("7f0000000000-7f0000001000 {rights} 00000000 00:06 441    {node}"))
        };
        assert_eq!(at("rw-s", "/dev/ublkb0").as_deref(), Some(text));
        let text = at("rw-s", "/dev/ublkb0p2").unwrap();
        assert!(text.starts_with("its partition /dev/ublkb0p2 is mapped for writing"), "{text}");
        for (rights, node) in
            [("r--s", "/dev/ublkb0"), ("rw-p", "/dev/ublkb0"), ("rw-s", "/dev/ublkb01")]
        {
            assert_eq!(at(rights, node), None, "{rights} {node}");
        }
    }

    #[test]
    fn mounts_of_other_namespaces_are_named_with_a_process() {
        let kernel = Kernel::new();
        kernel.link("proc/1/ns/mnt", "mnt:[1]");
        kernel.link("proc/self/ns/mnt", "mnt:[1]");
        kernel.link("proc/50/ns/mnt", "mnt:[2]");
        kernel.write("proc/50/comm", "postgres\n");
        let mounts = "30 22 259:0 / /data rw - ext4 /dev/disk/by-label/x rw\n";
        kernel.write("proc/50/mountinfo", mounts);
        let text = "mounted at /data in the mount namespace of process 50 (postgres); end that first, or use --force";
        assert_eq!(kernel.holder().as_deref(), Some(text));
        assert_eq!(kernel.brief().as_deref(), Some("/data (ext4) of process 50 (postgres)"));
        kernel.link("proc/50/ns/mnt", "mnt:[1]");
        assert_eq!(kernel.holder(), None);
    }
}
