//! Volumes that change while the target runs, by the commands that administrators type: the output,
//! the view of hosts meanwhile, the files, and the result of a restart.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rblk_config::TargetConfig;
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::AccessMode;
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Ended, Target, assert_refused, program, run, wait_for};
use serde_json::{Value, json};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const EROFS: i32 = -30;

/// A target with a configuration, in a directory of its own.
struct Bed {
    directory: TempDir,
}

impl Bed {
    /// A configuration of these volumes: name and cache mode, each on a file of 1 MiB.
    fn new(volumes: &[(&str, &str)]) -> Self {
        let bed = Self { directory: tempfile::tempdir().unwrap() };
        let table = |(name, cache): &(&str, &str)| bed.table(name, &format!("cache = '{cache}'\n"));
        let tables: String = volumes.iter().map(table).collect();
        fs::write(bed.config(), format!("listen = ['tcp://127.0.0.1:1']\n{tables}")).unwrap();
        bed
    }

    /// A table of a volume on a file of 1 MiB, which is made.
    fn table(&self, name: &str, more: &str) -> String {
        let path = self.image(name, MIB);
        format!("[[volume]]\nname = '{name}'\nstore = 'file'\npath = '{}'\n{more}", path.display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn config(&self) -> PathBuf {
        self.path("target.toml")
    }

    fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(&format!("{name}.img"));
        if !path.exists() {
            File::create(&path).unwrap().set_len(bytes).unwrap();
        }
        path
    }

    fn size(&self, name: &str) -> u64 {
        fs::metadata(self.path(&format!("{name}.img"))).unwrap().len()
    }

    fn serve(&self) -> Target {
        let config = text(&self.config());
        Target::start(self.directory.path(), &["--config", &config, "--poll-groups", "2"])
    }

    /// `rblk-target` with these arguments, for the running target.
    fn command(&self, what: &[&str]) -> Command {
        let mut command = Command::new(program("rblk-target"));
        command.args(what).arg("--control-socket").arg(self.path("target.sock"));
        if matches!(what[0], "volume" | "session") {
            command.arg("--config").arg(self.config());
        }
        command
    }

    fn run(&self, what: &str) -> Ended {
        run(&mut self.command(&what.split_whitespace().collect::<Vec<_>>()))
    }

    /// [`Self::run`] for a command that must succeed and print `said`.
    #[track_caller]
    fn does(&self, what: &str, said: &str) -> Ended {
        let ended = self.run(what);
        assert_eq!(ended.code, Some(0), "{what}: {ended:?}");
        assert!(ended.stdout.contains(said), "{what}: {said:?} is not in {ended:?}");
        ended
    }

    fn json(&self, what: &str) -> Value {
        let ended = self.does(&format!("{what} --output json"), "");
        serde_json::from_str(&ended.stdout).unwrap()
    }

    /// Names and sizes of the volumes.
    fn volumes(&self) -> Vec<(String, u64)> {
        let list = self.json("volume list");
        let one =
            |v: &Value| (v["name"].as_str().unwrap().to_owned(), v["size_bytes"].as_u64().unwrap());
        list.as_array().unwrap().iter().map(one).collect()
    }

    fn dump(&self) -> TargetConfig {
        TargetConfig::parse(&self.does("dump", "listen").stdout, "dump").unwrap()
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn a_snapshot_is_served_or_the_error_says_why_and_nothing_is_left_of_it() {
    let bed = Bed::new(&[("vol0", "write-back")]);
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    let (first, second) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
    client.write(0, &first);
    let ended = bed.run("volume snapshot vol0 --as then --persist");
    if ended.code == Some(0) {
        assert!(ended.stdout.contains("then: a snapshot, served, 1MiB, read-only"), "{ended:?}");
        client.write(0, &second);
        client.flush();
        assert!(fs::read(bed.path("then.img")).unwrap()[..64 << 10] == first);
        bed.does("volume list", "(of vol0)");
        bed.does("volume remove then --persist", "then: removed");
    } else {
        let why = format!(
            "the file system of {} cannot clone files (EOPNOTSUPP): use XFS with reflink=1 or btrfs",
            bed.path("then.img").display()
        );
        assert!(ended.stderr.contains(&why), "{ended:?}");
        assert!(
            !bed.path("then.img").exists() && !bed.path("target.toml.d/volume-then.toml").exists()
        );
        client.write(0, &second);
        client.flush();
        assert!(fs::read(bed.path("vol0.img")).unwrap()[..64 << 10] == second);
    }
    // An existing file is not replaced.
    bed.image("mine", 4096);
    let taken = bed.run(&format!("volume snapshot vol0 --path {}", text(&bed.path("mine.img"))));
    assert!(taken.stderr.contains("mine.img exists, and is not replaced"), "{taken:?}");
    assert_eq!(bed.size("mine"), 4096);
    let taken = bed.run("volume snapshot vol0 --as vol0");
    assert_ne!(taken.code, Some(0), "{taken:?}");
    let unknown = bed.run("volume snapshot nosuch");
    assert!(unknown.stderr.contains("there is no volume nosuch"), "{unknown:?}");
    assert_eq!(bed.volumes().len(), 1);
}

/// Whether the file of a volume is unlocked.
fn is_unlocked(path: &Path) -> bool {
    File::open(path).unwrap().try_lock().is_ok()
}

#[test]
fn a_volume_grows_under_its_host() {
    for cache in ["none", "write-through", "write-back"] {
        let bed = Bed::new(&[("vol0", cache)]);
        let target = bed.serve();
        let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
        let (first, second) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
        client.write(MIB - (64 << 10), &first);
        let beyond = client.try_io(IoOp::Write, MIB, 4096);
        assert!(beyond.is_some_and(|result| result < 0), "{cache}: {beyond:?}");

        bed.does("volume resize vol0 3MiB", "vol0: changed, 3MiB");
        client.write(2 * MIB, &second);
        assert_eq!(client.read(MIB, 4096), vec![0; 4096], "{cache}: a hole");
        // The administrator makes the file longer.
        let path = bed.path("vol0.img");
        File::options().write(true).open(&path).unwrap().set_len(4 * MIB).unwrap();
        bed.does("volume resize vol0", "vol0: changed, 4MiB");
        client.write(4 * MIB - (64 << 10), &first);
        assert!(
            client.read(2 * MIB, 64 << 10) == second
                && client.read(MIB - (64 << 10), 64 << 10) == first
        );
        client.flush();
        assert_eq!(
            (bed.size("vol0"), bed.volumes()),
            (4 * MIB, vec![("vol0".to_owned(), 4 * MIB)])
        );
        let file = fs::read(&path).unwrap();
        assert!(file[usize::try_from(2 * MIB).unwrap()..][..64 << 10] == second, "{cache}");
        client.logout();
    }
}

#[test]
fn a_volume_shrinks_only_when_told_and_never_keeps_what_was_cut_off() {
    let bed = Bed::new(&[("vol0", "write-back")]);
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    let data = pattern(3, 64 << 10);
    client.write(0, &data);
    client.write(MIB - (64 << 10), &data);
    assert_refused(&bed.run("volume resize vol0 512KiB"), 1, &["would lose the data", "--shrink"]);
    assert_eq!(bed.size("vol0"), MIB);
    bed.does("volume resize vol0 512KiB --shrink", "vol0: changed, 512KiB");
    assert_eq!(bed.size("vol0"), MIB / 2, "what was dirty did not make it longer again");
    // Its host is cut off for a moment, and opens the volume again.
    assert_eq!(client.try_io(IoOp::Read, 0, 4096), None);
    drop(client);
    let mut client = reconnect(&target);
    assert_eq!(client.volume.blocks.0 * 4096, MIB / 2);
    assert!(client.read(0, 64 << 10) == data);
    assert!(client.try_io(IoOp::Read, MIB / 2, 4096).is_some_and(|result| result < 0));
    bed.does("volume resize vol0 1MiB", "vol0: changed, 1MiB");
    let regrown = client.read(MIB - (64 << 10), 64 << 10);
    assert!(regrown == vec![0; 64 << 10], "not the old data");
    client.logout();
}

/// Opens the volume again as a host without old connections.
fn reconnect(target: &Target) -> Client {
    let address = &target.address;
    wait_for("a host to be let in again", || Client::connect(address, "vol0", 1).ok())
}

#[test]
fn a_volume_becomes_read_only_and_writable_again_under_its_host() {
    let bed = Bed::new(&[("vol0", "write-through")]);
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    let data = pattern(4, 8192);
    client.write(0, &data);
    bed.does("volume set vol0 --read-only", "vol0: changed, 1MiB, read-only");
    assert_eq!(client.try_io(IoOp::Write, 0, 4096), Some(EROFS));
    assert!(client.read(0, 8192) == data);
    client.flush();
    let list = bed.json("volume list");
    assert_eq!((&list[0]["read_only"], &list[0]["in_use"]), (&json!(true), &json!(true)));
    bed.does("volume set vol0 --read-only=false --read-ahead 64KiB", "read-write");
    client.write(4096, &data);
    assert!(client.read(4096, 8192) == data);
    client.logout();
}

/// A file with another length, as after a loss of power, keeps only its own volume from service.
#[test]
fn a_file_of_another_size_disables_only_its_own_volume() {
    for (bytes, words) in [
        (MIB / 2, "524288 bytes, but the configuration says size = 1048576"),
        (2 * MIB, "2097152 bytes, but the configuration says size = 1048576"),
        (0, "0 bytes, but the configuration says size = 1048576"),
        (MIB - 100, "1048476 bytes, but the configuration says size = 1048576"),
    ] {
        let bed = Bed::new(&[("good", "write-back")]);
        let config = fs::read_to_string(bed.config()).unwrap();
        let (first, second) = (bed.table("vol0", "size = '1MiB'\n"), bed.table("last", ""));
        let tables = config.find("[[volume]]").unwrap();
        let (before, good) = config.split_at(tables);
        fs::write(bed.config(), format!("{before}{first}{good}{second}")).unwrap();
        let image = OpenOptions::new().write(true).open(bed.path("vol0.img")).unwrap();
        image.set_len(bytes).unwrap();
        let target = bed.serve();
        let served = vec![("good".to_owned(), MIB), ("last".to_owned(), MIB)];
        assert_eq!(bed.volumes(), served, "{bytes}");
        for name in ["good", "last"] {
            let mut client = Client::connect(&target.address, name, 1).unwrap();
            client.write(0, &pattern(7, 4096));
            client.flush();
            client.logout();
        }
        assert!(Client::connect(&target.address, "vol0", 1).is_err());
        assert_eq!(bed.size("vol0"), bytes, "it is left as it is");
        let log = target.log();
        let told = log.lines().find(|line| line.contains("the volume is not served")).unwrap();
        assert!(told.contains("ERROR") && told.contains(words), "{told}");
        let status = bed.run("status").stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let warning = "WARN volume `vol0` is not served: ";
        assert!(status.contains(warning) && status.contains(words), "{status}");
        let check = run(Command::new(program("rblk-target")).args([
            "check",
            "--config",
            &text(&bed.config()),
        ]));
        assert_eq!(check.code, Some(9), "{check:?}");
        // After the repair the volume is served again.
        image.set_len(MIB).unwrap();
        bed.does("reload", "vol0");
        Client::connect(&target.address, "vol0", 1).unwrap().logout();
        assert!(!bed.run("status").stdout.contains("not served"));
    }
}

#[test]
fn limits_are_set_shown_kept_and_taken_away_while_a_host_reads() {
    let bed = Bed::new(&[]);
    fs::create_dir(bed.path("target.d")).unwrap();
    let file = bed.path("target.d/volume-vol0.toml");
    fs::write(&file, bed.table("vol0", "")).unwrap();
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    let said = "limited to 10 IOPS (burst 1), 64MiB/s (burst 6552KiB)";
    bed.does("volume set vol0 --iops 10 --iops-burst 1 --bandwidth 64MiB --persist", said);
    let toml = fs::read_to_string(&file).unwrap();
    assert!(toml.contains("iops = 10\n") && toml.contains("bandwidth = \"64MiB/s\""), "{toml}");
    (0..4).for_each(|_| drop(client.read(0, 4096)));
    client.flush();
    let delays = |target: &Target| target.status().volumes[0].delays;
    let delayed = delays(&target);
    assert!(delayed.commands >= 2 && delayed.waited_us > 50_000, "{delayed:?}");
    let list = bed.json("volume list");
    assert_eq!(list[0]["limits"], json!({"iops": 10, "iops_burst": 1, "bandwidth": "64MiB/s"}));
    bed.does("status -v", "LIMITS OF");
    // A limit in a file is shown as a difference, and applies after a reload.
    fs::write(&file, bed.table("vol0", "bandwidth = '32MiB/s'\n")).unwrap();
    bed.does("reload --dry-run", "bandwidth: \"64MiB/s\" -> \"32MiB/s\"");
    bed.does("reload", "vol0");
    assert_eq!(bed.dump().volumes[0].limits.to_string(), "32MiB/s (burst 3276KiB)");
    bed.does("volume set vol0 --bandwidth none", "vol0: changed, 1MiB, read-write\n");
    let before = delays(&target).commands;
    (0..64).for_each(|_| drop(client.read(0, 4096)));
    assert_eq!(delays(&target).commands, before, "nothing is limited");
    assert_refused(&bed.run("volume set vol0 --iops 0"), 2, &["--iops 0", "from 10 to 100000000"]);
    assert_refused(
        &bed.run("volume set vol0 --bandwidth 8MiB --bandwidth-burst 4KiB"),
        1,
        &["bandwidth_burst", "less than max_io"],
    );
    client.logout();
}

#[test]
fn a_cache_mode_changes_without_a_loss() {
    let bed = Bed::new(&[("vol0", "write-back")]);
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    let verifier = client.volume.verifier;
    let data = pattern(5, 64 << 10);
    client.write(0, &data);
    assert_refused(
        &bed.run("volume set vol0 --read-only"),
        1,
        &["vol0 is read-only then", "volume set vol0 --read-only --cache write-through"],
    );
    bed.does("volume set vol0 --cache write-through", "cache write-through");
    assert!(fs::read(bed.path("vol0.img")).unwrap()[..64 << 10] == data, "it was written first");
    drop(client);
    let mut client = reconnect(&target);
    assert_eq!(client.volume.verifier, verifier, "its host sees no loss");
    assert!(client.read(0, 64 << 10) == data);
    let refused = bed.run("volume set vol0 --cache write-back");
    assert_refused(&refused, 1, &["while hosts have it open", "unmount it first", "test"]);
    client.logout();
    wait_for("the host to be gone", || {
        (bed.run("volume set vol0 --cache write-back").code == Some(0)).then_some(())
    });
    bed.does("volume set vol0 --cache none", "cache none");
    let mut client = reconnect(&target);
    assert!(client.read(0, 64 << 10) == data);
    client.logout();
}

#[test]
fn volumes_come_and_go() {
    let bed = Bed::new(&[("vol0", "write-through")]);
    let target = bed.serve();
    let image = bed.image("new", MIB);
    let add = format!("volume add new --file {} --cache write-back", image.display());
    bed.does(&add, "new: served, 1MiB, read-write, cache write-back");
    assert!(!is_unlocked(&image));
    assert_refused(&bed.run(&add), 4, &["new is served already"]);
    let mut client = Client::connect(&target.address, "new", 1).unwrap();
    let data = pattern(6, 64 << 10);
    client.write(4096, &data);
    assert_refused(&bed.run("volume remove new"), 1, &["new is in use: test (127.0.0.1"]);

    // The removal waits until the host has gone, and lets no other host in meanwhile.
    let mut drain = bed.command(&["volume", "remove", "new", "--drain"]);
    let mut drain = drain.stdout(Stdio::null()).spawn().unwrap();
    wait_for("no other host to be let in", || {
        let other = Client::claim(&target.address, "new", 2, AccessMode::ReadOnly);
        other.err().filter(|error| error.to_string().contains("about to be removed"))
    });
    assert!(drain.try_wait().unwrap().is_none() && client.read(4096, 64 << 10) == data);
    client.logout();
    assert!(drain.wait().unwrap().success());
    assert_eq!(bed.volumes().len(), 1);
    assert!(is_unlocked(&image) && fs::read(&image).unwrap()[4096..][..64 << 10] == data);

    // A forced removal, of a volume in memory.
    bed.does("volume add ram --memory 1MiB", "ram: served");
    let mut client = Client::connect(&target.address, "ram", 1).unwrap();
    client.write(0, &data);
    assert!(client.read(0, 64 << 10) == data);
    let size = bed.does("volume resize ram 2MiB", "ram: changed, 2MiB");
    assert!(size.stdout.contains("--persist keeps it"));
    drop(client);
    let connect = || Client::connect(&target.address, "ram", 1).ok();
    let mut client = wait_for("the host to be let in again", connect);
    assert!(client.read(0, 64 << 10) == data && client.read(MIB, 4096) == vec![0; 4096]);
    bed.does("volume remove ram --force", "ram: removed");
    assert_eq!(client.try_io(IoOp::Read, 0, 4096), None);
    assert!(Client::connect(&target.address, "ram", 3).is_err());
    assert_refused(&bed.run("volume remove ram"), 11, &["there is no volume ram"]);
}

#[test]
fn a_drain_whose_command_was_killed_is_given_up() {
    let bed = Bed::new(&[("vol0", "write-through")]);
    let target = bed.serve();
    let client = Client::connect(&target.address, "vol0", 1).unwrap();
    let mut drain = bed.command(&["volume", "remove", "vol0", "--drain"]);
    let mut drain = drain.stdout(Stdio::null()).spawn().unwrap();
    let other = || Client::claim(&target.address, "vol0", 2, AccessMode::ReadOnly);
    wait_for("no other host to be let in", || other().is_err().then_some(()));
    drain.kill().unwrap();
    drain.wait().unwrap();
    wait_for("another host to be let in", || other().ok());
    client.logout();
    assert_eq!(bed.volumes().len(), 1);
}

#[test]
fn a_drain_removes_the_volume_that_it_waited_for_and_holds_up_no_other_change() {
    let bed = Bed::new(&[("vol0", "write-through")]);
    let target = bed.serve();
    let image = bed.image("new", MIB);
    let add = format!("volume add new --file {}", image.display());
    bed.does(&format!("{add} --persist"), "volume-new.toml");
    let _client = Client::connect(&target.address, "new", 1).unwrap();
    let mut drain = bed.command(&["volume", "remove", "new", "--drain", "--persist"]);
    let drain = drain.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let other = || Client::claim(&target.address, "new", 2, AccessMode::ReadOnly);
    wait_for("no other host to be let in", || other().is_err().then_some(()));
    bed.does("volume add brief --memory 1MiB --persist", "volume-brief.toml");
    bed.does("volume remove new --force", "new: removed");
    bed.does(&add, "new: served");
    let ended = drain.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("was removed by another command"), "{said}");
    assert!(bed.volumes().iter().any(|(name, _)| name == "new"), "another volume stays");
    assert!(bed.path("target.d/volume-new.toml").exists());
    other().unwrap().logout();
}

#[test]
fn a_session_is_ended_and_comes_again() {
    let bed = Bed::new(&[("vol0", "write-through")]);
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    client.write(0, &pattern(7, 4096));
    let sessions = bed.json("session list");
    let number = sessions[0]["number"].as_u64().unwrap();
    assert_eq!((&sessions[0]["host"], &sessions[0]["volumes"]), (&json!("test"), &json!(["vol0"])));
    bed.does("session list", &format!("{number:>6}  test"));
    assert_refused(&bed.run("session kick db9"), 11, &["no session is of db9", "session list"]);
    let ended = bed.json(&format!("session kick {number}"));
    assert!(ended[0].as_str().unwrap().starts_with("test (127.0.0.1"), "{ended}");
    assert_eq!(client.try_io(IoOp::Read, 0, 4096), None);
    // Another host may open the volume at once.
    let other =
        wait_for("the volume to be free", || Client::connect(&target.address, "vol0", 2).ok());
    other.logout();
}

#[test]
fn a_reload_does_all_or_nothing() {
    let bed = Bed::new(&[("vol0", "write-through"), ("logs", "none")]);
    let target = bed.serve();
    let base = fs::read_to_string(bed.config()).unwrap();
    assert_eq!(bed.json("reload --dry-run")["volumes"], json!([]));
    let (vol0, logs) = base.split_once("[[volume]]\nname = 'logs'").unwrap();
    let wanted = format!(
        "{}read_only = true\nread_ahead = '64KiB'\n{}",
        vol0.replacen("listen", "lease = '1m'\nlisten", 1),
        bed.table("new", "size = '1MiB'\n")
    );
    let client = Client::connect(&target.address, "logs", 1).unwrap();
    fs::write(bed.config(), &wanted).unwrap();
    let refused = bed.run("reload --dry-run");
    assert_eq!(refused.code, Some(1));
    for line in [
        "remove volume logs",
        "change volume vol0: read_ahead: \"512KiB\" -> \"64KiB\", read_only: false -> true",
        "add volume new",
        "needs a restart: lease: \"30s\" -> \"1m\"",
        "REFUSED: logs is in use: test",
        "nothing was changed",
    ] {
        assert!(refused.stdout.contains(line), "{line:?} is not in {refused:?}");
    }
    let before = bed.dump();
    assert_refused(&bed.run("reload"), 1, &["nothing was reloaded", "logs is in use: test"]);
    assert_eq!(bed.dump(), before);
    assert!(is_unlocked(&bed.path("new.img")), "what was opened is closed");
    client.logout();

    // A missing store, and a file that does not parse.
    fs::write(bed.config(), wanted.replace("new.img", "none.img")).unwrap();
    let missing = bed.run("reload");
    assert_refused(&missing, 1, &["nothing was reloaded", "none.img"]);
    fs::write(bed.config(), "volume = 7").unwrap();
    assert_refused(&bed.run("reload"), 1, &["nothing was reloaded", "target.toml"]);
    assert_eq!(bed.dump(), before);

    fs::write(bed.config(), &wanted).unwrap();
    // The lease needs a restart.
    let reload = |code: i32| {
        let ended = bed.run("reload --output json");
        assert_eq!(ended.code, Some(code), "{ended:?}");
        serde_json::from_str::<Value>(&ended.stdout).unwrap()
    };
    wait_for("the host of logs to be gone", || {
        bed.json("session list").as_array().is_some_and(Vec::is_empty).then_some(())
    });
    let done = reload(12);
    assert_eq!(done["restart"][0]["key"], "lease");
    let names: Vec<String> = bed.volumes().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["vol0", "new"]);
    assert!(bed.dump().volumes[0].read_only);
    assert_eq!(reload(12)["volumes"], json!([]), "once");

    // A key that cannot change while the volume is served.
    let moved = wanted.replace("vol0.img", "new.img").replacen("new.img", "other.img", 1);
    bed.image("other", MIB);
    fs::write(bed.config(), moved).unwrap();
    assert_refused(&bed.run("reload"), 1, &["path", "vol0 cannot change while it is served"]);

    // A reload by signal.
    fs::write(bed.config(), format!("{vol0}[[volume]]\nname = 'logs'{logs}")).unwrap();
    target.hang_up();
    wait_for("the signal to have its effect", || {
        let names: Vec<String> = bed.volumes().into_iter().map(|(name, _)| name).collect();
        (names == ["vol0", "logs"]).then_some(())
    });
    wait_for("a line in the log", || target.log().contains("SIGHUP: reloaded").then_some(()));
    drop(target);
}

#[test]
fn persisted_changes_survive_a_restart() {
    let bed = Bed::new(&[("vol0", "write-through")]);
    let mut target = bed.serve();
    let image = bed.image("new", MIB);
    let add = format!("volume add new --file {} --persist", image.display());
    bed.does(&add, "new: written to ");
    bed.does("volume add brief --memory 1MiB", "brief: until the target restarts or reloads");
    bed.does("volume resize new 2MiB --persist", "new: changed, 2MiB");
    // A target would not start if the file's size differed from the configured one.
    let fixed = format!(
        "[[volume]]\nname = \"new\"\nstore = \"file\"\npath = {:?}\nsize = \"2MiB\"\n",
        image
    );
    let (drop_in, written) = (bed.path("target.d/volume-new.toml"), "the drop-in of the volume");
    let before = fs::read_to_string(&drop_in).expect(written);
    fs::write(&drop_in, fixed).expect(written);
    assert_refused(&bed.run("volume resize new 3MiB"), 2, &["new has 2MiB", "--persist"]);
    fs::write(&drop_in, before).expect(written);
    bed.does("volume set new --cache write-back --persist", "volume-new.toml is changed");
    // This file is hand-written.
    let refused = bed.run("volume set vol0 --read-only --persist");
    assert_refused(&refused, 2, &["vol0 is not in", "volume-vol0.toml", "rblk-target reload"]);
    assert!(!bed.dump().volumes[0].read_only, "and nothing has changed");
    let dumped = bed.dump();
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    drop(target);

    let target = bed.serve();
    assert_eq!(bed.volumes(), [("vol0".to_owned(), MIB), ("new".to_owned(), 2 * MIB)]);
    let kept: Vec<_> = dumped.volumes.iter().filter(|v| v.name != "brief").cloned().collect();
    assert_eq!(bed.dump().volumes, kept);
    bed.does("volume remove new --persist", "new: removed");
    assert!(!bed.path("target.d/volume-new.toml").exists());
    drop(target);

    // A target's dump configures the same target.
    fs::remove_dir_all(bed.path("target.d")).unwrap();
    fs::write(bed.config(), dumped.dump().unwrap()).unwrap();
    let _target = bed.serve();
    assert_eq!(bed.dump().volumes, dumped.volumes);
}
