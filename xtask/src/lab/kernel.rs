//! Stock Debian kernels, fetched once and kept unpacked in the cache.
//!
//! A kernel directory, `kernels/RELEASE`, holds `vmlinux` and `lib/modules/RELEASE` with depmod's
//! tables; it exists only when it is complete. RELEASE is what `uname -r` says inside.
//!
//! Two packagings are understood: one package (`linux-image-REL`), and the split one
//! (`linux-base-REL`, `linux-binary-REL`, `linux-modules-REL`).

use std::cmp::Ordering;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::apt::{self, Apt};
use super::cache::Cache;
use super::image;
use super::step::step;

/// The suites that are searched; Debian 12's own kernel has no ublk.
const SUITES: &[&str] = &["bookworm-backports", "trixie-backports"];

/// A kernel that is ready to boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// What `uname -r` says.
    pub(crate) release: String,
    /// Its directory in the cache.
    pub(crate) dir: PathBuf,
}

impl Kernel {
    /// The newest cached kernel whose version begins with `prefix`, else the newest the mirror has.
    pub(crate) fn ensure(cache: &Cache, prefix: &str) -> Result<Self> {
        if !prefix.starts_with(|c: char| c.is_ascii_digit()) {
            bail!("`{prefix}` is not a kernel version; write it as 6.12 or 7.2");
        }
        if let Some(kernel) = Self::cached(cache, prefix)? {
            return Ok(kernel);
        }
        let _lock = cache.lock()?;
        // Another run may have fetched it while this one waited.
        match Self::cached(cache, prefix)? {
            Some(kernel) => Ok(kernel),
            None => Self::fetch(cache, prefix),
        }
    }

    /// What QEMU boots.
    pub(crate) fn image(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// The directory that is `/lib/modules/RELEASE` inside.
    pub(crate) fn modules(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.release)
    }

    fn cached(cache: &Cache, prefix: &str) -> Result<Option<Self>> {
        let kernels = cache.path("kernels");
        let names = fs::read_dir(&kernels)
            .with_context(|| format!("cannot read {}", kernels.display()))?
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok());
        let newest = newest(names, prefix);
        Ok(newest.map(|release| Kernel { dir: kernels.join(&release), release }))
    }

    fn fetch(cache: &Cache, prefix: &str) -> Result<Self> {
        let apt = Apt::update(cache, SUITES)?;
        let mut names = apt.names("linux-image-")?;
        names.extend(apt.names("linux-binary-")?);
        names.extend(apt.names("linux-base-")?);
        names.extend(apt.names("linux-modules-")?);
        let (release, packages) = choose(&names, prefix)
            .map_err(|absence| NoKernel { prefix: prefix.to_owned(), absence })?;
        let work = cache.scratch_dir()?;
        let debs = apt.download(&packages, work.path())?;
        let made = work.path().join("kernel");
        step(&format!("unpacking {release}"), || {
            let tree = work.path().join("tree");
            for deb in &debs {
                apt::run(Command::new("dpkg").arg("-x").arg(deb).arg(&tree))?;
            }
            lay_out(&tree, &made, &release)
        })?;
        let dir = cache.path("kernels").join(&release);
        fs::rename(&made, &dir)
            .with_context(|| format!("cannot put the kernel at {}", dir.display()))?;
        Ok(Kernel { release, dir })
    }
}

/// Brings either packaging into one shape and runs depmod over it.
fn lay_out(tree: &Path, made: &Path, release: &str) -> Result<()> {
    let first = |candidates: [PathBuf; 2]| candidates.into_iter().find(|path| path.exists());
    let modules =
        first([tree.join("usr/lib/modules").join(release), tree.join("lib/modules").join(release)])
            .with_context(|| format!("the packages of {release} hold no modules"))?;
    let image =
        first([modules.join("vmlinuz"), tree.join("boot").join(format!("vmlinuz-{release}"))])
            .with_context(|| format!("the packages of {release} hold no vmlinuz"))?;
    fs::create_dir_all(made.join("lib/modules"))?;
    // Before the modules are moved: the image may lie among them.
    image::unpack(&image, &made.join("vmlinux"))?;
    fs::rename(modules, made.join("lib/modules").join(release))?;
    apt::run(Command::new("depmod").arg("-b").arg(made).arg(release)).map(drop)
}

/// The mirror has no kernel of a version.
#[derive(Debug)]
pub(crate) struct NoKernel {
    prefix: String,
    absence: Absence,
}

/// What the mirror has instead of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Absence {
    /// Nothing.
    Whole,
    /// A release without its modules. A mirror keeps the signed packages of a kernel, and of the
    /// others only those of the newest kernels.
    Modules(String),
}

impl std::error::Error for NoKernel {}

impl fmt::Display for NoKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefix, suites) = (&self.prefix, SUITES.join(" and "));
        match &self.absence {
            Absence::Whole => write!(f, "the suites {suites} have no kernel {prefix}")?,
            Absence::Modules(release) => {
                write!(f, "the suites {suites} have the kernel {release} without its modules")?;
            }
        }
        f.write_str("; choose another with --kernel")
    }
}

