//! One form for the commands of both programs: `-o json` for every answer and every error, one
//! table of exit codes, no panic when the output cannot be written, colours only on a terminal.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::CommandFactory;
use nix::pty::{OpenptyResult, openpty};
use rblk_config::Exit;
use rblk_tests::program::{Ended, Target, assert_refused, free_port, program, run, wait_for};
use serde_json::Value;

const PROGRAMS: [&str; 2] = ["rblk-target", "rblk-initiator"];
const KEY: &str = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";

/// The commands of a program as they are typed, without groups of commands. Hidden commands are for
/// the programs themselves.
fn leaves(name: &str) -> Vec<String> {
    fn walk(command: &clap::Command, before: &str, found: &mut Vec<String>) {
        let below =
            command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help");
        let below: Vec<&clap::Command> = below.collect();
        if below.is_empty() {
            found.push(before.trim_start().to_owned());
        }
        below.iter().for_each(|c| walk(c, &format!("{before} {}", c.get_name()), found));
    }
    let mut command = match name {
        "rblk-target" => rblk_operate::target::flags::Cli::command(),
        _ => rblk_operate::mount::flags::Cli::command(),
    };
    command.build();
    let mut found = Vec::new();
    walk(&command, "", &mut found);
    assert!(found.len() > 10, "{found:?}");
    found
}

/// A target with a configuration, and the arguments of each command.
struct Bed {
    dir: tempfile::TempDir,
    target: Target,
    typed: BTreeMap<(&'static str, &'static str), String>,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        File::create(dir.path().join("v.img")).unwrap().set_len(1 << 20).unwrap();
        let config = at("target.toml");
        let text = format!("[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\n", at("v.img"));
        fs::write(&config, text).unwrap();
        let target = Target::start(dir.path(), &["--config", &config]);
        let socket = target.socket.display().to_string();
        let address = target.address.to_string();
        let typed = [
            ("rblk-target", "serve", "--memory m=1MiB --dump-config".to_owned()),
            ("rblk-target", "key new", format!("--file {}", at("new.key"))),
            ("rblk-target", "key show", format!("--file {}", at("new.key"))),
            (
                "rblk-target",
                "host add",
                format!("h --key {KEY} --volume v:rw --config {config} --control-socket {socket}"),
            ),
            (
                "rblk-target",
                "host set",
                format!("h --iops 9 --config {config} --control-socket {socket}"),
            ),
            ("rblk-target", "host list", format!("--config {config}")),
            (
                "rblk-target",
                "host remove",
                format!("h --config {config} --control-socket {socket}"),
            ),
            ("rblk-target", "volume add", format!("w --memory 1MiB --control-socket {socket}")),
            ("rblk-target", "volume list", format!("--control-socket {socket}")),
            ("rblk-target", "volume set", format!("w --iops 9 --control-socket {socket}")),
            (
                "rblk-target",
                "volume resize",
                format!("w 2MiB --config {config} --control-socket {socket}"),
            ),
            ("rblk-target", "volume move", format!("w --control-socket {socket}")),
            ("rblk-target", "volume remove", format!("w --control-socket {socket}")),
            ("rblk-target", "volume snapshot", format!("v --control-socket {socket}")),
            ("rblk-target", "session list", format!("--control-socket {socket}")),
            ("rblk-target", "session kick", format!("77 --control-socket {socket}")),
            ("rblk-target", "reload", format!("--dry-run --control-socket {socket}")),
            ("rblk-target", "dump", format!("--control-socket {socket}")),
            ("rblk-target", "check", format!("--config {config}")),
            ("rblk-target", "group status", format!("--config {config}")),
            ("rblk-target", "doctor", format!("--config {config}")),
            ("rblk-target", "status", format!("--control-socket {socket}")),
            ("rblk-target", "events", format!("--control-socket {socket}")),
            ("rblk-target", "top", format!("--once --control-socket {socket}")),
            ("rblk-target", "trace", format!("nosuch --control-socket {socket}")),
            ("rblk-target", "upgrade", format!("--program /bin/false --control-socket {socket}")),
            // Last, because the target is gone afterwards.
            ("rblk-target", "drain", format!("--control-socket {socket}")),
            ("rblk-initiator", "mount", format!("{address} v --dump-config")),
            ("rblk-initiator", "vhost", format!("{address} v --socket {} --dump-config", at("vm"))),
            ("rblk-initiator", "key new", format!("--file {}", at("host.key"))),
            ("rblk-initiator", "key show", format!("--file {}", at("host.key"))),
            ("rblk-initiator", "umount", "rblk-no-such-mount".to_owned()),
            ("rblk-initiator", "recover", "rblk-no-such-mount".to_owned()),
            ("rblk-initiator", "upgrade", "rblk-no-such-mount".to_owned()),
            ("rblk-initiator", "reload", "rblk-no-such-mount".to_owned()),
            ("rblk-initiator", "list", String::new()),
            ("rblk-initiator", "metrics", String::new()),
            ("rblk-initiator", "status", "rblk-no-such-mount".to_owned()),
            ("rblk-initiator", "top", "--once".to_owned()),
            ("rblk-initiator", "discover", address.clone()),
            ("rblk-initiator", "doctor", format!("{address} --timeout 1s")),
        ];
        let typed = typed.map(|(program, command, args)| ((program, command), args));
        Self { target, typed: typed.into_iter().collect(), dir }
    }

    /// The commands of a program, in an order in which each finds its objects.
    fn ordered(name: &str) -> Vec<String> {
        let late = |leaf: &String| match leaf.as_str() {
            "drain" => 3,
            "host remove" | "volume remove" => 2,
            "host set" | "volume set" | "volume resize" | "key show" => 1,
            _ => 0,
        };
        let mut leaves = leaves(name);
        leaves.sort_by_key(late);
        leaves
    }

    fn command(&self, name: &'static str, leaf: &str, more: &[&str]) -> Command {
        let args = self.typed.iter().find(|((of, typed), _)| *of == name && *typed == leaf);
        let (_, args) = args.unwrap_or_else(|| panic!("say how to type `{name} {leaf}`"));
        let mut command = Command::new(program(name));
        command.args(leaf.split(' ')).args(args.split_whitespace()).args(more);
        command
    }
}

