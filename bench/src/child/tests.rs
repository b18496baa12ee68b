use super::*;

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

#[test]
fn words_of_a_failure_are_in_the_error() {
    assert_eq!(output(&mut shell("echo well"), GRACE).unwrap(), "well\n");
    let error = output(&mut shell("echo why >&2; exit 3"), GRACE).unwrap_err().to_string();
    assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
}

#[test]
fn a_late_child_is_killed_with_its_own() {
    let tag = format!("test-{}-late", std::process::id());
    let mut command = shell("sleep 1000 & sleep 1000");
    let error = output(command.env(TAG, &tag), Duration::from_millis(300)).unwrap_err();
    assert!(format!("{error:#}").contains("killed"), "{error:#}");
    end_tagged(&tag, Duration::ZERO).unwrap();
    assert!(tagged(&tag).is_empty());
}

#[test]
fn what_outlives_its_parent_is_found_by_its_tag() {
    let tag = format!("test-{}-tag", std::process::id());
    output(shell("sleep 1000 >/dev/null 2>&1 &").env(TAG, &tag), GRACE).unwrap();
    // It has no environment for a moment while it becomes another program.
    until(GRACE, || (tagged(&tag).len() == 1).then_some(())).expect("one process");
    end_tagged(&tag, GRACE).unwrap();
    assert!(tagged(&tag).is_empty());
}
