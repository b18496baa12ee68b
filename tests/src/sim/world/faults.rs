//! Faults as they strike and heal: links, machines, servers, the store, QPs that do not flush.
//!
//! A fault comes at its moment, or after a time limit if that moment does not come, and heals after
//! its steps. At the end of a run all faults heal at once and none comes.

use rblk_fabric::soft::network::End;
use rblk_rig::ram_store::StoreConditions;

use super::World;
use super::mount::Wish;
use crate::oracle::{Host, Survives};
use crate::sim::plan::{Break, Death, Fault, Moment, When};
use crate::sim::site::Left;

/// Steps after which a fault strikes without its moment.
pub(super) const IMPATIENCE: u64 = 1200;

/// Steps to wait until the store has ops to hold.
const HOLD: u64 = 100;

impl World {
    pub(super) fn next_fault(&mut self) {
        let steps = self.step_number();
        let moments = std::mem::take(&mut self.moments);
        let Some((when, fault)) = self.plan.faults.get(self.fault).copied() else { return };
        if self.calm || !self.mounts.iter().any(|mount| mount.served) && self.fault == 0 {
            self.fault_since = steps;
            return;
        }
        let waited = steps.saturating_sub(self.fault_since);
        let due = match when {
            When::Steps(after) => waited >= after,
            When::At(moment) => moments.contains(&moment) || waited >= IMPATIENCE,
            When::After(moment, more) => {
                let came = moments.contains(&moment).then_some(steps);
                self.moment_came = self.moment_came.or(came);
                self.moment_came.map_or(waited >= IMPATIENCE, |at| steps >= at + more)
            }
        };
        if due {
            self.report.after_moments += u64::from(self.moment_came.take().is_some());
            self.fault += 1;
            self.fault_since = steps;
            self.strike(fault);
        }
    }

    /// The host if it has a mount, else the host that has the volume.
    fn aim(&self, host: usize) -> usize {
        let other = || self.holder().map(|at| self.mounts[at].host);
        if self.mount_of(host).is_some() { host } else { other().unwrap_or(host) }
    }

    pub(super) fn strike(&mut self, fault: Fault) {
        let steps = self.step_number();
        match fault {
            Fault::Link { host, address, how, steps: lasts } => {
                let host = self.aim(host);
                let all = 0..self.plan.addresses;
                for address in all.filter(|at| address.is_none_or(|only| only == *at)) {
                    self.break_link(host, address, how, steps + lasts);
                }
            }
            Fault::Wire { host, queue, near, bytes } => self.cut_wire(host, queue, near, bytes),
            Fault::Target { death, steps: lasts } => {
                if self.site.is_up() {
                    self.end_target(Some(death), steps + lasts);
                }
            }
            Fault::Drain { steps: lasts } => {
                if self.site.is_up() {
                    self.drain_down = lasts;
                    self.site.drain(&mut self.log);
                }
            }
            Fault::Server { host, steps: lasts } => {
                let host = self.aim(host);
                if let Some(at) = self.mount_of(host) {
                    self.kill_server(at, steps + lasts);
                }
            }
            Fault::Host { host, steps: lasts } => {
                while let Some(at) = self.mount_of(host) {
                    self.log.add("host dies", [host as u64, self.mounts[at].number.0.into(), 0]);
                    self.unmount(at, true);
                }
                self.wishes[host] = Some(Wish { at: steps + lasts, take_over: false, tries: 0 });
            }
            Fault::Freeze { host, steps: lasts } => self.freeze(host, steps + lasts),
            Fault::Mount { host, take_over } => self.wish_to_mount(host, take_over),
            Fault::Slow { steps: lasts, stalled } => {
                let mut conditions = self.plan.store;
                conditions.stalled = stalled;
                conditions.delay_max = 20 * (conditions.delay_max + 2);
                self.set_store(conditions);
                self.store_heals = Some(steps + lasts);
            }
            Fault::Hold { steps: lasts } => {
                let conditions = StoreConditions { stalled: true, ..self.plan.store };
                self.set_store(conditions);
                self.holds = Some((steps + HOLD, lasts));
            }
            Fault::Errors { steps: lasts, per_mille } => {
                let mut conditions = self.plan.store;
                conditions.errors_per_mille = per_mille;
                self.store_failed = true;
                self.set_store(conditions);
                self.store_heals = Some(steps + lasts);
            }
            Fault::Jam { steps: lasts } => {
                self.log.add("QPs are not destroyed", [0; 3]);
                self.site.rig.hold_destroys(true);
                self.jam_heals = Some(steps + lasts);
            }
        }
    }

