//! Handing a target over to another program in the same process: the message from one to the other,
//! and the exec.
//!
//! ```text
//! old program                                             new program
//! check: can the other one take over? (ask.rs, check.rs)
//! drain, everything durable, nothing at risk
//! note: HandOver, in the environment (this file)
//! papers: configurations and stores, in memory (papers.rs)
//! sockets and stores left open over exec (sockets.rs)
//! exec (program.rs) ------------------------------------> takes note, papers, sockets and stores,
//!                                                         starts with the judged configuration
//!                                                         cannot start: exec of the old program,
//!                                                         by the note's descriptor: it starts
//!                                                         with the configuration that ran
//! ```
//!
//! Rules:
//! - The note is for one process. A process that finds the note of another one, such as its child,
//!   ignores it.
//! - The note is checked against the system. A socket that does not listen is made anew. A store
//!   that differs from the note keeps the program from starting.
//! - Open files are handed over, and never looked up a second time: so both programs can serve,
//!   even if the paths or the files of the configuration have changed by then.
//! - A program reads the forms of [`FORMS`]. Fields are added, with a default; a field that changes
//!   its meaning is a new form.
//!
//! | form | stores | configuration |
//! | --- | --- | --- |
//! | 1 | are opened by their paths | is read from its files |
//! | 2 | are left open | is in the papers |

mod ask_program;
mod can_take_over;
mod papers;
mod program;
mod sockets;

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use papers::are_possible;

pub use ask_program::ask_program;
pub use can_take_over::{CHECK_FLAG, Checked, CheckedVolume, judge};
pub use program::Successor;
pub(crate) use program::{Leaves, can_hand_over};
pub use sockets::Inherited;
pub(crate) use sockets::{name_of_control, name_of_http};

/// The forms of a note that this program reads, the oldest and the newest. It writes the newest.
pub const FORMS: [u32; 2] = [1, 2];
/// Longest note: the kernel allows 128 KiB for a variable.
const NOTE_MAX: usize = 96 << 10;

/// A time that both programs can read: nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClockMoment(pub u64);

impl ClockMoment {
    /// The present time; 0 if the system has no such clock.
    #[must_use]
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
        Self(u64::try_from(time.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The time from `earlier` to this moment.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A socket that stays open over the exec.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Listening {
    /// The address, as the configuration names it.
    pub address: String,
    /// The number of its descriptor.
    pub descriptor: i32,
}

/// A session that had volumes open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mounted {
    /// The session's host.
    pub host: String,
    /// Its open volumes, in alphabetical order.
    pub volumes: Vec<String>,
    /// Whether it had I/O connections.
    pub queues: bool,
}

/// The message of a program of a target to the next one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HandOver {
    /// The form of this note.
    pub form: u32,
    /// The process that the note is for.
    pub pid: u32,
    /// The version of the program that wrote it.
    pub version: String,
    /// When the mounts got the event: the begin of the pause.
    pub told: ClockMoment,
    /// The sockets that stay open.
    #[serde(default)]
    pub sockets: Vec<Listening>,
    /// The sessions that had volumes open at that time. Only the first of very many.
    #[serde(default)]
    pub mounts: Vec<Mounted>,
    /// Sessions that had not left in time.
    #[serde(default)]
    pub stayed: usize,
    /// Commands without a reply: their mounts send them again.
    #[serde(default)]
    pub unanswered: u64,
    /// All acknowledged data was made durable.
    #[serde(default)]
    pub clean: bool,
    /// The descriptor of the file with the configurations and the stores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub papers: Option<i32>,
    /// The descriptor of the old program's file, to go back to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back: Option<i32>,
    /// Why the other program could not take over: the reader is the old one again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl HandOver {
    /// The note as text. Of very many mounts, as many as fit.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut note = self.clone();
        loop {
            let text = serde_json::to_string(&note).unwrap_or_default();
            if text.len() <= NOTE_MAX || note.mounts.is_empty() {
                return text;
            }
            note.mounts.truncate(note.mounts.len() / 2);
        }
    }

