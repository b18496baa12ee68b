//! [`Device`]: a verbs context as librdmacm opened it, and what the device can do.
//!
//! librdmacm opens one context per device and process and closes it only when the device is gone
//! and no id is left on it. Memory and queues outlive ids, so a `Device` holds a reference of its
//! own: the list that `rdma_get_devices` returned, which keeps every context in it open until
//! `rdma_free_devices`.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::async_events::AsyncEvents;
use super::completion_queue::CompletionQueue;
use super::ffi;
use super::protection_domain::ProtectionDomain;
use crate::device::{DeviceCaps, Transport};
use crate::error::{FabricError, Result};
use crate::work::MAX_SGE;

/// Vendor ids of the kernel's software devices: rxe (`RXE_VENDOR_ID`,
/// drivers/infiniband/sw/rxe/rxe_param.h) and siw (`SIW_VENDOR_ID`,
/// drivers/infiniband/sw/siw/siw.h).
const SOFTWARE_VENDORS: [u32; 2] = [0x00ff_ffff, 0x62_6d74];

/// Inline sizes tried, largest first. Beyond 256 bytes a gather is as fast on all devices measured,
/// and a large inline size makes every send slot larger.
pub(super) const INLINE_LADDER: [u32; 4] = [256, 128, 64, 0];

/// A verbs device. Clones name the same one.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    // Dropped first: its thread uses the context.
    events: AsyncEvents,
    caps: DeviceCaps,
    max_read_sges: u32,
    vectors: usize,
    next_vector: AtomicUsize,
    // Last: keeps the context open.
    context: Pinned,
}

// Devices in use, by context. A route that leads to a known one shares its PDs and event thread.
static OPEN: Mutex<Vec<(usize, Weak<Inner>)>> = Mutex::new(Vec::new());