    /// Cuts one lane of a queue after `bytes` more bytes.
    fn cut_wire(&mut self, host: usize, queue: usize, near: bool, bytes: usize) {
        let host = self.aim(host);
        let Some(at) = self.mount_of(host) else { return };
        let Some(process) = &self.mounts[at].process else { return };
        let Some(queue) = process.queues().get(queue) else { return };
        let end = if near { End::A } else { End::B };
        let wires = self.site.rig.all_wires(*queue);
        // The lane depends on the drawn number of bytes.
        if let Some(wire) = bytes.checked_rem(wires.len()).map(|lane| &wires[lane]) {
            wire.cut_after(end, bytes);
            self.log.add("a wire is cut soon", [host as u64, bytes as u64, 0]);
        }
    }

    /// Stops a mount's process until a step.
    fn freeze(&mut self, host: usize, until: u64) {
        let host = self.aim(host);
        let Some(at) = self.mount_of(host) else { return };
        let mount = &mut self.mounts[at];
        if let Some(process) = &mut mount.process {
            self.log.add("freezes", [mount.number.0.into(), 0, 0]);
            process.freeze(true, &mut self.site);
            self.thaws.push((until, mount.number));
        }
    }

    /// Lets a host claim the volume: this host, or the next one if this host has the volume.
    fn wish_to_mount(&mut self, host: usize, take_over: bool) {
        let holds = |at: usize| {
            let mount = &self.mounts[at];
            mount.served && !mount.is_out()
        };
        let holds_it = self.mount_of(host).is_some_and(holds);
        let host = if holds_it { (host + 1) % self.plan.hosts } else { host };
        if self.mount_of(host).is_some_and(holds) || self.wishes[host].is_some() {
            return;
        }
        self.wishes[host] = Some(Wish { at: self.step_number(), take_over, tries: 0 });
    }

    fn set_store(&mut self, conditions: StoreConditions) {
        self.log.add(
            "store",
            [
                u64::from(conditions.stalled),
                conditions.delay_max,
                conditions.errors_per_mille.into(),
            ],
        );
        if self.site.rig.has_target() {
            self.site.rig.store_mut().set_conditions(conditions);
        }
    }

    fn break_link(&mut self, host: usize, address: usize, how: Break, until: u64) {
        self.log.add("link breaks", [host as u64, address as u64, how as u64]);
        let mut stalled = Vec::new();
        for mount in self.mounts.iter().filter(|mount| mount.host == host) {
            let Some(process) = &mount.process else { continue };
            for wire in process.wires(address, &self.site) {
                match how {
                    Break::Cut => wire.cut(),
                    Break::Silence => wire.silence(),
                    Break::Stall => {
                        wire.stall(End::A, true);
                        wire.stall(End::B, true);
                        stalled.push(wire);
                    }
                }
            }
        }
        self.links[host][address].broken = Some(how);
        self.heals.push((until, host, address, stalled));
    }

