//! The open of a backing: refusals and their reasons, locks, alignment, and a process that may not
//! pin memory.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use std::collections::HashMap;

use rblk_config::TargetConfig;
use rblk_protocol::Name;

use super::*;
use crate::pool::opening::open_right_ones;
use crate::store::backing::LeftOpen;

#[test]
fn an_open_error_names_the_fault() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let open = |path: &Path| Backing::open(path, &options(4096, Direct::Preferred)).unwrap_err();
    let check = |path: &Path, kind: StoreErrorKind, words: &[&str]| {
        let error = open(path);
        let text = error.to_string();
        assert_eq!(error.kind(), kind, "{text}");
        for word in words.iter().chain([&path.to_str().unwrap()]) {
            assert!(text.contains(word), "{text:?} lacks {word:?}");
        }
    };
    check(&at("none"), StoreErrorKind::NotFound, &["truncate -s"]);
    check(&at("none").join("below"), StoreErrorKind::NotFound, &[]);
    check(directory.path(), StoreErrorKind::Io, &["is a directory"]);
    check(Path::new("/dev/null"), StoreErrorKind::Io, &["character device"]);
    file(directory.path(), "empty", 0);
    check(&at("empty"), StoreErrorKind::BadSize, &["size is 0", "truncate -s 64G"]);
    file(directory.path(), "odd", 8192 + 512);
    check(&at("odd"), StoreErrorKind::BadSize, &["8704", "4096", "truncate -s 12288"]);
    assert_eq!(
        Backing::open(&at("odd"), &options(600, Direct::Off)).unwrap_err().to_string(),
        "block_size 600: must be a power of two between 512 and 65536"
    );
}

#[test]
fn a_file_that_was_made_longer_is_cut_back_and_data_never_is() {
    let directory = directory();
    for was in [8192, 8192 + 512] {
        let path = file(directory.path(), &format!("disk{was}"), was);
        let backing = Backing::open(&path, &options(512, Direct::Preferred)).unwrap();
        let len = || fs::metadata(&path).unwrap().len();
        let behind = File::options().write(true).open(&path).unwrap();
        behind.write_all_at(&[7; 512], was - 512).unwrap();
        assert_eq!(backing.resize(32768).unwrap(), Some(was));
        assert!(backing.cut_back(was, was).unwrap());
        assert_eq!((len(), backing.size_bytes()), (was, was));
        for at in [was, 20480] {
            assert_eq!(backing.resize(32768).unwrap(), Some(was));
            behind.write_all_at(&[7], at).unwrap();
            assert!(!backing.cut_back(was, was).unwrap(), "{at}");
            assert_eq!((len(), backing.size_bytes()), (32768, was));
            assert_eq!(backing.resize(32768).unwrap(), None, "the next try takes it as it is");
            assert_eq!(backing.size_bytes(), 32768);
            // Another process truncates the file.
            behind.set_len(was).unwrap();
            backing.cut_back(was, was).unwrap();
        }
    }
}

#[test]
fn opening_without_permission() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    if is_root() {
        // Root may open any file except an immutable one.
        let immutable =
            |flag| Command::new("chattr").arg(flag).arg(&path).status().is_ok_and(|s| s.success());
        if !immutable("+i") {
            eprintln!("skipped: the file system has no immutable files");
            return;
        }
        let error = Backing::open(&path, &options(4096, Direct::Off)).unwrap_err();
        assert!(immutable("-i"));
        assert_eq!(error.kind(), StoreErrorKind::Permission, "{error}");
    } else {
        let error = Backing::open(&path, &options(4096, Direct::Off)).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Permission, "{error}");
        assert!(error.to_string().contains("read and write"));
    }
}

#[test]
fn memory_alignment_is_enough() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    for (block_size, direct) in
        [(4096, Direct::Preferred), (512, Direct::Preferred), (512, Direct::Off)]
    {
        let backing = Backing::open(&path, &options(block_size, direct)).unwrap();
        if !backing.direct() {
            assert_eq!((backing.alignment(), backing.memory_alignment()), (1, 1));
        }
        check_memory_alignment(&Arc::new(backing));
    }
}

