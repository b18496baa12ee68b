//! `rblk-target check`, and messages that programs print at once: while the target runs, without
//! the right to ask it, and for errors with causes.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_tests::program::{Ended, Target, assert_refused, free_port, program, run, wait_for};

fn store(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

/// A configuration with the same values as the flags of [`Target::start`].
fn config(dir: &Path, rest: &str) -> PathBuf {
    let port = free_port();
    let path = dir.join("target.toml");
    let text = format!(
        "listen = ['tcp://127.0.0.1:{}']\ncontrol_socket = '{}'\nstate_dir = '{}'\n{rest}",
        port.number,
        dir.join("target.sock").display(),
        dir.display()
    );
    fs::write(&path, text).unwrap();
    path
}

fn volume(name: &str, path: &Path) -> String {
    format!("[[volume]]\nname = '{name}'\nstore = 'file'\npath = '{}'\n", path.display())
}

fn check(path: &Path) -> Ended {
    run(Command::new(program("rblk-target")).arg("check").arg("--config").arg(path))
}

#[test]
fn the_configuration_of_a_running_target_is_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let (mine, other) = (store(dir.path(), "v.img"), store(dir.path(), "o.img"));
    let path = config(dir.path(), &(volume("v", &mine) + &volume("o", &other)));
    let before = check(&path);
    assert_eq!((before.code, &*before.stderr), (Some(0), ""), "{before:?}");
    let target = Target::start(dir.path(), &["--file", &format!("v={}", mine.display())]);
    assert_eq!(target.socket, dir.path().join("target.sock"));
    let pid = target.status().pid;
    let ended = check(&path);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let line =
        format!("v: ok, 256 blocks of 4096 bytes; the running target (process {pid}) serves it");
    assert_eq!(
        ended.stdout.lines().collect::<Vec<_>>(),
        [&*line, "o: ok, 256 blocks of 4096 bytes"]
    );
    // Under another name the next start would fail.
    let renamed = config(dir.path(), &volume("w", &mine));
    assert_refused(&check(&renamed), 9, &["volume `w`: ", "v.img: in use by process"]);
    // Another process holds the store: the check reports that at once, and judges every volume.
    let elsewhere = tempfile::tempdir().unwrap();
    let path = config(elsewhere.path(), &(volume("v", &mine) + &volume("o", &other)));
    let ended = check(&path);
    assert_refused(&ended, 9, &["volume `v`: ", "in use by process", "rblk-targetd"]);
    assert_eq!(ended.stdout, "o: ok, 256 blocks of 4096 bytes\n");
}

/// Two targets on a disk of a storage network would destroy its data: nothing cuts the dead one
/// off.
#[test]
fn a_member_of_a_group_serves_no_disk() {
    let dir = tempfile::tempdir().unwrap();
    let mine = store(dir.path(), "v.img");
    let reason =
        ["volume[0].store = \"file\"", "rblk makes no reservations", "start one target at a time"];
    let path = config(dir.path(), &format!("member = 'a'\n{}", volume("v", &mine)));
    assert_refused(&check(&path), 2, &reason);
    let serve = |words: &[&str]| {
        let mut command = Command::new(program("rblk-target"));
        run(command.arg("serve").arg("--config").arg(&path).args(words))
    };
    assert_refused(&serve(&[]), 2, &reason);
    // Nor by flags, at its start and later.
    config(dir.path(), "");
    let file = format!("v={}", mine.display());
    assert_refused(&serve(&["--member", "a", "--file", &file]), 2, &reason[1..]);
    let target = Target::start(dir.path(), &["--name", "store", "--member", "a"]);
    let mut add = Command::new(program("rblk-target"));
    add.args(["volume", "add", "v", "--control-socket"]).arg(&target.socket);
    assert_refused(&run(add.arg("--file").arg(&mine)), 2, &reason[1..]);
    assert_eq!(target.status().volumes.len(), 0);
}

#[test]
fn check_warns_of_what_this_host_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let mine = store(dir.path(), "v.img");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rest = "arena = '1TiB'\nhugepages = 'never'\ncpus = [900]\npoll_groups = 1\n".to_owned();
    let path = config(dir.path(), &(rest + &volume("v", &mine)));
    let text = fs::read_to_string(&path).unwrap();
    let first = text.lines().next().unwrap();
    let taken = format!("listen = ['tcp://{}']", listener.local_addr().unwrap());
    fs::write(&path, text.replace(first, &taken)).unwrap();
    fs::create_dir(dir.path().join("target.toml.d")).unwrap();
    let ended = check(&path);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for piece in [
        "warning: cannot allocate an arena of 1TiB",
        "warning: cpus: this host has no CPU 900",
        "another program uses the port",
        "target.toml.d is not read",
    ] {
        assert!(ended.stderr.contains(piece), "{piece}: {}", ended.stderr);
    }
    let pages = fs::read_to_string(&path).unwrap().replace("'never'", "'required'");
    fs::write(&path, pages).unwrap();
    let ended = check(&path);
    assert!(ended.stderr.contains("warning: hugepages = \"required\""), "{}", ended.stderr);
}

