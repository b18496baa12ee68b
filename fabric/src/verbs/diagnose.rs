//! Facts that a verbs device and a QP report: [`DeviceFacts`], [`QpFacts`].

use std::ffi::{CStr, c_char};
use std::io;
use std::mem;

use rblk_protocol::width::narrow;

use super::completion_queue::PollerHandle;
use super::device::Device;
use super::ffi;
use super::queue_pair::Connection;
use crate::diagnosis::{DeviceFacts, QpFacts};
use crate::error::{FabricError, Result};

/// Asks the device, and its port.
pub(crate) fn facts_of_device(device: &Device, port: u8) -> Result<DeviceFacts> {
    // SAFETY: an all-zero ibv_device_attr is a value of plain integers.
    let mut attr: ffi::ibv_device_attr = unsafe { mem::zeroed() };
    // SAFETY: the context is open while `device` lives; `attr` has the size that the ABI fixes.
    check("ibv_query_device", unsafe { ffi::ibv_query_device(device.context(), &raw mut attr) })?;
    // SAFETY: as above.
    let mut port_attr: ffi::ibv_port_attr = unsafe { mem::zeroed() };
    // SAFETY: the context is open; the exported function writes the older, shorter struct, a prefix
    // of this one.
    let errno = unsafe { ffi::ibv_query_port(device.context(), port, (&raw mut port_attr).cast()) };
    check("ibv_query_port", errno)?;
    // SAFETY: the context is open.
    let vectors = unsafe { (*device.context()).num_comp_vectors };
    Ok(DeviceFacts {
        firmware: text(&attr.fw_ver),
        vendor: attr.vendor_id,
        part: attr.vendor_part_id,
        max_qps: count(attr.max_qp),
        max_wrs: count(attr.max_qp_wr),
        max_sges: count(attr.max_sge),
        max_read_sges: count(attr.max_sge_rd),
        max_cqs: count(attr.max_cq),
        max_cq_entries: count(attr.max_cqe),
        max_mrs: count(attr.max_mr),
        max_mr_bytes: attr.max_mr_size,
        max_pds: count(attr.max_pd),
        max_reads_out: count(attr.max_qp_init_rd_atom),
        max_reads_in: count(attr.max_qp_rd_atom),
        vectors: count(vectors),
        port,
        is_active: port_attr.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
        mtu: mtu(port_attr.active_mtu),
        max_mtu: mtu(port_attr.max_mtu),
    })
}

/// Asks about the QP of a connection.
pub(crate) fn facts_of_qp(connection: &Connection) -> Result<QpFacts> {
    let wanted = ffi::ibv_qp_attr_mask::IBV_QP_CAP
        | ffi::ibv_qp_attr_mask::IBV_QP_PATH_MTU
        | ffi::ibv_qp_attr_mask::IBV_QP_TIMEOUT
        | ffi::ibv_qp_attr_mask::IBV_QP_RETRY_CNT
        | ffi::ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC
        | ffi::ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC;
    // SAFETY: all-zero values of plain integers and null pointers.
    let (mut attr, mut init): (ffi::ibv_qp_attr, ffi::ibv_qp_init_attr) =
        unsafe { (mem::zeroed(), mem::zeroed()) };
    // SAFETY: the QP lives as long as its connection; both structs live during the call.
    let errno = unsafe {
        ffi::ibv_query_qp(connection.qp(), &raw mut attr, narrow(wanted.0), &raw mut init)
    };
    check("ibv_query_qp", errno)?;
    Ok(QpFacts {
        send_wrs: attr.cap.max_send_wr,
        recv_wrs: attr.cap.max_recv_wr,
        send_sges: attr.cap.max_send_sge,
        // The answer of the call that made the QP. Some providers do not repeat it.
        inline_bytes: connection.max_inline(),
        mtu: mtu(attr.path_mtu),
        reads_out: attr.max_rd_atomic,
        reads_in: attr.max_dest_rd_atomic,
        ack_timeout: attr.timeout,
        retries: attr.retry_cnt,
    })
}

/// Entries of the CQ of a poller: the number that the provider granted.
pub(crate) fn entries_of_cq(handle: &PollerHandle) -> u32 {
    handle.queue().entries()
}

fn check(call: &'static str, errno: i32) -> Result<()> {
    match errno {
        0 => Ok(()),
        errno => {
            // Some providers return a negative errno.
            let source = io::Error::from_raw_os_error(errno.saturating_abs());
            Err(FabricError::Call { call, source })
        }
    }
}

/// Drivers say -1 for "no limit known".
fn count(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// Bytes of an `ibv_mtu`: 1 is 256, and each further one is twice as much.
fn mtu(raw: ffi::ibv_mtu) -> u32 {
    match raw {
        1..=5 => 128 << raw,
        _ => 0,
    }
}

/// The text of a field of a fixed size, which may lack its end.
fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|c| c.to_ne_bytes()[0]).chain([0]).collect();
    let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy);
    text.map(std::borrow::Cow::into_owned).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_packets() {
        assert_eq!([0, 1, 3, 5, 6, 255].map(mtu), [0, 256, 1024, 4096, 0, 0]);
    }

    #[test]
    fn a_text_without_end_is_a_text() {
        let field =
            |text: &[u8]| text.iter().map(|b| c_char::from_ne_bytes([*b])).collect::<Vec<_>>();
        assert_eq!(text(&field(b"16.35\0x")), "16.35");
        assert_eq!(text(&field(b"16")), "16");
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn errors_are_errors_of_either_sign() {
        assert!(check("x", 0).is_ok());
        for errno in [libc::EINVAL, -libc::EINVAL] {
            let Err(FabricError::Call { source, .. }) = check("x", errno) else { panic!() };
            assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
        }
    }
}