#[test]
fn direct_io_is_reported() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let direct =
        |direct| Backing::open(&path, &options(4096, direct)).map(|backing| backing.direct());
    assert!(!direct(Direct::Off).unwrap());
    match direct(Direct::Required) {
        Ok(on) => assert!(on && direct(Direct::Preferred).unwrap()),
        Err(StoreError::NoDirect { .. }) => assert!(!direct(Direct::Preferred).unwrap()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn one_writer_or_many_readers() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let writing = options(4096, Direct::Off);
    let reading = OpenOptions { read_only: true, ..writing };
    let writer = Backing::open(&path, &writing).unwrap();
    for options in [&writing, &reading] {
        let error = Backing::open(&path, options).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Locked);
        let me = format!("process {} (", std::process::id());
        assert!(error.to_string().contains(&me), "{error}");
    }
    assert_eq!(open_in_child(&path, &[]), "Locked");
    drop(writer);
    let reader = Backing::open(&path, &reading).unwrap();
    Backing::open(&path, &reading).unwrap();
    assert_eq!(Backing::open(&path, &writing).unwrap_err().kind(), StoreErrorKind::Locked);
    assert_eq!(open_in_child(&path, &[]), "Locked");
    drop(reader);
    assert_eq!(open_in_child(&path, &[]), "open");
}

/// Runs `child` below in its own process, under a wrapper, and returns its last line.
fn open_in_child(path: &Path, wrapper: &[&str]) -> String {
    let out = child_command(path, wrapper).output().unwrap();
    String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .find_map(|line| line.strip_prefix("child: "))
        .map_or_else(|| panic!("{}", String::from_utf8_lossy(&out.stderr)), str::to_owned)
}

