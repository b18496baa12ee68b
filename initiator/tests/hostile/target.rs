//! A target over TCP that a test controls, on any number of admin connections.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectionHello, Incoming, Listener, MemoryRegion,
    PageKind, Poller, QpIndex, QpLimits, RecvWr, Region, RemoteBuffer, Rkey, Scheme, SendOp,
    SendWr, SgeList, WcStatus, WrId,
};
use rblk_protocol::auth::Hellos;
use rblk_protocol::limits::{ADMIN_DEPTH, COMMAND_BYTES};
use rblk_protocol::{
    CommandCapsule, Features, HelloAccept, HelloRequest, InstanceId, Nonce, Offer, Opcode,
    QueueDepth, ResponseCapsule, Status, negotiate,
};

const RECV_BYTES: usize = 1024;
const RECVS: u16 = 8;
const ANSWER_BYTES: usize = 8192;
const SENT: WrId = WrId(1 << 16);

/// An answer to a command.
pub(super) struct Answer {
    pub(super) status: Status,
    pub(super) value: u32,
    pub(super) payload: Vec<u8>,
    pub(super) after: Duration,
}

impl Answer {
    pub(super) fn ok(payload: impl Into<Vec<u8>>) -> Self {
        Self { status: Status::Ok, value: 0, payload: payload.into(), after: Duration::ZERO }
    }

    /// A sealed answer, with the number of its bytes in the value.
    pub(super) fn sealed(payload: Vec<u8>) -> Self {
        Self { value: u32::try_from(payload.len()).unwrap(), ..Self::ok(payload) }
    }
}

/// The target's behaviour. KEEP_ALIVE is answered without it.
pub(super) trait Manners: Send + 'static {
    /// Whether the target accepts AUTH.
    fn has_proofs(&self) -> bool;

    /// Whether the first message of a connection is noticed only when the next one comes.
    fn is_slow_to_look(&self) -> bool {
        false
    }

    /// A new connection. Returns the accept to send, which may differ from the target's own.
    fn connected(&mut self, asked: &HelloRequest, accept: HelloAccept) -> HelloAccept {
        let _ = asked;
        accept
    }

    /// Answers a command, or ends the connection.
    fn answer(&mut self, command: &CommandCapsule, body: &[u8]) -> Option<Answer>;
}

/// Listens on a free port for as long as the runtime lives.
pub(super) async fn listen<M: Manners>(manners: M) -> (Address, Arc<Mutex<M>>) {
    let any = Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 };
    let mut listener = Listener::bind(&any).await.unwrap();
    let address = listener.address().clone();
    let manners = Arc::new(Mutex::new(manners));
    let shared = Arc::clone(&manners);
    tokio::spawn(async move {
        loop {
            let Ok(incoming) = listener.accept().await else { continue };
            tokio::spawn(serve(incoming, Arc::clone(&shared)));
        }
    });
    (address, manners)
}

/// The hellos of both ends, if the connection is not manipulated.
pub(super) fn hellos(asked: &HelloRequest, accept: &HelloAccept) -> Hellos {
    Hellos::new(asked, accept)
}

/// A connection of the target.
struct Link {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    region: Arc<Region>,
    memory: MemoryRegion,
}

const ANSWERS_AT: usize = RECV_BYTES * RECVS as usize;

impl Link {
    /// Accepts a connection.
    fn accept(incoming: Incoming, accept: &HelloAccept) -> Self {
        let pd = incoming.device().alloc_pd().unwrap();
        let (mut poller, handle) = pd.poller(64).unwrap();
        let sizes = QpLimits {
            send_wrs: 16,
            recv_wrs: RECVS.into(),
            send_sges: 1,
            recv_sges: 1,
            inline_bytes: 0,
            reads_out: 0,
            reads_in: 0,
        };
        let connection = incoming.prepare(&pd, &handle, sizes).unwrap();
        let qp = poller.attach(connection).unwrap();
        let region = Region::allocate(ANSWERS_AT + ANSWER_BYTES, PageKind::Normal).unwrap();
        let memory = pd.register(&region, Access::LOCAL_WRITE).unwrap();
        let mut link = Self { poller, qp, region, memory };
        (0..usize::from(RECVS)).for_each(|slot| link.post_recv(slot));
        let hello = ConnectionHello(accept.to_wire().to_vec());
        let params = AcceptParams { hello, reads_out: 0, reads_in: 0 };
        link.poller.accept(qp, &params).unwrap();
        link
    }

