//! [`WayLinks`]: the sessions of a mount that uses several ways, and what is under way for them.
//! The decisions are those of [`Lives`].

use std::collections::BTreeMap;
use std::time::Instant;

use rblk_protocol::{DropRequest, Epoch};
use tokio::sync::mpsc;

use super::way_join::{JoinedWay, WayJoin};
use super::way_probes::WayProbes;
use super::way_session::{News, WaySession};
use crate::engine::ways::WayIndex;
use crate::volume::session::Session;
use crate::volume::setup::Endpoint;
use crate::volume::task::{self, Running};
use crate::volume::ways::{Lives, WayAct, WayRules, WayTry};

/// See the module.
#[derive(Debug)]
pub(super) struct WayLinks {
    pub(super) lives: Lives,
    sessions: BTreeMap<WayIndex, WaySession>,
    // The present or last connection of each way that has lived.
    endpoints: BTreeMap<WayIndex, Endpoint>,
    // The way of each epoch that paths were made in, until the target has ended it.
    places: BTreeMap<Epoch, WayIndex>,
    joining: Running<JoinedWay>,
    attempt: Option<WayTry>,
    probing: WayProbes,
    news: (mpsc::UnboundedSender<News>, mpsc::UnboundedReceiver<News>),
}

/// What happened to a way.
#[derive(Debug)]
pub(super) enum WayEvent {
    /// A session told something.
    News(News),
    /// A try to join has ended.
    Tried(WayTry, anyhow::Result<Box<JoinedWay>>),
    /// A probe has ended: why this run of the target does not answer there; `None` if it does.
    Probed(WayIndex, Option<String>),
}

impl WayLinks {
    /// The first session of a mount is by that way, in that epoch.
    pub(super) fn new(rules: WayRules, first: WayIndex, epoch: Epoch) -> Self {
        Self {
            lives: Lives::new(rules, first, epoch, Instant::now()),
            sessions: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            places: BTreeMap::from([(epoch, first)]),
            joining: None,
            attempt: None,
            probing: WayProbes::default(),
            news: mpsc::unbounded_channel(),
        }
    }

    /// All ways were lost, and the mount is back by that one.
    pub(super) fn restarted(&mut self, by: WayIndex, epoch: Epoch) {
        self.leave();
        self.lives.restarted(by, epoch, Instant::now());
        self.places = BTreeMap::from([(epoch, by)]);
    }

    /// A way lives.
    pub(super) fn add(&mut self, way: WayIndex, session: WaySession) {
        self.endpoints.insert(way, session.endpoint.clone());
        self.sessions.insert(way, session);
    }

    /// The present connection of a way, or the last one; `None` if the way never lived.
    pub(super) fn endpoint(&self, way: WayIndex) -> Option<&Endpoint> {
        self.endpoints.get(&way)
    }

    /// For the task of a session.
    pub(super) fn news(&self) -> mpsc::UnboundedSender<News> {
        self.news.0.clone()
    }

    /// Begins a try to join.
    pub(super) fn begin(&mut self, join: WayJoin) {
        self.attempt = Some(join.attempt);
        self.joining = Some(tokio::spawn(join.run()));
    }

    /// Begins a probe of a way, beside those of others.
    pub(super) fn begin_probe(
        &mut self,
        way: WayIndex,
        probe: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        self.probing.begin(way, probe);
    }

    /// Asks a way to drop epochs.
    pub(super) fn drop_epochs(&self, by: WayIndex, epochs: DropRequest) {
        if let Some(session) = self.sessions.get(&by) {
            session.drop_epochs(epochs);
        }
    }

    /// The paths of a way that joins go to the queues: requests go by it from now on.
    pub(super) fn takes_paths(&mut self, attempt: &WayTry) {
        self.places.insert(attempt.epoch, attempt.way);
    }

    /// An epoch is over at the target. Returns its way, if paths were made in it.
    pub(super) fn is_over(&mut self, epoch: Epoch) -> Option<WayIndex> {
        self.places.remove(&epoch)
    }

    /// A way is lost: its admin connection ends. Returns its session.
    pub(super) fn remove(&mut self, way: WayIndex) -> Option<WaySession> {
        self.sessions.remove(&way)
    }

    /// Ends every session, join and probe. The session can be resumed.
    pub(super) fn leave(&mut self) {
        self.sessions.clear();
        self.attempt = None;
        task::abort(&mut self.joining);
        self.probing.abort();
        // What the ended tasks told does not matter any more.
        while self.news.1.try_recv().is_ok() {}
    }

    /// A session of some living way. Its task ends, and the others go on until this is dropped.
    pub(super) async fn give_back(&mut self) -> Option<Session> {
        while let Some((_, session)) = self.sessions.pop_first() {
            if let Some(session) = session.give_back().await {
                return Some(session);
            }
        }
        None
    }

    /// The next act that is due.
    pub(super) fn due(&mut self, newest: Epoch) -> Option<WayAct> {
        self.lives.due(newest, Instant::now())
    }

    /// What happens next. Cancel safe.
    pub(super) async fn next(&mut self) -> WayEvent {
        tokio::select! {
            Some(news) = self.news.1.recv() => WayEvent::News(news),
            result = task::next(&mut self.joining), if self.attempt.is_some() => {
                let Some(attempt) = self.attempt.take() else { return std::future::pending().await };
                WayEvent::Tried(attempt, result.map(Box::new))
            }
            (way, fault) = self.probing.next() => WayEvent::Probed(way, fault),
        }
    }
}

/// As [`WayLinks::next`]. Without several ways, waits for ever.
pub(super) async fn next(ways: &mut Option<WayLinks>) -> WayEvent {
    match ways {
        Some(ways) => ways.next().await,
        None => std::future::pending().await,
    }
}
