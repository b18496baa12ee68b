//! [`Library`]: the functions of librados and librbd that rblk calls.
//!
//! The libraries are loaded when the first image is opened, so programs run and link without Ceph.
//! The table is made once, and stays: a thread of librados may run until the process ends. Then the
//! process ends without the destructors of the libraries ([`end_without_destructors`]).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use super::error::ImageError;

/// A pointer that the libraries hand out: a cluster, a pool, an image or a completion.
pub(super) type Handle = *mut c_void;
/// Called by a thread of librbd when an operation has ended.
pub(super) type CompletionCall = unsafe extern "C" fn(completion: Handle, argument: *mut c_void);
/// Called by a thread of librbd when the image has changed.
pub(super) type UpdateCall = unsafe extern "C" fn(argument: *mut c_void);

/// Called by a thread of librados when another client sends a notice to a watched object.
pub(super) type NoticeCall = unsafe extern "C" fn(
    argument: *mut c_void,
    notice: u64,
    watch: u64,
    sender: u64,
    data: *mut c_void,
    len: usize,
);
/// Called by a thread of librados when a watch is broken.
pub(super) type BrokenCall = unsafe extern "C" fn(argument: *mut c_void, watch: u64, errno: c_int);

/// LIBRADOS_CMPXATTR_OP_EQ of rados/librados.h.
pub(super) const ATTRIBUTE_EQUALS: u8 = 1;
/// LIBRADOS_CREATE_EXCLUSIVE of rados/librados.h.
pub(super) const CREATE_EXCLUSIVE: c_int = 1;
/// RBD_LOCK_MODE_EXCLUSIVE of rbd/librbd.h.
pub(super) const LOCK_EXCLUSIVE: c_int = 0;
/// RBD_FEATURE_EXCLUSIVE_LOCK of rbd/features.h.
pub(super) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// RBD_WRITE_ZEROES_FLAG_THICK_PROVISION of rbd/librbd.h.
pub(super) const ZEROES_THICK: c_int = 1;

/// A setting of an image, as `rbd_config_option_t` of rbd/librbd.h has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageSetting {
    pub name: *mut c_char,
    pub value: *mut c_char,
    pub source: c_int,
}

/// A client that has an image open, as `rbd_image_watcher_t` of rbd/librbd.h has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageWatcher {
    pub address: *mut c_char,
    pub id: i64,
    pub cookie: u64,
}

/// The libraries, with the package of each in Debian's words.
const RADOS: (&CStr, &str) = (c"librados.so.2", "librados2");
const RBD: (&CStr, &str) = (c"librbd.so.1", "librbd1");

