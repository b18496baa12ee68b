use super::*;

fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_is_pending_comes_last_first() {
    let step = |nqn: &str| Step::NvmetSubsystem { nqn: nqn.into() };
    let lines = [
        Line::Begun { id: 0, step: step("a") },
        Line::Begun { id: 1, step: step("b") },
        Line::Begun { id: 2, step: step("c") },
        Line::Undone(1),
    ];
    let mut text: String =
        lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect();
    text.push_str(r#"{"begun":{"id":3,"step":{"what":"nvmet-sub"#);
    assert_eq!(pending(&text), [(2, step("c")), (0, step("a"))]);
}

#[test]
fn every_step_is_read_as_it_was_written() {
    let path = || PathBuf::from("/dev/nbd0");
    let text = || "x".to_owned();
    for step in [
        Step::Processes { tag: text() },
        Step::Load { tag: text() },
        Step::Modules { names: vec![text()] },
        Step::Directory { name: text() },
        Step::NvmetSubsystem { nqn: text() },
        Step::NvmetPort { id: 7, nqn: text() },
        Step::NvmeHost { nqn: text() },
        Step::Mount { name: text(), program: path(), tag: text() },
        Step::Ublk { token: text() },
        Step::SyscallTrigger,
        Step::Nbd { device: path() },
        Step::NbdToCome { connected: vec![path()] },
    ] {
        let line = serde_json::to_string(&Line::Begun { id: 1, step: step.clone() }).unwrap();
        assert_eq!(pending(&line), [(1, step)]);
    }
}

#[test]
fn a_drop_undoes_and_the_journal_goes() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::create(dir.path()).unwrap();
    let (path, undo) = journal.directory("work").unwrap();
    std::fs::write(path.join("file"), "x").unwrap();
    assert_eq!(files(dir.path()).len(), 2);
    // Somebody lives, so nothing is swept.
    let swept = sweep(dir.path()).unwrap();
    assert_eq!((swept.undone, swept.alive), (0, 1));
    assert!(path.exists());
    drop(undo);
    assert!(!path.exists());
    drop(journal);
    assert_eq!(files(dir.path()), [""; 0]);
}

#[test]
fn what_a_dead_process_left_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("work")).unwrap();
    let line = Line::Begun { id: 0, step: Step::Directory { name: "work".into() } };
    let journal = dir.path().join("1-0.undo");
    std::fs::write(&journal, serde_json::to_string(&line).unwrap()).unwrap();
    let swept = sweep(dir.path()).unwrap();
    assert_eq!((swept.undone, swept.failed.len()), (1, 0));
    assert_eq!(files(dir.path()), [""; 0]);
    assert_eq!(sweep(&dir.path().join("none")).unwrap().undone, 0);
}

#[test]
fn what_cannot_be_undone_stays() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["", "..", "a/b", ".x"] {
        assert!(remove_directory(dir.path(), name).is_err(), "{name}");
    }
    let line = Line::Begun { id: 0, step: Step::Directory { name: "../x".into() } };
    let journal = dir.path().join("1-0.undo");
    std::fs::write(&journal, serde_json::to_string(&line).unwrap()).unwrap();
    assert_eq!(sweep(dir.path()).unwrap().failed.len(), 1);
    assert!(journal.exists());
}
