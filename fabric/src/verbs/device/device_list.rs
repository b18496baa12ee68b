//! [`DeviceList`]: contexts that librdmacm has open.

use std::ptr::NonNull;

use crate::verbs::ffi;

/// The contexts of all devices, as librdmacm has them. They stay open while the list lives.
#[derive(Debug)]
pub(super) struct DeviceList {
    first: NonNull<*mut ffi::ibv_context>,
    count: usize,
}

impl DeviceList {
    /// `None` when the call failed; errno says why. For `presence::list`, which remembers the open
    /// contexts.
    pub(super) fn get() -> Option<Self> {
        let mut count = 0;
        // SAFETY: plain call; the list is freed in drop.
        let first = unsafe { ffi::rdma_get_devices(&raw mut count) };
        let first = NonNull::new(first)?;
        Some(Self { first, count: usize::try_from(count).unwrap_or(0) })
    }

    /// A list of that context alone; the others are let go. `None`: it has no such context, or
    /// there is no memory.
    pub(super) fn only(mut self, context: NonNull<ffi::ibv_context>) -> Option<Self> {
        let at = self.contexts().iter().position(|other| *other == context.as_ptr())?;
        // SAFETY: plain call; `rdma_free_devices` frees the list with `free`.
        let own = unsafe { libc::malloc(2 * size_of::<*mut ffi::ibv_context>()) };
        let own = NonNull::new(own.cast::<*mut ffi::ibv_context>())?;
        // SAFETY: `own` has room for two. The list has `count` entries and a null pointer behind
        // them; the entries behind `at`, and that pointer, move forward by one.
        unsafe {
            own.as_ptr().write(context.as_ptr());
            own.as_ptr().add(1).write(std::ptr::null_mut());
            let place = self.first.as_ptr().add(at);
            std::ptr::copy(place.add(1), place, self.count - at);
        }
        self.count -= 1;
        Some(Self { first: own, count: 1 })
    }

    /// The contexts.
    pub(super) fn contexts(&self) -> &[*mut ffi::ibv_context] {
        // SAFETY: the list has `count` entries, and is freed in drop.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from rdma_get_devices and is freed once.
        unsafe { ffi::rdma_free_devices(self.first.as_ptr()) };
    }
}
