//! The identity of this host to targets.

use std::io;
use std::path::{Path, PathBuf};

use rblk_protocol::{HostId, Name};
use sha2::{Digest, Sha256};

use super::session::HostIdentity;

/// The file for an administrator's id: 32 hexadecimal digits, dashes allowed.
pub(crate) const HOST_ID_FILE: &str = "/etc/rblk/host-id";

/// A file without a valid id. A changed id would make this host a stranger to the volumes that it
/// holds.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {problem}. Write 32 hexadecimal digits, as `uuidgen` prints them, or remove the file: then the id comes \
     from /etc/machine-id", path.display()
)]
pub struct BadHostId {
    path: PathBuf,
    problem: String,
}

/// This host's identity: `/etc/rblk/host-id`, else derived from the machine id, else from the
/// host's name. The machine id itself is a secret (machine-id(5)), so only a hash of it leaves the
/// host.
///
/// # Errors
/// `/etc/rblk/host-id` exists and has no valid id.
pub fn host_identity(name: Option<&str>) -> Result<HostIdentity, BadHostId> {
    let id = read_id(Path::new(HOST_ID_FILE))?.unwrap_or_else(|| {
        let seed = std::fs::read_to_string("/etc/machine-id").ok().filter(|t| t.trim().len() >= 32);
        hashed(seed.as_deref().map_or(&*system_name(), str::trim))
    });
    Ok(HostIdentity { id, name: host_name(name) })
}

/// A unique id for a program, which is neither a mount of this host nor another program.
///
/// # Errors
/// The system has no random numbers.
pub(crate) fn own_id() -> io::Result<HostId> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(io::Error::other)?;
    // Zeros are no id.
    id[0] |= 1;
    Ok(HostId(id))
}

/// The id of the disk of a guest, derived from its socket: unchanged after a crash, and different
/// from every mount's.
pub(crate) fn id_of_guest(host: HostId, socket: &Path) -> HostId {
    let mut hash = Sha256::new();
    hash.update(b"rblk guest");
    hash.update(host.0);
    hash.update(socket.as_os_str().as_encoded_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hash.finalize()[..16]);
    // Zeros are no id.
    id[0] |= 1;
    HostId(id)
}

/// This host's name to targets: `name`, else that of the system.
pub(crate) fn host_name(name: Option<&str>) -> Name {
    name_of(name.unwrap_or(&system_name()))
}

/// A name of a host as targets take it. The kernel's name for an unnamed host is `(none)`.
fn name_of(host: &str) -> Name {
    let clean: String = host
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '_' })
        .take(64)
        .collect();
    Some(clean)
        .filter(|_| host != "(none)")
        .and_then(|clean| Name::new(&clean).ok())
        .or_else(|| Name::new("host").ok())
        .unwrap_or_else(|| unreachable!("a fixed name"))
}

fn system_name() -> String {
    nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok()).unwrap_or_default()
}

/// The id of a file; `None` if there is no file.
fn read_id(path: &Path) -> Result<Option<HostId>, BadHostId> {
    let bad = |problem: String| BadHostId { path: path.to_owned(), problem };
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|error| bad(format!("cannot be read ({error})")))?,
    };
    let digits: Option<Vec<u8>> = text
        .trim()
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect();
    let digits = digits.ok_or_else(|| bad("it is not an id".to_owned()))?;
    if digits.len() != 32 {
        return Err(bad(format!("{} hexadecimal digits are not an id", digits.len())));
    }
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    let id = HostId(id);
    if id.is_none() { Err(bad("an id is not all zeros".to_owned())) } else { Ok(Some(id)) }
}

fn hashed(seed: &str) -> HostId {
    let mut hash = Sha256::new();
    hash.update("rblk host id\0");
    hash.update(seed);
    let digest = hash.finalize();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    HostId(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_file_has_an_id_or_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "00112233-4455-6677-8899-aabbccddeeff\n").unwrap();
        let id = read_id(file.path()).unwrap().unwrap();
        assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
        assert_eq!(read_id(Path::new("/no/such/file")).unwrap(), None);
        for (bad, problem) in [
            ("", "0 hexadecimal digits"),
            ("xyz", "not an id"),
            ("0011", "4 hexadecimal digits"),
            (&*"0".repeat(32), "all zeros"),
        ] {
            std::fs::write(file.path(), bad).unwrap();
            let text = read_id(file.path()).unwrap_err().to_string();
            for piece in
                [problem, file.path().to_str().unwrap(), "32 hexadecimal digits", "remove the file"]
            {
                assert!(text.contains(piece), "{bad:?}: {text}");
            }
        }
        let text = read_id(Path::new("/")).unwrap_err().to_string();
        assert!(text.starts_with("/: cannot be read"), "{text}");
        assert_ne!(hashed("a"), hashed("b"));
        let (one, other) = (own_id().unwrap(), own_id().unwrap());
        assert!(one != other && !one.is_none());
        assert_eq!(host_name(Some("a b/ü")).as_str(), "a_b__");
        for nameless in ["", "(none)", ".", "-x"] {
            assert_eq!(name_of(nameless).as_str(), "host", "{nameless}");
        }
    }
}
