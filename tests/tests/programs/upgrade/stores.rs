//! Upgrades of a target whose stores or state have changed: refused by name before any session
//! ends. By force the next program continues with the open files.

use rblk_operate::target::status::TargetStatus;

use super::*;

const BLOCK: usize = 4096;
const SIZE: u64 = 4 << 20;

/// Writes the first and the last bytes of the volume, and flushes.
fn fill(client: &mut Client) {
    client.write(0, &pattern(1, BLOCK));
    client.write(SIZE - 4096, &pattern(2, BLOCK));
    client.flush();
}

/// A target with a client that wrote to it.
fn served(dir: &Path) -> (Target, Client) {
    let target = start(dir);
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    fill(&mut client);
    (target, client)
}

/// Checks that an upgrade is refused for that reason, and that the mount notices nothing.
fn assert_serves_on(target: &Target, client: &Client, pieces: &[&str]) {
    let before = target.status();
    let refused = run(&mut command(target, &[]));
    println!("{}", refused.stderr);
    assert_refused(&refused, 1, pieces);
    assert_refused(&refused, 1, &["--force", "serves as before"]);
    let now = target.status();
    assert_eq!((&now.instance, now.fencings), (&before.instance, 0));
    // Without sessions that were refused their volume, which end with their connection.
    let open = |status: &TargetStatus| {
        status.sessions.iter().filter(|session| !session.volumes.is_empty()).count()
    };
    assert_eq!((open(&now), open(&before)), (1, 1), "its path has not been cut");
    assert!(!target.log().contains("another program takes over"));
    let again = Client::connect(&target.address, "v", 2).unwrap_err();
    assert!(again.to_string().contains("in use"), "it still is the mount's: {again}");
    assert!(client.volume.blocks.0 > 0);
}

/// Upgrades by force. The mount finds its volume unchanged.
fn force(target: &Target, client: Client) -> Client {
    let before = client.volume;
    let upgrade = begin(target, &["--force"]);
    let client = go_along(client, target);
    let (code, said, complaint) = end(upgrade);
    assert_eq!(code, Some(0), "{said} {complaint}\n{}", target.log());
    let is = |volume: rblk_protocol::OpenReply| (volume.verifier, volume.generation, volume.blocks);
    assert_eq!(is(client.volume), is(before));
    assert_eq!(target.status().fencings, 0);
    client
}

fn assert_holds(client: &mut Client, what: &str) {
    assert!(client.read(0, BLOCK) == pattern(1, BLOCK), "{what}: its first block");
    assert!(client.read(SIZE - 4096, BLOCK) == pattern(2, BLOCK), "{what}: its last block");
}

/// Checks that the new program continues with the open file, whatever is at the path: twice, since
/// the second program gets the file from one that never opened it.
fn assert_goes_on_with_the_open_file(target: &Target, mut client: Client, what: &str) {
    for _ in 0..2 {
        client = force(target, client);
        assert_holds(&mut client, what);
        client.write(4096, &pattern(3, BLOCK));
        client.flush();
    }
}

fn set_len(path: &Path, len: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn a_file_that_was_deleted_is_named_and_by_force_served_on() {
    let dir = tempfile::tempdir().unwrap();
    let (target, mut client) = served(dir.path());
    let path = dir.path().join("v.img");
    std::fs::remove_file(&path).unwrap();
    let pieces = ["volume `v`", "is deleted", "/proc/", &path.display().to_string()];
    assert_serves_on(&target, &client, &pieces);
    assert_holds(&mut client, "deleted");
    assert_goes_on_with_the_open_file(&target, client, "deleted");
    assert!(!path.exists(), "no other file is made");
}

#[test]
fn another_file_at_the_path_is_named_and_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let (target, mut client) = served(dir.path());
    let (path, other) = (dir.path().join("v.img"), dir.path().join("other.img"));
    std::fs::write(&other, pattern(9, usize::try_from(SIZE).unwrap())).unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_serves_on(
        &target,
        &client,
        &["volume `v`", "its file is deleted and a different one is at"],
    );
    assert_holds(&mut client, "renamed over");
    assert_goes_on_with_the_open_file(&target, client, "renamed over");
    assert!(std::fs::read(&path).unwrap() == pattern(9, usize::try_from(SIZE).unwrap()));
}

#[test]
fn a_directory_at_the_path_is_named_and_by_force_served_on() {
    let dir = tempfile::tempdir().unwrap();
    let (target, mut client) = served(dir.path());
    let (path, away) = (dir.path().join("v.img"), dir.path().join("away.img"));
    std::fs::rename(&path, &away).unwrap();
    assert_serves_on(&target, &client, &["volume `v`", "its file is not at", "put it back"]);
    std::fs::create_dir(&path).unwrap();
    assert_serves_on(&target, &client, &["volume `v`", "another file or device is at"]);
    assert_holds(&mut client, "a directory");
    client = force(&target, client);
    assert_holds(&mut client, "a directory");
    // With the file back, an upgrade works.
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&away, &path).unwrap();
    let upgrade = begin(&target, &[]);
    let mut client = go_along(client, &target);
    assert_eq!(end(upgrade).0, Some(0), "{}", target.log());
    assert_holds(&mut client, "put back");
}

