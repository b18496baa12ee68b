//! What the guest is told to do: the command, its directory and its environment.
//!
//! A [`Task`] becomes two shell files in the run's own part of the initramfs: `lab/task`, read by
//! init, and `lab/command`, run in the booted system. Every value is quoted, so any bytes a
//! command line can hold arrive as they are.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::RDMA_ADDRESS;
use super::initramfs::Archive;
use super::kernel::Kernel;

/// Directories that are the guest's own; what lies below them is seen there only if it is shared.
const PRIVATE: &[&str] = &["/tmp", "/run"];

/// Directories that are the kernel's, of which nothing can be shared.
const KERNEL: &[&str] = &["/dev", "/proc", "/sys"];

/// Where the scratch disk is mounted.
const SCRATCH: &str = "/scratch";

/// One command for the guest.
#[derive(Debug)]
pub(crate) struct Task {
    mode: Mode,
    /// Random per run; marks the records in the output stream.
    pub(crate) nonce: String,
}

#[derive(Debug)]
enum Mode {
    /// Say hello and power off.
    Probe,
    Run {
        command: Vec<OsString>,
        dir: PathBuf,
        shares: Vec<PathBuf>,
        rdma: bool,
        scratch: bool,
    },
}

impl Task {
    /// A task that runs `command` in the current directory and sees the directories `needed`.
    pub(crate) fn here(
        command: &[OsString],
        needed: &[PathBuf],
        rdma: bool,
        scratch: bool,
    ) -> Result<Self> {
        let dir = std::env::current_dir().context("cannot tell the current directory")?;
        let shares = shares([&dir].into_iter().chain(needed))?;
        Ok(Task {
            mode: Mode::Run { command: command.to_vec(), dir, shares, rdma, scratch },
            nonce: nonce()?,
        })
    }

    /// A task that only proves that the guest boots.
    pub(crate) fn probe() -> Result<Self> {
        Ok(Task { mode: Mode::Probe, nonce: nonce()? })
    }

    /// The run's own part of the initramfs.
    pub(crate) fn archive(&self, kernel: &Kernel) -> Vec<u8> {
        let mut archive = Archive::new();
        archive.directory("lab");
        let mut task = Script::default();
        task.assign("NONCE", self.nonce.as_ref());
        match &self.mode {
            Mode::Probe => task.assign("MODE", "probe".as_ref()),
            Mode::Run { command, dir, shares, rdma, scratch } => {
                task.assign("MODE", "run".as_ref());
                task.assign("MODULES", kernel.modules().as_os_str());
                let lines: Vec<&OsStr> = shares.iter().map(|path| path.as_os_str()).collect();
                task.assign("SHARES", &lines.join(OsStr::new("\n")));
                task.assign("RDMA", if *rdma { RDMA_ADDRESS } else { "" }.as_ref());
                task.assign("SCRATCH", if *scratch { SCRATCH } else { "" }.as_ref());
                let run = command_script(command, dir, std::env::vars_os(), *rdma, *scratch);
                archive.file("lab/command", 0o755, &run.0);
            }
        }
        archive.file("lab/task", 0o644, &task.0);
        archive.finish()
    }
}

/// Those of `needed` that the guest does not see by itself.
fn shares<'a>(needed: impl Iterator<Item = &'a PathBuf>) -> Result<Vec<PathBuf>> {
    let mut shares: Vec<PathBuf> = Vec::new();
    for dir in needed {
        let below = |roots: &[&str]| roots.iter().any(|root| dir.starts_with(root));
        let exactly = PRIVATE.iter().any(|root| dir == Path::new(root));
        if below(KERNEL) || exactly || dir.as_os_str().as_bytes().contains(&b'\n') {
            bail!(
                "the directory {} cannot be reached inside the lab, whose {} are its own; \
                 run from another directory",
                dir.display(),
                [PRIVATE, KERNEL].concat().join(" ")
            );
        }
        if below(PRIVATE) && !shares.contains(dir) {
            shares.push(dir.clone());
        }
    }
    Ok(shares)
}

