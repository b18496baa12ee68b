//! `rblk-target trace`: the commands of a volume, and no leftovers at its end.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rblk_operate::target::trace_line::TraceLine;
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Ended, Target, program, run, wait_for};

fn command(target: &Target, args: &[&str]) -> Command {
    let mut command = Command::new(program("rblk-target"));
    command.arg("trace").args(args).arg("--control-socket").arg(&target.socket);
    command
}

/// A running trace.
fn begin(target: &Target, args: &[&str]) -> Child {
    let mut trace = command(target, args);
    let mut child = trace.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = || target.log().matches("a trace begins").count() > 0;
    wait_for("the trace", || began().then_some(()));
    assert_eq!(child.try_wait().unwrap(), None);
    child
}

/// A target with two volumes on files.
fn serve(dir: &std::path::Path) -> Target {
    let file = |name: &str| {
        let path = dir.join(format!("{name}.img"));
        std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).unwrap();
        format!("{name}={}", path.display())
    };
    let (one, two) = (file("one"), file("two"));
    Target::start(dir, &["--file", &one, "--file", &two, "--block-size", "512"])
}

#[test]
fn a_trace_shows_the_commands_of_its_volume_alone_and_ends_after_its_count() {
    let dir = tempfile::tempdir().unwrap();
    let target = serve(dir.path());
    let mut one = Client::connect(&target.address, "one", 1).unwrap();
    let mut two = Client::connect(&target.address, "two", 2).unwrap();
    // Each write of a file waits for the store, so it is not answered within its turn.
    let trace = begin(&target, &["one", "--slower", "1us", "--count", "3", "-o", "json-lines"]);
    for at in 0..40_u64 {
        two.write(at * 4096, &pattern(at, 4096));
        one.write(at * 8192 + 4096, &pattern(at, 8192));
    }
    let done = trace.wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let text = String::from_utf8(done.stdout).unwrap();
    let lines: Vec<TraceLine> =
        text.lines().map(|line| serde_json::from_str(line).expect("a command")).collect();
    assert_eq!(lines.len(), 3, "{text}");
    for line in &lines {
        assert_eq!((&*line.volume, &*line.op, &*line.host), ("one", "write", "test"));
        assert_eq!((line.bytes, line.blocks, line.lba % 16, line.failed), (8192, 16, 8, false));
        let stages = [line.queue_us, line.data_us, line.cache_us, line.store_us, line.answer_us];
        assert_eq!(stages.iter().sum::<u64>(), line.total_us, "{line:?}");
        assert!(line.total_us >= 1 && line.session > 0);
    }
    // The trace ends with the connection: then another one may begin.
    wait_for("the end of the trace", || target.log().contains("a trace ends").then_some(()));
    let again = run(&mut command(&target, &["nosuch"]));
    assert_eq!(again.code, Some(11), "{again:?}");
    assert!(again.stderr.contains("there is no volume nosuch"), "{again:?}");
}

#[test]
fn there_is_one_trace_at_a_time_and_it_ends_with_its_reader() {
    let dir = tempfile::tempdir().unwrap();
    let target = serve(dir.path());
    let mut first = begin(&target, &["one", "--slower", "1us"]);
    let Ended { code, stderr, .. } = run(&mut command(&target, &["two"]));
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("another trace is running"), "{stderr}");
    let mut client = Client::connect(&target.address, "one", 1).unwrap();
    for at in 0..20 {
        client.write(at * 4096, &pattern(at, 4096));
    }
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.contains(" write lba ") && line.contains(" 4KiB test session "), "{line}");
    first.kill().unwrap();
    first.wait().unwrap();
    wait_for("the end of the trace", || target.log().contains("a trace ends").then_some(()));
    assert_eq!(target.status().volumes.len(), 2);
}
