//! The faults of a configuration: place, cause and fix.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::Exit;

/// Most characters of a value in a message.
const VALUE_CHARS_MAX: usize = 80;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file could not be read.
    #[error("{}: cannot read: {error}{}", path.display(), read_fix(error))]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// A file is not TOML.
    #[error("{site}: not TOML: {problem}")]
    Syntax {
        /// Where the parser stopped.
        site: Site,
        /// The error of the parser.
        problem: String,
    },
    /// One or more keys are wrong. One line each, in the order of the files.
    #[error("{}", lines(faults))]
    Invalid {
        /// At least one fault.
        faults: Vec<Fault>,
    },
    /// A value cannot be written as TOML.
    #[error("cannot be written as TOML: {0}")]
    Dump(String),
}

impl ConfigError {
    /// The exit code of a program that stops for this.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Read { error, .. } if error.kind() == io::ErrorKind::PermissionDenied => {
                Exit::NotPermitted
            }
            _ => Exit::Usage,
        }
    }
}

/// A place in a file. Lines and columns count from 1, columns in characters.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Site {
    /// The file, as the loader was given it.
    pub file: PathBuf,
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file.display(), self.line, self.column)
    }
}

/// One key that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Where it is. `None` for a default or a value of the command line.
    pub site: Option<Site>,
    /// The flag that gave the value, such as `--max-io`.
    pub flag: Option<String>,
    /// Path of the key, such as `max_io` or `volume[2].size`.
    pub key: String,
    /// The value as TOML, if there is one.
    pub value: Option<String>,
    /// The cause.
    pub problem: String,
    /// The fix: the text to write instead.
    pub fix: String,
    /// Path of the other key, if two keys are in conflict.
    pub other: Option<String>,
    /// Where the other key is.
    pub other_site: Option<Site>,
    /// The name of the key is wrong, not its value.
    pub(crate) at_key: bool,
    /// Further keys that decide whether the value is a fault.
    pub(crate) rests: &'static [&'static str],
    /// The other keys of the same table decide it.
    pub(crate) rests_beside: bool,
}

impl Fault {
    /// A value that is wrong.
    pub(crate) fn new(
        key: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            site: None,
            flag: None,
            key: key.into(),
            value: None,
            problem: problem.into(),
            fix: fix.into(),
            other: None,
            other_site: None,
            at_key: false,
            rests: &[],
            rests_beside: false,
        }
    }

    /// Adds the value, as TOML. A long value is cut. A secret key is never shown: messages are
    /// shown in terminals and kept in logs.
    pub(crate) fn value(mut self, value: impl Into<toml::Value>) -> Self {
        let mut text = value.into().to_string();
        if text.contains("rblk1-secret") {
            "(a secret key)".clone_into(&mut text);
        }
        let cut = text.char_indices().nth(VALUE_CHARS_MAX).map(|(cut, _)| cut);
        self.value = Some(cut.map_or(text.clone(), |cut| format!("{}...", &text[..cut])));
        self
    }

    /// Adds the other key of a conflict.
    pub(crate) fn other(mut self, key: impl Into<String>) -> Self {
        self.other = Some(key.into());
        self
    }

    /// Names the other keys that decide whether the value is a fault.
    pub(crate) fn rests_on(mut self, keys: &'static [&'static str]) -> Self {
        self.rests = keys;
        self
    }

    /// Says that the name of the key is wrong.
    pub(crate) fn at_key(mut self) -> Self {
        self.at_key = true;
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(site) = &self.site {
            write!(f, "{site}: ")?;
        }
        match (&self.flag, &self.value) {
            // A flag without a value sets its key to `true`.
            (Some(flag), None) => write!(f, "{flag}")?,
            (Some(flag), Some(value)) if value == "true" => write!(f, "{flag}")?,
            (Some(flag), Some(value)) => write!(f, "{flag} {}", value.trim_matches('"'))?,
            (None, value) => {
                // A quoted key may have any character, and terminals and logs show messages.
                write!(f, "{}", self.key.escape_debug())?;
                if let Some(value) = value {
                    write!(f, " = {value}")?;
                }
            }
        }
        write!(f, ": {}", self.problem)?;
        if let Some(site) = &self.other_site {
            write!(f, " (at {site})")?;
        }
        write!(f, "; {}", self.fix)
    }
}

fn lines(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn read_fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; create the file, or name another one with --config",
        io::ErrorKind::PermissionDenied => "; run as root, or make the file readable",
        io::ErrorKind::IsADirectory => "; name a file in the directory",
        _ => "",
    }
}
