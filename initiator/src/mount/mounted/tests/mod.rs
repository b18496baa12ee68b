//! A mount without a device, at toy targets that a test controls.

mod dropping;
mod ending;
mod impostors;
mod left;
mod losses;
mod news;
mod proofs;

use std::cell::RefCell;
use std::sync::Mutex;

use rblk_config::MountConfig;
use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectionHello, Incoming, Listener, MemoryRegion,
    PageKind, Poller, QpIndex, QpLimits, RecvWr, Region, RemoteBuffer, Rkey, Scheme, SendOp,
    SendWr, SgeList, WcStatus, WrId,
};
use rblk_protocol::limits::{ADMIN_DEPTH, COMMAND_BYTES, IO_MIN_BYTES};
use rblk_protocol::{
    AsyncEvent, BlockCount, BlockSize, CommandCapsule, ConnectionKind, DropRequest, Epoch,
    Features, Generation, HelloReject, HelloRequest, HostId, InstanceId, LoginReply, Name, Nonce,
    Offer, Opcode, OpenReply, OpenRequest, QueueDepth, RejectReason, ResponseCapsule, SessionId,
    Status, Tag, Version, VolumeFlags, VolumeHandle, WriteVerifier, negotiate,
};

use super::*;
use rblk_protocol::auth::Hellos;

use crate::engine::PathEnd;
use crate::engine::durability::Durability;
use crate::engine::ways::WayIndex;
use crate::front::disk::FRONT;
use crate::volume::admin::TargetNews;
use crate::volume::begin::{First, MayOpen, connect_first};
use crate::volume::error::SessionError;
use crate::volume::link::pulse;
use crate::volume::queues::Queues;
use crate::volume::session::HostIdentity;
use crate::volume::session::Session;
use proofs::{Opened, Proofs, Prover};

const TIME_LIMIT: Duration = Duration::from_secs(60);
const SLOT: usize = 1024;
const RECVS: u16 = 5;
const SESSION: SessionId = SessionId([2; 16]);

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A command that a toy received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Heard {
    Login { resumed: bool, epoch: Epoch },
    Open { generation: Generation, take_over: bool },
    Logout,
}

struct Manners {
    // Nothing is answered, and no connection is accepted.
    is_dead: bool,
    // Every new connection waits so long.
    pause: Duration,
    // A resumed LOGIN is refused: sealed with keys, else at CONNECT.
    knows_session: bool,
    // The reason to refuse admin connections that resume (true), or I/O connections (false),
    // without any proof.
    rejects: Option<(bool, RejectReason)>,
    drains: bool,
    // The next ASYNC_EVENT, or the parked one, is answered: volumes changed.
    has_news: bool,
    // Blocks of the volume, and whether it is read-only; `None` when it is removed.
    volume: Option<(u64, bool)>,
    // The number of LISTs received for one volume, and whether they are answered.
    lists: u32,
    answers_lists: bool,
    // Replies to LIST are not sealed.
    answers_in_the_clear: bool,
    // Queues are accepted after so many KEEP_ALIVEs.
    beats_before_queues: u32,
    open: (Status, &'static str),
    instance: u8,
    name: &'static str,
    // The proofs for new connections; `None` proves nothing.
    proofs: Option<Proofs>,
    // Commands answered before a LOGIN was accepted.
    handshakes: Vec<(Opcode, Status)>,
    heard: Vec<Heard>,
    // Several ways are known.
    knows_ways: bool,
    // The answer to DROPs; without one they are held.
    drop_answer: Option<Status>,
    drops: Vec<DropRequest>,
    beats: u32,
    // ASYNC_EVENTs, answered or not.
    events: u32,
}

/// A target of one volume that serves no I/O.
struct Toy {
    address: Address,
    manners: Arc<Mutex<Manners>>,
}

impl Toy {
    async fn new() -> Self {
        let any = Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 };
        let mut listener = Listener::bind(&any).await.unwrap();
        let manners = Arc::new(Mutex::new(Manners {
            is_dead: false,
            pause: Duration::ZERO,
            knows_session: true,
            rejects: None,
            drains: false,
            has_news: false,
            volume: Some((256, false)),
            lists: 0,
            answers_lists: true,
            answers_in_the_clear: false,
            beats_before_queues: 0,
            open: (Status::Ok, ""),
            instance: 1,
            name: "store1",
            proofs: None,
            handshakes: Vec::new(),
            heard: Vec::new(),
            knows_ways: false,
            drop_answer: Some(Status::Ok),
            drops: Vec::new(),
            beats: 0,
            events: 0,
        }));
        let toy = Self { address: listener.address().clone(), manners: Arc::clone(&manners) };
        tokio::spawn(async move {
            loop {
                let Ok(incoming) = listener.accept().await else { continue };
                tokio::spawn(serve(incoming, Arc::clone(&manners)));
            }
        });
        toy
    }

