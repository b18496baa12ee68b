//! [`Command`]: a command to the driver, from its submission to the meaning of its answer.
//!
//! A command has a deadline, after which it is cancelled. If the kernel still works on a command
//! that was cancelled, the command's buffer is left to the kernel. A completion carries the
//! `user_data` of its command; completions of commands that were given up are dropped.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use io_uring::{opcode, squeue, types};
use rblk_operate::pid_namespace;
use rblk_protocol::width::narrow;

use super::Control;
use crate::front::ublk::abi::{self, CtrlCmd};
use crate::front::ublk::error::{Result, UblkError, kernel_release};
use crate::front::ublk::feature::Features;

/// Time for a cancelled command to end.
const CANCEL_GRACE: Duration = Duration::from_secs(1);

/// How often the caller decides whether to wait longer.
const ASK_STEP: Duration = Duration::from_millis(100);

/// `user_data` of cancellations; commands count up from 1.
pub(super) const CANCEL: u64 = 0;

/// A control command: number, name for messages, and what the kernel does before it answers.
#[derive(Clone, Copy)]
pub(super) struct Command(u32, &'static str, &'static str);

/// The lock of a device, which START_DEV, STOP_DEV and a recovery hold.
const LOCKED: &str = "it waits for another command of this device";

pub(super) const ADD: Command = Command(
    abi::CMD_ADD_DEV,
    "ADD_DEV",
    "it waits for the lock of all ublk devices, or crashed in this command (`dmesg | grep -i ublk`)",
);
pub(super) const DELETE: Command =
    Command(abi::CMD_DEL_DEV, "DEL_DEV", "it waits until no process has the device open");
pub(super) const START: Command = Command(
    abi::CMD_START_DEV,
    "START_DEV",
    "it waits until the queues have fetched every tag, and before 7.0 for reads of the partition table",
);
pub(super) const STOP: Command =
    Command(abi::CMD_STOP_DEV, "STOP_DEV", "it waits for the requests under way");
pub(super) const SET_PARAMS: Command = Command(abi::CMD_SET_PARAMS, "SET_PARAMS", LOCKED);
pub(super) const GET_PARAMS: Command = Command(abi::CMD_GET_PARAMS, "GET_PARAMS", LOCKED);
pub(super) const START_RECOVERY: Command = Command(
    abi::CMD_START_USER_RECOVERY,
    "START_USER_RECOVERY",
    "it waits until it has seen the death of the old process, before 6.16 by a timer of 30 s",
);
pub(super) const END_RECOVERY: Command = Command(
    abi::CMD_END_USER_RECOVERY,
    "END_USER_RECOVERY",
    "it waits until the queues have fetched every tag",
);
pub(super) const QUEUE_CPUS: Command =
    Command(abi::CMD_GET_QUEUE_AFFINITY, "GET_QUEUE_AFFINITY", LOCKED);
pub(super) const INFO: Command = Command(abi::CMD_GET_DEV_INFO2, "GET_DEV_INFO2", LOCKED);
pub(super) const PLAIN_INFO: Command = Command(abi::CMD_GET_DEV_INFO, "GET_DEV_INFO", LOCKED);
pub(super) const FEATURES: Command =
    Command(abi::CMD_GET_FEATURES, "GET_FEATURES", "it runs no worker for this command");
pub(super) const UPDATE_SIZE: Command = Command(abi::CMD_UPDATE_SIZE, "UPDATE_SIZE", LOCKED);
pub(super) const REGISTER: Command = Command(
    abi::CMD_REG_BUF,
    "REG_BUF",
    "it pins the memory, and on a live device waits for requests",
);
pub(super) const DELETE_ASYNC: Command =
    Command(abi::CMD_DEL_DEV_ASYNC, "DEL_DEV_ASYNC", "it waits for the lock of all ublk devices");

/// The end of a command, before its errno is interpreted.
pub(super) enum CommandEnd {
    /// The driver answered: 0 or more, or a negative errno.
    Answered(i32),
    /// The command was cancelled at its deadline and is over.
    Cancelled,
    /// The command goes on in the kernel, which may still use its buffer.
    Running,
}

impl Control {
    /// A command without a buffer.
    pub(super) fn plain(
        &mut self,
        command: Command,
        header: CtrlCmd,
        deadline: Duration,
    ) -> Result<()> {
        let ended = self.issue(command, header, deadline, &mut |_| false)?;
        answered(command, header.dev_id, ended, deadline)
    }

