use proptest::prelude::*;
use rblk_operate::mount::disk_names::DiskNames;
use serde_json::{Value, json};

use super::*;

fn host() -> HostIdentity {
    HostIdentity { id: HostId([9; 16]), name: Name::new("host").unwrap() }
}

fn setup() -> Setup {
    Setup {
        volume_name: Name::new("vol0").unwrap(),
        addresses: vec!["rdma://10.0.0.1".parse().unwrap(), "tcp://store".parse().unwrap()],
        host: host(),
        credentials: None,
        keys_file: Some(KeysFile::new(
            "/etc/rblk/mounts.d/vol0.toml".into(),
            ByFlags { volume: false, key_file: true },
        )),
        wish: QueueWish {
            depth: QueueDepth::new(128).unwrap(),
            io_max_bytes: 262_144,
            in_capsule_bytes: 4096,
            features: Features::WRITE_WITH_IMM.or(MESSAGES),
            digest: rblk_config::DigestWish::Auto,
            lanes: None,
            queues: 2,
        },
        queues: 2,
        buffers: Vec::new(),
        shared: SharedMemory::default(),
        tests_paths: false,
        endpoint: Endpoint {
            address: "tcp://store:7721".to_owned(),
            rdma_device: "rxe0".to_owned(),
            transport: "RoCE".to_owned(),
            is_encrypted: false,
        },
    }
}

fn facts() -> Facts {
    Facts {
        resume: Some((SessionId([0xab; 16]), Epoch(u32::MAX))),
        volume: OpenReply {
            handle: VolumeHandle(7),
            flags: VolumeFlags::VOLATILE_CACHE.with(VolumeFlags::DISCARD, true),
            block_size: BlockSize::new(4096).unwrap(),
            blocks: BlockCount(1 << 20),
            discard_granularity_bytes: 65_536,
            uuid: [1; 16],
            verifier: WriteVerifier([0xfe; 16]),
            generation: Generation(u64::MAX),
        },
        instance: InstanceId([3; 16]),
        target_name: Name::new("store1").unwrap(),
        fenced: None,
    }
}

fn note() -> Note {
    note_of(&facts())
}

fn note_of(facts: &Facts) -> Note {
    let mut config = MountConfig::new("rdma://10.0.0.1", "vol0");
    config.target.push("tcp://store".to_owned());
    config.retain = rblk_config::ByteSize(1 << 20);
    config.host_name = Some("a".to_owned());
    let doubts = Doubts { maybe_unflushed: true, loss_untold: true, recovered: 3 };
    Note::of("vol0", (4, DeviceToken::new(77)), &config, (&setup(), facts), doubts)
}

impl Note {
    /// The note of a living mount.
    pub(in crate::mount) fn sample() -> Self {
        note()
    }
}

fn text(note: &Note) -> Vec<u8> {
    serde_json::to_vec(note).unwrap()
}

#[test]
fn a_note_restores_what_the_mount_knew() {
    let fenced = Facts { fenced: Some("held by b".to_owned()), resume: None, ..facts() };
    for facts in [facts(), fenced] {
        let note = note_of(&facts);
        let read = Note::parse(&text(&note), "vol0").unwrap();
        assert_eq!(read, note);
        assert_eq!((read.device_id, read.token), (4, DeviceToken::new(77)));
        assert!(read.maybe_unflushed && read.loss_untold && read.recovered == 3);
        // The id of this host may have changed; the host in the note is the holder.
        let (again, found) = read.restore(&read.config, Name::new("renamed").unwrap()).unwrap();
        assert_eq!((again.host.id, again.host.name.as_str()), (host().id, "renamed"));
        // The handle belonged to the old session.
        let volume = OpenReply { handle: VolumeHandle(0), ..facts.volume };
        assert_eq!(found, Facts { volume, ..facts });
        let setup = setup();
        assert_eq!((again.wish, again.queues), (setup.wish, setup.queues));
        assert_eq!((again.volume_name, again.addresses), (setup.volume_name, setup.addresses));
        assert_eq!((again.endpoint, again.keys_file), (setup.endpoint, setup.keys_file));
    }
}

