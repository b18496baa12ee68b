//! One test binary run in the guest: which of its tests, on which kernel, for how long.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::tally::{Results, Tally};
use crate::lab::{self, Accel, Lab};
use crate::process;

/// Tests whose names begin so are run on every kernel, not only on the first.
const EVERY_KERNEL: &str = "kernel_";

/// Which tests of a binary are run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Selection<'a> {
    /// Only those that are for every kernel.
    pub(crate) every_kernel: bool,
    /// Only those whose names contain one of these; all if there are none.
    pub(crate) filters: &'a [String],
}

/// A test binary and what it needs.
#[derive(Debug)]
pub(crate) struct Suite<'a> {
    /// The binary.
    pub(crate) program: PathBuf,
    /// Directories that must be seen inside.
    pub(crate) shares: Vec<PathBuf>,
    /// Variables, set besides this process's own.
    pub(crate) environment: Vec<(&'static str, OsString)>,
    /// Which tests.
    pub(crate) selection: Selection<'a>,
}

/// A kernel and its limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guest<'a> {
    /// Version prefix.
    pub(crate) kernel: &'a str,
    /// Limit on the guest's life.
    pub(crate) limit: Duration,
}

impl Selection<'_> {
    fn takes(&self, name: &str) -> bool {
        let own = name.rsplit("::").next().unwrap_or(name);
        (!self.every_kernel || own.starts_with(EVERY_KERNEL))
            && (self.filters.is_empty() || self.filters.iter().any(|f| name.contains(f.as_str())))
    }
}

impl Suite<'_> {
    /// Runs the selected tests and adds their results to `results`.
    pub(crate) fn run(&self, guest: Guest<'_>, results: &Arc<Mutex<Results>>) -> Result<()> {
        let all = names(&self.program)?;
        let names: Vec<&String> = all.iter().filter(|name| self.selection.takes(name)).collect();
        if names.is_empty() {
            println!("none of the {} tests is selected here", all.len());
            return Ok(());
        }
        println!("{} of {} tests on Linux {}", names.len(), all.len(), guest.kernel);
        let mut words: Vec<OsString> = vec!["env".into()];
        for (name, value) in &self.environment {
            let mut word = OsString::from(format!("{name}="));
            word.push(value);
            words.push(word);
        }
        // The guest has the address, and only this program knows the variable's other name.
        words.extend(["sh".into(), "-c".into(), ADDRESS.into(), "sh".into()]);
        words.push(self.program.clone().into());
        words.extend(
            ["--include-ignored", "--test-threads=1", "--nocapture", "--exact"].map(OsString::from),
        );
        words.extend(names.iter().map(OsString::from));
        let mut status = self.boot(guest, Accel::Auto, &words, results)?;
        if status == i32::from(lab::FAILED) {
            // Emulation with a thread per CPU has crashed a guest now and then.
            println!("the guest died; once more, with one thread for all emulated CPUs");
            status = self.boot(guest, Accel::TcgSingle, &words, results)?;
        }
        if status != i32::from(lab::FAILED) {
            // What a test prints without a line's end makes its own line unreadable.
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            names.iter().for_each(|name| results.note_run(name));
        }
        match u8::try_from(status) {
            Ok(0) => Ok(()),
            Ok(lab::TIMED_OUT) => {
                bail!("not done after {} s on Linux {}", guest.limit.as_secs(), guest.kernel)
            }
            _ => bail!("exit status {status} on Linux {}", guest.kernel),
        }
    }

    fn boot(
        &self,
        guest: Guest<'_>,
        accel: Accel,
        words: &[OsString],
        results: &Arc<Mutex<Results>>,
    ) -> Result<i32> {
        let lab = Lab {
            kernel: guest.kernel.to_owned(),
            timeout: guest.limit,
            accel,
            shares: self.shares.clone(),
            ..Lab::default()
        };
        // The results of a guest that died are not results.
        let own: Arc<Mutex<Results>> = Arc::default();
        let status = lab.run_into(words, Tally::new(std::io::stdout(), Arc::clone(&own)))?;
        if status != i32::from(lab::FAILED) {
            let own = std::mem::take(&mut *own.lock().unwrap_or_else(PoisonError::into_inner));
            results.lock().unwrap_or_else(PoisonError::into_inner).add(own);
        }
        Ok(status)
    }
}

/// Runs its arguments with the name that fabric's tests know the address by.
const ADDRESS: &str = r#"RBLK_TEST_RDMA_ADDR=$RBLK_LAB_RDMA_ADDR exec "$@""#;

/// The tests of a binary, which lists them without running any.
fn names(program: &Path) -> Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(["--list", "--format", "terse"]);
    let list = process::output(&mut command, Duration::from_secs(60))
        .with_context(|| format!("cannot list the tests of {}", program.display()))?;
    Ok(parse(&list))
}

fn parse(list: &str) -> Vec<String> {
    list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_from_the_list() {
        assert_eq!(parse("a::b: test\nbench_x: benchmark\nkernel_c: test\n"), ["a::b", "kernel_c"]);
    }

    #[test]
    fn both_conditions_hold() {
        let filters = ["mount".to_owned(), "fio".to_owned()];
        let takes = |every_kernel, filters: &[String], name: &str| {
            Selection { every_kernel, filters }.takes(name)
        };
        assert!(takes(false, &[], "anything"));
        assert!(!takes(true, &[], "anything"));
        assert!(takes(true, &[], "faults::kernel_mount"));
        assert!(takes(true, &filters, "kernel_mount") && takes(false, &filters, "a_fio_run"));
        assert!(!takes(true, &filters, "a_fio_run") && !takes(true, &filters, "kernel_other"));
    }
}