    fn is(&self, change: impl FnOnce(&mut Manners)) {
        change(&mut self.manners.lock().unwrap());
    }

    fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut self.manners.lock().unwrap().heard)
    }
}

struct Mouth {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    region: Arc<Region>,
    memory: MemoryRegion,
    said: usize,
    prover: Option<Prover>,
}

impl Mouth {
    fn send(&mut self, op: SendOp, bytes: &[u8]) {
        self.said = (self.said + 1) % 8;
        let at = SLOT * (usize::from(RECVS) + self.said);
        self.region.write(at, bytes);
        let sge = self.memory.sge(at, u32::try_from(bytes.len()).unwrap()).unwrap();
        let wr = SendWr {
            id: WrId(1 << 16),
            op,
            sges: SgeList::one(sge),
            signaled: true,
            inline: false,
        };
        // The peer may be gone.
        let _ = self.poller.post_send(self.qp, &[wr]);
    }

    fn answer(&mut self, to: &CommandCapsule, status: Status, value: u32, payload: &[u8]) {
        let prover = self.prover.as_mut();
        let sealed = prover.and_then(|prover| prover.seal(to.tag, status, value, payload));
        if let Some(sealed) = sealed {
            let length = u32::try_from(sealed.len()).unwrap();
            return self.say(to, status, length, &sealed);
        }
        self.say(to, status, value, payload);
    }

    fn say(&mut self, to: &CommandCapsule, status: Status, value: u32, payload: &[u8]) {
        if let (Some(buffer), false) = (to.buffer, payload.is_empty()) {
            let to = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
            self.send(SendOp::Write(to), payload);
        }
        let mut response = ResponseCapsule::new(to.tag, to.sequence, status);
        response.value = value;
        self.send(SendOp::Send, &response.to_wire());
    }
}

fn volume(generation: Generation) -> OpenReply {
    OpenReply {
        handle: VolumeHandle(1),
        flags: VolumeFlags::default(),
        block_size: BlockSize::new(4096).unwrap(),
        blocks: BlockCount(256),
        discard_granularity_bytes: 4096,
        uuid: [3; 16],
        verifier: WriteVerifier([4; 16]),
        generation,
    }
}

fn features(proves: bool, knows_ways: bool) -> Features {
    let features = if proves { Features::AUTH } else { Features::default() };
    if knows_ways { Features(features.0 | Features::WAYS.0) } else { features }
}