fn command_script(
    command: &[OsString],
    dir: &Path,
    environment: impl Iterator<Item = (OsString, OsString)>,
    rdma: bool,
    scratch: bool,
) -> Script {
    let mut script = Script::default();
    for (name, value) in environment.filter(|(name, _)| is_name(name)) {
        script.export(&name, &value);
    }
    script.export("RBLK_LAB".as_ref(), "1".as_ref());
    if rdma {
        script.export("RBLK_LAB_RDMA_ADDR".as_ref(), RDMA_ADDRESS.as_ref());
    }
    if scratch {
        script.export("RBLK_LAB_SCRATCH".as_ref(), SCRATCH.as_ref());
    }
    script.words(&[OsStr::new("cd"), OsStr::new("--"), dir.as_os_str()]);
    script.0.splice(script.0.len() - 1.., *b" || exit 125\n");
    let mut exec = vec![OsStr::new("exec")];
    exec.extend(command.iter().map(OsString::as_os_str));
    script.words(&exec);
    script
}

/// Shell text of quoted words.
#[derive(Debug, Default)]
struct Script(Vec<u8>);

impl Script {
    fn assign(&mut self, name: &str, value: &OsStr) {
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'=');
        self.quote(value);
        self.0.push(b'\n');
    }

    fn export(&mut self, name: &OsStr, value: &OsStr) {
        self.0.extend_from_slice(b"export ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'=');
        self.quote(value);
        self.0.push(b'\n');
    }

    fn words(&mut self, words: &[&OsStr]) {
        for (index, word) in words.iter().enumerate() {
            if index > 0 {
                self.0.push(b' ');
            }
            self.quote(word);
        }
        self.0.push(b'\n');
    }

    fn quote(&mut self, value: &OsStr) {
        self.0.push(b'\'');
        for &byte in value.as_bytes() {
            match byte {
                b'\'' => self.0.extend_from_slice(br"'\''"),
                _ => self.0.push(byte),
            }
        }
        self.0.push(b'\'');
    }
}

/// Whether a shell can set a variable of this name; bash exports functions under others.
fn is_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let shell_own = [&b"PWD"[..], b"OLDPWD", b"SHLVL", b"PPID", b"_"].contains(&bytes);
    !shell_own
        && bytes.first().is_some_and(|first| !first.is_ascii_digit())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

fn nonce() -> Result<String> {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
        .context("cannot read a random id from /proc")?;
    Ok(uuid.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn any_word_survives_the_shell() {
        let words = ["it's", "a b", "$HOME `x` \"y\" \\", "", "-n", "two\nlines"];
        let mut command: Vec<OsString> = vec!["printf".into(), "[%s]".into()];
        command.extend(words.iter().map(OsString::from));
        let environment = [("KEEP".into(), "a'b".into()), ("BAD-NAME%%".into(), "x".into())];
        let script = command_script(&command, Path::new("/"), environment.into_iter(), true, false);
        let output =
            Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script.0)).output().unwrap();
        let expected: String = words.iter().map(|word| format!("[{word}]")).collect();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        assert!(script.0.windows(6).any(|w| w == b"KEEP='"));
        assert!(!script.0.windows(8).any(|w| w == b"BAD-NAME"));
    }

    #[test]
    fn only_what_is_hidden_is_shared() {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        let given = paths(&["/srv/work", "/tmp/a/b", "/tmpfoo", "/run/x", "/tmp/a/b"]);
        assert_eq!(shares(given.iter()).unwrap(), paths(&["/tmp/a/b", "/run/x"]));
        for bad in ["/tmp", "/proc/self", "/dev/shm/x", "/tmp/a\nb"] {
            assert!(shares(paths(&[bad]).iter()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_missing_directory_is_125() {
        let script = command_script(
            &["true".into()],
            Path::new("/nonexistent"),
            std::iter::empty(),
            false,
            false,
        );
        let status =
            Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script.0)).output().unwrap().status;
        assert_eq!(status.code(), Some(125));
    }
}
