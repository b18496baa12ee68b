//! The live page in a real browser, of a real target: under load, with a full store, and when the
//! target drains, is replaced, is killed and comes back.
//!
//! `RBLK_PICTURES` names a directory for pictures of the page.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rblk_fabric::Address;
use rblk_initiator::engine::io::IoOp;
use rblk_tests::bed::pattern;
use rblk_tests::browser::Browser;
use rblk_tests::program::{Client, FreePort, Target, free_port, program, run};

/// A target with a volume in a file and one in memory, and the port of its page.
fn target(dir: &Path) -> (Target, FreePort) {
    let file = dir.join("vol0.img");
    std::fs::File::create(&file).and_then(|f| f.set_len(64 << 20)).expect("a store");
    let port = free_port();
    let http = format!("127.0.0.1:{}", port.number);
    let file = format!("vol0={}", file.display());
    let args = ["--http", &http, "--file", &file, "--memory", "ram0=16MiB"];
    (Target::start(dir, &[&args[..], &["--name", "store1", "--lease", "30s"]].concat()), port)
}

/// Reads and writes until it is told to stop.
fn load(address: &Address, volume: &'static str, stop: &Arc<AtomicBool>) -> JoinHandle<Client> {
    let mut client = Client::connect(address, volume, volume.as_bytes()[0]).expect("a session");
    let stop = Arc::clone(stop);
    thread::spawn(move || {
        let mut turn = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            turn += 1;
            let at = turn.wrapping_mul(0x9e37_79b9) % 3000 * 4096;
            match turn % 64 {
                0 => client.flush(),
                n if n % 4 == 1 => client.write(at, &pattern(turn, 4096)),
                n if n % 16 == 2 => drop(client.read(at, 64 << 10)),
                _ => drop(client.read(at, 4096)),
            }
        }
        client
    })
}

fn open(browser: &mut Browser, port: &FreePort) {
    browser.open(&format!("http://127.0.0.1:{}/", port.number));
    browser.wait_for("a live page", "document.documentElement.dataset.state === 'live'");
}

/// Saves pictures if `RBLK_PICTURES` is set.
fn keep_pictures(browser: &mut Browser, name: &str, shapes: &[(&str, u32, bool)]) {
    let Some(dir) = std::env::var_os("RBLK_PICTURES") else { return };
    for (shape, width, dark) in shapes {
        browser.show_as(*width, *dark);
        browser.wait_for(
            "a picture",
            "new Promise((d) => requestAnimationFrame(() => d(true))) && true",
        );
        thread::sleep(std::time::Duration::from_millis(1500));
        let path = Path::new(&dir).join(format!("{name}-{shape}.png.base64"));
        std::fs::write(path, browser.picture()).expect("a picture");
    }
}

const TEXT: &str = "document.body.innerText";

/// The text of the banner, and the title of the tab.
fn banner_and_title(browser: &mut Browser) -> (String, String) {
    let mut text = |of: &str| browser.value(of).as_str().unwrap_or_default().to_owned();
    (text("document.getElementById('banner').innerText"), text("document.title"))
}

/// The newest event of a kind, as JavaScript.
fn newest(kind: &str) -> String {
    format!("groups.get('{kind}').list.firstElementChild.textContent")
}

/// Starts a target in another directory, at the port of the page.
fn start_again(dir: &Path, port: &FreePort) -> (std::path::PathBuf, Target) {
    let again = dir.join("again");
    std::fs::create_dir(&again).unwrap();
    let http = format!("127.0.0.1:{}", port.number);
    let target = Target::start(&again, &["--http", &http, "--memory", "other=1MiB"]);
    (again, target)
}

