//! The programs as an administrator runs them, on a host that may have neither RDMA nor ublk: their
//! messages, their exit codes, and their leftovers.
//!
//! Tests named `as_root_...` need root and are ignored unless `--ignored` asks for
//! them.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rblk_fabric::{ConnectOptions, ConnectionHello, FabricError, QpLimits, Route};
use rblk_initiator::engine::io::IoOp;
use rblk_initiator::volume::error::SessionError;
use rblk_operate::target::status::TargetStatus;
use rblk_protocol::{
    ConnectionKind, Epoch, Features, HelloReject, HelloRequest, QueueDepth, RejectReason,
    SessionId, Version,
};
use rblk_tests::bed::pattern;
use rblk_tests::nobody::assert_is_root;
use rblk_tests::program::{
    Client, DEADLINE, Ended, Target, assert_nothing_left, assert_refused, free_port,
    processes_naming, program, run, wait_for,
};

/// A valid public key.
const KEY: &str = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";

fn rdma_is_here() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut dir| dir.next().is_some())
}

/// Checks that the program was refused RDMA: this host has no RDMA device, or the build has no
/// RDMA.
#[track_caller]
fn assert_no_rdma(ended: &Ended) {
    let pieces = if ended.stderr.contains("without RDMA") {
        ["built without RDMA", "--features verbs", "tcp://"]
    } else {
        ["no RDMA device", "rdma link add", "tcp://"]
    };
    assert_refused(ended, 7, &pieces);
}

fn ublk_is_here() -> bool {
    Path::new("/dev/ublk-control").exists()
}

fn file(dir: &Path, name: &str, bytes: u64) -> String {
    let path = dir.join(name);
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path.display().to_string()
}

fn serve(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program("rblk-target"));
    command.arg("serve").arg("--control-socket").arg(dir.join("c.sock")).args(args);
    command
}

/// With this variable the driver of an mlx5 card aborts programs with several threads.
#[test]
fn a_driver_without_locks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut discover = Command::new(program("rblk-initiator"));
    discover.args(["discover", "rdma://127.0.0.1"]);
    // As little memory as an ordinary user may lock.
    let flags =
        ["--insecure", "--arena", "4MiB", "--memory", "m=1MiB", "--listen", "rdma://127.0.0.1"];
    for mut command in [serve(dir.path(), &flags), discover] {
        let ended = run(command.env("MLX5_SINGLE_THREADED", "1"));
        if ended.stderr.contains("without RDMA") {
            return assert_no_rdma(&ended);
        }
        assert_refused(&ended, 7, &["MLX5_SINGLE_THREADED=1", "several threads", "Unset it"]);
    }
}

