//! [`Mounted`]: a volume as a local block device.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rblk_operate::mount::mount_ask::{Ask, Response, ask, socket_path};
use rblk_operate::mount::mount_status::MountStatus;

use super::counts::Counts;
use super::process::{Finished, Frozen, Running, signal};
use super::wait::{DEADLINE, until};
use super::{Lab, Node, Sysfs};

/// A running mount answers at once.
const ANSWER: Duration = Duration::from_secs(2);

/// The flags and the environment of a mount.
#[derive(Clone, Debug)]
pub struct MountFlags {
    address: String,
    volume: String,
    name: String,
    flags: Vec<String>,
    host: Option<&'static str>,
    environment: Vec<(&'static str, String)>,
}

/// Runs a command on a pretended host: the first argument is the host's name, the others are the
/// command. The host has its own name and machine id. Everything else is shared.
const HOST: &str = r#"
echo "$1" >/proc/sys/kernel/hostname
if [ -e /etc/machine-id ]; then
    printf %s "$1" | md5sum | cut -c1-32 >"/run/host-$1"
    mount --bind "/run/host-$1" /etc/machine-id
fi
shift
exec "$@""#;

/// Mounts and unmounts, as process 1 of a pid namespace: the program, the name of the mount, and
/// the words of the mount.
const IN_NAMESPACE: &str = r#"
program=$1
name=$2
shift 2
"$program" "$@" || exit
exec "$program" umount "$name""#;

impl MountFlags {
    /// A volume of the target at `address`, with two queues.
    #[must_use]
    pub fn new(address: String, volume: &str) -> Self {
        let flags = ["--queues", "2", "--reconnect-delay", "200ms"].map(str::to_owned).to_vec();
        let [volume, name] = [volume, volume].map(str::to_owned);
        Self { address, volume, name, flags, host: None, environment: Vec::new() }
    }

    /// Under another name than the volume's.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self.flag("--name", name)
    }

    /// As another host, of that name.
    #[must_use]
    pub fn host(mut self, host: &'static str) -> Self {
        self.host = Some(host);
        self
    }

