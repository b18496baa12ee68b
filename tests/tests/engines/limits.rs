//! Limits of volumes and hosts, on the real engines, in the time of the rig's own clock.

use std::sync::Arc;
use std::time::Duration;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, Opcode, Status, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::data::poll_group::{ToGroup, VolumeStep};
use rblk_target::volume::Volume;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};
use rblk_target::volume::limits::{Limiter, Limits};

const FIRST: VolumeIndex = VolumeIndex(0);
const SECOND: VolumeIndex = VolumeIndex(1);
const SECOND_OF_TICKS: u64 = 100_000;

fn iops(iops: u32, burst: u32) -> Limits {
    Limits { iops: Some(iops), iops_burst: Some(burst), ..Limits::default() }
}

fn bandwidth(mib: u64) -> Limits {
    let bandwidth = Some(format!("{mib}MiB/s").parse().expect("a rate"));
    Limits {
        bandwidth,
        bandwidth_burst: Some("1MiB".parse().expect("a size")),
        ..Limits::default()
    }
}

/// A host with one queue, which always has a request on each tag.
struct Host {
    session: SessionIndex,
    queue: QueueId,
    depth: u16,
    bytes: u64,
    ended: u64,
}

/// Hosts of one target with two volumes in memory. The first volume is limited.
struct Lab {
    rig: Rig<RamStore>,
    hosts: Vec<Host>,
}

impl Lab {
    fn new(limits: Limits, groups: usize) -> Self {
        let plain = VolumeSpec::new(VolumeKind::Memory, 4 << 20);
        let volumes = vec![VolumeSpec { limits, ..plain }, plain];
        let options = RigOptions { groups, volumes, ..RigOptions::default() };
        let rig = Rig::new(&options, |arena| RamStore::new(arena, 7)).expect("a rig");
        Self { rig, hosts: Vec::new() }
    }

    /// Adds a host with requests of `bytes`.
    fn host(&mut self, volume: VolumeIndex, depth: u16, bytes: u64) -> usize {
        let session = self.rig.begin_session();
        self.rig.open(session, volume, AccessMode::Shared);
        let options = QueueOptions { depth, ..QueueOptions::default() };
        let queue = self.rig.add_queue(session, volume, options).expect("a queue");
        self.rig.run(SECOND_OF_TICKS, |rig| rig.is_connected(queue)).expect("a path");
        self.hosts.push(Host { session, queue, depth, bytes, ended: 0 });
        self.hosts.len() - 1
    }

    fn submit(&mut self, host: usize, tag: u16, op: IoOp) {
        let Host { queue, bytes, .. } = self.hosts[host];
        let io = self.rig.request(queue, op, 0, bytes);
        self.rig.submit(queue, Tag(tag), io).expect("a free tag");
    }

    fn fill(&mut self, host: usize) {
        (0..self.hosts[host].depth).for_each(|tag| self.submit(host, tag, IoOp::Read));
    }

    /// Lets time pass. Each request that ends is followed by another.
    fn run(&mut self, ticks: u64) {
        for _ in 0..ticks {
            self.rig.step();
            for outcome in self.rig.take_outcomes() {
                let at = self.hosts.iter().position(|host| host.queue == outcome.queue);
                let at = at.expect("a host");
                assert_eq!(u64::try_from(outcome.result), Ok(self.hosts[at].bytes));
                self.hosts[at].ended += 1;
                self.submit(at, outcome.tag.0, IoOp::Read);
            }
        }
    }

    /// The requests of each host that ended in `ticks`.
    fn ended_in(&mut self, ticks: u64) -> Vec<u64> {
        self.hosts.iter_mut().for_each(|host| host.ended = 0);
        self.run(ticks);
        self.hosts.iter().map(|host| host.ended).collect()
    }

    /// Lets time pass without new requests.
    fn steps(&mut self, ticks: u64) {
        for _ in 0..ticks {
            self.rig.step();
        }
    }

    /// Runs a step of a change of the first volume.
    fn order(&mut self, volume: &Arc<Volume>, step: VolumeStep) {
        self.rig.begin_step(volume, step);
        let mut outcome = None;
        let done = self.rig.run(100, |rig| {
            outcome = rig.step_outcome();
            outcome.is_some()
        });
        done.expect("the end of the step");
        assert_eq!(outcome, Some(Ok(())));
    }

