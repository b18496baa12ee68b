//! [`Mount`]: a mount of a host, from the wish for it to its end, through all its servers.
//!
//! A host has at most one mount that is not lost. Each mount has its own number for the oracle,
//! used once. A mount whose server died waits for the next server. A mount that lost the volume
//! stays until its host wants another one.

use rblk_initiator::volume::course;

use super::World;
use crate::oracle::Host;
use crate::sim::kernel::{Expect, Kernel};
use crate::sim::process::{Ground, Note, Process, State};

/// The number of attempts to mount.
const TRIES: u32 = 12;

#[derive(Debug)]
pub(super) struct Mount {
    pub(super) number: Host,
    pub(super) host: usize,
    pub(super) kernel: Kernel,
    pub(super) process: Option<Process>,
    pub(super) note: Option<Note>,
    // The step at which the next process begins.
    pub(super) revives: Option<u64>,
    pub(super) served: bool,
    // Another mount wanted the volume, or has it.
    pub(super) threatened: bool,
    pub(super) fenced: bool,
    pub(super) late: u32,
    // A flush may have to report a loss.
    pub(super) doubtful: bool,
    // Every flush of this mount has to fail, in every later process, too.
    pub(super) lost: bool,
}

/// A mount that is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) at: u64,
    pub(super) take_over: bool,
    pub(super) tries: u32,
}

impl Mount {
    /// Whether it has lost the volume for good.
    pub(super) fn is_out(&self) -> bool {
        let course = self.process.as_ref().and_then(|process| process.course());
        self.fenced || course.is_some_and(|course| course.state() == course::CourseState::Fenced)
    }

    pub(super) fn is_hasty(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.is_frozen() && process.is_hasty())
    }
}

impl World {
    pub(super) fn opened(&mut self, host: Host, fresh: bool) {
        if !fresh {
            assert!(!self.oracle.is_fenced(host), "{host:?} came back although it was fenced");
            return;
        }
        // Earlier holders lost the volume, including mounts that have ended.
        for number in (0..self.numbers).map(Host).filter(|number| *number != host) {
            self.oracle.fence(number);
        }
        self.oracle.settle();
        for mount in self.mounts.iter_mut().filter(|m| m.number != host) {
            self.report.fenced += u64::from(!mount.fenced);
            mount.fenced = true;
        }
    }

    pub(super) fn turn_processes(&mut self) {
        for at in 0..self.mounts.len() {
            let mount = &mut self.mounts[at];
            let Some(process) = &mut mount.process else { continue };
            let mut ground = Ground {
                site: &mut self.site,
                oracle: &mut self.oracle,
                log: &mut self.log,
                moments: &mut self.moments,
                links: &self.links[mount.host],
                dark: self.dark,
            };
            process.turn(&mut ground);
            mount.lost |= process.fails_every_flush();
            mount.served |= process.state() == State::Serving;
        }
        let gave_up =
            |mount: &Mount| mount.process.as_ref().is_some_and(|p| p.state() == State::GaveUp);
        while let Some(at) = self.mounts.iter().position(gave_up) {
            let host = self.mounts[at].host;
            self.unmount(at, false);
            if let Some(wish) = &mut self.wishes[host] {
                wish.at = self.site.rig.steps() + self.random.within(20, 400);
                wish.tries += 1;
                if wish.tries > TRIES {
                    self.wishes[host] = None;
                }
            }
        }
    }

    /// The newest mount of a host.
    pub(super) fn mount_of(&self, host: usize) -> Option<usize> {
        self.mounts.iter().rposition(|mount| mount.host == host)
    }

    pub(super) fn kill_server(&mut self, at: usize, until: u64) {
        let mount = &mut self.mounts[at];
        let Some(process) = mount.process.take() else { return };
        self.log.add("server dies", [mount.number.0.into(), 0, 0]);
        let number = mount.number;
        let served = mount.served;
        mount.note = process.die(false, &mut self.site);
        mount.kernel.crash(&mut self.random);
        mount.revives = Some(until);
        mount.doubtful = true;
        self.thaws.retain(|thaw| thaw.1 != number);
        self.oracle.host_died(number);
        if !served {
            self.mounts.remove(at);
        }
    }