    /// With these variables in its environment.
    #[must_use]
    pub fn environment(mut self, variables: Vec<(&'static str, String)>) -> Self {
        self.environment = variables;
        self
    }

    /// With a second path, by this address.
    #[must_use]
    pub fn path(self, address: &str) -> Self {
        self.flag("--path", address)
    }

    /// With that first pause before a lost address is tried again, and not 200 ms.
    #[must_use]
    pub fn reconnect_delay(mut self, time: &str) -> Self {
        let at = self.flags.iter().position(|flag| flag == "200ms").expect("the usual pause");
        time.clone_into(&mut self.flags[at]);
        self
    }

    /// Any flag with its value.
    #[must_use]
    pub fn flag(mut self, flag: &str, value: &str) -> Self {
        self.flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Any flag without a value.
    #[must_use]
    pub fn switch(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Runs `rblk-initiator mount` and returns how it ended.
    ///
    /// # Panics
    /// The command does not end.
    #[must_use]
    pub fn try_mount(&self, lab: &Lab) -> Finished {
        let program = lab.program("rblk-initiator");
        let mut command = match self.host {
            Some(host) => {
                let mut command = Command::new("unshare");
                command.args(["-m", "-u", "sh", "-c", HOST, "sh", host]).arg(program.get_program());
                command.current_dir("/");
                command
            }
            None => program,
        };
        command.args(["mount", &self.address, &self.volume]).args(&self.flags);
        command.args(lab.keys().of_host(self.host));
        command.envs(self.environment.iter().cloned());
        Running::start(command).finish(2 * DEADLINE)
    }
}

impl MountFlags {
    /// Runs `rblk-initiator mount` in a pid namespace of its own, and then `umount`. Returns how
    /// the first one that failed ended.
    ///
    /// # Panics
    /// The commands do not end.
    #[must_use]
    pub fn try_in_pid_namespace(&self, lab: &Lab) -> Finished {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "sh", "-c", IN_NAMESPACE, "sh"]);
        command.arg(lab.program("rblk-initiator").get_program()).arg(&self.name);
        command.args(["mount", &self.address, &self.volume]).args(&self.flags);
        command.args(lab.keys().of_host(self.host)).current_dir("/");
        Running::start(command).finish(4 * DEADLINE)
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
    /// The mount fails.
    #[must_use]
    pub fn new(lab: &'l Lab, flags: &MountFlags) -> Self {
        Self::try_new(lab, flags).unwrap_or_else(|said| panic!("{said}"))
    }

    /// Mounts and waits for the device. Returns an error instead of a panic.
    ///
    /// # Errors
    /// The output of the failed command.
    pub fn try_new(lab: &'l Lab, flags: &MountFlags) -> Result<Self, Finished> {
        let said = flags.try_mount(lab);
        if said.code() != 0 {
            return Err(said);
        }
        let mut mounted = Self {
            lab,
            name: flags.name.clone(),
            pid: 0,
            device: PathBuf::from(said.stdout.trim()),
            done: false,
        };
        mounted.pid = mounted.listed().pid;
        Ok(mounted)
    }

    /// The mount's entry in `rblk-initiator list`.
    fn listed(&self) -> MountStatus {
        let text = self.lab.initiator(&["list", "--output", "json"], DEADLINE).ok();
        // A mount that does not answer has an entry with fewer keys.
        let mounts: Vec<serde_json::Value> =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("list is not JSON: {e}: {text}"));
        let own = mounts.into_iter().find(|mount| mount["name"] == *self.name);
        let status = own.and_then(|mount| serde_json::from_value::<MountStatus>(mount).ok());
        let status = status.unwrap_or_else(|| panic!("{} is not listed: {text}", self.name));
        assert_eq!(self.device.to_str(), Some(&*status.device), "what was said is what is listed");
        status
    }

    /// The block device.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// The device as an argument.
    #[must_use]
    pub fn dev(&self) -> String {
        self.device.display().to_string()
    }

    /// The kernel's attributes of the device.
    #[must_use]
    pub fn sysfs(&self) -> Sysfs {
        Sysfs::of(&self.device)
    }

    /// The daemon's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The device node.
    ///
    /// # Panics
    /// The node is missing.
    #[must_use]
    pub fn node(&self) -> Node {
        Node::of(&self.device)
    }

    /// The status of the mount.
    ///
    /// # Panics
    /// The mount does not answer.
    #[must_use]
    pub fn status(&self) -> MountStatus {
        until("the mount to answer", DEADLINE, || self.look())
    }

    /// Its counters, all queues together.
    ///
    /// # Panics
    /// The mount does not answer.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let total = serde_json::to_value(self.status().total);
        Counts::of(&total.unwrap_or_else(|e| panic!("counters of {}: {e}", self.name)))
    }