/// The documents in a text.
fn documents(text: &str) -> Result<Vec<Value>, serde_json::Error> {
    serde_json::Deserializer::from_str(text).into_iter().collect()
}

#[test]
fn every_command_answers_in_json_and_so_does_every_error() {
    let bed = Bed::new();
    let mut refused = 0;
    for name in PROGRAMS {
        for leaf in Bed::ordered(name) {
            let ended = run(&mut bed.command(name, &leaf, &["-o", "json"]));
            let what = format!("{name} {leaf}: {ended:?}");
            let answer = documents(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {what}"));
            if ended.code == Some(0) {
                assert!(!answer.is_empty() || leaf == "events", "no answer: {what}");
                assert_eq!(ended.stderr, "", "{what}");
            } else {
                refused += 1;
                assert_error(&ended, &what);
            }
        }
    }
    assert!((5..25).contains(&refused), "{refused} commands were refused");
    drop(bed.dir);
}

/// The standard error is one object, with the exit code.
#[track_caller]
fn assert_error(ended: &Ended, what: &str) {
    let said: Value = serde_json::from_str(&ended.stderr).unwrap_or_else(|e| panic!("{e}: {what}"));
    assert!(said["error"].as_str().is_some_and(|text| !text.is_empty()), "{what}");
    assert_eq!(said["exit_code"].as_i64(), ended.code.map(i64::from), "{what}");
}

#[test]
fn a_wrong_command_line_is_an_object_too() {
    for name in PROGRAMS {
        for line in [
            "list -o json --no-such-flag",
            "-o json nonsense",
            "--output=json status --no-such-flag",
        ] {
            let ended = run(Command::new(program(name)).args(line.split(' ')));
            assert_eq!(ended.code, Some(2), "{ended:?}");
            assert_error(&ended, line);
        }
        let ended = run(Command::new(program(name)).args(["list", "-o", "yaml"]));
        assert_eq!(ended.code, Some(2), "{ended:?}");
    }
}

#[test]
fn an_answer_that_is_not_taken_is_an_error_and_no_panic() {
    let bed = Bed::new();
    let mut full = 0;
    for name in PROGRAMS {
        for leaf in Bed::ordered(name) {
            for form in ["table", "json"] {
                // The object is gone after the first time.
                if (leaf == "drain" || leaf.ends_with(" remove")) && form == "json" {
                    continue;
                }
                let output = File::options().write(true).open("/dev/full").unwrap();
                let mut command = bed.command(name, &leaf, &["-o", form]);
                command.stdin(Stdio::null()).stdout(output).stderr(Stdio::piped());
                let ended = command.spawn().unwrap().wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&ended.stderr);
                let code = ended.status.code();
                assert!(code.is_some_and(|code| code != 101), "{name} {leaf}: {ended:?}");
                assert!(!said.contains("panicked"), "{name} {leaf}: {said}");
                full +=
                    usize::from(said.contains("cannot write the answer to the standard output"));
            }
        }
    }
    assert!(full > 25, "only {full} commands noticed");
    // An error that cannot be written causes no panic, either.
    for name in PROGRAMS {
        let errors = File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(program(name));
        command.args(["status", "-o", "table", "--no-such-flag"]).stderr(errors);
        assert_eq!(command.status().unwrap().code(), Some(2));
    }
    for name in PROGRAMS {
        let output = File::options().write(true).open("/dev/full").unwrap();
        let ended = Command::new(program(name)).arg("--help").stdout(output).output().unwrap();
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    }
}

