//! [`Device`]: a verbs context that librdmacm opened.
//!
//! librdmacm opens one context per device and process. It closes the context only when the device
//! is gone and nothing refers to it. Memory and queues outlive ids, so a `Device` holds a reference
//! of its own: an id that is bound to the device. So the context of a device that was removed is
//! closed when its `Device` goes, independently of other devices. Where no such id can be had, the
//! list that `rdma_get_devices` returns does, cut down to the one context; librdmacm makes it only
//! if all devices open.

pub(super) mod cq_health;
pub(super) mod device_list;
pub(super) mod event_reader;
pub(super) mod presence;

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rblk_protocol::width::{narrow, wide};

use super::cm::cm_id::CmId;
use super::device_caps::{name_of, probe_inline, query, reachable_port};
use super::ffi;
use crate::caps::DeviceCaps;
use crate::completion_vector::CompletionVector;
use crate::error::{FabricError, Result};
use crate::work::MAX_SGE;
use cq_health::CqHealth;
use device_list::DeviceList;
use event_reader::EventReader;

/// A verbs device. Clones name the same one.
#[derive(Clone, Debug)]
pub struct Device(Arc<OpenDevice>);

#[derive(Debug)]
struct OpenDevice {
    // Dropped first: its thread uses the context.
    events: EventReader,
    caps: DeviceCaps,
    max_read_sges: u32,
    vectors: usize,
    next_vector: AtomicUsize,
    // Last: keeps the context open.
    context: Pinned,
}

// Devices in use, by context. All routes that leave by a device share its PDs and event thread.
static OPEN: Mutex<Vec<(usize, Weak<OpenDevice>)>> = Mutex::new(Vec::new());

impl Device {
    /// The device that an id is bound to.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`] for an id that is bound to none, or a query of the device fails.
    pub(super) fn of_id(id: &CmId) -> Result<Self> {
        // The id keeps the context open during the call.
        let context = NonNull::new(id.verbs()).ok_or(FabricError::NoDevice)?;
        Self::open(context, id.port(), || Pinned::by_id(context, id))
    }

    /// The device of a context that is open, as peers come by `port`.
    fn open(
        context: NonNull<ffi::ibv_context>,
        port: u8,
        pin: impl FnOnce() -> Result<Pinned>,
    ) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, device)| device.strong_count() > 0);
        let key = context.as_ptr() as usize;
        if let Some(device) = open.iter().find(|(k, _)| *k == key).and_then(|(_, d)| d.upgrade()) {
            return Ok(Self(device));
        }
        let context = pin()?;
        // SAFETY: `context` is pinned, so it is open.
        let (mut caps, max_read_sges) = unsafe { query(context.raw, port) }?;
        // SAFETY: as above.
        caps.inline_bytes = unsafe { probe_inline(context.raw) }?;
        if wide(caps.max_sges) < MAX_SGE {
            tracing::warn!(
                device = caps.name,
                max_sges = caps.max_sges,
                "few gather entries per work request: payloads take more work requests"
            );
        }
        // SAFETY: as above.
        unsafe { presence::note(context.raw) };
        let events = EventReader::start(context.raw, caps.name.clone())?;
        // SAFETY: the context is open.
        let vectors = unsafe { (*context.raw.as_ptr()).num_comp_vectors };
        let inner = Arc::new(OpenDevice {
            events,
            caps,
            max_read_sges,
            vectors: usize::try_from(vectors).unwrap_or(1).max(1),
            next_vector: AtomicUsize::new(first_vector(std::process::id())),
            context,
        });
        open.push((key, Arc::downgrade(&inner)));
        Ok(Self(inner))
    }

    /// The devices of the host that peers can connect through now. Says in the log which of the
    /// others there are, and why they are passed over.
    pub(super) fn all() -> Vec<Self> {
        // The list keeps the contexts open during the look-up. After that, each device pins its
        // own.
        let list = presence::list();
        if list.is_none() {
            // Some versions of librdmacm list all devices or none.
            let error = io::Error::last_os_error();
            tracing::warn!(%error, "the RDMA devices cannot be listed: one of them does not open");
        }
        let contexts = list.as_ref().map_or(&[][..], DeviceList::contexts);
        let contexts = || contexts.iter().filter_map(|context| NonNull::new(*context));
        // SAFETY: the list keeps its contexts open.
        let opened: Vec<String> = contexts().map(|context| unsafe { name_of(context) }).collect();
        let listed = if list.is_some() { names_of_all() } else { Vec::new() };
        for device in listed.into_iter().filter(|name| !opened.contains(name)) {
            tracing::warn!(device, reason = "it does not open", "an RDMA device is passed over");
        }
        let usable = |context| {
            // SAFETY: the list keeps the context open.
            let found = unsafe { reachable_port(context) }.and_then(|port| {
                let device = Self::open(context, port, || Pinned::by_list(context));
                device.map_err(|error| error.to_string())
            });
            if let Err(reason) = &found {
                // SAFETY: as above.
                let device = unsafe { name_of(context) };
                tracing::warn!(device, reason, "an RDMA device is passed over");
            }
            found.ok()
        };
        contexts().filter_map(usable).collect()
    }

    /// The abilities of the device.
    #[must_use]
    pub(crate) fn caps(&self) -> &DeviceCaps {
        &self.0.caps
    }

    /// Whether both are the same device. librdmacm opens one context per device, so the contexts
    /// are compared.
    #[must_use]
    pub(crate) fn same_as(&self, other: &Self) -> bool {
        self.context() == other.context()
    }

    /// The context, open while `self` lives.
    pub(super) fn context(&self) -> *mut ffi::ibv_context {
        self.0.context.raw.as_ptr()
    }

    pub(super) fn name(&self) -> &str {
        &self.0.caps.name
    }

    /// SGEs that an RDMA READ may have. On some devices fewer than for other WRs (one on iWARP).
    pub(super) fn max_read_sges(&self) -> u32 {
        self.0.max_read_sges
    }

    /// The number of an interrupt vector.
    pub(super) fn completion_vector(&self, vector: CompletionVector) -> i32 {
        let vector = match vector {
            CompletionVector::Turn => self.0.next_vector.fetch_add(1, Ordering::Relaxed),
            CompletionVector::At(vector) => wide(vector),
        };
        narrow(vector % self.0.vectors)
    }

    /// Marks the CQ broken when an event says that the CQ or the whole device is.
    pub(super) fn watch(&self, queue: &Arc<CqHealth>) {
        self.0.events.watch(queue);
    }

    /// Nothing made on the device will complete any more.
    pub(super) fn mark_gone(context: *mut ffi::ibv_context) {
        let device = {
            let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            open.iter().find(|(key, _)| *key == context as usize).and_then(|(_, d)| d.upgrade())
        };
        if let Some(device) = device {
            device.events.mark_all_broken();
        }
    }
}