/// Accepts a connection and drives it until it, or its end of the cable, is dead.
#[expect(clippy::too_many_lines, reason = "one arm for each event")]
async fn serve(incoming: Incoming, manners: Arc<Mutex<Manners>>) {
    let asked = HelloRequest::from_wire(&incoming.hello().0).unwrap();
    let resumed = asked.session != SessionId::default();
    let is_admin = asked.kind == ConnectionKind::Admin;
    let pause = manners.lock().unwrap().pause;
    tokio::time::sleep(pause).await;
    {
        let manners = manners.lock().unwrap();
        if manners.is_dead {
            return;
        }
        let forgets = is_admin && !manners.knows_session && manners.proofs.is_none();
        let rejects = manners.rejects.filter(|(admin, _)| *admin == is_admin);
        let reason = rejects.map(|(_, reason)| reason);
        let reason = reason.or(forgets.then_some(RejectReason::NoSuchSession));
        if let (Some(reason), true) = (reason, resumed) {
            let reject = HelloReject {
                reason: Some(reason),
                newest: Version::NEWEST,
                oldest: Version::OLDEST,
                text: "no such session".to_owned(),
            };
            drop(manners);
            incoming.reject(&ConnectionHello(reject.to_wire().to_vec()));
            return;
        }
    }
    let heard_enough = || {
        let manners = manners.lock().unwrap();
        manners.beats >= manners.beats_before_queues
    };
    while !is_admin && !heard_enough() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let depth = if is_admin { QueueDepth::new(ADMIN_DEPTH).unwrap() } else { asked.depth };
    let proofs = manners.lock().unwrap().proofs.clone();
    let offer = Offer {
        depth,
        features: features(proofs.is_some(), is_admin && manners.lock().unwrap().knows_ways),
        in_capsule_bytes: 4096,
        io_max_bytes: asked.io_max_bytes.max(IO_MIN_BYTES),
        instance: InstanceId([1; 16]),
        nonce: Nonce([2; 16]),
    };
    let accept = negotiate(&asked, &offer).unwrap();
    let pd = incoming.device().alloc_pd().unwrap();
    let (mut poller, handle) = pd.poller(64).unwrap();
    let sizes = QpLimits {
        send_wrs: 32,
        recv_wrs: RECVS.into(),
        send_sges: 1,
        recv_sges: 1,
        inline_bytes: 0,
        reads_out: 0,
        reads_in: 0,
    };
    let connection = incoming.prepare(&pd, &handle, sizes).unwrap();
    let qp = poller.attach(connection).unwrap();
    let region = Region::allocate(SLOT * (usize::from(RECVS) + 8), PageKind::Normal).unwrap();
    let memory = pd.register(&region, Access::LOCAL_WRITE).unwrap();
    let recv = |slot: u16| {
        let length = u32::try_from(SLOT).unwrap();
        RecvWr::one(WrId(slot.into()), memory.sge(usize::from(slot) * SLOT, length).unwrap())
    };
    for slot in 0..RECVS {
        poller.post_recv(qp, &[recv(slot)]).unwrap();
    }
    let recvs: Vec<RecvWr> = (0..RECVS).map(recv).collect();
    let hello = ConnectionHello(accept.to_wire().to_vec());
    poller.accept(qp, &AcceptParams { hello, reads_out: 0, reads_in: 0 }).unwrap();
    let prover = proofs.map(|proofs| Prover::new(proofs, &Hellos::new(&asked, &accept)));
    let mut mouth = Mouth { poller, qp, region, memory, said: 0, prover };
    let mut parked = None;
    let mut held = None;
    loop {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let mut one = [Completion::default()];
        let mut manners = manners.lock().unwrap();
        if manners.is_dead {
            return;
        }
        if let (Some(event), true) = (&parked, manners.drains) {
            mouth.say(event, Status::Ok, AsyncEvent::Draining as u32, &[]);
            parked = None;
        }
        if let (Some(event), true) = (&parked, manners.has_news) {
            manners.has_news = false;
            mouth.say(event, Status::Ok, AsyncEvent::VolumesChanged as u32, &[]);
            parked = None;
        }
        if let Some(status) = manners.drop_answer
            && let Some(command) = held.take()
        {
            mouth.answer(&command, status, 0, &[]);
        }
        if mouth.poller.poll(&mut one).unwrap() == 0 {
            continue;
        }
        let [completion] = one;
        if completion.status != WcStatus::Success {
            return;
        }
        if completion.id.0 >> 16 != 0 || !is_admin {
            continue;
        }
        let slot = usize::try_from(completion.id.0).unwrap();
        let mut bytes = vec![0; completion.byte_len as usize];
        mouth.region.read(slot * SLOT, &mut bytes);
        mouth.poller.post_recv(qp, &[recvs[slot]]).unwrap();
        let (fixed, body) = bytes.split_first_chunk::<COMMAND_BYTES>().unwrap();
        let command = CommandCapsule::from_wire(fixed, bytes.len(), depth).unwrap();
        let opened = match &mut mouth.prover {
            Some(prover) => prover.open(&command, body),
            None => Opened::Body(body.to_vec()),
        };
        let body = match opened {
            Opened::Body(body) => body,
            Opened::Answer(status, reply) => {
                manners.handshakes.push((command.opcode, status));
                mouth.say(&command, status, 0, &reply);
                continue;
            }
            Opened::Broken => return,
        };
        match command.opcode {
            Opcode::Login if resumed && !manners.knows_session => {
                manners.handshakes.push((Opcode::Login, Status::NoSuchSession));
                mouth.answer(&command, Status::NoSuchSession, 0, &[]);
            }
            Opcode::Login => {
                manners.heard.push(Heard::Login { resumed, epoch: command.epoch });
                let reply = LoginReply {
                    session: SESSION,
                    epoch: command.epoch,
                    instance: InstanceId([manners.instance; 16]),
                    queues_max: 4,
                    target_name: name(manners.name),
                };
                let payload = match &mouth.prover {
                    Some(_) => proofs::secret().login_payload(&reply).to_vec(),
                    None => reply.to_wire().to_vec(),
                };
                mouth.answer(&command, Status::Ok, 0, &payload);
            }
            Opcode::OpenVolume => {
                let OpenRequest { generation, take_over, .. } =
                    OpenRequest::from_wire(&body).unwrap();
                manners.heard.push(Heard::Open { generation, take_over });
                let (status, text) = manners.open;
                if let (Status::Ok, Some(shape)) = (status, manners.volume) {
                    mouth.answer(&command, status, 0, &news::opened(shape).to_wire());
                } else if status == Status::Ok {
                    mouth.answer(&command, Status::NoSuchVolume, 0, &[]);
                } else {
                    let length = u32::try_from(text.len()).unwrap();
                    mouth.answer(&command, status, length, text.as_bytes());
                }
            }
            Opcode::ListVolumes => {
                let is_of_one = command.volume != VolumeHandle(0);
                manners.lists += u32::from(is_of_one);
                if !is_of_one || manners.answers_lists {
                    let (status, payload) = news::listed(&command, manners.volume);
                    match manners.answers_in_the_clear {
                        true => mouth.say(&command, status, 0, &payload),
                        false => mouth.answer(&command, status, 0, &payload),
                    }
                }
            }
            Opcode::KeepAlive => {
                manners.beats += 1;
                mouth.say(&command, Status::Ok, 0, &[]);
            }
            Opcode::AsyncEvent => {
                manners.events += 1;
                parked = Some(command);
            }
            Opcode::Drop => {
                manners.drops.push(DropRequest::from_wire(&body).unwrap());
                held = Some(command);
            }
            Opcode::Logout => {
                manners.heard.push(Heard::Logout);
                mouth.answer(&command, Status::Ok, 0, &[]);
            }
            other => panic!("{other:?}"),
        }
    }
}

