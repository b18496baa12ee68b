use super::*;

#[test]
fn a_run_is_taken_up_again() {
    let dir = tempfile::tempdir().unwrap();
    let folder = RunFolder::open(&dir.path().join("a/b")).unwrap();
    assert_eq!(folder.load().unwrap(), None);
    let run = Run::begin("x");
    folder.save(&run).unwrap();
    assert_eq!(RunFolder::open(folder.path()).unwrap().load().unwrap(), Some(run));
    let (path, relative) = folder.raw("a.json");
    fs::write(&path, "{}").unwrap();
    assert_eq!(folder.path().join(relative), path);
}

#[test]
fn seconds_have_dates() {
    assert_eq!(utc(0), "1970-01-01 00:00:00");
    assert_eq!(utc(951_827_696), "2000-02-29 12:34:56");
    assert_eq!(utc(1_795_261_140), "2026-11-21 11:39:00");
    assert_eq!(utc(4_107_542_399), "2100-02-28 23:59:59");
    assert_eq!(utc(4_107_542_400), "2100-03-01 00:00:00");
}

#[test]
fn what_is_no_run_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let folder = RunFolder::open(dir.path()).unwrap();
    fs::write(dir.path().join(RUN), "[1").unwrap();
    assert!(format!("{:#}", folder.load().unwrap_err()).contains("is no run"));
    fs::write(dir.path().join(RUN), r#"{"schema": 99}"#).unwrap();
    assert!(format!("{:#}", folder.load().unwrap_err()).contains("schema 99"));
}
