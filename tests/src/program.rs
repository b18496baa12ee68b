//! The real programs as child processes: [`run`] for commands that end, [`Target`] for a target
//! that serves, and [`Client`] for I/O with a target without a block device.

use std::fmt::Debug;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::DigestWish;
use rblk_fabric::{Address, ConnectOptions, Device, PageKind, Region, Transport};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::{Credentials, HostIdentity, QueueWish, Session, VolumeClaim};
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::status::TargetStatus;
use rblk_protocol::{
    AccessMode, AsyncEvent, BlockSize, Features, HostId, Name, OpenReply, QueueDepth, Tag,
};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

pub use crate::built::program;

/// How long anything may take before a test gives up.
pub const DEADLINE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(5);
const IO_MAX: u32 = 64 << 10;
const DEPTH: u16 = 8;

/// The result of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Its exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Checks that the program ended with that exit code and printed each of the `pieces` on stderr.
///
/// # Panics
/// The code or a piece differs.
#[track_caller]
pub fn assert_refused(ended: &Ended, code: i32, pieces: &[&str]) {
    assert_eq!(ended.code, Some(code), "{ended:?}");
    for piece in pieces {
        assert!(ended.stderr.contains(piece), "{piece:?} is not in:\n{}", ended.stderr);
    }
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}

/// Checks that no process that names a file in `dir` and no control socket in it are left.
///
/// # Panics
/// A process or a socket is left.
#[track_caller]
pub fn assert_nothing_left(dir: &Path) {
    assert_eq!(processes_naming(dir), Vec::<String>::new());
    assert!(!dir.join("c.sock").exists(), "a socket file is left");
}

/// Runs a command to its end.
///
/// # Panics
/// The command does not start, or does not end in time.
#[must_use]
pub fn run(command: &mut Command) -> Ended {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let pid = child.id();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(DEADLINE) {
        Ok(output) => {
            let output = output.expect("its output");
            Ended {
                code: output.status.code(),
                stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            }
        }
        Err(_) => {
            signal(pid, nix::sys::signal::Signal::SIGKILL);
            panic!("{command:?} does not end");
        }
    }
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a process id"));
    // The process may have ended by itself.
    let _ = nix::sys::signal::kill(pid, signal);
}

/// Calls `look` until it returns a value.
///
/// # Panics
/// No value in time.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(POLL);
    }
}

/// Waits until a value equals `expected` as a whole. Use it where a value arrives piece by piece.
///
/// # Panics
/// The value differs all the time.
#[track_caller]
pub fn wait_for_equal<T: PartialEq + Debug>(what: &str, expected: &T, mut look: impl FnMut() -> T) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let found = look();
        if found == *expected {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {found:?}, not {expected:?}");
        std::thread::sleep(POLL);
    }
}

/// A TCP port of this host on which no process listens. While this value lives, the kernel gives
/// the port to no process that asks for any port; a process that names the port gets it.
#[derive(Debug)]
pub struct FreePort {
    /// The port.
    pub number: u16,
    // Bound, but not listening.
    _socket: TcpSocket,
}

/// Reserves a free port.
///
/// # Panics
/// No port is free.
#[must_use]
pub fn free_port() -> FreePort {
    let reserve = || {
        let socket = TcpSocket::new_v4()?;
        // Listeners set this option, too: two such sockets may share a port while neither listens.
        socket.set_reuseaddr(true)?;
        socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
        Ok::<_, std::io::Error>(FreePort { number: socket.local_addr()?.port(), _socket: socket })
    };
    reserve().expect("a free port")
}

/// Command lines that contain a path.
#[must_use]
pub fn processes_naming(path: &Path) -> Vec<String> {
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    let path = path.to_string_lossy();
    dir.flatten()
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()))
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(path.as_ref()))
        .collect()
}

/// A serving target, with its files in a directory of the test. Drop kills it.
#[derive(Debug)]
pub struct Target {
    child: Child,
    /// Its control socket.
    pub socket: PathBuf,
    /// Its address.
    pub address: Address,
    log: PathBuf,
}