#[test]
fn a_page_under_load_shows_rates_latencies_and_that_its_target_died() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, port) = target(dir.path());
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    browser.wait_for("an empty table", &format!("{TEXT}.includes('No host is connected.')"));
    let stop = Arc::new(AtomicBool::new(false));
    let loads = ["vol0", "ram0"].map(|volume| load(&target.address, volume, &stop));
    // The page formats its numbers: "1.2k/s".
    browser.wait_for("reads", "/^[1-9]/.test(document.getElementById('reads').textContent)");
    browser.wait_for("writes", "/^[1-9]/.test(document.getElementById('writes').textContent)");
    let cells = |row: &str| {
        format!(
            "[...document.querySelectorAll('#volumes tbody tr')].map((r) => r.cells).filter((c) => c[0].textContent === '{row}')"
        )
    };
    browser.wait_for("a holder", &format!("{}[0][10].textContent === 'test'", cells("vol0")));
    for (name, column) in [("reads", 5), ("writes", 6), ("p99 of reads", 8), ("p99 of writes", 9)] {
        let number = format!("/^[1-9]/.test({}[0][{column}].textContent)", cells("vol0"));
        browser.wait_for(&format!("{name} of a volume"), &number);
    }
    browser.wait_for(
        "a heat map",
        "/median .* p99 /.test(document.getElementById('heat-text').textContent)",
    );
    let stages = "/waited for: .*%/.test(document.getElementById('heat-stages').textContent)";
    browser.wait_for("the stages", stages);
    browser.wait_for("events", "document.querySelectorAll('#events li').length >= 2");
    browser.wait_for("sessions", "document.querySelectorAll('#sessions tbody tr').length === 2");
    for width in [320, 420, 1280] {
        browser.show_as(width, false);
        let fits = "document.documentElement.scrollWidth <= innerWidth";
        browser.wait_for(&format!("a page that fits in {width} points"), fits);
    }
    if std::env::var_os("RBLK_PICTURES").is_some() {
        thread::sleep(std::time::Duration::from_secs(45));
    }
    let shapes = [("light", 1280, false), ("dark", 1280, true), ("narrow", 420, false)];
    keep_pictures(&mut browser, "load", &shapes);

    stop.store(true, Ordering::Relaxed);
    loads.into_iter().for_each(|load| drop(load.join().expect("the load")));
    target.kill();
    browser.wait_for("a page that says so", "document.documentElement.dataset.state === 'lost'");
    browser.wait_for("why", &format!("{TEXT}.includes('it crashed, was killed')"));
    let (banner, title) = banner_and_title(&mut browser);
    assert!(banner.contains("has not answered"), "{banner}");
    assert_eq!(title, "● LOST — rblk store1");
    let shown = browser.value(&format!("{}[0][10].textContent", cells("vol0")));
    assert_eq!(shown, "test", "what was there last stays");
    keep_pictures(&mut browser, "lost", &[("light", 1280, false), ("narrow-dark", 420, true)]);

    let before = browser.value("moments.length").as_u64();
    let _again = start_again(dir.path(), &port);
    browser.wait_for("another run", &format!("{TEXT}.includes('other')"));
    let start = browser.value(&newest("start"));
    assert!(start.as_str().is_some_and(|text| text.contains("ended without a word")), "{start}");
    assert_eq!(browser.value("moments.length").as_u64(), before, "the map stays");
    assert_eq!(browser.value("marks.at(-1).text + gaps.length"), "restart1");
    keep_pictures(&mut browser, "back", &[("light", 1280, false)]);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_page_says_that_its_target_drains_and_that_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path());
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    // The client stays, so the drain lasts.
    let mut client = Client::connect(&target.address, "ram0", 1).unwrap();
    client.read(0, 4096);
    browser.wait_for("a second of the past", "moments.length === 1");
    browser.wait_for("the session", "document.querySelectorAll('#sessions tbody tr').length === 1");
    let mut drain = Command::new(program("rblk-target"));
    drain.args(["drain", "--no-wait", "--control-socket"]).arg(&target.socket);
    assert_eq!(run(&mut drain).code, Some(0));
    browser.wait_for("the drain", "document.documentElement.dataset.state === 'draining'");
    let (banner, title) = banner_and_title(&mut browser);
    assert!(banner.contains("draining"), "{banner}");
    assert_eq!(title, "● DRAINING — rblk store1");
    keep_pictures(&mut browser, "drain", &[("light", 1280, false)]);
    client.logout();
    let mut target = target;
    assert_eq!(target.wait(), Some(0));
    browser.wait_for("the last word", "document.documentElement.dataset.end === 'drained'");
    let (banner, title) = banner_and_title(&mut browser);
    assert!(banner.contains("drained and stopped at"), "{banner}");
    assert_eq!(title, "● DRAINED — rblk store1");
    keep_pictures(&mut browser, "drained", &[("light", 1280, false), ("narrow", 420, false)]);
    let _again = start_again(dir.path(), &port);
    browser.wait_for("another run", &format!("{TEXT}.includes('other')"));
    browser.wait_for("a live page", "document.documentElement.dataset.state === 'live'");
    assert_eq!(browser.value("document.getElementById('banner').hidden"), true);
    let start = browser.value(&newest("start"));
    assert!(start.as_str().is_some_and(|text| text.contains("before drained")), "{start}");
    assert_eq!(browser.value("moments.length"), 1, "what was before stays");
    assert!(banner_and_title(&mut browser).1.ends_with("– rblk target"));
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_page_says_that_another_program_took_over() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let http = format!("127.0.0.1:{}", port.number);
    let file = dir.path().join("vol0.img");
    std::fs::File::create(&file).and_then(|f| f.set_len(1 << 20)).unwrap();
    let target = Target::start(
        dir.path(),
        &["--http", &http, "--file", &format!("vol0={}", file.display())],
    );
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    let mut upgrade = Command::new(program("rblk-target"));
    upgrade.args(["upgrade", "--control-socket"]).arg(&target.socket);
    let upgraded = run(&mut upgrade);
    assert_eq!(upgraded.code, Some(0), "{upgraded:?}");
    browser.wait_for("the last word", &format!("{}.includes('upgraded')", newest("end")));
    browser
        .wait_for("the next program", &format!("{}.includes('took over from')", newest("start")));
    browser.wait_for("a live page", "document.documentElement.dataset.state === 'live'");
    assert_eq!(browser.value("marks.at(-1).text"), "upgrade");
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_page_that_opens_late_shows_what_was_before() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path());
    let stop = Arc::new(AtomicBool::new(false));
    let load = load(&target.address, "vol0", &stop);
    thread::sleep(std::time::Duration::from_millis(3500));
    stop.store(true, Ordering::Relaxed);
    load.join().expect("the load").logout();
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    browser.wait_for("the past", "moments.length >= 3");
    let reads = target.status().total.reads;
    let sum = "moments.reduce((sum, { volumes }) => sum + volumes[0].reads, 0)";
    // The last moment is taken a second after the last session.
    browser.wait_for("all of it", &format!("{sum} === {reads}"));
    let bins = "moments.reduce((sum, { volumes }) => sum + volumes[0].read.reduce((n, [, more]) => n + more, 0), 0)";
    assert_eq!(browser.value(bins).as_u64(), Some(reads), "every read has a time");
    browser.wait_for(
        "a peak",
        "/^at most [1-9]/.test(document.getElementById('reads-peak').textContent)",
    );
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Events of every second must not hide a single event.
#[test]
fn events_of_one_kind_hide_none_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let (_target, port) = target(dir.path());
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    let made = "showEvents([
        { number: 1, unix_ms: 1, kind: 'store-error', volume: 'vol0', text: 'the store fails: ENOSPC' },
        { number: 2, unix_ms: 2, kind: 'loss', host: 'db1', text: '<b>gone</b>' },
        ...Array.from({ length: 500 }, (_, n) => ({ number: 3 + n, unix_ms: 3 + n, kind: 'slow-io', text: 'a READ took 151 ms' })),
    ], [{ kind: 'slow-io', total: 9000 }])";
    browser.value(made);
    let kinds = "[...document.querySelectorAll('#events details')].filter((d) => !d.hidden).map((d) => d.querySelector('.kind').textContent + ' ' + d.querySelector('.count').textContent).join(', ')";
    assert_eq!(browser.value(kinds), "store-error 1, slow-io 9000, loss 1, start 1");
    assert_eq!(browser.value("groups.get('slow-io').list.children.length"), 64);
    assert_eq!(
        browser.value(&newest("loss")).as_str().map(|t| t.ends_with("<b>gone</b>")),
        Some(true)
    );
    browser.value("by('events-trouble').click()");
    assert_eq!(browser.value(kinds), "store-error 1, slow-io 9000, loss 1");
    browser.value("by('events-filter').value = 'DB1'; filterEvents()");
    assert_eq!(browser.value(kinds), "loss 1");
    browser.value("by('events-filter').value = 'nothing of it'; filterEvents()");
    assert_eq!(browser.value("by('events-none').hidden"), false);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// A file system in memory. Drop removes it.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        let mounted =
            run(mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(directory.path()));
        assert_eq!(mounted.code, Some(0), "{mounted:?}");
        Self(directory)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_full_store_is_in_the_title_the_badge_and_the_warnings() {
    rblk_tests::nobody::assert_is_root(&["mount", "umount"]);
    let (dir, store) = (tempfile::tempdir().unwrap(), Tmpfs::mount("size=4m"));
    let path = store.0.path().join("vol0.img");
    std::fs::File::create(&path).and_then(|f| f.set_len(16 << 20)).unwrap();
    let port = free_port();
    let http = format!("127.0.0.1:{}", port.number);
    let file = format!("vol0={}", path.display());
    let target = Target::start(dir.path(), &["--http", &http, "--file", &file, "--name", "store1"]);
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    let badge = "document.getElementById('state').textContent";
    assert_eq!(browser.value(badge), "serving");
    keep_pictures(&mut browser, "quiet", &[("light", 1280, false), ("narrow-dark", 420, true)]);
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    let codes: Vec<_> = (0..80).map(|at| client.try_io(IoOp::Write, at << 16, 1 << 16)).collect();
    assert!(codes.contains(&Some(-28)), "{codes:?}");
    browser.wait_for("a full store", &format!("{badge} === 'store full'"));
    assert_eq!(banner_and_title(&mut browser).1, "● STORE FULL — rblk store1");
    let shown = "[...document.querySelectorAll('#warnings li')].map((li) => li.textContent.replace(/[0-9]+s ago/, ''))";
    let shown = browser.value(shown);
    let of_status: Vec<String> = target.status().warnings;
    let shown: Vec<&str> = shown.as_array().unwrap().iter().filter_map(|w| w.as_str()).collect();
    assert!(shown[0].contains("0 %") && shown[0].contains("vol0"), "{shown:?}");
    assert_eq!((shown.len(), shown[0]), (of_status.len(), of_status[0].as_str()), "{of_status:?}");
    for width in [320, 420, 1280] {
        browser.show_as(width, false);
        let fits = "document.documentElement.scrollWidth <= innerWidth";
        browser.wait_for(&format!("a page that fits in {width} points"), fits);
    }
    let shapes = [("light", 1280, false), ("dark", 1280, true), ("narrow", 420, false)];
    keep_pictures(&mut browser, "full", &shapes);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// A page that stays open for weeks keeps nothing of hosts that come and go.
#[test]
fn rows_of_sessions_that_are_gone_are_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let (_target, port) = target(dir.path());
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    let show = |sessions: &str| {
        format!("table('sessions', {sessions}, (n) => n, (n) => Array(8).fill([String(n)]))")
    };
    let kept = "[...rows.keys()].filter((place) => place.startsWith('sessions ')).length";
    let several = |turns: &str, sessions: &str| {
        format!(
            "(() => {{ for (let n = 0; n < {turns}; n += 1) {}; return {kept}; }})()",
            show(sessions)
        )
    };
    // Another session each time, and one that stays.
    assert_eq!(browser.value(&several("1000", "['stays', 'host ' + n]")), 1 + 1 + 60);
    // All sessions at once, and then none of them.
    assert_eq!(browser.value(&several("2", "n ? ['stays'] : [...Array(5000).keys()]")), 1 + 256);
    assert_eq!(browser.value(&several("100", "['stays']")), 1);
    assert_eq!(browser.complaints, Vec::<String>::new());
}