    /// Like [`Self::plain`], for as long as the caller waits.
    pub(super) fn plain_while(
        &mut self,
        command: Command,
        header: CtrlCmd,
        more: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<()> {
        let begin = Instant::now();
        let ended = self.issue(command, header, ASK_STEP, more)?;
        answered(command, header.dev_id, ended, begin.elapsed())
    }

    /// A command with a buffer, which the driver reads, fills, or both.
    pub(super) fn exchange<T: abi::Payload>(
        &mut self,
        command: Command,
        header: CtrlCmd,
        payload: T,
        deadline: Duration,
    ) -> Result<T> {
        self.exchange_for_number(command, header, payload, deadline).map(|(_, answer)| answer)
    }

    /// Like [`Self::exchange`], for a command with a number in its answer.
    pub(super) fn exchange_for_number<T: abi::Payload>(
        &mut self,
        command: Command,
        header: CtrlCmd,
        payload: T,
        deadline: Duration,
    ) -> Result<(u32, T)> {
        const { assert!(size_of::<T>() <= u16::MAX as usize) };
        let raw = Box::into_raw(Box::new(payload));
        let header = CtrlCmd { addr: raw as u64, len: narrow(size_of::<T>()), ..header };
        let ended = self.issue(command, header, deadline, &mut |_| false);
        if !matches!(ended, Ok(CommandEnd::Running)) {
            // SAFETY: `raw` came from a Box above, and the command is over (or was never accepted),
            // so the kernel does not use the memory any more. T is a Payload: any bytes from the
            // kernel are valid.
            let answer = unsafe { *Box::from_raw(raw) };
            return match ended? {
                CommandEnd::Answered(result) => match u32::try_from(result) {
                    Ok(number) => Ok((number, answer)),
                    Err(_) => Err(refusal(command, header.dev_id, -result)),
                },
                _ => Err(timeout(command, header.dev_id, deadline, false)),
            };
        }
        // The kernel may still write to `raw`: it is leaked on purpose.
        Err(timeout(command, header.dev_id, deadline, true))
    }

    /// Submits a command and waits for its end or its cancellation. Waits for another `step` as
    /// long as `more` returns true.
    fn issue(
        &mut self,
        command: Command,
        header: CtrlCmd,
        step: Duration,
        more: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<CommandEnd> {
        self.issued += 1;
        let user_data = self.issued;
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), command.0)
            .cmd(header.to_sqe_bytes())
            .build()
            .user_data(user_data);
        self.push(&entry)?;
        let begin = Instant::now();
        loop {
            if let Some(result) = self.wait(user_data, step)? {
                return Ok(CommandEnd::Answered(result));
            }
            if !more(begin.elapsed()) {
                break;
            }
        }
        let cancel = opcode::AsyncCancel::new(user_data).build().user_data(CANCEL);
        self.push(&cancel.into())?;
        match self.wait(user_data, CANCEL_GRACE) {
            Ok(Some(result)) if result == -libc::EINTR || result == -libc::ECANCELED => {
                Ok(CommandEnd::Cancelled)
            }
            Ok(Some(result)) => Ok(CommandEnd::Answered(result)),
            // Without an answer, for any reason, the command must count as running.
            Ok(None) | Err(_) => Ok(CommandEnd::Running),
        }
    }

    fn push(&mut self, entry: &squeue::Entry128) -> Result<()> {
        // SAFETY: the entry names `self.file`, open as long as the ring; the buffer its header
        // points to is kept until the command's completion, or indefinitely (`exchange`). An
        // AsyncCancel has no buffer.
        unsafe { self.ring.submission().push(entry) }
            // Not reached: the queue has 8 entries and each is submitted before the next is pushed.
            .map_err(|_| {
                UblkError::system("queuing a control command", io::ErrorKind::WouldBlock.into())
            })
    }

    /// Result of the command `user_data`, or `None` at the deadline. Completions of older commands
    /// that were given up are dropped.
    fn wait(&mut self, user_data: u64, deadline: Duration) -> Result<Option<i32>> {
        let begin = Instant::now();
        loop {
            if let Some(entry) = self.ring.completion().find(|entry| entry.user_data() == user_data)
            {
                return Ok(Some(entry.result()));
            }
            let left = deadline.saturating_sub(begin.elapsed());
            if left.is_zero() && self.ring.submission().is_empty() {
                return Ok(None);
            }
            let timespec = types::Timespec::from(left);
            let args = types::SubmitArgs::new().timespec(&timespec);
            match self.ring.submitter().submit_with_args(1, &args) {
                Ok(_) => {}
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)
                    ) => {}
                Err(source) => return Err(UblkError::NoIoUring { source }),
            }
        }
    }
}