    /// Sets the limits of the first volume.
    fn limit(&mut self, limits: Limits) {
        let before = Volume::clone(&self.rig.volumes()[0]);
        let limits = Limiter::renewed(before.limits.as_ref(), limits);
        let volume = Arc::new(Volume { limits, ..before });
        self.order(&volume, VolumeStep::Access);
        self.rig.note_volume(volume);
    }
}

fn is_within(value: u64, wanted: u64, percent: u64) -> bool {
    value.abs_diff(wanted) * 100 <= wanted * percent
}

#[test]
fn a_limited_volume_gets_its_commands_per_second_and_others_are_not_slower() {
    for groups in [1, 3] {
        let mut lab = Lab::new(iops(2000, 10), groups);
        lab.host(FIRST, 32, 4096);
        lab.host(SECOND, 1, 4096);
        (0..2).for_each(|host| lab.fill(host));
        lab.run(SECOND_OF_TICKS / 10);
        let ended = lab.ended_in(SECOND_OF_TICKS / 2);
        assert!(is_within(ended[0], 1000, 5), "{groups} poll groups: {ended:?}");
        assert!(ended[1] > 5000, "{groups} poll groups: {ended:?}");
        let delays = lab.rig.volume_delays(FIRST);
        assert!(delays.commands >= 1000 && delays.waited_us > 1_000_000, "{delays:?}");
        assert_eq!(lab.rig.volume_delays(SECOND).commands, 0);
    }
}

#[test]
fn a_limited_volume_gets_its_bytes_per_second() {
    let mut lab = Lab::new(bandwidth(100), 1);
    lab.host(FIRST, 8, 64 << 10);
    lab.fill(0);
    lab.run(SECOND_OF_TICKS / 10);
    let ended = lab.ended_in(SECOND_OF_TICKS / 2);
    assert!(is_within(ended[0], 800, 5), "{ended:?}");
}

#[test]
fn hosts_that_share_a_volume_have_equal_shares_at_any_depth() {
    for groups in [1, 2] {
        // With two poll groups, each group serves one host.
        let mut lab = Lab::new(iops(2000, 10), groups);
        lab.host(FIRST, 128, 4096);
        lab.host(FIRST, 4, 4096);
        (0..2).for_each(|host| lab.fill(host));
        lab.run(SECOND_OF_TICKS / 5);
        let ended = lab.ended_in(SECOND_OF_TICKS / 2);
        assert!(is_within(ended[0] + ended[1], 1000, 5), "{groups} poll groups: {ended:?}");
        assert!(is_within(ended[0], ended[1], 10), "{groups} poll groups: {ended:?}");
    }
}

#[test]
fn the_limit_of_a_host_covers_all_its_sessions_and_volumes() {
    let mut lab = Lab::new(Limits::default(), 2);
    for volume in [FIRST, SECOND, FIRST] {
        lab.host(volume, 16, 4096);
    }
    let limits = Limiter::renewed(None, iops(3000, 10));
    for host in [0, 1] {
        let session = lab.hosts[host].session;
        lab.rig.mail(ToGroup::LimitHost { session, limits: limits.clone() });
    }
    (0..3).for_each(|host| lab.fill(host));
    lab.run(SECOND_OF_TICKS / 10);
    let ended = lab.ended_in(SECOND_OF_TICKS / 2);
    assert!(is_within(ended[0] + ended[1], 1500, 5), "{ended:?}");
    assert!(is_within(ended[0], ended[1], 10), "{ended:?}");
    assert!(ended[2] > 5000, "another host is not limited: {ended:?}");
}

#[test]
fn new_limits_count_for_commands_that_wait() {
    let mut lab = Lab::new(iops(10, 1), 1);
    lab.host(FIRST, 64, 4096);
    lab.fill(0);
    let slow = lab.ended_in(SECOND_OF_TICKS / 10);
    assert!(slow[0] <= 3, "{slow:?}");
    lab.limit(iops(2000, 10));
    lab.run(SECOND_OF_TICKS / 20);
    let ended = lab.ended_in(SECOND_OF_TICKS / 10);
    assert!(is_within(ended[0], 200, 5), "{ended:?}");
    lab.limit(iops(10, 1));
    lab.run(SECOND_OF_TICKS / 20);
    lab.limit(Limits::default());
    let ended = lab.ended_in(100);
    assert!(ended[0] >= 64, "all of them begin at once: {ended:?}");
}

