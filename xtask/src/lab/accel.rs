//! How the guest's CPUs are run: by KVM where it really works, else by QEMU's translator.
//!
//! `/dev/kvm` says little: there are hosts on which it opens and a stock guest kernel dies under
//! it. So KVM is judged by a trial boot of the very kernel, at most [`TRIAL`] long, and the verdict
//! is kept until this machine boots again.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::cache::Cache;
use super::engine::Engine;
use super::guest::Task;
use super::kernel::Kernel;
use super::qemu::{End, Machine};
use super::step::step;

/// How long a trial boot may take.
const TRIAL: Duration = Duration::from_secs(20);

/// What the user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Accel {
    /// KVM when a trial boot succeeds, else `tcg`
    Auto,
    /// Hardware virtualisation, untried
    Kvm,
    /// QEMU's translator, a thread per virtual CPU
    Tcg,
    /// QEMU's translator, one thread for all virtual CPUs
    TcgSingle,
}

impl Accel {
    /// Settles what `auto` is on this machine.
    pub(crate) fn resolve(self, cache: &Cache, kernel: &Kernel) -> Result<Engine> {
        match self {
            Accel::Kvm => Ok(Engine::Kvm),
            Accel::Tcg => Ok(Engine::Tcg),
            Accel::TcgSingle => Ok(Engine::TcgSingle),
            Accel::Auto => match kvm_works(cache, kernel)? {
                true => Ok(Engine::Kvm),
                false => Ok(Engine::Tcg),
            },
        }
    }
}

fn kvm_works(cache: &Cache, kernel: &Kernel) -> Result<bool> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(false);
    }
    let verdict = cache.path("accel").join(&kernel.release);
    let key = verdict_key()?;
    if let Some(works) = read_verdict(&verdict, &key) {
        return Ok(works);
    }
    let works = step(&format!("trying {} under KVM", kernel.release), || trial(cache, kernel))?;
    eprintln!(
        "lab: KVM {}",
        if works { "works" } else { "does not work here: the guest is emulated" }
    );
    cache.write(
        &verdict,
        format!("{key}\n{}\n", if works { "works" } else { "fails" }).as_bytes(),
    )?;
    Ok(works)
}

fn trial(cache: &Cache, kernel: &Kernel) -> Result<bool> {
    let machine = Machine {
        kernel,
        engine: Engine::Kvm,
        mem: 1 << 30,
        cpus: 2,
        root: false,
        scratch: None,
        timeout: TRIAL,
    };
    let log = cache.path("logs").join(format!("kvm-trial-{}.log", kernel.release));
    // Whatever goes wrong in a trial says the same thing: not this way.
    let end = machine.run(cache, &Task::probe()?, &log, std::io::sink());
    Ok(matches!(end, Ok((End::Exited(0), _))))
}

/// A verdict holds for one boot of one host kernel.
fn verdict_key() -> Result<String> {
    let read = |name: &str| {
        let path = format!("/proc/sys/kernel/{name}");
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    Ok(format!("{} {}", read("osrelease")?.trim(), read("random/boot_id")?.trim()))
}

fn read_verdict(path: &Path, key: &str) -> Option<bool> {
    let text = fs::read_to_string(path).ok()?;
    match text.strip_prefix(key)?.trim() {
        "works" => Some(true),
        "fails" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_of_another_boot_does_not_count() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, "6.1 abc\nfails\n").unwrap();
        assert_eq!(read_verdict(file.path(), "6.1 abc"), Some(false));
        assert_eq!(read_verdict(file.path(), "6.1 abd"), None);
        assert_eq!(read_verdict(Path::new("/nonexistent"), "6.1 abc"), None);
    }
}