#[test]
fn a_target_that_cannot_serve_says_why_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let port = free_port();
    let tcp = format!("tcp://127.0.0.1:{}", port.number);
    let odd = format!("v={}", file(dir, "odd.img", 4097 * 4096 + 512));
    let empty = format!("v={}", file(dir, "empty.img", 0));
    let good = format!("v={}", file(dir, "good.img", 1 << 20));
    let missing = format!("v={}", dir.join("missing.img").display());
    let directory = format!("v={}", dir.display());
    let unknown_key = dir.join("unknown.toml");
    std::fs::write(&unknown_key, "listen = ['tcp://127.0.0.1']\narenaa = '1GiB'\n").unwrap();
    let unknown_key = unknown_key.display().to_string();
    let bad_toml = dir.join("bad.toml");
    std::fs::write(&bad_toml, "listen = ['tcp://127.0.0.1'\n").unwrap();
    let bad_toml = bad_toml.display().to_string();
    let no_config = dir.join("none.toml").display().to_string();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", listener.local_addr().unwrap());
    let table: &[(&[&str], i32, &[&str])] = &[
        (&["--listen", &tcp], 2, &["no volume to serve", "--file NAME=PATH", "--memory NAME=SIZE"]),
        (
            &["--listen", &tcp, "--memory", "ram0"],
            2,
            &["--memory ram0", "write --memory NAME=SIZE"],
        ),
        (&["--listen", &tcp, "--null", "n=1XB"], 2, &["--null n=1XB"]),
        (&["--listen", &tcp, "--memory", "n=0"], 2, &["size"]),
        (&["--listen", &tcp, "--memory", "n=5000"], 2, &["5000", "multiple of 512"]),
        (&["--listen", &tcp, "--memory", "n=5120"], 2, &["5120", "4096"]),
        (&["--listen", &tcp, "--memory", "a b=1MiB"], 2, &["a b"]),
        (&["--listen", &tcp, "--memory", "a=1MiB", "--memory", "a=1MiB"], 2, &["name", "rename"]),
        (
            &["--listen", &tcp, "--memory", "a=1MiB", "--block-size", "1000"],
            2,
            &["block_size", "1000"],
        ),
        (&["--listen", &tcp, "--memory", "a=1MiB", "--arena", "5"], 2, &["arena"]),
        (&["--listen", "http://x", "--memory", "a=1MiB"], 2, &["http://x", "rdma://", "tcp://"]),
        (&["--listen", "tcp://127.0.0.1:99999", "--memory", "a=1MiB"], 2, &["99999", "port"]),
        (&["--listen", &tcp, "--no-such-flag"], 2, &["--no-such-flag"]),
        (&["--listen", &taken, "--memory", "a=1MiB"], 6, &["cannot listen on", &taken, "in use"]),
        (&["--listen", &tcp, "--file", &missing], 9, &["missing.img: no such file", "truncate"]),
        (
            &["--listen", &tcp, "--file", &odd],
            9,
            &["not a multiple of the block size 4096", "truncate"],
        ),
        (&["--listen", &tcp, "--file", &empty], 9, &["size is 0", "truncate"]),
        (&["--listen", &tcp, "--file", &directory], 9, &["is a directory"]),
        (&["--config", &unknown_key], 2, &["unknown.toml:2:1", "arenaa", "arena"]),
        (&["--config", &bad_toml], 2, &["bad.toml:"]),
        (&["--config", &no_config], 2, &["none.toml", "create the file, or name another one"]),
    ];
    for (args, code, pieces) in table {
        assert_refused(&run(&mut serve(dir, args)), *code, pieces);
        assert_nothing_left(dir);
    }
    if !rdma_is_here() {
        // Within the memlock limit of an ordinary user.
        let small = ["--arena", "4MiB", "--max-io", "64KiB", "--poll-groups", "1"];
        let serve_rdma = ["--listen", "rdma://127.0.0.1", "--file", &good];
        assert_no_rdma(&run(&mut serve(dir, &[&serve_rdma[..], &small].concat())));
        assert_nothing_left(dir);
    }
}