#[test]
fn a_file_without_addresses_is_served_on_every_address() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("target.toml");
    fs::write(&path, "[[volume]]\nname = 'm'\nstore = 'memory'\nsize = '1MiB'\n").unwrap();
    let dump = |args: &[&str]| {
        let mut command = Command::new(program("rblk-target"));
        command.args(["serve", "--dump-config"]).args(args);
        let ended = run(&mut command);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.stdout.lines().find(|line| line.starts_with("listen")).unwrap().to_owned()
    };
    let of_file = dump(&["--config", path.to_str().unwrap()]);
    assert_eq!(of_file, dump(&["--memory", "m=1MiB"]));
    let has_ipv6 = Path::new("/proc/sys/net/ipv6").exists();
    assert!(
        of_file.contains(if has_ipv6 { "tcp://[::]:7721" } else { "tcp://0.0.0.0:7721" }),
        "{of_file}"
    );
    // Other hosts reach every address, so there must be a key.
    let missing = dir.path().join("no.key").display().to_string();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("key_file = '{missing}'\n{text}")).unwrap();
    assert_refused(&check(&path), 2, &["no.key", "Other hosts reach tcp://"]);
}

#[test]
fn both_families_reach_a_target_on_every_address() {
    if !Path::new("/proc/net/if_inet6").exists() {
        println!("this host has no IPv6: only the choice of addresses is tested");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let port = free_port().number;
    let mut command = Command::new(program("rblk-target"));
    command.args([
        "serve",
        "--memory",
        "m=1MiB",
        "--insecure",
        "--arena",
        "8MiB",
        "--poll-groups",
        "1",
    ]);
    command.arg("--listen").arg(format!("tcp://[::]:{port}"));
    command.arg("--control-socket").arg(dir.path().join("c.sock"));
    command
        .arg("--state-dir")
        .arg(dir.path())
        .stderr(fs::File::create(dir.path().join("log")).unwrap());
    let mut target = command.spawn().unwrap();
    let found = |host: &str| {
        let address = format!("tcp://{host}:{port}");
        run(Command::new(program("rblk-initiator")).args(["discover", &address])).code
    };
    wait_for("a target on every address", || (found("127.0.0.1") == Some(0)).then_some(()));
    let by_ipv6 = found("[::1]");
    target.kill().unwrap();
    target.wait().unwrap();
    assert_eq!(by_ipv6, Some(0));
}

#[test]
fn a_taken_port_is_reported_once() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", listener.local_addr().unwrap());
    let mut command = Command::new(program("rblk-target"));
    command.args(["serve", "--listen", &taken, "--memory", "a=1MiB", "--arena", "8MiB"]);
    command.arg("--control-socket").arg(dir.path().join("c.sock"));
    let ended = run(&mut command);
    assert_refused(&ended, 6, &[&format!("cannot listen on {taken}: in use by another program")]);
    assert_eq!(ended.stderr.matches("in use").count(), 1, "{}", ended.stderr);
}

#[test]
fn a_wait_for_a_store_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mine = store(dir.path(), "v.img");
    let volume = format!("v={}", mine.display());
    let _holder = Target::start(dir.path(), &["--file", &volume]);
    let port = free_port();
    let listen = format!("tcp://127.0.0.1:{}", port.number);
    let mut command = Command::new(program("rblk-target"));
    command.args(["serve", "--arena", "8MiB", "--listen", &listen, "--file", &volume]);
    command.arg("--control-socket").arg(dir.path().join("c.sock"));
    let ended = run(&mut command);
    assert_refused(&ended, 9, &["waiting for the store", "volume `v`: ", "in use by process"]);
}

#[test]
fn a_bad_number_is_refused_with_the_right_form() {
    let mount = |args: &[&str]| {
        let mut command = Command::new(program("rblk-initiator"));
        run(command.args(["mount", "tcp://127.0.0.1:1", "v"]).args(args))
    };
    assert_refused(
        &mount(&["--detect", "5"]),
        2,
        &["a number without a unit; \"5s\" is five seconds"],
    );
    let ended = mount(&["--queue-depth", "99999"]);
    assert_refused(
        &ended,
        2,
        &["--queue-depth 99999: more than 1024; write a whole number from 1 to 1024"],
    );
}
