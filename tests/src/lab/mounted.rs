//! [`Mounted`]: a volume as a local block device.

use std::path::PathBuf;
use std::time::Duration;

use rblk_initiator::mount::status::MountStatus;

use super::counts::Counts;
use super::process::{Finished, signal};
use super::wait::{DEADLINE, until};
use super::{Lab, Sysfs};

/// What a volume is mounted with.
#[derive(Clone, Debug)]
pub struct MountFlags {
    address: String,
    volume: String,
    name: String,
    flags: Vec<String>,
}

impl MountFlags {
    /// A volume of the target at `address`, with two queues.
    #[must_use]
    pub fn new(address: String, volume: &str) -> Self {
        let flags = ["--queues", "2", "--reconnect-delay", "200ms"].map(str::to_owned).to_vec();
        Self { address, volume: volume.to_owned(), name: volume.to_owned(), flags }
    }

    /// Under another name than the volume's.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self.flag("--name", name)
    }

    /// Any flag with its value.
    #[must_use]
    pub fn flag(mut self, flag: &str, value: &str) -> Self {
        self.flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Any flag without one.
    #[must_use]
    pub fn switch(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Runs `rblk-initiator mount` and returns how it ended.
    ///
    /// # Panics
    /// It does not end.
    #[must_use]
    pub fn try_mount(&self, lab: &Lab) -> Finished {
        let mut words = vec!["mount", &self.address, &self.volume];
        words.extend(self.flags.iter().map(String::as_str));
        lab.initiator(&words, 2 * DEADLINE)
    }
}

/// A mounted volume. Dropped, it is unmounted by force.
#[derive(Debug)]
pub struct Mounted<'l> {
    lab: &'l Lab,
    name: String,
    pid: u32,
    device: PathBuf,
    done: bool,
}

impl<'l> Mounted<'l> {
    /// Mounts, and waits for the device.
    ///
    /// # Panics
    /// It cannot be mounted.
    #[must_use]
    pub fn new(lab: &'l Lab, flags: &MountFlags) -> Self {
        let said = flags.try_mount(lab).ok();
        let mut mounted = Self {
            lab,
            name: flags.name.clone(),
            pid: 0,
            device: PathBuf::from(said.trim()),
            done: false,
        };
        let status = mounted.status();
        assert_eq!(
            mounted.device.to_str(),
            Some(&*status.device),
            "what mount says is what list says"
        );
        mounted.pid = status.pid;
        mounted
    }

    /// The block device.
    #[must_use]
    pub fn device(&self) -> &std::path::Path {
        &self.device
    }

    /// The device as an argument.
    #[must_use]
    pub fn dev(&self) -> String {
        self.device.display().to_string()
    }

    /// What the kernel says of the device.
    #[must_use]
    pub fn sysfs(&self) -> Sysfs {
        Sysfs::of(&self.device)
    }

    /// The daemon's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What `rblk-initiator list` shows.
    ///
    /// # Panics
    /// It is not listed.
    #[must_use]
    pub fn status(&self) -> MountStatus {
        until("the mount to be listed", DEADLINE, || self.ask()).0
    }

    /// Its counters, all queues together.
    ///
    /// # Panics
    /// It is not listed.
    #[must_use]
    pub fn counts(&self) -> Counts {
        until("the mount to be listed", DEADLINE, || self.ask()).1
    }

    fn ask(&self) -> Option<(MountStatus, Counts)> {
        let text = self.lab.initiator(&["list", "--output", "json"], DEADLINE).ok();
        let mounts: Vec<serde_json::Value> =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("list is not JSON: {e}: {text}"));
        let value = mounts.into_iter().find(|m| m["name"] == *self.name)?;
        let counts = Counts::of(&value["total"]);
        let status = serde_json::from_value(value).unwrap_or_else(|e| panic!("list: {e}: {text}"));
        Some((status, counts))
    }

    /// The daemon's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(format!("/run/rblk/log/{}.log", self.name)).unwrap_or_default()
    }

    /// Waits until it is connected, and to what epoch.
    ///
    /// # Panics
    /// It takes too long.
    pub fn wait_connected(&self) -> u32 {
        let what = format!("{} to be connected", self.name);
        until(&what, DEADLINE, || Some(self.status()).filter(|s| s.state == "connected")).epoch
    }

    /// Unmounts, which must work, and returns how long that took.
    ///
    /// # Panics
    /// It does not, or the device is still there.
    pub fn umount(self) -> Duration {
        self.umount_with(&[])
    }

    /// Unmounts by force, which must work, and returns how long that took.
    ///
    /// # Panics
    /// It does not, or the device is still there.
    pub fn umount_by_force(self) -> Duration {
        self.umount_with(&["--force"])
    }

    fn umount_with(mut self, flags: &[&str]) -> Duration {
        let finished = self.lab.initiator(&[&["umount", &self.name], flags].concat(), 3 * DEADLINE);
        let took = finished.took;
        assert_eq!(finished.code(), 0, "{finished}\nits log:\n{}", self.log());
        assert!(!self.device.exists(), "{} is still there", self.device.display());
        until("the daemon to end", DEADLINE, || {
            (!std::path::Path::new(&format!("/proc/{}", self.pid)).exists()).then_some(())
        });
        self.done = true;
        took
    }

    /// Kills the daemon, with no goodbye. What that leaves is the caller's.
    pub fn kill(mut self) {
        signal("KILL", &self.pid.to_string());
        self.done = true;
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        if std::thread::panicking() {
            println!("--- the log of mount {}", self.name);
            self.log().lines().for_each(|line| println!("    {line}"));
        }
        // Not by `Lab::initiator`, which panics at its deadline.
        let mut command = std::process::Command::new("timeout");
        command.args(["-k", "1", "10"]).arg(self.lab.program("rblk-initiator").get_program());
        let _ = command.args(["umount", "--force", &self.name]).output();
        if self.pid != 0 {
            signal("KILL", &self.pid.to_string());
        }
    }
}
