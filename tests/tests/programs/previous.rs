//! Programs of a version before, in the directory `RBLK_PREVIOUS`, beside those of this version:
//! both ends, the state directory, and the upgrade of a running target, both ways. A part of one
//! version is understood by the other, or refused.

use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_initiator::volume::session::VolumeClaim;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_protocol::{AccessMode, AsyncEvent, WriteVerifier};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Ended, Target, assert_refused, program, run, wait_for};
use rblk_tests::relay::Relay;

const LEN: usize = 4096;
const BYTES: u64 = 4 << 20;
const HOST: u8 = 1;

/// The programs of the version before, and those of this one.
fn versions() -> [PathBuf; 2] {
    let previous = std::env::var_os("RBLK_PREVIOUS").expect("RBLK_PREVIOUS: a directory");
    [previous.into(), program("rblk-target").parent().expect("a directory").to_owned()]
}

/// A target `store1` of a version, with a volume for each cache mode.
fn start(programs: &Path, dir: &Path) -> Target {
    let mut text = "name = 'store1'\nwrite_back_delay = '1h'\n".to_owned();
    for mode in ["write-through", "write-back"] {
        let path = dir.join(mode);
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
        }
        let path = path.display();
        text += &format!(
            "[[volume]]\nname = '{mode}'\nstore = 'file'\npath = '{path}'\ncache = '{mode}'\n"
        );
    }
    let config = dir.join("target.toml");
    std::fs::write(&config, text).unwrap();
    Target::start_of(programs, dir, &["--config", &config.display().to_string()])
}

/// Writes as a host, and stays: the verifier of the volume, and the claim of that host.
fn write(target: &Target, volume: &str, seed: u64) -> (WriteVerifier, VolumeClaim) {
    let mut client = Client::connect(&target.address, volume, HOST).expect("a session");
    client.write(0, &pattern(seed, LEN));
    let generation = client.volume.generation;
    (client.volume.verifier, VolumeClaim { generation, ..AccessMode::Exclusive.into() })
}

/// Comes back as the host of [`write`].
fn come_back(target: &Target, volume: &str, claim: VolumeClaim) -> Client {
    Client::claim(&target.address, volume, HOST, claim)
        .unwrap_or_else(|error| panic!("{volume}: {error}; the target's log:\n{}", target.log()))
}

fn upgrade(target: &Target, to: &Path) -> Ended {
    let mut command = Command::new(program("rblk-target"));
    command.args(["upgrade", "--timeout", "1s", "--program"]).arg(to.join("rblk-targetd"));
    run(command.arg("--control-socket").arg(&target.socket))
}

/// A disk for a guest, by an initiator of a version, and its end.
fn serve_guest(programs: &Path, dir: &Path, target: &Target) {
    let initiator = programs.join("rblk-initiator");
    let (socket, name) = (dir.join("guest.sock"), format!("previous-{}", std::process::id()));
    let mut command = Command::new(&initiator);
    command.args(["vhost", "--name", &name, "--socket"]).arg(socket);
    assert_refused(&run(command.args([&target.address.to_string(), "write-through"])), 0, &[]);
    let status = run(Command::new(&initiator).args(["status", &name]));
    let ended = run(Command::new(&initiator).args(["umount", &name]));
    assert!(status.stdout.contains("connected"), "{status:?}");
    assert_refused(&ended, 0, &[]);
}

#[test]
#[ignore = "needs root, and RBLK_PREVIOUS: a directory with programs of a version before"]
fn with_previous_both_ends_use_each_other() {
    let all = versions();
    for programs in &all {
        let dir = tempfile::tempdir().unwrap();
        let target = start(programs, dir.path());
        for volume in ["write-through", "write-back"] {
            let mut client = Client::connect(&target.address, volume, HOST).expect("a session");
            let data = pattern(7, LEN);
            client.write(LEN as u64, &data);
            client.flush();
            assert_eq!(client.read(LEN as u64, LEN), data);
            client.logout();
        }
        for others in &all {
            let mut discover = Command::new(others.join("rblk-initiator"));
            let found = run(discover.arg("discover").arg(target.address.to_string()));
            assert!(found.stdout.contains("write-back"), "{found:?}");
            serve_guest(others, dir.path(), &target);
        }
    }
}

/// The disk of a guest by two addresses, and its end.
struct TwoAddresses {
    initiator: PathBuf,
    name: String,
    relay: Relay,
}

impl TwoAddresses {
    /// By an initiator of a version, with more flags. The relay's address is the first.
    fn serve(programs: &Path, dir: &Path, target: &Target, flags: &[&str]) -> Self {
        let initiator = programs.join("rblk-initiator");
        let (relay, name) = (Relay::new(&target.address), format!("two-{}", std::process::id()));
        relay.listen();
        let mut command = Command::new(&initiator);
        command.args(["vhost", "--name", &name, "--socket"]).arg(dir.join("two.sock"));
        command.args(["--path", &target.address.to_string()]).args(flags);
        let served = run(command.args([&relay.address.to_string(), "write-through"]));
        assert_refused(&served, 0, &[]);
        Self { initiator, name, relay }
    }

