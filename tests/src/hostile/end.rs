//! [`End`]: one connection to a target, driven by hand: any bytes out, everything that comes back.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rblk_fabric::{
    Access, Address, Completion, ConnectOptions, ConnectionHello, Established, FabricError,
    MemoryRegion, PageKind, Poller, ProtectionDomain, QpIndex, QpLimits, RecvWr, Region,
    RemoteBuffer, Rkey, Route, SendOp, SendWr, SgeList, WcOpcode, WcStatus, WrId,
};
use rblk_protocol::width::{narrow, wide};
use tokio::runtime::Runtime;

use super::wire::{Hello, RESPONSE, Response, number};
use crate::program::time_to_settle;

/// Bytes that an end lends to the target.
pub const LENT: usize = 256 << 10;
/// Fills the lent memory before the target writes.
pub const FILL: u8 = 0xc7;

const SLOTS: usize = 32;
const STRIDE: usize = 20 << 10;
const RECVS: u16 = 64;
const RECV_BYTES: usize = 4096;
/// How long an end waits for an expected message.
const PATIENCE: Duration = Duration::from_secs(20);
/// The reason of a refusal for want of a place for a stranger.
const CROWDED: u64 = 10;
/// How long an end watches for a forbidden message.
const QUIET: Duration = Duration::from_millis(30);

/// Something that an end received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// A response.
    Response(Response),
    /// An immediate.
    Immediate(u32),
    /// The connection ended, with this status.
    End(WcStatus),
}

/// How a target answered a connect request.
#[derive(Debug)]
pub enum Knock {
    /// Accepted.
    In(Box<End>),
    /// Refused, with these bytes.
    Refused(Vec<u8>),
    /// No answer of rblk came.
    Failed(String),
}

/// One connection. See the module.
#[derive(Debug)]
pub struct End {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    slots: MemoryRegion,
    pd: ProtectionDomain,
    /// Memory that the target may read and write.
    pub lent: MemoryRegion,
    /// The accept, as it came.
    pub accept: Vec<u8>,
    /// The request, as it was sent.
    pub asked: Vec<u8>,
    next: usize,
    ended: Option<WcStatus>,
}

/// The runtime that watches for disconnects of RDMA devices while ends exist.
fn runtime() -> &'static Runtime {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().expect("a runtime")
    });
    &RUNTIME
}

/// Opens the device of the lab and keeps it open until this process ends. The first connection does
/// the same by itself, so a device opened now is no leak of a test. If the lab is missing, the test
/// reports that itself.
pub fn keep_device() {
    let host = std::env::var("RBLK_LAB_RDMA_ADDR").unwrap_or_default();
    let Ok(address) = format!("rdma://{host}").parse() else { return };
    let options = ConnectOptions::default();
    let route = runtime().block_on(Route::resolve(&address, &options));
    if let Ok(pd) = route.and_then(|route| route.device().alloc_pd()) {
        std::mem::forget(pd);
    }
}

pub(super) fn sizes() -> QpLimits {
    QpLimits {
        send_wrs: 256,
        recv_wrs: RECVS.into(),
        send_sges: 1,
        recv_sges: 1,
        inline_bytes: 0,
        // With none, a device keeps a READ back instead of sending it.
        reads_out: 1,
        reads_in: 4,
    }
}

/// Connects with these bytes as the hello. Returns a CQ and a PD of their own, and the outcome.
///
/// # Panics
/// There is no way to the target at all.
fn reach(
    address: &Address,
    hello: &[u8],
    limits: QpLimits,
) -> (Box<dyn Poller>, ProtectionDomain, Result<Established, FabricError>) {
    runtime().block_on(async {
        let route = Route::resolve(address, &options()).await.expect("a route");
        let device = route.device();
        let (pd, settling) = (device.alloc_pd().expect("a PD"), time_to_settle(&device));
        let (poller, handle) = pd.poller(limits.send_wrs + limits.recv_wrs).expect("a CQ");
        let hello = ConnectionHello(hello.to_vec());
        let established = route.connect(&pd, &handle, limits, &hello).await;
        tokio::time::sleep(settling).await;
        (poller, pd, established)
    })
}