impl Target {
    /// Starts `rblk-target serve` with these arguments and waits until it serves.
    ///
    /// # Panics
    /// The target ends, or is not ready in time.
    #[must_use]
    pub fn start(dir: &Path, args: &[&str]) -> Self {
        let log = dir.join("target.log");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).expect("a log");
        Self::start_with_log(dir, args, file)
    }

    /// [`Self::start`] with the log sent elsewhere: [`Self::log`] is empty.
    ///
    /// # Panics
    /// The target ends, or is not ready in time.
    #[must_use]
    pub fn start_with_log(dir: &Path, args: &[&str], to: impl Into<Stdio>) -> Self {
        let port = free_port();
        Self::start_at(port.number, dir, args, Command::new(program("rblk-target")), to)
    }

    /// [`Self::start`] by another program, which executes the target.
    ///
    /// # Panics
    /// The target ends, or is not ready in time.
    #[must_use]
    pub fn start_by(by: &[&str], dir: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(by[0]);
        command.args(&by[1..]).arg(program("rblk-target"));
        Self::start_command(command, dir, args)
    }

    /// [`Self::start`] with the programs of a directory.
    ///
    /// # Panics
    /// The target ends, or is not ready in time.
    #[must_use]
    pub fn start_of(programs: &Path, dir: &Path, args: &[&str]) -> Self {
        Self::start_command(Command::new(programs.join("rblk-target")), dir, args)
    }

    fn start_command(command: Command, dir: &Path, args: &[&str]) -> Self {
        let log = dir.join("target.log");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).expect("a log");
        Self::start_at(free_port().number, dir, args, command, file)
    }

    /// Starts the target again at its old address, after [`Self::kill`].
    ///
    /// # Panics
    /// The target ends, or is not ready in time.
    pub fn start_again(&mut self, dir: &Path, args: &[&str]) {
        let file = std::fs::OpenOptions::new().append(true).open(&self.log).expect("its log");
        let command = Command::new(program("rblk-target"));
        *self = Self::start_at(self.address.port, dir, args, command, file);
    }

    fn start_at(
        port: u16,
        dir: &Path,
        args: &[&str],
        mut command: Command,
        to: impl Into<Stdio>,
    ) -> Self {
        let (socket, log) = (dir.join("target.sock"), dir.join("target.log"));
        let mut child = command
            .arg("serve")
            .args(["--listen", &format!("tcp://127.0.0.1:{port}")])
            .arg("--control-socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(dir)
            .args(["--arena", "8MiB", "--max-io", "1MiB"])
            .args(["--poll-groups", "1"].iter().filter(|_| !args.contains(&"--poll-groups")))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(to)
            .spawn()
            .expect("a target");
        wait_for("a serving target", || {
            if let Ok(Some(status)) = child.try_wait() {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                panic!("the target ended with {status}:\n{said}");
            }
            status(&socket)
        });
        let address = format!("tcp://127.0.0.1:{port}").parse().expect("an address");
        Self { child, socket, address, log }
    }

    /// The target's status.
    ///
    /// # Panics
    /// The target does not answer.
    #[must_use]
    pub fn status(&self) -> TargetStatus {
        status(&self.socket).unwrap_or_else(|| panic!("no status; its log:\n{}", self.log()))
    }

    /// The target's status; none while the target does not answer.
    #[must_use]
    pub fn status_if_any(&self) -> Option<TargetStatus> {
        status(&self.socket)
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        signal(self.child.id(), nix::sys::signal::Signal::SIGTERM);
    }

    /// Sends SIGHUP.
    pub fn hang_up(&self) {
        signal(self.child.id(), nix::sys::signal::Signal::SIGHUP);
    }

    /// Stops all threads of the target (SIGSTOP), until [`Self::go_on`].
    pub fn pause(&self) {
        signal(self.child.id(), nix::sys::signal::Signal::SIGSTOP);
    }

    /// Continues the target after [`Self::pause`].
    pub fn go_on(&self) {
        signal(self.child.id(), nix::sys::signal::Signal::SIGCONT);
    }

    /// Kills the target and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the target's end and returns its exit code.
    ///
    /// # Panics
    /// The target does not end.
    pub fn wait(&mut self) -> Option<i32> {
        let child = &mut self.child;
        wait_for("the target's end", || child.try_wait().ok().flatten()).code()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.kill();
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// The status of the target at a socket; none while the target does not answer.
#[must_use]
pub fn status(socket: &Path) -> Option<TargetStatus> {
    match runtime().block_on(ask(socket, Ask::Status)) {
        Ok(Response::Status(status)) => Some(*status),
        _ => None,
    }
}

/// How long a device may take until it delivers messages on a new connection. Soft-iWARP does not
/// report an earlier message until the next one arrives.
#[must_use]
pub fn time_to_settle(device: &Device) -> Duration {
    match device.caps().transport {
        Transport::Iwarp => Duration::from_millis(100),
        _ => Duration::ZERO,
    }
}

/// A session with one queue, driven by the test.
#[derive(Debug)]
pub struct Client {
    /// The session.
    pub session: Session,
    /// The opened volume.
    pub volume: OpenReply,
    runtime: Runtime,
    engine: Engine,
    // The engine's clock, which stands still: no deadline passes, even while a process gets no CPU.
    now: Instant,
    buffers: Arc<Region>,
}

impl Client {
    /// Connects, logs in, opens the volume and connects a queue.
    ///
    /// # Errors
    /// The target refuses.
    pub fn connect(address: &Address, volume: &str, host: u8) -> Result<Self, SessionError> {
        Self::claim(address, volume, host, AccessMode::Exclusive)
    }

    /// [`Self::connect`] for a host that resumes, or takes over.
    ///
    /// # Errors
    /// The target refuses.
    pub fn claim(
        address: &Address,
        volume: &str,
        host: u8,
        claim: impl Into<VolumeClaim>,
    ) -> Result<Self, SessionError> {
        Self::prove(address, volume, host, None, claim)
    }

    /// [`Self::claim`] for a host that proves its identity.
    ///
    /// # Errors
    /// The target refuses.
    pub fn prove(
        address: &Address,
        volume: &str,
        host: u8,
        credentials: Option<&Credentials>,
        claim: impl Into<VolumeClaim>,
    ) -> Result<Self, SessionError> {
        let runtime = runtime();
        let name = Name::new("test").expect("a name");
        let identity = HostIdentity { id: HostId([host; 16]), name };
        // As patient as a test: an idle client sends no keep-alives, so the target must wait.
        let options =
            ConnectOptions { timeout: DEADLINE, detect: 3 * DEADLINE, ..ConnectOptions::default() };
        let depth = QueueDepth::new(DEPTH).expect("a depth");
        let buffers = Region::allocate(IO_MAX as usize * usize::from(DEPTH), PageKind::Normal)
            .expect("memory");
        let (session, volume, path) = runtime.block_on(async {
            let mut session =
                Session::connect(address, &options, &identity, credentials, None).await?;
            let name = Name::new(volume).expect("a volume's name");
            let volume = session.open(&name, claim).await?;
            let wish = QueueWish {
                depth,
                io_max_bytes: IO_MAX,
                in_capsule_bytes: 4096,
                features: Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS),
                digest: DigestWish::Off,
                lanes: None,
                queues: 1,
            };
            let path =
                session.connect_queue(0, wish, volume.handle, &Arc::clone(&buffers).into()).await?;
            Ok::<_, SessionError>((session, volume, path))
        })?;
        let mut engine = Engine::new(depth, IO_MAX as usize, Arc::new(QueueStats::default()));
        // With a stopped clock the engine sends no request again.
        std::thread::sleep(time_to_settle(session.device()));
        let now = Instant::now();
        engine.connect(path, now);
        Ok(Self { session, volume, runtime, engine, now, buffers })
    }

    /// Runs one request. `None` when the path is lost.
    ///
    /// # Panics
    /// The request does not end in time.
    pub fn try_io(&mut self, op: IoOp, offset: u64, len: u64) -> Option<i32> {
        let size = BlockSize::new(self.volume.block_size.bytes()).expect("a block size");
        let io = Io::new(op, offset, len, size).expect("whole blocks");
        self.engine.submit(Tag(0), io).expect("one request at a time");
        let deadline = Instant::now() + DEADLINE;
        let mut result = None;
        while result.is_none() {
            assert!(Instant::now() < deadline, "{op:?} does not end");
            if !self.engine.turn(self.now, |_, r| result = Some(r)) {
                std::thread::yield_now();
            }
            if result.is_none() && self.engine.take_ended().is_some() {
                return None;
            }
        }
        result
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// The write fails.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.buffers.write(0, bytes);
        let result = self.try_io(IoOp::Write, offset, bytes.len() as u64);
        assert_eq!(result, i32::try_from(bytes.len()).ok());
    }

    /// Reads bytes.
    ///
    /// # Panics
    /// The read fails.
    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.buffers.zero(0, len);
        assert_eq!(self.try_io(IoOp::Read, offset, len as u64), i32::try_from(len).ok());
        let mut bytes = vec![0; len];
        self.buffers.read(0, &mut bytes);
        bytes
    }

    /// Waits for the next event of the target.
    ///
    /// # Panics
    /// No event in time, or the session is lost.
    pub fn next_event(&mut self) -> Option<AsyncEvent> {
        let event = self.session.admin.event(Pulse::of(3 * DEADLINE));
        let event = self.runtime.block_on(async { tokio::time::timeout(DEADLINE, event).await });
        event.expect("an event in time").expect("a session")
    }

    /// The names of the volumes that this host may see.
    ///
    /// # Panics
    /// The target does not answer.
    pub fn list(&mut self) -> Vec<Name> {
        let listed = self.runtime.block_on(self.session.list()).expect("a list");
        listed.iter().map(|entry| entry.name).collect()
    }

    /// Makes all writes durable.
    ///
    /// # Panics
    /// The flush fails.
    pub fn flush(&mut self) {
        assert_eq!(self.try_io(IoOp::Flush, 0, 0), Some(0));
    }

    /// Logs out.
    pub fn logout(mut self) {
        self.engine.disconnect();
        self.runtime.block_on(self.session.logout(DEADLINE));
    }
}
