//! [`CmId`]: an `rdma_cm_id` and, once made, its QP.
//!
//! One value owns an id. Dropping it destroys the QP and then the id. The lock of the event channel
//! is held wherever the event code of librdmacm could read a field that changes (see
//! `event_channel`), and not while the device or the kernel destroys: that may take long, and every
//! other id of the channel waits for the lock.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once};

use nix::sys::socket::{SockaddrLike, SockaddrStorage};
use tokio::sync::oneshot;

use super::event_channel::{CmReply, EventChannel, Role};
use super::slow_verbs::{self, Accept, SlowVerbs};
use crate::address::end_name;
use crate::connect::ack_timeout::{AckTimeout, RETRIES};
use crate::error::{FabricError, Result};
use crate::verbs::ffi;

/// That a device or kernel has no ACK timeout to set is said once.
static NO_ACK_TIMEOUT: Once = Once::new();

/// The address and the port, of IPv4 or IPv6.
fn socket_address(address: SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|a| SocketAddr::V4((*a).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|a| SocketAddr::V6((*a).into())))
}

/// An id, and its QP.
#[derive(Debug)]
pub(in crate::verbs) struct CmId {
    raw: NonNull<ffi::RawCmId>,
    verbs: Arc<SlowVerbs>,
    channel: Arc<EventChannel>,
}

/// The parameters that connect and accept send to the peer.
#[derive(Debug)]
pub(in crate::verbs) struct ConnectParams<'a> {
    pub(in crate::verbs) hello: &'a [u8],
    pub(in crate::verbs) reads_out: u8,
    pub(in crate::verbs) reads_in: u8,
}

// SAFETY: an id may be used from any thread; methods that write it take `&mut self` or the
// channel's lock.
unsafe impl Send for CmId {}
// SAFETY: the methods on `&self` only read the id, or make system calls that the kernel serialises.
unsafe impl Sync for CmId {}

impl CmId {
    /// Makes an id on the channel.
    pub(in crate::verbs) fn create(channel: &Arc<EventChannel>, role: Role) -> Result<Self> {
        let mut ids = channel.lock();
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is open; the id is entered in the table before any event can be
        // handled.
        let rc = unsafe {
            ffi::rdma_create_id(channel.raw(), &raw mut raw, ptr::null_mut(), ffi::PS_TCP)
        };
        check("rdma_create_id", rc)?;
        let raw = NonNull::new(raw).ok_or_else(|| FabricError::last_os("rdma_create_id"))?;
        let verbs = ids.insert(raw, role);
        drop(ids);
        Ok(Self { raw, verbs, channel: Arc::clone(channel) })
    }

    /// Another id, bound to the same local address, so to the same device. It keeps the context of
    /// that device open, and no other. Its events stay unread and go with its channel. When the
    /// device is removed, the kernel takes its side of the id back by itself.
    pub(in crate::verbs) fn another(&self) -> Result<Self> {
        let no_address = || FabricError::Call {
            call: "rdma_bind_addr",
            source: io::ErrorKind::AddrNotAvailable.into(),
        };
        let from = self.local().ok_or_else(no_address)?;
        let mut id = Self::create(&EventChannel::open()?, Role::Passive)?;
        id.bind(from).map_err(|source| FabricError::Call { call: "rdma_bind_addr", source })?;
        if id.verbs() == self.verbs() { Ok(id) } else { Err(no_address()) }
    }