#[test]
fn a_note_is_roots_and_replaced_whole() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    assert!(Note::read_in(dir.path(), "vol0").unwrap().is_none());
    let mut note = note();
    note.write_in(dir.path()).unwrap();
    note.recovered = 4;
    note.write_in(dir.path()).unwrap();
    assert_eq!(Note::read_in(dir.path(), "vol0").unwrap().unwrap(), note);
    let file = dir.path().join("vol0.json");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "more than the note is left");
    // A failed write leaves the earlier note, or nothing.
    std::fs::create_dir(dir.path().join("vol1.json")).unwrap();
    let other = Note { name: "vol1".to_owned(), ..note.clone() };
    assert!(other.write_in(dir.path()).is_err());
    assert!(!dir.path().join("vol1.json.new").exists());
    std::fs::write(&file, vec![b' '; usize::try_from(form::LEN_MAX).unwrap() + 1]).unwrap();
    let bad = Note::read_in(dir.path(), "vol0").unwrap_err().to_string();
    assert!(bad.contains("too long") && bad.contains("umount --force vol0"), "{bad}");
}

#[test]
fn udev_finds_the_names_of_the_disk_in_the_note() {
    let dir = tempfile::tempdir().unwrap();
    let of = |disk| DiskNames::of_note(dir.path(), "vol0", &text(&note()), disk).unwrap();
    let names = of("ublkb4").expect("the note names its disk").to_string();
    for line in [
        "ID_SERIAL=01010101-0101-0101-0101-010101010101",
        "ID_RBLK_TARGET=store1",
        "ID_RBLK_VOLUME=vol0",
        "ID_RBLK_MOUNT=vol0",
    ] {
        assert!(names.lines().any(|found| found == line), "{line} is not in:\n{names}");
    }
    assert_eq!(of("ublkb5"), None);
}

#[test]
fn a_note_of_a_program_with_retired_keys_is_read() {
    let mut old: Value = serde_json::from_slice(&text(&note())).unwrap();
    old["config"]["pin_queues"] = json!(false);
    assert_eq!(Note::parse(&serde_json::to_vec(&old).unwrap(), "vol0").unwrap(), note());
    old["config"]["no_such_key"] = json!(true);
    let error = Note::parse(&serde_json::to_vec(&old).unwrap(), "vol0").unwrap_err().to_string();
    assert!(error.contains("no_such_key"), "{error}");
}

/// Notes that the programs of 27 November 2026 (5f24c81f) left when they were killed.
#[test]
fn notes_that_the_version_before_left_are_read() {
    let data = include_bytes!("../../../../tests/former/data.json");
    let shared = include_bytes!("../../../../tests/former/shared.json");
    for (left, name, number, volume) in
        [(&data[..], "data", 0, "held"), (shared, "shared", 1, "shared")]
    {
        let note = Note::parse(left, name).unwrap();
        assert_eq!((note.device_id, note.config.volume.as_str()), (number, volume));
        assert_eq!(note.config.shared, name == "shared");
        assert!(note.maybe_unflushed && !note.loss_untold);
        let (setup, facts) = note.restore(&note.config, host().name).unwrap();
        assert_eq!(setup.host.id.to_string(), "1a6e15071d0ebfae56b70ba36fd3bcab");
        assert_eq!(facts.target_name.as_str(), "store1");
        assert_eq!(
            (facts.volume.generation, facts.volume.blocks),
            (Generation(1), BlockCount(4096))
        );
        assert!(DiskNames::of_note(Path::new("/"), name, left, &format!("ublkb{number}")).is_ok());
        // Today's text of it says the same.
        assert_eq!(Note::parse(&text(&note), name).unwrap(), note);
    }
}