#[test]
fn an_initiator_that_cannot_connect_says_why() {
    let port = free_port();
    let closed = format!("tcp://127.0.0.1:{}", port.number);
    let table: &[(&[&str], i32, &[&str])] = &[
        (&["discover", "http://x"], 2, &["http://x", "rdma://", "tcp://"]),
        (&["discover", "tcp://"], 2, &["no host"]),
        (&["discover", "tcp://x:0"], 2, &["port"]),
        (&["discover", "[::1"], 2, &["[::1"]),
        (&["discover"], 2, &["<ADDRESS>"]),
        (&["discover", &closed, "--key-file", "/k"], 2, &["no effect without --target-key"]),
        (
            &["discover", &closed, "--target-key", KEY, "--key-file", "/no/such/host.key"],
            2,
            &["no such key file", "`rblk-initiator key new --file /no/such/host.key`"],
        ),
        (&["discover", &closed, "--target-key", "rblk1:a"], 2, &["58 characters"]),
        (&["mount", &closed, "v", "--key-file", "/k"], 2, &["without target_keys nobody asks"]),
        (&["discover", &closed, "--timeout", "soon"], 2, &["--timeout"]),
        (&["discover", &closed], 6, &[&closed, "connection refused", "start rblk-target"]),
        (
            &["discover", "tcp://no-such-host.invalid"],
            6,
            &["no-such-host.invalid", "cannot be resolved"],
        ),
        (&["recover"], 2, &["NAME", "--all"]),
        (&["recover", "v", "--all"], 2, &["--all"]),
        (&["recover", "--all", "--foreground"], 2, &["--foreground"]),
        (&["recover", "a/b"], 2, &["a/b"]),
        (&["upgrade"], 2, &["NAME", "--all"]),
        (&["upgrade", "../b"], 2, &["../b"]),
        (&["mount", "http://x", "v"], 2, &["http://x"]),
        (&["mount", &closed, "a/b"], 2, &["a/b"]),
        (&["mount", &closed], 2, &["<VOLUME>"]),
        (&["mount", &closed, "v", "--ro", "--shared"], 2, &["--ro", "--shared"]),
        (&["mount", &closed, "v", "--ro", "--take-over"], 2, &["--ro", "--take-over"]),
        (&["mount", &closed, "v", "--wait=soon"], 2, &["--wait", "soon"]),
        (&["frobnicate"], 2, &["frobnicate"]),
        (&[], 2, &["Usage"]),
    ];
    for (args, code, pieces) in table {
        let ended = run(Command::new(program("rblk-initiator")).args(*args));
        assert_refused(&ended, *code, pieces);
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_mount_that_is_not_there_is_named() {
    assert_is_root(&[]);
    let table: &[(&[&str], i32, &[&str])] = &[
        (&["umount", "no-such-mount"], 3, &["no-such-mount", "not mounted", "rblk-initiator list"]),
        (&["umount", "/dev/ublkb1048575"], 3, &["/dev/ublkb1048575", "not mounted"]),
        (&["recover", "no-such-mount"], 3, &["no-such-mount", "not mounted"]),
        (&["upgrade", "no-such-mount"], 3, &["no-such-mount", "not mounted"]),
    ];
    for (args, code, pieces) in table {
        let ended = run(Command::new(program("rblk-initiator")).args(*args));
        assert_refused(&ended, *code, pieces);
    }
    let ended = run(Command::new(program("rblk-initiator")).arg("list"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let ended = run(Command::new(program("rblk-initiator")).args(["list", "--output", "json"]));
    assert!(serde_json::from_str::<Vec<serde_json::Value>>(&ended.stdout).is_ok(), "{ended:?}");
}

#[test]
fn missing_rdma_is_named() {
    if rdma_is_here() {
        println!("this host has RDMA: the message of a host without RDMA is not tested");
        return;
    }
    for address in ["rdma://127.0.0.1", "127.0.0.1"] {
        assert_no_rdma(&run(Command::new(program("rblk-initiator")).args(["discover", address])));
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_missing_ublk_is_named() {
    assert_is_root(&[]);
    if ublk_is_here() {
        println!("this host has ublk: the message of a host without ublk is not tested");
    } else {
        let ended = run(Command::new(program("rblk-initiator")).args([
            "mount",
            "tcp://127.0.0.1:1",
            "v",
            "--name",
            "rblk-test-no-ublk",
        ]));
        assert_refused(&ended, 7, &["ublk"]);
        let left = Path::new("/run/rblk/mounts/rblk-test-no-ublk.sock").exists()
            || Path::new("/run/rblk/log/rblk-test-no-ublk.log").exists();
        assert!(!left, "a mount that was refused leaves files");
        assert_eq!(processes_naming(Path::new("rblk-test-no-ublk")), Vec::<String>::new());
    }
}

/// The mount's process has another working directory than the command that starts it.
#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_configuration_may_be_named_from_here() {
    assert_is_root(&[]);
    let dir = tempfile::tempdir().unwrap();
    let name = "rblk-test-relative";
    let text = "target = ['tcp://127.0.0.1:1']\nvolume = 'v'\n";
    std::fs::write(dir.path().join(format!("{name}.toml")), text).unwrap();
    let mut command = Command::new(program("rblk-initiator"));
    command.args(["mount", "--config", &format!("{name}.toml")]).current_dir(dir.path());
    let ended = run(&mut command);
    let expected = if ublk_is_here() { (6, "127.0.0.1:1") } else { (7, "ublk") };
    assert_refused(&ended, expected.0, &[expected.1]);
    assert!(!ended.stderr.contains("cannot read"), "{ended:?}");
}

#[test]
fn two_targets_do_not_share_a_file_or_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "v.img", 1 << 20);
    let volume = format!("v={path}");
    let target = Target::start(dir.path(), &["--file", &volume]);
    let port = free_port();
    let listen = format!("tcp://127.0.0.1:{}", port.number);
    let ended = run(&mut serve(dir.path(), &["--listen", &listen, "--file", &volume]));
    let holder = format!("process {}", target.status().pid);
    assert_refused(&ended, 9, &["v.img: in use by", &holder, "stop it"]);
    assert!(!dir.path().join("c.sock").exists());
    let ended = run(Command::new(program("rblk-target"))
        .args(["serve", "--listen", &listen, "--memory", "m=1MiB", "--control-socket"])
        .arg(&target.socket));
    assert_refused(&ended, 1, &["another rblk-target answers there", "--control-socket"]);
    assert_eq!(target.status().volumes[0].name, "v", "the first one serves on");
}

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn configurations_come_out_as_they_went_in() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "v.img", 1 << 20);
    let dump = |args: &[&str]| {
        let ended =
            run(Command::new(program("rblk-target")).arg("serve").args(args).arg("--dump-config"));
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
        ended.stdout
    };
    let volume = format!("v={path}");
    let first = dump(&[
        "--listen",
        "tcp://[::1]:7000",
        "--file",
        &volume,
        "--memory",
        "m=1GiB",
        "--null",
        "n=1TiB",
        "--arena",
        "64MiB",
        "--max-io",
        "256KiB",
        "--inline",
        "8KiB",
        "--spin",
        "20us",
        "--drain-timeout",
        "3s",
        "--stop-timeout",
        "40s",
        "--poll-groups",
        "2",
        "--name",
        "store-1",
        "--block-size",
        "512",
    ]);
    let config = dir.path().join("target.toml");
    std::fs::write(&config, &first).unwrap();
    let config = config.display().to_string();
    assert_eq!(dump(&["--config", &config]), first);
    let ended = run(Command::new(program("rblk-target")).args(["check", "--config", &config]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("v: ok, 2048 blocks of 512 bytes"), "{}", ended.stdout);
    std::fs::remove_file(&path).unwrap();
    let ended = run(Command::new(program("rblk-target")).args(["check", "--config", &config]));
    assert_refused(&ended, 9, &["v.img: no such file"]);
    std::fs::write(dir.path().join("target.toml"), "listen = []\n").unwrap();
    let ended = run(Command::new(program("rblk-target")).args(["check", "--config", &config]));
    assert_refused(&ended, 2, &["target.toml:1", "listen"]);

    let mount = |args: &[&str]| {
        let ended = run(Command::new(program("rblk-initiator"))
            .arg("mount")
            .args(args)
            .arg("--dump-config"));
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
        ended.stdout
    };
    let first = mount(&[
        "tcp://store1",
        "vol0",
        "--path",
        "tcp://store2",
        "--queues",
        "3",
        "--ro",
        "--fail-after",
        "1m",
        "--failback",
        "5s",
        "--wait",
    ]);
    for words in ["failback = \"5s\"", "wait = \"30days\"", "shared = false"] {
        assert!(first.contains(words), "{first}");
    }
    // A restart of a service must not fence a host again.
    let fencing = mount(&["tcp://store1", "vol0", "--take-over", "--wait=3s", "--shared"]);
    assert!(fencing.contains("wait = \"3s\"") && fencing.contains("shared = true"), "{fencing}");
    assert!(!fencing.contains("take"), "{fencing}");
    let config = dir.path().join("mount.toml");
    std::fs::write(&config, &first).unwrap();
    assert_eq!(mount(&["--config", &config.display().to_string()]), first);
}

#[test]
fn status_is_for_people_and_for_programs() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.sock");
    for what in ["status", "drain"] {
        let ended =
            run(Command::new(program("rblk-target")).args([what, "--control-socket"]).arg(&absent));
        assert_refused(&ended, 3, &["no target answers", "absent.sock", "--control-socket"]);
    }
    let target =
        Target::start(dir.path(), &["--memory", "ram=1MiB", "--null", "nil=1GiB", "--name", "t1"]);
    let client = Client::connect(&target.address, "ram", 1).unwrap();
    let show = |output: &str| {
        let ended = run(Command::new(program("rblk-target"))
            .args(["status", "--output", output, "--control-socket"])
            .arg(&target.socket));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.stdout
    };
    let status: TargetStatus = serde_json::from_str(&show("json")).unwrap();
    assert_eq!(status.name, "t1");
    let volumes: Vec<_> =
        status.volumes.iter().map(|v| (v.name.as_str(), v.store.as_str(), v.in_use)).collect();
    assert_eq!(volumes, [("ram", "memory", true), ("nil", "null", false)]);
    assert_eq!(status.sessions.iter().map(|s| s.connections).collect::<Vec<_>>(), [2]);
    let once = run(Command::new(program("rblk-target"))
        .args(["top", "--once", "-o", "json-lines", "--control-socket"])
        .arg(&target.socket));
    assert_eq!((once.code, once.stdout.lines().count()), (Some(0), 1), "{once:?}");
    let look: serde_json::Value = serde_json::from_str(&once.stdout).unwrap();
    assert_eq!((&look["target"], &look["rates"]["reads"]), (&"t1".into(), &0.into()), "{look}");
    assert_eq!(look["volumes"].as_array().map(Vec::len), Some(2), "{look}");
    let table = show("table");
    assert!(table.contains("ram") && table.contains("nil") && table.contains("test"), "{table}");

    let discover = |output: &str| {
        let ended = run(Command::new(program("rblk-initiator")).args([
            "discover",
            &target.address.to_string(),
            "--output",
            output,
        ]));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.stdout
    };
    let found: serde_json::Value = serde_json::from_str(&discover("json")).unwrap();
    assert_eq!(found["target"], "t1");
    assert_eq!(found["volumes"][0]["name"], "ram");
    assert_eq!(found["volumes"][0]["in_use"], true);
    assert_eq!(found["volumes"][1]["size_bytes"], 1u64 << 30);
    assert!(discover("table").contains("lost when the target ends"));
    client.logout();
    wait_for("the sessions' end", || target.status().sessions.is_empty().then_some(()));
}

#[test]
fn a_volume_that_is_not_there_or_not_free_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "a=1MiB", "--memory", "b=1MiB"]);
    let error = Client::connect(&target.address, "c", 1).unwrap_err();
    assert_eq!(error.exit().code(), 5);
    let text = error.to_string();
    assert!(text.contains("no volume `c`") && text.contains("a, b"), "{text}");
    let holder = Client::connect(&target.address, "a", 1).unwrap();
    let error = Client::connect(&target.address, "a", 2).unwrap_err();
    assert_eq!(error.exit().code(), 5);
    let text = error.to_string();
    assert!(text.contains("in use") && text.contains("held by test"), "{text}");
    holder.logout();
    let mut next = Client::connect(&target.address, "a", 2).unwrap();
    next.write(0, &pattern(1, 4096));
}

