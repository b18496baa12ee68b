//! Files of hosts: written whole, only when the configuration with them is valid.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;

use rblk_config::{HostConfig, HostFile, TargetConfig};
use rblk_protocol::auth::PublicKey;
use tempfile::TempDir;

const BASE: &str =
    "listen = ['tcp://[::]']\n[[volume]]\nname = 'vol0'\nstore = 'null'\nsize = '1MiB'\n";

struct Bed {
    directory: TempDir,
}

impl Bed {
    fn new(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("target.toml"), text).unwrap();
        Self { directory }
    }

    fn config(&self) -> PathBuf {
        self.directory.path().join("target.toml")
    }

    fn file(&self, name: &str) -> HostFile {
        HostFile::lock(&self.config(), name).unwrap()
    }

    /// Names of what is in the directory of drop-ins.
    fn drop_ins(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.path().join("target.d")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn host(name: &str, key: u8, right: &str) -> HostConfig {
    HostConfig::new(name, vec![PublicKey::from_bytes([key; 32])], vec![right.parse().unwrap()])
}

/// Whoever may read the main file may read what commands write beside it.
#[test]
fn a_file_is_for_those_who_read_the_main_file() {
    for (main, own) in [(0o644, 0o644), (0o640, 0o640), (0o600, 0o640), (0o664, 0o644)] {
        let bed = Bed::new(BASE);
        fs::set_permissions(bed.config(), fs::Permissions::from_mode(main)).unwrap();
        let file = bed.file("db1");
        file.write(&host("db1", 4, "vol0:rw")).unwrap();
        let (own_file, main_file) =
            (fs::metadata(file.path()).unwrap(), fs::metadata(bed.config()).unwrap());
        assert_eq!(own_file.mode() & 0o7777, own, "{main:o}");
        assert_eq!((own_file.uid(), own_file.gid()), (main_file.uid(), main_file.gid()));
    }
}

/// The directory of the package has the group of the service. The main file may be root's alone.
#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_setgid_directory_gives_its_group() {
    const SERVICE: u32 = 65_534;
    assert!(nix::unistd::geteuid().is_root(), "this test needs to be run by root");
    for (owner, group) in [(0, 0), (0, SERVICE), (SERVICE, SERVICE)] {
        let bed = Bed::new(BASE);
        let drop_ins = bed.directory.path().join("target.d");
        fs::create_dir(&drop_ins).unwrap();
        chown(&drop_ins, Some(0), Some(SERVICE)).unwrap();
        fs::set_permissions(&drop_ins, fs::Permissions::from_mode(0o2755)).unwrap();
        chown(bed.config(), Some(owner), Some(group)).unwrap();
        fs::set_permissions(bed.config(), fs::Permissions::from_mode(0o640)).unwrap();
        let file = bed.file("db1");
        // A second time, too: the file is replaced.
        for right in ["vol0:rw", "vol0:ro"] {
            file.write(&host("db1", 4, right)).unwrap();
            let written = fs::metadata(file.path()).unwrap();
            assert_eq!((written.uid(), written.gid()), (owner, SERVICE), "{owner}:{group}");
            assert_eq!(written.mode() & 0o7777, 0o640);
        }
    }
}

#[test]
fn a_host_is_written_changed_and_removed() {
    let bed = Bed::new(BASE);
    let file = bed.file("db1");
    assert_eq!(file.read().unwrap(), None);
    let first = host("db1", 4, "vol0:rw");
    assert_eq!(file.write(&first).unwrap().hosts, std::slice::from_ref(&first));
    assert_eq!(bed.drop_ins(), ["host-db1.toml"]);
    assert_eq!(file.read().unwrap(), Some(first.clone()));
    assert_eq!(TargetConfig::load(&bed.config()).unwrap().hosts, [first]);

    let mut second = host("db1", 5, "*:ro");
    second.take_over = true;
    file.write(&second).unwrap();
    assert_eq!(TargetConfig::load(&bed.config()).unwrap().hosts, [second]);
    drop(file);
    let other = bed.file("a.db-2");
    other.write(&host("a.db-2", 6, "*:ro")).unwrap();
    assert_eq!(bed.drop_ins(), ["host-a.db-2.toml", "host-db1.toml"]);
    drop(other);
    let left = bed.file("db1").remove().unwrap().hosts;
    assert_eq!(left, [host("a.db-2", 6, "*:ro")]);
    assert_eq!(bed.drop_ins(), ["host-a.db-2.toml"]);
    assert!(bed.file("db1").remove().is_err(), "it is gone");
}

