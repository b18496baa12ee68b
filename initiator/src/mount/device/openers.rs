//! Processes that have a block device open, according to `/proc`.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::block_device::{BlockDevice, entries};

/// Limit of the processes that are named.
const PROCESSES_MAX: usize = 3;

/// Whether the flags of an open descriptor (`fdinfo`) allow writing. A disk with readers only may
/// be removed: they lose nothing.
pub(super) fn is_writer(flags: i32) -> bool {
    // An O_PATH descriptor does no I/O, even if its other flags allow writing.
    flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// Whether the flags are those of a reader that goes past the page cache.
pub(super) fn is_direct_reader(flags: i32) -> bool {
    flags & libc::O_PATH == 0
        && flags & libc::O_ACCMODE == libc::O_RDONLY
        && flags & libc::O_DIRECT != 0
}

/// Processes other than this one that map one of these nodes, shared and for writing; and the index
/// of the node that the first of them maps. Reads the mappings of every process, which is much
/// text.
pub(super) fn mappers(root: &Path, nodes: &[String]) -> Option<(usize, Vec<String>)> {
    let own = std::process::id().to_string();
    let proc = root.join("proc");
    let mapped = |pid: &String| {
        let text = fs::read(proc.join(pid).join("maps")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let at = text.lines().find_map(|line| {
            // The fields are: addresses, rights, offset, device, inode, path.
            let mut words = line.split_ascii_whitespace().skip(1);
            let rights = words.next()?.as_bytes();
            let path = words.nth(3)?;
            let writes = rights.get(1) == Some(&b'w') && rights.get(3) == Some(&b's');
            nodes.iter().position(|node| writes && node == path)
        })?;
        (*pid != own).then(|| (at, named(&proc, pid)))
    };
    let found: Vec<(usize, String)> =
        processes(&proc).iter().filter_map(mapped).take(PROCESSES_MAX).collect();
    let first = found.first()?.0;
    Some((first, found.into_iter().map(|(_, process)| process).collect()))
}

/// Processes other than this one that have a disk or a partition open with flags that `counts`
/// selects.
pub(super) fn openers(
    root: &Path,
    part: &BlockDevice,
    counts: impl Fn(i32) -> bool,
) -> Vec<String> {
    let own = std::process::id().to_string();
    let proc = root.join("proc");
    let has = |pid: &String| {
        let process = proc.join(pid);
        let open = entries(&process.join("fd"));
        *pid != own
            && open.iter().any(|fd| {
                is_of(&process.join("fd").join(fd), part)
                    && counts(flags_of(&process.join("fdinfo").join(fd)))
            })
    };
    let found = processes(&proc).into_iter().filter(has);
    found.take(PROCESSES_MAX).map(|pid| named(&proc, &pid)).collect()
}

/// The numbers of all processes.
pub(super) fn processes(proc: &Path) -> Vec<String> {
    entries(proc).into_iter().filter(|name| name.parse::<u32>().is_ok()).collect()
}

/// A process, for people.
pub(super) fn named(proc: &Path, pid: &str) -> String {
    let comm = fs::read_to_string(proc.join(pid).join("comm")).unwrap_or_default();
    format!("process {pid} ({})", comm.trim())
}

/// Whether a descriptor is of a device. The link of the descriptor names the node. A container may
/// have the device under another name in a `/dev` of its own, which shows as a path of one or two
/// words; for these the device number is compared. Other files are not opened: one on a hung file
/// system would hang this process.
fn is_of(fd: &Path, part: &BlockDevice) -> bool {
    let Ok(link) = fs::read_link(fd) else { return false };
    if link == Path::new(&part.node()) {
        return true;
    }
    let is_near = link.starts_with("/dev") || link.parent() == Some(Path::new("/"));
    let number = || {
        let metadata = fs::metadata(fd).ok().filter(|meta| meta.file_type().is_block_device())?;
        let device = metadata.rdev();
        Some(format!("{}:{}", libc::major(device), libc::minor(device)))
    };
    is_near && number().is_some_and(|number| number == part.number)
}

/// The flags of an open descriptor; 0 if the kernel does not report them.
fn flags_of(fdinfo: &Path) -> i32 {
    let text = fs::read_to_string(fdinfo).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or_default()
}
