//! How a [`TargetLink`] uses several ways at once: the acts of
//! [`Lives`](crate::volume::ways::Lives), and what happens to its ways.

use std::sync::Arc;
use std::time::Instant;

use rblk_fabric::ConnectOptions;
use rblk_operate::said_once;
use rblk_protocol::{AsyncEvent, DropRequest, Epoch};

use super::way_join::{JoinedWay, WayJoin, is_misled};
use super::way_links::{WayEvent, WayLinks};
use super::way_session::{WayNews, WaySession, WayTask};
use super::{AfterNote, TargetLink, options, pulse, random};
use crate::engine::PathEnd;
use crate::engine::ways::WayIndex;
use crate::engine::ways::choice::ChoicePolicy;
use crate::volume::admin::{DropAnswer, TargetNews};
use crate::volume::course::{CourseState, LossKind};
use crate::volume::queues::Queues;
use crate::volume::reconnect::{NotTested, probe};
use crate::volume::session::Session;
use crate::volume::ways::{JoinFailure, WayAct, WayRules, WayTry, may_be_ways};

impl TargetLink {
    /// How requests are spread over ways; `None` for a mount that uses one at a time.
    pub(crate) fn way_policy(&self) -> Option<ChoicePolicy> {
        self.asks_ways().then_some(ChoicePolicy::Least)
    }

    /// Whether the mount uses several ways, if the target knows that.
    pub(super) fn asks_ways(&self) -> bool {
        self.config.uses_all_paths() && may_be_ways(self.setup.addresses.len())
    }

    /// The way of an address.
    pub(super) fn way_of(&self, address: usize) -> WayIndex {
        let way = WayIndex::new(address).filter(|_| self.asks_ways());
        way.unwrap_or(WayIndex::FIRST)
    }

    /// A session that has just begun becomes the one of its way, if both ends know several.
    pub(super) fn spread(&mut self, queues: &Queues) {
        let Some(session) = self.session.take() else { return };
        let spreads = self.asks_ways() && session.has_ways();
        self.course.uses_all_addresses(spreads);
        self.note_one_path(self.asks_ways() && !spreads);
        if !spreads {
            // Perhaps the target before knew ways.
            (self.session, self.ways) = (Some(session), None);
            return;
        }
        let (way, epoch) = (self.way_of(self.course.address()), session.login().epoch);
        match &mut self.ways {
            Some(ways) => ways.restarted(way, epoch),
            None => {
                let reconnect_delay = self.config.reconnect_delay.get();
                let rules = WayRules { ways: self.setup.addresses.len(), reconnect_delay };
                self.ways = Some(WayLinks::new(rules, way, epoch));
            }
        }
        self.add_way(way, session, queues);
    }

    /// Records whether the mount uses one path at a time, though it wants all.
    fn note_one_path(&mut self, one_path: bool) {
        if one_path && !self.one_path {
            tracing::warn!(
                rblk_event = "one-path",
                address = self.setup.endpoint.address,
                "the target does not know `paths = \"all\"`: the mount uses one address at a time"
            );
        }
        self.one_path = one_path;
    }

    fn add_way(&mut self, way: WayIndex, session: Session, queues: &Queues) {
        let (pulse, volume) = (pulse(&self.config), self.facts().volume.handle);
        let ios = Box::new(queues.io_count());
        if let Some(ways) = &mut self.ways {
            let terms = WayTask { way, pulse, volume, ios, news: ways.news() };
            ways.add(way, WaySession::start(session, terms));
        }
    }

    /// Whether some way lives or is about to.
    pub(super) fn has_ways(&self) -> bool {
        let lives = self.ways.as_ref().is_some_and(|ways| !ways.lives.are_lost());
        lives && self.course.state() == CourseState::Connected
    }

    /// The time of the next act of a way.
    pub(super) fn ways_deadline(&self) -> Option<Instant> {
        self.ways.as_ref().filter(|_| self.has_ways()).and_then(|ways| ways.lives.deadline())
    }

    /// Does what is due for the ways, up to a join, which the note comes before.
    pub(super) fn carry_out_ways(&mut self, queues: &Queues) -> Option<AfterNote> {
        self.spread(queues);
        while self.has_ways() && !self.course.is_holding() {
            let newest = self.facts().resume.map_or(Epoch(1), |(_, epoch)| epoch);
            match self.ways.as_mut().and_then(|ways| ways.due(newest))? {
                WayAct::Join(attempt) => {
                    self.course.joins(attempt.epoch);
                    return Some(AfterNote::Join(attempt));
                }
                WayAct::Drop { by, epochs } => {
                    if let Some(ways) = &self.ways {
                        ways.drop_epochs(by, epochs);
                    }
                }
                WayAct::Probe(way) => self.probe_way(way),
            }
        }
        None
    }

    fn way_options(&self) -> ConnectOptions {
        ConnectOptions { timeout: self.course.rules().try_limit(), ..options(&self.config) }
    }

    fn probe_way(&mut self, way: WayIndex) {
        let (address, options) = (self.setup.addresses[way.get()].clone(), self.way_options());
        let (known_by, instance) = (self.setup.known_by(), self.facts().instance);
        if let Some(ways) = &mut self.ways {
            ways.begin_probe(way, probe(address, options, known_by, instance));
        }
    }

    /// The epoch of a join is noted, or could not be.
    pub(super) fn begin_join(&mut self, attempt: WayTry, is_noted: bool, queues: &mut Queues) {
        let Some((session, _)) = self.facts().resume.filter(|_| is_noted || !self.config.shared)
        else {
            return self.join_failed(&attempt, JoinFailure::Transient, queues);
        };
        let join = WayJoin {
            attempt,
            address: self.setup.addresses[attempt.way.get()].clone(),
            options: self.way_options(),
            known_by: self.setup.known_by(),
            session,
            instance: self.facts().instance,
            volume: self.facts().volume.handle,
            wish: self.setup.wish,
            buffers: self.setup.buffers[..queues.len()].to_vec(),
            shared: Arc::clone(self.setup.shared.regions()),
        };
        if let Some(ways) = &mut self.ways {
            ways.begin(join);
        }
    }

