//! A group of two targets in front of a Ceph cluster with three OSDs, and two mounts that know
//! them: fio verifies one disk, and a file on ext4 on the other, while OSDs are killed, the owner
//! is killed, stands still and hands over, and cables are cut.
//!
//! Nothing fails at the application, no byte is wrong, and the images are what the disks were. The
//! longest stall of each kind of event is printed. `RBLK_ROUNDS=N` sets the number of rounds.
//!
//! A failed test prints the logs of the members and of the mounts, and the state of the cluster.
//! `RBLK_LOG=info,rblk_target::store::rbd=debug` has each step of a claim in them.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rblk_config::{ByteSize, CacheMode, TargetConfig, VolumeConfig};
use rblk_operate::target::status::TargetStatus;
use rblk_tests::lab::ceph::CephCluster;
use rblk_tests::lab::{
    DEADLINE, FileSystem, Fio, GroupCable, GroupNetwork, KernelFeature, Lab, MountFlags, Mounted,
    RunningFio, StallMeter, run, start, until,
};
use rblk_tests::program;

use super::{KIB, MIB, sh};

/// The disk that fio uses, and the one with the file system: its name and its MiB.
const VOLUMES: [(&str, u64); 2] = [("raw", 16), ("ext4", 48)];
const OSDS: u16 = 3;
/// How long anything may take: the cluster drops a dead client after 30 s, and the lab is slow.
const PATIENCE: Duration = Duration::from_secs(300);
/// A target believes its last proof of a lock for 10 s. A cluster drops the watch of a client that
/// it does not hear of for 30 s, and the image is lost then.
const WITHOUT_CLUSTER: Duration = Duration::from_secs(13);
/// Longer than a mount takes to notice that its target is silent.
const WITHOUT_HOST: Duration = Duration::from_secs(25);
/// Requests of each disk that show that it works.
const SOME: u64 = 30;
/// The most lines of a log that a failed test prints.
const LOG_LINES: usize = 600;

/// A member of the group, as its host runs it.
struct MemberProcess {
    space: &'static str,
    config: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    child: Child,
}

impl MemberProcess {
    fn new(lab: &Lab, network: &GroupNetwork, at: usize, of: &TargetConfig) -> Self {
        let name = ["a", "b"][at];
        let (socket, log) = (lab.path(&format!("{name}.sock")), lab.path(&format!("{name}.log")));
        let state_dir = lab.path(&format!("state-{name}"));
        std::fs::create_dir_all(&state_dir).expect("a directory");
        let host = network.host(at);
        let config = TargetConfig {
            member: Some(name.to_owned()),
            listen: vec![format!("rdma://{host}"), format!("tcp://{host}")],
            control_socket: socket.clone(),
            state_dir,
            ..of.clone()
        };
        let config = lab.configuration(&format!("{name}.toml"), config);
        let space = network.space(at);
        let child = Self::serve(lab, (space, &config), &log);
        let member = Self { space, config, socket, log, child };
        member.wait_served();
        member
    }

    fn serve(lab: &Lab, (space, config): (&str, &Path), log: &Path) -> Child {
        let log = File::options().create(true).append(true).open(log).expect("a log");
        let mut command = Command::new("ip");
        // `ip netns exec` executes the program in its own process, so the pid stays.
        command.args(["netns", "exec", space]).arg(lab.programs().join("rblk-target"));
        command.args(["serve", "--poll-groups", "1", "--config"]).arg(config).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().expect("a target")
    }

    fn status(&self) -> Option<TargetStatus> {
        program::status(&self.socket)
    }

    fn wait_served(&self) {
        until("a target to serve", PATIENCE, || {
            self.status().filter(|status| status.pid == self.child.id())
        });
    }

    /// Whether it serves a volume.
    fn serves(&self, name: &str) -> bool {
        let has = |status: TargetStatus| status.volumes.iter().any(|volume| volume.name == name);
        self.status().is_some_and(has)
    }

