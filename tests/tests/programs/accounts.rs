//! Limits on the resources that one host, or strangers, may take from a real target while another
//! host logs in.
//!
//! `beside_each_other` measures:
//! `cargo test -p rblk-tests --test programs accounts:: -- --ignored --nocapture`,
//! with `RBLK_BIN_DIR` also of other programs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rblk_fabric::ConnectOptions;
use rblk_initiator::volume::session::{Credentials, HostIdentity, Session};
use rblk_protocol::{HostId, Name};
use rblk_tests::hostile::Party;
use rblk_tests::hostile::crowd::Crowd;
use rblk_tests::hostile::noise::Transport;
use rblk_tests::hostile::rogue::{Door, Rogue, status_of};
use rblk_tests::hostile::wire::{Hello, feature, status};
use rblk_tests::lab::Witness;
use rblk_tests::program::{Target, wait_for};

/// The longest LOGIN during an attack. LOGINs once took up to 35 s.
const LOGIN_MAX: Duration = Duration::from_secs(2);
/// Strangers: far more than there are places for them.
const MEMBERS: u16 = 256;
/// Connections that name a session: more than there are places for them.
const JOINERS: u16 = 300;

struct Bed {
    target: Target,
    party: Party,
    _directory: tempfile::TempDir,
}

impl Bed {
    fn new(keys: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let party = Party::default();
        // The flag overrides this address.
        let listen = ["tcp://127.0.0.1:7721".to_owned()];
        let config = party.config_with(directory.path(), &listen, keys);
        let target = Target::start(directory.path(), &["--config", config.to_str().unwrap()]);
        Self { target, party, _directory: directory }
    }

    /// The rogue's entrance.
    fn door(&self) -> Door {
        self.party.door(&self.target.address, Transport::Tcp)
    }

