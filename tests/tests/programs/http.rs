//! The HTTP server of a real target: metrics that Prometheus accepts, health, and the limits.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rblk_tests::bed::pattern;
use rblk_tests::http::{Answer, exchange, get, request};
use rblk_tests::program::{Client, FreePort, Target, free_port, program, run, wait_for};

fn target(dir: &Path, args: &[&str]) -> (Target, FreePort) {
    let port = free_port();
    let http = format!("127.0.0.1:{}", port.number);
    (Target::start(dir, &[&["--http", &http], args].concat()), port)
}

fn file(dir: &Path) -> String {
    let path = dir.join("vol0.img");
    std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a store");
    format!("vol0={}", path.display())
}

/// Runs promtool of Debian's package prometheus.
fn promtool(args: &[&str], input: &str) -> (bool, String) {
    let mut command = Command::new("promtool");
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.current_dir(root()).spawn();
    let mut child =
        child.unwrap_or_else(|error| panic!("promtool: {error}; `apt install prometheus`"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// The metrics of a target after some I/O.
fn metrics_of_work(dir: &Path) -> String {
    let (target, port) = target(dir, &["--file", &file(dir), "--memory", "m=1MiB"]);
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    client.write(0, &pattern(1, 8192));
    client.read(0, 4096);
    client.flush();
    let text = wait_for("the counters", || {
        let text = get(port.number, "/metrics").body;
        text.contains("rblk_target_commands_total{poll_group=\"0\",op=\"read\"} 1\n")
            .then_some(text)
    });
    client.logout();
    text
}

/// The last message of a target, for a client that asked before its end.
fn farewell(port: u16) -> std::thread::JoinHandle<String> {
    let asking = std::thread::spawn(move || {
        exchange(port, b"GET /farewell HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    });
    // The request must arrive before the target's end.
    std::thread::sleep(Duration::from_millis(300));
    asking
}

#[test]
fn the_farewell_names_the_end_of_the_target_and_a_crash_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let (mut drained, port) = target(dir.path(), &["--memory", "m=1MiB"]);
    let word = farewell(port.number);
    drained.terminate();
    assert_eq!(drained.wait(), Some(0));
    let word = word.join().unwrap();
    assert!(
        word.contains("\"end\":\"drained\"") && word.contains("every initiator had left"),
        "{word}"
    );

    let stays = tempfile::tempdir().unwrap();
    let (mut stopped, port) =
        target(stays.path(), &["--memory", "m=1MiB", "--drain-timeout", "1ms"]);
    let _client = Client::connect(&stopped.address, "m", 1).unwrap();
    let word = farewell(port.number);
    stopped.terminate();
    stopped.wait();
    let word = word.join().unwrap();
    assert!(
        word.contains("\"end\":\"stopped\"") && word.contains("had not left in time: 1"),
        "{word}"
    );

    let dies = tempfile::tempdir().unwrap();
    let (mut killed, port) = target(dies.path(), &["--memory", "m=1MiB"]);
    let word = farewell(port.number);
    killed.kill();
    assert_eq!(word.join().unwrap(), "");
}

#[test]
fn the_history_of_the_volumes_can_be_read_later() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path(), &["--file", &file(dir.path()), "--memory", "m=1MiB"]);
    let past = |after: u64| -> serde_json::Value {
        serde_json::from_str(&get(port.number, &format!("/past?after={after}")).body).unwrap()
    };
    assert_eq!(
        (past(0)["last"].as_u64(), past(0)["moments"].as_array().unwrap().len()),
        (Some(0), 0)
    );
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    client.write(0, &pattern(1, 8192));
    client.read(0, 4096);
    let first = wait_for("a moment", || Some(past(0)).filter(|past| past["last"] == 1));
    let deeds = &first["moments"][0]["volumes"];
    assert_eq!(deeds.as_array().unwrap().len(), 1, "the other volume did nothing: {deeds}");
    let of = |key: &str| deeds[0][key].as_u64();
    assert_eq!(deeds[0]["name"], "vol0");
    assert_eq!(
        (of("reads"), of("read_bytes"), of("written_bytes")),
        (Some(1), Some(4096), Some(8192))
    );
    assert_eq!(deeds[0]["read"].as_array().unwrap().len(), 1, "one time in one bucket: {deeds}");
    // A second without I/O adds no moment.
    std::thread::sleep(Duration::from_millis(2200));
    client.flush();
    client.logout();
    let second = wait_for("the next moment", || Some(past(1)).filter(|past| past["last"] == 2));
    assert_eq!(second["moments"].as_array().unwrap().len(), 1);
    let (from, to) = (&first["moments"][0]["unix_ms"], &second["moments"][0]["unix_ms"]);
    assert!(to.as_u64().unwrap() >= from.as_u64().unwrap() + 2000, "{from} {to}");
    assert_eq!(second["instance"], target.status().instance);
    assert_eq!(get(port.number, "/past?after=x").status, 400);
}

#[test]
fn the_status_has_condition_usage_and_listeners() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path(), &["--file", &file(dir.path()), "--memory", "m=1MiB"]);
    let _client = Client::connect(&target.address, "vol0", 1).unwrap();
    let status: serde_json::Value =
        serde_json::from_str(&get(port.number, "/status.json").body).unwrap();
    assert_eq!(
        (&status["condition"], &status["warnings"]),
        (&"serving".into(), &serde_json::json!([]))
    );
    let usage = |key: &str| status["usage"][key].as_u64();
    assert_eq!(
        (usage("sessions"), usage("sessions_max"), usage("connections")),
        (Some(1), Some(1024), Some(2))
    );
    assert!(
        usage("files_max") > Some(0) && usage("memory_bytes") < usage("memory_max_bytes"),
        "{}",
        status["usage"]
    );
    assert!(status["devices"][0]["ports"].is_array(), "{}", status["devices"]);
    let room = &status["volumes"][0]["room"];
    assert_eq!(room["unallocated_bytes"], 1 << 20, "nothing was written to the thin file: {room}");
    let text = get(port.number, "/metrics").body;
    for line in [
        &format!("rblk_target_listener_up{{address=\"{}\"}} 1", target.address),
        "rblk_target_volume_unallocated_bytes{volume=\"vol0\"} 1048576",
        "rblk_target_volume_dirty_age_seconds{volume=\"vol0\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[test]
fn prometheus_takes_the_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let text = metrics_of_work(dir.path());
    let (good, said) = promtool(&["check", "metrics"], &text);
    assert!(good && said.is_empty(), "{said}\n{text}");
    for line in [
        "rblk_target_written_bytes_total{poll_group=\"0\"} 8192",
        "rblk_target_volume_size_bytes{volume=\"vol0\"} 1048576",
        "rblk_target_volume_holder{volume=\"vol0\",host=\"test\"} 1",
        "rblk_target_sessions{host=\"test\"} 1",
        "rblk_target_events_total{kind=\"connect\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    let (good, said) = promtool(&["check", "metrics"], "# TYPE bad counter\nbad 1\n");
    assert!(!good, "promtool finds nothing: {said}");
}

#[test]
fn health_follows_the_drain() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path(), &["--memory", "m=1MiB", "--drain-timeout", "1h"]);
    let answer = get(port.number, "/healthz");
    assert_eq!((answer.status, answer.body.as_str()), (200, "serving 1 volumes to 0 sessions\n"));
    // The client stays, so the drain lasts.
    let _client = Client::connect(&target.address, "m", 1).unwrap();
    let mut drain = Command::new(program("rblk-target"));
    drain.args(["drain", "--no-wait", "--control-socket"]).arg(&target.socket);
    assert_eq!(run(&mut drain).code, Some(0));
    let Answer { status, body, .. } =
        wait_for("a drain", || Some(get(port.number, "/healthz")).filter(|a| a.status != 200));
    assert_eq!(status, 503);
    assert!(body.starts_with("draining for ") && body.contains("1 sessions left"), "{body}");
    assert!(get(port.number, "/metrics").body.contains("\nrblk_target_draining 1\n"));
}

#[test]
fn every_path_has_its_document() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path(), &["--memory", "m=1MiB"]);
    let status: serde_json::Value =
        serde_json::from_str(&get(port.number, "/status.json").body).unwrap();
    assert_eq!(status["instance"], target.status().instance);
    Client::connect(&target.address, "m", 1).unwrap().logout();
    let events = |path| {
        let body = get(port.number, path).body;
        serde_json::from_str::<serde_json::Value>(&body).unwrap()["events"]
            .as_array()
            .unwrap()
            .len()
    };
    wait_for("both events", || (events("/events") == 2).then_some(()));
    assert_eq!(events("/events?after=1"), 1);
    let page = get(port.number, "/");
    assert!(page.head.contains("content-security-policy: default-src 'none'; style-src 'sha256-"));
    for path in ["/", "/metrics", "/healthz", "/status.json", "/events", "/nothing"] {
        let Answer { head, .. } = get(port.number, path);
        for line in [
            "cache-control: no-store",
            "x-content-type-options: nosniff",
            "content-security-policy: ",
        ] {
            assert!(head.contains(line), "{path}: {line} is not in\n{head}");
        }
        let bare = request(port.number, "HEAD", path, "localhost");
        assert!(bare.body.is_empty(), "{path}");
    }
    assert_eq!(get(port.number, "/nothing").status, 404);
    assert_eq!(get(port.number, "/events?after=x").status, 400);
    let post = request(port.number, "POST", "/metrics", "localhost");
    assert!(post.status == 405 && post.head.contains("allow: get, head"), "{post:?}");
}

