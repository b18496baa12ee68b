//! A mount that gives up on its target after a time limit (`--fail-after`).

use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Aligned, DEADLINE, Lab, Mounted, Target, TargetFlags, Witness, begin, pattern, run, until,
};

use super::{DETECT, MIB, PATIENCE, SLACK, flags, serve_file};

const FAIL_AFTER: Duration = Duration::from_secs(3);
/// A refusal comes at once: in far less than any of the times above.
const AT_ONCE: Duration = Duration::from_secs(1);
const LEN: usize = 64 << 10;
/// The place of reads, and the place of writes.
const READ_AT: u64 = MIB;
const WRITE_AT: u64 = 8 * MIB;

/// The result of a request, and its time.
type Ended = (std::io::Result<()>, Instant);

struct GivesUp<'l> {
    lab: &'l Lab,
    target_flags: TargetFlags,
    target: Option<Target<'l>>,
    mounted: Mounted<'l>,
    device: Arc<File>,
    witness: Rc<Witness>,
    // Selects the data of the last successful write.
    version: u64,
}

impl<'l> GivesUp<'l> {
    fn new(lab: &'l Lab) -> Self {
        let target_flags = serve_file(lab, 64 * MIB);
        let target = Some(Target::start(lab, &target_flags));
        let mounted = Mounted::new(lab, &flags(lab.rdma()).flag("--fail-after", "3s"));
        let device = Arc::new(Aligned::open(mounted.device(), true, 0).expect("opening"));
        Aligned::write_at(&device, &pattern(1, LEN), READ_AT).expect("writing");
        let witness = Rc::new(Witness::start());
        Self { lab, target_flags, target, mounted, device, witness, version: 1 }
    }

    fn read(&self) -> Receiver<Ended> {
        let device = Arc::clone(&self.device);
        begin(move || (Aligned::read_at(&device, LEN, READ_AT).map(drop), Instant::now()))
    }

    /// A write of data that must never be found.
    fn write(&self) -> Receiver<Ended> {
        let device = Arc::clone(&self.device);
        begin(move || (Aligned::write_at(&device, &pattern(0, LEN), WRITE_AT), Instant::now()))
    }

    /// A read and a write end with EIO. Returns the times of the first and of the last one after
    /// `since`.
    fn fail(&self, requests: [Receiver<Ended>; 2], since: Instant) -> (Duration, Duration) {
        let times = ["read", "write"].into_iter().zip(requests).map(|(what, request)| {
            let (result, ended) = request.recv_timeout(PATIENCE).unwrap_or_else(|error| {
                panic!("a {what}: {error} after {PATIENCE:?}: {:?}", self.mounted.look())
            });
            let errno = result.expect_err(what).raw_os_error();
            assert_eq!(errno, Some(libc::EIO), "a {what}");
            ended - since
        });
        let times: Vec<Duration> = times.collect();
        (times[0].min(times[1]), times[0].max(times[1]))
    }

    /// The target dies while requests are under way, and stays away. Then the disk fails requests.
    fn lose_target(&mut self) -> Result<(), String> {
        let begun = self.witness.now();
        let target = self.target.take().expect("a target");
        let before = self.mounted.status().total;
        let since = Instant::now();
        let frozen = target.freeze();
        let requests = [self.read(), self.write()];
        until("requests to be on their way", DEADLINE, || {
            let status = self.mounted.status();
            // If the machine stands still, the path may be lost first.
            (status.total.sends > before.sends || status.state != "connected").then_some(())
        });
        target.kill();
        drop(frozen);
        // The mount notices the loss when the target stops, not earlier.
        let (first, last) = self.fail(requests, since);
        let lost = self.witness.lost_since(&begun);
        // Every later request fails at once.
        let begun = self.witness.now();
        let mut refused = Duration::ZERO;
        for _ in 0..5 {
            let since = Instant::now();
            let requests = [self.read(), self.write()];
            refused = refused.max(self.fail(requests, since).1);
            std::thread::sleep(Duration::from_millis(200));
        }
        let lost_later = self.witness.lost_since(&begun);
        println!(
            "{}: requests failed after {first:.2?} and {last:.2?}, later ones within {refused:.2?}",
            self.lab.test()
        );
        let status = self.mounted.status();
        assert_ne!(status.state, "connected");
        assert!(status.total.errors - before.errors >= 12, "they are counted: {status:?}");
        // The limit holds even if the machine stood still and the path ended earlier.
        if first < FAIL_AFTER || last > DETECT + FAIL_AFTER + SLACK + lost {
            return Err(format!("requests failed after {first:?} and {last:?}"));
        }
        if refused > AT_ONCE + lost_later {
            return Err(format!("a request waited for {refused:?} although others had failed"));
        }
        Ok(())
    }

    /// The target comes back, and the disk works again. Failed writes left nothing.
    fn come_back(&mut self) {
        let replayed = self.mounted.status().total.replayed;
        self.target = Some(Target::start(self.lab, &self.target_flags));
        self.mounted.wait_connected();
        self.version += 1;
        let data = pattern(self.version, LEN);
        Aligned::write_at(&self.device, &data, WRITE_AT).expect("writing");
        let errors = self.mounted.status().total.errors;
        let check = |file: &File| {
            for (at, data) in [(READ_AT, &pattern(1, LEN)), (WRITE_AT, &data)] {
                let found = Aligned::read_at(file, LEN, at).expect("reading");
                assert!(found == *data, "other bytes at {at}");
            }
        };
        check(&self.device);
        self.device.sync_all().expect("fsync");
        check(&File::open(self.lab.path("v0.img")).expect("the image"));
        let status = self.mounted.status();
        assert_eq!(status.total.errors, errors, "all is well again");
        assert_eq!(status.total.replayed, replayed, "what failed is not sent again");
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fail_after_is_kept() {
    run("fail_after_is_kept", |lab| {
        let mut life = GivesUp::new(lab);
        let node = life.mounted.node();
        for round in 0..lab.times(2, 5) {
            let witness = Rc::clone(&life.witness);
            witness.judge(&format!("{}: {round}", lab.test()), || {
                let result = life.lose_target();
                life.come_back();
                result
            });
        }
        assert_eq!(life.mounted.node(), node, "the device is another one");
        let GivesUp { mounted, device, .. } = life;
        drop(device);
        mounted.umount();
    });
}
