//! [`UnitFile`]: a unit of systemd as it is installed, with its drop-ins.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use nix::unistd::{Uid, User};

/// Where units are, the first place wins.
pub const PLACES: [&str; 4] =
    ["etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"];

/// Most bytes of a file that are read.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The unit of the target.
pub const TARGET_UNIT: &str = "rblk-target.service";

/// A unit that is installed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitFile {
    path: PathBuf,
    /// The unit, and the drop-ins in the order in which they count.
    text: String,
}

impl UnitFile {
    /// Finds a unit below a root.
    #[must_use]
    pub fn find(root: &Path, name: &str) -> Option<Self> {
        let places = PLACES.map(|place| root.join(place));
        let path = places.iter().map(|place| place.join(name)).find(|path| path.is_file())?;
        let mut text = read_bounded(&path);
        let in_place = |place: &PathBuf| {
            let dir = place.join(format!("{name}.d"));
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        // Of two drop-ins with one name, that of the first place counts; else the names decide.
        let mut drop_ins: Vec<PathBuf> = Vec::new();
        for path in places.iter().flat_map(in_place) {
            let is_drop_in = path.extension().is_some_and(|extension| extension == "conf");
            if is_drop_in && !drop_ins.iter().any(|other| other.file_name() == path.file_name()) {
                drop_ins.push(path);
            }
        }
        drop_ins.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
        for path in drop_ins {
            text.push('\n');
            text.push_str(&read_bounded(&path));
        }
        Some(Self { path, text })
    }

    /// Where the unit itself is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The last value of a key, such as `User`.
    #[must_use]
    pub fn last(&self, key: &str) -> Option<&str> {
        self.values(key).last().copied().filter(|value| !value.is_empty())
    }

    /// The file that systemd hands over as a credential (`LoadCredential=NAME:PATH`).
    #[must_use]
    pub fn credential(&self, name: &str) -> Option<PathBuf> {
        let of_name = |value: &str| {
            let (own, path) = value.split_once(':')?;
            (own == name && path.starts_with('/')).then(|| PathBuf::from(path))
        };
        self.values("LoadCredential").into_iter().rev().find_map(of_name)
    }

    fn values(&self, key: &str) -> Vec<&str> {
        let lines = self.text.lines();
        lines.filter_map(|line| Some(line.strip_prefix(key)?.strip_prefix('=')?.trim())).collect()
    }
}

/// The user of the target's unit on this host. `None`: the unit is not installed, or names no user.
#[must_use]
pub fn user_of_target() -> Option<User> {
    let unit = UnitFile::find(Path::new("/"), TARGET_UNIT)?;
    let user = unit.last("User")?;
    match user.parse() {
        Ok(number) => User::from_uid(Uid::from_raw(number)).ok().flatten(),
        Err(_) => User::from_name(user).ok().flatten(),
    }
}

fn read_bounded(path: &Path) -> String {
    let mut text = String::new();
    let Ok(file) = File::open(path) else { return text };
    let _ = file.take(FILE_MAX_BYTES).read_to_string(&mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_ins_count_after_the_unit_in_the_order_of_their_names() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let find = || UnitFile::find(root.path(), "x.service");
        assert_eq!(find(), None);
        write("usr/lib/systemd/system/x.service", "[Service]\nUser=rblk\nLoadCredential=k:/a\n");
        assert_eq!(find().unwrap().last("User"), Some("rblk"));
        assert_eq!(find().unwrap().credential("k"), Some("/a".into()));
        assert_eq!(find().unwrap().credential("other"), None);
        write("usr/lib/systemd/system/x.service.d/b.conf", "[Service]\nUser=b\n");
        write("run/systemd/system/x.service.d/a.conf", "[Service]\nUser=a\n");
        assert_eq!(find().unwrap().last("User"), Some("b"));
        write("etc/systemd/system/x.service.d/b.conf", "[Service]\nLoadCredential=k:/b\n");
        write("etc/systemd/system/x.service.d/c.txt", "[Service]\nUser=c\n");
        assert_eq!(find().unwrap().last("User"), Some("a"));
        assert_eq!(find().unwrap().credential("k"), Some("/b".into()));
        write("etc/systemd/system/x.service", "[Service]\n");
        assert_eq!(find().unwrap().path(), root.path().join("etc/systemd/system/x.service"));
    }
}
