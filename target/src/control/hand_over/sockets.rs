//! [`Inherited`]: the descriptors that the program before this one left open, and its note.
//!
//! The descriptors stay open and inheritable until this program is ready ([`Inherited`] is
//! dropped): until then it may have to go back to the program before. Meanwhile it uses copies,
//! which do not outlive an exec.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::socket::{getsockopt, sockopt};
use rblk_config::{ConfigError, TargetConfig};

use super::HandOver;
use super::papers::{Papers, StoreLeft};
use crate::store::backing::LeftOpen;
use rblk_operate::target::left_open::VARIABLE;

/// Set when the note was taken: since then its descriptors have an owner.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The name of a control socket among the sockets that are left open.
pub(crate) fn name_of_control(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// The name of the socket of metrics and live page among these sockets.
pub(crate) fn name_of_http(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// The inheritance from the program before this one.
#[derive(Debug)]
pub struct Inherited {
    note: HandOver,
    sockets: Vec<(String, OwnedFd)>,
    // A note of form 1 has none.
    papers: Option<(Papers, File)>,
    // Why the papers cannot be used: this program cannot start, and goes back.
    fault: Option<String>,
    stores: Vec<(StoreLeft, Option<File>)>,
    back: Option<OwnedFd>,
}

impl Inherited {
    /// The inheritance from the program that became this one; `None` if this process began with
    /// this program. Only the first call gets it. Call it before the process opens any descriptor.
    ///
    /// # Errors
    /// The note cannot be understood: this program starts as if there were none.
    pub fn take() -> Result<Option<Self>, String> {
        let Ok(text) = std::env::var(VARIABLE) else { return Ok(None) };
        let fault = |error: String| format!("{VARIABLE} in the environment: {error}");
        let note = HandOver::from_text(&text, std::process::id()).map_err(fault)?;
        let note = note.filter(|_| !TAKEN.swap(true, Ordering::Relaxed));
        Ok(note.map(Self::of))
    }

    /// Whether a program left an inheritance to this process, for [`take`](Self::take). Takes
    /// nothing.
    #[must_use]
    pub fn is_there() -> bool {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        matches!(HandOver::from_text(&text, std::process::id()), Ok(Some(_)))
    }

    fn of(note: HandOver) -> Self {
        let is_socket = |what: &str| what.starts_with("socket:");
        let is_file = |what: &str| what.starts_with('/');
        let back = note.back.and_then(|number| take_open(number, is_file));
        let (papers, fault) = match note.papers.map(|number| (number, take_open(number, is_file))) {
            None => (None, None),
            Some((_, None)) => (None, Some("the papers are not open".to_owned())),
            Some((_, Some(file))) => {
                let file = File::from(file);
                match Papers::read(&file, &note.descriptors()) {
                    Ok(papers) => (Some((papers, file)), None),
                    Err(error) => {
                        // The program that this one goes back to reads the papers itself.
                        let _ = file.into_raw_fd();
                        (None, Some(error))
                    }
                }
            }
        };
        let taken = |socket: &super::Listening| {
            Some((socket.address.clone(), take_open(socket.descriptor, is_socket)?))
        };
        let sockets = note.sockets.iter().filter_map(taken).collect();
        let left = papers.iter().flat_map(|(papers, _)| papers.stores.clone());
        // A file system that was unmounted has no paths any more.
        let any = |_: &str| true;
        let stores = left.map(|left| {
            let file = take_open(left.descriptor, any).map(File::from);
            (left, file)
        });
        let stores = stores.collect();
        Self { note, sockets, papers, fault, stores, back }
    }

    /// The note of the program before this one.
    #[must_use]
    pub fn note(&self) -> &HandOver {
        &self.note
    }

    /// The configuration to start with: the judged one, or, after a failed take-over by another
    /// program, the one that ran. `None`: it is in the files.
    ///
    /// # Errors
    /// This program does not understand it.
    pub fn configuration(&self) -> Result<Option<TargetConfig>, ConfigError> {
        let Some((papers, _)) = &self.papers else { return Ok(None) };
        if self.is_back() {
            return TargetConfig::parse(&papers.ran, "the configuration that ran").map(Some);
        }
        let Some(judged) = &papers.judged else { return Ok(None) };
        let mut config = TargetConfig::parse(judged, "the configuration that was judged")?;
        if let Some(hosts) = &papers.hosts {
            config.hosts.clone_from(hosts);
        }
        Ok(Some(config))
    }

    /// The name of the target, which does not follow the name of the host any more.
    pub(crate) fn target_name(&self) -> Option<&str> {
        self.papers.as_ref().map(|(papers, _)| papers.name.as_str())
    }

    /// The records of the volumes, as texts.
    pub(crate) fn records(&self) -> &[String] {
        self.papers.as_ref().map_or(&[], |(papers, _)| &papers.records)
    }

    /// Whether this program is back after another one could not take its place.
    pub(crate) fn is_back(&self) -> bool {
        self.note.failed.is_some()
    }

    /// Copies of the stores that are left open, by volume. Each is checked against the note.
    ///
    /// # Errors
    /// The volume of a store that differs from the note. Or the papers cannot be used.
    pub(crate) fn stores(&self) -> Result<HashMap<String, LeftOpen>, String> {
        if let Some(fault) = &self.fault {
            return Err(format!("the files that the program before handed over: {fault}"));
        }
        let copied = |(left, file): &(StoreLeft, Option<File>)| {
            let file = copy_of(left, file.as_ref()).map_err(|why| {
                format!(
                    "volume `{}`: descriptor {} is to be {}, and {why}",
                    left.volume,
                    left.descriptor,
                    left.path.display()
                )
            })?;
            Ok((left.volume.clone(), LeftOpen { file, size_bytes: left.size_bytes }))
        };
        self.stores.iter().map(copied).collect()
    }

    /// A copy of the socket that listens at an address, if there is one that still listens.
    #[must_use]
    pub(crate) fn listener(&self, address: &str) -> Option<TcpListener> {
        self.socket(address).map(TcpListener::from)
    }

    /// A copy of the control socket, if it still listens.
    #[must_use]
    pub(crate) fn control(&self, path: &Path) -> Option<UnixListener> {
        self.socket(&name_of_control(path)).map(UnixListener::from)
    }

    /// A copy of the socket of metrics and live page, if it still listens.
    #[must_use]
    pub(crate) fn http(&self, address: SocketAddr) -> Option<TcpListener> {
        self.listener(&name_of_http(address))
    }

    fn socket(&self, name: &str) -> Option<OwnedFd> {
        let (_, socket) = self.sockets.iter().find(|(its, _)| its == name)?;
        let listens = getsockopt(socket, sockopt::AcceptConn).unwrap_or(false);
        socket.try_clone().ok().filter(|_| listens)
    }

    /// The file of the program to go back to.
    pub(super) fn back(&self) -> Option<&OwnedFd> {
        self.back.as_ref()
    }

    /// Whether there is a program to go back to.
    #[must_use]
    pub fn can_go_back(&self) -> bool {
        self.back.is_some()
    }
}

/// A copy of a store that is left open, checked against the note.
fn copy_of(left: &StoreLeft, file: Option<&File>) -> Result<File, String> {
    let file = file.ok_or("it is not open")?;
    let said = |error: io::Error| error.to_string();
    let seen = file.metadata().map_err(said)?;
    let kind = seen.file_type();
    let is_it = match left.device {
        0 => kind.is_file() && (seen.dev(), seen.ino()) == left.inode,
        device => kind.is_block_device() && seen.rdev() == device,
    };
    if !is_it {
        return Err("it is something else".to_owned());
    }
    file.try_clone().map_err(said)
}

/// A descriptor that the program before left open under this number, if it is of the right kind.
#[allow(unsafe_code)]
fn take_open(number: i32, is_right: impl Fn(&str) -> bool) -> Option<OwnedFd> {
    let what = fs::read_link(Path::new("/proc/self/fd").join(number.to_string())).ok()?;
    if number <= 2 || !is_right(&what.to_string_lossy()) {
        // The caller makes such a listener anew.
        return None;
    }
    // SAFETY: the descriptor is open. The note and its papers name its number once, which was
    // checked, and it is taken once, before this program opens anything that it keeps: so it was
    // open when this program began, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    use rblk_config::HostConfig;

    use super::*;
    use crate::control::hand_over::Listening;

    fn note(descriptor: i32) -> HandOver {
        let sockets = vec![Listening { address: "tcp://x:1".to_owned(), descriptor }];
        HandOver { sockets, ..HandOver::default() }
    }

    #[test]
    fn a_socket_that_listens_is_taken_over() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap();
        let inherited = Inherited::of(note(socket.into_raw_fd()));
        assert!(inherited.listener("tcp://y:1").is_none());
        let copy = inherited.listener("tcp://x:1").expect("it listens");
        assert_eq!(copy.local_addr().unwrap(), port);
        drop(copy);
        assert!(std::net::TcpStream::connect(port).is_ok(), "only a copy was closed");
        drop(inherited);
        assert!(std::net::TcpStream::connect(port).is_err());
    }

    /// The inheritance of a program after one that left this store open under that number.
    fn left(store: StoreLeft) -> Inherited {
        let papers = Papers {
            records: Vec::new(),
            name: "store1".to_owned(),
            ran: "max_io = '2MiB'\n".to_owned(),
            judged: Some("max_io = '4MiB'\n".to_owned()),
            hosts: Some(vec![HostConfig::new("db1".to_owned(), Vec::new(), Vec::new())]),
            stores: vec![store],
        };
        let papers = Some(papers.seal().unwrap().into_raw_fd());
        Inherited::of(HandOver { form: 2, papers, ..HandOver::default() })
    }

    fn store(path: &Path) -> StoreLeft {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let seen = file.metadata().unwrap();
        StoreLeft {
            volume: "v".to_owned(),
            path: path.to_owned(),
            descriptor: file.into_raw_fd(),
            inode: (seen.dev(), seen.ino()),
            device: 0,
            size_bytes: 8,
        }
    }

    #[test]
    fn a_store_goes_on_if_it_matches_the_note() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("v"), directory.path().join("other"));
        fs::write(&path, "its data").unwrap();
        fs::write(&other, "another!").unwrap();
        let there = store(&path);
        fs::rename(&other, &path).unwrap();
        let inherited = left(there);
        let mut stores = inherited.stores().unwrap();
        let taken = stores.remove("v").expect("the volume");
        let text = io::read_to_string(&taken.file).unwrap();
        assert_eq!((text.as_str(), taken.size_bytes), ("its data", 8));
        assert!(fcntl_of(&taken.file).contains(FdFlag::FD_CLOEXEC), "a copy ends with an exec");

        let noted = StoreLeft { inode: (1, 2), ..store(&path) };
        let error = left(noted).stores().unwrap_err();
        assert!(error.contains("volume `v`") && error.contains("something else"), "{error}");
        let noted = StoreLeft { device: 7, ..store(&path) };
        assert!(left(noted).stores().unwrap_err().contains("something else"));
        let noted = StoreLeft { descriptor: 1 << 20, ..store(&path) };
        assert!(left(noted).stores().unwrap_err().contains("is not open"));
        let noted = StoreLeft { descriptor: 1, ..store(&path) };
        assert!(left(noted).stores().unwrap_err().contains("impossible descriptors"));
    }

    fn fcntl_of(file: &File) -> FdFlag {
        FdFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFD).unwrap())
    }

    #[test]
    fn a_new_program_starts_with_the_judged_configuration_and_an_old_one_with_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v");
        fs::write(&path, "its data").unwrap();
        let mut inherited = left(store(&path));
        let config = inherited.configuration().unwrap().unwrap();
        assert_eq!((config.max_io.0, config.hosts.len()), (4 << 20, 1), "hosts in force");
        inherited.note.failed = Some("it cannot start".to_owned());
        let config = inherited.configuration().unwrap().unwrap();
        assert_eq!((config.max_io.0, config.hosts.len()), (2 << 20, 0));
        assert_eq!(inherited.target_name(), Some("store1"));
        // From the version before: the configuration is in the files.
        let before = Inherited::of(HandOver { form: 1, ..HandOver::default() });
        assert_eq!((before.configuration().unwrap(), before.target_name()), (None, None));
        assert!(before.stores().unwrap().is_empty());
    }

    #[test]
    fn files_that_are_no_papers_are_refused() {
        let other = File::open("/dev/null").unwrap().into_raw_fd();
        let of = |papers| Inherited::of(HandOver { papers: Some(papers), ..HandOver::default() });
        assert!(of(other).stores().is_err(), "so this program goes back");
        assert!(of(1 << 20).stores().unwrap_err().contains("not open"));
    }

    #[test]
    fn a_socket_that_does_not_listen_is_not_taken() {
        let socket = nix::sys::socket::socket(
            nix::sys::socket::AddressFamily::Inet,
            nix::sys::socket::SockType::Stream,
            nix::sys::socket::SockFlag::empty(),
            None,
        )
        .unwrap();
        let inherited = Inherited::of(note(socket.into_raw_fd()));
        assert!(inherited.listener("tcp://x:1").is_none(), "it only is a socket");
        let file = File::open("/dev/null").unwrap().into_raw_fd();
        assert!(Inherited::of(note(file)).sockets.is_empty(), "it is a file");
        assert!(Inherited::of(note(1 << 20)).sockets.is_empty(), "it is not open");
    }
}