/// What a target would refuse at its next start is refused now, and changes nothing.
#[test]
fn a_host_that_the_configuration_refuses_is_not_written() {
    let in_main = format!(
        "{BASE}[[host]]\nname = 'old'\nkeys = ['{}']\nvolumes = ['*:rw']\n",
        PublicKey::from_bytes([9; 32])
    );
    let bed = Bed::new(&in_main);
    bed.file("db1").write(&host("db1", 4, "vol0:rw")).unwrap();
    let before = fs::read_to_string(bed.file("db1").path()).unwrap();
    for (name, bad, why) in [
        ("db1", host("db1", 4, "vol1:rw"), "there is no volume \"vol1\"; the volumes are vol0"),
        ("db1", host("db1", 9, "vol0:rw"), "a key belongs to one host, and host[0] has it"),
        ("db2", host("db2", 4, "vol0:rw"), "a key belongs to one host"),
        ("old", host("old", 7, "vol0:rw"), "target.toml:7:8); rename one of them"),
    ] {
        let error = bed.file(name).write(&bad).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(fs::read_to_string(bed.file("db1").path()).unwrap(), before);
        assert_eq!(bed.drop_ins(), ["host-db1.toml"]);
    }
}

#[test]
fn what_is_no_host_file_stays() {
    let bed = Bed::new(BASE);
    let path = HostFile::path_of(&bed.config(), "db1").unwrap();
    fs::create_dir(path.parent().unwrap()).unwrap();
    let two = format!("{}{}", toml_of("db1", 4), toml_of("db2", 5));
    for text in [two, toml_of("db2", 4), String::new()] {
        fs::write(&path, text).unwrap();
        let error = bed.file("db1").read().unwrap_err().to_string();
        assert!(error.contains("does not hold just the host db1; edit it by hand"), "{error}");
    }
    fs::write(&path, "arena = '1GiB'\n").unwrap();
    let error = bed.file("db1").read().unwrap_err().to_string();
    assert!(error.contains("host-db1.toml:1:1: arena: unknown key"), "{error}");

    for name in ["", "a/b", "../b", ".hidden", "a b", "-x"] {
        let error = HostFile::lock(&bed.config(), name).unwrap_err().to_string();
        assert!(error.starts_with(&format!("host {name:?}: ")), "{error}");
    }
    let error = HostFile::lock(&bed.config().with_extension("conf"), "a").unwrap_err().to_string();
    assert!(error.contains("only a file whose name ends in .toml"), "{error}");
    // Nothing is made for a configuration that is not there.
    let none = bed.directory.path().join("none.toml");
    let error = HostFile::lock(&none, "a").unwrap_err().to_string();
    assert!(error.contains("create the file, or name another one with --config"), "{error}");
    assert!(!bed.directory.path().join("none.d").exists());
}

fn toml_of(name: &str, key: u8) -> String {
    format!(
        "[[host]]\nname = '{name}'\nkeys = ['{}']\nvolumes = ['*:rw']\n",
        PublicKey::from_bytes([key; 32])
    )
}

/// Programs that change the files of one directory wait for each other.
#[test]
fn one_program_at_a_time() {
    let bed = Bed::new(BASE);
    let held = bed.file("db1");
    let config = bed.config();
    let (sender, receiver) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        let file = HostFile::lock(&config, "db1").unwrap();
        sender.send(()).unwrap();
        file.read().unwrap()
    });
    assert!(receiver.recv_timeout(std::time::Duration::from_millis(100)).is_err());
    held.write(&host("db1", 4, "vol0:rw")).unwrap();
    drop(held);
    assert_eq!(other.join().unwrap(), Some(host("db1", 4, "vol0:rw")));
}