    pub(super) fn revive(&mut self) {
        let now = if self.calm { u64::MAX } else { self.step_number() };
        for at in 0..self.mounts.len() {
            let mount = &mut self.mounts[at];
            if mount.process.is_some() || mount.revives.is_none_or(|at| at > now) {
                continue;
            }
            let Some(note) = mount.note.take() else { continue };
            mount.revives = None;
            self.report.recoveries += 1;
            self.log.add("server recovers", [mount.number.0.into(), 0, 0]);
            let mut ground = Ground {
                site: &mut self.site,
                oracle: &mut self.oracle,
                log: &mut self.log,
                moments: &mut self.moments,
                links: &self.links[mount.host],
                dark: self.dark,
            };
            let seed = self.random.bits();
            let (number, host) = (mount.number, mount.host);
            mount.process =
                Some(Process::recover(&self.plan, number, host, note, seed, &mut ground));
        }
    }

    pub(super) fn mount_wished(&mut self) {
        let nobody = self.mounts.iter().all(Mount::is_out);
        if nobody && !self.ending && self.wishes.iter().all(Option::is_none) {
            // Without any wish, one host will mount after a while.
            let (host, delay) = (self.random.index(self.plan.hosts), self.random.within(50, 500));
            let at = self.step_number() + delay;
            self.wishes[host] = Some(Wish { at, take_over: false, tries: 0 });
        }
        for host in 0..self.plan.hosts {
            let steps = self.step_number();
            let Some(wish) = self.wishes[host].filter(|wish| wish.at <= steps) else { continue };
            match self.mount_of(host) {
                // The mount succeeded.
                Some(at) if self.mounts[at].served && !self.mounts[at].is_out() => {
                    self.wishes[host] = None;
                    continue;
                }
                Some(at) if self.mounts[at].is_out() => {
                    // The unmount is forced: users of the device see that it is gone.
                    self.unmount(at, false);
                }
                Some(_) => continue,
                None => {}
            }
            let number = Host(self.numbers);
            self.numbers += 1;
            self.report.mounts += 1;
            self.log.add("mounts", [number.0.into(), host as u64, u64::from(wish.take_over)]);
            let mut ground = Ground {
                site: &mut self.site,
                oracle: &mut self.oracle,
                log: &mut self.log,
                moments: &mut self.moments,
                links: &self.links[host],
                dark: self.dark,
            };
            let seed = self.random.bits();
            let (plan, take_over) = (&self.plan, wish.take_over);
            let process = Process::mount(plan, number, host, take_over, seed, &mut ground);
            self.mounts.push(Mount {
                number,
                host,
                kernel: Kernel::new(self.plan.queues, self.plan.depth),
                process: Some(process),
                note: None,
                revives: None,
                served: false,
                threatened: false,
                fenced: false,
                late: 0,
                doubtful: false,
                lost: false,
            });
        }
    }

    /// A mount ends, with all its requests.
    pub(super) fn unmount(&mut self, at: usize, silent: bool) {
        let mount = self.mounts.remove(at);
        for request in mount.kernel.requests() {
            if let Expect::Read(begin) = request.expect {
                self.oracle.drop_read(begin);
            }
        }
        self.thaws.retain(|thaw| thaw.1 != mount.number);
        self.oracle.host_died(mount.number);
        if let Some(process) = mount.process {
            self.log.add("unmounted", [mount.number.0.into(), u64::from(silent), 0]);
            process.die(silent, &mut self.site);
        }
    }

    /// The place of the mount that has the volume.
    pub(super) fn holder(&self) -> Option<usize> {
        self.mounts.iter().position(|mount| mount.served && !mount.is_out())
    }
}
