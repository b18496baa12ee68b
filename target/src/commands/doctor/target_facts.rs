//! [`Facts`]: the facts about this host, read once.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use io_uring::IoUring;
use nix::unistd::{User, geteuid};
use rblk_config::unit_file::{TARGET_UNIT, user_of_target};
use rblk_config::{Auth, Encrypt, TargetConfig};
use rblk_fabric::soft::tls::{NoTls, kernel_has_tls};
use rblk_fabric::{Address, Scheme};
use rblk_operate::doctor::{
    Directory, HostFacts, Interface, RdmaDevice, SystemdFacts, interfaces, rdma_devices,
    tcp_listener,
};

use crate::commands::doctor::seen::Seen;
use crate::memory::demand::HostMemory;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::flags::CONTROL_SOCKET;
use rblk_operate::target::lost_socket::server_without_socket;
use rblk_operate::target::status::TargetStatus;

/// An address that the target listens on.
#[derive(Debug)]
pub(super) struct Listen {
    pub address: Address,
    /// Its IP address; `None` for a name.
    pub ip: Option<IpAddr>,
    /// Why a TCP socket cannot listen there. `None`: it can, or that was not tried.
    pub refused: Option<io::Error>,
    /// The process that has the port, if any.
    pub taken_by: Option<String>,
}

/// The facts about this host.
#[derive(Debug)]
pub(super) struct Facts {
    pub host: HostFacts,
    pub memory: HostMemory,
    pub interfaces: Vec<Interface>,
    pub devices: Vec<RdmaDevice>,
    pub listens: Vec<Listen>,
    /// The configuration, the keys and the stores, as the user of the target finds them.
    pub seen: Seen,
    /// Whether the kernel encrypts, if the configuration wants that.
    pub tls: Option<Result<(), NoTls>>,
    /// The user that the target runs as.
    pub user: (u32, String),
    pub state_dir: Option<Directory>,
    pub socket_dir: Directory,
    pub systemd: SystemdFacts,
    pub socket: PathBuf,
    pub running: io::Result<Box<TargetStatus>>,
    /// The process that serves there although its control socket was removed.
    pub deaf: Option<u32>,
}

impl Facts {
    /// Reads the facts. Tries an io_uring, the ports and the stores.
    ///
    /// # Errors
    /// No runtime can be made.
    pub(super) fn read(
        root: &Path,
        path: Option<&Path>,
        config: Option<&TargetConfig>,
    ) -> anyhow::Result<Self> {
        let io_uring = IoUring::new(8).map(drop);
        let systemd = SystemdFacts::read(root, TARGET_UNIT, &[TARGET_UNIT.to_owned()]);
        let me = geteuid().as_raw();
        let socket = config
            .map_or_else(|| PathBuf::from(CONTROL_SOCKET), |config| config.control_socket.clone());
        let running = status(&socket)?;
        let deaf = running.is_err().then(|| server_without_socket(&socket)).flatten();
        let is_free = running.is_err() && deaf.is_none();
        let user = user_of(running.as_ref().ok().map(|running| running.pid).or(deaf), &systemd, me);
        let at = |path: &Path| Directory::look(path, user.0, me);
        Ok(Self {
            host: HostFacts::read(root, &io_uring, rblk_runtime::clock::synchronised()),
            memory: HostMemory::read(),
            interfaces: interfaces(root),
            devices: rdma_devices(root),
            listens: config.map(|config| listens(root, config, is_free)).unwrap_or_default(),
            seen: path.map(|path| Seen::by(user.0, path, is_free)).transpose()?.unwrap_or_default(),
            tls: config.filter(|config| wants_tls(config)).map(|_| kernel_has_tls()),
            state_dir: config.map(|config| at(&config.state_dir)),
            socket_dir: at(socket.parent().unwrap_or(Path::new("/"))),
            user,
            systemd,
            socket,
            running,
            deaf,
        })
    }
}

/// The user that runs the target. For root: the user of the running process, otherwise the user of
/// the unit. For other users: themselves.
fn user_of(running: Option<u32>, systemd: &SystemdFacts, me: u32) -> (u32, String) {
    let named = |user: u32| {
        let name = User::from_uid(user.into()).ok().flatten().map(|user| user.name);
        (user, name.unwrap_or_else(|| user.to_string()))
    };
    if me != 0 {
        return named(me);
    }
    let of_process = running.and_then(|pid| std::fs::metadata(format!("/proc/{pid}")).ok());
    let of_unit = || user_of_target().filter(|_| systemd.file.is_some());
    match of_process {
        Some(process) => named(process.uid()),
        None => of_unit().map_or_else(|| named(me), |user| (user.uid.as_raw(), user.name)),
    }
}

fn status(socket: &Path) -> anyhow::Result<io::Result<Box<TargetStatus>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(match runtime.block_on(ask(socket, Ask::Status)) {
        Ok(Response::Status(status)) => Ok(status),
        Ok(_) => Err(io::Error::other("it answers something else")),
        Err(error) => Err(error),
    })
}

/// The addresses, and whether a TCP socket can listen there now.
fn listens(root: &Path, config: &TargetConfig, is_free: bool) -> Vec<Listen> {
    let parsed = config.listen.iter().filter_map(|text| text.parse::<Address>().ok());
    let listen = |address: Address| {
        let ip = address.host.split('%').next().and_then(|host| host.parse().ok());
        let tried = ip.filter(|_| is_free && address.scheme == Scheme::Tcp);
        let refused =
            tried.and_then(|ip: IpAddr| TcpListener::bind(SocketAddr::new(ip, address.port)).err());
        let in_use = refused.as_ref().is_some_and(|e| e.kind() == io::ErrorKind::AddrInUse);
        let taken_by = in_use.then(|| tcp_listener(root, address.port)).flatten();
        Listen { address, ip, refused, taken_by }
    };
    parsed.map(listen).collect()
}

fn wants_tls(config: &TargetConfig) -> bool {
    let is_tcp = |text: &String| text.parse().is_ok_and(|a: Address| a.scheme == Scheme::Tcp);
    config.listen.iter().any(is_tcp)
        && config.transport.encrypt != Encrypt::Off
        && (config.authentication() == Auth::Required
            || config.transport.encrypt == Encrypt::Required)
}
