//! [`Facts`]: what there is to know of this host, read once.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use io_uring::IoUring;
use nix::unistd::{User, geteuid};
use rblk_config::doctor::{
    Directory, HostFacts, Interface, RdmaDevice, SystemdFacts, interfaces, rdma_devices,
    tcp_listener,
};
use rblk_config::key_file::{self, KeyFileError, Side};
use rblk_config::{Auth, Backing, Encrypt, TargetConfig};
use rblk_fabric::soft::tls::{NoTls, kernel_has_tls};
use rblk_fabric::{Address, Scheme};

use crate::args::CONTROL_SOCKET;
use crate::control::socket::{Ask, Response, ask};
use crate::control::status::TargetStatus;
use crate::demand::Host;
use crate::exports::open_volumes;
use crate::serve::target_name;

/// The unit of the target.
pub(super) const UNIT: &str = "rblk-target.service";

/// An address that the target listens on.
#[derive(Debug)]
pub(super) struct Listen {
    pub address: Address,
    /// Its IP address; `None` for a name.
    pub ip: Option<IpAddr>,
    /// Why a TCP socket cannot listen there. `None` where that was not tried.
    pub refused: Option<io::Error>,
    /// The process that has the port, where one has it.
    pub taken_by: Option<String>,
}

/// A volume on a file or device that was opened, or why it cannot be.
#[derive(Debug)]
pub(super) struct Store {
    pub volume: String,
    pub error: Option<String>,
}

/// What there is to know of this host.
#[derive(Debug)]
pub(super) struct Facts {
    pub host: HostFacts,
    pub memory: Host,
    pub interfaces: Vec<Interface>,
    pub devices: Vec<RdmaDevice>,
    pub listens: Vec<Listen>,
    /// The key files that the configuration needs.
    pub keys: Vec<(PathBuf, Option<KeyFileError>)>,
    /// Whether the kernel encrypts, where that is wanted.
    pub tls: Option<Result<(), NoTls>>,
    /// The user that the target runs as.
    pub user: (u32, String),
    pub state_dir: Option<Directory>,
    pub socket_dir: Directory,
    pub systemd: SystemdFacts,
    pub socket: PathBuf,
    pub running: io::Result<Box<TargetStatus>>,
    /// Not looked at while a target runs: it has them.
    pub stores: Vec<Store>,
}

impl Facts {
    /// Reads them. Tries an io_uring, the ports and the stores.
    ///
    /// # Errors
    /// No runtime can be had.
    pub(super) fn read(root: &Path, config: Option<&TargetConfig>) -> anyhow::Result<Self> {
        let io_uring = IoUring::new(8).map(drop);
        let systemd = SystemdFacts::read(root, UNIT, &[UNIT.to_owned()]);
        let me = geteuid().as_raw();
        let user = user_of(&systemd, me);
        let socket = config
            .map_or_else(|| PathBuf::from(CONTROL_SOCKET), |config| config.control_socket.clone());
        let running = status(&socket)?;
        let is_free = running.is_err();
        let at = |path: &Path| Directory::look(path, user.0, me);
        Ok(Self {
            host: HostFacts::read(root, &io_uring, rblk_fabric::clock::synchronised()),
            memory: Host::read(),
            interfaces: interfaces(root),
            devices: rdma_devices(root),
            listens: config.map(|config| listens(root, config, is_free)).unwrap_or_default(),
            keys: config.map(keys).unwrap_or_default(),
            tls: config.filter(|config| wants_tls(config)).map(|_| kernel_has_tls()),
            state_dir: config.map(|config| at(&config.state_dir)),
            socket_dir: at(socket.parent().unwrap_or(Path::new("/"))),
            stores: config.filter(|_| is_free).map(stores).unwrap_or_default(),
            user,
            systemd,
            socket,
            running,
        })
    }
}

/// Who runs the target: the user of the unit, if root asks, else who asks.
fn user_of(systemd: &SystemdFacts, me: u32) -> (u32, String) {
    let of_unit = systemd.user.as_deref().filter(|_| me == 0);
    if let Some(Ok(Some(user))) = of_unit.map(User::from_name) {
        return (user.uid.as_raw(), user.name);
    }
    let name = User::from_uid(me.into()).ok().flatten().map(|user| user.name);
    (me, name.unwrap_or_else(|| me.to_string()))
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

fn keys(config: &TargetConfig) -> Vec<(PathBuf, Option<KeyFileError>)> {
    if config.authentication() == Auth::None {
        return Vec::new();
    }
    let files = std::iter::once(&config.key_file).chain(&config.key_file_next);
    files.map(|file| (file.clone(), key_file::read(file, Side::Target).err())).collect()
}

fn wants_tls(config: &TargetConfig) -> bool {
    let is_tcp = |text: &String| text.parse().is_ok_and(|a: Address| a.scheme == Scheme::Tcp);
    config.listen.iter().any(is_tcp)
        && config.encrypt != Encrypt::Off
        && (config.authentication() == Auth::Required || config.encrypt == Encrypt::Required)
}

/// Opens each volume that has a store, and closes it again.
fn stores(config: &TargetConfig) -> Vec<Store> {
    let Ok(name) = target_name(config) else { return Vec::new() };
    let on_files =
        config.volumes.iter().filter(|volume| matches!(volume.backing(), Ok(Backing::File { .. })));
    let open = |volume: &rblk_config::VolumeConfig| {
        let alone = TargetConfig { volumes: vec![volume.clone()], ..config.clone() };
        let error = open_volumes(&alone, &name).err();
        Store {
            volume: volume.name.clone(),
            error: error.map(|error| error.root_cause().to_string()),
        }
    };
    on_files.map(open).collect()
}
