//! Traces: the slow commands of one volume, streamed to a client of the control socket for as long
//! as it stays connected. One at a time.
//!
//! The poll groups fill [rings](TraceRing), and the task of the client empties them. Control only
//! begins and ends the trace. A trace ends however the client goes: then the poll groups have no
//! ring any more, and the trace costs nothing.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rblk_protocol::Opcode;
use serde::Serialize;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;

use super::orders::asked;
use crate::control::ToControl;
use crate::control::groups::Groups;
use crate::data::poll_group::ToGroup;
use crate::data::poll_group::trace_ring::{TraceRing, TracedIo};
use crate::volume::Volume;
use crate::volume::ids::SessionIndex;
use rblk_operate::target::ask::{Response, stopping};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::trace_line::TraceLine;

/// Time between two looks at the rings.
const STEP: Duration = Duration::from_millis(50);

/// A trace that began.
#[derive(Debug)]
pub(crate) struct BegunTrace {
    number: u64,
    block_bytes: u64,
    rings: Vec<Arc<TraceRing>>,
}

impl BegunTrace {
    /// Its number.
    pub(in crate::control) fn number(&self) -> u64 {
        self.number
    }
}

/// The traces so far, and the one that runs.
#[derive(Debug, Default)]
pub(in crate::control) struct Traces {
    last: u64,
    running: Option<u64>,
}

impl Traces {
    /// Begins a trace of a volume.
    pub(in crate::control) fn begin(
        &mut self,
        volume: &Volume,
        slower: Duration,
        groups: &mut Groups,
    ) -> Result<BegunTrace, Refusal> {
        if self.running.is_some() {
            return Err("another trace is running: end that one first".into());
        }
        let (index, block_bytes) = (volume.index, u64::from(volume.block_size.bytes()));
        let ring = |_| Arc::new(TraceRing::new(index, slower));
        let rings: Vec<Arc<TraceRing>> = (0..groups.len()).map(ring).collect();
        for (group, ring) in rings.iter().enumerate() {
            groups.send(group, ToGroup::Trace(Some(Arc::clone(ring))));
        }
        self.last += 1;
        self.running = Some(self.last);
        tracing::info!(volume = %volume.name, ?slower, "a trace begins");
        Ok(BegunTrace { number: self.last, block_bytes, rings })
    }

    /// Ends a trace, if it is the one that runs.
    pub(in crate::control) fn end(&mut self, number: u64, groups: &mut Groups) {
        if self.running == Some(number) {
            self.running = None;
            (0..groups.len()).for_each(|group| groups.send(group, ToGroup::Trace(None)));
            tracing::info!("a trace ends");
        }
    }
}

/// Streams the slow commands of a volume to a client, until `gone` ends with the client.
///
/// # Errors
/// The client cannot be written to.
pub(in crate::control) async fn stream(
    requests: &mpsc::Sender<ToControl>,
    (volume, slower): (String, Duration),
    write: &mut OwnedWriteHalf,
    gone: impl Future<Output = io::Result<u8>>,
) -> io::Result<()> {
    let named = volume.clone();
    let begun = match asked(requests, |reply| ToControl::BeginTrace(named, slower, reply)).await {
        Some(Ok(begun)) => begun,
        Some(Err(error)) => return write.write_all(&line(&Response::Error(error))?).await,
        None => return write.write_all(&line(&stopping())?).await,
    };
    let number = begun.number;
    let result = tokio::select! {
        result = follow(requests, volume, begun, write) => result,
        _ = pin!(gone) => Ok(()),
    };
    // An error means that the target is stopping.
    let _ = requests.send(ToControl::EndTrace(number)).await;
    result
}

async fn follow(
    requests: &mpsc::Sender<ToControl>,
    volume: String,
    begun: BegunTrace,
    write: &mut OwnedWriteHalf,
) -> io::Result<()> {
    write.write_all(&line(&Response::Done)?).await?;
    let mut hosts: HashMap<SessionIndex, String> = HashMap::new();
    let mut told = 0;
    let mut ios = Vec::new();
    while !requests.is_closed() {
        tokio::time::sleep(STEP).await;
        let left_out: u64 = begun.rings.iter().map(|ring| ring.left_out()).sum();
        for ring in &begun.rings {
            ios.extend(std::iter::from_fn(|| ring.take()));
        }
        ios.sort_by_key(|io: &TracedIo| io.at);
        let mut text = Vec::new();
        for io in ios.drain(..) {
            if let Entry::Vacant(place) = hosts.entry(io.session) {
                // A later session of the host has another index, so this is bounded by the number
                // of traced sessions.
                let host = asked(requests, |reply| ToControl::HostOf(io.session, reply)).await;
                place.insert(host.unwrap_or_default());
            }
            let host = hosts.get(&io.session).cloned().unwrap_or_default();
            let traced = traced(&io, &volume, host, begun.block_bytes);
            text.extend(line(&TraceLine { left_out: left_out - told, ..traced })?);
            told = left_out;
        }
        write.write_all(&text).await?;
    }
    Ok(())
}

fn traced(io: &TracedIo, volume: &str, host: String, block_bytes: u64) -> TraceLine {
    let at = SystemTime::now().checked_sub(io.at.elapsed()).unwrap_or(UNIX_EPOCH);
    let unix = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let stages = io.stages;
    TraceLine {
        unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX),
        volume: volume.to_owned(),
        host,
        session: io.session.life,
        queue: io.queue,
        poll_group: io.group,
        op: word(io.opcode).to_owned(),
        lba: io.offset / block_bytes,
        blocks: io.len / block_bytes,
        bytes: io.len,
        failed: io.failed,
        total_us: stages.total(),
        queue_us: stages.queue,
        data_us: stages.data,
        cache_us: stages.cache,
        store_us: stages.store,
        answer_us: stages.answer,
        left_out: 0,
    }
}

fn word(opcode: Opcode) -> &'static str {
    match opcode {
        Opcode::Read => "read",
        Opcode::Write => "write",
        Opcode::Flush => "flush",
        Opcode::Discard => "discard",
        Opcode::WriteZeroes => "write-zeroes",
        _ => "other",
    }
}

fn line(what: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(what).map_err(io::Error::other)?;
    text.push(b'\n');
    Ok(text)
}
