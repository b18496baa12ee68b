//! Members of a group over a real Ceph cluster: a program that knows all of them compares all
//! that it reads with a model, while the member that serves it is killed, stopped and continued,
//! and hands over.
//!
//! The program is `rblk-client`: a mount without a block device. Each test makes a cluster of its
//! own on loopback.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rblk_client::{Config, Options, Queue, Request, Volume};
use rblk_config::ByteSize;
use rblk_initiator::volume::session::VolumeClaim;
use rblk_protocol::AccessMode;
use rblk_rig::seed::Random;
use rblk_tests::bed::pattern;
use rblk_tests::lab::ceph::CephCluster;
use rblk_tests::long::times;
use rblk_tests::program::{Client, Ended, Target, program, run};

const BLOCK: usize = 4096;
/// Blocks of the volume.
const BLOCKS: usize = 1024;
/// How long a take-over may take before a test gives up. The cluster takes 30 s to drop a dead
/// client, and a damped member waits for that.
const PATIENCE: Duration = Duration::from_secs(120);

/// Members, A and B and perhaps C, and their cluster.
struct Group {
    members: Vec<Target>,
    // Their directories and arguments.
    places: Vec<(PathBuf, String)>,
    // Dropped after the members.
    cluster: CephCluster,
}

impl Group {
    /// A group of A and B with the image `rbd/v` as the volume `v`, which A serves.
    fn start(cache: &str) -> Self {
        Self::start_with(&["a", "b"], cache)
    }

    /// The same with these members.
    fn start_with(members: &[&str], cache: &str) -> Self {
        let cluster = CephCluster::start("bluestore", 1);
        cluster.run("rbd create --size 4M rbd/v");
        let place = |member: &&str| {
            let directory = cluster.directory().join(member);
            std::fs::create_dir(&directory).unwrap();
            let (file, conf) = (directory.join("target.toml"), cluster.conf());
            let text = format!(
                "name = 'store'\nmember = '{member}'\n[[volume]]\nname = 'v'\nstore = 'rbd'\nimage = 'rbd/v'\n\
                 ceph_conf = '{}'\ncache = '{cache}'\n",
                conf.display()
            );
            std::fs::write(&file, text).unwrap();
            (directory, file.display().to_string())
        };
        let places: Vec<_> = members.iter().map(place).collect();
        let members = places
            .iter()
            .map(|(directory, file)| Target::start(directory, &["--config", file]))
            .collect();
        let group = Self { members, places, cluster };
        assert_eq!(group.owner(), Some(0), "{}", group.logs());
        group
    }

    fn restart(&mut self, member: usize) {
        let (directory, file) = &self.places[member];
        self.members[member].start_again(directory, &["--config", file]);
    }

    /// Whether a member serves the volume.
    fn serves(&self, member: usize) -> bool {
        self.members[member].status_if_any().is_some_and(|status| !status.volumes.is_empty())
    }

    /// The member that serves the volume.
    fn owner(&self) -> Option<usize> {
        (0..self.members.len()).find(|member| self.serves(*member))
    }

    /// Why a member does not serve the volume.
    fn why_away(&self, member: usize) -> Option<String> {
        let status = self.members[member].status_if_any()?;
        status.volumes_away.first().map(|away| away.why.clone())
    }

    fn command(&self, member: usize, words: &[&str]) -> Ended {
        let mut command = Command::new(program("rblk-target"));
        command.args(words).arg("--control-socket").arg(&self.members[member].socket);
        run(&mut command)
    }

