//! [`Remembered`]: whether the state directory holds the records that the next program needs to
//! serve the mounts of this one.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::control::persist::Persister;

/// How long a state directory may take to answer.
const LOOK_TIME: Duration = Duration::from_secs(10);

/// The answer of the thread that writes the records, which compares them with those on the disk.
#[derive(Debug)]
pub(in crate::control) struct Remembered {
    answer: Receiver<Result<(), String>>,
}

impl Remembered {
    /// Begins to compare the state directory with the records of this run.
    pub(in crate::control) fn begin(persister: &Persister) -> Self {
        let (reply, answer) = channel();
        persister.compare(reply);
        Self { answer }
    }

    /// Whether every record is as this run wrote it. Blocks as long as the file system does, for 10
    /// s at most.
    ///
    /// # Errors
    /// The records that are missing or changed, and the consequence.
    pub(in crate::control) fn is_on_disk(&self) -> Result<(), String> {
        let answer = self.answer.recv_timeout(LOOK_TIME);
        let answer = answer.unwrap_or_else(|_| {
            Err(format!(
                "the directory of records (state_dir) does not answer within {LOOK_TIME:?}"
            ))
        });
        answer.map_err(|why| {
            format!(
                "{why}: after a start mounts would be refused (fenced), or would report a loss. Put the former files \
                 back, or use --force"
            )
        })
    }
}
