//! Programs that fail or are killed while they start: the old one goes on, and a killed one leaves
//! nothing that confuses a plain start.

use std::net::TcpListener;

use super::*;

/// Runs a script in the wrapper at a real start only, not at a check.
fn at_the_start(script: &str) -> String {
    format!("case \"$*\" in *--check-take-over) ;; *)\n{script}\n;; esac")
}

/// A wrapper that waits before the real program: reports that, and continues when the test opens
/// it.
struct Gate {
    reached: PathBuf,
    open: PathBuf,
}

impl Gate {
    fn new(dir: &Path) -> Self {
        let gate = Self { reached: dir.join("reached"), open: dir.join("open") };
        let _ = std::fs::remove_file(&gate.open);
        let _ = std::fs::remove_file(&gate.reached);
        gate
    }

    fn script(&self) -> String {
        at_the_start(&format!(
            "touch '{}'; while [ ! -e '{}' ]; do sleep 0.01; done",
            self.reached.display(),
            self.open.display()
        ))
    }

    /// Waits until the program that replaces the target was started.
    fn wait(&self) {
        wait_for("the other program", || self.reached.exists().then_some(()));
    }

    fn open(&self) {
        std::fs::write(&self.open, "").unwrap();
    }
}

/// Adds keys to the configuration file, and returns the old text.
fn add_to_configuration(dir: &Path, keys: &str) -> String {
    let path = configuration(dir);
    let before = std::fs::read_to_string(&path).unwrap();
    std::fs::write(path, format!("{keys}\n{before}")).unwrap();
    before
}

#[test]
fn a_configuration_that_only_a_start_finds_wrong_takes_no_target_away() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let before = of(&target, &mut client);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    add_to_configuration(dir.path(), &format!("http = '{address}'"));
    let refused = run(&mut command(&target, &[]));
    let text = format!("could not listen on http = \"{address}\"");
    assert_refused(&refused, 1, &[&text, "another program may use the port", "serves as before"]);
    assert_eq!(of(&target, &mut client), before);

    // With a free port the key is accepted, and the socket goes to the next program.
    drop(taken);
    for _ in 0..2 {
        let upgrade = begin(&target, &[]);
        client = go_along(client, &target);
        let (code, _, complaint) = end(upgrade);
        assert_eq!(code, Some(0), "{complaint}\n{}", target.log());
        TcpStream::connect(address).expect("metrics are served");
    }
    assert_eq!(client.volume.verifier, before.1);
}

