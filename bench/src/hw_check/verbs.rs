//! The verbs that rblk uses, each alone, and the data that they move.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::{
    Access, MemoryRegion, RecvWr, RemoteBuffer, Rkey, SendOp, SendWr, SgeList, Transport, WcOpcode,
    WcStatus, WrId,
};
use rblk_operate::doctor::{Finding, Verdict};

use super::Out;
use super::ends::{At, Ends, Link, WAIT_LIMIT, limits, wr};
use super::site::Site;
use crate::child::{self, OnInterrupt};
use crate::interrupt;

const SIZES: [u32; 5] = [1, 512, 4096, 128 << 10, 1 << 20];
const MEMORY: usize = 4 << 20;
/// READs of this size are outstanding at once.
const READ: u32 = 64 << 10;
const CONNECTIONS: u32 = 50;
const DOCTOR: Duration = Duration::from_secs(60);

struct Bed {
    ends: Ends,
    link: Link,
    a: MemoryRegion,
    b: MemoryRegion,
    // No access from afar, so its payloads can be inline.
    small: MemoryRegion,
}

impl Bed {
    fn new(site: &Site) -> Result<Self> {
        let mut ends = Ends::new(site, 256)?;
        let a = ends.a.memory(MEMORY, Access::REMOTE)?;
        let b = ends.b.memory(MEMORY, Access::REMOTE)?;
        let small = ends.a.memory(4096, Access::LOCAL_WRITE)?;
        let recv = RecvWr::one(WrId(900), b.sge(MEMORY - 4096, 4096).context("a place")?);
        let link = ends.connect(site, limits(site.device.caps(), 64), &[recv; 16])?;
        Ok(Self { ends, link, a, b, small })
    }

    fn post(&mut self, wrs: &[SendWr]) -> Result<()> {
        Ok(self.ends.a.poller.post_send(self.link.a, wrs)?)
    }
}

/// Fills a range with bytes that tell the range and the seed.
fn fill(memory: &MemoryRegion, offset: usize, len: u32, seed: u32) {
    let bytes: Vec<u8> = (0..len).map(|at| pattern(at, seed)).collect();
    memory.region().write(offset, &bytes);
}

fn pattern(at: u32, seed: u32) -> u8 {
    (at.wrapping_mul(31) ^ at >> 8 ^ seed.wrapping_mul(97)).to_le_bytes()[0] | 1
}

/// Fails where the data is not that of [`fill`] with that seed.
fn compare(memory: &MemoryRegion, offset: usize, len: u32, seed: u32) -> Result<()> {
    let mut bytes = vec![0; len as usize];
    memory.region().read(offset, &mut bytes);
    let wrong = (0..len).zip(&bytes).find(|(at, byte)| pattern(*at, seed) != **byte);
    match wrong {
        None => Ok(()),
        Some((at, byte)) => {
            bail!("byte {at} of {len} is {byte:#04x}, not {:#04x}", pattern(at, seed))
        }
    }
}

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let caps = site.device.caps().clone();
    type Rung = fn(&Site) -> Result<String>;
    let rungs: [(&str, bool, Rung); 6] = [
        ("WRITE and SEND", true, write_and_send),
        ("WRITE_WITH_IMM", caps.write_with_imm, write_with_imm),
        ("READ", true, reads),
        ("inline", caps.inline_bytes > 0, inline),
        ("gather", true, gather),
        ("a wrong key", true, wrong_key),
    ];
    for (what, has, rung) in rungs {
        if !has {
            out.add(Finding::skip(what, "the device does not have it; rblk goes without"));
            continue;
        }
        out.add(match rung(site) {
            Ok(words) => Finding::ok(what, words),
            Err(error) => Finding::fail(what, format!("{error:#}")),
        });
    }
    if caps.transport == Transport::Iwarp {
        out.add(
            first_messages(site)
                .unwrap_or_else(|error| Finding::fail("first message", format!("{error:#}"))),
        );
    }
    if let Some(target) = &site.target {
        out.add_all(doctor(site, target));
    }
    Ok(())
}

/// Counts connections that see the first message only when another one comes.
fn first_messages(site: &Site) -> Result<Finding> {
    let mut ends = Ends::new(site, 64)?;
    let mut late = 0;
    for _ in 0..CONNECTIONS {
        let link = ends.connect(site, limits(site.device.caps(), 16), &[])?;
        late += u32::from(link.first_messages > 1);
        ends.close(link);
        while ends.turn(|_, _| ())? > 0 {}
    }
    let subject = "first message";
    Ok(match late {
        0 => Finding::ok(subject, format!("it was seen at once on {CONNECTIONS} connections")),
        _ => Finding::warn(
            subject,
            format!(
                "on {late} of {CONNECTIONS} connections it was seen when another one came; rblk sends \
                 another one after a second"
            ),
        ),
    })
}

