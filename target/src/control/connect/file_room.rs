//! [`FileRoom`]: whether the connections of sessions come near the files that this process may have
//! open. Over tcp:// each connection is one. Pure.

/// Shares of the limit in percent: above the first the log warns, below the second it may warn
/// again.
const NEAR: u64 = 80;
const FAR: u64 = 60;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(in crate::control) struct FileRoom {
    // `None`: it is not known, or connections take no files.
    limit: Option<u64>,
    is_told: bool,
}

impl FileRoom {
    /// The room for `limit` files, if an address in `listening` takes files for its connections.
    pub(in crate::control) fn new(limit: Option<u64>, listening: &[String]) -> Self {
        let takes_files = listening.iter().any(|address| address.starts_with("tcp://"));
        Self { limit: limit.filter(|_| takes_files), is_told: false }
    }

    /// The warning for this many open files, if it is due.
    pub(in crate::control) fn look(&mut self, files: u64) -> Option<String> {
        let limit = self.limit?;
        let share = files.saturating_mul(100) / limit.max(1);
        if share < FAR {
            self.is_told = false;
        }
        if share < NEAR || std::mem::replace(&mut self.is_told, true) {
            return None;
        }
        Some(format!(
            "sessions take {files} of {limit} files that may be open: over tcp:// further connections will be refused; \
             raise LimitNOFILE in the unit (`ulimit -n`), and restart the target"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_comes_once_near_the_limit() {
        let listening = ["0.0.0.0:7720".to_owned(), "tcp://0.0.0.0:7720".to_owned()];
        let mut room = FileRoom::new(Some(1000), &listening);
        assert_eq!((room.look(0), room.look(799)), (None, None));
        let text = room.look(800).unwrap();
        assert!(text.contains("800 of 1000 files") && text.contains("LimitNOFILE"), "{text}");
        assert_eq!((room.look(900), room.look(700), room.look(850)), (None, None, None));
        assert_eq!(room.look(599), None);
        assert!(room.look(1000).is_some(), "again");
        assert_eq!(FileRoom::new(None, &listening).look(u64::MAX), None);
        assert_eq!(FileRoom::new(Some(1000), &listening[..1]).look(1000), None, "RDMA alone");
    }
}
