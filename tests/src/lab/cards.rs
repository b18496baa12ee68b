//! [`Cards`]: devices that behave like cards that nobody here has.
//!
//! A library that is preloaded into both daemons (`cards.c`) changes what verbs answer, and writes
//! down what the programs ask of a card. The programs are those that users have.

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
    /// That cannot be done.
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

    /// What a daemon has to have in its environment.
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
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let begin = format!("{program} ");
        log.lines().filter_map(|line| line.strip_prefix(&begin)).map(str::to_owned).collect()
    }

    /// What a program asked so far: the lines with its name that begin with `call`, without both.
    #[must_use]
    pub fn asked(&self, program: &str, call: &str) -> Vec<String> {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let begin = format!("{program} {call} ");
        log.lines().filter_map(|line| line.strip_prefix(&begin)).map(str::to_owned).collect()
    }
}
