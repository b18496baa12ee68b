//! [`CallProbe`]: the kernel's probe at the entry of system calls, kept from begin to end.

use std::path::Path;

/// A trigger that never fires: no system call has that number.
const IDLE: &str = "traceoff if id == 99999";
const TRIGGER: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/trigger";

/// Keeps the probe in place while it lives.
///
/// The first trigger at the entry of system calls makes the kernel patch that code, and so does the
/// end of the last one. The emulator may run an instruction that is half patched, and the guest
/// ends by it (`Oops: int3`). With this trigger those of a benchmark under load are neither the
/// first nor the last.
#[derive(Debug)]
pub(super) struct CallProbe(());

impl CallProbe {
    /// The trigger of the probe, where the kernel has tracing.
    pub(super) fn trigger() -> &'static Path {
        Path::new(TRIGGER)
    }

    /// Puts the probe in place. To be called while little runs.
    ///
    /// # Panics
    /// The kernel refuses.
    pub(super) fn keep() -> Self {
        std::fs::write(TRIGGER, IDLE).unwrap_or_else(|e| panic!("{TRIGGER}: {e}"));
        Self(())
    }
}

impl Drop for CallProbe {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(TRIGGER, format!("!{IDLE}")) {
            println!("{TRIGGER}: {error}");
        }
    }
}