/// A page of another site, in a browser on this host, with a name that resolves to this host.
#[test]
fn a_foreign_host_name_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_target, port) = target(dir.path(), &["--memory", "m=1MiB"]);
    for path in ["/", "/metrics", "/status.json", "/events"] {
        let answer = request(port.number, "GET", path, "evil.example:9720");
        assert_eq!(answer.status, 421, "{path}: {answer:?}");
        assert!(!answer.body.contains("rblk"), "{answer:?}");
    }
}

#[test]
fn clients_that_send_too_much_or_nothing_are_ended_and_others_served() {
    let dir = tempfile::tempdir().unwrap();
    let (_target, port) = target(dir.path(), &["--memory", "m=1MiB"]);
    let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port.number)).unwrap();
    // More clients than there are places, and all are silent.
    let silent: Vec<TcpStream> = (0..60).map(|_| connect()).collect();
    assert_eq!(get(port.number, "/healthz").status, 200);
    drop(silent);
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    assert!(!exchange(port.number, long.as_bytes()).contains("200 OK"));
    let lines = "X: 1\r\n".repeat(100);
    let many = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n");
    assert!(!exchange(port.number, many.as_bytes()).contains("200 OK"));
    // The end of the request is never sent.
    let half = exchange(port.number, b"GET / HTTP/1.1\r\nHost: loc");
    assert!(!half.contains("200 OK"), "{half}");
    let noise: Vec<u8> = (0..=255).cycle().take(20_000).collect();
    assert!(!exchange(port.number, &noise).contains("200 OK"));
    assert_eq!(get(port.number, "/healthz").status, 200);
}

