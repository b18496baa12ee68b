//! Targets that lose a LOGIN, or answer it late: the start of a session must neither hang nor fail
//! because of that, and the loss of a target meanwhile must be noticed.

use std::time::{Duration, Instant};

use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectOptions, ConnectionHello, Incoming, Listener,
    PageKind, Poller, QpLimits, RecvWr, Region, RemoteBuffer, Rkey, Scheme, SendOp, SendWr,
    SgeList, WrId,
};
use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::{HostIdentity, Session};
use rblk_protocol::limits::{ADMIN_DEPTH, COMMAND_BYTES, IO_MIN_BYTES};
use rblk_protocol::{
    CommandCapsule, Epoch, Features, HelloRequest, HostId, InstanceId, LoginReply, Name, Nonce,
    Offer, Opcode, QueueDepth, ResponseCapsule, SessionId, Status, negotiate,
};

const RECV_BYTES: usize = 1024;
const RECVS: u16 = 4;

fn name() -> Name {
    Name::new("store1").unwrap()
}

/// The target's behaviour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Manners {
    /// Nothing.
    Silent,
    /// Answers every command.
    Prompt,
    /// Answers LOGIN after that many answered KEEP_ALIVEs.
    Slow(u32),
}

/// Accepts an admin connection and drives it until it ends.
#[expect(clippy::too_many_lines, reason = "one arm for each event")]
async fn serve(incoming: Incoming, manners: Manners) {
    let asked = HelloRequest::from_wire(&incoming.hello().0).unwrap();
    let depth = QueueDepth::new(ADMIN_DEPTH).unwrap();
    let offer = Offer {
        depth,
        features: Features::default(),
        in_capsule_bytes: 4096,
        io_max_bytes: IO_MIN_BYTES,
        instance: InstanceId([1; 16]),
        nonce: Nonce([2; 16]),
    };
    let accept = negotiate(&asked, &offer).unwrap();
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
    let slots = RECV_BYTES * usize::from(RECVS + 1);
    let region = Region::allocate(slots, PageKind::Normal).unwrap();
    let memory = pd.register(&region, Access::LOCAL_WRITE).unwrap();
    for slot in 0..RECVS {
        let sge = memory.sge(usize::from(slot) * RECV_BYTES, 1024).unwrap();
        poller.post_recv(qp, &[RecvWr::one(WrId(slot.into()), sge)]).unwrap();
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
    let mut beats = 0;
    let mut login = None;
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
        if completion.id.0 >> 16 != 0 || manners == Manners::Silent {
            continue;
        }
        let mut bytes = vec![0; completion.byte_len as usize];
        region.read(usize::try_from(completion.id.0).unwrap() * RECV_BYTES, &mut bytes);
        let fixed = bytes.first_chunk::<COMMAND_BYTES>().unwrap();
        let command = CommandCapsule::from_wire(fixed, bytes.len(), depth).unwrap();
        let slot = usize::try_from(completion.id.0).unwrap();
        let sge = memory.sge(slot * RECV_BYTES, 1024).unwrap();
        poller.post_recv(qp, &[RecvWr::one(WrId(completion.id.0), sge)]).unwrap();
        match command.opcode {
            Opcode::Login => login = Some(command),
            Opcode::KeepAlive => {
                beats += 1;
                let response = ResponseCapsule::new(command.tag, command.sequence, Status::Ok);
                send(&mut *poller, SendOp::Send, 768, &response.to_wire());
            }
            other => panic!("{other:?}"),
        }
        if let (Manners::Slow(after), Some(_)) = (manners, login)
            && beats < after
        {
            continue;
        }
        let Some(command) = login.take() else { continue };
        let reply = LoginReply {
            session: SessionId([2; 16]),
            epoch: command.epoch,
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

/// A listener on a free port, and its address.
async fn listen() -> (Listener, Address) {
    let any = Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 };
    let listener = Listener::bind(&any).await.unwrap();
    let address = listener.address().clone();
    (listener, address)
}

/// The result of a session's start.
struct Begun {
    connections: usize,
    result: Result<SessionId, SessionError>,
    // This thread did not run for so much of a step's time that an answer may have been late.
    is_late: bool,
}

/// Starts a session at a target that answers LOGIN from the `first`th connection on. Each step may
/// take that time.
fn begin(first: usize, timeout: Duration) -> Begun {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut listener, address) = listen().await;
        let options = ConnectOptions { timeout, ..ConnectOptions::default() };
        let host = HostIdentity { id: HostId([1; 16]), name: name() };
        let mut connections = 0;
        let begun = Instant::now();
        let (mut looked, mut longest) = (begun, Duration::ZERO);
        let beginning = Session::begin(&address, &options, &host, None);
        tokio::pin!(beginning);
        loop {
            let result = tokio::select! {
                result = &mut beginning => Some(result),
                incoming = listener.accept() => {
                    connections += 1;
                    let answers = connections >= first;
                    let manners = if answers { Manners::Prompt } else { Manners::Silent };
                    tokio::spawn(serve(incoming.unwrap(), manners));
                    None
                }
                () = tokio::time::sleep(timeout / 32) => None,
            };
            longest = longest.max(looked.elapsed());
            looked = Instant::now();
            let Some(result) = result else { continue };
            // Two tries, on a host of any speed; without a bound it would take 35 s.
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
            let result = result.map(|session| session.login().session);
            return Begun { connections, result, is_late: longest > timeout / 4 };
        }
    })
}

