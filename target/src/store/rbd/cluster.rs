//! [`Cluster`]: a client of a Ceph cluster, and [`Pool`]: a pool that it uses.

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::ptr;
use std::time::Duration;

use nix::errno::Errno;
use rblk_config::{ClusterConfig, ImageName};

use super::error::ImageError;
use super::library::{Handle, Library};
use super::needed_setting::{NEEDED, NEEDED_OF_SOME, NeededSetting, OF_CLIENTS, OF_LONE};

/// How long the monitors may take to answer.
pub(super) const MONITOR_DEADLINE: Duration = Duration::from_secs(10);

/// How to reach a cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ClusterPlace {
    /// The configuration file; none: those that Ceph's own programs read.
    pub conf: Option<PathBuf>,
    /// The user, without its type.
    pub user: String,
    /// The file with the user's key; none: the one that the configuration names.
    pub keyring: Option<PathBuf>,
}

impl From<&ClusterConfig<'_>> for ClusterPlace {
    fn from(config: &ClusterConfig<'_>) -> Self {
        Self {
            conf: config.conf.map(ToOwned::to_owned),
            user: config.user.to_owned(),
            keyring: config.keyring.map(ToOwned::to_owned),
        }
    }
}

/// A client of a cluster. The drop ends it, and may block.
#[derive(Debug)]
pub(super) struct Cluster {
    library: &'static Library,
    handle: Handle,
}