#[test]
fn a_program_that_cannot_start_gives_way_to_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    client.write(0, &pattern(1, 4096));
    let (verifier, pid) = (client.volume.verifier, target.status().pid);
    let is_as_before = |client: &mut Client| {
        assert_eq!((target.status().pid, client.volume.verifier), (pid, verifier));
        assert_eq!(target.status().fencings, 0);
        assert!(client.read(0, 4096) == pattern(1, 4096));
    };

    // The port is taken after its check. By then the configuration and the file of the volume are
    // gone, too.
    let port = rblk_tests::program::free_port();
    let good = add_to_configuration(dir.path(), &format!("http = '127.0.0.1:{}'", port.number));
    let gate = Gate::new(dir.path());
    let upgrade = begin(&target, &["--program", &wrapper(dir.path(), &gate.script())]);
    assert_eq!(client.next_event(), Some(AsyncEvent::Upgrading));
    let claim =
        VolumeClaim { generation: client.volume.generation, ..AccessMode::Exclusive.into() };
    drop(client);
    gate.wait();
    let number = port.number;
    drop(port);
    let taken = TcpListener::bind(("127.0.0.1", number)).unwrap();
    let (config, file) = (dir.path().join("target.toml"), dir.path().join("v.img"));
    std::fs::write(&config, "nonsense").unwrap();
    std::fs::rename(&file, dir.path().join("away")).unwrap();
    gate.open();
    let mut client = Client::claim(&target.address, "v", 1, claim).expect("the same volume");
    let (code, said, complaint) = end(upgrade);
    assert_eq!(code, Some(1), "{said}\n{}", target.log());
    assert!(
        complaint.contains("cannot start") && complaint.contains("serves again"),
        "{complaint}"
    );
    assert!(said["failed"].as_str().is_some_and(|why| why.contains("http")), "{said}");
    is_as_before(&mut client);
    client.write(0, &pattern(1, 4096));
    client.flush();
    std::fs::rename(dir.path().join("away"), &file).unwrap();
    std::fs::write(&config, good).unwrap();
    drop(taken);

    // A program that learns only after opening its stores that its limits are too low.
    let script = "case \"$*\" in *--check-take-over) set -- $(echo \"$*\" | sed 's/--poll-groups 1/--poll-groups 12/');; \
                  *) ulimit -n 48;; esac";
    let kept =
        "the record of the volume as the last run left it volume=v before=every acknowledged write";
    let starts = |target: &Target| target.log().matches(kept).count();
    let before = starts(&target);
    let upgrade = begin(&target, &["--program", &wrapper(dir.path(), script)]);
    client = go_along(client, &target);
    let (code, said, complaint) = end(upgrade);
    assert_eq!(code, Some(1), "{said}\n{}", target.log());
    let why = said["failed"].as_str().unwrap_or_default();
    assert!(why.contains("cannot start") && why.contains("Too many open"), "{said}\n{complaint}");
    assert_eq!(starts(&target), before + 1, "the one before goes on: {}", target.log());
    is_as_before(&mut client);

    // A program that disappears before its start.
    let gone = "case \"$*\" in *--check-take-over) rm \"$0\"; exec \"$REAL\" \"$@\";; esac";
    let upgrade = begin(&target, &["--program", &wrapper(dir.path(), gone)]);
    client = go_along(client, &target);
    let (code, _, complaint) = end(upgrade);
    assert_eq!(code, Some(1), "{}", target.log());
    assert!(complaint.contains("cannot run") && complaint.contains("serves again"), "{complaint}");
    is_as_before(&mut client);

    // A program that works.
    let upgrade = begin(&target, &[]);
    client = go_along(client, &target);
    let (code, _, complaint) = end(upgrade);
    assert_eq!(code, Some(0), "{complaint}");
    is_as_before(&mut client);
}

#[test]
fn a_program_starts_with_the_checked_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let client = Client::connect(&target.address, "v", 1).unwrap();
    let verifier = client.volume.verifier;
    let gate = Gate::new(dir.path());
    let upgrade = begin(&target, &["--program", &wrapper(dir.path(), &gate.script())]);
    let claim =
        VolumeClaim { generation: client.volume.generation, ..AccessMode::Exclusive.into() };
    drop(client);
    gate.wait();
    // The present files would lose the volume for its mounts.
    std::fs::write(dir.path().join("target.toml"), "max_io = 'nonsense'").unwrap();
    gate.open();
    let client = Client::claim(&target.address, "v", 1, claim).expect("the same volume");
    let (code, said, complaint) = end(upgrade);
    assert_eq!(code, Some(0), "{said} {complaint}\n{}", target.log());
    assert_eq!(client.volume.verifier, verifier);
}

/// A system call of a start. The program is killed before the kernel does anything.
struct Step {
    /// The program's next action.
    name: &'static str,
    call: &'static str,
    /// The number of the call in its thread, counted from 1.
    number: u32,
}

const fn step(name: &'static str, call: &'static str, number: u32) -> Step {
    Step { name, call, number }
}

/// The steps of a start over two volumes, in their order.
const STEPS: &[Step] = &[
    step("run its first instruction", "brk", 1),
    step("start its first thread", "clone3", 1),
    step("poll what it was handed", "epoll_create1", 1),
    step("let signals wake it", "socketpair", 1),
    step("take signals that end it", "signalfd4", 1),
    step("take the signal that reloads", "signalfd4", 2),
    step("lock the first store", "flock", 1),
    step("ask whether the first store has holes", "fallocate", 1),
    step("lock the second store", "flock", 2),
    step("ask whether the second store has holes", "fallocate", 2),
    step("lock the state directory", "flock", 3),
    step("make the ring of a poll group", "io_uring_setup", 1),
    step("start its second thread", "clone3", 2),
    step("start its third thread", "clone3", 3),
    step("serve", "epoll_create1", 2),
    step("start a thread that writes a record", "clone3", 4),
    step("remove what a killed writer left", "unlink", 1),
    step("make a record durable", "fsync", 1),
    step("put a record in its place", "rename", 1),
    step("make the place of a record durable", "fsync", 2),
    step("answer its first status", "sendto", 1),
];