#[test]
fn a_note_with_a_bad_value_is_refused() {
    let cases: [(&str, Value, &str); 26] = [
        ("/form", json!(1), "form"),
        ("/form", json!("2"), "invalid type"),
        ("/name", json!("../../etc/x"), "another mount's"),
        ("/token", json!("7262"), "token"),
        ("/token", json!("0000000000000001"), "token"),
        ("/token", json!(5), "invalid type"),
        ("/device_id", json!(-1), "invalid value"),
        ("/pid", json!(1u64 << 40), "invalid value"),
        ("/host", json!("0".repeat(32)), "host's id"),
        ("/host", json!("1"), "hexadecimal"),
        ("/session/id", json!("+".repeat(32)), "hexadecimal"),
        ("/session/epoch", json!(1u64 << 32), "invalid value"),
        ("/instance", json!("é".repeat(16)), "hexadecimal"),
        ("/target_name", json!("a b"), "target's name"),
        ("/volume/blocks", json!(0), "empty"),
        ("/volume/blocks", json!(u64::MAX), "too large"),
        ("/volume/block_size", json!(3), "block size"),
        ("/volume/block_size", json!(0), "block size"),
        ("/wish/depth", json!(0), "depth"),
        ("/wish/io_max", json!(4097), "I/O size"),
        ("/wish/io_max", json!(1u32 << 30), "I/O size"),
        ("/wish/in_capsule", json!(1u32 << 30), "in-capsule"),
        ("/queues", json!(0), "queues"),
        ("/queues", json!(65_535), "queues"),
        ("/address", json!("x".repeat(TEXT_MAX + 1)), "too long"),
        ("/config/target", json!([]), "configuration"),
    ];
    let good: Value = serde_json::from_slice(&text(&note())).unwrap();
    for (path, value, why) in cases {
        let mut bad = good.clone();
        *bad.pointer_mut(path).unwrap() = value.clone();
        let error = Note::parse(&serde_json::to_vec(&bad).unwrap(), "vol0").unwrap_err();
        assert!(error.contains(why), "{path} = {value}: {error}");
    }
    for path in ["token", "config", "host", "volume", "wish", "queues", "maybe_unflushed"] {
        let mut bad = good.clone();
        bad.as_object_mut().unwrap().remove(path);
        let error = Note::parse(&serde_json::to_vec(&bad).unwrap(), "vol0").unwrap_err();
        assert!(error.contains("missing field"), "{path}: {error}");
    }
}

#[test]
fn a_note_says_which_flushes_fail_after_a_loss() {
    use rblk_config::OnLoss;
    let mut note = note();
    note.config.on_loss = OnLoss::Once;
    let good: Value = serde_json::from_slice(&text(&note)).unwrap();
    let read = |value: &Value| Note::parse(&serde_json::to_vec(value).unwrap(), "vol0");
    let once = read(&good).unwrap();
    assert_eq!(once.config.on_loss, OnLoss::Once);
    let status = once.status("no server");
    assert_eq!(
        status.lost.unwrap(),
        "acknowledged writes may be lost; the next FLUSH fails with EIO"
    );
    // A program without that field wrote the note: its loss has the default mode, too.
    let mut old = good.clone();
    assert!(old["config"].as_object_mut().unwrap().remove("on_loss").is_some());
    let old = read(&old).unwrap();
    assert_eq!((old.config.on_loss, old.loss_untold), (OnLoss::UntilRemount, true));
    assert!(old.status("no server").lost.unwrap().contains("until the disk is unmounted"));
    let mut bad = good;
    bad["config"]["on_loss"] = json!("never");
    assert!(read(&bad).unwrap_err().contains("neither \"once\" nor \"until-remount\""));
}

#[test]
fn texts_are_cut_between_characters() {
    assert_eq!(cut("abc"), "abc");
    let long = "ü".repeat(TEXT_MAX);
    assert_eq!(cut(&long), "ü".repeat(TEXT_MAX / 2));
    assert_eq!(cut(&format!("x{long}")).len(), TEXT_MAX - 1);
    let fenced = Facts { fenced: Some(long), ..facts() };
    Note::parse(&text(&note_of(&fenced)), "vol0").unwrap();
}

proptest! {
    /// A read of any bytes ends, and an accepted note has usable values.
    #[test]
    fn damage_is_no_panic(at in 0..4096usize, with in proptest::collection::vec(any::<u8>(), 0..40)) {
        let mut text = text(&note());
        let at = at % text.len();
        let end = (at + with.len()).min(text.len());
        text.splice(at..end, with);
        if let Ok(note) = Note::parse(&text, "vol0") {
            let _ = note.restore(&note.config, host().name);
            let _ = note.status("no server");
        }
    }

    #[test]
    fn garbage_is_no_note(text in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Note::parse(&text, "vol0").is_err());
    }
}
