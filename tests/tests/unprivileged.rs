//! The programs as a user runs them who is not root, or has too little lockable memory: what they
//! say, and that they leave nothing.
//!
//! The programs must have been built (`cargo build --workspace --bins`); `RBLK_BIN_DIR` names
//! another directory. The tests need root, `setpriv` and `prlimit`. Without them they fail and say
//! so; `RBLK_SKIP_ROOT=1` leaves them out.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;

use rblk_tests::nobody::{Nobody, may_run};
use rblk_tests::program::{assert_nothing_left, assert_refused, free_port, run};

#[test]
fn a_test_that_cannot_run_fails_unless_told_to_skip() {
    if !may_run(&["setpriv"]) {
        return;
    }
    let nobody = Nobody::new();
    for test in [
        "who_is_not_root_is_told_so",
        "too_little_lockable_memory_is_said_before_anything_is_registered",
    ] {
        for (skip, code, words) in
            [("0", 101, "needs to be run by root"), ("1", 0, "skipped, as RBLK_SKIP_ROOT=1 asks")]
        {
            let mut command = nobody.run(&std::env::current_exe().unwrap());
            command.args(["--exact", test, "--nocapture"]).env("RBLK_SKIP_ROOT", skip);
            let ended = run(&mut command);
            assert_eq!(ended.code, Some(code), "{ended:?}");
            assert!(format!("{}{}", ended.stdout, ended.stderr).contains(words), "{ended:?}");
        }
    }
}

#[test]
fn who_is_not_root_is_told_so() {
    if !may_run(&["setpriv"]) {
        return;
    }
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
fn too_little_lockable_memory_is_said_before_anything_is_registered() {
    if !may_run(&["setpriv", "prlimit"]) {
        return;
    }
    let nobody = Nobody::new();
    let mut command = nobody.program("rblk-target", &["prlimit", "--memlock=65536"]);
    command.args(["serve", "--listen", "rdma://127.0.0.1", "--memory", "m=1MiB"]);
    command.arg("--control-socket").arg(nobody.dir().join("c.sock"));
    assert_refused(&run(&mut command), 7, &["memlock limit of 65536 bytes", "ulimit -l unlimited"]);
    assert_nothing_left(nobody.dir());
}