#[test]
fn a_peer_of_another_version_is_refused_with_both_ranges() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "a=1MiB"]);
    let asked = HelloRequest {
        kind: ConnectionKind::Admin,
        newest: Version(9),
        oldest: Version(8),
        depth: QueueDepth::new(16).unwrap(),
        features: Features::default(),
        in_capsule_bytes: 4096,
        io_max_bytes: 4096,
        epoch: Epoch(0),
        reads_in: 0,
        session: SessionId::default(),
    };
    let reject = |hello: Vec<u8>| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error = runtime.block_on(async {
            let options = ConnectOptions::default();
            let route = Route::resolve(&target.address, &options).await.unwrap();
            let pd = route.device().alloc_pd().unwrap();
            let (_poller, handle) = pd.poller(64).unwrap();
            let sizes = QpLimits {
                send_wrs: 16,
                recv_wrs: 16,
                send_sges: 1,
                recv_sges: 1,
                inline_bytes: 0,
                reads_out: 0,
                reads_in: 0,
            };
            route.connect(&pd, &handle, sizes, &ConnectionHello(hello)).await.unwrap_err()
        });
        match error {
            FabricError::Rejected { hello, .. } => HelloReject::from_wire(&hello).unwrap(),
            other => panic!("{other}"),
        }
    };
    let answer = reject(asked.to_wire().to_vec());
    assert_eq!(answer.reason, Some(RejectReason::Version));
    assert_eq!((answer.oldest, answer.newest), (Version::OLDEST, Version::NEWEST));
    assert!(answer.text.contains("8 to 9"), "{}", answer.text);
    let error = SessionError::Refused { address: "x".into(), reject: answer };
    assert_eq!(error.exit().code(), 5);
    assert!(!error.is_transient());
    assert!(error.to_string().contains("matching versions"), "{error}");
    for hello in [vec![], b"GET / HTTP/1.1\r\n".to_vec(), asked.to_wire()[..47].to_vec()] {
        assert_eq!(reject(hello).reason, Some(RejectReason::Malformed));
    }
    let stranger = HelloRequest {
        session: SessionId([7; 16]),
        epoch: Epoch(2),
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        ..asked
    };
    assert_eq!(reject(stranger.to_wire().to_vec()).reason, Some(RejectReason::NoSuchSession));
    let io = HelloRequest { kind: ConnectionKind::Io { queue: 0 }, ..stranger };
    assert_eq!(reject(io.to_wire().to_vec()).reason, Some(RejectReason::NoSuchSession));
    assert_eq!(target.status().sessions, []);
}