// SAFETY: the functions of librados may be called with one handle by several threads.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects. Blocks, at most about as long as [`MONITOR_DEADLINE`].
    pub(super) fn connect(
        library: &'static Library,
        place: &ClusterPlace,
        image: &ImageName,
    ) -> Result<Self, ImageError> {
        let fail = |what, errno| ImageError::Other { image: image.to_string(), what, errno };
        let name = text(&format!("client.{}", place.user));
        let mut handle = ptr::null_mut();
        // SAFETY: both texts live as long as the call, which writes the handle.
        let made =
            unsafe { (library.rados_create2)(&raw mut handle, c"ceph".as_ptr(), name.as_ptr(), 0) };
        checked(made).map_err(|errno| fail("make a client of Ceph", errno))?;
        // The drop frees the handle from here on, connected or not.
        let cluster = Self { library, handle };
        cluster.configure(place, image)?;
        // SAFETY: the handle is configured and not connected.
        match checked(unsafe { (library.rados_connect)(handle) }) {
            Ok(_) => Ok(cluster),
            Err(Errno::ETIMEDOUT) => {
                Err(ImageError::NoMonitor { image: image.to_string(), within: MONITOR_DEADLINE })
            }
            Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EOPNOTSUPP | Errno::EINVAL)) => {
                let (image, user) = (image.to_string(), place.user.clone());
                Err(ImageError::Key { image, user, errno })
            }
            Err(Errno::ENOENT) => {
                let (image, user) = (image.to_string(), place.user.clone());
                Err(ImageError::NoKey { image, user })
            }
            Err(errno) => Err(fail("connect to the cluster", errno)),
        }
    }

    fn configure(&self, place: &ClusterPlace, image: &ImageName) -> Result<(), ImageError> {
        let conf = place.conf.as_ref().map(|path| text(&path.to_string_lossy()));
        // SAFETY: a path, or none for the usual files, for the time of the call.
        let read = unsafe {
            let path = conf.as_ref().map_or(ptr::null(), |path| path.as_ptr());
            (self.library.rados_conf_read_file)(self.handle, path)
        };
        checked(read).map_err(|errno| ImageError::Configuration {
            image: image.to_string(),
            conf: place.conf.as_ref().map_or_else(
                || "/etc/ceph/ceph.conf".to_owned(),
                |path| path.display().to_string(),
            ),
            errno,
        })?;
        let seconds = MONITOR_DEADLINE.as_secs().to_string();
        let deadlines = [("client_mount_timeout", &*seconds), ("rados_mon_op_timeout", &*seconds)];
        let keyring = place.keyring.as_ref().map(|path| path.to_string_lossy().into_owned());
        let keyring = keyring.iter().map(|path| ("keyring", path.as_str()));
        let needed = NEEDED.iter().chain([&OF_LONE]).map(|setting| (setting.name, setting.value));
        for (name, value) in needed.chain(OF_CLIENTS).chain(deadlines).chain(keyring) {
            self.set(name, value).map_err(|errno| ImageError::Other {
                image: image.to_string(),
                what: "configure a client of Ceph",
                errno,
            })?;
        }
        for NeededSetting { name, value, .. } in NEEDED_OF_SOME {
            // A version without the setting has no such cache.
            let _ = self.set(name, value);
        }
        Ok(())
    }

    /// Gives a setting of the client another value.
    pub(super) fn set(&self, name: &str, value: &str) -> Result<(), Errno> {
        let (name, value) = (text(name), text(value));
        // SAFETY: both texts live as long as the call.
        let set =
            unsafe { (self.library.rados_conf_set)(self.handle, name.as_ptr(), value.as_ptr()) };
        checked(set).map(drop)
    }

    /// The functions of Ceph.
    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// For the functions of librados.
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// The id of the cluster.
    pub(super) fn fsid(&self) -> Result<String, Errno> {
        read_text(|buffer, len| {
            // SAFETY: the call writes at most `len` bytes into the buffer.
            unsafe { (self.library.rados_cluster_fsid)(self.handle, buffer, len) }
        })
    }

    /// Fences a client by its address, for so many seconds.
    pub(super) fn fence(&self, address: &str, seconds: u32) -> Result<(), Errno> {
        let address = text(address).into_raw();
        // SAFETY: a text that lives as long as the call, which does not change it.
        let fenced = unsafe { (self.library.rados_blocklist_add)(self.handle, address, seconds) };
        // SAFETY: made above.
        drop(unsafe { CString::from_raw(address) });
        checked(fenced).map(drop)
    }

    /// Waits for the newest map of OSDs, which has all fences so far.
    pub(super) fn wait_for_map(&self) -> Result<(), Errno> {
        // SAFETY: a connected cluster.
        checked(unsafe { (self.library.rados_wait_for_latest_osdmap)(self.handle) }).map(drop)
    }

    /// Opens a pool, with the namespace of an image.
    pub(super) fn pool(&self, image: &ImageName) -> Result<Pool, Errno> {
        let (pool, namespace) = (text(&image.pool), text(&image.namespace));
        let mut handle = ptr::null_mut();
        // SAFETY: the name lives as long as the call, which writes the handle.
        checked(unsafe {
            (self.library.rados_ioctx_create)(self.handle, pool.as_ptr(), &raw mut handle)
        })?;
        // SAFETY: a pool that was just opened, which no other thread uses yet.
        unsafe { (self.library.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        Ok(Pool { library: self.library, handle })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nothing uses the handle any more.
        unsafe { (self.library.rados_shutdown)(self.handle) };
    }
}

/// A pool, with a namespace. Dropped before its cluster.
#[derive(Debug)]
pub(super) struct Pool {
    library: &'static Library,
    handle: Handle,
}

// SAFETY: as for a cluster.
unsafe impl Send for Pool {}
// SAFETY: as for a cluster.
unsafe impl Sync for Pool {}

impl Pool {
    /// The functions of Ceph.
    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// For the functions of librados and librbd.
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// The number of the pool, which stays when it gets another name.
    pub(super) fn id(&self) -> i64 {
        // SAFETY: an open pool.
        unsafe { (self.library.rados_ioctx_get_id)(self.handle) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nothing uses the handle any more.
        unsafe { (self.library.rados_ioctx_destroy)(self.handle) };
    }
}

/// The result of a call: a number, or an error below zero.
pub(super) fn checked(result: i32) -> Result<i32, Errno> {
    if result < 0 { Err(Errno::from_raw(result.wrapping_neg())) } else { Ok(result) }
}

/// A text for a call. A zero inside, which no checked name has, ends it.
pub(super) fn text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

/// The text that a call writes into a buffer of so many bytes.
pub(super) fn read_text(call: impl FnOnce(*mut c_char, usize) -> i32) -> Result<String, Errno> {
    let mut bytes = vec![0_u8; 256];
    checked(call(bytes.as_mut_ptr().cast(), bytes.len()))?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}