    fn signal(&self, name: &str) {
        let _ = start(&["kill", "-s", name, &self.child.id().to_string()]).finish(DEADLINE).ok();
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn restart(&mut self, lab: &Lab) {
        self.child = Self::serve(lab, (self.space, &self.config), &self.log);
        self.wait_served();
    }

    /// Ends it in good order.
    fn stop(&mut self) {
        self.signal("TERM");
        let status = until("a target to end", PATIENCE, || self.child.try_wait().expect("wait"));
        assert_eq!(status.code(), Some(0));
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            println!("--- the end of the log of the member in {}", self.space);
            lines[lines.len().saturating_sub(LOG_LINES)..]
                .iter()
                .for_each(|line| println!("    {line}"));
        }
        self.kill();
    }
}

/// One disk, and fio on it.
struct Disk<'l> {
    name: &'static str,
    fio: Option<RunningFio>,
    meter: StallMeter,
    system: Option<FileSystem>,
    mounted: Mounted<'l>,
}

impl<'l> Disk<'l> {
    fn new(lab: &'l Lab, name: &'static str, flags: &MountFlags) -> Self {
        let mounted = Mounted::new(lab, flags);
        let (file, system) = match name {
            "ext4" => {
                let _ = sh(&["mkfs.ext4", "-q", "-F", "-b", "4096", &mounted.dev()]);
                let dir = lab.path("ext4");
                let system = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
                (dir.join("data"), Some(system))
            }
            _ => (mounted.device().to_owned(), None),
        };
        let fio = Fio::verifying(&file)
            .with("bsrange", "4k-32k")
            .with("size", 4 * MIB)
            .with("thinktime", "20ms");
        let fio = Some(fio.start());
        let meter = StallMeter::start(mounted.device());
        Self { name, fio, meter, system, mounted }
    }

    /// Waits until it works.
    fn goes_on(&mut self, what: &str) {
        let Self { name, fio, mounted, .. } = self;
        let ended = || {
            let counts = mounted.counts();
            counts.get("reads") + counts.get("writes")
        };
        let before = ended();
        until(&format!("{name} to go on after: {what}"), PATIENCE, || {
            if let Some(ended) = fio.take_if(|fio| !fio.is_running()) {
                panic!("{name}: fio has ended after: {what}: {:?}", ended.finish(PATIENCE));
            }
            (ended() > before + SOME).then_some(())
        });
    }

    /// Ends the work. Returns the bytes of the disk.
    fn end(&mut self) -> Vec<u8> {
        let fio = self.fio.take().expect("fio").stop(PATIENCE).ok();
        println!("{}: fio made {} writes and {} reads", self.name, fio.writes, fio.reads);
        if let Some(system) = self.system.take() {
            system.umount();
            let _ = sh(&["fsck.ext4", "-fn", &self.mounted.dev()]);
        }
        let status = self.mounted.status();
        assert_eq!((status.losses, status.total.errors), (0, 0), "{}", self.name);
        std::fs::read(self.mounted.device()).expect("the bytes of the disk")
    }
}

/// All of it. The fields are dropped in this order.
struct Group<'l> {
    disks: Vec<Disk<'l>>,
    members: [MemberProcess; 2],
    cluster: CephCluster,
    network: GroupNetwork,
    lab: &'l Lab,
    // The longest stall of each kind of event, and how often it came.
    stalls: BTreeMap<&'static str, (Duration, usize)>,
    begun: Instant,
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}: failed at {:.0?}; the cluster:", self.lab.test(), self.begun.elapsed());
            for words in ["ceph -s", "ceph osd dump", "rbd status rbd/raw", "rbd status rbd/ext4"] {
                println!("{}", self.cluster.try_run(words));
            }
        }
    }
}

