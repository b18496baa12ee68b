//! Key files: made once, read by their owner only, and refused with a reason and a command.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rblk_config::key_file::{Side, create, read};
use rblk_config::{Exit, MountConfig, TargetConfig};
use tempfile::TempDir;

struct Bed {
    directory: TempDir,
}

impl Bed {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A good key file.
    fn key(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        create(&path).unwrap();
        path
    }

    /// A file with this text and this mode.
    fn file(&self, name: &str, text: &[u8], mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }
}

/// The message of a file that is refused, without its path.
#[track_caller]
fn refused(path: &Path) -> String {
    let error = read(path, Side::Target).unwrap_err().to_string();
    let rest = error.strip_prefix(&format!("{}: ", path.display()));
    rest.unwrap_or_else(|| panic!("the path is not first: {error}")).to_owned()
}

#[test]
fn a_key_is_made_once() {
    let bed = Bed::new();
    let path = bed.path("new/directory/target.key");
    let public = create(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    assert_eq!(read(&path, Side::Target).unwrap().public(), public);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with(&format!("# public key: {public}\n")), "{text}");

    let error = create(&path).unwrap_err();
    assert!(error.to_string().contains("there is a file already, and nothing was changed"));
    assert_eq!(error.exit(), Exit::AlreadyThere);
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    // Nor through a link, even one that leads nowhere.
    let link = bed.path("link.key");
    symlink(bed.path("elsewhere.key"), &link).unwrap();
    assert!(create(&link).is_err());
    assert!(!bed.path("elsewhere.key").exists());
    assert!(create(Path::new("credential:target.key")).is_err());
    assert_ne!(create(&bed.path("other.key")).unwrap(), public);
}

#[test]
fn keys_others_may_read_are_refused() {
    let bed = Bed::new();
    let good = fs::read(bed.key("good.key")).unwrap();
    for mode in [0o600, 0o400] {
        assert!(read(&bed.file("mode.key", &good, mode), Side::Target).is_ok(), "{mode:o}");
        fs::remove_file(bed.path("mode.key")).unwrap();
    }
    for mode in [0o644, 0o640, 0o660, 0o604, 0o601, 0o620, 0o610, 0o602] {
        let path = bed.file("mode.key", &good, mode);
        let error = refused(&path);
        let expected = format!(
            "its mode is {mode:04o}, so others may read the secret key; run `chmod 600 {}`. \
             If others may have read it, make a new key instead",
            path.display()
        );
        assert_eq!(error, expected);
    }
    // Any other user may be root's guest here, and root's file is everybody's own.
    if nix::unistd::geteuid().is_root() {
        let path = bed.file("owner.key", &good, 0o600);
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        let error = refused(&path);
        assert!(error.starts_with("its owner is user 65534, and this program runs as user 0;"));
        assert!(error.contains(&format!("`chown 0 {}`", path.display())), "{error}");
    }
}

#[test]
fn what_is_no_key_file_is_refused() {
    let bed = Bed::new();
    let good = bed.key("good.key");
    let text = fs::read(&good).unwrap();
    let link = bed.path("link.key");
    symlink(&good, &link).unwrap();
    assert!(refused(&link).starts_with("a symbolic link; "));
    let pipe = bed.path("pipe.key");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    // It does not wait for a writer.
    assert!(refused(&pipe).starts_with("not a regular file; "));
    assert!(refused(bed.directory.path()).starts_with("not a regular file; "));
    assert!(refused(Path::new("/dev/null")).starts_with("not a regular file; "));

    let missing = read(&bed.path("none.key"), Side::Initiator).unwrap_err();
    assert!(missing.is_missing());
    let command = format!("`rblk-initiator key new --file {}`", bed.path("none.key").display());
    assert!(missing.to_string().contains(&command), "{missing}");
    let missing = read(Path::new("/etc/rblk/no-such-directory/x"), Side::Target).unwrap_err();
    assert!(missing.to_string().contains("`rblk-target key new --file /etc"), "{missing}");

    let content = |name: &str, text: &[u8]| refused(&bed.file(name, text, 0o600));
    assert!(content("empty.key", b"").starts_with("not a key file: the file has no line"));
    assert!(content("garbage.key", &[0xff; 100]).starts_with("not a key file: not text"));
    assert!(content("text.key", b"listen = []\n").starts_with("not a key file: line 1 is"));
    let truncated = &text[..text.len() - 3];
    let error = content("truncated.key", truncated);
    assert!(error.starts_with("not a key file: a key has 58 characters"), "{error}");
    assert!(content("large.key", &[b'#'; 4097]).starts_with("larger than 4KiB"));
    assert!(content("full.key", &[b'#'; 4096]).starts_with("not a key file: the file has no line"));
    let mut twice = text.clone();
    twice.extend_from_slice(&text);
    assert!(content("twice.key", &twice).starts_with("not a key file: line 4"));
    // No message shows a part of a key.
    let secret = String::from_utf8(text).unwrap();
    let secret = secret.split("rblk1-secret:").nth(1).unwrap();
    assert!(!error.contains(&secret[..8]));
}

#[test]
fn a_configuration_names_its_keys() {
    let bed = Bed::new();
    let (first, next) = (bed.key("first.key"), bed.key("next.key"));
    let text = |listen: &str, first: &Path| {
        format!(
            "listen = ['{listen}']\nkey_file = '{}'\nkey_file_next = '{}'\n",
            first.display(),
            next.display()
        )
    };
    let target = |text: &str| TargetConfig::parse(text, "t.toml").unwrap();
    let keys = target(&text("tcp://[::]", &first)).secret_keys().unwrap();
    let public: Vec<_> = keys.iter().map(rblk_protocol::auth::SecretKey::public).collect();
    let of = |path: &Path| read(path, Side::Target).unwrap().public();
    assert_eq!(public, [of(&first), of(&next)]);

    let none = bed.path("none.key");
    assert!(target(&text("tcp://127.0.0.1", &none)).secret_keys().unwrap().is_empty());
    let error = target(&text("tcp://[::]", &none)).secret_keys().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{0}: there is no such key file; make it with `rblk-target key new --file {0}`. Other hosts reach \
             tcp://[::], so every host must prove its key. These commands set keys up: `rblk-target key new`, \
             `rblk-initiator key new` on each host, `rblk-target host add NAME --key KEY --volume VOLUME:rw`. \
             --insecure lets everybody in instead",
            none.display()
        )
    );
    assert_eq!(error.exit(), Exit::Usage);

    let mut mount = MountConfig::new("tcp://store1", "v");
    mount.key_file = none;
    assert!(mount.secret_key().unwrap().is_none(), "nobody asks for it");
    mount.target_keys = vec![of(&next)];
    assert!(mount.secret_key().unwrap_err().is_missing());
    mount.key_file.clone_from(&first);
    assert_eq!(mount.secret_key().unwrap().unwrap().public(), of(&first));
}
