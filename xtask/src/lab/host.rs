//! The Debian packages that the lab needs on this machine, and why.
//!
//! The guest has this machine's files as its root, so what a command needs inside the guest is
//! installed here, too.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::apt;
use super::step::step;

/// A Debian package and the reason it is needed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Package {
    /// Name in the archive.
    pub(crate) name: &'static str,
    /// What uses it.
    pub(crate) why: &'static str,
}

const fn package(name: &'static str, why: &'static str) -> Package {
    Package { name, why }
}

/// Everything that `lab` itself uses, outside and inside the guest.
pub(crate) const PACKAGES: &[Package] = &[
    package("qemu-system-x86", "runs the guest"),
    package("busybox-static", "the guest's init"),
    package("kmod", "depmod for the cache, modprobe inside"),
    package("xz-utils", "unpacks the modules of the initramfs"),
    package("zstd", "unpacks the kernel"),
    package("e2fsprogs", "mkfs.ext4 for the scratch disk; fsck.ext4"),
    package("util-linux", "setpriv, so that a guest never outlives its run; losetup, blkdiscard"),
    package("dmsetup", "disks that fail, and that log what is written to them"),
    package("mdadm", "a mirror over volumes of two targets"),
    package("drbd-utils", "a device of two machines, below a standby target"),
    package("iproute2", "ip and rdma: rxe0 and its interface"),
    package("rdma-core", "RDMA configuration and tools"),
    package("ibverbs-providers", "the user half of rxe"),
    package("libibverbs-dev", "headers, and the library, of verbs"),
    package("librdmacm-dev", "headers, and the library, of the connection manager"),
    package("ibverbs-utils", "ibv_devinfo, ibv_rc_pingpong"),
    package("perftest", "ib_send_lat, ib_write_bw"),
    package("fio", "measures block devices"),
    package("linux-perf", "samples where the processors' time goes"),
    package("nbdkit", "a peer that the bench measures: the server of an NBD disk in memory"),
    package("nbd-client", "the same, its client"),
];

/// Installs what is missing of `packages` with apt-get; quiet when nothing is.
pub(crate) fn ensure_installed(packages: &[Package]) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    for package in &missing {
        eprintln!("lab: {} is not installed ({})", package.name, package.why);
    }
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    let list = names.join(" ");
    if !is_root() {
        bail!("installing them needs root; run: sudo apt-get install {list}");
    }
    step("reading this machine's package lists", || {
        apt::run(Command::new("apt-get").args(["update", "-q"])).map(drop)
    })?;
    step(&format!("installing {list}"), || {
        apt::run(
            Command::new("apt-get")
                .args(["install", "-q", "-y", "--no-install-recommends"])
                .args(&names)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
        .map(drop)
    })
}

/// Whether this process has root's rights over files.
pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

fn missing(packages: &[Package]) -> Result<Vec<Package>> {
    // dpkg-query fails when it knows nothing of a package, which is one of the answers looked for.
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status}\n"])
        .args(packages.iter().map(|package| package.name))
        .output()
        .context("cannot run dpkg-query; the lab needs Debian, or a system with its packages")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(not_installed(packages, &text))
}

fn not_installed(packages: &[Package], dpkg: &str) -> Vec<Package> {
    let installed: HashSet<&str> =
        dpkg.lines().filter_map(|line| line.strip_suffix(" installed")).collect();
    packages.iter().filter(|package| !installed.contains(package.name)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_installed_packages_count() {
        let packages = [package("a", ""), package("b", ""), package("c", "")];
        let missing = not_installed(&packages, "a installed\nb config-files\n");
        assert_eq!(missing.iter().map(|package| package.name).collect::<Vec<_>>(), ["b", "c"]);
    }
}