impl Step {
    fn script(&self) -> String {
        let Self { call, number, .. } = self;
        at_the_start(&format!(
            "exec strace -D -f -o /dev/null -e trace={call} \
             -e inject={call}:signal=KILL:when={number} \"$REAL\" \"$@\""
        ))
    }
}

/// Whether the record of `volume` notes that the process holds acknowledged writes.
fn is_at_risk(dir: &Path, volume: &str) -> bool {
    let records = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let records = records.filter(|path| path.extension().is_some_and(|end| end == "volume"));
    let texts = records.map(|path| std::fs::read(path).unwrap());
    let mut records = texts.map(|text| serde_json::from_slice::<Value>(&text).unwrap());
    let record = records.find(|record| record["name"] == volume).expect("a record");
    record["at_risk"] == "process"
}

#[test]
fn a_program_that_is_killed_in_its_start_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path());
    std::fs::File::create(dir.path().join("w.img")).unwrap().set_len(1 << 20).unwrap();
    let text = format!(
        "{}[[volume]]\nname = 'w'\nstore = 'file'\npath = '{}'\ncache = 'write-through'\n",
        std::fs::read_to_string(&config).unwrap(),
        dir.path().join("w.img").display()
    );
    std::fs::write(&config, text).unwrap();
    let args = ["--config", &config.display().to_string()];
    let mut target = Target::start(dir.path(), &args);
    for (index, step) in STEPS.iter().enumerate() {
        let when = format!("about to {}", step.name);
        let data = pattern(index as u64, 4096);
        let mut clients = ["v", "w"].map(|volume| {
            let mut client = Client::connect(&target.address, volume, 1).unwrap();
            client.write(0, &data);
            client
        });
        let before = clients.each_ref().map(|client| client.volume);
        let other = wrapper(dir.path(), &step.script());
        let upgrade = begin(&target, &["--program", &other]);
        for client in &mut clients {
            assert_eq!(client.next_event(), Some(AsyncEvent::Upgrading), "{when}");
        }
        drop(clients);
        assert_eq!(target.wait(), None, "{when}: it was killed");
        let at_risk = ["v", "w"].map(|volume| is_at_risk(dir.path(), volume));
        let (code, said, complaint) = end(upgrade);
        assert_eq!(code, Some(1), "{when}: {said} {complaint}");
        let gone = complaint.contains("the target is gone") || complaint.contains("not back yet");
        assert!(gone, "{when}: {complaint}");

        target.start_again(dir.path(), &args);
        for (index, volume) in ["v", "w"].into_iter().enumerate() {
            let before = before[index];
            let claim =
                VolumeClaim { generation: before.generation, ..AccessMode::Exclusive.into() };
            let mut client = Client::claim(&target.address, volume, 1, claim)
                .unwrap_or_else(|error| panic!("{when}: {volume} is fenced: {error}"));
            assert!(client.read(0, 4096) == data, "{when}: {volume}");
            // A record that names the process belongs to a serving program. A kill of that one may
            // lose writes of a write-back volume, and must be reported.
            let same = client.volume.verifier == before.verifier;
            assert_eq!(same, !at_risk[index], "{when}: {volume}");
            client.flush();
            client.logout();
        }
        assert_eq!(target.status().fencings, 0, "{when}");
    }
}

#[test]
fn a_note_of_the_version_before_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path());
    let port = rblk_tests::program::free_port();
    let note = r#"{\"form\":1,\"pid\":$$,\"version\":\"0.0.9\",\"told\":1}"#;
    let log = std::fs::File::create(dir.path().join("target.log")).unwrap();
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "RBLK_HAND_OVER=\"{note}\" exec '{}' serve --config '{}' --listen tcp://127.0.0.1:{} --control-socket \
             '{dir}/target.sock' --state-dir '{dir}' --arena 8MiB --poll-groups 1",
            program("rblk-targetd").display(),
            config.display(),
            port.number,
            dir = dir.path().display()
        ))
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let socket = dir.path().join("target.sock");
    let status = wait_for("the target", || rblk_tests::program::status(&socket));
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(status.upgrade.expect("it took over").from_version, "0.0.9");
    assert_eq!(status.volumes.len(), 1, "from its path");
}
