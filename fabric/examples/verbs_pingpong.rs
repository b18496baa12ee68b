//! Both ends of the verbs provider against a real device, step by step, each step checked.
//!
//! ```text
//! verbs_pingpong ADDRESS      every step over the device that has this IP address
//! verbs_pingpong --no-device  what is said on a host without one
//! ```
//!
//! Ends with status 0 and `ok` when everything was as it must be.

use std::env;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectOptions, Connection, ConnectionHello, Device,
    DeviceCaps, Established, FabricError, Listener, MemoryRegion, PageKind, Poller, PollerHandle,
    ProtectionDomain, QpIndex, QpLimits, RecvWr, Region, RemoteBuffer, Rkey, Route, SendOp, SendWr,
    SgeList, Transport, WcOpcode, WcStatus, WrId,
};
use tokio::runtime::Handle;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const MIB: usize = 1 << 20;
const LIMITS: QpLimits = QpLimits {
    send_wrs: 64,
    recv_wrs: 16,
    send_sges: 2,
    inline_bytes: 64,
    reads_out: 8,
    reads_in: 4,
};

/// One end: a poller, its memory (lower half to receive, upper half to send), one QP.
struct End {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    region: Arc<Region>,
    mr: MemoryRegion,
}

fn make_end(device: &Device) -> Outcome<(ProtectionDomain, Box<dyn Poller>, PollerHandle)> {
    let pd = device.alloc_pd()?;
    let (poller, handle) = pd.poller(256)?;
    Ok((pd, poller, handle))
}

impl End {
    fn new(
        pd: &ProtectionDomain,
        mut poller: Box<dyn Poller>,
        connection: Connection,
    ) -> Outcome<Self> {
        let region = Region::allocate(4 * MIB, PageKind::Normal)?;
        let mr = pd.register(&region, Access::REMOTE)?;
        let qp = poller.attach(connection)?;
        let mut end = Self { poller, qp, region, mr };
        end.recvs(0..4)?;
        Ok(end)
    }

    fn recvs(&mut self, ids: std::ops::Range<u64>) -> Outcome<()> {
        let wrs: Vec<_> = ids
            .map(|id| {
                let offset = usize::try_from(id % 16).unwrap_or(0) * 4096;
                self.mr.sge(offset, 4096).map(|sge| RecvWr { id: WrId(id), sge })
            })
            .collect::<Option<_>>()
            .ok_or("RECV outside of the region")?;
        Ok(self.poller.post_recv(self.qp, &wrs)?)
    }

    fn wr(&self, id: u64, op: SendOp, offset: usize, len: u32, signaled: bool) -> SendWr {
        let sge = self.mr.sge(offset, len).unwrap_or_default();
        SendWr { id: WrId(id), op, sges: SgeList::one(sge), signaled, inline: len <= 64 }
    }

    fn post(&mut self, wrs: &[SendWr]) -> Outcome<()> {
        Ok(self.poller.post_send(self.qp, wrs)?)
    }

    /// The next completion, asleep until there is one.
    fn next_within(&mut self, limit: Duration) -> Outcome<Option<Completion>> {
        let deadline = Instant::now() + limit;
        let mut out = [Completion::default()];
        loop {
            if self.poller.poll(&mut out)? == 1 {
                return Ok(Some(out[0]));
            }
            self.poller.arm()?;
            if self.poller.poll(&mut out)? == 1 {
                return Ok(Some(out[0]));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let [Some(fd), _] = self.poller.event_fds() else { return Err("no event".into()) };
            let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
            poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout)?;
            self.poller.clear_event();
        }
    }

    fn next(&mut self) -> Outcome<Completion> {
        self.next_within(Duration::from_secs(10))?.ok_or_else(|| "no completion within 10 s".into())
    }

    fn expect(&mut self, id: u64, opcode: WcOpcode) -> Outcome<Completion> {
        let c = self.next()?;
        if (c.id, c.status, c.opcode) != (WrId(id), WcStatus::Success, opcode) {
            return Err(format!("wanted {opcode:?} {id}, got {c:?}").into());
        }
        Ok(c)
    }