/// How an end connects.
pub(super) fn options() -> ConnectOptions {
    ConnectOptions { timeout: PATIENCE, ..ConnectOptions::default() }
}

/// Knocks until the target lets the peer in; a refusal for want of a place is tried again. Returns
/// the result of `knock`, and the number of refusals.
pub(super) fn until_let_in<T>(
    hello: &Hello,
    mut knock: impl FnMut() -> Result<T, Knock>,
) -> (T, usize) {
    let (until, mut refused) = (Instant::now() + PATIENCE, 0);
    loop {
        match knock() {
            Ok(came) => return (came, refused),
            Err(Knock::Refused(reject)) if number(&reject, 6, 2) == CROWDED => refused += 1,
            Err(other) => panic!("{hello:?}: {other:?}"),
        }
        assert!(Instant::now() < until, "{hello:?}: there is no place");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Knock {
    pub(super) fn of(error: FabricError) -> Self {
        match error {
            FabricError::Rejected { hello, .. } => Self::Refused(hello),
            FabricError::Busy { .. } => Self::Refused(Vec::new()),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl End {
    /// Connects with these bytes as the hello.
    ///
    /// # Panics
    /// There is no way to the target at all.
    #[must_use]
    pub fn knock(address: &Address, hello: &[u8]) -> Knock {
        let (mut poller, pd, established) = reach(address, hello, sizes());
        let established = match established {
            Ok(established) => established,
            Err(error) => return Knock::of(error),
        };
        let region = |bytes| Region::allocate(bytes, PageKind::Normal).expect("memory");
        let slots = region(SLOTS * STRIDE + usize::from(RECVS) * RECV_BYTES);
        let slots = pd.register(&slots, Access::LOCAL_WRITE).expect("a registration");
        let lent = pd.register(&region(LENT), Access::REMOTE).expect("a registration");
        lent.region().write(0, &vec![FILL; LENT]);
        let qp = poller.attach(established.connection).expect("a QP");
        let (accept, asked) = (established.hello.0, hello.to_vec());
        let mut end = Self { poller, qp, slots, pd, lent, accept, asked, next: 0, ended: None };
        for slot in 0..RECVS {
            end.post_recv(slot);
        }
        Knock::In(Box::new(end))
    }

    /// Connects. Tries again while the target has no place for strangers.
    ///
    /// # Panics
    /// The target does not let the peer in.
    #[must_use]
    pub fn connect(address: &Address, hello: &Hello) -> Box<Self> {
        let knock = || match Self::knock(address, &hello.bytes()) {
            Knock::In(end) => Ok(end),
            other => Err(other),
        };
        until_let_in(hello, knock).0
    }

    fn post_recv(&mut self, slot: u16) {
        let at = SLOTS * STRIDE + usize::from(slot) * RECV_BYTES;
        let sge = self.slots.sge(at, narrow(RECV_BYTES)).expect("inside");
        // On a dead QP it flushes.
        let _ = self.poller.post_recv(self.qp, &[RecvWr::one(WrId(slot.into()), sge)]);
    }

    fn post(&mut self, op: SendOp, bytes: &[u8]) {
        assert!(bytes.len() <= STRIDE, "{} bytes are too long for a slot", bytes.len());
        let at = self.next * STRIDE;
        self.next = (self.next + 1) % SLOTS;
        self.slots.region().write(at, bytes);
        let sges = SgeList::one(self.slots.sge(at, narrow(bytes.len())).expect("inside"));
        let wr = SendWr { id: WrId(1 << 16), op, sges, signaled: true, inline: false };
        let _ = self.poller.post_send(self.qp, &[wr]);
    }

    /// Sends a message as it is.
    pub fn send(&mut self, bytes: &[u8]) {
        self.post(SendOp::Send, bytes);
    }

    /// RDMA WRITE to memory of the target, if the target lets the peer.
    pub fn write_remote(&mut self, addr: u64, rkey: u32, bytes: &[u8]) {
        self.post(SendOp::Write(RemoteBuffer { addr, rkey: Rkey(rkey) }), bytes);
    }

    /// RDMA READ of memory of the target, if the target lets the peer.
    pub fn read_remote(&mut self, addr: u64, rkey: u32) {
        self.post(SendOp::Read(RemoteBuffer { addr, rkey: Rkey(rkey) }), &[0; 64]);
    }

    /// WRITE_WITH_IMM, as only a target sends it.
    pub fn write_with_imm(&mut self, addr: u64, rkey: u32, imm: u32) {
        let to = RemoteBuffer { addr, rkey: Rkey(rkey) };
        self.post(SendOp::WriteWithImm(to, imm), &[FILL; 64]);
    }

    /// The epoch of the commands of an admin connection: that of its hello, or 1.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        narrow(number(&self.asked, 28, 4).max(1))
    }

    /// Invalidates the key of the lent memory, and lends other memory.
    ///
    /// # Panics
    /// The memory cannot be registered.
    pub fn lend_anew(&mut self) {
        let region = Region::allocate(LENT, PageKind::Normal).expect("memory");
        region.write(0, &vec![FILL; LENT]);
        self.lent = self.pd.register(&region, Access::REMOTE).expect("a registration");
    }

    /// Everything that arrived so far.
    pub fn listen(&mut self) -> Vec<Heard> {
        let mut heard = Vec::new();
        loop {
            let mut one = [Completion::default()];
            if self.poller.poll(&mut one).expect("a CQ") == 0 {
                return heard;
            }
            let [completion] = one;
            if completion.status != WcStatus::Success {
                if self.ended.replace(completion.status).is_none() {
                    heard.push(Heard::End(completion.status));
                }
            } else if completion.id.0 < u64::from(RECVS) {
                self.take(&completion, &mut heard);
            }
        }
    }

    fn take(&mut self, completion: &Completion, heard: &mut Vec<Heard>) {
        let slot: u16 = narrow(completion.id.0);
        let mut bytes = vec![0; wide(completion.byte_len).min(RECV_BYTES)];
        self.slots.region().read(SLOTS * STRIDE + usize::from(slot) * RECV_BYTES, &mut bytes);
        self.post_recv(slot);
        if completion.opcode == WcOpcode::RecvWithImm {
            return heard.push(Heard::Immediate(completion.imm));
        }
        heard.extend(bytes.chunks_exact(RESPONSE).map(|one| Heard::Response(Response::parse(one))));
    }

    /// The next message, or the end of the connection.
    ///
    /// # Panics
    /// Nothing arrives.
    pub fn hear(&mut self) -> Heard {
        let until = Instant::now() + PATIENCE;
        loop {
            let heard = self.listen();
            if let Some((first, rest)) = heard.split_first() {
                // A refusal and the end of the connection may come together. The end is noted.
                let is_end = |heard: &Heard| matches!(heard, Heard::End(_));
                assert!(rest.iter().all(is_end), "one thing was asked: {heard:?}");
                return first.clone();
            }
            if let Some(status) = self.ended {
                return Heard::End(status);
            }
            assert!(Instant::now() < until, "the target says nothing");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Everything that arrives in a short time.
    pub fn overhear(&mut self) -> Vec<Heard> {
        let until = Instant::now() + QUIET;
        let mut heard = Vec::new();
        while Instant::now() < until && self.ended.is_none() {
            heard.extend(self.listen());
            std::thread::sleep(Duration::from_micros(200));
        }
        heard
    }

    /// Waits until the target has ended the connection.
    ///
    /// # Panics
    /// The target keeps the connection.
    pub fn must_end(&mut self) {
        let until = Instant::now() + PATIENCE;
        while self.ended.is_none() {
            self.listen();
            assert!(Instant::now() < until, "the target goes on with this peer");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Whether the connection is dead.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.ended.is_some()
    }

    /// Bytes of the lent memory.
    #[must_use]
    pub fn lent_bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.lent.region().read(at, &mut bytes);
        bytes
    }

    /// How many bytes the target has written at the beginning of the lent memory.
    #[must_use]
    pub fn written(&self) -> usize {
        let bytes = self.lent_bytes(0, LENT);
        bytes.iter().rposition(|byte| *byte != FILL).map_or(0, |last| last + 1)
    }

    /// Whether the target has written nothing into the lent memory.
    #[must_use]
    pub fn is_untouched(&self) -> bool {
        self.written() == 0
    }
}
