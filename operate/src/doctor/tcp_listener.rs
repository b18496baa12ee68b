//! [`tcp_listener`]: which process listens on a TCP port.

use std::fs;
use std::path::Path;

/// The state of a listening socket in `/proc/net/tcp` (`TCP_LISTEN`).
const LISTEN: &str = "0A";

/// The process that listens on a port: its name and number. `None` where no socket listens, or this
/// user may not look at the process.
#[must_use]
pub fn tcp_listener(root: &Path, port: u16) -> Option<String> {
    let tables = ["proc/net/tcp", "proc/net/tcp6"];
    let tables = tables.map(|table| fs::read_to_string(root.join(table)).unwrap_or_default());
    let inode = tables.iter().flat_map(|table| table.lines()).find_map(|line| inode(line, port))?;
    let socket = format!("socket:[{inode}]");
    for process in fs::read_dir(root.join("proc")).ok()?.flatten() {
        let number = process.file_name();
        let Some(number) = number.to_str().filter(|n| n.parse::<u32>().is_ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else { continue };
        let has_it = descriptors.flatten().any(|descriptor| {
            fs::read_link(descriptor.path()).is_ok_and(|path| path.to_str() == Some(&socket))
        });
        if has_it {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("process {number} ({})", name.trim()));
        }
    }
    None
}

/// The inode of a line of `/proc/net/tcp`, if its socket listens on the port.
fn inode(line: &str, port: u16) -> Option<u64> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, its_port) = fields.get(1)?.rsplit_once(':')?;
    let is_it = *fields.get(3)? == LISTEN && u16::from_str_radix(its_port, 16) == Ok(port);
    fields.get(9).filter(|_| is_it)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn this_process_is_named() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            let found = tcp_listener(Path::new("/"), port).expect("a process");
            assert!(found.starts_with(&format!("process {} (", std::process::id())), "{found}");
            drop(listener);
            assert_eq!(tcp_listener(Path::new("/"), port), None);
        }
    }

    #[test]
    fn only_a_socket_that_listens_on_the_port_counts() {
        let line = |port: &str, state: &str| {
            format!(
                "   0: 0100007F:{port} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 \
                 4711 1 0000000000000000 100 0 0 10 0"
            )
        };
        assert_eq!(inode(&line("1E29", "0A"), 7721), Some(4711));
        assert_eq!(inode(&line("1E29", "01"), 7721), None, "a connection");
        assert_eq!(inode(&line("1E28", "0A"), 7721), None);
        assert_eq!(inode("  sl  local_address rem_address   st", 7721), None);
        assert_eq!(inode("", 7721), None);
    }
}
