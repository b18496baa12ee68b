//! docs/ceph.md on a real cluster: its commands are typed, and what it shows is what the programs
//! print, but for numbers and addresses.

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rblk_tests::guest::Served;
use rblk_tests::guide::{self, Sample};
use rblk_tests::lab::ceph::CephCluster;
use rblk_tests::program::{Ended, Target, program, run, wait_for};

/// How long a take-over may take before the test gives up.
const PATIENCE: Duration = Duration::from_secs(120);
/// The commands of the page, as a host types them, at the files and sockets of the test.
const TYPED: &str = r#"
set -eu
install() { [ "$1 $2 $3 $4" = "-o rblk -m 600" ]; shift 4; command install -m 600 "$@"; }
rblk-target() {
    case "$1 ${2-}" in
    "group status") set -- "$@" --config "$CONFIG" ;;
    "volume add") set -- "$@" --ceph-conf "$CEPH_CONF" --config "$CONFIG" --control-socket "$SOCKET" ;;
    "volume "*) set -- "$@" --config "$CONFIG" --control-socket "$SOCKET" ;;
    *) set -- "$@" --control-socket "$SOCKET" ;;
    esac
    "$PROGRAM" "$@"
}
"#;

/// The members of a group, as the page has them, and their cluster.
struct Members {
    members: Vec<Target>,
    // Dropped after the members.
    cluster: CephCluster,
}

impl Members {
    fn directory(&self, member: usize) -> PathBuf {
        self.cluster.directory().join(["a", "b"][member])
    }

    /// Types a command of the page at a member.
    fn type_at(&self, member: usize, command: &str) -> Ended {
        let directory = self.directory(member);
        let etc = format!("{}/", self.cluster.directory().display());
        let command = command.replace("/etc/ceph/", &etc);
        let mut bash = Command::new("bash");
        bash.arg("-c").arg(format!("{TYPED}\n{command}"));
        bash.env("CEPH_CONF", self.cluster.conf()).env("PROGRAM", program("rblk-target"));
        bash.env("CONFIG", directory.join("target.toml"));
        run(bash.env("SOCKET", &self.members[member].socket))
    }

    /// Types a command that works, and returns what it prints.
    #[track_caller]
    fn works(&self, member: usize, command: &str) -> String {
        let ended = self.type_at(member, command);
        assert_eq!(ended.code, Some(0), "{command}: {ended:?}\n{}", self.members[member].log());
        ended.stdout
    }

    fn serves(&self, member: usize) -> bool {
        self.members[member].status_if_any().is_some_and(|status| !status.volumes.is_empty())
    }