#[test]
fn garbage_on_the_port_disturbs_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "a=1MiB"]);
    let mut client = Client::connect(&target.address, "a", 1).unwrap();
    let port = target.address.port;
    let random = pattern(99, 64 << 10);
    let tls = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &random[..512]].concat();
    let mut magic = b"rblkSOFT".to_vec();
    magic.extend([1, 0, 16, 16, 0, 0, 0, 0, 56, 0, 0, 0]);
    magic.extend(&random[..56]);
    let said: &[&[u8]] = &[
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &tls,
        &random,
        b"rblkSOFT",
        b"rblkSOFT\xff\xff",
        &magic,
        b"\0",
        b"",
    ];
    let mut half_open = Vec::new();
    for round in 0..200u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let words = said[usize::try_from(round).unwrap() % said.len()];
        // The target may hang up before the end of the words.
        let _ = stream.write_all(words);
        // Half of the peers stay, and send no more.
        if round % 2 == 0 {
            half_open.push(stream);
        }
        if round % 10 == 0 {
            client.write((round % 100) * 4096, &pattern(round, 8192));
            assert!(client.read((round % 100) * 4096, 8192) == pattern(round, 8192));
        }
    }
    // If the half-open peers were in the way, this host would wait 5 s for their end. A program
    // without CPU may be late, too, so a late answer is tried again.
    let is_in_the_way = |_: &u8| {
        half_open.extend((0..200).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()));
        let begun = Instant::now();
        let other = Client::connect(&target.address, "a", 1);
        assert!(matches!(other, Err(SessionError::Status { .. })), "in use: {other:?}");
        begun.elapsed() >= Duration::from_secs(3)
    };
    assert!((0..4).take_while(is_in_the_way).count() < 4, "half-open peers are in the way");
    assert!(client.read(0, 8192).len() == 8192);
    let mut web = TcpStream::connect(("127.0.0.1", port)).unwrap();
    web.set_read_timeout(Some(DEADLINE)).unwrap();
    web.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let ended = web.read_to_end(&mut answer).map_err(|error| error.kind());
    assert!(matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)), "not hung up: {ended:?}");
    assert_eq!(answer, b"", "foreign speech is answered by hanging up");
    // Leftovers of the other peers end when the target notices their end.
    wait_for("the others' end", || {
        let sessions = target.status().sessions;
        (sessions.iter().filter(|s| s.connections > 0).count() == 1).then_some(())
    });
    client.logout();
}

