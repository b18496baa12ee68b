//! [`Directory`]: a directory that a program writes to.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::report::Finding;
use rblk_config::quoted::Quoted;

/// A directory that a program writes to, or makes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Directory {
    /// Where it is.
    pub path: PathBuf,
    /// The directory itself, or the nearest one above it that is there.
    pub nearest: PathBuf,
    /// Whether the nearest one is a directory.
    pub is_directory: bool,
    /// The owner of the nearest one.
    pub owner: u32,
    /// Its mode.
    pub mode: u32,
    /// Whether this process may write to it. `None` where another user will.
    pub writable: Option<bool>,
}

impl Directory {
    /// Looks at a directory for a user. `me` is the user of this process.
    #[must_use]
    pub fn look(path: &Path, user: u32, me: u32) -> Self {
        let nearest = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        let metadata = std::fs::metadata(nearest).ok();
        let writable = access(nearest, AccessFlags::W_OK | AccessFlags::X_OK).is_ok();
        Self {
            path: path.to_owned(),
            nearest: nearest.to_owned(),
            is_directory: metadata.as_ref().is_some_and(std::fs::Metadata::is_dir),
            owner: metadata.as_ref().map_or(0, MetadataExt::uid),
            mode: metadata.as_ref().map_or(0, |m| m.mode() & 0o7777),
            writable: (user == me).then_some(writable),
        }
    }

    /// Judges it for a user. `name` is for the fix. Others may not write there.
    #[must_use]
    pub fn judge(&self, subject: &str, user: u32, name: &str) -> Finding {
        let (path, nearest) = (self.path.display(), self.nearest.display());
        if !self.is_directory {
            return Finding::fail(subject, format!("{nearest} is not a directory"));
        }
        let is_there = self.path == self.nearest;
        let owner_writes = self.owner == user && self.mode & 0o300 == 0o300;
        let others_write = self.mode & 0o003 == 0o003;
        if self.writable.unwrap_or(user == 0 || owner_writes || others_write) {
            return match is_there {
                true => Finding::ok(subject, format!("{path}, mode {:04o}", self.mode)),
                false => Finding::ok(subject, format!("{path} will be made")),
            };
        }
        let text = self.path.to_string_lossy();
        let word = Quoted(&text);
        let fix = match (is_there, self.owner == user) {
            (true, true) if self.mode & 0o300 != 0o300 => format!("chmod u+rwx {word}"),
            // Its owner has the rights, so its file system refuses.
            (true, true) => format!("mount -o remount,rw $(findmnt -no TARGET -T {word})"),
            // Files inside have the same owner as a rule: both came from one run as another user.
            (true, false) => format!("chown -R {name} {word}"),
            (false, _) => format!("install -d -o {name} -m 0700 {word}"),
        };
        let found = match is_there {
            true => format!(
                "{path}: user {name} may not write there (owner {}, mode {:04o})",
                self.owner, self.mode
            ),
            false => format!("{path} is not there, and user {name} may not make it in {nearest}"),
        };
        Finding::fail(subject, found).fix(fix)
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    fn directory(path: &str, owner: u32, mode: u32) -> Directory {
        Directory {
            path: path.into(),
            nearest: "/s".into(),
            is_directory: true,
            owner,
            mode,
            writable: None,
        }
    }

    #[test]
    fn who_may_write_is_judged_by_owner_and_mode() {
        for (dir, user, verdict, fix) in [
            (directory("/s", 7, 0o700), 7, Verdict::Ok, None),
            (directory("/s", 0, 0o755), 0, Verdict::Ok, None),
            (directory("/s", 0, 0o1777), 7, Verdict::Ok, None),
            (directory("/s/t", 7, 0o700), 7, Verdict::Ok, None),
            (directory("/s", 0, 0o700), 7, Verdict::Fail, Some("chown -R rblk /s")),
            (directory("/s", 7, 0o500), 7, Verdict::Fail, Some("chmod u+rwx /s")),
            (
                directory("/s/t", 0, 0o755),
                7,
                Verdict::Fail,
                Some("install -d -o rblk -m 0700 /s/t"),
            ),
        ] {
            let finding = dir.judge("state", user, "rblk");
            assert_eq!((finding.verdict, finding.fix.as_deref()), (verdict, fix), "{dir:?}");
        }
        let read_only = Directory { writable: Some(false), ..directory("/s", 0, 0o755) };
        let finding = read_only.judge("state", 0, "root");
        assert!(finding.fix.unwrap().starts_with("mount -o remount,rw"));
        let file = Directory { is_directory: false, ..directory("/s", 0, 0o755) };
        assert_eq!(file.judge("state", 0, "root").verdict, Verdict::Fail);
    }

    #[test]
    fn a_directory_that_is_not_there_is_made_where_one_above_it_may_be_written() {
        let top = tempfile::tempdir().unwrap();
        let me = nix::unistd::geteuid().as_raw();
        let dir = Directory::look(&top.path().join("a/b"), me, me);
        assert_eq!((dir.nearest.as_path(), dir.writable), (top.path(), Some(true)));
        assert_eq!(dir.judge("d", me, "me").verdict, Verdict::Ok);
        std::fs::write(top.path().join("f"), "").unwrap();
        let file = Directory::look(&top.path().join("f"), me, me);
        assert!(!file.is_directory);
        assert_eq!(Directory::look(top.path(), me + 1, me).writable, None);
    }
}