impl<'l> Group<'l> {
    fn start(lab: &'l Lab, scheme: &str, cache: CacheMode) -> Self {
        let network = GroupNetwork::new(lab);
        let begun = Instant::now();
        let cluster = CephCluster::start_in(&network, lab.dir(), OSDS);
        println!("{}: a cluster in {:.1?}", lab.test(), begun.elapsed());
        let volume = |(name, mib): (&str, u64)| {
            cluster.run(&format!("rbd create --size {mib}M rbd/{name}"));
            let mut volume = VolumeConfig::rbd(name, format!("rbd/{name}"));
            volume.ceph_conf = Some(cluster.conf());
            volume.cache = Some(cache);
            volume
        };
        let config = TargetConfig {
            name: Some("store".to_owned()),
            arena: ByteSize(48 * MIB),
            max_io: ByteSize(256 * KIB),
            volumes: VOLUMES.map(volume).to_vec(),
            ..TargetConfig::default()
        };
        let members = [0, 1].map(|at| MemberProcess::new(lab, &network, at, &config));
        let address = |at| format!("{scheme}://{}", network.host(at));
        let disks = VOLUMES.map(|(name, _)| {
            let flags = MountFlags::new(address(0), name).path(&address(1)).switch("--wait=180s");
            let flags = match cache {
                CacheMode::WriteBack => flags.flag("--retain", "16MiB"),
                _ => flags,
            };
            Disk::new(lab, name, &flags)
        });
        let disks = Vec::from(disks);
        Self { disks, members, cluster, network, lab, stalls: BTreeMap::new(), begun }
    }

    /// The member that serves all volumes. A mount that lost its target alone took its volume to
    /// the other member: then that volume is handed over, too.
    fn owner(&self) -> usize {
        let of = |name: &str| (0..2).find(|at| self.members[*at].serves(name));
        until("one owner of all volumes", PATIENCE, || {
            let [first, second] = VOLUMES.map(|(name, _)| of(name));
            let (first, second) = (first?, second?);
            if first != second {
                println!("{}: the volumes have two owners", self.lab.test());
                // The mount may be on its way already.
                let _ = self.move_one(second, VOLUMES[1].0);
            }
            (first == second).then_some(first)
        })
    }

    /// Waits until a member serves all volumes. The other one may stand still.
    fn wait_owner(&self, member: usize) {
        until("the other member to serve", PATIENCE, || {
            let all = VOLUMES.iter().all(|(name, _)| self.members[member].serves(name));
            all.then_some(())
        });
    }

    /// Has a member hand a volume over.
    fn move_one(&self, member: usize, name: &str) -> Result<(), String> {
        let mut command = self.lab.program("rblk-target");
        command.args(["volume", "move", name, "--control-socket"]);
        let moved = command.arg(&self.members[member].socket).output().expect("rblk-target");
        match moved.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&moved.stderr).into_owned()),
        }
    }

    /// Waits until all disks work, and notes the longest stall since the last event.
    fn note(&mut self, kind: &'static str) {
        self.disks.iter_mut().for_each(|disk| disk.goes_on(kind));
        let longest = self.disks.iter().map(|disk| disk.meter.longest()).max();
        let longest = longest.unwrap_or_default();
        let (known, times) = self.stalls.entry(kind).or_default();
        (*known, *times) = (longest.max(*known), *times + 1);
        let at = self.begun.elapsed();
        println!("{}: at {at:.0?}: {kind}: a stall of {longest:.1?}", self.lab.test());
    }

    /// The owner hands all volumes over.
    fn move_all(&mut self) {
        let owner = self.owner();
        for (name, _) in VOLUMES {
            self.move_one(owner, name).unwrap_or_else(|said| panic!("volume move: {said}"));
        }
        self.wait_owner(1 - owner);
        self.note("planned move");
    }

    fn kill_osd(&mut self, osd: usize) {
        self.cluster.script(&format!("osd-kill {osd}"));
        self.note("an OSD killed");
        self.cluster.script(&format!("osd-start {osd}"));
        until("the OSD to be up again", PATIENCE, || {
            let said = self.cluster.run("ceph osd stat");
            said.contains(&format!(" {OSDS} up ")).then_some(())
        });
        self.note("an OSD back");
    }

    fn kill_owner(&mut self) {
        let owner = self.owner();
        self.members[owner].kill();
        self.wait_owner(1 - owner);
        self.note("the owner killed");
        self.members[owner].restart(self.lab);
    }

    fn pause_owner(&mut self) {
        let owner = self.owner();
        self.members[owner].signal("STOP");
        self.wait_owner(1 - owner);
        self.note("the owner paused");
        self.members[owner].signal("CONT");
        until("the former owner to notice", PATIENCE, || {
            let status = self.members[owner].status()?;
            (status.volumes.is_empty() && status.volumes_away.len() == VOLUMES.len()).then_some(())
        });
        self.note("the former owner continued");
    }

    /// Cuts each cable once.
    fn cut(&mut self) {
        type To = fn(usize) -> GroupCable;
        let (to_cluster, to_member): (To, To) = (GroupCable::ToCluster, GroupCable::ToMember);
        for (kind, to, is_owner, time) in [
            ("cut: owner, cluster", to_cluster, true, WITHOUT_CLUSTER),
            ("cut: other member, cluster", to_cluster, false, WITHOUT_CLUSTER),
            ("cut: host, other member", to_member, false, WITHOUT_HOST),
            ("cut: host, owner", to_member, true, WITHOUT_HOST),
        ] {
            let owner = self.owner();
            let cable = to(if is_owner { owner } else { 1 - owner });
            self.network.cut(cable);
            std::thread::sleep(time);
            self.network.mend(cable);
            self.note(kind);
        }
    }

    /// Ends all, and compares the disks with their images.
    fn end(mut self) {
        let disks: Vec<Vec<u8>> = self.disks.iter_mut().map(Disk::end).collect();
        for disk in self.disks.drain(..) {
            let Disk { mounted, .. } = disk;
            mounted.umount();
        }
        self.members.iter_mut().for_each(MemberProcess::stop);
        for ((name, _), disk) in VOLUMES.iter().zip(disks) {
            let file = self.lab.path(&format!("{name}.export"));
            self.cluster.run(&format!("rbd export --no-progress rbd/{name} {}", file.display()));
            let image = std::fs::read(file).expect("the export");
            assert!(image == disk, "{name}: the image differs from the disk");
        }
        for (kind, (stall, times)) in &self.stalls {
            println!("{}: the longest stall of {times}: {kind}: {stall:.1?}", self.lab.test());
        }
    }
}

