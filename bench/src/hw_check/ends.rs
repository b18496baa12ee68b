//! [`Ends`]: two ends in one process, each with a poller, over the loopback of a device.
//!
//! Side `a` connects, side `b` is connected to. One thread takes the turns of both. Every wait has
//! a deadline.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectionHello, DeviceCaps, Listener, MAX_SGE,
    MemoryRegion, PageKind, Poller, PollerHandle, ProtectionDomain, QpFacts, QpIndex, QpLimits,
    RecvWr, Region, Route, SendOp, SendWr, Sge, SgeList, Transport, WcStatus, WrId,
};

use super::Site;
use super::control::Control;
use crate::interrupt;

/// Longest wait for one connection. A card may take 12 s for one step.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
pub(super) const WAIT_LIMIT: Duration = Duration::from_secs(20);
/// Time without an answer to the first message of a connection before the next is sent.
const UNSEEN: Duration = Duration::from_millis(500);
const FIRST_MESSAGES: u8 = 8;
const FIRST_BYTES: u32 = 8;
const BATCH: usize = 64;
/// Empty looks before a thread sleeps. Kernel threads may need the processor to play the device.
const LOOKS: u32 = 256;
const NAP: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum At {
    A,
    B,
}

/// A poller with its handle and PD.
#[derive(Debug)]
pub(super) struct Side {
    // Before its PD.
    pub(super) poller: Box<dyn Poller>,
    pub(super) handle: PollerHandle,
    pub(super) pd: ProtectionDomain,
}

impl Side {
    pub(super) fn new(site: &Site, entries: u32) -> Result<Self> {
        let pd = site.device.alloc_pd().context("a protection domain")?;
        let (poller, handle) = pd.poller(entries).context("a completion queue")?;
        Ok(Self { poller, handle, pd })
    }

    /// Registered memory of zeros.
    pub(super) fn memory(&self, bytes: usize, access: Access) -> Result<MemoryRegion> {
        let region = Region::allocate(bytes, PageKind::Normal)?;
        region.zero(0, region.len());
        Ok(self.pd.register(&region, access)?)
    }
}

#[derive(Debug)]
pub(super) struct Ends {
    pub(super) a: Side,
    pub(super) b: Side,
    listener: Listener,
    // The software provider works only in its turns.
    polls_both: bool,
    idle: u32,
    // Memory for the first message of a connection, at each end, where it may stay unseen.
    first: Option<(MemoryRegion, MemoryRegion)>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) a: QpIndex,
    pub(super) b: QpIndex,
    /// The provider's facts of the QP of `a`.
    pub(super) facts: Option<QpFacts>,
    /// READs that `a` may have outstanding.
    pub(super) reads_out: u8,
    /// Messages until the first one was seen.
    pub(super) first_messages: u8,
}

pub(super) fn limits(caps: &DeviceCaps, depth: u32) -> QpLimits {
    QpLimits {
        send_wrs: depth.min(caps.max_wrs),
        recv_wrs: depth.min(caps.max_wrs),
        send_sges: u32::try_from(MAX_SGE).unwrap_or(1).min(caps.max_sges).max(1),
        recv_sges: 1,
        inline_bytes: caps.inline_bytes,
        reads_out: caps.max_reads_out.clamp(1, 16),
        reads_in: caps.max_reads_in.clamp(1, 16),
    }
}

pub(super) fn listener(site: &Site) -> Result<Listener> {
    let address = Address { port: 0, ..site.address.clone() };
    site.control.wait(Listener::bind(&address)).context("a listener")
}

impl Ends {
    /// Two ends with CQs of so many entries.
    pub(super) fn new(site: &Site, entries: u32) -> Result<Self> {
        let (a, b) = (Side::new(site, entries)?, Side::new(site, entries)?);
        let transport = site.device.caps().transport;
        let polls_both = matches!(transport, Transport::SoftTcp | Transport::SoftMemory);
        let first = match transport {
            Transport::Iwarp => Some((
                a.memory(FIRST_BYTES as usize, Access::LOCAL_WRITE)?,
                b.memory(FIRST_BYTES as usize, Access::REMOTE)?,
            )),
            _ => None,
        };
        Ok(Self { a, b, listener: listener(site)?, polls_both, idle: 0, first })
    }

    /// Connects `a` to `b`, which has `recvs` posted before it accepts. Over iWARP, `b` has seen a
    /// message then.
    pub(super) fn connect(
        &mut self,
        site: &Site,
        sizes: QpLimits,
        recvs: &[RecvWr],
    ) -> Result<Link> {
        let mut link = self.connect_only(site, sizes, recvs)?;
        link.first_messages = self.see_first(&link)?;
        Ok(link)
    }

    /// Has `a` READ from `b` until an answer comes. Returns the number of READs.
    ///
    /// Soft-iWARP may not look at a message that came while it took the TCP connection over, until
    /// the next message comes. The checks here must not wait for that.
    fn see_first(&mut self, link: &Link) -> Result<u8> {
        let Some((own, far)) = &self.first else { return Ok(1) };
        let sge = own.sge(0, FIRST_BYTES).context("a place")?;
        let read = wr(0, SendOp::Read(far.remote(0)), sge);
        let most = FIRST_MESSAGES.min(link.reads_out);
        let (mut sent, mut seen) = (0_u8, 0_u8);
        while seen == 0 {
            ensure!(sent < most, "{sent} READs had no answer, {UNSEEN:?} each");
            self.a.poller.post_send(link.a, &[read])?;
            sent += 1;
            seen = self.answers(sent)?;
        }
        ensure!(self.answers(sent - seen)? == sent - seen, "a READ after the first had no answer");
        Ok(sent)
    }