#[test]
fn help_has_every_exit_code() {
    for name in PROGRAMS {
        let help = run(Command::new(program(name)).arg("--help")).stdout;
        for exit in Exit::ALL {
            let line = format!("{:>4}  {exit}", exit.code());
            assert!(help.lines().any(|said| said == line), "{name}: no {line:?} in {help}");
        }
    }
}

#[test]
fn exit_codes_tell_a_script_whether_an_object_exists() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("target.toml");
    let path = |name: &str| {
        let path = dir.path().join(name);
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path.display().to_string()
    };
    let text = format!("[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\n", path("v.img"));
    fs::write(&config, text).unwrap();
    let target = Target::start(dir.path(), &["--config", config.to_str().unwrap()]);
    let ask = |line: &str| {
        let mut command = Command::new(program("rblk-target"));
        command.args(line.split(' ')).arg("--control-socket").arg(&target.socket);
        if line.starts_with("volume") || line.starts_with("host") {
            command.arg("--config").arg(&config);
        }
        run(&mut command)
    };
    assert_eq!(ask("volume add new --memory 1MiB").code, Some(0));
    assert_refused(&ask("volume add new --memory 1MiB"), 4, &["new is served already"]);
    // The file is held by the target itself.
    let add = format!("volume add f --file {}", path("f.img"));
    assert_eq!(ask(&add).code, Some(0));
    assert_refused(&ask(&add), 4, &["f is served already"]);
    for line in [
        "volume remove w",
        "volume remove w --drain",
        "volume set w --iops 10",
        "volume resize w 2MiB",
        "volume snapshot w",
        "host remove w",
        "session kick w",
        "trace w",
    ] {
        assert_refused(&ask(line), 11, &["w"]);
    }
    let key = dir.path().join("k");
    for (name, code) in [("rblk-target", 0), ("rblk-target", 4), ("rblk-initiator", 4)] {
        let ended = run(Command::new(program(name)).args(["key", "new", "--file"]).arg(&key));
        assert_eq!(ended.code, Some(code), "{ended:?}");
    }
    let before = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("drain_timeout = '9s'\n{before}")).unwrap();
    for line in ["reload --dry-run", "reload"] {
        let ended = ask(line);
        assert_eq!(ended.code, Some(12), "{ended:?}");
        assert!(ended.stdout.contains("needs a restart: drain_timeout"), "{ended:?}");
    }
}

