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

/// Directories that are the guest's own, so nothing of this machine's can be reached there.
const PRIVATE: &[&str] = &["/tmp", "/run", "/dev", "/proc", "/sys"];

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
        rdma: bool,
        scratch: bool,
    },
}

impl Task {
    /// A task that runs `command` in the current directory.
    pub(crate) fn here(command: &[OsString], rdma: bool, scratch: bool) -> Result<Self> {
        let dir = std::env::current_dir().context("cannot tell the current directory")?;
        if let Some(private) = PRIVATE.iter().find(|private| dir.starts_with(private)) {
            bail!(
                "the current directory {} cannot be reached inside the lab, where {private} is the guest's own; \
                 run from another directory",
                dir.display()
            );
        }
        Ok(Task {
            mode: Mode::Run { command: command.to_vec(), dir, rdma, scratch },
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
            Mode::Run { command, dir, rdma, scratch } => {
                task.assign("MODE", "run".as_ref());
                task.assign("MODULES", kernel.modules().as_os_str());
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
