//! The functions and structs of librdmacm that are used, and the names of `ibverbs-sys` that are
//! used.
//!
//! The structs are prefixes of the C structs (rdma/rdma_cma.h). librdmacm allocates them, and this
//! code only reads the fields named here. The ABI of librdmacm.so.1 fixes their offsets, and the
//! assertions below check them.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

pub(super) use ibverbs_sys::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR, IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_TRANSPORT_IB,
    IBV_TRANSPORT_IWARP, ibv_access_flags, ibv_ack_async_event, ibv_ack_cq_events, ibv_alloc_pd,
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_create_comp_channel, ibv_create_cq,
    ibv_create_qp, ibv_dealloc_pd, ibv_dereg_mr, ibv_destroy_comp_channel, ibv_destroy_cq,
    ibv_destroy_qp, ibv_device_attr, ibv_event_type_str, ibv_get_async_event, ibv_get_cq_event,
    ibv_get_device_name, ibv_gid, ibv_modify_qp, ibv_mr, ibv_mtu, ibv_pd, ibv_port_attr,
    ibv_port_state, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_query_device, ibv_query_gid, ibv_query_port, ibv_query_qp,
    ibv_recv_wr, ibv_reg_mr_iova2, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_opcode,
    ibv_wc_status, ibv_wr_opcode,
};

/// `struct rdma_event_channel`.
#[repr(C)]
pub(super) struct RawEventChannel {
    pub(super) fd: c_int,
}

/// `struct rdma_cm_id`, up to `port_num`.
#[repr(C)]
pub(super) struct RawCmId {
    pub(super) verbs: *mut ibv_context,
    pub(super) channel: *mut RawEventChannel,
    pub(super) context: *mut c_void,
    pub(super) qp: *mut ibv_qp,
    pub(super) src_addr: libc::sockaddr_storage,
    pub(super) dst_addr: libc::sockaddr_storage,
    // `struct rdma_ib_addr`: two GIDs and a P_Key.
    ib_addr: [u64; 5],
    path_rec: *mut c_void,
    // Then padding, since `struct rdma_route` is a member of its own.
    num_paths: [c_int; 2],
    ps: c_uint,
    pub(super) port_num: u8,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnParam {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// `struct rdma_cm_event`, with the connection member of its union (the longer datagram one is not
/// used).
#[repr(C)]
pub(super) struct CmEvent {
    pub(super) id: *mut RawCmId,
    pub(super) listen_id: *mut RawCmId,
    pub(super) event: c_uint,
    pub(super) status: c_int,
    pub(super) conn: ConnParam,
}

const _: () = {
    assert!(offset_of!(RawCmId, qp) == 24);
    assert!(offset_of!(RawCmId, src_addr) == 32);
    assert!(offset_of!(RawCmId, dst_addr) == 160);
    assert!(offset_of!(RawCmId, path_rec) == 328);
    assert!(offset_of!(RawCmId, ps) == 344);
    assert!(offset_of!(RawCmId, port_num) == 348);
    assert!(size_of::<ConnParam>() == 24);
    assert!(offset_of!(ConnParam, private_data_len) == 8);
    assert!(offset_of!(ConnParam, qp_num) == 16);
    assert!(offset_of!(CmEvent, event) == 16);
    assert!(offset_of!(CmEvent, status) == 20);
    assert!(offset_of!(CmEvent, conn) == 24);
    // Of libibverbs.so.1, the same from rdma-core 17 to 55.
    assert!(size_of::<ibv_send_wr>() == 128);
    assert!(size_of::<ibv_recv_wr>() == 32);
    assert!(size_of::<ibv_sge>() == 16);
    assert!(size_of::<ibv_wc>() == 48);
    assert!(size_of::<ibv_context>() == 328);
    assert!(size_of::<ibv_qp_init_attr>() == 64);
    assert!(size_of::<ibv_qp_attr>() == 144);
    assert!(size_of::<ibv_qp>() == 160);
    assert!(size_of::<ibv_cq>() == 128);
};

/// `RDMA_PS_TCP`.
pub(super) const PS_TCP: c_int = 0x0106;
/// `RDMA_OPTION_ID`.
pub(super) const OPTION_ID: c_int = 0;
/// `RDMA_OPTION_ID_TOS`: one byte.
pub(super) const OPTION_ID_TOS: c_int = 0;
/// `RDMA_OPTION_ID_ACK_TIMEOUT`: 4.096 us times 2 to the value.
pub(super) const OPTION_ID_ACK_TIMEOUT: c_int = 3;

/// `enum rdma_cm_event_type`.
pub(super) mod event {
    pub(in super::super) const ADDR_RESOLVED: u32 = 0;
    pub(in super::super) const ROUTE_RESOLVED: u32 = 2;
    pub(in super::super) const CONNECT_REQUEST: u32 = 4;
    pub(in super::super) const CONNECT_ERROR: u32 = 6;
    pub(in super::super) const UNREACHABLE: u32 = 7;
    pub(in super::super) const REJECTED: u32 = 8;
    pub(in super::super) const ESTABLISHED: u32 = 9;
    pub(in super::super) const DISCONNECTED: u32 = 10;
    pub(in super::super) const DEVICE_REMOVAL: u32 = 11;
    pub(in super::super) const ADDR_CHANGE: u32 = 14;
    pub(in super::super) const TIMEWAIT_EXIT: u32 = 15;
}

#[link(name = "rdmacm")]
unsafe extern "C" {
    pub(super) fn rdma_create_event_channel() -> *mut RawEventChannel;
    pub(super) fn rdma_destroy_event_channel(channel: *mut RawEventChannel);
    pub(super) fn rdma_create_id(
        channel: *mut RawEventChannel,
        id: *mut *mut RawCmId,
        context: *mut c_void,
        ps: c_int,
    ) -> c_int;
    pub(super) fn rdma_destroy_id(id: *mut RawCmId) -> c_int;
    pub(super) fn rdma_bind_addr(id: *mut RawCmId, addr: *mut libc::sockaddr) -> c_int;
    pub(super) fn rdma_resolve_addr(
        id: *mut RawCmId,
        src_addr: *mut libc::sockaddr,
        dst_addr: *mut libc::sockaddr,
        timeout_ms: c_int,
    ) -> c_int;
    pub(super) fn rdma_resolve_route(id: *mut RawCmId, timeout_ms: c_int) -> c_int;
    pub(super) fn rdma_init_qp_attr(
        id: *mut RawCmId,
        attr: *mut ibv_qp_attr,
        mask: *mut c_int,
    ) -> c_int;
    pub(super) fn rdma_connect(id: *mut RawCmId, param: *mut ConnParam) -> c_int;
    pub(super) fn rdma_listen(id: *mut RawCmId, backlog: c_int) -> c_int;
    pub(super) fn rdma_accept(id: *mut RawCmId, param: *mut ConnParam) -> c_int;
    pub(super) fn rdma_reject(id: *mut RawCmId, private_data: *const c_void, len: u8) -> c_int;
    pub(super) fn rdma_disconnect(id: *mut RawCmId) -> c_int;
    pub(super) fn rdma_get_cm_event(
        channel: *mut RawEventChannel,
        event: *mut *mut CmEvent,
    ) -> c_int;
    pub(super) fn rdma_ack_cm_event(event: *mut CmEvent) -> c_int;
    pub(super) fn rdma_get_src_port(id: *mut RawCmId) -> u16;
    pub(super) fn rdma_set_option(
        id: *mut RawCmId,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: usize,
    ) -> c_int;
    pub(super) fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context;
    pub(super) fn rdma_free_devices(list: *mut *mut ibv_context);
}
