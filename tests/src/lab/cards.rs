//! [`Cards`]: devices that behave like cards that this machine lacks.
//!
//! A library that is preloaded into both daemons (`cards.c`) changes the answers of verbs, and logs
//! the calls. The programs are the ones that users run.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

const SOURCE: &str = include_str!("cards.c");

/// The library, compiled, with its plan and its log.
#[derive(Debug)]
pub struct Cards {
    library: PathBuf,
    log: PathBuf,
    plan: String,
}

impl Cards {
    /// Compiles the library. `plan`: the behaviours, as the head of `cards.c` has them.
    ///
    /// # Panics
    /// The compiler fails.
    #[must_use]
    pub fn new(lab: &Lab, plan: &str) -> Self {
        let [source, library, log] = ["cards.c", "cards.so", "cards.log"].map(|n| lab.path(n));
        std::fs::write(&source, SOURCE).expect("writing the source");
        let words = ["cc", "-O1", "-shared", "-fPIC", "-o"].map(str::to_owned);
        let files = [&library, &source].map(|path| path.display().to_string());
        let _ = start(&[&words[..], &files].concat()).finish(2 * DEADLINE).ok();
        let _ = std::fs::remove_file(&log);
        Self { library, log, plan: plan.to_owned() }
    }

    /// Environment variables that preload the library into a daemon.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("LD_PRELOAD", self.library.display().to_string()),
            ("RBLK_CARDS", self.plan.clone()),
            ("RBLK_CARDS_LOG", self.log.display().to_string()),
        ]
    }

    /// Everything that a program asked so far, in order, without its name.
    #[must_use]
    pub fn all_of(&self, program: &str) -> Vec<String> {
        self.lines(&format!("{program} "))
    }

    /// The calls of one kind that a program made so far, without the program's name and the call's.
    #[must_use]
    pub fn asked(&self, program: &str, call: &str) -> Vec<String> {
        self.lines(&format!("{program} {call} "))
    }

    /// The lines that start with `begin`, without it. None before a program has made the log.
    fn lines(&self, begin: &str) -> Vec<String> {
        let Ok(mut log) = File::open(&self.log) else { return Vec::new() };
        let (mut end, mut text) = ([0; 8], Vec::new());
        if log.read_exact(&mut end).is_ok() {
            log.take(u64::from_ne_bytes(end)).read_to_end(&mut text).expect("reading the log");
        }
        // A killed program leaves zeros where its last lines would be.
        let text = String::from_utf8_lossy(&text);
        let lines = text.split(['\n', '\0']).filter_map(|line| line.strip_prefix(begin));
        lines.map(str::to_owned).collect()
    }
}
