//! Files of secret keys: [`read`] and [`create`].
//!
//! A key file is a regular file, at most 4 KiB, that only its owner may read. The owner is the user
//! of the program, or root. A file that others may read is refused: the key may be known to them.
//! Root may also read a key of a target that belongs to the user of the target's unit, as commands
//! that root runs do.
//! Neither function follows a symbolic link as the last part of a path.
//!
//! `credential:NAME` is the credential NAME of systemd (`LoadCredential=` in systemd.exec(5)), a
//! file of the directory `$CREDENTIALS_DIRECTORY`. For a service with a user of its own, systemd
//! lets that user in by an access control list. The list shows as mode 0440, so a file of that
//! directory may be readable for its group.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc::{ELOOP, O_NOFOLLOW, O_NONBLOCK};
use rblk_protocol::auth::{KeyError, PublicKey, SecretKey};
use zeroize::Zeroizing;

use crate::Exit;
use crate::quoted::Quoted;
use crate::unit_file::user_of_target;

/// The key file of a target, unless the configuration names another one.
pub const TARGET_KEY_FILE: &str = "/etc/rblk/target.key";

/// The key file of a host that mounts, unless the configuration names another one.
pub const HOST_KEY_FILE: &str = "/etc/rblk/host.key";

/// The prefix of a credential's name.
pub(crate) const CREDENTIAL: &str = "credential:";

/// Most bytes of a key file.
const FILE_MAX_BYTES: usize = 4096;

/// Permissions of group and others.
const OTHERS: u32 = 0o077;

/// Permission of the group to read, which shows an access control list on a credential.
const GROUP_READS: u32 = 0o040;

/// The end that the key belongs to. Messages name the program that makes the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Of a target.
    Target,
    /// Of a host that mounts.
    Initiator,
}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct KeyFileError {
    path: PathBuf,
    problem: Problem,
}

#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("there is no such key file; make it with `{0}`")]
    Missing(String),
    #[error(
        "the system does not let this program read it; run as root, or as the owner of the file"
    )]
    Denied,
    #[error("cannot be opened: {0}")]
    Open(io::Error),
    #[error("a symbolic link; name the key file itself, so that nobody can exchange it")]
    Link,
    #[error("not a regular file; name a file that `key new` made")]
    NotAFile,
    #[error(
        "its mode is {mode:04o}, so others may read the secret key; run `chmod 600 {}`. If others may have read it, \
         make a new key instead", path.display()
    )]
    Readable { mode: u32, path: PathBuf },
    #[error(
        "its owner is user {owner}, and this program runs as user {user}; run `chown {to} {}`", path.display()
    )]
    Owner { owner: u32, user: u32, to: String, path: PathBuf },
    #[error("larger than 4KiB, so it is not a key file; name a file that `key new` made")]
    Large,
    #[error("cannot be read: {0}")]
    Read(io::Error),
    #[error("not a key file: {0}; name a file that `key new` made, or restore it from the backup")]
    Content(KeyError),
    #[error(
        "not a key file: not text; name a file that `key new` made, or restore it from the backup"
    )]
    NotText,
    #[error(
        "$CREDENTIALS_DIRECTORY is not set; only a service whose unit has `LoadCredential={0}:PATH` has this credential"
    )]
    NoCredentials(String),
    #[error("a credential of systemd is made by its unit; name a file")]
    MakeCredential,
    #[error(
        "there is a file already, and nothing was changed; `key show` prints its public key. A new key is made \
         beside it with --file"
    )]
    Exists,
    #[error("cannot be made: {0}")]
    Create(io::Error),
    #[error("no key can be made: {0}")]
    Generate(KeyError),
}

impl KeyFileError {
    /// The exit code of a program that stops for this.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match &self.problem {
            Problem::Denied => Exit::NotPermitted,
            Problem::Create(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Exit::NotPermitted
            }
            Problem::Exists => Exit::AlreadyThere,
            Problem::Generate(_) | Problem::Create(_) | Problem::Read(_) => Exit::Failure,
            _ => Exit::Usage,
        }
    }

    /// The cause, without the path and the fix.
    #[must_use]
    pub fn brief(&self) -> String {
        match &self.problem {
            Problem::Missing(_) => "no such file".to_owned(),
            Problem::Readable { mode, .. } => {
                format!("mode {mode:04o}, so others may read the secret key")
            }
            Problem::Owner { owner, user, .. } => {
                format!("its owner is user {owner}, and this program runs as user {user}")
            }
            problem => problem.to_string(),
        }
    }

    /// The command that mends it, where one does.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        match &self.problem {
            Problem::Missing(command) => Some(command.clone()),
            Problem::Readable { path, .. } => Some(format!("chmod 600 {}", word(path))),
            Problem::Owner { to, path, .. } => Some(format!("chown {to} {}", word(path))),
            _ => None,
        }
    }

    /// The system refused it to this user.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self.problem, Problem::Denied)
    }

    /// Whether the file is not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self.problem, Problem::Missing(_))
    }
}

/// Reads a key: of a path, or of `credential:NAME`.
///
/// # Errors
/// The file is missing, others may read it, or it is no key file.
pub fn read(path: &Path, side: Side) -> Result<SecretKey, KeyFileError> {
    let credentials = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
    read_where(path, credentials.as_deref(), side)
        .map_err(|problem| KeyFileError { path: path.to_owned(), problem })
}

