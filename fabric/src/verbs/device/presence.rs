//! [`Presence`]: whether the kernel still shows a device of which this process has the context
//! open.
//!
//! A driver that cannot take its objects back (rxe, siw) lets a device go only when the last
//! process has closed the device: `rdma link del` waits for that in `ib_uverbs_remove_one`. rdma_cm
//! tells of the removal only where its module was loaded after that of uverbs, and only to
//! processes with an id on the device. But before the kernel waits, it takes the device out of
//! `/sys/class/infiniband_verbs`, so a look there shows the removal to every process.
//!
//! librdmacm opens contexts, also of devices that this process does not use. It closes a context
//! when two things have happened: nothing refers to the context, and librdmacm has listed the
//! devices without that one. So the finder of a gone device has librdmacm list the devices
//! ([`look_around`]).

use std::ffi::CStr;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::device_list::DeviceList;
use crate::verbs::ffi;

/// Devices with contexts that may be open.
static SHOWN: Mutex<Vec<Presence>> = Mutex::new(Vec::new());
/// The time between two looks while connections are made all the time.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// When [`look_around_at_times`] looked last.
static LOOKED: Mutex<Option<Instant>> = Mutex::new(None);
/// How many devices have gone.
static GONE: LazyLock<watch::Sender<u64>> = LazyLock::new(|| watch::channel(0).0);

/// The entry of a device in sysfs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::verbs) struct Presence(PathBuf);

impl Presence {
    /// That of an open context. `None` where this process does not see the entry, as in a container
    /// without sysfs: nothing can be told then.
    ///
    /// # Safety
    /// The context is open.
    pub(super) unsafe fn of(context: NonNull<ffi::ibv_context>) -> Option<Self> {
        // SAFETY: an open context has a device, which lives as long; the path is a C string.
        let path = unsafe { CStr::from_ptr((*(*context.as_ptr()).device).dev_path.as_ptr()) };
        let presence = Self(path.to_str().ok()?.into());
        presence.is_there().then_some(presence)
    }

    /// Whether the kernel still shows the device. Where that cannot be told, it does.
    pub(in crate::verbs) fn is_there(&self) -> bool {
        !self.0.as_os_str().is_empty() && self.0.try_exists().unwrap_or(true)
    }
}

/// Notes that the context of a device may be open. Returns the same as [`Presence::of`].
///
/// # Safety
/// The context is open.
pub(in crate::verbs) unsafe fn note(context: NonNull<ffi::ibv_context>) -> Option<Presence> {
    // SAFETY: as promised.
    let presence = unsafe { Presence::of(context) }?;
    let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if !shown.contains(&presence) {
        shown.push(presence.clone());
    }
    Some(presence)
}

/// The contexts of all devices. librdmacm opens them, and they may stay open behind the list.
/// `None` when that failed; errno says why.
pub(super) fn list() -> Option<DeviceList> {
    let list = DeviceList::get()?;
    for context in list.contexts().iter().filter_map(|context| NonNull::new(*context)) {
        // SAFETY: the list keeps its contexts open.
        unsafe { note(context) };
    }
    Some(list)
}

/// Makes librdmacm close the contexts of gone devices, each once nothing refers to it, and wakes
/// the listeners on such devices.
pub(in crate::verbs) fn look_around() {
    let has_gone = {
        let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let before = shown.len();
        shown.retain(Presence::is_there);
        shown.len() < before
    };
    if has_gone {
        // librdmacm lists the devices.
        drop(list());
        GONE.send_modify(|gone| *gone += 1);
    }
}

/// [`look_around`], at most once in [`LOOK_EVERY`]: for callers that connect often.
pub(in crate::verbs) fn look_around_at_times() {
    let now = Instant::now();
    let is_due = {
        let mut looked = LOOKED.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK_EVERY);
        if is_due {
            *looked = Some(now);
        }
        is_due
    };
    if is_due {
        look_around();
    }
}

/// Changes when a device has gone.
pub(in crate::verbs) fn changes() -> watch::Receiver<u64> {
    GONE.subscribe()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_does_not_show_is_not_there() {
        let entry = std::env::temp_dir().join(format!("rblk-uverbs-{}", std::process::id()));
        let entry = Presence(entry);
        assert!(!entry.is_there());
        std::fs::create_dir(&entry.0).expect("an entry");
        assert!(entry.is_there());
        std::fs::remove_dir(&entry.0).expect("the entry");
        assert!(!entry.is_there());
        assert!(!Presence(PathBuf::new()).is_there());
    }
}