fn child_command(path: &Path, wrapper: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut words = wrapper.iter().map(std::ffi::OsStr::new).chain([program.as_os_str()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args([
        "--exact",
        "store::tests::opening::child",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env("RBLK_TEST_CHILD", path).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Not a test: the second process of tests that need one.
#[test]
#[ignore = "run by other tests"]
fn child() {
    let Some(path) = std::env::var_os("RBLK_TEST_CHILD") else { return };
    let open = options(512, Direct::Preferred);
    let backing = match Backing::open(Path::new(&path), &open) {
        Ok(backing) => Arc::new(backing),
        Err(error) => {
            println!("\nchild: {:?}", error.kind());
            return;
        }
    };
    let Some(work) = std::env::var_os("RBLK_TEST_WORK") else {
        println!("\nchild: open");
        return;
    };
    let region = region(16 * MIB);
    let mut store = uring(&region, 16, &backing);
    if work == "once" {
        let result = store.run(&[write(0, 4096, 8192), read(0, 0, 4096)]);
        println!("\nchild: {:?} {result:?}", store.warnings());
        return;
    }
    // Writes until killed.
    println!("\nchild: writing");
    loop {
        store
            .run(&[write(0, 0, 4 * MIB32), write(4 * MIB as u64, 0, 4 * MIB32), flush()])
            .into_iter()
            .for_each(|result| assert!(result.is_ok()));
    }
}

#[test]
fn lock_of_a_killed_writer_is_free_when_its_io_has_ended() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8 * MIB as u64);
    let mut child = child_command(&path, &[]).env("RBLK_TEST_WORK", "for ever").spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut text = String::new();
    while !text.contains("child: writing") {
        let mut byte = [0; 64];
        let bytes = out.read(&mut byte).unwrap();
        assert!(bytes > 0, "{text}");
        text += &String::from_utf8_lossy(&byte[..bytes]);
    }
    std::thread::sleep(Duration::from_millis(50));
    let error = Backing::open(&path, &options(512, Direct::Off)).unwrap_err();
    assert!(error.to_string().contains(&format!("process {} (", child.id())), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = Instant::now();
    let waiting = OpenOptions { lock_wait: Duration::from_secs(30), ..options(512, Direct::Off) };
    Backing::open(&path, &waiting).unwrap();
    eprintln!("the lock was free {:?} after the process had ended", killed.elapsed());
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_works_where_memory_cannot_be_registered() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let limited = ["prlimit", "--memlock=1048576:1048576", "setpriv", "--bounding-set=-ipc_lock"];
    let mut command = child_command(&path, &limited);
    let out = command.env("RBLK_TEST_WORK", "once").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        text.contains("PlainBuffers { bytes: 16777216, errno: ENOMEM }] [Ok(8192), Ok(4096)]"),
        "{text}"
    );
}

fn left(backing: &Backing) -> LeftOpen {
    let file = backing.file().try_clone().unwrap();
    LeftOpen { file, size_bytes: backing.size_bytes() }
}

#[test]
fn a_backing_left_open_keeps_its_lock_whatever_is_at_its_path() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let options = options(4096, Direct::Preferred);
    let locked = |path: &Path| Backing::open(path, &options).unwrap_err().kind();
    let before = Backing::open(&path, &options).unwrap();
    let (identity, is_direct) = (before.identity().cloned(), before.direct());
    let (first, second) = (left(&before), left(&before));
    before.leave_open().unwrap();
    drop(before);
    assert_eq!(locked(&path), StoreErrorKind::Locked, "it outlives the program before");
    let away = directory.path().join("away");
    fs::rename(&path, &away).unwrap();
    fs::create_dir(&path).unwrap();
    let failed = Backing::go_on(first, &path, &options).unwrap();
    drop(failed);
    assert_eq!(locked(&away), StoreErrorKind::Locked, "and a program that cannot start");
    let kept = Backing::go_on(second, &path, &options).unwrap();
    kept.keep();
    assert_eq!((kept.identity().cloned(), kept.direct()), (identity, is_direct));
    assert_eq!(locked(&away), StoreErrorKind::Locked);
    drop(kept);
    Backing::open(&away, &options).expect("nobody has it any more");
}

#[test]
fn a_backing_left_open_has_the_size_in_force() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let before = Backing::open(&path, &options(4096, Direct::Preferred)).unwrap();
    let behind = File::options().write(true).read(true).open(&path).unwrap();
    for len in [16384, 8193, 4096, 0] {
        behind.set_len(len).unwrap();
        if len > 8192 {
            behind.write_all_at(&[7], len - 1).unwrap();
        }
        for direct in [Direct::Off, Direct::Preferred] {
            let backing = Backing::go_on(left(&before), &path, &options(4096, direct)).unwrap();
            assert_eq!(backing.size_bytes(), 8192, "{len}");
            let flags = nix::fcntl::fcntl(backing.file(), nix::fcntl::FcntlArg::F_GETFL).unwrap();
            let flags = nix::fcntl::OFlag::from_bits_retain(flags);
            assert_eq!(flags.contains(nix::fcntl::OFlag::O_DIRECT), backing.direct());
            assert!(direct == Direct::Preferred || !backing.direct());
        }
        assert_eq!(fs::metadata(&path).unwrap().len(), len);
        if len > 8192 {
            let mut last = [0];
            behind.read_exact_at(&mut last, len - 1).unwrap();
            assert_eq!(last, [7], "what is behind the end in force is not touched");
        }
    }
}

#[test]
fn a_backing_left_open_keeps_its_access_mode() {
    let directory = directory();
    let path = file(directory.path(), "disk", 8192);
    let to_read = OpenOptions { read_only: true, ..options(4096, Direct::Off) };
    let before = Backing::open(&path, &to_read).unwrap();
    let error = Backing::go_on(left(&before), &path, &options(4096, Direct::Off)).unwrap_err();
    assert!(error.to_string().contains("read-only"), "{error}");
    assert!(Backing::go_on(left(&before), &path, &to_read).unwrap().read_only());
    drop(before);
    // A volume that became read-only while it was served may be written to again.
    let before = Backing::open(&path, &options(4096, Direct::Off)).unwrap();
    assert!(!Backing::go_on(left(&before), &path, &to_read).unwrap().read_only());
}

/// The kernel has a write of the program before, and so the lock of its file.
#[test]
fn a_store_that_the_program_before_did_not_leave_waits_for_its_lock() {
    let directory = directory();
    let paths = ["a", "b"].map(|name| file(directory.path(), name, 8192));
    let volume = |path: &Path| {
        let name = path.file_name().unwrap().display();
        format!("[[volume]]\nname = '{name}'\nstore = 'file'\npath = '{}'\n", path.display())
    };
    let volumes = paths.each_ref().map(|path| volume(path)).concat();
    let text = format!("listen = ['tcp://127.0.0.1']\n{volumes}");
    let config = TargetConfig::parse(&text, "test").unwrap();
    let name = Name::new("test").unwrap();
    let before = Backing::open(&paths[0], &options(4096, Direct::Off)).unwrap();
    assert!(open_right_ones(&config, &name, None).is_err(), "a start without a program before");
    let (opened, away) = open_right_ones(&config, &name, Some(HashMap::new())).unwrap();
    let opened: Vec<&str> = opened.iter().map(|one| one.volume.name.as_str()).collect();
    let away: Vec<&str> = away.iter().map(|one| one.name.as_str()).collect();
    assert_eq!((opened, away), (vec!["b"], vec!["a"]));
    drop(before);
}