    /// The local IP address, with port 0.
    fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the id lives as long as `self`; the field is a sockaddr_storage, of any family.
        let address = unsafe {
            SockaddrStorage::from_raw((&raw const (*self.as_ptr()).src_addr).cast(), None)
        }?;
        let mut address = socket_address(address)?;
        address.set_port(0);
        Some(address)
    }

    /// Takes over the id of a CONNECT_REQUEST.
    ///
    /// # Safety
    /// The id is new, on this channel and in its table with `verbs`, and no other value owns it.
    pub(in crate::verbs) unsafe fn adopt(
        raw: NonNull<ffi::RawCmId>,
        verbs: Arc<SlowVerbs>,
        channel: Arc<EventChannel>,
    ) -> Self {
        Self { raw, verbs, channel }
    }

    fn as_ptr(&self) -> *mut ffi::RawCmId {
        self.raw.as_ptr()
    }

    /// A receiver for the event that ends the next step. Call it before the step is started.
    pub(in crate::verbs) fn expect(&self) -> oneshot::Receiver<CmReply> {
        self.channel.lock().expect(self.raw)
    }

    /// The context of the device the id is bound to; null before it is.
    pub(in crate::verbs) fn verbs(&self) -> *mut ffi::ibv_context {
        // SAFETY: the id lives as long as `self`.
        unsafe { (*self.as_ptr()).verbs }
    }

    /// The port of the device the id is bound to.
    pub(in crate::verbs) fn port(&self) -> u8 {
        // SAFETY: the id lives as long as `self`.
        unsafe { (*self.as_ptr()).port_num }
    }

    /// The QP; null before it is made.
    pub(in crate::verbs) fn qp(&self) -> *mut ffi::ibv_qp {
        // SAFETY: the id lives as long as `self`; the field is written only by `create_qp` and
        // drop, which have it exclusively.
        unsafe { (*self.as_ptr()).qp }
    }

    /// The peer's address, for logs.
    pub(in crate::verbs) fn peer(&self) -> String {
        // SAFETY: the id lives as long as `self`; the field is a sockaddr_storage, of any family.
        let address = unsafe {
            SockaddrStorage::from_raw((&raw const (*self.as_ptr()).dst_addr).cast(), None)
        };
        let address = address.and_then(socket_address);
        address.map_or_else(|| "an unknown address".to_owned(), end_name)
    }

    /// Sets the ACK timeout that the QP will have. Call it before the route is resolved, so that on
    /// RoCE the QP of the peer has it, too; on the side that is connected to, before the peer is
    /// accepted. iWARP has none, and old kernels have no such option.
    pub(in crate::verbs) fn set_ack_timeout(&self, timeout: AckTimeout) {
        if let Err(error) = self.set_byte(ffi::OPTION_ID_ACK_TIMEOUT, timeout.exponent()) {
            NO_ACK_TIMEOUT.call_once(|| {
                tracing::debug!(%error, "the ACK timeout cannot be set: the kernel chooses it");
            });
        }
    }

    /// Sets the type of service of the packets. Call it before the address is resolved or bound to.
    /// Connections that a listening id accepts have it, too, on iWARP. On RoCE the kernel copies
    /// the value from the peer's request.
    pub(in crate::verbs) fn set_tos(&self, tos: u8) {
        if let Err(error) = self.set_byte(ffi::OPTION_ID_TOS, tos) {
            tracing::warn!(tos, %error, "the type of service cannot be set");
        }
    }

    fn set_byte(&self, option: c_int, mut value: u8) -> io::Result<()> {
        // SAFETY: the option takes one byte, which lives during the call.
        cvt(unsafe {
            ffi::rdma_set_option(
                self.as_ptr(),
                ffi::OPTION_ID,
                option,
                (&raw mut value).cast::<c_void>(),
                1,
            )
        })
    }

    pub(in crate::verbs) fn resolve_addr(
        &self,
        bind: Option<SocketAddr>,
        to: SocketAddr,
        timeout_ms: c_int,
    ) -> io::Result<()> {
        let to = SockaddrStorage::from(to);
        let from = bind.map(SockaddrStorage::from);
        let from = from.as_ref().map_or(ptr::null_mut(), |a| a.as_ptr().cast_mut());
        // librdmacm writes the address into the id after the system call. The event may have come
        // by then.
        let _ids = self.channel.lock();
        // SAFETY: the addresses live during the call, which only reads them.
        cvt(unsafe {
            ffi::rdma_resolve_addr(self.as_ptr(), from, to.as_ptr().cast_mut(), timeout_ms)
        })
    }

    /// Starts to resolve the route. May block: on InfiniBand librdmacm asks ibacm first.
    pub(in crate::verbs) fn resolve_route(&mut self, timeout_ms: c_int) -> io::Result<()> {
        // SAFETY: the id lives as long as `self`.
        cvt(unsafe { ffi::rdma_resolve_route(self.as_ptr(), timeout_ms) })
    }

    pub(in crate::verbs) fn bind(&mut self, to: SocketAddr) -> io::Result<()> {
        let to = SockaddrStorage::from(to);
        let _ids = self.channel.lock();
        // SAFETY: the address lives during the call, which only reads it.
        cvt(unsafe { ffi::rdma_bind_addr(self.as_ptr(), to.as_ptr().cast_mut()) })
    }

    pub(in crate::verbs) fn listen(&mut self, backlog: c_int) -> io::Result<()> {
        let _ids = self.channel.lock();
        // SAFETY: the id lives as long as `self`.
        cvt(unsafe { ffi::rdma_listen(self.as_ptr(), backlog) })
    }

    /// The port number that the id is bound to.
    pub(in crate::verbs) fn local_port(&self) -> u16 {
        // SAFETY: the id lives as long as `self`.
        u16::from_be(unsafe { ffi::rdma_get_src_port(self.as_ptr()) })
    }

    /// Makes the QP, and writes the granted sizes to `attr`.
    pub(in crate::verbs) fn create_qp(
        &mut self,
        pd: *mut ffi::ibv_pd,
        attr: &mut ffi::ibv_qp_init_attr,
    ) -> io::Result<()> {
        // Not by rdma_create_qp, which must not run beside the event code: that reads the field.
        // SAFETY: the caller keeps PD and CQs for as long as the QP, which is freed with `self`.
        let qp = unsafe { ffi::ibv_create_qp(pd, attr) };
        let qp = NonNull::new(qp).ok_or_else(io::Error::last_os_error)?;
        if let Err(error) = self.begin_qp(qp) {
            // SAFETY: it was just made, and nothing knows it.
            unsafe { ffi::ibv_destroy_qp(qp.as_ptr()) };
            return Err(error);
        }
        let ids = self.channel.lock();
        // SAFETY: the id is this value's, and no event code looks at the field under the lock.
        unsafe { (*self.as_ptr()).qp = qp.as_ptr() };
        drop(ids);
        self.verbs.have_qp(qp.as_ptr());
        Ok(())
    }

    /// Brings a new QP into the state INIT, with the port of the id.
    fn begin_qp(&self, qp: NonNull<ffi::ibv_qp>) -> io::Result<()> {
        // SAFETY: an all-zero ibv_qp_attr is a value: integers and null pointers.
        let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
        let mut mask = 0;
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        // SAFETY: the id lives as long as `self`; `attr` and `mask` during the call.
        cvt(unsafe { ffi::rdma_init_qp_attr(self.as_ptr(), &raw mut attr, &raw mut mask) })?;
        // SAFETY: the QP is alive, and the caller's alone.
        match unsafe { ffi::ibv_modify_qp(qp.as_ptr(), &raw mut attr, mask) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Starts to connect. May block: soft iWARP opens its TCP connection here.
    pub(in crate::verbs) fn connect(&mut self, params: &ConnectParams<'_>) -> Result<()> {
        let mut param = raw_params(params)?;
        // SAFETY: `param` and the hello it points to live during the call.
        check("rdma_connect", unsafe { ffi::rdma_connect(self.as_ptr(), &raw mut param) })
    }

    /// Accepts the peer, soon and on another thread. Where that fails, the QP is moved to the error
    /// state. `refusal`: the reply to the peer if the connection ends before that.
    pub(in crate::verbs) fn accept(
        &self,
        params: &ConnectParams<'_>,
        refusal: &[u8],
    ) -> Result<()> {
        let param = raw_params(params)?;
        self.verbs.accept(Accept { hello: params.hello.into(), param, refusal: refusal.into() });
        Ok(())
    }

    /// Refuses the peer. There is no result, because the peer may be gone already.
    pub(in crate::verbs) fn reject(&self, reason: &[u8]) {
        // SAFETY: the id lives as long as `self`.
        unsafe { slow_verbs::reject(self.raw, reason) };
    }

    /// Has the QP moved to the error state, soon and by another thread.
    pub(in crate::verbs) fn error(&self) {
        self.verbs.error();
    }

    /// Has the QP moved to the error state, and the peer told, if there is one: soon, and by
    /// another thread.
    pub(in crate::verbs) fn end(&self) {
        self.verbs.end();
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        self.verbs.close();
        let qp = {
            let mut ids = self.channel.lock();
            ids.remove(self.raw, &self.channel);
            // SAFETY: the id is this value's, and no event code looks at the field under the lock.
            // Later it finds that there is no QP.
            unsafe { ptr::replace(&raw mut (*self.as_ptr()).qp, ptr::null_mut()) }
        };
        if !qp.is_null() {
            // SAFETY: the QP was this id's, which names it no more: nothing else uses it.
            let errno = unsafe { ffi::ibv_destroy_qp(qp) };
            if errno != 0 {
                let error = io::Error::from_raw_os_error(errno);
                tracing::error!(%error, "ibv_destroy_qp failed; leaked");
            }
        }
        // SAFETY: the id is this value's. Its events name no id of the table any more: they are
        // acknowledged and not followed. The call waits for one that is being acknowledged.
        if unsafe { ffi::rdma_destroy_id(self.as_ptr()) } != 0 {
            tracing::error!(error = %io::Error::last_os_error(), "rdma_destroy_id failed; leaked");
        }
    }
}

fn raw_params(params: &ConnectParams<'_>) -> Result<ffi::ConnParam> {
    let too_long = || FabricError::Call {
        call: "private data of a connection",
        source: io::Error::from_raw_os_error(libc::EMSGSIZE),
    };
    Ok(ffi::ConnParam {
        private_data: params.hello.as_ptr().cast(),
        private_data_len: u8::try_from(params.hello.len()).map_err(|_| too_long())?,
        responder_resources: params.reads_in,
        initiator_depth: params.reads_out,
        flow_control: 1,
        retry_count: RETRIES,
        // A peer without a RECV is a bug of rblk. With 0 it shows at once.
        rnr_retry_count: 0,
        srq: 0,
        qp_num: 0,
    })
}

fn cvt(rc: c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn check(call: &'static str, rc: c_int) -> Result<()> {
    cvt(rc).map_err(|source| FabricError::Call { call, source })
}