/// The output of a program to a terminal that is its standard error, up to `until`.
fn on_terminal(command: &mut Command, until: &str) -> String {
    let OpenptyResult { master, slave } = openpty(None, None).expect("a terminal");
    let mut child =
        command.stderr(slave).stdout(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
    // Drops the descriptor that `command` keeps, which would hold the terminal open.
    command.stderr(Stdio::null());
    let mut master = File::from(master);
    let (mut said, mut bytes) = (String::new(), [0; 4096]);
    while !said.contains(until) {
        match master.read(&mut bytes) {
            Ok(count) if count > 0 => said += &String::from_utf8_lossy(&bytes[..count]),
            _ => break,
        }
    }
    let _ = child.kill();
    child.wait().unwrap();
    assert!(said.contains(until), "{said}");
    said
}

#[test]
fn a_log_has_colours_only_where_they_are_wanted() {
    let serve = |variables: &[(&str, &str)]| {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut command = Command::new(program("rblk-target"));
        command.args([
            "serve",
            "--memory",
            "m=1MiB",
            "--insecure",
            "--auth",
            "none",
            "--arena",
            "64MiB",
        ]);
        command.args(["--listen", &format!("tcp://127.0.0.1:{}", port.number)]);
        command.arg("--control-socket").arg(dir.path().join("s"));
        command.arg("--state-dir").arg(dir.path().join("state"));
        command.env_remove("NO_COLOR").env("TERM", "xterm").envs(variables.iter().copied());
        on_terminal(&mut command, "listening")
    };
    assert!(serve(&[]).contains("\x1b["), "there are colours");
    for none in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let said = serve(&[none]);
        assert!(!said.contains('\x1b'), "{none:?}: {said:?}");
    }
}

