//! The target changes its key, by the procedure of docs/security.md, while mounts go on.

use rblk_protocol::auth::PublicKey;
use rblk_tests::bed::pattern;

use super::*;

const MOUNTS: usize = 20;

/// A target with volumes for one host, and the configurations of that host's mounts.
struct Keys {
    target: Target,
    old: PublicKey,
    host_key: PathBuf,
    dir: tempfile::TempDir,
}

fn new_key(command: &str, file: &Path) -> PublicKey {
    let made = run(Command::new(program(command)).args(["key", "new", "--file"]).arg(file));
    made.stdout.trim_end().parse().unwrap_or_else(|error| panic!("{error}: {made:?}"))
}

impl Keys {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let old = new_key("rblk-target", &dir.path().join("target.key"));
        let host_key = dir.path().join("host.key");
        let host = new_key("rblk-initiator", &host_key);
        let volume = |n| {
            let file = dir.path().join(format!("v{n}.img"));
            File::create(&file).unwrap().set_len(1 << 20).unwrap();
            format!("[[volume]]\nname = 'v{n}'\nstore = 'file'\npath = '{}'\n", file.display())
        };
        let volumes: String = (0..MOUNTS).map(volume).collect();
        let text =
            format!("[[host]]\nname = 'db1'\nkeys = ['{host}']\nvolumes = ['*:rw']\n{volumes}");
        std::fs::write(dir.path().join("rest"), text).unwrap();
        configure(dir.path(), "target.key", None);
        let config = dir.path().join("target.toml").display().to_string();
        let target = Target::start(dir.path(), &["--config", &config]);
        Self { target, old, host_key, dir }
    }

    /// The configuration of a mount that accepts these keys of the target.
    fn write_mount(&self, number: usize, keys: &[PublicKey]) -> PathBuf {
        let path = self.dir.path().join(format!("m{number}.toml"));
        let keys: Vec<String> = keys.iter().map(|key| format!("'{key}'")).collect();
        let mut text = format!("target = ['{}']\nvolume = 'v{number}'\n", self.target.address);
        if !keys.is_empty() {
            let (keys, file) = (keys.join(", "), self.host_key.display());
            text += &format!("target_keys = [{keys}]\nkey_file = '{file}'\n");
        }
        std::fs::write(&path, text).unwrap();
        path
    }

    fn serve(&self, number: usize) -> Served {
        let config = self.write_mount(number, &[self.old]).display().to_string();
        let dir = self.dir.path().join(number.to_string());
        std::fs::create_dir(&dir).unwrap();
        let (address, volume) = (self.target.address.to_string(), format!("v{number}"));
        let args = ["--config", &config, "--queues", "1", "--queue-depth", "4"];
        Served::start(&dir, &address, &volume, &args)
    }

    /// Applies the configuration without an end of the target.
    fn upgrade(&self) {
        let mut upgrade = Command::new(program("rblk-target"));
        upgrade.args(["upgrade", "--control-socket"]).arg(&self.target.socket);
        let ended = run(&mut upgrade);
        assert_eq!(ended.code, Some(0), "{ended:?}\n{}", self.target.log());
    }
}

fn configure(dir: &Path, key: &str, next: Option<&str>) {
    let file = |key: &str| dir.join(key).display().to_string();
    let next = next.map(|next| format!("key_file_next = '{}'\n", file(next))).unwrap_or_default();
    let rest = std::fs::read_to_string(dir.join("rest")).unwrap();
    let text = format!(
        "listen = ['tcp://127.0.0.1:1']\nauth = 'required'\nkey_file = '{}'\n{next}{rest}",
        file(key)
    );
    std::fs::write(dir.join("target.toml"), text).unwrap();
}

fn reload(served: &Served, more: &[&str]) -> Ended {
    initiator(&[&["reload", served.name()], more].concat())
}

#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_the_key_of_a_target_changes_under_twenty_mounts() {
    let bed = Keys::new();
    let mounts: Vec<Served> = (0..MOUNTS).map(|number| bed.serve(number)).collect();
    let mut guests: Vec<Guest> = mounts.iter().map(|served| Guest::connect(served, 1)).collect();
    for (number, guest) in guests.iter_mut().enumerate() {
        guest.fill(AT, &pattern(number as u64, 4096));
        assert_eq!(guest.one(0, Ask::Write, 0, &[(AT, 4096)]), OK);
    }
    let dir = bed.dir.path();
    let new = new_key("rblk-target", &dir.join("next.key"));
    configure(dir, "target.key", Some("next.key"));
    bed.upgrade();
    for (number, served) in mounts.iter().enumerate() {
        bed.write_mount(number, &[bed.old, new]);
        let ended = reload(served, &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stderr.ends_with("the target may prove one of 2 keys\n"), "{ended:?}");
    }
    configure(dir, "next.key", None);
    bed.upgrade();
    for (number, served) in mounts.iter().enumerate() {
        bed.write_mount(number, &[new]);
        assert_eq!(reload(served, &[]).code, Some(0));
    }
    // Each mount logs in once more, and the old key is gone everywhere.
    bed.upgrade();
    for (number, (guest, served)) in guests.iter_mut().zip(&mounts).enumerate() {
        assert_eq!(guest.one(0, Ask::Read, 0, &[(AT + 8192, 4096)]), OK, "{}", served.log());
        assert!(guest.bytes(AT + 8192, 4096) == pattern(number as u64, 4096));
        assert_eq!(served.status()["losses"], 0);
    }
}

#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_keys_that_cannot_be_read_again_stay() {
    let bed = Keys::new();
    let served = bed.serve(0);
    let refused = |piece: &str| {
        let ended = reload(&served, &[]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.contains(piece), "{piece}: {ended:?}");
    };
    let path = bed.write_mount(0, &[]);
    refused("there are no target_keys any more");
    std::fs::remove_file(&path).unwrap();
    refused("m0.toml");
    let host_key = std::fs::read(&bed.host_key).unwrap();
    bed.write_mount(0, &[bed.old]);
    std::fs::remove_file(&bed.host_key).unwrap();
    refused("there is no such key file");
    // The mount keeps its present keys.
    bed.upgrade();
    wait_for("the mount", || (served.status()["state"] == "connected").then_some(()));
    drop(host_key);
    // The keys of a mount with a configuration are written there.
    let ended = reload(&served, &["--target-key", &bed.old.to_string()]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("m0.toml: write them into `target_keys`"), "{ended:?}");
    let ended = initiator(&["reload", "nothing-of-that-name"]);
    assert_eq!(ended.code, Some(3), "{ended:?}");
}