    /// The honest host logs in and leaves. Returns the time until the LOGIN succeeded, and the
    /// number of refusals before.
    fn log_in(&self, keys: &Credentials) -> (Duration, u32) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let identity = HostIdentity { id: HostId([1; 16]), name: Name::new("h").unwrap() };
        let options = ConnectOptions { timeout: Duration::from_secs(20), ..Default::default() };
        let (begun, mut refused) = (Instant::now(), 0);
        runtime.block_on(async {
            loop {
                let address = &self.target.address;
                match Session::connect(address, &options, &identity, Some(keys), None).await {
                    Ok(session) => {
                        let took = begun.elapsed();
                        session.logout(options.timeout).await;
                        return (took, refused);
                    }
                    Err(error) => {
                        assert!(begun.elapsed() < Duration::from_secs(40), "{error}");
                        refused += 1;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            }
        })
    }

    fn logins(&self, count: usize) -> Vec<(Duration, u32)> {
        let keys = self.party.honest();
        (0..count).map(|_| self.log_in(&keys)).collect()
    }
}

/// Few sessions, so that a test fills its share in a moment.
const FEW: &str = "sessions_max = 64\n";

#[test]
fn one_host_leaves_sessions_to_others() {
    let bed = Bed::new(FEW);
    let door = bed.door();
    let mut held: Vec<Rogue> = Vec::new();
    let refused = loop {
        match door.try_login() {
            Ok(session) => held.push(session),
            Err(heard) => break heard.expect("an answer to LOGIN"),
        }
        assert!(held.len() <= 16, "one host has more than a quarter of 64 sessions");
    };
    assert_eq!((status_of(&refused), held.len()), (Some(status::LIMIT_REACHED), 16));
    bed.logins(4).iter().for_each(|(_, refused)| assert_eq!(*refused, 0));
    // These sessions held no volume, so the target keeps nothing of them for the lease of 30 s.
    drop(held);
    let begun = Instant::now();
    wait_for("their end", || bed.target.status().sessions.is_empty().then_some(()));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // Many sessions in sequence leave nothing, either.
    for _ in 0..100 {
        drop(door.login());
        wait_for("its end", || (bed.target.status().sessions.len() < 16).then_some(()));
    }
}

#[test]
fn a_known_host_logs_in_while_strangers_fill_every_place() {
    let bed = Bed::new("");
    let witness = Witness::start();
    let crowd = Crowd::start(bed.target.address.port, MEMBERS, true, &Hello::admin(feature::AUTH));
    wait_for("strangers in every place", || (bed.target.status().strangers >= 60).then_some(()));
    for n in 0..20 {
        let moment = witness.now();
        let (took, _) = bed.logins(1)[0];
        let lost = witness.lost_since(&moment);
        assert!(took < LOGIN_MAX + lost, "login {n} took {took:?}; {:?}", crowd.visits());
    }
    assert!(bed.target.status().strangers <= 64);
}

#[test]
fn unproven_joiners_do_not_block_queues_of_the_host() {
    let bed = Bed::new("");
    let door = bed.door();
    let rogue = door.login();
    for spread in [false, true] {
        let hello = Hello::io(rogue.session, rogue.epoch, 0, 0);
        let crowd = Crowd::start(bed.target.address.port, JOINERS, spread, &hello);
        std::thread::sleep(Duration::from_millis(500));
        // The host makes its queues.
        let queues: Vec<_> = (0..8).map(|queue| rogue.queue(&door, queue, 0)).collect();
        let sessions = bed.target.status().sessions;
        assert_eq!(sessions[0].connections, 1 + queues.len(), "{:?}", crowd.visits());
        drop((queues, crowd));
        wait_for("the end of its queues", || {
            (bed.target.status().sessions[0].connections == 1).then_some(())
        });
    }
}

/// A host that repeats an act in its own thread.
struct Busy {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Busy {
    fn start(mut work: impl FnMut() + Send + 'static) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stops, count) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            while !stops.load(Ordering::Relaxed) {
                work();
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { stop, done, thread: Some(thread) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn print(what: &str, mut logins: Vec<(Duration, u32)>) {
    logins.sort();
    let at = |part: usize| logins[(logins.len() * part / 100).min(logins.len() - 1)].0;
    let refused: u32 = logins.iter().map(|(_, refused)| refused).sum();
    println!(
        "{what:<44} {} logins, p50 {:.1?}, p99 {:.1?}, max {:.1?}, refused {refused}",
        logins.len(),
        at(50),
        at(99),
        at(100)
    );
}

#[test]
#[ignore = "a measurement"]
fn beside_each_other() {
    // As many logins as the time permits: few if each takes seconds.
    let measure = |bed: &Bed, what: &str| {
        let keys = bed.party.honest();
        let (until, mut all) = (Instant::now() + Duration::from_secs(15), Vec::new());
        while Instant::now() < until && all.len() < 2000 {
            all.push(bed.log_in(&keys));
        }
        print(what, all);
    };
    let bed = Bed::new("");
    measure(&bed, "alone");
    let door = bed.door();
    let busy = Busy::start(move || drop(door.try_login()));
    // The old programs had no session left after this time.
    std::thread::sleep(Duration::from_secs(8));
    measure(&bed, "(a) one host logs in and hangs up");
    println!("    {} logins of that host", busy.done.load(Ordering::Relaxed));
    drop((busy, bed));
    for members in [64, MEMBERS] {
        let bed = Bed::new("");
        let hello = Hello::admin(feature::AUTH);
        let crowd = Crowd::start(bed.target.address.port, members, true, &hello);
        std::thread::sleep(Duration::from_secs(1));
        measure(&bed, &format!("(b) {members} strangers of 64 addresses"));
        println!("    visits that ended, refused ones: {:?}", crowd.visits());
    }
    for (members, spread) in [(64, false), (64, true), (JOINERS, false), (JOINERS, true)] {
        let bed = Bed::new("");
        let door = bed.door();
        let victim = door.login();
        let hello = Hello::io(victim.session, victim.epoch, 0, 0);
        let crowd = Crowd::start(bed.target.address.port, members, spread, &hello);
        std::thread::sleep(Duration::from_secs(1));
        let from = if spread { "64 addresses" } else { "the host's address" };
        measure(&bed, &format!("(c) {members} who join, of {from}"));
        println!("    visits that ended, refused ones: {:?}", crowd.visits());
    }
}