    /// The note in that text, if it is for this process.
    ///
    /// # Errors
    /// The note is of another form, or its content is impossible.
    pub fn from_text(text: &str, pid: u32) -> Result<Option<Self>, String> {
        #[derive(Deserialize)]
        struct FormHead {
            form: u32,
            pid: u32,
        }
        if text.len() > NOTE_MAX {
            return Err(format!("a note of {} bytes", text.len()));
        }
        let head: FormHead = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if head.pid != pid {
            return Ok(None);
        }
        if !(FORMS[0]..=FORMS[1]).contains(&head.form) {
            return Err(format!(
                "a note of form {}; this program reads {} to {}",
                head.form, FORMS[0], FORMS[1]
            ));
        }
        let note: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let mut numbers = note.descriptors();
        if !are_possible(&mut numbers) {
            return Err(format!("a note with impossible descriptors: {numbers:?}"));
        }
        Ok(Some(note))
    }

    /// The descriptors that the note names.
    fn descriptors(&self) -> Vec<i32> {
        let sockets = self.sockets.iter().map(|socket| socket.descriptor);
        sockets.chain(self.papers).chain(self.back).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> HandOver {
        HandOver {
            form: 1,
            pid: 77,
            version: "1.2.3".to_owned(),
            told: ClockMoment(5),
            sockets: vec![Listening { address: "tcp://[::]:7721".to_owned(), descriptor: 9 }],
            mounts: vec![Mounted {
                host: "db1".to_owned(),
                volumes: vec!["a".to_owned()],
                queues: true,
            }],
            back: Some(4),
            ..HandOver::default()
        }
    }

    #[test]
    fn a_note_comes_back_as_it_was_and_only_to_its_process() {
        let text = note().to_text();
        assert_eq!(HandOver::from_text(&text, 77), Ok(Some(note())));
        assert_eq!(HandOver::from_text(&text, 78), Ok(None));
        // Fields that a later version adds are ignored, and fields that it leaves out have a
        // default.
        let later = r#"{"form":2,"pid":77,"version":"9","told":1,"more":[1]}"#;
        let read = HandOver::from_text(later, 77).unwrap().unwrap();
        assert_eq!((read.told, read.sockets.len(), read.back), (ClockMoment(1), 0, None));
    }

    #[test]
    fn an_impossible_note_is_refused() {
        for (text, why) in [
            ("", "EOF"),
            (r#"{"form":3,"pid":77,"version":"9","told":1}"#, "form 3"),
            (r#"{"form":0,"pid":77,"version":"9","told":1}"#, "form 0"),
            (r#"{"form":1,"pid":77}"#, "version"),
            (r#"{"form":1,"pid":77,"version":"9","told":1,"back":2}"#, "descriptors"),
            (
                r#"{"form":1,"pid":77,"version":"9","told":1,"back":9,"sockets":[{"address":"a","descriptor":9}]}"#,
                "descriptors",
            ),
            (r#"{"form":2,"pid":77,"version":"9","told":1,"back":9,"papers":9}"#, "descriptors"),
        ] {
            let error = HandOver::from_text(text, 77).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        // A note of another process is not examined.
        assert_eq!(HandOver::from_text(r#"{"form":9,"pid":1}"#, 77), Ok(None));
    }

    #[test]
    fn a_note_of_very_many_mounts_fits() {
        let mount =
            Mounted { host: "h".repeat(64), volumes: vec!["v".repeat(64); 4], queues: true };
        let note = HandOver { mounts: vec![mount; 1024], ..note() };
        let text = note.to_text();
        assert!(text.len() <= NOTE_MAX, "{}", text.len());
        let read = HandOver::from_text(&text, 77).unwrap().unwrap();
        assert!(read.mounts.len() >= 128, "{}", read.mounts.len());
    }

    #[test]
    fn a_moment_is_of_one_clock() {
        let earlier = ClockMoment::now();
        let later = ClockMoment::now();
        assert!(earlier.0 > 0 && later >= earlier);
        assert_eq!(earlier.since(ClockMoment(earlier.0 + 5)), Duration::ZERO);
    }
}