    #[track_caller]
    fn until(&self, what: &str, mut look: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !look() {
            assert!(Instant::now() < deadline, "{what} did not happen\n{}", self.logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn logs(&self) -> String {
        let of =
            |(at, member): (usize, &Target)| format!("the log of member {at}:\n{}", member.log());
        self.members.iter().enumerate().map(of).collect::<Vec<_>>().join("\n")
    }

    /// The configuration of a program that knows both members.
    fn mount(&self, retain: u64) -> Config {
        let mut config = Config::new(self.members[0].address.to_string(), "v");
        config.target = self.members.iter().map(|member| member.address.to_string()).collect();
        config.queue_depth = 8;
        config.max_io = ByteSize(64 << 10);
        config.reconnect_delay = rblk_config::Duration::from_millis(20);
        config.retain = ByteSize(retain);
        config
    }

    /// The bytes of the image, as Ceph has them.
    fn exported(&self) -> Vec<u8> {
        let file = self.cluster.directory().join("export");
        self.cluster.run(&format!("rbd export --no-progress rbd/v {}", file.display()));
        std::fs::read(file).unwrap()
    }
}

/// The bytes of a block in a version; the first one has zeros.
fn content(block: usize, version: u64) -> Vec<u8> {
    match version {
        0 => vec![0; BLOCK],
        _ => pattern((block as u64) << 32 | version, BLOCK),
    }
}

/// A program that writes and compares, until it is told to end.
struct Load {
    ends: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    // The longest round since it was asked for last, in milliseconds.
    longest: Arc<AtomicU64>,
    thread: JoinHandle<(Queue, Vec<u64>, Duration)>,
    volume: Volume,
}

impl Load {
    fn start(group: &Group, retain: u64) -> Self {
        let mut volume = Options::new(group.mount(retain)).host_id([7; 16]).open().unwrap();
        let queue = volume.queue().unwrap();
        let (ends, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, counted) = (Arc::clone(&ends), Arc::clone(&rounds));
        let longest = Arc::new(AtomicU64::new(0));
        let waited = Arc::clone(&longest);
        let thread = thread::spawn(move || exercise(queue, &told, (&counted, &waited)));
        Self { ends, rounds, longest, thread, volume }
    }

    /// Waits until the program has done more.
    #[track_caller]
    fn goes_on(&self, group: &Group) {
        let before = self.rounds.load(Ordering::Relaxed);
        group.until("more requests of the program", || {
            assert!(!self.thread.is_finished(), "the program has failed\n{}", group.logs());
            self.rounds.load(Ordering::Relaxed) > before + 20
        });
    }

    /// Prints for how long the program has waited since the last call.
    fn tell_pause(&self, of: &str) {
        println!("{of}: the longest wait {} ms", self.longest.swap(0, Ordering::Relaxed));
    }

    /// Ends the program, and compares all with the volume and with the image.
    fn end(self, group: &Group) {
        self.ends.store(true, Ordering::Relaxed);
        let (mut queue, model, longest) = self.thread.join().unwrap();
        let expected: Vec<u8> = model
            .iter()
            .enumerate()
            .flat_map(|(block, version)| content(block, *version))
            .collect();
        for at in (0..expected.len()).step_by(64 << 10) {
            let buffer = queue.buffer().unwrap();
            queue.submit(Request::read(buffer, at as u64, 64 << 10)).unwrap();
            let done = ended(&mut queue, 1).pop().unwrap();
            assert_eq!(done.result, Ok(64 << 10));
            let mut found = vec![0; 64 << 10];
            done.buffer.unwrap().read(0, &mut found);
            assert!(found == expected[at..at + (64 << 10)], "at {at}");
        }
        assert_eq!((queue.counts().errors, self.volume.losses()), (0, 0));
        let requests = queue.counts().answered;
        drop(queue);
        self.volume.close().unwrap();
        println!("{requests} requests, the longest wait {longest:?}");
        assert!(group.exported() == expected, "the image differs from the volume");
    }
}

/// Waits for so many completions.
fn ended(queue: &mut Queue, count: usize) -> Vec<rblk_client::Completion> {
    let (mut done, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    while done.len() < count {
        assert!(Instant::now() < deadline, "no answer: {queue:?}");
        queue.wait(&mut done, Duration::from_millis(100)).unwrap();
    }
    done
}

/// Random writes and reads of a few blocks at once, and flushes. Returns the versions of the
/// blocks, and the longest time that a few requests took.
fn exercise(
    mut queue: Queue,
    ends: &AtomicBool,
    (rounds, waited): (&AtomicU64, &AtomicU64),
) -> (Queue, Vec<u64>, Duration) {
    let (mut random, mut model) = (Random::new(42), vec![0_u64; BLOCKS]);
    let mut longest = Duration::ZERO;
    let mut version = 0;
    while !ends.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let first = random.index(BLOCKS);
        // Each block once, and often blocks that the cache has.
        let blocks: Vec<usize> = (0..6).map(|n| (first % 64 + n * 160) % BLOCKS).collect();
        let mut reads = vec![None; blocks.len()];
        for (token, block) in blocks.iter().copied().enumerate() {
            let mut buffer = queue.buffer().unwrap();
            let at = (block * BLOCK) as u64;
            let request = if random.chance(500) {
                version += 1;
                model[block] = version;
                buffer.write(0, &content(block, version));
                Request::write(buffer, at, BLOCK)
            } else {
                reads[token] = Some(block);
                Request::read(buffer, at, BLOCK)
            };
            queue.submit(request.with_token(token as u64)).unwrap();
        }
        let mut done = ended(&mut queue, blocks.len());
        if random.chance(200) {
            queue.submit(Request::flush().with_token(99)).unwrap();
            done.extend(ended(&mut queue, 1));
        }
        for done in done {
            assert!(done.result.is_ok(), "{done:?}");
            let Some(Some(block)) = reads.get(usize::try_from(done.token).unwrap()) else {
                continue;
            };
            let mut found = vec![0; BLOCK];
            done.buffer.unwrap().read(0, &mut found);
            assert!(found == content(*block, model[*block]), "block {block}: stale or torn");
        }
        longest = longest.max(begun.elapsed());
        let round = u64::try_from(begun.elapsed().as_millis()).unwrap();
        waited.fetch_max(round, Ordering::Relaxed);
        rounds.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(2));
    }
    (queue, model, longest)
}

/// The owner is killed. Another host asks for the volume first, and does not get it.
fn kill(group: &mut Group, load: &Load) {
    let owner = group.owner().expect("an owner");
    let other = 1 - owner;
    group.members[owner].kill();
    let address = group.members[other].address.clone();
    let stranger = thread::spawn(move || Client::connect(&address, "v", 9).map(drop));
    group.until("the take-over", || group.serves(other));
    load.goes_on(group);
    assert!(stranger.join().unwrap().is_err(), "the volume has a holder");
    group.restart(owner);
    assert!(!group.serves(owner) && group.serves(other), "{}", group.logs());
}

/// The owner stands still, is replaced, and goes on.
fn pause(group: &Group, load: &Load) {
    let owner = group.owner().expect("an owner");
    let other = 1 - owner;
    group.members[owner].pause();
    group.until("the take-over", || {
        group.members[other].status_if_any().is_some_and(|status| !status.volumes.is_empty())
    });
    load.goes_on(group);
    group.members[owner].go_on();
    // The loss of the image, or the question of the other member, reaches it first.
    group.until("the end of the volume there", || {
        !group.serves(owner) && group.why_away(owner).is_some()
    });
    load.goes_on(group);
    assert!(group.serves(other), "{}", group.logs());
}

/// The owner hands over.
fn hand_over(group: &Group, load: &Load) {
    let owner = group.owner().expect("an owner");
    let before = group.cluster.fenced();
    let moved = group.command(owner, &["volume", "move", "v"]);
    assert_eq!(moved.code, Some(0), "{moved:?}\n{}", group.logs());
    group.until("the hand-over", || group.serves(1 - owner));
    load.goes_on(group);
    assert!(!group.serves(owner));
    assert_eq!(group.cluster.fenced(), before, "a hand-over fences nobody");
}

fn verified_through_take_overs(cache: &str, retain: u64) {
    let mut group = Group::start(cache);
    let load = Load::start(&group, retain);
    load.goes_on(&group);
    for round in 0..times(2, 10) {
        println!("round {round}");
        kill(&mut group, &load);
        hand_over(&group, &load);
        pause(&group, &load);
        // The member that was stopped lost the volume by force, and takes no image back by force
        // for half a minute: it gets this one in good order.
        hand_over(&group, &load);
    }
    load.end(&group);
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_program_sees_no_wrong_byte_through_take_overs_written_through() {
    verified_through_take_overs("write-through", 0);
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_program_sees_no_wrong_byte_through_take_overs_written_back_and_retained() {
    verified_through_take_overs("write-back", 4 << 20);
}

/// A member is told to move the volume, and then the program goes on at the named one.
#[track_caller]
fn moves(group: &Group, load: &Load, (told, to): (usize, usize)) {
    let names = ["a", "b", "c"];
    load.tell_pause("before");
    let began = Instant::now();
    let moved = group.command(told, &["volume", "move", "v", "--to", names[to]]);
    println!("to {}: {:?} in {:?}", names[to], moved.stdout, began.elapsed());
    assert_eq!(moved.code, Some(0), "{moved:?}\n{}", group.logs());
    assert_eq!(group.owner(), Some(to), "the answer comes when it serves\n{}", group.logs());
    load.goes_on(group);
    load.tell_pause(&format!("to {}", names[to]));
    // The way of the program leads over other members.
    assert_eq!(group.owner(), Some(to), "{}", group.logs());
}

/// The volume goes to the member that is named, and to no member that is not there.
#[track_caller]
fn named_and_no_other(cache: &str, retain: u64) {
    let mut group = Group::start_with(&["a", "b", "c"], cache);
    let load = Load::start(&group, retain);
    load.goes_on(&group);
    let before = group.cluster.fenced();
    // Told by the owner, past the next address of the program; and by the member that takes it.
    for (told, to) in [(0, 2), (2, 1), (0, 0), (0, 1)] {
        moves(&group, &load, (told, to));
    }
    let away = |member: usize| {
        let status = group.members[member].status_if_any()?;
        let away = status.volumes_away.into_iter().next()?;
        (away.elsewhere && !away.handed_over).then_some(away.why)
    };
    group.until("what the former owner knows", || {
        away(0).is_some_and(|why| why.contains("member `b` of this target serves it"))
    });
    let refused = |told: usize, to: &str, why: &str| {
        let began = Instant::now();
        let said = group.command(told, &["volume", "move", "v", "--to", to]);
        println!("{:?}: {}", began.elapsed(), said.stderr.trim());
        assert!(said.code != Some(0) && said.stderr.contains(why), "{said:?}\n{}", group.logs());
        assert_eq!(group.owner(), Some(1), "it stays\n{}", group.logs());
    };
    refused(1, "b", "member `b` serves v already");
    refused(1, "nobody", "no member `nobody` of this target answers");
    // Neither the owner nor the member that is to have it.
    refused(2, "a", "the order did not come from it");
    load.tell_pause("refused");
    group.members[0].pause();
    refused(1, "a", "no member `a` of this target answers");
    group.members[0].go_on();
    group.until("a member that goes on", || group.members[0].status_if_any().is_some());
    load.goes_on(&group);
    assert_eq!(group.owner(), Some(1), "it takes nothing later");
    assert_eq!(group.cluster.fenced(), before, "a move fences nobody");
    load.tell_pause("beside a member that stood still");
    group.members[2].kill();
    let said = group.command(1, &["volume", "move", "v", "--to", "c"]);
    println!("a dead member: {}", said.stderr.trim());
    assert!(said.stderr.contains("no member `c` of this target answers"), "{said:?}");
    assert!(group.serves(1), "{}", group.logs());
    load.goes_on(&group);
    group.restart(2);
    moves(&group, &load, (1, 2));
    load.end(&group);
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_volume_moves_to_the_member_that_is_named_written_through() {
    named_and_no_other("write-through", 0);
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_volume_moves_to_the_member_that_is_named_written_back() {
    named_and_no_other("write-back", 0);
}

/// A volume that nobody serves is a fault of the member that handed it over, until one takes it.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_volume_that_was_handed_over_is_named_until_a_member_takes_it() {
    let mut group = Group::start("write-through");
    group.members[1].terminate();
    assert_eq!(group.members[1].wait(), Some(0), "{}", group.logs());
    let moved = group.command(0, &["volume", "move", "v"]);
    assert_eq!(moved.code, Some(0), "{moved:?}");
    let said = group.command(0, &["status"]);
    println!("{}", said.stdout);
    assert!(said.stdout.contains("volume `v` is not served: it was handed over"), "{said:?}");
    assert!(said.stdout.contains("`rblk-target volume move v --to MEMBER`"), "{said:?}");
    group.restart(1);
    let is_found = || {
        let status = group.members[0].status();
        status.volumes_away[0].elsewhere && status.volumes_away[0].why.contains("member `b`")
    };
    group.until("the new owner", is_found);
    // A volume of the group that comes by a reload is another member's, too.
    group.cluster.run("rbd create --size 4M rbd/w");
    let conf = group.cluster.conf().display().to_string();
    let added = group.command(0, &["volume", "add", "w", "--rbd", "rbd/w", "--ceph-conf", &conf]);
    assert_eq!(added.code, Some(0), "{added:?}");
    let more =
        format!("[[volume]]\nname = 'w'\nstore = 'rbd'\nimage = 'rbd/w'\nceph_conf = '{conf}'\n");
    let (_, file) = &group.places[1];
    let text = std::fs::read_to_string(file).unwrap();
    std::fs::write(file, text + &more).unwrap();
    let reloaded = group.command(1, &["reload"]);
    println!("{reloaded:?}");
    assert!(matches!(reloaded.code, Some(0 | 12)), "{reloaded:?}");
    let status = group.members[1].status();
    let [away] = &status.volumes_away[..] else { panic!("{:?}", status.volumes_away) };
    assert!(away.elsewhere && away.why.contains("member `a`"), "{away:?}");
    assert!(!group.members[1].log().contains(" WARN "), "{}", group.logs());
}

/// Dirty blocks of a lost image are told once. Their record is at the next owner, who knows.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_member_that_lost_a_volume_with_dirty_blocks_does_not_complain_for_ever() {
    let group = Group::start("write-back");
    let mut client = Client::connect(&group.members[0].address, "v", 1).unwrap();
    let verifier = client.volume.verifier;
    client.write(0, &pattern(1, BLOCK));
    let owner = group.cluster.lock_owner("rbd/v").unwrap();
    group.cluster.run(&format!("ceph osd blocklist add {owner}"));
    group.until("the loss", || group.why_away(0).is_some_and(|why| why.contains("is lost")));
    thread::sleep(Duration::from_secs(1));
    let complaints = || group.members[0].log().matches("ERROR").count();
    let before = complaints();
    thread::sleep(Duration::from_secs(4));
    assert_eq!(complaints(), before, "{}", group.logs());
    // The host learns of the loss at the other member.
    let generation = client.volume.generation;
    let returns = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    let mut resumed = None;
    group.until("the take-over", || {
        resumed = Client::claim(&group.members[1].address, "v", 1, returns).ok();
        resumed.is_some()
    });
    let resumed = resumed.unwrap();
    assert_eq!(resumed.volume.generation, generation);
    assert_ne!(resumed.volume.verifier, verifier, "writes are lost");
    resumed.logout();
}

/// A host that only reads could read old data from a member that is cut off.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_host_that_only_reads_is_told_to_use_a_snapshot() {
    let group = Group::start("write-through");
    let address = &group.members[0].address;
    let error = Client::claim(address, "v", 1, AccessMode::ReadOnly).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rbd snap create") && text.contains("read old data"), "{text}");
    group.cluster.run("rbd snap create --no-progress rbd/v@s");
    let conf = group.cluster.conf().display().to_string();
    let added = group.command(0, &["volume", "add", "s", "--rbd", "rbd/v@s", "--ceph-conf", &conf]);
    assert_eq!(added.code, Some(0), "{added:?}");
    Client::claim(address, "s", 1, AccessMode::ReadOnly).unwrap().logout();
}

/// The version that the image has of its first block after an owner went on that stood still in the
/// middle of a write of version 2, and was replaced meanwhile, by a member that wrote version 3.
/// `entry`: the owner is fenced for so many seconds by then, and not as long as the member said.
fn version_after_a_late_write(entry: Option<u32>) -> u64 {
    let group = Group::start("write-through");
    let owner = group.cluster.lock_owner("rbd/v").unwrap();
    let mut config = group.mount(0);
    config.target.truncate(1);
    let mut volume = Options::new(config).host_id([7; 16]).open().unwrap();
    let mut queue = volume.queue().unwrap();
    let write = |queue: &mut Queue, version: u64| {
        let mut buffer = queue.buffer().unwrap();
        buffer.write(0, &content(0, version));
        queue.submit(Request::write(buffer, 0, BLOCK)).unwrap();
    };
    write(&mut queue, 1);
    assert_eq!(ended(&mut queue, 1).pop().unwrap().result, Ok(BLOCK));
    // The write is in the owner's client of the cluster, which has nobody to send it to.
    group.cluster.script("osd-kill 0");
    write(&mut queue, 2);
    let mut done = Vec::new();
    for _ in 0..20 {
        queue.wait(&mut done, Duration::from_millis(100)).unwrap();
    }
    assert!(done.is_empty(), "{done:?}");
    group.members[0].pause();
    group.cluster.script("osd-start 0");
    let (address, mut other) = (&group.members[1].address, None);
    group.until("the take-over", || {
        let takes_over = VolumeClaim { take_over: true, ..AccessMode::Exclusive.into() };
        other = Client::claim(address, "v", 9, takes_over).ok();
        other.is_some()
    });
    let mut other = other.unwrap();
    other.write(0, &content(0, 3));
    other.flush();
    let is_fenced = || group.cluster.fenced().iter().any(|line| line.contains(&owner));
    assert!(is_fenced());
    match entry {
        Some(seconds) => {
            // An entry that is there is not changed.
            group.cluster.run(&format!("ceph osd blocklist rm {owner}"));
            group.cluster.run(&format!("ceph osd blocklist add {owner} {seconds}"));
            let began = Instant::now();
            group.until("the end of the entry", || !is_fenced());
            println!("an entry of {seconds} s was there for {:?}", began.elapsed());
        }
        None => thread::sleep(Duration::from_secs(12)),
    }
    group.members[0].go_on();
    group.until("the end of the volume there", || group.why_away(0).is_some());
    println!("the owner that went on: {}", group.why_away(0).unwrap());
    // What its client has sent by then is done or refused.
    thread::sleep(Duration::from_secs(5));
    assert_eq!(is_fenced(), entry.is_none());
    assert_eq!(other.read(0, BLOCK), content(0, 3), "the new owner has it in its cache");
    other.logout();
    drop(queue);
    drop(volume);
    let image = group.exported();
    let found = (0..4).find(|version| image[..BLOCK] == content(0, *version));
    found.expect("one of the versions")
}

/// The lock of a dead owner is taken by librbd, which fences it by itself.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_dead_owner_is_fenced_for_years_too() {
    let mut group = Group::start("write-through");
    for member in [1, 0] {
        group.members[member].kill();
    }
    // No host comes: the member waits until the cluster drops its former client.
    let (directory, file) = &group.places[0];
    let _ = std::fs::remove_file(directory.join("target.sock"));
    let port = group.members[0].address.port;
    let mut command = Command::new(program("rblk-target"));
    command.args(["serve", "--listen", &format!("tcp://127.0.0.1:{port}"), "--state-dir"]);
    command.arg(directory).arg("--control-socket").arg(&group.members[0].socket);
    let mut child = command.args(["--arena", "8MiB", "--config", file]).spawn().unwrap();
    group.until("the member that starts anew to serve", || group.serves(0));
    let fenced = group.cluster.fenced();
    child.kill().unwrap();
    child.wait().unwrap();
    println!("{fenced:?}");
    let year = |line: &String| line.split_whitespace().nth(1)?.get(..4)?.parse::<u64>().ok();
    let years: Vec<u64> = fenced.iter().filter_map(year).collect();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let this_year = 1970 + now.as_secs() / 31_556_952;
    assert!(!years.is_empty() && years.iter().all(|year| *year >= this_year + 9), "{fenced:?}");
}

/// The reason why a member fences for years. A client of Ceph sends a request again by itself, as
/// soon as its process goes on, and no check of the target is on the way.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_late_write_of_a_paused_owner_lands_after_a_short_fence_and_not_after_that_of_a_member()
 {
    assert_eq!(version_after_a_late_write(Some(5)), 2, "a stale write is seen");
    assert_eq!(version_after_a_late_write(None), 3, "the fence of a member holds");
}

/// A member whose user may do everything but fence says so, and `doctor` too. The command that both
/// name mends it.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_member_that_may_not_fence_serves_no_image_and_says_how_to_mend_it() {
    let cluster = CephCluster::start("memstore", 1);
    cluster.run("rbd create --size 4M rbd/v");
    let (directory, keyring) = (cluster.directory(), cluster.directory().join("weak.keyring"));
    let made = "ceph auth get-or-create client.weak mon allow+r osd profile+rbd+pool=rbd -o";
    cluster.run(&format!("{made} {}", keyring.display()));
    let file = directory.join("target.toml");
    let text = format!(
        "listen = ['tcp://127.0.0.1:1']\nname = 'store'\nmember = 'a'\nstate_dir = '{0}'\n\
         control_socket = '{0}/doctor.sock'\narena = '8MiB'\nmax_io = '1MiB'\n[[volume]]\nname = 'v'\n\
         store = 'rbd'\nimage = 'rbd/v'\nceph_conf = '{1}'\nuser = 'weak'\nkeyring = '{2}'\n",
        directory.display(),
        cluster.conf().display(),
        keyring.display()
    );
    std::fs::write(&file, text).unwrap();
    let file = file.display().to_string();
    let doctor = || {
        let mut command = Command::new(program("rblk-target"));
        run(command.args(["-o", "json", "doctor", "--config", &file])).stdout
    };
    let said = doctor();
    println!("{said}");
    assert!(said.contains("client.weak may not fence other clients"), "{said}");
    assert!(said.contains("\"ceph auth caps client.weak mon 'profile rbd'"), "{said}");

    let mut target = Target::start(directory, &["--config", &file]);
    let why = target.status().volumes_away[0].why.clone();
    println!("{why}");
    let refused = Client::connect(&target.address, "v", 1).unwrap_err();
    println!("{refused}");
    let fix = why.split('`').nth(1).unwrap().to_owned();
    assert!(fix.starts_with("ceph auth caps client.weak "), "{why}");
    let mut mend = Command::new("sh");
    let mended = run(mend.args(["-c", &fix]).env("CEPH_CONF", cluster.conf()));
    assert_eq!(mended.code, Some(0), "{mended:?}");
    let mut served = Client::connect(&target.address, "v", 1);
    for _ in 0..20 {
        if served.is_err() {
            thread::sleep(Duration::from_secs(1));
            served = Client::connect(&target.address, "v", 1);
        }
    }
    served.unwrap_or_else(|error| panic!("{error}\n{}", target.log())).logout();
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    assert!(!doctor().contains("may not fence"));
}

/// `check` and `doctor` open the images of a member that does not run. A target in no group would
/// note that it had them, and the hosts of the group would be fenced.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_look_at_a_stopped_member_fences_no_host() {
    let mut group = Group::start("write-through");
    let client = Client::connect(&group.members[0].address, "v", 1).unwrap();
    let generation = client.volume.generation;
    drop(client);
    for member in [1, 0] {
        group.members[member].terminate();
        assert_eq!(group.members[member].wait(), Some(0), "{}", group.logs());
    }
    let (directory, file) = &group.places[0];
    let text = std::fs::read_to_string(file).unwrap();
    let state = directory.display();
    let keys = format!(
        "listen = ['tcp://127.0.0.1:1']\nstate_dir = '{state}'\ncontrol_socket = '{state}/target.sock'\n\
         arena = '8MiB'\nmax_io = '1MiB'\n{text}"
    );
    let looked = directory.join("looked.toml");
    std::fs::write(&looked, keys).unwrap();
    for command in ["check", "doctor"] {
        let mut look = Command::new(program("rblk-target"));
        let said = run(look.args([command, "--config"]).arg(&looked));
        println!("{command}: {said:?}");
        assert!(!said.stdout.contains("fail  volumes"), "{said:?}");
    }
    group.restart(0);
    let returns = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    let mut resumed = Client::claim(&group.members[0].address, "v", 1, returns);
    group.until("the return of the host", || {
        if resumed.is_err() {
            resumed = Client::claim(&group.members[0].address, "v", 1, returns);
        }
        resumed.is_ok()
    });
    let resumed = resumed.unwrap();
    assert_eq!(resumed.volume.generation, generation);
    resumed.logout();
}
