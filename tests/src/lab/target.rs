//! [`Target`]: a running `rblk-target serve`.

use std::fs::{File, OpenOptions};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rblk_config::TargetConfig;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::flags::CONTROL_SOCKET;
use rblk_operate::target::status::TargetStatus;

use super::counts::Counts;
use super::process::{Frozen, signal};
use super::wait::{DEADLINE, until};
use super::{FarHost, GroupNetwork, Lab};

/// Runs a program on a machine that was booted by itself: its first argument is the file with the
/// id of the boot.
const OTHER_BOOT: &str =
    r#"mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@""#;

/// The flags, the place and the environment of a target. It listens on the addresses of its host,
/// for both transports, and has two poll groups.
#[derive(Clone, Debug, Default)]
pub struct TargetFlags {
    flags: Vec<String>,
    place: Option<(&'static str, Vec<String>)>,
    boot: Option<PathBuf>,
    files: Option<&'static str>,
    state: Option<PathBuf>,
    environment: Vec<(&'static str, String)>,
}

impl TargetFlags {
    /// A volume on a file.
    #[must_use]
    pub fn file(self, name: &str, path: &Path) -> Self {
        self.flag("--file", &format!("{name}={}", path.display()))
    }

    /// A configuration, with the addresses, poll groups and state directory of the lab.
    ///
    /// # Panics
    /// The file cannot be written.
    #[must_use]
    pub fn config(self, lab: &Lab, config: &TargetConfig) -> Self {
        let path = write(lab, &format!("{}.toml", self.files()), config.clone());
        self.flag("--config", &path.display().to_string())
    }

    /// On another host.
    #[must_use]
    pub fn on(mut self, far: &FarHost) -> Self {
        self.place = Some((far.space(), far.hosts().to_vec()));
        self
    }

    /// On a member of that network, beside the target on the other one: its control socket, its log
    /// and its state directory are its own.
    #[must_use]
    pub fn on_member(mut self, network: &GroupNetwork, member: usize) -> Self {
        let space = network.space(member);
        self.place = Some((space, vec![network.host(member).to_owned()]));
        self.files = Some(space);
        self
    }

    /// With this state directory.
    #[must_use]
    pub fn state(mut self, directory: PathBuf) -> Self {
        self.state = Some(directory);
        self
    }

    /// On a machine with the id of its boot in a file: another machine, or another boot. For a
    /// target on another host.
    #[must_use]
    pub fn boot(mut self, id: PathBuf) -> Self {
        self.boot = Some(id);
        self
    }

    /// How the names of its files begin.
    fn files(&self) -> &'static str {
        self.files.unwrap_or("target")
    }

    /// With these variables in its environment.
    #[must_use]
    pub fn environment(mut self, variables: Vec<(&'static str, String)>) -> Self {
        self.environment = variables;
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
}

/// Writes a configuration that lets in the hosts of the lab.
fn write(lab: &Lab, name: &str, mut config: TargetConfig) -> PathBuf {
    // The key `listen` is required, but the flag overrides it.
    config.listen = vec![lab.tcp()];
    lab.keys().let_in(&mut config);
    let path = lab.path(name);
    let text = config.dump().unwrap_or_else(|e| panic!("{name}: {e}"));
    std::fs::write(&path, text).unwrap_or_else(|e| panic!("writing {}: {e}", path.display()));
    path
}

/// A running target. Drop kills it.
#[derive(Debug)]
pub struct Target<'l> {
    // Keeps the lab alive longer than the target.
    lab: PhantomData<&'l Lab>,
    child: Child,
    log: PathBuf,
    socket: PathBuf,
}

impl<'l> Target<'l> {
    /// Starts a target and waits until it serves.
    ///
    /// # Panics
    /// The target ends, or is not ready in time. The message has its log.
    #[must_use]
    pub fn start(lab: &'l Lab, flags: &TargetFlags) -> Self {
        let mut target = Self::begin(lab, flags);
        until("the target to serve", DEADLINE, || {
            let ended = target.child.try_wait().expect("wait");
            assert!(ended.is_none(), "the target ended ({ended:?}); its log:\n{}", target.log());
            target.ask().filter(|(status, _)| status.pid == target.child.id())
        });
        target
    }

    /// Starts a target that may fail to serve.
    ///
    /// # Panics
    /// The program is missing.
    #[must_use]
    pub fn begin(lab: &'l Lab, flags: &TargetFlags) -> Self {
        let log = lab.path(&format!("{}.log", flags.files()));
        let to_log = || -> std::io::Result<(File, File)> {
            let file = OpenOptions::new().create(true).append(true).open(&log)?;
            Ok((file.try_clone()?, file))
        };
        let (out, err) = to_log().unwrap_or_else(|e| panic!("opening {}: {e}", log.display()));
        let mut command = lab.program("rblk-target");
        let mut hosts = vec![lab.host().to_owned()];
        if let Some((space, addresses)) = &flags.place {
            let mut outer = Command::new("ip");
            // `ip netns exec` executes the program in its own process, so the pid stays.
            outer.args(["netns", "exec", space]).current_dir("/");
            if let Some(boot) = &flags.boot {
                outer.args(["sh", "-c", OTHER_BOOT, "sh"]).arg(boot);
            }
            outer.arg(command.get_program());
            (command, hosts) = (outer, addresses.clone());
        }
        command.args(["serve", "--poll-groups", "2"]);
        if !flags.flags.iter().any(|flag| flag == "--config") {
            command.arg("--config").arg(write(lab, "hosts.toml", TargetConfig::default()));
        }
        for host in hosts {
            command.args(["--listen", &format!("rdma://{host}")]);
            command.args(["--listen", &format!("tcp://{host}")]);
        }
        let (state, socket) = match flags.files {
            Some(own) => (format!("{own}.state"), lab.path(&format!("{own}.sock"))),
            None => ("state".to_owned(), PathBuf::from(CONTROL_SOCKET)),
        };
        let state = flags.state.clone().unwrap_or_else(|| lab.path(&state));
        command.arg("--state-dir").arg(state).arg("--control-socket").arg(&socket);
        command.envs(flags.environment.iter().cloned());
        command.args(&flags.flags).stdin(Stdio::null()).stdout(out).stderr(err);
        let child = command.spawn().unwrap_or_else(|e| panic!("starting rblk-target: {e}"));
        Self { lab: PhantomData, child, log, socket }
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The status of the target.
    ///
    /// # Panics
    /// The target does not answer.
    #[must_use]
    pub fn status(&self) -> TargetStatus {
        until("the target's status", DEADLINE, || self.ask()).0
    }

    /// Its counters, all poll groups together.
    ///
    /// # Panics
    /// The target does not answer.
    #[must_use]
    pub fn counts(&self) -> Counts {
        until("the target's status", DEADLINE, || self.ask()).1
    }

    // Asks the socket, not `rblk-target status`, which `commands.rs` tests: tests ask often, and
    // starting a program takes long here.
    fn ask(&self) -> Option<(TargetStatus, Counts)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap_or_else(|e| panic!("a runtime: {e}"));
        match runtime.block_on(ask(&self.socket, Ask::Status)) {
            Ok(Response::Status(status)) => {
                let total = serde_json::to_value(&status.total);
                let counts = Counts::of(&total.unwrap_or_else(|e| panic!("counters: {e}")));
                Some((*status, counts))
            }
            Ok(other) => panic!("the target answers {other:?}"),
            Err(_) => None,
        }
    }

    /// Sends SIGTERM, which drains the target.
    pub fn terminate(&self) {
        signal("TERM", &self.pid().to_string());
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// The target still runs after `deadline`.
    pub fn wait(&mut self, deadline: Duration) -> ExitStatus {
        let since = Instant::now();
        until("the target to end", deadline, || {
            self.child.try_wait().expect("wait").map(|s| (s, since.elapsed()))
        })
        .0
    }

    /// Stops the process with SIGSTOP until the result is dropped.
    #[must_use]
    pub fn freeze(&self) -> Frozen {
        Frozen::process(self.pid())
    }

    /// Kills it with SIGKILL and waits for its end.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            println!("--- the end of the target's log");
            lines
                .iter()
                .skip(lines.len().saturating_sub(60))
                .for_each(|line| println!("    {line}"));
        }
        self.end();
    }
}