/// Where a process begins to count vectors: so that processes with few CQs each, such as mounts, do
/// not all use the first ones. Their ids are often near each other, so they are spread.
fn first_vector(process: u32) -> usize {
    // The golden ratio of 2^32: any run of numbers is spread evenly (Knuth, volume 3, 6.4).
    let spread = process.wrapping_mul(0x9e37_79b9);
    // The upper bits are the good ones, and the sum with the turn must not overflow soon.
    wide(spread >> 8)
}

/// The names of all devices of this host, also of those that do not open.
fn names_of_all() -> Vec<String> {
    let Ok(devices) = ibverbs::devices() else { return Vec::new() };
    let name = |device: ibverbs::Device<'_>| Some(device.name()?.to_string_lossy().into_owned());
    devices.iter().filter_map(name).collect()
}

/// A context and the reference that keeps it open. The reference keeps no other context open.
#[derive(Debug)]
struct Pinned {
    raw: NonNull<ffi::ibv_context>,
    _id: Option<CmId>,
    _list: Option<DeviceList>,
}

// SAFETY: a context may be used from any thread; the list is only handed back to rdma_free_devices.
unsafe impl Send for Pinned {}
// SAFETY: as for Send; libibverbs locks inside.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// By another id on the same device, or by the list of all devices.
    fn by_id(context: NonNull<ffi::ibv_context>, id: &CmId) -> Result<Self> {
        match id.another() {
            Ok(id) => Ok(Self { raw: context, _id: Some(id), _list: None }),
            Err(error) => {
                tracing::debug!(%error, "no second id on the device");
                Self::by_list(context)
            }
        }
    }

    fn by_list(context: NonNull<ffi::ibv_context>) -> Result<Self> {
        let list = presence::list().ok_or_else(|| FabricError::last_os("rdma_get_devices"))?;
        // Without it, the device was unplugged between the event of the id and now.
        let list = list.only(context).ok_or_else(|| FabricError::Call {
            call: "rdma_get_devices",
            source: io::Error::from_raw_os_error(libc::ENODEV),
        })?;
        Ok(Self { raw: context, _id: None, _list: Some(list) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_do_not_share_the_first_vectors() {
        // Fifty mounts of five CQs on a card with as many vectors as a host has CPUs.
        for (vectors, step) in [(16, 1), (63, 1), (63, 7), (64, 16), (128, 3)] {
            let mut load = vec![0; vectors];
            for mount in 0..50 {
                let first = first_vector(4000 + mount * step);
                (0..5).for_each(|cq| load[(first + cq) % vectors] += 1);
            }
            let fair = 250usize.div_ceil(vectors);
            let most = load.iter().max().copied().unwrap_or(0);
            assert!(most <= 3 * fair + 2, "{vectors} vectors, step {step}: {load:?}");
        }
    }
}