/// The answer to a read on a device without immediates.
fn write_and_send(site: &Site) -> Result<String> {
    arrives(site, "SEND", |bed, size, _| {
        let word = bed.small.sge(0, 64).context("a place")?;
        let sge = bed.a.sge(0, size).context("a place")?;
        bed.post(&[wr(1, SendOp::Write(bed.b.remote(0)), sge), wr(2, SendOp::Send, word)])?;
        Ok(3)
    })
}

fn write_with_imm(site: &Site) -> Result<String> {
    arrives(site, "immediate", |bed, size, imm| {
        let sge = bed.a.sge(0, size).context("a place")?;
        bed.post(&[wr(1, SendOp::WriteWithImm(bed.b.remote(0), imm), sge)])?;
        Ok(2)
    })
}

/// Posts data of all sizes with a message, which says that the data is there. `post` returns how
/// many completions come.
fn arrives(
    site: &Site,
    message: &str,
    post: impl Fn(&mut Bed, u32, u32) -> Result<u32>,
) -> Result<String> {
    let mut bed = Bed::new(site)?;
    for (seed, size) in (1..).zip(SIZES) {
        fill(&bed.a, 0, size, seed);
        let imm = 0x8001_0000 | seed;
        let mut left = post(&mut bed, size, imm)?;
        let (mut compared, mut told) = (Ok(()), None);
        let b = &bed.b;
        bed.ends.until(message, |at, completion| {
            let has_imm = completion.opcode == WcOpcode::RecvWithImm;
            if at == At::B && (has_imm || completion.opcode == WcOpcode::Recv) {
                told = has_imm.then_some(completion.imm);
                compared = compare(b, 0, size, seed);
            }
            left -= 1;
            left == 0
        })?;
        let is_right = message == "SEND" || told == Some(imm);
        ensure!(is_right, "{size} B: the immediate is {told:x?}, not {imm:#x}");
        compared.with_context(|| format!("{size} B, when the {message} was there"))?;
    }
    Ok(format!("data of {} sizes was right when the {message} was there", SIZES.len()))
}

/// READs, one after the other, and as many at once as the connection was granted.
fn reads(site: &Site) -> Result<String> {
    let mut bed = Bed::new(site)?;
    let depth = bed.link.reads_out.clamp(1, 16);
    for count in [1, depth] {
        let seed = |index: u8| 100 * u32::from(count) + u32::from(index);
        for index in 0..count {
            fill(&bed.b, usize::from(index) * READ as usize, READ, seed(index));
        }
        bed.a.region().zero(0, usize::from(count) * READ as usize);
        let wrs = (0..count).map(|index| {
            let place = usize::from(index) * READ as usize;
            let sge = bed.a.sge(place, READ).context("a place")?;
            Ok(wr(index.into(), SendOp::Read(bed.b.remote(place)), sge))
        });
        let wrs: Vec<SendWr> = wrs.collect::<Result<_>>()?;
        bed.post(&wrs)?;
        bed.ends.complete("READ", count.into())?;
        for index in 0..count {
            let place = usize::from(index) * READ as usize;
            compare(&bed.a, place, READ, seed(index))
                .with_context(|| format!("READ {index} of {count} at once"))?;
        }
    }
    Ok(format!("data was right, {depth} at once"))
}

fn post_with_word(bed: &mut Bed, write: SendWr) -> Result<()> {
    let word = bed.small.sge(0, 64).context("a place")?;
    bed.post(&[write, wr(2, SendOp::Send, word)])
}

fn inline(site: &Site) -> Result<String> {
    let mut bed = Bed::new(site)?;
    let most = site.device.caps().inline_bytes.min(2048);
    for size in [1, most / 2, most].into_iter().filter(|size| *size > 0) {
        fill(&bed.small, 0, size, size);
        let sge = bed.small.sge(0, size).context("a place")?;
        let write = SendWr { inline: true, ..wr(1, SendOp::Write(bed.b.remote(0)), sge) };
        post_with_word(&mut bed, write)?;
        // The payload was copied by the post.
        bed.small.region().zero(0, size as usize);
        bed.ends.complete("inline WRITE", 3)?;
        compare(&bed.b, 0, size, size).with_context(|| format!("{size} B inline"))?;
    }
    Ok(format!("payloads of up to {most} B were taken when posted"))
}