fn config(toys: &[&Toy]) -> MountConfig {
    let ms = rblk_config::Duration::from_millis;
    let mut config = MountConfig::new("", "v");
    config.target = toys.iter().map(|toy| toy.address.to_string()).collect();
    config.queues = Some(1);
    config.queue_depth = 2;
    config.max_io = rblk_config::ByteSize(4096);
    config.reconnect_delay = ms(10);
    // Both ends share a thread, which may not run for long times.
    config.detect = ms(4000);
    config.failback = ms(0);
    config
}

fn host() -> HostIdentity {
    HostIdentity { id: HostId([1; 16]), name: name("a") }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn mounted(config: &MountConfig) -> Mount {
    Mount::new("m", opened(config).await.unwrap())
}

/// The volume of a disk that nothing else of this host holds.
async fn opened(config: &MountConfig) -> anyhow::Result<Volume> {
    Ok(connect_first(first(config, false), host(), &RefCell::default()).await?.0)
}

fn first(config: &MountConfig, take_over: bool) -> First<'_> {
    let (may_open, generation): (MayOpen<'_>, _) = (&|_, _| Ok(()), Generation::FRESH);
    First { config, keys_file: None, take_over, may_open, front: FRONT, generation }
}

impl Mount {
    fn carry_out(&mut self) {
        loop {
            let (link, queues) = self.volume.parts_mut();
            let Some(after) = link.carry_out(queues) else { return };
            self.note_and_go_on(after);
        }
    }

    fn on_path_end(&mut self, queue: u16, end: PathEnd) {
        let (link, queues) = self.volume.parts_mut();
        link.on_path_end((queue, WayIndex::FIRST), end, queues);
    }

    fn on_event(&mut self, news: Result<TargetNews, SessionError>) {
        let (link, queues) = self.volume.parts_mut();
        link.on_event(news, queues);
    }

    fn on_quiet(&mut self, queue: u16) {
        let (link, queues) = self.volume.parts_mut();
        link.on_quiet(queue, queues);
    }

    fn set_queues(&mut self, queues: Queues) {
        *self.volume.parts_mut().1 = queues;
    }

    fn set_durability(&mut self, durability: Arc<Durability>) {
        let MountStatus { name, recovered, .. } = &self.status;
        self.note = NoteKeeper::new(name, self.volume.config(), &durability, true, *recovered);
        self.volume.set_durability(durability);
    }
}

/// Lets the mount act for a moment.
async fn attend(mount: &mut Mount) {
    // Without events nothing is due for long.
    let _ = tokio::time::timeout(Duration::from_millis(20), mount.attend()).await;
}

/// Attends to the mount until its status is the wanted one.
async fn until_status(mount: &mut Mount, wanted: impl Fn(&MountStatus) -> bool) {
    let begun = Instant::now();
    while !wanted(&mount.status()) {
        assert!(begun.elapsed() < TIME_LIMIT, "{:?}", mount.status());
        attend(mount).await;
    }
}

fn login(resumed: bool, epoch: u32) -> Heard {
    Heard::Login { resumed, epoch: Epoch(epoch) }
}

fn open(generation: u64) -> Heard {
    Heard::Open { generation: Generation(generation), take_over: false }
}

#[test]
fn a_mount_that_ends_while_it_reconnects_leaves_no_session() {
    runtime().block_on(async {
        // The mount ends at a different moment of the try each time: while the try waits for the
        // answer to LOGIN, asks the mount, opens the volume or connects the queue.
        for pauses in 0..20 {
            let (first, second) = (Toy::new().await, Toy::new().await);
            let mut mount = mounted(&config(&[&first, &second])).await;
            first.is(|manners| manners.is_dead = true);
            let begun = Instant::now();
            while second.manners.lock().unwrap().heard.is_empty() {
                assert!(begun.elapsed() < TIME_LIMIT, "{:?}", mount.status());
                let _ = tokio::time::timeout(Duration::from_micros(100), mount.attend()).await;
            }
            let pause = Duration::from_micros(100) * pauses;
            if pauses % 2 == 0 {
                let attends = async {
                    loop {
                        mount.attend().await
                    }
                };
                let _ = tokio::time::timeout(pause, attends).await;
            } else {
                // The mount does not read the messages of the try.
                tokio::time::sleep(20 * pause).await;
            }
            mount.volume.end_session(Some(LOGOUT)).await;
            let heard = second.heard();
            assert!(heard.ends_with(&[Heard::Logout]), "{heard:?} after {pauses} pauses");
        }
    });
}

#[test]
fn over_to_another_address_and_back_and_away_from_a_drain() {
    runtime().block_on(async {
        let (first, second) = (Toy::new().await, Toy::new().await);
        let mut config = config(&[&first, &second]);
        config.failback = rblk_config::Duration::from_millis(50);
        let mut mount = mounted(&config).await;
        assert_eq!(first.heard(), [login(false, 1), open(0)]);
        let status = mount.status();
        assert_eq!((status.state.as_str(), status.generation), ("connected", 5));
        assert_eq!((status.lost_at_unix_ms, status.lost_ms_ago), (None, None));

        first.is(|manners| manners.is_dead = true);
        let at = |toy: &Toy| toy.address.to_string();
        until_status(&mut mount, |status| status.address == at(&second)).await;
        assert_eq!(second.heard(), [login(true, 2), open(5)]);
        let status = mount.status();
        assert_eq!((status.state.as_str(), status.epoch), ("connected", 2));
        assert!(status.lost_at_unix_ms.is_some() && status.lost_ms_ago.is_none());

        first.is(|manners| manners.is_dead = false);
        until_status(&mut mount, |status| status.address == at(&first)).await;
        let heard = first.heard();
        let (probes, back) = heard.split_at(heard.len() - 2);
        assert_eq!(back, [login(true, 3), open(5)]);
        assert_eq!(probes, [login(false, 1), Heard::Logout].repeat(2), "two probes, no OPEN");
        // The return is no loss.
        let after = mount.status();
        assert_eq!(
            (after.last_loss, after.lost_at_unix_ms),
            (status.last_loss, status.lost_at_unix_ms)
        );

        first.is(|manners| manners.drains = true);
        until_status(&mut mount, |status| status.address == at(&second)).await;
        assert_eq!(second.heard(), [login(true, 4), open(5)], "no LOGOUT: the session goes on");
        assert_eq!(mount.status().last_loss.as_deref(), Some("the target drains"));
    });
}

#[test]
fn a_run_of_another_target_is_not_gone_back_to() {
    runtime().block_on(async {
        let (first, second) = (Toy::new().await, Toy::new().await);
        let mut config = config(&[&first, &second]);
        config.failback = rblk_config::Duration::from_millis(20);
        let mut mount = mounted(&config).await;
        first.is(|manners| manners.is_dead = true);
        let at = second.address.to_string();
        until_status(&mut mount, |status| status.address == at).await;
        first.heard();
        first.is(|manners| (manners.is_dead, manners.instance) = (false, 9));
        let mut probes = 0;
        let begun = Instant::now();
        while probes < 4 {
            assert!(begun.elapsed() < TIME_LIMIT);
            attend(&mut mount).await;
            probes += first.heard().iter().filter(|heard| **heard == Heard::Logout).count();
        }
        let status = mount.status();
        assert_eq!((status.address, status.epoch), (at, 2));
    });
}

#[test]
fn a_new_session_keeps_the_generation_and_a_fenced_mount_asks_no_more() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        toy.heard();
        toy.is(|manners| manners.is_dead = true);
        until_status(&mut mount, |status| status.state == "reconnecting").await;
        toy.is(|manners| (manners.is_dead, manners.knows_session) = (false, false));
        until_status(&mut mount, |status| status.state == "connected").await;
        assert_eq!(toy.heard(), [login(false, 1), open(5)]);
        let status = mount.status();
        assert!(status.stall_ms_max > 0);
        let why = status.last_loss.expect("it was lost");
        assert!(!why.contains("session"), "that it is a new session is no loss: {why}");

        // Without a name, only the session is fenced: a new session learns the holder of the
        // volume.
        toy.is(|manners| {
            (manners.is_dead, manners.knows_session) = (true, true);
            manners.open = (Status::Fenced, "");
        });
        until_status(&mut mount, |status| status.state == "reconnecting").await;
        toy.is(|manners| manners.is_dead = false);
        let begun = Instant::now();
        while !toy.manners.lock().unwrap().heard.contains(&login(false, 1)) {
            assert!(begun.elapsed() < TIME_LIMIT);
            attend(&mut mount).await;
        }
        assert_eq!(toy.heard()[..2], [login(true, 2), open(5)]);
        toy.is(|manners| manners.open = (Status::Fenced, "held by b (10.0.0.2)"));
        until_status(&mut mount, |status| status.state == "fenced").await;
        let status = mount.status();
        assert!(status.last_loss.is_some_and(|why| why.contains("held by b (10.0.0.2)")));
        assert_eq!(mount.volume.link().facts().fenced.as_deref(), Some("held by b (10.0.0.2)"));
        assert!(status.lost_ms_ago.is_some());
        // The mount logs out, and sends nothing else.
        until_status(&mut mount, |_| toy.heard().contains(&Heard::Logout)).await;
        for _ in 0..20 {
            attend(&mut mount).await;
        }
        assert_eq!(toy.heard(), []);
        assert!(mount.volume.link().is_over());
    });
}

