//! [`CallFailure`]: the reason why a call failed, as an errno and in plain words. [`rblk_error`]
//! returns the words of each thread's last failure.

use std::cell::RefCell;
use std::ffi::c_char;
use std::fmt::{self, Write};

use rblk_client::Reason;

/// The reason why a call failed.
#[derive(Debug)]
pub(crate) struct CallFailure {
    errno: i32,
    why: FailureText,
}

/// The words. Requests are refused without an allocation.
#[derive(Debug)]
enum FailureText {
    Words(&'static str),
    Text(String),
    Refused(Reason),
}

impl CallFailure {
    /// A failure with constant words.
    pub(crate) fn new(errno: i32, words: &'static str) -> Self {
        Self { errno, why: FailureText::Words(words) }
    }

    /// A failure with the words of an error.
    pub(crate) fn of(errno: i32, error: &dyn fmt::Display) -> Self {
        Self { errno, why: FailureText::Text(error.to_string()) }
    }

    /// A failure that only a mistake of the program can cause.
    pub(crate) fn misuse(words: &'static str) -> Self {
        Self::new(libc::EINVAL, words)
    }

    /// Keeps the words for [`rblk_error`]. Returns the negative errno.
    pub(crate) fn tell(&self) -> i32 {
        LAST.with_borrow_mut(|last| last.set(&self.why));
        -self.errno
    }
}

impl From<Reason> for CallFailure {
    fn from(reason: Reason) -> Self {
        let errno = match reason {
            Reason::Full { .. } => libc::EAGAIN,
            _ => libc::EINVAL,
        };
        Self { errno, why: FailureText::Refused(reason) }
    }
}

impl fmt::Display for FailureText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Words(words) => f.write_str(words),
            Self::Text(text) => f.write_str(text),
            Self::Refused(reason) => reason.fmt(f),
        }
    }
}

/// Bytes of the longest text, with the zero at its end. The rest of a longer one is cut off.
const TEXT_MAX: usize = 2048;

thread_local! {
    static LAST: RefCell<LastErrorText> =
        const { RefCell::new(LastErrorText { bytes: [0; TEXT_MAX], len: 0 }) };
}

/// A text that ends with a zero, in a place that does not move.
struct LastErrorText {
    bytes: [u8; TEXT_MAX],
    len: usize,
}

impl LastErrorText {
    fn set(&mut self, why: &FailureText) {
        self.len = 0;
        // The write never fails: text beyond the buffer is cut off.
        let _ = write!(self, "{why}");
        self.bytes[self.len] = 0;
    }
}

impl Write for LastErrorText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            // C would take it for the end.
            let character = if character == '\0' { ' ' } else { character };
            let end = self.len + character.len_utf8();
            if end >= TEXT_MAX {
                break;
            }
            character.encode_utf8(&mut self.bytes[self.len..end]);
            self.len = end;
        }
        Ok(())
    }
}

/// The words of the last failure of this thread, or an empty text.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rblk_error() -> *const c_char {
    // The memory is the thread's until the thread ends. A thread that is ending has no words.
    LAST.try_with(|last| last.as_ptr().cast_const()).map_or(c"".as_ptr(), |text| {
        // SAFETY: `text` points to a living value, and it is borrowed for no longer than a call.
        unsafe { (&raw const (*text).bytes).cast() }
    })
}

/// The version of the library.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rblk_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> &'static str {
        // SAFETY: the text of this thread, and it ends with a zero.
        unsafe { CStr::from_ptr(rblk_error()) }.to_str().unwrap()
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        assert_eq!(last(), "");
        assert_eq!(CallFailure::new(5, "first, and longer").tell(), -5);
        assert_eq!(CallFailure::from(Reason::Full { depth: 3 }).tell(), -libc::EAGAIN);
        assert!(last().starts_with("the queue has 3 requests"), "{}", last());
        assert!(!last().contains("longer"));
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(CallFailure::of(1, &"a\0b").tell(), -1);
        assert_eq!(last(), "a b");
    }

    #[test]
    fn a_text_without_end_is_cut_between_characters() {
        let long = "\u{fc}".repeat(TEXT_MAX);
        CallFailure::of(1, &long).tell();
        assert_eq!(last(), &long[..TEXT_MAX - 2]);
    }
}