impl Device {
    /// The device of a context that librdmacm handed out with an id bound to `port`. The id must
    /// live during the call, which keeps the context open.
    pub(super) fn of_context(context: NonNull<ffi::ibv_context>, port: u8) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, device)| device.strong_count() > 0);
        let key = context.as_ptr() as usize;
        if let Some(device) = open.iter().find(|(k, _)| *k == key).and_then(|(_, d)| d.upgrade()) {
            return Ok(Self(device));
        }
        let context = Pinned::find(context)?;
        let (mut caps, max_read_sges) = query(&context, port)?;
        caps.inline_bytes = probe_inline(&context);
        if (caps.max_sges as usize) < MAX_SGE {
            tracing::warn!(
                device = caps.name,
                max_sges = caps.max_sges,
                "few gather entries per work request"
            );
        }
        let events = AsyncEvents::start(context.0, caps.name.clone())?;
        // SAFETY: the context is open.
        let vectors = unsafe { (*context.as_ptr()).num_comp_vectors };
        let inner = Arc::new(Inner {
            events,
            caps,
            max_read_sges,
            vectors: usize::try_from(vectors).unwrap_or(1).max(1),
            next_vector: AtomicUsize::new(0),
            context,
        });
        open.push((key, Arc::downgrade(&inner)));
        Ok(Self(inner))
    }

    /// Every device of the host, by its first port.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`], or one cannot be queried.
    pub(super) fn all() -> Result<Vec<Self>> {
        let mut count = 0;
        // SAFETY: plain call; the list is freed below.
        let list = unsafe { ffi::rdma_get_devices(&raw mut count) };
        let list = NonNull::new(list).ok_or(FabricError::NoDevice)?;
        // SAFETY: the list has `count` entries.
        let contexts = unsafe {
            std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count).unwrap_or(0))
        };
        // The list keeps the contexts open while they are looked up; a device then pins its own.
        let devices = contexts
            .iter()
            .filter_map(|context| NonNull::new(*context))
            .map(|context| Self::of_context(context, 1))
            .collect::<Result<Vec<_>>>();
        // SAFETY: the list came from rdma_get_devices and is freed once.
        unsafe { ffi::rdma_free_devices(list.as_ptr()) };
        devices.and_then(|d| if d.is_empty() { Err(FabricError::NoDevice) } else { Ok(d) })
    }

    /// What it can do.
    #[must_use]
    pub fn caps(&self) -> &DeviceCaps {
        &self.0.caps
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// The errno of `ibv_alloc_pd`.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        ProtectionDomain::alloc(self)
    }

    /// Whether both are the same device (the same context, since librdmacm shares them).
    #[must_use]
    pub fn same_as(&self, other: &Self) -> bool {
        self.context() == other.context()
    }

    /// The context, open while `self` lives.
    pub(super) fn context(&self) -> *mut ffi::ibv_context {
        self.0.context.as_ptr()
    }

    pub(super) fn name(&self) -> &str {
        &self.0.caps.name
    }

    /// Gather entries an RDMA READ may have; fewer than for other WRs on some devices (one on
    /// iWARP).
    pub(super) fn max_read_sges(&self) -> u32 {
        self.0.max_read_sges
    }

    /// CQs take turns on the interrupt vectors, so that pollers do not share one.
    pub(super) fn next_completion_vector(&self) -> i32 {
        let turn = self.0.next_vector.fetch_add(1, Ordering::Relaxed);
        i32::try_from(turn % self.0.vectors).unwrap_or(0)
    }

    /// Has the CQ marked broken when the device says that it, or all of it, is.
    pub(super) fn watch(&self, queue: &Arc<CompletionQueue>) {
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

/// A context and the list that keeps it open.
#[derive(Debug)]
struct Pinned(NonNull<ffi::ibv_context>, NonNull<*mut ffi::ibv_context>);

// SAFETY: a context may be used from any thread; the list is only handed back to rdma_free_devices.
unsafe impl Send for Pinned {}
// SAFETY: as for Send; libibverbs locks inside.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn find(context: NonNull<ffi::ibv_context>) -> Result<Self> {
        let mut count = 0;
        // SAFETY: plain call; the list is freed in drop.
        let list = unsafe { ffi::rdma_get_devices(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(|| FabricError::last_os("rdma_get_devices"))?;
        let pinned = Self(context, list);
        // SAFETY: the list has `count` entries and a null after them.
        let known = unsafe {
            std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count).unwrap_or(0))
        };
        if known.contains(&context.as_ptr()) {
            return Ok(pinned);
        }
        // Unplugged between the id's event and now.
        Err(FabricError::Call {
            call: "rdma_get_devices",
            source: io::Error::from_raw_os_error(libc::ENODEV),
        })
    }

    fn as_ptr(&self) -> *mut ffi::ibv_context {
        self.0.as_ptr()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the list came from rdma_get_devices and is freed once.
        unsafe { ffi::rdma_free_devices(self.1.as_ptr()) };
    }
}