#[test]
fn another_target_at_a_second_address_is_passed_over() {
    runtime().block_on(async {
        let (first, second) = (Toy::new().await, Toy::new().await);
        second.is(|manners| manners.name = "store2");
        let mut mount = mounted(&config(&[&first, &second])).await;
        first.is(|manners| manners.is_dead = true);
        until_status(&mut mount, |status| {
            status.last_loss.as_ref().is_some_and(|why| why.contains("`store2`"))
        })
        .await;
        assert_eq!(second.heard(), [login(true, 2), Heard::Logout]);
        first.is(|manners| manners.is_dead = false);
        until_status(&mut mount, |status| status.state == "connected").await;
        assert_eq!(mount.status().address, first.address.to_string());
    });
}

#[test]
fn a_first_mount_waits_for_its_target_but_not_after_a_permanent_error() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        toy.is(|manners| manners.is_dead = true);
        let why = RefCell::default();
        let mut config = config(&[&toy]);
        let error = connect_first(first(&config, false), host(), &why).await.unwrap_err();
        assert!(error.downcast_ref::<SessionError>().unwrap().is_transient(), "{error}");

        config.wait = rblk_config::Duration::from_secs(3600);
        let revive = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            toy.is(|manners| manners.is_dead = false);
        };
        let waiting = connect_first(first(&config, true), host(), &why);
        let (mounted, ()) =
            tokio::time::timeout(TIME_LIMIT, async { tokio::join!(waiting, revive) })
                .await
                .expect("it connects");
        assert!(why.borrow().is_some(), "it waited");
        assert!(mounted.unwrap().0.link().is_connected());
        let take_over = Heard::Open { generation: Generation::FRESH, take_over: true };
        assert_eq!(toy.heard(), [login(false, 1), take_over]);

        toy.is(|manners| manners.open = (Status::InUse, "held by b (10.0.0.2)"));
        let waiting = connect_first(first(&config, false), host(), &why);
        let error = tokio::time::timeout(TIME_LIMIT, waiting).await.expect("at once").unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("held by b (10.0.0.2)") && text.contains("--take-over"), "{text}");
    });
}