#[test]
fn a_lost_login_is_tried_once_more() {
    let is_begun = |begun: &Begun| matches!(begun.result, Ok(SessionId([2, ..])));
    let timed_out =
        |begun: &Begun| matches!(begun.result, Err(SessionError::TimedOut { what: Opcode::Login }));
    let is_expected =
        |begun: &Begun, first| if first < 3 { is_begun(begun) } else { timed_out(begun) };
    for (first, connections) in [(1, 1), (2, 2), (3, 2)] {
        // With more time after a timeout that was too short.
        for timeout in [300, 1_000, 3_000, 10_000].map(Duration::from_millis) {
            let begun = begin(first, timeout);
            if begun.connections == connections && is_expected(&begun, first) {
                break;
            }
            let Begun { connections, result, is_late } = begun;
            assert!(
                is_late && timeout < Duration::from_secs(10),
                "answered from {first} on: {connections} connections, {result:?}"
            );
        }
    }
}

/// Resumes a session at a target with that behaviour.
fn resume(manners: Manners, detect: Duration) -> Result<Epoch, SessionError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut listener, address) = listen().await;
        tokio::spawn(async move { serve(listener.accept().await.unwrap(), manners).await });
        let options = ConnectOptions { detect, ..ConnectOptions::default() };
        let host = HostIdentity { id: HostId([1; 16]), name: name() };
        let resume = Some((SessionId([2; 16]), Epoch(7)));
        Session::connect(&address, &options, &host, None, resume)
            .await
            .map(|session| session.login().epoch)
    })
}

#[test]
fn a_login_that_waits_is_waited_for_while_the_target_lives() {
    assert_eq!(resume(Manners::Prompt, Duration::from_secs(60)).unwrap(), Epoch(7));
    // LOGIN is answered at the third KEEP_ALIVE, at any time: without KEEP_ALIVEs it would not be
    // answered.
    assert_eq!(resume(Manners::Slow(3), Duration::from_secs(6)).unwrap(), Epoch(7));
}

#[test]
fn a_target_that_is_gone_during_login_is_noticed() {
    let error = resume(Manners::Silent, Duration::from_millis(400)).unwrap_err();
    assert!(matches!(error, SessionError::TimedOut { what: Opcode::KeepAlive }), "{error}");
}