    /// The status of the mount, if it answers.
    ///
    /// # Panics
    /// The answer is no status.
    #[must_use]
    pub fn look(&self) -> Option<MountStatus> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap_or_else(|e| panic!("a runtime: {e}"));
        match runtime.block_on(ask(&socket_path(&self.name), Ask::Status, ANSWER)) {
            Ok(Response::Status(status)) => Some(*status),
            Ok(other) => panic!("{} answers {other:?}", self.name),
            Err(_) => None,
        }
    }

    /// The daemon's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(format!("/run/rblk/log/{}.log", self.name)).unwrap_or_default()
    }

    /// Waits until the mount is connected, and returns the epoch.
    ///
    /// # Panics
    /// The mount does not connect in time.
    pub fn wait_connected(&self) -> u32 {
        let what = format!("{} to be connected", self.name);
        until(&what, DEADLINE, || Some(self.status()).filter(|s| s.state == "connected")).epoch
    }

    /// Unmounts and returns the duration.
    ///
    /// # Panics
    /// The unmount fails, or leaves the device.
    pub fn umount(self) -> Duration {
        self.umount_with(&[])
    }

    /// Unmounts by force and returns the duration.
    ///
    /// # Panics
    /// The unmount fails, or leaves the device.
    pub fn umount_by_force(self) -> Duration {
        self.umount_with(&["--force"])
    }

    fn umount_with(mut self, flags: &[&str]) -> Duration {
        let finished = self.lab.initiator(&[&["umount", &self.name], flags].concat(), 3 * DEADLINE);
        let took = finished.took;
        assert_eq!(finished.code(), 0, "{finished}\nits log:\n{}", self.log());
        assert!(!self.device.exists(), "{} is still there", self.device.display());
        self.wait_gone();
        self.done = true;
        took
    }

    /// Kills the daemon with SIGKILL and waits for its end. The device stays, without a server.
    ///
    /// # Panics
    /// The daemon does not end.
    pub fn kill_daemon(&self) {
        signal("KILL", &self.pid.to_string());
        self.wait_gone();
    }

    /// Sends SIGHUP to the daemon.
    pub fn hang_up(&self) {
        signal("HUP", &self.pid.to_string());
    }

    /// Starts a new daemon for a device whose daemon has ended, by `rblk-initiator recover`.
    ///
    /// # Panics
    /// The recovery fails, or the device is another one.
    pub fn recover(&mut self) {
        let said = self.lab.initiator(&["recover", &self.name], 2 * DEADLINE).ok();
        self.is_served_again(said.trim());
    }

    /// Starts a new daemon as [`recover`](Self::recover) does, and kills it after `time`, at any
    /// stage of its start.
    pub fn recover_and_kill(&self, time: Duration) {
        let mut command = self.lab.program("rblk-initiator");
        command.args(["recover", &self.name]);
        let running = Running::start(command);
        std::thread::sleep(time);
        drop(running);
        super::leftovers::kill_initiators();
    }

    /// Starts a new daemon for a device whose daemon has ended, as a service does: by repeating the
    /// `mount`.
    ///
    /// # Panics
    /// The mount fails, or the device is another one.
    pub fn mount_again(&mut self, flags: &MountFlags) {
        let said = flags.try_mount(self.lab).ok();
        self.is_served_again(said.trim());
    }

    /// Upgrades the serving daemon to a program, to its own program by default. Returns the
    /// duration.
    ///
    /// # Panics
    /// The upgrade fails, or the device is another one.
    pub fn upgrade(&mut self, program: Option<&Path>) -> Duration {
        let mut words = vec!["upgrade".to_owned(), self.name.clone()];
        if let Some(program) = program {
            words.extend(["--program".to_owned(), program.display().to_string()]);
        }
        let finished = self.lab.initiator(&words, 2 * DEADLINE);
        let took = finished.took;
        let _ = finished.ok();
        self.pid = self.listed().pid;
        took
    }

    fn is_served_again(&mut self, device: &str) {
        assert_eq!(self.device.to_str(), Some(device), "another device");
        let before = self.pid;
        self.pid = self.listed().pid;
        assert_ne!(self.pid, before, "no other process");
    }

    /// Skips the unmount: the test removed the mount itself.
    pub fn forget(mut self) {
        self.done = true;
    }

    /// Stops the daemon's process with SIGSTOP until the result is dropped.
    #[must_use]
    pub fn freeze(&self) -> Frozen {
        Frozen::process(self.pid)
    }

    fn wait_gone(&self) {
        let proc = PathBuf::from(format!("/proc/{}", self.pid));
        until("the daemon to end", DEADLINE, || (!proc.exists()).then_some(()));
    }

    /// Kills the daemon with SIGKILL, and removes the device that it leaves.
    ///
    /// # Panics
    /// The device cannot be removed.
    pub fn kill(mut self) {
        self.kill_daemon();
        let _ = self.lab.initiator(&["umount", "--force", &self.name], 2 * DEADLINE).ok();
        assert!(!self.device.exists(), "{} is still there", self.device.display());
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
        if self.pid != 0 {
            signal("CONT", &self.pid.to_string());
        }
        // Not with `Lab::initiator`, which panics at its deadline.
        let mut command = Command::new("timeout");
        command.args(["-k", "1", "10"]).arg(self.lab.program("rblk-initiator").get_program());
        let _ = command.args(["umount", "--force", &self.name]).output();
        if self.pid != 0 {
            signal("KILL", &self.pid.to_string());
        }
    }
}
