//! The identity of this host to targets.

use std::path::Path;

use rblk_protocol::{HostId, Name};
use sha2::{Digest, Sha256};

use crate::session::HostIdentity;

/// Where an administrator may put an id: 32 hexadecimal digits, dashes allowed.
pub(crate) const HOST_ID_FILE: &str = "/etc/rblk/host-id";

/// This host's identity: `/etc/rblk/host-id`, else derived from the machine id, else from the
/// host's name. The machine id itself is a secret (machine-id(5)), so only a hash of it leaves the
/// host.
#[must_use]
pub fn host_identity(name: Option<&str>) -> HostIdentity {
    let host =
        nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok()).unwrap_or_default();
    let id = read_id(Path::new(HOST_ID_FILE)).unwrap_or_else(|| {
        let seed = std::fs::read_to_string("/etc/machine-id").ok().filter(|t| t.trim().len() >= 32);
        hashed(seed.as_deref().map_or(host.as_str(), str::trim))
    });
    let clean: String = name
        .unwrap_or(&host)
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '_' })
        .take(64)
        .collect();
    let name = Name::new(&clean)
        .or_else(|_| Name::new("host"))
        .unwrap_or_else(|_| unreachable!("a fixed name"));
    HostIdentity { id, name }
}

fn read_id(path: &Path) -> Option<HostId> {
    let text = std::fs::read_to_string(path).ok()?;
    let digits: Vec<u8> = text
        .trim()
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect::<Option<_>>()?;
    if digits.len() != 32 {
        return None;
    }
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    let id = HostId(id);
    (!id.is_none()).then_some(id)
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
    fn an_id_file_is_read_or_ignored() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "00112233-4455-6677-8899-aabbccddeeff\n").unwrap();
        assert_eq!(read_id(file.path()).unwrap().to_string(), "00112233445566778899aabbccddeeff");
        for bad in ["", "xyz", "0011", &"0".repeat(32)] {
            std::fs::write(file.path(), bad).unwrap();
            assert_eq!(read_id(file.path()), None, "{bad:?}");
        }
        assert_ne!(hashed("a"), hashed("b"));
        assert_eq!(host_identity(Some("a b/ü")).name.as_str(), "a_b__");
    }
}