#[test]
fn flushes_do_not_wait_and_refused_commands_neither() {
    let mut lab = Lab::new(iops(10, 1), 1);
    let host = lab.host(FIRST, 8, 4096);
    (0..6).for_each(|tag| lab.submit(host, tag, IoOp::Read));
    lab.rig.run(1000, |rig| rig.outstanding(lab.hosts[0].queue) == 5).expect("the burst");
    let flush = lab.rig.request(lab.hosts[0].queue, IoOp::Flush, 0, 0);
    lab.rig.submit(lab.hosts[0].queue, Tag(6), flush).expect("a free tag");
    lab.rig.take_outcomes();
    lab.rig.run(1000, |rig| rig.outstanding(lab.hosts[0].queue) == 5).expect("the flush");
    let outcomes = lab.rig.take_outcomes();
    assert_eq!(outcomes.iter().map(|o| (o.tag.0, o.result)).collect::<Vec<_>>(), [(6, 0)]);
    // A host that lost the volume is refused when its turn comes, and its writes have no effect.
    lab.rig.close(lab.hosts[0].session, FIRST, Status::Fenced);
    lab.limit(Limits::default());
    lab.rig.run(1000, |rig| rig.outstanding(lab.hosts[0].queue) == 0).expect("the answers");
    assert!(lab.rig.take_outcomes().iter().all(|outcome| outcome.result < 0));
}

#[test]
fn commands_that_wait_end_with_their_connection_and_never_begin() {
    let mut lab = Lab::new(iops(10, 1), 1);
    let host = lab.host(FIRST, 8, 4096);
    let queue = lab.hosts[host].queue;
    for tag in 0..8 {
        lab.rig.fill_buffer(queue, Tag(tag), &[0xaa; 4096]);
        let io = lab.rig.request(queue, IoOp::Write, u64::from(tag) * 4096, 4096);
        lab.rig.submit(queue, Tag(tag), io).expect("a free tag");
    }
    lab.rig.run(1000, |rig| rig.outstanding(queue) == 7).expect("the burst");
    let written = |rig: &Rig<RamStore>| {
        let mut bytes = vec![0; 8 * 4096];
        rig.memory(FIRST).expect("memory").read(0, &mut bytes);
        bytes.iter().filter(|byte| **byte == 0xaa).count() / 4096
    };
    assert_eq!(written(&lab.rig), 1);
    // The host's machine dies: the target learns of it by the next epoch.
    lab.rig.drop_queue(queue, true);
    lab.rig.new_epoch(lab.hosts[host].session).expect("an epoch");
    let session = lab.hosts[host].session;
    lab.rig.run(1000, |rig| rig.connections(session) == 0).expect("the end of the connection");
    assert_eq!(lab.rig.group_mut().next_deadline().filter(|at| *at < Duration::from_secs(1)), None);
    lab.limit(Limits::default());
    lab.rig.run(SECOND_OF_TICKS, |rig| rig.steps() > 2 * SECOND_OF_TICKS).ok();
    assert_eq!(written(&lab.rig), 1, "a command of an old epoch was executed");
    assert_eq!(lab.rig.volume_io(FIRST).in_flight, 0);
    assert_eq!(lab.rig.volume_abandoned(FIRST), 7, "the mount sends them again");
    let delays = lab.rig.volume_delays(FIRST);
    assert_eq!((delays.commands, delays.begun, delays.mean_us()), (7, 0, None));
}

