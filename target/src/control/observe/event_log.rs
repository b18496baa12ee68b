//! [`EventLog`]: the events of a run, and the lines of the journal that carry them.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rblk_protocol::Opcode;

use crate::cache::StoreFailure;
use crate::control::core::Core;
use crate::data::poll_group::slow::SlowIo;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::events::{EVENT_LINES, Event, EventKind, Events, Occurrence};
use rblk_operate::target::traffic::Stages;

/// See the module.
#[derive(Debug, Default)]
pub(in crate::control) struct EventLog {
    events: Events,
}

impl EventLog {
    /// Notes an occurrence.
    pub(in crate::control) fn happened(&mut self, what: Occurrence) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        if let Some(event) = self.events.note(what, Instant::now(), unix_ms) {
            log(event);
        }
    }

    /// The events.
    pub(in crate::control) fn events(&self) -> &Events {
        &self.events
    }

    /// The store of a volume failed.
    pub(in crate::control) fn store_failed(&mut self, failure: &StoreFailure, core: &Core) {
        let text = format!("the store fails: {}", failure.errno);
        let what = Occurrence::new(EventKind::StoreError, text);
        let volume = name_of(failure.volume, core);
        let StoreFailure { errno, job, since_last, .. } = failure;
        let named = volume.as_deref().unwrap_or("(removed)");
        tracing::error!(volume = named, job, %errno, since_last, "the store failed");
        self.happened(Occurrence { volume, ..what });
    }

    /// A command took long.
    pub(in crate::control) fn slow_io(&mut self, group: usize, slow: &SlowIo, core: &Core) {
        let what = Occurrence::new(EventKind::SlowIo, slow_text(group, slow));
        let what = match core.sessions().get(slow.session) {
            Some(session) => what.of_host(session.host_name, &session.peer),
            None => what,
        };
        self.happened(Occurrence { volume: name_of(slow.volume, core), ..what });
    }

    /// The completion queue of a device broke.
    pub(in crate::control) fn poller_broke(&mut self, group: usize, device: &str) {
        let text = format!("a completion queue of {device} broke, in poll group {group}");
        self.happened(Occurrence::new(EventKind::Device, text));
    }

    /// The store of a volume lost acknowledged writes.
    pub(in crate::control) fn lost_writes(&mut self, volume: VolumeIndex, core: &Core) {
        let volume = core.volume(volume).map(|volume| volume.name);
        tracing::error!(
            ?volume,
            "the store could not make acknowledged writes durable: every later flush of the volume fails; mend the \
            disk or file system, then restart the target"
        );
        let text =
            "acknowledged writes may be lost: every flush fails until the target is restarted";
        let what = Occurrence::new(EventKind::LostWrites, text);
        self.happened(Occurrence { volume: volume.map(|name| name.to_string()), ..what });
    }
}

/// The name of a served volume.
pub(in crate::control) fn name_of(volume: VolumeIndex, core: &Core) -> Option<String> {
    core.volume(volume).map(|volume| volume.name.to_string())
}

/// A slow command in words: its time, and the causes of its waits.
fn slow_text(group: usize, slow: &SlowIo) -> String {
    let op = match slow.opcode {
        Opcode::Read => "a READ",
        Opcode::Write => "a WRITE",
        Opcode::Flush => "a FLUSH",
        _ => "a command",
    };
    let Stages { queue, data, cache, store, answer } = slow.stages;
    let stages =
        [("queue", queue), ("data", data), ("cache", cache), ("store", store), ("answer", answer)];
    let longest = stages.iter().filter(|(_, us)| *us > 0);
    let parts: Vec<String> = longest.map(|(name, us)| format!("{name} {}", millis(*us))).collect();
    let others = match slow.others {
        0 => String::new(),
        others => format!("; {others} others took long"),
    };
    let total = millis(slow.total);
    format!("{op} took {total}, in poll group {group}: {}{others}", parts.join(", "))
}

/// Microseconds as milliseconds, for people.
fn millis(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

/// One line with the fields of an event.
fn log(event: &Event) {
    let kind = event.kind.word();
    let (host, volume) = (event.host.as_deref(), event.volume.as_deref());
    let (address, left_out) = (event.address.as_deref(), event.left_out);
    if event.kind.is_warning() {
        tracing::warn!(
            target: EVENT_LINES,
            rblk_event = kind, host, volume, address, left_out, "{}", event.text
        );
    } else {
        tracing::info!(
            target: EVENT_LINES,
            rblk_event = kind, host, volume, address, left_out, "{}", event.text
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::ids::SessionIndex;

    #[test]
    fn a_slow_command_is_reported_with_its_waits() {
        let stages = Stages { queue: 400, store: 151_234, ..Stages::default() };
        let session = SessionIndex { index: 0, life: 1 };
        let (volume, opcode) = (VolumeIndex(0), Opcode::Read);
        let slow = SlowIo { volume, session, opcode, total: 151_634, stages, others: 3 };
        let text = "a READ took 151.6 ms, in poll group 1: queue 0.4 ms, store 151.2 ms; 3 others took long";
        assert_eq!(slow_text(1, &slow), text);
    }
}
