//! [`Latest`]: the last answer of control, with the documents that were made of it. Pure: the time
//! is an argument.
//!
//! However many clients ask, control answers a question once in [`AGE`], and each document is made
//! once from each answer. Each event is rendered on its own, so an answer that begins at any number
//! joins ready pieces.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use serde_json::json;

use rblk_operate::target::events::EventsReport;
use rblk_operate::target::status::TargetStatus;

/// How old an answer of control may be.
pub(super) const AGE: Duration = Duration::from_millis(250);

/// The last answer of control, if it is not too old.
#[derive(Debug)]
pub(super) struct Latest<T>(Option<(Instant, Arc<T>)>);

impl<T> Latest<T> {
    /// Control was not asked yet.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    /// The answer to a question that was asked less than [`AGE`] ago.
    pub(super) fn at(&self, now: Instant) -> Option<Arc<T>> {
        let (asked, answer) = self.0.as_ref()?;
        (now.saturating_duration_since(*asked) < AGE).then(|| Arc::clone(answer))
    }

    /// Control was asked at `asked`, and gave this answer, or none.
    pub(super) fn set(&mut self, asked: Instant, answer: Option<T>) -> Option<Arc<T>> {
        self.0 = answer.map(|answer| (asked, Arc::new(answer)));
        self.0.as_ref().map(|(_, answer)| Arc::clone(answer))
    }
}

/// A status and the documents that show it. Each document is made for its first reader.
#[derive(Debug)]
pub(super) struct ShownStatus {
    pub(super) status: TargetStatus,
    metrics: OnceLock<Bytes>,
    json: OnceLock<Bytes>,
}

impl ShownStatus {
    pub(super) fn new(status: TargetStatus) -> Self {
        Self { status, metrics: OnceLock::new(), json: OnceLock::new() }
    }

    /// The metrics.
    pub(super) fn metrics(&self) -> Bytes {
        let render = || crate::daemon::http::prometheus::metrics(&self.status).into();
        self.metrics.get_or_init(render).clone()
    }

    /// The whole status. All keys of its maps are text, so it can be JSON.
    pub(super) fn json(&self) -> Bytes {
        let render = || serde_json::to_vec(&self.status).unwrap_or_default().into();
        self.json.get_or_init(render).clone()
    }
}

/// The events that are kept, each as JSON.
#[derive(Debug)]
pub(super) struct ShownEvents {
    instance: String,
    last: u64,
    // By number, oldest first.
    events: Vec<(u64, String)>,
}

impl ShownEvents {
    pub(super) fn new(report: EventsReport) -> Self {
        let text = |event| serde_json::to_string(event).unwrap_or_default();
        let events = report.events.iter().map(|event| (event.number, text(event))).collect();
        Self { instance: report.instance, last: report.last, events }
    }

    /// An [`EventsReport`] with the events after a number, as JSON.
    pub(super) fn after(&self, number: u64) -> Bytes {
        let first = self.events.partition_point(|(own, _)| *own <= number);
        let texts: Vec<&str> = self.events[first..].iter().map(|(_, text)| text.as_str()).collect();
        let (instance, last) = (json!(self.instance), self.last);
        let list = texts.join(",");
        format!("{{\"instance\":{instance},\"last\":{last},\"events\":[{list}]}}").into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rblk_operate::target::events::{EventKind, Events, Occurrence};

    #[test]
    fn an_answer_is_used_again_until_it_is_too_old() {
        let start = Instant::now();
        let mut latest = Latest::none();
        assert!(latest.at(start).is_none());
        let answer = latest.set(start, Some(1)).unwrap();
        let again = latest.at(start + AGE - Duration::from_nanos(1)).unwrap();
        assert!(Arc::ptr_eq(&answer, &again));
        assert!(latest.at(start + AGE).is_none());
        assert_eq!(latest.set(start + AGE, None), None);
        assert!(latest.at(start).is_none(), "what did not answer is not shown");
    }

    #[test]
    fn the_events_after_a_number_are_those_of_a_report() {
        let (mut events, mut now) = (Events::default(), Instant::now());
        for turn in 0..5 {
            now += Duration::from_secs(1);
            let what = Occurrence::new(EventKind::Loss, format!("\"{turn}\"")).of_volume("v");
            events.note(what, now, turn).unwrap();
        }
        let report = |after| {
            let (last, events) = events.after(after);
            EventsReport { instance: "a\"b".to_owned(), last, events }
        };
        let shown = ShownEvents::new(report(0));
        for after in [0, 1, 4, 5, u64::MAX] {
            let parsed: EventsReport = serde_json::from_slice(&shown.after(after)).unwrap();
            assert_eq!(parsed, report(after), "{after}");
        }
    }
}
