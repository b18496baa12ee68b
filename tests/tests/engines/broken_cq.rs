//! Completion queues that break, as after an overrun or after the loss of a device: their
//! connections end and come back by another one, and no other queue notices.

use rblk_fabric::WcStatus;
use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, ConnectionKind, Tag};
use rblk_rig::inprocess::{
    CqFault, QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec, breakable,
};
use rblk_rig::ram_store::RamStore;
use rblk_target::data::poll_group::ToGroup;
use rblk_target::volume::ids::{AdmissionId, SessionIndex, VolumeIndex};
use rblk_tests::bed::{PATIENCE, pattern};

const VOLUME: VolumeIndex = VolumeIndex(0);
const BYTES: usize = 1 << 20;
const IO: usize = 16 << 10;

/// A target with two devices, and a session with a queue by each.
struct Two {
    rig: Rig<RamStore>,
    image: Vec<u8>,
    sessions: [SessionIndex; 2],
    queues: [QueueId; 2],
    reads: [usize; 2],
}

impl Two {
    fn new() -> Self {
        let options = RigOptions {
            devices: 2,
            late_rdma: true,
            destroy_steps: 50,
            io_max_bytes: 64 << 10,
            volumes: vec![VolumeSpec::new(VolumeKind::Store, BYTES as u64)],
            ..RigOptions::default()
        };
        let image = pattern(3, BYTES);
        let mut rig = Rig::new(&options, |region| {
            let mut store = RamStore::new(region, 1);
            store.set_volume(VOLUME, image.clone());
            store
        })
        .expect("a rig");
        let [one, other] = [(); 2].map(|()| {
            let session = rig.begin_session();
            rig.open(session, VOLUME, AccessMode::Shared);
            let options =
                QueueOptions { depth: 4, io_max_bytes: 64 << 10, ..QueueOptions::default() };
            (session, rig.add_queue(session, VOLUME, options).expect("a queue"))
        });
        rig.settle(PATIENCE).expect("two paths");
        let (sessions, queues) = ([one.0, other.0], [one.1, other.1]);
        Self { rig, image, sessions, queues, reads: [0; 2] }
    }

    /// Both queues always have reads outstanding. Each read must return the right bytes.
    fn step(&mut self) {
        for (at, queue) in self.queues.into_iter().enumerate() {
            for tag in 0..4u16 {
                let from = (self.reads[at] * 7 + usize::from(tag) * 31) * 512 % (BYTES - IO);
                let io = self.rig.request(queue, IoOp::Read, from as u64, IO as u64);
                // The tag is in use, or the request begins.
                let _ = self.rig.submit(queue, Tag(tag), io);
            }
        }
        self.rig.step();
        for outcome in self.rig.take_outcomes() {
            let at = usize::from(outcome.queue == self.queues[1]);
            assert_eq!(usize::try_from(outcome.result), Ok(IO), "queue {at}");
            let data = self.rig.buffer(outcome.queue, outcome.tag, IO);
            let places = self.image.windows(IO).step_by(512).filter(|place| *place == data);
            assert_eq!(places.count(), 1, "queue {at} read what is nowhere");
            self.reads[at] += 1;
        }
    }

    fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        for _ in 0..PATIENCE {
            if so(self) {
                return;
            }
            self.step();
        }
        panic!("{what}: {:?}", self.rig);
    }
}