/// Checks that a probe is answered at once.
fn is_healthy(port: u16, what: &str) {
    let begun = Instant::now();
    let answer = get(port, "/healthz");
    let took = begun.elapsed();
    assert_eq!(answer.status, 200, "{what}: {answer:?}");
    assert!(took < Duration::from_secs(2), "{what}: /healthz took {took:?}");
}

#[test]
fn clients_hold_up_no_probe_of_healthz() {
    let dir = tempfile::tempdir().unwrap();
    let (_target, port) = target(dir.path(), &["--memory", "m=1MiB"]);
    let say = |text: &str| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port.number)).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    let all = |text: &str| -> Vec<TcpStream> { (0..200).map(|_| say(text)).collect() };
    let (silent, half) = (all(""), all("GET /healthz HTTP/1.1\r\nHost: loc"));
    is_healthy(port.number, "silent clients and half heads");
    drop((silent, half));
    let idle = all("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    is_healthy(port.number, "idle clients");
    drop(idle);
    // Each client asks for much and reads nothing, so it holds its place for the time limit of an
    // answer.
    let much = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(600);
    let deaf: Vec<TcpStream> = (0..48).map(|_| say(&much)).collect();
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..20 {
        is_healthy(port.number, "deaf clients");
    }
    assert_eq!(get(port.number, "/metrics").status, 503, "the places are taken");
    let is_served = || (get(port.number, "/metrics").status == 200).then_some(());
    wait_for("the end of deaf clients", is_served);
    drop(deaf);
    let answer = request(port.number, "GET", "/healthz", "[::1].evil.example");
    assert_eq!(answer.status, 421, "{answer:?}");
}