fn gather(site: &Site) -> Result<String> {
    let mut bed = Bed::new(site)?;
    let parts = limits(site.device.caps(), 64).send_sges;
    let len = 4096;
    let mut sges: Option<SgeList> = None;
    for part in 0..parts {
        let place = (part as usize) * 3 * len as usize;
        fill(&bed.a, place, len, part);
        let sge = bed.a.sge(place, len).context("a place")?;
        let is_in = match &mut sges {
            Some(list) => list.push(sge),
            none => none.replace(SgeList::one(sge)).is_none(),
        };
        ensure!(is_in, "a list of {parts} SGEs");
    }
    let sge = bed.a.sge(0, len).context("a place")?;
    let one = wr(1, SendOp::Write(bed.b.remote(0)), sge);
    post_with_word(&mut bed, SendWr { sges: sges.unwrap_or(one.sges), ..one })?;
    bed.ends.complete("a gathered WRITE", 3)?;
    for part in 0..parts {
        compare(&bed.b, (part * len) as usize, len, part)
            .with_context(|| format!("part {part}"))?;
    }
    Ok(format!("a WRITE from {parts} places was right"))
}

/// A key that was never given must open nothing.
fn wrong_key(site: &Site) -> Result<String> {
    for is_read in [false, true] {
        let mut bed = Bed::new(site)?;
        fill(&bed.b, 0, 4096, 7);
        let good = bed.b.remote(0);
        let bad = RemoteBuffer { rkey: Rkey(good.rkey.0 ^ 0x00a5_5a00), ..good };
        let op = if is_read { SendOp::Read(bad) } else { SendOp::Write(bad) };
        let sge = bed.a.sge(0, 4096).context("a place")?;
        bed.post(&[wr(1, op, sge)])?;
        let (mut status, mut is_over) = (None, false);
        let deadline = Instant::now() + WAIT_LIMIT;
        // A WRITE over iWARP has completed when TCP has it. There the end of the connection tells.
        while !is_over {
            bed.ends.turn(|at, completion| {
                if at == At::A {
                    status = status.or(Some(completion.status));
                }
                is_over |= completion.status != WcStatus::Success;
            })?;
            ensure!(Instant::now() < deadline, "the peer took a key that it never gave");
            interrupt::check()?;
        }
        let tells = !is_read && site.device.caps().transport == Transport::Iwarp;
        let is_good = status == Some(WcStatus::Success) && !tells;
        ensure!(!is_good, "the peer took a key that it never gave");
        compare(&bed.b, 0, 4096, 7).context("the memory behind the wrong key")?;
        let mut seen = vec![0; 4096];
        bed.a.region().read(0, &mut seen);
        ensure!(seen.iter().all(|byte| *byte == 0), "bytes came with a wrong key");
    }
    Ok("refused for WRITE and READ, no byte moved".to_owned())
}

/// The findings of `rblk-initiator doctor` on a target.
fn doctor(site: &Site, target: &str) -> Vec<Finding> {
    let failed = |error: anyhow::Error| vec![Finding::fail("target", format!("{error:#}"))];
    let program = match site.programs() {
        Ok(dir) => dir.join("rblk-initiator"),
        Err(error) => return failed(error),
    };
    let mut command = Command::new(program);
    command.args(["doctor", "--output", "json", target]);
    // The exit code repeats the findings.
    let said = match child::finish(&mut command, DOCTOR, OnInterrupt::End) {
        Ok(finished) => finished.stdout,
        Err(error) => return failed(error),
    };
    match findings_of(&said) {
        Some(findings) => findings,
        None => failed(anyhow::anyhow!("`rblk-initiator doctor` did not answer: {said}")),
    }
}

/// Subjects about mounts on this host, not about the card.
const OF_MOUNTS: [&str; 7] = ["kernel", "io_uring", "ublk", "clock", "run dir", "units", "mounts"];

fn findings_of(json: &str) -> Option<Vec<Finding>> {
    let mut all: serde_json::Value = serde_json::from_str(json).ok()?;
    let all: Vec<Finding> = serde_json::from_value(all.get_mut("findings")?.take()).ok()?;
    let of_target = all.into_iter().filter(|one| !OF_MOUNTS.contains(&one.subject.as_str()));
    let named = of_target.map(|one| Finding {
        subject: format!("doctor: {}", one.subject),
        fix: one.fix.filter(|_| one.verdict != Verdict::Ok),
        fix_at: None,
        ..one
    });
    Some(named.collect())
}

#[cfg(test)]
mod tests;