    /// Completions until there are no more for a while.
    fn drain(&mut self) -> Outcome<Vec<Completion>> {
        let mut all = Vec::new();
        while let Some(c) = self.next_within(Duration::from_millis(300))? {
            all.push(c);
        }
        Ok(all)
    }

    fn fill(&self, offset: usize, len: usize, seed: u8) {
        let bytes: Vec<u8> = pattern(len, seed).collect();
        self.region.write(offset, &bytes);
    }

    fn check(&self, offset: usize, len: usize, seed: u8) -> Outcome<()> {
        let mut bytes = vec![0; len];
        self.region.read(offset, &mut bytes);
        match bytes.iter().copied().zip(pattern(len, seed)).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of {len} is wrong").into()),
        }
    }
}

fn pattern(len: usize, seed: u8) -> impl Iterator<Item = u8> {
    (0..len).map(move |i| (i ^ (i >> 8)).to_le_bytes()[0] ^ seed)
}

/// A connected pair, both ends in this process.
fn pair(rt: &Handle, listener: &mut Listener) -> Outcome<(End, End)> {
    let address = listener.address().clone();
    let options = ConnectOptions::default();
    let route = rt.block_on(Route::resolve(&address, &options))?;
    let (pd, poller, handle) = make_end(&route.device())?;
    let mut hello = b"hello from the initiator".to_vec();
    hello.resize(ConnectionHello::REQUEST_MAX, 7);
    let request = ConnectionHello(hello.clone());
    let connecting = {
        let pd = pd.clone();
        rt.spawn(async move { route.connect(&pd, &handle, LIMITS, &request).await })
    };

    let incoming = rt.block_on(listener.accept())?;
    if incoming.hello().0.get(..hello.len()) != Some(&hello[..]) {
        return Err(format!("hello came as {:?}", incoming.hello()).into());
    }
    println!(
        "  request from {}: {} bytes of hello, reads {:?}",
        incoming.peer(),
        incoming.hello().0.len(),
        incoming.peer_reads()
    );
    let (their_pd, their_poller, their_handle) = make_end(&incoming.device())?;
    let connection = incoming.prepare(&their_pd, &their_handle, LIMITS)?;
    let mut target = End::new(&their_pd, their_poller, connection)?;
    let reply = ConnectionHello(vec![9; ConnectionHello::REPLY_MAX]);
    let params = AcceptParams { hello: reply.clone(), reads_out: 4, reads_in: 4 };
    target.poller.accept(target.qp, &params)?;

    let Established { connection, hello, reads_out, reads_in } = rt.block_on(connecting)??;
    println!(
        "  established: {} bytes of hello, reads out {reads_out}, in {reads_in}",
        hello.0.len()
    );
    if hello.0.get(..reply.0.len()) != Some(&reply.0[..]) {
        return Err(format!("reply came as {hello:?}").into());
    }
    if (reads_out, reads_in) != (4, 4) {
        return Err("read depths are not the smaller of what both sides offered".into());
    }
    let initiator = End::new(&pd, poller, connection)?;
    Ok((initiator, target))
}

fn pushed_read(initiator: &mut End, target: &mut End, caps: &DeviceCaps, len: u32) -> Outcome<()> {
    // Command.
    initiator.fill(2 * MIB, 64, 1);
    let command = initiator.wr(100, SendOp::Send, 2 * MIB, 64, false);
    initiator.post(&[command])?;
    let c = target.expect(0, WcOpcode::Recv)?;
    target.check(0, 64, 1)?;
    if c.byte_len != 64 {
        return Err(format!("64 bytes came as {}", c.byte_len).into());
    }
    // Answer: the data, and word of it, with one doorbell.
    target.fill(2 * MIB, len as usize, 2);
    let sink = initiator.mr.remote(MIB);
    if caps.write_with_imm {
        let wr = target.wr(200, SendOp::WriteWithImm(sink, 0xabcd_1234), 2 * MIB, len, true);
        target.post(&[wr])?;
        let c = initiator.expect(0, WcOpcode::RecvWithImm)?;
        if (c.imm, c.byte_len) != (0xabcd_1234, len) {
            return Err(format!("immediate came as {c:?}").into());
        }
        target.expect(200, WcOpcode::Write)?;
    } else {
        let write = target.wr(200, SendOp::Write(sink), 2 * MIB, len, false);
        let send = target.wr(201, SendOp::Send, 2 * MIB, 16, true);
        target.post(&[write, send])?;
        initiator.expect(0, WcOpcode::Recv)?;
        target.expect(201, WcOpcode::Send)?;
    }
    initiator.check(MIB, len as usize, 2)?;
    initiator.recvs(0..1)?;
    target.recvs(0..1)
}

