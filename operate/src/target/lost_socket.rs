//! [`server_without_socket`]: a target that serves although the file of its control socket is gone.
//! The kernel still knows the socket by its path, and the process that has it.

use std::fs;
use std::path::{Path, PathBuf};

/// `__SO_ACCEPTCON` in `/proc/net/unix`: a socket that listens.
const LISTENS: u32 = 1 << 16;

/// The process that listens at a control socket after the file was removed or replaced, in this
/// network namespace. Also `None` if this process may not see it.
#[must_use]
pub fn server_without_socket(socket: &Path) -> Option<u32> {
    let socket = std::path::absolute(socket).ok()?;
    server_in(Path::new("/proc"), &socket)
}

fn server_in(proc: &Path, socket: &Path) -> Option<u32> {
    let text = fs::read(proc.join("net/unix")).ok()?;
    let text = String::from_utf8_lossy(&text);
    let inodes: Vec<&str> = text.lines().filter_map(|line| listens_at(line, socket)).collect();
    let links: Vec<PathBuf> =
        inodes.iter().map(|inode| PathBuf::from(format!("socket:[{inode}]"))).collect();
    let has = |pid: &u32| {
        let open = fs::read_dir(proc.join(pid.to_string()).join("fd")).into_iter().flatten();
        open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|link| links.contains(&link)))
    };
    if links.is_empty() {
        return None;
    }
    let names = fs::read_dir(proc).ok()?.flatten();
    names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(has)
}

/// The inode of a line (`Num: RefCount Protocol Flags Type St Inode Path`), if it is of a socket
/// that listens at a path.
fn listens_at<'l>(line: &'l str, socket: &Path) -> Option<&'l str> {
    let mut words = line.split_whitespace();
    let flags = u32::from_str_radix(words.nth(3)?, 16).ok()?;
    let inode = words.nth(2)?;
    let path = words.next()?;
    (flags & LISTENS != 0 && Path::new(path) == socket).then_some(inode)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_listener_is_found_when_its_file_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(server_without_socket(&path), Some(std::process::id()));
        assert_eq!(server_without_socket(&dir.path().join("other.sock")), None);
        drop(listener);
        assert_eq!(server_without_socket(&path), None, "a socket that only connects is none");
    }
}