/// Makes a new key and its file, with mode 0600. When this returns, the file is durable. The
/// directory is made if it is absent. A file that is there stays as it is.
///
/// # Errors
/// There is a file already, or the system's.
pub fn create(path: &Path) -> Result<PublicKey, KeyFileError> {
    let fail = |problem| KeyFileError { path: path.to_owned(), problem };
    if credential(path).is_some() {
        return Err(fail(Problem::MakeCredential));
    }
    let key = SecretKey::generate().map_err(|error| fail(Problem::Generate(error)))?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.map_err(|error| fail(Problem::Create(error)))?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).custom_flags(O_NOFOLLOW);
    let file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => fail(Problem::Exists),
        _ => fail(Problem::Create(error)),
    })?;
    if let Err(error) = fill(file, &key, directory) {
        // This call made the file, and half of a key is of no use.
        let _ = fs::remove_file(path);
        return Err(fail(Problem::Create(error)));
    }
    Ok(key.public())
}

/// NAME of `credential:NAME`.
#[must_use]
pub fn credential(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(CREDENTIAL)
}

fn fill(mut file: File, key: &SecretKey, directory: &Path) -> io::Result<()> {
    file.write_all(key.file_text().as_bytes())?;
    file.sync_all()?;
    File::open(directory)?.sync_all()
}

/// Reads a key where systemd keeps credentials in that directory.
fn read_where(path: &Path, credentials: Option<&Path>, side: Side) -> Result<SecretKey, Problem> {
    let place = match (credential(path), credentials) {
        (None, _) => path.to_owned(),
        (Some(name), Some(directory)) => directory.join(name),
        (Some(name), None) => return Err(Problem::NoCredentials(name.to_owned())),
    };
    let is_credential = credentials.is_some() && place.parent() == credentials;
    let shown_by_list = if is_credential { GROUP_READS } else { 0 };
    read_at(&place, OTHERS & !shown_by_list, side)
}

fn read_at(path: &Path, forbidden: u32, side: Side) -> Result<SecretKey, Problem> {
    let mut options = OpenOptions::new();
    // The open of a pipe would wait for a writer.
    options.read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK);
    let file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Problem::Missing(command(path, side)),
        io::ErrorKind::PermissionDenied => Problem::Denied,
        _ if error.raw_os_error() == Some(ELOOP) => Problem::Link,
        _ => Problem::Open(error),
    })?;
    // The metadata of the open file, so that no other process exchanges the file in between.
    let metadata = file.metadata().map_err(Problem::Open)?;
    if !metadata.is_file() {
        return Err(Problem::NotAFile);
    }
    let mode = metadata.mode() & 0o7777;
    if mode & forbidden != 0 {
        return Err(Problem::Readable { mode, path: path.to_owned() });
    }
    let user = nix::unistd::geteuid().as_raw();
    let owner = metadata.uid();
    if owner != user && owner != 0 {
        let service = (user == 0 && side == Side::Target).then(user_of_target).flatten();
        if service.as_ref().is_none_or(|service| service.uid.as_raw() != owner) {
            let to = service.map_or_else(|| user.to_string(), |service| service.name);
            return Err(Problem::Owner { owner, user, to, path: path.to_owned() });
        }
    }
    // One piece of memory, which is cleared. A buffer that grows would leave copies behind.
    let mut bytes = Zeroizing::new([0; FILE_MAX_BYTES + 1]);
    let len = fill_from(file, bytes.as_mut_slice()).map_err(Problem::Read)?;
    if len > FILE_MAX_BYTES {
        return Err(Problem::Large);
    }
    let text = std::str::from_utf8(&bytes[..len]).map_err(|_| Problem::NotText)?;
    SecretKey::from_file_text(text).map_err(Problem::Content)
}

/// Reads until the end of the file, or until the buffer is full.
fn fill_from(mut file: File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match file.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// A path as a word of a command.
fn word(path: &Path) -> String {
    Quoted(&path.to_string_lossy()).to_string()
}

/// The command that makes a key file.
fn command(path: &Path, side: Side) -> String {
    let (program, usual) = match side {
        Side::Target => ("rblk-target", TARGET_KEY_FILE),
        Side::Initiator => ("rblk-initiator", HOST_KEY_FILE),
    };
    match path == Path::new(usual) {
        true => format!("{program} key new"),
        false => format!("{program} key new --file {}", word(path)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_credential_of_systemd_may_have_an_access_list() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("target.key");
        let public = create(&path).unwrap();
        let read = |name: &str, credentials: Option<&Path>| {
            let key = read_where(Path::new(name), credentials, Side::Target);
            key.map(|key| key.public()).map_err(|problem| problem.to_string())
        };
        let here = Some(directory.path());
        let named = path.to_str().unwrap();
        let mode = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(0o440);
        assert_eq!(read("credential:target.key", here), Ok(public));
        assert_eq!(read(named, here), Ok(public));
        // Elsewhere a group that may read is a reason to refuse.
        assert!(read(named, None).unwrap_err().contains("its mode is 0440"));
        let elsewhere = Some(Path::new("/run/credentials/x"));
        assert!(read(named, elsewhere).unwrap_err().contains("its mode is 0440"));
        for open in [0o444, 0o460, 0o441] {
            mode(open);
            assert!(read("credential:target.key", here).unwrap_err().contains("its mode is"));
        }
        let error = read("credential:target.key", None).unwrap_err();
        assert!(error.contains("`LoadCredential=target.key:PATH`"), "{error}");
        assert!(read("credential:none.key", here).unwrap_err().contains("no such key file"));
    }
}