fn data(rt: &Handle, listener: &mut Listener, caps: &DeviceCaps) -> Outcome<()> {
    let (mut initiator, mut target) = pair(rt, listener)?;
    // RECVs are used in order of posting: 0 1 2 3, so drain three each to make 0 the next one
    // again.
    for (from, to) in [(0, 1), (1, 0)] {
        for i in 1..=3u64 {
            let (a, b) = match from {
                0 => (&mut initiator, &mut target),
                _ => (&mut target, &mut initiator),
            };
            let wr = a.wr(i, SendOp::Send, 2 * MIB, 8, i == 3);
            a.post(&[wr])?;
            let id = b.next()?;
            if id.id != WrId(i - 1) || id.status != WcStatus::Success {
                return Err(format!("end {to}: {id:?}").into());
            }
        }
        let a = if from == 0 { &mut initiator } else { &mut target };
        a.expect(3, WcOpcode::Send)?;
    }
    for end in [&mut initiator, &mut target] {
        // What is left is RECV 3; use it up by name.
        end.recvs(0..1)?;
    }
    for (a, b) in [(true, "to target"), (false, "to initiator")] {
        let (from, to) =
            if a { (&mut initiator, &mut target) } else { (&mut target, &mut initiator) };
        let wr = from.wr(9, SendOp::Send, 2 * MIB, 8, true);
        from.post(&[wr])?;
        to.expect(3, WcOpcode::Recv).map_err(|e| format!("{b}: {e}"))?;
        from.expect(9, WcOpcode::Send)?;
    }
    step("64 B SENDs in order, unsignaled ones silent");

    pushed_read(&mut initiator, &mut target, caps, 4096)?;
    step("64 B command, 4 KiB pushed back");
    pushed_read(&mut initiator, &mut target, caps, 1 << 20)?;
    step("64 B command, 1 MiB pushed back");

    // A write: the target pulls.
    initiator.fill(MIB, MIB, 3);
    let source = initiator.mr.remote(MIB);
    let wrs: Vec<_> = (0..4u64)
        .map(|i| {
            let offset = usize::try_from(i).unwrap_or(0) * MIB / 4;
            let from = RemoteBuffer { addr: source.addr + offset as u64, rkey: source.rkey };
            target.wr(300 + i, SendOp::Read(from), 2 * MIB + offset, 1 << 18, i == 3)
        })
        .collect();
    target.post(&wrs)?;
    let c = target.expect(303, WcOpcode::Read)?;
    println!("  READ byte_len {}", c.byte_len);
    target.check(2 * MIB, MIB, 3)?;
    step("1 MiB pulled by four READs");

    // A batch of more than one list.
    let sends: Vec<_> = (0..60)
        .map(|i| initiator.wr(400 + i, SendOp::Write(target.mr.remote(MIB)), 2 * MIB, 512, i == 59))
        .collect();
    initiator.post(&sends)?;
    initiator.expect(459, WcOpcode::Write)?;
    step("60 WRITEs with one doorbell, one completion");

    // A forged source is judged by the device, inline or not.
    let mut forged = initiator.wr(500, SendOp::Send, 2 * MIB, 32, true);
    forged.sges = SgeList::one(rblk_fabric::Sge { addr: 8, len: 32, lkey: initiator.mr.lkey() });
    initiator.post(&[forged])?;
    let c = initiator.next()?;
    let mut all = vec![c];
    all.extend(initiator.drain()?);
    println!("  forged SGE: {:?}", all.iter().map(|c| (c.id.0, c.status)).collect::<Vec<_>>());
    if !all.iter().any(|c| c.id == WrId(500)) || all.iter().any(|c| c.status == WcStatus::Success) {
        return Err("a forged SGE went through, or without a trace".into());
    }
    let there = target.drain()?;
    println!("  and {} there: {:?}", there.len(), there.first().map(|c| c.status));
    println!("  counters {:?}", initiator.poller.counters());
    step("a forged SGE hurts its own connection only");
    Ok(())
}