/// A file of that size with a partition table of 512-byte sectors: one partition of 20 MiB, one of
/// 43 MiB.
fn image(path: &Path) {
    let mut head = vec![0u8; 512];
    for (at, start, count) in [(446, 2048u32, 40_960u32), (462, 43_008, 88_064)] {
        head[at + 4] = 0x83;
        head[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
        head[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
    }
    head[510..].copy_from_slice(&[0x55, 0xaa]);
    fs::write(path, head).unwrap();
    File::options().write(true).open(path).unwrap().set_len(64 << 20).unwrap();
}

#[test]
fn an_image_that_contradicts_its_blocks_is_named_with_the_fix() {
    const SAID: &str = "serve it with block_size = 512";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    image(&path);
    let of = |block_size: u32| {
        format!(
            "[[volume]]\nname = 'd'\nstore = 'file'\npath = '{}'\nblock_size = {block_size}\n",
            path.display()
        )
    };
    let config = dir.path().join("target.toml");
    let open = "listen = ['tcp://127.0.0.1:1']\nauth = 'none'\ninsecure = true\n";
    let check = |block_size: u32, form: &str| {
        fs::write(&config, format!("{open}{}", of(block_size))).unwrap();
        run(Command::new(program("rblk-target"))
            .args(["check", "-o", form, "--config"])
            .arg(&config))
    };
    let said = check(4096, "table");
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.stderr.contains(SAID) && said.stderr.contains("volume `d`"), "{said:?}");
    assert!(check(4096, "json").stdout.contains(SAID));
    assert!(!check(512, "table").stderr.contains("block_size"));

    let other = dir.path().join("other.img");
    File::create(&other).unwrap().set_len(1 << 20).unwrap();
    let target = Target::start(dir.path(), &["--file", &format!("o={}", other.display())]);
    let add = |name: &str, block_size: &str| {
        let mut command = Command::new(program("rblk-target"));
        command.args(["volume", "add", name, "--block-size", block_size, "--file"]).arg(&path);
        run(command.arg("--control-socket").arg(&target.socket))
    };
    let right = add("r", "512");
    assert!(right.code == Some(0) && !right.stderr.contains(SAID), "{right:?}");
    let remove = ["volume", "remove", "r", "--control-socket"];
    let removed = run(Command::new(program("rblk-target")).args(remove).arg(&target.socket));
    assert_eq!(removed.code, Some(0), "{removed:?}");
    let wrong = add("w", "4096");
    assert!(wrong.code == Some(0) && wrong.stderr.contains(SAID), "{wrong:?}");
    drop(target);

    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--file", &format!("d={}", path.display())]);
    wait_for("the warning in the log", || target.log().contains(SAID).then_some(()));
}

#[test]
fn odd_sizes_get_advice_that_helps() {
    let dir = tempfile::tempdir().unwrap();
    let check = |size: u64, block_size: u32| {
        let path = dir.path().join("odd.img");
        File::create(&path).unwrap().set_len(size).unwrap();
        let config = dir.path().join("target.toml");
        let text = format!(
            "auth = 'none'\ninsecure = true\n[[volume]]\nname = 'd'\nstore = 'file'\npath = '{}'\nblock_size = {block_size}\n",
            path.display()
        );
        fs::write(&config, text).unwrap();
        let ended =
            run(Command::new(program("rblk-target")).args(["check", "--config"]).arg(&config));
        assert_eq!(ended.code, Some(9), "{ended:?}");
        ended.stderr
    };
    let said = check(4097, 4096);
    assert!(said.contains("truncate -s 8192") && !said.contains("block_size = 512"), "{said}");
    let said = check(4608, 4096);
    assert!(
        said.contains("truncate -s 8192") && said.contains("or set block_size = 512"),
        "{said}"
    );
    let said = check(1, 512);
    assert!(said.contains("truncate -s 512") && !said.contains("block_size ="), "{said}");
}

#[test]
fn a_resize_lasts_if_no_file_sets_a_size() {
    let bed = Bed::new();
    let resize = |more: &[&str]| run(&mut bed.command("rblk-target", "volume resize", more));
    let path = bed.dir.path().join("target.toml");
    let before = fs::read_to_string(&path).unwrap();
    let mut command = Command::new(program("rblk-target"));
    command.args(["volume", "resize", "v", "2MiB", "--persist", "--config"]).arg(&path);
    let ended = run(command.arg("--control-socket").arg(&bed.target.socket));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("keeps this size, also after a restart"), "{ended:?}");
    assert_eq!(fs::read_to_string(&path).unwrap(), before);
    assert_eq!(fs::metadata(bed.dir.path().join("v.img")).unwrap().len(), 2 << 20);
    // A volume in memory has its size from the configuration alone.
    assert_eq!(run(&mut bed.command("rblk-target", "volume add", &[])).code, Some(0));
    assert!(resize(&[]).stdout.contains("until the target restarts or reloads"));
}

#[test]
fn a_contradictory_change_is_refused_with_a_command_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("b.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let config = dir.path().join("target.toml");
    let text = format!(
        "[[volume]]\nname = 'b'\nstore = 'file'\ncache = 'write-back'\npath = '{}'\n",
        path.display()
    );
    fs::write(&config, text).unwrap();
    let target = Target::start(dir.path(), &["--config", config.to_str().unwrap()]);
    let mut command = Command::new(program("rblk-target"));
    command.args(["volume", "set", "b", "--read-only", "--control-socket"]).arg(&target.socket);
    let ended = run(&mut command);
    assert_refused(&ended, 1, &["volume set b --read-only --cache write-through"]);
    assert!(!ended.stderr.contains("volume["), "{ended:?}");
}
