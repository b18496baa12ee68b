//! [`Output`]: the form in which a command of `rblk-target` and `rblk-initiator` answers.
//!
//! | form | standard output | standard error |
//! | --- | --- | --- |
//! | `table` | the answer as text | warnings and hints; an error as `PROGRAM: TEXT` |
//! | `json` | the answer as one JSON document | nothing, or one line: the error as an object |
//!
//! A command that goes on (`top`, `events`, `trace`) prints a document on each line. The object of
//! an error is `{"error": "...", "exit_code": N}`, and it is there whenever the exit code is not 0,
//! also beside a document. The document also holds the warnings that people read on the standard
//! error.
//!
//! An answer that cannot be written is an error ([`CannotPrint`]), never a panic. A failed write to
//! the standard error is ignored.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::str::FromStr;

use serde::Serialize;

use rblk_config::Exit;

/// Form of the answer of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

impl FromStr for Output {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Table),
            // Of commands that go on, in older scripts.
            "json" | "json-lines" => Ok(Self::Json),
            _ => Err("write \"table\" or \"json\"".to_owned()),
        }
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Table => "table",
            Self::Json => "json",
        })
    }
}

/// The standard output did not take the answer.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the answer to the standard output: {0}")]
pub struct CannotPrint(#[from] io::Error);

/// An error, in JSON.
#[derive(Serialize)]
struct ErrorDocument<'e> {
    error: &'e str,
    exit_code: u8,
}

impl Output {
    /// The form that a command line asks for, where its parser refused it.
    pub fn of_words(words: impl IntoIterator<Item = OsString>) -> Self {
        let mut output = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(text) = word.to_str() else { continue };
            let value = match text {
                "-o" | "--output" => words.next(),
                _ => text
                    .strip_prefix("--output=")
                    .or_else(|| text.strip_prefix("-o").map(|v| v.strip_prefix('=').unwrap_or(v)))
                    .map(OsString::from),
            };
            let value = value.as_deref().and_then(OsStr::to_str);
            output = value.and_then(|value| value.parse().ok()).unwrap_or(output);
        }
        output
    }

    /// Whether programs read the answer.
    #[must_use]
    pub fn is_json(self) -> bool {
        self == Self::Json
    }

    /// Prints the answer: a document for programs, a text for people.
    ///
    /// # Errors
    /// The standard output did not take it.
    pub fn answer(
        self,
        document: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), CannotPrint> {
        match self {
            Self::Table => print(&text()),
            Self::Json => print(&serde_json::to_string_pretty(document).map_err(io::Error::from)?),
        }
    }

    /// Prints one of several answers: a document on a line, or a text.
    ///
    /// # Errors
    /// The standard output did not take it.
    pub fn item(
        self,
        document: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), CannotPrint> {
        match self {
            Self::Table => print(&text()),
            Self::Json => print(&serde_json::to_string(document).map_err(io::Error::from)?),
        }
    }

    /// Prints a configuration: its TOML, or the same as JSON.
    ///
    /// # Errors
    /// The standard output did not take it, or the text is no TOML.
    pub fn toml(self, text: &str) -> Result<(), CannotPrint> {
        match self {
            Self::Table => print(text),
            Self::Json => {
                self.answer(&text.parse::<toml::Table>().map_err(io::Error::other)?, String::new)
            }
        }
    }

    /// Prints a part of an answer for people. Programs find it in the document.
    ///
    /// # Errors
    /// The standard output did not take it.
    pub fn text(self, text: impl fmt::Display) -> Result<(), CannotPrint> {
        match self {
            Self::Table => print(&text.to_string()),
            Self::Json => Ok(()),
        }
    }

    /// Tells people something beside the answer: a warning, a hint, how far it is. Programs find
    /// the relevant parts in the document.
    pub fn aside(self, text: impl fmt::Display) {
        if self == Self::Table {
            to_stderr(&text.to_string());
        }
    }

    /// The end of a program whose command line its parser did not take: `asked` for help or the
    /// version, or wrong. `show` prints the text in the form of the parser.
    pub fn end_of_parser(
        program: &str,
        asked: bool,
        text: &str,
        show: impl FnOnce() -> io::Result<()>,
    ) -> ExitCode {
        let output = Self::of_words(std::env::args_os());
        if asked {
            return match show().and_then(|()| io::stdout().flush()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    let error = CannotPrint(error).to_string();
                    output.end(program, Exit::Failure, Some(&error))
                }
            };
        }
        if output.is_json() {
            // The first paragraph. The usage and the hints below it are for people.
            let first = text.split("\n\n").next().unwrap_or_default();
            let error = first.strip_prefix("error: ").unwrap_or(first).trim();
            return output.end(program, Exit::Usage, Some(error));
        }
        let _ = show();
        Exit::Usage.into()
    }

    /// The end of a command of that program. The error is `None` where the answer says why the exit
    /// code is not 0.
    #[must_use]
    pub fn end(self, program: &str, exit: Exit, error: Option<&str>) -> ExitCode {
        match (self, error) {
            (Self::Table, Some(error)) => to_stderr(&format!("{program}: {error}")),
            (Self::Json, error) if exit != Exit::Ok => {
                let error = error.unwrap_or(exit.meaning());
                let failure = ErrorDocument { error, exit_code: exit.code() };
                to_stderr(&serde_json::to_string(&failure).unwrap_or_default());
            }
            _ => {}
        }
        exit.into()
    }
}

/// Whether a stream may have colours: a terminal with colours, and `NO_COLOR` is not set.
#[must_use]
pub fn wants_colour(stream: &impl IsTerminal) -> bool {
    let asks_for_none = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let can = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
    stream.is_terminal() && can && !asks_for_none
}

fn print(text: &str) -> Result<(), CannotPrint> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.is_empty() && !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

fn to_stderr(text: &str) {
    // There is no other place to say that this failed.
    let _ = writeln!(io::stderr(), "{}", text.trim_end_matches('\n'));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_found_where_the_parser_gave_up() {
        let of = |line: &str| Output::of_words(line.split(' ').map(OsString::from));
        for json in ["x -o json", "x --output json y", "x --output=json", "x -ojson", "x -o=json"] {
            assert_eq!(of(json), Output::Json, "{json}");
        }
        for table in ["x", "x -o", "x -o table", "x -o jsom", "x --outputs json", "x json"] {
            assert_eq!(of(table), Output::Table, "{table}");
        }
        assert_eq!(of("x -o json-lines"), Output::Json);
    }
}