fn empty_message(rt: &Handle, listener: &mut Listener) -> Outcome<()> {
    let (mut initiator, _target) = pair(rt, listener)?;
    let good = initiator.wr(1, SendOp::Send, 2 * MIB, 64, true);
    let empty = SendWr { id: WrId(2), sges: SgeList::default(), ..good };
    initiator.post(&[empty, SendWr { id: WrId(3), ..good }])?;
    let all: Vec<_> = initiator.drain()?.iter().map(|c| (c.id.0, c.status)).collect();
    if !all.contains(&(2, WcStatus::LocalLength)) || !all.contains(&(3, WcStatus::Flushed)) {
        return Err(format!("an empty message came as {all:?}").into());
    }
    step("an empty message fails with LocalLength");
    Ok(())
}

fn bad_rkey(rt: &Handle, listener: &mut Listener) -> Outcome<()> {
    let (mut initiator, mut target) = pair(rt, listener)?;
    let sink = RemoteBuffer { addr: initiator.region.address(), rkey: Rkey(0x00de_ad00) };
    let write = target.wr(1, SendOp::Write(sink), 2 * MIB, 4096, true);
    let behind = target.wr(2, SendOp::Send, 2 * MIB, 64, true);
    target.post(&[write, behind])?;
    let all = target.drain()?;
    println!("  requester: {:?}", all.iter().map(|c| (c.id.0, c.status)).collect::<Vec<_>>());
    let first: Vec<_> = all.iter().take(2).map(|c| c.status).collect();
    if target.poller.caps().transport == Transport::Iwarp {
        // There a WRITE may be done once TCP has it, before the peer ends the connection.
        println!("  iWARP: the WRITE was {:?}", first[0]);
    } else if first != [WcStatus::RemoteAccess, WcStatus::Flushed] {
        return Err("the refused WRITE did not complete as it should".into());
    }
    let there = initiator.drain()?;
    println!("  responder: {:?}", there.iter().map(|c| (c.id.0, c.status)).collect::<Vec<_>>());
    if there.len() != 4 || there.iter().any(|c| c.status == WcStatus::Success) {
        return Err("the responder's four RECVs did not flush".into());
    }
    // Posting to the dead QP: flushed as well.
    let late = target.wr(3, SendOp::Send, 2 * MIB, 64, false);
    target.post(&[late])?;
    target.recvs(7..8)?;
    let late: Vec<_> = target.drain()?.iter().map(|c| (c.id.0, c.status)).collect();
    if late != [(3, WcStatus::Flushed), (7, WcStatus::Flushed)] {
        return Err(format!("late posts came as {late:?}").into());
    }
    step("a bad rkey ends the connection and flushes");
    Ok(())
}

fn failed(rt: &Handle, listener: &mut Listener) -> Outcome<()> {
    let (mut initiator, mut target) = pair(rt, listener)?;
    let at = Instant::now();
    target.poller.fail(target.qp);
    target.poller.fail(target.qp);
    let c = initiator.next()?;
    println!("  peer saw {:?} after {:?}", c.status, at.elapsed());
    let here = target.drain()?;
    if here.len() != 4 || here.iter().any(|c| c.status != WcStatus::Flushed) {
        return Err(format!("fail() flushed {here:?}").into());
    }
    // Index and generation.
    let old = target.poller.detach(target.qp).ok_or("detach")?;
    if target.poller.detach(target.qp).is_some() {
        return Err("detached twice".into());
    }
    drop(old);
    let again = pair(rt, listener)?;
    drop(again);
    if target.poller.poll(&mut [Completion::default(); 8])? != 0 {
        return Err("completions of a detached QP".into());
    }
    step("fail() flushes here and reaches the peer; detach ends it");
    Ok(())
}