    #[track_caller]
    fn until(&self, what: &str, mut look: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !look() {
            let logs: Vec<String> = self.members.iter().map(Target::log).collect();
            assert!(Instant::now() < deadline, "{what} did not happen\n{logs:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Starts a member, whose files of volumes are there already.
fn start(cluster: &CephCluster, member: &str) -> Target {
    let directory = cluster.directory().join(member);
    let file = directory.join("target.toml");
    std::fs::write(&file, format!("name = 'store'\nmember = '{member}'\n")).unwrap();
    Target::start(&directory, &["--config", file.to_str().unwrap()])
}

/// The list of the mounts of this host, without those of other tests.
fn list(mount: &Served) -> String {
    let ended = run(Command::new(program("rblk-initiator")).arg("list"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let socket = mount.socket.display().to_string();
    let is_of_it = |line: &&str| {
        line.starts_with("NAME ") || line.contains(mount.name()) || line.contains(&socket)
    };
    let lines: Vec<&str> = ended.stdout.lines().filter(is_of_it).collect();
    lines.join("\n").replace(mount.name(), "vol0")
}

/// A line without what differs from run to run: numbers, addresses, paths, widths of columns.
fn shape(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace().filter(|word| !word.starts_with('/')) {
        let is_figure = word == "-" || word.starts_with(|c: char| c.is_ascii_digit());
        words.push(match word.split_once("tcp://") {
            _ if is_figure => "#".to_owned(),
            Some((before, _)) => format!("{before}tcp://"),
            None => word.to_owned(),
        });
    }
    // A time may have two words.
    words.dedup_by(|word, before| word == "#" && before == "#");
    words.join(" ")
}

/// Compares a sample of the page with what the programs print.
#[track_caller]
fn assert_shown(sample: &Sample, said: &str) {
    let said: Vec<String> = said.lines().map(shape).collect();
    for line in sample.output.iter().filter(|line| !line.is_empty()) {
        assert!(said.contains(&shape(line)), "`{line}` is not in:\n{}", said.join("\n"));
    }
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_the_page_makes_a_volume_and_shows_a_take_over() {
    let cluster = CephCluster::start("bluestore", 1);
    let keyring = cluster.directory().join("ceph.client.rblk.keyring");
    let conf = std::fs::read_to_string(cluster.conf()).unwrap();
    let more = format!("[client.rblk]\nkeyring = {}\n", keyring.display());
    std::fs::write(cluster.conf(), conf + &more).unwrap();
    for member in ["a", "b"] {
        std::fs::create_dir_all(cluster.directory().join(member).join("target.d")).unwrap();
    }
    let members = vec![start(&cluster, "a")];
    let mut group = Members { members, cluster };

    let first = guide::first_image();
    assert_eq!(first.len(), 3, "three commands to the first volume: {first:?}");
    first.iter().for_each(|command| drop(group.works(0, command)));
    assert_eq!(group.members[0].status().volumes[0].size_bytes, 64 << 30);
    // The other member gets the same volumes.
    let of_a = group.directory(0).join("target.d/volume-vol0.toml");
    std::fs::copy(of_a, group.directory(1).join("target.d/volume-vol0.toml")).unwrap();
    let b = start(&group.cluster, "b");
    group.members.push(b);

    let samples = guide::take_over();
    let [before, status_of_b, waits, after, served, lost, fenced, moved] = &samples[..] else {
        panic!("other samples: {samples:?}")
    };
    let [a, b] = [0, 1].map(|member: usize| group.members[member].address.to_string());
    let more = ["--path", &b, "--host-name", "client1"];
    let mount = Served::start(group.cluster.directory(), &a, "vol0", &more);
    assert_shown(before, &list(&mount));
    assert_shown(status_of_b, &group.works(1, &status_of_b.command));
    group.members[0].kill();
    let lost_target = || Some(list(&mount)).filter(|text| text.contains("reconnecting"));
    assert_shown(waits, &wait_for("a lost target", lost_target));
    group.until("the take-over", || group.serves(1));
    group.until("the mount there", || list(&mount).contains(" connected "));
    assert_shown(after, &list(&mount));
    assert_shown(served, &group.works(1, &served.command));
    let (directory, file) = (group.directory(0), group.directory(0).join("target.toml"));
    group.members[0].start_again(&directory, &["--config", file.to_str().unwrap()]);
    assert_shown(lost, &group.works(0, &lost.command));
    assert_shown(fenced, &group.works(0, &fenced.command));
    assert_shown(moved, &group.works(1, &moved.command));
    group.until("the hand-over", || group.serves(0));
    // A member that stops hands over what it has, and fences nobody.
    let clients = || group.cluster.run("ceph osd blocklist ls");
    // A member that starts fences a client that is nobody's, for a second: it asks whether it may.
    group.until("the end of the trial", || !clients().contains("192.0.2.1:0/1 "));
    let before = clients();
    group.works(0, "rblk-target drain");
    group.until("the hand-over", || group.serves(1));
    group.until("the mount there", || list(&mount).contains(" connected "));
    assert_eq!(clients(), before, "a hand-over fences nobody");
    assert_eq!(mount.status()["losses"], 0, "{}", mount.status());
}
