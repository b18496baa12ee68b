//! [`SystemdFacts`]: which units of rblk are installed and enabled, read from the files of systemd.

use std::path::{Path, PathBuf};

use super::report::Finding;
use rblk_config::unit_file::{PLACES, UnitFile};

/// The unit that starts the mount of every file, and the template of those mounts.
const ALL_MOUNTS: &str = "rblk-automount.target";
const MOUNT: &str = "rblk-mount@.service";

/// A unit that should start at boot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unit {
    /// Its name: `rblk-target.service`, `rblk-mount@vol0.service`.
    pub name: String,
    /// Whether it starts at boot.
    pub enabled: bool,
}

/// The units of rblk in systemd.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemdFacts {
    /// Whether systemd is the init of this host.
    pub runs: bool,
    /// The file of the unit, or of its template.
    pub file: Option<PathBuf>,
    /// `User=` of that file and its drop-ins.
    pub user: Option<String>,
    /// The units that there should be.
    pub units: Vec<Unit>,
}

impl SystemdFacts {
    /// Looks for a unit file, and which instances of it are enabled. For a unit that is no template
    /// the one instance has its name.
    #[must_use]
    pub fn read(root: &Path, file: &str, instances: &[String]) -> Self {
        let places = PLACES.map(|place| root.join(place));
        let found = UnitFile::find(root, file);
        let is_linked = |name: &str| {
            places.iter().any(|place| {
                let wants = crate::host::sysfs::names_in(place).into_iter();
                wants
                    .filter(|dir| dir.ends_with(".wants") || dir.ends_with(".requires"))
                    .any(|dir| place.join(dir).join(name).symlink_metadata().is_ok())
            })
        };
        let all = file == MOUNT && is_linked(ALL_MOUNTS);
        let unit = |name: &String| Unit { name: name.clone(), enabled: all || is_linked(name) };
        Self {
            runs: root.join("run/systemd/system").is_dir(),
            user: found.as_ref().and_then(|unit| unit.last("User")).map(str::to_owned),
            file: found.map(|unit| unit.path().to_owned()),
            units: instances.iter().map(unit).collect(),
        }
    }

    /// Judges them.
    #[must_use]
    pub fn judge(&self, file: &str) -> Vec<Finding> {
        if !self.runs {
            return vec![Finding::skip("units", "no systemd runs here")];
        }
        if self.file.is_none() {
            return vec![Finding::skip("units", format!("{file} is not installed"))];
        }
        if self.units.is_empty() {
            return vec![Finding::ok("units", format!("{file} is installed"))];
        }
        let judge = |unit: &Unit| match unit.enabled {
            true => Finding::ok("units", format!("{} starts at boot", unit.name)),
            false => Finding::warn("units", format!("{} does not start at boot", unit.name))
                .fix(format!("systemctl enable {}", unit.name)),
        };
        self.units.iter().map(judge).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    #[test]
    fn a_unit_is_enabled_by_a_link_in_a_directory_of_wants() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let names = ["rblk-mount@a.service".to_owned(), "rblk-mount@b.service".to_owned()];
        let file = "rblk-mount@.service";
        let read = || SystemdFacts::read(root.path(), file, &names);
        assert_eq!(read().judge(file)[0].verdict, Verdict::Skip);
        std::fs::create_dir_all(at("run/systemd/system")).unwrap();
        assert!(read().judge(file)[0].found.contains("not installed"));
        std::fs::create_dir_all(at("usr/lib/systemd/system")).unwrap();
        std::fs::write(at("usr/lib/systemd/system/rblk-mount@.service"), "[Service]\nUser=rblk\n")
            .unwrap();
        let wants = at("etc/systemd/system/multi-user.target.wants");
        std::fs::create_dir_all(&wants).unwrap();
        // The link leads nowhere below this root, as an absolute link does in a fixture.
        std::os::unix::fs::symlink("/nowhere", wants.join("rblk-mount@a.service")).unwrap();
        let facts = read();
        assert_eq!(facts.user.as_deref(), Some("rblk"));
        let judged = facts.judge(file);
        assert_eq!((judged[0].verdict, judged[1].verdict), (Verdict::Ok, Verdict::Warn));
        assert_eq!(judged[1].fix.as_deref(), Some("systemctl enable rblk-mount@b.service"));
        std::os::unix::fs::symlink("/nowhere", wants.join(ALL_MOUNTS)).unwrap();
        assert!(read().judge(file).iter().all(|finding| finding.verdict == Verdict::Ok));
    }
}