macro_rules! functions {
    ($($of:ident: fn $name:ident($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions, by their names in C. See the module.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Library {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Library {
            fn of(rados: &Loaded, rbd: &Loaded) -> Result<Self, ImageError> {
                let libraries = Libraries { rados, rbd };
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        let symbol = libraries.$of.symbol(name)?;
                        // SAFETY: the library exports this name with this type: the headers
                        // rados/librados.h and rbd/librbd.h declare it, and neither changes while
                        // the number in the name of the library stays.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados: fn rados_version(*mut c_int, *mut c_int, *mut c_int);
    rados: fn rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    rados: fn rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados: fn rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados: fn rados_connect(Handle) -> c_int;
    rados: fn rados_shutdown(Handle);
    rados: fn rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
    rados: fn rados_blocklist_add(Handle, *mut c_char, u32) -> c_int;
    rados: fn rados_wait_for_latest_osdmap(Handle) -> c_int;
    rados: fn rados_mon_command(
        Handle, *mut *const c_char, usize, *const c_char, usize,
        *mut *mut c_char, *mut usize, *mut *mut c_char, *mut usize
    ) -> c_int;
    rados: fn rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados: fn rados_ioctx_destroy(Handle);
    rados: fn rados_ioctx_set_namespace(Handle, *const c_char);
    rados: fn rados_ioctx_get_id(Handle) -> i64;
    rados: fn rados_list_lockers(
        Handle, *const c_char, *const c_char, *mut c_int,
        *mut c_char, *mut usize, *mut c_char, *mut usize,
        *mut c_char, *mut usize, *mut c_char, *mut usize
    ) -> isize;
    rados: fn rados_read(Handle, *const c_char, *mut c_char, usize, u64) -> c_int;
    rados: fn rados_getxattr(
        Handle, *const c_char, *const c_char, *mut c_char, usize
    ) -> c_int;
    rados: fn rados_create_write_op() -> Handle;
    rados: fn rados_release_write_op(Handle);
    rados: fn rados_write_op_create(Handle, c_int, *const c_char);
    rados: fn rados_write_op_cmpxattr(Handle, *const c_char, u8, *const c_char, usize);
    rados: fn rados_write_op_setxattr(Handle, *const c_char, *const c_char, usize);
    rados: fn rados_write_op_write_full(Handle, *const c_char, usize);
    rados: fn rados_write_op_operate(
        Handle, Handle, *const c_char, *mut libc::time_t, c_int
    ) -> c_int;
    rados: fn rados_watch3(
        Handle, *const c_char, *mut u64, NoticeCall, BrokenCall, u32, *mut c_void
    ) -> c_int;
    rados: fn rados_unwatch2(Handle, u64) -> c_int;
    rados: fn rados_watch_flush(Handle) -> c_int;
    rados: fn rados_notify2(
        Handle, *const c_char, *const c_char, c_int, u64, *mut *mut c_char, *mut usize
    ) -> c_int;
    rados: fn rados_notify_ack(Handle, *const c_char, u64, u64, *const c_char, c_int) -> c_int;
    rados: fn rados_buffer_free(*mut c_char);
    rbd: fn rbd_version(*mut c_int, *mut c_int, *mut c_int);
    rbd: fn rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: fn rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: fn rbd_close(Handle) -> c_int;
    rbd: fn rbd_get_size(Handle, *mut u64) -> c_int;
    rbd: fn rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    rbd: fn rbd_get_features(Handle, *mut u64) -> c_int;
    rbd: fn rbd_resize(Handle, u64) -> c_int;
    rbd: fn rbd_snap_get_id(Handle, *const c_char, *mut u64) -> c_int;
    rbd: fn rbd_config_image_list(Handle, *mut ImageSetting, *mut c_int) -> c_int;
    rbd: fn rbd_config_image_list_cleanup(*mut ImageSetting, c_int);
    rbd: fn rbd_watchers_list(Handle, *mut ImageWatcher, *mut usize) -> c_int;
    rbd: fn rbd_watchers_list_cleanup(*mut ImageWatcher, usize);
    rbd: fn rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd: fn rbd_lock_release(Handle) -> c_int;
    rbd: fn rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd: fn rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd: fn rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
    rbd: fn rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
    rbd: fn rbd_update_watch(Handle, *mut u64, UpdateCall, *mut c_void) -> c_int;
    rbd: fn rbd_update_unwatch(Handle, u64) -> c_int;
    rbd: fn rbd_aio_create_completion(*mut c_void, CompletionCall, *mut Handle) -> c_int;
    rbd: fn rbd_aio_get_return_value(Handle) -> isize;
    rbd: fn rbd_aio_release(Handle);
    rbd: fn rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd: fn rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd: fn rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd: fn rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd: fn rbd_aio_flush(Handle, Handle) -> c_int;
}

// The one table of this process.
static LIBRARY: Mutex<Option<&'static Library>> = Mutex::new(None);

impl Library {
    /// The functions. Loads the libraries at the first call that succeeds: a library that is
    /// missing may be installed while the target runs.
    ///
    /// # Errors
    /// A library is missing or too old. The text names its package.
    pub(super) fn get() -> Result<&'static Self, ImageError> {
        let mut known = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *known {
            return Ok(library);
        }
        let (rados, rbd) = (Loaded::open(RADOS)?, Loaded::open(RBD)?);
        let library: &'static Self = Box::leak(Box::new(Self::of(&rados, &rbd)?));
        end_without_destructors();
        Ok(known.insert(library))
    }

    /// The versions of librados and librbd, for people. They count from their first release, not
    /// with Ceph.
    pub(super) fn versions(&self) -> String {
        let of = |call: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int)| {
            let (mut major, mut minor, mut extra) = (0, 0, 0);
            // SAFETY: the function writes three numbers.
            unsafe { call(&raw mut major, &raw mut minor, &raw mut extra) };
            format!("{major}.{minor}.{extra}")
        };
        format!("librados {}, librbd {}", of(self.rados_version), of(self.rbd_version))
    }
}

/// From now on the process ends without the destructors of Ceph's libraries: a client of a cluster
/// that does not answer may still have threads then, which use what the destructors free.
fn end_without_destructors() {
    type OnExit =
        unsafe extern "C" fn(unsafe extern "C" fn(c_int, *mut c_void), *mut c_void) -> c_int;
    unsafe extern "C" fn end(status: c_int, _: *mut c_void) {
        // SAFETY: the process ends here. The Rust runtime has flushed its output.
        unsafe { libc::_exit(status) }
    }
    // SAFETY: a name that ends with a zero. It is looked up, since only the GNU C library has it.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"on_exit".as_ptr()) };
    if !found.is_null() {
        // SAFETY: the function of that name has this type (stdlib.h). What is registered last runs
        // first, so this runs before the destructors of the libraries, which are loaded by now.
        unsafe {
            let on_exit = std::mem::transmute::<*mut c_void, OnExit>(found);
            on_exit(end, std::ptr::null_mut());
        }
    }
}

struct Libraries<'l> {
    rados: &'l Loaded,
    rbd: &'l Loaded,
}

/// A loaded library. It is never unloaded.
struct Loaded {
    handle: *mut c_void,
    name: &'static CStr,
    package: &'static str,
}

impl Loaded {
    fn open((name, package): (&'static CStr, &'static str)) -> Result<Self, ImageError> {
        // SAFETY: loading runs the constructors of the library and of those that it needs. They are
        // those of Ceph and of its dependencies, which other programs load in the same way.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            let library = shown(name);
            return Err(ImageError::NoLibrary { library, package, why: last_error() });
        }
        Ok(Self { handle, name, package })
    }

    /// The address of a function. `name` ends with a zero.
    fn symbol(&self, name: &'static [u8]) -> Result<*mut c_void, ImageError> {
        let symbol = CStr::from_bytes_with_nul(name).map_or(std::ptr::null_mut(), |name| {
            // SAFETY: the library stays loaded.
            unsafe { libc::dlsym(self.handle, name.as_ptr()) }
        });
        if symbol.is_null() {
            let function = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
            let library = shown(self.name);
            return Err(ImageError::OldLibrary { library, package: self.package, function });
        }
        Ok(symbol)
    }
}

fn shown(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

/// The reason of the last failure in this thread.
fn last_error() -> String {
    // SAFETY: the text is of this thread, and stays until its next call of these functions.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown reason".to_owned();
    }
    // SAFETY: as above; it ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_names_its_package() {
        let error =
            Loaded::open((c"libnothing-of-rblk.so.9", "libnothing9")).map(drop).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("apt install libnothing9"), "{text}");
        assert!(text.contains("libnothing-of-rblk.so.9"), "{text}");
    }

    #[test]
    fn a_library_without_a_function_is_too_old() {
        let loaded = Loaded::open((c"libc.so.6", "libc6")).unwrap();
        assert!(loaded.symbol(b"dup\0").is_ok());
        let text = loaded.symbol(b"rbd_aio_write_zeroes\0").unwrap_err().to_string();
        assert!(text.contains("rbd_aio_write_zeroes") && text.contains("libc6"), "{text}");
    }
}
