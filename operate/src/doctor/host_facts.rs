//! [`HostFacts`]: kernel, io_uring, locked memory and clock.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::errno::Errno;

use super::report::Finding;
use super::rights::{can_lock_memory, hard_memlock};
use crate::host::kernel_release::KernelVersion;
use crate::host::pid_namespace;
use crate::host::ublk_faults::{self, Certainty};
use rblk_config::ByteSize;

/// How far the clock may be behind the file of the program: time zones of build machines.
const CLOCK_SLACK: Duration = Duration::from_secs(86_400);

/// Kernel, io_uring, locked memory and clock of a host.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// Release of the kernel; empty if it cannot be read.
    pub kernel: String,
    /// Whether this process is in a pid namespace of its own.
    pub in_pid_namespace: bool,
    /// The errno of a real io_uring_setup; `None` if it worked.
    pub io_uring: Option<i32>,
    /// `kernel.io_uring_disabled`; `None` on kernels without it.
    pub io_uring_disabled: Option<u8>,
    /// The hard limit of locked memory.
    pub memlock: Option<u64>,
    /// Whether that limit does not count for this process.
    pub locks_beyond: bool,
    /// The time of the clock.
    pub now: SystemTime,
    /// When the file of this program was written.
    pub built: Option<SystemTime>,
    /// Whether the kernel knows that the clock is kept right.
    pub synchronised: Option<bool>,
}

impl HostFacts {
    /// Reads the facts of this host. The caller has tried an io_uring, and asked the kernel about
    /// the clock.
    #[must_use]
    pub fn read(root: &Path, io_uring: &io::Result<()>, synchronised: Option<bool>) -> Self {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).ok();
        let trimmed = |path| text(path).map(|text| text.trim().to_owned());
        let program = std::env::current_exe().and_then(|path| path.metadata()?.modified());
        let errno = io_uring.as_ref().err().map(|error| error.raw_os_error().unwrap_or(0));
        Self {
            kernel: trimmed("proc/sys/kernel/osrelease").unwrap_or_default(),
            in_pid_namespace: pid_namespace::is_own(root),
            io_uring: errno,
            io_uring_disabled: trimmed("proc/sys/kernel/io_uring_disabled")
                .and_then(|text| text.parse().ok()),
            memlock: hard_memlock(),
            locks_beyond: can_lock_memory(root),
            now: SystemTime::now(),
            built: program.ok(),
            synchronised,
        }
    }

    /// Judges the release of the kernel. `purpose` is the feature that needs the least release.
    #[must_use]
    pub fn judge_kernel(&self, least: KernelVersion, purpose: &str) -> Finding {
        match KernelVersion::parse(&self.kernel) {
            None => Finding::skip("kernel", "/proc/sys/kernel/osrelease does not say"),
            Some(version) if version >= least => Finding::ok("kernel", &self.kernel),
            Some(_) => Finding::fail(
                "kernel",
                format!("{}: {purpose} needs {}.{} or later", self.kernel, least.0, least.1),
            ),
        }
    }

    /// Judges the ublk of the kernel: a finding for each fault that its release has.
    #[must_use]
    pub fn judge_ublk(&self) -> Vec<Finding> {
        let faults = ublk_faults::judge(&self.kernel, self.in_pid_namespace).into_iter();
        let finding = |fault: ublk_faults::UblkFault| match fault.certainty {
            Certainty::Certain => Finding::fail("kernel", fault.to_string()),
            Certainty::Possible => Finding::warn("kernel", fault.to_string()),
        };
        faults.map(finding).collect()
    }

    /// Judges whether this process may use io_uring.
    #[must_use]
    pub fn judge_io_uring(&self) -> Finding {
        let Some(errno) = self.io_uring else { return Finding::ok("io_uring", "allowed") };
        match (self.io_uring_disabled, Errno::from_raw(errno)) {
            (Some(value @ 1..), Errno::EPERM) => {
                Finding::fail("io_uring", format!("kernel.io_uring_disabled = {value}"))
                    .fix("sysctl kernel.io_uring_disabled=0")
            }
            (_, Errno::EPERM | Errno::EACCES) => Finding::fail(
                "io_uring",
                "refused by a seccomp filter or a security module: allow io_uring_setup, \
                 io_uring_enter and io_uring_register there",
            ),
            (_, Errno::ENOSYS) => {
                Finding::fail("io_uring", "this kernel has none (CONFIG_IO_URING)")
            }
            (_, error) => Finding::fail("io_uring", error.desc()),
        }
    }

    /// Judges the limit of locked memory against the need.
    #[must_use]
    pub fn judge_memlock(&self, needed: u64, what: &str) -> Finding {
        let Some(limit) = self.memlock else {
            return Finding::skip("memlock", "the system does not say");
        };
        if limit == u64::MAX {
            return Finding::ok("memlock", "unlimited");
        }
        let limit_shown = ByteSize(limit);
        if self.locks_beyond {
            return Finding::ok(
                "memlock",
                format!("{limit_shown}, not binding (this process has CAP_IPC_LOCK)"),
            );
        }
        if needed <= limit {
            return Finding::ok("memlock", format!("{limit_shown}, {what} needs less"));
        }
        Finding::fail(
            "memlock",
            format!(
                "{limit_shown}, {what} needs {}MiB (in a unit: LimitMEMLOCK=infinity)",
                needed.div_ceil(1 << 20)
            ),
        )
        .fix("ulimit -l unlimited")
    }

    /// Judges the clock. Nothing in rblk depends on it but the times in logs.
    #[must_use]
    pub fn judge_clock(&self) -> Finding {
        let shown = humantime::format_rfc3339_seconds(self.now);
        if self.built.is_some_and(|built| self.now + CLOCK_SLACK < built) {
            return Finding::warn("clock", format!("{shown}: before this program was installed"))
                .fix("timedatectl set-ntp true");
        }
        let kept = match self.synchronised {
            Some(true) => ", synchronised",
            Some(false) => ", not synchronised (rblk does not depend on it)",
            None => "",
        };
        Finding::ok("clock", format!("{shown}{kept}"))
    }
}