/// The log is a full pipe without a reader: the target still starts and serves.
#[test]
fn a_full_log_pipe_delays_no_host() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    // More than a pipe can buffer.
    let mut other = writer.try_clone().unwrap();
    std::thread::spawn(move || other.write_all(&vec![b'.'; 2 << 20]));
    let target = Target::start_with_log(dir.path(), &["--memory", "a=1MiB"], writer);
    let mut client = Client::connect(&target.address, "a", 1).unwrap();
    for round in 0..200u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", target.address.port)).unwrap();
        let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
        if round % 20 == 0 {
            client.write((round % 100) * 4096, &pattern(round, 8192));
            assert!(client.read((round % 100) * 4096, 8192) == pattern(round, 8192));
        }
    }
    client.logout();
    // A later reader gets every line.
    let mut lines = BufReader::new(reader).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("INFO") && line.contains("connection ends")));
}

#[test]
fn sigterm_drains_and_ends_well() {
    let dir = tempfile::tempdir().unwrap();
    // Without sessions the drain is over long before its time limit.
    let mut idle = Target::start(dir.path(), &["--memory", "a=1MiB", "--drain-timeout", "60s"]);
    idle.terminate();
    assert_eq!(idle.wait(), Some(0), "{}", idle.log());
    assert!(!idle.socket.exists(), "the socket file is left");

    let path = file(dir.path(), "v.img", 1 << 20);
    let volume = format!("v={path}");
    let drained = idle.log().len();
    let mut target = Target::start(dir.path(), &["--file", &volume, "--drain-timeout", "60s"]);
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    client.write(0, &pattern(5, 8192));
    target.terminate();
    wait_for("draining", || target.log()[drained..].contains("draining").then_some(()));
    assert_eq!(client.try_io(IoOp::Flush, 0, 0), Some(0), "I/O goes on in a drain");
    let refused = Client::connect(&target.address, "v", 2).unwrap_err();
    assert!(refused.is_transient(), "{refused}");
    client.logout();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    assert!(std::fs::read(&path).unwrap()[..8192] == pattern(5, 8192));

    // With an initiator that stays.
    let mut target = Target::start(dir.path(), &["--file", &volume, "--drain-timeout", "1s"]);
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    assert_eq!(client.try_io(IoOp::Read, 0, 4096), None, "the path is lost");
    assert!(!target.socket.exists(), "the socket file is left");

    // By command, with an initiator that leaves when the target asks.
    let mut target = Target::start(dir.path(), &["--file", &volume, "--drain-timeout", "30s"]);
    let client = Client::connect(&target.address, "v", 1).unwrap();
    let ended = run(Command::new(program("rblk-target"))
        .args(["drain", "--no-wait", "--control-socket"])
        .arg(&target.socket));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "draining\n"), "{ended:?}");
    let drain = target.status().drain.expect("a drain");
    assert_eq!((drain.sessions, drain.left_ms > 0), (1, true), "{drain:?}");
    client.logout();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
}

