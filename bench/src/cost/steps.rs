//! Instructions of a piece of this program on this CPU, by single steps: valgrind counts others
//! where the CPU has instructions that valgrind does not know (AVX-512).
//!
//! This program runs once more: it gets ready, stops, does the work, and ends by a signal. Between
//! the two, this process lets it take one step after the other, and counts. The steps around the
//! work are in each count, so the work is the difference of two counts.

use std::process::{Child, Command};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::child;

/// Ends the count.
const END: Signal = Signal::SIGTERM;
/// More steps than any work here takes; a count that does not end is a bug of the work.
const STEPS_MOST: u64 = 50_000_000;

/// In the child: does `work`, and lets the parent count its instructions. Under a parent it does
/// not return.
pub(super) fn under_steps(work: impl FnOnce()) -> Result<()> {
    raise(Signal::SIGSTOP)?;
    work();
    raise(END)?;
    bail!("no tracer counts the steps of this process");
}

pub(super) fn count(command: &mut Command) -> Result<u64> {
    let mut child = child::spawn(command)?;
    let counted = count_of(&child);
    // The child is stopped, or has ended.
    child::end(&mut child);
    counted
}

fn count_of(child: &Child) -> Result<u64> {
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    stopped(pid, WaitPidFlag::WUNTRACED)?;
    ptrace::attach(pid).context("this process may not trace its child")?;
    stopped(pid, WaitPidFlag::empty())?;
    let mut steps = 0;
    while steps < STEPS_MOST {
        ptrace::step(pid, None)?;
        match wait(pid, WaitPidFlag::empty())? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => steps += 1,
            WaitStatus::Stopped(_, END) => return Ok(steps),
            // The stop of the attachment, told once more.
            WaitStatus::Stopped(_, Signal::SIGSTOP) => {}
            other => bail!("the child did not end as it should: {other:?}"),
        }
    }
    bail!("the child takes more than {STEPS_MOST} steps");
}

fn stopped(pid: Pid, flags: WaitPidFlag) -> Result<()> {
    match wait(pid, flags)? {
        WaitStatus::Stopped(..) => Ok(()),
        other => bail!("the child did not stop: {other:?}"),
    }
}

fn wait(pid: Pid, flags: WaitPidFlag) -> Result<WaitStatus> {
    loop {
        match waitpid(pid, Some(flags)) {
            Err(Errno::EINTR) => crate::interrupt::check()?,
            other => return Ok(other?),
        }
    }
}
