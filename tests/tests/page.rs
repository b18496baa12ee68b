//! The live page in a real browser, of a real target: under load, while it drains, and when it is
//! killed.
//!
//! `RBLK_PICTURES` names a directory for pictures of the page.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rblk_fabric::Address;
use rblk_tests::bed::pattern;
use rblk_tests::browser::Browser;
use rblk_tests::program::{Client, FreePort, Target, free_port, program, run};

/// A target with a file and a memory, and the port of its page.
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

/// Keeps pictures where somebody wants them.
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

#[test]
fn a_page_under_load_shows_rates_latencies_and_that_its_target_died() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, port) = target(dir.path());
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    browser.wait_for("an empty table", &format!("{TEXT}.includes('No host is connected.')"));
    let stop = Arc::new(AtomicBool::new(false));
    let loads = ["vol0", "ram0"].map(|volume| load(&target.address, volume, &stop));
    // Of the page's own numbers: "1.2k/s".
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
    let banner = browser.value("document.getElementById('banner').innerText");
    assert!(banner.as_str().is_some_and(|text| text.contains("has not answered")), "{banner}");
    let shown = browser.value(&format!("{}[0][10].textContent", cells("vol0")));
    assert_eq!(shown, "test", "what was there last stays");
    keep_pictures(&mut browser, "lost", &[("light", 1280, false), ("narrow-dark", 420, true)]);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_page_says_that_its_target_drains_and_that_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (target, port) = target(dir.path());
    let mut browser = Browser::start(dir.path());
    open(&mut browser, &port);
    // It stays, so the drain lasts.
    let client = Client::connect(&target.address, "ram0", 1).unwrap();
    browser.wait_for("the session", "document.querySelectorAll('#sessions tbody tr').length === 1");
    let mut drain = Command::new(program("rblk-target"));
    drain.args(["drain", "--no-wait", "--control-socket"]).arg(&target.socket);
    assert_eq!(run(&mut drain).code, Some(0));
    browser.wait_for("the drain", "document.documentElement.dataset.state === 'draining'");
    let banner = browser.value("document.getElementById('banner').innerText");
    assert!(banner.as_str().is_some_and(|text| text.contains("draining")), "{banner}");
    keep_pictures(&mut browser, "drain", &[("light", 1280, false)]);
    drop(client);
    drop(target);
    browser.wait_for("the end", "document.documentElement.dataset.state === 'lost'");
    let http = format!("127.0.0.1:{}", port.number);
    let again = dir.path().join("again");
    std::fs::create_dir(&again).unwrap();
    let _target = Target::start(&again, &["--http", &http, "--memory", "other=1MiB"]);
    browser.wait_for("another run", &format!("{TEXT}.includes('other')"));
    browser.wait_for("a live page", "document.documentElement.dataset.state === 'live'");
    assert_eq!(browser.value("document.getElementById('banner').hidden"), true);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Hosts that come and go leave nothing in a page that stays open for weeks.
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
    // All at once, and then none of them.
    assert_eq!(browser.value(&several("2", "n ? ['stays'] : [...Array(5000).keys()]")), 1 + 256);
    assert_eq!(browser.value(&several("100", "['stays']")), 1);
    assert_eq!(browser.complaints, Vec::<String>::new());
}