    fn post_recv(&mut self, slot: usize) {
        let sge = self.memory.sge(slot * RECV_BYTES, 1024).unwrap();
        let _ = self.poller.post_recv(self.qp, &[RecvWr::one(WrId(slot as u64), sge)]);
    }

    /// The next message; `None` at the end of the connection.
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let mut one = [Completion::default()];
            if self.poller.poll(&mut one).unwrap() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            let [completion] = one;
            if completion.status != WcStatus::Success {
                return None;
            }
            if completion.id != SENT {
                let slot = usize::try_from(completion.id.0).unwrap();
                let mut bytes = vec![0; completion.byte_len as usize];
                self.region.read(slot * RECV_BYTES, &mut bytes);
                self.post_recv(slot);
                return Some(bytes);
            }
        }
    }

    fn send(&mut self, op: SendOp, at: usize, bytes: &[u8]) {
        self.region.write(ANSWERS_AT + at, bytes);
        let length = u32::try_from(bytes.len()).unwrap();
        let sges = SgeList::one(self.memory.sge(ANSWERS_AT + at, length).unwrap());
        let wr = SendWr { id: SENT, op, sges, signaled: true, inline: false };
        let _ = self.poller.post_send(self.qp, &[wr]);
    }

    fn answer(&mut self, command: &CommandCapsule, answer: &Answer) {
        if let (Some(buffer), false) = (command.buffer, answer.payload.is_empty()) {
            let to = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
            self.send(SendOp::Write(to), 0, &answer.payload);
        }
        let mut response = ResponseCapsule::new(command.tag, command.sequence, answer.status);
        response.value = answer.value;
        self.send(SendOp::Send, ANSWER_BYTES - 64, &response.to_wire());
    }
}

async fn serve<M: Manners>(incoming: Incoming, manners: Arc<Mutex<M>>) {
    let asked = HelloRequest::from_wire(&incoming.hello().0).unwrap();
    let depth = QueueDepth::new(ADMIN_DEPTH).unwrap();
    let proofs = manners.lock().unwrap().has_proofs();
    let offer = Offer {
        depth,
        features: if proofs { Features::AUTH } else { Features::default() },
        in_capsule_bytes: 4096,
        io_max_bytes: asked.io_max_bytes,
        instance: InstanceId([1; 16]),
        nonce: Nonce([2; 16]),
    };
    let accept = negotiate(&asked, &offer).unwrap();
    let accept = manners.lock().unwrap().connected(&asked, accept);
    let mut link = Link::accept(incoming, &accept);
    let mut unseen = None;
    if manners.lock().unwrap().is_slow_to_look() {
        unseen = link.next().await;
    }
    let mut next = link.next().await;
    while let Some(bytes) = unseen.take().or_else(|| next.take()) {
        let (fixed, body) = bytes.split_first_chunk::<COMMAND_BYTES>().unwrap();
        let command = CommandCapsule::from_wire(fixed, bytes.len(), depth).unwrap();
        let answer = match command.opcode {
            Opcode::KeepAlive => Some(Answer::ok([])),
            Opcode::AsyncEvent => {
                next = link.next().await;
                continue;
            }
            _ => manners.lock().unwrap().answer(&command, body),
        };
        let Some(answer) = answer else { break };
        tokio::time::sleep(answer.after).await;
        link.answer(&command, &answer);
        if next.is_none() {
            next = link.next().await;
        }
    }
    link.poller.fail(link.qp);
}
