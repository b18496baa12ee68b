//! A target that loses the first LOGIN: beginning a session must neither hang nor fail for it.

use std::time::{Duration, Instant};

use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectOptions, ConnectionHello, Incoming, Listener,
    PageKind, Poller, QpLimits, RecvWr, Region, RemoteBuffer, Rkey, SendOp, SendWr, SgeList, WrId,
};
use rblk_initiator::error::SessionError;
use rblk_initiator::session::{HostIdentity, Session};
use rblk_protocol::limits::{ADMIN_DEPTH, COMMAND_BYTES, IO_MIN_BYTES};
use rblk_protocol::{
    CommandCapsule, Epoch, Features, HelloRequest, HostId, InstanceId, LoginReply, Name, Offer,
    Opcode, QueueDepth, ResponseCapsule, SessionId, Status, negotiate,
};

const RECV_BYTES: usize = 1024;
const RECVS: u16 = 4;

fn name() -> Name {
    Name::new("store1").unwrap()
}

/// Accepts an admin connection and drives it until it ends; LOGIN is answered if `answers`.
async fn serve(incoming: Incoming, answers: bool) {
    let asked = HelloRequest::from_wire(&incoming.hello().0).unwrap();
    let depth = QueueDepth::new(ADMIN_DEPTH).unwrap();
    let offer = Offer {
        depth,
        features: Features::default(),
        in_capsule_bytes: 4096,
        io_max_bytes: IO_MIN_BYTES,
        instance: InstanceId([1; 16]),
    };
    let accept = negotiate(&asked, &offer).unwrap();
    let pd = incoming.device().alloc_pd().unwrap();
    let (mut poller, handle) = pd.poller(64).unwrap();
    let sizes = QpLimits {
        send_wrs: 16,
        recv_wrs: RECVS.into(),
        send_sges: 1,
        inline_bytes: 0,
        reads_out: 0,
        reads_in: 0,
    };
    let connection = incoming.prepare(&pd, &handle, sizes).unwrap();
    let qp = poller.attach(connection).unwrap();
    let slots = RECV_BYTES * usize::from(RECVS + 1);
    let region = Region::allocate(slots, PageKind::Normal).unwrap();
    let memory = pd.register(&region, Access::LOCAL_WRITE).unwrap();
    for slot in 0..RECVS {
        let sge = memory.sge(usize::from(slot) * RECV_BYTES, 1024).unwrap();
        poller.post_recv(qp, &[RecvWr { id: WrId(slot.into()), sge }]).unwrap();
    }
    let hello = ConnectionHello(accept.to_wire().to_vec());
    poller.accept(qp, &AcceptParams { hello, reads_out: 0, reads_in: 0 }).unwrap();
    let send = |poller: &mut dyn Poller, op: SendOp, at: usize, bytes: &[u8]| {
        let at = RECV_BYTES * usize::from(RECVS) + at;
        region.write(at, bytes);
        let sge = memory.sge(at, u32::try_from(bytes.len()).unwrap()).unwrap();
        let sges = SgeList::one(sge);
        let wr = SendWr { id: WrId(1 << 16), op, sges, signaled: true, inline: false };
        poller.post_send(qp, &[wr]).unwrap();
    };
    loop {
        let mut one = [Completion::default()];
        if poller.poll(&mut one).unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        let [completion] = one;
        if completion.status != rblk_fabric::WcStatus::Success {
            return;
        }
        if completion.id.0 >> 16 != 0 || !answers {
            continue;
        }
        let mut bytes = vec![0; completion.byte_len as usize];
        region.read(usize::try_from(completion.id.0).unwrap() * RECV_BYTES, &mut bytes);
        let fixed = bytes.first_chunk::<COMMAND_BYTES>().unwrap();
        let command = CommandCapsule::from_wire(fixed, bytes.len(), depth).unwrap();
        assert_eq!(command.opcode, Opcode::Login);
        let reply = LoginReply {
            session: SessionId([2; 16]),
            epoch: Epoch(1),
            instance: InstanceId([1; 16]),
            queues_max: 4,
            target_name: name(),
        };
        let buffer = command.buffer.unwrap();
        let to = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
        send(&mut *poller, SendOp::Write(to), 0, &reply.to_wire());
        let response = ResponseCapsule::new(command.tag, command.sequence, Status::Ok);
        send(&mut *poller, SendOp::Send, 512, &response.to_wire());
    }
}

/// A target that answers LOGIN from the `first`th connection on; how many connections it had, and the result.
fn begin(first: usize) -> (usize, Result<SessionId, SessionError>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let any: Address = format!("tcp://{}", free.local_addr().unwrap()).parse().unwrap();
        drop(free);
        let mut listener = Listener::bind(&any).await.unwrap();
        let address = listener.address().clone();
        let options =
            ConnectOptions { timeout: Duration::from_millis(300), ..ConnectOptions::default() };
        let host = HostIdentity { id: HostId([1; 16]), name: name() };
        let mut connections = 0;
        let begun = Instant::now();
        let beginning = Session::begin(&address, &options, &host);
        tokio::pin!(beginning);
        loop {
            tokio::select! {
                result = &mut beginning => {
                    // Two tries of 300 ms each, on a host of any speed; without a bound it were 35 s.
                    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
                    return (connections, result.map(|session| session.id));
                }
                incoming = listener.accept() => {
                    connections += 1;
                    tokio::spawn(serve(incoming.unwrap(), connections >= first));
                }
            }
        }
    })
}

#[test]
fn a_lost_login_is_tried_once_more() {
    let (connections, result) = begin(1);
    assert_eq!((connections, result.unwrap()), (1, SessionId([2; 16])));
    let (connections, result) = begin(2);
    assert_eq!((connections, result.unwrap()), (2, SessionId([2; 16])));
    let (connections, result) = begin(3);
    let error = result.unwrap_err();
    assert!(matches!(error, SessionError::TimedOut { what: Opcode::Login }), "{error}");
    assert_eq!(connections, 2);
}
