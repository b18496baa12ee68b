//! The initramfs: busybox, the init script and the modules that are loaded at boot.
//!
//! The archive is in the kernel's `newc` format, uncompressed: unpacking costs an emulated CPU more
//! than reading. The kernel takes several archives after one another, so the part that never
//! changes is cached ([`base`]) and a run appends its own small one ([`Archive`]).

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::cache::Cache;
use super::kernel::Kernel;
use super::modules::Table;

/// The first process of the guest.
const INIT: &str = include_str!("init.sh");

/// What is needed to reach the root and the disk, and what every lab has.
const BOOT_MODULES: &[&str] = &[
    "9p",
    "9pnet_virtio",
    "virtio_blk",
    "ext4",
    "configfs",
    "loop",
    "ublk_drv",
    "dummy",
    "tls",
    "chacha20poly1305",
    "chacha|chacha_generic",
];

/// What `--no-rdma` leaves out.
const RDMA_MODULES: &[&str] = &["ib_uverbs", "rdma_ucm", "rdma_rxe"];

/// What a guest needs that a test boots: a disk on a PCI bus.
const GUEST_MODULES: &[&str] = &["virtio_pci", "virtio_blk", "ext4"];

const BUSYBOX: &str = "/bin/busybox";

/// The cached archive for `kernel`, made if it is missing or of another version of this program.
pub(crate) fn base(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    let busybox = fs::read(BUSYBOX).with_context(|| format!("cannot read {BUSYBOX}"))?;
    let mut hash = Sha256::new();
    hash.update(INIT);
    hash.update([BOOT_MODULES, RDMA_MODULES].concat().join(" "));
    hash.update(&busybox);
    let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let path = kernel.dir.join(format!("initramfs-{hash}.cpio"));
    if !path.exists() {
        cache.write(&path, &make(kernel, &busybox)?)?;
    }
    Ok(path)
}

fn make(kernel: &Kernel, busybox: &[u8]) -> Result<Vec<u8>> {
    let modules = kernel.modules();
    let table = table(&modules)?;
    let mut archive = Archive::new();
    for dir in ["bin", "proc", "sys", "dev", "host", "newroot", "modules", "lab"] {
        archive.directory(dir);
    }
    archive.file("bin/busybox", 0o755, busybox);
    archive.file("init", 0o755, INIT.as_bytes());
    let boot = table.load_order(BOOT_MODULES)?;
    let mut rdma = table.load_order(RDMA_MODULES)?;
    rdma.retain(|path| !boot.contains(path));
    for (list, paths) in [("boot", &boot), ("rdma", &rdma)] {
        let order = archive.modules(&modules, paths)?;
        archive.file(&format!("modules/{list}.order"), 0o644, order.as_bytes());
    }
    Ok(archive.finish())
}

/// Which modules need which others.
fn table(modules: &Path) -> Result<Table> {
    let read = |name: &str| {
        let path = modules.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    Ok(Table::parse(&read("modules.dep")?, &read("modules.builtin")?))
}

/// An archive with busybox, a script that is the first process, and the modules that it may load
/// one after the other, in `modules/order`.
pub(crate) fn of_guest(kernel: &Kernel, init: &[u8]) -> Result<Vec<u8>> {
    let busybox = fs::read(BUSYBOX).with_context(|| format!("cannot read {BUSYBOX}"))?;
    let modules = kernel.modules();
    let order = table(&modules)?.load_order(GUEST_MODULES)?;
    let mut archive = Archive::new();
    for dir in ["bin", "proc", "sys", "dev", "mnt", "modules"] {
        archive.directory(dir);
    }
    archive.file("bin/busybox", 0o755, &busybox);
    archive.file("init", 0o755, init);
    let list = archive.modules(&modules, &order)?;
    archive.file("modules/order", 0o644, list.as_bytes());
    Ok(archive.finish())
}

/// A module's plain bytes: an emulated CPU would take seconds to unpack them all.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    match path.extension().and_then(std::ffi::OsStr::to_str) {
        Some("ko") => fs::read(path).with_context(|| format!("cannot read {}", path.display())),
        Some("xz") => {
            let output = Command::new("xz")
                .arg("-dc")
                .arg(path)
                .output()
                .context("cannot run xz; install xz-utils")?;
            if !output.status.success() {
                bail!(
                    "xz cannot unpack {}: {}",
                    path.display(),
                    String::from_utf8_lossy(&output.stderr).trim_end()
                );
            }
            Ok(output.stdout)
        }
        _ => bail!("the module {} is compressed in a way the lab does not know", path.display()),
    }
}

/// A cpio archive in `newc` format, in memory.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// An archive without entries.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a directory.
    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    /// Adds a regular file.
    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, 0o100_000 | mode, content);
    }

    /// Adds modules. Returns their names, a line each.
    fn modules(&mut self, directory: &Path, paths: &[String]) -> Result<String> {
        let mut order = String::new();
        for path in paths {
            let name = path.rsplit('/').next().unwrap_or(path).trim_end_matches(".xz");
            self.file(&format!("modules/{name}"), 0o644, &read_module(&directory.join(path))?);
            order.push_str(name);
            order.push('\n');
        }
        Ok(order)
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        // inode, mode, uid, gid, links, mtime, size, four device numbers, name size, checksum
        let (inode, size, name_size) = (self.entries, content.len(), name.len() + 1);
        self.bytes.extend_from_slice(
            format!(
                "070701{inode:08x}{mode:08x}{z}{z}{one}{z}{size:08x}{z}{z}{z}{z}{name_size:08x}{z}",
                z = "00000000",
                one = "00000001"
            )
            .as_bytes(),
        );
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Writes the archives one after another to `path`, as the kernel wants them.
pub(crate) fn join(base: &Path, own: &[u8], path: &Path) -> Result<()> {
    let mut bytes = Vec::new();
    fs::File::open(base)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .with_context(|| format!("cannot read {}", base.display()))?;
    bytes.extend_from_slice(own);
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_contents_are_aligned() {
        let mut archive = Archive::new();
        archive.directory("lab");
        archive.file("lab/x", 0o755, b"abcde");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let headers: Vec<usize> =
            bytes.windows(6).enumerate().filter(|(_, w)| *w == b"070701").map(|(i, _)| i).collect();
        assert_eq!(headers.len(), 3);
        assert!(headers.iter().all(|at| at % 4 == 0));
        // mode, then size, of the file
        assert_eq!(&bytes[headers[1] + 14..headers[1] + 22], b"000081ed");
        assert_eq!(&bytes[headers[1] + 54..headers[1] + 62], b"00000005");
    }
}