    /// The status, when it is as wanted.
    fn until(&self, what: &str, wanted: impl Fn(&MountStatus) -> bool) -> MountStatus {
        wait_for(what, || {
            let mut status = Command::new(&self.initiator);
            let ended = run(status.args(["status", &self.name, "-o", "json"]));
            let status = serde_json::from_str(&ended.stdout).ok()?;
            Some(status).filter(|status| wanted(status))
        })
    }

    /// The first address dies: the mount goes on by the second.
    fn fails_over(&self, target: &Target) -> MountStatus {
        let first = self.relay.address.to_string();
        self.until("the first address", |status| status.address == first);
        self.relay.refuse();
        self.relay.cut();
        let second = target.address.to_string();
        self.until("the second address", |status| {
            status.state == "connected" && status.address == second
        })
    }
}

impl Drop for TwoAddresses {
    fn drop(&mut self) {
        let _ = run(Command::new(&self.initiator).args(["umount", "--force", &self.name]));
    }
}

/// Whether an initiator of a version can use all addresses at once.
fn knows_all_paths(programs: &Path) -> bool {
    let help = run(Command::new(programs.join("rblk-initiator")).args(["vhost", "--help"]));
    help.stdout.contains("--paths")
}

#[test]
#[ignore = "needs root, and RBLK_PREVIOUS: a directory with programs of a version before"]
fn with_previous_several_addresses_are_used_as_both_ends_can() {
    let [previous, this] = versions();
    let previous_knows = knows_all_paths(&previous);
    assert!(knows_all_paths(&this));

    // An initiator that wants all, at a target of the version before.
    let dir = tempfile::tempdir().unwrap();
    let target = start(&previous, dir.path());
    let served = TwoAddresses::serve(&this, dir.path(), &target, &["--paths", "all"]);
    if previous_knows {
        let in_use = |status: &MountStatus| status.paths_in_use().is_some_and(|n| n == "2 of 2");
        served.until("both paths", in_use);
    } else {
        let status = served.until("one path at a time", |status| status.one_path);
        assert_eq!(status.paths, []);
        let listed = run(Command::new(this.join("rblk-initiator")).arg("list"));
        let line = format!("{}: it uses one of its 2 addresses at a time", served.name);
        assert!(listed.stderr.contains(&line), "{listed:?}");
        let status = served.fails_over(&target);
        assert!(status.one_path && status.fallback.is_some(), "{status:?}");
    }
    drop(served);
    drop(target);

    // An initiator of the version before at a target of this one.
    let dir = tempfile::tempdir().unwrap();
    let target = start(&this, dir.path());
    let served = TwoAddresses::serve(&previous, dir.path(), &target, &[]);
    served.fails_over(&target);
}

#[test]
#[ignore = "needs root, and RBLK_PREVIOUS: a directory with programs of a version before"]
fn with_previous_a_state_directory_is_never_misread() {
    let [previous, this] = versions();
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(&previous, dir.path());
    let through = write(&target, "write-through", 1);
    let back = write(&target, "write-back", 2);
    target.kill();

    // The kernel has what was written through. The memory of a killed process is gone.
    let mut target = start(&this, dir.path());
    let mut client = come_back(&target, "write-through", through.1);
    assert_eq!(client.volume.verifier, through.0, "{}", target.log());
    assert_eq!(client.read(0, LEN), pattern(1, LEN));
    drop(client);
    let client = come_back(&target, "write-back", back.1);
    assert_ne!(client.volume.verifier, back.0, "{}", target.log());
    let known = [("write-through", through.0), ("write-back", client.volume.verifier)];
    drop(client);
    target.kill();

    // The version before cannot read these records, so it may vouch for nothing.
    let target = start(&previous, dir.path());
    for (volume, known) in known {
        let client = Client::connect(&target.address, volume, HOST).expect("a session");
        assert_ne!(client.volume.verifier, known, "{volume}: {}", target.log());
        client.logout();
    }
}

#[test]
#[ignore = "needs root, and RBLK_PREVIOUS: a directory with programs of a version before"]
fn with_previous_a_running_target_is_upgraded() {
    let [previous, this] = versions();
    let dir = tempfile::tempdir().unwrap();
    let target = start(&previous, dir.path());
    let (verifier, claim) = write(&target, "write-back", 3);
    let mut client = come_back(&target, "write-back", claim);
    let host = std::thread::spawn({
        let address = target.address.clone();
        move || {
            assert_eq!(client.next_event(), Some(AsyncEvent::Upgrading));
            drop(client);
            // One attempt is enough: the socket lets it wait for the next program.
            Client::claim(&address, "write-back", HOST, claim).expect("the same volume")
        }
    });
    let upgraded = upgrade(&target, &this);
    assert_eq!(upgraded.code, Some(0), "{upgraded:?}\n{}", target.log());
    let mut client = host.join().expect("the host");
    assert_eq!(client.volume.verifier, verifier, "no acknowledged write is lost");
    assert_eq!(client.read(0, LEN), pattern(3, LEN));

    // The way back is refused, and the target serves.
    let refused = upgrade(&target, &previous);
    assert_refused(&refused, 1, &["drain, install, start", "The target serves as before"]);
    client.write(0, &pattern(4, LEN));
    assert_eq!(client.read(0, LEN), pattern(4, LEN));
    client.logout();
}