#[test]
fn drain_waits_until_the_target_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let said = dir.path().join("said");
    let drain = |target: &Target, output: &str| {
        Command::new(program("rblk-target"))
            .args(["drain", "--output", output, "--control-socket"])
            .arg(&target.socket)
            .stdout(std::fs::File::create(&said).unwrap())
            .spawn()
            .unwrap()
    };
    let outcome = |mut target: Target, mut drain: Child| {
        let ended = wait_for("the command's end", || drain.try_wait().unwrap());
        assert_eq!(processes_naming(&target.socket), [""; 0], "it ended before the target did");
        assert_eq!(target.wait(), Some(0), "{}", target.log());
        assert!(ended.success(), "{ended:?}");
        std::fs::read_to_string(&said).unwrap()
    };
    // An initiator that leaves.
    let target = Target::start(dir.path(), &["--memory", "a=1MiB", "--drain-timeout", "60s"]);
    let client = Client::connect(&target.address, "a", 1).unwrap();
    let child = drain(&target, "table");
    // The command reads the state of the drain after it asked for it. Without a session the target
    // would be gone by then.
    let has_spoken = || std::fs::read_to_string(&said).is_ok_and(|text| text.contains('\n'));
    wait_for("the drain", || has_spoken().then_some(()));
    client.logout();
    let text = outcome(target, child);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("draining: 1 session left, ended in "), "{text}");
    assert!(lines.last().unwrap().starts_with("stopped after "), "{text}");

    // An initiator that stays.
    let target = Target::start(dir.path(), &["--memory", "a=1MiB", "--drain-timeout", "1s"]);
    let _client = Client::connect(&target.address, "a", 1).unwrap();
    let pid = target.status().pid;
    let child = drain(&target, "json");
    let json: serde_json::Value = serde_json::from_str(&outcome(target, child)).unwrap();
    assert_eq!((&json["pid"], &json["stopped"]), (&pid.into(), &true.into()), "{json}");
    assert!(json["took_ms"].as_u64().is_some_and(|ms| ms >= 1000), "{json}");
}