#[test]
fn the_end_of_a_path_that_has_a_successor_is_no_loss() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        mount.set_queues(Queues::without_threads(&[2]));
        mount.on_path_end(0, PathEnd::Lost(WcStatus::Flushed));
        assert_eq!(mount.status().state, "connected");
        mount.on_path_end(0, PathEnd::Dropped);
        assert_eq!(mount.status().state, "connected", "it was asked for");
        mount.set_queues(Queues::without_threads(&[1]));
        mount.on_path_end(0, PathEnd::Silent);
        assert_eq!(mount.status().state, "reconnecting");
        assert_eq!(
            mount.status().last_loss.as_deref(),
            Some("queue 0: the target does not answer")
        );
        until_status(&mut mount, |status| status.state == "connected").await;

        // A path that fails with a feature is not tried again with it; the next try, without it,
        // follows at once.
        mount.set_queues(Queues::without_threads(&[1]));
        mount.on_path_end(0, PathEnd::SelfTest);
        assert!(!mount.volume.link().setup().wish.features.has(Features::WRITE_WITH_IMM));
        until_status(&mut mount, |status| status.state == "connected" && status.epoch == 3).await;
        assert!(!mount.status().write_with_imm);
    });
}

#[test]
fn a_target_that_drains_is_left_when_every_queue_is_quiet() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut mount = mounted(&config(&[&toy])).await;
        mount.on_event(Ok(TargetNews::Event(Some(AsyncEvent::Draining))));
        mount.carry_out();
        assert!(mount.volume.link().course().is_holding());
        let begun = Instant::now();
        mount.set_queues(Queues::without_threads(&[1, 1]));
        for queue in [0, 0, 9, 1] {
            // The hold ends by itself after a while.
            let ended = !mount.volume.link().is_connected();
            assert!(!ended || begun.elapsed() >= Duration::from_millis(700));
            mount.on_quiet(queue);
            mount.carry_out();
        }
        assert!(!mount.volume.link().is_connected());
        assert_eq!(mount.status().state, "reconnecting");
    });
}