#[test]
fn writes_that_are_held_and_end_with_their_connection_are_unanswered() {
    let mut lab = Lab::new(Limits::default(), 1);
    let host = lab.host(FIRST, 8, 4096);
    let queue = lab.hosts[host].queue;
    let volume = Arc::clone(&lab.rig.volumes()[0]);
    lab.order(&volume, VolumeStep::Hold);
    (0..3).for_each(|tag| lab.submit(host, tag, IoOp::Write));
    lab.steps(100);
    lab.rig.drop_queue(queue, false);
    let session = lab.hosts[host].session;
    lab.rig.run(1000, |rig| rig.connections(session) == 0).expect("the end of the connection");
    lab.order(&volume, VolumeStep::Access);
    let io = lab.rig.volume_io(FIRST);
    assert_eq!((lab.rig.volume_abandoned(FIRST), io.writes, io.in_flight), (3, 0, 0));
}

#[test]
fn a_write_that_waits_for_its_limit_and_a_snapshot_pays_once_and_keeps_its_first_wait() {
    // One command in 10 ms.
    let mut lab = Lab::new(iops(100, 1), 1);
    let host = lab.host(FIRST, 8, 4096);
    let queue = lab.hosts[host].queue;
    (0..3).for_each(|tag| lab.submit(host, tag, IoOp::Write));
    lab.rig.run(1000, |rig| rig.outstanding(queue) == 2).expect("the burst");
    let volume = Arc::clone(&lab.rig.volumes()[0]);
    lab.order(&volume, VolumeStep::Hold);
    // The limit lets both begin after 20 ms.
    lab.steps(10_000);
    lab.submit(host, 3, IoOp::Write);
    lab.steps(100);
    assert_eq!(lab.rig.outstanding(queue), 3, "writes are held");
    lab.order(&volume, VolumeStep::Access);
    lab.rig.run(20, |rig| rig.outstanding(queue) == 0).expect("nothing waits for a limit again");
    let delays = lab.rig.volume_delays(FIRST);
    assert_eq!(delays.commands, 2, "{delays:?}");
    assert!((29_000..31_000).contains(&delays.waited_us), "{delays:?}");
    let total = lab.rig.volume_times(FIRST).write.total;
    assert!((201_000..205_000).contains(&total.sum_us()), "both waits, of two: {total:?}");
}

#[test]
fn a_write_that_a_snapshot_held_waited_until_it_was_released() {
    let mut lab = Lab::new(Limits::default(), 1);
    let host = lab.host(FIRST, 8, 4096);
    let queue = lab.hosts[host].queue;
    let volume = Arc::clone(&lab.rig.volumes()[0]);
    lab.order(&volume, VolumeStep::Hold);
    lab.submit(host, 0, IoOp::Write);
    lab.steps(100);
    // The thread sleeps until control releases the write.
    lab.rig.skip(5000);
    lab.order(&volume, VolumeStep::Access);
    lab.rig.run(100, |rig| rig.outstanding(queue) == 0).expect("the answer");
    let queue = lab.rig.volume_times(FIRST).write.queue;
    assert!((50_000..52_000).contains(&queue.sum_us()), "{queue:?}");
}

#[test]
fn a_command_that_waited_for_a_limit_or_a_snapshot_is_slow() {
    let mut lab = Lab::new(iops(100, 1), 1);
    let host = lab.host(FIRST, 8, 4096);
    let queue = lab.hosts[host].queue;
    lab.rig.group_mut().tell_slow_ios(Duration::from_millis(5));
    (0..2).for_each(|tag| lab.submit(host, tag, IoOp::Read));
    lab.rig.run(2000, |rig| rig.outstanding(queue) == 0).expect("both answers");
    let now = lab.rig.now();
    let slow = lab.rig.group_mut().take_slow_io(now).expect("the second waited");
    assert_eq!((slow.volume, slow.opcode, slow.others), (FIRST, Opcode::Read, 0));
    assert!((9_000..11_000).contains(&slow.stages.queue), "{slow:?}");
    assert_eq!(slow.total, slow.stages.queue);

    lab.limit(Limits::default());
    let volume = Arc::clone(&lab.rig.volumes()[0]);
    lab.order(&volume, VolumeStep::Hold);
    lab.submit(host, 0, IoOp::Write);
    lab.steps(1000);
    lab.order(&volume, VolumeStep::Access);
    let later = now + Duration::from_secs(2);
    let slow = lab.rig.group_mut().take_slow_io(later).expect("it was held");
    assert_eq!((slow.opcode, slow.others), (Opcode::Write, 0));
    assert!((9_000..11_000).contains(&slow.total), "{slow:?}");
}