#[test]
fn a_killed_target_is_replaced_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "v.img", 16 << 20);
    let volume = format!("v={path}");
    let mut target = Target::start(dir.path(), &["--file", &volume]);
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    for round in 0..16u64 {
        client.write(round << 16, &pattern(round, 64 << 10));
    }
    client.flush();
    let instance = client.session.login().instance;
    target.kill();
    assert!(target.socket.exists(), "a killed process cannot tidy up");
    let target = Target::start(dir.path(), &["--file", &volume]);
    assert_eq!(client.try_io(IoOp::Read, 0, 4096), None, "the path is lost");
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    assert_ne!(client.session.login().instance, instance, "another run");
    for round in 0..16u64 {
        assert!(client.read(round << 16, 64 << 10) == pattern(round, 64 << 10));
    }
}

#[test]
fn a_client_that_vanishes_gives_its_volume_back_to_its_own_host_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "a=1MiB"]);
    let mut client = Client::connect(&target.address, "a", 1).unwrap();
    client.write(0, &pattern(1, 4096));
    drop(client);
    wait_for("the loss", || {
        target.status().sessions.iter().all(|s| s.connections == 0).then_some(())
    });
    let stranger = Client::connect(&target.address, "a", 2).unwrap_err();
    assert_eq!(stranger.exit().code(), 5, "the lease runs: {stranger}");
    let mut again = Client::connect(&target.address, "a", 1).unwrap();
    assert!(again.read(0, 4096) == pattern(1, 4096));
}