#[test]
fn a_session_is_kept_while_its_queues_connect() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        toy.is(|manners| manners.beats_before_queues = 2);
        // Without a KEEP_ALIVE no queue is accepted.
        let mount = mounted(&config(&[&toy])).await;
        assert!(mount.volume.link().is_connected());
    });
}

#[test]
fn a_target_that_drains_is_not_asked_for_events_again_and_again() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let config = config(&[&toy]);
        let mut mount = mounted(&config).await;
        let pulse = pulse(&config);
        let session = mount.volume.parts_mut().0.session_mut().unwrap();
        toy.is(|manners| manners.drains = true);
        let event = tokio::time::timeout(TIME_LIMIT, session.admin.event(pulse)).await.unwrap();
        assert_eq!(event.unwrap(), Some(AsyncEvent::Draining));
        // The KEEP_ALIVEs go on during the hold: every ASYNC_EVENT would be answered at once.
        toy.is(|manners| manners.beats = 0);
        let begun = Instant::now();
        while toy.manners.lock().unwrap().beats < 2 {
            assert!(begun.elapsed() < TIME_LIMIT, "the session is not kept");
            let wait = Duration::from_millis(20);
            let event = tokio::time::timeout(wait, session.admin.event(pulse)).await;
            assert!(event.is_err(), "{event:?}");
        }
        assert_eq!(toy.manners.lock().unwrap().events, 1);
    });
}
