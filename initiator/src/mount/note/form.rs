//! The form of notes: a JSON object with a number that changes when an older program must not use a
//! newer note, or the reverse. [`Note`](super::Note) and
//! [`GuestNote`](super::guest::GuestNote) are read by this. Each checks its own fields:
//! another version may have written them, or they may be damaged.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use rblk_protocol::width::wide64;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Limit of the length of a note.
pub(super) const LEN_MAX: u64 = 64 << 10;

/// The bytes of a note. The directory may belong to another user: links are not followed, and the
/// open does not block.
///
/// # Errors
/// The system's, or the note is too long.
pub(super) fn load(path: &Path) -> io::Result<Vec<u8>> {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut text = Vec::new();
    file.take(LEN_MAX + 1).read_to_end(&mut text)?;
    if wide64(text.len()) > LEN_MAX {
        return Err(io::Error::other("it is too long"));
    }
    Ok(text)
}

/// Parses a note of that form.
///
/// # Errors
/// The text is no note, or has another form.
pub(super) fn parse<N: DeserializeOwned>(text: &[u8], form: u32) -> Result<N, String> {
    #[derive(Deserialize)]
    struct NoteHead {
        form: u32,
    }
    let head: NoteHead = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if head.form != form {
        return Err(format!("its form is {}, and this program knows {form}", head.form));
    }
    serde_json::from_slice(text).map_err(|error| error.to_string())
}