    pub(super) fn heal(&mut self) {
        let now = if self.calm { u64::MAX } else { self.step_number() };
        while let Some(at) = self.heals.iter().position(|heal| heal.0 <= now) {
            let (_, host, address, stalled) = self.heals.swap_remove(at);
            let again = self.heals.iter().any(|heal| (heal.1, heal.2) == (host, address));
            if !again {
                self.links[host][address].broken = None;
            }
            for wire in stalled {
                wire.stall(End::A, false);
                wire.stall(End::B, false);
            }
            self.log.add("link heals", [host as u64, address as u64, 0]);
        }
        while let Some(at) = self.thaws.iter().position(|thaw| thaw.0 <= now) {
            let (_, number) = self.thaws.swap_remove(at);
            let again = self.thaws.iter().any(|thaw| thaw.1 == number);
            if let Some(mount) = self.mounts.iter_mut().find(|mount| mount.number == number)
                && let Some(process) = mount.process.as_mut().filter(|_| !again)
            {
                self.log.add("thaws", [number.0.into(), 0, 0]);
                process.freeze(false, &mut self.site);
            }
        }
        if self.store_heals.is_some_and(|at| at <= now) {
            self.store_heals = None;
            self.set_store(self.plan.store);
        }
        self.hold(now);
        if self.releases.is_some_and(|at| at <= now) {
            self.releases = None;
            self.log.add("store releases", [0; 3]);
            if self.site.rig.has_target() {
                self.site.rig.store_mut().release();
            }
        }
        if self.jam_heals.is_some_and(|at| at <= now) {
            self.jam_heals = None;
            self.site.rig.hold_destroys(false);
            self.log.add("QPs are destroyed again", [0; 3]);
        }
    }

    fn hold(&mut self, now: u64) {
        let Some((until, lasts)) = self.holds else { return };
        if !self.site.rig.has_target() {
            self.holds = None;
            return;
        }
        let store = self.site.rig.store_mut();
        let has = store.changes_in_flight();
        if has > 0 {
            store.hold();
            self.releases = Some(self.site.rig.steps() + lasts);
            self.moments.push(Moment::Held);
            self.log.add("store holds", [has as u64, 0, 0]);
        }
        if has > 0 || until <= now {
            self.holds = None;
            if self.store_heals.is_none() {
                self.set_store(self.plan.store);
            }
        }
    }

    pub(super) fn look_after_target(&mut self) {
        let now = if self.calm { u64::MAX } else { self.step_number() };
        if self.site.drained().is_some() {
            let until = self.step_number() + self.drain_down;
            self.end_target(None, until);
        }
        if self.down.as_ref().is_some_and(|down| down.0 <= now)
            && let Some((_, left, disk)) = self.down.take()
        {
            self.site.start(&left, disk.as_ref(), &mut self.log);
            self.dark = false;
            if self.store_heals.is_none() {
                self.set_store(self.plan.store);
            }
        }
    }

    fn end_target(&mut self, death: Option<Death>, until: u64) {
        // Answers that the target has sent count. Decisions that it has not sent do not.
        self.pump();
        self.report.restarts += 1;
        let clean = self.site.drained() == Some(true) && death.is_none();
        let disk = self.site.disk();
        let left = self.site.end(death, &mut self.log);
        let silent = death == Some(Death::Machine);
        self.site.vanish(silent);
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.lose();
        }
        self.dark = silent;
        match &left {
            Left::Everything => {
                for number in (0..self.numbers).map(Host) {
                    self.oracle.new_attempt(number, |_| true);
                }
            }
            Left::Image(image) => {
                let survives = if clean { Survives::Acknowledged } else { Survives::Durable };
                let retains = self.plan.retain_bytes.is_some();
                let lives = |host: Host| {
                    self.mounts.iter().any(|m| m.number == host && m.process.is_some())
                };
                let counted =
                    self.oracle.restart(image.clone(), survives, |host| retains && lives(host));
                if let Err(wrong) = counted {
                    panic!("after the end of the target: {wrong}");
                }
                for mount in &mut self.mounts {
                    mount.doubtful |= !clean;
                }
            }
        }
        self.down = Some((until, left, Some(disk)));
    }
}