    /// Waits for `due` completions. Returns how many came in time.
    fn answers(&mut self, due: u8) -> Result<u8> {
        let deadline = Instant::now() + UNSEEN;
        let mut seen = 0;
        while seen < due && Instant::now() < deadline {
            let mut bad = None;
            self.turn(|_, completion| {
                seen += 1;
                if completion.status != WcStatus::Success {
                    bad = Some(completion.status);
                }
            })?;
            if let Some(status) = bad {
                bail!("the first message of a connection: a completion says {status:?}");
            }
            interrupt::check()?;
        }
        Ok(seen)
    }

    fn connect_only(&mut self, site: &Site, sizes: QpLimits, recvs: &[RecvWr]) -> Result<Link> {
        interrupt::check()?;
        let Self { a, b, listener, .. } = self;
        let address = listener.address().clone();
        let hello = ConnectionHello(b"hw-check".to_vec());
        let both = async {
            let connecting = async {
                let route = Route::resolve(&address, &Control::options()).await?;
                Ok::<_, anyhow::Error>(route.connect(&a.pd, &a.handle, sizes, &hello).await?)
            };
            let accepting = async {
                let incoming = listener.accept().await?;
                let connection = incoming.prepare(&b.pd, &b.handle, sizes)?;
                let qp = b.poller.attach(connection)?;
                b.poller.post_recv(qp, recvs)?;
                let (reads_out, reads_in) = (sizes.reads_out, sizes.reads_in);
                let hello = ConnectionHello(b"hw-check".to_vec());
                b.poller.accept(qp, &AcceptParams { hello, reads_out, reads_in })?;
                Ok::<_, anyhow::Error>(qp)
            };
            tokio::try_join!(connecting, accepting)
        };
        let limited = async { tokio::time::timeout(CONNECT_LIMIT, both).await };
        let Ok(connected) = site.control.wait(limited) else {
            bail!("no connection within {CONNECT_LIMIT:?}");
        };
        let (established, qp_b) = connected?;
        let facts = established.connection.facts()?;
        let reads_out = established.reads_out;
        let qp_a = self.a.poller.attach(established.connection)?;
        Ok(Link { a: qp_a, b: qp_b, facts, reads_out, first_messages: 1 })
    }

    /// Takes the completions of both ends. Returns how many there were.
    pub(super) fn turn(&mut self, mut each: impl FnMut(At, &Completion)) -> Result<usize> {
        let mut out = [Completion::default(); BATCH];
        let mut found = 0;
        for at in [At::A, At::B] {
            let side = if at == At::A { &mut self.a } else { &mut self.b };
            let count = side.poller.poll(&mut out)?;
            out[..count].iter().for_each(|completion| each(at, completion));
            found += count;
        }
        self.rest(found);
        Ok(found)
    }

    /// As [`Self::turn`], of `a` alone where the device answers for `b`.
    pub(super) fn turn_a(&mut self, mut each: impl FnMut(&Completion)) -> Result<usize> {
        let mut out = [Completion::default(); BATCH];
        if self.polls_both {
            self.b.poller.poll(&mut out)?;
        }
        let count = self.a.poller.poll(&mut out)?;
        out[..count].iter().for_each(&mut each);
        self.rest(count);
        Ok(count)
    }

    fn rest(&mut self, found: usize) {
        self.idle = if found > 0 { 0 } else { self.idle.saturating_add(1) };
        if self.idle > LOOKS {
            std::thread::sleep(NAP);
        } else if self.idle > 0 {
            std::thread::yield_now();
        }
    }

    /// Takes turns until `done` says so of a completion. A completion with an error ends it.
    pub(super) fn until(
        &mut self,
        what: &str,
        mut done: impl FnMut(At, &Completion) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + WAIT_LIMIT;
        loop {
            let (mut is_done, mut bad) = (false, None);
            self.turn(|at, completion| {
                if completion.status != WcStatus::Success {
                    bad = Some((at, completion.status));
                }
                is_done |= done(at, completion);
            })?;
            if let Some((at, status)) = bad {
                bail!("{what}: a completion at end {at:?} says {status:?}");
            }
            if is_done {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{what}: nothing came within {WAIT_LIMIT:?}");
            interrupt::check()?;
        }
    }

    /// Waits for so many completions of both ends.
    pub(super) fn complete(&mut self, what: &str, mut count: u32) -> Result<()> {
        self.until(what, |_, _| {
            count -= 1;
            count == 0
        })
    }

    /// Ends a connection and destroys both QPs.
    pub(super) fn close(&mut self, link: Link) {
        for (side, qp) in [(&mut self.a, link.a), (&mut self.b, link.b)] {
            side.poller.fail(qp);
            drop(side.poller.detach(qp));
        }
    }
}

pub(super) fn wr(id: u64, op: SendOp, sge: Sge) -> SendWr {
    SendWr { id: WrId(id), op, sges: SgeList::one(sge), signaled: true, inline: false }
}