/// Judges whether the kernel can encrypt `tcp://`: `has` names the missing part and its fix.
#[must_use]
pub fn judge_tls(has: Result<(), String>, required: bool) -> Finding {
    let Err(lack) = has else { return Finding::ok("tls", "the kernel encrypts tcp://") };
    // The rest of the text is the fix, which has a field of its own here.
    let (why, module) = match lack.split_once(": run `modprobe ") {
        Some((why, fix)) => (why, fix.split('`').next()),
        None => (lack.as_str(), None),
    };
    let finding = match required {
        true => Finding::fail("tls", format!("encrypt = \"required\", but {why}")),
        false => Finding::warn("tls", format!("tcp:// is not encrypted: {why}")),
    };
    match module {
        Some(module) => finding.fix(format!("modprobe {module}")),
        None => finding,
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    fn host() -> HostFacts {
        HostFacts {
            kernel: "6.12.95-amd64".to_owned(),
            in_pid_namespace: false,
            io_uring: None,
            io_uring_disabled: Some(0),
            memlock: Some(8 << 20),
            locks_beyond: false,
            now: SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            built: None,
            synchronised: None,
        }
    }

    #[test]
    fn kernels_are_compared_as_numbers() {
        let least = KernelVersion(6, 4);
        for (release, verdict) in [
            ("6.12.95-amd64", Verdict::Ok),
            ("6.4", Verdict::Ok),
            ("7.0-rc1", Verdict::Ok),
            ("6.1.0-18", Verdict::Fail),
            ("5.19", Verdict::Fail),
            ("", Verdict::Skip),
            ("x.y", Verdict::Skip),
            ("99999999999.1", Verdict::Skip),
        ] {
            let host = HostFacts { kernel: release.to_owned(), ..host() };
            assert_eq!(host.judge_kernel(least, "ublk").verdict, verdict, "{release}");
        }
    }

    #[test]
    fn a_kernel_whose_ublk_fails_is_a_failure_and_one_that_may_hang_a_warning() {
        let judged = |kernel: &str, in_pid_namespace| {
            let host = HostFacts { kernel: kernel.to_owned(), in_pid_namespace, ..host() };
            let found = host.judge_ublk().into_iter();
            found.map(|finding| (finding.verdict, finding.subject)).collect::<Vec<_>>()
        };
        let of = |verdict| (verdict, "kernel".to_owned());
        assert_eq!(judged("6.12.95-amd64", true), []);
        assert_eq!(judged("6.18.5-amd64", false), [of(Verdict::Fail), of(Verdict::Warn)]);
        assert_eq!(judged("6.17.13-amd64", false), [of(Verdict::Warn)]);
        assert_eq!(judged("6.17.13-amd64", true), [of(Verdict::Fail), of(Verdict::Warn)]);
    }

    #[test]
    fn a_refused_io_uring_names_who_refuses_it() {
        let judged = |errno, sysctl| {
            HostFacts { io_uring: errno, io_uring_disabled: sysctl, ..host() }.judge_io_uring()
        };
        assert_eq!(judged(None, Some(2)).verdict, Verdict::Ok, "a group may be let in");
        let off = judged(Some(Errno::EPERM as i32), Some(2));
        assert_eq!(off.fix.as_deref(), Some("sysctl kernel.io_uring_disabled=0"));
        assert!(judged(Some(Errno::EPERM as i32), Some(0)).found.contains("seccomp"));
        assert!(judged(Some(Errno::EPERM as i32), None).found.contains("seccomp"));
        assert!(judged(Some(Errno::ENOSYS as i32), None).found.contains("CONFIG_IO_URING"));
        assert_eq!(judged(Some(Errno::ENOMEM as i32), None).verdict, Verdict::Fail);
    }

    #[test]
    fn locked_memory_counts_unless_it_is_unlimited_or_lifted() {
        let low = host().judge_memlock(9 << 20, "a mount");
        assert_eq!(low.verdict, Verdict::Fail);
        assert_eq!(low.found, "8MiB, a mount needs 9MiB (in a unit: LimitMEMLOCK=infinity)");
        assert_eq!(low.fix.as_deref(), Some("ulimit -l unlimited"));
        assert_eq!(host().judge_memlock(8 << 20, "a mount").verdict, Verdict::Ok);
        let lifted = HostFacts { locks_beyond: true, ..host() };
        assert_eq!(lifted.judge_memlock(9 << 20, "a mount").verdict, Verdict::Ok);
        let unlimited = HostFacts { memlock: Some(u64::MAX), ..host() };
        assert_eq!(unlimited.judge_memlock(u64::MAX, "a mount").found, "unlimited");
    }

    #[test]
    fn a_clock_before_the_program_is_wrong() {
        let at = |days: i64| {
            let day = Duration::from_secs(86_400) * days.unsigned_abs().try_into().unwrap();
            let now = host().now;
            let built = Some(if days < 0 { now - day } else { now + day });
            HostFacts { built, ..host() }.judge_clock().verdict
        };
        assert_eq!((at(-30), at(0), at(2)), (Verdict::Ok, Verdict::Ok, Verdict::Warn));
        assert_eq!(host().judge_clock().found, "2027-01-15T08:00:00Z");
    }

    #[test]
    fn a_kernel_without_tls_is_a_fault_where_encryption_is_required() {
        let lack =
            "this kernel has no TLS: run `modprobe tls`, name `tls` in a file, and start again";
        let wanted = judge_tls(Err(lack.to_owned()), false);
        assert_eq!(wanted.verdict, Verdict::Warn);
        assert_eq!(wanted.found, "tcp:// is not encrypted: this kernel has no TLS");
        assert_eq!(wanted.fix.as_deref(), Some("modprobe tls"));
        assert_eq!(judge_tls(Err(lack.to_owned()), true).verdict, Verdict::Fail);
        let old = judge_tls(Err("it needs Linux 5.11 or later".to_owned()), false);
        assert_eq!(old.fix, None);
        assert_eq!(judge_tls(Ok(()), true).verdict, Verdict::Ok);
    }

    #[test]
    fn facts_are_read_below_a_root() {
        let root = tempfile::tempdir().unwrap();
        let kernel = root.path().join("proc/sys/kernel");
        std::fs::create_dir_all(&kernel).unwrap();
        std::fs::write(kernel.join("osrelease"), "6.6.1\n").unwrap();
        std::fs::write(kernel.join("io_uring_disabled"), "2\n").unwrap();
        let refused = Err(io::Error::from_raw_os_error(Errno::EPERM as i32));
        let facts = HostFacts::read(root.path(), &refused, None);
        assert_eq!((facts.kernel.as_str(), facts.io_uring_disabled), ("6.6.1", Some(2)));
        assert_eq!(facts.io_uring, Some(Errno::EPERM as i32));
        assert!(!facts.locks_beyond);
    }
}