/// The newest whole release among package names that matches `prefix`, and the packages it is made
/// of.
pub(crate) fn choose(
    names: &[String],
    prefix: &str,
) -> std::result::Result<(String, Vec<String>), Absence> {
    let releases: Vec<String> = names
        .iter()
        .filter_map(|name| {
            name.strip_prefix("linux-image-").or_else(|| name.strip_prefix("linux-binary-"))
        })
        .map(str::to_owned)
        .collect();
    let whole = releases.iter().filter(|release| {
        let packages = packages(names, release);
        packages.iter().all(|package| names.contains(package))
    });
    if let Some(release) = newest(whole.cloned(), prefix) {
        let packages = packages(names, &release);
        return Ok((release, packages));
    }
    Err(newest(releases, prefix).map_or(Absence::Whole, Absence::Modules))
}

/// The packages that a release is made of.
fn packages(names: &[String], release: &str) -> Vec<String> {
    let split = format!("linux-binary-{release}");
    match names.contains(&split) {
        // The image package of a split kernel holds nothing itself.
        true => vec![format!("linux-base-{release}"), split, format!("linux-modules-{release}")],
        false => vec![format!("linux-image-{release}")],
    }
}

/// The newest of `releases` that is the plain amd64 flavour of a version beginning with `prefix`.
fn newest(releases: impl IntoIterator<Item = String>, prefix: &str) -> Option<String> {
    releases.into_iter().filter(|release| matches(release, prefix)).max_by(|a, b| compare(a, b))
}

/// Whether `release` is `PREFIX...-amd64` with no other flavour: not `-rt`, `-cloud` or `-dbg`.
fn matches(release: &str, prefix: &str) -> bool {
    let Some(version) = release.strip_suffix("-amd64") else { return false };
    let Some(rest) = version.strip_prefix(prefix) else { return false };
    // 6.1 must not find 6.12.
    !version.contains('-') && !rest.starts_with(|c: char| c.is_ascii_digit())
}

/// Orders versions by their numbers, as in 6.12.9 < 6.12.10 and +deb12 < +deb12.1.
fn compare(a: &str, b: &str) -> Ordering {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
    };
    // The flavour is the same in both, and its `64` would hide a shorter version.
    let version = |text: &str| numbers(text.strip_suffix("-amd64").unwrap_or(text));
    version(a).cmp(&version(b)).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_newest_plain_flavour_is_chosen() {
        let names = names(&[
            "linux-image-6.12.9+deb12-amd64",
            "linux-image-6.12.90+deb12-amd64",
            "linux-image-6.12.90+deb12.1-amd64",
            "linux-image-6.12.95+deb12-cloud-amd64",
            "linux-image-6.12.95+deb12-amd64-dbg",
            "linux-image-6.12.95+deb12-amd64-unsigned",
            "linux-image-6.12.95+deb12-rt-amd64",
            "linux-image-amd64",
        ]);
        let (release, packages) = choose(&names, "6.12").unwrap();
        assert_eq!(release, "6.12.90+deb12.1-amd64");
        assert_eq!(packages, ["linux-image-6.12.90+deb12.1-amd64"]);
    }

    #[test]
    fn a_split_kernel_is_three_packages() {
        let whole = [
            "linux-base-7.2.12+deb13-amd64",
            "linux-binary-7.2.12+deb13-amd64",
            "linux-modules-7.2.12+deb13-amd64",
        ];
        let names = names(&[&whole[..], &["linux-image-7.2.12+deb13-amd64"]].concat());
        let (_, packages) = choose(&names, "7.2").unwrap();
        assert_eq!(packages, whole);
    }

    #[test]
    fn a_kernel_without_its_modules_is_passed_over_and_named() {
        let mut names =
            names(&["linux-image-6.19.14+deb13-amd64", "linux-binary-6.19.14+deb13-amd64"]);
        let absence = choose(&names, "6.19").unwrap_err();
        assert_eq!(absence, Absence::Modules("6.19.14+deb13-amd64".to_owned()));
        let text = NoKernel { prefix: "6.19".to_owned(), absence }.to_string();
        assert!(text.contains("the kernel 6.19.14+deb13-amd64 without its modules"), "{text}");
        assert_eq!(choose(&names, "7.0"), Err(Absence::Whole));
        let older =
            ["base", "binary", "modules"].map(|part| format!("linux-{part}-6.19.6+deb13-amd64"));
        names.extend(older);
        assert_eq!(choose(&names, "6.19").unwrap().0, "6.19.6+deb13-amd64");
    }

    #[test]
    fn a_prefix_ends_at_a_whole_number() {
        let names = names(&["linux-image-6.12.95+deb12-amd64"]);
        assert_eq!(choose(&names, "6.1"), Err(Absence::Whole));
        assert!(choose(&names, "6").is_ok());
        assert!(choose(&names, "6.12.95").is_ok());
    }
}