#[test]
fn an_address_that_others_reach_is_a_warning_and_a_taken_one_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let http = format!("0.0.0.0:{}", port.number);
    let target = Target::start(dir.path(), &["--memory", "m=1MiB", "--http", &http]);
    // Another thread writes the log.
    wait_for("the warning", || {
        target.log().contains("any host that reaches this address can read").then_some(())
    });
    assert_eq!(request(port.number, "GET", "/healthz", "store1:9720").status, 200, "any name");
    let second = dir.path().join("second");
    std::fs::create_dir(&second).unwrap();
    let listen = free_port();
    let listen = format!("tcp://127.0.0.1:{}", listen.number);
    let mut serve = Command::new(program("rblk-target"));
    serve.args(["serve", "--memory", "m=1MiB", "--listen", &listen, "--http", &http]);
    let ended = run(serve
        .arg("--control-socket")
        .arg(second.join("c.sock"))
        .arg("--state-dir")
        .arg(&second));
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains(&format!("http = \"{http}\"")), "{ended:?}");
}

/// The names of the metrics in a text of Prometheus.
fn families(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
}

/// The names of rblk's metrics in expressions.
fn named(text: &str) -> BTreeSet<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_of_name(c)).filter(|word| word.starts_with("rblk_"));
    words.map(str::to_owned).collect()
}

/// Names in expressions that match no metric.
fn unknown(expressions: &str, known: &BTreeSet<&str>) -> Vec<String> {
    let is_known = |name: &String| {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        known.contains(name.as_str()) || base.is_some_and(|base| known.contains(base))
    };
    named(expressions).into_iter().filter(|name| !is_known(name)).collect()
}

#[test]
fn the_dashboard_and_the_rules_name_metrics_that_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let text = metrics_of_work(dir.path());
    let mount = rblk_cli::initiator::mount_metrics::metrics(
        &[rblk_operate::mount::mount_status::MountStatus::default()],
        &[],
    );
    let known: BTreeSet<&str> = families(&text).union(&families(&mount)).copied().collect();
    for name in ["config/grafana/rblk.json", "config/prometheus/rblk.rules.yml"] {
        let file = std::fs::read_to_string(root().join(name)).unwrap();
        if name.ends_with(".json") {
            serde_json::from_str::<serde_json::Value>(&file).expect(name);
        }
        assert!(named(&file).len() > 5, "{name} names no metrics");
        assert_eq!(unknown(&file, &known), Vec::<String>::new(), "{name}");
    }
    let wrong = "rate(rblk_target_no_such_total[1m])";
    assert_eq!(unknown(wrong, &known), ["rblk_target_no_such_total"]);
}