    fn join_failed(&mut self, attempt: &WayTry, why: JoinFailure, queues: &mut Queues) {
        if let Some(ways) = &mut self.ways {
            ways.lives.join_failed(attempt.way, why, Instant::now(), random());
        }
        self.lose_if_no_way_lives("no way is left", queues);
    }

    fn lose_if_no_way_lives(&mut self, why: &str, queues: &mut Queues) {
        if self.ways.as_ref().is_some_and(|ways| ways.lives.are_lost()) {
            self.lose(why, LossKind::Path, queues);
        }
    }

    /// Takes what happened to a way. Returns whether the facts about the volume changed.
    pub(super) fn on_way_event(&mut self, event: WayEvent, queues: &mut Queues) -> bool {
        match event {
            WayEvent::News((way, epoch, news)) => {
                let lives = |ways: &WayLinks| ways.lives.living().any(|one| one == (way, epoch));
                // The task of a way that was lost meanwhile may have told something before.
                self.ways.as_ref().is_some_and(lives) && self.on_way_news(way, news, queues)
            }
            WayEvent::Tried(attempt, Ok(joined)) => {
                self.on_joined(&attempt, *joined, queues);
                false
            }
            WayEvent::Tried(attempt, Err(error)) => {
                let text = said_once(error.as_ref());
                self.note_fault(attempt.way.get(), &text);
                let address = self.setup.addresses[attempt.way.get()].to_string();
                tracing::info!(address, error = text, "a path does not join yet");
                if matches!(error.downcast_ref(), Some(NotTested(PathEnd::SelfTest))) {
                    self.ask_for_less();
                }
                let why = match is_misled(&error) {
                    true => JoinFailure::Misled,
                    false => JoinFailure::Transient,
                };
                self.join_failed(&attempt, why, queues);
                false
            }
            WayEvent::Probed(way, fault) => {
                if let Some(why) = &fault {
                    self.note_fault(way.get(), why);
                }
                if let Some(ways) = &mut self.ways {
                    ways.lives.probed(way, fault.is_none(), Instant::now(), random());
                }
                false
            }
        }
    }

    fn on_way_news(&mut self, way: WayIndex, news: WayNews, queues: &mut Queues) -> bool {
        match news {
            WayNews::Lost(error) => self.way_died(way, &error.to_string(), queues),
            WayNews::Target(TargetNews::Dropped(epochs, answer)) => {
                self.on_drop_answer(way, &epochs, answer, queues);
            }
            // Every way tells it.
            WayNews::Target(TargetNews::Event(Some(
                AsyncEvent::Draining | AsyncEvent::Upgrading,
            ))) if self.course.is_holding() => {}
            WayNews::Target(news) => return self.on_event(Ok(news), queues),
        }
        false
    }

    fn on_drop_answer(
        &mut self,
        way: WayIndex,
        epochs: &DropRequest,
        answer: DropAnswer,
        queues: &mut Queues,
    ) {
        let Some(ways) = &mut self.ways else { return };
        match answer {
            DropAnswer::Over => {
                let over = ways.lives.dropped(way, epochs);
                self.are_over(over, queues);
            }
            DropAnswer::Later => ways.lives.drop_failed(way),
            DropAnswer::Refused(status) => {
                ways.lives.drop_refused(way, Instant::now(), random());
                tracing::warn!(
                    rblk_event = "drop-refused",
                    ?status,
                    ?epochs,
                    "the target does not end the epochs of lost paths yet; it is asked again"
                );
            }
        }
    }

    /// The target has ended these epochs.
    fn are_over(&mut self, epochs: impl IntoIterator<Item = Epoch>, queues: &mut Queues) {
        let Some(ways) = &mut self.ways else { return };
        for way in epochs.into_iter().filter_map(|epoch| ways.is_over(epoch)) {
            queues.way_dropped(way);
        }
    }

    fn on_joined(&mut self, attempt: &WayTry, joined: JoinedWay, queues: &mut Queues) {
        let JoinedWay { session, paths } = joined;
        self.are_over(attempt.join.ends, queues);
        let Some(ways) = &mut self.ways else { return session.admin.close() };
        let _ = ways.lives.joined(attempt, Instant::now());
        ways.takes_paths(attempt);
        let (way, address) = (attempt.way, session.address.to_string());
        self.note_works(way.get());
        self.add_way(way, session, queues);
        queues.add_way(paths);
        tracing::info!(
            rblk_event = "path-joined",
            address,
            epoch = attempt.epoch.0,
            "one more path carries requests"
        );
    }

    /// A way died: its requests wait for what they must, and the others go on.
    pub(super) fn way_died(&mut self, way: WayIndex, why: &str, queues: &mut Queues) {
        let Some(ways) = &mut self.ways else { return };
        // Several queues may tell of one death.
        let Some(session) = ways.remove(way) else { return };
        ways.lives.died(way, Instant::now(), random());
        queues.end_way(way);
        self.note_fault(way.get(), why);
        let living = self.ways.as_ref().map_or(0, |ways| ways.lives.living().count());
        tracing::warn!(
            rblk_event = "path-lost",
            address = session.endpoint.address,
            lived = ?session.since.elapsed(),
            others = living,
            why,
            "lost a path"
        );
        self.lose_if_no_way_lives(why, queues);
    }
}