#[test]
fn a_file_of_another_length_is_named_and_the_volume_keeps_its_size() {
    for (len, piece) in [
        (SIZE + 1, "not whole blocks"),
        (SIZE / 2, "has 2097152 of 4194304 bytes"),
        (0, "has 0 of 4194304 bytes"),
    ] {
        let what = format!("{len} bytes");
        let dir = tempfile::tempdir().unwrap();
        let (target, mut client) = served(dir.path());
        let path = dir.path().join("v.img");
        set_len(&path, len);
        assert_serves_on(&target, &client, &["volume `v`", piece, "truncate -s 4194304"]);
        client = force(&target, client);
        if len > SIZE {
            assert_holds(&mut client, &what);
        }
        // Writes succeed, and lengthen the file where needed.
        fill(&mut client);
        let mut client = force(&target, client);
        assert_holds(&mut client, &what);
        assert!(std::fs::metadata(&path).unwrap().len() >= SIZE.max(len), "{what}");
    }
}

#[test]
fn a_file_that_grew_by_whole_blocks_is_served_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let (target, client) = served(dir.path());
    let path = dir.path().join("v.img");
    let before = client.volume;
    // Data behind the end, in preparation of a resize.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend(pattern(7, BLOCK));
    std::fs::write(&path, bytes).unwrap();
    let upgrade = begin(&target, &[]);
    let mut client = go_along(client, &target);
    let (code, _, complaint) = end(upgrade);
    assert_eq!(code, Some(0), "{complaint}");
    assert_eq!(client.volume.blocks, before.blocks);
    assert_holds(&mut client, "grown");
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[usize::try_from(SIZE).unwrap()..] == pattern(7, BLOCK), "it is still there");
}

/// The file of the state directory with this ending.
fn file_with(dir: &Path, ending: &str) -> String {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names = names.map(|name| name.into_string().unwrap());
    names.find(|name| name.ends_with(ending)).unwrap_or_else(|| panic!("no {ending}"))
}

#[test]
fn a_lost_state_is_named_and_no_mount_is_fenced() {
    for lost in [&[".volume"][..], &[".volume", ".lineage.lock"]] {
        let dir = tempfile::tempdir().unwrap();
        let (target, mut client) = served(dir.path());
        let kept = dir.path().join("kept");
        std::fs::create_dir(&kept).unwrap();
        let files = lost.iter().map(|ending| file_with(dir.path(), ending));
        let files: Vec<String> = files.collect();
        for file in &files {
            std::fs::rename(dir.path().join(file), kept.join(file)).unwrap();
        }
        assert_serves_on(&target, &client, &["is gone", "would be refused (fenced)", "a loss"]);
        assert_holds(&mut client, "a lost state");
        // With the files back, an upgrade works.
        for file in &files {
            std::fs::rename(kept.join(file), dir.path().join(file)).unwrap();
        }
        let before = client.volume;
        let upgrade = begin(&target, &[]);
        let mut client = go_along(client, &target);
        let (code, _, complaint) = end(upgrade);
        assert_eq!(code, Some(0), "{complaint}");
        assert_eq!(client.volume.verifier, before.verifier);
        assert_eq!(target.status().fencings, 0);
        assert_holds(&mut client, "put back");
    }
}

#[test]
fn a_lost_state_is_handed_over_by_force() {
    let dir = tempfile::tempdir().unwrap();
    let (target, mut client) = served(dir.path());
    let lost = dir.path().join(file_with(dir.path(), ".volume"));
    std::fs::remove_file(&lost).unwrap();
    for _ in 0..2 {
        client = force(&target, client);
        assert_holds(&mut client, "a lost state");
        assert!(lost.exists(), "the record is written again");
    }
}

#[test]
fn another_state_than_the_target_wrote_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let record = dir.path().join(file_with(dir.path(), ".volume"));
    let earlier = std::fs::read(&record).unwrap();
    // Another host takes over, in a later generation.
    let taken = VolumeClaim { take_over: true, ..AccessMode::Exclusive.into() };
    let mut other = Client::claim(&target.address, "v", 2, taken).unwrap();
    fill(&mut other);
    std::fs::write(&record, earlier).unwrap();
    let refused = run(&mut command(&target, &[]));
    assert_refused(&refused, 1, &["has changed: another program wrote to it", "fenced"]);
    assert_holds(&mut other, "an earlier state");
    assert_eq!(
        client.try_io(rblk_initiator::engine::io::IoOp::Flush, 0, 0),
        None,
        "it was taken over"
    );
}

/// A file that cannot be changed or removed while this lives.
struct Immutable(PathBuf);

impl Immutable {
    fn make(path: &Path) -> Self {
        assert!(chattr("+i", path), "this file system has no immutable files");
        Self(path.to_owned())
    }
}

impl Drop for Immutable {
    fn drop(&mut self) {
        chattr("-i", &self.0);
    }
}

fn chattr(flag: &str, path: &Path) -> bool {
    Command::new("chattr").arg(flag).arg(path).status().is_ok_and(|status| status.success())
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_an_immutable_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (target, mut client) = served(dir.path());
    let immutable = Immutable::make(&dir.path().join("v.img"));
    let pieces = ["volume `v`", "is immutable", "chattr -i"];
    assert_serves_on(&target, &client, &pieces);
    assert_holds(&mut client, "immutable");
    client = force(&target, client);
    assert_holds(&mut client, "immutable");
    drop(immutable);
    fill(&mut client);
}
