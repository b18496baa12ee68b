//! A headless Chromium, driven by its DevTools protocol over two pipes: one JSON document, then a
//! zero byte, each way.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::stat::Mode;
use serde_json::{Value, json};

use crate::program::wait_for;

/// How long a whole test may use a browser.
const LIMIT: Duration = Duration::from_secs(180);
/// Names under which a browser is installed. `RBLK_BROWSER` names another.
const NAMES: [&str; 3] = ["chromium-headless-shell", "chromium", "google-chrome"];

/// A browser with one page.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    calls: u64,
    /// Complaints of the page: errors of its script, and violations of its policy.
    pub complaints: Vec<String>,
    // Dropped with the browser. The watchdog then knows that the test has ended.
    _alive: mpsc::Sender<()>,
}

impl Browser {
    /// Starts a browser with its files in the test's directory.
    ///
    /// # Panics
    /// This host has no browser, or the browser does not start.
    #[must_use]
    pub fn start(dir: &Path) -> Self {
        let (requests, answers) = (dir.join("browser.in"), dir.join("browser.out"));
        for pipe in [&requests, &answers] {
            nix::unistd::mkfifo(pipe, Mode::S_IRWXU).expect("a pipe");
        }
        let script =
            "program=$1 in=$2 out=$3; shift 3; exec \"$program\" \"$@\" 3<\"$in\" 4>\"$out\"";
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", &program()]).args([&requests, &answers]);
        command.args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]);
        command.args(["--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]);
        command.arg(format!("--user-data-dir={}", dir.join("browser").display()));
        command.arg("about:blank").stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn().expect("a shell");
        let (alive, watch) = mpsc::channel();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a process id"));
        std::thread::spawn(move || {
            if watch.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        });
        // In the order in which the shell opens them: each open waits for the other end.
        let to = File::options().write(true).open(&requests).expect("the pipe to the browser");
        let from = BufReader::new(File::open(&answers).expect("the pipe from the browser"));
        let mut browser = Self {
            child,
            to,
            from,
            session: None,
            calls: 0,
            complaints: Vec::new(),
            _alive: alive,
        };
        browser.attach();
        browser
    }

    fn attach(&mut self) {
        let targets = self.call("Target.getTargets", &json!({}));
        let all = targets["targetInfos"].as_array().expect("targets");
        let page = all.iter().find(|target| target["type"] == "page").expect("a page");
        let asked = json!({"targetId": page["targetId"], "flatten": true});
        let attached = self.call("Target.attachToTarget", &asked);
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            self.call(domain, &json!({}));
        }
    }

    /// Calls a method of the protocol.
    ///
    /// # Panics
    /// The browser refuses, or does not answer.
    pub fn call(&mut self, method: &str, params: &Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).expect("JSON");
        bytes.push(0);
        self.to.write_all(&bytes).expect("a browser that reads");
        loop {
            let mut answer = self.next();
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].take();
            }
            self.note(&answer);
        }
    }

    fn next(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.from.read_until(0, &mut bytes).expect("an answer");
        assert_eq!(bytes.pop(), Some(0), "the browser ended, or took longer than {LIMIT:?}");
        serde_json::from_slice(&bytes).expect("JSON")
    }

    /// Keeps complaints of the page. A failed request is no complaint: the page reports it to its
    /// user.
    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(params.to_string()),
            Some("Log.entryAdded")
                if params["entry"]["level"] == "error"
                    && params["entry"]["source"] != "network" =>
            {
                self.complaints.push(params.to_string());
            }
            _ => {}
        }
    }

    /// Opens an address.
    pub fn open(&mut self, address: &str) {
        self.call("Page.navigate", &json!({"url": address}));
    }

    /// The value of an expression of JavaScript in the page.
    ///
    /// # Panics
    /// The expression throws.
    pub fn value(&mut self, expression: &str) -> Value {
        self.evaluate(expression).unwrap_or_else(|thrown| panic!("{expression}: {thrown}"))
    }

    fn evaluate(&mut self, expression: &str) -> Result<Value, Value> {
        let asked = json!({"expression": expression, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", &asked);
        match answer["exceptionDetails"].take() {
            Value::Null => Ok(answer["result"]["value"].take()),
            thrown => Err(thrown),
        }
    }

    /// Waits until an expression of JavaScript is true. The expression may throw meanwhile, for
    /// instance while a page loads.
    ///
    /// # Panics
    /// The expression stays false until the deadline.
    pub fn wait_for(&mut self, what: &str, expression: &str) {
        wait_for(what, || (self.evaluate(expression) == Ok(Value::Bool(true))).then_some(()));
    }

    /// Sets the width of the page, in points, and whether it is dark.
    pub fn show_as(&mut self, width: u32, dark: bool) {
        let size = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", &size);
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", &media);
    }

    /// A picture of the whole page: the text of its PNG in base64.
    #[must_use]
    pub fn picture(&mut self) -> String {
        let asked = json!({"format": "png", "captureBeyondViewport": true});
        let answer = self.call("Page.captureScreenshot", &asked);
        answer["data"].as_str().unwrap_or_default().to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program of a browser.
fn program() -> String {
    if let Ok(named) = std::env::var("RBLK_BROWSER") {
        return named;
    }
    let is_there = |name: &&&str| {
        let mut command = Command::new(name);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let found = NAMES.iter().find(is_there).copied();
    found.unwrap_or_else(|| panic!("there is no browser; `apt install {}`", NAMES[0])).to_owned()
}
