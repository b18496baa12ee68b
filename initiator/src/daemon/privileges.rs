//! [`drop_what_is_not_needed`]: the capabilities of a process that serves a mount.
//!
//! The process begins as root. It keeps:
//!
//! - `CAP_SYS_ADMIN`: every control command of a ublk device that root made
//!   (`ublk_ctrl_uring_cmd_permission`). The kernel reads the partition table only if every thread
//!   that serves the disk has it (`ublk_mark_io_ready`), so the queue threads have it too.
//! - `CAP_IPC_LOCK`: memory that an RDMA device or a ring pins, where the memlock limit cannot be
//!   lifted.
//!
//! All other capabilities are dropped, from the bounding set, too, and no program that this process
//! starts gains any (`PR_SET_NO_NEW_PRIVS`). Actions that need another capability come before: the
//! limits and `PR_SET_IO_FLUSHER` (`CAP_SYS_RESOURCE`). A program that takes this process over by
//! exec inherits both.
//!
//! Capabilities belong to threads. Call it before the process has a second thread.

use std::io;

/// `include/uapi/linux/capability.h`
const CAP_IPC_LOCK: u32 = 14;
/// `include/uapi/linux/capability.h`
const CAP_SYS_ADMIN: u32 = 21;
/// The capabilities of a process that serves a mount.
const KEPT: [u32; 2] = [CAP_IPC_LOCK, CAP_SYS_ADMIN];
/// A bound of the capability numbers in all kernels with 64 of them.
const NUMBERS: u32 = 64;
/// `_LINUX_CAPABILITY_VERSION_3`: 64 bits in two words.
const VERSION_3: u32 = 0x2008_0522;

/// `struct __user_cap_header_struct`
#[repr(C)]
struct Header {
    version: u32,
    pid: libc::c_int,
}

/// `struct __user_cap_data_struct`: 32 of the 64.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Keeps the capabilities for serving a mount, and drops all others for good.
///
/// # Errors
/// The system's; then the thread has its former capabilities, or fewer.
pub fn drop_what_is_not_needed() -> io::Result<()> {
    nix::sys::prctl::set_no_new_privs()?;
    prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong)?;
    let mut words = [Data::default(); 2];
    read(&mut words)?;
    for number in (0..NUMBERS).filter(|number| !KEPT.contains(number)) {
        match prctl(libc::PR_CAPBSET_DROP, number.into()) {
            // Above the last capability of this kernel.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            // No CAP_SETPCAP: a service manager set the bounding set, or an earlier program in this
            // process did. PR_SET_NO_NEW_PRIVS holds without it.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => break,
            result => result?,
        }
    }
    for (word, at) in words.iter_mut().zip([0, 32]) {
        let kept = KEPT.iter().filter_map(|number| number.checked_sub(at));
        let kept = kept.filter(|bit| *bit < 32).fold(0, |bits, bit| bits | 1 << bit);
        let has = word.permitted & kept;
        *word = Data { effective: has, permitted: has, inheritable: 0 };
    }
    write(&words)
}

fn prctl(option: libc::c_int, argument: libc::c_ulong) -> io::Result<()> {
    let none: libc::c_ulong = 0;
    // SAFETY: both options that are used here take numbers only and change sets of this thread.
    let result = unsafe { libc::prctl(option, argument, none, none, none) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads the sets of this thread.
fn read(words: &mut [Data; 2]) -> io::Result<()> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: of this version the kernel reads the header and writes two words, which both live
    // until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, words.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the sets of this thread.
fn write(words: &[Data; 2]) -> io::Result<()> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: of this version the kernel reads the header and two words, which both live until the
    // call returns.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, words.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sets of this thread in the kernel's report, by name.
    fn sets() -> impl Fn(&str) -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        move |name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap()
        }
    }

    #[test]
    #[ignore = "needs root: `cargo xtask test` runs it"]
    fn as_root_unneeded_capabilities_are_dropped_for_good() {
        assert!(nix::unistd::geteuid().is_root(), "this test needs to be run by root");
        let kept = KEPT.iter().fold(0, |bits, number| bits | 1_u64 << number);
        // The sets belong to this thread. The threads of the other tests keep theirs.
        let thread = std::thread::spawn(move || {
            let before = sets();
            assert_ne!(before("CapPrm") & !kept, 0, "root with too little for this test");
            let had = before("CapPrm") & kept;
            let bounded = before("CapBnd") & kept;
            for _ in 0..2 {
                drop_what_is_not_needed().unwrap();
                let now = sets();
                assert_eq!((now("CapPrm"), now("CapEff")), (had, had));
                assert_eq!((now("CapBnd"), now("CapInh"), now("CapAmb")), (bounded, 0, 0));
                assert_eq!(now("NoNewPrivs"), 1);
            }
            // A program started by root gains none either.
            let child = std::process::Command::new("cat").arg("/proc/self/status").output();
            let text = String::from_utf8(child.unwrap().stdout).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
            assert_eq!(u64::from_str_radix(line.trim(), 16).unwrap(), had);
            // Neither does a thread that this one starts, such as a queue thread.
            let thread = std::thread::spawn(|| sets()("CapEff"));
            assert_eq!(thread.join().unwrap(), had);
        });
        thread.join().unwrap();
    }
}
