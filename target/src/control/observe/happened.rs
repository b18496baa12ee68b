//! The events of control, and the lines of the journal that carry them.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rblk_protocol::{Name, Opcode};

use crate::cache::StoreFailure;
use crate::control::Control;
use crate::control::connect::cq_shares::CqPlace;
use crate::data::poll_group::slow::SlowIo;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::events::{EVENT_LINES, Event, EventKind, EventsReport, Occurrence};
use rblk_operate::target::traffic::Stages;

impl Control {
    /// Notes an occurrence.
    pub(in crate::control) fn happened(&mut self, what: Occurrence) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        if let Some(event) = self.events.note(what, Instant::now(), unix_ms) {
            log(event);
        }
    }

    /// The events after this number.
    pub(in crate::control) fn events_after(&self, number: u64) -> EventsReport {
        let (last, events) = self.events.after(number);
        EventsReport { instance: self.description.instance.to_string(), last, events }
    }

    pub(in crate::control) fn name_of(&self, volume: VolumeIndex) -> Option<Name> {
        self.core.volumes().iter().find(|v| v.index == volume).map(|v| v.name)
    }

    pub(in crate::control) fn on_store_failed(&mut self, failure: StoreFailure) {
        let text = format!("the store fails: {}", failure.errno);
        let what = Occurrence::new(EventKind::StoreError, text);
        let volume = self.name_of(failure.volume).map(|name| name.to_string());
        let StoreFailure { errno, job, since_last, .. } = failure;
        let named = volume.as_deref().unwrap_or("(removed)");
        tracing::error!(volume = named, job, %errno, since_last, "the store failed");
        self.happened(Occurrence { volume, ..what });
        // The cause may be the file: cut, or read-only.
        self.look_at_stores();
    }

    pub(in crate::control) fn on_slow_io(&mut self, group: usize, slow: &SlowIo) {
        let what = Occurrence::new(EventKind::SlowIo, slow_text(group, slow));
        let what = match self.core.sessions().get(slow.session) {
            Some(session) => what.of_host(session.host_name, &session.peer),
            None => what,
        };
        let volume = self.name_of(slow.volume).map(|name| name.to_string());
        self.happened(Occurrence { volume, ..what });
    }

    pub(in crate::control) fn on_poller_broken(&mut self, group: usize, place: usize) {
        let name = self.devices.at(place).map_or("a device", |device| device.caps().name.as_str());
        let text = format!("a completion queue of {name} broke, in poll group {group}");
        self.happened(Occurrence::new(EventKind::Device, text));
        self.devices.poller_broke(group, place);
        self.making.end_by(CqPlace { device: place, group });
    }

    pub(in crate::control) fn tell_lost_writes(&mut self, volume: Option<Name>) {
        let text =
            "acknowledged writes may be lost: every flush fails until the target is restarted";
        let what = Occurrence::new(EventKind::LostWrites, text);
        self.happened(Occurrence { volume: volume.map(|name| name.to_string()), ..what });
    }
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