fn refusals(rt: &Handle, listener: &mut Listener) -> Outcome<()> {
    let address = listener.address().clone();
    let options = ConnectOptions::default();
    let attempt = |address: Address| {
        let options = options.clone();
        async move {
            let route = Route::resolve(&address, &options).await?;
            let pd = route.device().alloc_pd()?;
            let (poller, handle) = pd.poller(256)?;
            let hello = ConnectionHello(b"let me in".to_vec());
            let result = route.connect(&pd, &handle, LIMITS, &hello).await;
            drop(poller);
            result
        }
    };
    let asked = rt.spawn(attempt(address.clone()));
    rt.block_on(listener.accept())?.reject(&ConnectionHello(b"no such volume".to_vec()));
    match rt.block_on(asked)? {
        Err(FabricError::Rejected { hello, .. }) if hello.starts_with(b"no such volume") => {
            println!("  reason came in {} bytes", hello.len());
        }
        other => return Err(format!("a reasoned rejection came as {other:?}").into()),
    }
    step("reject with a reason");

    let asked = rt.spawn(attempt(address.clone()));
    drop(rt.block_on(listener.accept())?);
    match rt.block_on(asked)? {
        Err(FabricError::Rejected { .. }) => {}
        other => return Err(format!("a dropped request came as {other:?}").into()),
    }
    let asked = rt.spawn(attempt(address.clone()));
    let incoming = rt.block_on(listener.accept())?;
    let (pd, _poller, handle) = make_end(&incoming.device())?;
    drop(incoming.prepare(&pd, &handle, LIMITS)?);
    match rt.block_on(asked)? {
        Err(FabricError::Rejected { .. }) => {}
        other => return Err(format!("a dropped connection came as {other:?}").into()),
    }
    step("requests dropped unanswered are rejected");

    let at = Instant::now();
    let nobody = Address { port: address.port.wrapping_add(1), ..address.clone() };
    match rt.block_on(attempt(nobody)) {
        Err(FabricError::Unreachable { reason, .. }) if reason.contains("nothing listens") => {
            println!("  said after {:?}: {reason}", at.elapsed());
        }
        other => return Err(format!("a port nobody listens on came as {other:?}").into()),
    }
    step("a port nobody listens on");

    for host in ["127.0.0.1", "203.0.113.7", "no-such-name.invalid"] {
        let at = Instant::now();
        let away = Address { host: host.to_owned(), ..address.clone() };
        match rt.block_on(Route::resolve(&away, &options)) {
            Err(error @ (FabricError::Unreachable { .. } | FabricError::TimedOut { .. })) => {
                println!("  {error} ({:?})", at.elapsed());
            }
            other => return Err(format!("{host} came as {other:?}").into()),
        }
    }
    let bound = ConnectOptions { bind: Some([127, 0, 0, 1].into()), ..options.clone() };
    println!(
        "  {}",
        rt.block_on(Route::resolve(&address, &bound))
            .map_or_else(|e| e.to_string(), |_| "BOUND?".into())
    );
    println!(
        "  {}",
        rt.block_on(Listener::bind(&address)).map_or_else(|e| e.to_string(), |_| "BOUND?".into())
    );
    let foreign = Address { host: "198.51.100.1".into(), ..address };
    println!(
        "  {}",
        rt.block_on(Listener::bind(&foreign)).map_or_else(|e| e.to_string(), |_| "BOUND?".into())
    );
    step("addresses that lead nowhere");
    Ok(())
}