fn rounds_asked_for() -> Option<usize> {
    let text = std::env::var("RBLK_ROUNDS").ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("RBLK_ROUNDS={text}: {e}")))
}

fn survives(test: &'static str, scheme: &str, cache: CacheMode) {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run(test, |lab| {
        let mut group = Group::start(lab, scheme, cache);
        group.note("no event");
        let rounds = rounds_asked_for().unwrap_or_else(|| lab.times(1, 10));
        for round in 0..rounds {
            println!("{}: round {} of {rounds}", lab.test(), round + 1);
            group.kill_osd(round % usize::from(OSDS));
            group.kill_owner();
            group.move_all();
            group.pause_owner();
            // The member that was stopped lost the volumes by force, and takes none back by force
            // for half a minute: it gets these in good order.
            group.move_all();
            group.cut();
        }
        group.end();
    });
}

#[test]
#[ignore = "needs the lab and the programs of Ceph: `cargo xtask test --long` runs it there"]
fn lab_ceph_group_over_rdma_written_through() {
    survives("lab_ceph_group_over_rdma_written_through", "rdma", CacheMode::WriteThrough);
}

#[test]
#[ignore = "needs the lab and the programs of Ceph: `cargo xtask test --long` runs it there"]
fn lab_ceph_group_over_rdma_written_back_and_retained() {
    survives("lab_ceph_group_over_rdma_written_back_and_retained", "rdma", CacheMode::WriteBack);
}

#[test]
#[ignore = "needs the lab and the programs of Ceph: `cargo xtask test --long` runs it there"]
fn lab_ceph_group_over_tcp_written_through() {
    survives("lab_ceph_group_over_tcp_written_through", "tcp", CacheMode::WriteThrough);
}

#[test]
#[ignore = "needs the lab and the programs of Ceph: `cargo xtask test --long` runs it there"]
fn lab_ceph_group_over_tcp_written_back_and_retained() {
    survives("lab_ceph_group_over_tcp_written_back_and_retained", "tcp", CacheMode::WriteBack);
}