/// The names of the labels of samples, without the bounds of histograms.
fn labels_of<'t>(text: &'t str, families: &[String]) -> BTreeSet<&'t str> {
    let is_of_one = |line: &&str| {
        let name = line.split(['{', ' ']).next().unwrap();
        families.iter().any(|family| {
            let end = name.strip_prefix(family.as_str());
            end.is_some_and(|end| ["", "_bucket", "_sum", "_count"].contains(&end))
        })
    };
    let inside = |line: &'t str| line.split_once('{')?.1.rsplit_once('}').map(|(labels, _)| labels);
    let labels = text.lines().filter(is_of_one).filter_map(inside);
    let names = labels.flat_map(|labels| labels.split("\",").filter_map(|one| one.split_once('=')));
    names.map(|(name, _)| name).filter(|name| *name != "le").collect()
}

#[test]
fn the_documents_name_metrics_that_there_are_with_their_labels() {
    let dir = tempfile::tempdir().unwrap();
    let text = metrics_of_work(dir.path());
    let mount = rblk_cli::initiator::mount_metrics::metrics(
        &[rblk_operate::mount::mount_status::MountStatus::default()],
        &[],
    );
    let known: BTreeSet<&str> = families(&text).union(&families(&mount)).copied().collect();
    let page = std::fs::read_to_string(root().join("docs/monitor.md")).unwrap();
    // The beginning of all names ends in an underscore; keys of examples begin with `rblk_`, too.
    let is_whole = |name: &String| {
        let begins = ["rblk_target_", "rblk_mount_"].iter().any(|begin| name.starts_with(begin));
        begins && !name.ends_with('_') && name != "rblk_target_key"
    };
    for document in ["monitor.md", "change.md", "performance.md", "session.md", "vhost.md"] {
        let document = std::fs::read_to_string(root().join("docs").join(document)).unwrap();
        let wrong: Vec<String> = unknown(&document, &known).into_iter().filter(is_whole).collect();
        assert_eq!(wrong, Vec::<String>::new());
    }
    let rows = page.lines().filter(|line| line.starts_with("| `rblk_target_"));
    let mut compared = 0;
    for row in rows {
        let cells: Vec<&str> = row.split('|').collect();
        let [_, metrics, labels, ..] = cells.as_slice() else { panic!("{row}") };
        let metrics: Vec<String> = named(metrics).into_iter().collect();
        let labels: BTreeSet<&str> = labels.split('`').skip(1).step_by(2).collect();
        let seen = labels_of(&text, &metrics);
        if !seen.is_empty() {
            assert_eq!(labels, seen, "{row}");
            compared += 1;
        }
    }
    assert!(compared > 8, "{compared} rows with samples");
}

/// Replaces Grafana's variables by values.
fn with_values(expression: &str) -> String {
    expression.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$volume", ".*")
}

/// A rule records each expression of the dashboard, so that promtool parses it.
#[test]
fn prometheus_takes_the_expressions_of_the_dashboard() {
    let text = std::fs::read_to_string(root().join("config/grafana/rblk.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(expressions.len() > 15, "{expressions:?}");
    let rule = |(at, expression): (usize, &&str)| serde_json::json!({"record": format!("of:panel:{at}"), "expr": with_values(expression)});
    let rules: Vec<serde_json::Value> = expressions.iter().enumerate().map(rule).collect();
    let check = |rules: serde_json::Value| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dashboard.json");
        // JSON is YAML.
        let groups = serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]});
        std::fs::write(&file, groups.to_string()).unwrap();
        promtool(&["check", "rules", &file.display().to_string()], "")
    };
    let (good, said) = check(serde_json::json!(rules));
    assert!(good, "{said}");
    assert!(!check(serde_json::json!([{"record": "x:y", "expr": "sum(rate(a)) by"}])).0);
}

#[test]
fn prometheus_takes_the_rules_and_they_alert() {
    let (good, said) = promtool(&["check", "rules", "config/prometheus/rblk.rules.yml"], "");
    assert!(good, "{said}");
    let (good, said) = promtool(&["test", "rules", "config/prometheus/rblk.rules.test.yml"], "");
    assert!(good, "{said}");
}
