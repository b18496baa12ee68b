//! The mount's hold on its target: carries out what its [`Course`](super::course::Course) says, and
//! tells it what happened.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rblk_fabric::ConnectOptions;
use rblk_protocol::{AsyncEvent, Features, Status};
use tokio::task::JoinHandle;

use super::course::{Act, Arrival, Attempt, Course, Facts, Failure, Leaving, Loss, Rules, State};
use super::known::Known;
use super::reconnect::{Again, Step, Try, VolumeChanged, probe};
use super::settle::Account;
use super::{EIO, Mount, access_mode, next_event, options, pulse, send};
use crate::engine::PathEnd;
use crate::error::SessionError;
use crate::path::Path;
use crate::queue::ToQueue;
use crate::session::{Claim, Session};
use rblk_config::MountConfig;

/// How many reasons for failed tries are logged in one outage.
const SAID_MAX: usize = 32;

/// Something that was begun and is not over.
pub(super) type Running<T> = Option<JoinHandle<anyhow::Result<T>>>;

/// The result of what is running, which then is over; for ever nothing if nothing is.
pub(super) async fn next<T>(running: &mut Running<T>) -> anyhow::Result<T> {
    match running {
        Some(task) => {
            let result = task.await;
            *running = None;
            result?
        }
        None => std::future::pending().await,
    }
}

/// Until then; for ever without.
pub(super) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

fn random() -> u64 {
    // Jitter only: without chance it is the shortest.
    getrandom::u64().unwrap_or(0)
}

pub(super) fn rules(config: &MountConfig, known: &Known) -> Rules {
    Rules {
        addresses: known.addresses.len(),
        detect: config.detect.get(),
        connect_timeout: config.connect_timeout.get(),
        reconnect_delay: config.reconnect_delay.get(),
        fail_after: config.fail_after.map(|after| after.get()),
        failback: config.failback.get(),
    }
}

