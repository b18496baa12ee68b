//! The abilities of a verbs device: [`query`] asks it, [`probe_inline`] tries.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::ptr::{self, NonNull};

use rblk_protocol::width::narrow;

use super::ffi;
use crate::caps::{DeviceCaps, Transport};
use crate::error::{FabricError, Result};
use crate::work::MAX_SGE;

/// Vendor ids of the kernel's software devices: rxe (`RXE_VENDOR_ID`,
/// drivers/infiniband/sw/rxe/rxe_param.h) and siw (`SIW_VENDOR_ID`,
/// drivers/infiniband/sw/siw/siw.h).
const SOFTWARE_VENDORS: [u32; 2] = [0x00ff_ffff, 0x62_6d74];

/// Sizes of inline payload to try, largest first. Above 256 bytes, a gather was as fast on every
/// device measured, and a large inline size makes every entry of the send queue larger.
pub(super) const INLINE_LADDER: [u32; 4] = [256, 128, 64, 0];

/// The abilities that a device claims, and the SGEs that an RDMA READ may have. Inline payload is
/// not part of the answer.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn query(
    context: NonNull<ffi::ibv_context>,
    port: u8,
) -> Result<(DeviceCaps, u32)> {
    let call =
        |call, errno| FabricError::Call { call, source: io::Error::from_raw_os_error(errno) };
    // SAFETY: an all-zero ibv_device_attr is a value of plain integers.
    let mut attr: ffi::ibv_device_attr = unsafe { mem::zeroed() };
    // SAFETY: the context is open, by the caller's promise, and `attr` is of the size that the ABI
    // fixes.
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
    // SAFETY: an open context has a device, which lives as long.
    let (raw_transport, name) =
        unsafe { ((*(*context.as_ptr()).device).transport_type, name_of(context)) };
    let transport = transport(raw_transport, port_attr.link_layer);
    let iwarp = transport == Transport::Iwarp;
    let positive = |value: i32| u32::try_from(value).unwrap_or(0);
    let depth = |value: i32| narrow(value.clamp(0, 255).unsigned_abs());
    let caps = DeviceCaps {
        name,
        transport,
        max_wrs: positive(attr.max_qp_wr),
        max_sges: positive(attr.max_sge).min(narrow(MAX_SGE)),
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
    // Some drivers leave max_sge_rd at zero, and then max_sge applies.
    let max_read_sges = match positive(attr.max_sge_rd) {
        0 => caps.max_sges,
        some => some.min(caps.max_sges),
    };
    Ok((caps, max_read_sges))
}

/// The name of a device.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn name_of(context: NonNull<ffi::ibv_context>) -> String {
    // SAFETY: an open context has a device, and the device's name is a C string inside it.
    let name = unsafe { CStr::from_ptr(ffi::ibv_get_device_name((*context.as_ptr()).device)) };
    name.to_string_lossy().into_owned()
}

/// Whether a device speaks iWARP.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn is_iwarp(context: NonNull<ffi::ibv_context>) -> bool {
    // SAFETY: an open context has a device.
    unsafe { (*(*context.as_ptr()).device).transport_type == ffi::IBV_TRANSPORT_IWARP }
}

/// The first port that peers can reach now: it is active, and on Ethernet it has an IP address.
///
/// # Errors
/// Why there is none.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn reachable_port(
    context: NonNull<ffi::ibv_context>,
) -> std::result::Result<u8, String> {
    let failed = |call, errno| format!("{call} failed: {}", io::Error::from_raw_os_error(errno));
    // SAFETY: as in `query`.
    let mut attr: ffi::ibv_device_attr = unsafe { mem::zeroed() };
    // SAFETY: the context is open, by the caller's promise.
    match unsafe { ffi::ibv_query_device(context.as_ptr(), &raw mut attr) } {
        0 => {}
        errno => return Err(failed("ibv_query_device", errno)),
    }
    // SAFETY: as above.
    let is_iwarp = unsafe { is_iwarp(context) };
    let mut reason = "it has no port that is active".to_owned();
    for port in 1..=attr.phys_port_cnt {
        // SAFETY: as in `query`.
        let mut found: ffi::ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open; the call writes a prefix of the struct.
        let errno = unsafe { ffi::ibv_query_port(context.as_ptr(), port, (&raw mut found).cast()) };
        if errno != 0 {
            reason = failed("ibv_query_port", errno);
            continue;
        }
        if found.state != ffi::ibv_port_state::IBV_PORT_ACTIVE {
            continue;
        }
        let is_roce = u32::from(found.link_layer) == ffi::IBV_LINK_LAYER_ETHERNET && !is_iwarp;
        // SAFETY: the context is open.
        if !is_roce || unsafe { has_address(context, port, found.gid_tbl_len) } {
            return Ok(port);
        }
        reason = "its network interface has no IP address".to_owned();
    }
    Err(reason)
}

/// Whether a GID of the port stands for an IP address.
///
/// # Safety
/// The context is open.
unsafe fn has_address(context: NonNull<ffi::ibv_context>, port: u8, gids: i32) -> bool {
    (0..gids).any(|index| {
        let mut gid = ffi::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open, by the caller's promise; the call writes 16 bytes.
        let rc = unsafe { ffi::ibv_query_gid(context.as_ptr(), port, index, &raw mut gid) };
        // SAFETY: every member of the union is 16 plain bytes.
        rc == 0 && is_address(unsafe { gid.raw })
    })
}

/// Whether a GID of RoCE is a configured IP address. Each port has a link-local one.
fn is_address(gid: [u8; 16]) -> bool {
    gid != [0; 16] && (gid[0], gid[1] & 0xc0) != (0xfe, 0x80)
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

/// The most inline bytes of a small QP. No query tells the limit of `max_inline_data`, so it is
/// tried.
///
/// # Errors
/// The device makes no reliable connections, as EFA and usNIC do not.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn probe_inline(context: NonNull<ffi::ibv_context>) -> Result<u32> {
    // SAFETY: the context is open, by the caller's promise; each object is destroyed below, in the
    // opposite order.
    unsafe {
        let pd = ffi::ibv_alloc_pd(context.as_ptr());
        let cq = ffi::ibv_create_cq(context.as_ptr(), 2, ptr::null_mut(), ptr::null_mut(), 0);
        let mut granted = Err(FabricError::last_os("making a queue pair for reliable connections"));
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
                    granted = Ok(wanted);
                    break;
                }
                granted = Err(FabricError::last_os("making a queue pair for reliable connections"));
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
    fn gids_that_are_addresses() {
        let gid = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        for address in ["::ffff:10.9.0.1", "2001:db8::7", "fd00::1"] {
            assert!(is_address(gid(address)), "{address}");
        }
        for none in ["::", "fe80::7c62:6cff:fe6b:1", "febf::1"] {
            assert!(!is_address(gid(none)), "{none}");
        }
    }

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