#[test]
fn a_target_goes_on_by_its_other_devices() {
    for how in [CqFault::Poll, CqFault::Arm] {
        let mut two = Two::new();
        two.until("reads by both", |two| two.reads.iter().all(|reads| *reads > 20));
        two.rig.break_cq(0, 0, how);
        if how == CqFault::Arm {
            // The thread arms its CQs before it sleeps.
            two.rig.group_mut().arm();
        }
        let queues = two.queues;
        two.until("the path to end", |two| !two.rig.is_connected(queues[0]));
        assert!(matches!(two.rig.take_path_ends(queues[0])[..], [PathEnd::Lost(_)]), "{how:?}");
        let before = two.reads[1];
        two.until("the QPs to be destroyed", |two| two.rig.cq_news(0, 0).gone == 1);
        two.until("the other to go on", |two| two.reads[1] > before + 100);
        // Asked once and reported once, not in each turn.
        let news = two.rig.cq_news(0, 0);
        assert_eq!((news.broken, news.gone, news.asked), (1, 1, 1), "{how:?}");
        assert_eq!(two.rig.connections(two.sessions[0]), 0, "{how:?}");
        // A connection that control sends there by mistake is refused and reported.
        two.rig.reconnect(queues[0]).expect("a try");
        let session = two.sessions[0];
        two.until("the refusal", |two| two.rig.connections(session) == 0);
        // The device is repaired: another CQ takes the place.
        two.rig.mend_cq(0, 0).expect("a CQ");
        two.rig.reconnect(queues[0]).expect("a path");
        let before = two.reads[0];
        two.until("reads by the mended one", |two| two.reads[0] > before + 100);
        assert!(two.rig.take_path_ends(queues[1]).is_empty(), "{how:?}: the other lost its path");
        assert_eq!(two.rig.cq_news(0, 1), Default::default(), "{how:?}");
        two.rig.mail(ToGroup::Stop);
        two.rig.run(PATIENCE, |rig| rig.stopped().is_some()).expect("an end");
        assert_eq!(two.rig.stopped(), Some(true), "{how:?}");
    }
}

#[test]
fn a_broken_queue_of_an_idle_device_is_noticed_and_empty_at_once() {
    let mut two = Two::new();
    let session = two.sessions[0];
    let queue = two.queues[0];
    two.rig.disconnect(queue);
    two.rig.run(PATIENCE, |rig| rig.connections(session) == 0).expect("it leaves");
    two.rig.break_cq(0, 0, CqFault::Poll);
    two.rig.run(PATIENCE, |rig| rig.cq_news(0, 0).gone == 1).expect("it is given back");
}

#[test]
fn an_initiator_connects_again() {
    for how in [CqFault::Poll, CqFault::Arm] {
        let mut two = Two::new();
        let queue = two.queues[0];
        let (buffers, epoch) = (two.rig.buffers(queue).clone(), two.rig.epoch(two.sessions[0]));
        let join = rblk_rig::inprocess::Join {
            admission: AdmissionId(0),
            session: two.sessions[0],
            epoch,
            kind: ConnectionKind::Io { queue: 0 },
        };
        let options = QueueOptions { depth: 4, io_max_bytes: 64 << 10, ..QueueOptions::default() };
        let volume = rblk_protocol::VolumeHandle(1);
        let (mut path, wires) = two.rig.path(&[join], volume, options, &buffers).expect("a path");
        let (poller, breaker) = breakable(path.poller);
        path.poller = poller;
        two.rig.give_path(queue, path, wires);
        two.until("reads by both", |two| two.reads.iter().all(|reads| *reads > 20));
        let _ = two.rig.take_path_ends(queue);
        breaker.break_it(how);
        if how == CqFault::Arm {
            assert!(!two.rig.engine_mut(queue).arm(), "a broken CQ cannot be asked");
            assert!(two.rig.engine_mut(queue).arm(), "and is nobody's after that");
        }
        two.until("the path to end", |two| !two.rig.is_connected(queue));
        two.step();
        let ends = two.rig.take_path_ends(queue);
        assert_eq!(ends, [PathEnd::Lost(WcStatus::Other(0))], "{how:?}");
        assert_eq!(breaker.asked(), 1, "{how:?}");
        assert_eq!(two.rig.outstanding(queue), 4, "requests wait");
        two.rig.reconnect(queue).expect("another path");
        let before = two.reads;
        two.until("reads by both again", |two| {
            two.reads[0] > before[0] + 50 && two.reads[1] > before[1] + 50
        });
        assert!(two.rig.take_path_ends(two.queues[1]).is_empty(), "{how:?}: the other's path");
    }
}