fn query(context: &Pinned, port: u8) -> Result<(DeviceCaps, u32)> {
    let call =
        |call, errno| FabricError::Call { call, source: io::Error::from_raw_os_error(errno) };
    // SAFETY: an all-zero ibv_device_attr is a value of plain integers.
    let mut attr: ffi::ibv_device_attr = unsafe { mem::zeroed() };
    // SAFETY: the context is open and `attr` is of the size the ABI fixes.
    let errno = unsafe { ffi::ibv_query_device(context.as_ptr(), &raw mut attr) };
    if errno != 0 {
        return Err(call("ibv_query_device", errno));
    }
    // SAFETY: as above.
    let mut port_attr: ffi::ibv_port_attr = unsafe { mem::zeroed() };
    // SAFETY: the exported function writes the older, shorter struct, a prefix of this one.
    let errno = unsafe { ffi::ibv_query_port(context.as_ptr(), port, (&raw mut port_attr).cast()) };
    if errno != 0 {
        return Err(call("ibv_query_port", errno));
    }
    // SAFETY: an open context has a device.
    let device = unsafe { (*context.as_ptr()).device };
    // SAFETY: the device is live with its context; its name is a C string inside it.
    let (raw_transport, name) = unsafe {
        let name = CStr::from_ptr(ffi::ibv_get_device_name(device));
        ((*device).transport_type, name.to_string_lossy().into_owned())
    };
    let transport = transport(raw_transport, port_attr.link_layer);
    let iwarp = transport == Transport::Iwarp;
    let positive = |value: i32| u32::try_from(value).unwrap_or(0);
    let depth = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
    let caps = DeviceCaps {
        name,
        transport,
        max_wrs: positive(attr.max_qp_wr),
        max_sges: positive(attr.max_sge).min(u32::try_from(MAX_SGE).unwrap_or(u32::MAX)),
        max_cq_entries: positive(attr.max_cqe),
        max_reads_out: depth(attr.max_qp_init_rd_atom),
        max_reads_in: depth(attr.max_qp_rd_atom),
        max_region_bytes: attr.max_mr_size,
        inline_bytes: 0,
        write_with_imm: !iwarp,
        read_sink_needs_remote_write: iwarp,
        kernel_software: SOFTWARE_VENDORS.contains(&attr.vendor_id),
        touches_until_destroyed: true,
    };
    // Some drivers leave max_sge_rd at zero and mean max_sge.
    let max_read_sges = match positive(attr.max_sge_rd) {
        0 => caps.max_sges,
        some => some.min(caps.max_sges),
    };
    Ok((caps, max_read_sges))
}

fn transport(transport_type: i32, link_layer: u8) -> Transport {
    match (transport_type, u32::from(link_layer)) {
        (ffi::IBV_TRANSPORT_IWARP, _) => Transport::Iwarp,
        (ffi::IBV_TRANSPORT_IB, ffi::IBV_LINK_LAYER_ETHERNET) => Transport::Roce,
        // Devices older than the field report 0 and are InfiniBand (ibv_query_port(3)).
        (ffi::IBV_TRANSPORT_IB, 0 | ffi::IBV_LINK_LAYER_INFINIBAND) => Transport::InfiniBand,
        _ => Transport::Unknown,
    }
}

/// The most inline bytes of a small QP: what `max_inline_data` may be is nowhere to be queried.
fn probe_inline(context: &Pinned) -> u32 {
    // SAFETY: the context is open; each object is destroyed below, in the opposite order.
    unsafe {
        let pd = ffi::ibv_alloc_pd(context.as_ptr());
        let cq = ffi::ibv_create_cq(context.as_ptr(), 2, ptr::null_mut(), ptr::null_mut(), 0);
        let mut granted = 0;
        if !pd.is_null() && !cq.is_null() {
            for wanted in INLINE_LADDER {
                let mut attr: ffi::ibv_qp_init_attr = mem::zeroed();
                (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq, cq, ffi::ibv_qp_type::IBV_QPT_RC);
                (attr.cap.max_send_wr, attr.cap.max_recv_wr) = (1, 1);
                (attr.cap.max_send_sge, attr.cap.max_recv_sge) = (1, 1);
                attr.cap.max_inline_data = wanted;
                let qp = ffi::ibv_create_qp(pd, &raw mut attr);
                if !qp.is_null() {
                    ffi::ibv_destroy_qp(qp);
                    granted = wanted;
                    break;
                }
            }
        }
        if !cq.is_null() {
            ffi::ibv_destroy_cq(cq);
        }
        if !pd.is_null() {
            ffi::ibv_dealloc_pd(pd);
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports() {
        assert_eq!(transport(0, 1), Transport::InfiniBand);
        assert_eq!(transport(0, 0), Transport::InfiniBand);
        assert_eq!(transport(0, 2), Transport::Roce);
        assert_eq!(transport(1, 2), Transport::Iwarp);
        assert_eq!(transport(4, 0), Transport::Unknown);
        assert_eq!(transport(-1, 9), Transport::Unknown);
    }
}
