//! Keys and hosts by the commands that administrators type: the output, the files, and the orders
//! to a running target.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_config::TargetConfig;
use rblk_protocol::auth::PublicKey;
use rblk_tests::program::{Ended, Target, assert_refused, program, run};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory with the configuration of a target that requires keys.
struct Bed {
    directory: TempDir,
}

impl Bed {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let text = "listen = ['tcp://127.0.0.1:1']\nauth = 'required'\n\
                    [[volume]]\nname = 'vol0'\nstore = 'memory'\nsize = '1MiB'\n\
                    [[volume]]\nname = 'logs'\nstore = 'memory'\nsize = '1MiB'\n";
        let bed = Self { directory };
        let text = format!(
            "control_socket = '{}'\nkey_file = '{}'\n{text}",
            bed.path("target.sock").display(),
            bed.path("target.key").display()
        );
        fs::write(bed.config(), text).unwrap();
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn config(&self) -> PathBuf {
        self.path("target.toml")
    }

    /// Makes a key and returns the public one.
    fn key(&self, program: &str, name: &str) -> String {
        let ended = command(program, &["key", "new", "--file", &text(&self.path(name))]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let key = ended.stdout.trim_end();
        key.parse::<PublicKey>().unwrap_or_else(|e| panic!("{key}: {e}"));
        key.to_owned()
    }

    /// `rblk-target host` with these arguments and this configuration.
    fn host(&self, what: &[&str]) -> Ended {
        let config = text(&self.config());
        command("rblk-target", &[&["host"], what, &["--config", &config]].concat())
    }

    fn list(&self) -> Value {
        let ended = self.host(&["list", "--output", "json"]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.stdout).unwrap()
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn command(name: &str, args: &[&str]) -> Ended {
    run(Command::new(program(name)).args(args))
}

#[track_caller]
fn assert_said(ended: &Ended, pieces: &[&str]) {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for piece in pieces {
        assert!(ended.stdout.contains(piece), "{piece:?} is not in:\n{}", ended.stdout);
    }
}

#[test]
fn a_key_is_made_once_and_shown() {
    let bed = Bed::new();
    for (name, other) in [("rblk-target", "rblk-initiator"), ("rblk-initiator", "rblk-target")] {
        let path = bed.path(&format!("{name}.key"));
        let file = text(&path);
        let ended = command(name, &["key", "show", "--file", &file]);
        assert_refused(
            &ended,
            2,
            &["no such key file", &format!("`{name} key new --file {file}`")],
        );

        let ended = command(name, &["key", "new", "--file", &file]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        // The next step, with the commands of the other side.
        assert!(ended.stderr.contains(&format!("`{other} ")), "{}", ended.stderr);
        assert!(ended.stderr.contains("host add NAME --key KEY"), "{}", ended.stderr);
        let key = ended.stdout.trim_end();
        assert!(key.parse::<PublicKey>().is_ok(), "{key:?}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);

        let before = fs::read_to_string(&path).unwrap();
        let ended = command(name, &["key", "new", "--file", &file]);
        assert_refused(&ended, 4, &[&file, "there is a file already, and nothing was changed"]);
        assert_eq!(fs::read_to_string(&path).unwrap(), before);

        let ended = command(name, &["key", "show", "--file", &file]);
        assert_eq!((ended.stdout.trim_end(), ended.stderr.as_str()), (key, ""));
        let ended = command(name, &["key", "show", "--file", &file, "--output", "json"]);
        let shown: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(shown, json!({"public_key": key, "file": file}));

        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let ended = command(name, &["key", "show", "--file", &file]);
        assert_refused(&ended, 2, &["mode is 0644", &format!("`chmod 600 {file}`")]);
    }
}

#[test]
fn hosts_are_files_that_a_target_reads() {
    let bed = Bed::new();
    let (first, second) = (bed.key("rblk-initiator", "1.key"), bed.key("rblk-initiator", "2.key"));
    let file = bed.path("target.d/host-db1.toml");
    let ended =
        bed.host(&["add", "db1", "--key", &first, "--volume", "vol0:rw", "--volume", "logs:ro"]);
    assert_said(&ended, &["db1: written to", &text(&file), "no target answers at"]);
    let host = |keys: &[&str], volumes: &[&str], take_over: bool| json!({"name": "db1", "keys": keys, "volumes": volumes, "take_over": take_over, "file": text(&file)});
    assert_eq!(bed.list(), json!([host(&[&first], &["vol0:rw", "logs:ro"], false)]));
    let ended = bed.host(&["list"]);
    let row = format!("db1   no         vol0:rw, logs:ro  {first}\n");
    assert!(ended.stdout.ends_with(&row), "{}", ended.stdout);

    // Rotation: adds the second key, then removes the first.
    assert_said(&bed.host(&["add", "db1", "--key", &second, "--take-over"]), &["db1: written to"]);
    assert_eq!(bed.list(), json!([host(&[&first, &second], &["vol0:rw", "logs:ro"], true)]));
    let ended = bed.host(&["add", "db1", "--key", &second]);
    assert_said(&ended, &["says so already"]);
    let third = bed.key("rblk-initiator", "3.key");
    let ended = bed.host(&["add", "db1", "--key", &third]);
    assert_refused(&ended, 2, &["two keys already", &format!("host remove db1 --key {first}")]);
    assert_said(&bed.host(&["remove", "db1", "--key", &first]), &["is changed"]);
    assert_said(&bed.host(&["remove", "db1", "--volume", "logs"]), &["is changed"]);
    assert_eq!(bed.list(), json!([host(&[&second], &["vol0:rw"], true)]));

    // A refused command changes nothing.
    for (what, pieces) in [
        (
            &["add", "db2", "--key", &second, "--volume", "vol0:rw"][..],
            &["a key belongs to one host"][..],
        ),
        (
            &["add", "db2", "--key", &first, "--volume", "vol1:rw"],
            &["no volume \"vol1\"", "logs, vol0"],
        ),
        (&["add", "db2"], &["a new host needs a key and a volume"]),
        (
            &["add", "../db2", "--key", &first, "--volume", "vol0:rw"],
            &["host \"../db2\"", "not allowed"],
        ),
        (&["add", "db2", "--key", "rblk1:abc", "--volume", "vol0:rw"], &["--key", "58 characters"]),
        (&["add", "db2", "--key", &first, "--volume", "vol0"], &["--volume", ":rw"]),
        (&["remove", "db1", "--key", &first], &["db1 does not have that key", &second]),
        (&["remove", "db1", "--key", &second], &["the last key of db1"]),
    ] {
        assert_refused(&bed.host(what), 2, pieces);
        assert_eq!(bed.list(), json!([host(&[&second], &["vol0:rw"], true)]));
    }
    assert_refused(&bed.host(&["remove", "db2"]), 11, &["there is no host db2", "host list"]);

    assert_said(&bed.host(&["remove", "db1"]), &["is gone"]);
    assert_eq!(bed.list(), json!([]));
    assert!(!file.exists());
    assert!(TargetConfig::load(&bed.config()).unwrap().hosts.is_empty());
}

/// A host in a hand-written file stays as it is.
#[test]
fn a_host_of_another_file_is_not_touched() {
    let bed = Bed::new();
    let key = bed.key("rblk-initiator", "1.key");
    let mut config = fs::read_to_string(bed.config()).unwrap();
    config += &format!("[[host]]\nname = 'old'\nkeys = ['{key}']\nvolumes = ['*:rw']\n");
    fs::write(bed.config(), &config).unwrap();
    assert_eq!(bed.list()[0]["file"], Value::Null);
    let other = bed.key("rblk-initiator", "2.key");
    let ended = bed.host(&["add", "old", "--key", &other, "--volume", "vol0:rw"]);
    assert_refused(&ended, 2, &["has the same name", "target.toml:"]);
    let ended = bed.host(&["remove", "old"]);
    assert_refused(&ended, 2, &["old is not in", "remove it there", "rblk-target reload"]);
    assert_eq!(fs::read_to_string(bed.config()).unwrap(), config);
}

#[test]
fn a_running_target_hears_of_changed_hosts() {
    let bed = Bed::new();
    bed.key("rblk-target", "target.key");
    let (first, second) = (bed.key("rblk-initiator", "1.key"), bed.key("rblk-initiator", "2.key"));
    let target = Target::start(bed.directory.path(), &["--config", &text(&bed.config())]);
    let add = ["add", "db1", "--key", &first, "--volume", "vol0:rw"];
    assert_said(&bed.host(&add), &["the running target lets in one host, db1, now"]);
    // A change by hand, and a `reload`.
    let table = format!("[[host]]\nname = 'db2'\nkeys = ['{second}']\nvolumes = ['*:ro']\n");
    fs::write(bed.path("target.d/by-hand.toml"), table).unwrap();
    let socket = text(&target.socket);
    let reload = || command("rblk-target", &["reload", "--control-socket", &socket]);
    assert_said(&reload(), &["change host db2", "reloaded", "lets in 2 hosts now"]);
    // A reload with an error changes nothing.
    fs::write(bed.path("target.d/by-hand.toml"), "[[host]]\nname = 'db2'\n").unwrap();
    assert_refused(&reload(), 1, &["nothing was reloaded", "by-hand.toml:1:1", "keys: missing"]);
    fs::remove_file(bed.path("target.d/by-hand.toml")).unwrap();
    assert_said(&bed.host(&["remove", "db1"]), &["lets in no host now"]);

    // A target with another configuration does not learn of these hosts.
    let other = Bed::new();
    let config = fs::read_to_string(other.config()).unwrap();
    let mine = text(&other.path("target.sock"));
    fs::write(other.config(), config.replace(&mine, &socket)).unwrap();
    let ended = other.host(&add);
    assert_refused(&ended, 1, &["reads another configuration", "restart it with --config"]);
    drop(target);
    assert_refused(&reload(), 3, &["no target answers at", &socket]);
}

#[test]
fn limits_of_a_host_are_set_kept_and_taken_away_in_the_running_target() {
    let bed = Bed::new();
    bed.key("rblk-target", "target.key");
    let (key, other) = (bed.key("rblk-initiator", "1.key"), bed.key("rblk-initiator", "2.key"));
    let target = Target::start(bed.directory.path(), &["--config", &text(&bed.config())]);
    let socket = text(&target.socket);
    let set = |args: &[&str]| bed.host(&[&["set"], args].concat());
    let limits = |name: &str| {
        let ended = command("rblk-target", &["dump", "--control-socket", &socket]);
        let config = TargetConfig::parse(&ended.stdout, "dump").unwrap();
        config.hosts.iter().find(|host| host.name == name).map(|host| host.limits.to_string())
    };
    assert_refused(&set(&["db1", "--iops", "50"]), 11, &["the running target has no host db1"]);
    assert_refused(&set(&["db1"]), 2, &["--iops"]);
    let add = ["add", "db1", "--key", &key, "--volume", "vol0:rw"];
    assert_said(&bed.host(&add), &["lets in one host"]);
    let file = bed.path("target.d/host-db1.toml");
    let before = fs::read_to_string(&file).unwrap();

    let said = ["db1: changed, limited to 500 IOPS (burst 50)", "--persist keeps it"];
    assert_said(&set(&["db1", "--iops", "500"]), &said);
    assert_eq!(limits("db1").as_deref(), Some("500 IOPS (burst 50)"));
    assert_eq!(fs::read_to_string(&file).unwrap(), before, "the file stays");
    let said = ["limited to 500 IOPS (burst 50), 64MiB/s", "host-db1.toml is changed"];
    assert_said(&set(&["db1", "--bandwidth", "64MiB", "--persist"]), &said);
    // A temporary limit is not written to the file.
    let toml = fs::read_to_string(&file).unwrap();
    assert!(toml.contains("bandwidth = \"64MiB/s\"") && !toml.contains("iops"), "{toml}");
    assert!(toml.contains(&key), "{toml}");
    let json = set(&["db1", "--iops", "none", "--bandwidth", "none", "--output", "json"]);
    assert_eq!(json.code, Some(0), "{json:?}");
    let host: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&host["name"], &host["bandwidth"]), (&json!("db1"), &Value::Null));
    assert_eq!(limits("db1").as_deref(), Some("none"));
    assert_said(&command("rblk-target", &["reload", "--control-socket", &socket]), &["db1"]);
    assert!(limits("db1").unwrap().starts_with("64MiB/s"));

    // A refused change changes nothing.
    let refused = set(&["db1", "--bandwidth-burst", "4KiB", "--persist"]);
    assert_refused(&refused, 2, &["bandwidth_burst", "less than max_io"]);
    let refused = set(&["db1", "--bandwidth-burst", "4KiB"]);
    assert_refused(&refused, 1, &["bandwidth_burst", "less than max_io"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), toml);
    assert!(limits("db1").unwrap().starts_with("64MiB/s"));
    let table = format!("[[host]]\nname = 'db2'\nkeys = ['{other}']\nvolumes = ['*:ro']\n");
    fs::write(bed.path("target.d/by-hand.toml"), table).unwrap();
    let refused = set(&["db2", "--iops", "50", "--persist"]);
    assert_refused(&refused, 2, &["db2 is not in", "change it there"]);
}

#[test]
fn a_reload_revokes_before_it_grants_and_names_rights_that_are_still_valid() {
    let bed = Bed::new();
    bed.key("rblk-target", "target.key");
    let (first, second) = (bed.key("rblk-initiator", "1.key"), bed.key("rblk-initiator", "2.key"));
    let target = Target::start(bed.directory.path(), &["--config", &text(&bed.config())]);
    for (name, key) in [("db1", &first), ("db2", &second)] {
        let add = ["add", name, "--key", key, "--volume", "vol0:rw"];
        assert_said(&bed.host(&add), &["the running target lets in"]);
    }
    let socket = text(&target.socket);
    let reload = |more: &[&str]| {
        command("rblk-target", &[&["reload", "--control-socket", &socket], more].concat())
    };
    let hosts = || {
        let ended = command("rblk-target", &["dump", "--control-socket", &socket]);
        let config = TargetConfig::parse(&ended.stdout, "dump").unwrap();
        config.hosts.into_iter().map(|host| host.name).collect::<Vec<_>>()
    };
    let config = fs::read_to_string(bed.config()).unwrap();
    let third = bed.key("rblk-initiator", "3.key");
    let more = format!("[[host]]\nname = 'db3'\nkeys = ['{third}']\nvolumes = ['*:rw']\n");

    // Refused before the first step: nothing changes, and the message names the hosts that are
    // still let in.
    fs::remove_file(bed.path("target.d/host-db1.toml")).unwrap();
    fs::write(bed.config(), config.replacen("size = '1MiB'", "size = '512KiB'", 1) + &more)
        .unwrap();
    let still = "the files take from db1 are still valid";
    let refused = reload(&[]);
    assert_refused(&refused, 1, &["nothing was reloaded", "--shrink", still, "reload --hosts"]);
    assert_eq!(hosts(), ["db1", "db2"]);
    assert_said(&reload(&["--hosts"]), &["lets in 2 hosts now"]);
    assert_eq!(hosts(), ["db3", "db2"]);

    // A later failure: revoked rights are revoked, and new rights are not granted.
    fs::remove_file(bed.path("target.d/host-db2.toml")).unwrap();
    let fourth = more.replace("db3", "db4").replace(&third, &second);
    let huge = config.replacen("size = '1MiB'", "size = '512TiB'", 1);
    fs::write(bed.config(), huge + &more + &fourth).unwrap();
    let taken = "the rights that the files take from hosts are taken, and the rights that they give are not given";
    assert_refused(&reload(&[]), 1, &["no volume was changed", taken]);
    assert_eq!(hosts(), ["db3"]);
}

/// The first steps of the documents, from the keys to the volumes of a host.
#[test]
fn a_host_sees_its_volumes_and_a_stranger_nothing() {
    let bed = Bed::new();
    let known = bed.key("rblk-target", "target.key");
    let key = bed.key("rblk-initiator", "db1.key");
    let other = bed.key("rblk-initiator", "other.key");
    let target = Target::start(bed.directory.path(), &["--config", &text(&bed.config())]);
    let discover = |target_key: &str, file: &str| {
        let (address, file) = (target.address.to_string(), text(&bed.path(file)));
        let args = ["discover", &address, "--target-key", target_key, "--key-file", &file];
        command("rblk-initiator", &[&args[..], &["--output", "json"]].concat())
    };
    let names = |ended: &Ended| -> Vec<String> {
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let found: Value = serde_json::from_str(&ended.stdout).unwrap();
        let volumes = found["volumes"].as_array().unwrap();
        volumes.iter().map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_refused(
        &discover(&known, "db1.key"),
        5,
        &["does not let in the key of this host", &key],
    );
    assert_said(&bed.host(&["add", "db1", "--key", &key, "--volume", "vol0:ro"]), &["lets in"]);
    assert_eq!(names(&discover(&known, "db1.key")), ["vol0"]);
    assert_said(&bed.host(&["add", "db1", "--volume", "logs:rw"]), &["lets in"]);
    assert_eq!(names(&discover(&known, "db1.key")), ["vol0", "logs"]);

    assert_refused(&discover(&known, "other.key"), 5, &["does not let in the key", &other]);
    // A target with an unexpected key, and a host without a key.
    let ended = discover(&other, "db1.key");
    assert_ne!(ended.code, Some(0), "{ended:?}");
    let bare = command("rblk-initiator", &["discover", &target.address.to_string()]);
    assert_refused(&bare, 5, &["target_keys"]);
    // Rotation: both keys, then the new one alone.
    assert_said(&bed.host(&["add", "db1", "--key", &other]), &["lets in"]);
    assert_eq!(names(&discover(&known, "other.key")), ["vol0", "logs"]);
    assert_eq!(names(&discover(&known, "db1.key")), ["vol0", "logs"]);
    assert_said(&bed.host(&["remove", "db1", "--key", &key]), &["lets in"]);
    assert_refused(&discover(&known, "db1.key"), 5, &["does not let in the key"]);
    assert_eq!(names(&discover(&known, "other.key")), ["vol0", "logs"]);
}

#[test]
fn hosts_without_effect_are_reported() {
    let bed = Bed::new();
    let config = fs::read_to_string(bed.config()).unwrap();
    fs::write(bed.config(), config.replace("auth = 'required'\n", "")).unwrap();
    let key = bed.key("rblk-initiator", "1.key");
    let add = ["add", "db1", "--key", &key, "--volume", "vol0:rw"];
    let words = "authentication is off, so every host may connect";
    assert_said(&bed.host(&add), &[words]);
    assert!(bed.host(&["list"]).stderr.contains(words));
    let target = Target::start(bed.directory.path(), &["--config", &text(&bed.config())]);
    let socket = text(&target.socket);
    assert_said(&command("rblk-target", &["reload", "--control-socket", &socket]), &[words]);
    assert_refused(&bed.host(&["set", "db1", "--iops", "50"]), 1, &["authentication is off"]);
}

/// No target serves other hosts by mistake: the first start explains the next step.
#[test]
fn a_target_that_others_reach_needs_a_key() {
    let bed = Bed::new();
    let none = text(&bed.path("none.key"));
    let socket = text(&bed.path("c.sock"));
    let serve = |more: &[&str]| {
        let args = ["serve", "--memory", "m=1MiB", "--control-socket", &socket];
        command("rblk-target", &[&args[..], more].concat())
    };
    let open = ["--listen", "tcp://0.0.0.0:1"];
    let ended = serve(&[&open[..], &["--auth", "none"]].concat());
    assert_refused(&ended, 2, &["everybody who reaches tcp://0.0.0.0:1", "`rblk-target key new`"]);
    let ended = serve(&[&open[..], &["--auth", "required", "--insecure"]].concat());
    assert_refused(&ended, 2, &["--insecure: auth = \"required\"", "remove insecure or auth"]);
    let key = bed.key("rblk-initiator", "1.key");
    let ended = serve(&[&open[..], &["--host", "db1"]].concat());
    assert_refused(&ended, 2, &["--host db1", "write --host NAME=KEY"]);
    let secret = fs::read_to_string(bed.path("1.key")).unwrap();
    let secret = secret.lines().nth(1).unwrap();
    let ended = serve(&[&open[..], &["--host", &format!("db1={secret}")]].concat());
    assert_refused(&ended, 2, &["--host db1=...", "this is a secret key"]);
    assert!(!ended.stderr.contains(secret));

    let dump = serve(
        &[&open[..], &["--host", &format!("db1={key}"), "--key-file", &none, "--dump-config"]]
            .concat(),
    );
    assert_said(&dump, &[&format!("key_file = \"{none}\""), "name = \"db1\"", &key, "\"*:rw\""]);

    let check = command("rblk-target", &["check", "--config", &text(&bed.config())]);
    assert_refused(
        &check,
        2,
        &["target.key: there is no such key file", "`rblk-target key new --file"],
    );
    bed.key("rblk-target", "target.key");
    let check = command("rblk-target", &["check", "--config", &text(&bed.config())]);
    assert_said(&check, &["vol0: ok"]);
    assert!(check.stderr.contains("no host may connect yet; `rblk-target host add`"));
}