pub(super) fn header(id: u32) -> CtrlCmd {
    CtrlCmd { dev_id: id, queue_id: abi::NO_QUEUE, ..CtrlCmd::default() }
}

pub(super) fn missing(features: Features) -> UblkError {
    let (feature, since) = features.names().next().unwrap_or(("(unknown)", "a later release"));
    UblkError::FeatureMissing { feature, since, kernel: kernel_release() }
}

pub(super) fn timeout(
    command: Command,
    id: u32,
    waited: Duration,
    still_running: bool,
) -> UblkError {
    UblkError::Timeout { command: command.1, id, kernel: command.2, waited, still_running }
}

/// The meaning of the end of a command without a buffer.
fn answered(command: Command, id: u32, ended: CommandEnd, waited: Duration) -> Result<()> {
    match ended {
        CommandEnd::Answered(result) if result >= 0 => Ok(()),
        CommandEnd::Answered(result) => Err(refusal(command, id, -result)),
        CommandEnd::Cancelled => Err(timeout(command, id, waited, false)),
        CommandEnd::Running => Err(timeout(command, id, waited, true)),
    }
}

/// The meaning of a negative answer. `errno` is positive.
pub(super) fn refusal(command: Command, id: u32, errno: i32) -> UblkError {
    match (command.0, errno) {
        (abi::CMD_ADD_DEV, libc::EEXIST) => UblkError::DeviceIdTaken { id },
        (abi::CMD_ADD_DEV, libc::EACCES | libc::ENOSPC) => {
            let limit = std::fs::read_to_string("/sys/module/ublk_drv/parameters/ublks_max");
            UblkError::TooManyDevices { limit: limit.ok().and_then(|n| n.trim().parse().ok()) }
        }
        (_, libc::EPERM) => {
            UblkError::NotPermitted { action: format!("{} of ublk device", command.1) }
        }
        (abi::CMD_ADD_DEV, _) => UblkError::Refused {
            command: command.1,
            id,
            source: io::Error::from_raw_os_error(errno),
        },
        (_, libc::ENODEV) => UblkError::NoSuchDevice { id },
        (abi::CMD_START_USER_RECOVERY, libc::EBUSY) => UblkError::StillServed { id, pid: None },
        (abi::CMD_START_DEV | abi::CMD_END_USER_RECOVERY, libc::EINVAL)
            if pid_namespace::is_own(Path::new("/")) =>
        {
            UblkError::OtherPid { command: command.1, id, kernel: kernel_release() }
        }
        _ => UblkError::Refused {
            command: command.1,
            id,
            source: io::Error::from_raw_os_error(errno),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_an_answer_says_what_the_kernel_does() {
        let text = |command, id, running| {
            timeout(command, id, Duration::from_secs(10), running).to_string()
        };
        assert_eq!(
            text(ADD, abi::ANY_DEVICE, true),
            "ADD_DEV of a new ublk device did not finish within 10s and cannot be interrupted; the \
             kernel does not say why: it waits for the lock of all ublk devices, or crashed in this \
             command (`dmesg | grep -i ublk`)"
        );
        assert!(
            text(STOP, 3, false).starts_with("STOP_DEV of ublk device 3 did not finish within")
        );
        assert!(text(STOP, 3, false).ends_with("it waits for the requests under way"));
        for command in [
            ADD,
            DELETE,
            START,
            STOP,
            SET_PARAMS,
            GET_PARAMS,
            START_RECOVERY,
            END_RECOVERY,
            QUEUE_CPUS,
            INFO,
            PLAIN_INFO,
            FEATURES,
            UPDATE_SIZE,
            REGISTER,
            DELETE_ASYNC,
        ] {
            assert!(command.2.starts_with("it "), "{}", command.1);
        }
    }

    #[test]
    fn answers_become_errors_with_a_fix() {
        let text = |command, errno| refusal(command, 3, errno).to_string();
        assert!(text(ADD, libc::EEXIST).contains("id 3 is taken"));
        assert!(text(ADD, libc::EACCES).contains("ublks_max"));
        assert!(text(ADD, libc::ENODEV).contains("ADD_DEV of ublk device 3 was refused"));
        assert!(text(STOP, libc::ENODEV).contains("no ublk device 3"));
        assert!(text(STOP, libc::EPERM).contains("CAP_SYS_ADMIN"));
        assert!(text(START_RECOVERY, libc::EBUSY).contains("still held by a process"));
        // An errno that no kernel has.
        assert!(text(STOP, 4000).contains("4000"));
        assert!(missing(Features::QUIESCE).to_string().contains("came with 6.16"));
        assert!(missing(Features::from_bits(1 << 50)).to_string().contains("unknown"));
    }
}