pub(super) fn facts(known: &Known) -> Facts {
    Facts {
        resume: known.resume,
        volume: known.volume,
        instance: known.instance,
        target_name: known.target_name,
        fenced: known.fenced.clone(),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Mount {
    /// The session of the first connect, by that address: there was no try.
    pub(super) fn begin_connected(&mut self, session: Session, address: usize) {
        let rules = rules(&self.config, &self.known);
        self.course = Course::connected(rules, facts(&self.known), address, Instant::now());
        self.session = Some(session);
        self.keep_facts();
        self.note();
    }

    /// What the course learned, for the note and the status.
    fn keep_facts(&mut self) {
        let facts = self.course.facts();
        self.known.resume = facts.resume;
        self.known.volume = facts.volume;
        self.known.instance = facts.instance;
        self.known.fenced.clone_from(&facts.fenced);
        self.status.generation = facts.volume.generation.0;
        if let Some((_, epoch)) = facts.resume {
            self.status.epoch = epoch.0;
        }
    }

    /// Does what is due, and then the next thing that happens between the mount and its target.
    /// Cancel safe.
    pub(super) async fn attend(&mut self) {
        self.carry_out();
        let pulse = pulse(&self.config);
        tokio::select! {
            event = next_event(&mut self.session, pulse, &self.queues) => self.on_event(event),
            Some(step) = self.steps.1.recv() => self.on_step(step),
            result = next(&mut self.again) => self.on_try(result),
            result = next(&mut self.probing) => self.on_probe(result),
            () = until(self.course.deadline()) => {}
        }
    }

    /// Does what is due. The next thing is due at the course's deadline, or when something happens.
    fn carry_out(&mut self) {
        while let Some(act) = self.course.due(Instant::now(), random()) {
            match act {
                Act::Try(attempt) => self.begin_try(attempt),
                Act::Fail => {
                    let after = self.config.fail_after.unwrap_or_default();
                    tracing::error!(%after, "the target is gone for too long: requests fail until it is back");
                    self.fail_all(Some(EIO));
                }
                Act::Hold => {
                    self.quiet = vec![false; self.queues.len()];
                    self.tell_all(|| ToQueue::Hold(true));
                }
                Act::Leave(leaving) => {
                    let why = match leaving {
                        Leaving::Drain => "the target drains".to_owned(),
                        Leaving::Back { to } => {
                            let better = self.known.addresses.get(to).map(ToString::to_string);
                            format!("going back to {}", better.unwrap_or_default())
                        }
                    };
                    tracing::info!(
                        why,
                        "leaving the target; requests wait until it is connected again"
                    );
                    self.part(&why);
                }
                Act::Probe(address) => self.begin_probe(address),
            }
        }
    }

    fn begin_try(&mut self, attempt: Attempt) {
        self.keep_facts();
        if let Err(error) = self.must_note() {
            tracing::error!(%error, "cannot note the state of the mount: it could not be recovered now");
            // Whoever recovers a mount by a note that is behind cannot have its session, and in a
            // new one what this process had sent may come late. A volume that is shared is not kept
            // from it until that is over.
            if self.config.shared {
                self.course.failed(Failure::Transient, Instant::now(), random());
                return;
            }
        }
        let Attempt { address, resume, generation, limit } = attempt;
        let task = Try {
            address: self.known.addresses[address].clone(),
            options: ConnectOptions { timeout: limit, ..options(&self.config) },
            host: self.known.host,
            resume,
            volume_name: self.known.volume_name,
            claim: Claim { generation, ..access_mode(&self.config).into() },
            wish: self.known.wish,
            buffers: self.known.buffers[..self.queues.len()].to_vec(),
            account: self.account(),
        };
        self.trying = task.address.to_string();
        self.again = Some(tokio::spawn(task.run(self.steps.0.clone())));
    }

    /// What it takes to settle which acknowledged writes are durable.
    pub(super) fn account(&self) -> Account {
        Account {
            durability: Arc::clone(&self.durability),
            queues: self.queues.iter().map(|q| q.mail.clone()).collect(),
            wish: self.known.wish,
            pulse: pulse(&self.config),
        }
    }

    fn begin_probe(&mut self, address: usize) {
        let options =
            ConnectOptions { timeout: self.course.rules().try_limit(), ..options(&self.config) };
        let to = self.known.addresses[address].clone();
        let (host, instance) = (self.known.host, self.known.instance);
        self.probing = Some(tokio::spawn(async move {
            let shown = to.to_string();
            let answers = probe(to, options, host, instance).await;
            match &answers {
                Ok(()) => tracing::debug!(address = shown, "a better address answers"),
                Err(error) => {
                    tracing::debug!(
                        address = shown,
                        error = format!("{error:#}"),
                        "a probe failed"
                    );
                }
            }
            Ok((address, answers.is_ok()))
        }));
        self.probed = address;
    }

    fn on_probe(&mut self, result: anyhow::Result<(usize, bool)>) {
        let (address, answers) = result.unwrap_or((self.probed, false));
        self.course.probed(address, answers, Instant::now());
    }

    fn on_step(&mut self, step: Step) {
        // Whoever asked may have been given up meanwhile.
        match step {
            Step::LoggedIn(login, answer) => {
                let result = self.course.logged_in(&login);
                self.keep_facts();
                self.note();
                let _ = answer.send(result);
            }
            Step::Opened(volume, answer) => {
                let verdict = self.course.opened(&volume);
                self.keep_facts();
                self.note();
                let _ = answer.send(verdict);
            }
        }
    }

    fn on_try(&mut self, result: anyhow::Result<Again>) {
        let now = Instant::now();
        match result {
            Ok(Again { session, paths }) => match self.course.arrived(now) {
                Some(arrival) => self.arrive(session, paths, arrival),
                None => {
                    session.admin.close();
                    self.course.failed(Failure::Transient, now, random());
                }
            },
            Err(error) if error.is::<VolumeChanged>() => {
                tracing::error!("{error}");
                self.status.last_loss = Some(error.to_string());
                self.fail_all(Some(EIO));
            }
            Err(error) => {
                let text = format!("{error:#}");
                let session_error = error.downcast_ref::<SessionError>();
                if let Some(SessionError::Fenced { by, .. }) = session_error {
                    tracing::error!(
                        by,
                        "fenced: another host has the volume by now; every request fails, for good. Unmount, and \
                         mount again when it is free"
                    );
                    self.course.fenced(by.as_str());
                    self.keep_facts();
                    self.note();
                    self.status.last_loss = Some(text);
                    self.fail_all(Some(Status::Fenced.errno()));
                    return;
                }
                if session_error.is_some_and(SessionError::is_session_gone) {
                    // So a target answers that was started anew: why it was lost is known already.
                    tracing::info!(
                        address = self.trying,
                        answer = text,
                        "the target does not know the session any more; beginning a new one"
                    );
                    self.course.failed(Failure::SessionGone, now, random());
                    return;
                }
                if self.said.contains(&text) || self.said.len() >= SAID_MAX {
                    tracing::debug!(
                        address = self.trying,
                        error = text,
                        "cannot connect again yet"
                    );
                } else {
                    tracing::warn!(address = self.trying, error = text, "cannot connect again yet");
                    self.said.push(text.clone());
                }
                self.status.last_loss = Some(text);
                self.course.failed(Failure::Transient, now, random());
            }
        }
    }

    fn arrive(&mut self, session: Session, paths: Vec<Path>, arrival: Arrival) {
        let Arrival { stalled, was_failing, verifier_changed, .. } = arrival;
        self.keep_facts();
        self.status.verifier_changes += u64::from(verifier_changed);
        self.status.stall_ms_max = self.status.stall_ms_max.max(millis(stalled));
        let caps = session.device().caps();
        self.known.address = session.address.to_string();
        self.known.rdma_device.clone_from(&caps.name);
        self.known.transport = caps.transport.to_string();
        self.status.address.clone_from(&self.known.address);
        self.status.rdma_device.clone_from(&self.known.rdma_device);
        self.status.transport.clone_from(&self.known.transport);
        self.session = Some(session);
        self.said.clear();
        self.durability.arrived();
        self.note();
        self.connect_queues(paths);
        if was_failing {
            self.fail_all(None);
        }
        tracing::info!(
            ?stalled,
            epoch = self.status.epoch,
            address = self.status.address,
            "connected again"
        );
    }

    pub(super) fn connect_queues(&mut self, paths: Vec<Path>) {
        let lanes = paths.iter().map(|path| path.connections.len()).min();
        self.status.lanes = lanes.unwrap_or(self.status.lanes);
        // Paths of queues that the driver did not make just end.
        for (at, path) in paths.into_iter().enumerate().take(self.queues.len()) {
            self.paths[at] += 1;
            send(&self.queues[at], ToQueue::Connect(Box::new(path)));
        }
    }

    /// The path of a queue ended.
    pub(super) fn on_path_end(&mut self, queue: u16, end: PathEnd) {
        let paths = self.paths.get_mut(usize::from(queue));
        let left = paths.map_or(0, |paths| {
            *paths = paths.saturating_sub(1);
            *paths
        });
        match end {
            PathEnd::Dropped => {}
            // It is the word of a path that was given up before, and has a successor.
            _ if left > 0 => {}
            PathEnd::SelfTest if self.known.wish.features.has(Features::WRITE_WITH_IMM) => {
                tracing::warn!(
                    queue,
                    "WRITE_WITH_IMM does not work on this path; going on without"
                );
                let features = self.known.wish.features;
                self.known.wish.features = features.without(Features::WRITE_WITH_IMM);
                self.status.write_with_imm = false;
                self.lose("the self-test failed", Loss::Renegotiate);
            }
            end => self.lose(&format!("queue {queue}: {end:?}"), Loss::Path),
        }
    }

    pub(super) fn on_quiet(&mut self, queue: u16) {
        if let Some(quiet) = self.quiet.get_mut(usize::from(queue)) {
            *quiet = true;
        }
        if self.quiet.iter().all(|quiet| *quiet) {
            self.course.quiet();
        }
    }

    pub(super) fn on_event(&mut self, event: Result<Option<AsyncEvent>, SessionError>) {
        match event {
            Ok(Some(AsyncEvent::Draining)) => {
                tracing::info!("the target drains: finishing what is in flight");
                self.course.draining(Instant::now());
            }
            // The next OPEN says who has it.
            Ok(Some(AsyncEvent::Fenced)) => self.lose("the volume was taken over", Loss::Path),
            Ok(event) => tracing::debug!(?event, "event of the target"),
            Err(error) => self.lose(&error.to_string(), Loss::Path),
        }
    }

    fn lose(&mut self, why: &str, loss: Loss) {
        if self.session.is_some() {
            self.course.lose(loss, Instant::now(), random());
            let address = self.session.as_ref().map(|session| session.address.to_string());
            tracing::warn!(why, address, "lost the target; requests wait");
            self.part(why);
        }
    }

    /// The session is over: every queue keeps its requests, and the course says how to go on.
    fn part(&mut self, why: &str) {
        let Some(session) = self.session.take() else { return };
        self.status.last_loss = Some(why.to_owned());
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.status.lost_at_unix_ms = since_epoch.ok().map(millis);
        session.admin.close();
        self.tell_all(|| ToQueue::Disconnect);
        self.tell_all(|| ToQueue::Hold(false));
    }

    pub(super) fn fail_all(&self, errno: Option<i32>) {
        self.tell_all(|| ToQueue::Fail(errno));
    }

    fn tell_all(&self, message: impl Fn() -> ToQueue) {
        for queue in &self.queues {
            send(queue, message());
        }
    }

    /// The state in a word, and since when the target is lost, in milliseconds.
    pub(super) fn standing(&self) -> (&'static str, Option<u64>) {
        let word = match self.course.state() {
            State::Connected => "connected",
            State::Lost => "reconnecting",
            State::Failing => "failing",
            State::Fenced => "fenced",
            State::Changed => "volume lost",
        };
        (word, self.course.lost_at().map(|at| millis(at.elapsed())))
    }
}

#[cfg(test)]
mod tests;
