//! [`Screen`]: plain text that is drawn again and again on a terminal, until `q` or ctrl-C.
//!
//! Where standard output is no terminal, the frames come one after the other. The terminal is set
//! back when the screen is dropped.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};

/// ctrl-C, where it is a key like others.
const CTRL_C: u8 = 3;
/// To the first line, and nothing below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Where a text is drawn. See the module.
pub struct Screen {
    // As the terminal was; none where this is not drawn on one.
    before: Option<Termios>,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("on_terminal", &self.before.is_some()).finish()
    }
}

impl Screen {
    /// This program's terminal, if input and output are one.
    #[must_use]
    pub fn open() -> Self {
        let is_one = io::stdin().is_terminal() && io::stdout().is_terminal();
        let before = is_one.then(|| tcgetattr(io::stdin()).ok()).flatten();
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.local_flags &= !(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
            raw.control_chars[SpecialCharacterIndices::VMIN as usize] = 0;
            raw.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
            // Without it, q and ctrl-C need a newline and a signal.
            let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &raw);
        }
        Self { before }
    }

    /// No terminal: what is drawn comes one after the other.
    #[must_use]
    pub fn lines() -> Self {
        Self { before: None }
    }

    /// Draws a text in the place of the last one.
    ///
    /// # Errors
    /// The output is closed.
    pub fn draw(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.before.is_some() {
            out.write_all(CLEAR.as_bytes())?;
        }
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Waits so long for a key. Returns whether it is `q` or ctrl-C.
    ///
    /// # Errors
    /// The input broke.
    pub fn wants_to_quit(&self, within: Duration) -> io::Result<bool> {
        if self.before.is_none() {
            std::thread::sleep(within);
            return Ok(false);
        }
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let stdin = io::stdin();
            let mut polled = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            match nix::poll::poll(&mut polled, timeout) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let mut keys = [0; 16];
            let count = nix::unistd::read(stdin.as_fd(), &mut keys)?;
            // Without a byte the terminal is gone.
            if count == 0 || keys[..count].iter().any(|key| matches!(*key, b'q' | CTRL_C)) {
                return Ok(true);
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, before);
        }
    }
}
