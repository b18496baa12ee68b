//! The programs of a user without root rights, or with too little lockable memory: their messages,
//! and no leftovers.
//!
//! The tests need root, `setpriv` and `prlimit`, and are ignored unless `--ignored` asks for them.
//! Without those three they fail and name the reason.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rblk_operate::mount::run_dir::make_private;
use rblk_tests::nobody::{Nobody, assert_is_root};
use rblk_tests::program::{Target, assert_nothing_left, assert_refused, free_port, run};

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_test_without_root_fails_and_says_so() {
    assert_is_root(&["setpriv"]);
    let nobody = Nobody::new();
    for test in [
        "unprivileged::as_root_a_user_without_rights_is_refused_with_the_reason",
        "unprivileged::as_root_too_little_lockable_memory_is_said_before_anything_is_registered",
    ] {
        let mut command = nobody.run(&std::env::current_exe().unwrap());
        let ended = run(command.args(["--exact", test, "--ignored", "--nocapture"]));
        assert_eq!(ended.code, Some(101), "{ended:?}");
        let said = format!("{}{}", ended.stdout, ended.stderr);
        assert!(said.contains("needs to be run by root"), "{ended:?}");
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_user_without_rights_is_refused_with_the_reason() {
    assert_is_root(&["setpriv"]);
    let nobody = Nobody::new();
    let mut command = nobody.program("rblk-initiator", &[]);
    command.args(["mount", "tcp://127.0.0.1:1", "v"]);
    assert_refused(&run(&mut command), 8, &["root", "sudo"]);
    let mut command = nobody.program("rblk-initiator", &[]);
    command.args(["mount", "tcp://127.0.0.1:1", "v", "--foreground"]);
    assert_refused(&run(&mut command), 8, &["root", "sudo"]);

    let path = nobody.dir().join("secret.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let port = free_port();
    let listen = format!("tcp://127.0.0.1:{}", port.number);
    let mut command = nobody.program("rblk-target", &[]);
    command.args(["serve", "--listen", &listen, "--file", &format!("v={}", path.display())]);
    command.arg("--control-socket").arg(nobody.dir().join("c.sock"));
    assert_refused(&run(&mut command), 8, &["secret.img: permission denied", "read and write"]);
    assert_nothing_left(nobody.dir());
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_too_little_lockable_memory_is_said_before_anything_is_registered() {
    assert_is_root(&["setpriv", "prlimit"]);
    let nobody = Nobody::new();
    let mut command = nobody.program("rblk-target", &["prlimit", "--memlock=65536"]);
    command.args(["serve", "--listen", "rdma://127.0.0.1", "--memory", "m=1MiB"]);
    command.arg("--control-socket").arg(nobody.dir().join("c.sock"));
    assert_refused(&run(&mut command), 7, &["memlock limit of 65536 bytes", "ulimit -l unlimited"]);
    assert_nothing_left(nobody.dir());
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_user_without_access_is_refused_and_sees_no_empty_list() {
    assert_is_root(&["setpriv"]);
    make_private(Path::new("/run/rblk/mounts")).unwrap();
    let nobody = Nobody::new();
    for command in [
        &["list"][..],
        &["metrics"],
        &["top", "--once"],
        &["umount", "v"],
        &["upgrade", "v"],
        &["recover", "v"],
    ] {
        let ended = run(nobody.program("rblk-initiator", &[]).args(command));
        assert_refused(&ended, 8, &["this needs root", "sudo"]);
        assert_eq!(ended.stdout, "", "{ended:?}");
    }
    let dir = tempfile::tempdir_in(nobody.dir()).unwrap();
    let config = nobody.dir().join("target.toml");
    std::fs::write(&config, "").unwrap();
    std::fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
    for command in [["host", "list"], ["volume", "list"]] {
        let mut asks = nobody.program("rblk-target", &[]);
        let ended = run(asks.args(command).arg("--config").arg(&config));
        assert_refused(&ended, 8, &["target.toml: cannot read", "run as root"]);
    }
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    for command in ["status", "drain", "reload"] {
        let mut asks = nobody.program("rblk-target", &[]);
        let ended = run(asks.arg(command).arg("--control-socket").arg(&target.socket));
        assert_refused(&ended, 8, &["this needs root", "sudo"]);
    }
}

/// Root may read everything. The target's user may not.
#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_doctor_looks_as_the_user_of_the_target() {
    assert_is_root(&["setpriv"]);
    let nobody = Nobody::new();
    let at = |name: &str| nobody.dir().join(name);
    let mode = |name: &str, mode| {
        std::fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
    };
    let owner = |name: &str, user| std::os::unix::fs::chown(at(name), Some(user), None).unwrap();
    File::create(at("v.img")).unwrap().set_len(1 << 20).unwrap();
    mode("v.img", 0o600);
    let text = format!(
        "auth = 'required'\nkey_file = '{}'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\n",
        at("target.key").display(),
        at("v.img").display()
    );
    std::fs::write(at("target.toml"), text).unwrap();
    mode("target.toml", 0o644);
    let target = || std::process::Command::new(nobody.dir().join("rblk-target"));
    let key = run(nobody.program("rblk-target", &[]).args(["key", "new", "--file"]).arg(at("k")));
    assert_eq!(key.code, Some(0), "{key:?}");
    std::fs::rename(at("k"), at("target.key")).unwrap();
    owner("target.key", 0);
    let seen = || -> serde_json::Value {
        let mut command = target();
        command.args(["doctor", "--as-user", "65534", "--with-stores", "--config"]);
        let ended = run(command.arg(at("target.toml")));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.stdout).unwrap()
    };
    let found = seen();
    let (key, store) = (&found["keys"][0][1], &found["stores"][0][1]);
    assert_eq!(found["config"], serde_json::Value::Null, "{found}");
    assert_eq!(key["fix"], format!("chown nobody {}", at("target.key").display()), "{found}");
    assert_eq!(store["fix"], format!("chown nobody {}", at("v.img").display()), "{found}");
    assert!(store["why"].as_str().unwrap().contains("may not read and write"), "{found}");

    owner("target.key", 65_534);
    owner("v.img", 65_534);
    let found = seen();
    assert_eq!((&found["keys"][0][1], &found["stores"][0][1]), (&().into(), &().into()), "{found}");

    std::fs::create_dir(at("target.d")).unwrap();
    mode("target.d", 0o755);
    std::fs::write(at("target.d/host-h.toml"), "").unwrap();
    mode("target.d/host-h.toml", 0o640);
    let found = seen();
    let config = found["config"]["why"].as_str().unwrap();
    assert!(config.contains("host-h.toml") && config.contains("nobody"), "{config}");
    assert_eq!(
        found["config"]["fix"],
        format!("chgrp nogroup {}", at("target.d/host-h.toml").display()),
        "{found}"
    );
}