/// Connects and waits to be killed.
fn victim(rt: &Handle, address: &Address) -> Outcome<()> {
    let route = rt.block_on(Route::resolve(address, &ConnectOptions::default()))?;
    let (pd, poller, handle) = make_end(&route.device())?;
    let hello = ConnectionHello(b"victim".to_vec());
    let established = rt.block_on(route.connect(&pd, &handle, LIMITS, &hello))?;
    let _end = End::new(&pd, poller, established.connection)?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

fn killed(rt: &Handle, listener: &mut Listener) -> Outcome<()> {
    let spawn = || -> Outcome<Child> {
        let mut command = Command::new(env::current_exe()?);
        command.arg("--victim").arg(listener.address().to_string()).stdin(Stdio::null());
        Ok(command.spawn()?)
    };
    let mut child = spawn()?;
    let incoming = rt.block_on(listener.accept())?;
    let (pd, poller, handle) = make_end(&incoming.device())?;
    let connection = incoming.prepare(&pd, &handle, LIMITS)?;
    let mut target = End::new(&pd, poller, connection)?;
    let params = AcceptParams { hello: ConnectionHello::default(), reads_out: 4, reads_in: 4 };
    target.poller.accept(target.qp, &params)?;
    std::thread::sleep(Duration::from_millis(300));
    let at = Instant::now();
    child.kill()?;
    let c = target.next()?;
    let after = at.elapsed();
    child.wait()?;
    println!("  {:?} after {after:?}", c.status);
    if c.status != WcStatus::Flushed || after > Duration::from_secs(3) {
        return Err("the death of the peer was not seen in time".into());
    }
    step("kill -9 of the peer is seen as a flush");
    Ok(())
}

fn limits(listener: &mut Listener, rt: &Handle) -> Outcome<()> {
    let address = listener.address().clone();
    let route = rt.block_on(Route::resolve(&address, &ConnectOptions::default()))?;
    let device = route.device();
    if !device.same_as(&rt.block_on(Route::resolve(&address, &ConnectOptions::default()))?.device())
    {
        return Err("two routes by one device are two devices".into());
    }
    let pd = device.alloc_pd()?;
    let asked = device.caps().max_cq_entries.saturating_add(1);
    match pd.poller(asked) {
        Err(FabricError::Limit { .. }) => {}
        other => return Err(format!("a huge CQ came as {other:?}").into()),
    }
    let (_poller, handle) = pd.poller(16)?;
    let too_many = QpLimits { send_wrs: device.caps().max_wrs.saturating_add(1), ..LIMITS };
    match rt.block_on(route.connect(&pd, &handle, too_many, &ConnectionHello::default())) {
        Err(FabricError::Limit { .. }) => {}
        other => return Err(format!("a huge QP came as {other:?}").into()),
    }
    step("limits of the device");
    Ok(())
}

fn step(what: &str) {
    println!("ok: {what}");
}

fn run() -> Outcome<()> {
    // Control runs on a thread of its own, as in the daemons: this one sleeps on completion
    // channels.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let rt = runtime.handle().clone();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let control = std::thread::spawn(move || {
        let _ = runtime.block_on(stopped);
        // Channels and connections may be gone or not: the runtime ends all the same.
        drop(runtime);
    });
    let outcome = steps(&rt);
    drop(stop);
    control.join().map_err(|_| "the control thread panicked")?;
    outcome
}

fn steps(rt: &Handle) -> Outcome<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--no-device"] => {
            let address: Address = "rdma://10.9.0.1".parse()?;
            let resolved = rt.block_on(Route::resolve(&address, &ConnectOptions::default()));
            let bound = rt.block_on(Listener::bind(&address));
            match (resolved, bound) {
                (Err(FabricError::NoDevice), Err(error @ FabricError::NoDevice)) => {
                    println!("{error}");
                }
                other => return Err(format!("{other:?}").into()),
            }
            Ok(())
        }
        ["--victim", address] => victim(rt, &address.parse()?),
        [host] => {
            let address =
                Address { scheme: rblk_fabric::Scheme::Rdma, host: host.to_owned(), port: 0 };
            let mut listener = rt.block_on(Listener::bind(&address))?;
            println!("listening on {}", listener.address());
            let route =
                rt.block_on(Route::resolve(listener.address(), &ConnectOptions::default()))?;
            let device = route.device();
            let caps = device.caps().clone();
            drop(route);
            println!("{caps:#?}");
            if caps.transport == Transport::Unknown {
                return Err("unknown transport".into());
            }
            limits(&mut listener, rt)?;
            data(rt, &mut listener, &caps)?;
            empty_message(rt, &mut listener)?;
            bad_rkey(rt, &mut listener)?;
            failed(rt, &mut listener)?;
            refusals(rt, &mut listener)?;
            killed(rt, &mut listener)?;
            drop((listener, device));
            Ok(())
        }
        _ => Err("usage: verbs_pingpong ADDRESS | --no-device".into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => {
            println!("ok");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}
